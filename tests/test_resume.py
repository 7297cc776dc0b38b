"""A run that was killed, or asked to stop, goes on as if nothing had happened."""

import re
import signal
import time
from dataclasses import fields

import pytest
import torch
import yaml
from conftest import (
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    assert_stopped_and_saved,
    copied,
    history,
    interrupt,
    kill_group,
    newest,
    run,
    run_dir,
    snapshot,
    start,
    terminate,
    terminate_group,
    terminate_rank_1,
    truncate,
    weights,
)
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from config import TrainConfig
from utils import DirectCheckpointIO, load_checkpoint, save_checkpoint

# ---- interrupted and resumed


def test_killed_in_mid_epoch_and_resumed_is_the_same_run(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    done = run(f"train.py --resume {run_dir(cwd).name}", cwd)
    assert re.search(rf"resumed from .*step-{newest(killed):08d}\.ckpt", done.stdout)
    assert_same_run(cwd, whole)


def test_sigterm_saves_and_resume_auto_goes_on_in_the_same_directory(whole, tmp_path):
    command = f"{LONG} --resume auto"  # starts a new run where there is none to go on with
    assert_stopped_and_saved(interrupt(command, tmp_path, terminate), tmp_path)
    run(command, tmp_path)
    assert_same_run(tmp_path, whole)


def test_sigterm_to_the_group_with_workers_saves_and_goes_on(whole, tmp_path):
    assert_stopped_and_saved(interrupt(f"{LONG} --num_workers 2", tmp_path, terminate_group), tmp_path)
    run(f"train.py --resume {run_dir(tmp_path)}", tmp_path)
    assert_same_run(tmp_path, whole)


def test_2_processes_stop_together_are_killed_and_go_on(tmp_path):
    whole, cwd = tmp_path / "whole", tmp_path / "interrupted"
    whole.mkdir()
    cwd.mkdir()
    uninterrupted = start(f"{LONG} {ON_2}", whole)
    assert_stopped_and_saved(interrupt(f"{LONG} {ON_2}", cwd, terminate_rank_1), cwd)
    resume = f"train.py --resume {run_dir(cwd).name}"
    assert interrupt(resume, cwd, kill_group, after=newest(cwd)).returncode == -signal.SIGKILL
    run(resume, cwd)
    assert uninterrupted.communicate() and uninterrupted.returncode == 0
    assert_same_run(cwd, whole)


def test_a_run_goes_on_with_2_processes_in_mid_epoch(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    run(f"train.py --resume auto {ON_2}", cwd)
    torch.testing.assert_close(weights(cwd), weights(whole), atol=1e-5, rtol=0)
    assert [row["step"] for row in history(cwd)] == [row["step"] for row in history(whole)]
    for row, expected in zip(history(cwd), history(whole), strict=True):
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert float(row[name]) == pytest.approx(float(expected[name]), abs=1e-5)


# ---- finished runs and changed options


def test_a_finished_run_is_extended_and_lists_what_changed(whole, tmp_path):
    run(f"{LONG} --epochs 3", tmp_path)
    done = run(f"train.py --resume {run_dir(tmp_path).name} --epochs 30 --num_checkpoint_keep 2", tmp_path)
    assert_same_run(tmp_path, whole)
    assert len(list(tmp_path.glob("*/checkpoints/step-*.ckpt"))) == 2
    config = yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())
    assert set(config) == {field.name for field in fields(TrainConfig)} - {"resume", "config_path"}
    assert (config["epochs"], config["num_checkpoint_keep"], config["micro_batch_size"]) == (30, 2, 32)
    for option, old, new in (("epochs", 3, 30), ("num_checkpoint_keep", 3, 2)):
        assert re.search(rf"--{option} {new} .*\b{old}$", done.stdout, re.MULTILINE), f"{option} is not listed"


def test_resuming_a_finished_run_says_so_and_changes_nothing(whole, tmp_path):
    cwd = copied(whole, tmp_path)
    before = snapshot(cwd)
    assert "is finished" in run(f"train.py --resume {run_dir(cwd).name}", cwd).stdout
    assert snapshot(cwd) == before


# ---- damaged checkpoints


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_taken(whole, killed, tmp_path):
    cwd = copied(killed, tmp_path)
    *_, older, broken = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))
    truncate(broken)
    done = run("train.py --resume auto", cwd)
    assert broken.name in done.stderr and "damaged" in done.stderr
    assert re.search(rf"resumed from .*{older.name}", done.stdout)
    assert_same_run(cwd, whole)


def test_without_a_whole_checkpoint_nothing_is_done_and_nothing_deleted(killed, tmp_path):
    cwd = copied(killed, tmp_path)
    for path in cwd.glob("*/checkpoints/*.ckpt"):
        truncate(path)
    before = snapshot(cwd)
    error = run(f"train.py --resume {run_dir(cwd).name}", cwd, code=1).stderr
    assert re.fullmatch(r"train.py: error: no checkpoint in \S+ can be read.*", error.splitlines()[-1])
    assert "Traceback" not in error
    assert snapshot(cwd) == before


def test_every_checkpoint_loads_as_plain_values(whole, killed):
    paths = [*whole.glob("*/checkpoints/*.ckpt"), *killed.glob("*/checkpoints/*.ckpt")]
    assert len(paths) >= 8
    for path in paths:
        state = torch.load(path, weights_only=True)
        assert path.stem in ("best", f"step-{state['step']:08d}")


# ---- run directories


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path):
    taken = [tmp_path / time.strftime("%Y%m%d-%H%M%S-twin", time.localtime(time.time() + s)) for s in range(120)]
    for path in taken:
        path.mkdir()
    twins = [start(f"train.py {SMALL} --epochs 1 --out_dir twin", tmp_path) for _ in range(2)]
    for twin in twins:
        assert (twin.communicate(timeout=120), twin.returncode)[1] == 0
    made = [path for path in tmp_path.iterdir() if path not in taken]
    assert len(made) == 2
    for path in made:
        assert re.fullmatch(r"\d{8}-\d{6}-twin-[12]", path.name)
        assert (path / "model.pt").is_file()
    assert not any(any(path.iterdir()) for path in taken)


def test_an_optimizer_option_beside_resume_wins_over_the_checkpoint(tmp_path):
    run(f"train.py {SMALL} --logger_name csv", tmp_path)
    run("train.py --resume train_out --epochs 6 --weight_decay 0.5", tmp_path)
    state = torch.load(sorted(run_dir(tmp_path).glob("checkpoints/step-*.ckpt"))[-1], weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def fabric_with(scaler: torch.amp.GradScaler | None) -> tuple[Fabric, dict]:
    """A Fabric with a gradient scaler, as 16-mixed has one on a GPU, and a state to save."""
    precision = MixedPrecision("16-mixed", "cpu", scaler) if scaler else None
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=[plugin for plugin in [DirectCheckpointIO(), precision] if plugin]
    )
    return fabric, {"model": torch.nn.Linear(2, 1), "precision": fabric.strategy.precision, "step": 7}


@pytest.mark.parametrize("saved, expected", [(torch.amp.GradScaler("cpu", init_scale=8.0), 8.0), (None, 2.0)])
def test_the_gradient_scaler_is_restored_or_starts_afresh(saved, expected: float, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    fabric, state = fabric_with(saved)
    if saved:
        saved.scale(torch.ones(()))  # it is set up at its first use
    save_checkpoint(fabric, tmp_path, state)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    fabric, resumed = fabric_with(scaler)
    load_checkpoint(fabric, tmp_path, resumed | {"step": 0})
    assert scaler.get_scale() == expected
    torch.testing.assert_close(resumed["model"].state_dict(), state["model"].state_dict())
