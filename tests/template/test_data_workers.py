"""Data workers that die or freeze, what a run leaves behind of them, and the open files that these forks share."""

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
from commands import PREEMPTED, REPO, SMALL, call, folders, run
from comparisons import assert_same_run
from edits import insert_before
from outputs import assert_whole_checkpoints, last_summary, results
from processes import end_of, how_to_go_on, started

from runtime.loader import start_worker


@pytest.mark.parametrize(
    "number, words",
    [(signal.SIGKILL, r"DataLoader worker \(pid.* \d+\) (is killed by signal: Killed.*|exited.*)"),
     (signal.SIGSTOP, r"DataLoader timed out after 15\.0 seconds")],
)  # fmt: skip
def test_a_data_worker_that_dies_or_freezes_ends_the_run_in_the_words_of_torch(number: int, words: str, tmp_path):
    process, pids = started(tmp_path, "--num_workers 1 --timeout 15")
    for worker in pids[1:]:
        os.kill(worker, number)
    error, note = end_of(process, pids)[-2:]
    assert process.returncode == 1 and re.fullmatch(f"RuntimeError: {words}", error)
    assert note == how_to_go_on(tmp_path) and last_summary(tmp_path)["state"] == "failed"
    assert_whole_checkpoints(tmp_path)


def test_a_data_worker_that_dies_while_the_run_ends_does_not_hide_how_to_go_on(program, cwd):
    dies = "for child in torch.multiprocessing.active_children():\n    child.kill()\ntime.sleep(1)"
    process, pids = started(cwd, "--num_workers 1", repo=insert_before(program, "run ends", dies))
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
    assert process.returncode == PREEMPTED and line.startswith("stopping at the end of a step")
    assert_whole_checkpoints(tmp_path)


NOTEBOOK = f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing
import time
import train

def compute_loss(*_):
    raise ValueError("deliberate")

train.compute_loss = compute_loss
own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
own.start()
try:
    train.main(train.TrainConfig(accelerator="cpu", epochs=1, num_workers=2))
except ValueError:
    pass
own.join(1)  # a signal takes a moment
print("left", multiprocessing.active_children() == [own])
own.kill()
"""


def test_a_run_ends_its_data_workers_and_no_process_of_a_notebook(tmp_path):
    """Also a run that fails before its first step."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    assert run(f"{tmp_path}/notebook.py", tmp_path).stdout.splitlines()[-1] == "left True"


# ---- open files

# Samples have their numbers from a file, which build_model opens before there are data workers, by a first sample.
OF_FILE = """
import time

self.file = getattr(self, "file", None) or open("numbers", "rb", buffering=0)
numbers = []
for number in indices:
    self.file.seek(8 * number)
    time.sleep(0.0005)
    numbers.append(int.from_bytes(self.file.read(8), "big"))
indices = numbers
"""


def test_data_workers_read_from_a_file_that_the_main_process_has_opened(program, tmp_path: Path):
    """They get the samples that a run without them has. In test.py as well."""
    insert_before(program, "fetch", OF_FILE)
    command = f"train.py {SMALL} --micro_batch_size 16 --epochs 2 --logger_name csv"
    plain, cwd = folders(tmp_path, "plain", "workers")
    (cwd / "numbers").write_bytes(b"".join(number.to_bytes(8, "big") for number in range(1797)))
    call(command, plain)
    call(f"{program}/{command} --num_workers 2", cwd)
    assert_same_run(cwd, plain)
    assert results(program, cwd, "--num_workers 2") == results(REPO, plain, "")


def test_a_data_worker_goes_on_in_a_file_from_where_it_was(tmp_path: Path):
    """Here in one that is deleted. One that is written, as by `train.py > log`, keeps one position for all: else a
    process would write over the lines of another one."""
    (tmp_path / "file").write_text("one two three")
    with open(tmp_path / "file", buffering=0, mode="rb") as file, open(tmp_path / "log", "w+b", buffering=0) as log:
        assert file.read(4) == b"one "
        (tmp_path / "file").unlink()

        def begin():
            start_worker(0)
            assert file.read(4) == b"two "
            assert not os.get_inheritable(file.fileno())
            log.write(b"worker\n")

        for number in (1, 2):
            worker = multiprocessing.get_context("fork").Process(target=begin)
            worker.start()
            worker.join()
            assert worker.exitcode == 0
            log.write(b"main %d\n" % number)
        assert file.read() == b"two three"
    assert (tmp_path / "log").read_text() == "worker\nmain 1\nworker\nmain 2\n"
