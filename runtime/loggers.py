"""What a run reports: the console, and the loggers csv, TensorBoard and wandb, which have the methods of Fabric's. On a
resume, a logger drops the rows after `last_step`, which are logged again."""

import csv
import os
import secrets
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from tqdm import tqdm

from runtime.cli import say
from runtime.files import as_run_error, atomically

tqdm.set_lock(threading.RLock())  # the default is a multiprocessing lock, which starts a process on Python 3.14


def scalars_of(row: dict) -> dict:
    """The numbers of a row, without the tensors that a metric may return."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


# ---- console


def header(fabric: Fabric, config: Any, plan: Any, model: nn.Module, sizes: dict) -> list[str]:
    """The lines that say what will happen.

    Args:
        fabric: Fabric, launched.
        config: The options.
        plan: The Plan of the run.
        model: The model, without the wrappers of Fabric and DDP.
        sizes: The numbers of parameters in the modules of `state`, by name.
    """
    device = fabric.device.type
    precision = config.precision
    if device == "cuda":
        device = torch.cuda.get_device_name(fabric.device)
        if torch.get_float32_matmul_precision() == "high" and torch.cuda.is_tf32_supported():
            precision += ", float32 products in TF32"
    others = "".join(f"; {name}, {size:,}" for name, size in sizes.items() if name != "model" and size)
    micro_batches = f"{plan.micro_batch_size} micro_batch_size x {plan.grad_accum_steps} grad_accum_steps"
    rule = f"rule {config.lr_scaling_rule}, after {config.warmup_epochs * plan.steps_per_epoch:g} steps of warm-up"
    epochs = plan.total_steps / plan.steps_per_epoch
    lines = [
        f"{plan.world_size} x {device}, {config.num_threads} CPU thread(s), precision {precision}",
        *(layers_of(model) if config.summary else []),
        f"model, {sizes.get('model', 0):,} parameters{others}",
        f"{plan.train_samples:,} training samples, {plan.val_samples:,} validation samples",
        f"effective_batch_size {plan.effective_batch_size} = {plan.world_size} device(s) x {micro_batches}",
        f"lr {plan.peak_lr:g} = base_lr {config.base_lr:g} scaled by {rule}",
        f"{plan.total_steps} steps = {epochs:g} epochs x {plan.steps_per_epoch} steps",
    ]
    frozen = [name.removeprefix("_orig_mod.") for name, part in model.named_modules() if not part.training]
    if frozen:
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        lines.append(f"in evaluation mode: {', '.join(frozen[:3])}{more}")
    return lines


def layers_of(model: nn.Module) -> list[str]:
    """A line for each module in the model: its name, its class, and its number of parameters."""
    lines = []
    for name, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters())
        if name not in ("", "_orig_mod"):  # the model itself, also within a compiled one
            kind = f"{type(module).__name__}({module.extra_repr()})"
            lines.append(f"{name.removeprefix('_orig_mod.')} {kind}, {size:,} parameters")
    return lines


def format_row(names, values) -> str:
    """A line of a table, with each value right-aligned under its name; with the names as values, the header."""
    cells = []
    for name, value in zip(names, values, strict=True):
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        cells.append(text.rjust(max(len(name), 10)))
    return "  ".join(cells)


def fitting(names: list[str], kept: list[str]) -> list[str]:
    """The names whose columns fit in a line of the terminal, if there is one: those of `kept`, which are never left
    out, then those of the validation, then others."""
    room, _ = shutil.get_terminal_size(fallback=(10**6, 0))  # a file takes lines of any length
    chosen = [name for name in names if name in kept]
    for name in sorted(names, key=lambda name: not name.startswith("val/")):
        if name not in chosen and len(format_row([*chosen, name], [*chosen, name])) <= room:
            chosen.append(name)
    return [name for name in names if name in chosen]


class Console:
    """What rank 0 prints: lines, and a progress bar on stderr. If stderr is not a terminal, a line of progress is
    printed after 30 seconds without other output. The lines also go to train.log, once there is a run directory."""

    def __init__(self, is_rank_zero: bool, step: int, total_steps: int, monitor: str, resources: ExitStack):
        self.is_rank_zero = is_rank_zero
        self.monitor = monitor
        self.is_terminal = is_rank_zero and sys.stderr.isatty()
        self.log: Any = StringIO()  # until there is a run directory
        self.names: list = []  # of the last row
        self.columns: list = []  # those of its names that are in the table
        self.shown: dict = {}
        self.printed = time.monotonic()
        self.bar = tqdm(
            initial=step,
            total=total_steps,
            unit="step",
            bar_format="{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
            delay=0 if self.is_terminal else 1e9,  # seconds: not shown, but str(self.bar) is printed
            miniters=0,  # otherwise tqdm's thread may show it
            disable=False,  # also if TQDM_DISABLE is set
        )
        resources.push(self.close)

    def open_log(self, run_dir: Path):
        """Opens train.log, and writes the lines that were printed before."""
        printed = self.log.getvalue()
        self.log = open(run_dir / "train.log", "a")  # noqa: SIM115 - closed below
        self.log.write(printed)

    def print(self, text: str):
        if self.is_rank_zero:
            with tqdm.external_write_mode() if self.is_terminal else nullcontext():  # else it would break the bar
                say(text)
        self.printed = time.monotonic()
        self.log.write(f"{text}\n")
        self.log.flush()

    def table(self, row: dict, step: int):
        """Prints the losses and metrics of a row, as many as fit in a line of the terminal; also their names, if they
        are not those of the row before."""
        results = {name: value for name, value in scalars_of(row).items() if name.startswith(("train/", "val/"))}
        results.pop("train/grad_norm", None)
        cells = {"epoch": row["epoch"], "step": step, **results, "lr": row["lr"]}
        if list(cells) != self.names:
            self.names = list(cells)
            self.columns = fitting(self.names, ["epoch", "step", self.monitor, "train/loss", "val/loss"])
            others = [name for name in self.names if name not in self.columns]
            if others:
                self.print(f"logged, but not in this table: {', '.join(others)}")
            self.print(format_row(self.columns, self.columns))
        self.print(format_row(self.columns, [cells[name] for name in self.columns]))

    def update(self, row: dict):
        """Advances the progress bar by a step. It shows the latest loss and monitored value."""
        if row:
            self.shown |= {name: row[name] for name in ("train/loss", self.monitor) if name in row}
            self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()
        if not self.is_terminal and time.monotonic() > self.printed + 30:
            self.print(str(self.bar))

    def close(self, kind, error: BaseException | None, trace):
        self.bar.close()  # otherwise tqdm would draw it again below an error
        with suppress(OSError), self.log:
            if error:
                traceback.print_exception(error, file=self.log)


# ---- loggers


class CSVLogger:
    """Writes a row per logged step to metrics.csv. Fabric's CSVLogger would delete the file of a resumed run."""

    def __init__(self, run_dir: Path, last_step: int, config: Any):
        self.path = run_dir / "logs" / "csv" / "metrics.csv"
        self.path.parent.mkdir(exist_ok=True)
        try:
            rows = [row for row in self.read() if int(row["step"]) <= last_step]
        except (KeyError, ValueError, csv.Error) as error:  # somebody has changed it
            rows = []
            copy = self.path.with_name(time.strftime("unreadable-%Y%m%d-%H%M%S.csv"))
            self.path.rename(copy)
            say(f"logs/csv/metrics.csv cannot be read ({type(error).__name__}: {error}); it is kept as {copy.name}")
        self.write(rows)

    def read(self) -> list[dict]:
        """The rows of the file, if there is one, without one that a kill has cut."""
        if not self.path.exists():
            return []
        with open(self.path, newline="") as file:
            rows = list(csv.DictReader(file))
        if rows and None in rows[-1].values():
            rows.pop()
        return rows

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
        with open(self.path, "a") as file:  # for each row: an editor may have replaced the file
            csv.DictWriter(file, self.columns).writerow(row)

    def save(self):
        if self.path.exists():  # otherwise somebody has deleted it
            sync(self.path)

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
            sync(path)

    def finalize(self, status: str):
        self.writer.close()


class WandbLogger:
    """Weights & Biases, under the name of the run directory; offline without a key. The id is random, and kept in the
    run: two runs of one name stay apart. wandb ignores steps that it already has. Its first error is printed, and the
    run goes on: a signal to all processes also ends wandb's process, and the run must still be saved."""

    def __init__(self, run_dir: Path, last_step: int, config: Any):
        import wandb

        has_mode = os.environ.get("WANDB_MODE") or wandb.login(prompt=False)
        id_file = run_dir / "logs" / "wandb_id"
        if not id_file.exists():
            with atomically(id_file) as file:
                file.write(secrets.token_hex(4))  # not `random`, which the seed has set
        self.has_failed = False
        self.run = wandb.init(
            mode=None if has_mode else "offline",
            project=config.project,
            name=run_dir.resolve().name,
            id=id_file.read_text(),
            resume="allow",
            notes=config.comment,
            dir=run_dir / "logs",
            config=asdict(config),
        )

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


def sync(path: Path):
    """Waits until a file is on the disk."""
    with open(path) as file:
        os.fsync(file.fileno())


LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}  # of --logger_name


@as_run_error()
def finalize(logger: Any, kind, error: BaseException | None, trace):
    """Closes a logger. The last three are the arguments of __exit__."""
    logger.finalize("failed" if error else "success")
