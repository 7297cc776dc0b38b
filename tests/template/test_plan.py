"""The arithmetic on options: batches, steps, intervals, the learning rate."""

import math
import re

import pytest

from config import TrainConfig
from runtime.errors import ConfigError
from utils import Plan, limit, make_plan, scale_lr


def plan_of(world_size: int = 1, saved: int = 0, train_samples: int = 1000, **options) -> Plan:
    return make_plan(TrainConfig(**options), train_samples, 200, world_size, saved)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro", [0, 1, 2, 8, 24])
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
        else:
            with pytest.raises(ConfigError) as error:
                plan_of(world_size, **options)
            below = effective // unit * unit
            named = re.search(
                rf"--effective_batch_size {effective}: .*; nearest: (?:(\d+) or )?(\d+)$", str(error.value)
            )
            assert (int(named[1] or 0), int(named[2])) == (below, below + unit)


@pytest.mark.parametrize(
    "options, steps, intervals",
    [
        ({}, (19, 380), (19, 19, 19)),
        ({"max_steps": 21}, (19, 21), (19, 19, 19)),
        ({"epochs": 0.01, "warmup_epochs": 0.0}, (19, 1), (19, 19, 19)),
        ({"epochs": 2.5, "limit_train_batches": 4}, (4, 10), (4, 4, 4)),
        ({"log_per_epoch": 2, "val_frequency": 0.5, "checkpoint_frequency": 3}, (19, 380), (9.5, 9.5, 57)),
        ({"log_interval": 3, "val_interval": 4, "checkpoint_interval": 5}, (19, 380), (3, 4, 5)),
        ({"checkpoint_frequency": 0.0}, (19, 380), (19, 19, math.inf)),
    ],
)
def test_epochs_become_steps(options: dict, steps: tuple, intervals: tuple):
    plan = plan_of(train_samples=1217, **options)
    assert (plan.steps_per_epoch, plan.total_steps) == steps
    assert (plan.log_interval, plan.val_interval, plan.save_interval) == intervals


@pytest.mark.parametrize(
    "options, steps",
    [
        ({}, 19),
        ({"warmup_epochs": 0.0}, 0),
        ({"warmup_epochs": 0.5, "limit_train_batches": 5}, 2.5),
        ({"warmup_epochs": 20.0}, 380),
        ({"warmup_epochs": 30.0, "fast_run": 4}, 570),
    ],
)
def test_the_warm_up_is_in_steps(options: dict, steps: float):
    assert plan_of(train_samples=1217, **options).warmup_steps == steps


@pytest.mark.parametrize("options", [{"warmup_epochs": 30.0}, {"warmup_epochs": 1.5, "epochs": 1.0}])
def test_a_warm_up_longer_than_the_run_is_refused(options: dict):
    """The learning rate would never arrive."""
    has, run = 19 * options["warmup_epochs"], 19 * options.get("epochs", 20)
    words = f"^--warmup_epochs {options['warmup_epochs']:g}: is {has:g} steps, but the run has {run:g}$"
    for more in ({}, {"max_steps": int(run), "epochs": 100.0}):
        with pytest.raises(ConfigError, match=words):
            plan_of(train_samples=1217, **options | more)


@pytest.mark.parametrize(
    "options, steps, last",
    [
        ({}, 20, 1),
        ({"effective_batch_size": 100}, 13, 17),
        ({"effective_batch_size": 100, "micro_batch_size": 10}, 13, 10),
        ({"effective_batch_size": 1217}, 1, 1217),
        ({"limit_train_batches": 5}, 5, 64),  # which leaves the rest out
        ({"limit_train_batches": 2, "fast_run": 4}, 2, 1),  # which rehearses it
    ],
)
def test_the_rest_of_an_epoch_is_its_last_step(options: dict, steps: int, last: int):
    plan = plan_of(train_samples=1217, drop_last=False, **options)
    assert (plan.steps_per_epoch, plan.last_batch_size) == (steps, last)
    assert plan_of(train_samples=1217, **options).last_batch_size == plan.effective_batch_size
    said = plan.lines(TrainConfig())[-1]
    assert said.endswith(f" steps, the last of {last} samples" if last < plan.effective_batch_size else " steps")


def test_a_rest_of_fewer_samples_than_micro_batches_is_refused():
    with pytest.raises(ConfigError, match=r"^--drop_last False: the last step of an epoch has 1 sample\(s\) for 2 "):
        plan_of(train_samples=1217, drop_last=False, micro_batch_size=32)
    assert plan_of(train_samples=1216, drop_last=False, micro_batch_size=32).last_batch_size == 64


def test_what_is_due_after_a_step():
    """A step that validates also logs; after the last one, all is due."""
    plan = plan_of(max_steps=10, warmup_epochs=0.0, checkpoint_interval=4, val_interval=3, log_interval=2)
    due = {step: " ".join(plan.due(step)) for step in range(1, 11)}
    rest = {3: "validate log", 6: "validate log", 9: "validate log", 10: "save validate log"}
    assert due == dict.fromkeys((1, 5, 7), "") | {2: "log", 4: "save log", 8: "save log"} | rest
    assert [step for step in due if plan.logs(step)] == [step for step in due if "log" in due[step]]


def test_the_whole_training_set_may_be_one_batch():
    assert plan_of(train_samples=64, effective_batch_size=64).steps_per_epoch == 1
    with pytest.raises(ConfigError, match="^--effective_batch_size 65: there are only 64 training samples$"):
        plan_of(train_samples=64, effective_batch_size=65)


@pytest.mark.parametrize("limited, expected", [(2, 128), (4, 200), (0.5, 128), (1.0, 200), (0, 0)])
def test_a_validation_is_limited_in_effective_batches(limited: int | float, expected: int):
    """So it is the same on any number of devices."""
    for world_size in (1, 2, 4):
        assert plan_of(world_size, limit_val_batches=limited).val_samples == expected


def test_scale_lr():
    """Goyal et al. 2017, section 2.1: 0.1 for 256 samples becomes 3.2 for 8192; the square root gives 0.1 sqrt(32)."""
    assert scale_lr(0.1, 8192, 256, "linear") == pytest.approx(3.2)
    assert scale_lr(0.1, 8192, 256, "sqrt") == pytest.approx(0.1 * 32**0.5)
    assert scale_lr(0.1, 8192, 256, "none") == 0.1
    assert scale_lr(0.1, 64, 256, "linear") == pytest.approx(0.025)
    assert scale_lr(0.1, 64, 256, "sqrt") == pytest.approx(0.05)


ENDLESS = plan_of(max_steps=10**9)


@pytest.mark.parametrize("steps_per_epoch", [4, 19, 22, 100, 937])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_is_due_so_many_times_in_each_epoch(steps_per_epoch: int, times: int):
    interval = steps_per_epoch / times
    for epoch in range(30):
        steps = range(epoch * steps_per_epoch + 1, (epoch + 1) * steps_per_epoch + 1)
        due = [step for step in steps if ENDLESS.is_due(step, interval)]
        assert len(due) == times
        assert due[-1] == steps[-1]


def test_is_due_for_a_fraction_of_an_epoch():
    """0.1 of 22 steps: exactly ten per epoch."""
    for epoch in range(1000):
        assert sum(ENDLESS.is_due(step, 0.1 * 22) for step in range(epoch * 22 + 1, (epoch + 1) * 22 + 1)) == 10


def test_is_due_every_so_many_epochs_and_at_most_once_a_step():
    assert [step for step in range(1, 100) if ENDLESS.is_due(step, 2.5 * 10)] == [25, 50, 75]
    assert [step for step in range(1, 100) if ENDLESS.is_due(step, 1.5 * 19)] == [29, 57, 86]
    assert all(ENDLESS.is_due(step, 0.25) for step in range(1, 100))


def test_is_due_at_the_last_step_whatever_the_interval():
    plan = plan_of(max_steps=11, warmup_epochs=0.0)
    for interval in (100, math.inf):
        assert [step for step in range(1, 12) if plan.is_due(step, interval)] == [11]


@pytest.mark.parametrize(
    "total, limited, expected",
    [(19, 5, 5), (19, 0, 0), (19, 1, 1), (19, 100, 19), (19, 1.0, 19), (19, 0.5, 9), (19, 0.01, 1),
     (30, 0.1, 3), (10, 0.7, 7), (100, 0.29, 29)],
)  # fmt: skip
def test_limit(total: int, limited: int | float, expected: int):
    assert limit(total, limited) == expected
