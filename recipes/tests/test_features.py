"""What one of recipes/features alone can do wrong: which samples come when, and from where (balanced, crossvalidation,
on_device, prefetch, and the orders of docs/data.md), and what is shown of a run (hparams, pictures, profiler,
val_sets). On_device and prefetch run on the CPU here; test_gpu.py has what needs a GPU."""

import io
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from commands import LONG, REPO, SMALL, call, run, run_in
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


def test_on_device_samples_are_fetched_and_augmented_there(on_device: Path, monkeypatch):
    """Indices are copied once a batch, in one tensor. Of the host's samples, build_model looks at one, and `order` may
    need them all: they stay. A Subset has no method for it."""
    data, loader = imported(on_device, "data"), imported(on_device, "runtime/loader")
    meta = torch.device("meta")  # a device that every machine has; no tensor there has a value
    item, randint, config = torch.Tensor.item, torch.randint, TrainConfig(num_workers=0)
    copied, drawn = [], []
    monkeypatch.setattr(torch, "randint", lambda *args, **to: drawn.append(randint(*args, **to)) or drawn[-1])
    # That with which shifted images are padded is 0 there.
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 0.0 if self.is_meta else item(self))
    fabric = SimpleNamespace(device=meta, world_size=1, global_rank=0)
    fabric.to_device = lambda tensor: copied.append(tensor.tolist()) or tensor.to(meta)
    dataset = data.build_datasets(TrainConfig())["train"]
    batches = loader.Loader(fabric, dataset, loader.eval_batches(8, 4, fabric), config)
    for _ in range(2):
        found = [(images.shape, images.device, targets.shape, targets.device) for images, targets in batches]
        assert found == [((4, 1, 8, 8), meta, (4,), meta)] * 2
    assert copied == 2 * [[0, 1, 2, 3], [4, 5, 6, 7]] and [each.device for each in drawn] == 4 * [meta]
    assert not batches.pin_memory
    assert dataset[0][0].device == torch.device("cpu")
    fabric.to_device = lambda batch: batch
    batches = loader.Loader(fabric, Subset(dataset, range(100)), loader.eval_batches(8, 4, fabric), config)
    assert [targets.device for _, targets in batches] == 2 * [torch.device("cpu")]


def test_on_device_on_a_cpu_the_run_is_that_without_the_patch(balanced: Path, tmp_path: Path):
    """Beside the recipe of an order, too: a class that takes the arguments of ImageDataset needs not a line more. And
    test.py refuses workers."""
    both = with_recipe("balanced", with_recipe("on_device", tmp_path / "both"))
    ours, plain = (run_in(tmp_path / f"of_{path.name}", f"{path}/{LONG} --epochs 4") for path in (both, balanced))
    assert_same_run(ours, plain)
    refuses(f"{both}/test.py --accelerator cpu --num_workers 1", ours, "--num_workers 1")


STREAMS = """
from contextlib import contextmanager
from types import SimpleNamespace


def stream(name):
    return SimpleNamespace(name=name, wait_stream=lambda other: print(f"{name} waits for {other.name}", flush=True))


@contextmanager
def copied_on(stream):
    yield
    print(f"copied on {stream.name}", flush=True)


torch.cuda.Stream, torch.cuda.current_stream = lambda device: stream("copying"), lambda device: stream("computing")
torch.cuda.stream = copied_on
"""


def test_prefetch_killed_and_resumed_it_is_the_run_without_it(program: Path, tmp_path: Path):
    """When a micro-batch more had been loaded than was trained on; here on a CPU, on streams that only say what they
    do. Each copy overlaps one computation: the loop waits for the copy of its batch, and not for that of the next one.
    A copy waits for what was computed before: the memory that it writes to may be that of an earlier batch. Nothing is
    loaded ahead of an epoch: its order may depend on the training, and is asked for with the first batch."""
    insert_before(with_recipe("prefetch", program), ("runtime/loader.py", "", "def start_worker("), STREAMS)
    replace(program, ("runtime/loader.py", "__iter__", 'self.fabric.device.type == "cuda"'), "True")
    asked = ("runtime/loader.py", "order", "generator = torch.Generator().manual_seed(...)")
    insert_before(program, asked, 'print(f"order of epoch {epoch}", flush=True)')
    insert_after(program, "micro-batch is done", 'print("computed", flush=True)')
    (killed := tmp_path / "killed").mkdir()
    assert interrupt(f"{program}/{LONG}", killed, kill_group).returncode == -signal.SIGKILL
    printed = run(f"{program}/train.py --resume auto", killed).stdout
    assert_same_run(killed, run_in(tmp_path / "plain", LONG))
    lines = re.findall(r"^(?:order|copied|computed|\w+ waits).*", printed.partition("order of epoch 9\n")[2], re.M)
    copy = ["computing waits for copying", "copying waits for computing", "copied on copying"]
    epoch = [*copy, *(31 * [*copy, "computed"]), copy[0], "computed"]  # before its validation
    assert lines[: len(epoch)] == epoch


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


def test_pictures_show_the_first_batch_and_the_most_confident_mistakes(program: Path, cwd: Path):
    """A micro-batch, the first of four, as the model got it, with its classes. Black and white are the least and the
    greatest value. Of the many mistakes of a small run, 25, each with its sample."""
    insert_before(with_recipe("pictures", program), "functions", "SEEN = []")
    insert_after(program, "batch", "if model.training:\n    SEEN.append(batch)\n    torch.save(SEEN[0], 'batch.pt')")
    call(f"{program}/train.py {SMALL} --micro_batch_size 16", cwd)
    call(f"{program}/test.py --predictions --accelerator cpu", cwd)
    grid = imported(program, "pictures").grid

    images, targets = torch.load(cwd / "batch.pt")
    (image,) = read_tensorboard(run_dir(cwd)).Images("vitals/first_batch")
    page = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    captions = [str(target) for target in targets.tolist()]
    assert image.step == 1 and len(images) == 16
    assert np.array_equal(page, grid("first training batch, each with its class", images, captions, 8))
    low, high = images.aminmax()
    expected = ((images[1, 0] - low) / (high - low) * 255).round().byte()
    assert np.array_equal(page[60 + 6 : 60 + 104 : 13, 128 + 6 : 128 + 104 : 13, 0], expected)

    logits, targets = predictions_of(cwd)
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    wrong = [int(i) for i in confidence.argsort(descending=True) if predicted[i] != targets[i]][:25]
    images = build_datasets(TrainConfig(), augment=False)["test"].images[wrong]
    captions = [f"true {targets[i]}, pred. {predicted[i]}\n{float(confidence[i]):.1%}, no. {i}" for i in wrong]
    expected = grid(f"{run_dir(cwd).name}, wrong_test_best", images, captions, 5)
    assert np.array_equal(Image.open(run_dir(cwd) / "wrong_test_best.png"), expected)
