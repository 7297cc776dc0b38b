"""docs/cluster.md: its edits of slurm.sbatch, with stand-ins for Slurm and the containers, and how the process
that the others wait for is found."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from edits import apply, insert_after
from helpers import REPO, SLOW, clean_environment, diff, free_port, section, wait_for

APPTAINER = diff("docs/cluster.md", "In a container")
(CONTAINER,) = re.findall(r"^```\n( +--container-.*\n)```$", section("docs/cluster.md", "In a container"), re.MULTILINE)
PYXIS = re.sub(r"\+ +apptainer .*\n", lambda line: f"+{CONTAINER}", APPTAINER)
STAGING = diff("docs/cluster.md", "Data on the node's own disk")
# srun runs the command behind its own options, once for all nodes; the containers and python say how they are called.
STAND_INS = {
    "srun": 'echo "srun $@" >>called; while [[ $1 == --* ]]; do shift; done; "$@"',
    "apptainer": 'echo "apptainer $@" >>called; while [[ $1 != python ]]; do shift; done; "$@"',
    "python": 'echo "python $@" >>called; cat /dev/null $DATA/file; exit ${CODE:-0}',
    "scontrol": 'echo "scontrol $@" >>called',
}


def job(diff: str, cwd: Path, **env: str) -> tuple[int, list[str]]:
    """Runs slurm.sbatch with the diff as job 7; returns its exit code, and what was called."""
    script = Path("tools/slurm.sbatch")
    (cwd / script.parent).mkdir(parents=True, exist_ok=True)
    shutil.copy(REPO / script, cwd / script)
    apply(diff, cwd)
    (cwd / "bin").mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (cwd / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (cwd / "bin" / name).chmod(0o755)
    (cwd / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (cwd / ".venv" / "bin" / "activate").write_text("")
    slurm = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "2"}
    path = {"PATH": f"{cwd / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, "--epochs", "3"], cwd=cwd, env=path | slurm | env)
    return done.returncode, (cwd / "called").read_text().splitlines()


TRAIN = "python train.py --root_dir . --out_dir train_7 --resume auto --epochs 3"


def test_apptainer_runs_the_program_and_the_job_is_requeued_outside(tmp_path: Path):
    code, (srun, apptainer, python, scontrol) = job(APPTAINER, tmp_path, CODE="75")
    assert (code, python, scontrol) == (75, TRAIN, "scontrol requeue 7")
    assert apptainer == f"apptainer exec --nv --bind {tmp_path} --pwd {tmp_path} train.sif {TRAIN}"
    assert srun.endswith(f"--cpus-per-task=1 {apptainer}")


def test_pyxis_gets_its_options_from_srun(tmp_path: Path):
    code, (srun, python, scontrol) = job(PYXIS, tmp_path, CODE="75")
    assert (code, python, scontrol) == (75, TRAIN, "scontrol requeue 7")
    image = f"--container-image={tmp_path}/train.sqsh"
    assert f" {image} --container-mounts={tmp_path}:{tmp_path} --container-workdir={tmp_path} {TRAIN}" in srun


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "data.tar"
    (tmp_path / "file").write_text("data")
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "file", "file")
    return path


def test_data_are_unpacked_on_each_node_before_the_run_and_deleted_after_it(archive: Path, tmp_path: Path):
    """Where the file were not there during the run, its exit code would be another."""
    diff = STAGING.replace("/shared/data.tar", str(archive))
    data = tmp_path / "disk" / "data_7"
    code, called = job(diff, tmp_path, CODE="75", SLURM_TMPDIR=str(tmp_path / "disk"), DATA=str(data))
    of_srun = [line for line in called if line.startswith("srun")]
    assert all(line.startswith("srun --ntasks=2 --ntasks-per-node=1") for line in (of_srun[0], of_srun[2]))
    assert called[2] == TRAIN.replace("train.py", f"train.py --data_dir {data}")
    assert code == 75 and called[-1] == "scontrol requeue 7"
    assert data.parent.exists() and not data.exists()


def test_a_node_that_cannot_unpack_ends_the_job(tmp_path: Path):
    code, called = job(STAGING, tmp_path, SLURM_TMPDIR=str(tmp_path))
    assert code == 1 and len(called) == 1 and called[0].startswith("srun --ntasks=2")


def stack(error: str) -> list[tuple[str, str]]:
    """File and function of the main thread, the last call first, from the words of faulthandler."""
    main_thread = error.partition("Fatal Python error: Aborted")[2].partition("Current thread")[2].partition("\n\n")[0]
    return re.findall(r'File ".*?(\w+\.py)", line \d+ in (\w+)', main_thread)


def cpu_time(pid: int) -> int:
    """Of a process, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def is_waiting(pid: int) -> bool:
    """Whether a process does nothing for half a second."""
    before = cpu_time(pid)
    time.sleep(0.5)
    return cpu_time(pid) == before


@pytest.mark.night
def test_the_stacks_tell_which_process_the_others_wait_for(tmp_path: Path):
    """The second one sleeps in the loop; the first one waits for its gradients."""
    hang = "if step == 20 and fabric.global_rank == 1:\n    open('hangs', 'w')\n    __import__('time').sleep(1000)"
    program = insert_after(tmp_path / "program", "learning rate", hang)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONFAULTHANDLER": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, program / "train.py", *SLOW.split()[1:], "--num_nodes", "2", "--devices", "1"],
            cwd=tmp_path,
            env=clean_environment() | {"NODE_RANK": str(rank)} | env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        wait_for(lambda: processes[0].poll() or ((tmp_path / "hangs").exists() and is_waiting(processes[0].pid)))
        for process in processes:
            process.send_signal(signal.SIGABRT)
        first, second = (stack(process.communicate(timeout=100)[1]) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert first[0] == ("graph.py", "_engine_run_backward") and ("fabric.py", "backward") in first
    assert second[0] == ("train.py", "train")
