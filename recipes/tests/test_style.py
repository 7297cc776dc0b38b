"""What .ci/run of a copy checks beside the tests: after each patch, and each diff of the pages of edits, the type hints
are still right, and no import is left over."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import RECIPES, REPO, diffs, edited, with_patch, with_recipe

pytestmark = [pytest.mark.recipes, pytest.mark.night]
PATCHES = sorted(RECIPES.glob("*/*.patch"))
PAGES = sorted(path.relative_to(REPO) for path in REPO.glob("docs/*.md"))
DIFFS = [diff for page in PAGES for diff in diffs(page) if ".py\n" in diff]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def assert_style(program: Path, cache: Path) -> None:
    """Packages that are not installed have no hints."""
    settings = REPO / "pyproject.toml"
    files = sorted(path.name for path in program.glob("*.py"))
    no_hints = ["--ignore-missing-imports", "--no-warn-unused-ignores"]
    mypy = ["mypy", "--config-file", settings, "--cache-dir", cache, *no_hints, *files, "runtime"]
    ruff = ["ruff", "check", "--config", settings, "--no-cache", "--quiet", *files]
    for command in (mypy, ruff):
        done = subprocess.run([sys.executable, "-m", *command], cwd=program, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_keeps_the_style(patch: Path, cache: Path, tmp_path: Path):
    assert_style(with_patch(patch, tmp_path / "program"), cache)


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_an_edit_keeps_the_style(number: int, cache: Path, tmp_path: Path):
    diff = DIFFS[number]
    program = tmp_path / "program"
    if "torch.optim.Muon" in diff:
        with_recipe("language_model", program)
    edited(diff, program)
    assert_style(program, cache)
