"""What nobody edits: devices, run directory, loggers, checkpoints, signals, scaling rules. Nothing here knows the loss,
the batch or a metric."""

import copy
import csv
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import find_usable_cuda_devices
from lightning.fabric.loggers import Logger, TensorBoardLogger
from lightning.fabric.plugins.io import TorchCheckpointIO

from config import DEVICE_OPTIONS, checkpoints_of, fail, to_yaml

PREEMPTED = 75  # exit code of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again"


# ---- devices and scaling rules


def build_fabric(config) -> Fabric:
    """Fabric with the devices of the config. What the machine cannot do ends with one line."""
    devices, asked = config.devices, " ".join(f"--{name} {getattr(config, name)}" for name in DEVICE_OPTIONS)
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not has_gpu)
    if on_cpu and config.precision in ("16-mixed", "16-true", "16"):
        fail(f"--precision {config.precision}: the CPU lacks float16; use bf16-mixed, bf16-true or 32-true")
    try:
        if devices.startswith("idle:"):
            if "IDLE_DEVICES" not in os.environ:  # the processes that Fabric launches must not search again
                os.environ["IDLE_DEVICES"] = ",".join(map(str, find_usable_cuda_devices(int(devices[5:]))))
            devices = os.environ["IDLE_DEVICES"] + ","  # "3," is device 3, "3" would be three devices
        options = {name: getattr(config, name) for name in DEVICE_OPTIONS} | {"devices": devices}
        fabric = Fabric(**options, plugins=[AtomicCheckpointIO()])
    except Exception as error:  # ValueError, RuntimeError, ImportError, MisconfigurationException, ...
        fail(f"{asked}: {error}")
    if (started := int(os.environ.get("WORLD_SIZE", fabric.world_size))) != fabric.world_size:
        fail(f"{asked}: means {fabric.world_size} processes, but the launcher has started {started}")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    return fabric


def launch(fabric: Fabric, function, **arguments):
    """Calls function(fabric, **arguments) in every process, and returns what it returns."""
    run = partial(function, **arguments)  # Fabric would look into arguments of its own, and refuses a frozen config
    # `fabric run` has started the processes already and forbids to launch.
    result = run(fabric) if os.environ.get("LT_CLI_USED") else fabric.launch(run)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # after the model is gone, else gloo can abort at exit
    return result


def split_batch(effective_batch_size: int, micro_batch_size: int | None, world_size: int) -> tuple[int, int]:
    """Solves effective_batch_size = world_size x micro_batch_size x grad_accum_steps.

    Returns micro_batch_size and grad_accum_steps. Raises ValueError, naming the nearest values that divide.
    """
    unit = world_size * (micro_batch_size or 1)
    if effective_batch_size % unit == 0:
        micro_batch_size = micro_batch_size or effective_batch_size // world_size
        return micro_batch_size, effective_batch_size // world_size // micro_batch_size
    below = effective_batch_size // unit * unit
    factors = f"{world_size} process(es)" + (f" x --micro_batch_size {micro_batch_size}" if micro_batch_size else "")
    nearest = " or ".join(str(size) for size in (below, below + unit) if size)
    message = f"--effective_batch_size {effective_batch_size}: is no multiple of {factors}; the nearest: {nearest}"
    share, remainder = divmod(effective_batch_size, world_size)
    if micro_batch_size and not remainder:
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        nearest = sorted(divisors, key=lambda size: abs(size - micro_batch_size))[:2]
        message += f"; or --micro_batch_size {' or '.join(map(str, sorted(nearest)))}"
    raise ValueError(message)


def scale_lr(base_lr: float, effective_batch_size: int, base_batch_size: int, rule: str) -> float:
    """The learning rate for effective_batch_size, from the one for base_batch_size: "linear" (Goyal et al. 2017,
    arXiv:1706.02677), "sqrt" (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741) or "none"."""
    ratio = effective_batch_size / base_batch_size
    return base_lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds torch's generators of the CPU and the device. (torch.manual_seed visits every backend: 80 µs against 1.)"""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def is_due(step: int, every: float) -> bool:
    """Whether a multiple of `every` steps, which need not be whole, was passed with this step."""
    return int(step / every + 1e-9) > int((step - 1) / every + 1e-9)


def limit(total: int, limit_batches: int | float | None) -> int:
    """So many of `total` batches: a count, a fraction (at least one batch), or None for all."""
    if limit_batches is None:
        return total
    return max(1, int(total * limit_batches + 1e-9)) if isinstance(limit_batches, float) else min(total, limit_batches)


# ---- run directory


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a file beside `path`; flushes it to disk and renames it at the end: a name always means a whole file."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, mode, newline=None if "b" in mode else "") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(root_dir: str, out_dir: str) -> None:
    """Ends with one line where no run directory can be made."""
    folder = (Path(root_dir) / out_dir).absolute().parent
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        fail(f"--root_dir {root_dir} --out_dir {out_dir}: cannot write to {existing}: {error.strerror}")


def make_run_dir(fabric: Fabric, config) -> Path:
    """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir; named once, by rank 0, after the launch. -1, -2, ... where taken."""
    base = Path(config.root_dir) / config.out_dir
    first = run_dir = base.with_name(f"{time.strftime('%Y%m%d-%H%M%S')}-{base.name}")
    for attempt in itertools.count(1) if fabric.is_global_zero else ():
        try:
            run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            run_dir = first.with_name(f"{first.name}-{attempt}")
    return fabric.broadcast(run_dir)


def start_run_dir(fabric: Fabric, config, run_dir: Path) -> None:
    """Writes config.yaml, and into provenance/ what it takes to know later how this start of the run came about."""

    def git(*command: str) -> str:  # of the code, wherever it was started
        try:
            return subprocess.run(
                ["git", "-C", here, *command], capture_output=True, text=True, errors="replace"
            ).stdout
        except OSError:  # no git
            return ""

    here, start = str(Path(__file__).parent), run_dir / "provenance" / time.strftime("%Y%m%d-%H%M%S")
    for folder in (start.parent, run_dir / "checkpoints", run_dir / "logs"):
        folder.mkdir(exist_ok=True)
    facts = {
        "command": [sys.executable, *sys.argv],
        "git_commit": git("rev-parse", "HEAD").strip(),
        "git_status": git("status", "--porcelain").splitlines(),
        "host": platform.node(),
        "platform": platform.platform(),
        "devices": f"{fabric.world_size} x {fabric.device.type}",
        "python": platform.python_version(),
        "packages": dict(sorted((dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions())),
    }
    texts = {start.with_suffix(".json"): json.dumps(facts, indent=2) + "\n", run_dir / "config.yaml": to_yaml(config)}
    for path, text in (texts | {start.with_suffix(".diff"): git("diff", "HEAD")}).items():
        with atomically(path) as file:
            file.write(text)
    (run_dir / "model.pt").unlink(missing_ok=True)  # of a finished run that now goes on: it marks the end


# ---- loggers: each keeps one unbroken history; rows beyond the step that a run resumes from are dropped


class CSVLogger(Logger):
    """A row per logged step, on disk at once. (Fabric's own deletes the file when a run is resumed.)"""

    name, version = "csv", ""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.columns = folder / "metrics.csv", ["step"]
        text = self.path.read_text() if self.path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # a kill may have cut the last line
        self.write_all([row for row in csv.DictReader(lines) if int(row["step"]) <= step])

    def write_all(self, rows: list[dict]) -> None:
        self.columns = list(dict.fromkeys([*self.columns, *(key for row in rows for key in row)]))
        with atomically(self.path) as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)

    def log_metrics(self, metrics: dict, step: int) -> None:
        row = {"step": step, **metrics}
        if not set(row) <= set(self.columns):  # a new column: write the file anew, once
            with open(self.path, newline="") as file:
                return self.write_all([*csv.DictReader(file), row])
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(row)

    def log_hyperparams(self, params: dict) -> None:
        with atomically(self.path.with_name("hparams.json")) as file:
            json.dump(params, file, indent=2)


class WandbLogger(Logger):
    """Weights & Biases; offline where there is no key or no network."""

    name, version = "wandb", ""

    def __init__(self, run_dir: Path, config):
        import wandb

        options = dict(project=config.project, name=run_dir.name, id=run_dir.name, resume="allow", notes=config.comment)
        try:
            # Without a key it would ask for one on the terminal: go offline instead.
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
            self.run = wandb.init(dir=run_dir / "logs", mode=mode, **options)
        except wandb.Error as error:
            print(f"wandb goes offline: {error}")
            self.run = wandb.init(dir=run_dir / "logs", mode="offline", **options)

    def log_metrics(self, metrics: dict, step: int) -> None:
        self.run.log(metrics, step=step)

    def log_hyperparams(self, params: dict) -> None:
        self.run.config.update(params, allow_val_change=True)

    def finalize(self, status: str) -> None:
        self.run.finish()
        if self.run.offline:
            print(f"wandb was offline; to upload: wandb sync {Path(self.run.dir).parent}")


def build_loggers(config, run_dir: Path, step: int) -> list[Logger]:
    """The chosen loggers, going on after `step`; wandb and tensorboard are imported only here."""
    loggers, params = [], {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in asdict(config).items()}
    for name in dict.fromkeys(config.logger_name):
        if name == "tensorboard":
            from torch.utils.tensorboard.summary import hparams

            logger = TensorBoardLogger(run_dir / "logs", name="tensorboard", version="", purge_step=step + 1)
            for summary in hparams(params, {config.monitor: 0}):  # the logger's own way adds a metric of its own
                logger.experiment._get_file_writer().add_summary(summary)
        else:
            logger = CSVLogger(run_dir / "logs" / "csv", step) if name == "csv" else WandbLogger(run_dir, config)
            logger.log_hyperparams(params)
        loggers.append(logger)
    return loggers


# ---- checkpoints


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints whole or not at all. (Fabric's own goes through $TMPDIR, and from there may copy.)"""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        with atomically(Path(path), "wb") as file:
            torch.save(checkpoint, file)


def save_checkpoint(fabric: Fabric, run_dir: Path, state: dict, regular: bool, best: bool, keep: int | None) -> None:
    """Writes step-XXXXXXXX.ckpt where `regular`, and best.ckpt where `best`: as a link to it, so that it costs no
    second serialization. Then deletes all but the newest `keep` step files. Called on all ranks."""
    if not all(parameter.isfinite().all() for parameter in state["model"].parameters()):
        fail(f"the weights are not finite after step {state['step']}; the checkpoints in {run_dir} are good", code=1)
    folder = run_dir / "checkpoints"
    path, best_path = folder / f"step-{state['step']:08d}.ckpt", folder / "best.ckpt"
    fabric.save(path if regular else best_path, state)
    if fabric.is_global_zero and regular:
        if best:
            beside = folder / "best.ckpt.tmp"
            beside.unlink(missing_ok=True)
            try:
                os.link(path, beside)
            except OSError:  # a file system without links
                shutil.copyfile(path, beside)
            os.replace(beside, best_path)
        for old in sorted(folder.glob("step-*.ckpt"))[: -keep if keep else 0]:
            old.unlink()


def load_checkpoint(fabric: Fabric, run_dir: Path, state: dict) -> Path:
    """Restores `state` in place from the newest whole checkpoint; a damaged one is named and skipped."""
    chosen = None
    for path in checkpoints_of(run_dir) if fabric.is_global_zero else ():
        if chosen := path if is_whole(path) else None:
            break
        print(f"skipped {path}: it is damaged", file=sys.stderr)
    if (chosen := fabric.broadcast(chosen)) is None:
        fail(f"no checkpoint in {run_dir / 'checkpoints'} can be read; nothing was changed", code=1)
    fabric.load(chosen, state)
    return chosen


def save_weights(fabric: Fabric, run_dir: Path, net: torch.nn.Module) -> None:
    """Writes model.pt: the weights alone, on the CPU, for `Model(...).load_state_dict`. It marks a finished run."""
    if fabric.is_global_zero:
        weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
        AtomicCheckpointIO().save_checkpoint(weights, run_dir / "model.pt")
    fabric.barrier()


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is a zip archive whose checksums are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


# ---- running


class Stopper:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a decision of all ranks to stop after the same step.

    One process just looks at its flag. Several ask each other about once a second: how often, in steps, follows from
    the time that passed since they last did, which they agree on as well. A second signal ends the process at once.
    """

    def __init__(self, fabric: Fabric):
        self.signal, self.world_size = 0, fabric.world_size
        self.steps, self.interval, self.asked = 0, 1, time.monotonic()  # since they last asked
        if self.world_size > 1:  # on the CPU, so that asking never waits for a GPU
            self.group = torch.distributed.new_group(backend="gloo")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        """To be asked once a step, by all ranks."""
        if self.world_size == 1:
            return self.signal > 0
        self.steps += 1
        if self.steps < self.interval:
            return False
        seconds = time.monotonic() - self.asked
        answer = torch.tensor([self.signal, seconds])
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX, group=self.group)
        self.signal, seconds = int(answer[0]), max(float(answer[1]), 1e-6)
        self.interval = max(1, min(int(self.interval / seconds), 2 * self.interval))
        self.steps, self.asked = 0, time.monotonic()
        return self.signal > 0


def build_profiler(run_dir: Path | None, steps: int):
    """A started torch.profiler over 5 steps after 5 of warm-up, or fewer in a short run. Call its `step()` after each
    step and `stop()` at the end."""

    def report(profiler) -> None:
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=40))
        if run_dir:
            (run_dir / "profile").mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(run_dir / "profile" / "steps.pt.trace.json"))
            print(f"trace, for https://ui.perfetto.dev or TensorBoard: {run_dir / 'profile'}")

    warmup = min(5, steps // 2)
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=min(5, steps - warmup), repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report)
    profiler.start()
    return profiler


def print_summary(net: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Prints the layers, their output sizes and parameters."""
    import torchinfo

    copied = copy.deepcopy(net).float()
    print(torchinfo.summary(copied, input_data=inputs.float(), col_names=("output_size", "num_params"), verbose=0))


def format_row(values) -> str:
    """A line of the table that the loop prints: names right-aligned over their values."""
    return "  ".join(f"{value:>12.5g}" if isinstance(value, float) else f"{value:>12}" for value in values)
