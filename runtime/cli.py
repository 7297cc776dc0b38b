"""The command line: options, YAML files, and what a launcher says.

Options come from four sources, of which later ones win: the config of the run to resume, `--config_path` files, the
launcher, the command line. simple_parsing parses them all, a file as if its lines were given as `--OPTION=VALUE`.
Nothing here imports torch.
"""

import ctypes
import gc
import logging
import os
import re
import signal
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from simple_parsing import ArgumentGenerationMode, ArgumentParser, NestedMode, replace
from simple_parsing.helpers.serialization import to_dict
from simple_parsing.utils import flatten_join

import runtime.source  # noqa: F401 - it reads the source files now, before imports that take seconds
from runtime.errors import ConfigError
from runtime.options import DEVICE_OPTIONS, MONITOR, NOT_EMPTY, check_together, fields_of, marked, values_of
from runtime.runs import find_run, newest_run
from runtime.terminal import end, is_child_of_fabric, say

CONFIG_END = "# This file is whole."  # the last line of a config.yaml

# ---- options, wherever they come from


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
    for group in cls.__bases__[::-1]:
        default: Any = SUPPRESS  # so the parser returns the given options alone
        if is_help:
            defaults = cls()
            default = group(**{each.name: getattr(defaults, each.name) for each in fields(group)})
        parser.add_arguments(group, group.__name__, default=default)
    found, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(unknown_word(unknown[0], cls))
    given: dict = {}
    for values in vars(found).values():
        given |= values
    for name in NOT_EMPTY:
        if name in given and not any(given[name]):  # as after --resume "$RUN" where RUN is not set
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
    """Turns what is wrong with a YAML text into a ConfigError that names its source."""
    try:
        yield
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: {error}") from None


# ---- launchers


def words_of_launcher() -> list[str]:
    """The options of `fabric run`, torchrun or srun, which have already started the processes. Without them, Fabric
    would take each process of torchrun or srun on a CPU for a run of its own."""
    warnings.filterwarnings("ignore", ".*The `srun` command is available")  # on each login node
    # Unset them: `fabric run` is torchrun with these variables, and with them Fabric() would connect the ranks at once.
    os.environ.pop("LT_CLI_USED", None)
    asked: dict = {name: os.environ.pop(f"LT_{name.upper()}", None) for name in DEVICE_OPTIONS}
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if "LOCAL_WORLD_SIZE" in os.environ and "WORLD_SIZE" in os.environ:
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
            raise ConfigError(
                f"torchrun --max-restarts {restarts}: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else a restart may hang"
            )
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        asked["devices"] = asked["devices"] or local_size
        asked["num_nodes"] = int(os.environ["WORLD_SIZE"]) // local_size
    elif tasks > 1:
        os.environ["WORLD_SIZE"] = str(tasks)
        os.environ["SLURM_JOB_NAME"] = "srun"  # Fabric takes a job named `bash` for a shell
        asked["num_nodes"] = int(os.environ["SLURM_STEP_NUM_NODES"])
        asked["devices"] = tasks // asked["num_nodes"]
    else:
        os.environ.pop("SLURM_NTASKS", None)  # in the shell of a job, Fabric would wait for ranks that nobody starts
        if not {"NODE_RANK", "WORLD_SIZE"} & os.environ.keys():  # this process is not one of several
            os.environ.pop("LOCAL_RANK", None)  # left in the shell: Fabric would wait for processes that nobody starts
            os.environ.pop("MASTER_ADDR", None)  # likewise: they would look for each other on another machine
    return [f"--{name}={value}" for name, value in asked.items() if value]


# ---- the config of a process


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


def parse_train(cls: Any, argv: list[str]) -> Any:
    """The config of train.py, of a class with its options. Its `resume` is the path of the run to resume, or None.
    Raises ConfigError."""
    defaults = cls()  # before a run is read: a mistake in config.py is not one of the run
    from_command = parse(cls, [*words_of_launcher(), *argv])
    given: dict = {}
    for path in from_command.pop("config_path", ()):
        with errors_of(f"--config_path {path}"):
            options = read_yaml(Path(os.path.expanduser(path)).read_text())
            if "config_path" in options:
                raise ConfigError("config_path is no option for a file")
            given |= parse(cls, words_of(options))
    given |= from_command
    name = given.pop("resume", None)
    if name and given.get("fast_run"):
        raise ConfigError("--fast_run: rehearses a new run, so it does not go with --resume")
    root_dir = given.get("root_dir", cls.root_dir)
    if name == "auto":
        run_dir = newest_run(given.get("out_dir", cls.out_dir), root_dir)
    else:
        run_dir = find_run("--resume", name, root_dir) if name else None
    if run_dir is None:
        return replace(defaults, given)
    given.pop("root_dir", None)  # was where to look for the run
    if name == "auto":
        given.pop("out_dir", None)  # may be FOLDER/NAME
    return resume(read_config(cls, run_dir), given, run_dir)


def resume(before: Any, given: dict, run_dir: Path) -> Any:
    """The config of a run, updated by the given options, which are printed. Raises ConfigError for an option that a
    resume cannot change, unless it is new in the code: it may be one that was renamed."""
    config = replace(before, given | {"resume": str(run_dir)})
    old = values_of(before)
    fixed = marked(config, "fixed").keys() & read_yaml((run_dir / "config.yaml").read_text()).keys()
    for name, value in values_of(config).items():
        if value == old[name]:
            continue
        if name in fixed:
            raise ConfigError(f"--{name} {value}: a resume cannot change it; {run_dir} was trained with {old[name]}")
        say(f"--{name} {value} instead of {old[name]}")
    return config


def parse_test(cls: type, argv: list[str]) -> Any:
    """The config of test.py. Its `out_dir` is the path of the run, or, for the path of a checkpoint that was moved away
    from its run, the folder of the checkpoint. Raises ConfigError."""
    given = parse(cls, [*words_of_launcher(), *argv])
    config = replace(cls(), given)
    path = Path(config.checkpoint)
    if path.name != config.checkpoint and "out_dir" not in given:  # PATH/best.ckpt
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return replace(config, out_dir=str(folder))
    name = "*" if config.checkpoint == "last" else config.checkpoint.removesuffix(".ckpt")
    run_dir = find_run("--out_dir", config.out_dir, config.root_dir, f"checkpoints/{name}.ckpt")
    return replace(config, out_dir=str(run_dir))


# ---- how the process begins


def parse_or_exit(parse: Callable, cls: type) -> Any:
    """The options of this process, by parse_train or parse_test. A mistake ends the process with one line. Also
    prepares the process: signals, and no garbage collection until the imports are done."""
    if sys.platform == "win32":
        end(2, "Windows lacks what runs need, such as locks and signals: use WSL2")
    if {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() and sys.platform == "linux":
        die_with_launcher()
    os.environ["LAUNCHER_PID"] = str(os.getpid())  # for the processes that Fabric starts
    gc.disable()  # the imports create a million objects that stay: the start takes 2 s less
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # which shells set for jobs in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would not end a process that hangs in C code
    try:
        return parse(cls, sys.argv[1:])
    except ConfigError as error:
        end(2, str(error))


def die_with_launcher():
    """Makes the system end this process when the process that has launched it dies. With torchrun all ranks are still
    there, and can save; otherwise rank 0 has launched the others, and they cannot save without it."""
    number = signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGKILL
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    parent = str(os.getppid())
    if is_child_of_fabric() and os.environ.get("LAUNCHER_PID", parent) != parent:  # it has died before
        os.kill(os.getpid(), number)
