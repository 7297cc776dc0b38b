"""The command line: options, YAML files, what a launcher says, which run is meant; and how the process ends.

Each source gives a dict of options, the lowest priority first: config of the run to resume, `--config_path` files,
launcher, command line. One parser reads them, and one config is made of them. Torch is not imported for it.
"""

import argparse
import gc
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from simple_parsing import ArgumentParser

from config import FIXED_ON_RESUME, LENGTH, ConfigError, MachineConfig, RunError, TestConfig, TrainConfig

DEVICE_OPTIONS = ("accelerator", "devices", "num_nodes", "strategy", "precision")  # the arguments of Fabric


def parse(cls: type, args: list[str], source: str = "") -> dict:
    """The options of TrainConfig or TestConfig that are given in `args`, by name. Only names and types are checked:
    raises ConfigError, which begins with `source`, for an unknown option or a value of the wrong type."""
    may_be_none = {f"config.{f.name}" for f in fields(cls) if type(None) in get_args(f.type)}

    class Parser(ArgumentParser):
        def error(self, message):
            message = re.sub(r"invalid typing\.Literal\[(.*)\] value: (.*)", r"\2: choose from \1", message)
            if unknown := re.match("unrecognized arguments: --([^ =]+)", message):
                near = get_close_matches(unknown[1], [f.name for f in fields(cls)], n=1)
                message = f"unknown option --{unknown[1]}" + (f"; did you mean --{near[0]}?" if near else "")
            raise ConfigError(source + message.removeprefix("argument "))

        def _preprocessing(self, *args, **kwargs):
            super()._preprocessing(*args, **kwargs)
            self._action_groups[-1].title = cls.__name__
            for action in self._actions:  # simple_parsing lets each option that may be None stand without a value
                if action.nargs == "?" and action.const is None and action.dest in may_be_none:
                    action.nargs, action.metavar = None, str(action.metavar).strip("[]")

        def _get_values(self, action, arg_strings):
            if arg_strings == ["None"] and action.dest not in may_be_none:
                raise argparse.ArgumentError(action, "expected a value")
            return None if arg_strings == ["None"] else super()._get_values(action, arg_strings)

    logging.getLogger("simple_parsing").setLevel(logging.CRITICAL)  # it reports bad values a second time
    parser = Parser(allow_abbrev=False)
    default: Any = None if {"-h", "--help"} & {*args} else argparse.SUPPRESS  # only the help is to show the defaults
    parser.add_arguments(cls, dest="config", default=default)
    return getattr(parser.parse_args(args), "config", {})


def read_options(path: Path, option: str) -> dict:
    """The options that a YAML file gives, by name. All values are read as text: the parser knows better than YAML that
    1e-3 is a number. Raises ConfigError, also for an unknown option or a value of the wrong type."""
    source = f"{option} {path}: "
    try:
        root = yaml.compose(path.read_text())
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}") from None
    if root and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{source}expected lines of `option: value`")
    lists = [option.name for option in fields(TrainConfig) if re.search("tuple|list", str(option.type))]
    args: dict[str, list[str]] = {}
    for key, node in root.value if root else ():
        name, is_list = key.value, isinstance(node, yaml.SequenceNode) and key.value in lists
        items = node.value if is_list else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in (key, *items)):
            raise ConfigError(f"{source}line {key.start_mark.line + 1}: {name}: expected one value")
        if name in args or name == "config_path":
            raise ConfigError(f"{source}{name} is given twice, or is no option for a file")
        texts = ["None" if item.tag.endswith(":null") else item.value for item in items]
        args[name] = [f"--{name}", *texts] if is_list else [f"--{name}={texts[0]}"]
    if option == "config of the run" and (missing := {*FIXED_ON_RESUME} - args.keys()):
        raise ConfigError(f"{source}is damaged, or older: it lacks {', '.join(sorted(missing))}")
    return parse(TrainConfig, sum(args.values(), []), source)


def launcher_args() -> list[str]:
    """What `fabric run`, torchrun and srun say about the devices: they have started the processes already, and Fabric
    by itself would take each process of torchrun or srun on a CPU for a run of its own."""
    warnings.filterwarnings("ignore", ".*The `srun` command is available")  # on each login node
    # Unset: `fabric run` is torchrun plus these variables, and with them Fabric() would connect the ranks at once.
    os.environ.pop("LT_CLI_USED", None)
    asked = {name: os.environ.pop(f"LT_{name.upper()}", None) for name in DEVICE_OPTIONS}
    if os.environ.keys() >= {"LOCAL_WORLD_SIZE", "WORLD_SIZE"}:
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        asked |= {"devices": asked["devices"] or str(local), "num_nodes": str(world // local)}
    elif (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        os.environ |= {"WORLD_SIZE": str(tasks), "SLURM_JOB_NAME": "srun"}  # Fabric takes a job `bash` for a shell
        nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        asked |= {"devices": str(tasks // nodes), "num_nodes": str(nodes)}
    else:
        os.environ.pop("SLURM_NTASKS", None)  # Fabric would wait for ranks in the shell of a job, where none is started
    return [f"--{name}={value}" for name, value in asked.items() if value]


def newest_run(name: str, root_dir: str) -> Path | None:
    """The newest run whose directory is `name` behind a timestamp, if there is one."""
    base = Path(root_dir) / name
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(base.name)}")
    runs = [file.parent for file in base.parent.glob("*/config.yaml") if pattern.fullmatch(file.parent.name)]
    return max(runs, default=None)


def find_run(option: str, name: str, root_dir: str) -> Path:
    """The run directory with this path or name, or the newest with this name behind a timestamp. Raises ConfigError."""
    for path in (Path(root_dir) / name, Path(name)):
        if os.path.isfile(path / "config.yaml"):  # False also where it must not be read
            return path
    if run_dir := newest_run(name, root_dir):
        say(f"{option} {name}: {run_dir} is the newest run of that name")
        return run_dir
    raise ConfigError(f"{option} {name}: no such run, with a config.yaml, in {Path(root_dir).absolute()}")


def read_config(run_dir: Path) -> TrainConfig:
    """The config that a run was trained with. Raises ConfigError where it is damaged."""
    return TrainConfig(**read_options(run_dir / "config.yaml", "config of the run"))


def resume(run_dir: Path, given: dict) -> TrainConfig:
    """The config of a run with the given options over it; what changes is printed. Ends the process where the run is
    finished. Raises ConfigError for a change that a resume cannot make."""
    before = replace(read_config(run_dir), resume=str(run_dir), config_path=given.get("config_path"))
    config = replace(before, **given | {"resume": str(run_dir)})
    if Path(config.out_dir).name == Path(before.out_dir).name:  # --resume auto --out_dir FOLDER/NAME
        config = replace(config, out_dir=before.out_dir)
    old, new = vars(before), vars(config)
    changed = [name for name in new if new[name] != old[name]]
    for name in [name for name in changed if name in FIXED_ON_RESUME]:
        raise ConfigError(f"--{name} {new[name]}: a resume cannot change it; {run_dir} was trained with {old[name]}")
    if (run_dir / "model.pt").exists() and not {*changed} & {*LENGTH}:
        message = f"{run_dir} is finished; for a new run give another --out_dir"
        if others := [name for name in changed if name not in MachineConfig.__dataclass_fields__]:
            raise ConfigError(f"--{', --'.join(others)} given, but {message}")
        say(f"nothing to do: {message}")
        sys.exit(0)
    for name in changed:
        say(f"--{name} {new[name]} instead of {old[name]}")
    return config


def parse_train(argv: list[str]) -> TrainConfig:
    """The command line of train.py; `resume` becomes the path of the run to go on with, or None. Raises ConfigError."""
    if sum(arg.startswith("--config_path") for arg in argv) > 1:
        raise ConfigError("--config_path: give all files behind one, the later wins")
    given = parse(TrainConfig, launcher_args() + argv)
    for path in reversed(given.get("config_path") or ()):  # what is given already wins over it
        given = read_options(Path(path), "--config_path") | given
    name, out_dir, root_dir = (given.get(k, getattr(TrainConfig, k)) for k in ("resume", "out_dir", "root_dir"))
    if name is None:
        return TrainConfig(**given)
    run_dir = newest_run(out_dir, root_dir) if name == "auto" else find_run("--resume", name, root_dir)
    return resume(run_dir, given) if run_dir else TrainConfig(**given | {"resume": None})


def parse_test(argv: list[str]) -> TestConfig:
    """The command line of test.py; `out_dir` becomes the path of the run. Raises ConfigError."""
    config = TestConfig(**parse(TestConfig, launcher_args() + argv))
    return replace(config, out_dir=str(find_run("--out_dir", config.out_dir, config.root_dir)))


def is_local_zero() -> bool:
    """Whether this is the first process of its machine, as far as the environment tells before Fabric is there."""
    # SLURM_LOCALID comes last: it is 0 in the shell of a Slurm job, and so in all processes launched from there.
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def say(message: str) -> None:
    if is_local_zero():
        try:
            print(message, flush=True)
        except OSError:  # the reader has gone, as of `| head`: the run goes on without it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def options(parse_options: Callable):
    """Parses the command line of this process; a mistake ends it with one line."""
    gc.disable()  # the imports that follow make a million objects that stay; `run` enables it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would not end a process that hangs in C code
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    try:
        return parse_options(sys.argv[1:])
    except ConfigError as error:
        end(2, str(error))


def run(main: Callable, config) -> NoReturn:
    """Ends the process with the exit code of main(config), or with a last line that says what failed and what to do."""
    gc.enable()
    gc.freeze()  # what is there by now is never searched for garbage
    try:
        end(main(config))
    except Exception as error:
        chain: list[BaseException] = [error]  # closing the resources may fail, too
        while chain[-1].__context__:
            chain.append(chain[-1].__context__)
        notes = [note for failure in chain for note in getattr(failure, "__notes__", [])]
        if isinstance(error, (ConfigError, RunError)):
            end(2 if isinstance(error, ConfigError) else 1, "; ".join([str(error), *notes]))
        hint, is_save = advice(error, config), "inline_container" in str(error)  # torch.save covers up a full disk
        cause = next((failure for failure in chain if is_save and isinstance(failure, OSError)), error)
        if not hint and not getattr(cause, "errno", None):  # what the system reports needs none: a full disk, ...
            traceback.print_exception(error)
        what = f"{type(cause).__name__}: {cause}".strip()
        what = what.splitlines()[-1] if "Original Traceback" in what else what  # of a data worker; printed above
        end(1, "; ".join([what, *hint, *notes]), of_all_ranks=False)


def advice(error: Exception, config) -> list[str]:
    """The cause of a failure that is no fault of the code, and what to do; [] for any other failure."""
    text = f"{type(error).__name__}: {error}"
    if re.search("OutOfMemoryError|MemoryError|can't allocate memory", text):
        share = getattr(config, "effective_batch_size", 1) // int(os.environ.get("WORLD_SIZE", 1))
        smaller = [size for size in range(1, getattr(config, "micro_batch_size", 1) or share) if share % size == 0]
        size = f"--micro_batch_size {smaller[-1]} for the same effective batch size" if smaller else "smaller batches"
        return [f"out of memory: try {size}, or a smaller model"]
    if "finished reduction in the prior iteration" in text:
        return ["parts of the model have no gradient: give --strategy ddp_find_unused_parameters_true"]
    waited = f"for --timeout {config.timeout:g} seconds"
    if re.search(r"DataLoader (worker \(|timed out)", text):
        return [f"a data worker (--num_workers) died, or did not deliver {waited}"]
    if "WORLD_SIZE" in os.environ and re.match(r"(?is)(runtime|dist\w+)error.*(gloo|nccl|connect|timed? ?out)", text):
        return [f"another process died, or did not answer {waited}: see its message"]
    return []


def end(code: int, message: str = "", of_all_ranks: bool = True) -> NoReturn:
    """Ends the process, with a last line on stderr. What ends all ranks alike is told by the first of each machine, and
    the others exit with 0: a launcher that saw one of them fail would kill the first and lose its exit code."""
    is_mute = of_all_ranks and not is_local_zero()
    if message and not is_mute:
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")  # neither in a run of one process
        rank = f"rank {rank}: " if rank and not of_all_ranks else ""
        # In one write: two of print's could come between those of another machine.
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {rank}{' '.join(message.split())}\n")
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        sys.stdout.flush()
        os._exit(0 if is_mute else code)  # an orderly end would wait for the other processes, or gloo abort it
    sys.exit(0 if is_mute else code)
