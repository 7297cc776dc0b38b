"""The loggers, and how a file is written whole. What a resumed run has logged after `last_step` is dropped: it will be
logged again."""

import csv
import os
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from config import TrainConfig


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


class CSVLogger:
    """A row per logged step, written at once. (Fabric's own deletes the file of a run that is resumed.)"""

    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig):
        self.path, rows = run_dir / "logs" / "csv" / "metrics.csv", []
        self.path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError), open(self.path, newline="", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if None not in row.values()]  # the last may be cut
        self.write([row for row in rows if str(row.get("step")).isdecimal() and int(row["step"]) <= last_step])

    def write(self, rows: list[dict]) -> None:
        self.columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        with atomically(self.path) as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    def log(self, row: dict, step: int) -> None:
        with open(self.path, "r+", newline="") as file:
            if not row.keys() <= {*self.columns}:  # a new column: the file is written anew, once
                return self.write([*csv.DictReader(file), {"step": step, **row}])
            file.seek(0, os.SEEK_END)
            csv.DictWriter(file, self.columns).writerow({"step": step, **row})

    def close(self) -> None: ...


class TensorBoardLogger:
    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(run_dir / "logs" / "tensorboard", purge_step=last_step + 1)
        self.close = self.writer.file_writer.close  # waits for the writer's thread, even where that has failed
        options = {k: v if type(v) in (int, float, str) else str(v) for k, v in asdict(config).items()}
        for summary in hparams(options, {config.monitor: 0}):  # SummaryWriter.add_hparams would make a run of its own
            self.writer.file_writer.add_summary(summary)

    def log(self, row: dict, step: int) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandbLogger:
    """Weights & Biases, under the name of the run directory; offline without a key. It drops the rows that it has. Its
    exceptions are ignored: a signal to all processes ends its own, too, and the run must still be saved."""

    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig):
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self.run = wandb.init(mode=mode, project=config.project, name=run_dir.name, id=run_dir.name, resume="allow",
                              notes=config.comment, dir=run_dir / "logs", config=asdict(config))  # fmt: skip

    def log(self, row: dict, step: int) -> None:
        with suppress(Exception):
            self.run.log(row, step=step)

    def close(self) -> None:
        with suppress(Exception):
            self.run.finish()


LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}
