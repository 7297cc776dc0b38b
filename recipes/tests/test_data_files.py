"""The data sets of docs/data.md: its patches applied, on small real files."""

import gzip
import importlib
import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from edits import insert_after, with_text
from helpers import (
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    imported,
    interrupt,
    kill_group,
    run,
    run_dir,
    with_recipe,
)
from lightning.fabric import Fabric
from PIL import Image
from torch.utils.data import Subset

from config import TrainConfig
from runtime.loader import Loader, SeededBatches, TrainSampler
from utils import make_plan

pytestmark = pytest.mark.recipes
FORMATS = ["hugging_face_pictures", "hugging_face_parquet", "hugging_face_json", "hugging_face_csv", "mapped", "stream"]
SIZES = {"train": 600, "val": 100, "test": 50}
RUN = f"{LONG} --epochs 12"  # of 8 steps: 96


def write_pictures(folder: Path, images: np.ndarray, targets: np.ndarray) -> list[Path]:
    """A folder for each class, in the order of the names."""
    names = []
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        names.append(folder / str(target) / f"{i:03d}.png")
        names[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(names[-1])
    return names


def write_shards(folder: Path, lines: list[str], ends: list[int]) -> None:
    for shard, part in enumerate(np.split(np.array(lines, object), ends)):
        with gzip.open(folder / f"train-{shard:02d}.jsonl.gz", "wt") as file:
            file.writelines(part)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Digits in all formats but parquet, sorted by class, as a folder per class sorts them. The first two pixels of an
    image tell its number. One of the 41 shards is empty, one is large."""
    from sklearn.datasets import load_digits

    root, digits = tmp_path_factory.mktemp("files"), load_digits()
    folders = {name: root / name for name in FORMATS}
    for folder in folders.values():
        folder.mkdir()
    for split, part in zip(SIZES, np.split(np.arange(750), [600, 700]), strict=True):
        part = part[digits.target[part].argsort(kind="stable")]
        images, targets = digits.images[part].astype(np.uint8)[:, None], digits.target[part]
        images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(len(part)) % 100, np.arange(len(part)) // 100
        np.save(folders["mapped"] / f"{split}_images.npy", images)
        np.save(folders["mapped"] / f"{split}_targets.npy", targets)
        write_pictures(folders["hugging_face_pictures"] / split, images, targets)
        csv = folders["hugging_face_csv"]
        names = write_pictures(csv / "pictures" / split, images, targets)
        rows = [f"{name.relative_to(csv)},digit {name.parent.name}\n" for name in names]
        (csv / f"{split}.csv").write_text("image,label\n" + "".join(rows))
        pairs = zip(images.tolist(), targets.tolist(), strict=True)
        lines = [json.dumps({"image": image, "label": label}) + "\n" for image, label in pairs]
        (folders["hugging_face_json"] / f"{split}.jsonl").write_text("".join(lines))
        if split == "train":
            write_shards(folders["stream"], lines, [0, 150, *range(160, 550, 11), 590, 597, 598])
        else:
            (folders["stream"] / f"{split}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return root


@pytest.fixture(scope="module")
def hugging_face(files: Path, tmp_path_factory) -> None:
    """Parquet files, with the images as PNG, in two shards for the training; Hugging Face's cache in a folder here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hugging_face")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(label=datasets.ClassLabel(num_classes=10), image=datasets.Image())
        for split in SIZES:
            images = [Image.fromarray(image[0]) for image in np.load(files / "mapped" / f"{split}_images.npy")]
            rows = {"label": np.load(files / "mapped" / f"{split}_targets.npy").tolist(), "image": images}
            rows = datasets.Dataset.from_dict(rows, features=features)
            for i in range(shards := 2 if split == "train" else 1):
                rows.shard(shards, i).to_parquet(files / "hugging_face_parquet" / f"{split}-{i}.parquet")
        yield


def with_format(name: str, files: Path, program: Path) -> Path:
    """The programs with the recipe of a format; a stream with blocks of four lines, and the sizes of its shards."""
    with_recipe("datasets" if name == "hugging_face" else name, program)
    if name == "stream":
        with_text(program, "stream.py", ("BLOCK = 1000", "BLOCK = 4"))
        run(f"{program}/stream.py {files / 'stream'}", program)
    return program


@pytest.fixture(scope="module", params=FORMATS)
def kind(request, files: Path) -> str:
    if request.param.startswith("hugging_face"):
        request.getfixturevalue("hugging_face")
    return request.param


@pytest.fixture(scope="module")
def name(kind: str) -> str:
    """What --dataset is."""
    return "hugging_face" if kind.startswith("hugging_face") else kind


@pytest.fixture(scope="module")
def repo(name: str, files: Path, tmp_path_factory) -> Path:
    return with_format(name, files, tmp_path_factory.mktemp(name))


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


@pytest.fixture(scope="module")
def build(kind: str, name: str, data: ModuleType, files: Path):
    """Makes the data sets of the edited data.py."""

    def build(augment: bool = True) -> dict:
        config = SimpleNamespace(dataset=name, data_dir=str(files / kind), effective_batch_size=64)
        return data.build_datasets(config, augment)

    return build


def images_of(files: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.load(files / "mapped" / f"{split}_{what}.npy") for what in ("images", "targets"))


def test_each_image_comes_with_its_class(build, files: Path):
    for split in ("val", "test"):
        part = build()[split]
        order = np.random.default_rng(0).permutation(SIZES[split])
        assert len(part) == SIZES[split] and part.num_classes == 10
        found, classes = SeededBatches(part, 42)[0, order]
        assert found.dtype == torch.float32 and classes.dtype == torch.int64
        images, targets = images_of(files, split)
        torch.testing.assert_close(found * 255, torch.from_numpy(images[order]).float().expand_as(found))
        assert classes.tolist() == targets[order].tolist()
        torch.testing.assert_close(torch.as_tensor(part[int(order[0])][0]), found[0])
        subset = SeededBatches(Subset(part, order[:3].tolist()), 42)[0, np.arange(3)]
        assert torch.equal(subset[0], found[:3]) and torch.equal(subset[1], classes[:3])


def sampler_of(train, rank: int = 0, world_size: int = 1, step: int = 0):
    """That of a rank in epochs of 9 steps of 64 samples, 4 micro-batches each."""
    config = TrainConfig(effective_batch_size=64, micro_batch_size=16)
    plan = make_plan(config, len(train), val_samples=0, world_size=world_size, saved_size=0)
    sampler = TrainSampler(plan, train, rank, seed=42)
    sampler.step = step
    return sampler


def load(build, step: int, rank: int = 0, world_size: int = 1, num_workers: int = 0) -> list[tuple[list, list]]:
    """The micro-batches of a rank from a step to the end of its epoch."""
    train = build()["train"]
    train[0]  # as the training process does before it starts workers
    sampler = sampler_of(train, rank, world_size, step)
    loader = Loader(Fabric(accelerator="cpu", devices=1), train, sampler, TrainConfig(num_workers=num_workers))
    return [(images.tolist(), targets.tolist()) for images, targets in loader]


def test_the_samples_depend_neither_on_workers_nor_on_devices_nor_on_a_resume(build, files: Path):
    alone = load(build, step=9)
    assert len(alone) == 36
    for rank in range(2):
        assert load(build, 9, rank, world_size=2, num_workers=2) == alone[rank::2]
    assert load(build, 11, num_workers=3) == alone[8:]
    assert load(build, step=0) != alone
    seen = np.bincount(sum((targets for _, targets in alone), []), minlength=10)
    missing = np.bincount(images_of(files, "train")[1]) - seen
    assert (missing >= 0).all() and missing.sum() == 24  # 576 of the 600
    batch = sum((targets for _, targets in alone[:4]), [])
    assert batch != sorted(batch)  # shuffled


def test_augmentation_follows_the_number_of_the_micro_batch(kind: str, build):
    batches, plain = (SeededBatches(build(augment)["train"], 42) for augment in (True, False))
    first, again, other = (batches[number, np.arange(64)][0] for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(plain[0, np.arange(64)][0], plain[1, np.arange(64)][0])
    if kind != "stream":
        changed = [i for i in range(64) if not torch.equal(first[i], other[i])]
        assert 16 < len(changed) < 48
        assert all(torch.equal(first[i], other[i].flip(-1)) for i in changed)


def test_a_worker_that_is_not_forked_gets_no_data(build):
    """It gets the dataset pickled: after a first sample was taken, and without its arrays."""
    train = build()["train"]
    train[0]
    pickled = pickle.dumps(train)
    assert len(pickled) < 10_000  # 38,400 bytes are the images
    ours, theirs = (SeededBatches(dataset, 42)[1, np.arange(5, 9)] for dataset in (train, pickle.loads(pickled)))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_killed_in_mid_epoch_with_workers_and_resumed_is_the_same_run(kind, name, repo: Path, files: Path, tmp_path):
    command = f"{repo}/{RUN} --dataset {name} --data_dir {files / kind}"
    if kind not in ("hugging_face_pictures", "mapped"):  # for the loop as these; a stream is killed below
        call(f"{command} --fast_run", tmp_path)
        return
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    call(command, whole)
    assert interrupt(f"{command} --num_workers 2", killed, kill_group).returncode < 0
    call(f"{repo}/train.py --resume {run_dir(killed)}", killed)
    assert_same_run(killed, whole)


# ---- Hugging Face datasets


@pytest.fixture
def rows(hugging_face, tmp_path: Path) -> ModuleType:
    return imported(with_recipe("datasets", tmp_path / "program"), "hugging_face")


@pytest.fixture
def pictures(files: Path, tmp_path: Path) -> Path:
    """The folders of the classes, in a folder of one's own."""
    return Path(shutil.copytree(files / "hugging_face_pictures", tmp_path / "pictures"))


def error_of(rows: ModuleType, folder: Path) -> str:
    """What the one line says that train.py prints."""
    with pytest.raises(OSError) as error:
        rows.build_hugging_face(str(folder), augment=False)
    return str(error.value)


def test_hugging_face_parquet_of_others(files: Path, rows: ModuleType, tmp_path: Path):
    """pyarrow alone: bytes and numbers, without names of the classes."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split in SIZES:
        names = sorted((files / "hugging_face_pictures" / split).glob("*/*.png"))
        columns = {"image": [path.read_bytes() for path in names], "label": [int(path.parent.name) for path in names]}
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{split}.parquet")
    theirs, ours = (rows.build_hugging_face(str(f), False) for f in (files / "hugging_face_parquet", tmp_path))
    for split, size in SIZES.items():
        assert len(ours[split]) == size and ours[split].class_names == theirs[split].class_names
        pairs = zip(ours[split].__getitems__(range(size)), theirs[split].__getitems__(range(size)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_hugging_face_files_and_what_is_hidden_are_no_classes(files: Path, pictures: Path, rows: ModuleType):
    plain = rows.build_hugging_face(str(files / "hugging_face_pictures"), augment=False)
    for split in SIZES:
        (pictures / split / ".DS_Store").write_text("of the Finder")
        (pictures / split / "README.txt").write_text("a file")
        (pictures / split / ".ipynb_checkpoints").mkdir()
        shutil.copy(pictures / split / "3" / next((pictures / split / "3").iterdir()).name, pictures / split / ".a.png")
        shutil.copy(pictures / split / ".a.png", pictures / split / ".ipynb_checkpoints" / "a.png")
        (pictures / split / "3" / "._000.png").write_text("of macOS, no image")
    found = rows.build_hugging_face(str(pictures), augment=False)
    for split in SIZES:
        assert found[split].class_names == [str(digit) for digit in range(10)]
        assert torch.equal(found[split].rows["label"][:], plain[split].rows["label"][:])


def an_unseen_class(folder: Path) -> None:
    (folder / "train" / "10").mkdir()
    shutil.copytree(folder / "val" / "1", folder / "val" / "10")


def no_folders(folder: Path) -> None:
    for path in [*folder.rglob("*.png")]:
        path.rename(path.parents[1] / f"{path.parent.name}{path.name}")


def deeper_folders(folder: Path) -> None:
    for split in SIZES:
        (folder / split / "1" / "more").mkdir()
        (path, *_) = (folder / split / "1").glob("*.png")
        path.rename(folder / split / "1" / "more" / path.name)


def sixteen_bits(folder: Path) -> None:
    """Pillow would make all white what is above 255."""
    for path in folder.rglob("*.png"):
        Image.fromarray(np.full((8, 8), 30_000, np.uint16)).save(path)


REFUSED = {an_unseen_class: "10", no_folders: "val", deeper_folders: "more", sixteen_bits: "I;16"}


@pytest.mark.parametrize("edit", REFUSED)
def test_hugging_face_pictures_that_cannot_be_read_are_refused(edit, pictures: Path, rows: ModuleType):
    edit(pictures)
    assert REFUSED[edit] in error_of(rows, pictures)


@pytest.mark.parametrize("label", ["-1", "null", "1.5", "true", "no json"])
def test_hugging_face_labels_that_are_no_classes_are_refused(label: str, rows: ModuleType, tmp_path: Path):
    for split in SIZES:
        good = '{"image": [[[0]]], "label": 1}\n{"image": [[[0\n'
        lines = good if label == "no json" else 3 * f'{{"image": [[[0, 1], [2, 3]]], "label": {label}}}\n'
        (tmp_path / f"{split}.jsonl").write_text(lines)
    assert ("generating the dataset" if label == "no json" else "train: the label ") in error_of(rows, tmp_path)


def test_hugging_face_files_of_no_kind_of_two_or_with_other_columns_are_refused(rows: ModuleType, tmp_path: Path):
    assert "[]" in error_of(rows, tmp_path)
    for split in SIZES:
        (tmp_path / f"{split}.csv").write_text("image,class\na.png,3\n")
    assert "image, class" in error_of(rows, tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert "['json', 'csv']" in error_of(rows, tmp_path)
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "val.csv").unlink()
    assert '"val"' in error_of(rows, tmp_path)


def csv_in(folder: Path, files: Path, **names: list[str]) -> Path:
    """A folder with the first picture of each class in a csv file for each split, and a name for each."""
    folder.mkdir()
    paths = [next((files / "hugging_face_pictures" / "train" / str(i)).iterdir()) for i in range(10)]
    for split in SIZES:
        found = [f"{path},{name}\n" for path, name in zip(paths, names.get(split, names["train"]), strict=False)] * 8
        (folder / f"{split}.csv").write_text("image,label\n" + "".join(found))
    return folder


def test_hugging_face_names_have_one_order_in_all_parts(files: Path, rows: ModuleType, tmp_path: Path):
    found = rows.build_hugging_face(str(csv_in(tmp_path / "a", files, train=["cat", "ape", "dog"], val=["cat"])), False)
    assert [part.class_names for part in found.values()] == [["ape", "cat", "dog"]] * 3
    assert found["train"].rows["label"][:3].tolist() == [1, 0, 2] and found["val"].rows["label"][0] == 1
    assert "does not have: eel" in error_of(rows, csv_in(tmp_path / "b", files, train=["cat", "ape"], test=["eel"]))


def test_hugging_face_classes_of_other_names_are_refused_by_a_resume_and_test_py(files, hugging_face, tmp_path: Path):
    """With as many classes, the weights alone would not tell."""
    program = with_recipe("datasets", tmp_path / "program")
    first = csv_in(tmp_path / "first", files, train=["ape", "cat", "dog"])
    other = csv_in(tmp_path / "other", files, train=["cat", "dog", "eel"])
    options = f"{SMALL} --dataset hugging_face --effective_batch_size 8 --limit_train_batches 2 --max_steps 4"
    call(f"{program}/train.py {options} --data_dir {first}", tmp_path)
    call(f"{program}/test.py --accelerator cpu", tmp_path)
    for command in ("train.py --resume auto --max_steps 6", "test.py --accelerator cpu"):
        error = call(f"{program}/{command} --data_dir {other}", tmp_path, code=2).stderr
        assert "--data_dir" in error.splitlines()[-1] and "eel" in error.splitlines()[-1], error
    call(f"{program}/train.py --resume auto --max_steps 6 --data_dir {first}", tmp_path)


# ---- JSON lines


@pytest.mark.parametrize("kind", ["hugging_face_json", "stream"])
def test_blank_lines_are_no_samples(kind: str, files: Path, request, tmp_path: Path):
    is_stream = kind == "stream"
    if not is_stream:
        request.getfixturevalue("hugging_face")
    with_blank = tmp_path / "files"
    with_blank.mkdir()
    for path in (files / kind).glob("*.jsonl*"):
        text = gzip.decompress(path.read_bytes()).decode() if is_stream else path.read_text()
        text = "\n" + text.replace("\n", "\n \n\n", 5) + "\n"
        (with_blank / path.name).write_bytes(gzip.compress(text.encode()) if is_stream else text.encode())
    name = "stream" if is_stream else "hugging_face"
    module = imported(with_format(name, files, tmp_path / "program"), name)
    if is_stream:
        run(f"{tmp_path}/program/stream.py {with_blank}", tmp_path)
    last = 64 if is_stream else False
    plain, found = (getattr(module, f"build_{name}")(str(folder), last) for folder in (files / kind, with_blank))
    for split, size in SIZES.items():
        assert len(found[split]) == len(plain[split]) == size
        for index in range(size):
            assert found[split][index][1] == plain[split][index][1]
            assert torch.equal(found[split][index][0], plain[split][index][0])


# ---- a stream


@pytest.fixture(scope="module")
def stream_program(files: Path, tmp_path_factory) -> Path:
    return with_format("stream", files, tmp_path_factory.mktemp("stream"))


@pytest.fixture
def reader(stream_program: Path) -> ModuleType:
    return imported(stream_program, "stream")


@pytest.fixture
def shards(files: Path, tmp_path: Path, stream_program: Path) -> Path:
    """The files of the stream, in a folder of one's own."""
    return Path(shutil.copytree(files / "stream", tmp_path / "shards"))


def refused(program: Path, shards: Path, cwd: Path, options: str = "", code: int = 2) -> str:
    """The one line of a stream that is refused."""
    done = call(f"{program}/train.py --accelerator cpu --dataset stream --data_dir {shards} {options}", cwd, code)
    (line,) = done.stderr.splitlines()
    return line


def test_a_stream_has_each_line_once_an_epoch(reader: ModuleType, files: Path):
    """But for the last ones, others in each epoch, and in another order."""
    train = reader.build_stream(str(files / "stream"), 64)["train"]
    epochs = [train.order(epoch, torch.Generator().manual_seed(epoch)) for epoch in range(3)]
    for order in epochs:
        assert len(order) == 9 * 64 == len(set(order.tolist())) and order.min() >= 0 and order.max() < 600
    assert not np.array_equal(epochs[0], epochs[1])
    assert set(np.concatenate(epochs)) > set(epochs[0])


@pytest.mark.parametrize("world_size, num_workers", [(2, 1), (1, 4), (2, 2), (4, 4)])
def test_a_part_of_a_stream_is_read_by_one_process(world_size, num_workers, reader, tmp_path: Path):
    """So a shard is, where no two parts meet. The order needs no more of the 64 shards than their sizes."""
    sizes = {f"train-{shard:02d}.jsonl.gz": (100 + shard, 0) for shard in range(64)}  # of empty files
    for name in sizes:
        (tmp_path / name).touch()
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    train = reader.Stream(tmp_path, 64)
    readers = set()
    for rank in range(world_size):
        for number, (_, lines) in enumerate(sampler_of(train, rank, world_size)):
            shards = np.searchsorted(train.starts, lines, side="right") - 1
            readers |= {(shard, rank, number % num_workers) for shard in shards.tolist()}
    assert len(readers) <= len(train.shards) + reader.PARTS - 1


def test_a_resumed_stream_reads_no_shard_but_those_of_its_batch(reader: ModuleType, files: Path, monkeypatch):
    """However long the run has been. So what it skips is limited by the size of a shard: --timeout holds there."""
    train = reader.build_stream(str(files / "stream"), 64)["train"]
    _, lines = next(iter(sampler_of(train, step=1000 * 9 + 4)))
    read, plain = [], reader.lines_of

    def counted(path: Path):
        for line in plain(path):
            read.append(path)
            yield line

    monkeypatch.setattr(reader, "lines_of", counted)
    for index in lines.tolist():
        train[index]
    used = set(np.searchsorted(train.starts, lines, side="right") - 1)
    assert {*read} == {train.shards[shard] for shard in used}
    assert len(read) <= sum(train.sizes[shard] for shard in used) < 600


def test_a_stream_reads_each_shard_once_but_where_it_is_cut(reader: ModuleType, files: Path, monkeypatch):
    """By one process without workers, which has all parts."""
    train = reader.build_stream(str(files / "stream"), 64)["train"]
    order, opened, plain = train.order(0, torch.Generator().manual_seed(0)), [], reader.lines_of
    monkeypatch.setattr(reader, "lines_of", lambda path: opened.append(path) or plain(path))
    for index in order.tolist():
        train[index]
    assert {*opened} <= {*train.shards} and len(opened) < len(train.shards) + reader.PARTS


def test_a_stream_with_too_few_shards_or_another_batch_is_refused(stream_program: Path, shards: Path, tmp_path: Path):
    assert "a multiple of 8" in refused(stream_program, shards, tmp_path, "--effective_batch_size 60")
    for path in sorted(shards.glob("train-*"))[31:]:
        path.unlink()
    assert "sizes.json is of other shards" in refused(stream_program, shards, tmp_path)
    run(f"{stream_program}/stream.py {shards}", tmp_path)
    assert "31 shards, but 32 parts" in refused(stream_program, shards, tmp_path)
    (shards / "sizes.json").unlink()
    assert "sizes.json" in refused(stream_program, shards, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize("change", ["a line more", "a line less", "cut"])
def test_a_stream_names_the_shard_that_has_changed(change: str, stream_program: Path, shards: Path, tmp_path: Path):
    path = shards / "train-01.jsonl.gz"  # 150 lines
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    lines = lines + lines[:1] if change == "a line more" else lines[:-1]
    whole = gzip.compress(b"".join(lines))
    path.write_bytes(whole[: len(whole) // 2] if change == "cut" else whole)
    assert "sizes.json is of other shards (train-01.jsonl.gz)" in refused(stream_program, shards, tmp_path)
    sizes = json.loads((shards / "sizes.json").read_text())
    sizes[path.name][1] = path.stat().st_size  # as if it had as many bytes as before
    (shards / "sizes.json").write_text(json.dumps(sizes))
    line = refused(stream_program, shards, tmp_path, "--max_steps 18", code=1)
    assert "train-01.jsonl.gz: " in line and ("end-of-stream" if change == "cut" else "sizes.json") in line
    if change == "cut":
        error = run(f"{stream_program}/stream.py {shards}", tmp_path, code=1).stderr
        assert re.fullmatch(r"\S+train-01.jsonl.gz: .*end-of-stream.*\n", error)


def lines_by_step(folder: Path, world_size: int) -> dict[int, list[int]]:
    """The numbers of the lines that a run has trained on, by step; those of a step that came again once."""
    micro_batches = set()  # of a step that came again with other lines, those are among them, too
    for rank in range(world_size):
        micro_batches |= {*(folder / f"lines_{rank}.txt").read_text().splitlines()}
    steps: dict[int, list[int]] = {}
    for text in micro_batches:
        step, *numbers = map(int, text.split())
        steps.setdefault(step, []).extend(numbers)
    return {step: sorted(numbers) for step, numbers in steps.items()}


NOTE = """
with open(f"lines_{fabric.global_rank}.txt", "a") as file:
    pixels = (batch[0][:, 0, 0, :2] * 255).round().int()
    print(step, *(pixels[:, 0] + 100 * pixels[:, 1]).tolist(), file=file)
"""


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_no_line_of_a_stream_is_lost_or_comes_twice_after_a_kill(devices: str, files: Path, tmp_path: Path):
    program = with_format("stream", files, tmp_path / "program")
    insert_after(program, "micro-batch is done", NOTE)
    options = f"--dataset stream --data_dir {files / 'stream'} --effective_batch_size 72 --micro_batch_size 18"
    command, how = f"{program}/{RUN} {options}", run if devices else call
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    call(command, whole)
    assert interrupt(f"{command} --num_workers 2 {devices}", killed, kill_group).returncode < 0
    how(f"{program}/train.py --resume auto", killed)
    (assert_same_training if devices else assert_same_run)(killed, whole)
    steps = lines_by_step(killed, 2 if devices else 1)
    assert steps == lines_by_step(whole, 1) and len(steps) == 96
    for first in range(1, 97, 8):  # the steps of an epoch
        numbers = sum((steps[step] for step in range(first, first + 8)), [])
        assert len(numbers) == len(set(numbers)) == 576 and set(numbers) < set(range(600))
