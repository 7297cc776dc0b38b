"""A file that is written as a whole, or not at all."""

import json
import math
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomically(path: Path, mode: str = "w"):
    """Opens a temporary file and renames it to `path` once it is on the disk: a file at `path` is always complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: dict):
    """Writes values as JSON: tensors and arrays are lists, numbers that are not finite null, other objects text."""
    with atomically(path) as file:
        json.dump(as_json(values), file, indent=2, default=str)


def as_json(value: Any) -> Any:
    if hasattr(value, "to_dense"):  # a tensor, which may be sparse
        value = value.to_dense()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
