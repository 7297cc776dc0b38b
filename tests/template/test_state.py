"""What stands in `state` is saved and restored to the bit."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import LONG, ON_2, SMALL, call, execute, run, run_in
from comparisons import assert_same_run, assert_same_training, killed_and_resumed, on_one_and_two
from edits import copy_programs, insert_after, insert_before, replace, with_edits
from outputs import checkpoint, history, rows, run_dir
from processes import interrupt, kill_group

from runtime.checkpoints import with_tensors

FEW = f"{SMALL} --lr_schedule constant --log_interval 1 --logger_name csv"
ADAMW = "torch.optim.AdamW({}, lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"
# Lookahead (Zhang et al. 2019, arXiv:1907.08610): every third step it goes half of the way from the slow weights, which
# it copies from the model at the beginning, to where its inner optimizer is. It has a state_dict of its own.
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
CRITIC = {  # a second model, trained beside the first, by an optimizer with a state_dict of its own
    "before functions": LOOKAHEAD,
    "after set-up is done": """
        critic = fabric.setup_module(build_model(config, train_set))
        critic_optimizer = fabric.setup_optimizers(Lookahead(torch.optim.SGD(critic.parameters(), 0.01, 0.9)))
    """,
    "before state": '"critic": critic,\n"critic_optimizer": critic_optimizer,',
    "after micro-batch is done": 'fabric.backward(compute_loss(critic, batch, config)[0]["loss"])',
    "after optimizer steps": "critic_optimizer.step()\ncritic_optimizer.zero_grad()",
}
GROUPS = """[
    {"params": [*model.module.layers[0].parameters()], "lr": 0.1 * plan.peak_lr},
    {"params": [*model.module.layers[1:].parameters()], "weight_decay": 0.1},
]"""
# Each training image gets a constant, by a view of a tensor in `state`, which counts the batches, too; another tensor,
# which counts the samples of a class, the loop does not take from `state` again; the third one grows.
TENSORS = {
    "after set-up is done": """
        counts, seen = torch.zeros(2), torch.zeros(10)
        offset = counts[:1]
        fetch = train_set.__getitems__

        def brighter(indices):
            counts[1] += 1
            images, targets = fetch(indices)
            return images + offset, targets

        train_set.__getitems__ = brighter
    """,
    "before state": '"counts": counts, "seen": seen, "grown": torch.zeros(0), "pairs": torch.eye(2).to_sparse(),',
    "after micro-batch is done": "seen += torch.bincount(batch[1], minlength=10)",
    "after step is done": """
        counts[0] += 0.01
        state["grown"] = torch.cat([state["grown"], torch.tensor([step])])
    """,
}
# An extra state, a buffer without elements, one that is not saved, weights that are computed; one that a validation
# changes, too, of which the first one of a process must not count twice; and a version, without which some modules of
# torchvision refuse a state_dict.
ODD = """
class Odd(nn.Linear):
    _version = 2

    def __init__(self, size):
        super().__init__(size, size)
        self.seen = 0
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("constant", torch.ones(1), persistent=False)
        self.register_buffer("calls", torch.zeros(1))
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(size, size))

    def forward(self, features):
        self.seen += self.training
        self.calls += 1
        return self.normed(super().forward(features)) * self.constant

    def get_extra_state(self):
        return {"seen": self.seen, "all": torch.arange(100)[:self.seen % 3]}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        assert len(state["all"]) == self.seen % 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        assert local_metadata["version"] == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
"""
OF_ODD = {"before functions": ODD, "before set up model": "model.layers.append(Odd(10))"}
# Masks that nobody trains, views of one tensor, and a sparse one.
OF_MODEL = """
all = torch.zeros(6)
model.register_buffer("first", all[:4])
model.register_buffer("last", all[2:])
model.register_buffer("graph", torch.tensor([[0, 3], [0, 0]]).to_sparse())
masks = [torch.ones(3) > 0, torch.full((3,), -math.inf), torch.full((3,), math.nan)]
model.masks = nn.ParameterList([nn.Parameter(mask, requires_grad=False) for mask in masks])
"""
TWINS = "self.{} = nn.Linear(10, 10)\nself.{} = nn.Linear(10, 10)\nself.second.weight = self.first.weight"
FORWARD = "        return self.second(self.first(self.layers(images)))\n"


def row(name: str, edits: dict, now: dict | None = None, options: str = "", check: Any = bool, marks: Any = ()) -> Any:
    return pytest.param(edits, edits | (now or {}), options, check, id=name, marks=marks)


def found(name: str, parameters: str, now: str) -> Any:
    """A row whose optimizer has its parameters in another order when the run is resumed."""
    then, now = ({"replace optimizer": ADAMW.format(each)} for each in (parameters, now))
    return row(f"{name}_are_found_by_name", then, now, "--max_grad_norm 0.1")


SUMS = {"counts": 16.16, "seen": 16 * 64, "grown": 16 * 17 / 2, "pairs": 2}
EXACT = [
    row("two models and two optimizers", CRITIC, check=lambda saved: saved["critic_optimizer"]["count"] == 16),
    row("tensors", TENSORS, check=lambda saved: {name: saved[name].sum() for name in SUMS} == pytest.approx(SUMS)),
    row("tensors of a model", {"before set up model": OF_MODEL, "after step is done": "model.module.first.add_(step)"},
        check=lambda saved: saved["model"]["last"].tolist() == [16 * 17 / 2] * 2 + [0] * 2),
    row("odd parts and a_first_validation_that_changes_the_model", OF_ODD,
        check=lambda saved: saved["model"]["layers.9.calls"] == 1 + 16 + 4 * 2),
    row("odd parts on 2", OF_ODD, options=ON_2, marks=pytest.mark.night),
    found("parameters", "model.parameters()", "[*model.parameters()][::-1]"),
    found("named", "model.named_parameters()", "[*model.named_parameters()][::-1]"),
    found("groups", GROUPS, f"{GROUPS}[::-1]"),
    row("layers_are_found_by_name",  # by its number, each bias would get what belongs to the other
        {"replace forward": FORWARD, "before layers": TWINS.format("first", "second")},
        {"before layers": TWINS.format("second", "first")}, check=lambda saved:
        "model.first.weight (10, 10)" in saved["checkpoint"]["optimizers"]["optimizer"][0]["parameters"]),
]  # fmt: skip


def plain(value: Any) -> str:
    """All digits of a value of a checkpoint."""
    return str(with_tensors(lambda tensor: tensor.to_dense().tolist(), value))


@pytest.mark.parametrize("then, now, options, check", EXACT)
def test_what_is_in_state_is_resumed_exactly(then: dict, now: dict, options: str, check: Any, tmp_path, cwd):
    """A run of four epochs ends as one that was made in several starts: all that its checkpoint has is the same.

    Columns: the edits of the program, those of the program that resumes, the options, and what must be true of the last
    checkpoint."""
    first, second = with_edits(tmp_path / "then", then), with_edits(tmp_path / "now", now)
    execute(f"{first}/train.py {FEW} {options} --epochs 4", tmp_path)
    execute(f"{first}/train.py {FEW} {options} --epochs 2", cwd)
    for epochs in (4,) if now == then else (3, 4):
        done = execute(f"{second}/train.py --resume auto --epochs {epochs} {ON_2 * (ON_2 in options)}", cwd)
        assert "resumed from" in done.stdout
    assert_same_run(cwd, tmp_path)
    ours, theirs = (checkpoint(folder, "step-00000016") for folder in (cwd, tmp_path))
    assert check(ours)
    others = ours.keys() - {"checkpoint", "model"}  # the weights are compared by their names
    assert {name: plain(ours[name]) for name in others} == {name: plain(theirs[name]) for name in others}


CURRICULUM = {  # samples that come several times, in an order that depends on the weights at the start of an epoch
    "before length of data": """
        progress = 0.0

        def order(self, epoch, generator):
            print("order of epoch", epoch)
            drawn = torch.randint(1 << 30, (), generator=generator).item()
            generator.manual_seed(drawn + int(1e4 * abs(self.progress)))
            return torch.randint(len(self), (len(self),), generator=generator).tolist()

    """,
    "before state": '"progress": 0.0,',
    "before loop begins": 'train_set.progress = state["progress"]',
    "after step is done": """
        if step % plan.steps_per_epoch == 0:
            state["progress"] = sum(p.double().sum().item() for p in model.parameters())
            train_set.progress = state["progress"]
    """,
}


def test_a_run_with_its_own_order_is_resumed_in_the_middle_of_an_epoch(program: Path, tmp_path: Path, cwd: Path):
    """With data workers, which do not run ahead into an epoch whose order is not known yet."""
    with_edits(program, CURRICULUM)
    printed = call(f"{program}/{LONG}", tmp_path).stdout
    assert re.findall(r"^order of epoch (\d)$", printed, re.MULTILINE) == [*"0123456789"]
    assert interrupt(f"{program}/{LONG} --num_workers 2", cwd, kill_group).returncode == -signal.SIGKILL
    call(f"{program}/train.py --resume auto", cwd)
    assert_same_run(cwd, tmp_path)


# As the 8-bit optimizers of torchao: the state is a tensor subclass that cannot be cloned. torch loads it once it is
# told that it is safe.
HALVED = '''
import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Halved(torch.Tensor):
    """A tensor of float32 that is kept in float16."""

    def __new__(cls, kept):
        return torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32, device=kept.device)

    def __init__(self, kept):
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is aten.copy_.default:
            args[0].kept.copy_(args[1].kept if isinstance(args[1], cls) else args[1])
            return args[0]
        if function is aten.clone.default:
            raise NotImplementedError("clone")
        if function in (aten.detach.default, aten._to_copy.default):
            return cls(args[0].kept.to((kwargs or {}).get("device")))
        args, kwargs = tree_map(lambda x: x.kept.float() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


torch.serialization.add_safe_globals([Halved])


class HalvedMomentum(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter]["momentum"] = Halved(torch.zeros_like(parameter, dtype=torch.float16))
                momentum = self.state[parameter]["momentum"]
                momentum.copy_(0.9 * momentum + parameter.grad)
                parameter.sub_(group["lr"] * momentum)
'''


def test_an_optimizer_whose_state_is_a_tensor_subclass_is_resumed(program: Path, tmp_path: Path):
    """And evaluated. A program that tells torch of the class only after a checkpoint is chosen says why it fails."""
    late = tmp_path / "late"
    for folder, point in ((program, "functions"), (late, "set up model")):
        (copy_programs(folder) / "halved.py").write_text(HALVED)
        insert_before(folder, point, "from halved import HalvedMomentum")
        replace(folder, "optimizer", "HalvedMomentum(model.parameters(), plan.peak_lr)")
    _, cwd = killed_and_resumed(f"{program}/{LONG}", tmp_path, resume=run)
    evaluate = "test.py --accelerator cpu --checkpoint last"
    assert "accuracy" in run(f"{program}/{evaluate}", cwd).stdout
    error = run(f"{late}/train.py --resume auto --epochs 20", cwd, code=1).stderr
    assert "test.py --checkpoint last says why" in error
    assert "Unsupported global: GLOBAL halved.Halved" in run(f"{late}/{evaluate}", cwd, code=1).stderr


def test_a_run_without_a_checkpoint_yet_begins_again(program: Path, tmp_path: Path, cwd: Path):
    """With nothing of what it has made, here in another precision: Lookahead begins with the weights of the model."""
    with_edits(program, CRITIC)
    call(f"{program}/train.py {FEW}", tmp_path)
    fails = {"after step is done": "if step == 3:\n    raise ValueError"}
    failing = with_edits(tmp_path / "failing", CRITIC | fails)
    call(f"{failing}/train.py {FEW} --precision bf16-true", cwd, code=1)
    assert len(history(cwd)) == 2
    line = "\nthe run has no checkpoint yet, and begins again at step 0\n"
    assert line in call(f"{program}/train.py --resume auto --precision 32-true", cwd).stdout
    assert_same_run(cwd, tmp_path)
    assert line not in call(f"{program}/train.py --resume auto --max_steps 21", cwd).stdout


def test_the_rates_and_how_a_step_is_computed_are_those_of_the_code_and_the_options(program: Path, cwd: Path):
    """The checkpoint has them, too. Another --base_lr holds for the groups that are built with it."""
    replace(program, "optimizer", ADAMW.format(GROUPS))
    call(f"{program}/train.py {FEW} --epochs 1", cwd)
    before = checkpoint(cwd, "step-00000004")["optimizer"]["param_groups"]
    again = GROUPS.replace("0.1 * plan", "0.4 * plan")
    other = replace(program.with_name("other"), "optimizer", ADAMW.format(again).replace("fused", "foreach"))
    call(f"{other}/train.py --resume auto --epochs 2 --base_lr 0.001", cwd)
    after = checkpoint(cwd, "step-00000008")["optimizer"]["param_groups"]
    assert [group["lr"] for group in after] == pytest.approx([4e-4, 1e-3])
    changed = {name for now, then in zip(after, before, strict=True) for name in now if now[name] != then[name]}
    assert changed == {"fused", "foreach", "lr", "initial_lr"}


def test_gradients_are_zeroed_before_the_micro_batches(program: Path, tmp_path: Path, cwd: Path):
    """What an edit leaves in them after a step, or before the first one, is in no step."""
    again = 'fabric.backward(compute_loss(model, batch, config)[0]["loss"])'
    insert_after(program, "optimizer steps", again)
    insert_before(program, "loop begins", "batch = next(iter(val_loader))\n" + again)
    call(f"train.py {FEW} --micro_batch_size 32", tmp_path)
    call(f"{program}/train.py {FEW} --micro_batch_size 32", cwd)
    assert_same_run(cwd, tmp_path)


def test_the_outputs_of_compute_loss_are_freed_before_the_backward_pass(program: Path, cwd: Path):
    """The logits of a language model are the largest of all tensors, and its loss may not need them any more."""
    insert_before(program, "functions", "import weakref\n\nSEEN = []")
    values = '{"loss": F.cross_entropy(logits, targets), "one": SEEN.append(weakref.ref(logits)) or 1}'
    replace(program, "values", values)
    replace(program, "backward", 'print("freed:", SEEN[-1]() is None) or fabric.backward(values["loss"])')
    assert call(f"{program}/train.py {FEW} --max_steps 2", cwd).stdout.count("freed: True\n") == 2


# ---- sparse gradients


def test_sparse_gradients_train_as_dense_ones_and_on_two_processes_as_on_one(tmp_path):
    """The norm that is logged, and clipped, is that of their values."""
    command = f"train.py {FEW} --epochs 2 --base_lr 0.01 --micro_batch_size 16 --max_grad_norm 0.5"
    dense, sparse = (tmp_path / name for name in ("dense", "sparse"))
    for program in (dense, sparse):
        replace(program, "model", f'    return nn.EmbeddingBag(128, 10, mode="sum", sparse={program == sparse})  # ')
        replace(program, "logits", "logits = model((images.flatten(1) > 0) + 2 * torch.arange(64))")
        replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=plan.peak_lr)")
    plain = run_in(tmp_path / "plain", f"{dense}/{command}")
    norms = [row["train/grad_norm"] for row in rows(plain)]
    for cwd in on_one_and_two(f"{sparse}/{command}", tmp_path):
        assert_same_training(cwd, plain)
        assert [row["train/grad_norm"] for row in rows(cwd)] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.5


def test_nothing_of_a_checkpoint_is_larger_than_its_tensors(program: Path, cwd: Path):
    """An image of the dataset is a part of the tensor of all; a layer that has two names is saved once."""
    image = "train_set.images[0]"
    shared = "model.shared = nn.ModuleList([nn.Linear(200, 200)] * 2)"
    insert_before(program, "set up model", f'model.register_buffer("image", {image})\n{shared}')
    insert_before(program, "state", f'"image": {image},')
    insert_after(program, "step is done", f'optimizer.state[model.module.layers[0].bias]["part"] = {image}')
    call(f"{program}/train.py {FEW} --epochs 1 --strategy auto", cwd)
    folder = run_dir(cwd)
    sizes = [path.stat().st_size for path in (folder / "model.pt", *folder.glob("checkpoints/*"))]
    assert len(sizes) == 3 and 160_000 < min(sizes) <= max(sizes) < 300_000 < 1217 * 64 * 4
