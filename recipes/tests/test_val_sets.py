"""The recipe val_sets: a second validation set."""

from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    assert_same_training,
    call,
    history,
    killed_and_resumed,
    last_summary,
    on_one_and_two,
    results,
    weights,
    with_recipe,
)

pytestmark = pytest.mark.recipes
TWELVE = f"{LONG} --epochs 12"


@pytest.fixture(scope="module")
def with_two_sets(tmp_path_factory) -> Path:
    return with_recipe("val_sets", tmp_path_factory.mktemp("program"))


def test_a_second_validation_set_is_logged_monitored_and_evaluated(with_two_sets, tmp_path):
    options = "--limit_val_batches 1.0 --monitor val/mirrored_accuracy --monitor_mode max"
    done = call(f"{with_two_sets}/train.py {SMALL} --width 16 {options}", tmp_path)
    rows = history(tmp_path)
    best = max(float(row["val/mirrored_accuracy"]) for row in rows)
    assert last_summary(tmp_path)["best"] == best and "val/mirrored_loss" in done.stdout
    assert float(rows[-1]["val/accuracy"]) > float(rows[-1]["val/mirrored_accuracy"]) > 0
    for split, prefix in (("val", "val/"), ("mirrored", "val/mirrored_")):
        found = results(with_two_sets, tmp_path, f"--checkpoint last --split {split}")
        for name in ("loss", "accuracy"):
            assert found[name] == pytest.approx(float(rows[-1][f"{prefix}{name}"]))


def test_a_run_with_two_validation_sets_is_resumed_and_the_same_on_two_processes(with_two_sets, tmp_path):
    whole, _ = killed_and_resumed(f"{with_two_sets}/{TWELVE}", tmp_path)
    (tmp_path / "plain").mkdir()
    call(TWELVE, tmp_path / "plain")
    torch.testing.assert_close(weights(whole), weights(tmp_path / "plain"), atol=0, rtol=0)
    one, two = on_one_and_two(f"{with_two_sets}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)
