"""Breaks the real train.py with real faults and prints a table: how often each was tried and how often survived.

python tests/template/faults.py                        # all of it, 100 kills: 40 minutes on two free cores; Linux
python tests/template/faults.py --only disk frozen     # the faults with one of these words in their names; --list: all
python tests/template/faults.py --kills 1000 --only storm

Survived means: the broken run, resumed, ends as one that was left alone: the same weights and the same best.ckpt, bit
for bit, and the same logs, each step once. Mounting disks needs root; without it those faults are skipped.
"""

import argparse
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]  # as pyproject.toml does for pytest
from edits import insert_after, insert_before  # noqa: E402
from helpers import (  # noqa: E402
    MEASURED,
    NO_SHARED_STORE,
    ON_2,
    PREEMPTED,
    REPO,
    SMALL,
    TORCHRUN,
    TWO_SAVES,
    assert_same_best,
    children,
    history,
    is_running,
    kill_group,
    newest,
    read_tensorboard,
    run,
    run_dir,
    snapshot,
    start,
    wait_for,
    weights,
)
from killer import kill_before, remove_what_is_no_run  # noqa: E402
from wandb_files import values, wandb_id, wandb_records  # noqa: E402

# 60 epochs of 8 steps, saved and logged every second step: 4 seconds of training.
LONG = (
    "--accelerator cpu --epochs 60 --limit_train_batches 8 --limit_val_batches 2 --num_sanity_val_steps 0 --width 4 "
    "--micro_batch_size 32 --checkpoint_frequency 0.25 --log_per_epoch 4"
)
WANDB = "--logger_name csv tensorboard wandb"
EARLY = "--early_stopping_patience 8 --lr_schedule constant"
FABRIC_RUN = f"{Path(sys.executable).parent / 'fabric'} run --accelerator cpu --devices 2 --strategy ddp"
BASE = Path(tempfile.mkdtemp(prefix="faults-"))
FAULTS = {}  # name: (function, processes at a time, whether it needs root)
logging.getLogger("tensorboard").setLevel(logging.ERROR)


class Tries:
    """Counts the tries of a fault and keeps what was seen in those that failed, and their directories."""

    def __init__(self, name: str, kills: int):
        self.name, self.kills, self.count, self.failed, self.note = name, kills, 0, [], ""
        self.random = random.Random(name)

    @contextmanager
    def __call__(self, what: str):
        self.count += 1
        cwd = BASE / f"{self.name} {self.count}".replace(" ", "-")
        cwd.mkdir()
        try:
            yield cwd
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.failed.append(f"{what}: {text[:200]} ... {text[-300:] if len(text) > 200 else ''} [{cwd}]")
            print(f"failed: {self.name}, {self.failed[-1]}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(cwd)
        finally:
            for pid in processes_in(cwd):
                os.kill(pid, signal.SIGKILL)


def fault(processes: int, root: bool = False):
    """Makes a function a fault of that name, with so many processes to a run."""
    return lambda function: FAULTS.update({function.__name__.replace("_", " "): (function, processes, root)})


# ---- what is expected


def once(function):
    """As functools.cache; a thread that needs what another one is making waits for it."""
    lock, cached = Lock(), cache(function)

    def call(*args):
        with lock:
            return cached(*args)

    return call


@once
def expected(options: str) -> Path:
    """Where a run with these options was left alone."""
    cwd = Path(tempfile.mkdtemp(prefix="alone-", dir=BASE))
    run(f"train.py {options}", cwd, HOME=str(cwd))
    return cwd


@once
def interrupted() -> Path:
    """Where a run was killed. To be copied."""
    cwd = Path(tempfile.mkdtemp(prefix="interrupted-", dir=BASE))
    strike(f"train.py {LONG}", cwd, kill_group)
    return cwd


def copy_of_interrupted(cwd: Path) -> Path:
    return run_dir(shutil.copytree(interrupted(), cwd, dirs_exist_ok=True))


def curves(cwd: Path) -> dict:
    """TensorBoard's curves, without what is measured of the process."""
    if not [*run_dir(cwd).glob("events.*")]:
        return {}
    board = read_tensorboard(run_dir(cwd))
    names = set(board.Tags()["scalars"]) - {f"vitals/{name}" for name in MEASURED}
    return {name: [(event.step, event.value) for event in board.Scalars(name)] for name in names}


def summary(cwd: Path) -> dict:
    """summary.json, without what is measured of the process."""
    found = json.loads((run_dir(cwd) / "summary.json").read_text())
    found["last"] = {k: v for k, v in found["last"].items() if k not in MEASURED}
    return {name: value for name, value in found.items() if name != "seconds"}


def wandb_rows(cwd: Path) -> list[dict]:
    """All rows of all starts, without what is measured of the process."""
    paths = sorted(run_dir(cwd).glob("logs/wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert not paths or {path.name for path in paths} == {f"run-{wandb_id(run_dir(cwd))}.wandb"}, "several ids in wandb"
    rows = [values(r.history.item) for path in paths for r in wandb_records(path) if r.HasField("history")]
    measured = ("_timestamp", "_runtime", "_wandb", *MEASURED)
    return [{name: value for name, value in row.items() if name not in measured} for row in rows]


def check_same(cwd: Path, options: str, atol: float = 0) -> None:
    """The run is as one with these options that was left alone: in every bit, or up to `atol`."""
    alone = expected(options)
    remove_what_is_no_run(cwd)
    torch.testing.assert_close(weights(cwd), weights(alone), atol=atol, rtol=0)
    ours, theirs = history(cwd), history(alone)
    steps = [int(row["step"]) for row in ours]
    assert steps == sorted(set(steps)) == [int(row["step"]) for row in theirs], f"metrics.csv has the steps {steps}"
    if atol:
        for row, other in zip(ours, theirs, strict=True):
            for name in ("train/loss", "val/loss", "val/accuracy"):
                assert abs(float(row[name] or 0) - float(other[name] or 0)) <= atol, f"{name}: {row}"
    else:
        assert ours == theirs, "metrics.csv differs"
        assert_same_best(cwd, alone)
        assert curves(cwd) == curves(alone), "TensorBoard has other curves"
        assert summary(cwd) == summary(alone), "summary.json differs"
        found, rows = wandb_rows(cwd), wandb_rows(alone)  # a SIGKILL may cost some, and a resume logs some again
        assert bool(found) == bool(rows) and all(row in rows for row in found), "wandb has other rows"
    assert not [*run_dir(cwd).rglob("*.tmp")], f"left: {[*run_dir(cwd).rglob('*.tmp')]}"
    check_whole(cwd)


def check_whole(cwd: Path) -> None:
    """All checkpoints load and are finite."""
    for path in run_dir(cwd).glob("checkpoints/*.ckpt"):
        state = torch.load(path, weights_only=True)
        assert all(tensor.isfinite().all() for tensor in state["model"].values()), f"{path.name} is not finite"


def check(condition, done, what: str) -> None:
    assert condition, f"{what}; exit code {done.returncode}, last words: {last_words(done)}"


def last_words(done) -> str:
    """What stands below the last frame of a traceback, the error and its notes; without one, the last line."""
    lines = done.stderr.strip().splitlines() or [""]
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[frames[-1] + 1 :] if frames else lines[-1:])


def check_failed(done, code: int | None, *patterns: str, traceback: bool = False) -> None:
    """It ended with that code (None: any of a failure), and its last words say why."""
    check(done.returncode not in (0, PREEMPTED) if code is None else done.returncode == code, done, f"not {code}")
    for pattern in patterns:
        check(re.search(pattern, last_words(done)), done, f"{pattern!r} is not in the last words")
    check(traceback or "Traceback" not in done.stderr, done, "a traceback")


# ---- tools


def processes_in(cwd: Path) -> list[int]:
    """The living processes that were started in the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(path / "cwd")).is_relative_to(cwd) and is_running(int(path.name)):
                found.append(int(path.name))
    return found


def strike(command: str, cwd: Path, blow, after: int = 16, seconds: float = 120, **more):
    """Starts the command, calls blow(process) once a checkpoint beyond step `after` is there, waits for the end."""
    process = start(command, cwd, HOME=str(cwd), **more)
    wait_for(lambda: process.poll() is not None or newest(cwd) > after)
    assert process.poll() is None, process.communicate()
    blow(process)
    return end_of(process, cwd, seconds)


def end_of(process: subprocess.Popen, cwd: Path, seconds: float = 300) -> subprocess.CompletedProcess:
    """Waits for the end of the process and of all others in the directory."""
    deadline = time.monotonic() + seconds
    try:
        out, err = process.communicate(timeout=seconds)
        wait_for(lambda: not processes_in(cwd), max(1, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, AssertionError):
        raise AssertionError(f"after {seconds} s: {process.poll()}, running: {processes_in(cwd)}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def send(number: int, pick):
    """A blow: a signal to the process that pick(process) names."""
    return lambda process: os.kill(pick(process), number)


def pid_of(rank: int, process: subprocess.Popen, launched: bool) -> int:
    return (children(process.pid) if launched else [process.pid, *children(process.pid)])[rank]


def at_step(cwd: Path, step: int, code: str) -> Path:
    """A copy of the program that executes this code after this step."""
    return insert_after(cwd / "patched", "step is done", f"if step == {step}:\n{textwrap.indent(code, '    ')}")


# ---- kills


def kill_storm(tries: Tries, options: str, share: float, at_changes: bool = False) -> None:
    """Kills runs with these options and resumes them, again and again, until this share of the kills is used up."""
    left, at_steps = max(1, round(tries.kills * share)), []
    while left:
        with tries(f"{options} {at_steps}") as cwd:
            command = f"train.py {options} --resume auto"
            while True:
                process = start(command, cwd, HOME=str(cwd))
                if left:
                    wait_to_kill(process, cwd, tries.random, at_changes)
                    with suppress(ProcessLookupError):  # it was finished
                        kill_group(process)
                done = end_of(process, cwd)
                if done.returncode != -signal.SIGKILL:
                    check_failed(done, 0)
                    break
                left, at_steps = left - 1, [*at_steps, newest(cwd)]
            check_same(cwd, options)
    tries.note = f"{len(at_steps)} kills, after the steps {' '.join(map(str, at_steps))}"


def wait_to_kill(process: subprocess.Popen, cwd: Path, rng: random.Random, at_changes: bool) -> None:
    """Until a random moment of the start-up or the training, or until one of the next changes of checkpoints/."""
    if not at_changes and rng.random() < 0.15:
        return time.sleep(rng.uniform(0, 6))
    changes, before = rng.randint(1, 12) if at_changes else 1, listing(cwd)
    while changes and process.poll() is None:
        time.sleep(0.0002)
        if (now := listing(cwd)) != before:
            changes, before = changes - 1, now
    if not at_changes:
        time.sleep(rng.uniform(0, 1.5))


def listing(cwd: Path) -> list[str]:
    with suppress(OSError, StopIteration):
        return os.listdir(next(cwd.glob("2*/checkpoints")))
    return []


STORMS = {  # options, share of the kills, at changes of the directory, processes: 2 also for more
    "kill storm": (LONG, 0.14, False, 1),
    "kill storm, workers": (f"{LONG} --num_workers 2", 0.12, False, 1),
    "kill storm, bf16, accumulation": (f"{LONG} --precision bf16-mixed --micro_batch_size 16", 0.12, False, 1),
    "kill storm, early stopping, wandb": (f"{LONG} {EARLY} {WANDB}", 0.12, False, 1),
    "kill storm at changes": (LONG, 0.16, True, 1),
    "kill storm on 2": (f"{LONG} {ON_2}", 0.12, False, 2),
    "kill storm on 2, workers, wandb": (f"{LONG} {ON_2} --num_workers 2 {WANDB}", 0.1, False, 2),
    "kill storm on 3 at changes": (f"{LONG} --devices 3 --strategy ddp --effective_batch_size 96", 0.12, True, 2),
}
for name, (options, share, at_changes, processes) in STORMS.items():
    storm = partial(kill_storm, options=options, share=share, at_changes=at_changes)
    FAULTS[name] = (storm, processes, False)


@fault(processes=1)
def kill_before_each_change_of_a_file(tries):
    """Each change that a new run makes, and each that a resume makes of one that was killed in its first save, or
    after it, before the validation of the same step had made it the best."""
    empty, half, saved = BASE / "empty", BASE / "half", BASE / "saved"
    for begun in (empty, half, saved):
        begun.mkdir()
    kill_before("os.rename step-00000002.ckpt.tmp 1, open summary.json 1", TWO_SAVES, half, BASE)
    kill_before("os.link step-00000002.ckpt 1", TWO_SAVES, saved, BASE)
    for begun in (empty, half, saved):
        command = f"{TWO_SAVES} --resume auto"
        changes = kill_before(0, command, shutil.copytree(begun, BASE / f"{begun.name}-counted"), BASE)
        tries.note += f"{len(changes)} changes of {'a new run' if begun is empty else 'a resume'}; "
        for number, change in enumerate(changes, 1):
            with tries(f"{begun.name}, change {number}: {change}") as folder:
                cwd = shutil.copytree(begun, folder / "run")
                kill_before(number, command, cwd, folder)
                run(command, cwd)
                check_same(cwd, TWO_SAVES.removeprefix("train.py "))


# ---- signals


def stopped(tries: Tries, command: str, same_as: str, targets: dict, numbers=(15, 2, 10), code=PREEMPTED) -> None:
    """Sends each signal to each target: the run stops, saves and says so; resumed, it is the same run."""
    for name, pick in targets.items():
        for number in numbers:
            with tries(f"{signal.Signals(number).name} to {name} of {command}") as cwd:
                done = strike(command, cwd, send(number, pick))
                said = re.search(r"stopped after (\d+) of", done.stdout)
                check_failed(done, code, traceback=code == 1)  # torchrun's
                check(said and int(said[1]) == newest(cwd), done, f"no message about step {newest(cwd)}")
                run(f"train.py --resume {run_dir(cwd).name}{f' {ON_2}' if same_as != LONG else ''}", cwd)
                check_same(cwd, same_as)


TO_IT = {"process": lambda process: process.pid}
TO_GROUP = {"group": lambda process: -process.pid}
TO_RANK_1 = {"rank 1": lambda process: pid_of(1, process, launched=False)}


@fault(processes=1)
def signals(tries):
    stopped(tries, f"train.py {LONG}", LONG, TO_IT)
    stopped(tries, f"train.py {LONG} --num_workers 2", LONG, TO_GROUP)


@fault(processes=2)
def signals_on_2(tries):
    stopped(tries, f"train.py {LONG} {ON_2}", f"{LONG} {ON_2}", TO_IT | TO_GROUP | TO_RANK_1)


@fault(processes=2)
def signals_to_launchers(tries):
    for launcher in (TORCHRUN, FABRIC_RUN):
        stopped(tries, f"{launcher} {REPO}/train.py {LONG}", f"{LONG} {ON_2}", TO_IT, (15, 2), code=1)


@fault(processes=1)
def second_signal(tries):
    for first, second in ((2, 2), (15, 2), (10, 2)):
        with tries(f"{first}, then {second}") as cwd:
            process = start(f"train.py {LONG}", cwd, repo=at_step(cwd, 37, "__import__('time').sleep(600)"))
            wait_for(lambda: newest(cwd) == 36)  # noqa: B023
            time.sleep(1)
            process.send_signal(first)
            time.sleep(1)
            assert process.poll() is None, "the first signal ended it"
            process.send_signal(second)
            check_failed(end_of(process, cwd, 60), -second)
            run("train.py --resume train_out", cwd)
            check_same(cwd, LONG)


# ---- restarts, other numbers of processes


@fault(processes=2)
def torchrun_restarts(tries):
    for number in (0, 1):
        with tries(f"worker {number} killed") as cwd:
            command = f"{TORCHRUN} --max-restarts 3 {REPO}/train.py --resume auto {LONG}"
            blow = send(9, partial(pid_of, number, launched=True))
            check_failed(strike(command, cwd, blow, **NO_SHARED_STORE), 0, traceback=True)
            check_same(cwd, f"{LONG} {ON_2}")


def drawn(cwd: Path) -> dict[int, list[int]]:
    """The samples of each step, as drawn by the last start that did the step."""
    steps = {}
    for line in (cwd / "samples.txt").read_text().splitlines():
        number, step, *samples = map(int, line.split())
        steps.setdefault(step, {}).setdefault(number, []).extend(samples)
    return {step: sorted(starts[max(starts)]) for step, starts in steps.items()}


RECORD = """
draw = TrainSampler.__iter__


def record(self):
    for number, batch in draw(self):
        with open("samples.txt", "a") as file:
            step = number * self.plan.micro_batch_size // self.plan.effective_batch_size
            print(__import__("os").environ["START"], step, *batch, file=file)
        yield number, batch


TrainSampler.__iter__ = record
"""


def recording(cwd: Path) -> Path:
    """A copy of the program that writes down which samples are drawn."""
    return insert_before(cwd / "patched", "functions", RECORD)


@fault(processes=2)
def other_number_of_processes(tries):
    """In mid-epoch: the same samples, each once an epoch, and the same weights up to rounding."""
    options = f"{LONG} --micro_batch_size 16 --epochs 12 --limit_train_batches 1.0"  # 19 steps an epoch
    with tries("left alone") as cwd:
        run(f"train.py {options}", cwd, repo=recording(cwd), START="0")
        whole = drawn(cwd)
        for epoch in range(12):
            samples = sum((whole[step] for step in range(19 * epoch, 19 * epoch + 19)), [])
            assert len(samples) == len(set(samples)) == 19 * 64, f"epoch {epoch}"
    for devices in ((1, 2, 1), (2, 4, 2)):
        for number in (signal.SIGKILL, signal.SIGTERM):
            with tries(f"{devices}, {number.name}") as cwd:
                repo, command = recording(cwd), f"train.py {options}"
                for i, n in enumerate(devices):
                    more = {"repo": repo, "START": str(i)}
                    on = f" --devices {n} --strategy {'ddp' if n > 1 else 'auto'}"
                    if i < 2:
                        strike(command + on, cwd, send(number, TO_GROUP["group"]), after=newest(cwd) + 21, **more)
                        command = f"train.py --resume {run_dir(cwd).name}"
                    else:
                        run(command + on, cwd, **more)
                check_same(cwd, options, atol=1e-5)
                assert drawn(cwd) == whole, "other samples"


# ---- damaged files


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@fault(processes=1)
def damaged_newest_checkpoint(tries):
    size = max(interrupted().glob("*/checkpoints/step-*.ckpt")).stat().st_size
    damages = {f"cut to {n}": lambda path, n=n: os.truncate(path, n) for n in (0, 1, size // 2, size - 1)}
    places = [tries.random.randrange(size) for _ in range(16)]  # between the parts there may be unused bytes
    damages |= {f"byte {n} of {size} flipped": lambda path, n=n: flip(path, n) for n in places}
    damages |= {"a directory": make_directory, "text": lambda path: path.write_text("no checkpoint\n" * 99)}
    for what, damage in damages.items():
        with tries(what) as cwd:
            path = max(copy_of_interrupted(cwd).glob("checkpoints/step-*.ckpt"))
            damage(path)
            done = run("train.py --resume auto", cwd)
            check(f"{path.name}: it is damaged" in done.stdout or what.startswith("byte"), done, "not named")
            check_failed(done, 0)
            check_same(cwd, LONG)


@fault(processes=1)
def all_checkpoints_damaged(tries):
    for what, damage in (("cut", lambda path: os.truncate(path, 999)), ("text", lambda path: path.write_text("no"))):
        with tries(what) as cwd:
            for path in copy_of_interrupted(cwd).glob("checkpoints/*.ckpt"):
                damage(path)
            before = snapshot(cwd)
            done = run(f"train.py --resume {run_dir(cwd).name}", cwd, code=1)
            check_failed(done, 1, r"^train.py: error: no checkpoint in .* can be read")
            changed = {path.name for path, content in snapshot(cwd).items() if content != before.get(path)}
            assert changed <= {".lock"}, f"changed: {changed}"


@fault(processes=1)
def other_damaged_files(tries):
    """The run is repaired, or says in one line that it cannot go on."""
    noise = tries.random.randbytes(500)
    damages = {
        "noise": lambda data: data[: len(data) // 2] + noise + data[len(data) // 2 + 100 :],
        "half": lambda data: data[: len(data) // 2],
        "nothing": lambda data: b"",
    }
    for what, damage in damages.items():
        for file in ("checkpoints/best.ckpt", "config.yaml", "logs/csv/metrics.csv"):
            with tries(f"{file}: {what}") as cwd:
                path = copy_of_interrupted(cwd) / file
                data = damage(path.read_bytes())
                path.unlink()  # best.ckpt is a second name of another
                path.write_bytes(data)
                done = end_of(start(f"train.py --resume {run_dir(cwd).name}", cwd), cwd)
                check_failed(done, done.returncode, "" if done.returncode == 0 else "^train.py: error: ")
                if done.returncode == 0:
                    torch.testing.assert_close(weights(cwd), weights(expected(LONG)), atol=0, rtol=0)
                if "best" in file:
                    path.write_bytes(data)
                    check_failed(run(f"test.py --out_dir {run_dir(cwd).name}", cwd, code=1), 1, "error: .*best.ckpt")


# ---- full and read-only disks


@contextmanager
def mounted(*options):
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", options[-1]], check=True)


def fill(path: Path, process: subprocess.Popen) -> None:
    """Takes all space beside `path` until the process has ended."""
    with open(path, "wb", buffering=0) as file:
        while process.poll() is None:
            for size in (1 << 16, 512, 1):
                with suppress(OSError):
                    while process.poll() is None:
                        file.write(bytes(size))
            time.sleep(0.001)
    path.unlink()


NO_SPACE = ("No space left", "whole.*--resume")


@fault(processes=1, root=True)
def full_disk(tries):
    for options in (LONG, f"{LONG} {WANDB}"):
        with tries(options) as cwd, mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs", cwd):
            done = strike(f"train.py {options}", cwd, partial(fill, cwd / "filler"))
            check_failed(done, 1, *NO_SPACE, traceback=True)  # TensorBoard's thread may have one
            check_whole(cwd)
            run(f"train.py --resume {run_dir(cwd).name}", cwd)
            check_same(cwd, options)
            shutil.rmtree(run_dir(cwd))  # before the disk goes


@fault(processes=1, root=True)
def full_disk_of_the_logs(tries):
    for options in (LONG, f"{LONG} {WANDB}"):
        with tries(options) as cwd:
            strike(f"train.py {options}", cwd, send(15, TO_IT["process"]))
            logs, saved = run_dir(cwd) / "logs", newest(cwd)
            logs.rename(cwd / "logs")
            logs.mkdir()
            with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", logs):
                shutil.copytree(cwd / "logs", logs, dirs_exist_ok=True)
                resume = f"train.py --resume {run_dir(cwd).name}"
                done = strike(resume, cwd, partial(fill, logs / "filler"), after=saved)
                check_failed(done, 1, *NO_SPACE, traceback=True)
                check_whole(cwd)
                assert newest(cwd) > saved
                run(resume, cwd)
                check_same(cwd, options)


@fault(processes=1, root=True)
def read_only_disk(tries):
    for folder in ("checkpoints", "."):
        with tries(folder) as cwd:

            def blow(process):
                path = run_dir(cwd) / folder  # noqa: B023
                subprocess.run(["mount", "--bind", "-o", "ro", path, path], check=True)

            done = strike(f"train.py {LONG}", cwd, blow)
            subprocess.run(["umount", run_dir(cwd) / folder], check=True)
            check_failed(done, 1, "Read-only", "--resume", traceback=True)  # TensorBoard's thread may have one
            run(f"train.py --resume {run_dir(cwd).name}", cwd)
            check_same(cwd, LONG)


# ---- a rank that is killed, frozen, or raises


FREEZES_RANK_0 = """
import os, signal
if fabric.global_rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
""".strip()


def one_rank(tries: Tries, number: int | None, seconds: float) -> None:
    """One rank gets a signal, or raises an error: all others end as well, within so many seconds."""
    for launcher in ("", TORCHRUN):
        for rank in (0, 1):
            with tries(f"rank {rank}{' of torchrun' * bool(launcher)}") as cwd:
                repo = REPO
                # For rank 0 the others wait as long as it lives, if it was frozen while it saves: not here.
                freezes_itself = number == signal.SIGSTOP and rank == 0
                if freezes_itself:
                    repo = at_step(cwd, 37, FREEZES_RANK_0)
                elif number is None:
                    repo = at_step(cwd, 37, f"if fabric.global_rank == {rank}:\n    raise ValueError('deliberate')")
                options = f"{LONG} --timeout 15" if launcher else f"{LONG} --timeout 15 {ON_2}"

                def blow(process):
                    pids = [pid_of(i, process, launched=bool(launcher)) for i in (0, 1)]  # noqa: B023
                    if not freezes_itself:  # noqa: B023
                        os.kill(pids[rank], number or 0)  # noqa: B023
                    elif not launcher:  # noqa: B023
                        wait_for(lambda: not is_running(pids[1]), seconds)
                        os.kill(pids[0], signal.SIGKILL)  # there is nobody else to end it

                done = strike(f"{launcher} {repo}/train.py {options}".strip(), cwd, blow, seconds=seconds)
                check_failed(done, None, traceback=bool(launcher) or not number)
                check(number or "deliberate" in done.stderr, done, "no reason")
                if number == signal.SIGSTOP:
                    check("did not answer for --timeout 15" in done.stderr, done, "no reason")
                check_whole(cwd)
                run(f"train.py --resume {run_dir(cwd).name} {ON_2}", cwd)
                check_same(cwd, f"{LONG} {ON_2}")


FAULTS["a rank killed"] = (partial(one_rank, number=signal.SIGKILL, seconds=30), 2, False)
FAULTS["a rank frozen"] = (partial(one_rank, number=signal.SIGSTOP, seconds=50), 2, False)
FAULTS["a rank raises"] = (partial(one_rank, number=None, seconds=30), 2, False)


@fault(processes=1)
def data_workers(tries):
    timed_out, killed = "DataLoader timed out after 15", r"DataLoader worker .*\b([Kk]illed|exited unexpectedly)"
    for number, words in ((signal.SIGSTOP, timed_out), (signal.SIGKILL, killed)):
        for loader in ("training", "validation"):
            with tries(f"{number.name} to that of the {loader}") as cwd:
                pick = {"training": 0, "validation": 1}[loader]
                blow = send(number, lambda process: children(process.pid)[pick])  # noqa: B023
                done = strike(f"train.py {LONG} --num_workers 1 --timeout 15", cwd, blow, seconds=100)
                check_failed(done, 1, words, "whole.*--resume", traceback=True)
                run("train.py --resume train_out", cwd)
                check_same(cwd, f"{LONG} --num_workers 1")


@fault(processes=1, root=True)
def small_dev_shm(tries):
    with tries("64 KB") as cwd:
        train = f"{sys.executable} {REPO}/train.py {LONG} --num_workers 2 --timeout 15"
        mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
        (cwd / "train.sh").write_text(f"exec unshare --mount bash -c '{mount} && exec {train}'\n")
        done = end_of(start(f"{cwd}/train.sh", cwd), cwd, 200)
        # A traceback of the worker's own tells what it could not do.
        check_failed(done, 1, "DataLoader timed out after 15", traceback=True)
        check("No space left on device" in done.stderr, done, "no reason")


# ---- several runs


@fault(processes=1)
def resume_of_a_finished_run(tries):
    with tries("") as cwd:
        shutil.copytree(expected(LONG), cwd, dirs_exist_ok=True)
        before = snapshot(cwd)
        assert "finished after" in run(f"train.py {LONG} --resume auto", cwd).stdout
        assert "finished after" in run(f"train.py --resume {run_dir(cwd).name}", cwd).stdout
        assert snapshot(cwd) == before, "something was changed"


@fault(processes=2)
def six_runs_at_once(tries):
    """All wait for the end of a time whose names are taken."""
    with tries("") as cwd:
        for second in range(40):
            (cwd / time.strftime("%Y%m%d-%H%M%S-train_out", time.localtime(time.time() + second))).mkdir()
        for twin in [start(f"train.py {SMALL} --max_steps 1", cwd) for _ in range(6)]:
            check_failed(end_of(twin, cwd / "nowhere"), 0)
        assert len([*cwd.glob("2*-train_out/model.pt")]) == 6


@fault(processes=2)
def two_resumes_at_once(tries):
    with tries("") as cwd:
        resume = f"train.py --resume {copy_of_interrupted(cwd).name}"

        def second(process):
            check_failed(run(resume, cwd, code=2), 2, "another process is writing to")
            kill_group(process)

        strike(
            resume, cwd, second, after=newest(cwd), repo=at_step(cwd, newest(cwd) + 9, "__import__('time').sleep(600)")
        )
        run(resume, cwd)
        check_same(cwd, LONG)


# ---- numbers and memory


@fault(processes=2)
def loss_becomes_nan(tries):
    for options in (LONG, f"{LONG} {ON_2}"):
        with tries(options) as cwd:
            nan = "if fabric.global_rank == 0:\n    next(model.parameters()).data.mul_(math.nan)"
            done = end_of(start(f"train.py {options}", cwd, repo=at_step(cwd, 37, nan)), cwd)
            check_failed(done, 1, "loss is nan in the steps up to 38")
            check_whole(cwd)
            assert newest(cwd) == 36
            run(f"train.py --resume {run_dir(cwd).name}", cwd)  # without the fault
            check_same(cwd, options)


@fault(processes=1)
def out_of_memory(tries):
    with tries("its advice is followed") as cwd:
        options = f"{SMALL} --epochs 1 --limit_train_batches 1 --width 512 --effective_batch_size 1024"
        micro_batch_size = 1024
        done = None
        while done is None or done.returncode:
            process = start(f"train.py {options} --micro_batch_size {micro_batch_size}", cwd)
            assert any("steps = " in line for line in process.stdout)  # the last line before the first step
            size = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(process.pid, resource.RLIMIT_AS, 2 * (size + (600 << 20),))
            done = end_of(process, cwd)
            if done.returncode:
                check_failed(done, 1, "out of memory: try a smaller --micro_batch_size", traceback=True)
                micro_batch_size //= 2
        check(micro_batch_size < 1024, done, "the memory was enough")
        tries.note = f"--micro_batch_size {micro_batch_size} fits"


# ---- the program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="kills of all kill storms together")
    parser.add_argument("--only", nargs="+", default=[""], help="the faults with one of these in their names")
    parser.add_argument("--list", action="store_true", help="list the faults")
    args = parser.parse_args()
    chosen = {name: each for name, each in FAULTS.items() if any(word in name for word in args.only)}
    if args.list:
        return print(*chosen, sep="\n") or 0
    all_tries, began = {name: Tries(name, args.kills) for name in chosen}, time.monotonic()

    def attempt(name: str) -> None:
        (function, _, root), tries = chosen[name], all_tries[name]
        if root and os.getuid():
            tries.note = "skipped: needs root"
            return
        try:
            function(tries)
        except Exception as error:  # outside of a try, such as in a run that is left alone
            tries.count, tries.failed = tries.count + 1, [*tries.failed, f"{type(error).__name__}: {error}"]
        seen = "; ".join(tries.failed) or tries.note
        passed = tries.count - len(tries.failed)
        print(f"{name:36} {tries.count:5} {passed:6} {time.monotonic() - began:7.0f}  {seen}".rstrip(), flush=True)

    print(f"{'fault':36} tried passed seconds  seen", flush=True)
    for processes in (1, 2):  # two processes at a time, be they of two runs or of one
        with ThreadPoolExecutor(2 // processes) as pool:
            list(pool.map(attempt, [name for name, each in chosen.items() if each[1] == processes]))
    failed = sum(len(tries.failed) for tries in all_tries.values())
    print(
        f"{sum(tries.count for tries in all_tries.values())} tries, {failed} failed, {time.monotonic() - began:.0f} s"
    )
    if not failed:
        shutil.rmtree(BASE)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
