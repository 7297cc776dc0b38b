"""The edits of recipes/edits.md: each applies to the code as it is, and a run with it is resumed exactly."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import (
    LONG,
    REPO,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    diffs,
    edited,
    history,
    killed_and_resumed,
    last_summary,
    on_one_and_two,
    run,
    run_dir,
    weights,
)
from edits import copy_programs, insert_after, replace

REFERENCE, NO_DECAY, VAL_SETS, LAZY, CHECKPOINTING, HUB = diffs("recipes/edits.md")
TWELVE = f"{LONG} --epochs 12"

pytestmark = pytest.mark.recipes


def results(program: Path, cwd: Path, split: str) -> dict:
    """Those of the last checkpoint."""
    call(f"{program}/test.py --accelerator cpu --checkpoint last --split {split}", cwd)
    (path,) = run_dir(cwd).glob(f"test_{split}_*.json")
    return json.loads(path.read_text())["results"]


# ---- a frozen model that the loss needs


@pytest.fixture(scope="module")
def with_reference(tmp_path_factory) -> Path:
    program = edited(REFERENCE, tmp_path_factory.mktemp("program"))
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
    found = results(with_reference, tmp_path, "val")
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


@pytest.mark.parametrize("options", ["--precision bf16-mixed", "--precision bf16-true", "--compile"])
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


# ---- no weight decay of biases and norms


def test_matrices_alone_decay(tmp_path):
    """Without gradients. The model has a norm, too."""
    program = edited(NO_DECAY, tmp_path / "program")
    replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1),\nnn.GroupNorm(2, width),\n")
    replace(program, "values", '{"loss": 0 * F.cross_entropy(logits, targets)}')
    call(f"{program}/train.py {SMALL} --weight_decay 0.5 --checkpoint_interval 1 --num_checkpoint_keep 0", tmp_path)
    folder = run_dir(tmp_path) / "checkpoints"
    first, last = (torch.load(folder / f"step-{step:08}.ckpt")["model"] for step in (1, 20))
    shrunk = {name for name in first if not torch.equal(first[name], last[name])}
    assert shrunk == {name for name, tensor in first.items() if tensor.ndim > 1} < {*first}
    assert all(last[name].norm() < first[name].norm() for name in shrunk)


def test_a_run_with_two_groups_is_resumed_and_the_same_on_two_processes(tmp_path):
    """Without weight decay it is the plain run."""
    (tmp_path / "program").mkdir()
    program = edited(NO_DECAY, tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE} --weight_decay 0", tmp_path)
    (tmp_path / "plain").mkdir()
    call(f"{TWELVE} --weight_decay 0", tmp_path / "plain")
    torch.testing.assert_close(weights(whole), weights(tmp_path / "plain"), atol=0, rtol=0)
    one, two = on_one_and_two(f"{program}/{LONG} --weight_decay 0.5 --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- several validation sets


@pytest.fixture(scope="module")
def with_two_sets(tmp_path_factory) -> Path:
    return edited(VAL_SETS, tmp_path_factory.mktemp("program"))


def test_a_second_validation_set_is_logged_monitored_and_evaluated(with_two_sets, tmp_path):
    options = "--limit_val_batches 1.0 --monitor val/mirrored_accuracy"
    done = call(f"{with_two_sets}/train.py {SMALL} --width 16 {options}", tmp_path)
    rows = history(tmp_path)
    best = max(float(row["val/mirrored_accuracy"]) for row in rows)
    assert last_summary(tmp_path)["best"] == best and "val/mirrored_loss" in done.stdout
    assert float(rows[-1]["val/accuracy"]) > float(rows[-1]["val/mirrored_accuracy"]) > 0
    for split, prefix in (("val", "val/"), ("mirrored", "val/mirrored_")):
        found = results(with_two_sets, tmp_path, split)
        for name in ("loss", "accuracy"):
            assert found[name] == pytest.approx(float(rows[-1][f"{prefix}{name}"]))


def test_a_run_with_two_validation_sets_is_resumed_and_the_same_on_two_processes(with_two_sets, tmp_path):
    whole, _ = killed_and_resumed(f"{with_two_sets}/{TWELVE}", tmp_path)
    (tmp_path / "plain").mkdir()
    call(TWELVE, tmp_path / "plain")
    torch.testing.assert_close(weights(whole), weights(tmp_path / "plain"), atol=0, rtol=0)
    one, two = on_one_and_two(f"{with_two_sets}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- lazy layers, activation checkpointing, torch.hub


def test_a_model_with_lazy_layers_is_evaluated_resumed_and_the_same_on_two_processes(tmp_path):
    (tmp_path / "program").mkdir()
    program = edited(LAZY, tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE}", tmp_path)
    assert weights(whole)["layers.8.weight"].shape == (10, 2 * 4 * 2 * 2)
    assert results(program, whole, "test")["accuracy"] > 0.8
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


FORWARDS = "model.module.layers[0].register_forward_hook(lambda *_: print('forward'))"


@pytest.mark.parametrize("options", ["", "--precision bf16-mixed"])
def test_activation_checkpointing_computes_the_first_part_twice_and_the_same_in_each_bit(options: str, tmp_path):
    """With dropout. 20 steps of 4 micro-batches."""
    forwards = {}
    for name, edit in (("plain", copy_programs), ("edited", lambda folder: edited(CHECKPOINTING, folder))):
        program = insert_after(edit(tmp_path / f"program_{name}"), "set-up is done", FORWARDS)
        (tmp_path / name).mkdir()
        command = f"{program}/train.py {SMALL} --micro_batch_size 16 --dropout 0.5 {options}"
        forwards[name] = call(command, tmp_path / name).stdout.count("forward\n")
    assert_same_run(tmp_path / "edited", tmp_path / "plain")
    assert forwards["edited"] == forwards["plain"] + 20 * 4


def test_a_run_with_activation_checkpointing_is_resumed_and_the_same_on_two_processes(tmp_path):
    (tmp_path / "program").mkdir()
    program = edited(CHECKPOINTING, tmp_path / "program")
    killed_and_resumed(f"{program}/{TWELVE}", tmp_path)
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


HUBCONF = """
from torch import nn

from utils import pixels


def small_net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels(), num_classes))
"""


def test_a_model_of_torch_hub_may_have_a_module_of_the_same_name(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "hubconf.py").write_text(HUBCONF)
    (repository / "utils.py").write_text("def pixels():\n    return 64\n")
    program = edited(HUB.replace('"REPOSITORY"', repr(str(repository))), tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE}", tmp_path)
    assert results(program, whole, "test")["accuracy"] > 0.8
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- torch.export


def test_an_exported_model_gives_the_same_logits_for_batches_of_any_size(tmp_path):
    """By the code of README.md, and that of the page after it."""
    pattern = r"^```python\n(.*?)^```$"
    *_, load = re.findall(pattern, (REPO / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (export,) = re.findall(pattern, (REPO / "recipes" / "edits.md").read_text(), re.DOTALL | re.MULTILINE)
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    program = copy_programs(tmp_path / "program")
    code = load.replace("20261122-102325-train_out", run_dir(tmp_path).name) + export
    check = """
for size in (1, 2, 7):
    images = torch.stack([dataset[i][0] for i in range(size)])
    torch.testing.assert_close(torch.export.load("model.pt2").module()(images), model(images))
print("the same")
"""
    (program / "export.py").write_text(code + check)
    assert run(f"{program}/export.py", tmp_path).stdout.endswith("the same\n")
