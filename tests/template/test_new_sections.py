"""The edits of docs/new_sections.md: each is made as the page shows it, and run."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from edits import insert_after, insert_before, make_as_shown, replace, with_text
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    assert_same_training,
    call,
    diffs,
    edited,
    execute,
    history,
    interrupt,
    kill_group,
    killed_and_resumed,
    on_one_and_two,
    read_tensorboard,
    rows,
    run,
    run_dir,
    weights,
)
from PIL import Image
from test_logging import values, wandb_id, wandb_records
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from config import TrainConfig
from data import build_datasets

PAGE = REPO / "docs" / "new_sections.md"
FITTED, PERPLEXITY, WEIGHTS, METRIC, NO_VAL, PICTURE, CROPS, HALVINGS, PRETRAINED, HISTOGRAM = diffs(
    "docs/new_sections.md"
)
TWELVE = f"{LONG} --epochs 12"

pytestmark = pytest.mark.recipes


def results(program: Path, cwd: Path, options: str = "--checkpoint last --split val") -> dict:
    for path in run_dir(cwd).glob("test_*.json"):
        path.unlink()
    execute(f"{program}/test.py --accelerator cpu {options}", cwd)
    (path,) = run_dir(cwd).glob("test_*.json")
    return json.loads(path.read_text())["results"]


def test_each_edit_leaves_style_and_types_as_they_are(tmp_path: Path):
    for number, diff in enumerate(diffs("docs/new_sections.md")):
        program = edited(diff, tmp_path / str(number))
        shutil.copy(REPO / "pyproject.toml", program)
        for tool in ("ruff check --no-cache .", "ruff format --check --no-cache .", "mypy --cache-dir /tmp/mypy_new"):
            name, *options = tool.split()
            done = subprocess.run([Path(sys.executable).parent / name, *options], cwd=program, capture_output=True)
            assert done.returncode == 0, (diff, done.stdout)


# ---- what was fitted


def test_what_was_fitted_is_in_model_pt_and_needs_no_data(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(FITTED, tmp_path / "program")
    whole, killed = killed_and_resumed(f"{program}/{LONG} --limit_val_batches 1.0", tmp_path)
    assert results(program, killed)["loss"] == pytest.approx(float(history(whole)[-1]["val/loss"]))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(program / "model.py", alone)
    shutil.copy(run_dir(killed) / "model.pt", alone)
    make = re.search(r'`(model = Model\(\*\*weights\["_extra_state"\]\))` and\n`(.+?)` need no data', PAGE.read_text())
    code = f'import torch; from model import Model; weights = torch.load("model.pt"); {make[1]}; {make[2]}; '
    image = "torch.zeros(1, 1, 8, 8)"
    code += f"print(model.eval()({image}).shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([1, 10])\n"
    with_text(program, "train.py", ("config.width, config.dropout)", "config.width, 0.5)"))
    for command in ("test.py --accelerator cpu", "train.py --resume auto --epochs 11"):
        error = call(f"{program}/{command}", killed, code=2).stderr
        assert "these weights were fitted to other data" in error and error.count("\n") == 1


# ---- perplexity


def test_a_number_that_follows_from_the_means_is_logged_monitored_and_in_test_py(tmp_path: Path):
    program = edited(PERPLEXITY, tmp_path / "program")
    options = "--limit_val_batches 1.0 --monitor val/perplexity --monitor_mode min"
    call(f"{program}/train.py {SMALL} {options}", tmp_path)
    last = rows(tmp_path)[-1]
    assert last["val/perplexity"] == pytest.approx(torch.tensor(last["val/loss"]).exp().item())
    assert json.loads((run_dir(tmp_path) / "summary.json").read_text())["best"] == min(
        row["val/perplexity"] for row in rows(tmp_path) if "val/perplexity" in row
    )
    assert results(program, tmp_path)["perplexity"] == pytest.approx(last["val/perplexity"])
    assert results(program, tmp_path, f"--checkpoint last --split val {ON_2}")["perplexity"] == pytest.approx(
        last["val/perplexity"]
    )


def test_a_loss_whose_perplexity_is_no_float_ends_no_run(tmp_path: Path):
    program = edited(PERPLEXITY, tmp_path / "program")
    replace(program, "values", '{"loss": 1000 + F.cross_entropy(logits, targets)}')
    call(f"{program}/train.py {SMALL}", tmp_path)


# ---- class weights and ignored labels


def with_weights(folder: Path) -> Path:
    """Without augmentation, whose random numbers depend on the micro-batches."""
    folder.mkdir()
    program = replace(edited(WEIGHTS, folder), "shift", "shift=0")
    return insert_after(program, "statistics", "targets[::3] = -100")


def train_and_val(program: Path, options: str, cwd: Path) -> tuple[list, list]:
    cwd.mkdir()
    execute(f"{program}/train.py {SMALL} --max_steps 4 --log_interval 1 --dropout 0 {options}", cwd)
    found = [[float(row[name]) for row in history(cwd) if row.get(name)] for name in ("train/loss", "val/loss")]
    return found[0], found[1]


def test_the_count_makes_a_validation_exact_and_the_loop_may_need_an_edit(tmp_path: Path):
    program = with_weights(tmp_path / "program")
    whole = train_and_val(program, "--base_lr 1e-9", tmp_path / "whole")
    parts = train_and_val(program, "--base_lr 1e-9 --micro_batch_size 4", tmp_path / "parts")
    assert parts[1] == pytest.approx(whole[1], rel=1e-5)
    assert parts[0] != pytest.approx(whole[0], rel=1e-4)  # the mean of means


def test_the_loop_as_for_tokens_trains_as_with_one_batch(tmp_path: Path):
    (tokens,) = [diff for diff in diffs("docs/data.md") if "per_batch" in diff]
    for old, new in (
        ('reduction="sum")', 'weight, reduction="sum")'),
        ("int((targets != -100).sum())", "float((weight[targets.clamp(min=0)] * (targets >= 0)).sum())"),
        ("+    total = F", "+    weight = torch.linspace(0.5, 1.5, 10, device=targets.device)\n+    total = F"),
        ("sum((targets != -100).sum() for", "sum((weight[targets.clamp(min=0)] * (targets >= 0)).sum() for"),
        ("+        used", "+        weight = torch.linspace(0.5, 1.5, 10, device=fabric.device)\n+        used"),
    ):
        assert tokens.count(old) == 1, old
        tokens = tokens.replace(old, new)
    (tmp_path / "program").mkdir()
    program = replace(edited(tokens, tmp_path / "program"), "shift", "shift=0")
    insert_after(program, "statistics", "targets[::3] = -100")
    whole = train_and_val(program, "", tmp_path / "whole")
    assert train_and_val(program, "--micro_batch_size 4", tmp_path / "parts")[0] == pytest.approx(whole[0], rel=1e-5)
    found = train_and_val(program, f"--micro_batch_size 4 {ON_2}", tmp_path / "two")
    assert found[0] == pytest.approx(whole[0], rel=1e-5)


def test_a_weighted_mean_over_the_samples_leaves_the_loop_as_it_is(tmp_path: Path):
    program = with_weights(tmp_path / "program")
    loss, count = re.search(r"^`(F\.cross.+?)`, with `(.+?)` as the count", PAGE.read_text(), re.M).groups()
    text = (program / "train.py").read_text()
    text = re.sub(r"    count: Any = .*\n", "", text).replace(
        "targets, weight)}, count", f"targets, weight)}}, {count}"
    )
    (program / "train.py").write_text(text.replace("F.cross_entropy(logits, targets, weight)}", f"{loss}}}"))
    whole = train_and_val(program, "", tmp_path / "whole")
    parts = train_and_val(program, "--micro_batch_size 4", tmp_path / "parts")
    assert parts[0] == pytest.approx(whole[0], rel=1e-5) and parts[1] == pytest.approx(whole[1], rel=1e-5)
    two = train_and_val(program, f"--micro_batch_size 4 {ON_2}", tmp_path / "two")
    assert two[0] == pytest.approx(whole[0], rel=1e-5)


# ---- a metric


def test_a_metric_with_an_argument_is_a_share_of_all_samples(tmp_path: Path):
    program = edited(METRIC, tmp_path / "program")
    call(f"{program}/train.py {SMALL} --limit_val_batches 1.0", tmp_path)
    found = results(program, tmp_path, "--checkpoint last --split val --predictions")
    logits, targets = torch.load(next(run_dir(tmp_path).glob("predictions_*.pt")))
    expected = (logits.softmax(1)[torch.arange(len(targets)), targets] >= 0.9).float().mean().item()
    assert found["sure"] == pytest.approx(expected) == rows(tmp_path)[-1]["val/sure"]
    assert 0 < expected < found["accuracy"]
    assert results(program, tmp_path, f"--checkpoint last --split val {ON_2}")["sure"] == pytest.approx(expected)


# ---- no validation set


def test_without_a_validation_set_the_lowest_training_loss_is_best(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(NO_VAL, tmp_path / "program")
    _, killed = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    summary = json.loads((run_dir(killed) / "summary.json").read_text())
    assert summary["best"] == min(row["train/loss"] for row in rows(killed))
    assert not any(name.startswith("val/") for row in rows(killed) for name in row)
    assert results(program, killed, "")["accuracy"] > 0.5
    assert "--split val: has no samples" in call(f"{program}/test.py --split val", killed, code=2).stderr
    run(f"{program}/train.py --accelerator cpu --fast_run {ON_2}", tmp_path)


@pytest.mark.night
def test_without_a_validation_set_a_project_passes_but_for_one_test(tmp_path: Path):
    program = edited(NO_VAL, tmp_path / "program")
    (program / "tests").mkdir()
    for name in ("test_project.py", "recorded.py", "zygote.py"):
        shutil.copy(REPO / "tests" / name, program / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_project.py"]
    for but, failed in (([], 1), (["-k", "not evaluated"], 0)):
        done = subprocess.run([*command, *but], cwd=program, capture_output=True, text=True)
        assert (f"{failed} failed" in done.stdout) == (failed > 0) and done.returncode == failed, done.stdout
