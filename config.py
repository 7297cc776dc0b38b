"""Every option of train.py and test.py, and the bounds of their values. A field is an option, its comment the help
text; a class is a group of the help, its docstring the title.

Nothing here imports torch, so that `--help` and a mistyped option are answered at once.
"""

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from simple_parsing import field
from simple_parsing.helpers.serialization import to_dict
from simple_parsing.utils import flatten_join

# Without 16-true, in which the second moments of Adam vanish.
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"]
# Sharded models (model_parallel, FSDP2) are a recipe: see recipes/README.md.
Strategy = Literal["auto", "ddp", "dp", "ddp_find_unused_parameters_true", "ddp_fork"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Loggers = tuple[Literal["csv", "tensorboard", "wandb"], ...]


class ConfigError(ValueError):
    """A mistake in the options, or in what they name. The scripts print it as one line and exit with code 2."""


class RunError(RuntimeError):
    """Ends a run for a reason that is no bug. The scripts print it as one line and exit with code 1."""


@dataclass(frozen=True)
class Run:
    """Run"""

    out_dir: str = "train_out"  # Name of the run directory; the time of the start is put before it
    root_dir: str = "."  # Directory that holds the run directories; it is made if it is missing
    comment: str = ""  # A note kept with the run: in its config.yaml and in wandb
    project: str = "fabric-template"  # Project that the run is filed under in wandb
    seed: int = 42  # Seed of the weights, the order of the samples, dropout, augmentation and a random split
    # Run directory to resume; `auto`: the newest run of this out_dir, or a new one
    resume: str | None = field(default=None, nargs=None, metavar="RUN_DIR", to_dict=False)
    # YAML files of options; later files win, the command line wins over all
    config_path: tuple[str, ...] | None = field(default=None, nargs="+", action="extend", metavar="FILE", to_dict=False)


@dataclass(frozen=True)
class Data:
    """Data and model"""

    dataset: Literal["digits"] = "digits"  # Name of the dataset; recipes/data.md adds others
    data_dir: str = ""  # Directory of the dataset's files
    width: int = 32  # Channels of the model's first layer
    dropout: float = 0.25  # Probability of dropping a feature before the last layer


@dataclass(frozen=True)
class Machine:
    """Devices"""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"  # Kind of device
    devices: str = "auto"  # Number of devices (`2`), or which (`0,2`)
    num_nodes: int = 1  # Number of machines
    strategy: Strategy = "auto"  # How several devices work together
    deterministic: bool = True  # Use deterministic algorithms of cuDNN; False may be faster
    timeout: float = 300.0  # Seconds that a process waits for the others, or for its data workers, before it gives up


@dataclass(frozen=True)
class Devices(Machine):
    """Devices"""

    precision: Precision = "32-true"  # -true: weights and arithmetic; -mixed: arithmetic alone, weights in float32
    # Compile the model with torch.compile: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
    compile: CompileMode = field(default="none", nargs="?", const="default", metavar="MODE")


@dataclass(frozen=True)
class Batch:
    """Batch"""

    effective_batch_size: int = 64  # Samples per optimizer step, over all devices and micro-batches
    micro_batch_size: int = 0  # Samples per forward pass of a device; 0: effective_batch_size / devices
    num_workers: int = 0  # Processes per device that load data; 0 loads in the main process, best for data in memory


@dataclass(frozen=True)
class Optimization:
    """Optimization"""

    epochs: float = 20.0  # Passes over the training set, each without an incomplete last batch; may be a fraction
    max_steps: int = 0  # Optimizer steps of the whole run, instead of epochs
    base_lr: float = 4e-3  # Learning rate for base_batch_size samples per step, see lr_scaling_rule
    base_batch_size: int = 64  # The effective batch size that base_lr was tuned for
    lr_scaling_rule: Literal["linear", "sqrt", "none"] = "linear"  # Scaling of base_lr with the effective batch size
    warmup_epochs: float = 1.0  # Epochs, or a fraction of one, over which the learning rate rises from zero
    lr_schedule: Literal["cosine", "constant"] = "cosine"  # Learning rate after the warm-up
    weight_decay: float = 0.01  # Weight decay of AdamW
    max_grad_norm: float = 0.0  # Maximum norm of the gradient, clipped once per step; 0 does not clip
    early_stopping_patience: int = 0  # Stop after this many validations without a better `monitor`; 0 does not


@dataclass(frozen=True)
class Logging:
    """Logging and validation"""

    logger_name: Loggers = field(default=("csv", "tensorboard"), metavar="{csv,tensorboard,wandb}")  # One or more
    log_per_epoch: float = 1.0  # Times per epoch that the training loss is logged
    log_interval: int = 0  # Steps between two logs, instead of log_per_epoch
    val_frequency: float = 1.0  # Epochs between two validations; fractions are allowed
    val_interval: int = 0  # Steps between two validations, instead of val_frequency


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints"""

    checkpoint_frequency: float = 1.0  # Epochs between two checkpoints; 0: only the last, and no best.ckpt
    checkpoint_interval: int = 0  # Steps between two checkpoints, instead of checkpoint_frequency
    num_checkpoint_keep: int = 3  # Number of newest checkpoints to keep, besides best.ckpt; 0 keeps all
    monitor: str = "val/accuracy"  # The value that decides which checkpoint is best
    monitor_mode: Literal["auto", "max", "min"] = "auto"  # auto: min for a `loss`, max for an `accuracy`


@dataclass(frozen=True)
class Debugging:
    """Debugging"""

    # Rehearse a run: train for N steps (default 4), validate, save, resume; then delete it
    fast_run: int = field(default=0, nargs="?", const=4, metavar="N")
    limit_train_batches: int | float = 1.0  # Effective batches per epoch: a count (5) or a fraction (0.1); 1.0: all
    limit_val_batches: int | float = 1.0  # Effective batches per validation; 0: none, then monitor train/loss
    # Validation batches before the first step, at least 1 runs; give more if a metric needs all classes
    num_sanity_val_steps: int = 2
    summary: bool = False  # Print the model's layers and its number of parameters


# dataclass takes the fields of the last base first.
@dataclass(frozen=True)
class TrainConfig(Debugging, Checkpoints, Logging, Optimization, Batch, Devices, Data, Run):
    """Train a model. All options have defaults."""

    def __post_init__(self):
        check(self)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation"""

    out_dir: str = "train_out"  # The run directory; its name without the time means the newest of that name
    root_dir: str = "."  # Directory that holds the run directories
    checkpoint: str = "best"  # `best`, `last`, the name of a checkpoint in the run, or a path
    split: Literal["test", "val", "train"] = "test"  # The part of the dataset to evaluate on, never augmented
    data_dir: str = ""  # Directory of the dataset's files; by default that of the training
    precision: Literal["auto", Precision] = "auto"  # As in train.py; auto: that of the training
    batch_size: int = 0  # Samples per forward pass of a device; 0: as in a validation on one device
    num_workers: int = 0  # Processes per device that load data
    predictions: bool = False  # Write the metrics' arguments, such as logits, for each sample into predictions_*.pt


@dataclass(frozen=True)
class TestConfig(Machine, Evaluation):
    """Evaluate a run of train.py; data and model are those of the checkpoint's config."""

    def __post_init__(self):
        check(self)


# ---- bounds. An option that is in none of these lists may have any value of its type.

ABOVE_0 = [
    "num_nodes",
    "timeout",
    "width",
    "effective_batch_size",
    "epochs",
    "base_lr",
    "base_batch_size",
    "log_per_epoch",
    "val_frequency",
    "limit_train_batches",
]
AT_LEAST_0 = [
    "seed",
    "dropout",
    "micro_batch_size",
    "batch_size",
    "num_workers",
    "max_steps",
    "warmup_epochs",
    "weight_decay",
    "max_grad_norm",
    "early_stopping_patience",
    "log_interval",
    "val_interval",
    "checkpoint_frequency",
    "checkpoint_interval",
    "num_checkpoint_keep",
    "limit_val_batches",
    "num_sanity_val_steps",
]
BELOW = {"seed": 2**32, "dropout": 1, "timeout": 2**21}
NOT_EMPTY = ["out_dir", "root_dir", "resume", "config_path", "devices", "logger_name", "monitor", "checkpoint"]
PATHS = ("out_dir", "root_dir", "data_dir", "resume", "checkpoint")  # in which ~ is the home directory
NULL = {"checkpoint_frequency": 0, "num_checkpoint_keep": 0}  # `null` of older versions; of other options, the default

# ---- what a resume may change

# A change of these would make the saved state, the best value, or the position within the epoch meaningless.
FIXED_ON_RESUME = (
    "out_dir",
    "seed",
    "dataset",
    "effective_batch_size",
    "limit_train_batches",
    "width",
    "dropout",
    "monitor",
    "monitor_mode",
)
LENGTH_OPTIONS = ("epochs", "max_steps", "early_stopping_patience")  # can make a finished run longer
# A finished run may be given other values of these, and stays finished: they do not change what is trained.
UNTRAINED_OPTIONS = [
    "root_dir",
    "comment",
    "project",
    "data_dir",
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "timeout",
    "num_workers",
    "logger_name",
    "summary",
]
PER_HOST_OPTIONS = ("devices", "data_dir", "num_workers")  # may differ between the machines of a run


def values_of(config: Any) -> dict:
    """The values of all options by name, without `resume` and `config_path`. An option of a nested dataclass is named
    with a dot: `optim.momentum` for `optim: OptimConfig = OptimConfig()` with a field `momentum`."""
    return flatten_join(to_dict(config))


def check(config: Any):
    """Raises ConfigError for the mistakes in a TrainConfig or TestConfig; the message names each option."""
    found = []
    for option in fields(config):
        name = option.name
        value = getattr(config, name)
        values = value if isinstance(value, tuple) else (value,)
        choices = choices_of(option.type)
        if choices and not set(choices).issuperset(values):
            found.append(f"--{name} {value}: choose from {', '.join(map(str, choices))}")
        if name in ABOVE_0 and not 0 < value < inf:
            found.append(f"--{name} {value}: must be above 0")
        if name in AT_LEAST_0 and not 0 <= value < inf:
            found.append(f"--{name} {value}: must be at least 0")
        if name in BELOW and not value < BELOW[name]:
            found.append(f"--{name} {value}: must be below {BELOW[name]}")
    if "://" in config.root_dir:
        found.append(f"--root_dir {config.root_dir}: must be a directory, not a URL")
    if isinstance(config, TrainConfig):
        found += problems_of_training(config)
    if found:
        raise ConfigError("; ".join(found))


def choices_of(kind: Any) -> tuple:
    """The values of a Literal, or of a tuple of them; otherwise ()."""
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


def problems_of_training(config: TrainConfig) -> list:
    """The mistakes in options that train.py alone has."""
    found = []
    for name in ("limit_train_batches", "limit_val_batches"):
        value = getattr(config, name)
        if isinstance(value, float) and not 0 < value <= 1:
            found.append(f"--{name} {value}: a fraction is above 0 and at most 1.0, a count has no decimal point")
    if config.fast_run != 0 and config.fast_run < 2:
        found.append(f"--fast_run {config.fast_run}: must be at least 2")
    if Path(config.out_dir).name in ("", ".."):
        found.append(f"--out_dir {config.out_dir}: must end in the name of a directory")
    size = config.effective_batch_size
    if config.devices.isdecimal() and int(config.devices) > size:
        found.append(f"--devices {config.devices}: must be at most --effective_batch_size {size}")
    if config.warmup_epochs > config.epochs and not config.max_steps:
        found.append(f"--warmup_epochs {config.warmup_epochs:g}: must be at most --epochs {config.epochs:g}")
    return found


def mode_of(config: TrainConfig) -> str:
    """Whether the "max" or the "min" of `monitor` is best. The last word of its name tells it for a `loss` and an
    `accuracy`; for any other it is `monitor_mode`. Raises ConfigError if neither tells, or they contradict each other.
    """
    word = config.monitor.replace("_", "/").split("/")[-1]
    by_name = {"loss": "min", "accuracy": "max"}.get(word, "auto")
    mode = config.monitor_mode
    if by_name == mode == "auto":
        raise ConfigError(
            f"--monitor {config.monitor}: its name does not tell if higher is better; check it, or give --monitor_mode"
        )
    if by_name == "auto" or by_name == mode:
        return mode
    if mode == "auto":
        return by_name
    raise ConfigError(f"--monitor_mode {mode}: the best {config.monitor} is its {by_name}")


def is_longer(config: TrainConfig, before: TrainConfig) -> bool:
    """Whether the options may give a finished run more steps than those before."""
    patience = config.early_stopping_patience or inf
    if patience > (before.early_stopping_patience or inf):
        return True
    if config.max_steps and before.max_steps:
        return config.max_steps > before.max_steps
    if config.max_steps or before.max_steps:  # steps and epochs cannot be compared here
        return True
    return config.epochs > before.epochs
