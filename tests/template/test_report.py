"""What is due after a step is saved first, then validated and logged: whatever happens there, no step is lost, and the
resumed run is the same. And how a run ends."""

import signal
from functools import cache
from pathlib import Path

import pytest
import torch
from commands import ON_2, PREEMPTED, call, execute, run, run_in
from comparisons import assert_same_best, assert_same_run
from edits import insert_after, insert_before
from killer import kill_before
from outputs import checkpoint, copied, history, last_summary, newest, run_dir, set_running, weights, without_locks

# 12 steps, each logged; 4, 8 and 12 are validated, in batches of 16 samples: eight on one process, four on each of two.
OPTIONS = (
    "--accelerator cpu --max_steps 12 --limit_train_batches 4 --limit_val_batches 2 --num_sanity_val_steps 3 --width 4 "
    "--micro_batch_size 16 --log_interval 1 --val_interval 4 --logger_name csv"
)
SAVED = f"{OPTIONS} --checkpoint_interval 4"  # with each validation
BETWEEN = f"{OPTIONS} --checkpoint_interval 3"  # at 3, 6, 9 and 12
DEVICES = pytest.mark.parametrize("devices", ["", ON_2], ids=["1", "2"])
SIGTERM = "os.kill(os.getpid(), signal.SIGTERM)"
STRIKE = """
import os
import signal

AT = {{"step": 0, "batch": 0}}  # the validation of a step, and its batch


def strike():
    AT["batch"] += 1
    if AT == {{"step": {step}, "batch": 2}} and int(os.environ.get("LOCAL_RANK", 0)) == {rank}:
        {action}


"""


def striking(program: Path, action: str, step: int = 8, rank: int = 0) -> Path:
    """A copy of the program that does something on one rank: in the validation of a step, 0 for the one before the
    first step, in its second batch."""
    insert_before(program, "functions", STRIKE.format(action=action, step=step, rank=rank))
    insert_before(program, "validation", "AT.update(step=step, batch=0)")
    return insert_before(program, "batch", "if not model.training:\n    strike()")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Where a run with these options was left alone. To be read, not changed."""

    @cache
    def train(options: str) -> Path:
        cwd = tmp_path_factory.mktemp("alone")
        execute(f"train.py {options}", cwd)
        return cwd

    return train


def assert_resumed(cwd: Path, other: Path, devices: str = "") -> None:
    """Resumes the run to its end: it is the one that was left alone."""
    execute(f"train.py --resume auto {devices}", cwd)
    assert_same_run(cwd, other)
    assert_same_best(cwd, other)
    assert last_summary(cwd)["state"] == "finished"
    assert [*run_dir(cwd).rglob("*.tmp")] == []


# ---- in a validation


@DEVICES
@pytest.mark.parametrize("options", [SAVED, BETWEEN], ids=["saved", "between two saves"])
def test_a_signal_in_a_validation_ends_it_and_the_resume_makes_it_again(options, devices, alone, program, cwd):
    """Whichever rank gets it."""
    options = f"{options} {devices}"
    striking(program, SIGTERM, rank=1 if devices else 0)
    done = run(f"{program}/train.py {options}", cwd, code=PREEMPTED)
    assert "stopped after 8 of 12 steps" in done.stdout
    assert newest(cwd) == 8 and history(cwd)[-1]["step"] == "7"
    assert last_summary(cwd)["state"] == "interrupted"
    assert_resumed(cwd, alone(options), devices)


PICTURE = 'if step == 8 and fabric.is_global_zero:\n    raise ValueError("no such font")'
ACTIONS = {"kill": "os.kill(os.getpid(), signal.SIGKILL)", "metric": "raise ValueError('too few classes')"}


@DEVICES
@pytest.mark.parametrize("what, code", [("kill", -signal.SIGKILL), ("metric", 1), ("picture", 1)])
def test_a_kill_or_a_metric_that_fails_or_a_picture_that_fails_loses_no_step(what, code, devices, alone, program, cwd):
    """In a validation; the picture after its row was logged. After the kill, a resume is stopped in that validation,
    and changes nothing; another makes it, although it has options by which step 8 is not validated."""
    options = f"{SAVED} {devices}"
    if what == "picture":
        insert_after(program, "row is logged", PICTURE)
    else:
        striking(program, ACTIONS[what])
    error = run(f"{program}/train.py {options}", cwd, code).stderr
    assert ("Traceback" in error and "ValueError: " in error) == (code == 1)
    assert newest(cwd) == 8
    if what == "kill":
        other = striking(program.with_name("other"), SIGTERM)
        before = without_locks(cwd)
        run(f"{other}/train.py --resume auto {devices}", cwd, code=PREEMPTED)
        assert without_locks(cwd) == before
        devices += " --val_interval 12"
    assert_resumed(cwd, alone(options), devices)


def test_an_end_before_the_first_step_makes_no_directory(program, cwd):
    options = f"{OPTIONS} --num_sanity_val_steps 8 {ON_2}"
    broken = insert_before(program.with_name("broken"), "step begins", "break")
    assert "finished after 0 of 12 steps" in run(f"{broken}/train.py {options}", cwd).stdout
    assert [*cwd.iterdir()] == []
    striking(program, SIGTERM, step=0)
    assert "before the first step" in run(f"{program}/train.py {options}", cwd, code=PREEMPTED).stdout
    assert [*cwd.iterdir()] == []


def test_weights_that_a_stopped_validation_has_changed_are_not_saved(alone, program, cwd):
    """Such as an average that is swapped in, and, without `finally`, out again only where nothing happens."""
    for edit, sign in ((insert_before, "*"), (insert_after, "/")):
        edit(program, "validation", f"for parameter in model.parameters():\n    parameter.data {sign}= 2")
    striking(program, SIGTERM)
    done = run(f"{program}/train.py {BETWEEN}", cwd, code=PREEMPTED)
    assert "not saved: the validation that was stopped has changed the weights" in done.stdout
    assert newest(cwd) == 6
    call("train.py --resume auto", cwd)
    torch.testing.assert_close(weights(cwd), weights(alone(BETWEEN)), atol=0, rtol=0)


# ---- best.ckpt


@pytest.mark.parametrize("options", [SAVED, BETWEEN], ids=["saved", "between two saves"])
def test_best_ckpt_is_a_link_or_a_file_of_its_own_and_a_run_is_resumed_from_it_alone(options, alone, tmp_path):
    """A link to the checkpoint of its step, if that is saved. The others may have been deleted to save space."""
    cwd = alone(options)
    best = run_dir(cwd) / "checkpoints" / "best.ckpt"
    step = checkpoint(cwd, "best")["step"]
    assert step == checkpoint(alone(SAVED), "best")["step"]
    regular = best.with_name(f"step-{step:08d}.ckpt")
    assert (regular.exists() and best.samefile(regular)) == (options == SAVED)
    cwd = copied(cwd, tmp_path)
    for path in run_dir(cwd).glob("checkpoints/step-*.ckpt"):
        path.unlink()
    set_running(run_dir(cwd))
    (run_dir(cwd) / "model.pt").unlink()
    assert_resumed(cwd, alone(options))


# ---- how a run ends


@pytest.mark.parametrize("devices, killed", [("", False), (ON_2, False), ("", True)], ids=["1", "2", "killed"])
def test_a_break_finishes_the_run(devices, killed, program, cwd, tmp_path):
    """Its last step is saved, without a validation. A resume makes no step, unless the plan has more of them, and it is
    not left by a `break` at once; it writes model.pt if a kill came before."""
    insert_before(program, "step begins", 'if state["step"] == 6:\n    break')
    end_of_the_loop = ("train.py", "train", 'state["due"] = plan.due(step)')
    insert_after(program, end_of_the_loop, "if step == 6:\n    report()\n    break")
    command = f"{program}/train.py {SAVED} {devices}"
    if killed:
        kill_before("open model.pt.tmp 1", command, cwd, tmp_path)
        assert newest(cwd) == 6 and last_summary(cwd)["state"] == "running"
        command = "train.py --resume auto"
    done = execute(command, cwd)
    assert "finished after 6 of 12 steps" in done.stdout
    assert newest(cwd) == 6 and last_summary(cwd)["state"] == "finished"
    torch.testing.assert_close(checkpoint(cwd, "step-00000006")["model"], weights(cwd), atol=0, rtol=0)
    before = without_locks(cwd)
    execute(f"train.py --resume auto {devices}", cwd)
    assert without_locks(cwd) == before
    left = execute(f"{program}/train.py --resume auto --max_steps 13 {devices}", cwd)
    assert "finished after 6 of 13 steps" in left.stdout and last_summary(cwd)["state"] == "finished"
    execute(f"train.py --resume auto --max_steps 14 {devices}", cwd)
    assert [int(row["step"]) for row in history(cwd)] == [*range(1, 15)]


CONTINUE = """
import os
import signal

if step in (5, 6):
    if os.path.exists("strike"):
        os.remove("strike")
        os.kill(os.getpid(), signal.SIGTERM)
    continue
"""


def test_a_step_that_is_left_by_continue_is_not_made_twice(program, cwd, tmp_path):
    """Nor do its values come twice into the next mean. It may be the last step."""
    insert_before(program, "gradients are unscaled", CONTINUE)
    command = f"{program}/train.py {SAVED} --log_interval 4"
    whole = run_in(tmp_path / "whole", command)
    (cwd / "strike").touch()
    done = run(command, cwd, code=PREEMPTED)
    assert "stopped after 5 of 12 steps" in done.stdout and newest(cwd) == 5
    call(f"{program}/train.py --resume auto", cwd)
    assert_same_run(cwd, whole)
    done = call(f"{program}/train.py {SAVED} --max_steps 6 --out_dir short", cwd)
    assert "finished after 6 of 6 steps" in done.stdout


def test_what_the_code_after_the_loop_does_is_in_model_pt_and_in_no_checkpoint(alone, program, cwd):
    insert_before(program, "run is finished", "for parameter in model.parameters():\n    parameter.data.zero_()")
    call(f"{program}/train.py {SAVED}", cwd)
    assert not any(tensor.any() for tensor in weights(cwd).values())
    ours, theirs = (checkpoint(folder, "step-00000012") for folder in (cwd, alone(SAVED)))
    torch.testing.assert_close(ours["model"], theirs["model"], atol=0, rtol=0)
    assert ours["due"] == []
    before = without_locks(cwd)
    call(f"{program}/train.py --resume auto", cwd)
    assert without_locks(cwd) == before
