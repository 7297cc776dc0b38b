"""The fixtures of the tests of the template and of the recipes."""

import os
import signal
from pathlib import Path

import pytest
from commands import LONG, SMALL, TWO_SAVES, call
from outputs import run_dir
from processes import interrupt, kill_group


@pytest.fixture(autouse=True)
def environment():
    """What a test leaves in the environment, as Fabric leaves its seed, goes. It would be in that of all later
    processes, and zygote.py starts a process as a fork only in the environment that the first one had."""
    before = set(os.environ)
    yield
    for name in os.environ.keys() - before:
        del os.environ[name]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Where a test puts its copy of the programs."""
    return tmp_path / "program"


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """An empty folder beside the program."""
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def where_trained(command: str):
    """A fixture: where a run of the command was never interrupted. To be read, not changed."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory) -> Path:
        cwd = tmp_path_factory.mktemp("trained")
        call(command, cwd)
        return cwd

    return folder


whole = where_trained(LONG)
two_saves = where_trained(TWO_SAVES)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Where a run was killed in the middle of an epoch. To be copied."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(LONG, cwd, kill_group).returncode == -signal.SIGKILL
    return cwd


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a small finished run, to be read, not changed."""
    cwd = tmp_path_factory.mktemp("finished")
    call(f"train.py {SMALL}", cwd)
    return run_dir(cwd)
