"""A dataset with an order of its own, `order(epoch, generator)`: the rest stays exact."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from edits import insert_before, with_text
from helpers import LONG, assert_same_run, assert_same_training, call, killed_and_resumed, on_one_and_two

import utils
from config import TrainConfig
from runtime.loader import TrainSampler

# The sixteen first samples, then others with replacement: some come several times, most do not come.
ORDER = """
class Ordered(torch.utils.data.Subset):
    num_classes = 10

    def order(self, epoch, generator):
        first = torch.arange(16).roll(epoch)
        return torch.cat([first, torch.randint(len(self), (len(self) - 16,), generator=generator)])


"""
TRAIN = "ImageDataset(images[train], targets[train], num_classes=10, shift=1 if augment else 0)"


def edit(program: Path, order: str = ORDER) -> Path:
    insert_before(program, "build_datasets", order)
    return with_text(program, "data.py", (TRAIN, f"Ordered({TRAIN}, range(len(train)))"))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return edit(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def killed_and_whole(program, tmp_path_factory) -> tuple[Path, Path]:
    return killed_and_resumed(f"{program}/{LONG}", tmp_path_factory.mktemp("runs"))


def test_a_run_with_its_own_order_is_resumed_in_the_middle_of_an_epoch(killed_and_whole):
    """The assertions are those of killed_and_resumed."""


def test_two_devices_train_on_the_same_batches(program, tmp_path):
    one, two = on_one_and_two(f"{program}/{LONG} --epochs 3 --dropout 0", tmp_path)
    assert_same_training(one, two)


def test_workers_change_nothing(program, killed_and_whole, tmp_path):
    call(f"{program}/{LONG} --num_workers 2", tmp_path)
    assert_same_run(tmp_path, killed_and_whole[0])


class Twice:
    """The order has each sample twice, and begins with the epoch."""

    def __init__(self, length: int):
        self.length = length

    def order(self, epoch: int, generator: torch.Generator) -> list[int]:
        return [epoch, *(2 * torch.randperm(self.length // 2, generator=generator)).tolist() * 2]


def sampled(dataset, world_size: int = 1, epoch: int = 3) -> list[list[int]]:
    plan = utils.make_plan(TrainConfig(effective_batch_size=8, micro_batch_size=4), 32, 8, world_size, 0)
    ranks = [TrainSampler(plan, dataset, rank, 7) for rank in range(world_size)]
    for sampler in ranks:
        sampler.step = epoch * plan.steps_per_epoch
    in_order = sorted(batch for sampler in ranks for batch in [(n, indices.tolist()) for n, indices in sampler])
    return [indices for _, indices in in_order]


def test_the_order_of_the_dataset_is_that_of_the_samples():
    batches = sampled(Twice(32))
    assert len(batches) == 8 and batches[0][0] == 3
    assert all(index % 2 == 0 for batch in batches for index in batch[1:])
    assert max(Counter(np.concatenate(batches)).values()) == 2


def test_it_is_the_same_on_any_number_of_devices_and_at_each_call():
    assert sampled(Twice(32)) == sampled(Twice(32)) == sampled(Twice(32), world_size=2)
    assert sampled(Twice(32)) != sampled(Twice(32), epoch=4)


def test_an_order_that_is_too_short_is_told(tmp_path):
    program = edit(tmp_path / "program", ORDER.replace("return torch.cat", "return first; torch.cat"))
    error = call(f"{program}/train.py --accelerator cpu --fast_run", tmp_path, code=2).stderr
    assert error == "train.py: error: an epoch needs 128 indices, but Ordered gives 16\n"
