"""Trains a classifier. The whole loop is in this file: edit it where it stands.

python train.py                                             # digits, well under a minute on a CPU
python train.py --effective_batch_size 256 --precision bf16-mixed
python train.py --dataset mnist --data_dir DIR --devices 2  # any MNIST-format set, on two devices
python train.py --resume auto                               # go on where a killed run stopped
python test.py --out_dir 20261121-093000-train_out          # evaluate a run
"""

import gc

from config import TrainConfig, fail, parse_train

if __name__ == "__main__":
    CONFIG, RESUME_DIR = parse_train()  # before the heavy imports, so that --help and a mistyped option answer at once
    gc.disable()  # they make a million objects that stay: to look for garbage among them takes a second

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from tqdm import tqdm

import utils
from data import EvalSampler, TrainSampler, build_datasets, build_loader, stable_seed
from model import Model


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """The model for the samples of a dataset; for 10 classes where the dataset has no `num_classes`."""
    sample = dataset[0]
    image, *_ = sample.values() if isinstance(sample, dict) else sample
    return Model(image.shape, getattr(dataset, "num_classes", 10), config.width, config.dropout)


def learning_rate(config: TrainConfig, peak: float, step: int, steps_per_epoch: int) -> float:
    """Learning rate of a step, counted from 0. A function of the step alone: nothing to save or restore."""
    warmup_steps, total_steps = config.warmup_epochs * steps_per_epoch, config.epochs * steps_per_epoch
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if config.lr_schedule == "cosine":  # Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))
    if config.lr_schedule == "exponential":
        return peak * config.gamma ** ((step - warmup_steps) / steps_per_epoch)
    return peak


@torch.no_grad()
def validate(fabric: Fabric, model: nn.Module, loader: DataLoader, metrics: MetricCollection, batches=None) -> dict:
    """Returns the mean loss and the metrics over the samples of all ranks, each sample counted once.

    `batches` limits the batches per rank. Values are floats, or tensors where a metric has several elements.
    """
    model.eval()
    metrics.reset()
    loss_sum, samples = torch.zeros((), device=fabric.device), 0
    for size, (images, targets) in zip(loader.sampler.sizes[:batches], loader, strict=False):
        logits, targets = model(images)[:size], targets[:size]  # what is behind `size` only fills up the batch
        if size:
            loss_sum += F.cross_entropy(logits, targets, reduction="sum")
            metrics.update(logits, targets)
            samples += size
    model.train()
    loss_sum, samples = fabric.all_reduce(torch.stack([loss_sum, loss_sum.new_tensor(samples)]), reduce_op="sum")
    results = {f"{metrics.prefix}loss": loss_sum / samples, **metrics.compute()}
    return {name: value if value.ndim else value.item() for name, value in results.items()}  # waits for the device


def train(fabric: Fabric, config: TrainConfig, datasets: dict[str, Dataset], resume_dir: Path | None) -> int:
    """The training run. Returns the exit code."""
    device, rank, world_size = fabric.device, fabric.global_rank, fabric.world_size
    train_set, val_set = datasets["train"], datasets["val"]
    echo = print if rank == 0 else lambda text: None
    if config.rank_logs:
        utils.tee_output(Path(config.rank_logs), rank)
    run_dir, stop = resume_dir, utils.Stopper(fabric, config.timeout)
    utils.explain_failures(fabric, config, lambda: run_dir)

    # ---- what follows from the config
    batch_size, seed, step_seed = config.effective_batch_size, config.seed, stable_seed("step", config.seed)
    micro_batch_size, grad_accum_steps = utils.split_batch(batch_size, config.micro_batch_size, world_size)
    steps_per_epoch = utils.limit(len(train_set) // batch_size, config.limit_train_batches)
    total_steps = config.epochs * steps_per_epoch
    val_batches = utils.limit(-(-len(val_set) // micro_batch_size), config.limit_val_batches)
    val_samples = min(val_batches * micro_batch_size, len(val_set))
    log_every = config.log_interval or steps_per_epoch / config.log_per_epoch
    checkpoint_every = (config.checkpoint_frequency or math.inf) * steps_per_epoch
    peak_lr = utils.scale_lr(config.base_lr, batch_size, config.base_batch_size, config.lr_scaling_rule)
    sign = -1 if (config.monitor_mode or ("min" if "loss" in config.monitor else "max")) == "min" else 1
    patience = config.early_stopping_patience or math.inf

    # ---- data
    dealt = (micro_batch_size, rank, world_size)
    train_sampler = TrainSampler(len(train_set), steps_per_epoch, config.epochs, batch_size, *dealt, seed)
    val_sampler = EvalSampler(val_samples, *dealt)
    train_loader, val_loader = fabric.setup_dataloaders(
        build_loader(train_set, train_sampler, seed, config.num_workers, pin_memory=device.type == "cuda"),
        build_loader(val_set, val_sampler, seed, config.num_workers, pin_memory=device.type == "cuda"),
        use_distributed_sampler=False,  # the samplers know the devices
        move_to_device=device.type != "cpu",
    )

    # ---- model, optimizer, metrics
    fabric.seed_everything(seed, verbose=False)
    with fabric.init_module(), device:  # no copy of the weights is made elsewhere first
        net = build_model(config, train_set)
    if config.sync_batchnorm:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if config.summary and fabric.is_global_zero:
        import torchinfo

        inputs = fabric.to_device(train_loader.dataset[0, torch.tensor([0])][0].to(next(net.parameters()).dtype))
        print(torchinfo.summary(net, input_data=inputs, col_names=("output_size", "num_params"), verbose=0))
    fused = device.type in ("cpu", "cuda") and config.precision not in ("16-mixed", "16")  # it could not be clipped
    optimizer = torch.optim.AdamW(net.parameters(), lr=peak_lr, weight_decay=config.weight_decay, fused=fused)
    model, optimizer = fabric.setup(torch.compile(net) if config.compile else net, optimizer)
    forward, backward = model, fabric.backward
    if config.precision in ("32-true", "32") and config.strategy in ("auto", "ddp") and device.type != "xla":
        # What Fabric wraps around these does nothing then, for 60 µs a step.
        forward, backward, optimizer = model._forward_module, torch.Tensor.backward, optimizer.optimizer
    accuracy = MulticlassAccuracy(getattr(train_set, "num_classes", 10), average="micro", validate_args=False)
    metrics = MetricCollection({"accuracy": accuracy}, prefix="val/").to(device)
    monitored = ["train/loss", *(["val/loss", *metrics.keys()] if val_batches else [])]
    if config.monitor not in monitored:
        fail(f"--monitor {config.monitor}: choose from {', '.join(monitored)}")

    # ---- state: what is in it is restored by a resume, what is not is not
    state = {
        "model": model,
        "optimizer": optimizer,
        "precision": fabric.strategy.precision,  # holds the gradient scaler of 16-mixed
        "epoch": 0,  # epochs begun and steps done
        "step": 0,
        "best": None,  # best value of `monitor`, its step, and the epochs since
        "best_step": 0,
        "bad_epochs": 0,
        "loss_sum": torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device),
        "logged_step": 0,  # the last logged step, from where loss_sum counts, and what was logged
        "row": {},
    }

    # ---- run directory, new or with a checkpoint to go on from
    if resume_dir:
        echo(f"resumed from {utils.load_checkpoint(fabric, resume_dir, state)}")
        state["loss_sum"] = state["loss_sum"].to(device)
        for group in optimizer.param_groups:  # came with the checkpoint, but the command line wins
            group["weight_decay"] = config.weight_decay
        is_over = state["step"] >= total_steps or state["bad_epochs"] >= patience
        if is_over and (resume_dir / "model.pt").exists():
            echo(f"nothing to do: {resume_dir} is finished, after {state['step']} steps")
            return 0
        utils.start_run_dir(fabric, config, resume_dir)
    elif not config.fast_run:
        run_dir = utils.make_run_dir(fabric, config, state)
    if run_dir and fabric.is_global_zero:
        fabric.loggers.extend(utils.build_loggers(config, run_dir, state["logged_step"] - 1))
    if state["row"]:
        utils.log(fabric, state["row"], state["logged_step"])  # a kill may have come between checkpoint and log
    echo(
        f"effective_batch_size {batch_size} = "
        f"{world_size} process(es) x {micro_batch_size} micro_batch_size x {grad_accum_steps} grad_accum_steps\n"
        f"lr {peak_lr:g} = base_lr {config.base_lr:g}, scaled {config.base_batch_size} -> {batch_size} samples by rule "
        f"{config.lr_scaling_rule}\n{total_steps} steps = {config.epochs} epochs x {steps_per_epoch} steps; "
        f"{len(train_set)} train and {val_samples} val samples\nrun directory {run_dir}"
    )
    if state["step"] == 0 and min(config.num_sanity_val_steps, val_batches):  # a mistake there shows now
        validate(fabric, forward, val_loader, metrics, config.num_sanity_val_steps)

    # ---- the loop
    columns = [*monitored, "lr", "samples_per_second", "data_wait"]
    bar = tqdm(initial=state["step"], total=total_steps, unit="step", disable=None if rank == 0 else True)
    profiler = utils.build_profiler(run_dir, total_steps - state["step"]) if config.profile and rank == 0 else None
    is_stopping, first_step, train_seconds = False, state["step"], 0.0
    data_wait, window_seconds, started = 0.0, 0.0, time.perf_counter()  # of the log window, without validation
    train_sampler.first_step = first_step
    batches = iter(train_loader)
    generators = utils.generators_of(device)
    model.train()
    while state["step"] < total_steps and state["bad_epochs"] < patience and not is_stopping:
        step = state["step"] + 1
        lr = learning_rate(config, peak_lr, step - 1, steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr

        for micro_step in range(grad_accum_steps):
            wait_started = time.perf_counter()
            images, targets = next(batches)
            data_wait += time.perf_counter() - wait_started
            # Seeded by the number of the micro-batch in the whole run: the same dropout on any number of devices, and
            # no generator's state to save.
            micro_batch = ((step - 1) * grad_accum_steps + micro_step) * world_size + rank
            for generator in generators:
                generator.manual_seed(step_seed + micro_batch)
            # The ranks exchange gradients once per step, during the last backward.
            with fabric.no_backward_sync(model, enabled=micro_step < grad_accum_steps - 1):
                loss = F.cross_entropy(forward(images), targets)
                if grad_accum_steps > 1:
                    loss = loss / grad_accum_steps
                backward(loss)
            state["loss_sum"] += loss.detach()  # stays on the device

        is_epoch_end = step % steps_per_epoch == 0
        is_log_step = is_epoch_end or utils.is_due(step, log_every)
        if config.max_grad_norm or is_log_step:  # infinite ones are the scaler's normal start in 16-mixed
            max_norm = config.max_grad_norm or math.inf
            grad_norm = fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        state["epoch"], state["step"] = (step - 1) // steps_per_epoch + 1, step
        bar.update()
        if profiler:
            profiler.step()
        if step == first_step + 1 and rank == 0:
            bar.write(utils.memory(model, optimizer, device) + "\n" + utils.format_row(["epoch", "step", *columns]))

        # ---- now and then: validate, save, log
        is_stopping = stop()
        is_save_step = is_stopping or step == total_steps or utils.is_due(step, checkpoint_every)
        if not (is_log_step or is_save_step):
            continue
        loss_sum = fabric.all_reduce(state["loss_sum"], reduce_op="mean").item()  # waits for the device
        if not math.isfinite(loss_sum):
            where = f"in a step from {state['logged_step'] + 1} to {step}"
            fail(f"the loss is {loss_sum} {where}; the checkpoints in {run_dir} are from before and good", code=1)
        window_seconds += time.perf_counter() - started
        is_best = False
        if is_log_step:
            steps_here = step - max(state["logged_step"], first_step)
            row = {
                "epoch": step / steps_per_epoch,
                "train/loss": loss_sum / (step - state["logged_step"]),
                "train/grad_norm": grad_norm.item(),
                "lr": lr,
                "samples_per_second": batch_size * steps_here / window_seconds,
                "data_wait": data_wait / window_seconds,
            }
            if device.type == "cuda":
                row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if is_epoch_end:
                if val_batches:
                    row |= validate(fabric, forward, val_loader, metrics)
                is_best = state["best"] is None or sign * row[config.monitor] > sign * state["best"]
                if is_best:
                    state["best"], state["best_step"] = row[config.monitor], step
                state["bad_epochs"] = 0 if is_best else state["bad_epochs"] + 1
                if fabric.is_global_zero:
                    bar.write(utils.format_row([state["epoch"], step, *(row[name] for name in columns)]))
            state["row"], state["logged_step"], loss_sum = row, step, 0.0
            train_seconds, window_seconds, data_wait = train_seconds + window_seconds, 0.0, 0.0
        state["loss_sum"].fill_(loss_sum)
        is_save_step = is_save_step or state["bad_epochs"] >= patience
        is_best = is_best and config.checkpoint_frequency is not None
        if run_dir and (is_save_step or is_best):
            utils.save_checkpoint(fabric, run_dir, state, is_save_step, is_best, config.num_checkpoint_keep)
        if is_log_step:
            utils.log(fabric, row, step)  # after the checkpoint, which has the row: a full disk or a kill loses neither
        started = time.perf_counter()
    bar.close()
    if profiler:
        profiler.stop()

    # ---- the end
    is_finished = state["step"] >= total_steps or state["bad_epochs"] >= patience
    for logger in fabric.loggers:
        logger.finalize("success")
    if run_dir and is_finished:
        utils.save_weights(fabric, run_dir, model._forward_module)
    speed = (state["logged_step"] - first_step) * batch_size / max(train_seconds, 1e-9)
    best = math.nan if state["best"] is None else state["best"]
    echo(
        f"{'finished' if is_finished else 'stopped by a signal'} after {state['step']} of {total_steps} steps\n"
        f"best {config.monitor} {best:.5g} at step {state['best_step']}\n"
        f"{train_seconds:.1f} s of training, {speed:.0f} samples per second"
    )
    if run_dir:
        next_command = "test.py --out_dir" if is_finished else "train.py --resume"
        echo(f"run directory {run_dir}\nnext: python {next_command} {run_dir}")
    return 0 if is_finished else utils.PREEMPTED


def main(config: TrainConfig, resume_dir: Path | None) -> int:
    """Finds every mistake of the user before anything is launched or made, then trains. Returns the exit code."""
    if n := config.fast_run:
        config = replace(config, epochs=1, limit_train_batches=n, limit_val_batches=n)
    fabric = utils.build_fabric(config)
    fabric.seed_everything(config.seed, verbose=False)
    try:
        datasets = build_datasets(config.dataset, config.data_dir, config.seed)
    except (OSError, ValueError) as error:
        fail(f"--dataset {config.dataset} --data_dir {config.data_dir}: {error}")
    utils.split_batch(config.effective_batch_size, config.micro_batch_size, fabric.world_size)
    if config.sync_batchnorm and fabric.world_size > 1 and fabric.device.type == "cpu":
        fail("--sync_batchnorm: PyTorch has it for GPUs alone")
    if config.effective_batch_size > (n := len(datasets["train"])):
        fail(f"--effective_batch_size {config.effective_batch_size}: there are only {n} training samples")
    return utils.launch(fabric, train, config=config, datasets=datasets, resume_dir=resume_dir)


if __name__ == "__main__":
    sys.exit(main(CONFIG, RESUME_DIR))
