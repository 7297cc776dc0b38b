"""Several processes: launchers, and two runs in one directory."""

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zygote
from helpers import (
    LONG,
    NO_SHARED_STORE,
    ON_2,
    REPO,
    SLOW,
    SMALL,
    TORCHRUN,
    assert_same_training,
    call,
    children,
    free_port,
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
from mistakes import refuses

night = pytest.mark.night
FABRIC_RUN = f"{Path(sys.executable).parent / 'fabric'} run --accelerator cpu --devices 2 --strategy ddp"
RESTARTS = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1"


@pytest.fixture(autouse=True, scope="module")
def real_ranks() -> Iterator[None]:
    """Fabric starts the ranks, as it does for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote, "PREPARE", "")
        yield


# ---- launchers


@night
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", [RESTARTS, FABRIC_RUN], ids=["torchrun", "fabric run"])
def test_a_launcher_passes_a_signal_on_and_the_run_is_saved(launcher: str, number: int, tmp_path):
    process = start(f"{launcher} {REPO / SLOW}", tmp_path, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1  # the launcher's own
    assert f"stopped after {newest(tmp_path)} of" in output and "resumed from" not in output
    assert last_summary(tmp_path)["state"] == "interrupted"


@night
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_killed_rank_and_resume_auto_goes_on(rank: int, whole, tmp_path):
    process = start(f"{RESTARTS} {REPO / LONG} --resume auto", tmp_path, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    os.kill(children(process.pid)[rank], signal.SIGKILL)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert re.search(r"resumed from .*step-", output) and "TORCH_DISABLE" not in output + error
    assert_same_training(tmp_path, whole)


@night
def test_restarts_without_the_variable_are_refused_in_one_line(tmp_path):
    """They may hang for longer than --timeout."""
    error = run(f"{RESTARTS} {REPO / SLOW}", tmp_path, code=1).stderr
    assert "train.py: error: torchrun --max-restarts 2: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error
    assert not [*tmp_path.iterdir()]


@night
@pytest.mark.parametrize(
    "options, asked, more",
    [
        ("--devices 1", 1, {}),
        ("--devices 3", 3, {}),
        ("--devices 2 --num_nodes 2", 4, {}),
        pytest.param("--devices 3", 3, {"LAUNCHER_PID": "1"}, id="a run has started torchrun, as to evaluate"),
    ],
)
def test_another_number_of_processes_than_torchrun_has_started_is_refused(options, asked, more, cwd):
    """By each rank, before it waits for others. A run that has started torchrun is not what has launched the rank,
    which would end with it."""
    torchrun = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    words = [*options.split(" --"), f"asks for {asked} process(es)", "has started 2"]
    refuses(f"train.py {SMALL} {options}", cwd, *words, how=partial(run, **torchrun, **more))


def test_a_rank_that_begins_when_its_launcher_is_dead_ends(tmp_path):
    """It would wait for rank 0, for --timeout seconds."""
    of_fabric = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    of_dead = {"LAUNCHER_PID": "1", "MASTER_PORT": str(free_port())}  # this test, and not the process 1, is its parent
    run(f"train.py {SMALL} {ON_2} --timeout 5", tmp_path, -signal.SIGKILL, **of_fabric, **of_dead)


@pytest.mark.parametrize("left", [{"MASTER_ADDR": "192.0.2.1"}, pytest.param({"LOCAL_RANK": "0"}, marks=night)])
def test_what_an_earlier_launch_has_left_in_the_shell_does_no_harm(left: dict, tmp_path):
    """Another machine's address; or a rank, by which Fabric would take this process for one that it has started."""
    done = run(f"train.py {SMALL} {ON_2} --epochs 1 --timeout 60", tmp_path, **left)
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


# ---- a resume that rank 0 refuses


@pytest.mark.parametrize("launcher", ["Fabric", pytest.param("torchrun", marks=night)])
@pytest.mark.parametrize("what", ["damaged", "being_written_to"])
def test_a_resume_that_rank_0_alone_refuses_is_told_by_it_and_changes_nothing(what: str, launcher: str, tmp_path):
    """In the only line; under torchrun, the other rank may say that rank 0 has ended."""
    if what == "damaged":
        call(f"train.py {SMALL} --epochs 1", tmp_path)
        set_running(run_dir(tmp_path))
        for path in tmp_path.glob("*/checkpoints/*.ckpt"):
            truncate(path)
    else:
        process, _ = started(tmp_path)
        process.send_signal(signal.SIGSTOP)
    folder, before = run_dir(tmp_path), without_locks(tmp_path)
    locked = (folder / ".lock").read_bytes()
    words, code = {
        "damaged": (f"no checkpoint in {folder.name}/checkpoints can be read", 1),
        "being_written_to": (f"--resume: another process is writing to {folder.name}", 2),
    }[what]
    if launcher == "Fabric":
        error = run(f"train.py --resume train_out {ON_2}", tmp_path, code).stderr
    else:
        error = run(f"{TORCHRUN} {REPO}/train.py --accelerator cpu --resume train_out", tmp_path, code=1).stderr
        assert f"exitcode  : {code} " in error
    first, *others = [line for line in error.splitlines() if line.startswith("train.py: error: ")]
    assert first.startswith(f"train.py: error: rank 0: {words}")
    assert error == f"{first}\n" if launcher == "Fabric" else all(is_lost(line, timeout=300) for line in others)
    assert without_locks(tmp_path) == before and (folder / ".lock").read_bytes() == locked
    if what == "damaged":
        return
    process.send_signal(signal.SIGCONT)
    step = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > step)
    kill_group(process)
    process.communicate()
    process = start("train.py --resume train_out", tmp_path)  # the lock died with its process
    assert any("resumed from" in line for line in process.stdout)
    kill_group(process)
    process.communicate()
