"""What else becomes of a run's files: background_save, whose thread writes them; mirror, a second disk or, where s3fs
and moto are installed, a server of S3's protocol that the tests start, kill and start again; mlflow, read by its own
client, where it is installed."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import (
    LONG,
    NO_SHARED_STORE,
    ON_2,
    PREEMPTED,
    SMALL,
    STEPS,
    TORCHRUN,
    TWO_SAVES,
    call,
    folders,
    run,
    run_in,
    start,
)
from comparisons import assert_same_best, assert_same_run
from copies import blocks, imported, with_recipe
from edits import insert_after, insert_before, replace
from fsspec.core import url_to_fs
from killer import kill_before, remove_what_is_no_run
from mistakes import assert_one_line, refuses
from outputs import MEASURED, history, last_summary, newest, rows, run_dir, snapshot, state_of, without_locks
from processes import assert_stopped_and_saved, free_port, interrupt, kill_group, terminate, wait_for

from config import TrainConfig
from runtime.options import values_of

pytestmark = pytest.mark.recipes
needs_s3 = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="needs s3fs and moto[server]")


def waiting(condition: str) -> str:
    """Code that waits as long as the condition holds, but not for ever where the test has failed."""
    start = "import pathlib, time\ngives_up = time.monotonic() + 300\n"
    return f"{start}while {condition} and time.monotonic() < gives_up:\n    time.sleep(0.02)\n"


# ---- background_save

# Logged in each step, and never validated before the end. All checkpoints stay.
RARELY = f"{LONG} --log_interval 1 --val_interval 10000 --num_checkpoint_keep 0"


@pytest.fixture(scope="module")
def held_thread(tmp_path_factory) -> Path:
    """The thread writes the checkpoint of step 20 only when the loop has done further steps, and a while later: the
    loop would then go on to step 25, if it did not wait for the thread. Both note what they have done."""
    program = with_recipe("background_save", tmp_path_factory.mktemp("held_thread"))
    waits = waiting('contents["step"] == 20 and "step 23" not in pathlib.Path("done").read_text()')
    notes = 'with open("done", "a") as file:\n    file.write(f"{} {{{}}}\\n")\n'
    insert_before(program, "checkpoint is written", waits + "time.sleep(0.2 * (contents['step'] == 20))")
    insert_after(program, "checkpoint is written", notes.format("written", "contents['step']"))
    return insert_after(program, "step is done", notes.format("step", "step"))


def test_background_save_copies_views_and_sparse_tensors_and_tied_ones_once(background_save: Path):
    square, imaginary = torch.arange(9.0).view(3, 3), torch.ones(2) * 1j
    parts = [square, square.t(), square.detach(), imaginary, imaginary.conj(), torch.eye(3).to_sparse()]
    copied_to_cpu = imported(background_save, "runtime/checkpoints").copied_to_cpu
    found = copied_to_cpu({"state": dict(enumerate(parts))})["state"]
    assert all(torch.equal(found[number].to_dense(), part.to_dense()) for number, part in enumerate(parts))
    assert found[0].data_ptr() == found[2].data_ptr() != square.data_ptr()


def test_background_save_loop_goes_on_while_a_file_is_written_and_a_kill_then_costs_nothing(held_thread, cwd, tmp_path):
    """The rows of later steps are there already. The file has what the state was at its step, though the loop has
    changed it since. The next save waits."""
    whole, done = run_in(tmp_path / "whole", RARELY), cwd / "done"
    process = start(f"{held_thread}/{RARELY}", cwd)
    wait_for(lambda: process.poll() is not None or (done.exists() and "step 22" in done.read_text()))
    kill_group(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and newest(cwd) == 16
    done.unlink()
    run(f"{held_thread}/train.py --resume auto", cwd)
    lines = done.read_text().splitlines()
    assert lines.index("step 23") < lines.index("written 20") < lines.index("step 25")
    assert_same_run(cwd, whole)
    for path in run_dir(whole).glob("checkpoints/*.ckpt"):
        assert state_of(run_dir(cwd) / "checkpoints" / path.name) == state_of(path)


CHANGES = [
    *("os.rename step-00000002.ckpt.tmp 1", "os.link step-00000002.ckpt 1", "os.rename best.tmp 1"),
    *("os.rename step-00000004.ckpt.tmp 1", "os.remove step-00000002.ckpt 1", "os.rename model.pt 1"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_background_save_kill_before_a_change_of_a_file_costs_nothing(
    change: str, background_save: Path, two_saves: Path, cwd: Path, tmp_path: Path
):
    kill_before(change, f"{background_save}/{TWO_SAVES}", cwd, tmp_path)
    call(f"{background_save}/{TWO_SAVES} --resume auto", cwd)
    remove_what_is_no_run(cwd)
    assert_same_run(cwd, two_saves)
    assert_same_best(cwd, two_saves)
    assert not [*run_dir(cwd).rglob("*.tmp")]


# The checkpoint of step 20 is the only file of more than 100 kB.
WITHOUT_VAL = "--limit_val_batches 0 --monitor train/loss --monitor_mode min"
TOO_LARGE = f"{RARELY} --width 64 --checkpoint_interval 20 {WITHOUT_VAL}"


@pytest.mark.parametrize("is_last", [False, True])
def test_background_save_error_of_the_thread_ends_the_run(is_last: bool, background_save, held_thread, cwd: Path):
    """At the next step, not at the next save, as of a full disk. One with the last checkpoint is no success."""
    command = f"{background_save}/{TOO_LARGE} --max_steps 20" if is_last else f"{held_thread}/{TOO_LARGE}"
    process = start(command, cwd)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    out, error = process.communicate(timeout=300)
    assert "finished after" not in out
    assert_one_line(subprocess.CompletedProcess(command, process.returncode, out, error), "File too large")
    assert process.returncode == 1 and not any(cwd.glob("*/checkpoints/*")) and not any(cwd.glob("*/model.pt"))
    assert is_last or 23 <= int(history(cwd)[-1]["step"]) < 40


# ---- mirror: a machine is thrown away


class Disk:
    """A second disk, where a run is mirrored to. Where it was stopped, a file lies in its place."""

    options: dict[str, str] = {}  # of the file system

    def __init__(self, folder: Path):
        self.path = folder / "disk" / "runs"
        self.path.parent.mkdir()
        self.address = f"file://{self.path}"

    def start(self) -> None:
        self.path.unlink()

    def stop(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path)
        self.path.touch()

    def files(self) -> tuple:
        """A file system, and the path there."""
        return url_to_fs(self.address, use_listings_cache=False, **self.options)

    def newest(self) -> int:
        """The step of the newest checkpoint that is there, 0 if there is none."""
        fs, path = self.files()
        return max((int(name[-13:-5]) for name in fs.glob(f"{path}/*/checkpoints/step-*.ckpt")), default=0)


class Server(Disk):
    """A server of S3's protocol. What it has is gone when it is stopped."""

    address = "s3://bucket/runs"

    def __init__(self, folder: Path):
        self.port = free_port()
        url = f"http://127.0.0.1:{self.port}"
        self.options = {"key": "key", "secret": "secret", "endpoint_url": url}
        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "FSSPEC_S3_ENDPOINT_URL": url}
        self.start()

    def start(self, bucket: bool = True, **env: str) -> None:
        command = [sys.executable, "-c", "from moto.server import main; main()", "-p", str(self.port)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=os.environ | env, stdout=null, stderr=null)
        wait_for(self.answers)
        if bucket:
            self.files()[0].mkdir("bucket")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


# Tests of the mirror are of a disk; these are of both.
ON_DISK_AND_SERVER = pytest.mark.parametrize(
    "place", [Disk, pytest.param(Server, id="server", marks=needs_s3)], indirect=True
)


@pytest.fixture
def place(request, environment: None, tmp_path: Path):
    found = getattr(request, "param", Disk)(tmp_path)
    yield found
    found.stop()


def at(place: Disk) -> str:
    """The options that mirror a run."""
    return f"--resume auto --mirror {place.address}"


def held_at_28(machine: Path, place: Disk) -> subprocess.Popen:
    """A run of LONG that stays at two steps until the test lets it go on, with the checkpoint of step 28 there."""
    stays = waiting('step in (32, 64) and not pathlib.Path(f"go on {step}").exists()')
    program = insert_after(with_recipe("mirror", machine.parent / "held"), "step is done", stays)
    process = start(f"{program}/{LONG} {at(place)}", machine)
    wait_for(lambda: process.poll() is not None or place.newest() == 28)
    return process


def assert_mirrored(machine: Path, place: Disk) -> None:
    """All files are there, but the lock, and no others."""
    ours = {str(path.relative_to(machine)): content for path, (content, _) in snapshot(machine).items()}
    fs, root = place.files()
    theirs = {name.removeprefix(f"{root}/"): fs.cat_file(name) for name in fs.find(root)}
    assert theirs.pop(".mirror", b"") == b""  # gone with a mirror that was away
    assert ours.pop(f"{run_dir(machine).name}/.lock") == b""
    assert ours == theirs


@ON_DISK_AND_SERVER
def test_mirror_run_goes_on_elsewhere_with_the_same_bits(place: Disk, whole: Path, mirror: Path, tmp_path: Path):
    """A kill while it is fetched leaves no part of it."""
    first, second = folders(tmp_path, "first", "second")
    process = held_at_28(first, place)
    kill_group(process)
    process.communicate()
    shutil.rmtree(first)
    command = f"{mirror}/{LONG} {at(place)}"
    kill_before("open step-00000028.ckpt 1", command, second, tmp_path, where=".tmp/checkpoints/")
    assert not [*second.glob("2*")]
    printed = run(command, second).stdout
    assert f"{run_dir(second).name} comes from {place.address}\n" in printed
    assert f"resumed from {run_dir(second).name}/checkpoints/" in printed
    assert os.listdir(second) == [run_dir(second).name]
    assert_same_run(second, whole)
    assert_same_best(second, whole)
    assert_mirrored(second, place)


# A change of a file there, and the step that is got back after a kill before it.
UPLOADS = {
    "open config.yaml.tmp 1": None,
    "os.rename best.ckpt.tmp 1": 0,
    "os.rename summary.json.tmp 1": 2,
    "os.rename metrics.csv.tmp 2": 2,
    "os.rename step-00000004.ckpt.tmp 1": 2,
    "os.remove step-00000002.ckpt 1": 4,
}


@pytest.mark.parametrize("change, step", UPLOADS.items())
def test_mirror_kill_in_an_upload_costs_no_checkpoint_that_is_there(
    change: str, step: int | None, mirror: Path, two_saves: Path, place: Disk, tmp_path: Path
):
    """What has its name there is whole, the newest is taken, and has its rows. Of two checkpoints the first goes; the
    second comes when the mirror has the first."""
    first, second = folders(tmp_path, "first", "second")
    one_is_there = 'list(pathlib.Path("../disk").glob("runs/*/summary.json"))'
    paced = with_recipe("mirror", tmp_path / "paced")
    insert_after(paced, "step is done", waiting(f"step == 3 and not {one_is_there}"))
    kill_before(change, f"{paced}/{TWO_SAVES} {at(place)}", first, tmp_path, where="/disk/")
    there = [torch.load(path, weights_only=True)["step"] for path in place.path.glob("*/checkpoints/*.ckpt")]
    assert max(there, default=0) == (step or 0)
    printed = call(f"{mirror}/{TWO_SAVES} {at(place)}", second).stdout
    assert ("comes from" in printed) == (step is not None)
    assert ("resumed from" in printed) == (step == 2)  # with 4 there is no step left
    assert_same_run(second, two_saves)
    assert_same_best(second, two_saves)
    assert not [*run_dir(second).rglob("*.tmp")]


def test_mirror_kill_of_a_run_that_was_made_longer_leaves_no_finished_one(mirror, two_saves, place: Disk, tmp_path):
    """Its first new checkpoint is there, and its summary is not."""
    first, second = folders(tmp_path, "first", "second")
    held = insert_after(with_recipe("mirror", tmp_path / "held"), "step is done", waiting("step == 4"))
    call(f"{mirror}/{TWO_SAVES} --max_steps 2 {at(place)}", first)
    command = f"{held}/{TWO_SAVES} --checkpoint_interval 1 {at(place)}"
    kill_before("os.rename summary.json.tmp 1", command, first, tmp_path, where="/disk/")
    call(f"{mirror}/{TWO_SAVES} {at(place)}", second)
    assert_same_run(second, two_saves)


@pytest.mark.night
def test_mirror_processes_of_torchrun_get_a_run_back_once(mirror: Path, place: Disk, tmp_path: Path):
    first, second = folders(tmp_path, "first", "second")
    run(f"{mirror}/{LONG} {ON_2} --epochs 2 {at(place)}", first)
    command = f"{TORCHRUN} {mirror}/{LONG} {ON_2} --epochs 3 {at(place)}"
    env = os.environ | NO_SHARED_STORE
    done = subprocess.run(command.split(), cwd=second, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("comes from") == 1 and "finished after 24 of 24 steps" in done.stdout
    assert len(os.listdir(second)) == 1


def test_mirror_and_disk_have_a_run_and_the_newer_one_is_taken(mirror, two_saves, place: Disk, tmp_path: Path):
    """As of a machine that comes back after another one has gone on: what it had is kept under another name. A run of
    more steps, or of a later date, stays as it is. A rehearsal is not mirrored."""
    first, second = folders(tmp_path, "first", "second")
    command = f"{mirror}/{TWO_SAVES} {at(place)}"
    call(f"{mirror}/{TWO_SAVES} --mirror {place.address} --fast_run", first)
    assert (os.listdir(first), os.listdir(place.path)) == ([], [".mirror"])
    call(f"{command} --max_steps 2", first)
    call(command, second)
    assert_same_run(second, two_saves)
    name = run_dir(second).name
    assert f"{name}.2-steps: " in call(command, first).stdout
    assert {*os.listdir(first)} == {name, f"{name}.2-steps"}
    assert_same_run(first, two_saves)
    older = shutil.copytree(place.path, tmp_path / "older")
    call(f"{command} --max_steps 8", first)
    before = without_locks(first)
    again = f"{mirror}/{TWO_SAVES} --resume auto --mirror file://{older} --max_steps 8"
    assert "finished after 8 of 8 steps" in call(again, first).stdout and before == without_locks(first)
    run_dir(first).rename(first / f"2999{name[4:]}")
    assert "comes from" not in call(again, first).stdout


def test_mirror_loop_does_not_wait_for_an_upload(place: Disk, program: Path, cwd: Path):
    """The mirror is kept from its first file until the loop is at its end."""
    with_recipe("mirror", program)
    insert_after(program, "step is done", f'if step == {STEPS - 1}:\n    __import__("pathlib").Path("end").touch()')
    waits = waiting('not list(self.run_dir.parent.glob("end"))')
    insert_before(program, ("mirror.py", "upload", "new = stamp(file)"), waits)
    run(f"{program}/{LONG} {at(place)}", cwd)
    (cwd / "end").unlink()
    assert_mirrored(cwd, place)


@pytest.mark.parametrize("recipe", ["background_save", "mirror"])
def test_a_signal_ends_the_run_when_its_last_checkpoint_is_there(recipe: str, request, place: Disk, cwd: Path):
    """With mirror, there, too."""
    options = at(place) if recipe == "mirror" else ""
    done = interrupt(f"{request.getfixturevalue(recipe)}/{LONG} {ON_2} {options}", cwd, terminate)
    assert_stopped_and_saved(done, cwd)
    if recipe == "mirror":
        assert_mirrored(cwd, place)
        assert last_summary(place.path)["state"] == "interrupted"


@ON_DISK_AND_SERVER
def test_mirror_that_goes_away_and_comes_back_has_all_of_the_run(place: Disk, cwd: Path, whole: Path):
    """It is told once, however often it is tried. What the mirror had is gone."""
    process = held_at_28(cwd, place)
    place.stop()
    (cwd / "go on 32").touch()
    for line in process.stdout:
        if "the run goes on, and is mirrored later" in line:
            break
    place.start()
    wait_for(lambda: process.poll() is not None or place.newest() == 60)
    (cwd / "go on 64").touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert f"--mirror {place.address} has the run again\n" in out and "fails" not in out and "alone" not in out
    for path in cwd.glob("go on *"):
        path.unlink()
    assert_same_run(cwd, whole)
    assert_mirrored(cwd, place)


def test_mirror_that_does_not_answer_costs_a_run_nothing(place: Disk, mirror: Path, two_saves: Path, cwd: Path):
    place.stop()
    done = run(f"{mirror}/{TWO_SAVES} --mirror {place.address}", cwd)
    assert done.stdout.endswith(f"{run_dir(cwd).name} alone\n") and f"--mirror {place.address}" in done.stdout
    assert_same_run(cwd, two_saves)


@needs_s3
@pytest.mark.parametrize("place", [Server], indirect=True)
def test_mirror_server_that_refuses_or_does_not_answer_at_the_start(place: Server, mirror: Path, tmp_path: Path):
    """A bucket that is missing, and wrong credentials, are told before the first step. One that is away costs a run
    nothing; but a new run would hide the one that is there."""
    first, second = folders(tmp_path, "first", "second")
    command, no_access = f"{mirror}/{TWO_SAVES} --mirror {place.address}", {"INITIAL_NO_AUTH_ACTION_COUNT": "0"}
    for env, options, error in [
        ({}, "", "FileNotFoundError"),
        (no_access, "", "PermissionError"),
        (no_access, "--resume auto", "PermissionError"),
    ]:
        place.stop()
        place.start(bucket=False, **env)
        refuses(f"{command} {options}", second, f"--mirror {place.address}: {error}: ", how=run)
    place.stop()
    refuses(f"{command} --resume auto", second, f"--mirror {place.address} does not answer", how=run)
    assert run(command, first).stdout.endswith(f"{run_dir(first).name} alone\n")
    assert "the newest run of this disk is taken" in run(f"{command} --resume auto", first).stdout


# ---- mlflow. Each test has a project of its own in a store, which takes MLflow seconds to make.

TO_MLFLOW = f"train.py {SMALL} --epochs 40 --log_interval 1 --logger_name csv mlflow"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    mlflow = pytest.importorskip("mlflow")
    address = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", address)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield mlflow.MlflowClient(address)


def stored_in(client, project: str) -> list:
    """The runs of a project, the last one first."""
    return client.search_runs([client.get_experiment_by_name(project).experiment_id])


def curves_of(client, stored) -> dict[str, list[tuple]]:
    """Steps and values, by the name of the metric."""
    found = {name: client.get_metric_history(stored.info.run_id, name) for name in stored.data.metrics}
    return {name: [(each.step, each.value) for each in values] for name, values in found.items()}


def assert_as_in_csv(curves: dict, cwd: Path) -> None:
    """In every bit, in the order of the steps, each once; of what is measured, the steps."""
    found = rows(cwd)
    assert curves.keys() == {name for row in found for name in row} - {"step"}
    for name, curve in curves.items():
        expected = [(row["step"], row[name]) for row in found if name in row]
        assert [step for step, _ in curve] == [step for step, _ in expected]
        assert curve == expected or name in MEASURED


def test_mlflow_killed_and_resumed_run_has_each_row_once(mlflow, client, program: Path, cwd: Path):
    """The rows between the checkpoint and the kill are of the killed process; those of csv are of the resumed one."""
    insert_after(with_recipe("mlflow", program), "step is done", "if step == 45:\n    __import__('os').killpg(0, 9)")
    run(f"{program}/{TO_MLFLOW} --checkpoint_interval 40 --project killed", cwd, code=-signal.SIGKILL)
    (killed,) = stored_in(client, "killed")
    before = curves_of(client, killed)
    assert killed.info.status == "RUNNING" and before["train/loss"][-1][0] == 44 > newest(cwd) == 40
    run(f"{mlflow}/train.py --resume auto", cwd)
    (stored,) = stored_in(client, "killed")
    found, curves = stored.info, curves_of(client, stored)
    assert (found.run_id, found.run_name, found.status) == (killed.info.run_id, run_dir(cwd).name, "FINISHED")
    assert_as_in_csv(curves, cwd)
    for name in ("train/loss", *MEASURED):
        assert curves[name][: len(before[name])] == before[name]


def test_mlflow_has_the_options_as_parameters_a_changed_one_as_a_tag_and_the_state_of_the_run(client, cwd, program):
    """Of one that was stopped by a signal, then resumed and failed, then resumed and finished. Characters that MLflow
    refuses in the name of a metric are replaced. A rehearsal leaves nothing in the store, and one that does not know
    the run is told."""
    replace(with_recipe("mlflow", program), "metrics", '{"accuracy": accuracy, "acc@1 (%)": accuracy.clone()}')
    command = f"{program}/{TO_MLFLOW} --checkpoint_interval 2 --comment a-note --project state"
    call(f"{command} --fast_run", cwd)
    assert client.get_experiment_by_name("state") is None
    assert interrupt(command, cwd, terminate).returncode == PREEMPTED
    (first,) = stored_in(client, "state")
    assert first.info.status == "KILLED" and first.data.tags["mlflow.note.content"] == "a-note"
    options = first.data.params
    assert options.keys() == values_of(TrainConfig()).keys()
    assert options.items() >= {"width": "4", "base_lr": "0.004", "max_steps": "0"}.items()
    again = f"{program}/train.py --resume auto"
    call(f"{again} --base_lr 1e30", cwd, code=1)
    assert stored_in(client, "state")[0].info.status == "FAILED"
    call(f"{again} --base_lr 4e-3", cwd)
    (last,) = stored_in(client, "state")
    assert (last.info.run_id, last.info.status, last.data.params) == (first.info.run_id, "FINISHED", options)
    assert last.data.tags["resumed_with.base_lr"] == "0.004" and "resumed_with.width" not in last.data.tags
    curves = curves_of(client, last)
    assert curves["val/acc-1 ---"] == curves["val/accuracy"]
    of_the_run = run_dir(cwd) / "logs" / "mlflow_id"
    of_the_run.write_text(32 * "0")
    assert "/logs/mlflow_id: " in call(f"{again} --epochs 41", cwd, code=1).stderr
    of_the_run.unlink()
    call(f"{again} --epochs 41", cwd)
    assert len(stored_in(client, "state")) == 2


def test_mlflow_two_runs_at_once_make_one_store_and_a_kill_meanwhile_leaves_none(mlflow, client, cwd, monkeypatch):
    """Where no other is named, it is mlflow.db, beside the runs. MLflow alone would leave one that it refuses. A name
    may have quotes."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    command = f"{mlflow}/train.py {SMALL} --logger_name csv mlflow --resume auto --out_dir"
    process = start(f"{command} it's", cwd)
    wait_for(lambda: process.poll() is not None or [*cwd.glob("*/*/new.db")])
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (cwd / "mlflow.db").exists()
    names = ["it's", 'a"b']
    for process in [start(f"{command} {name}", cwd) for name in names]:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    found = [each.info for each in stored_in(type(client)(f"sqlite:///{cwd}/mlflow.db"), "fabric-template")]
    assert {each.run_name: each.status for each in found} == {run_dir(cwd, name).name: "FINISHED" for name in names}
    assert {*os.listdir(cwd)} == {*(each.run_name for each in found), "mlflow.db"}


def test_mlflow_logger_of_lightning_works_in_two_lines(client, cwd: Path, program: Path):
    """Those of docs/evaluation.md, without the recipe. Each start is a run of its own there."""
    insert_after(program, "state is built", *blocks("docs/evaluation.md", "python", "Other loggers"))
    call(f"{program}/train.py {SMALL} --logger_name csv", cwd)
    client = type(client)(f"sqlite:///{cwd}/mlflow.db")
    (first,) = stored_in(client, "fabric-template")
    assert (first.info.run_name, first.info.status) == (run_dir(cwd).name, "FINISHED")
    assert_as_in_csv(curves_of(client, first), cwd)
    call(f"{program}/train.py --resume auto --epochs 6", cwd)
    last_steps = [curves_of(client, each)["val/loss"][-1][0] for each in stored_in(client, "fabric-template")]
    assert last_steps == [24, 20]
