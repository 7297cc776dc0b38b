"""recipes/methods/diffusion.patch: noise as the target, and a script of its own that draws images."""

import re
from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    assert_same_training,
    call,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    with_recipe,
)

pytestmark = pytest.mark.recipes
OPTIONS = "--accelerator cpu --dropout 0 --logger_name csv --checkpoint_frequency 5"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("diffusion", tmp_path_factory.mktemp("diffusion"))


def distance(program: Path, cwd: Path, count: int) -> float:
    report = run(f"{program}/sample.py --count {count}", cwd).stdout
    return float(re.search(r"distance to the test images (.+)", report)[1])


def evaluated(program: Path, cwd: Path) -> float:
    """The loss of test.py."""
    report = call(f"{program}/test.py --out_dir train_out --accelerator cpu", cwd).stdout
    assert "on 380 test samples" in report
    return float(re.search(r"^loss (.+)$", report, re.MULTILINE)[1])


@pytest.mark.night
def test_it_learns_to_draw(program: Path, tmp_path: Path):
    """sample.py also says how far a normal distribution with the mean and the covariance of the images is: 0.007. This
    short training does not reach that; the one of the recipe's page does."""
    call(f"{program}/train.py {OPTIONS} --epochs 12 --width 16 --base_lr 2e-3", tmp_path)
    assert distance(program, tmp_path, 200) < 0.02
    assert (run_dir(tmp_path) / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert evaluated(program, tmp_path) < 0.25


def test_a_run_that_has_learned_nothing_draws_nothing(program: Path, tmp_path: Path):
    call(f"{program}/train.py {OPTIONS} --width 4 --warmup_epochs 0 --max_steps 2", tmp_path)
    assert distance(program, tmp_path, 100) > 0.03
    assert evaluated(program, tmp_path) > 0.5


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG} --epochs 8", tmp_path)


def test_on_two_processes_it_trains_alike(program: Path, tmp_path: Path):
    """The noise is that of the micro-batch, wherever it is drawn."""
    command = f"{program}/train.py {SMALL} --width 16 --max_steps 8 --micro_batch_size 16"
    assert_same_training(*on_one_and_two(command, tmp_path))


def test_noise_is_added_as_described(program: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that knows the image has no loss: it gets back the noise, whatever the step."""
    train = imported_train(program, monkeypatch)
    from model import schedule

    signals = schedule()[1]
    images, seen = torch.randn(64, 1, 8, 8), []

    def model(noisy, times):
        signal = signals[times].view(-1, 1, 1, 1)
        seen.extend(times.tolist())
        return (noisy - signal.sqrt() * images) / (1 - signal).sqrt()

    values, count, _ = train.compute_loss(model, (images, None), None)
    assert values["loss"] < 1e-6 and count == 64 and len({*seen}) > 32
    assert signals[0] > 0.99 and signals[-1] < 1e-4  # from nearly no noise to nearly nothing else
