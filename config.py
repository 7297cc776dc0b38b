"""Every option of train.py and test.py, and the bounds of their values. A field is an option, its comment the help
text; a class is a group of the help, its docstring the title.

Nothing here imports torch, so that `--help` and a mistyped option are answered at once.
"""

from dataclasses import dataclass
from typing import Any, Literal

from simple_parsing import field

from runtime.options import check, set_defaults

# Without 16-true, in which the second moments of Adam vanish.
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"]
# Sharded models (model_parallel, FSDP2) are a recipe: see recipes/README.md.
Strategy = Literal["auto", "ddp", "dp", "ddp_find_unused_parameters_true", "ddp_fork"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Loggers = tuple[Literal["csv", "tensorboard", "wandb"], ...]
NOT_GIVEN: Any = None


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
    deterministic: bool = True  # Use deterministic algorithms alone: the same bits again; False may be faster
    num_threads: int = 0  # Threads of each process on the CPU; 0: as torch chooses, and a resume keeps their number
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
    early_stopping_min_delta: float = 0.0  # Gain of `monitor` above which early stopping takes it for better


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
    # The value that decides which checkpoint is best, given together with monitor_mode; None: see set_defaults
    monitor: str = field(default=NOT_GIVEN, nargs=None, metavar="NAME")
    # Whether the maximum or the minimum of `monitor` is best; None: see set_defaults
    monitor_mode: Literal["max", "min"] = field(default=NOT_GIVEN, nargs=None)


@dataclass(frozen=True)
class Debugging:
    """Debugging"""

    # Rehearse a run: train for N steps (default 4), validate, save, resume; then delete it
    fast_run: int = field(default=0, nargs="?", const=4, metavar="N")
    limit_train_batches: int | float = 1.0  # Effective batches per epoch: a count (5) or a fraction (0.1); 1.0: all
    limit_val_batches: int | float = 1.0  # Effective batches per validation; 0: none, then monitor train/loss
    # Validation batches before the first step, at least 1 runs; give more if a metric needs all classes
    num_sanity_val_steps: int = 2
    summary: bool = False  # Print the modules of the model, each with its number of parameters


# dataclass takes the fields of the last base first.
@dataclass(frozen=True)
class TrainConfig(Debugging, Checkpoints, Logging, Optimization, Batch, Devices, Data, Run):
    """Train a model. All options have defaults."""

    # A resume cannot change these, beside the seed, the batch size and what decides which checkpoint is best.
    fixed_on_resume = (
        "dataset",
        "width",
        "dropout",
    )
    per_host = ("data_dir",)  # may differ between the machines of a run

    def __post_init__(self):
        set_defaults(self, monitor="val/accuracy", monitor_mode="max")
        check(self, ABOVE_0, AT_LEAST_0, BELOW)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation"""

    out_dir: str = "train_out"  # The run directory; its name without the time means the newest of that name
    root_dir: str = "."  # Directory that holds the run directories
    checkpoint: str = "best"  # `best`, `last`, the name of a checkpoint in the run, or a path
    split: Literal["test", "val", "train"] = "test"  # The part of the dataset to evaluate on, never augmented
    data_dir: str = ""  # Directory of the dataset's files; by default that of the training
    precision: Literal["auto", Precision] = "auto"  # As in train.py; auto: that of the training
    batch_size: int = 0  # Samples per forward pass of a device; 0: as in the training on one device
    num_workers: int = 0  # Processes per device that load data
    predictions: bool = False  # Write the metrics' arguments, such as logits, for each sample into predictions_*.pt


@dataclass(frozen=True)
class TestConfig(Machine, Evaluation):
    """Evaluate a run of train.py; data and model are those of the checkpoint's config."""

    per_host = ("data_dir",)

    def __post_init__(self):
        check(self, ABOVE_0, [*AT_LEAST_0, "batch_size"], BELOW)


# ---- bounds. An option that is in none of these lists may have any value of its type. One of a nested dataclass is
# named with a dot: "optim.momentum".

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
    "num_workers",
    "num_threads",
    "max_steps",
    "warmup_epochs",
    "weight_decay",
    "max_grad_norm",
    "early_stopping_patience",
    "early_stopping_min_delta",
    "log_interval",
    "val_interval",
    "checkpoint_frequency",
    "checkpoint_interval",
    "num_checkpoint_keep",
    "limit_val_batches",
    "num_sanity_val_steps",
]
BELOW = {
    "seed": 2**32,
    "dropout": 1,
    "timeout": 2**21,
}
