"""What a run computes, prints and writes. All runs of this file are listed in RUNS; each test looks at some of them."""

import gc
import json
import math
import re
import sysconfig
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

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
    assert_same_run,
    call,
    checkpoint,
    history,
    killed_and_resumed,
    on_one_and_two,
    rows,
    run,
    run_dir,
    weights,
)
from lightning.fabric import Fabric

import train
from config import TrainConfig
from data import build_datasets
from runtime import launch, meters

BIN = sysconfig.get_path("scripts")
ALL_STEPS = f"{SMALL} --warmup_epochs 1 --log_interval 1"
NOTHING_RANDOM = f"{ALL_STEPS} --dropout 0 --limit_val_batches 1.0 --monitor val/loss --monitor_mode min"
SQRT = "--lr_schedule constant --base_batch_size 16 --lr_scaling_rule sqrt"
CONSTANT = "--lr_schedule constant --base_batch_size 16 --lr_scaling_rule none"
MICRO_32 = f"{ALL_STEPS} --micro_batch_size 32 {CONSTANT}"
# The weights grow 5,000-fold with each step; a checkpoint after each.
DIVERGE = f"{SMALL} --lr_schedule constant --weight_decay 1.25e6 --warmup_epochs 0 --checkpoint_interval 1"

# UNSHIFTED is a copy that does not augment: other micro-batches would draw other shifts.
RUNS = {
    "compile": f"train.py {SMALL} --epochs 1 --limit_train_batches 2 --num_sanity_val_steps 0 --compile",
    "plain": f"train.py {ALL_STEPS} --checkpoint_frequency 2 --num_checkpoint_keep 2",
    "64x1": f"UNSHIFTED/train.py {NOTHING_RANDOM} {SQRT} --checkpoint_frequency 0.5 --num_checkpoint_keep 0",
    "32x2": f"UNSHIFTED/train.py {NOTHING_RANDOM} {SQRT} --micro_batch_size 32",
    "16x4": f"UNSHIFTED/train.py {NOTHING_RANDOM} {SQRT} --micro_batch_size 16",
    "clipped": f"UNSHIFTED/train.py {NOTHING_RANDOM} --micro_batch_size 16 --epochs 1 --limit_train_batches 1 "
    "--max_grad_norm 0.01",
    "1 process": f"train.py {MICRO_32}",
    "2 processes": f"train.py {MICRO_32} {ON_2}",
    "torchrun": f"{TORCHRUN} {REPO}/train.py {MICRO_32} --strategy ddp",
    "fabric run": f"{BIN}/fabric run --accelerator cpu --devices 2 --strategy ddp {REPO}/train.py {MICRO_32}",
    "defaults": "train.py --accelerator cpu --epochs 6",
    "bf16-mixed": f"train.py {SMALL} --epochs 2 --precision bf16-mixed",
    "bf16-true": f"train.py {SMALL} --epochs 2 --precision bf16-true",
    "64-true": f"train.py {SMALL} --epochs 2 --precision 64-true",
    "early": f"train.py {ALL_STEPS} --base_lr 1e-12 --base_batch_size 32 --early_stopping_patience 2",
    "earlier": f"train.py {ALL_STEPS} --base_lr 1e-12 --base_batch_size 32 --early_stopping_patience 1 "
    "--checkpoint_frequency 100",
    "bare": f"train.py {SMALL} --limit_val_batches 0 --monitor train/loss --monitor_mode min --checkpoint_frequency 0 "
    "--summary",
    "fast": "train.py --accelerator cpu --fast_run --summary --warmup_epochs 3",  # it has two epochs
    "linear": f"train.py {ALL_STEPS} --lr_schedule linear",
    "steps": f"train.py {SMALL} --warmup_epochs 1 --base_lr 1e-9 --max_steps 11 --log_interval 5 --val_interval 3 "
    "--checkpoint_interval 4 --num_checkpoint_keep 0",
    "fractions": f"train.py {SMALL} --epochs 2.5 --warmup_epochs 0.5 --val_frequency 0.5 --checkpoint_frequency 0.75 "
    "--num_checkpoint_keep 0 --log_interval 1",
    "train loss": f"train.py {SMALL} --limit_train_batches 8 --log_per_epoch 4 --monitor train/loss --monitor_mode min",
    "diverges": f"train.py {DIVERGE}",
    "diverges on 2": f"train.py {DIVERGE} {ON_2}",
    "diverges unseen": f"train.py {DIVERGE} --log_interval 20 --val_interval 20",
}


# Those of one process are made in that of pytest, but for these: "plain" is as a user makes it.
IN_PROCESSES = ("plain", "compile", "2 processes", "torchrun", "fabric run", "diverges on 2")


class Run(NamedTuple):
    out: str
    err: str
    cwd: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function from a name in RUNS to the finished run."""
    unshifted = replace(tmp_path_factory.mktemp("unshifted"), "shift", "shift=0")

    @cache
    def one(name: str) -> Run:
        cwd, code = tmp_path_factory.mktemp("run"), 1 if name.startswith("diverges") else 0
        command = RUNS[name].replace("UNSHIFTED", str(unshifted))
        if name in IN_PROCESSES:
            more = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if name == "compile" else {}  # read when torch is imported
            done = run(command, cwd, code, **more)
        else:
            done = call(command, cwd, code)
        return Run(done.stdout, done.stderr, cwd)

    return one


def checkpoint_names(done: Run) -> list[str]:
    return sorted(path.stem for path in (run_dir(done.cwd) / "checkpoints").iterdir())


def assert_same_training(a: Run, b: Run) -> None:
    """Weights and logged losses agree up to the rounding of a sum."""
    torch.testing.assert_close(weights(a.cwd), weights(b.cwd), atol=1e-5, rtol=0)
    assert len(rows(a.cwd)) == len(rows(b.cwd))
    for row, other in zip(rows(a.cwd), rows(b.cwd), strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "lr", "val/loss", "val/accuracy"):
            assert row.get(name) == pytest.approx(other.get(name), abs=1e-5), name


# ---- batches and devices


@pytest.mark.parametrize(
    "name, equation",
    [
        ("64x1", "64 = 1 device(s) x 64 micro_batch_size x 1 grad_accum_steps"),
        ("16x4", "64 = 1 device(s) x 16 micro_batch_size x 4 grad_accum_steps"),
        ("2 processes", "64 = 2 device(s) x 32 micro_batch_size x 1 grad_accum_steps"),
    ],
)
def test_the_batch_arithmetic_is_printed_as_an_equation(runs, name, equation):
    assert runs(name).out.count(f"effective_batch_size {equation}\n") == 1


@pytest.mark.parametrize("name", ["32x2", "16x4"])
def test_accumulating_micro_batches_trains_like_one_batch_of_64(runs, name: str):
    assert_same_training(runs("64x1"), runs(name))


def test_2_processes_train_like_1_with_dropout_and_augmentation(runs):
    assert_same_training(runs("1 process"), runs("2 processes"))


@pytest.mark.night
@pytest.mark.parametrize("launcher", ["torchrun", "fabric run"])
def test_a_launcher_from_outside_gives_one_run_with_the_same_weights(runs, launcher):
    assert len(list(runs(launcher).cwd.iterdir())) == 1
    torch.testing.assert_close(weights(runs(launcher).cwd), weights(runs("2 processes").cwd), atol=0, rtol=0)


# Fabric's dp with the CPU as its one device; train.py --strategy dp refuses a CPU.
DP = """
import sys
sys.path.insert(0, {repo!r})
import torch, train
from config import TrainConfig
from runtime import run
from runtime.launch import build_fabric
from runtime.cli import parse_train
from lightning.fabric import Fabric
from lightning.fabric.strategies import DataParallelStrategy

strategy = DataParallelStrategy(parallel_devices=[torch.device("cpu")])
fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
run.build_fabric = lambda config: build_fabric(config) and fabric
sys.exit(train.main(parse_train(TrainConfig, sys.argv[1:])))
"""


@pytest.mark.night
def test_dp_trains_like_1_process(runs, tmp_path):
    """As far as it can be seen without GPUs. Its all_reduce takes the mean over the elements of a tensor."""
    (tmp_path / "dp.py").write_text(DP.format(repo=str(REPO)))
    (tmp_path / "cwd").mkdir()
    done = run(f"{tmp_path}/dp.py {MICRO_32}", tmp_path / "cwd", CUDA_VISIBLE_DEVICES="")  # torch would look for GPUs
    assert "no_backward_sync" not in done.stderr  # Fabric warns where it cannot be left out
    assert_same_training(Run(done.stdout, done.stderr, tmp_path / "cwd"), runs("1 process"))


# ---- random numbers and files of an edit

# What a step draws for all ranks, such as a layer and a weight for manifold mixup. Each rank writes it down.
DRAWN = """
import random
import numpy
with open(f"drawn_{fabric.global_rank}", "a") as file:
    print(step, torch.rand(()).item(), numpy.random.rand(), random.random(), file=file)
"""
# What rank 0 writes into the run: its weights after every eighth step.
SNAPSHOT = """
if step % 8 == 0 and fabric.is_global_zero:
    torch.save([step, model.state_dict()], run.directory.path / f"snapshot-{step:03}.pt")
"""


@pytest.fixture(scope="module")
def of_2_ranks(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A program with both edits, and where it ran on two processes: left alone; killed and resumed."""
    path = tmp_path_factory.mktemp("of_2_ranks")
    program = insert_before(path / "program", "learning rate", DRAWN)
    insert_after(program, "step is done", SNAPSHOT)
    return program, *killed_and_resumed(f"{program}/{LONG} {ON_2}", path)


def drawn(cwd: Path, rank: int) -> dict[str, tuple]:
    """The numbers of each step. A step that was done again, after a resume, has drawn the same."""
    lines = {tuple(line.split()) for line in (cwd / f"drawn_{rank}").read_text().splitlines()}
    found = {step: numbers for step, *numbers in lines}
    assert len(found) == len(lines) == STEPS
    return found


def test_what_is_drawn_at_the_top_of_a_step_is_the_same_on_all_ranks_and_after_a_resume(of_2_ranks, tmp_path):
    program, whole, killed = of_2_ranks
    expected = drawn(whole, 0)
    for cwd, rank in ((whole, 1), (killed, 0), (killed, 1)):
        assert drawn(cwd, rank) == expected
    for column in zip(*expected.values(), strict=True):
        assert len(set(column)) == STEPS, "another in each step"
    call(f"{program}/{LONG}", tmp_path)
    assert drawn(tmp_path, 0) == expected


def test_files_that_rank_0_writes_into_the_run_are_the_same_after_a_kill(of_2_ranks):
    """Those of steps after the checkpoint are written again."""
    _, *folders = of_2_ranks
    whole, killed = ([torch.load(path) for path in sorted(run_dir(folder).glob("*-*.pt"))] for folder in folders)
    assert [step for step, _ in killed] == [*range(8, STEPS + 1, 8)]
    torch.testing.assert_close(killed, whole, atol=0, rtol=0)


def test_what_is_drawn_in_compute_loss_is_the_same_with_workers_and_after_a_resume(tmp_path):
    """In training and validation. Workers draw in processes of their own, which seed no generator of the loop."""
    program = insert_before(tmp_path / "program", "functions", "import random\n\nimport numpy\n\n\n")
    drawn = "(torch.rand(()) + numpy.random.rand() + random.random())"
    replace(program, "values", f'{{"loss": F.cross_entropy(logits, targets) * {drawn}, "drawn": {drawn}}}')
    whole, _ = killed_and_resumed(f"{program}/{LONG} --num_workers 2", tmp_path)
    call(f"{program}/{LONG}", tmp_path)
    assert_same_run(tmp_path, whole)
    assert len({row["val/drawn"] for row in history(whole)}) == 1, "a validation draws the same each time"
    assert len({row["train/drawn"] for row in history(whole)}) == 10


# ---- learning


def test_it_learns_with_the_default_options(runs):
    assert max(row["val/accuracy"] for row in rows(runs("defaults").cwd)) > 0.8


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
    assert [row["step"] for row in rows(runs("compile").cwd)] == [2]


def test_compile_has_a_mode(monkeypatch, tmp_path):
    """reduce-overhead asks inductor for CUDA graphs. Here it is asked, and leaves the model as it is."""
    asked = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda model, inputs, **options: asked.append(options) or model
    )
    torch.compiler.reset()
    for mode in ("default", "reduce-overhead"):
        train.main(TrainConfig(accelerator="cpu", root_dir=str(tmp_path), fast_run=2, compile=mode))
    patches = [options.get("config_patches") or {} for options in asked]
    assert {"triton.cudagraphs": True} in patches and patches[0] == {}


@pytest.mark.parametrize("owner, name", [(train.Run, "open"), (train, "validate"), (train.Run, "write_checkpoint")])
def test_what_is_not_part_of_each_step_is_not_in_its_time(owner, name: str, monkeypatch, tmp_path):
    """What is done once in the first step, validations and saves. By a clock on which each takes a million seconds."""
    clock, late, function = time.perf_counter, [0.0], getattr(owner, name)

    def takes_long(*args, **options):
        late[0] += 1e6
        return function(*args, **options)

    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: clock() + late[0]))
    monkeypatch.setattr(owner, name, takes_long)
    train.main(TrainConfig(accelerator="cpu", root_dir=str(tmp_path), width=1, max_steps=6, warmup_epochs=0.0,
                           log_interval=2, val_interval=2, checkpoint_interval=3, logger_name=("csv",)))  # fmt: skip
    rates = [row["samples_per_second"] for row in rows(tmp_path)]
    assert late[0] >= 1e6 and len(rates) == 3 and min(rates) > 0.01


# A clock that counts how often it is asked.
COUNTS = """
import itertools
import types

from runtime import meters

meters.time = types.SimpleNamespace(perf_counter=itertools.count().__next__)


"""


def test_the_samples_of_all_processes_count(tmp_path):
    """By a clock on which a step of one process takes as long as one of two."""
    program = insert_before(tmp_path / "program", "functions", COUNTS)
    rates = []
    for folder in on_one_and_two(f"{program}/train.py {SMALL} --epochs 1 --log_interval 1", tmp_path):
        rates.append([row["samples_per_second"] for row in rows(folder)])
    assert rates[0] == rates[1] and len(rates[0]) == 4


def test_the_means_of_many_steps_take_little_memory():
    """A sum for each name, else an epoch of a million steps would keep a million values."""
    means = meters.Means(Fabric(accelerator="cpu", devices=1))
    for number in range(1001):
        means.add({"loss": torch.tensor(float(number), requires_grad=True), "number": number}, weight=3)
    assert [total.numel() for total in means.sums.values()] == [1, 1]
    assert means.take() == {"loss": 500.0, "number": 500.0}
    assert means.sums == {}


def test_the_whole_gradient_is_clipped_once_and_logged_as_it_was_before(runs):
    (row,) = rows(runs("clipped").cwd)
    assert row["train/grad_norm"] == pytest.approx(rows(runs("64x1").cwd)[0]["train/grad_norm"], rel=1e-4)
    assert row["train/grad_norm"] > 0.1
    # AdamW's first average of the gradients is 0.1 of the gradient that it was given.
    averages = [s["exp_avg"] for s in checkpoint(runs("clipped").cwd, "step-00000001")["optimizer"]["state"].values()]
    assert torch.cat([average.flatten() for average in averages]).norm() == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_a_step_that_is_not_logged_is_clipped_as_well(tmp_path):
    for interval in (1, 8):
        call(f"train.py {SMALL} --max_steps 8 --max_grad_norm 0.01 --val_interval 8 --log_interval {interval} "
             f"--out_dir every_{interval}", tmp_path)  # fmt: skip
    torch.testing.assert_close(weights(tmp_path, "every_8"), weights(tmp_path, "every_1"), atol=0, rtol=0)


@pytest.mark.parametrize("options", ["--max_grad_norm 0.01", ""])
def test_the_norm_in_a_row_is_a_mean_if_each_step_is_clipped_and_else_that_of_its_step(options: str, tmp_path):
    """Only who clips needs it in each step."""
    norms = []
    for interval in (1, 8):
        (tmp_path / str(interval)).mkdir()
        call(f"train.py {SMALL} --max_steps 8 --val_interval 8 --log_interval {interval} {options}",
             tmp_path / str(interval))  # fmt: skip
        norms.append([row["train/grad_norm"] for row in rows(tmp_path / str(interval))])
    assert len(norms[0]) == 8 and len({*norms[0]}) == 8
    assert norms[1] == [pytest.approx(sum(norms[0]) / 8 if options else norms[0][-1], rel=1e-6)]


# ---- learning rate: 5 epochs of 4 steps, base_lr 4e-3


def warmed_up(step: int, peak: float, schedule: str) -> float:
    """The learning rate of a step, counted from 1, after one epoch of warm-up."""
    if step <= 4:
        return peak * (step / 5)
    steps_since = step - 5
    factors = {
        "cosine": (1 + math.cos(math.pi * steps_since / 16)) / 2,
        "linear": 1 - steps_since / 16,
        "constant": 1.0,
    }
    return peak * factors[schedule]


@pytest.mark.parametrize(
    "name, rule, peak, schedule",
    [
        ("plain", "linear", 4e-3, "cosine"),
        ("linear", "linear", 4e-3, "linear"),
        ("64x1", "sqrt", 4e-3 * math.sqrt(64 / 16), "constant"),
        ("1 process", "none", 4e-3, "constant"),
        ("early", "linear", 1e-12 * 64 / 32, "cosine"),
    ],
)
def test_the_learning_rate_scales_with_the_batch_size_warms_up_and_follows_its_schedule(
    runs, name, rule, peak, schedule
):
    (line,) = [line for line in runs(name).out.splitlines() if line.startswith("lr ")]
    assert line.split()[1] == f"{peak:g}" and rule in line
    rates = [row["lr"] for row in rows(runs(name).cwd)]
    assert rates == pytest.approx([warmed_up(step, peak, schedule) for step in range(1, len(rates) + 1)], abs=0)
    assert len(rates) == (12 if name == "early" else 20)


def test_denormal_numbers_are_zero_on_a_cpu():
    """Adam keeps them for units that have died, and a CPU is several times slower with them."""

    def denormal() -> float:
        return (torch.tensor([1e-30]) * 1e-10).item()

    assert denormal() > 0
    try:
        launch.build_fabric(TrainConfig(accelerator="cpu"))
        assert denormal() == 0
    finally:
        torch.set_flush_denormal(False)


def test_garbage_is_collected_while_the_program_runs():
    """Only the imports went without. Otherwise what refers to itself would fill the memory."""
    gc.disable()
    try:
        with pytest.raises(SystemExit) as ended:
            launch.run_and_exit(lambda config: int(gc.isenabled()), TrainConfig())
    finally:
        gc.enable()
        gc.unfreeze()
    assert ended.value.code == 1


# ---- when to log, to validate and to save: three questions


def steps_with(done: Run, name: str) -> list[int]:
    return [int(row["step"]) for row in rows(done.cwd) if name in row]


def table(done: Run) -> list[dict]:
    """The rows of the table on stdout, one per validation."""
    lines = done.out[done.out.index("   epoch") :].splitlines()
    names = lines[0].split()
    return [dict(zip(names, map(float, line.split()), strict=True)) for line in lines[1:] if line.startswith("   ")]


def test_intervals_in_steps(runs):
    """The last step always logs, validates and saves; the schedule ends there."""
    done = runs("steps")
    assert "11 steps = 2.75 epochs x 4 steps" in done.out
    assert steps_with(done, "train/loss") == [3, 5, 6, 9, 10, 11]  # a validation is logged, too
    assert steps_with(done, "val/loss") == [3, 6, 9, 11]
    assert set(checkpoint_names(done)) - {"best"} == {"step-00000004", "step-00000008", "step-00000011"}
    assert rows(done.cwd)[-1]["lr"] == pytest.approx(1e-9 * (1 + math.cos(math.pi * 6 / 7)) / 2, rel=1e-6, abs=0)


def test_fractions_of_an_epoch(runs):
    done = runs("fractions")
    assert "10 steps = 2.5 epochs x 4 steps" in done.out
    assert steps_with(done, "val/loss") == [2, 4, 6, 8, 10]
    assert set(checkpoint_names(done)) - {"best"} == {f"step-{step:08d}" for step in (3, 6, 9, 10)}
    assert [row["epoch"] for row in rows(done.cwd)] == [step / 4 for step in range(1, 11)]
    assert (
        rows(done.cwd)[0]["lr"] < rows(done.cwd)[1]["lr"] < rows(done.cwd)[2]["lr"] == pytest.approx(4e-3)
    )  # half an epoch


def test_the_best_checkpoint_need_not_be_of_a_step_that_saves(runs):
    """With this learning rate nothing gets better after the first validation."""
    assert checkpoint(runs("steps").cwd, "best")["step"] == 3


def test_the_table_the_log_and_the_monitor_have_one_train_loss(runs):
    """The mean since the last log, which is a part of an epoch here."""
    done = runs("train loss")
    logged = {row["step"]: row["train/loss"] for row in rows(done.cwd)}
    assert list(logged) == list(range(2, 41, 2))
    shown = {row["step"]: row["train/loss"] for row in table(done)}
    assert shown == {step: pytest.approx(logged[step], rel=1e-4) for step in (8, 16, 24, 32, 40)}
    summary = json.loads((run_dir(done.cwd) / "summary.json").read_text())
    best_step = min(shown, key=logged.get)
    assert (summary["best"], summary["best_step"]) == (logged[best_step], best_step)


# ---- checkpoints


@pytest.mark.parametrize("name, monitor, best", [("defaults", "val/accuracy", max), ("64x1", "val/loss", min)])
def test_best_ckpt_is_the_first_step_of_the_best_value(runs, name, monitor, best):
    values = {row["step"]: row[monitor] for row in rows(runs(name).cwd) if monitor in row}
    assert len({*values.values()}) > 1
    assert checkpoint(runs(name).cwd, "best")["step"] == best(values, key=values.get)  # the first of equals


@pytest.mark.parametrize(
    "name, steps",
    [
        ("64x1", range(2, 21, 2)),  # twice an epoch, all kept
        ("plain", [16, 20]),  # every second epoch and the last: 8, 16, 20, of which two are kept
        ("1 process", [12, 16, 20]),  # the default: every epoch, three are kept
    ],
)
def test_checkpoint_frequency_and_num_checkpoint_keep(runs, name, steps):
    assert checkpoint_names(runs(name)) == ["best", *(f"step-{step:08d}" for step in steps)]


def test_with_intervals_alone_the_best_one_is_kept_as_well(tmp_path):
    call(f"train.py {SMALL} --checkpoint_frequency 0 --checkpoint_interval 8", tmp_path)
    assert checkpoint_names(Run("", "", tmp_path)) == ["best", "step-00000008", "step-00000016", "step-00000020"]


def test_without_validation_and_checkpoints_only_the_last_one_is_left(runs):
    assert checkpoint_names(runs("bare")) == ["step-00000020"]
    assert [row["step"] for row in rows(runs("bare").cwd)] == [4, 8, 12, 16, 20]
    assert not any(name.startswith("val/") for row in rows(runs("bare").cwd) for name in row)
    assert "val" not in runs("bare").out.split("epoch  ")[1]


@pytest.mark.parametrize("name, end", [("early", 12), ("earlier", 8)])
def test_early_stopping_ends_the_run_as_a_finished_one(runs, name: str, end: int):
    done = runs(name)  # with this learning rate nothing gets better after the first epoch
    assert re.search(
        rf"finished after {end} of 20 steps, best .+\nearly stopping: [12] validation\(s\) without a better value\n",
        done.out,
    )
    assert rows(done.cwd)[-1]["step"] == end
    assert checkpoint(done.cwd, "best")["step"] == 4
    last = checkpoint(done.cwd, f"step-{end:08d}")
    assert last["step"] == end
    torch.testing.assert_close(weights(done.cwd), dict(last["model"]), atol=0, rtol=0)


def test_patience_counts_the_validations_since_the_best_one(tmp_path):
    """A new best one ends the count. The first figure is that of the validation before the training."""
    program = insert_before(tmp_path / "program", "functions", "FIGURES = iter([0, 1, 0, 0, 2, 0, 0, 0, 9])\n\n\n")
    loss = '{"loss": F.cross_entropy(logits, targets), "figure": 0 if model.training else next(FIGURES)}'
    replace(program, "values", loss)
    options = f"{SMALL} --epochs 8 --limit_val_batches 1 --monitor val/figure --monitor_mode max"
    options += " --early_stopping_patience 3"
    printed = call(f"{program}/train.py {options}", tmp_path).stdout
    assert "finished after 28 of 32 steps, best val/figure 2 at step 16" in printed


def test_small_gains_count_for_early_stopping_once_they_add_up_to_min_delta(tmp_path):
    """The first figure is that of the validation before the training. The best checkpoint is the best by any gain."""
    figures = "[0, 1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0]"  # lower by more than 0.35: 0.6, but not 0.3
    program = insert_before(tmp_path / "program", "functions", f"FIGURES = iter({figures})\n\n\n")
    loss = '{"loss": F.cross_entropy(logits, targets), "figure": 0 if model.training else next(FIGURES)}'
    replace(program, "values", loss)
    options = f"{SMALL} --epochs 8 --limit_val_batches 1 --monitor val/figure --monitor_mode min"
    options += " --early_stopping_patience 3 --early_stopping_min_delta 0.35"
    printed = call(f"{program}/train.py {options}", tmp_path).stdout
    assert "finished after 28 of 32 steps, best val/figure 0.3 at step 28\n" in printed
    assert "early stopping: 3 validation(s) without a better value\n" in printed


# ---- debugging


def test_a_fast_run_is_a_run_and_its_resume_and_leaves_nothing(runs):
    done = runs("fast")
    assert re.findall(r"^(stopped|finished) after (\d of \d) steps", done.out, re.MULTILINE) == [
        ("finished", "2 of 2"),
        ("finished", "4 of 4"),
    ]
    assert done.out.endswith("\n--fast_run: a run and its resume went well, and leave nothing behind\n")
    assert not re.search("run directory|resumed from|next:|fast_run-", done.out)
    assert list(done.cwd.iterdir()) == []


@pytest.mark.parametrize("options, epochs", [("", ["1", "2"]), ("2", ["1", "2"]), ("3", ["1", "1.5"])])
def test_a_fast_run_reaches_a_second_epoch(tmp_path, options: str, epochs: list[str]):
    printed = call(f"train.py --accelerator cpu --fast_run {options}", tmp_path).stdout
    assert re.findall(r"^ +([\d.]+) +\d+ ", printed, re.MULTILINE) == epochs
    assert f"finished after {options or 4} of {options or 4} steps" in printed


@pytest.mark.parametrize("asked, batches", [(0, 1), (1, 1), (3, 3)])
def test_the_first_validation_has_as_many_batches_as_asked_for_but_one_at_least(asked: int, batches: int, tmp_path):
    program = insert_after(tmp_path / "program", "batch", 'print("a batch")')
    options = f"{SMALL} --effective_batch_size 16 --epochs 1 --limit_val_batches 1.0 --num_sanity_val_steps {asked}"
    printed = call(f"{program}/train.py {options}", tmp_path).stdout
    assert printed.partition("1 x cpu")[0].count("a batch") == batches


def test_the_summary_shows_the_modules_and_the_number_of_parameters(runs):
    model = train.build_model(TrainConfig(), build_datasets(TrainConfig())["train"])
    assert "(0): Conv2d(1, 32, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n" in str(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert f"\n{model}\nmodel, {size:,} parameters\n" in runs("fast").out


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
    assert "step-00000003" in checkpoint_names(done)
    for checkpoint_name in checkpoint_names(done):
        assert all(tensor.isfinite().all() for tensor in checkpoint(done.cwd, checkpoint_name)["model"].values())


def test_a_loss_that_is_not_finite_in_the_first_step_of_a_resume_is_told(tmp_path):
    call(f"train.py {SMALL} --max_steps 3", tmp_path)
    program = insert_after(tmp_path / "program", "batch", "images = images / 0")
    error = call(f"{program}/train.py --resume auto --max_steps 5", tmp_path, code=1).stderr
    assert error == "train.py: error: compute_loss: `loss` is nan in the first step of this process\n"


@pytest.mark.parametrize("options", ["", "--fast_run 20"])
def test_a_loss_that_is_not_finite_names_no_script_or_run_that_is_not_there(options: str, tmp_path):
    program = copy_programs(tmp_path / "program")
    if options:  # its run directory is removed
        (program / "tools").mkdir()
        (program / "tools" / "replay.py").touch()
    error = call(f"{program}/train.py {DIVERGE} {options}", tmp_path, code=1).stderr
    assert "find the first such step by --log_interval 1" in error and "replay.py" not in error


# ---- training and evaluation mode


def test_parts_of_the_model_that_are_in_evaluation_mode_are_named_in_the_header_and_stay_in_it(tmp_path):
    """As what is frozen: its batch norm keeps its figures. A validation leaves each module in its mode."""
    part = "nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)).eval(),\n"
    program = replace(tmp_path / "program", "first layer", part)
    insert_after(program, "step begins", "assert model.training and not model.module.layers[0][1].training")
    printed = call(f"{program}/train.py {SMALL} --max_steps 4 --val_interval 1", tmp_path).stdout
    assert re.findall(".* mode.*", printed) == ["in evaluation mode: layers.0, layers.0.0, layers.0.1"]
    saved = weights(tmp_path)
    assert saved["layers.0.1.num_batches_tracked"] == 0 and saved["layers.0.1.running_var"].eq(1).all()


@pytest.mark.parametrize("compile", ["", "--compile"])
def test_of_many_parts_in_evaluation_mode_some_are_named(compile: str, monkeypatch, tmp_path):
    """By their names in the model, compiled or not. The compiler leaves the model as it is here."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda model, inputs, **options: model)
    torch.compiler.reset()
    program = insert_before(tmp_path / "program", "set up model", "for layer in model.layers[:4]: layer.eval()")
    printed = call(f"{program}/train.py {SMALL} --max_steps 1 {compile}", tmp_path).stdout
    assert re.findall(".* mode.*", printed) == ["in evaluation mode: layers.0, layers.1, layers.2 and others"]


# ---- output


@pytest.mark.parametrize("name", ["plain", "2 processes", pytest.param("torchrun", marks=pytest.mark.night)])
def test_output_to_a_file_has_one_line_per_epoch_and_no_progress_bar(runs, name):
    done = runs(name)
    for text in (done.out, done.err):
        assert "\r" not in text and "it/s" not in text and "step/s" not in text
    epochs = re.findall(r"^ +(\d+) +(\d+)  ", done.out, re.MULTILINE)
    assert epochs == [("1", "4"), ("2", "8"), ("3", "12"), ("4", "16"), ("5", "20")]
