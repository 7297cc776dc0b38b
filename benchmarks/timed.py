"""Training loops on one device, timed in windows of steps: what gpu.py and gpt2.py share."""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

WINDOWS = 8  # of all steps
SKIPPED = 2  # the first windows: they have the start and the compilation


class Clock:
    """Counts the steps of a loop, and times each window of them."""

    def __init__(self, steps: int):
        self.steps = steps
        self.step = 0
        self.loss = 0.0
        self.times = [time.perf_counter()]  # of the start, and of the end of each window

    def tick(self, loss: Tensor):
        """Ends a step. At the end of a window the loss is read, as for a log: that waits for the device."""
        self.step += 1
        if self.step % (self.steps // WINDOWS) == 0:
            self.loss = loss.item()
            self.times.append(time.perf_counter())

    def is_over(self) -> bool:
        return self.step == self.steps

    def figures(self) -> dict:
        seconds = [(end - begin) / (self.steps // WINDOWS) for begin, end in pairwise(self.times)]
        return figures(seconds, torch.cuda.max_memory_allocated(), self.loss)


def figures(seconds: list[float], peak: float, loss: float) -> dict:
    """What is told of a run: of the seconds per step of each window, the bytes that torch has allocated at most on a
    GPU, and the last loss, which shows that it has trained."""
    return {"ms": 1e3 * statistics.median(seconds[SKIPPED:]), "GB": peak / 1e9, "loss": loss}


# ---- the loops of others


@dataclass
class Work:
    """What a loop trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Iterable  # of micro-batches (inputs, targets)
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    device: str
    precision: str  # 32-true or bf16-mixed
    compile: bool = False
    accumulation: int = 1  # micro-batches in a step
    max_norm: float | None = None  # of the gradient


def accelerate(work: Work, clock: Clock):
    from accelerate import Accelerator

    precision = "bf16" if work.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(
        cpu=work.device == "cpu", mixed_precision=precision, gradient_accumulation_steps=work.accumulation
    )
    model, optimizer, loader = accelerator.prepare(work.model, work.optimizer, work.loader)
    if work.compile:
        model = torch.compile(model)
    while not clock.is_over():
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = work.loss(model, inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and work.max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), work.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.tick(loss)
            if clock.is_over():
                break


def lightning(work: Work, clock: Clock):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.compile(work.model) if work.compile else work.model

        def training_step(self, batch, index):
            loss = work.loss(self.model, *batch)
            self.log("train/loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, index):
            if (index + 1) % work.accumulation == 0:
                clock.tick(outputs["loss"] * work.accumulation)  # by which it was divided

        def configure_optimizers(self):
            return work.optimizer

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(
        max_steps=clock.steps, max_epochs=-1, accelerator=work.device, devices=1, precision=work.precision,
        accumulate_grad_batches=work.accumulation, gradient_clip_val=work.max_norm, **quiet,
    )  # fmt: skip
    trainer.fit(Module(), work.loader)


# ---- a process for each program


def installed(packages: list[str]) -> list[str]:
    """Those that are there. The others are named."""
    for name in packages:
        if not find_spec(name):
            print(f"{name} is not installed, and left out: pip install -r benchmarks/requirements.txt", flush=True)
    return [name for name in packages if find_spec(name)]


def output_of(command: list, cwd: Path | str) -> str:
    """What a Python program prints."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def figures_of_peer(command: list) -> dict:
    """Runs a script, whose last line has the figures."""
    with tempfile.TemporaryDirectory() as cwd:
        return json.loads(output_of(command, cwd).splitlines()[-1])


def figures_of_template(command: list, device: str, steps: int, batch_size: int) -> dict:
    """Runs train.py, whose log has the figures of each window."""
    options = ["--accelerator", device, "--devices", 1, "--logger_name", "csv", "--log_interval", steps // WINDOWS]
    options += ["--max_steps", steps, "--val_interval", steps, "--checkpoint_interval", steps]
    with tempfile.TemporaryDirectory() as cwd:
        output_of([*command, *options], cwd)
        (path,) = Path(cwd).glob("*/logs/csv/metrics.csv")
        rows = list(csv.DictReader(path.read_text().splitlines()))
    seconds = [batch_size / float(row["samples_per_second"]) for row in rows]
    peak = max(1e6 * float(row["peak_memory_mb"]) for row in rows)
    return figures(seconds, peak if device == "cuda" else 0, float(rows[-1]["train/loss"]))


def compare(programs: dict[str, Callable[[], dict]], rounds: int):
    """Runs the programs in turn. Prints a line for each run, then the medians. The first program is the template."""
    found: dict[str, list] = {name: [] for name in programs}
    for number in range(rounds):
        for name in reversed(programs) if number % 2 else programs:
            result = programs[name]()
            found[name].append(result)
            print(f"round {number + 1} {name:>21}: {text_of(result)}", flush=True)
    for name, results in found.items():
        median = {key: statistics.median(result[key] for result in results) for key in results[0]}
        ratios = [own["ms"] / other["ms"] for own, other in zip(found["template"], results, strict=True)]
        ratio = "" if name == "template" else f"; template / {name} {statistics.median(ratios):.2f}"
        print(f"median  {name:>21}: {text_of(median)}{ratio}")


def text_of(result: dict) -> str:
    memory = f"{result['GB']:.1f} GB, " if result["GB"] else ""
    return f"{result['ms']:.3f} ms per step, {memory}loss {result['loss']:.4f}"


def choose_device(options: Namespace) -> str:
    """Returns the device. Ends with one line where an option cannot be."""
    if options.steps < WINDOWS or options.steps % WINDOWS:
        raise SystemExit(f"--steps {options.steps}: must be a multiple of {WINDOWS}, the number of windows")
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU: give --cpu for a trial")
    if options.cpu:
        os.environ["OMP_NUM_THREADS"] = "1"  # of all programs: on a busy machine threads wait for each other
        return "cpu"
    return "cuda"
