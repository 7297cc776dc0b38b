"""recipes/features/pictures.patch: the first training batch in TensorBoard, and a model's most confident mistakes."""

import io
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    call,
    imported,
    killed_and_resumed,
    on_one_and_two,
    read_tensorboard,
    run,
    run_dir,
    weights,
    with_recipe,
)
from PIL import Image

from config import TrainConfig
from data import build_datasets
from runtime.evaluation import EvalRun
from runtime.loader import SeededBatches, TrainSampler
from utils import make_plan

pytestmark = pytest.mark.recipes
TENSORBOARD = LONG.replace("--logger_name csv", "--logger_name csv tensorboard")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("pictures", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def pictures(program: Path) -> ModuleType:
    return imported(program, "pictures")


@pytest.fixture(scope="module")
def trained(program: Path, tmp_path_factory) -> Path:
    """Where a small run is that has mistaken many samples of the test set."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py {SMALL}", cwd)
    call(f"{program}/test.py --out_dir train_out --predictions --accelerator cpu", cwd)
    return cwd


def first_batch(cwd: Path) -> np.ndarray:
    """The one picture in TensorBoard."""
    board = read_tensorboard(run_dir(cwd))
    assert board.Tags()["images"] == ["vitals/first_batch"]
    (image,) = board.Images("vitals/first_batch")
    assert image.step == 1
    return np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))


def cells(page: np.ndarray, columns: int, number: int, lines: int) -> torch.Tensor:
    """The images of a page, as bytes (number, 8, 8), each pixel from the middle of its square of 13 pixels."""
    found = []
    for i in range(number):
        x, y = 12 + i % columns * 116, 44 + i // columns * (116 + 16 * lines) + 16 * lines
        found.append(page[y + 6 : y + 104 : 13, x + 6 : x + 104 : 13, 0])
    return torch.tensor(np.stack(found))


def test_images_of_two_channels_are_shown_by_their_first(pictures: ModuleType):
    images = torch.rand(3, 2, 8, 8)
    pages = [np.asarray(pictures.grid("", part, ["a", "b", "c"], columns=3)) for part in (images, images[:, :1])]
    assert np.array_equal(*pages)


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    low, high = images.aminmax()
    return ((images - low) / (high - low) * 255).round().byte()[:, 0]


def mistakes(cwd: Path) -> list[dict]:
    """The samples that are predicted wrongly, the most confident first."""
    logits, targets = torch.load(run_dir(cwd) / "predictions_test_best.pt", weights_only=True)
    rows = []
    for sample, (scores, target) in enumerate(zip(logits.softmax(dim=1), targets.tolist(), strict=True)):
        row = {"sample": sample, "target": target, "prediction": scores.argmax().item(), "confidence": scores.max()}
        if row["target"] != row["prediction"]:
            rows.append(row)
    return sorted(rows, key=lambda row: -row["confidence"])


def test_the_first_batch_is_what_the_model_got(trained: Path, pictures: ModuleType):
    """64 images as they were augmented, and their classes."""
    config = TrainConfig(limit_train_batches=4)
    dataset = build_datasets(config)["train"]
    plan = make_plan(config, len(dataset), val_samples=0, world_size=1, saved_size=0)
    key = next(iter(TrainSampler(plan, dataset, rank=0, seed=42)))
    images, targets = SeededBatches(dataset, 42)[key]
    assert not torch.equal(images, dataset.images[torch.tensor(key[1])])  # they are shifted
    page = first_batch(trained)
    assert torch.equal(cells(page, 8, 64, 1), as_bytes(images))
    captions = [str(target) for target in targets.tolist()]
    title = "first training batch, each with its class"
    assert np.array_equal(page, pictures.grid(title, images, captions, 8))
    captions[63] = str(9 - int(captions[63]))
    assert not np.array_equal(page, pictures.grid(title, images, captions, 8))


def test_the_most_confident_mistakes(trained: Path, pictures: ModuleType):
    rows = mistakes(trained)[:25]
    path = run_dir(trained) / "wrong_test_best.png"
    images = build_datasets(TrainConfig(), augment=False)["test"].images[[row["sample"] for row in rows]]
    assert len(rows) == 25
    page = np.asarray(Image.open(path))
    assert torch.equal(cells(page, 5, 25, 2), as_bytes(images))
    captions = [f"true {row['target']}, pred. {row['prediction']}\n{float(row['confidence']):.1%}, no. {row['sample']}"
                for row in rows]  # fmt: skip
    assert np.array_equal(page, pictures.grid(f"{path.parent.name}, wrong_test_best", images, captions, 5))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 300, 200), (1, 1, 50)])
def test_images_of_any_shape(shape: tuple[int, int, int], pictures: ModuleType):
    """The longer side gets 104 pixels; nothing is outside of the page; images of one value are black."""
    page = np.asarray(pictures.grid("title", torch.ones(3, *shape), ["a", "b", "c"], 2))
    height, width = (max(1, round(side * 104 / max(shape[1:]))) for side in shape[1:])
    assert page.shape == (44 + 2 * (12 + 16 + height), 12 + 2 * 116, 3)
    assert (page[60 : 60 + height, 128 : 128 + width] == 0).all() and (page[-12:] == 255).all()
    colours = torch.tensor([1.0, 0.0, 0.5]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert np.asarray(pictures.grid("title", colours, ["a"], 1))[100, 50].tolist() == [255, 0, 128]


@pytest.mark.parametrize(
    "predictions, why",
    [
        # A target below 0 is none.
        ([torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([1, -100])], "all predictions are right"),
        # As of each pixel, with segmentation.patch.
        ([torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4).long()], "the predictions are not one class of each sample"),
    ],
)
def test_without_a_mistake_or_classes_there_is_no_picture(predictions, why: str, pictures, tmp_path: Path, capsys):
    torch.save(predictions, tmp_path / "predictions_test_best.pt")
    config = SimpleNamespace(out_dir=tmp_path, split="test", predictions=True)
    fabric = SimpleNamespace(is_global_zero=True)
    dataset = build_datasets(TrainConfig())["test"]
    pictures.write_wrong(EvalRun(fabric, config, TrainConfig(), Path("best.ckpt"), {}, dataset))
    assert capsys.readouterr().out == f"no wrong_test_best.png: {why}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["predictions_test_best.pt"]


def test_the_training_is_that_without_the_recipe(trained: Path, tmp_path: Path):
    call(f"train.py {SMALL} --logger_name csv", tmp_path)
    torch.testing.assert_close(weights(trained), weights(tmp_path), atol=0, rtol=0)


def test_killed_run_ends_as_if_never_interrupted(program: Path, tmp_path: Path):
    """Also TensorBoard has the one picture, the same."""
    # Resumed in a process of its own: TensorBoard sorts the files of a second by process number.
    whole, killed = killed_and_resumed(f"{program}/{TENSORBOARD}", tmp_path, resume=run)
    page = first_batch(killed)
    assert np.array_equal(page, first_batch(whole))
    assert page.shape[0] == 44 + 2 * 132  # of the first of four micro-batches of 16


def test_two_processes_learn_the_same(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{TENSORBOARD} --max_steps 8", tmp_path)
    torch.testing.assert_close(weights(one), weights(two), atol=1e-5, rtol=0)
    assert np.array_equal(first_batch(one), first_batch(two))  # of rank 0
