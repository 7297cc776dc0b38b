"""The recipe sam: two passes per step, the second at the weights where the loss is the highest nearby."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edits import insert_after, replace
from helpers import LONG, ON_2, call, killed_and_resumed, run, run_dir, weights, with_recipe

pytestmark = pytest.mark.recipes
LR, RHO = 0.25, 0.5


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("sam", tmp_path_factory.mktemp("program"))


def test_learns_and_is_evaluated(program: Path, tmp_path: Path):
    call(f"{program}/train.py --accelerator cpu --epochs 7", tmp_path)
    done = call(f"{program}/test.py --out_dir train_out --accelerator cpu", tmp_path)
    assert float(re.search(r"^accuracy (.+)", done.stdout, re.MULTILINE)[1]) > 0.95


def test_steps_along_the_gradient_of_the_perturbed_weights(tmp_path: Path):
    """Of the loss |w|²/2 the gradient is w, there w + rho w/|w|. With plain SGD, |w| falls by lr (|w| + rho)."""
    program = with_recipe("sam", tmp_path / "program")
    replace(program, "values", '{"loss": sum(p.square().sum() for p in model.parameters()) / 2 + 0 * logits.sum()}')
    replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=plan.peak_lr)")
    options = f"--max_steps 3 --checkpoint_interval 1 --base_lr {LR} --lr_schedule constant --warmup_epochs 0"
    options = f"{LONG.partition(' --lr_schedule')[0]} {options} --rho {RHO} --monitor val/loss --monitor_mode min"
    call(f"{program}/{options}", tmp_path)
    first, *others = (torch.load(path, weights_only=True)["model"] for path in
                      sorted(run_dir(tmp_path).glob("checkpoints/step-*.ckpt")))  # fmt: skip
    norm = torch.cat([weight.double().flatten() for weight in first.values()]).norm()
    assert norm > 1 and len(others) == 2
    factor = 1.0
    for model in others:
        factor *= 1 - LR * (1 + RHO / (factor * norm))
        for name, weight in model.items():
            torch.testing.assert_close(weight.double(), first[name].double() * factor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("devices", ["", ON_2])
def test_second_pass_sees_the_same_batches_and_dropout(devices: str, tmp_path: Path):
    """Each forward pass of a training step prints its images and a random number."""
    program = with_recipe("sam", tmp_path / "program")
    shown = 'print(f"pass {images.sum():.8f} {torch.rand(()):.8f}\\n", end="", flush=True)'
    insert_after(program, "batch", f"if model.training:\n    {shown}")
    how = run if devices else call
    done = how(f"{program}/{LONG} --max_steps 2 {devices}", tmp_path)
    passes = re.findall(r"pass (.+)", done.stdout)
    assert len(passes) == 2 * 2 * 4 and len({*passes}) == 2 * 4  # 2 steps of 2 passes of 4 micro-batches
    assert len({line.partition(" ")[0] for line in passes}) == 2 * 4
    if not devices:
        assert passes[:4] == passes[4:8] and passes[8:12] == passes[12:]


def test_same_weights_on_other_devices_and_micro_batches(tmp_path: Path):
    """Without dropout and shifts, whose random numbers are those of a micro-batch."""
    program = replace(with_recipe("sam", tmp_path / "program"), "shift", "shift=0")
    found = []
    for name, options in {"one": "", "whole": "--micro_batch_size 64", "two": ON_2}.items():
        (tmp_path / name).mkdir()
        how = run if options == ON_2 else call
        how(f"{program}/{LONG} --max_steps 8 --dropout 0 {options}", tmp_path / name)
        found.append(weights(tmp_path / name))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=0)


def test_killed_run_ends_as_if_never_interrupted(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG}", tmp_path)


def test_a_gradient_that_overflows_moves_no_weight(program: Path):
    """As it may in 16-mixed, where the step is skipped: the second pass must not put a NaN into BatchNorm's buffers."""
    code = (
        "import torch, sam\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model.weight.grad = torch.tensor([[1.0, torch.inf]])\n"
        "before = sam.ascend(model, rho=0.5)\n"
        "assert model.weight.isfinite().all() and torch.equal(model.weight, before[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
