"""The command line, and what a launcher says.

Options come from four sources, of which later ones win: the config of the run to resume, `--config_path` files, the
launcher, the command line. Nothing here imports torch.
"""

import ctypes
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simple_parsing import replace

import runtime.source  # noqa: F401 - it reads the source files now, before imports that take seconds
from runtime.config_file import errors_of, read_config, read_yaml, words_of
from runtime.errors import ConfigError
from runtime.options import DEVICE_OPTIONS, marked, parse, values_of
from runtime.runs import find_run, newest_run
from runtime.terminal import end, is_child_of_fabric, say

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


def parse_train(cls: Any, argv: list[str]) -> Any:
    """The config of train.py, of a class with its options. Its `resume` is the path of the run to resume, or None.
    Raises ConfigError."""
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
        return replace(cls(), given)
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
        with errors_of("a default of config.py"):
            cls()
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
