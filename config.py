"""Every option of train.py and test.py. A field is an option, its comment the help text; a class is a group of the
help, its docstring the title. `option` gives a field bounds, and says what a resume cannot change (`fixed`) and what
may differ between the machines of a run (`per_host`); `positive` and `non_negative` are options with a bound.

Nothing here imports torch, so that `--help` and a mistyped option are answered at once.
"""

from dataclasses import dataclass
from typing import Literal

from runtime.options import check, non_negative, option, positive, set_defaults

# Without 16-true, in which the second moments of Adam vanish.
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"]
# Sharded models (model_parallel, FSDP2) are a recipe: see recipes/README.md.
Strategy = Literal["auto", "ddp", "dp", "ddp_find_unused_parameters_true", "ddp_fork"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Loggers = tuple[Literal["csv", "tensorboard", "wandb"], ...]


@dataclass(frozen=True)
class Run:
    """Run"""

    out_dir: str = option("train_out", fixed=True)  # Name of the run directory; the time of the start is put before it
    root_dir: str = "."  # Directory that holds the run directories; it is made if it is missing
    comment: str = ""  # A note kept with the run: in its config.yaml and in wandb
    project: str = "fabric-template"  # Project that the run is filed under in wandb
    # Seed of the weights, the order of the samples, dropout, augmentation and a random split
    seed: int = non_negative(42, below=2**32, fixed=True)
    # Run directory to resume; `auto`: the newest run of this out_dir, or a new one
    resume: str | None = option(None, nargs=None, metavar="RUN_DIR", to_dict=False)
    # YAML files of options; later files win, the command line wins over all
    config_path: tuple[str, ...] | None = option(None, nargs="+", action="extend", metavar="FILE", to_dict=False)


@dataclass(frozen=True)
class Data:
    """Data and model"""

    dataset: Literal["digits"] = option("digits", fixed=True)  # Name of the dataset; docs/data.md adds others
    data_dir: str = option("", per_host=True)  # Directory of the dataset's files
    width: int = positive(32, fixed=True)  # Channels of the model's first layer
    dropout: float = non_negative(0.25, below=1, fixed=True)  # Probability of dropping a feature before the last layer


@dataclass(frozen=True)
class Machine:
    """Devices"""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"  # Kind of device
    devices: str = option("auto", per_host=True)  # Number of devices (`2`), or which (`0,2`)
    num_nodes: int = positive(1)  # Number of machines
    strategy: Strategy = "auto"  # How several devices work together
    deterministic: bool = True  # Use deterministic algorithms alone: the same bits again; False may be faster
    # Threads of each process on the CPU; 0: as torch chooses, and a resume keeps their number
    num_threads: int = non_negative(0)
    # Seconds that a process waits for the others, or for its data workers, before it gives up
    timeout: float = positive(300.0, below=2**21)


@dataclass(frozen=True)
class Devices(Machine):
    """Devices"""

    precision: Precision = "32-true"  # -true: weights and arithmetic; -mixed: arithmetic alone, weights in float32
    # Compile the model with torch.compile: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
    compile: CompileMode = option("none", nargs="?", const="default", metavar="MODE")


@dataclass(frozen=True)
class Batch:
    """Batch"""

    # Samples per optimizer step, over all devices and micro-batches
    effective_batch_size: int = positive(64, fixed=True)
    micro_batch_size: int = non_negative(0)  # Samples per forward pass of a device; 0: effective_batch_size / devices
    # Processes per device that load data; 0 loads in the main process, best for data in memory
    num_workers: int = non_negative(0, per_host=True)
    # Leave out the incomplete last batch of an epoch; False: the last step of an epoch has fewer samples
    drop_last: bool = option(True, fixed=True)


@dataclass(frozen=True)
class Optimization:
    """Optimization"""

    # Passes over the training set; may be a fraction
    epochs: float = positive(20.0)
    max_steps: int = non_negative(0)  # Optimizer steps of the whole run, instead of epochs
    base_lr: float = positive(4e-3)  # Learning rate for base_batch_size samples per step, see lr_scaling_rule
    base_batch_size: int = positive(64)  # The effective batch size that base_lr was tuned for
    lr_scaling_rule: Literal["linear", "sqrt", "none"] = "linear"  # Scaling of base_lr with the effective batch size
    # Epochs, or a fraction of one, over which the learning rate rises from zero
    warmup_epochs: float = non_negative(1.0)
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"  # Learning rate after the warm-up
    weight_decay: float = non_negative(0.01)  # Weight decay of AdamW
    max_grad_norm: float = non_negative(0.0)  # Maximum norm of the gradient, clipped once per step; 0 does not clip
    # Stop after this many validations without a better `monitor`; 0 does not
    early_stopping_patience: int = non_negative(0)
    # Gain of `monitor` above which early stopping takes it for better
    early_stopping_min_delta: float = non_negative(0.0)


@dataclass(frozen=True)
class Logging:
    """Logging and validation"""

    logger_name: Loggers = option(("csv", "tensorboard"), metavar="{csv,tensorboard,wandb}")  # One or more
    log_per_epoch: float = positive(1.0)  # Times per epoch that the training loss is logged
    log_interval: int = non_negative(0)  # Steps between two logs, instead of log_per_epoch
    val_frequency: float = positive(1.0)  # Epochs between two validations; fractions are allowed
    val_interval: int = non_negative(0)  # Steps between two validations, instead of val_frequency


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints"""

    # Epochs between two checkpoints; 0: only the last, and no best.ckpt
    checkpoint_frequency: float = non_negative(1.0)
    checkpoint_interval: int = non_negative(0)  # Steps between two checkpoints, instead of checkpoint_frequency
    num_checkpoint_keep: int = non_negative(3)  # Number of newest checkpoints to keep, besides best.ckpt; 0 keeps all
    # The value that decides which checkpoint is best, given together with monitor_mode
    monitor: str = option(None, fixed=True, nargs=None, metavar="NAME")
    # Whether the maximum or the minimum of `monitor` is best
    monitor_mode: Literal["max", "min"] = option(None, fixed=True, nargs=None)


@dataclass(frozen=True)
class Debugging:
    """Debugging"""

    # Rehearse a run: train for N steps (default 4), validate, save, resume; then delete it
    fast_run: int = non_negative(0, nargs="?", const=4, metavar="N")
    # Effective batches per epoch: a count (5) or a fraction (0.1); 1.0: all
    limit_train_batches: int | float = positive(1.0, fixed=True)
    # Effective batches per validation; 0: none, then monitor train/loss
    limit_val_batches: int | float = non_negative(1.0)
    # Validation batches before the first step, at least 1 runs; give more if a metric needs all classes
    num_sanity_val_steps: int = non_negative(2)
    summary: bool = False  # Print the modules of the model, each with its number of parameters


# dataclass takes the fields of the last base first.
@dataclass(frozen=True)
class TrainConfig(Debugging, Checkpoints, Logging, Optimization, Batch, Devices, Data, Run):
    """Train a model. All options have defaults."""

    def __post_init__(self):
        set_defaults(self, monitor="val/accuracy", monitor_mode="max")
        check(self)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation"""

    out_dir: str = "train_out"  # The run directory; its name without the time means the newest of that name
    root_dir: str = "."  # Directory that holds the run directories
    checkpoint: str = "best"  # `best`, `last`, the name of a checkpoint in the run, or a path
    split: Literal["test", "val", "train"] = "test"  # The part of the dataset to evaluate on, never augmented
    data_dir: str = option("", per_host=True)  # Directory of the dataset's files; by default that of the training
    precision: Literal["auto", Precision] = "auto"  # As in train.py; auto: that of the training
    batch_size: int = non_negative(0)  # Samples per forward pass of a device; 0: as in the training
    num_workers: int = non_negative(0, per_host=True)  # Processes per device that load data
    # Write the metrics' arguments, such as logits, for each sample into predictions_*.pt
    predictions: bool = False


@dataclass(frozen=True)
class EvalConfig(Machine, Evaluation):
    """Evaluate a run of train.py; data and model are those of the checkpoint's config."""

    def __post_init__(self):
        check(self)
