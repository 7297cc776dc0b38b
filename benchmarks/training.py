"""What a step, a checkpoint and a second process cost, on a CPU. Prints only.

python benchmarks/training.py step        # a step with those ways of docs/speed.md that a CPU has, too; two minutes
python benchmarks/training.py save        # a checkpoint of 1 GB
python benchmarks/training.py stands      # how long the loop stands still for a checkpoint of 1.2 GB
python benchmarks/training.py waits       # how long W3 of run.py waits for a checkpoint in each epoch
python benchmarks/training.py processes   # W3 on one core and on two
"""

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run  # noqa: E402

from config import TrainConfig  # noqa: E402
from model import Model  # noqa: E402
from runtime.meters import Means  # noqa: E402
from runtime.run import Run  # noqa: E402
from utils import make_plan  # noqa: E402

# ---- a step

WAYS = ["plain", "bf16-mixed", "channels_last", "--compile", "--compile, channels_last"]
SHAPES = [(1, 8, 8), (3, 32, 32)]


def step_of(way: str, shape: tuple[int, int, int]) -> Callable:
    """A function that makes a step of the default model."""
    torch.manual_seed(0)
    memory_format = torch.channels_last if "channels_last" in way else torch.contiguous_format
    model = Model(shape, num_classes=10).to(memory_format=memory_format)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, dynamic=False) if "--compile" in way else model
    images = torch.randn(64, *shape)
    targets = torch.randint(10, (64,))

    def make_step():
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16-mixed"):
            logits = forward(images.to(memory_format=memory_format))
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    make_step()  # compiles
    return make_step


def step() -> None:
    """On one thread, with a micro-batch of 64 images: medians of 30 alternating rounds of three steps."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for shape in SHAPES:
        steps = {way: step_of(way, shape) for way in WAYS}
        seconds: dict = {way: [] for way in WAYS}
        for _ in range(30):
            for way, make_step in steps.items():
                began = time.process_time()
                for _ in range(3):
                    make_step()
                seconds[way].append((time.process_time() - began) / 3)
        for way in WAYS:
            print(f"{shape}  {way:26} {1000 * statistics.median(seconds[way]):7.2f} ms")


# ---- checkpoints


def large_state(fabric: Fabric, width: int) -> dict:
    """A model of 12 x 4096 x width weights, and AdamW after a step: together 590 kB for each unit of width."""
    net = torch.nn.Sequential(*(torch.nn.Linear(4096, width, bias=False) for _ in range(12)))
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model, optimizer = fabric.setup(net, optimizer)
    numbers = {"step": 0, "due": [], "best": None, "best_step": 0, "bad_validations": 0}
    return {"model": model, "optimizer": optimizer, "means": Means(fabric), **numbers}


def begun(fabric: Fabric, folder: str, state: dict, resources: ExitStack) -> Run:
    """A run in its first step."""
    config = TrainConfig(root_dir=folder, logger_name=("csv",), num_checkpoint_keep=2)
    training = Run(fabric, config, resources)
    datasets = training.build(lambda config: {"train": range(1000), "val": range(1000)})
    training.prepare(state, make_plan(config, len(datasets["train"]), len(datasets["val"]), 1, saved_size=0))
    with redirect_stdout(None):
        training.restore()
        training.begin({"loss": torch.zeros(())}, {"accuracy": 0.0})
    return training


def save_as_best(training: Run, step: int):
    """As the loop does after a step in which a checkpoint is due, and whose validation is the best."""
    training.state.update(step=step, due=["save"])
    training.save()
    training.end_report(is_best=True)


def save() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    state, own, raw = large_state(fabric, 1700), [], []
    net, optimizer = state["model"].module, state["optimizer"]
    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as resources:
        path = Path(folder)
        training = begun(fabric, folder, state, resources)
        for step in range(1, 8):
            os.sync()
            began = time.perf_counter()
            save_as_best(training, step)
            own.append(time.perf_counter() - began)
            os.sync()
            began = time.perf_counter()
            with open(path / "raw.ckpt", "wb") as file:
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
                file.flush()
                os.fsync(file.fileno())
            raw.append(time.perf_counter() - began)
            size = (path / "raw.ckpt").stat().st_size / 1e9
            (path / "raw.ckpt").unlink()
    ratio = statistics.median(a / b for a, b in zip(own, raw, strict=True))
    own_seconds, raw_seconds = statistics.median(own), statistics.median(raw)
    print(f"{size:.1f} GB: template {own_seconds:.2f} s, torch.save and fsync {raw_seconds:.2f} s, ratio {ratio:.2f}")


def stands() -> None:
    fabric, waits = Fabric(accelerator="cpu", devices=1), []
    state = large_state(fabric, 2035)
    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as resources:
        training = begun(fabric, folder, state, resources)
        for step in range(1, 6):
            began = time.perf_counter()
            save_as_best(training, step)
            waits.append(time.perf_counter() - began)
            path = training.directory.path / "checkpoints" / f"step-{step:08d}.ckpt"
            while not path.exists():  # with recipes/features/background_save.patch, a thread writes it
                time.sleep(0.1)
            size = path.stat().st_size / 1e9
    print(f"{size:.1f} GB: the loop stands still for {statistics.median(waits):.2f} s, at most {max(waits):.2f} s")


# Runs train.py of the working directory, and prints the share of the time that it spent in Run.write_checkpoint.
TIMED = """
import sys, time
import train
from config import TrainConfig
from runtime import cli
from runtime.run import Run

saved = []
def timed(*args, write=Run.write_checkpoint, **kwargs):
    began = time.perf_counter()
    write(*args, **kwargs)
    saved.append((began, time.perf_counter() - began))

Run.write_checkpoint = timed
train.main(cli.parse_train(TrainConfig, sys.argv[1:]))
_, *saved, (end, _), _ = saved  # from the first epoch's to the last one's, which is written again at the end
print(sum(seconds for _, seconds in saved) / (end - saved[0][0]))
"""


def waits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script, *options = map(str, run.template_command("W3", Path(folder) / "template"))
        options += ["--checkpoint_frequency", "1", "--epochs", "6"]
        done = subprocess.run([sys.executable, "-c", TIMED, *options], cwd=Path(script).parent, check=True,
                              stdout=subprocess.PIPE, text=True, env=run.environment())  # fmt: skip
    print(f"W3, a checkpoint per epoch: waited for it {float(done.stdout.split()[-1]):.2%} of the time")


# ---- two processes


def processes(rounds: int = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command, found = [*run.template_command("W3", Path(folder) / "template"), "--epochs", "1"], {}
        for _ in range(rounds):
            for count, cores in ((1, "1"), (2, "0,1")):
                options = ["--devices", count, "--strategy", "ddp" if count > 1 else "auto"]
                options += ["--effective_batch_size", 128 * count, "--out_dir", count, "--root_dir", folder]
                subprocess.run(["taskset", "-c", cores, sys.executable, *map(str, [*command, *options])], check=True,
                               stdout=subprocess.DEVNULL, env=run.environment())  # fmt: skip
                newest = sorted(Path(folder).glob(f"*-{count}/logs/csv/metrics.csv"))[-1]
                with open(newest) as file:
                    speeds = [float(row["samples_per_second"]) for row in csv.DictReader(file)]
                found.setdefault(count, []).append(statistics.mean(speeds))
    ratio = statistics.median(two / one for one, two in zip(found[1], found[2], strict=True))
    print(f"W3, 128 samples a process: 2 processes on 2 cores / 1 process on 1 core: {ratio:.2f}")


if __name__ == "__main__":
    {"step": step, "save": save, "stands": stands, "waits": waits, "processes": processes}[sys.argv[1]]()
