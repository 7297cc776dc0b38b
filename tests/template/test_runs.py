"""tools/runs.py, on run directories that are written here, and on a real one."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import mean, stdev

import numpy as np
import pytest
import yaml
from edits import copy_programs, insert_after
from helpers import REPO, SMALL, call, run_dir, start
from scipy.stats import ttest_1samp, ttest_rel

OPTIONS = {"out_dir": "x", "seed": 0, "width": 32, "logger_name": ["csv"], "effective_batch_size": 100,
           "monitor": "val/accuracy", "monitor_mode": "max"}  # fmt: skip
HOLD_LOCK = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def make(folder: Path, number: int, values: list[float], finished: bool = True, **options) -> Path:
    """A run that has validated and logged every tenth step, which took half a second."""
    (path := folder / f"20260101-{number:06}-x").mkdir()
    options = OPTIONS | options
    (path / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    best = min(values) if options["monitor_mode"] == "min" else max(values)
    summary = {"step": 10 * len(values), "best": best, "best_step": 10 * values.index(best) + 10, "parameters": 1000}
    summary |= {"state": "finished" if finished else "running", "seconds": len(values) / 2}
    summary |= {"last": {"lr": 0.1, options["monitor"]: values[-1]}}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "logs" / "csv").mkdir(parents=True)
    with open(path / "logs" / "csv" / "metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "lr", "samples_per_second", "train/loss", "val/loss", options["monitor"]])
        writer.writerows([10 * i, 0.1, 1000.0, 2 / i, 1 / i, value] for i, value in enumerate(values, 1))
    (path / ".lock").touch()
    return path


def change_summary(path: Path, **values) -> None:
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | values))


def runs(folder: Path, options: str = "", code: int = 0, columns: int = 80) -> subprocess.CompletedProcess:
    """What runs.py prints on a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return call(f"tools/runs.py {folder} {options}", folder, code)


def runs_of(*words: str) -> str:
    """What runs.py prints, given words that may have spaces in them."""
    return subprocess.check_output([sys.executable, REPO / "tools" / "runs.py", *words], text=True)


def table(folder: Path, options: str = "") -> list[dict]:
    return list(csv.DictReader(io.StringIO(runs(folder, f"{options} --format csv").stdout)))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two widths, three seeds of each."""
    for number in range(6):
        make(tmp_path, number, [0.5, 0.9 + number / 100, 0.7], seed=number % 3, width=(32, 64)[number // 3])
    return tmp_path


def test_a_row_has_the_options_that_differ_and_the_results(sweep: Path):
    rows = table(sweep)
    assert [*rows[0]] == ["run", "seed", "width", "best", "best_step", "step", "time", "state"]
    assert [*rows[4].values()][:6] == ["20260101-000004-x", "1", "64", "0.9400000000000001", "20", "30"]
    assert float(rows[4]["time"]) == pytest.approx(1.5)
    lines = runs(sweep).stdout.splitlines()
    assert lines[0] == "best: max val/accuracy"
    assert lines[6].split() == ["20260101-000004-x", "1", "64", "0.94", "20", "30", "0:00:01", "finished"]
    assert len(lines) == 8


def test_the_state_of_a_run(tmp_path: Path):
    """A resume that is under way counts as running, also where the run was finished or had failed before. A run whose
    summary says `running`, but that holds no lock, was killed."""
    paths = [make(tmp_path, number, [0.5], finished=number in (2, 3)) for number in range(6)]
    for path in paths[4:]:
        change_summary(path, state="failed")
    (paths[0] / "model.pt").touch()  # of a finish before: the run was made longer, and killed
    held = [subprocess.Popen([sys.executable, "-c", HOLD_LOCK, paths[number] / ".lock"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE) for number in (1, 3, 5)]  # fmt: skip
    try:
        assert all(process.stdout.readline() for process in held)
        states = ["interrupted", "running", "finished", "running", "failed", "running"]
        assert [row["state"] for row in table(tmp_path)] == states
        assert all(process.poll() is None for process in held)
    finally:
        for process in held:
            process.communicate(b"\n")
    states = ["interrupted", "interrupted", "finished", "finished", "failed", "failed"]
    assert [row["state"] for row in table(tmp_path)] == states
    assert len(table(tmp_path, "--filter state=failed")) == 2


def test_parameters_are_shown_where_they_differ(tmp_path: Path):
    for number in range(2):
        path = make(tmp_path, number, [0.5])
    assert "parameters" not in table(tmp_path)[0]
    change_summary(path, parameters=2000)
    assert [row["parameters"] for row in table(tmp_path)] == ["1000", "2000"]
    assert [row["run"][14] for row in table(tmp_path, "--filter parameters=2000")] == ["1"]
    assert ["parameters", "1000", "2000"] in [
        line.split() for line in runs(tmp_path, "--diff 000000 000001").stdout.splitlines()
    ]


def test_grouped_over_seeds(sweep: Path):
    rows = table(sweep, "--group")
    assert [*rows[0]] == ["width", "mean", "std", "n", "state"]
    assert [row["width"] for row in rows] == ["32", "64"]
    assert float(rows[1]["mean"]) == pytest.approx(mean([0.93, 0.94, 0.95]))
    assert float(rows[1]["std"]) == pytest.approx(stdev([0.93, 0.94, 0.95]))
    assert (rows[1]["n"], rows[1]["state"]) == ("3", "3 finished")
    change_summary(sweep / "20260101-000005-x", state="running")
    assert table(sweep, "--group")[1]["state"] == "2 finished, 1 interrupted"


def test_grouped_over_folds(tmp_path: Path):
    for number in range(8):
        make(tmp_path, number, [number / 10], seed=number % 2, fold=number // 2 % 2, width=number // 4)
    assert [(row["width"], row["n"]) for row in table(tmp_path, "--group")] == [("0", "4"), ("1", "4")]


def with_code(path: Path, *versions: str) -> None:
    """Makes the folders in which a run keeps the versions of its code."""
    for version in versions:
        (folder := path / "provenance" / f"code-{version}").mkdir(parents=True)
        (folder / "train.py").write_text(version)


def test_a_repeated_seed_counts_once(tmp_path: Path):
    """With its newest run that has finished, or its newest. A column tells how many were left out."""
    for number, (seed, best, finished) in enumerate(
        [(42, 0.1, True), (42, 0.2, True), (42, 0.3, False), (1, 0.4, True), (2, 0.5, False), (2, 0.6, False)]
    ):
        make(tmp_path, number, [best], finished, seed=seed)
    (row,) = table(tmp_path, "--group")
    assert [*row] == ["mean", "std", "n", "repeated", "state"]
    assert float(row["mean"]) == pytest.approx(mean([0.2, 0.4, 0.6]))
    assert float(row["std"]) == pytest.approx(stdev([0.2, 0.4, 0.6]))
    assert [row["n"], row["repeated"], row["state"]] == ["3", "3", "2 finished, 1 interrupted"]
    lines = runs(tmp_path, "--group", columns=20).stdout.splitlines()
    assert lines[1].split() == ["mean", "std", "n", "repeated", "state"]
    assert lines[-1] == "repeated: runs left out, as another one has the same seed and fold"
    assert "repeated" not in runs(tmp_path, "--group --filter seed=1").stdout


def test_runs_of_other_code_are_another_group(tmp_path: Path):
    """The code of a run are all versions with which it has trained. A run that has kept none may be of any."""
    for number, versions in enumerate([("12e45678",), ("12e45678",), ("aaaaaaaa",), ("aaaaaaaa", "12e45678"), ()]):
        with_code(make(tmp_path, number, [0.5], seed=number), *versions)
    (tmp_path / "20260101-000000-x" / "provenance" / "code-bbbbbbbb.tmp").mkdir()  # left by a kill
    codes = ["code-12e45678", "code-aaaaaaaa", "code-12e45678,code-aaaaaaaa", ""]
    assert [row["code"] for row in table(tmp_path)] == [codes[0], *codes]
    rows = table(tmp_path, "--group")
    assert [row["code"] for row in rows] == codes and [row["n"] for row in rows] == ["2", "1", "1", "1"]
    assert "code: 4 versions; values of other code cannot be compared" in runs(tmp_path, columns=40).stdout
    assert "code" not in table(tmp_path, "--filter code=code-12e45678")[0]


def test_code_that_does_not_train_is_no_other_code(tmp_path: Path):
    """Runs whose versions differ in tests, recipes and benchmarks alone have the first of the names."""
    for number, (version, name) in enumerate(
        [("c", "x.py"), ("b", "tests/x.py"), ("a", "recipes/methods/x.py"), ("d", "benchmarks/x.py"), ("e", "x.py")]
    ):
        path = make(tmp_path, number, [0.5], seed=number)
        file = path / "provenance" / f"code-{version * 8}" / name
        file.parent.mkdir(parents=True)
        (file.parents[len(Path(name).parents) - 1] / "train.py").write_text("same")
        file.write_text(version)
    codes = ["code-cccccccc", *["code-bbbbbbbb"] * 3, "code-eeeeeeee"]
    assert [row["code"] for row in table(tmp_path)] == codes
    assert [row["n"] for row in table(tmp_path, "--group")] == ["1", "3", "1"]
    assert len(table(tmp_path, "--filter code=code-bbbbbbbb")) == 3


def test_the_code_of_real_runs(program: Path, cwd: Path):
    """Trained twice, then with an edit. One is resumed with it."""
    command = f"{copy_programs(program)}/train.py {SMALL} --epochs 1"
    call(f"{command} --out_dir a", cwd)
    call(f"{command} --out_dir b", cwd)
    assert [row["repeated"] for row in table(cwd, "--group")] == ["1"]
    (program / "tests" / "of_mine.py").parent.mkdir(exist_ok=True)
    (program / "tests" / "of_mine.py").write_text("# a comment\n")
    call(f"{command} --out_dir d", cwd)
    assert len([*cwd.glob("*-[ad]/provenance/code-*")]) == 2
    assert [row["repeated"] for row in table(cwd, "--group")] == ["2"]
    shutil.rmtree(run_dir(cwd, "d"))
    insert_after(program, "batch", "images = images + 0")
    call(f"{program}/train.py --resume b --epochs 2", cwd)
    call(f"{command} --out_dir c", cwd)
    before, both, after = (row["code"] for row in table(cwd))
    assert before != after and both == ",".join(sorted([before, after]))
    assert len(table(cwd, "--group")) == 3


def test_the_monitor_is_shown_where_it_differs(tmp_path: Path):
    """However narrow the table is: the best values of different metrics cannot be compared."""
    for number, monitor in enumerate(("val/loss", "val/accuracy")):
        path = make(tmp_path, number, [0.5], monitor=monitor, width=number)
        path.rename(path.with_name(f"{path.name}-with-a-name-that-fills-more-than-the-terminal-of-80-columns"))
    for option in ("", "--group"):
        assert "monitor" in runs(tmp_path, option).stdout.splitlines()[1].split()
    assert "monitor" not in runs(tmp_path, "--filter width=0").stdout


@pytest.mark.parametrize(
    "name, steps",
    [
        ("epochs", "max_steps"),
        ("log_per_epoch", "log_interval"),
        ("val_frequency", "val_interval"),
        ("checkpoint_frequency", "checkpoint_interval"),
    ],
)
def test_what_counts_steps_takes_the_place_of_what_counts_epochs(name: str, steps: str, tmp_path: Path):
    """The one of the two that has no effect is not there."""
    for number, (epochs, count) in enumerate([(20.0, 0), (25.0, 0), (20.0, 3), (25.0, 3)]):
        make(tmp_path, number, [0.5], **{name: epochs, steps: count})
    assert [(row[name], row[steps]) for row in table(tmp_path)] == [("20.0", ""), ("25.0", ""), ("", "3"), ("", "3")]
    assert name not in table(tmp_path, f"--filter {name}!=25")[0]
    lines = [line.split() for line in runs(tmp_path, "--diff 000000 000002").stdout.splitlines()]
    assert [name, "20.0", "-"] in lines and [steps, "-", "3"] in lines
    assert steps not in runs(tmp_path, "--diff 000000 000001").stdout
    assert runs(tmp_path, "--diff 000002 000003").stdout.startswith("value\nall the same\n")


def test_sorted_and_filtered(sweep: Path):
    assert [row["run"][14] for row in table(sweep, "--sort best")] == [*"543210"]
    assert [row["seed"] for row in table(sweep, "--sort seed")] == [*"001122"]
    assert [row["run"][14] for row in table(sweep, "--filter width=64.0 --filter seed=1")] == ["4"]
    assert [row["run"][14] for row in table(sweep, "--filter run=*0004-* state=finished")] == ["4"]
    for filters, expected in {
        "width>=64 seed<1": "3",
        "width<=32 seed>0": "12",
        "seed!=1 best>0.93": "5",
        "run!=*-00000[1-5]-*": "0",
        "time>=1.5 state=f*": "012345",
    }.items():
        assert "".join(row["run"][14] for row in table(sweep, f"--filter {filters}")) == expected
    shutil.rmtree(sweep / "20260101-000005-x")
    make(sweep, 9, [9.0, 0.1], monitor="val/loss", monitor_mode="min", width=10)
    assert [row["best"] for row in table(sweep, "--filter monitor=val/loss")] == ["0.1"]


DAMAGE = {
    "config.yaml": [
        "",
        "a: [",
        "- list",
        "a: [[b], {c: d}]",
        "width: 64\nmonitor: val/accuracy\neffective_batch_size: many",
    ],
    "summary.json": ["", '{"step": 3', "[1]", "\0\0\0", '{"step": "x"}'],
}


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_run_does_not_hide_the_others(name: str, text: str, sweep: Path):
    (sweep / "20260101-000002-x" / name).write_text(text)
    done = runs(sweep, "--format csv")
    assert len(done.stdout.splitlines()) == 7
    assert re.search("20260101-000004-x,1,64,.*0.94", done.stdout)
    assert "Traceback" not in done.stderr
    is_yaml = text.endswith(("{c: d}]", "many"))
    assert is_yaml != (f"20260101-000002-x/{name} is damaged: " in done.stderr)
    runs(sweep, "--group --sort mean")


def test_a_young_run_has_no_results(tmp_path: Path):
    """Its summary.json is not there yet; nothing is damaged."""
    (make(tmp_path, 0, [0.5], finished=False) / "summary.json").unlink()
    done = runs(tmp_path)
    assert done.stdout.splitlines()[2].split() == ["20260101-000000-x", "-", "-", "-", "-", "interrupted"]
    assert done.stderr == ""


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Two hundred runs of a search, which differ in ten options; four begin in the same second."""
    for number in range(200):
        options = {f"option_number_{i}": f"{1 / (number + i + 2):.17g}" for i in range(9)}
        path = make(tmp_path, number // 4, [0.5, 1 - 1 / (number + 2)], width=number, **options)
        path.rename(path.with_name(f"{path.name}-width={number:03}-and-many-other-options-that-make-it-long"))
    return tmp_path


@pytest.mark.parametrize("columns, option", [(80, ""), (60, ""), (120, ""), (80, "--group"), (80, "--sort best")])
def test_a_table_of_many_runs_fits(columns: int, option: str, many: Path):
    """Each row is there, and can still be told from the others; what is left out is named."""
    lines = runs(many, option, columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [line.split() for line in lines if "finished" in line]
    assert len(rows) == 200 == len({tuple(row) for row in rows})
    if option != "--group":
        names = [line.split()[0] for line in lines if line.startswith(("x-", "and-", "make-", "long"))]
        assert "".join(names).count("-and-many-other-options-that-make-it-long") == 200
    last = " ".join(lines[lines.index(next(line for line in lines if line.startswith("not shown"))) :])
    assert "option_number_8" in last and last.startswith("not shown (--wide shows all, --columns some): ")


def test_the_name_that_the_user_gave_is_broken_and_not_cut(tmp_path: Path):
    """The time is left out where the names differ without it. Where they do not, it tells the runs from each other."""
    name = "a-name-of-more-than-sixty-characters-that-no-terminal-of-so-few-has-room-for"
    for number in range(2):
        path = make(tmp_path, number, [0.5])
        path.rename(path.with_name(f"{path.name[:16]}{name}"))
    lines = runs(tmp_path, columns=60).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    end = next(number for number, line in enumerate(lines) if line.startswith("not shown"))
    words = [line.split()[0] for line in lines[2:end]]
    assert "".join(words) == "".join(f"20260101-{number:06}-{name}" for number in range(2))
    first, second = sorted(tmp_path.iterdir())
    second.rename(second.with_name(f"{second.name}s"))
    text = runs(tmp_path, columns=95).stdout
    assert f"\n{name}   " in text and f"\n{name}s  " in text and "20260101" not in text


def test_options_stay_longer_than_parent_and_code(tmp_path: Path):
    """The time is left on the names that collide alone. A line says that the code differs where it is not shown."""
    for number in range(16):
        lr, decay = f"{1 / (number + 3):.17g}", f"{1 / (number + 70):.17g}"
        path = make(tmp_path, number, [0.87654321 + number / 100], base_lr=lr, weight_decay=decay, seed=number)
        with_code(path, f"{number:08}")
        parent = {"path": "a/20260101-000000-same/checkpoints/best.ckpt", "step": 20}
        (path / "provenance" / "parent.json").write_text(json.dumps(parent | {"step": number}))
        path.rename(path.with_name(f"{path.name[:16]}{'same' if number < 2 else f'lr={lr:.6}'}"))
    _, titles, *rows = runs(tmp_path, columns=70).stdout.splitlines()
    assert titles.split() == ["run", "seed", "base_", "weight_", "best", "state"]
    assert [row.split()[0] for row in rows[1:4]] == ["20260101-000000-same", "20260101-000001-same", "lr=0.2000"]
    assert rows[-1] == "code: 16 versions; values of other code cannot be compared"
    assert "values of other code" not in runs(tmp_path, "--wide").stdout
    assert "values of other code" not in runs(tmp_path, "--filter seed=1").stdout
    assert runs(tmp_path, "--group --columns mean").stdout.endswith(f"\n{rows[-1]}\n")


def test_options_that_do_not_change_what_is_learned_are_left_out_first(tmp_path: Path):
    """What is searched stays, and seed and precision, which stand among the others, too."""
    for number in range(4):
        minor = {
            name: number for name in ("devices", "num_threads", "num_workers", "num_checkpoint_keep", "log_interval")
        }
        minor |= {name: f"{name}-{number}" for name in ("comment", "project", "accelerator", "data_dir", "logger_name")}
        searched = {"base_lr": f"{number / 7}", "weight_decay": f"{number / 9}", "mine": number}
        path = make(tmp_path, number, [0.5], seed=number, precision=f"bf{number}-mixed", **minor, **searched)
        change_summary(path, parameters=number)
        path.rename(f"{path}{number}")
    _, titles, *_ = runs(tmp_path, columns=64).stdout.splitlines()
    assert titles.split() == ["run", "seed", "precision", "base_", "weight_", "mine", "best", "state"]
    assert {*minor, *searched} < {*table(tmp_path)[0]}


def test_a_long_option_loses_its_middle(tmp_path: Path):
    for number in range(2):
        make(tmp_path, number, [0.5], data_dir=f"/a/long/path/that/leads/to/the/data/set/number{number}")
    lines = runs(tmp_path).stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("x ") or "000000-x" in line] == ["/a/long…/number0"]


def test_a_wide_table_has_all_columns_whole(many: Path):
    lines = runs(many, "--wide").stdout.splitlines()
    assert len(lines) == 202 and "not shown" not in lines[-1]
    names = ["run", "width", *(f"option_number_{i}" for i in range(9)), "best", "best_step", "step", "time", "state"]
    assert lines[1].split() == names
    assert lines[-1].startswith("20260101-000049-x-width=199-and-many-other-options-that-make-it-long ")


def test_columns_are_chosen(sweep: Path):
    assert [*table(sweep, "--columns best width")[0].items()] == [("best", "0.9"), ("width", "32")]
    assert [*table(sweep, "--columns seed effective_batch_size parameters --sort best")[0].values()] == [
        "2",
        "100",
        "1000",
    ]
    assert "not shown" not in runs(sweep, "--columns run best_step", columns=20).stdout
    assert runs(sweep, "--group --columns width n").stdout.splitlines()[1:] == ["width  n", "32     3", "64     3"]
    assert runs(sweep, "--columns colour", code=2).stderr.endswith("error: colour: no such column\n")
    assert (
        "effective: no such column; did you mean effective_batch_size?\n"
        in runs(sweep, "--columns effective", code=2).stderr
    )
    assert "widht: no such column; did you mean width?\n" in runs(sweep, "--sort widht", code=2).stderr
    assert "widht=3: no such column; did you mean width?\n" in runs(sweep, "--filter widht=3", code=2).stderr


def test_the_last_values_are_columns_when_they_are_asked_for(tmp_path: Path):
    """The monitored one is `best`."""
    for number in range(4):
        path = make(tmp_path, number, [0.9, 0.5 + number / 10], monitor="val/mase", monitor_mode="min", seed=number)
        last = {"lr": 0.1, "val/mase": 0.5 + number / 10, "val/loss": 3 - number, "train/loss": None}
        change_summary(path, last=last)
    assert not [name for name in table(tmp_path)[0] if "/" in name]
    assert [row["run"][14] for row in table(tmp_path, "--sort val/mase")] == [*"0123"]
    assert [*table(tmp_path, "--columns run val/mase")[0]] == ["run", "best"]
    assert [row["run"][14] for row in table(tmp_path, "--filter val/mase>=0.7")] == [*"23"]
    assert [row["val/loss"] for row in table(tmp_path, "--sort val/loss")] == [*"0123"]
    assert [row["seed"] for row in table(tmp_path, "--columns seed --filter val/loss=2")] == ["1"]
    assert [*table(tmp_path, "--columns run val/loss")[0]] == ["run", "val/loss"]
    assert "did you mean val/loss?" in runs(tmp_path, "--columns al/loss", code=2).stderr
    (row,) = table(tmp_path, "--group --sort val/loss_mean --filter val/loss_mean=1.5")
    assert row["val/loss_mean"] == "1.5" and row["n"] == "4"
    assert [*table(tmp_path, "--group --columns val/mase n --sort val/mase")[0]] == ["mean", "n"]
    assert "did you mean val/loss_mean or " in runs(tmp_path, "--group --sort val/loss", code=2).stderr
    assert "val/loss" not in runs(tmp_path, "--diff 000000 000001").stdout


def test_fractions_have_four_digits_but_in_csv_and_diff(tmp_path: Path):
    for number in range(2):
        make(tmp_path, number, [0.5], base_lr=0.012345678 + number / 10**6)
    assert [line.split()[1] for line in runs(tmp_path).stdout.splitlines()[2:]] == ["0.01235", "0.01235"]
    assert [row["base_lr"] for row in table(tmp_path)] == ["0.012345678", "0.012346678"]
    assert ["base_lr", "0.012345678", "0.012346678"] in [
        line.split() for line in runs(tmp_path, "--diff 000000 000001").stdout.splitlines()
    ]


def test_a_reader_that_has_seen_enough(many: Path):
    """As `| head -1`."""
    process = start(f"tools/runs.py {many} --wide", many)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_a_reader_that_has_gone_before_the_last_line(tmp_path: Path):
    """A short table is written at the end."""
    make(tmp_path, 0, [0.5])
    process = start(f"tools/runs.py {tmp_path}", tmp_path)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


# ---- curves


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The figure of `--plot`, and what is printed about it."""
    figures, Figure = [], pytest.importorskip("matplotlib.figure").Figure
    draw = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: [figures.append(figure), draw(figure, path)])
    return runs(folder, "--plot curves.png").stdout, figures[0]


@pytest.mark.parametrize("number", [1, 2, 12])
def test_plot_as_a_picture(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both losses and the monitored value of the ten best runs, the best on top; below them a legend."""
    for i in range(number):
        make(tmp_path, i, [0.5, 0.9 + i / 1000, 0.7], seed=i % 3, width=i // 3)
    printed, figure = drawn(tmp_path, monkeypatch)
    assert printed == "picture curves.png\n" + ("the 10 best of 12 runs\n" if number == 12 else "")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == ["train/loss", "val/loss", "val/accuracy"]
    lines = figure.axes[2].lines
    assert len(lines) == min(number, 10)
    assert lines[0].get_xydata().tolist() == [[10, 0.5], [20, 0.9 + (number - 1) / 1000], [30, 0.7]]
    heights = [line.get_zorder() for line in lines]
    assert heights == sorted({*heights}, reverse=True)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    expected = [f"seed {i % 3}, width {i // 3}" for i in reversed(range(number))][:10]
    assert texts == {1: ["20260101-000000-x"], 2: ["seed 1", "seed 0"]}.get(number, expected)


def test_plot_with_many_options_in_the_legend_cuts_none(many: Path, monkeypatch: pytest.MonkeyPatch):
    _, figure = drawn(many, monkeypatch)
    (legend,) = figure.legends
    first = legend.get_texts()[0].get_text()
    assert " ".join(first.split()).startswith("width 199, option_number_0 0.004975, ")
    assert first.count("option_number_") == 9
    for box in [legend.get_window_extent(), *(text.get_window_extent() for text in legend.get_texts())]:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1
    assert legend.get_window_extent().y1 < min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200  # of 400 without a legend


def test_plot_of_a_single_point_has_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, 0, [0.5])
    make(tmp_path, 1, [0.5, 0.6])
    _, figure = drawn(tmp_path, monkeypatch)
    for axes in figure.axes:
        assert all((line.get_marker() == "o") == (len(line.get_xdata()) == 1) for line in axes.lines)
        assert {len(line.get_xdata()) for line in axes.lines} == {1, 2}


def test_plot_of_an_unknown_kind_is_a_mistake(sweep: Path):
    pytest.importorskip("matplotlib")
    assert "error: --plot curves.xyz: " in runs(sweep, "--plot curves.xyz", code=2).stderr


def test_plot_in_the_terminal(tmp_path: Path):
    """A panel of 16 lines for each value. The marks of a run are its place: a better one stands above it."""
    pytest.importorskip("plotext")
    for number in range(12):
        make(tmp_path, number, [0.1 + number / 20] * 5, seed=number)
    lines = runs(tmp_path, "--plot", columns=70).stdout.splitlines()
    assert max(map(len, lines)) <= 70 and "\x1b" not in "".join(lines)
    assert [lines[place].strip() for place in (0, 17, 34)] == ["train/loss", "val/loss", "val/accuracy"]
    assert lines[51:] == [*(f"{place}  seed {11 - place}" for place in range(10)), "the 10 best of 12 runs"]
    drawn = [re.split("[│┤]", line)[1] for line in lines[36:47]]
    found = "".join(mark for line in drawn for mark in sorted({*line} - {" "}))
    assert found == "0123456789"


def test_plot_of_a_row_that_is_cut(tmp_path: Path):
    """The last row may be just being written; a damaged one is not drawn."""
    pytest.importorskip("plotext")
    path = make(tmp_path, 0, [0.5, 0.6])
    with open(path / "logs" / "csv" / "metrics.csv", "a") as file:
        file.write("x,,\n30,0.1,1000.0,1,1,9")  # of 0.9
    lines = runs(tmp_path, "--plot").stdout.splitlines()
    assert [line.split()[-1] for line in (lines[14], lines[48])] == ["20.0", "20.0"]
    assert lines[36].startswith("0.600") and lines[46].startswith("0.500")


def test_plot_of_runs_without_values(tmp_path: Path):
    (make(tmp_path, 0, [0.5]) / "logs" / "csv" / "metrics.csv").unlink()
    assert "error: --plot: these runs have no logs/csv/metrics.csv" in runs(tmp_path, "--plot", code=2).stderr


@pytest.mark.parametrize("option, package", [("--plot", "plotext"), ("--plot curves.png", "matplotlib")])
def test_plot_without_the_package_says_so(option: str, package: str, sweep: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks a module that is not to be found
    error = runs(sweep, option, code=2).stderr
    assert error.startswith(f"runs.py: error: --plot: needs {package}") and error.count("\n") == 1


# ---- two runs


def test_diff(tmp_path: Path):
    """Options, results and packages; the packages are those that rundir.py names."""
    for number, version in enumerate(("1.0", "1.1")):
        folder = make(tmp_path, number, [0.5 + number / 10], seed=number) / "provenance"
        folder.mkdir()
        head = "python train.py\n1 x cpu on host\nPython 3.11.9 on Linux\nsource files in code-01234567\n"
        head += f"same-1.0\nsome_pack-{version}\n"
        (folder / "20260101-000000.txt").write_text(
            f"{head}# branch.oid {'a' * 40}\n1 .M N... train.py\n? mine-{version}\n"
        )
    lines = [line.split() for line in runs(tmp_path, "--diff 000000 20260101-000001-x").stdout.splitlines()]
    for line in ("value A B", "seed 0 1", "best 0.5 0.6", "package A B", "some_pack 1.0 1.1", "not kept"):
        assert line.split() in lines
    assert not {"same", "logger_name", "step", "run", "path", "?"} & {line[0] for line in lines if line}
    text = runs(tmp_path, "--diff 000000 seed=0").stdout
    assert text == "value\nall the same\n\npackage\nall the same\n\ncode\nnot kept\n"


def test_diff_has_the_best_value_and_the_metrics_before_the_parts_of_the_loss(tmp_path: Path):
    """Those that compute_loss returns are logged of the training, too. The time of the run comes last."""
    for number in range(2):
        path = make(tmp_path, number, [0.5 + number / 10], width=number)
        last = {f"train/{name}": 1.0 for name in ("loss", "loss_of_edges", "grad_norm")}
        change_summary(path, last=last, seconds=10.0 + number)
        evaluate(path, loss=number, loss_of_edges=number, f1=number, accuracy=number)
    expected = ["test/accuracy", "test/f1", "test/loss", "test/loss_of_edges"]
    assert [name for name in table(tmp_path)[0] if "/" in name] == expected
    first = runs(tmp_path, "--diff 000000 000001").stdout.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first] == ["value", "width", "best", *expected, "time"]


def test_diff_names_the_first_of_several_runs(sweep: Path):
    first = ", ".join(f"20260101-00000{number}-x" for number in range(4))
    assert f"--diff 2026: 6 runs fit: {first}, …\n" in runs(sweep, "--diff 2026 000000", code=2).stderr
    first = "20260101-000001-x, 20260101-000004-x"
    assert f"--diff seed=1: 2 runs fit: {first}\n" in runs(sweep, "--diff 000000 seed=1", code=2).stderr


def test_diff_shows_the_code_that_differs(program: Path, cwd: Path):
    """Of two runs that train.py has written, one after an edit and with a new file. Of a run that was resumed with
    other code, the newest counts."""
    command = f"{copy_programs(program)}/train.py {SMALL} --epochs 1"
    call(f"{command} --out_dir before", cwd)
    insert_after(program, "batch", "import mine")
    (program / "mine.py").write_text("x = 1\n")
    call(f"{command} --out_dir after --seed 3", cwd)
    text = runs(cwd, "--diff before after").stdout
    assert re.search(r"^seed +42 +3$", text, re.MULTILINE)
    assert "package\nall the same\n" in text
    lines = text.partition("\ncode\n")[2].splitlines()
    assert lines[:6] == [
        "--- A/mine.py",
        "+++ B/mine.py",
        "@@ -0,0 +1 @@",
        "+x = 1",
        "--- A/train.py",
        "+++ B/train.py",
    ]
    assert [line for line in lines[6:] if line[0] in "+-"] == ["+    import mine"]

    (program / "mine.py").write_text("x = 2\n")
    call(f"{program}/train.py --resume after --epochs 2", cwd)
    *earlier, newest = sorted(cwd.glob("*-after/provenance/*.txt"))  # those of one second are in one file
    newest.write_text("".join(path.read_text() for path in (*earlier, newest)))
    assert "+x = 2" in runs(cwd, "--diff before after").stdout.splitlines()
    assert runs(cwd, "--diff after after").stdout.endswith("\ncode\nall the same\n")

    (program / "mine.py").write_text("x = 1\n")
    call(f"{program}/train.py --resume after --epochs 3", cwd)
    assert "+x = 1" in runs(cwd, "--diff before after").stdout.splitlines()  # the code of before, once more


# ---- what is shown is accepted


def named(folder: Path, *names: str) -> list[str]:
    """Makes runs of these names, which differ in width, and returns the full ones."""
    paths = [make(folder, number, [0.5], width=number) for number in range(len(names))]
    return [path.rename(f"{path}".removesuffix("x") + name).name for path, name in zip(paths, names, strict=True)]


NAMES = ("base", "base-2", "lr=0.1", "width=4-seed=1", "width=4-seed=10", "of[1]", "on 2 gpus")


@pytest.mark.parametrize("number, name", [*enumerate(NAMES)])
def test_a_name_is_accepted_as_it_is_shown(number: int, name: str, tmp_path: Path):
    """With the time and without it, also where it is the beginning of another one, and where it looks like a filter."""
    full = named(tmp_path, *NAMES)[number]
    for text in (name, full, f"{tmp_path / full}/"):
        words = [f"{tmp_path}", "--columns", "run", "--format", "csv", "--filter"]
        for filter in (text, f"run={text}"):
            assert runs_of(*words, filter).splitlines()[1:] == [full]
        assert full not in runs_of(*words, f"run!={text}")
        printed = runs_of(f"{tmp_path}", "--diff", text, full)
        assert printed == "value\nall the same\n\npackage\nall the same\n\ncode\nnot kept\n"


def test_each_line_of_a_name_that_is_broken_is_accepted(tmp_path: Path):
    name = "-".join(f"option{number}=0.{number}" for number in range(7))
    full, _ = named(tmp_path, name, name.replace("=", "=1"))
    *lines, end = [line.split()[0] for line in runs(tmp_path).stdout.splitlines()[2:] if line.startswith("option")]
    assert "".join([*lines, end]).startswith(name) and lines[0] != name
    assert [row["run"] for row in table(tmp_path, f"--filter {lines[0]}")] == [full]
    assert [row["run"] for row in table(tmp_path, f"--filter run={lines[1]}")] == [full]


def test_an_option_wins_over_a_name_that_looks_like_one(tmp_path: Path):
    """`width=4` is never a part of a name, as of `width=40`."""
    full = named(tmp_path, "width=1", "width=40", "other")
    assert [row["run"] for row in table(tmp_path, "--filter width=1")] == [full[1]]
    assert "width=4: no run is left" in runs(tmp_path, "--filter width=4", code=2).stderr
    assert "colour=1: no such column" in runs(tmp_path, "--filter colour=1", code=2).stderr


def test_a_value_that_was_cut_is_accepted(tmp_path: Path):
    for number in range(2):
        make(tmp_path, number, [0.5], data_dir=f"/a/long/path/that/leads/to/the/data/set/number{number}")
    (row,) = table(tmp_path, "--filter data_dir=/a/long…/number1")
    assert row["run"] == "20260101-000001-x"


def test_a_value_that_was_rounded_is_accepted(tmp_path: Path):
    """Of a run and of a group, and the number of its states."""
    for number in range(4):
        value = 0.876543210 + number / 100 - number % 2 / 50
        path = make(tmp_path, number, [value], seed=number % 2, lr=(2.3012345, 0.8131313)[number // 2])
        change_summary(path, seconds=61.5)
    for filters, expected in {
        "lr=2.301": "01",
        "lr!=2.301": "23",
        "best=0.87654": "0",
        "time=0:01:01": "0123",
        "best<0.87654": "1",
    }.items():
        assert "".join(row["run"][14] for row in table(tmp_path, f"--filter {filters}")) == expected
    words = (f"{tmp_path}", "--group", "--columns", "n", "--format", "csv", "--filter")
    for filters in ("mean=0.87154", "state=2 finished, lr=2.301", "std=0.0070711, lr=2.301"):
        assert runs_of(*words, *filters.split(", ")) == "n\n2\n"
    assert ", 2 pairs" in runs(tmp_path, "--compare lr=2.301 lr=0.8131").stdout


def test_a_title_that_is_broken_is_the_name_of_its_column(tmp_path: Path):
    for number in range(2):
        path = make(tmp_path, number, [0.5], optim={"base_lr": number / 10, "momentum": number / 20})
        path.rename(f"{path}-with-a-name-that-fills-much-of-a-terminal")
    titles = [line[25:].split() for line in runs(tmp_path, columns=110).stdout.splitlines()[1:4]]
    assert "optim." in titles[0] and "momentum" in titles[1]
    assert runs(tmp_path, "--columns optim.momentum best --sort optim.momentum --filter optim.base_lr>0").stdout == (
        "best: max val/accuracy\noptim.momentum  best\n0.05            0.5\n"
    )


# ---- what test.py has found


def evaluate(path: Path, name: str = "test_best", step: int | None = None, **results) -> None:
    """Writes what test.py does: name is the split and the checkpoint."""
    best_step = json.loads((path / "summary.json").read_text())["best_step"]
    about = {"step": best_step if step is None else step, "results": results}
    (path / f"test_{name}.json").write_text(json.dumps(about))


@pytest.fixture
def tested(sweep: Path) -> Path:
    """Those runs, evaluated; the accuracy has as many digits as float32."""
    for number, path in enumerate(sorted(sweep.iterdir())):
        evaluate(path, loss=1 - number / 10, accuracy=0.8 + number / 81, per_class=[0.5, 0.9], confusion=None)
    return sweep


def test_the_numbers_of_a_test_are_columns(tested: Path):
    """Beside the best value, and the metric that is monitored first. What has several values is left out."""
    rows = table(tested)
    assert [*rows[0]][3:7] == ["best", "test/accuracy", "test/loss", "best_step"]
    assert [float(row["test/accuracy"]) for row in rows] == [0.8 + number / 81 for number in range(6)]
    assert [row["run"][14] for row in table(tested, "--filter test/accuracy>0.81 width=32")] == ["1", "2"]
    assert [row["run"][14] for row in table(tested, "--sort test/accuracy")] == [*"543210"]
    assert [row["run"][14] for row in table(tested, "--sort test/loss")] == [*"543210"]
    assert [*table(tested, "--columns test/loss")[0].items()] == [("test/loss", "1.0")]
    assert ["test/loss", "1.0", "0.5"] in [
        line.split() for line in runs(tested, "--diff 000000 000005").stdout.splitlines()
    ]


def test_a_group_has_the_mean_and_deviation_of_its_tests(tested: Path):
    rows = table(tested, "--group --sort test/accuracy_mean")
    titles = [f"test/{metric}_{kind}" for metric in ("accuracy", "loss") for kind in ("mean", "std")]
    assert [*rows[0]] == ["width", "mean", "std", "n", *titles, "state"]
    values = [0.8 + number / 81 for number in range(3, 6)]
    assert rows[0]["width"] == "64"
    assert float(rows[0]["test/accuracy_mean"]) == mean(values)
    assert float(rows[0]["test/accuracy_std"]) == stdev(values)
    columns = "--columns width test/accuracy_mean test/accuracy_std"
    lines = runs(tested, f"--group {columns}").stdout.splitlines()
    assert lines[1].split() == ["width", *titles[:2]] and lines[3].split() == ["64", "0.84938", "0.012346"]


def test_groups_are_filtered_by_their_own_columns(tested: Path):
    """After the runs were, by theirs."""
    shutil.rmtree(tested / "20260101-000000-x")
    for filters, expected in {
        "n>=3": ["64"],
        "n=2 mean<0.93": ["32"],
        "test/accuracy_mean>=0.84 state=finished": ["64"],
        "seed<2 n=1": ["32"],
    }.items():
        assert [row["width"] for row in table(tested, f"--group --filter {filters}")] == expected
    assert "mean>2: no run is left" in runs(tested, "--group --filter mean>2", code=2).stderr
    assert "mean>0: no such column" in runs(tested, "--filter mean>0", code=2).stderr
    error = runs(tested, "--group --filter test/colour_mean>0", code=2).stderr
    assert "test/colour_mean>0: no such column; did you mean test/" in error and error.count("\n") == 1
    assert table(tested, "--group --filter logger_name!=a/b_n=3")


def test_the_number_of_tests_is_shown_where_it_is_another_one(tested: Path):
    (tested / "20260101-000000-x" / "test_test_best.json").unlink()
    rows = table(tested, "--group")
    assert [(row["n"], row["test/accuracy_n"]) for row in rows] == [("3", "2"), ("3", "3")]


def test_a_table_of_80_columns_leaves_out_the_other_metrics_first(tested: Path):
    lines = runs(tested, "--group").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [lines[number].split() for number in (1, 2, 3)] == [
        ["width", "mean", "std", "n", "test/", "test/", "test/", "test/", "state"],
        ["accuracy_", "accuracy_", "loss_", "loss_"],
        ["mean", "std", "mean", "std"],
    ]


def test_what_is_not_shown_takes_a_few_lines(tested: Path):
    """Mean, deviation and number of a metric are one name. A list that is too long is cut at its end."""
    for number, path in enumerate(sorted(tested.iterdir())):
        evaluate(path, **{f"metric_{i}": number / 7 for i in range(11 if number else 10)})
    *_, first, last = runs(tested, "--group").stdout.splitlines()
    assert "  " not in first and f"{first} {last}".endswith(", ".join(f"test/metric_{i}_*" for i in range(9, 11)))
    for number, path in enumerate(sorted(tested.iterdir())):
        evaluate(path, **{f"metric_with_a_long_name_{i}": number / 7 for i in range(30)})
    lines = runs(tested, "--group").stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("not shown"))
    assert len(lines) - start <= 4 and lines[-1].endswith(" …")


def test_another_split_or_checkpoint_is_in_the_name(tested: Path):
    path = tested / "20260101-000000-x"
    evaluate(path, "val_best", accuracy=0.1)
    evaluate(path, "test_step-00000030", step=30, accuracy=0.2)
    (row, *others) = table(tested)
    assert row["val/accuracy"] == "0.1" and row["test_step-00000030/accuracy"] == "0.2"
    assert {other["val/accuracy"] for other in others} == {""}


def test_a_checkpoint_that_is_no_longer_the_best_does_not_count(tested: Path):
    """The run went on after its test."""
    change_summary(tested / "20260101-000000-x", best_step=30)
    assert [bool(row["test/accuracy"]) for row in table(tested)] == [False] + [True] * 5


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"step": 20, "results": 3}'])
def test_a_damaged_test_does_not_hide_the_others(text: str, tested: Path):
    (tested / "20260101-000000-x" / "test_test_best.json").write_text(text)
    done = runs(tested, "--group --format csv")
    assert "20260101-000000-x/test_test_best.json is damaged: " in done.stderr and "Traceback" not in done.stderr
    assert [bool(row["test/accuracy"]) for row in table(tested)] == [False] + [True] * 5


def test_a_real_test(finished: Path, tmp_path: Path):
    path = Path(shutil.copytree(finished, tmp_path / finished.name))
    call(f"test.py --accelerator cpu --out_dir {path}/", tmp_path)
    call(f"test.py --accelerator cpu --out_dir {path} --split val --checkpoint last", tmp_path)
    (row,) = table(tmp_path)
    found = json.loads((path / "test_test_best.json").read_text())["results"]
    assert float(row["test/accuracy"]) == found["accuracy"] and float(row["test/loss"]) == found["loss"]
    assert f"val_step-{int(row['step']):08}/loss" in row


# ---- two groups of runs


def pairs(folder: Path, ours: list[float], theirs: list[float], **options) -> list[str]:
    """What `--compare` prints about runs with these best values, of the seeds 0, 1, ... each."""
    for number, value in enumerate(ours):
        make(folder, number, [value], seed=number, width=32, **options)
    for number, value in enumerate(theirs):
        make(folder, 100 + number, [value], seed=number, width=64, **options)
    return runs(folder, "--compare width=32 width=64").stdout.splitlines()


OURS, THEIRS = [0.90, 0.80, 0.95, 0.85], [0.92, 0.81, 0.98, 0.87]  # differ by 0.02, 0.01, 0.03, 0.02


def test_compare_a_difference_that_is_distinguishable(tmp_path: Path):
    """Although the seeds differ much more than the groups. The interval is that of SciPy's paired t-test."""
    lines = pairs(tmp_path, OURS, THEIRS)
    assert lines[:2] == ["best: max val/accuracy", "seed  A     B     B - A"]
    assert lines[2] == "0     0.9   0.92  0.02"
    low, high = ttest_rel(THEIRS, OURS).confidence_interval(0.95)
    assert lines[6:] == [
        f"B - A: 0.02 on average, 95 % interval {low:.3g} to {high:.3g}, 4 pairs",
        "distinguishable: B is better",
    ]


def test_compare_a_value_whose_smallest_is_best(tmp_path: Path):
    lines = pairs(tmp_path, OURS, THEIRS, monitor="val/loss", monitor_mode="min")
    assert lines[-1] == "distinguishable: A is better"


def test_compare_says_how_many_more_pairs_would_settle_it(tmp_path: Path):
    """In a simulation with so many pairs, four of five cases are distinguishable."""
    theirs = [0.93, 0.79, 0.97, 0.84]
    last = pairs(tmp_path, OURS, theirs)[-1]
    words = "it would be, in four of five cases, if difference and spread stay as they are"
    more = int(re.fullmatch(rf"not distinguishable; with about (\d+) more pairs {words}", last)[1])
    differences = np.subtract(theirs, OURS)
    noise = np.random.default_rng(0).normal(size=(20000, 4 + more))
    drawn = differences.mean() + differences.std(ddof=1) * noise
    assert np.mean(ttest_1samp(drawn, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.02)


def test_compare_what_no_number_of_pairs_settles(tmp_path: Path):
    assert pairs(tmp_path, [0.9, 0.8], [0.8, 0.9])[-1].startswith("not distinguishable; with 1000 more pairs or more ")


def test_compare_with_one_more_pair(tmp_path: Path):
    last = pairs(tmp_path, [0.5, 0.5], [0.51, 0.5125])[-1]
    assert last.startswith("not distinguishable; with about 1 more pair it would be, ")


@pytest.mark.parametrize("theirs", [[0.91, 0.81, 0.96, 0.86], OURS])
def test_compare_differences_that_are_all_the_same(theirs: list[float], tmp_path: Path):
    """As of an accuracy on few samples: two equal differences are no proof."""
    assert pairs(tmp_path, OURS, theirs)[-1].startswith("not distinguishable: the differences are all the same")


def test_compare_pairs_what_is_finished(tmp_path: Path):
    """By seed and fold, in any order; by names as well as by filters. What has no partner does not count."""
    for number in range(12):
        value = [0.5, 0.6, 0.7, 0.8, 0.9, 0.4][number % 6] + (number // 6) * (0.1 + number / 1000)
        path = make(tmp_path, number if number < 6 else 20 - number, [value], seed=number % 3, fold=number % 6 // 3)
        path.rename(path.with_name(f"{path.name[:16]}{('base', 'wide')[number // 6]}"))
    lines = runs(tmp_path, "--compare base wide").stdout.splitlines()
    assert lines[1] == "seed  fold  A    B      B - A"
    assert lines[2] == "0     0     0.5  0.606  0.106"
    assert ", 6 pairs" in lines[8]
    change_summary(tmp_path / "20260101-000014-wide", state="failed")
    shutil.rmtree(tmp_path / "20260101-000001-base")
    lines = runs(tmp_path, "--compare run=*-base run=*-wide").stdout.splitlines()
    assert lines[0] == "left out: 20260101-000014-wide, failed"
    assert ", 4 pairs" in lines[7]


@pytest.mark.parametrize("groups", ["width=32 width=64", "width<64 width>=64", "base wide"])
def test_compare_pairs_by_the_other_options_that_were_searched(groups: str, tmp_path: Path):
    """Here the difference is small beside that between the learning rates. What does not change what is learned, as the
    number of workers, makes no other pair."""
    for number in range(8):
        is_wide, seed, lr = number // 4, number % 2, (0.1, 0.2)[number // 2 % 2]
        value = 0.5 + lr + seed / 10 + is_wide * (0.01 + number / 10000)
        path = make(tmp_path, number, [value], seed=seed, width=(32, 64)[is_wide], base_lr=lr, num_workers=number)
        path.rename(path.with_name(f"{path.name[:16]}{('base', 'wide')[is_wide]}-{number}"))
    lines = runs(tmp_path, f"--compare {groups}").stdout.splitlines()
    assert lines[1].split() == ["seed", "base_lr", "A", "B", "B", "-", "A"]
    assert [line.split()[:2] for line in lines[2:6]] == [["0", "0.1"], ["1", "0.1"], ["0", "0.2"], ["1", "0.2"]]
    assert lines[6].startswith("B - A: 0.0106 on average, ") and lines[6].endswith(", 4 pairs")
    assert lines[7] == "distinguishable: B is better"


def test_compare_two_runs_of_a_seed_or_one_pair_is_a_mistake(sweep: Path):
    both = runs(sweep, "--compare width=32 val=7", code=2)
    assert "val=7: no such column" in both.stderr
    error = runs(sweep, "--compare 2026 width=64", code=2).stderr
    assert error.endswith(
        "20260101-000000-x and 20260101-000003-x have the same seed; keep one of them, as by --filter width=32\n"
    )
    error = runs(sweep, "--filter seed=1 --compare width=32 width=64", code=2).stderr
    assert "needs two pairs or more of finished runs, alike in seed; found 1" in error
    make(sweep, 6, [0.5], seed=0, width=128, monitor="val/loss", monitor_mode="min")
    make(sweep, 7, [0.5], seed=1, width=128, monitor="val/loss", monitor_mode="min")
    assert "do not monitor the same value" in runs(sweep, "--compare width=32 width=128", code=2).stderr


def test_compare_says_how_one_of_two_equal_runs_is_kept(tmp_path: Path):
    for number in range(6):
        make(tmp_path, number, [number / 10], seed=number % 2, width=(32, 64, 32)[number // 2])
    command = "--compare width=32 width=64"
    kept = ""
    for number in range(2):
        newer = f"20260101-{number + 4:06}-x"
        error = runs(tmp_path, command + kept, code=2).stderr
        assert error.endswith(f"-x and {newer} have the same seed; keep one of them, as by --filter 'run!={newer}'\n")
        kept += f" --filter run!={newer}"
    assert ", 2 pairs" in runs(tmp_path, command + kept).stdout


# ---- mistakes, speed, and a real run

MISTAKES = (
    "--sort colour",
    "--filter colour=red",
    "--filter width",
    "--filter width=7",
    "--filter width>many",
    "--filter run>=5",
    "--columns seed colour",
    "--format pdf",
    "--compare width=32",
    "--colour",
    "--diff 000000",
    "--diff 000000 nine",
    "--diff 000000 2026",
    "../nowhere",
)


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line(options: str, sweep: Path):
    done = runs(sweep, options, code=2)
    assert done.stderr.startswith("runs.py: error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_no_run_and_no_directory(tmp_path: Path):
    assert "no run in it" in runs(tmp_path, code=2).stderr


def test_200_runs_within_a_second_and_without_torch(tmp_path: Path):
    for number in range(200):
        make(tmp_path, number, [i / 100 for i in range(100)], seed=number)
        with open(tmp_path / f"20260101-{number:06}-x" / "config.yaml", "a") as file:
            file.writelines(f"option_{i}: {i}\n" for i in range(45))
    code = "import runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = sys.argv[0].removesuffix('runs.py')\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit: assert 'torch' not in sys.modules; raise"
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, REPO / "tools" / "runs.py", tmp_path, "--sort", "best"],
                          capture_output=True, text=True)  # fmt: skip
    after = getrusage(RUSAGE_CHILDREN)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 202, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1  # of CPU time


def test_a_real_run(finished: Path):
    (row,) = table(finished)
    summary = json.loads((finished / "summary.json").read_text())
    found = float(row["best"]), int(row["best_step"]), int(row["step"]), row["state"]
    assert found == (summary["best"], summary["best_step"], summary["step"], "finished")
    assert float(row["time"]) == summary["seconds"] > 0
    assert "code" in runs(finished.parent, f"--diff {finished.name} {finished.name}").stdout
