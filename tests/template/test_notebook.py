"""main(config) called from Python, as in a notebook: the process goes on afterwards, and must be as it was before. The
cells of docs/notebooks.md run in a real Jupyter kernel, its commands in a real debugger."""

import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from edits import copy_programs, replace
from helpers import REPO, blocks, clean_environment, newest, run, run_dir, wait_for

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

def target(path):
    try:
        return os.path.realpath(path)
    except FileNotFoundError:  # a thread has closed it meanwhile
        return None

def state():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    open_files = {target(path) for path in glob.glob("/proc/self/fd/*")} - {None}
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


def run_notebook(cells: str, cwd: Path) -> None:
    (cwd / "notebook.py").write_text(NOTEBOOK.replace("PROGRAM", repr(str(REPO))) + cells)
    run(f"{cwd}/notebook.py", cwd)


def test_after_a_run_nothing_is_left_behind(tmp_path: Path):
    """Of two processes; with a data worker; and in a thread, where Python allows no signal handlers."""
    cells = """
assert main(TrainConfig(epochs=1, devices="2", strategy="ddp_fork", out_dir="forked", **SMALL)) == 0
assert not left_behind(), left_behind()
assert main(TrainConfig(epochs=1, num_workers=1, **SMALL)) == 0
assert not left_behind(), left_behind()

codes = []
config = TrainConfig(epochs=1, num_workers=1, out_dir="in_a_thread", **SMALL)
thread = threading.Thread(target=lambda: codes.append(main(config)))
thread.start()
thread.join()
assert codes == [0], "in a thread"
assert not left_behind(), left_behind()
"""
    run_notebook(cells, tmp_path)
    for name in ("forked", "train_out", "in_a_thread"):
        assert (run_dir(tmp_path, name) / "model.pt").exists()


def test_after_a_mistake_an_error_and_signals_the_next_call_trains(tmp_path: Path):
    """Also with the run that has failed, while its traceback is still held: the variables of its frames live on. No
    file of the run is open then, its lock neither. A signal is the stop button of a notebook; the second one comes in a
    step that hangs."""
    cells = """
import train
for wrong, words in ((dict(epochs=-1), "--epochs -1"), (dict(monitor="val/f1", monitor_mode="max"), "val/accuracy")):
    try:
        main(TrainConfig(**wrong, **SMALL))
        sys.exit(f"{wrong} is taken")
    except ConfigError as error:
        held = error
    assert words in str(held)
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
    sys.exit("the step goes on")
except ZeroDivisionError as error:
    second = error
assert second.__traceback__ and calls == 6
assert set(left_behind()) <= {"threads"}, left_behind()  # those of its loader's queues, which the traceback holds
del second
gc.collect()
assert not left_behind(), left_behind()

def press(times, model, batch, config):
    for _ in range(times if model.training else 0):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    return compute_loss(model, batch, config)

(path,) = glob.glob("2*")
train.compute_loss = lambda *args: press(1, *args)
assert main(TrainConfig(epochs=2, resume=path, **SMALL)) == 75
assert os.path.exists(path + "/checkpoints/step-00000005.ckpt") and not left_behind(), left_behind()
train.compute_loss = compute_loss
assert main(TrainConfig(epochs=2, resume=path, **SMALL)) == 0
assert not left_behind(), left_behind()

train.compute_loss = lambda *args: press(1000, *args)
try:
    main(TrainConfig(epochs=2, out_dir="interrupted", **SMALL))
    sys.exit("the step goes on")
except KeyboardInterrupt:
    pass
assert not left_behind(), left_behind()
"""
    run_notebook(cells, tmp_path)
    assert newest(tmp_path) == 8


# ---- docs/notebooks.md

PAGE = "docs/notebooks.md"
FIRST, BAD_OPTION, BAD_CODE, LONG, RESUME = blocks(PAGE, "python")
(USE,) = blocks("docs/trained_model.md", "python", "In Python")
PDB, POST_MORTEM = (
    shlex.split(line, comments=True)[1:] for block in blocks(PAGE, "bash") for line in block.splitlines()
)


def result(cell: str) -> str:
    """What the page says that a cell gives: a number, or the name of an exception."""
    return re.search(r"  # (\w+): .+\n\Z", cell)[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the programs, to be edited."""
    return copy_programs(tmp_path)


class Kernel:
    """A notebook beside train.py."""

    def __init__(self, folder: Path):
        from jupyter_client import KernelManager

        self.manager = KernelManager(connection_file=str(folder / "kernel.json"))
        env = clean_environment() | {"IPYTHONDIR": str(folder / "ipython")}
        self.manager.start_kernel(cwd=str(folder), env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.printed = ""

    def __call__(self, cell: str, *answers: str) -> str:
        """Runs a cell to its end, with answers to what it asks. Returns its value, or the name of its exception."""
        found, answers, self.printed = [], iter(answers), ""

        def receive(message: dict) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                self.printed += content["text"]
            elif kind in ("execute_result", "error"):
                found.append(content["ename"] if kind == "error" else content["data"]["text/plain"])
                self.printed += content.get("evalue", "")

        def answer(message: dict) -> None:
            self.client.input(next(answers))

        self.client.execute_interactive(cell, timeout=120, output_hook=receive, stdin_hook=answer, allow_stdin=True)
        return found[0] if found else ""


@pytest.fixture
def kernel(folder: Path):
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
    kernel = Kernel(folder)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_the_cells_of_the_page_give_what_it_says(kernel: Kernel, folder: Path):
    """Also after mistakes in the options, the notebook and a file, and after the stop button."""
    assert kernel(FIRST) == result(FIRST) == "0"
    assert "finished after 38 of 38 steps" in kernel.printed
    assert kernel(BAD_OPTION) == result(BAD_OPTION) == "ConfigError"
    assert kernel(BAD_CODE) == result(BAD_CODE) == "NameError"
    kernel("%debug", "p logits.shape", "q")
    assert "torch.Size([50, 10])" in kernel.printed
    assert len([*folder.glob("*-notebook")]) == 1, "a mistake leaves no run directory"
    corrected = BAD_CODE.replace("logits, target,", "logits, targets,")
    assert kernel(corrected) == "0" and "val/accuracy" in kernel.printed

    replace(folder, "forward", "raise KeyError")
    assert kernel("train.main(config)") == "KeyError"
    shutil.copy(REPO / "model.py", folder)

    def press() -> None:
        wait_for(lambda: [*folder.glob("*-long/checkpoints/step-*.ckpt")])
        kernel.manager.interrupt_kernel()

    stop = threading.Thread(target=press)
    stop.start()
    assert kernel(LONG) == result(LONG) == "75"
    stop.join()
    assert kernel(RESUME) == result(RESUME) == "0"

    kernel(USE.replace("20261122-102325-train_out", run_dir(folder, "long").name))
    assert re.fullmatch(r"tensor\(\d\)", kernel.printed.strip())


@pytest.mark.night  # it traces all imports, twice
@pytest.mark.parametrize(
    "command, mistake, lines, found",
    [
        pytest.param(PDB, "", "p batch[0].shape|clear 1|continue|continue|q", "finished after 4 of 4 steps", id="pdb"),
        pytest.param(POST_MORTEM, "logits = model(image)", "pdb.pm()|p images.shape|q|exit()", "NameError", id="pm"),
    ],
)
def test_the_debuggers_of_the_page_show_the_shape_of_a_batch(command, mistake, lines: str, found: str, folder: Path):
    """To someone who types these lines. pdb stops in the loss, and then trains."""
    if mistake:
        replace(folder, "logits", mistake)
    env = clean_environment() | {"PYTHONUNBUFFERED": "1"}  # python -i would read ahead
    given = {"input": lines.replace("|", "\n") + "\n", "env": env, "timeout": 300}
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([50, 1, 8, 8])" in done.stdout and found in done.stdout + done.stderr
