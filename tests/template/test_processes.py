"""Several processes: launchers, ranks and data workers that die, fail or freeze, and two runs in one directory."""

import os
import re
import signal
import socket
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from conftest import (
    LONG,
    NO_SHARED_STORE,
    ON_2,
    PREEMPTED,
    REPO,
    SLOW,
    SMALL,
    TORCHRUN,
    assert_same_training,
    assert_whole_checkpoints,
    call,
    children,
    descendants,
    end_of,
    history,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    start,
    started,
    wait_for,
    without_locks,
)
from edits import copy_programs, insert_after, insert_before


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# ---- launchers


@pytest.fixture(scope="module")
def terminated(tmp_path_factory) -> tuple[int, str, Path]:
    """The exit code and the output of a torchrun that may restart and got a SIGTERM; and where that was."""
    cwd = tmp_path_factory.mktemp("terminated")
    process = start(f"{TORCHRUN} --max-restarts 1 {REPO / SLOW}", cwd, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    process.terminate()
    output, _ = process.communicate(timeout=300)
    return process.returncode, output, cwd


def test_torchrun_passes_a_signal_on_and_the_run_is_saved(terminated):
    code, output, cwd = terminated
    assert code == 1  # torchrun's own
    assert f"stopped after {newest(cwd)} of" in output and "resumed from" not in output


def test_torchrun_restarts_a_killed_rank_and_resume_auto_goes_on(whole, tmp_path):
    command = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {REPO / LONG} --resume auto"
    process = start(command, tmp_path, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert re.search(r"resumed from .*step-", output) and "TORCH_DISABLE" not in output + error
    assert_same_training(tmp_path, whole)


DIES_AT_THE_END = """
import os, time

while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(0.1)
    if fabric.global_rank == 1 and (run.path / "model.pt").exists():
        os.kill(os.getpid(), 9)
"""


def test_torchrun_restarts_a_rank_that_dies_when_all_is_done_and_nothing_is_trained_twice(tmp_path):
    repo = insert_after(tmp_path / "repo", "run is finished", DIES_AT_THE_END)
    cwd = tmp_path / "run"
    cwd.mkdir()
    command = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {repo}/train.py {SMALL} --resume auto"
    output = run(command, cwd, **NO_SHARED_STORE).stdout
    assert output.count("is finished") == 1 and "resumed from" not in output
    assert [row["step"] for row in history(cwd)] == ["4", "8", "12", "16", "20"]
    assert len([*run_dir(cwd).glob("provenance/*.txt")]) == 1


def test_restarts_without_the_variable_are_refused_in_one_line(tmp_path):
    """They may hang for longer than --timeout."""
    process = start(f"{TORCHRUN} --max-restarts 1 {REPO / SLOW}", tmp_path)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert "train.py: error: torchrun --max-restarts 1: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error
    assert not [*tmp_path.iterdir()]


def test_the_documented_commands_with_restarts_set_the_variable():
    files = [path for path in (*REPO.glob("*.md"), *REPO.glob("recipes/*")) if path.is_file()]
    pages = [path.read_text().replace("\\\n", "") for path in files]
    commands = [
        line for page in pages for line in page.splitlines() if re.search("torchrun .*--max-restarts .*train", line)
    ]
    assert commands
    assert [line for line in commands if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" not in line] == []


def test_no_process_outlives_torchrun(tmp_path):
    process = start(f"{TORCHRUN} {REPO / SLOW} --num_workers 1", tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    pids = descendants(process.pid)
    assert len(pids) >= 7  # two ranks with two workers each
    process.kill()
    end_of(process, pids)
    assert_whole_checkpoints(tmp_path)


# ---- dead, failing and frozen ranks


def test_no_process_outlives_rank_0(tmp_path):
    """It has launched the others, of which one is frozen."""
    process, pids = started(tmp_path, f"{ON_2} --num_workers 1")
    assert len(pids) >= 6  # two ranks with two workers each
    (rank_1,) = [pid for pid in children(process.pid) if children(pid)]
    os.kill(rank_1, signal.SIGSTOP)
    process.kill()
    end_of(process, pids)
    assert process.returncode == -signal.SIGKILL
    assert_whole_checkpoints(tmp_path)


# What rank 0 does alone waits for the file `go`.
WAIT = """
import os
import time

if os.environ.get("WAIT") == {name!r} and not os.path.exists({name!r}):
    open({name!r}, "w").close()
    while not os.path.exists("go"):
        time.sleep(0.1)
"""
ALONE = {"check": "checkpoint is chosen", "save": "checkpoint is written", "end": "final weights"}
STEPS = f"{SMALL} --checkpoint_frequency 0 --logger_name csv --timeout 10"


@pytest.fixture(scope="module")
def waits(tmp_path_factory) -> Path:
    """The programs, with a rank 0 that waits."""
    program = tmp_path_factory.mktemp("waits") / "program"
    for name, point in ALONE.items():
        insert_before(program, point, WAIT.format(name=name))
    return program


def is_lost(line: str, timeout: int = 300) -> bool:
    """Whether it is all that a rank has to say whose connection to another one is lost."""
    words = f"another process has ended, or did not answer for --timeout {timeout} seconds: see its message"
    return bool(re.fullmatch(rf"train.py: error: rank \d: {words} \(.+\)\S*", line))


def start_two(command: str, cwd: Path, **env: str) -> list[subprocess.Popen]:
    """Two nodes with a process each, which nothing but the command has launched: they must notice each other's end."""
    port = str(free_port())
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(f"{command} --num_nodes 2 --devices 1", cwd, NODE_RANK=str(rank), **env) for rank in range(2)]


def start_waiting(phase: str, waits: Path, cwd: Path) -> list[subprocess.Popen]:
    """Two nodes, of which rank 0 waits in this phase."""
    command = f"{waits}/train.py {STEPS} --epochs 1"
    if phase == "check":
        call(command, cwd)
        command = f"{waits}/train.py --resume auto --epochs 2"
    processes = start_two(command, cwd, WAIT=phase)
    wait_for(lambda: (cwd / phase).exists() or any(process.poll() is not None for process in processes))
    return processes


@pytest.mark.parametrize("phase", ALONE)
def test_what_rank_0_does_alone_may_take_longer_than_the_timeout(phase: str, waits, tmp_path):
    processes = start_waiting(phase, waits, tmp_path)
    time.sleep(15)
    (tmp_path / "go").touch()
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, out + error
    assert last_summary(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("phase", ALONE)
def test_the_others_notice_at_once_that_rank_0_has_died_alone(phase: str, waits, tmp_path):
    zero, one = start_waiting(phase, waits, tmp_path)
    zero.kill()
    (line,) = one.communicate(timeout=300)[1].splitlines()
    assert one.returncode == 1 and is_lost(line, timeout=10)
    zero.communicate()


@pytest.mark.parametrize("phase", ALONE)
def test_rank_0_gives_up_after_the_timeout_if_another_was_frozen_meanwhile(phase: str, waits, tmp_path):
    zero, one = start_waiting(phase, waits, tmp_path)
    one.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    (line,) = zero.communicate(timeout=300)[1].splitlines()
    assert zero.returncode == 1 and is_lost(line, timeout=10)
    one.kill()
    one.communicate()


def test_a_rank_that_is_done_does_not_end_one_that_is_closing(tmp_path):
    """Rank 0 closes slowly, as wandb does on a slow line. Its launcher kills all, if another one has ended by then."""
    repo = insert_before(tmp_path / "repo", "run ends", "time.sleep(15)")
    cwd = tmp_path / "run"
    cwd.mkdir()
    process, pids = started(cwd, ON_2, repo=repo)
    process.terminate()
    end_of(process, pids)
    assert process.returncode == PREEMPTED
    assert last_summary(cwd)["state"] == "interrupted"


def test_an_error_of_all_ranks_is_told_while_rank_0_closes_slowly(tmp_path):
    repo = insert_before(tmp_path / "repo", "run ends", "time.sleep(15)")
    insert_after(repo, "step is done", "if step == 6: utils.check_finite(math.nan, step)")
    *_, line = run(f"{repo}/train.py {SMALL} {ON_2}", tmp_path, code=1).stderr.splitlines()
    assert "the loss is nan in the steps up to 6" in line and "continue with: python train.py --resume" in line


def test_a_killed_rank_ends_the_others(tmp_path):
    process, pids = started(tmp_path, ON_2)
    os.kill(pids[1], signal.SIGKILL)
    *_, line = end_of(process, pids)
    assert process.returncode != 0
    assert "another process died" in line and f"--resume {run_dir(tmp_path).name}" in line
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_rank_is_named_and_ends_the_others(rank: int, tmp_path):
    raises = f'if step == 30 and fabric.global_rank == {rank}:\n    raise ValueError("deliberate")'
    repo = insert_after(tmp_path / "repo", "step is done", raises)
    cwd = tmp_path / "run"
    cwd.mkdir()
    process = start(f"{repo}/{SLOW} {ON_2}", cwd)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert error.count(f"train.py: error: rank {rank}: ValueError: deliberate") == error.count("Traceback") == 1
    assert newest(cwd) == 28
    assert_whole_checkpoints(cwd)


def test_the_others_give_up_after_the_timeout_if_a_rank_is_frozen(tmp_path):
    """Rank 1 is frozen: for rank 0 the others wait as long as it lives, if it was frozen while it saves."""
    process, pids = started(tmp_path, f"{ON_2} --timeout 40")  # a busy machine takes many seconds to start
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: process.poll() is not None)
    os.kill(pids[1], signal.SIGKILL)  # it would hold stderr open
    *_, line = end_of(process, pids)
    assert process.returncode == 1
    assert "rank 0: " in line and "did not answer for --timeout 40 seconds" in line
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_data_worker_that_dies_or_freezes_ends_the_run(signal_number, tmp_path):
    process, pids = started(tmp_path, "--num_workers 1 --timeout 15")
    for worker in pids[1:]:
        os.kill(worker, signal_number)
    *_, line = end_of(process, pids)
    assert process.returncode == 1
    assert "data worker" in line and "--num_workers" in line and "--timeout 15 seconds" in line
    assert f"--resume {run_dir(tmp_path).name}" in line
    assert_whole_checkpoints(tmp_path)


DIES_MEANWHILE = """
for child in torch.multiprocessing.active_children():
    child.kill()
time.sleep(1)
"""


def test_a_data_worker_that_dies_while_the_run_ends_does_not_hide_how_to_go_on(tmp_path):
    repo = insert_before(tmp_path / "repo", "run ends", DIES_MEANWHILE)
    cwd = tmp_path / "run"
    cwd.mkdir()
    process, pids = started(cwd, "--num_workers 1", repo=repo)
    os.kill(pids[1], signal.SIGKILL)
    *_, line = end_of(process, pids)
    assert "data worker" in line and f"--resume {run_dir(cwd).name}" in line
    assert last_summary(cwd)["state"] == "failed"


def test_a_data_worker_that_dies_while_another_is_ended_leaves_none(tmp_path):
    """The one of the validation is frozen: the run waits five seconds for its end."""
    process, pids = started(tmp_path, "--num_workers 1 --val_interval 1000000")
    _, of_validation, of_training = pids
    os.kill(of_validation, signal.SIGSTOP)
    process.terminate()
    wait_for(lambda: process.poll() is not None or "next: " in (run_dir(tmp_path) / "train.log").read_text())
    os.kill(of_training, signal.SIGKILL)
    end_of(process, pids)
    assert process.returncode in (PREEMPTED, 1)  # 1: it died before the end of the other had begun
    assert_whole_checkpoints(tmp_path)


def test_a_run_that_fails_before_its_first_batch_ends_no_process_of_a_notebook(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing
import time
import train

def compute_loss(*_):
    raise ValueError("deliberate")

train.compute_loss = compute_loss
own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
own.start()
try:
    train.main(train.TrainConfig(accelerator="cpu", num_workers=1))
except ValueError:
    own.join(1)  # a signal takes a moment
    print("alive" if own.is_alive() else "dead")
own.kill()
""")
    assert run(str(script), tmp_path).stdout.splitlines()[-1] == "alive"


def test_a_data_worker_that_cannot_be_started_leaves_none_of_the_others(tmp_path):
    """Which ignore the signal by which Python would end them, and wait for them."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing.context
import train

start = multiprocessing.context.ForkProcess.start
started = []

def start_one(process):
    if started:
        raise OSError(12, "Cannot allocate memory")
    start(process)
    started.append(process)

multiprocessing.context.ForkProcess.start = start_one
try:
    train.main(train.TrainConfig(accelerator="cpu", num_workers=2))
except OSError:
    started[0].join()
    print("ended")
""")
    assert run(str(script), tmp_path).stdout.splitlines()[-1] == "ended"


def test_a_second_failure_while_a_run_ends_does_not_hide_how_to_go_on(tmp_path):
    """Where two data workers die, the second may be noticed when the first has ended the loop already."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
from contextlib import ExitStack
import cli
from config import TrainConfig

def fail(number):
    raise RuntimeError(f"DataLoader worker (pid {{number}}) is killed by signal: Killed.")

def main(config):
    with ExitStack() as resources:
        resources.callback(fail, 2)
        resources.push(lambda kind, error, trace: error.add_note("go on with: ..."))
        fail(1)

cli.run(main, TrainConfig())
""")
    line = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr
    assert re.fullmatch(r"fails.py: error: .*worker \(pid 2\).*--num_workers.*; go on with: ...\n", line), line


def test_a_data_worker_that_dies_in_the_middle_of_a_save_is_named(tmp_path):
    """torch raises its error anywhere in the main thread, and torch.save covers it up."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import torch
import cli
from config import TrainConfig

class File:
    written = 0

    def write(self, data):
        if self.written:
            raise RuntimeError("DataLoader worker (pid 2) is killed by signal: Killed.")
        self.written = len(data)
        return len(data)

cli.run(lambda config: torch.save(torch.ones(1_000_000), File()), TrainConfig())
""")
    line = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr
    assert re.fullmatch(r"fails.py: error: .*worker \(pid 2\).*--num_workers.*\n", line), line


# ---- two at once


def test_a_run_that_is_being_written_to_is_not_resumed_by_another(tmp_path):
    process, _ = started(tmp_path)
    process.send_signal(signal.SIGSTOP)
    lock = run_dir(tmp_path) / ".lock"
    before, locked = without_locks(tmp_path), lock.read_bytes()
    refused = run(f"train.py --resume train_out {ON_2}", tmp_path, code=2).stderr
    line = f"train.py: error: --resume: another process is writing to {run_dir(tmp_path).name}\n"
    assert line in refused and refused.count("error") == 1 and "Traceback" not in refused
    assert "another process died" not in refused
    assert without_locks(tmp_path) == before and lock.read_bytes() == locked
    process.send_signal(signal.SIGCONT)
    step = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > step)
    kill_group(process)
    process.communicate()
    process = start("train.py --resume train_out", tmp_path)  # the lock died with its process
    assert any("resumed from" in line for line in process.stdout)
    kill_group(process)
    process.communicate()
