"""Trains a classifier. The whole loop is in this file: edit it where it stands.

python train.py                                     # digits, well under a minute on a CPU
python train.py --effective_batch_size 256 --precision bf16-mixed
python train.py --resume auto                       # go on where a killed run stopped
python test.py --out_dir 20261121-093000-train_out  # evaluate a run
"""

import cli
from config import ConfigError, RunError, TrainConfig, blame, in_steps, is_due, limit, mode_of, scale_lr, split_batch

if __name__ == "__main__":
    CONFIG = cli.options(cli.parse_train)  # before the heavy imports: --help and a mistyped option answer at once

import math
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import islice

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import utils
from data import Loader, TrainSampler, build_datasets, eval_batches, seeder
from loggers import Console, numbers
from model import Model
from rundir import RunDir


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """The model for the samples of a dataset."""
    image, _ = dataset[0]
    return Model(image.shape, dataset.num_classes, config.width, config.dropout)


def compute_loss(model: nn.Module, batch, config: TrainConfig) -> tuple[dict[str, Tensor], int, tuple]:
    """Forward pass and loss, in training, validation and test.py; `model.training` is True only in training.

    `batch` is what the dataset gives: images (batch, channels, height, width) and class indices (batch,). torch's
    generators are seeded before each call; NumPy's and Python's are not. Returns a dict of means over the batch, all
    logged, `loss` minimized; the number of samples they are means of; and the arguments of the metrics' `update`."""
    images, targets = batch
    logits = model(images)
    return {"loss": F.cross_entropy(logits, targets)}, len(targets), (logits, targets)


def build_metrics(config: TrainConfig, dataset: Dataset) -> MetricCollection:
    """The metrics of a validation and of test.py."""
    accuracy = MulticlassAccuracy(dataset.num_classes, average="micro", validate_args=False)
    return MetricCollection({"accuracy": accuracy}, compute_groups=False)  # groups merge metrics by their first batch


def learning_rate(config: TrainConfig, peak: float, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Learning rate of a step, counted from 1. A function of the step alone: nothing to save or restore."""
    warmup_steps, done = config.warmup_epochs * steps_per_epoch, step - 1
    if done < warmup_steps:
        return peak * step / (warmup_steps + 1)
    if config.lr_schedule == "cosine":  # Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts
        return peak * 0.5 * (1 + math.cos(math.pi * (done - warmup_steps) / (total_steps - warmup_steps)))
    return peak


@torch.no_grad()
def validate(fabric: Fabric, config, model: nn.Module, loader: Loader, metrics, batches: int | None = None) -> dict:
    """Means of what compute_loss returns, and metrics, over all samples or the first `batches` batches of each rank."""
    model.eval()
    metrics.reset()
    sums, seed = utils.Sums(fabric, {"samples": {}}), seeder(fabric, "validate", config.seed)
    for number, batch in enumerate(islice(loader, batches)):
        seed(number * fabric.world_size + fabric.global_rank)
        with utils.shapes_in_error(batch):
            values, count, outputs = compute_loss(model, batch, config)
        sums.add({name: value * count for name, value in values.items()}, count)
        metrics.update(*outputs)
    model.train()
    results = metrics.compute()
    scalars = sums.collect({name: value for name, value in results.items() if getattr(value, "ndim", None) == 0})
    return sums.take("samples") | results | scalars


def train(fabric: Fabric, config: TrainConfig, datasets: dict[str, Dataset], resources: ExitStack) -> int:
    """The training run. Returns the exit code."""
    device, rank, world_size = fabric.device, fabric.global_rank, fabric.world_size
    train_set, val_set, batch_size = datasets["train"], datasets["val"], config.effective_batch_size
    must_stop = utils.StopSignals(config.timeout, resources)

    # ---- model, optimizer, metrics
    fabric.seed_everything(config.seed, verbose=False)
    model = build_model(config, train_set)  # on the CPU: a seed means the same weights on every kind of device
    model = fabric.setup_module(torch.compile(model, mode=config.compile, dynamic=False) if config.compile else model)
    # After the model was set up: some strategies replace its parameters.
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    utils.skip_wrappers(fabric, model, optimizer)
    metrics = build_metrics(config, train_set).to(device)

    # ---- state: a resume restores what is in this dict, and nothing else
    mode = config.monitor_mode or mode_of(config.monitor)
    no_best = {"monitor": f"{mode} {config.monitor}", "best": None, "best_step": 0, "bad_validations": 0}
    state: dict = {
        "model": model,
        "optimizer": optimizer,
        "precision": fabric.strategy.precision,  # has the gradient scaler of 16-mixed
        "sums": {"log": {}, "validation": {}},  # of what compute_loss returned since the last log and validation
        "step": 0,
        "micro_batch_size": None,
        **no_best,  # the best value of `monitor` so far, its step, and the validations since
    }
    run = RunDir(fabric, config, state, resources)  # a resume restores `state` here
    if state["monitor"] != no_best["monitor"]:
        state |= no_best

    # ---- what follows from the config, in steps
    saved_size = state["micro_batch_size"]
    micro_batch_size, grad_accum_steps = split_batch(batch_size, config.micro_batch_size, saved_size, world_size)
    state["micro_batch_size"] = micro_batch_size
    steps_per_epoch, total_steps, *intervals = in_steps(config, len(train_set))  # of logs, validations, saves
    peak_lr = scale_lr(config.base_lr, batch_size, config.base_batch_size, config.lr_scaling_rule)
    patience = config.early_stopping_patience or math.inf

    # ---- data
    sampler = TrainSampler(len(train_set), steps_per_epoch, batch_size, micro_batch_size, rank, world_size, config.seed)
    train_loader = Loader(fabric, train_set, sampler, config, resources)
    val_samples = min(len(val_set), batch_size * limit(math.ceil(len(val_set) / batch_size), config.limit_val_batches))
    with blame(config, "limit_val_batches", "devices"):
        val_keys = eval_batches(val_samples, micro_batch_size, world_size)[rank] if val_samples else []
    val_loader = Loader(fabric, val_set, val_keys, config, resources)

    # ---- a first validation: a mistake in the model or the data shows before anything is written
    names = ["train/loss"]
    if val_samples:
        found = numbers(validate(fabric, config, model, val_loader, metrics, max(1, config.num_sanity_val_steps)))
        names = [f"train/{name}" for name in found if name not in metrics] + [f"val/{name}" for name in found]
    if config.monitor not in names:
        raise ConfigError(f"--monitor {config.monitor}: choose from {', '.join(names)}")
    run.start(state["step"])

    # ---- what will happen
    console = Console(rank == 0, run.path, state["step"], total_steps, resources)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    console.print(f"{world_size} x {name}, precision {config.precision}")
    console.print(f"{model.module if config.summary else 'model'}, {run.summary['parameters']:,} parameters")
    console.print(f"{len(train_set):,} training samples, {val_samples:,} validation samples")
    factors = f"{world_size} device(s) x {micro_batch_size} micro_batch_size x {grad_accum_steps} grad_accum_steps"
    console.print(f"effective_batch_size {batch_size} = {factors}")
    if saved_size not in (None, micro_batch_size):
        console.print(f"micro_batch_size {micro_batch_size} instead of {saved_size}: dropout and augmentation differ")
    console.print(f"lr {peak_lr:g} = base_lr {config.base_lr:g} scaled by rule {config.lr_scaling_rule}")
    console.print(f"{total_steps} steps = {total_steps / steps_per_epoch:g} epochs x {steps_per_epoch} steps")
    console.print(f"run directory {run.path or 'none: --fast_run writes nothing'}{run.origin}")

    # ---- the loop
    sums, timer, seed = utils.Sums(fabric, state["sums"]), utils.Timer(), seeder(fabric, "step", config.seed)
    first_step, last_step = state["step"] + 1, total_steps if state["bad_validations"] < patience else 0
    model.train()
    for step in range(first_step, last_step + 1):
        if step == first_step or (step - 1) % steps_per_epoch == 0:
            sampler.epoch, sampler.step = divmod(step - 1, steps_per_epoch)
            batches = iter(train_loader)  # one per epoch: workers do not run ahead into the next
        lr = learning_rate(config, peak_lr, step, total_steps, steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr  # of all groups: for different rates, multiply by a factor that each group has

        for micro_step in range(grad_accum_steps):
            batch = timer.next(batches)
            seed(((step - 1) * grad_accum_steps + micro_step) * world_size + rank)  # number of this micro-batch
            is_synced = world_size == 1 or micro_step == grad_accum_steps - 1  # all-reduce in the last backward only
            with nullcontext() if is_synced else fabric.no_backward_sync(model):
                values = compute_loss(model, batch, config)[0]  # the outputs are freed
                fabric.backward(values["loss"] / grad_accum_steps if grad_accum_steps > 1 else values["loss"])
            sums.add(values)

        is_log_step, is_val_step, is_save_step = (step == total_steps or is_due(step, every) for every in intervals)
        if config.max_grad_norm or is_log_step:
            grad_norm = utils.clip_gradients(fabric, optimizer, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step

        # ---- now and then: log, validate, save
        is_due_step = is_log_step or is_val_step or is_save_step or step % 1000 == 0  # for the memory of the sums
        is_over, is_best, row = must_stop(is_due_step), False, {}
        if is_due_step or is_over:
            logged = sums.collect({"train/grad_norm": grad_norm} if is_log_step else {})  # waits for the device
        timer.stop()
        if is_log_step:
            row = {"epoch": step / steps_per_epoch, **logged, "lr": lr}
            row |= timer.take(batch_size) | sums.take("log", "train/")
            if not math.isfinite(row["train/loss"]):
                raise RunError(f"the loss is {row['train/loss']} in the steps up to {step}")
        if is_val_step:
            means = sums.take("validation", "train/")
            results = validate(fabric, config, model, val_loader, metrics) if val_samples else {}
            validated = {f"val/{name}": value for name, value in results.items()}
            value, sign = (means | validated)[config.monitor], -1 if mode == "min" else 1
            is_best = math.isfinite(value) and (state["best"] is None or sign * value > sign * state["best"])
            state["bad_validations"] = 0 if is_best else state["bad_validations"] + 1
            if is_best:
                state["best"], state["best_step"] = value, step
            is_over = is_over or state["bad_validations"] >= patience
            row |= validated | {"best": state["best"]}
            console.row({"epoch": step / steps_per_epoch, "step": step} | means | validated | {"lr": lr})
        run.log(row, step)  # before the checkpoint: a resume drops the rows after it, and logs them again
        console.update({name: row[name] for name in ("train/loss", config.monitor) if name in row})
        if is_val_step or is_save_step or is_over:
            run.save(step, is_save_step or is_over, is_best)
        if step == first_step:
            console.print(utils.memory(state, device))
        if is_over:
            break
    console.bar.close()
    is_finished = state["step"] >= total_steps or state["bad_validations"] >= patience
    if is_finished:
        run.finish("model")
    ending = "finished" if is_finished else "stopped by a signal"
    best = "none" if state["best"] is None else f"{state['best']:.5g} at step {state['best_step']}"
    console.print(f"{ending} after {state['step']} of {total_steps} steps, best {config.monitor} {best}")
    console.print(f"next: {run.next_command(is_finished)}")
    return 0 if is_finished else utils.PREEMPTED


def build_fabric(config) -> Fabric:
    """Fabric with the devices of a TrainConfig or TestConfig. Raises ConfigError for what the machine cannot do."""
    utils.prepare_device(config)
    with blame(config, *cli.DEVICE_OPTIONS):
        return Fabric(**{name: getattr(config, name) for name in cli.DEVICE_OPTIONS})


def main(config: TrainConfig) -> int:
    """Trains, or goes on with the run at `config.resume`. Returns the exit code, or raises ConfigError or RunError."""
    if n := config.fast_run:
        config = replace(config, max_steps=n, limit_train_batches=n, limit_val_batches=n)
    fabric = build_fabric(config)
    fabric.seed_everything(config.seed, verbose=False)  # for a dataset that is split at random
    with blame(config, "dataset", "data_dir", kinds=(OSError, ImportError)):  # others are mistakes in its code
        datasets = build_datasets(config.dataset, config.data_dir)
    return utils.launch(fabric, config, lambda resources: train(fabric, config, datasets, resources))


if __name__ == "__main__":
    cli.run(main, CONFIG)
