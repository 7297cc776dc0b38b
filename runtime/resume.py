"""A resume: what is compared with the run so far, and what is restored from its checkpoint."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from runtime.checkpoints import AS_BUILT, FORMAT, is_plain, load, with_tensors
from runtime.checks import AsBuilt
from runtime.errors import ConfigError
from runtime.options import marked
from runtime.source import ROOT, changed_files, code_folder


class Resume:
    """What is known of the run so far; of a new run, nothing.

    Attributes:
        is_finished: Whether it was finished, by its summary.json.
        summary: What summary.json has.
        saved: The contents of the checkpoint to resume from; {} if there is none.
        origin: Its path, and the source files that have changed since.
        changes: What else has changed, in words.
        step: Its step, or 0.
        micro_batch_size: That of the run so far, or 0.
    """

    def __init__(self):
        self.is_finished = False
        self.summary: dict = {}
        self.saved: dict = {}
        self.origin = ""
        self.changes: list[str] = []
        self.step = 0
        self.micro_batch_size = 0

    def read(self, run_dir: Path, path: Path | None, summary: dict):
        """Reads the checkpoint at `path`, if there is one. Raises ConfigError for one of another version of the
        template."""
        self.summary = summary
        self.is_finished = summary.get("state") == "finished"
        if path is None:
            if not self.is_finished:
                self.changes.append("the run has no checkpoint yet, and begins again at step 0")
            return
        self.saved = load(path)
        about = self.saved["checkpoint"]
        if about.get("format") != FORMAT:
            code = code_folder(run_dir, about["code"])
            raise ConfigError(f"--resume: {path} is of another version of the template: go on with the code in {code}")
        self.origin = f"{path}{changed_files(about['code'])}"
        self.step = self.saved["step"]
        self.micro_batch_size = self.saved["micro_batch_size"]

    def compare(self, config: Any, data: dict):
        """Compares the options and the datasets with those of the checkpoint.

        Args:
            config: The options.
            data: For each dataset its size and its fingerprint, by name.

        Raises:
            ConfigError: Somebody has changed an option in config.yaml that a resume cannot change. Or a dataset has
                another size: position and best value would be of other data.
        """
        about = self.saved.get("checkpoint", {"fixed": {}, "data": {}})
        for name, value in marked(config, "fixed").items():
            then = about["fixed"].get(name, value)
            if then != value:
                raise ConfigError(f"--resume: --{name} is {value}, but was {then} in {self.origin}")
        for name, (size, fingerprint) in data.items():
            old_size, old_fingerprint = about["data"].get(name, (size, fingerprint))
            if size != old_size:
                raise ConfigError(f"--resume: {name} has {size} samples, but had {old_size} in {self.origin}")
            if fingerprint is None:
                self.changes.append(f"the {name} samples have no fingerprint: a resume cannot tell if they change")
            elif old_fingerprint not in (None, fingerprint):
                self.changes.append(f"the {name} samples have changed: their content, labels or augmentation")

    def restore(self, fabric: Fabric, state: dict, built: AsBuilt):
        """Restores the state from the checkpoint: modules, optimizers and tensors in place; other values are replaced.
        Entries that are not in the checkpoint keep their values.

        Args:
            fabric: Fabric.
            state: The state.
            built: The tensors, optimizers and schedulers of `state`, as they were built.

        Raises:
            ConfigError: The state does not fit to the checkpoint.
        """
        about = self.saved["checkpoint"]
        optimizers = built.optimizers
        size = state["micro_batch_size"]
        others = {name for name, value in state.items() if hasattr(value, "state_dict")} ^ {*about["entries"]}
        try:
            if others:
                raise ValueError(
                    f"{', '.join(sorted(others))}: in `state` or in the checkpoint, but not in both; "
                    "rename it, or start a new run from the weights of this one"
                )
            for name, scheduler in built.schedulers.items():
                compare_scheduler(f"state[{name!r}]", scheduler, about["schedulers"][name])
            for name in state:
                if name not in self.saved:
                    self.changes.append(f"state[{name!r}] is not in the checkpoint, and new")
                elif name in optimizers:
                    then = about["optimizers"][name]
                    restore_optimizer(state[name], copied(self.saved[name]), optimizers[name], then)
                else:
                    state[name] = restored(fabric, state[name], copied(self.saved[name]))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # the state has changed
            raise ConfigError(f"--resume {self.origin}: {error}") from error
        self.saved = {}  # closes the file
        state["micro_batch_size"] = size
        if size != self.micro_batch_size:
            was = self.micro_batch_size
            self.changes.append(f"micro_batch_size {size} instead of {was}: dropout and augmentation differ")


def copied(value: Any) -> Any:
    """A value of a checkpoint whose tensors are in memory, and no longer backed by the file."""
    return with_tensors(lambda tensor: tensor.clone() if is_plain(tensor) else tensor, value)


def restored(fabric: Fabric, current: Any, value: Any) -> Any:
    """What an entry of `state` becomes, from what it is now and its value in the checkpoint."""
    are_tensors = isinstance(current, Tensor) and isinstance(value, Tensor)
    if are_tensors and (current.shape, current.dtype) == (value.shape, value.dtype):
        current.data.copy_(value)  # in place: the loop or a dataset may have a view of it
        return current
    tensors: list = []
    apply_to_collection(current, Tensor, tensors.append)
    if not tensors or any(tensor.device.type == fabric.device.type for tensor in tensors):
        value = with_tensors(fabric.to_device, value)  # else it was built on the CPU, and stays there
    if not hasattr(current, "state_dict"):
        return value
    if value != {}:  # saved without a gradient scaler; GradScaler does not accept it
        current.load_state_dict(value)
    return current


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
        ValueError: It trains other parameters, or in other groups, or is of another class, or has other settings. Or it
            has a state_dict of its own, which may have lists in the order of the parameters, and they have another one.
    """
    order = order_of(built, then)
    now, before = ([group["parameters"] for group in groups] for groups in (built, then))
    is_own = type(getattr(optimizer, "optimizer", optimizer)).state_dict is not Optimizer.state_dict
    if is_own and now != before:
        raise ValueError("an optimizer with a state_dict of its own has its parameters in another order")
    built[:] = [built[number] for number in order]
    optimizer.param_groups[:] = [optimizer.param_groups[number] for number in order]
    for group, now, old in zip(optimizer.param_groups, built, then, strict=True):
        compare_settings(now, old)
        places = [now["parameters"].index(name) for name in old["parameters"]]
        for values in (now["parameters"], group["params"], group.get("param_names")):
            if values:
                values[:] = [values[place] for place in places]
    # One with a state_dict of its own may have no groups in it.
    for group, old in zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False):
        if "initial_lr" in old:  # `set_lr` has set it, or a scheduler
            group.setdefault("initial_lr", group["lr"])
        for name in group.keys() - {"params"}:
            if name in AS_BUILT or name not in old:  # the latter is new in the code
                old[name] = group[name]
    optimizer.load_state_dict(saved)


def compare_settings(built: dict, then: dict):
    """Raises ValueError if a group of an optimizer was built with other settings than in the process that has saved the
    checkpoint, the class first."""
    for name, value in then.items():
        if name == "parameters" or built.get(name, value) == value:
            continue
        can_fork = name != "class" and (ROOT / "tools" / "fork.py").exists()
        hint = "; tools/fork.py begins a new run with it" if can_fork else ""
        raise ValueError(f"an optimizer has {name} {built[name]}, but {value} in the checkpoint{hint}")


def compare_scheduler(name: str, built: dict, then: dict):
    """Raises ValueError if a scheduler of torch was built with other settings than in the process that has saved the
    checkpoint: its saved ones would win over those of the code."""
    for setting, value in built.items():
        if then.get(setting) != value:
            raise ValueError(
                f"{name} is built with {setting} {value}, but had {then.get(setting)}: give what it had, or start a "
                "new run from the weights of this one"
            )


def order_of(built: list, then: list) -> list[int]:
    """For each group of the checkpoint the number of the one with the same parameters. Raises ValueError if the groups
    are others."""
    now = [frozenset(group["parameters"]) for group in built]
    before = [frozenset(group["parameters"]) for group in then]
    if {*now} != {*before}:
        others = frozenset().union(*now) ^ frozenset().union(*before)
        names = ", ".join(sorted(others)) or "none"
        raise ValueError(f"an optimizer has other parameter groups than in the checkpoint; other parameters: {names}")
    return [now.index(names) for names in before]
