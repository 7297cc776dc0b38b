"""The order of the samples, their augmentation, and what a user's own dataset may look like."""

import gzip
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, random_split

from data import EvalSampler, ImageDataset, MicroBatches, TrainSampler, build_datasets, build_loader, stable_seed

SAMPLES, EFFECTIVE, MICRO, STEPS = 103, 16, 4, 6


def train_sampler(rank=0, world_size=1, micro=MICRO, seed=42, epoch=0, first_step=0) -> TrainSampler:
    """From step `first_step` of an epoch to the end of that epoch."""
    sampler = TrainSampler(SAMPLES, STEPS, epoch + 1, EFFECTIVE, micro, rank, world_size, seed)
    sampler.first_step = epoch * STEPS + first_step
    return sampler


def effective_batches(world_size: int = 1, micro: int = MICRO, **options) -> list[list[int]]:
    """The sample numbers of each step, put together from all ranks as they come: one micro-batch of each in turn."""
    ranks = [list(train_sampler(rank, world_size, micro, **options)) for rank in range(world_size)]
    dealt = [indices.tolist() for turn in zip(*ranks, strict=True) for _, indices in turn]
    flat = [index for indices in dealt for index in indices]
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
def test_a_rank_gets_every_so_many_th_micro_batch(world_size: int):
    """So the micro-batches, and with them dropout and BatchNorm, are the same on any number of devices."""
    alone = [indices.tolist() for _, indices in train_sampler()]
    for rank in range(world_size):
        sampler = train_sampler(rank, world_size)
        assert [indices.tolist() for _, indices in sampler] == alone[rank::world_size]
        assert len(sampler) == len(alone) // world_size


@pytest.mark.parametrize("first_step", range(STEPS + 1))
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_goes_on_with_the_samples_that_are_left(first_step: int, world_size: int):
    whole = effective_batches(1, epoch=2)
    assert effective_batches(world_size, epoch=2, first_step=first_step) == whole[first_step:]
    assert len(train_sampler(first_step=first_step)) == (STEPS - first_step) * EFFECTIVE // MICRO


def test_keys_carry_the_epoch():
    assert {epoch for epoch, _ in train_sampler(epoch=7)} == {7}


def test_the_epochs_follow_each_other():
    sampler = train_sampler(epoch=2)
    sampler.first_step = 0
    keys = [(epoch, indices.tolist()) for epoch, indices in sampler]
    assert len(keys) == len(sampler)
    assert keys == [(epoch, indices.tolist()) for epoch in range(3) for _, indices in train_sampler(epoch=epoch)]


def test_stable_seed():
    """The same on every machine and version; other parts give another seed."""
    assert stable_seed("order", 42, 0) == 4017791760
    seeds = {stable_seed(*parts) for parts in [("a", 1, 23), ("a", 12, 3), ("b", 1, 23), ("a", 1, 2, 3), (1, 23)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**32 for seed in seeds)


# ---- the order of an evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("samples, batch_size", [(103, 16), (96, 16), (97, 16), (5, 16), (1, 1), (103, 1)])
def test_evaluation_counts_each_sample_once(world_size: int, samples: int, batch_size: int):
    """Every rank has equally many batches, all of them full; `sizes` says how many of a batch's samples count."""
    samplers = [EvalSampler(samples, batch_size, rank, world_size) for rank in range(world_size)]
    counted = []
    for sampler in samplers:
        batches = [indices.tolist() for _, indices in sampler]
        assert len(batches) == len(sampler) == len(sampler.sizes) == len(samplers[0])
        assert {len(batch) for batch in batches} == {batch_size}
        assert all(0 <= index < samples for batch in batches for index in batch)
        counted += [index for batch, size in zip(batches, sampler.sizes, strict=True) for index in batch[:size]]
    assert sorted(counted) == list(range(samples))


# ---- the datasets of the template


def grey(dataset: Dataset) -> np.ndarray:
    """The images as they were before they were normalized: whole numbers from 0 to 16."""
    images = torch.stack([dataset[i][0][0] for i in range(len(dataset))]).numpy()
    return np.rint((images - images.min()) / (images.max() - images.min()) * 16).astype(np.uint8)


def test_digits_have_a_fixed_split():
    """No digit is in two parts; neither the seed nor torch's generator moves one."""
    from sklearn.datasets import load_digits

    digits = load_digits().images.astype(np.uint8)
    number = {digit.tobytes(): i for i, digit in enumerate(digits)}
    parts = build_datasets("digits", None, seed=42)
    assert {name: len(part) for name, part in parts.items()} == {"train": 1217, "val": 200, "test": 380}

    val, test = ({number[image.tobytes()] for image in grey(parts[name])} for name in ("val", "test"))
    left = set(range(len(digits))) - val - test
    assert len(left) == 1217
    shifted = {np.pad(digits[i], 1)[y : y + 8, x : x + 8].tobytes() for i in left for y in range(3) for x in range(3)}
    train = {image.tobytes() for image in grey(parts["train"])}
    assert train <= shifted
    assert len(train) == 1217

    torch.manual_seed(7)
    again = build_datasets("digits", None, seed=1)
    everything = np.arange(200)
    for mine, other in zip(parts["val"].__getitems__(everything), again["val"].__getitems__(everything), strict=True):
        assert torch.equal(mine, other)
    assert again["train"].__getitems__(everything)[1].tolist() == parts["train"].__getitems__(everything)[1].tolist()


def pictures(seed: int = 5) -> Dataset:
    images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return ImageDataset(images, torch.arange(40), shift=2, seed=seed)


def load(dataset: Dataset, num_workers=0, epochs=(0,), world_size=1, micro=5, seed=42) -> dict[tuple[int, int], list]:
    """Maps (epoch, target) to the input that the loaders of all ranks give; a target is the sample's number."""
    found = {}
    for rank in range(world_size):
        steps = len(dataset) // 20
        sampler = TrainSampler(len(dataset), steps, epochs[-1] + 1, 20, micro, rank, world_size, seed)
        sampler.first_step = epochs[0] * steps
        batches = iter(build_loader(dataset, sampler, seed, num_workers, pin_memory=False))
        for epoch in epochs:
            for inputs, targets in itertools.islice(batches, steps * 20 // micro // world_size):
                assert len(inputs) == len(targets) == micro
                found |= {(epoch, int(t)): x.tolist() for x, t in zip(inputs, targets, strict=True)}
        assert next(batches, None) is None
    assert len(found) == len(epochs) * len(dataset)
    return found


def test_shift_is_a_function_of_seed_epoch_and_index():
    one = load(pictures(), epochs=(0, 1))
    assert load(pictures(), epochs=(1,)) == {key: one[key] for key in one if key[0] == 1}
    assert load(pictures(), epochs=(0, 1), micro=2, world_size=2, seed=1) == one
    assert sum(one[0, i] != one[1, i] for i in range(40)) > 20
    assert load(pictures(seed=6)) != {key: one[key] for key in one if key[0] == 0}


def test_shift_is_the_same_through_workers():
    assert load(pictures(), num_workers=2, epochs=(0, 1)) == load(pictures(), epochs=(0, 1))


def test_shift_moves_the_image_and_fills_with_background():
    image = torch.zeros(1, 1, 5, 5)  # zero is the darkest value
    image[0, 0, 2, 2] = 1
    dataset, places = ImageDataset(image, torch.tensor([0]), shift=1), set()
    for epoch in range(100):
        dataset.set_epoch(epoch)
        shifted = dataset[0][0]
        assert shifted.shape == (1, 5, 5) and shifted.sum() == 1
        places.add(tuple(shifted[0].nonzero()[0].tolist()))
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}


# ---- a user's own dataset


class OwnPairs(Dataset):
    """A pair per sample, with randomness of all three kinds."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor(noise, dtype=torch.float64), index


class OwnDicts(OwnPairs):
    """A dict per sample."""

    def __getitem__(self, index: int):
        inputs, target = super().__getitem__(index)
        return {"picture": inputs, "label": target}


class OwnArrays(OwnPairs):
    """NumPy arrays instead of tensors."""

    def __getitem__(self, index: int):
        inputs, target = super().__getitem__(index)
        return inputs.numpy(), np.int64(target)


class Twice(OwnPairs):
    def __len__(self) -> int:
        return 80


def subset_of_own() -> Dataset:
    return random_split(Twice(), [40, 40], torch.Generator().manual_seed(0))[0]


@pytest.mark.parametrize("own", [OwnPairs, OwnDicts, OwnArrays, subset_of_own])
def test_randomness_of_an_own_dataset(own):
    """Seeded by (seed, epoch, index) for each sample: however it is loaded, the same; in another epoch, another."""
    dataset = own()
    expected = load(dataset, epochs=(0, 1))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert load(dataset, epochs=(0, 1), num_workers=2) == expected
    assert load(dataset, epochs=(0, 1), world_size=2) == expected
    assert load(dataset, epochs=(0, 1), world_size=2, num_workers=2) == expected
    assert load(dataset, epochs=(1,)) == {key: expected[key] for key in expected if key[0] == 1}
    assert load(dataset, epochs=(0, 1), seed=43) != expected
    for kind in range(3):
        assert len({noise[kind] for noise in expected.values()}) == 80  # 40 samples in two epochs, all different


@pytest.mark.parametrize("own", [OwnPairs, OwnDicts, subset_of_own])
def test_randomness_of_an_own_dataset_does_not_depend_on_the_micro_batch_size(own):
    dataset = own()
    expected = load(dataset)
    for micro in (1, 2, 20):
        assert load(dataset, micro=micro) == expected


def test_dict_is_given_as_input_and_target():
    inputs, targets = MicroBatches(OwnDicts(), seed=42)[0, np.array([3, 1, 2])]
    assert inputs.shape == (3, 3)
    assert targets.tolist() == [3, 1, 2]


def test_subset_of_an_image_dataset():
    """random_split of the template's own kind of dataset keeps the augmentation per epoch."""
    part, _ = random_split(pictures(), [20, 20], torch.Generator().manual_seed(0))
    whole = load(pictures(), epochs=(0, 1))
    assert load(part, epochs=(0, 1)).items() <= whole.items()


def test_loading_leaves_the_global_generator_alone():
    """Opening a loader draws nothing, so that the training does not depend on how often one was opened."""
    loader = build_loader(pictures(), TrainSampler(40, 2, 1, 20, 5, 0, 1, 42), 42, 0, pin_memory=False)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert len(list(loader)) == 8
    assert torch.equal(torch.get_rng_state(), before)


# ---- IDX files, as MNIST comes


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, dashes: bool = True, zipped: bool = False) -> Path:
    """The digits as the four files of an MNIST-format set: 1,200 training and 597 test images."""
    from sklearn.datasets import load_digits

    images, targets = load_digits().images, load_digits().target
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", slice(1200)), ("t10k", slice(1200, None))):
        for kind, array in (("images", images[part]), ("labels", targets[part])):
            path = folder / f"{name}-{kind}{'-' if dashes else '.'}idx{array.ndim}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return folder


@pytest.mark.parametrize("dashes", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_files_in_any_spelling(dashes: bool, zipped: bool, tmp_path: Path):
    from sklearn.datasets import load_digits

    parts = build_datasets("mnist", str(write_mnist(tmp_path, dashes, zipped)), seed=42)
    assert {name: len(part) for name, part in parts.items()} == {"train": 1100, "val": 100, "test": 597}
    assert np.array_equal(grey(parts["test"]), load_digits().images[1200:])
    assert [int(parts["test"][i][1]) for i in range(597)] == load_digits().target[1200:].tolist()
    assert parts["train"].num_classes == 10


def test_classes_that_a_part_lacks_count(tmp_path: Path):
    """The model has one logit per class of the whole set, whichever part it is built for."""
    (write_mnist(tmp_path) / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(597) % 7))
    parts = build_datasets("mnist", str(tmp_path), seed=42)
    assert {part.num_classes for part in parts.values()} == {10}


ARRAY = np.ones((1200, 8, 8))
DAMAGE = {
    "wrong magic": b"\0\0\x0d" + idx(ARRAY)[3:],
    "labels in place of images": idx(ARRAY[:, 0, 0]),
    "truncated": idx(ARRAY)[:-1],
    "truncated in the header": idx(ARRAY)[:6],
    "too long": idx(ARRAY) + b"\0",
    "empty file": b"",
    "no image": idx(ARRAY[:0]),
    "no pixel": idx(ARRAY[:, :0]),
}
ZIPPED_DAMAGE = {
    "truncated": gzip.compress(idx(ARRAY))[:-20],
    "no gzip": idx(ARRAY),
    "wrong checksum": gzip.compress(idx(ARRAY))[:-8] + bytes(8),
    "damaged inside": gzip.compress(idx(ARRAY))[:20] + b"\xff" * 20 + gzip.compress(idx(ARRAY))[40:],
    "empty file": b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_named(damage: str, tmp_path: Path):
    (write_mnist(tmp_path) / "train-images-idx3-ubyte").write_bytes(DAMAGE[damage])
    with pytest.raises(ValueError, match="train-images-idx3-ubyte"):
        build_datasets("mnist", str(tmp_path), seed=42)


@pytest.mark.parametrize("damage", ZIPPED_DAMAGE)
def test_damaged_gz_file_is_named(damage: str, tmp_path: Path):
    (write_mnist(tmp_path, zipped=True) / "train-images-idx3-ubyte.gz").write_bytes(ZIPPED_DAMAGE[damage])
    with pytest.raises(ValueError, match="train-images-idx3-ubyte.gz"):
        build_datasets("mnist", str(tmp_path), seed=42)


def test_missing_file_is_named(tmp_path: Path):
    (write_mnist(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        build_datasets("mnist", str(tmp_path), seed=42)


def test_files_that_do_not_fit_together(tmp_path: Path):
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(1199)))
    with pytest.raises(ValueError, match="1200.*1199"):
        build_datasets("mnist", str(tmp_path), seed=42)


def test_train_and_test_images_of_different_size(tmp_path: Path):
    (write_mnist(tmp_path) / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((597, 9, 9))))
    with pytest.raises(ValueError, match="8"):
        build_datasets("mnist", str(tmp_path), seed=42)
