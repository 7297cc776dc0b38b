"""What CONTRIBUTING.md says of the seeded loss is true."""

import csv
import re
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
