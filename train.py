"""Trains a classifier. The whole loop is in this file: edit it where it stands.

python train.py                                     # digits, well under a minute on a CPU
python train.py --effective_batch_size 256 --precision bf16-mixed
python train.py --resume auto                       # go on where a killed run stopped
python test.py --out_dir 20261121-093000-train_out  # evaluate a run
"""

from config import TrainConfig
from runtime import cli

if __name__ == "__main__":
    # Before the heavy imports: --help and a mistyped option are answered at once.
    CONFIG = cli.parse_or_exit(cli.parse_train, TrainConfig)

import math
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from data import build_datasets
from model import Model
from runtime.launch import run_and_exit
from runtime.loader import Loader, TrainSampler, eval_batches, seeder
from runtime.meters import Means, Timer, clip_gradients, scores_of, set_lr, unscale_gradients
from runtime.rundir import RunDir, run_training
from utils import Plan, make_plan, update_best


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """The model for the samples of a dataset, in training mode: one of Hugging Face's needs `.train()`."""
    image, _ = dataset[0]
    return Model(image.shape, dataset.num_classes, config.width, config.dropout)


def compute_loss(model: nn.Module, batch, config: TrainConfig) -> tuple[dict[str, Tensor], int, tuple]:
    """Forward pass and loss of training, validation and test.py. `model.training` is True only in training. The global
    generators of torch, NumPy and Python are seeded before each call. What only a training step has, such as a weight
    that grows with the step or a teacher, is a further argument, whose default is what a validation uses:
    `compute_loss(model, batch, config, teacher=None)`. Call the model as `model(...)` alone: its other methods do not
    run in mixed precision, and fail on several devices.

    Args:
        model: The model of `build_model`, set up by Fabric.
        batch: What the dataset gives: images (batch, channels, height, width) and class indices (batch,).
        config: The options.

    Returns:
        values: The means over the batch by name, of the same names on all ranks. All are logged, `loss` is minimized.
        count: The number of samples in the batch: the weight of the means. recipes/data.md has means over tokens.
        outputs: The arguments of `metrics.update`.
    """
    images, targets = batch
    logits = model(images)
    return {"loss": F.cross_entropy(logits, targets)}, len(targets), (logits, targets)


def build_metrics(config: TrainConfig, dataset: Dataset) -> MetricCollection:
    """The metrics of a validation and of test.py.

    A number that `compute` returns is averaged over the ranks. A score that is no mean, such as most of scikit-learn,
    needs the samples of all ranks: write a Metric of torchmetrics with `self.add_state("scores", [],
    dist_reduce_fx="cat")`, and append a tensor with a row per sample in `update`. In `compute`,
    `dim_zero_cat(self.scores)` of torchmetrics.utilities has the rows of all ranks. Only these states are reset.
    """
    accuracy = MulticlassAccuracy(dataset.num_classes, average="micro", validate_args=False)
    return MetricCollection({"accuracy": accuracy}, compute_groups=False)  # each metric has a state of its own


def learning_rate(config: TrainConfig, plan: Plan, step: int) -> float:
    """The learning rate of a step, counted from 1. A function of the step alone: there is no state to restore.
    recipes/README.md shows how to use a scheduler of torch."""
    warmup_steps = config.warmup_epochs * plan.steps_per_epoch
    done = step - 1  # steps
    if done < warmup_steps:
        return plan.peak_lr * step / (warmup_steps + 1)
    if config.lr_schedule == "cosine":  # Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts
        angle = math.pi * (done - warmup_steps) / (plan.total_steps - warmup_steps)
        return plan.peak_lr * 0.5 * (1 + math.cos(angle))
    return plan.peak_lr


@torch.no_grad()
def validate(fabric: Fabric, config, model: nn.Module, loader: Loader, metrics, max_batches: int | None = None) -> dict:
    """The means of what compute_loss returns, and the metrics, over all samples or `max_batches` batches per rank."""
    if len(loader) == 0:  # --limit_val_batches 0
        return {}
    means = Means(fabric)
    set_seed = seeder(fabric.device.type, "validate", config.seed)
    metrics.reset()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for number, batch in enumerate(islice(loader, max_batches)):
        set_seed(number * fabric.world_size + fabric.global_rank)
        values, count, outputs = compute_loss(model, batch, config)
        means.add(values, count)
        metrics.update(*outputs)
    for module, is_training in modes:  # a frozen part may have another mode than the whole
        module.train(is_training)
    return means.take() | scores_of(fabric, metrics.compute())  # waits for the device


def train(fabric: Fabric, config: TrainConfig, run: RunDir, datasets: dict[str, Dataset]) -> int:
    """The training run. Returns the exit code. `run.resources` closes what must not outlive the run.

    `run` knows these entries of `state` by name: `step`, `best`, `best_step` and `bad_validations`. To a checkpoint it
    adds `micro_batch_size`, since dropout and augmentation depend on it, and `precision`, the gradient scaler."""
    train_set = datasets["train"]
    val_set = datasets["val"]
    plan = make_plan(config, len(train_set), len(val_set), fabric.world_size, run.micro_batch_size)

    # ---- model, optimizer, metrics
    fabric.seed_everything(config.seed)
    # On the CPU: a seed means the same weights on every kind of device.
    model: Any = build_model(config, train_set)
    if config.compile != "none":
        model = torch.compile(model, mode=config.compile, dynamic=False)
    model = fabric.setup_module(model)
    # Created after the model was set up, since some strategies replace its parameters.
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    metrics = build_metrics(config, train_set).to(fabric.device)
    means = Means(fabric)  # of what compute_loss returned since the last log

    # ---- data
    sampler = TrainSampler(plan, train_set, fabric.global_rank, config.seed)
    train_loader = Loader(fabric, train_set, sampler, config, run.resources)
    val_batches = eval_batches(plan.val_samples, plan.micro_batch_size, fabric)
    val_loader = Loader(fabric, val_set, val_batches, config, run.resources)

    # ---- a first validation: a mistake in the model or the data shows before anything is written. It comes before
    # `run.restore`, so that a resume is exact even if a validation changes the model
    sanity_results = validate(fabric, config, model, val_loader, metrics, max(1, config.num_sanity_val_steps))

    # ---- state: a resume restores what is in this dict, and nothing else. Tensors, modules and optimizers are restored
    # in place; a list or a dict is replaced, so the loop takes it from `state` each time.
    state: dict = {
        "model": model,  # what test.py evaluates, and model.pt has: put here what is validated
        "optimizer": optimizer,
        "means": means,
        "step": 0,
        "best": None,  # value of `monitor`
        "best_step": 0,
        "to_beat": None,  # value that early stopping compares with
        "bad_validations": 0,  # since that value
    }
    run.restore(state, plan)
    run.header(model)

    # ---- the loop
    batches = train_loader.epochs_from(state["step"])
    set_step_seed = seeder(fabric.device.type, "whole step", config.seed)
    set_seed = seeder(fabric.device.type, "step", config.seed)
    timer = Timer(fabric.device, plan.micro_batch_size * plan.world_size)
    first_step = state["step"] + 1  # of this process
    is_over = plan.is_finished(state["step"], state["bad_validations"])  # so a resume may have no step left
    for step in range(first_step, plan.total_steps + 1):
        if is_over:
            break
        is_val_step = plan.is_due(step, plan.val_interval)
        is_log_step = plan.is_due(step, plan.log_interval) or is_val_step
        is_save_step = plan.is_due(step, plan.save_interval)
        set_step_seed(step)  # what is drawn once for a step is drawn here: it is the same on all ranks
        lr = learning_rate(config, plan, step)
        for group in optimizer.param_groups:
            set_lr(group, lr * group.get("lr_factor", 1.0))

        for micro_step in range(plan.grad_accum_steps):
            batch = timer.next(batches)
            set_seed(plan.micro_batch_number(step, micro_step, fabric.global_rank))
            is_accumulating = micro_step < plan.grad_accum_steps - 1
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                values = compute_loss(model, batch, config)[0]  # the outputs are freed
                means.add(values)
                fabric.backward(values["loss"] / plan.grad_accum_steps)

        if step == first_step:  # the run directory is made only now: no failure before leaves one
            timer.stop()
            run.start(values, sanity_results)
        unscale_gradients(fabric, optimizer)
        if is_log_step or config.max_grad_norm:  # otherwise nobody asks for the norm
            grad_norm = clip_gradients(optimizer, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step

        # ---- now and then: log, validate, save
        must_stop = run.must_stop(synchronize=is_log_step or is_save_step)
        is_best = False
        row = {}
        if is_log_step:
            row = {"epoch": step / plan.steps_per_epoch, "lr": lr}
            row.update({f"train/{name}": value for name, value in means.take().items()})  # waits for the device
            row["train/grad_norm"] = grad_norm.item()
            row.update(timer.take())
            run.check_loss(row["train/loss"], step)
        if is_val_step:
            results = validate(fabric, config, model, val_loader, metrics)
            row.update({f"val/{name}": value for name, value in results.items()})
            is_best = update_best(state, row[config.monitor], step, config)
            row["best"] = state["best"]
        run.log(row, step)  # before the checkpoint: a resume from it does not log this row again
        is_over = must_stop or plan.is_finished(step, state["bad_validations"])
        if is_save_step or is_best or is_over:
            timer.stop()
            run.save(step, is_regular=is_save_step or is_over, is_best=is_best)
    return run.finish("model")


def main(config: TrainConfig) -> int:
    """Trains, or resumes the run at `config.resume`. Returns the exit code, or raises ConfigError or RunError."""
    return run_training(train, build_datasets, config)


if __name__ == "__main__":
    run_and_exit(main, CONFIG)
