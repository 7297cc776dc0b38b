"""--strategy model_parallel: weights, gradients and optimizer are spread over the processes (FSDP2 on the CPU)."""

import json
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import (
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    assert_same_training,
    children,
    copied,
    diffs,
    edited,
    interrupt,
    kill_group,
    newest,
    run,
    run_dir,
    start,
    truncate,
    wait_for,
    weights,
)
from torch.distributed.checkpoint import FileSystemReader

from model import Model
from utils import is_whole

SHARDED = "--devices 2 --strategy model_parallel"
# Each optimizer step of LONG is two micro-batches, of 64; here four, so that up to four processes can share them.
FOUR = LONG.replace("--micro_batch_size 32", "--micro_batch_size 16").replace("--epochs 30", "--epochs 4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Where a sharded run was never interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    run(f"{FOUR} {SHARDED}", cwd)
    return cwd


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Where one process ran, without sharding."""
    cwd = tmp_path_factory.mktemp("alone")
    run(FOUR, cwd)
    return cwd


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Where a sharded run was killed in the middle of an epoch. To be copied."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(f"{FOUR} {SHARDED}", cwd, kill_group).returncode == -signal.SIGKILL
    return cwd


def test_weights_are_those_of_ddp_and_of_one_process(whole, alone, tmp_path):
    run(f"{FOUR} {ON_2}", tmp_path)
    assert_same_training(whole, alone)
    assert_same_training(whole, tmp_path)


def test_final_weights_are_whole_and_plain(whole):
    saved = weights(whole)
    assert all(type(tensor) is torch.Tensor for tensor in saved.values())
    Model((1, 8, 8), 10, width=4).load_state_dict(saved)


def test_resumes_bit_identical(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    assert not (run_dir(cwd) / "checkpoints" / "best.ckpt").is_symlink()  # as many ways to copy follow the link
    run("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


@pytest.mark.parametrize(
    "devices",
    [
        "--devices 1 --strategy auto",
        "--devices 2 --strategy ddp",
        "--devices 4 --strategy model_parallel",
    ],
)
def test_resumes_on_other_devices(whole, killed, tmp_path, devices):
    cwd = copied(killed, tmp_path)
    run(f"train.py --resume auto {devices}", cwd)
    assert_same_training(cwd, whole)


def test_a_run_that_was_not_sharded_goes_on_sharded(alone, tmp_path):
    interrupt(FOUR, tmp_path, kill_group)
    run(f"train.py --resume auto {SHARDED}", tmp_path)
    assert_same_training(tmp_path, alone)


def test_goes_on_from_before_the_first_step(whole, tmp_path):
    """The first checkpoint has no state of the optimizer: to ask a sharded one for it would be a step."""
    process = start(f"{FOUR} {SHARDED} --checkpoint_frequency 3", tmp_path)
    wait_for(lambda: [*tmp_path.glob("2*/checkpoints/step-00000000.ckpt")])
    kill_group(process)
    process.communicate()
    assert newest(tmp_path) == 0
    run("train.py --resume auto", tmp_path)
    torch.testing.assert_close(weights(tmp_path), weights(whole), atol=0, rtol=0)


def test_keeps_the_newest_checkpoints_and_the_best(tmp_path):
    """A directory has one name only, so best.ckpt is a symbolic link, and what it shows stays. Here the first epoch is
    the best, and is saved for that alone: a checkpoint is due every second epoch."""
    options = "--checkpoint_frequency 2 --num_checkpoint_keep 1 --monitor train/loss --monitor_mode max"
    run(f"{FOUR} {SHARDED} {options}", tmp_path)
    folder = run_dir(tmp_path) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best-00000008.ckpt", "best.ckpt", "step-00000032.ckpt"]
    assert (folder / "best.ckpt").resolve() == folder / "best-00000008.ckpt" and is_whole(folder / "best.ckpt")


def lose_a_part(path):
    (path / "__1_0.distcp").unlink()


def flip_a_bit(path):
    parts = FileSystemReader(path).read_metadata().storage_data.values()
    largest = max(parts, key=lambda part: part.length)
    with open(path / largest.relative_path, "r+b") as file:
        file.seek(largest.offset + largest.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def truncate_a_part(path):
    truncate(path / "__0_0.distcp")


def lose_the_values(path):
    (path / "meta.pt").unlink()


@pytest.mark.parametrize("damage", [lose_a_part, flip_a_bit, truncate_a_part, lose_the_values])
def test_a_damaged_checkpoint_is_not_whole(whole, tmp_path, damage):
    path = Path(shutil.copytree(run_dir(whole) / "checkpoints" / "step-00000032.ckpt", tmp_path / "step"))
    assert is_whole(path)
    damage(path)
    assert not is_whole(path)


def test_a_damaged_checkpoint_is_skipped(killed, whole, tmp_path):
    cwd = copied(killed, tmp_path)
    step = newest(cwd)
    flip_a_bit(run_dir(cwd) / "checkpoints" / f"step-{step:08d}.ckpt")
    done = run("train.py --resume auto", cwd)
    assert f"step-{step:08d}.ckpt: it is damaged" in done.stderr
    assert_same_run(cwd, whole)


def test_a_full_disk_costs_no_checkpoint(whole, tmp_path):
    def fill(process) -> None:  # no file may grow beyond 5 kB
        for pid in (process.pid, *children(process.pid)):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (5000, 5000))

    done = interrupt(f"{FOUR} {SHARDED}", tmp_path, fill)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert f"--resume {run_dir(tmp_path).name}" in line and "Traceback" not in done.stderr
    assert all(is_whole(path) for path in tmp_path.glob("*/checkpoints/*.ckpt"))
    run("train.py --resume auto", tmp_path)
    assert_same_run(tmp_path, whole)


def test_evaluation_reads_a_sharded_run(whole, alone, tmp_path):
    """On one process and sharded again: what the run on one process gave."""
    run(f"test.py --out_dir {run_dir(alone)}", tmp_path)
    expected = json.loads((run_dir(alone) / "test_results.json").read_text())
    cwd = copied(whole, tmp_path)
    for devices in ("--devices 1", SHARDED):
        run(f"test.py --out_dir train_out --accelerator cpu {devices}", cwd)
        results = json.loads((run_dir(cwd) / "test_results.json").read_text())
        assert results["accuracy"] == expected["accuracy"]
        assert results["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_each_process_holds_its_share(tmp_path):
    """Weights and optimizer take half the memory on two processes."""
    options = f"train.py {SMALL} --width 16 --epochs 1 --logger_name csv --checkpoint_frequency None"
    numbers = [
        [float(number) for number in re.findall(r"(?:weights|optimizer) ([\d.]+) MB", run(command, tmp_path).stdout)]
        for command in (options, f"{options} {SHARDED}")
    ]
    assert numbers[0][1] == pytest.approx(2 * numbers[0][0], rel=0.02)  # AdamW has two numbers for each weight
    assert numbers[1] == pytest.approx([number / 2 for number in numbers[0]], rel=0.05)


def test_compiles_in_bf16(tmp_path):
    options = f"{SMALL} --epochs 1 --limit_train_batches 2 --logger_name csv"
    run(f"train.py {options} {SHARDED} --compile --precision bf16-true", tmp_path)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights(tmp_path).values())


@pytest.mark.parametrize("diff", diffs("recipes/README.md"))
def test_less_is_sharded_or_kept(whole, tmp_path, diff):
    """ZeRO-2, and activations computed again: the same training."""
    program = edited(diff, tmp_path) / "train.py"
    run(f"{program} {FOUR.removeprefix('train.py')} {SHARDED}", tmp_path)
    assert_same_training(tmp_path, whole)


def test_dp_says_what_to_use(tmp_path):
    assert "use ddp" in run(f"train.py {SMALL} --strategy dp", tmp_path, code=2).stderr
