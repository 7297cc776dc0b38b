"""What stands in `state` is saved, restored, counted and checked; and what a resume may change beside it."""

import re
import signal
from pathlib import Path

import pytest
import torch
from edits import insert_after, insert_before, replace, with_text
from helpers import (
    ON_2,
    SMALL,
    assert_same_run,
    call,
    checkpoint,
    ended_and_resumed,
    kill_group,
    last_summary,
    refused,
    run,
    run_dir,
    snapshot,
    start,
    start_two,
    wait_for,
    weights,
    without_locks,
)

CONSTANT = f"{SMALL} --lr_schedule constant --log_interval 1 --logger_name csv"

# A second model with an optimizer of its own, trained beside the first.
CRITIC = """
critic = fabric.setup_module(build_model(config, train_set))
critic_optimizer = fabric.setup_optimizers(torch.optim.SGD(critic.parameters(), LR, 0.9))
"""
CRITIC_STATE = """
"critic": critic,
"critic_optimizer": critic_optimizer,
"""
CRITIC_LOSS = """
fabric.backward(compute_loss(critic, batch, config)[0]["loss"])
"""
CRITIC_STEP = """
critic_optimizer.step()
critic_optimizer.zero_grad()
"""

# Lookahead (Zhang et al. 2019, arXiv:1907.08610): every third step it goes half of the way from the slow weights, which
# it copies from the model at the beginning, to where its inner optimizer is.
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.state, self.defaults = inner, inner.state, inner.defaults
        self.param_groups, self.count = inner.param_groups, 0
        self.parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.parameters]

    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.parameters):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.slow, self.count = state["slow"], state["count"]


"""


# ---- models and optimizers


def with_critic(program: Path, lr: str) -> None:
    insert_after(program, "set-up is done", CRITIC.replace("LR", lr))
    insert_before(program, "state", CRITIC_STATE)
    insert_after(program, "micro-batch is done", CRITIC_LOSS)
    insert_after(program, "optimizer steps", CRITIC_STEP)


def test_two_models_and_two_optimizers(program: Path, tmp_path: Path):
    """All are saved and restored: also those that no line of runtime/ knows."""
    with_critic(program, lr="0.01")
    folders = ended_and_resumed(f"{program}/train.py {CONSTANT} --width 32", tmp_path)
    expected, saved = (checkpoint(folder, "step-00000016") for folder in folders)
    for name in ("model", "critic"):
        torch.testing.assert_close(saved[name], expected[name], atol=0, rtol=0)
    for name in ("optimizer", "critic_optimizer"):
        torch.testing.assert_close(saved[name]["state"], expected[name]["state"], atol=0, rtol=0)
        assert saved[name]["state"]
    assert not torch.equal(saved["model"]["layers.0.weight"], saved["critic"]["layers.0.weight"])


def test_a_tensor_that_comes_into_state_later_is_new(program: Path, cwd: Path):
    call(f"train.py {CONSTANT} --epochs 1", cwd)
    insert_before(program, "state", '"counted": torch.zeros(3),')
    output = call(f"{program}/train.py --resume auto --epochs 2", cwd).stdout
    assert "state['counted'] is not in the checkpoint, and new" in output and "state['model']" not in output


def test_the_second_model_is_checked_to_be_finite(program: Path, cwd: Path):
    with_critic(program, lr='float("nan")')
    error = call(f"{program}/train.py {CONSTANT}", cwd, code=1).stderr
    assert "the weights are not finite after step 4" in error
    assert list((run_dir(cwd) / "checkpoints").iterdir()) == []


def test_an_optimizer_with_state_of_its_own(program: Path, tmp_path: Path, cwd: Path):
    """Its slow weights are those of the model at the beginning. The run was killed before it had a checkpoint, and goes
    on in another precision: it begins again, with nothing of what the other precision had made."""
    insert_before(program, "functions", LOOKAHEAD)
    replace(program, "set up optimizer", "fabric.setup_optimizers(Lookahead(optimizer))")
    options = f"{program}/train.py {CONSTANT} --checkpoint_frequency 0"
    whole = tmp_path / "whole"
    whole.mkdir()
    call(f"{options} --max_steps 22", whole)
    process = start(f"{options} --max_steps 1000000 --precision bf16-true", cwd)
    wait_for(lambda: process.poll() is not None or any(file.read_text().count("\n") > 9 for file in cwd.rglob("*.csv")))
    kill_group(process)
    assert process.communicate() and process.returncode == -signal.SIGKILL
    assert list((run_dir(cwd) / "checkpoints").iterdir()) == []
    for steps in (12, 22):  # the second resume has a checkpoint
        call(f"{program}/train.py --resume auto --precision 32-true --max_steps {steps}", cwd)
    assert_same_run(cwd, whole)
    saved, expected = (checkpoint(folder, "step-00000022")["optimizer"] for folder in (cwd, whole))
    torch.testing.assert_close(saved["slow"], expected["slow"], atol=0, rtol=0)


ADAMW = "torch.optim.AdamW({}, weight_decay=config.weight_decay)"
SETTINGS = "model.parameters(), lr=plan.peak_lr, fused=True"


@pytest.mark.parametrize(
    "then, now, options, words",
    [
        (SETTINGS, SETTINGS, "--weight_decay 0.5", "weight_decay 0.5, but 0.01"),
        (SETTINGS, f"{SETTINGS}, betas=(0.8, 0.9)", "", "betas (0.8, 0.9), but (0.9, 0.999)"),
    ],
    ids=["weight_decay", "betas"],
)
@pytest.mark.parametrize("devices", ["", ON_2])
@pytest.mark.parametrize("has_tools", [True, False])
def test_another_setting_of_the_optimizer_is_refused_and_changes_nothing(
    then: str, now: str, options: str, words: str, has_tools: bool, devices: str, tmp_path: Path, cwd: Path
):
    """The checkpoint has settings, too, and a scheduler may have changed them: which should win? A fork takes them."""
    first, second = (
        replace(tmp_path / name, "optimizer", ADAMW.format(text)) for name, text in (("first", then), ("second", now))
    )
    hint = ""
    if has_tools:
        (second / "tools").mkdir()
        (second / "tools" / "fork.py").touch()
        hint = "; tools/fork.py begins a new run with it"
    call(f"{first}/train.py {CONSTANT} --epochs 1", cwd)
    before = without_locks(cwd)
    how = run if devices else call
    error = how(f"{second}/train.py --resume auto --epochs 2 {options} {devices}", cwd, code=2).stderr
    end = f": an optimizer has {words} in the checkpoint{hint}"
    told = [line for line in error.splitlines() if line.endswith(end)]
    assert told == error.splitlines() and told[0].startswith("train.py: error: ")
    assert without_locks(cwd) == before


def test_how_a_step_is_computed_and_at_which_rate_may_change(program: Path, cwd: Path):
    """They are then as the code and the options ask for: the checkpoint has them, too."""
    call(f"train.py {CONSTANT} --epochs 1", cwd)
    before = checkpoint(cwd, "step-00000004")["optimizer"]["param_groups"][0]
    replace(program, "optimizer", ADAMW.format("model.parameters(), lr=plan.peak_lr, foreach=True"))
    call(f"{program}/train.py --resume auto --epochs 2 --base_lr 0.001", cwd)
    after = checkpoint(cwd, "step-00000008")["optimizer"]["param_groups"][0]
    changed = {name: after[name] for name in after if after[name] != before[name]}
    assert changed == {"fused": None, "foreach": True, "lr": 0.001, "initial_lr": 0.001}


# The first layer has a rate of its own; the second a part of that of the others.
GROUPS = """[
    {"params": model.module.layers[0].parameters(), "lr": 1e-6},
    {"params": model.module.layers[2].parameters(), "lr": 0.1 * plan.peak_lr},
    {"params": model.module.layers[4:].parameters()},
], lr=plan.peak_lr"""


def rates(cwd: Path, step: int) -> list[float]:
    return [group["lr"] for group in checkpoint(cwd, f"step-{step:08d}")["optimizer"]["param_groups"]]


def test_a_group_keeps_the_rate_that_it_was_built_with_times_the_factor_of_the_step(program: Path, tmp_path: Path):
    """With the same bits after a resume."""
    replace(program, "optimizer", ADAMW.format(GROUPS))
    whole, resumed = ended_and_resumed(
        f"{program}/train.py {CONSTANT} --warmup_epochs 2 --num_checkpoint_keep 0", tmp_path
    )
    for step, factor in ((4, 4 / 9), (8, 8 / 9), (12, 1)):
        assert rates(whole, step) == pytest.approx([factor * rate for rate in (1e-6, 4e-4, 4e-3)], rel=1e-12)
    assert rates(resumed, 12) == rates(whole, 12)


def test_on_a_resume_the_rates_are_those_of_the_code_and_the_options(tmp_path: Path, cwd: Path):
    """Another --base_lr holds for the groups that are built with it."""
    first, second = (replace(tmp_path / name, "optimizer", ADAMW.format(GROUPS)) for name in ("first", "second"))
    with_text(second, "train.py", ('"lr": 0.1 * plan.peak_lr', '"lr": 0.4 * plan.peak_lr'))
    call(f"{first}/train.py {CONSTANT} --epochs 1", cwd)
    call(f"{first}/train.py --resume auto --epochs 2 --base_lr 0.001", cwd)
    assert rates(cwd, 8) == pytest.approx([1e-6, 1e-4, 1e-3], rel=1e-12)
    call(f"{second}/train.py --resume auto --epochs 3", cwd)
    assert rates(cwd, 12) == pytest.approx([1e-6, 4e-4, 1e-3], rel=1e-12)


# Sets the rates of its groups, their limits, and the first of their betas.
ONE_CYCLE = "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.base_lr, 40)"


def test_a_scheduler_in_state_is_resumed_whatever_it_sets_in_the_groups(program: Path, tmp_path: Path):
    """With more epochs, within its length."""
    replace(program, "optimizer", f"{ADAMW.format(SETTINGS)}\n    {ONE_CYCLE}")
    insert_before(program, "state", '"scheduler": scheduler,')
    replace(program, "learning rate", "")
    insert_after(program, "optimizer steps", "scheduler.step()")
    folders = ended_and_resumed(f"{program}/train.py {CONSTANT}", tmp_path)
    (expected,), (now,) = (checkpoint(folder, "step-00000016")["optimizer"]["param_groups"] for folder in folders)
    assert now == expected and now["betas"][0] < 0.95


# Each training image gets a constant, by a view of a tensor in `state`.
OFFSET = """
counts = torch.zeros(2)
offset = counts[:1]
fetch = train_set.__getitems__

def brighter(indices):
    images, targets = fetch(indices)
    return images + offset, targets

train_set.__getitems__ = brighter
"""


def test_a_tensor_is_restored_in_place_so_a_view_that_a_dataset_has_of_it_sees_that(program: Path, tmp_path: Path):
    insert_after(program, "set-up is done", OFFSET)
    insert_before(program, "state", '"counts": counts,')
    insert_after(program, "step is done", 'counts += torch.tensor([0.01, 1.0])\nassert state["counts"] is counts')
    _, resumed = ended_and_resumed(f"{program}/train.py {CONSTANT}", tmp_path)
    assert checkpoint(resumed, "step-00000016")["counts"].tolist() == pytest.approx([0.16, 16])
    call(f"train.py {CONSTANT} --epochs 4 --out_dir plain", tmp_path)
    plain = weights(tmp_path, "plain")
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in weights(resumed).items())


@pytest.mark.parametrize("value", ["torch.ones(2)", "torch.ones(3, dtype=torch.int64)", "[1.0, 1.0, 1.0]"])
def test_a_tensor_of_another_shape_or_type_is_replaced_by_what_the_checkpoint_has(
    value: str, tmp_path: Path, cwd: Path
):
    insert_before(tmp_path / "first", "state", f'"counts": {value},')
    call(f"{tmp_path}/first/train.py {CONSTANT} --epochs 1", cwd)
    insert_before(tmp_path / "second", "state", '"counts": torch.zeros(3),')
    insert_before(tmp_path / "second", "loop begins", 'print("counts", state["counts"])')
    printed = call(f"{tmp_path}/second/train.py --resume auto --epochs 2", cwd).stdout
    assert f"\ncounts {eval(value)}\n" in printed


def test_gradients_are_zeroed_before_the_micro_batches(program: Path, tmp_path: Path, cwd: Path):
    """What an edit leaves in them after a step, or before the first one, is in no step."""
    again = 'fabric.backward(compute_loss(model, batch, config)[0]["loss"])'
    insert_after(program, "optimizer steps", again)
    insert_before(program, "loop begins", "batch = next(iter(val_loader))\n" + again)
    whole = tmp_path / "whole"
    whole.mkdir()
    call(f"train.py {CONSTANT} --micro_batch_size 32", whole)
    call(f"{program}/train.py {CONSTANT} --micro_batch_size 32", cwd)
    assert_same_run(cwd, whole)


def test_a_tensor_is_restored_under_every_name(program: Path, tmp_path: Path):
    """The loop adds to the tensor, and does not take it from `state` again."""
    insert_after(program, "set-up is done", "seen = torch.zeros(10)")
    insert_before(program, "state", '"seen": seen,')
    insert_after(program, "micro-batch is done", "seen += torch.bincount(batch[1], minlength=10)")
    whole, resumed = ended_and_resumed(f"{program}/train.py {CONSTANT}", tmp_path)
    counted, expected = (checkpoint(folder, "step-00000016")["seen"] for folder in (resumed, whole))
    assert torch.equal(counted, expected) and expected.sum() == 16 * checkpoint(whole, "best")["micro_batch_size"]


def test_a_model_that_is_saved_under_other_names_than_it_is_loaded_fails_in_a_rehearsal(program: Path, cwd: Path):
    """A copy of the module that Fabric has wrapped has another one inside, which gives its own names."""
    insert_before(program, "state", '"averaged": torch.optim.swa_utils.AveragedModel(model),')
    error = refused(f"{program}/train.py {SMALL} --fast_run", cwd, code=2)
    assert 'Missing key(s) in state_dict: "module._forward_module' in error and error.count("\n") == 1


def test_an_entry_of_state_that_comes_after_the_restore_is_told_before_anything_is_written(program: Path, cwd: Path):
    """It would be saved, but a resume would silently begin it anew."""
    insert_before(program, "loop begins", 'state["seen"] = torch.zeros(1)')
    error = refused(f"{program}/train.py {SMALL}", cwd)
    assert "state: seen came after `run.prepare()`, so a resume would not restore it" in error


@pytest.mark.parametrize(
    "scheduler, options, words",
    [
        ("CosineAnnealingLR(optimizer, plan.total_steps)", "", "T_max 8, but had 4: "),
        ("StepLR(optimizer, 7)", "--base_lr 1", "base_lrs [1.0], but had [0.004]: "),
    ],
)
def test_a_scheduler_of_torch_with_other_settings_is_refused_in_a_resume(
    scheduler: str, options: str, words: str, program: Path, cwd: Path
):
    """Its saved ones would win: the rate of a longer run would climb again."""
    insert_after(program, "set-up is done", f"scheduler = torch.optim.lr_scheduler.{scheduler}")
    insert_before(program, "state", '"scheduler": scheduler,')
    call(f"{program}/train.py {SMALL} --epochs 1", cwd)
    error = call(f"{program}/train.py --resume auto --epochs 2 {options}", cwd, code=2).stderr
    assert f"state['scheduler'] is built with {words}" in error and error.count("\n") == 1


def test_weights_that_differ_between_the_ranks_are_not_saved(program: Path, cwd: Path):
    """DDP knows nothing of what was frozen when it was set up: each rank would train it alone."""
    insert_before(program, "set up model", "model.layers[0].requires_grad_(False)")
    insert_after(program, "step is done", "model.module.layers[0].requires_grad_(step > 4)")
    error = run(f"{program}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    assert re.search("after step 8, weights are those of rank 0: False on rank 1 .*, True on rank 0: do random", error)
    assert [path.name for path in sorted((run_dir(cwd) / "checkpoints").iterdir())] == [
        "best.ckpt",
        "step-00000004.ckpt",
    ]


@pytest.mark.parametrize("change", ["[0, 0] += 1e-6 * rank", "[0] += rank * torch.tensor([1e-3, -1e-3] + [0.0] * 30)"])
def test_weights_that_differ_between_the_ranks_by_hardly_anything_are_not_saved(change: str, program: Path, cwd: Path):
    """A norm would not show it."""
    layer = "model.module.layers[-1].weight.data"
    insert_after(program, "step is done", f"rank = fabric.global_rank\nif step == 4: {layer}{change}")
    error = run(f"{program}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    words = r"after step 4, checksum of model\.layers\.\d\.weight \(10, 32\): -?\d+ on rank 1 .*, -?\d+ on "
    assert re.search(words, error)
    assert not [*(run_dir(cwd) / "checkpoints").iterdir()]


def test_weights_that_differ_between_the_ranks_are_noticed_in_bf16_true(program: Path, cwd: Path):
    """A norm that is added up in bfloat16 has three digits, and would not show it."""
    spoil = "if step == 4: model.module.layers[0].weight.data[0].add_(0.004 * fabric.global_rank)"
    insert_after(program, "step is done", spoil)
    error = run(f"{program}/train.py {SMALL} {ON_2} --precision bf16-true", cwd, code=1).stderr
    assert re.search("after step 4, weights are those of rank 0: False on rank 1 .*, True on rank 0: do random", error)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_single_weight_that_is_not_finite_is_never_saved(value: str, program: Path, cwd: Path):
    insert_after(program, "step is done", f"if step == 4: model.module.layers[0].weight.data[0, 0, 0, 0] = {value}")
    insert_before(program, "set up model", "from math import inf, nan")
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert "the weights are not finite after step 4: model.layers.0.weight (4, 1, 3, 3)" in error
    assert not [*(run_dir(cwd) / "checkpoints").iterdir()]


def test_weights_of_rank_0_that_are_not_finite_end_all_ranks_alike(program: Path, cwd: Path):
    spoil = "if step == 8 and fabric.global_rank == 0: model.module.layers[0].weight.data.fill_(float('nan'))"
    insert_after(program, "step is done", spoil)
    for rank, process in enumerate(start_two([f"{program}/train.py {SMALL} --strategy ddp"] * 2, cwd)):
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 1
        (line,) = [line for line in error.splitlines() if "error: " in line]
        words = f"rank {rank}: the weights are not finite after step 8: model.layers.0.weight (4, 1, 3, 3)"
        assert line.split("; ")[0] == f"train.py: error: {words}"
    assert not (run_dir(cwd) / "checkpoints" / "step-00000008.ckpt").exists()


# ---- a validation that changes the model

COUNTS = """
self.register_buffer("calls", Tensor(1).zero_())
self.register_forward_pre_hook(lambda model, images: model.calls.add_(1) and None)
"""
# As an adapter of low rank, which is merged into the weight for an evaluation: with rounding, each time.
MERGES = """
class Merges(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.down = nn.Parameter(torch.randn(2, self.in_features))
        self.up = nn.Parameter(torch.randn(self.out_features, 2))

    def forward(self, features):
        weight = self.weight + self.up @ self.down if self.training else self.weight
        return F.linear(features, weight, self.bias)

    def train(self, mode=True):
        if mode != self.training:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).detach()
        return super().train(mode)


"""


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_a_first_validation_that_changes_the_model_leaves_a_resume_exact(devices: str, program: Path, tmp_path: Path):
    """Each process has one."""
    insert_before(program, "layers", COUNTS)
    insert_before(program, "functions", MERGES)
    insert_before(program, "set up model", "model.layers[-1] = Merges(model.layers[-1].in_features, 10)")
    whole, _ = ended_and_resumed(f"{program}/train.py {CONSTANT} {devices}", tmp_path)
    calls = checkpoint(whole, "step-00000016")["model"]["calls"].item()
    assert calls == 1 + 16 + 4 * 2, "of the first validation, the training and the validations"


def test_a_metric_that_has_another_name_on_a_resume_is_told_before_anything_is_trained(program: Path, cwd: Path):
    """Though the first validation comes before the state is restored."""
    call(f"train.py {SMALL} --max_steps 4", cwd)
    replace(program, "metrics", '{"top1": accuracy}')
    insert_before(program, "optimizer steps", 'print("trained")')
    before = without_locks(run_dir(cwd))
    done = call(f"{program}/train.py --resume auto --max_steps 8", cwd, code=2)
    assert "--monitor val/accuracy: choose from train/loss, train/grad_norm, val/loss, val/top1" in done.stderr
    assert "trained" not in done.stdout and without_locks(run_dir(cwd)) == before


# ---- what the loop holds


def test_the_outputs_of_compute_loss_are_freed_before_the_backward_pass(program: Path, cwd: Path):
    """The logits of a language model are the largest of all tensors, and its loss may not need them any more."""
    insert_before(program, "functions", "import weakref\n\nSEEN = []\n\n\n")
    replace(
        program, "values", '{"loss": F.cross_entropy(logits, targets), "one": SEEN.append(weakref.ref(logits)) or 1}'
    )
    replace(program, "backward", 'print("freed:", SEEN[-1]() is None) or fabric.backward(values["loss"])')
    assert call(f"{program}/train.py {CONSTANT} --max_steps 2", cwd).stdout.count("freed: True\n") == 2


# ---- plain values


ADVICE = "use tensors, numbers, strings, lists and dicts of them; what has a state_dict needs an entry of its own"
# Its state_dict has what a checkpoint cannot hold.
KEEPS = """
class Keeps:
    def state_dict(self):
        return {"recent": __import__("collections").deque()}

    def load_state_dict(self, state):
        pass


"""


@pytest.mark.parametrize(
    "entry, words",
    [
        ('"recent": __import__("collections").deque(),', "state['recent'] has .* (collections.deque)"),
        ('"seen": {"losses": [1.0, __import__("numpy").float64(1)]},', "state['seen'] has .*multiarray.scalar)"),
        ('"critics": [nn.Linear(2, 2)],', "state['critics'] has .* (torch.nn.modules.linear.Linear)"),
        ('"critics": {"one": optimizer},', "state['critics'] has .*FabricAdamW"),
        ('"keeps": Keeps(),', "state['keeps'] has .* (collections.deque)"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_before_training(entry: str, words: str, program: Path, cwd: Path):
    insert_before(program, "functions", KEEPS)
    insert_before(program, "state", entry)
    error = refused(f"{program}/train.py {SMALL}", cwd)
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), error) and ADVICE in error
    assert error.count("\n") == 1 and "--resume" not in error


def test_what_comes_into_state_later_is_named_at_the_next_save(program: Path, cwd: Path):
    insert_before(program, "state", '"seen": {"file": ""},')
    insert_after(program, "step is done", 'state["seen"]["file"] = run.directory.path if step > 4 else ""')
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert "state['seen'] has what a checkpoint cannot hold (pathlib" in error and "Traceback" not in error
    assert f"--resume {run_dir(cwd).name}" in error
    assert checkpoint(cwd, "step-00000004")["seen"] == {"file": ""}


@pytest.mark.parametrize(
    "name", ["checkpoint", "ended", "last", "micro_batch_size", "parameters", "precision", "seconds", "state"]
)
def test_a_name_that_a_checkpoint_or_the_summary_needs_is_refused(name: str, program: Path, cwd: Path):
    """What a run has under that name would be silently replaced."""
    insert_before(program, "state", f'"{name}": 1.5,')
    error = refused(f"{program}/train.py {SMALL}", cwd)
    assert error == f"train.py: error: state['{name}']: each run has its own value of this name; choose another\n"


def test_of_a_part_of_a_tensor_the_part_is_saved_and_of_a_shared_one_all_once(program: Path, cwd: Path):
    """16 MB lie behind each of two single numbers, and two names have the same 1 MB."""
    insert_before(program, "layers", 'self.register_buffer("first", Tensor(4_000_000).zero_()[:1])')
    insert_before(program, "layers", "self.shared = nn.ModuleList([nn.Linear(500, 500)] * 2)")
    insert_before(program, "state", '"second": torch.zeros(4_000_000)[:1],')
    call(f"{program}/train.py {CONSTANT} --epochs 1", cwd)
    (path,) = run_dir(cwd).glob("checkpoints/step-*")
    assert 1_000_000 < path.stat().st_size < 1_500_000


def test_a_sparse_tensor_is_saved_and_restored(program: Path, cwd: Path):
    """As the graph that a model works on."""
    insert_before(program, "layers", 'self.register_buffer("graph", Tensor([[0, 3], [0, 0]]).to_sparse())')
    insert_before(program, "state", '"pairs": torch.eye(2).to_sparse(),')
    for epochs in (1, 2):
        call(f"{program}/train.py {CONSTANT} --resume auto --epochs {epochs}", cwd)
    saved = checkpoint(cwd, "step-00000008")
    assert saved["model"]["graph"].to_dense().tolist() == [[0, 3], [0, 0]]
    assert saved["pairs"].to_dense().tolist() == [[1, 0], [0, 1]]


def test_the_first_checkpoint_is_read_back(program: Path, cwd: Path):
    """What tensors are is not looked at before. torch says what it does not load."""
    insert_before(program, "functions", "class Own(torch.Tensor):\n    pass\n\n\n")
    insert_before(program, "state", '"own": torch.zeros(2).as_subclass(Own),')
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert "_pickle.UnpicklingError: Weights only load failed." in error and "Own" in error
    assert "--resume" not in error and list(run_dir(cwd).glob("checkpoints/*")) == []


# ---- what another command line changes


@pytest.mark.parametrize(
    "monitor, refused", [("val/loss", "--monitor val/loss"), ("val/accuracy", "--monitor_mode min")]
)
def test_another_monitor_is_refused_and_changes_nothing(monitor: str, refused: str, cwd: Path):
    """What is best of one value says nothing of another."""
    call(f"train.py {SMALL} --epochs 1", cwd)
    before = snapshot(cwd)
    options = f"--monitor {monitor} --monitor_mode min"
    error = call(f"train.py --resume auto --epochs 2 {options}", cwd, code=2).stderr
    assert re.fullmatch(rf"train.py: error: {refused}: a resume cannot change it; .* was trained with .*\n", error)
    assert snapshot(cwd) == before


def test_after_out_of_memory_the_advice_can_be_followed(program: Path, cwd: Path):
    """Memory runs out once there is a checkpoint, until micro-batches have 16 samples."""
    is_full = 'model.training and len(targets) > 16 and [*__import__("pathlib").Path().glob("*/checkpoints/step-*")]'
    insert_after(program, "batch", f'if {is_full}:\n    raise torch.OutOfMemoryError("CUDA out of memory")')
    error = call(f"{program}/train.py {CONSTANT}", cwd, code=1).stderr
    for size in (32, 16):
        assert "try a smaller --micro_batch_size" in error.splitlines()[-1]
        done = call(f"{program}/train.py --resume auto --micro_batch_size {size}", cwd, code=1 if size == 32 else 0)
        assert f"micro_batch_size {size} instead of 64" in done.stdout
        error = done.stderr
    assert "finished after 20 of 20 steps" in done.stdout
    assert (last_summary(cwd)["step"], last_summary(cwd)["micro_batch_size"]) == (20, 16)


# ---- a rehearsal

# Whatever it takes, it cannot be loaded.
BREAKS = """
class Breaks:
    def state_dict(self):
        return {"number": 1}

    def load_state_dict(self, state):
        raise KeyError("no such number")


"""
WAITS = """
if step == STEP:
    print("waiting", flush=True)
    while not run.signals.received:
        __import__("time").sleep(0.02)
"""
REHEARSAL = f"train.py {SMALL} --fast_run 4"


def test_what_can_be_saved_and_not_loaded_shows_in_a_rehearsal(program: Path, cwd: Path):
    """Which leaves nothing behind, as without the mistake."""
    insert_before(program, "functions", BREAKS)
    insert_before(program, "state", '"own": Breaks(),')
    error = refused(f"{program}/{REHEARSAL}", cwd)
    assert "Traceback" in error and "KeyError: 'no such number'" in error and "--resume" not in error


def test_what_is_not_restored_shows_in_a_rehearsal(program: Path, cwd: Path):
    """The second half does not go on with the modules of the first."""
    insert_before(program, "loop begins", 'print("seen", state["seen"], int(model.module.seen))')
    insert_before(program, "layers", 'self.register_buffer("seen", Tensor(1).zero_(), persistent=False)')
    insert_before(program, "state", '"seen": 0,')
    insert_after(program, "step is done", 'state["seen"] += 1; model.module.seen += 1')
    printed = call(f"{program}/{REHEARSAL}", cwd).stdout
    assert re.findall("^seen .*", printed, re.MULTILINE) == ["seen 0 0", "seen 2 0"]


@pytest.mark.parametrize("out_dir", ["runs/mine", "{cwd}/runs/mine"])
def test_a_rehearsal_leaves_nothing_behind_wherever_the_run_would_be(out_dir: str, cwd: Path):
    call(f"{REHEARSAL} --out_dir {out_dir.format(cwd=cwd)}", cwd)
    assert list(cwd.iterdir()) == []


STOPPED = "train.py: error: --fast_run was stopped by a signal, and leaves nothing behind\n"


BUILDS = """
if bool([*__import__("pathlib").Path().glob(".fast_run-*/2*")]) == IS_SECOND:
    print("waiting", flush=True)
    while True:  # signal.pause() could begin just after the signal has come
        __import__("time").sleep(0.02)
"""
STOPPED_IN = {
    "first datasets": ("digits", BUILDS.replace("IS_SECOND", "False")),
    "first step": ("step is done", WAITS.replace("STEP", "1")),
    "second datasets": ("digits", BUILDS.replace("IS_SECOND", "True")),
    "third step": ("step is done", WAITS.replace("STEP", "3")),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", STOPPED_IN)
def test_a_rehearsal_that_is_stopped_leaves_nothing_behind(place: str, number: int, program: Path, cwd: Path):
    """In its first half, or in its second; also while it builds the datasets, which may take minutes."""
    point, code = STOPPED_IN[place]
    (insert_before if point == "digits" else insert_after)(program, point, code)
    process = start(f"{program}/{REHEARSAL}", cwd)
    assert any("waiting" in line for line in process.stdout)
    assert [path.name.startswith(".fast_run-") for path in cwd.iterdir()] == [True]
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert error == STOPPED and process.returncode == 1
    assert list(cwd.iterdir()) == []


def test_a_rehearsal_that_is_killed_is_never_resumed(program: Path, cwd: Path):
    """Its folder stays. The run that begins then is a new one."""
    insert_after(program, "step is done", WAITS.replace("STEP", "3"))
    process = start(f"{program}/{REHEARSAL}", cwd)
    assert any("waiting" in line for line in process.stdout)
    kill_group(process)
    assert process.communicate() and process.returncode == -signal.SIGKILL
    (left,) = cwd.iterdir()
    printed = call(f"train.py {SMALL} --resume auto --max_steps 1", cwd).stdout
    assert "resumed from" not in printed and f"run directory {run_dir(cwd).name}\n" in printed
    assert sorted(cwd.iterdir()) == [left, run_dir(cwd)]


@pytest.mark.parametrize("devices", ["", ON_2])
def test_a_rehearsal_makes_no_root_dir(devices: str, cwd: Path):
    printed = run(f"{REHEARSAL} --root_dir not/there {devices}", cwd).stdout
    assert re.findall(r"finished after (\d of \d) steps", printed) == ["2 of 2", "4 of 4"]
    assert list(cwd.iterdir()) == []


def test_a_rehearsal_starts_nothing_of_wandb(program: Path, cwd: Path):
    insert_before(program, "run is finished", 'print("wandb" in __import__("sys").modules)')
    assert "\nFalse\n" in run(f"{program}/{REHEARSAL} --logger_name wandb", cwd).stdout
    assert list(cwd.iterdir()) == []
