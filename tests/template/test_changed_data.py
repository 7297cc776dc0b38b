"""Data that were changed while a run was down, or that differ between the ranks. A checkpoint has a fingerprint of each
set: the checksum of eight of its samples."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from edits import REPO, insert_after, insert_before, replace, with_text
from helpers import ON_2, SMALL, assert_same_run, call, copied, free_port, run, run_dir, start

from config import TrainConfig
from data import ImageDataset, build_datasets
from runtime.loader import checksum, fingerprint

STEPS = f"{SMALL} --lr_schedule constant --logger_name csv --max_steps"
FAST_RUN = f"{SMALL} --fast_run"


def told(printed: str) -> list[str]:
    """The names of the sets that have changed."""
    words = "samples have changed: their content, labels or augmentation"
    return re.findall(rf"^the (\w+) {words}$", printed, re.MULTILINE)


def without_fingerprint(printed: str) -> list[str]:
    words = "samples have no fingerprint: a resume cannot tell if they change"
    return re.findall(rf"^the (\w+) {words}$", printed, re.MULTILINE)


def resumed(program: Path, cwd: Path, steps: int, options: str = "") -> list[str]:
    printed = call(f"{program}/train.py --resume auto --max_steps {steps} {options}", cwd).stdout
    assert f"finished after {steps} of {steps} steps" in printed
    assert not without_fingerprint(printed)
    return told(printed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Where a run has made six steps. To be copied."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"train.py {STEPS} 6 --micro_batch_size 32", cwd)
    return cwd


@pytest.fixture
def stopped(trained, tmp_path) -> Path:
    return copied(trained, tmp_path)


# ---- what did not change


def test_resumes_with_the_same_data_say_nothing(stopped):
    """Within an epoch and between two, with data workers, in other micro-batches, on other numbers of devices."""
    for number, options in enumerate(("", "--num_workers 2", "--micro_batch_size 16", "--num_workers 0 --seed 42")):
        assert resumed(REPO, stopped, 7 + number, options) == []
    assert told(run(f"train.py --resume auto --max_steps 13 {ON_2}", stopped).stdout) == []
    assert told(run("train.py --resume auto --max_steps 15 --devices 1", stopped).stdout) == []


@pytest.mark.parametrize("code", ["images.mul_(0.5)", "images.add_(torch.randn_like(images))"])
def test_a_loss_that_changes_its_batch_in_place_is_no_change_of_the_data(code: str, tmp_path):
    program = insert_after(tmp_path / "program", "batch", code)
    call(f"{program}/train.py {STEPS} 3", tmp_path)
    assert resumed(program, tmp_path, 6) == []
    assert told(call(f"{program}/train.py {FAST_RUN}", tmp_path).stdout) == []


def test_what_is_trained_is_the_same_without_a_fingerprint(trained, tmp_path):
    """To fetch the samples draws random numbers. Here the dataset draws some for each of them, and when it is built."""
    without = replace(tmp_path / "program", "num_classes", "self.num_classes, self.fingerprint = num_classes, None")
    (tmp_path / "without").mkdir()
    printed = call(f"{without}/train.py {STEPS} 6 --micro_batch_size 32", tmp_path / "without").stdout
    assert without_fingerprint(printed) == ["train", "val"]
    assert_same_run(tmp_path / "without", trained)


# ---- what did

CHANGES = {
    "labels": ("target tensor", "9 - torch.tensor(targets,", ["train", "val"]),
    "split": ("permutation", "np.random.default_rng(1)", ["train", "val"]),
    "augmentation": ("shift", "shift=2 if augment else 0", ["train"]),
    "training images": ("training images", "ImageDataset(images[train] + 1", ["train"]),
    "validation images": ("validation images", "ImageDataset(images[val] + 1", ["val"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_are_told_by_the_name_of_the_set(change: str, stopped, tmp_path):
    """Once: the next resume goes on with these."""
    point, text, expected = CHANGES[change]
    program = replace(tmp_path / "program", point, text)
    assert resumed(program, stopped, 8, "--num_workers 2 --micro_batch_size 16") == expected
    assert told((run_dir(stopped) / "train.log").read_text()) == expected
    assert resumed(program, stopped, 9) == []


def test_changed_data_are_told_once_on_two_processes(stopped, tmp_path):
    program = replace(tmp_path / "program", *CHANGES["augmentation"][:2])
    printed = run(f"{program}/train.py --resume auto --max_steps 8 {ON_2}", stopped).stdout
    assert told(printed) == ["train"] and "finished after 8 of 8" in printed


def test_data_that_differ_at_each_start_are_told_by_a_rehearsal(tmp_path):
    program = replace(tmp_path / "program", *UNSEEDED)
    assert told(call(f"{program}/train.py {FAST_RUN}", tmp_path).stdout) == ["train", "val"]
    assert told(call(f"train.py {FAST_RUN}", tmp_path).stdout) == []


def test_a_set_that_is_new_is_not_compared(stopped, tmp_path):
    program = with_text(tmp_path / "program", "data.py", ("    return {\n", '    return {\n        "more": images,\n'))
    assert resumed(program, stopped, 8) == []
    assert resumed(with_text(program, "data.py", ('"more": images', '"more": images + 1')), stopped, 9) == ["more"]
    assert resumed(REPO, stopped, 10) == []


# ---- ranks that differ

UNSEEDED = ("permutation", "np.random.default_rng()")
# Classes in the order of a set of strings, which is another one in each process.
CLASSES = """
    names = [f"digit {target}" for target in targets]
    targets = np.array([[*set(names)].index(name) for name in names])
"""
SHARD = """
    import os

    rank = int(os.environ.get("LOCAL_RANK", 0))
    train = """
DIFFERENT = {  # on each rank
    "split": lambda program: replace(program, *UNSEEDED),
    "shard": lambda program: insert_before(program, "statistics", f"{SHARD} train[:1216].reshape(2, -1)[rank]"),
    "uneven shard": lambda program: insert_before(program, "statistics", f"{SHARD} train[rank::2]"),
    "validation": lambda program: replace(
        program, "validation images", "ImageDataset(np.random.default_rng().random() + images[val]"
    ),
}
OF_TRAINING = "number and checksum of train samples"


def assert_refused(error: str, found: str, program: str = "train.py") -> None:
    """By each rank in one line, with the rank that differs and its host."""
    host = re.escape(os.uname().nodename)
    value = r"\(\d+, \d+\)" if "number" in found else r"\d+"
    told = (
        rf"{program}: error: rank [01]: {found}: {value} on rank 1 \({host}\), {value} on rank 0; all machines need .*"
    )
    lines = error.splitlines()
    assert 1 <= len(lines) <= 2 and all(re.fullmatch(told, line) for line in lines), error


@pytest.mark.parametrize("options", [f"{STEPS} 1", FAST_RUN], ids=["run", "rehearsal"])
@pytest.mark.parametrize("edit", DIFFERENT)
def test_data_that_differ_between_the_ranks_are_refused(edit: str, options: str, program, cwd):
    """Before anything is written."""
    error = run(f"{DIFFERENT[edit](program)}/train.py {options} {ON_2}", cwd, code=2).stderr
    assert_refused(error, OF_TRAINING.replace("train", "val") if edit == "validation" else OF_TRAINING)
    assert not [*cwd.iterdir()]


def test_an_evaluation_refuses_them_too(trained, program, tmp_path):
    cwd = copied(trained, tmp_path / "evaluated")
    error = run(f"{replace(program, *UNSEEDED)}/test.py --out_dir train_out {ON_2}", cwd, code=2).stderr
    assert_refused(error, "checksum of samples", "test.py")
    assert not [*cwd.glob("*/test_*")]


def test_classes_in_the_order_of_a_set_are_refused_or_told(program, cwd):
    """Where the ranks have other orders, and on a resume, which has another one. torchrun gives no rank a seed."""
    insert_before(program, "target tensor line", CLASSES)
    command = f"{program}/train.py {STEPS} 1 --num_nodes 2 --devices 1"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(command, cwd, NODE_RANK=str(rank), PYTHONHASHSEED=str(rank + 1), **env) for rank in range(2)]
    for process in ranks:
        assert_refused(process.communicate(timeout=300)[1], OF_TRAINING)
        assert process.returncode == 2
    assert not [*cwd.iterdir()]
    run(f"{program}/train.py {STEPS} 3", cwd, PYTHONHASHSEED="1")
    for steps, seed, expected in ((4, "1", []), (5, "2", ["train", "val"])):
        printed = run(f"{program}/train.py --resume auto --max_steps {steps}", cwd, PYTHONHASHSEED=seed).stdout
        assert told(printed) == expected


# ---- sets without a fingerprint


def test_a_set_without_a_fingerprint_is_named_at_the_start(program, cwd):
    """Its samples have an object that has no checksum."""
    with_text(program, "data.py", ("        return batch  #", "        return *batch, object()  #"))
    replace(program, "batch", "    images, targets, _ = batch\n")
    replace(program, "image shape", "image = dataset.images[0]")
    for command in (f"{STEPS} 3", "--resume auto --max_steps 5"):
        printed = call(f"{program}/train.py {command}", cwd).stdout
        assert without_fingerprint(printed) == ["train", "val"] and told(printed) == []


def test_an_empty_set_is_not_named(program, cwd):
    replace(program, "validation images", "ImageDataset(images[val][:0]")
    with_text(program, "data.py", ("targets[val]", "targets[val][:0]"))
    for command in (f"{STEPS} 3 --monitor train/loss --monitor_mode min", "--resume auto --max_steps 5"):
        printed = call(f"{program}/train.py {command}", cwd).stdout
        assert ", 0 validation samples" in printed and not without_fingerprint(printed) + told(printed)


def digits(**attributes) -> ImageDataset:
    dataset = build_datasets(TrainConfig())["train"]
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


class Pairs(torch.utils.data.Dataset):
    """Cannot be fetched alone."""

    def __len__(self):
        return 8

    def __getitems__(self, indices):
        first, *_, last = [torch.tensor(index) for index in indices]
        return [first, last][: len(indices) // 2 * 2 or first.no_such_thing]


def test_which_sets_have_none():
    assert fingerprint(digits()) == fingerprint(digits()) is not None
    for without in (digits(fingerprint=None), digits(order=lambda epoch, generator: [1]), Pairs(), object()):
        assert fingerprint(without) is None


def test_a_fingerprint_is_of_samples_from_the_first_to_the_last_one():
    numbers = torch.arange(1000)
    before = fingerprint(torch.utils.data.TensorDataset(numbers))
    for index in (0, 1, 999):
        changed = numbers.clone()
        changed[index] = -1
        assert (fingerprint(torch.utils.data.TensorDataset(changed)) == before) == (index == 1)
    assert fingerprint(torch.utils.data.TensorDataset(numbers[:1])) is not None


def test_a_fingerprint_opens_nothing_in_the_dataset():
    """A data worker opens its own file."""

    class OfFile(torch.utils.data.Dataset):
        file = None

        def __len__(self):
            return 9

        def __getitem__(self, index):
            self.file = self.file or open(os.devnull)  # noqa: SIM115
            return index

    dataset = OfFile()
    assert fingerprint(dataset) is not None and dataset.file is None


# ---- the checksum

# Values, which print their checksums: of the same content in each process.
EQUAL = """
import sys; sys.path.insert(0, {root!r})
from collections import OrderedDict, UserDict
import numpy as np, torch
from runtime.loader import checksum

text = "".join(chr(ord("a") + number) for number in range(5))  # not the object of a literal
values = [
    {{"one", "two", "three", "four", text, 5, None}}, frozenset([(1, text), (2, "x")]), [{{"deep": {{text, "c"}}}}],
    {{"x": 1, text: 2.5, "z": b"3"}}, UserDict(y=[text], x=(1, 2)), text, -0.0, 1e300, True, None, 3 + 4j,
    np.arange(12.0).reshape(3, 4).T, np.float32(2), np.array([text, "longer"]), np.datetime64("2026-01-01"),
    torch.arange(12).reshape(3, 4).T, torch.ones(3, dtype=torch.bfloat16), torch.tensor(True), torch.ones(0, 3),
    torch.tensor([1 + 2j]), torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)),
]
print(*[checksum(value) for value in values])
"""


def test_a_checksum_is_the_same_in_each_process(tmp_path):
    (tmp_path / "equal.py").write_text(EQUAL.format(root=str(REPO)))
    printed = [run(f"{tmp_path}/equal.py", tmp_path, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")]
    assert printed[0] == printed[1]
    first = printed[0].split()
    assert len({*first}) == len(first) - 1  # a parameter is a tensor


def test_a_checksum_is_of_the_values_alone():
    images = torch.randn(16, 3, 4, 4)
    part = images[2:5]
    batch = {"images": part, "more": [(1, "a"), torch.ones(2)]}
    again = {"images": part.clone(), "more": [(1, "a"), torch.ones(2)]}
    assert checksum(batch) == checksum(again)
    again["images"][0, 0, 0, 0] += 1
    assert checksum(batch) != checksum(again)
    assert checksum(batch | {"more": [(1, "b"), torch.ones(2)]}) != checksum(batch)
    for one, other in (
        ([1, 2], [2, 1]),
        ({1, 2}, {1, 3}),
        ({"a": 1}, {"a": 2}),
        (1, True),
        (1, "1"),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        ("a", "b"),
    ):
        assert checksum(one) != checksum(other), one


@pytest.mark.parametrize("value", [object(), (number for number in (1, 2)), {"x": [Path()]}, np.array([object()])])
def test_another_object_has_no_checksum(value):
    with pytest.raises(TypeError, match="has no checksum"):
        checksum(value)


def test_a_checksum_takes_no_more_memory_than_the_batch():
    """Of a slice, torch.save would write the whole tensor."""
    part = torch.zeros(2**28, dtype=torch.uint8)[:1000]
    assert checksum(part) == checksum(torch.zeros(1000, dtype=torch.uint8))
