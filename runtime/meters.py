"""Means over ranks, gradients, time and memory."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from runtime.errors import RunError
from runtime.ranks import difference

# ---- values that compute_loss returns


def as_scalars(values: Any) -> dict:
    """The values of compute_loss as scalar tensors, detached. Raises RunError if they are not a dict of scalars."""
    if not isinstance(values, dict):
        raise RunError(f"compute_loss: must return, first, a dict with one named `loss`, not a {type(values).__name__}")
    for name, value in values.items():
        if not is_scalar(value):
            raise RunError(f"compute_loss: `{name}` is not a number or a tensor of one, but {value!r:.200}")
    return {name: torch.as_tensor(value).detach() for name, value in values.items()}


def is_scalar(value: Any) -> bool:
    """Whether a value is a number of Python's or NumPy's, or a tensor of one, without dimensions."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim == 0
    return isinstance(value, (int, float, np.number, np.bool_))


class Means:
    """Means of named values over all ranks since they were last taken. As a part of `state` they survive a resume.

    `add` does not wait for the device. `take` and `state_dict` wait for it and for the other ranks, so all ranks must
    call them, with values of the same names."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self.dtype = torch.float32 if fabric.device.type == "mps" else torch.float64  # MPS has no float64
        self.sums: dict = {}
        self.weights: dict = {}

    def add(self, values: dict, weight: float = 1):
        """Adds scalars, each the mean of `weight` samples. For batches of the same size, 1 is enough. Raises RunError
        for other values."""
        for name, value in as_scalars(values).items():
            if name not in self.sums:
                self.set(name, 0, 0)
            self.sums[name].add_(value, alpha=weight)
            self.weights[name] += weight

    def set(self, name: str, total: float, weight: float):
        """Replaces the sum and the weight of a value."""
        self.sums[name] = torch.full((), total, dtype=self.dtype, device=self.fabric.device)
        self.weights[name] = weight

    def take(self, scores: Any = None) -> dict:
        """The means by name, with one wait for the device.

        Args:
            scores: What a metric has computed; it is returned, too. A number is averaged over the ranks, so that all
                have the same.

        Raises:
            RunError: A score has the name of a mean, or the ranks have values of other names.
        """
        named = {} if scores is None else scores
        if not isinstance(named, dict):  # of a single metric
            named = {"metric": named}
        named = {str(name): value for name, value in named.items()}  # such as the number of a class
        for name in named.keys() & self.sums.keys():
            raise RunError(f"compute_loss and build_metrics both have {name!r}: give one of them another name")
        self.add({name: value for name, value in named.items() if is_scalar(value)})
        means = {name: total / weight for name, (total, weight) in self.reduce().items()}
        self.sums = {}
        self.weights = {}
        return means | {name: value for name, value in named.items() if name not in means}

    def reduce(self) -> dict[str, tuple]:
        """The sum and the weight of each value over all ranks, with one wait for the device.

        Raises:
            RunError: The ranks have values of other names.
        """
        names = sorted(self.sums)  # the same order on all ranks
        other = difference({"names of the values": ", ".join(names)})
        if other:
            raise RunError(f"compute_loss and metrics must give the same names on all ranks: {other}")
        if not names:
            return {}
        sums = [self.sums[name] for name in names]
        weights = [torch.full_like(sums[0], self.weights[name]) for name in names]
        table = torch.stack([*sums, *weights]).view(2, -1)
        if dist.is_initialized():
            dist.all_reduce(table)
        reduced = dict(zip(names, table.T.tolist(), strict=True))
        return {name: reduced[name] for name in self.sums}  # in the order of compute_loss

    def state_dict(self) -> dict:
        state = self.reduce()
        self.load_state_dict(state)  # as a resume does, so that both add to the same sums
        return state

    def load_state_dict(self, state: dict):
        """Rank 0 continues with the sums and weights of all ranks, the others with zero. So the total is the same, in
        every digit, on any number of ranks."""
        share = 1.0 if self.fabric.is_global_zero else 0.0
        for name, (total, weight) in state.items():
            self.set(name, share * total, share * weight)


# ---- time and memory


@dataclass
class Timer:
    """Measures the samples per second, and the fraction of time spent waiting for data. The clock runs from `next` to
    `stop`."""

    device: torch.device  # of the model
    samples_per_batch: int  # of a micro-batch, on all devices together
    began: float | None = None  # while the clock is running
    seconds: float = 0.0
    waited: float = 0.0
    batches: int = 0

    def stop(self):
        """Stops the clock, if it is running, once the device has finished its work."""
        if self.began is None:
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.seconds += time.perf_counter() - self.began
        self.began = None

    def next(self, batches: Iterator):
        """The next batch."""
        asked = time.perf_counter()
        if self.began is None:
            self.began = asked
        batch = next(batches)
        self.waited += time.perf_counter() - asked
        self.batches += 1
        return batch

    def take(self) -> dict:
        """The figures since the last call, and the peak memory. Stops the clock."""
        self.stop()
        if not self.batches:  # in a resume that begins with a validation
            return {}
        row = {
            "samples_per_second": self.batches * self.samples_per_batch / self.seconds,
            "data_wait": self.waited / self.seconds,
            "peak_memory_mb": peak_memory(self.device),
        }
        self.seconds = 0.0
        self.waited = 0.0
        self.batches = 0
        return row


def peak_memory(device: torch.device) -> float:
    """The peak memory so far, in MB: allocated by torch on a GPU, otherwise the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e6
