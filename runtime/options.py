"""Options: their bounds, what a resume cannot change, what may differ between machines, and how they are parsed.
Nothing here imports torch."""

import logging
import os
import re
import shlex
from argparse import SUPPRESS
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from math import inf
from operator import ge, gt, lt
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from simple_parsing import ArgumentGenerationMode, ArgumentParser, NestedMode, field
from simple_parsing.conflicts import ConflictResolutionError
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


# ---- the command line


class Parser(ArgumentParser):
    """Raises ConfigError where argparse would print the usage and end the process."""

    def add_argument_group(self, title: Any = None, description: Any = None, *args, **options):
        # Of a class, simple_parsing gives the name and the docstring: the docstring is the better title.
        return super().add_argument_group((description or title).strip(), None, *args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(cls: type, words: list[str]) -> dict:
    """The options of a config class that are given, by name; those of a nested dataclass have its field's name and a
    dot before their own. Raises ConfigError for an unknown option, or a value that is empty or of the wrong
    type."""
    logging.getLogger("simple_parsing").setLevel(logging.CRITICAL)  # it reports bad values a second time
    parser = Parser(
        usage="%(prog)s [--OPTION VALUE ...]",
        description=cls.__doc__,
        allow_abbrev=False,
        argument_generation_mode=ArgumentGenerationMode.NESTED,
        nested_mode=NestedMode.WITHOUT_ROOT,
    )
    parser._negative_number_matcher = re.compile(r"-[\d.]+([eE][-+]?\d+)?$")  # before Python 3.14: without exponent
    is_help = "--help" in words or "-h" in words
    try:
        for group in cls.__bases__[::-1]:
            default: Any = SUPPRESS  # so the parser returns the given options alone
            if is_help:
                defaults = cls()
                default = group(**{each.name: getattr(defaults, each.name) for each in fields(group)})
            parser.add_arguments(group, group.__name__, default=default)
        found, unknown = parser.parse_known_args(words)
    except (AssertionError, NotImplementedError, ConflictResolutionError) as error:  # of simple_parsing
        names = [each.name for each in fields(cls) if "subgroups" in each.metadata]
        what = f"--{names[0]}: subgroups are not supported" if names else str(error).splitlines()[0]
        raise ConfigError(f"config.py: {what}") from None
    if unknown:
        raise ConfigError(unknown_word(unknown[0], cls))
    given: dict = {}
    for values in vars(found).values():
        given |= values
    for name in NOT_EMPTY:
        value = given.get(name, True)
        is_empty = not any(value) if isinstance(value, (list, tuple)) else value == ""
        if is_empty and getattr(cls, name) != "":  # as after --resume "$RUN" where RUN is not set
            raise ConfigError(f"--{name}: must not be empty")
    given = flatten_join(given)
    for name in given:
        if isinstance(given[name], str) and name.endswith(("_dir", "resume", "checkpoint")):
            given[name] = os.path.expanduser(given[name])  # a shell does not, if it is in quotes
    check_together(given, MONITOR)
    return given


def unknown_word(word: str, cls: type) -> str:
    """The message about a word of the command line that is neither an option nor a value."""
    if not word.startswith("--"):
        return f"{word}: neither an option, --NAME, nor a value that the option before it takes"
    word = word.split("=")[0]
    name = word.removeprefix("--").replace("-", "_")
    options = fields_of(cls())
    if word == f"--{name}" and name in options:
        return f"{word}: is a field of {cls.__name__} itself; move it into one of the groups of config.py"
    meant = [option for option in options if name and name in option] or get_close_matches(name, options, n=1)
    hint = f"; did you mean --{' or --'.join(meant)}?" if meant else ""
    return f"unknown option {word}{hint}"


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
    if config.monitor in ("train/loss", "val/loss") and config.monitor_mode == "max":
        found.append(f"--monitor_mode max: {config.monitor} is minimized; give --monitor_mode min")
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
