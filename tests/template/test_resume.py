"""A run that was killed, or asked to stop, goes on as if nothing had happened. So do finished and damaged ones."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import LONG, ON_2, PREEMPTED, REPO, SLOW, SMALL, STEPS, call, execute, folders, run, start
from comparisons import assert_same_best, assert_same_run, assert_same_training
from edits import insert_after, insert_before
from mistakes import refuses
from outputs import copied, flip_a_bit, history, last_summary, newest, run_dir, set_running, truncate, without_locks
from processes import assert_stopped_and_saved, children, interrupt, kill_group, terminate, wait_for

from config import TrainConfig
from runtime.options import values_of

# ---- interrupted and resumed


@pytest.fixture
def no_nohup():
    """Under nohup, the tests and their processes ignore SIGHUP."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_killed_in_mid_epoch_and_resumed_reads_one_checkpoint_as_a_whole_and_is_the_same_run(whole, killed, tmp_path):
    """Of its checkpoints, the newest alone is read as a whole: best.ckpt may be as large. Nothing is backed by it then:
    the blocks of a file that is deleted would stay taken."""
    cwd = copied(killed, tmp_path)
    program = insert_before(tmp_path / "program", "loop begins", 'print(open("/proc/self/maps").read())')
    insert_before(program, ("runtime/checkpoints.py", "is_whole", "return zipfile.ZipFile(path).testzip() is None"),
                  'print(f"{path} is read as a whole")')  # fmt: skip
    out = run(f"{program}/train.py --resume {run_dir(cwd).name}", cwd).stdout
    assert re.search(rf"resumed from .*step-{newest(killed):08d}\.ckpt", out)
    assert "libtorch_cpu" in out and not re.search(r" /.*\.ckpt\b", out)
    assert out.count("is read as a whole") == 1
    assert_same_run(cwd, whole)
    assert_same_best(cwd, whole)


def kill_rank_1(pid: int, number: int) -> None:
    os.kill(children(pid)[0], number)


THREE = "--devices 3 --strategy ddp --effective_batch_size 48"  # the order in which gradients are added counts


@pytest.mark.parametrize(
    "options, number, kill",
    [
        pytest.param("--num_workers 2", signal.SIGTERM, os.killpg, id="sigterm to the group with workers"),
        pytest.param("", signal.SIGHUP, os.kill, id="hangup of the terminal"),
        pytest.param(ON_2, signal.SIGINT, os.killpg, id="SIGINT to 2 processes", marks=pytest.mark.night),
        pytest.param(THREE, signal.SIGUSR1, kill_rank_1, id="3_processes_stop_together", marks=pytest.mark.night),
    ],
)
def test_a_signal_stops_and_saves_and_the_same_command_goes_on(options, number, kill, whole, no_nohup, tmp_path, cwd):
    """Between two logs: the mean that is logged next is that of all its steps, those before the stop included."""
    command = f"{LONG} {options} --resume auto"  # starts a new run where there is none to go on with
    assert_stopped_and_saved(interrupt(command, cwd, lambda process: kill(process.pid, number)), cwd)
    run(command, cwd)
    if "--devices" in options:
        (whole,) = folders(tmp_path, "whole")
        run(command, whole)
    assert_same_run(cwd, whole)


SIGNALS = """
if step == 50:
    import os, signal, time

    for number in (signal.SIGHUP, signal.SIGTERM) * 2:
        os.kill(os.getpid(), number)
        time.sleep(0.1)  # a handler is called within it
"""


def test_a_signal_that_comes_twice_is_one(no_nohup, program, cwd):
    """A terminal that is closed sends SIGHUP twice; torchrun passes on a SIGTERM that its processes have got, too."""
    done = run(f"{insert_after(program, 'step is done', SIGNALS)}/{LONG}", cwd, code=PREEMPTED)
    assert_stopped_and_saved(done, cwd)
    assert done.stderr.count("stopping at the end of a step") == 1


def test_ranks_ask_each_other_about_once_a_second_whether_to_stop(program, cwd):
    """Not once in twice as many steps as the last time. Nothing else lets them meet: nothing is logged, validated or
    saved before the end."""
    insert_after(program, "step is done", 'time.sleep(0.05); step == 70 and open("is_70", "w").close()')
    seldom = " ".join(f"--{name}_interval 200" for name in ("log", "val", "checkpoint"))
    process = start(f"{insert_before(program, 'functions', 'import time')}/{SLOW} {ON_2} --max_steps 200 {seldom}", cwd)
    wait_for(lambda: process.poll() is not None or (cwd / "is_70").exists())
    process.terminate()
    out, error = process.communicate(timeout=300)
    assert process.returncode == PREEMPTED and int(re.search(r"stopped after (\d+) of", out)[1]) < 115, out + error


def test_a_run_goes_on_with_2_processes_and_again_with_1_in_mid_epoch(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    killed_again = interrupt(f"train.py --resume auto {ON_2}", cwd, kill_group, after=newest(cwd))
    assert killed_again.returncode == -signal.SIGKILL
    assert "resumed from" in call("train.py --resume auto --devices 1 --strategy auto", cwd).stdout
    assert_same_training(cwd, whole)
    for row, expected in zip(history(cwd), history(whole), strict=True):
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert float(row[name]) == pytest.approx(float(expected[name]), abs=1e-5)


def test_a_resume_keeps_the_micro_batch_size_where_it_divides_and_else_says_so(tmp_path):
    for options, size, changed in (
        (f"{SMALL} --max_steps 1", 64, []),
        (f"--resume train_out --max_steps 2 {ON_2}", 32, ["32 instead of 64: dropout"]),
        ("--resume train_out --max_steps 3 --devices 1 --strategy auto", 32, []),
        ("--resume train_out --max_steps 4 --micro_batch_size 16", 16, ["16 instead of 32: dropout"]),
    ):
        out = execute(f"train.py {options}", tmp_path).stdout
        assert f"x {size} micro_batch_size x" in out
        assert re.findall(r"^micro_batch_size (.*: dropout)", out, re.MULTILINE) == changed


# ---- finished runs


def test_a_finished_run_that_is_made_longer_and_stopped_keeps_its_weights(whole, tmp_path):
    """Those of its last finish; the checkpoint of that step has made room for newer ones. The options that have changed
    are listed, and hold from then on."""
    call(f"{LONG} --epochs 3", tmp_path)
    folder = run_dir(tmp_path)
    model = (folder / "model.pt").read_bytes()
    resume = f"train.py --resume {folder.name} --epochs 10 --num_checkpoint_keep 1"
    done = interrupt(resume, tmp_path, terminate, after=newest(tmp_path))
    assert done.returncode == PREEMPTED and f"next: python train.py --resume {folder.name}" in done.stdout
    assert (folder / "model.pt").read_bytes() == model and last_summary(tmp_path)["state"] == "interrupted"
    assert [path.name for path in folder.glob("checkpoints/step-*")] == [f"step-{newest(tmp_path):08d}.ckpt"]
    for option, old, new in (("epochs", 3, 10), ("num_checkpoint_keep", 3, 1)):
        assert re.search(rf"--{option} {new}\b.* {old}\b", done.stdout), f"{option} is not listed"
    call("train.py --resume auto", tmp_path)
    assert last_summary(tmp_path)["state"] == "finished" and len([*folder.glob("checkpoints/step-*")]) == 1
    assert_same_run(tmp_path, whole)
    assert_same_best(tmp_path, whole)


def test_a_run_that_was_ended_with_fewer_steps_than_it_has_made_can_be_made_longer_again(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    step = newest(cwd)
    for _ in range(2):
        printed = call("train.py --resume auto --max_steps 8", cwd).stdout
        assert f"finished after {step} of {step} steps, best" in printed
    assert f"finished after {STEPS} of {STEPS} steps" in call("train.py --resume auto --max_steps 0", cwd).stdout
    assert_same_run(cwd, whole)


OTHERS = "--num_workers 2 --comment again --logger_name wandb --base_lr 0.01 --micro_batch_size 8"


@pytest.mark.parametrize("length, others", [("--early_stopping_patience 1", OTHERS), ("--max_steps 2", ON_2)])
def test_resuming_a_finished_run_says_so_and_changes_nothing(length: str, others: str, tmp_path):
    """Whatever the other options are, which are listed. So it is where checkpoints were deleted to save space: all but
    the best, or all. What summary.json has says that no step is left: their number, or the validations that were not
    better. Only longer it cannot become then."""
    call(f"train.py {SMALL} --base_lr 1e-12 --val_interval 1 --logger_name csv {length}", tmp_path)
    for deleted in ("none", "step-*", "*"):
        for path in run_dir(tmp_path).glob(f"checkpoints/{deleted}"):
            path.unlink()
        before = without_locks(tmp_path)
        printed = execute(f"train.py --resume auto {others}", tmp_path).stdout
        assert "finished after 2 of " in printed and without_locks(tmp_path) == before
        names = {*re.findall(r"--(\w+)", others)}
        assert {*re.findall(r"^--(\w+) .+ instead of ", printed, re.MULTILINE)} == names
    longer = f"train.py --resume auto --early_stopping_patience 0 --max_steps 20 {others}"
    refuses(longer, tmp_path, run_dir(tmp_path).name, "is finished", "no checkpoint", how=execute, code=1)


def test_an_early_stopped_run_is_finished_and_goes_on_with_more_patience(tmp_path):
    early = f"train.py {SMALL} --base_lr 1e-12 --val_interval 2 --logger_name csv --lr_schedule constant"
    alone, cwd = folders(tmp_path, "alone", "stopped")
    call(f"{early} --early_stopping_patience 5", alone)
    for resume in ("", "--resume auto"):
        printed = call(f"{early} --early_stopping_patience 2 {resume}", cwd).stdout
        assert "finished after 6 of 20 steps" in printed
    set_running(run_dir(cwd))  # then the checkpoint says it
    assert "finished after 6 of 20 steps" in call("train.py --resume auto", cwd).stdout
    assert "finished after 12 of 20 steps" in call("train.py --resume auto --early_stopping_patience 5", cwd).stdout
    assert_same_run(cwd, alone)
    assert_same_best(cwd, alone)


# ---- damaged checkpoints


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda path: torch.save({"weights": torch.ones(3)}, path)])
def test_a_damaged_checkpoint_is_named_and_put_aside_and_the_one_before_is_taken(whole, killed, tmp_path, damage):
    """What a kill has left half written is removed without a word. A folder with the name of a temporary file stays, as
    do copies beside the checkpoints, which are not counted either."""
    cwd = copied(killed, tmp_path)
    folder = run_dir(cwd) / "checkpoints"
    for name in ("checkpoints/step-00000099.ckpt.tmp", "config.yaml.tmp", "logs/csv/metrics.csv.tmp"):
        (run_dir(cwd) / name).write_bytes(b"half")
    (folder / "mine.tmp").mkdir()
    *_, older, broken = sorted(folder.glob("step-*.ckpt"))
    copies = ["step-00000099-copy.ckpt", "step-good.ckpt"]
    for name in copies:
        shutil.copy(older, folder / name)
    damage(broken)
    done = call("train.py --resume auto --num_checkpoint_keep 2", cwd)
    assert f"skipped {broken.relative_to(cwd)}: it is damaged\n" in done.stdout
    assert re.search(rf"resumed from .*{older.name}", done.stdout)
    last = ["step-00000076.ckpt", "step-00000080.ckpt"]
    left = {"best.ckpt", f"{broken.name}.damaged", "mine.tmp", *copies, *last}
    assert {path.name for path in folder.iterdir()} == left
    assert [path.name for path in run_dir(cwd).glob("**/*.tmp")] == ["mine.tmp"]
    assert f"checkpoints/{last[1]} on" in call("test.py --accelerator cpu --checkpoint last", cwd).stdout
    assert_same_run(cwd, whole)
    assert_same_best(cwd, whole)


@pytest.mark.parametrize("damage, of_summary", [(truncate, Path.unlink), (Path.unlink, bool)])
def test_without_a_whole_checkpoint_nothing_is_done_and_nothing_deleted(killed, tmp_path, damage, of_summary):
    """It had one once, so it is not begun again."""
    cwd = copied(killed, tmp_path)
    for path in run_dir(cwd).glob("checkpoints/*"):
        damage(path)
    of_summary(run_dir(cwd) / "summary.json")
    words = (f"no checkpoint in {run_dir(cwd).name}/checkpoints can be read", "nothing was changed")
    refuses("train.py --resume auto", cwd, *words, code=1)


# ---- the names of runs


def test_a_new_run_is_later_by_name_than_all_others_of_its_name(tmp_path):
    """Also after the clock was set back, in the hour that it repeats, and for two runs of the same second, since
    `--resume auto` takes the latest. Directories without a config.yaml are in nobody's way: after the last of these
    names no later one could be made; one is no date."""
    older, other = folders(tmp_path, "20991101-015959-train_out", "29991231-235959-other")
    for folder in (older, other):
        (folder / "config.yaml").touch()
    for name in ("99991231-235959-train_out", "20260230-000000-train_out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").symlink_to("nowhere")
    new_york = "EST5EDT,M3.2.0,M11.1.0"  # a second after the older run it is one o'clock again
    twins = [start(f"train.py {SMALL} --max_steps 1", tmp_path, TZ=new_york) for _ in range(2)]
    for twin in twins:
        assert (twin.communicate(timeout=300), twin.returncode)[1] == 0
    made = ["20991101-020000-train_out", "20991101-020001-train_out"]
    assert [path.parent.name for path in sorted(tmp_path.glob("*/model.pt"))] == made
    assert [path.name for path in older.iterdir()] == ["config.yaml"]
    for command in (f"train.py {SMALL} --max_steps 1 --resume auto", "test.py --accelerator cpu"):
        printed = call(command, tmp_path).stdout
        assert "99991231-235959-train_out is skipped: " in printed and made[1] in printed


# ---- which options may change

FIXED = {
    "out_dir": "other", "seed": 3, "dataset": "other", "width": 8, "dropout": 0.5, "effective_batch_size": 32,
    "drop_last": False, "limit_train_batches": 5, "monitor": "val/loss --monitor_mode max",
    "monitor_mode": "min --monitor val/accuracy", "weight_decay": 0.5,
}  # fmt: skip
FREE = (
    "--comment x --project x --accelerator auto --devices 1 --num_nodes 1 --strategy ddp --deterministic False "
    "--num_threads 2 --timeout 100 --precision bf16-mixed --compile default --micro_batch_size 16 --num_workers 1 "
    "--epochs 9 --max_steps 24 --base_lr 0.1 --base_batch_size 32 --lr_scaling_rule sqrt --warmup_epochs 0.5 "
    "--lr_schedule linear --max_grad_norm 1 --early_stopping_patience 9 --early_stopping_min_delta 0.1 "
    "--logger_name csv --log_per_epoch 2 --log_interval 3 --val_frequency 2 --val_interval 3 --checkpoint_frequency 2 "
    "--checkpoint_interval 3 --num_checkpoint_keep 1 --limit_val_batches 1 --num_sanity_val_steps 2 --summary True"
)


@pytest.mark.night
def test_the_options_that_a_resume_cannot_change_are_those_of_the_page(tmp_path):
    """Each is tried. root_dir says where to look, and the digits have no data_dir."""
    page = (REPO / "docs" / "guarantees.md").read_text()
    (listed,) = re.findall(r"^Eleven options cannot change: (.*?)\.\s", page, re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"`--(\w+)`", listed)} == {*FIXED} and len(FIXED) == 11
    free = {*re.findall(r"--(\w+)", FREE)}
    assert free | {*FIXED, "root_dir", "data_dir", "fast_run"} == {*values_of(TrainConfig())}
    call(f"train.py {SMALL}", tmp_path)
    resume = f"train.py --resume {run_dir(tmp_path).name}"
    for name, value in FIXED.items():
        refuses(f"{resume} --epochs 6 --{name} {value}", tmp_path, name, how=run)
    assert "finished after 24 of 24 steps" in run(f"{resume} {FREE}", tmp_path).stdout
