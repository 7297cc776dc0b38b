"""What makes the order and the randomness of the samples exact.

The order of an epoch is a pure function of (seed, epoch). It is cut into effective batches, those into micro-batches,
and rank r of W takes the micro-batches r, r + W, ... So a run can be resumed at any (epoch, step), on any number of
devices, with exactly the remaining samples.
"""

import fcntl
import math
import os
import random
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_start_method
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from runtime.errors import ConfigError
from runtime.ranks import handle_signals


@dataclass
class TrainSampler:
    """Yields the micro-batches of a rank from `self.step`, which `Loader.micro_batches` sets, to the end of the epoch.
    A micro-batch is a pair: its number in the run, and the indices of its samples. A second stream of data needs a plan
    of its own from `make_plan`, and another seed, as in recipes/kinds/semi_supervised.patch."""

    plan: Any  # the Plan of the run
    dataset: Any  # its method `order`, if it has one, gives the indices of an epoch; else they are shuffled
    rank: int
    seed: int  # with the epoch, it determines the order
    step: int = 0  # of the run, counted from 0

    def __iter__(self) -> Iterator:
        epoch, step_in_epoch = divmod(self.step, self.plan.steps_per_epoch)
        generator = torch.Generator().manual_seed(zlib.crc32(f"order {self.seed} {epoch}".encode()))
        if hasattr(self.dataset, "order"):
            order = np.asarray(self.dataset.order(epoch, generator))
        else:
            order = torch.randperm(len(self.dataset), generator=generator).numpy()
        size = self.plan.steps_per_epoch * self.plan.effective_batch_size
        if len(order) < size:
            raise ConfigError(f"an epoch needs {size} indices, but {type(self.dataset).__name__} gives {len(order)}")
        micro_batches = order[:size].reshape(-1, self.plan.micro_batch_size)
        first = step_in_epoch * self.plan.effective_batch_size // self.plan.micro_batch_size
        for i in range(first + self.rank, len(micro_batches), self.plan.world_size):
            yield epoch * len(micro_batches) + i, micro_batches[i]


def eval_batches(num_samples: int, batch_size: int, fabric: Fabric) -> list:
    """The batches of this rank in an evaluation: all ranks together have each sample once, in order. All have the same
    number of batches, none of them empty; otherwise a rank would wait forever for the others. A batch is a pair: the
    number of its first sample, and the indices of its samples.

    Args:
        num_samples: Number of samples.
        batch_size: Maximum number of samples in a batch; 1 may become 2, since all ranks need equally many batches.
        fabric: Fabric, launched.

    Raises:
        ConfigError: There are fewer samples than processes.
    """
    world_size = fabric.world_size
    if 0 < num_samples < world_size:
        raise ConfigError(f"--devices: {num_samples} samples are too few to evaluate on {world_size} processes")
    rounds = min(math.ceil(num_samples / (world_size * batch_size)), num_samples // world_size)
    if rounds == 0:  # no samples
        return []
    parts = np.array_split(np.arange(num_samples), rounds * world_size)
    return [(int(indices[0]), indices) for indices in parts[fabric.global_rank :: world_size]]


def seeder(device: str, tag: str, seed: int) -> Callable:
    """Returns a function that seeds the global generators of torch, NumPy and Python with a number, so that no state of
    a generator has to be saved. It takes 8 µs; torch.manual_seed alone would take 80 µs.

    Args:
        device: The kind of device whose generators are seeded beside those of the CPU, such as "cuda".
        tag: What the numbers count. With the same tag, two functions would give the same random numbers.
        seed: The seed of the run.
    """
    return partial(set_seed, device, zlib.crc32(f"{tag} {seed}".encode()))  # can be pickled, for a data worker


def set_seed(device: str, base: int, number: int):
    seed = (base + number) % 2**32  # NumPy takes 32 bits
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    if device == "cuda":  # all devices: --strategy dp uses several
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    elif device == "mps":
        torch.mps.manual_seed(seed)


class SeededBatches(Dataset):
    """A dataset whose items are batches. For a pair (number, indices of the samples) it seeds the generators with the
    number, and fetches the samples. To seed for each sample would take 440 µs per 64 samples."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset = dataset
        self.set_seed = seeder("cpu", "data", seed)
        while isinstance(dataset, Subset):  # has no collate_fn of its own
            dataset = dataset.dataset
        self.collate = getattr(dataset, "collate_fn", default_collate)

    def __getitem__(self, batch: tuple[int, np.ndarray]):
        number, indices = batch
        self.set_seed(number)
        try:
            if hasattr(self.dataset, "__getitems__"):
                return self.collate(self.dataset.__getitems__(indices))
            return self.collate([self.dataset[index] for index in indices.tolist()])
        except StopIteration as error:  # it would end the epoch early, without a word
            raise RuntimeError("a dataset, or its collate_fn, has raised StopIteration") from error


def text_of(value: Any) -> str:
    """A text that is the same in all processes for equal tensors, arrays, numbers and strings, also in lists, tuples,
    dicts and sets. Raises TypeError for other objects."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {zlib.crc32(content.tobytes())}"
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {zlib.crc32(value.tobytes())}"
    if isinstance(value, Mapping):
        return str(sorted(text_of(item) for item in value.items()))
    if isinstance(value, (set, frozenset)):
        return str(sorted(text_of(item) for item in value))
    if isinstance(value, (list, tuple)):
        return str([text_of(item) for item in value])
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no checksum")


def checksum(value: Any) -> int:
    """The checksum of a value, by its content alone. Raises TypeError where text_of does."""
    return zlib.crc32(text_of(value).encode(errors="surrogatepass"))


def fingerprint(dataset: Any) -> int | None:
    """The checksum of eight evenly spaced samples, or of all if these are fewer, each fetched alone and with a seed of
    its own: another one if they have changed in content, labels or augmentation. None if that cannot be told: a sample
    cannot be fetched alone, or has no checksum, or the dataset has an `order` of its own, on which its samples may
    depend, or an attribute `fingerprint` that is None."""
    if hasattr(dataset, "order") or getattr(dataset, "fingerprint", "") is None:
        return None
    samples = SeededBatches(copy(dataset), 0)  # a copy: what a dataset opens when it is used stays closed in it
    with suppress(Exception):  # whatever a dataset raises, the first validation or step raises again
        numbers = np.linspace(0, len(dataset) - 1, min(8, len(dataset)), dtype=int)
        return checksum([samples[int(number), np.array([number])] for number in numbers])
    return None


class Loader(DataLoader):
    """The batches of a sampler, on the device. If a worker process does not deliver within `config.timeout` seconds,
    the loop gets a RuntimeError. `before_batch` is called before each batch."""

    def __init__(self, fabric: Fabric, dataset: Dataset, sampler, config, before_batch: Callable | None = None):
        # Python 3.14 would import the main script in each worker by default, and a notebook has none. A library that
        # cannot be used after a fork needs torch.multiprocessing.set_start_method("spawn", force=True) in
        # build_datasets.
        is_fork = sys.platform == "linux" and get_start_method(allow_none=True) is None
        super().__init__(
            SeededBatches(dataset, config.seed),
            sampler=sampler,
            batch_size=None,  # an item of SeededBatches is a whole batch
            collate_fn=torch.nn.Identity(),  # and is collated
            num_workers=config.num_workers,
            persistent_workers=config.num_workers > 0,
            multiprocessing_context="fork" if config.num_workers and is_fork else None,
            timeout=config.timeout if config.num_workers else 0,
            pin_memory=fabric.device.type == "cuda",
            worker_init_fn=start_worker,
            generator=torch.Generator(),  # otherwise each iterator draws from the global generator
        )
        self.fabric = fabric
        self.before_batch = before_batch
        self.set_seed = seeder(fabric.device.type, "step", config.seed)  # of `micro_batches`
        self.epoch: Iterator = iter(())  # the micro-batches that are left of it
        self.step = -1  # after which they come

    def __iter__(self) -> Iterator:
        if self.fabric.device.type == "cpu" and self.num_workers == 0:
            batches = map(self.dataset.__getitem__, self.sampler)  # without the DataLoader: saves 11 of 300 µs
        else:
            batches = super().__iter__()
        if self.fabric.device.type != "cpu":
            batches = map(self.fabric.to_device, batches)  # fabric.setup_dataloaders would replace the sampler, too
        return batches if self.before_batch is None else with_call(self.before_batch, batches)

    def micro_batches(self, step: int, timer: Any) -> Iterator:
        """The micro-batches of this rank in a training step, each with whether it is the last one. All generators are
        seeded before each.

        Each epoch has an iterator of its own, made when its first micro-batch is asked for. So workers do not run ahead
        into the next epoch, whose order may depend on the training."""
        plan = self.sampler.plan
        if self.step != step - 1 or self.step % plan.steps_per_epoch == 0:
            self.sampler.step = step - 1
            self.epoch = iter(self)
        for micro_step in range(plan.grad_accum_steps):
            batch = timer.next(self.epoch)
            number = (step - 1) * plan.grad_accum_steps + micro_step
            self.set_seed(number * plan.world_size + self.sampler.rank)  # among those of all ranks
            yield batch, micro_step == plan.grad_accum_steps - 1
        self.step = step


def with_call(before_batch: Callable, batches: Iterator) -> Iterator:
    """The batches, with a call before each. It knows no Loader, whose workers would otherwise outlive the run."""
    for batch in batches:
        before_batch()
        yield batch


def start_worker(worker: int):
    """Prepares a worker process. A signal to the process group must not end it before the loop has saved. A file that a
    dataset has opened before, to read it, gets a position of its own: otherwise all processes would move the same one.
    Files to write share theirs, such as stdout: otherwise a process would write over the lines of others."""
    # A handler that does nothing: what a process ignores, the programs that it starts ignore, too.
    handle_signals(lambda *signal: None, ExitStack())
    # Workers share batches by file name. With file descriptors, the loop would wait forever for a frozen worker.
    torch.multiprocessing.set_sharing_strategy("file_system")
    if sys.platform != "linux":  # where workers begin without the files of this process
        return
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        with suppress(OSError):  # the list itself was a file, too
            is_written = fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
            if stat.S_ISREG(os.fstat(file).st_mode) and not is_written:
                own = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
                os.lseek(own, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, file, inheritable=False)
                os.close(own)
