"""Several processes: launchers, and two runs in one directory."""

import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zygote
from commands import NO_SHARED_STORE, ON_2, REPO, SLOW, SMALL, TORCHRUN, call, run, start
from mistakes import refuses
from outputs import last_summary, newest, run_dir, without_locks
from processes import free_port, is_running, kill_group, started, wait_for

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
@pytest.mark.parametrize(
    "launcher, number", [(RESTARTS, signal.SIGTERM), (FABRIC_RUN, signal.SIGINT)], ids=["torchrun", "fabric run"]
)
def test_a_launcher_passes_a_signal_on_and_the_run_is_saved(launcher: str, number: int, tmp_path):
    process = start(f"{launcher} {REPO / SLOW}", tmp_path, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1  # the launcher's own
    assert f"stopped after {newest(tmp_path)} of" in output and "resumed from" not in output
    assert last_summary(tmp_path)["state"] == "interrupted"


@night
def test_restarts_without_the_variable_are_refused_in_one_line(tmp_path):
    """They may hang for longer than --timeout."""
    error = run(f"{RESTARTS} {REPO / SLOW}", tmp_path, code=1).stderr
    assert "train.py: error: torchrun --max-restarts 2: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error
    assert not [*tmp_path.iterdir()]


@night
@pytest.mark.parametrize("options, asked", [("--devices 1", 1), ("--devices 2 --num_nodes 2", 4)])
def test_another_number_of_processes_than_torchrun_has_started_is_refused(options: str, asked: int, cwd):
    """By each rank, before it waits for others. A run that has started torchrun, as to evaluate, is not what has
    launched the rank, which would end with it."""
    torchrun = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    words = [*options.split(" --"), f"asks for {asked} process(es)", "has started 2"]
    refuses(f"train.py {SMALL} {options}", cwd, *words, how=partial(run, LAUNCHER_PID="1", **torchrun))


def test_a_rank_that_begins_when_its_launcher_is_dead_ends(tmp_path):
    """It would wait for rank 0, for --timeout seconds."""
    of_fabric = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    of_dead = {"LAUNCHER_PID": "1", "MASTER_PORT": str(free_port())}  # this test, and not the process 1, is its parent
    run(f"train.py {SMALL} {ON_2} --timeout 5", tmp_path, -signal.SIGKILL, **of_fabric, **of_dead)


def test_what_an_earlier_launch_has_left_in_the_shell_does_no_harm(tmp_path):
    """Another machine's address, and a rank, by which Fabric would take this process for one that it has started."""
    left = {"MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": "0"}
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


def test_a_run_that_is_being_written_to_is_refused_by_rank_0_alone_and_stays_as_it_is(tmp_path):
    """In the only line. The lock dies with its process."""
    process, _ = started(tmp_path)
    process.send_signal(signal.SIGSTOP)
    folder, before = run_dir(tmp_path), without_locks(tmp_path)
    locked = (folder / ".lock").read_bytes()
    error = run(f"train.py --resume train_out {ON_2}", tmp_path, code=2).stderr
    assert error == f"train.py: error: rank 0: --resume: another process is writing to {folder.name}\n"
    assert without_locks(tmp_path) == before and (folder / ".lock").read_bytes() == locked
    kill_group(process)
    process.communicate()
    done = call(f"train.py --resume train_out --max_steps {newest(tmp_path) + 4}", tmp_path)
    assert "resumed from" in done.stdout
