"""The fixtures of these tests. What they share is in tests/support."""

from pathlib import Path

import pytest
from commands import RECIPES
from copies import with_recipe
from fixtures import cwd, environment, finished, killed, program, two_saves, whole
from originals import write_digits, write_text

__all__ = ["cwd", "environment", "finished", "killed", "program", "two_saves", "whole"]


def fixture_of(recipe: str):
    @pytest.fixture(scope="session", name=recipe)
    def with_it(tmp_path_factory) -> Path:
        return with_recipe(recipe, tmp_path_factory.mktemp(recipe))

    return with_it


# Each recipe has a fixture of its name: the programs with it. To be read, not changed.
globals().update({path.stem: fixture_of(path.stem) for path in RECIPES.glob("*/*.patch")})


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """A folder with the files of ports/mnist."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder with the files of ports/word_language_model."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder
