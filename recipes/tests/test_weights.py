"""Where weights come from, and who holds them: finetune, with the weights of an earlier run, a new head, a frozen body,
LoRA; and sharded, weights, gradients and optimizer spread over the processes (FSDP2, here on CPUs)."""

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
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    checkpoint,
    copied,
    imported,
    interrupt,
    kill_group,
    newest,
    on_one_and_two,
    results,
    run,
    run_dir,
    truncate,
    weights,
    with_recipe,
    with_tied_weights,
)

from model import Model

pytestmark = pytest.mark.recipes

# ---- finetune: weights

HEAD = ("layers.8.weight", "layers.8.bias")
# A checkpoint after each of 6 steps, 4 of them an epoch; dropout in the head alone.
STEPS = f"{SMALL} --epochs 1.5 --logger_name csv --checkpoint_interval 1 --num_checkpoint_keep 6 --weight_decay 0.5"
MERGE = """
import data, torch, train
from pathlib import Path
from runtime import config_file
from torch.nn.utils import parametrize

run = Path("{folder}")
config = config_file.read_config(train.TrainConfig, run)
dataset = data.build_datasets(config, augment=False)["test"]
model = train.build_model(config, dataset)
model.load_state_dict(torch.load(run / "model.pt"))
images = dataset[0][0][None]
expected = model.eval()(images)
for layer in (model.layers[0], model.layers[2], model.layers[4]):
    parametrize.remove_parametrizations(layer, "weight")
torch.testing.assert_close(model(images), expected)
print(*model.state_dict())
"""


def saved_steps(cwd: Path) -> dict[int, dict]:
    return {step: checkpoint(cwd, f"step-{step:08}") for step in range(1, 7)}


@pytest.mark.parametrize("kind", ["run", "model.pt", "best.ckpt", "state dict", "safetensors"])
def test_finetune_body_has_the_weights_and_the_head_is_new(kind: str, finetune: Path, finished: Path, tmp_path: Path):
    """Of whatever file they are: also if its head is of another size, or has another name."""
    expected = torch.load(finished / "model.pt", weights_only=True)
    path = {"run": finished, "best.ckpt": finished / "checkpoints" / kind}.get(kind, finished / "model.pt")
    if kind == "best.ckpt":
        expected = torch.load(path, weights_only=True)["model"]
    if kind == "state dict":
        path = tmp_path / "any.pt"
        torch.save({**expected, "layers.8.weight": torch.zeros(3, 32), "fc.bias": torch.zeros(3)}, path)
    if kind == "safetensors":
        path = tmp_path / "any.safetensors"
        pytest.importorskip("safetensors.torch").save_file(expected, path)
    printed = call(f"{finetune}/train.py {STEPS} --freeze_epochs 1 --base_lr 1e-3 --weights {path}", tmp_path).stdout
    unused = [*HEAD, "fc.bias"] if kind == "state dict" else HEAD
    assert f"for 6 tensors; not used of it: {', '.join(sorted(unused))}\n" in printed
    model = saved_steps(tmp_path)[1]["model"]
    call(f"{finetune}/train.py {STEPS} --freeze_epochs 1 --base_lr 1e-3 --out_dir new --max_steps 1", tmp_path)
    new = weights(tmp_path, "new")
    for name in model:
        if name in HEAD:  # one step of AdamW later: both at most base_lr away
            torch.testing.assert_close(model[name], new[name], atol=2e-3, rtol=0)
        else:
            assert torch.equal(model[name], expected[name]), name


@pytest.mark.parametrize("name", ["layers.1.weight", "layers.2.weight"])
def test_finetune_takes_a_tied_weight_under_any_of_its_names(name: str, tmp_path: Path):
    """A file of safetensors has one of them alone."""
    safetensors = pytest.importorskip("safetensors.torch")
    program = with_tied_weights(with_recipe("finetune", tmp_path / "program"))
    call(f"{program}/train.py {STEPS}", tmp_path)
    expected = dict(torch.load(run_dir(tmp_path) / "model.pt"))
    tied = {"layers.1.weight", "layers.2.weight"} - {name}
    tensors = {key: value for key, value in expected.items() if key not in tied}
    safetensors.save_file(tensors, tmp_path / "tied.safetensors")
    options = f"--freeze_epochs 1 --max_steps 1 --out_dir tuned --weights {tmp_path / 'tied.safetensors'}"
    printed = call(f"{program}/train.py {STEPS} {options}", tmp_path).stdout
    assert "for 9 tensors; not used of it: layers.10.bias, layers.10.weight\n" in printed
    found = torch.load(run_dir(tmp_path, "tuned") / "model.pt")
    for key in ("layers.0.weight", "layers.1.weight", "layers.2.weight"):
        assert torch.equal(found[key], expected[key])


def without_a_tensor(path: Path) -> None:
    torch.save({name: value for name, value in torch.load(path).items() if name != "layers.2.bias"}, path)


def with_another_shape(path: Path) -> None:
    torch.save({**torch.load(path), "layers.2.bias": torch.zeros(5)}, path)


def with_a_flipped_bit(path: Path) -> None:
    data, tensor = bytearray(path.read_bytes()), torch.load(path)["layers.2.weight"].numpy().tobytes()
    data[data.index(tensor) + 5] ^= 1
    path.write_bytes(data)


def as_safetensors_cut(path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(torch.load(path), path.with_suffix(".safetensors"))
    path.unlink()
    truncate(path.with_suffix(".safetensors"))


BROKEN = {
    "text": (lambda path: path.write_text("weights"), "weights.pt"),
    "of code": (lambda path: torch.save(torch.nn.Linear(2, 2), path), "weights.pt"),  # a pickled object
    "truncated": (truncate, "weights.pt"),
    "one bit": (with_a_flipped_bit, "weights.pt"),
    "lacks a tensor": (without_a_tensor, "layers.2.bias"),
    "other shape": (with_another_shape, "layers.2.bias"),
    "safetensors": (as_safetensors_cut, "weights.safetensors"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_finetune_weights_that_do_not_fit_are_one_line(case: str, finetune: Path, finished: Path, cwd: Path):
    broken, named = BROKEN[case]
    broken(Path(shutil.copy(finished / "model.pt", cwd / "weights.pt")))
    (path,) = cwd.iterdir()
    error = call(f"{finetune}/train.py {SMALL} --weights {path.name}", cwd, code=2).stderr
    assert error.startswith(f"train.py: error: --weights {path.name}: ") and named in error and error.count("\n") == 1
    assert [*cwd.iterdir()] == [path]


def test_finetune_killed_before_the_first_checkpoint_it_loads_the_weights_again(finished: Path, tmp_path: Path):
    """So they must be there, on two processes, too; each of these names them once."""
    program = with_recipe("finetune", tmp_path / "program")
    code = f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})"
    insert_after(program, "step is done", f'if step == 3 and config.comment == "kill":\n    {code}')
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    copy, away = Path(shutil.copytree(finished, tmp_path / "source")), tmp_path / "away"
    options = f"{SMALL} --logger_name csv --max_steps 6 --checkpoint_interval 4 --val_interval 4 --freeze_epochs 0.5"
    command = f"{program}/train.py {options} --weights {copy} {ON_2}"
    assert run(command, whole).stdout.count(f"weights from {copy}") == 1
    run(f"{command} --comment kill", killed, code=-signal.SIGKILL)
    assert not [*run_dir(killed).glob("checkpoints/*")]
    copy.rename(away)
    error = run(f"{program}/train.py --resume auto --comment no", killed, code=2).stderr
    assert f"--weights {copy}: " in error
    away.rename(copy)
    run(f"{program}/train.py --resume auto --comment no", killed)
    assert_same_run(killed, whole)


# ---- finetune: freezing, learning rates, LoRA


def test_finetune_body_is_frozen_and_thawed_with_a_rate_of_its_own(finetune: Path, finished: Path, tmp_path: Path):
    """It is that of the source in the first 4 of 6 steps, and the optimizer knows nothing of it. Also on two processes,
    where DDP would wait for the frozen gradients: they train the same model."""
    options = f"--weights {finished} --freeze_epochs 1 --body_lr 0.25 --micro_batch_size 16"
    folders = on_one_and_two(f"{finetune}/train.py {STEPS} {options}", tmp_path)
    assert_same_training(*folders)
    expected = torch.load(finished / "model.pt", weights_only=True)
    body = [name for name in expected if name not in HEAD]
    for cwd in folders:
        saved = saved_steps(cwd)
        for step, found in saved.items():
            same = [torch.equal(found["model"][name], expected[name]) for name in body]
            assert all(same) if step <= 4 else not any(same), step
            assert len(found["optimizer"]["state"]) == (2 if step <= 4 else 2 + len(body))
            head_lr, body_lr = (group["lr"] for group in found["optimizer"]["param_groups"])
            assert body_lr == 0.25 * head_lr > 0
            before = saved.get(step - 1)
            assert not before or not torch.equal(found["model"][HEAD[0]], before["model"][HEAD[0]])


@pytest.mark.parametrize("options, last_frozen", [("--freeze_epochs 1", 4), ("--lora_rank 2", 0)])
def test_finetune_frozen_body_is_in_evaluation_mode_and_one_with_lora_is_not(options, last_frozen, tmp_path: Path):
    """So the frozen one has no dropout, and its BatchNorm keeps its averages. The head is in training mode all along,
    although a validation after each step puts the whole model into evaluation mode."""
    program = with_recipe("finetune", tmp_path / "program")
    line = "nn.Conv2d(channels, width, 3, padding=1),\n"
    replace(program, "first layer", f"{line}nn.BatchNorm2d(width),\nnn.Dropout(0.5),\n")
    names = "(nn.BatchNorm2d, nn.Dropout)"
    modes = f"print('modes', [layer.training for layer in model.layers if isinstance(layer, {names})])"
    insert_after(program, "micro-batch is done", modes)
    printed = call(f"{program}/train.py {STEPS} {options} --val_interval 1", tmp_path).stdout
    expected = [f"modes [{step > last_frozen}, {step > last_frozen}, True]" for step in range(1, 7)]
    assert [line for line in printed.splitlines() if line.startswith("modes")] == expected
    means = [torch.zeros(4), *(saved["model"]["layers.1.running_mean"] for saved in saved_steps(tmp_path).values())]
    for step in range(1, 7):
        assert torch.equal(means[step], means[step - 1]) == (step <= last_frozen)


def test_finetune_lora_trains_a_matrix_of_low_rank_beside_each_weight(finished: Path, tmp_path: Path):
    """Also on two processes. In the body, weights and biases stay those of the source, without find_unused_parameters:
    what is never trained is not DDP's. As the patch says, it is merged into the weights: the same logits, of a model
    with the tensors of one without LoRA."""
    program = with_recipe("finetune", tmp_path / "program")
    options = f"--weights {finished} --lora_rank 2 --micro_batch_size 16"
    folders = on_one_and_two(f"{program}/train.py {STEPS} {options}", tmp_path)
    assert_same_training(*folders)
    expected = torch.load(finished / "model.pt", weights_only=True)
    for cwd in folders:
        saved = saved_steps(cwd)
        assert len(saved[6]["optimizer"]["state"]) == 3 * 2 + len(HEAD)
        for layer in ("layers.0", "layers.2", "layers.4"):
            lora = f"{layer}.parametrizations.weight"
            for name, original in (("weight", f"{lora}.original"), ("bias", f"{layer}.bias")):
                assert torch.equal(saved[6]["model"][original], expected[f"{layer}.{name}"])
            up, down = f"{lora}.0.up", f"{lora}.0.down"
            assert saved[6]["model"][up].shape[1] == saved[6]["model"][down].shape[0] == 2
            for name in (up, down):
                assert not torch.equal(saved[1]["model"][name], saved[6]["model"][name])
    (program / "merge.py").write_text(MERGE.format(folder=run_dir(folders[0])))
    assert {*run(f"{program}/merge.py", tmp_path).stdout.split()} == {*expected}


def test_finetune_lora_begins_as_the_model_it_adapts(finetune: Path, finished: Path, tmp_path: Path):
    """Where nothing was trained in the body, for want of a learning rate, LoRA makes no difference."""
    losses = []
    for rank in (0, 2):
        (cwd := tmp_path / f"rank_{rank}").mkdir()
        options = f"--weights {finished} --lora_rank {rank} --body_lr 1e-30 --dropout 0 --max_steps 3"
        call(f"{finetune}/train.py {SMALL} {options}", cwd)
        losses.append(results(finetune, cwd, "--checkpoint last --split test")["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "options", ["--precision bf16-true", "--precision 64-true", pytest.param("--compile", marks=pytest.mark.night)]
)
def test_finetune_in_any_precision_and_compiled(options: str, finetune: Path, finished: Path, cwd: Path):
    for part in ("--freeze_epochs 0.5", "--lora_rank 2"):
        command = f"{finetune}/train.py {SMALL} --fast_run --weights {finished} {part} {options}"
        assert "finished after 4 of 4 steps" in call(command, cwd).stdout


# ---- sharded

# Two epochs of 8 steps, each step four micro-batches, saved every second step.
RUN = f"{LONG} --epochs 2 --num_sanity_val_steps 1 --checkpoint_frequency 0.25"
ON_1, SHARDED = "--devices 1 --strategy auto", "--devices 2 --strategy model_parallel"
IN_SHARDS = "--strategy model_parallel --sharded_checkpoint"
TWO_GROUPS = """torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ], lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"""


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory) -> Path:
    """The recipe, with two groups of parameters, in another order than the model's."""
    return replace(with_recipe("sharded", tmp_path_factory.mktemp("program")), "optimizer", TWO_GROUPS)


@pytest.fixture(scope="module")
def alone(two_groups: Path, tmp_path_factory) -> Path:
    """Where one process has trained, without shards."""
    cwd = tmp_path_factory.mktemp("alone")
    call(f"{two_groups}/{RUN}", cwd)
    return cwd


@pytest.fixture(scope="module")
def whole_sharded(two_groups: Path, tmp_path_factory) -> Path:
    """Where a sharded run was never interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    run(f"{two_groups}/{RUN} {SHARDED}", cwd)
    return cwd


@pytest.fixture(scope="module")
def killed_sharded(two_groups: Path, tmp_path_factory) -> Path:
    """Where a sharded run was killed in the middle of an epoch."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(f"{two_groups}/{RUN} {SHARDED}", cwd, kill_group, after=0).returncode == -signal.SIGKILL
    return cwd


@pytest.fixture(scope="module")
def killed_in_shards(two_groups: Path, tmp_path_factory) -> Path:
    """The same of a run that saves in shards."""
    cwd = tmp_path_factory.mktemp("killed_in_shards")
    command = f"{two_groups}/{RUN} {IN_SHARDS} --devices 2"
    assert interrupt(command, cwd, kill_group, after=2).returncode == -signal.SIGKILL
    return cwd


def resume(program: Path, cwd: Path, devices: str):
    return (call if devices == ON_1 else run)(f"{program}/train.py --resume auto {devices}", cwd)


def test_sharded_trains_as_one_process_does_and_is_evaluated_alike(two_groups, alone: Path, whole_sharded: Path):
    assert_same_training(whole_sharded, alone)
    Model((1, 8, 8), 10, width=4).load_state_dict(weights(whole_sharded))
    ours = results(two_groups, whole_sharded, "--checkpoint best --split test")
    run(f"{two_groups}/test.py --accelerator cpu {SHARDED}", whole_sharded)
    reports = [json.loads((run_dir(whole_sharded) / "test_test_best.json").read_text())["results"], ours]
    for found in reports:
        assert found == pytest.approx(results(two_groups, alone, "--checkpoint best --split test"), abs=1e-5)


def test_sharded_each_process_holds_half_of_the_weights_and_of_the_optimizers_state(tmp_path: Path):
    """Denormal numbers are flushed to zero, as without shards. No process waits half an hour for another one."""
    program = with_recipe("sharded", tmp_path / "program")
    insert_after(
        program,
        "step is done",
        """
        held = [*model.parameters()]
        for kept in optimizer.state.values():
            held += [kept["exp_avg"], kept["exp_avg_sq"]]
        print("a process holds", sum(tensor.to_local().nbytes for tensor in held))
        halves = torch.full([1], 1e-38) / 2
        limit = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        print(f"a denormal is {halves.item():g}, the limit", limit.options._timeout)
        """,
    )
    printed = run(f"{program}/{RUN} {SHARDED} --timeout 40 --max_steps 1", tmp_path).stdout
    shares = [int(share) for share in re.findall(r"a process holds (\d+)", printed)]
    state = 3 * sum(weight.nbytes for weight in weights(tmp_path).values())  # AdamW has two values for each weight
    assert len(shares) == 2 and sum(shares) == state and max(shares) < 0.55 * state
    assert printed.count("a denormal is 0, the limit 0:01:40") == 2


def test_sharded_killed_and_resumed_is_the_same_run(two_groups, whole_sharded: Path, killed_sharded: Path, tmp_path):
    cwd = copied(killed_sharded, tmp_path)
    resume(two_groups, cwd, SHARDED)
    assert_same_run(cwd, whole_sharded)


@pytest.mark.parametrize("devices", [ON_1, "--devices 1"])
def test_sharded_goes_on_in_one_process(two_groups, alone: Path, killed_sharded: Path, devices: str, tmp_path: Path):
    """Without shards, and with one."""
    cwd = copied(killed_sharded, tmp_path)
    resume(two_groups, cwd, devices)
    assert_same_training(cwd, alone)


def test_sharded_goes_on_with_a_run_of_one_process(two_groups: Path, alone: Path, tmp_path: Path):
    call(f"{two_groups}/{RUN} --epochs 1", tmp_path)
    resume(two_groups, tmp_path, f"--epochs 2 {SHARDED}")
    assert_same_training(tmp_path, alone)


def test_sharded_optimizer_without_state(tmp_path: Path):
    """SGD without momentum: begins sharded, goes on sharded or not. For shards torch has no fused SGD."""
    program = with_recipe("sharded", tmp_path / "program")
    replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=plan.peak_lr)")
    command = f"{program}/{RUN} --base_lr 0.5"
    for name in ("alone", "began", "on_1", "on_2"):
        (tmp_path / name).mkdir()
    call(command, tmp_path / "alone")
    run(f"{command} --epochs 1 {SHARDED}", tmp_path / "began")
    for name, devices in (("on_1", ON_1), ("on_2", "")):
        cwd = copied(tmp_path / "began", tmp_path / name)
        (call if devices else run)(f"{program}/train.py --resume auto --epochs 2 {devices}", cwd)
        assert_same_training(cwd, tmp_path / "alone")


def test_sharded_weights_that_are_not_finite_in_one_shard_are_not_saved(tmp_path: Path):
    program = with_recipe("sharded", tmp_path / "program")
    breaking = "next(model.parameters()).detach().to_local().fill_(math.nan)"
    insert_after(program, "step is done", f"if fabric.global_rank == 1 and step == 4:\n    {breaking}")
    done = run(f"{program}/{RUN} {SHARDED}", tmp_path, code=1)
    assert "not finite after step 4" in done.stderr and newest(tmp_path) == 2


# ---- sharded: how the model is built

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
if name == "Custom":
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
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Path:
    """The recipe, with a script that builds a model of MODELS."""
    program = with_recipe("sharded", tmp_path_factory.mktemp("builder"))
    (program / "build.py").write_text(BUILD)
    (program / "models.py").write_text(MODELS)
    return program


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_sharded_any_constructor_gives_the_weights_that_it_gives_without_shards(builder, devices: int, tmp_path: Path):
    """In each bit, and the random numbers after it are the same, too."""
    models = types.ModuleType("models")
    exec(MODELS, vars(models))
    torch.manual_seed(0)
    model = models.Custom()
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    following = torch.rand(3)
    run(f"{builder}/build.py Custom {devices}", tmp_path)
    for rank in range(devices):
        about = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert about["table"].tolist() == model.table.tolist()
        torch.testing.assert_close(about["values"], expected, atol=0, rtol=0)
        assert torch.equal(about["random"], following)


def test_sharded_one_process_at_a_time_holds_the_whole_model(builder: Path, tmp_path: Path):
    """Afterwards each of 4 processes holds its quarter of 512 MB."""
    run(f"{builder}/build.py Large 4", tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    times = [time for about in found for time in about["times"]]
    assert len(times) == 8 and times == sorted(times)
    assert 128 < max(about["held"] for about in found) < 0.5 * 512


def test_sharded_parameters_that_it_would_untie_are_named(builder: Path, tmp_path: Path):
    assert "RunError: head.weight: " in run(f"{builder}/build.py Tied 1", tmp_path, code=1).stderr


# ---- sharded: checkpoints in shards


def shards_of(cwd: Path) -> list[int]:
    """The steps of the directories with shards."""
    return sorted(int(path.name.split("-")[1]) for path in run_dir(cwd).glob("checkpoints/shards-*"))


def newest_checkpoint(cwd: Path) -> Path:
    return max(run_dir(cwd).glob("checkpoints/step-*.ckpt"))


def folder_of(path: Path) -> Path:
    """Where the shards of a regular checkpoint are."""
    (folder,) = path.parent.glob(f"{path.stem.replace('step', 'shards')}-*")
    return folder


def test_in_shards_killed_and_resumed_is_the_same_run(
    two_groups, whole_sharded: Path, killed_in_shards: Path, tmp_path
):
    """As one with whole checkpoints that was never interrupted. Shards that a kill has left incomplete are replaced,
    and those that no checkpoint needs are deleted."""
    cwd = copied(killed_in_shards, tmp_path)
    for step in (newest(cwd) + 2, 1):
        folder = run_dir(cwd) / "checkpoints" / f"shards-{step:08d}-0123456789abcdef"
        folder.mkdir()
        (folder / "1.pt.tmp").write_bytes(b"incomplete")
    resume(two_groups, cwd, SHARDED)
    assert_same_run(cwd, whole_sharded)
    assert shards_of(cwd) == [12, 14, 16]


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.night)])
def test_in_shards_the_same_on_other_numbers_of_processes(two_groups, alone: Path, devices: int, tmp_path: Path):
    left_alone, killed = tmp_path / "left_alone", tmp_path / "killed"
    left_alone.mkdir(), killed.mkdir()
    command = f"{two_groups}/{RUN} {IN_SHARDS} --devices {devices}"
    run(command, left_alone)
    assert interrupt(command, killed, kill_group, after=0).returncode == -signal.SIGKILL
    resume(two_groups, killed, f"--devices {devices}")
    assert_same_run(killed, left_alone)
    assert_same_training(killed, alone)


@pytest.mark.parametrize("devices", [ON_1, "--devices 1", "--devices 4", "--sharded_checkpoint False"])
def test_in_shards_goes_on_elsewhere(two_groups, alone: Path, killed_in_shards: Path, devices: str, tmp_path: Path):
    """Without shards, with other numbers of them, and with whole checkpoints."""
    cwd = copied(killed_in_shards, tmp_path)
    resume(two_groups, cwd, devices)
    assert_same_training(cwd, alone)


def test_in_shards_the_best_one_stays_and_is_evaluated(tmp_path: Path):
    """The best one, of the highest loss, is of step 8, and long pruned by then."""
    program = with_recipe("sharded", tmp_path / "program")
    replace(program, "values", '{"loss": (loss := F.cross_entropy(logits, targets)), "surprise": loss}')
    options = "--monitor val/surprise --monitor_mode max --num_checkpoint_keep 1 --devices 2"
    reports = []
    for name, how_to_save in (("whole", "--strategy model_parallel"), ("shards", IN_SHARDS)):
        (cwd := tmp_path / name).mkdir()
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


@pytest.mark.parametrize("fixture", ["killed_sharded", "killed_in_shards"])
def test_sharded_resume_reads_its_own_shares_alone(two_groups: Path, fixture: str, request, tmp_path: Path):
    """Also of a checkpoint that is whole."""
    cwd = copied(request.getfixturevalue(fixture), tmp_path)
    checked = Path(shutil.copytree(two_groups, tmp_path / "program"))
    with open(checked / "runtime" / "resume.py", "a") as file:
        file.write(OWN_SHARES)
    assert "each rank has its own shares" in resume(checked, cwd, "").stdout


class Forged:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return os.mkdir, ("marker",)


def forged() -> bytes:
    buffer = io.BytesIO()
    torch.save(Forged(), buffer)
    return buffer.getvalue()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shard(path: Path) -> Path:
    return folder_of(path) / "1.pt"


def replace_shard(path: Path) -> None:
    before = path.with_name(f"step-{int(path.stem[5:]) - 2:08d}.ckpt")
    shutil.copy(shard(before), shard(path))


DAMAGE = {
    "a bit of a shard": lambda path: flip(shard(path)),
    "half of a shard": lambda path: truncate(shard(path)),
    "no shard": lambda path: shard(path).unlink(),
    "a shard of another save": replace_shard,
    "a forged shard": lambda path: shard(path).write_bytes(forged()),
    "a forged file": lambda path: path.write_bytes(forged()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_in_shards_damage_is_named_and_skipped_and_runs_no_code(two_groups, alone, killed_in_shards, damage, tmp_path):
    cwd = copied(killed_in_shards, tmp_path)
    damaged = newest_checkpoint(cwd)
    DAMAGE[damage](damaged)
    done = resume(two_groups, cwd, ON_1)
    assert f"{damaged.name}: it is damaged" in done.stdout and not (cwd / "marker").exists()
    assert f"resumed from {run_dir(cwd).name}/checkpoints/step-{int(damaged.stem[5:]) - 2:08d}" in done.stdout
    assert_same_training(cwd, alone)


def test_what_is_forged_does_run_code_elsewhere(cwd: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(cwd)
    torch.load(io.BytesIO(forged()), weights_only=False)
    assert (cwd / "marker").exists()


@pytest.mark.parametrize("is_best", [True, False])
def test_in_shards_those_of_a_file_that_cannot_be_read_are_kept(two_groups, killed_in_shards, is_best: bool, tmp_path):
    cwd = copied(killed_in_shards, tmp_path)
    path = newest_checkpoint(cwd)
    folders = {each.name for each in path.parent.glob("shards-*")}
    (path.with_name("best.ckpt") if is_best else path).write_bytes(b"cut")
    imported(two_groups, "runtime/checkpoints").remove_old(run_dir(cwd), 0)
    assert {each.name for each in path.parent.glob("shards-*")} == folders
