"""Evaluates a run of train.py, on any number of devices, each sample once.

python test.py --out_dir 20261121-093000-train_out
python test.py --out_dir train_out --checkpoint last --split val --predictions
"""

import gc

from config import TestConfig, TrainConfig, fail, parse_test, read_config

if __name__ == "__main__":
    CONFIG, RUN_DIR = parse_test()  # before the heavy imports, so that --help and a mistyped option answer at once
    gc.disable()  # they make a million objects that stay: to look for garbage among them takes a second

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from lightning.fabric import Fabric
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import Metric, MetricCollection

import utils
from data import EvalSampler, build_datasets, build_loader
from train import build_model, validate


class Predictions(Metric):
    """A row (target, prediction, confidence) for each sample, in the order of the dataset, whatever rank has it."""

    full_state_update = False

    def __init__(self, sampler: EvalSampler):
        super().__init__()
        self.starts = iter(sampler.starts)
        self.add_state("rows", torch.zeros(sampler.num_samples, 3), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        confidences, predictions = logits.softmax(dim=1).max(dim=1)
        start = next(self.starts)
        self.rows[start : start + len(targets)] = torch.stack([targets, predictions, confidences], dim=1)

    def compute(self) -> Tensor:
        return self.rows


def draw(confusion: Tensor) -> Image.Image:
    """A picture of the confusion matrix, (classes, classes): targets downwards, predictions to the right. (With Pillow:
    where matplotlib is installed, torchmetrics imports it at each start.)"""
    cell, font = 44, ImageFont.load_default(15)
    picture = Image.new("RGB", [cell * (len(confusion) + 2)] * 2, "white")
    pen = ImageDraw.Draw(picture)
    pen.text((2 * cell, cell // 3), "prediction", "black", font)
    pen.text((4, 2 * cell), "target", "black", font)
    for i, row in enumerate(confusion.tolist()):
        for x, y in ((i + 2, 1.3), (1.5, i + 2)):
            pen.text((cell * (x + 0.3), cell * (y + 0.3)), str(i), "black", font)
        for j, count in enumerate(row):
            corner, share = (cell * (j + 2), cell * (i + 2)), count / max(1, sum(row))
            shade = (int(255 - 220 * share), int(255 - 150 * share), 255)
            pen.rectangle([*corner, corner[0] + cell, corner[1] + cell], fill=shade, outline="lightgray")
            pen.text((corner[0] + cell / 2, corner[1] + cell / 2), str(count), "black", font, anchor="mm")
    return picture


def test(fabric: Fabric, config: TestConfig, trained: TrainConfig, dataset: Dataset, run_dir: Path, path: Path) -> int:
    """Evaluates the checkpoint at `path`, prints a table and writes test_results.json. Returns the exit code."""
    batch_size = config.batch_size or trained.micro_batch_size or trained.effective_batch_size
    sampler = EvalSampler(len(dataset), batch_size, fabric.global_rank, fabric.world_size)
    loader = fabric.setup_dataloaders(
        build_loader(dataset, sampler, trained.seed, config.num_workers, pin_memory=fabric.device.type == "cuda"),
        use_distributed_sampler=False,
        move_to_device=fabric.device.type != "cpu",
    )
    model = build_model(trained, dataset)
    weights = utils.DirectCheckpointIO().load_checkpoint(path)
    model.load_state_dict(weights.get("model", weights))
    model = fabric.setup(model)

    metrics = MetricCollection({"rows": Predictions(sampler)}, prefix="").to(fabric.device)
    results = validate(fabric, model, loader, metrics)
    if not fabric.is_global_zero:
        return 0
    rows = results["rows"].cpu()
    targets, predictions = rows[:, 0].long(), rows[:, 1].long()
    num_classes = getattr(dataset, "num_classes", 10)
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long)
    confusion.index_put_((targets, predictions), torch.ones_like(targets), accumulate=True)
    per_class = [row[i].item() / row.sum().item() if row.sum() else None for i, row in enumerate(confusion)]
    report = {
        "checkpoint": str(path),
        "split": config.split,
        "num_samples": len(rows),
        "loss": results["loss"],
        "accuracy": confusion.diagonal().sum().item() / len(rows),
        "accuracy_per_class": per_class,
    }
    with utils.atomically(run_dir / "test_results.json") as file:
        json.dump(report, file, indent=2)
    print(f"{path} on {report['num_samples']} {config.split} samples\n")
    print(utils.format_row(["class", "samples", "accuracy"]))
    for i, accuracy in enumerate(per_class):
        print(utils.format_row([i, confusion[i].sum().item(), "-" if accuracy is None else accuracy]))
    print(utils.format_row(["all", report["num_samples"], report["accuracy"]]), f"\n\nloss {report['loss']:.5g}")
    print(f"results {run_dir / 'test_results.json'}")
    if config.predictions:
        with utils.atomically(run_dir / "predictions.csv") as file:
            writer = csv.writer(file)
            writer.writerow(["sample", "target", "prediction", "confidence"])
            writer.writerows(zip(range(len(rows)), *rows.long().T[:2].tolist(), rows[:, 2].tolist(), strict=True))
        draw(confusion).save(run_dir / "confusion_matrix.png")
        print(f"predictions {run_dir / 'predictions.csv'}, {run_dir / 'confusion_matrix.png'}")
    return 0


def main(config: TestConfig, run_dir: Path) -> int:
    """Finds every mistake of the user before anything is launched, then evaluates. Returns the exit code."""
    trained, _ = read_config(run_dir)
    fabric = utils.build_fabric(replace(config, precision=config.precision or trained.precision))
    known = {"best": [run_dir / "checkpoints" / "best.ckpt"], "last": utils.checkpoints_of(run_dir)}
    path = next(iter(known.get(config.checkpoint, [Path(config.checkpoint)])), None)
    if path is None or not path.exists():
        missing = path or f"a checkpoint in {run_dir}"
        fail(f"--checkpoint {config.checkpoint}: {missing} does not exist; `last` or another file may do")
    if not utils.is_whole(path):
        fail(f"--checkpoint {config.checkpoint}: {path} is damaged; `last` or another file may do", code=1)
    try:
        dataset = build_datasets(trained.dataset, config.data_dir or trained.data_dir, trained.seed)[config.split]
    except (OSError, ValueError) as error:
        fail(f"--data_dir {config.data_dir or trained.data_dir}: {error}")
    return utils.launch(fabric, test, config=config, trained=trained, dataset=dataset, run_dir=run_dir, path=path)


if __name__ == "__main__":
    sys.exit(main(CONFIG, RUN_DIR))
