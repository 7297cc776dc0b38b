"""A run that was killed, or asked to stop, goes on as if nothing had happened."""

import csv
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SMALL, run, run_dir, start, wait_for

from config import TrainConfig

# 30 epochs of 8 steps, saved every second step, two micro-batches a step. The exponential schedule does not depend on
# the number of epochs, so that an extended run can be compared with one that was long from the start.
LONG = (
    "train.py --accelerator cpu --epochs 30 --limit_train_batches 8 --limit_val_batches 2 --num_sanity_val_steps 0 "
    "--width 4 --micro_batch_size 32 --lr_schedule exponential --checkpoint_frequency 0.25 --logger_name csv"
)
ON_2 = "--devices 2 --strategy ddp"
PREEMPTED = 75


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Where a run was never interrupted. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("whole")
    run(LONG, cwd)
    return cwd


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Where a run was killed in the middle of an epoch. To be copied."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(LONG, cwd, kill_group).returncode == -signal.SIGKILL
    return cwd


def interrupt(command: str, cwd: Path, stop, after: int = 16) -> subprocess.CompletedProcess:
    """Starts the command and calls stop(process) once a checkpoint of the middle of an epoch is there."""
    process = start(command, cwd)
    try:
        wait_for(lambda: process.poll() is not None or (newest(cwd) > after and newest(cwd) % 8 in (2, 4)))
        assert process.poll() is None, process.communicate()
        stop(process)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill_group(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def terminate(process: subprocess.Popen) -> None:
    process.terminate()


def terminate_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def terminate_rank_1(process: subprocess.Popen) -> None:
    (rank_1,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(rank_1), signal.SIGTERM)


def newest(cwd: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem[5:]) for path in cwd.glob("*/checkpoints/step-*.ckpt")), default=0)


def assert_stopped_and_saved(done: subprocess.CompletedProcess, cwd: Path) -> None:
    """The run says that it was stopped, after which step, and how to go on; and has a checkpoint of that step."""
    assert done.returncode == PREEMPTED, done.stderr
    step = int(re.search(r"stopped by a signal after (?:step )?(\d+)", done.stdout)[1])
    assert step == newest(cwd) < 240
    assert f"--resume {run_dir(cwd).name}" in done.stdout
    assert not (run_dir(cwd) / "model.pt").exists()
    assert "Traceback" not in done.stderr


def weights(cwd: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir(cwd) / "model.pt", weights_only=True)


def history(cwd: Path) -> list[dict]:
    """The rows of metrics.csv without what is measured in seconds."""
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [
            {k: v for k, v in row.items() if k not in ("samples_per_second", "data_wait")}
            for row in csv.DictReader(file)
        ]


def assert_same_run(cwd: Path, other: Path) -> None:
    """Weights equal in every bit, and logs in every digit."""
    torch.testing.assert_close(weights(cwd), weights(other), atol=0, rtol=0)
    assert history(cwd) == history(other)


def snapshot(cwd: Path) -> dict:
    """Contents and times of all files."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cwd.rglob("*") if path.is_file()}


def copied(cwd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cwd, tmp_path / "copy"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# ---- interrupted and resumed


def test_killed_in_mid_epoch_and_resumed_is_the_same_run(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    done = run(f"train.py --resume {run_dir(cwd).name}", cwd)
    assert re.search(rf"resumed from .*step-{newest(killed):08d}\.ckpt", done.stdout)
    assert_same_run(cwd, whole)


def test_sigterm_saves_and_resume_auto_goes_on_in_the_same_directory(whole, tmp_path):
    command = f"{LONG} --resume auto"  # starts a new run where there is none to go on with
    assert_stopped_and_saved(interrupt(command, tmp_path, terminate), tmp_path)
    run(command, tmp_path)
    assert_same_run(tmp_path, whole)


def test_sigterm_to_the_group_with_workers_saves_and_goes_on(whole, tmp_path):
    assert_stopped_and_saved(interrupt(f"{LONG} --num_workers 2", tmp_path, terminate_group), tmp_path)
    run(f"train.py --resume {run_dir(tmp_path)}", tmp_path)
    assert_same_run(tmp_path, whole)


def test_2_processes_stop_together_are_killed_and_go_on(tmp_path):
    whole, cwd = tmp_path / "whole", tmp_path / "interrupted"
    whole.mkdir()
    cwd.mkdir()
    uninterrupted = start(f"{LONG} {ON_2}", whole)
    assert_stopped_and_saved(interrupt(f"{LONG} {ON_2}", cwd, terminate_rank_1), cwd)
    resume = f"train.py --resume {run_dir(cwd).name}"
    assert interrupt(resume, cwd, kill_group, after=newest(cwd)).returncode == -signal.SIGKILL
    run(resume, cwd)
    assert uninterrupted.communicate() and uninterrupted.returncode == 0
    assert_same_run(cwd, whole)


def test_a_run_goes_on_with_2_processes_in_mid_epoch(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    run(f"train.py --resume auto {ON_2}", cwd)
    torch.testing.assert_close(weights(cwd), weights(whole), atol=1e-5, rtol=0)
    assert [row["step"] for row in history(cwd)] == [row["step"] for row in history(whole)]
    for row, expected in zip(history(cwd), history(whole), strict=True):
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert float(row[name]) == pytest.approx(float(expected[name]), abs=1e-5)


# ---- finished runs and changed options


def test_a_finished_run_is_extended_and_lists_what_changed(whole, tmp_path):
    run(f"{LONG} --epochs 3", tmp_path)
    done = run(f"train.py --resume {run_dir(tmp_path).name} --epochs 30 --num_checkpoint_keep 2", tmp_path)
    assert_same_run(tmp_path, whole)
    assert len(list(tmp_path.glob("*/checkpoints/step-*.ckpt"))) == 2
    config = yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())
    assert set(config) == {field.name for field in fields(TrainConfig)} - {"resume", "config_path"}
    assert (config["epochs"], config["num_checkpoint_keep"], config["micro_batch_size"]) == (30, 2, 32)
    for option, old, new in (("epochs", 3, 30), ("num_checkpoint_keep", 3, 2)):
        assert re.search(rf"--{option} {new} .*\b{old}$", done.stdout, re.MULTILINE), f"{option} is not listed"


def test_resuming_a_finished_run_says_so_and_changes_nothing(whole, tmp_path):
    cwd = copied(whole, tmp_path)
    before = snapshot(cwd)
    assert "is finished" in run(f"train.py --resume {run_dir(cwd).name}", cwd).stdout
    assert snapshot(cwd) == before


# ---- damaged checkpoints


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_taken(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    *_, older, broken = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))
    truncate(broken)
    done = run("train.py --resume auto", cwd)
    assert broken.name in done.stderr and "damaged" in done.stderr
    assert re.search(rf"resumed from .*{older.name}", done.stdout)
    assert_same_run(cwd, whole)


def test_without_a_whole_checkpoint_nothing_is_done_and_nothing_deleted(killed, tmp_path):
    cwd = copied(killed, tmp_path)
    for path in cwd.glob("*/checkpoints/*.ckpt"):
        truncate(path)
    before = snapshot(cwd)
    error = run(f"train.py --resume {run_dir(cwd).name}", cwd, code=1).stderr
    assert re.fullmatch(r"train.py: error: no checkpoint in \S+ can be read.*", error.splitlines()[-1])
    assert "Traceback" not in error
    assert snapshot(cwd) == before


def test_every_checkpoint_loads_as_plain_values(whole, killed):
    paths = [*whole.glob("*/checkpoints/*.ckpt"), *killed.glob("*/checkpoints/*.ckpt")]
    assert len(paths) >= 8
    for path in paths:
        state = torch.load(path, weights_only=True)
        assert path.stem in ("best", f"step-{state['step']:08d}")


# ---- run directories


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path):
    taken = [tmp_path / time.strftime("%Y%m%d-%H%M%S-twin", time.localtime(time.time() + s)) for s in range(120)]
    for path in taken:
        path.mkdir()
    twins = [start(f"train.py {SMALL} --epochs 1 --out_dir twin", tmp_path) for _ in range(2)]
    for twin in twins:
        assert (twin.communicate(timeout=120), twin.returncode)[1] == 0
    made = [path for path in tmp_path.iterdir() if path not in taken]
    assert len(made) == 2
    for path in made:
        assert re.fullmatch(r"\d{8}-\d{6}-twin-[12]", path.name)
        assert (path / "model.pt").is_file()
    assert not any(any(path.iterdir()) for path in taken)


def test_an_optimizer_option_beside_resume_wins_over_the_checkpoint(tmp_path):
    run(f"train.py {SMALL} --logger_name csv", tmp_path)
    run("train.py --resume train_out --epochs 6 --weight_decay 0.5", tmp_path)
    state = torch.load(sorted(run_dir(tmp_path).glob("checkpoints/step-*.ckpt"))[-1], weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
