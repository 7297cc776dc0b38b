"""The edits of recipes/data.md: a mean over tokens, and two data sets in a step."""

from pathlib import Path

import pytest
from conftest import (
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    diffs,
    edited,
    history,
    killed_and_resumed,
    on_one_and_two,
    run,
)
from edits import insert_after, replace

pytestmark = pytest.mark.recipes
TOKENS, TWO_SETS = diffs("recipes/data.md")
# What depends on the size of the micro-batches, beside the loss: the augmentation.
IGNORED = "targets[train[targets[train] < 4]] = -100"
STEPS = f"{SMALL} --max_steps 8 --log_interval 1 --dropout 0"


def losses(folder: Path) -> list[float]:
    return [float(row["train/loss"]) for row in history(folder)]


def with_ignored_targets(folder: Path) -> Path:
    """The programs, of whose training images about 4 in 10 have no target."""
    insert_after(folder, "statistics", IGNORED)
    return replace(folder, "shift", "shift=0")


def test_a_mean_over_tokens_is_that_of_the_step(tmp_path):
    """For any size of the micro-batches, and on two processes."""
    (tmp_path / "program").mkdir()
    program = with_ignored_targets(edited(TOKENS, tmp_path / "program"))
    found = {}
    for name, options in {
        "64": "",
        "4 x 16": "--micro_batch_size 16",
        "2 x 2 x 16": f"--micro_batch_size 16 {ON_2}",
    }.items():
        (tmp_path / name).mkdir()
        how = run if ON_2 in options else call
        how(f"{program}/train.py {STEPS} {options}", tmp_path / name)
        found[name] = losses(tmp_path / name)
    assert len(found["64"]) == 8
    assert found["4 x 16"] == pytest.approx(found["64"], rel=1e-5)
    assert found["2 x 2 x 16"] == pytest.approx(found["64"], rel=1e-5)


def test_without_the_edit_it_is_not(tmp_path):
    """Otherwise the page would not be needed."""
    program = with_ignored_targets(tmp_path / "program")
    whole, parts = tmp_path / "64", tmp_path / "4 x 16"
    for folder in (whole, parts):
        folder.mkdir()
    call(f"{program}/train.py {STEPS}", whole)
    call(f"{program}/train.py {STEPS} --micro_batch_size 16", parts)
    assert losses(parts) != pytest.approx(losses(whole), rel=1e-4)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return edited(TWO_SETS, tmp_path_factory.mktemp("program"))


def test_two_data_sets_are_resumed_exactly(program, tmp_path):
    whole, killed = killed_and_resumed(f"{program}/{LONG} --epochs 12", tmp_path)
    assert_same_run(killed, whole)
    assert "train/entropy" in history(whole)[0]


def test_two_data_sets_on_two_processes(program, tmp_path):
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)
