"""A table of the training runs in a directory: the options in which they differ, best value, steps, time, state.

python recipes/runs.py DIR                                    # also while they run
python recipes/runs.py DIR --group --sort mean                # mean and standard deviation over seeds and folds
python recipes/runs.py DIR --filter 'width>=32' state=finished --format csv
python recipes/runs.py DIR --columns width seed best          # these columns alone
python recipes/runs.py DIR --plot curves.png                  # needs matplotlib
python recipes/runs.py DIR --diff A B                         # options, packages and code of two runs

The table fits the terminal, or 80 columns where there is none: titles are broken, long texts cut, and columns left out,
which the last lines name. `--wide` shows all of it, `--format csv` all digits.

A run is `running` while its process holds the lock; else `finished` or `failed` as summary.json says, or `interrupted`,
also by a kill. `time` is that of all its starts up to the last validation, checkpoint or end, as in summary.json.
`parameters` is shown where it differs. Of a fork, `parent` is the run and the step it began with, and `best` that of
its own steps. Files that cannot be read are named on stderr.
"""

import argparse
import csv
import difflib
import fcntl
import json
import math
import operator
import os
import re
import shutil
import struct
import sys
import textwrap
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean, stdev

import yaml
from simple_parsing.utils import flatten_join

sys.path.append(str(Path(__file__).resolve().parent.parent))
import config  # noqa: E402 - it imports no torch

HIDDEN = ("out_dir", "root_dir")  # options that the name of the run tells
RESULTS = ("best", "best_step", "step", "time", "state")
LOSSES = ("train/loss", "val/loss")
LEGEND = 20  # runs at most in the legend of --plot
# Of a table that is too wide, these columns are left out first, then the options, the last first.
LEFT_OUT_FIRST = ("best_step", "parameters", "time", "step")
ALWAYS_SHOWN = ("run", "best", "mean", "std", "n", "state")
LONGEST = 16  # characters of a text in a table that is too wide
ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class Mistake(ValueError):
    """In the options: printed as one line, exit code 2."""


@dataclass
class Run:
    path: Path
    options: dict[str, str]
    rows: list[dict[str, str]]  # of metrics.csv
    results: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)  # logged values, as of summary.json
    mode: str = ""  # of mode_of

    def get(self, name: str):
        return {"run": self.path.name, **self.options, **self.results}.get(name)

    @property
    def sign(self) -> int:
        return {"max": 1, "min": -1}.get(self.mode, 0)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The steps and values of a column of metrics.csv, where it has a number."""
        points = []
        for row in self.rows:
            value = number(row.get(name))
            if isinstance(value, float) and math.isfinite(value):
                points.append((int(row["step"]), value))
        return points


def number(value):
    """A text as a float where it is one; anything else as it is."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock. Asks without taking it: else a run that resumes now would be refused."""
    layout, at = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi", 0)  # of struct flock, and of its l_type
    asked = [0, 0, 0, 0, 0]
    asked[at] = fcntl.F_WRLCK
    try:
        with open(path) as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *asked))
        return struct.unpack(layout, answer)[at] != fcntl.F_UNLCK
    except OSError:  # no such file, or a file system without locks
        return False


def read(path: Path, parse, default):
    """parse(file); the default, and a line on stderr, where that fails. A run begins with config.yaml alone."""
    try:
        with open(path, newline="", errors="replace") as file:
            found = parse(file)
        if not isinstance(found, type(default)):
            raise ValueError("it is cut or overwritten")
        return found
    except FileNotFoundError:
        if path.name == "config.yaml":
            print(f"{path} is missing", file=sys.stderr)
        return default
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError, csv.Error) as error:
        print(f"{path} is damaged: {' '.join(str(error).split())}", file=sys.stderr)
        return default


def read_summary(file) -> dict:
    summary = dict(json.load(file))
    names = ("step", "best", "best_step", "seconds", "parameters")
    if [name for name in names if not isinstance(summary.get(name, 0), int | float | None)]:
        raise ValueError("it has a text for a number")
    return summary | {"last": dict(summary.get("last", {}))}


def read_rows(file) -> list[dict[str, str]]:
    """The rows of metrics.csv. A last row that is cut is no damage: it is just being written."""
    text = file.read()
    lines = text[: text.rfind("\n") + 1].splitlines()
    table = csv.DictReader(lines)
    rows = [row for row in table if None not in (*row, *row.values()) and row.get("step", "").isdecimal()]
    unreadable = table.line_num - 1 - len(rows) if lines else len(text)
    if unreadable:
        print(f"{file.name} is damaged: {len(rows)} rows can be read, and are shown", file=sys.stderr)
    return rows


def read_parent(file) -> dict:
    """The checkpoint with which recipes/fork.py has begun a run: the name of its run, and its step."""
    parent = dict(json.load(file))
    return {"name": Path(parent.get("path", "")).parent.parent.name, "step": int(parent.get("step", 0))}


def mode_of(options: dict) -> str:
    """Whether the "max" or the "min" of the monitored value is best. The config of an older version may not tell."""
    if options.get("monitor_mode") in ("max", "min"):
        return options["monitor_mode"]
    try:
        return config.mode_of(config.TrainConfig(monitor=options.get("monitor", "")))
    except config.ConfigError:
        return "max or min"


def read_run(path: Path) -> Run:
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # all values as text
    found = read(path / "config.yaml", lambda file: yaml.load(file, loader), {})
    found = flatten_join(found)  # options of a nested dataclass get a dot
    options = {name: ",".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in found.items()}
    summary = read(path / "summary.json", read_summary, {})
    run = Run(path, options, read(path / "logs" / "csv" / "metrics.csv", read_rows, []))
    run.mode = mode_of(options)
    run.last = summary.get("last", {})
    parent = read(path / "provenance" / "parent.json", read_parent, {})

    # The newest rows may be later than summary.json. Values of train/ are logged between two validations, too, when no
    # best one is chosen. Without a mode only the run itself knew which is best.
    best = summary.get("best")
    best_step = summary.get("best_step")
    monitor = options.get("monitor", "")
    points = [point for point in run.curve(monitor) if point[0] > parent.get("step", 0)]
    if points and run.sign and monitor.startswith("val/"):
        best_step, best = max(points, key=lambda point: run.sign * point[1])
    steps = [int(row["step"]) for row in run.rows]

    # A process that was killed could not change "running" in summary.json: the lock tells.
    state = summary.get("state")
    if state not in ("finished", "failed"):
        state = "interrupted"
    if is_locked(path / ".lock"):
        state = "running"

    run.results = {
        "best": best,
        "best_step": best_step,
        "step": max([summary.get("step") or 0, *steps]),
        "time": summary.get("seconds"),
        "state": state,
        "parameters": summary.get("parameters"),
        "parent": f"{parent['name']} step {parent['step']}" if parent else None,
    }
    return run


def find_runs(folder: Path) -> list[Run]:
    """The runs in a directory and below it, the oldest first."""
    found = []
    for path, folders, files in os.walk(folder):
        if ("config.yaml" in files and "logs" in folders) or re.match(r"\d{8}-\d{6}-", Path(path).name):
            found.append(Path(path))
            folders.clear()  # wandb has a config.yaml of its own
        folders[:] = [name for name in folders if not name.startswith(".")]  # .venv
    return [read_run(path) for path in sorted(found, key=lambda path: (path.name, path))]


def differing(runs: list[Run]) -> list[str]:
    """The options that are not the same in all runs, but those of damaged runs."""
    options = [run.options for run in runs if run.options]
    names = dict.fromkeys(name for each in options for name in each if name not in HIDDEN)
    return [name for name in names if len({each.get(name) for each in options}) > 1]


def chosen(runs: list[Run], filters: list[str]) -> list[Run]:
    """The runs that pass all filters, such as `width=64`, `run=*-base-*`, `state!=failed`, `best>=0.9`."""
    for text in filters:
        found = re.match("(.+?)(>=|<=|!=|[=<>])(.*)", text)
        names = {"run", "parent", "parameters", *RESULTS, *(name for run in runs for name in run.options)}
        if not found or found[1] not in names:
            raise Mistake(
                f"--filter {text}: expected KEY=VALUE, KEY an option, run, parent, parameters, {', '.join(RESULTS)}"
            )
        key, comparison, wanted = found.groups()
        if comparison in ORDER and not isinstance(number(wanted), float):
            raise Mistake(f"--filter {text}: {wanted} is no number")
        runs = [run for run in runs if passes(run.get(key), comparison, wanted)]
        if not runs:
            raise Mistake(f"--filter {text}: no run is left")
    return runs


def passes(value, comparison: str, wanted: str) -> bool:
    """Whether a value of a run passes a filter. For > and the like, texts and missing values do not."""
    if comparison in ORDER:
        return isinstance(number(value), float) and ORDER[comparison](number(value), number(wanted))
    is_equal = number(value) == number(wanted) or fnmatchcase(str(value), wanted)
    return is_equal == (comparison == "=")


def grouped(runs: list[Run], names: list[str]) -> list[dict]:
    """A row for the runs that agree in these options: mean and standard deviation of their n best values."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        key = tuple(run.options.get(name) for name in names)
        groups.setdefault(key, []).append(run)
    rows = []
    for key, members in groups.items():
        values = [run.get("best") for run in members if run.get("best") is not None]
        states = Counter(run.get("state") for run in members)
        row = dict(zip(names, key, strict=True))
        row["mean"] = mean(values) if values else None
        row["std"] = stdev(values) if len(values) > 1 else None
        row["n"] = len(values)
        row["state"] = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        rows.append(row)
    return rows


def in_order(rows: list[dict], key: str, is_max: bool) -> list[dict]:
    """Best value first, anything else ascending: numbers, then texts, then rows without a value."""
    if rows and key not in rows[0]:
        raise Mistake(f"--sort {key}: choose from {', '.join(rows[0])}")
    sign = -1 if is_max and key in ("best", "mean") else 1

    def place(row: dict) -> tuple:
        value = number(row[key])
        if value is None:
            return 2, 0, ""
        if isinstance(value, (int, float)):
            return 0, sign * value, ""
        return 1, 0, value

    return sorted(rows, key=place)


def selected(row: dict, names: list[str]) -> dict:
    for name in names:
        if name not in row:
            raise Mistake(f"--columns {name}: choose from {', '.join(row)}")
    return {name: row[name] for name in names}


def cell(name: str, value) -> str:
    """A value as text: a time in hours, minutes and seconds, other results with five digits, options as they are."""
    if value is None or (name == "time" and not math.isfinite(value)):
        return "-"
    if name == "time":
        return f"{int(value // 3600)}:{int(value // 60 % 60):02}:{int(value % 60):02}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def short(name: str, value) -> str:
    """As `cell`, but fractions among the options with four digits: a search draws them with seventeen."""
    is_fraction = isinstance(value, str) and isinstance(number(value), float) and not value.isdecimal()
    return f"{number(value):.4g}" if is_fraction else cell(name, value)


def show(rows: list[dict], style: str, width: float, wanted: list[str]) -> None:
    """Prints the rows: as csv with all digits and times in seconds, as markdown, or as a table of a width."""
    names = list(rows[0])
    if style == "csv":
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif style == "markdown":
        lines = [names, *([short(name, row[name]) for name in names] for row in rows)]
        lines = [[text.replace("|", "\\|") for text in line] for line in lines]
        lines.insert(1, ["---"] * len(names))
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    else:
        columns = {name: [short(name, row[name]) for row in rows] for name in names}
        print_table(columns, width, {*ALWAYS_SHOWN, *wanted})


def print_table(columns: dict[str, list[str]], width: float = math.inf, kept: Collection[str] = ()) -> None:
    """Prints the columns under their names. Where they are too wide, names are broken at their underscores, texts cut,
    and columns left out that need not be kept, until they fit."""

    def widths() -> dict[str, int]:
        return {name: max(map(len, [*titles[name], *cells])) for name, cells in columns.items()}

    def is_too_wide() -> bool:
        return sum(widths().values()) + 2 * len(columns) - 2 > width

    titles = {name: [name] for name in columns}
    if is_too_wide():
        titles = {name: name.split("_") for name in columns}
        columns = {name: cut(cells) for name, cells in columns.items()}
    left_out = []
    for name in dict.fromkeys([*LEFT_OUT_FIRST, *reversed(columns)]):
        if name in columns and name not in kept and is_too_wide():
            del columns[name]
            left_out.append(name)

    height = max(len(titles[name]) for name in columns)
    lines = []
    for name, cells in columns.items():
        lines.append([*[""] * (height - len(titles[name])), *titles[name], *cells])
    sizes = widths().values()
    for line in zip(*lines, strict=True):
        print("  ".join(text.ljust(size) for text, size in zip(line, sizes, strict=True)).rstrip())
    if left_out:
        print(textwrap.fill(f"not shown: {', '.join(left_out)}; --wide shows all, --columns some", max(width, 20)))


def cut(texts: list[str]) -> list[str]:
    """The texts, the long ones cut to LONGEST characters, or, so that they still differ, up to twice as many."""

    def cut_to(length: int) -> list[str]:
        return [text if len(text) <= length else f"{text[: length - 1]}…" for text in texts]

    for length in range(LONGEST, 2 * LONGEST):
        if len(set(cut_to(length))) == len(set(texts)):
            return cut_to(length)
    return cut_to(LONGEST)


def plot(runs: list[Run], names: list[str], path: str) -> None:
    """Draws the losses and the monitored values of the runs over their steps. In the legend are the best runs, best
    first, by the options in which they differ; the others are gray."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Mistake("--plot: needs matplotlib; pip install matplotlib") from None
    runs = sorted(runs, key=lambda run: (run.get("best") is None, run.sign * -(run.get("best") or 0)))
    monitors = {run.options.get("monitor", "") for run in runs} - {*LOSSES}
    panels = [LOSSES, *((name,) for name in sorted(monitors))]
    panels = [panel for panel in panels if any(run.curve(name) for run in runs for name in panel)] or [LOSSES]

    # In the legend, a line has about 75 characters for each panel of 5.5 inches, 8 of them for the sample of a curve.
    labels = []
    for run in runs[:LEGEND]:
        options = [f"{name} {short(name, run.options.get(name))}" for name in names]
        labels.append(textwrap.fill(", ".join(options) or run.path.name, 60 * len(panels)))
    lines = [line for label in labels for line in label.splitlines()]
    columns = min(len(runs), 75 * len(panels) // (max(map(len, lines)) + 8) or 1)
    size = 5.5 * len(panels), 4 + 0.18 * len(lines) / columns
    figure = Figure(figsize=size, layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw(axes, panel, runs, labels)
    title = f"the {LEGEND} best of {len(runs)} runs" if len(runs) > LEGEND else None
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize="small", title=title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Mistake(f"--plot {path}: {' '.join(str(error).split())}") from None
    print(f"picture {path}", file=sys.stderr)  # stdout may be a table for another program


def draw(axes, panel: tuple[str, ...], runs: list[Run], labels: list[str]) -> None:
    """Draws the values of a panel: those of the runs that have a label in colors, and above the others."""
    from matplotlib import colormaps

    for place, run in enumerate(runs):
        color = "lightgray"
        if len(runs) <= 10:
            color = f"C{place}"
        elif place < len(labels):
            color = colormaps["turbo"](place / len(labels))
        for name in panel:
            points = run.curve(name)
            (line,) = axes.plot([step for step, _ in points], [value for _, value in points], color=color)
            line.set_zorder(3 - place / len(runs))
            if len(points) == 1:
                line.set_marker("o")  # one point makes no line
            if panel == LOSSES and name == "train/loss":
                line.set_linestyle(":")
            elif place < len(labels):
                line.set_label(labels[place])
    if panel == LOSSES:
        is_positive = all(value > 0 for line in axes.lines for value in line.get_ydata())
        axes.set(title="train/loss (dotted) and val/loss", yscale="log" if is_positive else "linear")
    else:
        axes.set(title=panel[0])
    axes.set(xlabel="step")
    axes.grid(alpha=0.3)


def provenance(run: Run) -> tuple[dict[str, str], list[str]]:
    """The packages and the code (commit, changes) of the newest start of a run, as rundir.py writes them."""
    newest = max(run.path.glob("provenance/*.txt"), default=run.path / "provenance")
    lines = read(newest, lambda file: file.read().splitlines(), [])
    head = next((i for i, line in enumerate(lines) if re.fullmatch("[0-9a-f]{40}", line)), len(lines))
    packages = (line.rpartition("-") for line in lines[3:head])
    return {name: version for name, _, version in packages} | {"Python": " ".join(lines[2:3])}, lines[head:]


def diff(runs: list[Run], names: list[str]) -> None:
    """Prints in what two runs differ: options, packages, results, code."""
    pair = []
    for name in names:
        found = [run for run in runs if run.path.name == Path(name).name]
        found = found or [run for run in runs if name in run.path.name]
        if len(found) != 1:
            raise Mistake(f"--diff {name}: {len(found) or 'no'} runs have that in their name")
        pair += found
    first, second = pair
    packages, code = provenance(first)
    other_packages, other_code = provenance(second)
    compared = {
        "option": (first.options, second.options),
        "package": (packages, other_packages),
        "result": (first.results | first.last, second.results | second.last),
    }
    for title, (ours, theirs) in compared.items():
        changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name) and name not in HIDDEN]
        columns = {title: changed or ["all the same"]}
        if changed:
            columns["A"] = [cell(name, ours.get(name)) for name in changed]
            columns["B"] = [cell(name, theirs.get(name)) for name in changed]
        print_table(columns)
        print()
    changes = difflib.unified_diff(code, other_code, "A", "B", lineterm="")
    print("\n".join(changes) or "code\nall the same")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Mistake(message)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("dir", type=Path, metavar="DIR", help="a directory that has runs in it")
    parser.add_argument("--group", action="store_true", help="mean, standard deviation and number over seeds and folds")
    parser.add_argument("--average", nargs="+", default=["seed", "fold"], metavar="NAME", help="options that --group "
                        "averages over (seed fold)")  # fmt: skip
    parser.add_argument("--sort", metavar="COLUMN", help="best value first, other columns ascending")
    parser.add_argument("--filter", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="also !=, "
                        ">=, <=, > and <; * is any text")  # fmt: skip
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help="show these columns alone")
    parser.add_argument("--wide", action="store_true", help="show all columns, whole, however wide the table gets")
    parser.add_argument("--format", choices=("table", "csv", "markdown"), default="table")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the monitored values")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two runs, named by a part of their name")
    args = parser.parse_args()
    if not args.dir.is_dir():
        raise Mistake(f"{args.dir}: no such directory")
    if not (runs := chosen(find_runs(args.dir), args.filter)):
        raise Mistake(f"{args.dir}: no run in it")
    if args.diff:
        return diff(runs, args.diff)
    names = differing(runs)
    if args.group:
        rows = grouped(runs, [name for name in names if name not in (*args.average, "comment")])
    else:
        shown = ["run", *names, *RESULTS]
        if any(run.get("parent") for run in runs):
            shown.insert(1, "parent")
        if len({run.get("parameters") for run in runs} - {None}) > 1:
            shown.insert(-len(RESULTS), "parameters")
        others = [name for name in args.columns if name not in shown]  # that are the same in all runs
        shown += [name for name in others if any(run.get(name) is not None for run in runs)]
        rows = [{name: run.get(name) for name in shown} for run in runs]
    if args.sort:
        rows = in_order(rows, args.sort, runs[0].mode == "max")
    if args.columns:
        rows = [selected(row, args.columns) for row in rows]
    if args.plot:
        plot(runs, names, args.plot)
    if args.format == "table":
        print("best:", ", ".join(sorted({f"{run.mode} {run.get('monitor')}" for run in runs if run.options})))
    width = math.inf if args.wide else shutil.get_terminal_size().columns  # 80 where there is no terminal
    show(rows, args.format, width, args.columns)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Mistake as error:
        print(f"runs.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
