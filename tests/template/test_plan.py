"""The arithmetic on options: batches, steps, intervals, the learning rate, the best value. And the schedulers of torch,
as docs/training.md adds them, go on after a resume as if nothing had happened."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import LONG
from comparisons import killed_and_resumed
from copies import diffs, edited
from outputs import checkpoint, history, newest

from config import TrainConfig
from runtime.errors import ConfigError
from train import schedule
from utils import Plan, limit, make_plan, scale_lr, update_best


def plan_of(world_size: int = 1, saved: int = 0, train_samples: int = 1217, **options) -> Plan:
    return make_plan(TrainConfig(**options), train_samples, 200, world_size, saved)


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("micro", [0, 2, 24])
def test_the_batch_is_split_among_devices_and_micro_batches(world_size: int, micro: int):
    """The equation holds, or the error names the nearest values for which it does."""
    for effective in range(1, 100):
        options = {"effective_batch_size": effective, "micro_batch_size": micro}
        unit = world_size * (micro or 1)
        if effective % unit == 0:
            for saved in (0, 2):
                plan = plan_of(world_size, saved, **options)
                assert effective == world_size * plan.micro_batch_size * plan.grad_accum_steps
                kept = saved if saved and effective % (world_size * saved) == 0 else effective // world_size
                assert plan.micro_batch_size == (micro or kept)
            continue
        with pytest.raises(ConfigError) as error:
            plan_of(world_size, **options)
        below = effective // unit * unit
        named = re.search(rf"--effective_batch_size {effective}: .*: (?:(\d+) or )?(\d+)$", str(error.value))
        assert (int(named[1] or 0), int(named[2])) == (below, below + unit)


INTERVALS = ("log_interval", "val_interval", "save_interval")


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, {"steps_per_epoch": 19, "total_steps": 380, "warmup_steps": 19, **dict.fromkeys(INTERVALS, 19)}),
        ({"max_steps": 21}, {"steps_per_epoch": 19, "total_steps": 21}),
        ({"epochs": 0.01, "warmup_epochs": 0.0}, {"total_steps": 1, "warmup_steps": 0, "log_interval": 19}),
        ({"epochs": 2.5, "limit_train_batches": 4}, {"total_steps": 10, **dict.fromkeys(INTERVALS, 4)}),
        ({"log_per_epoch": 2, "val_frequency": 0.5, "checkpoint_frequency": 3},
         {"log_interval": 9.5, "val_interval": 9.5, "save_interval": 57}),
        ({"log_interval": 3, "val_interval": 4, "checkpoint_interval": 5},
         {"log_interval": 3, "val_interval": 4, "save_interval": 5}),
        ({"checkpoint_frequency": 0.0}, {"val_interval": 19, "save_interval": math.inf}),
        ({"warmup_epochs": 0.5, "limit_train_batches": 5}, {"warmup_steps": 2.5}),
        ({"warmup_epochs": 20.0}, {"warmup_steps": 380}),
        ({"warmup_epochs": 30.0, "fast_run": 4}, {"warmup_steps": 570, "total_steps": 4}),
        # The rest of an epoch is its last step; a limit leaves it out, and a fast run rehearses it.
        ({"drop_last": False}, {"steps_per_epoch": 20, "last_batch_size": 1}),
        ({"drop_last": False, "effective_batch_size": 100, "micro_batch_size": 10}, {"last_batch_size": 10}),
        ({"drop_last": False, "limit_train_batches": 5}, {"steps_per_epoch": 5, "last_batch_size": 64}),
        ({"drop_last": False, "limit_train_batches": 2, "fast_run": 4}, {"steps_per_epoch": 2, "last_batch_size": 1}),
        ({"drop_last": False, "effective_batch_size": 1217}, {"steps_per_epoch": 1, "last_batch_size": 1217}),
        ({"early_stopping_patience": 3}, {"patience": 3}),
        ({"early_stopping_patience": 3, "fast_run": 4}, {"patience": math.inf}),
        *(({"limit_val_batches": limited}, {"val_samples": samples, "patience": math.inf})
          for limited, samples in ((2, 128), (4, 200), (0.5, 128), (0, 0))),
    ],
)  # fmt: skip
def test_what_the_options_become(options: dict, expected: dict):
    plan = plan_of(**options)
    expected = {"last_batch_size": 64} | expected
    assert {name: getattr(plan, name) for name in expected} == expected
    told = plan.lines(TrainConfig())[-1]
    assert told.endswith(f" {plan.last_batch_size} samples" if plan.last_batch_size < 64 else " steps")


def test_how_often_a_step_is_due():
    """So many times in each epoch, and at its end; at most once a step; at the last step whatever the interval. A step
    that validates also logs."""

    def due(interval: float, last: int, **options) -> list[int]:
        plan = plan_of(**{"max_steps": 10**9, "warmup_epochs": 0.0} | options)
        return [step for step in range(1, last + 1) if plan.is_due(step, interval)]

    for steps_per_epoch in (4, 19, 937):
        for times in (1, 3):
            found = due(steps_per_epoch / times, 30 * steps_per_epoch)
            assert len(found) == 30 * times
            assert found[times - 1 :: times] == [steps_per_epoch * (epoch + 1) for epoch in range(30)]
    assert due(0.1 * 22, 22000)[9::10] == [*range(22, 22001, 22)]  # exactly ten per epoch
    assert due(2.5 * 10, 99) == [25, 50, 75] and due(1.5 * 19, 99) == [29, 57, 86] and due(0.25, 99) == [*range(1, 100)]
    for interval in (100, math.inf):
        assert due(interval, 11, max_steps=11) == [11]
    plan = plan_of(max_steps=10, warmup_epochs=0.0, checkpoint_interval=4, val_interval=3, log_interval=2)
    found = {step: " ".join(plan.due(step)) for step in range(1, 11)}
    rest = {3: "validate log", 6: "validate log", 9: "validate log", 10: "save validate log"}
    assert found == dict.fromkeys((1, 5, 7), "") | {2: "log", 4: "save log", 8: "save log"} | rest


def test_the_learning_rate_scales_with_the_batch_size_warms_up_and_follows_its_schedule():
    """Goyal et al. 2017, section 2.1: 0.1 for 256 samples becomes 3.2 for 8192; the square root gives 0.1 sqrt(32)."""
    for rule, lr in (("linear", 3.2), ("sqrt", 0.1 * 32**0.5), ("none", 0.1)):
        assert scale_lr(0.1, 8192, 256, rule) == pytest.approx(lr)
        options = {"base_lr": 0.1, "base_batch_size": 256, "effective_batch_size": 8192, "lr_scaling_rule": rule}
        plan = plan_of(train_samples=10**4, **options)
        assert plan.peak_lr == pytest.approx(lr)
        assert f"lr {lr:g} = base_lr 0.1 scaled by rule {rule}," in " ".join(plan.lines(TrainConfig(**options)))
    for steps, after, factors in (
        (4, "constant", {1: 0.2, 4: 0.8, 5: 1, 6: 1, 20: 1}),
        (4, "linear", {4: 0.8, 5: 1, 6: 15 / 16, 20: 1 / 16}),
        (4, "cosine", {4: 0.8, 5: 1, 6: (1 + math.cos(math.pi / 16)) / 2, 13: 0.5}),
        (2.5, "constant", {1: 1 / 3.5, 3: 3 / 3.5, 4: 1}),
        (0, "linear", {1: 1, 20: 1 / 20}),
    ):
        plan = SimpleNamespace(warmup_steps=steps, total_steps=20)
        found = {step: schedule(TrainConfig(lr_schedule=after), plan, step) for step in factors}
        assert found == pytest.approx(factors), (steps, after)


def test_a_limit_is_a_count_or_a_fraction():
    assert [limit(19, count) for count in (0, 1, 5, 100)] == [0, 1, 5, 19]
    assert [limit(19, fraction) for fraction in (0.01, 0.5, 1.0)] == [1, 9, 19]
    assert limit(100, 0.29) == 29  # whose product is below 29


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "mode, min_delta, values, best, bad",
    [
        # A new best value ends the count; the first of equal ones is the best.
        ("max", 0, [1, 0, 0, 2, 0, 0, 2], [1, 1, 1, 4, 4, 4, 4], [0, 1, 2, 0, 1, 2, 3]),
        ("min", 0, [1, 2, 0, 0, -1], [1, 1, 3, 3, 5], [0, 1, 0, 1, 0]),
        # Lower by more than 0.35: 0.6, but not 0.3. Small gains count once they add up; best is best by any gain.
        ("min", 0.35, [1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3], [1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3]),
        ("max", 1, [1, 2, 3], [1, 2, 3], [0, 1, 0]),  # a gain of just min_delta is none
        ("max", 0, [NAN, -INF, INF, 1, NAN, 2], [0, 0, 0, 4, 4, 6], [1, 2, 3, 0, 1, 0]),
    ],
)
def test_patience_counts_the_validations_since_the_best_one(mode, min_delta, values, best: list, bad: list):
    """Of each validation: its value, which step is the best so far, and how many were no better."""
    config = SimpleNamespace(monitor_mode=mode, early_stopping_min_delta=min_delta)
    state = {"best": None, "best_step": 0, "to_beat": None, "bad_validations": 0}
    for step, value in enumerate(values, 1):
        assert update_best(state, value, step, config) == (best[step - 1] == step)
        assert (state["best_step"], state["bad_validations"]) == (best[step - 1], bad[step - 1])
        assert state["best"] == (values[best[step - 1] - 1] if best[step - 1] else None)
    plan = plan_of(early_stopping_patience=3)
    ends = {(step, count): plan.is_finished(step, count) for step in (379, 380) for count in (2, 3)}
    assert ends == {(379, 2): False, (379, 3): True, (380, 2): True, (380, 3): True}


# ---- the schedulers of torch

ONE_CYCLE, PLATEAU = diffs("docs/training.md", "A scheduler of torch")
OF_TORCH = "torch.optim.lr_scheduler"
SEQUENCE = (
    f"{OF_TORCH}.SequentialLR(optimizer, [{OF_TORCH}.LinearLR(optimizer, 0.1, total_iters=20), "
    f"{OF_TORCH}.CosineAnnealingLR(optimizer, plan.total_steps - 20)], [20])"
)
SEQUENTIAL = re.sub("(?<=scheduler = ).*", SEQUENCE, ONE_CYCLE)


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler")  # torch: of one that does not see the steps
@pytest.mark.parametrize(
    "edit, options, rates",
    [
        pytest.param(ONE_CYCLE, "", {0: 4e-3 / 25, 95: 4e-3 / 25e4}, id="OneCycleLR"),
        pytest.param(SEQUENTIAL, "", {0: 4e-4, 10: 2.2e-3, 20: 4e-3}, id="SequentialLR", marks=pytest.mark.night),
        # With this rate the accuracy stays as it is: the rate is halved before the kill and after it.
        pytest.param(PLATEAU, "--base_lr 1e-5 --val_interval 3", {11: 1e-5, 12: 5e-6, 30: 1.25e-6}, id="Plateau"),
    ],
)
def test_a_scheduler_is_resumed_exactly(edit: str, options: str, rates: dict, tmp_path: Path):
    """Some of its rates are given by the number of the steps before."""
    program = edited(edit, tmp_path / "program")
    whole, killed = killed_and_resumed(f"{program}/{LONG} --epochs 12 --log_interval 1 {options}", tmp_path)
    found = [float(row["lr"]) for row in history(whole)]
    assert {step: found[step] for step in rates} == pytest.approx(rates) and len(found) == 96
    ours, theirs = (checkpoint(cwd, f"step-{newest(cwd):08}")["optimizer"]["param_groups"] for cwd in (killed, whole))
    assert ours == theirs
