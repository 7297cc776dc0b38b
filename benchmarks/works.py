"""The works that every program trains: model, optimizer, batch size, data."""

import torch
from torch import Tensor, nn

WORKS = {
    "W1": {"data": "digits", "epochs": 200, "batch_size": 64, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W1v": {"data": "digits", "epochs": 200, "batch_size": 64, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W2": {"data": "large", "epochs": 5, "batch_size": 128, "optimizer": "torch.optim.SGD", "lr": 1e-2},
    "W3": {"data": "large", "epochs": 3, "batch_size": 128, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W4": {"data": "digits", "epochs": 50, "batch_size": 64, "optimizer": "torch.optim.AdamW", "lr": 4e-3},
}
VALIDATED = ("W1v",)  # W1 with a validation after each epoch


def build(work: str) -> nn.Module:
    """The model of a work, with the same initial weights in every program."""
    torch.manual_seed(0)
    if work in ("W1", "W1v"):
        return nn.Sequential(nn.Flatten(), *mlp(64, 64, 64, 10))
    if work == "W2":
        return nn.Sequential(nn.Flatten(), *mlp(784, 128, 64, 10))
    if work == "W4":  # the layers of model.py
        convolutions = (nn.Conv2d(1, 32, 3, 1, 1), nn.GELU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GELU())
        return nn.Sequential(
            *convolutions, nn.Conv2d(64, 64, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(256, 10)
        )
    convolutions = (nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1568, 10))


def mlp(*sizes: int) -> list[nn.Module]:
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def tensors(work: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and class indices of "train", 1,217 of 8x8 or 55,000 of 28x28 pixels, and of "val", 200 or 1,000."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    images, targets = (images - images.mean()) / images.std(), torch.tensor(targets, dtype=torch.int64)
    train, val = torch.arange(1217), torch.arange(1217, 1417)
    if WORKS[work]["data"] == "large":  # the digits, enlarged, again and again
        images = nn.functional.pad(images.repeat_interleave(3, 2).repeat_interleave(3, 3), (2,) * 4)
        train, val = torch.arange(55_000) % 1417, torch.arange(1000) % 380 + 1417
    return {"train": (images[train], targets[train]), "val": (images[val], targets[val])}
