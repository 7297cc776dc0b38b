"""What people edit, and the mistakes they make in it: tried on copies of the programs. A mistake leaves nothing behind,
and Python's own traceback has the line of code and the cause; or one line has, where the program knows better."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import ON_2, SMALL, call, execute
from comparisons import ended_and_resumed
from edits import entries_of, insert_after, insert_before, replace, with_edits
from mistakes import refuses
from outputs import history, last_summary, newest, results, weights, without_locks

NO_VALIDATION = "--limit_val_batches 0 --monitor train/loss --monitor_mode min"
OPTIONS = {"alone": "", "two": ON_2, "unvalidated": NO_VALIDATION, "two unvalidated": f"{ON_2} {NO_VALIDATION}"}


def rows(table: str) -> list:
    """The entries of a table whose second cell has options, or words for them: one for each."""
    return [
        pytest.param(OPTIONS.get(each, each), *cells, id=f"{name}, {each}")
        for name, options, *cells in entries_of(table)
        for each in options.split(", ")
    ]


# ---- mistakes that are told in one line

# What | with which options | the exit code | the words of the line.
REFUSED = """
a validation set of fewer samples than processes | two | 2 | --devices; 1 samples are too few
  replace | length | return 1 if len(self.targets) == 200 else len(self.targets)
a validation set without samples | alone | 2 | --monitor val/accuracy: choose from train/loss, train/grad_norm; samples
  replace | data.py, build_datasets, ImageDataset(images[val], ...) | []
a stream, whose samples have no numbers to resume from | alone | 2 | build_datasets: 'train' is an IterableDataset
  replace | data.py, build_datasets, ImageDataset(images[train], ...) | torch.utils.data.ChainDataset([])
a batch that is a frozen dataclass, which mixed precision cannot cast | --precision bf16-mixed | 1 | frozen dataclass
  before | functions | Batch = __import__("dataclasses").make_dataclass("Batch", ["images"], frozen=True)
  replace | logits | logits = model(Batch(images))
  replace | forward | return self.layers(images.images)
a build_model that returns nothing | alone, two | 1 | build_model: gives a NoneType, not an nn.Module
  replace | model | Model(
a model in evaluation mode | alone, two, unvalidated | 1 | build_model: ; evaluation mode; model.train()
  before | set up model | model.eval()
values that are no dict | alone, unvalidated | 1 | compute_loss: ; dict; `loss`; not a Tensor
  replace | values | F.cross_entropy(logits, targets)
a value of several numbers | alone, unvalidated | 1 | compute_loss: `each` ; but tensor([[
  replace | values | {"loss": F.cross_entropy(logits, targets), "each": logits[:4]}
a value of a name that train.py logs | alone, unvalidated | 1 | compute_loss: `grad_norm`
  replace | values | {"loss": F.cross_entropy(logits, targets), "grad_norm": 1.0}
a loss that is not finite on one rank | two unvalidated | 1 | compute_loss: `loss` is inf in the first step
  replace | values | {"loss": F.cross_entropy(logits, targets) / (__import__("os").environ.get("LOCAL_RANK") != "1")}
a metric of the name of a value, which would be the monitor | alone, two | 1 | compute_loss and build_metrics; 'loss'
  replace | metrics | {"accuracy": accuracy, "loss": MulticlassAccuracy(10)}
"""


@pytest.mark.parametrize("options, code, words, edits", rows(REFUSED))
def test_a_mistake_is_told_in_one_line_and_leaves_nothing_behind(
    options: str, code: str, words: str, edits: list, program: Path, cwd: Path
):
    """The first validation, or else the first step, finds it before the run directory is made."""
    with_edits(program, edits)
    refuses(f"{program}/train.py {SMALL} {options}", cwd, *words.split("; "), how=execute, code=int(code))
    assert list(cwd.iterdir()) == []


# ---- mistakes that Python tells

# What | with which options | the line of code | the last line.
TRACEBACK = """
images of another shape | alone | ImageDataset( | ValueError: images: expected (samples, channels, height, width), not
  replace | training images | ImageDataset(images[train][:, 0]
a missing file of a sample | alone, --num_workers 1, two | open('labels.csv') | FileNotFoundError: [Errno 2]
  before | fetch | open('labels.csv')
out of memory in a sample | alone, --num_workers 1, two | raise MemoryError | out of memory: try a smaller --micro
  before | fetch | raise MemoryError
a last layer of another size | alone, two, unvalidated | return self.layers( | RuntimeError: mat1 and mat2 shapes
  replace | last layer | nn.Linear(3 * width, num_classes)
a mistake in a backward pass | alone, unvalidated, --micro_batch_size 16 | fabric.backward( | ZeroDivisionError:
  after | logits |
    if model.training:
        logits.register_hook(lambda gradient: 1 / 0)
"""


@pytest.mark.parametrize("options, place, words, edits", rows(TRACEBACK))
def test_a_mistake_is_told_with_its_place_and_leaves_nothing_behind(
    options: str, place: str, words: str, edits: list, program: Path, cwd: Path
):
    """Whatever its type: an error of the system is one of the data, and no mistake in the options. The traceback is
    whole, be it that of a rank, has the line of code, as it stands in the program, and ends with the cause."""
    with_edits(program, edits)
    error = execute(f"{program}/train.py {SMALL} {options}", cwd, code=1).stderr
    assert list(cwd.iterdir()) == []
    first, *frames, last = error.splitlines()
    assert re.fullmatch(r"(rank [01]: )?Traceback \(most recent call last\):", first) and last.startswith(words), error
    assert [line for line in frames if line.startswith(f'  File "{program}/')], error
    assert any(place in line for line in frames) and "--resume" not in error, error


def test_a_mistake_changes_nothing_of_a_run_that_is_resumed(finished: Path, program: Path, cwd: Path):
    """Though it is found in the first step."""
    insert_before(program, "backward", "1 / 0")
    shutil.copytree(finished, cwd / finished.name)
    before = without_locks(cwd)
    error = call(f"{program}/train.py --resume auto --epochs 6", cwd, code=1).stderr
    assert error.endswith("division by zero\n") and without_locks(cwd) == before


# ---- edits that are right

RIGHT = """
a validation that leaves the model in evaluation mode | alone | in evaluation mode: model, layers, layers.0 and others
  replace | train.py, validate, module.train(is_training) | pass
a further model that is frozen, which DDP refuses | two | finished after 20 of 20
  before | set up model |
    frozen = fabric.setup_module(nn.Linear(2, 2).requires_grad_(False))
    assert frozen(torch.ones(1, 2)).dtype == torch.float32
a validation of a model in evaluation mode, as of a teacher | alone | finished after 20 of 20
  before | loop begins |
    model.eval()
    validate(fabric, config, model, val_loader, metrics)
    assert not model.training and not model.module.training
"""


@pytest.mark.parametrize("options, words, edits", rows(RIGHT))
def test_an_edit_trains(options: str, words: str, edits: list, program: Path, cwd: Path):
    with_edits(program, edits)
    assert words in execute(f"{program}/train.py {SMALL} {options}", cwd).stdout


def test_a_dataset_that_draws_random_numbers_leaves_the_weights_to_the_seed(finished: Path, program: Path, cwd: Path):
    """Also one that does so only when it downloads."""
    insert_before(program, "split", "torch.rand(7)")
    call(f"{program}/train.py {SMALL}", cwd)
    torch.testing.assert_close(weights(cwd), torch.load(finished / "model.pt"), atol=0, rtol=0)


def test_a_second_loss_is_logged_and_monitored_and_a_metric_of_several_values_is_in_the_report(program, cwd):
    """A value that is not finite is never the best, though the best of the checkpoints has to begin somewhere. A metric
    of several values is a tensor of them, or a tuple of tensors, and not in the table."""
    loss = "F.cross_entropy(logits, targets)"  # the margin is not a number before it is below 2.1
    replace(program, "values", f'{{"loss": {loss}, "margin": (2.1 - {loss}).sqrt()}}')
    each = "MulticlassAccuracy(dataset.num_classes, average=None, validate_args=False)"
    curve = '__import__("torchmetrics").classification.MulticlassROC(dataset.num_classes, thresholds=5)'
    replace(program, "metrics", f'{{"accuracy": accuracy, "each": {each}, "curve": {curve}}}')
    options = "--limit_train_batches 8 --width 16 --monitor val/margin --monitor_mode max"
    done = call(f"{program}/train.py {SMALL} {options}", cwd)
    assert all(name in done.stdout for name in ("train/margin", "val/margin", "val/accuracy"))
    assert "each" not in done.stdout and "curve" not in done.stdout
    rows = history(cwd)
    margins = {int(row["step"]): float(row["val/margin"]) for row in rows}
    assert math.isnan(margins[8]) and math.isfinite(margins[40]) and float(rows[-1]["train/margin"])
    summary = last_summary(cwd)
    best_step = max((step for step in margins if math.isfinite(margins[step])), key=margins.get)
    assert (summary["best"], summary["best_step"]) == (margins[best_step], best_step)
    report = results(program, cwd, "")
    assert len(report["each"]) == 10 and 0 <= report["accuracy"] <= 1
    assert [len(part) for part in report["curve"]] == [10, 10, 5]


# ---- a state that changes its names or shapes while it trains


def test_a_state_that_changes_its_shape_is_told_by_the_next_save(program: Path, cwd: Path):
    """By its name before and after. The save writes nothing: it could never be loaded."""
    insert_after(program, "set-up is done", 'model.module.register_buffer("seen", torch.zeros(0))')
    insert_after(program, "step is done", "if step == 5:\n    model.module.seen = torch.arange(step)")
    error = call(f"{program}/train.py {SMALL} --checkpoint_interval 2", cwd, code=1).stderr
    assert "seen (0,), model.seen (5,)" in error and "build_model, or not persistent" in error
    assert len(error.splitlines()) == 1 and newest(cwd) == 4


OBSERVED = {  # ranges of the images, as in quantization-aware training
    "before layers": 'self.register_buffer("ranges", __import__("torch").zeros(0))',
    "before forward": "if self.training:\n    self.ranges = images.detach().amax((1, 2, 3))[:3]",
    "before model.py, Model, def forward(": """
        def _load_from_state_dict(self, state_dict, prefix, *arguments):
            self.ranges = state_dict[f"{prefix}ranges"].clone()
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    """,
}


def test_a_module_that_loads_other_shapes_by_itself_may_change_them(tmp_path: Path, program: Path):
    ended_and_resumed(f"{with_edits(program, OBSERVED)}/train.py {SMALL} --lr_schedule constant", tmp_path)
