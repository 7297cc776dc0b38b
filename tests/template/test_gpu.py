"""What only a GPU can show."""

import json
import signal
from pathlib import Path

import pytest
import torch
from commands import REPO, folders, run
from comparisons import assert_same_run
from copies import with_recipe
from edits import insert_after, insert_before, replace
from outputs import checkpoint, rows, run_dir, save_as_of, weights
from processes import interrupt, kill_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LONG = (
    "train.py --accelerator gpu --devices 1 --epochs 30 --limit_train_batches 8 --limit_val_batches 2 --width 8 "
    "--warmup_epochs 0.125 --num_sanity_val_steps 0 --checkpoint_frequency 0.25 --log_interval 2 --logger_name csv"
)
SHORT = f"{LONG} --epochs 2"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# Runs train.py; from the beginning of a step to what is due after it, or to the next one, whatever waits for the device
# is an error. The first step may wait: what compute_loss has returned is checked there.
NO_WAITING = """
import sys
sys.path.insert(0, {repo!r})
import torch
import train
from config import TrainConfig
from runtime import cli
from runtime.run import Run

config = cli.parse_train(TrainConfig, sys.argv[1:])
schedule, save = train.schedule, Run.save

def begin(config, plan, step):
    torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
    return schedule(config, plan, step)

def end(run):
    if run.state["due"]:
        torch.cuda.set_sync_debug_mode("default")
    save(run)

train.schedule, Run.save = begin, end
sys.exit(train.main(config))
"""


def test_a_default_run_learns_and_the_cpu_gives_it_the_same_accuracy(tmp_path):
    """TF32 on the GPU."""
    run("train.py --devices 1 --epochs 8", tmp_path)
    folder = run_dir(tmp_path)
    assert max(row["val/accuracy"] for row in rows(tmp_path)) > 0.8
    told = "precision 32-true, float32 products in TF32\n" in (folder / "train.log").read_text()
    assert told == torch.cuda.is_tf32_supported()
    assert all(row["peak_memory_mb"] > 0 for row in rows(tmp_path))
    assert all(tensor.device.type == "cpu" for tensor in weights(tmp_path).values())
    found = []
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        run("test.py --out_dir train_out --devices 1", tmp_path, **environment)
        found.append(json.loads((folder / "test_test_best.json").read_text())["results"])
    on_gpu, on_cpu = found
    assert on_gpu["accuracy"] == pytest.approx(on_cpu["accuracy"], abs=0.01) and on_cpu["accuracy"] > 0.8
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], abs=1e-3)


RECIPES = ("on_device", "prefetch", "ema")  # samples on the device; copies on a stream of their own; averaged weights
TRAINING = pytest.mark.parametrize(
    "recipe, options",
    [("", ""),
     ("", "--precision bf16-mixed"),
     ("", "--precision 16-mixed --max_grad_norm 1"),
     ("", "--micro_batch_size 16 --max_grad_norm 1"),
     ("", "--num_workers 1 --log_interval 5"),
     *((recipe, "--micro_batch_size 16") for recipe in RECIPES)],
)  # fmt: skip


def program_with(recipe: str, folder: Path) -> Path:
    return with_recipe(recipe, folder) if recipe else REPO


@TRAINING
def test_a_step_never_waits_for_the_device(recipe, options, tmp_path):
    (tmp_path / "no_waiting.py").write_text(NO_WAITING.format(repo=str(program_with(recipe, tmp_path / "program"))))
    run(f"{tmp_path / 'no_waiting.py'} --accelerator gpu --devices 1 --epochs 2 {options}", tmp_path)


@TRAINING
def test_killed_and_resumed_is_the_same_run(recipe, options, tmp_path):
    """In processes of their own."""
    program = program_with(recipe, tmp_path / "program")
    whole, killed = folders(tmp_path, "whole", "killed")
    run(f"{program}/{LONG} {options}", whole)
    assert interrupt(f"{program}/{LONG} {options}", killed, kill_group, after=0).returncode == -signal.SIGKILL
    run(f"{program}/train.py --resume auto", killed)
    assert_same_run(killed, whole)


def test_a_run_is_evaluated_and_goes_on_on_another_device(tmp_path):
    """Its checkpoints name a GPU that this machine may not have; then there is none. The optimizer is where the model
    is."""
    run(SHORT, tmp_path)
    save_as_of("cuda:9", run_dir(tmp_path))
    run("test.py --out_dir train_out", tmp_path)
    for epochs, device in ((3, "gpu"), (4, "cpu"), (5, "gpu")):
        run(f"train.py --resume auto --epochs {epochs} --accelerator {device}", tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == list(range(2, 41, 2))


def test_tensors_within_lists_are_restored_where_they_were_and_weights_keep_their_version(tmp_path):
    queue = '"queue": [torch.ones(3, device=fabric.device)], "counts": [{"cpu": torch.zeros(3)}],'
    program = insert_before(tmp_path / "program", "state", queue)
    insert_after(program, "step is done", 'state["queue"][0] += values["loss"].detach()')
    insert_after(program, "step is done", 'state["counts"][0]["cpu"] += torch.ones(3)')
    run(f"{program}/{SHORT}", tmp_path)
    run(f"{program}/train.py --resume auto --epochs 3", tmp_path)
    assert checkpoint(tmp_path, "step-00000024")["counts"][0]["cpu"].tolist() == [24, 24, 24]
    assert checkpoint(tmp_path, "step-00000024")["model"]._metadata[""] == {"version": 1}


def test_numbers_and_tensors_of_the_cpu_beside_the_loss_are_logged(tmp_path):
    values = '{"loss": F.cross_entropy(logits, targets), "beta": 0.5, "gamma": torch.tensor(0.25)}'
    program = replace(tmp_path / "program", "values", values)
    run(f"{program}/{SHORT} --max_steps 5 --log_interval 4", tmp_path)
    run(f"{program}/train.py --resume auto --max_steps 8", tmp_path)
    for row in rows(tmp_path):
        assert row["train/beta"] == row.get("val/beta", 0.5) == 0.5
        assert row["train/gamma"] == 0.25


def test_the_gradient_scaler_of_16_mixed_grows_and_is_restored(tmp_path):
    """It begins with 65,536; one that is not restored begins with it again."""
    grows = "fabric.strategy.precision.scaler.set_growth_interval(4)"
    program = insert_before(tmp_path / "program", "state is there", grows)
    run(f"{program}/{SHORT} --precision 16-mixed", tmp_path)
    before = checkpoint(tmp_path, "step-00000016")["precision"]
    assert before["scale"] != 65536 and before["growth_interval"] == 4
    run(f"{program}/train.py --resume auto --epochs 3 --num_checkpoint_keep 0", tmp_path)
    after = checkpoint(tmp_path, "step-00000018")["precision"]
    assert after["scale"] in (before["scale"], 2 * before["scale"])


def test_batches_come_from_pinned_memory(tmp_path):
    for workers in (0, 1):
        program = tmp_path / f"program{workers}"
        insert_after(program, "next batch", 'print("pinned", [tensor.is_pinned() for tensor in batch])')
        # Before they are moved to the device.
        replace(program, "to device", "batches")
        insert_before(program, "batch", "batch = [tensor.cuda() for tensor in batch]")
        done = run(f"{program}/{SHORT} --num_workers {workers} --max_steps 2 --out_dir {workers}", tmp_path)
        assert done.stdout.count("pinned [True, True]") == 2


def test_a_run_goes_on_in_another_precision(tmp_path):
    """16-mixed has a gradient scaler, which 32-true has not."""
    run(f"{SHORT} --max_grad_norm 1", tmp_path)
    for epochs, precision in ((3, "16-mixed"), (4, "32-true"), (5, "bf16-mixed")):
        run(f"train.py --resume auto --epochs {epochs} --precision {precision}", tmp_path)
        assert bool(checkpoint(tmp_path, f"step-{8 * epochs:08d}")["precision"]) == (precision == "16-mixed")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_learns(precision, tmp_path):
    run(f"train.py --accelerator gpu --devices 1 --epochs 8 --precision {precision}", tmp_path)
    assert max(row["val/accuracy"] for row in rows(tmp_path)) > 0.8
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path).values())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains(mode, tmp_path):
    run(f"{SHORT} --compile {mode}", tmp_path)
    assert not any(name.startswith("_orig_mod") for name in weights(tmp_path))


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_two_gpus_train_like_one_and_are_evaluated(strategy, tmp_path):
    options = "--dropout 0 --micro_batch_size 32"
    run(f"{SHORT} {options} --devices 1 --out_dir one", tmp_path)
    run(f"{SHORT} {options} --devices 2 --strategy {strategy} --out_dir two", tmp_path)
    one, two = (weights(tmp_path, name) for name in ("one", "two"))
    torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
    for devices in (1, 2):
        run(f"test.py --out_dir two --devices {devices}", tmp_path)
    run("train.py --resume two --epochs 3 --devices 1, --strategy auto", tmp_path)  # the second GPU alone


# ---- recipes


@pytest.mark.parametrize("options", ["", "--num_workers 2"])
def test_a_run_with_prefetch_is_that_without_it(options, tmp_path):
    """The images are large, so that a copy takes some time: a step that did not wait for it, or a copy to memory that
    is still read, would change the weights."""
    with_recipe("prefetch", tmp_path / "with")
    for name in ("with", "without"):
        program = insert_before(tmp_path / name, "split", "images = F.interpolate(images, scale_factor=12)")
        run(f"{program}/{SHORT} --micro_batch_size 16 {options} --out_dir {name}", tmp_path)
    one, two = (weights(tmp_path, name) for name in ("with", "without"))
    torch.testing.assert_close(one, two, atol=0, rtol=0)


@two_gpus
def test_each_process_has_the_samples_on_its_own_device(tmp_path):
    program = with_recipe("on_device", tmp_path / "program")
    insert_before(program, "loop begins", "print(train_loader.dataset.dataset.images.device, flush=True)")
    done = run(f"{program}/{SHORT} --devices 2 --strategy ddp", tmp_path)
    assert {"cuda:0", "cuda:1"} <= set(done.stdout.split())
