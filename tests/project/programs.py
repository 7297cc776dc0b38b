"""Starts train.py and test.py in small runs, and reads what they have written."""

import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import zygote
from settings import HANGS, MEASURED, SMALL

import config
from runtime import config_file
from runtime.options import values_of

if "PLACE" in os.environ:
    SMALL["accelerator"], SMALL["precision"] = os.environ["PLACE"].split()
PLACE = f"{SMALL['accelerator']} {SMALL['precision']}"
REPO = Path(__file__).resolve().parents[2]
KILL = "step-00000010.ckpt"  # a run that is to be killed does not write it any more
SHOWN: dict[str, dict[str, None]] = {}  # in order


# ---- start them


def small(cls: type = config.TrainConfig, **changed: str) -> str:
    """The options of a small run. Those that train.py or test.py does not have are left out."""
    known = values_of(cls())
    given = {name: value for name, value in (SMALL | changed).items() if name in known}
    data_dir = given.get("data_dir") or known.get("data_dir")
    if data_dir:
        given["data_dir"] = str(REPO / data_dir)  # the runs start in other folders
    return " ".join(f"--{name} {value}" for name, value in given.items())


def environment() -> dict[str, str]:
    """That of this process, without the variables of launchers and loggers that may be around the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "LT_", "SLURM_"))}


def run(command: str, cwd: Path, code: int = 0, is_fresh: bool = False, **env: str) -> str:
    """Runs `train.py ...` or `test.py ...` in a process of its own, checks the exit code, and returns what it prints. A
    process that is not fresh has imported torch before."""
    script, *options = command.split()
    process = (subprocess.Popen if is_fresh else zygote.popen)(
        [sys.executable, str(REPO / script), *options],
        cwd=cwd,
        env=environment() | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = output_of(process, command)
    finally:
        process.kill()
    if process.returncode != code:
        last = "\n".join((out + err).splitlines()[-30:])
        fail(f"python {command}\nends with exit code {process.returncode} instead of {code}:\n{last}")
    return out


def output_of(process: subprocess.Popen, command: str) -> tuple[str, str]:
    """Waits for its end. A busy machine may delay that, so it is known by the CPU time whether a process hangs."""
    used, since = 0.0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)
        now = cpu_seconds(process.pid)
        if now > used + HANGS / 30:  # processes that wait for each other poll
            used, since = now, time.monotonic()
        elif time.monotonic() - since > (HANGS if Path("/proc/self").exists() else 5 * HANGS):
            fail(f"python {command}\nhangs: it and its children have hardly used the CPU for {HANGS} seconds")


def cpu_seconds(pid: int) -> float:
    """Of a process, its children and theirs, also of those that have ended; 0 where there is no /proc."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


# ---- say what was found


def fail(message: str) -> NoReturn:
    """Without the code of the test, so that it fits on a screen."""
    pytest.fail(message, pytrace=False)


def shown(subject: str, thing: str) -> None:
    """Adds it to the last lines of pytest."""
    SHOWN.setdefault(subject, {})[thing] = None


# ---- read what they have written


class Run:
    """A run of recorded.py."""

    def __init__(self, cwd: Path):
        self.cwd = cwd
        (path,) = cwd.glob("*/config.yaml")
        self.folder = path.parent

    @classmethod
    def train(cls, cwd: Path, options: str, what: str = "-", kill: str = "-", shift: int = 0, **more) -> "Run":
        """One in an empty folder. The arguments are those of recorded.py and `run`."""
        cwd.mkdir(exist_ok=True)
        code = 0 if kill == "-" else -signal.SIGKILL
        run(f"tests/project/recorded.py {cwd / 'record'} {what} {kill} {shift} {options}", cwd, code, **more)
        return cls(cwd)

    def resume(self, cwd: Path, options: str = "", what: str = "-", start: Path | None = None, **more) -> "Run":
        """A copy of the run, resumed in another folder."""
        folder = cwd / self.folder.name
        shutil.copytree(self.folder, folder)
        command = f"tests/project/recorded.py {cwd / 'record'} {what} - 0 --resume {folder} {options}"
        run(command, start or cwd, **more)
        return Run(cwd)

    def facts(self, kind: str) -> list[list]:
        """What recorded.py has noted under a word."""
        found = [json.loads(line) for line in (self.cwd / "record").read_text().splitlines()]
        return [fact for each, *fact in found if each == kind]

    def inputs(self) -> dict[str, str]:
        """What compute_loss got in the training steps, in their order: for each micro-batch the checksums."""
        found = defaultdict(str)
        for step, number, checksums in sorted(self.facts("inputs"), key=lambda fact: fact[:2]):
            found[f"step {step}, micro-batch {number}"] += f"{' '.join(map(str, checksums))} "
        return dict(found)

    def history(self) -> dict[str, str]:
        """What metrics.csv has of each step, without what is measured."""
        found = {}
        with open(self.folder / "logs" / "csv" / "metrics.csv", newline="") as file:
            for row in csv.DictReader(file):
                found |= {f"step {row['step']}, {name}": value for name, value in row.items() if name not in MEASURED}
        return found

    def columns(self) -> set[str]:
        return {key.partition(", ")[2] for key in self.history()}

    def column(self, name: str) -> list[float]:
        """The values of a column, in the steps that have one."""
        return [float(value) for key, value in self.history().items() if key.endswith(f", {name}") and value]

    def bits(self) -> dict[str, str]:
        """Those of the weights and the checkpoints."""
        paths = (self.folder / "model.pt", *sorted(self.folder.glob("checkpoints/*.ckpt")))
        return {key: value for path in paths for key, value in bits(path, path.name).items()}

    def contents(self) -> dict[str, str]:
        """What else it has written, by path; without what is measured, and what is about the process."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            about_process = name.startswith(("provenance/", "events.", "test_", "train.log", ".lock"))
            is_compared = name == "model.pt" or name.startswith(("checkpoints/", "logs/csv/"))
            if path.is_dir() or about_process or is_compared:
                continue
            if path.suffix in (".pt", ".ckpt"):
                found |= bits(path, name)  # two folders may have files of one name
            elif path.name == "summary.json":
                measured = {"seconds": 0, "last": 0}  # the last results are in metrics.csv, too
                found[name] = json.dumps(json.loads(path.read_text()) | measured, sort_keys=True)
            elif path.name == "config.yaml":
                options = values_of(config_file.read_config(config.TrainConfig, self.folder))
                options.pop("num_workers", None)  # may change on a resume
                found |= {f"--{name}": repr(value) for name, value in options.items()}
            else:
                found[name] = size_and_checksum(path.read_bytes())
        return found

    def source(self) -> str:
        """The code of the project that it has kept, without that of its tests and options."""
        paths = {path: path.relative_to(self.folder).parts for path in self.folder.glob("provenance/code-*/**/*.py")}
        own = [path for path, parts in paths.items() if parts[2] not in ("tests", "config.py")]
        return "".join(path.read_text(errors="replace") for path in own)


def bits(path: Path, name: str) -> dict[str, str]:
    """Every value in model.pt or a checkpoint, after the name of the file; of a tensor, the checksum of its bytes. What
    a checkpoint has about itself, such as the seconds of the run, is left out."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, torch.Tensor):
            raw = value.contiguous().flatten().view(torch.uint8)
            yield name, f"{value.dtype} {tuple(value.shape)} {checksum(raw.numpy())}"
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from leaves(item, f"{name}[{key!r}]")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from leaves(item, f"{name}[{number}]")
        else:
            yield name, repr(value)

    saved = torch.load(path, "cpu", weights_only=True)
    if isinstance(saved, dict):  # a file of your own may have something else
        saved.pop("checkpoint", None)
    return dict(leaves(saved, name))


def size_and_checksum(data: bytes) -> str:
    with suppress(UnicodeDecodeError):
        return f"{len(data.decode().splitlines())} lines, {checksum(data)}"
    return f"{len(data)} bytes, {checksum(data)}"


def checksum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
