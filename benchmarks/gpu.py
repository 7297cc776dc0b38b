"""A step of train.py on a GPU, beside the raw loop that one would write for the same model and data. Medians over
windows of 500 steps, of alternating rounds; a minute or two; prints only.

python benchmarks/gpu.py [--rounds 3] [--accelerator cuda]
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from config import TrainConfig  # noqa: E402
from data import build_datasets  # noqa: E402
from train import build_model  # noqa: E402

WINDOW = 500  # steps between two readings of the loss
WINDOWS = 4
BATCH_SIZE = TrainConfig().effective_batch_size
WORKS = ["", "--precision bf16-mixed"]


def raw(options: str, device: str) -> float:
    """Seconds per step of a raw loop."""
    dataset = build_datasets(TrainConfig())["train"]
    images, targets = (torch.stack([torch.as_tensor(value) for value in part]) for part in zip(*dataset, strict=True))
    loader = DataLoader(
        TensorDataset(images, targets), BATCH_SIZE, shuffle=True, drop_last=True, pin_memory=device == "cuda"
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build_model(TrainConfig(), dataset).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = 0
    seconds = []
    began = time.perf_counter()
    while True:
        for batch, labels in loader:
            batch = batch.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16, enabled="bf16-mixed" in options):
                loss = F.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % WINDOW == 0:
                loss.item()  # waits for the device
                now = time.perf_counter()
                seconds.append((now - began) / WINDOW)
                began = now
                if len(seconds) == WINDOWS:
                    return statistics.median(seconds[1:])


def template(options: str, device: str) -> float:
    """Seconds per step of train.py, by its own log."""
    steps = WINDOW * WINDOWS
    with tempfile.TemporaryDirectory() as cwd:
        command = (
            f"{REPO}/train.py {options} --accelerator {device} --devices 1 --max_steps {steps} --log_interval {WINDOW} "
            f"--val_interval {steps} --checkpoint_interval {steps} --logger_name csv"
        )
        subprocess.run([sys.executable, *command.split()], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(cwd).glob("*/logs/csv/metrics.csv")
        with open(path, newline="") as file:
            speeds = [float(row["samples_per_second"]) for row in csv.DictReader(file)]
    return BATCH_SIZE / statistics.median(speeds[1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accelerator", default="cuda")
    options = parser.parse_args()
    for work in WORKS:
        seconds: dict = {"raw": [], "template": []}
        for _ in range(options.rounds):
            seconds["raw"].append(raw(work, options.accelerator))
            seconds["template"].append(template(work, options.accelerator))
        one, other = (statistics.median(values) for values in seconds.values())
        print(f"{work:23} raw {1e6 * one:5.0f} us  template {1e6 * other:5.0f} us  {one / other:.2f} times as fast")


if __name__ == "__main__":
    main()
