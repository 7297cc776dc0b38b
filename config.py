"""Every option of train.py and test.py, and what can be wrong with it. A field is an option, its comment the help text.

Nothing here imports torch, so that `--help` and a mistyped option are answered at once.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import yaml
from simple_parsing import field

# Without 16-true, in which the second moments of Adam vanish.
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Loggers = tuple[Literal["csv", "tensorboard", "wandb"], ...]


class ConfigError(ValueError):
    """A mistake in the options, or in what they name. The scripts print it as one line and exit with code 2."""


class RunError(RuntimeError):
    """Ends a run on all ranks for a reason that is no bug. The scripts print it as one line and exit with code 1."""


@dataclass(frozen=True)
class MachineConfig:
    """Options of train.py and test.py about where they run."""

    root_dir: str = "."  # Directory that holds the run directories; train.py makes it if missing
    data_dir: str | None = None  # Directory of the dataset's files; test.py: None takes that of the training
    num_workers: int = 0  # Processes per device that load data; 0 loads in the main process, best for data in memory
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"  # Kind of device
    devices: str = "auto"  # How many (`2`) or which (`0,2`)
    num_nodes: int = 1  # Number of machines
    strategy: str = "auto"  # How several devices work together: ddp, dp, ddp_find_unused_parameters_true
    timeout: float = 300.0  # Seconds that a process waits for the others, or for its data workers, before it gives up

    def __post_init__(self):
        if found := [*problems(self)]:
            raise ConfigError("; ".join(found))


@dataclass(frozen=True)
class TrainConfig(MachineConfig):
    """Train a model. Every option has a default; `None` unsets one, as in `--max_grad_norm None`."""

    out_dir: str = "train_out"  # Name of the run directory; the time of the start is put before it
    comment: str | None = None  # A note kept with the run: in its config.yaml and in wandb
    project: str = "fabric-template"  # Project that the run is filed under in wandb
    seed: int = 42  # Seed of the weights, the order of the samples, dropout and augmentation
    resume: str | None = None  # Run directory to continue; `auto`: the newest run of this out_dir, or a new one
    config_path: tuple[str, ...] | None = None  # YAML files of options, the later wins; the command line wins over all

    dataset: Literal["digits"] = "digits"  # Name of the dataset; recipes/data.md adds others
    width: int = 32  # Channels of the model's first layer
    dropout: float = 0.25  # Probability of dropping a feature before the last layer
    # Compile the model with torch.compile, in its default mode or another: reduce-overhead, max-autotune, ...
    compile: CompileMode | None = field(default=None, nargs="?", const="default", metavar="[mode]")
    precision: Precision = "32-true"  # Number format of everything (-true), or of the arithmetic alone (-mixed)

    effective_batch_size: int = 64  # Samples per optimizer step, over all devices and micro-batches
    micro_batch_size: int | None = None  # Samples per forward pass of a device; None: effective / devices
    epochs: float = 20.0  # Passes over the training set, each without an incomplete last batch; may be a fraction
    max_steps: int | None = None  # Optimizer steps of the whole run, instead of epochs
    base_lr: float = 4e-3  # Learning rate for base_batch_size samples per step, see lr_scaling_rule
    base_batch_size: int = 64  # The effective batch size that base_lr was tuned for
    lr_scaling_rule: Literal["linear", "sqrt", "none"] = "linear"  # Scaling of base_lr with the effective batch size
    warmup_epochs: float = 1.0  # Epochs, or a fraction of one, over which the learning rate rises from zero
    lr_schedule: Literal["cosine", "constant"] = "cosine"  # Learning rate after the warm-up
    weight_decay: float = 0.01  # Weight decay of AdamW
    max_grad_norm: float | None = None  # Maximum norm of the gradient, clipped once per step; None does not clip
    early_stopping_patience: int | None = None  # Stop after so many validations without a better `monitor`

    logger_name: Loggers = field(default=("csv", "tensorboard"), metavar="{csv,tensorboard,wandb} [...]")  # One or more
    log_per_epoch: float = 1.0  # Times per epoch that the training loss is logged
    log_interval: int | None = None  # Steps between two logs, instead of log_per_epoch
    val_frequency: float = 1.0  # Epochs between two validations; fractions are allowed
    val_interval: int | None = None  # Steps between two validations, instead of val_frequency
    monitor: str = "val/accuracy"  # The value that decides which checkpoint is best
    monitor_mode: Literal["max", "min"] | None = field(default=None, metavar="{max,min}")  # None: told by its name

    checkpoint_frequency: float | None = 1.0  # Epochs between two checkpoints; None: only the last, and no best.ckpt
    checkpoint_interval: int | None = None  # Steps between two checkpoints, instead of checkpoint_frequency
    num_checkpoint_keep: int | None = 3  # How many of the newest checkpoints stay, beside best.ckpt; None keeps all

    fast_run: int | None = field(default=None, nargs="?", const=2)  # Try the loop on N (2) batches, write nothing
    limit_train_batches: int | float | None = None  # Effective batches per epoch: a count (5) or a fraction (0.1)
    limit_val_batches: int | float | None = None  # Effective batches per validation; 0: none, then monitor train/loss
    num_sanity_val_steps: int = 2  # Validation batches before the first step, to find mistakes early; at least 1 runs
    summary: bool = False  # Print the model's layers and its number of parameters


@dataclass(frozen=True)
class TestConfig(MachineConfig):
    """Evaluate a run of train.py; data and model come from the run's config.yaml."""

    out_dir: str = "train_out"  # The run directory; its name without the time means the newest of that name
    checkpoint: str = "best"  # `best`, `last`, the name of a checkpoint in the run, or a path
    split: Literal["test", "val", "train"] = "test"  # The part of the dataset to evaluate on, never augmented
    precision: Precision | None = field(default=None, metavar="str")  # As in train.py; None takes that of the training
    batch_size: int | None = None  # Samples per forward pass of a device; None: as in a validation on one device
    predictions: bool = False  # Write predictions_*.csv and, with matplotlib, confusion_matrix_*.png into the run


MAY_BE_ZERO = ("seed", "num_workers", "weight_decay", "warmup_epochs", "num_sanity_val_steps", "dropout",
               "limit_val_batches")  # fmt: skip
# A change of these would make the saved state, or the position within the epoch, meaningless.
FIXED_ON_RESUME = ("out_dir", "seed", "dataset", "effective_batch_size", "limit_train_batches", "width", "dropout")
# A change of these makes a finished run longer.
LENGTH = ("epochs", "max_steps", "early_stopping_patience")
OWN_OF_A_HOST = ("devices", "data_dir", "num_workers")  # may differ between the machines of a run


def problems(config) -> Iterator[str]:
    """What is wrong with a TrainConfig or TestConfig, one string per mistake, each naming its option."""
    for option in fields(config):
        name, value, kinds = option.name, getattr(config, option.name), (option.type, *get_args(option.type))
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices and not {*(value if isinstance(value, tuple) else [value])} <= {None, *choices}:
            yield f"--{name} {value}: choose from {', '.join(choices)}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            end = {"seed": 2**32, "dropout": 1, "timeout": 2**21}.get(name, math.inf)
            if not (0 < value < end or (value == 0 and name in MAY_BE_ZERO)):
                yield f"--{name} {value}: must be {'at least' if name in MAY_BE_ZERO else 'above'} 0 and below {end}"
            if isinstance(value, float) and name.startswith("limit_") and not 0 < value <= 1:
                yield f"--{name} {value}: a fraction is above 0 and at most 1.0, a count has no decimal point"
        elif value == () or (value == "" and name not in ("comment", "project")):
            yield f"--{name}: must not be empty"
    if not (config.out_dir + config.root_dir).isprintable():
        yield f"--root_dir {config.root_dir!r} --out_dir {config.out_dir!r}: must be printable"
    if not re.fullmatch("auto|dp|ddp(_fork)?(_find_unused_parameters_(true|false))?", config.strategy):
        yield (f"--strategy {config.strategy}: choose from auto, ddp, dp, ddp_find_unused_parameters_true; "
               "model_parallel (sharded models, FSDP2) is a recipe, see recipes/README.md")  # fmt: skip
    if isinstance(config, TrainConfig):
        if Path(config.out_dir).name in ("", ".."):
            yield f"--out_dir {config.out_dir}: must end in the name of a directory"
        if config.devices.isdecimal() and int(config.devices) > (size := config.effective_batch_size):
            yield f"--devices {config.devices}: must be at most --effective_batch_size {size}"
        if config.warmup_epochs > config.epochs > 0 and not config.max_steps:
            yield f"--warmup_epochs {config.warmup_epochs:g}: must be at most --epochs {config.epochs:g}"
        if config.fast_run and config.resume:
            yield "--fast_run: writes nothing and starts afresh, so it does not go with --resume"
        if not (config.monitor_mode or mode_of(config.monitor)):
            yield f"--monitor {config.monitor}: its name does not tell if higher is better, give --monitor_mode"


def mode_of(monitor: str) -> str | None:
    """Whether "max" or "min" of a value is best, by its name; None where the name does not tell."""
    words = set(re.split(r"[^a-z0-9]+", monitor.lower()))
    is_min = bool(words & {"loss", "error", "perplexity", "mae", "mse", "rmse", "nll", "wer", "cer", "fid"})
    is_max = bool(words & {"accuracy", "acc", "f1", "auroc", "auc", "precision", "recall", "iou", "dice", "bleu", "r2"})
    return None if is_min == is_max else "min" if is_min else "max"


def split_batch(effective_batch_size: int, asked: int | None, saved: int | None, world_size: int) -> tuple[int, int]:
    """Solves effective_batch_size = world_size x micro_batch_size x grad_accum_steps for the last two. The micro-batch
    size is the one asked for; else that of the run so far, where it divides; else the largest. Raises ConfigError,
    which names the nearest effective batch sizes, where it does not divide."""
    share, rest = divmod(effective_batch_size, world_size)
    micro_batch_size = asked or (saved if saved and share % saved == 0 else share)
    if rest or share % micro_batch_size:
        unit = world_size * (asked or 1)
        below = effective_batch_size // unit * unit
        factors = f"{world_size} device(s)" + (f" x micro_batch_size {asked}" if asked else "")
        message = f"is no multiple of {factors}; nearest: " + (f"{below} or " if below else "") + f"{below + unit}"
        raise ConfigError(f"--effective_batch_size {effective_batch_size}: {message}")
    return micro_batch_size, share // micro_batch_size


def scale_lr(base_lr: float, effective_batch_size: int, base_batch_size: int, rule: str) -> float:
    """The learning rate for effective_batch_size, from the one for base_batch_size: "linear" (Goyal et al. 2017,
    arXiv:1706.02677), "sqrt" (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741) or "none"."""
    return base_lr * (effective_batch_size / base_batch_size) ** {"linear": 1, "sqrt": 0.5, "none": 0}[rule]


def limit(total: int, limit_batches: int | float | None) -> int:
    """How many of `total` batches to use: a count, a fraction (at least one batch), 0 for none, or None for all."""
    if isinstance(limit_batches, float):
        return max(1, int(total * limit_batches + 1e-9))
    return total if limit_batches is None else min(total, limit_batches)


def in_steps(config: TrainConfig, num_samples: int) -> tuple[int, int, float, float, float]:
    """Steps per epoch and in all, and steps between two logs, validations and checkpoints, which need not be whole.
    Raises ConfigError if a batch is larger than the training set."""
    if (size := config.effective_batch_size) > num_samples:
        raise ConfigError(f"--effective_batch_size {size}: there are only {num_samples} training samples")
    per_epoch = limit(num_samples // size, config.limit_train_batches)
    total = config.max_steps or max(1, round(config.epochs * per_epoch))
    log_every = config.log_interval or per_epoch / config.log_per_epoch
    val_every = config.val_interval or config.val_frequency * per_epoch
    save_every = config.checkpoint_interval or (config.checkpoint_frequency or math.inf) * per_epoch
    return per_epoch, total, log_every, val_every, save_every


def is_due(step: int, every: float) -> bool:
    """Whether a multiple of `every` steps, which need not be whole, was passed with this step."""
    return int(step / every + 1e-9) > int((step - 1) / every + 1e-9)


def to_yaml(config: TrainConfig) -> str:
    """The config as a YAML file that `--config_path` reads; without the two options that say where it came from."""
    values = {name: value for name, value in asdict(config).items() if name not in ("resume", "config_path")}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@contextmanager
def blame(config: MachineConfig, *options: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turns an exception of these kinds into a ConfigError about those of these options that were given or are None."""
    try:
        yield
    except kinds as error:
        values = {name: getattr(config, name) for name in options}
        given = {k: v for k, v in values.items() if v is None or v != getattr(type(config), k, None)} or values
        raise ConfigError(f"{' '.join(f'--{name} {value}' for name, value in given.items())}: {error}") from error
