"""Which samples come when, and from where: balanced, hard_examples, crossvalidation, on_device, prefetch, and the
orders of docs/data.md. On_device and prefetch run on the CPU here; test_gpu.py has what needs a GPU."""

import csv
import io
import json
import math
import re
import shutil
import signal
import zlib
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edits import insert_before, replace, with_text
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    TOOLS,
    assert_same_run,
    call,
    execute,
    imported,
    imported_train,
    interrupt,
    kill_group,
    results,
    run,
    run_dir,
    run_forked_sweep,
    weights,
    with_recipe,
)
from sklearn.datasets import load_digits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset

from config import TrainConfig
from runtime.errors import ConfigError
from runtime.launch import end_workers
from runtime.loader import seeder

pytestmark = pytest.mark.recipes


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- balanced, and the orders of data.md


def test_balanced_draws_each_class_equally_often(balanced: Path):
    """Five classes are rare, and the test set is whole."""
    config = SimpleNamespace(data_dir="", balanced=True)
    parts = imported(balanced, "data").build_datasets(config)
    train, counts = parts["train"], parts["train"].targets.bincount()
    assert counts[:5].max() < 20 and counts[5:].min() > 100
    assert parts["test"].targets.bincount().min() > 25 and (len(parts["val"]), len(parts["test"])) == (200, 380)
    epochs = [train.order(epoch, generator(epoch)) for epoch in range(100)]
    assert all(order.shape == (len(train),) for order in epochs)
    shares = train.targets[torch.cat(epochs)].bincount() / (100 * len(train))
    torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.005, rtol=0)  # four standard deviations
    assert torch.cat(epochs).unique().numel() == len(train)
    assert torch.equal(epochs[3], train.order(3, generator(3))) and not torch.equal(epochs[3], epochs[4])


class Sequences:
    """1,000 sequences of 1 to 200 words."""

    lengths = torch.randint(1, 201, (1000,), generator=generator())
    weights = lengths.float()
    batch_size = 16

    def __len__(self) -> int:
        return 1000


def orders() -> list:
    """The functions `order` of the page."""
    found = []
    for block in re.findall(r"^```python\n(def order.*?)^```$", (REPO / "docs" / "data.md").read_text(), re.S | re.M):
        names = {"torch": torch}
        exec(block, names)
        found.append(names["order"])
    return found


def test_the_order_by_weight_draws_in_proportion():
    by_weight, _ = orders()
    sequences = Sequences()
    drawn = torch.cat([by_weight(sequences, epoch, generator(epoch)) for epoch in range(300)])
    expected = len(drawn) * sequences.weights / sequences.weights.sum()
    assert ((drawn.bincount(minlength=1000) - expected).abs() < 6 * expected.sqrt() + 1).all()


def test_the_order_by_length_has_batches_of_similar_lengths_each_sample_once():
    _, by_length = orders()
    sequences = Sequences()
    first, second, again = (by_length(sequences, 0, generator(seed)) for seed in (1, 2, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)
    for order in (first, second):
        assert len(order) == len(order.unique()) == 1000 // 16 * 16
        lengths = sequences.lengths[order].view(-1, 16)
        assert lengths.sum() > 0.95 * (lengths.amax(1) * 16).sum()  # 0.53 with a random order
        of_batches = lengths.float().mean(1)
        assert (of_batches[1:] > of_batches[:-1]).float().mean() < 0.7  # long and short batches are mixed


# ---- hard_examples

# The weights stay as they are, and neither dropout nor shifts change a loss: a sample has the same in each epoch.
STILL = f"{LONG} --base_lr 1e-30 --dropout 0 --effective_batch_size 64"


@pytest.fixture(scope="module")
def still(tmp_path_factory) -> Path:
    """The program without shifts."""
    return replace(with_recipe("hard_examples", tmp_path_factory.mktemp("still")), "shift", "shift=0")


def sample_losses(program: Path, num_samples: int, pressure: float):
    return imported(program, "hard_examples").SampleLosses(num_samples, pressure, torch.device("cpu"))


def test_hard_examples_hardest_is_drawn_so_many_times_as_often_as_the_easiest(hard_examples: Path):
    losses = sample_losses(hard_examples, 1000, pressure=20)
    losses.before = torch.rand(1000, generator=generator())
    drawn = torch.stack([losses.order(0, generator(seed)).bincount(minlength=1000) for seed in range(200)]).double()
    assert torch.equal(drawn.sum(1), torch.full((200,), 1000.0, dtype=torch.float64))
    by_rank = drawn.mean(0)[losses.before.argsort()]
    expected = 20 ** (torch.arange(1, 1001).double() / 1000)
    torch.testing.assert_close(by_rank, expected * 1000 / expected.sum(), atol=0.15, rtol=0)
    assert ((drawn - drawn.mean(0)).abs() < 1).all()  # rounded up or down
    shuffled = losses.order(0, generator())
    assert not torch.equal(shuffled, shuffled.sort().values)
    assert torch.equal(shuffled, losses.order(0, generator()))


@pytest.mark.parametrize("pressure, before", [(1.0, torch.rand(1000)), (100.0, torch.full((1000,), math.inf))])
def test_hard_examples_without_pressure_and_in_the_first_epoch_are_drawn_once(pressure, before, hard_examples: Path):
    losses = sample_losses(hard_examples, 1000, pressure)
    losses.before = before
    assert {len(losses.order(0, generator(seed)).unique()) for seed in range(20)} == {1000}


def test_hard_examples_count_the_highest_loss_of_a_sample_that_was_drawn_several_times(hard_examples: Path):
    """And of one that was not drawn, the one before it."""
    losses = sample_losses(hard_examples, 5, pressure=100)
    losses.before = torch.arange(5.0)
    losses.indices = torch.tensor([3, 0, 3, 4])
    plan = SimpleNamespace(micro_batch_size=2, steps_per_epoch=2, effective_batch_size=2, world_size=1)
    losses.add(plan, 3, 0, torch.tensor([9.0, 0.5]))  # the first micro-batch of the second epoch
    losses.add(plan, 4, 0, torch.tensor([7.0, 6.0]))
    assert losses.before.tolist() == [0, 1, 2, 3, 4]  # until the epoch ends
    losses.end_epoch()
    assert losses.before.tolist() == [0.5, 1, 2, 9, 6]
    assert losses.current.tolist() == [-math.inf] * 5


@pytest.fixture(scope="module")
def expected(still: Path, tmp_path_factory) -> torch.Tensor:
    """The loss of each training sample with the weights that a run of STILL begins with, and ends with."""
    cwd = tmp_path_factory.mktemp("expected")
    call(f"{still}/{STILL} --max_steps 2", cwd)
    with pytest.MonkeyPatch.context() as patch:
        train = imported_train(still, patch)
        config = train.TrainConfig(width=4)
        dataset = train.build_datasets(config)["train"]
        model = train.build_model(config, dataset).eval()
    model.load_state_dict(weights(cwd))
    images, targets = dataset.__getitems__(range(len(dataset)))
    with torch.no_grad():
        return F.cross_entropy(model(images), targets, reduction="none")


@pytest.mark.parametrize("options", ["--micro_batch_size 64", "", f"{ON_2}", f"{ON_2} --precision bf16-mixed"])
def test_hard_examples_have_their_losses_on_any_number_of_devices(options: str, still, expected, tmp_path: Path):
    """After two epochs, and in the middle of the third."""
    execute(f"{still}/{STILL} --max_steps 20 {options}", tmp_path)
    path = max(run_dir(tmp_path).glob("checkpoints/step-*.ckpt"))
    saved = torch.load(path, weights_only=True)["sample_losses"]
    tolerance = 0.03 if "bf16" in options else 1e-5
    for part, most in (("before", 8 * 64 * 2), ("current", 4 * 64)):
        is_drawn = saved[part].isfinite()
        assert 0.6 * most < is_drawn.sum() <= min(most, len(expected))
        torch.testing.assert_close(saved[part][is_drawn], expected[is_drawn], atol=tolerance, rtol=0)
    assert saved["current"][saved["current"].isfinite()].mean() > expected.mean()  # the hard ones


def test_hard_examples_of_a_longer_run_are_those_of_one_that_was_long_from_the_start(hard_examples, tmp_path: Path):
    """Although the shorter one ended in the middle of an epoch."""
    for name, steps in {"long": [28], "longer": [20, 28]}.items():
        (tmp_path / name).mkdir()
        for max_steps in steps:
            call(f"{hard_examples}/{LONG} --max_steps {max_steps} --resume auto", tmp_path / name)
    torch.testing.assert_close(weights(tmp_path / "longer"), weights(tmp_path / "long"), atol=0, rtol=0)


# ---- crossvalidation


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory) -> Path:
    """The programs with the recipe, and the scripts that average over folds."""
    program = with_recipe("crossvalidation", tmp_path_factory.mktemp("program"))
    (program / "tools").mkdir()
    for name in ("sweep.py", "runs.py", "run_table.py"):
        shutil.copy(TOOLS / name, program / "tools")
    return program


def datasets_of(program: Path, folds: int, fold: int) -> dict:
    """The datasets of a fold, without augmentation."""
    config = SimpleNamespace(data_dir="", folds=folds, fold=fold)
    return imported(program, "data").build_datasets(config, augment=False)


def numbers(dataset) -> list[int]:
    """Which of the 1,797 digits the samples of a dataset are. They were normalised: their grey values are restored."""
    known = {image.tobytes(): number for number, image in enumerate(load_digits().data.astype(np.uint8))}
    assert len(known) == 1797  # no two are the same
    images = dataset.images.flatten(1)
    grey = (images - images.min()) / (images.max() - images.min()) * 16
    return [known[image.tobytes()] for image in grey.round().numpy().astype(np.uint8)]


@pytest.mark.parametrize("folds", [2, 5])
def test_crossvalidation_validates_on_each_sample_once_and_else_trains_on_it(crossvalidation: Path, folds: int):
    """The classes have the same shares in each fold, what normalises comes from the samples that are trained on, and
    the test set is that of the template."""
    sets = [datasets_of(crossvalidation, folds, fold) for fold in range(folds)]
    parts = [{name: numbers(part) for name, part in each.items()} for each in sets]
    test = numbers(imported(REPO, "data").build_datasets(SimpleNamespace(data_dir=""))["test"])
    validated = [number for part in parts for number in part["val"]]
    assert len(validated) == len(set(validated)) == 1417 and set(test).isdisjoint(validated)
    for part in parts:
        assert sorted(part["train"] + part["val"]) == sorted(validated)
        assert abs(len(part["val"]) - 1417 / folds) < 1 and part["test"] == test
    counts = torch.stack([each["val"].targets.bincount(minlength=10) for each in sets])
    assert (counts.amax(0) - counts.amin(0) <= 1).all()
    for each in sets:
        assert each["train"].images.mean().item() == pytest.approx(0, abs=1e-5)
        assert each["train"].images.std().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("options, sizes", [("--folds 4 --fold 3", (1063, 354, 380)), ("--fold -1", (1417, None, 380))])
def test_crossvalidation_fold_of_the_run_is_evaluated(
    options: str, sizes: tuple, crossvalidation: Path, tmp_path: Path
):
    """A last fit, of fold -1, has all samples but those of the test set."""
    call(f"{crossvalidation}/train.py {SMALL} {options}", tmp_path)
    assert f"{sizes[0]:,} training samples" in (run_dir(tmp_path) / "train.log").read_text()
    for split, size in zip(("train", "val", "test"), sizes, strict=True):
        if size:
            results(crossvalidation, tmp_path, f"--checkpoint best --split {split} --predictions")
            _, targets = torch.load(run_dir(tmp_path) / f"predictions_{split}_best.pt", weights_only=True)
            assert len(targets) == size
            if split != "train" or "3" in options:
                folds, fold = (4, 3) if "3" in options else (5, -1)
                assert torch.equal(targets, datasets_of(crossvalidation, folds, fold)[split].targets)


def bests(cwd: Path) -> dict[str, float]:
    """The best value of each run, by its name without the time."""
    return {path.parent.name[16:]: json.loads(path.read_text())["best"] for path in cwd.glob("*/summary.json")}


def test_crossvalidation_sweep_and_runs_take_the_mean_over_the_folds(with_tools: Path, tmp_path: Path):
    pytest.importorskip("optuna")
    (tmp_path / "cv.yaml").write_text("width: [4, 5]\nfolds: 3\nfold: [0, 1, 2]\n")
    options = f"{SMALL} --epochs 2 --logger_name csv".replace("--width 4 ", "")
    printed = run_forked_sweep(f"cv.yaml --jobs 2 -- {options}", tmp_path, program=with_tools).stdout
    found = bests(tmp_path)
    assert {*found} == {f"cv-{number}-fold={fold}" for number in (0, 1) for fold in (0, 1, 2)}
    of_width = {width: [found[f"cv-{number}-fold={fold}"] for fold in (0, 1, 2)] for number, width in ((0, 4), (1, 5))}
    for width, values in of_width.items():
        assert f": {mean(values):.5g} with {{'width': {width}}}; best " in printed
    assert "of 2 trials" in printed
    assert len(re.findall(r"^next: python test.py --out_dir \S+-fold=\d$", printed, re.MULTILINE)) == 3
    table = call(f"{with_tools}/tools/runs.py {tmp_path} --group --format csv", tmp_path).stdout
    lines = [*csv.DictReader(io.StringIO(table))]
    assert sorted(line["width"] for line in lines) == ["4", "5"]  # the first to start stands first
    for line in lines:
        values = of_width[int(line["width"])]
        assert float(line["mean"]) == pytest.approx(mean(values)) and float(line["std"]) == pytest.approx(stdev(values))
        assert (line["n"], line["state"]) == ("3", "3 finished")


def test_crossvalidation_folds_alone_are_a_sweep(with_tools: Path, tmp_path: Path):
    """Nothing is searched: one point, the defaults."""
    pytest.importorskip("optuna")
    (tmp_path / "cv.yaml").write_text("folds: 2\nfold: [0, 1]\n")
    options = f"{SMALL} --epochs 1 --logger_name csv"
    printed = run_forked_sweep(f"cv.yaml -- {options}", tmp_path, program=with_tools).stdout
    assert {*bests(tmp_path)} == {"cv-0-fold=0", "cv-0-fold=1"}
    assert f"best val/accuracy {mean(bests(tmp_path).values()):.5g} of 1 trials" in printed


# ---- on_device

META = torch.device("meta")  # a device that every machine has
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(on_device: Path) -> ModuleType:
    """The edited data.py."""
    return imported(on_device, "data")


@pytest.fixture(scope="module")
def make_loader(on_device: Path):
    """Makes a loader of two batches, in a process whose device is this one."""
    module = imported(on_device, "runtime/loader")

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


@pytest.fixture
def zero_minimum(monkeypatch):
    """A tensor on the meta device has no values. That of `item`, with which shifted images are padded, is 0 there."""
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 0.0 if self.is_meta else item(self))


@pytest.mark.parametrize("augment", [True, False])
def test_on_device_a_batch_is_fetched_and_augmented_there(augment: bool, data: ModuleType, make_loader, zero_minimum):
    """Also the random numbers are drawn there."""
    batches = make_loader(data.build_datasets(TrainConfig(), augment)["train"], META)
    with Made() as made:
        shapes = [(images.shape, targets.shape) for images, targets in batches]
    assert shapes == [((4, 1, 8, 8), (4,))] * 2
    operators = ["aten::index_select", *(["aten::randint", "aten::index"] if augment else [])]
    assert {made.devices[name] for name in operators} == {META}


def test_on_device_samples_are_moved_once_and_only_indices_are_copied(data, make_loader, zero_minimum, monkeypatch):
    """The loader is made after the launch, so the device is that of the process. Of the host's samples, build_model
    looks at one, and `order` may need them all: they stay. Indices are copied once a batch, in one tensor."""
    dataset = data.build_datasets(TrainConfig())["train"]
    moved, copied, move = [], [], data.ImageDataset.on_device
    monkeypatch.setattr(data.ImageDataset, "on_device", lambda self, to: moved.append(to) or move(self, to))
    batches = make_loader(dataset, META)
    batches.fabric.to_device = lambda tensor: copied.append(tensor) or tensor.to(META)
    for _ in range(3):
        list(batches)
    assert moved == [META] and dataset[0][0].device.type == "cpu" and not batches.pin_memory
    assert [index.tolist() for index in copied] == 3 * [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_on_device_generators_are_seeded_for_each_batch(data: ModuleType, make_loader, monkeypatch):
    """With the numbers that the CPU's gets: augmentation that is drawn on the device is resumed exactly, too."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "default_generators", (SimpleNamespace(manual_seed=seeded.append),))
    batches = make_loader(data.build_datasets(TrainConfig())["train"], CPU)
    batches.dataset.set_seed = seeder("cuda", "data", TrainConfig.seed)
    list(batches)
    base = zlib.crc32(f"data {TrainConfig.seed}".encode())
    assert seeded == [base, base + 4]  # a batch of an evaluation has the number of its first sample


def test_on_device_workers_are_refused_but_not_for_a_dataset_that_stays_on_the_host(data: ModuleType, make_loader):
    dataset = data.build_datasets(TrainConfig())["train"]
    with pytest.raises(ConfigError, match="--num_workers 1"):
        make_loader(dataset, CPU, num_workers=1)
    host = make_loader(Subset(dataset, range(100)), CPU, num_workers=1)
    assert [len(targets) for _, targets in host] == [4, 4]
    end_workers(set())


def test_on_device_on_a_cpu_the_run_is_that_without_the_patch(on_device: Path, tmp_path: Path):
    """And test.py refuses workers, too."""
    plain, patched = tmp_path / "plain", tmp_path / "patched"
    for folder, script in ((plain, "train.py"), (patched, f"{on_device}/train.py")):
        folder.mkdir()
        call(f"{script} {LONG.partition(' ')[2]} --epochs 4", folder)
    assert_same_run(patched, plain)
    error = call(f"{on_device}/test.py --accelerator cpu --num_workers 1", patched, code=2).stderr
    assert "--num_workers 1" in error.splitlines()[-1] and not [*run_dir(patched).glob("test_*")]


def test_on_device_goes_with_the_recipe_of_an_order(tmp_path: Path):
    """A class that takes the arguments of ImageDataset lives on the device without a line more."""
    copy = with_recipe("balanced", with_recipe("on_device", tmp_path / "balanced"))
    call(f"{copy}/train.py --accelerator cpu --fast_run", tmp_path)


# ---- prefetch: a stand-in takes the place of the streams


# Streams that wait for nothing, and a loader that takes any device for one that has some.
NO_STREAMS = """
class Stream:
    def __init__(self, device):
        pass

    def wait_stream(self, stream):
        pass


torch.cuda.Stream = torch.cuda.current_stream = Stream
torch.cuda.stream = lambda stream: ExitStack()


"""


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    """The program, which loads ahead on a CPU, too."""
    program = with_recipe("prefetch", tmp_path_factory.mktemp("ahead"))
    asks = 'self.fabric.device.type == "cuda":\n            batches = copied_ahead('
    return with_text(
        program,
        "runtime/loader.py",
        ("def start_worker(", f"{NO_STREAMS}def start_worker("),
        (asks, "True:\n            batches = copied_ahead("),
    )


def test_prefetch_each_copy_overlaps_one_computation_and_nothing_else(prefetch: Path, monkeypatch):
    """The loop waits for the copy of its batch, but not for that of the next one. A copy waits for what was computed
    before: the memory that it writes to may be that of an earlier batch."""
    order = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def wait_stream(self, other: "Stream"):
            order.append(f"{self.name} waits for {other.name}")

    def copy(batch: int) -> int:
        order.append(f"copy {batch} on {current[-1]}")
        return batch

    class On:
        def __init__(self, stream: Stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream.name)

        def __exit__(self, *error):
            current.pop()

    current = ["computing"]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", On)
    fabric = SimpleNamespace(device=None, to_device=copy)
    for batch in imported(prefetch, "runtime/loader").copied_ahead(fabric, iter(range(3))):
        order.append(f"compute {batch} on {current[-1]}")
    for_both = ["computing waits for copying", "copying waits for computing"]
    assert order == [
        *[*for_both, "copy 0 on copying"],
        *[*for_both, "copy 1 on copying", "compute 0 on computing"],
        *[*for_both, "copy 2 on copying", "compute 1 on computing"],
        *["computing waits for copying", "compute 2 on computing"],
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prefetch_each_batch_comes_once_in_order(count: int, prefetch: Path, monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    fabric = SimpleNamespace(device=None, to_device=lambda batch: batch)
    assert list(imported(prefetch, "runtime/loader").copied_ahead(fabric, iter(range(count)))) == list(range(count))


def test_prefetch_makes_no_stream_without_a_gpu(prefetch: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: pytest.fail("a stream"))
    call(f"{prefetch}/{LONG} --max_steps 4", tmp_path)


@pytest.mark.parametrize("options", ["", pytest.param("--num_workers 2", marks=pytest.mark.night)])
def test_prefetch_killed_and_resumed_it_is_the_run_without_it(options: str, ahead: Path, tmp_path: Path):
    """When a micro-batch more had been loaded than was trained on."""
    plain, whole, killed = tmp_path / "plain", tmp_path / "whole", tmp_path / "killed"
    for folder in (plain, whole, killed):
        folder.mkdir()
    command = f"{LONG} {options}"
    run(command, plain)
    run(f"{ahead}/{command}", whole)
    assert_same_run(whole, plain)
    assert interrupt(f"{ahead}/{command}", killed, kill_group).returncode == -signal.SIGKILL
    run(f"{ahead}/train.py --resume auto", killed)
    assert_same_run(killed, plain)


def test_prefetch_loads_nothing_ahead_of_an_epoch(ahead: Path, tmp_path: Path):
    """Its order may depend on the training: it is asked for when the first batch is."""
    copy = Path(shutil.copytree(ahead, tmp_path / "program"))
    asked = 'print(f"order of epoch {epoch}", flush=True)'
    line = '        generator = torch.Generator().manual_seed(zlib.crc32(f"order'
    with_text(copy, "runtime/loader.py", (line, f"        {asked}\n{line}"))
    insert_before(copy, "optimizer steps", 'print(f"step {step}", flush=True)')
    printed = run(f"{copy}/{LONG} --epochs 2", tmp_path).stdout.splitlines()
    found = [line for line in printed if line.startswith(("order", "step "))]
    assert found.index("order of epoch 1") == found.index("step 8") + 1
