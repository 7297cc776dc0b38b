"""recipes/runs.py, on run directories that are written here, and on a real one."""

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

import pytest
import yaml
from conftest import REPO, call, start

OPTIONS = {"out_dir": "x", "seed": 0, "width": 32, "logger_name": ["csv"], "effective_batch_size": 100,
           "monitor": "val/accuracy", "monitor_mode": "auto"}  # fmt: skip
HOLD_LOCK = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"


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
        return call(f"recipes/runs.py {folder} {options}", folder, code)


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


@pytest.mark.parametrize("monitor, mode", [("val/accuracy", "auto"), ("val/accuracy", None), ("val/f1", "max")])
def test_a_run_in_progress_counts_rows_after_its_last_checkpoint(monitor: str, mode: str | None, tmp_path: Path):
    """The mode is that of the options, or the name of the monitored value tells it. An older version wrote `null`."""
    path = make(tmp_path, 0, [0.5, 0.8, 0.9], finished=False, monitor=monitor, monitor_mode=mode)
    (path / "summary.json").write_text(json.dumps({"step": 10, "best": 0.5}))
    (row,) = table(tmp_path)
    assert (row["best"], row["best_step"], row["step"]) == ("0.9", "30", "30")
    (path / "summary.json").unlink()
    assert table(tmp_path) == [row]
    assert runs(tmp_path).stdout.startswith(f"best: max {monitor}\n")


def test_a_run_of_an_older_version_whose_mode_is_not_known_is_shown_as_the_run_has_chosen(tmp_path: Path):
    """By its words for metrics, which are gone. Nobody guesses which of the newer rows is the best."""
    path = make(tmp_path, 0, [0.5, 0.8, 0.9, 0.2], finished=False, monitor="val/f1", monitor_mode=None)
    change_summary(path, best=0.8, best_step=20)
    (row,) = table(tmp_path)
    assert (row["best"], row["best_step"], row["step"]) == ("0.8", "20", "40")
    assert runs(tmp_path).stdout.startswith("best: max or min val/f1\n")


def test_grouped_over_seeds(sweep: Path):
    rows = table(sweep, "--group")
    assert [*rows[0]] == ["width", "mean", "std", "n", "state"]
    assert [row["width"] for row in rows] == ["32", "64"]
    assert float(rows[1]["mean"]) == pytest.approx(mean([0.93, 0.94, 0.95]))
    assert float(rows[1]["std"]) == pytest.approx(stdev([0.93, 0.94, 0.95]))
    assert (rows[1]["n"], rows[1]["state"]) == ("3", "3 finished")
    change_summary(sweep / "20260101-000005-x", state="running")
    assert table(sweep, "--group")[1]["state"] == "2 finished, 1 interrupted"


def test_grouped_over_folds_and_over_what_is_named(tmp_path: Path):
    for number in range(8):
        make(tmp_path, number, [number / 10], seed=number % 2, fold=number // 2 % 2, width=number // 4)
    assert [(row["width"], row["n"]) for row in table(tmp_path, "--group")] == [("0", "4"), ("1", "4")]
    rows = table(tmp_path, "--group --average width")
    assert [(row["seed"], row["fold"], row["n"]) for row in rows] == [(*key, "2") for key in ("00", "10", "01", "11")]
    assert float(rows[1]["mean"]) == pytest.approx(0.3)


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


def test_markdown(sweep: Path):
    lines = runs(sweep, "--group --format markdown").stdout.splitlines()
    assert lines[:2] == ["| width | mean | std | n | state |", "| --- | --- | --- | --- | --- |"]
    assert lines[3] == "| 64 | 0.94 | 0.01 | 3 | 3 finished |"


DAMAGE = {
    "config.yaml": [
        "",
        "a: [",
        "- list",
        "a: [[b], {c: d}]",
        "width: 64\nmonitor: val/accuracy\neffective_batch_size: many",
    ],
    "summary.json": ["", '{"step": 3', "[1]", "\0\0\0", '{"step": "x"}', '{"last": 3}'],
    "logs/csv/metrics.csv": ["", "\0\0", "step,val/accuracy\n10,0.5\n20", "step\n", "a,b\n1,2\n", "step,lr\nx,y\n"],
}

DAMAGED_ROWS = {
    "\0\0": 0,
    "a,b\n1,2\n": 0,
    "step,lr\nx,y\n": 0,
    "step;lr\n10;0.1\n": 0,
    "step,lr\n10,0.1\n20\n30,0.1\n": 2,
}
DAMAGE["logs/csv/metrics.csv"] += DAMAGED_ROWS


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_run_does_not_hide_the_others(name: str, text: str, sweep: Path):
    (sweep / "20260101-000002-x" / name).write_text(text)
    done = runs(sweep, "--format csv")
    assert len(done.stdout.splitlines()) == 7
    assert re.search("20260101-000004-x,1,64,.*0.94", done.stdout)
    assert "Traceback" not in done.stderr
    is_damage = text in ("a: [", "- list", '{"step": 3', "[1]", '{"step": "x"}', '{"last": 3}', *DAMAGED_ROWS)
    assert is_damage == (f"20260101-000002-x/{name} is damaged: " in done.stderr) or text in ("", "\0\0\0")
    (sweep / "20260101-000002-x" / name).unlink()
    done = runs(sweep, "--format csv")
    assert len(done.stdout.splitlines()) == 7
    assert ("config.yaml is missing" in done.stderr) == (name == "config.yaml")
    runs(sweep, "--group --sort mean")


@pytest.mark.parametrize("text", DAMAGED_ROWS)
def test_a_damaged_metrics_csv_is_named_with_what_can_be_read(text: str, tmp_path: Path):
    path = make(tmp_path, 0, [0.5]) / "logs" / "csv" / "metrics.csv"
    assert runs(tmp_path).stderr == ""
    path.write_text(text)
    error = f"{path} is damaged: {DAMAGED_ROWS[text]} rows can be read, and are shown\n"
    assert runs(tmp_path).stderr == error


def test_a_row_that_is_cut_does_not_count(tmp_path: Path):
    path = make(tmp_path, 0, [0.5], finished=False)
    (path / "summary.json").unlink()
    with open(path / "logs" / "csv" / "metrics.csv", "a") as file:
        file.write("20,0.1,1000.0,0.9")  # of 0.09
    assert table(tmp_path)[0]["best"] == "0.5"


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
    rows = [line.split() for line in lines if re.search(r"finished", line)]
    assert len(rows) == 200 == len({tuple(row) for row in rows})
    if option != "--group":
        assert {row[0] for row in rows} >= {f"20260101-{n // 4:06}-x-width={n:03}…" for n in range(200)}
    last = " ".join(lines[lines.index(next(line for line in lines if line.startswith("not shown:"))) :])
    assert "option_number_8" in last and last.endswith("--wide shows all, --columns some")


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
    assert "choose from run, seed, width" in runs(sweep, "--columns colour", code=2).stderr


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
    process = start(f"recipes/runs.py {many} --wide", many)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.parametrize("number", [1, 2, 12, 40])
def test_plot(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses on the left, the monitored value on the right; a legend with the best runs, which nothing overlaps."""
    figures, Figure = [], pytest.importorskip("matplotlib.figure").Figure
    draw = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: [figures.append(figure), draw(figure, path)])
    for i in range(number):
        make(tmp_path, i, [0.5, 0.9 + i / 1000, 0.7], seed=i % 3, width=i // 3)
    runs(tmp_path, "--plot curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (left, right), (legend,) = figures[0].axes, figures[0].legends
    assert (left.get_title(), left.get_yscale()) == ("train/loss (dotted) and val/loss", "log")
    assert (right.get_title(), right.get_xlabel()) == ("val/accuracy", "step")
    assert (len(left.lines), len(right.lines)) == (2 * number, number)
    assert right.lines[0].get_xydata().tolist() == [[10, 0.5], [20, 0.9 + (number - 1) / 1000], [30, 0.7]]
    assert [line.get_linestyle() for line in left.lines[:2]] == [":", "-"]
    colors = [str(line.get_color()) for line in right.lines]
    assert len({*colors[:20]}) == min(number, 20) and {*colors[20:]} <= {"lightgray"}
    heights = [line.get_zorder() for line in right.lines]
    assert heights == sorted({*heights}, reverse=True)  # the best on top
    texts = [text.get_text() for text in legend.get_texts()]
    expected = [f"seed {i % 3}, width {i // 3}" for i in reversed(range(number))]
    few = {1: ["20260101-000000-x"], 2: ["seed 1", "seed 0"]}
    assert texts == few.get(number, expected[:20])
    assert legend.get_title().get_text() == ("the 20 best of 40 runs" if number == 40 else "")
    box, page = legend.get_window_extent(), figures[0].bbox
    assert 0 <= box.x0 < box.x1 <= page.x1 and box.y0 >= 0 and box.y1 < min(a.get_tightbbox().y0 for a in (left, right))
    assert "--plot curves.xyz: " in runs(tmp_path, "--plot curves.xyz", code=2).stderr


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The figure of `--plot`, and what is printed about it."""
    figures, Figure = [], pytest.importorskip("matplotlib.figure").Figure
    draw = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: [figures.append(figure), draw(figure, path)])
    return runs(folder, "--plot curves.png"), figures[0]


def test_plot_with_many_options_in_the_legend_cuts_none(many: Path, monkeypatch: pytest.MonkeyPatch):
    done, figure = drawn(many, monkeypatch)
    assert done.stderr == "picture curves.png\n"
    (legend,) = figure.legends
    first = legend.get_texts()[0].get_text()
    assert " ".join(first.split()).startswith("width 199, option_number_0 0.004975, ")
    assert first.count("option_number_") == 9
    boxes = [legend.get_window_extent(), *(text.get_window_extent() for text in legend.get_texts())]
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0 < box.y1
    assert boxes[0].y1 < min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200  # of 400 without a legend


def test_plot_of_a_single_point_has_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, 0, [0.5])
    make(tmp_path, 1, [0.5, 0.6])
    _, figure = drawn(tmp_path, monkeypatch)
    for axes in figure.axes:
        assert all((line.get_marker() == "o") == (len(line.get_xdata()) == 1) for line in axes.lines)
        assert {len(line.get_xdata()) for line in axes.lines} == {1, 2}


def test_diff(sweep: Path):
    for number, version in ((0, "1.0"), (5, "1.1")):
        (folder := sweep / f"20260101-00000{number}-x" / "provenance").mkdir()
        head = f"python train.py\n1 x cpu\nPython 3.11\nsame-1.0\nsome-pack-{version}\n{'a' * 40}\n M train.py\n"
        (folder / "20260101-000000.txt").write_text(f"{head}diff --git a/train.py b/train.py\n+code of {version}\n")
    lines = [line.split() for line in runs(sweep, "--diff 000000 20260101-000005-x").stdout.splitlines()]
    for line in ("seed 0 2", "width 32 64", "some-pack 1.0 1.1", "best 0.9 0.95", "-+code of 1.0", "++code of 1.1"):
        assert line.split() in lines
    assert not {"same", "logger_name", "step"} & {line[0] for line in lines if line}
    assert runs(sweep, "--diff 000000 000000").stdout.count("all the same") == 4


MISTAKES = (
    "--sort colour",
    "--filter colour=red",
    "--filter width",
    "--filter width=7",
    "--filter width>many",
    "--filter run>=5",
    "--columns seed colour",
    "--format pdf",
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
    code = "import runpy, sys; sys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit: assert 'torch' not in sys.modules; raise"
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, REPO / "recipes" / "runs.py", tmp_path, "--sort", "best"],
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
