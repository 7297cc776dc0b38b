"""Every setting of train.py and test.py: a documented field is an option, its docstring is the help text.

Nothing here imports torch, so that `--help` and a mistyped option answer at once.
"""

import argparse
import logging
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from inspect import formatannotation
from pathlib import Path
from typing import Literal, NoReturn, get_args

import yaml
from simple_parsing import ArgumentParser, field

# fmt: off
Accelerator = Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"]
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true", "64-true", "32", "16", "bf16", "64",
                    "transformer-engine", "transformer-engine-float16"]
# fmt: on


@dataclass(frozen=True)
class TrainConfig:
    """Train a model; every option has a default."""

    # ---- run
    out_dir: str = "train_out"
    """Name of the run directory; the time of the start is put before it"""
    root_dir: str = "."  # Directory that holds the run directories; made if missing
    comment: str | None = None  # A note kept with the run: in its config.yaml and in wandb
    project: str = "fabric-template"  # Project that the run is filed under in wandb
    seed: int = 42  # Seed of the weights, the order of the samples, dropout and augmentation
    resume: str | None = None  # Run to continue; `auto`: the newest unfinished one of this out_dir, if any
    config_path: tuple[str, ...] | None = None  # YAML files of options, the later wins; the command line wins over all

    # ---- data and model
    dataset: Literal["digits", "mnist"] = "digits"
    """`digits` ships with scikit-learn; `mnist` reads the four IDX files of any MNIST-format set in data_dir"""
    data_dir: str | None = None  # Directory of the dataset's files
    num_workers: int = 0  # Processes per device that load data; 0, best for data in memory, starts none
    width: int = 32  # Channels of the model's first layer
    dropout: float = 0.25  # Probability of dropping a feature before the last layer

    # ---- devices
    accelerator: Accelerator = "auto"
    """Kind of device"""
    devices: str = "auto"  # How many (`2`), which (`0,2`), or `idle:2` for two GPUs that nobody uses
    num_nodes: int = 1  # Machines that take part
    strategy: str = "auto"
    """How several devices work together: ddp, model_parallel or fsdp (sharded), or any other name that Fabric knows"""
    sync_batchnorm: bool = False  # Take BatchNorm's statistics over all devices; for few samples per device
    timeout: float = 300  # Seconds that a process waits for the others, also at the start, before it gives up
    rank_logs: str | None = None  # Directory for a file per process with all that it prints, to find the bad node
    precision: Precision = "32-true"  # Number format of all (-true), or of the arithmetic alone (-mixed)
    compile: bool = False  # Compile the model with torch.compile

    # ---- batch
    effective_batch_size: int = 64
    """Samples per optimizer step, over all devices and micro-batches"""
    micro_batch_size: int | None = None  # Samples per forward pass of a device; None: effective / devices

    # ---- optimization
    epochs: int = 20
    """Passes over the training set"""
    base_lr: float = 4e-3  # Learning rate for base_batch_size samples per step, see lr_scaling_rule
    base_batch_size: int = 64  # The effective batch size that base_lr was tuned for
    lr_scaling_rule: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate grows with effective_batch_size / base_batch_size"""
    warmup_epochs: float = 1.0  # Epochs, or a fraction of one, over which the learning rate rises from zero
    lr_schedule: Literal["cosine", "exponential", "constant"] = "cosine"
    """Course of the learning rate after the warm-up: cosine falls towards zero at the end"""
    gamma: float = 0.95  # Factor of the exponential schedule per epoch
    weight_decay: float = 0.01  # Weight decay of AdamW
    max_grad_norm: float | None = None  # Clip the gradient's norm to this once per step; None does not clip
    early_stopping_patience: int | None = None  # Stop after so many epochs without a better `monitor`

    # ---- logging
    logger_name: tuple[Literal["csv", "tensorboard", "wandb"], ...] = ("csv", "tensorboard")
    """One or more of csv, tensorboard and wandb"""
    log_per_epoch: int = 1  # Times per epoch that the training loss is logged, the last at the epoch's end
    log_interval: int | None = None  # Log every so many steps, and at each epoch's end, instead of log_per_epoch times

    # ---- checkpoints
    checkpoint_frequency: float | None = 1.0
    """Epochs between checkpoints; 0.25 writes four per epoch, None only the last one and no best.ckpt"""
    num_checkpoint_keep: int | None = 3  # How many of the newest checkpoints stay, beside best.ckpt; None keeps all
    monitor: str = "val/accuracy"  # The logged value that decides which checkpoint is best
    monitor_mode: Literal["max", "min"] | None = None
    """Whether `max` or `min` of `monitor` is best; None takes min for a loss, else max"""

    # ---- debugging
    fast_run: int | None = field(default=None, nargs="?", const=2)
    """Try every part of the loop on N batches (2 where no N is given), one epoch, and write nothing"""
    limit_train_batches: int | float | None = None  # Effective batches per epoch: a count (5) or a fraction (0.1)
    limit_val_batches: int | float | None = None
    """Micro-batches of a validation: a count (5), a fraction (0.1), or 0 for no validation"""
    num_sanity_val_steps: int = 2  # Validation batches before the first step, so that mistakes show at once
    profile: bool = False  # Print the costliest operators of a few steps, write a trace into the run
    summary: bool = False  # Print the model's layers, output sizes and parameters


@dataclass(frozen=True)
class TestConfig:
    """Evaluate a run of train.py; data and model come from the run's config.yaml."""

    out_dir: str  # The run directory; without its timestamp where only one run has that name
    root_dir: str = "."  # Directory that holds the run directories
    data_dir: str | None = None  # Directory of the dataset's files, where they have moved since the training
    checkpoint: str = "best"  # `best`, `last`, or a checkpoint file
    split: Literal["test", "val", "train"] = "test"  # The part of the dataset to evaluate on
    accelerator: Accelerator = "auto"  # Kind of device
    devices: str = "auto"  # How many (`2`), which (`0,2`), or `idle:2` for two GPUs that nobody uses
    num_nodes: int = 1  # Machines that take part
    strategy: str = "auto"  # How several devices work together: any name that Fabric knows
    timeout: float = 300  # Seconds that a process waits for the others, also at the start, before it gives up
    precision: Precision | None = None  # Number format; None takes that of the training
    batch_size: int | None = None  # Samples per forward pass of a device; None takes the training's
    num_workers: int = 0  # Processes that load data, per device
    predictions: bool = False  # Write predictions.csv and confusion_matrix.png into the run directory


MAY_BE_ZERO = ("seed", "num_workers", "weight_decay", "warmup_epochs", "num_sanity_val_steps", "dropout",
               "limit_val_batches")  # fmt: skip
# A change of these would make the saved state, or the position within the epoch, meaningless.
FIXED_ON_RESUME = ("seed", "dataset", "effective_batch_size", "micro_batch_size", "limit_train_batches", "width",
                   "dropout")  # fmt: skip
DEVICE_OPTIONS = ("accelerator", "devices", "num_nodes", "strategy", "precision")


def is_local_zero() -> bool:
    """Whether this is the first process of its node, as far as the environment tells before Fabric is there."""
    # SLURM_LOCALID comes last: it is 0 in a job's shell, so also in all that Fabric launches from there.
    return not int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def srun_tasks() -> int:
    """How many processes srun has started for this run; 1 without srun, also in the shell of a Slurm job."""
    return 1 if "LOCAL_WORLD_SIZE" in os.environ else int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the program with one line on stderr, from the first process of each node: another node may not have the
    problem. Exit code 2 says: bad input, nothing was made.

    The others leave with 0: a launcher that sees them fail first would kill the first and lose its exit code.
    """
    if not is_local_zero():
        sys.exit(0)
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


def problems(config: TrainConfig | TestConfig) -> list[str]:
    """What is wrong with the values, one text per mistake, each naming its option."""
    found = []
    for name, value in vars(config).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not (0 < value < math.inf or (value == 0 and name in MAY_BE_ZERO)):
                found.append(f"--{name} {value}: must be {'0 or more' if name in MAY_BE_ZERO else 'more than 0'}")
            if isinstance(value, float) and name.startswith("limit_") and not 0 < value <= 1:
                found.append(f"--{name} {value}: a fraction is above 0 and at most 1.0, a count has no decimal point")
        elif value == () or (value == "" and name not in ("comment", "project")):
            found.append(f"--{name}: must not be empty")
    if Path(config.out_dir).name in ("", "..") or "\0" in config.out_dir + config.root_dir:
        found.append(f"--out_dir {config.out_dir!r}: must end in the name of a directory")
    if isinstance(config, TrainConfig):
        if config.seed >= 2**32:
            found.append(f"--seed {config.seed}: must be less than 2**32")
        if config.dropout >= 1:
            found.append(f"--dropout {config.dropout}: must be less than 1")
        if config.warmup_epochs > config.epochs:
            found.append(f"--warmup_epochs {config.warmup_epochs}: must be at most --epochs {config.epochs}")
        if config.limit_val_batches == 0 and config.monitor != "train/loss":
            found.append("--limit_val_batches 0: without validation --monitor must be train/loss")
        if config.dataset != "digits" and config.data_dir is None:
            found.append(f"--dataset {config.dataset}: needs --data_dir, the directory of its files")
        if config.fast_run and config.resume:
            found.append("--fast_run: writes nothing and starts afresh, so it does not go with --resume")
    return found


def parse(cls: type, args: list[str], source: str = ""):
    """One parser for the command line and for config files (`source` names the file), so that both are checked
    alike. Returns an instance of `cls`, or ends the program with exit code 2."""
    types = {f.name: f.type for f in fields(cls)}

    class Parser(ArgumentParser):
        def error(self, message):
            fail(source + message.removeprefix("argument "))

        def _get_value(self, action, text):
            kind = types[action.dest.rpartition(".")[2]]
            if text == "None" and type(None) in get_args(kind):
                return None
            try:
                return super()._get_value(action, text)
            except argparse.ArgumentError:
                allowed = formatannotation(kind).replace("typing.", "").replace("Literal", "one of ")
                raise argparse.ArgumentError(action, f"{text!r} given, expected {allowed}") from None

    logging.getLogger("simple_parsing").setLevel(logging.CRITICAL)  # it reports bad values a second time
    parser = Parser(allow_abbrev=False)
    parser.add_arguments(cls, dest="config")
    return parser.parse_args(args).config


def file_args(path: Path, option: str) -> list[str]:
    """The options of a YAML file as command-line arguments. All values are read as text: the parser knows better
    than YAML that 1e-3 is a number."""
    try:
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{option}: cannot read {path}: {error}")
    if not isinstance(content, dict):
        fail(f"{option} {path}: expected lines of `option: value`")
    types, args = {f.name: str(f.type) for f in fields(TrainConfig) if f.name != "config_path"}, []
    for name, value in content.items():
        if name not in types:
            fail(f"{option} {path}: unknown option {name!r}")
        if value in ("null", "~") or (value == "" and types[name] != str(str)):
            value = "None"
        is_list = isinstance(value, list) and "tuple" in types[name]  # else the parser refuses it
        args += [f"--{name}", *map(str, value)] if is_list else [f"--{name}={value}"]
    parse(TrainConfig, args, source=f"{option} {path}: ")
    return args


def launcher_args() -> list[str]:
    """What `fabric run`, torchrun and srun say about the devices: they have started the processes already, and Fabric
    by itself would take each process of torchrun or srun on a CPU for a run of its own."""
    asked = {name: os.environ.get(f"LT_{name.upper()}") for name in DEVICE_OPTIONS}
    if "LOCAL_WORLD_SIZE" in os.environ:
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        asked |= {"devices": asked["devices"] or str(local), "num_nodes": str(world // local)}
    elif (tasks := srun_tasks()) > 1:
        nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        asked |= {"devices": str(tasks // nodes), "num_nodes": str(nodes)}
    return [f"--{name}={value}" for name, value in asked.items() if value]


def runs_named(name: str, root_dir: str) -> list[Path]:
    """The runs whose directory is `name` behind a timestamp, the oldest first."""
    base, runs = Path(root_dir) / name, []
    for file in base.parent.glob("*/config.yaml"):
        match = re.fullmatch(rf"\d{{8}}-\d{{6}}-{re.escape(base.name)}(-\d+)?", file.parent.name)
        # "x-1" is the second x of a second, or the first x-1: its config knows
        own = rf"^out_dir: .*?{re.escape(base.name)}\W*$"
        if match and (not match[1] or re.search(own, file.read_text(errors="replace"), re.MULTILINE)):
            runs.append(file.parent)
    return sorted(runs, key=lambda run: (run.name[:15], len(run.name), run.name))


def find_run(option: str, name: str, root_dir: str) -> Path:
    """The run directory that the user means; ends with one line where there is none, or more than one."""
    exact = [path for path in (Path(root_dir) / name, Path(name)) if path.is_dir()]
    runs = exact[:1] or runs_named(name, root_dir)
    if not runs:
        fail(f"{option} {name}: no such run in {Path(root_dir).absolute()}")
    if len(runs) > 1:
        fail(f"{option} {name}: {len(runs)} runs have that name: {', '.join(run.name for run in runs)}")
    if not (runs[0] / "config.yaml").is_file():
        fail(f"{option} {name}: {runs[0]} has no config.yaml, so it is no run of train.py")
    return runs[0]


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints to resume from, the best choice first: the newest, ..., the oldest, best.ckpt."""
    folder = run_dir / "checkpoints"
    return sorted(folder.glob("step-*.ckpt"), reverse=True) + sorted(folder.glob("best.ckpt"))


def read_config(run_dir: Path) -> tuple[TrainConfig, list[str]]:
    """The config that a run was trained with, and the same as command-line arguments."""
    args = file_args(run_dir / "config.yaml", "config of the run")
    if missing := [name for name in FIXED_ON_RESUME if not any(arg.startswith(f"--{name}=") for arg in args)]:
        fail(f"config of the run {run_dir / 'config.yaml'}: is damaged, it lacks {', '.join(missing)}")
    return parse(TrainConfig, args), args


def parse_train() -> tuple[TrainConfig, Path | None]:
    """Reads the command line of train.py. Returns the config and, to resume, the run directory.

    Lowest to highest: defaults, config.yaml of the resumed run, config files, launcher, command line.
    """
    argv, first = sys.argv[1:], argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config_path", nargs="+", default=[])
    first.error = lambda message: fail(message.removeprefix("argument "))
    files = [file for file in first.parse_known_args(argv)[0].config_path if file != "None"]
    args = [arg for file in files for arg in file_args(Path(file), "--config_path")] + launcher_args() + argv
    config, run_dir = parse(TrainConfig, args), None
    if config.resume == "auto":
        unfinished = [run for run in runs_named(config.out_dir, config.root_dir) if not (run / "model.pt").exists()]
        run_dir = next((run for run in reversed(unfinished) if checkpoints_of(run)), None)
    elif config.resume:
        run_dir = find_run("--resume", config.resume, config.root_dir)
        if not checkpoints_of(run_dir):
            fail(f"--resume {config.resume}: {run_dir} has no checkpoint to go on from")
    if run_dir:
        before, own_args = read_config(run_dir)
        config = replace(parse(TrainConfig, own_args + args), out_dir=before.out_dir)  # the directory keeps its name
        for name, old in vars(before).items():
            if name in ("resume", "config_path") or (new := getattr(config, name)) == old:
                continue
            if name in FIXED_ON_RESUME:
                fail(f"--{name} {new}: {run_dir.name} was trained with {old}, which a resume cannot change")
            if is_local_zero():
                print(f"--{name} {new} instead of {old}")
    if found := problems(config):
        fail("; ".join(found))
    return config, run_dir


def parse_test() -> tuple[TestConfig, Path]:
    """Reads the command line of test.py. Returns the config and the run directory."""
    config = parse(TestConfig, launcher_args() + sys.argv[1:])
    if found := problems(config):
        fail("; ".join(found))
    return config, find_run("--out_dir", config.out_dir, config.root_dir)


def to_yaml(config: TrainConfig) -> str:
    """The config as a YAML file that `--config_path` reads; without the two options that say where it came from."""
    return yaml.safe_dump({k: v for k, v in asdict(config).items() if k not in ("resume", "config_path")},
                          sort_keys=False, allow_unicode=True)  # fmt: skip
