"""Tests of this project, whatever its model, data, loss, loop, options and defaults are: none of them knows a loss, a
count or an option that you may change. They start the real programs in small runs on the CPU, which takes less than two
minutes with the template's own model.

python -m pytest tests/test_project.py
WHERE=all python -m pytest tests/test_project.py    # in each precision of this machine, also on its GPU

A run has ten steps. Make thresholds, delays, warm-ups and what comes every N epochs small in SMALL: what acts later is
not tried. The last lines say what was shown.
"""

import csv
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import zygote  # noqa: E402

zygote.FORK_RANKS = True

import config  # noqa: E402
from runtime import cli, config_file  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.options import values_of  # noqa: E402

# The options of a run of 10 steps, in epochs of 4. A step has two micro-batches. Every step is logged; 5 and 10 are
# validated; 7 and 10 are saved. It is killed in step 10, and resumed after step 7, in the middle of an epoch, so that
# what comes every 2, 3, 5 or 6 steps is out of phase. Add what your project needs, such as a data_dir, or a size for a
# large model. A relative data_dir begins at the repository. Where the data are elsewhere, as for CI, commit a few
# samples of each set, and add their folder, such as "data_dir": "tests/data". A run takes 64 samples for training and
# 80 for validation; fewer of the latter do.
SMALL = {
    "root_dir": ".",
    "out_dir": "run",
    "accelerator": "cpu",
    "devices": "1",
    "num_nodes": "1",
    "precision": "32-true",  # 16-mixed needs a GPU
    "compile": "none",  # takes a minute, and may change the bits of a resume
    "num_workers": "0",
    "effective_batch_size": "16",
    "micro_batch_size": "8",
    "max_steps": "10",
    "warmup_epochs": "1",
    "limit_train_batches": "4",
    "limit_val_batches": "5",  # 80 samples: parts of 27, 27 and 26 on one process, ten of 8 on two
    "log_interval": "1",
    "val_interval": "5",
    "checkpoint_interval": "7",
    "max_grad_norm": "0.1",  # so that it clips
    "num_checkpoint_keep": "0",
    "logger_name": "csv",
}
# The columns of metrics.csv that are measured, and differ from run to run. If you log another one, add it.
MEASURED = {"samples_per_second", "data_wait", "peak_memory_mb", "tokens_per_second", "mfu"}

# How far the losses, and the results of a validation, of two processes may be from those of one: rounding of float32,
# relative to the largest. (In other precisions as much more as their numbers are coarser.) It grows where a network has
# kinks, such as ReLU, or an adversary. With BatchNorm, whose statistics are those of the first process, give the second
# a larger value, or convert it as docs/training.md does.
TRAIN_TOLERANCE = 1e-6
VAL_TOLERANCE = 1e-6
SCORE = 10  # times as much for a metric, which may divide by a difference, as R2 does
# Where a validation draws random numbers, two processes may be as many times farther from one as another seed is. Right
# edits were up to 3 times as far, sums over a batch in place of means more than 400 times. The largest distance of four
# seeds counts. Of a result that is normally distributed, they are as near by chance in one of 10,000 cases.
RANDOM_TOLERANCE = 10
# Results of a validation that are not compared, since they depend on the size of a batch, as a contrastive loss does.
BY_BATCH: set[str] = set()  # such as {"val/loss"}
SHARED_SAMPLES = 0.01  # the share of the samples of a set that may be in another set, too
WORKERS = "2"  # data workers of one of the resumes; 0 where a dataset cannot have any
HANGS = 60  # seconds without work, after which a process is taken to hang
KILL = "step-00000010.ckpt"  # is not written any more
KILLED = "killed in step 10 of 10, resumed after step 7"

SHOWN: dict[str, list[str]] = {}  # what the last lines say


def places() -> list[dict[str, str]]:
    """The options of where the runs train: none, so as SMALL says; with WHERE=all, one place after another."""
    if os.environ.get("WHERE") != "all":
        return [{}]
    found = [("cpu", "32-true"), ("cpu", "bf16-mixed")]
    if torch.cuda.is_available():
        found += [("cuda", "32-true"), ("cuda", "bf16-mixed"), ("cuda", "16-mixed")]
    if torch.backends.mps.is_available():
        found.append(("mps", "32-true"))
    return [{"accelerator": accelerator, "precision": precision} for accelerator, precision in found]


def words(place: dict[str, str]) -> str:
    options = SMALL | place
    return f"{options['accelerator']} {options['precision']}"


def small(cls: type = config.TrainConfig, **changed: str) -> str:
    """The options of a small run. Those that train.py or test.py does not have are left out."""
    known = values_of(cls())
    given = {name: value for name, value in (SMALL | changed).items() if name in known}
    data_dir = given.get("data_dir") or known.get("data_dir")
    if data_dir:
        given["data_dir"] = str(REPO / data_dir)  # the runs start in other folders
    return " ".join(f"--{name} {value}" for name, value in given.items())


def environment() -> dict[str, str]:
    """That of this process, without the variables of launchers and loggers that may be around the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "LT_", "SLURM_"))}


def run(command: str, cwd: Path, code: int = 0, is_fresh: bool = False, **env: str) -> subprocess.CompletedProcess:
    """Runs `train.py ...` or `test.py ...` in a process of its own, and checks the exit code. A process that is not
    fresh has imported torch before."""
    script, *options = command.split()
    start = subprocess.Popen if is_fresh else zygote.popen
    process = start(
        [sys.executable, str(REPO / script), *options],
        cwd=cwd,
        env=environment() | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = output_of(process, command)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if done.returncode != code:
        last = "\n".join((out + err).splitlines()[-30:])
        fail(f"python {command}\nends with exit code {done.returncode} instead of {code}:\n{last}")
    return done


def output_of(process: subprocess.Popen, command: str) -> tuple[str, str]:
    """Waits for its end. A busy machine may delay that, so it is known by the CPU time whether a process hangs."""
    used, since = 0.0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)
        now = cpu_seconds(process.pid)
        if now > used + 0.5:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > (HANGS if Path("/proc/self").exists() else 5 * HANGS):
            fail(f"python {command}\nhangs: it and its children have used no CPU for {HANGS} seconds")


def cpu_seconds(pid: int) -> float:
    """Of a process, its children and theirs, also of those that have ended; 0 where there is no /proc."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


def fail(message: str) -> NoReturn:
    """Without the code of the test, so that it fits on a screen."""
    pytest.fail(message, pytrace=False)


def run_dir(cwd: Path) -> Path:
    """The one run directory in a folder."""
    (found,) = cwd.glob("*/config.yaml")
    return found.parent


def history(folder: Path) -> dict[str, str]:
    """What metrics.csv has of each step, without what is measured."""
    found = {}
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            found |= {f"step {row['step']}, {name}": value for name, value in row.items() if name not in MEASURED}
    return found


def column(history: dict[str, str], name: str) -> list[float]:
    """The values of a column, in the steps that have one."""
    return [float(value) for key, value in history.items() if key.endswith(f", {name}") and value]


def bits(path: Path, name: str) -> dict[str, str]:
    """Every value in model.pt or a checkpoint, after the name of the file; of a tensor, the checksum of its bytes. What
    a checkpoint has about itself, such as the seconds of the run, is left out."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, torch.Tensor):
            raw = value.contiguous().flatten().view(torch.uint8)
            yield name, f"{value.dtype} {tuple(value.shape)} {checksum(raw.numpy())}"
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from leaves(item, f"{name}[{key!r}]")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from leaves(item, f"{name}[{number}]")
        else:
            yield name, repr(value)

    saved = torch.load(path, "cpu", weights_only=True)
    if isinstance(saved, dict):  # a file of your own may have something else
        saved.pop("checkpoint", None)
    return dict(leaves(saved, name))


def all_bits(folder: Path) -> dict[str, str]:
    """Those of the weights and the checkpoints of a run."""
    found = {}
    for path in (folder / "model.pt", *sorted(folder.glob("checkpoints/*.ckpt"))):
        found |= bits(path, path.name)
    return found


def checksum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def contents(folder: Path) -> dict[str, str]:
    """What a run has written, by path; without what is measured, and what is about the process."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        about_process = name.startswith(("provenance/", "events.", "test_", "train.log", ".lock"))
        if path.is_dir() or about_process:
            continue
        if path.suffix in (".pt", ".ckpt"):
            found |= bits(path, name)  # two folders may have files of one name
        elif path.name == "metrics.csv":
            found |= {f"{name}: {key}": value for key, value in history(folder).items()}
        elif path.name == "summary.json":
            summary = json.loads(path.read_text())
            for measured in ("seconds", "last"):  # the last results are in metrics.csv, too
                summary.pop(measured)
            found[name] = json.dumps(summary, sort_keys=True)
        elif path.name == "config.yaml":
            options = values_of(config_file.read_config(config.TrainConfig, folder))
            options.pop("num_workers", None)  # may change on a resume
            found |= {f"--{name}": repr(value) for name, value in options.items()}
        else:
            found[name] = f"{path.stat().st_size} bytes, {checksum(path.read_bytes())}"
    return found


def lines(folder: Path) -> dict[str, str]:
    """The number of lines in each file of text in a run that is not the template's."""
    found = {}
    for name in contents(folder):
        path = folder / name
        with suppress(UnicodeDecodeError):
            if path.exists() and name != "summary.json":
                found[name] = f"{len(path.read_text().splitlines())} lines"
    return found


def facts(record: Path, kind: str) -> list[list]:
    """What recorded.py has noted under a word."""
    found = [json.loads(line) for line in record.read_text().splitlines()]
    return [fact for each, *fact in found if each == kind]


def inputs(record: Path) -> dict[tuple[int, int], str]:
    """What compute_loss got in the training steps: for each step and number of a micro-batch the checksums."""
    found = defaultdict(str)
    for step, number, checksums in facts(record, "inputs"):
        found[step, number] += f"{' '.join(map(str, checksums))} "
    return dict(found)


def named(inputs: dict[tuple[int, int], str]) -> dict[str, str]:
    return {f"step {step}, micro-batch {number}": value for (step, number), value in inputs.items()}


def differing(found: dict, expected: dict) -> list:
    """The keys whose values differ."""
    names = {**expected, **found}  # in this order
    return [name for name in names if found.get(name) != expected.get(name)]


def assert_same(found: dict, expected: dict, advice: str) -> None:
    """Fails with the first values that differ, and with what to look for."""
    assert expected != {}
    names = differing(found, expected)
    if names:
        lines = [f"{name}: {found.get(name, 'missing')} instead of {expected.get(name, 'none')}" for name in names[:5]]
        fail("\n".join([f"{len(names)} of {len(expected)} differ, first:", *lines, advice]))


class Run(NamedTuple):
    folder: Path
    record: Path  # of recorded.py
    modules: Path  # the outputs and gradients of the modules, if they were asked for

    @classmethod
    def train(cls, cwd: Path, options: str, what: str = "-", kill: str = "-", shift: int = 0, **more) -> "Run":
        """A run in an empty folder. The arguments are those of recorded.py and `run`."""
        cwd.mkdir(exist_ok=True)
        code = 0 if kill == "-" else -signal.SIGKILL
        run(f"tests/recorded.py {cwd / 'record'} {what} {kill} {shift} {options}", cwd, code, **more)
        return cls(run_dir(cwd), cwd / "record", cwd / "modules")

    def resume(self, cwd: Path, options: str = "", what: str = "-", start: Path | None = None, **more) -> "Run":
        """A copy of the run, resumed in another folder."""
        folder = cwd / self.folder.name
        shutil.copytree(self.folder, folder)
        run(f"tests/recorded.py {cwd / 'record'} {what} - 0 --resume {folder} {options}", start or cwd, **more)
        return Run(folder, cwd / "record", cwd / "modules")


@functools.cache  # several tests ask for it
def first_module_that_differs(options: str) -> str:
    """Trains again until the kill, twice, and resumes: where the first other bits come from."""
    cwd = Path(tempfile.mkdtemp())

    def first(found: Path, expected: Path) -> str:
        """The first line of one file that the other does not have, as far as that goes; "" if there is none."""
        known = set(expected.read_text().splitlines())
        steps = {line.partition(",")[0] for line in known}
        lines = [line for line in found.read_text().splitlines() if line.partition(",")[0] in steps]
        return next((line for line in lines if line not in known), "").rpartition(": ")[0]  # without the checksum

    one = Run.train(cwd / "one", options, "modules", KILL)
    other = Run.train(cwd / "other", options, "modules", KILL)
    if module := first(other.modules, one.modules):
        return (
            f"Two equal runs differ, first in {module}: an operation there gives other bits each time. The page of "
            "torch.use_deterministic_algorithms lists such operations; or it draws from a generator of its own."
        )
    resumed = one.resume(cwd, what="modules")
    if module := first(resumed.modules, one.modules):
        return f"Two equal runs do not differ. The resumed run does, first in {module}."
    return (
        "In a resume on one process without data workers, no module has other outputs or gradients: look at what "
        "changes the weights or the state after them, or at what differs elsewhere."
    )


@pytest.fixture(scope="module", autouse=True)
def last_lines(request: pytest.FixtureRequest) -> None:
    """Lets pytest end with what was shown."""

    class Lines:
        def pytest_terminal_summary(self, terminalreporter: Any) -> None:
            for subject, things in SHOWN.items():
                terminalreporter.write_line(f"{subject}: {', '.join(things)}")
            with suppress(ConfigError):  # if a default is not valid
                known = values_of(config.TrainConfig())
                unknown = ", ".join(name for name in SMALL if name not in known)
                if unknown:
                    terminalreporter.write_line(f"SMALL has options that train.py does not have: {unknown}")
            if places() == [{}]:
                devices = " and on this machine's GPU" if torch.cuda.is_available() else ""
                terminalreporter.write_line(f"not tried: other precisions{devices}, by WHERE=all in the environment")

    request.config.pluginmanager.register(Lines())


def shown(subject: str, thing: str) -> None:
    things = SHOWN.setdefault(subject, [])
    if thing not in things:
        things.append(thing)


@pytest.fixture(scope="module", params=places(), ids=words)
def place(request) -> dict[str, str]:
    return request.param


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory) -> Run:
    """A run that was left alone."""
    return Run.train(tmp_path_factory.mktemp("whole"), small(**place), "samples")


@pytest.fixture(scope="module")
def killed(place, tmp_path_factory) -> Run:
    """The same run, killed in step 10."""
    return Run.train(tmp_path_factory.mktemp("killed"), small(**place), kill=KILL)


@pytest.fixture(scope="module", params=["here", "elsewhere", "on 2 ranks"])
def resumed(request, place, tmp_path_factory) -> Run:
    """The run that was killed, resumed; the second time with data workers, by a fresh interpreter with other hashes of
    strings, in another time zone and folder, and folders list their files in another order; the third time it was
    killed and resumed on two processes."""
    cwd = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    if request.param == "on 2 ranks":
        request.getfixturevalue("two")  # skips where they cannot be had
        return Run.train(tmp_path_factory.mktemp("killed_two"), small(**place, devices="2"), kill=KILL).resume(
            cwd, "--devices 2"
        )
    killed: Run = request.getfixturevalue("killed")
    if request.param == "here":
        return killed.resume(cwd)
    start = tmp_path_factory.mktemp("start")
    workers = f"--num_workers {WORKERS}" if "num_workers" in values_of(config.TrainConfig()) else ""
    others = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "FOLDERS": "reversed"}
    return killed.resume(cwd, workers, start, is_fresh=True, **others)


@pytest.fixture(scope="module")
def killed_in(resumed: Run, place) -> str:
    """The beginning of a line that says what the tests of a resumed run have shown."""
    where = resumed.folder.parent.name.rstrip("0123456789").replace("_", " ")
    return f"{words(place)}: {KILLED}{'' if where == 'here' else f' {where}'}"


@pytest.fixture(scope="module")
def alone(request, resumed: Run) -> Run:
    """The run on as many processes that was left alone."""
    return request.getfixturevalue("two" if resumed.folder.parent.name.startswith("on_2") else "whole")


@pytest.fixture(scope="module")
def two(place, tmp_path_factory) -> Run:
    """The run on two processes, whose fresh interpreters have other hashes of strings."""
    accelerator = (SMALL | place)["accelerator"]
    if accelerator == "mps" or (accelerator == "cuda" and torch.cuda.device_count() < 2):
        pytest.skip("two processes need two GPUs")
    return Run.train(tmp_path_factory.mktemp("two"), small(**{**place, "devices": "2"}), is_fresh=True)


# ---- training


def test_fast_run_tries_a_whole_run_with_a_resume_and_leaves_nothing(place, tmp_path: Path):
    printed = run(f"train.py {small(**place)} --fast_run", tmp_path).stdout
    assert config.TrainConfig().monitor in printed  # so it has validated
    assert "after 2 of 2 steps" in printed and "after 4 of 4 steps" in printed
    assert list(tmp_path.iterdir()) == []


def test_each_validation_has_the_same_samples_and_new_metrics(whole: Run):
    first: dict = {}
    for validation, number, batch in facts(whole.record, "validated"):
        if batch != first.setdefault(number, batch):
            fail(
                f"Batch {number} of validation {validation} has other values than in the validation before: something "
                "changes the memory of the data in place, as `images.mul_(2)` does, or the loader draws others."
            )
    (_, new), *later = facts(whole.record, "metrics") or [(0, {})]
    for validation, found in later:
        if names := differing(found, new):
            fail(
                f"Validation {validation} begins with what the one before has left in {', '.join(names[:5])}: "
                "`metrics.reset()` is not called, or resets the states of `add_state` alone."
            )


def test_a_run_that_was_killed_and_resumed_has_the_same_inputs(alone: Run, resumed: Run, killed_in: str):
    found = inputs(resumed.record)
    if not found:
        fail("train.py did not call compute_loss with the micro-batches of `train_loader.micro_batches`")
    expected = inputs(alone.record)
    first_step, _ = min(found)
    later = {(step, number): value for (step, number), value in expected.items() if step >= first_step}
    assert_same(
        named(found),
        named(later),
        "The batches or further arguments of compute_loss are others after a resume. Look for a second loader that "
        "begins anew, a generator of your own, a cache, a sample that is changed in place (give a `clone()`), what is "
        "kept between steps and is not in `state`, a file that data workers share, an attribute of the dataset that "
        "the loop sets and data workers do not see, an order that depends on a set or a folder: sort it.",
    )
    shown(killed_in, "same inputs")
    if "None" in " ".join(expected.values()).split():
        shown("not compared", "an argument of compute_loss that is no tensor or plain value, such as an iterator")


def test_a_run_that_was_killed_and_resumed_has_the_same_history(alone: Run, resumed: Run, killed_in: str):
    expected = history(alone.folder)
    found = history(resumed.folder)
    assert {int(key.split(",")[0].removeprefix("step ")) for key in expected} == set(range(1, 11))
    kinds = {name.partition(", ")[2].partition("/")[0] for name in differing(found, expected)}
    advice = "What is logged is not restored by a resume, or is random."
    if kinds <= {"val", "best"}:
        advice = "A validation depends on what a checkpoint does not have, or draws numbers that nobody has seeded."
    assert_same(found, expected, f"{advice}{what_changes(alone)}")
    shown(killed_in, "same history")


def test_a_run_that_was_killed_and_resumed_has_the_same_bits(alone: Run, resumed: Run, killed_in: str, place):
    """In the weights and the checkpoints."""
    expected = all_bits(alone.folder)
    found = all_bits(resumed.folder)
    if found != expected:
        given, known = inputs(resumed.record), inputs(alone.record)
        has_other_inputs = any(value != known.get(number) for number, value in given.items())
        assert_same(
            found,
            expected,
            f"{OTHER_INPUTS if has_other_inputs else first_module_that_differs(small(**place))}\n"
            "A step depends on what a resume does not restore: a value that is not in `state` of train.py, or random "
            f"numbers that are not seeded for each step.{what_changes(alone)}",
        )
    shown(killed_in, "same bits")


OTHER_INPUTS = "compute_loss has other inputs after the resume: the test of the same inputs says where to look."


def what_changes(run: Run) -> str:
    """Sentences on what the modules of `state` have beside parameters and buffers, if it changes in the run."""
    first: dict = {}
    changed = set()
    for _, rank, found in facts(run.record, "attributes"):
        values = {(name, rank): checksum for name, (checksum, _) in found.items()}
        changed |= {name for name, rank in values if values[name, rank] != first.get((name, rank), values[name, rank])}
        first |= values
    if not changed:
        return ""
    return (
        f"\nNeither parameter nor buffer, but it changes: {', '.join(sorted(changed)[:5])}. If a step depends on it, "
        "use `register_buffer`, and write into it."
    )


def test_a_run_that_was_killed_and_resumed_has_the_same_files(alone: Run, resumed: Run, killed_in: str):
    advice = "A file of your own is written from what a resume does not restore, or is written twice."
    assert_same(contents(resumed.folder), contents(alone.folder), advice)
    shown(killed_in, "same files")


# ---- what is trained, and by which numbers


def test_each_parameter_is_trained(whole: Run, place):
    """Between the oldest checkpoint and the last one, where its optimizer has a learning rate above 0."""
    paths = sorted(whole.folder.glob("checkpoints/step-*.ckpt"))
    before, after = (torch.load(path, "cpu", weights_only=True) for path in (paths[0], paths[-1]))
    between = f"between steps {before['step']} and {after['step']}"
    with_gradient = {name for step, names in facts(whole.record, "stepped") if step > before["step"] for name in names}
    for optimizer, groups in after["checkpoint"]["optimizers"].items():
        same = {}  # whether a parameter is
        for number, group in enumerate(groups):
            if max(saved[optimizer]["param_groups"][number]["lr"] for saved in (before, after)) > 0:
                for name in group["parameters"]:
                    module, _, key = name.rpartition(" (")[0].partition(".")
                    same[name] = torch.equal(before[module][key], after[module][key]) and after[module][key].dtype
        if same and all(same.values()):
            fail(
                f"state[{optimizer!r}]: no parameter has changed {between}. Is `step()` called, and `zero_grad()` only "
                "before the backward passes?"
            )
        names = [name for name, dtype in same.items() if dtype]
        if lost := [name for name in names if name in with_gradient and same[name] == torch.float32]:
            fail(f"It had a gradient, but has not changed {between}: {', '.join(lost[:5])}. Is it written back?")
        for name in names:
            shown(f"{words(place)}: the same {between}", name)


def seeded_alike(run: Run, kind: str) -> str:
    """A sentence on a global generator that was where it had been after another micro-batch or fetch."""
    seen: dict = {}
    for after, number, states in facts(run.record, kind):
        for generator, state in states.items():
            other = seen.setdefault((generator, state), number)
            if other != number:
                return (
                    f"\nAfter {after}, the generator of {generator} is where it was after another one: something seeds "
                    "it each time alike, such as `torch.manual_seed(0)` in compute_loss, a module or the dataset. Draw "
                    "without: each micro-batch and each fetch has a seed of its own."
                )
    return ""


def test_random_numbers_are_others_in_each_micro_batch(whole: Run):
    if found := seeded_alike(whole, "generators"):
        fail(found.lstrip())


def test_no_graph_grows_from_step_to_step(whole: Run):
    sizes: dict[str, dict[int, int]] = defaultdict(dict)
    for step, _, found in facts(whole.record, "attributes"):
        for name, (_, nodes) in found.items():
            sizes[name][step] = nodes
    names = [name for name, found in sizes.items() if len(found) > 2 and [*found.values()] == sorted({*found.values()})]
    if names:
        fail(f"{', '.join(names)} has a graph that grows with each step: compute it under `torch.no_grad()`.")


# What is wrong in all runs alike, by the word of recorded.py. Each is red, with the facts of the first time.
WRONG = {
    "validated set": 'A validation reads datasets["train"]: does its loader have datasets["val"]?',
    "untrained": "The loss depends on {}, which is in no module of `state`, so nothing trains, saves or restores it. "
    "Put modules into a ModuleList, not a list; or, if it is to stay as it is, call `requires_grad_(False)`.",
    "in no optimizer": "It has a gradient, but is in no optimizer of `state`, and does not change: {}. Give it to one, "
    "or call `requires_grad_(False)`.",
    "outside": "{} steps, but is not in `state`, so a resume does not restore it: add it. If `state` has another one "
    "for the same parameters, step that.",
    "overridden": "The loop sets other learning rates than {}, which is without effect: docs/training.md shows how to "
    "use a scheduler of torch.",
    "norm": "In step {} the optimizer gets a gradient of the norm {:.3g}, above --max_grad_norm {}: clip it after the "
    "backward passes, before `step()`. If that is right, take max_grad_norm out of SMALL.",
    "loss input": "F.{} gets {}.",
    "mode": "compute_loss calls `train()` or `eval()` of the model: validate() and the loop do that.",
    "of no entry": "A {} is called in training mode, and is in no module of `state`: no validation calls its `eval()`, "
    "and no resume restores its buffers. Make it in `__init__`, or call `eval()` once.",
    "independent metrics": "The arguments of `metrics.update` are the same, bit for bit, whatever the weights of the "
    "model are: does compute_loss return its outputs?",
    "reversed": "The samples of {!r} are random with augment=False, and not in the run: is it reversed?",
    "shared": "state[{!r}] and state[{!r}] have the same parameters: is a `copy.deepcopy` missing?",
}
# What may be right: last lines.
BEWARE = {
    "training mode": "{} is in training mode {}",
    "partly shared": "state[{!r}] and state[{!r}] have parameters in common",
    "idle scheduler": "state[{!r}] has made no step",
    "still": "state[{!r}] changes, but not its buffer {}, as that of the model does",
    "random without augmentation": "the samples of {!r} are random with augment=False, too",
}


@pytest.mark.parametrize("kind", WRONG)
def test_no_fact_shows_a_mistake(kind: str, whole: Run):
    for fact in facts(whole.record, kind):
        fail(WRONG[kind].format(*fact))


def test_what_may_be_a_mistake_is_said(whole: Run):
    for kind, text in BEWARE.items():
        for fact in facts(whole.record, kind):
            shown("beware", text.format(*fact))
    for name in {name for name, *_ in facts(whole.record, "order")}:
        epochs = [(found, share) for each, _, found, share in facts(whole.record, "order") if each == name]
        if len(epochs) > 1 and len({found for found, _ in epochs}) == 1:
            shown("beware", f"the order of {name!r} is the same in every epoch")
        if min(share for _, share in epochs) < 1:
            shown("beware", f"an epoch draws {min(share for _, share in epochs):.0%} of the samples of {name!r}")
    if len({*inputs(whole.record).values()}) == 1:
        shown("beware", "the inputs of compute_loss are the same, bit for bit, in all steps")
    found = history(whole.folder)
    for name in {key.partition(", ")[2] for key in found if ", train/" in key}:
        if len({*column(found, name)}) == 1:
            shown("beware", f"{name} is the same in all steps")
    code = ""  # what the run keeps of it
    for folder in whole.folder.glob("provenance/code-*"):
        for path in folder.rglob("*.py"):
            if path.relative_to(folder).parts[0] not in ("tests", "config.py"):
                code += path.read_text(errors="replace")
    for name in values_of(config.TrainConfig()):
        if not re.search(rf"\.{name.rpartition('.')[2]}\b", code):
            shown("beware", f"no code reads --{name}")


def test_the_loss_depends_on_the_batch(whole: Run):
    """In each validation and each step: a penalty of the weights alone changes from step to step."""
    groups: dict[int, set] = defaultdict(set)
    for group, loss, batch in facts(whole.record, "loss"):
        groups[group].add((loss, batch))
    several = [found for found in groups.values() if len({batch for _, batch in found}) > 1]
    if several and all(len({loss for loss, _ in found}) == 1 for found in several):
        fail("The loss is the same, bit for bit, for other batches with the same weights: it does not depend on them.")


def test_no_tensors_with_a_graph_are_kept(whole: Run):
    counts = [count for _, count in facts(whole.record, "tensors with a graph")]
    if len(counts) > 4 and all(later > count for count, later in itertools.pairwise(counts)):
        fail(
            f"There are more tensors with a graph in each step, at last {counts[-1]}: something keeps them, and their "
            "memory. Keep `value.detach()`."
        )


def test_no_file_is_written_by_two_processes(two: Run):
    ranks = defaultdict(set)
    for rank, path in facts(two.record, "write"):
        ranks[path].add(rank)
    if names := [path for path, found in ranks.items() if len(found) > 1 and not path.endswith("lock")]:
        fail(f"Both processes write {', '.join(names)}: write on rank 0, `if fabric.is_global_zero`.")


def test_ranks_have_the_same_state(two: Run):
    """All of it is restored from what rank 0 has saved."""
    ranks: list[dict] = [{}, {}]
    for step, rank, values in facts(two.record, "state"):
        ranks[rank] |= {f"state[{name!r}] after step {step}, on rank 1": value for name, value in values.items()}
    advice = (
        "A checkpoint has what rank 0 has. Average it over the ranks, or make it on each from what all have; draw its "
        "random numbers at the top of a step, or before the first validation: after one they are others on each rank."
    )
    assert_same(ranks[1], ranks[0], advice)


def test_no_sample_of_a_validation_or_test_is_in_another_set(whole: Run, place):
    """By the checksums of the samples without augmentation. Two sets to train on may have some in common."""
    sets = {name: (size, found) for name, size, found in facts(whole.record, "samples")}
    for name, (_, found) in sets.items():
        if found is None:
            shown("not compared with other sets", f"the samples of {name!r}")
    known = [(size, name, set(found), len(found)) for name, (size, found) in sets.items() if found]
    shares = {}
    for (_, small_set, ours, _), (size, large_set, theirs, checked) in itertools.combinations(sorted(known), 2):
        if not {small_set, large_set} & {"val", "test"}:
            continue
        share = len(ours & theirs) / len(ours) * size / checked
        shares[f"{share:.2%} of the samples of {small_set!r} are in {large_set!r}, too"] = share
    if many := [line for line, share in shares.items() if share > SHARED_SAMPLES]:
        fail(f"{'; '.join(many)}. If that is right, give SHARED_SAMPLES a larger value.")
    for line in (line for line, share in shares.items() if share):
        shown("beware", line)


# ---- two processes


def test_two_processes_get_the_inputs_of_one(whole: Run, two: Run, place):
    """One process computes the two micro-batches of a step in turn, two compute them at once."""
    advice = (
        "The processes disagree on the order of the samples, or draw other random numbers than one process; or an "
        "argument of compute_loss holds what other micro-batches have left in it."
    )
    assert_same(named(inputs(two.record)), named(inputs(whole.record)), advice)
    shown(f"{words(place)}: 2 processes", "same inputs")


def test_two_processes_write_the_lines_of_one(whole: Run, two: Run):
    """In files of your own."""
    expected = lines(whole.folder)
    found = {
        name: number for name, number in lines(two.folder).items() if name in expected
    }  # others are of one process
    if found != expected:
        advice = "Each process runs this code: write on rank 0, `if fabric.is_global_zero`, what is of all processes."
        assert_same(found, expected, advice)


def rounding(place: dict[str, str]) -> float:
    """How much coarser the numbers of a precision are than those of float32."""
    bits_of = (SMALL | place)["precision"].partition("-")[0]
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(bits_of, torch.float32)
    return torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def farthest(found: list[float], expected: list[float]) -> float:
    """The largest difference of two lists; infinite where a value is missing, or NaN, in one of them alone."""
    one, other = (torch.tensor(values, dtype=torch.float64) for values in (expected, found))
    if len(one) != len(other) or not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    return max((other - one).nan_to_num().abs().tolist(), default=0.0)


def assert_close(found: list[float], expected: list[float], tolerance: float, name: str, advice: str) -> float:
    """Fails if two lists differ by more than a tolerance, relative to the largest value, and by more than the rounding
    of a score that is 1 minus a ratio. Returns the relative difference."""
    distance = farthest(found, expected)
    scale = max([abs(value) for value in expected if value == value], default=0.0)
    if distance == math.inf:
        fail(f"{name} is {found} instead of {expected}: missing, NaN or infinite in one of the two alone.\n{advice}")
    if any(value != value for value in expected):
        shown("beware", f"NaN in {name}")
    if distance > tolerance * max(scale, 0.5):
        pairs = enumerate(zip(found, expected, strict=True), 1)
        number, (value, other) = next(each for each in pairs if abs(each[1][0] - each[1][1]) == distance)
        values = f"{value:.8g} instead of {other:.8g}"
        fail(f"{name} differs by up to {distance / (scale or 1):.1g}, at most: {values} (value {number}).\n{advice}")
    return distance / max(scale, 0.5)


def test_two_processes_train_like_one(whole: Run, two: Run, place):
    """In all that training logs. The norm of the gradient shows a wrong scale, which Adam hides from the losses."""
    one = history(whole.folder)
    other = history(two.folder)
    differences = [
        assert_close(
            column(other, name),
            column(one, name),
            TRAIN_TOLERANCE * rounding(place),
            f"{name} of two processes",
            "The processes draw other random numbers than one process, or the gradient is not the mean of all "
            "micro-batches and processes: not averaged, or scaled by their number, or compute_loss itself reduces over "
            "the ranks, which DDP does. If it is rounding, which grows from "
            f"step to step, give TRAIN_TOLERANCE a larger value.{buffers_that_change(whole)}",
        )
        for name in sorted({key.partition(", ")[2] for key in one if ", train/" in key})
    ]
    shown(f"{words(place)}: 2 processes", f"train/ within {max(differences):.0e}")


def test_two_processes_validate_like_one(whole: Run, two: Run, place, tmp_path: Path):
    """What another seed changes may be as far from one process as the results of another seed: two processes have
    other batches than one, so other random numbers."""
    one, other = history(whole.folder), history(two.folder)
    names = {key.partition(", ")[2] for key in one if ", val/" in key}
    in_training = {key.partition(", ")[2] for key in one}
    tolerance = VAL_TOLERANCE * rounding(place)
    seeds: list[dict] = []

    def spread(name: str) -> float:
        """How far the results of other seeds are from those of this one, beyond rounding."""
        expected = column(one, name)
        distance = max(farthest(column(seed, name), expected) for seed in seeds)
        return distance if distance > 1e-6 * max(map(abs, expected)) else 0.0

    def train_with_seeds(*numbers: int):
        seeds.extend(history(Run.train(tmp_path / str(each), small(**place), shift=each).folder) for each in numbers)

    train_with_seeds(1)
    is_random = any(spread(name) for name in names)
    distance = {name: farthest(column(other, name), column(one, name)) for name in names}
    far = [name for name in names if distance[name] > max(tolerance, RANDOM_TOLERANCE * spread(name))]
    if is_random and far:  # one seed may be near by chance, and an accuracy may be equal
        train_with_seeds(2, 3, 4)
    advice = (
        "It is of the samples of one process alone, or is no mean of all samples: is the count that compute_loss "
        "returns that of the samples, or, with class weights or ignored labels, the sum of their weights "
        "(docs/training.md)? Or it depends on how they are cut into batches; or something, such as an average of the "
        "weights, is kept on rank 0 alone."
    )
    changed = buffers_that_change(whole, OF_THE_FIRST)
    for name in sorted(names - BY_BATCH):
        found, expected = column(other, name), column(one, name)
        if spread(name):
            ratio = distance[name] / spread(name)
            if ratio > RANDOM_TOLERANCE:
                fail(
                    f"{name} of two processes differs {ratio:.0f} times as much as with four other seeds.\n{advice}"
                    f"{changed or ' If it is meant to, put it into BY_BATCH.'}{random_sets(whole)}"
                )
            shown(f"{words(place)}: 2 processes, random validation", f"{name} as far as {ratio:.1g} times another seed")
            continue
        more = "" if name != config_file.read_config(config.TrainConfig, whole.folder).monitor else MONITOR
        difference = assert_close(
            found,
            expected,
            tolerance * (1 if name.replace("val/", "train/") in in_training else SCORE),
            f"{name} of two processes",
            f"{advice} If it is rounding, give VAL_TOLERANCE a larger value.{more}{changed}{random_sets(whole)}"
            f"{seeded_alike(whole, 'generators of a validation')}",
        )
        shown(f"{words(place)}: 2 processes", f"{name} within {difference:.0e}")


MONITOR = " It is the `--monitor`: the best checkpoint depends on the number of processes."


OF_THE_FIRST = (
    "\nBatchNorm has the statistics of the first process: give VAL_TOLERANCE a larger value, or convert it as "
    "docs/training.md does."
)


def buffers_that_change(run: Run, of_batch_norm: str = "") -> str:
    """Sentences on those that each forward pass changes, and those that a validation changes."""
    every_pass = (
        "\nEach forward pass changes {}, so it depends on the number of micro-batches and processes: change it once "
        "per step, by the sum over micro-batches and ranks."
    )
    in_validations = "\nA validation changes {}: change it in training alone, `if self.training`."
    norm_in_validations = "\nA validation changes the statistics of BatchNorm, which is in training mode there."
    text = ""
    for kind, sentence, sentence_of_norm in (
        ("buffers", every_pass, of_batch_norm),
        ("buffers of a validation", in_validations, norm_in_validations),
    ):
        found = facts(run.record, kind)
        norm = {name for _, names in found for name in names}
        if names := sorted({name for names, _ in found for name in names} - norm):
            text += sentence.format(", ".join(names[:5]))
        text += sentence_of_norm if norm else ""
    return text


def random_sets(run: Run) -> str:
    names = [name for (found,) in facts(run.record, "random samples") for name in found if name != "train"]
    return f"\nThe samples of {', '.join(names)} are random: are they augmented?" if names else ""


def has_no_samples(run: Run, name: str) -> bool:
    if [name, 0, []] not in facts(run.record, "samples"):
        return False
    shown("not tried", f"test.py, where {name!r} has no samples")
    return True


def test_the_finished_run_is_evaluated(whole: Run, place):
    if has_no_samples(whole, "test"):
        return
    run(f"test.py {small(config.EvalConfig, out_dir=whole.folder.name, **place)}", whole.folder.parent)
    (report,) = whole.folder.glob("test_*.json")
    assert json.loads(report.read_text())["num_samples"] > 0


def test_what_was_validated_is_what_is_evaluated(whole: Run, place, tmp_path: Path):
    if has_no_samples(whole, "val"):
        return
    run(
        f"train.py {small(**place, max_steps='2', warmup_epochs='0', val_interval='2', limit_val_batches='1.0')}",
        tmp_path,
    )
    folder = run_dir(tmp_path)
    options = small(config.EvalConfig, out_dir=folder.name, **place)
    run(f"test.py {options} --split val --checkpoint last", tmp_path)
    (path,) = folder.glob("test_val_*.json")
    results = json.loads(path.read_text())["results"]
    validated = history(folder)
    common = [name for name in results if f"step 2, val/{name}" in validated]
    assert common != []
    for name in common:
        assert_close(
            [math.nan if results[name] is None else results[name]],  # which JSON does not have
            column(validated, f"val/{name}"),
            1e-5,
            f"{name} of test.py",
            'state["model"] of train.py is not the model that is validated, or a validation depends on what a '
            f"checkpoint does not have.{buffers_that_change(whole)}",
        )
    shown(f"{words(place)}: test.py", "what was validated is what is evaluated")


# ---- options


@pytest.mark.parametrize("script, cls", [("train.py", config.TrainConfig), ("test.py", config.EvalConfig)])
def test_every_option_has_a_valid_default_and_is_in_the_help(script: str, cls: type, tmp_path: Path):
    cls()  # raises ConfigError if a default is not valid
    words = run(f"{script} --help", tmp_path).stdout.split()
    assert [name for name in values_of(cls()) if f"--{name}" not in words] == []


def test_the_defaults_can_be_written_and_read():
    assert config_file.config_of(config.TrainConfig, config_file.to_yaml(config.TrainConfig())) == config.TrainConfig()


def test_a_run_has_the_options_that_were_given(whole: Run, place, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)  # as in the run
    given = cli.parse_train(config.TrainConfig, small(**place).split())
    written = config_file.read_config(config.TrainConfig, whole.folder)
    assert written == replace(given, num_threads=written.num_threads)  # torch may choose it


@pytest.mark.parametrize(
    "command",
    [
        "train.py --no_such_option 1",
        "train.py --max_steps many",
        "train.py --epochs 0",
        "test.py --no_such_option 1",
        "test.py --out_dir no_such_run",
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(command: str, tmp_path: Path):
    done = run(command, tmp_path, code=2)
    assert len(done.stderr.splitlines()) == 1 and command.split()[1] in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
