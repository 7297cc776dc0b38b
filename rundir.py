"""The run directory: its name, lock, checkpoints, summary and provenance. Nothing here depends on the task, or on a key
of `state`: all modules, optimizers, tensors and plain values in it are treated alike."""

import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import default_restore_location

from cli import CODE, ROOT, SOURCES, as_config_error, named_folders, parse, say, to_yaml, words_of_yaml
from config import FIXED_ON_RESUME, ConfigError, RunError, TrainConfig, values_of
from launch import SHARED, changed_files, differing_rank
from loggers import Console, open_loggers, scalars_of
from utils import atomically, parameters_of

FORMAT = 2  # of checkpoints
TIMESTAMP = "%Y%m%d-%H%M%S"
PLAIN = (int, float, str, bool, type(None))  # beside tensors, all that a checkpoint holds, in dicts, lists and tuples
# The commit, and the names of changed files; nothing without git. It takes no lock, which would fail a `git commit` at
# the same time, and starts no fsmonitor, which would be a program that the checkout names.
GIT_STATUS = "exec git --no-optional-locks -c core.fsmonitor=false status --porcelain=v2 --branch"

# ---- checkpoints


def load(path: Path, location="cpu") -> dict:
    """The contents of a file of torch.save. `location` is the map_location of torch.load. Objects other than tensors
    and plain values could run code: it raises."""
    return torch.load(path, location, mmap=True, weights_only=True)


def load_meta(path: Path) -> dict:
    """The contents of a file of torch.save, with tensors on the meta device; {} if it is no such file, or a damaged
    one. Damage within a tensor is not seen. Raises PermissionError if it may not be read."""
    try:
        return dict(load(path, "meta"))
    except PermissionError:
        raise
    except Exception:  # IsADirectoryError, RuntimeError, UnpicklingError, ...
        return {}


def is_whole(path: Path) -> bool:
    """Whether each byte of a file of torch.save is as written, by its checksums. Reads the whole file."""
    with suppress(Exception):  # BadZipFile, NotImplementedError, OSError, ...
        return zipfile.ZipFile(path).testzip() is None
    return False


def step_of(path: Path) -> int:
    """The step of a checkpoint, by what load_meta finds; -1 for any other file."""
    with suppress(KeyError, TypeError, ValueError):
        return int(load_meta(path)["checkpoint"]["step"])
    return -1


def regular_checkpoints(run_dir: Path) -> dict:
    """The files step-NUMBER.ckpt of a run, with their steps. Files with other names are ignored."""
    paths = run_dir.glob("checkpoints/step-*.ckpt")
    return {path: int(path.stem[5:]) for path in paths if path.stem[5:].isdecimal()}


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first. best.ckpt is one of them: it is written before step-*.ckpt, so
    after a kill it may be the newest."""
    steps = regular_checkpoints(run_dir)
    best = run_dir / "checkpoints" / "best.ckpt"
    if best.exists():
        steps[best] = step_of(best)
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


# ---- state


def check_plain(value: Any, name: str = "state"):
    """Raises RunError for a value that could be saved, but not loaded with `weights_only=True`."""
    if type(value) is dict:
        for key, item in value.items():
            check_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            check_plain(item, f"{name}[{number}]")
    elif not (hasattr(value, "state_dict") or isinstance(value, Tensor) or type(value) in PLAIN):
        raise RunError(
            f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: "
            "use tensors, numbers, strings, lists, dicts, or objects with a state_dict"
        )


def entries_of(state: dict) -> list:
    """The names of what has a state_dict."""
    return [name for name, value in state.items() if hasattr(value, "state_dict")]


# ---- optimizers: their state_dicts know parameters by numbers alone, checkpoints by names, too


def settings_of(optimizer: Optimizer) -> list:
    """The settings of each parameter group, such as the weight decay."""
    kinds = (*PLAIN, tuple)
    return [{key: value for key, value in group.items() if type(value) in kinds} for group in optimizer.param_groups]


def named_tensors(state: dict) -> dict:
    """The tensors of the modules in `state` by name: the entry of a module, a dot, the name in its state_dict, and the
    shape. A tied parameter has several names."""
    named = {}
    for entry, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    named[f"{entry}.{name} {tuple(tensor.shape)}"] = tensor
    return named


def describe_optimizers(state: dict) -> dict:
    """For each optimizer in `state`: its class, the settings of its groups, and the names of its parameters with their
    numbers.

    Raises:
        RunError: A parameter is in no module of `state`: DDP would not average it, nor check_weights compare it.
    """
    named = named_tensors(state)
    optimizers = {}
    for entry, value in state.items():
        if isinstance(value, Optimizer):
            numbers = {parameter: number for number, parameter in enumerate(parameters_of(value))}
            lost = numbers.keys() - set(named.values())
            if lost:
                raise RunError(
                    f"state[{entry!r}] trains a parameter of the shape {tuple(lost.pop().shape)} that is in no module "
                    "of `state`: add a module that has it; call functional_call with model.module"
                )
            optimizers[entry] = {
                "class": type(getattr(value, "optimizer", value)).__name__,  # without Fabric's wrapper
                "settings": settings_of(value),
                "names": {name: numbers[tensor] for name, tensor in named.items() if tensor in numbers},
            }
    return optimizers


def restore_optimizer(optimizer: Optimizer, saved: dict, now: dict, then: dict):
    """Restores an optimizer. The state of a parameter is found by its name, that of a group by its parameters.

    Args:
        optimizer: The optimizer.
        saved: Its state_dict in the checkpoint.
        now: Its description, as built in this process.
        then: Its description, as built in the process that has saved the checkpoint.

    Raises:
        ValueError: Its class or parameters are others, or a group with values of its own is gone.
    """
    if now["class"] != then["class"]:
        raise ValueError(f"an optimizer is of class {now['class']}, but {then['class']} in the checkpoint")
    old = then["names"]
    new = now["names"]
    numbers = {old[name]: new[name] for name in old.keys() & new.keys()}
    if set(numbers) != set(old.values()) or set(numbers.values()) != set(new.values()):
        others = sorted(old.keys() ^ new.keys())
        raise ValueError(f"an optimizer trains other parameters than in the checkpoint: {', '.join(others)}")
    if saved.keys() == {"state", "param_groups"}:
        groups = merge_settings(optimizer, saved["param_groups"], then["settings"], numbers)
        state = {numbers[number]: values for number, values in saved["state"].items()}
        saved = {"state": state, "param_groups": groups}
    elif old != new or now["settings"] != then["settings"]:
        raise ValueError(f"{then['class']} has a state_dict of its own: its parameters and settings cannot change")
    optimizer.load_state_dict(saved)


def merge_settings(optimizer: Optimizer, saved: list[dict], settings: list[dict], numbers: dict) -> list[dict]:
    """The groups of an optimizer as built, with the values that the optimizer had put or changed there by itself before
    the checkpoint. So a setting that has changed since then in the options or the code is the new one.

    Args:
        optimizer: The optimizer, as built.
        saved: The groups in the checkpoint.
        settings: Their settings, as built in the process that has saved it.
        numbers: The number of each parameter by the number that it had there.

    Raises:
        ValueError: A group with such values has no counterpart of the same parameters.
    """
    own_values = {}
    for group, built in zip(saved, settings, strict=True):
        own = {key: value for key, value in group.items() if key not in built or built[key] != value}
        own_values[frozenset(numbers[number] for number in own.pop("params"))] = own
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        groups.append(group | own_values.pop(frozenset(group["params"]), {}))
    lost = {key for own in own_values.values() for key in own} - {"lr"}  # the loop sets lr in each step
    if lost:
        raise ValueError(f"an optimizer has no group for the {', '.join(lost)} of a group in the checkpoint")
    return groups


# ---- provenance


def write_provenance(run_dir: Path, fabric: Fabric):
    """Writes the command line, devices, host, packages, git commit and source files of this process."""
    packages = sorted(info.stem for folder in sys.path for info in Path(folder).glob("*.dist-info"))
    lines = [
        shlex.join([sys.executable, *sys.argv]),
        f"{fabric.world_size} x {fabric.device.type} on {os.uname().nodename}",
        f"Python {platform.python_version()} on {platform.platform()}",
        *packages,
    ]
    with open(run_dir / "provenance" / time.strftime(f"{TIMESTAMP}.txt"), "a") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(GIT_STATUS, shell=True, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL, timeout=10)
    folder = run_dir / "provenance" / f"code-{zlib.crc32(repr(SOURCES).encode()):08x}"
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
    """The directory of a run. `restore` restores `state` on a resume. `start`, which is called after the first backward
    pass, makes the directory of a new run. With --fast_run nothing is written. All ranks call all methods."""

    def __init__(self, fabric: Fabric, config: TrainConfig, state: dict, resources: ExitStack):
        self.fabric = fabric
        self.config = config
        self.state = state
        # Closed after the data workers are gone: one that dies would raise an error anywhere, also in `close`.
        self.resources = resources.enter_context(ExitStack())
        self.path: Any = None  # until `restore` or `start`; Any, since most methods are called after them
        self.origin = ""  # the checkpoint that a resume has restored
        self.loggers: list = []
        self.began = time.monotonic()
        self.written = 0.0  # time of the last summary.json
        self.modules = [value for value in state.values() if isinstance(value, nn.Module)]
        self.names = set(state)  # those that `restore` can find
        self.optimizers = describe_optimizers(state)  # as built: a resume can tell which settings have changed since
        parameters = sum(parameter.numel() for module in self.modules for parameter in module.parameters())
        self.summary: dict = {"parameters": parameters, "last": {}}

        self.group = None
        if dist.is_initialized():  # the others wait without a limit; gloo tells at once when a rank has died
            seconds = config.timeout if fabric.is_global_zero else 1e7
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

        self.config_text = to_yaml(config)
        check_plain(state)
        for module in self.modules:
            module.load_state_dict(module.state_dict())  # fails now if it would fail on a resume
        for name in config.logger_name:
            if not find_spec(name):  # csv is a module of Python's
                raise ConfigError(f"--logger_name {name}: is not installed; pip install {name}")

    def on_rank_zero(self, function: Callable, *args) -> Any:
        """Calls the function on rank 0 alone. The other ranks wait for it as long as rank 0 lives. All return its
        result, or raise its ConfigError or RunError."""
        result: list = [None]
        if self.fabric.is_global_zero:
            try:
                result = [function(*args)]
            except (ConfigError, RunError) as error:
                result = [error]
        if self.group is not None:
            dist.broadcast_object_list(result, group=self.group)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    def take_lock(self):
        # A POSIX lock ends with this process. A lock of flock would stay with the data workers.
        lock = self.resources.enter_context(open(self.path / ".lock", "a"))  # noqa: SIM115
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--resume: another process is writing to {self.path}") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{self.path} cannot be locked ({error.strerror}): make sure that no other process resumes it")

    # ---- on a resume

    def restore(self):
        """On a resume, locks the run and restores `state`. Entries that are not in the checkpoint keep their values."""
        if not self.config.resume:
            return
        self.path = Path(self.config.resume)
        path = self.on_rank_zero(self.choose_checkpoint)
        if path is None:
            return
        other = differing_rank(self.fabric, path.stat().st_size if path.exists() else None)
        if other:
            raise ConfigError(f"--resume: {other} does not see {path} as rank 0 does; {SHARED}")
        saved = load(path, self.place)
        about = saved["checkpoint"]
        if about.get("format") != FORMAT:
            raise ConfigError(f"--resume: {path} was written by another version of the template; continue with it")
        words = words_of_yaml(about["config"])
        now = values_of(self.config)
        fixed = {name: words[name] for name in FIXED_ON_RESUME if name in words and name in now}
        for name, then in parse(TrainConfig, fixed).items():
            if now[name] != then:  # config.yaml was edited
                raise ConfigError(f"--{name} {now[name]}: a resume cannot change it; {path} was trained with {then}")
        renamed = set(entries_of(self.state)) ^ set(about["entries"])
        if renamed:
            raise ConfigError(
                f"--resume: {', '.join(sorted(renamed))}: in `state` or in the checkpoint, but not in both; "
                "rename it, or start a new run from the weights of this one"
            )
        self.summary |= about["summary"] | {"checkpoint": about["step"]}
        self.began -= self.summary["seconds"]
        changed = changed_files(about["code"])
        self.origin = f"\nresumed from {path}{changed}"
        for name, current in self.state.items():
            if name not in saved:
                self.origin += f"; state[{name!r}] is not in it, and new"
                continue
            try:
                if name in self.optimizers:
                    restore_optimizer(current, saved[name], self.optimizers[name], about["optimizers"][name])
                else:
                    self.state[name] = self.restored(current, saved[name], about["device"])
            except Exception as error:
                raise ConfigError(f"--resume {path}{changed}: {error}") from error

    def choose_checkpoint(self) -> Path | None:
        """The complete checkpoint of the highest step; None if the run never had one. Renames damaged ones."""
        self.take_lock()
        damaged = []
        for path in checkpoints_of(self.path):
            if step_of(path) < 0 or not is_whole(path):
                damaged.append(path)
                continue
            for other in damaged:
                say(f"skipped {other}: it is damaged")
                other.rename(f"{other}.damaged")
            return path
        summary = self.path / "summary.json"
        if damaged or (summary.exists() and b'"checkpoint":' in summary.read_bytes()):
            raise RunError(f"no checkpoint in {self.path / 'checkpoints'} can be read; nothing was changed")
        return None

    def place(self, storage, location: str):
        """The map_location of torch.load: what was on a GPU comes to the device of this process."""
        copy = storage.clone()  # otherwise it would stay backed by the file
        return copy if location == "cpu" else default_restore_location(copy, str(self.fabric.device))

    def restored(self, current, saved, device: str) -> Any:
        """An entry of `state` with the value from a checkpoint, which was saved by a run on this kind of device."""
        if isinstance(current, Tensor) and isinstance(saved, Tensor):
            current.data = saved.to(current.device)  # in place: the loop may have a reference to it
        elif not hasattr(current, "state_dict"):  # beside a GPU, tensors on the CPU stay there
            return self.fabric.to_device(saved) if device == "cpu" else saved
        elif saved != {}:  # saved without a gradient scaler; GradScaler does not accept it
            current.load_state_dict(saved)
        return current

    # ---- in the first step of a process

    def start(self, step: int, console: Console):
        """Makes the directory of a new run, writes config and provenance, and opens the loggers, after `step` steps."""
        describe_optimizers(self.state)  # fails if the first step has replaced a parameter
        for name in self.state.keys() - self.names:
            raise RunError(f"state: {name} came after `run.restore()`, so a resume would not restore it")
        if self.config.fast_run:
            console.print("run directory none: --fast_run writes nothing")
            return
        if self.path is None:
            self.path = self.on_rank_zero(self.make_directory)
            other = differing_rank(self.fabric, self.path.exists())
            if other:
                self.on_rank_zero(shutil.rmtree, self.path)
                raise ConfigError(f"--root_dir {self.config.root_dir}: {other} does not see {self.path}; {SHARED}")
        self.on_rank_zero(self.open, step, console)

    def open(self, step: int, console: Console):
        """Writes config and provenance, and opens the loggers."""
        # model.pt marks a finished run, which this one no longer is. A kill may have left large *.tmp.
        for path in (self.path / "model.pt", *self.path.glob("checkpoints/*.tmp")):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        self.write_config()
        for name in ("checkpoints", "logs", "provenance"):
            (self.path / name).mkdir(exist_ok=True)
        write_provenance(self.path, self.fabric)
        self.resources.push(self.close)
        console.open_log(self.path)
        console.print(f"run directory {self.path}{self.origin}")
        trained = {parameter for name in self.optimizers for parameter in parameters_of(self.state[name])}
        for name, tensor in named_tensors(self.state).items():
            if tensor.grad is not None and tensor not in trained:
                console.print(f"{name} has a gradient, but is in no optimizer of `state`")
        self.loggers = open_loggers(self.path, step, self.config, self.resources)

    def write_config(self):
        with atomically(self.path / "config.yaml") as file:
            file.write(self.config_text)

    def make_directory(self) -> Path:
        """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir, and locks it. The name is later than that of all other runs of this
        out_dir, also if the clock was set back: `--resume auto` takes the latest."""
        base = Path(self.config.root_dir) / self.config.out_dir
        with as_config_error(self.config, "root_dir", "out_dir"):
            base.parent.mkdir(parents=True, exist_ok=True)
            moment = datetime.now()  # without a time zone: later by name in the hour that a clock repeats, too
            for other in named_folders(base):
                with suppress(ValueError):  # no date
                    moment = max(moment, datetime.strptime(other.name[:15], TIMESTAMP))
            while True:
                self.path = base.with_name(f"{moment:{TIMESTAMP}}-{base.name}")
                with suppress(FileExistsError):
                    self.path.mkdir()
                    break
                moment += timedelta(seconds=1)
        self.take_lock()
        return self.path

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
        plain = {name: value for name, value in self.state.items() if type(value) in PLAIN}
        with atomically(self.path / "summary.json") as file:
            json.dump(plain | self.summary, file, indent=2)

    def save(self, step: int, is_regular: bool, is_best: bool):
        """Writes step-*.ckpt if `is_regular`, and best.ckpt if `is_best` and checkpoints are not switched off, or there
        is one. Deletes all step-*.ckpt but the newest `num_checkpoint_keep`.

        Raises:
            RunError: The state could not be loaded again, or the weights are not finite, or differ between the ranks.
        """
        if self.config.fast_run:
            return
        if not (self.has_best() or self.config.checkpoint_frequency or self.config.checkpoint_interval):
            is_best = False
        if not (is_regular or is_best):
            return
        check_plain(self.state)
        self.check_weights(step)
        saved = {}
        for name, value in self.state.items():
            saved[name] = value.state_dict() if hasattr(value, "state_dict") else value
        saved["checkpoint"] = {
            "format": FORMAT,
            "step": step,
            "device": self.fabric.device.type,
            "config": self.config_text,
            "code": SOURCES,
            "entries": entries_of(self.state),
            "optimizers": self.optimizers,
            "summary": {"seconds": time.monotonic() - self.began, "last": self.summary["last"]},
        }
        self.on_rank_zero(self.write_checkpoint, saved, step, is_regular, is_best)

    def check_weights(self, step: int):
        """Raises RunError if the weights are not finite, or differ between the ranks."""
        norms = []
        for module in self.modules:
            for parameter in module.parameters():
                # In float32: a norm in bfloat16 has three digits. abs: weights may be complex.
                norms.append(torch.linalg.vector_norm(parameter.detach().abs().float()))
        norm = float(nn.utils.get_total_norm(norms))  # waits for the device, once
        norm_of_rank_0 = self.fabric.broadcast(norm)
        other = differing_rank(self.fabric, math.isclose(norm, norm_of_rank_0, rel_tol=1e-5))
        if other:
            raise RunError(
                f"the weights of {other} are not those of rank 0 after step {step}: "
                "do random numbers differ that are drawn outside compute_loss? inside, the step seeds them; "
                "or was a module frozen when it was set up, and trained later, or not called as model(...)?"
            )
        if not math.isfinite(norm_of_rank_0):
            raise RunError(f"the weights are not finite after step {step}")

    def write_checkpoint(self, saved: dict, step: int, is_regular: bool, is_best: bool):
        folder = self.path / "checkpoints"
        best = folder / "best.ckpt"
        # First the rows before this checkpoint: a resume needs them. Not **/*.*: who closes .lock loses the lock.
        for path in [*self.path.glob("events.*"), *self.path.glob("logs/**/*.*")]:
            if path.is_file():
                with open(path) as file:
                    os.fsync(file.fileno())
        regular = folder / f"step-{step:08d}.ckpt"
        with atomically(best if is_best else regular, "wb") as file:  # fabric.save would write two more copies
            torch.save(saved, file)
            file.flush()
            if "checkpoint" not in self.summary and step_of(Path(file.name)) != step:  # the first one of the run
                raise RunError("the checkpoint cannot be read back: does `state` hold anything but plain values?")
        if is_best and is_regular:  # best.ckpt was written first: a kill in between must not lose it
            with suppress(OSError):  # on a file system without links, best.ckpt is the checkpoint of this step
                os.link(best, regular)
        if self.config.num_checkpoint_keep:
            steps = regular_checkpoints(self.path)
            for path in sorted(steps, key=steps.__getitem__)[: -self.config.num_checkpoint_keep]:
                path.unlink()
        self.summary["checkpoint"] = step
        self.write_summary("running")

    # ---- at the end

    def finish(self, name: str):
        """Writes model.pt, the weights of state[name]. It marks a finished run. The weights are read from the last
        checkpoint: there they are whole and on the CPU with any strategy."""
        if not self.config.fast_run:
            self.on_rank_zero(self.write_weights, name)

    def write_weights(self, name: str):
        self.write_config()  # with fewer steps than the run has made, `open` was not called
        self.write_summary("finished")
        with atomically(self.path / "model.pt", "wb") as file:
            torch.save(load(checkpoints_of(self.path)[0])[name], file)

    def next_command(self, is_finished: bool) -> str:
        """The command to continue with."""
        if self.path is None:
            return "the same without --fast_run, which has written nothing"
        if not is_finished:
            return f"python train.py --resume {shlex.quote(str(self.path))}"
        checkpoint = "" if self.has_best() else " --checkpoint last"
        return f"python test.py --out_dir {shlex.quote(str(self.path))}{checkpoint}"

    def has_best(self) -> bool:
        return (self.path / "checkpoints" / "best.ckpt").exists()

    def close(self, kind, error: BaseException | None, trace):  # the arguments of __exit__
        if error and any(self.path.glob("checkpoints/*.ckpt")):
            error.add_note(f"the checkpoints are whole, continue with: {self.next_command(False)}")
        if (self.path / "model.pt").exists():
            return
        try:
            self.write_summary("failed" if isinstance(error, Exception) else "interrupted")
        except Exception:
            if error is None:  # else the first error is the one to tell
                raise
