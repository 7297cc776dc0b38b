"""What is due after a step is saved first, then validated and logged: whatever happens there, no step is lost, and the
resumed run is the same. And how a run ends."""

import signal
from pathlib import Path

import pytest
import torch
from edits import insert_after, insert_before
from helpers import (
    ON_2,
    PREEMPTED,
    assert_same_best,
    assert_same_run,
    assert_whole_checkpoints,
    call,
    checkpoint,
    copied,
    execute,
    history,
    last_summary,
    newest,
    rows,
    run,
    run_dir,
    set_running,
    weights,
    without_locks,
)
from killer import kill_before
from mistakes import assert_one_line

# 12 steps, each logged; 4, 8 and 12 are validated, in batches of 16 samples: eight on one process, four on each of two.
OPTIONS = (
    "--accelerator cpu --max_steps 12 --limit_train_batches 4 --limit_val_batches 2 --num_sanity_val_steps 3 --width 4 "
    "--micro_batch_size 16 --log_interval 1 --val_interval 4 --logger_name csv"
)
SAVED = f"{OPTIONS} --checkpoint_interval 4"  # with each validation
BETWEEN = f"{OPTIONS} --checkpoint_interval 3"  # at 3, 6, 9 and 12
DEVICES = pytest.mark.parametrize("devices", ["", ON_2], ids=["1", "2"])
SIGTERM = "os.kill(os.getpid(), signal.SIGTERM)"
SIGKILL = "os.kill(os.getpid(), signal.SIGKILL)"
STRIKE = """
import os
import signal
from pathlib import Path

AT = {{"step": 0, "batch": 0}}  # the validation of a step, and its batch


def strike():
    AT["batch"] += 1
    is_here = AT == {{"step": {step}, "batch": 2}} and int(os.environ.get("LOCAL_RANK", 0)) == {rank}
    if is_here and Path("strike").exists():
        Path("strike").unlink()
        {action}


"""


def striking(program: Path, cwd: Path, action: str, step: int = 8, rank: int = 0) -> Path:
    """A copy of the program that does something once, on one rank: in the validation of a step, 0 for the one before
    the first step, in its second batch."""
    (cwd / "strike").touch()
    insert_before(program, "functions", STRIKE.format(action=action, step=step, rank=rank))
    insert_before(program, "validation", "AT.update(step=step, batch=0)")
    return insert_before(program, "batch", "if not model.training:\n    strike()")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Where a run with these options was left alone. To be read, not changed."""
    folders: dict = {}

    def train(options: str) -> Path:
        if options not in folders:
            folders[options] = tmp_path_factory.mktemp("alone")
            execute(f"train.py {options}", folders[options])
        return folders[options]

    return train


def assert_resumed(cwd: Path, other: Path, devices: str = "") -> None:
    """Resumes the run to its end: it is the one that was left alone."""
    execute(f"train.py --resume auto {devices}", cwd)
    assert_same_run(cwd, other)
    assert_same_best(cwd, other)
    assert_whole_checkpoints(cwd)
    assert last_summary(cwd)["state"] == "finished"
    assert [*run_dir(cwd).rglob("*.tmp")] == []


# ---- in a validation


ACTIONS = {"signal": SIGTERM, "kill": SIGKILL, "metric": "raise ValueError('too few classes')"}
PICTURE = 'if step == 8 and fabric.is_global_zero:\n    raise ValueError("no such font")'


@DEVICES
@pytest.mark.parametrize(
    "what, options, code",
    [("signal", SAVED, PREEMPTED), ("signal", BETWEEN, PREEMPTED), ("kill", SAVED, -signal.SIGKILL),
     ("metric", SAVED, 1), (insert_before, SAVED, 1), (insert_after, SAVED, 1)],
)  # fmt: skip
def test_a_signal_in_a_validation_a_kill_or_a_metric_that_fails_or_a_picture_that_fails_loses_no_step(
    what, options, code, devices, alone, program, cwd
):
    """The picture is drawn before the row is logged, or after it. A signal ends a validation, whichever rank gets it.
    The resumed run makes the validation again."""
    options = f"{options} {devices}"
    if what in ACTIONS:
        striking(program, cwd, ACTIONS[what], rank=1 if devices and what == "signal" else 0)
    else:
        what(program, "row is logged", PICTURE)
    done = run(f"{program}/train.py {options}", cwd, code=code)
    assert newest(cwd) == 8
    assert ("Traceback" in done.stderr and "ValueError: " in done.stderr) == (code == 1)
    if what == "signal":
        assert "stopped after 8 of 12 steps" in done.stdout
        assert checkpoint(cwd, "step-00000008")["due"] == ["validate", "log"]
        assert history(cwd)[-1]["step"] == "7"
        assert last_summary(cwd)["state"] == "interrupted"
    assert_resumed(cwd, alone(options), devices)


@DEVICES
def test_a_signal_in_the_validation_that_a_resume_makes_first_ends_it(devices, alone, program, cwd):
    options = f"{SAVED} {devices}"
    striking(program, cwd, SIGKILL)
    run(f"{program}/train.py {options}", cwd, code=-signal.SIGKILL)
    other = striking(program.with_name("other"), cwd, SIGTERM)
    before = without_locks(cwd)
    done = run(f"{other}/train.py --resume auto {devices}", cwd, code=PREEMPTED)
    assert "stopped after 8 of 12 steps" in done.stdout
    assert {path for path, content in before.items() if without_locks(cwd).get(path) != content} == {cwd / "strike"}
    assert_resumed(cwd, alone(options), devices)


@DEVICES
@pytest.mark.parametrize("how", ["signal", "break"])
def test_an_end_before_the_first_step_makes_no_directory(how, devices, program, cwd):
    if how == "signal":
        striking(program, cwd, SIGTERM, step=0)
    else:
        insert_before(program, "step begins", "break")
    done = run(f"{program}/train.py {OPTIONS} --num_sanity_val_steps 8 {devices}", cwd, PREEMPTED * (how == "signal"))
    assert ("before the first step" if how == "signal" else "finished after 0 of 12 steps") in done.stdout
    assert [*cwd.iterdir()] == []


def test_weights_that_a_stopped_validation_has_changed_are_not_saved(alone, program, cwd):
    """Such as an average that is swapped in, and, without `finally`, out again only where nothing happens."""
    for edit, sign in ((insert_before, "*"), (insert_after, "/")):
        edit(program, "validation", f"for parameter in model.parameters():\n    parameter.data {sign}= 2")
    whole = cwd / "whole"
    whole.mkdir()
    call(f"{program}/train.py {BETWEEN}", whole)
    stopped = cwd / "stopped"
    stopped.mkdir()
    striking(program, stopped, SIGTERM)
    done = run(f"{program}/train.py {BETWEEN}", stopped, code=PREEMPTED)
    assert "not saved: the validation that was stopped has changed the weights" in done.stdout
    assert newest(stopped) == 6
    run(f"{program}/train.py --resume auto", stopped)
    assert_same_run(stopped, whole)


def test_a_loss_that_is_not_finite_is_neither_saved_nor_logged(program, cwd):
    """A resume from such a checkpoint would end with it again."""
    insert_before(program, "micro-batch is done", "values['loss'] = values['loss'] * (math.nan if step == 7 else 1)")
    assert_one_line(run(f"{program}/train.py {SAVED} --log_interval 4", cwd, code=1), "loss", "nan", "8")
    assert newest(cwd) == 4 and [row["step"] for row in rows(cwd)] == [4]


# ---- best.ckpt


NO_LINK = "def no_link(*paths):\n    raise PermissionError\n\n\nimport os\n\nos.link = no_link\n\n\n"


def test_best_ckpt_is_a_link_to_the_checkpoint_of_its_step(alone, program, cwd):
    """Of a step between two saves it is a file of its own; where there are no links, a copy."""
    step = checkpoint(alone(SAVED), "best")["step"]
    assert checkpoint(alone(BETWEEN), "best")["step"] == step and checkpoint(alone(BETWEEN), "best")["due"] == []
    insert_before(program, "functions", NO_LINK)
    call(f"{program}/train.py {SAVED}", cwd)
    assert_same_best(cwd, alone(SAVED))
    for folder, is_link in ((alone(SAVED), True), (cwd, False)):
        path = run_dir(folder) / "checkpoints" / "best.ckpt"
        assert path.samefile(path.with_name(f"step-{step:08d}.ckpt")) == is_link
        assert [*path.parent.glob("*.tmp")] == []


@pytest.mark.parametrize("options", [SAVED, BETWEEN], ids=["saved", "between two saves"])
def test_a_run_is_resumed_from_best_ckpt_alone(options, alone, tmp_path):
    """The others may have been deleted to save space."""
    cwd = copied(alone(options), tmp_path)
    for path in run_dir(cwd).glob("checkpoints/step-*.ckpt"):
        path.unlink()
    set_running(run_dir(cwd))
    (run_dir(cwd) / "model.pt").unlink()
    assert_resumed(cwd, alone(options))


def test_a_validation_that_is_still_due_is_made_whatever_the_options_of_the_resume(alone, program, cwd):
    striking(program, cwd, SIGKILL)
    run(f"{program}/train.py {SAVED}", cwd, code=-signal.SIGKILL)
    call("train.py --resume auto --val_interval 12", cwd)
    assert [row["step"] for row in rows(cwd) if "val/loss" in row] == [4, 8, 12]
    assert_same_run(cwd, alone(SAVED))
    assert_same_best(cwd, alone(SAVED))


# ---- how a run ends


BREAK = "if step == 6:\n    report()\n    break"


def with_break(program: Path) -> Path:
    """As at the end of the loop."""
    return insert_after(program, ("train.py", "train", 'state["due"] = plan.due(step)'), BREAK)


@DEVICES
def test_a_break_finishes_the_run(devices, program, cwd):
    """Its last step is saved, without a validation; a resume makes no step, unless the plan has more of them."""
    done = execute(f"{with_break(program)}/train.py {SAVED} {devices}", cwd)
    assert "finished after 6 of 12 steps" in done.stdout
    assert newest(cwd) == 6 and last_summary(cwd)["state"] == "finished"
    torch.testing.assert_close(checkpoint(cwd, "step-00000006")["model"], weights(cwd), atol=0, rtol=0)
    before = without_locks(cwd)
    again = execute(f"train.py --resume auto {devices}", cwd)
    assert "finished after 6 of 12 steps" in again.stdout and without_locks(cwd) == before
    longer = execute(f"train.py --resume auto --max_steps 13 {devices}", cwd)
    assert "finished after 13 of 13 steps" in longer.stdout
    assert [int(row["step"]) for row in history(cwd)] == [*range(1, 14)]


@pytest.mark.parametrize("change", ["open model.pt.tmp 1", "os.rename summary.json.tmp 4"])
def test_a_break_whose_end_a_kill_has_cut_off_is_finished_by_a_resume(change, program, cwd, tmp_path):
    kill_before(change, f"{with_break(program)}/train.py {SAVED}", cwd, tmp_path)
    assert newest(cwd) == 6 and last_summary(cwd)["state"] == "running"
    done = call("train.py --resume auto", cwd)
    assert "finished after 6 of 12 steps" in done.stdout
    assert last_summary(cwd)["state"] == "finished"
    torch.testing.assert_close(checkpoint(cwd, "step-00000006")["model"], weights(cwd), atol=0, rtol=0)


CONTINUE = "if step in (5, 6):\n    {}\n    continue"
SIGNAL_ONCE = "if os.path.exists('strike'):\n        os.remove('strike')\n        os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize("how", ["signal", "kill"])
def test_a_step_that_is_left_by_continue_is_not_made_twice(how, program, cwd, tmp_path):
    """Nor do its values come twice into the next mean."""
    other = program.with_name("other")
    for each, code in ((program, "pass"), (other, SIGNAL_ONCE)):
        insert_before(each, "functions", "import os\nimport signal\n\n\n")
        insert_before(each, "gradients are unscaled", CONTINUE.format(code))
    whole = tmp_path / "whole"
    whole.mkdir()
    options = f"{SAVED} --log_interval 4"
    call(f"{program}/train.py {options}", whole)
    if how == "signal":
        (cwd / "strike").touch()
        done = run(f"{other}/train.py {options}", cwd, code=PREEMPTED)
        assert "stopped after 5 of 12 steps" in done.stdout and newest(cwd) == 5
    else:
        kill_before("os.rename step-00000008.ckpt.tmp 1", f"{program}/train.py {options}", cwd, tmp_path)
        assert newest(cwd) == 4
    call(f"{program}/train.py --resume auto", cwd)
    assert_same_run(cwd, whole)
    done = call(f"{program}/train.py {SAVED} --max_steps 6 --out_dir short", cwd)  # the last step is left
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


@pytest.mark.parametrize("change", ["open model.pt.tmp 1", "os.rename model.pt.tmp 1", "open summary.json.tmp 6"])
def test_a_kill_after_the_last_checkpoint_leaves_what_a_resume_makes(change, alone, cwd, tmp_path):
    kill_before(change, f"train.py {SAVED}", cwd, tmp_path)
    assert newest(cwd) == 12 and last_summary(cwd)["state"] == "running"
    assert_resumed(cwd, alone(SAVED))


@pytest.mark.night
@DEVICES
def test_a_kill_before_any_change_of_a_file_around_a_validation_loses_nothing(devices, alone, cwd, tmp_path):
    """Of the ranks, the first one alone changes files of the run."""
    counted = tmp_path / "counted"
    counted.mkdir()
    changes = kill_before(0, f"train.py {BETWEEN} {devices}", counted, tmp_path)
    first = changes.index("os.rename step-00000003.ckpt.tmp")
    for number in range(first + 1, len(changes) + 1):
        folder = cwd / str(number)
        folder.mkdir()
        kill_before(number, f"train.py {BETWEEN} {devices}", folder, tmp_path)
        assert_resumed(folder, alone(f"{BETWEEN} {devices}"), devices)
