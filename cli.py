"""The command line: options, YAML files, what a launcher says, which run is meant; and how the process ends.

All sources are gathered as arguments, the lowest priority first: config of the run to resume, `--config_path` files,
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
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, get_args

import yaml
from simple_parsing import ArgumentParser

from config import FIXED_ON_RESUME, LENGTH, ConfigError, MachineConfig, RunError, TestConfig, TrainConfig

DEVICE_OPTIONS = ("accelerator", "devices", "num_nodes", "strategy", "precision")  # the arguments of Fabric


def parse(cls: type, args: list[str], source: str = "") -> dict:
    """The values of all fields of TrainConfig or TestConfig, from arguments and defaults. Only names and types are
    checked: raises ConfigError, which begins with `source`, for an unknown option or a value of the wrong type."""
    types = {f"config.{f.name}": f.type for f in fields(cls)}

    class Parser(ArgumentParser):
        def error(self, message):
            message = re.sub(r"invalid typing\.Literal\[(.*)\] value: (.*)", r"\2: choose from \1", message)
            if unknown := re.match("unrecognized arguments: --([^ =]+)", message):
                near = get_close_matches(unknown[1], [f.name for f in fields(cls)], n=1)
                message = f"unknown option --{unknown[1]}" + (f"; did you mean --{near[0]}?" if near else "")
            raise ConfigError(source + message.removeprefix("argument "))

        def _get_values(self, action, arg_strings):
            # simple_parsing lets every option that may be None stand without a value, as if it had not been given.
            if action.nargs == "?" and not arg_strings and action.const is None and types[action.dest] is not bool:
                raise argparse.ArgumentError(action, "expected a value")
            return super()._get_values(action, arg_strings)

        def _get_value(self, action, text):
            may_be_none = type(None) in get_args(types[action.dest])
            return None if text == "None" and may_be_none else super()._get_value(action, text)

    # The parser ends by making an instance: of this class, which has the fields and their help texts, but no checks.
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__post_init__": lambda self: None}
    logging.getLogger("simple_parsing").setLevel(logging.CRITICAL)  # it reports bad values a second time
    parser = Parser(allow_abbrev=False)
    parser.add_arguments(type(cls.__name__, (cls,), names), dest="config")
    return vars(parser.parse_args(args).config)


def file_args(path: Path, option: str) -> list[str]:
    """The options of a YAML file as command-line arguments. All values are read as text: the parser knows better
    than YAML that 1e-3 is a number. Raises ConfigError, also for an unknown option or a value of the wrong type."""
    try:
        root = yaml.compose(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}") from None
    if root and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{option} {path}: expected lines of `option: value`")
    types, args, given = {f.name: str(f.type) for f in fields(TrainConfig)}, [], set()
    for key, node in root.value if root else ():
        name, kind = str(key.value), types.get(str(key.value), "")
        if name in given or name == "config_path":
            raise ConfigError(f"{option} {path}: {name} is given twice, or is no option for a file")
        given.add(name)
        is_list = isinstance(node, yaml.SequenceNode) and "tuple" in kind
        items = node.value if is_list else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in (key, *items)):
            raise ConfigError(f"{option} {path}: line {key.start_mark.line + 1}: {name}: expected one value")
        texts = ["None" if item.tag.endswith(":null") and kind != str(str) else item.value for item in items]
        args += [f"--{name}", *texts] if is_list else [f"--{name}={texts[0]}"]
    parse(TrainConfig, args, source=f"{option} {path}: ")
    if path.name == "config.yaml" and (missing := {*FIXED_ON_RESUME} - given):
        raise ConfigError(f"{option} {path}: is damaged, it lacks {', '.join(sorted(missing))}")
    return args


def launcher_args() -> list[str]:
    """What `fabric run`, torchrun and srun say about the devices: they have started the processes already, and Fabric
    by itself would take each process of torchrun or srun on a CPU for a run of its own."""
    warnings.filterwarnings("ignore", ".*The `srun` command is available")  # on each login node
    # Taken out of the environment: `fabric run` is torchrun with options, and with them Fabric would connect at once.
    os.environ.pop("LT_CLI_USED", None)
    asked = {name: os.environ.pop(f"LT_{name.upper()}", None) for name in DEVICE_OPTIONS}
    if "LOCAL_WORLD_SIZE" in os.environ:
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
    named = [path for path in (Path(root_dir) / name, Path(name)) if path.is_dir()]
    run_dir = named[0] if named else newest_run(name, root_dir)
    if run_dir is None or not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{option} {name}: no such run, with a config.yaml, in {Path(root_dir).absolute()}")
    if not named:
        say(f"{option} {name}: {run_dir} is the newest run of that name")
    return run_dir


def resume_options(run_dir: Path, args: list[str]) -> dict:
    """The options of a run with those of `args` over them; what changes is printed. Ends the process where the run is
    finished. Raises ConfigError for a change that a resume cannot make."""
    own_args = file_args(run_dir / "config.yaml", "config of the run")
    before, values = parse(TrainConfig, own_args), parse(TrainConfig, own_args + args)
    if Path(values["out_dir"]).name == Path(before["out_dir"]).name:  # --resume auto --out_dir FOLDER/NAME
        values["out_dir"] = before["out_dir"]
    changed = {k: f"--{k} {v}" for k, v in values.items() if v != before[k] and k not in ("resume", "config_path")}
    for name in changed.keys() & {*FIXED_ON_RESUME}:
        raise ConfigError(f"{changed[name]}: a resume cannot change it; {run_dir} was trained with {before[name]}")
    if (run_dir / "model.pt").exists() and not changed.keys() & {*LENGTH}:
        message = f"{run_dir} is finished; for a new run give another --out_dir"
        if changed := [name for name in changed if name not in {f.name for f in fields(MachineConfig)}]:
            raise ConfigError(f"--{', --'.join(changed)} given, but {message}")
        say(f"nothing to do: {message}")
        sys.exit(0)
    say("\n".join(f"{changed[name]} instead of {before[name]}" for name in changed))
    return values | {"resume": str(run_dir)}


def parse_train(argv: list[str]) -> TrainConfig:
    """The command line of train.py; `resume` becomes the path of the run to go on with, or None. Raises ConfigError."""
    args = launcher_args() + argv
    values = parse(TrainConfig, args)
    if sum(arg.startswith("--config_path") for arg in argv) > 1:
        raise ConfigError("--config_path: give all files behind one, the later wins")
    if paths := [Path(path) for path in values["config_path"] or () if path is not None]:
        args = [arg for path in paths for arg in file_args(path, "--config_path")] + args
        values = parse(TrainConfig, args)
    run_dir, root_dir = values["resume"], values["root_dir"]
    if run_dir == "auto":
        run_dir = newest_run(values["out_dir"], root_dir)
    elif run_dir is not None:  # also ""
        run_dir = find_run("--resume", run_dir, root_dir)
    return TrainConfig(**(resume_options(run_dir, args) if run_dir else values | {"resume": None}))


def parse_test(argv: list[str]) -> TestConfig:
    """The command line of test.py; `out_dir` becomes the path of the run. Raises ConfigError."""
    values = parse(TestConfig, launcher_args() + argv)
    return TestConfig(**(values | {"out_dir": str(find_run("--out_dir", values["out_dir"], values["root_dir"]))}))


def read_config(run_dir: Path) -> TrainConfig:
    """The config that a run was trained with. Raises ConfigError where it is damaged."""
    return TrainConfig(**parse(TrainConfig, file_args(run_dir / "config.yaml", "config of the run")))


# ---- the process


def is_local_zero() -> bool:
    """Whether this is the first process of its machine, as far as the environment tells before Fabric is there."""
    # SLURM_LOCALID comes last: it is 0 in the shell of a Slurm job, and so in all processes launched from there.
    return not int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def say(message: str) -> None:
    if message and is_local_zero():
        print(message)


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
        chain: list[BaseException] = [error]  # the end may fail, too; torch.save covers up a full disk with an error
        while chain[-1].__context__:
            chain.append(chain[-1].__context__)
        notes = [note for failure in chain for note in getattr(failure, "__notes__", [])]
        if isinstance(error, (ConfigError, RunError)):
            end(2 if isinstance(error, ConfigError) else 1, "; ".join([str(error), *notes]))
        hint, cause = advice(error, config), next((e for e in chain if isinstance(e, OSError)), error)
        if not hint and not isinstance(cause, OSError):
            traceback.print_exception(error)
        what = f"{type(cause).__name__}: {cause}".strip()
        what = what.splitlines()[-1] if "Original Traceback" in what else what  # of a data worker; printed above
        end(1, "; ".join([what, *hint, *notes]), of_all_ranks=False)


def advice(error: Exception, config) -> list[str]:
    """What a failure that is no fault of the code is, and what to do; nothing for other failures."""
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
    if re.search("gloo|nccl|connection|timed? ?out", text, re.IGNORECASE):
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
