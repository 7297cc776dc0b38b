"""Tests of this project, whatever its model, data, loss, loop, options and defaults are: none of them knows a loss, a
count or an option that you may change. They start the real programs in small runs on the CPU, which takes less than a
minute with the template's own model.

python -m pytest tests/test_project.py
"""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import zygote  # noqa: E402

import cli  # noqa: E402
import config  # noqa: E402

# The options of a run of 10 steps, in epochs of 4. A step has two micro-batches. Every step is logged; 5 and 10 are
# validated; 3, 6, 9 and 10 are saved. Add what your project needs, such as a data_dir, or a size for a large model.
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
MEASURED = {"samples_per_second", "data_wait", "peak_memory_mb"}

# Python imports a module of this name when it starts. This one kills the process when it is about to rename its third
# checkpoint, which is in the middle of an epoch. A kill from outside might come after the end of so short a run.
SITECUSTOMIZE = """
import os, pathlib, signal, sys

renamed = []

def watch(event, args):
    if event == "os.rename" and pathlib.Path(os.fsdecode(args[1])).parent.name == "checkpoints":
        renamed.append(args[1])
        if len(renamed) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
"""


def small(cls: type = config.TrainConfig, **changed: str) -> str:
    """The options of a small run. Those that train.py or test.py does not have are left out."""
    known = config.values_of(cls())
    return " ".join(f"--{name} {value}" for name, value in (SMALL | changed).items() if name in known)


def environment() -> dict[str, str]:
    """That of this process, without the variables of launchers and loggers that may be around the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "LT_", "SLURM_"))}


def run(command: str, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Runs `train.py ...` or `test.py ...` in a process of its own, and checks the exit code."""
    script, *options = command.split()
    process = zygote.popen(
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a run that was left alone."""
    cwd = tmp_path_factory.mktemp("whole")
    run(f"train.py {small()}", cwd)
    return run_dir(cwd)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """The directory of the same run, killed in the middle and resumed."""
    cwd = tmp_path_factory.mktemp("resumed")
    (cwd / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = f"{cwd}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run(f"train.py {small()}", cwd, code=-signal.SIGKILL, PYTHONPATH=path)
    folder = run_dir(cwd)
    assert any(folder.glob("checkpoints/*.ckpt")) and not cli.is_finished(folder)
    run(f"train.py --resume {folder.name}", cwd)
    return folder


# ---- training


def test_fast_run_tries_a_whole_run_with_a_resume_and_leaves_nothing(tmp_path: Path):
    printed = run(f"train.py {small()} --fast_run", tmp_path).stdout
    assert config.TrainConfig().monitor in printed  # so it has validated
    assert "after 1 of 2 steps" in printed and "after 2 of 2 steps" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("files", ["model.pt", "checkpoints/*.ckpt"])
def test_a_run_that_was_killed_and_resumed_has_the_same_bits(files: str, whole: Path, resumed: Path):
    """If this fails, a step depends on what a resume does not restore: a value that is not in `state` of train.py, or
    random numbers that are not seeded for each step."""
    names = sorted(str(path.relative_to(whole)) for path in whole.glob(files))
    assert names == sorted(str(path.relative_to(resumed)) for path in resumed.glob(files)) != []
    for name in names:
        expected = bits(whole / name)
        found = bits(resumed / name)
        assert found.keys() == expected.keys()
        assert [value for value in expected if found[value] != expected[value]] == []


def test_a_run_that_was_killed_and_resumed_has_the_same_history(whole: Path, resumed: Path):
    rows = history(whole)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 11)]
    assert history(resumed) == rows


def test_two_processes_train_like_one(whole: Path, tmp_path: Path):
    """One process computes the two micro-batches of a step in turn, two compute them at once, with the same samples and
    random numbers. Only the training loss is compared: in a validation, two processes have other batches than one, so
    other random numbers, and BatchNorm has the statistics of the first process."""
    run(f"train.py {small(devices='2')}", tmp_path)
    one = history(whole)
    two = history(run_dir(tmp_path))
    assert [row["step"] for row in two] == [row["step"] for row in one]
    losses = [float(row["train/loss"]) for row in one]
    # Rounding is 1e-7 of the loss, and grows in 10 steps, most of all with ReLUs or an adversary. Other samples, or
    # gradients that are not averaged, change it by more than 1e-3. The largest loss is the scale: one may be about 0.
    tolerance = 1e-3 * max(map(abs, losses))
    assert [float(row["train/loss"]) for row in two] == pytest.approx(losses, rel=0, abs=tolerance)


def test_the_finished_run_is_evaluated(whole: Path):
    run(f"test.py {small(config.TestConfig, out_dir=whole.name)}", whole.parent)
    (report,) = whole.glob("test_*.json")
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


def test_a_run_has_the_options_that_were_given(whole: Path, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)  # as in the run
    given = cli.parse_train(small().split())
    written = cli.read_config(whole)
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
