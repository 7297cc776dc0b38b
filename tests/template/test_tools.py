"""The scripts of tools/ that are written in bash, with stand-ins for Slurm and nvidia-smi."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers import TOOLS

CHECKPOINT = "20260101-000000-train_7/checkpoints/step-00000004.ckpt"
# srun writes a checkpoint if it is told so, scontrol what it gets. GPU 0 has a process, GPU 2 memory in use without
# one, GPU 4 does not tell its memory.
STAND_INS = {
    "srun": 'echo "$@" >srun_got; touch $WRITES; exit $CODE',
    "scontrol": 'echo "$@" >scontrol_got',
    "nvidia-smi": """case $* in
    "--query-gpu=index,uuid,memory.used,memory.total --format=csv,noheader,nounits")
        printf '%s\\n' "0, GPU-00, 10, 80000" "1, GPU-11, 600, 80000" "2, GPU-22, 9000, 80000" "3, GPU-33, 0, 80000" \\
            "4, GPU-44, [N/A], [N/A]" ;;
    "--query-compute-apps=gpu_uuid --format=csv,noheader") printf '%s\\n' GPU-00 GPU-00 ;;
    *) exit 2 ;;
esac""",
}


def script(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs a script in a folder with these commands, and with no other variables than PATH and these."""
    for name, text in STAND_INS.items():
        (cwd / name).write_text(f"#!/bin/bash\n{text}\n")
        (cwd / name).chmod(0o755)
    (cwd / ".venv" / "bin").mkdir(parents=True)
    (cwd / ".venv" / "bin" / "activate").touch()
    env["PATH"] = f"{cwd}:{os.environ['PATH']}"
    return subprocess.run(f"bash {TOOLS}/{command}", shell=True, cwd=cwd, env=env, capture_output=True, text=True)


ARRAY = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    "code, before, after, env, run, requeued",
    [
        *((code, "", "", {}, "7", "") for code in (0, 2, 1, 137)),  # after no mistake or failure
        *((code, "", "", {}, "7", "requeue 7") for code in (75, 138, 143)),  # after a signal
        (1, "", CHECKPOINT, {}, "7", "requeue 7"),  # after a failure if it had saved
        (1, CHECKPOINT, CHECKPOINT, {}, "7", ""),  # it fails again before the next checkpoint
        (75, "", "", {"SLURM_RESTART_COUNT": "100"}, "7", ""),  # it does not get anywhere
        (75, "", "", ARRAY, "6_3", "requeue 6_3"),  # a task of an array itself alone
        (75, "", "", {"OLD_JOB": "5"}, "5", "requeue 7"),  # a new job goes on with the run of an old one
    ],
)
def test_when_a_job_is_requeued_and_with_which_run(code, before, after, env, run, requeued, tmp_path):
    """By the exit code of the training, and the checkpoints before and after it."""
    (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
    (tmp_path / (before or "none")).touch()
    slurm = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    more = {"CODE": str(code), "WRITES": after or "none"}
    assert script("slurm.sbatch --epochs 3", tmp_path, **slurm, **more, **env).returncode == code
    seed = " --seed 3" if env == ARRAY else ""
    _, options = (tmp_path / "srun_got").read_text().split(" train.py ")
    assert options == f"--root_dir . --out_dir train_{run} --resume auto{seed} --epochs 3\n"
    got = tmp_path / "scontrol_got"
    assert (got.read_text().strip() if got.exists() else "") == requeued


@pytest.mark.parametrize(
    "wanted, visible, printed, error",
    [("", None, "GPU-11\n", ""), ("3", None, "GPU-11,GPU-33,GPU-44\n", ""), ("4", None, "", "3 of 5"),
     ("two", None, "", "how many?"), ("", "3,0", "GPU-33\n", ""), ("", "GPU-22,GPU-33", "GPU-33\n", ""),
     ("", "0", "", "0 of 1"), ("", "", "", "0 of 0")],
)  # fmt: skip
def test_idle_gpus(wanted, visible, printed, error, tmp_path):
    """Of those that are visible."""
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = script(f"idle_gpus.sh {wanted}", tmp_path, **env)
    assert (done.stdout, done.returncode) == (printed, 1 if error else 0)
    assert done.stderr.count("\n") == (error != "") and error in done.stderr
