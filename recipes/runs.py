"""A table of the training runs in a directory: the options in which they differ, best value, steps, time, state.

python recipes/runs.py DIR                                    # also while they run
python recipes/runs.py DIR --group --sort mean                # mean and standard deviation over the seeds
python recipes/runs.py DIR --filter width=64 state=finished --format csv
python recipes/runs.py DIR --plot curves.png                  # needs matplotlib
python recipes/runs.py DIR --diff A B                         # options, packages and code of two runs

A run is `running` while its process holds the lock, `finished` once it has model.pt, `failed` where an error ended it,
else `interrupted`, also by a kill. `time` is that of all its starts up to the last validation, checkpoint or end, as in
summary.json. `parameters` is shown where it differs. Files that cannot be read are named on stderr.
"""

import argparse
import csv
import difflib
import fcntl
import json
import math
import os
import re
import struct
import sys
from collections import Counter
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


class Mistake(ValueError):
    """In the options: printed as one line, exit code 2."""


@dataclass
class Run:
    path: Path
    options: dict[str, str]
    rows: list[dict[str, str]]  # of metrics.csv
    results: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)  # logged values, as of summary.json
    mode: str = "max"

    def get(self, name: str):
        return {"run": self.path.name, **self.options, **self.results}.get(name)

    @property
    def sign(self) -> int:
        return -1 if self.mode == "min" else 1

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The steps and values of a column, where it has a number."""
        points = [(int(row["step"]), number(row.get(name))) for row in self.rows]
        return [(step, value) for step, value in points if isinstance(value, float) and math.isfinite(value)]


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
    text = file.read()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # the last row may be cut
    return [row for row in rows if None not in row.values() and row.get("step", "").isdecimal()]


def mode_of(options: dict) -> str:
    """Whether the "max" or the "min" of the monitored value is best."""
    if options.get("monitor_mode") in ("max", "min"):
        return options["monitor_mode"]
    return config.mode_of(options.get("monitor", "")) or "max"


def read_run(path: Path) -> Run:
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # all values as text
    found = read(path / "config.yaml", lambda file: yaml.load(file, loader), {})
    found = flatten_join(found)  # options of a nested dataclass get a dot
    options = {name: ",".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in found.items()}
    summary = read(path / "summary.json", read_summary, {})
    run = Run(path, options, read(path / "logs" / "csv" / "metrics.csv", read_rows, []))
    run.mode = mode_of(options)
    # A checkpoint may be older than the last row. Values of train/ are also logged between two validations.
    monitor = options.get("monitor", "")
    points = run.curve(monitor) if monitor.startswith("val/") else []
    saved = summary.get("best_step"), summary.get("best")
    best_step, best = max(points, key=lambda point: run.sign * point[1], default=saved)
    # A process that was killed could not change "running" in summary.json: the lock tells.
    state = "failed" if summary.get("state") == "failed" else "interrupted"
    state = "finished" if (path / "model.pt").exists() else state
    run.last = summary.get("last", {})
    run.results = {
        "best": best,
        "best_step": best_step,
        "step": max([summary.get("step") or 0, *(int(row["step"]) for row in run.rows)]),
        "time": summary.get("seconds"),
        "state": "running" if is_locked(path / ".lock") else state,
        "parameters": summary.get("parameters"),
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
    for text in filters:
        key, equals, wanted = text.partition("=")
        names = {"run", *RESULTS, "parameters", *(name for run in runs for name in run.options)}
        if not equals or key not in names:
            raise Mistake(f"--filter {text}: expected KEY=VALUE, KEY an option, run, {', '.join(RESULTS)}")
        found = [(run, run.get(key)) for run in runs]
        runs = [run for run, value in found if number(value) == number(wanted) or fnmatchcase(str(value), wanted)]
        if not runs:
            raise Mistake(f"--filter {text}: no run is left")
    return runs


def grouped(runs: list[Run], names: list[str]) -> list[dict]:
    """A row for the runs that agree in these options: mean and standard deviation of their n best values."""
    groups, rows = {}, []
    for run in runs:
        groups.setdefault(tuple(run.options.get(name) for name in names), []).append(run)
    for key, members in groups.items():
        row, values = dict(zip(names, key, strict=True)), [run.get("best") for run in members]
        values = [value for value in values if value is not None]
        row |= {"mean": mean(values) if values else None, "std": stdev(values) if len(values) > 1 else None}
        states = Counter(run.get("state") for run in members)
        rows.append(row | {"n": len(values), "state": ", ".join(f"{n} {state}" for state, n in sorted(states.items()))})
    return rows


def in_order(rows: list[dict], key: str, is_max: bool) -> list[dict]:
    """Best value first, anything else ascending, rows without it last."""
    if rows and key not in rows[0]:
        raise Mistake(f"--sort {key}: choose from {', '.join(rows[0])}")

    def place(row: dict) -> tuple:
        value, sign = number(row[key]), -1 if is_max and key in ("best", "mean") else 1
        is_number = isinstance(value, (int, float))
        return value is None, not is_number, sign * value if is_number else 0, str(value)

    return sorted(rows, key=place)


def cell(name: str, value) -> str:
    if value is None or (name == "time" and not math.isfinite(value)):
        return "-"
    if name == "time":
        return f"{int(value // 3600)}:{int(value // 60 % 60):02}:{int(value % 60):02}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def show(rows: list[dict], style: str) -> None:
    names = list(rows[0])
    if style == "csv":  # all digits, times in seconds
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        return writer.writerows(rows)
    lines = [names, *([cell(name, row[name]) for name in names] for row in rows)]
    if style == "markdown":
        lines = [[text.replace("|", "\\|") for text in line] for line in lines]
        lines.insert(1, ["---"] * len(names))
        return print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def plot(runs: list[Run], names: list[str], path: str) -> None:
    """The losses and the monitored values of the runs over their steps; in the legend the best runs, best first."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise Mistake("--plot: needs matplotlib; pip install matplotlib") from None
    runs = sorted(runs, key=lambda run: (run.get("best") is None, run.sign * -(run.get("best") or 0)))
    panels = [LOSSES, *((name,) for name in sorted({run.options.get("monitor", "") for run in runs} - {*LOSSES}))]
    panels = [panel for panel in panels if any(run.curve(name) for run in runs for name in panel)] or [LOSSES]
    labels = [", ".join(f"{name} {run.options.get(name, '-')}" for name in names) or run.path.name for run in runs]
    columns = min(len(runs), 75 * len(panels) // (max(map(len, labels[:LEGEND])) + 8) or 1)
    size = 5.5 * len(panels), 4 + 0.18 * min(len(runs), LEGEND) / columns
    figure = Figure(figsize=size, layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            color = f"C{number}" if len(runs) <= 10 else colormaps["turbo"](number / (len(runs) - 1))
            for name in panel:
                is_second = name == "train/loss" and panel == LOSSES
                style = {"linestyle": ":"} if is_second else {"label": label}
                points = run.curve(name)
                axes.plot([step for step, _ in points], [value for _, value in points], color=color, **style)
        title = "train/loss (dotted) and val/loss" if panel == LOSSES else panel[0]
        is_log = panel == LOSSES and all(value > 0 for line in axes.lines for value in line.get_ydata())
        axes.set(title=title, xlabel="step", yscale="log" if is_log else "linear")
        axes.grid(alpha=0.3)
    best = [found[:LEGEND] for found in axes.get_legend_handles_labels()]
    title = f"the {LEGEND} best of {len(runs)} runs" if len(runs) > LEGEND else None
    figure.legend(*best, loc="outside lower center", ncols=columns, fontsize="small", title=title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Mistake(f"--plot {path}: {' '.join(str(error).split())}") from None


def provenance(run: Run) -> tuple[dict[str, str], list[str]]:
    """The packages and the code (commit, changes) of the newest start of a run, as rundir.py writes them."""
    newest = max(run.path.glob("provenance/*.txt"), default=run.path / "provenance")
    lines = read(newest, lambda file: file.read().splitlines(), [])
    head = next((i for i, line in enumerate(lines) if re.fullmatch("[0-9a-f]{40}", line)), len(lines))
    packages = (line.rpartition("-") for line in lines[3:head])
    return {name: version for name, _, version in packages} | {"Python": " ".join(lines[2:3])}, lines[head:]


def diff(runs: list[Run], names: list[str]) -> None:
    pair = []
    for name in names:
        found = [run for run in runs if run.path.name == Path(name).name] or [r for r in runs if name in r.path.name]
        if len(found) != 1:
            raise Mistake(f"--diff {name}: {len(found) or 'no'} runs have that in their name")
        pair += found
    (packages, code), (other_packages, other_code) = map(provenance, pair)
    compared = {"package": (packages, other_packages), "result": [run.results | run.last for run in pair]}
    for title, (ours, theirs) in ({"option": [run.options for run in pair]} | compared).items():
        changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name) and name not in HIDDEN]
        rows = [{title: name, "A": cell(name, ours.get(name)), "B": cell(name, theirs.get(name))} for name in changed]
        show(rows or [{title: "all the same"}], "table")
        print()
    print("\n".join(difflib.unified_diff(code, other_code, "A", "B", lineterm="")) or "code\nall the same")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Mistake(message)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("dir", type=Path, metavar="DIR", help="a directory that has runs in it")
    parser.add_argument("--group", action="store_true", help="mean, standard deviation and number over the seeds")
    parser.add_argument("--sort", metavar="COLUMN", help="best value first, other columns ascending")
    parser.add_argument("--filter", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="* is any text")
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
        rows = grouped(runs, [name for name in names if name not in ("seed", "comment")])
    else:
        shown = [*names, *["parameters"] * (len({run.get("parameters") for run in runs} - {None}) > 1), *RESULTS]
        rows = [{"run": run.path.name} | {name: run.get(name) for name in shown} for run in runs]
    if args.sort:
        rows = in_order(rows, args.sort, runs[0].mode == "max")
    if args.plot:
        plot(runs, names, args.plot)
    if args.format == "table":
        print("best:", ", ".join(sorted({f"{run.mode} {run.get('monitor')}" for run in runs if run.options})))
    show(rows, args.format)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Mistake as error:
        print(f"runs.py: error: {error}", file=sys.stderr)
        sys.exit(2)
