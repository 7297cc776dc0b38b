"""tools/replay.py: a step of a run is trained again, with the same bits, and shown."""

import math
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from edits import apply, copy_programs, insert_after, insert_before, replace
from helpers import ON_2, REPO, SMALL, call, diffs, execute, interrupt, kill_group, rows, run, run_dir, without_locks
from mistakes import refuses

pytestmark = pytest.mark.recipes
# 3 epochs of 19 steps: each sample but one comes once an epoch.
TRAIN = (
    "train.py --accelerator cpu --epochs 3 --width 4 --num_sanity_val_steps 1 --limit_val_batches 1 "
    "--checkpoint_interval 6 --logger_name csv"
)
POISON = "images[train[700]] = float('inf')"  # sample 700 of the training set
BATCH_NORM = "nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width),\n"
# A layer that fails now and then, in training alone.
RARE = """type("Rare", (nn.Module,), {
                "forward": lambda self, x: x / nn.functional.dropout(x.new_ones(()), 0.05, self.training)
            })(),"""


def with_tools(program: Path) -> Path:
    """A copy of the programs that has the scripts, too."""
    (program / "tools").mkdir()
    for name in ("fork.py", "replay.py"):
        shutil.copy(REPO / "tools" / name, program / "tools")
    return program


def command_of(error: str) -> str:
    """The command that the last line of a run names."""
    return re.search(r"with: python (tools/replay\.py --out_dir \S+ --step \d+)", error)[1]


def kept(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def assert_same_step(cwd: Path, step: int, path: Path) -> None:
    """The file of --keep has the values that the run has logged, where each step is logged."""
    (row,) = [row for row in rows(cwd) if row["step"] == step]
    losses = [about["values"]["loss"] for about in kept(path)["micro_batches"]]
    assert kept(path)["step"] == step
    assert sum(losses) / len(losses) == pytest.approx(row["train/loss"], rel=1e-7)
    norm = math.hypot(*kept(path)["gradient_norms"].values())
    assert norm == pytest.approx(row["train/grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> Path:
    """Where a run has logged each step. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("logged")
    call(f"{TRAIN} --log_interval 1 --micro_batch_size 16", cwd)
    return cwd


# ---- any step


@pytest.mark.parametrize("step, begins", [(57, "from .*step-00000054.ckpt"), (6, "from the beginning")])
def test_a_step_has_the_values_of_the_run_which_is_only_read(step, begins, logged, tmp_path, monkeypatch):
    """Nothing is left in the temporary directory. The highest losses come first. What is printed has some samples of
    each micro-batch, the file has all, with the batches."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = without_locks(logged)
    path = tmp_path / "batch.pt"
    printed = call(f"tools/replay.py --out_dir {run_dir(logged)} --step {step} --keep {path}", tmp_path).stdout
    assert re.search(f"^replays .* {begins}$", printed, re.MULTILINE)
    assert f"\nstep {step}: gradient norm " in printed and printed.count("first not finite: none") == 4
    assert_same_step(logged, step, path)
    assert without_locks(logged) == before
    assert {*tmp_path.iterdir()} == {path, tmp_path / "temporary"} and not [*tmp_path.glob("temporary/tmp*")]
    micro_batches = kept(path)["micro_batches"]
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
    (diff,) = diffs("docs/data.md", "A mean over tokens")
    with_tools(apply(diff, copy_programs(program)))
    call(f"{program}/{TRAIN} --epochs 1 --dropout 0 --micro_batch_size 16", cwd)
    run(f"{program}/tools/replay.py --step 8 --keep batch.pt", cwd)
    for about in kept(cwd / "batch.pt")["micro_batches"]:
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


@pytest.mark.parametrize("options, layer", [("", BATCH_NORM), (f"--checkpoint_interval 1 {ON_2}", None)])
def test_a_poisoned_sample_is_named(options, layer, program, cwd):
    """Also where BatchNorm spoils the others of its batch, right after a checkpoint, and where several processes train.
    The line with which the run ends has the command."""
    insert_after(program, "statistics", POISON)
    if layer:
        replace(program, "first layer", layer)
    with_tools(program)
    failed = execute(f"{program}/{TRAIN} --micro_batch_size 16 {options}", cwd, code=1)
    before = without_locks(cwd)
    done = run(f"{program}/{command_of(failed.stderr)}", cwd)
    assert without_locks(cwd) == before
    (found,) = re.findall(
        r"^rank \d: loss nan\n  (highest .*)\n  first not finite: (.*)\n  16 samples: .*$", done.stdout, re.MULTILINE
    )
    assert re.match(r"highest losses in eval mode: sample 700 nan, sample \d+ \d", found[0])
    assert found[1] == "input of model.layers.0, Conv2d"
    assert done.stdout.count("first not finite: none") == 3
    assert re.search(r"^ +nan  model\.layers\.0$", done.stdout, re.MULTILINE)


def test_values_that_are_not_finite_in_training_mode_alone(program, cwd):
    with_tools(insert_before(program, "last layer", RARE))
    failed = call(f"{program}/{TRAIN} --seed 2", cwd, code=1)
    done = run(f"{program}/{command_of(failed.stderr)}", cwd)
    assert re.search(r"first not finite: output of model\.layers\.\d+, Rare$", done.stdout, re.MULTILINE)
    assert "nan" not in re.search(r"highest losses.*", done.stdout)[0]


# ---- what is wrong


def test_a_mistake_is_one_line(logged, tmp_path):
    folder = str(run_dir(logged))
    for options, words in {
        "--out_dir RUN --step 0": "--step 0 1",
        "--out_dir RUN --step 58": "--step 58 RUN 57",
        "--out_dir RUN": "--step",
        "--out_dir nowhere --step 1": "--out_dir nowhere",
        "--out_dir RUN --step 1 --keep nowhere/batch.pt": "--keep nowhere/batch.pt",
    }.items():
        refuses(f"tools/replay.py {options}".replace("RUN", folder), tmp_path, *words.replace("RUN", folder).split())


def test_a_step_after_the_last_of_a_run_that_was_killed(tmp_path):
    interrupt(f"train.py {SMALL} --epochs 3000 --log_interval 1 --checkpoint_interval 2", tmp_path, kill_group)
    refuses("tools/replay.py --step 12001", tmp_path, "--step 12001", "12000")
