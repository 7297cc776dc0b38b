"""The arithmetic on options: batches, steps, intervals, the learning rate. And the schedulers of torch, as
docs/training.md adds them, go on after a resume as if nothing had happened."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LONG, checkpoint, diffs, edited, history, killed_and_resumed, newest, run_dir

from config import TrainConfig
from runtime.errors import ConfigError
from utils import Plan, limit, make_plan, scale_lr


def plan_of(world_size: int = 1, saved: int = 0, train_samples: int = 1217, **options) -> Plan:
    return make_plan(TrainConfig(**options), train_samples, 200, world_size, saved)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [0, 1, 2, 24])
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
        ({"max_steps": 21}, {"steps_per_epoch": 19, "total_steps": 21, **dict.fromkeys(INTERVALS, 19)}),
        ({"epochs": 0.01, "warmup_epochs": 0.0}, {"total_steps": 1, "warmup_steps": 0, "log_interval": 19}),
        ({"epochs": 2.5, "limit_train_batches": 4}, {"total_steps": 10, **dict.fromkeys(INTERVALS, 4)}),
        ({"log_per_epoch": 2, "val_frequency": 0.5, "checkpoint_frequency": 3},
         dict(zip(INTERVALS, (9.5, 9.5, 57), strict=True))),
        ({"log_interval": 3, "val_interval": 4, "checkpoint_interval": 5},
         dict(zip(INTERVALS, (3, 4, 5), strict=True))),
        ({"checkpoint_frequency": 0.0}, {"val_interval": 19, "save_interval": math.inf}),
        ({"warmup_epochs": 0.5, "limit_train_batches": 5}, {"warmup_steps": 2.5}),
        ({"warmup_epochs": 20.0}, {"warmup_steps": 380}),
        ({"warmup_epochs": 30.0, "fast_run": 4}, {"warmup_steps": 570}),
        # The rest of an epoch is its last step; a limit leaves it out, and a fast run rehearses it.
        ({"drop_last": False}, {"steps_per_epoch": 20, "last_batch_size": 1}),
        ({"drop_last": False, "effective_batch_size": 100}, {"steps_per_epoch": 13, "last_batch_size": 17}),
        ({"drop_last": False, "effective_batch_size": 100, "micro_batch_size": 10}, {"last_batch_size": 10}),
        ({"drop_last": False, "effective_batch_size": 1217}, {"steps_per_epoch": 1, "last_batch_size": 1217}),
        ({"drop_last": False, "limit_train_batches": 5}, {"steps_per_epoch": 5, "last_batch_size": 64}),
        ({"drop_last": False, "limit_train_batches": 2, "fast_run": 4}, {"steps_per_epoch": 2, "last_batch_size": 1}),
        ({"drop_last": False, "micro_batch_size": 32, "train_samples": 1216}, {"last_batch_size": 64}),
        ({"effective_batch_size": 64, "train_samples": 64}, {"steps_per_epoch": 1}),
        *(({"world_size": n, "limit_val_batches": limited}, {"val_samples": samples}) for n in (1, 2, 4)
          for limited, samples in ((2, 128), (4, 200), (0.5, 128), (1.0, 200), (0, 0))),
    ],
)  # fmt: skip
def test_what_the_options_become(options: dict, expected: dict):
    plan = plan_of(**options)
    assert {name: getattr(plan, name) for name in expected} == expected
    last = plan.last_batch_size
    assert last == (expected.get("last_batch_size", last) if "drop_last" in options else plan.effective_batch_size)
    told = plan.lines(TrainConfig())[-1]
    assert told.endswith(f" {last} samples" if last < plan.effective_batch_size else " steps")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"warmup_epochs": 30.0}, "--warmup_epochs 30: .*570 .*380"),
        ({"warmup_epochs": 30.0, "max_steps": 380, "epochs": 100.0}, "--warmup_epochs 30: .*570 .*380"),
        ({"warmup_epochs": 1.5, "epochs": 1.0}, "--warmup_epochs 1.5: .*28.5 .*19"),
        ({"drop_last": False, "micro_batch_size": 32}, r"--drop_last False: .* 1 sample\(s\) for 2 "),
        ({"train_samples": 64, "effective_batch_size": 65}, "--effective_batch_size 65: .*64"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(options: dict, words: str):
    """Such as a warm-up after which the learning rate never arrives."""
    with pytest.raises(ConfigError, match=f"^{words}"):
        plan_of(**options)


def test_what_is_due_after_a_step():
    """A step that validates also logs; after the last one, all is due."""
    plan = plan_of(max_steps=10, warmup_epochs=0.0, checkpoint_interval=4, val_interval=3, log_interval=2)
    due = {step: " ".join(plan.due(step)) for step in range(1, 11)}
    rest = {3: "validate log", 6: "validate log", 9: "validate log", 10: "save validate log"}
    assert due == dict.fromkeys((1, 5, 7), "") | {2: "log", 4: "save log", 8: "save log"} | rest
    assert [step for step in due if plan.logs(step)] == [step for step in due if "log" in due[step]]


def due(interval: float, last: int, plan: Plan | None = None) -> list[int]:
    plan = plan or plan_of(max_steps=10**9)
    return [step for step in range(1, last + 1) if plan.is_due(step, interval)]


def test_how_often_a_step_is_due():
    """So many times in each epoch, and at its end; at most once a step; at the last step whatever the interval."""
    for steps_per_epoch in (4, 19, 22, 100, 937):
        for times in (1, 2, 3, 4):
            found = due(steps_per_epoch / times, 30 * steps_per_epoch)
            assert len(found) == 30 * times
            assert found[times - 1 :: times] == [steps_per_epoch * (epoch + 1) for epoch in range(30)]
    steps = due(0.1 * 22, 22000)  # 0.1 of 22 steps: exactly ten per epoch
    assert all(
        sum(epoch * 22 < step <= epoch * 22 + 22 for step in steps[epoch * 10 :][:10]) == 10 for epoch in range(1000)
    )
    assert due(2.5 * 10, 99) == [25, 50, 75] and due(1.5 * 19, 99) == [29, 57, 86] and due(0.25, 99) == [*range(1, 100)]
    for interval in (100, math.inf):
        assert due(interval, 11, plan_of(max_steps=11, warmup_epochs=0.0)) == [11]


def test_scale_lr_and_limit():
    """Goyal et al. 2017, section 2.1: 0.1 for 256 samples becomes 3.2 for 8192; the square root gives 0.1 sqrt(32)."""
    for size, rule, lr in ((8192, "linear", 3.2), (8192, "sqrt", 0.1 * 32**0.5), (8192, "none", 0.1),
                           (64, "linear", 0.025), (64, "sqrt", 0.05)):  # fmt: skip
        assert scale_lr(0.1, size, 256, rule) == pytest.approx(lr)
    limits = {(19, 5): 5, (19, 0): 0, (19, 100): 19, (19, 0.5): 9, (19, 0.01): 1, (30, 0.1): 3, (10, 0.7): 7,
              (100, 0.29): 29}  # fmt: skip
    assert {given: limit(*given) for given in limits} == limits
    assert (limit(19, 1), limit(19, 1.0)) == (1, 19)  # which are one key


# ---- the schedulers of torch

SCHEDULER, PLATEAU = diffs("docs/training.md", "A scheduler of torch")
EPOCHS = 12
PLAN = SimpleNamespace(peak_lr=4e-3, total_steps=8 * EPOCHS)
CONFIG = SimpleNamespace(monitor_mode="max")
LOW_LR = 1e-5  # the accuracy stays as it is
OPTIONS = f"{LONG} --epochs {EPOCHS} --log_interval 1"
OF_TORCH = "torch.optim.lr_scheduler"
SCHEDULERS = [
    re.search(r"scheduler = (.*)", SCHEDULER)[1],  # that of the page
    f"{OF_TORCH}.StepLR(optimizer, 7, 0.8)",
    f"{OF_TORCH}.ExponentialLR(optimizer, 0.97)",
    f"{OF_TORCH}.CosineAnnealingLR(optimizer, plan.total_steps)",
    f"{OF_TORCH}.SequentialLR(optimizer, [{OF_TORCH}.LinearLR(optimizer, 0.1, total_iters=20), "
    f"{OF_TORCH}.CosineAnnealingLR(optimizer, plan.total_steps - 20)], [20])",
]
# torch warns of a scheduler that does not see the optimizer's steps.
sees_steps = pytest.mark.filterwarnings("error:Detected call of .lr_scheduler")


def of_torch(expression: str, lr: float) -> tuple:
    """An optimizer of one parameter, and a scheduler."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr)
    return optimizer, eval(expression, {"torch": torch, "optimizer": optimizer, "plan": PLAN, "config": CONFIG})


def rates(cwd: Path) -> list[float]:
    return [float(row["lr"]) for row in history(cwd)]


@sees_steps
@pytest.mark.parametrize(
    "expression",
    [SCHEDULERS[0], *(pytest.param(each, marks=pytest.mark.night) for each in SCHEDULERS[1:])],
    ids=lambda text: re.search(r"(\w+)\(", text)[1],
)
def test_a_scheduler_is_resumed_exactly(expression: str, tmp_path: Path):
    """Its rates are those that torch gives."""
    program = edited(SCHEDULER.replace(SCHEDULERS[0], expression), tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{OPTIONS}", tmp_path)
    optimizer, scheduler = of_torch(expression, PLAN.peak_lr)
    expected = []
    for _ in range(PLAN.total_steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(whole) == expected


@sees_steps
def test_a_rate_that_depends_on_the_results_is_resumed_exactly(tmp_path: Path):
    """It is reduced before the kill and after it."""
    program = edited(PLATEAU, tmp_path / "program")
    whole, killed = killed_and_resumed(f"{program}/{OPTIONS} --val_interval 3 --base_lr {LOW_LR}", tmp_path)
    optimizer, scheduler = of_torch(re.search(r"\+ +scheduler = (.*)", PLATEAU)[1], LOW_LR)
    expected = []
    for row in history(whole):
        expected.append(optimizer.param_groups[0]["lr"])
        if row["val/accuracy"]:
            scheduler.step(float(row["val/accuracy"]))
    assert rates(whole) == expected
    resumed = int(re.search(r"resumed from .*step-(\d+)", (run_dir(killed) / "train.log").read_text())[1])
    assert expected[0] > expected[resumed - 1] > expected[-1]
    ours, theirs = (checkpoint(cwd, f"step-{newest(cwd):08}")["optimizer"]["param_groups"] for cwd in (killed, whole))
    assert ours == theirs
