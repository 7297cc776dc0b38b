"""Data that is prepared once: on each machine one process calls build_datasets alone, and the others wait as long as it
lives. What was cut off by a kill is begun again."""

import os
import signal
import time
from pathlib import Path

import pytest
from edits import insert_before
from helpers import (
    SMALL,
    TORCHRUN,
    call,
    descendants,
    end_of,
    free_port,
    is_lost,
    is_running,
    kill_group,
    run_dir,
    start,
    wait_for,
)

# A slow download, as people write it: into a folder that is there from the first moment on. It is whole once it has its
# mark. A file "go" lets it end. Two at a time fail.
DOWNLOAD = """
import os
import time
from pathlib import Path

folder = Path(os.environ["DOWNLOAD"])
with open(folder / "log", "a") as log:
    log.write(f"{os.getpid()} called\\n")
if not (folder / "whole").exists():
    (folder / "part").touch()
    with open(folder / "log", "a") as log:
        log.write(f"{os.getpid()} began\\n")
    while not (folder / "go").exists():
        time.sleep(0.02)
    (folder / "whole").touch()
    with open(folder / "log", "a") as log:
        log.write(f"{os.getpid()} ended\\n")

from dataclasses import replace

config = replace(config, data_dir="")  # digits refuse one
"""
ON_3 = TORCHRUN.replace("--nproc_per_node 2", "--nproc_per_node 3")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return insert_before(tmp_path_factory.mktemp("program"), "digits", DOWNLOAD)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "download"
    folder.mkdir()
    return folder


def log(folder: Path, word: str) -> list[int]:
    """The processes that have begun, or ended, or called."""
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[0]) for line in lines if line.endswith(word)]


def end(process) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.night), "Fabric"])
def test_one_of_three_processes_downloads_and_the_others_wait_for_it(launcher: str, program, folder, tmp_path):
    command = f"{program}/train.py {SMALL} --epochs 1 --effective_batch_size 48"
    on_3 = f"{ON_3} {command}" if launcher == "torchrun" else f"{command} --devices 3"
    process = start(on_3, tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began"))
    assert len(log(folder, "called")) == 1
    (folder / "go").touch()
    end(process)
    assert len(log(folder, "began")) == len(log(folder, "ended")) == 1
    assert len(log(folder, "called")) == 3
    assert (run_dir(tmp_path) / "model.pt").exists()


def test_what_was_cut_off_by_a_kill_is_begun_again(program, folder, tmp_path):
    """By one of the processes that have waited: these are no ranks of one run, which would be killed together."""
    processes = [
        start(f"{program}/train.py {SMALL} --epochs 1 --out_dir run{i}", tmp_path, DOWNLOAD=str(folder))
        for i in range(3)
    ]
    (first,) = wait_for(lambda: log(folder, "began"))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(log(folder, "began")) == 2)
    assert len(log(folder, "called")) == 2  # the third one waits again
    (folder / "go").touch()
    for process in processes:
        if process.pid == first:
            process.communicate(timeout=300)
        else:
            end(process)
    assert len(log(folder, "ended")) == 1 and len(log(folder, "called")) == 3


def test_runs_of_another_checkout_do_not_wait_for_it_and_are_not_told_that_theirs_is_there(program, folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    copy = insert_before(tmp_path / "copy", "digits", DOWNLOAD)
    first = start(f"{program}/train.py {SMALL} --epochs 1", tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began"))
    others = [
        start(f"{copy}/train.py {SMALL} --epochs 1 --out_dir run{i}", tmp_path, DOWNLOAD=str(other)) for i in range(2)
    ]
    wait_for(lambda: log(other, "began"))
    (folder / "go").touch()
    end(first)
    assert len(log(other, "called")) == 1
    (other / "go").touch()
    for process in others:
        end(process)
    assert len(log(other, "began")) == 1 and len(log(other, "called")) == 2


# On two nodes, each with a data_dir of its own: rank 0 builds for long, the other one is done at once.
TWO_NODES = """
import os
import time
from dataclasses import replace
from pathlib import Path

name = config.data_dir
config = replace(config, data_dir="")  # digits refuse one
Path(f"{name} builds").touch()
while name == "slow" and not Path("go").exists():
    time.sleep(0.02)
if name == "failing":
    open("not there")
"""


def two_nodes(tmp_path: Path, of_rank_1: str) -> list:
    program = insert_before(tmp_path / "program", "digits", TWO_NODES)
    command = f"{program}/train.py {SMALL} --timeout 10 --num_nodes 2 --devices 1 --data_dir"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank, name in enumerate(("slow", of_rank_1)):
        own = tmp_path / f"tmp{rank}"  # a machine has its own lock
        own.mkdir()
        processes.append(start(f"{command} {name}", tmp_path, NODE_RANK=str(rank), TMPDIR=str(own), **env))
    wait_for(lambda: len([*tmp_path.glob("* builds")]) == 2)
    return processes


def assert_lost(process, tmp_path: Path) -> None:
    """All that it says is that it has lost the other one, and there is no run."""
    (line,) = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == 1 and is_lost(line, timeout=10)
    assert not [*tmp_path.glob("*train_out")]


def test_the_others_notice_at_once_that_a_process_has_died_that_builds(tmp_path):
    """Though they would wait for it for as long as it lives."""
    zero, one = two_nodes(tmp_path, "quick")
    zero.kill()
    assert_lost(one, tmp_path)
    zero.communicate()


def test_a_process_that_builds_notices_afterwards_that_another_one_has_died(tmp_path):
    zero, one = two_nodes(tmp_path, "quick")
    one.kill()
    one.communicate()
    (tmp_path / "go").touch()
    assert_lost(zero, tmp_path)


def test_what_fails_is_told_at_once_while_another_process_builds(tmp_path):
    zero, one = two_nodes(tmp_path, "failing")
    (line,) = one.communicate(timeout=300)[1].splitlines()
    assert one.returncode == 2 and zero.poll() is None
    assert line.startswith("train.py: error: rank 1: build_datasets: ") and line.endswith("'not there'")
    (tmp_path / "go").touch()
    assert_lost(zero, tmp_path)


def test_no_process_outlives_rank_0_that_builds(program, folder, tmp_path):
    """It has launched the others."""
    process = start(f"{program}/train.py {SMALL} --devices 2", tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began") and len(descendants(process.pid)) == 2)
    pids = descendants(process.pid)
    process.kill()
    assert end_of(process, pids) == []


def test_what_only_one_process_cannot_read_is_told_by_it(folder, tmp_path):
    fails = 'import os\nif os.environ.get("LOCAL_RANK") == "1":\n    open("not there")'
    program = insert_before(tmp_path / "program", "digits", fails)
    process = start(f"{program}/train.py {SMALL} --epochs 1 --devices 2", tmp_path)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    first, *others = error.splitlines()
    assert first.startswith("train.py: error: rank 1: build_datasets: ") and first.endswith("'not there'"), error
    lost = "train.py: error: rank 0: another process has ended, or did not answer for --timeout 300 seconds: see its "
    assert len(others) == 1 and others[0].startswith(lost), error
    assert not [*tmp_path.glob("*train_out")]


@pytest.mark.night
def test_a_killed_run_of_three_processes_begins_the_download_again(program, folder, tmp_path):
    command = f"{ON_3} {program}/train.py {SMALL} --epochs 1 --effective_batch_size 48"
    process = start(command, tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began"))
    kill_group(process)
    process.communicate()
    called = log(folder, "called")
    wait_for(lambda: not any(map(is_running, called)))
    (folder / "go").touch()
    end(start(command, tmp_path, DOWNLOAD=str(folder)))
    assert len(log(folder, "began")) == 2 and len(log(folder, "ended")) == 1


def test_a_download_that_fails_is_told_by_the_process_that_tried_it(program, tmp_path):
    """The folder is missing: an OSError in build_datasets. Another error is a mistake in the code."""
    error = call(f"{program}/train.py {SMALL}", tmp_path, code=1).stderr
    assert error.endswith("\nKeyError: 'DOWNLOAD'\n") and 'folder = Path(os.environ["DOWNLOAD"])' in error
    process = start(f"{program}/train.py {SMALL} --devices 2", tmp_path, DOWNLOAD=str(tmp_path / "missing"))
    out, err = process.communicate(timeout=300)
    first, *others = err.splitlines()
    assert process.returncode == 2, out + err
    assert first.startswith("train.py: error: rank 0: build_datasets: [Errno 2] No such file or directory: ")
    assert all(line.startswith("train.py: error: rank 1: another process has ended") for line in others), err
    assert not [*tmp_path.glob("*train_out")]


@pytest.mark.night
def test_test_py_waits_as_well(program, folder, tmp_path):
    (folder / "go").touch()
    call_env = {"DOWNLOAD": str(folder)}
    end(start(f"{program}/train.py {SMALL} --epochs 1", tmp_path, **call_env))
    for name in ("go", "whole", "log"):
        (folder / name).unlink()
    process = start(f"{TORCHRUN} {program}/test.py --accelerator cpu", tmp_path, **call_env)  # it starts both at once
    wait_for(lambda: log(folder, "began"))
    time.sleep(5)  # until the other has come there
    (folder / "go").touch()
    end(process)
    assert len(log(folder, "began")) == 1 and len(log(folder, "called")) == 2
