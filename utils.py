"""What the loop calls by name, and nobody edits: launch, failures, signals, sums, times. Nothing here knows a loss, a
metric, a batch or a key of `state`."""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from cli import is_local_zero, say
from config import OWN_OF_A_HOST, ConfigError, RunError

PREEMPTED = 75  # exit code of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again"
SHARED = "all machines need the same files, options and --root_dir, on a file system that they share"


def prepare_device(config) -> None:
    """Sets torch's flags for the kind of device. Raises ConfigError for an option that the device does not support."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # the first lines of train.py say more than their banner
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if config.accelerator != "cpu" and (config.accelerator != "auto" or has_gpu):
        torch.set_float32_matmul_precision("high")  # TF32; on a CPU it would make small products twice as slow
        torch.backends.cudnn.deterministic = True  # else the gradients of a convolution may differ from run to run
        if config.precision == "64-true" and torch.backends.mps.is_available():
            raise ConfigError("--precision 64-true: Apple's GPUs lack float64; use 32-true or --accelerator cpu")
        return
    torch.set_flush_denormal(True)  # Adam keeps such numbers for dead units: its step took several times longer
    if config.precision == "16-mixed":
        raise ConfigError("--precision 16-mixed: needs a GPU; use bf16-mixed or 32-true")
    if config.strategy == "dp":
        raise ConfigError("--strategy dp: needs GPUs; use ddp, which is faster on them, too")


def launch(fabric: Fabric, config, function: Callable[[ExitStack], int]) -> int:
    """Calls function(resources) in every process and returns its exit code. What must not outlive the run, however it
    ends, is registered with `resources`. Raises ConfigError where the launcher has started another number of processes
    than the options mean, or where a process has other options or files than rank 0."""
    if (started := int(os.environ.get("WORLD_SIZE", fabric.world_size))) != fabric.world_size:
        meant = f"--devices {config.devices} --num_nodes {config.num_nodes}: means {fabric.world_size} process(es)"
        raise ConfigError(f"{meant}, but the launcher has started {started}")
    # Fabric has no option for this timeout, 30 minutes. On GPUs StopSignals gives up first: NCCL aborts silently.
    vars(fabric.strategy)["_timeout"] = timedelta(seconds=config.timeout + (60 if fabric.device.type == "cuda" else 0))
    getattr(fabric.strategy, "_ddp_kwargs", {})["gradient_as_bucket_view"] = True  # saves a copy of the gradients
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":  # PR_SET_PDEATHSIG: do not outlive the launcher
        ctypes.CDLL(None).prctl(1, signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGKILL)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        say("torchrun --max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else a restart may hang")

    def start(fabric: Fabric) -> int:
        sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
        options = {name: value for name, value in asdict(config).items() if name not in OWN_OF_A_HOST}
        if odd := differing_rank(fabric, zlib.crc32(repr([sources, options]).encode())):
            raise ConfigError(f"{odd} has other files or options than rank 0, or has found another run; {SHARED}")
        with ExitStack() as resources:
            return function(resources)

    code = fabric.launch(start)
    if dist.is_initialized():
        dist.destroy_process_group()  # after the model is gone, else gloo can abort at exit
    return code


def differing_rank(fabric: Fabric, value) -> str | None:
    """Names a process, with its machine, whose value is not that of rank 0; None where all agree."""
    found = [(value, os.uname().nodename)] * fabric.world_size
    if dist.is_initialized():
        dist.all_gather_object(found, found[0])
    return next((f"rank {i} on {host}" for i, (other, host) in enumerate(found) if other != found[0][0]), None)


def on_rank_zero(fabric: Fabric, function: Callable, *args):
    """Calls the function on rank 0 alone. Every rank returns its result, or raises its ConfigError or RunError."""
    result = None
    if fabric.is_global_zero:
        try:
            result = function(*args)
        except (ConfigError, RunError) as error:
            result = error
    result = fabric.broadcast(result)
    if isinstance(result, Exception):
        raise result
    return result


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a decision of all ranks to stop after the same step. A second signal ends
    the process at once. Several processes agree by an all-reduce about once a second: with gloo it may take 1 ms."""

    def __init__(self, timeout: float, resources: ExitStack):
        self.received, self.group, self.interval = 0, None, 1
        self.steps, self.asked = 0, time.monotonic()  # since the ranks last asked each other
        if dist.is_initialized():  # on the CPU, so that to ask never waits for a GPU
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.handlers = resources.enter_context(ExitStack())  # restores the previous handlers when it is closed
        if threading.current_thread() is threading.main_thread():  # Python has no signal handlers elsewhere
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self.handlers.callback(signal.signal, number, signal.signal(number, self.receive))

    def receive(self, number: int, frame) -> None:
        self.received = number
        with suppress(OSError):  # stderr may be closed; print is not safe in a signal handler, os.write is
            if is_local_zero():
                os.write(2, b"\nstopping after this step; a second signal ends the process at once\n")
        self.handlers.close()

    def __call__(self, must_ask: bool) -> bool:
        """Whether to stop; all ranks call it once per step. With `must_ask` they always ask each other: what follows
        waits for the device, and a wait for a rank that has died would never end."""
        self.steps += 1
        if self.group is None or (self.steps < self.interval and not must_ask):
            return self.group is None and self.received > 0
        answer = torch.tensor([self.received, time.monotonic() - self.asked])
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group)
        received, seconds = answer.tolist()
        self.interval = max(1, int(self.steps / max(seconds, 0.5)))  # at most twice as long as before
        self.steps, self.asked = 0, time.monotonic()
        return received > 0


@contextmanager
def shapes_in_error(batch) -> Iterator[None]:
    """Adds the shapes of a batch to an exception raised inside: the model may expect others."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the batch is {tree_map_only(Tensor, lambda x: f'{x.dtype} {tuple(x.shape)}', batch)}")
        raise


def skip_wrappers(fabric: Fabric, model: nn.Module, optimizer) -> None:
    """Bypasses Fabric's wrappers in 32-true, where they convert nothing: saves 30 of the 230 µs of a small step."""
    if fabric.strategy.precision.precision == "32-true":  # instance attributes hide the wrappers' methods
        model.__dict__["forward"] = model._forward_module
        optimizer.__dict__ |= {"step": optimizer.optimizer.step, "zero_grad": optimizer.optimizer.zero_grad}


def order_buckets(module: nn.Module) -> None:
    """Has DDP order its gradient buckets now, the last parameter first. By itself, it orders them after the first
    backward pass of a process, so three or more ranks would sum the gradients of a resume's first step differently."""
    for ddp in [part for part in module.modules() if isinstance(part, DistributedDataParallel)]:
        ddp._pre_forward(None)
        ddp._post_forward(sum(p.sum().abs() for p in ddp.parameters() if p.requires_grad)).backward()
        ddp.zero_grad()


def clip_gradients(fabric: Fabric, optimizer, max_norm: float | None) -> Tensor:
    """Clips the total norm of an optimizer's gradients to max_norm, if given. Returns the norm before clipping, on the
    device. In 16-mixed, give each optimizer its own backward pass: each step updates the scaler that they share."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if scaler := getattr(fabric.strategy.precision, "scaler", None):
        scaler.unscale_(optimizer.optimizer)  # Fabric's own clipping refuses this for a fused optimizer
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class Sums:
    """Means of named values over all ranks. Each of the `windows` holds their sums since it was last taken, as plain
    numbers. `add` waits for nothing, `collect` for the device."""

    def __init__(self, fabric: Fabric, windows: dict[str, dict]):
        self.fabric, self.windows, self.weight = fabric, windows, 0
        self.added: dict[str | None, list[Tensor]] = {}

    def add(self, values: dict[str, Tensor], weight: int = 1) -> None:
        """Adds values, sums over `weight` samples or micro-batches; always under the same names."""
        for name, value in values.items():
            self.added.setdefault(name, []).append(value.detach())
        self.weight += weight

    def collect(self, scalars: dict[str, Tensor]) -> dict[str, float]:
        """Brings what was added, summed over the ranks, to the host: needed before `take`, and before a save. The same
        wait fetches `scalars`; their means over the ranks are returned."""
        self.added[None] = [torch.full((), self.weight, device=self.fabric.device)]
        dtype = torch.float32 if self.fabric.device.type == "mps" else torch.float64  # MPS has no float64
        terms = [torch.stack(values).to(dtype).sum() for values in self.added.values()]
        sums = torch.stack([*terms, *(scalar.to(self.fabric.device, dtype) for scalar in scalars.values())])
        if dist.is_initialized():
            dist.all_reduce(sums)
        numbers = sums.tolist()  # the wait
        added = dict(zip(self.added, numbers, strict=False))  # the weight under None
        for window, before in self.windows.items():
            self.windows[window] = {name: before.get(name, 0.0) + value for name, value in added.items()}
        self.added, self.weight = {}, 0
        return {k: v / self.fabric.world_size for k, v in zip(scalars, numbers[len(added) :], strict=True)}

    def take(self, window: str, prefix: str = "") -> dict[str, float]:
        """The means of a window, which begins anew."""
        sums, self.windows[window] = self.windows[window], {}
        return {prefix + name: value / sums[None] for name, value in sums.items() if name is not None}


class Timer:
    """Samples per second, and the fraction of the time that the loop waits for data. A step takes from its first batch
    to `stop`; what comes between the steps does not count."""

    def __init__(self):
        self.began, self.seconds, self.waited, self.steps = 0.0, 0.0, 0.0, 0

    def next(self, batches: Iterator):
        began = time.perf_counter()
        self.began = self.began or began
        batch = next(batches)
        self.waited += time.perf_counter() - began
        return batch

    def stop(self) -> None:
        self.seconds, self.began, self.steps = self.seconds + time.perf_counter() - self.began, 0.0, self.steps + 1

    def take(self, batch_size: int) -> dict[str, float]:
        """The figures since the last time."""
        row = {"samples_per_second": batch_size * self.steps / self.seconds, "data_wait": self.waited / self.seconds}
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0
        return row


def memory(state: dict, device: torch.device) -> str:
    """What the modules and optimizers in `state` hold after the first step, and the most that was taken until then."""
    weights = [[*value.parameters()] for value in state.values() if isinstance(value, nn.Module)]
    states = [[*value.state.values()] for value in state.values() if isinstance(value, Optimizer)]
    in_weights, in_states = (sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)) / 1e6
                             for tree in (weights, states))  # fmt: skip
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else unit * getrusage(RUSAGE_SELF).ru_maxrss
    return f"memory per device: weights {in_weights:.3g} MB, optimizer {in_states:.3g} MB, peak {peak / 1e6:.4g} MB"
