"""test.py counts each sample once and says the same on any number of processes."""

import ast
import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, SMALL, run, run_dir

from data import build_datasets
from model import Model

COUNTS = {"train": 1217, "val": 200, "test": 380}


def evaluate(folder: Path, options: str = "", script: str = "test.py", name: str | None = None) -> dict:
    """Runs test.py; returns test_results.json, with the rows of predictions.csv where they were asked for."""
    done = run(f"{script} --out_dir {name or folder.name} --accelerator cpu {options}", folder.parent)
    report = json.loads((folder / "test_results.json").read_text())
    assert str(report["num_samples"]) in done.stdout
    assert f"{report['accuracy']:.5g}" in done.stdout
    if "--predictions" in options:
        with open(folder / "predictions.csv", newline="") as file:
            report["rows"] = list(csv.DictReader(file))
    return report


def predict(weights: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets from the plain model and the plain dataset, one sample after the other."""
    model, dataset = Model((1, 8, 8), 10, width=4), build_datasets("digits", None, seed=42)[split]
    model.load_state_dict(torch.load(weights, weights_only=True))
    images, targets = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
    with torch.no_grad():
        return model.eval()(torch.stack(images)), torch.tensor(targets)


@pytest.fixture(scope="module", params=[1, 2, 3])
def last(request, finished: Path) -> dict:
    """The last checkpoint, whose weights are those of model.pt, on the test set, with 1, 2 or 3 processes."""
    return evaluate(finished, f"--checkpoint last --predictions --devices {request.param}")


@pytest.fixture(scope="module")
def expected(finished: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return predict(finished / "model.pt", "test")


# ---- the figures, on 1, 2 and 3 processes


def test_report(last: dict, finished: Path, expected: tuple):
    logits, targets = expected
    right = logits.argmax(dim=1) == targets
    assert Path(last["checkpoint"]).name == "step-00000020.ckpt"
    assert (finished.parent / last["checkpoint"]).is_file()
    assert (last["split"], last["num_samples"]) == ("test", COUNTS["test"])
    assert last["accuracy"] == right.sum().item() / len(right)
    assert last["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    per_class = [right[targets == i].double().mean().item() for i in range(10)]
    assert last["accuracy_per_class"] == pytest.approx(per_class)
    assert 0.1 < last["accuracy"] < 1  # else the tests here would not see much


def test_predictions_in_the_order_of_the_dataset(last: dict, expected: tuple):
    logits, targets = expected
    rows = last["rows"]
    assert list(rows[0]) == ["sample", "target", "prediction", "confidence"]
    assert [int(row["sample"]) for row in rows] == list(range(COUNTS["test"]))
    assert [int(row["target"]) for row in rows] == targets.tolist()
    assert [int(row["prediction"]) for row in rows] == logits.argmax(dim=1).tolist()
    confidences = logits.softmax(dim=1).amax(dim=1).tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(confidences, abs=1e-5)


def test_confusion_matrix_is_a_png(last: dict, finished: Path):
    content = (finished / "confusion_matrix.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")


def test_other_batch_size_and_precision(finished: Path, expected: tuple):
    """The weights of model.pt do as well as a checkpoint; bfloat16 moves a prediction only where it is a close call."""
    logits, targets = expected
    report = evaluate(finished, f"--checkpoint {finished}/model.pt --batch_size 7 --precision bf16-mixed --predictions")
    assert (Path(report["checkpoint"]).name, report["num_samples"]) == ("model.pt", COUNTS["test"])
    assert report["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=0.01)
    first, second = logits.softmax(dim=1).topk(2).values.T
    for row, prediction, margin in zip(report["rows"], logits.argmax(dim=1).tolist(), first - second, strict=True):
        assert int(row["prediction"]) == prediction or margin < 0.02


# ---- checkpoints, splits, names


def test_best_checkpoint_on_the_validation_set(finished: Path):
    """The run is found without its timestamp, and best.ckpt is taken by default."""
    report = evaluate(finished, "--split val", name="train_out")
    assert Path(report["checkpoint"]).name == "best.ckpt"
    assert (report["split"], report["num_samples"]) == ("val", COUNTS["val"])


def test_checkpoint_file_on_the_training_set(finished: Path):
    """The figures are those of the plain model with the file's weights on all samples, none of them left out."""
    file = finished / "checkpoints" / "step-00000016.ckpt"
    report = evaluate(finished, f"--split train --checkpoint {file}")
    assert (Path(report["checkpoint"]).name, report["split"]) == (file.name, "train")
    assert report["num_samples"] == COUNTS["train"]
    weights = finished.parent / "weights.pt"
    torch.save(torch.load(file, weights_only=True)["model"], weights)
    logits, targets = predict(weights, "train")
    assert report["accuracy"] == (logits.argmax(dim=1) == targets).sum().item() / COUNTS["train"]


# ---- a user's own dataset, from end to end

OWN = '''
class Digits(Dataset):
    """One dict per sample, with random noise from NumPy."""

    def __init__(self, first, last):
        from sklearn.datasets import load_digits

        self.images, self.targets = load_digits().images[first:last], load_digits().target[first:last]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        noise = np.random.rand(1, 8, 8).astype(np.float32)
        return {"image": self.images[index][None].astype(np.float32) / 16 + noise / 4, "digit": self.targets[index]}


def build_datasets(name, data_dir, seed):
    return {"train": Digits(0, 1000), "val": Digits(1000, 1100), "test": Digits(1100, 1203)}
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A copy of the template whose build_datasets is replaced, as its user would."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("config.py", "data.py", "model.py", "utils.py", "train.py", "test.py"):
        shutil.copy(REPO / name, folder)
    source = (folder / "data.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "build_datasets"]
    lines = source.splitlines()
    lines[function.lineno - 1 : function.end_lineno] = OWN.strip().splitlines()
    (folder / "data.py").write_text("\n".join(lines) + "\n")
    return folder


def test_own_dataset(own: Path):
    """Trained and evaluated on two processes; evaluated on one, the same comes out, noise included."""
    run(f"{own}/train.py {SMALL} --devices 2 --num_workers 1", own)
    one, two = (evaluate(run_dir(own), f"--predictions --devices {n}", f"{own}/test.py") for n in (1, 2))
    assert one["num_samples"] == len(one["rows"]) == 103
    assert [row["prediction"] for row in one["rows"]] == [row["prediction"] for row in two["rows"]]
    confidences = [[float(row["confidence"]) for row in report["rows"]] for report in (one, two)]
    assert np.allclose(*confidences, atol=1e-6)
    assert one["accuracy"] == two["accuracy"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
