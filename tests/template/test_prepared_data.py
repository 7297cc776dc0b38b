"""Data that is prepared once: on each machine one process calls build_datasets alone, and the others wait as long as it
lives. What was cut off by a kill is begun again."""

import os
import signal
import time
from pathlib import Path

import pytest
from commands import SMALL, folders, run, start
from edits import insert_before
from outputs import run_dir
from processes import free_port, is_lost, wait_for

# A slow download, as people write it: into a folder that is there from the first moment on. It is whole once it has its
# mark. A file "go" lets it end.
DOWNLOAD = """
import os
import time
from dataclasses import replace
from pathlib import Path

folder = Path(config.data_dir)
config = replace(config, data_dir="")  # digits refuse one
(folder / f"called {os.getpid()} {time.time_ns()}").touch()  # each time anew
if not (folder / "whole").exists():
    (folder / f"began {os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    (folder / "whole").touch()
    (folder / f"ended {os.getpid()}").touch()
"""
TRAIN = f"train.py {SMALL} --epochs 1"


def log(folder: Path, word: str) -> list[int]:
    """The processes that have called it, or that began or ended the download."""
    return [int(path.name.split()[1]) for path in folder.glob(f"{word} *")]


def counts(folder: Path) -> tuple[int, ...]:
    return tuple(len(log(folder, word)) for word in ("called", "began", "ended"))


def end(process, code: int = 0) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out


def test_one_of_three_processes_downloads_and_the_others_wait_for_it(program, tmp_path):
    insert_before(program, "digits", DOWNLOAD)
    (folder,) = folders(tmp_path, "download")
    process = start(f"{program}/{TRAIN} --effective_batch_size 48 --devices 3 --data_dir {folder}", tmp_path)
    wait_for(lambda: log(folder, "began"))
    time.sleep(1)  # the others are connected: one that did not wait would call it now
    assert counts(folder) == (1, 1, 0)
    (folder / "go").touch()
    end(process)
    assert counts(folder) == (3, 1, 1)
    assert (run_dir(tmp_path) / "model.pt").exists()


def test_a_run_that_waits_for_the_datasets_says_so_and_what_was_cut_off_by_a_kill_is_begun_again(program, tmp_path):
    """By one of the processes that have waited: these are no ranks of one run, which would be killed together. Another
    checkout does not wait."""
    insert_before(program, "digits", DOWNLOAD)
    folder, other = folders(tmp_path, "download", "other")
    processes = [start(f"{program}/{TRAIN} --out_dir run{i} --data_dir {folder}", tmp_path) for i in range(3)]
    (first,) = wait_for(lambda: log(folder, "began"))
    copy = insert_before(tmp_path / "copy", "digits", DOWNLOAD)
    of_copy = start(f"{copy}/{TRAIN} --out_dir copy --data_dir {other}", tmp_path)
    wait_for(lambda: log(other, "began"))
    for process in processes:
        if process.pid != first:
            assert process.stdout.readline().startswith("waiting for build_datasets of another run on this machine")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(log(folder, "began")) == 2)
    assert counts(folder) == (2, 2, 0)  # the third one waits again
    (folder / "go").touch()
    for process in processes:
        end(process, -signal.SIGKILL if process.pid == first else 0)
    assert counts(folder) == (3, 2, 1) and counts(other) == (1, 1, 0)
    (other / "go").touch()
    assert "waiting" not in end(of_copy)


@pytest.mark.parametrize("rank, code", [(0, 2), (1, 1)])
def test_what_only_one_process_cannot_read_is_told_by_it(rank: int, code: int, program, tmp_path):
    fails = f'import os\nif os.environ.get("LOCAL_RANK", "0") == "{rank}":\n    open("not there")'
    insert_before(program, "digits", fails)
    first, *others = run(f"{program}/{TRAIN} --devices 2", tmp_path, code).stderr.splitlines()
    assert first.startswith(f"train.py: error: rank {rank}: build_datasets: ") and first.endswith("'not there'")
    assert len(others) <= 1 and all(is_lost(line, timeout=300) for line in others), others
    assert not [*tmp_path.glob("*train_out")]


@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_one_process_is_noticed_while_another_one_builds(killed: int, program, tmp_path):
    """On two nodes, each with a data_dir of its own: rank 0 builds for long, the other one is done at once. It notices
    the end of rank 0 at once, though it would wait for as long as rank 0 lives; rank 0 notices its end when it has
    built. All that is said is that the other one is lost, and there is no run."""
    insert_before(program, "digits", DOWNLOAD)
    slow, quick = nodes = folders(tmp_path, "slow", "quick")
    (quick / "go").touch()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = f"{program}/{TRAIN} --timeout 60 --num_nodes 2 --devices 1 --data_dir"
    processes = [
        start(f"{command} {own}", tmp_path, NODE_RANK=str(rank), TMPDIR=str(own), **env)  # a machine has its own lock
        for rank, own in enumerate(nodes)
    ]
    wait_for(lambda: log(slow, "began") and log(quick, "ended"))
    processes[killed].kill()
    processes[killed].communicate(timeout=300)
    other = processes[1 - killed]
    if killed == 1:
        assert other.poll() is None
        (slow / "go").touch()
    (line,) = other.communicate(timeout=300)[1].splitlines()
    assert other.returncode == 1 and is_lost(line, timeout=60)
    assert not [*tmp_path.glob("*train_out")]
