"""What the loggers keep, and what a run records about itself."""

import csv
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from edits import copy_programs, insert_after
from helpers import (
    MEASURED,
    PREEMPTED,
    REPO,
    SMALL,
    call,
    free_port,
    last_summary,
    newest,
    read_tensorboard,
    run,
    run_dir,
    start,
    wait_for,
)
from lightning.fabric import Fabric
from mistakes import refuses

from config import TrainConfig
from runtime.loggers import WandbLogger
from runtime.source import write_provenance

LONG = (
    "train.py --accelerator cpu --epochs 20 --limit_train_batches 8 --limit_val_batches 2 --width 4 "
    "--num_sanity_val_steps 1 --log_interval 1 --checkpoint_interval 40"
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A run with the default loggers, killed when it had logged more than it had saved, resumed and finished."""
    cwd = tmp_path_factory.mktemp("resumed")
    process = start(LONG, cwd)

    def is_frozen_between() -> bool:
        process.send_signal(signal.SIGSTOP)
        if newest(cwd) and steps(run_dir(cwd))[-1] > newest(cwd):
            return True
        process.send_signal(signal.SIGCONT)
        return process.poll() is not None

    wait_for(is_frozen_between)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run("train.py --resume auto", cwd)  # TensorBoard's files have the second of the start in their names
    return run_dir(cwd)


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> tuple[str, Path]:
    """The output and the directory of a run with wandb, without a key."""
    cwd = tmp_path_factory.mktemp("offline")
    options = "--logger_name csv wandb --log_interval 3 --comment a-note --out_dir lr=0.1,wd=0"
    done = run(f"train.py {SMALL} {options}", cwd, HOME=str(cwd))
    return done.stdout + done.stderr, run_dir(cwd, "lr=0.1,wd=0")


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


# ---- csv and TensorBoard


def test_rows_are_each_once_in_csv_and_tensorboard_also_after_a_kill(resumed):
    """They have the keys of the plan; without what is measured where a resume has validated and logged the step of its
    checkpoint again. TensorBoard calls a run by its directory, and has losses and metrics first: all else is under
    `vitals`, which is sorted after `train` and `val`."""
    expected = rows(resumed)
    assert steps(resumed) == list(range(1, 161))
    again = int(re.search(r"^resumed from .*/step-(\d+).ckpt$", (resumed / "train.log").read_text(), re.MULTILINE)[1])
    training = {"step", "epoch", "train/loss", "train/grad_norm", "lr"}
    for row in expected:
        columns = training | ({"val/loss", "val/accuracy", "best"} if row["step"] % 8 == 0 else set())
        assert set(row) == columns | (set() if row["step"] == again else {*MEASURED})
        assert row["epoch"] == row["step"] / 8
        if row["step"] != again:
            assert row["samples_per_second"] > 0 and 0 <= row["data_wait"] <= 1 and row["peak_memory_mb"] > 100

    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    assert [*EventMultiplexer().AddRunsFromDirectory(str(resumed.parent)).Runs()] == [resumed.name]
    board = read_tensorboard(resumed)
    results = {"train/loss", "val/loss", "val/accuracy"}
    names = {name for row in expected for name in row if name != "step"}
    tags = {name if name in results else f"vitals/{name.removeprefix('train/')}": name for name in names}
    assert set(board.Tags()["scalars"]) == {*tags}
    for tag, name in tags.items():
        curve = [(event.step, event.value) for event in board.Scalars(tag)]
        assert [step for step, _ in curve] == [row["step"] for row in expected if name in row], name
        assert [value for _, value in curve] == pytest.approx([row[name] for row in expected if name in row], rel=1e-6)


def test_provenance_tells_what_ran_where_with_what(resumed):
    lines = [line for path in (resumed / "provenance").glob("*.txt") for line in path.read_text().splitlines()]
    for options in (shlex.join(LONG.split()[1:]), " --resume auto"):
        assert sum(line.endswith(options) for line in lines) == 1
    assert lines.count(f"1 x cpu on {platform.node()}") == 2
    assert lines.count(f"torch-{importlib.metadata.version('torch')}") == 2


REPLACED = """
if step in (10, 15):
    import shutil
    from pathlib import Path

    (path,) = Path().glob("*/logs/csv/metrics.csv")
    shutil.copy(path, "copy.csv")
    shutil.move("copy.csv", path) if step == 10 else path.unlink()
"""


def test_rows_go_on_in_a_csv_that_an_editor_has_replaced_or_somebody_has_deleted(tmp_path):
    """Which fails no checkpoint either, that comes before the next row."""
    program = insert_after(tmp_path / "program", "step is done", REPLACED)
    call(f"{program}/train.py {SMALL} --logger_name csv --log_interval 1 --max_steps 14", tmp_path)
    assert steps(run_dir(tmp_path)) == list(range(1, 15))
    call(f"{program}/train.py --resume auto --log_interval 16 --checkpoint_interval 1 --max_steps 16", tmp_path)
    assert steps(run_dir(tmp_path)) == [16]


def test_what_is_logged_when(csv_only, offline):
    """--log_interval counts steps, --log_per_epoch spreads over the epoch and ends with it; a validation and the last
    step are logged, too. A loss is the mean over the steps since the last row: the two runs differ in nothing but the
    steps that they log, so the sums up to the steps of both are the same."""
    assert steps(offline[1]) == [3, 4, 6, 8, 9, 12, 15, 16, 18, 20]
    assert all("train/loss" in row for row in rows(offline[1]))
    assert [int(row["step"]) for row in rows(offline[1]) if "val/loss" in row] == [4, 8, 12, 16, 20]
    logged = steps(csv_only[1])
    assert len(logged) == 3 * 5 == len(set(logged))
    for epoch in range(5):
        assert logged[3 * epoch + 2] == 4 * (epoch + 1)
        assert logged[3 * epoch] > 4 * epoch

    def sums(folder: Path) -> dict[float, float]:
        total, last, found = 0.0, 0, {}
        for row in rows(folder):
            if "train/loss" in row:
                total, last = total + row["train/loss"] * (row["step"] - last), row["step"]
                found[last] = total
        return found

    assert rows(csv_only[1])[0]["train/loss"] == pytest.approx(math.log(10), abs=0.1)  # 10 classes, nothing learned
    one, other = sums(csv_only[1]), sums(offline[1])
    common = sorted(one.keys() & other.keys())
    assert len(common) >= 5 and common[-1] == 20
    assert [one[step] for step in common] == pytest.approx([other[step] for step in common], rel=1e-6)


def test_a_logger_that_is_not_chosen_is_not_imported(csv_only):
    modules, folder = csv_only
    packages = {name.partition(".")[0] for name in modules}
    assert "torch" in packages and not {"wandb", "tensorboard"} & packages
    assert [path.name for path in (folder / "logs").iterdir()] == ["csv"] and not [*folder.glob("events.*")]


def test_a_package_that_is_missing_is_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "csv")
    refuses(f"train.py {SMALL} --logger_name csv wandb", tmp_path, "--logger_name wandb", "pip install wandb")


# ---- wandb


def wandb_records(path: Path) -> Iterator:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format. (wandb has no reader in Python any more.) After
    a part with a wrong checksum, as a full disk leaves it, the reader goes on in the next block, as LevelDB's does."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record, position, block = path.read_bytes(), None, 7, 32768
    while position + 7 <= len(data):
        left = block - position % block
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        end = position + 7 + length
        if left < 7 or checksum != zlib.crc32(data[position + 6 : end]):  # of the kind and the data
            record = record if left < 7 else None  # no header fits into the rest of a block
            position += left
            continue
        if kind in (1, 2):  # whole, or the first part
            record = b""
        if record is not None:
            record += data[position + 7 : end]
        if record is not None and kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = None
        position = end


def wandb_id(folder: Path) -> str:
    """The id of a run, which is random."""
    found = (folder / "logs" / "wandb_id").read_text()
    assert re.fullmatch("[0-9a-f]{8}", found)
    return found


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def records_of(folder: Path) -> list:
    """Those of the offline runs of a run directory, the first start first."""
    paths = sorted(folder.glob("logs/wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert {path.name for path in paths} == {f"run-{wandb_id(folder)}.wandb"}
    return [record for path in paths for record in wandb_records(path)]


def assert_rows_of_the_csv(records: list, folder: Path) -> None:
    history = [values(record.history.item) for record in records if record.HasField("history")]
    for row, other in zip(history, rows(folder), strict=True):
        assert row["_step"] == other.pop("step")
        assert {name: value for name, value in row.items() if not name.startswith("_")} == pytest.approx(other)


def exit_codes(records: list) -> list[int]:
    return [record.exit.exit_code for record in records if record.HasField("exit")]


def test_wandb_without_a_key_keeps_an_offline_run(offline):
    """With the rows of the csv, the options, project and comment; it says how to upload it."""
    printed, folder = offline
    records = records_of(folder)
    assert_rows_of_the_csv(records, folder)
    (started,) = [record.run for record in records if record.HasField("run")]
    assert (started.run_id, started.display_name) == (wandb_id(folder), folder.name)
    assert (started.project, started.notes) == ("fabric-template", "a-note")
    config = values(started.config.update)
    for record in records:
        if record.HasField("config"):
            config |= values(record.config.update)
    assert (config["width"], config["base_lr"], config["log_interval"]) == (4, 4e-3, 3)
    assert exit_codes(records) == [0]
    (path,) = folder.glob("logs/wandb/offline-run-*")
    assert re.search(rf"wandb sync \S*{path.relative_to(folder.parent)}", printed)


def test_wandb_without_a_connection_is_offline(tmp_path: Path):
    """With a key, as on a node of a cluster that has no network."""
    env = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    done = run(f"train.py {SMALL} --epochs 1 --logger_name csv wandb", tmp_path, HOME=str(tmp_path), **env)
    assert done.stdout.count("wandb is offline: ") == 1 and "Traceback" not in done.stderr
    assert_rows_of_the_csv(records_of(run_dir(tmp_path)), run_dir(tmp_path))


def test_wandb_has_a_row_before_the_next_one_and_its_id_is_not_that_of_the_seed(tmp_path: Path, monkeypatch):
    """With a step, wandb would by default keep a row until the next one: the last is lost to a kill. Two runs of one
    second and name, in different directories, have different ids: `wandb sync` would put them together."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folders = [tmp_path / root / "20260101-000000-train_out" for root in "ab"]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
        Fabric(accelerator="cpu", devices=1).seed_everything(42, verbose=False)
        logger = WandbLogger(folder, 0, TrainConfig())
        logger.log_metrics({"train/loss": 0.5}, 3)
        wait_for(lambda at=folder: any(record.HasField("history") for record in records_of(at)))
        logger.finalize("success")
    assert wandb_id(folders[0]) != wandb_id(folders[1])


WANDB_DIES = """
if step == 4:
    import os

    for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
        os.kill(int(child), 9)
"""


def test_the_first_error_of_wandb_is_printed_once_and_the_run_goes_on(tmp_path):
    """Its process has died, as by a signal to all."""
    program = insert_after(tmp_path / "program", "step is done", WANDB_DIES)
    options = "--logger_name csv wandb --log_interval 1"
    printed = run(f"{program}/train.py {SMALL} {options}", tmp_path, HOME=str(tmp_path)).stdout
    (line,) = (line for line in printed.splitlines() if "has failed" in line)
    assert re.fullmatch(r"wandb has failed, rows may be missing there: \w+Error: .+", line)
    assert "finished after 20 of 20 steps" in printed and steps(run_dir(tmp_path)) == list(range(1, 21))


@pytest.mark.parametrize(
    "options, words, codes",
    [("--project a/b", "a/b", []), ("--base_lr 1e30 --log_interval 1", "loss", [1])],
    ids=["it is refused", "it diverges"],
)
def test_wandb_and_the_summary_know_that_a_run_has_failed(options, words, codes, tmp_path):
    done = run(f"train.py {SMALL} --logger_name csv wandb {options}", tmp_path, code=1, HOME=str(tmp_path))
    assert words in done.stderr.splitlines()[-1]
    assert last_summary(tmp_path)["state"] == "failed"
    paths = run_dir(tmp_path).glob("logs/wandb/offline-run-*/*.wandb")
    assert exit_codes([record for path in paths for record in wandb_records(path)]) == codes


def test_a_stopped_and_resumed_wandb_run_has_each_step_once_under_one_id(tmp_path):
    """Offline, each start has a folder of its own; `wandb sync` puts them together by their id."""
    process = start(f"{LONG} --logger_name csv wandb", tmp_path, HOME=str(tmp_path))
    wait_for(lambda: process.poll() is not None or newest(tmp_path))
    process.terminate()
    process.communicate()
    assert process.returncode == PREEMPTED
    run("train.py --resume auto", tmp_path, HOME=str(tmp_path))
    folder = run_dir(tmp_path)
    records = records_of(folder)
    ids = [record.run.run_id for record in records if record.HasField("run")]
    assert len(ids) == 2 and {*ids} == {wandb_id(folder)}
    assert steps(folder) == list(range(1, 161))
    assert_rows_of_the_csv(records, folder)


# ---- provenance


def test_provenance_keeps_all_starts_of_the_same_second(tmp_path):
    """Its files have the time of the start as their names."""
    (tmp_path / "provenance").mkdir()
    for _ in range(3):
        write_provenance(tmp_path, "1 x cpu")
    texts = [path.read_text() for path in (tmp_path / "provenance").glob("*.txt")]
    assert sum(text.count(f"\nPython {platform.python_version()} on ") for text in texts) == 3


def test_provenance_has_the_commit_of_the_code_and_names_what_differs_from_it(tmp_path):
    """Also when started elsewhere; run directories in the repository are no changes of it. No program runs that the
    configuration of the repository names, and its index is neither locked nor written."""
    repo, elsewhere = tmp_path / "repo", tmp_path / "elsewhere"
    repo.mkdir()
    elsewhere.mkdir()
    shutil.copy(REPO / ".gitignore", copy_programs(repo))

    def git(*command: str) -> str:
        command = ["git", "-C", repo, "-c", "user.name=a", "-c", "user.email=b", *command]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook_was_run\n")
    hook.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external"):
        git("config", name, str(hook))
    os.utime(repo / "train.py", (0, 0))  # git would note the new time in its index
    index = (repo / ".git" / "index").read_bytes()
    for cwd in (repo, elsewhere):
        call(f"{repo}/train.py {SMALL} --max_steps 1 --logger_name csv", cwd)
        (repo / "model.py").write_text((repo / "model.py").read_text() + "# changed\n")
    for cwd, changed in ((repo, []), (elsewhere, ["model.py"])):
        (path,) = run_dir(cwd).glob("provenance/*.txt")
        found = path.read_text().splitlines()
        assert f"# branch.oid {commit}" in found
        assert [line.split()[-1] for line in found if line.startswith(("1 .", "? "))] == changed
    assert not (tmp_path / "hook_was_run").exists()
    assert (repo / ".git" / "index").read_bytes() == index
