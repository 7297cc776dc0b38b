"""What a run computes, prints and writes. Most runs are listed in RUNS; each test looks at some of them."""

import json
import math
import re
import sysconfig
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from edits import copy_programs, insert_after, insert_before, replace
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    STEPS,
    TOOLS,
    TORCHRUN,
    call,
    checkpoint,
    killed_and_resumed,
    on_one_and_two,
    rows,
    run,
    run_dir,
    weights,
)
from mistakes import assert_one_line

BIN = sysconfig.get_path("scripts")
ALL_STEPS = f"{SMALL} --warmup_epochs 1 --log_interval 1"
NOTHING_RANDOM = f"{ALL_STEPS} --dropout 0 --limit_val_batches 1.0 --monitor val/loss --monitor_mode min"
MICRO_32 = f"{ALL_STEPS} --micro_batch_size 32 --lr_schedule constant"
# The weights grow 5,000-fold with each step; a checkpoint after each.
DIVERGE = f"{SMALL} --lr_schedule constant --weight_decay 1.25e6 --warmup_epochs 0 --checkpoint_interval 1"

# Fabric's dp with the CPU as its one device; train.py --strategy dp refuses a CPU.
DP = """
from lightning.fabric.strategies import DataParallelStrategy

strategy = DataParallelStrategy(parallel_devices=[torch.device("cpu")])
fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
"""

# UNSHIFTED is a copy that does not augment: other micro-batches would draw other shifts.
RUNS = {
    "compile": f"train.py {SMALL} --epochs 1 --limit_train_batches 2 --num_sanity_val_steps 0 --compile",
    "plain": f"train.py {ALL_STEPS} --checkpoint_frequency 2 --num_checkpoint_keep 2 --monitor train/grad_norm "
    "--monitor_mode max",
    "64x1": f"UNSHIFTED/train.py {NOTHING_RANDOM} --checkpoint_frequency 0.5 --num_checkpoint_keep 0",
    "16x4": f"UNSHIFTED/train.py {NOTHING_RANDOM} --micro_batch_size 16",
    "1 process": f"train.py {MICRO_32}",
    "2 processes": f"train.py {MICRO_32} {ON_2}",
    "dp": f"DP/train.py {MICRO_32}",
    "torchrun": f"{TORCHRUN} {REPO}/train.py {MICRO_32} --strategy ddp",
    "fabric run": f"{BIN}/fabric run --accelerator cpu --devices 2 --strategy ddp {REPO}/train.py {MICRO_32}",
    "bf16-mixed": f"train.py {SMALL} --epochs 2 --precision bf16-mixed",
    "bf16-true": f"train.py {SMALL} --epochs 2 --precision bf16-true",
    "64-true": f"train.py {SMALL} --epochs 2 --precision 64-true",
    "early": f"train.py {ALL_STEPS} --base_lr 1e-12 --early_stopping_patience 1 --checkpoint_frequency 100",
    "bare": f"train.py {SMALL} --limit_val_batches 0 --monitor train/loss --monitor_mode min --checkpoint_frequency 0",
    "steps": f"train.py {SMALL} --warmup_epochs 1 --base_lr 1e-9 --max_steps 11 --log_interval 5 --val_interval 3 "
    "--checkpoint_frequency 0 --checkpoint_interval 4 --num_checkpoint_keep 0",
    "train loss": f"train.py {SMALL} --limit_train_batches 8 --log_per_epoch 4 --monitor train/loss --monitor_mode min",
    "diverges": f"train.py {DIVERGE}",
    "diverges on 2": f"train.py {DIVERGE} {ON_2}",
    "diverges unseen": f"train.py {DIVERGE} --log_interval 20 --val_interval 20",
}
# Those of one process are made in that of pytest, but for these: "plain" is as a user makes it.
IN_PROCESSES = ("plain", "compile", "dp", "2 processes", "torchrun", "fabric run", "diverges on 2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function from a name in RUNS to the finished run: its folder `cwd`, and what it has printed."""
    unshifted = replace(tmp_path_factory.mktemp("unshifted"), "shift", "shift=0")
    dp = insert_after(tmp_path_factory.mktemp("dp"), "Fabric", DP)

    @cache
    def one(name: str) -> SimpleNamespace:
        cwd, code = tmp_path_factory.mktemp("run"), 1 if name.startswith("diverges") else 0
        command = RUNS[name].replace("UNSHIFTED/", f"{unshifted}/").replace("DP/", f"{dp}/")
        # Both are read when torch is imported, or Fabric makes its DataParallel.
        more = {"compile": {"TORCHINDUCTOR_COMPILE_THREADS": "1"}, "dp": {"CUDA_VISIBLE_DEVICES": ""}}.get(name, {})
        done = run(command, cwd, code, **more) if name in IN_PROCESSES else call(command, cwd, code)
        return SimpleNamespace(out=done.stdout, err=done.stderr, cwd=cwd)

    return one


def checkpoint_names(cwd: Path) -> list[str]:
    return sorted(path.stem for path in (run_dir(cwd) / "checkpoints").iterdir())


def steps_with(cwd: Path, name: str) -> list[int]:
    return [int(row["step"]) for row in rows(cwd) if name in row]


# ---- batches and devices

EQUATIONS = {"16x4": "1 device(s) x 16 micro_batch_size x 4", "2 processes": "2 device(s) x 32 micro_batch_size x 1"}


def assert_same_training(runs, name: str, other: str) -> None:
    """Weights and logged losses agree up to the rounding of a sum."""
    ours, theirs = runs(name).cwd, runs(other).cwd
    torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-5, rtol=0)
    assert len(rows(ours)) == len(rows(theirs)) == 20
    for row, expected in zip(rows(ours), rows(theirs), strict=True):
        for value in ("step", "train/loss", "train/grad_norm", "lr", "val/loss", "val/accuracy"):
            assert row.get(value) == pytest.approx(expected.get(value), abs=1e-5), value
    assert runs(name).out.count(f"effective_batch_size 64 = {EQUATIONS.get(name, '')}") == 1


def test_accumulating_micro_batches_trains_like_one_batch_of_64(runs):
    assert_same_training(runs, "16x4", "64x1")


def test_2_processes_train_like_1_with_dropout_and_augmentation(runs):
    assert_same_training(runs, "2 processes", "1 process")


@pytest.mark.night
def test_dp_trains_like_1_process(runs):
    """As far as it can be seen without GPUs. Its all_reduce takes the mean over the elements of a tensor."""
    assert_same_training(runs, "dp", "1 process")
    assert "no_backward_sync" not in runs("dp").err  # Fabric warns where it cannot be left out


@pytest.mark.night
@pytest.mark.parametrize("launcher", ["torchrun", "fabric run"])
def test_a_launcher_from_outside_gives_one_run_with_the_same_weights(runs, launcher):
    assert len(list(runs(launcher).cwd.iterdir())) == 1
    torch.testing.assert_close(weights(runs(launcher).cwd), weights(runs("2 processes").cwd), atol=0, rtol=0)


# ---- random numbers and files of an edit

# What a step draws for all ranks, such as a layer and a weight for manifold mixup. Each rank writes it down.
OF_STEP = """
with open(f"drawn_{fabric.global_rank}", "a") as file:
    print(step, torch.rand(()).item(), numpy.random.rand(), random.random(), file=file)
"""
OF_LOSS = "(torch.rand(()) + numpy.random.rand() + random.random())"
# What rank 0 writes into the run: its weights after every eighth step.
SNAPSHOT = """
if step % 8 == 0 and fabric.is_global_zero:
    torch.save([step, model.state_dict()], run.directory.path / f"snapshot-{step:03}.pt")
"""


def drawn(cwd: Path, rank: int) -> dict[str, tuple]:
    """The numbers of each step. A step that was done again, after a resume, has drawn the same."""
    lines = {tuple(line.split()) for line in (cwd / f"drawn_{rank}").read_text().splitlines()}
    found = {step: numbers for step, *numbers in lines}
    assert len(found) == len(lines) == STEPS
    return found


def test_what_is_drawn_at_the_top_of_a_step_or_drawn_in_compute_loss_is_the_same_on_all_ranks_and_after_a_resume(
    tmp_path,
):
    """With workers and without: they draw in processes of their own, which seed no generator of the loop. Files that
    rank 0 writes into the run are the same, too: those of steps after the checkpoint are written again."""
    program = insert_before(tmp_path / "program", "functions", "import random\n\nimport numpy\n\n\n")
    insert_before(program, "learning rate", OF_STEP)
    insert_after(program, "step is done", SNAPSHOT)
    replace(program, "values", f'{{"loss": F.cross_entropy(logits, targets) * {OF_LOSS}, "drawn": {OF_LOSS}}}')
    whole, killed = killed_and_resumed(f"{program}/{LONG} {ON_2} --num_workers 1", tmp_path)
    (alone := tmp_path / "alone").mkdir()
    call(f"{program}/{LONG}", alone)
    expected = drawn(whole, 0)
    assert drawn(whole, 1) == drawn(killed, 0) == drawn(killed, 1) == drawn(alone, 0) == expected
    for column in zip(*expected.values(), strict=True):
        assert len(set(column)) == STEPS, "another in each step"
    ours, theirs = ([torch.load(path) for path in sorted(run_dir(cwd).glob("*-*.pt"))] for cwd in (whole, killed))
    assert [step for step, _ in theirs] == [*range(8, STEPS + 1, 8)]
    torch.testing.assert_close(theirs, ours, atol=0, rtol=0)
    of_loss = {name: [row[f"{name}/drawn"] for row in rows(whole)] for name in ("train", "val")}
    assert [row["train/drawn"] for row in rows(alone)] == pytest.approx(of_loss["train"], rel=1e-6)
    assert len({*of_loss["train"]}) == 10 and len({*of_loss["val"]}) == 1, "a validation draws the same each time"


# ---- precisions, the compiler, the CPU


@pytest.mark.parametrize(
    "precision, dtype",
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_it_trains_in_other_precisions(runs, precision, dtype):
    final = weights(runs(precision).cwd)
    assert all(tensor.dtype == dtype and tensor.isfinite().all() for tensor in final.values())
    losses = [row[name] for row in rows(runs(precision).cwd) for name in ("train/loss", "val/loss")]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    before, after = (checkpoint(runs(precision).cwd, f"step-0000000{step}")["model"] for step in (4, 8))
    assert any(not torch.equal(before[name], after[name]) for name in final)


@pytest.mark.night
def test_a_compiled_model_trains_and_its_weights_have_the_names_of_the_plain_model(runs):
    plain = {name: tensor.shape for name, tensor in weights(runs("plain").cwd).items()}
    for compiled in (weights(runs("compile").cwd), checkpoint(runs("compile").cwd, "best")["model"]):
        assert {name: tensor.shape for name, tensor in compiled.items()} == plain
    assert steps_with(runs("compile").cwd, "train/loss") == [2]


# ---- what is measured


# A clock that counts how often it is asked, and jumps where something begins that is not part of each step.
CLOCK = """
import itertools
import types

from runtime import meters

clock = itertools.count()
meters.time = types.SimpleNamespace(perf_counter=clock.__next__)


def late(function):
    def called(*args, **options):
        next(itertools.islice(clock, 10**5, None))
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
    assert rates[0] == rates[1] and len(rates[0]) == 6 and min(rates[0]) > 1


def test_the_whole_gradient_is_clipped_once_and_its_norm_is_logged_as_it_was_before(tmp_path):
    """The row of several steps has the mean of their norms if each is clipped, and else the norm of its own step: only
    who clips needs it in each. A step that is not logged is clipped as well."""
    norms = {}
    options = f"{SMALL} --micro_batch_size 16 --max_steps 8 --val_interval 8 --checkpoint_interval 1"
    for case in ((0.01, 1), (0.01, 8), (0, 1), (0, 8)):
        limit, interval = case
        (cwd := tmp_path / str(case)).mkdir()
        call(f"train.py {options} --num_checkpoint_keep 0 --max_grad_norm {limit} --log_interval {interval}", cwd)
        norms[case] = [row["train/grad_norm"] for row in rows(cwd)]
    clipped, free = norms[0.01, 1], norms[0, 1]
    assert clipped[0] == free[0] > 0.05 and len({*clipped}) == len({*free}) == 8
    assert norms[0.01, 8] == [pytest.approx(sum(clipped) / 8, rel=1e-6)] and norms[0, 8] == [free[-1]]
    torch.testing.assert_close(weights(tmp_path / "(0.01, 8)"), weights(tmp_path / "(0.01, 1)"), atol=0, rtol=0)
    # AdamW's first average of the gradients is 0.1 of the gradient that it was given.
    state = checkpoint(tmp_path / "(0.01, 8)", "step-00000001")["optimizer"]["state"]
    averages = torch.cat([each["exp_avg"].flatten() for each in state.values()])
    assert averages.norm() == pytest.approx(0.1 * 0.01, rel=1e-4)


# ---- when to log, to validate and to save: three questions


def test_intervals_in_steps(runs):
    """The last step always logs, validates and saves; the schedule ends there. With this learning rate nothing gets
    better after the first validation, whose step does not save: best.ckpt is of it."""
    done = runs("steps")
    assert "11 steps = 2.75 epochs x 4 steps" in done.out
    assert steps_with(done.cwd, "train/loss") == [3, 5, 6, 9, 10, 11]  # a validation is logged, too
    assert steps_with(done.cwd, "val/loss") == [3, 6, 9, 11]
    assert checkpoint_names(done.cwd) == ["best", "step-00000004", "step-00000008", "step-00000011"]
    assert checkpoint(done.cwd, "best")["step"] == 3
    last = rows(done.cwd)[-1]
    assert last["epoch"] == 2.75
    assert last["lr"] == pytest.approx(1e-9 * (1 + math.cos(math.pi * 6 / 7)) / 2, rel=1e-6, abs=0)


def test_the_table_the_log_and_the_monitor_have_one_train_loss(runs):
    """The mean since the last log, which is a part of an epoch here."""
    done = runs("train loss")
    logged = {row["step"]: row["train/loss"] for row in rows(done.cwd)}
    assert list(logged) == list(range(2, 41, 2))
    names, *lines = (line.split() for line in done.out[done.out.index("   epoch") :].splitlines())
    table = [dict(zip(names, map(float, line), strict=True)) for line in lines if len(line) == len(names)]
    shown = {row["step"]: row["train/loss"] for row in table}
    assert shown == {step: pytest.approx(logged[step], rel=1e-4) for step in (8, 16, 24, 32, 40)}
    summary = json.loads((run_dir(done.cwd) / "summary.json").read_text())
    best_step = min(shown, key=logged.get)
    assert (summary["best"], summary["best_step"]) == (logged[best_step], best_step)


@pytest.mark.parametrize(
    "name, steps, monitor, best",
    [
        ("64x1", range(2, 21, 2), "val/loss", min),  # twice an epoch, all kept
        ("plain", [16, 20], "train/grad_norm", max),  # every second epoch and the last: 8, 16, 20; two are kept
        ("1 process", [12, 16, 20], "val/accuracy", max),  # the default: every epoch, three are kept
    ],
)
def test_checkpoints_are_kept_and_the_best_one_is_the_first_of_the_best_value(runs, name, steps, monitor, best):
    assert checkpoint_names(runs(name).cwd) == ["best", *(f"step-{step:08d}" for step in steps)]
    values = {row["step"]: row[monitor] for row in rows(runs(name).cwd) if "val/loss" in row}
    assert name == "1 process" or len({*values.values()}) > 1
    assert checkpoint(runs(name).cwd, "best")["step"] == best(values, key=values.get)  # the first of equals


def test_without_validation_and_checkpoints_only_the_last_one_is_left(runs):
    done = runs("bare")
    assert checkpoint_names(done.cwd) == ["step-00000020"]
    assert steps_with(done.cwd, "train/loss") == [4, 8, 12, 16, 20] and steps_with(done.cwd, "val/loss") == []
    assert "val" not in done.out.split("epoch  ")[1]


def test_early_stopping_ends_the_run_as_a_finished_one(runs):
    done = runs("early")  # with this learning rate nothing gets better after the first epoch
    words = r"finished after 8 of 20 steps, best .+\nearly stopping: 1 validation\(s\) without a better value\n"
    assert re.search(words, done.out)
    assert steps_with(done.cwd, "train/loss") == [*range(1, 9)]
    assert checkpoint_names(done.cwd) == ["best", "step-00000008"]
    assert checkpoint(done.cwd, "best")["step"] == 4
    torch.testing.assert_close(weights(done.cwd), dict(checkpoint(done.cwd, "step-00000008")["model"]), atol=0, rtol=0)


# ---- debugging, faults, output


@pytest.mark.parametrize("steps, epochs", [("", ["1", "2"]), ("2", ["1", "2"]), ("3", ["1", "1.5"])])
def test_a_fast_run_is_a_run_of_two_epochs_and_its_resume_and_leaves_nothing(steps: str, epochs: list, tmp_path):
    """Also where the warm-up is longer."""
    printed = call(f"train.py --accelerator cpu --fast_run {steps} --warmup_epochs 3", tmp_path).stdout
    half, end = {"": ("2 of 2", "4 of 4"), "2": ("1 of 1", "2 of 2"), "3": ("2 of 2", "3 of 3")}[steps]
    assert re.findall(r"^finished after (\d of \d) steps", printed, re.MULTILINE) == [half, end]
    assert re.findall(r"^ +([\d.]+) +\d+ ", printed, re.MULTILINE) == epochs
    assert printed.endswith("\n--fast_run: a run and its resume went well, and leave nothing behind\n")
    assert not re.search("run directory|resumed from|next:|fast_run-", printed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked, batches", [(0, 1), (3, 3)])
def test_the_first_validation_has_as_many_batches_as_asked_for_but_one_at_least(asked: int, batches: int, tmp_path):
    program = insert_after(tmp_path / "program", "batch", 'print("a batch")')
    options = f"{SMALL} --effective_batch_size 16 --epochs 1 --limit_val_batches 1.0 --num_sanity_val_steps {asked}"
    printed = call(f"{program}/train.py {options}", tmp_path).stdout
    assert printed.partition("1 x cpu")[0].count("a batch") == batches


@pytest.mark.parametrize(
    "name, words",
    [("diverges", "the loss .*(nan|inf)"), ("diverges on 2", "the loss .*(nan|inf)"),
     ("diverges unseen", "the loss is (nan|inf) in the steps up to [45];")],
)  # fmt: skip
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_finite_checkpoints(runs, name, words):
    done = runs(name)
    lines = done.err.splitlines()  # of each rank
    assert all(re.match(f"train.py: error: (rank [01]: )?{words}", line) for line in lines), done.err
    (line,) = [line for line in lines if "rank 1: " not in line]
    name = run_dir(done.cwd).name
    assert line.endswith(f"; the checkpoints are whole, continue with: python train.py --resume {name}")
    if TOOLS.exists():
        assert f"; look into the first such step with: python tools/replay.py --out_dir {name} --step " in line
    assert not (run_dir(done.cwd) / "model.pt").exists()
    assert "step-00000003" in checkpoint_names(done.cwd)
    for checkpoint_name in checkpoint_names(done.cwd):
        assert all(tensor.isfinite().all() for tensor in checkpoint(done.cwd, checkpoint_name)["model"].values())


def test_a_loss_that_is_not_finite_elsewhere(tmp_path):
    """In the first step of a resume. And where no script or run is there: it names none."""
    call(f"train.py {SMALL} --max_steps 3", tmp_path)
    program = insert_after(tmp_path / "program", "batch", "images = images / 0")
    assert_one_line(call(f"{program}/train.py --resume auto --max_steps 5", tmp_path, code=1), "compute_loss", "nan")
    program = copy_programs(tmp_path / "other")
    for options in ("", "--fast_run 20"):  # whose run directory is removed
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
def test_parts_of_the_model_that_are_in_evaluation_mode_are_named_in_the_header_and_stay_in_it(
    compile: str, monkeypatch, tmp_path
):
    """As what is frozen: its batch norm keeps its figures. A validation leaves each module in its mode. They have their
    names in the model, compiled or not. Of the compiler, which leaves the model as it is here, reduce-overhead asks for
    CUDA graphs."""
    asked = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda model, inputs, **options: asked.append(options) or model
    )
    torch.compiler.reset()
    part = "nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)).eval(),\n"
    program = replace(tmp_path / "program", "first layer", part)
    insert_after(program, "step begins", STEP)
    printed = call(f"{program}/train.py {SMALL} --max_steps 4 --val_interval 1 {compile}", tmp_path).stdout
    assert re.findall(".* mode.*", printed) == ["in evaluation mode: layers.0, layers.0.0, layers.0.1"]
    saved = weights(tmp_path)
    assert saved["layers.0.1.num_batches_tracked"] == 0 and saved["layers.0.1.running_var"].eq(1).all()
    has_graphs = {(options.get("config_patches") or {}).get("triton.cudagraphs", False) for options in asked}
    assert has_graphs == ({"overhead" in compile} if compile else set())


def test_output_to_a_file_has_one_line_per_epoch_and_no_progress_bar(runs):
    for done in (runs("plain"), runs("2 processes")):
        assert "\r" not in done.out + done.err and "it/s" not in done.err and "step/s" not in done.err
        epochs = re.findall(r"^ +(\d+) +(\d+)  ", done.out, re.MULTILINE)
        assert epochs == [("1", "4"), ("2", "8"), ("3", "12"), ("4", "16"), ("5", "20")]
