"""What test.py evaluates, and where its results go."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from runtime import cli
from runtime.checkpoints import checkpoints_of, is_whole, load
from runtime.errors import ConfigError, RunError
from runtime.files import as_run_error, atomically, write_json
from runtime.launch import NO_LIMIT, build_fabric, build_in_turn, changed_files, check_ranks, gloo_group, launch
from runtime.loader import fingerprint
from runtime.loggers import scalars_of


@dataclass
class TestRun:
    """A checkpoint to evaluate, the options it was trained with, and the samples."""

    fabric: Fabric
    config: Any  # of test.py
    train_config: Any
    path: Path  # of the checkpoint
    checkpoint: dict
    dataset: Any
    resources: ExitStack  # closes what must not outlive the evaluation, such as data workers
    folder: Path  # of the results, absolute: build_datasets may change the working directory

    def load_weights(self, model: torch.nn.Module):
        """Loads the weights that the checkpoint has of state["model"]."""
        with cli.as_config_error(self.config, "checkpoint"):
            model.load_state_dict(self.checkpoint.get("model", self.checkpoint))  # model.pt has the weights alone

    def metrics(self, metrics: Any) -> Any:
        """The metrics on the device; with --predictions they keep their arguments, too."""
        metrics = metrics.to(self.fabric.device)
        self.kept = KeepOutputs(metrics) if self.config.predictions else None
        return self.kept or metrics

    @as_run_error()
    def report(self, results: dict):
        """Prints the results, and writes them into the run."""
        config = self.config
        stem = f"{config.split}_{self.path.stem}"
        if self.fabric.is_global_zero:
            self.write_results(results, f"test_{stem}.json")
        if self.kept is None:
            return
        outputs = gather(self.fabric, self.kept.batches)
        if self.fabric.is_global_zero:
            name = f"predictions_{stem}.pt"
            with atomically(self.folder / name, "wb") as file:
                torch.save(outputs, file)
            cli.say(f"predictions {Path(config.out_dir) / name}")

    def write_results(self, results: dict, name: str):
        config = self.config
        for metric, value in scalars_of(results).items():
            cli.say(f"{metric} {value:.5g}")
        about = {
            "checkpoint": str(self.path),
            "step": self.checkpoint.get("step"),
            "precision": config.precision,
            "split": config.split,
            "num_samples": len(self.dataset),
            "results": results,
        }
        write_json(self.folder / name, about)
        cli.say(f"results {Path(config.out_dir) / name}")


class KeepOutputs:
    """Metrics that also keep their arguments on the CPU: tensors with a row per sample, of one shape in all batches.

    The logits of a language model may not fit into memory. compute_loss can then return less to the metrics when
    `model.training` is False, for example the maximum of the logits, or the log-probabilities of the targets.
    """

    def __init__(self, metrics):
        self.metrics = metrics
        self.batches: list = []
        self.reset = metrics.reset
        self.compute = metrics.compute

    def update(self, *outputs: Tensor):
        lengths = {len(output) if isinstance(output, Tensor) and output.ndim else 0 for output in outputs}
        if len(lengths) != 1 or lengths == {0}:
            raise ConfigError("--predictions: compute_loss must give the metrics tensors with a row per sample")
        self.batches.append([output.cpu() for output in outputs])
        self.metrics.update(*outputs)


def gather(fabric: Fabric, batches: list) -> list:
    """The outputs of all ranks on rank 0, in the order of the samples; [] on other ranks. Raises RunError if batches
    have other shapes."""
    ranks = [batches]
    if dist.is_initialized():
        ranks = [[] for _ in range(fabric.world_size)]
        dist.gather_object(batches, ranks if fabric.is_global_zero else None, group=gloo_group(NO_LIMIT))
    in_order = [batch for turn in zip(*ranks, strict=True) for batch in turn]  # eval_batches is round-robin
    try:
        return [torch.cat(parts) for parts in zip(*in_order, strict=True)]
    except RuntimeError as error:
        raise RunError(f"--predictions: compute_loss must give the metrics one shape in all batches: {error}") from None


@as_run_error()
def read_checkpoint(run_dir: Path, name: str) -> tuple[Path, dict]:
    """The file that `--checkpoint` means, and its contents. Raises ConfigError if there is none, RunError if it is
    damaged."""
    folder = run_dir / "checkpoints"
    while True:
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
                return path, load(path)
        except Exception as error:  # torch.load raises many
            problem = error
        if path.exists():  # otherwise a run that goes on has deleted it: take the next one
            raise RunError(f"--checkpoint {name}: {path} cannot be read: {problem}; another checkpoint may do")


def run_test(test: Callable, build_datasets: Callable, config: Any, train_class: type) -> int:
    """Calls test(evaluation) in every process. Returns the exit code, or raises ConfigError or RunError.

    Args:
        test: Evaluates a TestRun.
        build_datasets: As in train.py; called with `augment=False`.
        config: The options.
        train_class: The class of the options of train.py.
    """
    run_dir = Path(config.out_dir)
    folder = run_dir.absolute()
    with cli.as_config_error(config, "out_dir", kinds=(OSError,)):
        TemporaryFile(dir=run_dir).close()  # the results are written into the run, after a long evaluation
    path, checkpoint = read_checkpoint(run_dir, config.checkpoint)
    about = checkpoint.get("checkpoint", {})  # model.pt has the weights alone
    if "config" in about:
        with cli.errors_of(f"config in {path}"):
            trained = cli.config_of(train_class, about["config"])
    else:
        trained = cli.read_config(train_class, run_dir)
    if config.precision == "auto":
        config = replace(config, precision=trained.precision)
    if config.num_threads == 0:
        config = replace(config, num_threads=trained.num_threads)
    common = vars(trained).keys() - {"out_dir", "root_dir", "devices"}
    given = {name: value for name, value in vars(config).items() if name in common and value != ""}
    trained = replace(trained, **given)
    fabric = build_fabric(config)

    def start(config, resources: ExitStack) -> int:
        torch.set_num_threads(config.num_threads or torch.get_num_threads())
        fabric.seed_everything(trained.seed)
        dataset = build_in_turn(fabric, lambda: build_datasets(trained, augment=False))[config.split]
        found = {"checkpoint": str(path), "step": about.get("step"), "number of samples": len(dataset)}
        check_ranks(config, found | {"checksum of samples": fingerprint(dataset)})
        cli.say(f"{path} on {len(dataset)} {config.split} samples{changed_files(about.get('code', {}))}\n")
        test(TestRun(fabric, config, trained, path, checkpoint, dataset, resources, folder))
        return 0

    return launch(fabric, config, start)
