"""What a run has left in its folder."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from commands import execute
from lightning_utilities.core.apply_func import apply_to_collection

MEASURED = ("samples_per_second", "data_wait", "peak_memory_mb")  # what differs from one run to the next
MEASURED_TOKENS = ("tokens_per_second", "mfu")  # likewise, of recipes/methods/language_model.patch


def run_dir(cwd: Path, name: str = "train_out") -> Path:
    """The one run directory of that name."""
    (found,) = [path for path in cwd.iterdir() if path.name.endswith(f"-{name}")]
    return found


def newest(cwd: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem[5:]) for path in cwd.glob("*/checkpoints/step-*.ckpt")), default=0)


def checkpoint(cwd: Path, name: str) -> dict:
    return torch.load(run_dir(cwd) / "checkpoints" / f"{name}.ckpt", weights_only=True)


def state_of(path: Path) -> dict:
    """What a checkpoint has of the state, its tensors as lists."""
    found = torch.load(path, weights_only=True)
    found.pop("checkpoint", None)
    return apply_to_collection(found, torch.Tensor, torch.Tensor.tolist)


def weights(cwd: Path, name: str = "train_out") -> dict[str, torch.Tensor]:
    return torch.load(run_dir(cwd, name) / "model.pt", weights_only=True)


def results(program: Path, cwd: Path, options: str = "--checkpoint last --split val") -> dict:
    """What test.py with these options finds of the one run in `cwd`."""
    for path in run_dir(cwd).glob("test_*.json"):
        path.unlink()
    execute(f"{program}/test.py --accelerator cpu {options}", cwd)
    (path,) = run_dir(cwd).glob("test_*.json")
    return json.loads(path.read_text())["results"]


def predictions_of(cwd: Path) -> list[torch.Tensor]:
    """What test.py has kept by --predictions of the one run in `cwd`, at one checkpoint."""
    (path,) = run_dir(cwd).glob("predictions_*.pt")
    return torch.load(path, weights_only=True)


def last_summary(cwd: Path) -> dict:
    return json.loads((run_dir(cwd) / "summary.json").read_text())


def set_running(folder: Path) -> None:
    """Makes a finished run as a kill before its last change of a file leaves it."""
    path = folder / "summary.json"
    assert '"state": "finished"' in path.read_text()
    path.write_text(path.read_text().replace('"state": "finished"', '"state": "running"'))


def history(cwd: Path) -> list[dict]:
    """The rows of metrics.csv without what is measured of the process."""
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in MEASURED + MEASURED_TOKENS} for row in csv.DictReader(file)]


def rows(cwd: Path) -> list[dict]:
    """The rows of metrics.csv as numbers; a step without a validation has no val/..."""
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def read_tensorboard(folder: Path):
    """What TensorBoard reads of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    board.Reload()
    return board


def assert_whole_checkpoints(cwd: Path) -> None:
    assert [torch.load(path, weights_only=True) for path in cwd.glob("*/checkpoints/*.ckpt")]


def flip_a_bit(path: Path) -> None:
    """Of the largest tensor: between tensors there are bytes that nobody reads."""
    largest = max(torch.load(path)["model"].values(), key=torch.numel)
    data = bytearray(path.read_bytes())
    data[data.index(largest.numpy().tobytes())] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def save_as_of(device: str, folder: Path) -> None:
    """Makes the checkpoints of a run those that another machine has saved on this device."""
    for path in folder.glob("checkpoints/*.ckpt"):
        saved = torch.load(path, map_location="cpu", weights_only=True)  # two names may be of one file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: device)
            torch.save(saved, path)


def snapshot(cwd: Path) -> dict:
    """Contents and times of all files."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cwd.rglob("*") if path.is_file()}


def without_locks(cwd: Path) -> dict:
    """The same without the files that say which process has a run: to ask for a lock changes its time."""
    return {path: content for path, content in snapshot(cwd).items() if path.name != ".lock"}


def copied(cwd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cwd, tmp_path / "copy"))
