"""The recipe background_save: a thread writes what the loop has copied. A kill costs no more than without it."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from edits import insert_after, insert_before, replace
from helpers import (
    EVERY_FOURTH_STEP,
    LONG,
    MEASURED,
    ON_2,
    PREEMPTED,
    SMALL,
    TWO_SAVES,
    assert_same_best,
    assert_same_run,
    assert_stopped_and_saved,
    assert_whole_checkpoints,
    call,
    history,
    imported,
    interrupt,
    kill_group,
    killed_and_resumed,
    newest,
    run,
    run_dir,
    start,
    terminate,
    wait_for,
    with_recipe,
)
from killer import kill_before, remove_what_is_no_run
from lightning_utilities.core.apply_func import apply_to_collection
from optimizers import HALVED

pytestmark = pytest.mark.recipes

# The thread writes the checkpoint of step 20 only when the loop has done further steps. Both note what they have done.
HELD = """
import pathlib, time

step = contents["step"]
if step == 20:
    gives_up = time.monotonic() + 60
    while "step 23" not in pathlib.Path("done").read_text():
        assert time.monotonic() < gives_up, "the loop has waited for the thread"
        time.sleep(0.01)
    time.sleep(0.2)  # the loop would go on to step 25, if it did not wait for the thread then
"""
WRITTEN = 'with open("done", "a") as file:\n    file.write(f"written {step}\\n")\n'
DONE = 'with open("done", "a") as file:\n    file.write(f"step {step}\\n")'
# Saved every fourth step, logged in each step, and never validated before the end.
RARELY = LONG.replace(EVERY_FOURTH_STEP, "--checkpoint_interval 4 --log_interval 1 --val_interval 10000")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("background_save", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Path:
    program = with_recipe("background_save", tmp_path_factory.mktemp("held"))
    insert_before(program, "checkpoint is written", HELD)
    insert_after(program, "checkpoint is written", WRITTEN)
    return insert_after(program, "step is done", DONE)


def contents(path: Path) -> dict:
    """What a checkpoint holds, its tensors as lists, without what is measured and the code."""
    found = torch.load(path, weights_only=True)
    del found["checkpoint"]["code"], found["checkpoint"]["summary"]["seconds"]
    for name in MEASURED:
        found["checkpoint"]["summary"]["last"].pop(name, None)
    return apply_to_collection(found, torch.Tensor, torch.Tensor.tolist)


def test_the_loop_goes_on_while_a_file_is_written_and_the_next_save_waits_for_it(held: Path, tmp_path: Path):
    """The file has what the state was at its step, though the loop has changed it since."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    options = "--max_steps 32 --num_checkpoint_keep 0"
    run(f"{held}/{RARELY} {options}", ours)
    call(f"{RARELY} {options}", theirs)
    done = (ours / "done").read_text().splitlines()
    assert done.index("step 23") < done.index("written 20") < done.index("step 25")
    assert_same_run(ours, theirs)
    for path in run_dir(theirs).glob("checkpoints/*.ckpt"):
        assert contents(run_dir(ours) / "checkpoints" / path.name) == contents(path)


# ---- kills


@pytest.mark.parametrize("options", [ON_2, pytest.param("--num_workers 1", marks=pytest.mark.night)])
def test_a_killed_run_is_resumed_with_the_same_bits(options: str, program: Path, tmp_path: Path):
    whole, killed = killed_and_resumed(f"{program}/{LONG} {options}", tmp_path)
    assert_same_best(killed, whole)


def test_a_kill_while_a_file_is_written_and_the_loop_is_ahead_costs_nothing(program: Path, held: Path, tmp_path: Path):
    """The rows of later steps are there already."""
    cwd, whole = tmp_path / "cwd", tmp_path / "whole"
    cwd.mkdir(), whole.mkdir()
    call(RARELY, whole)
    process = start(f"{held}/{RARELY.replace('interval 4', 'interval 20')} --num_checkpoint_keep 1", cwd)
    wait_for(lambda: process.poll() is not None or "step 22" in done_in(cwd))
    kill_group(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and newest(cwd) < 20
    run(f"{program}/{RARELY} --resume auto", cwd)
    assert_same_run(cwd, whole)


def done_in(cwd: Path) -> str:
    return (cwd / "done").read_text() if (cwd / "done").exists() else ""


@pytest.mark.parametrize(
    "change",
    [
        "open step-00000002.ckpt.tmp 1",
        "os.rename step-00000002.ckpt.tmp 1",
        "os.link step-00000002.ckpt 1",
        "os.rename best.tmp 1",
        "open step-00000004.ckpt.tmp 1",
        "os.rename step-00000004.ckpt.tmp 1",
        "os.remove step-00000002.ckpt 1",
        "open step-00000004.ckpt.tmp 2",
        "os.rename step-00000004.ckpt.tmp 2",
        "os.rename model.pt 1",
    ],
)
def test_a_kill_before_a_change_of_a_file_by_the_thread_costs_nothing(
    change: str, program: Path, two_saves: Path, tmp_path: Path
):
    cwd = tmp_path / "run"
    cwd.mkdir()
    changes = kill_before(change, f"{program}/{TWO_SAVES}", cwd, tmp_path)
    assert change.rpartition(" ")[0] in "\n".join(changes)
    call(f"{program}/{TWO_SAVES} --resume auto", cwd)
    remove_what_is_no_run(cwd)
    assert_same_run(cwd, two_saves)
    assert_same_best(cwd, two_saves)
    assert not [*run_dir(cwd).glob("**/*.tmp")]


# ---- the end


@pytest.mark.parametrize("devices", ["", ON_2])
def test_a_signal_ends_the_run_when_its_last_checkpoint_is_there(devices: str, program: Path, tmp_path: Path):
    done = interrupt(f"{program}/{LONG} {devices}", tmp_path, terminate)
    assert done.returncode == PREEMPTED
    assert_stopped_and_saved(done, tmp_path)


REFUSED = "train.py: error: the system refused to read or write the run: [Errno 27] File too large"


def test_a_full_disk_costs_no_checkpoint(program: Path, tmp_path: Path):
    """It is told as without the recipe."""
    whole, cwd = tmp_path / "whole", tmp_path / "cwd"
    whole.mkdir(), cwd.mkdir()

    def fill(process) -> None:  # no file may grow beyond 5 kB
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5000, 5000))

    done = interrupt(f"{program}/{LONG}", cwd, fill)
    assert done.returncode == 1
    note = f"the checkpoints are whole, continue with: python train.py --resume {run_dir(cwd).name}"
    assert done.stderr.splitlines()[-1] == f"{REFUSED}; {note}"
    assert_whole_checkpoints(cwd)
    call(LONG, whole)
    call(f"{program}/train.py --resume train_out", cwd)
    assert_same_run(cwd, whole)


# The checkpoint of step 20 is the only file of more than 100 kB.
LOSS = "--limit_val_batches 0 --monitor train/loss --monitor_mode min"
TOO_LARGE = f"--width 64 --checkpoint_interval 20 --log_interval 1 {LOSS}"


def too_large(command: str, cwd: Path) -> str:
    process = start(command, cwd)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    out, error = process.communicate(timeout=300)
    assert process.returncode == 1 and "finished after" not in out
    assert error == f"{REFUSED}\n"
    assert not any(cwd.glob("*/checkpoints/*")) and not any(cwd.glob("*/model.pt"))
    return error


def test_an_error_of_the_thread_ends_the_run_at_the_next_step(held: Path, cwd: Path):
    """And not at the next save."""
    too_large(f"{held}/{RARELY} {TOO_LARGE} --val_interval 10000 --checkpoint_interval 20", cwd)
    assert 23 <= int(history(cwd)[-1]["step"]) < 40


def test_an_error_with_the_last_checkpoint_is_no_success(program: Path, cwd: Path):
    too_large(f"{program}/{RARELY} {TOO_LARGE} --val_interval 10000 --checkpoint_interval 20 --max_steps 20", cwd)


# ---- copies


def test_tied_weights_are_copied_once_and_any_layout_is(program: Path):
    checkpoints = imported(program, "runtime/checkpoints")
    weight = torch.arange(12.0).view(3, 4)
    state = {
        "model": {"weight": weight, "tied": weight.detach(), "transposed": weight.t(), "row": weight[1].clone()},
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j,
    }
    state["conjugate"] = state["complex"].conj()
    expected = {"model": {name: value.clone() for name, value in state["model"].items()}}
    copied = checkpoints.copied_to_cpu(state)
    weight.zero_()
    torch.testing.assert_close(copied["model"], expected["model"], atol=0, rtol=0)
    assert copied["model"]["weight"].data_ptr() == copied["model"]["tied"].data_ptr()
    assert copied["model"]["transposed"].stride() == (1, 4)
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(copied["complex"], -copied["conjugate"])


def test_an_optimizer_whose_state_cannot_be_cloned_is_resumed(tmp_path: Path):
    program = with_recipe("background_save", tmp_path / "program")
    (program / "halved.py").write_text(HALVED)
    insert_before(program, "functions", "from halved import HalvedMomentum\n\n")
    replace(program, "optimizer", "HalvedMomentum(model.parameters())")
    killed_and_resumed(f"{program}/{LONG} --base_lr 0.05", tmp_path, resume=run)


def test_a_rehearsal_leaves_nothing_behind(program: Path, cwd: Path):
    for devices in ("", ON_2):
        done = run(f"{program}/train.py {SMALL} --fast_run {devices}", cwd)
        assert "finished after 4 of 4 steps" in done.stdout
        assert os.listdir(cwd) == []
