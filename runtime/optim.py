"""The learning rates and the gradients of an optimizer."""

from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn


def set_lr(optimizer: Any, factor: float):
    """Sets the learning rate of each parameter group: the one it was built with, times a factor. The former is its
    `initial_lr`, as for the schedulers of torch."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor  # of a tensor, a new one


def unscale_gradients(fabric: Fabric, optimizer: Any):
    """Divides the gradients by the loss scale of 16-mixed. Does nothing in other precisions."""
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if scaler:
        scaler.unscale_(optimizer.optimizer)  # Fabric's clip_gradients refuses a fused optimizer


def clip_gradients(optimizer: Any, max_norm: float) -> Tensor:
    """Clips the total norm of an optimizer's gradients to max_norm; 0 only measures it. Returns the norm before
    clipping, on the device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([grad.coalesce().values() if grad.is_sparse else grad for grad in gradients])
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
