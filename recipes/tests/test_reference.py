"""The recipe reference: a frozen model that the loss needs, in training, validations and test.py."""

from pathlib import Path

import pytest
import torch
from edits import insert_after
from helpers import (
    LONG,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    history,
    killed_and_resumed,
    last_summary,
    on_one_and_two,
    results,
    run_dir,
    weights,
    with_recipe,
)

pytestmark = pytest.mark.recipes
TWELVE = f"{LONG} --epochs 12"


@pytest.fixture(scope="module")
def with_reference(tmp_path_factory) -> Path:
    program = with_recipe("reference", tmp_path_factory.mktemp("program"))
    return insert_after(program, "step is done", "assert not config.reference or not model.reference[0].training")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """A finished run, with more dropout than the models that are compared with it. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("reference")
    call(f"train.py {SMALL} --width 6 --dropout 0.9 --out_dir reference", cwd)
    return run_dir(cwd, "reference")


def test_a_frozen_model_is_asked_in_validations_and_by_test_py(with_reference, reference, tmp_path):
    """It is in no checkpoint and not counted, and does not draw random numbers."""
    call(f"{with_reference}/train.py {SMALL} --limit_val_batches 1.0 --reference {reference}", tmp_path)
    last = history(tmp_path)[-1]
    found = results(with_reference, tmp_path, "--checkpoint last --split val")
    assert found["distance"] == pytest.approx(float(last["val/distance"])) and found["distance"] > 1
    assert found["loss"] == pytest.approx(float(last["val/loss"])) and found["loss"] > found["distance"]
    plain = tmp_path / "plain"
    plain.mkdir()
    call(f"train.py {SMALL}", plain)
    assert last_summary(tmp_path)["parameters"] == last_summary(plain)["parameters"]
    assert weights(tmp_path).keys() == weights(plain).keys()
    checkpoint = torch.load(next(run_dir(tmp_path).glob("checkpoints/step-*.ckpt")))
    assert checkpoint["model"].keys() == weights(plain).keys()


def test_without_the_option_nothing_has_changed(with_reference, tmp_path):
    whole, plain = tmp_path / "whole", tmp_path / "plain"
    whole.mkdir(), plain.mkdir()
    call(f"{with_reference}/train.py {SMALL}", whole)
    call(f"train.py {SMALL}", plain)
    assert_same_run(whole, plain)


def test_a_run_with_a_frozen_model_is_resumed_and_the_same_on_two_processes(with_reference, reference, tmp_path):
    killed_and_resumed(f"{with_reference}/{TWELVE} --reference {reference}", tmp_path)
    one, two = on_one_and_two(f"{with_reference}/{LONG} --max_steps 8 --reference {reference}", tmp_path)
    assert_same_training(two, one)


@pytest.mark.parametrize(
    "options", ["--precision bf16-mixed", "--precision bf16-true", pytest.param("--compile", marks=pytest.mark.night)]
)
def test_a_frozen_model_beside_one_in_another_precision_or_compiled(options: str, with_reference, reference, tmp_path):
    call(f"{with_reference}/train.py --accelerator cpu --fast_run --reference {reference} {options}", tmp_path)


def test_an_option_that_names_a_run_is_resolved_as_out_dir(with_reference, reference, tmp_path):
    """By its path, by its name, and by that without the time; in root_dir."""
    for name in (reference, reference.name, "reference"):
        done = call(
            f"{with_reference}/train.py {SMALL} --fast_run --root_dir {reference.parent} --reference {name}", tmp_path
        )
        assert (f"--reference reference: the run is {reference}" in done.stdout) == (name == "reference")
    error = call(f"{with_reference}/train.py {SMALL} --reference other", tmp_path, code=2).stderr
    assert error.startswith("train.py: error: --reference other: no such run") and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
