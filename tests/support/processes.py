"""Runs that go on beside the test, and their end by a signal."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from commands import PREEMPTED, SLOW, STEPS, start
from outputs import newest, run_dir


def wait_for(condition, seconds: float = 300):
    """Waits until condition() is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [pid, *(found for child in children(pid) for found in descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def terminate(process: subprocess.Popen) -> None:
    process.terminate()


def interrupt(command: str, cwd: Path, stop, after: int = 16) -> subprocess.CompletedProcess:
    """Starts the command and calls stop(process) once a checkpoint of the middle of an epoch is there."""
    process = start(command, cwd)
    try:
        wait_for(lambda: process.poll() is not None or (newest(cwd) > after and newest(cwd) % 8 in (2, 4)))
        assert process.poll() is None, process.communicate()
        stop(process)
        out, err = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            kill_group(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def started(cwd: Path, options: str = "", **more) -> tuple[subprocess.Popen, list[int]]:
    """A run that has begun to save, and the numbers of its processes, the first rank first."""
    process = start(f"{SLOW} {options}", cwd, **more)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    assert process.poll() is None, process.communicate()
    return process, descendants(process.pid)


def end_of(process: subprocess.Popen, pids: list[int]) -> list[str]:
    """Waits until all processes are gone, and returns the lines on stderr, without those of progress, which come where
    a run takes more than half a minute. What is left is killed."""
    try:
        error = process.communicate(timeout=300)[1]
        wait_for(lambda: not any(map(is_running, pids)))
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    return [line for line in error.strip().splitlines() if not re.match(r" *\d+%\|", line)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_two(commands: list[str], cwds: list[Path], **env: str) -> list[subprocess.Popen]:
    """Two nodes with a process each, in a folder each, which nothing but the command has launched: they must notice
    each other's end."""
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(f"{command} --num_nodes 2 --devices 1", cwd, NODE_RANK=str(rank), **env)
        for rank, (command, cwd) in enumerate(zip(commands, cwds, strict=True))
    ]


def is_lost(line: str, timeout: int) -> bool:
    """Whether it is all that a rank has to say when the connection to another one is lost."""
    words = f"another process has ended, or did not answer for --timeout {timeout} seconds: see its message"
    place = r"this rank waited in [\w/]+\.py:\d+"
    more = "; the checkpoints are whole, continue with: python train.py --resume .+"
    return bool(re.fullmatch(rf"train.py: error: rank \d: {words} \(.+?\); {place}({more})?", line))


def assert_stopped_and_saved(done: subprocess.CompletedProcess, cwd: Path) -> None:
    """The run says that it was stopped, after which step, and how to go on; and has a checkpoint of that step."""
    assert done.returncode == PREEMPTED, done.stderr
    step = int(re.search(r"stopped after (\d+) of", done.stdout)[1])
    assert step == newest(cwd) < STEPS
    assert f"--resume {run_dir(cwd).name}" in done.stdout
    assert not (run_dir(cwd) / "model.pt").exists()
    assert "Traceback" not in done.stderr


def how_to_go_on(cwd: Path) -> str:
    """What a run says at its end if it is not finished."""
    return f"the checkpoints are whole, continue with: python train.py --resume {run_dir(cwd).name}"
