"""What the loggers keep, and what a run records about itself."""

import csv
import importlib.metadata
import json
import math
import platform
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ON_2, REPO, SMALL, kill_group, run, run_dir, start, wait_for

LONG = (
    "train.py --accelerator cpu --epochs 20 --limit_train_batches 8 --limit_val_batches 2 --width 4 "
    "--num_sanity_val_steps 1 --log_per_epoch 4 --checkpoint_frequency 0.25"
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A run with the default loggers, killed in mid-epoch, resumed and finished."""
    cwd = tmp_path_factory.mktemp("resumed")
    process = start(LONG, cwd)
    wait_for(lambda: process.poll() is not None or any(cwd.glob("*/checkpoints/step-*2.ckpt")))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run("train.py --resume auto", cwd)
    return run_dir(cwd)


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> tuple[str, Path]:
    """The output and the directory of a run with wandb, without a key."""
    cwd = tmp_path_factory.mktemp("offline")
    done = run(f"train.py {SMALL} --logger_name csv wandb --log_interval 3 --comment a-note", cwd, HOME=str(cwd))
    return done.stdout, run_dir(cwd)


@pytest.fixture(scope="module")
def csv_only(tmp_path_factory) -> tuple[set[str], Path]:
    """The modules that a run with the csv logger alone imports, and its directory."""
    cwd = tmp_path_factory.mktemp("csv_only")
    done = run(f"train.py {SMALL} --logger_name csv --log_per_epoch 3", cwd, PYTHONPROFILEIMPORTTIME="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}, run_dir(cwd)


def rows(folder: Path) -> list[dict]:
    """The rows of metrics.csv, as numbers; a step without a validation has no val/..."""
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in rows(folder)]


# ---- csv


def test_csv_has_a_row_per_logged_step_also_after_a_kill(resumed):
    assert steps(resumed) == list(range(2, 161, 2))


def test_rows_have_the_keys_of_the_plan(resumed):
    training = {"step", "epoch", "train/loss", "train/grad_norm", "lr", "samples_per_second", "data_wait"}
    for row in rows(resumed):
        assert set(row) == training | ({"val/loss", "val/accuracy"} if row["step"] % 8 == 0 else set())
        assert row["epoch"] == row["step"] / 8
        assert row["samples_per_second"] > 0 and 0 <= row["data_wait"] <= 1


def test_log_interval_counts_steps_and_adds_the_ends_of_epochs(offline):
    assert steps(offline[1]) == [3, 4, 6, 8, 9, 12, 15, 16, 18, 20]


def test_log_per_epoch_spreads_over_the_epoch_and_ends_with_it(csv_only):
    logged = steps(csv_only[1])
    assert len(logged) == 3 * 5 == len(set(logged))
    for epoch in range(5):
        assert logged[3 * epoch + 2] == 4 * (epoch + 1)
        assert logged[3 * epoch] > 4 * epoch


def test_a_logged_loss_is_the_mean_over_the_steps_since_the_last(csv_only, offline):
    def sum_per_epoch(folder: Path) -> list[float]:
        sums, last = [0.0] * 5, 0
        for row in rows(folder):
            sums[(int(row["step"]) - 1) // 4] += row["train/loss"] * (row["step"] - last)
            last = row["step"]
        return sums

    assert rows(csv_only[1])[0]["train/loss"] == pytest.approx(math.log(10), abs=0.1)  # 10 classes, nothing learned
    # The two runs differ in nothing but the steps that they log.
    assert sum_per_epoch(csv_only[1]) == pytest.approx(sum_per_epoch(offline[1]), rel=1e-6)


# ---- tensorboard


def read_tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "logs" / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return board


def test_tensorboard_has_the_steps_and_values_of_the_csv_each_once(resumed):
    board, expected = read_tensorboard(resumed), rows(resumed)
    assert set(board.Tags()["scalars"]) == {name for row in expected for name in row} - {"step"}
    for name in board.Tags()["scalars"]:
        curve = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in curve] == [row["step"] for row in expected if name in row], name
        values = torch.tensor([row[name] for row in expected if name in row], dtype=torch.float32)
        torch.testing.assert_close(torch.tensor([value for _, value in curve]), values, rtol=1e-6, atol=0)


def test_tensorboard_has_the_options_as_hyperparameters(resumed):
    start_info = read_tensorboard(resumed).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    for option in (b"base_lr", b"effective_batch_size", b"precision", b"32-true"):
        assert option in start_info


# ---- wandb


def wandb_records(path: Path) -> Iterator:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format. (wandb has no reader in Python any more.)"""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record, position, block = path.read_bytes(), b"", 7, 32768
    while position + 7 <= len(data):
        if (left := block - position % block) < 7:  # no header fits into the rest of a block
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)  # behind a checksum
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_without_a_key_keeps_an_offline_run_with_the_rows_of_the_csv(offline):
    (path,) = offline[1].glob("logs/wandb/offline-run-*/*.wandb")
    records = list(wandb_records(path))
    history = [values(record.history.item) for record in records if record.HasField("history")]
    expected = rows(offline[1])
    assert [row["_step"] for row in history] == [row["step"] for row in expected]
    for row, other in zip(history, expected, strict=True):
        assert {name: value for name, value in row.items() if not name.startswith("_")} == pytest.approx(
            {name: value for name, value in other.items() if name != "step"}
        )


def test_wandb_has_the_options_project_and_comment(offline):
    (path,) = offline[1].glob("logs/wandb/offline-run-*/*.wandb")
    records = list(wandb_records(path))
    (started,) = [record.run for record in records if record.HasField("run")]
    assert (started.run_id, started.project, started.notes) == (offline[1].name, "fabric-template", "a-note")
    config = values(started.config.update)
    for record in records:
        if record.HasField("config"):
            config |= values(record.config.update)
    assert (config["width"], config["base_lr"], config["log_interval"]) == (4, 4e-3, 3)


def test_wandb_offline_says_how_to_upload(offline):
    (folder,) = offline[1].glob("logs/wandb/offline-run-*")
    assert f"wandb sync {folder.relative_to(offline[1].parent)}" in offline[0]


def test_a_killed_and_resumed_wandb_run_has_each_step_once_and_keeps_its_id(offline, tmp_path):
    cwd = tmp_path
    process = start(f"{LONG} --logger_name csv wandb", cwd, HOME=str(cwd))
    wait_for(lambda: process.poll() is not None or any(cwd.glob("2*/checkpoints/step-*2.ckpt")))
    kill_group(process)
    process.communicate()
    run("train.py --resume auto", cwd, HOME=str(cwd))
    (path,) = run_dir(cwd).glob("logs/wandb/offline-run-*/*.wandb")
    assert path.name == f"run-{run_dir(cwd).name}.wandb"
    history = [values(record.history.item) for record in wandb_records(path) if record.HasField("history")]
    assert [row["_step"] for row in history] == steps(run_dir(cwd)) == list(range(2, 161, 2))
    for row, other in zip(history, rows(run_dir(cwd)), strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-12)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_chosen_is_not_imported(csv_only, package):
    modules, folder = csv_only
    assert "torch" in modules
    assert not [name for name in modules if name.split(".")[0] == package]
    assert not (folder / "logs" / package).exists()


# ---- provenance


def test_provenance_tells_what_ran_where_with_what(resumed):
    first, second = sorted((resumed / "provenance").glob("*.json"))
    facts = json.loads(first.read_text())
    assert facts["command"][-len(LONG.split()) + 1 :] == LONG.split()[1:]
    assert json.loads(second.read_text())["command"][-2:] == ["--resume", "auto"]
    assert facts["host"] == platform.node()
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert {"lightning", "torchmetrics", "numpy"} <= set(facts["packages"])
    assert "1" in facts["devices"] and "cpu" in facts["devices"]


def test_provenance_has_the_commit_of_the_code_wherever_it_is_started(resumed):
    git = subprocess.run(["git", "-C", REPO, "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        pytest.skip("the code is in no git repository")
    facts = json.loads(min((resumed / "provenance").glob("*.json")).read_text())
    assert facts["git_commit"] == git.stdout.strip()


def test_each_process_can_have_a_file_of_what_it_prints(tmp_path):
    done = run(f"train.py {SMALL} --epochs 1 {ON_2} --logger_name csv --rank_logs logs", tmp_path)
    first, second = (path.read_text() for path in sorted((tmp_path / "logs").glob("rank-000?-*.log")))
    assert "rank 0 is process" in first and "finished after 4 of 4 steps" in first
    assert "rank 1 is process" in second and "finished" not in second
    assert "finished after 4 of 4 steps" in done.stdout  # on the terminal, too
