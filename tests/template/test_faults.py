"""What breaks a run breaks it with a clear last line, costs nothing that was saved, and a resume repairs it.

By day a sample of each fault, and at night 100 kills, full disks and damaged files: `python -m pytest -m ""
tests/template/test_faults.py`.
"""

import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from commands import LONG, ON_2, SLOW, SMALL, TWO_SAVES, call, folders, run, run_in, start
from comparisons import assert_same_best, assert_same_run
from edits import insert_after, insert_before
from killer import kill_before, remove_what_is_no_run
from mistakes import assert_one_line, refuses
from outputs import assert_whole_checkpoints, copied, flip_a_bit, history, last_summary, newest, run_dir, truncate
from processes import how_to_go_on, interrupt, kill_group, wait_for

night = pytest.mark.night
# Long enough for a dozen of kills: 960 steps, each second one is saved and logged.
STORM = f"{LONG} --epochs 120 --micro_batch_size 32 --checkpoint_interval 2 --log_interval 2"


def assert_same(cwd: Path, other: Path) -> None:
    """All is the same in both, but for empty directories that a kill has left in the first."""
    assert all(re.fullmatch(r"\d{8}-\d{6}-train_out", path.name) for path in cwd.iterdir())
    remove_what_is_no_run(cwd)
    assert_same_run(cwd, other)
    assert_same_best(cwd, other)
    assert not [*run_dir(cwd).rglob("*.tmp")]
    assert_whole_checkpoints(cwd)


# ---- kills and signals


@night
@pytest.mark.parametrize(
    "options",
    ["", "--num_workers 2", "--precision bf16-mixed --micro_batch_size 16", "--early_stopping_patience 80",
     "--logger_name csv tensorboard", ON_2, f"{ON_2} --num_workers 2",
     "--devices 3 --strategy ddp --effective_batch_size 96"],
)  # fmt: skip
def test_a_storm_of_kills(options: str, tmp_path):
    """Thirteen, each at a random moment of the start-up or of the training."""
    alone, cwd = folders(tmp_path, "alone", "killed")
    run(f"{STORM} {options}", alone)
    rng = random.Random(options)
    codes = []
    for _ in range(13):
        process = start(f"{STORM} {options} --resume auto", cwd)
        if rng.random() > 0.15:
            step = newest(cwd)
            wait_for(lambda: process.poll() is not None or newest(cwd) > step)  # noqa: B023
        time.sleep(rng.uniform(0, 1))
        with suppress(ProcessLookupError):
            kill_group(process)
        process.communicate(timeout=300)
        codes.append(process.returncode)
    assert codes.count(-signal.SIGKILL) > 5 and {*codes} <= {-signal.SIGKILL, 0}
    run(f"{STORM} {options} --resume auto", cwd)
    assert_same(cwd, alone)


CHANGES = ["os.rename config.yaml 1", "os.rename metrics.csv 1", "os.rename step-00000002.ckpt.tmp 1",
           "os.link step-00000002.ckpt 1", "os.rename best.tmp 1", "os.rename model.pt.tmp 1",
           "os.rename model.pt.tmp 1, os.rename summary.json.tmp 1"]  # fmt: skip
# The best is the first validation, after step 4, which is not saved otherwise: best.ckpt is the only one of it.
BEST_ALONE = "--max_steps 8 --checkpoint_interval 3 --val_interval 4 --monitor_mode min"
BEGUN = [
    ("", ""),
    ("os.rename step-00000002.ckpt.tmp 1, open summary.json 1", ""),
    ("os.link step-00000002.ckpt 1", ""),
    ("os.rename best.ckpt.tmp 1, open summary.json 1", BEST_ALONE),
]


@pytest.mark.parametrize(
    "begun, options, change",
    [*(("", "", change) for change in CHANGES), *(pytest.param(*each, "", marks=night) for each in BEGUN)],
)
def test_a_kill_between_two_changes_of_files_costs_nothing(two_saves, tmp_path, begun: str, options: str, change: str):
    """Also not the best: a step whose checkpoint is not the best yet is validated again. At night before each change
    that a new run makes, or a resume of one that was killed in its first save, after it, or after that of the best."""
    command, first = f"{TWO_SAVES} {options} --resume auto", tmp_path / "first"
    alone = run_in(tmp_path / "alone", command) if options else two_saves
    first.mkdir()
    if begun:
        kill_before(begun, command, first, tmp_path)
    changes = [change]
    if not change:
        counted = Path(shutil.copytree(first, tmp_path / "counted"))
        changes = [*range(1, len(kill_before(0, command, counted, tmp_path)) + 1)]
    for number, each in enumerate(changes):
        cwd = Path(shutil.copytree(first, tmp_path / str(number)))
        kill_before(each, command, cwd, tmp_path)
        # At night in a process of its own: what that of the tests has imported would be source files of the run.
        (call if change else run)(command, cwd)
        assert_same(cwd, alone)


def test_a_run_that_is_made_longer_is_unfinished_before_it_has_its_new_config(two_saves, tmp_path):
    """Killed in between, it would otherwise be a finished one of more steps than it has made."""
    cwd = copied(two_saves, tmp_path)
    change = "os.rename config.yaml 1, os.rename summary.json 1"
    kill_before(change, f"{TWO_SAVES} --resume auto --max_steps 8", cwd, tmp_path)
    assert last_summary(cwd)["state"] == "running"
    assert "max_steps: 8\n" in (run_dir(cwd) / "config.yaml").read_text()
    assert "finished after 8 of 8 steps" in call("train.py --resume auto", cwd).stdout


def test_what_was_logged_is_on_the_disk_before_a_checkpoint_has_its_name(monkeypatch, tmp_path):
    """Otherwise a resume from it would go on behind rows that a power failure has taken."""
    done, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda old, new: rename(old, new) or done.append(f"renamed {new}"))
    call(f"{TWO_SAVES} tensorboard", tmp_path)
    saves = [place for place, name in enumerate(done) if re.fullmatch(r"renamed .*/step-.*\.ckpt", name)]
    assert len(saves) == 3  # the last one twice
    for first, last in zip([0, *saves], saves, strict=False):
        names = {Path(name).name[:10] for name in done[first:last]}
        assert {"metrics.cs", "events.out"} <= names


def test_a_second_ctrl_c_ends_at_once(program, cwd):
    """Or the first one after another signal."""
    insert_after(program, "step is done", 'print("asleep", flush=True)\n__import__("time").sleep(1000)')
    process = start(f"{program / SLOW}", cwd)
    assert any(line == "asleep\n" for line in process.stdout)
    process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    assert process.poll() is None  # it waits for the end of the step
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT


# ---- damaged files


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", None])
def test_a_summary_that_cannot_be_read_is_told_in_a_line(whole, tmp_path, content: bytes | None):
    """The run is not known to be finished, so it is finished again."""
    cwd = copied(whole, tmp_path)
    path = run_dir(cwd) / "summary.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert "accuracy" in call("test.py --accelerator cpu", cwd).stdout
    printed = call("train.py --resume auto", cwd).stdout
    (line,) = (line for line in printed.splitlines() if "summary.json" in line)
    assert re.match(rf"{path.relative_to(cwd)} cannot be read, .*not known to be finished: .", line)
    assert "finished after 80 of 80 steps" in printed
    assert_same_run(cwd, whole)
    assert "summary.json" not in call("train.py --resume auto", cwd).stdout


@pytest.mark.parametrize(
    "damage",
    [
        lambda log: log.replace(b",", b";").replace(b".", b","),
        lambda log: log.replace(b"\n", b"\nthe best,\n", 1),
        lambda log: log.replace(b"\n", b"\n" + bytes(300_000) + b"\n", 1),
    ],
    ids=["semicolons", "line between", "zero bytes between"],
)
def test_a_log_that_cannot_be_read_ends_the_resume_and_stays_as_it_is(whole, killed, tmp_path, damage):
    """Once it is moved away, a new one begins."""
    cwd = copied(killed, tmp_path)
    log = run_dir(cwd) / "logs" / "csv" / "metrics.csv"
    content, saved = damage(log.read_bytes()), newest(cwd)
    log.write_bytes(content)
    assert_one_line(call("train.py --resume auto", cwd, code=1), str(log.relative_to(cwd)), "move it away")
    assert log.read_bytes() == content and newest(cwd) == saved
    log.rename(cwd / "moved.csv")
    call("train.py --resume auto", cwd)
    later = history(cwd)
    assert later == history(whole)[-len(later) :] != []


@pytest.mark.parametrize("end", [b"8", bytes(5000)], ids=["of a full disk", "of a power failure"])
def test_the_cut_end_of_a_log_is_dropped(whole, killed, tmp_path, end: bytes):
    """The row is of step 80; it is no row of step 8."""
    cwd = copied(killed, tmp_path)
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", "ab") as file:
        file.write(end)
    call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


@pytest.mark.parametrize("name, damage", [("checkpoints/best.ckpt", flip_a_bit), ("model.pt", truncate)])
def test_a_damaged_file_is_not_evaluated(finished, tmp_path, name: str, damage):
    """One with a wrong bit in a tensor would be loaded without a word."""
    path = Path(shutil.copy(finished / name, tmp_path))
    damage(path)
    words = (f"--checkpoint {path}: ", "damaged", "another checkpoint may do")
    refuses(f"test.py --out_dir {finished} --checkpoint {path}", tmp_path, *words, code=1)


@night
@pytest.mark.parametrize("name", ["step-*.ckpt", "best.ckpt"])
def test_a_checkpoint_that_is_damaged_anywhere_is_no_loss(name: str, killed, whole, tmp_path):
    """Cut at some place, or with another byte there."""
    rng = random.Random(name)
    for number in range(16):
        cwd = Path(shutil.copytree(killed, tmp_path / str(number)))
        path = max(run_dir(cwd).glob(f"checkpoints/{name}"))
        data = path.read_bytes()
        place = rng.randrange(len(data))
        path.unlink()  # it may be a second name of another
        path.write_bytes(data[:place] + (bytes([data[place] ^ 0xFF]) + data[place + 1 :]) * (number % 2))
        call("train.py --resume auto", cwd)
        assert_same_run(cwd, whole)


class Forged:
    def __reduce__(self):
        return os.mkdir, ("code-was-run",)


def test_a_forged_checkpoint_runs_no_code(whole, killed, tmp_path):
    """Neither a file nor a directory of torch.distributed.checkpoint, whose .metadata is a pickle."""
    cwd = copied(killed, tmp_path)
    *_, file, directory = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))
    torch.save(torch.load(file, weights_only=True) | {"forged": Forged()}, file)
    directory.unlink()
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(Forged()))
    command = f"test.py --out_dir train_out --checkpoint {file}"
    assert_one_line(call(command, cwd, code=1), f"--checkpoint {file}")
    refuses(f"test.py --out_dir train_out --checkpoint {directory}", cwd, f"--checkpoint {directory}")
    printed = call("train.py --resume auto", cwd).stdout
    assert_same_run(cwd, whole)
    for path in (file, directory):
        assert f"{path.name}: it is damaged" in printed and path.with_name(f"{path.name}.damaged").exists()
    assert not (cwd / "code-was-run").exists()


# ---- no room, no memory

REFUSED = "the system refused to read or write the run: "


def test_a_full_disk_costs_no_checkpoint(whole, cwd):
    """As a read-only one does not. Here no file can grow."""
    done = interrupt(LONG, cwd, lambda process: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0)))
    assert done.returncode == 1
    last = subprocess.CompletedProcess("train.py", 1, "", done.stderr.splitlines()[-1])
    assert_one_line(last, f"{REFUSED}[Errno 27] File too large", how_to_go_on(cwd))
    assert_whole_checkpoints(cwd)
    call("train.py --resume train_out", cwd)
    assert_same_run(cwd, whole)


def test_a_disk_that_fills_up_within_a_checkpoint_is_told_by_the_words_of_the_system(tmp_path):
    """torch.save has others for it. The checkpoint is the only file of more than 100 kB."""
    process = start(f"train.py {SMALL} --width 64", tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert error == f"train.py: error: {REFUSED}[Errno 27] File too large\n"
    assert not any(tmp_path.glob("*/checkpoints/*"))


def test_out_of_memory_names_the_option_that_helps(tmp_path):
    process = start("train.py --accelerator cpu --effective_batch_size 1200 --width 512", tmp_path)
    assert any("steps = " in line for line in process.stdout)  # the last line before the first step
    size = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(process.pid, resource.RLIMIT_AS, (size + 2**28, size + 2**28))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    *_, words, note = error.splitlines()
    assert "can't allocate memory" in words and 'train.py", line' in error
    assert note.startswith("out of memory: try a smaller --micro_batch_size")


# ---- a mistake in the code

IN_A_WORKER = 'if self.shift and len(indices) > 1:\n    raise ValueError("bad 7")'


@pytest.mark.parametrize(
    "point, mistake, name, told",
    [
        ("digits", "torch.ones(4).view(3)", "data.py", "RuntimeError: shape '[3]' is invalid"),
        ("fetch", "raise OSError('no image')", "data.py", "OSError: no image"),
        ("fetch", IN_A_WORKER, "data.py", "ValueError: bad 7"),
        ("forward", "self.skip_connection(images)", "model.py", "AttributeError: 'Model' object has no attribute"),
    ],
)
def test_a_mistake_in_the_code_is_taken_for_nothing_else(point: str, mistake: str, name: str, told: str, program, cwd):
    """Neither for a wrong --data_dir, nor for a fault of the system, nor for the death of a data worker."""
    insert_before(program, point, mistake)
    error = call(f"{program}/train.py {SMALL} --num_workers {int(mistake == IN_A_WORKER)}", cwd, code=1).stderr
    assert f'{program}/{name}", line' in error and error.strip().splitlines()[-1].startswith(told)
    assert error.startswith("Traceback (most recent call last):\n")


def test_data_workers_end_in_order_also_without_a_validation(tmp_path):
    """A loader without batches must not take those of another for its own."""
    options = "--num_workers 2 --limit_val_batches 0 --monitor train/loss --monitor_mode min"
    done = run(f"train.py {SMALL} {options}", tmp_path)
    assert "finished after 20 of 20 steps" in done.stdout and "error" not in done.stderr
