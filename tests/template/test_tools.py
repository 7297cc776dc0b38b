"""The scripts of tools/ that are written in bash, and the edits of slurm.sbatch in docs/cluster.md, with stand-ins for
Slurm, containers and nvidia-smi."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from commands import TOOLS
from copies import diff, section
from edits import apply

APPTAINER = diff("docs/cluster.md", "In a container")
(CONTAINER,) = re.findall(r"^```\n( +--container-.*\n)```$", section("docs/cluster.md", "In a container"), re.MULTILINE)
PYXIS = re.sub(r"\+ +apptainer .*\n", lambda line: f"+{CONTAINER}", APPTAINER)
STAGING = diff("docs/cluster.md", "Data on the node's own disk")
CHECKPOINT = "20260101-000000-train_7/checkpoints/step-00000004.ckpt"
# srun runs the command behind its own options, once for all nodes. python writes a checkpoint if it is told so, and
# fails without a file that it needs. GPU 0 has a process, GPU 2 memory in use without one, GPU 4 does not tell its
# memory.
STAND_INS = {
    "srun": 'echo "srun $@" >>called; while [[ $1 == --* ]]; do shift; done; "$@"',
    "apptainer": 'echo "apptainer $@" >>called; while [[ $1 != python ]]; do shift; done; "$@"',
    "python": 'echo "python $@" >>called; touch $WRITES; [[ -e $NEEDS ]] && exit $CODE',
    "scontrol": 'echo "scontrol $@" >>called',
    "nvidia-smi": """case $* in
    "--query-gpu=index,uuid,memory.used,memory.total --format=csv,noheader,nounits")
        printf '%s\\n' "0, GPU-00, 10, 80000" "1, GPU-11, 600, 80000" "2, GPU-22, 9000, 80000" "3, GPU-33, 0, 80000" \\
            "4, GPU-44, [N/A], [N/A]" ;;
    "--query-compute-apps=gpu_uuid --format=csv,noheader") printf '%s\\n' GPU-00 GPU-00 ;;
    *) exit 2 ;;
esac""",
}


def script(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs a script with the stand-ins, and with no other variables than PATH and these."""
    for folder in ("bin", ".venv/bin"):
        (cwd / folder).mkdir(parents=True)
    for name, text in STAND_INS.items():
        (cwd / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (cwd / "bin" / name).chmod(0o755)
    (cwd / ".venv" / "bin" / "activate").touch()
    env["PATH"] = f"{cwd / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(f"bash {command}", shell=True, cwd=cwd, env=env, capture_output=True, text=True)


def job(cwd: Path, diff: str = "", **env: str) -> tuple[int, list[str]]:
    """Runs slurm.sbatch with a diff as job 7, on two nodes; returns its exit code, and what was called."""
    (cwd / "tools").mkdir()
    shutil.copy(TOOLS / "slurm.sbatch", cwd / "tools")
    apply(diff, cwd)
    slurm = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "2"}
    done = script("tools/slurm.sbatch --epochs 3", cwd, **{"CODE": "75", "WRITES": "none", "NEEDS": "."} | slurm | env)
    return done.returncode, (cwd / "called").read_text().splitlines()


TRAIN = "python train.py --root_dir . --out_dir train_7 --resume auto --epochs 3"
ARRAY = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    "code, before, after, env, run, requeued",
    [
        *((code, "", "", {}, "7", []) for code in (0, 2, 1, 137)),  # after no mistake or failure
        *((code, "", "", {}, "7", ["scontrol requeue 7"]) for code in (75, 138, 143)),  # after a signal
        (1, "", CHECKPOINT, {}, "7", ["scontrol requeue 7"]),  # after a failure if it had saved
        (1, CHECKPOINT, CHECKPOINT, {}, "7", []),  # it fails again before the next checkpoint
        (75, "", "", {"SLURM_RESTART_COUNT": "100"}, "7", []),  # it does not get anywhere
        (75, "", "", ARRAY, "6_3", ["scontrol requeue 6_3"]),  # a task of an array itself alone
        (75, "", "", {"OLD_JOB": "5"}, "5", ["scontrol requeue 7"]),  # a new job goes on with the run of an old one
    ],
)
def test_when_a_job_is_requeued_and_with_which_run(code, before, after, env, run, requeued, tmp_path):
    """By the exit code of the training, and the checkpoints before and after it."""
    (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
    (tmp_path / (before or "none")).touch()
    ended, (_, python, *scontrol) = job(tmp_path, CODE=str(code), WRITES=after or "none", **env)
    assert (ended, scontrol) == (code, requeued)
    assert python == TRAIN.replace("train_7 --resume auto", f"train_{run} --resume auto{' --seed 3' * (env == ARRAY)}")


@pytest.mark.parametrize(
    "diff, how",
    [
        (APPTAINER, "apptainer exec --nv --bind {cwd} --pwd {cwd} train.sif"),
        (PYXIS, "--container-image={cwd}/train.sqsh --container-mounts={cwd}:{cwd} --container-workdir={cwd}"),
    ],
    ids=["apptainer", "pyxis"],
)
def test_a_container_runs_the_program_and_the_job_is_requeued_outside(diff: str, how: str, tmp_path: Path):
    code, (srun, *_, python, scontrol) = job(tmp_path, diff)
    assert (code, python, scontrol) == (75, TRAIN, "scontrol requeue 7")
    assert srun.endswith(f" {how.format(cwd=tmp_path)} {TRAIN}") and "--cpus-per-task=1" in srun


def test_data_are_unpacked_on_each_node_before_the_run_and_deleted_after_it(tmp_path: Path):
    (tmp_path / "file").write_text("data")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(tmp_path / "file", "file")
    data = tmp_path / "disk" / "data_7"
    diff = STAGING.replace("/shared/data.tar", f"{tmp_path}/data.tar")
    code, called = job(tmp_path, diff, SLURM_TMPDIR=str(data.parent), NEEDS=str(data / "file"))
    unpacked, _, python, deleted, scontrol = called
    assert all(line.startswith("srun --ntasks=2 --ntasks-per-node=1 ") for line in (unpacked, deleted))
    assert python == TRAIN.replace("train.py", f"train.py --data_dir {data}")
    assert (code, scontrol) == (75, "scontrol requeue 7")
    assert data.parent.exists() and not data.exists()


def test_a_node_that_cannot_unpack_ends_the_job(tmp_path: Path):
    code, called = job(tmp_path, STAGING, SLURM_TMPDIR=str(tmp_path))
    assert code == 1 and len(called) == 1 and called[0].startswith("srun --ntasks=2")


@pytest.mark.parametrize(
    "wanted, visible, printed, error",
    [("", None, "GPU-11\n", ""), ("3", None, "GPU-11,GPU-33,GPU-44\n", ""), ("4", None, "", "3 of 5"),
     ("two", None, "", "how many?"), ("", "3,0", "GPU-33\n", ""), ("", "GPU-22,GPU-33", "GPU-33\n", ""),
     ("", "", "", "0 of 0")],
)  # fmt: skip
def test_idle_gpus(wanted, visible, printed, error, tmp_path):
    """Of those that are visible."""
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = script(f"{TOOLS}/idle_gpus.sh {wanted}", tmp_path, **env)
    assert (done.stdout, done.returncode) == (printed, 1 if error else 0)
    assert done.stderr.count("\n") == (error != "") and error in done.stderr
