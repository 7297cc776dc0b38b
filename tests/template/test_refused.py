"""A state that could not be saved, restored or compared is refused as early as it shows: before anything is written, at
a save, or in a rehearsal, which leaves nothing behind."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import ON_2, SMALL, call, execute, run, start
from edits import POINTS, with_edits
from mistakes import assert_one_line
from outputs import run_dir
from test_state import ADAMW, CRITIC

KEEPS = """
class Keeps:
    def state_dict(self):
        return {"recent": VALUE}

    def load_state_dict(self, state):
        raise KeyError("no such number")
"""
GIVEN = "{name: 1.0 * parameter for name, parameter in model.named_parameters()}"
TRACEBACK = "Traceback (most recent call last)"

# In another order on rank 1: DDP would add the gradient of one layer to that of another.
NAMES = '"ab"[::-1 if __import__("os").environ.get("LOCAL_RANK") == "1" else 1]'
OF_SET = [
    ("layers", "before layers", f"for name in {NAMES}: self.add_module(name, nn.Linear(2, 2))"),
    ("buffers", "before layers", f"for name in {NAMES}: self.register_buffer(name, Tensor(9).zero_(), False)"),
    ("parameters", "replace optimizer", ADAMW.format("[*model.parameters()][::1 - 2 * fabric.global_rank]")),
]


def row(name: str, edits: dict, *words: str, options: str = "", code: int = 1, step: int = 0) -> Any:
    return pytest.param(edits, options, words, code, step, id=name)


def entry(name: str, value: str, *words: str) -> Any:
    keeps = KEEPS.replace("VALUE", '__import__("collections").deque()')
    return row(f"{name} {value}", {"before functions": keeps, "before state": f'"{name}": {value},'},
               f"state['{name}']", *words)  # fmt: skip


SPOILED = "rank = fabric.global_rank\nif step == 4: model.module.layers[{}].weight.data"
ON_RANK_1 = "weights are those of rank 0: False on rank 1"
REFUSED = [
    # what a checkpoint cannot hold
    entry("seen", '{"losses": [1.0, __import__("numpy").float64(1)]}', "multiarray.scalar"),
    entry("critics", "[nn.Linear(2, 2)]", "torch.nn.modules.linear.Linear", "an entry of its own"),
    entry("keeps", "Keeps()", "collections.deque"),
    # each run has its own value of these names
    *(entry(name, "1.5") for name in ("checkpoint", "ended", "last", "micro_batch_size")),
    *(entry(name, "1.5") for name in ("parameters", "precision", "seconds", "state")),
    # what a resume would not restore
    row("late entry", {"before loop begins": 'state["seen"] = torch.zeros(1)'}, "state: seen", "run.prepare()"),
    row("trained_parameter_not_in_state",
        {"replace optimizer": ADAMW.format("[*model.parameters(), nn.Parameter(torch.zeros(3))]")},
        "state['optimizer']", "(3,)", "in no module of `state`"),
    row("functional_call",  # Fabric's module registers the model under two names: the given weights would stay in it
        {"replace logits": f"logits = torch.func.functional_call(model, {GIVEN}, images)"},
        "functional_call with model.module", options="--limit_val_batches 0 --monitor train/loss --monitor_mode min"),
    # the first step
    *(row(f"no gradient {options}", {"replace backward": code}, "nothing has a gradient", options=options)
      for code, options in (("pass", ON_2), (f"{POINTS['backward'][2]}; optimizer.step(); optimizer.zero_grad()", ""))),
    row("operator_without_a_deterministic_algorithm",
        {"after logits": "logits = logits.put(torch.zeros(2, dtype=torch.int64), logits.new_ones(2))"},
        TRACEBACK, "does not have a deterministic implementation", "--deterministic False"),
    *(row(f"the_order_of_a_set of {what}", {place: code}, "tensor ", " on rank 1 ", " on rank 0", "a set", options=ON_2)
      for what, place, code in OF_SET),
    # what can be saved, but not loaded, in a rehearsal
    row("other names than it is loaded with",  # of a copy of Fabric's module, which has another one inside
        {"before state": '"averaged": torch.optim.swa_utils.AveragedModel(model),'},
        'Missing key(s) in state_dict: "module._forward_module', options="--fast_run", code=2),
    row("state that fails to load",
        {"before functions": KEEPS.replace("VALUE", "1"), "before state": '"own": Keeps(),'},
        TRACEBACK, "KeyError: 'no such number'", options="--fast_run 4"),
    # at a save
    row("not_finite in the second model",
        CRITIC | {"after set-up is done": CRITIC["after set-up is done"].replace("0.01", "math.nan")},
        "not finite after step 4", step=4),
    row("not_finite on rank 0",  # all ranks end alike
        {"after step is done": "if step > 7 and rank == 0: model.module.layers[0].weight.data.fill_(math.nan)",
         "before loop begins": "rank = fabric.global_rank"},
        ": the weights are not finite after step 8: model.layers.0.weight (4, 1, 3, 3);", options=ON_2, step=8),
    row("not read back",  # what tensors are is not looked at before
        {"before functions": "class Own(torch.Tensor):\n    pass",
         "before state": '"own": torch.zeros(2).as_subclass(Own),'},
        TRACEBACK, "_pickle.UnpicklingError: Weights only load failed.", "Own", step=4),
    *(row(f"bits_differ_between_the_ranks {change}", {"after step is done": SPOILED.format(-1) + change},
          "after step 4, checksum of model.layers", "(10, 32)", "on rank 1", options=ON_2, step=4)
      for change in ("[0, 0] += 1e-6 * rank", "[0, :2] += rank * torch.tensor([1e-3, -1e-3])")),
    row("weights_differ_between_the_ranks in bfloat16",  # in which a norm has three digits
        {"after step is done": SPOILED.format(0) + "[0].add_(0.004 * rank)"}, f"after step 4, {ON_RANK_1}",
        options=f"{ON_2} --precision bf16-true", step=4),
    row("weights_differ_between_the_ranks later",  # DDP knows nothing of what was frozen when it was set up
        {"before set up model": "model.layers[0].requires_grad_(False)",
         "after step is done": "model.module.layers[0].requires_grad_(step > 4)"}, f"after step 8, {ON_RANK_1}",
        options=ON_2, step=8),
    row("a further group",
        {"replace optimizer": ADAMW.format("model.module.layers[1:].parameters()"), "after step is done":
         "if step == 5: optimizer.add_param_group({'params': model.module.layers[0].parameters()})"},
        "state['optimizer'] trains other parameters", step=8),
    row("an object that comes later",
        {"before state": '"seen": {"file": ""},',
         "after step is done": 'state["seen"]["file"] = run.directory.path if step > 4 else ""'},
        "state['seen'] has what a checkpoint cannot hold (pathlib", step=8),
]  # fmt: skip


@pytest.mark.parametrize("edits, options, words, code, step", REFUSED)
def test_a_state_that_a_resume_could_not_restore_is_refused(edits, options, words, code, step, program, cwd):
    """In one line, or one of each rank; the words of others behind a traceback. Columns: the edits, the options, the
    words, the exit code, and the step at whose save it shows; 0 is before anything is written. Step 4 is the first that
    is saved, so only after 8 there is a checkpoint to go on with."""
    done = execute(f"{with_edits(program, edits)}/train.py {SMALL} {options}", cwd, code)
    if words[0] == TRACEBACK:
        assert [word for word in words if word not in done.stderr] == []
    else:
        assert_one_line(done, *words, lines=2 if ON_2 in options else 1)
    assert bool([*cwd.iterdir()]) == bool(step)
    saved = {path.stem for path in cwd.glob("*/checkpoints/*")}
    assert saved == ({"best", "step-00000004"} if step == 8 else set())
    assert ("the checkpoints are whole, continue with: " in done.stderr) == (step == 8)


# ---- a rehearsal

REHEARSAL = f"train.py {SMALL} --fast_run 4"
# Whether its two halves have restored the state, and whether they have imported wandb.
SHOWS = {
    "before layers": 'self.register_buffer("seen", Tensor(1).zero_(), persistent=False)',
    "before state": '"seen": 0,',
    "before loop begins": 'print("seen", state["seen"], int(model.module.seen), "wandb" in __import__("sys").modules)',
    "after step is done": 'state["seen"] += 1; model.module.seen += 1',
}
WAITS = """
print("waiting", flush=True)
while True:  # signal.pause() could begin just after the signal has come
    __import__("time").sleep(0.02)
"""


@pytest.mark.parametrize("where", ["--root_dir not/there --out_dir {}/mine", f"--out_dir runs/mine {ON_2}"])
def test_a_rehearsal_leaves_nothing_behind_wherever_the_run_would_be(where: str, program: Path, cwd: Path):
    """Its second half has what was restored, and not the modules of the first."""
    printed = run(f"{with_edits(program, SHOWS)}/{REHEARSAL} --logger_name wandb {where.format(cwd)}", cwd).stdout
    assert {*re.findall("^seen .*", printed, re.MULTILINE)} == {"seen 0 0 False", "seen 2 0 False"}
    assert re.findall(r"finished after (\d of \d) steps", printed) == ["2 of 2", "4 of 4"]
    assert [*cwd.iterdir()] == []


@pytest.mark.parametrize(
    "place, number",
    [("before digits", signal.SIGINT), ("after step is done", signal.SIGTERM), ("after step is done", signal.SIGKILL)],
)
def test_a_rehearsal_that_is_stopped_leaves_nothing_behind(place: str, number: int, program: Path, cwd: Path):
    """In a step, or while it builds the datasets, which may take minutes. Of a killed one the folder stays,
    which is never resumed."""
    with_edits(program, {place: WAITS})
    process = start(f"{program}/{REHEARSAL}", cwd)
    assert any("waiting" in line for line in process.stdout)
    (left,) = cwd.iterdir()
    assert left.name.startswith(".fast_run-")
    process.send_signal(number)
    error = process.communicate(timeout=300)[1]
    if number == signal.SIGKILL:
        printed = call(f"train.py {SMALL} --resume auto --max_steps 1", cwd).stdout
        assert "resumed from" not in printed and f"run directory {run_dir(cwd).name}\n" in printed
        assert sorted(cwd.iterdir()) == [left, run_dir(cwd)]
    else:
        assert process.returncode == 1 and [*cwd.iterdir()] == []
        assert error.startswith("train.py: error: --fast_run was stopped by a signal") and error.count("\n") == 1
