"""docs/speed.md: its edits apply to the code as it is, and the losses stay what they were. docs/fabric.md has one."""

from pathlib import Path

import pytest
import torch
from edits import copy_programs, insert_after
from helpers import (
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    call,
    diffs,
    edited,
    history,
    killed_and_resumed,
    run,
    run_dir,
)

CHANNELS_LAST, LOSS_INSIDE, UNWRAPPED, TORCH_ALONE = diffs("docs/speed.md")


def losses(script: str, cwd: Path, options: str = "") -> list[float]:
    """The losses of a small run, and that of test.py."""
    cwd.mkdir(exist_ok=True)
    run(f"{script}/train.py {SMALL} --log_interval 1 {options}", cwd)
    printed = run(f"{script}/test.py --out_dir train_out --accelerator cpu --predictions", cwd).stdout
    (loss,) = [line.split()[1] for line in printed.splitlines() if line.startswith("loss ")]
    rows = [row[name] for row in history(cwd) for name in ("train/loss", "val/loss")]
    return [float(value) for value in [*rows, loss] if value]


@pytest.mark.parametrize(
    "diff",
    [CHANNELS_LAST, LOSS_INSIDE, UNWRAPPED, TORCH_ALONE],
    ids=["channels_last", "loss inside", "unwrapped", "torch alone"],
)
def test_an_edit_leaves_the_losses_as_they_are(diff: str, tmp_path: Path):
    """But for the rounding of sums in another order. test.py evaluates it, and keeps the logits."""
    program = edited(diff, tmp_path)
    plain = losses(str(copy_programs(tmp_path / "plain")), tmp_path / "runs of plain")
    assert losses(str(program), tmp_path / "runs") == pytest.approx(plain, abs=1e-5)
    assert len(plain) > 20
    logits, targets = torch.load(run_dir(tmp_path / "runs") / "predictions_test_best.pt", weights_only=True)
    assert logits.shape == (380, 10) and targets.shape == (380,)


@pytest.mark.night
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_loss_inside_the_compiled_model_is_the_same(precision: str, tmp_path: Path):
    options = f"--compile --precision {precision} --epochs 2"
    plain = losses(str(copy_programs(tmp_path / "plain")), tmp_path / "runs of plain", options)
    program = edited(LOSS_INSIDE, tmp_path)
    assert losses(str(program), tmp_path / "runs", options) == pytest.approx(plain, abs=1e-4)


def test_the_memory_format_of_the_model_and_of_its_optimizer_is_that_of_the_edit(tmp_path: Path):
    """Without it, the edit would do nothing but agree."""
    program = edited(CHANNELS_LAST, tmp_path)
    code = """
        weight = model.module.layers[2].weight
        tensors = [weight, optimizer.state[weight]["exp_avg"]]
        print("formats", [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors])
    """
    insert_after(program, "step is done", code)
    assert "formats [True, True]" in call(f"{program}/train.py --accelerator cpu --fast_run", tmp_path).stdout


def test_two_processes_without_the_wrappers_train_as_with_them(tmp_path: Path):
    """The gradients are still averaged: the module that is called is that of DistributedDataParallel."""
    plain, unwrapped = tmp_path / "plain", tmp_path / "unwrapped"
    for cwd, program in ((plain, copy_programs(tmp_path / "one")), (unwrapped, edited(UNWRAPPED, tmp_path / "two"))):
        cwd.mkdir()
        run(f"{program}/train.py {SMALL} --micro_batch_size 16 {ON_2}", cwd)
    assert_same_run(unwrapped, plain)


@pytest.mark.recipes
@pytest.mark.parametrize(
    "diff", [CHANNELS_LAST, UNWRAPPED, TORCH_ALONE], ids=["channels_last", "unwrapped", "torch alone"]
)
def test_a_resume_after_an_edit_is_exact(diff: str, tmp_path: Path):
    killed_and_resumed(f"{edited(diff, tmp_path)}/{LONG}", tmp_path)
