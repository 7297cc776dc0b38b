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
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
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
from torch.optim import Optimizer  # noqa: E402
from torch.optim.lr_scheduler import LRScheduler  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
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
order = loader.TrainSampler.order
listdir = os.listdir
scandir = os.scandir

# What is computed now: the step, and the number of the micro-batch in the run or in the validation.
now: dict[str, Any] = {"step": None, "is_validation": False, "number": None, "validations": 0}
state: dict[str, Any] = {}
datasets: dict[str, Any] = {}
built: dict[str, Any] = {}  # the metrics, and the schedulers of torch
followed: set[int] = set()
stepped: dict[Optimizer, set[int]] = {}  # the steps of each optimizer, be it in `state` or not
noted: set[tuple] = set()  # by note_once
NORM = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
SAME_VALUES = ("View", "UnsafeView", "ToCopy", "Squeeze", "Unsqueeze", "ReshapeAlias", "Clone", "Alias")  # in a graph
MAX_SAMPLES = 5000  # of a set; of a larger one, evenly spaced
MAX_NODES = 10_000  # of a graph that is counted
# Attributes of each module or metric of which nobody asks.
INTERNAL = {name for name in vars(MeanMetric()) if name.startswith("_")} | set(vars(nn.Module()))


def note(kind: str, *fact: Any):
    with open(RECORD, "a") as file:
        file.write(json.dumps([kind, *fact]) + "\n")


def note_once(kind: str, *fact: Any):
    if (kind, *fact) not in noted:
        noted.add((kind, *fact))
        note(kind, *fact)


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
        note_once("validated set")
    return found


# ---- compute_loss


def recorded_loss(model, *arguments, **named):
    """Of a step: the inputs, the generators afterwards, the buffers that it changes, and the parameters that would be
    trained, but are in no module of `state`. Of a validation: the batch, and before the first one the metrics. Of both
    the loss, and whether the mode of the model changes."""
    values = [value for value in (*arguments, *named.values()) if not isinstance(value, (TrainConfig, nn.Module))]
    given = [checksum(value) for value in values]
    number = now["number"]
    if now["is_validation"]:
        note("validated", now["validations"], number, given[0])
        built["example"] = (model, arguments, named)
        if number == 0:  # without the flags, which torchmetrics sets
            found = [each for each in attributes(built["metrics"]) if not isinstance(each[1], bool)]
            note("metrics", now["validations"], {name: checksum(value) for name, value in found})
    elif number is not None and WHAT == "modules":
        for value in (model, *arguments, *named.values()):
            if isinstance(value, nn.Module):
                follow(value)
    buffers = {name: checksum(buffer) for name, buffer in plain(model).named_buffers()}
    mode = plain(model).training
    with Watched() if now["step"] == 1 and not now["is_validation"] else nullcontext():
        result = compute_loss(model, *arguments, **named)
    with suppress(Exception):  # the template's own message tells of another result
        group = now["validations"] if now["is_validation"] else -(now["step"] or 0)
        note("loss", group, checksum(result[0]["loss"]), given[0])
    if plain(model).training != mode:
        note_once("mode", not mode)
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
            if names := untrained(result[0]["loss"]):
                note_once("untrained", ", ".join(names[:5]))
    return result


class Watched(TorchFunctionMode):
    """Notes where a loss of torch gets what it does not take."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = named or {}
        with suppress(Exception):
            note_input(function.__name__, arguments[0] if arguments else named["input"])
        return function(*arguments, **named)


def note_input(loss: str, given: Tensor):
    dim = min(1, given.ndim - 1)  # of the classes
    if loss == "cross_entropy" and made_by(given) == "Softmax" and given.sum(dim).sub(1).abs().max() < 1e-2:
        note_once("loss input", loss, "the output of softmax, but takes logits, and computes it itself")
    if loss == "binary_cross_entropy_with_logits" and made_by(given) == "Sigmoid":
        note_once("loss input", loss, "the output of sigmoid, but takes logits, and computes it itself")
    if loss == "nll_loss" and given.grad_fn and not any("Log" in node.name() for node in graph_of(given)):
        total = given.float().logsumexp(dim).abs().max()
        if total > 1e-2:
            note_once("loss input", loss, "what is no log-probability: use log_softmax before it, or F.cross_entropy")


def made_by(tensor: Tensor) -> str:
    """The operation that has computed its values, as the graph names it."""
    node = tensor.grad_fn
    while node and node.name().startswith(SAME_VALUES):
        node = node.next_functions[0][0]
    return node.name().removesuffix("Backward0") if node else ""


def note_mode(module: nn.Module, arguments: tuple):
    """Before each call of dropout or BatchNorm in training mode: in a validation, or of one that is not in `state`."""
    if not isinstance(module, (NORM, DROPOUT)) or not module.training or not state or now["number"] is None:
        return
    if module not in built.get("modules", ()):  # of `state`
        built["modules"] = {each for part in state.values() if isinstance(part, nn.Module) for each in part.modules()}
    is_known = module in built["modules"]
    if not is_known and (now["is_validation"] or isinstance(module, NORM)):
        note_once("of no entry", type(module).__name__)
    elif not is_known or now["is_validation"]:
        where = "in a validation" if is_known else "and in no module of `state`"
        note_once("training mode", type(module).__name__, where)


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
    built["run"] = self
    built["first"] = {name: tensors_of(value) for name, value in given.items() if isinstance(value, nn.Module)}


def recorded_restore(self):
    restore(self)
    state.update(self.state)
    note_attributes(state, state["step"], self.fabric.global_rank)


def note_step(optimizer: Any, arguments: Any, named: Any):
    """Before each step of an optimizer: the parameters that have a gradient other than 0, schedulers of torch whose
    rates are not those of the optimizer, a norm that should have been clipped, and how many graphs are kept."""
    names = {id(tensor): name for name, tensor in named_tensors(state).items()}
    parameters = parameters_of(optimizer)
    having = [names.get(id(each)) for each in parameters if each.grad is not None and each.grad.any()]
    if "schedulers" not in built:
        built["schedulers"] = [each for each in gc.get_objects() if isinstance(each, LRScheduler)]
    rates = [group["lr"] for group in optimizer.param_groups]
    own = [each for each in built["schedulers"] if getattr(each.optimizer, "optimizer", each.optimizer) is optimizer]
    overridden = [type(each).__name__ for each in own if each.get_last_lr() != rates]
    stepped.setdefault(optimizer, set()).add(now["step"])
    limit = getattr(CONFIG, "max_grad_norm", 0)
    gradients = [each.grad for each in parameters if each.grad is not None and not each.grad.is_sparse]
    if limit and not named and len(arguments) < 2:  # without a closure, which computes others
        norm = float(nn.utils.get_total_norm(gradients))
        if norm > 1.01 * limit:
            note("norm", now["step"], norm, limit)
    if WHAT == "samples":
        gc.collect()
        with_graph = [each for each in gc.get_objects() if type(each) is Tensor and each.grad_fn is not None]
        note("tensors with a graph", now["step"], len(with_graph))
    note("stepped", now["step"], having)
    if overridden and len(overridden) == len(own):  # one may hold others, and only the outer one has the rates of now
        note_once("overridden", ", ".join(sorted(overridden)))


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


def recorded_order(self, epoch: int) -> Any:
    found = order(self, epoch)
    with suppress(Exception):  # a large one is computed index by index, and what has an order may have no length
        name = next((name for name, each in datasets.items() if each is self.dataset), type(self.dataset).__name__)
        note("order", name, epoch, loader.checksum(found), len(np.unique(found)) / len(self.dataset))
    return found


def sample_of(dataset: Any, number: int, seed: int = 0) -> Any:
    return fetch(loader.SeededBatches(dataset, 0), (seed, np.array([number])))


def note_samples():
    """The checksums of the samples of each set, as they are without augmentation; None where a sample has none, or
    cannot be fetched alone. And the sets whose samples another seed changes, as in the run and without augmentation."""

    def is_random(dataset: Any) -> bool:
        numbers = np.linspace(0, len(dataset) - 1, 8, dtype=int) if len(dataset) else []
        with suppress(Exception):
            return any(checksum(sample_of(dataset, n)) != checksum(sample_of(dataset, n, seed=1)) for n in numbers)
        return False

    random_sets = [name for name, dataset in datasets.items() if is_random(dataset)]
    note("random samples", random_sets)
    seed_everything(CONFIG.seed, verbose=False)
    for name, dataset in build_datasets(CONFIG, augment=False).items():
        if is_random(dataset):
            note("random without augmentation" if name in random_sets else "reversed", name)
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


# ---- at the end of the run


def note_optimizers():
    """The parameters that have a gradient, but are in no optimizer of `state`, and do not change. And the optimizers
    that are not in it, but train its modules: if they keep something from step to step, or step in place of one."""
    inside = [getattr(value, "optimizer", value) for value in state.values() if isinstance(value, Optimizer)]
    trained = {id(each) for optimizer in inside for each in parameters_of(optimizer)}
    idle = {id(each) for optimizer in inside if optimizer not in stepped for each in parameters_of(optimizer)}
    same = {f"{entry}.{name}" for entry in built["first"] for name in unchanged(entry)}
    tensors = named_tensors(state)
    others = [name for name, each in tensors.items() if id(each) not in trained and name.split(" ")[0] in same]
    if names := [name for name in others if tensors[name].grad is not None and tensors[name].grad.any()]:
        note("in no optimizer", ", ".join(names[:5]))
    groups = [group for optimizer in inside for group in optimizer.param_groups]
    holders = [state, *(getattr(value, "__dict__", {}) for value in state.values())]  # also the parts of one
    for optimizer, steps in stepped.items():
        own = {id(each) for each in parameters_of(optimizer)}
        is_part = any(group is other for group in optimizer.param_groups for other in groups)
        is_part = is_part or any(holds(values, optimizer) for values in holders)
        keeps = optimizer.state and len(steps) > 1 and own & {id(each) for each in tensors.values()}
        if not is_part and (keeps or own & idle):
            note("outside", type(optimizer).__name__)


def parameters_of(optimizer: Any) -> list:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def holds(values: dict, optimizer: Any) -> bool:
    """Whether it is among the values, or in a list or dict there."""
    lists = [value for value in values.values() if isinstance(value, (list, tuple))]
    lists += [[*value.values()] for value in values.values() if isinstance(value, dict)]
    return any(each is optimizer for each in itertools.chain(values.values(), *lists))


def note_state():
    """Schedulers that have made no step; entries with the same parameters; averages whose buffers stay the same, though
    those of the model change."""
    modules = {name: plain(value) for name, value in state.items() if isinstance(value, nn.Module)}
    for name, value in state.items():
        if isinstance(value, LRScheduler) and value.last_epoch == 0:
            note("idle scheduler", name)
    for one, other in itertools.combinations(modules, 2):
        ours, theirs = ({id(each) for each in modules[name].parameters()} for name in (one, other))
        if ours & theirs:
            note("shared" if ours == theirs else "partly shared", one, other)
    for name, module in modules.items():
        buffers = {plain_name(key) for key, each in module.named_buffers() if each.is_floating_point()}
        still = unchanged(name)
        changes = built["first"]["model"].keys() - unchanged("model")
        if buffers <= still and buffers & changes and built["first"][name].keys() - still:
            note("still", name, min(buffers & changes))


def unchanged(entry: str) -> set[str]:
    """The names of the tensors of a module in `state` that are those of the beginning."""
    return {name for name, found in tensors_of(state[entry]).items() if found == built["first"][entry].get(name)}


def tensors_of(module: nn.Module) -> dict:
    return {plain_name(name): checksum(each) for name, each in plain(module).state_dict().items()}


@torch.no_grad()
def note_metrics():
    """Whether the metrics get the same, bit for bit, with 20 other weights."""
    model, arguments, named = built["example"]
    generator = torch.Generator().manual_seed(0)
    found = set()
    model.eval()
    now["step"] = now["number"] = None
    for _ in range(20):
        for each in plain(model).parameters():
            noise = torch.randn(each.shape, generator=generator).to(each)
            each.mul_(noise).add_(0.02 * noise)
        seed_everything(0, verbose=False)
        outputs = compute_loss(model, *arguments, **named)[2]
        found.add(checksum(outputs) if outputs else None)
        if len(found) > 1 or None in found:
            return
    note("independent metrics")


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


def note_write(event: str, arguments: tuple):
    """The rank that opens a file in the run directory to write, and the path."""
    folder = built["run"].directory.path if event == "open" and "run" in built else None
    if folder and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = os.path.relpath(arguments[0], folder)
        if not path.startswith(".."):
            note_once("write", built["run"].fabric.global_rank, path)


def kill(event: str, arguments: tuple):
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == KILL:
        os.kill(os.getpid(), signal.SIGKILL)


def main(config: TrainConfig) -> int:
    code = train.main(config)
    if WHAT == "samples":
        for note_facts in (note_optimizers, note_state, note_metrics):
            with suppress(Exception):  # what a project has may be of any kind
                note_facts()
        note_samples()
    return code


if __name__ == "__main__":
    sys.addaudithook(kill)
    sys.addaudithook(note_write)
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
    loader.TrainSampler.order = recorded_order  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(note_step)
    nn.modules.module.register_module_forward_pre_hook(note_mode)
    run_and_exit(main, CONFIG)
