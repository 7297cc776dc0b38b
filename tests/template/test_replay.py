"""tools/replay.py: a step of a run is trained again, with the same bits, and shown."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import ON_2, TOOLS, call, execute, run
from copies import diff, edited
from edits import insert_after, insert_before, replace
from fixtures import where_trained
from mistakes import refuses
from outputs import copied, rows, run_dir, set_running, without_locks

pytestmark = pytest.mark.recipes
# 3 epochs of 19 steps: each sample but one comes once an epoch.
TRAIN = (
    "train.py --accelerator cpu --epochs 3 --width 4 --num_sanity_val_steps 1 --limit_val_batches 1 "
    "--checkpoint_interval 6 --logger_name csv"
)


def replay_failed(program: Path, options: str, cwd: Path) -> str:
    """What the command prints with which a run names the step that it has failed in. The run is only read."""
    shutil.copytree(TOOLS, program / "tools")
    error = execute(f"{program}/{TRAIN} {options}", cwd, code=1).stderr
    command = re.search(r"with: python (tools/replay\.py --out_dir \S+ --step \d+)", error)[1]
    before = without_locks(cwd)
    printed = run(f"{program}/{command}", cwd).stdout
    assert without_locks(cwd) == before
    return printed


def assert_same_step(cwd: Path, step: int, path: Path) -> None:
    """The file of --keep has the values that the run has logged, where each step is logged."""
    (row,) = [row for row in rows(cwd) if row["step"] == step]
    kept = torch.load(path)
    losses = [about["values"]["loss"] for about in kept["micro_batches"]]
    assert kept["step"] == step
    assert sum(losses) / len(losses) == pytest.approx(row["train/loss"], rel=1e-7)
    assert math.hypot(*kept["gradient_norms"].values()) == pytest.approx(row["train/grad_norm"], rel=1e-5)


logged = where_trained(f"{TRAIN} --log_interval 1 --micro_batch_size 16")


# ---- any step


@pytest.mark.parametrize("step, begins", [(57, "from .*step-00000054.ckpt"), (6, "from the beginning")])
def test_a_step_has_the_values_of_the_run_which_is_only_read(step: int, begins: str, logged: Path, cwd: Path):
    """The highest losses come first. What is printed has some samples of each micro-batch, the file has all, with the
    batches."""
    before = without_locks(logged)
    printed = call(f"tools/replay.py --out_dir {run_dir(logged)} --step {step} --keep batch.pt", cwd).stdout
    assert re.search(f"^replays .* {begins}$", printed, re.MULTILINE)
    assert f"\nstep {step}: gradient norm " in printed and printed.count("first not finite: none") == 4
    assert_same_step(logged, step, cwd / "batch.pt")
    assert without_locks(logged) == before and [path.name for path in cwd.iterdir()] == ["batch.pt"]
    micro_batches = torch.load(cwd / "batch.pt")["micro_batches"]
    assert len({sample for about in micro_batches for sample in about["samples"][0]}) == 64
    for about in micro_batches:
        images, targets = about["batch"]
        assert images.shape == (16, 1, 8, 8) and targets.shape == (16,)
        losses = about["losses"]
        assert [*losses.values()] == sorted(losses.values(), reverse=True) and {*losses} == {*about["samples"][0]}
        highest = ", ".join(f"sample {sample} {loss:.5g}" for sample, loss in [*losses.items()][:8])
        assert f"\n  highest losses in eval mode: {highest}\n" in printed
        first = ", ".join(map(str, about["samples"][0][:8]))
        assert f"\n  16 samples: {first}, ... (--keep writes all)\n" in printed


def test_single_samples_have_the_loss_of_a_validation(program, cwd):
    """What only a training step has, such as the number of its targets, would make another number of it."""
    edited(diff("docs/data.md", "A mean over tokens"), program)
    shutil.copytree(TOOLS, program / "tools")
    call(f"{program}/{TRAIN} --epochs 1 --dropout 0 --micro_batch_size 16", cwd)
    run(f"{program}/tools/replay.py --step 8 --keep batch.pt", cwd)
    for about in torch.load(cwd / "batch.pt")["micro_batches"]:
        losses = [*about["losses"].values()]
        assert sum(losses) / len(losses) == pytest.approx(about["values"]["loss"], rel=1e-4)


def test_options_that_a_resume_has_changed(tmp_path):
    """A step is trained with those of the process that has trained it."""
    options = "--log_interval 1 --num_checkpoint_keep 0 --lr_schedule constant --warmup_epochs 0"
    call(f"{TRAIN} {options} --max_steps 10", tmp_path)
    call("train.py --resume train_out --max_steps 20 --base_lr 0.1", tmp_path)
    call("train.py --resume train_out --max_steps 30 --base_lr 0.01", tmp_path)
    call("tools/replay.py --step 20 --keep batch.pt", tmp_path)
    assert_same_step(tmp_path, 20, tmp_path / "batch.pt")


# ---- values that are not finite


@pytest.mark.parametrize("options", ["", f"--checkpoint_interval 1 {ON_2}"])
def test_a_poisoned_sample_is_named(options: str, program: Path, cwd: Path):
    """Also where BatchNorm spoils the others of its batch, right after a checkpoint, and where several processes train.
    The line with which the run ends has the command."""
    insert_after(program, "statistics", "images[train[700]] = float('inf')")
    if not options:
        replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width),\n")
    printed = replay_failed(program, f"--micro_batch_size 16 {options}", cwd)
    (found,) = re.findall(
        r"^rank \d: loss nan\n  (highest .*)\n  first not finite: (.*)\n  16 samples: .*$", printed, re.MULTILINE
    )
    assert re.match(r"highest losses in eval mode: sample 700 nan, sample \d+ \d", found[0])
    assert found[1] == "input of model.layers.0, Conv2d" and printed.count("first not finite: none") == 3
    assert re.search(r"^ +nan  model\.layers\.0$", printed, re.MULTILINE)


def test_values_that_are_not_finite_in_training_mode_alone(program: Path, cwd: Path):
    """Of a layer that fails now and then."""
    fails = "lambda self, x: x / nn.functional.dropout(x.new_ones(()), 0.05, self.training)"
    insert_before(program, "last layer", f'type("Rare", (nn.Module,), {{"forward": {fails}}})(),')
    printed = replay_failed(program, "--seed 2", cwd)
    assert re.search(r"first not finite: output of model\.layers\.\d+, Rare$", printed, re.MULTILINE)
    assert "nan" not in re.search(r"highest losses.*", printed)[0]


# ---- what is wrong


def test_a_mistake_is_one_line(logged: Path, tmp_path: Path):
    cwd = copied(logged, tmp_path)
    for options, words in {
        "--step 0": "--step 0 1",
        "--step 58": f"--step 58 {run_dir(cwd).name} 57",
        "": "--step",
        "--out_dir nowhere --step 1": "--out_dir nowhere",
        "--step 1 --keep nowhere/batch.pt": "--keep nowhere/batch.pt",
    }.items():
        refuses(f"tools/replay.py {options}", cwd, *words.split())
    set_running(run_dir(cwd))  # as a kill leaves it
    refuses("tools/replay.py --step 58", cwd, "--step 58", "57")
