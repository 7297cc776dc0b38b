"""The edit of recipes/data.md: a mean over tokens."""

from pathlib import Path

import pytest
from edits import insert_after, replace
from helpers import ON_2, SMALL, call, diffs, edited, history, run

pytestmark = pytest.mark.recipes
(TOKENS,) = diffs("recipes/data.md")
STEPS = f"{SMALL} --max_steps 8 --log_interval 1 --dropout 0"


def with_ignored_targets(folder: Path) -> Path:
    """The programs, of whose training images about 4 in 10 have no target. Without augmentation: its random numbers
    depend on the size of the micro-batches."""
    insert_after(folder, "statistics", "targets[train[targets[train] < 4]] = -100")
    return replace(folder, "shift", "shift=0")


def losses(program: Path, options: str, folder: Path) -> list[float]:
    """The losses of a run with these options, in a new folder."""
    folder.mkdir()
    how = run if ON_2 in options else call
    how(f"{program}/train.py {STEPS} {options}", folder)
    return [float(row["train/loss"]) for row in history(folder)]


def test_a_mean_over_tokens_is_that_of_the_step(tmp_path):
    """For any size of the micro-batches, and on two processes."""
    (tmp_path / "program").mkdir()
    program = with_ignored_targets(edited(TOKENS, tmp_path / "program"))
    whole = losses(program, "", tmp_path / "64")
    assert len(whole) == 8
    assert losses(program, "--micro_batch_size 16", tmp_path / "4 x 16") == pytest.approx(whole, rel=1e-5)
    assert losses(program, f"--micro_batch_size 16 {ON_2}", tmp_path / "2 x 2 x 16") == pytest.approx(whole, rel=1e-5)


def test_a_mean_over_tokens_where_a_batch_has_no_target(tmp_path):
    """Neither a step without targets nor a batch of a validation gives nan, or shifts a mean."""
    (tmp_path / "program").mkdir()
    program = replace(edited(TOKENS, tmp_path / "program"), "shift", "shift=0")
    insert_after(program, "statistics", "targets[train[8:]] = -100\ntargets[val[16:32]] = -100")
    folders = {size: tmp_path / str(size) for size in (64, 4)}
    trained = [losses(program, f"--micro_batch_size {size}", folder) for size, folder in folders.items()]
    assert trained[1] == pytest.approx(trained[0], rel=1e-4)
    assert 0 in trained[0] and max(trained[0]) > 0  # steps without targets, and others
    # 128 samples, in one batch, and in 8 of 16, of which the second has no target
    one, many = ([float(row["val/loss"]) for row in history(folder) if row["val/loss"]] for folder in folders.values())
    assert many == pytest.approx(one, rel=1e-4)


def test_without_the_edit_it_is_not(tmp_path):
    """Otherwise the page would not be needed."""
    program = with_ignored_targets(tmp_path / "program")
    whole = losses(program, "", tmp_path / "64")
    assert losses(program, "--micro_batch_size 16", tmp_path / "4 x 16") != pytest.approx(whole, rel=1e-4)
