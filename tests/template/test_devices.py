"""What goes wrong on a GPU alone, as far as a CPU can show it: tests/template/test_gpu.py has what needs a GPU. The
bits of a run, which depend neither on its cores nor on chance."""

import os
import re
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import LONG, ON_2, REPO, SMALL, call, folders, run, run_in
from comparisons import assert_same_run, ended_and_resumed, killed_and_resumed
from edits import copy_programs, insert_after, insert_before, with_edits
from mistakes import refuses
from outputs import checkpoint, history, rows, run_dir, save_as_of, weights
from processes import interrupt, kill_group
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


# ---- 16-mixed


def test_the_gradient_scaler_is_restored(scaled, tmp_path):
    """In the middle of its growth: a scale that starts again would give other weights."""
    _, killed = killed_and_resumed(f"{scaled}/{LONG} --max_grad_norm 1 --max_steps 60", tmp_path)
    assert checkpoint(killed, "step-00000060")["precision"]["scale"] != 4


def test_a_gradient_scaler_that_the_run_did_not_have_starts_afresh(scaled, cwd):
    call(f"train.py {SMALL} --max_steps 2", cwd)
    call(f"{scaled}/train.py --resume auto --max_steps 4", cwd)
    assert checkpoint(cwd, "step-00000004")["precision"]["scale"] == 2 * 4


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
    srun.touch(0o755)
    done = run(f"train.py {SMALL} --fast_run", tmp_path, PATH=f"{srun.parent}:{os.environ['PATH']}")
    assert "srun" not in done.stderr + done.stdout


def test_the_rest_of_an_epoch_is_a_step_of_its_own(tmp_path):
    """Of 16 samples here, also after a resume."""
    size = "--effective_batch_size 400 --micro_batch_size 50 --checkpoint_interval 3 --log_interval 1"
    options = f"{SMALL} --limit_train_batches 1.0 --drop_last False --lr_schedule constant"
    whole, _ = ended_and_resumed(f"train.py {options} {size}", tmp_path)
    assert "16 steps = 4 epochs x 4 steps, the last of 16 samples\n" in (run_dir(whole) / "train.log").read_text()


# ---- threads

# Large enough for torch to compute a sum with both threads.
WIDE = LONG.replace("--width 4", "--width 64").replace("--epochs 10", "--epochs 3")


def bits_of(cwd: Path) -> str:
    return str([history(cwd), {name: tensor.tolist() for name, tensor in weights(cwd).items()}])


def test_a_run_with_two_threads_is_killed_and_resumed_with_one_core_to_the_same_bits(tmp_path):
    """With one thread, they are others."""
    one, two, killed = folders(tmp_path, "one", "two", "killed")
    assert run(WIDE, two, OMP_NUM_THREADS="2").stdout.startswith("1 x cpu, 2 CPU thread(s), ")
    assert "\nnum_threads: 2\n" in (run_dir(two) / "config.yaml").read_text()
    run(WIDE, one, OMP_NUM_THREADS="1")
    assert bits_of(one) != bits_of(two)
    assert interrupt(f"{WIDE} --num_threads 2", killed, kill_group, after=8).returncode < 0
    printed = run("train.py --resume auto", killed, OMP_NUM_THREADS="1").stdout
    assert "2 CPU thread(s)" in printed and "num_threads" not in printed
    assert_same_run(killed, two)


def test_all_ranks_and_an_evaluation_have_the_threads_of_the_run_unless_others_are_asked_for(program, cwd):
    """Also while the datasets are built."""
    with_edits(program, {"before digits": 'print("threads", torch.get_num_threads(), flush=True)'})
    resume, test = "train.py --resume auto --max_steps", "test.py --accelerator cpu --checkpoint last"
    for command, told, threads, ranks in (
        (f"train.py {SMALL} --max_steps 4 --num_threads 2", "", 2, 1),
        (f"{resume} 8 {ON_2}", "", 2, 2),
        (f"{resume} 12 {ON_2} --num_threads 3", "--num_threads 3 instead of 2\n", 3, 2),
        (test, "", 3, 1),
        (f"{test} --num_threads 1", "", 1, 1),
    ):
        printed = run(f"{program}/{command}", cwd).stdout
        assert re.findall(r"^threads (\d)$", printed, re.MULTILINE) == [str(threads)] * ranks
        assert told in printed and ("num_threads" in printed) == bool(told)
        assert "test.py" in command or f"{threads} CPU thread(s)" in printed


# ---- deterministic algorithms

REPEATED = """
class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 64))
        self.head = nn.Linear(64, 10)
        self.register_buffer("index", torch.randint(50, (100_000,)))
        self.register_buffer("factor", torch.randn(100_000, 1))

    def forward(self, images):
        sums = (self.weight[self.index] * self.factor).mean(0)
        return self.head(sums).expand(len(images), -1) * images.mean((1, 2, 3))[:, None]
"""


def test_a_gradient_of_repeated_indices_is_the_same_each_time(tmp_path, program):
    """With two threads, torch adds in another order each time, unless it is told to be deterministic."""
    with_edits(program, {"before functions": REPEATED, "replace model": "    return Repeated()\n    return Model("})
    command = f"{program}/train.py {SMALL} --max_steps 6 --log_interval 1 --num_threads 2 --logger_name csv"
    one, again, other, another = folders(tmp_path, *"1234")
    for cwd, deterministic in ((one, True), (again, True), (other, False), (another, False)):
        run(f"{command} --deterministic {deterministic}", cwd)
    assert bits_of(one) == bits_of(again) and bits_of(other) != bits_of(another)


FLAGS = """
import os
import sys

import torch

from config import TrainConfig
from runtime.launch import prepare_device

prepare_device(TrainConfig(deterministic=sys.argv[1] == "True"), "cuda")
print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
print(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch._inductor.config.deterministic)
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_ALGO"))
"""


def test_a_gpu_gets_deterministic_algorithms_of_torch_cudnn_cublas_nccl_and_inductor(program):
    """The flags alone; tests/template/test_gpu.py has what a GPU does with them."""
    (copy_programs(program) / "flags.py").write_text(FLAGS)
    for deterministic, env, shown in (
        (True, {}, "True False\nTrue False True\n:4096:8 ^NVLS\n"),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "True False\nTrue False True\n:16:8 ^NVLS\n"),
        (False, {}, "False False\nFalse True False\nNone None\n"),
    ):
        assert run(f"{program}/flags.py {deterministic}", program, **env).stdout == shown
