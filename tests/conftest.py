"""The tests run the real scripts in real processes. What they share is here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

# Small enough for a run of a few seconds: 5 epochs of 4 steps, on the CPU.
SMALL = "--accelerator cpu --epochs 5 --limit_train_batches 4 --limit_val_batches 2 --width 4 --num_sanity_val_steps 1"


def start(command: str, cwd: Path, **env: str) -> subprocess.Popen:
    """Starts `train.py ...` or `test.py ...` in `cwd`, as the leader of a process group of its own."""
    script, _, options = command.partition(" ")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "LT_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, str(REPO / script), *options.split()],
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(command: str, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Runs it to its end and checks the exit code."""
    process = start(command, cwd, **env)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, f"{command}\nexit code {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_dir(cwd: Path, name: str = "train_out") -> Path:
    """The one run directory of that name."""
    (found,) = [path for path in cwd.iterdir() if path.name.endswith(f"-{name}")]
    return found


def wait_for(condition, seconds: float = 120):
    """Waits until condition() is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a small finished run, to be read, not changed."""
    cwd = tmp_path_factory.mktemp("finished")
    run(f"train.py {SMALL}", cwd)
    return run_dir(cwd)
