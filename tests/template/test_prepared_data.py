"""Data that is prepared once: on each machine one process calls build_datasets alone, and the others wait as long as it
lives. What was cut off by a kill is begun again."""

import os
import signal
import time
from pathlib import Path

import pytest
from edits import insert_before
from helpers import SMALL, TORCHRUN, call, folders, free_port, is_lost, run, run_dir, start, wait_for

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
TRAIN = f"train.py {SMALL} --epochs 1"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return insert_before(tmp_path_factory.mktemp("program"), "digits", DOWNLOAD)


def log(folder: Path, word: str) -> list[int]:
    """The processes that have begun, or ended, or called."""
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[0]) for line in lines if line.endswith(word)]


def counts(folder: Path) -> tuple[int, ...]:
    return tuple(len(log(folder, word)) for word in ("called", "began", "ended"))


def end(process) -> None:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err


@pytest.mark.parametrize(
    "command, num",
    [
        pytest.param(f"{{program}}/{TRAIN} --effective_batch_size 48 --devices 3", 3, id="Fabric"),
        pytest.param(f"{TORCHRUN} {{program}}/test.py --accelerator cpu", 2, marks=pytest.mark.night, id="torchrun"),
    ],
)
def test_one_of_three_processes_downloads_and_the_others_wait_for_it(command: str, num: int, program, tmp_path):
    if "test.py" in command:
        call(TRAIN, tmp_path)
    (folder,) = folders(tmp_path, "download")
    process = start(command.format(program=program), tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began"))
    time.sleep(1)  # the others are connected: one that did not wait would call it now
    assert counts(folder) == (1, 1, 0)
    (folder / "go").touch()
    end(process)
    assert counts(folder) == (num, 1, 1)
    assert (run_dir(tmp_path) / "model.pt").exists()


def test_what_was_cut_off_by_a_kill_is_begun_again_and_another_checkout_does_not_wait(program, tmp_path):
    """By one of the processes that have waited: these are no ranks of one run, which would be killed together."""
    folder, other = folders(tmp_path, "download", "other")
    commands = [f"{program}/{TRAIN} --out_dir run{i}" for i in range(3)]
    processes = [start(command, tmp_path, DOWNLOAD=str(folder)) for command in commands]
    (first,) = wait_for(lambda: log(folder, "began"))
    copy = insert_before(tmp_path / "copy", "digits", DOWNLOAD)
    of_copy = start(f"{copy}/{TRAIN} --out_dir copy", tmp_path, DOWNLOAD=str(other))
    wait_for(lambda: log(other, "began"))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(log(folder, "began")) == 2)
    assert counts(folder) == (2, 2, 0)  # the third one waits again
    (folder / "go").touch()
    for process in processes:
        if process.pid == first:
            process.communicate(timeout=300)
        else:
            end(process)
    assert counts(folder) == (3, 2, 1) and counts(other) == (1, 1, 0)
    (other / "go").touch()
    end(of_copy)


@pytest.mark.parametrize("rank, code", [(0, 2), (1, 1)])
def test_what_only_one_process_cannot_read_is_told_by_it(rank: int, code: int, tmp_path):
    fails = f'import os\nif os.environ.get("LOCAL_RANK", "0") == "{rank}":\n    open("not there")'
    program = insert_before(tmp_path / "program", "digits", fails)
    first, *others = run(f"{program}/{TRAIN} --devices 2", tmp_path, code).stderr.splitlines()
    assert first.startswith(f"train.py: error: rank {rank}: build_datasets: ") and first.endswith("'not there'")
    assert len(others) <= 1 and all(is_lost(line, timeout=300) for line in others), others
    assert not [*tmp_path.glob("*train_out")]


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
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_one_process_is_noticed_while_another_one_builds(killed: int, tmp_path):
    """At once by rank 1, though it would wait for as long as rank 0 lives, and by rank 0 when it has built. All that it
    says is that it has lost the other one, and there is no run."""
    program = insert_before(tmp_path / "program", "digits", TWO_NODES)
    command = f"{program}/train.py {SMALL} --timeout 10 --num_nodes 2 --devices 1 --data_dir"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        start(f"{command} {name}", tmp_path, NODE_RANK=str(rank), TMPDIR=str(own), **env)  # a machine has its own lock
        for rank, (name, own) in enumerate(zip(("slow", "quick"), folders(tmp_path, "tmp0", "tmp1"), strict=True))
    ]
    wait_for(lambda: len([*tmp_path.glob("* builds")]) == 2)
    processes[killed].kill()
    processes[killed].communicate(timeout=300)
    other = processes[1 - killed]
    if killed == 1:
        assert other.poll() is None
        (tmp_path / "go").touch()
    (line,) = other.communicate(timeout=300)[1].splitlines()
    assert other.returncode == 1 and is_lost(line, timeout=10)
    assert not [*tmp_path.glob("*train_out")]
