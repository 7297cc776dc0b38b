"""tools/sweep.py: searches that are interrupted, killed and started twice end as one that was left alone."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import PREEMPTED, REPO, call, run, run_forked_sweep, start
from copies import section
from edits import copy_programs
from mistakes import assert_one_line, refuses
from processes import wait_for
from test_own_options import FIELDS, NESTED, with_fields

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.recipes
SWEEP = "tools/sweep.py"
OPTIONS = (
    "-- --accelerator cpu --limit_train_batches 4 --limit_val_batches 1 --num_sanity_val_steps 0 --logger_name csv"
)
GRID = "width: [4, 5]\nseed: [1, 2]\nepochs: 2\n"


def trials(cwd: Path, name: str = "grid") -> list:
    backend = optuna.storages.journal.JournalFileBackend(f"{cwd}/{name}.sweep/journal")
    return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend)).get_trials()


def summaries(cwd: Path) -> dict[str, dict]:
    """Those of all runs, by the name without the time; no name comes twice."""
    found = {path.parent.name[16:]: json.loads(path.read_text()) for path in cwd.glob("*/summary.json")}
    assert len(found) == len([*cwd.glob("*/config.yaml")]), "a run was begun twice"
    return found


def states(cwd: Path) -> dict[str, str]:
    return {name: summary["state"] for name, summary in summaries(cwd).items()}


def bests(cwd: Path) -> dict[str, float]:
    """The best value of each run. All are finished."""
    assert {*states(cwd).values()} == {"finished"}
    return {name: summary["best"] for name, summary in summaries(cwd).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Where a sweep was left alone."""
    cwd = tmp_path_factory.mktemp("alone")
    (cwd / "grid.yaml").write_text(GRID)
    done = run_forked_sweep(f"grid.yaml --jobs 2 {OPTIONS}", cwd)
    (cwd / "printed").write_text(done.stdout)
    return cwd


def test_a_grid_trains_each_point_with_each_seed_takes_the_mean_and_says_what_to_do_next(alone):
    """Evaluate the best point, and show the table. Both commands work."""
    found = bests(alone)
    assert {*found} == {f"grid-{number}-seed={seed}" for number in (0, 1) for seed in (1, 2)}
    for trial in trials(alone):
        number = trial.user_attrs["number"]
        assert trial.params["width"] == (4, 5)[number]
        assert trial.value == pytest.approx((found[f"grid-{number}-seed=1"] + found[f"grid-{number}-seed=2"]) / 2)
    *_, best, first, second, table = (alone / "printed").read_text().splitlines()
    trial = max(trials(alone), key=lambda trial: trial.value)
    number = trial.user_attrs["number"]
    assert best == f"best val/accuracy {trial.value:.5g} of 2 trials: {trial.params}"
    for line, seed in ((first, 1), (second, 2)):
        command = re.fullmatch(rf"next: python (test.py --out_dir \d+-\d+-grid-{number}-seed={seed})", line)[1]
        assert "best.ckpt on 380 test samples" in call(f"{command} --accelerator cpu", alone).stdout
    command = table.removeprefix("next: python ").replace("'", "")
    assert command == "tools/runs.py . --group --sort mean --filter run=grid-*"
    assert call(command, alone).stdout.count("2 finished") == 2


def test_a_sweep_that_is_done_trains_nothing_and_says_again_what_came_out(alone):
    """Another search of the same name, whose runs would have the same names, is refused."""
    lines = (alone / "printed").read_text().splitlines()
    assert lines[0].startswith("points to train: 2 of 2, runs: 4; ") and lines[0].endswith(" grid.sweep/N.log")
    before = {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")}
    assert run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", alone).stdout.splitlines() == lines[-4:]
    assert {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")} == before
    assert_one_line(run(f"{SWEEP} grid.yaml {OPTIONS} --epochs 3", alone, code=2), "grid.sweep")


def test_a_sweep_that_was_stopped_and_is_started_twice_at_once_ends_as_one_left_alone(alone, cwd):
    (cwd / "grid.yaml").write_text(GRID)
    process = start(f"{SWEEP} grid.yaml {OPTIONS}", cwd)
    wait_for(lambda: [*cwd.glob("*/checkpoints/step-*.ckpt")])
    process.send_signal(signal.SIGINT)
    out = process.communicate()[0]
    assert "the runs save" in out and process.returncode == PREEMPTED
    assert out.splitlines()[-1].startswith("2 of 2 points have no result yet: ")
    both = [start(f"{SWEEP} grid.yaml {OPTIONS}", cwd) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    assert bests(cwd) == bests(alone)
    # A point that was begun again has trials without a value, too.
    ended = [[each for each in trials(path) if each.value is not None] for path in (cwd, alone)]
    ours, theirs = ({str(each.params): each.value for each in found} for found in ended)
    assert ours == theirs


def test_points_are_drawn_from_ranges_and_the_same_command_goes_on_with_them_after_a_kill(cwd):
    """The runs end with their sweep, and save."""
    (cwd / "grid.yaml").write_text(
        "base_lr: {low: 1e-3, high: 1e-2, log: true}\nwidth: {low: 4, high: 8, step: 2}\nseed: [1, 2]\n"
    )
    command = f"{SWEEP} grid.yaml --trials 2 --jobs 2 {OPTIONS} --epochs 40"
    process = start(command, cwd)
    assert process.stdout.readline().startswith("points to train: 2 of 2, runs: 4; ")
    wait_for(lambda: len({path.parent for path in cwd.glob("*/checkpoints/step-*.ckpt")}) == 2)
    process.kill()
    process.communicate()
    wait_for(lambda: "running" not in states(cwd).values())
    assert "interrupted" in states(cwd).values()
    first = {trial.user_attrs["number"]: trial.params for trial in trials(cwd)}
    run(command, cwd)
    again = {trial.user_attrs["number"]: trial.params for trial in trials(cwd) if trial.state.name == "COMPLETE"}
    assert again == first and len(again) == 2 and len(bests(cwd)) == 4
    for point in again.values():
        assert 1e-3 <= point["base_lr"] <= 1e-2 and point["width"] in (4, 6, 8)


def test_the_devices_of_the_jobs(tmp_path: Path, monkeypatch):
    """Those that nvidia-smi lists, or of CUDA_VISIBLE_DEVICES, which is empty where idle_gpus.sh has found none."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(REPO / "tools")
    devices = runpy.run_path(str(REPO / SWEEP))["devices"]
    for code, expected in ((0, ["0", "1", "0"]), (9, [None, None, None])):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\nprintf '%s\\n' 0 1\nexit {code}\n")  # a stand-in
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert devices(3) == expected
    for visible, expected in (("MIG-0,3", ["MIG-0", "3", "MIG-0"]), ("", [None, None, None])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices(3) == expected


@pytest.mark.night
def test_the_commands_of_the_page(tmp_path):
    """They search, evaluate each run, and show a table as the page does."""
    page = section("tools/README.md", "Searches")
    search, commands, printed = re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = copy_programs(tmp_path)
    shutil.copytree(REPO / "tools", program / "tools")
    (program / "sweep.yaml").write_text(search)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.check_output(["bash", "-ec", commands], cwd=program, env=env, text=True)
    titles, *points = [line.split() for line in done.splitlines()[-5:]]
    _, titles_of_page, *points_of_page = [line.split() for line in printed.splitlines()]
    assert titles == titles_of_page
    assert sorted(point[:2] for point in points) == sorted(point[:2] for point in points_of_page)


def test_a_run_that_stays_below_the_median_is_stopped(tmp_path):
    """The last one learns nothing."""
    (tmp_path / "p.yaml").write_text("base_lr: [0.01, 0.011, 0.012, 0.013, 0.014, 1.0e-9]\nwidth: 4\n")
    run_forked_sweep(f"p.yaml --prune {OPTIONS} --epochs 40 --checkpoint_frequency 0", tmp_path)
    assert [trial.state.name for trial in trials(tmp_path, "p")] == ["COMPLETE"] * 5 + ["PRUNED"]
    assert states(tmp_path) == {f"p-{number}": "finished" for number in range(5)} | {"p-5": "interrupted"}
    assert [*tmp_path.glob("*-p-5/checkpoints/step-*")]


CONFIGS = {
    "shared.yaml": "out_dir: experiment\nepochs: 10\nseed: 1\n",
    "wrong.yaml": "epochs: 1\neffective_batch_size: 5000\n",
    "large_batch.yaml": "comment: large_batch\neffective_batch_size: 256\n",
    "wide.yaml": "comment: wide\nwidth: 64\nbase_lr: 2e-3\n",
    "e.yaml": "config_path: [wrong.yaml, large_batch.yaml, wide.yaml]\n",
}


def test_config_files_are_run_over_what_they_share_and_one_that_fails_does_not_stop_the_others(tmp_path):
    """The same command begins with the one that has failed."""
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    more = "--epochs 1 --warmup_epochs 0 --monitor val/loss --monitor_mode min"
    command = f"e.yaml {OPTIONS} --config_path shared.yaml {more}"
    printed = run_forked_sweep(command, tmp_path, code=1).stdout
    losses = bests(tmp_path)
    assert {*losses} == {"e-1-config_path=large_batch.yaml", "e-2-config_path=wide.yaml"}
    assert f"\nbest val/loss {min(losses.values()):.5g} of 2 trials: " in printed
    assert "e-0-config_path=wrong.yaml ended with code 2, see e.sweep/0.log: " in printed
    assert "--effective_batch_size 5000" in (tmp_path / "e.sweep" / "0.log").read_text()
    for path in tmp_path.glob("*/config.yaml"):
        options = yaml.safe_load(path.read_text())
        assert options["seed"] == 1 and path.parent.name.endswith(f"={options['comment']}.yaml")
    assert run_forked_sweep(command, tmp_path, code=1).stdout.startswith("points to train: 1 of 3, ")


def test_nested_options_have_dots_or_are_a_mapping_as_in_a_config_file(program, cwd):
    with_fields(program, FIELDS, NESTED)
    shutil.copytree(REPO / "tools", program / "tools")
    (cwd / "s.yaml").write_text("optim: {momentum: [0.8, 0.7], name: sgd}\noptim.decay.factor: {low: 0.2, high: 0.3}\n")
    run_forked_sweep(f"s.yaml --trials 1 {OPTIONS} --epochs 1", cwd, program=program)
    (trial,) = trials(cwd, "s")
    (path,) = cwd.glob("*/config.yaml")
    found = yaml.safe_load(path.read_text())["optim"]
    assert {*trial.params} == {"optim.momentum", "optim.decay.factor"} and found["name"] == "sgd"
    assert found["momentum"] == trial.params["optim.momentum"] in (0.8, 0.7)
    assert 0.2 <= found["decay"]["factor"] == trial.params["optim.decay.factor"] <= 0.3


# The options of the command, the file, and what the line names.
MISTAKES = [
    ("-- --epochs many", "width: [4, 5]", "--epochs many"),
    ("--jobs 0", "width: [4, 5]", "--jobs 0 1"),
    ("--prune -- --logger_name tensorboard", "width: {low: 4, high: 5}", "--prune csv --logger_name"),
    ("", "width 4", "s.yaml"),
    ("", "wdth: {low: 4, high: 8}", "--wdth --width?"),
    ("", "width: []", "width:"),
    ("", "base_lr: {low: 0, high: 1}", "--base_lr 0.0 above 0"),
    ("", "width: {low: 4}", "width: low: high:"),
    ("", "comment: {low: a, high: b}", "comment:"),
    ("", "monitor: [val/f1, val/accuracy]\nmonitor_mode: max", "monitor monitor_mode same"),
    ("", "config_path: [nowhere.yaml]", "--config_path nowhere.yaml"),
]


@pytest.mark.parametrize("options, content, words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(options, content, words, tmp_path):
    (tmp_path / "s.yaml").write_text(content)
    refuses(f"{SWEEP} s.yaml {options}", tmp_path, *words.split(), how=run)
