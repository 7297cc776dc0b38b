"""What a run computes, prints and writes."""

import math
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from commands import LONG, ON_2, REPO, SMALL, STEPS, TOOLS, TORCHRUN, call, execute, folders, run
from comparisons import killed_and_resumed, on_one_and_two
from edits import copy_programs, insert_after, insert_before, replace
from outputs import checkpoint, last_summary, rows, run_dir, weights
from processes import how_to_go_on

ALL_STEPS = f"{SMALL} --warmup_epochs 1 --log_interval 1"
MICRO_32 = f"{ALL_STEPS} --micro_batch_size 32 --lr_schedule constant"
# The weights grow 5,000-fold with each step.
DIVERGE = f"{SMALL} --lr_schedule constant --weight_decay 1.25e6 --warmup_epochs 0"


def checkpoint_names(cwd: Path) -> list[str]:
    return sorted(path.stem for path in (run_dir(cwd) / "checkpoints").iterdir())


def steps_with(cwd: Path, name: str) -> list[int]:
    return [int(row["step"]) for row in rows(cwd) if name in row]


# ---- batches and devices


def assert_same_losses(ours: Path, theirs: Path) -> None:
    """Weights and logged losses agree up to the rounding of a sum."""
    torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-5, rtol=0)
    assert len(rows(ours)) == len(rows(theirs)) == 20
    for row, expected in zip(rows(ours), rows(theirs), strict=True):
        for value in ("step", "train/loss", "train/grad_norm", "lr", "val/loss", "val/accuracy"):
            assert row.get(value) == pytest.approx(expected.get(value), abs=1e-5), value


def test_accumulating_micro_batches_trains_like_one_batch_of_64(tmp_path):
    """Without dropout and shifts: other micro-batches would draw others."""
    program = replace(tmp_path / "program", "shift", "shift=0")
    whole, parts = folders(tmp_path, "whole", "parts")
    command = f"{program}/train.py {ALL_STEPS} --dropout 0 --limit_val_batches 1.0"
    call(command, whole)
    printed = call(f"{command} --micro_batch_size 16", parts).stdout
    assert "effective_batch_size 64 = 1 device(s) x 16 micro_batch_size x 4" in printed
    assert_same_losses(parts, whole)


def test_2_processes_train_like_1_with_dropout_and_augmentation(tmp_path):
    """The three newest checkpoints are kept, and the best one. What is printed, to a file, has one line per epoch, and
    no progress bar."""
    one, two = folders(tmp_path, "one", "two")
    call(f"train.py {MICRO_32}", one)
    done = run(f"train.py {MICRO_32} {ON_2}", two)
    assert_same_losses(one, two)
    for cwd in (one, two):
        assert checkpoint_names(cwd) == ["best", "step-00000012", "step-00000016", "step-00000020"]
        values = {row["step"]: row["val/accuracy"] for row in rows(cwd) if "val/accuracy" in row}
        assert checkpoint(cwd, "best")["step"] == max(values, key=values.get)  # the first of equals
    assert done.stdout.count("effective_batch_size 64 = 2 device(s) x 32 micro_batch_size x 1") == 1
    assert "\r" not in done.stdout + done.stderr and "step/s" not in done.stderr
    epochs = re.findall(r"^ +(\d+) +(\d+)  ", done.stdout, re.MULTILINE)
    assert epochs == [("1", "4"), ("2", "8"), ("3", "12"), ("4", "16"), ("5", "20")]


@pytest.mark.night
def test_a_launcher_from_outside_gives_one_run_with_the_same_weights(tmp_path):
    fabric_run = f"{sysconfig.get_path('scripts')}/fabric run --accelerator cpu --devices 2"
    own, *others = folders(tmp_path, "own", "torchrun", "fabric")
    run(f"train.py {MICRO_32} {ON_2}", own)
    for launcher, cwd in zip((TORCHRUN, fabric_run), others, strict=True):
        run(f"{launcher} {REPO}/train.py {MICRO_32} --strategy ddp", cwd)
        torch.testing.assert_close(weights(cwd), weights(own), atol=0, rtol=0)


DP = """
from lightning.fabric.strategies import DataParallelStrategy

fabric = Fabric(accelerator="cpu", devices=1, strategy=DataParallelStrategy(parallel_devices=[torch.device("cpu")]))
"""


@pytest.mark.night
def test_dp_trains_like_one_process_without_a_warning(program, tmp_path):
    dp, one = folders(tmp_path, "dp", "one")
    call(f"train.py {MICRO_32}", one)
    done = run(f"{insert_after(program, 'Fabric', DP)}/train.py {MICRO_32}", dp, CUDA_VISIBLE_DEVICES="")
    assert_same_losses(dp, one)
    assert done.stderr == ""


# ---- random numbers of an edit

# What a step draws for all ranks, such as a layer and a weight for manifold mixup. Each rank writes it down.
OF_STEP = """
with open(f"drawn_{fabric.global_rank}", "a") as file:
    print(step, torch.rand(()).item(), numpy.random.rand(), random.random(), file=file)
"""
OF_LOSS = "(torch.rand(()) + numpy.random.rand() + random.random())"


def drawn(cwd: Path, rank: int) -> dict[str, tuple]:
    """The numbers of each step. A step that was done again, after a resume, has drawn the same."""
    lines = {tuple(line.split()) for line in (cwd / f"drawn_{rank}").read_text().splitlines()}
    found = {step: numbers for step, *numbers in lines}
    assert len(found) == len(lines) == STEPS
    return found


def test_what_is_drawn_at_the_top_of_a_step_or_drawn_in_compute_loss_is_alike_on_all_ranks_and_after_a_resume(tmp_path):
    """With workers and without: they draw in processes of their own, which seed no generator of the loop."""
    program = insert_before(tmp_path / "program", "functions", "import random\n\nimport numpy\n\n\n")
    insert_before(program, "learning rate", OF_STEP)
    replace(program, "values", f'{{"loss": F.cross_entropy(logits, targets) * {OF_LOSS}, "drawn": {OF_LOSS}}}')
    whole, killed = killed_and_resumed(f"{program}/{LONG} {ON_2} --num_workers 1", tmp_path)
    (alone,) = folders(tmp_path, "alone")
    call(f"{program}/{LONG}", alone)
    expected = drawn(whole, 0)
    assert drawn(whole, 1) == drawn(killed, 0) == drawn(killed, 1) == drawn(alone, 0) == expected
    for column in zip(*expected.values(), strict=True):
        assert len(set(column)) == STEPS, "another in each step"
    of_loss = {name: [row[f"{name}/drawn"] for row in rows(whole)] for name in ("train", "val")}
    assert [row["train/drawn"] for row in rows(alone)] == pytest.approx(of_loss["train"], rel=1e-6)
    assert len({*of_loss["train"]}) == 10 and len({*of_loss["val"]}) == 1, "a validation draws the same each time"


# ---- precisions, the compiler, the time and the gradient of a step


@pytest.mark.parametrize(
    "precision, dtype",
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_it_trains_in_other_precisions(precision, dtype, tmp_path):
    call(f"train.py {SMALL} --epochs 2 --precision {precision}", tmp_path)
    assert all(tensor.dtype == dtype and tensor.isfinite().all() for tensor in weights(tmp_path).values())
    losses = [row[name] for row in rows(tmp_path) for name in ("train/loss", "val/loss")]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    before, after = (checkpoint(tmp_path, f"step-0000000{step}")["model"] for step in (4, 8))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.night
def test_a_compiled_model_trains(tmp_path):
    options = "--epochs 1 --limit_train_batches 2 --num_sanity_val_steps 0 --compile"
    run(f"train.py {SMALL} {options}", tmp_path, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert steps_with(tmp_path, "train/loss") == [2]


# A clock that counts how often it is asked, and jumps where something begins that is not part of each step.
CLOCK = """
import itertools
import types

from runtime import meters

meters.time = types.SimpleNamespace(perf_counter=itertools.count().__next__)


def late(function):
    def called(*args, **options):
        for _ in range(10**5):
            meters.time.perf_counter()
        return function(*args, **options)

    return called


validate, Run.open, Run.write_checkpoint = map(late, (validate, Run.open, Run.write_checkpoint))


"""


def test_the_samples_of_all_processes_count_and_the_time_of_steps_alone(tmp_path):
    """Not that of what is done once in the first step, of validations and saves. By a clock on which a step of one
    process takes as long as one of two."""
    program = insert_before(tmp_path / "program", "train", CLOCK)
    options = f"{SMALL} --max_steps 6 --log_interval 1 --val_interval 2 --checkpoint_interval 3"
    one, two = on_one_and_two(f"{program}/train.py {options}", tmp_path)
    rates = [[row["samples_per_second"] for row in rows(cwd)] for cwd in (one, two)]
    assert rates == 2 * [6 * rates[0][:1]] and rates[0][0] > 1


def test_the_whole_gradient_is_clipped_once_and_its_norm_is_logged_as_it_was_before(tmp_path):
    """The row of several steps has the mean of their norms if each is clipped, and else the norm of its own step: only
    who clips needs it in each. A step that is not logged is clipped as well."""
    norms = {}
    options = f"{SMALL} --micro_batch_size 16 --max_steps 8 --val_interval 8 --checkpoint_interval 1"
    for limit, interval in ((0.01, 1), (0.01, 8), (0, 1), (0, 8)):
        (cwd,) = folders(tmp_path, f"{limit} {interval}")
        call(f"train.py {options} --num_checkpoint_keep 0 --max_grad_norm {limit} --log_interval {interval}", cwd)
        norms[limit, interval] = [row["train/grad_norm"] for row in rows(cwd)]
    clipped, free = norms[0.01, 1], norms[0, 1]
    assert clipped[0] == free[0] > 0.05 and len({*clipped}) == len({*free}) == 8
    assert norms[0.01, 8] == [pytest.approx(sum(clipped) / 8, rel=1e-6)] and norms[0, 8] == [free[-1]]
    torch.testing.assert_close(weights(tmp_path / "0.01 8"), weights(tmp_path / "0.01 1"), atol=0, rtol=0)
    # AdamW's first average of the gradients is 0.1 of the gradient that it was given.
    state = checkpoint(tmp_path / "0.01 8", "step-00000001")["optimizer"]["state"]
    averages = torch.cat([each["exp_avg"].flatten() for each in state.values()])
    assert averages.norm() == pytest.approx(0.1 * 0.01, rel=1e-4)


# ---- when to log, to validate and to save: three questions


def test_intervals_in_steps(tmp_path):
    """The last step always logs, validates and saves; the schedule ends there. With this learning rate nothing gets
    better after the first validation, whose step does not save: best.ckpt is of it."""
    options = "--warmup_epochs 1 --base_lr 1e-9 --max_steps 11 --log_interval 5 --val_interval 3"
    saving = "--checkpoint_frequency 0 --checkpoint_interval 4 --num_checkpoint_keep 0"
    assert "11 steps = 2.75 epochs x 4 steps" in call(f"train.py {SMALL} {options} {saving}", tmp_path).stdout
    assert steps_with(tmp_path, "train/loss") == [3, 5, 6, 9, 10, 11]  # a validation is logged, too
    assert steps_with(tmp_path, "val/loss") == [3, 6, 9, 11]
    assert checkpoint_names(tmp_path) == ["best", "step-00000004", "step-00000008", "step-00000011"]
    assert checkpoint(tmp_path, "best")["step"] == 3
    last = rows(tmp_path)[-1]
    assert last["epoch"] == 2.75
    assert last["lr"] == pytest.approx(1e-9 * (1 + math.cos(math.pi * 6 / 7)) / 2, rel=1e-6, abs=0)


def test_the_table_the_log_and_the_monitor_have_one_train_loss(tmp_path):
    """The mean since the last log, which is a part of an epoch here."""
    options = "--limit_train_batches 8 --log_per_epoch 4 --monitor train/loss --monitor_mode min"
    printed = call(f"train.py {SMALL} {options}", tmp_path).stdout
    logged = {row["step"]: row["train/loss"] for row in rows(tmp_path)}
    assert list(logged) == list(range(2, 41, 2))
    names, *lines = (line.split() for line in printed[printed.index("   epoch") :].splitlines())
    table = [dict(zip(names, map(float, line), strict=True)) for line in lines if len(line) == len(names)]
    shown = {row["step"]: row["train/loss"] for row in table}
    assert shown == {step: pytest.approx(logged[step], rel=1e-4) for step in (8, 16, 24, 32, 40)}
    best_step = min(shown, key=logged.get)
    assert (last_summary(tmp_path)["best"], last_summary(tmp_path)["best_step"]) == (logged[best_step], best_step)


def test_without_validation_and_checkpoints_only_the_last_one_is_left_and_is_evaluated_by_the_next_command(tmp_path):
    options = "--limit_val_batches 0 --monitor train/loss --monitor_mode min --checkpoint_frequency 0"
    printed = call(f"train.py {SMALL} {options}", tmp_path).stdout
    assert checkpoint_names(tmp_path) == ["step-00000020"]
    assert steps_with(tmp_path, "train/loss") == [4, 8, 12, 16, 20] and steps_with(tmp_path, "val/loss") == []
    assert "val" not in printed.split("epoch  ")[1]
    call(f"{printed.partition('next: python ')[2].strip()} --accelerator cpu", tmp_path)


def test_early_stopping_ends_the_run_as_a_finished_one(tmp_path):
    """With this learning rate nothing gets better after the first epoch."""
    options = "--base_lr 1e-12 --early_stopping_patience 1 --checkpoint_frequency 100"
    printed = call(f"train.py {ALL_STEPS} {options}", tmp_path).stdout
    words = r"finished after 8 of 20 steps, best .+\nearly stopping: 1 validation\(s\) without a better value\n"
    assert re.search(words, printed)
    assert checkpoint_names(tmp_path) == ["best", "step-00000008"]
    assert checkpoint(tmp_path, "best")["step"] == 4
    torch.testing.assert_close(weights(tmp_path), dict(checkpoint(tmp_path, "step-00000008")["model"]), atol=0, rtol=0)


# ---- debugging, faults


@pytest.mark.parametrize(
    "steps, half, end, epochs",
    [("", "2 of 2", "4 of 4", "1 2"), ("2", "1 of 1", "2 of 2", "1 2"), ("3", "2 of 2", "3 of 3", "1 1.5")],
)
def test_a_fast_run_is_a_run_of_two_epochs_and_its_resume_and_leaves_nothing(steps, half, end, epochs, tmp_path):
    """Also where the warm-up is longer."""
    printed = call(f"train.py --accelerator cpu --fast_run {steps} --warmup_epochs 3", tmp_path).stdout
    assert re.findall(r"^finished after (\d of \d) steps", printed, re.MULTILINE) == [half, end]
    assert re.findall(r"^ +([\d.]+) +\d+ ", printed, re.MULTILINE) == epochs.split()
    assert printed.endswith("\n--fast_run: a run and its resume went well, and leave nothing behind\n")
    assert not re.search("run directory|resumed from|next:|fast_run-", printed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked, batches", [(0, 1), (3, 3)])
def test_the_first_validation_has_as_many_batches_as_asked_for_but_one_at_least(asked: int, batches: int, tmp_path):
    program = insert_after(tmp_path / "program", "batch", 'print("a batch")')
    options = f"{SMALL} --effective_batch_size 16 --epochs 1 --limit_val_batches 1.0 --num_sanity_val_steps {asked}"
    printed = call(f"{program}/train.py {options}", tmp_path).stdout
    assert printed.partition("1 x cpu")[0].count("a batch") == batches


@pytest.mark.parametrize("devices, save, log", [("", 1, 20), (ON_2, 3, 1)], ids=["a save sees it", "a log sees it"])
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_finite_checkpoints(devices, save, log, tmp_path):
    options = f"--checkpoint_interval {save} --log_interval {log} --val_interval 20 {devices}"
    lines = execute(f"train.py {DIVERGE} {options}", tmp_path, code=1).stderr.splitlines()  # of each rank
    words = "train.py: error: (rank [01]: )?the loss is (nan|inf) in the steps up to [45];"
    assert all(re.match(words, line) for line in lines), lines
    (line,) = [line for line in lines if "rank 1: " not in line]
    assert line.endswith(how_to_go_on(tmp_path))
    if TOOLS.exists():
        replay = f"python tools/replay.py --out_dir {run_dir(tmp_path).name} --step "
        assert f"; look into the first such step with: {replay}" in line
    assert not (run_dir(tmp_path) / "model.pt").exists()
    assert "step-00000003" in checkpoint_names(tmp_path)
    for name in checkpoint_names(tmp_path):
        assert all(tensor.isfinite().all() for tensor in checkpoint(tmp_path, name)["model"].values())


def test_a_loss_that_is_not_finite_names_no_script_that_is_not_there_and_no_rehearsal(tmp_path):
    program = copy_programs(tmp_path / "program")
    for options in ("", "--fast_run 20"):
        error = call(f"{program}/train.py {DIVERGE} {options}", tmp_path, code=1).stderr
        assert "find the first such step by --log_interval 1" in error and "replay.py" not in error
        (program / "tools").mkdir(exist_ok=True)
        (program / "tools" / "replay.py").touch()


STEP = """
import gc

assert model.training and not model.module.layers[0][1].training
assert gc.isenabled()  # only the imports go without
assert torch.tensor([1e-30]) * 1e-10 == 0  # denormal numbers, which Adam keeps of units that have died, are slow
"""


@pytest.mark.parametrize("compile", ["", "--compile", "--compile reduce-overhead"])
def test_parts_of_the_model_in_evaluation_mode_are_named_in_the_header_and_stay_in_it(compile, monkeypatch, tmp_path):
    """As what is frozen: its batch norm keeps its figures. A validation leaves each module in its mode. The names are
    those of the plain model. The compiler leaves the model as it is here; the mode asks it for CUDA graphs."""
    asked = []
    compiler = "torch._inductor.compile_fx.compile_fx"
    monkeypatch.setattr(compiler, lambda model, inputs, **options: asked.append(options) or model)
    torch.compiler.reset()
    part = "nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)).eval(),\n"
    program = replace(tmp_path / "program", "first layer", part)
    insert_after(program, "step begins", STEP)
    printed = call(f"{program}/train.py {SMALL} --max_steps 4 --val_interval 1 {compile}", tmp_path).stdout
    assert re.findall(".* mode.*", printed) == ["in evaluation mode: layers.0, layers.0.0, layers.0.1"]
    saved = weights(tmp_path)
    assert saved["layers.0.1.num_batches_tracked"] == 0 and saved["layers.0.1.running_var"].eq(1).all()
    assert checkpoint(tmp_path, "best")["model"].keys() == saved.keys()
    assert bool(asked) == bool(compile)
    graphs = [(options.get("config_patches") or {}).get("triton.cudagraphs", False) for options in asked]
    assert {*graphs} <= {"overhead" in compile}
