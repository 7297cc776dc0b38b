"""main(config) called from Python, as in a notebook: the process goes on afterwards, and must be as it was before. The
cells of docs/notebooks.md run in a real Jupyter kernel."""

import re
import shutil
import threading
from pathlib import Path

import pytest
from commands import REPO, clean_environment, run
from copies import blocks
from edits import copy_programs, replace
from outputs import run_dir
from processes import wait_for

# Trains in this process. `left_behind` tells what is not as it was before.
NOTEBOOK = """
import gc, glob, os, signal, subprocess, sys, threading, time
sys.path.insert(0, PROGRAM)
import torch
import tqdm
from multiprocessing import resource_tracker
from train import main
from runtime.errors import ConfigError
from config import TrainConfig

SMALL = dict(accelerator="cpu", limit_train_batches=4, limit_val_batches=1, width=4)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
signal.signal(signal.SIGUSR1, lambda number, frame: None)
sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))  # does not wait for workers that are left
resource_tracker.ensure_running()  # a process of Python's own, which stays
tqdm.tqdm.monitor_interval = 0  # nor does a thread of tqdm stay

def state():
    files = subprocess.run(["ls", "-l", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True).stdout
    return {
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "hooks": (sys.excepthook, threading.excepthook),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "threads": threading.enumerate(),
        "files": [line for line in files.splitlines() if os.getcwd() + "/2" in line],
        "group": torch.distributed.is_initialized(),
    }

def left_behind():
    for _ in range(100):  # the thread of a closed queue ends by itself
        now = state()
        left = {name: now[name] for name in now if now[name] != before[name]}
        if not left:
            break
        time.sleep(0.1)
    return left

def trains(code=0, **options):
    assert main(TrainConfig(epochs=2, **SMALL, **options)) == code
    assert not left_behind(), left_behind()

def raises(kind, **options):
    try:
        main(TrainConfig(epochs=2, **SMALL, **options))
    except kind as error:
        return error
    sys.exit(f"{kind} is not raised")

before = state()

trains(devices="2", strategy="ddp_fork", out_dir="forked")
trains(num_workers=1, out_dir="with_a_worker")
config = TrainConfig(epochs=1, num_workers=1, out_dir="in_a_thread", **SMALL)
thread = threading.Thread(target=main, args=[config])
thread.start()
thread.join()
assert not left_behind(), left_behind()

import train

first = raises(ConfigError, monitor="val/f1", monitor_mode="max")
assert "val/accuracy" in str(first) and not glob.glob("2*-train_out") and not left_behind(), left_behind()

compute_loss, calls = train.compute_loss, 0
def fails_in_the_second_epoch(model, batch, config):
    global calls
    calls += model.training
    if calls == 6:
        raise ZeroDivisionError("a mistake")
    return compute_loss(model, batch, config)

train.compute_loss = fails_in_the_second_epoch
second = raises(ZeroDivisionError, num_workers=1)
assert second.__traceback__ and set(left_behind()) <= {"threads"}  # of its loader's queues, which the traceback holds
del second
gc.collect()
assert not left_behind(), left_behind()

def press(times, model, batch, config):
    for _ in range(times if model.training else 0):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    return compute_loss(model, batch, config)

(path,) = glob.glob("2*-train_out")
train.compute_loss = lambda *args: press(1, *args)
trains(75, resume=path)
assert os.path.exists(path + "/checkpoints/step-00000005.ckpt")
train.compute_loss = compute_loss
trains(resume=path)
train.compute_loss = lambda *args: press(1000, *args)
raises(KeyboardInterrupt, out_dir="interrupted")
assert not left_behind(), left_behind()
"""


def test_after_a_run_a_mistake_an_error_or_a_signal_nothing_is_left_behind_and_the_next_call_trains(tmp_path: Path):
    """A run of two processes, one with a data worker, and one in a thread, where Python allows no signal handlers. Also
    the run that has failed goes on, while its traceback is still held: the variables of its frames live on. No file of
    the run is open then, its lock neither. A signal is the stop button of a notebook; the second one comes in a step
    that hangs."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK.replace("PROGRAM", repr(str(REPO))))
    run(f"{tmp_path}/notebook.py", tmp_path)
    for name in ("forked", "with_a_worker", "in_a_thread", "train_out"):
        assert (run_dir(tmp_path, name) / "model.pt").exists()


# ---- docs/notebooks.md

PAGE = "docs/notebooks.md"
FIRST, BAD_OPTION, BAD_CODE, LONG, RESUME = blocks(PAGE, "python")
(USE,) = blocks("docs/trained_model.md", "python", "In Python")


class Kernel:
    """A notebook beside train.py, with what its last cell has printed."""

    def __init__(self, folder: Path):
        from jupyter_client.manager import start_new_kernel

        env = clean_environment() | {"IPYTHONDIR": str(folder / "ipython")}
        self.manager, self.client = start_new_kernel(cwd=str(folder), env=env)

    def __call__(self, cell: str, *answers: str) -> str:
        """Runs a cell to its end, with answers to what it asks. Returns its value, or the name of its exception."""
        found, answers, self.printed = [], iter(answers), ""

        def receive(message: dict) -> None:
            content = message["content"]
            self.printed += content.get("text", "") + content.get("evalue", "")
            if message["msg_type"] in ("execute_result", "error"):
                found.append(content.get("ename") or content["data"]["text/plain"])

        def answer(message: dict) -> None:
            self.client.input(next(answers))

        self.client.execute_interactive(cell, timeout=120, output_hook=receive, stdin_hook=answer, allow_stdin=True)
        return found[0] if found else ""

    def gives_what_it_says(self, cell: str) -> bool:
        """A cell of the page says it at its end: a number, or the name of an exception."""
        return self(cell) == re.search(r"  # (\w+): .+\n\Z", cell)[1]


@pytest.fixture
def kernel(program: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(program / "runtime_of_jupyter"))
    kernel = Kernel(copy_programs(program))
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_the_cells_of_the_page_give_what_it_says(kernel: Kernel, program: Path):
    """Also after mistakes in the options, the notebook and a file, and after the stop button."""
    assert kernel.gives_what_it_says(FIRST) and "finished after 38 of 38 steps" in kernel.printed
    assert kernel.gives_what_it_says(BAD_OPTION)
    assert kernel.gives_what_it_says(BAD_CODE)
    kernel("%debug", "p logits.shape", "q")
    assert "torch.Size([50, 10])" in kernel.printed
    assert len([*program.glob("*-notebook")]) == 1, "a mistake leaves no run directory"
    corrected = BAD_CODE.replace("logits, target,", "logits, targets,")
    assert kernel(corrected) == "0" and "val/accuracy" in kernel.printed

    replace(program, "forward", "raise KeyError")
    assert kernel("train.main(config)") == "KeyError"
    shutil.copy(REPO / "model.py", program)

    def press() -> None:
        wait_for(lambda: [*program.glob("*-long/checkpoints/step-*.ckpt")])
        kernel.manager.interrupt_kernel()

    stop = threading.Thread(target=press)
    stop.start()
    assert kernel.gives_what_it_says(LONG)
    stop.join()
    assert kernel.gives_what_it_says(RESUME)

    kernel(USE.replace("20261122-102325-train_out", run_dir(program, "long").name))
    assert re.fullmatch(r"tensor\(\d\)", kernel.printed.strip())
