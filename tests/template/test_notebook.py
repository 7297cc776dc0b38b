"""main(config) called from Python, as in a notebook: the process goes on afterwards, and must be as it was before. The
cells of docs/notebooks.md run in a real Jupyter kernel, its commands in real debuggers."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from edits import copy_programs, replace
from helpers import REPO, call, clean_environment, newest, run, run_dir, section, wait_for, weights

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


@pytest.fixture
def notebook(tmp_path: Path):
    """notebook(cells) runs these lines after those of NOTEBOOK, in tmp_path."""

    def run_cells(cells: str) -> None:
        (tmp_path / "notebook.py").write_text(NOTEBOOK.replace("PROGRAM", repr(str(REPO))) + cells)
        run(f"{tmp_path}/notebook.py", tmp_path)

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
    """Also with the run that has failed, while its traceback is still held: the variables of its frames live on. No
    file of the run is open then, its lock neither."""
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


def test_two_processes_forked_from_a_notebook(notebook, tmp_path: Path):
    notebook("""
assert main(TrainConfig(epochs=1, devices="2", strategy="ddp_fork", **SMALL)) == 0
assert not left_behind(), left_behind()
""")
    assert (run_dir(tmp_path) / "model.pt").exists()


# ---- docs/notebooks.md

PAGE = (REPO / "docs" / "notebooks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


FIRST, BAD_OPTION, BAD_CODE, LONG, RESUME = blocks("python")
(USE,) = re.findall(r"^```python\n(.*?)^```$", section("docs/trained_model.md", "In Python"), re.DOTALL | re.MULTILINE)
PDB, POST_MORTEM = (shlex.split(line, comments=True)[1:] for block in blocks("bash") for line in block.splitlines())


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

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(folder: Path):
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
    kernel = Kernel(folder)
    yield kernel
    kernel.close()


LEFT = """
import os, signal
[signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)], \\
open(f"/proc/self/task/{os.getpid()}/children").read(), \\
[path for fd in os.listdir("/proc/self/fd") if (path := os.path.realpath(f"/proc/self/fd/{fd}")).endswith(".lock")]
"""
FAILS_LATER = """
schedule = train.schedule
train.schedule = lambda config, plan, step: 1.0 if step < 30 else 1 / 0
train.main(config)
"""
BAD_FILE = """
def forward(self, images):
    raise KeyError


Model.forward = forward
"""


def test_a_trained_model_is_used(kernel: Kernel, folder: Path):
    kernel(FIRST)
    kernel(USE.replace("20261122-102325-train_out", run_dir(folder, "notebook").name))
    assert re.fullmatch(r"tensor\(\d\)", kernel.printed.strip())


def test_the_cells_train_after_mistakes_in_the_options_the_notebook_and_a_file(kernel: Kernel, folder: Path):
    before = kernel(LEFT)
    assert kernel(FIRST) == result(FIRST) == "0"
    assert "finished after 38 of 38 steps" in kernel.printed

    assert kernel(BAD_OPTION) == result(BAD_OPTION) == "ConfigError"
    assert "--monitor val/f1: give --monitor and --monitor_mode together" in kernel.printed

    assert kernel(BAD_CODE) == result(BAD_CODE) == "NameError"
    kernel("%debug", "p logits.shape", "q")
    assert "torch.Size([50, 10])" in kernel.printed
    assert len([*folder.glob("*-notebook")]) == 1, "a mistake leaves no run directory"
    corrected = BAD_CODE.replace("logits, target,", "logits, targets,")
    assert kernel(corrected) == "0" and "val/accuracy" in kernel.printed

    assert kernel(FAILS_LATER) == "ZeroDivisionError"
    assert kernel(LEFT) == before, "while the notebook holds the traceback"
    assert kernel("train.schedule = schedule\ntrain.main(parse_train(TrainConfig, ['--resume', 'notebook']))") == "0"

    source = (folder / "model.py").read_text()
    (folder / "model.py").write_text(source + BAD_FILE)
    assert kernel("train.main(config)") == "KeyError"
    (folder / "model.py").write_text(source)
    assert kernel("train.main(config)") == "0"
    assert kernel(LEFT) == before


def test_stop_button_and_a_kernel_that_is_killed(kernel: Kernel, folder: Path, tmp_path_factory):
    """The run ends with the weights of one that was left alone."""
    kernel(FIRST)
    shutil.rmtree(run_dir(folder, "notebook"))

    def press() -> None:
        wait_for(lambda: newest(folder))
        kernel.manager.interrupt_kernel()

    stop = threading.Thread(target=press)
    stop.start()
    assert kernel(LONG) == result(LONG) == "75"
    stop.join()
    stopped = newest(folder)
    assert f"stopped after {stopped} of 950 steps" in kernel.printed

    kernel.client.execute(RESUME)
    wait_for(lambda: newest(folder) > stopped)
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    assert newest(folder) < 950
    kernel(FIRST)
    assert kernel(RESUME) == result(RESUME) == "0"

    alone = tmp_path_factory.mktemp("alone")
    call("train.py --out_dir long --epochs 50", alone)
    torch.testing.assert_close(weights(folder, "long"), weights(alone, "long"), atol=0, rtol=0)


# As a step that hangs.
SLOW = """
import pathlib, time
def compute_loss(*args):
    pathlib.Path("slow").touch()
    time.sleep(1000)
train.compute_loss = compute_loss
train.main(config)
"""


def test_stop_button_pressed_twice_ends_the_step_and_not_the_kernel(kernel: Kernel, folder: Path):
    def press() -> None:
        wait_for((folder / "slow").exists)
        kernel.manager.interrupt_kernel()
        time.sleep(1)
        kernel.manager.interrupt_kernel()

    kernel(FIRST)
    before = kernel(LEFT)
    stop = threading.Thread(target=press)
    stop.start()
    assert kernel(SLOW) == "KeyboardInterrupt"
    stop.join()
    assert kernel(LEFT) == before and kernel("1 + 1") == "2"


def test_two_processes(kernel: Kernel, folder: Path):
    kernel("import train\nfrom config import TrainConfig")
    cell = "train.main(TrainConfig(devices='2', strategy='ddp_fork', accelerator='cpu', epochs=1))"
    assert kernel(cell) == kernel(cell) == "0"
    assert "1 epochs x 19 steps" in kernel.printed


def debug(command: list[str], folder: Path, *lines: str) -> str:
    """What a command of the page prints to someone who types these lines."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=clean_environment() | {"PYTHONUNBUFFERED": "1"},  # python -i would read ahead
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.night  # it traces all imports, twice
def test_pdb_stops_in_the_loss_and_then_trains_twice(folder: Path):
    found = debug(PDB, folder, "p batch[0].shape", "n", "p images.dtype", "clear 1", "continue", "continue", "q")
    assert "torch.Size([50, 1, 8, 8])" in found and "torch.float32" in found
    assert found.count("finished after 4 of 4 steps") == found.count("Exit status: 0") == 2
    assert "Traceback" not in found


@pytest.mark.night
def test_post_mortem_of_an_exception(folder: Path):
    replace(folder, "logits", "logits = model(image)")
    found = debug(POST_MORTEM, folder, "pdb.pm()", "p images.shape", "q", "exit()")
    assert "NameError" in found and "torch.Size([50, 1, 8, 8])" in found


class Editor:
    """What VS Code does: it speaks the Debug Adapter Protocol with debugpy."""

    def __init__(self, folder: Path, configuration: dict, **breakpoints):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "debugpy.adapter"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.number, self.printed = 0, ""
        self.send("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        self.send("launch", **configuration, console="internalConsole", python=[sys.executable])
        self.wait("initialized")
        for command, arguments in breakpoints.items():
            self.send(command, **arguments)
        self.send("configurationDone")

    def send(self, command: str, **arguments) -> int:
        self.number += 1
        body = json.dumps({"seq": self.number, "type": "request", "command": command, "arguments": arguments}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()
        return self.number

    def wait(self, event: str) -> dict:
        """The body of the next event of that name, or of the next answer to that command."""
        while header := self.process.stdout.readline():
            self.process.stdout.readline()
            message = json.loads(self.process.stdout.read(int(header.split(b":")[1])))
            assert message.get("success", True), message
            if message.get("event") == "output":
                self.printed += message["body"]["output"]
            if event in (message.get("event"), message.get("command")):
                return message.get("body") or {}
        raise AssertionError(f"no {event}\n{self.printed}")

    def evaluate(self, expression: str, thread: int) -> str:
        self.send("stackTrace", threadId=thread)
        frame = self.wait("stackTrace")["stackFrames"][0]
        self.send("evaluate", expression=expression, frameId=frame["id"])
        return self.wait("evaluate")["result"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def editor(folder: Path):
    pytest.importorskip("debugpy", reason="debugpy is not installed")
    editors = []

    def start(**breakpoints) -> Editor:
        (configuration,) = json.loads(blocks("json")[0].replace("${workspaceFolder}", str(folder)))["configurations"]
        editors.append(Editor(folder, configuration, **breakpoints))
        return editors[0]

    yield start
    for editor in editors:
        editor.close()


def test_vs_code_stops_at_a_breakpoint(editor, folder: Path):
    line = (folder / "train.py").read_text().splitlines().index("    logits = model(images)") + 1
    vs_code = editor(setBreakpoints={"source": {"path": str(folder / "train.py")}, "breakpoints": [{"line": line}]})
    thread = vs_code.wait("stopped")["threadId"]
    assert vs_code.evaluate("tuple(images.shape)", thread) == "(50, 1, 8, 8)"
    vs_code.send("setBreakpoints", source={"path": str(folder / "train.py")}, breakpoints=[])
    vs_code.send("continue", threadId=thread)
    assert vs_code.wait("exited")["exitCode"] == 0
    assert "finished after 4 of 4 steps" in vs_code.printed


def test_vs_code_stops_at_an_exception(editor, folder: Path):
    replace(folder, "logits", "logits = model(image)")
    vs_code = editor(setExceptionBreakpoints={"filters": ["userUnhandled"]})
    stopped = vs_code.wait("stopped")
    assert stopped["reason"] == "exception" and "NameError" in stopped.get("text", stopped["description"])
