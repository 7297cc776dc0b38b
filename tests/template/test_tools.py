"""The scripts of tools/ that are written in bash, with stand-ins for Slurm and nvidia-smi."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import TOOLS, run

# ---- slurm.sbatch, with stand-ins for Slurm: srun writes a checkpoint if it is told so, scontrol what it gets


@pytest.fixture
def job(tmp_path: Path):
    """Runs slurm.sbatch as a job; returns its exit code, the options of train.py, and what scontrol got."""
    commands = {
        "srun": 'echo "$@" >srun_got; mkdir -p 20260101-000000-train_7/checkpoints; touch $WRITES; exit $CODE',
        "scontrol": 'echo "$@" >scontrol_got',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")

    def run_job(code: int, writes: str = "", options: str = "--epochs 3", **env: str) -> tuple[int, str, str]:
        slurm = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
        process = subprocess.run(
            ["bash", TOOLS / "slurm.sbatch", *options.split()],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "WRITES": writes or "none"}
            | slurm
            | env,
        )
        requeued = tmp_path / "scontrol_got"
        got = requeued.read_text().strip() if requeued.exists() else ""
        return process.returncode, (tmp_path / "srun_got").read_text().split("train.py ")[1].strip(), got

    return run_job


@pytest.mark.parametrize("code, requeued", [(0, False), (2, False), (1, False), (137, False), (75, True), (138, True)])
def test_a_job_is_requeued_after_a_signal_but_not_after_a_mistake(code: int, requeued: bool, job):
    assert job(code) == (code, "--root_dir . --out_dir train_7 --resume auto --epochs 3", "requeue 7" * requeued)


def test_a_job_is_requeued_after_a_failure_if_it_had_saved(job):
    """One that fails again before the next checkpoint ends."""
    checkpoint = "20260101-000000-train_7/checkpoints/step-00000004.ckpt"
    assert job(1, checkpoint)[2] == "requeue 7"


def test_a_failure_that_comes_again_at_the_same_place_ends_the_job(job, tmp_path: Path):
    checkpoint = "20260101-000000-train_7/checkpoints/step-00000004.ckpt"
    (tmp_path / checkpoint).parent.mkdir(parents=True)
    (tmp_path / checkpoint).touch()
    assert job(1, checkpoint)[2] == ""


def test_a_task_of_an_array_requeues_itself_alone(job):
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}
    options = "--root_dir . --out_dir train_6_3 --resume auto --seed 3 --epochs 3"
    assert job(75, **array) == (75, options, "requeue 6_3")


def test_a_new_job_goes_on_with_the_run_of_an_old_one(job):
    options = "--root_dir . --out_dir train_5 --resume auto --epochs 3"
    assert job(75, OLD_JOB="5") == (75, options, "requeue 7")


# ---- idle_gpus.sh, with a stand-in for nvidia-smi: GPU 0 has a process, GPU 2 memory in use without
# one, GPU 4 does not tell its memory

NVIDIA_SMI = """#!/bin/bash
case $* in
    "--query-gpu=index,uuid,memory.used,memory.total --format=csv,noheader,nounits")
        printf '%s\\n' "0, GPU-00, 10, 80000" "1, GPU-11, 600, 80000" "2, GPU-22, 9000, 80000" "3, GPU-33, 0, 80000" \\
            "4, GPU-44, [N/A], [N/A]" ;;
    "--query-compute-apps=gpu_uuid --format=csv,noheader") printf '%s\\n' GPU-00 GPU-00 ;;
    *) exit 2 ;;
esac
"""


@pytest.fixture
def with_nvidia_smi(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    "wanted, printed, error",
    [("", "GPU-11\n", ""), ("3", "GPU-11,GPU-33,GPU-44\n", ""), ("4", "", "3 of 5 are idle"), ("two", "", "how many?")],
)
def test_idle_gpus(wanted: str, printed: str, error: str, with_nvidia_smi, tmp_path: Path):
    done = run(f"tools/idle_gpus.sh {wanted}", tmp_path, code=1 if error else 0)
    assert done.stdout == printed and done.stderr.count("\n") == (error != "") and error in done.stderr


@pytest.mark.parametrize(
    "visible, printed, error",
    [("3,0", "GPU-33\n", ""), ("GPU-22,GPU-33", "GPU-33\n", ""), ("0", "", "0 of 1 are idle"), ("", "", "0 of 0")],
)
def test_idle_gpus_are_of_those_that_are_visible(
    visible: str, printed: str, error: str, with_nvidia_smi, tmp_path: Path
):
    done = run("tools/idle_gpus.sh", tmp_path, code=1 if error else 0, CUDA_VISIBLE_DEVICES=visible)
    assert done.stdout == printed and error in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has nvidia-smi")
def test_idle_gpus_needs_nvidia_smi(tmp_path: Path):
    assert "no nvidia-smi" in run("tools/idle_gpus.sh", tmp_path, code=1).stderr
