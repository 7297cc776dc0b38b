"""Batches: how fast they come, what the order of a long epoch costs, and which samples Lightning's Trainer trains on
in an epoch in which it is killed. Prints only.

python benchmarks/loader.py speed           # the template's loader beside torch's: 0, 1 and 2 workers; 5 minutes
python benchmarks/loader.py speed --kinds tensors --workers 0 --rounds 3
python benchmarks/loader.py order           # the order of an epoch of 100 million samples, and two workers on it
python benchmarks/loader.py lightning       # killed and resumed; half a minute
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from config import TrainConfig  # noqa: E402
from runtime.launch import end_workers  # noqa: E402
from runtime.loader import Loader, TrainSampler  # noqa: E402
from runtime.meters import Timer  # noqa: E402
from utils import make_plan  # noqa: E402


def sampler_of(dataset, batch_size: int) -> TrainSampler:
    """Epochs of a dataset on one process."""
    config = TrainConfig(effective_batch_size=batch_size)
    plan = make_plan(config, len(dataset), val_samples=0, world_size=1, saved_size=0)
    return TrainSampler(plan, dataset, rank=0, seed=0)


# ---- speed

# `tensors` is a plain TensorDataset, `png` and `jpeg` are files that Pillow opens. A round reads the dataset once, in
# batches of 64, with an iterator that is new and workers that are not. The template's is the one that
# `Loader.micro_batches` makes for each epoch. The best round of each loader counts.
KINDS = ["tensors", "png", "jpeg"]
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


def speed(kinds: list[str], workers: list[int], rounds: int):
    """On one core, in alternating rounds."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in kinds:
            dataset = build(kind, Path(temporary) / kind)
            for count in workers:
                own, torchs = speeds(dataset, count, rounds)
                figures = f"template {own:9.0f}, torch {torchs:9.0f} samples/s"
                print(f"{kind:>8} {count} workers: {figures}, ratio {own / torchs:.2f}", flush=True)


def speeds(dataset: Dataset, workers: int, rounds: int) -> tuple[float, float]:
    """Samples per second of the template's loader and of torch's."""
    config = TrainConfig(num_workers=workers, effective_batch_size=BATCH_SIZE)
    sampler = sampler_of(dataset, BATCH_SIZE)
    own = Loader(Fabric(accelerator="cpu", devices=1), dataset, sampler, config)
    options = {"shuffle": True, "drop_last": True, "num_workers": workers, "persistent_workers": workers > 0}
    loaders = {"template": own, "torch": DataLoader(dataset, BATCH_SIZE, **options)}
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        sampler.step = number * sampler.plan.steps_per_epoch
        for name in loaders if number % 2 else reversed(loaders):
            taken = seconds(loaders[name])
            if number:  # the first round starts the workers
                best[name] = min(taken, best.get(name, taken))
    end_workers(set())
    return len(dataset) / best["template"], len(dataset) / best["torch"]


# ---- order


def in_fresh_process(function, *args) -> list[float]:
    """Calls the function in a process of its own, where nothing else has taken memory yet."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, " ".join(str(value) for value in function(*args)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        return [float(value) for value in file.read().split()]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def cost(function, *args) -> tuple[float, float]:
    """Seconds and megabytes that a call takes."""
    before, began = peak_mb(), time.perf_counter()
    function(*args)
    return time.perf_counter() - began, peak_mb() - before


def first_batch(samples: int) -> None:
    next(iter(sampler_of(range(samples), 256)))


def private_mb_of_a_worker(samples: int) -> tuple[float]:
    """Memory that a data worker has for itself alone, in the middle of an epoch."""
    fabric, config = Fabric(accelerator="cpu", devices=1), TrainConfig(num_workers=2)
    loader = Loader(fabric, range(samples), sampler_of(range(samples), 256), config)
    timer = Timer(fabric.device, 256)
    for step in range(1, 101):
        list(loader.micro_batches(step, timer))
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    rollup = Path(f"/proc/{children[0]}/smaps_rollup").read_text().splitlines()
    return (sum(int(line.split()[1]) for line in rollup if line.startswith("Private")) / 1e3,)


def order() -> None:
    for samples in (1_000_000, 10_000_000, 100_000_000):
        for name, function in (("torch.randperm", torch.randperm), ("up to the first batch", first_batch)):
            seconds, megabytes = in_fresh_process(cost, function, samples)
            print(f"{samples:>11,} samples  {name:>21}  {seconds:6.2f} s  {megabytes:6.0f} MB")
        (megabytes,) = in_fresh_process(private_mb_of_a_worker, samples)
        print(f"{samples:>11,} samples  {'private of a worker':>21}  {megabytes:17.0f} MB")


# ---- Lightning's Trainer, killed

# It saves after 8 of the 19 batches of the second epoch, is killed by SIGKILL two batches later, and goes on from that
# checkpoint. Counted is what ends up in the weights: the batches before the checkpoint, and those after the resume.
SAMPLES = 1216  # 19 batches an epoch
SAVED = 27


class Numbers(Dataset):
    """Samples that have their number beside them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.ones(8), index % 10, index


class Module(L.LightningModule):
    def __init__(self, last: int):
        super().__init__()
        self.model, self.last = torch.nn.Linear(8, 10), last

    def training_step(self, batch, _):
        images, targets, numbers = batch
        if self.global_step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        print("trained", self.global_step, self.current_epoch, *numbers.tolist(), flush=True)
        return F.cross_entropy(self.model(images), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def train_by_lightning(last: int, checkpoint: str | None):
    """Is killed in the step `last`."""
    L.seed_everything(42)
    saves = L.pytorch.callbacks.ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=9, save_top_k=-1)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[saves], **quiet)
    trainer.fit(Module(last), DataLoader(Numbers(), BATCH_SIZE, shuffle=True), ckpt_path=checkpoint)


def trained(folder: str, *options) -> dict[int, tuple]:
    """Trains in a process of its own. Returns the epoch and the samples of each step."""
    command = [sys.executable, os.path.abspath(__file__), "lightning", *map(str, options)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("trained ")]
    return {int(step): (int(epoch), numbers) for step, epoch, *numbers in lines}


def lightning() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = trained(folder, "--last", SAVED + 2)
        after = trained(folder, "--last", -1, "--checkpoint", f"checkpoints/step={SAVED}.ckpt")
    assert max(before) == SAVED + 1 and min(after) == SAVED, "it was not killed, or began elsewhere"
    steps = {step: result for step, result in before.items() if step < SAVED} | after
    times = Counter(number for epoch, numbers in steps.values() if epoch == 1 for number in numbers)
    batches = sum(epoch == 1 for epoch, _ in steps.values())
    twice = sum(count == 2 for count in times.values())
    print(f"{batches} batches; of {SAMPLES} samples {twice} came twice, {SAMPLES - len(times)} never")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "order", "lightning"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of speed")
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2], help="of speed")
    parser.add_argument("--rounds", type=int, default=10, help="of speed")
    parser.add_argument("--last", type=int, help="of lightning: trains in this process, and is killed in this step")
    parser.add_argument("--checkpoint", help="with --last: goes on from it")
    options = parser.parse_args()
    if options.what == "speed":
        speed(options.kinds, options.workers, options.rounds)
    elif options.what == "order":
        order()
    elif options.last is not None:
        train_by_lightning(options.last, options.checkpoint)
    else:
        lightning()


if __name__ == "__main__":
    main()
