"""The data sets of recipes/data.md: its patches applied, on small real files."""

import importlib
import json
import pickle
import re
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import LONG, ON_2, assert_same_run, call, interrupt, kill_group, run, run_dir, weights
from lightning.fabric import Fabric
from PIL import Image
from test_recipes import imported, with_recipe
from torch.utils.data import Subset

from config import TrainConfig
from utils import make_plan

pytestmark = pytest.mark.recipes
NAMES = ["folder", "lines", "mapped", "parquet", "stream"]
SIZES = {"train": 600, "val": 100, "test": 50}
RUN = LONG.replace("--epochs 30", "--epochs 12")  # of 8 steps: 96


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Digits in all formats but parquet, sorted by class, as a folder per class sorts them."""
    from sklearn.datasets import load_digits

    folder, digits = tmp_path_factory.mktemp("files"), load_digits()
    for split, part in zip(SIZES, np.split(np.arange(750), [600, 700]), strict=True):
        part = part[digits.target[part].argsort(kind="stable")]
        images, targets = digits.images[part].astype(np.uint8)[:, None], digits.target[part]
        np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_targets.npy", targets)
        for i, (image, target) in enumerate(zip(images, targets, strict=True)):
            (folder / split / str(target)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(folder / split / str(target) / f"{i:03d}.png")
        pairs = zip(images.tolist(), targets.tolist(), strict=True)
        lines = [json.dumps({"image": image, "label": label}) + "\n" for image, label in pairs]
        (folder / f"{split}.jsonl").write_text("".join(lines))
        if split == "train":
            for shard in range(3):
                (folder / f"train-{shard}.jsonl").write_text("".join(lines[shard::3]))
    return folder


@pytest.fixture(scope="module")
def hugging_face(files: Path, tmp_path_factory) -> None:
    """Parquet files, with the images as PNG, in two shards for the training; Hugging Face's cache in a folder here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hugging_face")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(label=datasets.ClassLabel(num_classes=10), image=datasets.Image())
        for split in SIZES:
            images = [Image.fromarray(image[0]) for image in np.load(files / f"{split}_images.npy")]
            rows = {"label": np.load(files / f"{split}_targets.npy").tolist(), "image": images}
            rows = datasets.Dataset.from_dict(rows, features=features)
            for i in range(shards := 2 if split == "train" else 1):
                rows.shard(shards, i).to_parquet(files / f"{split}-{i}.parquet")
        yield


@pytest.fixture(scope="module", params=NAMES)
def name(request, files: Path) -> str:
    if request.param == "parquet":
        request.getfixturevalue("hugging_face")
    return request.param


@pytest.fixture(scope="module")
def repo(name: str, tmp_path_factory) -> Path:
    return with_recipe(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def data(name: str, repo: Path):
    """The edited data.py, beside which is the file of the data set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repo)
        for module in ("data", name):
            patch.delitem(sys.modules, module, raising=False)
        yield importlib.import_module("data")
        for module in ("data", name):
            sys.modules.pop(module, None)


def build(data: ModuleType, name: str, files: Path, augment: bool = True) -> dict:
    """The data sets of the edited data.py."""
    sizes = {"limit_train_batches": 9, "effective_batch_size": 64}  # which a stream needs
    return data.build_datasets(SimpleNamespace(dataset=name, data_dir=str(files), **sizes), augment)


def test_each_image_comes_with_its_class(name: str, data: ModuleType, files: Path):
    scale = {"lines": 16, "stream": 16}.get(name, 255)
    for split in ("val", "test"):
        part = build(data, name, files)[split]
        order = np.random.default_rng(0).permutation(SIZES[split])
        assert len(part) == SIZES[split] and part.num_classes == 10
        images, targets = data.SeededBatches(part, 42)[0, order]
        assert images.dtype == torch.float32 and targets.dtype == torch.int64
        expected = torch.from_numpy(np.load(files / f"{split}_images.npy")[order])
        torch.testing.assert_close(images * scale, expected.float())
        assert targets.tolist() == np.load(files / f"{split}_targets.npy")[order].tolist()
        torch.testing.assert_close(torch.as_tensor(part[int(order[0])][0]), images[0])


def test_a_subset_has_the_samples_of_its_indices(name: str, data: ModuleType, files: Path):
    part = build(data, name, files)["val"]
    subset = Subset(part, [7, 3, 50])
    images, targets = data.SeededBatches(subset, 42)[0, np.arange(3)]
    expected, classes = data.SeededBatches(part, 42)[0, np.array([7, 3, 50])]
    assert torch.equal(images, expected) and torch.equal(targets, classes)


def load(data, name, files, epoch=0, rank=0, world_size=1, num_workers=0, step=0) -> list[tuple[list, list]]:
    """The micro-batches of a rank in an epoch of 9 steps of 64 samples, 4 micro-batches each."""
    train = build(data, name, files)["train"]
    train[0]  # as the training process does before it starts workers
    config = TrainConfig(effective_batch_size=64, micro_batch_size=16, limit_train_batches=9)
    plan = make_plan(config, len(train), val_samples=0, world_size=world_size, saved_micro_batch_size=0)
    sampler = data.TrainSampler(plan, train, rank, seed=42)
    sampler.step = epoch * plan.steps_per_epoch + step
    with ExitStack() as resources:
        fabric = Fabric(accelerator="cpu", devices=1)
        loader = data.Loader(fabric, train, sampler, TrainConfig(num_workers=num_workers), resources)
        return [(images.tolist(), targets.tolist()) for images, targets in loader]


def test_the_samples_depend_neither_on_workers_nor_on_devices_nor_on_a_resume(name: str, data, files: Path):
    alone = load(data, name, files, epoch=1)
    assert len(alone) == 36
    for rank in range(2):
        assert load(data, name, files, 1, rank, 2, num_workers=2) == alone[rank::2]
    assert load(data, name, files, 1, num_workers=2, step=2) == alone[8:]
    assert load(data, name, files, epoch=0) != alone
    targets = np.load(files / "train_targets.npy")
    seen = np.bincount(sum((targets for _, targets in alone), []), minlength=10)
    assert (abs(seen - np.bincount(targets)) <= 24).all()  # 576 of the 600, or of the stream something like them
    assert alone[0][1] != sorted(alone[0][1])  # shuffled


def test_augmentation_follows_the_number_of_the_micro_batch(name: str, data, files: Path):
    batches, plain = (data.SeededBatches(build(data, name, files, augment)["train"], 42) for augment in (True, False))
    first, again, other = (batches[number, np.arange(64)][0] for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(plain[0, np.arange(64)][0], plain[1, np.arange(64)][0])
    if name in ("folder", "mapped"):
        changed = [i for i in range(64) if not torch.equal(first[i], other[i])]
        assert 16 < len(changed) < 48
        assert all(torch.equal(first[i], other[i].flip(-1)) for i in changed)


def test_a_worker_that_is_not_forked_gets_no_data(name: str, data, files: Path):
    """It gets the dataset pickled: after a first sample was taken, and without its arrays."""
    train = build(data, name, files)["train"]
    train[0]
    pickled = pickle.dumps(train)
    assert len(pickled) < 10_000 or name == "folder"  # 38,400 bytes are the images; a folder sends its file names
    ours, theirs = (data.SeededBatches(dataset, 42)[1, np.arange(5, 9)] for dataset in (train, pickle.loads(pickled)))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_a_stream_needs_the_length_of_an_epoch(files: Path, tmp_path: Path):
    stream = f"{with_recipe('stream', tmp_path)}/train.py --dataset stream --data_dir {files}"
    for options in ("", " --limit_train_batches 0.5"):
        assert "--limit_train_batches" in call(f"{stream}{options}", tmp_path, code=2).stderr


def test_parquet_that_hugging_face_has_not_written(files: Path, hugging_face, tmp_path: Path):
    """pyarrow alone: bytes and numbers, without names of the classes."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split in SIZES:
        names = sorted((files / split).glob("*/*.png"))
        columns = {"image": [path.read_bytes() for path in names], "label": [int(path.parent.name) for path in names]}
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{split}.parquet")
    module = imported(with_recipe("parquet", tmp_path / "program"), "parquet")
    theirs, ours = (module.build_parquet(str(folder)) for folder in (files, tmp_path))
    for split, size in SIZES.items():
        assert len(ours[split]) == size and ours[split].num_classes == theirs[split].num_classes == 10
        for one, other in zip(
            ours[split].__getitems__(range(size)), theirs[split].__getitems__(range(size)), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["lines", "stream"])
def test_blank_lines_are_no_samples(name: str, files: Path, tmp_path: Path):
    texts = {path.name: path.read_text() for path in files.glob("*.jsonl")}
    for file, text in texts.items():
        (tmp_path / file).write_text("\n" + text.replace("\n", "\n \n\n", 5) + "\n")
    module = imported(with_recipe(name, tmp_path / "program"), name)
    options = (64,) if name == "stream" else ()
    plain, found = (getattr(module, f"build_{name}")(str(folder), *options) for folder in (files, tmp_path))
    for split, indices in {"train": range(200), "val": range(100), "test": range(50)}.items():
        assert len(found[split]) == len(plain[split])
        for index in indices:
            assert found[split][index][1] == plain[split][index][1]
            assert torch.equal(found[split][index][0], plain[split][index][0])


def test_a_stream_without_lines_is_named(files: Path, tmp_path: Path):
    program = with_recipe("stream", tmp_path / "program")
    shutil.copy(files / "val.jsonl", tmp_path)
    shutil.copy(files / "test.jsonl", tmp_path)
    (tmp_path / "train-0.jsonl").write_text("\n\n")
    options = f"--dataset stream --data_dir {tmp_path} --limit_train_batches 8"
    done = run(
        f"{program}/train.py {options}", tmp_path, code=2
    )  # in a process of its own: without an end it is killed
    assert "train-*.jsonl: no lines" in done.stderr


@pytest.mark.parametrize("name", ["stream"], indirect=True)
def test_no_worker_has_to_skip_within_the_timeout(name: str, data: ModuleType, files: Path, monkeypatch):
    """Here it takes twice as long."""
    expected = load(data, name, files, epoch=5, step=1)[0]
    stream = sys.modules["stream"]
    plain = stream.lines_of

    def slow_lines(path: Path):
        for line in plain(path):
            time.sleep(0.003)
            yield line

    monkeypatch.setattr(stream, "lines_of", slow_lines)
    train = build(data, name, files)["train"]
    config = TrainConfig(effective_batch_size=64, micro_batch_size=16, limit_train_batches=9, num_workers=1, timeout=4)
    plan = make_plan(config, len(train), val_samples=0, world_size=1, saved_micro_batch_size=0)
    with ExitStack() as resources:
        fabric = Fabric(accelerator="cpu", devices=1)
        loader = data.Loader(fabric, train, data.TrainSampler(plan, train, 0, seed=42), config, resources)
        began = time.monotonic()
        images, targets = next(loader.batches_from(5 * 9 + 1))
        assert time.monotonic() - began > 8
    assert (images.tolist(), targets.tolist()) == expected


@pytest.fixture
def pictures(files: Path, tmp_path: Path) -> Path:
    """The folders of the classes, in a folder of one's own."""
    for split in SIZES:
        shutil.copytree(files / split, tmp_path / "pictures" / split)
    return tmp_path / "pictures"


def test_files_and_what_is_hidden_are_no_classes_of_a_folder(files: Path, pictures: Path, tmp_path: Path):
    folder = imported(with_recipe("folder", tmp_path / "program"), "folder")
    plain = folder.build_folder(str(files), augment=False)
    for split in SIZES:
        (pictures / split / ".DS_Store").write_text("of the Finder")
        (pictures / split / "README.txt").write_text("a file")
        (pictures / split / ".ipynb_checkpoints").mkdir()
        (pictures / split / "3" / "._000.png").write_text("of macOS, no image")
    found = folder.build_folder(str(pictures), augment=False)
    for split in SIZES:
        assert found[split].num_classes == 10
        assert found[split].targets.tolist() == plain[split].targets.tolist()


@pytest.mark.parametrize("change, message", [("val has another", "'?val.* classes that train does not have: 10"),
                                             ("train has an empty one", "train/10/.*no such file")])  # fmt: skip
def test_a_class_of_a_folder_without_training_images_is_named(
    change: str, message: str, pictures: Path, tmp_path: Path
):
    (pictures / change.split()[0] / "10").mkdir()
    program = with_recipe("folder", tmp_path / "program")
    done = call(f"{program}/train.py --dataset folder --data_dir {pictures}", tmp_path, code=2)
    (line,) = done.stderr.splitlines()
    assert re.search(message, line)


def test_killed_in_mid_epoch_with_workers_and_resumed_is_the_same_run(name: str, repo: Path, files: Path, tmp_path):
    command = f"{repo}/{RUN} --dataset {name} --data_dir {files}"
    if name not in ("folder", "stream"):  # for the loop as `folder` is
        call(f"{repo}/train.py --accelerator cpu --fast_run --dataset {name} --data_dir {files}", tmp_path)
        return
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    call(command, whole)
    assert interrupt(f"{command} --num_workers 2", killed, kill_group).returncode < 0
    call(f"{repo}/train.py --resume {run_dir(killed)}", killed)
    assert_same_run(killed, whole)
    if name == "stream":
        (tmp_path / "on_2").mkdir()
        run(f"{command} {ON_2}", tmp_path / "on_2")
        torch.testing.assert_close(weights(tmp_path / "on_2"), weights(whole), atol=1e-5, rtol=0)
