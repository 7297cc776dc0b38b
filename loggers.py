"""Provenance, console output, loggers, and `atomically`, which writes a file. On a resume, a logger drops the rows
after `last_step`: they are logged again."""

import csv
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from lightning.fabric import Fabric
from tqdm import tqdm

from cli import say
from config import TrainConfig

tqdm.set_lock(threading.RLock())  # its own is for several processes, which from Python 3.14 on takes another process


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a temporary file and renames it to `path` once it is on the disk: a file at `path` is always complete."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, mode, newline=None if "b" in mode else "") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_provenance(run_dir: Path, fabric: Fabric) -> None:
    """Records the command line, devices, host, packages and git state of this start."""
    packages = sorted(info.stem for folder in sys.path for info in Path(folder).glob("*.dist-info"))
    devices = f"{fabric.world_size} x {fabric.device.type} on {os.uname().nodename}"
    python = f"Python {platform.python_version()} on {platform.platform()}"
    with open(run_dir / "provenance" / time.strftime("%Y%m%d-%H%M%S.txt"), "a") as file:
        print(shlex.join([sys.executable, *sys.argv]), devices, python, *packages, sep="\n", file=file, flush=True)
        git = "git rev-parse HEAD; git status --short; git diff HEAD"  # where there is no git, it leaves nothing
        subprocess.run(git, shell=True, cwd=Path(__file__).parent, stdout=file, stderr=subprocess.DEVNULL)


def numbers(row: dict) -> dict:
    """The plain numbers of a row, without tensors that a metric may return."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def format_row(names, values) -> str:
    """A line of a table, each value right-aligned under its name. Given the names twice, the header."""
    texts = [f"{value:.5g}" if isinstance(value, float) else str(value) for value in values]
    return "  ".join(f"{text:>{max(len(name), 10)}}" for name, text in zip(names, texts, strict=True))


class Console:
    """What rank 0 prints: lines, which also go to train.log in the run directory, and a progress bar on stderr; where
    that is no terminal, a line of progress after 30 seconds without another line."""

    def __init__(self, is_rank_zero: bool, run_dir: Path | None, step: int, total_steps: int, resources: ExitStack):
        nowhere = resources.enter_context(open(os.devnull, "w"))  # noqa: SIM115 - closed with the resources
        self.is_rank_zero, self.is_terminal = is_rank_zero, is_rank_zero and sys.stderr.isatty()
        self.log = run_dir / "train.log" if is_rank_zero and run_dir else os.devnull
        text = "{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"  # in 80 columns
        file = sys.stderr if self.is_terminal else nowhere
        self.bar = tqdm(initial=step, total=total_steps, unit="step", bar_format=text, file=file, disable=False)
        self.columns, self.shown, self.printed = list[str](), dict[str, float](), time.monotonic()
        resources.push(self.close)

    def print(self, text: str) -> None:
        if self.is_rank_zero:
            with tqdm.external_write_mode():  # else it would break the progress bar
                say(text)
        self.printed = time.monotonic()
        with open(self.log, "a") as file:
            print(text, file=file)

    def row(self, row: dict) -> None:
        """Prints the numbers of a row, below the names of its columns where the row before had others."""
        row = numbers(row)
        if self.columns != (columns := list(row)):
            self.columns = columns
            self.print(format_row(columns, columns))
        self.print(format_row(columns, row.values()))

    def update(self, values: dict[str, float]) -> None:
        """Called after each step. The bar shows these values, and those given before."""
        if values:
            self.shown |= values
            self.bar.set_postfix_str(", ".join(f"{k} {v:.3g}" for k, v in self.shown.items()), refresh=False)
        self.bar.update()
        if not self.is_terminal and time.monotonic() > self.printed + 30:
            self.print(str(self.bar))

    def close(self, kind, error: BaseException | None, trace) -> None:
        self.bar.close()  # else tqdm would draw it again below an error
        if error:
            with suppress(OSError), open(self.log, "a") as file:
                traceback.print_exception(error, file=file)


class CSVLogger:
    """A row per logged step, written at once. (Fabric's own deletes the file of a run that is resumed.)"""

    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig, resources: ExitStack):
        self.path, rows = run_dir / "logs" / "csv" / "metrics.csv", []
        self.path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError), open(self.path, newline="", encoding="utf-8-sig", errors="replace") as file:
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


class TensorBoardLogger:
    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig, resources: ExitStack):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run_dir / "logs" / "tensorboard"
        files = sorted(folder.glob("events.out.tfevents.*"))  # as TensorBoard reads them: by the time in the name
        if files and files[-1].name > f"events.out.tfevents.{int(time.time()):010d}":  # the clock was set back
            for number, file in enumerate(files):
                file.rename(file.with_name(re.sub(r"\d+", f"{number:010d}", file.name, count=1)))
        self.writer = SummaryWriter(folder, purge_step=last_step + 1)
        resources.callback(self.writer._get_file_writer().close)  # waits for its thread, even where that has failed
        options = {k: v if type(v) in (int, float, str) else str(v) for k, v in asdict(config).items()}
        # add_hparams would make a run of its own. Without the experiment summary, [0], TensorBoard finds what differs.
        for summary in hparams(options, {})[1:]:
            self.writer._get_file_writer().add_summary(summary)

    def log(self, row: dict, step: int) -> None:
        for name, value in row.items():  # its groups are in alphabetical order: train, val, vitals
            self.writer.add_scalar(name if "/" in name else f"vitals/{name}", value, step)
        self.writer.flush()


class WandbLogger:
    """Weights & Biases, under the name of the run directory; offline without a key. It ignores rows that it has. Errors
    of log and finish are ignored: a signal to all processes also ends wandb's, and the run must still be saved."""

    def __init__(self, run_dir: Path, last_step: int, config: TrainConfig, resources: ExitStack):
        import wandb

        has_mode = os.environ.get("WANDB_MODE") or wandb.login(prompt=False)
        self.run = wandb.init(mode=None if has_mode else "offline", project=config.project, name=run_dir.resolve().name,
                              id=re.sub(r"[^\w.-]", "-", run_dir.resolve().name), resume="allow", notes=config.comment,
                              dir=run_dir / "logs", config=asdict(config))  # fmt: skip
        resources.push(self.close)

    def log(self, row: dict, step: int) -> None:
        with suppress(Exception):
            self.run.log(row, step=step)

    def close(self, kind, error: BaseException | None, trace) -> None:
        with suppress(Exception):
            self.run.finish(exit_code=int(error is not None))


def open_loggers(run_dir: Path, last_step: int, config: TrainConfig, resources: ExitStack) -> list:
    """The loggers of config.logger_name, closed with the resources."""
    classes = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}
    for name in config.logger_name:
        if last_step and not (run_dir / "logs" / name).exists():
            print(f"--logger_name {name}: is new in this run, without the steps up to {last_step}")
    return [classes[name](run_dir, last_step, config, resources) for name in {*config.logger_name}]
