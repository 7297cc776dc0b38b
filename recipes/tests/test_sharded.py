"""recipes/cluster/sharded.patch: weights, gradients and optimizer spread over the processes (FSDP2, here on CPUs)."""

import io
import json
import os
import re
import shutil
import signal
import types
from pathlib import Path

import pytest
import torch
from edits import insert_after, replace
from helpers import (
    assert_same_run,
    assert_same_training,
    call,
    copied,
    imported,
    interrupt,
    kill_group,
    newest,
    run,
    run_dir,
    truncate,
    weights,
    with_recipe,
)

from model import Model

pytestmark = pytest.mark.recipes
# Two epochs of 8 steps, each step four micro-batches, saved every second step.
RUN = (
    "train.py --accelerator cpu --epochs 2 --limit_train_batches 8 --limit_val_batches 2 --num_sanity_val_steps 1 "
    "--width 4 --micro_batch_size 16 --lr_schedule constant --warmup_epochs 0.125 --checkpoint_frequency 0.25 "
    "--logger_name csv"
)
ON_1, SHARDED = "--devices 1 --strategy auto", "--devices 2 --strategy model_parallel"
TWO_GROUPS = """torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ], lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The recipe, with two groups of parameters, in another order than the model's."""
    program = with_recipe("sharded", tmp_path_factory.mktemp("program"))
    return replace(program, "optimizer", TWO_GROUPS)


@pytest.fixture(scope="module")
def alone(program: Path, tmp_path_factory) -> Path:
    """Where one process has trained, without shards."""
    cwd = tmp_path_factory.mktemp("alone")
    call(f"{program}/{RUN}", cwd)
    return cwd


@pytest.fixture(scope="module")
def whole(program: Path, tmp_path_factory) -> Path:
    """Where a sharded run was never interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    run(f"{program}/{RUN} {SHARDED}", cwd)
    return cwd


@pytest.fixture(scope="module")
def killed(program: Path, tmp_path_factory) -> Path:
    """Where a sharded run was killed in the middle of an epoch."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(f"{program}/{RUN} {SHARDED}", cwd, kill_group, after=0).returncode == -signal.SIGKILL
    return cwd


def test_trains_as_one_process_does(alone: Path, whole: Path):
    assert_same_training(whole, alone)
    Model((1, 8, 8), 10, width=4).load_state_dict(weights(whole))


def test_each_process_holds_half_of_the_weights_and_of_the_optimizers_state(tmp_path: Path):
    program = with_recipe("sharded", tmp_path / "program")
    insert_after(
        program,
        "step is done",
        """
        held = [*model.parameters()]
        for kept in optimizer.state.values():
            held += [kept["exp_avg"], kept["exp_avg_sq"]]
        print("a process holds", sum(tensor.to_local().nbytes for tensor in held))
        """,
    )
    printed = run(f"{program}/{RUN} {SHARDED} --max_steps 1", tmp_path).stdout
    shares = [int(share) for share in re.findall(r"a process holds (\d+)", printed)]
    assert len(shares) == 2
    state = 3 * sum(weight.nbytes for weight in weights(tmp_path).values())  # AdamW has two values for each weight
    assert sum(shares) == state
    assert max(shares) < 0.55 * state


def test_killed_and_resumed_is_the_same_run(program: Path, whole: Path, killed: Path, tmp_path: Path):
    cwd = copied(killed, tmp_path)
    run(f"{program}/train.py --resume auto {SHARDED}", cwd)
    assert_same_run(cwd, whole)


@pytest.mark.parametrize("devices", [ON_1, "--devices 1"])
def test_goes_on_in_one_process(program: Path, alone: Path, killed: Path, devices: str, tmp_path: Path):
    """Without shards, and with one."""
    cwd = copied(killed, tmp_path)
    how = call if devices == ON_1 else run
    how(f"{program}/train.py --resume auto {devices}", cwd)
    assert_same_training(cwd, alone)


def test_goes_on_sharded(program: Path, alone: Path, tmp_path: Path):
    """A run that began in one process, without shards."""
    call(f"{program}/{RUN} --epochs 1", tmp_path)
    run(f"{program}/train.py --resume auto --epochs 2 {SHARDED}", tmp_path)
    assert_same_training(tmp_path, alone)


def test_the_device_is_prepared_and_the_timeout_is_that_of_the_options(tmp_path: Path):
    """Denormal numbers are flushed to zero, as without shards. No process waits half an hour for another one."""
    program = with_recipe("sharded", tmp_path / "program")
    insert_after(
        program,
        "set-up is done",
        """
        halves = torch.full([1], 1e-38) / 2
        limit = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        print(f"a denormal is {halves.item():g}, the limit", limit.options._timeout)
        """,
    )
    printed = run(f"{program}/{RUN} {SHARDED} --timeout 40 --max_steps 1", tmp_path).stdout
    assert printed.count("a denormal is 0, the limit 0:01:40") == 2


def test_an_optimizer_without_state(tmp_path: Path):
    """SGD without momentum: begins sharded, goes on sharded or not."""
    program = with_recipe("sharded", tmp_path / "program")
    # For shards torch has no fused SGD.
    replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=plan.peak_lr)")
    command = f"{program}/{RUN} --base_lr 0.5"
    for name in ("alone", "began"):
        (tmp_path / name).mkdir()
    call(command, tmp_path / "alone")
    run(f"{command} --epochs 1 {SHARDED}", tmp_path / "began")
    for name, devices in (("on_1", ON_1), ("on_2", "")):
        (tmp_path / name).mkdir()
        cwd = copied(tmp_path / "began", tmp_path / name)
        how = call if devices == ON_1 else run
        how(f"{program}/train.py --resume auto --epochs 2 {devices}", cwd)
        assert_same_training(cwd, tmp_path / "alone")


def test_evaluation_is_that_of_one_process(program: Path, alone: Path, whole: Path):
    reports = []
    for cwd, devices, how in ((alone, "", call), (whole, SHARDED, run)):
        how(f"{program}/test.py --out_dir train_out --accelerator cpu {devices}", cwd)
        reports.append(json.loads((run_dir(cwd) / "test_test_best.json").read_text()))
    assert reports[1]["results"]["accuracy"] == reports[0]["results"]["accuracy"]
    assert reports[1]["results"]["loss"] == pytest.approx(reports[0]["results"]["loss"], abs=1e-5)


def test_weights_that_are_not_finite_in_one_shard_are_not_saved(tmp_path: Path):
    program = with_recipe("sharded", tmp_path / "program")
    breaking = "next(model.parameters()).detach().to_local().fill_(math.nan)"
    insert_after(program, "step is done", f"if fabric.global_rank == 1 and step == 4:\n    {breaking}")
    done = run(f"{program}/{RUN} {SHARDED}", tmp_path, code=1)
    assert "the weights are not finite after step 4" in done.stderr
    assert newest(tmp_path) == 2


# ---- how the model is built

# Builds a model of a module that is written beside the program: `python build.py MODEL DEVICES`. Each process writes
# its values, the random numbers after it, the times of the first tensor and the last share, and the memory that it
# holds.
BUILD = """
import os, re, sys, time
import torch
import models, sharded
from config import TrainConfig
from runtime import launch

def megabytes():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\\s+(\\d+)", file.read())[1]) / 1024

def build_model():
    times.append(time.monotonic())
    return getattr(models, name)()

def shard_and_note(model, mesh):
    shard(model, mesh)
    times.append(time.monotonic())

name, devices = sys.argv[1:]
shard, sharded.shard, times = sharded.shard, shard_and_note, []
fabric = launch.build_fabric(TrainConfig(accelerator="cpu", devices=devices, strategy="model_parallel"))
fabric.launch()
before = megabytes()
torch.manual_seed(0)
model = fabric.setup_module(sharded.build(fabric, build_model))
about = {"times": times, "held": megabytes() - before, "random": torch.rand(3)}
if name == "custom":
    values = dict(model.module.named_buffers())
    for key, parameter in model.module.named_parameters():
        values[key] = parameter.full_tensor()
    about |= {"values": values, "table": model.module.table}
torch.save(about, f"{fabric.global_rank}.pt")
fabric.barrier()
os._exit(0)  # gloo may abort in an orderly end
"""

# What constructors do beside `reset_parameters`.
MODELS = """
import numpy as np
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3)
        self.norm = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24))

class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(31, 24, padding_idx=3)
        self.head = nn.Embedding(31, 24)
        self.head.weight = self.tokens.weight  # tied
        self.position = nn.Parameter(torch.zeros(1, 7, 24))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm2d(5)
        self.rates = nn.Parameter(torch.tensor(torch.linspace(0.1, 1, 24).tolist()))
        self.given = nn.Parameter(torch.from_numpy(np.arange(12.0)) * torch.rand(12))
        self.register_buffer("mask", torch.ones(7, 7).tril().view(1, 7, 7), persistent=False)
        self.table = torch.arange(9).numpy()[::2].copy()
        nn.init.trunc_normal_(self.position, std=0.02)
        self.apply(self.initialize)
        for block in self.blocks:
            nn.init.orthogonal_(block.mlp[0].weight)
        with torch.no_grad():
            self.blocks[0].mlp[2].weight /= 6**0.5
            self.blocks[1].mlp[2].weight[3:5, ::2].fill_(0.5)
            self.blocks[2].mlp[2].weight.copy_(self.blocks[1].mlp[2].weight + torch.randn(24, 96))
        if self.position.abs().max() > 1:
            raise ValueError

    def initialize(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

class Large(nn.Module):  # 8 parts of 64 MB
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 13)
        self.head.weight = self.tokens.weight

def custom():
    return Custom()

def large():
    return Large()

def tied():
    return Tied()
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Path:
    """The recipe, with a script that builds a model of MODELS."""
    program = with_recipe("sharded", tmp_path_factory.mktemp("builder"))
    (program / "build.py").write_text(BUILD)
    (program / "models.py").write_text(MODELS)
    return program


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_any_constructor_gives_the_weights_that_it_gives_without_shards(builder: Path, devices: int, tmp_path: Path):
    """In each bit, and the random numbers after it are the same, too."""
    models = types.ModuleType("models")
    exec(MODELS, vars(models))
    torch.manual_seed(0)
    model = models.custom()
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    following = torch.rand(3)
    run(f"{builder}/build.py custom {devices}", tmp_path)
    for rank in range(devices):
        about = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert about["table"].tolist() == model.table.tolist()
        torch.testing.assert_close(about["values"], expected, atol=0, rtol=0)
        assert torch.equal(about["random"], following)


def test_one_process_at_a_time_holds_the_whole_model(builder: Path, tmp_path: Path):
    """Afterwards each of 4 processes holds its quarter of 512 MB."""
    run(f"{builder}/build.py large 4", tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    times = [time for about in found for time in about["times"]]
    assert len(times) == 8 and times == sorted(times)
    assert 128 < max(about["held"] for about in found) < 0.5 * 512


def test_parameters_that_sharding_would_untie_are_named(builder: Path, tmp_path: Path):
    error = run(f"{builder}/build.py tied 1", tmp_path, code=1).stderr
    assert "RunError: head.weight: tied to a parameter of another part" in error


# ---- checkpoints in shards

IN_SHARDS = "--strategy model_parallel --sharded_checkpoint"


def shards_of(cwd: Path) -> list[int]:
    """The steps of the directories with shards."""
    return sorted(int(path.name.split("-")[1]) for path in run_dir(cwd).glob("checkpoints/shards-*"))


def newest_checkpoint(cwd: Path) -> Path:
    return max(run_dir(cwd).glob("checkpoints/step-*.ckpt"))


def folder_of(path: Path) -> Path:
    """Where the shards of a regular checkpoint are."""
    (folder,) = path.parent.glob(f"{path.stem.replace('step', 'shards')}-*")
    return folder


@pytest.fixture(scope="module")
def killed_in_shards(program: Path, tmp_path_factory) -> Path:
    """Where a run of two processes, which saves in shards, was killed in the middle of an epoch."""
    cwd = tmp_path_factory.mktemp("killed_in_shards")
    command = f"{program}/{RUN} {IN_SHARDS} --devices 2"
    assert interrupt(command, cwd, kill_group, after=2).returncode == -signal.SIGKILL
    return cwd


def test_in_shards_killed_and_resumed_is_the_same_run(program: Path, whole: Path, killed_in_shards: Path, tmp_path):
    """As one with whole checkpoints that was never interrupted. Shards that a kill has left incomplete are replaced,
    and those that no checkpoint needs are deleted."""
    cwd = copied(killed_in_shards, tmp_path)
    for step in (newest(cwd) + 2, 1):
        folder = run_dir(cwd) / "checkpoints" / f"shards-{step:08d}-0123456789abcdef"
        folder.mkdir()
        (folder / "1.pt.tmp").write_bytes(b"incomplete")
    run(f"{program}/train.py --resume auto {SHARDED}", cwd)
    assert_same_run(cwd, whole)
    assert shards_of(cwd) == [12, 14, 16]


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.night)])
def test_in_shards_the_same_on_other_numbers_of_processes(program: Path, alone: Path, devices: int, tmp_path: Path):
    left_alone, killed = tmp_path / "left_alone", tmp_path / "killed"
    left_alone.mkdir(), killed.mkdir()
    command = f"{program}/{RUN} {IN_SHARDS} --devices {devices}"
    run(command, left_alone)
    assert interrupt(command, killed, kill_group, after=0).returncode == -signal.SIGKILL
    run(f"{program}/train.py --resume auto --devices {devices}", killed)
    assert_same_run(killed, left_alone)
    assert_same_training(killed, alone)


@pytest.mark.parametrize("devices", [ON_1, "--devices 1", "--devices 4", "--sharded_checkpoint False"])
def test_in_shards_goes_on_elsewhere(program: Path, alone: Path, killed_in_shards: Path, devices: str, tmp_path: Path):
    """Without shards, with other numbers of them, and with whole checkpoints."""
    cwd = copied(killed_in_shards, tmp_path)
    how = call if devices == ON_1 else run
    how(f"{program}/train.py --resume auto {devices}", cwd)
    assert_same_training(cwd, alone)


def test_in_shards_the_best_one_stays_and_is_evaluated(tmp_path: Path):
    """The best one, of the highest loss, is of step 8, and long pruned by then."""
    program = with_recipe("sharded", tmp_path / "program")
    replace(program, "values", '{"loss": (loss := F.cross_entropy(logits, targets)), "surprise": loss}')
    options = "--monitor val/surprise --monitor_mode max --num_checkpoint_keep 1 --devices 2"
    reports = []
    for name, how_to_save in (("whole", "--strategy model_parallel"), ("shards", IN_SHARDS)):
        cwd = tmp_path / name
        cwd.mkdir()
        run(f"{program}/{RUN} {options} {how_to_save}", cwd)
        call(f"{program}/test.py --out_dir train_out --accelerator cpu", cwd)
        reports.append(json.loads((run_dir(cwd) / "test_test_best.json").read_text()))
    assert shards_of(cwd) == [8, 16]
    run(f"{program}/test.py --out_dir train_out --accelerator cpu {SHARDED}", cwd)
    reports.append(json.loads((run_dir(cwd) / "test_test_best.json").read_text()))
    for report in reports:
        assert report["step"] == 8
        assert report["results"]["loss"] == pytest.approx(reports[0]["results"]["loss"], abs=1e-5)
    assert_same_run(tmp_path / "whole", cwd)


# At the end of runtime/resume.py: fails if a rank has more than its shards of the weights, or of what AdamW keeps.
OWN_SHARES = """

restore_shares = Resume.restore


def restore(self, *args):
    from torch.distributed.tensor import DTensor

    kept = [values["exp_avg"] for values in self.saved["optimizer"]["state"].values()]
    assert all(isinstance(tensor, DTensor) for tensor in [*self.saved["model"].values(), *kept])
    print("each rank has its own shares")
    restore_shares(self, *args)


Resume.restore = restore
"""


@pytest.mark.parametrize("fixture", ["killed", "killed_in_shards"])
def test_a_resume_reads_its_own_shares_alone(program: Path, fixture: str, request, tmp_path: Path):
    """Also of a checkpoint that is whole."""
    cwd = copied(request.getfixturevalue(fixture), tmp_path)
    checked = Path(shutil.copytree(program, tmp_path / "program"))
    with open(checked / "runtime" / "resume.py", "a") as file:
        file.write(OWN_SHARES)
    assert "each rank has its own shares" in run(f"{checked}/train.py --resume auto", cwd).stdout


def flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_shard_is_named_and_skipped(program: Path, alone: Path, killed_in_shards: Path, damage, tmp_path):
    cwd = copied(killed_in_shards, tmp_path)
    damaged = newest_checkpoint(cwd)
    damage(folder_of(damaged) / "1.pt")
    done = call(f"{program}/train.py --resume auto {ON_1}", cwd)
    assert f"{damaged.name}: it is damaged" in done.stdout
    assert f"resumed from {run_dir(cwd).name}/checkpoints/step-{int(damaged.stem[5:]) - 2:08d}" in done.stdout
    assert_same_training(cwd, alone)


def test_a_shard_of_another_save_is_taken_for_damage(program: Path, alone: Path, killed_in_shards: Path, tmp_path):
    cwd = copied(killed_in_shards, tmp_path)
    path = newest_checkpoint(cwd)
    before = path.with_name(f"step-{newest(cwd) - 2:08d}.ckpt")
    shutil.copy(folder_of(before) / "1.pt", folder_of(path) / "1.pt")
    done = call(f"{program}/train.py --resume auto {ON_1}", cwd)
    assert f"{path.name}: it is damaged" in done.stdout
    assert_same_training(cwd, alone)


@pytest.mark.parametrize("is_best", [True, False])
def test_shards_of_a_file_that_cannot_be_read_are_kept(program: Path, killed_in_shards: Path, is_best: bool, tmp_path):
    cwd = copied(killed_in_shards, tmp_path)
    newest_path = newest_checkpoint(cwd)
    folders = {path.name for path in newest_path.parent.glob("shards-*")}
    (newest_path.with_name("best.ckpt") if is_best else newest_path).write_bytes(b"cut")
    imported(program, "runtime/checkpoints").remove_old(run_dir(cwd), 0)
    assert {path.name for path in newest_path.parent.glob("shards-*")} == folders


class Forged:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def forged(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Forged(marker), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("place", ["file", "shard"])
def test_forged_shards_run_no_code(program: Path, killed_in_shards: Path, place: str, tmp_path: Path):
    """What has one is taken for a damaged checkpoint."""
    cwd = copied(killed_in_shards, tmp_path)
    path, marker = newest_checkpoint(cwd), tmp_path / "marker"
    folder = folder_of(path)
    if place == "file":
        path.write_bytes(forged(marker))
    else:
        (folder / "0.pt").write_bytes(forged(marker))
    done = call(f"{program}/train.py --resume auto {ON_1}", cwd)
    assert not marker.exists()
    assert f"{path.name}: it is damaged" in done.stdout
    torch.load(io.BytesIO(forged(marker)), weights_only=False)
    assert marker.exists()  # what was forged does run code elsewhere
