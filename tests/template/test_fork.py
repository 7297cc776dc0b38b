"""tools/fork.py: a fork is a run that was killed after a step of its parent, which is only read, and may go on."""

import csv
import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from commands import REPO, SMALL, call, folders, run
from comparisons import assert_same_weights
from edits import insert_before, replace
from killer import kill_before
from mistakes import refuses
from outputs import checkpoint, copied, flip_a_bit, history, last_summary, rows, run_dir, weights, without_locks

from runtime.files import lock

pytestmark = pytest.mark.recipes
FORK = "tools/fork.py"
NAMED = "--out_dir train_out"  # as its parent, which lies in another folder
RESUME = "train.py --resume train_out"
# 5 epochs of 4 steps, all of them logged, a checkpoint every second step.
PARENT = (
    f"train.py {SMALL} --log_interval 1 --checkpoint_interval 2 --num_checkpoint_keep 0 --logger_name csv "
    "--monitor val/loss --monitor_mode min"
)
STEP_8 = "checkpoints/step-00000008.ckpt"  # its validation and its row are still due
STEP_10 = "checkpoints/step-00000010.ckpt"  # its row is still due


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """The directory of a finished run. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("parent")
    call(PARENT, cwd)
    return run_dir(cwd)


def fork(path: Path, cwd: Path, options: str = "") -> Path:
    """Makes a fork in `cwd`. Returns its directory."""
    call(f"{FORK} --parent {path} {NAMED} {options}", cwd)
    return run_dir(cwd)


def logged(cwd: Path) -> list[dict]:
    """The rows without the best value."""
    return [{name: value for name, value in row.items() if name != "best"} for row in history(cwd)]


# ---- a fork is a run


def test_with_unchanged_options_it_ends_as_its_parent_which_provenance_and_runs_py_tell(parent, cwd, tmp_path):
    """Also where the parent still runs, where a kill comes before the first checkpoint, and in a fork of a fork. Its
    rows begin with those before the step, whose own it makes itself."""
    before = without_locks(parent)
    with lock(parent / ".lock"):
        folder = fork(parent / STEP_8, cwd)
    assert logged(cwd) == logged(parent.parent)[:7]
    kill_before("os.rename step-00000010.ckpt.tmp 1", RESUME, cwd, tmp_path)
    call(RESUME, cwd)
    second = fork(folder / "checkpoints" / "step-00000012.ckpt", tmp_path)
    call(RESUME, tmp_path)
    for each in (cwd, tmp_path):
        assert_same_weights(weights(each), weights(parent.parent), atol=0)
        assert logged(each) == logged(parent.parent)
    assert without_locks(parent) == before
    about = json.loads((folder / "provenance" / "parent.json").read_text())
    digest = hashlib.sha256((parent / STEP_8).read_bytes()).hexdigest()
    assert about == {"path": str((parent / STEP_8).resolve()), "step": 8, "sha256": digest}
    (code,) = parent.glob("provenance/code-*/train.py")
    assert (folder / code.relative_to(parent)).read_bytes() == code.read_bytes()
    for number, each in enumerate((parent, folder, second)):
        shutil.copytree(each, tmp_path / "all" / f"{number}-{each.name}")
    table = call("tools/runs.py all --format csv --columns run parent", tmp_path).stdout.splitlines()
    parents = {row["run"][0]: row["parent"] for row in csv.DictReader(table)}
    assert parents == {"0": "", "1": f"{parent.name} step 8", "2": f"{folder.name} step 12"}


def test_of_a_run_the_newest_whole_checkpoint_is_taken(parent, tmp_path):
    """The damaged ones are named, and stay where they are. The name of a fork is later than that of any run, as that of
    a new one, so `--resume auto` takes it. The last line goes on, also where a shell would not take it for a name."""
    cwd = copied(parent.parent, tmp_path)
    (cwd / "29990101-000000-it's").mkdir()
    (cwd / "29990101-000000-it's" / "config.yaml").touch()
    damaged = run_dir(cwd) / "checkpoints" / "step-00000020.ckpt"
    for path in (damaged, damaged.with_name("best.ckpt")):
        path.write_bytes(b"half")
    out = call(f"{FORK} --parent train_out --out_dir it's", cwd).stdout
    assert f"skipped {damaged.relative_to(cwd)}: is not a whole checkpoint\n" in out and damaged.exists()
    words = ["next:", "python", "train.py", "--resume", "29990101-000001-it's"]
    assert shlex.split(out.splitlines()[-1]) == words
    assert [path.name for path in cwd.glob(f"{words[-1]}/checkpoints/*")] == ["step-00000018.ckpt"]


# ---- other options


def test_the_best_value_starts_anew(parent, cwd, tmp_path):
    """best.ckpt would be the parent's. A validation that is still due after the step, the fork makes itself. The later
    ones are worse, since the rate is too high."""
    fork(parent / STEP_8, cwd, "--base_lr 10")
    call(RESUME, cwd)
    assert logged(cwd)[:8] == logged(parent.parent)[:8]
    assert checkpoint(cwd, "best")["step"] == last_summary(cwd)["best_step"] == 8
    (later,) = folders(tmp_path, "later")
    fork(parent / STEP_10, later, "--base_lr 10")
    assert last_summary(later)["best"] is None and "best" not in last_summary(later)["last"]
    call(RESUME, later)
    losses = {row["step"]: row["val/loss"] for row in rows(later) if "val/loss" in row}
    best = min(losses[12], losses[16], losses[20])
    assert last_summary(later)["best"] == checkpoint(later, "best")["best"] == best > losses[8]


def test_options_that_a_resume_cannot_change(parent, cwd):
    """The order of the samples, the size of an epoch, and what is best are others. The rest of the optimizer goes on:
    its moments, its steps."""
    options = "--seed 7 --effective_batch_size 32 --limit_train_batches 6 --max_steps 24 --weight_decay 0.5"
    fork(parent / STEP_8, cwd, f"{options} --monitor val/accuracy --monitor_mode max")
    assert "24 steps = 4 epochs x 6 steps" in call(RESUME, cwd).stdout
    values = {row["step"]: row["val/accuracy"] for row in rows(cwd)[7:] if "val/accuracy" in row}
    assert [*values] == [8, 12, 18, 24] and last_summary(cwd)["best"] == max(values.values())
    optimizer = checkpoint(cwd, "step-00000024")["optimizer"]
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.5]
    assert {int(state["step"]) for state in optimizer["state"].values()} == {24}


def test_a_setting_of_the_optimizer_that_has_another_name_than_its_option(tmp_path, program, cwd):
    """It is said, and taken from the code, as the resume builds the optimizer. The parent may delete the file
    meanwhile: here it goes as soon as it is open."""
    (program / "tools").mkdir(parents=True)
    shutil.copy(REPO / FORK, program / "tools")
    replace(program, "optimizer", "torch.optim.AdamW(model.parameters(), betas=(0.9, 1 - config.dropout), fused=True)")
    run(f"{program}/{PARENT} --dropout 0.25", tmp_path)
    path = run_dir(tmp_path) / STEP_10
    point = ("runtime/checkpoints.py", "is_whole", "return zipfile.ZipFile(path).testzip() is None")
    insert_before(program, point, f"if os.path.exists({str(path)!r}):\n    os.unlink({str(path)!r})")
    done = run(f"{program}/{FORK} --parent {path} {NAMED} --dropout 0.5 --epochs 6", cwd)
    assert not path.exists()
    assert "optimizer, group 0: betas (0.9, 0.5) instead of (0.9, 0.75)\n" in done.stdout and not done.stderr
    run(f"{program}/{RESUME}", cwd)
    assert checkpoint(cwd, "step-00000024")["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.5)


def test_data_of_another_size_fit_if_an_option_of_the_model_or_the_data_changes(parent, tmp_path, program, cwd):
    insert_before(program, "split", "order = order[:1400]")
    fork(parent / STEP_8, tmp_path, "--epochs 6 --base_lr 1e-3")
    refuses(f"{program}/{RESUME}", tmp_path, "samples, but had")
    fork(parent / STEP_8, cwd, "--dropout 0.1")
    assert "finished after 20 of 20 steps" in call(f"{program}/{RESUME}", cwd).stdout


# ---- what is wrong

FROM_8 = f"--parent STEP_8 {NAMED}"


@pytest.mark.parametrize(
    "options, word",
    [(NAMED, "--parent"), ("--parent STEP_8", "--out_dir"), (f"{FROM_8} --epohcs 3", "--epochs"),
     (f"--parent nowhere {NAMED}", "nowhere: no such run"), (f"--parent EMPTY {NAMED}", "has no whole checkpoint"),
     (f"--parent PARENT/model.pt {NAMED}", "model.pt: is not a whole checkpoint"),
     (f"--parent FLIPPED {NAMED}", "FLIPPED: is not a whole checkpoint"),
     (f"--parent OLD {NAMED}", "OLD: was written by another version of the template"),
     *((f"{FROM_8} --{name} 2", f"--{name}") for name in ("resume", "config_path", "fast_run")),
     (f"{FROM_8} --width 8", "size mismatch for layers.0.weight"), ("--parent STEP_8 --out_dir ..", "--out_dir .."),
     (f"{FROM_8} --root_dir STEP_8", "File exists")],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_made(options, word, parent, tmp_path, cwd):
    for name in ("FLIPPED", "OLD"):
        shutil.copy(parent / STEP_8, tmp_path / name)
    flip_a_bit(tmp_path / "FLIPPED")
    saved = torch.load(tmp_path / "OLD", weights_only=True)
    saved["checkpoint"]["format"] -= 1
    torch.save(saved, tmp_path / "OLD")
    (tmp_path / "EMPTY").mkdir()
    shutil.copy(parent / "config.yaml", tmp_path / "EMPTY")
    options = options.replace("PARENT", str(parent)).replace("STEP_8", str(parent / STEP_8))
    options = re.sub(r"\b(FLIPPED|OLD|EMPTY)\b", rf"{tmp_path}/\1", options)
    before = without_locks(parent)
    refuses(f"{FORK} {options}", cwd, word)
    assert without_locks(parent) == before


@pytest.mark.parametrize("change", ["open step-00000008.ckpt.tmp 1", "os.rename config.yaml.tmp 1"])
def test_a_kill_in_the_middle_leaves_no_run(change, parent, tmp_path, cwd):
    command = f"{FORK} --parent {parent / STEP_8} {NAMED}"
    kill_before(change, command, cwd, tmp_path)
    (left,) = cwd.iterdir()
    assert not (left / "config.yaml").exists()
    call(f"{command} --out_dir again", cwd)
    assert "finished after 20 of 20" in call("train.py --resume auto --out_dir again", cwd).stdout
