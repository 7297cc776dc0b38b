"""What a run prints: what will happen, a table of the validations, and a progress bar."""

import shutil
import sys
import threading
import traceback
from contextlib import ExitStack, nullcontext, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from tqdm import tqdm

from runtime.terminal import say

tqdm.set_lock(threading.RLock())  # the default is a multiprocessing lock, which starts a process on Python 3.14


def header(fabric: Fabric, config: Any, plan: Any, state: dict) -> list[str]:
    """The lines that say what will happen.

    Args:
        fabric: Fabric, launched.
        config: The options.
        plan: The Plan of the run.
        state: Its modules are named, with their sizes.
    """
    device = fabric.device.type
    precision = config.precision
    if device == "cuda":
        device = torch.cuda.get_device_name(fabric.device)
        if torch.get_float32_matmul_precision() == "high" and torch.cuda.is_tf32_supported():
            precision += ", float32 products in TF32"
    lines = [f"{plan.world_size} x {device}, {config.num_threads} CPU thread(s), precision {precision}"]
    model = state["model"].module  # without the wrappers of Fabric and DDP
    if config.summary:
        lines.append(str(model))
    sizes = {name: size_of(value) for name, value in state.items() if isinstance(value, nn.Module)}
    lines.append("; ".join(f"{name}, {size:,} parameters" for name, size in sizes.items() if size))
    lines += plan.lines(config)
    frozen = [name.removeprefix("_orig_mod.") or "model" for name, part in model.named_modules() if not part.training]
    if frozen:
        lines.append(f"in evaluation mode: {', '.join(frozen[:3])}{' and others' if frozen[3:] else ''}")
    return lines


def size_of(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def format_row(names, values) -> str:
    """A line of a table, with each value right-aligned under its name; with the names as values, the header."""
    cells = []
    for name, value in zip(names, values, strict=True):
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        cells.append(text.rjust(max(len(name), 10)))
    return "  ".join(cells)


class Console:
    """What rank 0 prints: lines, and a progress bar on stderr. The lines also go to train.log, once there is a run
    directory.

    Args:
        fabric: Fabric, launched.
        monitor: The value that is never left out of the table.
        step: The step at which the bar begins.
        total_steps: The step at which it ends.
        resources: Closes the bar and the file.
    """

    def __init__(self, fabric: Fabric, monitor: str, step: int, total_steps: int, resources: ExitStack):
        self.is_rank_zero = fabric.is_global_zero
        self.first = ["epoch", "step", "train/loss", "val/loss", monitor]  # columns that are never left out
        self.names: list = []  # of the last row
        self.columns: list = []  # those of its names that are in the table
        self.shown: dict = {}  # beside the bar
        self.log: Any = StringIO()  # until there is a run directory
        self.is_terminal = sys.stderr.isatty()
        interval = 0.1 if self.is_terminal else 30  # seconds between two lines of progress
        self.bar = tqdm(
            initial=step,
            total=total_steps,
            unit="step",
            mininterval=interval,
            delay=interval,
            miniters=1,  # otherwise a thread of tqdm prints, too
            disable=not self.is_rank_zero,
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
        self.log.write(f"{text}\n")
        self.log.flush()

    def table(self, row: dict, step: int):
        """Prints the losses and metrics of a row, as many as fit in a line of the terminal; also their names, if they
        are not those of the row before."""
        shown = [name for name in row if name.startswith(("train/", "val/")) and name != "train/grad_norm"]
        cells = row | {"step": step}
        names = ["epoch", "step", *shown, "lr"]
        if names != self.names:
            self.names = names
            room, _ = shutil.get_terminal_size(fallback=(10**6, 0))  # a file takes lines of any length
            fitting = sorted(names, key=lambda name: (name not in self.first, name.startswith("train/")))
            while len(format_row(fitting, fitting)) > room and fitting[-1] not in self.first:
                self.print(f"logged, but not in this table: {fitting.pop()}")
            self.columns = [name for name in names if name in fitting]
            self.print(format_row(self.columns, self.columns))
        self.print(format_row(self.columns, [cells[name] for name in self.columns]))

    def show(self, row: dict):
        """Shows the loss and the monitored value of a row beside the bar."""
        self.shown |= {name: row[name] for name in ("train/loss", self.first[-1]) if name in row}
        self.bar.set_postfix(self.shown, refresh=False)

    def close(self, kind, error: BaseException | None, trace):  # the arguments of __exit__
        self.bar.close()  # otherwise tqdm would draw it again below an error
        with suppress(OSError), self.log:
            if error:
                traceback.print_exception(error, file=self.log)
