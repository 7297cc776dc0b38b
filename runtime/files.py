"""The files of a run: each is written as a whole, or not at all."""

import errno
import fcntl
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from runtime.errors import RunError


@contextmanager
def as_run_error():
    """Turns an error of the system in the files of a run, such as that of a full disk, into a RunError. It may decorate
    a function."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the system refused to read or write the run: {error}") from error


NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
LOCKS: Any = WeakSet()  # the files that are locked
os.register_at_fork(after_in_child=lambda: [file.close() for file in LOCKS])  # a data worker would keep the lock


def lock(path: Path) -> IO:
    """Opens a file, and locks it until it is closed. Raises BlockingIOError if another process has locked it, OSError
    where the file system has no locks."""
    file = open(path, "a")  # noqa: SIM115
    LOCKS.add(file)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this open file: to read a copy of it changes nothing
    return file


def wait_for(path: Path, seconds: float = 10.0):
    """Waits until a file is there: another machine may see it later than the one that has made it."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a temporary file and renames it to `path` once it is on the disk: a file at `path` is always complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, mode) as file:
            yield file
            sync(file)
        os.replace(temporary, path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # such as that of a full disk, which torch.save hides
            raise error.__context__ from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync(file: IO):
    """Waits until a file is on the disk, where the file system can: some of FUSE refuse to."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise


def write_json(path: Path, values: dict):
    """Writes values as JSON: tensors and arrays are lists, numbers that are not finite null, other objects text."""
    text = json.dumps(values, default=as_plain, skipkeys=True)
    values = json.loads(text, parse_constant=lambda word: None)  # NaN and Infinity are not JSON
    with atomically(path) as file:
        json.dump(values, file, indent=2)


def as_plain(value: Any) -> Any:
    if hasattr(value, "to_dense"):  # a tensor, which may be sparse
        value = value.to_dense()
    return value.tolist() if hasattr(value, "tolist") else str(value)
