"""recipes/methods/regression.patch: a number for each row of a table, with errors in its own unit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LONG, ON_2, call, history, imported, killed_and_resumed, run, run_dir, with_recipe
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_absolute_error, r2_score

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("regression", tmp_path_factory.mktemp("regression"))


@pytest.fixture(scope="module")
def trained(program: Path, tmp_path_factory) -> Path:
    """Where a run with the defaults is finished."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py --accelerator cpu", cwd)
    return cwd


def evaluate(program: Path, cwd: Path, how=call, options: str = "") -> dict:
    how(f"{program}/test.py --out_dir train_out --accelerator cpu {options}", cwd)
    return json.loads((run_dir(cwd) / "test_test_best.json").read_text())


def test_the_baseline_is_printed(program: Path, tmp_path: Path):
    lines = run(f"{program}/diabetes.py", tmp_path).stdout.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [f"ridge regression, {part}: r2" for part in ("val", "test")]
    assert all(0.3 < float(line.rpartition(" ")[2]) < 0.6 for line in lines)


def test_it_learns(trained: Path):
    summary = json.loads((run_dir(trained) / "summary.json").read_text())
    assert summary["best"] == min(float(row["val/loss"]) for row in history(trained))
    assert summary["best"] < 0.5  # of the variance of the target


def test_the_weights_take_rows_as_measured_and_predict_in_the_unit_of_the_target(program: Path, trained: Path):
    """Without the training set: what normalises is in the file, and is that of the training set. The errors are as
    scikit-learn computes them from its own targets."""
    rows, progression = load_diabetes(return_X_y=True, scaled=False)
    order = np.random.default_rng(0).permutation(442)
    train, test = progression[order[:242]], progression[order[342:]]
    model = imported(program, "model").Model(torch.zeros(2, 10), torch.zeros(2)).eval()
    model.load_state_dict(torch.load(run_dir(trained) / "checkpoints" / "best.ckpt")["model"])
    np.testing.assert_allclose(model.row_mean, rows[order[:242]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.row_std, rows[order[:242]].std(0, ddof=1), rtol=1e-5)
    predictions = model(torch.tensor(rows[order[342:]], dtype=torch.float32)).detach().numpy()
    report = evaluate(program, trained)
    assert report["num_samples"] == 100
    found = report["results"]
    assert found["mae"] == pytest.approx(mean_absolute_error(test, predictions), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(test, predictions), abs=1e-5)
    assert found["loss"] == pytest.approx(np.mean((test - predictions) ** 2) / train.var(ddof=1), rel=1e-5)


def test_two_processes_find_the_same_errors(program: Path, trained: Path):
    one, two = evaluate(program, trained), evaluate(program, trained, run, ON_2)
    assert two["results"] == pytest.approx(one["results"], rel=1e-5)
    assert two["results"].keys() == {"loss", "mae", "r2"}


def test_killed_and_resumed_it_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG} --effective_batch_size 24 --micro_batch_size 8", tmp_path)


def test_predictions_are_kept_and_are_of_no_classes(program: Path, trained: Path):
    found = evaluate(program, trained, options="--predictions")
    outputs, targets = torch.load(run_dir(trained) / "predictions_test_best.pt", weights_only=True)
    assert outputs.shape == targets.shape == (100,)
    assert (outputs - targets).abs().mean().item() == pytest.approx(found["results"]["mae"], rel=1e-5)
    error = call("tools/confusion.py", trained, code=2).stderr
    assert "needs logits (samples, classes)" in error and error.count("\n") == 1
