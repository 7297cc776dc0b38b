"""Trains a classifier. The whole loop is in this file: edit it where it stands.

python train.py                                     # digits, well under a minute on a CPU
python train.py --effective_batch_size 256 --precision bf16-mixed
python train.py --resume auto                       # go on where a killed run stopped
python test.py --out_dir 20261121-093000-train_out  # evaluate a run
"""

import cli
from config import TrainConfig

if __name__ == "__main__":
    CONFIG = cli.parse_or_exit(cli.parse_train)  # before the heavy imports: --help and a mistyped option answer at once

import math
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import utils
from data import Loader, TrainSampler, build_datasets, eval_batches, seeder
from launch import PREEMPTED, StopSignals, build_fabric, build_in_turn, launch, run_and_exit
from loggers import Console, scalars_of
from model import Model
from rundir import RunDir, rehearse
from utils import Plan


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """The model for the samples of a dataset."""
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
    means = utils.Means(fabric)
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
    results = metrics.compute()
    if not isinstance(results, dict):  # of a single metric
        results = {"metric": results}
    return means.take(results)  # waits for the device


def train(fabric: Fabric, config: TrainConfig, run: RunDir, datasets: dict[str, Dataset], resources: ExitStack) -> int:
    """The training run. Returns the exit code. `resources` closes what must not outlive the run."""
    train_set = datasets["train"]
    val_set = datasets["val"]
    stop_signals = StopSignals(config, resources)

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
    means = utils.Means(fabric)

    # ---- state: a resume restores what is in this dict, and nothing else. Tensors, modules and optimizers are restored
    # in place; a list or a dict is replaced, so the loop takes it from `state` each time.
    state: dict = {
        "model": model,  # what test.py evaluates, and model.pt has: put here what is validated
        "optimizer": optimizer,
        "precision": fabric.strategy.precision,  # has the gradient scaler of 16-mixed
        "means": means,  # of what compute_loss returned since the last log
        "step": 0,
        "train_batch": None,  # checksum of the first micro-batch of the last step, to tell that data have changed
        "val_batch": None,  # likewise of the first batch of a validation
        "micro_batch_size": 0,  # kept on a resume: dropout and augmentation depend on it
        "best": None,  # value of `monitor`
        "best_step": 0,
        "bad_validations": 0,  # since the best one
    }
    run.restore(state, {"training": len(train_set), "validation": len(val_set)})
    saved_size = state["micro_batch_size"]
    plan = utils.make_plan(config, len(train_set), len(val_set), fabric.world_size, saved_size)
    state["micro_batch_size"] = plan.micro_batch_size

    # ---- data
    sampler = TrainSampler(plan, train_set, fabric.global_rank, config.seed)
    train_loader = Loader(fabric, train_set, sampler, config, resources)
    val_batches = eval_batches(plan.val_samples, plan.micro_batch_size, fabric.world_size)
    val_loader = Loader(fabric, val_set, val_batches[fabric.global_rank], config, resources)

    # ---- a first validation: a mistake in the model or the data shows before anything is written
    sanity_results = validate(fabric, config, model, val_loader, metrics, max(1, config.num_sanity_val_steps))
    console = Console(fabric.is_global_zero, state["step"], plan.total_steps, config.monitor, run.resources)
    header(console, fabric, config, plan, run, model, saved_size)
    cut = [plan.val_samples, plan.micro_batch_size, plan.world_size]
    state["val_batch"] = val_loader.compare_first("the first validation batch", cut, state["val_batch"], console)

    # ---- the loop
    batches = train_loader.batches_from(state["step"], state["train_batch"], console)
    set_step_seed = seeder(fabric.device.type, "whole step", config.seed)
    set_seed = seeder(fabric.device.type, "step", config.seed)
    timer = utils.Timer(fabric.device, plan.micro_batch_size * plan.world_size)
    first_step = state["step"] + 1  # of this process
    is_over = plan.is_finished(state["step"], state["bad_validations"])  # so a resume may have no step left
    model.train()
    for step in range(first_step, plan.total_steps + 1):
        if is_over:
            break
        is_val_step = plan.is_due(step, plan.val_interval)
        is_log_step = plan.is_due(step, plan.log_interval) or is_val_step
        is_save_step = plan.is_due(step, plan.save_interval)
        set_step_seed(step)  # what is drawn once for a step is drawn here: it is the same on all ranks
        lr = learning_rate(config, plan, step)
        for group in optimizer.param_groups:
            utils.set_lr(group, lr)  # for other rates in some groups: lr * group["lr_factor"]

        for micro_step in range(plan.grad_accum_steps):
            batch = timer.next(batches)
            set_seed(plan.micro_batch_number(step, micro_step, fabric.global_rank))
            is_accumulating = micro_step < plan.grad_accum_steps - 1
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                values = compute_loss(model, batch, config)[0]  # the outputs are freed
                if step == first_step:
                    run.check_values(values, scalars_of(sanity_results), step)
                loss = values["loss"]
                if plan.grad_accum_steps > 1:  # the gradients of all micro-batches add up to their mean
                    loss = loss / plan.grad_accum_steps
                fabric.backward(loss)
            means.add(values)

        if step == first_step:  # the run directory is made only now: no failure before leaves one
            timer.stop()
            run.start(state["step"], console)

        utils.unscale_gradients(fabric, optimizer)
        if is_log_step or config.max_grad_norm:  # otherwise nobody asks for the norm
            grad_norm = utils.clip_gradients(optimizer, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step

        # ---- now and then: log, validate, save
        must_stop = stop_signals.must_stop(synchronize=is_log_step or is_save_step)
        is_best = False
        row = {}
        if is_log_step:
            row = {"epoch": step / plan.steps_per_epoch, "lr": lr}
            train_results = means.take({"grad_norm": grad_norm})  # waits for the device
            row.update({f"train/{name}": value for name, value in train_results.items()})
            run.check_loss(row["train/loss"], step)
            timer.stop()
            row.update(timer.take())
            row["peak_memory_mb"] = utils.peak_memory(fabric.device)
        if is_val_step:
            results = validate(fabric, config, model, val_loader, metrics)
            row.update({f"val/{name}": value for name, value in results.items()})
            is_best = utils.is_better(row[config.monitor], state["best"], plan.monitor_mode)
            if is_best:
                state.update(best=row[config.monitor], best_step=step, bad_validations=0)
            else:
                state["bad_validations"] += 1
            row["best"] = state["best"]
            console.table(row, step)
        run.log(row, step)  # before the checkpoint: a resume from it does not log this row again
        console.update(row)
        is_over = must_stop or plan.is_finished(step, state["bad_validations"])
        if is_save_step or is_best or is_over:
            timer.stop()
            state["train_batch"] = train_loader.trained_batch()
            run.save(step, is_regular=is_save_step or is_over, is_best=is_best)

    is_finished = plan.is_finished(state["step"], state["bad_validations"])
    if is_finished:
        run.finish("model")
    footer(console, config, plan, state, run, is_finished)
    return 0 if is_finished else PREEMPTED


def header(console: Console, fabric: Fabric, config, plan: Plan, run: RunDir, model, saved: int):
    """Prints what will happen."""
    device = fabric.device.type
    precision = config.precision
    if device == "cuda":
        device = torch.cuda.get_device_name(fabric.device)
        if torch.get_float32_matmul_precision() == "high" and torch.cuda.is_tf32_supported():
            precision += ", float32 products in TF32"
    console.print(f"{plan.world_size} x {device}, precision {precision}")
    layers = model.module if config.summary else "model"
    console.print(f"{layers}, {run.summary['parameters']:,} parameters")
    console.print(f"{plan.train_samples:,} training samples, {plan.val_samples:,} validation samples")
    micro_batches = f"{plan.micro_batch_size} micro_batch_size x {plan.grad_accum_steps} grad_accum_steps"
    console.print(f"effective_batch_size {plan.effective_batch_size} = {plan.world_size} device(s) x {micro_batches}")
    if saved not in (0, plan.micro_batch_size):
        console.print(f"micro_batch_size {plan.micro_batch_size} instead of {saved}: dropout and augmentation differ")
    rule = f"rule {config.lr_scaling_rule}, after {config.warmup_epochs * plan.steps_per_epoch:g} steps of warm-up"
    console.print(f"lr {plan.peak_lr:g} = base_lr {config.base_lr:g} scaled by {rule}")
    epochs = plan.total_steps / plan.steps_per_epoch
    console.print(f"{plan.total_steps} steps = {epochs:g} epochs x {plan.steps_per_epoch} steps")


def footer(console: Console, config: TrainConfig, plan: Plan, state: dict, run: RunDir, is_finished: bool):
    """Prints what came out, and what to do next."""
    console.bar.close()
    ending = "finished" if is_finished else "stopped"
    best = "none"
    if state["best"] is not None:
        best = f"{state['best']:.5g} at step {state['best_step']}"
    console.print(f"{ending} after {state['step']} of {plan.total_steps} steps, best {config.monitor} {best}")
    console.print(f"next: {run.next_command(is_finished)}")


def main(config: TrainConfig) -> int:
    """Trains, or resumes the run at `config.resume`. Returns the exit code, or raises ConfigError or RunError."""
    fabric = build_fabric(config)
    if fabric.device.type == "cuda":  # on a CPU it would make small products twice as slow
        torch.set_float32_matmul_precision("high")  # TF32: faster products of float32, with 10 bits of mantissa

    def start(config: TrainConfig, resources: ExitStack) -> int:
        run = RunDir(fabric, config, resources)
        fabric.seed_everything(config.seed)  # for a dataset that is split at random
        datasets = build_in_turn(fabric, config, lambda: build_datasets(config))
        return train(fabric, config, run, datasets, resources)

    return launch(fabric, config, partial(rehearse, fabric, start) if config.fast_run else start)


if __name__ == "__main__":
    run_and_exit(main, CONFIG)
