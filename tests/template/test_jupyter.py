"""docs/notebooks.md: its cells in a real Jupyter kernel, its commands in real debuggers."""

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
from helpers import REPO, call, clean_environment, newest, run_dir, wait_for

PAGE = (REPO / "docs" / "notebooks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


FIRST, BAD_OPTION, BAD_CODE, LONG, RESUME = blocks("python")
*_, USE = re.findall(r"^```python\n(.*?)^```$", (REPO / "README.md").read_text(), re.DOTALL | re.MULTILINE)
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
rate = train.learning_rate
train.learning_rate = lambda config, plan, step: plan.peak_lr if step < 30 else 1 / 0
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
    told = "its name does not tell if higher is better; check it, or give --monitor_mode"
    assert f"--monitor val/f1: {told}" in kernel.printed

    assert kernel(BAD_CODE) == result(BAD_CODE) == "NameError"
    kernel("%debug", "p logits.shape", "q")
    assert "torch.Size([200, 10])" in kernel.printed
    assert len([*folder.glob("*-notebook")]) == 1, "a mistake leaves no run directory"
    corrected = BAD_CODE.replace("logits, target,", "logits, targets,")
    assert kernel(corrected) == "0" and "val/accuracy" in kernel.printed

    assert kernel(FAILS_LATER) == "ZeroDivisionError"
    assert kernel(LEFT) == before, "while the notebook holds the traceback"
    assert kernel("train.learning_rate = rate\ntrain.main(parse_train('--resume notebook'.split()))") == "0"

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
    weights = [torch.load(run_dir(path, "long") / "model.pt", weights_only=True) for path in (folder, alone)]
    torch.testing.assert_close(*weights, atol=0, rtol=0)


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
    kernel("import train\nfrom cli import parse_train")
    cell = "train.main(parse_train('--devices 2 --strategy ddp_fork --accelerator cpu --epochs 1'.split()))"
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
    assert "torch.Size([200, 1, 8, 8])" in found and "torch.float32" in found
    assert found.count("finished after 4 of 4 steps") == found.count("Exit status: 0") == 2
    assert "Traceback" not in found


@pytest.mark.night
def test_post_mortem_of_an_exception(folder: Path):
    replace(folder, "logits", "logits = model(image)")
    found = debug(POST_MORTEM, folder, "pdb.pm()", "p images.shape", "q", "exit()")
    assert "NameError" in found and "torch.Size([200, 1, 8, 8])" in found


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
    assert vs_code.evaluate("tuple(images.shape)", thread) == "(200, 1, 8, 8)"
    vs_code.send("setBreakpoints", source={"path": str(folder / "train.py")}, breakpoints=[])
    vs_code.send("continue", threadId=thread)
    assert vs_code.wait("exited")["exitCode"] == 0
    assert "finished after 4 of 4 steps" in vs_code.printed


def test_vs_code_stops_at_an_exception(editor, folder: Path):
    replace(folder, "logits", "logits = model(image)")
    vs_code = editor(setExceptionBreakpoints={"filters": ["userUnhandled"]})
    stopped = vs_code.wait("stopped")
    assert stopped["reason"] == "exception" and "NameError" in stopped.get("text", stopped["description"])
