"""What test.py evaluates, and where its results go."""

import math
from collections.abc import Callable, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from lightning.fabric import Fabric
from simple_parsing import replace

from runtime import config_file
from runtime.checkpoints import checkpoints_of, is_whole, load
from runtime.errors import ConfigError, RunError
from runtime.files import as_run_error, atomically, write_json
from runtime.launch import build_fabric, build_in_turn, launch
from runtime.loader import fingerprint
from runtime.loggers import scalars_of
from runtime.options import as_config_error, marked, values_of
from runtime.ranks import check_ranks, gather_batches
from runtime.resume import copied
from runtime.source import changed_files
from runtime.terminal import say


class Outputs:
    """What compute_loss has returned for the metrics, batch by batch; on the CPU, if it is kept."""

    def __init__(self, is_kept: bool):
        self.is_kept = is_kept
        self.kept: list = []
        self.num_rows = 0  # of the first output that has any

    def append(self, outputs: tuple):
        rows = [len(output) for output in outputs if isinstance(output, Sized) and getattr(output, "ndim", True)]
        self.num_rows += sum(rows[:1])
        if self.is_kept:
            self.kept.append([output.cpu() for output in outputs])


@dataclass
class EvalRun:
    """A checkpoint to evaluate, the options it was trained with, and the samples."""

    fabric: Fabric
    config: Any  # of test.py
    train_config: Any
    path: Path  # of the checkpoint
    checkpoint: dict
    dataset: Any

    @property
    def micro_batch_size(self) -> int:
        """That of the training."""
        trained = self.train_config
        return self.checkpoint.get("micro_batch_size", trained.micro_batch_size or trained.effective_batch_size)

    def load_weights(self, model: torch.nn.Module):
        """Loads the weights that the checkpoint has of state["model"]."""
        with as_config_error(self.config, "checkpoint"):
            model.load_state_dict(self.checkpoint.get("model", self.checkpoint))  # model.pt has the weights alone

    def report(self, results: dict, outputs: Outputs):
        """Prints the results, and writes them into the run. Says so if the outputs do not have one row for each sample,
        or several.

        Raises:
            RunError: They do not, and predictions were asked for.
        """
        num_samples = len(self.dataset)
        num_rows = sum(gather_batches([outputs.num_rows]))
        num_rows = self.fabric.broadcast(num_rows)
        is_whole = num_rows % num_samples == 0
        if self.fabric.is_global_zero:
            self.write(results, num_samples if is_whole else num_rows)
        if not is_whole:
            say(f"the outputs have {num_rows} rows for {num_samples} samples: does a collate_fn leave samples out?")
        if outputs.is_kept and not is_whole:
            raise RunError("--predictions: are not written, since they would not match the samples")

    def write(self, results: dict, num_samples: int):
        config = self.config
        for metric, value in scalars_of(results).items():
            say(f"{metric} {value:.5g}{'' if math.isfinite(value) else ': is not finite'}")
        about = {
            "checkpoint": str(self.path),
            "step": self.checkpoint.get("step"),
            "precision": config.precision,
            "split": config.split,
            "num_samples": num_samples,
            "results": results,
        }
        path = self.file("test", ".json")
        with as_run_error():
            write_json(path, about)
        say(f"results {path}")

    def save(self, kind: str, value: Any):
        """Writes a value for torch.load into the run, on rank 0 alone."""
        if not self.fabric.is_global_zero:
            return
        path = self.file(kind, ".pt")
        with as_run_error(), atomically(path, "wb") as file:
            torch.save(value, file)
        say(f"{kind} {path}")

    def file(self, kind: str, suffix: str) -> Path:
        """A file in the run, named by what is evaluated."""
        return Path(self.config.out_dir, f"{kind}_{self.config.split}_{self.path.stem}{suffix}")


@as_run_error()
def read_checkpoint(run_dir: Path, name: str) -> tuple[Path, dict]:
    """The file that `--checkpoint` means, and its contents. Raises ConfigError if there is none, RunError if it is
    damaged."""
    folder = run_dir / "checkpoints"
    found = [path for path in (folder / f"{name}.ckpt", folder / name, Path(name)) if path.is_file()]
    if name == "last":
        found = checkpoints_of(run_dir)
    if not found:
        others = [path.name for path in checkpoints_of(run_dir)]
        raise ConfigError(f"--checkpoint {name}: no such file; the checkpoints of {run_dir} are {others}")
    path = found[0]
    problem: Any = "it is damaged"
    try:
        if is_whole(path):
            contents = load(path)
            if "model" in contents:  # now: of a file that another machine replaces, a page could not be read later
                contents["model"] = copied(contents["model"])
            return path, contents
    except Exception as error:  # torch.load raises many
        problem = error
    raise RunError(f"--checkpoint {name}: {path} cannot be read: {problem}; another checkpoint may do")


def has_changed(dataset: Any, size: int, then: int | None) -> bool:
    """Whether a dataset is not the one that had this size and fingerprint; where it has no fingerprint, by the size."""
    now = fingerprint(dataset)
    return len(dataset) != size or (None not in (then, now) and then != now)


def run_test(test: Callable, build_datasets: Callable, config: Any, train_class: type) -> int:
    """Calls test(run) in every process. Returns the exit code, or raises ConfigError or RunError.

    Args:
        test: Evaluates an EvalRun.
        build_datasets: As in train.py; called with `augment=False`.
        config: The options.
        train_class: The class of the options of train.py.
    """
    run_dir = Path(config.out_dir)
    with as_config_error(config, "out_dir", kinds=(OSError,)):
        TemporaryFile(dir=run_dir).close()  # the results are written into the run, after a long evaluation
    path, checkpoint = read_checkpoint(run_dir, config.checkpoint)
    about = checkpoint.get("checkpoint", {})  # model.pt has the weights alone
    if "config" in about:
        with config_file.errors_of(f"config in {path}"):
            trained = config_file.config_of(train_class, about["config"])
    else:
        trained = config_file.read_config(train_class, run_dir)
    if config.precision == "auto":
        config = replace(config, precision=trained.precision)
    if config.num_threads == 0:
        config = replace(config, num_threads=trained.num_threads)
    # What belongs to a machine is that of this one, where it is given.
    own = {name: value for name, value in marked(config, "per_host").items() if value != ""}
    own["timeout"] = config.timeout
    trained = replace(trained, {name: own[name] for name in own.keys() & values_of(trained).keys()})
    fabric = build_fabric(config)

    def start(config, resources: ExitStack) -> int:
        torch.set_num_threads(config.num_threads or torch.get_num_threads())
        fabric.seed_everything(trained.seed)
        datasets = build_in_turn(fabric, lambda: build_datasets(trained, augment=False))
        dataset = datasets[config.split]
        if len(dataset) == 0:
            raise ConfigError(f"--split {config.split}: has no samples")
        found = {"checkpoint": str(path), "step": about.get("step"), "number of samples": len(dataset)}
        check_ranks(config, found | {"checksum of samples": fingerprint(dataset)})
        say(f"{path} on {len(dataset)} {config.split} samples{changed_files(about.get('code', {}))}")
        if "data" in about and has_changed(datasets["val"], *about["data"]["val"]):
            say("the validation samples are not those of the training: another number, or other content or labels")
        say("")
        test(EvalRun(fabric, config, trained, path, checkpoint, dataset))
        return 0

    return launch(fabric, config, start)
