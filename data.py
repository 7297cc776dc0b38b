"""The data: edit `build_datasets`. Below it, what makes the order of the samples exact.

The order of an epoch is a pure function of (seed, epoch) and is cut into effective batches, those into micro-batches
that are dealt to the devices in turn. So a run goes on at any (epoch, step), also on another number of devices, on
exactly the samples that are left.
"""

import gzip
import random
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate


def build_datasets(name: str, data_dir: str | None, seed: int) -> dict[str, Dataset]:
    """Returns the datasets under "train", "val" and "test".

    Edit here. Any map-style Dataset will do: samples are a pair (input, target), or a dict with these two first. Its
    randomness may come from torch, NumPy or `random`: all are seeded by (seed, epoch, index) before each sample. A
    dataset with `__getitems__` and `set_epoch`, as ImageDataset below, serves whole batches: no call per sample.

    Args:
        name: "digits" or "mnist".
        data_dir: Directory of the files; unused for digits.
        seed: Seed of the augmentation. The split into train, val and test does not depend on it.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is not what it should be.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        images, targets = load_digits(return_X_y=True)
        images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)  # 1,797 images, grey values 0..16
        targets = torch.tensor(targets, dtype=torch.int64)
        train, val, test = np.split(np.random.default_rng(0).permutation(len(targets)), [1217, 1417])
    else:
        folder = Path(data_dir)
        first = [read_idx(folder, f"train-{part}", dims) for part, dims in (("images", 3), ("labels", 1))]
        second = [read_idx(folder, f"t10k-{part}", dims) for part, dims in (("images", 3), ("labels", 1))]
        for images, targets in (first, second):
            if len(images) != len(targets):
                raise ValueError(f"{folder}: {len(images)} images but {len(targets)} labels")
        if first[0].shape[1:] != second[0].shape[1:]:
            raise ValueError(f"{folder}: images of {[*first[0].shape[1:]]} and of {[*second[0].shape[1:]]} pixels")
        images = torch.cat([first[0], second[0]]).unsqueeze(1).float().div_(255)
        targets = torch.cat([first[1], second[1]]).long()
        order = np.random.default_rng(0).permutation(len(first[1]))
        val, train = np.split(order, [len(order) // 12])  # of MNIST's 60,000: 5,000 and 55,000
        test = np.arange(len(order), len(targets))
    std, mean = torch.std_mean(images[train])
    images, num_classes = images.sub_(mean).div_(std), int(targets.max()) + 1
    return {
        "train": ImageDataset(images[train], targets[train], shift=1, seed=seed, num_classes=num_classes),
        "val": ImageDataset(images[val], targets[val], num_classes=num_classes),
        "test": ImageDataset(images[test], targets[test], num_classes=num_classes),
    }


class ImageDataset(Dataset):
    """Images in memory, (samples, channels, height, width), and their class numbers, (samples,), served a batch at a
    time. Each image is shifted by up to `shift` pixels in each direction, drawn per sample and epoch from `seed`."""

    def __init__(self, images: Tensor, targets: Tensor, shift: int = 0, seed: int = 0, num_classes: int = 10):
        self.targets, self.shift, self.seed, self.num_classes = targets, shift, seed, num_classes
        padded = F.pad(images, (shift,) * 4, value=images.min().item())
        # A window of an image's shape begins at each number in memory. To shift an image is to begin elsewhere.
        _, channels, height, width = images.shape
        per_image, plane, self.row, _ = padded.stride()
        positions = padded.numel() - (channels - 1) * plane - (height - 1) * self.row - width + 1
        self.windows = padded.as_strided((positions, channels, height, width), (1, plane, self.row, 1))
        self.first = torch.arange(len(images)) * per_image
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draws the shifts of an epoch; called before its first batch, in whichever process loads it."""
        generator = torch.Generator().manual_seed(stable_seed("shift", self.seed, epoch))
        dy, dx = torch.randint(2 * self.shift + 1, (2, len(self)), generator=generator)
        self.starts = self.first + dy * self.row + dx

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__(np.array([index]))
        return images[0], targets[0]

    def __getitems__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(indices)
        return self.windows.index_select(0, self.starts.index_select(0, index)), self.targets.index_select(0, index)


def read_idx(folder: Path, name: str, dims: int) -> Tensor:
    """Reads an IDX file of bytes, plain or .gz (format: http://yann.lecun.com/exdb/mnist). Returns a uint8 tensor."""
    stems = [folder / f"{name}{separator}idx{dims}-ubyte" for separator in "-."]
    candidates = stems + [stem.with_name(stem.name + ".gz") for stem in stems]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{stems[0]} is missing (plain or .gz)")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    shape = np.frombuffer(content[4 : 4 + 4 * dims].ljust(4 * dims, b"\0"), dtype=">u4")
    if content[:4] != bytes([0, 0, 8, dims]) or len(content) != 4 + 4 * dims + np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} is no whole IDX file of {dims} dimensions of bytes")
    if 0 in shape:
        raise ValueError(f"{path} is empty")
    return torch.tensor(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape.tolist()))


def stable_seed(*parts: int | str) -> int:
    """A 32-bit seed for each combination of parts, the same on every machine and version (unlike `hash`)."""
    return zlib.crc32(repr(parts).encode())


class TrainSampler(Sampler):
    """Deals the micro-batches of a run: rank r of W gets the micro-batches r, r + W, ... of each effective batch.

    Yields (epoch, sample numbers), from step `first_step` of the run on; the steps before it cost nothing. What is left
    of an epoch after its last step is left out.
    """

    def __init__(self, num_samples, steps_per_epoch, epochs, batch_size, micro_batch_size, rank, world_size, seed):
        self.num_samples, self.steps_per_epoch, self.epochs, self.seed = num_samples, steps_per_epoch, epochs, seed
        self.batch_size, self.micro_batch_size, self.first_step = batch_size, micro_batch_size, 0
        self.starts = range(rank * micro_batch_size, batch_size, world_size * micro_batch_size)  # within a batch

    def __len__(self) -> int:
        return (self.epochs * self.steps_per_epoch - self.first_step) * len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        first_epoch, first_step = divmod(self.first_step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            generator = torch.Generator().manual_seed(stable_seed("order", self.seed, epoch))
            order = torch.randperm(self.num_samples, generator=generator).numpy()
            for step in range(first_step if epoch == first_epoch else 0, self.steps_per_epoch):
                for start in self.starts:
                    start += step * self.batch_size
                    yield epoch, order[start : start + self.micro_batch_size]
            del order  # before the next is made: of 100 million samples it takes 800 MB


class EvalSampler(Sampler):
    """Deals batches in order, each sample once. Every rank gets equally many full batches, so that nobody waits: the
    last ones repeat the last sample. `sizes` tells for each batch of this rank how many of its samples count."""

    def __init__(self, num_samples, batch_size, rank, world_size):
        self.num_samples, self.batch_size = num_samples, batch_size
        batches = -(-num_samples // (batch_size * world_size))
        self.starts = [(batch * world_size + rank) * batch_size for batch in range(batches)]
        self.sizes = [min(max(num_samples - start, 0), batch_size) for start in self.starts]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for start in self.starts:
            yield 0, np.arange(start, start + self.batch_size).clip(max=self.num_samples - 1)


class MicroBatches(Dataset):
    """Fetches a whole micro-batch by its key (epoch, sample numbers), in the training process or in a worker."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed, self.epoch, self.root = dataset, seed, None, dataset
        while isinstance(self.root, Subset):
            self.root = self.root.dataset

    def __getitem__(self, key: tuple[int, np.ndarray]):
        epoch, indices = key
        has_epochs = hasattr(self.root, "set_epoch")
        if has_epochs and epoch != self.epoch:
            self.root.set_epoch(epoch)
            self.epoch = epoch
        if has_epochs and hasattr(self.root, "__getitems__"):  # serves whole batches, random by the epoch
            batch = self.dataset.__getitems__(indices)
        else:
            batch = default_collate([self.fetch(epoch, index) for index in indices.tolist()])
        # The loop unpacks (input, target): a dict gives its values in order. Whoever wants names edits both places.
        return tuple(batch.values()) if isinstance(batch, dict) else batch

    def fetch(self, epoch: int, index: int):
        seed = stable_seed("sample", self.seed, epoch, index)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed visits every backend: 80 µs against 1
        np.random.seed(seed)
        random.seed(seed)
        return self.dataset[index]


class Loader(DataLoader):
    """A DataLoader that fetches straight away where it has nothing else to do: that saves 15 µs a batch."""

    def __iter__(self) -> Iterator:
        is_plain = self.num_workers == 0 and not self.pin_memory
        return map(self.dataset.__getitem__, self.sampler) if is_plain else super().__iter__()


def build_loader(dataset: Dataset, sampler: Sampler, seed: int, num_workers: int, pin_memory: bool) -> DataLoader:
    """A loader of the sampler's micro-batches."""
    return Loader(
        MicroBatches(dataset, seed),
        sampler=sampler,
        batch_size=None,  # a key is a whole micro-batch
        collate_fn=as_it_is,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else the loader draws from the global one
    )


def as_it_is(batch):
    return batch


def ignore_signals(worker: int) -> None:
    """A signal to the whole process group must not kill the workers before the loop has saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
