"""The run directory: its name, lock, config, logs, summary and provenance, and when to save."""

import gc
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from runtime import checkpoints
from runtime.cli import (
    CODE,
    ROOT,
    SOURCES,
    as_config_error,
    gone_lines,
    named_folders,
    newest_run,
    read_summary,
    say,
    to_yaml,
)
from runtime.errors import ConfigError, RunError
from runtime.files import as_run_error, atomically, lock, write_json
from runtime.launch import (
    NO_LIMIT,
    PREEMPTED,
    ResumableDDP,
    StopSignals,
    build_fabric,
    build_in_turn,
    changed_files,
    check_ranks,
    difference,
    gloo_group,
    handle_signals,
    launch,
)
from runtime.loader import fingerprint
from runtime.loggers import LOGGERS, Console, finalize, header, scalars_of
from runtime.meters import parameters_of
from runtime.options import fixed_options

TIMESTAMP = "%Y%m%d-%H%M%S"
# The commit, and the names of changed files; nothing without git. It takes no lock, which would fail a `git commit` at
# the same time, and starts no fsmonitor, which would be a program that the checkout names.
GIT_STATUS = "exec git --no-optional-locks -c core.fsmonitor=false status --porcelain=v2 --branch"

# ---- provenance


def code_folder(run_dir: Path, sources: dict) -> Path:
    """Where a run keeps the source files that have these checksums."""
    return run_dir / "provenance" / f"code-{zlib.crc32(repr(sources).encode()):08x}"


def write_provenance(run_dir: Path, fabric: Fabric):
    """Writes the command line, devices, host, packages, git commit and source files of this process."""
    folder = code_folder(run_dir, SOURCES)
    packages = sorted(info.stem for path in sys.path for info in Path(path).glob("*.dist-info"))
    lines = [
        shlex.join([sys.executable, *sys.argv]),
        f"{fabric.world_size} x {fabric.device.type} on {os.uname().nodename}",
        f"Python {platform.python_version()} on {platform.platform()}",
        f"source files in {folder.name}",
        *packages,
    ]
    with open(run_dir / "provenance" / time.strftime(f"{TIMESTAMP}.txt"), "a") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(GIT_STATUS, shell=True, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL, timeout=10)
    if folder.exists():  # of an earlier start with the same files
        return
    temporary = folder.with_suffix(".tmp")
    for name, code in CODE.items():
        copy = temporary / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(code)
    temporary.rename(folder)


# ---- the directory


class RunDir:
    """The directory of a run. On a resume it is locked at once, and `restore` restores `state`. `start`, in the first
    step after the backward passes, makes the directory of a new run. All ranks call all methods. The attribute
    `micro_batch_size` is that of the run so far, or 0.

    Args:
        fabric: Fabric, launched.
        config: The options.
        resources: Closes what must not outlive the run, such as data workers.
    """

    def __init__(self, fabric: Fabric, config, resources: ExitStack):
        self.fabric = fabric
        self.config = config
        self.resources = resources
        self.files = resources  # closes the files of the run
        self.path: Any = None  # until `start` of a new run; Any, since most methods are called after it
        self.before: dict = {}  # summary.json of the run to resume
        self.saved: dict = {}  # the checkpoint to resume from
        self.micro_batch_size = 0
        self.origin = ""  # of a resume: the checkpoint, and the source files that have changed since
        self.changes: list = []  # what else has changed
        self.loggers: list = []
        self.began = time.monotonic()
        self.written = 0.0  # time of the last summary.json
        self.has_saved = False
        for name in config.logger_name:
            if not find_spec(name):  # csv is a module of Python's
                raise ConfigError(f"--logger_name {name}: is not installed; pip install {name}")
        check_ranks(config, {})
        # Rank 0 waits for one that hangs; the others wait for rank 0, which may be saving.
        self.group = gloo_group(config.timeout if fabric.is_global_zero else NO_LIMIT)
        given = Path(config.root_dir, config.out_dir)
        if config.resume:
            given = self.path = Path(config.resume)
            self.on_rank_zero(self.take_lock)
            self.before = self.on_rank_zero(read_summary, self.path)
            self.read(self.on_rank_zero(checkpoints.newest_checkpoint, self.path, self.before))
            self.path = self.path.absolute()
        # From here on paths are absolute, since build_datasets may change the working directory, and shown as given.
        self.base = given.absolute()
        self.start_folder = None if given.is_absolute() else Path.cwd()
        self.set_threads()
        self.config_text = to_yaml(self.config)

    def read(self, path: Path | None):
        """Reads the checkpoint to resume from, if there is one."""
        size = path.stat().st_size if path and path.exists() else None
        check_ranks(self.config, {f"size of {path}": size})
        if path is None:
            return
        self.saved = checkpoints.load(path)
        about = self.saved["checkpoint"]
        if about.get("format") != checkpoints.FORMAT:
            program = shlex.quote(str(code_folder(self.path, about["code"]) / "train.py"))
            raise ConfigError(
                f"--resume: {path} was written by another version of the template; "
                f"go on with the run's own copy of the code: python {program} --resume {shlex.quote(str(self.path))}"
            )
        self.micro_batch_size = self.saved["micro_batch_size"]
        self.origin = f"{path}{changed_files(about['code'])}"

    def set_threads(self):
        """Sets the number of threads on the CPU, on which the bits of long sums depend. On a resume it is that of the
        run, also on fewer cores; with another number of processes it is torch's choice again."""
        number = self.config.num_threads
        about = self.saved.get("checkpoint", {})
        has_others = about.get("world_size", self.fabric.world_size) != self.fabric.world_size
        if has_others and number == about["num_threads"]:  # not given
            number = 0
        number = number or self.fabric.broadcast(torch.get_num_threads())  # the launcher may have set it
        if has_others and number != about["num_threads"]:
            self.changes.append(f"--num_threads {number} instead of {about['num_threads']}, by the number of processes")
        torch.set_num_threads(number)
        self.config = replace(self.config, num_threads=number)

    def shown(self, path: Path) -> str:
        """A path as it was given: absolute, or relative to where the program was started."""
        return os.path.relpath(path, self.start_folder) if self.start_folder else str(path)

    def build(self, build_datasets: Callable) -> dict:
        """The datasets by name. Raises ConfigError if they are others on another rank, or, on a resume, of another
        size. Notes whether the samples have changed since the checkpoint."""
        self.fabric.seed_everything(self.config.seed)  # for a dataset that is split at random
        datasets = build_in_turn(self.fabric, build_datasets)
        names = {"train": "training", "val": "validation"}
        parts = {names.get(name, name): dataset for name, dataset in datasets.items() if name != "test"}
        self.fixed = {f"--{name}": value for name, value in fixed_options(self.config).items()}
        self.fixed |= {f"the number of {part} samples": len(dataset) for part, dataset in parts.items()}
        self.fingerprints = {part: fingerprint(dataset) for part, dataset in parts.items() if len(dataset)}
        checksums = {f"checksum of {part} samples": found for part, found in self.fingerprints.items()}
        check_ranks(self.config, self.fixed | checksums)
        if self.saved:
            self.compare(self.saved["checkpoint"])
        self.must_stop = StopSignals(self.config, self.resources).must_stop  # all ranks call it once per step
        # Closed after the data workers are gone: one that dies would raise an error anywhere, also in `close`.
        self.files = self.resources.enter_context(ExitStack())
        return datasets

    def compare(self, about: dict):
        """Compares what a resume cannot change, and the samples, with what the checkpoint has about them."""
        for name, value in self.fixed.items():
            then = about["fixed"].get(name, value)
            if then != value:
                raise ConfigError(
                    f"--resume: {name} is {value}, but was {then} in {self.origin}: a resume cannot change it"
                )
        for part, now in self.fingerprints.items():
            then = about["fingerprints"].get(part)
            if None not in (now, then) and now != then:
                self.changes.append(f"the {part} samples have changed: their content, labels or augmentation")

    @as_run_error()
    def on_rank_zero(self, function: Callable, *args) -> Any:
        """Calls the function on rank 0 alone; all ranks return its result. They wait as long as rank 0 lives."""
        result = [function(*args) if self.fabric.is_global_zero else None]
        if self.group is not None:
            dist.broadcast_object_list(result, group=self.group)
        return result[0]

    def take_lock(self):
        try:
            self.files.enter_context(lock(self.path / ".lock"))
        except BlockingIOError:
            raise ConfigError(f"--resume: another process is writing to {self.path}") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{self.path} cannot be locked ({error.strerror}): make sure that no other process resumes it")

    # ---- before the first step

    def restore(self, state: dict, plan: Any):
        """Takes the state of the run, and restores it on a resume. Adds the gradient scaler of 16-mixed, and the
        micro-batch size.

        Args:
            state: What a checkpoint has. Entries that are not in the checkpoint of a resume keep their values.
            plan: The Plan of the run.

        Raises:
            ConfigError: The state does not fit to the checkpoint, or 16-mixed to the state.
            RunError: The state could be saved, but not restored; or the run is to become longer without a checkpoint.
        """
        self.plan = plan
        checkpoints.check_state(state)
        precision = self.fabric.strategy.precision
        state["precision"] = precision
        self.state = state
        self.description = checkpoints.describe(state)  # as built: a resume can tell which settings have changed since
        self.tensors = checkpoints.fixed_tensors(state)
        if getattr(precision, "scaler", None) and len(self.description["optimizers"]) > 1:
            raise ConfigError("--precision 16-mixed: scales the loss of one optimizer alone; use bf16-mixed")
        self.modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
        self.sizes = {name: sum(each.numel() for each in module.parameters()) for name, module in self.modules.items()}
        self.summary: dict = {"parameters": self.sizes.get("model", 0), "last": {}}
        before = self.before
        is_finished = before.get("state") == "finished"
        if is_finished and plan.is_finished(before["step"], before["bad_validations"]):
            for name in state.keys() & before.keys():  # no step is left; its checkpoints may have been deleted
                state[name] = before[name]
        elif self.saved:
            self.restore_saved()
        elif is_finished:
            path = self.shown(self.path)
            raise RunError(f"{path} is finished, and has no checkpoint left from which it could become longer")
        elif self.config.resume:
            self.changes.append("the run has no checkpoint yet, and begins again at step 0")
        self.saved = {}  # closes the file
        state["micro_batch_size"] = plan.micro_batch_size
        self.names = set(state)  # those that this method can find

    def restore_saved(self):
        """Restores the state from the checkpoint."""
        about = self.saved["checkpoint"]
        try:
            new = checkpoints.restore(self.fabric, self.state, self.saved, self.description)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # the state has changed
            raise ConfigError(f"--resume {self.origin}: {error}") from error
        size = self.plan.micro_batch_size
        if size != self.micro_batch_size:
            self.changes.append(
                f"micro_batch_size {size} instead of {self.micro_batch_size}: dropout and augmentation differ"
            )
        self.changes += [f"state[{name!r}] is not in the checkpoint, and new" for name in new]
        self.summary |= about["summary"] | {"checkpoint": about["step"]}
        self.began -= self.summary["seconds"]

    def header(self, model: Any):
        """Opens the console, and prints what will happen. Raises RunError if the model was built in evaluation mode."""
        if not model.module.training:
            raise RunError("build_model: the model is in evaluation mode: return model.train()")
        fabric = self.fabric
        config = self.config
        plan = self.plan
        self.console = Console(fabric.is_global_zero, self.state["step"], plan.total_steps, config.monitor, self.files)
        for line in header(fabric, config, plan, model.module, self.sizes):
            self.console.print(line)
        for part, found in self.fingerprints.items():
            if found is None:
                self.console.print(f"the {part} samples have no fingerprint: a resume cannot tell if they have changed")
        for line in self.changes:
            self.console.print(line)

    # ---- in the first step of a process

    def start(self, values: dict, sanity_results: dict):
        """Checks what the first step has given. Makes the directory of a new run, writes config and provenance, and
        opens the loggers.

        Args:
            values: What compute_loss has returned.
            sanity_results: The results of a validation.
        """
        loss = values["loss"].detach().clone()
        if self.group is not None:
            dist.all_reduce(loss)
        self.check_loss(loss.item(), self.state["step"] + 1)
        names = [f"train/{name}" for name in (*values, "grad_norm")]
        names += [f"val/{name}" for name in scalars_of(sanity_results)]
        if self.config.monitor not in names:
            hint = "" if sanity_results else "; val/ needs validation samples"
            raise ConfigError(f"--monitor {self.config.monitor}: choose from {', '.join(names)}{hint}")
        self.check_as_built()
        for name in self.state.keys() - self.names:
            raise RunError(f"state: {name} came after `run.restore()`, so a resume would not restore it")
        self.check_gradients()
        if self.path is None:
            self.path = self.on_rank_zero(self.make_directory)
            other = difference({f"{self.shown(self.path)} is there": self.path.exists()})
            if other:
                self.on_rank_zero(shutil.rmtree, self.path)
                raise ConfigError(f"--root_dir {self.config.root_dir}: {other}; all machines need to share it")
        self.on_rank_zero(self.open)

    def check_gradients(self):
        """Raises RunError if DDP would wait for a gradient that did not come, or if there is none at all."""
        strategy = self.fabric.strategy
        needs_all = isinstance(strategy, ResumableDDP) and not strategy.find_unused_parameters
        for entry, module in self.modules.items():
            tensors = checkpoints.named_tensors({entry: module})
            without = [name for name, tensor in tensors.items() if tensor.requires_grad and tensor.grad is None]
            if needs_all and without and any(tensor.grad is not None for tensor in tensors.values()):
                raise RunError(
                    f"{', '.join(without)}: no gradient in the first step; "
                    "if that is right, give --strategy ddp_find_unused_parameters_true, "
                    "or requires_grad_(False) to what is never trained"
                )
        optimizers = [self.state[name] for name in self.description["optimizers"]]
        trained = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        if trained and all(parameter.grad is None for parameter in trained):
            raise RunError(
                "no trained parameter has a gradient after the first backward passes: is `fabric.backward` called, and "
                "`zero_grad` only after all micro-batches?"
            )

    def make_directory(self) -> Path:
        """Makes [root_dir/]YYYYMMDD-HHMMSS-out_dir, and locks it. The name is later than that of all other runs of this
        out_dir, also if the clock was set back: `--resume auto` takes the latest."""
        base = self.base
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
        self.take_lock()
        return self.path

    def open(self):
        """Writes config and provenance, and opens the loggers."""
        for path in self.path.glob("checkpoints/*.tmp"):  # of a kill; may be large
            if not path.is_dir():
                path.unlink()
        self.write_summary("running")  # before the config: a finished run that becomes longer is no longer finished
        self.write_config()
        for name in ("checkpoints", "logs", "provenance"):
            (self.path / name).mkdir(exist_ok=True)
        write_provenance(self.path, self.fabric)
        self.files.push(self.close)
        self.console.open_log(self.path)
        if not self.config.fast_run:  # the directory is soon gone
            self.console.print(f"run directory {self.shown(self.path)}")
            if self.origin:
                self.console.print(f"resumed from {self.origin}")
        for name in self.config.logger_name:
            self.add_logger(partial(LOGGERS[name], self.path, self.state["step"], self.config))

    def add_logger(self, make: Callable):
        """Adds the logger make() on rank 0, once there is a run directory: one that has the methods of Fabric's."""
        if self.fabric.is_global_zero:
            logger = make()
            self.loggers.append(logger)
            self.files.push(partial(finalize, logger))

    def write_config(self):
        """Writes config.yaml. That of a resumed run keeps the options that are gone from the code: they may have been
        renamed."""
        path = self.path / "config.yaml"
        gone = gone_lines(path.read_text(), self.config) if path.exists() else ""
        with atomically(path) as file:
            file.write(f"{gone}{self.config_text}")

    # ---- now and then

    @as_run_error()
    def log(self, row: dict, step: int):
        """Advances the progress bar by a step. Passes the scalars of a row, if it has any, to the loggers, and at most
        once a second to summary.json. Prints a row with the best value, which a validation has given."""
        if "best" in row:
            self.console.table(row, step)
        self.console.update(row)
        if not row:
            return
        scalars = scalars_of(row)
        self.summary["last"] |= scalars
        for logger in self.loggers:
            logger.log_metrics(scalars, step)
        if self.loggers and time.monotonic() > self.written + 1:  # on rank 0
            self.write_summary("running")

    def write_summary(self, state: str):
        """Writes summary.json; `state` is running, finished, interrupted or failed."""
        self.written = time.monotonic()
        self.summary["state"] = state
        self.summary["seconds"] = self.written - self.began
        plain = {name: value for name, value in self.state.items() if type(value) in checkpoints.PLAIN}
        write_json(self.path / "summary.json", plain | self.summary)

    def save(self, step: int, is_regular: bool, is_best: bool):
        """Writes step-*.ckpt if `is_regular`, and best.ckpt if `is_best` and checkpoints are not switched off, or there
        is one. Deletes all step-*.ckpt but the newest `num_checkpoint_keep`.

        Raises:
            RunError: The state could not be restored, or the weights are not finite, or differ between the ranks.
        """
        if not (self.has_best() or self.config.checkpoint_frequency or self.config.checkpoint_interval):
            is_best = False
        if not (is_regular or is_best):
            return
        self.check_weights(step)
        self.check_as_built()
        contents = checkpoints.contents_of(self.state)
        is_cpu = self.fabric.device.type == "cpu"
        contents["checkpoint"] = self.description | {
            "format": checkpoints.FORMAT,
            "step": step,
            "world_size": self.fabric.world_size,
            "num_threads": self.config.num_threads,
            "fixed": self.fixed,
            "fingerprints": self.fingerprints,
            "on_cpu": [] if is_cpu else checkpoints.on_cpu(contents),  # beside a GPU: a resume leaves them there
            "config": self.config_text,
            "code": SOURCES,
            "summary": {"seconds": time.monotonic() - self.began, "last": self.summary["last"]},
        }
        self.on_rank_zero(self.write_checkpoint, contents, step, is_regular, is_best)

    def check_loss(self, loss: float, step: int):
        """Raises RunError if the loss of the steps up to this one is not finite."""
        if math.isfinite(loss):
            return
        if self.path is None:
            raise RunError(f"compute_loss: `loss` is {loss} in the first step")
        advice = f"{self.where_to_look(step)}, or try a lower --base_lr or --max_grad_norm 1"
        raise RunError(f"the loss is {loss} in the steps up to {step}{advice}")

    def where_to_look(self, step: int) -> str:
        """A part of a line: the last checkpoint, and how to find the first step that went wrong, up to this one."""
        hint = "; find the first such step by --log_interval 1"
        if self.config.fast_run:
            return hint
        if (ROOT / "recipes" / "replay.py").exists():
            path = shlex.quote(self.shown(self.path))
            hint = f"; look into the first such step with: python recipes/replay.py {path} --step {step}"
        found = checkpoints.checkpoints_of(self.path)
        return f"; the last checkpoint is {self.shown(found[0])}{hint}" if found else hint

    def check_weights(self, step: int):
        """Raises RunError if the weights are not finite, or differ between the ranks."""
        norms = {}
        for name, tensor in checkpoints.named_tensors(self.state).items():
            if isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex()):
                # In float32: a norm in bfloat16 has three digits. abs: weights may be complex.
                norms[name] = torch.linalg.vector_norm(tensor.detach().abs().float())
                if not tensor.requires_grad:  # may be a mask of -inf
                    norms[name] = norms[name].nan_to_num(math.nan, 0)
        norm = float(nn.utils.get_total_norm(norms.values()))  # waits for the device, once
        norm_of_rank_0 = self.fabric.broadcast(norm)
        other = difference({"weights are those of rank 0": math.isclose(norm, norm_of_rank_0, rel_tol=1e-5)})
        if other:
            raise RunError(
                f"after step {step}, {other}: "
                "do random numbers differ that are drawn after the backward passes? before them, the step seeds them; "
                "or was a module frozen when it was set up, and trained later, or not called as model(...)?"
            )
        if not math.isfinite(norm_of_rank_0):
            names = [name for name, value in norms.items() if not value.isfinite()]
            names = self.fabric.broadcast(names)
            raise RunError(
                f"the weights are not finite after step {step}: {', '.join(names)}{self.where_to_look(step)}"
            )

    def check_as_built(self):
        """Raises RunError if modules have other tensors, or an optimizer other parameters, than as they were built: a
        resume builds them again, and could not restore them."""
        others = self.tensors ^ checkpoints.fixed_tensors(self.state)
        if others:
            raise RunError(
                "tensors of `state` came, went or changed their shape after `run.restore()`, so a resume could not "
                f"restore them: {', '.join(sorted(others))}; make them in build_model, or not persistent"
            )
        optimizers = checkpoints.describe_optimizers(self.state)
        for name, about in self.description["optimizers"].items():
            if optimizers[name]["parameters"] != about["parameters"]:
                raise RunError(
                    f"state[{name!r}] trains other parameters than at `run.restore()`, so a resume could not restore "
                    "it: add all groups before, those of later with a learning rate of 0"
                )

    def write_checkpoint(self, contents: dict, step: int, is_regular: bool, is_best: bool):
        for logger in self.loggers:
            logger.save()  # first the rows before this checkpoint: a resume needs them
        checkpoints.save(self.path, contents, step, is_regular, is_best, not self.has_saved)
        self.has_saved = True
        checkpoints.remove_old(self.path, self.config.num_checkpoint_keep)
        self.summary["checkpoint"] = step
        self.write_summary("running")

    # ---- at the end

    def finish(self, name: str) -> int:
        """Ends the run, which is finished or was stopped. Of a finished one it writes model.pt, the weights of
        state[name], and then summary.json, which makes the run a finished one. Returns the exit code."""
        state = self.state
        is_finished = self.plan.is_finished(state["step"], state["bad_validations"])
        if is_finished:
            self.on_rank_zero(self.write_weights, name)
        self.console.bar.close()
        ending = "finished" if is_finished else "stopped"
        best = "none"
        if state["best"] is not None:
            best = f"{state['best']:.5g} at step {state['best_step']}"
        step, total = state["step"], self.plan.total_steps
        steps = f"{step} of {total} steps" if step <= total else f"{step} steps, more than the {total} asked for"
        reason = ""
        if is_finished and step < total:
            gain = f"gain above {self.config.early_stopping_min_delta:g}"
            reason = f" (early stopping: no {gain} in {state['bad_validations']} validation(s))"
        self.console.print(f"{ending} after {steps}, best {self.config.monitor} {best}{reason}")
        if not self.config.fast_run:
            self.console.print(f"next: {self.next_command(is_finished)}")
        return 0 if is_finished else PREEMPTED

    def write_weights(self, name: str):
        if self.before.get("state") == "finished" and "state" not in self.summary:  # this process has made no step
            return
        self.write_config()  # with fewer steps than the run has made, `open` was not called
        last = checkpoints.checkpoints_of(self.path)[0]  # there the weights are whole and on the CPU
        with atomically(self.path / "model.pt", "wb") as file:
            torch.save(checkpoints.load(last)[name], file)
        self.write_summary("finished")

    def next_command(self, is_finished: bool) -> str:
        """The command to continue with."""
        if not is_finished:
            return f"python train.py --resume {shlex.quote(self.shown(self.path))}"
        checkpoint = "" if self.has_best() else " --checkpoint last"
        return f"python test.py --out_dir {shlex.quote(self.shown(self.path))}{checkpoint}"

    def has_best(self) -> bool:
        return (self.path / "checkpoints" / "best.ckpt").exists()

    def close(self, kind, error: BaseException | None, trace):  # the arguments of __exit__
        if self.summary["state"] == "finished":
            return
        if error and not self.config.fast_run and any(self.path.glob("checkpoints/*.ckpt")):
            error.add_note(f"the checkpoints are whole, continue with: {self.next_command(False)}")
        with suppress(OSError) if error else as_run_error():  # the first error is the one to tell
            self.write_summary("failed" if isinstance(error, Exception) else "interrupted")


# ---- the whole run


def run_training(train: Callable, build_datasets: Callable, config) -> int:
    """Calls train(fabric, config, run, datasets) in every process, and returns its exit code. Raises ConfigError or
    RunError."""
    fabric = build_fabric(config)

    def start(config, resources: ExitStack) -> int:
        run = RunDir(fabric, config, resources)
        return train(fabric, run.config, run, run.build(lambda: build_datasets(run.config)))

    return launch(fabric, config, partial(rehearse, fabric, start) if config.fast_run else start)


def rehearse(fabric: Fabric, start: Callable, config, resources: ExitStack) -> int:
    """--fast_run: trains for half of the steps, resumes as a longer run, and trains for the rest. Each half ends, as
    any run does, with a log, a validation and a save. The run lies in a temporary folder, which is removed, also after
    a signal.

    Args:
        fabric: Fabric, launched.
        start: start(config, resources) starts or resumes a run, and returns the exit code.
        config: The options.
        resources: Closed at the end.
    """
    handle_signals(end_rehearsal, resources)
    folder = ""
    if fabric.is_global_zero:
        root = Path(config.root_dir).absolute()
        with as_config_error(config, "root_dir"):
            while not root.exists():
                root = root.parent
            folder = tempfile.mkdtemp(prefix=".fast_run-", dir=root)
        resources.callback(shutil.rmtree, folder, ignore_errors=True)
    half = (config.fast_run + 1) // 2
    config = replace(
        config,
        out_dir=f"{fabric.broadcast(folder)}/run",  # absolute; an option may name a run in root_dir
        early_stopping_patience=0,
        limit_train_batches=half,  # so there are two epochs: what happens between them is tried, too
        limit_val_batches=config.limit_val_batches and config.fast_run,
        logger_name=tuple(name for name in config.logger_name if name in ("csv", "tensorboard")) or ("csv",),
    )
    run_dir = None
    for max_steps in (half, config.fast_run):
        with ExitStack() as of_half:
            start(replace(config, max_steps=max_steps, resume=run_dir), of_half)
        gc.collect()  # its model
        run_dir = str(newest_run(config.out_dir, config.root_dir))
    say("--fast_run: a run and its resume went well, and leave nothing behind")
    return 0


def end_rehearsal(number: int, frame):
    raise RunError("--fast_run was stopped by a signal, and leaves nothing behind")
