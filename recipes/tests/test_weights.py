"""Where weights come from, and who holds them: finetune, with the weights of an earlier run, a new head, a frozen body,
LoRA; and sharded, weights, gradients and optimizer spread over the processes (FSDP2, here on CPUs)."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import LONG, SMALL, TWO_SAVES, call, folders, run, run_in
from comparisons import assert_same_run, assert_same_training, on_one_and_two
from copies import imported, with_recipe, with_tied_weights
from edits import insert_after, insert_before, replace
from killer import kill_before
from mistakes import assert_one_line, refuses
from outputs import checkpoint, copied, flip_a_bit, newest, results, run_dir, weights
from processes import interrupt, kill_group

pytestmark = pytest.mark.recipes

# ---- finetune

HEAD = ("layers.8.weight", "layers.8.bias")
# A checkpoint after each of 6 steps, 4 of them an epoch; dropout in the head alone.
STEPS = f"{SMALL} --epochs 1.5 --logger_name csv --checkpoint_interval 1 --num_checkpoint_keep 6 --weight_decay 0.5"


@pytest.fixture(scope="module")
def source(finished: Path) -> dict[str, torch.Tensor]:
    return torch.load(finished / "model.pt", weights_only=True)


def saved_steps(cwd: Path) -> dict[int, dict]:
    return {step: checkpoint(cwd, f"step-{step:08}") for step in range(1, 7)}


@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_finetune_body_has_the_weights_and_the_head_is_new(is_checkpoint: bool, finetune, finished: Path, cwd: Path):
    """Of a checkpoint, or any state dict: also if its head is of another size, or has another name."""
    path, unused = finished / "checkpoints" / "best.ckpt", {*HEAD}
    expected = torch.load(path)["model"]
    if not is_checkpoint:
        path, unused = cwd / "any.pt", {*HEAD, "fc.bias"}
        torch.save({**expected, HEAD[0]: torch.zeros(3, 32), "fc.bias": torch.zeros(3)}, path)
    printed = call(f"{finetune}/train.py {STEPS} --freeze_epochs 1 --base_lr 1e-3 --weights {path}", cwd).stdout
    assert f"for 6 tensors; not used of it: {', '.join(sorted(unused))}\n" in printed
    found = saved_steps(cwd)[1]["model"]
    assert all(torch.equal(found[key], expected[key]) for key in found.keys() - {*HEAD})
    assert (found[HEAD[0]] - expected[HEAD[0]]).abs().max() > 0.01  # in one step AdamW moves it by base_lr at most


def test_finetune_takes_a_tied_weight_of_safetensors_under_either_of_its_names(tmp_path: Path):
    program = with_tied_weights(with_recipe("finetune", tmp_path / "program"))
    call(f"{program}/train.py {STEPS}", tmp_path)
    tensors, path = weights(tmp_path), tmp_path / "tied.safetensors"
    expected = {name: tensors[name] for name in ("layers.0.weight", "layers.1.weight", "layers.2.weight")}
    del tensors["layers.1.weight"]
    pytest.importorskip("safetensors.torch").save_file(tensors, path)
    options = f"--freeze_epochs 1 --max_steps 1 --out_dir tuned --weights {path}"
    printed = call(f"{program}/train.py {STEPS} {options}", tmp_path).stdout
    assert "for 9 tensors; not used of it: layers.10.bias, layers.10.weight\n" in printed
    found = weights(tmp_path, "tuned")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def with_bias(path: Path, **bias: torch.Tensor) -> None:
    """Gives the second layer another bias, or none."""
    tensors = torch.load(path)["model"]
    del tensors["layers.2.bias"]
    torch.save(tensors | {f"layers.2.{name}": value for name, value in bias.items()}, path)


def no_safetensors(path: Path) -> None:
    pytest.importorskip("safetensors")
    path.rename(path.with_suffix(".safetensors"))


MISFITS = [
    pytest.param(flip_a_bit, "weights.pt is damaged", id="a bit"),
    pytest.param(lambda path: torch.save(torch.nn.Linear(2, 2), path), "Linear", id="code"),
    pytest.param(with_bias, "layers.2.bias", id="lacks a tensor"),
    pytest.param(lambda path: with_bias(path, bias=torch.zeros(5)), "layers.2.bias", id="other shape"),
    pytest.param(no_safetensors, "weights.safetensors", id="safetensors"),
]


@pytest.mark.parametrize("spoil, word", MISFITS)
def test_finetune_weights_that_do_not_fit_are_one_line(spoil, word: str, finetune: Path, finished: Path, cwd: Path):
    spoil(Path(shutil.copy(finished / "checkpoints" / "best.ckpt", cwd / "weights.pt")))
    (path,) = cwd.iterdir()
    error = call(f"{finetune}/train.py {SMALL} --weights {path.name}", cwd, code=2).stderr
    assert error.startswith(f"train.py: error: --weights {path.name}: ") and word in error and error.count("\n") == 1
    assert [*cwd.iterdir()] == [path]


def test_finetune_killed_before_the_first_checkpoint_it_loads_the_weights_again(finetune, finished, cwd, tmp_path):
    """So they must be there."""
    copy = copied(finished, tmp_path)
    command = f"{finetune}/{TWO_SAVES} --weights {copy}"
    whole = run_in(tmp_path / "whole", command)
    kill_before("os.rename step-00000002.ckpt.tmp 1", command, cwd, tmp_path)
    away = copy.rename(tmp_path / "away")
    refuses(f"{finetune}/train.py --resume auto", cwd, f"--weights {copy}")
    away.rename(copy)
    call(f"{finetune}/train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


def test_finetune_body_is_frozen_and_thawed_with_a_rate_of_its_own(finetune, finished, source, tmp_path: Path):
    """It is that of the source in the first 4 of 6 steps, and the optimizer knows nothing of it. Also on two processes,
    where DDP would wait for the frozen gradients: they train the same model."""
    options = f"--weights {finished} --freeze_epochs 1 --body_lr 0.25 --micro_batch_size 16"
    folders = on_one_and_two(f"{finetune}/train.py {STEPS} {options}", tmp_path)
    assert_same_training(*folders)
    body = [name for name in source if name not in HEAD]
    for cwd in folders:
        for step, found in saved_steps(cwd).items():
            same = [torch.equal(found["model"][name], source[name]) for name in body]
            assert all(same) if step <= 4 else not any(same), step
            assert len(found["optimizer"]["state"]) == (2 if step <= 4 else 2 + len(body))
            head_lr, body_lr = (group["lr"] for group in found["optimizer"]["param_groups"])
            assert body_lr == 0.25 * head_lr > 0


@pytest.mark.parametrize("options, last_frozen", [("--freeze_epochs 1", 4), ("--lora_rank 2", 0)])
def test_finetune_frozen_body_is_in_evaluation_mode_and_one_with_lora_is_not(options, last_frozen, tmp_path: Path):
    """So the frozen one has no dropout, and BatchNorm keeps its averages there. The head is in training mode all along,
    although a validation after each step puts the whole model into evaluation mode."""
    program = with_recipe("finetune", tmp_path / "program")
    line = "nn.Conv2d(channels, width, 3, padding=1),\n"
    replace(program, "first layer", f"{line}nn.BatchNorm2d(width),\nnn.Dropout(0.5),\n")
    modes = "[layer.training for layer in model.layers if isinstance(layer, (nn.BatchNorm2d, nn.Dropout))]"
    insert_after(program, "micro-batch is done", f"print('modes', {modes})")
    printed = call(f"{program}/train.py {STEPS} {options} --val_interval 1", tmp_path).stdout
    expected = [f"modes [{step > last_frozen}, {step > last_frozen}, True]" for step in range(1, 7)]
    assert [line for line in printed.splitlines() if line.startswith("modes")] == expected


def test_finetune_lora_trains_a_matrix_of_low_rank_beside_each_weight(finetune: Path, finished, source, tmp_path: Path):
    """Also on two processes. In the body, weights and biases stay those of the source, without find_unused_parameters:
    what is never trained is not DDP's. At first it changes no weight."""
    options = f"--weights {finished} --lora_rank 2 --micro_batch_size 16"
    one, two = on_one_and_two(f"{finetune}/train.py {STEPS} {options}", tmp_path)
    assert_same_training(one, two)
    saved = saved_steps(one)
    first, last = saved[1]["model"], saved[6]["model"]
    assert len(saved[6]["optimizer"]["state"]) == 3 * 2 + len(HEAD)
    for layer in ("layers.0", "layers.2", "layers.4"):
        lora, weight = f"{layer}.parametrizations.weight", source[f"{layer}.weight"]
        assert torch.equal(last[f"{lora}.original"], weight)
        assert torch.equal(last[f"{layer}.bias"], source[f"{layer}.bias"])
        assert last[f"{lora}.0.up"].shape[1] == last[f"{lora}.0.down"].shape[0] == 2
        assert not any(torch.equal(first[f"{lora}.0.{name}"], last[f"{lora}.0.{name}"]) for name in ("up", "down"))
        assert torch.equal(imported(finetune, "finetune").LowRank(weight, 2)(weight), weight)


# ---- sharded

# Two epochs of 8 steps, each step four micro-batches, saved every second step.
RUN = f"{LONG} --epochs 2 --num_sanity_val_steps 1 --checkpoint_frequency 0.25"
ON_1, SHARDED = "--devices 1 --strategy auto", "--devices 2 --strategy model_parallel"
IN_SHARDS = "--strategy model_parallel --sharded_checkpoint"
# Two groups of parameters, in another order than the model's.
TWO_GROUPS = """torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ], lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"""
# Fails if a rank that resumes has more than its shards of the weights, or of what AdamW keeps.
OWN_SHARES = """
from torch.distributed.tensor import DTensor
from sharded import mesh_of

kept = [values["exp_avg"] for values in resume.saved["optimizer"]["state"].values()]
if mesh_of(self.fabric):
    assert all(isinstance(tensor, DTensor) for tensor in [*resume.saved["model"].values(), *kept])
"""
# What a process has of weights and AdamW's state, in bytes; what becomes of a denormal; how long it waits for another.
HELD = """
if step == 1 and config.strategy == "model_parallel":
    held = [*model.parameters()]
    for kept in optimizer.state.values():
        held += [kept["exp_avg"], kept["exp_avg_sq"]]
    print("a process holds", sum(tensor.to_local().nbytes for tensor in held))
    halves = torch.full([1], 1e-38) / 2
    limit = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    print(f"a denormal is {halves.item():g}, the limit", limit.options._timeout)
"""


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory) -> Path:
    program = replace(with_recipe("sharded", tmp_path_factory.mktemp("program")), "optimizer", TWO_GROUPS)
    insert_after(program, "step is done", HELD)
    return insert_after(program, ("runtime/run.py", "restore", "resume.saved = own_shares(...)"), OWN_SHARES)


@pytest.fixture(scope="module")
def places(two_groups: Path, tmp_path_factory) -> dict[str, Path]:
    """Where one process has trained without shards; where a sharded run was never interrupted, and what it printed;
    where one of one process has made half of the epochs; and where a sharded run, and one that saves in shards, were
    killed in mid-epoch."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("alone", "whole", "half", "killed", "in_shards")}
    call(f"{two_groups}/{RUN}", found["alone"])
    printed = run(f"{two_groups}/{RUN} {SHARDED} --timeout 40", found["whole"]).stdout
    (found["whole"] / "printed").write_text(printed)
    call(f"{two_groups}/{RUN} --epochs 1", found["half"])
    for name, options, after in (("killed", SHARDED, 0), ("in_shards", f"{IN_SHARDS} --devices 2", 2)):
        done = interrupt(f"{two_groups}/{RUN} {options}", found[name], kill_group, after)
        assert done.returncode == -signal.SIGKILL
    return found


def test_sharded_trains_as_one_process_does_and_is_evaluated_alike(two_groups: Path, places: dict[str, Path]):
    """Each process holds half of the weights and of the optimizer's state. Denormal numbers are flushed to zero, as
    without shards. No process waits half an hour for another one."""
    alone, whole = places["alone"], places["whole"]
    printed = (whole / "printed").read_text()
    shares = [int(share) for share in re.findall(r"a process holds (\d+)", printed)]
    state = 3 * sum(weight.nbytes for weight in weights(whole).values())  # AdamW has two values for each weight
    assert len(shares) == 2 and sum(shares) == state and max(shares) < 0.55 * state
    assert printed.count("a denormal is 0, the limit 0:01:40") == 2
    assert_same_training(whole, alone)
    expected = results(two_groups, alone, "--checkpoint best --split test")
    for devices in ("", SHARDED):
        found = results(two_groups, whole, f"--checkpoint best --split test {devices}")
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "place, options, same_as",
    [
        ("killed", SHARDED, "whole"),
        ("killed", ON_1, "alone"),
        ("half", f"--epochs 2 {SHARDED}", "alone"),
        ("in_shards", SHARDED, "whole"),
        ("in_shards", "--devices 4", "alone"),
        ("in_shards", "--devices 2 --sharded_checkpoint False", "alone"),
    ],
)
def test_sharded_run_goes_on_anywhere(place: str, options: str, same_as: str, two_groups, places: dict, tmp_path: Path):
    """On as many devices it is the same run, in each bit. Shards that a kill has left incomplete are replaced, and
    those that no checkpoint needs are deleted."""
    cwd = copied(places[place], tmp_path)
    for step in (newest(cwd) + 2, 1) if place == "in_shards" else ():
        folder = run_dir(cwd) / "checkpoints" / f"shards-{step:08d}-0123456789abcdef"
        folder.mkdir()
        (folder / "1.pt.tmp").write_bytes(b"incomplete")
    run(f"{two_groups}/train.py --resume auto {options}", cwd)
    (assert_same_run if same_as == "whole" else assert_same_training)(cwd, places[same_as])
    if place == "in_shards" and "False" not in options:
        assert shards_of(cwd) == [12, 14, 16]


def test_sharded_weights_that_are_not_finite_in_one_shard_are_not_saved(tmp_path: Path):
    program = with_recipe("sharded", tmp_path / "program")
    breaking = "next(model.parameters()).detach().to_local().fill_(math.nan)"
    insert_after(program, "step is done", f"if fabric.global_rank == 1 and step == 4:\n    {breaking}")
    done = run(f"{program}/{RUN} {SHARDED}", tmp_path, code=1)
    assert "not finite after step 4" in done.stderr and newest(tmp_path) == 2


# ---- sharded: how the model is built

# What constructors do beside `reset_parameters`.
CONSTRUCTOR = """
import torch

self.given = nn.Parameter(torch.arange(12.0) * torch.rand(12))
self.register_buffer("mask", torch.ones(7, 7).tril(), persistent=False)
nn.init.orthogonal_(self.layers[-1].weight)
"""
# The values, and the random numbers that follow.
BUILT = """
built = dict(model.module.named_buffers())
for name, value in model.module.named_parameters():
    built[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
torch.save(built | {"random": torch.rand(3)}, f"{fabric.global_rank}.pt")
"""
TURN = 'with open("turns", "a") as file:\n    file.write(f"{fabric.local_rank}")\n'


def test_sharded_any_constructor_gives_the_weights_that_it_gives_without_shards(tmp_path: Path):
    """In each bit, and the random numbers after it are the same, too. One process at a time has the whole model."""
    program = with_recipe("sharded", tmp_path / "program")
    insert_after(program, "layers", CONSTRUCTOR)
    insert_after(program, "set up model", BUILT)
    insert_before(program, ("sharded.py", "build", "model = build_model(*args)"), TURN)
    insert_after(program, ("sharded.py", "build", "shard(model, mesh)"), TURN)
    alone, sharded = folders(tmp_path, "alone", "sharded")
    call(f"{program}/{RUN} --max_steps 1", alone)
    run(f"{program}/{RUN} --max_steps 1 --devices 4 --strategy model_parallel", sharded)
    expected = torch.load(alone / "0.pt")
    for rank in range(4):
        torch.testing.assert_close(torch.load(sharded / f"{rank}.pt"), expected, atol=0, rtol=0)
    assert (sharded / "turns").read_text() == "00112233"


def test_sharded_parameters_that_it_would_untie_are_named(cwd: Path, program: Path):
    with_tied_weights(with_recipe("sharded", program))
    command = f"{program}/{RUN} --strategy model_parallel --devices 1"
    assert_one_line(run(command, cwd, code=1), "layers.2.weight: ")


# ---- sharded: checkpoints in shards


def shards_of(cwd: Path) -> list[int]:
    """The steps of the directories with shards."""
    return sorted(int(path.name.split("-")[1]) for path in run_dir(cwd).glob("checkpoints/shards-*"))


def test_in_shards_the_best_one_stays_and_is_evaluated(tmp_path: Path):
    """The best one, of the highest loss, is of step 8, and long pruned by then."""
    program = with_recipe("sharded", tmp_path / "program")
    replace(program, "values", '{"loss": (loss := F.cross_entropy(logits, targets)), "surprise": loss}')
    command = f"{program}/{RUN} --monitor val/surprise --monitor_mode max --num_checkpoint_keep 1 --devices 2"
    whole, shards = folders(tmp_path, "whole", "shards")
    run(f"{command} --strategy model_parallel", whole)
    run(f"{command} {IN_SHARDS}", shards)
    assert shards_of(shards) == [8, 16]
    expected = results(program, whole, "--checkpoint best --split test")
    for devices in ("", SHARDED):
        found = results(program, shards, f"--checkpoint best --split test {devices}")
        assert found == pytest.approx(expected, abs=1e-5)
        assert json.loads((run_dir(shards) / "test_test_best.json").read_text())["step"] == 8
    assert_same_run(whole, shards)


def flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What becomes of a shard, given one of another save.
DAMAGES = {
    "a bit": flip,
    "no shard": lambda path, other: path.unlink(),
    "of another save": lambda path, other: shutil.copy(other, path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_in_shards_damage_is_named_and_skipped(two_groups, places: dict, damage, tmp_path: Path):
    cwd = copied(places["in_shards"], tmp_path)
    step = newest(cwd)
    damage(*(next(run_dir(cwd).glob(f"checkpoints/shards-{number:08d}-*/1.pt")) for number in (step, step - 2)))
    printed = call(f"{two_groups}/train.py --resume auto {ON_1}", cwd).stdout
    assert f"step-{step:08d}.ckpt: it is damaged" in printed
    assert f"resumed from {run_dir(cwd).name}/checkpoints/step-{step - 2:08d}" in printed
    assert_same_training(cwd, places["alone"])


@pytest.mark.parametrize("is_best", [True, False])
def test_in_shards_those_of_a_file_that_cannot_be_read_are_kept(two_groups, places: dict, is_best: bool, tmp_path):
    cwd = copied(places["in_shards"], tmp_path)
    path = run_dir(cwd) / "checkpoints" / f"step-{newest(cwd):08d}.ckpt"
    folders = {each.name for each in path.parent.glob("shards-*")}
    (path.with_name("best.ckpt") if is_best else path).write_bytes(b"cut")
    imported(two_groups, "runtime/checkpoints").remove_old(run_dir(cwd), 0)
    assert {each.name for each in path.parent.glob("shards-*")} == folders
