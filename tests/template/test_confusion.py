"""tools/confusion.py: the table of the classes, a row per sample and the picture, from what test.py has kept."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import call
from mistakes import refuses


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


# Of 200 samples, most of them right; the last of the five classes has none.
GENERATOR = torch.Generator().manual_seed(0)
TARGETS = torch.randint(4, (200,), generator=GENERATOR)
LOGITS = torch.randn(200, 5, generator=GENERATOR) + 2 * torch.nn.functional.one_hot(TARGETS, 5)


def table(printed: str) -> list[list[str]]:
    """The rows of the classes: number, samples, accuracy."""
    header, *rows = re.findall(r"^ +(\w+) +(\w+) +(\S+)$", printed, re.MULTILINE)
    assert header == ("class", "samples", "accuracy")
    return [[*row] for row in rows]


def test_the_table_and_the_rows_have_the_accuracy_that_test_py_has_found(finished: Path, tmp_path: Path):
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    call("test.py --accelerator cpu --predictions", tmp_path)
    printed = call("tools/confusion.py", tmp_path).stdout
    assert f"predictions {run.name}/predictions_test_best.csv\n" in printed
    accuracy = json.loads((run / "test_test_best.json").read_text())["results"]["accuracy"]
    classes = [(int(samples), float(right)) for _, samples, right in table(printed)]
    assert len(classes) == 10 and sum(samples for samples, _ in classes) == 380
    assert sum(samples * right for samples, right in classes) / 380 == pytest.approx(accuracy, rel=1e-4)
    with open(run / "predictions_test_best.csv", newline="") as file:
        rows = [row["target"] == row["prediction"] for row in csv.DictReader(file)]
    assert len(rows) == 380 and sum(rows) / 380 == pytest.approx(accuracy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_class_and_each_sample_has_a_row(dtype: torch.dtype, folder: Path):
    """In the order of the samples. One whose target is no class is in the csv file alone."""
    logits, targets = LOGITS.to(dtype), TARGETS.clone()
    targets[::7] = -100
    printed = call(f"tools/confusion.py {save(folder, logits, targets)}", folder).stdout
    confidences, predictions = logits.float().softmax(dim=1).max(dim=1)
    is_right = predictions == targets
    expected = []
    for number in range(4):
        members = targets == number
        expected.append([str(number), str(int(members.sum())), f"{is_right[members].double().mean().item():.5g}"])
    assert table(printed) == [*expected, ["4", "0", "-"]]
    with open(folder / "predictions_test_best.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["sample", "target", "prediction", "confidence"]
    assert [[*map(int, row[:3])] for row in rows] == [
        [sample, *pair] for sample, pair in enumerate(zip(targets.tolist(), predictions.tolist(), strict=True))
    ]
    assert [float(row[3]) for row in rows] == pytest.approx(confidences.tolist(), abs=1e-6)


def test_the_newest_predictions_of_a_run_or_files_by_their_names(folder: Path):
    """A newer run that has no predictions is skipped."""
    for age, name in enumerate(("val_best", "test_step-00000020", "test_best")):
        path = save(folder, LOGITS, TARGETS, name=name)
        os.utime(path, (1e9 - age, 1e9 - age))
    later = folder.parent / "20261121-094500-train_out"
    later.mkdir()
    (later / "config.yaml").touch()
    printed = call("tools/confusion.py", folder.parent).stdout
    assert printed.startswith(f"{later.name} is skipped: predictions_*.pt is missing\n")
    assert f"\n{folder.name}/predictions_val_best.pt: 200 samples\n" in printed
    assert [path.name for path in folder.glob("*.csv")] == ["predictions_val_best.csv"]
    printed = call("tools/confusion.py predictions_test_best.pt predictions_test_step-00000020.pt", folder).stdout
    assert printed.count(": 200 samples") == 2 and len([*folder.glob("*.csv")]) == 3


@pytest.mark.parametrize("num_classes, numbers", [(2, ["0.90", "0.10", "0.00", "1.00"]), (100, [])])
def test_the_picture_has_the_shares_of_each_class(num_classes: int, numbers: list[str], folder: Path, monkeypatch):
    """As numbers, too, where they fit; else some classes are named."""
    Figure = pytest.importorskip("matplotlib.figure").Figure
    figures, draw = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: [figures.append(figure), draw(figure, path)])
    targets = torch.tensor([0] * 10 + [*range(1, num_classes)])
    predictions = targets.clone()
    predictions[0] = 1  # the others are right
    path = save(folder, torch.nn.functional.one_hot(predictions, num_classes).float(), targets)
    picture = folder / "confusion_matrix_test_best.png"
    assert call(f"tools/confusion.py {path}", folder).stdout.endswith(f"confusion matrix {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    axes, _ = figures[0].axes
    assert axes.get_title().split() == [folder.name, "test_best"]
    assert axes.images[0].get_array()[0, :2].tolist() == pytest.approx([0.9, 0.1])
    assert [text.get_text() for text in axes.texts] == numbers
    assert len(axes.get_xticks()) == min(num_classes, 25)


def test_without_matplotlib_there_is_a_line_in_place_of_the_picture(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    printed = call(f"tools/confusion.py {save(folder, LOGITS, TARGETS)}", folder).stdout
    assert "no confusion_matrix_test_best.png: that needs matplotlib" in printed
    assert {path.suffix for path in folder.iterdir()} == {".pt", ".csv", ".yaml"}


BAD = [
    [LOGITS],
    ["a", "b"],
    [LOGITS[:, :3], TARGETS],  # more classes than logits
    [LOGITS, TARGETS[:-1]],
    [LOGITS, TARGETS.float()],  # a regression
]


def test_a_mistake_is_one_line(folder: Path):
    """An option, a run, or a file that has no classification or is damaged."""
    refuses("tools/confusion.py --colour", folder, "--colour")
    refuses("tools/confusion.py --out_dir nowhere", folder, "--out_dir nowhere")
    refuses(f"tools/confusion.py --out_dir {folder}", folder, f"{folder}", "predictions_*.pt", "--predictions")
    for outputs in BAD:
        assert not refuses(f"tools/confusion.py {save(folder, *outputs).name}", folder, "predictions_test_best.pt")
    (folder / "damaged.pt").write_bytes(b"step,loss\n")
    refuses("tools/confusion.py damaged.pt", folder, "damaged.pt", "cannot be read")
