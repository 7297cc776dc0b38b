"""What breaks a run breaks it with a clear last line, costs nothing that was saved, and a resume repairs it.

`python tests/faults.py` is the long version: hundreds of kills, and every fault in every place.
"""

import csv
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    LONG,
    ON_2,
    REPO,
    TORCHRUN,
    assert_same_run,
    children,
    copied,
    interrupt,
    kill_group,
    newest,
    run,
    run_dir,
    start,
    wait_for,
)

SLOW = LONG.replace("--epochs 30", "--epochs 3000")  # never ends by itself


def patched(tmp_path: Path, file: str, old: str, new: str) -> Path:
    """A copy of the program with one line changed."""
    repo = tmp_path / "patched"
    repo.mkdir()
    for path in REPO.glob("*.py"):
        shutil.copy(path, repo)
    text = (repo / file).read_text()
    assert text.count(old) == 1
    (repo / file).write_text(text.replace(old, new))
    return repo


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started_on_2(cwd: Path, options: str = "", **more) -> tuple[subprocess.Popen, list[int]]:
    """A run of two processes that has begun to save, and the numbers of its processes."""
    process = start(f"{SLOW} {ON_2} {options}", cwd, **more)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    assert process.poll() is None, process.communicate()
    return process, [process.pid, *children(process.pid)]


def ends(process: subprocess.Popen, pids: list[int], seconds: float) -> tuple[float, str]:
    """Waits until all processes are gone, and returns after how long, and the last line on stderr."""
    began = time.monotonic()
    try:
        error = process.communicate(timeout=seconds)[1]
        wait_for(lambda: not any(map(is_running, pids)), seconds)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    return time.monotonic() - began, error.strip().splitlines()[-1]


def assert_whole_checkpoints(cwd: Path, sigkill: bool = False) -> None:
    """All load; nothing half written is left, unless by a SIGKILL."""
    for path in cwd.glob("*/checkpoints/*"):
        if not (sigkill and path.suffix == ".tmp"):
            torch.load(path, weights_only=True)


# ---- a kill between two things that belong together


def test_a_kill_before_the_first_epoch_ends_costs_no_run(whole, tmp_path):
    process = start(LONG, tmp_path)
    wait_for(lambda: process.poll() is not None or list(tmp_path.glob("2*/checkpoints/step-*")))
    kill_group(process)
    process.communicate()
    run("train.py --resume train_out", tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_run_can_be_resumed_from_before_its_first_step(tmp_path):
    process = start(f"{SLOW} --checkpoint_frequency 3000", tmp_path)
    wait_for(lambda: process.poll() is not None or list(tmp_path.glob("2*")))
    kill_group(process)
    process.communicate()
    assert (run_dir(tmp_path) / "checkpoints" / "step-00000000.ckpt").exists()


def test_a_kill_between_the_last_checkpoint_and_the_final_weights(whole, tmp_path):
    cwd = copied(whole, tmp_path)
    (run_dir(cwd) / "model.pt").unlink()
    run("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


def test_a_kill_between_a_checkpoint_and_its_row_in_the_log(whole, tmp_path):
    cwd = copied(whole, tmp_path)
    (run_dir(cwd) / "model.pt").unlink()
    log = run_dir(cwd) / "logs" / "csv" / "metrics.csv"
    *lines, last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines) + last[: len(last) // 2])
    run("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_nothing_behind(killed, tmp_path):
    cwd = copied(killed, tmp_path)
    (run_dir(cwd) / "checkpoints" / "step-00000777.ckpt.tmp").write_bytes(b"half")
    run("train.py --resume auto", cwd)
    assert_whole_checkpoints(cwd)


# ---- launchers


def test_torchrun_passes_a_signal_on_and_the_run_is_saved(tmp_path):
    process = start(f"{TORCHRUN} {REPO / SLOW}", tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1  # torchrun's own
    assert f"stopped by a signal after {newest(tmp_path)} of" in output


def test_torchrun_restarts_a_killed_rank_and_resume_auto_goes_on(whole, tmp_path):
    process = start(
        f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {REPO / LONG} --resume auto",
        tmp_path,
    )
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert re.search(r"resumed from .*step-", output)
    weights, expected = (torch.load(run_dir(cwd) / "model.pt", weights_only=True) for cwd in (tmp_path, whole))
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)


# ---- dead, failing and frozen ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(rank: int, tmp_path):
    process, pids = started_on_2(tmp_path)
    os.kill(pids[rank], signal.SIGKILL)
    if rank == 0:
        process.communicate(timeout=20)
        wait_for(lambda: not is_running(pids[1]), 20)
        assert process.returncode == -signal.SIGKILL
    else:
        _, line = ends(process, pids, 20)
        assert process.returncode == 1
        assert "another process died" in line and f"--resume {run_dir(tmp_path).name}" in line
    assert_whole_checkpoints(tmp_path, sigkill=rank == 0)


def test_a_frozen_rank_goes_with_rank_0(tmp_path):
    process, pids = started_on_2(tmp_path)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    try:
        wait_for(lambda: not is_running(pids[1]), 10)
    finally:
        kill_group(process)
        process.communicate()


def test_an_exception_in_one_rank_is_the_last_line(tmp_path):
    repo = patched(
        tmp_path,
        "model.py",
        "        return self.layers(images)",
        '        import os\n        self.calls = getattr(self, "calls", 0) + 1\n'
        '        if os.environ.get("LOCAL_RANK") == "1" and self.calls == 60:\n'
        '            raise ValueError("deliberate")\n        return self.layers(images)',
    )
    process = start(f"{SLOW} {ON_2}", tmp_path, repo=repo)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1: ValueError: deliberate" in error.strip().splitlines()[-1]
    assert error.count("Traceback") == 1
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_ends_the_job_after_the_timeout(rank: int, tmp_path):
    process, pids = started_on_2(tmp_path, "--timeout 15")  # a busy machine takes some seconds to start
    os.kill(pids[rank], signal.SIGSTOP)
    seconds, line = ends(process, pids, 50)
    assert seconds < 40
    assert process.returncode == (1 if rank else -signal.SIGKILL)
    assert "did not answer for --timeout 15 seconds" in line
    assert_whole_checkpoints(tmp_path, sigkill=rank == 0)


# ---- two at once


def test_a_run_that_is_being_written_to_is_not_resumed_by_another(tmp_path):
    process = start(SLOW, tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    refused = run("train.py --resume train_out", tmp_path, code=2).stderr
    assert re.fullmatch(rf"train.py: error: .* by process {process.pid} on \S+, since .*\n", refused)
    kill_group(process)
    process.communicate()
    process = start("train.py --resume train_out", tmp_path)  # the lock died with its process
    assert "resumed from" in process.stdout.readline()
    kill_group(process)
    process.communicate()


# ---- damaged files


def test_a_directory_or_garbage_in_the_place_of_checkpoints_is_put_aside(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    *_, older, garbled, replaced = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))  # the kill may have left one more
    data = bytearray(garbled.read_bytes())
    data[len(data) // 2] ^= 1
    garbled.write_bytes(data)
    replaced.unlink()
    replaced.mkdir()
    done = run("train.py --resume auto", cwd)
    assert garbled.name in done.stderr and replaced.name in done.stderr
    assert f"resumed from {older.relative_to(cwd)}" in done.stdout
    assert {path.name for path in replaced.parent.glob("*.damaged")} == {
        f"{garbled.name}.damaged",
        f"{replaced.name}.damaged",
    }
    assert_same_run(cwd, whole)


def test_damaged_rows_of_the_log_are_dropped_with_a_word(killed, tmp_path):
    cwd = copied(killed, tmp_path)
    log = run_dir(cwd) / "logs" / "csv" / "metrics.csv"
    header, first, *others = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(header + bytes(range(128, 256)) + b"\0,\n" + first + b"8,many\n" + b"".join(others))
    done = run("train.py --resume auto", cwd)
    assert "Traceback" not in done.stderr and "damaged" in done.stderr
    with open(log, newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(8, 241, 8))


# ---- no room, no memory


def test_a_full_disk_costs_no_checkpoint(whole, tmp_path):
    def fill(process: subprocess.Popen) -> None:  # no file may grow beyond 5 kB
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5000, 5000))

    done = interrupt(LONG, tmp_path, fill)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert "OSError" in line and f"--resume {run_dir(tmp_path).name}" in line and "Traceback" not in done.stderr
    assert_whole_checkpoints(tmp_path)
    run("train.py --resume train_out", tmp_path)
    assert_same_run(tmp_path, whole)


def test_out_of_memory_names_a_smaller_micro_batch_size(tmp_path):
    process = start("train.py --accelerator cpu --effective_batch_size 1200 --width 1024", tmp_path)
    wait_for(lambda: process.poll() is not None or list(tmp_path.glob("2*/config.yaml")))
    size = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(process.pid, resource.RLIMIT_AS, (size + 2**28, size + 2**28))
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "out of memory: try --micro_batch_size 600 for the same" in error.strip().splitlines()[-1]


# ---- signals


def test_a_second_signal_of_any_kind_ends_at_once(tmp_path):
    repo = patched(
        tmp_path,
        "model.py",
        "        return self.layers(images)",
        '        import pathlib, time\n        self.calls = getattr(self, "calls", 0) + 1\n'
        '        if self.calls == 60:\n            pathlib.Path("slow").touch()\n            time.sleep(100)\n'
        "        return self.layers(images)",
    )
    process = start(SLOW, tmp_path, repo=repo)
    wait_for(lambda: process.poll() is not None or (tmp_path / "slow").exists())
    process.terminate()
    time.sleep(1)
    assert process.poll() is None  # it waits for the end of the step
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
