"""What lies around a run where people train: other processes, signals, folders, disks, and what libraries do."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from edits import insert_after, insert_before
from helpers import (
    ON_2,
    PREEMPTED,
    REPO,
    SLOW,
    SMALL,
    assert_same_run,
    assert_stopped_and_saved,
    assert_whole_checkpoints,
    call,
    clean_environment,
    copied,
    end_of,
    is_running,
    kill_group,
    newest,
    run,
    run_dir,
    start,
    started,
    terminate_group,
    wait_for,
)
from mistakes import assert_one_line, refuses

# ---- the lock of a run


def test_a_run_that_copies_its_own_directory_keeps_its_lock_and_tells_of_a_directory_that_is_gone(program, cwd):
    """A lock of the process would end when the copy of .lock is closed."""
    copy = 'if step == 20:\n    shutil.copytree(run.directory.path, run.directory.path.parent / "copy")'
    insert_before(program, "step is done", copy)
    insert_before(program, "functions", "import shutil\n\n\n")
    process, pids = started(cwd, repo=program)
    try:
        wait_for((cwd / "copy" / ".lock").exists)
        wait_for(lambda: newest(cwd) > 24)
        assert_one_line(run("train.py --resume auto", cwd, code=2), "--resume", run_dir(cwd).name)
        run_dir(cwd).rename(cwd / "gone")
        wait_for(lambda: process.poll() is not None)
    finally:
        if process.poll() is None:
            kill_group(process)
        lines = end_of(process, pids)
    assert_one_line(subprocess.CompletedProcess("train.py", 1, "", "\n".join(lines)), "[Errno 2] No such file")
    assert process.returncode == 1


def test_a_lock_ends_with_the_run_although_its_data_workers_live_on(tmp_path):
    process, pids = started(tmp_path, "--num_workers 1")
    worker = next(pid for pid in pids if pid != process.pid)
    os.kill(worker, signal.SIGSTOP)  # so that it does not notice the death of the run
    process.kill()
    process.wait()
    assert is_running(worker)
    try:
        done = run(f"train.py --resume auto --max_steps {newest(tmp_path) + 4} --num_workers 0", tmp_path)
    finally:
        kill_group(process)
    assert "finished" in done.stdout


# ---- processes of the user

UPLOAD = """
import multiprocessing, time

def upload():
    time.sleep(3)
    open("uploaded", "w").close()

"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_the_loop_has_started_is_not_ended_with_the_data_workers(workers, program, cwd):
    insert_before(program, "functions", UPLOAD)
    insert_after(program, "step is done", "if step == 2:\n    multiprocessing.Process(target=upload).start()")
    run(f"{program}/train.py {SMALL} --max_steps 4 --num_workers {workers}", cwd)
    assert (cwd / "uploaded").exists()


IN_A_WORKER = """
import subprocess

CHILD = "import time; print('began', flush=True); time.sleep(60)"


"""
STARTS_A_PROGRAM = """
if torch.utils.data.get_worker_info() and not hasattr(self, "child"):
    self.child = subprocess.Popen(["python", "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True)
    self.child.stdout.readline()
    open(f"program-{self.child.pid}", "w").close()
"""


def assert_stops_and_saves(process: subprocess.Popen, cwd: Path) -> None:
    out, error = process.communicate(timeout=300)
    assert_stopped_and_saved(subprocess.CompletedProcess([], process.returncode, out, error), cwd)


def test_a_program_that_a_data_worker_has_started_does_not_ignore_signals(program, cwd):
    """Like ffmpeg. With a session of its own it outlives a signal to the group, so the run can save: docs/data.md."""
    insert_before(program, "build_datasets", IN_A_WORKER)
    insert_before(program, "fetch", STARTS_A_PROGRAM)
    process, _ = started(cwd, f"--num_workers 1 {ON_2}", repo=program)
    first, *others = [int(path.name.partition("-")[2]) for path in cwd.glob("program-*")]
    os.kill(first, signal.SIGTERM)
    wait_for(lambda: not is_running(first))
    terminate_group(process)
    wait_for(lambda: process.poll() is not None)
    for pid in others:
        os.kill(pid, signal.SIGKILL)  # they have its stderr
    assert_stops_and_saves(process, cwd)


def test_data_workers_can_be_started_by_spawn(tmp_path, program, cwd):
    """As on a Mac, or for a library that cannot be used after a fork."""
    insert_before(program, "digits", 'torch.multiprocessing.set_start_method("spawn", force=True)')
    insert_before(program, "fetch", 'open(f"fetched-{torch.multiprocessing.get_start_method()}", "w").close()')
    command = f"train.py {SMALL} --max_steps 6 --log_interval 1"
    run(f"{program}/{command} --num_workers 1", cwd)
    assert (cwd / "fetched-spawn").exists()
    forked = tmp_path / "forked"
    forked.mkdir()
    call(command, forked)
    assert_same_run(cwd, forked)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_a_stop_iteration_of_a_dataset_is_an_error(script, workers, finished, program, tmp_path):
    """Elsewhere in Python it is the end of the data: of an epoch, or of an evaluation."""
    cwd = copied(finished.parent, tmp_path)
    code = "if len(index := torch.as_tensor(indices)) > 1 and 100 in index:\n    next(iter([]))"
    insert_before(program, "fetch", code)
    options = f"{SMALL} --limit_train_batches 1.0 --out_dir other" if script == "train.py" else "--accelerator cpu"
    error = run(f"{program}/{script} {options} --num_workers {workers}", cwd, code=1).stderr
    assert "RuntimeError: " in error and "collate_fn" in error and "StopIteration" in error
    assert not [*cwd.glob("*/test_*.json")]


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU])
def test_further_signals_stop_and_save(number, tmp_path):
    """submitit sends SIGUSR2; a limit of CPU time gives SIGXCPU."""
    process, _ = started(tmp_path)
    os.kill(process.pid, number)
    assert_stops_and_saves(process, tmp_path)


def test_a_signal_that_the_shell_ignores_stays_ignored(tmp_path):
    """As for a job in the background, or after `trap '' INT`."""
    script = f"trap '' INT; exec {sys.executable} {REPO / SLOW}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=clean_environment(), **quiet)
    try:
        wait_for(lambda: process.poll() is not None or newest(tmp_path) > 8)
        process.send_signal(signal.SIGINT)
        before = newest(tmp_path)
        wait_for(lambda: process.poll() is not None or newest(tmp_path) > before + 8)
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=300) == PREEMPTED
    finally:
        process.kill()


# ---- the working directory


def test_a_library_that_changes_the_working_directory_does_not_move_the_run(tmp_path, program, cwd):
    """Where it is called in build_datasets. The paths are shown as they were given."""
    insert_before(program, "digits", f"import os; os.chdir({str(tmp_path)!r})")
    printed = run(f"{program}/train.py {SMALL} --max_steps 4 --root_dir runs", cwd).stdout
    (folder,) = (cwd / "runs").iterdir()
    assert f"run directory runs/{folder.name}\n" in printed and f"--out_dir runs/{folder.name}\n" in printed
    printed = run(f"{program}/train.py --resume auto --root_dir runs --max_steps 6", cwd).stdout
    assert f"resumed from runs/{folder.name}/checkpoints/step-00000004.ckpt" in printed
    printed = run(f"{program}/test.py --accelerator cpu --root_dir runs", cwd).stdout
    assert f"results runs/{folder.name}/test_test_best.json" in printed
    assert (folder / "test_test_best.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"program", "cwd"} and [*cwd.iterdir()] == [cwd / "runs"]


# ---- disks


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    if os.getuid() > 0:
        folder.chmod(0o555)
        yield
        folder.chmod(0o755)
        return
    if subprocess.run(["mount", "--bind", folder, folder], check=False).returncode:  # root may write everywhere else
        pytest.skip("needs the right to mount")
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
    yield
    subprocess.run(["umount", folder], check=True)


def test_a_run_that_cannot_get_the_results_is_told_before_the_evaluation(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / finished.name))
    (folder / "checkpoints" / "best.ckpt").write_bytes(b"damaged, and not read")
    with read_only(folder):
        done = call("test.py --accelerator cpu", tmp_path, code=2)
    assert_one_line(done, "--out_dir")
    assert "Permission denied" in done.stderr or "Read-only file system" in done.stderr


FAILS = """
import errno

def testzip(self):
    raise OSError(errno.EIO, "Input/output error")

zipfile.ZipFile.testzip = testzip
"""


def test_an_error_of_the_system_while_a_checkpoint_is_read_renames_nothing(tmp_path, program):
    call(f"train.py {SMALL} --max_steps 4", tmp_path)
    insert_before(program, "format", FAILS)
    assert_one_line(run(f"{program}/train.py --resume auto --max_steps 6", tmp_path, code=1), "[Errno 5]")
    assert not [*tmp_path.glob("*/checkpoints/*.damaged")]


# ---- waiting


def test_a_run_that_waits_for_the_datasets_of_another_one_says_so(tmp_path, program, cwd):
    insert_before(program, "digits", "import time, os\nwhile not os.path.exists('go'):\n    time.sleep(0.02)")
    printed = [tmp_path / "first.txt", tmp_path / "second.txt"]
    processes = []
    for path in printed:
        with open(path, "w") as file:
            command = f"train.py {SMALL} --max_steps 2 --out_dir {path.stem}"
            processes.append(start(command, cwd, repo=program, stdout=file.fileno()))

    def waiting() -> int:
        return sum("waiting for build_datasets of another run on this machine" in path.read_text() for path in printed)

    wait_for(waiting)
    (cwd / "go").touch()
    for process in processes:
        process.communicate(timeout=300)
    assert [process.returncode for process in processes] == [0, 0] and waiting() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_wait_for_each_other_say_where(rank, program, cwd):
    """A collective that one rank alone calls: each rank names the line of the user's file where it waited."""
    code = f"if step == 6 and fabric.global_rank == {rank}:\n    fabric.barrier()\n    fabric.barrier()"
    insert_before(program, "step is done", code)
    error = run(f"{program}/train.py {SMALL} --timeout 3 {ON_2}", cwd, code=1).stderr
    lines = (program / "train.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "barrier" in line)
    places = re.findall(r"rank (\d): another process .*; this rank waited in (\w+\.py):(\d+)", error)
    assert places, error[-600:]
    mine = [int(line) for found, file, line in places if int(found) == rank and file == "train.py"]
    assert not mine or number <= mine[0] <= number + 1
    assert_whole_checkpoints(cwd)


def test_a_run_needs_no_other_program_and_stdout_may_be_ascii(tmp_path: Path):
    """Such as git, or a shell, which a small container does not have. The name is in umlauts."""
    command = f"train.py {SMALL} --epochs 1 --out_dir Größe"
    printed = run(command, tmp_path, PATH=str(tmp_path), PYTHONIOENCODING="ascii").stdout
    assert re.search(r"^run directory \d+-\d+-Gr\\xf6\\xdfe$", printed, re.MULTILINE)
    (provenance,) = run_dir(tmp_path, "Größe").glob("provenance/*.txt")
    assert "branch.oid" not in provenance.read_text()


def test_no_folder_for_temporary_files_is_told_in_one_line(program: Path, cwd: Path):
    insert_before(program, "functions", "import tempfile\n\ntempfile.tempdir = '/proc/nowhere'\n\n\n")
    refuses(f"{program}/train.py {SMALL}", cwd, "build_datasets", "/proc/nowhere", how=run)


REFUSES = """
import builtins, errno, os

open_file = builtins.open

def refuse(*args):
    raise OSError(errno.EINVAL, "refused")

def without_append(path, mode="r", *args, **options):
    is_refused = mode == "a" and str(path).endswith("metrics.csv")
    return (refuse if is_refused else open_file)(path, mode, *args, **options)

os.fsync = refuse
builtins.open = without_append

"""


def test_a_file_system_that_refuses_to_append_and_to_sync_is_written_to(tmp_path: Path):
    """As some of FUSE do."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    whole.mkdir(), other.mkdir()
    program = insert_before(tmp_path / "program", "functions", REFUSES)
    command = f"train.py {SMALL} --log_interval 1 --logger_name csv --epochs 2"
    run(command, whole)
    run(f"{program}/{command}", other)
    assert_same_run(other, whole)
