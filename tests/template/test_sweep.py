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
from edits import copy_programs, insert_after, insert_before
from helpers import PREEMPTED, REPO, call, is_running, kill_group, run, run_forked_sweep, start, wait_for
from mistakes import assert_one_line, refuses

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.recipes
SWEEP = "tools/sweep.py"
OPTIONS = (
    "-- --accelerator cpu --limit_train_batches 4 --limit_val_batches 1 --num_sanity_val_steps 0 --logger_name csv"
)
GRID = "width: [4, 5]\nseed: [1, 2]\nepochs: 2\n"
LONG = "width: [4, 5, 6]\nepochs: 3000\n"  # never ends by itself


def trials(cwd: Path, name: str = "grid") -> list:
    backend = optuna.storages.journal.JournalFileBackend(f"{cwd}/{name}.sweep/journal")
    return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend)).get_trials()


def values(cwd: Path) -> dict[str, float]:
    """The value of each point. One that was begun again has trials without a value, too."""
    return {str(trial.params): trial.value for trial in trials(cwd) if trial.value is not None}


def finished(cwd: Path) -> dict[Path, dict]:
    """The directories of the finished runs, and their summaries."""
    summaries = {path.parent: json.loads(path.read_text()) for path in cwd.glob("*/summary.json")}
    return {path: summary for path, summary in summaries.items() if summary["state"] == "finished"}


def bests(cwd: Path) -> dict[str, float]:
    """The best value of each finished run, by its name without the time."""
    runs = finished(cwd)
    found = {path.name[16:]: summary["best"] for path, summary in runs.items()}
    assert len(found) == len(runs) == len([*cwd.glob("*/config.yaml")]), "a run was begun twice, or is unfinished"
    return found


def processes(cwd: Path, script: str = "train.py") -> set[int]:
    """The processes of a script that go on in a folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_there = (path / "cwd").resolve() == cwd.resolve()
            words = (path / "cmdline").read_text(errors="replace").split("\0")
        except OSError:  # it has ended, or is of somebody else
            continue
        if is_there and any(word.endswith(script) for word in words[:2]) and is_running(int(path.name)):
            found.add(int(path.name))
    return found


@pytest.fixture
def cwd(tmp_path: Path):
    """A folder in which nothing goes on after the test."""
    (folder := tmp_path / "cwd").mkdir()
    yield folder
    for pid in processes(folder, "sweep.py") | processes(folder):
        os.kill(pid, signal.SIGKILL)


def begun(cwd: Path, runs: int) -> list[Path]:
    """Waits until that many runs have saved, and returns their directories."""
    return wait_for(
        lambda: len(found := {path.parents[1] for path in cwd.glob("*/checkpoints/step-*.ckpt")}) >= runs and found
    )


def killed(process: subprocess.Popen) -> None:
    kill_group(process)
    process.communicate()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Where a sweep was left alone."""
    cwd = tmp_path_factory.mktemp("alone")
    (cwd / "grid.yaml").write_text(GRID)
    done = run_forked_sweep(f"grid.yaml --jobs 2 {OPTIONS}", cwd)
    (cwd / "printed").write_text(done.stdout)
    return cwd


def test_a_grid_trains_each_point_with_each_seed_and_takes_the_mean(alone):
    found = bests(alone)
    assert {*found} == {f"grid-{number}-seed={seed}" for number in (0, 1) for seed in (1, 2)}
    for trial in trials(alone):
        number = trial.user_attrs["number"]
        assert trial.params["width"] == (4, 5)[number]
        assert trial.value == pytest.approx((found[f"grid-{number}-seed=1"] + found[f"grid-{number}-seed=2"]) / 2)


def test_a_sweep_that_is_done_trains_nothing_and_says_again_what_came_out(alone):
    """Another search of the same name, whose runs would have the same names, is refused."""
    lines = (alone / "printed").read_text().splitlines()
    assert lines[0].startswith("points to train: 2 of 2, runs: 4; ") and lines[0].endswith(" grid.sweep/N.log")
    before = {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")}
    assert run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", alone).stdout.splitlines() == lines[-4:]
    assert {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")} == before
    assert_one_line(run(f"{SWEEP} grid.yaml {OPTIONS} --epochs 3", alone, code=2), "grid.sweep")


def test_the_last_lines_evaluate_the_best_point_and_show_the_table(alone):
    lines = (alone / "printed").read_text().splitlines()
    *_, best, first, second, table = lines
    found = max(trials(alone), key=lambda trial: trial.value)
    number = found.user_attrs["number"]
    assert best == f"best val/accuracy {found.value:.5g} of 2 trials: {found.params}"
    for line, seed in ((first, 1), (second, 2)):
        command = re.fullmatch(rf"next: python (test.py --out_dir \d+-\d+-grid-{number}-seed={seed})", line)[1]
        assert "best.ckpt on 380 test samples" in call(f"{command} --accelerator cpu", alone).stdout
    command = table.removeprefix("next: python ").replace("'", "")
    assert command == "tools/runs.py . --group --sort mean --filter run=grid-*"
    assert call(command, alone).stdout.count("2 finished") == 2


@pytest.mark.parametrize("stop", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.night)])
def test_a_sweep_that_was_stopped_and_is_started_twice_at_once_ends_as_one_left_alone(stop, alone, tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID)
    process = start(f"{SWEEP} grid.yaml {OPTIONS}", tmp_path)
    wait_for(lambda: process.poll() is not None or list(tmp_path.glob("*/checkpoints/step-*")))
    if stop == "SIGKILL":
        killed(process)  # its run is no longer in its group: it saves
    else:
        process.send_signal(signal.SIGINT)
        out = process.communicate()[0]
        assert "the runs save" in out and process.returncode == PREEMPTED
        assert out.splitlines()[-1].startswith("2 of 2 points have no result yet: ")
    both = [start(f"{SWEEP} grid.yaml {OPTIONS}", tmp_path) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    assert bests(tmp_path) == bests(alone)
    assert values(tmp_path) == values(alone)


def test_runs_end_with_a_sweep_that_is_killed_and_save(cwd):
    (cwd / "grid.yaml").write_text(LONG)
    process = start(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", cwd)
    begun(cwd, 2)
    assert len(processes(cwd)) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not processes(cwd))
    assert [json.loads(path.read_text())["state"] for path in cwd.glob("*/summary.json")] == ["interrupted"] * 2


def test_points_are_drawn_from_ranges_and_the_same_command_goes_on_with_them(cwd):
    (cwd / "grid.yaml").write_text(
        "base_lr: {low: 1e-3, high: 1e-2, log: true}\nwidth: {low: 4, high: 8, step: 2}\nseed: [1, 2]\n"
    )
    command = f"{SWEEP} grid.yaml --trials 2 --jobs 2 {OPTIONS} --epochs 40"
    process = start(command, cwd)
    assert process.stdout.readline().startswith("points to train: 2 of 2, runs: 4; ")
    begun(cwd, 2)
    killed(process)
    first = {trial.user_attrs["number"]: trial.params for trial in trials(cwd)}
    run(command, cwd)
    again = {trial.user_attrs["number"]: trial.params for trial in trials(cwd) if trial.state.name == "COMPLETE"}
    assert again == first and len(again) == 2 and len(bests(cwd)) == 4
    for point in again.values():
        assert 1e-3 <= point["base_lr"] <= 1e-2 and point["width"] in (4, 6, 8)


@pytest.mark.parametrize(
    "visible, code, devices",
    [(None, 0, ["0", "1", "0"]),  # those that nvidia-smi lists
     (None, 9, [None, None, None]),
     ("MIG-0,3", 0, ["MIG-0", "3", "MIG-0"]),
     ("", 0, [None, None, None])],  # as where idle_gpus.sh has found none
)  # fmt: skip
def test_the_devices_of_the_jobs(visible, code, devices, tmp_path: Path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\nprintf '%s\\n' 0 1\nexit {code}\n")  # a stand-in
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.syspath_prepend(REPO / "tools")
    assert runpy.run_path(str(REPO / SWEEP))["devices"](3) == devices


@pytest.mark.night
def test_the_commands_of_the_page(tmp_path):
    """They search, evaluate each run, and show a table as the page does."""
    section = (REPO / "tools" / "README.md").read_text().partition("## Searches\n")[2].partition("\n## ")[0]
    search, commands, printed = re.findall(r"^```\w*\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
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
    *others, last = trials(tmp_path, "p")
    assert [trial.state.name for trial in others] == ["COMPLETE"] * 5 and last.state.name == "PRUNED"
    (stopped,) = {path.parent for path in tmp_path.glob("*/config.yaml")} - {*finished(tmp_path)}
    assert stopped.name.endswith("-p-5") and [*stopped.glob("checkpoints/step-*")]
    row = call("tools/runs.py . --format csv --columns state --filter p-5", tmp_path).stdout
    assert row == "state\ninterrupted\n"


CONFIGS = {
    "shared.yaml": "out_dir: experiment\nepochs: 10\nseed: 1\nearly_stopping_patience: 5\n",
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


NESTED = """
@dataclass(frozen=True)
class OptimConfig:
    momentum: float = 0.9
    factor: float = 0.1
    name: str = "adamw"
"""


def test_nested_options_have_dots_or_are_a_mapping_as_in_a_config_file(program, cwd):
    insert_before(program, "options", "optim: OptimConfig = OptimConfig()")
    insert_after(program, ("config.py", "", "Loggers = ..."), NESTED)
    shutil.copytree(REPO / "tools", program / "tools")
    (cwd / "s.yaml").write_text("optim: {momentum: [0.8, 0.7], name: sgd}\noptim.factor: {low: 0.2, high: 0.3}\n")
    run_forked_sweep(f"s.yaml --trials 1 {OPTIONS} --epochs 1", cwd, program=program)
    (trial,) = trials(cwd, "s")
    (path,) = cwd.glob("*/config.yaml")
    found = yaml.safe_load(path.read_text())["optim"]
    assert {*trial.params} == {"optim.momentum", "optim.factor"} and found["name"] == "sgd"
    assert found["momentum"] == trial.params["optim.momentum"] in (0.8, 0.7)
    assert 0.2 <= found["factor"] == trial.params["optim.factor"] <= 0.3


# The options of the command, the file, and what the line names.
MISTAKES = [
    ("-- --epochs many", "width: [4, 5]", "--epochs many"),
    ("--jobs 0", "width: [4, 5]", "--jobs 0 1"),
    ("--prune -- --logger_name tensorboard", "width: {low: 4, high: 5}", "--prune csv --logger_name"),
    ("", None, "s.yaml"),
    ("", "width 4", "s.yaml"),
    ("", "epohcs: 3", "--epohcs --epochs?"),
    ("", "wdth: {low: 4, high: 8}", "--wdth --width?"),
    ("", "width: [4, many]", "--width many"),
    ("", "width: []", "width:"),
    ("", "base_lr: {low: 0, high: 1}", "--base_lr 0.0 above 0"),
    ("", "dropout: {low: 0, high: 0.5, log: true}", "dropout:"),
    ("", "width: {low: 4}", "width: low: high:"),
    ("", "comment: {low: a, high: b}", "comment:"),
    ("", "monitor: [val/f1, val/accuracy]\nmonitor_mode: max", "monitor monitor_mode same"),
    ("", "config_path: [nowhere.yaml]", "--config_path nowhere.yaml"),
]


@pytest.mark.parametrize("options, content, words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(options, content, words, tmp_path):
    if content is not None:
        (tmp_path / "s.yaml").write_text(content)
    refuses(f"{SWEEP} s.yaml {options}", tmp_path, *words.split(), how=run)
