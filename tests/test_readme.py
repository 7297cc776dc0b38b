"""The edits that the README shows apply to the code as it is, and run."""

from pathlib import Path

import pytest
import torch
from conftest import diffs, edited, run

DIFFS = diffs("README.md")
# What an edit needs, by a word in it.
OPTIONS = {"MyDataset": "--dataset mine --data_dir .", "straight": "--lr_schedule straight", "noise": "--noise 0.1"}


def test_the_diffs_are_found():
    assert len(DIFFS) == 8


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_edit(number: int, tmp_path: Path):
    for split in ("train", "val", "test"):
        torch.save((torch.rand(200, 1, 8, 8), torch.randint(10, (200,))), tmp_path / f"{split}.pt")
    options = " ".join(option for word, option in OPTIONS.items() if word in DIFFS[number])
    done = run(f"{edited(DIFFS[number], tmp_path)}/train.py --accelerator cpu --fast_run {options}", tmp_path)
    assert "finished after 2 of 2 steps" in done.stdout
