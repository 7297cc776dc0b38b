"""Which run is meant, and what its files say. Nothing here imports torch."""

import json
import os
import re
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.terminal import say


def named_folders(base: Path) -> list:
    """The directories named by a timestamp and the name of `base`, beside it; the newest first."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(base.name)}")
    return sorted((folder for folder in base.parent.glob("*/") if pattern.fullmatch(folder.name)), reverse=True)


def newest_run(name: str, root_dir: str, file: str = "config.yaml") -> Path | None:
    """The newest run of that name that has this file; None if there is none. Prints which directories it skips."""
    for folder in named_folders(Path(root_dir) / name):
        if any(path.exists() for path in folder.glob(file)):
            return folder
        say(f"{folder} is skipped: {file} is missing")
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


def add_run_options(parser: Any, cls: Any):
    """Adds the options that name a run to the parser of a script, with the defaults of EvalConfig."""
    parser.add_argument(
        "--out_dir", default=cls.out_dir, help="run directory, or its name without the time (%(default)s)"
    )
    parser.add_argument("--root_dir", default=cls.root_dir, help="directory that holds the run directories")


def read_summary(run_dir: Path) -> dict:
    """summary.json of a run; {}, with a line, if it cannot be read."""
    path = run_dir / "summary.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        say(f"{path} cannot be read, so the run is not known to be finished: {error}")
        return {}
