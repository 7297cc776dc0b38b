"""What a process prints, and how it ends with a message. Nothing here imports torch."""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn


def is_local_zero() -> bool:
    """Whether this is the first process of its machine, by the environment: before Fabric is there."""
    # SLURM_LOCALID comes last: it is 0 in the shell of a Slurm job, and in all processes launched from there.
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def is_child_of_fabric() -> bool:
    """Whether the launcher of Fabric has started this process, and not torchrun or srun."""
    return "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ and not is_local_zero()


def say(message: str):
    """Prints a line, on the first process of each machine."""
    if not is_local_zero():
        return
    try:
        print(message, flush=True)
    except UnicodeEncodeError:  # such as an --out_dir in umlauts, where stdout is ASCII
        print(message.encode("ascii", "backslashreplace").decode(), flush=True)
    except OSError:  # the reader is gone, as with `| head`: continue without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_error(message: str):
    """Writes the last line of a process, at once, so that it is not mixed with that of another."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}\n")


def end(code: int, message: str) -> NoReturn:
    """Ends the process before the ranks are connected. The processes of torchrun or srun all find the same: the first
    one of each machine says it."""
    if is_local_zero() or is_child_of_fabric():
        write_error(message)
    else:
        time.sleep(10)  # once this process has ended, the launcher ends the first one, too
    sys.exit(code)
