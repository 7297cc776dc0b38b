"""The bounds of the options, and what a resume may change. Nothing here imports torch."""

from collections.abc import Collection
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from simple_parsing.helpers.serialization import to_dict
from simple_parsing.utils import flatten_join

from runtime.errors import ConfigError

NOT_EMPTY = ["out_dir", "root_dir", "resume", "config_path", "devices", "logger_name", "monitor", "checkpoint"]
NULL = {"checkpoint_frequency": 0, "num_checkpoint_keep": 0}  # `null` of older versions; of other options, the default
# A change of these would make the saved state, the best value, or the position within the epoch meaningless.
FIXED_ON_RESUME = ("out_dir", "seed", "effective_batch_size", "limit_train_batches", "monitor", "monitor_mode")
PER_HOST_OPTIONS = ("devices", "num_workers")  # may differ between the machines of a run
MONITOR = ("monitor", "monitor_mode")  # given together or not at all: a mode belongs to a value


def values_of(config: Any) -> dict:
    """The values of all options by name, without `resume` and `config_path`. An option of a nested dataclass is named
    with a dot: `optim.momentum` for `optim: OptimConfig = OptimConfig()` with a field `momentum`."""
    return flatten_join(to_dict(config))


def fixed_options(config: Any) -> dict:
    """The values of the options that a resume cannot change: the template's, and those of `fixed_on_resume`."""
    names = (*FIXED_ON_RESUME, *config.fixed_on_resume)
    return {name: value for name, value in values_of(config).items() if name in names}


def check_together(given: dict, names: Collection[str]):
    """Raises ConfigError if some of these options are given, and others are not."""
    found = [name for name in names if given.get(name) is not None]
    if 0 < len(found) < len(names):
        raise ConfigError(f"--{found[0]} {given[found[0]]}: give --{' and --'.join(names)} together")


def set_defaults(config: Any, **defaults):
    """Sets options that are given together or not at all, where they are not given. Raises ConfigError as above."""
    check_together(vars(config), defaults)
    for name, value in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)  # the config is frozen


def check(config: Any, above_0: list, at_least_0: list, below: dict):
    """Raises ConfigError for the mistakes in the options of train.py or test.py; the message names each option.

    Args:
        config: The options.
        above_0, at_least_0: The names of options that are bounded; others may have any value of their type. An option
            of a nested dataclass is named with a dot.
        below: Options and their upper bounds.
    """
    found = []
    for option in fields(config):
        value = getattr(config, option.name)
        values = value if isinstance(value, tuple) else (value,)
        choices = choices_of(option.type)
        if choices and not set(choices).issuperset(values):
            found.append(f"--{option.name} {value}: choose from {', '.join(map(str, choices))}")
    options = values_of(config)
    for name, value in options.items():
        if name in above_0 and not 0 < value < inf:
            found.append(f"--{name} {value}: must be above 0")
        if name in at_least_0 and not 0 <= value < inf:
            found.append(f"--{name} {value}: must be at least 0")
        if name in below and not value < below[name]:
            found.append(f"--{name} {value}: must be below {below[name]}")
    if "://" in config.root_dir:
        found.append(f"--root_dir {config.root_dir}: must be a directory, not a URL")
    if hasattr(config, "effective_batch_size"):  # of train.py
        listed = {*above_0, *at_least_0, *below, *config.fixed_on_resume, *config.per_host}
        found += [f"{name}: is in a list of config.py, but is no option" for name in sorted(listed - options.keys())]
        found += problems_of_training(config)
    if found:
        raise ConfigError("; ".join(found))


def choices_of(kind: Any) -> tuple:
    """The values of a Literal, or of a tuple of them; otherwise ()."""
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


def problems_of_training(config: Any) -> list:
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
