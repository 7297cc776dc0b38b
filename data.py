"""The data: edit `build_datasets`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset


def build_datasets(config, augment: bool = True) -> dict[str, Dataset]:
    """Returns the datasets under "train", "val" and "test". Edit here, or apply one of recipes/data/.

    Any map-style Dataset of CPU tensors works. Its methods `__getitems__`, which is called with a NumPy array of
    indices, and `collate_fn` are used, if it has them. `order(epoch, generator)` of the training set, if it has one,
    returns the indices of an epoch in their order, a function of its arguments alone; TrainSampler does the rest. A
    Subset has no `order`. Only build_model and compute_loss in train.py depend on what a sample is. Random augmentation
    may use the global generators of torch, NumPy and `random`: all are seeded before each micro-batch. Make a generator
    of your own in `__getitem__`, from a number of a global one. A file may stay open: each data worker gets a position
    of its own in a file that was opened to be read.

    One process of each machine calls this first and alone, so it may download files; the others then find them there. A
    kill may leave a part of a file, unless runtime.files.atomically writes it. Fill a directory that machines share
    beforehand.

    Args:
        config: The TrainConfig of the run. `data_dir`, the directory of files, is not used for digits.
        augment: Whether to shift the training images at random; False in test.py.
    """
    from sklearn.datasets import load_digits

    if config.data_dir:
        raise OSError(f"--data_dir {config.data_dir}: the digits come with scikit-learn, no directory is read")
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
