"""The recipe on_device: samples that live on the device. Here that is the CPU; test_gpu.py has what needs a GPU."""

import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    imported,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    with_recipe,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset

from config import TrainConfig
from runtime.errors import ConfigError
from runtime.launch import end_workers
from runtime.loader import seeder

META = torch.device("meta")  # a device that every machine has


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("on_device", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def data(program: Path) -> ModuleType:
    """The edited data.py."""
    return imported(program, "data")


@pytest.fixture(scope="module")
def make_loader(program: Path):
    """Makes a loader of two batches, in a process whose device is this one."""
    module = imported(program, "runtime/loader")

    def loader(dataset, device: torch.device, num_workers: int = 0):
        fabric = SimpleNamespace(device=device, to_device=lambda tensor: tensor.to(device), world_size=1, global_rank=0)
        batches = module.eval_batches(8, 4, fabric)
        return module.Loader(fabric, dataset, batches, TrainConfig(num_workers=num_workers))

    return loader


class Made(TorchDispatchMode):
    """Keeps, for each operator, the device of what it has made."""

    def __init__(self):
        super().__init__()
        self.devices: dict = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.devices[function.name().partition(".")[0]] = made.device
        return made


# ---- the loader


@pytest.fixture(autouse=True)
def zero_minimum(monkeypatch):
    """A tensor on the meta device has no values. That of `item`, with which shifted images are padded, is 0 there."""
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 0.0 if self.is_meta else item(self))


@pytest.mark.parametrize("augment", [True, False])
def test_a_batch_is_fetched_and_augmented_on_the_device(augment: bool, data: ModuleType, make_loader):
    """Also the random numbers are drawn there."""
    dataset = data.build_datasets(TrainConfig(), augment)["train"]
    batches = make_loader(dataset, META)
    with Made() as made:
        shapes = [(images.shape, targets.shape) for images, targets in batches]
    assert shapes == [((4, 1, 8, 8), (4,))] * 2
    operators = ["aten::index_select", *(["aten::randint", "aten::index"] if augment else [])]
    assert {made.devices[name] for name in operators} == {META}


def test_the_samples_are_moved_once_by_the_loader_and_those_of_the_host_stay(
    data: ModuleType, make_loader, monkeypatch
):
    """The loader is made after the launch, so the device is that of the process. Of the host's samples, build_model
    looks at one, and `order` may need them all."""
    dataset = data.build_datasets(TrainConfig())["train"]
    moved = []
    on_device = data.ImageDataset.on_device
    monkeypatch.setattr(
        data.ImageDataset, "on_device", lambda self, device: moved.append(device) or on_device(self, device)
    )
    batches = make_loader(dataset, META)
    for _ in range(3):
        list(batches)
    assert moved == [META]
    assert dataset[0][0].device.type == "cpu"
    assert not batches.pin_memory


def test_only_indices_are_copied(data: ModuleType, make_loader):
    """Once a batch, in one tensor."""
    dataset = data.build_datasets(TrainConfig())["train"]
    batches = make_loader(dataset, META)
    copied = []
    batches.fabric.to_device = lambda tensor: copied.append(tensor) or tensor.to(META)
    list(batches)
    assert [index.tolist() for index in copied] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_generators_of_the_device_are_seeded_for_each_batch(data: ModuleType, make_loader, monkeypatch):
    """With the numbers that the CPU's gets: augmentation that is drawn on the device is resumed exactly, too."""
    seeded = []
    device = SimpleNamespace(manual_seed=seeded.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (device,))
    set_seed = seeder("cuda", "data", TrainConfig.seed)
    dataset = data.build_datasets(TrainConfig())["train"]
    batches = make_loader(dataset, torch.device("cpu"))
    batches.dataset.set_seed = set_seed
    list(batches)
    base = zlib.crc32(f"data {TrainConfig.seed}".encode())
    assert seeded == [base, base + 4]  # a batch of an evaluation has the number of its first sample


def test_workers_are_refused_but_not_for_a_dataset_that_stays_on_the_host(data: ModuleType, make_loader):
    dataset = data.build_datasets(TrainConfig())["train"]
    with pytest.raises(ConfigError, match="--num_workers 1: give 0"):
        make_loader(dataset, torch.device("cpu"), num_workers=1)
    host = make_loader(Subset(dataset, range(100)), torch.device("cpu"), num_workers=1)
    assert [len(targets) for _, targets in host] == [4, 4]
    end_workers(set())


# ---- runs


def test_on_a_cpu_the_run_is_that_without_the_patch(program: Path, tmp_path: Path):
    plain, patched = tmp_path / "plain", tmp_path / "patched"
    for folder, script in ((plain, "train.py"), (patched, f"{program}/train.py")):
        folder.mkdir()
        call(f"{script} {LONG.partition(' ')[2]} --epochs 4", folder)
    assert_same_run(patched, plain)


def test_workers_are_refused_in_one_line_and_nothing_is_made(program: Path, tmp_path: Path):
    error = call(f"{program}/train.py {SMALL} --num_workers 1", tmp_path, code=2).stderr
    assert error.count("\n") == 1 and error.startswith("train.py: error: --num_workers 1: give 0")
    assert list(tmp_path.iterdir()) == []
    call(f"{program}/train.py {SMALL} --epochs 1", tmp_path)
    error = call(f"{program}/test.py --out_dir train_out --accelerator cpu --num_workers 1", tmp_path, code=2).stderr
    assert error.splitlines()[-1].startswith("test.py: error: --num_workers 1: give 0")
    assert "accuracy" in call(f"{program}/test.py --out_dir train_out --accelerator cpu", tmp_path).stdout
    assert (run_dir(tmp_path) / "test_test_best.json").exists()


@pytest.mark.recipes
def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{LONG}", tmp_path)


@pytest.mark.recipes
def test_two_processes_train_like_one(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --epochs 3", tmp_path)
    assert_same_training(one, two)


def test_it_goes_with_the_recipe_of_an_order(tmp_path: Path):
    """A class that takes the arguments of ImageDataset lives on the device without a line more."""
    copy = with_recipe("balanced", with_recipe("on_device", tmp_path / "balanced"))
    call(f"{copy}/train.py --accelerator cpu --fast_run", tmp_path)
