"""What CONTRIBUTING.md says of the seeded loss, and of the tests' processes, is true."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, run, run_dir

PAGE = (REPO / "CONTRIBUTING.md").read_text()
COMMAND = re.search(r"^python (train\.py .*--epochs.*)$", PAGE, re.MULTILINE)[1]
LOSSES = {name: float(value) for name, value in re.findall(r"`(\w+/loss)`\s+(\d\.\d+)", PAGE)}


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.night)])
def test_the_seeded_loss_is_reproduced(threads: int, tmp_path: Path):
    """To the last digit on the page: the digits behind it depend on the CPU and the number of threads."""
    run(COMMAND, tmp_path, OMP_NUM_THREADS=str(threads))
    with open(run_dir(tmp_path) / "logs" / "csv" / "metrics.csv", newline="") as file:
        *_, last = csv.DictReader(file)
    assert len(LOSSES) == 2
    assert {name: float(last[name]) for name in LOSSES} == pytest.approx(LOSSES, abs=2e-6, rel=0)


def test_threads_that_start_the_first_processes_share_one_zygote(tmp_path: Path):
    """Each is a fork of it: it has imported torch when the script begins."""
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    (tmp_path / "starts.py").write_text(STARTS)
    env = {"PYTHONPATH": str(REPO / "tests" / "project"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "starts.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "True\n" * 4, done.stderr


STARTS = """
import os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor

import zygote


def start(number):
    command = [sys.executable, "script.py"]
    pipe = subprocess.PIPE
    return zygote.popen(command, dict(os.environ), stdout=pipe, text=True, start_new_session=True).communicate()[0]


with ThreadPoolExecutor(4) as threads:
    print(*threads.map(start, range(4)), sep="", end="")
"""
