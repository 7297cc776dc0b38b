"""Several machines: two hosts, which tools/two_hosts.sh makes out of this one, train one run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from commands import LONG, REPO, SMALL, run, start
from comparisons import assert_same_training
from fixtures import where_trained
from outputs import newest, run_dir, set_running, truncate, without_locks
from processes import assert_stopped_and_saved, wait_for

HOSTS = "tools/two_hosts.sh"
BIN = Path(sys.executable).parent
MICRO_16 = f"{SMALL} --epochs 2 --micro_batch_size 16"
PLAIN = f"{sys.executable} {REPO}/train.py --num_nodes 2 --strategy ddp"
TORCHRUN = f"{BIN}/torchrun --nnodes 2 --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
FABRIC_RUN = (
    f"{BIN}/fabric run --accelerator cpu --strategy ddp --devices 1 --num_nodes 2 --node_rank $NODE_RANK "
    "--main_address $MASTER_ADDR --main_port $MASTER_PORT"
)
ELASTIC = (
    f"{BIN}/torchrun --nnodes 1:2 --max-restarts 3 --monitor-interval 0.1 --rdzv-backend c10d "
    "--rdzv-endpoint host0:29500 --rdzv-conf last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=4"
)
night = pytest.mark.night
pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module", autouse=True)
def two_hosts() -> None:
    probe = subprocess.run(["bash", REPO / HOSTS, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"no second host: {probe.stderr.strip()[-200:]}")


one = where_trained(f"train.py {MICRO_16}")  # by one process


def pids(process: subprocess.Popen, host: int) -> list[int]:
    """The processes of a host."""
    name = f"two_hosts_{process.pid}_{host}"
    return [*map(int, subprocess.check_output(["ip", "netns", "pids", name], text=True).split())]


@night
@pytest.mark.parametrize(
    "command, processes",
    [(f"{PLAIN} --devices 2", 4), (f"{TORCHRUN} {REPO}/train.py", 2), (f"{FABRIC_RUN} {REPO}/train.py", 2)],
    ids=["plain", "torchrun", "fabric run"],
)
def test_two_hosts_train_like_one_process(one, command: str, processes: int, tmp_path):
    done = run(f"{HOSTS} {command} {MICRO_16}", tmp_path)
    assert f"64 = {processes} device(s) x 16 micro_batch_size" in done.stdout
    assert_same_training(tmp_path, one)


def test_a_signal_stops_two_hosts_together_and_they_go_on(whole, tmp_path):
    command = f"{HOSTS} {PLAIN.replace('train.py', LONG)} --devices 1 --resume auto"
    process = start(command, tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    os.kill(pids(process, 1)[0], signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert_stopped_and_saved(subprocess.CompletedProcess(command, process.returncode, out, err), tmp_path)
    run(command, tmp_path)
    assert_same_training(tmp_path, whole)


@pytest.mark.parametrize(
    "damage, words",
    [
        (truncate, "size of RUN/checkpoints/step-00000008.ckpt: HALF on rank 1 (host1), SIZE on rank 0"),
        pytest.param(Path.unlink, "step-00000008.ckpt: None on rank 1 (host1), SIZE on rank 0", marks=night),
        pytest.param(
            lambda path: rmtree(path.parents[1]), "--resume: None on rank 1 (host1), RUN on rank 0", marks=night
        ),
    ],
    ids=["cut", "lost", "without the run"],
)
def test_a_resume_needs_the_same_checkpoint_on_both_hosts(one, damage, words: str, tmp_path):
    """Each says what is not, before anything is made. They have a disk each."""
    run_0, run_1 = (Path(copytree(run_dir(one), tmp_path / host / run_dir(one).name)) for host in "01")
    for folder in (run_0, run_1):
        set_running(folder)
    checkpoint = run_1 / "checkpoints" / "step-00000008.ckpt"
    size = checkpoint.stat().st_size
    damage(checkpoint)
    before = without_locks(tmp_path)
    command = f"{HOSTS} cd $NODE_RANK && {PLAIN} --devices 1 --resume auto {MICRO_16}"
    error = run(command, tmp_path, code=2).stderr
    words = words.replace("RUN", run_0.name).replace("HALF", str(size // 2)).replace("SIZE", str(size))
    lines = sorted(line for line in error.splitlines() if line.startswith("train.py: error: "))
    assert [f"rank {rank}: " in line and words in line for rank, line in enumerate(lines)] == [True, True], lines
    assert without_locks(tmp_path) == before and "Traceback" not in error


def test_a_host_that_is_missing_is_not_waited_for_longer_than_the_timeout(one, tmp_path):
    (tmp_path / "1").mkdir()
    set_running(copytree(run_dir(one), tmp_path / "0" / run_dir(one).name))
    command = f"{HOSTS} cd $NODE_RANK && {PLAIN} --devices 1 --resume train_out --timeout 5"
    error = run(command, tmp_path, code=1).stderr
    (host_1,) = [line for line in error.splitlines() if line.startswith("train.py: error: ")]
    assert "--resume train_out: no such run" in host_1
    assert "DistStoreError: Timed out after 6 seconds" in error.splitlines()[-1]  # of host 0


@night
def test_a_killed_rank_and_then_a_killed_host_cost_a_restart_each(whole, tmp_path):
    command = f"{HOSTS} {ELASTIC} {REPO / LONG} --timeout 60 --resume auto"
    process = start(command, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    os.kill(pids(process, 1)[-1], signal.SIGKILL)
    step = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > step + 8)
    for pid in pids(process, 1):
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL, err  # of host 1; host 0 has ended well
    assert re.findall(r"64 = (\d) device", out) == ["2", "2", "1"]
    assert_same_training(tmp_path, whole)
