"""What one of recipes/features alone can do wrong: which samples come when, and from where (balanced, crossvalidation,
on_device, prefetch, and the orders of docs/data.md), and what is shown of a run (hparams, pictures, profiler,
val_sets). On_device and prefetch run on the CPU here; test_gpu.py has what needs a GPU."""

import io
import json
import re
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from commands import LONG, REPO, SMALL, TOOLS, call, run, run_forked_sweep, run_in
from comparisons import assert_same_run, assert_same_weights
from copies import generator, imported, with_recipe
from edits import insert_after, insert_before, replace
from mistakes import refuses
from outputs import last_summary, predictions_of, read_tensorboard, results, rows, run_dir, weights
from PIL import Image
from processes import interrupt, kill_group
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.data import Subset, TensorDataset

from config import TrainConfig
from data import build_datasets
from runtime.launch import end_workers

pytestmark = pytest.mark.recipes


def test_balanced_draws_each_class_equally_often(balanced: Path):
    """Five classes are rare, and the test set is whole."""
    parts = imported(balanced, "data").build_datasets(SimpleNamespace(data_dir="", balanced=True))
    train, counts = parts["train"], parts["train"].targets.bincount()
    assert counts[:5].max() < 20 and counts[5:].min() > 100 and len(parts["test"]) == 380
    epochs = torch.stack([train.order(epoch, generator(epoch)) for epoch in range(100)])
    shares = train.targets[epochs].flatten().bincount() / epochs.numel()
    torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.005, rtol=0)  # four standard deviations
    assert epochs.shape[1] == epochs.unique().numel() == len(train)
    assert torch.equal(epochs[3], train.order(3, generator(3))) and not torch.equal(epochs[3], epochs[4])


def test_the_orders_of_the_page_draw_by_weight_and_batch_by_length():
    """The latter has each sample once, and mixes long and short batches."""
    sequences = TensorDataset(torch.randint(1, 201, (1000,), generator=generator()))
    sequences.lengths, sequences.weights, sequences.batch_size = sequences.tensors[0], sequences.tensors[0].float(), 16
    orders = []
    for block in re.findall(r"^```python\n(def order.*?)^```$", (REPO / "docs" / "data.md").read_text(), re.S | re.M):
        exec(block, names := {"torch": torch})
        orders.append(names["order"])
    by_weight, by_length = orders

    drawn = torch.cat([by_weight(sequences, epoch, generator(epoch)) for epoch in range(300)])
    expected = len(drawn) * sequences.weights / sequences.weights.sum()
    assert ((drawn.bincount(minlength=1000) - expected).abs() < 6 * expected.sqrt() + 1).all()

    order, again, other = (by_length(sequences, 0, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(order, again) and not torch.equal(order, other)
    assert len(order) == len(order.unique()) == 1000 // 16 * 16
    lengths = sequences.lengths[order].view(-1, 16)
    assert lengths.sum() > 0.95 * (lengths.amax(1) * 16).sum()  # 0.53 with a random order
    assert lengths.float().mean(1).diff().gt(0).float().mean() < 0.7


def samples(*datasets) -> list[bytes]:
    """The images of datasets, in order. They were normalised: their grey values are restored."""
    images = [dataset.images.flatten(1) for dataset in datasets]
    grey = torch.cat([(each - each.min()) / (each.max() - each.min()) * 16 for each in images]).round().byte()
    return sorted(image.tobytes() for image in grey.numpy())


def test_crossvalidation_validates_on_each_sample_once_and_else_trains_on_it(crossvalidation: Path):
    """The classes have the same shares in each fold, what normalises comes from the samples that are trained on, and
    the test set is that of the template. Fold -1 trains on all others."""
    build = imported(crossvalidation, "data").build_datasets
    parts = [SimpleNamespace(data_dir="", folds=5, fold=fold) for fold in [*range(5), -1]]
    *sets, last = (build(part, augment=False) for part in parts)
    test = samples(imported(REPO, "data").build_datasets(SimpleNamespace(data_dir=""))["test"])
    validated = samples(*(each["val"] for each in sets))
    assert len(validated) == len(set(validated)) == 1417 and set(test).isdisjoint(validated)
    for each in sets:
        assert samples(each["train"], each["val"]) == validated
        assert abs(len(each["val"]) - 1417 / 5) < 1 and samples(each["test"]) == test
        std, mean = torch.std_mean(each["train"].images)
        assert (mean.item(), std.item()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    counts = torch.stack([each["val"].targets.bincount(minlength=10) for each in sets])
    assert (counts.amax(0) - counts.amin(0) <= 1).all()
    assert samples(last["train"]) == validated and samples(last["test"]) == test


def test_crossvalidation_sweep_takes_the_mean_over_the_folds(tmp_path: Path):
    """Nothing is searched: one point, the defaults."""
    pytest.importorskip("optuna")
    program = with_recipe("crossvalidation", tmp_path / "program")
    (program / "tools").mkdir()
    for name in ("sweep.py", "runs.py", "run_table.py"):  # the latter two are tested with folds in test_runs.py
        shutil.copy(TOOLS / name, program / "tools")
    (cwd := tmp_path / "cwd").mkdir()
    (cwd / "cv.yaml").write_text("folds: 3\nfold: [0, 1, 2]\n")
    options = f"{SMALL} --epochs 1 --logger_name csv"
    printed = run_forked_sweep(f"cv.yaml --jobs 2 -- {options}", cwd, program=program).stdout
    bests = {path.parent.name[16:]: json.loads(path.read_text())["best"] for path in cwd.glob("*/summary.json")}
    assert {*bests} == {f"cv-0-fold={fold}" for fold in (0, 1, 2)}
    assert f"best val/accuracy {mean(bests.values()):.5g} of 1 trials" in printed


def test_on_device_samples_are_moved_once_and_fetched_and_augmented_there(on_device: Path, monkeypatch):
    """The loader is made after the launch, so the device is that of the process. Of the host's samples, build_model
    looks at one, and `order` may need them all: they stay. Indices are copied once a batch, in one tensor."""
    data, loader = imported(on_device, "data"), imported(on_device, "runtime/loader")
    meta = torch.device("meta")  # a device that every machine has; no tensor there has a value
    item, randint, move = torch.Tensor.item, torch.randint, data.ImageDataset.on_device
    moved, copied, drawn = [], [], []
    monkeypatch.setattr(data.ImageDataset, "on_device", lambda self, to: moved.append(to) or move(self, to))
    monkeypatch.setattr(torch, "randint", lambda *args, **to: drawn.append(randint(*args, **to)) or drawn[-1])
    # That with which shifted images are padded is 0 there.
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 0.0 if self.is_meta else item(self))

    fabric = SimpleNamespace(device=meta, world_size=1, global_rank=0)
    fabric.to_device = lambda tensor: copied.append(tensor) or tensor.to(meta)
    dataset = data.build_datasets(TrainConfig())["train"]
    batches = loader.Loader(fabric, dataset, loader.eval_batches(8, 4, fabric), TrainConfig(num_workers=0))
    for _ in range(3):
        found = [(images.shape, images.device, targets.shape, targets.device) for images, targets in batches]
        assert found == [((4, 1, 8, 8), meta, (4,), meta)] * 2
    assert moved == [meta] and [each.device for each in drawn] == 6 * [meta] and not batches.pin_memory
    assert [index.tolist() for index in copied] == 3 * [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dataset[0][0].device == torch.device("cpu")
    on_host = Subset(dataset, range(100))  # has no method for it, and may have workers
    fabric.to_device = lambda batch: batch
    batches = loader.Loader(fabric, on_host, loader.eval_batches(8, 4, fabric), TrainConfig(num_workers=1))
    try:
        assert [len(targets) for _, targets in batches] == [4, 4]
    finally:
        end_workers(set())


def test_on_device_on_a_cpu_the_run_is_that_without_the_patch(balanced: Path, tmp_path: Path):
    """Beside the recipe of an order, too: a class that takes the arguments of ImageDataset needs not a line more. And
    test.py refuses workers."""
    both = with_recipe("balanced", with_recipe("on_device", tmp_path / "both"))
    ours, plain = (run_in(tmp_path / f"of_{path.name}", f"{path}/{LONG} --epochs 4") for path in (both, balanced))
    assert_same_run(ours, plain)
    refuses(f"{both}/test.py --accelerator cpu --num_workers 1", ours, "--num_workers 1")


NO_STREAMS = """
from types import SimpleNamespace

torch.cuda.Stream = torch.cuda.current_stream = lambda device: SimpleNamespace(wait_stream=lambda other: None)
torch.cuda.stream = lambda stream: ExitStack()
"""


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    """The program, which loads ahead on a CPU, too, on streams that wait for nothing. It prints when the order of an
    epoch is asked for, and each step."""
    program = with_recipe("prefetch", tmp_path_factory.mktemp("ahead"))
    insert_before(program, ("runtime/loader.py", "", "def start_worker("), NO_STREAMS)
    replace(program, ("runtime/loader.py", "__iter__", 'self.fabric.device.type == "cuda"'), "True")
    asked = ("runtime/loader.py", "order", "generator = torch.Generator().manual_seed(...)")
    insert_before(program, asked, 'print(f"order of epoch {epoch}", flush=True)')
    return insert_before(program, "optimizer steps", 'print(f"step {step}", flush=True)')


COPIED_AHEAD = """
computing waits for copying, copying waits for computing, copy 0 on copying
computing waits for copying, copying waits for computing, copy 1 on copying, compute 0 on computing
computing waits for copying, copying waits for computing, copy 2 on copying, compute 1 on computing
computing waits for copying, compute 2 on computing
"""


def test_prefetch_each_copy_overlaps_one_computation_and_nothing_else(prefetch: Path, monkeypatch):
    """The loop waits for the copy of its batch, but not for that of the next one. A copy waits for what was computed
    before: the memory that it writes to may be that of an earlier batch."""
    order, current = [], ["computing"]

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: order.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    def copy(batch: int) -> int:
        order.append(f"copy {batch} on {current[-1]}")
        return batch

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    fabric = SimpleNamespace(device=None, to_device=copy)
    for batch in imported(prefetch, "runtime/loader").copied_ahead(fabric, iter(range(3))):
        order.append(f"compute {batch} on {current[-1]}")
    assert order == re.split(", |\n", COPIED_AHEAD.strip())


@pytest.mark.parametrize("options", ["", pytest.param("--num_workers 2", marks=pytest.mark.night)])
def test_prefetch_killed_and_resumed_it_is_the_run_without_it(options: str, ahead: Path, tmp_path: Path):
    """When a micro-batch more had been loaded than was trained on. Nothing is loaded ahead of an epoch: its order may
    depend on the training, so it is asked for when the first batch is."""
    (killed := tmp_path / "killed").mkdir()
    assert interrupt(f"{ahead}/{LONG} {options}", killed, kill_group).returncode == -signal.SIGKILL
    printed = run(f"{ahead}/train.py --resume auto", killed).stdout.splitlines()
    lines = [line for line in printed if line.startswith(("order of", "step "))]
    assert lines.index("order of epoch 9") == lines.index("step 72") + 1
    assert_same_run(killed, run_in(tmp_path / "plain", f"{LONG} {options}"))


def test_hparams_tab_has_the_options_of_the_first_start_beside_the_last_values(hparams: Path, tmp_path: Path):
    """In the one run that TensorBoard sees, also after a resume."""
    call(f"{hparams}/train.py {SMALL} --width 5", tmp_path)
    call(f"{hparams}/train.py --resume auto --epochs 6", tmp_path)
    folder = run_dir(tmp_path)
    assert {path.parent for path in folder.rglob("events.*")} == {folder}
    board = read_tensorboard(folder)
    content = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {*found} == {*yaml.safe_load((folder / "config.yaml").read_text())}
    assert (found["width"].number_value, found["epochs"].number_value) == (5, 5)
    assert board.Scalars("val/loss")[-1].value == pytest.approx(last_summary(tmp_path)["last"]["val/loss"])


def test_profiler_is_not_in_the_speed_and_each_resume_has_a_trace_of_the_steps_it_runs(tmp_path: Path, program: Path):
    slow = "if run.state['step'] == 8:\n    __import__('time').sleep(5)"
    table = ("wall_time.py", "report", "print(profiler.key_averages().table(...))")
    insert_before(with_recipe("profiler", program), table, slow)
    command = f"train.py {SMALL} --profile 3"
    for max_steps in (8, 20, 25, 32):  # of 25, there are only the 5 steps of warm-up
        call(f"{program}/{command} --max_steps {max_steps}", tmp_path)
        command = "train.py --resume auto"
    traces = sorted(run_dir(tmp_path).glob("trace-*.json"))
    assert [path.name for path in traces] == [f"trace-{step:08}.json" for step in (8, 16, 32)]
    names = {event["name"] for event in json.loads(traces[0].read_text())["traceEvents"]}
    steps = {name for name in names if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"}  # counted from 0
    (speed,) = [row["samples_per_second"] for row in rows(tmp_path) if row["step"] == 8]
    assert speed > 4 * 64 / 5


def test_val_sets_second_validation_set_is_logged_monitored_and_evaluated(val_sets: Path, tmp_path: Path):
    """And changes nothing of the training."""
    options = f"{SMALL} --width 16 --limit_val_batches 1.0"
    call(f"{val_sets}/train.py {options} --monitor val/mirrored_accuracy --monitor_mode max", tmp_path)
    found = rows(tmp_path)
    assert last_summary(tmp_path)["best"] == max(row["val/mirrored_accuracy"] for row in found)
    assert found[-1]["val/accuracy"] > found[-1]["val/mirrored_accuracy"] > 0
    tested = results(val_sets, tmp_path, "--checkpoint last --split mirrored")
    assert tested == pytest.approx({name: found[-1][f"val/mirrored_{name}"] for name in ("loss", "accuracy")})
    plain = run_in(tmp_path / "plain", f"train.py {options}")
    assert_same_weights(weights(tmp_path), weights(plain), atol=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Where a small run is that has mistaken many samples of the test set, and has left its first micro-batch."""
    folder = tmp_path_factory.mktemp("trained")
    program = with_recipe("pictures", folder / "program")
    insert_before(program, "functions", "SEEN = []")
    insert_after(program, "batch", "if model.training:\n    SEEN.append(batch)\n    torch.save(SEEN[0], 'batch.pt')")
    command = f"{program}/train.py {SMALL} --micro_batch_size 16"
    return run_in(folder / "cwd", command, f"{program}/test.py --predictions --accelerator cpu")


def test_pictures_first_batch_is_what_the_model_got(trained: Path, pictures: Path):
    """A micro-batch, the first of four, with its classes. Black and white are the least and the greatest value."""
    images, targets = torch.load(trained / "batch.pt")
    (image,) = read_tensorboard(run_dir(trained)).Images("vitals/first_batch")
    page = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    captions = [str(target) for target in targets.tolist()]
    assert image.step == 1 and len(images) == 16
    title = "first training batch, each with its class"
    assert np.array_equal(page, imported(pictures, "pictures").grid(title, images, captions, 8))
    low, high = images.aminmax()
    expected = ((images[1, 0] - low) / (high - low) * 255).round().byte()
    assert np.array_equal(page[60 + 6 : 60 + 104 : 13, 128 + 6 : 128 + 104 : 13, 0], expected)


def test_pictures_show_the_most_confident_mistakes(trained: Path, pictures: Path):
    logits, targets = predictions_of(trained)
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    wrong = [int(sample) for sample in confidence.argsort(descending=True) if predicted[sample] != targets[sample]][:25]
    path = run_dir(trained) / "wrong_test_best.png"
    images = build_datasets(TrainConfig(), augment=False)["test"].images[wrong]
    captions = [f"true {targets[i]}, pred. {predicted[i]}\n{float(confidence[i]):.1%}, no. {i}" for i in wrong]
    expected = imported(pictures, "pictures").grid(f"{path.parent.name}, wrong_test_best", images, captions, 5)
    assert np.array_equal(Image.open(path), expected)
