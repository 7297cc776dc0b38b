"""What only a GPU can show."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import REPO, newest, run, run_dir, start, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LONG = (
    "train.py --accelerator gpu --devices 1 --epochs 30 --limit_train_batches 8 --limit_val_batches 2 --width 8 "
    "--num_sanity_val_steps 0 --checkpoint_frequency 0.25 --log_interval 2 --logger_name csv"
)


# Runs train.py; between the beginning of a step and its end whatever waits for the device is an error.
NO_WAITING = """
import sys
sys.path.insert(0, {repo!r})
import torch
import config, train, utils

settings = config.parse_train()
learning_rate, stop = train.learning_rate, utils.Stopper.__call__

def begin(*args):
    torch.cuda.set_sync_debug_mode("error")
    return learning_rate(*args)

def end(stopper):
    torch.cuda.set_sync_debug_mode("default")
    return stop(stopper)

train.learning_rate, utils.Stopper.__call__ = begin, end
sys.exit(train.main(*settings))
"""


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> Path:
    """A run with the default options, on one GPU."""
    cwd = tmp_path_factory.mktemp("default")
    run("train.py --devices 1 --epochs 8", cwd)
    return run_dir(cwd)


def rows(folder: Path) -> list[dict]:
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def test_a_default_run_learns_on_the_gpu(default):
    assert max(float(row["val/accuracy"]) for row in rows(default)) > 0.8
    assert float(rows(default)[-1]["peak_memory_gb"]) > 0
    assert all(tensor.device.type == "cpu" for tensor in weights(default).values())


def test_the_cpu_gives_a_run_of_the_gpu_the_same_accuracy(default):
    results = []
    for device in ("gpu", "cpu"):
        run(f"test.py --out_dir {default} --accelerator {device} --devices 1", default.parent)
        results.append(json.loads((default / "test_results.json").read_text()))
    on_gpu, on_cpu = results
    assert on_gpu["num_samples"] == on_cpu["num_samples"] > 0
    assert on_gpu["accuracy"] == on_cpu["accuracy"] > 0.8
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], abs=1e-3)  # TF32 on the GPU


@pytest.mark.parametrize(
    "options",
    ["", "--precision bf16-mixed", "--micro_batch_size 16", "--max_grad_norm 1", "--num_workers 1", "--log_interval 5"],
)
def test_a_step_never_waits_for_the_device(options, tmp_path):
    (tmp_path / "no_waiting.py").write_text(NO_WAITING.format(repo=str(REPO)))
    run(f"{tmp_path / 'no_waiting.py'} --accelerator gpu --devices 1 --epochs 2 {options}", tmp_path)


@pytest.mark.parametrize(
    "options",
    ["--precision 16-mixed", "--precision 32-true --strategy fsdp", "--precision bf16-mixed --strategy model_parallel"],
)
def test_killed_and_resumed_is_the_same_run(options, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run(f"{LONG} {options}", whole)
    process = start(f"{LONG} {options}", killed)
    wait_for(lambda: process.poll() is not None or newest(killed) % 8 in (2, 4))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    resumed = run("train.py --resume auto", killed)
    assert re.search(r"resumed from .*step-\d+\.ckpt", resumed.stdout)
    torch.testing.assert_close(weights(run_dir(killed)), weights(run_dir(whole)), atol=0, rtol=0)
    for row, expected in zip(rows(run_dir(killed)), rows(run_dir(whole)), strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "lr", "val/loss", "val/accuracy"):
            assert row[name] == expected[name], name


@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_a_sharded_run_has_the_weights_of_a_plain_one(strategy, tmp_path):
    for name in ("auto", strategy):
        run(f"{LONG} --epochs 2 --precision 32-true --strategy {name} --out_dir {name}", tmp_path)
    plain, sharded = (weights(run_dir(tmp_path, name)) for name in ("auto", strategy))
    torch.testing.assert_close(sharded, plain, atol=1e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", ["--strategy ddp --sync_batchnorm", "--strategy fsdp", "--strategy model_parallel"])
def test_two_gpus_train(options, tmp_path):
    run(f"{LONG} --epochs 2 --micro_batch_size 32 --devices 1 --precision 32-true --out_dir one", tmp_path)
    run(f"{LONG} --epochs 2 --micro_batch_size 32 --devices 2 --precision 32-true --out_dir two {options}", tmp_path)
    one, two = (weights(run_dir(tmp_path, name)) for name in ("one", "two"))
    torch.testing.assert_close(two, one, atol=1e-4, rtol=0)


def test_16_mixed_checkpoints_hold_the_gradient_scaler(tmp_path):
    run(f"{LONG} --epochs 1 --precision 16-mixed", tmp_path)
    state = torch.load(run_dir(tmp_path) / "checkpoints" / "step-00000008.ckpt", weights_only=True)
    assert state["precision"]["scale"] > 0


def test_bf16_mixed_learns(tmp_path):
    run("train.py --accelerator gpu --devices 1 --epochs 8 --precision bf16-mixed", tmp_path)
    assert max(float(row["val/accuracy"]) for row in rows(run_dir(tmp_path))) > 0.8
    assert all(tensor.dtype == torch.float32 for tensor in weights(run_dir(tmp_path)).values())


def test_idle_takes_a_gpu(tmp_path):
    run("train.py --devices idle:1 --epochs 1 --limit_train_batches 2", tmp_path)
    (path,) = (run_dir(tmp_path) / "provenance").glob("*.json")
    assert json.loads(path.read_text())["devices"] == "1 x cuda"
