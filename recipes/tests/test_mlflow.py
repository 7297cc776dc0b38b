"""recipes/features/mlflow.patch: what MLflow's own client reads from the store, where mlflow is installed."""

import os
import re
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
from edits import copy_programs, replace, with_text
from helpers import (
    MEASURED,
    ON_2,
    PREEMPTED,
    REPO,
    SMALL,
    call,
    history,
    interrupt,
    last_summary,
    newest,
    run,
    run_dir,
    start,
    terminate,
    wait_for,
    with_recipe,
)

from config import TrainConfig
from runtime.options import values_of

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.recipes
LONG = (
    "train.py --accelerator cpu --epochs 20 --limit_train_batches 8 --limit_val_batches 2 --width 4 "
    "--num_sanity_val_steps 1 --log_interval 1 --checkpoint_interval 40 --logger_name csv mlflow"
)


@pytest.fixture(autouse=True, scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("mlflow", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def store(program: Path, tmp_path_factory) -> Path:
    """A store without runs, which takes MLflow seconds to make."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture
def cwd(store: Path, tmp_path: Path) -> Path:
    shutil.copy(store, tmp_path)
    return tmp_path


class Stored:
    """The one run in the store of a folder."""

    def __init__(self, cwd: Path, project: str = "fabric-template"):
        client = mlflow.MlflowClient(f"sqlite:///{cwd}/mlflow.db")
        (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
        self.id, self.name, self.status = run.info.run_id, run.info.run_name, run.info.status
        self.options, self.tags = run.data.params, run.data.tags
        self.curves = {
            name: [(value.step, value.value) for value in client.get_metric_history(self.id, name)]
            for name in run.data.metrics
        }


def expected_curves(cwd: Path) -> dict:
    """The columns of metrics.csv, without what is measured."""
    rows = history(cwd)
    names = {name for row in rows for name in row} - {"step"}
    return {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in names}


def assert_same_curves(cwd: Path) -> None:
    """Equal in every bit, in the order of the steps, each once; of what is measured, the steps."""
    curves, expected = Stored(cwd).curves, expected_curves(cwd)
    assert curves.keys() == {*expected, *MEASURED}
    assert {name: curves[name] for name in expected} == expected
    for name in MEASURED:
        assert [step for step, _ in curves[name]] == [step for step, _ in expected["epoch"]]


def kill_between(command: str, cwd: Path) -> int:
    """Kills the run, on all its processes, when it has logged more than it has saved; returns the last step logged."""
    process = start(command, cwd)

    def logged() -> int:
        return int(history(cwd)[-1]["step"])

    def is_frozen_between() -> bool:
        os.killpg(process.pid, signal.SIGSTOP)
        if newest(cwd) and logged() > newest(cwd) + 2:
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return process.poll() is not None

    wait_for(is_frozen_between)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and newest(cwd) < logged() < 160
    return logged()


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_a_killed_and_resumed_run_has_each_row_once(devices: str, program: Path, cwd: Path):
    """The rows between the checkpoint and the kill are of the killed process; those of csv are of the resumed one."""
    last = kill_between(f"{program}/{LONG} {devices}", cwd)
    killed = Stored(cwd)
    assert killed.status == "RUNNING" and killed.curves["train/loss"][-1][0] in (last, last - 1)
    run(f"{program}/train.py --resume auto", cwd)
    assert_same_curves(cwd)
    resumed = Stored(cwd)
    assert (resumed.id, resumed.name, resumed.status) == (killed.id, run_dir(cwd).name, "FINISHED")
    assert [step for step, _ in resumed.curves["train/loss"]] == [*range(1, 161)]
    count = len(killed.curves["train/loss"])
    for name in ("train/loss", *MEASURED):
        assert resumed.curves[name][:count] == killed.curves[name]


def test_the_options_are_parameters_and_a_changed_one_is_a_tag(program: Path, cwd: Path):
    call(f"{program}/train.py {SMALL} --logger_name csv mlflow --comment a-note --project mine", cwd)
    first = Stored(cwd, "mine")
    assert first.options.items() >= {"width": "4", "base_lr": "0.004", "max_steps": "0"}.items()
    assert first.options.keys() == values_of(TrainConfig()).keys()
    assert first.tags["mlflow.note.content"] == "a-note"
    call(f"{program}/train.py --resume auto --epochs 6", cwd)
    second = Stored(cwd, "mine")
    assert (second.id, second.status, second.options) == (first.id, "FINISHED", first.options)
    assert second.tags["resumed_with.epochs"] == "6.0" and "resumed_with.width" not in second.tags
    assert [step for step, _ in second.curves["val/loss"]] == [4, 8, 12, 16, 20, 24]
    call(f"{program}/train.py --resume auto --base_lr 0.002 --epochs 7", cwd)
    call(f"{program}/train.py --resume auto --base_lr 0.004 --epochs 8", cwd)
    assert Stored(cwd, "mine").tags["resumed_with.base_lr"] == "0.004"  # not what it was in between


def test_a_run_that_its_store_does_not_have_is_told(program: Path, cwd: Path):
    run(f"{program}/train.py {SMALL} --logger_name csv mlflow", cwd)
    (cwd / "mlflow.db").unlink()
    error = run(f"{program}/train.py --resume auto --epochs 6", cwd, code=1).stderr
    assert re.search(r"^train.py: error: \S+/logs/mlflow_id: .* not found; delete this file, and ", error, re.MULTILINE)
    (run_dir(cwd) / "logs" / "mlflow_id").unlink()
    run(f"{program}/train.py --resume auto --epochs 6", cwd)
    assert Stored(cwd).status == "FINISHED"


def test_the_state_is_that_of_the_run(program: Path, cwd: Path):
    """Stopped by a signal, then resumed and failed, then resumed and finished."""
    command = f"{program}/{LONG} --checkpoint_interval 2"
    assert interrupt(command, cwd, terminate).returncode == PREEMPTED
    assert (last_summary(cwd)["state"], Stored(cwd).status) == ("interrupted", "KILLED")
    run(f"{program}/train.py --resume auto --base_lr 1e30", cwd, code=1)
    assert (last_summary(cwd)["state"], Stored(cwd).status) == ("failed", "FAILED")
    run(f"{program}/train.py --resume auto --base_lr 4e-3", cwd)
    assert (last_summary(cwd)["state"], Stored(cwd).status) == ("finished", "FINISHED")


def test_a_rehearsal_is_left_out(program: Path, cwd: Path, monkeypatch):
    """A server would keep its runs, of directories that are gone."""
    store = f"sqlite:///{cwd}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    done = call(f"{program}/train.py {SMALL} --logger_name csv mlflow --fast_run", cwd)
    assert "finished after 4 of 4 steps" in done.stdout
    client = mlflow.MlflowClient(store)
    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert client.search_runs(["0"]) == []
    assert [path.name for path in cwd.iterdir()] == ["mlflow.db"]


def test_two_runs_at_once_make_one_store(program: Path, tmp_path: Path):
    """MLflow alone would leave one that it refuses. A name may have quotes."""
    names = ["it's", 'a"b']
    runs = [start(f"{program}/train.py {SMALL} --logger_name csv mlflow --out_dir {name}", tmp_path) for name in names]
    for process in runs:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    run(f"{program}/train.py --resume auto --out_dir it's --epochs 6", tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (project,) = client.search_experiments(filter_string="name = 'fabric-template'")
    found = {run.info.run_name: run for run in client.search_runs([project.experiment_id])}
    assert found.keys() == {run_dir(tmp_path, name).name for name in names}
    assert [run.info.status for run in found.values()] == ["FINISHED", "FINISHED"]
    assert {path.name for path in tmp_path.iterdir()} == {*found, "mlflow.db"}
    assert {path.name for path in run_dir(tmp_path, "it's").iterdir() if path.is_dir()} == {
        "checkpoints", "logs", "provenance"
    }  # fmt: skip


def test_directories_of_the_same_name_are_different_runs(program: Path, cwd: Path, monkeypatch):
    """In two --root_dir, on one store; also where one was moved."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{cwd}/mlflow.db")
    for root in ("a", "b"):
        (cwd / root).mkdir()
        call(f"{program}/train.py {SMALL} --logger_name csv mlflow --max_steps 8", cwd / root)
    name = run_dir(cwd / "a").name
    run_dir(cwd / "b").rename(cwd / "b" / name)
    (cwd / "c").mkdir()
    (cwd / "b" / name).rename(cwd / "c" / name)
    for root in ("a", "c"):
        call(f"{program}/train.py --resume {cwd / root / name} --max_steps 12", cwd)
    client = mlflow.MlflowClient()
    (project,) = client.search_experiments(filter_string="name = 'fabric-template'")
    found = client.search_runs([project.experiment_id])
    assert len(found) == 2
    for one in found:
        assert [value.step for value in client.get_metric_history(one.info.run_id, "val/loss")] == [4, 8, 12]


def test_a_kill_while_the_store_is_made_leaves_none(program: Path, tmp_path: Path):
    process = start(f"{program}/train.py {SMALL} --logger_name csv mlflow", tmp_path)
    wait_for(lambda: process.poll() is not None or [*tmp_path.glob("*/*/new.db")])
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "mlflow.db").exists()
    run(f"{program}/train.py --resume auto", tmp_path)
    assert Stored(tmp_path).status == "FINISHED"


def test_other_characters_in_a_name_are_replaced(program: Path, cwd: Path, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(program, other, dirs_exist_ok=True)
    replace(other, "metrics", '{"accuracy": accuracy, "acc@1 (%)": accuracy.clone()}')
    call(f"{other}/train.py {SMALL} --logger_name csv mlflow", cwd)
    curves = Stored(cwd).curves
    assert curves["val/acc-1 ---"] == curves["val/accuracy"]


def test_the_logger_of_lightning_works_in_two_lines(cwd: Path, tmp_path_factory):
    """That of recipes/README.md, after `run.start`, without the recipe."""
    page = (REPO / "docs" / "evaluation.md").read_text()
    (lines,) = re.findall(r"^```python\n([^`]*MLFlowLogger[^`]*)^```$", page, re.MULTILINE)
    program = copy_programs(tmp_path_factory.mktemp("lightning"))
    started = "            run.start(values, sanity_results)\n"
    lines = textwrap.indent(textwrap.dedent(lines), " " * 12)
    with_text(program, "train.py", (started, started + lines))
    call(f"{program}/train.py {SMALL} --logger_name csv", cwd)
    assert_same_curves(cwd)
    assert (Stored(cwd).name, Stored(cwd).status) == (run_dir(cwd).name, "FINISHED")
    call(f"{program}/train.py --resume auto --epochs 6", cwd)
    client = mlflow.MlflowClient(f"sqlite:///{cwd}/mlflow.db")
    (project,) = client.search_experiments(filter_string="name = 'fabric-template'")
    found = client.search_runs([project.experiment_id])
    assert [run.info.status for run in found] == ["FINISHED", "FINISHED"]  # a run of its own for each start
    assert [client.get_metric_history(run.info.run_id, "val/loss")[0].step for run in found] == [24, 4]
