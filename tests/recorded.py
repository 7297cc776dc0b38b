"""Runs train.py for test_project.py, and records what the training steps get.

python tests/recorded.py RECORD MODULES KILL SHIFT --OPTION VALUE ...

For each call of compute_loss in a step, the file RECORD gets a line: the step, the number of the micro-batch, and
checksums of the batch and of the further arguments. MODULES, unless it is "-", gets the checksums of the outputs of the
modules, and of the gradients. The process is killed when it is about to rename a checkpoint to KILL; a kill from
outside might come after the end of so short a run. SHIFT is added to the seeds of the validations. With
FOLDERS=reversed in the environment, folders list their files in the reverse order, as another file system may.
"""

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import TrainConfig
from runtime import cli

RECORD, MODULES, KILL, SHIFT, *OPTIONS = sys.argv[1:]
CONFIG = cli.parse_or_exit(lambda cls, argv: cli.parse_train(cls, OPTIONS), TrainConfig)

from lightning_utilities.core.apply_func import apply_to_collection  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import train  # noqa: E402
from runtime import loader  # noqa: E402
from runtime.launch import run_and_exit  # noqa: E402

seeder = train.seeder
compute_loss = train.compute_loss
now: dict[str, Any] = {"step": None, "number": None}  # of the micro-batch; None in a validation
followed: set[int] = set()
listdir = os.listdir
scandir = os.scandir


def checksum(value: Any) -> int | None:
    """None for what has something else than tensors and plain values."""
    with suppress(Exception):
        return loader.checksum(value)
    return None


def recorded_seeder(device: str, tag: str, seed: int):
    """The seeder of a tag, which tells what is computed next."""
    set_seed = seeder(device, tag, seed)

    def numbered(number: int):
        if tag == "whole step":
            now["step"] = number
        else:
            now["number"] = number if tag == "step" else None
        set_seed(number + int(SHIFT) if tag == "validate" else number)

    return numbered


def recorded_loss(model, *arguments, **named):
    modules = [value for value in (model, *arguments, *named.values()) if isinstance(value, nn.Module)]
    if MODULES != "-":
        for module in modules:
            follow(module)
    if now["number"] is not None:
        values = [value for value in (*arguments, *named.values()) if not isinstance(value, (TrainConfig, nn.Module))]
        with open(RECORD, "a") as file:
            checksums = " ".join(str(checksum(value)) for value in values)
            file.write(f"{now['step']} {now['number']} {checksums}\n")
    return compute_loss(model, *arguments, **named)


def larger_eval_batches(num_samples: int, batch_size: int, fabric: Any) -> list:
    """As in a validation whose samples do not divide: some batches have a sample more, so its counts matter."""
    return loader.eval_batches(num_samples, 4 * batch_size, fabric)


def follow(model: nn.Module):
    """Records what each module gives in the training steps, and the gradients of that and of the parameters."""
    if id(model) in followed:
        return
    followed.add(id(model))
    for name, module in model.named_modules():
        module.register_forward_hook(partial(record_output, plain(name)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(record_gradient, plain(name)))


def plain(name: str) -> str:
    """The name of a module or a parameter without that of Fabric's wrapper."""
    return name.removeprefix("_forward_module").removeprefix(".") or "the model"


def record_output(name: str, module: nn.Module, arguments: tuple, output: Any):
    record(f"output of {name}", output)
    apply_to_collection(output, Tensor, lambda tensor: follow_tensor(name, tensor))


def follow_tensor(name: str, tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: record(f"gradient of the output of {name}", gradient))
    return tensor


def record_gradient(name: str, parameter: Tensor):
    record(f"gradient of {name}", parameter.grad)


def record(what: str, value: Any):
    if now["number"] is not None:
        with open(MODULES, "a") as file:
            file.write(f"step {now['step']}, micro-batch {now['number']}, {what}: {checksum(value)}\n")


class Reversed:
    """What os.scandir gives, in the reverse order."""

    def __init__(self, *arguments: Any):
        with scandir(*arguments) as entries:
            self.entries = reversed(list(entries))

    def __enter__(self):
        return self

    def __exit__(self, *error: Any):
        pass

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.entries)

    def close(self):
        pass


def kill(event: str, arguments: tuple):
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == KILL:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(kill)
    if os.environ.get("FOLDERS") == "reversed":
        os.listdir = lambda *arguments: listdir(*arguments)[::-1]
        os.scandir = Reversed
    train.seeder = recorded_seeder
    train.compute_loss = recorded_loss
    train.eval_batches = larger_eval_batches
    run_and_exit(train.main, CONFIG)
