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
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from edits import copy_programs, insert_after, insert_before, replace, with_text
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
    assert_whole_checkpoints,
    call,
    free_port,
    history,
    how_to_go_on,
    imported,
    interrupt,
    kill_group,
    killed_and_resumed,
    last_summary,
    newest,
    run,
    run_dir,
    snapshot,
    start,
    terminate,
    wait_for,
    with_recipe,
    without_locks,
)
from killer import kill_before, remove_what_is_no_run
from lightning_utilities.core.apply_func import apply_to_collection
from optimizers import HALVED

from config import TrainConfig
from runtime.options import values_of

pytestmark = pytest.mark.recipes
needs_s3 = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="needs s3fs and moto[server]")
needs_mlflow = pytest.mark.skipif(not find_spec("mlflow"), reason="needs mlflow")

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
WRITTEN = 'with open("done", "a") as file:\n    file.write(f"written {step}\\n")\n'
DONE = 'with open("done", "a") as file:\n    file.write(f"step {step}\\n")'
# Saved every fourth step, logged in each step, and never validated before the end.
RARELY = LONG.replace(EVERY_FOURTH_STEP, "--checkpoint_interval 4 --log_interval 1 --val_interval 10000")


@pytest.fixture(scope="module")
def held_thread(tmp_path_factory) -> Path:
    program = with_recipe("background_save", tmp_path_factory.mktemp("held_thread"))
    insert_before(program, "checkpoint is written", HELD_THREAD)
    insert_after(program, "checkpoint is written", WRITTEN)
    return insert_after(program, "step is done", DONE)


def done_in(cwd: Path) -> str:
    return (cwd / "done").read_text() if (cwd / "done").exists() else ""


def contents(path: Path) -> dict:
    """What a checkpoint holds, its tensors as lists, without what is measured and the code."""
    found = torch.load(path, weights_only=True)
    del found["checkpoint"]["code"], found["checkpoint"]["summary"]["seconds"]
    for name in MEASURED:
        found["checkpoint"]["summary"]["last"].pop(name, None)
    return apply_to_collection(found, torch.Tensor, torch.Tensor.tolist)


def test_background_save_loop_goes_on_while_a_file_is_written_and_the_next_save_waits(held_thread, tmp_path: Path):
    """The file has what the state was at its step, though the loop has changed it since."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    options = "--max_steps 32 --num_checkpoint_keep 0"
    run(f"{held_thread}/{RARELY} {options}", ours)
    call(f"{RARELY} {options}", theirs)
    done = done_in(ours).splitlines()
    assert done.index("step 23") < done.index("written 20") < done.index("step 25")
    assert_same_run(ours, theirs)
    for path in run_dir(theirs).glob("checkpoints/*.ckpt"):
        assert contents(run_dir(ours) / "checkpoints" / path.name) == contents(path)


def test_background_save_kill_while_the_loop_is_ahead_of_the_file_costs_nothing(
    background_save: Path, held_thread: Path, cwd: Path, tmp_path: Path
):
    """The rows of later steps are there already."""
    whole = tmp_path / "whole"
    whole.mkdir()
    call(RARELY, whole)
    process = start(f"{held_thread}/{RARELY.replace('interval 4', 'interval 20')} --num_checkpoint_keep 1", cwd)
    wait_for(lambda: process.poll() is not None or "step 22" in done_in(cwd))
    kill_group(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and newest(cwd) < 20
    run(f"{background_save}/{RARELY} --resume auto", cwd)
    assert_same_run(cwd, whole)


CHANGES_BY_THE_THREAD = [
    *("open step-00000002.ckpt.tmp 1", "os.rename step-00000002.ckpt.tmp 1", "os.link step-00000002.ckpt 1"),
    *("os.rename best.tmp 1", "open step-00000004.ckpt.tmp 1", "os.rename step-00000004.ckpt.tmp 1"),
    *("os.remove step-00000002.ckpt 1", "open step-00000004.ckpt.tmp 2", "os.rename step-00000004.ckpt.tmp 2"),
    "os.rename model.pt 1",
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


@pytest.mark.parametrize("devices", ["", ON_2])
def test_background_save_signal_ends_the_run_when_its_last_checkpoint_is_there(devices, background_save, cwd: Path):
    assert_stopped_and_saved(interrupt(f"{background_save}/{LONG} {devices}", cwd, terminate), cwd)


REFUSED = "train.py: error: the system refused to read or write the run: [Errno 27] File too large"


def test_background_save_full_disk_costs_no_checkpoint(background_save: Path, whole: Path, cwd: Path):
    """It is told as without the recipe."""

    def fill(process) -> None:  # no file may grow beyond 5 kB
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5000, 5000))

    done = interrupt(f"{background_save}/{LONG}", cwd, fill)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"{REFUSED}; {how_to_go_on(cwd)}"
    assert_whole_checkpoints(cwd)
    call(f"{background_save}/train.py --resume train_out", cwd)
    assert_same_run(cwd, whole)


# The checkpoint of step 20 is the only file of more than 100 kB.
LOSS = "--limit_val_batches 0 --monitor train/loss --monitor_mode min"
TOO_LARGE = f"{RARELY} --width 64 --checkpoint_interval 20 {LOSS}"


@pytest.mark.parametrize("is_last", [False, True])
def test_background_save_error_of_the_thread_ends_the_run(is_last: bool, background_save, held_thread, cwd: Path):
    """At the next step, not at the next save. One with the last checkpoint is no success."""
    command = f"{background_save}/{TOO_LARGE} --max_steps 20" if is_last else f"{held_thread}/{TOO_LARGE}"
    process = start(command, cwd)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    out, error = process.communicate(timeout=300)
    assert process.returncode == 1 and "finished after" not in out and error == f"{REFUSED}\n"
    assert not any(cwd.glob("*/checkpoints/*")) and not any(cwd.glob("*/model.pt"))
    assert is_last or 23 <= int(history(cwd)[-1]["step"]) < 40


def test_background_save_copies_tied_weights_once_and_any_layout(background_save: Path):
    weight = torch.arange(12.0).view(3, 4)
    state = {
        "model": {"weight": weight, "tied": weight.detach(), "transposed": weight.t(), "row": weight[1].clone()},
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j,
    }
    state["conjugate"] = state["complex"].conj()
    expected = {name: value.clone() for name, value in state["model"].items()}
    copied = imported(background_save, "runtime/checkpoints").copied_to_cpu(state)
    weight.zero_()
    torch.testing.assert_close(copied["model"], expected, atol=0, rtol=0)
    assert copied["model"]["weight"].data_ptr() == copied["model"]["tied"].data_ptr()
    assert copied["model"]["transposed"].stride() == (1, 4)
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(copied["complex"], -copied["conjugate"])


def test_background_save_optimizer_whose_state_cannot_be_cloned_is_resumed(tmp_path: Path):
    program = with_recipe("background_save", tmp_path / "program")
    (program / "halved.py").write_text(HALVED)
    insert_before(program, "functions", "from halved import HalvedMomentum\n\n")
    replace(program, "optimizer", "HalvedMomentum(model.parameters())")
    killed_and_resumed(f"{program}/{LONG} --base_lr 0.05", tmp_path, resume=run)


def test_background_save_rehearsal_leaves_nothing_behind(background_save: Path, cwd: Path):
    for devices in ("", ON_2):
        done = run(f"{background_save}/train.py {SMALL} --fast_run {devices}", cwd)
        assert "finished after 4 of 4 steps" in done.stdout and os.listdir(cwd) == []


# ---- mirror: a machine is thrown away

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
# Two checkpoints, and the first goes. The second comes when the mirror has the first.
ONE_IS_THERE = """
import pathlib, time

while step == 3 and not list(pathlib.Path("../disk").glob("runs/*/summary.json")):
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Path:
    return insert_after(with_recipe("mirror", tmp_path_factory.mktemp("held")), "step is done", HELD)


@pytest.fixture(scope="module")
def paced(tmp_path_factory) -> Path:
    return insert_after(with_recipe("mirror", tmp_path_factory.mktemp("paced")), "step is done", ONE_IS_THERE)


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


def killed_at_28(command: str, machine: Path, newest_there, **env: str) -> None:
    """Kills a run that is held when the checkpoint of step 28 is on the mirror."""
    process = start(command, machine, **env)
    wait_for(lambda: process.poll() is not None or newest_there() == 28)
    kill_group(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def end_of(process: subprocess.Popen, cwd: Path) -> str:
    """Lets the loop go on to its end; returns what was printed."""
    for step in (32, 64):
        (cwd / f"go on {step}").touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    for path in cwd.glob("go on *"):
        path.unlink()
    return out


def assert_mirrored(machine: Path, theirs: dict[str, bytes]) -> None:
    """All files are there, but the lock, and no others."""
    ours = {str(path.relative_to(machine)): content for path, (content, _) in snapshot(machine).items()}
    assert theirs.pop(".mirror", b"") == b""  # gone with a server that was killed
    assert ours.pop(f"{run_dir(machine).name}/.lock") == b""
    assert ours == theirs


def on_disk(disk: Path) -> dict[str, bytes]:
    assert (disk / ".mirror").exists()
    return {str(path.relative_to(disk)): content for path, (content, _) in snapshot(disk).items()}


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_mirror_goes_on_elsewhere_with_the_same_bits(devices, mirror, held, disk, machines, tmp_path: Path):
    first, second = machines
    whole = tmp_path / "whole"
    whole.mkdir()
    run(f"{LONG} {devices}", whole)
    killed_at_28(f"{held}/{LONG} {devices} {at(disk)}", first, lambda: newest(disk))
    shutil.rmtree(first)
    done = run(f"{mirror}/{LONG} {devices} {at(disk)}", second)
    assert f"{run_dir(second).name} comes from file://{disk}\n" in done.stdout
    assert f"resumed from {run_dir(second).name}/checkpoints/" in done.stdout
    assert_same_run(second, whole)
    assert_same_best(second, whole)
    assert_mirrored(second, on_disk(disk))


UPLOADS = {
    "open config.yaml.tmp 1": None,
    "open best.ckpt.tmp 1": 0,
    "os.rename best.ckpt.tmp 1": 0,
    "os.rename step-00000002.ckpt.tmp 1": 2,
    "os.rename summary.json.tmp 1": 2,
    "os.rename metrics.csv.tmp 2": 2,
    "os.rename step-00000004.ckpt.tmp 1": 2,
    "os.remove step-00000002.ckpt 1": 4,
    "os.rename summary.json.tmp 2": 4,
}


@pytest.mark.parametrize("change, step", UPLOADS.items())
def test_mirror_kill_in_an_upload_costs_no_checkpoint_that_is_there(
    change: str, step: int | None, mirror: Path, paced: Path, two_saves: Path, disk: Path, machines: list[Path]
):
    """What has its name there is whole, the newest is taken, and has its rows."""
    first, second = machines
    kill_before(change, f"{paced}/{TWO_SAVES} {at(disk)}", first, first.parent, where="/disk/")
    shutil.rmtree(first)
    there = [torch.load(path, weights_only=True)["step"] for path in disk.glob("*/checkpoints/*.ckpt")]
    assert max(there, default=0) == (step or 0)
    done = call(f"{mirror}/{TWO_SAVES} {at(disk)}", second)
    assert ("comes from" in done.stdout) == (step is not None)
    assert ("resumed from" in done.stdout) == (step == 2)  # with 4 there is no step left
    assert_same_run(second, two_saves)
    assert_same_best(second, two_saves)
    assert not [*run_dir(second).rglob("*.tmp")]


def test_mirror_kill_while_a_run_is_fetched_leaves_no_part_of_it(mirror, two_saves, disk, machines):
    first, second = machines
    call(f"{mirror}/{TWO_SAVES} {at(disk)}", first)
    kill_before("open model.pt 1", f"{mirror}/{TWO_SAVES} {at(disk)}", second, first.parent, where="/second/")
    assert not [*second.glob("2*")]
    assert "finished after 4 of 4 steps" in call(f"{mirror}/{TWO_SAVES} {at(disk)}", second).stdout
    assert_same_run(second, two_saves)
    assert os.listdir(second) == [run_dir(first).name]


def test_mirror_finished_run_that_is_made_longer_is_not_taken_for_a_finished_one(mirror, two_saves, disk, machines):
    """Killed when its first new checkpoint is there, and its summary is not."""
    first, second = machines
    stays = "import time\nwhile step == 4:\n    time.sleep(0.02)"
    killed = insert_after(with_recipe("mirror", first.parent / "killed"), "step is done", stays)
    call(f"{mirror}/{TWO_SAVES} --max_steps 2 {at(disk)}", first)
    options = f"{killed}/{TWO_SAVES} --checkpoint_interval 1 {at(disk)}"
    kill_before("os.rename summary.json.tmp 1", options, first, first.parent, where="/disk/")
    shutil.rmtree(first)
    call(f"{mirror}/{TWO_SAVES} {at(disk)}", second)
    assert_same_run(second, two_saves)


@pytest.mark.night
def test_mirror_processes_of_torchrun_get_a_run_back_once(mirror: Path, held: Path, disk: Path, machines: list[Path]):
    first, second = machines
    killed_at_28(f"{held}/{LONG} {ON_2} {at(disk)}", first, lambda: newest(disk))
    shutil.rmtree(first)
    command = f"{TORCHRUN} {mirror}/{LONG} {ON_2} --epochs 5 {at(disk)}"
    env = os.environ | NO_SHARED_STORE
    done = subprocess.run(command.split(), cwd=second, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("comes from") == 1 and "finished after 40 of 40 steps" in done.stdout
    assert len(os.listdir(second)) == 1


def test_mirror_disk_that_is_behind_gets_the_run_of_the_mirror(mirror, held, disk, machines, whole: Path):
    """As of a machine that comes back after another one has gone on. What it had is kept under another name."""
    first, second = machines
    killed_at_28(f"{held}/{LONG} {at(disk)}", first, lambda: newest(disk))
    call(f"{mirror}/{LONG} {at(disk)}", second)
    name = run_dir(second).name
    done = call(f"{mirror}/{LONG} {at(disk)}", first)
    assert f"{name}.28-steps" in done.stdout and "finished after 80 of 80" in done.stdout
    assert {path.name for path in first.iterdir()} == {name, f"{name}.28-steps"}
    assert_same_run(first, whole)
    assert_same_run(second, whole)


def test_mirror_run_that_is_newer_on_this_disk_is_left_alone(mirror: Path, disk: Path, cwd: Path, tmp_path: Path):
    """One of more steps, and one of a later date."""
    call(f"{mirror}/{TWO_SAVES} {at(disk)}", cwd)
    older = Path(shutil.copytree(disk, tmp_path / "older"))
    call(f"{mirror}/{TWO_SAVES} {at(disk)} --max_steps 8", cwd)
    before = without_locks(cwd)
    done = call(f"{mirror}/{TWO_SAVES} {at(older)} --max_steps 8", cwd)
    assert "finished after 8 of 8 steps" in done.stdout and before == without_locks(cwd)
    name = run_dir(cwd).name
    run_dir(cwd).rename(cwd / f"2999{name[4:]}")
    assert "comes from" not in call(f"{mirror}/{TWO_SAVES} {at(older)} --max_steps 8", cwd).stdout


def test_mirror_loop_does_not_wait_for_an_upload(disk: Path, cwd: Path, tmp_path: Path):
    """The mirror is kept from its first file until the loop is at its end."""
    program = with_recipe("mirror", tmp_path / "program")
    insert_after(program, "step is done", f'if step == {STEPS - 1}:\n    __import__("pathlib").Path("far").touch()')
    begin = "        new = stamp(file)\n"
    with_text(program, "mirror.py", ("import os\n", "import os\nimport time\n"), (begin, SLOW_MIRROR + begin))
    run(f"{program}/{LONG} {at(disk)}", cwd)
    (cwd / "far").unlink()
    assert_mirrored(cwd, on_disk(disk))


@pytest.mark.parametrize("devices", ["", ON_2])
def test_mirror_run_that_is_stopped_waits_for_its_last_upload(devices: str, mirror: Path, disk: Path, cwd: Path):
    assert_stopped_and_saved(interrupt(f"{mirror}/{LONG} {devices} {at(disk)}", cwd, terminate), cwd)
    assert_mirrored(cwd, on_disk(disk))
    assert last_summary(disk)["state"] == "interrupted"


def test_mirror_has_no_rehearsal(mirror: Path, disk: Path, cwd: Path):
    call(f"{mirror}/train.py {SMALL} --fast_run --mirror file://{disk}", cwd)
    assert os.listdir(disk) == [".mirror"] and os.listdir(cwd) == []


def test_mirror_disk_that_goes_away_costs_the_run_nothing(held: Path, disk: Path, cwd: Path, whole: Path, tmp_path):
    """A file lies in its place. What it had stays whole."""
    away = tmp_path / "away"
    process = start(f"{held}/{LONG} {at(disk)}", cwd)
    wait_for(lambda: process.poll() is not None or newest(disk) == 28)
    disk.rename(away)
    disk.touch()
    out = end_of(process, cwd)
    assert out.count("the run goes on, and is mirrored later") == 1
    assert f"--mirror file://{disk}" in out.splitlines()[-1] and f"{run_dir(cwd).name} alone" in out.splitlines()[-1]
    assert_same_run(cwd, whole)
    assert_whole_checkpoints(away)
    assert newest(away) == 28


# ---- mirror: a server


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

    def contents(self) -> dict[str, bytes]:
        files = self.files()
        return {path.removeprefix("bucket/runs/"): files.cat_file(path) for path in files.find("bucket/runs")}

    def newest(self) -> int:
        """The step of the newest checkpoint that is there, 0 if there is none."""
        paths = self.files().glob("bucket/runs/*/checkpoints/step-*.ckpt")
        return max((int(path[-13:-5]) for path in paths), default=0)

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


@needs_s3
def test_mirror_run_on_a_server_goes_on_elsewhere_with_the_same_bits(mirror, held, server, machines, whole: Path):
    first, second = machines
    server.start()
    options = f"--resume auto --mirror {server.address}"
    killed_at_28(f"{held}/{LONG} {options}", first, server.newest, **server.env)
    shutil.rmtree(first)
    run(f"{mirror}/{LONG} {options}", second, **server.env)
    assert_same_run(second, whole)
    assert_same_best(second, whole)
    assert_mirrored(second, server.contents())


@needs_s3
@pytest.mark.night
def test_mirror_server_that_comes_after_the_start_gets_the_run(held: Path, server: Server, cwd: Path):
    process = start(f"{held}/{LONG} --mirror {server.address}", cwd, **server.env)
    wait_for(lambda: process.poll() is not None or newest(cwd) == 28)
    server.start()
    wait_for(lambda: process.poll() is not None or server.newest() == 28)
    out = end_of(process, cwd)
    assert out.count("the run goes on, and is mirrored later") == 1 and "alone" not in out
    assert_mirrored(cwd, server.contents())


@needs_s3
def test_mirror_server_that_dies_and_comes_back_gets_the_run_again(held: Path, server: Server, cwd: Path):
    """All of it: what it had is gone. It is told once, however often it is tried."""
    server.start()
    process = start(f"{held}/{LONG} --mirror {server.address}", cwd, **server.env)
    wait_for(lambda: process.poll() is not None or server.newest() == 28)
    server.kill()
    (cwd / "go on 32").touch()
    for line in process.stdout:
        if "the run goes on, and is mirrored later" in line:
            break
    server.start()
    wait_for(lambda: process.poll() is not None or server.newest() == 60)
    out = end_of(process, cwd)
    assert "fails" not in out and "alone" not in out and f"--mirror {server.address} has the run again\n" in out
    assert_mirrored(cwd, server.contents())


@needs_s3
@pytest.mark.night
def test_mirror_server_that_stays_away_costs_the_run_nothing(mirror, server: Server, machines, whole: Path):
    first, second = machines
    done = run(f"{mirror}/{LONG} --mirror {server.address}", first, **server.env)
    assert done.stdout.count("the run goes on") == 1
    assert done.stdout.endswith(f"{run_dir(first).name} alone\n")
    assert_same_run(first, whole)
    command = f"{mirror}/{LONG} --mirror {server.address} --resume auto"
    assert "the newest run of this disk is taken" in run(command, first, **server.env).stdout
    (error,) = run(command, second, code=2, **server.env).stderr.splitlines()
    assert f"--mirror {server.address}" in error and os.listdir(second) == []


@needs_s3
def test_mirror_server_with_wrong_credentials_is_told_before_the_first_step(mirror: Path, server: Server, cwd: Path):
    """And a bucket that is missing."""
    server.start(bucket=False)
    command = f"{mirror}/train.py {SMALL} --mirror {server.address}"
    told = f"train.py: error: --mirror {server.address}: "
    assert run(command, cwd, code=2, **server.env).stderr.startswith(f"{told}FileNotFoundError: ")
    server.kill()
    server.start(bucket=False, INITIAL_NO_AUTH_ACTION_COUNT="0")
    without = server.env | {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    for resume, env, kind in (
        ("", server.env, "PermissionError"),
        ("--resume auto", server.env, "PermissionError"),
        ("", without, "NoCredentialsError"),
    ):
        (error,) = run(f"{command} {resume}", cwd, code=2, **env).stderr.splitlines()
        assert error.startswith(f"{told}{kind}: ")
    assert os.listdir(cwd) == []


# ---- mlflow

TO_MLFLOW = (
    "train.py --accelerator cpu --epochs 20 --limit_train_batches 8 --limit_val_batches 2 --width 4 "
    "--num_sanity_val_steps 1 --log_interval 1 --checkpoint_interval 40 --logger_name csv mlflow"
)
SMALL_TO_MLFLOW = f"train.py {SMALL} --logger_name csv mlflow"


@pytest.fixture(autouse=True, scope="module")
def no_tracking():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


def client_of(path: Path):
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{path}")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A store without runs, which takes MLflow seconds to make."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    client_of(path)
    return path


@pytest.fixture
def place(store: Path, cwd: Path) -> Path:
    shutil.copy(store, cwd)
    return cwd


def runs_in(cwd: Path, project: str = "fabric-template") -> list:
    client = client_of(cwd / "mlflow.db")
    return client.search_runs([client.get_experiment_by_name(project).experiment_id])


class Stored:
    """The one run in the store of a folder."""

    def __init__(self, cwd: Path, project: str = "fabric-template"):
        (run,) = runs_in(cwd, project)
        self.id, self.name, self.status = run.info.run_id, run.info.run_name, run.info.status
        self.options, self.tags = run.data.params, run.data.tags
        client = client_of(cwd / "mlflow.db")
        self.curves = {
            name: [(value.step, value.value) for value in client.get_metric_history(self.id, name)]
            for name in run.data.metrics
        }


def assert_same_curves(cwd: Path) -> None:
    """As in metrics.csv, in every bit, in the order of the steps, each once; of what is measured, the steps."""
    found = history(cwd)
    names = {name for row in found for name in row} - {"step"}
    expected = {name: [(int(row["step"]), float(row[name])) for row in found if row[name]] for name in names}
    curves = Stored(cwd).curves
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


@needs_mlflow
@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_mlflow_killed_and_resumed_run_has_each_row_once(devices: str, mlflow: Path, place: Path):
    """The rows between the checkpoint and the kill are of the killed process; those of csv are of the resumed one."""
    last = kill_between(f"{mlflow}/{TO_MLFLOW} {devices}", place)
    killed = Stored(place)
    assert killed.status == "RUNNING" and killed.curves["train/loss"][-1][0] in (last, last - 1)
    run(f"{mlflow}/train.py --resume auto", place)
    assert_same_curves(place)
    resumed = Stored(place)
    assert (resumed.id, resumed.name, resumed.status) == (killed.id, run_dir(place).name, "FINISHED")
    assert [step for step, _ in resumed.curves["train/loss"]] == [*range(1, 161)]
    count = len(killed.curves["train/loss"])
    for name in ("train/loss", *MEASURED):
        assert resumed.curves[name][:count] == killed.curves[name]


@needs_mlflow
def test_mlflow_has_the_options_as_parameters_and_a_changed_one_as_a_tag(mlflow: Path, place: Path):
    call(f"{mlflow}/{SMALL_TO_MLFLOW} --comment a-note --project mine", place)
    first = Stored(place, "mine")
    assert first.options.items() >= {"width": "4", "base_lr": "0.004", "max_steps": "0"}.items()
    assert first.options.keys() == values_of(TrainConfig()).keys()
    assert first.tags["mlflow.note.content"] == "a-note"
    call(f"{mlflow}/train.py --resume auto --epochs 6", place)
    second = Stored(place, "mine")
    assert (second.id, second.status, second.options) == (first.id, "FINISHED", first.options)
    assert second.tags["resumed_with.epochs"] == "6.0" and "resumed_with.width" not in second.tags
    assert [step for step, _ in second.curves["val/loss"]] == [4, 8, 12, 16, 20, 24]
    call(f"{mlflow}/train.py --resume auto --base_lr 0.002 --epochs 7", place)
    call(f"{mlflow}/train.py --resume auto --base_lr 0.004 --epochs 8", place)
    assert Stored(place, "mine").tags["resumed_with.base_lr"] == "0.004"  # not what it was in between


@needs_mlflow
def test_mlflow_run_that_its_store_does_not_have_is_told(mlflow: Path, place: Path):
    run(f"{mlflow}/{SMALL_TO_MLFLOW}", place)
    (place / "mlflow.db").unlink()
    error = run(f"{mlflow}/train.py --resume auto --epochs 6", place, code=1).stderr
    assert re.search(r"^train.py: error: \S+/logs/mlflow_id: ", error, re.MULTILINE)
    (run_dir(place) / "logs" / "mlflow_id").unlink()
    run(f"{mlflow}/train.py --resume auto --epochs 6", place)
    assert Stored(place).status == "FINISHED"


@needs_mlflow
def test_mlflow_state_is_that_of_the_run(mlflow: Path, place: Path):
    """Stopped by a signal, then resumed and failed, then resumed and finished."""
    command = f"{mlflow}/{TO_MLFLOW} --checkpoint_interval 2"
    assert interrupt(command, place, terminate).returncode == PREEMPTED
    assert (last_summary(place)["state"], Stored(place).status) == ("interrupted", "KILLED")
    run(f"{mlflow}/train.py --resume auto --base_lr 1e30", place, code=1)
    assert (last_summary(place)["state"], Stored(place).status) == ("failed", "FAILED")
    run(f"{mlflow}/train.py --resume auto --base_lr 4e-3", place)
    assert (last_summary(place)["state"], Stored(place).status) == ("finished", "FINISHED")


@needs_mlflow
def test_mlflow_has_no_rehearsal(mlflow: Path, place: Path, monkeypatch):
    """A server would keep its runs, of directories that are gone."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
    assert "finished after 4 of 4 steps" in call(f"{mlflow}/{SMALL_TO_MLFLOW} --fast_run", place).stdout
    client = client_of(place / "mlflow.db")
    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert client.search_runs(["0"]) == [] and os.listdir(place) == ["mlflow.db"]


@needs_mlflow
def test_mlflow_two_runs_at_once_make_one_store(mlflow: Path, cwd: Path):
    """MLflow alone would leave one that it refuses. A name may have quotes."""
    names = ["it's", 'a"b']
    for process in [start(f"{mlflow}/{SMALL_TO_MLFLOW} --out_dir {name}", cwd) for name in names]:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    run(f"{mlflow}/train.py --resume auto --out_dir it's --epochs 6", cwd)
    found = {run.info.run_name: run.info.status for run in runs_in(cwd)}
    assert found == {run_dir(cwd, name).name: "FINISHED" for name in names}
    assert {*os.listdir(cwd)} == {*found, "mlflow.db"}
    folders = {path.name for path in run_dir(cwd, "it's").iterdir() if path.is_dir()}
    assert folders == {"checkpoints", "logs", "provenance"}


@needs_mlflow
def test_mlflow_directories_of_the_same_name_are_different_runs(mlflow: Path, place: Path, monkeypatch):
    """In two --root_dir, on one store; also where one was moved."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
    for root in ("a", "b"):
        (place / root).mkdir()
        call(f"{mlflow}/{SMALL_TO_MLFLOW} --max_steps 8", place / root)
    name = run_dir(place / "a").name
    (place / "c").mkdir()
    run_dir(place / "b").rename(place / "c" / name)
    for root in ("a", "c"):
        call(f"{mlflow}/train.py --resume {place / root / name} --max_steps 12", place)
    client, found = client_of(place / "mlflow.db"), runs_in(place)
    assert len(found) == 2
    for one in found:
        assert [value.step for value in client.get_metric_history(one.info.run_id, "val/loss")] == [4, 8, 12]


@needs_mlflow
def test_mlflow_kill_while_the_store_is_made_leaves_none(mlflow: Path, cwd: Path):
    process = start(f"{mlflow}/{SMALL_TO_MLFLOW}", cwd)
    wait_for(lambda: process.poll() is not None or [*cwd.glob("*/*/new.db")])
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (cwd / "mlflow.db").exists()
    run(f"{mlflow}/train.py --resume auto", cwd)
    assert Stored(cwd).status == "FINISHED"


@needs_mlflow
def test_mlflow_other_characters_in_a_name_are_replaced(place: Path, program: Path):
    replace(with_recipe("mlflow", program), "metrics", '{"accuracy": accuracy, "acc@1 (%)": accuracy.clone()}')
    call(f"{program}/{SMALL_TO_MLFLOW}", place)
    curves = Stored(place).curves
    assert curves["val/acc-1 ---"] == curves["val/accuracy"]


@needs_mlflow
def test_mlflow_logger_of_lightning_works_in_two_lines(place: Path, program: Path):
    """That of docs/evaluation.md, after `run.start`, without the recipe."""
    page = (REPO / "docs" / "evaluation.md").read_text()
    (lines,) = re.findall(r"^```python\n([^`]*MLFlowLogger[^`]*)^```$", page, re.MULTILINE)
    started = "            run.start(values, sanity_results)\n"
    lines = textwrap.indent(textwrap.dedent(lines), " " * 12)
    with_text(copy_programs(program), "train.py", (started, started + lines))
    call(f"{program}/train.py {SMALL} --logger_name csv", place)
    assert_same_curves(place)
    assert (Stored(place).name, Stored(place).status) == (run_dir(place).name, "FINISHED")
    call(f"{program}/train.py --resume auto --epochs 6", place)
    client, found = client_of(place / "mlflow.db"), runs_in(place)
    assert [run.info.status for run in found] == ["FINISHED", "FINISHED"]  # a run of its own for each start
    assert [client.get_metric_history(run.info.run_id, "val/loss")[0].step for run in found] == [24, 4]
