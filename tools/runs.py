"""A table of the training runs in a directory: the options in which they differ, best value, steps, time, state.

python tools/runs.py DIR                                # also while they run
python tools/runs.py DIR --group --sort mean            # mean and standard deviation over seeds and folds
python tools/runs.py DIR --filter 'width>=32' state=finished --format csv
python tools/runs.py DIR --columns width seed best      # these columns alone
python tools/runs.py DIR --plot                         # curves in the terminal; needs plotext
python tools/runs.py DIR --plot curves.png              # needs matplotlib
python tools/runs.py DIR --diff A B                     # options, results, packages and code of two runs
python tools/runs.py DIR --compare width=32 width=64    # is one group better? Paired by what else was searched

A, B and a filter may be the name of a run, with the time or without it, its path, or a part of its name. A filter takes
a value as the table shows it. The table fits the terminal, or 80 columns: titles are broken, long texts cut, and
columns left out, which the last lines name: first options that do not change what is learned, as the number of data
workers. The name that you gave a run is never cut. `--wide` shows all of it, `--format csv` all digits.

A run is `running` while its process holds the lock; else `finished` or `failed` as summary.json says, or `interrupted`,
also by a kill. The results are those of summary.json, which a run renews with each checkpoint; `time` is that of all
its starts. Of a fork, `parent` is the run and the step it began with, and `best` that of its own validations.

`test/accuracy` is what test.py has found on the test set with the best checkpoint. With others the name says which:
`val_step-00000190/accuracy`. It is left out where the run went on and another checkpoint became the best. `--group` has
`test/accuracy_mean` and `test/accuracy_std`, and `test/accuracy_n` if not all of the n runs were evaluated. A filter of
these, or of `mean`, `std` and `n`, chooses groups: `--group --filter 'n>=3'`.

The value that is monitored is `best`, or `mean`, also by its own name. The other last values that a run has logged, as
`val/loss` and `train/loss`, are columns when `--columns`, `--sort` or `--filter` names them.

`code` is shown where it differs, and there is room, else a line tells it: the names of the versions of the code, kept
in provenance/ of each run. Versions that differ in tests, recipes, tools and benchmarks alone have one name. `--group`
puts runs of other code into other rows, and counts a seed once: of its runs the newest that has finished, or the
newest.

`--compare` takes finished runs, and pairs those that agree in seed and fold, and in the options of the training that
differ within a group, but for that of the filter. The 95 % interval is that of Student's t. If 0 is in it, the last
line tells with how many more pairs it would not be, in four of five cases, if the difference and its spread are as they
seem now.
"""

import argparse
import csv
import difflib
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from statistics import mean, stdev

from run_table import (
    ALWAYS_SHOWN,
    AVERAGED,
    MINOR,
    NO_COLUMNS,
    OF_GROUPS,
    RESULTS,
    ConfigError,
    cell,
    chosen,
    column_of,
    differing,
    find_runs,
    grouped,
    is_monitored,
    no_column,
    number,
    parts_of,
    place,
    print_table,
    read,
    read_mode,
    tests_of,
)

MARKS = "0123456789"  # of the runs that --plot draws

# ---- two groups


def finished(runs: list[dict], text: str) -> list[dict]:
    """The finished runs of a group of --compare."""
    group = []
    for run in chosen(runs, text):
        if run["state"] != "finished" or run["best"] is None:
            print(f"left out: {run['run']}, {run['state']}")
        else:
            group.append(run)
    return group


def paired_by(groups: list[list[dict]], texts: list[str]) -> list[str]:
    """In what the runs of a pair agree: seed and fold, and the options that differ within a group, but for those of the
    filters, and those that do not change what is learned."""
    others = {*MINOR, "code", "parent", "parameters", *(parts_of(text)[0] for text in texts)}
    averaged = [name for name in AVERAGED if any(name in run for group in groups for run in group)]
    searched = [name for group in groups for name in differing(group)]
    return [name for name in dict.fromkeys([*averaged, *searched]) if name not in others]


def by_key(group: list[dict], names: list[str], text: str) -> dict[tuple, dict]:
    """The runs of a group by their values of these options."""
    found: dict[tuple, dict] = {}
    for run in group:
        key = tuple(run.get(name) for name in names)
        if key in found:
            others = differing([found[key], run])
            wanted = f"{others[0]}={found[key][others[0]]}" if others else f"run!={run['run']}"
            alike = ", ".join(names) or "options"
            raise ConfigError(f"--compare {text}: {found[key]['run']} and {run['run']} have the same {alike}; "
                              f"keep one of them, as by --filter {shlex.quote(wanted)}")  # fmt: skip
        found[key] = run
    return found


def compare(runs: list[dict], texts: list[str]) -> None:
    """Prints the best values of two groups of runs in pairs, the mean difference with its 95 % interval, and whether
    that is distinguishable from none. If not, it estimates the pairs with which it would be in four of five cases."""
    from scipy.stats import t  # half a second

    groups = [finished(runs, text) for text in texts]
    names = paired_by(groups, texts)
    first, second = (by_key(group, names, text) for group, text in zip(groups, texts, strict=True))
    keys = [key for key in first if key in second]
    if len(keys) < 2:
        alike = ", ".join(names) or "options"
        raise ConfigError(f"--compare: needs two pairs or more of finished runs, alike in {alike}; found {len(keys)}")
    kinds = {(run["monitor"], read_mode(run)) for key in keys for run in (first[key], second[key])}
    if len(kinds) > 1:
        raise ConfigError("--compare: the runs do not monitor the same value")
    monitor, mode = kinds.pop()
    ours = [first[key]["best"] for key in keys]
    theirs = [second[key]["best"] for key in keys]
    differences = [b - a for a, b in zip(ours, theirs, strict=True)]
    columns = {name: [first[key].get(name) for key in keys] for name in names}
    columns |= {"A": ours, "B": theirs, "B - A": differences}
    print(f"best: {mode} {monitor}")
    print_table({name: [cell(name, value) for value in values] for name, values in columns.items()})

    def half_width(count: int, chance: float = 0.5) -> float:
        """Of the interval of so many pairs, and how much a difference must exceed it to be found with this chance."""
        return (t.ppf(0.975, count - 1) + t.ppf(chance, count - 1)) * spread / math.sqrt(count)

    count = len(keys)
    average = mean(differences)
    spread = stdev(differences)
    low = average - half_width(count)
    high = average + half_width(count)
    print(f"B - A: {average:.3g} on average, 95 % interval {low:.3g} to {high:.3g}, {count} pairs")
    if spread <= 1e-6 * max(map(abs, ours)):  # float32 has seven digits
        print("not distinguishable: the differences are all the same, which tells nothing of their spread")
    elif low > 0 or high < 0:
        print(f"distinguishable: {'B' if (average > 0) == (mode == 'max') else 'A'} is better")
    else:
        more = 1
        while more < 1000 and abs(average) < half_width(count + more, chance=0.8):
            more += 1
        pairs = {1: "about 1 more pair", 1000: "1000 more pairs or more"}.get(more, f"about {more} more pairs")
        condition = "in four of five cases, if difference and spread stay as they are"
        print(f"not distinguishable; with {pairs} it would be, {condition}")


# ---- two runs


def provenance(run: dict) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The packages, and the lines of the source files, of the newest start of a run, as rundir.py keeps them."""
    folder = run["path"] / "provenance"
    lines = read(max(folder.glob("*.txt"), default=folder / "none"), lambda file: file.read().splitlines(), [])
    packages = {"Python": " ".join(lines[2:3]).removeprefix("Python ")}
    packages |= dict(line.rsplit("-", 1) for line in lines[3:] if re.fullmatch(r"\S+-\S+", line))
    code = {}
    kept = [line for line in lines if line.startswith("source files in ")]  # starts of one second are in one file
    for line in kept[-1:]:
        version = folder / line.removeprefix("source files in ")
        for file in version.rglob("*.py"):
            code[str(file.relative_to(version))] = file.read_text(errors="replace").splitlines()
    return packages, code


def diff(runs: list[dict], names: list[str]) -> None:
    """Prints in what two runs differ: options and results, packages, code."""
    pair = []
    for name in names:
        found = chosen(runs, name)
        if len(found) > 1:
            first = ", ".join(run["run"] for run in found[:4]) + ", …" * (len(found) > 4)
            raise ConfigError(f"--diff {name}: {len(found)} runs fit: {first}")
        pair += found
    (packages, code), (other_packages, other_code) = map(provenance, pair)
    results = ["best", *tests_of(pair), *RESULTS[1:]]
    values, other_values = (
        {name: value for name, value in run.items() if value is not None and name not in NO_COLUMNS} for run in pair
    )
    for title, ours, theirs in (("value", values, other_values), ("package", packages, other_packages)):
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        names.sort(key=lambda name: results.index(name) if name in results else -1)
        columns = {title: names or ["all the same"]}
        if names:
            columns["A"] = [str(ours.get(name, "-")) for name in names]
            columns["B"] = [str(theirs.get(name, "-")) for name in names]
        print_table(columns)
        print()
    print("code")
    if code == other_code:
        print("all the same" if code else "not kept")
    for name in sorted({*code, *other_code}):
        lines, other_lines = code.get(name, []), other_code.get(name, [])
        for line in difflib.unified_diff(lines, other_lines, f"A/{name}", f"B/{name}", lineterm=""):
            print(line)


# ---- curves


def curve(run: dict, name: str) -> tuple[list[int], list[float]]:
    """The steps and values of a column of metrics.csv, where it has a number. A last row may be just being written."""
    text = read(run["path"] / "logs" / "csv" / "metrics.csv", lambda file: file.read(), "")
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    points = [(number(row.get("step")), number(row.get(name))) for row in rows]
    points = [point for point in points if all(isinstance(value, float) and math.isfinite(value) for value in point)]
    return [int(step) for step, _ in points], [value for _, value in points]


def plot(runs: list[dict], names: list[str], picture: str) -> None:
    """Draws the losses and the monitored values of the best runs over their steps, in the terminal or as a picture. The
    legend has the options in which they differ, the best first."""
    best = sorted(runs, key=lambda run: place(run["best"], read_mode(run)))[: len(MARKS)]
    columns = dict.fromkeys(["train/loss", "val/loss", *(run.get("monitor", "") for run in best)])
    panels = {column: [curve(run, column) for run in best] for column in columns}
    panels = {column: curves for column, curves in panels.items() if any(steps for steps, _ in curves)}
    if not panels:
        raise ConfigError("--plot: these runs have no logs/csv/metrics.csv with values")
    labels = [", ".join(f"{name} {cell(name, run.get(name))}" for name in names) or run["run"] for run in best]
    try:
        if picture:
            draw_picture(panels, labels, picture)
        else:
            draw_text(panels, labels)
    except ImportError as error:
        raise ConfigError(f"--plot: needs {error.name}; pip install {error.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {picture}: {' '.join(str(error).split())}") from None
    if len(runs) > len(best):
        print(f"the {len(best)} best of {len(runs)} runs")


def draw_picture(panels: dict, labels: list[str], path: str) -> None:
    from matplotlib.figure import Figure

    labels = [textwrap.fill(label, 60 * len(panels)) for label in labels]
    height = 4 + 0.2 * sum(label.count("\n") + 1 for label in labels)  # inches
    figure = Figure(figsize=(5 * len(panels), height), layout="constrained")
    for (column, curves), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for rank, ((steps, values), label) in enumerate(zip(curves, labels, strict=True)):
            marker = "o" if len(steps) == 1 else ""  # one point makes no line
            axes.plot(steps, values, marker=marker, label=label, zorder=3 - rank / len(labels))
        axes.set(title=column, xlabel="step")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    figure.savefig(path)
    print(f"picture {path}")


def draw_text(panels: dict, labels: list[str]) -> None:
    import plotext

    width = shutil.get_terminal_size().columns
    figure = plotext.figure
    for column, curves in panels.items():
        figure.clear()
        for mark, (steps, values) in reversed([*zip(MARKS, curves, strict=False)]):  # the best on top
            if steps:
                figure.draw(figure.signal(steps, values, marker=mark).lines())
        figure.title(column).label("step").plot_size(width, 16)
        print(plotext.uncolorize(str(figure.build())))
    for mark, label in zip(MARKS, labels, strict=False):
        print(textwrap.fill(f"{mark}  {label}", width, subsequent_indent="   "))


# ---- the command


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(message)


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("dir", type=Path, metavar="DIR", help="a directory that has runs in it")
    parser.add_argument("--group", action="store_true", help="mean, standard deviation and number over seeds and folds")
    parser.add_argument("--sort", metavar="COLUMN", help="best value first, other columns ascending")
    parser.add_argument("--filter", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="also !=, "
                        ">=, <=, > and <; * is any text")  # fmt: skip
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help="show these columns alone")
    parser.add_argument("--wide", action="store_true", help="show all columns, whole, however wide the table gets")
    parser.add_argument("--format", choices=("table", "csv"), default="table")
    parser.add_argument("--plot", nargs="?", const="", metavar="FILE", help="draw losses and monitored values")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two runs")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two groups of runs, pair by pair")
    return parser.parse_args()


def show(runs: list[dict], names: list[str], args: argparse.Namespace) -> None:
    """Prints the table: the runs, or groups of them, with the columns in which they differ and their results."""
    if args.group:
        for name in [*args.columns, args.sort or "", *args.filter]:
            column_of(runs, re.sub("_(mean|std|n)([<>!=].*)?$", "", name))
    best = "mean" if args.group else "best"
    args.columns = [column_of(runs, name, best) for name in args.columns]
    args.sort = args.sort and column_of(runs, args.sort, best)
    rows = runs
    shown = ["run", *names, "best", *tests_of(runs), *RESULTS[1:]]
    if args.group:
        rows = grouped(runs, [name for name in names if name not in (*AVERAGED, "comment", "parent", "parameters")])
        for text in args.filter:
            if re.match(OF_GROUPS, text):
                rows = chosen(rows, text)
        usual = [name for name in rows[0] if name.endswith("_n") and all(row[name] == row["n"] for row in rows)]
        usual += ["repeated"] if not any(row["repeated"] for row in rows) else []
        shown = [name for name in rows[0] if name not in usual]
    for name in [*args.columns, args.sort or shown[0]]:
        if not any(name in row for row in rows):
            raise no_column(name, name, rows)
    if args.sort:
        mode = read_mode(runs[0]) if is_monitored(args.sort, runs) else ""
        rows = sorted(rows, key=lambda row: place(row.get(args.sort), mode))
    columns = {name: [row.get(name) for row in rows] for name in args.columns or shown}
    if args.format == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([[*columns], *zip(*columns.values(), strict=True)])
    else:
        print("best:", ", ".join(sorted({f"{read_mode(run)} {run['monitor']}" for run in runs if "monitor" in run})))
        cells = {name: [cell(name, value) for value in values] for name, values in columns.items()}
        width = math.inf if args.wide else shutil.get_terminal_size().columns  # 80 where there is no terminal
        printed = print_table(cells, width, kept={*ALWAYS_SHOWN, *args.columns})
        versions = {row.get("code") for row in rows}
        if len(versions) > 1 and "code" not in printed:
            print(f"code: {len(versions)} versions; values of other code cannot be compared")
        if "repeated" in columns:
            print("repeated: runs left out, as another one has the same seed and fold")


def main() -> None:
    args = parse()
    if not args.dir.is_dir():
        raise ConfigError(f"{args.dir}: no such directory")
    runs = find_runs(args.dir)
    if not runs:
        raise ConfigError(f"{args.dir}: no run in it")
    for text in args.filter:
        if not (args.group and re.match(OF_GROUPS, text)):
            runs = chosen(runs, text)
    if args.diff:
        diff(runs, args.diff)
    elif args.compare:
        compare(runs, args.compare)
    elif args.plot is not None:
        plot(runs, differing(runs), args.plot)
    else:
        show(runs, differing(runs), args)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()  # at the exit, nothing would catch the error
        sys.exit()
    except ConfigError as error:
        print(f"runs.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
