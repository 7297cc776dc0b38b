"""tools/sweep.py: searches that are interrupted, killed and started twice end as one that was left alone."""

import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from edits import copy_programs, insert_before, with_text
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
    yield tmp_path
    for pid in processes(tmp_path, "sweep.py") | processes(tmp_path):
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
        values = [found[f"grid-{number}-seed={seed}"] for seed in (1, 2)]
        assert trial.value == pytest.approx(sum(values) / 2)


def test_the_lines_name_the_outputs_and_the_runs_of_the_best_trial_and_evaluate_them(alone):
    """Beside the runs there is one folder. A sweep that is done trains nothing, and says again what came out; another
    search of the same name, whose runs would have the same names, is refused."""
    lines = (alone / "printed").read_text().splitlines()
    assert lines[0].startswith("points to train: 2 of 2, runs: 4; ") and lines[0].endswith(" grid.sweep/N.log")
    names = {path.name for path in alone.iterdir() if not re.match(r"\d+-\d+-grid-\d-seed", path.name)}
    assert names == {"grid.yaml", "printed", "grid.sweep"}
    assert {path.name for path in (alone / "grid.sweep").iterdir()} == {"journal", "0.log", "1.log"}
    before = {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")}
    assert run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", alone).stdout.splitlines() == lines[-4:]
    assert {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")} == before
    assert_one_line(run(f"{SWEEP} grid.yaml {OPTIONS} --epochs 3", alone, code=2), "grid.sweep")

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


def test_git_takes_neither_runs_nor_sweeps_for_files_of_the_project(alone, tmp_path):
    folder = shutil.copytree(alone, tmp_path / "copy")
    shutil.copy(REPO / ".gitignore", folder)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    listed = subprocess.check_output(["git", "ls-files", "--others", "--exclude-standard"], cwd=folder, text=True)
    assert listed.split() == [".gitignore", "grid.yaml", "printed"]


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


def test_a_run_that_has_not_ended_with_its_sweep_is_waited_for(cwd):
    """It is held up: the next sweep trains another point, and begins the run again only once it has ended."""
    (cwd / "grid.yaml").write_text("width: [4, 5]\nepochs: 60\n")
    process = start(f"{SWEEP} grid.yaml {OPTIONS}", cwd)
    begun(cwd, 1)
    (held,) = processes(cwd)
    os.kill(held, signal.SIGSTOP)
    killed(process)
    process = start(f"{SWEEP} grid.yaml {OPTIONS}", cwd)
    assert process.stdout.readline().startswith("points to train: 2 of 2, runs: 2; ")
    assert process.stdout.readline().startswith("trial 1: ")
    assert processes(cwd) == {held}
    os.kill(held, signal.SIGCONT)
    out, err = process.communicate()
    assert process.returncode == 0 and out.startswith("trial 0: "), out + err
    assert {*bests(cwd)} == {"grid-0", "grid-1"}


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


NVIDIA_SMI = """#!/bin/bash
case $* in
    --list-gpus) printf '%s\\n' "GPU 0: A (UUID: GPU-0)" "  MIG 1g.5gb Device 0: (UUID: MIG-0)" "GPU 1: A" ;;
    "--query-gpu=index --format=csv,noheader") printf '%s\\n' 0 1 ;;
esac
exit $CODE
"""


@pytest.mark.parametrize(
    "visible, code, devices",
    [(None, 0, ["0", "1", "0"]),
     (None, 9, [None, None, None]),  # what it prints then are no devices
     ("", 0, [None, None, None]),  # as where idle_gpus.sh has found none
     ("MIG-0,3", 0, ["MIG-0", "3", "MIG-0"])],
)  # fmt: skip
def test_the_devices_of_the_jobs(visible, code, devices, tmp_path: Path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)  # a stand-in
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CODE", str(code))
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

    def points(text: str) -> list[list[str]]:  # the titles, and the options and the number of seeds
        return sorted(words[:2] + words[4:5] for words in map(str.split, text.splitlines()[-5:]))

    assert points(done) == points(printed)
    assert done.splitlines()[-5].split() == printed.splitlines()[1].split()


@pytest.mark.night
@pytest.mark.parametrize("how, code", [(signal.SIGTERM, "75"), (signal.SIGKILL, "-9"), ("full disk", "1")])
def test_the_same_command_goes_on_with_a_run_that_has_ended_otherwise(how, code, cwd):
    """Stopped by somebody else, or where the disk is full: a limit on the size of files does what that does."""
    (cwd / "grid.yaml").write_text("width: [64]\n")
    command = f"{SWEEP} grid.yaml {OPTIONS} --epochs 60"
    process = start(command, cwd)
    if how == "full disk":
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10**5, 10**5))  # and its run, which it has not begun yet
    else:
        begun(cwd, 1)
        (pid,) = processes(cwd)
        os.kill(pid, how)
    out, err = process.communicate()
    assert process.returncode == 1, out + err
    first, failed, last = out.splitlines()
    assert first.startswith("points to train: 1 of 1, runs: 1; ")
    assert failed.startswith(f"trial 0: grid-0 ended with code {code}, see grid.sweep/0.log: ")
    assert ("File too large" in failed) == (how == "full disk")
    assert last == "1 of 1 points have no result yet: the same command goes on with them"
    out = run(command, cwd).stdout
    (folder,) = finished(cwd)
    assert {*bests(cwd)} == {"grid-0"} and f"next: python test.py --out_dir {folder.name}\n" in out
    assert ("resumed from" in (folder / "train.log").read_text()) == (how != "full disk")


def test_a_journal_whose_last_line_was_cut_is_read(alone, tmp_path):
    shutil.copytree(alone, tmp_path / "copy")
    journal = tmp_path / "copy" / "grid.sweep" / "journal"
    os.truncate(journal, journal.read_bytes().rindex(b'"values":['))  # the last trial has no value any more
    out = run_forked_sweep(f"grid.yaml --jobs 2 {OPTIONS}", tmp_path / "copy").stdout
    assert out.startswith("points to train: 1 of 2, runs: 2; trial N prints to ")
    assert values(tmp_path / "copy") == values(alone)
    assert bests(tmp_path / "copy") == bests(alone)


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
    "large_batch.yaml": "comment: large batch\neffective_batch_size: 256\n",
    "wide.yaml": "comment: wide\nwidth: 64\nbase_lr: 2e-3\n",
    "e.yaml": "config_path: [wrong.yaml, large_batch.yaml, wide.yaml]\n",
}


def test_config_files_are_run_over_what_they_share_and_one_that_fails_does_not_stop_the_others(tmp_path):
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    more = "--epochs 1 --warmup_epochs 0 --monitor val/loss --monitor_mode min"
    done = run_forked_sweep(f"e.yaml {OPTIONS} --config_path shared.yaml {more}", tmp_path, code=1)
    losses = bests(tmp_path)
    assert {*losses} == {"e-1-config_path=large_batch.yaml", "e-2-config_path=wide.yaml"}
    assert f"\nbest val/loss {min(losses.values()):.5g} of 2 trials: " in done.stdout
    assert "e-0-config_path=wrong.yaml ended with code 2, see e.sweep/0.log: " in done.stdout
    assert "--effective_batch_size 5000" in (tmp_path / "e.sweep" / "0.log").read_text()
    for path in tmp_path.glob("*/config.yaml"):
        options = yaml.safe_load(path.read_text())
        assert options["seed"] == 1 and path.parent.name.endswith(f"={options['comment'].replace(' ', '_')}.yaml")


NESTED = """@dataclass(frozen=True)
class DecayConfig:
    factor: float = 0.1


@dataclass(frozen=True)
class OptimConfig:
    momentum: float = 0.9
    name: str = "adamw"
    decay: DecayConfig = DecayConfig()


@dataclass(frozen=True)
class Data:"""


@pytest.fixture(scope="module")
def with_nested_options(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("nested")
    insert_before(program, "options", "optim: OptimConfig = OptimConfig()\n")
    with_text(program, "config.py", ("@dataclass(frozen=True)\nclass Data:", NESTED))
    (program / "tools").mkdir()
    for name in ("sweep.py", "runs.py", "run_table.py"):
        shutil.copy(REPO / "tools" / name, program / "tools")
    return program


@pytest.mark.parametrize(
    "content",
    ["optim.momentum: [0.8, 0.7]\noptim.decay.factor: {low: 0.2, high: 0.3}\noptim.name: sgd\n",
     "optim:\n  momentum: [0.8, 0.7]\n  decay: {factor: {low: 0.2, high: 0.3}}\n  name: sgd\n",
     "optim: {momentum: [0.8, 0.7], decay.factor: {low: 0.2, high: 0.3}}\noptim.name: sgd\n"],
)  # fmt: skip
def test_nested_options_have_dots_or_are_a_mapping_as_in_a_config_file(content, with_nested_options, tmp_path):
    (tmp_path / "s.yaml").write_text(content)
    run_forked_sweep(f"s.yaml --trials 1 {OPTIONS} --epochs 1", tmp_path, program=with_nested_options)
    (trial,) = trials(tmp_path, "s")
    (path,) = tmp_path.glob("*/config.yaml")
    found = yaml.safe_load(path.read_text())["optim"]
    assert {*trial.params} == {"optim.momentum", "optim.decay.factor"}
    assert found["name"] == "sgd" and found["momentum"] == trial.params["optim.momentum"] in (0.8, 0.7)
    assert 0.2 <= found["decay"]["factor"] == trial.params["optim.decay.factor"] <= 0.3


def test_root_dir_is_that_of_the_study_too_and_null_is_read_as_in_a_config_file(tmp_path):
    (tmp_path / "s.yaml").write_text("max_grad_norm: [null]\nweight_decay: null\n")  # not given
    shared = "--epochs 1 --root_dir there --max_grad_norm 1 --width 4"
    printed = run_forked_sweep(f"s.yaml {OPTIONS} {shared}", tmp_path).stdout
    assert (tmp_path / "there" / "s.sweep" / "journal").exists()
    (name,) = re.findall(r"next: python test.py --out_dir (there/\d+-\d+-s-0)\n", printed)
    assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["max_grad_norm"] == 1


# The options of the command, the file, and what the line names.
RANGE = "low: high:"
MISTAKES = [
    ("-- --epochs many", "width: [4, 5]", "--epochs many"),
    ("-- --monitor val/f1", "width: [4, 5]", "--monitor val/f1 --monitor_mode"),
    ("--jobs 0", "width: [4, 5]", "--jobs 0 1"),
    ("--prune -- --logger_name tensorboard", "width: {low: 4, high: 5}", "--prune csv --logger_name"),
    ("", None, "s.yaml"),
    ("", "width 4", "s.yaml"),
    ("", "epohcs: 3", "--epohcs --epochs?"),
    ("", "wdth: [1, 2]", "--wdth --width?"),
    ("", "wdth: {low: 4, high: 8}", "--wdth --width?"),
    ("", "width: [4, many]", "--width many"),
    ("", "width: [4, 0]", "--width 0 above 0"),
    ("", "base_lr: {low: 0, high: 1}", "--base_lr 0.0 above 0"),
    ("", "dropout: {low: 0, high: 0.5, log: true}", "dropout:"),
    ("", "monitor: [val/f1, val/accuracy]\nmonitor_mode: max", "monitor monitor_mode same"),
    ("", "monitor: val/f1\nmonitor_mode: [max, min]", "monitor monitor_mode same"),
    ("", "width: []", "width:"),
    ("", "seed: []", "seed:"),
    ("", "width: {low: 4}", f"width: {RANGE}"),
    ("", "width: {high: 4}", f"width: {RANGE}"),
    ("", "width: {low: 4, hihg: 8}", f"width: {RANGE}"),
    ("", "width: {low: 8, high: 4}", "width:"),
    ("", "width: {low: 4.5, high: 8}", "--width 4.5"),
    ("", "comment: {low: a, high: b}", "comment:"),
    ("", "config_path: [nowhere.yaml]", "--config_path nowhere.yaml"),
    ("", "max_grad_norm: None", "--max_grad_norm None"),
    ("", "optim: {momentun: [0.8, 0.9]}", "--optim.momentun --optim.momentum?"),
    ("", "optim: {momentum: {low: 0.8}}", f"optim.momentum: {RANGE}"),
    ("", "optim: [0.8, 0.9]", "--optim"),
]


@pytest.mark.parametrize("options, content, words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(options, content, words, with_nested_options, tmp_path):
    if content is not None:
        (tmp_path / "s.yaml").write_text(content)
    refuses(f"{with_nested_options}/{SWEEP} s.yaml {options}", tmp_path, *words.split(), how=run)


def test_optuna_asks_first_for_a_point_that_waits_and_draws_the_rest_of_it():
    """sweep.py puts each point into the queue, with its number, and then asks for it."""
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.5}, user_attrs={"number": 7})
    drawn = optuna.distributions.FloatDistribution(0, 1)
    trial = study.ask({"x": drawn, "y": drawn})
    assert trial.user_attrs == {"number": 7} and trial.params["x"] == 0.5 and 0 <= trial.params["y"] <= 1
