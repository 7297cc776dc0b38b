"""recipes/methods/gradient_penalty.patch: a gradient of a gradient, in training and in a validation."""

import re
from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    assert_same_training,
    call,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    with_recipe,
)

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("gradient_penalty", tmp_path_factory.mktemp("gradient_penalty"))


def evaluated(program: Path, cwd: Path, options: str) -> dict[str, float]:
    call(f"{program}/train.py --accelerator cpu --epochs 8 --width 16 --logger_name csv {options}", cwd)
    report = call(f"{program}/test.py --out_dir train_out --checkpoint last --accelerator cpu", cwd).stdout
    return {name: float(value) for name, value in re.findall(r"^(\w+) ([\d.e-]+)$", report, re.MULTILINE)}


def test_it_resists_an_attack(program: Path, tmp_path: Path):
    """And learns as well: what the penalty takes is the gradient, not the accuracy."""
    found = {}
    for weight in (0, 3):
        (tmp_path / str(weight)).mkdir()
        found[weight] = evaluated(program, tmp_path / str(weight), f"--gradient_penalty {weight}")
    assert found[3]["fgsm_accuracy"] > found[0]["fgsm_accuracy"] + 0.2
    assert found[3]["penalty"] < found[0]["penalty"] / 4
    assert min(found[weight]["accuracy"] for weight in found) > 0.9


def test_pgd_stays_near_the_image_and_is_the_stronger_attack(program: Path, monkeypatch: pytest.MonkeyPatch):
    """Than one step along the sign of the gradient, the fast gradient sign method."""
    train = imported_train(program, monkeypatch)
    pgd = imported(program, "pgd")
    config = train.TrainConfig(width=4)
    dataset = train.build_datasets(config)["val"]
    images, targets = dataset.images, dataset.targets
    model = train.build_model(config, dataset).eval()

    def loss(moved: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(moved), targets)

    (gradients,) = torch.autograd.grad(loss(images.requires_grad_()), images)
    images.requires_grad_(False)
    moved = pgd.attacked(model, images, targets, 0.5, 40)
    assert (moved - images).abs().max() <= 0.5 + 1e-6
    assert loss(moved) > loss(images + 0.5 * gradients.sign()) > loss(images)


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG}", tmp_path)


def test_on_two_processes_it_trains_alike(program: Path, tmp_path: Path):
    """The gradients that DDP averages are those of the penalty, too."""
    command = f"{program}/train.py {SMALL} --max_steps 8 --micro_batch_size 16 --logger_name csv"
    assert_same_training(*on_one_and_two(command, tmp_path))


def test_the_gradient_of_the_penalty_is_that_of_finite_differences(program: Path, monkeypatch):
    """Of the loss with the penalty, by one weight, in float64."""
    train = imported_train(program, monkeypatch)
    from config import TrainConfig
    from data import build_datasets

    config = TrainConfig(width=4, dropout=0, gradient_penalty=1e4)
    dataset = build_datasets(config)["train"]
    model = train.build_model(config, dataset).double()
    images, targets = dataset.__getitems__(range(8))
    weight, losses = model.layers[0].weight, []
    for shift in (1e-5, -2e-5, 1e-5):
        with torch.no_grad():
            weight[0, 0, 0, 0] += shift
        values, _, _ = train.compute_loss(model, (images.double(), targets), config)
        losses.append(values["loss"])
    losses[-1].backward()
    slope = (losses[0] - losses[1]).item() / 2e-5
    assert config.gradient_penalty * values["penalty"] > 0.1  # else the loss alone would do
    torch.testing.assert_close(weight.grad[0, 0, 0, 0].item(), slope, rtol=1e-4, atol=1e-8)
