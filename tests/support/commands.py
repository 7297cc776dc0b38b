"""Runs the real scripts: in processes of their own, or in that of pytest."""

import gc
import io
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import zygote
from edits import REPO

if "REAL_RANKS" not in os.environ:
    zygote.PREPARE = str(Path(__file__).with_name("ranks.py"))
# One thread, here and in the processes that are started: sums in the same order, equal in every bit.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores it for jobs in the background, and a run keeps what is ignored: here tests decide on it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and a table of a run is then as narrow
os.environ.pop("PYTHONUNBUFFERED", None)  # print would write the parts of a line apart: those of two ranks mix

RECIPES = REPO / "recipes"
TOOLS = REPO / "tools"
# Small enough for a run of a few seconds: 5 epochs of 4 steps, on the CPU.
SMALL = (
    "--accelerator cpu --epochs 5 --limit_train_batches 4 --limit_val_batches 2 --width 4 --num_sanity_val_steps 1 "
    "--warmup_epochs 0.25"
)
# 10 epochs of 8 steps, saved every fourth step, validated and logged once an epoch, four micro-batches a step. The
# constant schedule does not depend on the number of epochs: a run that was made longer can be compared with one that
# was long from the start.
EVERY_FOURTH_STEP = "--checkpoint_frequency 0.5"
LONG = (
    "train.py --accelerator cpu --epochs 10 --limit_train_batches 8 --limit_val_batches 2 --num_sanity_val_steps 0 "
    "--width 4 --micro_batch_size 16 --lr_schedule constant --warmup_epochs 0.125 --logger_name csv "
    f"{EVERY_FOURTH_STEP}"
)
STEPS = 80  # of LONG
SLOW = LONG.replace("--epochs 10", "--epochs 3000")  # never ends by itself
# A new run with two checkpoints: the first is the best, the second is not, and the first goes.
TWO_SAVES = (
    f"train.py {SMALL} --max_steps 4 --checkpoint_interval 2 --val_interval 2 --log_interval 1 --num_checkpoint_keep 1 "
    "--monitor train/grad_norm --monitor_mode max --logger_name csv"
)
ON_2 = "--devices 2 --strategy ddp"
PREEMPTED = 75
# --standalone: on a free port, with each version of torch; other tests start torchrun at the same time.
TORCHRUN = f"{Path(sys.executable).parent / 'torchrun'} --standalone --nproc_per_node 2"
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # which --max-restarts needs


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "LT_", "SLURM_"))}


def start(command: str, cwd: Path, repo: Path = REPO, stdout: int = subprocess.PIPE, **env: str) -> subprocess.Popen:
    """Starts `train.py ...`, `test.py ...` or a script of tools/ in `cwd`, as the leader of a process group."""
    script, _, options = command.partition(" ")
    interpreter = "bash" if script.endswith(".sh") else sys.executable
    return zygote.popen(
        [interpreter, str(repo / script), *options.split()],
        cwd=cwd,
        env=clean_environment() | env,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(command: str, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Runs it to its end and checks the exit code."""
    process = start(command, cwd, **env)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, f"{command}\nexit code {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_forked_sweep(words: str, cwd: Path, code: int = 0, program: Path = REPO) -> subprocess.CompletedProcess:
    """Runs tools/sweep.py, whose runs are forks: for a sweep that is left alone."""
    return run(f"tests/support/forked_sweep.py {program} {words}", cwd, code, ZYGOTE_CHANNEL="")


def call(command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    """As `run`, but in this process, which has imported torch: that takes a process of its own 3 seconds. The programs
    themselves are imported anew. For runs of one process that get no signal."""
    script, _, options = command.partition(" ")
    path, out, err = REPO / script, io.StringIO(), io.StringIO()
    programs = {file.stem for folder in (REPO, path.parent) for file in folder.glob("*.py")} | {"runtime"}
    if path.parent not in (REPO, TOOLS):
        programs |= {folder.name for folder in path.parent.iterdir() if folder.is_dir()}  # packages of its own
    modules = taken(programs)
    environment = dict(os.environ)
    num_threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in os.environ.keys() - clean_environment().keys():
                del os.environ[name]
            patch.chdir(cwd)
            patch.setattr(sys, "argv", [str(path), *options.split()])
            patch.syspath_prepend(path.parent)
            patch.setattr(sys, "dont_write_bytecode", True)  # a program that is edited within a second is read again
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(path), run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(environment)
        taken(programs)
        sys.modules.update(modules)
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(num_threads)
        gc.enable()
        gc.unfreeze()
    found = ended.value.code or 0
    assert found == code, f"{command}\nexit code {found}\n{out.getvalue()}\n{err.getvalue()}"
    return subprocess.CompletedProcess(command, found, out.getvalue(), err.getvalue())


def taken(programs: set[str]) -> dict:
    """Takes these modules, and those within them, out of the list of what was imported."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in programs}


def execute(command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    """As `call`, or, where the command asks for two processes, as `run`."""
    return (run if "--devices 2" in command else call)(command, cwd, code)


def run_in(folder: Path, *commands: str) -> Path:
    """Executes the commands in a new folder, and returns it."""
    folder.mkdir()
    for command in commands:
        execute(command, folder)
    return folder


def folders(parent: Path, *names: str) -> list[Path]:
    """Makes folders of these names."""
    found = [parent / name for name in names]
    for each in found:
        each.mkdir()
    return found
