"""tests/test_project.py passes in copies of the template that were edited, and fails where a copy is wrong."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, clean_environment, diffs, edited
from edits import copy_programs, insert_after, insert_before, replace
from test_recipes import RECIPES, with_recipe

DIFFS = diffs("README.md")
PATCHES = sorted(path.stem for path in RECIPES.glob("*.patch"))
NEEDS = {"text_classification": "transformers"}  # packages that requirements.txt does not have

# Other defaults, by the name of the option.
DEFAULTS = {
    "out_dir": '"runs/mine"',
    "seed": "7",
    "num_workers": "2",
    "width": "6",
    "dropout": "0.0",
    "precision": '"bf16-mixed"',
    "effective_batch_size": "100",
    "micro_batch_size": "20",
    "epochs": "3.0",
    "max_steps": "5000",
    "base_lr": "1e-2",
    "lr_schedule": '"constant"',
    "max_grad_norm": "1.0",
    "early_stopping_patience": "1",
    "logger_name": '("tensorboard",)',
    "monitor": '"train/loss"',
    "checkpoint_frequency": "None",
    "num_checkpoint_keep": "1",
}


def with_defaults(program: Path, defaults: dict[str, str]) -> Path:
    """A copy of the programs in which these options have other defaults."""
    path = copy_programs(program) / "config.py"
    text = path.read_text()
    for name, value in defaults.items():
        pattern = rf"(?m)^(    {name}: .+? = (?:field\(default=)?)(?:\(.*?\)|[^\s,]+)"
        text, count = re.subn(pattern, rf"\g<1>{value}", text)
        assert count == 1, f"config.py has this option {count} times: {name}"
    path.write_text(text)
    return program


def tested(program: Path, words: str = "") -> subprocess.CompletedProcess:
    """Runs the tests of a project, in a copy of the programs, which gets what they need: pytest alone."""
    (program / "tests").mkdir(exist_ok=True)
    shutil.copy(REPO / "tests" / "test_project.py", program / "tests")
    shutil.copy(REPO / "pyproject.toml", program)
    return run_pytest(program, words)


def run_pytest(program: Path, words: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *(["-k", words] if words else [])]
    return subprocess.run(command, cwd=program, env=clean_environment(), capture_output=True, text=True, timeout=600)


def assert_passes(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout  # none was skipped


# ---- it passes


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_it_passes_after_an_edit_of_the_readme(number: int, tmp_path: Path):
    assert_passes(tested(edited(DIFFS[number], tmp_path)))


def test_it_passes_with_other_defaults_and_another_model(tmp_path: Path):
    program = with_defaults(tmp_path, DEFAULTS)
    layers = "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n            nn.ReLU(),\n"
    replace(program, "first layer", layers)
    assert_passes(tested(program))


def test_it_passes_once_the_rest_is_deleted(tmp_path: Path):
    """After README.md's command, without git. What stays keeps the style."""
    skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "[0-9]*-[0-9]*-*")
    copy = Path(shutil.copytree(REPO, tmp_path / "copy", ignore=skipped))
    (command,) = re.findall(r"^rm -r .+$", (REPO / "README.md").read_text(), re.MULTILINE)
    subprocess.run(command, shell=True, cwd=copy, check=True)
    assert [path.name for path in (copy / "tests").iterdir()] == ["test_project.py"]
    assert_passes(run_pytest(copy))
    ruff = Path(sys.executable).parent / "ruff"
    subprocess.run([ruff, "check", "--no-cache", "."], cwd=copy, check=True)


@pytest.mark.recipes
@pytest.mark.parametrize("name", PATCHES)
def test_it_passes_after_a_recipe(name: str, tmp_path: Path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert_passes(tested(with_recipe(name, tmp_path)))


# ---- it fails


def assert_fails(done: subprocess.CompletedProcess, test: str) -> None:
    """All that was run fails, and it was this test, or several that begin like it."""
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert failed and all(name.startswith(test) for name in failed), done.stdout
    assert re.search(rf"^{len(failed)} failed, \d+ deselected in", done.stdout, re.MULTILINE), done.stdout


def test_it_fails_where_random_numbers_are_not_seeded(tmp_path: Path):
    noise = "torch.randn(images.shape, generator=generator)"
    program = insert_after(
        tmp_path, "batch", f"generator = torch.Generator()\ngenerator.seed()\nimages = images + {noise}"
    )
    assert_fails(tested(program, "killed_and_resumed"), "test_a_run_that_was_killed_and_resumed_has_the_same_")


def test_it_fails_where_a_tensor_is_not_in_state(tmp_path: Path):
    program = insert_after(tmp_path, "set-up is done", "factor = torch.ones(())")
    insert_before(program, "optimizer steps", "factor *= 0.9\nnext(model.parameters()).grad *= factor")
    assert_fails(tested(program, "killed_and_resumed"), "test_a_run_that_was_killed_and_resumed_has_the_same_")


def test_it_fails_where_processes_disagree_on_the_order_of_the_samples(tmp_path: Path):
    program = replace(tmp_path, "order", "{self.seed} {self.epoch} {self.rank}")
    assert_fails(tested(program, "two_processes"), "test_two_processes_train_like_one")


def test_it_fails_where_a_fast_run_writes(tmp_path: Path):
    program = insert_before(tmp_path, "step is done", 'torch.save(grad_norm, "norm.pt")')
    assert_fails(tested(program, "fast_run"), "test_fast_run_")


def test_it_fails_where_a_default_is_not_valid(tmp_path: Path):
    program = with_defaults(tmp_path, {"dropout": "1.0"})
    assert_fails(tested(program, "valid_default and TrainConfig"), "test_every_option_has_a_valid_default")
