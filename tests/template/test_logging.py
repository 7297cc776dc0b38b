"""What the loggers keep, and what a run records about itself."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import REPO, SMALL, call, folders, run
from edits import copy_programs, insert_after, insert_before
from killer import kill_before
from mistakes import refuses
from outputs import MEASURED, last_summary, read_tensorboard, rows, run_dir
from processes import free_port, wait_for

from config import TrainConfig
from runtime.loggers import WandbLogger
from runtime.source import write_provenance

EACH_STEP = f"{SMALL} --log_interval 1"


def steps(cwd: Path) -> list[int]:
    return [int(row["step"]) for row in rows(cwd)]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """Where a run with the default loggers was killed when it had logged step 11 and saved step 8, and resumed."""
    cwd = tmp_path_factory.mktemp("resumed")
    kill_before("os.rename step-00000012.ckpt.tmp 1", f"train.py {EACH_STEP}", cwd, tmp_path_factory.mktemp("killer"))
    run("train.py --resume auto", cwd)  # TensorBoard's files have the second of the start in their names
    return cwd


# ---- csv and TensorBoard


def test_rows_are_each_once_in_csv_and_tensorboard_also_after_a_kill(resumed):
    """Without what is measured in the row of step 8, from which the run was resumed. TensorBoard calls a run by its
    directory, and has losses and metrics first: all else is under `vitals`, which is sorted after `train` and `val`."""
    expected = rows(resumed)
    assert steps(resumed) == list(range(1, 21))
    for row in expected:
        columns = {"step", "epoch", "train/loss", "train/grad_norm", "lr"}
        columns |= {"val/loss", "val/accuracy", "best"} if row["step"] % 4 == 0 else set()
        assert set(row) == columns | (set() if row["step"] == 8 else {*MEASURED})
        assert row["epoch"] == row["step"] / 4
        if row["step"] != 8:
            assert row["samples_per_second"] > 0 and 0 <= row["data_wait"] <= 1 and row["peak_memory_mb"] > 100

    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    assert [*EventMultiplexer().AddRunsFromDirectory(str(resumed)).Runs()] == [run_dir(resumed).name]
    board = read_tensorboard(run_dir(resumed))
    results = {"train/loss", "val/loss", "val/accuracy"}
    names = {name for row in expected for name in row if name != "step"}
    tags = {name if name in results else f"vitals/{name.removeprefix('train/')}": name for name in names}
    assert set(board.Tags()["scalars"]) == {*tags}
    for tag, name in tags.items():
        curve = [(event.step, event.value) for event in board.Scalars(tag)]
        assert [step for step, _ in curve] == [row["step"] for row in expected if name in row], name
        assert [value for _, value in curve] == pytest.approx([row[name] for row in expected if name in row], rel=1e-6)


def test_rows_go_on_in_a_csv_that_an_editor_has_replaced_or_somebody_has_moved_away(program, cwd):
    """Which fails no checkpoint either, that comes before the next row."""
    insert_before(program, "functions", "import shutil\nfrom pathlib import Path\n\n\n")
    insert_after(program, "step is done", """
        if step in (10, 15):
            (path,) = Path().glob("*/logs/csv/metrics.csv")
            shutil.copy(path, "copy.csv")
            shutil.move("copy.csv", path) if step == 10 else path.unlink()
    """)  # fmt: skip
    call(f"{program}/train.py {SMALL} --logger_name csv --log_interval 1 --checkpoint_interval 1 --max_steps 16", cwd)
    kept = [line.partition(",")[0] for line in (cwd / "copy.csv").read_text().splitlines()]
    assert kept == ["step", *map(str, range(1, 15))] and steps(cwd) == [15, 16]


def test_a_loss_is_the_mean_since_the_last_row_and_a_logger_that_is_not_chosen_keeps_nothing(tmp_path):
    """--log_interval counts steps; a validation and the last step are logged, too."""
    each, third = folders(tmp_path, "each", "third")
    for cwd, interval in ((each, 1), (third, 3)):
        call(f"train.py {SMALL} --log_interval {interval} --max_steps 17 --logger_name csv", cwd)
    losses = [row["train/loss"] for row in rows(each)]
    assert steps(third) == [3, 4, 6, 8, 9, 12, 15, 16, 17]
    last = 0
    for row in rows(third):
        step = int(row["step"])
        assert row["train/loss"] == pytest.approx(statistics.mean(losses[last:step]))
        last = step
    assert [path.name for path in (run_dir(third) / "logs").iterdir()] == ["csv"]
    assert not [*run_dir(third).glob("events.*")]


def test_a_package_that_is_missing_is_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "csv")
    refuses(f"train.py {SMALL} --logger_name csv wandb", tmp_path, "--logger_name wandb", "pip install wandb")


# ---- wandb


def wandb_records(path: Path) -> Iterator:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format. (wandb has no reader in Python any more.) The
    last one may be just being written."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record, position, block = path.read_bytes(), b"", 7, 32768
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:  # no header fits into the rest of a block
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4) and position <= len(data):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_id(folder: Path) -> str:
    found = (folder / "logs" / "wandb_id").read_text()
    assert re.fullmatch("[0-9a-f]{8}", found)
    return found


def records_of(folder: Path, kind: str) -> list:
    """Those of a kind in the offline runs of a run directory, the first start first."""
    paths = sorted(folder.glob("logs/wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert {path.name for path in paths} == {f"run-{wandb_id(folder)}.wandb"}
    return [getattr(record, kind) for path in paths for record in wandb_records(path) if record.HasField(kind)]


def test_wandb_without_a_key_keeps_offline_runs_with_each_step_once_under_one_id(tmp_path):
    """One for each start, which `wandb sync` puts together: with the rows of the csv, the options, project and comment.
    Each says how to upload it."""
    env = {"HOME": str(tmp_path)}
    first = run(f"train.py {SMALL} --logger_name csv wandb --max_steps 10 --comment a-note", tmp_path, **env)
    second = run("train.py --resume auto --max_steps 20", tmp_path, **env)
    folder = run_dir(tmp_path)
    for row, other in zip(records_of(folder, "history"), rows(tmp_path), strict=True):
        row = values(row.item)
        assert row["_step"] == other.pop("step")
        assert {name: value for name, value in row.items() if not name.startswith("_")} == pytest.approx(other)
    about, again = records_of(folder, "run")
    assert about.run_id == again.run_id == wandb_id(folder)
    assert (about.project, about.display_name, about.notes) == ("fabric-template", folder.name, "a-note")
    config = values(about.config.update)
    for more in records_of(folder, "config"):
        config |= values(more.update)
    assert (config["width"], config["base_lr"], config["logger_name"]) == (4, 4e-3, ["csv", "wandb"])
    assert [ended.exit_code for ended in records_of(folder, "exit")] == [0, 0]
    for path in folder.glob("logs/wandb/offline-run-*"):
        assert re.search(rf"wandb sync \S*{path.relative_to(tmp_path)}", first.stderr + second.stderr)


WANDB_DIES = """
if step == 4:
    import os

    for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
        os.kill(int(child), 9)
"""


def test_wandb_without_a_connection_is_offline_and_its_first_error_is_printed_once(tmp_path):
    """With a key, as on a node of a cluster that has no network. Then its process dies, as by a signal to all, and the
    run goes on."""
    env = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    done = run(f"train.py {SMALL} --max_steps 2 --logger_name csv wandb", tmp_path, HOME=str(tmp_path), **env)
    assert done.stdout.count("wandb is offline: ") == 1 and "Traceback" not in done.stderr
    assert len(records_of(run_dir(tmp_path), "history")) == len(rows(tmp_path)) == 1
    program = insert_after(tmp_path / "program", "step is done", WANDB_DIES)
    options = "--resume auto --max_steps 20 --log_interval 1"
    printed = run(f"{program}/train.py {options}", tmp_path, HOME=str(tmp_path)).stdout
    (line,) = (line for line in printed.splitlines() if "has failed" in line)
    assert re.fullmatch(r"wandb has failed, rows may be missing there: \w+Error: .+", line)
    assert "finished after 20 of 20 steps" in printed and steps(tmp_path) == list(range(2, 21))


def test_wandb_has_a_row_before_the_next_one(tmp_path, monkeypatch):
    """With a step, wandb would by default keep a row until then: the last one is lost to a kill."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "logs").mkdir()
    logger = WandbLogger(tmp_path, 0, TrainConfig())
    logger.log_metrics({"train/loss": 0.5}, 3)
    wait_for(lambda: records_of(tmp_path, "history"))
    logger.finalize("success")


def test_wandb_the_summary_and_train_log_know_that_a_run_has_failed(tmp_path):
    """One diverges, the other is refused by wandb. Their ids are not those of the seed: of two runs of one second and
    name, in different directories, they would be the same, and `wandb sync` would put them together."""
    diverged, refused = folders(tmp_path, "diverged", "refused")
    said = {}
    for cwd, options in ((diverged, "--base_lr 1e30 --log_interval 1"), (refused, "--project a/b")):
        done = run(f"train.py {SMALL} --logger_name csv wandb {options}", cwd, code=1, HOME=str(cwd))
        said[cwd] = done.stderr.splitlines()[-1].removeprefix("train.py: error: ")
        assert last_summary(cwd)["state"] == "failed"
    assert "loss" in said[diverged] and "a/b" in said[refused]
    assert (run_dir(diverged) / "train.log").read_text().splitlines()[-1].endswith(said[diverged])
    assert [ended.exit_code for ended in records_of(run_dir(diverged), "exit")] == [1]
    assert wandb_id(run_dir(diverged)) != wandb_id(run_dir(refused))


# ---- provenance


def test_provenance_tells_what_ran_where_with_what_at_each_start(resumed, tmp_path):
    """Its files have the time of the start as their names: those of one second are in one file."""
    lines = [line for path in run_dir(resumed).glob("provenance/*.txt") for line in path.read_text().splitlines()]
    for options in (EACH_STEP, " --resume auto"):
        assert sum(line.endswith(options) for line in lines) == 1
    assert lines.count(f"1 x cpu on {platform.node()}") == 2
    assert lines.count(f"torch-{importlib.metadata.version('torch')}") == 2
    (tmp_path / "provenance").mkdir()
    for _ in range(3):
        write_provenance(tmp_path, "1 x cpu")
    texts = [path.read_text() for path in tmp_path.glob("provenance/*.txt")]
    assert sum(text.count(f"\nPython {platform.python_version()} on ") for text in texts) == 3


def test_provenance_has_the_commit_of_the_code_and_names_what_differs_from_it(tmp_path):
    """Also when started elsewhere; run directories in the repository are no changes of it. No program runs that the
    configuration of the repository names, and its index is neither locked nor written."""
    repo, hook = tmp_path / "repo", tmp_path / "hook"
    repo.mkdir()
    shutil.copy(REPO / ".gitignore", copy_programs(repo))
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook_was_run\n")
    hook.chmod(0o755)

    def git(*command: str) -> str:
        command = ["git", "-C", repo, "-c", "user.name=a", "-c", "user.email=b", *command]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    git("config", "core.fsmonitor", str(hook))
    os.utime(repo / "train.py", (0, 0))  # git would note the new time in its index
    index = (repo / ".git" / "index").read_bytes()
    for cwd, changed in ((repo, []), (tmp_path, ["model.py"])):
        call(f"{repo}/train.py {SMALL} --max_steps 1 --logger_name csv", cwd)
        (path,) = run_dir(cwd).glob("provenance/*.txt")
        found = path.read_text().splitlines()
        assert [line.split()[-1] for line in found if line.startswith(("1 .", "? "))] == changed
        (repo / "model.py").write_text((repo / "model.py").read_text() + "# changed\n")
    assert (repo / ".git" / "index").read_bytes() == index and not (tmp_path / "hook_was_run").exists()
    assert f"# branch.oid {git('rev-parse', 'HEAD').strip()}" in found
