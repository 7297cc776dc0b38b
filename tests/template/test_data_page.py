"""The edit of docs/data.md: a mean over tokens; and a few samples for the tests on CI."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edits import insert_after, replace, with_text
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    call,
    copy_project_tests,
    diff,
    edited,
    history,
    killed_and_resumed,
    run,
    section,
    weights,
)

from config import TrainConfig
from data import build_datasets

pytestmark = pytest.mark.recipes
NOISE = diff("docs/data.md", "A value that the loop sets")
TOKENS = diff("docs/data.md", "A mean over tokens")
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


def few_samples() -> str:
    """The code of the page."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", section("docs/data.md", "A few samples for CI"), re.M | re.S)
    return code


def test_the_few_samples_have_the_rare_class_too(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for part, dataset in build_datasets(TrainConfig(), augment=False).items():
        images, targets = dataset.images, dataset.targets
        last = (targets == 9).nonzero().flatten()
        chosen = torch.cat([(targets != 9).nonzero().flatten(), last[:2]])  # two of the class 9, at the end
        torch.save((images[chosen], targets[chosen]), tmp_path / "mine" / f"{part}.pt")
    code = few_samples().replace("/data/mine", f"{tmp_path}/mine")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    for part, count in (("train", 64), ("val", 80), ("test", 16)):
        images, targets = torch.load(tmp_path / "tests" / "data" / f"{part}.pt")
        assert len(images) == len(targets) == count and images.untyped_storage().nbytes() == images.nbytes
        assert 9 in targets
    assert {*torch.bincount(targets).tolist()} == {1, 2}  # of the 16 of the test set


def test_a_few_samples_are_enough_for_the_commands_of_ci(tmp_path):
    """With the dataset of docs/editing.md as the default, whose folder is not there any more."""
    program = edited(diff("docs/editing.md", "Data"), tmp_path / "program")
    with_text(program, "config.py", ('option("digits"', 'option("mine"'))
    (tmp_path / "mine").mkdir()
    for part, dataset in build_datasets(TrainConfig(), augment=False).items():
        torch.save((dataset.images, dataset.targets), tmp_path / "mine" / f"{part}.pt")
    code = few_samples()
    subprocess.run([sys.executable, "-c", code.replace("/data/mine", f"{tmp_path}/mine")], cwd=program, check=True)
    shutil.rmtree(tmp_path / "mine")
    assert {path.name for path in (program / "tests" / "data").iterdir()} == {"train.pt", "val.pt", "test.pt"}

    (train,) = re.findall(r"^\.venv/bin/python (train\.py .*?)  #", (REPO / ".ci/run").read_text(), re.MULTILINE)
    assert "No such file" in call(f"{program}/{train}", program, code=2).stderr
    call(f"{program}/{train} --data_dir tests/data", program)
    copy_project_tests(program)
    with_text(program, "tests/project/settings.py", ("SMALL = {\n", 'SMALL = {\n    "data_dir": "tests/data",\n'))
    command = [sys.executable, "-m", "pytest", "tests/project"]
    quick = "fast_run or each_validation or in_another_set or finished_run"
    done = subprocess.run([*command, "-k", quick], cwd=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_value_that_the_loop_sets_is_seen_by_workers_and_restored(tmp_path):
    (tmp_path / "program").mkdir()
    program = edited(NOISE, tmp_path / "program")
    (tmp_path / "workers").mkdir()
    (tmp_path / "alone").mkdir()
    whole, _ = killed_and_resumed(f"{program}/{LONG} --num_workers 2", tmp_path / "workers")
    call(f"{program}/{LONG}", tmp_path / "alone")
    torch.testing.assert_close(weights(whole), weights(tmp_path / "alone"), atol=0, rtol=0)
