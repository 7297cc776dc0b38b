"""The loggers csv, TensorBoard and wandb, which have the methods of Fabric's. On a resume, a logger drops the rows
after `last_step`, which are logged again."""

import csv
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from runtime.errors import RunError
from runtime.files import NOT_SUPPORTED, as_run_error, atomically, sync
from runtime.terminal import say


def scalars_of(row: dict) -> dict:
    """The numbers of a row, without the tensors that a metric may return."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


class CSVLogger:
    """Writes a row per logged step to metrics.csv. Fabric's CSVLogger would delete the file of a resumed run."""

    def __init__(self, run_dir: Path, last_step: int, config: Any):
        self.path = run_dir / "logs" / "csv" / "metrics.csv"
        self.path.parent.mkdir(exist_ok=True)
        self.columns: list = []
        try:
            rows = self.read()
            if rows and None in rows[-1].values():
                rows.pop()  # a kill has cut it
            rows = [row for row in rows if int(row["step"]) <= last_step]
        except (KeyError, ValueError, csv.Error) as error:  # somebody has changed it
            raise RunError(f"{self.path} cannot be read ({error!r}): move it away, and resume again") from error
        self.write(rows)

    def read(self) -> list[dict]:
        if not self.path.exists():
            return []
        with open(self.path, newline="") as file:
            return list(csv.DictReader(file))

    def write(self, rows: list[dict]):
        """Replaces the file by one with these rows."""
        names = [name for row in rows for name in row]
        self.columns = list(dict.fromkeys(["step", *names]))  # each once
        with atomically(self.path) as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    def log_metrics(self, row: dict, step: int):
        row = {"step": step, **row}
        if not (self.path.exists() and row.keys() <= set(self.columns)):  # somebody has deleted it, or new columns
            self.write([*self.read(), row])
            return
        try:
            with open(self.path, "a") as file:  # for each row: an editor may have replaced the file
                csv.DictWriter(file, self.columns).writerow(row)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            self.write([*self.read(), row])  # some file systems cannot append

    def save(self):
        if self.path.exists():
            with open(self.path) as file:
                sync(file)

    def finalize(self, status: str):
        """Nothing is left to close."""


class TensorBoardLogger:
    """Writes event files, in the run directory itself: TensorBoard calls a run by the path of their directory. It
    groups values by the part of the name before the slash."""

    def __init__(self, run_dir: Path, last_step: int, config: Any):
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir = run_dir
        self.writer = SummaryWriter(run_dir, purge_step=last_step + 1)

    def log_metrics(self, row: dict, step: int):
        for name, value in row.items():
            tag = name
            if "/" not in name or name.endswith("grad_norm"):
                tag = f"vitals/{name.split('/')[-1]}"  # sorted after train and val
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()

    def save(self):
        for path in self.run_dir.glob("events.*"):
            with open(path) as file:
                sync(file)

    def finalize(self, status: str):
        self.writer.close()


class WandbLogger:
    """Weights & Biases, under the name of the run directory; offline without a key or a connection. The id is random,
    and kept in the run: two runs of one name stay apart. wandb ignores steps that it already has. Its first error is
    printed, and the run goes on: a signal to all processes also ends wandb's process, and the run must still be
    saved."""

    def __init__(self, run_dir: Path, last_step: int, config: Any):
        import wandb

        id_file = run_dir / "logs" / "wandb_id"
        if not id_file.exists():
            with atomically(id_file) as file:
                file.write(secrets.token_hex(4))  # not `random`, which the seed has set
        self.has_failed = False
        init = partial(
            wandb.init,
            project=config.project,
            name=run_dir.resolve().name,
            id=id_file.read_text(),
            resume="allow",
            notes=config.comment,
            dir=run_dir / "logs",
            config=asdict(config),
        )
        try:
            has_mode = os.environ.get("WANDB_MODE") or wandb.login(prompt=False)
            self.run = init(mode=None if has_mode else "offline")
        except wandb.Error as error:  # no network, or the key is refused
            say(f"wandb is offline: {str(error).splitlines()[0]}")
            self.run = init(mode="offline")

    def log_metrics(self, row: dict, step: int):
        self.call(self.run.log, row, step=step, commit=True)  # otherwise it would wait for the next row

    def save(self):
        """wandb has files of its own."""

    def finalize(self, status: str):
        self.call(self.run.finish, exit_code=int(status == "failed"))

    def call(self, function: Callable, *args, **options):
        try:
            function(*args, **options)
        except Exception as error:
            if not self.has_failed:
                say(f"wandb has failed, rows may be missing there: {type(error).__name__}: {error}")
            self.has_failed = True


LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}  # of --logger_name


@as_run_error()
def finalize(logger: Any, kind, error: BaseException | None, trace):
    """Closes a logger. The last three are the arguments of __exit__."""
    logger.finalize("failed" if error else "success")
