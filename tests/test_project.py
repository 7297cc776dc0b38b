"""Tests of this project, whatever its model, data, loss, loop, options and defaults are: none of them knows a loss, a
count or an option that you may change. They start the real programs in small runs on the CPU, which takes less than two
minutes with the template's own model.

python -m pytest tests/test_project.py
WHERE=all python -m pytest tests/test_project.py    # in each precision of this machine, also on its GPU

A run has ten steps. Make thresholds, delays and warm-ups of your own small in SMALL: what acts later is not tried. The
last lines say what was shown.
"""

import csv
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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

import config  # noqa: E402
from runtime import cli  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.options import values_of  # noqa: E402

# The options of a run of 10 steps, in epochs of 4. A step has two micro-batches. Every step is logged; 5 and 10 are
# validated; 3, 6, 9 and 10 are saved. It is killed in step 9, and resumed after step 6, in the middle of
# an epoch. Add what your project needs, such as a data_dir, or a size for a large model.
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
    "limit_train_batches": "4",
    "limit_val_batches": "5",  # 80 samples: parts of 27, 27 and 26 on one process, four of 20 on two
    "log_interval": "1",
    "val_interval": "5",
    "checkpoint_interval": "3",
    "logger_name": "csv",
}
# The columns of metrics.csv that are measured, and differ from run to run. If you log another one, add it.
MEASURED = {"samples_per_second", "data_wait", "peak_memory_mb", "tokens_per_second", "mfu"}

# How far the losses, and the results of a validation, of two processes may be from those of one: rounding of float32,
# relative to the largest. (In other precisions as much more as their numbers are coarser.) It grows where a network has
# kinks, such as ReLU, or an adversary. With BatchNorm, whose statistics are those of the first process, give the second
# a larger value, or convert it as recipes/edits.md does.
TRAIN_TOLERANCE = 1e-6
VAL_TOLERANCE = 1e-6
WORKERS = "2"  # data workers of one of the resumes; 0 where a dataset cannot have any
KILL = "step-00000009.ckpt"  # is not written any more
KILLED = "killed in step 9 of 10, resumed after step 6"

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
    if "data_dir" in given:
        given["data_dir"] = str(Path(given["data_dir"]).absolute())  # the runs start in other folders
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
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if done.returncode != code:
        last = "\n".join((out + err).splitlines()[-30:])
        fail(f"python {command}\nends with exit code {done.returncode} instead of {code}:\n{last}")
    return done


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
            options = values_of(cli.read_config(config.TrainConfig, folder))
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


def inputs(record: Path) -> dict[tuple[int, int], str]:
    """What compute_loss got in the training steps: for each step and number of a micro-batch the checksums of
    recorded.py."""
    found = defaultdict(str)
    for line in record.read_text().splitlines():
        step, number, checksums = line.split(maxsplit=2)
        found[int(step), int(number)] += f"{checksums} "
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
    record: Path  # of the inputs
    modules: Path  # the outputs and gradients of the modules, if they were asked for

    @classmethod
    def train(cls, cwd: Path, options: str, kill: str = "-", shift: int = 0, has_modules=False, **more) -> "Run":
        """A run in an empty folder."""
        cwd.mkdir(exist_ok=True)
        record = cwd / "record"
        modules = cwd / "modules"
        code = 0 if kill == "-" else -signal.SIGKILL
        run(f"tests/recorded.py {record} {modules if has_modules else '-'} {kill} {shift} {options}", cwd, code, **more)
        return cls(run_dir(cwd), record, modules)

    def resume(self, cwd: Path, options: str = "", start: Path | None = None, has_modules=False, **more) -> "Run":
        """A copy of the run, resumed in another folder."""
        folder = cwd / self.folder.name
        shutil.copytree(self.folder, folder)
        record = cwd / "record"
        modules = cwd / "modules"
        command = f"tests/recorded.py {record} {modules if has_modules else '-'} - 0 --resume {folder} {options}"
        run(command, start or cwd, **more)
        return Run(folder, record, modules)


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

    one = Run.train(cwd / "one", options, KILL, has_modules=True)
    other = Run.train(cwd / "other", options, KILL, has_modules=True)
    if module := first(other.modules, one.modules):
        return (
            f"Two equal runs differ, first in {module}: an operation there gives other bits each time. The page of "
            "torch.use_deterministic_algorithms lists such operations; or it draws from a generator of its own."
        )
    resumed = one.resume(cwd, has_modules=True)
    if module := first(resumed.modules, one.modules):
        return f"Two equal runs do not differ. The resumed run does, first in {module}."
    return "No module has other outputs or gradients: look at what changes the weights or the state after them."


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
    return Run.train(tmp_path_factory.mktemp("whole"), small(**place))


@pytest.fixture(scope="module")
def killed(place, tmp_path_factory) -> Run:
    """The same run, killed in step 9."""
    found = Run.train(tmp_path_factory.mktemp("killed"), small(**place), KILL)
    assert cli.read_summary(found.folder)["state"] != "finished"
    return found


@pytest.fixture(scope="module", params=["here", "elsewhere"])
def resumed(request, killed: Run, tmp_path_factory) -> Run:
    """The run that was killed, resumed; the second time with data workers, by a fresh interpreter with other hashes of
    strings, in another time zone and folder; and folders list their files in another order."""
    cwd = tmp_path_factory.mktemp(request.param)
    if request.param == "here":
        return killed.resume(cwd)
    start = tmp_path_factory.mktemp("start")
    workers = f"--num_workers {WORKERS}" if "num_workers" in values_of(config.TrainConfig()) else ""
    others = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "FOLDERS": "reversed"}
    return killed.resume(cwd, workers, start, is_fresh=True, **others)


@pytest.fixture(scope="module")
def killed_in(resumed: Run, place) -> str:
    """The beginning of a line that says what the tests of a resumed run have shown."""
    is_here = resumed.folder.parent.name.startswith("here")
    where = "" if is_here else " elsewhere"
    return f"{words(place)}: {KILLED}{where}"


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


def test_a_run_that_was_killed_and_resumed_has_the_same_inputs(whole: Run, resumed: Run, killed_in: str):
    found = inputs(resumed.record)
    if not found:
        fail("train.py did not call compute_loss after set_seed")
    expected = inputs(whole.record)
    first_step, _ = min(found)
    later = {(step, number): value for (step, number), value in expected.items() if step >= first_step}
    assert_same(
        named(found),
        named(later),
        "The batches or further arguments of compute_loss are others after a resume. Look for a second loader that "
        "begins anew, a generator of your own, a cache, a file that data workers share, an attribute of the dataset "
        "that the loop sets and data workers do not see, an order that depends on a set or a folder: sort it.",
    )
    shown(killed_in, "same inputs")
    if "None" in " ".join(expected.values()).split():
        shown("not compared", "an argument of compute_loss that is no tensor or plain value, such as an iterator")


def test_a_run_that_was_killed_and_resumed_has_the_same_bits(whole: Run, resumed: Run, killed_in: str, place):
    """In the weights and the checkpoints."""
    expected = all_bits(whole.folder)
    found = all_bits(resumed.folder)
    if found != expected:
        assert_same(
            found,
            expected,
            f"{first_module_that_differs(small(**place))}\n"
            "A step depends on what a resume does not restore: a value that is not in `state` of train.py, or random "
            "numbers that are not seeded for each step.",
        )
    shown(killed_in, "same bits")


def test_a_run_that_was_killed_and_resumed_has_the_same_history(whole: Run, resumed: Run, killed_in: str):
    expected = history(whole.folder)
    assert {int(key.split(",")[0].removeprefix("step ")) for key in expected} == set(range(1, 11))
    assert_same(history(resumed.folder), expected, "What is logged is not restored by a resume, or is random.")
    shown(killed_in, "same history")


def test_a_run_that_was_killed_and_resumed_has_the_same_files(whole: Run, resumed: Run, killed_in: str):
    advice = "A file of your own is written from what a resume does not restore, or is written twice."
    assert_same(contents(resumed.folder), contents(whole.folder), advice)
    shown(killed_in, "same files")


def test_two_processes_get_the_inputs_of_one(whole: Run, two: Run, place):
    """One process computes the two micro-batches of a step in turn, two compute them at once."""
    advice = "The processes disagree on the order of the samples, or draw other random numbers than one process."
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


def assert_close(found: list[float], expected: list[float], tolerance: float, name: str, advice: str) -> float:
    """Fails if two lists differ by more than a tolerance, relative to the largest value. Returns the difference."""
    assert len(found) == len(expected) > 0
    one, other = (torch.tensor(values, dtype=torch.float64) for values in (expected, found))
    assert torch.equal(one.isnan(), other.isnan())
    scale = one.nan_to_num().abs().max().clamp(min=1e-3)  # it may be about 0
    differences = (other - one).nan_to_num().abs() / scale
    if differences.max() > tolerance:
        number = int((differences > tolerance).nonzero()[0])
        values = f"{found[number]:.8g} instead of {expected[number]:.8g}"
        fail(f"{name} differs by up to {differences.max():.1g}, first: {values} (value {number + 1}).\n{advice}")
    return float(differences.max())


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
            "micro-batches and processes: not averaged, or scaled by their number. If it is rounding, which grows from "
            "step to step, give TRAIN_TOLERANCE a larger value.",
        )
        for name in sorted({key.partition(", ")[2] for key in one if ", train/" in key})
    ]
    shown(f"{words(place)}: 2 processes", f"train/ within {max(differences):.0e}")


def test_two_processes_validate_like_one(whole: Run, two: Run, place, tmp_path: Path):
    """Not compared is what another seed changes: two processes have other batches than one, so other random numbers."""
    one = history(whole.folder)
    other = history(two.folder)
    shifted = history(Run.train(tmp_path, small(**place), shift=1).folder)
    names = {key.partition(", ")[2] for key in one if ", val/" in key}
    for name in sorted(names):
        expected = column(one, name)
        if column(shifted, name) != pytest.approx(expected, rel=1e-6, nan_ok=True):
            shown(f"{words(place)}: random validation, not compared", name)
            continue
        difference = assert_close(
            column(other, name),
            expected,
            VAL_TOLERANCE * rounding(place),
            f"{name} of two processes",
            "It is of the samples of one process alone, or is no mean of all samples: is the count that compute_loss "
            "returns that of the samples? Or it depends on how they are cut into batches. If it is rounding, as of a "
            "score near 0 that is 1 minus a ratio, give VAL_TOLERANCE a larger value.",
        )
        shown(f"{words(place)}: 2 processes", f"{name} within {difference:.0e}")


def test_the_finished_run_is_evaluated(whole: Run, place):
    run(f"test.py {small(config.TestConfig, out_dir=whole.folder.name, **place)}", whole.folder.parent)
    (report,) = whole.folder.glob("test_*.json")
    assert json.loads(report.read_text())["num_samples"] > 0


def test_what_was_validated_is_what_is_evaluated(place, tmp_path: Path):
    run(f"train.py {small(**place, max_steps='2', val_interval='2', limit_val_batches='1.0')}", tmp_path)
    folder = run_dir(tmp_path)
    options = small(config.TestConfig, out_dir=folder.name, **place)
    run(f"test.py {options} --split val --checkpoint last", tmp_path)
    (path,) = folder.glob("test_val_*.json")
    results = json.loads(path.read_text())["results"]
    validated = history(folder)
    common = [name for name in results if f"step 2, val/{name}" in validated]
    assert common != []
    for name in common:
        assert_close(
            [results[name]],
            column(validated, f"val/{name}"),
            1e-5,
            f"{name} of test.py",
            'state["model"] of train.py is not the model that is validated, or a validation depends on what a '
            "checkpoint does not have.",
        )
    shown(f"{words(place)}: test.py", "what was validated is what is evaluated")


# ---- options


@pytest.mark.parametrize("script, cls", [("train.py", config.TrainConfig), ("test.py", config.TestConfig)])
def test_every_option_has_a_valid_default_and_is_in_the_help(script: str, cls: type, tmp_path: Path):
    cls()  # raises ConfigError if a default is not valid
    words = run(f"{script} --help", tmp_path).stdout.split()
    assert [name for name in values_of(cls()) if f"--{name}" not in words] == []


def test_the_defaults_can_be_written_and_read():
    assert cli.config_of(config.TrainConfig, cli.to_yaml(config.TrainConfig())) == config.TrainConfig()


def test_a_run_has_the_options_that_were_given(whole: Run, place, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)  # as in the run
    given = cli.parse_train(config.TrainConfig, small(**place).split())
    written = cli.read_config(config.TrainConfig, whole.folder)
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
