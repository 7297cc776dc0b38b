"""Runs train.py for test_project.py, and records what the training steps get.

python tests/recorded.py RECORD KILL SHIFT --OPTION VALUE ...

For each call of compute_loss in a step, the file RECORD gets a line: the number of the micro-batch, and checksums of
the batch and of the further arguments. The process is killed when it is about to rename a checkpoint to KILL; a kill
from outside might come after the end of so short a run. SHIFT is added to the seeds of the validations.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cli
from config import TrainConfig

RECORD, KILL, SHIFT, *OPTIONS = sys.argv[1:]
CONFIG = cli.parse_or_exit(lambda argv: cli.parse_train(OPTIONS))

from torch import nn  # noqa: E402

import data  # noqa: E402
import train  # noqa: E402
from launch import run_and_exit  # noqa: E402

seeder = train.seeder
compute_loss = train.compute_loss
now: dict[str, Any] = {"number": None}  # of the micro-batch; None in a validation


def recorded_seeder(device: str, tag: str, seed: int):
    """The seeder of a tag, which tells what is computed next."""
    set_seed = seeder(device, tag, seed)

    def numbered(number: int):
        now["number"] = number if tag == "step" else None
        set_seed(number + int(SHIFT) if tag == "validate" else number)

    return numbered


def recorded_loss(model, *arguments, **named):
    if now["number"] is not None:
        values = [value for value in (*arguments, *named.values()) if not isinstance(value, (TrainConfig, nn.Module))]
        with open(RECORD, "a") as file:
            file.write(f"{now['number']} {' '.join(str(data.checksum(value)) for value in values)}\n")
    return compute_loss(model, *arguments, **named)


def kill(event: str, arguments: tuple):
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == KILL:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(kill)
    train.seeder = recorded_seeder
    train.compute_loss = recorded_loss
    run_and_exit(train.main, CONFIG)
