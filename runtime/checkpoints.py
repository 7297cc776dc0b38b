"""Checkpoints: which ones a run has, what they hold, and how `state` is restored from one. Nothing here depends on the
task, or on a key of `state`: all modules, optimizers, tensors and plain values in it are treated alike."""

import errno
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, is_wrapped
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.cli import say
from runtime.errors import RunError
from runtime.files import atomically

FORMAT = 4  # of checkpoints
PLAIN = (int, float, str, bool, type(None))  # beside tensors, all that a checkpoint holds, in dicts, lists and tuples
# What a checkpoint or summary.json has by itself.
RESERVED = ("checkpoint", "last", "micro_batch_size", "parameters", "precision", "seconds", "state")
# Settings of a parameter group that may differ on a resume: how a step is computed, and what schedulers set.
AS_BUILT = {"fused", "foreach", "capturable"}
NOT_COMPARED = AS_BUILT | {"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}

# ---- files


def load(path: Path) -> dict:
    """The contents of a file of torch.save, with tensors on the CPU that are read from the file when they are used.
    Objects other than tensors and plain values could run code: it raises."""
    return torch.load(path, "cpu", mmap=True, weights_only=True)


def step_of(path: Path) -> int:
    """The step of a checkpoint; -1 for any other file, or one that cannot be loaded. Damage within a tensor is not
    seen. Raises OSError if the file cannot be read, which says nothing of what is in it."""
    try:
        return int(load(path)["checkpoint"]["step"])
    except Exception as error:  # EOFError, KeyError, RuntimeError, UnpicklingError, ...
        if is_of_the_system(error):
            raise
        return -1


def is_whole(path: Path) -> bool:
    """Whether each byte of a file of torch.save is as written, by its checksums: torch loads flipped bits without a
    word. Reads the whole file. Raises OSError as step_of does."""
    try:
        return zipfile.ZipFile(path).testzip() is None
    except Exception as error:  # BadZipFile, NotImplementedError, ...
        if is_of_the_system(error):
            raise
        return False


def is_of_the_system(error: Exception) -> bool:
    """Whether an error says nothing of what is in a file. That of an offset below 0 does, or of a folder."""
    return isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR, errno.ENOENT)


def regular_checkpoints(run_dir: Path) -> dict:
    """The files step-NUMBER.ckpt of a run, with their steps. Files with other names are ignored."""
    paths = run_dir.glob("checkpoints/step-*.ckpt")
    return {path: int(path.stem[5:]) for path in paths if path.stem[5:].isdecimal()}


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first. best.ckpt is one of them: it is written before step-*.ckpt, so
    after a kill it may be the newest."""
    steps = regular_checkpoints(run_dir)
    best = run_dir / "checkpoints" / "best.ckpt"
    if best.exists():
        steps[best] = step_of(best)
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def newest_checkpoint(run_dir: Path, summary: dict) -> Path | None:
    """The whole checkpoint of the highest step; None if the run never had one, or is finished and has none left, by its
    summary. Newer ones that are damaged are renamed, since the number of files to keep counts them."""
    damaged = []
    for path in checkpoints_of(run_dir):
        if not is_whole(path) or step_of(path) < 0:  # torch takes an error of the system for damage, zipfile does not
            damaged.append(path)
            continue
        for other in damaged:
            say(f"skipped {other}: it is damaged")
            other.rename(f"{other}.damaged")
        return path
    is_finished = summary.get("state") == "finished"  # so they may have been deleted to save space
    if damaged or ("checkpoint" in summary and not is_finished):
        folder = run_dir / "checkpoints"
        raise RunError(
            f"no checkpoint in {folder} can be read: test.py --checkpoint last says why; nothing was changed"
        )
    return None


def save(run_dir: Path, contents: dict, step: int, is_regular: bool, is_best: bool, is_first: bool):
    """Writes step-*.ckpt if `is_regular`, and best.ckpt if `is_best`; the first file of a process is read back."""
    regular = run_dir / "checkpoints" / f"step-{step:08d}.ckpt"
    best = run_dir / "checkpoints" / "best.ckpt"
    with atomically(best if is_best else regular, "wb") as file:  # fabric.save would write two more copies
        torch.save(contents, file)
        file.flush()
        if is_first:
            load(Path(file.name))  # fails now if it would fail on a resume
    if is_best and is_regular:  # best.ckpt was written first: a kill in between must not lose it
        with suppress(OSError):  # on a file system without links, best.ckpt is the checkpoint of this step
            os.link(best, regular)


def remove_old(run_dir: Path, num_keep: int):
    """Deletes all step-*.ckpt but the newest `num_keep`; 0 keeps all."""
    steps = regular_checkpoints(run_dir)
    if num_keep:
        for path in sorted(steps, key=steps.__getitem__)[:-num_keep]:
            path.unlink()


# ---- what a checkpoint holds


def check_state(state: dict):
    """Raises an error for what could be saved, but not restored."""
    for name in RESERVED:
        if name in state:
            raise RunError(f"state[{name!r}]: each run has its own value of this name; choose another")
    for name, value in state.items():
        if isinstance(value, nn.Module):
            check_loadable(value)
        elif not hasattr(value, "state_dict"):
            check_plain(value, f"state[{name!r}]")


def check_plain(value: Any, name: str):
    """Raises RunError for what could be saved, but not loaded with `weights_only=True`."""
    if type(value) is dict:
        for key, item in value.items():
            check_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            check_plain(item, f"{name}[{number}]")
    elif isinstance(value, Tensor) and value.grad_fn:
        raise RunError(f"{name} has a graph, which may grow with each step: compute it under `torch.no_grad()`")
    elif hasattr(value, "state_dict"):
        raise RunError(f"{name} is a {type(value).__name__}: give it an entry of its own in `state`")
    elif not (isinstance(value, Tensor) or type(value) in PLAIN):
        raise RunError(
            f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: "
            "use tensors, numbers, strings, lists, dicts, or objects with a state_dict"
        )


def with_tensors(function: Callable, value: Any) -> Any:
    """A plain value with function(tensor) in place of each tensor."""
    items = apply_to_collection(value, Tensor, function)
    if not isinstance(value, dict):
        return items
    result = copy(value)  # keeps the versions in a module's state_dict, which some modules need
    result.update(items)
    return result


def is_plain(tensor: Tensor) -> bool:
    """Whether it is of no subclass. Those of 8-bit optimizers have no storage, and no method to clone them."""
    return type(tensor) in (Tensor, nn.Parameter)


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if is_plain(tensor) else tensor


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a part of a larger one, which torch.save would save as a whole."""
    has_storage = is_plain(tensor) and tensor.layout == torch.strided
    if has_storage and tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def check_loadable(module: nn.Module):
    """Loads a copy of the module's own state_dict. So what would fail on a resume fails now, with its name, such as an
    expanded tensor, which cannot be written into."""
    module.load_state_dict(with_tensors(copied, module.state_dict()))


def contents_of(state: dict) -> dict:
    """What a checkpoint has of `state`."""
    contents = {}
    for name, value in state.items():
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        else:
            check_plain(value, f"state[{name!r}]")
        contents[name] = with_tensors(compact, value)
    return contents


def on_cpu(contents: dict) -> list:
    """The names of the entries that have a tensor on the CPU."""
    names = []
    for name, value in contents.items():
        tensors: list = []
        apply_to_collection(value, Tensor, tensors.append)
        if any(tensor.device.type == "cpu" for tensor in tensors):
            names.append(name)
    return names


def describe(state: dict) -> dict:
    """What a resume compares with the checkpoint: the names of what has a state_dict, and the optimizers, as built."""
    return {
        "entries": sorted(name for name, value in state.items() if hasattr(value, "state_dict")),
        "optimizers": describe_optimizers(state),
    }


# ---- restore


def restore(fabric: Fabric, state: dict, saved: dict, now: dict) -> list:
    """Restores `state`: modules, optimizers and tensors in place, other values are replaced.

    Args:
        fabric: Fabric.
        state: The state, as built.
        saved: The contents of a checkpoint.
        now: The description of `state`.

    Returns:
        The names of the entries that are not in the checkpoint. They keep their values.

    Raises:
        ValueError, RuntimeError, ...: The state does not fit.
    """
    about = saved["checkpoint"]
    others = set(now["entries"]) ^ set(about["entries"])
    if others:
        raise ValueError(
            f"{', '.join(sorted(others))}: in `state` or in the checkpoint, but not in both; "
            "rename it, or start a new run from the weights of this one"
        )
    for name, current in state.items():
        if name not in saved:
            continue
        value = with_tensors(copied, saved[name])  # otherwise it would stay backed by the file
        if name in now["optimizers"]:
            restore_optimizer(current, value, now["optimizers"][name], about["optimizers"][name])
            continue
        if name not in about["on_cpu"]:
            value = with_tensors(fabric.to_device, value)
        if isinstance(current, Tensor) and isinstance(value, Tensor):
            current.data = value.to(current.device)  # in place: the loop may have a reference to it
        elif not hasattr(current, "state_dict"):
            state[name] = value
        elif value != {}:  # saved without a gradient scaler; GradScaler does not accept it
            current.load_state_dict(value)
    return [name for name in state if name not in saved]


# ---- optimizers: their state_dicts know parameters by numbers alone, checkpoints by names, too


def named_tensors(state: dict) -> dict:
    """The tensors of the modules in `state` by name: the entry of a module, a dot, the name in its state_dict, and the
    shape. A tied parameter has several names."""
    named = {}
    for entry, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    named[f"{entry}.{name} {tuple(tensor.shape)}"] = tensor
    return named


def fixed_tensors(state: dict) -> set[str]:
    """The names and shapes of the tensors in the modules of `state`, without those of modules that load their state in
    a way of their own: in quantization-aware training these may change their shape, and load another."""
    own = []
    for entry, value in state.items():
        if isinstance(value, nn.Module):
            plain: Any = value.module if is_wrapped(value) else value
            for name, part in plain.named_modules(prefix=entry):
                if type(part)._load_from_state_dict is not nn.Module._load_from_state_dict:
                    own.append(f"{name}.")
    return {name for name in named_tensors(state) if not name.startswith(tuple(own))}


def describe_optimizers(state: dict) -> dict:
    """For each optimizer in `state`: its class, and for each group the names of the parameters and the settings.

    Raises:
        RunError: A parameter is in no module of `state`: DDP would not average it, nor check_weights compare it.
    """
    named = named_tensors(state)
    names = {named[name]: name for name in sorted(named, reverse=True)}  # of a tied parameter, the first
    optimizers = {}
    for entry, value in state.items():
        if not isinstance(value, Optimizer):
            continue
        for parameter in chain(*(group["params"] for group in value.param_groups)):
            if parameter not in names:
                raise RunError(
                    f"state[{entry!r}] trains a parameter of the shape {tuple(parameter.shape)} that is in no module "
                    "of `state`: add a module that has it; call functional_call with model.module"
                )
        optimizers[entry] = {
            "class": type(getattr(value, "optimizer", value)).__name__,  # without Fabric's wrapper
            "parameters": [[names[parameter] for parameter in group["params"]] for group in value.param_groups],
            "settings": [settings_of(group) for group in value.param_groups],
        }
    return optimizers


def settings_of(group: dict) -> dict:
    """The settings of a parameter group, such as the weight decay."""
    names = group.keys() - NOT_COMPARED
    return {name: group[name] for name in sorted(names) if type(group[name]) in (*PLAIN, tuple)}


def restore_optimizer(optimizer: Optimizer, saved: dict, now: dict, then: dict):
    """Restores an optimizer from its state_dict.

    Args:
        optimizer: The optimizer.
        saved: Its state_dict in the checkpoint.
        now: Its description, as built in this process.
        then: Its description, as built in the process that has saved the checkpoint.

    Raises:
        ValueError: It is of another class, has other settings, or trains other parameters, or in another order or
            other groups.
    """
    if now["class"] != then["class"]:
        raise ValueError(f"an optimizer is of class {now['class']}, but {then['class']} in the checkpoint")
    if now["parameters"] != then["parameters"]:
        others = ", ".join(sorted({*chain(*now["parameters"])} ^ {*chain(*then["parameters"])}))
        what = (
            f"other parameters than in the checkpoint: {others}" if others else "them in another order or other groups"
        )
        raise ValueError(f"an optimizer trains {what}")
    for new, old in zip(now["settings"], then["settings"], strict=True):
        for name in new.keys() & old.keys() - {"lr_factor"}:
            if new[name] != old[name]:
                raise ValueError(f"an optimizer has {name} {new[name]}, but {old[name]} in the checkpoint")
    # One with a state_dict of its own may have no groups in it.
    groups = zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False)
    for (group, old), new, was in zip(groups, now["settings"], then["settings"], strict=False):
        as_built = AS_BUILT if new.get("lr_factor") == was.get("lr_factor") else AS_BUILT | {"lr_factor"}
        for name in group.keys() - {"params"}:
            if name in as_built or name not in old:  # the latter is new in the code
                old[name] = group[name]
    optimizer.load_state_dict(saved)
