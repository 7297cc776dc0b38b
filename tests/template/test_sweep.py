"""recipes/sweep.py: searches that are interrupted, killed and started twice end as one that was left alone."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from conftest import PREEMPTED, REPO, kill_group, run, start, wait_for

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.recipes
SWEEP = "recipes/sweep.py"
OPTIONS = (
    "-- --accelerator cpu --limit_train_batches 4 --limit_val_batches 1 --num_sanity_val_steps 0 --logger_name csv"
)
GRID = "width: [4, 5]\nseed: [1, 2]\nepochs: 2\n"


def trials(cwd: Path, name: str = "grid") -> list:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{cwd}/{name}.journal"))
    found = optuna.load_study(study_name=name, storage=storage).get_trials()
    return [trial for trial in found if "is_left" not in trial.user_attrs]


def bests(cwd: Path) -> dict[str, float]:
    """The best value of each finished run, by its name without the time."""
    paths = [path.parent for path in cwd.glob("*/model.pt")]
    found = {path.name[16:]: json.loads((path / "summary.json").read_text())["best"] for path in paths}
    assert len(found) == len(paths) == len([*cwd.glob("*/config.yaml")]), "a run was begun twice, or is unfinished"
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("alone")
    (cwd / "grid.yaml").write_text(GRID)
    done = run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", cwd)
    assert re.search(r"^best val/accuracy [\d.]+: \{'width': \d\}$", done.stdout, re.MULTILINE)
    return cwd


def test_a_grid_trains_each_point_with_each_seed_and_takes_the_mean(alone):
    found = bests(alone)
    assert {*found} == {f"grid-width={width}-seed={seed}" for width in (4, 5) for seed in (1, 2)}
    for trial in trials(alone):
        values = [found[f"grid-width={trial.params['width']}-seed={seed}"] for seed in (1, 2)]
        assert trial.value == pytest.approx(sum(values) / 2)


def test_a_sweep_that_is_done_trains_nothing(alone):
    before = {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")}
    run(f"{SWEEP} grid.yaml --jobs 2 {OPTIONS}", alone)
    assert {path: path.stat().st_mtime_ns for path in alone.glob("2*/**/*")} == before


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


def test_a_run_that_stays_below_the_median_is_stopped(tmp_path):
    """The last one learns nothing."""
    (tmp_path / "p.yaml").write_text("base_lr: [0.01, 0.011, 0.012, 0.013, 1.0e-9]\nepochs: 100\nwidth: 4\n")
    run(f"{SWEEP} p.yaml --prune {OPTIONS}", tmp_path)
    *others, last = trials(tmp_path, "p")
    assert [trial.state.name for trial in others] == ["COMPLETE"] * 4 and last.state.name == "PRUNED"
    (stopped,) = {path.parent for path in tmp_path.glob("*/config.yaml")} - {
        path.parent for path in tmp_path.glob("*/model.pt")
    }
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
    assert "--effective_batch_size 5000" in (tmp_path / "sweep-config_path=b.log").read_text()


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


@pytest.mark.parametrize(
    "content, message",
    [
        ("wdth: [1, 2]", "unknown option 'wdth'"),
        ("width: []", "width: the list is empty"),
        ("width: {low: 4}", "width: a range is {low: 1, high: 2}"),
        ("seed: {low: 1, high: 4}", "seed: give a list"),
        ("width 4", "expected lines of `option: value`"),
        ("width: [4, 5]\nmonitor: val/quality", "give --monitor_mode"),
    ],
)
def test_a_mistake_is_one_line(content: str, message: str, tmp_path: Path):
    (tmp_path / "s.yaml").write_text(content)
    error = run(f"{SWEEP} s.yaml", tmp_path, code=2).stderr
    assert re.fullmatch(rf"sweep.py: error: .*{re.escape(message)}.*\n", error)
    assert os.listdir(tmp_path) == ["s.yaml"]
