"""What a run computes, prints and writes. All runs of this file are listed in RUNS; each test looks at some of them."""

import csv
import json
import math
import re
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ON_2, REPO, SMALL, edited, run, run_dir

BIN = sysconfig.get_path("scripts")
ALL_STEPS = f"{SMALL} --log_interval 1"
NO_DROPOUT = f"{ALL_STEPS} --dropout 0 --limit_val_batches 1.0 --monitor val/loss"
EXPONENTIAL = "--lr_schedule exponential --base_batch_size 16 --lr_scaling_rule sqrt"
CONSTANT = "--lr_schedule constant --base_batch_size 16 --lr_scaling_rule none"
MICRO_32 = f"{ALL_STEPS} --micro_batch_size 32 {CONSTANT}"
DIVERGE = f"{SMALL} --base_lr 1e30 --lr_schedule constant --warmup_epochs 0 --checkpoint_frequency 0.25"

RUNS = {
    "compile": f"train.py {SMALL} --epochs 1 --limit_train_batches 2 --num_sanity_val_steps 0 --compile",
    "plain": f"train.py {ALL_STEPS} --checkpoint_frequency 2 --num_checkpoint_keep 2",
    "64x1": f"train.py {NO_DROPOUT} {EXPONENTIAL} --checkpoint_frequency 0.5 --num_checkpoint_keep None",
    "16x4": f"train.py {NO_DROPOUT} {EXPONENTIAL} --micro_batch_size 16",
    "clipped": f"train.py {NO_DROPOUT} --micro_batch_size 16 --epochs 1 --limit_train_batches 1 --max_grad_norm 0.01",
    "1 process": f"train.py {MICRO_32}",
    "2 processes": f"train.py {MICRO_32} --devices 2 --strategy ddp",
    "torchrun": f"{BIN}/torchrun --nproc_per_node 2 {REPO}/train.py {MICRO_32} --strategy ddp",
    "fabric run": f"{BIN}/fabric run --accelerator cpu --devices 2 --strategy ddp {REPO}/train.py {MICRO_32}",
    "defaults": "train.py --accelerator cpu --epochs 6",
    "bf16-mixed": f"train.py {SMALL} --epochs 2 --precision bf16-mixed",
    "bf16-true": f"train.py {SMALL} --epochs 2 --precision bf16-true",
    "64-true": f"train.py {SMALL} --epochs 2 --precision 64-true",
    "early": f"train.py {ALL_STEPS} --base_lr 1e-12 --base_batch_size 32 --early_stopping_patience 2",
    "bare": f"train.py {SMALL} --limit_val_batches 0 --monitor train/loss --checkpoint_frequency None --summary",
    "fast": "train.py --accelerator cpu --fast_run --summary",
    "profile": f"train.py {SMALL} --profile",
    "diverges": f"train.py {DIVERGE}",
    "diverges on 2": f"train.py {DIVERGE} --devices 2 --strategy ddp",
}


class Run(NamedTuple):
    out: str
    err: str
    cwd: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Starts RUNS, two at a time. Gives a function from a name to the finished run."""
    folders = {name: tmp_path_factory.mktemp("run") for name in RUNS}

    def one(name: str) -> Run:
        code = 1 if name.startswith("diverges") else 0
        done = run(RUNS[name], folders[name], code, TORCHINDUCTOR_COMPILE_THREADS="1")
        return Run(done.stdout, done.stderr, folders[name])

    pool = ThreadPoolExecutor(2)
    futures = {name: pool.submit(one, name) for name in RUNS}
    yield lambda name: futures[name].result()
    pool.shutdown(cancel_futures=True)


def rows(done: Run) -> list[dict]:
    """The rows of metrics.csv, as numbers; a step without a validation has no val/..."""
    with open(run_dir(done.cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def weights(done: Run) -> dict[str, torch.Tensor]:
    return torch.load(run_dir(done.cwd) / "model.pt", weights_only=True)


def checkpoint(done: Run, name: str) -> dict:
    return torch.load(run_dir(done.cwd) / "checkpoints" / f"{name}.ckpt", weights_only=True)


def checkpoint_names(done: Run) -> list[str]:
    return sorted(path.stem for path in (run_dir(done.cwd) / "checkpoints").iterdir())


def assert_same_training(a: Run, b: Run) -> None:
    """Weights and logged losses agree up to the rounding of a sum."""
    torch.testing.assert_close(weights(a), weights(b), atol=1e-5, rtol=0)
    assert len(rows(a)) == len(rows(b))
    for row, other in zip(rows(a), rows(b), strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "lr", "val/loss", "val/accuracy"):
            assert row.get(name) == pytest.approx(other.get(name), abs=1e-5), name


# ---- batches and devices


@pytest.mark.parametrize(
    "name, equation",
    [
        ("64x1", "64 = 1 process(es) x 64 micro_batch_size x 1 grad_accum_steps"),
        ("16x4", "64 = 1 process(es) x 16 micro_batch_size x 4 grad_accum_steps"),
        ("2 processes", "64 = 2 process(es) x 32 micro_batch_size x 1 grad_accum_steps"),
    ],
)
def test_the_batch_arithmetic_is_printed_as_an_equation(runs, name, equation):
    assert runs(name).out.count(f"effective_batch_size {equation}\n") == 1


def test_accumulating_4_micro_batches_of_16_trains_like_one_batch_of_64(runs):
    assert_same_training(runs("64x1"), runs("16x4"))


def test_2_processes_train_like_1_with_dropout_and_augmentation(runs):
    assert_same_training(runs("1 process"), runs("2 processes"))


@pytest.mark.parametrize("launcher", ["torchrun", "fabric run"])
def test_a_launcher_from_outside_gives_one_run_with_the_same_weights(runs, launcher):
    assert len(list(runs(launcher).cwd.iterdir())) == 1
    torch.testing.assert_close(weights(runs(launcher)), weights(runs("2 processes")), atol=0, rtol=0)


# ---- learning


def test_it_learns_with_the_default_options(runs):
    assert max(row["val/accuracy"] for row in rows(runs("defaults"))) > 0.8


@pytest.mark.parametrize(
    "precision, dtype",
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_it_trains_in_other_precisions(runs, precision, dtype):
    final = weights(runs(precision))
    assert all(tensor.dtype == dtype and tensor.isfinite().all() for tensor in final.values())
    losses = [row[name] for row in rows(runs(precision)) for name in ("train/loss", "val/loss")]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    before, after = (checkpoint(runs(precision), f"step-0000000{step}")["model"] for step in (4, 8))
    assert any(not torch.equal(before[name], after[name]) for name in final)


def test_a_compiled_model_trains_and_its_weights_have_the_names_of_the_plain_model(runs):
    plain = {name: tensor.shape for name, tensor in weights(runs("plain")).items()}
    for compiled in (weights(runs("compile")), checkpoint(runs("compile"), "best")["model"]):
        assert {name: tensor.shape for name, tensor in compiled.items()} == plain
    assert [row["step"] for row in rows(runs("compile"))] == [2]


def test_the_whole_gradient_is_clipped_once_and_logged_as_it_was_before(runs):
    (row,) = rows(runs("clipped"))
    assert row["train/grad_norm"] == pytest.approx(rows(runs("64x1"))[0]["train/grad_norm"], rel=1e-4)
    assert row["train/grad_norm"] > 0.1
    # AdamW's first average of the gradients is 0.1 of the gradient that it was given.
    averages = [s["exp_avg"] for s in checkpoint(runs("clipped"), "step-00000001")["optimizer"]["state"].values()]
    assert torch.cat([average.flatten() for average in averages]).norm() == pytest.approx(0.1 * 0.01, rel=1e-4)


# ---- learning rate: 5 epochs of 4 steps, base_lr 4e-3


def warmed_up(step: int, peak: float, schedule: str) -> float:
    """The learning rate of a step, counted from 1, after one epoch of warm-up."""
    if step <= 4:
        return peak * step / 5
    epochs_since = (step - 5) / 4
    return (
        peak
        * {
            "cosine": (1 + math.cos(math.pi * epochs_since / 4)) / 2,
            "exponential": 0.95**epochs_since,
            "constant": 1.0,
        }[schedule]
    )


@pytest.mark.parametrize(
    "name, peak, schedule",
    [("plain", 4e-3, "cosine"), ("64x1", 4e-3 * math.sqrt(64 / 16), "exponential"), ("1 process", 4e-3, "constant")],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(runs, name, peak, schedule):
    assert [row["lr"] for row in rows(runs(name))] == pytest.approx(
        [warmed_up(step, peak, schedule) for step in range(1, 21)]
    )


@pytest.mark.parametrize(
    "name, rule, peak", [("64x1", "sqrt", 8e-3), ("1 process", "none", 4e-3), ("early", "linear", 2e-12)]
)
def test_the_learning_rate_scales_with_the_batch_size(runs, name, rule, peak):
    (line,) = [line for line in runs(name).out.splitlines() if line.startswith("lr ")]
    assert line.split()[1] == f"{peak:g}" and rule in line
    assert rows(runs(name))[4]["lr"] == pytest.approx(peak)


def test_denormal_numbers_are_zero_on_a_cpu(tmp_path):
    """Adam keeps them for units that have died, and a CPU is several times slower with them."""
    code = "import torch, utils; from config import TrainConfig; "
    code += "utils.build_fabric(TrainConfig(accelerator='cpu')); print((torch.tensor([1e-30]) * 1e-10).item())"
    (tmp_path / "denormal.py").write_text(f"import sys; sys.path.insert(0, {str(REPO)!r}); {code}")
    assert float(run(str(tmp_path / "denormal.py"), tmp_path).stdout) == 0


def test_sync_batchnorm_takes_the_place_of_batchnorm(tmp_path):
    """Where there is but one process it does the same; several need GPUs."""
    diff = "--- model.py\n             nn.Flatten(),\n+            nn.BatchNorm1d(2 * width * 4),\n"
    program = edited(diff, tmp_path) / "train.py"
    done = run(f"{program} --accelerator cpu --fast_run --summary --sync_batchnorm", tmp_path)
    assert "SyncBatchNorm" in done.stdout and "finished" in done.stdout
    error = run(f"{program} --accelerator cpu --fast_run --sync_batchnorm {ON_2}", tmp_path, code=2).stderr
    assert re.search("--sync_batchnorm: PyTorch has it for GPUs alone", error)


# ---- checkpoints


def test_best_ckpt_is_the_step_of_the_best_accuracy(runs):
    validated = [row for row in rows(runs("defaults")) if "val/accuracy" in row]
    best = max(validated, key=lambda row: row["val/accuracy"])  # the first of equals
    assert checkpoint(runs("defaults"), "best")["step"] == best["step"]


def test_the_best_val_loss_is_the_lowest(runs):
    validated = [row for row in rows(runs("64x1")) if "val/loss" in row]
    best = min(validated, key=lambda row: row["val/loss"])
    assert best["val/loss"] < max(row["val/loss"] for row in validated)
    assert checkpoint(runs("64x1"), "best")["step"] == best["step"]


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


def test_without_validation_and_checkpoints_only_the_last_one_is_left(runs):
    assert checkpoint_names(runs("bare")) == ["step-00000020"]
    assert [row["step"] for row in rows(runs("bare"))] == [4, 8, 12, 16, 20]
    assert not any(name.startswith("val/") for row in rows(runs("bare")) for name in row)
    assert "val" not in runs("bare").out.split("epoch  ")[1]


def test_early_stopping_ends_the_run_as_a_finished_one(runs):
    done = runs("early")  # with this learning rate nothing gets better after the first epoch
    assert re.search(r"after 12\b.* steps", done.out)
    assert rows(done)[-1]["step"] == 12
    assert checkpoint(done, "best")["step"] == 4
    last = checkpoint(done, "step-00000012")
    assert last["step"] == 12
    torch.testing.assert_close(weights(done), dict(last["model"]), atol=0, rtol=0)


# ---- debugging


def test_a_fast_run_writes_nothing(runs):
    done = runs("fast")
    assert "2 steps = 1 epochs x 2 steps" in done.out
    assert list(done.cwd.iterdir()) == []


def test_the_summary_shows_layers_and_the_number_of_parameters(runs):
    parameters = sum(tensor.numel() for tensor in weights(runs("defaults")).values())
    for text in ("Conv2d", "Dropout", "Linear", f"{parameters:,}"):
        assert text in runs("fast").out


def test_the_profiler_prints_a_table_and_writes_a_trace(runs):
    done = runs("profile")
    assert "aten::" in done.out and "Self CPU" in done.out
    (trace,) = run_dir(done.cwd).rglob("*.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["diverges", "diverges on 2"])
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_finite_checkpoints(runs, name):
    done = runs(name)
    (line,) = [line for line in done.err.splitlines() if "error" in line.lower()]
    assert re.search(r"loss is (nan|inf)\b.*\bsteps? .*1 to [2-4]\b", line)
    assert "Traceback" not in done.err
    assert not (run_dir(done.cwd) / "model.pt").exists()
    assert checkpoint_names(done)
    for checkpoint_name in checkpoint_names(done):
        assert all(tensor.isfinite().all() for tensor in checkpoint(done, checkpoint_name)["model"].values())


# ---- output


@pytest.mark.parametrize("name", ["plain", "2 processes", "torchrun"])
def test_output_to_a_file_has_one_line_per_epoch_and_no_progress_bar(runs, name):
    done = runs(name)
    for text in (done.out, done.err):
        assert "\r" not in text and "it/s" not in text and "step/s" not in text
    epochs = re.findall(r"^ +(\d+) +(\d+)  ", done.out, re.MULTILINE)
    assert epochs == [("1", "4"), ("2", "8"), ("3", "12"), ("4", "16"), ("5", "20")]
