"""Evaluates a run of train.py, on any number of devices, each sample once.

python test.py --out_dir 20261121-093000-train_out
python test.py --out_dir train_out --checkpoint last --split val --predictions
"""

import gc

import cli
from config import ConfigError, RunError, TestConfig, TrainConfig, blame

if __name__ == "__main__":
    CONFIG = cli.options(cli.parse_test)  # before the heavy imports: --help and a mistyped option answer at once
    gc.disable()  # see cli.run

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

import utils
from data import EvalSampler, build_datasets, build_loader
from rundir import DirectCheckpointIO, atomically, checkpoints_of, is_whole
from train import build_fabric, build_metrics, build_model, validate


class Predictions(Metric):
    """A row (target, prediction, confidence) for each sample, those of rank 0 first."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        confidences, predictions = logits.float().softmax(dim=1).max(dim=1)
        self.rows.append(torch.stack([targets, predictions, confidences], dim=1))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.rows)


def write_predictions(rows: Tensor, batches: list[np.ndarray], confusion: Tensor, run_dir: Path) -> None:
    """Writes predictions.csv, in the order of the dataset, and confusion_matrix.png if matplotlib is installed.

    Args:
        rows: (samples, 3), of Predictions.
        batches: The sample numbers of the rows.
        confusion: (classes, classes), targets downwards, predictions to the right.
        run_dir: Where to.
    """
    rows = sorted(zip(np.concatenate(batches).tolist(), *rows.T.tolist(), strict=True))
    with atomically(run_dir / "predictions.csv") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "target", "prediction", "confidence"])
        writer.writerows((sample, int(target), int(prediction), p) for sample, target, prediction, p in rows)
    print(f"predictions {run_dir / 'predictions.csv'}")
    try:
        import matplotlib.pyplot as plt
        from torchmetrics.utilities.plot import plot_confusion_matrix
    except ImportError:
        print("no confusion_matrix.png: it needs matplotlib (pip install matplotlib)")
        return
    figure, _ = plot_confusion_matrix(confusion, add_text=len(confusion) <= 20)
    figure.savefig(run_dir / "confusion_matrix.png")
    plt.close(figure)


def test(fabric: Fabric, config: TestConfig, trained: TrainConfig, dataset: Dataset, path: Path, resources) -> int:
    """Evaluates the checkpoint at `path`, prints the results and writes them into the run. Returns the exit code."""
    run_dir, size = Path(config.out_dir), trained.micro_batch_size or trained.effective_batch_size
    samplers = [EvalSampler(len(dataset), config.batch_size or max(size, min(4 * size, 256)), rank, fabric.world_size)
                for rank in range(fabric.world_size)]  # fmt: skip
    loader = fabric.setup_dataloaders(
        build_loader(dataset, samplers[fabric.global_rank], trained, fabric.device.type == "cuda", resources),
        use_distributed_sampler=False,
        move_to_device=fabric.device.type != "cpu",
    )
    model = build_model(trained, dataset)
    weights = DirectCheckpointIO().load_checkpoint(path)
    model.load_state_dict(weights.get("model", weights))
    model = fabric.setup_module(model)
    metrics = build_metrics(trained, dataset, is_test=True).to(fabric.device)
    if config.predictions:
        metrics.add_metrics({"rows": Predictions().to(fabric.device)})
    results = validate(fabric, trained, model, loader, metrics)
    if not fabric.is_global_zero:
        return 0
    confusion = results.get("confusion_matrix")
    if config.predictions:
        batches = [batch for sampler in samplers for batch in sampler.batches]
        write_predictions(results.pop("rows").cpu(), batches, confusion.cpu(), run_dir)
    print(f"{path} on {len(dataset)} {config.split} samples\n")
    if confusion is not None:
        print(utils.format_row(["class", "samples", "accuracy"]))
        for i, row in enumerate(confusion.tolist()):
            print(utils.format_row([i, sum(row), row[i] / sum(row) if sum(row) else "-"]))
    for name, value in results.items():
        if isinstance(value, float):
            print(f"{name} {value:.5g}")
    report = {name: value if isinstance(value, float) else value.tolist() for name, value in results.items()}
    report = {"checkpoint": str(path), "split": config.split, "num_samples": len(dataset)} | report
    with atomically(run_dir / f"test_{config.split}_{path.stem}.json") as file:
        json.dump(report, file, indent=2)
    print(f"results {run_dir / f'test_{config.split}_{path.stem}.json'}")
    return 0


def main(config: TestConfig) -> int:
    """Evaluates the run in `config.out_dir`. Returns the exit code. Raises ConfigError and RunError."""
    run_dir = Path(config.out_dir)
    trained = cli.read_config(run_dir)
    trained = replace(trained, num_workers=config.num_workers, timeout=config.timeout)
    config = replace(config, precision=config.precision or trained.precision, data_dir=config.data_dir or trained.data_dir)
    known = {"best": [run_dir / "checkpoints" / "best.ckpt"], "last": checkpoints_of(run_dir)}
    path = next(iter(known.get(config.checkpoint, [Path(config.checkpoint)])), run_dir / "checkpoints" / "step-*.ckpt")
    if not path.is_file():
        raise ConfigError(f"--checkpoint {config.checkpoint}: {path} does not exist; `last` or another file may do")
    if path.name != "model.pt" and not is_whole(path):
        raise RunError(f"--checkpoint {config.checkpoint}: {path} is damaged; `last` or another file may do")
    fabric = build_fabric(config)
    with blame(config, "data_dir"):
        dataset = build_datasets(trained.dataset, config.data_dir, augment=False)[config.split]
    return utils.launch(fabric, config, lambda resources: test(fabric, config, trained, dataset, path, resources))


if __name__ == "__main__":
    cli.run(main, CONFIG)
