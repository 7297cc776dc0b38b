"""What tools/runs.py is made of: reads the runs in a directory, and prints a table that fits the terminal."""

import difflib
import fcntl
import glob
import json
import math
import operator
import re
import sys
import textwrap
import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev

import yaml
from simple_parsing.utils import flatten_join

sys.path.append(str(Path(__file__).resolve().parent.parent))
from config import TrainConfig  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402

NO_COLUMNS = ("path", "run", "last", "out_dir", "root_dir")  # of `differing`: the name of a run, and what it tells
UNTRAINED = ("tests", "recipes", "tools", "benchmarks")  # folders whose code no training runs
AVERAGED = ("seed", "fold")  # options over which --group averages, and in which the pairs of --compare agree
RESULTS = ("best", "best_step", "step", "time", "state")
# Options that do not change what is learned: those that may differ between machines, and in these classes of config.py
# those that a resume can change. Of a table that is too wide, they are left out first.
MINOR_GROUPS = ("Run", "Machine", "Logging", "Checkpoints")
MINOR = {
    option.name
    for group in filter(is_dataclass, TrainConfig.__mro__)
    for option in fields(group)
    if option.metadata.get("per_host") or (group.__name__ in MINOR_GROUPS and not option.metadata.get("fixed"))
}
# The first takes the place of the second, where it is above 0.
STEPS_FOR_EPOCHS = {
    "max_steps": "epochs",
    "log_interval": "log_per_epoch",
    "val_interval": "val_frequency",
    "checkpoint_interval": "checkpoint_frequency",
}
# These columns are left out next, then the other options, the last first.
LEFT_OUT_FIRST = ("best_step", "parameters", "time", "step", "parent", "code")
# Values of other metrics cannot be compared: where these differ, that must be seen.
ALWAYS_SHOWN = ("run", "monitor", "best", "mean", "std", "n", "repeated", "state")
OF_GROUPS = r"(([^<>!=]+/[^<>!=]+_)?(mean|std|n)|repeated|state(?=!?=\d))[<>!=]"  # filters of what --group adds
LONGEST = 16  # characters of a text in a table that is too wide
TIMESTAMP = r"^\d{8}-\d{6}-"  # with which the name of a run begins
ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

# ---- read the runs


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock. A shared one is taken, and given back within some ten microseconds: a run
    that resumes just then would be refused."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def read(path: Path, parse, default):
    """parse(file); the default where there is no such file, as of a young run, and where that fails, which is told."""
    try:
        with open(path, newline="", errors="replace") as file:
            return parse(file)
    except FileNotFoundError:
        return default
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        print(f"{path} is damaged: {' '.join(str(error).split())}", file=sys.stderr)
        return default


def read_options(file) -> dict[str, str]:
    found = dict(yaml.load(file, getattr(yaml, "CBaseLoader", yaml.BaseLoader)))  # all values as text
    found = flatten_join(found)  # options of a nested dataclass get a dot
    return {name: ",".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in found.items()}


def read_summary(file) -> dict:
    summary = dict(json.load(file))
    for name in ("parameters", "best", "best_step", "step", "seconds"):
        if not isinstance(summary.get(name), int | float | None):
            raise ValueError(f"{name} is no number")
    last = dict(summary.get("last", {}))
    summary["last"] = {name: value for name, value in last.items() if "/" in name and isinstance(value, int | float)}
    return summary


def read_parent(file) -> str:
    """The run and the step with which tools/fork.py has begun a run."""
    parent = json.load(file)
    return f"{Path(parent['path']).parent.parent.name} step {parent['step']}"


def read_code(path: Path, versions: dict) -> str | None:
    """The names of all versions of the code with which a run has trained. After a resume with an edit, or in a fork,
    there are several: its best value may come from each of them. None if it has kept no code."""
    names = set()
    for folder in sorted((path / "provenance").glob("code-????????")):  # not *.tmp, left by a kill
        if folder.name not in versions:  # a name stands for all files: it is read once
            files = sorted(file.relative_to(folder) for file in folder.rglob("*.py"))
            trained = [(name, read(folder / name, lambda file: zlib.crc32(file.read().encode()), 0))
                       for name in files if name.parts[0] not in UNTRAINED]  # fmt: skip
            versions[folder.name] = versions.setdefault(str(trained), folder.name)
        names.add(versions[folder.name])
    return ",".join(sorted(names)) or None


def read_test(file) -> tuple[int | None, dict[str, float]]:
    """The step of the checkpoint that test.py has evaluated, and the results that are numbers."""
    about = dict(json.load(file))
    results = dict(about["results"])
    return about["step"], {name: value for name, value in results.items() if isinstance(value, int | float)}


def read_tests(path: Path, best_step: int | None) -> dict[str, float]:
    """The results of all evaluations of a run, as `test/accuracy`; if it was not the best checkpoint, its name is
    there, too: `val_step-00000190/accuracy`."""
    found = {}
    for file in sorted(path.glob("test_*.json")):
        step, results = read(file, read_test, (None, {}))
        if file.stem.endswith("_best") and step != best_step:
            continue  # the run went on, and another one is the best
        title = file.stem.removeprefix("test_").removesuffix("_best")
        found |= {f"{title}/{name}": value for name, value in results.items()}
    return found


def read_mode(options: dict) -> str:
    """Whether the "max" or the "min" of the monitored value is best; nothing of options that are damaged."""
    mode = options.get("monitor_mode", "")
    return mode if mode in ("max", "min") else ""


def read_run(path: Path, versions: dict) -> dict:
    """The options, as texts, and the results of a run, in the order of the columns. `versions` has what runs before
    have told of the code."""
    summary = read(path / "summary.json", read_summary, {})
    state = summary.get("state")
    if state not in ("finished", "failed"):
        state = "interrupted"  # a process that was killed could not change "running"
    if is_locked(path / ".lock"):
        state = "running"
    run = {"path": path, "run": path.name, "parent": read(path / "provenance" / "parent.json", read_parent, None)}
    run |= read(path / "config.yaml", read_options, {})
    for steps, epochs in STEPS_FOR_EPOCHS.items():
        if passes(run, steps, ">", "0"):
            run.pop(epochs, None)  # has no effect
        elif steps in run:
            run[steps] = None
    run["code"] = read_code(path, versions)
    run |= {name: summary.get(name) for name in ("parameters", "best", "best_step", "step")}
    run |= {"time": summary.get("seconds"), "state": state, "last": summary.get("last", {})}
    return run | read_tests(path, run["best_step"])


def find_runs(folder: Path) -> list[dict]:
    """The runs in a directory and below it, the oldest first."""
    found = glob.glob(f"{glob.escape(str(folder))}/**/config.yaml", recursive=True)  # not in hidden folders
    paths = [Path(name).parent for name in found]
    paths = [path for path in paths if (path / "logs").is_dir()]  # wandb has a config.yaml of its own
    versions: dict[str, str] = {}
    return [read_run(path, versions) for path in sorted(paths, key=lambda path: (path.name, path))]


# ---- choose and sort them


def number(value):
    """A text as a float where it is one; anything else as it is."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def differing(runs: list[dict]) -> list[str]:
    """What is not the same in all runs that have it, but results."""
    names = dict.fromkeys(name for run in runs for name in run if name not in NO_COLUMNS + RESULTS and "/" not in name)
    return [name for name in names if len({run[name] for run in runs if name in run}) > 1]


def tests_of(runs: list[dict]) -> list[str]:
    """The results of test.py, those of the monitored metric first, and those of compute_loss, which are logged of the
    training, too, last. Their names alone have a slash."""
    names = dict.fromkeys(name for run in runs for name in run if "/" in name)
    trained = {name for run in runs for name in run["last"]}

    def order(name: str) -> tuple[bool, bool]:
        return not is_monitored(name, runs), f"train/{name.rpartition('/')[2]}" in trained

    return sorted(names, key=order)


def is_monitored(name: str, runs: list[dict]) -> bool:
    """Whether a result, or its mean, is of the metric that the runs monitor, as `test/accuracy` is of val/accuracy."""
    metric = runs[0].get("monitor", "").rpartition("/")[2]
    return name in ("best", "mean") or name.endswith((f"/{metric}", f"/{metric}_mean"))


def column_of(runs: list[dict], name: str, best: str = "best") -> str:
    """The column of this name, which is `best` for the value that is monitored. The last values that a run has logged
    become columns when they are asked for."""
    if any(name in run for run in runs):
        return name
    if {run.get("monitor") for run in runs} == {name}:
        return best
    for run in runs:
        if name in run.get("last", {}):
            run[name] = run["last"][name]
    return name


def no_column(text: str, name: str, rows: list[dict]) -> ConfigError:
    """The error about a text that names a column which is not there."""
    names = dict.fromkeys(known for row in rows for known in (*row, *row.get("last", {})))
    meant = [known for known in names if name in known] or difflib.get_close_matches(name, names)
    hint = f"; did you mean {' or '.join(meant[:5])}?" if meant else ""
    return ConfigError(f"{text}: no such column{hint}")


def has_name(run: dict, text: str) -> bool:
    """Whether a run has this name, with the time or without it, or this path; `*` is any text. A group has none."""
    if "run" not in run:
        return False
    names = (run["run"], re.sub(TIMESTAMP, "", run["run"]))
    is_path = "/" in text and Path(text).absolute() == run["path"].absolute()
    return is_path or text in names or any(fnmatchcase(name, text) for name in names)


def named(runs: list[dict], text: str) -> list[dict]:
    """The runs of this name; if there are none, those that have it in their names."""
    return [run for run in runs if has_name(run, text)] or [run for run in runs if has_name(run, f"*{text}*")]


def parts_of(text: str) -> tuple[str, str, str]:
    """The column, the comparison and the value of a filter."""
    found = re.match("(.+?)(>=|<=|!=|[=<>])(.*)", text)
    return found.groups() if found else ("run", "=", text)


def chosen(runs: list[dict], text: str) -> list[dict]:
    """The runs that pass a filter such as `width=64`, `run=base`, `state!=failed`, `best>=0.9`; a text without a
    comparison is a name, or a part of some. Raises ConfigError if there is none."""
    key, comparison, wanted = parts_of(text)
    key = column_of(runs, key)
    is_column = any(key in run for run in runs)
    if not is_column:  # a name may have `=` in it
        left = named(runs, text)
    elif key == "run" and comparison in ("=", "!="):
        paths = [run["path"] for run in named(runs, wanted)]
        left = [run for run in runs if (run["path"] in paths) == (comparison == "=")]
    else:
        left = [run for run in runs if passes(run, key, comparison, wanted)]
        left = left or [run for run in runs if has_name(run, text)]
    if not left:
        raise ConfigError(f"{text}: no run is left") if is_column else no_column(text, key, runs)
    return left


def passes(run: dict, key: str, comparison: str, wanted: str) -> bool:
    """Whether a run passes a filter. For > and the like, texts and missing values do not. A value is also equal to what
    the table shows of it."""
    value = run.get(key)
    ours = number(value)
    limit = number(wanted)
    if comparison in ORDER:
        return isinstance(ours, float) and isinstance(limit, float) and ORDER[comparison](ours, limit)
    pattern = wanted.replace("…", "*")  # as the table cuts a long text
    is_equal = ours == limit or wanted == cell(key, value) or fnmatchcase(str(value), pattern)
    return is_equal == (comparison == "=")


def place(value, mode: str = "") -> tuple:
    """Where a value stands in an order: numbers, the largest first if the mode is "max", texts, what is missing."""
    value = number(value)
    if isinstance(value, float):
        return 0, -value if mode == "max" else value
    return 2 if value is None else 1, str(value)


# ---- group them


def one_per_seed(runs: list[dict]) -> list[dict]:
    """A run for each seed and fold: the newest that has finished, or the newest."""
    found = {}
    for run in sorted(runs, key=lambda run: run["state"] == "finished"):  # keeps the order of those that are equal
        found[tuple(run.get(name) for name in AVERAGED)] = run
    return [*found.values()]


def grouped(runs: list[dict], names: list[str]) -> list[dict]:
    """A row for the runs that agree in these options: mean and standard deviation of the best values of n seeds, and of
    what test.py has found."""
    results = ["best", *tests_of(runs)]
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault(tuple(run.get(name) for name in names), []).append(run)
    rows = []
    for key, members in groups.items():
        counted = one_per_seed(members)
        states = Counter(run["state"] for run in counted)
        row = dict(zip(names, key, strict=True))
        for name in results:
            values = [run[name] for run in counted if run.get(name) is not None]
            title = "" if name == "best" else f"{name}_"
            row[f"{title}mean"] = mean(values) if values else None
            row[f"{title}std"] = stdev(values) if len(values) > 1 else None
            row[f"{title}n"] = len(values)
        row["repeated"] = len(members) - len(counted)
        row["state"] = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        rows.append(row)
    return rows


# ---- print them


def cell(name: str, value) -> str:
    """A value as text: results with five digits, fractions among the options with four: a search draws seventeen."""
    if value is None:
        return "-"
    if name == "time":
        return str(timedelta(seconds=int(value)))
    if isinstance(value, str) and isinstance(number(value), float) and not value.isdecimal():
        return f"{number(value):.4g}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def narrow(name: str, texts: list[str]) -> list[str]:
    """A title broken into lines, and long texts without their middle. Names of runs are not cut: they lose the
    time, but where two would be the same then."""
    if name == "run":
        count = Counter(re.sub(TIMESTAMP, "", text) for text in {*texts})
        return [name, *(text if count[short := re.sub(TIMESTAMP, "", text)] > 1 else short for text in texts)]
    cut = [text if len(text) <= LONGEST else f"{text[: LONGEST // 2 - 1]}…{text[-LONGEST // 2 :]}" for text in texts]
    return [re.sub("([_./])", r"\1\n", name), *cut]


def print_table(columns: dict[str, list[str]], width: float = math.inf, kept: Collection[str] = ()) -> Collection[str]:
    """Prints the columns under their names, and returns the names. Columns that need not be kept are left out until the
    rest fits; names of runs that do not fit are broken."""
    cells = {name: [name, *texts] for name, texts in columns.items()}

    def sizes() -> list[int]:
        return [max(len(line) for text in texts for line in text.split("\n")) for texts in cells.values()]

    def excess() -> float:
        return sum(sizes()) + 2 * len(cells) - 2 - width

    left_out = []
    if excess() > 0:
        cells = {name: narrow(name, texts) for name, texts in columns.items()}
    minor = [name for name in reversed(columns) if name in MINOR]
    for name in dict.fromkeys([*minor, *LEFT_OUT_FIRST, *reversed(columns)]):
        if name in cells and name not in kept and excess() > 0:
            del cells[name]
            left_out.append(name)
    if "run" in cells and excess() > 0:
        room = max(map(len, cells["run"])) - int(excess())
        cells["run"] = [textwrap.fill(text, max(room, 10)) for text in cells["run"]]
    widths = sizes()
    for row in zip(*cells.values(), strict=True):
        for line in zip_longest(*(text.split("\n") for text in row), fillvalue=""):
            print("  ".join(map(str.ljust, line, widths)).rstrip())
    if left_out:  # the last ones are the options, which are the most wanted
        names = dict.fromkeys(re.sub("(/.*)_(mean|std|n)$", r"\1_*", name) for name in reversed(left_out))
        about = f"not shown (--wide shows all, --columns some): {', '.join(names)}"
        print(textwrap.fill(about, max(int(width), 20), max_lines=4, placeholder=" …"))
    return cells
