"""Samples per second of the template's loader and of torch's own, on one core, in alternating rounds.

python benchmarks/loader.py                     # 0, 1 and 2 workers; 5 minutes
python benchmarks/loader.py --kinds tensors --workers 0 --rounds 3

`tensors` is a plain TensorDataset, `png` and `jpeg` are files that Pillow opens. A round reads the data set once, in
batches of 64, with an iterator that is new and workers that are not. The template's is the one that
`Loader.micro_batches` makes for each epoch. The best round of each loader counts.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import TrainConfig  # noqa: E402
from runtime.launch import end_workers  # noqa: E402
from runtime.loader import Loader, TrainSampler  # noqa: E402
from utils import make_plan  # noqa: E402

BATCH_SIZE, PICTURES = 64, 640


class Files(Dataset):
    """Pictures of a folder, decoded one at a time."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        return torch.from_numpy(np.array(Image.open(self.paths[index]))).permute(2, 0, 1), index % 10


def build(kind: str, folder: Path) -> Dataset:
    if kind == "tensors":
        return TensorDataset(torch.randn(12_800, 1, 28, 28), torch.randint(10, (12_800,)))
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(PICTURES):
        coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        coarse.resize((128, 128)).save(folder / f"{number:04}.{kind}")
    return Files(folder)


def seconds(batches: Iterable) -> float:
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["tensors", "png", "jpeg"])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in options.kinds:
            dataset = build(kind, Path(temporary) / kind)
            n = len(dataset)
            for workers in options.workers:
                config = TrainConfig(num_workers=workers, effective_batch_size=BATCH_SIZE)
                plan = make_plan(config, n, val_samples=0, world_size=1, saved_size=0)
                sampler = TrainSampler(plan, dataset, rank=0, seed=0)
                own = Loader(fabric, dataset, sampler, config)
                torchs = DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=workers,
                                    persistent_workers=workers > 0)  # fmt: skip
                best = {}
                for number in range(options.rounds + 1):
                    sampler.step = number * plan.steps_per_epoch
                    epochs = {"template": own, "torch": torchs}
                    for name in epochs if number % 2 else reversed(epochs):
                        taken = seconds(epochs[name])
                        if number:  # the first round starts the workers
                            best[name] = min(taken, best.get(name, taken))
                own_speed, torch_speed = n / best["template"], n / best["torch"]
                speeds = f"template {own_speed:9.0f}, torch {torch_speed:9.0f} samples/s"
                print(f"{kind:>8} {workers} workers: {speeds}, ratio {own_speed / torch_speed:.2f}", flush=True)
                end_workers(set())
