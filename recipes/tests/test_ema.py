"""The recipe ema: an average of the weights is what is validated, saved and tested."""

import math
from pathlib import Path

import pytest
import torch
from helpers import (
    EVERY_FOURTH_STEP,
    LONG,
    call,
    history,
    imported_train,
    killed_and_resumed,
    last_summary,
    on_one_and_two,
    run_dir,
    weights,
    with_recipe,
)

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("ema", tmp_path_factory.mktemp("program"))


def saved(cwd: Path) -> list[dict]:
    """The checkpoints of a run, in the order of their steps."""
    return [torch.load(path, weights_only=True) for path in sorted(run_dir(cwd).glob("checkpoints/step-*.ckpt"))]


def test_the_averaged_weights_are_better_and_are_tested(program: Path, tmp_path: Path):
    options = "--accelerator cpu --lr_schedule constant --epochs 15 --logger_name csv"
    printed = call(f"{program}/train.py {options}", tmp_path).stdout
    values = ["val/loss", "val/accuracy", "val/raw_loss", "val/raw_accuracy"]
    assert values in [line.split()[3:7] for line in printed.splitlines()]
    assert "\nmodel, 58,314 parameters; raw_model, 58,314 parameters\n" in printed
    assert last_summary(tmp_path)["parameters"] == 58314
    last = [{name: float(row[name]) for name in values} for row in history(tmp_path)[-5:]]
    means = {name: sum(row[name] for row in last) / len(last) for name in values}
    assert means["val/loss"] < 0.7 * means["val/raw_loss"]
    assert means["val/accuracy"] > max(0.985, means["val/raw_accuracy"])
    done = call(f"{program}/test.py --out_dir train_out --checkpoint last --split val --accelerator cpu", tmp_path)
    assert f"loss {last[-1]['val/loss']:.5g}\naccuracy {last[-1]['val/accuracy']:.5g}\n" in done.stdout
    torch.testing.assert_close(weights(tmp_path), saved(tmp_path)[-1]["model"], atol=0, rtol=0)


def test_average_follows_the_formula(program: Path, tmp_path: Path):
    """In each step, after the optimizer's: average <- decay * average + (1 - decay) * weights. The decay rises at
    first, as a function of the step alone."""
    options = "--max_steps 4 --checkpoint_interval 1 --num_checkpoint_keep 0"
    call(f"{program}/{LONG.replace(EVERY_FOURTH_STEP, options)}", tmp_path)
    before, *others = saved(tmp_path)
    for after, decay in zip(others, [3 / 12, 4 / 13, 5 / 14], strict=True):  # of the steps 2 to 4
        for name, raw in after["raw_model"].items():
            expected = decay * before["model"][name].double() + (1 - decay) * raw.double()
            torch.testing.assert_close(after["model"][name].double(), expected, atol=1e-7, rtol=0)
            assert not torch.equal(after["model"][name], raw)
        before = after


def test_the_decay_rises_to_the_option_so_that_the_start_is_forgotten(program: Path, monkeypatch: pytest.MonkeyPatch):
    train = imported_train(program, monkeypatch)
    config = train.TrainConfig(ema_decay=0.999)
    decays = [train.ema_decay(config, step) for step in range(1, 10001)]
    assert decays[0] == 2 / 11 and decays == sorted(decays) and decays[-1] == 0.999
    assert math.prod(decays[:100]) < 1e-9  # the share of the random weights after 100 steps; 0.9 with 0.999 throughout


def test_killed_run_ends_as_if_never_interrupted(program: Path, tmp_path: Path):
    whole, killed = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    torch.testing.assert_close(saved(killed)[-1]["raw_model"], saved(whole)[-1]["raw_model"], atol=0, rtol=0)


def test_two_processes_average_the_same_weights(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 12", tmp_path)
    torch.testing.assert_close(weights(one), weights(two), atol=1e-5, rtol=0)
    assert [row["val/accuracy"] for row in history(one)] == [row["val/accuracy"] for row in history(two)]


def test_decay_of_one_is_refused(program: Path, tmp_path: Path):
    assert "--ema_decay 1.0: must be below 1" in call(f"{program}/train.py --ema_decay 1", tmp_path, code=2).stderr
