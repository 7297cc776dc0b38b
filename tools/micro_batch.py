"""Finds the largest --micro_batch_size that fits into memory.

python tools/micro_batch.py --effective_batch_size 1024 --precision bf16-mixed    # options of train.py

It rehearses the run by `train.py --fast_run` in a process of its own, for some of the sizes that divide the effective
batch size: by bisection, since a larger size needs more memory. The last line is the command to use. A size does not
fit if train.py says that it is out of memory, or is killed, as Linux does where the machine is out of memory. Any other
failure ends the search with the messages and the exit code of train.py. Nothing is left behind.

Samples that differ in size need more memory than the first ones, and so does a GPU that others use, too: then take the
next smaller size.
"""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
from bisect import bisect_left
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from config import TrainConfig  # noqa: E402
from runtime import cli, options  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402

OWN = ("micro_batch_size", "fast_run")  # options that train.py gets from here
STEPS = 4  # of a rehearsal: its validation then has batches as large as those of the run
FOLDERS = ".fast_run-*"  # of rehearsals
NOTE = "out of memory: try a smaller --micro_batch_size"  # in the last lines of train.py


def parse(words: list[str]) -> TrainConfig:
    """The config of a rehearsal with these options of train.py. Raises ConfigError."""
    for name in OWN:
        if name in options.parse(TrainConfig, words):
            raise ConfigError(f"--{name}: is given to train.py by this script")
    config = cli.parse_train(TrainConfig, [*words, f"--fast_run={STEPS}"])
    if config.num_nodes > 1 or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("run it on one machine, by python alone: it starts the processes of --devices itself")
    return config


def possible_sizes(config: TrainConfig) -> list[int]:
    """The micro-batch sizes that are possible, the smallest first. Raises ConfigError if the effective batch size does
    not divide, or the machine does not have the devices."""
    from runtime.launch import build_fabric  # imports torch
    from utils import choose_micro_batch_size

    world_size = build_fabric(config).world_size
    largest = choose_micro_batch_size(config.effective_batch_size, 0, 0, world_size)
    return [size for size in range(1, largest + 1) if largest % size == 0]


def fits(size: int, words: list[str], root: Path) -> bool:
    """Whether a run with this micro-batch size fits into memory. Ends this process if it fails for another reason.
    `root` is the directory of the rehearsals' folders."""
    before = {*root.glob(FOLDERS)}
    command = [sys.executable, str(REPO / "train.py"), *words, f"--micro_batch_size={size}", f"--fast_run={STEPS}"]
    # In a session of its own: Ctrl-C reaches this process alone, which ends the other one once.
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        error = process.communicate()[1]
    except KeyboardInterrupt:
        process.terminate()  # it removes its files
        process.communicate()
        raise
    code = process.returncode
    if code == 0:
        result = "fits"
    elif code == -signal.SIGKILL:
        result = "killed"
        for folder in {*root.glob(FOLDERS)} - before:
            remove(folder)
    elif NOTE in error:
        result = "out of memory"
    else:
        sys.stderr.write(f"{error}micro_batch.py: error: {shlex.join(command)} ended with exit code {code}\n")
        sys.exit(code if code > 0 else 1)
    print(f"micro_batch_size {size}: {result}", flush=True)
    return code == 0


def remove(folder: Path):
    """Removes the folder of a rehearsal that was killed. One that goes on has a lock; before, its folder is empty, and
    it makes it again."""
    for path in folder.glob("*/.lock"):
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
    shutil.rmtree(folder)


def main(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # either one raises KeyboardInterrupt, also in the background
        signal.signal(number, signal.default_int_handler)
    try:
        config = parse(words)
        sizes = possible_sizes(config)
        root = Path(config.root_dir).absolute()
        while not root.exists():  # it is not made
            root = root.parent
        count = bisect_left(sizes, True, key=lambda size: not fits(size, words, root))  # of those that fit
    except ConfigError as error:
        print(f"micro_batch.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    if count == 0:
        print(f"micro_batch.py: error: not even --micro_batch_size {sizes[0]} fits", file=sys.stderr)
        return 1
    print(f"next: {shlex.join(['python', 'train.py', *words, '--micro_batch_size', str(sizes[count - 1])])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
