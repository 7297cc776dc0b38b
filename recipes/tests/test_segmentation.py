"""The recipe segmentation: a class for each pixel, the mean IoU over all pixels, and predictions in a byte each."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edits import with_text
from helpers import (
    LONG,
    ON_2,
    SMALL,
    assert_same_training,
    call,
    history,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    with_recipe,
)
from sklearn.datasets import load_digits
from sklearn.metrics import jaccard_score

pytestmark = pytest.mark.recipes
BF16 = f"{LONG} --effective_batch_size 64 --precision bf16-mixed"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("segmentation", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def scenes(program: Path) -> dict:
    return imported(program, "scenes").build_scenes()


@pytest.fixture(scope="module")
def trained(program: Path, tmp_path_factory) -> Path:
    """Where a run of 12 epochs is."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py --accelerator cpu --epochs 12 --logger_name csv", cwd)
    return cwd


def evaluate(program: Path, cwd: Path, how=call, options: str = "") -> tuple[dict, list]:
    """What test.py has written: the results and the predictions."""
    how(f"{program}/test.py --out_dir train_out --accelerator cpu --predictions {options}", cwd)
    folder = run_dir(cwd)
    predictions = torch.load(folder / "predictions_test_best.pt", weights_only=True)
    return json.loads((folder / "test_test_best.json").read_text()), predictions


def iou(classes, masks) -> float:
    """As scikit-learn computes it over all pixels."""
    return jaccard_score(np.asarray(masks).reshape(-1), np.asarray(classes).reshape(-1), average="macro")


# ---- the data


def cropped(shape: np.ndarray) -> tuple:
    """The smallest rectangle that has all pixels of a shape: its height, and its pixels."""
    rows, columns = np.nonzero(shape)
    part = shape[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return len(part), part.tobytes()


def test_a_mask_has_the_shape_of_a_digit_of_its_part_in_each_quarter(scenes: dict):
    digits = load_digits()
    parts = np.split(np.random.default_rng(0).permutation(1797), [1217, 1417])
    for name, indices in zip(("train", "val", "test"), parts, strict=True):
        known = {(digits.target[index] + 1, *cropped(digits.images[index] >= 4)) for index in indices}
        for mask in scenes[name].targets.numpy():
            quarters = [half for rows in np.split(mask, 2) for half in np.split(rows, 2, axis=1)]
            for quarter in quarters:
                (number,) = set(quarter[quarter > 0].tolist())
                assert (number, *cropped(quarter > 0)) in known


def test_images_and_masks_are_of_the_same_pixels(scenes: dict):
    sizes = {"train": 1200, "val": 200, "test": 400}
    for name, dataset in scenes.items():
        assert dataset.images.shape == (sizes[name], 1, 24, 24) and dataset.images.dtype == torch.float32
        assert dataset.targets.shape == (sizes[name], 24, 24) and dataset.targets.dtype == torch.uint8
        assert dataset.targets.unique().tolist() == [*range(11)] and dataset.num_classes == 11
        is_ink = dataset.targets > 0
        assert dataset.images[:, 0][is_ink].mean() > 0.6 > 0.1 > dataset.images[:, 0][~is_ink].mean()


def test_no_scene_is_there_twice(scenes: dict):
    masks = [mask.numpy().tobytes() for dataset in scenes.values() for mask in dataset.targets]
    assert len(set(masks)) == 1800


# ---- the model and the loss


def test_each_pixel_of_an_image_of_any_size_has_logits_and_sees_a_whole_digit(program: Path):
    """Of 8 x 8 pixels, wherever in it the pixel is."""
    model = imported(program, "model").Model((3, 19, 22), 5, width=4).eval()
    images = torch.randn(2, 3, 19, 22, requires_grad=True)
    logits = model(images)
    assert logits.shape == (2, 5, 19, 22)
    convolutions = torch.nn.Sequential(*(layer for layer in model.layers if not isinstance(layer, torch.nn.GroupNorm)))
    convolutions(images)[0, 0, 9, 11].backward()  # without the normalisation, which sees all pixels
    assert images.grad[0, :, 9 - 7 : 9 + 8, 11 - 7 : 11 + 8].ne(0).all() and not images.grad[1].any()


def test_the_count_is_that_of_the_samples(program: Path, monkeypatch: pytest.MonkeyPatch, scenes: dict):
    train = imported_train(program, monkeypatch)
    model = imported(program, "model").Model((1, 24, 24), 11, width=4).eval()
    images, masks = scenes["val"].__getitems__(range(7))
    values, count, (classes, targets) = train.compute_loss(model, (images, masks), None)
    assert count == 7
    logits = model(images)
    assert values["loss"].item() == pytest.approx(F.cross_entropy(logits, masks.long()).item())
    assert torch.equal(classes, logits.argmax(1)) and torch.equal(targets, masks)


# ---- a run


@pytest.mark.night
def test_it_is_better_than_the_baseline_that_is_printed(program: Path, trained: Path, tmp_path: Path):
    text, _, baseline = run(f"{program}/scenes.py", tmp_path).stdout.rpartition(" ")
    assert text == "logistic regression of 15 x 15 pixels: iou"
    found, _ = evaluate(program, trained)
    assert found["results"]["iou"] > 0.6 > 0.3 > float(baseline) > 0.2


@pytest.mark.night
def test_predictions_are_a_byte_for_each_pixel_and_give_the_same_iou(program: Path, trained: Path, scenes: dict):
    found, (classes, masks) = evaluate(program, trained)
    assert classes.dtype == masks.dtype == torch.uint8 and classes.shape == masks.shape == (400, 24, 24)
    assert torch.equal(masks, scenes["test"].targets)
    assert found["num_samples"] == 400
    assert found["results"]["iou"] == pytest.approx(iou(classes, masks), rel=1e-6)


@pytest.mark.night
def test_two_processes_find_the_same(program: Path, trained: Path):
    one, (classes, masks) = evaluate(program, trained)
    two, (classes_of_two, masks_of_two) = evaluate(program, trained, run, ON_2)
    one, two = one["results"], two["results"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["iou"] == pytest.approx(one["iou"], rel=1e-3)  # a pixel may be rounded to another class
    assert torch.equal(masks_of_two, masks)
    assert (classes_of_two != classes).float().mean() < 1e-4


def test_two_processes_train_on_the_same_batches(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8 --effective_batch_size 64 --dropout 0", tmp_path)
    assert_same_training(one, two)


def test_killed_and_resumed_in_bf16_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{BF16} --epochs 4", tmp_path)


@pytest.mark.night
def test_killed_and_resumed_on_two_processes_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{BF16} {ON_2}", tmp_path)


# ---- pixels without a class

LAST_LINE = "    return torch.from_numpy(images)"
BORDER = (LAST_LINE, f"    masks[:, :4] = masks[:, -4:] = 255\n{LAST_LINE}")


@pytest.fixture(scope="module")
def with_ignored(tmp_path_factory) -> Path:
    """Two borders of each scene have no class."""
    program = with_recipe("segmentation", tmp_path_factory.mktemp("program"))
    return with_text(program, "scenes.py", BORDER)


def test_pixels_without_a_class_count_in_no_metric_and_have_no_loss(with_ignored, tmp_path):
    """As scikit-learn computes the IoU from the others."""
    call(f"{with_ignored}/train.py {SMALL} --limit_train_batches 1.0 --epochs 1", tmp_path)
    call(f"{with_ignored}/test.py --accelerator cpu --predictions", tmp_path)
    predictions, masks = torch.load(run_dir(tmp_path) / "predictions_test_best.pt")
    assert (masks == 255).sum() == masks.numel() / 3
    found = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())["results"]
    known = masks != 255
    expected = jaccard_score(masks[known], predictions[known], labels=range(11), average=None, zero_division=0)
    assert found["class_iou"] == pytest.approx(expected, abs=1e-5)
    assert found["iou"] == pytest.approx(expected.mean(), abs=1e-5) and "class_iou" not in history(tmp_path)[-1]


def test_a_run_with_pixels_without_a_class_is_resumed_and_the_same_on_two_processes(with_ignored, tmp_path):
    killed_and_resumed(f"{with_ignored}/{LONG} --epochs 12", tmp_path)
    one, two = on_one_and_two(f"{with_ignored}/{LONG} --max_steps 8 --micro_batch_size 8", tmp_path)
    assert_same_training(two, one)
