"""tools/runs.py, on run directories that are written here, and on a real one."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import mean, stdev

import numpy as np
import pytest
import yaml
from edits import copy_programs, insert_after
from helpers import REPO, SMALL, call, run_dir, start
from mistakes import refuses
from scipy.stats import ttest_1samp, ttest_rel

OPTIONS = {"out_dir": "x", "seed": 0, "width": 32, "logger_name": ["csv"], "effective_batch_size": 100,
           "monitor": "val/accuracy", "monitor_mode": "max"}  # fmt: skip
LOSS = {"monitor": "val/loss", "monitor_mode": "min"}
HOLD_LOCK = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def make(folder: Path, number: int, values: list[float], finished: bool = True, name: str = "x", **options) -> Path:
    """A run that has validated and logged every tenth step, which took half a second."""
    (path := folder / f"20260101-{number:06}-{name}").mkdir()
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


def evaluate(path: Path, name: str = "test_best", step: int | None = None, **results) -> None:
    """Writes what test.py does: name is the split and the checkpoint."""
    best_step = json.loads((path / "summary.json").read_text())["best_step"]
    about = {"step": best_step if step is None else step, "results": results}
    (path / f"test_{name}.json").write_text(json.dumps(about))


def runs(folder: Path, options: str = "", columns: int = 80) -> subprocess.CompletedProcess:
    """What runs.py prints on a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return call(f"tools/runs.py {folder} {options}", folder)


def lines_of(folder: Path, options: str = "", columns: int = 80) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in runs(folder, options, columns).stdout.splitlines()]


def runs_of(*words: str) -> str:
    """What runs.py prints, given words that may have spaces in them."""
    return subprocess.check_output([sys.executable, REPO / "tools" / "runs.py", *words], text=True)


def table(folder: Path, options: str = "") -> list[dict]:
    return list(csv.DictReader(io.StringIO(runs(folder, f"{options} --format csv").stdout)))


def column(folder: Path, name: str, options: str = "") -> list[str]:
    return [row[name] for row in table(folder, options)]


def numbers(folder: Path, options: str = "") -> str:
    """The last digits of the times of the runs."""
    return "".join(name[14] for name in column(folder, "run", options))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two widths, three seeds of each."""
    for number in range(6):
        make(tmp_path, number, [0.5, 0.9 + number / 100, 0.7], seed=number % 3, width=(32, 64)[number // 3])
    return tmp_path


@pytest.fixture
def tested(sweep: Path) -> Path:
    """Those runs, evaluated; the accuracy has as many digits as float32."""
    for number, path in enumerate(sorted(sweep.iterdir())):
        evaluate(path, loss=1 - number / 10, accuracy=0.8 + number / 81, per_class=[0.5, 0.9], confusion=None)
    return sweep


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Two hundred runs of a search, which differ in ten options; four begin in the same second."""
    for number in range(200):
        options = {f"option_number_{i}": f"{1 / (number + i + 2):.17g}" for i in range(9)}
        name = f"x-width={number:03}-and-many-other-options-that-make-it-long"
        make(tmp_path, number // 4, [0.5, 1 - 1 / (number + 2)], name=name, width=number, **options)
    return tmp_path


# ---- rows and columns


def test_a_row_has_the_options_that_differ_and_the_results(sweep: Path):
    rows = table(sweep)
    assert [*rows[0]] == ["run", "seed", "width", "best", "best_step", "step", "time", "state"]
    assert [*rows[4].values()][:6] == ["20260101-000004-x", "1", "64", "0.9400000000000001", "20", "30"]
    assert float(rows[4]["time"]) == pytest.approx(1.5)
    lines = lines_of(sweep)
    assert " ".join(lines[0]) == "best: max val/accuracy" and len(lines) == 8
    assert lines[6] == ["20260101-000004-x", "1", "64", "0.94", "20", "30", "0:00:01", "finished"]


def test_the_state_of_a_run(tmp_path: Path):
    """A resume that is under way counts as running, also where the run was finished or had failed before. A run whose
    summary says `running`, but that holds no lock, was killed. A young run has no summary yet."""
    paths = [make(tmp_path, number, [0.5], finished=number in (2, 3)) for number in range(6)]
    for path in paths[4:]:
        change_summary(path, state="failed")
    (paths[0] / "model.pt").touch()  # of a finish before: the run was made longer, and killed
    held = [subprocess.Popen([sys.executable, "-c", HOLD_LOCK, paths[number] / ".lock"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE) for number in (1, 3, 5)]  # fmt: skip
    try:
        assert all(process.stdout.readline() for process in held)
        states = ["interrupted", "running", "finished", "running", "failed", "running"]
        assert column(tmp_path, "state") == states
        assert all(process.poll() is None for process in held)
    finally:
        for process in held:
            process.communicate(b"\n")
    assert column(tmp_path, "state") == ["interrupted"] * 2 + ["finished"] * 2 + ["failed"] * 2
    assert numbers(tmp_path, "--filter state=failed") == "45"
    (paths[0] / "summary.json").unlink()
    name, *results, state = lines_of(tmp_path)[2]
    assert (name, {*results}, state) == ("20260101-000000-x", {"-"}, "interrupted")
    assert runs(tmp_path).stderr == ""


def test_what_is_no_option_is_shown_where_it_differs(tmp_path: Path):
    """However narrow the table is: the best values of different metrics cannot be compared."""
    name = "x-with-a-name-that-fills-more-than-the-terminal-of-80-columns"
    paths = [make(tmp_path, number, [0.5], name=name, width=number) for number in range(2)]
    assert not {"parameters", "monitor"} & {*table(tmp_path)[0]}
    change_summary(paths[1], parameters=2000)
    assert column(tmp_path, "parameters") == ["1000", "2000"]
    assert numbers(tmp_path, "--filter parameters=2000") == "1"
    assert ["parameters", "1000", "2000"] in lines_of(tmp_path, "--diff 000000 000001")
    shutil.rmtree(paths[1])
    make(tmp_path, 1, [0.5], name=name, width=1, **LOSS)
    assert all("monitor" in lines_of(tmp_path, option)[1] for option in ("", "--group"))
    assert "monitor" not in runs(tmp_path, "--filter width=0").stdout


STEPS = {"epochs": "max_steps", "log_per_epoch": "log_interval", "val_frequency": "val_interval",
         "checkpoint_frequency": "checkpoint_interval"}  # fmt: skip


@pytest.mark.parametrize("name, steps", STEPS.items())
def test_what_counts_steps_takes_the_place_of_what_counts_epochs(name: str, steps: str, tmp_path: Path):
    """The one of the two that has no effect is not there."""
    for number, (epochs, count) in enumerate([(20.0, 0), (25.0, 0), (20.0, 3), (25.0, 3)]):
        make(tmp_path, number, [0.5], **{name: epochs, steps: count})
    assert [(row[name], row[steps]) for row in table(tmp_path)] == [("20.0", ""), ("25.0", ""), ("", "3"), ("", "3")]
    assert name not in table(tmp_path, f"--filter {name}!=25")[0]
    lines = lines_of(tmp_path, "--diff 000000 000002")
    assert [name, "20.0", "-"] in lines and [steps, "-", "3"] in lines
    assert steps not in runs(tmp_path, "--diff 000000 000001").stdout
    assert lines_of(tmp_path, "--diff 000002 000003")[1] == ["all", "the", "same"]


def test_sorted_filtered_and_chosen_columns(sweep: Path):
    for words, expected in {
        "--sort best": "543210", "--sort seed": "031425", "--filter width=64.0 --filter seed=1": "4",
        "--filter run=*0004-* state=finished": "4", "--filter width>=64 seed<1": "3", "--filter width<=32 seed>0": "12",
        "--filter seed!=1 best>0.93": "5", "--filter run!=*-00000[1-5]-*": "0", "--filter time>=1.5 state=f*": "012345",
    }.items():  # fmt: skip
        assert numbers(sweep, words) == expected
    assert [*table(sweep, "--columns best width")[0].items()] == [("best", "0.9"), ("width", "32")]
    chosen = table(sweep, "--columns seed effective_batch_size parameters --sort best")[0]
    assert [*chosen.values()] == ["2", "100", "1000"]
    assert "not shown" not in runs(sweep, "--columns run best_step", columns=20).stdout
    assert lines_of(sweep, "--group --columns width n")[1:] == [["width", "n"], ["32", "3"], ["64", "3"]]
    make(sweep, 9, [9.0, 0.1], width=10, **LOSS)
    assert column(sweep, "best", "--filter monitor=val/loss") == ["0.1"]


def test_the_last_values_are_columns_when_they_are_asked_for(tmp_path: Path):
    """The monitored one is `best`."""
    for number in range(4):
        path = make(tmp_path, number, [0.9, 0.5 + number / 10], seed=number, monitor="val/mase", monitor_mode="min")
        last = {"lr": 0.1, "val/mase": 0.5 + number / 10, "val/loss": 3 - number, "train/loss": None}
        change_summary(path, last=last)
    assert not [name for name in table(tmp_path)[0] if "/" in name]
    assert numbers(tmp_path, "--sort val/mase") == "0123" and numbers(tmp_path, "--filter val/mase>=0.7") == "23"
    assert column(tmp_path, "val/loss", "--sort val/loss") == [*"0123"]
    assert column(tmp_path, "seed", "--columns seed --filter val/loss=2") == ["1"]
    assert [*table(tmp_path, "--columns run val/mase")[0]] == ["run", "best"]
    assert [*table(tmp_path, "--columns run val/loss")[0]] == ["run", "val/loss"]
    (row,) = table(tmp_path, "--group --sort val/loss_mean --filter val/loss_mean=1.5")
    assert row["val/loss_mean"] == "1.5" and row["n"] == "4"
    assert [*table(tmp_path, "--group --columns val/mase n --sort val/mase")[0]] == ["mean", "n"]
    assert "val/loss" not in runs(tmp_path, "--diff 000000 000001").stdout
    for words, meant in {"--columns al/loss": "val/loss?", "--group --sort val/loss": "val/loss_mean"}.items():
        refuses(f"tools/runs.py {tmp_path} {words}", tmp_path, meant)


def test_fractions_have_four_digits_but_in_csv_and_diff(tmp_path: Path):
    for number in range(2):
        make(tmp_path, number, [0.5], base_lr=0.012345678 + number / 10**6)
    assert [line[1] for line in lines_of(tmp_path)[2:]] == ["0.01235", "0.01235"]
    assert column(tmp_path, "base_lr") == ["0.012345678", "0.012346678"]
    assert ["base_lr", "0.012345678", "0.012346678"] in lines_of(tmp_path, "--diff 000000 000001")


DAMAGE = {
    "config.yaml": ["", "a: [", "- list", "a: [[b], {c: d}]",
                    "width: 64\nmonitor: val/accuracy\neffective_batch_size: many"],
    "summary.json": ["", '{"step": 3', "[1]", "\0\0\0", '{"step": "x"}'],
    "test_test_best.json": ["", "[1]", "{}", '{"step": 20, "results": 3}'],
}  # fmt: skip


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_file_does_not_hide_the_other_runs(name: str, text: str, tested: Path):
    (tested / "20260101-000002-x" / name).write_text(text)
    done = runs(tested, "--format csv")
    assert len(done.stdout.splitlines()) == 7
    assert re.search("20260101-000004-x,1,64,.*0.94", done.stdout)
    is_yaml = text.endswith(("{c: d}]", "many"))
    assert done.stderr.count("\n") == done.stderr.startswith(f"{tested}/20260101-000002-x/{name} ") == (not is_yaml)
    runs(tested, "--group --sort mean")
    if name.startswith("test"):
        assert [bool(value) for value in column(tested, "test/accuracy")] == [True, True, False] + [True] * 3


# ---- groups


def test_grouped_over_seeds_and_folds(sweep: Path):
    rows = table(sweep, "--group")
    assert [*rows[0]] == ["width", "mean", "std", "n", "state"]
    assert [row["width"] for row in rows] == ["32", "64"]
    assert float(rows[1]["mean"]) == pytest.approx(mean([0.93, 0.94, 0.95]))
    assert float(rows[1]["std"]) == pytest.approx(stdev([0.93, 0.94, 0.95]))
    assert (rows[1]["n"], rows[1]["state"]) == ("3", "3 finished")
    change_summary(sweep / "20260101-000005-x", state="running")
    assert column(sweep, "state", "--group")[1] == "2 finished, 1 interrupted"
    (folds := sweep / "folds").mkdir()
    for number in range(8):
        make(folds, number, [number / 10], seed=number % 2, fold=number // 2 % 2, width=number // 4)
    assert [(row["width"], row["n"]) for row in table(folds, "--group")] == [("0", "4"), ("1", "4")]


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
    lines = lines_of(tmp_path, "--group", columns=20)
    assert lines[1] == ["mean", "std", "n", "repeated", "state"] and lines[-1][0] == "repeated:"
    assert "repeated" not in runs(tmp_path, "--group --filter seed=1").stdout


def with_code(path: Path, versions: dict[str, str], name: str = "train.py") -> None:
    """Makes the folders in which a run keeps the versions of its code, with a file each."""
    for version, text in versions.items():
        file = path / "provenance" / f"code-{version}" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)


def test_runs_of_other_code_are_another_group(tmp_path: Path):
    """The code of a run are all versions with which it has trained. A run that has kept none may be of any. Versions
    that differ in tests, recipes and benchmarks alone have the first of the names."""
    (first := tmp_path / "first").mkdir()
    for number, versions in enumerate([("12e45678",), ("12e45678",), ("aaaaaaaa",), ("aaaaaaaa", "12e45678"), ()]):
        with_code(make(first, number, [0.5], seed=number), {version: version for version in versions})
    (first / "20260101-000000-x" / "provenance" / "code-bbbbbbbb.tmp").mkdir()  # left by a kill
    codes = ["code-12e45678", "code-aaaaaaaa", "code-12e45678,code-aaaaaaaa", ""]
    assert column(first, "code") == [codes[0], *codes]
    assert column(first, "code", "--group") == codes and column(first, "n", "--group") == ["2", "1", "1", "1"]
    assert "code: 4 versions; " in runs(first, columns=40).stdout
    assert "code" not in table(first, "--filter code=code-12e45678")[0]
    (second := tmp_path / "second").mkdir()
    names = ("x.py", "tests/x.py", "recipes/methods/x.py", "benchmarks/x.py", "x.py")
    for number, (version, name) in enumerate(zip("cbade", names, strict=True)):
        path = make(second, number, [0.5], seed=number)
        with_code(path, {version * 8: version}, name)
        (path / "provenance" / f"code-{version * 8}" / "train.py").write_text("same")
    assert column(second, "code") == ["code-cccccccc", *["code-bbbbbbbb"] * 3, "code-eeeeeeee"]
    assert column(second, "n", "--group") == ["1", "3", "1"]
    assert numbers(second, "--filter code=code-bbbbbbbb") == "123"


def test_the_code_of_real_runs_and_what_differs_in_it(program: Path, cwd: Path):
    """Trained twice, then after an edit of a test, then with a new file. One is resumed with it."""
    command = f"{copy_programs(program)}/train.py {SMALL} --epochs 1"
    for name in "abd":
        call(f"{command} --out_dir {name}", cwd)
        (program / "tests").mkdir(exist_ok=True)
        (program / "tests" / "of_mine.py").write_text(f"# {name}\n")
    assert len([*cwd.glob("*-[ad]/provenance/code-*")]) == 2
    assert column(cwd, "repeated", "--group") == ["2"]
    shutil.rmtree(run_dir(cwd, "d"))
    insert_after(program, "batch", "import mine")
    (program / "mine.py").write_text("x = 1\n")
    call(f"{program}/train.py --resume b --epochs 2", cwd)
    call(f"{command} --out_dir c --seed 3", cwd)
    before, both, after = column(cwd, "code")
    assert before != after and both == ",".join(sorted([before, after])) and len(table(cwd, "--group")) == 3

    text = runs(cwd, "--diff a c").stdout
    assert re.search(r"^seed +42 +3$", text, re.MULTILINE) and "package\nall the same\n" in text
    lines = text.partition("\ncode\n")[2].splitlines()
    assert lines[:4] == ["--- A/mine.py", "+++ B/mine.py", "@@ -0,0 +1 @@", "+x = 1"]
    assert lines[4:6] == ["--- A/train.py", "+++ B/train.py"]
    assert [line for line in lines[6:] if line[0] in "+-"] == ["+    import mine"]
    for number in (2, 1):  # of a run that was resumed with other code, the newest counts: at last that of before
        (program / "mine.py").write_text(f"x = {number}\n")
        call(f"{program}/train.py --resume c --epochs {4 - number}", cwd)
        if number == 2:
            *earlier, newest = sorted(cwd.glob("*-c/provenance/*.txt"))  # those of one second are in one file
            newest.write_text("".join(path.read_text() for path in (*earlier, newest)))
        assert f"+x = {number}" in runs(cwd, "--diff a c").stdout.splitlines()
    assert runs(cwd, "--diff c c").stdout.endswith("\ncode\nall the same\n")


# ---- a table that fits the terminal


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
    assert "option_number_8" in last and "--wide" in last and "--columns" in last


def test_a_wide_table_has_all_columns_whole(many: Path):
    lines = lines_of(many, "--wide")
    assert len(lines) == 202 and lines[-1][0] == "20260101-000049-x-width=199-and-many-other-options-that-make-it-long"
    names = ["run", "width", *(f"option_number_{i}" for i in range(9)), "best", "best_step", "step", "time", "state"]
    assert lines[1] == names


def test_the_name_that_the_user_gave_is_broken_and_not_cut(tmp_path: Path):
    """The time is left out where the names differ without it. Where they do not, it tells the runs from each other."""
    name = "a-name-of-more-than-sixty-characters-that-no-terminal-of-so-few-has-room-for"
    paths = [make(tmp_path, number, [0.5], name=name) for number in range(2)]
    lines = runs(tmp_path, columns=60).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    end = next(number for number, line in enumerate(lines) if line.startswith("not shown"))
    assert "".join(line.split()[0] for line in lines[2:end]) == "".join(path.name for path in paths)
    paths[1].rename(f"{paths[1]}s")
    text = runs(tmp_path, columns=95).stdout
    assert f"\n{name}   " in text and f"\n{name}s  " in text and "20260101" not in text


def test_options_stay_longer_than_parent_and_code(tmp_path: Path):
    """The time is left on the names that collide alone. A line says that the code differs where it is not shown."""
    for number in range(16):
        lr, decay = f"{1 / (number + 3):.17g}", f"{1 / (number + 70):.17g}"
        name = "same" if number < 2 else f"lr={float(lr):.6}"
        options = {"base_lr": lr, "weight_decay": decay, "seed": number}
        path = make(tmp_path, number, [0.87654321 + number / 100], name=name, **options)
        with_code(path, {f"{number:08}": f"{number}"})
        parent = {"path": "a/20260101-000000-same/checkpoints/best.ckpt", "step": number}
        (path / "provenance" / "parent.json").write_text(json.dumps(parent))
    _, titles, *rows = lines_of(tmp_path, columns=70)
    assert titles == ["run", "seed", "base_", "weight_", "best", "state"]
    assert [row[0] for row in rows[1:4]] == ["20260101-000000-same", "20260101-000001-same", "lr=0.2"]
    assert rows[-1][:3] == ["code:", "16", "versions;"]
    for words in ("--wide", "--filter seed=1"):
        assert "versions;" not in runs(tmp_path, words).stdout
    assert lines_of(tmp_path, "--group --columns mean")[-1] == rows[-1]


def test_options_that_do_not_change_what_is_learned_are_left_out_first(tmp_path: Path):
    """What is searched stays, and seed and precision, which stand among the others, too."""
    counts = ("devices", "num_threads", "num_workers", "num_checkpoint_keep", "log_interval")
    texts = ("comment", "project", "accelerator", "data_dir", "logger_name")
    for number in range(4):
        minor = dict.fromkeys(counts, number) | {name: f"{name}-{number}" for name in texts}
        searched = {"base_lr": f"{number / 7}", "weight_decay": f"{number / 9}", "mine": number}
        options = {"precision": f"bf{number}-mixed"} | minor | searched
        change_summary(make(tmp_path, number, [0.5], name=f"x{number}", seed=number, **options), parameters=number)
    titles = ["run", "seed", "precision", "base_", "weight_", "mine", "best", "state"]
    assert lines_of(tmp_path, columns=64)[1] == titles
    assert {*minor, *searched} < {*table(tmp_path)[0]}


@pytest.mark.parametrize("command, lines", [("--wide", 1), ("", 0)])
def test_a_reader_that_has_seen_enough(command: str, lines: int, many: Path):
    """As `| head -1`; or it has gone before a short table is written at the end."""
    for path in [] if lines else sorted(many.iterdir())[1:]:
        shutil.rmtree(path)
    process = start(f"tools/runs.py {many} {command}", many)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0


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


def test_plot_with_many_options_in_the_legend_cuts_none(many: Path, monkeypatch: pytest.MonkeyPatch):
    _, figure = drawn(many, monkeypatch)
    (legend,) = figure.legends
    first = legend.get_texts()[0].get_text()
    assert " ".join(first.split()).startswith("width 199, option_number_0 0.004975, ")
    assert first.count("option_number_") == 9
    for box in [legend.get_window_extent(), *(text.get_window_extent() for text in legend.get_texts())]:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0 < box.y1
    assert legend.get_window_extent().y1 < min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200  # of 400 without a legend


def test_plot_in_the_terminal(tmp_path: Path):
    """A panel of 16 lines for each value. The marks of a run are its place: a better one stands above it."""
    pytest.importorskip("plotext")
    for number in range(12):
        make(tmp_path, number, [0.1 + number / 20] * 5, seed=number)
    lines = runs(tmp_path, "--plot", columns=70).stdout.splitlines()
    assert max(map(len, lines)) <= 70 and "\x1b" not in "".join(lines)
    assert [lines[place].strip() for place in (0, 17, 34)] == ["train/loss", "val/loss", "val/accuracy"]
    assert lines[51:] == [*(f"{place}  seed {11 - place}" for place in range(10)), "the 10 best of 12 runs"]
    found = [re.split("[│┤]", line)[1] for line in lines[36:47]]
    assert "".join(mark for line in found for mark in sorted({*line} - {" "})) == "0123456789"


def test_plot_of_a_row_that_is_cut(tmp_path: Path):
    """The last row may be just being written; a damaged one is not drawn."""
    pytest.importorskip("plotext")
    path = make(tmp_path, 0, [0.5, 0.6])
    with open(path / "logs" / "csv" / "metrics.csv", "a") as file:
        file.write("x,,\n30,0.1,1000.0,1,1,9")  # of 0.9
    lines = runs(tmp_path, "--plot").stdout.splitlines()
    assert [line.split()[-1] for line in (lines[14], lines[48])] == ["20.0", "20.0"]
    assert lines[36].startswith("0.600") and lines[46].startswith("0.500")


@pytest.mark.parametrize("option, package", [("--plot", "plotext"), ("--plot curves.png", "matplotlib")])
def test_plot_that_cannot_be_says_so(option: str, package: str, sweep: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the package, without values, or as an unknown kind of picture."""
    if package == "matplotlib" and find_spec(package):
        refuses(f"tools/runs.py {sweep} --plot curves.xyz", sweep, "--plot", "curves.xyz")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks a module that is not to be found
    refuses(f"tools/runs.py {sweep} {option}", sweep, "--plot", package)
    for path in sweep.glob("*/logs/csv/metrics.csv"):
        path.unlink()
    refuses(f"tools/runs.py {sweep} {option}", sweep, "--plot", "metrics.csv")


# ---- two runs


def test_diff(tmp_path: Path):
    """Options, results and packages; the packages are those that rundir.py names. The best value and the metrics come
    before the parts of the loss, which are logged of the training, too, and the time of the run comes last."""
    for number, version in enumerate(("1.0", "1.1")):
        path = make(tmp_path, number, [0.5 + number / 10], seed=number)
        (folder := path / "provenance").mkdir()
        head = "python train.py\n1 x cpu on host\nPython 3.11.9 on Linux\nsource files in code-01234567\n"
        git = f"# branch.oid {'a' * 40}\n1 .M N... train.py\n? mine-{version}\n"
        (folder / "20260101-000000.txt").write_text(f"{head}same-1.0\nsome_pack-{version}\n{git}")
        last = {f"train/{name}": 1.0 for name in ("loss", "loss_of_edges", "grad_norm")}
        change_summary(path, last=last, seconds=10.0 + number)
        evaluate(path, loss=number, loss_of_edges=number, f1=number, accuracy=number)
    lines = lines_of(tmp_path, "--diff 000000 20260101-000001-x")
    for line in ("value A B", "seed 0 1", "best 0.5 0.6", "package A B", "some_pack 1.0 1.1", "not kept"):
        assert line.split() in lines
    assert not {"same", "logger_name", "step", "run", "path", "?"} & {line[0] for line in lines if line}
    text = runs(tmp_path, "--diff 000000 seed=0").stdout
    assert text == "value\nall the same\n\npackage\nall the same\n\ncode\nnot kept\n"
    expected = ["test/accuracy", "test/f1", "test/loss", "test/loss_of_edges"]
    assert [name for name in table(tmp_path)[0] if "/" in name] == expected
    assert [line[0] for line in lines[: lines.index([])]] == ["value", "seed", "best", *expected, "time"]


# ---- what is shown is accepted

NAMES = ("base", "base-2", "lr=0.1", "width=4-seed=1", "width=4-seed=10", "of[1]", "on 2 gpus")


def named(folder: Path, *names: str) -> list[str]:
    """Makes runs of these names, which differ in width, and returns the full ones."""
    return [make(folder, number, [0.5], width=number, name=name).name for number, name in enumerate(names)]


@pytest.mark.parametrize("number, name", [*enumerate(NAMES)])
def test_a_name_is_accepted_as_it_is_shown(number: int, name: str, tmp_path: Path):
    """With the time and without it, also where it is the beginning of another one, and where it looks like a filter."""
    full = named(tmp_path, *NAMES)[number]
    for text in (name, full, f"{tmp_path / full}/"):
        words = [f"{tmp_path}", "--columns", "run", "--format", "csv", "--filter"]
        for filter in (text, f"run={text}"):
            assert runs_of(*words, filter).splitlines()[1:] == [full]
        assert full not in runs_of(*words, f"run!={text}")
        assert runs_of(f"{tmp_path}", "--diff", text, full).startswith("value\nall the same\n")


def test_each_line_of_a_name_that_is_broken_is_accepted(tmp_path: Path):
    name = "-".join(f"option{number}=0.{number}" for number in range(7))
    full, _ = named(tmp_path, name, name.replace("=", "=1"))
    *lines, end = [line[0] for line in lines_of(tmp_path)[2:] if line[0].startswith("option")]
    assert "".join([*lines, end]).startswith(name) and lines[0] != name
    for filter in (lines[0], f"run={lines[1]}"):
        assert column(tmp_path, "run", f"--filter {filter}") == [full]


def test_an_option_wins_over_a_name_that_looks_like_one(tmp_path: Path):
    """`width=4` is never a part of a name, as of `width=40`."""
    full = named(tmp_path, "width=1", "width=40", "other")
    assert column(tmp_path, "run", "--filter width=1") == [full[1]]
    for filter in ("width=4", "colour=1"):
        refuses(f"tools/runs.py {tmp_path} --filter {filter}", tmp_path, filter)


def test_a_value_that_was_cut_is_accepted(tmp_path: Path):
    """A long one loses its middle."""
    for number in range(2):
        make(tmp_path, number, [0.5], data_dir=f"/a/long/path/that/leads/to/the/data/set/number{number}")
    assert [line[1] for line in lines_of(tmp_path) if line[:1] and line[0].endswith("000000-x")] == ["/a/long…/number0"]
    assert numbers(tmp_path, "--filter data_dir=/a/long…/number1") == "1"


def test_a_value_that_was_rounded_is_accepted(tmp_path: Path):
    """Of a run and of a group, and the number of its states."""
    for number in range(4):
        value = 0.876543210 + number / 100 - number % 2 / 50
        options = {"seed": number % 2, "lr": (2.3012345, 0.8131313)[number // 2]}
        change_summary(make(tmp_path, number, [value], **options), seconds=61.5)
    for filters, expected in {"lr=2.301": "01", "lr!=2.301": "23", "best=0.87654": "0", "time=0:01:01": "0123",
                              "best<0.87654": "1"}.items():  # fmt: skip
        assert numbers(tmp_path, f"--filter {filters}") == expected
    words = (f"{tmp_path}", "--group", "--columns", "n", "--format", "csv", "--filter")
    for filters in ("mean=0.87154", "state=2 finished, lr=2.301", "std=0.0070711, lr=2.301"):
        assert runs_of(*words, *filters.split(", ")) == "n\n2\n"
    assert ", 2 pairs" in runs(tmp_path, "--compare lr=2.301 lr=0.8131").stdout


def test_a_title_that_is_broken_is_the_name_of_its_column(tmp_path: Path):
    for number in range(2):
        optim = {"base_lr": number / 10, "momentum": number / 20}
        make(tmp_path, number, [0.5], name="x-with-a-name-that-fills-much-of-a-terminal", optim=optim)
    titles = [line[25:].split() for line in runs(tmp_path, columns=110).stdout.splitlines()[1:4]]
    assert "optim." in titles[0] and "momentum" in titles[1]
    words = "--columns optim.momentum best --sort optim.momentum --filter optim.base_lr>0"
    assert lines_of(tmp_path, words)[1:] == [["optim.momentum", "best"], ["0.05", "0.5"]]


# ---- what test.py has found


def test_the_numbers_of_a_test_are_columns(tested: Path):
    """Beside the best value, and the metric that is monitored first. What has several values is left out. Another split
    or checkpoint is in the name. A checkpoint that is no longer the best does not count: the run went on."""
    assert [*table(tested)[0]][3:7] == ["best", "test/accuracy", "test/loss", "best_step"]
    assert [float(value) for value in column(tested, "test/accuracy")] == [0.8 + number / 81 for number in range(6)]
    for words, expected in {"--filter test/accuracy>0.81 width=32": "12", "--sort test/accuracy": "543210",
                            "--sort test/loss": "543210"}.items():  # fmt: skip
        assert numbers(tested, words) == expected
    assert [*table(tested, "--columns test/loss")[0].items()] == [("test/loss", "1.0")]
    assert ["test/loss", "1.0", "0.5"] in lines_of(tested, "--diff 000000 000005")
    path = tested / "20260101-000000-x"
    evaluate(path, "val_best", accuracy=0.1)
    evaluate(path, "test_step-00000030", step=30, accuracy=0.2)
    row, *others = table(tested)
    assert row["val/accuracy"] == "0.1" and row["test_step-00000030/accuracy"] == "0.2"
    assert {other["val/accuracy"] for other in others} == {""}
    change_summary(path, best_step=30)
    assert [bool(value) for value in column(tested, "test/accuracy")] == [False] + [True] * 5


def test_a_group_has_the_mean_and_deviation_of_its_tests(tested: Path):
    """Groups are filtered by their own columns, after the runs were, by theirs. The number of tests is shown where it
    is another one than that of the runs."""
    rows = table(tested, "--group --sort test/accuracy_mean")
    titles = [f"test/{metric}_{kind}" for metric in ("accuracy", "loss") for kind in ("mean", "std")]
    assert [*rows[0]] == ["width", "mean", "std", "n", *titles, "state"] and rows[0]["width"] == "64"
    values = [0.8 + number / 81 for number in range(3, 6)]
    found = [float(rows[0][f"test/accuracy_{kind}"]) for kind in ("mean", "std")]
    assert found == [mean(values), stdev(values)]
    lines = lines_of(tested, "--group --columns width test/accuracy_mean test/accuracy_std")
    assert lines[1] == ["width", *titles[:2]] and lines[3] == ["64", "0.84938", "0.012346"]
    lines = lines_of(tested, "--group")  # of 80 columns
    assert lines[1] == ["width", "mean", "std", "n", *["test/"] * 4, "state"]
    assert lines[2:4] == [["accuracy_", "accuracy_", "loss_", "loss_"], ["mean", "std", "mean", "std"]]
    (tested / "20260101-000000-x" / "test_test_best.json").unlink()
    assert [(row["n"], row["test/accuracy_n"]) for row in table(tested, "--group")] == [("3", "2"), ("3", "3")]
    shutil.rmtree(tested / "20260101-000000-x")
    for filters, expected in {"n>=3": ["64"], "n=2 mean<0.93": ["32"], "seed<2 n=1": ["32"],
                              "test/accuracy_mean>=0.84 state=finished": ["64"]}.items():  # fmt: skip
        assert column(tested, "width", f"--group --filter {filters}") == expected
    assert table(tested, "--group --filter logger_name!=a/b_n=3")


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


def test_a_real_run_and_its_tests(finished: Path, tmp_path: Path):
    path = Path(shutil.copytree(finished, tmp_path / finished.name))
    call(f"test.py --accelerator cpu --out_dir {path}/", tmp_path)
    call(f"test.py --accelerator cpu --out_dir {path} --split val --checkpoint last", tmp_path)
    (row,) = table(tmp_path)
    summary = json.loads((path / "summary.json").read_text())
    found = float(row["best"]), int(row["best_step"]), int(row["step"]), row["state"]
    assert found == (summary["best"], summary["best_step"], summary["step"], "finished")
    assert float(row["time"]) == summary["seconds"] > 0
    found = json.loads((path / "test_test_best.json").read_text())["results"]
    assert float(row["test/accuracy"]) == found["accuracy"] and float(row["test/loss"]) == found["loss"]
    assert f"val_step-{int(row['step']):08}/loss" in row
    assert "code" in runs(tmp_path, f"--diff {path.name} {path.name}").stdout


# ---- two groups of runs


def pairs(folder: Path, ours: list[float], theirs: list[float], **options) -> list[str]:
    """What `--compare` prints about runs with these best values, of the seeds 0, 1, ... each."""
    for first, width, values in ((0, 32, ours), (100, 64, theirs)):
        for number, value in enumerate(values):
            make(folder, first + number, [value], seed=number, width=width, **options)
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


@pytest.mark.parametrize(
    "ours, theirs, options, last",
    [
        (OURS, THEIRS, LOSS, "distinguishable: A is better"),
        ([0.9, 0.8], [0.8, 0.9], {}, "not distinguishable; with 1000 more pairs or more "),  # no number settles it
        ([0.5, 0.5], [0.51, 0.5125], {}, "not distinguishable; with about 1 more pair "),
        # As of an accuracy on few samples: two equal differences are no proof.
        (OURS, [0.91, 0.81, 0.96, 0.86], {}, "not distinguishable: the differences are all the same"),
        (OURS, OURS, {}, "not distinguishable: the differences are all the same"),
    ],
)
def test_what_compare_says_last(ours: list, theirs: list, options: dict, last: str, tmp_path: Path):
    assert pairs(tmp_path, ours, theirs, **options)[-1].startswith(last)


def test_compare_says_how_many_more_pairs_would_settle_it(tmp_path: Path):
    """In a simulation with so many pairs, four of five cases are distinguishable."""
    theirs = [0.93, 0.79, 0.97, 0.84]
    more = int(re.match(r"not distinguishable; with about (\d+) more pairs ", pairs(tmp_path, OURS, theirs)[-1])[1])
    differences = np.subtract(theirs, OURS)
    noise = np.random.default_rng(0).normal(size=(20000, 4 + more))
    found = differences.mean() + differences.std(ddof=1) * noise
    assert np.mean(ttest_1samp(found, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.02)


def test_compare_pairs_what_is_finished(tmp_path: Path):
    """By seed and fold, in any order; by names as well as by filters. What has no partner does not count."""
    for number in range(12):
        value = [0.5, 0.6, 0.7, 0.8, 0.9, 0.4][number % 6] + (number // 6) * (0.1 + number / 1000)
        options = {"name": ("base", "wide")[number // 6], "seed": number % 3, "fold": number % 6 // 3}
        make(tmp_path, number if number < 6 else 20 - number, [value], **options)
    lines = runs(tmp_path, "--compare base wide").stdout.splitlines()
    assert lines[1:3] == ["seed  fold  A    B      B - A", "0     0     0.5  0.606  0.106"] and ", 6 pairs" in lines[8]
    change_summary(tmp_path / "20260101-000014-wide", state="failed")
    shutil.rmtree(tmp_path / "20260101-000001-base")
    lines = runs(tmp_path, "--compare run=*-base run=*-wide").stdout.splitlines()
    assert lines[0] == "left out: 20260101-000014-wide, failed" and ", 4 pairs" in lines[7]


@pytest.mark.parametrize("groups", ["width=32 width=64", "width<64 width>=64", "base wide"])
def test_compare_pairs_by_the_other_options_that_were_searched(groups: str, tmp_path: Path):
    """Here the difference is small beside that between the learning rates. What does not change what is learned, as the
    number of workers, makes no other pair."""
    for number in range(8):
        is_wide, seed, lr = number // 4, number % 2, (0.1, 0.2)[number // 2 % 2]
        options = {"seed": seed, "width": (32, 64)[is_wide], "base_lr": lr, "num_workers": number}
        value = 0.5 + lr + seed / 10 + is_wide * (0.01 + number / 10000)
        make(tmp_path, number, [value], name=f"{('base', 'wide')[is_wide]}-{number}", **options)
    lines = lines_of(tmp_path, f"--compare {groups}")
    assert lines[1] == ["seed", "base_lr", "A", "B", "B", "-", "A"]
    assert [line[:2] for line in lines[2:6]] == [["0", "0.1"], ["1", "0.1"], ["0", "0.2"], ["1", "0.2"]]
    assert lines[6][:4] == ["B", "-", "A:", "0.0106"] and lines[6][-2:] == ["4", "pairs"]
    assert lines[7] == ["distinguishable:", "B", "is", "better"]


def test_compare_says_how_one_of_two_equal_runs_is_kept(tmp_path: Path):
    for number in range(6):
        make(tmp_path, number, [number / 10], seed=number % 2, width=(32, 64, 32)[number // 2])
    command = f"tools/runs.py {tmp_path} --compare width=32 width=64"
    for number in range(2):
        newer = f"20260101-{number + 4:06}-x"
        refuses(command, tmp_path, newer, "seed", f"--filter 'run!={newer}'")
        command += f" --filter run!={newer}"
    assert ", 2 pairs" in call(command, tmp_path).stdout


# ---- mistakes, and speed

MISTAKES = {
    "--sort colour": "colour column",
    "--sort widht": "widht width?",
    "--filter colour=red": "colour=red column",
    "--filter widht=3": "widht=3 width?",
    "--filter width": "width",
    "--filter width=7": "width=7",
    "--filter width>many": "width>many",
    "--filter run>=5": "run>=5",
    "--filter mean>0": "mean>0 column",
    "--group --filter mean>2": "mean>2",
    "--group --filter test/colour_mean>0": "test/colour_mean>0 test/",
    "--columns seed colour": "colour column",
    "--columns effective": "effective effective_batch_size?",
    "--format pdf": "--format pdf table csv",
    "--compare width=32": "--compare",
    "--compare width=32 val=7": "val=7 column",
    "--compare 2026 width=64": "20260101-000000-x 20260101-000003-x seed --filter width=32",
    "--filter seed=1 --compare width=32 width=64": "two pairs seed found 1",
    "--compare width=32 width=128": "monitor",
    "--colour": "--colour",
    "--diff 000000": "--diff",
    "--diff 000000 nine": "nine",
    "--diff 2026 000000": "--diff 2026: 20260101-000000-x, 20260101-000003-x, …",
    "--diff 000000 seed=2": "--diff seed=2: 20260101-000002-x, 20260101-000005-x",
    "../nowhere": "nowhere",
    "empty": "empty run",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line(options: str, tested: Path):
    for number in range(2):
        make(tested, 6 + number, [0.5], seed=number, width=128, **LOSS)
    (tested / "empty").mkdir()
    folder = options if "--" not in options else "."
    printed = refuses(f"tools/runs.py {folder} {options if folder == '.' else ''}", tested, *MISTAKES[options].split())
    assert not printed


def test_200_runs_within_a_second_and_without_torch(tmp_path: Path):
    for number in range(200):
        path = make(tmp_path, number, [i / 100 for i in range(100)], seed=number)
        with open(path / "config.yaml", "a") as file:
            file.writelines(f"option_{i}: {i}\n" for i in range(45))
    code = "import runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = sys.argv[0].removesuffix('runs.py')\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit: assert 'torch' not in sys.modules; raise"
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, REPO / "tools" / "runs.py", tmp_path, "--sort", "best"]
    done = subprocess.run(command, capture_output=True, text=True)
    after = getrusage(RUSAGE_CHILDREN)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 202, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1  # of CPU time
