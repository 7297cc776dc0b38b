"""A resume: what is compared with the run so far, and what is restored from its checkpoint."""

import shlex
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from runtime import checkpoints
from runtime.checkpoints import AS_BUILT, is_plain, with_tensors
from runtime.errors import ConfigError
from runtime.source import changed_files, code_folder


class Resume:
    """What is known of the run so far. Of a new run nothing is, and the methods do nothing.

    Attributes:
        summary: summary.json, as it was found.
        saved: The contents of the checkpoint to resume from; {} if there is none.
        origin: Its path, and the source files that have changed since.
        changes: What else has changed, in words.
        step: That of the checkpoint, or 0.
        micro_batch_size: That of the run so far, or 0.
    """

    def __init__(self):
        self.summary: dict = {}
        self.saved: dict = {}
        self.origin = ""
        self.changes: list[str] = []
        self.step = 0
        self.micro_batch_size = 0

    def read(self, run_dir: Path, path: Path | None, summary: dict):
        """Reads the checkpoint at `path`; a run may have none yet, or none left. Raises ConfigError for one of another
        version of the template."""
        self.summary = summary
        if path is None:
            if summary.get("state") != "finished":
                self.changes.append("the run has no checkpoint yet, and begins again at step 0")
            return
        self.saved = checkpoints.load(path)
        about = self.saved["checkpoint"]
        if about.get("format") != checkpoints.FORMAT:
            program = shlex.quote(str(code_folder(run_dir, about["code"]) / "train.py"))
            raise ConfigError(
                f"--resume: {path} was written by another version of the template; "
                f"go on with the run's own copy of the code: python {program} --resume {shlex.quote(str(run_dir))}"
            )
        self.step = self.saved["step"]
        self.micro_batch_size = self.saved["micro_batch_size"]
        self.origin = f"{path}{changed_files(about['code'])}"

    def compare(self, data: dict):
        """Compares the datasets with those of the checkpoint.

        Args:
            data: For each dataset its size and its fingerprint, by name.

        Raises:
            ConfigError: A dataset has another size: position and best value would be of other data.
        """
        then = self.saved.get("checkpoint", {}).get("data", {})
        for name, (size, fingerprint) in data.items():
            old_size, old_fingerprint = then.get(name, (size, fingerprint))
            if size != old_size:
                raise ConfigError(
                    f"--resume: the number of {name} samples is {size}, but was {old_size} in {self.origin}: "
                    "a resume cannot change it"
                )
            if fingerprint is None:
                self.changes.append(
                    f"the {name} samples have no fingerprint: a resume cannot tell if they have changed"
                )
            elif old_fingerprint not in (None, fingerprint):
                self.changes.append(f"the {name} samples have changed: their content, labels or augmentation")

    def restore(self, fabric: Fabric, state: dict, built: dict):
        """Restores the state from the checkpoint.

        Args:
            fabric: Fabric.
            state: The state. Entries that are not in the checkpoint keep their values.
            built: The optimizers of `state`, as they were built.

        Raises:
            ConfigError: The state does not fit to the checkpoint.
        """
        micro_batch_size = state["micro_batch_size"]
        try:
            new = restore(fabric, state, self.saved, built)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # the state has changed
            raise ConfigError(f"--resume {self.origin}: {error}") from error
        self.changes += [f"state[{name!r}] is not in the checkpoint, and new" for name in new]
        if micro_batch_size != self.micro_batch_size:
            state["micro_batch_size"] = micro_batch_size
            was = self.micro_batch_size
            self.changes.append(
                f"micro_batch_size {micro_batch_size} instead of {was}: dropout and augmentation differ"
            )
        self.saved = {}  # closes the file


def restore(fabric: Fabric, state: dict, saved: dict, built: dict) -> list:
    """Restores `state`: modules, optimizers and tensors in place, other values are replaced.

    Args:
        fabric: Fabric.
        state: The state.
        saved: The contents of a checkpoint.
        built: The optimizers of `state`, as they were built.

    Returns:
        The names of the entries that are not in the checkpoint. They keep their values.

    Raises:
        ValueError, RuntimeError, ...: The state does not fit.
    """
    about = saved["checkpoint"]
    others = {name for name, value in state.items() if hasattr(value, "state_dict")} ^ {*about["entries"]}
    if others:
        raise ValueError(
            f"{', '.join(sorted(others))}: in `state` or in the checkpoint, but not in both; "
            "rename it, or start a new run from the weights of this one"
        )
    for name, current in state.items():
        if name not in saved:
            continue
        value = with_tensors(copied, saved[name])  # otherwise it would stay backed by the file
        if name in built:
            restore_optimizer(current, value, built[name], about["optimizers"][name])
        elif is_same_kind(current, value):
            current.data.copy_(value)  # in place: the loop or a dataset may have a view of it
        elif not hasattr(current, "state_dict"):
            state[name] = with_tensors(fabric.to_device, value)
        elif value != {}:  # saved without a gradient scaler; GradScaler does not accept it
            current.load_state_dict(with_tensors(fabric.to_device, value))
    return [name for name in state if name not in saved]


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if is_plain(tensor) else tensor


def is_same_kind(one: Any, other: Any) -> bool:
    """Whether both are tensors of one shape and type."""
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return are_tensors and one.shape == other.shape and one.dtype == other.dtype


def restore_optimizer(optimizer: Any, saved: dict, built: list, then: list):
    """Restores an optimizer from its state_dict, which knows parameters by number alone: its groups and their
    parameters are put, in place, into the order of the checkpoint first. So what it has of a parameter finds that by
    name, and sums over all parameters keep their order.

    Args:
        optimizer: The optimizer.
        saved: Its state_dict in the checkpoint.
        built: Its groups, as they were built in this process; they are put into the order of the checkpoint, too.
        then: Its groups in the process that has saved the checkpoint.

    Raises:
        ValueError: It trains other parameters, or in other groups, or is of another class, or has other settings.
    """
    order = order_of(built, then)
    built[:] = [built[number] for number in order]
    optimizer.param_groups[:] = [optimizer.param_groups[number] for number in order]
    for group, now, old in zip(optimizer.param_groups, built, then, strict=True):
        for name in now.keys() & old.keys() - {"parameters"}:
            if now[name] != old[name]:
                raise ValueError(f"an optimizer has {name} {now[name]}, but {old[name]} in the checkpoint")
        places = [now["parameters"].index(name) for name in old["parameters"]]
        for values in (now["parameters"], group["params"], group.get("param_names", [])):
            values[:] = [values[place] for place in places if values]
    # One with a state_dict of its own may have no groups in it.
    for group, old in zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False):
        group.setdefault("initial_lr", group["lr"])
        for name in group.keys() - {"params"}:
            if name in AS_BUILT or name not in old:  # the latter is new in the code
                old[name] = group[name]
    optimizer.load_state_dict(saved)


def order_of(built: list, then: list) -> list[int]:
    """For each group of the checkpoint the number of the one that has the same parameters. Raises ValueError if there
    are others."""
    order: list[int] = []
    for old in then:
        same = [number for number, now in enumerate(built) if {*now["parameters"]} == {*old["parameters"]}]
        order += [number for number in same if number not in order][:1]
    if not len(order) == len(built) == len(then):
        names = [{name for group in groups for name in group["parameters"]} for groups in (built, then)]
        others = ", ".join(sorted(names[0] ^ names[1]))
        what = f"other parameters than in the checkpoint: {others}" if others else "them in other groups"
        raise ValueError(f"an optimizer trains {what}")
    return order
