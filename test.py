"""Evaluates a run of train.py, on any number of devices, each sample once.

python test.py --out_dir 20261121-093000-train_out
python test.py --out_dir train_out --checkpoint last --split val --predictions
"""

import cli
from config import ConfigError, RunError, TestConfig

if __name__ == "__main__":
    CONFIG = cli.parse_or_exit(cli.parse_test)  # before the heavy imports: --help and a mistyped option answer at once

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import Dataset

from checkpoints import checkpoints_of, is_whole, load
from data import Loader, build_datasets, eval_batches
from launch import NO_LIMIT, build_fabric, build_in_turn, changed_files, check_ranks, gloo_group, launch, run_and_exit
from loggers import scalars_of
from train import build_metrics, build_model, validate
from utils import atomically, write_json


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
    """The outputs of all ranks on rank 0, in the order of the samples; [] on other ranks."""
    ranks = [batches]
    if dist.is_initialized():
        ranks = [[] for _ in range(fabric.world_size)]
        dist.gather_object(batches, ranks if fabric.is_global_zero else None, group=gloo_group(NO_LIMIT))
    in_order = [batch for turn in zip(*ranks, strict=True) for batch in turn]  # eval_batches is round-robin
    return [torch.cat(parts) for parts in zip(*in_order, strict=True)]


def test(fabric: Fabric, config, train_config, dataset: Dataset, path: Path, checkpoint: dict, resources) -> int:
    """Evaluates a checkpoint, of the file `path`, prints the results and writes them into the run. Returns the exit
    code."""
    run_dir = Path(config.out_dir)
    changed = changed_files(checkpoint.get("checkpoint", {}).get("code", {}))
    cli.say(f"{path} on {len(dataset)} {config.split} samples{changed}\n")
    model = build_model(train_config, dataset)
    with cli.as_config_error(config, "checkpoint"):
        model.load_state_dict(checkpoint.get("model", checkpoint))  # model.pt has the weights alone
    model = fabric.setup_module(model)
    metrics: Any = build_metrics(train_config, dataset).to(fabric.device)
    if config.predictions:
        metrics = KeepOutputs(metrics)
    micro_batch_size = train_config.micro_batch_size or train_config.effective_batch_size
    batches = eval_batches(len(dataset), micro_batch_size, fabric.world_size, config.batch_size)
    loader = Loader(fabric, dataset, batches[fabric.global_rank], train_config, resources)
    results = validate(fabric, train_config, model, loader, metrics)
    predictions = gather(fabric, metrics.batches) if config.predictions else None
    if not fabric.is_global_zero:
        return 0

    for name, value in scalars_of(results).items():
        cli.say(f"{name} {value:.5g}")
    stem = f"{config.split}_{path.stem}"
    if config.predictions:
        with atomically(run_dir / f"predictions_{stem}.pt", "wb") as file:
            torch.save(predictions, file)
        cli.say(f"predictions {run_dir / f'predictions_{stem}.pt'}")
    report = {
        "checkpoint": str(path),
        "step": checkpoint.get("step"),
        "precision": config.precision,
        "split": config.split,
        "num_samples": len(dataset),
        "results": results,
    }
    write_json(run_dir / f"test_{stem}.json", report)
    cli.say(f"results {run_dir / f'test_{stem}.json'}")
    return 0


def find_checkpoint(run_dir: Path, name: str) -> Path:
    """The file that `--checkpoint` means. Raises ConfigError if there is none."""
    folder = run_dir / "checkpoints"
    found = [path for path in (folder / f"{name}.ckpt", folder / name, Path(name)) if path.is_file()]
    if name == "last":
        found = checkpoints_of(run_dir)
    if not found:
        others = [path.name for path in checkpoints_of(run_dir)]
        raise ConfigError(f"--checkpoint {name}: no such file; the checkpoints of {run_dir} are {others}")
    return found[0]


def read_checkpoint(run_dir: Path, name: str) -> tuple[Path, dict]:
    """The file that `--checkpoint` means, and its contents. Raises ConfigError if there is none, RunError if it is
    damaged."""
    while True:
        path = find_checkpoint(run_dir, name)
        try:
            if is_whole(path):
                return path, load(path)
            if path.exists():
                raise ValueError("it is damaged")
        except FileNotFoundError:  # a run that goes on has deleted it: take the next one
            pass
        except Exception as error:  # torch.load raises many
            raise RunError(f"--checkpoint {name}: {path} cannot be read: {error}; another checkpoint may do") from error


def main(config: TestConfig) -> int:
    """Evaluates the run in `config.out_dir`. Returns the exit code. Raises ConfigError and RunError."""
    run_dir = Path(config.out_dir)
    path, checkpoint = read_checkpoint(run_dir, config.checkpoint)
    about = checkpoint.get("checkpoint", {})  # model.pt has the weights alone
    if "config" in about:
        with cli.errors_of(f"config in {path}"):
            train_config = cli.config_of(about["config"])
    else:
        train_config = cli.read_config(run_dir)
    if config.precision == "auto":
        config = replace(config, precision=train_config.precision)
    train_config = replace(
        train_config,
        data_dir=config.data_dir or train_config.data_dir,
        num_workers=config.num_workers,
        timeout=config.timeout,
    )
    fabric = build_fabric(config)
    if fabric.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in train.py

    def start(config: TestConfig, resources: ExitStack) -> int:
        fabric.seed_everything(train_config.seed)
        dataset = build_in_turn(fabric, train_config, lambda: build_datasets(train_config, augment=False))[config.split]
        check_ranks(config, {"checkpoint": str(path), "step": about.get("step"), "number of samples": len(dataset)})
        return test(fabric, config, train_config, dataset, path, checkpoint, resources)

    return launch(fabric, config, start)


if __name__ == "__main__":
    run_and_exit(main, CONFIG)
