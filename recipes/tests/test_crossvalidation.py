"""The recipe crossvalidation: stratified folds, each a run of its own, and their mean by sweep.py and runs.py."""

import csv
import io
import json
import re
import shutil
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    TOOLS,
    assert_same_training,
    call,
    imported,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    run_forked_sweep,
    with_recipe,
)
from sklearn.datasets import load_digits

pytestmark = pytest.mark.recipes
BF16 = f"{LONG} --precision bf16-mixed --folds 3 --fold 2"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The programs with the recipe, and the scripts that average over folds."""
    program = with_recipe("crossvalidation", tmp_path_factory.mktemp("program"))
    (program / "tools").mkdir()
    for name in ("sweep.py", "runs.py", "run_table.py"):
        shutil.copy(TOOLS / name, program / "tools")
    return program


def datasets(program: Path, folds: int, fold: int) -> dict:
    """The datasets of a fold, without augmentation."""
    config = SimpleNamespace(data_dir="", folds=folds, fold=fold)
    return imported(program, "data").build_datasets(config, augment=False)


def numbers(dataset) -> list[int]:
    """Which of the 1,797 digits the samples of a dataset are. They were normalised: their grey values are restored."""
    known = {image.tobytes(): number for number, image in enumerate(load_digits().data.astype(np.uint8))}
    assert len(known) == 1797  # no two are the same
    images = dataset.images.flatten(1)
    grey = (images - images.min()) / (images.max() - images.min()) * 16
    return [known[image.tobytes()] for image in grey.round().numpy().astype(np.uint8)]


# ---- the folds


@pytest.mark.parametrize("folds", [2, 5])
def test_each_sample_is_validated_on_once_and_else_trained_on(program: Path, folds: int):
    parts = [{name: numbers(part) for name, part in datasets(program, folds, fold).items()} for fold in range(folds)]
    validated = [number for part in parts for number in part["val"]]
    assert len(validated) == len(set(validated)) == 1417
    for part in parts:
        assert sorted(part["train"] + part["val"]) == sorted(validated)
        assert abs(len(part["val"]) - 1417 / folds) < 1


def test_the_test_set_is_that_of_the_template_in_each_fold(program: Path):
    expected = numbers(imported(REPO, "data").build_datasets(SimpleNamespace(data_dir=""))["test"])
    for fold in range(5):
        part = datasets(program, 5, fold)
        assert numbers(part["test"]) == expected
        assert set(expected).isdisjoint(numbers(part["train"]) + numbers(part["val"]))


def test_each_fold_has_the_same_shares_of_the_classes(program: Path):
    counts = torch.stack([datasets(program, 5, fold)["val"].targets.bincount(minlength=10) for fold in range(5)])
    assert (counts.amax(0) - counts.amin(0) <= 1).all()


def test_what_normalises_comes_from_the_samples_that_are_trained_on(program: Path):
    for fold in range(5):
        train = datasets(program, 5, fold)["train"].images
        assert train.mean().item() == pytest.approx(0, abs=1e-5)
        assert train.std().item() == pytest.approx(1, abs=1e-5)


# ---- a run


def test_two_processes_train_on_the_same_fold(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --epochs 3 --dropout 0 --folds 3 --fold 1", tmp_path)
    assert_same_training(one, two)


def test_test_py_evaluates_the_fold_of_the_run(program: Path, tmp_path: Path):
    call(f"{program}/train.py {SMALL} --folds 4 --fold 3", tmp_path)
    for split, samples in (("train", 1063), ("val", 354), ("test", 380)):
        printed = call(
            f"{program}/test.py --out_dir train_out --split {split} --predictions --accelerator cpu", tmp_path
        )
        assert f"on {samples} {split} samples" in printed.stdout
        _, targets = torch.load(run_dir(tmp_path) / f"predictions_{split}_best.pt", weights_only=True)
        assert torch.equal(targets, datasets(program, 4, 3)[split].targets)


def test_killed_and_resumed_in_bf16_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{BF16}", tmp_path)


@pytest.mark.night
def test_killed_and_resumed_on_two_processes_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{BF16} {ON_2}", tmp_path)


@pytest.mark.parametrize("option", ["--fold 1", "--folds 4"])
def test_a_resume_keeps_the_fold(program: Path, option: str, tmp_path: Path):
    call(f"{program}/{LONG} --max_steps 2", tmp_path)
    error = call(f"{program}/train.py --resume auto {option}", tmp_path, code=2).stderr
    assert f"{option.split()[0]} " in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "options, named", [("--fold 5", "--fold 5"), ("--folds 3 --fold 3", "--fold 3"), ("--folds 1", "--folds 1"),
                       ("--fold -2", "--fold -2"), ("--folds 101", "--folds 101")]
)  # fmt: skip
def test_a_fold_that_there_is_not_is_one_line(program: Path, options: str, named: str, tmp_path: Path):
    error = call(f"{program}/train.py {options}", tmp_path, code=2).stderr
    assert f"{named}: must be" in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


# ---- all folds


def bests(cwd: Path) -> dict[str, float]:
    """The best value of each run, by its name without the time."""
    return {path.parent.name[16:]: json.loads(path.read_text())["best"] for path in cwd.glob("*/summary.json")}


@pytest.fixture(scope="module")
def swept(program: Path, tmp_path_factory) -> tuple[Path, str]:
    """Where two widths were trained on three folds each, and what the sweep has printed."""
    pytest.importorskip("optuna")
    cwd = tmp_path_factory.mktemp("swept")
    (cwd / "cv.yaml").write_text("width: [4, 5]\nfolds: 3\nfold: [0, 1, 2]\n")
    options = f"{SMALL} --epochs 2 --logger_name csv".replace("--width 4 ", "")
    return cwd, run_forked_sweep(f"cv.yaml --jobs 2 -- {options}", cwd, program=program).stdout


def test_a_sweep_takes_the_mean_over_the_folds(swept: tuple[Path, str]):
    cwd, printed = swept
    found = bests(cwd)
    assert {*found} == {f"cv-{number}-fold={fold}" for number in (0, 1) for fold in (0, 1, 2)}
    for number, width in enumerate((4, 5)):
        value = mean(found[f"cv-{number}-fold={fold}"] for fold in (0, 1, 2))
        assert f": {value:.5g} with {{'width': {width}}}; best " in printed
    assert "of 2 trials" in printed
    assert len(re.findall(r"^next: python test.py --out_dir \S+-fold=\d$", printed, re.MULTILINE)) == 3


def test_runs_has_mean_and_deviation_over_the_folds(swept: tuple[Path, str], program: Path):
    cwd, _ = swept
    printed = call(f"{program}/tools/runs.py {cwd} --group --format csv", cwd).stdout
    rows = [*csv.DictReader(io.StringIO(printed))]
    assert sorted(row["width"] for row in rows) == ["4", "5"]  # the first to start stands first
    for row in rows:
        number = int(row["width"]) - 4
        values = [bests(cwd)[f"cv-{number}-fold={fold}"] for fold in (0, 1, 2)]
        assert float(row["mean"]) == pytest.approx(mean(values))
        assert float(row["std"]) == pytest.approx(stdev(values))
        assert (row["n"], row["state"]) == ("3", "3 finished")


def test_folds_alone_are_a_sweep(program: Path, tmp_path: Path):
    """Nothing is searched: one point, the defaults."""
    pytest.importorskip("optuna")
    (tmp_path / "cv.yaml").write_text("folds: 2\nfold: [0, 1]\n")
    printed = run_forked_sweep(f"cv.yaml -- {SMALL} --epochs 1 --logger_name csv", tmp_path, program=program).stdout
    assert {*bests(tmp_path)} == {"cv-0-fold=0", "cv-0-fold=1"}
    assert f"best val/accuracy {mean(bests(tmp_path).values()):.5g} of 1 trials" in printed


# ---- a last fit on all folds


def test_the_last_fit_has_all_samples_but_those_of_the_test_set(program, tmp_path):
    whole, _ = killed_and_resumed(f"{program}/{LONG} --epochs 12 --fold -1", tmp_path)
    assert "1,417 training samples" in (run_dir(whole) / "train.log").read_text()
    call(f"{program}/test.py --accelerator cpu --checkpoint last", whole)
    (path,) = run_dir(whole).glob("test_test_*.json")
    results = json.loads(path.read_text())["results"]
    assert results["accuracy"] > 0.7
    error = call(f"{program}/train.py {SMALL} --fold -2", tmp_path, code=2).stderr
    assert "--fold -2: must be at least -1" in error
