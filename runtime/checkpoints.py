"""Checkpoints: which ones a run has, how they are read and written, and what they hold. Nothing here depends on the
task, or on a key of `state`: all modules, optimizers, tensors and plain values in it are treated alike."""

import errno
import os
import shutil
import zipfile
from collections.abc import Callable
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import is_wrapped
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runtime.errors import RunError
from runtime.files import atomically
from runtime.terminal import say

FORMAT = 5  # of checkpoints
# Settings of a parameter group that a resume takes from the code, and those that it does not compare, since they say
# how a step is computed, or are set by schedulers.
AS_BUILT = {"fused", "foreach", "capturable", "initial_lr"}
NOT_COMPARED = AS_BUILT | {"lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}

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


def path_of(run_dir: Path, step: int) -> Path:
    """The regular checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}.ckpt"


def best_of(run_dir: Path) -> Path:
    """The checkpoint of the best validation."""
    return run_dir / "checkpoints" / "best.ckpt"


def regular_checkpoints(run_dir: Path) -> dict:
    """The files step-NUMBER.ckpt of a run, with their steps. Files with other names are ignored."""
    paths = run_dir.glob("checkpoints/step-*.ckpt")
    return {path: int(path.stem[5:]) for path in paths if path.stem[5:].isdecimal()}


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first. best.ckpt is one of them: of a step that is not saved
    regularly, it is the only one."""
    steps = regular_checkpoints(run_dir)
    best = best_of(run_dir)
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


def save(path: Path, contents: dict):
    """Writes a checkpoint, and reads what is in it, but for the bytes of tensors."""
    with atomically(path, "wb") as file:  # fabric.save would write two more copies
        torch.save(contents, file)
        file.flush()
        load(Path(file.name))  # fails now if it would fail in a resume


def link_best(run_dir: Path, step: int):
    """Makes the regular checkpoint of a step the best one, by a link; by a copy where the file system has none. Nothing
    is left to do if it is already, or if best.ckpt is the only file of this step."""
    path = path_of(run_dir, step)
    best = best_of(run_dir)
    if not path.exists() or (best.exists() and best.samefile(path)):
        return
    temporary = best.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    temporary.replace(best)


def remove_old(run_dir: Path, num_keep: int):
    """Deletes all step-*.ckpt but the newest `num_keep`; 0 keeps all."""
    steps = regular_checkpoints(run_dir)
    if num_keep:
        for path in sorted(steps, key=steps.__getitem__)[:-num_keep]:
            path.unlink()


# ---- what a checkpoint holds


def contents_of(state: dict) -> dict:
    """What a checkpoint has of `state`."""
    contents = {}
    for name, value in state.items():
        contents[name] = with_tensors(compact, value.state_dict() if hasattr(value, "state_dict") else value)
    return contents


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


def has_storage(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and is_plain(tensor) and tensor.layout == torch.strided


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a part of a larger one, which torch.save would save as a whole."""
    if has_storage(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


# ---- names of what it holds


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
    """The parameter groups of each optimizer in `state`: the names of the parameters, and the settings. A state_dict
    knows parameters by number alone.

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
                    "of `state`: add a module that has it; call functional_call with model.module; or build the "
                    "optimizer after the model's parameters were replaced"
                )
        kind = type(getattr(value, "optimizer", value)).__name__  # without Fabric's wrapper
        optimizers[entry] = [
            {"parameters": [names[parameter] for parameter in group["params"]], "class": kind, **settings_of(group)}
            for group in value.param_groups
        ]
    return optimizers


def describe_schedulers(state: dict) -> dict:
    """The settings of each scheduler of torch in `state`, as text. Its state_dict has them beside what changes."""
    schedulers = {name: value for name, value in state.items() if isinstance(value, LRScheduler)}
    return {
        name: {setting: repr(value) for setting, value in scheduler.state_dict().items()}
        for name, scheduler in schedulers.items()
    }


def settings_of(group: dict) -> dict:
    """The settings of a parameter group, such as the weight decay."""
    names = sorted(group.keys() - NOT_COMPARED - {"params", "param_names"})
    return {name: group[name] for name in names if isinstance(group[name], (int, float, str, tuple, type(None)))}
