"""Every option of train.py and test.py, and the checks of its value. A field is an option, its comment the help text.

Nothing here imports torch, so that `--help` and a mistyped option are answered at once.
"""

import math
import re
from dataclasses import Field, dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

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

    root_dir: str = "."  # Directory that holds the run directories; it is made if it is missing
    devices: str = "auto"  # Number of devices (`2`), or which (`0,2`)
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"  # Kind of device
    strategy: str = "auto"  # How several devices work together: ddp, dp, ddp_find_unused_parameters_true
    num_nodes: int = 1  # Number of machines
    deterministic: bool = True  # Use deterministic algorithms of cuDNN; False may be faster
    timeout: float = 300.0  # Seconds that a process waits for the others, or for its data workers, before it gives up
    num_workers: int = 0  # Processes per device that load data; 0 loads in the main process, best for data in memory

    def __post_init__(self):
        found = problems(self)
        if found:
            raise ConfigError("; ".join(found))


@dataclass(frozen=True)
class TrainConfig(MachineConfig):
    """Train a model. All options have defaults. `--max_grad_norm None` unsets one."""

    out_dir: str = "train_out"  # Name of the run directory; the time of the start is put before it
    resume: str | None = None  # Run directory to resume; `auto`: the newest run of this out_dir, or a new one
    config_path: tuple[str, ...] | None = None  # YAML files of options; later files win, the command line wins over all
    seed: int = 42  # Seed of the weights, the order of the samples, dropout and augmentation
    comment: str | None = None  # A note kept with the run: in its config.yaml and in wandb
    project: str = "fabric-template"  # Project that the run is filed under in wandb

    precision: Precision = "32-true"  # -true: weights and arithmetic; -mixed: arithmetic alone, weights in float32
    # Compile the model with torch.compile, in its default mode or another: reduce-overhead, max-autotune, ...
    compile: CompileMode | None = field(default=None, nargs="?", const="default", metavar="[mode]")

    dataset: Literal["digits"] = "digits"  # Name of the dataset; recipes/data.md adds others
    data_dir: str | None = None  # Directory of the dataset's files
    width: int = 32  # Channels of the model's first layer
    dropout: float = 0.25  # Probability of dropping a feature before the last layer

    epochs: float = 20.0  # Passes over the training set, each without an incomplete last batch; may be a fraction
    max_steps: int | None = None  # Optimizer steps of the whole run, instead of epochs
    effective_batch_size: int = 64  # Samples per optimizer step, over all devices and micro-batches
    micro_batch_size: int | None = None  # Samples per forward pass of a device; None: effective_batch_size / devices
    base_lr: float = 4e-3  # Learning rate for base_batch_size samples per step, see lr_scaling_rule
    base_batch_size: int = 64  # The effective batch size that base_lr was tuned for
    lr_scaling_rule: Literal["linear", "sqrt", "none"] = "linear"  # Scaling of base_lr with the effective batch size
    warmup_epochs: float = 1.0  # Epochs, or a fraction of one, over which the learning rate rises from zero
    lr_schedule: Literal["cosine", "constant"] = "cosine"  # Learning rate after the warm-up
    weight_decay: float = 0.01  # Weight decay of AdamW
    max_grad_norm: float | None = None  # Maximum norm of the gradient, clipped once per step; None does not clip
    early_stopping_patience: int | None = None  # Stop after this many validations without a better `monitor`

    logger_name: Loggers = field(default=("csv", "tensorboard"), metavar="{csv,tensorboard,wandb} [...]")  # One or more
    log_per_epoch: float = 1.0  # Times per epoch that the training loss is logged
    log_interval: int | None = None  # Steps between two logs, instead of log_per_epoch
    val_frequency: float = 1.0  # Epochs between two validations; fractions are allowed
    val_interval: int | None = None  # Steps between two validations, instead of val_frequency
    monitor: str = "val/accuracy"  # The value that decides which checkpoint is best
    monitor_mode: Literal["max", "min"] | None = field(default=None, metavar="{max,min}")  # None: by its name

    checkpoint_frequency: float | None = 1.0  # Epochs between two checkpoints; None: only the last, and no best.ckpt
    checkpoint_interval: int | None = None  # Steps between two checkpoints, instead of checkpoint_frequency
    num_checkpoint_keep: int | None = 3  # Number of newest checkpoints to keep, besides best.ckpt; None keeps all

    # Train for N steps (default 2) in two epochs, and write nothing
    fast_run: int | None = field(default=None, nargs="?", const=2)
    limit_train_batches: int | float | None = None  # Effective batches per epoch: a count (5) or a fraction (0.1)
    limit_val_batches: int | float | None = None  # Effective batches per validation; 0: none, then monitor train/loss
    num_sanity_val_steps: int = 2  # Validation batches before the first step, to find mistakes early; at least 1 runs
    summary: bool = False  # Print the model's layers and its number of parameters


@dataclass(frozen=True)
class TestConfig(MachineConfig):
    """Evaluate a run of train.py; data and model are those of the checkpoint's config."""

    out_dir: str = "train_out"  # The run directory; its name without the time means the newest of that name
    checkpoint: str = "best"  # `best`, `last`, the name of a checkpoint in the run, or a path
    data_dir: str | None = None  # Directory of the dataset's files; None: that of the training
    split: Literal["test", "val", "train"] = "test"  # The part of the dataset to evaluate on, never augmented
    precision: Precision | None = field(default=None, metavar="str")  # As in train.py; None: that of the training
    batch_size: int | None = None  # Samples per forward pass of a device; None: as in a validation on one device
    predictions: bool = False  # Write the metrics' arguments, such as logits, for each sample into predictions_*.pt


# The groups of --help, and the order in them.
GROUPS = {
    "Run": "out_dir root_dir resume config_path seed comment project checkpoint split predictions",
    "Devices": "devices accelerator precision compile strategy num_nodes deterministic timeout",
    "Data and model": "dataset data_dir num_workers batch_size width dropout",
    "Optimization": (
        "epochs max_steps effective_batch_size micro_batch_size base_lr base_batch_size lr_scaling_rule "
        "warmup_epochs lr_schedule weight_decay max_grad_norm early_stopping_patience"
    ),
    "Logging and validation": (
        "logger_name log_per_epoch log_interval val_frequency val_interval monitor monitor_mode"
    ),
    "Checkpoints": "checkpoint_frequency checkpoint_interval num_checkpoint_keep",
    "Debugging": "fast_run limit_train_batches limit_val_batches num_sanity_val_steps summary",
}

MAY_BE_NEGATIVE = ()  # names of options of your own
MAY_BE_ZERO = (  # beside options whose default is 0
    "seed",
    "num_workers",
    "weight_decay",
    "warmup_epochs",
    "num_sanity_val_steps",
    "dropout",
    "limit_val_batches",
)
UPPER_BOUNDS = {"seed": 2**32, "dropout": 1, "timeout": 2**21}  # exclusive
MAY_BE_EMPTY = ("comment", "project")
STRATEGIES = "auto ddp dp ddp_find_unused_parameters_true ddp_fork"  # of Fabric
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
# A change of these makes a finished run longer.
LENGTH_OPTIONS = ("epochs", "max_steps", "early_stopping_patience")
PER_HOST_OPTIONS = ("devices", "data_dir", "num_workers")  # may differ between the machines of a run
# Words in the name of a value that tell whether it is best when it is lowest, or highest.
LOW_IS_BEST = "loss error distance perplexity mae mse rmse nll wer cer fid"
HIGH_IS_BEST = "accuracy acc match f1 auroc auc precision recall iou dice bleu r2"


def options_of(config: Any, prefix: str = "") -> dict:
    """The fields of a config, or of its class, by the names of the options. A field of a nested dataclass is named with
    a dot: `--optim.momentum` for `optim: OptimConfig = OptimConfig()` with a field `momentum`."""
    found = {}
    for option in fields(config):
        name = prefix + option.name
        if is_dataclass(option.type):
            found.update(options_of(option.type, f"{name}."))
        else:
            found[name] = option
    return found


def values_of(config: MachineConfig) -> dict:
    """The values of all options by name."""
    return {name: attrgetter(name)(config) for name in options_of(config)}


def problems(config: MachineConfig) -> list:
    """The mistakes in a TrainConfig or TestConfig: a message for each, which names the option."""
    options = options_of(config)
    found = []
    for name, value in values_of(config).items():
        problem = problem_of_value(name, options[name], value)
        if problem:
            found.append(problem)
    if isinstance(config, TrainConfig):
        found += problems_of_training(config)
    if "://" in config.root_dir:
        found.append(f"--root_dir {config.root_dir}: must be a directory, not a URL")
    if config.strategy not in STRATEGIES.split():
        found.append(
            f"--strategy {config.strategy}: choose from {', '.join(STRATEGIES.split())}; "
            "model_parallel (sharded models, FSDP2) is a recipe, see recipes/README.md"
        )
    return found


def problem_of_value(name: str, option: Field, value: Any) -> str | None:
    """A message about the value of an option, regardless of the others; None if it is valid."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    choices = choices_of(option)
    if choices and not {None, *choices}.issuperset(values):
        return f"--{name} {value}: choose from {', '.join(map(str, choices))}"
    if not values or ("" in values and name not in MAY_BE_EMPTY):
        return f"--{name}: must not be empty"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None

    may_be_zero = name in MAY_BE_ZERO or option.default == 0
    is_large_enough = value > 0 or (value == 0 and may_be_zero) or name in MAY_BE_NEGATIVE
    upper_bound = UPPER_BOUNDS.get(name, math.inf)
    if not (is_large_enough and value < upper_bound):
        return f"--{name} {value}: must be {'at least' if may_be_zero else 'above'} 0 and below {upper_bound}"
    if isinstance(value, float) and name.startswith("limit_") and not 0 < value <= 1:
        return f"--{name} {value}: a fraction is above 0 and at most 1.0, a count has no decimal point"
    return None


def choices_of(option: Field) -> list:
    """The values of an option's Literal, also in `tuple[Literal[...], ...]` or `Literal[...] | None`; else []."""
    kinds = (option.type, *get_args(option.type))
    literals = [kind for kind in kinds if get_origin(kind) is Literal]
    return [choice for literal in literals for choice in get_args(literal)]


def problems_of_training(config: TrainConfig) -> list:
    """Messages about options that do not go together."""
    found = []
    if Path(config.out_dir).name in ("", ".."):
        found.append(f"--out_dir {config.out_dir}: must end in the name of a directory")
    size = config.effective_batch_size
    if config.devices.isdecimal() and int(config.devices) > size:
        found.append(f"--devices {config.devices}: must be at most --effective_batch_size {size}")
    if config.warmup_epochs > config.epochs > 0 and not config.max_steps:
        found.append(f"--warmup_epochs {config.warmup_epochs:g}: must be at most --epochs {config.epochs:g}")
    if config.fast_run and config.resume:
        found.append("--fast_run: starts a new run and writes nothing, so it does not go with --resume")
    if not (config.monitor_mode or mode_of(config.monitor)):
        found.append(f"--monitor {config.monitor}: its name does not tell if higher is better; give --monitor_mode")
    return found


def mode_of(monitor: str) -> str | None:
    """Whether the "max" or the "min" of a value is best, by its name; None if the name does not tell."""
    words = set(re.split(r"[^a-z0-9]+", monitor.lower()))
    is_min = not words.isdisjoint(LOW_IS_BEST.split())
    is_max = not words.isdisjoint(HIGH_IS_BEST.split())
    if is_min == is_max:
        return None
    return "min" if is_min else "max"
