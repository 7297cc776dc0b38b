"""Metrics that users bring: what the ranks make of their values, and how results are written."""

import json
import re
from pathlib import Path

import pytest
from commands import ON_2, SMALL, call, run
from edits import replace, with_edits
from outputs import history, run_dir

# The score of a rank's own samples, by functions that know nothing of ranks; and results of many kinds.
OF_A_RANK = """
import numpy as np
from torchmetrics import Metric

class Score(Metric):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def update(self, logits, targets):
        self.score = (logits.argmax(dim=1) == targets).float().mean()

    def compute(self):
        return self.kind(self.score)

def results(score):
    return {
        "matrix": np.array([[1.5, np.nan], [np.inf, 2]]),
        "sparse": torch.eye(2).to_sparse(),
        "flag": torch.tensor(True),
        "nested": {"list": [1, torch.tensor(2.0), (None, "three")], 4: math.nan, ("a", 1): True},
        "object": nn.Identity(),
        7: 8.0,
    }
"""
METRICS = """{
    "accuracy": accuracy, "python": Score(float), "numpy": Score(np.float32), "array": Score(np.array),
    "tensor": Score(Tensor), "results": Score(results),
}"""
SHOW_BEST = """print(f"rank {fabric.global_rank}: {state['best']} {state['best_step']}", flush=True)"""


def strict(path: Path) -> dict:
    """JSON has no NaN and no infinity."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_numbers_of_each_rank_are_averaged_and_any_result_is_written(program, cwd):
    """A number of Python's or NumPy's, or a tensor of one. All ranks have the same best. A key that JSON cannot have,
    such as a tuple, is left out."""
    edits = {"before build_metrics": OF_A_RANK, "replace metrics": METRICS, "before run is finished": SHOW_BEST}
    options = "--limit_val_batches 1 --monitor val/python --monitor_mode max --logger_name csv"
    out = run(f"{with_edits(program, edits)}/train.py {SMALL} {ON_2} {options}", cwd).stdout
    accuracies = {int(row["step"]): float(row["val/accuracy"]) for row in history(cwd)}
    for name in ("python", "numpy", "array", "tensor"):  # both ranks have a batch of 32 samples
        assert [float(row[f"val/{name}"]) for row in history(cwd)] == pytest.approx([*accuracies.values()])
    best = max(accuracies, key=accuracies.__getitem__)
    assert sorted(re.findall(r"rank \d: .*", out)) == [f"rank {rank}: {accuracies[best]} {best}" for rank in (0, 1)]
    run(f"{program}/test.py --accelerator cpu {ON_2}", cwd)
    results = strict(run_dir(cwd) / "test_test_best.json")["results"]
    expected = {
        "matrix": [[1.5, None], [None, 2.0]],
        "sparse": [[1.0, 0.0], [0.0, 1.0]],
        "flag": 1.0,
        "nested": {"list": [1, 2.0, [None, "three"]], "4": None},
        "object": "Identity()",
        "7": 8.0,
    }
    assert expected.items() <= results.items()


def test_a_single_metric_is_called_metric_and_what_is_not_finite_is_null_in_the_summary(program: Path, cwd: Path):
    """Which sweeps and pages read, too."""
    replace(program, "collection", "accuracy")
    replace(program, "values", '{"loss": F.cross_entropy(logits, targets), "ratio": math.nan, "margin": -math.inf}')
    call(f"{program}/train.py {SMALL} --epochs 1 --monitor val/ratio --monitor_mode max --logger_name csv", cwd)
    assert 0 < float(history(cwd)[-1]["val/metric"]) <= 1 and history(cwd)[-1]["val/margin"] == "-inf"
    summary = strict(run_dir(cwd) / "summary.json")
    assert {summary["last"][f"{split}/{name}"] for split in ("train", "val") for name in ("ratio", "margin")} == {None}
    assert summary["best"] is None
    call(f"{program}/test.py --accelerator cpu --checkpoint last", cwd)
    (path,) = run_dir(cwd).glob("test_*.json")
    assert 0 < strict(path)["results"]["metric"] <= 1
