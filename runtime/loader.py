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

LARGE = 10_000_000  # samples, from which on their order is computed index by index


@dataclass
class TrainSampler:
    """Yields the micro-batches of a rank from `self.step`, which `Loader.micro_batches` sets, to the end of the epoch.
    A micro-batch is a pair: its number in the run, and the indices of its samples. A second stream of data needs a plan
    of its own from `make_plan`, and another seed, as in recipes/methods/semi_supervised.patch."""

    plan: Any  # the Plan of the run
    dataset: Any  # its method `order`, if it has one, gives the indices of an epoch; else they are shuffled
    rank: int
    seed: int  # with the epoch, it determines the order
    step: int = 0  # of the run, counted from 0

    def __iter__(self) -> Iterator:
        plan = self.plan
        epoch, step_in_epoch = divmod(self.step, plan.steps_per_epoch)
        order = self.order(epoch)
        last_step = plan.steps_per_epoch - 1  # of an epoch, which may have fewer samples
        needed = last_step * plan.effective_batch_size + plan.last_batch_size
        if len(order) < needed:
            raise ConfigError(f"an epoch needs {needed} indices, but {type(self.dataset).__name__} gives {len(order)}")
        parts = plan.effective_batch_size // plan.micro_batch_size  # of a step
        number = plan.steps_per_epoch * parts
        for i in range(step_in_epoch * parts + self.rank, number, plan.world_size):
            step, part = divmod(i, parts)
            size = plan.last_batch_size // parts if step == last_step else plan.micro_batch_size
            start = step * plan.effective_batch_size + part * size
            yield epoch * number + i, order[start : start + size]

    def order(self, epoch: int) -> Any:
        """The indices of an epoch in their order."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"order {self.seed} {epoch}".encode()))
        if hasattr(self.dataset, "order"):
            return np.asarray(self.dataset.order(epoch, generator))
        size = len(self.dataset)
        if size < LARGE:
            return torch.randperm(size, generator=generator).numpy()
        return Permutation(size, generator)


class Permutation:
    """A random permutation of range(size), computed where it is read: it takes no memory, and no time before the first
    index, but ten times as long for an index as torch.randperm.

    A generalized Feistel network permutes the pairs (left, right) with left below `a` and right below `b`, where a * b
    is hardly more than `size`; a number that is not below `size` is permuted again (Black & Rogaway 2002, "Ciphers with
    arbitrary finite domains"). The function of a round is the finalizer of SplitMix64 (Steele et al. 2014)."""

    def __init__(self, size: int, generator: torch.Generator):
        self.size = size
        self.a = math.isqrt(size - 1) + 1
        self.b = -(-size // self.a)  # rounded up
        self.keys = torch.randint(2**63 - 1, (6,), generator=generator).numpy().astype(np.uint64)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: slice) -> np.ndarray:
        numbers = self.permuted(np.arange(positions.start, positions.stop))
        outside = numbers >= self.size
        while outside.any():
            numbers[outside] = self.permuted(numbers[outside])
            outside = numbers >= self.size
        return numbers

    def permuted(self, numbers: np.ndarray) -> np.ndarray:
        left, right = np.divmod(numbers.astype(np.uint64), np.uint64(self.b))
        for key in self.keys.reshape(-1, 2):
            left = (left + mixed(right + key[0])) % np.uint64(self.a)
            right = (right + mixed(left + key[1])) % np.uint64(self.b)
        return (left * np.uint64(self.b) + right).astype(np.int64)


def mixed(values: np.ndarray) -> np.ndarray:
    """Numbers of 62 random bits, each a function of one of these."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(2)  # so that a sum does not overflow


@dataclass
class EvalBatches:
    """The batches of a rank in an evaluation. A batch is a pair: the number of its first sample, and the indices of its
    samples. All samples are cut into `rounds` batches per rank, whose sizes differ by one at most, and the ranks take
    them in turn."""

    num_samples: int
    rounds: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return self.rounds

    def __iter__(self) -> Iterator:
        number = self.rounds * self.world_size
        for i in range(self.rank, number, self.world_size):
            size, larger = divmod(self.num_samples, number)  # the first batches have a sample more
            first = i * size + min(i, larger)
            yield first, np.arange(first, first + size + (i < larger))


def eval_batches(num_samples: int, batch_size: int, fabric: Fabric) -> EvalBatches:
    """The batches of this rank in an evaluation: all ranks together have each sample once, in order. All have the same
    number of batches, none of them empty; otherwise a rank would wait forever for the others.

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
    return EvalBatches(num_samples, rounds, fabric.global_rank, world_size)


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
