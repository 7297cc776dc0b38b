"""recipes/sharded.patch: weights, gradients and optimizer spread over the processes (FSDP2, here on CPUs)."""

import json
import signal
from pathlib import Path

import pytest
from conftest import (
    assert_same_run,
    assert_same_training,
    call,
    copied,
    history,
    interrupt,
    kill_group,
    newest,
    run,
    run_dir,
    weights,
)
from edits import insert_after, replace
from test_recipes import with_recipe

from model import Model

pytestmark = pytest.mark.recipes
# Two epochs of 8 steps, each step four micro-batches, saved every second step.
RUN = (
    "train.py --accelerator cpu --epochs 2 --limit_train_batches 8 --limit_val_batches 2 --num_sanity_val_steps 1 "
    "--width 4 --micro_batch_size 16 --lr_schedule constant --checkpoint_frequency 0.25 --logger_name csv"
)
ON_1, SHARDED = "--devices 1 --strategy auto", "--devices 2 --strategy model_parallel"
TWO_GROUPS = """torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ], weight_decay=config.weight_decay, fused=True)"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The recipe, with two groups of parameters, in another order than the model's."""
    program = with_recipe("sharded", tmp_path_factory.mktemp("program"))
    return replace(program, "optimizer", TWO_GROUPS)


@pytest.fixture(scope="module")
def alone(program: Path, tmp_path_factory) -> Path:
    """Where one process has trained, without shards."""
    cwd = tmp_path_factory.mktemp("alone")
    call(f"{program}/{RUN}", cwd)
    return cwd


@pytest.fixture(scope="module")
def whole(program: Path, tmp_path_factory) -> Path:
    """Where a sharded run was never interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    run(f"{program}/{RUN} {SHARDED}", cwd)
    return cwd


@pytest.fixture(scope="module")
def killed(program: Path, tmp_path_factory) -> Path:
    """Where a sharded run was killed in the middle of an epoch."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(f"{program}/{RUN} {SHARDED}", cwd, kill_group, after=0).returncode == -signal.SIGKILL
    return cwd


def test_trains_as_one_process_does_and_holds_half_of_it(alone: Path, whole: Path):
    assert_same_training(whole, alone)
    Model((1, 8, 8), 10, width=4).load_state_dict(weights(whole))
    held, share = ({float(row["held_mb"]) for row in history(cwd)} for cwd in (alone, whole))
    assert len(held) == len(share) == 1
    state = 3 * sum(weight.nbytes for weight in weights(alone).values()) / 1e6  # AdamW has two values for each weight
    assert held.pop() == pytest.approx(state, rel=0.01)
    assert share.pop() == pytest.approx(state / 2, rel=0.05)


def test_killed_and_resumed_is_the_same_run(program: Path, whole: Path, killed: Path, tmp_path: Path):
    cwd = copied(killed, tmp_path)
    run(f"{program}/train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


@pytest.mark.parametrize("devices", [ON_1, "--devices 1"])
def test_goes_on_in_one_process(program: Path, alone: Path, killed: Path, devices: str, tmp_path: Path):
    """Without shards, and with one."""
    cwd = copied(killed, tmp_path)
    how = call if devices == ON_1 else run
    how(f"{program}/train.py --resume auto {devices}", cwd)
    assert_same_training(cwd, alone)


def test_goes_on_sharded(program: Path, alone: Path, tmp_path: Path):
    """A run that began in one process, without shards."""
    call(f"{program}/{RUN} --epochs 1", tmp_path)
    run(f"{program}/train.py --resume auto --epochs 2 {SHARDED}", tmp_path)
    assert_same_training(tmp_path, alone)


def test_an_optimizer_without_state(tmp_path: Path):
    """SGD without momentum: begins sharded, goes on sharded or not."""
    program = with_recipe("sharded", tmp_path / "program")
    replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=1)")  # for shards torch has no fused SGD
    command = f"{program}/{RUN} --base_lr 0.5"
    for name in ("alone", "began"):
        (tmp_path / name).mkdir()
    call(command, tmp_path / "alone")
    run(f"{command} --epochs 1 {SHARDED}", tmp_path / "began")
    for name, devices in (("on_1", ON_1), ("on_2", "")):
        (tmp_path / name).mkdir()
        cwd = copied(tmp_path / "began", tmp_path / name)
        how = call if devices == ON_1 else run
        how(f"{program}/train.py --resume auto --epochs 2 {devices}", cwd)
        assert_same_training(cwd, tmp_path / "alone")


def test_evaluation_is_that_of_one_process(program: Path, alone: Path, whole: Path):
    reports = []
    for cwd, devices, how in ((alone, "", call), (whole, SHARDED, run)):
        how(f"{program}/test.py --out_dir train_out --accelerator cpu {devices}", cwd)
        reports.append(json.loads((run_dir(cwd) / "test_test_best.json").read_text()))
    assert reports[1]["accuracy"] == reports[0]["accuracy"]
    assert reports[1]["loss"] == pytest.approx(reports[0]["loss"], abs=1e-5)


def test_weights_that_are_not_finite_in_one_shard_are_not_saved(tmp_path: Path):
    program = with_recipe("sharded", tmp_path / "program")
    breaking = "next(model.parameters()).detach().to_local().fill_(math.nan)"
    insert_after(program, "step is done", f"if fabric.global_rank == 1 and step == 3:\n    {breaking}")
    done = run(f"{program}/{RUN} {SHARDED}", tmp_path, code=1)
    assert "the weights are not finite after step 4" in done.stderr
    assert newest(tmp_path) == 2


def test_the_core_says_where_sharding_is(tmp_path: Path):
    for strategy in ("model_parallel", "fsdp"):
        assert "recipes/README.md" in call(f"train.py --strategy {strategy}", tmp_path, code=2).stderr
