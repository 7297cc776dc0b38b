"""test.py counts each sample once and says the same on any number of processes."""

import ast
import csv
import json
import re
import shlex
import shutil
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ON_2, REPO, SMALL, call, replaced, run, run_dir
from lightning.fabric import Fabric

from config import TrainConfig
from model import Model
from rundir import RunDir
from test import write_predictions

COUNTS = {"train": 1217, "val": 200, "test": 380}


def evaluate(folder: Path, options: str = "", script: str = "test.py", name: str | None = None) -> dict:
    """Runs test.py; returns its report, with the rows of predictions.csv where they were asked for."""
    for old in folder.glob("test_*.json"):
        old.unlink()
    how = call if "--devices" not in options else run
    done = how(f"{script} --out_dir {name or folder.name} --accelerator cpu {options}", folder.parent)
    (path,) = folder.glob("test_*.json")
    report = json.loads(path.read_text())
    assert path.name == f"test_{report['split']}_{Path(report['checkpoint']).stem}.json"
    assert f"results {folder.name}/{path.name}" in done.stdout
    assert f"{report['checkpoint']} on {report['num_samples']} {report['split']} samples" in done.stdout
    assert f"accuracy {report['accuracy']:.5g}" in done.stdout
    if "--predictions" in options:
        with open(folder / f"predictions_{path.stem[5:]}.csv", newline="") as file:
            report["rows"] = list(csv.DictReader(file))
    return report


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The images as scikit-learn gives them, normalised, and their targets, for each split."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(targets))
    images, targets = torch.tensor(images[order]).view(-1, 1, 8, 8).float() / 16, torch.tensor(targets[order])
    images = (images - images[:1217].mean()) / images[:1217].std()
    cuts = {"train": slice(0, 1217), "val": slice(1217, 1417), "test": slice(1417, None)}
    return {name: (images[cut], targets[cut]) for name, cut in cuts.items()}


def predict(weights: dict, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets from the plain model and the plain images, never augmented."""
    model = Model((1, 8, 8), 10, width=4)
    model.load_state_dict(weights)
    images, targets = digits()[split]
    with torch.no_grad():
        return model.eval()(images), targets


@pytest.fixture(scope="module", params=["", "--devices 3"])
def last(request, finished: Path) -> dict:
    """The last checkpoint, whose weights are those of model.pt, on the test set, with 1 or 3 processes."""
    return evaluate(finished, f"--checkpoint last --predictions {request.param}")


@pytest.fixture(scope="module")
def expected(finished: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return predict(torch.load(finished / "model.pt", weights_only=True), "test")


# ---- the figures, on 1 and 3 processes; on 2 they are those of the own dataset below


def test_report(last: dict, finished: Path, expected: tuple):
    logits, targets = expected
    predictions = logits.argmax(dim=1)
    assert (finished.parent / last["checkpoint"]).samefile(finished / "checkpoints" / "step-00000020.ckpt")
    assert (last["split"], last["num_samples"]) == ("test", COUNTS["test"])
    assert last["accuracy"] == pytest.approx((predictions == targets).double().mean().item(), rel=1e-6)
    assert last["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    pairs = list(zip(targets.tolist(), predictions.tolist(), strict=True))
    assert last["confusion_matrix"] == [[pairs.count((i, j)) for j in range(10)] for i in range(10)]
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


@pytest.mark.skipif(not find_spec("matplotlib"), reason="needs matplotlib")
def test_confusion_matrix_is_a_png(last: dict, finished: Path):
    content = (finished / f"confusion_matrix_test_{Path(last['checkpoint']).stem}.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")


@pytest.mark.skipif(not find_spec("matplotlib"), reason="needs matplotlib")
def test_a_confusion_matrix_of_256_classes_is_drawn_in_3_seconds(tmp_path: Path):
    rows = [[sample, sample, (sample + 1) % 256, 0.5] for sample in reversed(range(256))]
    began = time.process_time()
    write_predictions(rows, {"confusion_matrix": torch.eye(256, dtype=torch.int64)}, "test_best", tmp_path)
    assert time.process_time() - began < 3
    assert (tmp_path / "confusion_matrix_test_best.png").is_file()
    assert (tmp_path / "predictions_test_best.csv").read_text().splitlines()[256] == "255,255,0,0.5"


@pytest.mark.skipif(not find_spec("matplotlib"), reason="needs matplotlib")
@pytest.mark.parametrize("num_classes", [2, 10, 100, 1000])
def test_a_confusion_matrix_can_be_read(num_classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It says what it is of, no labels overlap or are cut, and numbers are where they fit."""
    from matplotlib.figure import Figure

    figures, confusion = [], 9000 * torch.eye(num_classes, dtype=torch.int64)
    confusion[0, 1], confusion[1] = 1000, 0
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    folder = tmp_path / "20261121-093000-train_out"
    folder.mkdir()
    write_predictions([], {"confusion_matrix": confusion}, "test_best", folder)
    (figure,) = figures
    axes, bar = figure.axes
    assert axes.get_title().split() == [folder.name, "test_best"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Predicted class", "True class")
    assert bar.get_ylabel() == "Share of the true class"
    figure.draw_without_rendering()
    for axis, first, last in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
        labels = [label for label in axis.get_ticklabels() if label.get_text()]
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: getattr(box, first))
        assert len(boxes) >= min(num_classes, 20)
        for one, other in zip(boxes, boxes[1:], strict=False):
            assert getattr(one, last) < getattr(other, first)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label, bar.yaxis.label):
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    numbers = {text.get_position()[::-1]: float(text.get_text()) for text in axes.texts}
    assert len(numbers) == (num_classes**2 if num_classes <= 16 else 0)
    assert not numbers or (numbers[0, 0], numbers[0, 1], numbers[1, 1]) == (0.9, 0.1, 0.0)
    assert axes.images[0].get_array()[0, :2].tolist() == pytest.approx([0.9, 0.1])


def test_a_checkpoint_of_the_run_by_its_name(finished: Path):
    path = min(finished.glob("checkpoints/step-*.ckpt"))
    report = evaluate(finished, f"--checkpoint {path.name}")
    assert (Path(report["checkpoint"]).name, report["step"]) == (path.name, int(path.stem[5:]))


def test_predictions_that_are_not_finite_keep_their_rows(finished: Path, tmp_path: Path):
    weights = torch.load(finished / "model.pt", weights_only=True)
    next(iter(weights.values())).fill_(torch.nan)
    torch.save(weights, tmp_path / "nan.pt")
    assert len(evaluate(finished, f"--checkpoint {tmp_path}/nan.pt --predictions")["rows"]) == COUNTS["test"]


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
    """The figures are those of the plain model on all samples: none is left out, and none is augmented."""
    file = finished / "checkpoints" / "step-00000016.ckpt"
    report = evaluate(finished, f"--split train --checkpoint {file} --batch_size 100000")
    assert (Path(report["checkpoint"]).name, report["split"]) == (file.name, "train")
    assert report["num_samples"] == COUNTS["train"]
    logits, targets = predict(torch.load(file, weights_only=True)["model"], "train")
    assert report["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert report["accuracy"] == pytest.approx((logits.argmax(dim=1) == targets).double().mean().item(), rel=1e-6)


# ---- a user's own dataset, from end to end

OWN = '''
class Digits(Dataset):
    """One dict per sample."""

    num_classes = 10

    def __init__(self, first, last):
        from sklearn.datasets import load_digits

        self.images, self.targets = load_digits().images[first:last], load_digits().target[first:last]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"image": self.images[index][None].astype(np.float32) / 16, "digit": self.targets[index], "index": index}


def build_datasets(name, data_dir, augment=True):
    return {"train": Digits(0, 1000), "val": Digits(1000, 1100), "test": Digits(1100, 1203)}
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A copy of the template with another dataset, as its user would make it."""
    folder = tmp_path_factory.mktemp("own")
    for path in REPO.glob("*.py"):
        shutil.copy(path, folder)
    source = (folder / "data.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "build_datasets"]
    lines = source.splitlines()
    lines[function.lineno - 1 : function.end_lineno] = OWN.strip().splitlines()
    (folder / "data.py").write_text("\n".join(lines) + "\n")
    source = (folder / "train.py").read_text()
    for old, new in (
        ("image, _ = dataset[0]", 'image = dataset[0]["image"]'),
        ("images, targets = batch\n", 'images, targets = batch["image"], batch["digit"]\n'),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    (folder / "train.py").write_text(source)
    return folder


def test_own_dataset_of_dicts(own: Path):
    """Evaluated on one process and on two: the same comes out."""
    call(f"{own}/train.py {SMALL}", own)
    one, two = (
        evaluate(run_dir(own), f"--predictions --num_workers 1 {devices}", f"{own}/test.py") for devices in ("", ON_2)
    )
    assert one["num_samples"] == len(one["rows"]) == 103
    assert [row["prediction"] for row in one["rows"]] == [row["prediction"] for row in two["rows"]]
    confidences = [[float(row["confidence"]) for row in report["rows"]] for report in (one, two)]
    assert np.allclose(*confidences, atol=1e-6)
    assert one["confusion_matrix"] == two["confusion_matrix"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)


def test_fewer_samples_than_processes_are_refused_in_one_line(own: Path):
    source = (own / "data.py").read_text()
    (own / "data.py").write_text(source.replace("Digits(1100, 1203)", "Digits(1100, 1101)"))
    for devices in (2, 100_000):  # none is started
        error = run(f"{own}/test.py --out_dir {run_dir(own)} --accelerator cpu --devices {devices}", own, code=2).stderr
        (line,) = error.splitlines()
        assert line.startswith(f"test.py: error: --devices {devices}: ") and "1 samples are too few" in line


def test_targets_that_the_metrics_ignore_are_in_no_table(tmp_path: Path):
    program = replaced(
        tmp_path / "program", "data.py", "    train, val, test =", "    targets[::7] = -100\n    train, val, test ="
    )
    replaced(program, "train.py", 'average="micro"', 'average="micro", ignore_index=-100')
    call(f"{program}/train.py {SMALL} --epochs 1", tmp_path)
    report = evaluate(run_dir(tmp_path), script=f"{program}/test.py")
    assert COUNTS["test"] * 0.7 < sum(map(sum, report["confusion_matrix"])) < COUNTS["test"]


def test_a_checkpoint_of_another_model_is_refused_in_one_line(finished: Path, tmp_path: Path):
    call(f"train.py {SMALL} --epochs 1 --width 3", tmp_path)
    other = run_dir(tmp_path) / "checkpoints" / "best.ckpt"
    error = call(f"test.py --accelerator cpu --out_dir {finished} --checkpoint {other}", tmp_path, code=2).stderr
    assert error.startswith(f"test.py: error: --checkpoint {other}: ") and error.count("\n") == 1


def test_a_run_is_evaluated_from_inside(finished: Path, tmp_path: Path):
    cwd = shutil.copytree(finished, tmp_path / finished.name)
    assert "--out_dir ." in call("train.py --resume . --epochs 11 --early_stopping_patience 1", cwd).stdout
    call("test.py --accelerator cpu --out_dir .", cwd)
    assert (cwd / "test_test_best.json").exists()


def test_predictions_of_other_than_samples_are_refused_in_one_line(tmp_path: Path):
    """As those of a segmentation, which has a target for each pixel."""
    pixels = "(logits.unsqueeze(-1), targets.unsqueeze(-1))"
    program = replaced(tmp_path / "program", "train.py", "(logits, targets)\n", f"{pixels}\n")
    call(f"{program}/train.py {SMALL} --epochs 1", tmp_path)
    evaluate(run_dir(tmp_path), script=f"{program}/test.py")
    error = call(f"{program}/test.py --accelerator cpu --predictions", tmp_path, code=2).stderr
    assert error.count("\n") == 1 and "--predictions: needs logits (samples, classes)" in error


def test_evaluations_of_other_splits_and_checkpoints_stay(finished: Path, tmp_path: Path):
    """Each tells of which step it is, and in which precision."""
    folder = Path(shutil.copytree(finished, tmp_path / finished.name))
    for options in ("--predictions", "--predictions --split val --checkpoint last --precision bf16-mixed"):
        call(f"test.py --out_dir {folder.name} --accelerator cpu {options}", tmp_path)
    for stem, precision in (("test_best", "32-true"), ("val_step-00000020", "bf16-mixed")):
        report = json.loads((folder / f"test_{stem}.json").read_text())
        saved = torch.load(tmp_path / report["checkpoint"], weights_only=True)
        assert (report["step"], report["precision"]) == (saved["step"], precision)
        assert (folder / f"predictions_{stem}.csv").is_file()


@pytest.mark.parametrize("options", ["--checkpoint_frequency None", "--limit_val_batches 0 --monitor train/loss"])
def test_the_next_command_can_be_pasted(options: str, tmp_path: Path):
    """Also where there is no best.ckpt, and the name has a space."""
    root = tmp_path / "my runs"
    root.mkdir()
    out = call(f"train.py {SMALL} --max_steps 2 {options}", root).stdout
    told = re.search(r"^next: python test.py (.*)$", out, re.MULTILINE)[1]
    assert ("--checkpoint last" in told) == ("None" in options)
    call(f"test.py {told} --accelerator cpu", root)
    config = TrainConfig(accelerator="cpu", resume=str(run_dir(root)))
    run_directory = RunDir(Fabric(accelerator="cpu", devices=1), config, {"step": 0}, ExitStack())
    assert shlex.split(run_directory.next_command(False)) == ["python", "train.py", "--resume", str(run_dir(root))]
