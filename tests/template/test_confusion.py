"""tools/confusion.py: the table of the classes, a row per sample and the picture, from what test.py has kept."""

import csv
import os
import re
from pathlib import Path

import pytest
import torch
from commands import REPO, SMALL, call
from mistakes import refuses
from outputs import results, run_dir


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


def test_the_newest_predictions_of_a_run_have_the_accuracy_that_test_py_has_found(cwd: Path):
    """A newer run that has no predictions is skipped. Older ones are taken by their names."""
    call(f"train.py {SMALL}", cwd)
    folder = run_dir(cwd)
    accuracy = results(REPO, cwd, "--predictions")["accuracy"]
    os.utime(save(folder, LOGITS, TARGETS, name="val_best"), (1e9, 1e9))
    later = cwd / "29990101-000000-train_out"
    later.mkdir()
    (later / "config.yaml").touch()
    printed = call("tools/confusion.py", cwd).stdout
    assert printed.startswith(f"{later.name} is skipped: predictions_*.pt is missing\n")
    assert [path.name for path in folder.glob("*.csv")] == ["predictions_test_best.csv"]
    classes = [(int(samples), float(right)) for _, samples, right in table(printed)]
    assert len(classes) == 10 and sum(samples for samples, _ in classes) == 380
    assert sum(samples * right for samples, right in classes) / 380 == pytest.approx(accuracy, rel=1e-4)
    printed = call("tools/confusion.py predictions_test_best.pt predictions_val_best.pt", folder).stdout
    assert re.findall(r"(\d+) samples", printed) == ["380", "200"]


def test_each_class_and_each_sample_has_a_row_also_without_matplotlib(tmp_path: Path, monkeypatch):
    """In the order of the samples, computed in float32. One whose target is no class is in the csv file alone."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    logits, targets = LOGITS.bfloat16(), TARGETS.clone()
    targets[::7] = -100
    printed = call(f"tools/confusion.py {save(tmp_path, logits, targets)}", tmp_path).stdout
    assert "no confusion_matrix_test_best.png: that needs matplotlib" in printed
    confidences, predictions = logits.float().softmax(dim=1).max(dim=1)
    is_right = predictions == targets
    expected = []
    for number in range(4):
        members = targets == number
        expected.append([str(number), str(int(members.sum())), f"{is_right[members].double().mean().item():.5g}"])
    assert table(printed) == [*expected, ["4", "0", "-"]]
    with open(tmp_path / "predictions_test_best.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["sample", "target", "prediction", "confidence"]
    numbers = torch.tensor([[float(cell) for cell in row] for row in rows])
    columns = torch.stack([torch.arange(200), targets, predictions, confidences], dim=1)
    torch.testing.assert_close(numbers, columns, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_classes, numbers", [(2, ["0.90", "0.10", "0.00", "1.00"]), (100, [])])
def test_the_picture_has_the_shares_of_each_class(num_classes: int, numbers: list[str], tmp_path: Path, monkeypatch):
    """As numbers, too, where they fit; else some classes are named."""
    Figure = pytest.importorskip("matplotlib.figure").Figure
    figures, draw = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: [figures.append(figure), draw(figure, path)])
    targets = torch.tensor([0] * 10 + [*range(1, num_classes)])
    predictions = targets.clone()
    predictions[0] = 1  # the others are right
    path = save(tmp_path, torch.nn.functional.one_hot(predictions, num_classes).float(), targets)
    assert call(f"tools/confusion.py {path}", tmp_path).stdout.endswith("/confusion_matrix_test_best.png\n")
    assert (tmp_path / "confusion_matrix_test_best.png").read_bytes().startswith(b"\x89PNG")
    axes, _ = figures[0].axes
    assert axes.get_title().split() == [tmp_path.name, "test_best"]
    assert axes.images[0].get_array()[0, :2].tolist() == pytest.approx([0.9, 0.1])
    assert [text.get_text() for text in axes.texts] == numbers
    assert len(axes.get_xticks()) == min(num_classes, 25)


def test_a_mistake_is_one_line(cwd: Path):
    """A run without predictions, or a file that has no classification or is damaged."""
    (cwd / "config.yaml").touch()
    refuses("tools/confusion.py --out_dir .", cwd, "predictions_*.pt", "--predictions")
    for outputs in (
        [LOGITS],
        ["a", "b"],
        [LOGITS[:, :3], TARGETS],  # more classes than logits
        [LOGITS, TARGETS[:-1]],
        [LOGITS, TARGETS.float()],  # a regression
    ):
        assert not refuses(f"tools/confusion.py {save(cwd, *outputs).name}", cwd, "predictions_test_best.pt")
    (cwd / "damaged.pt").write_bytes(b"step,loss\n")
    refuses("tools/confusion.py damaged.pt", cwd, "damaged.pt", "cannot be read")
