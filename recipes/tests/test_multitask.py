"""The recipe multitask: two heads, two losses and two metrics, each by its name."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import LONG, call, history, imported, killed_and_resumed, on_one_and_two, run_dir, weights, with_recipe
from torch import Tensor

pytestmark = pytest.mark.recipes
NAMES = ["digit_loss", "ink_loss", "loss", "ink_mae"]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("multitask", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def trained(program: Path, tmp_path_factory) -> tuple[Path, str]:
    """Where a run of 8 epochs is, and what it has printed."""
    cwd = tmp_path_factory.mktemp("trained")
    done = call(f"{program}/train.py --accelerator cpu --epochs 8 --logger_name csv --ink_weight 0.5", cwd)
    return cwd, done.stdout


def digits(program: Path, split: str) -> tuple[Tensor, Tensor]:
    dataset = imported(program, "data").build_datasets(SimpleNamespace(data_dir=""))[split]
    return dataset.images, dataset.targets


def test_learns_both_and_shows_each_value(trained: tuple[Path, str], program: Path):
    cwd, printed = trained
    columns = [f"train/{name}" for name in NAMES] + [f"val/{name}" for name in NAMES] + ["val/accuracy"]
    assert columns in [line.split()[2:11] for line in printed.splitlines()]
    rows = [{name: float(row[name]) for name in columns} for row in history(cwd)]
    for row in rows:
        for part in ("train", "val"):
            assert row[f"{part}/loss"] == pytest.approx(row[f"{part}/digit_loss"] + 0.5 * row[f"{part}/ink_loss"])
    assert rows[-1]["val/accuracy"] > 0.95
    images, _ = digits(program, "val")
    inks = images.sum(dim=(1, 2, 3)) / 8
    assert rows[-1]["val/ink_mae"] < 0.5 * (inks - inks.mean()).abs().mean()  # of the best constant


def test_report_is_what_the_two_heads_say(trained: tuple[Path, str], program: Path):
    cwd, _ = trained
    call(f"{program}/test.py --out_dir train_out --checkpoint last --accelerator cpu", cwd)
    (path,) = run_dir(cwd).glob("test_*.json")
    results, model = json.loads(path.read_text())["results"], weights(cwd)
    images, targets = digits(program, "test")
    features = images
    for i, stride in ((0, 1), (2, 2), (4, 2)):
        features = F.gelu(F.conv2d(features, model[f"layers.{i}.weight"], model[f"layers.{i}.bias"], stride, 1))
    digit, ink = (F.linear(features.flatten(1), model[f"{h}.weight"], model[f"{h}.bias"]) for h in ("digit", "ink"))
    inks = images.sum(dim=(1, 2, 3)) / 8
    assert results["accuracy"] == pytest.approx((digit.argmax(1) == targets).double().mean().item())
    assert results["digit_loss"] == pytest.approx(F.cross_entropy(digit, targets).item(), rel=1e-3)
    assert results["ink_loss"] == pytest.approx((ink[:, 0] - inks).square().mean().item(), rel=1e-3)
    assert results["ink_mae"] == pytest.approx((ink[:, 0] - inks).abs().mean().item(), rel=1e-3)


def test_killed_run_ends_as_if_never_interrupted(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG}", tmp_path)


def test_two_processes_learn_the_same(program: Path, tmp_path: Path):
    found = map(weights, on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
