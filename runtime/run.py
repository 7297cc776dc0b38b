"""A run: how it begins or is resumed, which step is next, when it saves, and how it ends."""

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from runtime import checkpoints
from runtime.checks import (
    AsBuilt,
    check_gradients,
    check_loggers,
    check_loss,
    check_monitor,
    check_order,
    check_state,
    check_value,
    check_values,
    check_weights,
    sums_of_bits,
    where_to_look,
)
from runtime.console import Console, header, size_of
from runtime.errors import ConfigError, RunError
from runtime.files import wait_for
from runtime.launch import PREEMPTED, build_fabric, build_in_turn, launch
from runtime.loader import fingerprint, seeder
from runtime.loggers import scalars_of
from runtime.meters import Timer
from runtime.options import as_config_error, marked
from runtime.ranks import OnRankZero, StopSignals, check_ranks, difference, handle_signals
from runtime.resume import Resume
from runtime.rundir import RunDir
from runtime.runs import newest_run, read_summary
from runtime.terminal import say


class Stopped(BaseException):
    """Ends a validation after a signal. An `except Exception` around the validation does not hold it."""


class Run:
    """A run, as the loop sees it. All ranks call all methods.

    It knows these entries of `state` by name: `model`, `means`, `step`, `due`, `best`, `best_step` and
    `bad_validations`.

    Args:
        fabric: Fabric, launched.
        config: The options.
        resources: Closes what must not outlive the run, such as files.

    Attributes:
        config: The options, with the number of threads.
        directory: The files of the run.
        resume: What is known of the run so far.
        micro_batch_size: That of the run so far, or 0.
        state, plan, built, timer, console: From `prepare` on. The state as it was built, what measures the steps, what
            prints.
        saved: What `place` was at the last checkpoint.
    """

    def __init__(self, fabric: Fabric, config: Any, resources: ExitStack):
        check_loggers(config.logger_name)
        check_ranks(config, {})
        # The bits of long sums depend on the number of threads: a resume keeps it. The launcher may have set it.
        torch.set_num_threads(config.num_threads or fabric.broadcast(torch.get_num_threads()))
        self.config = replace(config, num_threads=torch.get_num_threads())
        self.fabric = fabric
        self.resources = resources
        self.on_rank_zero = OnRankZero(config.timeout)
        self.signals = StopSignals(config.timeout)
        self.directory = RunDir(self.config, resources)
        self.resume = Resume()
        if config.resume:
            self.on_rank_zero(self.directory.lock)
            summary = self.on_rank_zero(read_summary, self.directory.path)
            path = self.on_rank_zero(checkpoints.newest_checkpoint, self.directory.path, summary)
            size = path.stat().st_size if path and path.exists() else None
            check_ranks(config, {f"size of {path}": size})
            self.resume.read(self.directory.path, path, summary)
        self.micro_batch_size = self.resume.micro_batch_size
        self.data: dict = {}  # for each dataset its size and its fingerprint, by name
        self.has_begun = False  # its first step
        self.is_open = False  # the directory
        self.is_restored = False
        self.is_stopped = False  # by a signal
        self.saved: tuple = (0, [], 0)
        self.sums: dict = {}  # of the bits of the weights, before a validation of a step that is not saved

    def build(self, build_datasets: Callable) -> dict:
        """The datasets by name. Raises ConfigError if they are others on another rank, or, in a resume, of another
        size. Notes whether the samples have changed since the checkpoint."""
        self.fabric.seed_everything(self.config.seed)  # for a dataset that is split at random
        datasets = build_in_turn(self.fabric, partial(build_datasets, self.config))
        self.data = {name: (len(each), fingerprint(each)) for name, each in datasets.items() if name != "test"}
        check_ranks(self.config, {f"number and checksum of {name} samples": each for name, each in self.data.items()})
        self.resume.compare(self.config, self.data)
        if not self.config.fast_run:  # which a signal ends at once
            self.signals.listen(self.resources)
        return datasets

    # ---- before the first step

    def prepare(self, state: dict, plan: Any):
        """Takes the state as it was built, before a validation can change it. Adds what a resume needs beside it: the
        gradient scaler, the micro-batch size, on which dropout and augmentation depend, and whether a `break` has ended
        the run.

        Args:
            state: What a checkpoint has.
            plan: The Plan of the run.

        Raises:
            ConfigError: 16-mixed does not go with the state.
            RunError: A checkpoint could not restore the state, its optimizers have another order on another rank,
                or the model was built in evaluation mode.
        """
        check_state(state)
        state["precision"] = self.fabric.strategy.precision
        state["micro_batch_size"] = plan.micro_batch_size
        state["ended"] = 0  # total_steps of the plan that a `break` has ended
        self.state = state
        self.directory.state = state
        self.plan = plan
        self.built = AsBuilt(state)
        for groups in self.built.optimizers.values():
            check_order([name for group in groups for name in [*group["parameters"], "end of the group"]])
        if getattr(state["precision"], "scaler", None) and len(self.built.optimizers) > 1:
            raise ConfigError("--precision 16-mixed: scales the loss of one optimizer alone; use bf16-mixed")
        self.timer = Timer(self.fabric.device, plan.micro_batch_size * plan.world_size)
        self.console = Console(self.fabric, self.config.monitor, self.resume.step, plan.total_steps, self.resources)

    def restore(self):
        """Restores the state in a resume, and prints what will happen. Raises ConfigError if the state does not fit to
        the checkpoint, RunError if a run is to become longer that has no checkpoint left."""
        state = self.state
        resume = self.resume
        directory = self.directory
        if resume.is_finished:
            names = ("step", "best", "best_step", "bad_validations", "ended")
            state.update({name: resume.summary[name] for name in names})
        if resume.is_finished and self.is_over():
            resume.saved = {}  # nothing is left to do: its checkpoints may have been deleted
        elif resume.saved:
            about = resume.saved["checkpoint"]
            directory.summary |= about["summary"] | {"checkpoint": about["step"]}
            directory.began -= directory.summary["seconds"]
            resume.restore(self.fabric, state, self.built)
        elif resume.is_finished:
            raise RunError(f"{directory.path} is finished, and has no checkpoint left to become longer from")
        directory.summary["parameters"] = size_of(state["model"])
        self.saved = self.place()
        self.is_restored = True
        for line in [*header(self.fabric, self.config, self.plan, state), *resume.changes]:
            self.console.print(line)

    # ---- the steps

    def is_over(self) -> bool:
        """Whether no step is left: after the last one, early stopping, or a `break` in a plan of as many steps."""
        state = self.state
        is_finished = self.plan.is_finished(state["step"], state["bad_validations"])
        return is_finished or state["ended"] >= self.plan.total_steps

    def steps(self) -> Iterator[int]:
        """The steps to make, counted from 1, until the last one, early stopping or a signal."""
        set_seed = seeder(self.fabric.device.type, "whole step", self.config.seed)
        while not self.is_over():
            if self.signals.must_stop():
                self.is_stopped = True
                return
            step = self.state["step"] + 1
            set_seed(step)  # what is drawn once for a step: it is the same on all ranks
            yield step
            if self.state["step"] < step:  # after a `continue`: its samples and values do not come twice
                self.state.update(step=step, due=[])
            self.console.bar.update()

    def stop_if_asked(self):
        """Ends a validation after a signal, which may leave less time than it takes."""
        if self.signals.must_stop():
            self.is_stopped = True
            raise Stopped

    def begin(self, values: dict, sanity_results: dict):
        """In the first step of a process: checks what it has given, and makes the directory of a new run.

        Args:
            values: What compute_loss has returned.
            sanity_results: The results of a validation.
        """
        if self.has_begun:
            return
        self.has_begun = True
        check_gradients(self.fabric, self.state)
        self.timer.stop()
        check_values(self.fabric, values)
        check_monitor(self.config.monitor, values, sanity_results)
        self.built.check(self.state)
        check_ranks(self.config, {})  # and the source files that have been imported meanwhile
        self.open()

    def open(self):
        """Makes the directory of a new run, and opens the files, once."""
        if self.is_open:
            return
        directory = self.directory
        if directory.path is None:
            directory.path = self.on_rank_zero(directory.make)
            wait_for(directory.path)
            other = difference({f"{directory.path} is there": directory.path.exists()})
            if other:
                self.on_rank_zero(directory.remove)
                raise ConfigError(f"--root_dir {self.config.root_dir}: {other}; all machines need to share it")
        self.is_open = True
        self.on_rank_zero(directory.open, f"{self.fabric.world_size} x {self.fabric.device.type}")
        self.on_rank_zero(self.console.open_log, directory.path)
        if not self.config.fast_run:  # the directory is soon gone
            self.console.print(f"run directory {directory.path}")
            if self.resume.origin:
                self.console.print(f"resumed from {self.resume.origin}")

    # ---- after a step

    def save(self):
        """Begins with what is due after a step: waits for all ranks, stops the clock, and writes step-*.ckpt, if that
        is due. A resume from it does the rest."""
        due = self.state["due"]
        if not due:
            return
        self.signals.meet()  # before this process waits for the device
        self.timer.stop()
        if "save" in due:
            due.remove("save")
            self.write_checkpoint()
        if "validate" in due:
            self.signals.begin_validation()
            self.sums = {} if self.place() == self.saved else sums_of_bits(self.state)

    def log(self, row: dict):
        """Passes the numbers of a row to the loggers. Prints a row with the best value, which a validation has given.
        Raises RunError if the loss is not finite."""
        self.open()  # a resume may begin with it
        step = self.state["step"]
        check_loss(row["train/loss"], step, where_to_look(self.config, self.directory.path, step))
        scalars = scalars_of(row)
        if "best" in row:
            self.console.table(scalars, step)
        self.console.show(scalars)
        self.on_rank_zero(self.directory.log, scalars)

    def end_report(self, is_best: bool):
        """Ends what is due after a step. Makes it best.ckpt if it `is_best`, and checkpoints are not switched off. The
        last step is saved again, with nothing due: what follows the loop may change the weights."""
        self.state["due"] = []
        self.sums = {}
        keeps_best = self.config.checkpoint_frequency or self.config.checkpoint_interval
        is_best = is_best and bool(keeps_best or self.directory.has_best())
        if is_best:
            self.save_best()
        if self.is_over() and self.place() != self.saved:
            self.write_checkpoint()
            if is_best:
                self.save_best()  # the new file

    def save_best(self):
        """Makes this step best.ckpt: by a link, if it has just been saved."""
        step = self.state["step"]
        if step == self.saved[0]:
            self.on_rank_zero(checkpoints.link_best, self.directory.path, step)
        else:
            self.write_checkpoint(is_best=True)

    def place(self) -> tuple:
        """Where the run is: its step, what is still due after it, and whether a `break` has ended it."""
        return self.state["step"], [*self.state["due"]], self.state["ended"]

    def write_checkpoint(self, is_best: bool = False):
        """Writes the state as step-*.ckpt or best.ckpt. Raises RunError if it could not be restored, the loss or a
        weight is not finite, or weights differ between the ranks."""
        state = self.state
        step = state["step"]
        run_dir = self.directory.path
        self.built.check(state)
        contents = checkpoints.contents_of(state)
        for name, value in contents.items():
            check_value(value, f"state[{name!r}]")
        total, _ = contents["means"].get("loss", (0, 0))
        hint = where_to_look(self.config, run_dir, step)
        check_loss(total, step, hint)
        check_weights(self.fabric, state, step, hint)
        contents["checkpoint"] = {
            "format": checkpoints.FORMAT,
            "step": step,
            "entries": self.built.entries,
            "optimizers": self.built.optimizers,
            "schedulers": self.built.schedulers,
            "fixed": marked(self.config, "fixed"),
            "data": self.data,
            "config": self.directory.config_text,
        }
        path = checkpoints.best_of(run_dir) if is_best else checkpoints.path_of(run_dir, step)
        self.on_rank_zero(self.directory.write_checkpoint, contents, path)
        self.saved = self.place()

    # ---- at the end

    def finish(self) -> int:
        """Ends the run, which is finished or was stopped by a signal, and saves it. Of a finished one it writes
        model.pt. Returns the exit code."""
        if not self.is_restored:  # a signal has ended the first validation
            self.console.print("stopped before the first step")
            return PREEMPTED
        state = self.state
        if not self.is_stopped and not self.is_over():
            state["ended"] = self.plan.total_steps  # by a `break`
        if self.directory.path and self.place() != self.saved:
            if self.fabric.broadcast(self.sums != {} and self.sums != sums_of_bits(state)):
                self.console.print("not saved: the validation that was stopped has changed the weights")
            else:
                self.open()
                self.write_checkpoint()
        has_model = self.resume.is_finished and not self.is_open  # there was no step left
        if self.directory.path and not (self.is_stopped or has_model):
            weights = checkpoints.contents_of({"model": state["model"]})["model"]
            self.on_rank_zero(self.directory.write_model, weights)
        self.print_end()
        return PREEMPTED if self.is_stopped else 0

    def print_end(self):
        state = self.state
        step = state["step"]
        total = max(step, self.plan.total_steps)  # a finished run may have made more steps than are asked for now
        self.console.bar.close()
        ending = "stopped" if self.is_stopped else "finished"
        best = "none" if state["best"] is None else f"{state['best']:.5g} at step {state['best_step']}"
        self.console.print(f"{ending} after {step} of {total} steps, best {self.config.monitor} {best}")
        if state["bad_validations"] >= self.plan.patience:
            self.console.print(f"early stopping: {state['bad_validations']} validation(s) without a better value")
        if self.directory.path and not self.config.fast_run:
            self.console.print(f"next: {self.directory.next_command(not self.is_stopped)}")


# ---- the whole run


def run_training(train: Callable, build_datasets: Callable, config: Any) -> int:
    """Calls train(fabric, config, run, datasets) in every process, and returns its exit code. Raises ConfigError or
    RunError."""
    fabric = build_fabric(config)

    def start(config, resources: ExitStack) -> int:
        run = Run(fabric, config, resources)
        datasets = run.build(build_datasets)
        try:
            return train(fabric, run.config, run, datasets)
        except Stopped:
            return run.finish()

    return launch(fabric, config, partial(rehearse, fabric, start) if config.fast_run else start)


def rehearse(fabric: Fabric, start: Callable, config: Any, resources: ExitStack) -> int:
    """--fast_run: trains for half of the steps, resumes as a longer run, and trains for the rest. Each half ends, as
    any run does, with a save, a validation and a log. The run lies in a temporary folder, which is removed, also after
    a signal.

    Args:
        fabric: Fabric, launched.
        start: start(config, resources) starts or resumes a run, and returns the exit code.
        config: The options.
        resources: Closed at the end.
    """
    if config.fast_run < 2:
        raise ConfigError(f"--fast_run {config.fast_run}: must be at least 2")
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
        limit_train_batches=half,  # so there are two epochs: what happens between them is tried, too
        limit_val_batches=config.limit_val_batches and config.fast_run,
        logger_name=("csv",),
    )
    run_dir = None
    for steps in (half, config.fast_run):
        if run_dir:
            say(f"--fast_run: resumes after step {half}")
        with ExitStack() as of_half:
            start(replace(config, fast_run=steps, resume=run_dir), of_half)
        gc.collect()  # its model
        run_dir = str(newest_run(config.out_dir, config.root_dir))
    say("--fast_run: a run and its resume went well, and leave nothing behind")
    return 0


def end_rehearsal(number: int, frame):
    raise RunError("--fast_run was stopped by a signal, and leaves nothing behind")
