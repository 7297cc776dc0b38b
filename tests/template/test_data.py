"""The order of the samples, their augmentation, and what a user's own dataset may look like."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from copies import blocks, generator
from lightning.fabric import Fabric
from torch.utils.data import Dataset, default_collate, random_split

from config import TrainConfig
from data import ImageDataset
from runtime.errors import ConfigError
from runtime.loader import Loader, Permutation, SeededBatches, TrainSampler, eval_batches, seeder
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
    return TrainSampler(plan, range(SAMPLES), rank, seed, epoch * plan.steps_per_epoch + step)


def micro_batches(world_size: int = 1, **options) -> list[tuple[int, list[int]]]:
    """The numbers and samples of all ranks as they come: one micro-batch of each in turn."""
    ranks = [list(train_sampler(rank, world_size, **options)) for rank in range(world_size)]
    return [(number, indices.tolist()) for turn in zip(*ranks, strict=True) for number, indices in turn]


def samples_of(*args, **options) -> list[int]:
    return [index for _, indices in micro_batches(*args, **options) for index in indices]


# ---- the training order


def test_order_is_a_pure_function_of_seed_and_epoch():
    """In an epoch, no sample comes twice, and the incomplete last batch is left out; over the epochs all come up."""
    first = samples_of(seed=3, epoch=5)
    torch.manual_seed(2)
    assert samples_of(seed=3, epoch=5) == first
    assert samples_of(seed=3, epoch=6) != first != samples_of(seed=4, epoch=5)
    epochs = [samples_of(epoch=epoch) for epoch in range(5)]
    assert {(len(epoch), len({*epoch})) for epoch in epochs} == {(96, 96)}
    assert {*sum(epochs, [])} == {*range(SAMPLES)}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_micro_batches_are_the_same_on_any_number_of_devices_from_any_step_on(world_size: int, drop_last: bool):
    """And so are their numbers, and with them dropout and augmentation. The rest of an epoch, 7 samples of 103, is a
    step of four micro-batches, too, of one sample each."""
    for epoch, micro in itertools.product((0, 2), (1, 2, 4) if drop_last else (4,)):
        order = train_sampler().order(epoch).tolist()
        sizes = [micro] * (STEPS * EFFECTIVE // micro) + [1, 1, 1, 1] * (not drop_last)
        starts = [0, *itertools.accumulate(sizes)]
        whole = [(epoch * len(sizes) + i, order[starts[i] : starts[i + 1]]) for i in range(len(sizes))]
        for step in range(STEPS + (not drop_last)):
            left = micro_batches(world_size, micro=micro, epoch=epoch, step=step, drop_last=drop_last)
            assert left == whole[step * EFFECTIVE // micro :]


def steps_of(loader: Loader, first: int, last: int) -> list:
    """The micro-batches of these steps, each with whether it is the last of its step."""
    timer = Timer(torch.device("cpu"), MICRO)
    return [found for step in range(first, last + 1) for found in loader.micro_batches(step, timer)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_gives_the_batches_from_any_step_on_without_end(num_workers: int):
    """Two steps an epoch, each of four micro-batches. After a step that has taken fewer, as after a `continue`, in the
    middle of an epoch or at its end, the next one is as it would be."""
    sampler = TrainSampler(plan_of(40, 20, 5), range(40), 0, 42)
    order = []
    for sampler.step in range(0, 8, 2):
        order += [indices.tolist() for _, indices in sampler]
    for first, last, left in ((1, 8, None), (2, 8, None), (3, 8, None), (6, 8, None), (4, 6, 3), (5, 6, 4)):
        loader = Loader(FABRIC, Pairs(), sampler, TrainConfig(num_workers=num_workers))
        if left:
            steps_of(loader, 1, left - 1)
            next(loader.micro_batches(left, Timer(torch.device("cpu"), MICRO)))
        found = steps_of(loader, first, last)
        assert [targets.tolist() for (_, targets), _ in found] == order[4 * (first - 1) : 4 * last]
        assert [is_last for _, is_last in found] == [False, False, False, True] * (last + 1 - first)


def test_a_sampler_draws_from_the_whole_of_its_own_dataset():
    """Which may be larger than the one of the plan, as for a second stream of data; a smaller one is refused."""
    sampler = train_sampler()
    sampler.dataset = range(300)
    seen = set()
    for sampler.step in range(0, 40 * STEPS, STEPS):
        seen |= {*np.concatenate([indices for _, indices in sampler]).tolist()}
    assert seen == {*range(300)}
    sampler.dataset = range(96)
    assert len([*sampler]) == 96 // MICRO
    sampler.dataset = range(95)
    with pytest.raises(ConfigError, match="96 indices, but range gives 95$"):
        next(iter(sampler))


def test_the_generators_of_all_gpus_are_seeded_like_that_of_the_cpu(monkeypatch):
    """Augmentation that is drawn on a GPU is resumed exactly, too."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "default_generators", 2 * (SimpleNamespace(manual_seed=seeded.append),))
    seeder("cuda", "data", 0)(3)
    assert seeded == 2 * [torch.initial_seed()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 257, 1217, 4097, 99_999])
def test_a_permutation_has_each_index_once_and_is_random(size: int):
    """Over 500 seeds, the correlations of the place and the index, and of neighbours, are those of random permutations,
    and one index is in its own place."""
    permutation = Permutation(size, generator(3))
    assert len(permutation) == size and np.array_equal(np.sort(permutation[0:size]), np.arange(size))
    parts = [permutation[i : min(i + 7, size)] for i in range(0, size, 7)]
    assert np.array_equal(np.concatenate(parts), permutation[0:size])
    if size not in (17, 257, 1217):
        return
    places = np.arange(size)
    found = [Permutation(size, generator(seed))[0:size] for seed in range(500)]
    of_place = np.array([np.corrcoef(places, order)[0, 1] for order in found]) * (size - 1) ** 0.5
    assert abs(of_place.mean()) < 0.2 and abs(of_place.std() - 1) < 0.15
    of_neighbours = np.array([np.corrcoef(order[:-1], order[1:])[0, 1] for order in found]) * size**0.5
    assert abs(of_neighbours.mean() + size**-0.5) < 0.2
    assert abs(np.mean([(order == places).sum() for order in found]) - 1) < 0.2


def test_the_order_of_a_million_million_samples_takes_no_memory_and_no_time():
    """Of a text with a sample at each character, say; also from the middle of an epoch on."""
    size = 10**12
    plan = plan_of(size, EFFECTIVE, MICRO)
    seen = []
    for step in (0, plan.steps_per_epoch - 1):
        sampler = TrainSampler(plan, range(size), 0, 42, step)
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
    """All ranks have equally many batches, none of them empty or padded. Fewer samples than ranks are refused."""
    for samples in (*range(world_size, 50), 103, 1000):
        ranks = [batches_of(samples, batch_size, rank, world_size) for rank in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        sizes = [len(batch) for batches in ranks for batch in batches]
        assert 0 < min(sizes) <= max(sizes) <= max(batch_size, 2), f"{samples} samples"
        turns = [batch for turn in zip(*ranks, strict=True) for batch in turn]
        assert sum(turns, []) == [*range(samples)]
    for samples in range(1, world_size):
        with pytest.raises(ConfigError, match=f"{samples} samples .* {world_size} processes"):
            batches_of(samples, batch_size, 0, world_size)


# ---- the samples: their content, their randomness, their batches


def test_shift_moves_the_image_and_fills_with_background():
    """Images that are not shifted are not copied."""
    image = torch.zeros(1, 1, 5, 5)  # zero is the darkest value
    image[0, 0, 2, 2] = 1
    dataset, places = ImageDataset(image, torch.tensor([0]), num_classes=1, shift=1), set()
    for _ in range(200):
        shifted = dataset[0][0]
        assert shifted.shape == (1, 5, 5) and shifted.sum() == 1
        places.add(tuple(shifted[0].nonzero()[0].tolist()))
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}
    kept = vars(ImageDataset(image, torch.tensor([0]), num_classes=1)).values()
    assert {each.data_ptr() for each in kept if isinstance(each, torch.Tensor) and each.ndim > 1} == {image.data_ptr()}
    with pytest.raises(ValueError, match="1 images, but 3 targets"):
        ImageDataset(image, torch.arange(3), num_classes=3)


class Pairs(Dataset):
    """A pair per sample, with randomness of all three kinds."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor(noise, dtype=torch.float64), index


def with_a_generator() -> Dataset:
    """Whose samples have noise of a generator of its own, as docs/data.md shows it."""
    (method,) = [code for code in blocks("docs/data.md", "python") if code.startswith("def __getitem__")]
    found: dict = {}
    exec(method, {"np": np}, found)
    samples = [(np.zeros(3, np.float32), index) for index in range(40)]
    return type("WithGenerator", (Pairs,), found | {"samples": samples})()


def pictures() -> Dataset:
    return ImageDataset(torch.rand(40, 1, 8, 8, generator=generator()), torch.arange(40), num_classes=40, shift=2)


def load(dataset: Dataset, num_workers=0, epochs=(0,), world_size=1, seed=42) -> dict[tuple[int, int], list]:
    """Maps (epoch, target) to the input that the loaders of all ranks give; a target is the sample's number."""
    found, config = {}, TrainConfig(seed=seed, num_workers=num_workers)
    for rank in range(world_size):
        sampler = TrainSampler(plan_of(40, 20, 5, world_size), dataset, rank, seed)
        loader = Loader(FABRIC, dataset, sampler, config)
        for epoch in epochs:
            sampler.step = epoch * sampler.plan.steps_per_epoch
            for inputs, targets in loader:
                found |= {(epoch, int(t)): x.tolist() for x, t in zip(inputs, targets, strict=True)}
    assert len(found) == len(epochs) * 40
    return found


@pytest.mark.parametrize("make", [pictures, Pairs, with_a_generator])
def test_randomness_is_a_function_of_seed_and_micro_batch_and_so_is_a_generator_of_its_own(make):
    """However the samples are loaded, the same; in another epoch and with another seed, another."""
    torch.manual_seed(3)
    dataset = make()
    expected = load(dataset, epochs=(0, 1))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    for options in ({"num_workers": 2}, {"world_size": 2}, {"world_size": 2, "num_workers": 1}):
        assert load(dataset, epochs=(0, 1), **options) == expected
    assert load(dataset, epochs=(1,)) == {key: expected[key] for key in expected if key[0] == 1}
    assert load(dataset, epochs=(0, 1), seed=43) != expected
    assert sum(expected[0, sample] != expected[1, sample] for _, sample in expected) > 40
    if make is Pairs:  # all samples of a run have numbers of their own, of torch, NumPy and random
        assert [len({*column}) for column in zip(*expected.values(), strict=True)] == [80, 80, 80]


def test_another_loader_and_loading_itself_change_no_random_number():
    """A validation on the training set in the middle of an epoch, say. To open a loader draws nothing either, so that
    the training does not depend on how often one was opened."""
    dataset, found = pictures(), {}
    expected = load(dataset)
    for images, targets in Loader(FABRIC, dataset, TrainSampler(plan_of(40, 20, 5), range(40), 0, 42), TrainConfig()):
        other = Loader(FABRIC, dataset, eval_batches(40, 4, FABRIC), TrainConfig())
        assert sum(len(targets) for _, targets in other) == 40
        found |= {(0, int(t)): x.tolist() for x, t in zip(images, targets, strict=True)}
    assert found == expected
    before = torch.get_rng_state()
    assert len(list(Loader(FABRIC, dataset, eval_batches(40, 5, FABRIC), TrainConfig(num_workers=1)))) == 8
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_are_what_the_dataset_gives():
    """Dicts, say, collated as PyTorch does, or by the dataset's own collate_fn; and those of a method __getitems__."""
    key = (0, np.array([3, 1, 2]))
    dicts = [{"label": index, "weight": 1.0} for index in range(5)]
    assert [*SeededBatches(dicts, 42)[key]] == ["label", "weight"]
    assert SeededBatches(dicts, 42)[key]["label"].tolist() == [3, 1, 2]

    class Padded(Pairs):
        def __getitems__(self, indices):
            return [index + 10 for index in indices]

        @staticmethod
        def collate_fn(samples):
            return "collated", default_collate(samples)

    assert SeededBatches(Padded(), 42)[key][1].tolist() == [13, 11, 12]
    half = random_split(random_split(Padded(), [20, 20])[0], [10, 10])[0]  # has no collate_fn of its own
    assert SeededBatches(half, 42)[key][0] == "collated"
