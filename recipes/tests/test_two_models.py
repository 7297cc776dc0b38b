"""recipes/methods/two_models.patch: co-teaching, two models with an optimizer each, on labels partly wrong."""

import re
from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    call,
    history,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    with_recipe,
)

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("two_models", tmp_path_factory.mktemp("two_models"))


def last(cwd: Path) -> dict:
    """The newest checkpoint."""
    return torch.load(max(run_dir(cwd).glob("checkpoints/step-*.ckpt")), weights_only=True)


@pytest.mark.night
def test_it_learns_more_than_without_the_selection(program: Path, tmp_path: Path):
    """Of the right labels of the test set: a model that learns from the samples that are easy learns more than one that
    learns from all. With a forget_rate of 0, neither model knows of the other."""
    accuracies = []
    for forget_rate in (0, 0.4):
        cwd = tmp_path / str(forget_rate)
        cwd.mkdir()
        call(f"{program}/train.py --accelerator cpu --logger_name csv --forget_rate {forget_rate}", cwd)
        printed = call(f"{program}/test.py --out_dir train_out --checkpoint last --accelerator cpu", cwd).stdout
        accuracies.append(float(re.search(r"^accuracy (\S+)", printed, re.MULTILINE)[1]))
    assert accuracies[1] > accuracies[0] + 0.05


def test_without_forgetting_it_is_the_plain_loop(program: Path, tmp_path: Path):
    """Up to the order of a sum; the second model changes nothing of the first."""
    found = []
    for name, script in {"plain": "train.py", "recipe": f"{program}/train.py --noise_rate 0 --forget_rate 0"}.items():
        (tmp_path / name).mkdir()
        call(f"{script} {SMALL}", tmp_path / name)
        found.append(last(tmp_path / name)["model"])
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("exchange", [True, False])
def test_each_model_learns_from_what_the_other_finds_easy_or_from_what_it_does(exchange: bool, program: Path):
    losses_of = imported(program, "coteaching").co_teaching_losses
    targets = torch.zeros(6, dtype=torch.int64)
    ease = torch.tensor([5.0, 4, 3, 2, 1, 0])  # the greater the logit of the target, the smaller the loss
    logits = torch.stack([ease, torch.zeros(6)], dim=1).requires_grad_()
    peer_logits = torch.stack([ease.flip(0), torch.zeros(6)], dim=1).requires_grad_()
    losses_of(logits, peer_logits, targets, kept=0.5, exchange=exchange)["loss"].backward()
    first, last = [True] * 3 + [False] * 3, [False] * 3 + [True] * 3  # easy for the model; for the peer
    assert logits.grad[:, 0].ne(0).tolist() == (last if exchange else first)
    assert peer_logits.grad[:, 0].ne(0).tolist() == (first if exchange else last)


def test_wrong_labels_are_those_of_the_seed_and_in_the_training_set_alone(program: Path, monkeypatch):
    train = imported_train(program, monkeypatch)
    config = train.TrainConfig(noise_rate=0.3)
    noisy, again = train.build_datasets(config), train.build_datasets(config, augment=False)
    other = train.build_datasets(train.TrainConfig(noise_rate=0.3, seed=7))
    right = train.build_datasets(train.TrainConfig(noise_rate=0))
    wrong = noisy["train"].targets != right["train"].targets
    assert wrong.float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert ((noisy["train"].targets - right["train"].targets)[wrong] % 10 == 1).all()
    assert torch.equal(noisy["train"].targets, again["train"].targets)
    assert not torch.equal(noisy["train"].targets, other["train"].targets)
    for split in ("val", "test"):
        assert torch.equal(noisy[split].targets, right[split].targets)


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    whole, killed = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    for name in ("peer", "peer_optimizer"):
        torch.testing.assert_close(last(killed)[name], last(whole)[name], atol=0, rtol=0)
    error = call(f"{program}/train.py --resume auto --noise_rate 0.1", killed, code=2).stderr
    assert "--noise_rate 0.1: a resume cannot change it" in error


def test_two_processes_train_the_same_models(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 24", tmp_path)
    for name in ("model", "peer"):
        torch.testing.assert_close(last(one)[name], last(two)[name], atol=1e-4, rtol=0)
    assert [row["step"] for row in history(one)] == [row["step"] for row in history(two)]
