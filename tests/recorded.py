"""Runs train.py for test_project.py, and records what no file of a run has.

python tests/recorded.py RECORD WHAT KILL SHIFT --OPTION VALUE ...

The file RECORD gets a line for each fact: a list in JSON that begins with its kind. `note` writes it, and what calls
`note` says what the list has. With `modules` for WHAT, the file `modules` beside RECORD gets the checksums of the
outputs of the modules, and of the gradients; with `samples`, RECORD gets those of the samples of all sets. The process
is killed when it is about to rename a checkpoint to KILL; a kill from outside might come after the end of so short a
run. SHIFT is added to the seeds of the validations. With FOLDERS=reversed in the environment, folders list their files
in the reverse order, as another file system may.
"""

import gc
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import TrainConfig
from runtime import cli

RECORD, WHAT, KILL, SHIFT, *OPTIONS = sys.argv[1:]
CONFIG = cli.parse_or_exit(lambda cls, argv: cli.parse_train(cls, OPTIONS), TrainConfig)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lightning.fabric import is_wrapped, seed_everything  # noqa: E402
from lightning_utilities.core.apply_func import apply_to_collection  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim.lr_scheduler import LRScheduler  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402

import train  # noqa: E402
from runtime import loader  # noqa: E402
from runtime import run as run_module  # noqa: E402
from runtime.checkpoints import named_tensors  # noqa: E402
from runtime.launch import run_and_exit  # noqa: E402
from runtime.run import Run  # noqa: E402

seeder = train.seeder
compute_loss = train.compute_loss
build_datasets = train.build_datasets
build_metrics = train.build_metrics
fetch = loader.SeededBatches.__getitem__
prepare = Run.prepare
restore = Run.restore
save = Run.write_checkpoint
listdir = os.listdir
scandir = os.scandir

# What is computed now: the step, and the number of the micro-batch in the run or in the validation.
now: dict[str, Any] = {"step": None, "is_validation": False, "number": None, "validations": 0}
state: dict[str, Any] = {}
datasets: dict[str, Any] = {}
built: dict[str, Any] = {}  # the metrics, and the schedulers of torch
followed: set[int] = set()
NORM = nn.modules.batchnorm._BatchNorm
MAX_SAMPLES = 5000  # of a set; of a larger one, evenly spaced
MAX_NODES = 10_000  # of a graph that is counted
# Attributes of each module or metric of which nobody asks.
INTERNAL = {name for name in vars(MeanMetric()) if name.startswith("_")} | set(vars(nn.Module()))


def note(kind: str, *fact: Any):
    with open(RECORD, "a") as file:
        file.write(json.dumps([kind, *fact]) + "\n")


def checksum(value: Any) -> int | None:
    """Of a batch that is an object with a method `to`, that of its attributes. None for what has something else than
    tensors and plain values."""
    with suppress(Exception):
        return loader.checksum(value)
    with suppress(Exception):
        return loader.checksum(vars(value)) if hasattr(value, "to") else None
    return None


# ---- random numbers


def recorded_seeder(device: str, tag: str, seed: int):
    """The seeder of a tag, which tells what is computed next."""
    set_seed = seeder(device, tag, seed)
    if tag not in ("whole step", "step", "validate"):
        return set_seed
    if tag == "validate":
        now["validations"] += 1
        now["is_validation"] = True  # before the first fetch

    def numbered(number: int):
        now["is_validation"] = tag == "validate"
        if tag == "whole step":
            now["step"] = number
        else:
            now["number"] = number
        set_seed(number + int(SHIFT) if tag == "validate" else number)

    return numbered


def note_generators(after: str, number: int, kind: str = "generators"):
    """After what, the number of its seed, and the checksums of the global generators of torch, NumPy and Python."""
    _, keys, position, *_ = np.random.get_state()
    states = {"torch": torch.get_rng_state(), "NumPy": [keys, position], "Python": random.getstate()}
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    note(kind, after, number, {name: checksum(state) for name, state in states.items()})


def recorded_fetch(self, batch: tuple[int, np.ndarray]):
    """Notes the generators afterwards, and which set a validation reads."""
    found = fetch(self, batch)
    note_generators("a fetch from the dataset", batch[0])
    if now["is_validation"] and self.dataset is datasets.get("train"):
        note("validated set", "train")
    return found


# ---- compute_loss


def recorded_loss(model, *arguments, **named):
    """Of a step: the inputs, the generators afterwards, the buffers that it changes, and the parameters that would be
    trained, but are in no module of `state`. Of a validation: the batch, and before the first one the metrics."""
    values = [value for value in (*arguments, *named.values()) if not isinstance(value, (TrainConfig, nn.Module))]
    given = [checksum(value) for value in values]
    number = now["number"]
    if now["is_validation"]:
        note("validated", now["validations"], number, given[0])
        if number == 0:  # without the flags, which torchmetrics sets
            found = [each for each in attributes(built["metrics"]) if not isinstance(each[1], bool)]
            note("metrics", now["validations"], {name: checksum(value) for name, value in found})
    elif number is not None and WHAT == "modules":
        for value in (model, *arguments, *named.values()):
            if isinstance(value, nn.Module):
                follow(value)
    buffers = {name: checksum(buffer) for name, buffer in plain(model).named_buffers()}
    result = compute_loss(model, *arguments, **named)
    changed = [name for name, buffer in plain(model).named_buffers() if checksum(buffer) != buffers.get(name)]
    of_batch_norm = [name for name in changed if isinstance(plain(model).get_submodule(name.rpartition(".")[0]), NORM)]
    if now["is_validation"]:
        note("buffers of a validation", changed, of_batch_norm)
        note_generators("compute_loss", number, "generators of a validation")
    if now["is_validation"] or number is None:
        return result
    # What is there to be filled is no input: of a list, other micro-batches may have left something in it.
    inputs: list = [
        type(value).__name__ if isinstance(value, (list, dict, set)) and checksum(value) != before else before
        for value, before in zip(values, given, strict=True)
    ]
    note("inputs", now["step"], number, inputs)
    note_generators("compute_loss", number)
    if now["step"] in (1, 2):
        note("buffers", changed, of_batch_norm)
        with suppress(Exception):  # the template's own message tells of another result
            note("untrained", untrained(result[0]["loss"]))
    return result


def plain(module: nn.Module) -> nn.Module:
    """The module without the wrappers of Fabric and torch.compile."""
    found: Any = module.module if is_wrapped(module) else module
    return getattr(found, "_orig_mod", found)


def graph_of(tensor: Tensor) -> set:
    """The nodes from which a tensor was computed, as far as there are not too many."""
    nodes: set = set()
    todo = [tensor.grad_fn]
    while todo and len(nodes) < MAX_NODES:
        node = todo.pop()
        if node and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    return nodes


def untrained(loss: Tensor) -> list[str]:
    """The parameters in the graph of a loss that are in no module of `state`."""
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    trained = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    leaves = [node.variable for node in graph_of(loss) if hasattr(node, "variable")]
    names = {id(value): name for each, module in modules.items() for name, value in attributes(module, each)}
    return sorted(
        names.get(id(leaf), f"a parameter of the shape {tuple(leaf.shape)}")
        for leaf in leaves
        if isinstance(leaf, nn.Parameter) and id(leaf) not in trained
    )


def attributes(value: Any, name: str = "metrics") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in the attributes of a module, beside its parameters and buffers, by name; also those of
    an object that is no module. Lists of its parameters, as nn.GRU has, are left out."""
    parts = plain(value).named_modules(prefix=name) if isinstance(value, nn.Module) else [(name, value)]
    known = {id(each) for each in (*value.parameters(), *value.buffers())} if isinstance(value, nn.Module) else set()
    for path, part in parts:
        for key, each in vars(part).items():
            if key not in INTERNAL:
                yield from (found for found in leaves(each, f"{path}.{key}") if id(found[1]) not in known)


def leaves(value: Any, name: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and flags in lists and dicts, and the parameters of modules there."""
    if isinstance(value, (Tensor, np.ndarray, int, float)):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from value.named_parameters(prefix=name)
    elif isinstance(value, (list, tuple)) and depth:
        for number, item in enumerate(value):
            yield from leaves(item, f"{name}[{number}]", depth - 1)
    elif isinstance(value, dict) and depth:
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]", depth - 1)


# ---- steps and saves


def recorded_prepare(self, given: dict, plan: Any):
    prepare(self, given, plan)
    state.update(given)


def recorded_restore(self):
    restore(self)
    state.update(self.state)
    note_attributes(state, state["step"], self.fabric.global_rank)


def note_step(optimizer: Any, arguments: Any, named: Any):
    """Before each step of an optimizer: the parameters that have a gradient other than 0, and the schedulers of torch
    whose rates are not those of the optimizer."""
    names = {id(tensor): name for name, tensor in named_tensors(state).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    having = [names.get(id(each)) for each in parameters if each.grad is not None and each.grad.any()]
    if "schedulers" not in built:
        built["schedulers"] = [each for each in gc.get_objects() if isinstance(each, LRScheduler)]
    rates = [group["lr"] for group in optimizer.param_groups]
    own = [each for each in built["schedulers"] if getattr(each.optimizer, "optimizer", each.optimizer) is optimizer]
    overridden = [type(each).__name__ for each in own if each.get_last_lr() != rates]
    # One scheduler may hold others, and only the outer one has the rates of now.
    note("stepped", now["step"], having, overridden if len(overridden) == len(own) else [])


def note_attributes(given: dict, step: int, rank: int):
    """Of what the modules have beside parameters and buffers the checksums, and the sizes of the graphs from which they
    were computed."""
    found = {}
    for entry, module in given.items():
        if isinstance(module, nn.Module):
            buffers = plain(module).named_buffers(prefix=entry)
            graphs = [each for each in buffers if each[1].grad_fn]
            for name, value in [*attributes(module, entry), *graphs]:
                nodes = len(graph_of(value)) if isinstance(value, Tensor) else 0
                found[name] = [checksum(value), nodes]
    note("attributes", step, rank, found)


def recorded_save(self, *arguments: Any, **named: Any):
    """At each save, of each rank, also the checksums of the plain values of `state`."""
    step = self.state["step"]
    values = {name: checksum(value) for name, value in self.state.items() if not hasattr(value, "state_dict")}
    note("state", step, self.fabric.global_rank, values)
    note_attributes(self.state, step, self.fabric.global_rank)
    return save(self, *arguments, **named)


# ---- the sets


def recorded_build(*arguments: Any, **named: Any) -> dict:
    found = build_datasets(*arguments, **named)
    datasets.update(found)
    return found


def recorded_metrics(*arguments: Any, **named: Any) -> Any:
    built["metrics"] = build_metrics(*arguments, **named)
    return built["metrics"]


def other_eval_batches(num_samples: int, batch_size: int, fabric: Any) -> list:
    """On one process larger batches, which do not divide: some have a sample more, so its counts matter. On two smaller
    ones, so it shows where a sample's result depends on the others in its batch, as on the padding to the longest."""
    return loader.eval_batches(num_samples, batch_size if fabric.world_size > 1 else 4 * batch_size, fabric)


def sample_of(dataset: Any, number: int, seed: int = 0) -> Any:
    return fetch(loader.SeededBatches(dataset, 0), (seed, np.array([number])))


def note_samples():
    """The checksums of the samples of each set, as they are without augmentation; None where a sample has none, or
    cannot be fetched alone. And the sets for validation and test whose samples another seed changes."""
    for name, dataset in datasets.items():
        numbers = np.linspace(0, len(dataset) - 1, 8, dtype=int) if len(dataset) and name != "train" else []
        with suppress(Exception):
            if any(checksum(sample_of(dataset, n)) != checksum(sample_of(dataset, n, seed=1)) for n in numbers):
                note("random samples", name)
    seed_everything(CONFIG.seed, verbose=False)
    for name, dataset in build_datasets(CONFIG, augment=False).items():
        found = None
        with suppress(Exception):
            interval = max(1, -(-len(dataset) // MAX_SAMPLES))
            found = [loader.checksum(sample_of(dataset, number)) for number in range(0, len(dataset), interval)]
        note("samples", name, len(dataset), found)


# ---- modules


def follow(model: nn.Module):
    """Records what each module gives in the training steps, and the gradients of that and of the parameters."""
    if id(model) in followed:
        return
    followed.add(id(model))
    for name, module in model.named_modules():
        module.register_forward_hook(partial(record_output, plain_name(name)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(record_gradient, plain_name(name)))


def plain_name(name: str) -> str:
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
    if now["number"] is not None and not now["is_validation"]:
        with open(Path(RECORD).with_name("modules"), "a") as file:
            file.write(f"step {now['step']}, micro-batch {now['number']}, {what}: {checksum(value)}\n")


# ---- the system


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


def main(config: TrainConfig) -> int:
    code = train.main(config)
    if WHAT == "samples":
        note_samples()
    return code


if __name__ == "__main__":
    sys.addaudithook(kill)
    if os.environ.get("FOLDERS") == "reversed":
        os.listdir = lambda *arguments: listdir(*arguments)[::-1]
        os.scandir = Reversed
    for module in (train, loader, run_module):
        module.seeder = recorded_seeder  # type: ignore[attr-defined]
    train.compute_loss = recorded_loss
    train.eval_batches = other_eval_batches
    train.build_datasets = recorded_build
    train.build_metrics = recorded_metrics
    loader.SeededBatches.__getitem__ = recorded_fetch  # type: ignore[method-assign]
    Run.prepare = recorded_prepare  # type: ignore[method-assign]
    Run.restore = recorded_restore  # type: ignore[method-assign]
    Run.write_checkpoint = recorded_save  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(note_step)
    run_and_exit(main, CONFIG)
