"""How the processes of a run begin and end: Fabric and its strategy, checks that the ranks agree, signals."""

import fcntl
import logging
import os
import signal
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cli import DEVICE_OPTIONS, ROOT, SOURCES, as_config_error, is_local_zero, say
from config import PER_HOST_OPTIONS, ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # that stop a run
PREEMPTED = 75  # exit code of a run that was stopped by a signal and has saved: EX_TEMPFAIL of sysexits.h
SHARED = "all machines need the same files, options and --root_dir, on a file system that they share"


# ---- Fabric


def build_fabric(config) -> Fabric:
    """Fabric with the devices of a TrainConfig or TestConfig. Raises ConfigError for what the machine does not have."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # train.py prints the devices itself
    # prepare_device refuses the first, 16-mixed and dp; dp has no gradient sync to skip.
    warnings.filterwarnings("ignore", ".*(is not supported on CPU|not support skipping the gradient sync)")
    options = {name: getattr(config, name) for name in DEVICE_OPTIONS}
    with as_config_error(config, *DEVICE_OPTIONS):
        chosen = Fabric(**options).strategy
        prepare_device(config, chosen.root_device.type)
        # Replace Fabric's classes by those below.
        if isinstance(chosen, DDPStrategy):
            options["strategy"] = ResumableDDP(config, chosen)
        if isinstance(chosen.precision, MixedPrecision):
            del options["precision"]
            options["plugins"] = PlainMixedPrecision(chosen.precision.precision, chosen.precision.device)
        return PlainFabric(**options)


class PlainFabric(Fabric):
    """Fabric whose `backward` is that of the tensor; in 16-mixed, of the scaled loss."""

    def backward(self, tensor: Tensor, *args, model=None, **kwargs):
        precision = self.strategy.precision
        if getattr(precision, "scaler", None):  # in 16-mixed
            precision.update_scale()
            tensor = precision.scaler.scale(tensor)
        tensor.backward(*args, **kwargs)


class PlainMixedPrecision(MixedPrecision):
    """bf16-mixed and 16-mixed for any number of optimizers, and with torch.autograd.grad.

    Fabric updates the loss scale of 16-mixed in each optimizer's step. A second optimizer that steps on the same
    backward pass would then divide its gradients again. Here the scale is updated before the next backward pass."""

    backward = Precision.backward  # if it is overridden, Fabric refuses torch.autograd.grad
    has_stepped = False

    def optimizer_step(self, optimizer, **kwargs):
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        self.has_stepped = True
        return self.scaler.step(optimizer, **kwargs)

    def update_scale(self):
        if self.has_stepped:
            self.scaler.update()
            self.has_stepped = False

    def state_dict(self) -> dict:
        self.update_scale()
        return super().state_dict()


class ResumableDDP(DDPStrategy):
    """DDP that sums the gradients in the same order in all steps, also in the first step of a resumed run.

    Args:
        config: Its `strategy` tells whether to look for parameters without a gradient.
        chosen: The DDPStrategy that this one replaces.
    """

    def __init__(self, config, chosen: DDPStrategy):
        is_gpu = chosen.root_device.type == "cuda"
        launcher = chosen.launcher  # None if an external launcher has started the processes
        super().__init__(
            # On GPUs, StopSignals must time out first: NCCL aborts the process without a message.
            timeout=timedelta(seconds=config.timeout + (60 if is_gpu else 0)),
            start_method="fork" if launcher and launcher.is_interactive_compatible else "popen",
        )
        self.find_unused_parameters = config.strategy == "ddp_find_unused_parameters_true"

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Like Fabric's, but on the current CUDA stream. Fabric 2.6.6 uses a side stream, so that all gradients cross
        streams in each step: pytorch-lightning#21567, fixed by #21746, which is in no release yet."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # DDP refuses a model in which nothing is trained
        device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        ddp = DistributedDataParallel(
            module,
            device_ids=device_ids,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,  # without a copy of the gradients
        )
        if not self.find_unused_parameters:  # otherwise DDP keeps its first order
            order_buckets(ddp)
        return ddp


def order_buckets(ddp: DistributedDataParallel):
    """Makes DDP order its gradient buckets now, the last parameter first. Otherwise it does so after the first backward
    pass of a process, and three or more ranks would sum the gradients of the first resumed step in another order."""
    ddp._pre_forward(None)
    # abs: a complex loss has no backward pass.
    loss = sum(parameter.sum().abs() for parameter in ddp.parameters() if parameter.requires_grad)
    ddp._post_forward(loss).backward()
    ddp.zero_grad()


def prepare_device(config, device: str):
    """Sets torch's flags for a kind of device, such as "cuda". Raises ValueError for an option that it does not
    support, and says if a GPU is there that cannot be used."""
    if config.precision == "16-mixed" and device != "cuda":  # on MPS, a fused optimizer would step on an overflow
        raise ValueError("16-mixed needs a CUDA GPU; use bf16-mixed or 32-true")
    if config.strategy == "dp" and (device != "cuda" or config.precision == "bf16-mixed"):
        raise ValueError("dp needs CUDA GPUs, and would run bf16-mixed in float16; use ddp, which is faster, too")
    if device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32; on a CPU this would make small products twice as slow
        torch.backends.cudnn.deterministic = config.deterministic
        torch.backends.cudnn.benchmark = not config.deterministic
        return
    torch.set_flush_denormal(True)  # Adam's averages for dead units are denormal: its step takes several times longer
    if config.accelerator == "auto" and Path("/dev/nvidia0").exists():
        say(
            f"this machine's NVIDIA GPU is not used by torch {torch.__version__}: "
            "torch is a CPU build, the driver is too old, or CUDA_VISIBLE_DEVICES hides it"
        )


# ---- processes


@contextmanager
def first_process_alone(config, *options: str) -> Iterator[None]:
    """On each machine, one process runs the body alone, which may download the data that these options name. The others
    with the same values wait as long as it lives, and then run the body together. If it dies, one of them is the first.
    Raises ConfigError, which names the options, for an OSError or ImportError of the body: others are bugs."""
    values = [getattr(config, name) for name in options]
    key = zlib.crc32(repr([os.getuid(), ROOT, values]).encode())
    path = Path(tempfile.gettempdir()) / f"build_datasets-{key:08x}.lock"
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits; ends with the process
        if not path.exists():  # the first one was done, and has deleted it
            fcntl.flock(lock, fcntl.LOCK_UN)
        with as_config_error(config, *options, kinds=(OSError, ImportError)):
            yield
        path.unlink(missing_ok=True)


def launch(fabric: Fabric, config, function: Callable) -> int:
    """Calls function(resources) in every process and returns its exit code. `resources` is an ExitStack for what must
    not outlive the run, however it ends.

    Raises:
        ConfigError: The launcher has started another number of processes than the options ask for, or a process has
            other options or files than rank 0.
    """
    started = int(os.environ.get("WORLD_SIZE", fabric.world_size))
    if started != fabric.world_size:
        raise ConfigError(
            f"--devices {config.devices} --num_nodes {config.num_nodes}: asks for {fabric.world_size} process(es), "
            f"but the launcher has started {started}"
        )

    def start(fabric: Fabric) -> int:
        other = differing_rank(fabric, fingerprint(config))
        if other:
            raise ConfigError(f"{other} has other files or options than rank 0, or has found another run; {SHARED}")
        with ExitStack() as resources:
            return function(resources)

    code = fabric.launch(start)
    if dist.is_initialized():
        if code:  # once a process has ended with it, launchers kill the others, which may still close their loggers
            fabric.barrier()
        dist.destroy_process_group()  # after the model is gone, otherwise gloo may abort at exit
    return code


def changed_files(then: dict) -> str:
    """A part of a line that names those source files that have changed since SOURCES was `then`, if any."""
    changed = [name for name in then if SOURCES.get(name) != then[name]]
    return f"; changed since: {', '.join(changed)}" if changed else ""


def fingerprint(config) -> int:
    """A hash of the programs and options, which must be the same in all processes."""
    options = {name: value for name, value in asdict(config).items() if name not in PER_HOST_OPTIONS}
    return zlib.crc32(repr([SOURCES, options]).encode())


def differing_rank(fabric: Fabric, value: Any) -> str | None:
    """The name of a rank, and of its host, whose value differs from that of rank 0; None if all agree."""
    own = (value, os.uname().nodename)
    found = [own] * fabric.world_size
    if dist.is_initialized():
        dist.all_gather_object(found, own)
    for rank, (found_value, host) in enumerate(found):
        if found_value != found[0][0]:
            return f"rank {rank} on {host}"
    return None


# ---- signals


class StopSignals:
    """Turns one of SIGNALS to any rank into a decision of all ranks to stop after the same step. A second Ctrl-C ends
    the process at once; other signals may come twice, as from a terminal that is closed, or torchrun. The ranks
    synchronize about once a second, since that may take 1 ms."""

    def __init__(self, timeout: float, resources: ExitStack):
        self.received = 0  # number of the signal
        self.group = None
        self.interval = 1  # steps between two synchronizations
        self.steps = 0  # since the last one
        self.synchronized = time.monotonic()
        if dist.is_initialized():  # on the CPU, so that it never waits for a GPU
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.interrupt = signal.getsignal(signal.SIGINT)
        with suppress(ValueError):  # in another thread than the main one Python has no signal handlers
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                    resources.callback(signal.signal, number, signal.signal(number, self.receive))

    def receive(self, number: int, frame):
        signal.signal(signal.SIGINT, self.interrupt)
        if is_local_zero() and not self.received:
            with suppress(OSError):  # stderr may be closed; print is not safe in a signal handler, os.write is
                os.write(2, b"\nstopping at the end of a step; a second Ctrl-C ends the process at once\n")
        self.received = number

    def must_stop(self, synchronize: bool) -> bool:
        """Whether to stop; all ranks call it once per step. With `synchronize` the ranks are synchronized now, as they
        must be before a step waits for the device: a wait for a rank that has died would never end."""
        if self.group is None:
            return self.received > 0
        self.steps += 1
        if self.steps < self.interval and not synchronize:
            return False
        values = torch.tensor([self.received, time.monotonic() - self.synchronized])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        received, seconds = values.tolist()
        self.interval = max(1, int(self.steps / max(seconds, 0.5)))  # steps in a second; at most twice as many as now
        self.steps = 0
        self.synchronized = time.monotonic()
        return received > 0
