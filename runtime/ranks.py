"""Agreement of the processes of a run, called ranks, and the signals that stop them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from simple_parsing.utils import flatten_join

from runtime.errors import ConfigError
from runtime.files import as_run_error
from runtime.options import marked
from runtime.source import SOURCES, checksum_of, note_imports
from runtime.terminal import is_local_zero

# That stop a run. submitit sends SIGUSR2, the limit of CPU time SIGXCPU.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
NO_LIMIT = 1e7  # seconds

# ---- agreement


def gloo_group(timeout: float) -> Any:
    """A group of all processes, on the CPU, so that it never waits for a GPU; None in a run of one process. A process
    that waits in it gives up after `timeout` seconds, and at once when another one has ended."""
    if not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


class OnRankZero:
    """Calls functions on rank 0 alone, such as those that write files. Rank 0 waits `timeout` seconds for one that
    hangs; the others wait for it as long as it lives."""

    def __init__(self, timeout: float):
        self.is_rank_zero = not dist.is_initialized() or dist.get_rank() == 0
        self.group = gloo_group(timeout if self.is_rank_zero else NO_LIMIT)

    @as_run_error()
    def __call__(self, function: Callable, *args) -> Any:
        """Returns the result of function(*args), on all ranks."""
        result = [function(*args) if self.is_rank_zero else None]
        if self.group is not None:
            dist.broadcast_object_list(result, group=self.group)
        return result[0]


def difference(found: dict) -> str | None:
    """The first difference between what a rank and what rank 0 have found, in words; None if there is none. All ranks
    call it."""
    if not dist.is_initialized():
        return None
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (found, os.uname().nodename))
    first, _ = ranks[0]
    for rank, (other, host) in enumerate(ranks):
        for name in first | other:
            if other.get(name) != first.get(name):
                return f"{name}: {other.get(name)} on rank {rank} ({host}), {first.get(name)} on rank 0"
    return None


def check_ranks(config, found: dict):
    """Raises ConfigError if a rank has other source files or options than rank 0, or has found something else."""
    note_imports()
    names = [[*SOURCES]]  # of rank 0
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    checksums = {f"checksum of {name}": checksum_of(name) for name in names[0]}
    own = marked(config, "per_host")
    options = {f"--{name}": value for name, value in flatten_join(asdict(config)).items() if name not in own}
    other = difference(checksums | options | found)
    if other:
        raise ConfigError(
            f"{other}; all machines need the same files, options and data, and a --root_dir on a file system that they "
            "share"
        )


def gather_batches(batches: list) -> list:
    """The batches of all ranks on rank 0, in the order of the samples: eval_batches gives them to the ranks in turn.
    [] on other ranks."""
    if not dist.is_initialized():
        return batches
    ranks: list = [[]] * dist.get_world_size()
    dist.gather_object(batches, ranks if dist.get_rank() == 0 else None, group=gloo_group(NO_LIMIT))
    return [batch for turn in zip(*ranks, strict=True) for batch in turn]


# ---- signals


def handle_signals(handler: Any, resources: ExitStack, signals: tuple = SIGNALS):
    """Makes `handler` receive the signals until the resources are closed."""
    with suppress(ValueError):  # in another thread than the main one Python has no signal handlers
        for number in signals:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                resources.callback(signal.signal, number, signal.signal(number, handler))


class StopSignals:
    """Turns one of SIGNALS to any rank into a decision of all ranks to stop at the same place. A second Ctrl-C ends the
    process at once; other signals may come twice, as from a terminal that is closed, or torchrun. The ranks meet about
    once a second, since that may take 1 ms."""

    def __init__(self, timeout: float):
        self.received = 0  # number of the signal
        self.group = gloo_group(timeout)
        self.is_stopping = False  # all ranks
        self.interval = 1  # calls between two meetings
        self.calls = 0  # since the last one
        self.met = time.monotonic()
        self.interrupt: Any = None  # what a second Ctrl-C does

    def listen(self, resources: ExitStack):
        """Receives signals until the resources are closed."""
        self.interrupt = signal.getsignal(signal.SIGINT)
        handle_signals(self.receive, resources)

    def receive(self, number: int, frame):
        signal.signal(signal.SIGINT, self.interrupt)
        if is_local_zero() and not self.received:
            with suppress(OSError):  # stderr may be closed; print is not safe in a signal handler, os.write is
                os.write(2, b"\nstopping at the end of a step; a second Ctrl-C ends the process at once\n")
        self.received = number

    def must_stop(self) -> bool:
        """Whether to stop. All ranks call it before each step, and before each batch of a validation."""
        if self.group is None:
            return self.received > 0
        self.calls += 1
        if self.calls >= self.interval:
            self.meet()
        return self.is_stopping

    def begin_validation(self):
        """Lets the ranks meet in the first batch: batches may take longer than steps."""
        self.interval = 1

    def meet(self):
        """Waits for all ranks, as they must before a step waits for the device: it would wait forever for a rank that
        has died."""
        if self.group is None:
            return
        values = torch.tensor([self.received, time.monotonic() - self.met])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        received, seconds = values.tolist()
        self.is_stopping = received > 0
        self.interval = max(1, int(self.calls / max(seconds, 0.5)))  # calls in a second; at most twice as many as now
        self.calls = 0
        self.met = time.monotonic()
