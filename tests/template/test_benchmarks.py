"""The scripts of benchmarks/ still run: a small part of each, whose times nobody reads."""

import sys
from pathlib import Path

import pytest
from helpers import REPO, run

pytestmark = pytest.mark.recipes


@pytest.mark.night
@pytest.mark.parametrize("work, peers", [("W1", "raw raw-batched lightning-batched"), ("W1v", "raw limit")])
def test_the_template_is_timed_beside_its_peers(work: str, peers: str, tmp_path: Path):
    script = REPO / "benchmarks" / "run.py"
    done = run(f"{script} --works {work} --peers {peers} --rounds 1 --python {sys.executable}", tmp_path)
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert [row[:2] for row in rows[1:]] == [[work, program] for program in ("template", *peers.split())]
    assert all(float(row[-1]) < 0.01 for row in rows[1:])  # each has learned the digits


def test_the_loader_is_timed_beside_that_of_torch(tmp_path: Path):
    script = REPO / "benchmarks" / "loader.py"
    assert "tensors" in run(f"{script} --kinds tensors --workers 0 --rounds 1", tmp_path).stdout


@pytest.mark.night
def test_lightning_that_was_killed_in_mid_epoch_trains_some_samples_twice_and_others_never(tmp_path: Path):
    """As README.md and benchmarks/README.md say."""
    done = run(f"{REPO / 'benchmarks' / 'resume.py'}", tmp_path)
    assert done.stdout == "19 batches; of 1216 samples 304 came twice, 304 never\n"
    for page in ("README.md", "README.zh-CN.md", "benchmarks/README.md"):
        assert "304" in (REPO / page).read_text()
