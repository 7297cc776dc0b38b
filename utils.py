"""What the loop calls: the plan of a run, means, gradients, timing; and how to write a file as a whole. Nothing here
depends on the task: on a metric, a batch, a key of `state`, or on a loss other than by the name `loss`."""

import json
import math
import os
import stat
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from config import ConfigError, RunError, TrainConfig, mode_of
from launch import difference

# ---- the plan of a run


@dataclass(frozen=True)
class Plan:
    """All that follows from the config, the sizes of the datasets and the number of processes."""

    train_samples: int
    val_samples: int  # of a validation
    effective_batch_size: int  # = world_size x micro_batch_size x grad_accum_steps
    world_size: int
    micro_batch_size: int
    grad_accum_steps: int
    steps_per_epoch: int
    total_steps: int
    log_interval: float  # steps between two logs; intervals may be fractional
    val_interval: float
    save_interval: float
    peak_lr: float
    patience: float  # validations without a better value, after which the run is finished
    monitor_mode: str  # "max" or "min"

    def is_due(self, step: int, interval: float) -> bool:
        """Whether this step reaches or passes a multiple of `interval`, or is the last step."""
        steps_since = (step + 1e-6) % interval  # since the last multiple, which rounding must not hide
        return steps_since < 1 or step == self.total_steps

    def is_finished(self, step: int, bad_validations: int) -> bool:
        """Whether the run is finished after a step, and so many validations without a better value."""
        return step >= self.total_steps or bad_validations >= self.patience

    def micro_batch_number(self, step: int, micro_step: int, rank: int) -> int:
        """The number of a micro-batch among those of all steps and ranks; steps are counted from 1."""
        return ((step - 1) * self.grad_accum_steps + micro_step) * self.world_size + rank


def make_plan(
    config: TrainConfig, train_samples: int, val_samples: int, world_size: int, saved_micro_batch_size: int
) -> Plan:
    """The plan of a run.

    Raises:
        ConfigError: The effective batch size is larger than the training set, or is not divisible; or `monitor_mode` is
            needed, or wrong.
    """
    batch_size = config.effective_batch_size
    if batch_size > train_samples:
        raise ConfigError(f"--effective_batch_size {batch_size}: there are only {train_samples} training samples")
    micro_batch_size = choose_micro_batch_size(batch_size, config.micro_batch_size, saved_micro_batch_size, world_size)
    per_epoch = limit(train_samples // batch_size, config.limit_train_batches)
    val_batches = limit(math.ceil(val_samples / batch_size), config.limit_val_batches)
    return Plan(
        train_samples=train_samples,
        val_samples=min(val_samples, val_batches * batch_size),
        effective_batch_size=batch_size,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=batch_size // (world_size * micro_batch_size),
        steps_per_epoch=per_epoch,
        total_steps=config.max_steps or max(1, round(config.epochs * per_epoch)),
        log_interval=config.log_interval or per_epoch / config.log_per_epoch,
        val_interval=config.val_interval or per_epoch * config.val_frequency,
        save_interval=config.checkpoint_interval or per_epoch * (config.checkpoint_frequency or math.inf),
        peak_lr=scale_lr(config.base_lr, batch_size, config.base_batch_size, config.lr_scaling_rule),
        patience=config.early_stopping_patience or math.inf,
        monitor_mode=mode_of(config),
    )


def choose_micro_batch_size(effective_batch_size: int, asked: int, saved: int, world_size: int) -> int:
    """The micro-batch size: the one asked for; otherwise that of the run so far, if it divides; otherwise the largest.
    0 means that none was asked for, or saved.

    Raises:
        ConfigError: The effective batch size is not divisible. The message names the nearest sizes that are.
    """
    unit = world_size * (asked or 1)
    if effective_batch_size % unit:
        below = effective_batch_size // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{below + unit}"
        raise ConfigError(
            f"--effective_batch_size {effective_batch_size}: is not a multiple of {world_size} device(s) x "
            f"micro_batch_size {asked or 1}; nearest: {nearest}"
        )
    if asked:
        return asked
    largest = effective_batch_size // world_size
    if saved and largest % saved == 0:
        return saved
    return largest


def scale_lr(base_lr: float, effective_batch_size: int, base_batch_size: int, rule: str) -> float:
    """The learning rate for effective_batch_size, from the one for base_batch_size: "linear" (Goyal et al. 2017,
    arXiv:1706.02677), "sqrt" (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741) or "none"."""
    exponent = {"linear": 1, "sqrt": 0.5, "none": 0}[rule]
    return base_lr * (effective_batch_size / base_batch_size) ** exponent


def limit(total: int, limit_batches: int | float) -> int:
    """How many of `total` batches to use: a count, 0 for none, or a fraction (at least one batch)."""
    if isinstance(limit_batches, float):
        return max(1, int(total * limit_batches + 1e-9))
    return min(total, limit_batches)


# ---- values that compute_loss returns


def as_scalars(values: Any) -> dict:
    """The values of compute_loss as scalar tensors, detached. Raises RunError if they are not a dict of scalars."""
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise RunError(f"compute_loss: must return, first, a dict of means with one named `loss`, not a {kind}")
    scalars = {}
    for name, value in values.items():
        if not is_scalar(value):
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.200}"
            raise RunError(f"compute_loss: `{name}` is not a number or a tensor of one, but {given}")
        scalars[name] = torch.as_tensor(value).detach()
    return scalars


def is_scalar(value: Any) -> bool:
    """Whether a value is a number of Python's or NumPy's, or a tensor of one, without dimensions."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim == 0
    return isinstance(value, (int, float, np.number, np.bool_))


def check_values(values: Any, monitor: str, val_names: Collection[str], device: torch.device) -> float:
    """Checks the values that compute_loss has returned in the first step, and the name of the monitored value. All
    ranks call it. Returns the sum of their losses, which is not finite if one of them is not.

    Args:
        values: The means by name.
        monitor: The name of the monitored value.
        val_names: The names of the results of a validation.
        device: That of the process.

    Raises:
        RunError: `values` is not a dict of scalars, has a name that is taken, or no `loss` with a gradient.
        ConfigError: There is no value of the name `monitor`.
    """
    scalars = as_scalars(values)
    if "loss" not in values:
        given = ", ".join(map(str, values))
        raise RunError(f"compute_loss: must return, first, a dict of means with one named `loss`, but it has {given}")
    if "grad_norm" in values:
        raise RunError("compute_loss: `grad_norm` is logged by train.py: give this value another name")
    if not getattr(values["loss"], "requires_grad", False):
        raise RunError(
            "compute_loss: `loss` has no gradient: "
            "was it detached, made a number by .item(), or is the whole model frozen?"
        )
    loss = scalars["loss"].to(device, copy=True)
    if dist.is_initialized():
        dist.all_reduce(loss)
    names = [f"train/{name}" for name in (*values, "grad_norm")] + [f"val/{name}" for name in val_names]
    if monitor not in names:
        hint = "" if val_names else "; val/ needs validation samples"
        raise ConfigError(f"--monitor {monitor}: choose from {', '.join(names)}{hint}")
    return loss.item()


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Whether a value is better than the best so far, which is None at first. A value that is not finite is not."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if mode == "max" else value < best


class Means:
    """Means of named values over all ranks since they were last taken. As a part of `state` they survive a resume.

    `add` does not wait for the device. `take` and `state_dict` wait for it and for the other ranks, so all ranks must
    call them, with values of the same names."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self.dtype = torch.float32 if fabric.device.type == "mps" else torch.float64  # MPS has no float64
        self.sums: dict = {}
        self.weights: dict = {}

    def add(self, values: dict, weight: int = 1):
        """Adds scalars, each the mean of `weight` samples. For batches of the same size, 1 is enough."""
        for name, value in as_scalars(values).items():
            if name not in self.sums:
                self.set(name, 0, 0)
            self.sums[name].add_(value, alpha=weight)
            self.weights[name] += weight

    def set(self, name: str, total: float, weight: float):
        """Replaces the sum and the weight of a value."""
        self.sums[name] = torch.full((), total, dtype=self.dtype, device=self.fabric.device)
        self.weights[name] = weight

    def take(self, results: dict) -> dict:
        """The means by name, and other results, such as those of metrics, with one wait for the device. A scalar result
        becomes its mean over the ranks. A result replaces a mean of the same name."""
        others = {}
        for key, value in results.items():
            name = str(key)
            if is_scalar(value):
                self.set(name, 0, 0)
                self.add({name: value})
            else:
                others[name] = value
        means = {name: total / weight for name, (total, weight) in self.reduce().items()}
        self.sums = {}
        self.weights = {}
        return means | others

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


# ---- gradients


def parameters_of(optimizer: Any) -> list:
    """The parameters of all groups, in the order of their numbers in the optimizer's state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_lr(group: dict, lr: float):
    """Sets the learning rate of a parameter group. Some optimizers keep it in a tensor, which torch.optim gives to all
    groups."""
    if isinstance(group["lr"], Tensor):
        group["lr"] = torch.full_like(group["lr"], lr)
    else:
        group["lr"] = lr


def unscale_gradients(fabric: Fabric, optimizer: Any):
    """Divides the gradients by the loss scale of 16-mixed. Does nothing in other precisions."""
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if scaler:
        scaler.unscale_(optimizer.optimizer)  # Fabric's clip_gradients refuses this for a fused optimizer


def clip_gradients(optimizer: Any, max_norm: float) -> Tensor:
    """Clips the total norm of an optimizer's gradients to max_norm; 0 only measures it. Returns the norm before
    clipping, on the device."""
    parameters = parameters_of(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([grad.coalesce().values() if grad.is_sparse else grad for grad in gradients])
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


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
        """The figures since the last call."""
        samples = self.batches * self.samples_per_batch
        row = {"samples_per_second": samples / self.seconds, "data_wait": self.waited / self.seconds}
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


# ---- files


def regular_file(path: str, flags: int) -> int:
    """An `opener` for `open`, for files of a run directory, which may come from somebody else: it refuses a link, which
    may lead anywhere, and a FIFO, which would wait for its reader."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise RunError(f"{path} is not a regular file: remove it")
    return os.open(path, flags, 0o666)


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a temporary file and renames it to `path` once it is on the disk: a file at `path` is always complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # it may be a link to any file, if the directory comes from somebody else
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: dict):
    """Writes values as JSON: tensors and arrays are lists, numbers that are not finite null, other objects text."""
    with atomically(path) as file:
        json.dump(as_json(values), file, indent=2, default=str)


def as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.to_dense()
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
