"""The scripts of benchmarks/ still run: a small part of each, whose times nobody reads. nanoGPT is not here: that the
template with nanogpt.patch has its losses, `benchmarks/nanogpt.py --check` shows."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import REPO, run

pytestmark = pytest.mark.recipes
BENCHMARKS = REPO / "benchmarks"


# ---- run.py, loader.py


@pytest.mark.night
@pytest.mark.parametrize("work, peers", [("W1", "raw raw-batched lightning-batched"), ("W1v", "raw limit")])
def test_the_template_is_timed_beside_its_peers(work: str, peers: str, tmp_path: Path):
    command = f"{BENCHMARKS}/run.py --works {work} --peers {peers} --rounds 1 --python {sys.executable}"
    lines = run(command, tmp_path).stdout.splitlines()
    _, *found = ([cell.strip() for cell in line.split("|")] for line in lines if "|" in line)
    assert [row[:2] for row in found] == [[work, program] for program in ("template", *peers.split())]
    assert all(float(row[-1]) < 0.01 for row in found)  # each has learned the digits


def test_the_loader_is_timed_beside_that_of_torch(tmp_path: Path):
    command = f"{BENCHMARKS}/loader.py speed --kinds tensors --workers 0 --rounds 1"
    assert "tensors" in run(command, tmp_path).stdout


# ---- gpu.py, here on a CPU


@pytest.mark.night
def test_a_step_is_timed_beside_its_peers(tmp_path: Path):
    """In miniature. Each has trained."""
    printed = run(f"{BENCHMARKS}/gpu.py --cpu --rounds 1 --steps 80", tmp_path).stdout
    losses = dict(re.findall(r"^median +(\S.*?): .*loss (\d+\.\d+)", printed, re.MULTILINE))
    assert [*losses] == ["template", "raw", *filter(find_spec, ("lightning", "accelerate"))]
    assert all(float(loss) < 1 for loss in losses.values())
    assert not [*tmp_path.iterdir()]
