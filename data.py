"""The data: edit `build_datasets`. Below it, what makes the order and the randomness of the samples exact.

The order of an epoch is a pure function of (seed, epoch). It is cut into effective batches, those into micro-batches,
and rank r of W takes the micro-batches r, r + W, ... So a run goes on at any (epoch, step), also on another number of
devices, on exactly the samples that are left.
"""

import math
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate


def build_datasets(name: str, data_dir: str | None, augment: bool = True) -> dict[str, Dataset]:
    """Returns the datasets under "train", "val" and "test". Edit here, or apply one of recipes/data.md.

    Any map-style Dataset will do that gives CPU tensors. `__getitems__(indices)`, as in PyTorch, and an attribute
    `collate_fn` are used if it has them. What a sample is, only build_model and compute_loss in train.py know. Its
    randomness may come from torch, NumPy or `random`: all are seeded before each micro-batch.

    Args:
        name: "digits".
        data_dir: Directory of the files; unused for digits.
        augment: Whether the training images are shifted at random; test.py wants them as they are.
    """
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)  # 1,797 images, grey values 0..16
    targets = torch.tensor(targets, dtype=torch.int64)
    train, val, test = np.split(np.random.default_rng(0).permutation(len(targets)), [1217, 1417])
    std, mean = torch.std_mean(images[train])
    images = (images - mean) / std
    return {
        "train": ImageDataset(images[train], targets[train], num_classes=10, shift=1 if augment else 0),
        "val": ImageDataset(images[val], targets[val], num_classes=10),
        "test": ImageDataset(images[test], targets[test], num_classes=10),
    }


class ImageDataset(Dataset):
    """Images in memory, (samples, channels, height, width), and their class indices, (samples,), fetched a batch at a
    time. Each image is shifted at random by up to `shift` pixels in each direction; default 0."""

    collate_fn = torch.nn.Identity()  # __getitems__ has made a batch

    def __init__(self, images: Tensor, targets: Tensor, num_classes: int, shift: int = 0):
        self.images, self.targets, self.num_classes, self.shift = images, targets, num_classes, shift
        # A view that has each image at each shift: (samples, channels, 2 * shift + 1, 2 * shift + 1, height, width).
        padded = F.pad(images, (shift,) * 4, value=images.min().item())
        self.shifted = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(indices)
        targets = self.targets.index_select(0, index)  # index_select: half the time of [index]
        if not self.shift:
            return self.images.index_select(0, index), targets
        dy, dx = torch.randint(2 * self.shift + 1, (2, len(index)))
        return self.shifted[index, :, dy, dx], targets


# ---- exact order and randomness; rarely edited


class TrainSampler:
    """Yields the micro-batches of this rank from step `step` of epoch `epoch`, which the loop sets, to the epoch's end.
    Each is a key for MicroBatches: the number of the micro-batch in the run, and the indices of its samples."""

    def __init__(self, num_samples, steps_per_epoch, batch_size, micro_batch_size, rank, world_size, seed):
        self.num_samples, self.steps_per_epoch, self.seed = num_samples, steps_per_epoch, seed
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.epoch, self.step = 0, 0

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"order {self.seed} {self.epoch}".encode()))
        order = torch.randperm(self.num_samples, generator=generator).numpy()
        micro_batches = order[: self.steps_per_epoch * self.batch_size].reshape(-1, self.micro_batch_size)
        first = self.step * self.batch_size // self.micro_batch_size
        for i in range(first + self.rank, len(micro_batches), self.world_size):
            yield self.epoch * len(micro_batches) + i, micro_batches[i]


def eval_batches(num_samples: int, micro_batch_size: int, world_size: int, batch_size: int | None = None) -> list[list]:
    """Keys for MicroBatches, a list for each rank: in order, each sample once. All ranks have equally many, and none is
    empty, so that nobody waits. A key has at most `batch_size` samples (2 where it is 1), by default more than a
    micro-batch: nothing is kept for a backward pass. Raises ValueError for fewer samples than ranks."""
    if num_samples < world_size:
        raise ValueError(f"{num_samples} samples are too few to evaluate on {world_size} processes")
    batch_size = batch_size or max(micro_batch_size, min(4 * micro_batch_size, 256))
    rounds = min(math.ceil(num_samples / (world_size * batch_size)), num_samples // world_size)
    keys = [(int(batch[0]), batch) for batch in np.array_split(np.arange(num_samples), rounds * world_size)]
    return [keys[rank::world_size] for rank in range(world_size)]


class MicroBatches(Dataset):
    """A dataset whose items are batches. For a key (number, sample indices), it seeds all generators by the number, and
    fetches the samples. (To seed for each sample would cost 440 µs per 64.)"""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, zlib.crc32(f"data {seed}".encode())
        while isinstance(dataset, Subset):  # has no collate_fn of its own
            dataset = dataset.dataset
        self.collate = getattr(dataset, "collate_fn", default_collate)

    def __getitem__(self, key: tuple[int, np.ndarray]):
        number, indices = key
        seed = (self.seed + number) % 2**32
        torch.default_generator.manual_seed(seed)  # torch.manual_seed visits every backend: 80 µs against 1
        np.random.seed(seed)
        random.seed(seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(indices))
        return self.collate([self.dataset[index] for index in indices.tolist()])


def seeder(fabric, tag: str, seed: int) -> Callable[[int], object]:
    """Returns a function that seeds torch's generators, of the CPU and the devices, by a number, so that no generator's
    state has to be saved."""
    generators, base = [torch.default_generator], zlib.crc32(f"{tag} {seed}".encode())
    if fabric.device.type == "cuda":
        generators += torch.cuda.default_generators  # of all devices: --strategy dp uses several
    elif fabric.device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return lambda number: [generator.manual_seed(base + number) for generator in generators]


class Loader(DataLoader):
    """The batches of a sampler, on the device. Its `config.num_workers` processes end with `resources`; where one does
    not deliver for `config.timeout` seconds, the loop gets a RuntimeError."""

    def __init__(self, fabric, dataset: Dataset, sampler, config, resources: ExitStack):
        # Workers share batches by file name: with file descriptors, the loop would wait forever for a frozen worker.
        torch.multiprocessing.set_sharing_strategy("file_system")
        super().__init__(
            MicroBatches(dataset, config.seed),
            sampler=sampler,
            batch_size=None,  # a key of the sampler is a whole batch
            collate_fn=torch.nn.Identity(),  # and collated
            num_workers=config.num_workers,
            persistent_workers=config.num_workers > 0,
            # Python 3.14's default would import the main script in each worker: notebooks have none.
            multiprocessing_context="fork" if config.num_workers and sys.platform == "linux" else None,
            timeout=config.timeout if config.num_workers else 0,
            pin_memory=fabric.device.type == "cuda",
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # else each iterator draws from the global one
        )
        self.fabric, self.others = fabric, {*torch.multiprocessing.active_children()}
        resources.callback(self.end_workers)

    def __iter__(self) -> Iterator:
        if self.fabric.device.type != "cpu":  # fabric.setup_dataloaders would do the same, and add a sampler of its own
            return map(self.fabric.to_device, super().__iter__())
        # Without workers, to bypass the DataLoader saves 11 of the 300 µs of a small step.
        return super().__iter__() if self.num_workers else map(self.dataset.__getitem__, self.sampler)

    def end_workers(self) -> None:
        """Ends the workers now, also one that is frozen: a traceback that is kept would keep them alive."""
        if self._iterator is not None:  # of persistent workers
            self._iterator._shutdown_workers()
            for worker in self._iterator._workers:
                worker.kill()
            for queue in self._iterator._index_queues:  # whose threads were told to end, and not waited for
                queue._thread.join(timeout=1)
        elif self.num_workers:  # some may have started before another failed to, and the process would wait for them
            for child in {*torch.multiprocessing.active_children()} - self.others:
                child.kill()


def ignore_signals(worker: int) -> None:
    """A signal to the whole process group must not kill the workers before the loop has saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
