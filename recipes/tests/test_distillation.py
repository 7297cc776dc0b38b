"""The recipe distillation: a model learns from the probabilities of another run's model."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from edits import insert_before
from helpers import LONG, call, killed_and_resumed, on_one_and_two, run_dir, weights, with_recipe

pytestmark = pytest.mark.recipes
SHORT = "--accelerator cpu --logger_name csv"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("distillation", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A run of the programs as they are. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("teacher")
    call(f"train.py {SHORT} --epochs 10", cwd)
    return run_dir(cwd)


def test_knows_a_digit_that_it_never_saw(teacher: Path, tmp_path: Path):
    """The experiment of section 3: no 3 among the training images, and the teacher's probabilities tell what one is."""
    program = with_recipe("distillation", tmp_path / "program")
    insert_before(program, "statistics", "train = train[targets[train] != 3]")
    accuracies = {}
    for name, options in {"alone": "", "taught": f"--teacher {teacher} --teacher_weight 0.99"}.items():
        (tmp_path / name).mkdir()
        call(f"{program}/train.py {SHORT} --epochs 12 {options}", tmp_path / name)
        options = "--out_dir train_out --checkpoint last --accelerator cpu --predictions"
        call(f"{program}/test.py {options}", tmp_path / name)
        done = call("tools/confusion.py", tmp_path / name)
        accuracies[name] = float(re.search(r"^ +3 +\d+ +(\S+)", done.stdout, re.MULTILINE)[1])
    assert accuracies["alone"] == 0
    assert accuracies["taught"] > 0.25


def test_killed_run_ends_as_if_never_interrupted(program: Path, teacher: Path, tmp_path: Path):
    whole, _ = killed_and_resumed(f"{program}/{LONG} --teacher {teacher}", tmp_path)
    checkpoint = torch.load(next(run_dir(whole).glob("checkpoints/step-*.ckpt")), weights_only=True)
    assert "teacher" not in checkpoint and checkpoint["model"].keys() == weights(whole).keys()


def test_two_processes_learn_the_same(program: Path, teacher: Path, tmp_path: Path):
    found = map(weights, on_one_and_two(f"{program}/{LONG} --max_steps 8 --teacher {teacher}", tmp_path))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_any_precision(precision: str, program: Path, teacher: Path, tmp_path: Path):
    call(f"{program}/train.py --accelerator cpu --fast_run --teacher {teacher} --precision {precision}", tmp_path)


def test_a_teacher_is_found_by_its_name_without_the_time(program: Path, teacher: Path, tmp_path: Path):
    options = f"--accelerator cpu --fast_run --root_dir {teacher.parent} --teacher train_out"
    assert f"--teacher train_out: the run is {teacher}" in call(f"{program}/train.py {options}", tmp_path).stdout


def test_missing_or_unfinished_teacher_is_refused(program: Path, teacher: Path, tmp_path: Path):
    shutil.copytree(teacher, tmp_path / "unfinished", ignore=shutil.ignore_patterns("model.pt"))
    for name, words in (("nowhere", "no such run"), ("unfinished", "unfinished/model.pt")):
        error = call(f"{program}/train.py --accelerator cpu --teacher {name}", tmp_path, code=2).stderr
        assert f"--teacher {name}: " in error and words in error and len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished"]
