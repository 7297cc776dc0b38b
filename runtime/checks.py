"""What a run refuses before its first step, in it, and before it saves. All ranks call these functions."""

import math
import re
import shlex
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.checkpoints import (
    describe_optimizers,
    describe_schedulers,
    fixed_tensors,
    has_storage,
    named_tensors,
    with_tensors,
)
from runtime.errors import ConfigError, RunError
from runtime.loggers import scalars_of
from runtime.ranks import difference
from runtime.source import ROOT

# What a checkpoint or summary.json has by itself.
RESERVED = ("checkpoint", "ended", "last", "micro_batch_size", "parameters", "precision", "seconds", "state")
PIECE = 2**18  # bytes of a tensor that are read at once

# ---- before the first step


def check_loggers(names: tuple):
    """Raises ConfigError for a logger that is not installed."""
    for name in names:
        if not find_spec(name):  # csv is a module of Python's
            raise ConfigError(f"--logger_name {name}: is not installed; pip install {name}")


def check_state(state: dict):
    """Raises RunError for what could be saved, but not restored, and for a model in evaluation mode."""
    for name, value in state.items():
        if name in RESERVED:
            raise RunError(f"state[{name!r}]: each run has its own value of this name; choose another")
        check_value(value.state_dict() if hasattr(value, "state_dict") else value, f"state[{name!r}]")
    if not any(isinstance(value, Optimizer) for value in state.values()):
        raise RunError("state: has no optimizer, so a resume would begin with a new one")
    if not state["model"].module.training:
        raise RunError("build_model: the model is in evaluation mode: return model.train()")


def check_order(names: list[str]):
    """Raises RunError if a rank has other names than rank 0, or in another order: those of the tensors of a model, by
    which DDP knows them, or of the parameters of an optimizer."""
    other = difference({f"tensor {number}": name for number, name in enumerate(names)})
    if other:
        raise RunError(f"{other}; all ranks need the same order: was it made in that of a set?")


def check_value(value: Any, name: str):
    """Raises RunError for what torch.save writes, but torch.load refuses, since it could run code."""
    file = BytesIO()
    try:
        torch.save(with_tensors(lambda tensor: None, value), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle raises many
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise RunError(
            f"{name} has what a checkpoint cannot hold ({kind[1] if kind else error}): use tensors, numbers, strings, "
            "lists and dicts of them; what has a state_dict needs an entry of its own"
        ) from error


# ---- in the first step


def check_gradients(fabric: Fabric, state: dict):
    """Raises RunError if DDP would wait for a gradient that did not come, or if there is none at all. It comes before
    the ranks meet: DDP on another rank may be waiting for this gradient."""
    needs_all = not getattr(fabric.strategy, "find_unused_parameters", True)  # of ResumableDDP
    for entry, value in state.items():
        tensors = named_tensors({entry: value})
        without = [name for name, tensor in tensors.items() if tensor.requires_grad and tensor.grad is None]
        if needs_all and without and any(tensor.grad is not None for tensor in tensors.values()):
            raise RunError(
                f"{', '.join(without)}: no gradient in the first step; if that is right, give --strategy "
                "ddp_find_unused_parameters_true, or requires_grad_(False) to what is never trained"
            )
    groups = [group for value in state.values() if isinstance(value, Optimizer) for group in value.param_groups]
    if all(parameter.grad is None for group in groups for parameter in group["params"]):
        raise RunError(
            "nothing has a gradient after the first backward passes: is `fabric.backward` called, and `zero_grad` only "
            "before all micro-batches?"
        )


def check_values(fabric: Fabric, values: dict):
    """Raises RunError if the loss of a rank is not finite in the first step of a process, or a name is taken."""
    if "grad_norm" in values:
        raise RunError("compute_loss: `grad_norm` is logged by train.py: give this value another name")
    total = fabric.all_reduce(values["loss"].detach().clone(), reduce_op="sum").item()
    if not math.isfinite(total):
        raise RunError(f"compute_loss: `loss` is {total} in the first step of this process")


def check_monitor(monitor: str, values: dict, sanity_results: dict):
    """Raises ConfigError if `monitor` is none of the values that are logged."""
    names = [f"train/{name}" for name in (*values, "grad_norm")]
    names += [f"val/{name}" for name in scalars_of(sanity_results)]
    if monitor not in names:
        hint = "" if sanity_results else "; val/ needs validation samples"
        raise ConfigError(f"--monitor {monitor}: choose from {', '.join(names)}{hint}")


# ---- in the first step, and before a save


class AsBuilt:
    """The tensors and the optimizers of `state` as they were built: a resume builds them again, and restores nothing
    else."""

    def __init__(self, state: dict):
        self.names = set(state)
        self.entries = sorted(name for name, value in state.items() if hasattr(value, "state_dict"))
        self.tensors = fixed_tensors(state)
        self.optimizers = describe_optimizers(state)
        self.schedulers = describe_schedulers(state)

    def check(self, state: dict):
        """Raises RunError for a state that a resume could not restore."""
        for name in state.keys() - self.names:
            raise RunError(f"state: {name} came after `run.prepare()`, so a resume would not restore it")
        others = self.tensors ^ fixed_tensors(state)
        if others:
            raise RunError(
                "tensors of `state` came, went or changed their shape since they were built, so a resume could not "
                f"restore them: {', '.join(sorted(others))}; make them in build_model, or not persistent"
            )
        for name, groups in describe_optimizers(state).items():
            built = [group["parameters"] for group in self.optimizers.get(name, [])]
            if [group["parameters"] for group in groups] != built:
                raise RunError(
                    f"state[{name!r}] trains other parameters than before the first step, so a resume could not "
                    "restore it: add all groups before, those of later with a learning rate of 0"
                )


def check_loss(loss: float, step: int, hint: str):
    """Raises RunError if the loss of the steps up to this one is not finite."""
    if not math.isfinite(loss):
        raise RunError(
            f"the loss is {loss} in the steps up to {step}; {hint}, or try a lower learning rate, or clip the gradient"
        )


def where_to_look(config: Any, run_dir: Path, step: int) -> str:
    """How to find the first step that went wrong."""
    if config.fast_run or not (ROOT / "tools" / "replay.py").exists():
        return "find the first such step by --log_interval 1"
    words = shlex.join(["--out_dir", str(run_dir), "--step", str(step)])
    return f"look into the first such step with: python tools/replay.py {words}"


def check_weights(fabric: Fabric, state: dict, step: int, hint: str):
    """Raises RunError if the weights that are trained are not finite, or differ between the ranks: in any bit where all
    ranks have the same kind of processor, and otherwise in their norm."""
    norms = {}
    for name, tensor in named_tensors(state).items():
        if tensor.requires_grad:  # in float32: a norm in bfloat16 has three digits. abs: weights may be complex.
            norms[name] = torch.linalg.vector_norm(tensor.detach().abs().float())
    norm = float(nn.utils.get_total_norm(norms.values()))  # waits for the device, once
    norm_of_rank_0 = fabric.broadcast(norm)
    found: dict = {"weights are those of rank 0": math.isclose(norm, norm_of_rank_0, rel_tol=1e-5)}
    can_compare = fabric.world_size > 1 and math.isfinite(norm_of_rank_0)
    if can_compare and not difference({"processor": processor(fabric.device)}):
        found |= {f"checksum of {name}": each for name, each in sums_of_bits(state, is_trained=True).items()}
    other = difference(found)
    if other:
        raise RunError(
            f"after step {step}, {other}: "
            "do random numbers differ that are drawn after the backward passes? before them, the step seeds them; "
            "or was a module frozen when it was set up, and trained later, or not called as model(...)?"
        )
    if not math.isfinite(norm_of_rank_0):
        names = [name for name, value in norms.items() if not value.isfinite()]
        names = fabric.broadcast(names)
        raise RunError(f"the weights are not finite after step {step}: {', '.join(names)}; {hint}")


def processor(device: torch.device) -> str:
    """The kind of processor that computes: those of one kind give the same bits."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


# ---- checksums


def sums_of_bits(state: dict, is_trained: bool = False) -> dict[str, int]:
    """A checksum of each tensor in the modules of `state`, or of those alone that are trained, by name."""
    sums = {}
    for name, tensor in named_tensors(state).items():
        if has_storage(tensor) and (tensor.requires_grad or not is_trained):
            sums[name] = sum_of_bits(tensor)
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the bytes, times odd numbers by their position: on the device, in pieces, and without rounding, so
    that the order in which a device adds does not matter."""
    factors = torch.arange(1, 2 * PIECE, 2, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    for number, piece in enumerate(values.split(PIECE)):
        total += (piece * factors[: len(piece)]).sum() * (2 * number + 1)
    return total
