"""main(config) called from Python, as in a notebook: the process goes on afterwards, and must be as it was before."""

from pathlib import Path

import pytest
from helpers import REPO, call, kill_group, newest, run, run_dir, start, wait_for

# Trains in this process. `left_behind` tells what is not as it was before.
NOTEBOOK = """
import gc, glob, os, signal, sys, threading, time
sys.path.insert(0, PROGRAM)
import torch
import tqdm
from train import main
from runtime.errors import ConfigError
from config import TrainConfig

SMALL = dict(accelerator="cpu", limit_train_batches=4, limit_val_batches=1, width=4)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
signal.signal(signal.SIGUSR1, lambda number, frame: None)
sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))  # does not wait for workers that are left

def state():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    open_files = {os.path.realpath(path) for path in glob.glob("/proc/self/fd/*")}
    return {
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "hooks": (sys.excepthook, threading.excepthook),
        "children": [] if children == tracker() else children,
        "threads": [thread for thread in threading.enumerate() if not isinstance(thread, tqdm.TMonitor)],  # it stays
        "files": [path for path in open_files if path.startswith(os.getcwd() + "/2")],
        "group": torch.distributed.is_initialized(),
    }

def tracker():  # Python's own process, for shared memory; it stays
    from multiprocessing import resource_tracker
    return [str(resource_tracker._resource_tracker._pid)]

def left_behind():
    for _ in range(100):  # the thread of a closed queue ends by itself
        now = state()
        left = {name: now[name] for name in now if now[name] != before[name]}
        if not left:
            break
        time.sleep(0.1)
    return left

before = state()
"""


@pytest.fixture
def notebook(tmp_path: Path):
    """notebook(cells) runs these lines after those of NOTEBOOK, in tmp_path, and returns what they print."""

    def run_cells(cells: str, repo: Path = REPO) -> str:
        (tmp_path / "notebook.py").write_text(NOTEBOOK.replace("PROGRAM", repr(str(repo))) + cells)
        return run(f"{tmp_path}/notebook.py", tmp_path).stdout

    return run_cells


def test_after_a_run_nothing_is_left_behind(notebook, tmp_path: Path):
    """Also in a thread, where Python allows no signal handlers."""
    notebook("""
assert main(TrainConfig(epochs=1, num_workers=1, **SMALL)) == 0
assert not left_behind(), left_behind()

codes = []
config = TrainConfig(epochs=1, num_workers=1, out_dir="in_a_thread", **SMALL)
thread = threading.Thread(target=lambda: codes.append(main(config)))
thread.start()
thread.join()
assert codes == [0], "in a thread"
assert not left_behind(), left_behind()
""")
    for name in ("train_out", "in_a_thread"):
        assert (run_dir(tmp_path, name) / "model.pt").exists()


def test_a_mistake_is_an_exception_and_the_next_call_trains(notebook, tmp_path: Path):
    """Also with the run that has failed, while its traceback is still held: the variables of its frames live on."""
    notebook("""
import train
try:
    main(TrainConfig(epochs=-1))
except ValueError as error:
    assert "--epochs -1" in str(error)
try:
    main(TrainConfig(monitor="val/f1", monitor_mode="max", **SMALL))
except ConfigError as error:
    first = error
assert str(first).endswith("--monitor val/f1: choose from train/loss, train/grad_norm, val/loss, val/accuracy")
assert not glob.glob("2*") and not left_behind(), left_behind()

compute_loss, calls = train.compute_loss, 0
def fails_in_the_second_epoch(model, batch, config):
    global calls
    calls += model.training
    if calls == 6:
        raise ZeroDivisionError("a mistake")
    return compute_loss(model, batch, config)

train.compute_loss = fails_in_the_second_epoch
try:
    main(TrainConfig(epochs=2, num_workers=1, **SMALL))
except ZeroDivisionError as error:
    second = error
assert second.__traceback__ and calls == 6
assert set(left_behind()) <= {"threads"}, left_behind()  # those of its loader's queues, which the traceback holds
del second
gc.collect()
assert not left_behind(), left_behind()

train.compute_loss = compute_loss
(path,) = glob.glob("2*")
assert os.path.exists(path + "/checkpoints/step-00000004.ckpt")
assert main(TrainConfig(epochs=2, resume=path, **SMALL)) == 0
assert not left_behind(), left_behind()
""")
    assert newest(tmp_path) == 8


def test_another_process_can_resume_the_run_that_has_failed(tmp_path: Path):
    """The lock is not held by the traceback."""
    cells = """
import train
train.learning_rate = lambda config, plan, step: plan.peak_lr if step < 6 else 1 / 0
try:
    main(TrainConfig(epochs=2, **SMALL))
except ZeroDivisionError as error:
    kept = error
open("failed", "w")
signal.pause()
"""
    (tmp_path / "notebook.py").write_text(NOTEBOOK.replace("PROGRAM", repr(str(REPO))) + cells)
    process = start(f"{tmp_path}/notebook.py", tmp_path)
    try:
        wait_for(lambda: process.poll() is not None or (tmp_path / "failed").exists())
        assert process.poll() is None, process.communicate()
        call("train.py --resume auto", tmp_path)
        assert process.poll() is None
    finally:
        kill_group(process)
        process.communicate()
    assert newest(tmp_path) == 8


def test_two_processes_forked_from_a_notebook(notebook, tmp_path: Path):
    notebook("""
assert main(TrainConfig(epochs=1, devices="2", strategy="ddp_fork", **SMALL)) == 0
assert not left_behind(), left_behind()
""")
    assert (run_dir(tmp_path) / "model.pt").exists()
