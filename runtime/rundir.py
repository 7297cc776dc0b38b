"""The run directory: its name, its lock, and the files in it."""

import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime import checkpoints
from runtime.checkpoints import with_tensors
from runtime.config_file import to_yaml
from runtime.errors import ConfigError
from runtime.files import as_run_error, atomically, lock, write_json
from runtime.loggers import LOGGERS, finalize
from runtime.options import as_config_error
from runtime.runs import named_folders
from runtime.source import SOURCES, TIMESTAMP, write_code, write_provenance


class RunDir:
    """The directory of a run, and its files. Rank 0 alone calls the methods, since it alone writes; the others know the
    path.

    Args:
        config: The options.
        resources: Closes what must not outlive the run.

    Attributes:
        config_text: The options as the text of config.yaml.
        path: The directory; None for a new run, until `make`.
        makers: A function for each logger, which makes it from the directory, the last step whose row stays, and the
            options. Append one, before the first step, to log to another place.
        state: That of the run. Its numbers are in summary.json.
        summary: What summary.json has beside them.
    """

    def __init__(self, config: Any, resources: ExitStack):
        self.config = config
        self.config_text = to_yaml(config)
        self.resources = resources
        self.path: Any = Path(config.resume) if config.resume else None
        self.makers: list[Callable] = [LOGGERS[name] for name in config.logger_name]
        self.loggers: list = []
        self.summary: dict = {"last": {}}
        self.began = time.monotonic()
        self.state: dict = {}

    # ---- before the first step is done

    def make(self) -> Path:
        """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir, and locks it. The name is later than that of all other runs of this
        out_dir, also if the clock was set back: `--resume auto` takes the latest."""
        base = Path(self.config.root_dir, self.config.out_dir)
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
        self.lock()
        return self.path

    def remove(self):
        """Takes `make` back."""
        shutil.rmtree(self.path)

    def lock(self):
        """Keeps other processes from writing into the directory."""
        try:
            self.resources.enter_context(lock(self.path / ".lock"))
        except BlockingIOError:
            raise ConfigError(f"--resume: another process is writing to {self.path}") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{self.path} cannot be locked ({error.strerror}): make sure that no other process resumes it")

    def open(self, devices: str):
        """Writes config and provenance, and opens the loggers. `devices` says on what the run computes."""
        for path in self.path.glob("checkpoints/*.tmp"):  # of a kill; may be large
            if not path.is_dir():
                path.unlink()
        self.write_summary("running")  # before the config: a finished run that becomes longer is no longer finished
        self.write_config()
        for name in ("checkpoints", "logs", "provenance"):
            (self.path / name).mkdir(exist_ok=True)
        write_provenance(self.path, devices)
        self.resources.push(self.close)
        last_step = self.state["step"]
        if self.state["due"]:  # its own row comes again
            last_step -= 1
        for make in self.makers:
            logger = make(self.path, last_step, self.config)
            self.loggers.append(logger)
            self.resources.push(partial(finalize, logger))

    # ---- files

    def write_config(self):
        with atomically(self.path / "config.yaml") as file:
            file.write(self.config_text)

    def write_summary(self, status: str):
        """Writes summary.json; `status` is running, finished, interrupted or failed."""
        self.summary |= {"state": status, "seconds": time.monotonic() - self.began}
        plain = (int, float, str, type(None))
        numbers = {name: value for name, value in self.state.items() if isinstance(value, plain)}
        write_json(self.path / "summary.json", numbers | self.summary)

    def log(self, scalars: dict):
        """Passes a row to the loggers."""
        self.summary["last"] |= scalars
        for logger in self.loggers:
            logger.log_metrics(scalars, self.state["step"])

    def write_checkpoint(self, contents: dict, path: Path):
        """Writes a checkpoint, and deletes all step-*.ckpt but the newest `num_checkpoint_keep`."""
        for logger in self.loggers:
            logger.save()  # first the rows before this checkpoint: a resume needs them
        seconds = time.monotonic() - self.began
        contents["checkpoint"]["summary"] = {"seconds": seconds, "last": self.summary["last"]}
        write_code(self.path)
        contents["checkpoint"]["code"] = {**SOURCES}
        checkpoints.save(path, contents)
        checkpoints.remove_old(self.path, self.config.num_checkpoint_keep)
        self.summary["checkpoint"] = self.state["step"]
        self.write_summary("running")

    def write_model(self, weights: dict):
        """Writes model.pt, and then summary.json, which makes the run a finished one."""
        with atomically(self.path / "model.pt", "wb") as file:
            torch.save(with_tensors(Tensor.cpu, weights), file)
        self.write_config()  # with fewer steps than the run has made, `open` was not called
        self.write_summary("finished")

    # ---- at the end

    def has_best(self) -> bool:
        return checkpoints.best_of(self.path).exists()

    def next_command(self, is_finished: bool) -> str:
        """The command to continue with."""
        path = shlex.quote(str(self.path))
        if not is_finished:
            return f"python train.py --resume {path}"
        return f"python test.py --out_dir {path}{'' if self.has_best() else ' --checkpoint last'}"

    def close(self, kind, error: BaseException | None, trace):  # the arguments of __exit__
        if self.summary["state"] == "finished":
            return
        if error and not self.config.fast_run and any(self.path.glob("checkpoints/*.ckpt")):
            error.add_note(f"the checkpoints are whole, continue with: {self.next_command(False)}")
        with suppress(OSError) if error else as_run_error():  # the first error is the one to tell
            self.write_summary("failed" if isinstance(error, Exception) else "interrupted")
