"""How the processes of a run begin and end: Fabric and its strategy, agreement of the ranks, signals, errors."""

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime.checkpoints import check_loadable
from runtime.cli import (
    DEVICE_OPTIONS,
    ROOT,
    SOURCES,
    as_config_error,
    end,
    is_child_of_fabric,
    is_local_zero,
    say,
    write_error,
)
from runtime.errors import ConfigError, RunError
from runtime.options import PER_HOST_OPTIONS

# That stop a run. submitit sends SIGUSR2, the limit of CPU time SIGXCPU.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
PREEMPTED = 75  # exit code of a run that was stopped by a signal and has saved: EX_TEMPFAIL of sysexits.h
NO_LIMIT = 1e7  # seconds


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
        if isinstance(chosen, DDPStrategy):
            options["strategy"] = ResumableDDP(config, chosen)
        fabric = Fabric(**options)
    if config.precision == "bf16-mixed":  # Fabric's own, though it does nothing, would refuse torch.autograd.grad
        fabric.strategy.precision.backward = MethodType(Precision.backward, fabric.strategy.precision)
    return fabric


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
        check_loadable(module)  # DDP fails, too, but without the name
        device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        ddp = DistributedDataParallel(
            module,
            device_ids=device_ids,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,  # without a copy of the gradients
        )
        embeddings = [layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
        has_sparse = any(layer.sparse for layer in embeddings)  # gradients, which order_buckets does not make
        if not self.find_unused_parameters and not has_sparse:  # otherwise DDP keeps its first order
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
    torch.use_deterministic_algorithms(config.deterministic and device != "mps")
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # the same bits without it, in less time
    if device == "cuda":
        torch.backends.cudnn.deterministic = config.deterministic
        torch.backends.cudnn.benchmark = not config.deterministic
        # TF32: faster products of float32, with 10 bits of mantissa. On a CPU, small products would be twice as slow.
        torch.set_float32_matmul_precision("high")
        if config.deterministic:  # before CUDA and NCCL begin, which read these
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            os.environ.setdefault("NCCL_ALGO", "^NVLS")  # which adds in another order each time
    if device != "cpu":
        return
    torch.set_flush_denormal(True)  # Adam's averages for dead units are denormal: its step takes several times longer
    if config.accelerator == "auto" and Path("/dev/nvidia0").exists():
        say(
            f"this machine's NVIDIA GPU is not used by torch {torch.__version__}: "
            "torch is a CPU build, the driver is too old, or CUDA_VISIBLE_DEVICES hides it"
        )


# ---- processes


def launch(fabric: Fabric, config, function: Callable) -> int:
    """Calls function(config, resources) in every process and returns its exit code. `resources` is an ExitStack for
    what must not outlive the run, however it ends.

    Raises:
        ConfigError: The launcher has started another number of processes than the options ask for.
    """
    # By the options: Fabric's world_size is what a launcher has started. Strategies of one process have no number.
    asked = config.num_nodes * getattr(fabric.strategy, "num_processes", 1)
    started = int(os.environ.get("WORLD_SIZE", asked))
    if started != asked:
        raise ConfigError(
            f"--devices {config.devices} --num_nodes {config.num_nodes}: asks for {asked} process(es), "
            f"but the launcher has started {started}"
        )

    def start(fabric: Fabric) -> int:
        with ExitStack() as resources:
            return function(config, resources)

    code = fabric.launch(start)
    if dist.is_initialized():
        dist.destroy_process_group()  # after the model is gone, otherwise gloo may abort at exit
    # When this process ends, the system kills those that Fabric has started: their last output would be lost.
    with suppress(subprocess.TimeoutExpired):  # one hangs, but the run is complete
        for process in getattr(fabric.strategy.launcher, "procs", ()):
            process.wait(timeout=60)
    return own_code(code)


def run_and_exit(main: Callable, config: Any) -> NoReturn:
    """Ends the process with the exit code of main(config). Each rank that fails says so at once: a ConfigError or
    RunError in one line, any other error by its traceback."""
    gc.enable()  # parse_or_exit has disabled it
    gc.freeze()  # the objects of the imports are never searched for garbage
    try:
        sys.exit(main(config))
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        message = message_of(error, config)
        if not message:
            explain(error)
            sys.stderr.write(rank + "".join(traceback.format_exception(error)))
        elif rank:
            write_error(rank + message)
        else:
            end(code, message)
    if not rank:
        sys.exit(code)
    sys.stdout.flush()
    os._exit(own_code(code))  # an orderly end would wait for the other processes, or gloo abort it


def message_of(error: Exception, config: Any) -> str:
    """The line for an error that is no bug, with what was added on its way, such as how to go on; "" for a bug."""
    message = str(error)
    if not isinstance(error, (ConfigError, RunError)):
        if not is_lost_connection(error):
            return ""
        if is_child_of_fabric() and "timed out" not in message.lower():
            time.sleep(1)  # if rank 0 has ended, and said why, the system ends this process meanwhile
        message = (
            f"another process has ended, or did not answer for --timeout {config.timeout:g} seconds: "
            f"see its message ({message.split('. ')[0]}); this rank waited in {place_of(error)}"
        )
    return "; ".join([message, *getattr(error, "__notes__", [])])


def place_of(error: Exception) -> str:
    """The last line of the user's own files where an error passed."""
    place = "an unknown place"
    for frame in traceback.extract_tb(error.__traceback__):
        name = os.path.relpath(frame.filename, ROOT)
        if name in SOURCES and not name.startswith("runtime/"):
            place = f"{name}:{frame.lineno}"
    return place


def own_code(code: int) -> int:
    """The exit code of this process. If one that Fabric has launched ended with another code than 0, Fabric would kill
    rank 0, which may be closing its files. Rank 0 fails by itself when it loses the connection."""
    return 0 if is_child_of_fabric() else code


def is_lost_connection(error: Exception) -> bool:
    """Whether an error of a connected rank comes from the communication, by its type or by gloo's or NCCL's words."""
    has_words = "/gloo/" in str(error) or "NCCL" in str(error)
    return dist.is_initialized() and (isinstance(error, dist.DistError) or has_words)


def explain(error: Exception):
    """Adds to an error of torch what it does not say."""
    words = str(error)
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_memory or "out of memory" in words or "can't allocate memory" in words:
        error.add_note(
            "out of memory: try a smaller --micro_batch_size, which keeps the effective batch size, or a smaller model"
        )
    if "use_deterministic_algorithms" in words:
        error.add_note("--deterministic False trains with this operator, but two equal runs may have other bits")


# ---- agreement of the ranks


def gloo_group(timeout: float) -> Any:
    """A group of all processes, on the CPU, so that it never waits for a GPU; None in a run of one process. A process
    that waits in it gives up after `timeout` seconds, and at once when another one has ended."""
    if not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


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
    checksums = {f"checksum of {name}": checksum for name, checksum in SOURCES.items()}
    own = (*PER_HOST_OPTIONS, *config.per_host)
    options = {f"--{name}": value for name, value in asdict(config).items() if name not in own}
    other = difference(checksums | options | found)
    if other:
        raise ConfigError(
            f"{other}; all machines need the same files, options and data, and a --root_dir on a file system that they "
            "share"
        )


def build_in_turn(fabric: Fabric, build: Callable) -> Any:
    """The result of build(). On each machine the first process calls it alone, since it may download files, then the
    others. They wait as long as it takes.

    Raises:
        ConfigError: build() has raised an OSError or ImportError. Other errors are bugs.
    """
    lock = FileLock(f"{tempfile.gettempdir()}/build_datasets-{os.getuid()}-{zlib.crc32(bytes(ROOT)):08x}.lock")
    group = gloo_group(NO_LIMIT)
    try:
        if fabric.local_rank == 0:
            try:
                held = lock.acquire(timeout=1)
            except Timeout:
                say(f"waiting for build_datasets of another run on this machine, which holds {lock.lock_file}")
                held = lock.acquire()
            with held:
                result = build()
        if group is not None:
            dist.barrier(group)
        if fabric.local_rank > 0:
            result = build()
        if group is not None:
            dist.barrier(group)
    except (OSError, ImportError) as error:
        raise ConfigError(f"build_datasets: {error}") from error
    return result


def changed_files(then: dict) -> str:
    """A part of a line that names those source files that have changed since SOURCES was `then`, if any."""
    changed = [name for name in then if SOURCES.get(name) != then[name]]
    return f"; changed since: {', '.join(changed)}" if changed else ""


# ---- signals


def handle_signals(handler: Any, resources: ExitStack, signals: tuple = SIGNALS):
    """Makes `handler` receive the signals until the resources are closed."""
    with suppress(ValueError):  # in another thread than the main one Python has no signal handlers
        for number in signals:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                resources.callback(signal.signal, number, signal.signal(number, handler))


class StopSignals:
    """Turns one of SIGNALS to any rank into a decision of all ranks to stop after the same step. A second Ctrl-C ends
    the process at once; other signals may come twice, as from a terminal that is closed, or torchrun. The ranks
    synchronize about once a second, since that may take 1 ms."""

    def __init__(self, config, resources: ExitStack):
        self.received = 0  # number of the signal
        self.group = gloo_group(config.timeout)
        self.interval = 1  # steps between two synchronizations
        self.steps = 0  # since the last one
        self.synchronized = time.monotonic()
        self.interrupt = signal.getsignal(signal.SIGINT)
        if not config.fast_run:  # which a signal ends at once
            handle_signals(self.receive, resources)

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
