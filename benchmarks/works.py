"""The three works that every program trains: model, optimizer, batch size, data."""

import struct
from pathlib import Path

import numpy as np
import torch
from torch import nn

WORKS = {
    "W1": {"dataset": "digits", "epochs": 200, "batch_size": 64, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W2": {"dataset": "mnist", "epochs": 5, "batch_size": 128, "optimizer": "torch.optim.SGD", "lr": 1e-2},
    "W3": {"dataset": "mnist", "epochs": 3, "batch_size": 128, "optimizer": "torch.optim.Adam", "lr": 1e-3},
}


def build(work: str) -> nn.Module:
    """The model of a work, with the same initial weights in every program."""
    torch.manual_seed(0)
    if work == "W1":
        return nn.Sequential(nn.Flatten(), *mlp(64, 64, 64, 10))
    if work == "W2":
        return nn.Sequential(nn.Flatten(), *mlp(784, 128, 64, 10))
    convolutions = (nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1568, 10))


def mlp(*sizes: int) -> list[nn.Module]:
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def write_mnist(folder: Path) -> None:
    """60,000 and 1,000 images of 28x28 pixels in MNIST's format: scikit-learn's digits, enlarged, again and again."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    images = np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    folder.mkdir(parents=True)
    for part, count in (("train", 60_000), ("t10k", 1_000)):
        chosen = np.arange(count) % len(images)
        for name, array in (("images-idx3", images[chosen]), ("labels-idx1", targets[chosen].astype(np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(header + array.tobytes())
