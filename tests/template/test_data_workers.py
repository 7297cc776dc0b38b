"""Data workers that die or freeze, and what a run leaves behind of them."""

import os
import re
import signal
import sys

import pytest
from edits import insert_before
from helpers import (
    PREEMPTED,
    REPO,
    SMALL,
    assert_whole_checkpoints,
    end_of,
    how_to_go_on,
    last_summary,
    run,
    started,
)

# ---- data workers


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_data_worker_that_dies_or_freezes_ends_the_run_in_the_words_of_torch(signal_number, tmp_path):
    process, pids = started(tmp_path, "--num_workers 1 --timeout 15")
    for worker in pids[1:]:
        os.kill(worker, signal_number)
    error, note = end_of(process, pids)[-2:]
    assert process.returncode == 1
    if signal_number == signal.SIGKILL:
        assert re.match(r"RuntimeError: DataLoader worker \(pid.* \d+\) (is killed by signal: Killed|exited)", error)
    else:
        assert error == "RuntimeError: DataLoader timed out after 15.0 seconds"
    assert note == how_to_go_on(tmp_path)
    assert last_summary(tmp_path)["state"] == "failed"
    assert_whole_checkpoints(tmp_path)


BIG = """
if len(indices) > 1:
    return torch.ones(26_000_000 // 4), torch.as_tensor(indices)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_a_small_dev_shm_is_told_by_the_data_worker(tmp_path):
    """As in a container."""
    program = insert_before(tmp_path / "program", "fetch", BIG)
    command = f"{sys.executable} {program}/train.py {SMALL} --num_workers 1 --timeout 5"
    script = f"mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {command}"
    (tmp_path / "train.sh").write_text(f"exec unshare --mount bash -c '{script}'\n")
    error = run(f"{tmp_path}/train.sh", tmp_path, code=1).stderr
    assert "No space left on device" in error and error.splitlines()[-1].endswith("timed out after 5.0 seconds")
    assert not [*tmp_path.glob("*train_out")]


def test_no_data_worker_is_left_after_a_run(tmp_path):
    process, pids = started(tmp_path, "--num_workers 2 --epochs 20")
    assert len(pids) == 5  # two of the training, two of the validation
    assert end_of(process, pids) == []
    assert process.returncode == 0


DIES_MEANWHILE = """
for child in torch.multiprocessing.active_children():
    child.kill()
time.sleep(1)
"""


def test_a_data_worker_that_dies_while_the_run_ends_does_not_hide_how_to_go_on(tmp_path):
    repo = insert_before(tmp_path / "repo", "run ends", DIES_MEANWHILE)
    cwd = tmp_path / "run"
    cwd.mkdir()
    process, pids = started(cwd, "--num_workers 1", repo=repo)
    os.kill(pids[1], signal.SIGKILL)
    *_, error, last = end_of(process, pids)
    assert "DataLoader worker" in error and last == how_to_go_on(cwd)
    assert last_summary(cwd)["state"] == "failed"


def test_a_frozen_data_worker_does_not_delay_the_end_of_a_run(tmp_path):
    """The one of the validation, for which the loop does not wait."""
    process, pids = started(tmp_path, "--num_workers 1 --val_interval 1000000")
    _, of_validation, _ = pids
    os.kill(of_validation, signal.SIGSTOP)
    process.terminate()
    *_, line = end_of(process, pids)
    assert process.returncode == PREEMPTED
    assert line == "stopping at the end of a step; a second Ctrl-C ends the process at once"
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("ends", ["fails", "finishes"])
def test_a_run_ends_its_data_workers_and_no_process_of_a_notebook(ends: str, tmp_path):
    """Also a run that fails before its first batch."""
    script = tmp_path / "notebook.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing
import time
import train

def compute_loss(*_):
    raise ValueError("deliberate")

if {ends == "fails"}:
    train.compute_loss = compute_loss
own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
own.start()
try:
    train.main(train.TrainConfig(accelerator="cpu", epochs=1, num_workers=1))
except ValueError:
    pass
own.join(1)  # a signal takes a moment
print("left", multiprocessing.active_children() == [own])
own.kill()
""")
    assert run(str(script), tmp_path).stdout.splitlines()[-1] == "left True"


def test_a_data_worker_that_cannot_be_started_leaves_none_of_the_others(tmp_path):
    """Which ignore the signal by which Python would end them, and wait for them."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing.context
import train

start = multiprocessing.context.ForkProcess.start
started = []

def start_one(process):
    if started:
        raise OSError(12, "Cannot allocate memory")
    start(process)
    started.append(process)

multiprocessing.context.ForkProcess.start = start_one
try:
    train.main(train.TrainConfig(accelerator="cpu", num_workers=2))
except OSError:
    started[0].join()
    print("ended")
""")
    assert run(str(script), tmp_path).stdout.splitlines()[-1] == "ended"


def test_a_second_failure_while_a_run_ends_does_not_hide_the_first_or_how_to_go_on(tmp_path):
    """Where two data workers die, the second may be noticed when the first has ended the loop already."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
from contextlib import ExitStack
from runtime import launch
from config import TrainConfig

def fail(number):
    raise RuntimeError(f"DataLoader worker (pid {{number}}) is killed by signal: Killed.")

def main(config):
    with ExitStack() as resources:
        resources.callback(fail, 2)
        resources.push(lambda kind, error, trace: error.add_note("go on with: ..."))
        fail(1)

launch.run_and_exit(main, TrainConfig())
""")
    lines = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr.splitlines()
    first, second = (
        lines.index(f"RuntimeError: DataLoader worker (pid {number}) is killed by signal: Killed.") for number in (1, 2)
    )
    assert first < lines.index("go on with: ...") < second == len(lines) - 1


def test_a_data_worker_that_dies_in_the_middle_of_a_save_is_named(tmp_path):
    """torch raises its error anywhere in the main thread, and torch.save covers it up."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import torch
from runtime import launch
from config import TrainConfig

class File:
    written = 0

    def write(self, data):
        if self.written:
            raise RuntimeError("DataLoader worker (pid 2) is killed by signal: Killed.")
        self.written = len(data)
        return len(data)

launch.run_and_exit(lambda config: torch.save(torch.ones(1_000_000), File()), TrainConfig())
""")
    lines = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr.splitlines()
    assert "RuntimeError: DataLoader worker (pid 2) is killed by signal: Killed." in lines
