"""What lies around a run where people train: other processes, signals, folders, disks, and what libraries do."""

import errno
import fcntl
import os
import re
import signal
import subprocess

import pytest
from commands import ON_2, SMALL, call, run
from comparisons import assert_same_best, assert_same_run
from edits import insert_after, insert_before
from mistakes import assert_one_line, refuses
from outputs import assert_whole_checkpoints, copied, newest, run_dir
from processes import assert_stopped_and_saved, end_of, is_running, kill_group, started, wait_for

# ---- the lock of a run


def test_a_run_that_copies_its_own_directory_keeps_its_lock_and_tells_of_a_directory_that_is_gone(program, cwd):
    """A lock of the process would end when the copy of .lock is closed."""
    copy = 'if step == 20:\n    shutil.copytree(run.directory.path, run.directory.path.parent / "copy")'
    insert_before(program, "step is done", copy)
    insert_before(program, "functions", "import shutil\n\n\n")
    process, pids = started(cwd, repo=program)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 24)
    assert (cwd / "copy" / ".lock").exists()
    assert_one_line(run("train.py --resume auto", cwd, code=2), "--resume", run_dir(cwd).name)
    run_dir(cwd).rename(cwd / "gone")
    (line,) = end_of(process, pids)
    assert process.returncode == 1 and "train.py: error: " in line and "[Errno 2] No such file" in line


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
if step == 2:
    upload = "import time; time.sleep(3); open('uploaded', 'w').close()"
    torch.multiprocessing.get_context("fork").Process(target=exec, args=(upload,)).start()
"""


# What a program that a data worker starts ignores: a number with a bit for each signal.
IGNORED = """
if torch.utils.data.get_worker_info():
    method, subprocess = torch.multiprocessing.get_start_method(), __import__("subprocess")
    subprocess.run(f"grep SigIgn /proc/self/status > ignored-{method}", shell=True, check=True)
"""


def test_data_workers_can_be_started_by_spawn_and_a_process_of_the_loop_is_not_ended_with_them(tmp_path, program, cwd):
    """As on a Mac, or for a library that cannot be used after a fork. A program that a worker has started, such as
    ffmpeg, does not ignore signals as the worker does."""
    insert_before(program, "digits", 'torch.multiprocessing.set_start_method("spawn", force=True)')
    insert_before(program, "fetch", IGNORED)
    insert_after(program, "step is done", UPLOAD)
    command = f"train.py {SMALL} --max_steps 6 --log_interval 1"
    run(f"{program}/{command} --num_workers 1", cwd)
    ignored = int((cwd / "ignored-spawn").read_text().split()[1], 16)
    assert not ignored & 1 << signal.SIGTERM - 1 and (cwd / "uploaded").exists()
    call(command, tmp_path)
    assert_same_run(cwd, tmp_path)


def test_a_stop_iteration_of_a_dataset_is_an_error(program, cwd):
    """Elsewhere in Python it is the end of the data: of an epoch, or of an evaluation."""
    code = "if len(index := torch.as_tensor(indices)) > 1 and 100 in index:\n    next(iter([]))"
    insert_before(program, "fetch", code)
    error = run(f"{program}/train.py --accelerator cpu", cwd, code=1).stderr
    assert "RuntimeError: " in error and "collate_fn" in error and "StopIteration" in error


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU])
def test_a_signal_that_the_shell_ignores_stays_ignored_and_further_signals_stop_and_save(number, tmp_path):
    """Ignored, as SIGINT is for a job in the background, or after `trap '' INT`. submitit sends SIGUSR2; a limit of CPU
    time gives SIGXCPU."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by what is started
    process, _ = started(tmp_path)
    signal.signal(signal.SIGINT, handler)
    process.send_signal(signal.SIGINT)
    before = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > before + 8)
    assert process.poll() is None
    process.send_signal(number)
    out, error = process.communicate(timeout=300)
    assert_stopped_and_saved(subprocess.CompletedProcess([], process.returncode, out, error), tmp_path)


# ---- folders and disks


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


def refusing(number: int):
    """A function of the system that refuses."""

    def refuse(*args, **options):
        raise OSError(number, os.strerror(number))

    return refuse


def test_an_error_of_the_system_is_one_line_and_renames_nothing(finished, tmp_path, monkeypatch):
    """While a checkpoint is read; and where results could not be written, it is told before the evaluation."""
    cwd = copied(finished.parent, tmp_path)
    monkeypatch.setattr("zipfile.ZipFile.testzip", refusing(errno.EIO))
    refuses("train.py --resume auto --epochs 6", cwd, "Input/output error", code=1)
    monkeypatch.setattr("tempfile.TemporaryFile", refusing(errno.EROFS))
    assert "on 380 test samples" not in refuses("test.py --accelerator cpu", cwd, "--out_dir", "Read-only file system")
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")  # where data are built in turn
    refuses(f"train.py {SMALL} --out_dir other", cwd, "build_datasets", "/proc/nowhere")


def test_a_file_system_that_refuses_to_append_to_lock_to_sync_and_to_link_is_written_to(tmp_path, cwd, monkeypatch):
    """As some of FUSE and of memory sticks do. best.ckpt is then a copy."""
    open_file, refuse = open, refusing(errno.EINVAL)

    def without_append(path, mode="r", *args, **options):
        is_refused = mode == "a" and str(path).endswith("metrics.csv")
        return (refuse if is_refused else open_file)(path, mode, *args, **options)

    command = f"train.py {SMALL} --log_interval 1 --logger_name csv --epochs 2"
    call(command, tmp_path)
    monkeypatch.setattr("builtins.open", without_append)
    monkeypatch.setattr("os.fsync", refuse)
    monkeypatch.setattr("os.link", refuse)
    flock = fcntl.flock  # gets a number of the lock of build_datasets, which is on another file system
    monkeypatch.setattr("fcntl.flock", lambda file, how: (flock if isinstance(file, int) else refuse)(file, how))
    assert "cannot be locked (Invalid argument)" in call(command, cwd).stdout
    assert_same_run(cwd, tmp_path)
    assert_same_best(cwd, tmp_path)
    files = [*run_dir(cwd).glob("checkpoints/*")]
    assert {path.stat().st_nlink for path in files} == {1} and {path.suffix for path in files} == {".ckpt"}


def test_a_run_needs_no_other_program_and_stdout_may_be_ascii(tmp_path):
    """Such as git, or a shell, which a small container does not have. The name is in umlauts, also in config.yaml."""
    command = f"train.py {SMALL} --epochs 1 --out_dir Größe"
    printed = run(command, tmp_path, PATH=str(tmp_path), PYTHONIOENCODING="ascii").stdout
    assert re.search(r"^run directory \d+-\d+-Gr\\xf6\\xdfe$", printed, re.MULTILINE)
    assert "out_dir: Größe\n" in (run_dir(tmp_path, "Größe") / "config.yaml").read_text("utf-8")
    (provenance,) = run_dir(tmp_path, "Größe").glob("provenance/*.txt")
    assert "branch.oid" not in provenance.read_text()


# ---- waiting


def test_ranks_that_wait_for_each_other_say_where(program, cwd):
    """A collective that one rank alone calls: it names the line of the user's file where it waited."""
    code = "if step == 6 and fabric.global_rank == 1:\n    fabric.barrier()\n    fabric.barrier()"
    insert_before(program, "step is done", code)
    error = run(f"{program}/train.py {SMALL} --timeout 20 {ON_2}", cwd, code=1).stderr
    places = re.findall(r"rank (\d): another process .*; this rank waited in (\w+\.py):(\d+)", error)
    assert places, error[-600:]
    lines = (program / "train.py").read_text().splitlines()
    mine = [lines[int(number) - 1] for rank, file, number in places if (rank, file) == ("1", "train.py")]
    assert all("barrier" in line for line in mine)
    assert_whole_checkpoints(cwd)
