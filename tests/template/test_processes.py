"""Several processes: launchers, and two runs in one directory."""

import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import zygote
from edits import insert_after, replace
from helpers import (
    LONG,
    NO_SHARED_STORE,
    ON_2,
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
    free_port,
    history,
    is_lost,
    is_running,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    set_running,
    start,
    started,
    truncate,
    wait_for,
    without_locks,
)


@pytest.fixture(autouse=True, scope="module")
def real_ranks() -> Iterator[None]:
    """Fabric starts the ranks, as it does for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote, "PREPARE", "")
        yield


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


@pytest.mark.night
def test_torchrun_passes_a_signal_on_and_the_run_is_saved(terminated):
    code, output, cwd = terminated
    assert code == 1  # torchrun's own
    assert f"stopped after {newest(cwd)} of" in output and "resumed from" not in output


@pytest.mark.night
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
    if fabric.global_rank == 1 and (run.directory.path / "model.pt").exists():
        os.kill(os.getpid(), 9)
"""


@pytest.mark.night
def test_torchrun_restarts_a_rank_that_dies_when_all_is_done_and_nothing_is_trained_twice(tmp_path):
    code = f"    code = run.finish()\n{textwrap.indent(DIES_AT_THE_END, '    ')}    return code\n"
    repo = replace(tmp_path / "repo", "run is finished", code)
    cwd = tmp_path / "run"
    cwd.mkdir()
    command = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {repo}/train.py {SMALL} --resume auto"
    output = run(command, cwd, **NO_SHARED_STORE).stdout
    assert output.count("finished after 20 of 20 steps") == 2 and "resumed from" not in output
    assert [row["step"] for row in history(cwd)] == ["4", "8", "12", "16", "20"]
    assert len([*run_dir(cwd).glob("provenance/*.txt")]) == 1


@pytest.mark.night
def test_restarts_without_the_variable_are_refused_in_one_line(tmp_path):
    """They may hang for longer than --timeout."""
    process = start(f"{TORCHRUN} --max-restarts 1 {REPO / SLOW}", tmp_path)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert "train.py: error: torchrun --max-restarts 1: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error
    assert not [*tmp_path.iterdir()]


def test_the_documented_commands_with_restarts_set_the_variable():
    files = [*REPO.glob("*.md"), *REPO.glob("*/*.md"), *REPO.glob("tools/*.s*")]
    pages = [path.read_text().replace("\\\n", "") for path in files]
    commands = [
        line for page in pages for line in page.splitlines() if re.search("torchrun .*--max-restarts .*train", line)
    ]
    assert commands
    assert [line for line in commands if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" not in line] == []


@pytest.mark.night
def test_no_process_outlives_torchrun(tmp_path):
    process = start(f"{TORCHRUN} {REPO / SLOW} --num_workers 1", tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    pids = descendants(process.pid)
    assert len(pids) >= 7  # two ranks with two workers each
    process.kill()
    end_of(process, pids)
    assert_whole_checkpoints(tmp_path)


def test_a_rank_that_begins_when_its_launcher_is_dead_ends(tmp_path):
    """It would wait for rank 0, for --timeout seconds."""
    of_fabric = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    of_dead = {"LAUNCHER_PID": "1", "MASTER_PORT": str(free_port())}  # this test, and not the process 1, is its parent
    run(f"train.py {SMALL} {ON_2} --timeout 5", tmp_path, -signal.SIGKILL, **of_fabric, **of_dead)


@pytest.mark.parametrize("left", ["MASTER_ADDR", pytest.param("LOCAL_RANK", marks=pytest.mark.night)])
def test_what_an_earlier_launch_has_left_in_the_shell_does_no_harm(left: str, tmp_path):
    """Another machine's address; or a rank, by which Fabric would take this process for one that it has started."""
    values = {"MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": "0"}
    done = run(f"train.py {SMALL} {ON_2} --epochs 1 --timeout 60", tmp_path, **{left: values[left]})
    assert "64 = 2 device(s)" in done.stdout and "finished after 4 of 4 steps" in done.stdout


def test_a_run_outlives_its_shell_also_where_a_rank_was_left_in_it(tmp_path):
    """A process that Fabric or torchrun has started ends with them."""
    command = f"{sys.executable} {REPO}/train.py {SMALL} --epochs 100 --logger_name csv"
    wait = "until compgen -G '*-train_out/checkpoints/*.ckpt'; do sleep 0.1; done"
    (tmp_path / "script.sh").write_text(f"nohup {command} > log 2>&1 &\n{wait}\necho $!\n")
    pid = int(run(f"{tmp_path}/script.sh", tmp_path, LOCAL_RANK="0").stdout.split()[-1])
    wait_for(lambda: not is_running(pid))
    assert last_summary(tmp_path)["state"] == "finished"


def test_a_port_that_is_in_use_is_told_in_the_last_line(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        error = run(f"train.py {SMALL} {ON_2}", tmp_path, code=1, MASTER_PORT=str(port)).stderr
    last = error.splitlines()[-1]
    assert "EADDRINUSE" in last and f"port: {port}" in last
    assert not [*tmp_path.iterdir()]


@pytest.mark.night
@pytest.mark.parametrize("options, asked", [("--devices 1", 1), ("--devices 3", 3), ("--devices 2 --num_nodes 2", 4)])
def test_another_number_of_processes_than_torchrun_has_started_is_refused(options: str, asked: int, tmp_path):
    """By each rank, before it waits for others."""
    torchrun = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    error = run(f"train.py {SMALL} {options}", tmp_path, 2, **torchrun).stderr
    words = f"{options if 'nodes' in options else f'{options} --num_nodes 1'}: asks for {asked} process(es)"
    assert error == f"train.py: error: {words}, but the launcher has started 2\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.night
def test_a_rank_of_torchrun_lives_though_a_run_has_started_torchrun(tmp_path):
    """As to evaluate. That run has not launched the rank, which here ends with its own words."""
    torchrun = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    error = run(f"train.py {SMALL} --devices 3", tmp_path, 2, **torchrun, LAUNCHER_PID="1").stderr
    assert "asks for 3 process(es), but the launcher has started 2" in error


# ---- the end of a run


def test_rank_0_ends_last_so_that_nothing_that_another_rank_has_printed_is_lost(program, cwd):
    """Here rank 1 takes a second longer."""
    late = """
        if fabric.global_rank == 1:
            import atexit
            import time
            atexit.register(lambda: [time.sleep(1), print("the last line of rank 1")])
    """
    insert_after(program, "set-up is done", late)
    printed = run(f"{program}/train.py {SMALL} --max_steps 2 {ON_2}", cwd).stdout
    assert "the last line of rank 1" in printed


# ---- a resume that rank 0 refuses

LAUNCHERS = ["Fabric", pytest.param("torchrun", marks=pytest.mark.night)]


def refused_resume(launcher: str, cwd: Path, code: int) -> str:
    """The line of rank 0 in a resume on two processes, where it alone finds that the run cannot be resumed. It is the
    only one; under torchrun, the other rank may say that rank 0 has ended. Nothing has changed."""
    before = without_locks(cwd)
    if launcher == "Fabric":
        error = run(f"train.py --resume train_out {ON_2}", cwd, code).stderr
    else:
        error = run(f"{TORCHRUN} {REPO}/train.py --accelerator cpu --resume train_out", cwd, code=1).stderr
        assert f"exitcode  : {code} " in error
    first, *others = [line for line in error.splitlines() if line.startswith("train.py: error: ")]
    assert len(others) < 2 and all(is_lost(line, timeout=300) for line in others)
    assert launcher == "torchrun" or error == f"{first}\n"
    assert without_locks(cwd) == before
    return first


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_damaged_checkpoints_are_told_by_rank_0_alone(launcher: str, tmp_path):
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    folder = run_dir(tmp_path)
    set_running(folder)
    for path in folder.glob("checkpoints/*.ckpt"):
        truncate(path)
    line = refused_resume(launcher, tmp_path, code=1)
    words = f"no checkpoint in {folder.name}/checkpoints can be read: test.py --checkpoint last says why"
    assert line == f"train.py: error: rank 0: {words}; nothing was changed"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_is_being_written_to_is_not_resumed_by_another(launcher: str, tmp_path):
    process, _ = started(tmp_path)
    process.send_signal(signal.SIGSTOP)
    lock = run_dir(tmp_path) / ".lock"
    locked = lock.read_bytes()
    line = refused_resume(launcher, tmp_path, code=2)
    words = f"--resume: another process is writing to {run_dir(tmp_path).name}"
    assert line == f"train.py: error: rank 0: {words}"
    assert lock.read_bytes() == locked
    process.send_signal(signal.SIGCONT)
    step = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > step)
    kill_group(process)
    process.communicate()
    process = start("train.py --resume train_out", tmp_path)  # the lock died with its process
    assert any("resumed from" in line for line in process.stdout)
    kill_group(process)
    process.communicate()
