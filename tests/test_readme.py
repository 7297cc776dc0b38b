"""What README.md shows is true: its edits apply to the code as it is and run, its commands have options that exist."""

import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import REPO, call, diffs, edited

from cli import parse
from config import TestConfig as EvalConfig  # pytest would take a class named Test... for tests
from config import TrainConfig

README = (REPO / "README.md").read_text()
DIFFS = diffs("README.md")
# What an edit needs, by a word in it.
OPTIONS = {"MyDataset": "--dataset mine --data_dir .", "straight": "--lr_schedule straight", "noise": "--noise 0.2"}


def test_the_diffs_are_found():
    assert len(DIFFS) == README.count("```diff") > 4


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_edit(number: int, tmp_path: Path):
    for split in ("train", "val", "test"):
        torch.save((torch.rand(200, 1, 8, 8), torch.randint(10, (200,))), tmp_path / f"{split}.pt")
    options = " ".join(option for word, option in OPTIONS.items() if word in DIFFS[number])
    done = call(f"{edited(DIFFS[number], tmp_path)}/train.py --accelerator cpu --fast_run {options}", tmp_path)
    assert "finished after 2 of 2 steps" in done.stdout


def test_the_commands_have_options_and_values_that_exist():
    commands = re.findall(r"^(?:python|torchrun|fabric run).*?\b(train|test)\.py(.*?)(?: #.*)?$", README, re.MULTILINE)
    assert len(commands) > 5
    for script, options in commands:
        if options.strip() != "--help":
            parse(TrainConfig if script == "train" else EvalConfig, shlex.split(options))


def test_every_option_is_listed_and_no_other():
    named = set(re.findall(r"`--(\w+)", README))
    options = {field.name for cls in (TrainConfig, EvalConfig) for field in fields(cls)}
    assert {field.name for field in fields(TrainConfig)} <= named <= options


def test_every_file_of_the_tree_is_there_and_no_other_program():
    tree = README.partition("## Files")[2].split("```")[1]
    named = re.findall(r"^([\w./]+)  +\S", tree, re.MULTILINE)
    assert all((REPO / name).exists() for name in named)
    assert {name for name in named if name.endswith(".py")} == {
        name for name in os.listdir(REPO) if name.endswith(".py")
    }
