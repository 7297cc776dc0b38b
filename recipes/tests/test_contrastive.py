"""recipes/methods/contrastive.patch: SimCLR, and a linear probe beside it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from edits import replace
from helpers import LONG, ON_2, SMALL, call, imported, killed_and_resumed, run, run_dir, weights, with_recipe

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("contrastive", tmp_path_factory.mktemp("contrastive"))


def test_it_learns_and_is_evaluated(program: Path, tmp_path: Path):
    printed = call(f"{program}/train.py --accelerator cpu --epochs 12 --width 16", tmp_path).stdout
    summary = json.loads((run_dir(tmp_path) / "summary.json").read_text())
    assert "best val/accuracy" in printed and summary["best"] > 0.93
    done = call(f"{program}/test.py --out_dir train_out --accelerator cpu --predictions", tmp_path)
    assert "on 380 test samples" in done.stdout
    results = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())["results"]
    assert results["accuracy"] > 0.9 and results["loss"] == pytest.approx(results["contrastive"] + results["probe"])
    lines = run(f"{program}/contrastive.py {run_dir(tmp_path)}", tmp_path).stdout.splitlines()
    found = {tuple(line.split()[3:5]): float(line.rpartition(" ")[2]) for line in lines}
    assert found["features,", "100"] > found["pixels,", "100"] and found["features,", "1217"] > 0.95


def test_the_labels_do_not_reach_the_encoder(program: Path, tmp_path: Path):
    """With other labels it is the same encoder in every bit, and another probe."""
    other = Path(shutil.copytree(program, tmp_path / "program"))
    replace(other, "target tensor", "torch.tensor(9 - targets,")
    found = []
    for folder in (program, other):
        (cwd := tmp_path / f"of_{folder.name}").mkdir()
        call(f"{folder}/train.py {SMALL} --epochs 2", cwd)
        found.append(weights(cwd))
    is_equal = {name: torch.equal(value, found[1][name]) for name, value in found[0].items()}
    assert is_equal["encoder.0.weight"] and is_equal["projector.0.weight"]
    assert {name for name, equal in is_equal.items() if not equal} == {"probe.2.weight", "probe.2.bias"}


def test_the_encoder_learns_in_mixed_precision_and_from_the_projections_alone(program: Path):
    model = imported(program, "model").Model((1, 8, 8), 10, width=4)
    with torch.autocast("cpu", torch.bfloat16):
        projections, logits = model(torch.randn(4, 1, 8, 8))
    logits.float().square().sum().backward()
    assert model.probe[2].weight.grad.any() and model.encoder[0].weight.grad is None
    projections.float().square().sum().backward()
    assert model.encoder[0].weight.grad.any()


def test_the_loss_is_that_of_the_paper(program: Path):
    """Equation 1 of the paper, pair by pair."""
    contrastive = imported(program, "contrastive")
    projections = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similar = torch.cosine_similarity(projections[:, None], projections[None], dim=2) / 0.2
    losses = []
    for i in range(10):
        others = sum(math.exp(similar[i, k]) for k in range(10) if k != i)
        losses.append(-math.log(math.exp(similar[i, (i + 5) % 10]) / others))
    assert contrastive.nt_xent(projections, 0.2).item() == pytest.approx(sum(losses) / 10)
    images = torch.zeros(6, 1, 8, 8)
    assert not torch.equal(contrastive.random_view(images), contrastive.random_view(images))


def test_killed_and_resumed_it_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG} --epochs 8", tmp_path)


def test_two_processes(program: Path, tmp_path: Path):
    assert "finished after 4 of 4 steps" in run(f"{program}/train.py {SMALL} --epochs 1 {ON_2}", tmp_path).stdout


def test_a_batch_of_one_image_is_refused(program: Path, tmp_path: Path):
    """Nothing could be learned from it: there is no other image."""
    error = call(f"{program}/train.py {SMALL} --micro_batch_size 1", tmp_path, code=2).stderr
    assert "give --micro_batch_size 2 or more" in error and error.count("\n") == 1 and not [*tmp_path.iterdir()]
