"""What goes wrong on a GPU alone, held as far as a CPU can. tests/template/test_gpu.py has what needs a GPU."""

import os
import re
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import LONG, ON_2, REPO, SMALL, call, run, run_in
from comparisons import ended_and_resumed, killed_and_resumed
from edits import insert_after, insert_before
from mistakes import refuses
from outputs import checkpoint, rows, run_dir, save_as_of
from torch.utils._python_dispatch import TorchDispatchMode

from config import TrainConfig
from data import build_datasets
from runtime import launch
from runtime.resume import restored
from train import build_model

# 16-mixed on the CPU, with a gradient scaler that grows in each second step. (Without `--precision 16-mixed`, which is
# refused there.)
SCALED = """
from lightning.fabric.plugins import MixedPrecision

del options["precision"]
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler)
"""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory) -> Path:
    """A copy of the programs that trains with a gradient scaler."""
    return insert_before(tmp_path_factory.mktemp("scaled"), "Fabric", SCALED)


def test_a_seed_gives_the_same_weights_on_every_kind_of_device():
    """They are drawn on the CPU; a device has other random numbers."""
    model = build_model(TrainConfig(), build_datasets(TrainConfig())["train"])
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_checkpoints_of_another_machines_gpu_are_read(tmp_path):
    call(f"train.py {SMALL} --epochs 2", tmp_path)
    save_as_of("cuda:1", run_dir(tmp_path))
    with pytest.raises(RuntimeError, match="cuda"):
        checkpoint(tmp_path, "best")
    for name in ("best", "last"):
        assert "accuracy" in call(f"test.py --out_dir train_out --checkpoint {name}", tmp_path).stdout
    assert "resumed from" in call("train.py --resume auto --epochs 3", tmp_path).stdout


@pytest.mark.parametrize(
    "options, device, message",
    [
        ({"precision": "16-mixed"}, "mps", "needs a CUDA GPU"),  # its fused optimizers do not skip an overflow
        ({"strategy": "dp", "precision": "bf16-mixed"}, "cuda", "use ddp"),  # its threads would take float16
        ({"strategy": "dp"}, "mps", "use ddp"),
    ],
)
def test_what_a_kind_of_device_would_do_wrong_is_refused(options: dict, device: str, message: str):
    with pytest.raises(ValueError, match=message):
        launch.prepare_device(TrainConfig(**options), device)


@pytest.mark.parametrize("deterministic", [True, False])
def test_convolutions_are_deterministic_on_a_gpu_or_free_to_be_fast(deterministic: bool, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not deterministic)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", deterministic)
    launch.prepare_device(TrainConfig(deterministic=deterministic), "cuda")
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.backends.cudnn.benchmark != deterministic


# ---- 16-mixed


def test_the_gradient_scaler_is_restored(scaled, tmp_path):
    """In the middle of its growth: a scale that starts again would give other weights."""
    _, killed = killed_and_resumed(f"{scaled}/{LONG} --max_grad_norm 1 --max_steps 60", tmp_path)
    assert checkpoint(killed, "step-00000060")["precision"]["scale"] != 4


def test_the_norm_that_a_step_logs_and_clips_is_that_of_unscaled_gradients(scaled, tmp_path):
    """Up to the rounding of float16 and bfloat16; the scale is 4."""
    options = f"{SMALL} --max_steps 3 --max_grad_norm 0.1 --log_interval 1 --logger_name csv"
    one = run_in(tmp_path / "one", f"train.py --precision bf16-mixed {options}")
    other = run_in(tmp_path / "other", f"{scaled}/train.py {options}")
    norms = [[row["train/grad_norm"] for row in rows(cwd)] for cwd in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_two_optimizers_are_refused(program, cwd):
    """Fabric updates the scale after the step of each: the second one would divide its gradients again."""
    insert_before(program, "Fabric", SCALED)
    insert_after(program, "set up optimizer", "other = fabric.setup_optimizers(torch.optim.SGD(model.parameters()))")
    insert_before(program, "state", '"other": other,')
    refuses(f"{program}/train.py {SMALL}", cwd, "--precision 16-mixed", "one optimizer", "bf16-mixed")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_gradients_of_the_input_are_there_in_every_other_precision(precision):
    """torch.autograd.grad, which Fabric's mixed precision would refuse."""
    fabric = launch.build_fabric(TrainConfig(accelerator="cpu", precision=precision))
    model = fabric.setup_module(torch.nn.Linear(2, 1))
    images = torch.ones(3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    assert gradient.shape == images.shape
    fabric.backward(gradient.square().sum())
    assert model.weight.grad.any()


class Reads(TorchDispatchMode):
    """Counts how often a function of the template takes a number off the device by itself."""

    counts: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            folders = (REPO, REPO / "runtime")
            names = [frame.name for frame in traceback.extract_stack() if Path(frame.filename).parent in folders]
            self.counts.update(names[-1:])
        return function(*args, **kwargs or {})


def test_all_means_of_a_log_or_a_validation_come_off_the_device_at_once(tmp_path):
    """In Means.reduce, as one tensor. Others are, in the first step and at each of the five checkpoints, whether the
    loss and the weights are finite; the last one is written twice."""
    with Reads():
        call(f"train.py {SMALL} --log_interval 2 --max_grad_norm 1", tmp_path)
    del Reads.counts["__init__"]  # of a dataset
    assert Reads.counts == {"check_values": 1, "check_weights": 6}


# ---- resume


def test_what_was_built_on_the_cpu_is_restored_there_and_the_rest_on_the_device():
    """As far as the devices of the tensors go: `meta` stands for a GPU."""
    fabric = SimpleNamespace(device=torch.device("meta"), to_device=lambda tensor: tensor.to("meta"))
    on_device, on_cpu = torch.zeros(2, device="meta"), torch.zeros(2)
    for built, expected in (
        ([], "meta"),
        ([on_device], "meta"),
        ([{"counts": on_cpu}], "cpu"),
        ([{"both": [on_cpu, on_device]}], "meta"),
    ):
        (tensor,) = restored(fabric, built, [torch.ones(3)])
        assert tensor.device.type == expected, built


# ---- several processes


def test_gradients_are_kept_once(tmp_path):
    """Not a second time in the buckets of DistributedDataParallel."""
    told = 'print("storages", len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}))'
    program = insert_before(tmp_path / "program", "optimizer steps", told)
    done = run(f"{program}/train.py {SMALL} --max_steps 2 {ON_2}", tmp_path)
    assert {*re.findall(r"storages (\d+)", done.stdout)} == {"1"}


def test_where_slurm_is_installed_no_hint_of_it_is_printed(tmp_path):
    """As on the login node of a cluster."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    done = run(f"train.py {SMALL} --fast_run", tmp_path, PATH=f"{srun.parent}:{os.environ['PATH']}")
    assert "srun" not in done.stderr + done.stdout


def test_the_rest_of_an_epoch_is_a_step_of_its_own(tmp_path):
    """Of 16 samples here, also after a resume."""
    size = "--effective_batch_size 400 --micro_batch_size 50 --checkpoint_interval 3 --log_interval 1"
    options = f"{SMALL} --limit_train_batches 1.0 --drop_last False --lr_schedule constant"
    whole, _ = ended_and_resumed(f"train.py {options} {size}", tmp_path)
    assert "16 steps = 4 epochs x 4 steps, the last of 16 samples\n" in (run_dir(whole) / "train.log").read_text()
