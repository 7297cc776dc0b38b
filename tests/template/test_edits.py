"""What people edit, and the mistakes they make in it: tried on copies of the programs. A mistake leaves nothing behind,
and Python's own traceback has the line of code and the cause; or one line has, where the program knows better."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from edits import entries_of, insert_after, insert_before, names_in, renamed, replace, with_edits
from helpers import (
    ON_2,
    SMALL,
    assert_same_run,
    call,
    execute,
    folders,
    history,
    newest,
    refused,
    run_dir,
    weights,
    without_locks,
)
from mistakes import refuses

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
data without their directory | alone | 2 | build_datasets: ; /train.pt
  before | digits | open(f"{config.data_dir}/train.pt")
a training set without samples | alone | 2 | --effective_batch_size 64; only 0 training samples
  replace | data.py, build_datasets, ImageDataset(images[train], ...) | []
a validation set without samples | alone | 2 | --monitor val/accuracy: choose from train/loss, train/grad_norm; samples
  replace | data.py, build_datasets, ImageDataset(images[val], ...) | []
a stream, whose samples have no numbers to resume from | alone | 2 | build_datasets: 'train' is an IterableDataset
  replace | data.py, build_datasets, ImageDataset(images[train], ...) | torch.utils.data.ChainDataset([])
a batch that is a frozen dataclass, which mixed precision cannot cast | --precision bf16-mixed | 1 | frozen dataclass
  before | data.py, , class ImageDataset(Dataset): ... |
    Batch = __import__("dataclasses").make_dataclass("Batch", ["images", "targets"], frozen=True)
  replace | data.py, collate_fn, return batch | return Batch(*batch)
  replace | batch | targets = batch.targets
  replace | logits | logits = model(batch)
  replace | forward | return self.layers(images.images)
a build_model that returns nothing | alone, two | 1 | build_model: gives a NoneType, not an nn.Module
  replace | model | Model(
a model in evaluation mode | alone, two, unvalidated | 1 | build_model: ; evaluation mode; model.train()
  before | set up model | model.eval()
values that are no dict | alone, unvalidated | 1 | compute_loss: ; dict; `loss`; not a Tensor
  replace | values | F.cross_entropy(logits, targets)
a value of several numbers | alone, unvalidated | 1 | compute_loss: `each` ; but tensor([[
  replace | values | {"loss": F.cross_entropy(logits, targets), "each": logits[:4]}
a value that is text | alone, unvalidated | 1 | compute_loss: `name` ; but 'text'
  replace | values | {"loss": F.cross_entropy(logits, targets), "name": "text"}
a value of a name that train.py logs | alone, unvalidated | 1 | compute_loss: `grad_norm`
  replace | values | {"loss": F.cross_entropy(logits, targets), "grad_norm": 1.0}
a loss that is not finite | alone, unvalidated | 1 | compute_loss: `loss` is inf in the first step
  replace | values | {"loss": F.cross_entropy(logits, targets) / 0}
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
no validation set | alone | val_set = datasets["val"] | KeyError: 'val'
  replace | data.py, build_datasets, "val": ... |
a dataset without a length | alone | len(each) | TypeError: object of type 'tuple_iterator' has no len()
  replace | data.py, build_datasets, ImageDataset(images[train], ...) | iter(())
out of memory in build_datasets | alone | raise MemoryError | out of memory
  before | digits | raise MemoryError
a missing file of a sample | alone, --num_workers 1, two | open('labels.csv') | FileNotFoundError: [Errno 2]
  before | fetch | open('labels.csv')
out of memory in a sample | alone, --num_workers 1, two | raise MemoryError | out of memory: try a smaller --micro
  before | fetch | raise MemoryError
a last layer of another size | alone, two, unvalidated | return self.layers(images) | RuntimeError: mat1 and mat2 shapes
  replace | last layer | nn.Linear(3 * width, num_classes)
a compute_loss that returns nothing | alone, unvalidated | compute_loss(model, batch, config) | TypeError:
  replace | logits | return None
outputs that no metric takes | alone | metrics.update(*outputs) | TypeError: MulticlassStatScores.update() missing
  replace | outputs | (targets,)
a mistake in a backward pass | alone, unvalidated, --micro_batch_size 16 | fabric.backward( | ZeroDivisionError: in the
  before | functions |
    class FailsBackward(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()
        @staticmethod
        def backward(context, gradient):
            raise ZeroDivisionError("in the backward pass")
  replace | values | {"loss": FailsBackward.apply(F.cross_entropy(logits, targets))}
no loss | alone, unvalidated | fabric.backward( | KeyError: 'loss'
  replace | values | {"nll": F.cross_entropy(logits, targets), "z": 1.0}
a loss without a graph | alone, unvalidated | fabric.backward( | RuntimeError: element 0 of tensors does not require
  replace | values | {"loss": F.cross_entropy(logits, targets).detach()}
"""


@pytest.mark.parametrize("options, place, words, edits", rows(TRACEBACK))
def test_a_mistake_is_told_with_its_place_and_leaves_nothing_behind(
    options: str, place: str, words: str, edits: list, program: Path, cwd: Path
):
    """Whatever its type: an error of the system is one of the data, and no mistake in the options."""
    with_edits(program, edits)
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    assert_traceback(error, program, place, words)
    assert "--resume" not in error


def assert_traceback(error: str, program: Path, place: str, words: str) -> None:
    """It is whole, be it that of a rank, has the line of code, as it stands in the program, and ends with the cause."""
    in_train = renamed(place, names_in("train.py", "train") | names_in("train.py", "compute_loss"))
    first, *frames, last = error.splitlines()
    assert re.fullmatch(r"(rank [01]: )?Traceback \(most recent call last\):", first) and last.startswith(words), error
    assert [line for line in frames if line.startswith(f'  File "{program}/')], error
    assert any(place in line or in_train in line for line in frames), error


def test_a_test_set_that_is_missing_is_told(finished: Path, program: Path, cwd: Path):
    replace(program, ("data.py", "build_datasets", '"test": ...'), "")
    error = call(f"{program}/test.py --out_dir {finished} --accelerator cpu", cwd, code=1).stderr
    assert_traceback(error, program, "[config.split]", "KeyError: 'test'")


@pytest.mark.parametrize("point, code", [("set up model", "model.eval()"), ("backward", "1 / 0")])
def test_a_mistake_changes_nothing_of_a_run_that_is_resumed(point, code, finished, program, cwd):
    """Though it is found in the first step."""
    insert_before(program, point, code)
    shutil.copytree(finished, cwd / finished.name)
    before = without_locks(cwd)
    error = call(f"{program}/train.py --resume auto --epochs 6", cwd, code=1).stderr
    assert error.endswith(("return model.train()\n", "division by zero\n")) and without_locks(cwd) == before


# ---- edits that are right

RIGHT = """
a validation that leaves the model in evaluation mode | alone | in evaluation mode: model, layers, layers.0 and others
  replace | train.py, validate, module.train(is_training) | pass
a validation with gradients, as for an attack | alone | finished after 20 of 20
  replace | train.py, validate, torch.no_grad() | torch.enable_grad()
  after | logits | torch.autograd.grad(logits.sum(), [*model.parameters()], retain_graph=True)
a further model that is frozen, which DDP refuses | two | finished after 20 of 20
  before | set up model |
    frozen = fabric.setup_module(nn.Linear(2, 2).requires_grad_(False))
    assert frozen(torch.ones(1, 2)).dtype == torch.float32
a validation of a model in evaluation mode, as of a teacher | alone, --precision bf16-mixed | finished after 20 of 20
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


def test_an_option_with_an_int_for_a_float_is_resumed_and_where_it_is_deleted_also_evaluated(program: Path, cwd: Path):
    replace(program, "dropout option", "    dropout: float = 0  # Probability of dropping a feature\n")
    call(f"{program}/train.py {SMALL} --epochs 1", cwd)
    assert "finished after 8 of 8" in call(f"{program}/train.py --resume auto --epochs 2", cwd).stdout
    replace(program, "dropout option", "")
    replace(program, "use of dropout", "0.0")
    assert "finished after 12 of 12" in call(f"{program}/train.py --resume auto --epochs 3", cwd).stdout
    assert "on 380 test samples" in call(f"{program}/test.py --accelerator cpu", cwd).stdout


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
    summary = json.loads((run_dir(cwd) / "summary.json").read_text())
    best_step = max((step for step in margins if math.isfinite(margins[step])), key=margins.get)
    assert (summary["best"], summary["best_step"]) == (margins[best_step], best_step)
    call(f"{program}/test.py --accelerator cpu", cwd)
    report = json.loads((run_dir(cwd) / "test_test_best.json").read_text())["results"]
    assert len(report["each"]) == 10 and 0 <= report["accuracy"] <= 1
    assert [len(part) for part in report["curve"]] == [10, 10, 5]


# ---- a state that changes its names or shapes while it trains

FEW = f"train.py {SMALL} --max_steps 8 --checkpoint_interval 2 --logger_name csv"

# What | the last line of the set-up | a line after step 5 | what the save of step 6 names.
CHANGES = """
added | pass | module.head = nn.Linear(2, 1) | : model.head.bias (1,), model.head.weight (1, 2)
grows | module.register_buffer("seen", torch.zeros(0)) | module.seen = torch.arange(step) | seen (0,), model.seen (5,)
pruned | from torch.nn.utils import prune | prune.identity(module.layers[0], "bias") | bias_mask (4,), model
"""


@pytest.mark.parametrize(
    "before, change, named", [pytest.param(*cells, id=name) for name, *cells, _ in entries_of(CHANGES)]
)
def test_a_state_that_changes_its_shape_is_told_by_the_next_save(before, change, named, program, cwd):
    """Which writes nothing: it could never be loaded."""
    insert_after(program, "set-up is done", f"module = model.module\n{before}")
    insert_after(program, "step is done", f"if step == 5:\n    {change}")
    error = call(f"{program}/{FEW}", cwd, code=1).stderr
    assert named in error and "build_model, or not persistent" in error
    assert len(error.splitlines()) == 1 and newest(cwd) == 4


OBSERVED = """
ranges of the images, as in quantization-aware training
  before | layers | self.register_buffer("ranges", __import__("torch").zeros(0))
  before | forward |
    if self.training:
        self.ranges = images.detach().amax((1, 2, 3))[:3]
  before | model.py, Model, def forward( |
    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.ranges = state_dict[f"{prefix}ranges"].clone()
        super()._load_from_state_dict(state_dict, prefix, *arguments)
"""


def test_a_module_that_loads_other_shapes_by_itself_may_change_them(tmp_path: Path, program: Path):
    ((_, edits),) = entries_of(OBSERVED)
    with_edits(program, edits)
    whole, resumed = folders(tmp_path, "whole", "resumed")
    call(f"{program}/{FEW} --lr_schedule constant", whole)
    call(f"{program}/{FEW} --lr_schedule constant --max_steps 4", resumed)
    call(f"{program}/train.py --resume auto --max_steps 8", resumed)
    assert_same_run(resumed, whole)
