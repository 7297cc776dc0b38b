"""The runs that the tests share, and the last lines of pytest."""

from typing import Any

import pytest
import torch
from programs import KILL, PLACE, SHOWN, Run, small
from settings import SMALL, WORKERS

import config
from runtime.errors import ConfigError
from runtime.options import values_of

try:
    KNOWN = values_of(config.TrainConfig())
except ConfigError as error:
    pytest.exit(f"a default of config.py: {error}", 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """A run that was left alone."""
    return Run.train(tmp_path_factory.mktemp("whole"), small(), "all")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Run:
    """The run on two processes, whose fresh interpreters have other hashes of strings."""
    accelerator = SMALL["accelerator"]
    if accelerator == "mps" or (accelerator == "cuda" and torch.cuda.device_count() < 2):
        pytest.skip("two processes need two GPUs")
    return Run.train(tmp_path_factory.mktemp("two"), small(devices="2"), is_fresh=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Run:
    """The run on one process, killed in step 10."""
    return Run.train(tmp_path_factory.mktemp("killed"), small(), kill=KILL)


@pytest.fixture(scope="module", params=["here", "elsewhere", "on 2 ranks"])
def where(request) -> str:
    """Where a run that was killed is resumed."""
    return request.param


@pytest.fixture(scope="module")
def resumed(request, where: str, tmp_path_factory) -> Run:
    """The run that was killed, resumed; elsewhere with data workers, by a fresh interpreter with other hashes of
    strings, in another time zone and folder, and folders list their files in another order; or killed and resumed on
    two processes."""
    cwd = tmp_path_factory.mktemp("resumed")
    if where == "on 2 ranks":
        request.getfixturevalue("two")  # skips where they cannot be had
        killed = Run.train(tmp_path_factory.mktemp("killed"), small(devices="2"), kill=KILL)
        return killed.resume(cwd, "--devices 2")
    killed = request.getfixturevalue("killed")
    if where == "here":
        return killed.resume(cwd)
    start = tmp_path_factory.mktemp("start")
    workers = f"--num_workers {WORKERS}" if "num_workers" in KNOWN else ""
    others = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "FOLDERS": "reversed"}
    return killed.resume(cwd, workers, start, is_fresh=True, **others)


@pytest.fixture(scope="module")
def alone(request, where: str) -> Run:
    """The run on as many processes that was left alone."""
    return request.getfixturevalue("two" if where == "on 2 ranks" else "whole")


@pytest.fixture(scope="module")
def killed_in(where: str) -> str:
    """The beginning of a line that says what the tests of a resumed run have shown."""
    return f"{PLACE}: killed in step 10 of 10, resumed after step 7{'' if where == 'here' else f' {where}'}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not SHOWN:
        return
    for subject, things in SHOWN.items():
        terminalreporter.write_line(f"{subject}: {', '.join(things)}")
    if unknown := [name for name in SMALL if name not in KNOWN]:
        terminalreporter.write_line(f"SMALL has options that train.py does not have: {', '.join(unknown)}")
    terminalreporter.write_line("not tried: other precisions and devices: PLACE='cuda bf16-mixed' in the environment")
