"""Evaluates a run of train.py, on any number of devices, each sample once.

python test.py --out_dir 20261121-093000-train_out
python test.py --out_dir train_out --checkpoint last --split val --predictions
"""

import cli
from config import ConfigError, RunError, TestConfig, blame

if __name__ == "__main__":
    CONFIG = cli.options(cli.parse_test)  # before the heavy imports: --help and a mistyped option answer at once

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassConfusionMatrix

import utils
from data import Loader, build_datasets, eval_batches
from loggers import atomically, format_row, numbers
from rundir import checkpoints_of, load, skeleton
from train import build_fabric, build_metrics, build_model, validate


class Predictions(CatMetric):
    """Rows (target, prediction, confidence), of the samples of rank 0 first."""

    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        if logits.ndim != 2 or targets.ndim != 1:
            raise ConfigError("--predictions: needs logits (samples, classes) and targets (samples,) of compute_loss")
        confidences, predictions = logits.float().softmax(dim=1).max(dim=1)
        super().update(torch.stack([targets, predictions, confidences], dim=1))


def write_predictions(rows: list[tuple], results: dict, stem: str, run_dir: Path) -> None:
    """Writes rows of (sample, target, prediction, confidence), and the confusion matrix in `results` as a picture."""
    table = np.reshape(sorted(rows), (-1, 4))
    with atomically(path := run_dir / f"predictions_{stem}.csv") as file:
        np.savetxt(file, table, "%d,%d,%d,%.9g", header="sample,target,prediction,confidence", comments="")
    cli.say(f"predictions {path}")
    if not find_spec("matplotlib"):
        cli.say("no confusion_matrix_*.png: that needs matplotlib, see requirements.txt")
        return
    from matplotlib.figure import Figure
    from torchmetrics.utilities.plot import plot_confusion_matrix

    n = len(counts := results["confusion_matrix"].cpu())
    shares, size = counts / counts.sum(dim=1, keepdim=True).clamp(min=1), min(n / 2 + 3, 12)
    axes = (figure := Figure(figsize=(size + 1, size), layout="constrained")).subplots()
    names = [str(i) if i % (n // 26 + 1) == 0 else "" for i in range(n)]  # at most 26
    plot_confusion_matrix(shares, axes, add_text=n <= 16, labels=names, cmap="Blues" if n <= 16 else "viridis_r")
    axes.set_title(f"{run_dir.name}\n{stem}")
    figure.colorbar(axes.images[0], label="Share of the true class")
    figure.savefig(path := run_dir / f"confusion_matrix_{stem}.png")
    cli.say(f"confusion matrix {path}")


def test(fabric: Fabric, config, train_config, dataset: Dataset, keys: list[list], path: Path, resources) -> int:
    """Evaluates the checkpoint at `path`, prints the results and writes them into the run. Returns the exit code."""
    loader = Loader(fabric, dataset, keys[fabric.global_rank], train_config, resources)
    model, weights = build_model(train_config, dataset), load(path)
    with blame(config, "checkpoint"):
        model.load_state_dict(weights.get("model", weights))
    metrics = build_metrics(train_config, dataset)
    of_classes = next((vars(m) for m in metrics.values() if {"num_classes", "ignore_index"} <= vars(m).keys()), None)
    if of_classes:
        matrix = MulticlassConfusionMatrix(of_classes["num_classes"], of_classes["ignore_index"], validate_args=False)
        metrics.add_metrics({"confusion_matrix": matrix})
    elif config.predictions:
        raise ConfigError("--predictions: are of classes, and build_metrics has no Multiclass* metric")
    if config.predictions:
        metrics.add_metrics({"rows": Predictions("disable")})  # else it would drop what is NaN, and wait for that
    results = validate(fabric, train_config, fabric.setup_module(model), loader, metrics.to(fabric.device))
    if not fabric.is_global_zero:
        return 0
    run_dir, stem = Path(config.out_dir), f"{config.split}_{path.stem}"
    cli.say(f"{path} on {len(dataset)} {config.split} samples\n")
    if "confusion_matrix" in results:
        names = ["class", "samples", "accuracy"]
        cli.say(format_row(names, names))
        for i, row in enumerate(results["confusion_matrix"].tolist()):
            cli.say(format_row(names, [i, sum(row), row[i] / sum(row) if sum(row) else "-"]))
    for name, value in numbers(results).items():
        cli.say(f"{name} {value:.5g}")
    if config.predictions:
        samples = np.concatenate([indices for rank_keys in keys for _, indices in rank_keys])
        rows = [*zip(samples.tolist(), *results.pop("rows").T.tolist(), strict=True)]
        write_predictions(rows, results, stem, run_dir)
    report = {"checkpoint": str(path), "step": weights.get("step"), "precision": config.precision}
    report |= {"split": config.split, "num_samples": len(dataset)}
    with atomically(run_dir / f"test_{stem}.json") as file:
        json.dump(report | results, file, indent=2, default=Tensor.tolist)
    cli.say(f"results {run_dir / f'test_{stem}.json'}")
    return 0


def main(config: TestConfig) -> int:
    """Evaluates the run in `config.out_dir`. Returns the exit code. Raises ConfigError and RunError."""
    run_dir, name = Path(config.out_dir), config.checkpoint
    train_config = replace(cli.read_config(run_dir), num_workers=config.num_workers, timeout=config.timeout)
    precision, data_dir = config.precision or train_config.precision, config.data_dir or train_config.data_dir
    config = replace(config, precision=precision, data_dir=data_dir)
    places = [run_dir / "checkpoints" / f"{name}.ckpt", run_dir / "checkpoints" / name, Path(name)]
    paths = checkpoints_of(run_dir) if name == "last" else [path for path in places if path.is_file()]
    if not paths:
        raise ConfigError(f"--checkpoint {name}: neither {places[0]} nor a file of that name; `last` may do")
    if not skeleton(paths[0]):
        raise RunError(f"--checkpoint {name}: {paths[0]} is damaged; another checkpoint may do")
    fabric = build_fabric(config)
    fabric.seed_everything(train_config.seed, verbose=False)
    with blame(config, "data_dir", kinds=(OSError, ImportError)):
        dataset = build_datasets(train_config.dataset, config.data_dir, augment=False)[config.split]
    micro_batch_size = train_config.micro_batch_size or train_config.effective_batch_size
    with blame(config, "split", "devices"):
        keys = eval_batches(len(dataset), micro_batch_size, fabric.world_size, config.batch_size)
    return utils.launch(fabric, config, partial(test, fabric, config, train_config, dataset, keys, paths[0]))


if __name__ == "__main__":
    cli.run(main, CONFIG)
