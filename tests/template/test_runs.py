"""tools/runs.py, on run directories that are written here, and on a real one."""

import csv
import fcntl
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import yaml
from edits import copy_programs, insert_after
from helpers import SMALL, call, run, start
from mistakes import refuses
from scipy.stats import ttest_1samp, ttest_rel

OPTIONS = {"out_dir": "x", "seed": 0, "width": 32, "logger_name": ["csv"], "effective_batch_size": 100,
           "monitor": "val/accuracy", "monitor_mode": "max"}  # fmt: skip
LOSS = {"monitor": "val/loss", "monitor_mode": "min"}


def make(folder: Path, number: int, values=(0.5,), name="x", summary=None, tests=None, code=None, **options) -> Path:
    """Writes a run that has validated and logged every tenth step, which took half a second.

    Args:
        folder: Where it lies.
        number: The seconds of its time.
        values: The values of the validations.
        name: The one that the user gave.
        summary: What is otherwise in summary.json.
        tests: The results of test.py by split and checkpoint; with `step`, of another than the best.
        code: The versions of its code, with the files of each.
        options: What is otherwise in config.yaml.
    """
    (path := folder / f"20260101-{number:06}-{name}").mkdir(parents=True)
    options = OPTIONS | options
    (path / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    best = min(values) if options["monitor_mode"] == "min" else max(values)
    about = {"step": 10 * len(values), "best": best, "best_step": 10 * values.index(best) + 10, "parameters": 1000}
    about |= {"state": "finished", "seconds": len(values) / 2, "last": {"lr": 0.1, options["monitor"]: values[-1]}}
    about |= summary or {}
    (path / "summary.json").write_text(json.dumps(about))
    (path / "logs" / "csv").mkdir(parents=True)
    with open(path / "logs" / "csv" / "metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "lr", "samples_per_second", "train/loss", "val/loss", options["monitor"]])
        writer.writerows([10 * i, 0.1, 1000.0, 2 / i, 1 / i, value] for i, value in enumerate(values, 1))
    for split, results in (tests or {}).items():
        results = {"step": about["best_step"]} | results
        found = {"step": results.pop("step"), "results": results}
        (path / f"test_{split}.json").write_text(json.dumps(found))
    for version, files in (code or {}).items():
        for file, text in files.items():
            file = path / "provenance" / f"code-{version}" / file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (path / ".lock").touch()
    return path


def runs(folder: Path, options: str = "", columns: int = 80) -> subprocess.CompletedProcess:
    """What runs.py prints on a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return call(f"tools/runs.py . {options}", folder)


def lines_of(folder: Path, options: str = "", columns: int = 80) -> list[str]:
    """The lines of the table, with one space between two words."""
    return [" ".join(line.split()) for line in runs(folder, options, columns).stdout.splitlines()]


def csv_of(folder: Path, options: str = "") -> list[str]:
    """The lines of `--format csv`, with the last digit of its time for a run that is called x."""
    return re.sub(r"20260101-\d{5}(\d)-x\b", r"\1", runs(folder, f"{options} --format csv").stdout).splitlines()


def column(folder: Path, name: str, options: str = "") -> list[str]:
    return [row[name] for row in csv.DictReader(csv_of(folder, options))]


# ---- what is there to be read


def pairs(ours: list[float], theirs: list[float], **options) -> list[dict]:
    """Runs with these best values, of the seeds 0, 1, ... each."""
    both = [(32, seed, value) for seed, value in enumerate(ours)] + [(64, *each) for each in enumerate(theirs)]
    return [{"values": [value], "seed": seed, "width": width, **options} for width, seed, value in both]


LONG = "x-with-a-name-that-fills-more-than-the-terminal-of-80-columns"
NAMES = ("base", "base-2", "lr=0.1", "width=4-seed=1", "width=4-seed=10", "of[1]")
OPTION_NAMES = "-".join(f"option{number}=0.{number}" for number in range(7))
ALL = {"loss": 1.0, "accuracy": 0.8, "per_class": [0.5, 0.9], "confusion": None}
OURS, THEIRS = [0.90, 0.80, 0.95, 0.85], [0.92, 0.81, 0.98, 0.87]  # differ by 0.02, 0.01, 0.03, 0.02
FOLDS = [{"seed": n % 3, "fold": n // 3, "values": [(0.5, 0.6, 0.7, 0.8, 0.9, 0.4)[n]]} for n in range(6)]
WIDE = [run | {"values": [run["values"][0] + 0.1 + n / 1000]} for n, run in enumerate(FOLDS)]
STEPS = {"epochs": "max_steps", "log_per_epoch": "log_interval", "val_frequency": "val_interval",
         "checkpoint_frequency": "checkpoint_interval"}  # fmt: skip
MINOR = {name: name for name in ("comment", "project", "accelerator", "data_dir", "logger_name")}
MINOR |= dict.fromkeys(["devices", "num_threads", "num_workers", "num_checkpoint_keep", "log_interval"], "")
# What `make` is given of the runs of a directory, the oldest first. n is their number, from 0 on.
WORLDS = {
    # Three seeds of two widths, evaluated; the accuracy has as many digits as float32.
    "widths": [{"values": [0.5, 0.9 + n / 100, 0.7], "seed": n % 3, "width": (32, 64)[n // 3],
                "tests": {"test_best": ALL | {"loss": 1 - n / 10, "accuracy": 0.8 + n / 81}}} for n in range(6)],
    "another_metric": [{"name": LONG, "width": 0}, {"name": LONG, "width": 1, "values": [0.25], **LOSS}],
    "another_size": [{"width": 0}, {"width": 1, "summary": {"parameters": 2000}}],
    # What counts steps takes the place of what counts epochs.
    "steps": [dict.fromkeys(STEPS, epochs) | dict.fromkeys(STEPS.values(), steps)
              for epochs, steps in [(20.0, 0), (25.0, 0), (20.0, 3), (25.0, 3)]],
    "last": [{"values": [0.9, 0.5 + n / 10], "seed": n, "monitor": "val/mase", "monitor_mode": "min", "summary":
              {"last": {"lr": 0.1, "val/mase": 0.5 + n / 10, "val/loss": 3 - n, "train/loss": None}}}
             for n in range(4)],
    "folds": [{"seed": n % 2, "fold": n // 2 % 2, "width": n // 4} for n in range(8)],
    "repeated": [{"values": [best], "seed": seed, "summary": {"state": state}} for seed, best, state in
                 [(42, 0.1, "finished"), (42, 0.2, "finished"), (42, 0.3, "failed"), (1, 0.4, "finished"),
                  (2, 0.5, "failed"), (2, 0.6, "failed")]],
    # The code of a run are all versions with which it has trained. A run that has kept none may be of any.
    "code": [{"seed": n, "code": {version: {"train.py": version} for version in versions.split()}} for n, versions in
             enumerate(["12e45678 bbbbbbbb.tmp", "12e45678", "aaaaaaaa", "aaaaaaaa 12e45678", ""])],
    "untrained_code": [{"seed": n, "code": {version * 8: {"train.py": "same", name: version}}} for n, (version, name) in
                       enumerate([("c", "x.py"), ("b", "tests/x.py"), ("a", "recipes/methods/x.py"),
                                  ("d", "benchmarks/x.py"), ("e", "x.py")])],
    "code_and_parent": [
        {"name": "same" if n < 2 else f"lr={1 / (n + 3):.6}", "values": [0.87654321 + n / 100],
         "base_lr": f"{1 / (n + 3):.17g}", "weight_decay": f"{1 / (n + 70):.17g}", "seed": n, "code":
         {f"{n:08}": {"train.py": f"{n}", "../parent.json":
                      json.dumps({"path": "a/20260101-000000-same/checkpoints/best.ckpt", "step": n})}}}
        for n in range(16)],
    "minor": [{"name": f"x{n}", "seed": n, "precision": f"bf{n}-mixed", "summary": {"parameters": n}}
              | {name: f"{value}{n}" for name, value in MINOR.items()}
              | {"base_lr": f"{n / 7}", "weight_decay": f"{n / 9}", "mine": n} for n in range(4)],
    "names": [{"width": n, "name": name} for n, name in enumerate(NAMES)],
    "options": [{"width": n, "name": name} for n, name in enumerate(("width=1", "width=40", "other"))],
    "long_names": [{"width": n, "name": name} for n, name in
                   enumerate((OPTION_NAMES, OPTION_NAMES.replace("=", "=1")))],
    "cut": [{"values": [0.876543210 + n / 100 - n % 2 / 50], "seed": n % 2, "lr": (2.3012345, 0.8131313)[n // 2],
             "data_dir": f"/a/long/path/that/leads/to/the/data/set/number{n // 2}", "summary": {"seconds": 61.5}}
            for n in range(4)],
    "nested": [{"name": "x-with-a-name-that-fills-much-of-a-terminal",
                "optim": {"base_lr": n / 10, "momentum": n / 20}} for n in range(2)],
    # The last one went on, and another checkpoint is the best. The first but one was not evaluated.
    "tested": [{"seed": 0, "tests": {"test_best": ALL, "val_best": {"accuracy": 0.1},
                                     "test_step-00000030": {"step": 30, "accuracy": 0.2}}},
               {"seed": 1}, {"seed": 2, "tests": {"test_best": ALL | {"step": 20}}}],
    "many_metrics": [{"seed": n, "tests": {"test_best": {f"metric_{i}": n / 7 for i in range(11 if n else 10)}}}
                     for n in range(6)],
    "very_many_metrics": [{"seed": n, "tests": {"test_best": {f"metric_with_a_long_name_{i}": n for i in range(30)}}}
                          for n in range(6)],
    "better": pairs(OURS, THEIRS),
    "worse": pairs(OURS, THEIRS, **LOSS),
    "two_metrics": pairs(OURS, OURS)[:4] + pairs(OURS, OURS, **LOSS)[4:],
    "nothing": [],
    "alike": pairs([0.9, 0.8], [0.8, 0.9]),
    "nearly": pairs([0.5, 0.5], [0.51, 0.5125]),
    "shifted": pairs(OURS, [0.91, 0.81, 0.96, 0.86]),  # as an accuracy on few samples
    "equal": pairs(OURS, OURS),
    "in_pairs": [each | {"name": "base"} for each in FOLDS] + [each | {"name": "wide"} for each in WIDE[::-1]],
    "without_partners": [each | {"name": "base"} for each in FOLDS[:1] + FOLDS[2:]]
    + [each | {"name": "wide", "summary": {"state": "failed" if each is WIDE[0] else "finished"}} for each in WIDE],
    "searched": [{"name": f"{('base', 'wide')[n // 4]}-{n}", "seed": n % 2, "width": (32, 64)[n // 4],
                  "base_lr": (0.1, 0.2)[n // 2 % 2], "num_workers": n,
                  "values": [0.5 + (0.1, 0.2)[n // 2 % 2] + n % 2 / 10 + n // 4 * (0.01 + n / 10000)]}
                 for n in range(8)],
    "twice": [{"values": [n / 10], "seed": n % 2, "width": (32, 64, 32)[n // 2]} for n in range(6)],
    # Two hundred runs of a search, which differ in ten options; four begin in the same second.
    "many": [{f"option_number_{i}": f"{1 / (n + i + 2):.17g}" for i in range(9)} | {"number": n // 4, "width": n,
              "values": [0.5, 1 - 1 / (n + 2)], "name": f"x-width={n:03}-and-many-other-options-that-make-it-long"}
             for n in range(200)],
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Callable[[str], Path]:
    """Makes the runs of a name in WORLDS, once, and returns their directory. To be read, not changed."""

    def build(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        for number, each in enumerate(WORLDS[name]):
            make(folder, **{"number": number, **each})
        return folder

    return cache(build)


# ---- rows and columns

# The runs, options, and what is printed in csv. A run that is called x has the last digit of its time alone.
ROWS = [
    ("widths", "--filter run=*4-x", ["run,best,test/accuracy,test/loss,best_step,step,time,state",
                                     f"4,0.9400000000000001,{0.8 + 4 / 81},0.6,20,30,1.5,finished"]),
    ("widths", "--columns best width --filter seed=0", ["best,width", "0.9,32", "0.93,64"]),
    ("widths", "--columns seed effective_batch_size parameters --sort best --filter seed=2",
     ["seed,effective_batch_size,parameters", "2,100,1000", "2,100,1000"]),
    ("another_size", "--columns parameters", ["parameters", "1000", "2000"]),
    ("another_size", "--columns width --filter parameters=2000", ["width", "1"]),
    ("another_metric", "--columns best --filter monitor=val/loss", ["best", "0.25"]),
    *(("steps", f"--columns {epochs} {steps}", [f"{epochs},{steps}", "20.0,", "25.0,", ",3", ",3"])
      for epochs, steps in STEPS.items()),
    ("steps", "--filter epochs!=25", ["run,max_steps,log_interval,val_interval,checkpoint_interval,best,best_step,step,"
                                      "time,state", *[f"{run},{steps},0.5,10,10,0.5,finished" for run, steps in
                                                      zip("023", (",,,", "3,3,3,3", "3,3,3,3"), strict=True)]]),
    # The last values, when they are asked for; the monitored one is `best`.
    ("last", "--filter seed=0", ["run,best,best_step,step,time,state", "0,0.5,20,20,1.0,finished"]),
    ("last", "--columns run val/mase --sort val/mase", ["run,best", "0,0.5", "1,0.6", "2,0.7", "3,0.8"]),
    ("last", "--columns seed --filter val/mase>=0.7", ["seed", "2", "3"]),
    ("last", "--columns val/loss --sort val/loss", ["val/loss", *"0123"]),
    ("last", "--columns seed val/loss --filter val/loss=2", ["seed,val/loss", "1,2"]),
    ("last", "--group --columns val/loss_mean n --sort val/loss_mean --filter val/loss_mean=1.5",
     ["val/loss_mean,n", "1.5,4"]),
    ("last", "--group --columns val/mase n --sort val/mase", ["mean,n", "0.65,4"]),
    # Groups, which are filtered by their own columns, after the runs were, by theirs.
    ("widths", "--group --columns width mean std n state", ["width,mean,std,n,state",
     *[f"{width},{mean(values)},{stdev(values)},3,3 finished" for width, values in
       ((32, [0.9 + n / 100 for n in (0, 1, 2)]), (64, [0.9 + n / 100 for n in (3, 4, 5)]))]]),
    ("widths", "--group --columns width --filter n>=3 run!=*0-x", ["width", "64"]),
    ("widths", "--group --columns width --filter n=2 mean<0.93 run!=*0-x", ["width", "32"]),
    ("widths", "--group --columns width --filter seed<2 n=1 run!=*0-x", ["width", "32"]),
    ("widths", "--group --columns width --filter test/accuracy_mean>=0.84 state=finished", ["width", "64"]),
    ("widths", "--group --columns n --filter logger_name!=a/b_n=3", ["n", "3", "3"]),
    ("folds", "--group --columns width n", ["width,n", "0,4", "1,4"]),
    # A seed counts once: with its newest run that has finished, or its newest. A column tells how many were left out.
    ("repeated", "--group", ["mean,std,n,repeated,state",
     f'{mean([0.2, 0.4, 0.6])},{stdev([0.2, 0.4, 0.6])},3,3,"1 failed, 2 finished"']),
    ("repeated", "--group --filter seed=1", ["mean,std,n,state", "0.4,,1,1 finished"]),
    ("code", "--columns seed code", ["seed,code", "0,code-12e45678", "1,code-12e45678", "2,code-aaaaaaaa",
                                     '3,"code-12e45678,code-aaaaaaaa"', "4,"]),
    ("code", "--group --columns code n", ["code,n", "code-12e45678,2", "code-aaaaaaaa,1",
                                          '"code-12e45678,code-aaaaaaaa",1', ",1"]),
    ("code", "--filter code=code-12e45678 seed=1", ["run,best,best_step,step,time,state", "1,0.5,10,10,0.5,finished"]),
    # Versions that differ in tests, recipes and benchmarks alone have the first of the names.
    ("untrained_code", "--columns code", ["code", "code-cccccccc", *["code-bbbbbbbb"] * 3, "code-eeeeeeee"]),
    ("untrained_code", "--group --columns n", ["n", "1", "3", "1"]),
    ("untrained_code", "--columns run --filter code=code-bbbbbbbb", ["run", *"123"]),
    # `width=4` is never a part of a name, as of `width=40`. What the table shows of a value is accepted.
    ("options", "--columns run --filter width=1", ["run", "20260101-000001-width=40"]),
    ("cut", "--columns run --filter lr!=2.301", ["run", "2", "3"]),
    ("cut", "--columns run --filter lr=2.301 best=0.87654", ["run", "0"]),
    ("cut", "--columns run --filter best<0.87654 time=0:01:01", ["run", "1"]),
    ("cut", "--columns run --filter data_dir=/a/long…/number1", ["run", "2", "3"]),
    ("cut", "--group --columns n --filter mean=0.87154", ["n", "2"]),
    ("cut", "--group --columns n --filter state=2?finished lr=2.301", ["n", "2"]),
    ("cut", "--group --columns n --filter std=0.0070711 lr=2.301", ["n", "2"]),
    ("nested", "--columns optim.momentum best --sort optim.momentum --filter optim.base_lr>0",
     ["optim.momentum,best", "0.05,0.5"]),
    # What test.py has found: the metric that is monitored first, without what has several values.
    ("tested", "--columns seed test/accuracy val/accuracy test_step-00000030/accuracy",
     ["seed,test/accuracy,val/accuracy,test_step-00000030/accuracy", "0,0.8,0.1,0.2", "1,,,", "2,,,"]),
    ("tested", "--group --columns n test/accuracy_n test/loss_mean", ["n,test/accuracy_n,test/loss_mean", "3,1,1.0"]),
    ("widths", "--group --sort test/accuracy_mean --columns width test/accuracy_mean test/accuracy_std",
     ["width,test/accuracy_mean,test/accuracy_std",
      *[f"{width},{mean(values)},{stdev(values)}" for width, values in
        ((64, [0.8 + n / 81 for n in (3, 4, 5)]), (32, [0.8 + n / 81 for n in (0, 1, 2)]))]]),
]  # fmt: skip
ORDERS = {
    "--sort best": "543210", "--sort seed": "031425", "--sort test/accuracy": "543210", "--sort test/loss": "543210",
    "--filter width=64.0 --filter seed=1": "4", "--filter run=*0004-* state=finished": "4",
    "--filter width>=64 seed<1": "3", "--filter width<=32 seed>0": "12", "--filter seed!=1 best>0.93": "5",
    "--filter run!=*-00000[1-5]-*": "0", "--filter time>=1.5 state=f*": "012345",
    "--filter test/accuracy>0.81 width=32": "12",
}  # fmt: skip


@pytest.mark.parametrize("where, options, lines", ROWS)
def test_the_rows_in_csv(where: str, options: str, lines: list[str], world):
    assert csv_of(world(where), options) == lines


@pytest.mark.parametrize("options", ORDERS)
def test_runs_are_sorted_and_filtered(options: str, world):
    assert csv_of(world("widths"), f"{options} --columns run") == ["run", *ORDERS[options]]


# The runs, the options, lines or parts of lines that are there, and what is not.
BEST = "best: max val/accuracy"
TEXTS = [
    ("widths", "--wide", [BEST, "run seed width best test/accuracy test/loss best_step step time state",
                          "20260101-000004-x 1 64 0.94 0.84938 0.6 20 30 0:00:01 finished"], "parameters monitor"),
    ("widths", "--diff 000000 000005", ["value A B", "width 32 64", "test/loss 1.0 0.5"], "logger_name"),
    ("widths", "--group", ["width mean std n test/ test/ test/ test/ state", "accuracy_ accuracy_ loss_ loss_",
                           "mean std mean std", "32 0.91 0.01 3 0.81235"], "_n not"),
    ("another_metric", "", ["run monitor best state"], ""),
    ("another_metric", "--group", ["width monitor monitor_mode mean std n state"], ""),
    ("another_metric", "--filter width=0", ["0.5 finished"], "monitor"),
    ("another_size", "--diff 000000 000001", ["parameters 1000 2000"], ""),
    ("steps", "--diff 000000 000001", ["epochs 20.0 25.0"], "max_steps interval"),
    ("steps", "--diff 000002 000003", ["all the same"], "epochs"),
    ("last", "--diff 000000 000001", ["best 0.5 0.6"], "val/loss"),
    *(("steps", "--diff 000000 000002", [f"{epochs} 20.0 -", f"{steps} - 3"], "")
      for epochs, steps in STEPS.items()),
    # On a narrow terminal. Options stay longer than parent and code, and those that change what is learned longest.
    ("repeated 20", "--group", ["mean std n repeated state", "repeated:"], ""),
    ("code 40", "", ["code: 4 versions;"], "code-"),
    ("widths 20", "--columns run best_step", ["run best_"], "shown"),
    ("code_and_parent 70", "", ["run seed base_ weight_ best state", "20260101-000000-same 0 0.3333 0.01429 0.87654",
                               "20260101-000001-same", "lr=0.2 2", "code: 16 versions;"], "000002"),
    ("code_and_parent", "--wide", ["20260101-000000-same step 15", "code-00000015"], "versions;"),
    ("code_and_parent", "--filter seed=1", [], "versions;"),
    ("code_and_parent", "--group --columns mean", ["code: 16 versions;"], ""),
    ("minor 64", "", ["run seed precision base_ weight_ mine best state"], ""),
    ("minor", "--wide", ["run seed logger_name precision comment project accelerator data_dir devices num_threads "
                         "num_workers num_checkpoint_keep log_interval base_lr weight_decay mine parameters"], ""),
    ("cut 90", "--filter seed=0", ["2.301 /a/long…/number0", "0.8131 /a/long…/number1"], ""),
    ("nested 110", "", ["run optim. optim. best step time state", "base_ momentum"], ""),
    ("tested", "--wide", ["best test/accuracy test_step-00000030/accuracy val/accuracy test/loss best_step"], "class"),
    # Of two groups: the pairs, the interval of SciPy's paired t-test, and whether it is without 0.
    ("better", "--compare width=32 width=64", [BEST, "seed A B B - A", "0 0.9 0.92 0.02", "3 0.85 0.87 0.02",
     "B - A: 0.02 on average, 95 % interval {:.3g} to {:.3g}, 4 pairs".format(
         *ttest_rel(THEIRS, OURS).confidence_interval(0.95)), "distinguishable: B is better"], "not"),
    ("worse", "--compare width=32 width=64", ["best: min val/loss", "distinguishable: A is better"], "not"),
    ("alike", "--compare width=32 width=64", ["not distinguishable; with 1000 more pairs or more"], ""),
    ("nearly", "--compare width=32 width=64", ["not distinguishable; with about 1 more pair it"], ""),
    ("shifted", "--compare width=32 width=64", ["not distinguishable: the differences are all the same,"], ""),
    ("equal", "--compare width=32 width=64", ["not distinguishable: the differences are all the same,"], ""),
    ("cut", "--compare lr=2.301 lr=0.8131", ["2 pairs"], ""),
    # Pairs agree in seed and fold, and in what else was searched, but not in what changes nothing that is learned.
    ("in_pairs", "--compare base wide", ["seed fold A B B - A", "0 0 0.5 0.6 0.1", "1 1 0.9 1.004 0.104", "6 pairs"],
     "out"),
    ("without_partners", "--compare run=*-base run=*-wide", ["left out: 20260101-000005-wide, failed", "4 pairs"], ""),
    *(("searched", f"--compare {groups}", ["seed base_lr A B B - A", "0 0.1 0.6", "1 0.1 0.7", "0 0.2 0.7", "1 0.2 0.8",
       "B - A: 0.0106", "4 pairs", "distinguishable: B is better"], "num_workers")
      for groups in ("width=32 width=64", "width<64 width>=64", "base wide")),
    ("twice", "--compare width=32 width=64 --filter run!=20260101-000004-x --filter run!=20260101-000005-x",
     ["2 pairs"], ""),
]  # fmt: skip


@pytest.mark.parametrize("where, options, lines, absent", TEXTS)
def test_the_lines_of_a_table(where: str, options: str, lines: list[str], absent: str, world):
    """A number behind the name of the runs is that of the columns of the terminal."""
    name, _, columns = where.partition(" ")
    found = lines_of(world(name), options, int(columns or 80))
    assert [line for line in lines if not any(f" {line} " in f" {each} " for each in found)] == [], found
    assert [word for word in absent.split() if word in "\n".join(found)] == [], found


MISTAKES = [
    ("widths", "--sort colour", "colour column"),
    ("widths", "--sort widht", "widht width?"),
    ("widths", "--filter colour=red", "colour=red column"),
    ("widths", "--filter widht=3", "widht=3 width?"),
    ("widths", "--filter width", "width"),
    ("widths", "--filter width=7", "width=7"),
    ("widths", "--filter width>many", "width>many"),
    ("widths", "--filter run>=5", "run>=5"),
    ("widths", "--filter mean>0", "mean>0 column"),
    ("widths", "--group --filter mean>2", "mean>2"),
    ("widths", "--group --filter test/colour_mean>0", "test/colour_mean>0 test/"),
    ("widths", "--columns seed colour", "colour column"),
    ("widths", "--columns effective", "effective effective_batch_size?"),
    ("widths", "--format pdf", "--format pdf table csv"),
    ("widths", "--compare width=32", "--compare"),
    ("widths", "--compare width=32 val=7", "val=7 column"),
    ("widths", "--compare 2026 width=64", "20260101-000000-x 20260101-000003-x seed --filter width=32"),
    ("widths", "--filter seed=1 --compare width=32 width=64", "two pairs seed found 1"),
    ("another_metric", "--filter width<9 --compare width=0 width=1", "--compare two pairs found 1"),
    ("two_metrics", "--compare width=32 width=64", "--compare monitor"),
    ("twice", "--compare width=32 width=64", "20260101-000004-x seed --filter 'run!=20260101-000004-x'"),
    ("twice", "--compare width=32 width=64 --filter run!=20260101-000004-x", "--filter 'run!=20260101-000005-x'"),
    ("widths", "--colour", "--colour"),
    ("widths", "--diff 000000", "--diff"),
    ("widths", "--diff 000000 nine", "nine"),
    ("widths", "--diff 2026 000000", "--diff 2026: 20260101-000000-x, 20260101-000003-x, …"),
    ("widths", "--diff 000000 seed=2", "--diff seed=2: 20260101-000002-x, 20260101-000005-x"),
    ("last", "--columns al/loss", "al/loss val/loss?"),
    ("last", "--group --sort val/loss", "val/loss_mean"),
    ("options", "--filter width=4", "width=4"),
    ("options", "--filter colour=1", "colour=1"),
    ("nothing", "", "run"),
    ("nothing", "../nowhere", "../nowhere"),
]


@pytest.mark.parametrize("where, options, words", MISTAKES)
def test_a_mistake_is_one_line(where: str, options: str, words: str, world):
    folder = "" if options.startswith("..") else "."
    assert not refuses(f"tools/runs.py {folder} {options}", world(where), *words.split())


# ---- what changes, is damaged or is real


def test_the_state_of_a_run(tmp_path: Path):
    """A resume that is under way counts as running, also where the run was finished or had failed before. A run whose
    summary says `running`, but that holds no lock, was killed. A young run has no summary yet."""
    states = ["running", "running", "finished", "finished", "failed", "failed"]
    paths = [make(tmp_path, number, summary={"state": state}) for number, state in enumerate(states)]
    (paths[0] / "model.pt").touch()  # of a finish before: the run was made longer, and killed
    with ExitStack() as held:
        for path in paths[1::2]:
            fcntl.flock(held.enter_context(open(path / ".lock", "w")), fcntl.LOCK_EX)
        states = ["interrupted", "running", "finished", "running", "failed", "running"]
        assert column(tmp_path, "state") == states
    assert column(tmp_path, "state") == ["interrupted"] * 2 + ["finished"] * 2 + ["failed"] * 2
    assert column(tmp_path, "run", "--filter state=failed") == [*"45"]
    assert column(tmp_path, "state", "--group --filter state!=failed") == ["1 finished"]
    (paths[0] / "summary.json").unlink()
    assert "20260101-000000-x - - - - - interrupted" in lines_of(tmp_path)
    assert runs(tmp_path).stderr == ""


DAMAGE = {
    "config.yaml": ["", "a: [", "- list", "a: [[b], {c: d}]",
                    "width: 64\nmonitor: val/accuracy\neffective_batch_size: many"],
    "summary.json": ["", '{"step": 3', "[1]", "\0\0\0", '{"step": "x"}'],
    "test_test_best.json": ["", "[1]", "{}", '{"step": 20, "results": 3}'],
}  # fmt: skip


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_file_does_not_hide_the_other_runs(name: str, text: str, world, tmp_path: Path):
    shutil.copytree(world("widths"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "20260101-000002-x" / name).write_text(text)
    done = runs(tmp_path, "--format csv")
    assert len(done.stdout.splitlines()) == 7
    assert re.search("20260101-000004-x,1,64,.*0.94", done.stdout)
    is_yaml = text.endswith(("{c: d}]", "many"))
    assert done.stderr.count("\n") == done.stderr.startswith(f"20260101-000002-x/{name} ") == (not is_yaml)
    runs(tmp_path, "--group --sort mean")
    if name.startswith("test"):
        assert [bool(value) for value in column(tmp_path, "test/accuracy")] == [True, True, False] + [True] * 3


def test_the_code_of_real_runs_and_what_differs_in_it(program: Path, cwd: Path):
    """Of a run that is resumed with other code, the newest counts: at last that of before."""
    call(f"{copy_programs(program)}/train.py {SMALL} --epochs 1 --out_dir a", cwd)
    insert_after(program, "batch", "import mine")
    (program / "mine.py").write_text("x = 1\n")
    call(f"{program}/train.py {SMALL} --epochs 1 --out_dir b --seed 3", cwd)
    text = runs(cwd, "--diff a b").stdout
    assert re.search(r"^seed +42 +3$", text, re.MULTILINE) and "package\nall the same\n" in text
    lines = text.partition("\ncode\n")[2].splitlines()
    assert lines[:4] == ["--- A/mine.py", "+++ B/mine.py", "@@ -0,0 +1 @@", "+x = 1"]
    assert lines[4:6] == ["--- A/train.py", "+++ B/train.py"]
    assert [line for line in lines[6:] if line[0] in "+-"] == ["+    import mine"]
    for number in (2, 1):
        (program / "mine.py").write_text(f"x = {number}\n")
        call(f"{program}/train.py --resume b --epochs {4 - number}", cwd)
        if number == 2:
            *earlier, newest = sorted(cwd.glob("*-b/provenance/*.txt"))  # those of one second are in one file
            newest.write_text("".join(path.read_text() for path in (*earlier, newest)))
        assert f"+x = {number}" in runs(cwd, "--diff a b").stdout.splitlines()
    assert runs(cwd, "--diff b b").stdout.endswith("\ncode\nall the same\n")
    names = {path.name for path in cwd.glob("*-b/provenance/code-*")}
    assert len(names) == 2 and column(cwd, "code")[1] == ",".join(sorted(names))


def test_a_real_run_and_its_tests(finished: Path, tmp_path: Path):
    path = Path(shutil.copytree(finished, tmp_path / finished.name))
    call(f"test.py --accelerator cpu --out_dir {path}/", tmp_path)
    call(f"test.py --accelerator cpu --out_dir {path} --split val --checkpoint last", tmp_path)
    (row,) = csv.DictReader(csv_of(tmp_path))
    summary = json.loads((path / "summary.json").read_text())
    found = float(row["best"]), int(row["best_step"]), int(row["step"]), row["state"]
    assert found == (summary["best"], summary["best_step"], summary["step"], "finished")
    assert float(row["time"]) == summary["seconds"] > 0
    found = json.loads((path / "test_test_best.json").read_text())["results"]
    assert float(row["test/accuracy"]) == found["accuracy"] and float(row["test/loss"]) == found["loss"]
    assert f"val_step-{int(row['step']):08}/loss" in row


def test_torch_is_not_imported_and_a_reader_may_go_away(world):
    """As `| head -1`; or it has gone before a short table is written at the end."""
    assert not re.search(r"\| +torch$", run("tools/runs.py .", world("many"), PYTHONPROFILEIMPORTTIME="1").stderr, re.M)
    for where, lines in (("many", 1), ("nested", 0)):
        process = start("tools/runs.py . --wide", world(where))
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


# ---- a table that fits the terminal


@pytest.mark.parametrize("columns, option", [(80, ""), (60, ""), (120, ""), (80, "--group"), (80, "--sort best")])
def test_a_table_of_many_runs_fits(columns: int, option: str, world):
    """Each row is there, and can still be told from the others; what is left out is named."""
    lines = runs(world("many"), option, columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [line.split() for line in lines if "finished" in line]
    assert len(rows) == 200 == len({tuple(row) for row in rows})
    if option != "--group":
        names = [line.split()[0] for line in lines if line.startswith(("x-", "and-", "make-", "long"))]
        assert "".join(names).count("-and-many-other-options-that-make-it-long") == 200
    last = " ".join(lines).partition(" not shown ")[2]
    assert "option_number_8" in last and "--wide" in last and "--columns" in last


def test_a_wide_table_has_all_columns_whole_and_under_their_titles(world):
    lines = runs(world("many"), "--wide").stdout.splitlines()
    assert len(lines) == 202
    names = [f"option_number_{i}" for i in range(9)]
    assert lines[1].split() == ["run", "width", *names, "best", "best_step", "step", "time", "state"]
    row = ["20260101-000049-x-width=199-and-many-other-options-that-make-it-long", "199", "0.004975"]
    assert lines[-1].split()[:3] == row and lines[-1].index("0.004975") == lines[1].index("option_number_0")


def test_the_name_that_the_user_gave_is_broken_and_not_cut(tmp_path: Path):
    """The time is left out where the names differ without it. Where they do not, it tells the runs from each other."""
    name = "a-name-of-more-than-sixty-characters-that-no-terminal-of-so-few-has-room-for"
    paths = [make(tmp_path, number, name=name) for number in range(2)]
    text = runs(tmp_path, columns=60).stdout
    assert max(map(len, text.splitlines())) <= 60
    rows = text.partition("not shown")[0].splitlines()[2:]
    assert "".join(line.split()[0] for line in rows) == "".join(path.name for path in paths)
    paths[1].rename(f"{paths[1]}s")
    text = runs(tmp_path, columns=95).stdout
    assert f"\n{name}   " in text and f"\n{name}s  " in text and "20260101" not in text


def test_what_is_not_shown_takes_a_few_lines(world):
    """Mean, deviation and number of a metric are one name. A list that is too long is cut at its end."""
    *_, first, last = runs(world("many_metrics"), "--group").stdout.splitlines()
    assert "  " not in first and f"{first} {last}".endswith("test/metric_9_*, test/metric_10_*")
    lines = runs(world("very_many_metrics"), "--group").stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("not shown"))
    assert len(lines) - start <= 4 and lines[-1].endswith(" …")


def test_a_name_is_accepted_as_it_is_shown(world):
    """With the time and without it, also where it is the beginning of another one, and where it looks like a filter."""
    folder = world("names")
    for number, name in enumerate(NAMES):
        full = f"20260101-{number:06}-{name}"
        for text in (name, full, f"{folder / full}/"):
            for filter in (text, f"run={text}"):
                assert csv_of(folder, f"--columns run --filter {filter}") == ["run", full]
            assert full not in csv_of(folder, f"--columns run --filter run!={text}")
            assert lines_of(folder, f"--diff {text} {full}")[:2] == ["value", "all the same"]


def test_each_line_of_a_name_that_is_broken_is_accepted(world):
    folder = world("long_names")
    *lines, end = [line.split()[0] for line in lines_of(folder)[2:] if line.startswith("option")]
    assert "".join([*lines, end]).startswith(OPTION_NAMES) and lines[0] != OPTION_NAMES
    for filter in (lines[0], f"run={lines[1]}"):
        assert column(folder, "run", f"--filter {filter}") == [f"20260101-000000-{OPTION_NAMES}"]


# ---- two runs, or two groups


def test_diff(tmp_path: Path):
    """Options, results and packages; the packages are those that rundir.py names. The best value and the metrics come
    before the parts of the loss, which are logged of the training, too, and the time of the run comes last. Fractions
    have all their digits, as in csv."""
    for number, version in enumerate(("1.0", "1.1")):
        last = {f"train/{name}": 1.0 for name in ("loss", "loss_of_edges", "grad_norm")}
        tests = {"test_best": {"loss": number, "loss_of_edges": number, "f1": number, "accuracy": number}}
        options = {"summary": {"last": last, "seconds": 10.0 + number}, "tests": tests}
        path = make(tmp_path, number, [0.5 + number / 10], base_lr=0.012345678 + number / 10**6, **options)
        (folder := path / "provenance").mkdir()
        head = "python train.py\n1 x cpu on host\nPython 3.11.9 on Linux\nsource files in code-01234567\n"
        git = f"# branch.oid {'a' * 40}\n1 .M N... train.py\n? mine-{version}\n"
        (folder / "20260101-000000.txt").write_text(f"{head}same-1.0\nsome_pack-{version}\n{git}")
    metrics = [f"test/{name}" for name in ("accuracy", "f1", "loss", "loss_of_edges")]
    assert lines_of(tmp_path, "--diff 000000 20260101-000001-x") == [
        "value A B", "base_lr 0.012345678 0.012346678", "best 0.5 0.6", *(f"{name} 0 1" for name in metrics),
        "time 10.0 11.0", "", "package A B", "some_pack 1.0 1.1", "", "code", "not kept",
    ]  # fmt: skip
    text = runs(tmp_path, "--diff 000000 base_lr=0.012345678").stdout
    assert text == "value\nall the same\n\npackage\nall the same\n\ncode\nnot kept\n"
    assert csv_of(tmp_path)[0] == f"run,base_lr,best,{','.join(metrics)},best_step,step,time,state"
    assert column(tmp_path, "base_lr") == ["0.012345678", "0.012346678"]
    assert [line.split()[1] for line in lines_of(tmp_path, "--wide")[2:]] == ["0.01235", "0.01235"]


def test_compare_says_how_many_more_pairs_would_settle_it(tmp_path: Path):
    """In a simulation with so many pairs, four of five cases are distinguishable."""
    theirs = [0.93, 0.79, 0.97, 0.84]
    for number, each in enumerate(pairs(OURS, theirs)):
        make(tmp_path, number, **each)
    last = lines_of(tmp_path, "--compare width=32 width=64")[-1]
    more = int(re.match(r"not distinguishable; with about (\d+) more pairs ", last)[1])
    differences = np.subtract(theirs, OURS)
    noise = np.random.default_rng(0).normal(size=(20000, 4 + more))
    found = differences.mean() + differences.std(ddof=1) * noise
    assert np.mean(ttest_1samp(found, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.02)


# ---- curves


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The figure of `--plot`, and what is printed about it."""
    figures, Figure = [], pytest.importorskip("matplotlib.figure").Figure
    draw = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: [figures.append(figure), draw(figure, path)])
    return runs(folder, "--plot curves.png").stdout, figures[0]


@pytest.mark.parametrize("number", [1, 2, 12])
def test_plot_as_a_picture(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both losses and the monitored value of the ten best runs, the best on top; below them a legend. A single point
    has a marker."""
    for i in range(number):
        make(tmp_path, i, [0.5, 0.9 + i / 1000, 0.7] if i or number == 12 else [0.9], seed=i % 3, width=i // 3)
    printed, figure = drawn(tmp_path, monkeypatch)
    assert printed == "picture curves.png\n" + ("the 10 best of 12 runs\n" if number == 12 else "")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == ["train/loss", "val/loss", "val/accuracy"]
    lines = figure.axes[2].lines
    assert len(lines) == min(number, 10)
    best = [[10, 0.5], [20, 0.9 + (number - 1) / 1000], [30, 0.7]] if number > 1 else [[10, 0.9]]
    assert lines[0].get_xydata().tolist() == best
    for axes in figure.axes:
        assert all((line.get_marker() == "o") == (len(line.get_xdata()) == 1) for line in axes.lines)
    heights = [line.get_zorder() for line in lines]
    assert heights == sorted({*heights}, reverse=True)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    expected = [f"seed {i % 3}, width {i // 3}" for i in reversed(range(number))][:10]
    assert texts == {1: ["20260101-000000-x"], 2: ["seed 1", "seed 0"]}.get(number, expected)


def test_plot_with_many_options_in_the_legend_cuts_none(world, monkeypatch: pytest.MonkeyPatch):
    _, figure = drawn(world("many"), monkeypatch)
    (legend,) = figure.legends
    first = legend.get_texts()[0].get_text()
    assert " ".join(first.split()).startswith("width 199, option_number_0 0.004975, ")
    assert first.count("option_number_") == 9
    for box in [legend.get_window_extent(), *(text.get_window_extent() for text in legend.get_texts())]:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0 < box.y1
    assert legend.get_window_extent().y1 < min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200  # of 400 without a legend


def test_plot_in_the_terminal(tmp_path: Path):
    """A panel of 16 lines for each value. The marks of a run are its place: a better one stands above it. The last row
    may be just being written; a damaged one is not drawn."""
    pytest.importorskip("plotext")
    for number in range(12):
        path = make(tmp_path / "12", number, [0.1 + number / 20] * 5, seed=number)
    lines = runs(tmp_path, "--plot", columns=70).stdout.splitlines()
    assert max(map(len, lines)) <= 70 and "\x1b" not in "".join(lines)
    assert [lines[place].strip() for place in (0, 17, 34)] == ["train/loss", "val/loss", "val/accuracy"]
    assert lines[51:] == [*(f"{place}  seed {11 - place}" for place in range(10)), "the 10 best of 12 runs"]
    found = [re.split("[│┤]", line)[1] for line in lines[36:47]]
    assert "".join(mark for line in found for mark in sorted({*line} - {" "})) == "0123456789"
    path = make(tmp_path / "1", 0, [0.5, 0.6])
    with open(path / "logs" / "csv" / "metrics.csv", "a") as file:
        file.write("x,,\n30,0.1,1000.0,1,1,9")  # of 0.9
    lines = runs(path.parent, "--plot").stdout.splitlines()
    assert [line.split()[-1] for line in (lines[14], lines[48])] == ["20.0", "20.0"]
    assert lines[36].startswith("0.600") and lines[46].startswith("0.500")


@pytest.mark.parametrize("option, package", [("--plot", "plotext"), ("--plot curves.png", "matplotlib")])
def test_plot_that_cannot_be_says_so(option: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the package, without values, or as an unknown kind of picture."""
    path = make(tmp_path, 0)
    command = f"tools/runs.py . {option}"
    if package == "matplotlib" and find_spec(package):
        refuses("tools/runs.py . --plot curves.xyz", tmp_path, "--plot", "curves.xyz")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks a module that is not to be found
    refuses(command, tmp_path, "--plot", package)
    (path / "logs" / "csv" / "metrics.csv").unlink()
    refuses(command, tmp_path, "--plot", "metrics.csv")
