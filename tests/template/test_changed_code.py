"""The code or the data was changed while a run was down: what still fits goes on, anything else is refused by name."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import zygote
from edits import POINTS, REPO, insert_before, replace
from helpers import (
    ON_2,
    SMALL,
    assert_same_run,
    assert_told_by_ranks,
    call,
    checkpoint,
    clean_environment,
    free_port,
    last_summary,
    refused,
    run,
    run_dir,
    start,
    weights,
    without_locks,
)
from test_state import LOOKAHEAD
from torch import nn

from config import TrainConfig
from runtime import checkpoints
from runtime.resume import restore_optimizer

CONSTANT = f"{SMALL} --lr_schedule constant --logger_name csv"
ADAMW = "torch.optim.AdamW({}, lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was never interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    call(f"train.py {CONSTANT} --epochs 3", cwd)
    return cwd


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run that goes on with --epochs 3."""
    call(f"train.py {CONSTANT} --epochs 1", tmp_path)
    return tmp_path


def refused_resume(program: Path, cwd: Path) -> str:
    """The one line of a resume that is refused, and changes nothing."""
    before = without_locks(run_dir(cwd))
    error = call(f"{program}/train.py --resume auto --epochs 3", cwd, code=2).stderr
    assert without_locks(run_dir(cwd)) == before
    assert error.startswith("train.py: error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "option, value", [("seed", "7"), ("monitor", "val/f1"), ("dropout", "0.1"), ("effective_batch_size", "32")]
)
def test_an_option_that_cannot_change_is_not_changed_in_config_yaml_either(option: str, value: str, stopped):
    """The checkpoint knows what it was trained with."""
    path = run_dir(stopped) / "config.yaml"
    path.write_text(re.sub(rf"^{option}: .*", f"{option}: {value}", path.read_text(), flags=re.MULTILINE))
    error = refused_resume(REPO, stopped)
    old = getattr(TrainConfig(), option)
    assert f"--{option} is {value}, but was {old} in {run_dir(stopped).name}/checkpoints/step-00000004.ckpt" in error


# ---- what fits


def described(model: nn.Module, parameters) -> tuple[torch.optim.Optimizer, list]:
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    return optimizer, checkpoints.describe_optimizers({"model": model, "optimizer": optimizer})["optimizer"]


def with_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter moments of its own."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()


def test_a_tied_parameter_has_one_name():
    """The first of its names, in whatever order the modules are."""
    found = []
    for names in (("encoder", "decoder"), ("decoder", "encoder")):
        layer = nn.Linear(2, 2, bias=False)
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        for name in names:
            model[name].weight = layer.weight
        found.append((model, *described(model, model.parameters())))
    (first, optimizer, then), (second, restored, now) = found
    assert [group["parameters"] for group in (*then, *now)] == [["model.decoder.weight (2, 2)"]] * 2
    with_steps(first, optimizer)
    restore_optimizer(restored, optimizer.state_dict(), now, then)
    moments = restored.state[second["encoder"].weight]
    assert torch.equal(moments["exp_avg"], optimizer.state[first["encoder"].weight]["exp_avg"])


def test_what_an_optimizer_keeps_in_a_group_stays_beside_a_setting_that_is_new():
    """As Prodigy its `d`, which is there from the beginning, or what comes with the first step."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    optimizer, then = described(model, [{"params": layer.parameters(), "d": 9} for layer in model])
    with_steps(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        group["d"] = group["later"] = number
    restored, now = described(model, [{"params": layer.parameters(), "d": 9, "new": True} for layer in model])
    restore_optimizer(restored, optimizer.state_dict(), now, then)
    assert [(group["d"], group["later"]) for group in restored.param_groups] == [(0, 0), (1, 1)]
    assert [group["new"] for group in restored.param_groups] == [True, True]
    for parameter in model.parameters():
        assert torch.equal(restored.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


# An optimizer's state knows the parameters by their numbers alone.
GROUPS = """[
    {"params": [*model.module.layers[0].parameters()], "lr": 0.1 * plan.peak_lr},
    {"params": [*model.module.layers[1:].parameters()], "weight_decay": 0.1},
]"""
LBFGS = "torch.optim.LBFGS({}, lr=plan.peak_lr)"
CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = compute_loss(model, batch, config)[0]["loss"]
    fabric.backward(loss)
    return loss

optimizer.step(closure)
"""
ORDERS = {  # of parameters or groups, then and now
    "parameters": (ADAMW.format("model.parameters()"), ADAMW.format("[*model.parameters()][::-1]")),
    "named parameters": (ADAMW.format("model.named_parameters()"), ADAMW.format("[*model.named_parameters()][::-1]")),
    "groups": (ADAMW.format(GROUPS), ADAMW.format(f"{GROUPS}[::-1]")),
    "LBFGS": (LBFGS.format("model.parameters()"), LBFGS.format("[*model.parameters()][::-1]")),
}


def assert_exact_if_resumed_by(then: Path, now: Path, tmp_path: Path, options: str = "") -> None:
    """The second program goes on with a run of the first, twice, to the same bits."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    command = f"train.py {CONSTANT} --log_interval 1 {options}"
    call(f"{then}/{command} --epochs 3", whole)
    call(f"{then}/{command} --epochs 1", resumed)
    for epochs in (2, 3):
        assert "resumed from" in call(f"{now}/train.py --resume auto --epochs {epochs}", resumed).stdout
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_or_groups_that_come_in_another_order_are_found_by_name(order: str, tmp_path):
    """And put into the order of the checkpoint, so sums over all of them are the same: the norm that clips, and those
    of LBFGS."""
    programs = [replace(tmp_path / f"program{number}", "optimizer", text) for number, text in enumerate(ORDERS[order])]
    if order == "LBFGS":
        for program in programs:
            replace(program, "optimizer steps", textwrap.indent(CLOSURE, 8 * " "))
    assert_exact_if_resumed_by(*programs, tmp_path, "" if order == "LBFGS" else "--max_grad_norm 0.1")


@pytest.mark.parametrize("optimizer", [ADAMW, LBFGS])
def test_layers_that_are_made_in_another_order_are_found_by_name(optimizer: str, tmp_path):
    """They are alike: by their number, each would get what belongs to the other."""
    layers = ["self.first = nn.Linear(10, 10)", "self.second = nn.Linear(10, 10)"]
    programs = [tmp_path / "then", tmp_path / "now"]
    for program, lines in zip(programs, (layers, layers[::-1]), strict=True):
        insert_before(program, "layers", "\n".join(lines))
        replace(program, "forward", "        return self.second(self.first(self.layers(images)))\n")
        replace(program, "optimizer", optimizer.format("model.parameters()"))
        if optimizer == LBFGS:
            replace(program, "optimizer steps", textwrap.indent(CLOSURE, 8 * " "))
    assert_exact_if_resumed_by(*programs, tmp_path, "" if optimizer == LBFGS else "--max_grad_norm 0.1")


OF_SET = """
names = set("left right top bottom front back".split())  # one of constants is cached in another order
print("made", *names)
self.parts = nn.ModuleDict({name: nn.Linear(10, 10) for name in names})
"""


def with_parts(program: Path) -> Path:
    """A program whose model has layers in the order of a set, which is another one in each process."""
    insert_before(program, "layers", OF_SET)
    of_parts = "sum(self.parts[name](features) * number for number, name in enumerate(sorted(self.parts)))"
    return replace(program, "forward", f"        features = self.layers(images)\n        return {of_parts}\n")


def test_layers_in_the_order_of_a_set_are_found_by_name(program, tmp_path):
    with_parts(program)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    command = f"{program}/train.py {CONSTANT} --log_interval 1 --max_grad_norm 0.1"
    run(f"{command} --epochs 2", whole, PYTHONHASHSEED="1")
    printed = [run(f"{command} --epochs 1", resumed, PYTHONHASHSEED="1").stdout]
    printed.append(run(f"{program}/train.py --resume auto --epochs 2", resumed, PYTHONHASHSEED="2").stdout)
    assert len({re.search("^made .*", text, re.MULTILINE)[0] for text in printed}) == 2
    assert_same_run(resumed, whole)


OF_OTHER_SHAPES = OF_SET.replace("nn.Linear(10, 10)", "nn.Linear(10, len(name))")
BUFFERS = """
for name in set("left right top bottom front back".split()):
    self.register_buffer(f"part_{name}", Tensor(len(name)).zero_(), persistent=False)
"""
IN_ANOTHER_ORDER = "sorted(model.parameters(), key=lambda parameter: hash(str(parameter.shape)))"
GROUPS = f"torch.optim.AdamW([{{'params': [parameter]}} for parameter in {IN_ANOTHER_ORDER}], lr=plan.peak_lr)"


@pytest.mark.parametrize(
    "point, code, place, name",
    [
        ("layers", OF_SET, "tensor 0", r"parts\.\w+\.weight \(10, 10\)"),
        ("layers", OF_OTHER_SHAPES, "tensor 0", r"parts\.\w+\.weight \(\d, 10\)"),
        ("layers", BUFFERS, r"tensor \d+", r"part_\w+ \(\d,\)"),
        ("optimizer", GROUPS, "tensor 0", r"model\.\w+\.\d\.\w+ \(.*?\)"),
    ],
    ids=["layers", "layers of other shapes", "buffers", "parameter groups"],
)
def test_the_order_of_a_set_is_refused_on_several_processes(
    point: str, code: str, place: str, name: str, program: Path, cwd: Path
):
    """DDP would add the gradient of one layer to that of another."""
    (replace if point == "optimizer" else insert_before)(program, point, code)
    command = f"{program}/train.py {CONSTANT} --strategy ddp --num_nodes 2 --devices 1"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(command, cwd, NODE_RANK=str(rank), PYTHONHASHSEED=str(rank + 1), **env) for rank in range(2)]
    names = rf"{name} on rank 1 \(.+\), {name} on rank 0"
    for rank, process in enumerate(ranks):
        error = process.communicate(timeout=300)[1]
        assert re.fullmatch(rf"train.py: error: rank {rank}: {place}: {names}; all ranks .* a set\?\n", error)
        assert process.returncode == 1
    assert not [*cwd.iterdir()]


def test_an_optimizer_with_a_state_dict_of_its_own_needs_the_same_order(tmp_path, cwd):
    """It may have lists in the order of its parameters."""
    programs = [tmp_path / "then", tmp_path / "now"]
    for program, parameters in zip(programs, ("model.parameters()", "[*model.parameters()][::-1]"), strict=True):
        insert_before(program, "functions", LOOKAHEAD)
        replace(program, "optimizer", ADAMW.format(parameters))
        replace(program, "set up optimizer", "fabric.setup_optimizers(Lookahead(optimizer))")
    call(f"{programs[0]}/train.py {CONSTANT} --epochs 1", cwd)
    error = refused_resume(programs[1], cwd)
    assert error.endswith(": an optimizer with a state_dict of its own has its parameters in another order\n")


def test_a_tensor_that_has_grown_is_restored(program, cwd):
    """It is not trained: its shape may depend on the step."""
    insert_before(program, "state", '"seen": torch.zeros(0),')
    insert_before(program, "step is done", 'state["seen"] = torch.cat([state["seen"], torch.tensor([float(step)])])')
    for epochs in (1, 2):
        call(f"{program}/train.py {CONSTANT} --resume auto --epochs {epochs}", cwd)
    assert checkpoint(cwd, "step-00000008")["seen"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_another_limit_of_a_validation_is_no_other_validation_set(stopped, whole):
    """The best value is then of other samples, which the user has asked for. The training is the same."""
    done = call("train.py --resume auto --epochs 3 --limit_val_batches 3", stopped)
    assert "--limit_val_batches 3 instead of 2\n" in done.stdout and " 192 validation samples\n" in done.stdout
    torch.testing.assert_close(weights(stopped), weights(whole), atol=0, rtol=0)


# ---- what does not fit


@pytest.mark.parametrize(
    "cut, words",
    [
        ("train = train[:700]", "train has 700 samples, but had 1217 in "),
        ("val = order[1080:]", "val has 717 samples, but had 200 in "),
    ],
)
def test_another_size_of_a_dataset_is_refused_with_both_numbers(cut: str, words: str, stopped, program):
    """A step would be another place in another epoch, and the best value one of other samples."""
    insert_before(program, "statistics", cut)
    error = refused_resume(program, stopped)
    place = f"{words}{run_dir(stopped).name}/checkpoints/step-00000004.ckpt"
    assert re.fullmatch(rf"train.py: error: --resume: {place}; changed since: .*data.py.*\n", error)


OTHER_GROUPS = "an optimizer has other parameter groups than in the checkpoint; other parameters: "


@pytest.mark.parametrize(
    "point, text, words",
    [
        ("first layer", "nn.Conv2d(channels, width, 5, padding=2),\n", "size mismatch for layers.0.weight"),
        (
            "optimizer",
            ADAMW.format("[*model.parameters()][1:]"),
            f"{OTHER_GROUPS}model.layers.0.weight (4, 1, 3, 3)\n",
        ),
        (
            "optimizer",
            ADAMW.format("[{'params': [*model.parameters()][:3]}, {'params': [*model.parameters()][3:]}]"),
            f"{OTHER_GROUPS}none\n",
        ),
        (
            "optimizer",
            "torch.optim.SGD(model.parameters(), momentum=0.9)",
            "an optimizer has class SGD, but AdamW in the checkpoint\n",
        ),
    ],
    ids=["another shape", "one is no longer trained", "two groups", "another class"],
)
def test_parameters_or_an_optimizer_that_do_not_fit_are_named(point: str, text: str, words: str, stopped, program):
    replace(program, point, text)
    error = refused_resume(program, stopped)
    assert words in error and "step-00000004.ckpt; changed since: " in error


def test_a_trained_tensor_of_another_shape_is_named(cwd, tmp_path):
    """One of a further module in `state`, behind the optimizer."""
    programs = []
    for size in (2, 3):
        program = replace(tmp_path / f"program{size}", "optimizer", ADAMW.format("[*model.parameters(), *scale]"))
        insert_before(program, "state", '"scale": scale,')
        insert_before(program, "set up model", f"scale = nn.ParameterList([torch.ones({size})])")
        programs.append(program)
    call(f"{programs[0]}/train.py {CONSTANT} --epochs 1", cwd)
    assert f"{OTHER_GROUPS}scale.0 (2,), scale.0 (3,)\n" in refused_resume(programs[1], cwd)


@pytest.mark.parametrize("is_new", [True, False])
def test_an_entry_with_a_state_dict_that_only_one_has_is_named(is_new: bool, program, cwd):
    insert_before(program, "state", '"second": nn.Linear(2, 2),')
    first, then = (REPO, program) if is_new else (program, REPO)
    call(f"{first}/train.py {CONSTANT} --epochs 1", cwd)
    error = refused_resume(then, cwd)
    assert ": second: in `state` or in the checkpoint, but not in both; rename it, or start a new run" in error


IN_NO_MODULE = "state['optimizer'] trains a parameter of the shape (3,) that is in no module of `state`"


def test_a_trained_parameter_that_is_not_in_state_is_refused_before_anything_is_written(program, cwd):
    replace(program, "optimizer", ADAMW.format("[*model.parameters(), nn.Parameter(torch.zeros(3))]"))
    assert IN_NO_MODULE in refused(f"{program}/train.py {SMALL}", cwd)


def test_a_trained_tensor_of_state_that_is_in_no_module_is_refused_before_anything_is_written(program, cwd):
    """DDP would not average its gradient, and no check of the weights would see it."""
    replace(program, "optimizer", ADAMW.format("[*model.parameters(), scale]"))
    insert_before(program, "state", '"scale": scale,')
    insert_before(program, "set up model", "scale = nn.Parameter(torch.ones(3))")
    assert IN_NO_MODULE in refused(f"{program}/train.py {SMALL}", cwd)


TOO_EARLY = f"{POINTS['backward'][2]}; optimizer.step(); optimizer.zero_grad()"


@pytest.mark.parametrize("options, code", [("", "pass"), (ON_2, "pass"), ("--fast_run", "pass"), ("", TOO_EARLY)])
def test_a_first_step_without_gradients_is_refused_before_anything_is_written(options: str, code: str, program, cwd):
    replace(program, "backward", code)
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    words = (
        "nothing has a gradient after the first backward passes: is `fabric.backward` called, and `zero_grad` only "
        "before all micro-batches?"
    )
    if options == ON_2:
        assert_told_by_ranks(error, words)
    else:
        assert error == f"train.py: error: {words}\n"


def test_functional_call_on_the_model_of_the_loop_is_refused_in_the_first_step(program, cwd):
    """Fabric's module registers the model under two names, so the given weights would stay in it."""
    given = "{name: 1.0 * parameter for name, parameter in model.named_parameters()}"
    functional = f"torch.func.functional_call(model, {given}, images) if model.training else model(images)"
    replace(program, "logits", f"logits = {functional}")
    error = refused(f"{program}/train.py {SMALL}", cwd)
    assert "in no module of `state`: add a module that has it; call functional_call with model.module" in error


# ---- best.ckpt, older checkpoints


def test_a_resume_without_further_checkpoints_still_keeps_the_best(tmp_path):
    call(f"train.py {CONSTANT} --epochs 1", tmp_path)
    call("train.py --resume auto --epochs 4 --checkpoint_frequency 0", tmp_path)
    assert checkpoint(tmp_path, "best")["step"] == last_summary(tmp_path)["best_step"] > 4


def test_a_checkpoint_of_another_version_is_refused_with_the_code_that_goes_on(program, tmp_path):
    """The run has a copy of the code that it was begun with."""
    replace(program, "format", "FORMAT = 3")
    (tmp_path / "options.yaml").write_text("root_dir: my runs\n")
    call(f"{program}/train.py {CONSTANT} --epochs 1 --config_path options.yaml", tmp_path)
    before = without_locks(tmp_path)
    error = call("train.py --config_path options.yaml --resume auto --epochs 3", tmp_path, code=2).stderr
    assert without_locks(tmp_path) == before
    path, code = re.fullmatch(
        "train.py: error: --resume: (.+) is of another version of the template: go on with the code in (.+)\n", error
    ).groups()
    folder = run_dir(tmp_path / "my runs").relative_to(tmp_path)
    assert path == f"{folder}/checkpoints/step-00000004.ckpt"
    words = [sys.executable, f"{code}/train.py", "--resume", str(folder), "--epochs", "3"]
    pipe = subprocess.PIPE
    process = zygote.popen(words, clean_environment(), cwd=tmp_path, stdout=pipe, text=True, start_new_session=True)
    printed, _ = process.communicate(timeout=300)
    assert f"resumed from {path}\n" in printed and "finished after 12 of 12 steps" in printed
    assert process.returncode == 0


def test_a_checkpoint_of_another_version_is_evaluated(tmp_path):
    """What a resume needs beside the weights may have changed."""
    call(f"train.py {CONSTANT} --epochs 1", tmp_path)
    test = "test.py --accelerator cpu --checkpoint last"
    expected = call(test, tmp_path).stdout
    for path in run_dir(tmp_path).glob("checkpoints/*"):
        saved = torch.load(path, weights_only=True)
        saved["checkpoint"]["format"] = 3
        torch.save(saved, path)
    assert call(test, tmp_path).stdout == expected and "accuracy" in expected
