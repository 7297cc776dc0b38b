"""The order of the samples, their augmentation, and what a user's own dataset may look like."""

import itertools
import random
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edits import replace
from helpers import LONG, REPO, killed_and_resumed, needs_recipes
from lightning.fabric import Fabric
from torch.utils.data import Dataset, TensorDataset, default_collate, random_split

from config import TrainConfig
from data import ImageDataset, build_datasets
from runtime.errors import ConfigError
from runtime.loader import Loader, Permutation, SeededBatches, TrainSampler, eval_batches
from runtime.meters import Timer
from utils import Plan, make_plan

SAMPLES, EFFECTIVE, MICRO, STEPS = 103, 16, 4, 6
FABRIC = Fabric(accelerator="cpu", devices=1)


def plan_of(samples: int, effective: int, micro: int, world_size: int = 1, drop_last: bool = True) -> Plan:
    config = TrainConfig(effective_batch_size=effective, micro_batch_size=micro, drop_last=drop_last)
    return make_plan(config, samples, 1, world_size, 0)


def train_sampler(rank=0, world_size=1, micro=MICRO, seed=42, epoch=0, step=0, drop_last=True) -> TrainSampler:
    """From a step of an epoch to the end of that epoch."""
    plan = plan_of(SAMPLES, EFFECTIVE, micro, world_size, drop_last)
    sampler = TrainSampler(plan, range(SAMPLES), rank, seed)
    sampler.step = epoch * STEPS + step
    return sampler


def effective_batches(world_size: int = 1, micro: int = MICRO, **options) -> list[list[int]]:
    """The sample numbers of each step, put together from all ranks as they come: one micro-batch of each in turn."""
    ranks = [list(train_sampler(rank, world_size, micro, **options)) for rank in range(world_size)]
    flat = [index for turn in zip(*ranks, strict=True) for _, indices in turn for index in indices.tolist()]
    return [flat[i : i + EFFECTIVE] for i in range(0, len(flat), EFFECTIVE)]


# ---- the training order


def test_order_is_a_pure_function_of_seed_and_epoch():
    torch.manual_seed(1)
    first = effective_batches(seed=3, epoch=5)
    torch.manual_seed(2)
    assert effective_batches(seed=3, epoch=5) == first
    assert effective_batches(seed=3, epoch=6) != first
    assert effective_batches(seed=4, epoch=5) != first


def test_every_sample_at_most_once_per_epoch():
    """An incomplete last effective batch is left out; over the epochs all samples come up."""
    seen = set()
    for epoch in range(5):
        flat = sum(effective_batches(epoch=epoch), [])
        assert len(flat) == len(set(flat)) == STEPS * EFFECTIVE
        seen |= set(flat)
    assert seen == set(range(SAMPLES))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_effective_batches_are_the_same_on_any_number_of_devices(world_size: int, micro: int):
    assert effective_batches(world_size, micro) == effective_batches(1, EFFECTIVE)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 1, STEPS])
def test_the_rest_of_an_epoch_is_a_step_of_equal_smaller_micro_batches(world_size: int, step: int):
    """7 samples are left of 103, for 4 micro-batches: one sample each, on any number of devices."""
    order = effective_batches(epoch=0)
    steps = [list(train_sampler(rank, world_size, drop_last=False, step=step)) for rank in range(world_size)]
    flat = [batch for turn in zip(*steps, strict=True) for batch in turn]
    assert [len(indices) for _, indices in flat] == ([4] * 4 * STEPS + [1] * 4)[4 * step :]
    assert [number for number, _ in flat] == list(range(4 * step, 4 * (STEPS + 1)))
    samples = [int(index) for _, indices in flat for index in indices]
    assert samples[: 16 * (STEPS - step)] == sum(order[step:], [])
    assert len(set(samples)) == len(samples)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_gets_every_so_many_th_micro_batch_under_the_same_number(world_size: int):
    """So the micro-batches, and with them dropout and augmentation, are the same on any number of devices."""
    alone = [(number, indices.tolist()) for number, indices in train_sampler(epoch=3)]
    for rank in range(world_size):
        sampler = train_sampler(rank, world_size, epoch=3)
        assert [(number, indices.tolist()) for number, indices in sampler] == alone[rank::world_size]


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_goes_on_with_the_samples_that_are_left(step: int, world_size: int):
    whole = effective_batches(epoch=2)
    assert effective_batches(world_size, epoch=2, step=step) == whole[step:]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_micro_batches_are_numbered_through_all_epochs(world_size: int):
    """By the same numbers in the loader and in the loop, each once."""
    drawn, seeded = [], []
    for rank in range(world_size):
        drawn += [number for epoch in range(3) for number, _ in train_sampler(rank, world_size, epoch=epoch)]
        loader = Loader(FABRIC, range(SAMPLES), train_sampler(rank, world_size), TrainConfig())
        loader.set_seed = seeded.append
        for step in range(1, 3 * STEPS + 1):
            steps_of(loader, step, step)
    assert drawn == seeded and sorted(drawn) == list(range(3 * STEPS * EFFECTIVE // MICRO))


def steps_of(loader: Loader, first: int, last: int) -> list:
    """The micro-batches of these steps, each with whether it is the last of its step."""
    timer = Timer(torch.device("cpu"), MICRO)
    return [found for step in range(first, last + 1) for found in loader.micro_batches(step, timer)]


@pytest.fixture(params=[0, 1])
def loader(request) -> Loader:
    """Of two steps an epoch, each of four micro-batches; with no worker and with one."""
    sampler = TrainSampler(plan_of(40, 20, 5), range(40), 0, 42)
    return Loader(FABRIC, Pairs(), sampler, TrainConfig(num_workers=request.param))


def order_of_steps(loader: Loader, first: int, last: int) -> list[list[int]]:
    """The samples that these steps have by the sampler alone."""
    sampler, found = loader.sampler, []
    for sampler.step in range(0, last, 2):
        found += [indices.tolist() for _, indices in sampler]
    return found[4 * (first - 1) : 4 * last]


@pytest.mark.parametrize("first", [1, 2, 3, 6])
def test_a_loader_gives_the_batches_from_any_step_on_without_end(first: int, loader: Loader):
    found = steps_of(loader, first, 8)
    assert [targets.tolist() for (_, targets), _ in found] == order_of_steps(loader, first, 8)
    assert [is_last for _, is_last in found] == [False, False, False, True] * (9 - first)


@pytest.mark.parametrize("left", [3, 4])
def test_a_step_that_takes_less_than_its_micro_batches_leaves_the_next_one_as_it_is(left: int, loader: Loader):
    """As after a `break` or `continue`, in the middle of an epoch and at its end."""
    steps_of(loader, 1, left - 1)
    next(loader.micro_batches(left, Timer(torch.device("cpu"), MICRO)))
    found = steps_of(loader, left + 1, 6)
    assert [targets.tolist() for (_, targets), _ in found] == order_of_steps(loader, left + 1, 6)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_called_before_each_batch_may_end_the_batches(num_workers: int):
    """As a signal ends a validation."""
    calls, found = [], []

    def before_batch():
        calls.append(len(found))
        if len(calls) == 3:
            raise KeyboardInterrupt

    config = TrainConfig(num_workers=num_workers)
    with pytest.raises(KeyboardInterrupt):
        for batch in Loader(FABRIC, Pairs(), eval_batches(40, 5, FABRIC), config, before_batch):
            found.append(batch)
    assert calls == [0, 1, 2] and len(found) == 2


def test_a_sampler_draws_from_the_whole_of_its_own_dataset():
    """Also from another one than the plan was made for, as for a second stream of data."""
    sampler = train_sampler()
    sampler.dataset = range(300)
    seen = set()
    for sampler.step in range(0, 40 * STEPS, STEPS):
        flat = np.concatenate([indices for _, indices in sampler]).tolist()
        assert len(flat) == len(set(flat)) == STEPS * EFFECTIVE
        seen |= set(flat)
    assert seen == set(range(300))


def test_a_dataset_with_too_few_samples_for_an_epoch_is_refused():
    sampler = train_sampler()
    sampler.dataset = range(50)
    with pytest.raises(ConfigError, match="^an epoch needs 96 indices, but range gives 50$"):
        next(iter(sampler))


# ---- the order of very many samples


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 100, 1217, 4095, 4096, 4097, 65536, 99_999])
def test_a_permutation_has_each_index_once(size: int):
    permutation = Permutation(size, torch.Generator().manual_seed(3))
    assert len(permutation) == size
    assert np.array_equal(np.sort(permutation[0:size]), np.arange(size))
    parts = [permutation[i : min(i + 7, size)] for i in range(0, size, 7)]
    assert np.array_equal(np.concatenate(parts), permutation[0:size])


@pytest.mark.parametrize("size", [10, 16, 17, 257, 1024, 1217])
def test_a_permutation_is_random(size: int):
    """Over 500 seeds: the correlations of the place and the index, and of neighbours, are those of random permutations
    (mean and deviation), one index is in its own place, and each half comes first as often."""
    places = np.arange(size)
    found = [Permutation(size, torch.Generator().manual_seed(seed))[0:size] for seed in range(500)]
    of_place = np.array([np.corrcoef(places, order)[0, 1] for order in found]) * (size - 1) ** 0.5
    assert abs(of_place.mean()) < 0.2 and abs(of_place.std() - 1) < 0.15
    of_neighbours = np.array([np.corrcoef(order[:-1], order[1:])[0, 1] for order in found]) * size**0.5
    assert abs(of_neighbours.mean() + size**-0.5) < 0.2
    assert abs(np.mean([(order == places).sum() for order in found]) - 1) < 0.2
    assert abs(np.mean([order[0] < size / 2 for order in found]) - np.mean(places < size / 2)) < 0.1


def test_the_order_of_a_million_million_samples_takes_no_memory_and_no_time():
    """Of a text with a sample at each character, say; also from the middle of an epoch on."""
    size = 10**12
    plan = plan_of(size, EFFECTIVE, MICRO)
    assert plan.steps_per_epoch == size // EFFECTIVE
    seen = []
    for step in (0, plan.steps_per_epoch - 1):
        sampler = TrainSampler(plan, range(size), 0, 42)
        sampler.step = step
        seen += [index for _, indices in itertools.islice(sampler, 4) for index in indices.tolist()]
    assert len({*seen}) == 32 and max(seen) > size // 2
    assert len(eval_batches(size, MICRO, FABRIC)) == size // MICRO
    first, indices = next(iter(eval_batches(size, MICRO, FABRIC)))
    assert first == 0 and indices.tolist() == [0, 1, 2, 3]


# ---- the order of an evaluation


def batches_of(samples: int, batch_size: int, rank: int, world_size: int) -> list[list[int]]:
    """The batches of a rank in an evaluation. Each has the number of its first sample."""
    batches = eval_batches(samples, batch_size, SimpleNamespace(global_rank=rank, world_size=world_size))
    assert all(number == indices[0] for number, indices in batches)
    return [indices.tolist() for _, indices in batches]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 16, 100, 100_000])
def test_evaluation_counts_each_sample_once(world_size: int, batch_size: int):
    """All ranks have equally many batches, none of them empty or padded."""
    for samples in (*range(world_size, 50), 103, 1000):
        ranks = [batches_of(samples, batch_size, rank, world_size) for rank in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        sizes = [len(batch) for batches in ranks for batch in batches]
        assert 0 < min(sizes) <= max(sizes) <= max(batch_size, 2), f"{samples} samples"
        assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(samples))


def test_fewer_samples_than_processes_are_refused():
    with pytest.raises(ValueError, match="2 samples are too few to evaluate on 3 processes"):
        batches_of(2, 4, 0, 3)


# ---- the datasets of the template


def grey(dataset: Dataset) -> np.ndarray:
    """The images as they were before they were normalized: whole numbers from 0 to 16."""
    images = torch.stack([dataset[i][0][0] for i in range(len(dataset))]).numpy()
    return np.rint((images - images.min()) / (images.max() - images.min()) * 16).astype(np.uint8)


def test_digits_have_a_fixed_split():
    """No digit is in two parts; torch's generator moves none, and none is augmented where that is not wanted."""
    from sklearn.datasets import load_digits

    digits = load_digits().images.astype(np.uint8)
    number = {digit.tobytes(): i for i, digit in enumerate(digits)}
    parts = build_datasets(TrainConfig(), augment=False)
    assert {name: len(part) for name, part in parts.items()} == {"train": 1217, "val": 200, "test": 380}
    found = {name: [number[image.tobytes()] for image in grey(part)] for name, part in parts.items()}
    assert sorted(found["train"] + found["val"] + found["test"]) == list(range(len(digits)))

    torch.manual_seed(7)
    again = build_datasets(TrainConfig())
    assert [number[image.tobytes()] for image in grey(again["val"])] == found["val"]
    assert torch.equal(again["train"].targets, parts["train"].targets)
    for i, image in zip(found["train"], grey(again["train"]), strict=True):
        shifted = [np.pad(digits[i], 1)[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        assert any(np.array_equal(image, other) for other in shifted)


def test_images_that_are_not_shifted_are_not_copied():
    images = torch.zeros(2, 1, 8, 8)
    dataset = ImageDataset(images, torch.arange(2), num_classes=2)
    tensors = [value for value in vars(dataset).values() if isinstance(value, torch.Tensor) and value.ndim > 1]
    assert {tensor.data_ptr() for tensor in tensors} == {images.data_ptr()}


def test_as_many_targets_as_images_are_asked_for():
    with pytest.raises(ValueError, match="2 images, but 3 targets"):
        ImageDataset(torch.zeros(2, 1, 8, 8), torch.arange(3), num_classes=3)


def test_shift_moves_the_image_and_fills_with_background():
    image = torch.zeros(1, 1, 5, 5)  # zero is the darkest value
    image[0, 0, 2, 2] = 1
    dataset, places = ImageDataset(image, torch.tensor([0]), num_classes=1, shift=1), set()
    for _ in range(200):
        shifted = dataset[0][0]
        assert shifted.shape == (1, 5, 5) and shifted.sum() == 1
        places.add(tuple(shifted[0].nonzero()[0].tolist()))
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}


# ---- datasets of all kinds: their samples and their randomness


def pictures() -> Dataset:
    images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return ImageDataset(images, torch.arange(40), num_classes=40, shift=2)


class Pairs(Dataset):
    """A pair per sample, with randomness of all three kinds."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor(noise, dtype=torch.float64), index


class Dicts(Pairs):
    """A dict per sample, of three entries."""

    def __getitem__(self, index: int):
        inputs, target = super().__getitem__(index)
        return {"picture": inputs, "label": target, "weight": 1.0}


class ManyAtOnce(Pairs):
    """Fetches the samples of a batch together, as PyTorch's own fetcher allows."""

    def __getitems__(self, indices):
        return [self[int(index)] for index in reversed(indices)][::-1]


class Twice(Pairs):
    def __len__(self) -> int:
        return 80


class OwnGenerator(Pairs):
    """A generator of its own, made from a number of a global one."""

    def __getitem__(self, index: int):
        return np.random.default_rng(np.random.randint(2**31)).random(3), index


def half_of_pairs() -> Dataset:
    return random_split(Twice(), [40, 40], torch.Generator().manual_seed(0))[0]


def half_of_pictures() -> Dataset:
    images = torch.rand(80, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return random_split(ImageDataset(images, torch.arange(80), 80, shift=2), [40, 40])[0]


def load(dataset: Dataset, num_workers=0, epochs=(0,), world_size=1, micro=5, seed=42) -> dict[tuple[int, int], list]:
    """Maps (epoch, target) to the input that the loaders of all ranks give; a target is the sample's number."""
    found, config = {}, TrainConfig(seed=seed, num_workers=num_workers)
    for rank in range(world_size):
        sampler = TrainSampler(plan_of(len(dataset), 20, micro, world_size), dataset, rank, seed)
        loader = Loader(FABRIC, dataset, sampler, config)
        for epoch in epochs:
            sampler.step = epoch * sampler.plan.steps_per_epoch
            for batch in loader:
                inputs, targets = list(batch.values())[:2] if isinstance(batch, dict) else batch
                assert len(inputs) == len(targets) == micro
                found |= {(epoch, int(t)): x.tolist() for x, t in zip(inputs, targets, strict=True)}
    assert len(found) == len(epochs) * len(dataset)
    return found


@pytest.mark.parametrize("make", [pictures, Pairs, Dicts, ManyAtOnce, OwnGenerator, half_of_pairs, half_of_pictures])
def test_randomness_is_a_function_of_seed_and_micro_batch(make):
    """However the samples are loaded, the same; in another epoch and with another seed, another."""
    torch.manual_seed(3)
    dataset = make()
    expected = load(dataset, epochs=(0, 1))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert load(dataset, epochs=(0, 1), num_workers=2) == expected
    assert load(dataset, epochs=(0, 1), world_size=2) == expected
    assert load(dataset, epochs=(0, 1), world_size=2, num_workers=1) == expected
    assert load(dataset, epochs=(1,)) == {key: expected[key] for key in expected if key[0] == 1}
    assert load(dataset, epochs=(0, 1), seed=43) != expected
    samples = {sample for _, sample in expected}
    assert sum(expected[0, sample] != expected[1, sample] for sample in samples) > 20


# Stands before `build_datasets`, which it replaces: METHOD is that of docs/data.md.
WITH_GENERATOR = """
class WithGenerator(Dataset):
    num_classes = 10

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

METHOD

def build_datasets(*args, **options):
    found = samples_of(*args, **options).items()
    arrays = {split: [(samples[i][0].numpy(), samples[i][1]) for i in range(len(samples))] for split, samples in found}
    return {split: WithGenerator(samples) for split, samples in arrays.items()}


def samples_of("""


@needs_recipes
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.night), 2])
def test_a_generator_of_its_own_is_exact_after_a_kill(num_workers: int, tmp_path: Path):
    page = (REPO / "docs" / "data.md").read_text()
    (method,) = re.findall(r"^```python\n(def __getitem__.*?)^```$", page, re.DOTALL | re.MULTILINE)
    code = WITH_GENERATOR.replace("METHOD", textwrap.indent(method, "    "))
    program = replace(tmp_path / "program", "build_datasets", code)
    killed_and_resumed(f"{program}/{LONG} --num_workers {num_workers}", tmp_path)


def test_all_samples_of_a_run_have_randomness_of_their_own():
    found = load(Pairs(), epochs=(0, 1))
    for column, kind in enumerate(("torch", "NumPy", "random")):
        assert len({noise[column] for noise in found.values()}) == 80, kind


def test_a_second_loader_over_the_same_dataset_changes_nothing():
    """A validation on the training set in the middle of an epoch, say."""
    dataset, config = pictures(), TrainConfig()
    expected = load(dataset)
    loader = Loader(FABRIC, dataset, TrainSampler(plan_of(40, 20, 5), range(40), 0, 42), config)
    found = {}
    for images, targets in loader:
        other = Loader(FABRIC, dataset, eval_batches(40, 4, FABRIC), config)
        assert sum(len(targets) for _, targets in other) == 40
        found |= {(0, int(t)): x.tolist() for x, t in zip(images, targets, strict=True)}
    assert found == expected


def test_batches_are_what_the_dataset_gives():
    """Dicts and tuples of any length, collated as PyTorch does, or by the dataset's own collate_fn."""
    key = (0, np.array([3, 1, 2]))
    batch = SeededBatches(Dicts(), seed=42)[key]
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "picture": (3, 3),
        "label": (3,),
        "weight": (3,),
    }
    assert batch["label"].tolist() == [3, 1, 2]

    tensors = TensorDataset(torch.arange(5), torch.arange(5) + 10, torch.arange(5) + 20)
    assert [column.tolist() for column in SeededBatches(tensors, seed=42)[key]] == [
        [3, 1, 2],
        [13, 11, 12],
        [23, 21, 22],
    ]

    class Padded(Pairs):
        @staticmethod
        def collate_fn(samples):
            return "collated", default_collate([target for _, target in samples])

    for dataset in (Padded(), random_split(Padded(), [40])[0]):
        name, targets = SeededBatches(dataset, seed=42)[key]
        assert name == "collated" and len(targets) == 3


def test_loading_leaves_the_global_generator_alone():
    """Opening a loader draws nothing, so that the training does not depend on how often one was opened."""
    loader = Loader(FABRIC, pictures(), eval_batches(40, 5, FABRIC), TrainConfig(num_workers=1))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert len(list(loader)) == 8
    assert torch.equal(torch.get_rng_state(), before)
