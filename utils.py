"""What nobody edits: devices, run directory, loggers, checkpoints, signals, failures, scaling rules. Nothing here knows
the loss, the batch or a metric."""

import csv
import ctypes
import fcntl
import gc
import io
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread
from uuid import uuid4

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import find_usable_cuda_devices
from lightning.fabric.loggers import Logger, TensorBoardLogger
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from config import DEVICE_OPTIONS, checkpoints_of, fail, srun_tasks, to_yaml

PREEMPTED = 75  # exit code of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again"
# What hosts may have of their own; where they differ in other options, they would wait for each other for ever.
OWN_OF_A_HOST = ("devices", "data_dir", "num_workers", "rank_logs")
SHARED = "all hosts need the same options and the same --root_dir, on a file system that they share"


# ---- devices and scaling rules


def build_fabric(config) -> Fabric:
    """Fabric with the devices of the config. What the machine cannot do ends with one line."""
    gc.enable()  # after the imports; what they made is never looked at again
    gc.collect()
    gc.freeze()
    for name in ("cli_used", *DEVICE_OPTIONS):  # `fabric run` is torchrun with options, which the config has by now:
        os.environ.pop(f"LT_{name.upper()}", None)  # Fabric would connect at once, before it knows the timeout
    options = {name: getattr(config, name) for name in DEVICE_OPTIONS}
    asked = " ".join(f"--{name} {value}" for name, value in options.items())
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not has_gpu)
    if on_cpu and config.precision in ("16-mixed", "16-true", "16"):
        fail(f"--precision {config.precision}: the CPU lacks float16; use bf16-mixed, bf16-true or 32-true")
    if config.strategy == "dp":
        fail("--strategy dp: one process cannot repeat its dropout on several GPUs, and is slower; use ddp")
    try:
        if config.strategy == "model_parallel":
            from model import shard  # here: a model that is never sharded need not have it

            options["strategy"] = FullyShardedStrategy(shard)
        if config.devices.startswith("idle:"):
            if "IDLE_DEVICES" not in os.environ:  # the processes that Fabric launches must not search again
                os.environ["IDLE_DEVICES"] = ",".join(map(str, find_usable_cuda_devices(int(config.devices[5:]))))
            options["devices"] = os.environ["IDLE_DEVICES"] + ","  # "3," is device 3, "3" would be three devices
        # Strategies that shard write directories of their own.
        plugins = [] if config.strategy.startswith(("fsdp", "model_parallel")) else [DirectCheckpointIO()]
        if "SLURM_JOB_ID" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
            # Fabric goes by the job's name and size, not by what srun has started: in a job's shell it would wait for
            # ranks that nobody starts, and a job named `interactive` would start each rank several times.
            plugins.append(SLURMEnvironment() if srun_tasks() > 1 else LightningEnvironment())
        fabric = Fabric(**options, plugins=plugins)
        if hasattr(fabric.strategy, "_timeout"):  # Fabric has no option for it; its own is 30 minutes
            fabric.strategy._timeout = timedelta(seconds=config.timeout)
    except Exception as error:  # ValueError, RuntimeError, ImportError, MisconfigurationException, ...
        fail(f"{asked}: {error}")
    meant = getattr(fabric.strategy, "num_processes", 1) * config.num_nodes
    if (started := int(os.environ.get("WORLD_SIZE") or (srun_tasks() if srun_tasks() > 1 else meant))) != meant:
        fail(f"{asked}: means {meant} processes, but the launcher has started {started}")
    if on_cpu:  # denormal numbers, as Adam keeps them for units that have died, make its step several times slower
        torch.set_flush_denormal(True)
    else:  # on a CPU it would make small products twice as slow
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    return fabric


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2: parameters, gradients and optimizer are spread over all devices, each of which has its own samples."""

    def __init__(self, shard):
        super().__init__(lambda model, mesh: shard(model, mesh["data_parallel"]), tensor_parallel_size=1)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.world_size
        super().setup_environment()

    def setup_module_and_optimizers(self, module, optimizers, scheduler=None):
        """Sharding replaces the parameters; the optimizers, still without a state, go over to the new ones."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in groups:
            group["params"] = [names[parameter] for parameter in group["params"]]
        del names  # nobody else holds the whole parameters: each is freed once it is sharded
        module = self.setup_module(module)
        sharded = dict(module.named_parameters())
        for group in groups:
            group["params"] = [sharded[name] for name in group["params"]]
        return module, optimizers, scheduler


def launch(fabric: Fabric, function, **arguments) -> int:
    """Calls function(fabric, **arguments) in every process. Returns its exit code, and 0 on all but the first of a
    node: a launcher that sees another one fail would kill the first before it is through."""
    explain_failures(fabric, arguments["config"])
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":  # PR_SET_PDEATHSIG: do not outlive the launcher
        ctypes.CDLL(None).prctl(1, signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGKILL)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and fabric.world_size > 1:
        # torchrun's own store: Fabric takes the group that is there.
        group = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        group |= {"store": fresh_store(**group, timeout=fabric.strategy._timeout), "timeout": fabric.strategy._timeout}
        torch.distributed.init_process_group(fabric.strategy._get_process_group_backend(), **group)

    def run(fabric: Fabric) -> int:  # without arguments: Fabric would look into them, and refuses a frozen config
        same = {name: value for name, value in vars(arguments["config"]).items() if name not in OWN_OF_A_HOST}
        if odd := odd_one_out(fabric, (same, [value for value in arguments.values() if isinstance(value, Path)])):
            torch.distributed.destroy_process_group()  # gloo can abort an exit that leaves it
            fail(f"{odd} has other options than rank 0, or has found another run; {SHARED}")
        return function(fabric, **arguments)

    code = fabric.launch(run)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # after the model is gone, else gloo can abort at exit
    return code if fabric.local_rank == 0 else 0


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> torch.distributed.Store:
    """A part of torchrun's store for this start alone. torchrun keeps the store over restarts, so that a rank may find
    the address of a dead one in it, and wait for that; and its restart counts differ between nodes.

    Each rank writes a new random key, and the hash of the keys of all ranks that it sees: once all have written the
    same hash, each of them has seen the new keys of all others, and nobody earlier can have written it."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*address, is_master=False, timeout=timeout)
    store.set(f"key/{rank}", uuid4().hex)
    deadline, seen = time.monotonic() + timeout.total_seconds(), set()
    while time.monotonic() < deadline:
        keys = store.multi_get([f"key/{other}" for other in range(world_size)])
        store.set(f"hash/{rank}", own := sha256(b"".join(keys)).hexdigest())
        seen = {*store.multi_get([f"hash/{other}" for other in range(world_size)])}
        if seen == {own.encode()}:
            return torch.distributed.PrefixStore(own, store)
        time.sleep(0.05)
    raise TimeoutError("timed out while the ranks agreed on a store")


def odd_one_out(fabric: Fabric, value) -> str | None:
    """Names a process, with its host, whose value is not that of rank 0. Called on all ranks."""
    flags = torch.zeros(fabric.world_size)
    flags[fabric.global_rank] = fabric.broadcast(value) != value
    odd = int(fabric.all_reduce(flags, reduce_op="sum").argmax())
    name = fabric.broadcast(f"rank {odd} on {platform.node()}", odd)
    return name if odd else None


def tee_output(folder: Path, rank: int) -> None:
    """From here on all that this process prints, native code too, goes into a file of its own as well."""
    folder.mkdir(parents=True, exist_ok=True)
    for stream in (1, 2):
        command = ["tee", "-a", folder / f"rank-{rank:04d}-{platform.node()}.log"]
        tee = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stream, start_new_session=True)
        os.dup2(tee.stdin.fileno(), stream)
    print(f"rank {rank} is process {os.getpid()} on {platform.node()}", flush=True)


def memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """What this process holds after its first step, and the most that it took meanwhile."""

    def megabytes(values) -> float:
        tensors = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)) / 1e6

    weights = megabytes(model.parameters())
    states = megabytes(value for state in optimizer.state.values() for value in state.values())
    if device.type == "cuda":
        peak, kind = torch.cuda.max_memory_allocated(device) / 1e6, "on the device"
    else:
        peak, kind = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, "of the process"
    return f"memory per device: weights {weights:.3g} MB, optimizer {states:.3g} MB; peak {kind} {peak:.4g} MB"


def split_batch(effective_batch_size: int, micro_batch_size: int | None, world_size: int) -> tuple[int, int]:
    """Solves effective_batch_size = world_size x micro_batch_size x grad_accum_steps for the last two. Ends with one
    line that names the nearest sizes where it does not divide."""
    unit = world_size * (micro_batch_size or 1)
    if remainder := effective_batch_size % unit:
        below, factors = effective_batch_size - remainder, f"{world_size} process(es) x micro_batch_size"
        nearest = f"{below} or {below + unit}" if below else unit
        fail(f"--effective_batch_size {effective_batch_size}: is no multiple of {unit}, {factors}; nearest: {nearest}")
    share = effective_batch_size // world_size
    return micro_batch_size or share, share // (micro_batch_size or share)


def scale_lr(base_lr: float, effective_batch_size: int, base_batch_size: int, rule: str) -> float:
    """The learning rate for effective_batch_size, from the one for base_batch_size: "linear" (Goyal et al. 2017,
    arXiv:1706.02677), "sqrt" (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741) or "none"."""
    ratio = effective_batch_size / base_batch_size
    return base_lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """torch's generators of the CPU and the device. (torch.manual_seed visits all backends: 80 µs against 1.)"""
    if device.type == "cuda":
        return [torch.default_generator, torch.cuda.default_generators[device.index]]
    return [torch.default_generator, *([torch.mps._get_default_mps_generator()] if device.type == "mps" else [])]


def is_due(step: int, every: float) -> bool:
    """Whether a multiple of `every` steps, which need not be whole, was passed with this step."""
    return int(step / every + 1e-9) > int((step - 1) / every + 1e-9)


def limit(total: int, limit_batches: int | float | None) -> int:
    """So many of `total` batches: a count, a fraction (at least one batch), 0 for none, or None for all."""
    if limit_batches is None:
        return total
    return max(1, int(total * limit_batches + 1e-9)) if isinstance(limit_batches, float) else min(total, limit_batches)


# ---- run directory


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a file beside `path` that gets the name at the end: a name always means a whole file."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, mode, newline=None if "b" in mode else "") as file:
            yield file
        settle(beside, path)
    finally:
        remove(beside)


def settle(beside: Path, path: Path) -> None:
    """Flushes a file, or a directory of files, to the disk, and then gives it its name."""
    flush(*beside.glob("*"), beside)
    os.replace(beside, path)
    flush(path.parent)  # the new name, too


def flush(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def remove(path: Path) -> None:
    """Deletes a file or a directory, as far as it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def make_run_dir(fabric: Fabric, config, state: dict) -> Path:
    """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir; named once, by rank 0, after the launch. -1, -2, ... where taken.

    All that a resume needs is written under a hidden name first: a run directory is whole from its first moment on."""
    base, now = Path(config.root_dir) / config.out_dir, time.strftime("%Y%m%d-%H%M%S")
    hidden = fabric.broadcast(base.with_name(f".{now}-{base.name}-{platform.node()}-{os.getpid()}"))
    run_dir, attempt = base.with_name(f"{now}-{base.name}"), 0
    try:
        if fabric.is_global_zero:
            hidden.mkdir(parents=True)
        lock(fabric, hidden)
        start_run_dir(fabric, config, hidden)
        save_checkpoint(fabric, hidden, state)
        if odd := odd_one_out(fabric, hidden.exists()):
            raise OSError(f"{odd} does not see it; {SHARED}")
        while fabric.is_global_zero and hidden.exists():
            try:
                run_dir.mkdir()  # to rename over: this much must not be somebody else's
                hidden.rename(run_dir)
            except FileExistsError:
                run_dir, attempt = base.with_name(f"{now}-{base.name}-{attempt + 1}"), attempt + 1
    except (OSError, RuntimeError) as error:  # torch turns an error of the file system into a RuntimeError
        shutil.rmtree(hidden, ignore_errors=True)
        fail(f"--root_dir {config.root_dir} --out_dir {config.out_dir}: cannot make {run_dir}: {error}")
    return fabric.broadcast(run_dir)


def lock(fabric: Fabric, run_dir: Path) -> None:
    """Takes the run for this process, or ends with one line that says who has it."""
    if not fabric.is_global_zero:
        return
    fabric.lock = open(run_dir / ".lock", "a+")  # noqa: SIM115 - held until the process ends, however it ends
    try:
        fcntl.lockf(fabric.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fabric.lock.seek(0)
        fail(f"--resume: {run_dir} is being written to by {fabric.lock.read()}")
    except OSError as error:  # a network file system without locks
        print(f"{run_dir} cannot be locked ({error.strerror}): make sure that no other process resumes it")


def start_run_dir(fabric: Fabric, config, run_dir: Path) -> None:
    """Writes config.yaml, into provenance/ what it takes to know later how this start of the run came about, and into
    .lock who has it."""
    if not fabric.is_global_zero:
        return
    fabric.lock.truncate(0)
    fabric.lock.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    fabric.lock.flush()

    start = run_dir / "provenance" / time.strftime("%Y%m%d-%H%M%S")
    for folder in (start.parent, run_dir / "checkpoints", run_dir / "logs"):
        folder.mkdir(exist_ok=True)
    git = ["git", "-C", str(Path(__file__).parent)]  # of the code, wherever it was started
    commands = {"commit": [*git, "rev-parse", "HEAD"], "status": [*git, "status", "-s"], "diff": [*git, "diff", "HEAD"]}
    found = dict.fromkeys(commands, "")
    with suppress(OSError):  # no git
        for name, command in commands.items():
            found[name] = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    facts = {
        "command": [sys.executable, *sys.argv],
        "git_commit": found["commit"].strip(),
        "git_status": found["status"].splitlines(),
        "host": platform.node(),
        "platform": platform.platform(),
        "devices": f"{fabric.world_size} x {fabric.device.type}",
        "python": platform.python_version(),
        "packages": dict(
            sorted(info.stem.split("-", 1) for path in sys.path for info in Path(path).glob("*.dist-info"))
        ),
    }
    texts = {start.with_suffix(".json"): json.dumps(facts, indent=2) + "\n", start.with_suffix(".diff"): found["diff"]}
    for path, text in (texts | {run_dir / "config.yaml": to_yaml(config)}).items():
        with atomically(path) as file:
            file.write(text)
    # What a kill has left half written, and what marks the end of a run that now goes on.
    for path in (*run_dir.glob("**/*.tmp"), run_dir / "error.txt", run_dir / "model.pt"):
        remove(path)


# ---- loggers: each keeps one unbroken history; rows beyond `last_step` are dropped, they will be logged again


class CSVLogger(Logger):
    """A row per logged step, on disk at once. (Fabric's own deletes the file when a run is resumed.)"""

    name, version = "csv", ""

    def __init__(self, folder: Path, last_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.columns, self.rows = folder / "metrics.csv", ["step"], []
        lines = self.path.read_text(errors="replace").splitlines() if self.path.exists() else []
        for number, row in enumerate(csv.DictReader(line.replace("\0", "?") for line in lines), start=2):
            try:
                if int(row["step"]) <= last_step and [value == "" or float(value) for value in row.values()]:
                    self.rows.append(row)
            except (ValueError, TypeError, KeyError):
                print(f"{self.path}: line {number} is damaged and dropped", file=sys.stderr)
        self.write_all(self.rows)

    def write_all(self, rows: list[dict]) -> None:
        self.columns = list(dict.fromkeys([*self.columns, *(key for row in rows for key in row)]))
        with atomically(self.path) as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        self.file = open(self.path, "a", newline="")  # noqa: SIM115 - stays open: to open it for each row takes longer
        self.writer = csv.DictWriter(self.file, self.columns, restval="")

    def log_metrics(self, metrics: dict, step: int) -> None:
        row = {"step": step, **metrics}
        if not set(row) <= set(self.columns):  # a new column: write the file anew, once
            with open(self.path, newline="") as file:
                return self.write_all([*csv.DictReader(file), row])
        self.writer.writerow(row)
        self.file.flush()

    def log_hyperparams(self, params: dict) -> None:
        """They are in config.yaml."""


class WandbLogger(Logger):
    """Weights & Biases; offline where there is no key or no network.

    Online, wandb ignores the rows that it has. Offline, each start has a folder of its own, and what a kill leaves in
    it is uncertain: so the new folder gets all rows anew, from a csv of its own, and the old one is deleted."""

    name, version = "wandb", ""

    def __init__(self, run_dir: Path, config, last_step: int):
        import wandb

        folder = run_dir / "logs" / "wandb"
        self.history, old = CSVLogger(folder, last_step), [*folder.glob("offline-run-*")]
        init = partial(wandb.init, project=config.project, name=run_dir.name, id=run_dir.name, resume="allow",
                       notes=config.comment, dir=folder.parent)  # fmt: skip
        try:
            # Without a key it would ask for one on the terminal: go offline instead.
            self.run = init(mode=os.environ.get("WANDB_MODE") or (None if wandb.login(prompt=False) else "offline"))
        except wandb.Error as error:
            print(f"wandb goes offline: {error}")
            self.run = init(mode="offline")
        for row in self.history.rows if self.run.offline else ():
            self.run.log({k: float(v) for k, v in row.items() if v and k != "step"}, step=int(row["step"]))
        for folder in old if self.run.offline else ():
            shutil.rmtree(folder)

    def log_metrics(self, metrics: dict, step: int) -> None:
        self.history.log_metrics(metrics, step)
        self.safely(self.run.log, metrics, step=step)

    def log_hyperparams(self, params: dict) -> None:
        self.safely(self.run.config.update, params, allow_val_change=True)

    def safely(self, function, *args, **options) -> None:
        """A signal to all processes ends wandb's own, too: that must not keep this one from saving."""
        try:
            function(*args, **options)
        except Exception as error:
            print(f"wandb is gone: {error}", file=sys.stderr)

    def finalize(self, status: str) -> None:
        self.safely(self.run.finish)
        if self.run.offline:
            print(f"wandb was offline; to upload: wandb sync {Path(self.run.dir).parent}")


def build_loggers(config, run_dir: Path, last_step: int) -> list[Logger]:
    """The chosen loggers, going on after `last_step`; wandb and tensorboard are imported only here."""
    loggers, params = [], {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in asdict(config).items()}
    for name in dict.fromkeys(config.logger_name):
        if name == "tensorboard":
            from torch.utils.tensorboard.summary import hparams

            logger = TensorBoardLogger(run_dir / "logs", name="tensorboard", version="", purge_step=last_step + 1)
            for summary in hparams(params, {config.monitor: 0}):  # the logger's own way adds a metric of its own
                logger.experiment._get_file_writer().add_summary(summary)
        else:
            folder = run_dir / "logs" / "csv"
            logger = CSVLogger(folder, last_step) if name == "csv" else WandbLogger(run_dir, config, last_step)
            logger.log_hyperparams(params)
        loggers.append(logger)
    return loggers


def log(fabric: Fabric, row: dict, step: int) -> None:
    """Gives a row to all loggers, and waits until it is written: the next checkpoint relies on it."""
    for logger in fabric.loggers:
        logger.log_metrics(row, step)
        logger.save()


# ---- checkpoints


class EarlyFile:
    """A file whose content goes to the disk while it is written: at its end there is less to wait for."""

    def __init__(self, file):
        self.file, self.flush, self.pending = file, file.flush, 0

    def write(self, data) -> int:
        self.pending += (count := self.file.write(data))
        if self.pending > 2**25 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # begins to write, does not wait
            self.pending = 0
        return count


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a file where it is told to (Fabric's own goes through $TMPDIR, and from there may copy); reads it, or a
    directory that a strategy has written which shards."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        with open(path, "wb") as file:
            torch.save(checkpoint, EarlyFile(file))

    def load_checkpoint(self, path, map_location=None, **options):
        if not Path(path).is_dir():
            return super().load_checkpoint(path, map_location, **options)
        checkpoint = _load_distributed_checkpoint(Path(path))
        if "optimizer" in checkpoint:  # goes by the names of the parameters, PyTorch's own by their order
            groups, states = checkpoint["optimizer"]["param_groups"], checkpoint["optimizer"]["state"]
            order = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
            for group in groups:
                group["params"] = [order[name] for name in group["params"]]
            checkpoint["optimizer"]["state"] = {order[name]: state for name, state in states.items()}
        return checkpoint


def save_checkpoint(fabric: Fabric, run_dir: Path, state: dict, regular=True, best=False, keep: int | None = None):
    """Writes a checkpoint: a file, or a directory from a strategy that shards; called on all ranks. It is step-*.ckpt
    where `regular`. Where `best`, best.ckpt becomes a link to it, which costs no second serialization. Then all but the
    newest `keep` step-*.ckpt are deleted."""
    for module in state["model"].modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a validation leaves gathered what a backward pass would have shared out again
    if not all(parameter.sum(dtype=torch.float32).isfinite() for parameter in state["model"].parameters()):
        fail(f"the weights are not finite after step {state['step']}; the checkpoints in {run_dir} are good", code=1)
    folder = run_dir / "checkpoints"
    path, best_path = folder / f"{'step' if regular else 'best'}-{state['step']:08d}.ckpt", folder / "best.ckpt"
    beside = folder / "checkpoint.tmp"
    try:
        saved = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        if not state["step"]:
            del saved["optimizer"]  # has no state yet; to ask a sharded one for it would be its first step
        fabric.save(beside, saved)
        if fabric.is_global_zero:
            settle(beside, path)
    finally:
        if fabric.is_global_zero:
            remove(beside)
    if not fabric.is_global_zero:
        return
    if best:
        try:
            # A directory has no second name: the link is a symbolic one, and what it shows stays.
            os.symlink(path.name, beside) if path.is_dir() else os.link(path, beside)
        except OSError:  # a file system without links
            shutil.copyfile(path, beside)
        if not best_path.is_symlink() and best_path.is_dir():
            remove(best_path)  # the run was copied by somebody who followed the link
        os.replace(beside, best_path)
    old = [*folder.glob("best-*.ckpt"), *([folder / "step-00000000.ckpt"] if state["step"] else [])]
    for path in old + sorted(folder.glob("step-*.ckpt"))[: -keep if keep else 0]:
        if path.resolve() != best_path.resolve() and path.exists():
            path.rename(path.with_suffix(".tmp"))  # a half deleted directory must not have the name of a whole one
            Thread(target=remove, args=(path.with_suffix(".tmp"),)).start()  # of 1 GB it takes half a second


def load_checkpoint(fabric: Fabric, run_dir: Path, state: dict) -> Path:
    """Takes the run, and restores `state` in place from the newest whole checkpoint. Damaged ones are named, skipped
    and, once a whole one is found, put aside as *.damaged."""
    lock(fabric, run_dir)  # first: who reads while another writes finds files that vanish
    damaged, chosen = [], None
    for path in checkpoints_of(run_dir) if fabric.is_global_zero else ():
        if is_whole(path):
            chosen = path
            break
        damaged.append(path)
        print(f"skipped {path}: it is damaged", file=sys.stderr)
    if (chosen := fabric.broadcast(chosen)) is None:
        fail(f"no checkpoint in {run_dir / 'checkpoints'} can be read; nothing was changed", code=1)
    if odd := odd_one_out(fabric, sum(part.stat().st_size for part in (chosen, *chosen.glob("*")) if part.is_file())):
        fail(f"--resume: {odd} does not see {chosen} as rank 0 does; {SHARED}")
    found, wanted = read_values(chosen), dict(state)
    if not found["precision"]:
        del wanted["precision"]  # from a run without a gradient scaler: that of 16-mixed starts afresh
    if not found["step"]:
        del wanted["optimizer"]
    fabric.load(chosen, wanted)
    state.update(wanted)
    for path in damaged:
        path.rename(path.with_name(path.name + ".damaged"))
    return chosen


def save_weights(fabric: Fabric, run_dir: Path, model: torch.nn.Module) -> None:
    """Writes model.pt: the weights alone, whole and on the CPU, for `Model(...).load_state_dict`. It marks a finished
    run. Called on all ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if fabric.is_global_zero:
        with atomically(run_dir / "model.pt", "wb") as file:
            torch.save(weights, file)
    fabric.barrier()


def read_values(path: Path) -> dict:
    """What is in a checkpoint beside the weights, or with them where it is a file: without the content of tensors."""
    return torch.load(path / "meta.pt" if path.is_dir() else path, map_location="meta", mmap=True, weights_only=True)


def is_whole(path: Path) -> bool:
    """Whether the zip archives of a checkpoint have the right checksums: one in a file, one for each tensor in a
    directory; and it can be loaded."""

    def archives():
        yield path / "meta.pt" if path.is_dir() else path
        if not path.is_dir():
            return
        from torch.distributed.checkpoint import FileSystemReader

        for part in FileSystemReader(path).read_metadata().storage_data.values():
            with open(path / part.relative_path, "rb") as file:
                file.seek(part.offset)
                yield io.BytesIO(file.read(part.length))

    try:
        is_right = all(zipfile.ZipFile(archive).testzip() is None for archive in archives())
        return is_right and read_values(path) is not None
    except Exception:  # damage has many: BadZipFile, OSError, RuntimeError, UnicodeDecodeError, struct.error, ...
        return False


# ---- signals and failures


class Stopper:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a decision of all ranks to stop after the same step.

    One process just looks at its flag. Several ask each other about once a second: how often, in steps, follows from
    the time that passed since they last did, which they agree on as well. A second signal ends the process at once.
    """

    def __init__(self, fabric: Fabric, timeout: float):
        self.signal, self.world_size = 0, fabric.world_size
        self.steps, self.interval, self.asked = 0, 1, time.monotonic()  # since they last asked
        if self.world_size > 1:  # on the CPU, so that asking never waits for a GPU
            self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.handle(self.receive)

    def handle(self, handler) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, handler)

    def receive(self, number: int, frame) -> None:
        self.signal = number
        self.handle(signal.SIG_DFL)

    def __call__(self) -> bool:
        """To be asked once a step, by all ranks."""
        if self.world_size == 1:
            return self.signal > 0
        self.steps += 1
        if self.steps < self.interval:
            return False
        seconds = time.monotonic() - self.asked
        answer = torch.tensor([self.signal, seconds])
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX, group=self.group)
        self.signal, seconds = int(answer[0]), max(float(answer[1]), 1e-6)
        self.interval = max(1, min(int(self.interval / seconds), 2 * self.interval))
        self.steps, self.asked = 0, time.monotonic()
        return self.signal > 0


def explain_failures(fabric: Fabric, config, get_run_dir=lambda: None) -> None:
    """From here on an exception ends the process with a last line: what happened, what is safe, what to do.

    The first rank that fails leaves its words in error.txt; the others, which then lose contact to it, repeat them.
    """

    def hook(kind: type, error: BaseException, trace) -> None:
        if kind is KeyboardInterrupt:
            return sys.__excepthook__(kind, error, trace)
        # Those of all ranks, where a sharded save has failed.
        failures = [failure for failure, _ in getattr(error, "failures", {}).values()]
        cause = min(failures, key=lambda failure: not isinstance(failure, OSError), default=error)
        while cause.__context__ and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save covers up a full disk with an error of its own
        text = " ".join(f"rank {fabric.global_rank}: {type(cause).__name__}: {cause}".split())
        is_alone = re.search("gloo|nccl|connection|timed? ?out", text, re.IGNORECASE)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
            advice = "a smaller --batch_size"  # of test.py
            if hasattr(config, "effective_batch_size"):
                share = config.effective_batch_size // fabric.world_size
                half = (config.micro_batch_size or share) // 2
                smaller = next((size for size in range(half, 0, -1) if share % size == 0), 1)
                advice = f"--micro_batch_size {smaller} for the same effective batch size"
            text = f"out of memory: try {advice}; {text}"
        elif is_alone:
            text = f"another process died, or did not answer for --timeout {config.timeout:g} seconds; {text}"
        elif not failures and not isinstance(cause, OSError):
            sys.__excepthook__(kind, error, trace)
        if run_dir := get_run_dir():
            text += f"; the checkpoints in {run_dir} are whole, go on with: python train.py --resume {run_dir}"
            first = run_dir / "error.txt"
            with suppress(OSError):
                text = first.read_text() if is_alone and first.exists() else text
                first.write_text(text)
        print(f"\n{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr, flush=True)
        is_launched_by_fabric = "LOCAL_WORLD_SIZE" not in os.environ and srun_tasks() == 1
        if "timed out" in text.lower() and fabric.local_rank and is_launched_by_fabric:
            time.sleep(10)
            os.kill(os.getppid(), signal.SIGKILL)  # local rank 0, which does not answer
        os._exit(1)  # at once: nothing that is left could answer

    sys.excepthook = hook


# ---- debugging aids


def build_profiler(run_dir: Path | None, steps: int) -> torch.profiler.profile:
    """A started profiler of 5 steps after 5 of warm-up, or fewer in a short run. Call its `step()` after each step and
    `stop()` at the end."""

    def report(profiler) -> None:
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=40))
        if run_dir:
            torch.profiler.tensorboard_trace_handler(run_dir / "profile")(profiler)
            print(f"trace, for https://ui.perfetto.dev or TensorBoard: {run_dir / 'profile'}")

    warmup = min(5, steps // 2)
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=min(5, steps - warmup), repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report)
    profiler.start()
    return profiler


def format_row(values) -> str:
    """A line of the table that the loop prints: names right-aligned over their values."""
    return "  ".join(f"{value:>12.5g}" if isinstance(value, float) else f"{value:>12}" for value in values)
