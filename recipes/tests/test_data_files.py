"""The data sets of docs/data.md: its patches applied, on small real files."""

import gzip
import json
import pickle
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import LONG, ON_2, SMALL, call, folders, run
from comparisons import assert_same_run, assert_same_training
from copies import imported, imported_train, with_recipe
from edits import replace
from mistakes import assert_one_line, refuses
from outputs import run_dir
from PIL import Image
from processes import interrupt, kill_group
from torch.utils.data import Subset

from config import TrainConfig
from runtime.loader import SeededBatches, TrainSampler
from utils import make_plan

pytestmark = pytest.mark.recipes
FORMATS = [*(f"hugging_face_{kind}" for kind in ("pictures", "parquet", "json", "csv")), "mapped", "stream"]
SIZES = {"train": 600, "val": 100, "test": 50}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Digits in all formats but parquet, sorted by class, as a folder per class sorts them; those for training in
    csv the other way round. One of the 41 shards is empty, one is large. Blank lines are no samples; files, and what is
    hidden, are no classes."""
    from sklearn.datasets import load_digits

    root, digits = tmp_path_factory.mktemp("files"), load_digits()
    pictures, _, as_json, as_csv, mapped, stream = folders(root, *FORMATS)
    for split, part in zip(SIZES, np.split(np.arange(750), [600, 700]), strict=True):
        part = part[digits.target[part].argsort(kind="stable")]
        images, targets = digits.images[part].astype(np.uint8)[:, None], digits.target[part]
        np.save(mapped / f"{split}_images.npy", images)
        np.save(mapped / f"{split}_targets.npy", targets)
        names = [f"{split}/{target}/{i:03d}.png" for i, target in enumerate(targets)]
        for name, image in zip(names, images, strict=True):
            picture = pictures / name
            picture.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(picture)
        (pictures / split / "README.txt").write_text("a file")
        (pictures / split / ".ipynb_checkpoints").mkdir()
        for name in (".a.png", ".ipynb_checkpoints/a.png"):
            shutil.copy(picture, pictures / split / name)
        (picture.parent / "._000.png").write_text("of macOS, no image")
        rows = [f"../hugging_face_pictures/{name},digit {name.split('/')[1]}\n" for name in names]
        rows = rows[::-1] if split == "train" else rows
        (as_csv / f"{split}.csv").write_text("image,label\n" + "".join(rows))
        pairs = zip(images.tolist(), targets.tolist(), strict=True)
        lines = [json.dumps({"image": image, "label": label}) + "\n" for image, label in pairs]
        (as_json / f"{split}.jsonl").write_text("\n" + " \n\n".join(lines) + "\n")
        ends = [0, 150, *range(160, 550, 11), 590, 597, 598] if split == "train" else []
        for shard, lines_of_shard in enumerate(np.split(np.array(lines, object), ends)):
            name = f"train-{shard:02d}.jsonl.gz" if split == "train" else f"{split}.jsonl.gz"
            (stream / name).write_bytes(gzip.compress(("\n" + " \n\n".join(lines_of_shard)).encode()))
    return root


@pytest.fixture(scope="module")
def hugging_face(files: Path, datasets: Path, tmp_path_factory) -> Path:
    """The programs with the recipe; parquet files, in two shards; the library's cache in a folder here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hugging_face")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        pytest.importorskip("datasets")
        import pyarrow.parquet

        for split in SIZES:
            paths = sorted((files / "hugging_face_pictures" / split).glob("[0-9]/[0-9]*.png"))
            images, labels = [path.read_bytes() for path in paths], [int(path.parent.name) for path in paths]
            table = pyarrow.table({"image": images, "label": labels})
            for shard, part in enumerate((table[:20], table[20:])):
                pyarrow.parquet.write_table(part, files / "hugging_face_parquet" / f"{split}-{shard}.parquet")
        yield datasets


@pytest.fixture(scope="module")
def stream(files: Path, tmp_path_factory) -> Path:
    """With blocks of four lines, and the sizes of its shards."""
    program = with_recipe("stream", tmp_path_factory.mktemp("stream"))
    replace(program, ("stream.py", "", "BLOCK = 1000"), "BLOCK = 4")
    run(f"{program}/stream.py {files / 'stream'}", program)
    return program


@pytest.fixture(params=FORMATS)
def format(request, files: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One of FORMATS: what --dataset is, the programs, the folder, and a function that makes its data sets."""
    kind = request.param
    name = "hugging_face" if kind.startswith("hugging_face") else kind
    program = request.getfixturevalue(name)
    build_datasets = imported_train(program, monkeypatch).build_datasets

    def build(augment: bool = True) -> dict:
        config = SimpleNamespace(dataset=name, data_dir=str(files / kind), effective_batch_size=64)
        return build_datasets(config, augment)

    return SimpleNamespace(name=name, program=program, folder=files / kind, build=build)


def test_each_image_comes_with_its_class(format, files: Path):
    """In a batch, as a single sample, and of a Subset."""
    for split in ("val", "test"):
        part = format.build()[split]
        order = np.random.default_rng(0).permutation(SIZES[split])
        assert len(part) == SIZES[split] and part.num_classes == 10
        found, classes = SeededBatches(part, 42)[0, order]
        assert found.dtype == torch.float32 and classes.dtype == torch.int64
        images, targets = (np.load(files / "mapped" / f"{split}_{what}.npy") for what in ("images", "targets"))
        torch.testing.assert_close(found * 255, torch.from_numpy(images[order]).float().expand_as(found))
        assert classes.tolist() == targets[order].tolist()
        torch.testing.assert_close(torch.as_tensor(part[int(order[0])][0]), found[0])
        subset = SeededBatches(Subset(part, order[:3].tolist()), 42)[0, np.arange(3)]
        assert torch.equal(subset[0], found[:3]) and torch.equal(subset[1], classes[:3])


def test_augmentation_follows_the_number_of_the_micro_batch_also_in_a_worker_that_is_not_forked(format):
    """Such a worker gets the dataset pickled: after a first sample was taken, and without its arrays."""
    train, plain = (format.build(augment)["train"] for augment in (True, False))
    train[0]
    pickled = pickle.dumps(train)
    assert len(pickled) < 10_000  # 38,400 bytes are the images
    numbers = ((train, 0), (pickle.loads(pickled), 0), (train, 1), (plain, 0), (plain, 1))
    first, in_worker, other, *never = (SeededBatches(each, 42)[number, np.arange(64)][0] for each, number in numbers)
    assert torch.equal(first, in_worker) and torch.equal(*never)
    if format.name != "stream":
        changed = [i for i in range(64) if not torch.equal(first[i], other[i])]
        assert 16 < len(changed) < 48
        assert all(torch.equal(first[i], other[i].flip(-1)) for i in changed)


@pytest.mark.parametrize("format", ["hugging_face_pictures", "mapped", "stream"], indirect=True)
def test_with_workers_killed_in_mid_epoch_and_resumed_and_on_two_processes_it_is_the_same_run(format, tmp_path: Path):
    command = f"{format.program}/{LONG} --epochs 6 --dataset {format.name} --data_dir {format.folder}"
    whole, killed, on_2 = folders(tmp_path, "whole", "killed", "on_2")
    call(command, whole)
    run(f"{command} --num_workers 2 {ON_2}", on_2)
    assert_same_training(on_2, whole)
    assert interrupt(f"{command} --num_workers 2", killed, kill_group).returncode < 0
    call(f"{format.program}/train.py --resume {run_dir(killed)}", killed)
    assert_same_run(killed, whole)


# ---- Hugging Face datasets

# A kind of files, shell commands in their folder that spoil them, and a word of the message.
SPOILED = [
    ("pictures", "mkdir train/10; cp -r val/1 val/10", "10"),
    ("pictures", "for i in */1; do mkdir $i/more; cp $i/*.png $i/more; done", "more"),
    ("pictures", "for i in */*/*.png; do cp ../of_16_bits.png $i; done", "I;16"),
    ("json", """echo '{"image": [[[0]]], "label": -1}' > train.jsonl""", "train: the label -1"),
    ("json", """echo '{"image": [[[0]]], "label": true}' > train.jsonl""", "train: the label True"),
    ("json", """echo '{"image": [[[0' > train.jsonl""", "generating the dataset"),
    ("json", "rm val.jsonl", '"val"'),
    ("json", "cp train.jsonl train.csv", "['json', 'csv']"),
    ("csv", "sed -i s/label/class/ *.csv", "image, class"),
    ("csv", "sed -i 's/digit 4/eel/' test.csv", "train does not have: eel"),
]


@pytest.mark.parametrize("kind, spoil, word", SPOILED)
def test_hugging_face_files_that_cannot_be_read_are_refused(kind, spoil, word, files, hugging_face, tmp_path: Path):
    """In the one line that train.py prints of such an error. Pillow would make all white what has 16 bits."""
    folder = Path(shutil.copytree(files / f"hugging_face_{kind}", tmp_path / "files"))
    (tmp_path / "hugging_face_pictures").symlink_to(files / "hugging_face_pictures")
    Image.fromarray(np.full((8, 8), 30_000, np.uint16)).save(tmp_path / "of_16_bits.png")
    subprocess.run(["bash", "-ec", spoil], cwd=folder, check=True)
    with pytest.raises(OSError) as error:
        imported(hugging_face, "hugging_face").build_hugging_face(str(folder), augment=False)
    assert word in str(error.value)


def test_hugging_face_resume_and_test_py_refuse_other_names_of_the_classes(files, hugging_face: Path, cwd: Path):
    """With as many classes, the weights alone would not tell."""
    first = files / "hugging_face_csv"
    other = Path(shutil.copytree(first, files / "hugging_face_other"))
    for path in other.iterdir():
        path.write_text(path.read_text().replace("digit 4", "eel"))
    call(f"{hugging_face}/train.py {SMALL} --dataset hugging_face --max_steps 4 --data_dir {first}", cwd)
    for command in ("train.py --resume auto --max_steps 6", "test.py --accelerator cpu"):
        error = call(f"{hugging_face}/{command} --data_dir {other}", cwd, code=2).stderr.splitlines()[-1]
        assert "--data_dir" in error and "eel" in error
        call(f"{hugging_face}/{command} --data_dir {first}", cwd)


# ---- a stream


def sampler_of(train, rank: int = 0, world_size: int = 1, step: int = 0):
    """That of a rank in epochs of 9 steps of 64 samples, 4 micro-batches each."""
    config = TrainConfig(effective_batch_size=64, micro_batch_size=16)
    plan = make_plan(config, len(train), val_samples=0, world_size=world_size, saved_size=0)
    sampler = TrainSampler(plan, train, rank, seed=42)
    sampler.step = step
    return sampler


def test_a_part_of_a_stream_is_read_by_one_process(stream: Path, tmp_path: Path):
    """Of 4 with 4 workers each: so a shard is, where no two parts meet. The order needs no more of the 64 shards than
    their sizes."""
    reader = imported(stream, "stream")
    sizes = {f"train-{shard:02d}.jsonl.gz": (100 + shard, 0) for shard in range(64)}  # of empty files
    for name in sizes:
        (tmp_path / name).touch()
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    train = reader.Stream(tmp_path, 64)
    readers = set()
    for rank in range(4):
        for number, (_, lines) in enumerate(sampler_of(train, rank, world_size=4)):
            shards = np.searchsorted(train.starts, lines, side="right") - 1
            readers |= {(shard, rank, number % 4) for shard in shards.tolist()}
    assert len(readers) <= len(train.shards) + reader.PARTS - 1


def test_a_stream_has_each_line_once_an_epoch_and_reads_each_shard_once(stream, files: Path, monkeypatch):
    """Each line but the last ones, which are others in each epoch, as is the order; each shard but where it is cut, by
    one process without workers, which has all parts. What a resume skips is limited by the size of a shard, however
    long the run has been: --timeout holds there."""
    reader = imported(stream, "stream")
    train, resumed = (reader.build_stream(str(files / "stream"), 64)["train"] for _ in range(2))
    first, *others = (train.order(epoch, torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3))
    for order in (first, *others):
        assert len(order) == 9 * 64 == len(set(order)) and min(order) >= 0 and max(order) < 600
    assert first != others[0] and set(first) < set(first).union(*others)

    opened, plain = [], reader.lines_of
    monkeypatch.setattr(reader, "lines_of", lambda path: opened.append(path) or plain(path))
    images, targets = (np.load(files / "mapped" / f"train_{what}.npy") for what in ("images", "targets"))
    for index in first:
        image, target = train[index]
        assert target == targets[index] and np.array_equal((image * 255).round().numpy(), images[index])
    assert len(opened) < len(train.shards) + reader.PARTS
    opened.clear()
    _, lines = next(iter(sampler_of(resumed, step=1000 * 9 + 4)))
    for index in lines.tolist():
        resumed[index]
    used = set(np.searchsorted(resumed.starts, lines, side="right") - 1)
    assert sorted(opened) == sorted(resumed.shards[shard] for shard in used)


@pytest.fixture
def a_stream(files: Path, stream: Path, cwd: Path, tmp_path: Path) -> tuple[Path, str]:
    """A copy of the stream, and a run with it."""
    shards = Path(shutil.copytree(files / "stream", tmp_path / "shards"))
    return shards, f"{stream}/train.py --accelerator cpu --dataset stream --data_dir {shards}"


def test_a_stream_of_too_few_shards_or_with_another_batch_is_refused(a_stream, stream: Path, cwd: Path):
    shards, command = a_stream
    refuses(f"{command} --effective_batch_size 60", cwd, "--effective_batch_size 60", "a multiple of 8")
    for path in sorted(shards.glob("train-*"))[31:]:
        path.unlink()
    run(f"{stream}/stream.py {shards}", cwd)
    refuses(command, cwd, "31 shards, but 32 parts")
    (shards / "sizes.json").unlink()
    refuses(command, cwd, "sizes.json")


@pytest.mark.parametrize("change, word", [("more", "sizes.json"), ("less", "sizes.json"), ("cut", "end-of-stream")])
def test_a_stream_names_the_shard_that_has_changed(change: str, word: str, a_stream, stream, cwd: Path):
    """By its number of bytes at the start; where that is as before, by its lines."""
    shards, command = a_stream
    path = shards / "train-01.jsonl.gz"  # 150 lines
    content = path.read_bytes()
    lines = gzip.decompress(content).splitlines(keepends=True)
    changed = {"more": gzip.compress(b"".join(lines + lines[-1:])), "less": gzip.compress(b"".join(lines[:-1]))}
    path.write_bytes(changed.get(change, content[: len(content) // 2]))
    refuses(command, cwd, "sizes.json is of other shards (train-01.jsonl.gz)")
    sizes = json.loads((shards / "sizes.json").read_text())
    sizes[path.name][1] = path.stat().st_size
    (shards / "sizes.json").write_text(json.dumps(sizes))
    assert_one_line(call(f"{command} --max_steps 18", cwd, code=1), "train-01.jsonl.gz: ", word)
    if change == "cut":
        assert word in run(f"{stream}/stream.py {shards}", cwd, code=1).stderr
