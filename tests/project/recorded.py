"""Runs train.py for test_project.py, and records what no file of a run has.

python tests/project/recorded.py RECORD WHAT KILL SHIFT --OPTION VALUE ...

The file RECORD gets a line for each fact: a list in JSON that begins with its kind. `note` writes it, and what calls
`note` says what the list has. With `all` for WHAT, it gets more, such as the checksums of the samples of all sets. The
process is killed when it is about to rename a checkpoint to KILL; a kill from outside might come after the end of so
short a run. SHIFT is added to the seeds of the validations. With FOLDERS=reversed in the environment, folders list
their files in the reverse order, as another file system may.
"""

import gc
import itertools
import json
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from config import TrainConfig
from runtime import cli

RECORD, WHAT, KILL, SHIFT, *OPTIONS = sys.argv[1:]
CONFIG = cli.parse_or_exit(lambda cls, argv: cli.parse_train(cls, OPTIONS), TrainConfig)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lightning.fabric import is_wrapped, seed_everything  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.autograd.function import BackwardCFunction  # noqa: E402
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
save = Run.write_checkpoint
steps = Run.steps
end_report = Run.end_report
order = loader.TrainSampler.order
listdir = os.listdir
scandir = os.scandir

# What is computed now: the step, and the number of the micro-batch in the run or in the validation.
now: dict[str, Any] = {"step": None, "is_validation": False, "number": None, "validations": 0, "set": None}
state: dict[str, Any] = {}
datasets: dict[str, Any] = {}
built: dict[str, Any] = {"loss": None, "rates": {}}  # the last loss, the metrics, and others
followed: dict[nn.Module, str] = {}  # the modules of `state` and their parts, with their names
stepped: dict[Optimizer, set[int]] = {}  # the steps of each optimizer, be it in `state` or not
active: set[Optimizer] = set()  # those of `state` that have had a learning rate above 0
losses: dict[tuple, set] = defaultdict(set)  # of each step and each validation, with the checksums of the batches
kept_nodes: list[int] = []  # before each step of an optimizer
moved: set[int] = set()  # the parameters that should have changed
NORM = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
SAME_VALUES = ("View", "UnsafeView", "ToCopy", "Squeeze", "Unsqueeze", "ReshapeAlias", "Clone", "Alias")  # in a graph
FOLLOWED = (1, 8)  # the steps whose outputs and gradients are noted
MAX_SAMPLES = 5000  # of a set; of a larger one, evenly spaced
MAX_NODES = 100_000  # of a graph that is counted
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
    states = {"torch": torch.get_rng_state(), "NumPy": np.random.get_state()[1:3], "Python": random.getstate()}
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    note(kind, after, number, {name: checksum(state) for name, state in states.items()})


def recorded_fetch(self, batch: tuple[int, np.ndarray]):
    """Notes the generators afterwards, and which set a validation reads."""
    found = fetch(self, batch)
    note_generators("a fetch from the dataset", batch[0])
    names = {name for name, dataset in datasets.items() if dataset is self.dataset}
    now["set"] = id(self.dataset)
    if now["is_validation"] and "val" not in names and names & {"train", "test"}:
        note("validated set", *names)
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
        note("validated", now["validations"], [now["set"], number], given[0])
        built["example"] = (model, arguments, named)
        if number == 0:  # without the flags, which torchmetrics sets
            found = [each for each in attributes(built["metrics"]) if not isinstance(each[1], bool)]
            note("metrics", now["validations"], {name: checksum(value) for name, value in found})
    buffers = {name: checksum(buffer) for name, buffer in plain(model).named_buffers()}
    mode = plain(model).training
    with Watched() if now["step"] == 1 and not now["is_validation"] else nullcontext():
        result = compute_loss(model, *arguments, **named)
    with suppress(Exception):  # the template's own message tells of another result
        built["loss"] = result[0]["loss"]
        losses[now["step"], now["validations"], now["is_validation"]].add((checksum(built["loss"]), given[0]))
    if plain(model).training != mode:
        note("mode", not mode)
    changed = [name for name, buffer in plain(model).named_buffers() if checksum(buffer) != buffers.get(name)]
    norm = [name for name in changed if isinstance(plain(model).get_submodule(name.rpartition(".")[0]), NORM)]
    if now["is_validation"]:
        note("changed in validation", *(name for name in changed if name not in norm))
        note("norm in validation", *norm)
        note_generators("compute_loss", number, "generators of a validation")
    if now["is_validation"] or number is None:
        return result
    # What is there to be filled is no input: of a list, other micro-batches may have left something in it.
    inputs: list = [
        type(value).__name__ if isinstance(value, (list, dict, set)) and checksum(value) != before else before
        for value, before in zip(values, given, strict=True)
    ]
    note("inputs", now["step"], number, inputs)
    built["trained"] = (model, arguments, named)
    note_generators("compute_loss", number)
    if now["step"] in (1, 2):
        note("changed", *(name for name in changed if name not in norm))
        note("norm", *norm)
        with suppress(Exception):  # the template's own message tells of another result
            if names := untrained(result[0]["loss"]):
                note("untrained", ", ".join(names[:5]))
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
        note("loss input", loss, "the output of softmax, but takes logits, and computes it itself")
    if loss == "binary_cross_entropy_with_logits" and made_by(given) == "Sigmoid":
        note("loss input", loss, "the output of sigmoid, but takes logits, and computes it itself")
    if loss == "kl_div" and given.max() > 1e-2:
        note("loss input", loss, "what is no log-probability, but above 0: take the logarithm of its input")
    if loss == "nll_loss" and given.grad_fn and not any("Log" in node.name() for node in graph_of(given)):
        total = given.float().logsumexp(dim).abs().max()
        if total > 1e-2:
            note("loss input", loss, "what is no log-probability: use log_softmax before it, or F.cross_entropy")


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
    is_known = any(each is module for entry in modules().values() for each in entry.modules())
    if not is_known and (now["is_validation"] or isinstance(module, NORM)):
        note("of no entry", type(module).__name__)
    elif not is_known or now["is_validation"]:
        where = "in a validation" if is_known else "and in no module of `state`"
        note("training mode", type(module).__name__, where)


def note_output(module: nn.Module, arguments: tuple, output: Any):
    """Of each module in the first step, and in the first one of the resume: the checksum of what it gives."""
    if module in followed and now["step"] in FOLLOWED and now["number"] is not None and not now["is_validation"]:
        note("module", now["step"], f"micro-batch {now['number']}, output of {followed[module]}", checksum(output))
        note_half(f"the output of {followed[module]}", output)


def note_half(name: str, value: Any):
    """A tensor in half precision, though --precision is that of float32."""
    if CONFIG.precision == "32-true" and getattr(value, "dtype", None) in (torch.float16, torch.bfloat16):
        note("dtype", name, str(value.dtype), CONFIG.precision)


def plain(module: nn.Module) -> nn.Module:
    """The module without the wrappers of Fabric and torch.compile."""
    found: Any = module.module if is_wrapped(module) else module
    return getattr(found, "_orig_mod", found)


def graph_of(*tensors: Any) -> set:
    """The nodes from which tensors were computed, as far as there are not too many. What is no tensor has none."""
    nodes: set = set()
    todo = [getattr(tensor, "grad_fn", None) for tensor in tensors]
    while todo and len(nodes) < MAX_NODES:
        node = todo.pop()
        if node and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    return nodes


def modules() -> dict[str, nn.Module]:
    """Those in `state`."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def untrained(loss: Tensor) -> list[str]:
    """The parameters in the graph of a loss that are in no module of `state`."""
    trained = {id(parameter) for module in modules().values() for parameter in module.parameters()}
    leaves = [node.variable for node in graph_of(loss) if hasattr(node, "variable")]
    names = {id(value): name for name, value in extras().items()}
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
    for entry, module in modules().items():
        followed.update((part, name) for name, part in plain(module).named_modules(prefix=entry))
    built["rates"] = {each: [group["lr"] for group in each.param_groups] for each in optimizers().values()}
    built["run"] = self
    built["first"] = {name: checksum(tensor) for name, tensor in named_tensors(given).items()}
    note_extras(self.fabric.global_rank)


def recorded_steps(self) -> Iterator[int]:
    """Notes what has changed between the end of report() and that of the step."""
    for step in steps(self):
        yield step
        reported = built.get("reported", {})
        if names := [name for name, found in values().items() if found != reported.get(name, found)]:
            note("after report", step, ", ".join(names[:5]))


def recorded_end_report(self, *arguments: Any):
    end_report(self, *arguments)
    built["reported"] = values()


def values() -> dict[str, int | None]:
    """The checksums of the tensors and of the plain values in `state`."""
    if WHAT != "all":
        return {}
    return {name: checksum(value) for name, value in named_tensors(state).items()} | plain_values()


def plain_values() -> dict[str, int | None]:
    entries = built["run"].state.items()
    return {f"state[{name!r}]": checksum(value) for name, value in entries if not hasattr(value, "state_dict")}


def note_step(optimizer: Any, arguments: Any, named: Any):
    """Before each step of an optimizer: schedulers of torch whose rates are not those of the optimizer, a norm that
    should have been clipped, and the nodes of graphs that are kept beside that of the last loss."""
    parameters = parameters_of(optimizer)
    if now["step"] in FOLLOWED:
        for name, tensor in named_tensors(state).items():
            if tensor.grad is not None:
                note("module", now["step"], f"gradient of {name}", checksum(tensor.grad))
    for group in optimizer.param_groups:
        if group["lr"] > 0:
            moved.update(id(each) for each in group["params"] if each.grad is not None and each.grad.any())
    if "schedulers" not in built:
        built["schedulers"] = [each for each in gc.get_objects() if isinstance(each, LRScheduler)]
    rates = [group["lr"] for group in optimizer.param_groups]
    own = [each for each in built["schedulers"] if getattr(each.optimizer, "optimizer", each.optimizer) is optimizer]
    overridden = [type(each).__name__ for each in own if each.get_last_lr() != rates]
    if overridden and len(overridden) == len(own):  # one may hold others, and only the outer one has the rates of now
        note("overridden", ", ".join(sorted(overridden)))
    factors = [rate / first for rate, first in zip(rates, built["rates"].get(optimizer, ()), strict=False) if first]
    if factors and max(factors) > 1.001 * min(factors):
        note("rates", ", ".join(f"{rate:.3g}" for rate in built["rates"][optimizer]))
    stepped.setdefault(optimizer, set()).add(now["step"])
    limit = getattr(CONFIG, "max_grad_norm", 0)
    gradients = [each.grad for each in parameters if each.grad is not None and not each.grad.is_sparse]
    if limit and not named and len(arguments) < 2:  # without a closure, which computes others
        norm = float(nn.utils.get_total_norm(gradients))
        if norm > 1.01 * limit:
            names = [f"state[{name!r}]" for name, each in optimizers().items() if each is optimizer]
            note("not clipped", now["step"], *(names or [type(optimizer).__name__]), norm, limit)
    if WHAT == "all":
        gc.collect()
        with_graph = [each for each in gc.get_objects() if type(each) is Tensor and each.grad_fn is not None]
        kept_nodes.append(len(graph_of(*with_graph) - graph_of(built["loss"])))


def extras() -> dict[str, Any]:
    """What the modules of `state` have that no checkpoint has: attributes, and buffers that are not persistent."""
    found = dict(each for entry, module in modules().items() for each in attributes(module, entry))
    buffers = dict(each for entry, module in modules().items() for each in plain(module).named_buffers(prefix=entry))
    saved = {id(tensor) for tensor in named_tensors(state).values()}
    return found | {name: buffer for name, buffer in buffers.items() if id(buffer) not in saved}


def note_extras(rank: int):
    note("extras", rank, {name: checksum(value) for name, value in extras().items()})


def recorded_save(self, *arguments: Any, **named: Any):
    """At each save, of each rank, also the checksums of the plain values of `state`."""
    active.update(each for each in optimizers().values() if any(group["lr"] > 0 for group in each.param_groups))
    note("state", self.state["step"], self.fabric.global_rank, plain_values())
    note_extras(self.fabric.global_rank)
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
    note("random samples", *(name for name in random_sets if name != "train"))
    seed_everything(CONFIG.seed, verbose=False)
    for name, dataset in build_datasets(CONFIG, augment=False).items():
        if is_random(dataset):
            note("random without augmentation" if name in random_sets else "reversed", name)
        found = None
        with suppress(Exception):
            interval = max(1, -(-len(dataset) // MAX_SAMPLES))
            found = [loader.checksum(sample_of(dataset, number)) for number in range(0, len(dataset), interval)]
        note("samples", name, len(dataset), found)


# ---- at the end of the run


def note_losses(*_: Any):
    """A loss that is the same for other batches with the same weights; graphs of which more and more are kept, and the
    tensors in modules that have one."""
    several = [found for found in losses.values() if len({batch for _, batch in found}) > 1]
    if several and all(len({loss for loss, _ in found}) == 1 for found in several):
        note("independent loss")
    if len(kept_nodes) > 4 and kept_nodes == sorted({*kept_nodes}):
        names = [name for name, value in (named_tensors(state) | extras()).items() if getattr(value, "grad_fn", None)]
        note("kept graph", kept_nodes[-1], ", ".join(names[:5]) or "none")


def note_optimizers(tensors: dict, same: set[str]):
    """Parameters that do not change, though they have a gradient, and are in an optimizer of `state`, or in none. And
    optimizers that are not in it, but train its modules: if they keep something from step to step, or step in place of
    one."""
    known = {id(tensor): name for name, tensor in tensors.items()}
    inside = optimizers()
    for entry, optimizer in inside.items():
        own = parameters_of(optimizer)
        kept = {known.get(id(each)): each for each in own if known.get(id(each)) in same}
        lost = [name for name, each in kept.items() if id(each) in moved and each.dtype == torch.float32]
        if optimizer in active and len(kept) == len(own):
            note("idle optimizer", entry)
        elif lost:
            note("lost", ", ".join(lost[:5]))
        for name in kept:
            note("unchanged", name)
    trained = {id(each) for optimizer in inside.values() for each in parameters_of(optimizer)}
    others = [name for name in tensors if name in same and id(tensors[name]) not in trained]
    if found := [name for name in others if tensors[name].grad is not None and tensors[name].grad.any()]:
        note("in no optimizer", ", ".join(found[:5]))
    idle = {id(each) for value in inside.values() if value not in stepped for each in parameters_of(value)}
    groups = [group for optimizer in inside.values() for group in optimizer.param_groups]
    holders = [state, *(getattr(value, "__dict__", {}) for value in state.values())]  # also the parts of one
    for optimizer, steps in stepped.items():
        own_ids = {id(each) for each in parameters_of(optimizer)}
        is_part = any(group is other for group in optimizer.param_groups for other in groups)
        is_part = is_part or any(holds(values, optimizer) for values in holders)
        keeps = optimizer.state and len(steps) > 1 and own_ids & known.keys()
        if not is_part and (keeps or own_ids & idle):
            note("outside", type(optimizer).__name__)


def optimizers() -> dict[str, Any]:
    """Those in `state`, without Fabric's wrapper."""
    return {name: getattr(each, "optimizer", each) for name, each in state.items() if isinstance(each, Optimizer)}


def parameters_of(optimizer: Any) -> list:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def holds(values: dict, optimizer: Any) -> bool:
    """Whether it is among the values, or in a list or dict there."""
    lists = [value for value in values.values() if isinstance(value, (list, tuple))]
    lists += [[*value.values()] for value in values.values() if isinstance(value, dict)]
    return any(each is optimizer for each in itertools.chain(values.values(), *lists))


def note_state(tensors: dict, same: set[str]):
    """Schedulers that have made no step; weights and metrics in half precision; entries with the same parameters;
    averages whose buffers stay the same, though those of the model change."""
    for name, value in state.items():
        if isinstance(value, LRScheduler) and value.last_epoch == 0:
            note("idle scheduler", name)
    for name, value in (*tensors.items(), *attributes(built["metrics"])):
        note_half(name, value)
    parameters = {entry: {id(each) for each in module.parameters()} for entry, module in modules().items()}
    for one, other in itertools.combinations(parameters, 2):
        if parameters[one] & parameters[other]:
            note("shared" if parameters[one] == parameters[other] else "partly shared", one, other)
    changing = {name.partition(".")[2] for name in tensors.keys() - same}
    for entry in parameters:
        own = {name for name in tensors if name.startswith(f"{entry}.")}
        values = {name: tensors[name] for name in own if not isinstance(tensors[name], nn.Parameter)}
        buffers = {name for name, value in values.items() if value.is_floating_point()}
        stale = {name.removeprefix(f"{entry}.") for name in buffers & same} & changing
        if stale and buffers <= same and own - same:
            note("still", entry, min(stale))


def note_gradient(*_: Any):
    """Where an autograd.Function is in the graph, for each parameter: by how much the loss changes along its gradient,
    divided by what the gradient says. That is 1 if the backward is the derivative of the forward."""
    model, arguments, named = built["trained"]
    model.train()

    def loss() -> Tensor:
        seed_everything(0, verbose=False)
        return compute_loss(model, *arguments, **named)[0]["loss"]

    value = loss()
    functions = {type(node).__name__ for node in graph_of(value) if isinstance(node, BackwardCFunction)}
    if not functions or CONFIG.precision != "32-true":
        return
    parameters = {name: each for name, each in plain(model).named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(value, [*parameters.values()], allow_unused=True)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is None or not gradient.any():
            continue
        ratios = []
        for size in (1e-3, 1e-2):  # against rounding, and against the curvature
            change = size * parameter.detach().norm().clamp(min=0.1) * gradient / gradient.norm()
            losses = []
            for sign in (1, -2):
                parameter.data.add_(change, alpha=sign)
                losses.append(loss().double())
            parameter.data.add_(change)
            ratios.append(float((losses[0] - losses[1]) / (2 * change * gradient).sum()))
        ratio = min(ratios, key=lambda ratio: abs(ratio - 1))
        if not 0.5 < ratio < 2:
            note("gradient", ", ".join(sorted(functions)).replace("Backward", ""), name, ratio)
            return


@torch.no_grad()
def note_metrics(*_: Any):
    """Whether the metrics get the same, bit for bit, with 20 other weights."""
    model, arguments, named = built["example"]
    generator = torch.Generator().manual_seed(0)
    found = set()
    model.eval()
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


class Reversed(AbstractContextManager, Iterator):
    """What os.scandir gives, in the reverse order."""

    def __init__(self, *arguments: Any):
        with scandir(*arguments) as entries:
            self.entries = reversed([*entries])

    def __next__(self):
        return next(self.entries)

    def __exit__(self, *error: Any):
        pass

    close = __exit__


def note_write(event: str, arguments: tuple):
    """The rank that opens a file in the run directory to write, and the path."""
    folder = built["run"].directory.path if event == "open" and "run" in built else None
    if folder and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = os.path.relpath(arguments[0], folder)
        if not path.startswith(".."):
            note("write", built["run"].fabric.global_rank, path)


def kill(event: str, arguments: tuple):
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == KILL:
        os.kill(os.getpid(), signal.SIGKILL)


def main(config: TrainConfig) -> int:
    code = train.main(config)
    if WHAT == "all":
        now["step"] = now["number"] = None
        tensors = named_tensors(state)
        same = {name for name, tensor in tensors.items() if checksum(tensor) == built["first"].get(name)}
        for note_facts in (note_losses, note_optimizers, note_state, note_gradient, note_metrics):
            with suppress(Exception):  # what a project has may be of any kind
                note_facts(tensors, same)
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
    Run.steps = recorded_steps  # type: ignore[method-assign]
    Run.end_report = recorded_end_report  # type: ignore[method-assign]
    Run.write_checkpoint = recorded_save  # type: ignore[method-assign]
    loader.TrainSampler.order = recorded_order  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(note_step)
    nn.modules.module.register_module_forward_pre_hook(note_mode)
    nn.modules.module.register_module_forward_hook(note_output)
    run_and_exit(main, CONFIG)
