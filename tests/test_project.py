"""Tests of this project, whatever its model, data, loss, loop, options and defaults are: none of them knows a loss, a
count or an option that you may change. They start the real programs in small runs on the CPU, which takes less than two
minutes with the template's own model.

python -m pytest tests/test_project.py

A run has ten steps. Make thresholds, delays and warm-ups of your own small in SMALL: what acts later is not tried.
"""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import zygote  # noqa: E402

import cli  # noqa: E402
import config  # noqa: E402

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
    "limit_val_batches": "2",
    "log_interval": "1",
    "val_interval": "5",
    "checkpoint_interval": "3",
    "logger_name": "csv",
}
# The columns of metrics.csv that are measured, and differ from run to run. If you log another one, add it.
MEASURED = {"samples_per_second", "data_wait", "peak_memory_mb", "tokens_per_second", "mfu"}

# How far the losses, and the results of a validation, of two processes may be from those of one: rounding, relative to
# the largest. It grows where a network has kinks, such as ReLU, or an adversary. With BatchNorm, whose statistics are
# those of the first process, give the second a larger value, or take recipes/features/sync_batchnorm.patch.
TRAIN_TOLERANCE = 1e-6
VAL_TOLERANCE = 1e-6
WORKERS = "2"  # data workers of one of the resumes; 0 where a dataset cannot have any
KILL = "step-00000009.ckpt"  # is not written any more


def small(cls: type = config.TrainConfig, **changed: str) -> str:
    """The options of a small run. Those that train.py or test.py does not have are left out."""
    known = config.values_of(cls())
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
    assert done.returncode == code, f"{command}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_dir(cwd: Path) -> Path:
    """The one run directory in a folder."""
    (found,) = cwd.glob("*/config.yaml")
    return found.parent


def history(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, without what is measured."""
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in MEASURED} for row in csv.DictReader(file)]


def bits(path: Path) -> dict[str, Any]:
    """Every value in model.pt or a checkpoint by name; of a tensor, its bytes. What a checkpoint has about itself, such
    as the seconds of the run, is left out."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            raw = value.contiguous().flatten().view(torch.uint8)
            yield name, (value.dtype, value.shape, raw.numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from leaves(item, f"{name}[{key!r}]")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from leaves(item, f"{name}[{number}]")
        else:
            yield name, repr(value)

    saved = torch.load(path, "cpu", weights_only=True)
    saved.pop("checkpoint", None)
    return dict(leaves(saved, path.name))


def contents(folder: Path) -> dict[str, Any]:
    """What a run has written, by path; without what is measured, and what is about the process."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        about_process = name.startswith(("provenance/", "events.", "test_", "train.log", ".lock"))
        if path.is_dir() or about_process:
            continue
        if path.suffix in (".pt", ".ckpt"):
            found |= {f"{name}: {key}": value for key, value in bits(path).items()}
        elif path.name == "metrics.csv":
            found |= {f"{name}: step {row['step']}": row for row in history(folder)}
        elif path.name == "summary.json":
            found[name] = json.loads(path.read_text())
            for measured in ("seconds", "last"):  # the last results are in metrics.csv, too
                found[name].pop(measured)
        elif path.name == "config.yaml":
            options = config.values_of(cli.read_config(folder))
            options.pop("num_workers", None)  # may change on a resume
            found |= {f"--{name}": value for name, value in options.items()}
        else:
            found[name] = path.read_bytes()
    return found


def inputs(record: Path) -> dict[int, list[str]]:
    """What compute_loss got in the training steps: for the number of each micro-batch the lines of recorded.py."""
    found = defaultdict(list)
    for line in record.read_text().splitlines():
        number, _, checksums = line.partition(" ")
        found[int(number)].append(checksums)
    return dict(found)


def differing(found: dict, expected: dict) -> list:
    """The keys whose values differ."""
    names = {**expected, **found}  # in this order
    return [name for name in names if name not in found or name not in expected or found[name] != expected[name]]


class Run(NamedTuple):
    folder: Path
    record: Path

    @classmethod
    def train(cls, cwd: Path, options: str, kill: str = "-", shift: int = 0, **more) -> "Run":
        """A run in an empty folder."""
        record = cwd / "record"
        code = 0 if kill == "-" else -signal.SIGKILL
        run(f"tests/recorded.py {record} {kill} {shift} {options}", cwd, code, **more)
        return cls(run_dir(cwd), record)

    def resume(self, cwd: Path, options: str = "", start: Path | None = None, **more) -> "Run":
        """A copy of the run, resumed in another folder."""
        folder = cwd / self.folder.name
        shutil.copytree(self.folder, folder)
        record = cwd / "record"
        run(f"tests/recorded.py {record} - 0 --resume {folder} {options}", start or cwd, **more)
        return Run(folder, record)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """A run that was left alone."""
    return Run.train(tmp_path_factory.mktemp("whole"), small())


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Run:
    """The same run, killed in step 9."""
    found = Run.train(tmp_path_factory.mktemp("killed"), small(), KILL)
    assert not cli.is_finished(found.folder)
    return found


@pytest.fixture(scope="module", params=["resumed", "elsewhere"])
def resumed(request, killed: Run, tmp_path_factory) -> Run:
    """The run that was killed, resumed; the second time with data workers, by a fresh interpreter with other hashes of
    strings, in another time zone and folder."""
    cwd = tmp_path_factory.mktemp(request.param)
    if request.param == "resumed":
        return killed.resume(cwd)
    start = tmp_path_factory.mktemp("start")
    workers = f"--num_workers {WORKERS}" if "num_workers" in config.values_of(config.TrainConfig()) else ""
    return killed.resume(cwd, workers, start, is_fresh=True, PYTHONHASHSEED="7", TZ="Asia/Tokyo", LC_ALL="C")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Run:
    """The run on two processes."""
    return Run.train(tmp_path_factory.mktemp("two"), small(devices="2"))


# ---- training


def test_fast_run_tries_a_whole_run_with_a_resume_and_leaves_nothing(tmp_path: Path):
    printed = run(f"train.py {small()} --fast_run", tmp_path).stdout
    assert config.TrainConfig().monitor in printed  # so it has validated
    assert "after 1 of 2 steps" in printed and "after 2 of 2 steps" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_and_resumed_has_the_same_inputs(whole: Run, resumed: Run):
    """If this fails, the batches or further arguments of compute_loss are others after a resume: a second loader that
    begins anew, a generator of one's own, a file that data workers share, or an order that depends on a set."""
    expected = inputs(whole.record)
    found = inputs(resumed.record)
    assert found, "compute_loss of train.py was not called after set_seed"
    assert max(found) == max(expected)
    assert differing(found, {number: expected[number] for number in expected if number >= min(found)}) == []


@pytest.mark.parametrize("files", ["model.pt", "checkpoints/*.ckpt"])
def test_a_run_that_was_killed_and_resumed_has_the_same_bits(files: str, whole: Run, resumed: Run):
    """If this fails, a step depends on what a resume does not restore: a value that is not in `state` of train.py, or
    random numbers that are not seeded for each step."""
    names = sorted(str(path.relative_to(whole.folder)) for path in whole.folder.glob(files))
    assert names == sorted(str(path.relative_to(resumed.folder)) for path in resumed.folder.glob(files)) != []
    for name in names:
        assert differing(bits(resumed.folder / name), bits(whole.folder / name)) == []


def test_a_run_that_was_killed_and_resumed_has_the_same_history(whole: Run, resumed: Run):
    rows = history(whole.folder)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 11)]
    assert history(resumed.folder) == rows


def test_a_run_that_was_killed_and_resumed_has_the_same_files(whole: Run, resumed: Run):
    """If this fails for a file of your own, it is written from what a resume does not restore, or is written twice."""
    expected = contents(whole.folder)
    found = contents(resumed.folder)
    assert differing(found, expected) == []


def test_two_processes_get_the_inputs_of_one(whole: Run, two: Run):
    """One process computes the two micro-batches of a step in turn, two compute them at once."""
    assert differing(inputs(two.record), inputs(whole.record)) == []


def test_two_processes_train_like_one(whole: Run, two: Run):
    """If this fails, the processes draw other random numbers than one process, or gradients are not averaged."""
    one = history(whole.folder)
    other = history(two.folder)
    assert [row["step"] for row in other] == [row["step"] for row in one]
    losses = [float(row["train/loss"]) for row in one]
    tolerance = TRAIN_TOLERANCE * max(map(abs, losses))  # one may be about 0
    assert [float(row["train/loss"]) for row in other] == pytest.approx(losses, rel=0, abs=tolerance)


def test_two_processes_validate_like_one(whole: Run, two: Run, tmp_path: Path):
    """If this fails, a metric is of the samples of one process alone. Not compared is what another seed changes: two
    processes have other batches than one, so other random numbers."""
    one = history(whole.folder)
    other = history(two.folder)
    shifted = history(Run.train(tmp_path, small(), shift=1).folder)
    for name in (name for name in one[-1] if name.startswith("val/")):
        expected = [float(row[name]) for row in one if row[name]]
        if [float(row[name]) for row in shifted if row[name]] != pytest.approx(expected, rel=1e-6, nan_ok=True):
            print(f"{name}: random validation, not compared")
            continue
        tolerance = VAL_TOLERANCE * max(1.0, *map(abs, expected))  # a score may be about 0
        found = [float(row[name]) for row in other if row[name]]
        assert found == pytest.approx(expected, rel=0, abs=tolerance, nan_ok=True), name


def test_the_finished_run_is_evaluated(whole: Run):
    run(f"test.py {small(config.TestConfig, out_dir=whole.folder.name)}", whole.folder.parent)
    (report,) = whole.folder.glob("test_*.json")
    assert json.loads(report.read_text())["num_samples"] > 0


def test_what_was_validated_is_what_is_evaluated(tmp_path: Path):
    """If this fails, state["model"] of train.py is not the model that is validated, or a validation depends on what a
    checkpoint does not have."""
    run(f"train.py {small(max_steps='2', val_interval='2', limit_val_batches='1.0')}", tmp_path)
    folder = run_dir(tmp_path)
    run(f"test.py {small(config.TestConfig, out_dir=folder.name)} --split val --checkpoint last", tmp_path)
    (path,) = folder.glob("test_val_*.json")
    results = json.loads(path.read_text())["results"]
    last = history(folder)[-1]
    common = [name for name in results if f"val/{name}" in last]
    assert common != []
    validated = [float(last[f"val/{name}"]) for name in common]
    assert [results[name] for name in common] == pytest.approx(validated, rel=1e-5, nan_ok=True)


# ---- options


@pytest.mark.parametrize("script, cls", [("train.py", config.TrainConfig), ("test.py", config.TestConfig)])
def test_every_option_has_a_valid_default_and_is_in_the_help(script: str, cls: type, tmp_path: Path):
    cls()  # raises ConfigError if a default is not valid
    words = run(f"{script} --help", tmp_path).stdout.split()
    assert [name for name in config.values_of(cls()) if f"--{name}" not in words] == []


def test_the_defaults_can_be_written_and_read():
    assert cli.config_of(cli.to_yaml(config.TrainConfig())) == config.TrainConfig()


def test_a_run_has_the_options_that_were_given(whole: Run, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)  # as in the run
    given = cli.parse_train(small().split())
    written = cli.read_config(whole.folder)
    assert written == given


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
