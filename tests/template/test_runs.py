"""tools/runs.py, on run directories that are written here, and on real ones."""

import csv
import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import SMALL, call
from edits import copy_programs, insert_after
from mistakes import refuses
from outputs import run_dir
from scipy.stats import ttest_rel

OPTIONS = {"out_dir": "x", "logger_name": ["csv"], "seed": 0, "width": 32, "monitor": "val/accuracy",
           "monitor_mode": "max"}  # fmt: skip
LOSS = {"monitor": "val/loss", "monitor_mode": "min"}


def make(folder: Path, number: int, values=(0.5,), name="x", summary=None, tests=None, code=None, **options) -> Path:
    """Writes a run as train.py leaves it. The number is the seconds in its name, the values are those that it has
    monitored every tenth step; `tests` has what test.py has found, by the name of the file, `code` the files of each
    version."""
    path = folder / f"20260101-{number:06}-{name}"
    (path / "logs" / "csv").mkdir(parents=True)
    (path / ".lock").touch()
    options = OPTIONS | options
    (path / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    best = min(values) if options["monitor_mode"] == "min" else max(values)
    results = {"step": 10 * len(values), "best": best, "best_step": 10 * values.index(best) + 10, "parameters": 1000}
    results |= {"state": "finished", "seconds": 90.5, "last": {options["monitor"]: values[-1]}}
    (path / "summary.json").write_text(json.dumps(results | (summary or {})))
    lines = [f"step,train/loss,val/loss,{options['monitor']}\n"]
    lines += [f"{10 * i},{2 / i},{1 / i},{value}\n" for i, value in enumerate(values, 1)]
    (path / "logs" / "csv" / "metrics.csv").write_text("".join(lines))
    for file, (step, found) in (tests or {}).items():
        (path / f"{file}.json").write_text(json.dumps({"step": step, "results": found}))
    for version, files in (code or {}).items():
        for file, text in files.items():
            kept = path / "provenance" / f"code-{version}" / file
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(text)
    return path


def runs(folder: Path, options: str = "", columns: int = 80) -> subprocess.CompletedProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return call(f"tools/runs.py . {options}", folder)


def lines_of(folder: Path, options: str = "", columns: int = 80) -> list[str]:
    """The lines of the table, with one space between two words."""
    return [" ".join(line.split()) for line in runs(folder, options, columns).stdout.splitlines()]


def csv_of(folder: Path, options: str = "") -> list[str]:
    """The lines of `--format csv`. A run that is called x has its number as its name."""
    printed = runs(folder, f"{options} --format csv").stdout
    return re.sub(r"20260101-00000(\d)-x\b", r"\1", printed).splitlines()


def column(folder: Path, name: str, options: str = "") -> list[str]:
    return [row[name] for row in csv.DictReader(csv_of(folder, options))]


# ---- rows and columns


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Path:
    """The runs 0, 1 and 2 of the width 32, and 3, 4 and 5 of 64, with the seeds 0, 1 and 2 each: the later the run, the
    better. To be read, not changed."""
    folder = tmp_path_factory.mktemp("six")
    for number in range(6):
        best = 0.25 + number / 8
        options = {"seed": number % 3, "width": 32 if number < 3 else 64}
        last = {"val/accuracy": 0.1, "val/loss": 3.0 - number}
        tests = {"test_test_best": (20, {"loss": 6.0 - number, "accuracy": best / 2, "per_class": [0.5, 0.9]})}
        make(folder, number, [0.125, best, 0.1], summary={"last": last}, tests=tests, **options)
    return folder


def test_the_table_has_the_options_that_differ_and_the_results(six):
    assert lines_of(six, "--wide")[:3] == [
        "best: max val/accuracy",
        "run seed width best test/accuracy test/loss best_step step time state",
        "20260101-000000-x 0 32 0.25 0.125 6 20 30 0:01:30 finished",
    ]


@pytest.mark.parametrize(
    "options, lines",
    [("--columns best width --filter seed=0", ["best,width", "0.25,32", "0.625,64"]),
     ("--columns run --sort best", ["run", *"543210"]),
     ("--columns run --filter width>=64 seed!=1 --filter best<0.8", ["run", "3"]),
     ("--columns run --filter run!=*-00000[1-5]-* state=f* width<=32", ["run", "0"]),
     # The last values of a run, of which the monitored one is `best`.
     ("--columns run val/accuracy --filter val/accuracy>0.7 test/loss<2", ["run,best", "5,0.875"]),
     ("--columns val/loss --sort val/loss --filter val/loss>1", ["val/loss", "2.0", "3.0"]),
     # Groups are filtered by their own columns, after the runs were by theirs.
     ("--group --columns width --sort mean", ["width", "64", "32"]),
     ("--group --columns width val/accuracy --filter mean<0.5", ["width,mean", "32,0.375"]),
     ("--group --columns width std n state --filter n>=3 run!=*0-x", ["width,std,n,state", "64,0.125,3,3 finished"]),
     ("--group --columns width test/accuracy_mean test/accuracy_std --filter test/accuracy_mean>0.2",
      ["width,test/accuracy_mean,test/accuracy_std", "64,0.375,0.0625"])],
)  # fmt: skip
def test_columns_sort_filter_and_group(options: str, lines: list[str], six):
    assert csv_of(six, options) == lines


def test_a_value_is_accepted_as_the_table_shows_it_and_csv_has_all_digits(tmp_path: Path):
    """So is a name: with the time and without it, as a path, or a part of it."""
    name = "20260101-000000-lr=0"
    for number in range(2):
        options = {"optim": {"base_lr": 2.3012345 + number}, "data_dir": f"/a/long/path/that/leads/to/number{number}"}
        make(tmp_path, number, [0.87654321 - number], f"lr={number}", summary={"seconds": 61.5 + number}, **options)
    assert lines_of(tmp_path)[-2] == "lr=0 2.301 /a/long…/number0 0.87654 10 10 0:01:01 finished"
    for shown in ("data_dir=/a/long…/number0", "optim.base_lr=2.301", "best=0.87654", "time=0:01:01", "run=lr=0"):
        assert column(tmp_path, "run", f"--filter {shown}") == [name]
    for shown in (name, "lr=0", f"{tmp_path / name}/", "00-lr"):
        assert column(tmp_path, "best", f"--filter {shown}") == ["0.87654321"]
        assert column(tmp_path, "run", f"--filter run!={shown}") == ["20260101-000001-lr=1"]


def test_a_group_counts_a_seed_once(tmp_path: Path):
    """With its newest run that has finished, or its newest; folds are averaged, too. It says how many are left out."""
    for number, (seed, fold, best, state) in enumerate(
        [(42, 0, 0.1, "finished"), (42, 0, 0.25, "finished"), (42, 0, 0.3, "failed"),
         (42, 1, 0.4, "failed"), (42, 1, 0.5, "failed"), (1, 0, 0.75, "finished")]
    ):  # fmt: skip
        make(tmp_path, number, [best], seed=seed, fold=fold, summary={"state": state})
    assert csv_of(tmp_path, "--group") == ["mean,std,n,repeated,state", '0.5,0.25,3,3,"1 failed, 2 finished"']


def test_results_of_other_checkpoints_have_their_names(tmp_path: Path):
    """That of the best is left out where another one became the best. A group says how many were evaluated."""
    others = {"test_val_step-00000030": (30, {"accuracy": 0.125})}
    make(tmp_path, 0, seed=0, tests={"test_test_best": (10, {"accuracy": 0.5})} | others)
    make(tmp_path, 1, [0.5, 0.6], seed=1, tests={"test_test_best": (10, {"accuracy": 0.25})})
    columns = ["test/accuracy,val_step-00000030/accuracy", "0.5,0.125", ","]
    assert csv_of(tmp_path, "--columns test/accuracy val_step-00000030/accuracy") == columns
    assert csv_of(tmp_path, "--group --columns n test/accuracy_n") == ["n,test/accuracy_n", "2,1"]


def test_code_is_told_apart_where_it_is_trained(tmp_path: Path):
    """Versions that differ in tests alone have the first of their names. A run that was resumed has several."""
    first = {"aaaaaaaa": {"train.py": "1", "tests/x.py": "1"}}
    same = {"bbbbbbbb": {"train.py": "1", "tests/x.py": "2"}}
    other = {"cccccccc": {"train.py": "2"}}
    for number, code in enumerate([first, same, other, same | other]):
        make(tmp_path, number, seed=number, code=code)
    both = '"code-aaaaaaaa,code-cccccccc"'
    assert csv_of(tmp_path, "--columns code")[1:] == ["code-aaaaaaaa", "code-aaaaaaaa", "code-cccccccc", both]
    assert csv_of(tmp_path, "--group --columns code n")[1:] == ["code-aaaaaaaa,2", "code-cccccccc,1", f"{both},1"]
    assert lines_of(tmp_path, columns=40)[-1].startswith("code: 3 versions;")


def test_the_state_of_a_run(tmp_path: Path):
    """A run whose process holds the lock is running, also where it was finished before. One that says so, but holds no
    lock, was killed. A young run has no summary yet."""
    states = ["running", "finished", "failed"]
    paths = [make(tmp_path, number, summary={"state": state}) for number, state in enumerate(states)]
    assert column(tmp_path, "state") == ["interrupted", "finished", "failed"]
    (paths[0] / "summary.json").unlink()
    with open(paths[1] / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert csv_of(tmp_path, "--columns best state")[1:] == [",interrupted", "0.5,running", "0.5,failed"]


def test_a_damaged_file_is_named_and_does_not_hide_the_run(tmp_path: Path):
    path = make(tmp_path, 0)
    make(tmp_path, 1)
    names = ["summary.json", "config.yaml", "test_val_best.json"]
    for name in names:
        (path / name).write_text("a: [")
    done = runs(tmp_path, "--format csv --columns run best")
    assert done.stdout.splitlines() == ["run,best", f"{path.name},", "20260101-000001-x,0.5"]
    assert re.findall(r"^.*/(.*) is damaged: ", done.stderr, re.MULTILINE) == names


# ---- a table that fits the terminal


def test_a_table_fits_the_terminal(tmp_path: Path):
    """Names of runs are broken, not cut. Columns that are left out are named, at the end those that do not change what
    is learned. --wide has all."""
    options = [f"option_number_{i}" for i in range(9)]
    names = [f"width={n}-and-many-other-options-that-make-it-a-name-that-is-longer-than-the-line" for n in range(20)]
    for n, name in enumerate(names):
        make(tmp_path, n, name=name, width=n, num_workers=n, **{option: f"{1 / (n + 3):.17g}" for option in options})
    for columns in (70, 80, 120):
        text = runs(tmp_path, columns=columns).stdout
        assert max(map(len, text.splitlines())) <= columns
        _, table, left_out = re.split("^run|^not shown ", text, flags=re.MULTILINE)
        assert "".join(re.findall(r"^\S+", table, re.MULTILINE)) == "".join(names)
        assert "option_number_8" in left_out and left_out.split()[-1] == "num_workers"
    _, titles, *rows = lines_of(tmp_path, "--wide")
    assert titles == f"run width num_workers {' '.join(options)} best best_step step time state" and len(rows) == 20


# ---- two runs, or two groups


def test_real_runs_and_their_diff(program: Path, cwd: Path):
    """The diff has options, results, packages and code; of a run that is resumed with other code, the newest."""
    call(f"{copy_programs(program)}/train.py {SMALL} --epochs 1 --out_dir a", cwd)
    insert_after(program, "batch", "x = 1")
    call(f"{program}/train.py {SMALL} --epochs 1 --out_dir b", cwd)
    insert_after(program, "batch", "x = 2")
    call(f"{program}/train.py --resume b --epochs 2", cwd)
    call(f"{program}/test.py --out_dir b --accelerator cpu", cwd)
    b = run_dir(cwd, "b")
    _, row = csv.DictReader(csv_of(cwd))
    expected = json.loads((b / "summary.json").read_text())
    expected |= json.loads((b / "test_test_best.json").read_text())["results"]
    shown = ("best", "best_step", "step", "time", "test/accuracy", "test/loss")
    names = ("best", "best_step", "step", "seconds", "accuracy", "loss")
    assert [float(row[name]) for name in shown] == [expected[name] for name in names]

    newest = max(b.glob("provenance/*.txt"))  # two starts within a second are in one file
    newest.write_text(newest.read_text() + "some_pack-1.0\n")
    text = runs(cwd, "--diff a b").stdout
    assert re.match(r"value +A +B\nepochs +1.0 +2.0\ncode +code-\w+ +code-\w+,code-\w+\n", text)
    assert re.search(r"^test/accuracy +- +0\.\d+\n", text, re.MULTILINE)
    assert re.search(r"^package +A +B\nsome_pack +- +1.0\n\ncode\n--- A/train.py\n", text, re.MULTILINE)
    assert re.findall(r"^[+-] .*", text, re.MULTILINE) == ["+    x = 2", "+    x = 1"]


OURS, THEIRS = [0.90, 0.80, 0.95, 0.85], [0.92, 0.81, 0.98, 0.87]
COMPARE = "--compare width=32 width=64"


@pytest.mark.parametrize(
    "theirs, options, verdict",
    [(THEIRS, {}, "distinguishable: B is better"),
     (THEIRS, LOSS, "distinguishable: A is better"),
     ([0.91, 0.81, 0.96, 0.86], {}, "not distinguishable: the differences are all the same"),
     # In a simulation, with so many more pairs four of five cases are distinguishable.
     ([0.93, 0.79, 0.97, 0.84], {}, "not distinguishable; with about 58 more pairs")],
)  # fmt: skip
def test_compare_has_the_pairs_the_interval_of_a_paired_t_test_and_a_verdict(theirs, options, verdict, tmp_path: Path):
    for number, value in enumerate([*OURS, *theirs]):
        make(tmp_path, number, [value], seed=number % 4, width=32 if number < 4 else 64, **options)
    *lines, interval, last = lines_of(tmp_path, COMPARE)
    if theirs == THEIRS:
        assert lines[1:] == [
            "seed A B B - A", "0 0.9 0.92 0.02", "1 0.8 0.81 0.01", "2 0.95 0.98 0.03", "3 0.85 0.87 0.02",
        ]  # fmt: skip
        low, high = ttest_rel(THEIRS, OURS).confidence_interval(0.95)
        assert interval == f"B - A: 0.02 on average, 95 % interval {low:.3g} to {high:.3g}, 4 pairs"
    assert last.startswith(verdict)


def test_compare_pairs_runs_that_agree_in_what_else_was_searched(tmp_path: Path):
    """But not in what changes nothing that is learned, as the number of data workers. A failed run is left out."""
    for number in range(8):
        options = {"seed": number % 2, "base_lr": (0.1, 0.2)[number // 2 % 2], "width": (32, 64)[number // 4]}
        state = "failed" if number == 7 else "finished"
        make(tmp_path, number, [number / 10], num_workers=number, summary={"state": state}, **options)
    lines = lines_of(tmp_path, COMPARE)
    assert lines[0] == "left out: 20260101-000007-x, failed"
    assert lines[2:6] == ["seed base_lr A B B - A", "0 0.1 0 0.4 0.4", "1 0.1 0.1 0.5 0.4", "0 0.2 0.2 0.6 0.4"]


def test_values_of_different_metrics_are_not_compared(tmp_path: Path):
    for number in range(4):
        make(tmp_path, number, seed=number % 2, width=number // 2, **(LOSS if number > 1 else {}))
    assert lines_of(tmp_path, columns=40)[1] == "run monitor best state"  # where little else fits
    refuses("tools/runs.py . --compare width=0 width=1", tmp_path, "--compare", "monitor")


# ---- curves


def test_plot_as_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    for number in range(12):
        make(tmp_path, number, [0.5, 0.8 + number / 100, 0.7], seed=number)
    assert runs(tmp_path, "--plot curves.png").stdout == "picture curves.png\nthe 10 best of 12 runs\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    refuses("tools/runs.py . --plot curves.xyz", tmp_path, "--plot", "curves.xyz")


def test_plot_in_the_terminal(tmp_path: Path):
    """A panel of 16 lines for both losses and the monitored value, and a legend of the options: of the ten best runs,
    the mark of each is its place. The last row may be just being written."""
    pytest.importorskip("plotext")
    for number in range(12):
        path = make(tmp_path, number, [0.1 + number / 20] * 5, seed=number)
    with open(path / "logs" / "csv" / "metrics.csv", "a") as file:
        file.write("x,,\n60,1,1,9")  # of 0.9
    lines = runs(tmp_path, "--plot", columns=70).stdout.splitlines()
    assert max(map(len, lines)) <= 70
    assert [lines[place].strip() for place in (0, 17, 34)] == ["train/loss", "val/loss", "val/accuracy"]
    assert lines[51:] == [*(f"{place}  seed {11 - place}" for place in range(10)), "the 10 best of 12 runs"]
    curves = [re.split("[│┤]", line)[1] for line in lines[36:47]]
    assert re.sub(r" |(.)(?=\1)", "", "".join(curves)) == "0123456789"  # from top to bottom


def test_plot_without_the_package_or_without_values(tmp_path: Path, monkeypatch):
    path = make(tmp_path, 0)
    monkeypatch.setitem(sys.modules, "plotext", None)  # as Python marks a module that is not to be found
    refuses("tools/runs.py . --plot", tmp_path, "--plot", "plotext")
    (path / "logs" / "csv" / "metrics.csv").unlink()
    refuses("tools/runs.py . --plot", tmp_path, "--plot", "metrics.csv")


# ---- mistakes


@pytest.mark.parametrize(
    "options, words",
    [("--columns al/loss", "al/loss val/loss?"),
     ("--filter widht=3", "widht=3 width?"),
     ("--group --filter mean>2", "mean>2"),
     ("--format pdf", "--format pdf table csv"),
     ("--diff seed=2 000000", "--diff seed=2 20260101-000002-x 20260101-000005-x"),
     ("--filter seed=1 --compare width=32 width=64", "--compare two pairs seed found 1"),
     ("--compare 2026 width=64", "20260101-000000-x 20260101-000003-x seed --filter width=32")],
)  # fmt: skip
def test_a_mistake_is_one_line(options: str, words: str, six):
    assert not refuses(f"tools/runs.py . {options}", six, *words.split())


def test_a_directory_that_is_not_there_or_has_no_runs(tmp_path: Path):
    for folder, words in ((".", "no run"), ("nowhere", "no such directory")):
        refuses(f"tools/runs.py {folder}", tmp_path, folder, words)
