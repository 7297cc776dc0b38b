"""What is shown of a run, and measured: hparams, pictures, profiler, val_sets."""

import io
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from edits import with_text
from helpers import (
    LONG,
    ON_2,
    SMALL,
    call,
    imported,
    last_summary,
    read_tensorboard,
    results,
    rows,
    run,
    run_dir,
    weights,
    with_recipe,
)
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from config import TrainConfig
from data import build_datasets
from runtime.evaluation import EvalRun
from runtime.loader import SeededBatches, TrainSampler
from utils import make_plan

pytestmark = pytest.mark.recipes

# ---- hparams


def hparams_tab(folder: Path) -> dict[str, tuple[dict, dict]]:
    """What TensorBoard's own code finds for its HParams tab: by the name of a run its options and its metrics."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    request = api_pb2.ListSessionGroupsRequest(slice_size=10, allowed_statuses=api_pb2.Status.values())
    context = backend_context.Context(TBContext(data_provider=provider))
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    found = {}
    for group in groups:
        options = {name: value.string_value or value.number_value for name, value in group.hparams.items()}
        found[group.name] = options, {each.name.tag: each.value for each in group.metric_values}
    return found


def test_hparams_tab_has_each_run_once_with_its_options_and_last_values(hparams: Path, tmp_path: Path):
    """Also after a resume, which leaves the options of the first start."""
    widths = {"narrow": 2, "wide": 5}
    for name, width in widths.items():
        call(f"{hparams}/train.py {SMALL} --width {width} --out_dir {name}", tmp_path)
    call(f"{hparams}/train.py --resume wide --epochs 6", tmp_path)
    found = hparams_tab(tmp_path)
    assert {*found} == {run_dir(tmp_path, name).name for name in widths}
    for name, width in widths.items():
        folder = run_dir(tmp_path, name)
        options, metrics = found[folder.name]
        assert {*options} == {*yaml.safe_load((folder / "config.yaml").read_text())}
        assert (options["width"], options["epochs"], options["deterministic"]) == (width, 5, "True")
        summary = json.loads((folder / "summary.json").read_text())
        assert metrics["vitals/best"] == pytest.approx(summary["best"])
        for value in ("train/loss", "val/loss", "val/accuracy"):
            assert metrics[value] == pytest.approx(summary["last"][value])


# ---- profiler


def traces(cwd: Path) -> list[str]:
    return sorted(path.name for path in run_dir(cwd).glob("trace-*.json"))


def test_profiler_writes_a_trace_of_the_steps(profiler: Path, tmp_path: Path):
    done = run(f"{profiler}/train.py {SMALL} --profile 3 {ON_2}", tmp_path)
    assert done.stdout.count("Self CPU time total") == 1  # of rank 0 alone
    events = json.loads((run_dir(tmp_path) / "trace-00000008.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"}  # counted from 0


@pytest.mark.parametrize("max_steps, recorded", [(7, 2), (5, 0)])
def test_profiler_has_no_more_steps_than_were_run(max_steps: int, recorded: int, profiler: Path, tmp_path: Path):
    printed = call(f"{profiler}/train.py {SMALL} --profile 3 --max_steps {max_steps}", tmp_path).stdout
    assert (f"trace of {recorded} steps" in printed) == (len(traces(tmp_path)) == 1) == (recorded > 0)


def test_profiler_is_not_in_the_speed_and_a_resume_makes_another_trace(tmp_path: Path, program: Path):
    line = "        print(profiler."
    slow = f"        __import__('time').sleep(5)\n{line}"
    with_text(with_recipe("profiler", program), "wall_time.py", (line, slow))
    call(f"{program}/train.py {SMALL} --profile 3 --max_steps 8", tmp_path)
    last = rows(tmp_path)[-1]
    assert last["step"] == 8 and last["samples_per_second"] > 4 * 64 / 5
    with_text(program, "wall_time.py", (slow, line))
    call(f"{program}/train.py --resume auto --max_steps 20", tmp_path)
    assert traces(tmp_path) == ["trace-00000008.json", "trace-00000016.json"]


# ---- val_sets


def test_val_sets_second_validation_set_is_logged_monitored_and_evaluated(val_sets: Path, tmp_path: Path):
    """And changes nothing of the training."""
    options = f"{SMALL} --width 16 --limit_val_batches 1.0"
    call(f"{val_sets}/train.py {options} --monitor val/mirrored_accuracy --monitor_mode max", tmp_path)
    found = rows(tmp_path)
    assert last_summary(tmp_path)["best"] == max(row["val/mirrored_accuracy"] for row in found)
    assert found[-1]["val/accuracy"] > found[-1]["val/mirrored_accuracy"] > 0
    for split, prefix in (("val", "val/"), ("mirrored", "val/mirrored_")):
        tested = results(val_sets, tmp_path, f"--checkpoint last --split {split}")
        for name in ("loss", "accuracy"):
            assert tested[name] == pytest.approx(found[-1][f"{prefix}{name}"])
    (tmp_path / "plain").mkdir()
    call(f"train.py {options}", tmp_path / "plain")
    torch.testing.assert_close(weights(tmp_path), weights(tmp_path / "plain"), atol=0, rtol=0)


# ---- pictures


@pytest.fixture(scope="module")
def module(pictures: Path) -> ModuleType:
    return imported(pictures, "pictures")


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory) -> Path:
    """Where a small run is that has mistaken many samples of the test set."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{pictures}/train.py {SMALL}", cwd)
    call(f"{pictures}/test.py --out_dir train_out --predictions --accelerator cpu", cwd)
    return cwd


def first_batch(cwd: Path) -> np.ndarray:
    """The one picture in TensorBoard."""
    board = read_tensorboard(run_dir(cwd))
    assert board.Tags()["images"] == ["vitals/first_batch"]
    (image,) = board.Images("vitals/first_batch")
    assert image.step == 1
    return np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))


def cells(page: np.ndarray, columns: int, number: int, lines: int) -> torch.Tensor:
    """The images of a page, as bytes (number, 8, 8), each pixel from the middle of its square of 13 pixels."""
    found = []
    for i in range(number):
        x, y = 12 + i % columns * 116, 44 + i // columns * (116 + 16 * lines) + 16 * lines
        found.append(page[y + 6 : y + 104 : 13, x + 6 : x + 104 : 13, 0])
    return torch.tensor(np.stack(found))


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    low, high = images.aminmax()
    return ((images - low) / (high - low) * 255).round().byte()[:, 0]


def test_pictures_first_batch_is_what_the_model_got(trained: Path, module: ModuleType, tmp_path: Path):
    """64 images as they were augmented, and their classes. The training is that without the recipe."""
    config = TrainConfig(limit_train_batches=4)
    dataset = build_datasets(config)["train"]
    plan = make_plan(config, len(dataset), val_samples=0, world_size=1, saved_size=0)
    key = next(iter(TrainSampler(plan, dataset, rank=0, seed=42)))
    images, targets = SeededBatches(dataset, 42)[key]
    assert not torch.equal(images, dataset.images[torch.tensor(key[1])])  # they are shifted
    page = first_batch(trained)
    assert torch.equal(cells(page, 8, 64, 1), as_bytes(images))
    captions = [str(target) for target in targets.tolist()]
    title = "first training batch, each with its class"
    assert np.array_equal(page, module.grid(title, images, captions, 8))
    captions[63] = str(9 - int(captions[63]))
    assert not np.array_equal(page, module.grid(title, images, captions, 8))
    call(f"train.py {SMALL} --logger_name csv", tmp_path)
    torch.testing.assert_close(weights(trained), weights(tmp_path), atol=0, rtol=0)


def test_pictures_first_batch_has_one_micro_batch(pictures: Path, tmp_path: Path):
    """The first of four, of 16 images."""
    call(f"{pictures}/{LONG} --logger_name tensorboard --max_steps 2", tmp_path)
    assert first_batch(tmp_path).shape[0] == 44 + 2 * 132


def test_pictures_show_the_most_confident_mistakes(trained: Path, module: ModuleType):
    logits, targets = torch.load(run_dir(trained) / "predictions_test_best.pt", weights_only=True)
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    wrong = [int(sample) for sample in confidence.argsort(descending=True) if predicted[sample] != targets[sample]][:25]
    path = run_dir(trained) / "wrong_test_best.png"
    images = build_datasets(TrainConfig(), augment=False)["test"].images[wrong]
    page = np.asarray(Image.open(path))
    assert torch.equal(cells(page, 5, 25, 2), as_bytes(images))
    captions = [f"true {targets[i]}, pred. {predicted[i]}\n{float(confidence[i]):.1%}, no. {i}" for i in wrong]
    assert np.array_equal(page, module.grid(f"{path.parent.name}, wrong_test_best", images, captions, 5))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 300, 200), (1, 1, 50)])
def test_pictures_of_any_shape(shape: tuple[int, int, int], module: ModuleType):
    """The longer side gets 104 pixels; nothing is outside of the page; images of one value are black; of two channels
    the first is shown."""
    page = np.asarray(module.grid("title", torch.ones(3, *shape), ["a", "b", "c"], 2))
    height, width = (max(1, round(side * 104 / max(shape[1:]))) for side in shape[1:])
    assert page.shape == (44 + 2 * (12 + 16 + height), 12 + 2 * 116, 3)
    assert (page[60 : 60 + height, 128 : 128 + width] == 0).all() and (page[-12:] == 255).all()
    colours = torch.tensor([1.0, 0.0, 0.5]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert np.asarray(module.grid("title", colours, ["a"], 1))[100, 50].tolist() == [255, 0, 128]
    images = torch.rand(3, 2, 8, 8)
    pages = [np.asarray(module.grid("", part, ["a", "b", "c"], columns=3)) for part in (images, images[:, :1])]
    assert np.array_equal(*pages)


NO_PICTURE = {
    "a target below 0 is none": [torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([1, -100])],
    "a class of each pixel": [torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4).long()],
}


@pytest.mark.parametrize("case", NO_PICTURE)
def test_pictures_there_are_none_without_a_mistake_or_classes(case: str, module: ModuleType, tmp_path: Path, capsys):
    torch.save(NO_PICTURE[case], tmp_path / "predictions_test_best.pt")
    config = SimpleNamespace(out_dir=tmp_path, split="test", predictions=True)
    fabric = SimpleNamespace(is_global_zero=True)
    dataset = build_datasets(TrainConfig())["test"]
    module.write_wrong(EvalRun(fabric, config, TrainConfig(), Path("best.ckpt"), {}, dataset))
    assert capsys.readouterr().out.startswith("no wrong_test_best.png: ")
    assert [path.name for path in tmp_path.iterdir()] == ["predictions_test_best.pt"]
