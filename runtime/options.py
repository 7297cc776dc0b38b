"""Options: their bounds, what a resume cannot change, what may differ between machines. Nothing here imports torch."""

import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from math import inf
from operator import ge, gt, lt
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from simple_parsing import field
from simple_parsing.helpers.serialization import to_dict
from simple_parsing.utils import flatten_join

from runtime.errors import ConfigError

DEVICE_OPTIONS = ("accelerator", "devices", "num_nodes", "strategy", "precision")  # the arguments of Fabric
NOT_EMPTY = ("out_dir", "root_dir", "resume", "config_path", "devices", "logger_name", "monitor", "checkpoint")
MONITOR = ("monitor", "monitor_mode")  # given together or not at all: a mode belongs to a value
BOUNDS = {"above": gt, "at_least": ge, "below": lt}

# ---- what config.py says of an option, beside it


def option(
    default: Any,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    fixed: bool = False,
    per_host: bool = False,
    **argparse: Any,
) -> Any:
    """An option of a config class.

    Args:
        default: Its default value.
        above, at_least, below: Its bounds, or those of each item of a tuple. Without them it may have any value of its
            type.
        fixed: Whether a resume cannot change it: the saved state, the best value or the position within the epoch
            would be those of something else.
        per_host: Whether it may differ between the machines of a run.
        argparse: Arguments of simple_parsing.field, such as `nargs` and `metavar`.
    """
    marks = {"above": above, "at_least": at_least, "below": below, "fixed": fixed, "per_host": per_host}
    return field(default=default, metadata=marks, **argparse)


def positive(default: float, **marks: Any) -> Any:
    """An option above 0; `marks` are those of `option`."""
    return option(default, above=0, **marks)


def non_negative(default: float, **marks: Any) -> Any:
    """An option of at least 0; `marks` are those of `option`."""
    return option(default, at_least=0, **marks)


def fields_of(config: Any, prefix: str = "") -> dict:
    """The fields of a config by the name of their option. That of a nested dataclass is named with a dot:
    `optim.momentum` for `optim: OptimConfig = OptimConfig()` with a field `momentum`."""
    found: dict = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            found |= fields_of(value, f"{prefix}{each.name}.")
        else:
            found[f"{prefix}{each.name}"] = each
    return found


def values_of(config: Any) -> dict:
    """The values of all options by name, without `resume` and `config_path`."""
    return flatten_join(to_dict(config))


def marked(config: Any, mark: str) -> dict:
    """The values of the options that have a mark, `fixed` or `per_host`."""
    values = values_of(config)
    return {name: values.get(name) for name, option in fields_of(config).items() if option.metadata.get(mark)}


# ---- checks


def check(config: Any):
    """Raises ConfigError for the mistakes in the options of train.py or test.py; the message names each option."""
    found = []
    values = values_of(config)
    for name, option in fields_of(config).items():
        value: Any = values.get(name)
        items = value if isinstance(value, (list, tuple)) else [value]
        choices = choices_of(option.type)
        if choices and not set(choices).issuperset(items):
            found.append(f"--{name} {value}: choose from {', '.join(map(str, choices))}")
        numbers = [item for item in items if item is not None]
        for bound, holds in BOUNDS.items():
            limit = option.metadata.get(bound)
            if limit is not None and not all(holds(number, limit) and number < inf for number in numbers):
                found.append(f"--{name} {value}: must be {bound.replace('_', ' ')} {limit}")
    if "://" in config.root_dir:
        found.append(f"--root_dir {config.root_dir}: must be a directory, not a URL")
    if hasattr(config, "effective_batch_size"):  # of train.py
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
    if Path(config.out_dir).name in ("", ".."):
        found.append(f"--out_dir {config.out_dir}: must end in the name of a directory")
    size = config.effective_batch_size
    if config.devices.isdecimal() and int(config.devices) > size:
        found.append(f"--devices {config.devices}: must be at most --effective_batch_size {size}")
    return found


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


@contextmanager
def as_config_error(config: Any, *options: str, kinds=(Exception,)) -> Iterator[None]:
    """Turns an exception of these kinds into a ConfigError that names the options: those that are empty or differ from
    their default; if there are none, all."""
    try:
        yield
    except kinds as error:
        values = vars(config)
        given = [name for name in options if not values[name] or values[name] != getattr(type(config), name)]
        words = [f"--{name} {shlex.quote(str(values[name]))}" for name in given or options]
        raise ConfigError(f"{' '.join(words)}: {error}") from error
