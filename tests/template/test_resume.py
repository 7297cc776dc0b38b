"""A run that was killed, or asked to stop, goes on as if nothing had happened."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from edits import insert_after, insert_before, with_text
from helpers import (
    LONG,
    ON_2,
    PREEMPTED,
    REPO,
    SLOW,
    SMALL,
    STEPS,
    assert_same_best,
    assert_same_run,
    assert_same_training,
    assert_stopped_and_saved,
    assert_told_by_ranks,
    call,
    copied,
    flip_a_bit,
    history,
    interrupt,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    set_running,
    snapshot,
    start,
    terminate,
    terminate_group,
    terminate_rank_1,
    truncate,
    wait_for,
    without_locks,
)

import train
from config import TrainConfig
from runtime import checkpoints
from runtime.cli import parse_train
from runtime.options import values_of

# ---- interrupted and resumed


def test_killed_in_mid_epoch_and_resumed_is_the_same_run(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    done = run(f"train.py --resume {run_dir(cwd).name}", cwd)
    assert re.search(rf"resumed from .*step-{newest(killed):08d}\.ckpt", done.stdout)
    assert_same_run(cwd, whole)
    assert_same_best(cwd, whole)


def test_sigterm_saves_and_resume_auto_goes_on_in_the_same_directory(whole, tmp_path):
    """Between two logs: the mean that is logged next is that of all its steps, those before the stop included."""
    command = f"{LONG} --resume auto"  # starts a new run where there is none to go on with
    assert_stopped_and_saved(interrupt(command, tmp_path, terminate), tmp_path)
    call(command, tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_hangup_of_the_terminal_saves_and_goes_on(whole, tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the tests and their processes ignore it
    try:
        done = interrupt(LONG, tmp_path, lambda process: process.send_signal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert_stopped_and_saved(done, tmp_path)
    call("train.py --resume auto", tmp_path)
    assert_same_run(tmp_path, whole)


TWICE = """
if step == 50:
    import pathlib, time

    pathlib.Path("reached").touch()
    while not pathlib.Path("sent").exists():
        time.sleep(0.02)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_comes_twice_is_one(number: int, tmp_path):
    """A terminal that is closed sends SIGHUP twice; torchrun passes on a SIGTERM that its processes have got, too."""
    program = insert_after(tmp_path / "program", "step is done", TWICE)
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the tests and their processes ignore it
    process = start(f"{program}/{LONG} --epochs 3000", tmp_path)
    signal.signal(signal.SIGHUP, previous)
    wait_for(lambda: process.poll() is not None or (tmp_path / "reached").exists())
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.2)
    (tmp_path / "sent").touch()
    out, err = process.communicate(timeout=300)
    done = subprocess.CompletedProcess(LONG, process.returncode, out, err)
    assert_stopped_and_saved(done, tmp_path)
    assert err.count("stopping at the end of a step") == 1


def test_with_nohup_a_hangup_changes_nothing(tmp_path):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by what is started
    process = start(SLOW, tmp_path)
    signal.signal(signal.SIGHUP, handler)
    wait_for(lambda: newest(tmp_path) > 8)
    process.send_signal(signal.SIGHUP)
    reached = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > reached + 4)
    assert process.poll() is None, process.communicate()
    process.terminate()
    out, err = process.communicate()
    assert process.returncode == PREEMPTED, out + err


@pytest.mark.night
@pytest.mark.parametrize("devices", ["", ON_2])
def test_a_limit_of_time_stops_the_run_and_the_same_command_goes_on(devices: str, whole, tmp_path):
    """`timeout` ends its command as it does when the time is over: SIGALRM is what tells it."""
    command = shlex.join([sys.executable, *f"{REPO}/{LONG} {devices} --resume auto".split()])
    script = tmp_path / "limited.sh"
    script.write_text(f"exec timeout --preserve-status 8h {command}\n")
    cwd = tmp_path / "run"
    cwd.mkdir()
    done = interrupt(str(script), cwd, lambda process: process.send_signal(signal.SIGALRM))
    assert_stopped_and_saved(done, cwd)
    run(str(script), cwd)
    (assert_same_training if devices else assert_same_run)(cwd, whole)


def test_sigterm_to_the_group_with_workers_saves_and_goes_on(whole, tmp_path):
    assert_stopped_and_saved(interrupt(f"{LONG} --num_workers 2", tmp_path, terminate_group), tmp_path)
    call(f"train.py --resume {run_dir(tmp_path)}", tmp_path)
    assert_same_run(tmp_path, whole)


@pytest.mark.night
def test_3_processes_stop_together_and_go_on(tmp_path):
    """With three, the order in which gradients are added counts, and DDP changes it after its first backward pass."""
    whole, cwd = tmp_path / "whole", tmp_path / "interrupted"
    whole.mkdir()
    cwd.mkdir()
    on_3 = f"{LONG} --devices 3 --strategy ddp --effective_batch_size 48"
    uninterrupted = start(on_3, whole)
    assert_stopped_and_saved(interrupt(on_3, cwd, terminate_rank_1), cwd)
    run(f"train.py --resume {run_dir(cwd).name}", cwd)
    assert uninterrupted.communicate() and uninterrupted.returncode == 0
    assert_same_run(cwd, whole)


def test_a_run_goes_on_with_2_processes_and_again_with_1_in_mid_epoch(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    resume = f"train.py --resume auto {ON_2}"
    assert interrupt(resume, cwd, kill_group, after=newest(cwd)).returncode == -signal.SIGKILL
    assert "resumed from" in call("train.py --resume auto --devices 1 --strategy auto", cwd).stdout
    assert_same_training(cwd, whole)
    for row, expected in zip(history(cwd), history(whole), strict=True):
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert float(row[name]) == pytest.approx(float(expected[name]), abs=1e-5)


def test_a_resume_keeps_the_micro_batch_size_where_it_divides_and_else_says_so(tmp_path):
    def line(options: str) -> str | None:
        done = (run if ON_2 in options else call)(f"train.py {options}", tmp_path).stdout
        equation = re.search(r"x (\d+) micro_batch_size x", done)[1]
        changed = re.search(r"^micro_batch_size (\d+) instead of (\d+): dropout .* differ", done, re.MULTILINE)
        return f"{changed[2]} -> {changed[1]}" if changed else f"{equation}, no word of it"

    assert line(f"{SMALL} --max_steps 1") == "64, no word of it"
    resume = "--resume train_out --max_steps"
    assert line(f"{resume} 2 {ON_2}") == "64 -> 32"
    assert line(f"{resume} 3 --devices 1 --strategy auto") == "32, no word of it"
    assert line(f"{resume} 4 --micro_batch_size 16") == "32 -> 16"


# ---- what depends on the state


NEW_PROGRESS = """
if step % plan.steps_per_epoch == 0:
    state["progress"] = str(sum(p.double().sum().item() for p in model.parameters()))
    sampler.progress = state["progress"]
"""


def test_an_order_that_depends_on_the_training_is_resumed(whole, tmp_path):
    """A curriculum: the order of an epoch depends on the weights at its start. Workers do not run ahead of it."""
    of_progress = ("{self.seed} {epoch}", "{self.seed} {epoch}{self.progress}")
    repo = with_text(tmp_path / "repo", "runtime/loader.py", of_progress)
    insert_before(repo, "state", '"progress": "",')
    insert_before(repo, "loop begins", 'sampler.progress = state["progress"]')
    insert_after(repo, "step is done", NEW_PROGRESS)
    command = f"{repo}/{LONG} --num_workers 2"
    alone, cwd = tmp_path / "alone", tmp_path / "interrupted"
    alone.mkdir()
    cwd.mkdir()
    call(command, alone)
    assert history(alone)[0] == history(whole)[0] and history(alone)[1] != history(whole)[1]
    assert interrupt(command, cwd, kill_group).returncode == -signal.SIGKILL
    call(f"{repo}/train.py --resume auto", cwd)
    assert_same_run(cwd, alone)


# 16-mixed on the CPU, as far as the gradient scaler goes. (Without `--precision 16-mixed`, which is refused there.)
SCALED = """
from lightning.fabric.plugins import MixedPrecision

del options["precision"]
options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
"""


@pytest.mark.parametrize("saved, expected", [(8.0, 8.0), (None, 2.0)])
def test_the_gradient_scaler_is_restored_or_starts_afresh(saved: float | None, expected: float, tmp_path):
    """The program of the resume begins with a scale of 2; the run so far has another one, or no scaler."""
    first = insert_before(tmp_path / "first", "Fabric", SCALED.replace("SCALE", str(saved)) if saved else "")
    then = insert_before(tmp_path / "then", "Fabric", SCALED.replace("SCALE", "2.0"))
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    call(f"{first}/train.py {SMALL} --max_steps 2", cwd)
    call(f"{then}/train.py --resume auto --max_steps 4", cwd)
    (path,) = cwd.glob("*/checkpoints/step-00000004.ckpt")
    assert torch.load(path, weights_only=True)["precision"]["scale"] == expected


# ---- finished runs and changed options


def test_a_copy_beside_the_checkpoints_is_none_of_them(tmp_path):
    """It is not taken for the newest, not counted among those that are kept, and not deleted."""
    call(f"train.py {SMALL} --epochs 2", tmp_path)
    folder = run_dir(tmp_path) / "checkpoints"
    for name in ("step-good.ckpt", "step-baseline.ckpt", "step-00000004-copy.ckpt"):
        shutil.copy(folder / "step-00000004.ckpt", folder / name)
    call("train.py --resume auto --epochs 4 --num_checkpoint_keep 2", tmp_path)
    names = ["best", "step-00000004-copy", "step-00000012", "step-00000016", "step-baseline", "step-good"]
    assert [path.stem for path in sorted(folder.iterdir())] == names
    assert f"{folder.name}/step-00000016.ckpt" in call("test.py --accelerator cpu --checkpoint last", tmp_path).stdout


def test_a_finished_run_is_extended_and_lists_what_changed(whole, tmp_path):
    call(f"{LONG} --epochs 3", tmp_path)
    done = call(f"train.py --resume {run_dir(tmp_path).name} --epochs 10 --num_checkpoint_keep 2", tmp_path)
    assert_same_run(tmp_path, whole)
    assert_same_best(tmp_path, whole)
    assert len(list(tmp_path.glob("*/checkpoints/step-*.ckpt"))) == 2
    config = yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())
    assert set(config) == {field.name for field in fields(TrainConfig)} - {"resume", "config_path"}
    assert (config["epochs"], config["num_checkpoint_keep"], config["micro_batch_size"]) == (10, 2, 16)
    for option, old, new in (("epochs", 3, 10), ("num_checkpoint_keep", 3, 2)):
        assert re.search(rf"--{option} {new}\b.* {old}\b", done.stdout), f"{option} is not listed"


def test_a_run_that_was_ended_with_fewer_steps_than_it_has_made_can_be_made_longer_again(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    step = newest(cwd)
    for _ in range(2):
        printed = call("train.py --resume auto --max_steps 8", cwd).stdout
        assert f"finished after {step} of {step} steps, best" in printed
    assert f"finished after {STEPS} of {STEPS} steps" in call("train.py --resume auto --max_steps 0", cwd).stdout
    assert_same_run(cwd, whole)


@pytest.mark.parametrize(
    "options, ending",
    [
        ("", "80 of 80 steps"),
        (
            "--num_workers 2 --timeout 60 --comment again --logger_name wandb --summary true",
            "80 of 80 steps",
        ),
        ("--base_lr 0.01 --micro_batch_size 8", "80 of 80 steps"),
        ("--epochs 3", "80 of 80 steps"),
        (ON_2, "80 of 80 steps"),
    ],
)
def test_resuming_a_finished_run_says_so_and_changes_nothing(options: str, ending: str, whole, tmp_path):
    """Whatever the options are. Those that differ are listed, as on every resume."""
    cwd = copied(whole, tmp_path)
    before = snapshot(cwd)
    for command in (f"train.py --resume {run_dir(cwd).name}", f"{LONG} --resume auto"):
        done = (run if ON_2 in options else call)(f"{command} {options}", cwd)
        assert f"finished after {ending}, best " in done.stdout
        for name in re.findall(r"--(\w+)", options):
            assert re.search(rf"^--{name} .+ instead of ", done.stdout, re.MULTILINE)
        assert snapshot(cwd) == before


def without_checkpoints(cwd: Path) -> None:
    shutil.rmtree(run_dir(cwd) / "checkpoints")


def with_the_best_alone(cwd: Path) -> None:
    for path in run_dir(cwd).glob("checkpoints/step-*"):
        path.unlink()


@pytest.mark.parametrize("delete", [without_checkpoints, with_the_best_alone])
@pytest.mark.parametrize("options", ["--early_stopping_patience 1", "--max_steps 2"])
def test_a_finished_run_whose_checkpoints_were_deleted_is_still_finished(options: str, delete, tmp_path):
    """To save space. What summary.json has says that no step is left: their number, or the validations that were not
    better."""
    call(f"train.py {SMALL} --base_lr 1e-12 --val_interval 1 --logger_name csv {options}", tmp_path)
    delete(tmp_path)
    before = snapshot(tmp_path)
    assert "finished after 2 of " in call("train.py --resume auto", tmp_path).stdout
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("devices", ["", ON_2])
def test_a_finished_run_without_checkpoints_cannot_become_longer(devices: str, whole, tmp_path):
    cwd = copied(whole, tmp_path)
    without_checkpoints(cwd)
    before = snapshot(cwd)
    error = (run if devices else call)(f"train.py --resume auto --epochs 20 {devices}", cwd, code=1).stderr
    words = f"{run_dir(cwd).name} is finished, and has no checkpoint left to become longer from"
    if devices:
        assert_told_by_ranks(error, words)
    else:
        assert error == f"train.py: error: {words}\n"
    assert snapshot(cwd) == before


def test_a_finished_run_that_is_made_longer_and_stopped_keeps_its_weights(tmp_path):
    """Those of its last finish; the checkpoint of that step has made room for newer ones."""
    call(f"{LONG} --epochs 3 --num_checkpoint_keep 1", tmp_path)
    folder = run_dir(tmp_path)
    model, finished = (folder / "model.pt").read_bytes(), newest(tmp_path)
    done = interrupt("train.py --resume auto --epochs 2000", tmp_path, terminate, after=finished)
    assert done.returncode == PREEMPTED
    assert [path.name for path in folder.glob("checkpoints/step-*")] == [f"step-{newest(tmp_path):08d}.ckpt"]
    assert newest(tmp_path) > finished and (folder / "model.pt").read_bytes() == model
    assert last_summary(tmp_path)["state"] == "interrupted"
    assert f"next: python train.py --resume {folder.name}" in done.stdout
    assert "resumed from" in call(f"train.py --resume auto --max_steps {newest(tmp_path) + 1}", tmp_path).stdout
    assert last_summary(tmp_path)["state"] == "finished" and (folder / "model.pt").read_bytes() != model


def test_an_early_stopped_run_is_finished_and_goes_on_with_more_patience(tmp_path):
    early = f"train.py {SMALL} --base_lr 1e-12 --val_interval 2 --logger_name csv --lr_schedule constant"
    alone, cwd = tmp_path / "alone", tmp_path / "stopped"
    alone.mkdir()
    cwd.mkdir()
    call(f"{early} --early_stopping_patience 5", alone)
    assert "finished after 6 of 20 steps" in call(f"{early} --early_stopping_patience 2", cwd).stdout
    command = f"{early} --early_stopping_patience 2 --resume auto"
    assert "finished after 6 of 20 steps" in call(command, cwd).stdout
    set_running(run_dir(cwd))
    assert "finished after 6 of 20 steps" in call("train.py --resume auto", cwd).stdout
    assert "finished after 12 of 20 steps" in call("train.py --resume auto --early_stopping_patience 5", cwd).stdout
    assert_same_run(cwd, alone)
    assert_same_best(cwd, alone)


def test_a_run_without_a_checkpoint_yet_says_that_it_begins_again(tmp_path):
    program = insert_after(tmp_path / "program", "step is done", "if step == 2:\n    raise ValueError")
    command = f"train.py {SMALL} --max_steps 4"
    call(f"{program}/{command}", tmp_path, code=1)
    line = "\nthe run has no checkpoint yet, and begins again at step 0\n"
    assert line in call(f"{command} --resume auto", tmp_path).stdout
    assert line not in call("train.py --resume auto --max_steps 6", tmp_path).stdout


# ---- damaged checkpoints


def other_contents(path: Path) -> None:
    torch.save({"weights": torch.ones(3)}, path)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, other_contents])
def test_a_damaged_checkpoint_is_named_and_put_aside_and_the_one_before_is_taken(whole, killed, tmp_path, damage):
    """What a kill has left half written is removed without a word."""
    cwd = copied(killed, tmp_path)
    for name in (
        "checkpoints/step-00000099.ckpt.tmp",
        "checkpoints/best.ckpt.tmp",
        "config.yaml.tmp",
        "logs/csv/metrics.csv.tmp",
    ):
        (run_dir(cwd) / name).write_bytes(b"half")
    *_, older, broken = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))
    damage(broken)
    done = call("train.py --resume auto", cwd)
    assert f"skipped {broken.relative_to(cwd)}: it is damaged\n" in done.stdout
    assert re.search(rf"resumed from .*{older.name}", done.stdout)
    assert broken.with_name(f"{broken.name}.damaged").exists() and not [*run_dir(cwd).glob("**/*.tmp")]
    assert_same_run(cwd, whole)
    assert_same_best(cwd, whole)


def test_odd_things_in_a_run_directory_do_not_stop_a_resume(whole, killed, tmp_path):
    """Folders with the names of a temporary file and of a log, and a best.ckpt whose step is a text."""
    cwd = copied(killed, tmp_path)
    (run_dir(cwd) / "notes.tmp").mkdir()
    (run_dir(cwd) / "logs" / "of-mine-1.0").mkdir()
    best = run_dir(cwd) / "checkpoints" / "best.ckpt"
    forged = torch.load(best, weights_only=True)
    forged["checkpoint"]["step"] = "many"
    best.unlink()  # it may be a link to a regular checkpoint
    torch.save(forged, best)
    call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)
    assert (run_dir(cwd) / "notes.tmp").is_dir()


def test_a_resume_reads_one_checkpoint_as_a_whole_and_none_at_the_end(killed, tmp_path, monkeypatch):
    """best.ckpt and the newest checkpoint may be one file of many gigabytes."""
    monkeypatch.chdir(copied(killed, tmp_path))
    read = []
    is_whole = checkpoints.is_whole
    monkeypatch.setattr(checkpoints, "is_whole", lambda path: read.append(path) or is_whole(path))
    train.main(parse_train(TrainConfig, ["--resume", "auto"]))
    assert len(read) == 1


def test_after_a_resume_nothing_is_backed_by_the_checkpoint(killed, tmp_path):
    """Otherwise the blocks of a deleted checkpoint would stay taken."""
    cwd = copied(killed, tmp_path)
    program = insert_before(tmp_path / "program", "loop begins", 'print(open("/proc/self/maps").read())')
    maps = call(f"{program}/train.py --resume auto", cwd).stdout
    assert "libtorch_cpu" in maps
    assert not re.search(rf"{cwd}/.*\.ckpt", maps)  # files of other tests may be mapped by this process


def truncate_all(folder: Path) -> None:
    for path in folder.iterdir():
        truncate(path)


def truncate_all_and_lose_the_summary(folder: Path) -> None:
    truncate_all(folder)
    (folder.parent / "summary.json").unlink()


def truncate_all_and_the_summary(folder: Path) -> None:
    truncate_all(folder)
    truncate(folder.parent / "summary.json")


DAMAGES = [truncate_all, truncate_all_and_lose_the_summary, truncate_all_and_the_summary, shutil.rmtree]


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_whole_checkpoint_nothing_is_done_and_nothing_deleted(killed, tmp_path, damage):
    """It had one once, so it is not begun again."""
    cwd = copied(killed, tmp_path)
    damage(run_dir(cwd) / "checkpoints")
    before = without_locks(cwd)
    error = call("train.py --resume auto", cwd, code=1).stderr
    assert re.fullmatch(r"train.py: error: no checkpoint in \S+ can be read.*", error.splitlines()[-1])
    assert "Traceback" not in error
    assert without_locks(cwd) == before


def test_every_checkpoint_loads_as_plain_values(whole, killed):
    paths = [*whole.glob("*/checkpoints/*.ckpt"), *killed.glob("*/checkpoints/*.ckpt")]
    assert len(paths) >= 8
    for path in paths:
        state = torch.load(path, weights_only=True)
        assert path.stem in ("best", f"step-{state['step']:08d}")


# ---- run directories


def as_a_run(folder: Path) -> Path:
    """Makes a directory that counts as a run."""
    folder.mkdir()
    (folder / "config.yaml").touch()
    return folder


def test_a_new_run_is_later_by_name_than_all_others_of_its_name(tmp_path):
    """Also after the clock was set back, and two runs of the same second: `--resume auto` takes the latest."""
    latest = as_a_run(tmp_path / "20991231-235959-twin")
    as_a_run(tmp_path / "29991231-235959-other")
    twins = [start(f"train.py {SMALL} --max_steps 1 --out_dir twin", tmp_path) for _ in range(2)]
    for twin in twins:
        assert (twin.communicate(timeout=300), twin.returncode)[1] == 0
    assert [path.parent.name for path in sorted(tmp_path.glob("*/model.pt"))] == [
        "21000101-000000-twin",
        "21000101-000001-twin",
    ]
    assert [path.name for path in latest.iterdir()] == ["config.yaml"]


def test_directories_that_are_no_runs_are_in_nobodys_way(tmp_path):
    """Without a config.yaml. After the last of these names no later one could be made; one is no date."""
    names = ["99991231-235959-train_out", "20260230-000000-train_out"]
    for name in names:
        (tmp_path / name).mkdir()
    done = call(f"train.py {SMALL} --max_steps 1 --resume auto", tmp_path)
    assert "99991231-235959-train_out is skipped: config.yaml is missing" in done.stdout
    (made,) = (path for path in tmp_path.iterdir() if path.name not in names)
    assert f"run directory {made.name}" in done.stdout and made.name < names[0]
    assert f"the run is {made.name}\n" in call("test.py --accelerator cpu", tmp_path).stdout


def test_a_new_run_is_later_by_name_also_in_the_hour_that_the_clock_repeats(tmp_path):
    as_a_run(tmp_path / "20991101-015959-train_out")  # a second later it is one o'clock again
    done = run(f"train.py {SMALL} --max_steps 1", tmp_path, TZ="EST5EDT,M3.2.0,M11.1.0")  # New York
    assert "run directory 20991101-020000-train_out" in done.stdout


# ---- which options may change

OTHER = {
    "out_dir": "other", "root_dir": "other", "comment": "x", "project": "x", "seed": 3, "dataset": "other", "width": 8,
    "dropout": 0.5, "accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "ddp", "deterministic": False,
    "num_threads": 2, "timeout": 100, "precision": "bf16-mixed", "compile": "default", "effective_batch_size": 32,
    "micro_batch_size": 16, "num_workers": 1, "drop_last": False, "epochs": 9, "max_steps": 24, "base_lr": 0.1,
    "base_batch_size": 32, "lr_scaling_rule": "sqrt", "warmup_epochs": 0.5, "lr_schedule": "linear",
    "weight_decay": 0.5, "max_grad_norm": 1, "early_stopping_patience": 9, "early_stopping_min_delta": 0.1,
    "logger_name": "csv", "log_per_epoch": 2, "log_interval": 3, "val_frequency": 2, "val_interval": 3,
    "checkpoint_frequency": 2, "checkpoint_interval": 3, "num_checkpoint_keep": 1,
    "monitor": "val/loss --monitor_mode max", "monitor_mode": "min --monitor val/accuracy", "limit_train_batches": 5,
    "limit_val_batches": 1, "num_sanity_val_steps": 2, "summary": True,
}  # fmt: skip


@pytest.mark.night
def test_the_options_that_a_resume_cannot_change_are_those_of_the_page(tmp_path):
    """Each is tried. data_dir may change, but the digits have none."""
    assert {*OTHER} == values_of(TrainConfig()).keys() - {"data_dir", "fast_run"}
    call(f"train.py {SMALL}", tmp_path)
    refused = set()
    for name, value in OTHER.items():
        folder = copied(run_dir(tmp_path), tmp_path / name)
        longer = "" if name in ("epochs", "max_steps") else "--epochs 6"
        try:
            call(f"train.py --resume {folder} {longer} --{name} {value}", tmp_path)
        except AssertionError as error:
            assert "exit code 2" in str(error)
            refused.add(name)
    page = (REPO / "docs" / "guarantees.md").read_text()
    (listed,) = re.findall(r"^Eleven options cannot change: (.*?)\.\s", page, re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"`--(\w+)`", listed)} == refused and len(refused) == 11
