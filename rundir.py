"""The run directory: name, lock, provenance, loggers, checkpoints. Nothing here knows a loss, a metric or a key of
`state`: it goes over the modules, optimizers, tensors and plain values in it."""

import csv
import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from cli import to_yaml
from config import ConfigError, RunError, TrainConfig
from utils import SHARED, differing_rank, on_rank_zero

PLAIN = (int, float, str, bool, type(None))


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a file beside `path` that gets the name at the end, once it is on the disk: a name means a whole file."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, mode, newline=None if "b" in mode else "") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


# ---- checkpoint files


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes where it is told to. (Fabric's own makes a copy in memory and one in $TMPDIR, which may be too small.)"""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        with open(path, "wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path, map_location="cpu", weights_only=True):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def step_of(path: Path) -> int:
    """The step of a checkpoint; -1 where the file is none, or is damaged."""
    with suppress(Exception):  # damage has many: OSError, RuntimeError, UnpicklingError, UnicodeDecodeError, ...
        return torch.load(path, map_location="meta", mmap=True, weights_only=True)["checkpoint"]["step"]
    return -1


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be read, and has the checksums with which it was written."""
    with suppress(Exception):
        return zipfile.ZipFile(path).testzip() is None and step_of(path) >= 0
    return False


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first. best.ckpt may be it: it gets its name before the others."""
    steps = {path: int(path.stem[5:]) for path in run_dir.glob("checkpoints/step-*.ckpt")}
    steps |= {path: step_of(path) for path in run_dir.glob("checkpoints/best.ckpt")}
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


# ---- loggers: of what is there, rows beyond `last_step` are dropped; they will be logged again


class CSVLogger:
    """A row per logged step, written at once."""

    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig):
        self.path, self.columns, rows = run_dir / "logs" / "csv" / "metrics.csv", ["step"], []
        if self.path.exists():
            with open(self.path, newline="", errors="replace") as file:
                rows = [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write_all([row for row in rows if int(row["step"]) <= last_step])

    def write_all(self, rows: list[dict]) -> None:
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with atomically(self.path) as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    def log(self, row: dict, step: int) -> None:
        with open(self.path, "r+", newline="") as file:
            if not row.keys() <= {*self.columns}:  # a new column: write the file anew, once
                return self.write_all([*csv.DictReader(file), {"step": step, **row}])
            file.seek(0, os.SEEK_END)
            csv.DictWriter(file, self.columns).writerow({"step": step, **row})

    def close(self) -> None:
        pass


class TensorBoardLogger:
    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(run_dir / "logs" / "tensorboard", purge_step=last_step + 1)
        options = {k: v if type(v) in (int, float, str) else str(v) for k, v in asdict(config).items()}
        for summary in hparams(options, {config.monitor: 0}):  # SummaryWriter.add_hparams would make a run of its own
            self.writer.file_writer.add_summary(summary)

    def log(self, row: dict, step: int) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """Weights & Biases, under the name of the run directory; offline where there is no key or no network. It drops rows
    that it has already by itself."""

    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig):
        import wandb

        (run_dir / "logs").mkdir(exist_ok=True)
        options = {"project": config.project, "name": run_dir.name, "id": run_dir.name, "resume": "allow",
                   "notes": config.comment, "dir": run_dir / "logs", "config": asdict(config)}  # fmt: skip
        try:  # without a key it would ask for one on the terminal
            mode = os.environ.get("WANDB_MODE") or (None if wandb.login(prompt=False) else "offline")
            self.run = wandb.init(**options, mode=mode)
        except wandb.Error as error:
            print(f"wandb goes offline: {error}")
            self.run = wandb.init(**options, mode="offline")

    def log(self, row: dict, step: int) -> None:
        with suppress(Exception):  # a signal to all processes ends wandb's own, too: the run must still be saved
            self.run.log(row, step=step)

    def close(self) -> None:
        with suppress(Exception):
            self.run.finish()
        if self.run.offline:
            print(f"wandb was offline; to upload: wandb sync {Path(self.run.dir).parent}")


LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}


class RunDir:
    """The directory of a run. A resume locks it and restores `state` at once; for a new run, `start` makes it. With
    --fast_run there is none, and nothing is written. All methods are called on all ranks."""

    def __init__(self, fabric: Fabric, config: TrainConfig, state: dict, resources: ExitStack):
        self.fabric, self.config, self.state = fabric, config, state
        self.path, self.lock, self.loggers, self.damaged = None, None, [], []
        fabric.strategy.checkpoint_io = DirectCheckpointIO()
        # As the options have built the optimizers: saved, to tell what other options have changed when it is resumed.
        self.settings = {name: [{k: v for k, v in group.items() if type(v) in PLAIN} for group in value.param_groups]
                         for name, value in state.items() if isinstance(value, torch.optim.Optimizer)}  # fmt: skip
        check_plain("state", {name: value for name, value in state.items() if not hasattr(value, "state_dict")})
        resources.push(self.close)
        if config.resume:
            self.path = Path(config.resume)
            on_rank_zero(fabric, self.take_lock)
            self.restore(on_rank_zero(fabric, self.choose_checkpoint))

    def take_lock(self) -> None:
        # A POSIX lock dies with this process; one of flock would live on in its data workers.
        self.lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until `close`
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            raise ConfigError(f"--resume: {self.path} is being written to by {self.lock.read()}") from None
        except OSError as error:  # a network file system without locks
            print(f"{self.path} cannot be locked ({error.strerror}): make sure that no other process resumes it")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self.lock.flush()

    def choose_checkpoint(self) -> Path | None:
        """The whole checkpoint with the highest step; None in a run that never had one."""
        for path in checkpoints_of(self.path):
            if is_whole(path):
                return path
            print(f"skipped {path}: it is damaged", file=sys.stderr)
            self.damaged.append(path)
        if self.damaged or (self.path / "summary.json").exists():  # which is written after each checkpoint
            raise RunError(f"no checkpoint in {self.path / 'checkpoints'} can be read; nothing was changed")

    def restore(self, path: Path | None) -> None:
        """Restores `state` in place. What the checkpoint lacks stays as it is."""
        if path is None:
            return
        if odd := differing_rank(self.fabric, path.stat().st_size if path.exists() else None):
            raise ConfigError(f"--resume: {odd} does not see {path} as rank 0 does; {SHARED}")
        saved = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        wanted = {name: value for name, value in self.state.items() if saved.get(name) != {}}
        missing = [name for name in wanted if name not in saved]
        wanted = {name: value for name, value in wanted.items() if name in saved}
        self.fabric.load(path, wanted)
        for name, value in wanted.items():
            old = self.state[name]
            self.state[name] = value.to(old.device) if isinstance(old, Tensor) else value
        for name, groups in self.settings.items():  # what other options have changed
            before = saved["checkpoint"]["settings"].get(name, groups)
            for group, now, then in zip(self.state[name].param_groups, groups, before, strict=False):
                group |= {key: value for key, value in now.items() if then.get(key) != value}
        if self.fabric.is_global_zero:
            print(f"resumed from {path}" + "".join(f"; state[{name!r}] is not in it, and new" for name in missing))

    def start(self, step: int) -> None:
        """Makes the directory, or goes on with it after `step`; writes config and provenance, opens the loggers."""
        if self.config.fast_run:
            return
        if not self.path:
            self.path = on_rank_zero(self.fabric, self.make)
            if odd := differing_rank(self.fabric, self.path.exists()):
                on_rank_zero(self.fabric, shutil.rmtree, self.path)
                raise ConfigError(f"--root_dir {self.config.root_dir}: {odd} does not see {self.path}; {SHARED}")
        if self.fabric.is_global_zero:
            # First what marks the end of a run that now goes on, what a kill has left half written, what is damaged.
            for path in (self.path / "model.pt", *self.path.glob("**/*.tmp")):
                path.unlink(missing_ok=True)
            for path in self.damaged:
                path.rename(path.with_name(path.name + ".damaged"))
            with atomically(self.path / "config.yaml") as file:
                file.write(to_yaml(self.config))
            (self.path / "checkpoints").mkdir(exist_ok=True)
            self.write_provenance()
            names = dict.fromkeys(self.config.logger_name)
            self.loggers = [LOGGERS[name](self.path, step, self.config) for name in names]

    def make(self) -> Path:
        """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir, and locks it; in the next second where that name is taken."""
        base = Path(self.config.root_dir) / self.config.out_dir
        while True:
            self.path = base.with_name(f"{time.strftime('%Y%m%d-%H%M%S')}-{base.name}")
            try:
                self.path.mkdir(parents=True)
                self.take_lock()
                return self.path
            except OSError as error:
                if not self.path.is_dir():
                    raise ConfigError(f"--root_dir {self.config.root_dir}: cannot make {self.path}: {error}") from None
                time.sleep(0.1)

    def write_provenance(self) -> None:
        """What it takes to know later how this start of the run came about."""

        def git(*command: str) -> str:
            with suppress(OSError):  # no git
                command = ["git", "-C", str(Path(__file__).parent), *command]
                return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
            return ""

        facts = {
            "command": [sys.executable, *sys.argv],
            "git_commit": git("rev-parse", "HEAD").strip(),
            "git_status": git("status", "-s").splitlines(),
            "host": platform.node(),
            "platform": platform.platform(),
            "devices": f"{self.fabric.world_size} x {self.fabric.device.type}",
            "python": platform.python_version(),
            "packages": sorted(info.stem for folder in sys.path for info in Path(folder).glob("*.dist-info")),
        }
        start = self.path / "provenance" / time.strftime("%Y%m%d-%H%M%S")
        start.parent.mkdir(exist_ok=True)
        start.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")
        start.with_suffix(".diff").write_text(git("diff", "HEAD"))

    def log(self, row: dict, step: int) -> None:
        """Gives the numbers of a row to all loggers."""
        for logger in self.loggers:
            logger.log({name: value for name, value in row.items() if isinstance(value, (int, float))}, step)

    def save(self, step: int, is_regular: bool, is_best: bool) -> None:
        """Writes a checkpoint, step-*.ckpt where `is_regular`, best.ckpt where `is_best`. Then deletes all step-*.ckpt but
        the newest `num_checkpoint_keep`. Raises RunError for a state that cannot be loaded, or is not finite."""
        if self.config.fast_run:
            return
        check_plain("state", {name: value for name, value in self.state.items() if not hasattr(value, "state_dict")})
        modules = [value for value in self.state.values() if isinstance(value, nn.Module)]
        norm = nn.utils.get_total_norm([p.detach() for module in modules for p in module.parameters()])
        is_finite = math.isfinite(norm)  # waits for the device, once
        if not self.fabric.strategy.reduce_boolean_decision(is_finite):
            raise RunError(f"the weights are not finite after step {step}; the checkpoints from before are good")
        folder = self.path / "checkpoints"
        beside, path = folder / "checkpoint.tmp", folder / (f"step-{step:08d}.ckpt" if is_regular else "best.ckpt")
        try:
            self.fabric.save(beside, {**self.state, "checkpoint": {"step": step, "settings": self.settings}})
            if not self.fabric.is_global_zero:
                return
            if not (self.path / "summary.json").exists() and step_of(beside) != step:
                raise RunError("the checkpoint cannot be read back: is there something in `state` that is not plain?")
            with open(beside) as file:
                os.fsync(file.fileno())
            if is_best and is_regular:  # first the best: a kill between the two must not lose it
                link = folder / "best.tmp"
                try:
                    os.link(beside, link)
                except OSError:  # a file system without links
                    shutil.copyfile(beside, link)
                os.replace(link, folder / "best.ckpt")
            os.replace(beside, path)
        finally:
            if self.fabric.is_global_zero:
                beside.unlink(missing_ok=True)
        with atomically(self.path / "summary.json") as file:
            json.dump({name: value for name, value in self.state.items() if type(value) in PLAIN}, file, indent=2)
        for path in sorted(folder.glob("step-*.ckpt"))[: -(self.config.num_checkpoint_keep or sys.maxsize)]:
            path.unlink()

    def finish(self, name: str) -> None:
        """Writes model.pt, the weights of state[name] alone, on the CPU. It marks a finished run."""
        if self.fabric.is_global_zero and not self.config.fast_run:
            weights = DirectCheckpointIO().load_checkpoint(checkpoints_of(self.path)[0])[name]
            with atomically(self.path / "model.pt", "wb") as file:
                torch.save(weights, file)

    def close(self, kind, error: BaseException | None, trace) -> None:
        for logger in self.loggers:
            logger.close()
        if self.lock:
            self.lock.close()
        if error and self.loggers:
            error.add_note(f"the checkpoints are whole, go on with: python train.py --resume {self.path}")


def check_plain(name: str, value) -> None:
    """Raises RunError for what a checkpoint could not be loaded with: only these values can be, without running code."""
    if type(value) in (dict, list, tuple, OrderedDict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_plain(f"{name}[{key!r}]", item)
    elif not isinstance(value, Tensor) and type(value) not in PLAIN:
        allowed = "it can hold tensors, numbers, texts, lists, dicts, and what has a state_dict"
        raise RunError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold; {allowed}")
