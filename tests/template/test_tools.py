"""The scripts of tools/ that are written in bash, with stand-ins for Slurm and nvidia-smi."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import TOOLS, run

CHECKPOINT = "20260101-000000-train_7/checkpoints/step-00000004.ckpt"
# srun writes a checkpoint if it is told so, scontrol what it gets. GPU 0 has a process, GPU 2 memory in use without
# one, GPU 4 does not tell its memory.
STAND_INS = {
    "srun": f'echo "$@" >srun_got; mkdir -p {Path(CHECKPOINT).parent}; touch $WRITES; exit $CODE',
    "scontrol": 'echo "$@" >scontrol_got',
    "nvidia-smi": """case $* in
    "--query-gpu=index,uuid,memory.used,memory.total --format=csv,noheader,nounits")
        printf '%s\\n' "0, GPU-00, 10, 80000" "1, GPU-11, 600, 80000" "2, GPU-22, 9000, 80000" "3, GPU-33, 0, 80000" \\
            "4, GPU-44, [N/A], [N/A]" ;;
    "--query-compute-apps=gpu_uuid --format=csv,noheader") printf '%s\\n' GPU-00 GPU-00 ;;
    *) exit 2 ;;
esac""",
}


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """The environment in which these commands are found."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


OF_JOB = "--root_dir . --out_dir train_{} --resume auto{} --epochs 3"
ARRAY = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3", "of_task": " --seed 3"}


@pytest.mark.parametrize(
    "code, writes, before, env, run, requeued",
    [
        *((code, "none", False, {}, "7", "") for code in (0, 2, 1, 137)),  # after no mistake or failure
        *((code, "none", False, {}, "7", "7") for code in (75, 138)),  # after a signal
        (1, CHECKPOINT, False, {}, "7", "7"),  # after a failure if it had saved
        (1, CHECKPOINT, True, {}, "7", ""),  # it fails again before the next checkpoint
        (75, "none", False, ARRAY, "6_3", "6_3"),  # a task of an array itself alone
        (75, "none", False, {"OLD_JOB": "5"}, "5", "7"),  # a new job goes on with the run of an old one
    ],
)
def test_when_a_job_is_requeued_and_with_which_run(code, writes, before, env, run, requeued, stand_ins, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    if before:
        (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
        (tmp_path / CHECKPOINT).touch()
    slurm = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    job = ["bash", TOOLS / "slurm.sbatch", "--epochs", "3"]
    env = stand_ins | {"CODE": str(code), "WRITES": writes} | slurm | env
    of_task = env.pop("of_task", "")
    assert subprocess.run(job, cwd=tmp_path, env=env).returncode == code
    assert (tmp_path / "srun_got").read_text().split("train.py ")[1].strip() == OF_JOB.format(run, of_task)
    got = tmp_path / "scontrol_got"
    assert (got.read_text().strip() if got.exists() else "") == (requeued and f"requeue {requeued}")


@pytest.mark.parametrize(
    "wanted, visible, printed, error",
    [("", None, "GPU-11\n", ""), ("3", None, "GPU-11,GPU-33,GPU-44\n", ""), ("4", None, "", "3 of 5"),
     ("two", None, "", "how many?"), ("", "3,0", "GPU-33\n", ""), ("", "GPU-22,GPU-33", "GPU-33\n", ""),
     ("", "0", "", "0 of 1"), ("", "", "", "0 of 0")],
)  # fmt: skip
def test_idle_gpus(wanted: str, visible: str | None, printed: str, error: str, stand_ins, tmp_path, monkeypatch):
    """Of those that are visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = stand_ins | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = run(f"tools/idle_gpus.sh {wanted}", tmp_path, code=1 if error else 0, **env)
    assert done.stdout == printed and done.stderr.count("\n") == (error != "") and error in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has nvidia-smi")
def test_idle_gpus_needs_nvidia_smi(tmp_path: Path):
    assert "no nvidia-smi" in run("tools/idle_gpus.sh", tmp_path, code=1).stderr
