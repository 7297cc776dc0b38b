"""How the processes of a run begin and end: Fabric and its strategy, the datasets in each process, and errors."""

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
from contextlib import ExitStack, chdir, suppress
from datetime import timedelta
from multiprocessing import active_children
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
from torch.utils.data import IterableDataset

from runtime.checks import check_order
from runtime.errors import ConfigError, RunError
from runtime.options import DEVICE_OPTIONS, as_config_error
from runtime.ranks import NO_LIMIT, gloo_group, handle_signals
from runtime.source import ROOT, SOURCES
from runtime.terminal import end, is_child_of_fabric, say, write_error

PREEMPTED = 75  # exit code of a run that was stopped by a signal and has saved: EX_TEMPFAIL of sysexits.h


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
        streams in each step: pytorch-lightning#21567, fixed by #21746, which is in no release yet. Raises RunError if
        the ranks have other tensors, or in another order: DDP knows them by it."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        check_order([f"{name} {tuple(tensor.shape)}" for name, tensor in tensors])
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # DDP refuses a model in which nothing is trained
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
    support, and says if a GPU is there that is not used."""
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
        others = set(active_children())
        with ExitStack() as resources:
            try:
                return function(config, resources)
            finally:  # before files are closed: a worker that dies raises an error anywhere, also there
                end_workers(others)

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
    """The line for an error that is no bug, or a known mistake, with what was added on its way, such as how to go on;
    "" for a bug."""
    message = str(error)
    if not isinstance(error, (ConfigError, RunError)):
        if not is_lost_connection(error):
            return mistake_of(error)
        if is_child_of_fabric() and "timed out" not in message.lower():
            time.sleep(1)  # if rank 0 has ended, and said why, the system ends this process meanwhile
        message = (
            f"another process has ended, or did not answer for --timeout {config.timeout:g} seconds: "
            f"see its message ({message.split('. ')[0]}); this rank waited in {place_of(error)}"
        )
    return "; ".join([message, *getattr(error, "__notes__", [])])


def mistake_of(error: Exception) -> str:
    """The line for a mistake that a library meets far from where it was made; "" for another error."""
    if "A frozen dataclass was passed" in str(error):
        return "a batch is a frozen dataclass, which Fabric can neither cast nor move: make it without `frozen=True`"
    calls = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, AttributeError) and "setup_module" in calls:
        return f"build_model: gives a {type(error.obj).__name__}, not an nn.Module; does it return the model?"
    return ""


def place_of(error: Exception) -> str:
    """The last line of the user's own files where an error passed."""
    place = "an unknown place"
    for frame in traceback.extract_tb(error.__traceback__):
        name = os.path.relpath(frame.filename, ROOT)
        if name in SOURCES and not name.startswith("runtime/"):
            place = f"{name}:{frame.lineno}"
    return place


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


def end_workers(others: set):
    """Ends the data workers, also a frozen one, for which this process would wait at its end: all that have been
    started as daemons since these other processes."""
    with ExitStack() as resources:  # torch's handler would raise an error for each worker
        handle_signals(signal.SIG_DFL, resources, (signal.SIGCHLD,))
        for process in set(active_children()) - others:
            if process.daemon:
                process.kill()
                process.join()


def own_code(code: int) -> int:
    """The exit code of this process. If one that Fabric has launched ended with another code than 0, Fabric would kill
    rank 0, which may be closing its files. Rank 0 fails by itself when it loses the connection."""
    return 0 if is_child_of_fabric() else code


def is_lost_connection(error: Exception) -> bool:
    """Whether an error of a connected rank comes from the communication, by its type or by gloo's or NCCL's words."""
    words = ("/gloo/", "Application timeout", "NCCL")  # the second: another operation of gloo has waited in vain
    has_words = any(word in str(error) for word in words)
    return dist.is_initialized() and (isinstance(error, dist.DistError) or has_words)


# ---- datasets


def build_in_turn(fabric: Fabric, build: Callable) -> Any:
    """The result of build(). On each machine the first process calls it alone, since it may download files, then the
    others. They wait as long as it takes, also for another run. fabric.rank_zero_first would let them try, too, what
    the first one has failed in.

    Raises:
        ConfigError: build() has raised an OSError or ImportError, or given an IterableDataset. Other errors are bugs.
    """
    group = gloo_group(NO_LIMIT)
    try:
        folder = tempfile.gettempdir()
        lock = FileLock(f"{folder}/build_datasets-{os.getuid()}-{zlib.crc32(bytes(ROOT)):08x}.lock")
        with chdir(os.getcwd()):  # paths stay valid if build() changes the working directory
            if fabric.local_rank == 0:
                with acquired(lock):
                    result = build()
            if group is not None:
                dist.barrier(group)
            if fabric.local_rank > 0:
                result = build()
            if group is not None:
                dist.barrier(group)
    except (OSError, ImportError) as error:
        raise ConfigError(f"build_datasets: {error}") from error
    for name, dataset in result.items():
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"build_datasets: {name!r} is an IterableDataset, whose samples have no numbers to resume from; "
                "recipes/data/stream.patch reads streams by a map-style Dataset"
            )
    return result


def acquired(lock: FileLock) -> Any:
    """Acquires a lock, and says so if that takes time."""
    try:
        return lock.acquire(timeout=1)
    except Timeout:
        say(f"waiting for build_datasets of another run on this machine, which holds {lock.lock_file}")
        return lock.acquire()
