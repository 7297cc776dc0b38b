"""The run directory: name, lock, summary, checkpoints. Nothing here knows a loss, a metric or a key of `state`: it
goes over the modules, optimizers, tensors and plain values in it."""

import fcntl
import json
import math
import os
import shlex
import shutil
import sys
import time
import zipfile
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

from config import ConfigError, RunError, TrainConfig, blame, to_yaml
from loggers import atomically, numbers, open_loggers, write_provenance
from utils import SHARED, differing_rank, on_rank_zero, order_buckets

PLAIN = (int, float, str, bool, type(None))


def load(path: Path, device: str = "cpu", mmap: bool = True) -> dict:
    return torch.load(path, device, mmap=mmap, weights_only=True)  # to unpickle anything else could run code


def skeleton(path: Path) -> dict:
    """The contents of a file of torch.save, its tensors on the meta device; {} if the file is damaged."""
    with suppress(IsADirectoryError):
        path.open("rb").close()  # a file that may not be read is not damaged: raises OSError
    with suppress(Exception):  # damage has many: OSError, BadZipFile, RuntimeError, UnpicklingError, ...
        return {**load(path, "meta")} if zipfile.ZipFile(path).testzip() is None else {}
    return {}


def step_of(path: Path) -> int:
    """The step of a complete checkpoint; -1 for any other file."""
    return skeleton(path).get("checkpoint", {}).get("step", -1)


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first. best.ckpt may be it: it is written before step-*.ckpt."""
    steps = {path: int(path.stem[5:]) for path in run_dir.glob("checkpoints/step-*.ckpt") if path.stem[5:].isdecimal()}
    steps |= {path: step_of(path) for path in run_dir.glob("checkpoints/best.ckpt")}
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def check_plain(state: dict) -> None:
    """Raises RunError for what a checkpoint cannot hold, since it could not be loaded without running code."""
    for path, value in tree_leaves_with_path(state, lambda node: type(node) not in (dict, list, tuple)):
        if not (hasattr(value, "state_dict") or isinstance(value, Tensor) or type(value) in PLAIN):
            found = f"state{keystr(path)} is a {type(value).__name__}, which a checkpoint cannot hold"
            raise RunError(f"{found}: use tensors, numbers, strings, lists, dicts, or what has a state_dict")


class RunDir:
    """The directory of a run. A resume locks it and restores `state` at once; for a new run, `start` makes it. With
    --fast_run nothing is written. All methods are called on all ranks."""

    def __init__(self, fabric: Fabric, config: TrainConfig, state: dict, resources: ExitStack):
        self.fabric, self.config, self.state, self.resources = fabric, config, state, resources
        self.path: Path | Any = None  # until a run is found or made; Any, since most methods are called after that
        self.loggers, self.began, self.origin = list[Any](), time.monotonic(), ""
        self.modules = [value for value in state.values() if isinstance(value, nn.Module)]
        parameters = sum(parameter.numel() for module in self.modules for parameter in module.parameters())
        self.summary: dict = {"state": "running", "parameters": parameters, "seconds": 0.0, "last": {}}
        # The optimizers' settings as built from the options: saved, so that a resume applies only those that changed.
        self.settings = {
            name: [{k: v for k, v in group.items() if type(v) in (*PLAIN, tuple)} for group in value.param_groups]
            for name, value in state.items() if isinstance(value, Optimizer)
        }  # fmt: skip
        check_plain(state)
        for module in self.modules:
            order_buckets(module)
            module.load_state_dict(module.state_dict())  # what can't be loaded again fails before anything is written
        if missing := [name for name in config.logger_name if name != "csv" and not find_spec(name)]:
            raise ConfigError(f"--logger_name {missing[0]}: is not installed; pip install {missing[0]}")
        if config.resume:
            self.path = Path(config.resume)
            if path := on_rank_zero(fabric, self.choose_checkpoint):
                self.restore(path)

    def take_lock(self) -> None:
        # A POSIX lock dies with this process; one of flock would live on in its data workers.
        lock = self.resources.enter_context(open(self.path / ".lock", "w"))  # noqa: SIM115
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--resume: another process is writing to {self.path}") from None
        except OSError as error:  # a network file system without locks
            print(f"{self.path} cannot be locked ({error.strerror}): make sure that no other process resumes it")

    def choose_checkpoint(self) -> Path | None:
        """The complete checkpoint of the highest step; renames damaged ones. None if the run never had one."""
        self.take_lock()
        found, summary = checkpoints_of(self.path), self.path / "summary.json"
        damaged = [*takewhile(lambda path: step_of(path) < 0, found)]
        had_one = found or (summary.exists() and b'"checkpoint":' in summary.read_bytes())
        if had_one and damaged == found:
            raise RunError(f"no checkpoint in {self.path / 'checkpoints'} can be read; nothing was changed")
        for path in damaged:
            print(f"skipped {path}: it is damaged", file=sys.stderr)
            path.rename(f"{path}.damaged")
        return found[len(damaged)] if found else None

    def restore(self, path: Path) -> None:
        """Restores `state`. Entries that the checkpoint lacks keep their initial values."""
        if odd := differing_rank(self.fabric, path.stat().st_size if path.exists() else None):
            raise ConfigError(f"--resume: {odd} does not see {path} as rank 0 does; {SHARED}")
        saved = load(path, mmap=self.fabric.device.type != "cpu")  # on a CPU, an optimizer would go on using the file
        about = saved["checkpoint"]
        self.summary |= json.loads(about.get("summary", "{}")) | {"checkpoint": about["step"]}
        self.began -= self.summary["seconds"]
        for name in [name for name in self.state if name in saved]:
            current, value = self.state[name], saved[name]
            if isinstance(value, Tensor) and isinstance(current, Tensor):  # in place: the loop may hold a reference
                current.data = value.to(current.device)
            elif not hasattr(current, "state_dict"):
                self.state[name] = self.fabric.to_device(value)
            elif value != {}:  # saved without a gradient scaler, which cannot load it
                current.load_state_dict(value)
        for name, now in self.settings.items():
            optimizer, then = self.state[name], about["settings"].get(name, now)
            for group, new, old in zip(optimizer.param_groups, now, then, strict=False):
                group |= {key: setting for key, setting in new.items() if old.get(key) != setting}
            optimizer.load_state_dict(optimizer.state_dict())  # moves the steps of a fused one to the device
        missing = [f"; state[{name!r}] is not in it, and new" for name in self.state.keys() - saved.keys()]
        self.origin = f"\nresumed from {path}{''.join(missing)}"

    def start(self, step: int) -> None:
        """Makes the directory, or goes on in it after `step`: writes config and provenance, opens the loggers."""
        if self.config.fast_run:
            return
        if not self.path:
            self.path = on_rank_zero(self.fabric, self.make)
            if odd := differing_rank(self.fabric, self.path.exists()):
                on_rank_zero(self.fabric, shutil.rmtree, self.path)
                raise ConfigError(f"--root_dir {self.config.root_dir}: {odd} does not see {self.path}; {SHARED}")
        if not self.fabric.is_global_zero:
            return
        # First remove the mark of a finished run, since it goes on, and files that a kill has left half written.
        for path in (self.path / "model.pt", *self.path.glob("**/*.tmp")):
            path.unlink(missing_ok=True)
        with atomically(self.path / "config.yaml") as file:
            file.write(to_yaml(self.config))
        for name in ("checkpoints", "logs", "provenance"):
            (self.path / name).mkdir(exist_ok=True)
        write_provenance(self.path, self.fabric)
        self.resources.push(self.close)
        self.loggers = open_loggers(self.path, step, self.config, self.resources)

    def make(self) -> Path:
        """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir, and locks it; in the next second where that name is taken."""
        base = Path(self.config.root_dir) / self.config.out_dir
        with blame(self.config, "root_dir", "out_dir"):
            base.parent.mkdir(parents=True, exist_ok=True)
            while True:
                self.path = base.with_name(f"{time.strftime('%Y%m%d-%H%M%S')}-{base.name}")
                with suppress(FileExistsError):
                    self.path.mkdir()
                    self.take_lock()
                    return self.path
                time.sleep(0.1)

    def log(self, row: dict, step: int) -> None:
        """Gives the numbers of a row, where it has some, to all loggers."""
        if kept := numbers(row):
            self.summary["last"] |= kept
            for logger in self.loggers:
                logger.log(kept, step)

    def write_summary(self, state: str) -> None:
        """Writes summary.json; `state` is running, finished, interrupted or failed."""
        plain = {name: value for name, value in self.state.items() if type(value) in PLAIN}
        self.summary |= {"state": state, "seconds": time.monotonic() - self.began}
        with atomically(self.path / "summary.json") as file:
            json.dump(plain | self.summary, file, indent=2)

    def save(self, step: int, is_regular: bool, is_best: bool) -> None:
        """Writes summary.json, and a checkpoint: step-*.ckpt where `is_regular`, best.ckpt where `is_best`. Deletes all
        step-*.ckpt but the newest `num_checkpoint_keep`. Raises RunError if the state could not be loaded again, or if
        the weights are not finite, or differ between the ranks."""
        is_best = is_best and bool(self.config.checkpoint_frequency or self.config.checkpoint_interval)
        is_saved = is_regular or is_best
        if self.loggers and (is_saved or time.monotonic() > self.began + self.summary["seconds"] + 1):
            self.write_summary("running")  # at most once a second: writing may take longer than a validation
        if self.config.fast_run or not is_saved:
            return
        check_plain(self.state)
        weights = [parameter.detach() for module in self.modules for parameter in module.parameters()]
        norm = float(nn.utils.get_total_norm(weights))  # waits for the device, once
        if odd := differing_rank(self.fabric, math.isclose(norm, self.fabric.broadcast(norm), rel_tol=1e-5)):
            raise RunError(f"the weights of {odd} are not those of rank 0 after step {step}")
        if not math.isfinite(norm):
            raise RunError(f"the weights are not finite after step {step}")
        saved = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in self.state.items()}
        so_far = json.dumps({name: self.summary[name] for name in ("seconds", "last")})
        saved["checkpoint"] = {"step": step, "settings": self.settings, "summary": so_far}
        if not self.fabric.is_global_zero:
            return
        if self.fabric.device.type != "cpu":  # all copies at once, into pinned memory; then one wait
            states, saved = saved, tree_map_only(Tensor, lambda tensor: tensor.to("cpu", non_blocking=True), saved)
            torch.accelerator.synchronize(self.fabric.device)
            for name in [name for name, value in states.items() if hasattr(value, "_metadata")]:
                saved[name]._metadata = states[name]._metadata  # the versions of its modules: tree_map drops them
        folder = self.path / "checkpoints"
        best, regular = folder / "best.ckpt", folder / f"step-{step:08d}.ckpt"
        with atomically(best if is_best else regular, "wb") as file:  # fabric.save would make two more copies of it
            torch.save(saved, file)
            file.flush()
            if "checkpoint" not in self.summary and step_of(Path(file.name)) != step:  # the first one
                raise RunError("the checkpoint cannot be read back: is there something in `state` that is not plain?")
        if is_best and is_regular:  # best.ckpt first: a kill in between must not lose it
            with suppress(OSError):  # a file system without links: best.ckpt is the checkpoint of this step
                os.link(best, regular)
        self.summary["checkpoint"] = step
        for path in sorted(folder.glob("step-[0-9]???????.ckpt"))[: -(self.config.num_checkpoint_keep or sys.maxsize)]:
            path.unlink()

    def finish(self, name: str) -> None:
        """Writes model.pt, the weights of state[name] alone, on the CPU. It marks a finished run."""
        if self.loggers:
            self.write_summary("finished")
            with atomically(self.path / "model.pt", "wb") as file:
                torch.save(load(checkpoints_of(self.path)[0])[name], file)

    def next_command(self, is_finished: bool) -> str:
        """What to do after the training."""
        if not self.path:
            return "the same without --fast_run, which has written nothing"
        if not is_finished:
            return f"python train.py --resume {shlex.quote(str(self.path))}"
        has_best = (self.path / "checkpoints" / "best.ckpt").exists()
        return f"python test.py --out_dir {shlex.quote(str(self.path))}{'' if has_best else ' --checkpoint last'}"

    def close(self, kind, error: BaseException | None, trace) -> None:
        if error and any(self.path.glob("checkpoints/*.ckpt")):
            error.add_note(f"the checkpoints are whole, go on with: {self.next_command(False)}")
        if not (self.path / "model.pt").exists():
            with suppress(*[Exception] if error else []):  # the first error is the one to tell
                self.write_summary("failed" if isinstance(error, Exception) else "interrupted")
