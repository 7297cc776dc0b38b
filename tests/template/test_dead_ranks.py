"""Ranks that die, fail or freeze, and ranks that are not alike."""

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from edits import copy_programs, insert_after, insert_before, replace, with_text
from helpers import (
    ON_2,
    PREEMPTED,
    SLOW,
    SMALL,
    assert_same_run,
    assert_told_by_ranks,
    assert_whole_checkpoints,
    call,
    children,
    end_of,
    free_port,
    history,
    how_to_go_on,
    is_lost,
    is_running,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    start,
    start_two,
    started,
    wait_for,
)
from test_prepared_data import DOWNLOAD, log

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


def test_a_rank_that_hangs_at_its_exit_does_not_keep_a_finished_run(program, cwd):
    """For longer than a minute, of which a second is left here. The system ends it with rank 0."""
    hang = """
        if fabric.global_rank == 1:
            import atexit
            import os
            import time
            atexit.register(time.sleep, 3600)
            print("rank 1 is", os.getpid(), flush=True)
    """
    insert_after(program, "set-up is done", hang)
    with_text(program, "runtime/launch.py", ("process.wait(timeout=60)", "process.wait(timeout=1)"))
    done = run(f"{program}/train.py {SMALL} --max_steps 2 {ON_2}", cwd)
    assert "finished after 2 of 2 steps" in done.stdout
    pid = int(re.search(r"rank 1 is (\d+)", done.stdout)[1])
    wait_for(lambda: not is_running(pid))


# What rank 0 does alone waits for the file `go`.
WAIT = """
from os import environ
from os.path import exists
from time import sleep

if environ.get("WAIT") == {name!r} and not exists({name!r}):
    open({name!r}, "w").close()
    while not exists("go"):
        sleep(0.1)
"""
ALONE = {"check": "checkpoint is chosen", "save": "checkpoint is written", "end": "final weights"}
SAVE_BY_DAY = [phase if phase == "save" else pytest.param(phase, marks=pytest.mark.night) for phase in ALONE]
STEPS = f"{SMALL} --checkpoint_frequency 0 --logger_name csv --timeout 10"


@pytest.fixture(scope="module")
def waits(tmp_path_factory) -> Path:
    """The programs, with a rank 0 that waits."""
    program = tmp_path_factory.mktemp("waits") / "program"
    for name, point in ALONE.items():
        insert_before(program, point, WAIT.format(name=name))
    return program


def start_waiting(phase: str, waits: Path, cwd: Path) -> list[subprocess.Popen]:
    """Two nodes, of which rank 0 waits in this phase."""
    command = f"{waits}/train.py {STEPS} --epochs 1"
    if phase == "check":
        call(command, cwd)
        command = f"{waits}/train.py --resume auto --epochs 2"
    processes = start_two([command, command], cwd, WAIT=phase)
    wait_for(lambda: (cwd / phase).exists() or any(process.poll() is not None for process in processes))
    return processes


@pytest.mark.parametrize("phase", SAVE_BY_DAY)
def test_what_rank_0_does_alone_may_take_longer_than_the_timeout(phase: str, waits, tmp_path):
    processes = start_waiting(phase, waits, tmp_path)
    time.sleep(15)
    (tmp_path / "go").touch()
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, out + error
    assert last_summary(tmp_path)["state"] == "finished"


def test_a_download_may_take_longer_than_the_timeout(tmp_path):
    program = insert_before(tmp_path / "program", "digits", DOWNLOAD)
    folder = tmp_path / "folder"
    folder.mkdir()
    process = start(f"{program}/train.py {STEPS} --epochs 1 {ON_2}", tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began") or process.poll() is not None)
    time.sleep(15)
    assert len(log(folder, "called")) == 1
    (folder / "go").touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out + error
    assert len(log(folder, "called")) == 2
    assert last_summary(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("phase", ALONE)
def test_the_others_notice_at_once_that_rank_0_has_died_alone(phase: str, waits, tmp_path):
    zero, one = start_waiting(phase, waits, tmp_path)
    zero.kill()
    (line,) = one.communicate(timeout=300)[1].splitlines()
    assert one.returncode == 1 and is_lost(line, timeout=10)
    zero.communicate()


@pytest.mark.parametrize("phase", SAVE_BY_DAY)
def test_rank_0_gives_up_after_the_timeout_if_another_was_frozen_meanwhile(phase: str, waits, tmp_path):
    zero, one = start_waiting(phase, waits, tmp_path)
    one.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    (line,) = zero.communicate(timeout=300)[1].splitlines()
    assert zero.returncode == 1 and is_lost(line, timeout=10)
    one.kill()
    one.communicate()


# Rank 0 waits until rank 1, which is its child, has ended, and the launcher has seen that: it looks every five seconds.
CLOSES_SLOWLY = """
import os
import time
from contextlib import suppress

with suppress(ChildProcessError):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
time.sleep(6)
"""


def test_a_rank_that_is_done_does_not_end_one_that_is_closing(tmp_path):
    """Rank 0 closes slowly, as wandb does on a slow line. Its launcher kills all, if another one has ended by then."""
    repo = insert_before(tmp_path / "repo", "run ends", CLOSES_SLOWLY)
    cwd = tmp_path / "run"
    cwd.mkdir()
    process, pids = started(cwd, ON_2, repo=repo)
    process.terminate()
    end_of(process, pids)
    assert process.returncode == PREEMPTED
    assert last_summary(cwd)["state"] == "interrupted"


def test_an_error_of_all_ranks_is_told_by_each_while_rank_0_closes_slowly(tmp_path):
    repo = insert_before(tmp_path / "repo", "run ends", CLOSES_SLOWLY)
    insert_after(repo, "step is done", "if step == 6: run.log({'train/loss': math.nan})")
    one, zero = run(f"{repo}/train.py {SMALL} {ON_2}", tmp_path, code=1).stderr.splitlines()
    assert one.startswith("train.py: error: rank 1: the loss is nan in the steps up to 6; ")
    assert zero.startswith("train.py: error: rank 0: the loss is nan in the steps up to 6; ")
    assert zero.endswith(f"; {how_to_go_on(tmp_path)}")


def test_a_killed_rank_ends_the_others(tmp_path):
    """It has said nothing. Rank 0 says so in one line, and how to go on; but the launcher of Fabric, which looks at its
    processes every five seconds, may be faster, and kill rank 0."""
    process, pids = started(tmp_path, ON_2)
    os.kill(pids[1], signal.SIGKILL)
    lines = end_of(process, pids)
    assert_whole_checkpoints(tmp_path)
    if process.returncode == -signal.SIGKILL:
        assert lines == []
        return
    (line,) = lines
    assert process.returncode == 1
    assert is_lost(line, timeout=300) and f"--resume {run_dir(tmp_path).name}" in line
    assert last_summary(tmp_path)["state"] == "failed"


FAILS_ALONE = """
if step == 30 and fabric.global_rank == {fails}:
    {error}
if step == 30 and fabric.global_rank == {frozen}:
    __import__("signal").raise_signal(19)
"""


def failing_alone(tmp_path: Path, devices: int, **values) -> tuple[subprocess.Popen, Path]:
    """A run of which one rank fails after 30 steps, and another one may be frozen then; and where it is."""
    repo = insert_after(tmp_path / "repo", "step is done", FAILS_ALONE.format(**values))
    cwd = tmp_path / "run"
    cwd.mkdir()
    options = f"--devices {devices} --strategy ddp --effective_batch_size 96 --timeout 25"
    return start(f"{repo}/{SLOW} {options}", cwd), cwd


def told(process: subprocess.Popen, last: str) -> list[str]:
    """The lines on stderr up to this one."""
    watchdog = threading.Timer(300, kill_group, [process])
    watchdog.start()
    lines = []
    for line in process.stderr:
        lines.append(line.removesuffix("\n"))
        if lines[-1] == last:
            break
    watchdog.cancel()
    return lines


@pytest.mark.parametrize(
    "fails, frozen, devices", [(0, 1, 2), (1, 0, 2), pytest.param(2, 1, 3, marks=pytest.mark.night)]
)
def test_an_error_of_one_rank_is_told_at_once_by_that_rank(fails: int, frozen: int, devices: int, tmp_path):
    """With its traceback, while another rank is frozen. What the others say then does not look like the cause."""
    error = 'raise ValueError("deliberate")'
    process, cwd = failing_alone(tmp_path, devices, fails=fails, error=error, frozen=frozen)
    first, *lines = told(process, "ValueError: deliberate")
    assert first == f"rank {fails}: Traceback (most recent call last):"
    assert any(line.strip() == error for line in lines)
    assert not [line for line in lines if is_lost(line, timeout=25)]
    if frozen == 0:
        wait_for(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text())  # it is frozen by now
        process.send_signal(signal.SIGCONT)
    others = process.stderr.read().splitlines()
    assert process.wait() == 1
    if fails == 0:
        assert others == [how_to_go_on(cwd)]
    else:
        assert len(others) == 1 and is_lost(others[0], timeout=25) and "rank 0: " in others[0]
    assert last_summary(cwd)["state"] == "failed"
    assert newest(cwd) == 28
    assert_whole_checkpoints(cwd)


@pytest.mark.parametrize("fails, devices", [(0, 2), (1, 2), (2, 3)])
def test_the_one_line_of_a_rank_comes_before_those_of_the_others(fails: int, devices: int, tmp_path):
    """Which give up after 25 seconds."""
    error = 'raise __import__("runtime.errors").errors.RunError("deliberate")'
    process, cwd = failing_alone(tmp_path, devices, fails=fails, error=error, frozen=None)
    first, *others = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == 1
    assert first.startswith(f"train.py: error: rank {fails}: deliberate")
    assert len(others) < devices and all(is_lost(line, timeout=25) for line in others)
    assert last_summary(cwd)["state"] == "failed"


def test_the_others_give_up_after_the_timeout_if_a_rank_is_frozen(tmp_path):
    """Rank 1 is frozen: for rank 0 the others wait as long as it lives, if it was frozen while it saves."""
    process, pids = started(tmp_path, f"{ON_2} --timeout 25")  # a busy machine takes many seconds to start
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: process.poll() is not None)
    os.kill(pids[1], signal.SIGKILL)  # it would hold stderr open
    (line,) = end_of(process, pids)
    assert process.returncode == 1
    assert line.startswith("train.py: error: rank 0: ") and is_lost(line, timeout=25)
    assert_whole_checkpoints(tmp_path)


# ---- ranks that are not alike


@pytest.mark.parametrize(
    "differs, words",
    [
        ("option", r"--base_lr: 0\.002 on rank 1 \(HOST\), 0\.001 on rank 0"),
        ("file", r"checksum of model\.py: \d+ on rank 1 \(HOST\), \d+ on rank 0"),
        ("imported", r"checksum of parts/own\.py: \d+ on rank 1 \(HOST\), \d+ on rank 0"),
        ("imported late", r"checksum of parts/own\.py: \d+ on rank 1 \(HOST\), \d+ on rank 0"),
    ],
)
def test_a_rank_with_other_options_or_files_is_named(differs: str, words: str, tmp_path):
    """Before anything is made."""
    commands = []
    for rank, base_lr in enumerate(("1e-3", "2e-3")):
        repo = copy_programs(tmp_path / f"repo{rank}")
        (repo / "parts").mkdir()
        (repo / "parts" / "own.py").write_text("own = 0\n")
        if differs.startswith("imported"):
            insert_before(repo, "functions" if differs == "imported" else "model", "import parts.own")
        commands.append(f"{repo}/train.py {STEPS} --base_lr {base_lr if differs == 'option' else 1e-3}")
    if differs != "option":
        with open(repo / ("model.py" if differs == "file" else "parts/own.py"), "a") as file:
            file.write("own = 1\n")
    cwd = tmp_path / "run"
    cwd.mkdir()
    words = words.replace("HOST", os.uname().nodename)
    for rank, process in enumerate(start_two(commands, cwd)):
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 2
        assert re.fullmatch(f"train.py: error: rank {rank}: {words}; all machines need the same files, .*\n", error)
    assert not [*cwd.iterdir()]


def with_values(code: str, folder: Path) -> Path:
    """The programs with a second value beside the loss. `code` may change the values."""
    function = f"""
        def named(values, is_training):
            values["three"] = torch.tensor(3.0)
            rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
            {code}
            return values


    """
    insert_before(folder, "functions", function)
    return replace(folder, "values", 'named({"loss": F.cross_entropy(logits, targets)}, model.training)')


def test_values_that_a_rank_returns_in_another_order_are_averaged_by_name(tmp_path):
    whole, turned = tmp_path / "whole", tmp_path / "turned"
    for cwd, code in ((whole, "pass"), (turned, "values = dict(reversed(values.items())) if rank == 1 else values")):
        cwd.mkdir()
        run(f"{with_values(code, tmp_path / f'repo_{cwd.name}')}/train.py {SMALL} {ON_2}", cwd)
    assert_same_run(turned, whole)
    assert {(row["train/three"], row["val/three"]) for row in history(turned)} == {("3.0", "3.0")}


@pytest.mark.parametrize("where, beside, made", [("True", "accuracy", 0), ("is_training", "grad_norm", 1)])
def test_a_value_that_one_rank_alone_returns_is_named_with_those_of_both(where: str, beside: str, made: int, tmp_path):
    """In the validation before the first step, or, if it is there in the training alone, at the first save or log."""
    repo = with_values(f"if rank == 1 and {where}: values['more'] = torch.tensor(1.0)", tmp_path / "repo")
    cwd = tmp_path / "run"
    cwd.mkdir()
    error = run(f"{repo}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    ranks = f"{beside}, loss, more, three on rank 1 ({os.uname().nodename}), {beside}, loss, three on rank 0"
    words = f"compute_loss and metrics must give the same names on all ranks: names of the values: {ranks}"
    assert_told_by_ranks(error, words)
    assert len([*cwd.iterdir()]) == made


UNUSED = "self.unused = nn.Linear(4, 2)\n"


def test_parameters_without_a_gradient_are_named_in_the_first_step_and_nothing_is_left(tmp_path):
    repo = insert_before(tmp_path / "repo", "layers", UNUSED)
    cwd = tmp_path / "run"
    cwd.mkdir()
    error = run(f"{repo}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    words = (
        "model.unused.weight (2, 4), model.unused.bias (2,): no gradient in the first step; "
        "if that is right, give --strategy ddp_find_unused_parameters_true, "
        "or requires_grad_(False) to what is never trained"
    )
    assert_told_by_ranks(error, words)
    assert not [*cwd.iterdir()]
    done = run(f"{repo}/train.py {SMALL} --devices 2 --strategy ddp_find_unused_parameters_true", cwd)
    assert "finished after 20 of 20 steps" in done.stdout


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_run_directory_that_another_machine_sees_late_or_never(is_seen: bool, tmp_path):
    """Late over NFS; never where it has a --root_dir of its own, which is told by each rank."""
    folders = [tmp_path / "here", tmp_path / "there"]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = f"train.py {SMALL} --epochs 1 --strategy ddp --num_nodes 2 --devices 1"
    processes = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        processes.append(start(command, folder, NODE_RANK=str(rank), **env))
    if is_seen:
        wait_for(lambda: [*folders[0].iterdir()])
        time.sleep(2)
        (folders[1] / run_dir(folders[0]).name).symlink_to(run_dir(folders[0]))
    for process in processes:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == (0 if is_seen else 2), error
        assert is_seen or "is there: False on rank 1 " in error
    assert len([*folders[0].iterdir()]) == is_seen
