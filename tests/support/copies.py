"""Copies of the programs, with the edits that pages and recipes show."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import RECIPES, REPO
from edits import apply, copy_programs, insert_before, replace

needs_recipes = pytest.mark.skipif(not RECIPES.exists(), reason="recipes/ has been deleted")


def copy_repository(folder: Path) -> Path:
    """Copies the repository, without its history, virtual environment, caches and runs."""
    skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "[0-9]*-[0-9]*-*")
    return Path(shutil.copytree(REPO, folder, ignore=skipped))


def copy_project_tests(program: Path) -> None:
    """Copies what the tests of a project need into a copy of the programs."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "tests" / "project", program / "tests" / "project", ignore=skipped)
    shutil.copy(REPO / "pyproject.toml", program)


def section(page: str, heading: str) -> str:
    """What stands under a heading of a page."""
    text = (REPO / page).read_text()
    (found,) = re.findall(rf"^(##+) {re.escape(heading)}\n(.*?)(?=^## |^\1 |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1]


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """The code in a language that a page of the documentation shows, or that under a heading of it."""
    text = section(page, heading) if heading else (REPO / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def diffs(page: str, heading: str = "") -> list[str]:
    """The edits that a page shows, or those under a heading of it."""
    return blocks(page, "diff", heading)


def diff(page: str, heading: str) -> str:
    """The one edit under a heading."""
    (found,) = diffs(page, heading)
    return found


def edited(diff: str, folder: Path) -> Path:
    """A copy of the programs in `folder`, with the edit made."""
    return apply(diff, copy_programs(folder))


def patch_of(name: str) -> Path:
    if not RECIPES.exists():
        pytest.skip("recipes/ has been deleted")
    (path,) = RECIPES.glob(f"*/{name}.patch")
    return path


def with_patch(patch: Path, folder: Path) -> Path:
    """A copy of the programs in `folder`, with the patch applied."""
    return edited(patch.read_text(), folder)


def with_recipe(name: str, folder: Path) -> Path:
    return with_patch(patch_of(name), folder)


TIED = """
class Model(Model):
    def __init__(self, *args):
        super().__init__(*args)
        self.layers[2].weight = self.layers[1].weight


"""


def with_tied_weights(program: Path) -> Path:
    """Two layers more, whose weights are one tensor."""
    line = "nn.Conv2d(channels, width, 3, padding=1),\n"
    replace(program, "first layer", line + "nn.Conv2d(width, width, 3, padding=1),\n" * 2)
    return insert_before(program, "functions", TIED)


def imported(program: Path, name: str) -> ModuleType:
    """A module of a program that imports no other of it."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_recipe", program / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported_train(program: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """train.py of a program, and what it imports, in place of those of the repository."""
    patch.syspath_prepend(program)
    for name in ("train", "config", "model", "data"):
        patch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("train")


def generator(seed: int = 0) -> torch.Generator:
    """One of its own, on the CPU."""
    return torch.Generator().manual_seed(seed)
