"""The data were changed while a run was down. A checkpoint has the checksum of a batch of its last step, which a resume
reads again, and that of a batch of the validation."""

from pathlib import Path

import pytest
import torch
from edits import REPO, insert_after, insert_before, replace
from helpers import ON_2, SMALL, call, run, run_dir

from runtime.loader import checksum

STEPS = f"{SMALL} --lr_schedule constant --logger_name csv --max_steps"
HAS_CHANGED = "is another one than before: samples, labels, order or augmentation have changed"


def told(printed: str) -> list[str]:
    """The names of the batches that have changed."""
    return [line.removesuffix(f" {HAS_CHANGED}") for line in printed.splitlines() if line.endswith(HAS_CHANGED)]


def resumed(program: Path, cwd: Path, steps: int, options: str = "") -> list[str]:
    return told(call(f"{program}/train.py --resume auto --max_steps {steps} {options}", cwd).stdout)


# ---- what did not change


@pytest.mark.parametrize("micro_batch", [pytest.param("", marks=pytest.mark.night), "--micro_batch_size 16"])
def test_twenty_resumes_with_the_same_data_say_nothing(micro_batch: str, tmp_path):
    """After each step of five epochs, every second of them with data workers."""
    call(f"train.py {STEPS} 1 {micro_batch}", tmp_path)
    for steps in range(2, 22):
        assert resumed(REPO, tmp_path, steps, f"--num_workers {(steps - 2) // 4 % 2 * 2}") == []


def test_a_resume_on_another_number_of_devices_says_nothing(tmp_path):
    """The validation is cut into other batches there; the first micro-batch of a step is the same."""
    options = f"{STEPS} 3 --micro_batch_size 16"
    run(f"train.py {options}", tmp_path)
    assert told(run(f"train.py --resume auto --max_steps 5 {ON_2}", tmp_path).stdout) == []
    assert told(run("train.py --resume auto --max_steps 7 --devices 1", tmp_path).stdout) == []


def test_another_micro_batch_size_is_not_compared(tmp_path):
    call(f"train.py {STEPS} 3", tmp_path)
    assert resumed(REPO, tmp_path, 5, "--micro_batch_size 32") == []
    assert resumed(REPO, tmp_path, 7, "--micro_batch_size 16") == []


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_that_changes_its_batch_in_place_is_no_change_of_the_data(steps: int, tmp_path):
    program = insert_after(tmp_path / "program", "batch", "images.mul_(0.5)")
    call(f"{program}/train.py {STEPS} {steps}", tmp_path)
    assert resumed(program, tmp_path, steps + 3) == []
    assert resumed(program, tmp_path, steps + 6) == []


def test_a_batch_that_cannot_be_saved_is_not_compared(tmp_path):
    program = insert_before(tmp_path / "program", "train", "class Unsaved:\n    __reduce__ = None\n\n\n")
    data = program / "data.py"
    data.write_text(data.read_text().replace("return batch  # __getitems__", "return *batch, (i for i in ())  #"))
    replace(program, "batch", "    images, targets, _ = batch\n")
    call(f"{program}/train.py {STEPS} 3", tmp_path)
    assert resumed(program, tmp_path, 5) == []


# ---- what did

CHANGES = {
    "labels": ("target tensor", "9 - torch.tensor(targets,"),
    "scale": ("grey values", "images / 15"),
    "augmentation": ("shift", "shift=2 if augment else 0"),
    "no augmentation": ("shift", "shift=0"),
    "order": ("order", "{self.seed} {epoch} "),
    "split": ("permutation", "np.random.default_rng(1)"),
}


@pytest.mark.parametrize("steps", [6, 8], ids=["in an epoch", "between two"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_are_told(change: str, steps: int, tmp_path):
    call(f"train.py {STEPS} {steps} --micro_batch_size 32", tmp_path)
    program = replace(tmp_path / "program", *CHANGES[change])
    found = resumed(program, tmp_path, steps + 2, "--num_workers 2")
    assert found[-1] == f"the batch of step {steps}"
    assert found[:-1] == (["the first validation batch"] if change in ("labels", "scale", "split") else [])
    assert resumed(program, tmp_path, steps + 4) == []
    assert f"the batch of step {steps} {HAS_CHANGED}" in (run_dir(tmp_path) / "train.log").read_text()


def test_changed_data_are_told_after_a_process_of_one_step(tmp_path):
    call(f"train.py {STEPS} 1 --micro_batch_size 32", tmp_path)
    program = replace(tmp_path / "program", *CHANGES["augmentation"])
    assert resumed(program, tmp_path, 3) == ["the batch of step 1"]


def test_changed_data_are_told_on_two_devices_once(tmp_path):
    call(f"train.py {STEPS} 6", tmp_path)
    program = replace(tmp_path / "program", *CHANGES["augmentation"])
    printed = run(f"{program}/train.py --resume auto --max_steps 8 --micro_batch_size 64", tmp_path).stdout
    assert told(printed) == ["the batch of step 6"]
    printed = run(f"train.py --resume auto --max_steps 10 --micro_batch_size 32 {ON_2}", tmp_path).stdout
    assert told(printed) == []  # in other micro-batches
    printed = run(f"{program}/train.py --resume auto --max_steps 12 {ON_2}", tmp_path).stdout
    assert told(printed) == ["the batch of step 10"]


def test_changed_validation_data_are_told(tmp_path):
    call(f"train.py {STEPS} 6", tmp_path)
    program = replace(tmp_path / "program", "validation images", "ImageDataset(images[val] + 1")
    assert resumed(program, tmp_path, 8) == ["the first validation batch"]


GENERATOR = "self.num_classes, self.generator = num_classes, np.random.default_rng({})"


@pytest.mark.parametrize("seed", ["", "0"])
def test_a_dataset_that_draws_from_a_generator_of_its_own_is_told_by_a_rehearsal(seed: str, tmp_path):
    """A resumed run would be another one: it makes the generator anew."""
    program = replace(tmp_path / "program", "num_classes", GENERATOR.format(seed))
    insert_before(program, "fetch", "self.generator.shuffle(indices)")
    assert told(call(f"{program}/train.py {SMALL} --fast_run", tmp_path).stdout)[-1] == "the batch of step 2"


ORDER = """
def order(self, epoch, generator):
    self.rounds = getattr(self, "rounds", 0) + 1
    return np.random.default_rng({seed}).permutation(len(self))

"""


@pytest.mark.parametrize("steps, seed, expected", [
    (6, "epoch", []),
    (6, "self.rounds", ["the batch of step 6"]),
    (8, "self.rounds", []),
])  # fmt: skip
def test_an_order_of_ones_own_is_compared_within_an_epoch_alone(steps: int, seed: str, expected: list, tmp_path):
    """After its end the order may be another one, if it depends on the training."""
    program = insert_before(tmp_path / "program", "length method", ORDER.format(seed=seed))
    call(f"{program}/train.py {STEPS} {steps}", tmp_path)
    assert resumed(program, tmp_path, steps + 2) == expected


# ---- the checksum


def test_a_checksum_is_of_the_values_alone():
    images = torch.randn(16, 3, 4, 4)
    part = images[2:5]
    batch = {"images": part, "more": [(1, "a"), torch.ones(2)]}
    again = {"images": part.clone(), "more": [(1, "a"), torch.ones(2)]}
    assert checksum(batch) == checksum(again)
    again["images"][0, 0, 0, 0] += 1
    assert checksum(batch) != checksum(again)
    assert checksum(batch | {"more": [(1, "b"), torch.ones(2)]}) != checksum(batch)
    assert checksum(number for number in (1, 2)) is None


def test_a_checksum_takes_no_more_memory_than_the_batch():
    """Of a slice, torch.save would write the whole tensor."""
    part = torch.zeros(2**28, dtype=torch.uint8)[:1000]
    assert checksum(part) == checksum(torch.zeros(1000, dtype=torch.uint8))
