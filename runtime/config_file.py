"""config.yaml, and other YAML files of options. simple_parsing parses a file as if its lines were given as
`--OPTION=VALUE`. Nothing here imports torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from simple_parsing import replace
from simple_parsing.helpers.serialization import to_dict
from simple_parsing.utils import flatten_join

from runtime.errors import ConfigError
from runtime.options import parse, values_of
from runtime.terminal import say

CONFIG_END = "# This file is whole."  # the last line of a config.yaml


class TextLoader(yaml.BaseLoader):
    """Reads values as text, like those of the command line: YAML would take 1e-3 for a string, and 010 for 8. `null` is
    None. A key that is given twice is refused; PyYAML would take the last."""

    def construct_mapping(self, node, deep=False) -> dict:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{name} is given twice")
        return super().construct_mapping(node, deep)


TextLoader.add_implicit_resolver("null", re.compile(r"(null|Null|NULL|~|)$"), ["n", "N", "~", ""])
TextLoader.add_constructor("null", lambda loader, node: None)


def read_yaml(text: str) -> dict:
    """The options in a YAML text by name, as text, lists of text, or None."""
    options = yaml.load(text, TextLoader) or {}
    if not isinstance(options, dict):
        raise ConfigError("expected lines of `option: value`")
    return flatten_join(options)


def words_of(options: dict) -> list[str]:
    """The options of a YAML file as those of a command line. One that is `null` is not given."""
    words = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def to_yaml(config: Any) -> str:
    """The config as the text of config.yaml, without `resume` and `config_path`.

    Raises:
        ConfigError: An option has a type or value that would not be read back from the text.
    """
    with errors_of("an option cannot be kept in config.yaml"):
        text = f"{yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)}{CONFIG_END}\n"
        "".join(map(str, values_of(config).values())).encode()  # fails for a value that is not UTF-8
        again = values_of(config_of(type(config), text))
        for name, value in values_of(config).items():
            found = again.get(name)
            if found != value and str(found) != str(value):  # str: nan is not equal to itself
                raise ConfigError(f"--{name} {value} would be read as {found}")
    return text


@contextmanager
def errors_of(source: str) -> Iterator[None]:
    """Turns what is wrong with options into a ConfigError that names their source."""
    try:
        yield
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: {error}") from None


def read_config(cls: type, run_dir: Path) -> Any:
    """The config that a run was trained with."""
    path = run_dir / "config.yaml"
    with errors_of(f"config of the run {path}"):
        return config_of(cls, path.read_text())


def config_of(cls: type, text: str) -> Any:
    """The config in the text of a config.yaml. Options that are gone from the code are ignored, new ones take their
    defaults; a line names each. Raises ConfigError if the text is damaged."""
    if CONFIG_END not in text:
        raise ConfigError("is damaged: its last line is missing")
    defaults = cls()
    known = values_of(defaults)
    options = read_yaml(text)
    for name in sorted(known.keys() - options.keys()):
        say(f"--{name} {known[name]}: this option is new in the code")
    for name in sorted(options.keys() - known.keys()):
        say(f"--{name} {options.pop(name)}: this option is gone from the code, and ignored")
    return replace(defaults, parse(cls, words_of(options)))
