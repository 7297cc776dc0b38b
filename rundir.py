"""The run directory: its name, lock, config, logs, summary and provenance, and when to save."""

import fcntl
import gc
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric, is_wrapped
from torch import nn

import checkpoints
from cli import CODE, ROOT, SOURCES, as_config_error, named_folders, newest_run, to_yaml
from config import FIXED_ON_RESUME, ConfigError, RunError, TrainConfig, values_of
from launch import NO_LIMIT, ResumableDDP, changed_files, check_ranks, difference, gloo_group, handle_signals
from loggers import Console, open_loggers, scalars_of
from utils import atomically, check_values, parameters_of, regular_file, write_json

TIMESTAMP = "%Y%m%d-%H%M%S"
# The commit, and the names of changed files; nothing without git. It takes no lock, which would fail a `git commit` at
# the same time, and starts no fsmonitor, which would be a program that the checkout names.
GIT_STATUS = "exec git --no-optional-locks -c core.fsmonitor=false status --porcelain=v2 --branch"

# ---- provenance


def code_folder(run_dir: Path, sources: dict) -> Path:
    """Where a run keeps the source files that have these checksums."""
    return run_dir / "provenance" / f"code-{zlib.crc32(repr(sources).encode()):08x}"


def write_provenance(run_dir: Path, fabric: Fabric):
    """Writes the command line, devices, host, packages, git commit and source files of this process."""
    folder = code_folder(run_dir, SOURCES)
    packages = sorted(info.stem for path in sys.path for info in Path(path).glob("*.dist-info"))
    lines = [
        shlex.join([sys.executable, *sys.argv]),
        f"{fabric.world_size} x {fabric.device.type} on {os.uname().nodename}",
        f"Python {platform.python_version()} on {platform.platform()}",
        f"source files in {folder.name}",
        *packages,
    ]
    with open(run_dir / "provenance" / time.strftime(f"{TIMESTAMP}.txt"), "a", opener=regular_file) as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(GIT_STATUS, shell=True, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL, timeout=10)
    if folder.exists():  # of an earlier start with the same files
        return
    temporary = folder.with_suffix(".tmp")
    for name, code in CODE.items():
        copy = temporary / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(code)
    temporary.rename(folder)


# ---- the directory


class RunDir:
    """The directory of a run. On a resume it is locked at once, and `restore` restores `state`. `start`, in the first
    step after the backward passes, makes the directory of a new run. All ranks call all methods.

    Args:
        fabric: Fabric, launched.
        config: The options.
        resources: Closes what must not outlive the run.
    """

    def __init__(self, fabric: Fabric, config: TrainConfig, resources: ExitStack):
        self.fabric = fabric
        self.config = config
        self.run_resources = resources
        self.path: Any = None  # until `start` of a new run; Any, since most methods are called after it
        self.checkpoint: Path | None = None  # to resume from
        self.origin = ""  # of a resume: the checkpoint, and what has changed since
        self.loggers: list = []
        self.began = time.monotonic()
        self.written = 0.0  # time of the last summary.json
        self.has_saved = False
        self.config_text = to_yaml(config)
        for name in config.logger_name:
            if not find_spec(name):  # csv is a module of Python's
                raise ConfigError(f"--logger_name {name}: is not installed; pip install {name}")
        check_ranks(config, {})
        # Rank 0 waits for one that hangs; the others wait for rank 0, which may be saving.
        self.group = gloo_group(config.timeout if fabric.is_global_zero else NO_LIMIT)
        if config.resume:
            self.path = Path(config.resume)
            self.on_rank_zero(self.take_lock)
            self.checkpoint = self.on_rank_zero(checkpoints.newest_checkpoint, self.path)

    def on_rank_zero(self, function: Callable, *args) -> Any:
        """Calls the function on rank 0 alone; all ranks return its result. They wait as long as rank 0 lives."""
        result = [function(*args) if self.fabric.is_global_zero else None]
        if self.group is not None:
            dist.broadcast_object_list(result, group=self.group)
        return result[0]

    def take_lock(self):
        # A POSIX lock ends with this process. A lock of flock would stay with the data workers.
        lock = self.run_resources.enter_context(open(self.path / ".lock", "a", opener=regular_file))  # noqa: SIM115
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--resume: another process is writing to {self.path}") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{self.path} cannot be locked ({error.strerror}): make sure that no other process resumes it")

    # ---- before the first step

    def restore(self, state: dict, samples: dict):
        """Takes the state of the run, and restores it on a resume.

        Args:
            state: What a checkpoint has. Entries that are not in the checkpoint of a resume keep their values.
            samples: The sizes of the datasets by name, which a resume cannot change.
        """
        # Closed after the data workers are gone: one that dies would raise an error anywhere, also in `close`.
        self.resources = self.run_resources.enter_context(ExitStack())
        checkpoints.check_state(state)
        self.state = state
        self.names = set(state)  # those that this method can find
        self.description = checkpoints.describe(state)  # as built: a resume can tell which settings have changed since
        self.modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
        self.modes = self.training_modes()  # as built
        parameters = [parameter.numel() for module in self.modules.values() for parameter in module.parameters()]
        self.summary: dict = {"parameters": sum(parameters), "last": {}}
        options = values_of(self.config)
        self.fixed = {f"--{name}": options[name] for name in FIXED_ON_RESUME if name in options}
        self.fixed |= {f"the number of {name} samples": size for name, size in samples.items()}
        path = self.checkpoint
        size = path.stat().st_size if path and path.exists() else None
        check_ranks(self.config, self.fixed | {f"size of {path}": size})
        if path:
            self.restore_from(path)

    def restore_from(self, path: Path):
        saved = checkpoints.load(path)
        about = saved["checkpoint"]
        if about.get("format") != checkpoints.FORMAT:
            program = shlex.quote(str(code_folder(self.path, about["code"]) / "train.py"))
            raise ConfigError(
                f"--resume: {path} was written by another version of the template; "
                f"go on with the run's own copy of the code: python {program} --resume {shlex.quote(str(self.path))}"
            )
        for name, value in self.fixed.items():
            then = about["fixed"].get(name, value)
            if then != value:
                raise ConfigError(f"--resume: {name} is {value}, but was {then} in {path}: a resume cannot change it")
        changed = changed_files(about["code"])
        try:
            new = checkpoints.restore(self.fabric, self.state, saved, self.description)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # the state has changed
            raise ConfigError(f"--resume {path}{changed}: {error}") from error
        self.origin = f"\nresumed from {path}{changed}"
        for name in new:
            self.origin += f"; state[{name!r}] is not in it, and new"
        self.summary |= about["summary"] | {"checkpoint": about["step"]}
        self.began -= self.summary["seconds"]

    # ---- in the first step of a process

    def start(self, step: int, console: Console):
        """Makes the directory of a new run, writes config and provenance, and opens the loggers, after `step` steps."""
        self.check_optimizers()
        for name in self.state.keys() - self.names:
            raise RunError(f"state: {name} came after `run.restore()`, so a resume would not restore it")
        self.check_gradients(console)
        self.tell_rates(console)
        self.tell_modes(console)
        if self.path is None:
            self.path = self.on_rank_zero(self.make_directory)
            other = difference({f"{self.path} is there": self.path.exists()})
            if other:
                self.on_rank_zero(shutil.rmtree, self.path)
                raise ConfigError(f"--root_dir {self.config.root_dir}: {other}; all machines need to share it")
        self.on_rank_zero(self.open, step, console)

    def check_gradients(self, console: Console):
        """Raises RunError if DDP would wait for a gradient that did not come. Says so if there is none at all, and
        names those that no optimizer uses."""
        strategy = self.fabric.strategy
        needs_all = isinstance(strategy, ResumableDDP) and not strategy.find_unused_parameters
        optimizers = [self.state[name] for name in self.description["optimizers"]]
        trained = {parameter for optimizer in optimizers for parameter in parameters_of(optimizer)}
        for entry, module in self.modules.items():
            tensors = checkpoints.named_tensors({entry: module})
            without = [name for name, tensor in tensors.items() if tensor.requires_grad and tensor.grad is None]
            found = [name for name, tensor in tensors.items() if tensor.grad is not None]
            if needs_all and found and without:
                raise RunError(
                    f"{', '.join(without)}: no gradient in the first step; "
                    "if that is right, give --strategy ddp_find_unused_parameters_true"
                )
            for name in found:
                if tensors[name] not in trained:
                    console.print(f"{name} has a gradient, but is in no optimizer of `state`")
        if trained and all(parameter.grad is None for parameter in trained):
            console.print("no trained parameter has a gradient in the first step: is `fabric.backward` called?")

    def tell_rates(self, console: Console):
        """Names an optimizer whose groups were built with learning rates of their own, if the loop has set one rate."""
        for name, about in self.description["optimizers"].items():
            built = {settings["lr"] for settings in about["settings"] if "lr" in settings}
            now = {group.get("lr") for group in self.state[name].param_groups}
            if len(built) > 1 and len(now) == 1 and now != {0}:  # a warm-up may begin at 0
                console.print(
                    f"state[{name!r}]: groups built with lr {', '.join(map(str, sorted(built)))} all have lr "
                    f"{now.pop():g}; for rates of their own, see lr_factor in train.py"
                )

    def training_modes(self) -> dict[str, bool]:
        """Whether each module in the state is in training mode, by name."""
        modes = {}
        for entry, module in self.modules.items():
            plain: Any = module.module if is_wrapped(module) else module
            for name, part in plain.named_modules(prefix=entry):
                modes[name] = part.training
        return modes

    def tell_modes(self, console: Console):
        """Names the modules whose mode has changed since they were built: by `model.train()`, or by a validation."""
        now = self.training_modes()
        changed = [name for name, is_training in now.items() if is_training != self.modes.get(name, is_training)]
        changed = [name for name in changed if name.rpartition(".")[0] not in changed]  # not the parts of one again
        for is_training, words in ((True, "training mode"), (False, "evaluation mode")):
            names = [name for name in changed if now[name] == is_training]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                console.print(f"in {words} since they were built: {', '.join(names[:3])}{more}")

    def make_directory(self) -> Path:
        """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir, and locks it. The name is later than that of all other runs of this
        out_dir, also if the clock was set back: `--resume auto` takes the latest."""
        base = Path(self.config.root_dir) / self.config.out_dir
        with as_config_error(self.config, "root_dir", "out_dir"):
            base.parent.mkdir(parents=True, exist_ok=True)
            moment = datetime.now()  # without a time zone: later by name in the hour that a clock repeats, too
            for other in named_folders(base):
                if (other / "config.yaml").exists():
                    moment = max(moment, datetime.strptime(other.name[:15], TIMESTAMP))
            while True:
                self.path = base.with_name(f"{moment:{TIMESTAMP}}-{base.name}")
                with suppress(FileExistsError):
                    self.path.mkdir()
                    break
                moment += timedelta(seconds=1)
        self.take_lock()
        return self.path

    def open(self, step: int, console: Console):
        """Writes config and provenance, and opens the loggers."""
        for path in self.path.glob("checkpoints/*.tmp"):  # of a kill; may be large
            if not path.is_dir():
                path.unlink()
        self.write_summary("running")  # before the config: a finished run that becomes longer is no longer finished
        self.write_config()
        for name in ("checkpoints", "logs", "provenance"):
            (self.path / name).mkdir(exist_ok=True)
        write_provenance(self.path, self.fabric)
        self.resources.push(self.close)
        console.open_log(self.path)
        if not self.config.fast_run:  # soon gone
            console.print(f"run directory {self.path}{self.origin}")
        self.loggers = open_loggers(self.path, step, self.config, self.resources)

    def write_config(self):
        with atomically(self.path / "config.yaml") as file:
            file.write(self.config_text)

    # ---- now and then

    def log(self, row: dict, step: int):
        """Passes the scalars of a row, if it has any, to the loggers, and at most once a second to summary.json."""
        if not row:
            return
        scalars = scalars_of(row)
        self.summary["last"] |= scalars
        for logger in self.loggers:
            logger.log_metrics(scalars, step)
        if self.loggers and time.monotonic() > self.written + 1:  # on rank 0
            self.write_summary("running")

    def write_summary(self, state: str):
        """Writes summary.json; `state` is running, finished, interrupted or failed."""
        self.written = time.monotonic()
        self.summary["state"] = state
        self.summary["seconds"] = self.written - self.began
        plain = {name: value for name, value in self.state.items() if type(value) in checkpoints.PLAIN}
        write_json(self.path / "summary.json", plain | self.summary)

    def save(self, step: int, is_regular: bool, is_best: bool):
        """Writes step-*.ckpt if `is_regular`, and best.ckpt if `is_best` and checkpoints are not switched off, or there
        is one. Deletes all step-*.ckpt but the newest `num_checkpoint_keep`.

        Raises:
            RunError: The state could not be restored, or the weights are not finite, or differ between the ranks.
        """
        if not (self.has_best() or self.config.checkpoint_frequency or self.config.checkpoint_interval):
            is_best = False
        if not (is_regular or is_best):
            return
        self.check_weights(step)
        self.check_optimizers()
        contents = checkpoints.contents_of(self.state)
        is_cpu = self.fabric.device.type == "cpu"
        contents["checkpoint"] = self.description | {
            "format": checkpoints.FORMAT,
            "step": step,
            "fixed": self.fixed,
            "on_cpu": [] if is_cpu else checkpoints.on_cpu(contents),  # beside a GPU: a resume leaves them there
            "config": self.config_text,
            "code": SOURCES,
            "summary": {"seconds": time.monotonic() - self.began, "last": self.summary["last"]},
        }
        self.on_rank_zero(self.write_checkpoint, contents, step, is_regular, is_best)

    def check_values(self, values: Any, val_names: dict, step: int):
        """utils.check_values for the first step of a process; raises RunError if the loss is not finite, too."""
        loss = check_values(values, self.config.monitor, val_names, self.fabric.device)
        self.check_loss(loss, step)

    def check_loss(self, loss: float, step: int):
        """Raises RunError if the loss of the steps up to this one is not finite."""
        if math.isfinite(loss):
            return
        if self.path is None:
            raise RunError(f"compute_loss: `loss` is {loss} in the first step")
        advice = f"{self.where_to_look(step)}, or try a lower --base_lr or --max_grad_norm 1"
        raise RunError(f"the loss is {loss} in the steps up to {step}{advice}")

    def where_to_look(self, step: int) -> str:
        """A part of a line: the last checkpoint, and how to find the first step that went wrong, up to this one."""
        found = checkpoints.checkpoints_of(self.path)
        last = f"; the last checkpoint is {found[0]}" if found else ""
        if (ROOT / "recipes" / "replay.py").exists() and not self.config.fast_run:
            path = shlex.quote(str(self.path))
            return f"{last}; look into the first such step with: python recipes/replay.py {path} --step {step}"
        return f"{last}; find the first such step by --log_interval 1"

    def check_weights(self, step: int):
        """Raises RunError if the weights are not finite, or differ between the ranks."""
        norms = {}
        for name, tensor in checkpoints.named_tensors(self.state).items():
            if isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex()):
                # In float32: a norm in bfloat16 has three digits. abs: weights may be complex.
                norms[name] = torch.linalg.vector_norm(tensor.detach().abs().float())
                if not tensor.requires_grad:  # may be a mask of -inf
                    norms[name] = norms[name].nan_to_num(math.nan, 0)
        norm = float(nn.utils.get_total_norm(norms.values()))  # waits for the device, once
        norm_of_rank_0 = self.fabric.broadcast(norm)
        other = difference({"weights are those of rank 0": math.isclose(norm, norm_of_rank_0, rel_tol=1e-5)})
        if other:
            raise RunError(
                f"after step {step}, {other}: "
                "do random numbers differ that are drawn after the backward passes? before them, the step seeds them; "
                "or was a module frozen when it was set up, and trained later, or not called as model(...)?"
            )
        if not math.isfinite(norm_of_rank_0):
            names = [name for name, value in norms.items() if not value.isfinite()]
            names = self.fabric.broadcast(names)
            raise RunError(
                f"the weights are not finite after step {step}: {', '.join(names)}{self.where_to_look(step)}"
            )

    def check_optimizers(self):
        """Raises RunError if an optimizer trains other parameters than as it was built, which a resume builds again."""
        optimizers = checkpoints.describe_optimizers(self.state)
        for name, about in self.description["optimizers"].items():
            if optimizers[name]["parameters"] != about["parameters"]:
                raise RunError(
                    f"state[{name!r}] trains other parameters than at `run.restore()`, so a resume could not restore "
                    "it: add all groups before, those of later with a learning rate of 0"
                )

    def write_checkpoint(self, contents: dict, step: int, is_regular: bool, is_best: bool):
        for logger in self.loggers:
            logger.save()  # first the rows before this checkpoint: a resume needs them
        checkpoints.save(self.path, contents, step, is_regular, is_best, not self.has_saved)
        self.has_saved = True
        checkpoints.remove_old(self.path, self.config.num_checkpoint_keep)
        self.summary["checkpoint"] = step
        self.write_summary("running")

    # ---- at the end

    def finish(self, name: str):
        """Writes model.pt, the weights of state[name], and then summary.json, which makes the run a finished one. The
        weights are read from the last checkpoint: there they are whole and on the CPU with any strategy."""
        self.on_rank_zero(self.write_weights, name)

    def write_weights(self, name: str):
        self.write_config()  # with fewer steps than the run has made, `open` was not called
        last = checkpoints.checkpoints_of(self.path)[0]
        with atomically(self.path / "model.pt", "wb") as file:
            checkpoints.write(checkpoints.load(last)[name], file)
        self.write_summary("finished")

    def next_command(self, is_finished: bool) -> str:
        """The command to continue with."""
        if self.config.fast_run:
            return "the same without --fast_run" if is_finished else "a resume, the second half of --fast_run"
        if not is_finished:
            return f"python train.py --resume {shlex.quote(str(self.path))}"
        checkpoint = "" if self.has_best() else " --checkpoint last"
        return f"python test.py --out_dir {shlex.quote(str(self.path))}{checkpoint}"

    def has_best(self) -> bool:
        return (self.path / "checkpoints" / "best.ckpt").exists()

    def close(self, kind, error: BaseException | None, trace):  # the arguments of __exit__
        if self.summary["state"] == "finished":
            return
        if error and not self.config.fast_run and any(self.path.glob("checkpoints/*.ckpt")):
            error.add_note(f"the checkpoints are whole, continue with: {self.next_command(False)}")
        try:
            self.write_summary("failed" if isinstance(error, Exception) else "interrupted")
        except Exception:
            if error is None:  # else the first error is the one to tell
                raise


def rehearse(fabric: Fabric, start: Callable, config: TrainConfig, resources: ExitStack) -> int:
    """--fast_run: trains for half of the steps, stops as after a signal, resumes, and trains for the rest. Each half
    has a validation, a log and a save. The run lies in a temporary folder, which is removed, also after a signal.

    Args:
        fabric: Fabric, launched.
        start: start(config, resources) starts or resumes a run, and returns the exit code.
        config: The options.
        resources: Closed at the end.
    """
    handle_signals(end_rehearsal, resources)
    folder = ""
    if fabric.is_global_zero:
        root = Path(config.root_dir).absolute()
        with as_config_error(config, "root_dir"):
            while not root.exists():
                root = root.parent
            folder = tempfile.mkdtemp(prefix=".fast_run-", dir=root)
        resources.callback(shutil.rmtree, folder, ignore_errors=True)
    half = (config.fast_run + 1) // 2
    config = replace(
        config,
        out_dir=f"{fabric.broadcast(folder)}/run",  # absolute; an option may name a run in root_dir
        max_steps=config.fast_run,
        early_stopping_patience=0,
        limit_train_batches=half,  # so there are two epochs: what happens between them is tried, too
        limit_val_batches=config.limit_val_batches and config.fast_run,
        val_interval=half,
        log_interval=half,
        checkpoint_interval=half,
        logger_name=tuple(name for name in config.logger_name if name in ("csv", "tensorboard")) or ("csv",),
    )
    with ExitStack() as first:
        start(config, first)
    gc.collect()  # the model of the first half
    run_dir = newest_run(config.out_dir, config.root_dir)
    with ExitStack() as second:
        return start(replace(config, resume=str(run_dir)), second)


def end_rehearsal(number: int, frame):
    raise RunError("--fast_run was stopped by a signal, and leaves nothing behind")
