"""tools/confusion.py: the table of the classes, a row per sample and the picture, from what test.py has kept."""

import csv
import importlib.util
import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from edits import insert_before, replace
from helpers import REPO, SMALL, call, run_dir
from mistakes import refuses

needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="needs matplotlib")


@pytest.fixture(scope="module")
def confusion() -> ModuleType:
    spec = importlib.util.spec_from_file_location("confusion", REPO / "tools" / "confusion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory."""
    folder = tmp_path / "20261121-093000-train_out"
    folder.mkdir()
    (folder / "config.yaml").touch()
    return folder


def save(folder: Path, *outputs, name: str = "test_best") -> Path:
    path = folder / f"predictions_{name}.pt"
    torch.save(list(outputs), path)
    return path


def of_classes(num_samples: int = 200, num_classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are right more often than not, and targets; the last class has no sample."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(num_classes - 1, (num_samples,), generator=generator)
    logits = torch.randn(num_samples, num_classes, generator=generator)
    return logits + 2 * torch.nn.functional.one_hot(targets, num_classes), targets


def table(printed: str) -> list[list[str]]:
    """The rows of the classes."""
    header, *rows = re.findall(r"^ +(\w+) +(\w+) +(\S+)$", printed, re.MULTILINE)
    assert header == ("class", "samples", "accuracy")
    return [[*row] for row in rows]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ---- the table and the rows


def test_a_run_is_evaluated_and_shown(finished: Path, tmp_path: Path):
    """The table and the rows are of the accuracy that test.py has found."""
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    call("test.py --out_dir train_out --accelerator cpu --predictions", tmp_path)
    printed = call("tools/confusion.py", tmp_path).stdout
    report = json.loads((run / "test_test_best.json").read_text())
    classes = [(int(samples), float(accuracy)) for _, samples, accuracy in table(printed)]
    assert len(classes) == 10 and sum(samples for samples, _ in classes) == report["num_samples"] == 380
    right = sum(samples * accuracy for samples, accuracy in classes)
    assert right / 380 == pytest.approx(report["results"]["accuracy"], rel=1e-4)
    rows = rows_of(run / "predictions_test_best.csv")
    assert sum(row["target"] == row["prediction"] for row in rows) / 380 == pytest.approx(report["results"]["accuracy"])
    assert f"predictions {run.name}/predictions_test_best.csv" in printed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_counts_the_samples_of_each_class_and_each_has_a_row(dtype: torch.dtype, folder: Path):
    """In the order of the samples; also where a prediction is not finite."""
    logits, targets = of_classes()
    logits = logits.to(dtype)
    logits[3] = torch.nan
    printed = call(f"tools/confusion.py {save(folder, logits, targets)}", folder).stdout
    confidences, predictions = logits.float().softmax(dim=1).max(dim=1)
    is_right = predictions == targets
    expected = []
    for number in range(4):
        members = targets == number
        expected.append([str(number), str(int(members.sum())), f"{is_right[members].double().mean().item():.5g}"])
    assert table(printed) == [*expected, ["4", "0", "-"]]
    assert 0.3 < is_right.double().mean() < 1  # else the test would not see much
    rows = rows_of(folder / "predictions_test_best.csv")
    assert list(rows[0]) == ["sample", "target", "prediction", "confidence"]
    assert [int(row["sample"]) for row in rows] == list(range(len(targets)))
    assert [int(row["target"]) for row in rows] == targets.tolist()
    assert [int(row["prediction"]) for row in rows] == predictions.tolist()
    found = [float(row["confidence"]) for row in rows]
    assert found == pytest.approx(confidences.tolist(), abs=1e-6, nan_ok=True)


def test_targets_that_the_metrics_ignore_are_in_no_table(tmp_path: Path):
    program = insert_before(tmp_path / "program", "split", "targets[::7] = -100")
    replace(program, "accuracy", 'average="micro", ignore_index=-100')
    call(f"{program}/train.py {SMALL} --epochs 1", tmp_path)
    call(f"{program}/test.py --accelerator cpu --predictions", tmp_path)
    samples = sum(int(row[1]) for row in table(call("tools/confusion.py", tmp_path).stdout))
    rows = rows_of(run_dir(tmp_path) / "predictions_test_best.csv")
    assert len(rows) == 380 and 380 * 0.7 < samples < 380
    assert samples == sum(int(row["target"]) >= 0 for row in rows)


# ---- which file


def test_the_newest_predictions_of_a_run_or_files_by_their_names(folder: Path):
    """A run is found as test.py finds it: by the name with the time or without it, or by its path."""
    for age, name in enumerate(("val_best", "test_step-00000020", "test_best")):
        path = save(folder, *of_classes(), name=name)
        os.utime(path, (1e9 - age, 1e9 - age))
    later = folder.parent / "20261121-094500-train_out"
    later.mkdir()
    (later / "config.yaml").touch()  # a run without predictions
    printed = call("tools/confusion.py", folder.parent).stdout
    assert printed.startswith(f"{later.name} is skipped: predictions_*.pt is missing\n")
    assert f"\n{folder.name}/predictions_val_best.pt: 200 samples\n" in printed
    assert [path.name for path in folder.glob("*.csv")] == ["predictions_val_best.csv"]
    for words in ("--root_dir ..", f"--out_dir {folder.name} --root_dir ..", f"--out_dir ../{folder.name}"):
        assert "200 samples" in call(f"tools/confusion.py {words}", later).stdout
    printed = call("tools/confusion.py predictions_test_best.pt predictions_test_step-00000020.pt", folder).stdout
    assert printed.count(": 200 samples") == 2
    assert len([*folder.glob("*.csv")]) == 3


# ---- mistakes

LOGITS, TARGETS = of_classes()
BAD = {
    "a regression": [torch.rand(9), torch.rand(9)],
    "targets that are no classes": [LOGITS, TARGETS.float()],
    "a target for each pixel": [LOGITS.unsqueeze(-1), TARGETS.unsqueeze(-1)],
    "another number of targets": [LOGITS, TARGETS[:-1]],
    "more classes than logits": [LOGITS[:, :3], TARGETS],
    "one tensor": [LOGITS],
    "no tensors": ["a", "b"],
    "nothing": [],
}


def test_what_is_no_classification_or_no_file_or_damaged_is_refused_in_one_line(folder: Path):
    refuses("tools/confusion.py --colour", folder, "--colour")
    refuses(f"tools/confusion.py --out_dir {folder}", folder, f"{folder}", "predictions_*.pt", "--predictions")
    refuses("tools/confusion.py --root_dir .. --out_dir nowhere", folder, "--out_dir nowhere")
    for outputs in BAD.values():
        path = save(folder, *outputs)
        assert not refuses(f"tools/confusion.py {path.name}", folder, path.name)
    for content in (b"", b"step,loss\n", (REPO / "README.md").read_bytes()):
        path.write_bytes(content)
        error = call(f"tools/confusion.py {path.name}", folder, code=2).stderr  # with an error of torch
        assert error.startswith(f"confusion.py: error: {path.name}: cannot be read:") and error.count("\n") == 1


# ---- the picture


@needs_matplotlib
def test_the_picture_is_a_png(folder: Path):
    printed = call(f"tools/confusion.py {save(folder, *of_classes())}", folder).stdout
    picture = folder / "confusion_matrix_test_best.png"
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    assert printed.endswith(f"confusion matrix {picture}\n")


def test_without_matplotlib_there_is_a_line_in_its_place(
    confusion: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(confusion, "find_spec", lambda name: None)
    confusion.report(save(folder, *of_classes()))
    assert "no confusion_matrix_test_best.png: that needs matplotlib" in capsys.readouterr().out
    assert {path.suffix for path in folder.iterdir()} == {".pt", ".csv", ".yaml"}


@needs_matplotlib
@pytest.mark.parametrize("num_classes", [1, 2, 10, 100, 1000])
def test_the_picture_can_be_read(
    num_classes: int, confusion: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """It says what it is of, no labels overlap or are cut, and numbers are where they fit."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    counts = 9000 * torch.eye(num_classes, dtype=torch.int64)
    if num_classes > 1:
        counts[0, 1] = 1000
        counts[1] = 0
    confusion.draw(counts, f"{folder.name}\ntest_best", folder / "confusion_matrix_test_best.png")
    (figure,) = figures
    axes, bar = figure.axes
    assert axes.get_title().split() == [folder.name, "test_best"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Predicted class", "True class")
    assert bar.get_ylabel() == "Share of the true class"
    figure.draw_without_rendering()
    for axis, first, last in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
        labels = [label for label in axis.get_ticklabels() if label.get_text()]
        assert all(label.get_text() == str(round(label.get_position()[axis is axes.yaxis])) for label in labels)
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: getattr(box, first))
        assert len(boxes) >= min(num_classes, 20)
        for one, other in zip(boxes, boxes[1:], strict=False):
            assert getattr(one, last) < getattr(other, first)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label, bar.yaxis.label):
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    numbers = {text.get_position()[::-1]: float(text.get_text()) for text in axes.texts}
    assert len(numbers) == (num_classes**2 if num_classes <= 16 else 0)
    if num_classes in (2, 10):
        assert (numbers[0, 0], numbers[0, 1], numbers[1, 1]) == (0.9, 0.1, 0.0)
    if num_classes > 1:
        assert axes.images[0].get_array()[0, :2].tolist() == pytest.approx([0.9, 0.1])
