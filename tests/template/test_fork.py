"""tools/fork.py: a fork is a run that was killed after a step of its parent, which is only read, and may go on."""

import csv
import hashlib
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from edits import insert_before, replace
from helpers import (
    LONG,
    MEASURED,
    ON_2,
    REPO,
    SLOW,
    SMALL,
    call,
    copied,
    kill_group,
    newest,
    run,
    run_dir,
    start,
    truncate,
    wait_for,
    without_locks,
)
from killer import kill_before

pytestmark = pytest.mark.recipes
FORK = "tools/fork.py"
# 5 epochs of 4 steps, all of them logged, a checkpoint every second step.
PARENT = (
    f"train.py {SMALL} --log_interval 1 --checkpoint_interval 2 --num_checkpoint_keep 0 --logger_name csv "
    "--monitor val/loss --monitor_mode min"
)
STEP_8 = "checkpoints/step-00000008.ckpt"  # its validation and its row are still due
STEP_10 = "checkpoints/step-00000010.ckpt"  # its row is still due
BEST = "checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """The directory of a finished run. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("parent")
    call(PARENT, cwd)
    return run_dir(cwd)


def fork(parent: Path, cwd: Path, options: str = "") -> Path:
    """The directory of a fork, in `cwd`."""
    call(f"{FORK} --parent {parent} --out_dir fork --root_dir {cwd} {options}", cwd)
    return run_dir(cwd, "fork")


def rows_of(folder: Path) -> list[dict]:
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def logged(folder: Path) -> list[dict]:
    """The rows without the best value, and what is measured of the process."""
    return [{name: value for name, value in row.items() if name not in ("best", *MEASURED)} for row in rows_of(folder)]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in folder.glob("checkpoints/step-*.ckpt"))


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def assert_same_weights(folder: Path, other: Path) -> None:
    ours, theirs = (torch.load(path / "model.pt", weights_only=True) for path in (folder, other))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


# ---- a fork is a run


def test_with_unchanged_options_it_ends_with_the_bits_and_the_rows_of_its_parent(parent, tmp_path):
    """The last line is the command that goes on, also where a shell would not take the name for one."""
    before = without_locks(parent)
    done = call(f"{FORK} --parent {parent / STEP_8} --out_dir it's --root_dir .", tmp_path)
    *_, last = done.stdout.splitlines()
    words = shlex.split(last)
    folder = run_dir(tmp_path, "it's")
    assert words == ["next:", "python", "train.py", "--resume", folder.name]
    call(f"train.py --resume {words[-1]}", tmp_path)
    assert_same_weights(folder, parent)
    assert logged(folder) == logged(parent)
    assert without_locks(parent) == before


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_it_is_killed_and_resumed_like_a_run_while_its_parent_goes_on(devices, tmp_path):
    """Before and after its first own checkpoint. With as many epochs, it ends as a run that was left alone."""
    for name in ("alone", "parent", "forks"):
        (tmp_path / name).mkdir()
    run(f"{LONG} {devices} --epochs 12", tmp_path / "alone")
    going = start(f"{SLOW} {devices} --num_checkpoint_keep 0", tmp_path / "parent")
    try:
        wait_for(lambda: going.poll() is not None or newest(tmp_path / "parent") > 16)
        path = run_dir(tmp_path / "parent") / "checkpoints" / "step-00000012.ckpt"
        options = "--epochs 12 --log_interval 1 --checkpoint_interval 50 --val_interval 300"
        call(f"{FORK} --parent {path} --out_dir fork --root_dir . {options}", tmp_path / "forks")
        folder = run_dir(tmp_path / "forks", "fork")
        for step, saved in ((12, 12), (52, 50)):
            process = start("train.py --resume fork", tmp_path / "forks")
            wait_for(lambda: process.poll() is not None or int(rows_of(folder)[-1]["step"]) > step)  # noqa: B023
            kill_group(process)
            process.communicate()
            assert saved_steps(folder)[-1] == saved
        run("train.py --resume fork", tmp_path / "forks")
        assert going.poll() is None
    finally:
        kill_group(going)
        going.communicate()
    assert_same_weights(folder, run_dir(tmp_path / "alone"))
    assert [int(row["step"]) for row in rows_of(folder)] == [8, *range(13, 97)]


def test_of_a_run_the_newest_whole_checkpoint_is_taken(parent, tmp_path):
    """The damaged ones are named, and stay where they are."""
    cwd = copied(parent.parent, tmp_path)
    damaged = run_dir(cwd) / "checkpoints" / "step-00000020.ckpt"
    truncate(damaged)
    truncate(damaged.with_name("best.ckpt"))
    done = call(f"{FORK} --parent train_out --out_dir fork", cwd)
    assert f"skipped {damaged.relative_to(cwd)}: is not a whole checkpoint\n" in done.stdout
    assert saved_steps(run_dir(cwd, "fork")) == [18]
    assert damaged.exists()


def test_the_parent_may_delete_the_file_meanwhile(parent, tmp_path):
    """Here it goes as soon as it is open."""
    path = copied(parent, tmp_path) / STEP_8
    (tmp_path / "sitecustomize.py").write_text(
        "import contextlib, os, sys\n"
        "def hook(event, args):\n"
        "    if event == 'open' and str(args[0]).startswith('/dev/fd/'):\n"
        "        with contextlib.suppress(OSError):\n"
        f"            os.unlink({str(path)!r})\n"
        "sys.addaudithook(hook)\n"
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    run(f"{FORK} --parent {path} --out_dir fork", tmp_path, PYTHONPATH=str(tmp_path))
    assert not path.exists()
    folder = run_dir(tmp_path, "fork")
    assert json.loads((folder / "provenance" / "parent.json").read_text())["sha256"] == digest
    call("train.py --resume fork", tmp_path)
    assert_same_weights(folder, parent)


def test_a_fork_of_a_fork(parent, tmp_path):
    first = fork(parent / STEP_8, tmp_path)
    call("train.py --resume fork", tmp_path)
    (tmp_path / "second").mkdir()
    second = fork(first / "checkpoints" / "step-00000012.ckpt", tmp_path / "second")
    call("train.py --resume fork", tmp_path / "second")
    assert_same_weights(second, parent)
    assert logged(second) == logged(parent)


# ---- what it begins with


def test_the_rows_of_the_step_and_of_later_ones_stay_with_the_parent(parent, tmp_path):
    """A fork makes that of the step itself."""
    folder = fork(parent / STEP_8, tmp_path)
    assert logged(folder) == logged(parent)[:7]


def test_a_validation_that_the_parent_was_to_make_after_the_step(parent, tmp_path):
    """The fork makes it, with the weights of the checkpoint. Later ones are worse, since the rate is too high."""
    folder = fork(parent / STEP_8, tmp_path, "--base_lr 10")
    call("train.py --resume fork", tmp_path)
    assert logged(folder)[:8] == logged(parent)[:8]
    assert summary(folder)["best_step"] == 8
    best, saved = (torch.load(path, weights_only=True)["model"] for path in (folder / BEST, parent / STEP_8))
    torch.testing.assert_close(best, saved, atol=0, rtol=0)


def test_the_best_value_starts_anew(parent, tmp_path):
    """best.ckpt would be the parent's. So a rate that is too high gives a worse one, in runs.py, too."""
    folder = fork(parent / STEP_10, tmp_path, "--base_lr 10")
    assert summary(folder)["best"] is None and "best" not in summary(folder)["last"]
    call("train.py --resume fork", tmp_path)
    losses = {int(row["step"]): float(row["val/loss"]) for row in rows_of(folder) if row["val/loss"]}
    assert summary(folder)["best"] == min(losses[12], losses[16], losses[20]) > losses[8]
    assert (folder / BEST).exists()
    (row,) = csv.DictReader(call("tools/runs.py . --format csv", tmp_path).stdout.splitlines())
    assert float(row["best"]) == summary(folder)["best"]


def test_the_parent_is_told_in_provenance_and_by_runs_py(parent, tmp_path):
    folder = fork(parent / STEP_8, tmp_path)
    about = json.loads((folder / "provenance" / "parent.json").read_text())
    digest = hashlib.sha256((parent / STEP_8).read_bytes()).hexdigest()
    assert about == {"path": str((parent / STEP_8).resolve()), "step": 8, "sha256": digest}
    (code,) = parent.glob("provenance/code-*")
    assert (folder / "provenance" / code.name / "train.py").read_bytes() == (code / "train.py").read_bytes()
    shutil.copytree(parent, tmp_path / parent.name)
    done = call("tools/runs.py . --format csv --columns run parent", tmp_path)
    ours = {row["run"]: row["parent"] for row in csv.DictReader(done.stdout.splitlines())}
    assert ours == {parent.name: "", folder.name: f"{parent.name} step 8"}


def test_its_name_is_later_than_that_of_any_run_of_this_name(tmp_path, parent):
    """As that of a new run, so `--resume auto` takes it."""
    other = tmp_path / "29990101-000000-fork"
    other.mkdir()
    (other / "config.yaml").touch()
    call(f"{FORK} --parent {parent / STEP_8} --out_dir fork --root_dir {tmp_path}", tmp_path)
    assert (tmp_path / "29990101-000001-fork" / "config.yaml").exists()


# ---- other options


def test_options_that_a_resume_cannot_change(parent, tmp_path):
    """The order of the samples, the size of an epoch, and what is best are others."""
    options = "--seed 7 --effective_batch_size 32 --limit_train_batches 6 --max_steps 24"
    folder = fork(parent / STEP_8, tmp_path, f"{options} --monitor val/accuracy --monitor_mode max")
    done = call("train.py --resume fork", tmp_path)
    assert "24 steps = 4 epochs x 6 steps" in done.stdout
    values = {int(row["step"]): float(row["val/accuracy"]) for row in rows_of(folder)[7:] if row["val/accuracy"]}
    assert [*values] == [8, 12, 18, 24]
    assert summary(folder)["best"] == max(values.values())


def test_another_weight_decay(tmp_path, parent):
    """The rest of the optimizer goes on: its moments, its steps. Of a run that is resumed, it cannot change."""
    folder = fork(parent / STEP_8, tmp_path, "--weight_decay 0.5")
    call("train.py --resume fork", tmp_path)
    optimizer = torch.load(folder / "checkpoints" / "step-00000020.ckpt", weights_only=True)["optimizer"]
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.5]
    assert {int(state["step"]) for state in optimizer["state"].values()} == {20}


def test_a_setting_of_the_optimizer_that_has_another_name_than_its_option(tmp_path, program):
    """It is said, and taken from the code, as the resume builds the optimizer."""
    (program / "tools").mkdir(parents=True)
    shutil.copy(REPO / FORK, program / "tools")
    replace(program, "optimizer", "torch.optim.AdamW(model.parameters(), betas=(0.9, 1 - config.dropout), fused=True)")
    run(f"{program}/{PARENT} --dropout 0.25", tmp_path)
    done = run(f"{program}/{FORK} --parent train_out --out_dir fork --dropout 0.5 --epochs 6", tmp_path)
    assert "optimizer, group 0: betas (0.9, 0.5) instead of (0.9, 0.75)\n" in done.stdout and not done.stderr
    run(f"{program}/train.py --resume fork", tmp_path)
    optimizer = torch.load(run_dir(tmp_path, "fork") / "checkpoints/step-00000024.ckpt", weights_only=True)["optimizer"]
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.5)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {24}


def test_a_decay_branch_falls_from_its_first_step_on(tmp_path, parent):
    folder = fork(parent / STEP_8, tmp_path, "--lr_schedule cosine --warmup_epochs 2 --epochs 3")
    call("train.py --resume fork", tmp_path)
    rates = [float(row["lr"]) for row in rows_of(folder)[8:]]
    assert rates == sorted(rates, reverse=True) and len(rates) == 4
    assert rates[0] == 0.004


def test_data_of_another_size_fit_if_an_option_of_the_model_or_the_data_changes(parent, tmp_path, program):
    insert_before(program, "split", "order = order[:1400]")
    fork(parent / STEP_8, tmp_path, "--epochs 6 --base_lr 1e-3")
    refused = start("train.py --resume fork", tmp_path, program)
    assert "samples, but had" in refused.communicate()[1] and refused.returncode == 2
    call(f"{FORK} --parent {parent / STEP_8} --out_dir other --dropout 0.1", tmp_path)
    resumed = start("train.py --resume other", tmp_path, program)
    assert "finished after 20 of 20 steps" in resumed.communicate()[0]


# ---- what is wrong

MISTAKES = {
    "": "the following arguments are required: --parent",
    "--out_dir fork": "the following arguments are required: --parent",
    "PARENT --out_dir fork": "the following arguments are required: --parent",
    "--parent nowhere --out_dir fork": "--parent nowhere: no such run",
    "--parent PARENT/provenance --out_dir fork": "no such run",
    "--parent EMPTY --out_dir fork": "EMPTY has no whole checkpoint",
    "--parent PARENT/config.yaml --out_dir fork": "config.yaml: is not a whole checkpoint",
    "--parent PARENT/model.pt --out_dir fork": "model.pt: is not a whole checkpoint",
    "--parent CUT --out_dir fork": "cut.ckpt: is not a whole checkpoint",
    "--parent FLIPPED --out_dir fork": "flipped.ckpt: is not a whole checkpoint",
    "--parent OLD --out_dir fork": "old.ckpt: was written by another version of the template",
    "--parent STEP_8": "--out_dir: give the fork a name",
    "--parent STEP_8 --out_dir fork --epohcs 3": "unknown option --epohcs; did you mean --epochs?",
    "--parent STEP_8 --out_dir fork --base_lr 0": "--base_lr 0.0: must be above 0",
    "--parent STEP_8 --out_dir fork --base_lr much": "--base_lr",
    "--parent STEP_8 --out_dir fork --monitor val/f1": "--monitor val/f1: give --monitor and --monitor_mode together",
    "--parent STEP_8 --out_dir fork --resume auto": "--resume: does not go with a fork",
    "--parent STEP_8 --out_dir fork --fast_run": "--fast_run: does not go with a fork",
    "--parent STEP_8 --out_dir fork --width 8": "size mismatch for layers.0.weight",
    "--parent STEP_8 --out_dir ..": "--out_dir ..: must end in the name of a directory",
    "--parent STEP_8 --out_dir fork --root_dir STEP_8": "File exists",
}


@pytest.mark.parametrize("options, message", MISTAKES.items())
def test_a_mistake_is_one_line_and_nothing_is_made(options, message, parent, tmp_path, cwd):
    kept = tmp_path / "kept"
    kept.mkdir()
    content = (parent / STEP_8).read_bytes()
    saved = torch.load(parent / STEP_8, weights_only=True)
    (kept / "cut.ckpt").write_bytes(content[: len(content) // 2])
    weight = content.index(saved["model"]["layers.0.weight"].numpy().tobytes())  # what is between tensors, nobody reads
    (kept / "flipped.ckpt").write_bytes(content[:weight] + bytes([content[weight] ^ 1]) + content[weight + 1 :])
    saved["checkpoint"]["format"] -= 1
    torch.save(saved, kept / "old.ckpt")
    (kept / "empty").mkdir()
    shutil.copy(parent / "config.yaml", kept / "empty")
    for name, path in {"PARENT": parent, "STEP_8": parent / STEP_8, "EMPTY": kept / "empty", "CUT": kept / "cut.ckpt",
                       "FLIPPED": kept / "flipped.ckpt", "OLD": kept / "old.ckpt"}.items():  # fmt: skip
        options, message = options.replace(name, str(path)), message.replace(name, str(path))
    before = without_locks(parent)
    done = call(f"{FORK} {options}", cwd, code=2)
    assert done.stderr.startswith("fork.py: error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert not [*cwd.iterdir()]
    assert without_locks(parent) == before


@pytest.mark.parametrize("change", ["open step-00000008.ckpt.tmp 1", "os.rename config.yaml.tmp 1"])
def test_a_kill_in_the_middle_leaves_no_run(change, parent, tmp_path, cwd):
    before = without_locks(parent)
    command = f"{FORK} --parent {parent / STEP_8} --out_dir fork-train_out"
    kill_before(change, command, cwd, tmp_path)
    assert len([*cwd.iterdir()]) == 1 and not [*cwd.glob("*/config.yaml")]
    assert without_locks(parent) == before
    call(command, cwd)
    call("train.py --resume auto --out_dir fork-train_out", cwd)
    (folder,) = (path.parent for path in cwd.glob("*/config.yaml"))
    assert_same_weights(folder, parent)
