"""docs/cluster.md: its edits of slurm.sbatch, with stand-ins for Slurm and the containers."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from edits import apply
from helpers import REPO, diff, section

APPTAINER = diff("docs/cluster.md", "In a container")
(CONTAINER,) = re.findall(r"^```\n( +--container-.*\n)```$", section("docs/cluster.md", "In a container"), re.MULTILINE)
PYXIS = re.sub(r"\+ +apptainer .*\n", lambda line: f"+{CONTAINER}", APPTAINER)
STAGING = diff("docs/cluster.md", "Data on the node's own disk")
# srun runs the command behind its own options, once for all nodes; the containers and python say how they are called.
STAND_INS = {
    "srun": 'echo "srun $@" >>called; while [[ $1 == --* ]]; do shift; done; "$@"',
    "apptainer": 'echo "apptainer $@" >>called; while [[ $1 != python ]]; do shift; done; "$@"',
    "python": 'echo "python $@" >>called; cat /dev/null $DATA/file; exit 75',
    "scontrol": 'echo "scontrol $@" >>called',
}


def job(diff: str, cwd: Path, **env: str) -> tuple[int, list[str]]:
    """Runs slurm.sbatch with the diff as job 7; returns its exit code, and what was called."""
    script = Path("tools/slurm.sbatch")
    for folder in ("tools", "bin", ".venv/bin"):
        (cwd / folder).mkdir(parents=True)
    shutil.copy(REPO / script, cwd / script)
    apply(diff, cwd)
    for name, text in STAND_INS.items():
        (cwd / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (cwd / "bin" / name).chmod(0o755)
    (cwd / ".venv" / "bin" / "activate").touch()
    slurm = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "2"}
    path = {"PATH": f"{cwd / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, "--epochs", "3"], cwd=cwd, env=path | slurm | env)
    return done.returncode, (cwd / "called").read_text().splitlines()


TRAIN = "python train.py --root_dir . --out_dir train_7 --resume auto --epochs 3"


@pytest.mark.parametrize(
    "diff, how",
    [
        pytest.param(APPTAINER, "apptainer exec --nv --bind {cwd} --pwd {cwd} train.sif", id="apptainer"),
        pytest.param(
            PYXIS,
            "--container-image={cwd}/train.sqsh --container-mounts={cwd}:{cwd} --container-workdir={cwd}",
            id="pyxis",
        ),
    ],
)
def test_a_container_runs_the_program_and_the_job_is_requeued_outside(diff: str, how: str, tmp_path: Path):
    code, (srun, *inside, scontrol) = job(diff, tmp_path)
    assert (code, scontrol) == (75, "scontrol requeue 7")
    assert srun.endswith(f" {how.format(cwd=tmp_path)} {TRAIN}") and "--cpus-per-task=1" in srun
    assert [line.partition(" ")[0] for line in inside] == (["apptainer"] if diff is APPTAINER else []) + ["python"]
    assert inside[-1] == TRAIN


def test_data_are_unpacked_on_each_node_before_the_run_and_deleted_after_it(tmp_path: Path):
    """Where the file were not there during the run, its exit code would be another."""
    (tmp_path / "file").write_text("data")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(tmp_path / "file", "file")
    data = tmp_path / "disk" / "data_7"
    diff = STAGING.replace("/shared/data.tar", f"{tmp_path}/data.tar")
    code, called = job(diff, tmp_path, SLURM_TMPDIR=str(tmp_path / "disk"), DATA=str(data))
    of_srun = [line for line in called if line.startswith("srun")]
    assert all(line.startswith("srun --ntasks=2 --ntasks-per-node=1") for line in (of_srun[0], of_srun[2]))
    assert called[2] == TRAIN.replace("train.py", f"train.py --data_dir {data}")
    assert code == 75 and called[-1] == "scontrol requeue 7"
    assert data.parent.exists() and not data.exists()


def test_a_node_that_cannot_unpack_ends_the_job(tmp_path: Path):
    code, called = job(STAGING, tmp_path, SLURM_TMPDIR=str(tmp_path))
    assert code == 1 and len(called) == 1 and called[0].startswith("srun --ntasks=2")
