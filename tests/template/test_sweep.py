"""recipes/sweep.py: searches that are interrupted, killed and started twice end as one that was left alone."""

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
from conftest import PREEMPTED, REPO, call, clean_environment, is_running, kill_group, run, start, wait_for

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.recipes
SWEEP = "recipes/sweep.py"
OPTIONS = (
    "-- --accelerator cpu --limit_train_batches 4 --limit_val_batches 1 --num_sanity_val_steps 0 --logger_name csv"
)
GRID = "width: [4, 5]\nseed: [1, 2]\nepochs: 2\n"
LONG = "width: [4, 5, 6]\nepochs: 3000\n"  # never ends by itself


def trials(cwd: Path, name: str = "grid") -> list:
    backend = optuna.storages.journal.JournalFileBackend(f"{cwd}/{name}.sweep/journal")
    return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend)).get_trials()


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("alone")
    (cwd / "grid.yaml").write_text(GRID)
    done = run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", cwd)
    (cwd / "printed").write_text(done.stdout)
    return cwd


def test_a_grid_trains_each_point_with_each_seed_and_takes_the_mean(alone):
    found = bests(alone)
    assert {*found} == {f"grid-width={width}-seed={seed}" for width in (4, 5) for seed in (1, 2)}
    for trial in trials(alone):
        values = [found[f"grid-width={trial.params['width']}-seed={seed}"] for seed in (1, 2)]
        assert trial.value == pytest.approx(sum(values) / 2)


def test_the_last_lines_name_the_runs_of_the_best_trial_and_evaluate_them(alone):
    *_, best, first, second = (alone / "printed").read_text().splitlines()
    found = max(trials(alone), key=lambda trial: trial.value)
    width = found.params["width"]
    assert best == f"best val/accuracy {found.value:.5g} of 2 trials: trial {found.number}, {{'width': {width}}}"
    for line, seed in ((first, 1), (second, 2)):
        command = re.fullmatch(rf"next: python (test.py --out_dir \d+-\d+-grid-width={width}-seed={seed})", line)[1]
        assert "best.ckpt on 380 test samples" in call(f"{command} --accelerator cpu", alone).stdout


def test_journal_locks_and_outputs_are_in_one_folder(alone):
    assert {path.name for path in alone.iterdir() if not re.match(r"\d+-\d+-grid-width", path.name)} == {
        "grid.yaml", "printed", "grid.sweep"
    }  # fmt: skip
    assert {path.name for path in (alone / "grid.sweep").iterdir()} == {"journal", "locks", "logs"}
    assert {path.stem for path in (alone / "grid.sweep" / "logs").iterdir()} == {*bests(alone)}


def test_a_sweep_that_is_done_trains_nothing(alone):
    before = {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")}
    done = run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", alone)
    assert {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")} == before
    assert done.stdout.splitlines() == (alone / "printed").read_text().splitlines()[-3:]


@pytest.mark.parametrize("stop", ["SIGKILL", "SIGINT"])
def test_a_sweep_that_was_stopped_and_is_started_twice_at_once_ends_as_one_left_alone(stop, alone, tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID)
    process = start(f"{SWEEP} grid.yaml {OPTIONS}", tmp_path)
    wait_for(lambda: process.poll() is not None or list(tmp_path.glob("*/checkpoints/step-*")))
    if stop == "SIGKILL":
        kill_group(process)  # its run goes on, and nobody waits for it
        process.communicate()
    else:
        process.send_signal(signal.SIGINT)
        assert "the runs save" in process.communicate()[0] and process.returncode == PREEMPTED
    both = [start(f"{SWEEP} grid.yaml {OPTIONS}", tmp_path) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    assert bests(tmp_path) == bests(alone)
    values, expected = ({str(trial.params): trial.value for trial in trials(cwd)} for cwd in (tmp_path, alone))
    assert values == expected


def killed(cwd: Path, **env: str) -> set[int]:
    """Kills a sweep of two jobs, and returns the processes of its runs, which go on."""
    (cwd / "grid.yaml").write_text(LONG)
    process = start(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", cwd, **env)
    begun(cwd, 2)
    kill_group(process)
    process.communicate()
    survivors = processes(cwd)
    assert len(survivors) == 2
    return survivors


def started_again(cwd: Path, options: str = "", **env: str) -> subprocess.Popen:
    """Starts the command again; it prints into a file."""
    command = [sys.executable, REPO / SWEEP, "grid.yaml", *f"{options} {OPTIONS}".split()]
    with open(cwd / "printed", "w") as printed:
        return subprocess.Popen(command, cwd=cwd, env=clean_environment() | env, stdout=printed, stderr=printed)


def waited_for(cwd: Path) -> list[int]:
    """The processes that the sweep says to have waited for, or to wait for."""
    lines = re.findall(r"trial \d: waiting for .* process (\d+)\n", (cwd / "printed").read_text())
    return [int(pid) for pid in lines]


def test_runs_that_outlive_a_killed_sweep_are_waited_for_before_others_are_started(cwd):
    """Two runs go on. The next sweep has one job: it waits for one, then for the other, and can stop that."""
    survivors = killed(cwd)
    process = started_again(cwd)
    wait_for(lambda: waited_for(cwd) or processes(cwd) - survivors)
    os.kill(waited_for(cwd)[0], signal.SIGTERM)
    wait_for(lambda: len(waited_for(cwd)) == 2 or processes(cwd) - survivors)
    assert {*waited_for(cwd)} == survivors
    assert processes(cwd) == {waited_for(cwd)[1]}
    process.send_signal(signal.SIGINT)
    wait_for(lambda: process.poll() is not None)
    assert process.returncode == PREEMPTED, (cwd / "printed").read_text()
    assert not processes(cwd)
    states = [json.loads(path.read_text())["state"] for path in cwd.glob("*/summary.json")]
    assert states == ["interrupted", "interrupted"]


def test_a_device_gets_no_second_run(cwd):
    """Of two survivors one ends: the next run is on its device."""

    def device(pid: int) -> str:
        return re.search(r"\0CUDA_VISIBLE_DEVICES=(\d)\0", f"\0{Path(f'/proc/{pid}/environ').read_text()}")[1]

    survivors = {device(pid): pid for pid in killed(cwd, CUDA_VISIBLE_DEVICES="0,1")}
    started_again(cwd, "--jobs 2", CUDA_VISIBLE_DEVICES="1,0")
    wait_for(lambda: len(waited_for(cwd)) == 2)
    os.kill(survivors["1"], signal.SIGTERM)
    (following,) = wait_for(lambda: processes(cwd) - {*survivors.values()})
    assert device(following) == "1"
    assert survivors["0"] in processes(cwd)


NVIDIA_SMI = """#!/bin/bash
case $* in
    --list-gpus) printf '%s\\n' "GPU 0: A (UUID: GPU-0)" "  MIG 1g.5gb Device 0: (UUID: MIG-0)" "GPU 1: A" ;;
    "--query-gpu=index --format=csv,noheader") printf '%s\\n' 0 1 ;;
esac
exit $CODE
"""


@pytest.mark.parametrize(
    "visible, code, devices",
    [
        (None, 0, ["0", "1", "0"]),
        (None, 9, [None, None, None]),  # what it prints then are no devices
        ("", 0, [None, None, None]),  # as where idle_gpus.sh has found none
        ("MIG-0,3", 0, ["MIG-0", "3", "MIG-0"]),
    ],
)
def test_the_devices_of_the_jobs(visible, code, devices, tmp_path: Path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)  # a stand-in
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CODE", str(code))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runpy.run_path(str(REPO / SWEEP))["devices"](3) == devices


@pytest.mark.parametrize("number, said", [(signal.SIGTERM, "was stopped"), (signal.SIGKILL, "was ended by SIGKILL")])
def test_the_same_command_goes_on_with_a_run_that_somebody_else_has_stopped(number, said, cwd):
    (cwd / "grid.yaml").write_text("width: [4]\n")
    command = f"{SWEEP} grid.yaml {OPTIONS} --epochs 300"
    process = start(command, cwd)
    (run_dir,) = begun(cwd, 1)
    (pid,) = processes(cwd)
    os.kill(pid, number)
    out, err = process.communicate()
    assert process.returncode == 1, out + err
    assert f"trial 0: grid-width=4 {said}, see grid.sweep/logs/grid-width=4.log: " in out
    assert out.endswith("1 of 1 trials have no result yet: the same command goes on with them\n")
    out = run(command, cwd).stdout
    assert {*bests(cwd)} == {"grid-width=4"}  # in one directory
    assert "resumed from" in (run_dir / "train.log").read_text()
    assert f"next: python test.py --out_dir {run_dir.name}\n" in out


def test_the_same_command_goes_on_with_a_run_whose_disk_was_full(tmp_path):
    """A limit on the size of files does what a full disk does."""
    (tmp_path / "grid.yaml").write_text("width: [64, 65]\nepochs: 2\n")
    command = f"{SWEEP} grid.yaml {OPTIONS}"
    limited = start(command, tmp_path)
    resource.prlimit(limited.pid, resource.RLIMIT_FSIZE, (10**5, 10**5))  # and its runs, which it has not begun yet
    out, err = limited.communicate()
    assert limited.returncode == 1 and out.count("File too large") == 2, out + err
    run(command, tmp_path)
    assert {*bests(tmp_path)} == {"grid-width=64", "grid-width=65"}


def test_a_journal_whose_last_line_was_cut_is_read(alone, tmp_path):
    shutil.copytree(alone, tmp_path / "copy")
    journal = tmp_path / "copy" / "grid.sweep" / "journal"
    os.truncate(journal, journal.stat().st_size - 3)  # the last trial has no value any more
    run(f"{SWEEP} grid.yaml {OPTIONS}", tmp_path / "copy")
    assert {str(t.params): t.value for t in trials(tmp_path / "copy")} == {
        str(t.params): t.value for t in trials(alone)
    }
    assert bests(tmp_path / "copy") == bests(alone)


def test_other_options_are_averaged_too(tmp_path):
    """The point is trained with all combinations of their values."""
    (tmp_path / "folds.yaml").write_text("dropout: [0.1, 0.2]\nseed: [1, 2]\n")
    run(f"{SWEEP} folds.yaml --average seed dropout {OPTIONS} --epochs 1 --width 4", tmp_path)
    (trial,) = trials(tmp_path, "folds")
    found = bests(tmp_path)
    assert {*found} == {f"folds-seed={seed}-dropout={dropout}" for dropout in (0.1, 0.2) for seed in (1, 2)}
    assert trial.value == pytest.approx(sum(found.values()) / 4)


def test_null_is_the_default_and_a_list_in_a_list_is_a_value(tmp_path):
    """As in a config file."""
    (tmp_path / "s.yaml").write_text("max_grad_norm: [null, 0.5]\nlogger_name: [[csv, tensorboard]]\nseed: null\n")
    run(f"{SWEEP} s.yaml {OPTIONS.replace('--logger_name csv', '')} --epochs 1 --width 4", tmp_path)
    assert [trial.params["max_grad_norm"] for trial in trials(tmp_path, "s")] == [0, 0.5]
    configs = [yaml.safe_load(path.read_text()) for path in sorted(tmp_path.glob("*/config.yaml"))]
    assert [config["max_grad_norm"] for config in configs] == [0, 0.5]
    assert [(config["seed"], config["logger_name"]) for config in configs] == [(42, ["csv", "tensorboard"])] * 2


def test_a_run_that_stays_below_the_median_is_stopped(tmp_path):
    """The last one learns nothing."""
    (tmp_path / "p.yaml").write_text("base_lr: [0.01, 0.011, 0.012, 0.013, 1.0e-9]\nepochs: 100\nwidth: 4\n")
    run(f"{SWEEP} p.yaml --prune {OPTIONS}", tmp_path)
    *others, last = trials(tmp_path, "p")
    assert [trial.state.name for trial in others] == ["COMPLETE"] * 4 and last.state.name == "PRUNED"
    (stopped,) = {path.parent for path in tmp_path.glob("*/config.yaml")} - {*finished(tmp_path)}
    assert "base_lr=1e-09" in stopped.name and [*stopped.glob("checkpoints/step-*")]


def test_points_of_ranges_are_drawn(tmp_path):
    (tmp_path / "s.yaml").write_text("base_lr: {low: 1e-3, high: 1e-2, log: true}\nwidth: {low: 4, high: 8, step: 2}\n")
    run(f"{SWEEP} s.yaml --trials 2 {OPTIONS} --epochs 1", tmp_path)
    for trial in trials(tmp_path, "s"):
        assert 1e-3 <= trial.params["base_lr"] <= 1e-2 and trial.params["width"] in (4, 6, 8)
    assert len(bests(tmp_path)) == 2


def test_config_files_are_run_one_by_one_and_a_failure_does_not_stop_the_others(tmp_path):
    (tmp_path / "a.yaml").write_text("epochs: 1\nwidth: 4\n")
    (tmp_path / "b.yaml").write_text("epochs: 1\neffective_batch_size: 5000\n")
    (tmp_path / "c.yaml").write_text("epochs: 1\nwidth: 5\n")
    done = run(f"{SWEEP} a.yaml b.yaml c.yaml {OPTIONS}", tmp_path, code=1)
    assert {*bests(tmp_path)} == {"sweep-config_path=a", "sweep-config_path=c"}
    assert "failed with code 2" in done.stdout
    assert "--effective_batch_size 5000" in (tmp_path / "sweep.sweep" / "logs" / "sweep-config_path=b.log").read_text()


def test_the_configs_of_the_example_are_run_over_what_they_share(tmp_path):
    configs = REPO / "examples" / "configs"
    (tmp_path / "shared.yaml").write_text((configs / "shared.yaml").read_text() + "monitor: val/loss\n")
    files = " ".join(map(str, sorted({*configs.glob("*.yaml")} - {configs / "shared.yaml"})))
    done = run(f"{SWEEP} {files} --shared shared.yaml --study e {OPTIONS} --epochs 1 --warmup_epochs 0", tmp_path)
    assert {*bests(tmp_path)} == {f"e-config_path={name}" for name in ("large_batch", "regularized", "wide")}
    assert "best val/loss" in done.stdout
    for path in tmp_path.glob("*/config.yaml"):
        options = yaml.safe_load(path.read_text())
        assert options["seed"] == 1 and path.parent.name.endswith(f"path={options['comment'].replace(' ', '_')}")


def test_a_mistake_in_the_options_of_all_runs_ends_the_search_at_its_first_trial(tmp_path):
    """One that a run alone can see. The command without it begins anew."""
    (tmp_path / "grid.yaml").write_text("width: [4, 5]\n")
    wrong = "--monitor val/f1 --monitor_mode max"
    done = run(f"{SWEEP} grid.yaml {OPTIONS} --epochs 1 {wrong}", tmp_path, code=2)
    assert done.stdout.count("failed with code 2") == 1
    assert re.fullmatch("sweep.py: error: all runs would end so: train.py: error: --monitor val/f1.*\n", done.stderr)
    run(f"{SWEEP} grid.yaml {OPTIONS} --epochs 1", tmp_path)
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 2


@pytest.mark.parametrize(
    "options, message",
    [
        ("grid.yaml -- --epohcs 3", "unknown option --epohcs; did you mean --epochs?"),
        ("grid.yaml -- --epochs many", "many"),
        ("grid.yaml -- --epochs -1", "--epochs -1.0: must be above 0"),
        ("grid.yaml -- --width 5", "--width: is searched, and given behind `--`"),
        ("grid.yaml -- --out_dir x", "--out_dir: cannot be given"),
        ("grid.yaml --shared wrong.yaml", "wrong.yaml: unknown option --epohcs"),
        ("right.yaml wrong.yaml", "wrong.yaml: unknown option --epohcs"),
        ("right.yaml ./right.yaml", "two config files have the same name"),
        ("grid.yaml --prune", "--prune: cannot stop any of 2 trials"),
        ("ranges.yaml --prune --trials 4", "--prune: cannot stop any of 4 trials"),
        ("ranges.yaml --prune -- --logger_name tensorboard", "--prune: cannot see the values without metrics.csv"),
        ("grid.yaml -- --monitor val/f1", "--monitor val/f1: its name does not tell if higher is better"),
        ("grid.yaml -- --warmup_epochs 30", "--warmup_epochs 30: must be at most --epochs 20"),
        ("nowhere.yaml", "nowhere.yaml: [Errno 2] No such file or directory"),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_leaves_nothing(options: str, message: str, tmp_path: Path):
    (tmp_path / "grid.yaml").write_text("width: [4, 5]\n")
    (tmp_path / "ranges.yaml").write_text("width: {low: 4, high: 5}\n")
    (tmp_path / "right.yaml").write_text("epochs: 3\n")
    (tmp_path / "wrong.yaml").write_text("epohcs: 3\n")
    before = sorted(os.listdir(tmp_path))
    done = run(f"{SWEEP} {options}", tmp_path, code=2)
    assert re.fullmatch(rf"sweep.py: error: .*{re.escape(message)}.*\n", done.stderr)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "content, message",
    [
        ("wdth: [1, 2]", "unknown option --wdth; did you mean --width?"),
        ("width: [4, many]", "many"),
        ("width: [4, 0]", "--width 0: must be above 0"),
        ("base_lr: {low: 0, high: 1}", "--base_lr 0.0: must be above 0"),
        ("dropout: {low: 0, high: 0.5, log: true}", "dropout: "),
        ("monitor: [val/loss, val/accuracy]", "must be the same in all runs"),
        ("monitor: val/f1\nmonitor_mode: [max, min]", "must be the same in all runs"),
        ("width: []", "width: the list is empty"),
        ("width: {low: 4}", "width: a range is {low: 1, high: 2}"),
        ("width: {low: 8, high: 4}", "width: "),
        ("width: {low: 4.5, high: 8}", "--width: invalid int value: '4.5'"),
        ("comment: {low: a, high: b}", "comment: "),
        ("max_grad_norm: None", "--max_grad_norm: invalid float value: 'None'"),
        ("width: [4, 5]\nmax_grad_norm: None", "--max_grad_norm: invalid float value: 'None'"),
        ("epochs: [1, 30]\nwarmup_epochs: 2", "--warmup_epochs 2: must be at most --epochs 1"),
        ("epochs: {low: 0.5, high: 2.0}", "--warmup_epochs 1: must be at most --epochs 0.5"),
        ("monitor: val/loss\nmonitor_mode: max\nwidth: [4, 5]", "--monitor_mode max: the best val/loss is its min"),
        ("seed: {low: 1, high: 4}", "seed: give a list"),
        ("width 4", "expected lines of `option: value`"),
        ("width: [4, 5]\nmonitor: val/quality", "give --monitor_mode"),
        ("comment: [a b, a_b]", "two points have the same run, s-comment=a_b"),
        ("width: [8, 8]", "two points have the same run, s-width=8"),
    ],
)
def test_a_mistake_is_one_line(content: str, message: str, tmp_path: Path):
    (tmp_path / "s.yaml").write_text(content)
    error = run(f"{SWEEP} s.yaml", tmp_path, code=2).stderr
    assert re.fullmatch(rf"sweep.py: error: .*{re.escape(message)}.*\n", error)
    assert os.listdir(tmp_path) == ["s.yaml"]
