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
from runtime.meters import Means
from runtime.optim import clip_gradients, set_lr, unscale_gradients
from runtime.run import Run, run_training
from utils import Plan, make_plan, update_best


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """The model for the samples of a dataset, in training mode: one of Hugging Face's needs `.train()`."""
    image, _ = dataset[0]
    return Model(image.shape, dataset.num_classes, config.width, config.dropout)


def compute_loss(model: nn.Module, batch, config: TrainConfig) -> tuple[dict[str, Tensor], float, tuple]:
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
        count: The number of samples, or the sum of their weights: the weight of the means. docs/data.md: over tokens.
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


def schedule(config: TrainConfig, plan: Plan, step: int) -> float:
    """The factor of the learning rates in a step, counted from 1: a function of the step alone, so there is no state
    to restore. docs/training.md shows how to use a scheduler of torch. The default of Hugging Face's Trainer is
    `linear`, but its warm-up begins with a rate of 0."""
    done = step - 1  # steps
    if done < plan.warmup_steps:
        return step / (plan.warmup_steps + 1)
    decay_step = done - plan.warmup_steps
    decay_steps = plan.total_steps - plan.warmup_steps
    if config.lr_schedule == "cosine":  # Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts
        return 0.5 * (1 + math.cos(math.pi * decay_step / decay_steps))
    if config.lr_schedule == "linear":
        return 1 - decay_step / decay_steps
    return 1.0


@torch.no_grad()
def validate(
    fabric: Fabric,
    config: TrainConfig,
    model: nn.Module,
    loader: Loader,
    metrics: MetricCollection,
    max_batches: int | None = None,
    kept: Any = None,
) -> dict:
    """The means of what compute_loss returns, and the metrics, over all samples or `max_batches` batches per rank.
    `kept`, of test.py, gets the arguments of the metrics for each batch."""
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
        if kept is not None:
            kept.append(outputs)
    for module, is_training in modes:  # a frozen part may have another mode than the whole
        module.train(is_training)
    return means.take(metrics.compute())  # waits for the device


def train(fabric: Fabric, config: TrainConfig, run: Run, datasets: dict[str, Dataset]) -> int:
    """The training run. Returns the exit code. `run` says which step is next, keeps the files of the run, and
    resumes it."""
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    metrics = build_metrics(config, train_set).to(fabric.device)
    means = Means(fabric)  # of what compute_loss returned since the last log

    # ---- data
    sampler = TrainSampler(plan, train_set, fabric.global_rank, config.seed)
    train_loader = Loader(fabric, train_set, sampler, config)
    val_batches = eval_batches(plan.val_samples, plan.micro_batch_size, fabric)
    val_loader = Loader(fabric, val_set, val_batches, config, before_batch=run.stop_if_asked)

    # ---- state: a resume restores what is in this dict, and nothing else. Tensors, modules and optimizers are restored
    # in place; a list or a dict is replaced, so the loop takes it from `state` each time.
    state: dict = {
        "model": model,  # what test.py evaluates, and model.pt has: put here what is validated
        "optimizer": optimizer,
        "means": means,
        "step": 0,
        "due": [],  # what is still to be done after this step
        "best": None,  # value of `monitor`
        "best_step": 0,
        "to_beat": None,  # value that early stopping compares with
        "bad_validations": 0,  # since that value
    }
    run.prepare(state, plan)
    # A first validation: a mistake in the model or the data shows before anything is written. It comes before
    # `run.restore`, so that a resume is exact even if a validation changes the model.
    sanity_results = validate(fabric, config, model, val_loader, metrics, max(1, config.num_sanity_val_steps))
    run.restore()

    # ---- now and then: save, validate, log
    def report():
        """Does what is due after a step. The step is saved first: what fails after that, or is stopped by a signal, a
        resume does again. So no step is lost."""
        run.save()
        step = state["step"]
        results = {}
        is_best = False
        if "validate" in state["due"]:
            results = validate(fabric, config, model, val_loader, metrics)
        if "log" in state["due"]:
            row = {"epoch": step / plan.steps_per_epoch, "lr": float(optimizer.param_groups[0]["lr"])}
            row.update({f"train/{name}": value for name, value in means.take().items()})  # waits for the device
            row.update(run.timer.take())
            row.update({f"val/{name}": value for name, value in results.items()})
            if "validate" in state["due"]:
                is_best = update_best(state, row[config.monitor], step, config)
                row["best"] = state["best"]
            run.log(row)
        run.end_report(is_best)

    report()  # in a resume, what was due after its step

    # ---- the loop
    for step in run.steps():  # until the last one, early stopping or a signal
        set_lr(optimizer, schedule(config, plan, step))  # times the rates that the optimizer was built with
        optimizer.zero_grad()

        for batch, is_last in train_loader.micro_batches(step, run.timer):  # seeds all generators before each
            with fabric.no_backward_sync(model, enabled=not is_last):
                values = compute_loss(model, batch, config)[0]  # the outputs are freed
                means.add(values)
                fabric.backward(values["loss"] / plan.grad_accum_steps)
        run.begin(values, sanity_results)  # makes the run directory in the first step: no failure before leaves one

        unscale_gradients(fabric, optimizer)
        if config.max_grad_norm or plan.logs(step):  # otherwise nobody asks for the norm
            means.add({"grad_norm": clip_gradients(optimizer, config.max_grad_norm)})
        optimizer.step()
        state["step"] = step
        state["due"] = plan.due(step)
        report()
    return run.finish()


def main(config: TrainConfig) -> int:
    """Trains, or resumes the run at `config.resume`. Returns the exit code, or raises ConfigError or RunError."""
    return run_training(train, build_datasets, config)


if __name__ == "__main__":
    run_and_exit(main, CONFIG)
