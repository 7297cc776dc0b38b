"""What breaks a run breaks it with a clear last line, costs nothing that was saved, and a resume repairs it.

`python tests/template/faults.py` is the long version: hundreds of kills, and every fault in every place.
"""

import errno
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from edits import insert_after, insert_before
from helpers import (
    LONG,
    ON_2,
    SLOW,
    SMALL,
    TWO_SAVES,
    assert_same_best,
    assert_same_run,
    assert_told_by_ranks,
    assert_whole_checkpoints,
    call,
    copied,
    flip_a_bit,
    history,
    interrupt,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    set_running,
    start,
    wait_for,
    weights,
)
from killer import kill_before, remove_what_is_no_run

# Long enough for a fault that comes late.
LONGER = f"{LONG} --epochs 12"  # 96 steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Where a run of LONGER was never interrupted. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("whole")
    call(LONGER, cwd)
    return cwd


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Where one was killed in the middle of an epoch. To be copied."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(LONGER, cwd, kill_group).returncode == -signal.SIGKILL
    return cwd


# ---- a kill before a change of a file


def changes_on_the_disk(monkeypatch) -> list[str]:
    """A list that gets the names of the files that are synced, and of those that are renamed, as it happens."""
    done = []
    fsync, rename = os.fsync, os.replace

    def synced(file: int) -> None:
        fsync(file)
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    def renamed(old, new) -> None:
        rename(old, new)
        done.append(f"renamed {Path(new).name}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return done


@pytest.mark.parametrize("link", [None, "logs", "logs/csv"])
def test_what_was_logged_is_on_the_disk_before_a_checkpoint_has_its_name(link: str | None, monkeypatch, tmp_path):
    """Otherwise a resume from it would go on behind rows that a power failure has taken. Also where a folder of the
    logs is a link to another disk."""
    if link:
        call(f"{TWO_SAVES} tensorboard --max_steps 1", tmp_path)
        folder = run_dir(tmp_path) / link
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    done = changes_on_the_disk(monkeypatch)
    call(f"{TWO_SAVES} tensorboard --resume auto", tmp_path)
    saves = [place for place, name in enumerate(done) if re.fullmatch(r"renamed step-.*\.ckpt", name)]
    assert len(saves) == 3  # the last one twice
    for first, last in zip([0, *saves], saves, strict=False):
        before = done[first:last]
        assert "metrics.csv" in before and any(name.startswith("events.out") for name in before)


@pytest.mark.parametrize(
    "change",
    [
        "os.rename config.yaml 1",
        "os.rename metrics.csv 1",
        "os.rename step-00000002.ckpt.tmp 1",
        "os.link step-00000002.ckpt 1",
        "os.rename best.tmp 1",
    ],
)
def test_a_kill_between_two_changes_of_files_costs_nothing(two_saves, tmp_path, change: str):
    """Also not the best: a step whose checkpoint is not the best yet is validated again."""
    cwd = tmp_path / "run"
    cwd.mkdir()
    changes = kill_before(change, TWO_SAVES, cwd, tmp_path)
    assert changes[-1].startswith(change.rpartition(" ")[0])
    call(f"{TWO_SAVES} --resume auto", cwd)
    assert all(re.fullmatch(r"\d{8}-\d{6}-train_out", path.name) for path in cwd.iterdir())
    remove_what_is_no_run(cwd)
    assert_same_run(cwd, two_saves)
    assert_same_best(cwd, two_saves)
    assert not [*run_dir(cwd).glob("**/*.tmp")]


MODEL, SUMMARY, CONFIG = "os.rename model.pt 1", "os.rename summary.json 1", "os.rename config.yaml 1"


@pytest.mark.parametrize("change", [MODEL, f"{MODEL}, {SUMMARY}"])
@pytest.mark.parametrize("is_at_its_end", [False, True], ids=["", "no step left"])
def test_a_run_is_finished_once_its_weights_have_their_name(two_saves, tmp_path, is_at_its_end: bool, change: str):
    """Killed before that, or after it and before the summary says so, the next resume writes both again."""
    cwd = tmp_path / "run"
    cwd.mkdir()
    if is_at_its_end:
        shutil.copytree(two_saves, cwd, dirs_exist_ok=True)
        set_running(run_dir(cwd))
        (run_dir(cwd) / "model.pt").unlink()
    kill_before(change, f"{TWO_SAVES} --resume auto", cwd, tmp_path)
    assert (run_dir(cwd) / "model.pt").exists() == (change != MODEL)
    assert last_summary(cwd)["state"] == "running"
    (run_dir(cwd) / "model.pt").unlink(missing_ok=True)
    assert "finished after 4 of 4 steps" in call(f"{TWO_SAVES} --resume auto", cwd).stdout
    assert last_summary(cwd)["state"] == "finished"
    assert_same_run(cwd, two_saves)


@pytest.mark.parametrize("change, steps", [(CONFIG, 4), (f"{CONFIG}, {SUMMARY}", 8)])
def test_a_run_that_is_made_longer_is_unfinished_before_it_has_its_new_config(two_saves, tmp_path, change, steps):
    """Killed in between, it would otherwise be a finished one of more steps than it has made."""
    cwd = Path(shutil.copytree(two_saves, tmp_path / "run"))
    kill_before(change, f"{TWO_SAVES} --resume auto --max_steps 8", cwd, tmp_path)
    assert last_summary(cwd)["state"] == "running"
    assert f"max_steps: {steps}\n" in (run_dir(cwd) / "config.yaml").read_text()
    torch.testing.assert_close(weights(cwd), weights(two_saves), atol=0, rtol=0)
    assert f"finished after {steps} of {steps} steps" in call("train.py --resume auto", cwd).stdout


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff", None])
def test_a_summary_that_cannot_be_read_is_told_in_a_line(whole, tmp_path, content: bytes | None):
    """The run is not known to be finished, so it is finished again."""
    cwd = copied(whole, tmp_path)
    path = run_dir(cwd) / "summary.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "accuracy" in call("test.py --accelerator cpu", cwd).stdout
    printed = call("train.py --resume auto", cwd).stdout
    (line,) = (line for line in printed.splitlines() if "summary.json" in line)
    told = f"{path.relative_to(cwd)} cannot be read, so the run is not known to be finished: "
    assert line.startswith(told) and len(line) > len(told)
    assert "finished after 96 of 96 steps" in printed
    assert_same_run(cwd, whole)
    assert "finished after 96 of 96 steps" in call("train.py --resume auto", cwd).stdout


def test_without_hard_links_the_best_checkpoint_is_that_of_its_step(two_saves, tmp_path, monkeypatch):
    """As on file systems for memory sticks, and some of networks."""

    def not_supported(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", not_supported)
    call(TWO_SAVES, tmp_path)
    last = run_dir(tmp_path) / "checkpoints" / "step-00000004.ckpt"
    assert sorted(last.parent.iterdir()) == [last.with_name("best.ckpt"), last]
    last.unlink()
    set_running(run_dir(tmp_path))
    assert "best.ckpt" in call("train.py --resume auto", tmp_path).stdout
    assert_same_run(tmp_path, two_saves)
    assert_same_best(tmp_path, two_saves)


def test_a_row_of_the_log_that_was_cut_is_written_again(whole, tmp_path):
    """As a full disk may cut it: of the row of step 96 there is a 9, and that is no row of step 9."""
    cwd = copied(whole, tmp_path)
    set_running(run_dir(cwd))
    for name in ("step-00000096.ckpt", "best.ckpt"):  # one file: the last step is the best
        (run_dir(cwd) / "checkpoints" / name).unlink()
    log = run_dir(cwd) / "logs" / "csv" / "metrics.csv"
    *lines, last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines) + last[:1])
    call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


def with_edited_log(killed: Path, tmp_path: Path, edit) -> tuple[Path, Path]:
    """A copy of the killed run with another metrics.csv; and that file."""
    cwd = copied(killed, tmp_path)
    log = run_dir(cwd) / "logs" / "csv" / "metrics.csv"
    log.write_bytes(edit(log.read_bytes()))
    return cwd, log


UNREADABLE = {
    "semicolons": lambda log: log.replace(b",", b";").replace(b".", b","),
    "line above": lambda log: b"My best run\n" + log,
    "line of cells above": lambda log: b"My best run" + b"," * log.partition(b"\n")[0].count(b",") + b"\n" + log,
    "line between": lambda log: log.replace(b"\n", b"\nthe best,\n", 1),
    "zero bytes between": lambda log: log.replace(b"\n", b"\n" + bytes(300_000) + b"\n", 1),
    "UTF-16": lambda log: log.decode().encode("utf-16"),
    "other header": lambda log: log.replace(b"step", b"number", 1),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_log_that_cannot_be_read_ends_the_resume_and_stays_as_it_is(whole, killed, tmp_path, name: str):
    """Once it is moved away, a new one begins."""
    cwd, log = with_edited_log(killed, tmp_path, UNREADABLE[name])
    content, saved = log.read_bytes(), newest(cwd)
    error = call("train.py --resume auto", cwd, code=1).stderr
    assert re.fullmatch(
        rf"train.py: error: {log.relative_to(cwd)} cannot be read \(.+\): move it away, and resume again.*\n", error
    )
    assert log.read_bytes() == content and newest(cwd) == saved
    log.rename(cwd / "moved.csv")
    call("train.py --resume auto", cwd)
    later = history(cwd)
    assert later == history(whole)[-len(later) :] != []
    torch.testing.assert_close(weights(cwd), weights(whole), atol=0, rtol=0)


def test_zero_bytes_at_the_end_of_the_log_cost_no_row(whole, killed, tmp_path):
    """A power failure may leave them."""
    cwd, log = with_edited_log(killed, tmp_path, lambda log: log + bytes(5000))
    call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)
    assert b"\0" not in log.read_bytes() and len([*log.parent.iterdir()]) == 1


# ---- forged checkpoints


DAMAGED = "cannot be read: it is damaged; another checkpoint may do"


class Forged:
    def __reduce__(self):
        return os.mkdir, ("code-was-run",)


def test_a_checkpoint_with_one_wrong_bit_is_not_evaluated(finished, tmp_path):
    """It would be loaded without a word: the bit is in a tensor."""
    damaged = Path(shutil.copy(finished / "checkpoints" / "best.ckpt", tmp_path / "damaged.ckpt"))
    flip_a_bit(damaged)
    torch.load(damaged, weights_only=True)
    error = call(f"test.py --out_dir {finished} --checkpoint {damaged}", tmp_path, code=1).stderr
    assert error == f"test.py: error: --checkpoint {damaged}: {damaged} {DAMAGED}\n"


@pytest.mark.parametrize("content", [b"", b"no file of torch.save", None])
def test_weights_that_are_damaged_are_named(finished, tmp_path, content: bytes | None):
    damaged, whole_file = tmp_path / "damaged.pt", (finished / "model.pt").read_bytes()
    damaged.write_bytes(whole_file[: len(whole_file) // 2] if content is None else content)
    error = call(f"test.py --out_dir {finished} --checkpoint {damaged}", tmp_path, code=1).stderr
    assert error == f"test.py: error: --checkpoint {damaged}: {damaged} {DAMAGED}\n"


def test_a_forged_checkpoint_runs_no_code(whole, killed, tmp_path):
    """Neither a file nor a directory of torch.distributed.checkpoint, whose .metadata is a pickle."""
    cwd = copied(killed, tmp_path)
    *_, file, directory = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))
    torch.save(torch.load(file, weights_only=True) | {"forged": Forged()}, file)
    directory.unlink()
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(Forged()))
    for path in (file, directory):
        error = call(f"test.py --out_dir train_out --checkpoint {path}", cwd, code=2 if path.is_dir() else 1).stderr
        assert "Traceback" not in error and f"--checkpoint {path}" in error
    done = call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)
    assert f"{file.name}: it is damaged" in done.stdout and f"{directory.name}: it is damaged" in done.stdout
    assert {path.name for path in file.parent.glob("*.damaged")} == {
        f"{file.name}.damaged",
        f"{directory.name}.damaged",
    }
    assert not (cwd / "code-was-run").exists()
    with pytest.raises(FileExistsError):  # the forgery is a good one
        (tmp_path / "code-was-run").mkdir()
        os.chdir(tmp_path)
        pickle.loads((directory.with_name(f"{directory.name}.damaged") / ".metadata").read_bytes())


# ---- no room, no memory

REFUSED = "the system refused to read or write the run"


def test_a_full_disk_costs_no_checkpoint(whole, tmp_path):
    def fill(process: subprocess.Popen) -> None:  # no file may grow beyond 5 kB
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5000, 5000))

    done = interrupt(LONGER, tmp_path, fill)
    assert done.returncode == 1
    note = f"the checkpoints are whole, continue with: python train.py --resume {run_dir(tmp_path).name}"
    assert done.stderr.splitlines()[-1] == f"train.py: error: {REFUSED}: [Errno 27] File too large; {note}"
    assert_whole_checkpoints(tmp_path)
    call("train.py --resume train_out", tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_disk_that_fills_up_within_a_checkpoint_is_told_by_the_words_of_the_system(tmp_path):
    """torch.save has others for it. The checkpoint is the only file of more than 100 kB."""
    process = start(f"train.py {SMALL} --width 64", tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert error == f"train.py: error: {REFUSED}: [Errno 27] File too large\n"
    assert not any(tmp_path.glob("*/checkpoints/*"))


def test_a_mistake_in_the_dataset_shows_its_traceback_and_its_words(tmp_path):
    """Also where a data worker met it: the worker has not died."""
    mistake = 'if self.shift and 7 in index:\n    raise ValueError("bad 7")'
    program = insert_after(tmp_path / "program", "fetch", mistake)
    error = call(f"{program}/train.py {SMALL} --limit_train_batches 1.0 --num_workers 1", tmp_path, code=1).stderr
    assert re.search(r'data.py", line \d+, in __getitems__\n +raise ValueError\("bad 7"\)\nValueError: bad 7\n', error)


IN_AN_EXCEPTION = """
try:
    open("cache.pt")
except FileNotFoundError:
    images.shapes
"""


@pytest.mark.parametrize(
    "point, mistake, name, told",
    [
        ("digits", '{}["images"]', "data.py", "KeyError: 'images'"),
        ("digits", "torch.ones(4).view(3)", "data.py", "RuntimeError: shape '[3]' is invalid"),
        ("digits", "raise AssertionError('no digits')", "data.py", "AssertionError: no digits"),
        ("fetch", "raise OSError('no image')", "data.py", "OSError: no image"),
        ("forward", "self.skip_connection(images)", "model.py", "AttributeError: 'Model' object has no"),
        ("forward", IN_AN_EXCEPTION, "model.py", "AttributeError: 'Tensor' object has no attribute 'shapes'"),
    ],
)
def test_a_mistake_in_the_code_is_taken_for_nothing_else(point: str, mistake: str, name: str, told: str, tmp_path):
    """Neither for a wrong --data_dir, nor for a fault of the system or the missing file that it had dealt with, nor for
    the death of another process."""
    program = insert_before(tmp_path / "program", point, mistake)
    error = call(f"{program}/train.py {SMALL}", tmp_path, code=1).stderr
    assert f'{program}/{name}", line' in error and error.splitlines()[-1].startswith(told)
    assert error.startswith("Traceback (most recent call last):\n")


def test_data_workers_that_cannot_all_be_started_end_the_run(tmp_path):
    process = start(f"train.py {SMALL} --num_workers 32", tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (48, 48))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1 and "\nOSError: [Errno 24] Too many open files\n" in error


def test_data_workers_end_in_order_also_without_a_validation(tmp_path):
    """A loader without batches must not take those of another for its own."""
    done = run(
        f"train.py {SMALL} --num_workers 2 --limit_val_batches 0 --monitor train/loss --monitor_mode min", tmp_path
    )
    assert "finished after 20 of 20 steps" in done.stdout and "error" not in done.stderr


def test_a_run_is_finished_once_its_weights_are_written(tmp_path):
    program = insert_before(tmp_path / "program", "final weights", "raise OSError('no room')")
    call(f"{program}/train.py {SMALL} --epochs 1", tmp_path, code=1)
    assert last_summary(tmp_path)["state"] == "failed"
    call("train.py --resume auto", tmp_path)
    assert last_summary(tmp_path)["state"] == "finished"


def test_parts_without_a_gradient_are_explained_on_several_processes(tmp_path):
    program = insert_before(tmp_path / "program", "layers", "self.unused = nn.Linear(2, 2)")
    error = run(f"{program}/train.py {SMALL} {ON_2}", tmp_path, code=1).stderr
    names = "model.unused.weight (2, 2), model.unused.bias (2,)"
    advice = "give --strategy ddp_find_unused_parameters_true, or requires_grad_(False) to what is never trained"
    assert_told_by_ranks(error, f"{names}: no gradient in the first step; if that is right, {advice}")
    assert [path.name for path in tmp_path.iterdir()] == ["program"]
    done = run(f"{program}/train.py {SMALL} {ON_2} --strategy ddp_find_unused_parameters_true", tmp_path)
    assert "did not find any unused parameters" not in done.stderr  # DDP's advice to take the option away again


def test_out_of_memory_names_the_option_that_helps(tmp_path):
    process = start("train.py --accelerator cpu --effective_batch_size 1200 --width 512", tmp_path)
    assert any("steps = " in line for line in process.stdout)  # the last line before the first step
    size = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(process.pid, resource.RLIMIT_AS, (size + 2**28, size + 2**28))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    *_, words, note = error.splitlines()
    assert "can't allocate memory" in words and 'train.py", line' in error
    assert note.startswith("out of memory: try a smaller --micro_batch_size, which keeps the effective batch size")


# ---- signals


SLEEPS = """
if step == 30:
    import pathlib, time

    pathlib.Path("slow").touch()
    time.sleep(1000)
"""


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    repo = insert_after(tmp_path / "repo", "step is done", SLEEPS)
    process = start(f"{repo}/{SLOW}", tmp_path)
    wait_for(lambda: process.poll() is not None or (tmp_path / "slow").exists())
    process.terminate()
    time.sleep(1)
    assert process.poll() is None  # it waits for the end of the step
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
