"""The recipe mirror: a run outlives its machine. The mirror is a second disk, or, where s3fs and moto are installed, a
server of S3's protocol that the tests start, kill and start again."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from edits import insert_after
from helpers import (
    LONG,
    NO_SHARED_STORE,
    ON_2,
    PREEMPTED,
    SMALL,
    STEPS,
    TORCHRUN,
    TWO_SAVES,
    assert_same_best,
    assert_same_run,
    assert_stopped_and_saved,
    assert_whole_checkpoints,
    call,
    free_port,
    interrupt,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    snapshot,
    start,
    terminate,
    wait_for,
    with_recipe,
)
from killer import kill_before

pytestmark = pytest.mark.recipes
needs_s3 = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="needs s3fs and moto[server]")

# The loop stays at two steps until the test lets it go on.
HELD = """
import pathlib, time

while step in (32, 64) and not pathlib.Path(f"go on {step}").exists():
    time.sleep(0.02)
"""
# The thread waits for the loop with each file.
SLOW_MIRROR = """
        gives_up = time.monotonic() + 60
        while not list(self.run_dir.parent.glob("far")):
            assert time.monotonic() < gives_up, "the loop has waited for the mirror"
            time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("mirror", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Path:
    return insert_after(with_recipe("mirror", tmp_path_factory.mktemp("held")), "step is done", HELD)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk" / "runs"


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """The working directories of two machines."""
    found = [tmp_path / "first", tmp_path / "second"]
    for each in found:
        each.mkdir()
    return found


def at(disk: Path) -> str:
    """The options that mirror a run to a disk."""
    return f"--resume auto --mirror file://{disk}"


def thrown_away(process: subprocess.Popen, machine: Path) -> None:
    """SIGKILL, and nothing is left."""
    kill_group(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    shutil.rmtree(machine)


def assert_mirrored(machine: Path, disk: Path) -> None:
    """All files are there, but the lock, and no others."""
    ours = {path.relative_to(machine): content for path, (content, _) in snapshot(machine).items()}
    theirs = {path.relative_to(disk): content for path, (content, _) in snapshot(disk).items()}
    assert theirs.pop(Path(".mirror")) == b""
    del ours[Path(run_dir(machine).name) / ".lock"]
    assert ours == theirs


# ---- a machine is thrown away


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_it_goes_on_elsewhere_with_the_same_bits(
    devices: str, program: Path, held: Path, disk: Path, machines: list[Path], tmp_path: Path
):
    first, second = machines
    whole = tmp_path / "whole"
    whole.mkdir()
    run(f"{LONG} {devices}", whole)
    process = start(f"{held}/{LONG} {devices} {at(disk)}", first)
    wait_for(lambda: process.poll() is not None or newest(disk) == 28)
    thrown_away(process, first)
    done = run(f"{program}/{LONG} {devices} {at(disk)}", second)
    assert f"{run_dir(second).name} comes from file://{disk}\n" in done.stdout
    assert f"resumed from {run_dir(second).name}/checkpoints/" in done.stdout
    assert_same_run(second, whole)
    assert_same_best(second, whole)
    assert_mirrored(second, disk)


# Two checkpoints, and the first goes. The second comes when the mirror has the first.
ONE_IS_THERE = """
import pathlib, time

while step == 3 and not list(pathlib.Path("../disk").glob("runs/*/summary.json")):
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def paced(tmp_path_factory) -> Path:
    return insert_after(with_recipe("mirror", tmp_path_factory.mktemp("paced")), "step is done", ONE_IS_THERE)


@pytest.mark.parametrize(
    "change, step",
    [
        ("open config.yaml.tmp 1", None),
        ("open best.ckpt.tmp 1", 0),
        ("os.rename best.ckpt.tmp 1", 0),
        ("os.rename step-00000002.ckpt.tmp 1", 2),
        ("os.rename summary.json.tmp 1", 2),
        ("os.rename metrics.csv.tmp 2", 2),
        ("os.rename step-00000004.ckpt.tmp 1", 2),
        ("os.remove step-00000002.ckpt 1", 4),
        ("os.rename summary.json.tmp 2", 4),
    ],
)
def test_a_kill_in_the_middle_of_an_upload_costs_no_checkpoint_that_is_there(
    change: str, step: int | None, program: Path, paced: Path, two_saves: Path, disk: Path, machines: list[Path]
):
    """What has its name there is whole, the newest is taken, and has its rows."""
    first, second = machines
    kill_before(change, f"{paced}/{TWO_SAVES} {at(disk)}", first, first.parent, where="/disk/")
    shutil.rmtree(first)
    there = [torch.load(path, weights_only=True)["step"] for path in disk.glob("*/checkpoints/*.ckpt")]
    assert max(there, default=0) == (step or 0)
    done = call(f"{program}/{TWO_SAVES} {at(disk)}", second)
    assert ("comes from" in done.stdout) == (step is not None)
    assert ("resumed from" in done.stdout) == (step == 2)  # with 4 there is no step left
    assert_same_run(second, two_saves)
    assert_same_best(second, two_saves)
    assert not [*run_dir(second).rglob("*.tmp")]


def test_a_kill_while_a_run_is_fetched_leaves_no_part_of_it(
    program: Path, two_saves: Path, disk: Path, machines: list[Path]
):
    first, second = machines
    call(f"{program}/{TWO_SAVES} {at(disk)}", first)
    kill_before("open model.pt 1", f"{program}/{TWO_SAVES} {at(disk)}", second, first.parent, where="/second/")
    assert not [*second.glob("2*")]
    assert "finished after 4 of 4 steps" in call(f"{program}/{TWO_SAVES} {at(disk)}", second).stdout
    assert_same_run(second, two_saves)
    assert os.listdir(second) == [run_dir(first).name]


def test_a_finished_run_that_is_made_longer_is_not_taken_for_a_finished_one(
    program: Path, two_saves: Path, disk: Path, machines: list[Path]
):
    """Killed when its first new checkpoint is there, and its summary is not."""
    first, second = machines
    stays = "import time\nwhile step == 4:\n    time.sleep(0.02)"
    killed = insert_after(with_recipe("mirror", first.parent / "killed"), "step is done", stays)
    call(f"{program}/{TWO_SAVES} --max_steps 2 {at(disk)}", first)
    options = f"{killed}/{TWO_SAVES} --checkpoint_interval 1 {at(disk)}"
    kill_before("os.rename summary.json.tmp 1", options, first, first.parent, where="/disk/")
    shutil.rmtree(first)
    call(f"{program}/{TWO_SAVES} {at(disk)}", second)
    assert_same_run(second, two_saves)


@pytest.mark.night
def test_processes_of_torchrun_get_a_run_back_once(program: Path, held: Path, disk: Path, machines: list[Path]):
    first, second = machines
    process = start(f"{held}/{LONG} {ON_2} {at(disk)}", first)
    wait_for(lambda: process.poll() is not None or newest(disk) == 28)
    thrown_away(process, first)
    command = f"{TORCHRUN} {program}/{LONG} {ON_2} --epochs 5 {at(disk)}"
    env = os.environ | NO_SHARED_STORE
    done = subprocess.run(command.split(), cwd=second, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("comes from") == 1 and "finished after 40 of 40 steps" in done.stdout
    assert len(os.listdir(second)) == 1


# ---- which run is newer


def test_a_disk_that_is_behind_gets_the_run_of_the_mirror(
    program: Path, held: Path, disk: Path, machines: list[Path], whole: Path
):
    """As of a machine that comes back after another one has gone on. What it had is kept under another name."""
    first, second = machines
    process = start(f"{held}/{LONG} {at(disk)}", first)
    wait_for(lambda: process.poll() is not None or newest(disk) == 28)
    kill_group(process)
    process.communicate()
    call(f"{program}/{LONG} {at(disk)}", second)
    name = run_dir(second).name
    done = call(f"{program}/{LONG} {at(disk)}", first)
    assert f"{name}.28-steps: so it is called now" in done.stdout and "finished after 80 of 80" in done.stdout
    assert {path.name for path in first.iterdir()} == {name, f"{name}.28-steps"}
    assert_same_run(first, whole)
    assert_same_run(second, whole)


def test_a_run_that_is_newer_on_this_disk_is_left_alone(program: Path, disk: Path, machines: list[Path], tmp_path):
    """One of more steps, and one of a later date."""
    first, _ = machines
    call(f"{program}/{TWO_SAVES} {at(disk)}", first)
    older = Path(shutil.copytree(disk, tmp_path / "older"))
    call(f"{program}/{TWO_SAVES} {at(disk)} --max_steps 8", first)
    before = {path: content for path, content in snapshot(first).items() if path.name != ".lock"}
    done = call(f"{program}/{TWO_SAVES} {at(older)} --max_steps 8", first)
    assert "finished after 8 of 8 steps" in done.stdout
    assert before == {path: content for path, content in snapshot(first).items() if path.name != ".lock"}
    name = run_dir(first).name
    run_dir(first).rename(first / f"2999{name[4:]}")
    assert "comes from" not in call(f"{program}/{TWO_SAVES} {at(older)} --max_steps 8", first).stdout


# ---- the loop


def test_the_loop_does_not_wait_for_an_upload(disk: Path, cwd: Path, tmp_path: Path):
    """The mirror is kept from its first file until the loop is at its end."""
    program = with_recipe("mirror", tmp_path / "program")
    insert_after(program, "step is done", f'if step == {STEPS - 1}:\n    __import__("pathlib").Path("far").touch()')
    text = (program / "mirror.py").read_text()
    begin = "        new = stamp(file)\n"
    assert text.count(begin) == 1
    text = text.replace("import os\n", "import os\nimport time\n").replace(begin, SLOW_MIRROR + begin)
    (program / "mirror.py").write_text(text)
    run(f"{program}/{LONG} {at(disk)}", cwd)
    (cwd / "far").unlink()
    assert_mirrored(cwd, disk)


@pytest.mark.parametrize("devices", ["", ON_2])
def test_a_run_that_is_stopped_waits_for_its_last_upload(devices: str, program: Path, disk: Path, cwd: Path):
    done = interrupt(f"{program}/{LONG} {devices} {at(disk)}", cwd, terminate)
    assert done.returncode == PREEMPTED
    assert_stopped_and_saved(done, cwd)
    assert_mirrored(cwd, disk)
    assert last_summary(disk)["state"] == "interrupted"


def test_a_rehearsal_is_not_mirrored(program: Path, disk: Path, cwd: Path):
    call(f"{program}/train.py {SMALL} --fast_run --mirror file://{disk}", cwd)
    assert os.listdir(disk) == [".mirror"] and os.listdir(cwd) == []


def test_a_disk_that_goes_away_costs_the_run_nothing(held: Path, disk: Path, cwd: Path, whole: Path, tmp_path: Path):
    """A file lies in its place. What it had stays whole."""
    away = tmp_path / "away"
    process = start(f"{held}/{LONG} {at(disk)}", cwd)
    wait_for(lambda: process.poll() is not None or newest(disk) == 28)
    disk.rename(away)
    disk.touch()
    out = end_of(process, cwd)
    assert out.count("fails; the run goes on, and is mirrored later (") == 1
    name = run_dir(cwd).name
    assert out.endswith(f"--mirror file://{disk} has not the last part of the run, which is in {name} alone\n")
    assert_same_run(cwd, whole)
    assert_whole_checkpoints(away)
    assert newest(away) == 28


# ---- refused


@pytest.mark.parametrize(
    "address, told",
    [
        ("backup", "give an address, such as s3://BUCKET/runs or file:///mnt/disk/runs"),
        ("nothing://backup", "Protocol not known: nothing"),
        ("file:///no/disk/runs", "FileNotFoundError: [Errno 2] No such file or directory: '/no/disk/runs'"),
    ],
)
@pytest.mark.parametrize("resume", ["", "--resume auto"])
def test_an_address_that_cannot_be_is_refused(address: str, told: str, resume: str, program: Path, cwd: Path):
    error = call(f"{program}/train.py {SMALL} --mirror {address} {resume}", cwd, code=2).stderr
    assert error == f"train.py: error: --mirror {address}: {told}\n"
    assert os.listdir(cwd) == []


def test_an_address_is_refused_on_two_processes(program: Path, cwd: Path):
    error = run(f"{program}/train.py {SMALL} {ON_2} --mirror file:///no/disk/runs", cwd, code=2).stderr
    assert "train.py: error: rank 0: --mirror file:///no/disk/runs: FileNotFoundError" in error
    assert "Traceback" not in error and os.listdir(cwd) == []


# ---- a server


class Server:
    """A server of S3's protocol. What it has is gone when it ends."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.address = "s3://bucket/runs"
        self.env = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }
        self.process: subprocess.Popen | None = None

    def start(self, bucket: bool = True, **env: str) -> None:
        code = "from moto.server import main; main()"
        command = [sys.executable, "-c", code, "-p", str(self.port)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=os.environ | env, stdout=null, stderr=null)
        wait_for(self.answers)
        if bucket:
            self.files().mkdir("bucket")

    def answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def files(self):
        """The files on the server."""
        import s3fs

        url = self.env["FSSPEC_S3_ENDPOINT_URL"]
        return s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=url, use_listings_cache=False)

    def newest(self) -> int:
        """The step of the newest checkpoint that is there, 0 if there is none."""
        return max(
            (int(path[-13:-5]) for path in self.files().glob("bucket/runs/*/checkpoints/step-*.ckpt")), default=0
        )

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path):
    server = Server(tmp_path)
    yield server
    server.kill()


def assert_on_server(machine: Path, server: Server) -> None:
    """All files are there, but the lock, and no others."""
    files = server.files()
    theirs = {path.removeprefix("bucket/runs/"): files.cat_file(path) for path in files.find("bucket/runs")}
    ours = {str(path.relative_to(machine)): content for path, (content, _) in snapshot(machine).items()}
    assert theirs.pop(".mirror", b"") == b""  # gone with a server that was killed
    assert ours.pop(f"{run_dir(machine).name}/.lock") == b""
    assert ours == theirs


@needs_s3
def test_a_run_on_a_server_goes_on_elsewhere_with_the_same_bits(
    program: Path, held: Path, server: Server, machines: list[Path], whole: Path
):
    first, second = machines
    server.start()
    mirror = f"--resume auto --mirror {server.address}"
    process = start(f"{held}/{LONG} {mirror}", first, **server.env)
    wait_for(lambda: process.poll() is not None or server.newest() == 28)
    thrown_away(process, first)
    run(f"{program}/{LONG} {mirror}", second, **server.env)
    assert_same_run(second, whole)
    assert_same_best(second, whole)
    assert_on_server(second, server)


def end_of(process: subprocess.Popen, cwd: Path) -> str:
    """Lets the loop go on to its end; returns what was printed."""
    for step in (32, 64):
        (cwd / f"go on {step}").touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    for path in cwd.glob("go on *"):
        path.unlink()
    return out


@needs_s3
@pytest.mark.night
def test_a_server_that_comes_after_the_start_gets_the_run(held: Path, server: Server, cwd: Path):
    process = start(f"{held}/{LONG} --mirror {server.address}", cwd, **server.env)
    wait_for(lambda: process.poll() is not None or newest(cwd) == 28)
    server.start()
    wait_for(lambda: process.poll() is not None or server.newest() == 28)
    out = end_of(process, cwd)
    assert out.count("does not answer; the run goes on, and is mirrored later (") == 1 and "alone" not in out
    assert_on_server(cwd, server)


@needs_s3
def test_a_server_that_dies_and_comes_back_gets_the_run_again(held: Path, server: Server, cwd: Path):
    """All of it: what it had is gone. It is told once, however often it is tried."""
    server.start()
    process = start(f"{held}/{LONG} --mirror {server.address}", cwd, **server.env)
    wait_for(lambda: process.poll() is not None or server.newest() == 28)
    server.kill()
    (cwd / "go on 32").touch()
    for line in process.stdout:
        if " fails; the run goes on, and is mirrored later (" in line:
            break
    server.start()
    wait_for(lambda: process.poll() is not None or server.newest() == 60)
    out = end_of(process, cwd)
    assert "fails" not in out and "alone" not in out and f"--mirror {server.address} has the run again\n" in out
    assert_on_server(cwd, server)


@needs_s3
@pytest.mark.night
def test_a_server_that_stays_away_costs_the_run_nothing(
    program: Path, server: Server, machines: list[Path], whole: Path
):
    first, second = machines
    done = run(f"{program}/{LONG} --mirror {server.address}", first, **server.env)
    assert done.stdout.count("does not answer; the run goes on") == 1
    assert done.stdout.endswith(f" has not the last part of the run, which is in {run_dir(first).name} alone\n")
    assert_same_run(first, whole)
    command = f"{program}/{LONG} --mirror {server.address} --resume auto"
    assert "the newest run of this disk is taken" in run(command, first, **server.env).stdout
    (error,) = run(command, second, code=2, **server.env).stderr.splitlines()
    assert "does not answer, so it is not known whether it has a run to resume" in error
    assert os.listdir(second) == []


@needs_s3
def test_wrong_credentials_are_told_before_the_first_step(program: Path, server: Server, cwd: Path):
    """And a bucket that is missing."""
    server.start(bucket=False)
    command = f"{program}/train.py {SMALL} --mirror {server.address}"
    told = f"train.py: error: --mirror {server.address}: "
    error = run(command, cwd, code=2, **server.env).stderr
    assert error == f"{told}FileNotFoundError: The specified bucket does not exist\n"
    server.kill()
    server.start(bucket=False, INITIAL_NO_AUTH_ACTION_COUNT="0")
    for resume in ("", "--resume auto"):
        (error,) = run(f"{command} {resume}", cwd, code=2, **server.env).stderr.splitlines()
        assert error.startswith(f"{told}PermissionError: ")
    without = server.env | {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    (error,) = run(command, cwd, code=2, **without).stderr.splitlines()
    assert error.startswith(f"{told}NoCredentialsError: ")
    assert os.listdir(cwd) == []
