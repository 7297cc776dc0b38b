"""The data: edit `build_datasets`. Below it, what makes the order and the randomness of the samples exact.

The order of an epoch is a pure function of (seed, epoch). It is cut into effective batches, those into micro-batches,
and rank r of W takes the micro-batches r, r + W, ... So a run can be resumed at any (epoch, step), on any number of
devices, with exactly the remaining samples.
"""

import fcntl
import io
import math
import os
import random
import signal
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import active_children
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from config import ConfigError
from launch import SIGNALS


def build_datasets(config, augment: bool = True) -> dict[str, Dataset]:
    """Returns the datasets under "train", "val" and "test". Edit here, or apply one of recipes/data.md.

    Any map-style Dataset of CPU tensors works. Its methods `__getitems__`, which is called with a NumPy array of
    indices, and `collate_fn` are used, if it has them. `order(epoch, generator)` of the training set, if it has one,
    returns the indices of an epoch in their order, a function of its arguments alone; TrainSampler does the rest. A
    Subset has no `order`. Only build_model and compute_loss in train.py depend on what a sample is. Random augmentation
    may use the global generators of torch, NumPy and `random`: all are seeded before each micro-batch. Make a generator
    of your own in `__getitem__`, from a number of a global one. A file may stay open: each data worker gets a position
    of its own in a file that was opened to be read.

    One process of each machine calls this first and alone, so it may download files; the others then find them there. A
    kill may leave a part of a file, unless utils.atomically writes it. Fill a directory that machines share beforehand.

    Args:
        config: The TrainConfig of the run. `data_dir`, the directory of files, is not used for digits.
        augment: Whether to shift the training images at random; False in test.py.
    """
    from sklearn.datasets import load_digits

    if config.data_dir:
        raise OSError("the digits come with scikit-learn, no directory is read")
    images, targets = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)  # 1,797 images, grey values 0..16
    targets = torch.tensor(targets, dtype=torch.int64)
    order = np.random.default_rng(0).permutation(len(targets))
    train, val, test = np.split(order, [1217, 1417])  # the indices of each
    std, mean = torch.std_mean(images[train])
    images = (images - mean) / std
    return {
        "train": ImageDataset(images[train], targets[train], num_classes=10, shift=1 if augment else 0),
        "val": ImageDataset(images[val], targets[val], num_classes=10),
        "test": ImageDataset(images[test], targets[test], num_classes=10),
    }


class ImageDataset(Dataset):
    """Images in memory and their class indices, fetched a batch at a time.

    Args:
        images: (samples, channels, height, width), floating-point.
        targets: (samples,), class indices.
        num_classes: Number of classes.
        shift: Each image is shifted at random by up to `shift` pixels in each direction. Default 0.
    """

    def __init__(self, images: Tensor, targets: Tensor, num_classes: int, shift: int = 0):
        if images.ndim != 4:
            raise ValueError(f"images: expected (samples, channels, height, width), not {tuple(images.shape)}")
        if len(images) != len(targets):
            raise ValueError(f"images and targets: {len(images)} images, but {len(targets)} targets")
        self.images = images
        self.targets = targets
        self.num_classes = num_classes
        self.shift = shift
        if shift == 0:
            return
        # A view that has each image at each shift: (samples, channels, 2 * shift + 1, 2 * shift + 1, height, width).
        padded = F.pad(images, (shift, shift, shift, shift), value=images.min().item())
        self.shifted = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)

    @staticmethod
    def collate_fn(batch):
        return batch  # __getitems__ returns a whole batch

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(indices)
        targets = self.targets.index_select(0, index)  # index_select: half the time of [index]
        if self.shift == 0:
            return self.images.index_select(0, index), targets
        dy, dx = torch.randint(2 * self.shift + 1, (2, len(index)))
        return self.shifted[index, :, dy, dx], targets  # (batch, channels, height, width)


# ---- exact order and randomness; rarely edited


@dataclass
class TrainSampler:
    """Yields the micro-batches of a rank from `self.step`, which `Loader.batches_from` sets, to the end of the epoch. A
    micro-batch is a pair: its number in the run, and the indices of its samples. A second stream of data needs a plan
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


def eval_batches(num_samples: int, micro_batch_size: int, world_size: int, batch_size: int = 0) -> list[list]:
    """Batches of an evaluation, a list for each rank: in order, each sample once. All ranks have the same number of
    batches, none of them empty; otherwise a rank would wait forever for the others. A batch is a pair: the number of
    its first sample, and the indices of its samples.

    Args:
        num_samples: Number of samples.
        micro_batch_size: Samples of a micro-batch in the training.
        world_size: Number of processes.
        batch_size: Maximum number of samples in a batch; 1 may become 2, since all ranks need equally many batches.
            Default: four micro-batches, since no activations are kept for a backward pass, but at most 256 samples,
            and at least one micro-batch.

    Raises:
        ConfigError: There are fewer samples than processes.
    """
    if 0 < num_samples < world_size:
        raise ConfigError(f"--devices: {num_samples} samples are too few to evaluate on {world_size} processes")
    if not batch_size:
        batch_size = max(micro_batch_size, min(4 * micro_batch_size, 256))
    rounds = min(math.ceil(num_samples / (world_size * batch_size)), num_samples // world_size)
    if rounds == 0:  # no samples
        return [[] for _ in range(world_size)]
    parts = np.array_split(np.arange(num_samples), rounds * world_size)
    batches = [(int(indices[0]), indices) for indices in parts]
    return [batches[rank::world_size] for rank in range(world_size)]


def seeder(device: str, tag: str, seed: int) -> Callable:
    """Returns a function that seeds the global generators of torch, NumPy and Python with a number, so that no state of
    a generator has to be saved. It takes 8 µs; torch.manual_seed alone would take 80 µs.

    Args:
        device: The kind of device whose generators are seeded beside those of the CPU, such as "cuda".
        tag: What the numbers count. With the same tag, two functions would give the same random numbers.
        seed: The seed of the run.
    """
    base = zlib.crc32(f"{tag} {seed}".encode())
    functions: list = [torch.default_generator.manual_seed, np.random.seed, random.seed]
    if device == "cuda":  # all devices: --strategy dp uses several
        functions += [generator.manual_seed for generator in torch.cuda.default_generators]
    elif device == "mps":
        functions.append(torch.mps.manual_seed)

    def set_seed(number: int):
        for function in functions:
            function((base + number) % 2**32)  # NumPy takes 32 bits

    return set_seed


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
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(indices))
        return self.collate([self.dataset[index] for index in indices.tolist()])


def checksum(batch: Any) -> int | None:
    """The checksum of a batch, which may be nested: the same on every device. None if the batch has an object that
    cannot be saved."""
    file = io.BytesIO()
    with suppress(Exception):  # PicklingError, TypeError, ...
        on_cpu = move_data_to_device(batch, torch.device("cpu"))
        torch.save(apply_to_collection(on_cpu, Tensor, torch.clone), file)  # clone: without the rest of a larger tensor
        return zlib.crc32(file.getbuffer())
    return None


class Loader(DataLoader):
    """The batches of a sampler, on the device. The worker processes are ended with `resources`. If one does not deliver
    within `config.timeout` seconds, the loop gets a RuntimeError."""

    def __init__(self, fabric, dataset: Dataset, sampler, config, resources: ExitStack):
        # Workers share batches by file name. With file descriptors, the loop would wait forever for a frozen worker.
        torch.multiprocessing.set_sharing_strategy("file_system")
        super().__init__(
            SeededBatches(dataset, config.seed),
            sampler=sampler,
            batch_size=None,  # an item of SeededBatches is a whole batch
            collate_fn=torch.nn.Identity(),  # and is collated
            num_workers=config.num_workers,
            persistent_workers=config.num_workers > 0,
            # Python 3.14 would import the main script in each worker by default, and a notebook has none.
            multiprocessing_context="fork" if config.num_workers and sys.platform == "linux" else None,
            timeout=config.timeout if config.num_workers else 0,
            pin_memory=fabric.device.type == "cuda",
            worker_init_fn=start_worker,
            generator=torch.Generator(),  # otherwise each iterator draws from the global generator
        )
        self.fabric = fabric
        self.has_begun = False
        self.first_checksum: int | None = None  # of the first batch in this process
        self.first_batch: Any = None  # of the last step; None in the first step of this process
        if self.num_workers > 0:
            resources.callback(self.end_workers, set(active_children()))

    def __iter__(self) -> Iterator:
        if self.fabric.device.type != "cpu":  # as fabric.setup_dataloaders does, which would replace the sampler, too
            batches = map(self.fabric.to_device, super().__iter__())
        elif self.num_workers > 0:
            batches = super().__iter__()
        else:
            batches = map(self.dataset.__getitem__, self.sampler)  # without the DataLoader: saves 11 of 300 µs
        if self.has_begun:
            return batches
        self.has_begun = True
        first = next(batches)
        self.first_checksum = checksum(first)  # before compute_loss, which may change the batch in place
        return chain([first], batches)

    def compare_first(self, name: str, cut: list, then: list | None, console) -> list:
        """Returns `cut`, which tells how the batches are cut, and the checksum of the first one in this process. Prints
        that it is another one than `then`, what was returned before; a checksum of None is not compared."""
        now = [*cut, self.first_checksum]
        if then and then[:-1] == cut and None not in (then[-1], now[-1]) and then != now:
            console.print(f"{name} is another one than before: samples, labels, order or augmentation have changed")
        return now

    def epochs_from(self, step: int) -> Iterator:
        """The batches from a step on. Each epoch has its own iterator, created when its first batch is requested. So
        workers do not run ahead into the next epoch, whose order may depend on the training."""
        steps_per_epoch = self.sampler.plan.steps_per_epoch
        while True:
            self.sampler.step = step
            yield from self
            step += steps_per_epoch - step % steps_per_epoch  # the first of the next epoch

    def batches_from(self, step: int, trained: list | None = None, console=None) -> Iterator:
        """The training batches from a step on, without end.

        Args:
            step: Steps of the run so far.
            trained: `trained_batch()` of the last of them: the loader begins with that step, to compare its batch.
            console: The Console that tells if the batch has changed.
        """
        plan = self.sampler.plan
        # An order of one's own of an epoch that is over may have depended on the training.
        can_compare = step % plan.steps_per_epoch > 0 or not hasattr(self.sampler.dataset, "order")
        if trained and can_compare:
            batches = self.epochs_from(step - 1)
            for _ in range(plan.grad_accum_steps):
                next(batches)
            self.compare_first(f"the batch of step {step}", [plan.micro_batch_size], trained, console)
        else:
            batches = self.epochs_from(step)
        first = next(batches)
        self.first_checksum = checksum(first)
        yield first
        is_intact = checksum(first) == self.first_checksum
        if not is_intact:  # compute_loss changes its batch in place
            self.first_checksum = None
        del first  # frees its memory
        for number, batch in enumerate(batches, start=1):
            if is_intact and number % plan.grad_accum_steps == 0:
                self.first_batch = batch
            yield batch

    def trained_batch(self) -> list:
        """The size and the checksum of the first micro-batch of the last step, as the loader gave it; None for a
        checksum that is not known."""
        found = self.first_checksum if self.first_batch is None else checksum(self.first_batch)
        return [self.sampler.plan.micro_batch_size, found]

    def end_workers(self, others: set):
        """Ends the workers, also a frozen one, for which this process would wait at its end. `others` are the child
        processes that were there before, as in a notebook."""
        handler = signal.getsignal(signal.SIGCHLD)
        with suppress(ValueError):  # outside the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error for each worker
        for worker in set(active_children()) - others:
            worker.kill()
            worker.join()
        with suppress(ValueError):
            signal.signal(signal.SIGCHLD, handler)


def start_worker(worker: int):
    """Prepares a worker process. A signal to the process group must not end it before the loop has saved. A file that a
    dataset has opened before, to read it, gets a position of its own: otherwise all processes would move the same one.
    Files to write share theirs, such as stdout: otherwise a process would write over the lines of others."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
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
