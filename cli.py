"""The command line: options, YAML files, what a launcher says, which run is meant; and how the process ends.

Options come from four sources, of which later ones win: the config of the run to resume, `--config_path` files, the
launcher, the command line. One parser reads them all, and one config is made of them. Nothing here imports torch.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from simple_parsing import ArgumentGenerationMode, ArgumentParser, NestedMode, replace
from simple_parsing.utils import flatten_join

from config import (
    FIXED_ON_RESUME,
    GROUPS,
    LENGTH_OPTIONS,
    ConfigError,
    RunError,
    TestConfig,
    TrainConfig,
    options_of,
    values_of,
)

ROOT = Path(__file__).parent  # of the project
# The source files, in ROOT or a folder directly in it, when this process began: it does not see later edits.
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")])
CODE = {str(path.relative_to(ROOT)): path.read_bytes() for path in FILES if path.is_file()}
SOURCES = {name: zlib.crc32(code) for name, code in CODE.items()}
CONFIG_END = "# This file is whole."  # the last line of a config.yaml
SOURCE_OPTIONS = ("resume", "config_path")  # tell where the others come from: no config.yaml has them
DEVICE_OPTIONS = ("accelerator", "devices", "num_nodes", "strategy", "precision")  # the arguments of Fabric
# Options, and their names in other programs.
OTHER_NAMES = {
    "base_lr": "lr learning_rate",
    "devices": "gpu gpus n_gpu ngpus nproc_per_node num_gpus",
    "early_stopping_patience": "early_stopping patience",
    "effective_batch_size": "batch batch_size bs global_batch_size train_batch_size",
    "epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "logger_name wandb": "use_wandb wandb",
    "max_grad_norm": "clip clip_grad clip_grad_norm grad_clip gradient_clip_val",
    "max_steps": "iterations iters max_iters num_steps steps",
    "micro_batch_size": "accumulate_grad_batches grad_accum gradient_accumulation_steps per_device_train_batch_size",
    "out_dir": "experiment log_dir name output output_dir run_name save_dir",
    "precision bf16-mixed": "amp bf16 fp16 mixed_precision",
}

# ---- options as words, wherever they come from


class Parser(ArgumentParser):
    """Parses the options of a TrainConfig or TestConfig.

    Args:
        cls: The class.
        default: SUPPRESS returns the given options alone; None shows the defaults in the help.
    """

    def __init__(self, cls: type, default: Any = None):
        super().__init__(
            usage="%(prog)s [--OPTION VALUE ...]",
            description=cls.__doc__,
            add_help=False,
            allow_abbrev=False,
            # Options of a nested dataclass have its field's name and a dot before their own.
            argument_generation_mode=ArgumentGenerationMode.NESTED,
            nested_mode=NestedMode.WITHOUT_ROOT,
        )
        self.add_arguments(cls, dest="config", default=default)

    def format_help(self) -> str:
        """The help. The options stand in the GROUPS of config.py, those that are in none of them under "Others"."""
        # Before an option may stand the title and the docstring of its class, between empty lines.
        text = re.sub(r", --\S*\bno\S+ bool", "", super().format_help())  # forms that `parse` does not take
        text, *entries = re.split(r"\n(?:\n\w+ \['(?s:.*?)\n)?  --", text)
        by_name = {entry.split()[0]: entry.rstrip() for entry in entries}
        for title, names in (GROUPS | {"Others": " ".join(by_name)}).items():
            shown = [by_name.pop(name) for name in names.split() if name in by_name]
            if shown:
                text += "\n  --".join([f"\n\n{title}:", *shown])
        return text + "\n"

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"invalid typing\.Literal\[(.*)\] value: (.*)", r"\2: choose from \1", message)
        raise ConfigError(message.removeprefix("argument "))


def words_of(argv: list[str]) -> dict:
    """The options of a command line as words. If an option is given twice, the later one wins. Raises ConfigError."""
    given = {}
    words: list[str] | None = None  # of the last option
    for arg in argv:
        if arg.encode(errors="ignore").decode() != arg:  # a file or a terminal cannot show it
            raise ConfigError(f"{arg!a}: must be UTF-8")
        if arg.startswith("--"):
            name, equals, value = arg.removeprefix("--").partition("=")
            words = [value] if equals else []
            given[name] = words
        elif arg == "-h":
            given["help"] = []
        elif words is None:
            raise ConfigError(f"{arg}: expected an option, --NAME")
        else:
            words.append(arg)
    return given


def unknown_option(name: str, options: Iterable[str]) -> str:
    """The message about an option that is not one of `options`."""
    wanted = name.replace("-", "_")
    meant = [option for option, others in OTHER_NAMES.items() if wanted in others.split()]
    meant += get_close_matches(wanted, options, n=1)
    hint = f"; did you mean --{meant[0]}?" if meant else ""
    return f"unknown option --{name}{hint}"


def parse(cls: type, given: dict) -> dict:
    """The values of options of TrainConfig or TestConfig that are given as words. Only names and types are checked:
    raises ConfigError for an unknown option or a value of the wrong type."""
    options = options_of(cls)
    found: dict = {}
    args = []
    for name, words in given.items():
        if name == "help":
            Parser(cls).print_help()
            sys.exit(0)
        if name not in options:
            raise ConfigError(unknown_option(name, options))
        option = options[name]
        if words == ["None"] and type(None) in get_args(option.type):  # which simple_parsing does not know
            found[name] = None
        elif words == ["None"] or not (words or option.type is bool or "nargs" in str(option.metadata)):
            raise ConfigError(f"--{name}: expected a value")
        elif len(words) > 1 and not re.search("tuple|list", str(option.type)):
            raise ConfigError(f"--{name} {' '.join(words)}: expected one value")
        elif len(words) == 1:
            args.append(f"--{name}={words[0]}")  # even if it begins with a dash
        else:
            args += [f"--{name}", *words]

    logging.getLogger("simple_parsing").setLevel(logging.CRITICAL)  # it reports bad values a second time
    parsed = getattr(Parser(cls, argparse.SUPPRESS).parse_args(args), "config", {})
    return flatten_join(parsed) | found


@contextmanager
def errors_of(source: str) -> Iterator[None]:
    """Puts the name of a source of options before the message of a ConfigError, and turns the errors of reading a YAML
    file into one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None


def words_of_yaml(text: str) -> dict:
    """The options in a YAML text as words, to be parsed like those of the command line: YAML would take 1e-3 for a
    string. Raises ConfigError for other than options, YAMLError or RecursionError for a text that is not YAML."""
    root = yaml.compose(text)
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError("expected lines of `option: value`")
    given = {}
    for name, key, node in leaves_of(root) if root else ():
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in (key, *items)):
            raise ConfigError(f"line {key.start_mark.line + 1}: {name}: expected one value, or a list of values")
        if name in given or name == "config_path":
            raise ConfigError(f"{name} is given twice, or is no option for a file")
        given[name] = ["None" if item.tag.endswith(":null") else item.value for item in items]
    return given


def leaves_of(mapping: yaml.MappingNode, prefix: str = "") -> Iterator:
    """The lines of a YAML mapping: name, key and value. Names in a nested mapping have its name and a dot before."""
    for key, node in mapping.value:
        name = f"{prefix}{key.value}"
        if isinstance(node, yaml.MappingNode):
            yield from leaves_of(node, f"{name}.")
        else:
            yield name, key, node


def to_yaml(config: TrainConfig) -> str:
    """The config as the text of config.yaml, without SOURCE_OPTIONS.

    Raises:
        ConfigError: An option has a type or value that would not be read back from the text.
    """
    options = json.loads(json.dumps(asdict(config), default=str))  # default: a Path
    for name in SOURCE_OPTIONS:
        del options[name]
    text = yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
    text = f"# All options of the run. The last line tells that the file is whole.\n{text}{CONFIG_END}\n"
    with errors_of("an option cannot be kept in config.yaml"):
        again = replace(config, parse(TrainConfig, words_of_yaml(text)))
        values = values_of(config)
        for name, value in values_of(again).items():
            if value != values[name]:
                raise ConfigError(f"--{name} {values[name]} would be read as {value}")
    return text


@contextmanager
def as_config_error(config, *options: str, kinds=(Exception,)) -> Iterator[None]:
    """Turns an exception of these kinds into a ConfigError that names the options: those that differ from their
    default or are None; if there are none, all."""
    try:
        yield
    except kinds as error:
        values = vars(config)
        given = [name for name in options if values[name] is None or values[name] != getattr(type(config), name)]
        words = [f"--{name} {values[name]}" for name in given or options]
        raise ConfigError(f"{' '.join(words)}: {error}") from error


# ---- launchers


def words_of_launcher() -> dict:
    """The options of `fabric run`, torchrun or srun, which have already started the processes. Without them, Fabric
    would take each process of torchrun or srun on a CPU for a run of its own."""
    warnings.filterwarnings("ignore", ".*The `srun` command is available")  # on each login node
    # Unset them: `fabric run` is torchrun with these variables, and with them Fabric() would connect the ranks at once.
    os.environ.pop("LT_CLI_USED", None)
    asked = {name: os.environ.pop(f"LT_{name.upper()}", None) for name in DEVICE_OPTIONS}
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if "LOCAL_WORLD_SIZE" in os.environ and "WORLD_SIZE" in os.environ:
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
            raise ConfigError(
                f"torchrun --max-restarts {restarts}: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else a restart may hang"
            )
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        asked["devices"] = asked["devices"] or str(local_size)
        asked["num_nodes"] = str(int(os.environ["WORLD_SIZE"]) // local_size)
    elif tasks > 1:
        os.environ["WORLD_SIZE"] = str(tasks)
        os.environ["SLURM_JOB_NAME"] = "srun"  # Fabric takes a job named `bash` for a shell
        num_nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        asked["devices"] = str(tasks // num_nodes)
        asked["num_nodes"] = str(num_nodes)
    else:
        os.environ.pop("SLURM_NTASKS", None)  # in the shell of a job, Fabric would wait for ranks that nobody starts
    return {name: [value] for name, value in asked.items() if value}


def is_local_zero() -> bool:
    """Whether this is the first process of its machine, by the environment: before Fabric is there."""
    # SLURM_LOCALID comes last: it is 0 in the shell of a Slurm job, and in all processes launched from there.
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


# ---- which run is meant


def named_folders(base: Path) -> list:
    """The directories named by a timestamp and the name of `base`, beside it; the newest first."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(base.name)}")
    return sorted((folder for folder in base.parent.glob("*/") if pattern.fullmatch(folder.name)), reverse=True)


def newest_run(name: str, root_dir: str, file: str = "config.yaml") -> Path | None:
    """The newest run of that name that has this file, not empty; None if there is none. Prints which it passes over."""
    for folder in named_folders(Path(root_dir) / name):
        if any(path.exists() and path.stat().st_size for path in folder.glob(file)):  # not a link to nowhere
            return folder
        say(f"{folder} is skipped: {file} is missing or empty")
    return None


def find_run(option: str, name: str, root_dir: str, file: str = "config.yaml") -> Path:
    """The run directory with this path or name, or the newest with a timestamp and this name: if possible, one that has
    this file. Raises ConfigError."""
    for path in (Path(root_dir) / name, Path(name)):
        if os.path.isfile(path / "config.yaml"):  # False, not an error, if the directory is not readable
            return path
    run_dir = newest_run(name, root_dir, file) or newest_run(name, root_dir)
    if run_dir is None:
        raise ConfigError(f"{option} {name}: no such run, with a config.yaml, in {Path(root_dir).absolute()}")
    say(f"{option} {name}: the run is {run_dir}")
    return run_dir


def read_config(run_dir: Path) -> TrainConfig:
    """The config that a run was trained with."""
    path = run_dir / "config.yaml"
    with errors_of(f"config of the run {path}"):
        return config_of(path.read_text())


def config_of(text: str) -> TrainConfig:
    """The config in the text of a config.yaml. Options that are gone from the code are ignored; new ones take their
    defaults, and are printed. Raises ConfigError if the text is damaged."""
    if CONFIG_END not in text:
        raise ConfigError("is damaged, or of an older version of the template: its last line is missing")
    words = words_of_yaml(text)
    known = {}
    new = []
    for name in options_of(TrainConfig):
        if name in words:
            known[name] = words[name]
        elif name not in SOURCE_OPTIONS:
            new.append(name)
    if new:
        say(f"options that are new in the code take their defaults: {', '.join(new)}")
    return replace(TrainConfig(), parse(TrainConfig, known))


def resume(run_dir: Path, given: dict) -> TrainConfig:
    """The config of a run, updated by the given options, which are printed. Exits if the run is finished. Raises
    ConfigError for a change that a resume cannot make."""
    before = read_config(run_dir)
    config = replace(before, given | {"resume": str(run_dir)})
    old = values_of(before)
    new = values_of(config)
    changed = [name for name in new if new[name] != old[name] and name not in SOURCE_OPTIONS]
    for name in changed:
        if name in FIXED_ON_RESUME:
            raise ConfigError(
                f"--{name} {new[name]}: a resume cannot change it; {run_dir} was trained with {old[name]}"
            )
    if (run_dir / "model.pt").exists() and set(changed).isdisjoint(LENGTH_OPTIONS):
        say(f"nothing to do: {run_dir} is finished; for a new run give another --out_dir")
        sys.exit(0)
    for name in changed:
        say(f"--{name} {new[name]} instead of {old[name]}")
    return config


def parse_train(argv: list[str]) -> TrainConfig:
    """The config of train.py. Its `resume` is the path of the run to resume, or None. Raises ConfigError."""
    if sum(arg.startswith("--config_path") for arg in argv) > 1:
        raise ConfigError("--config_path: give it once, with all files; the later files win")
    given = parse(TrainConfig, words_of_launcher() | words_of(argv))
    for path in reversed(given.get("config_path") or ()):  # what is already given wins
        with errors_of(f"--config_path {path}"):
            given = parse(TrainConfig, words_of_yaml(Path(path).read_text())) | given
    name = given.get("resume")
    out_dir = given.get("out_dir", TrainConfig.out_dir)
    root_dir = given.get("root_dir", TrainConfig.root_dir)
    run_dir = None
    if name == "auto":
        run_dir = newest_run(out_dir, root_dir)
    elif name is not None:
        run_dir = find_run("--resume", name, root_dir)
    if run_dir is None:
        return replace(TrainConfig(), given | {"resume": None})
    given.pop("root_dir", None)  # was where to look for the run
    if name == "auto":
        given.pop("out_dir", None)  # may be FOLDER/NAME
    return resume(run_dir, given)


def parse_test(argv: list[str]) -> TestConfig:
    """The config of test.py. Its `out_dir` is the path of the run, or, for the path of a checkpoint that was moved away
    from its run, the folder of the checkpoint. Raises ConfigError."""
    given = parse(TestConfig, words_of_launcher() | words_of(argv))
    config = replace(TestConfig(), given)
    path = Path(config.checkpoint)
    if path.name != config.checkpoint and "out_dir" not in given:  # PATH/best.ckpt
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return replace(config, out_dir=str(folder))
    name = "*" if config.checkpoint == "last" else config.checkpoint.removesuffix(".ckpt")
    run_dir = find_run("--out_dir", config.out_dir, config.root_dir, f"checkpoints/{name}.ckpt")
    return replace(config, out_dir=str(run_dir))


# ---- how the process begins and ends

LIBRARY = r'-packages/|/python3\.\d+/|File "<'  # marks a library's frame in a traceback
# Advice, by the words of an exception. A pattern with \\n also matches the line of code that has failed: it is for
# mistakes in the code, whose traceback is printed, too.
HINTS = {
    "OutOfMemoryError|MemoryError|out of memory|ALLOC_FAILED|can't allocate memory": (
        "out of memory: try a smaller --micro_batch_size, which keeps the effective batch size, or a smaller model"
    ),
    "finished reduction in the prior iteration": (
        "parts of the model have no gradient: give --strategy ddp_find_unused_parameters_true"
    ),
    "is wrapped in `DistributedDataParallel`": "is the whole model frozen?",
    r"DataLoader (worker \(|timed out)": (
        "a data worker (--num_workers) died, or did not deliver for --timeout {timeout:g} seconds"
    ),
    r"(?s)^Dist\w+Error|^RuntimeError.*([Gg]loo|NCCL|Connection closed by peer)": (
        "another process died, or did not answer for --timeout {timeout:g} seconds: see its message"
    ),
    "device-side assert": "an index is out of range on the GPU, such as a class or a token: --accelerator cpu names it",
    r"Target -?\d+ is out of bounds.*\n": "a class index must be at least 0 and below the number of classes",
    r"not NoneType\n.*\n.*data_dir": "--data_dir is not given",
    r"IndexError.*\n.*\n.*dataset\[0\]": "is the dataset empty?",
    r"(implement __getitem__|has no len).*\n.*\n.*(dataset\[|plan)": "recipes/data.md shows how to read a stream",
    r"'(train|val|test|NoneType)'.*\n.*\n.*datasets.*\[": "build_datasets must return a dict of train, val and test",
    r"\n.*\n.*setup_module\(": "build_model must return an nn.Module",
    r"\n.*\n.*= compute_loss\(": "compute_loss must return three: a dict of means, the number of samples, a tuple",
    r"Sizes of tensors.*\n.*\n.*cat\(parts\)": "--predictions: pad the outputs to one shape in all batches",
    r"\n.*\n.*metrics\.update\(": "compute_loss must return, third, the arguments of metrics.update",
}


def parse_or_exit(parse: Callable) -> Any:
    """Parses the command line of this process. A mistake ends the process with one line. Also prepares the process:
    signals, closed streams, and no garbage collection until `run`."""
    if sys.platform == "win32":
        end(2, "Windows lacks what runs need, such as locks and signals: use WSL2")
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        die_with_launcher()
    gc.disable()  # until `run`: the imports create a million objects that stay, and the start takes 2 s less
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would not end a process that hangs in C code
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None if it was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        return parse(sys.argv[1:])
    except ConfigError as error:
        end(2, str(error))


def die_with_launcher():
    """Makes the system end this process when the process that has launched it dies. With torchrun all ranks are still
    there, and can save; otherwise rank 0 has launched the others, and they cannot save without it."""
    number = signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGKILL
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def say(message: str):
    """Prints a line, on the first process of each machine."""
    if not is_local_zero():
        return
    try:
        print(message, flush=True)
    except OSError:  # the reader is gone, as with `| head`: continue without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main: Callable, config: Any) -> NoReturn:
    """Ends the process with the exit code of main(config), or with a last line about what failed and what to do."""
    gc.enable()
    gc.freeze()  # the objects of the imports are never searched for garbage
    try:
        end(main(config))
    except Exception as error:
        chain: list[BaseException] = [error]  # closing the resources may have failed, too
        while chain[-1].__context__:
            chain.append(chain[-1].__context__)
        notes = [note for failure in chain for note in getattr(failure, "__notes__", [])]
        if isinstance(error, (ConfigError, RunError)):
            end(2 if isinstance(error, ConfigError) else 1, "; ".join([str(error), *notes]))

        cause: BaseException = error
        if "inline_container" in str(error):  # torch.save hides the cause: a full disk, or a data worker that has died
            cause = chain[-1]
        what = f"{type(cause).__name__}: {cause}".strip()
        if "Original Traceback" in what:  # of a data worker
            what = what.splitlines()[-1]
        hint = advice(cause, config)
        # An error of the system, such as a full disk, needs no traceback; but a file may be missing (2) by a mistake.
        if not hint and getattr(cause, "errno", None) in (None, 2):
            frames = own_frames(error)
            if "FULL_TRACEBACK" in os.environ:
                traceback.print_exception(error)
            else:
                sys.stderr.write("Traceback (most recent call last):\n" + "".join(frames[-8:]))
            hint = advice(cause, config, f"\n{frames[-1]}")
            hint.append("all frames are in train.log, if the run has one, or shown with FULL_TRACEBACK=1")
        end(1, "; ".join([what, *hint, *notes]), of_all_ranks=False)


def own_frames(error: Exception) -> list:
    """The frames of a traceback, also those of a data worker, without those of libraries."""
    text = "".join(traceback.format_exception(error, chain=False))
    frames = re.findall(r"  File .+\n(?:    .+\n)?", text)
    return [frame for frame in frames if not re.search(LIBRARY, frame)]


def advice(error: BaseException, config: Any, frame: str = "") -> list:
    """What an exception means, if that is in HINTS; otherwise []. `frame` is the place in the code."""
    text = f"{type(error).__name__}: {error}{frame}"
    for pattern, hint in HINTS.items():
        if re.search(pattern, text):
            return [hint.format(timeout=config.timeout)]
    return []


def end(code: int, message: str = "", of_all_ranks: bool = True) -> NoReturn:
    """Ends the process, with a last line on stderr. If all ranks end alike, but not with 0, the first process of each
    machine prints the line, and its launcher ends the others while they wait. So one that fails alone is heard, too,
    and no launcher kills rank 0 while it is closing because another rank has ended."""
    if of_all_ranks and code and not is_local_zero():
        time.sleep(60 if message else 10)  # without a message, launch has waited for rank 0
        of_all_ranks = False
    if message:
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")  # neither in a run of one process
        prefix = f"rank {rank}: " if rank and not of_all_ranks else ""
        # In one write, so that it is not mixed with the line of another machine.
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {prefix}{' '.join(message.split())}\n")
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        sys.stdout.flush()
        os._exit(code)  # an orderly end would wait for the other processes, or gloo abort it
    sys.exit(code)
