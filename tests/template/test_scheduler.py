"""The schedulers of torch, as docs/training.md adds them, go on after a resume as if nothing had happened."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LONG, checkpoint, diffs, edited, history, killed_and_resumed, newest, run_dir

SCHEDULER, PLATEAU = diffs("docs/training.md", "A scheduler of torch")
EPOCHS = 12
PLAN = SimpleNamespace(peak_lr=4e-3, total_steps=8 * EPOCHS)
CONFIG = SimpleNamespace(monitor_mode="max")
LOW_LR = 1e-5  # the accuracy stays as it is
OPTIONS = f"{LONG} --epochs {EPOCHS} --log_interval 1"
OF_TORCH = "torch.optim.lr_scheduler"
# The first is that of the page.
SCHEDULERS = [
    re.search(r"scheduler = (.*)", SCHEDULER)[1],
    f"{OF_TORCH}.StepLR(optimizer, 7, 0.8)",
    f"{OF_TORCH}.ExponentialLR(optimizer, 0.97)",
    f"{OF_TORCH}.CosineAnnealingLR(optimizer, plan.total_steps)",
    f"{OF_TORCH}.SequentialLR(optimizer, [{OF_TORCH}.LinearLR(optimizer, 0.1, total_iters=20), "
    f"{OF_TORCH}.CosineAnnealingLR(optimizer, plan.total_steps - 20)], [20])",
]
# torch warns of a scheduler that does not see the optimizer's steps.
pytestmark = pytest.mark.filterwarnings("error:Detected call of .lr_scheduler")


def of_torch(expression: str, lr: float) -> tuple:
    """An optimizer of one parameter, and a scheduler."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr)
    return optimizer, eval(expression, {"torch": torch, "optimizer": optimizer, "plan": PLAN, "config": CONFIG})


def rates(cwd: Path) -> list[float]:
    return [float(row["lr"]) for row in history(cwd)]


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
