"""The plan of a run: what follows from the options, the sizes of the datasets and the number of devices. And which
validation is the best."""

import math
from dataclasses import dataclass

from config import TrainConfig
from runtime.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """Sizes, numbers of steps, and intervals, which are in steps and may be fractional."""

    train_samples: int
    val_samples: int  # of a validation
    effective_batch_size: int  # = world_size x micro_batch_size x grad_accum_steps
    world_size: int
    micro_batch_size: int
    grad_accum_steps: int
    last_batch_size: int  # of the last step of an epoch
    steps_per_epoch: int
    total_steps: int
    warmup_steps: float
    log_interval: float
    val_interval: float
    save_interval: float
    peak_lr: float
    patience: float  # validations without a better value, after which the run is finished

    def due(self, step: int) -> list[str]:
        """What is due after a step: "save", "validate", "log". A step that validates also logs."""
        found = []
        if self.is_due(step, self.save_interval):
            found.append("save")
        if self.is_due(step, self.val_interval):
            found.append("validate")
        if self.logs(step):
            found.append("log")
        return found

    def logs(self, step: int) -> bool:
        """Whether a row is logged after a step."""
        return self.is_due(step, self.log_interval) or self.is_due(step, self.val_interval)

    def is_due(self, step: int, interval: float) -> bool:
        """Whether a step reaches or passes a multiple of `interval`, or is the last step."""
        steps_since = (step + 1e-6) % interval  # since the last multiple, which rounding must not hide
        return steps_since < 1 or step == self.total_steps

    def is_finished(self, step: int, bad_validations: int) -> bool:
        """Whether the run is finished after a step, and so many validations without a better value."""
        return step >= self.total_steps or bad_validations >= self.patience

    def lines(self, config: TrainConfig) -> list[str]:
        """What the header says of the plan."""
        micro_batches = f"{self.micro_batch_size} micro_batch_size x {self.grad_accum_steps} grad_accum_steps"
        epochs = self.total_steps / self.steps_per_epoch
        is_smaller = self.last_batch_size < self.effective_batch_size
        of_last = f", the last of {self.last_batch_size} samples" if is_smaller else ""
        scaled = f"scaled by rule {config.lr_scaling_rule}, after {self.warmup_steps:g} steps of warm-up"
        return [
            f"{self.train_samples:,} training samples, {self.val_samples:,} validation samples",
            f"effective_batch_size {self.effective_batch_size} = {self.world_size} device(s) x {micro_batches}",
            f"lr {self.peak_lr:g} = base_lr {config.base_lr:g} {scaled}",
            f"{self.total_steps} steps = {epochs:g} epochs x {self.steps_per_epoch} steps{of_last}",
        ]


def make_plan(config: TrainConfig, train_samples: int, val_samples: int, world_size: int, saved_size: int) -> Plan:
    """The plan of a run. `saved_size` is the micro_batch_size of the run so far, or 0.

    Raises:
        ConfigError: The effective batch size is larger than the training set, or is not divisible; or the last step of
            an epoch has too few samples; or the warm-up is longer than the run, so that the learning rate would never
            arrive.
    """
    batch_size = config.effective_batch_size
    if batch_size > train_samples:
        raise ConfigError(f"--effective_batch_size {batch_size}: there are only {train_samples} training samples")
    micro_batch_size = choose_micro_batch_size(batch_size, config.micro_batch_size, saved_size, world_size)
    whole_epoch, rest = divmod(train_samples, batch_size)
    last_batch_size = batch_size
    if rest and not config.drop_last:
        whole_epoch += 1
        last_batch_size = size_of_rest(rest, batch_size // micro_batch_size)
    per_epoch = limit(whole_epoch, config.limit_train_batches)
    if per_epoch < whole_epoch and not config.fast_run:  # which makes a step of this size, too
        last_batch_size = batch_size
    total_steps = config.fast_run or config.max_steps or max(1, round(config.epochs * per_epoch))
    warmup_steps = config.warmup_epochs * per_epoch
    if warmup_steps > total_steps and not config.fast_run:
        raise ConfigError(
            f"--warmup_epochs {config.warmup_epochs:g}: is {warmup_steps:g} steps, but the run has {total_steps}"
        )
    val_batches = limit(math.ceil(val_samples / batch_size), config.limit_val_batches)
    return Plan(
        train_samples=train_samples,
        val_samples=min(val_samples, val_batches * batch_size),
        effective_batch_size=batch_size,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=batch_size // (world_size * micro_batch_size),
        last_batch_size=last_batch_size,
        steps_per_epoch=per_epoch,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        log_interval=config.log_interval or per_epoch / config.log_per_epoch,
        val_interval=config.val_interval or per_epoch * config.val_frequency,
        save_interval=config.checkpoint_interval or per_epoch * (config.checkpoint_frequency or math.inf),
        peak_lr=scale_lr(config.base_lr, batch_size, config.base_batch_size, config.lr_scaling_rule),
        patience=(not config.fast_run and config.early_stopping_patience) or math.inf,
    )


def choose_micro_batch_size(effective_batch_size: int, asked: int, saved: int, world_size: int) -> int:
    """The micro-batch size: the one asked for; otherwise that of the run so far, if it divides; otherwise the largest.
    0 means that none was asked for, or saved.

    Raises:
        ConfigError: The effective batch size is not divisible. The message names the nearest sizes that are.
    """
    unit = world_size * (asked or 1)
    if effective_batch_size % unit:
        below = effective_batch_size // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{below + unit}"
        raise ConfigError(
            f"--effective_batch_size {effective_batch_size}: is not a multiple of {world_size} device(s) x "
            f"micro_batch_size {asked or 1}; nearest: {nearest}"
        )
    largest = effective_batch_size // world_size
    if saved and not asked and largest % saved == 0:
        return saved
    return asked or largest


def size_of_rest(rest: int, micro_batches: int) -> int:
    """The size of an incomplete batch of `rest` samples that is cut into micro-batches of equal size.

    Raises:
        ConfigError: A micro-batch would have no sample.
    """
    if rest < micro_batches:
        raise ConfigError(
            f"--drop_last False: the last step of an epoch has {rest} sample(s) for {micro_batches} micro-batches; "
            "give a larger --micro_batch_size, or another --effective_batch_size"
        )
    return rest // micro_batches * micro_batches


def scale_lr(base_lr: float, effective_batch_size: int, base_batch_size: int, rule: str) -> float:
    """The learning rate for effective_batch_size, from the one for base_batch_size: "linear" (Goyal et al. 2017,
    arXiv:1706.02677), "sqrt" (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741) or "none"."""
    exponent = {"linear": 1, "sqrt": 0.5, "none": 0}[rule]
    return base_lr * (effective_batch_size / base_batch_size) ** exponent


def limit(total: int, limit_batches: int | float) -> int:
    """How many of `total` batches to use: a count, 0 for none, or a fraction (at least one batch)."""
    if isinstance(limit_batches, float):
        return max(1, int(total * limit_batches + 1e-9))
    return min(total, limit_batches)


def update_best(state: dict, value: float, step: int, config: TrainConfig) -> bool:
    """Notes the monitored value of a validation in `state`. Returns whether it is the best so far; a value that is not
    finite never is.

    Early stopping counts the validations since the last value that was better than the one it had to beat by more than
    `early_stopping_min_delta`: small gains count once they add up to more, as in Lightning's and Keras' EarlyStopping.

    Args:
        state: Its entries `best`, `best_step`, `to_beat` and `bad_validations` are updated.
        value: The monitored value.
        step: The step after which it was validated.
        config: Has `monitor_mode`, "max" or "min": which values are better.
    """

    def gain(before: float | None) -> float:
        """By how much the value is better."""
        if not math.isfinite(value):
            return -math.inf
        if before is None:
            return math.inf
        return value - before if config.monitor_mode == "max" else before - value

    if gain(state["to_beat"]) > config.early_stopping_min_delta:
        state.update(to_beat=value, bad_validations=0)
    else:
        state["bad_validations"] += 1
    is_best = gain(state["best"]) > 0
    if is_best:
        state.update(best=value, best_step=step)
    return is_best
