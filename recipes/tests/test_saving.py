"""What else becomes of a run's files: background_save, whose thread writes them; mirror, a second disk or, where s3fs
and moto are installed, a server of S3's protocol that the tests start, kill and start again; mlflow, read by its own
client, where it is installed."""

import os
import re
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
from edits import insert_after, insert_before, replace
from fsspec.core import url_to_fs
from helpers import (
    EVERY_FOURTH_STEP,
    LONG,
    MEASURED,
    NO_SHARED_STORE,
    ON_2,
    PREEMPTED,
    REPO,
    SMALL,
    STEPS,
    TORCHRUN,
    TWO_SAVES,
    assert_same_best,
    assert_same_run,
    assert_stopped_and_saved,
    call,
    folders,
    free_port,
    history,
    imported,
    interrupt,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    snapshot,
    start,
    state_of,
    terminate,
    wait_for,
    with_recipe,
    without_locks,
)
from killer import kill_before, remove_what_is_no_run
from mistakes import assert_one_line

from config import TrainConfig
from runtime.options import values_of

pytestmark = pytest.mark.recipes
needs_s3 = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="needs s3fs and moto[server]")

# ---- background_save

# The thread writes the checkpoint of step 20 only when the loop has done further steps. Both note what they have done.
HELD_THREAD = """
import pathlib, time

step = contents["step"]
if step == 20:
    gives_up = time.monotonic() + 60
    while "step 23" not in pathlib.Path("done").read_text():
        assert time.monotonic() < gives_up, "the loop has waited for the thread"
        time.sleep(0.01)
    time.sleep(0.2)  # the loop would go on to step 25, if it did not wait for the thread then
"""
NOTE = 'with open("done", "a") as file:\n    file.write(f"{} {{step}}\\n")\n'
# Saved every fourth step, logged in each step, and never validated before the end.
RARELY = LONG.replace(EVERY_FOURTH_STEP, "--checkpoint_interval 4 --log_interval 1 --val_interval 10000")


@pytest.fixture(scope="module")
def held_thread(tmp_path_factory) -> Path:
    program = with_recipe("background_save", tmp_path_factory.mktemp("held_thread"))
    insert_before(program, "checkpoint is written", HELD_THREAD)
    insert_after(program, "checkpoint is written", NOTE.format("written"))
    return insert_after(program, "step is done", NOTE.format("step"))


def test_background_save_copies_views_and_sparse_tensors_and_tied_ones_once(background_save: Path):
    square, imaginary = torch.arange(9.0).view(3, 3), torch.ones(2) * 1j
    parts = [square, square.t(), square.detach(), imaginary, imaginary.conj(), torch.eye(3).to_sparse()]
    copied_to_cpu = imported(background_save, "runtime/checkpoints").copied_to_cpu
    found = copied_to_cpu({"state": dict(enumerate(parts))})["state"]
    assert all(torch.equal(found[number].to_dense(), part.to_dense()) for number, part in enumerate(parts))
    assert found[0].data_ptr() == found[2].data_ptr() != square.data_ptr()


def test_background_save_loop_goes_on_while_a_file_is_written_and_a_kill_then_costs_nothing(
    held_thread: Path, cwd: Path, tmp_path: Path
):
    """The rows of later steps are there already. The file has what the state was at its step, though the loop has
    changed it since. The next save waits."""
    whole, done = tmp_path / "whole", cwd / "done"
    whole.mkdir()
    call(f"{RARELY} --num_checkpoint_keep 0", whole)
    process = start(f"{held_thread}/{RARELY} --num_checkpoint_keep 0", cwd)
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


CHANGES_BY_THE_THREAD = [
    *("os.rename step-00000002.ckpt.tmp 1", "os.link step-00000002.ckpt 1", "os.rename best.tmp 1"),
    *("os.rename step-00000004.ckpt.tmp 1", "os.remove step-00000002.ckpt 1", "os.rename model.pt 1"),
]


@pytest.mark.parametrize("change", CHANGES_BY_THE_THREAD)
def test_background_save_kill_before_a_change_of_a_file_costs_nothing(
    change: str, background_save: Path, two_saves: Path, cwd: Path, tmp_path: Path
):
    changes = kill_before(change, f"{background_save}/{TWO_SAVES}", cwd, tmp_path)
    assert change.rpartition(" ")[0] in "\n".join(changes)
    call(f"{background_save}/{TWO_SAVES} --resume auto", cwd)
    remove_what_is_no_run(cwd)
    assert_same_run(cwd, two_saves)
    assert_same_best(cwd, two_saves)
    assert not [*run_dir(cwd).glob("**/*.tmp")]


# The checkpoint of step 20 is the only file of more than 100 kB.
LOSS = "--limit_val_batches 0 --monitor train/loss --monitor_mode min"
TOO_LARGE = f"{RARELY} --width 64 --checkpoint_interval 20 {LOSS}"


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

# The loop stays at two steps until the test lets it go on.
HELD = """
import pathlib, time

while step in (32, 64) and not pathlib.Path(f"go on {step}").exists():
    time.sleep(0.02)
"""
# The thread waits for the loop with each file.
SLOW_MIRROR = """
import time

gives_up = time.monotonic() + 60
while not list(self.run_dir.parent.glob("far")):
    assert time.monotonic() < gives_up, "the loop has waited for the mirror"
    time.sleep(0.02)
"""
# Two checkpoints, and the first goes. The second comes when the mirror has the first.
ONE_IS_THERE = """
import pathlib, time

while step == 3 and not list(pathlib.Path("../disk").glob("runs/*/summary.json")):
    time.sleep(0.02)
"""


class Disk:
    """A second disk, where a run is mirrored to. Where it was stopped, a file lies in its place."""

    env: dict[str, str] = {}  # what a program needs to come there
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

    def contents(self) -> dict[str, bytes]:
        fs, path = self.files()
        return {name.removeprefix(f"{path}/"): fs.cat_file(name) for name in fs.find(path)}


class Server(Disk):
    """A server of S3's protocol. What it has is gone when it is stopped."""

    address = "s3://bucket/runs"

    def __init__(self, folder: Path):
        self.port = free_port()
        self.options = {"key": "key", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{self.port}"}
        self.env = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "FSSPEC_S3_ENDPOINT_URL": self.options["endpoint_url"],
        }
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


@pytest.fixture
def place(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where a run is mirrored to: a disk, unless the test says that it is a server."""
    found = getattr(request, "param", Disk)(tmp_path)
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Path:
    return insert_after(with_recipe("mirror", tmp_path_factory.mktemp("held")), "step is done", HELD)


@pytest.fixture(scope="module")
def paced(tmp_path_factory) -> Path:
    return insert_after(with_recipe("mirror", tmp_path_factory.mktemp("paced")), "step is done", ONE_IS_THERE)


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """The working directories of two machines."""
    return folders(tmp_path, "first", "second")


def at(place: Disk) -> str:
    """The options that mirror a run."""
    return f"--resume auto --mirror {place.address}"


def held_at_28(command: str, machine: Path, place: Disk) -> subprocess.Popen:
    """A run that is held, with the checkpoint of step 28 on the mirror."""
    process = start(f"{command} {at(place)}", machine)
    wait_for(lambda: process.poll() is not None or place.newest() == 28)
    return process


def assert_mirrored(machine: Path, place: Disk) -> None:
    """All files are there, but the lock, and no others."""
    ours = {str(path.relative_to(machine)): content for path, (content, _) in snapshot(machine).items()}
    theirs = place.contents()
    assert theirs.pop(".mirror", b"") == b""  # gone with a mirror that was away
    assert ours.pop(f"{run_dir(machine).name}/.lock") == b""
    assert ours == theirs


@pytest.mark.parametrize("place", [Disk, pytest.param(Server, id="server", marks=needs_s3)], indirect=True)
def test_mirror_run_goes_on_elsewhere_with_the_same_bits(place, whole: Path, mirror, held, machines):
    """A kill while it is fetched leaves no part of it."""
    first, second = machines
    process = held_at_28(f"{held}/{LONG}", first, place)
    kill_group(process)
    process.communicate()
    shutil.rmtree(first)
    command = f"{mirror}/{LONG} {at(place)}"
    kill_before("open step-00000028.ckpt 1", command, second, first.parent, where=".tmp/checkpoints/")
    assert not [*second.glob("2*")]
    done = run(command, second)
    assert f"{run_dir(second).name} comes from {place.address}\n" in done.stdout
    assert f"resumed from {run_dir(second).name}/checkpoints/" in done.stdout
    assert os.listdir(second) == [run_dir(second).name]
    assert_same_run(second, whole)
    assert_same_best(second, whole)
    assert_mirrored(second, place)


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
    change: str, step: int | None, mirror: Path, paced: Path, two_saves: Path, place: Disk, machines: list[Path]
):
    """What has its name there is whole, the newest is taken, and has its rows."""
    first, second = machines
    kill_before(change, f"{paced}/{TWO_SAVES} {at(place)}", first, first.parent, where="/disk/")
    shutil.rmtree(first)
    there = [torch.load(path, weights_only=True)["step"] for path in place.path.glob("*/checkpoints/*.ckpt")]
    assert max(there, default=0) == (step or 0)
    done = call(f"{mirror}/{TWO_SAVES} {at(place)}", second)
    assert ("comes from" in done.stdout) == (step is not None)
    assert ("resumed from" in done.stdout) == (step == 2)  # with 4 there is no step left
    assert_same_run(second, two_saves)
    assert_same_best(second, two_saves)
    assert not [*run_dir(second).rglob("*.tmp")]


@pytest.mark.night
def test_mirror_processes_of_torchrun_get_a_run_back_once(mirror: Path, place: Disk, machines: list[Path]):
    first, second = machines
    run(f"{mirror}/{LONG} {ON_2} --epochs 2 {at(place)}", first)
    command = f"{TORCHRUN} {mirror}/{LONG} {ON_2} --epochs 3 {at(place)}"
    env = os.environ | NO_SHARED_STORE
    done = subprocess.run(command.split(), cwd=second, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("comes from") == 1 and "finished after 24 of 24 steps" in done.stdout
    assert len(os.listdir(second)) == 1


def test_mirror_and_disk_have_a_run_and_the_newer_one_is_taken(
    mirror, two_saves, place: Disk, machines, tmp_path: Path
):
    """As of a machine that comes back after another one has gone on: what it had is kept under another name. A run of
    more steps, or of a later date, stays as it is."""
    first, second = machines
    command = f"{mirror}/{TWO_SAVES} {at(place)}"
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


def test_mirror_kill_of_a_run_that_was_made_longer_leaves_no_finished_one(mirror, two_saves, place: Disk, machines):
    """Its first new checkpoint is there, and its summary is not."""
    first, second = machines
    stays = "import time\nwhile step == 4:\n    time.sleep(0.02)"
    killed = insert_after(with_recipe("mirror", first.parent / "killed"), "step is done", stays)
    call(f"{mirror}/{TWO_SAVES} --max_steps 2 {at(place)}", first)
    command = f"{killed}/{TWO_SAVES} --checkpoint_interval 1 {at(place)}"
    kill_before("os.rename summary.json.tmp 1", command, first, first.parent, where="/disk/")
    shutil.rmtree(first)
    call(f"{mirror}/{TWO_SAVES} {at(place)}", second)
    assert_same_run(second, two_saves)


def test_mirror_loop_does_not_wait_for_an_upload(place: Disk, cwd: Path, tmp_path: Path):
    """The mirror is kept from its first file until the loop is at its end."""
    program = with_recipe("mirror", tmp_path / "program")
    insert_after(program, "step is done", f'if step == {STEPS - 1}:\n    __import__("pathlib").Path("far").touch()')
    insert_before(program, ("mirror.py", "upload", "new = stamp(file)"), SLOW_MIRROR)
    run(f"{program}/{LONG} {at(place)}", cwd)
    (cwd / "far").unlink()
    assert_mirrored(cwd, place)


@pytest.mark.parametrize("recipe", ["background_save", "mirror"])
def test_a_signal_ends_the_run_when_its_last_checkpoint_is_there(recipe: str, request, place: Disk, cwd: Path):
    """With mirror, there, too."""
    command = f"{request.getfixturevalue(recipe)}/{LONG} {ON_2}"
    command += f" {at(place)}" if recipe == "mirror" else ""
    assert_stopped_and_saved(interrupt(command, cwd, terminate), cwd)
    if recipe == "mirror":
        assert_mirrored(cwd, place)
        assert last_summary(place.path)["state"] == "interrupted"


def test_a_rehearsal_leaves_nothing_behind(background_save: Path, mirror: Path, place: Disk, cwd: Path):
    for command in (f"{background_save}/train.py", f"{mirror}/train.py --mirror {place.address}"):
        done = run(f"{command} {SMALL} --fast_run", cwd)
        assert "finished after 4 of 4 steps" in done.stdout and os.listdir(cwd) == []
    assert os.listdir(place.path) == [".mirror"]


@pytest.mark.parametrize(
    "place, comes_back",
    [(Disk, False), (Disk, True), pytest.param(Server, True, id="server-back", marks=needs_s3)],
    indirect=["place"],
)
def test_mirror_that_goes_away_costs_the_run_nothing(place, comes_back: bool, held: Path, cwd: Path, whole: Path):
    """It is told once, however often it is tried. If it comes back, it gets all of the run: what it had is gone."""
    process = held_at_28(f"{held}/{LONG}", cwd, place)
    place.stop()
    (cwd / "go on 32").touch()
    for line in process.stdout:
        if "the run goes on, and is mirrored later" in line:
            break
    if comes_back:
        place.start()
        wait_for(lambda: process.poll() is not None or place.newest() == 60)
    (cwd / "go on 64").touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0 and "fails" not in out, error
    for path in cwd.glob("go on *"):
        path.unlink()
    assert_same_run(cwd, whole)
    if comes_back:
        assert f"--mirror {place.address} has the run again\n" in out and "alone" not in out
        assert_mirrored(cwd, place)
    else:
        last = out.splitlines()[-1]
        assert f"--mirror {place.address}" in last and f"{run_dir(cwd).name} alone" in last


@needs_s3
@pytest.mark.parametrize("place", [Server], indirect=True)
def test_mirror_server_that_refuses_or_does_not_answer_at_the_start(place: Server, mirror: Path, machines):
    """Wrong credentials, and a bucket that is missing, are told before the first step. One that is away costs a run
    nothing; but a new run would hide the one that is there."""
    first, second = machines
    command = f"{mirror}/train.py {SMALL} --mirror {place.address}"

    def refused(options: str, word: str) -> None:
        done = run(f"{command} {options}", second, code=2)
        assert_one_line(done, f"--mirror {place.address}", word)
        assert os.listdir(second) == []

    place.stop()
    place.start(bucket=False)
    refused("", "FileNotFoundError: ")
    place.stop()
    place.start(bucket=False, INITIAL_NO_AUTH_ACTION_COUNT="0")
    for options in ("", "--resume auto"):
        refused(options, "PermissionError: ")
    place.stop()
    refused("--resume auto", "does not answer")
    assert run(command, first).stdout.endswith(f"{run_dir(first).name} alone\n")
    assert "the newest run of this disk is taken" in run(f"{command} --resume auto", first).stdout


# ---- mlflow. Each test has a project of its own in a store, which takes MLflow seconds to make.

TO_MLFLOW = f"train.py {SMALL} --epochs 40 --log_interval 1 --checkpoint_interval 40 --logger_name csv mlflow"
SMALL_TO_MLFLOW = f"train.py {SMALL} --logger_name csv mlflow"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    mlflow = pytest.importorskip("mlflow")
    address = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", address)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield mlflow.MlflowClient(address)


class Stored:
    """What a store has of a run."""

    def __init__(self, client, run):
        self.id, self.name, self.status = run.info.run_id, run.info.run_name, run.info.status
        self.options, self.tags = run.data.params, run.data.tags
        self.curves = {
            name: [(value.step, value.value) for value in client.get_metric_history(self.id, name)]
            for name in run.data.metrics
        }


def stored_in(client, project: str) -> list[Stored]:
    """The runs of a project, the last one first."""
    return [Stored(client, run) for run in client.search_runs([client.get_experiment_by_name(project).experiment_id])]


def assert_same_curves(stored: Stored, cwd: Path) -> None:
    """As in metrics.csv, in every bit, in the order of the steps, each once; of what is measured, the steps."""
    found = history(cwd)
    names = {name for row in found for name in row} - {"step"}
    expected = {name: [(int(row["step"]), float(row[name])) for row in found if row[name]] for name in names}
    curves = stored.curves.copy()
    for name in MEASURED:
        assert [step for step, _ in curves.pop(name)] == [step for step, _ in expected["epoch"]]
    assert curves == expected


def test_mlflow_killed_and_resumed_run_has_each_row_once(mlflow, client, cwd: Path, tmp_path: Path):
    """The rows between the checkpoint and the kill are of the killed process; those of csv are of the resumed one."""
    program = with_recipe("mlflow", tmp_path / "program")
    insert_after(program, "step is done", "if step == 45:\n    __import__('os').killpg(0, 9)")
    project = tmp_path.name
    run(f"{program}/{TO_MLFLOW} --project {project}", cwd, code=-signal.SIGKILL)
    (killed,) = stored_in(client, project)
    assert killed.status == "RUNNING" and killed.curves["train/loss"][-1][0] == 44 > newest(cwd) == 40
    run(f"{mlflow}/train.py --resume auto", cwd)
    (resumed,) = stored_in(client, project)
    assert_same_curves(resumed, cwd)
    assert (resumed.id, resumed.name, resumed.status) == (killed.id, run_dir(cwd).name, "FINISHED")
    assert [step for step, _ in resumed.curves["train/loss"]] == [*range(1, 161)]
    for name in ("train/loss", *MEASURED):
        assert resumed.curves[name][: len(killed.curves[name])] == killed.curves[name]


def test_mlflow_has_the_options_as_parameters_a_changed_one_as_a_tag_and_the_state_of_the_run(client, cwd, program):
    """Of one that was stopped by a signal, then resumed and failed, then resumed and finished. Characters that MLflow
    refuses in the name of a metric are replaced. A rehearsal leaves nothing in the store, and one that does not know
    the run is told."""
    replace(with_recipe("mlflow", program), "metrics", '{"accuracy": accuracy, "acc@1 (%)": accuracy.clone()}')
    command = f"{program}/{TO_MLFLOW} --checkpoint_interval 2 --comment a-note --project state"
    call(f"{command} --fast_run", cwd)
    assert client.get_experiment_by_name("state") is None
    again = f"{program}/train.py --resume auto"
    assert interrupt(command, cwd, terminate).returncode == PREEMPTED
    first = stored_in(client, "state")[0]
    assert (last_summary(cwd)["state"], first.status) == ("interrupted", "KILLED")
    assert first.options.keys() == values_of(TrainConfig()).keys()
    assert first.options.items() >= {"width": "4", "base_lr": "0.004", "max_steps": "0"}.items()
    assert first.tags["mlflow.note.content"] == "a-note"
    call(f"{again} --base_lr 1e30", cwd, code=1)
    assert (last_summary(cwd)["state"], stored_in(client, "state")[0].status) == ("failed", "FAILED")
    call(f"{again} --base_lr 4e-3", cwd)
    (last,) = stored_in(client, "state")
    assert (last.id, last.status, last.options) == (first.id, "FINISHED", first.options)
    assert last.tags["resumed_with.base_lr"] == "0.004" and "resumed_with.width" not in last.tags
    assert last.curves["val/acc-1 ---"] == last.curves["val/accuracy"]
    of_the_run = run_dir(cwd) / "logs" / "mlflow_id"
    of_the_run.write_text(32 * "0")
    error = call(f"{again} --epochs 41", cwd, code=1).stderr
    assert re.search(r"^train.py: error: \S+/logs/mlflow_id: ", error, re.MULTILINE)
    of_the_run.unlink()
    call(f"{again} --epochs 41", cwd)
    assert len(stored_in(client, "state")) == 2


def test_mlflow_two_runs_at_once_make_one_store_and_a_kill_meanwhile_leaves_none(mlflow, client, cwd, monkeypatch):
    """Where no other is named, it is mlflow.db, beside the runs. MLflow alone would leave one that it refuses. A name
    may have quotes."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    process = start(f"{mlflow}/{SMALL_TO_MLFLOW} --out_dir it's", cwd)
    wait_for(lambda: process.poll() is not None or [*cwd.glob("*/*/new.db")])
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (cwd / "mlflow.db").exists()
    names = ["it's", 'a"b']
    for process in [start(f"{mlflow}/{SMALL_TO_MLFLOW} --resume auto --out_dir {name}", cwd) for name in names]:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    found = stored_in(type(client)(f"sqlite:///{cwd}/mlflow.db"), "fabric-template")
    assert {each.name: each.status for each in found} == {run_dir(cwd, name).name: "FINISHED" for name in names}
    assert {*os.listdir(cwd)} == {*(each.name for each in found), "mlflow.db"}


def test_mlflow_logger_of_lightning_works_in_two_lines(client, cwd: Path, program: Path):
    """Those of docs/evaluation.md, without the recipe. Each start is a run of its own there."""
    page = (REPO / "docs" / "evaluation.md").read_text()
    (lines,) = re.findall(r"^```python\n([^`]*MLFlowLogger[^`]*)^```$", page, re.MULTILINE)
    insert_after(program, "state is built", lines)
    call(f"{program}/train.py {SMALL} --logger_name csv", cwd)
    client = type(client)(f"sqlite:///{cwd}/mlflow.db")
    (first,) = stored_in(client, "fabric-template")
    assert_same_curves(first, cwd)
    assert (first.name, first.status) == (run_dir(cwd).name, "FINISHED")
    call(f"{program}/train.py --resume auto --epochs 6", cwd)
    found = stored_in(client, "fabric-template")
    assert [(each.status, each.curves["val/loss"][0][0]) for each in found] == [("FINISHED", 24), ("FINISHED", 4)]
