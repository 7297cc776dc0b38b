"""What stands in `state` is saved, restored, counted and checked; and what a resume may change beside it."""

import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import (
    ON_2,
    SMALL,
    TORCHRUN,
    assert_same_run,
    call,
    kill_group,
    last_summary,
    run,
    run_dir,
    snapshot,
    start,
    wait_for,
)
from edits import insert_after, insert_before, replace

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


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Where the run is that is never interrupted; `cwd` is for the other."""
    (tmp_path / "whole").mkdir()
    return tmp_path / "whole"


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def checkpoint(cwd: Path, name: str) -> dict:
    return torch.load(run_dir(cwd) / "checkpoints" / f"{name}.ckpt", weights_only=True)


# ---- models and optimizers


def with_critic(program: Path, lr: str) -> None:
    insert_after(program, "set-up is done", CRITIC.replace("LR", lr))
    insert_before(program, "state", CRITIC_STATE)
    insert_after(program, "micro-batch is done", CRITIC_LOSS)
    insert_after(program, "optimizer steps", CRITIC_STEP)


def test_two_models_and_two_optimizers(program: Path, whole: Path, cwd: Path):
    """All are saved and restored: also those that no line of rundir.py knows."""
    with_critic(program, lr="0.01")
    options = f"{program}/train.py {CONSTANT} --width 32"
    call(f"{options} --epochs 4", whole)
    call(f"{options} --epochs 2", cwd)
    call(f"{program}/train.py --resume auto --epochs 4", cwd)
    assert_same_run(cwd, whole)
    saved, expected = (checkpoint(folder, "step-00000016") for folder in (cwd, whole))
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
    assert "state['counted'] is not in it, and new" in output and "state['model']" not in output


def test_the_second_model_is_checked_to_be_finite(program: Path, cwd: Path):
    with_critic(program, lr='float("nan")')
    error = call(f"{program}/train.py {CONSTANT}", cwd, code=1).stderr
    assert "the weights are not finite after step 4" in error
    assert list((run_dir(cwd) / "checkpoints").iterdir()) == []


def test_an_optimizer_with_state_of_its_own(program: Path, whole: Path, cwd: Path):
    """Its slow weights are those of the model at the beginning. The run was killed before it had a checkpoint, and goes
    on in another precision: it begins again, with nothing of what the other precision had made."""
    insert_before(program, "functions", LOOKAHEAD)
    replace(program, "set up optimizer", "fabric.setup_optimizers(Lookahead(optimizer))")
    options = f"{program}/train.py {CONSTANT} --checkpoint_frequency None"
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


def test_settings_of_the_optimizer_are_those_that_the_options_ask_for(program: Path, cwd: Path):
    """The checkpoint has settings, too: what has changed since then wins."""
    call(f"train.py {CONSTANT} --epochs 1", cwd)
    before = checkpoint(cwd, "step-00000004")["optimizer"]["param_groups"][0]
    settings = "weight_decay=config.weight_decay, fused=False, betas=(0.8, 0.9)"
    replace(program, "optimizer", f"torch.optim.AdamW(model.parameters(), {settings})")
    call(f"{program}/train.py --resume auto --epochs 2 --weight_decay 0.5", cwd)
    after = checkpoint(cwd, "step-00000008")["optimizer"]["param_groups"][0]
    changed = {name: after[name] for name in after if after[name] != before[name]}
    assert changed == {"weight_decay": 0.5, "fused": False, "betas": (0.8, 0.9), "lr": 4e-3}


def test_a_tensor_is_restored_under_every_name(program: Path, whole: Path, cwd: Path):
    """The loop adds to the tensor, and does not take it from `state` again."""
    insert_after(program, "set-up is done", "seen = torch.zeros(10)")
    insert_before(program, "state", '"seen": seen,')
    insert_after(program, "micro-batch is done", "seen += torch.bincount(batch[1], minlength=10)")
    call(f"{program}/train.py {CONSTANT} --epochs 4", whole)
    call(f"{program}/train.py {CONSTANT} --epochs 2", cwd)
    call(f"{program}/train.py --resume auto --epochs 4", cwd)
    counted, expected = (checkpoint(folder, "step-00000016")["seen"] for folder in (cwd, whole))
    assert torch.equal(counted, expected) and expected.sum() == 16 * checkpoint(whole, "best")["micro_batch_size"]


def test_a_model_that_is_saved_under_other_names_than_it_is_loaded_is_refused(program: Path, cwd: Path):
    """A copy of the module that Fabric has wrapped has another one inside, which gives its own names."""
    insert_before(program, "state", '"averaged": torch.optim.swa_utils.AveragedModel(model),')
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert 'Missing key(s) in state_dict: "module._forward_module' in error and "--resume" not in error
    assert list(cwd.iterdir()) == []


def test_an_entry_of_state_that_comes_after_the_restore_is_told_before_anything_is_written(program: Path, cwd: Path):
    """It would be saved, but a resume would silently begin it anew."""
    insert_before(program, "loop begins", 'state["seen"] = torch.zeros(1)')
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert "state: seen came after `run.restore()`, so a resume would not restore it" in error
    assert list(cwd.iterdir()) == []


def test_weights_that_differ_between_the_ranks_are_not_saved(program: Path, cwd: Path):
    """DDP knows nothing of what was frozen when it was set up: each rank would train it alone."""
    insert_before(program, "set up model", "model.layers[0].requires_grad_(False)")
    insert_after(program, "step is done", "model.module.layers[0].requires_grad_(step > 4)")
    error = run(f"{program}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    assert re.search("the weights of rank 1 on .* are not those of rank 0 after step 8: do random", error)
    assert [path.name for path in sorted((run_dir(cwd) / "checkpoints").iterdir())] == [
        "best.ckpt",
        "step-00000004.ckpt",
    ]


def test_weights_that_differ_between_the_ranks_are_noticed_in_bf16_true(program: Path, cwd: Path):
    """A norm that is added up in bfloat16 has three digits, and would not show it."""
    spoil = "if step == 4: model.module.layers[0].weight.data[0].add_(0.004 * fabric.global_rank)"
    insert_after(program, "step is done", spoil)
    error = run(f"{program}/train.py {SMALL} {ON_2} --precision bf16-true", cwd, code=1).stderr
    assert re.search("the weights of rank 1 on .* are not those of rank 0 after step 4: do random", error)


def test_weights_of_rank_0_that_are_not_finite_end_all_ranks_alike(program: Path, cwd: Path):
    spoil = "if step == 8 and fabric.global_rank == 0: model.module.layers[0].weight.data.fill_(float('nan'))"
    insert_after(program, "step is done", spoil)
    error = run(f"{TORCHRUN} {program}/train.py {SMALL} --strategy ddp", cwd, code=1).stderr
    told = [line for line in error.splitlines() if "error: " in line]
    assert len(told) == 1 and told[0].startswith("train.py: error: the weights are not finite after step 8;")
    assert not (run_dir(cwd) / "checkpoints" / "step-00000008.ckpt").exists()


# ---- plain values


@pytest.mark.parametrize(
    "entry, words",
    [
        ('"recent": __import__("collections").deque(),', "state['recent'] is a deque"),
        ('"seen": {"losses": [1.0, __import__("numpy").float64(1)]},', "state['seen']['losses'][1] is a float64"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_before_training(entry: str, words: str, program: Path, cwd: Path):
    insert_before(program, "state", entry)
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert words in error and "Traceback" not in error and "--resume" not in error
    assert list(cwd.iterdir()) == []


def test_what_comes_into_state_later_is_named_at_the_next_save(program: Path, cwd: Path):
    insert_after(program, "step is done", 'state["seen"] = {"file": run.path if step > 4 else ""}')
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert "state['seen']['file'] is a PosixPath" in error and "Traceback" not in error
    assert f"--resume {run_dir(cwd).name}" in error
    assert checkpoint(cwd, "step-00000004")["seen"] == {"file": ""}


# Its state_dict has what a checkpoint cannot hold.
KEEPS = """
class Keeps:
    def state_dict(self):
        return {"recent": __import__("collections").deque()}

    def load_state_dict(self, state):
        pass


"""


def test_the_first_checkpoint_is_read_back(program: Path, cwd: Path):
    """What is in a state_dict is not looked at before."""
    insert_before(program, "functions", KEEPS)
    insert_before(program, "state", '"keeps": Keeps(),')
    error = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr
    assert "the checkpoint cannot be read back: does `state` hold anything but plain values?" in error
    assert "Traceback" not in error and list(run_dir(cwd).glob("checkpoints/*")) == []


# ---- what another command line changes


@pytest.mark.parametrize("options", ["--monitor val/loss", "--monitor_mode min"])
def test_another_monitor_is_refused_and_changes_nothing(options: str, cwd: Path):
    """What is best of one value says nothing of another."""
    call(f"train.py {SMALL} --epochs 1", cwd)
    before = snapshot(cwd)
    error = call(f"train.py --resume auto --epochs 2 {options}", cwd, code=2).stderr
    assert re.fullmatch(rf"train.py: error: {options}: a resume cannot change it; .* was trained with .*\n", error)
    assert snapshot(cwd) == before


def test_after_out_of_memory_the_advice_can_be_followed(program: Path, cwd: Path):
    """Memory runs out once there is a checkpoint, until micro-batches have 16 samples."""
    is_full = 'model.training and len(targets) > 16 and [*__import__("pathlib").Path().glob("*/checkpoints/step-*")]'
    insert_after(program, "batch", f'if {is_full}:\n    raise torch.OutOfMemoryError("CUDA out of memory")')
    error = call(f"{program}/train.py {CONSTANT}", cwd, code=1).stderr
    for size in (32, 16):
        assert "try a smaller --micro_batch_size" in error and "Traceback" not in error
        done = call(f"{program}/train.py --resume auto --micro_batch_size {size}", cwd, code=1 if size == 32 else 0)
        assert f"micro_batch_size {size} instead of 64" in done.stdout
        error = done.stderr
    assert "finished after 20 of 20 steps" in done.stdout
    assert (last_summary(cwd)["step"], last_summary(cwd)["micro_batch_size"]) == (20, 16)
