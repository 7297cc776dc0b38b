"""What people edit, and the mistakes they make in it: tried on copies of the programs. A mistake leaves nothing behind,
and Python's own traceback has the line of code and the cause; or one line has, where the program knows better."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from edits import POINTS, insert_before, names_in, renamed, replace, with_text
from helpers import (
    ON_2,
    SMALL,
    assert_told_by_ranks,
    call,
    history,
    refused,
    run,
    run_dir,
    weights,
    without_locks,
)

# ---- data


def test_a_validation_set_of_fewer_samples_than_processes_is_refused(program: Path, cwd: Path):
    replace(program, "length", "return 1 if len(self.targets) == 200 else len(self.targets)")
    error = refused(f"{program}/train.py {SMALL} {ON_2}", cwd, code=2)
    assert "1 samples are too few" in error.splitlines()[-1] and "Traceback" not in error


def test_a_dataset_that_draws_random_numbers_leaves_the_weights_to_the_seed(program: Path, cwd: Path):
    """Also one that does so only when it downloads."""
    insert_before(program, "split", "torch.rand(7)")
    call(f"train.py {SMALL} --epochs 1 --out_dir same", cwd)
    call(f"{program}/train.py {SMALL} --epochs 1 --out_dir drawn", cwd)
    torch.testing.assert_close(weights(cwd, "drawn"), weights(cwd, "same"), atol=0, rtol=0)


def test_a_dataset_of_files_without_a_data_dir_is_told_in_one_line(program: Path, cwd: Path):
    insert_before(program, "digits", 'open(f"{config.data_dir}/train.pt")')
    error = call(f"{program}/train.py {SMALL}", cwd, code=2).stderr
    assert error.startswith("train.py: error: build_datasets: ") and error.endswith("train.pt'\n")
    assert error.count("\n") == 1


def test_an_option_that_was_deleted_does_not_make_old_runs_unreadable(program: Path, cwd: Path):
    call(f"train.py {SMALL} --epochs 1", cwd)
    replace(program, "dropout option", "")
    replace(program, "use of dropout", "0.25")
    done = call(f"{program}/train.py --resume auto --epochs 2", cwd)
    assert "finished after 8 of 8" in done.stdout
    assert "on 380 test samples" in call(f"{program}/test.py --accelerator cpu", cwd).stdout


def test_an_int_as_the_default_of_a_float_option_is_no_change_on_a_resume(program: Path, cwd: Path):
    replace(program, "dropout option", "    dropout: float = 0  # Probability of dropping a feature\n")
    call(f"{program}/train.py {SMALL} --epochs 1", cwd)
    assert "finished after 8 of 8" in call(f"{program}/train.py --resume auto --epochs 2", cwd).stdout


# ---- mistakes


@pytest.mark.parametrize("images", ["images[train][:, 0]", "images[train].byte()[:, 0]"])
def test_images_of_another_shape_are_told_what_is_expected(images: str, program: Path, cwd: Path):
    replace(program, "training images", f"ImageDataset({images}")
    line = call(f"{program}/train.py {SMALL}", cwd, code=1).stderr.splitlines()[-1]
    assert "ValueError: images: expected (samples, channels, height, width), not (1217, 8, 8)" in line


SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied ("
CALL = "compute_loss(model, batch, config)"  # in train.py
OF_TENSOR = ("TypeError: iteration over a 0-d tensor", "IndexError: invalid index of a 0-dim tensor")


def assert_traceback(error: str, program: Path, place: str, words: str | tuple) -> None:
    """It is whole, has the line of code, as it stands in the program, and ends with the cause, or one of them."""
    in_train = renamed(place, names_in("train.py", "train") | names_in("train.py", "compute_loss"))
    first, *frames, last = error.splitlines()
    assert first == "Traceback (most recent call last):" and last.startswith(words), error
    assert [line for line in frames if line.startswith(f'  File "{program}/')], error
    assert any(place in line or in_train in line for line in frames), error


@pytest.mark.parametrize("options", ["", "--limit_val_batches 0 --monitor train/loss --monitor_mode min"])
@pytest.mark.parametrize(
    "point, text, place, words",
    [
        ("last layer", "nn.Linear(3 * width, num_classes)", "return self.layers(images)", SHAPES),
        ("num_classes", "self.classes = num_classes", "return Model(", "AttributeError: "),
        ("target tensor", "5 + torch.tensor(targets,", "F.cross_entropy(logits, targets)", "IndexError: Target "),
        ("target tensor", "0.5 * torch.tensor(targets,", "F.cross_entropy(logits, targets)", "RuntimeError: expected "),
        ("logits", "return F.cross_entropy(model(images), targets)", CALL, OF_TENSOR),
        ("logits", "return None", CALL, "TypeError: "),
        ("logits", "return model(images, 1)", CALL, "TypeError: Model.forward() takes 2 positional arguments"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_leaves_nothing_behind(
    point: str, text: str, place: str, words: str | tuple, options: str, program: Path, cwd: Path
):
    """The first validation, or else the first step, finds it before the run directory is made: there is no run to be
    resumed."""
    replace(program, point, text)
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    assert_traceback(error, program, place, words)
    assert "--resume" not in error


def test_a_mistake_is_told_by_the_rank_that_finds_it(program: Path, cwd: Path):
    replace(program, "last layer", "nn.Linear(3 * width, num_classes)")
    error = refused(f"{program}/train.py {SMALL} {ON_2}", cwd)
    first, *_, last = error.splitlines()
    assert re.fullmatch(r"rank [01]: Traceback \(most recent call last\):", first) and last.startswith(SHAPES)
    assert "return self.layers(images)" in error


# Stands before `build_datasets`, which it replaces: CHANGE is made to the datasets.
OTHER_DATA = """
def build_datasets(*args, **options):
    found = datasets_of(*args, **options)
    CHANGE
    return found


class WithoutLength(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset
        self.num_classes = dataset.num_classes

    def __getitem__(self, index):
        return self.dataset[index]


def datasets_of("""


def with_datasets(program: Path, change: str) -> None:
    replace(program, "build_datasets", OTHER_DATA.replace("CHANGE", change))


@pytest.mark.parametrize(
    "change, place, words",
    [
        ("del found['val']", 'val_set = datasets["val"]', "KeyError: 'val'"),
        ("del found['train']", 'train_set = datasets["train"]', "KeyError: 'train'"),
        ("found = None", "result.items()", "AttributeError: 'NoneType' object has no attribute 'items'"),
        (
            "found['train'] = WithoutLength(found['train'])",
            "len(each)",
            "TypeError: object of type 'WithoutLength' has no len()",
        ),
    ],
)
def test_datasets_that_are_missing_or_empty_are_told(change: str, place: str, words: str, program: Path, cwd: Path):
    with_datasets(program, change)
    error = refused(f"{program}/train.py {SMALL}", cwd)
    assert_traceback(error, program, place, words)


NO_SAMPLES = "--effective_batch_size 64: there are only 0 training samples"
NO_VALUE = "--monitor val/accuracy: choose from train/loss, train/grad_norm; val/ needs validation samples"


@pytest.mark.parametrize(
    "change, words",
    [
        ("found['train'] = []", NO_SAMPLES),
        ("found['val'] = []", NO_VALUE),
    ],
)
def test_a_set_without_samples_is_told_in_one_line(change: str, words: str, program: Path, cwd: Path):
    with_datasets(program, change)
    assert refused(f"{program}/train.py {SMALL}", cwd, code=2) == f"train.py: error: {words}\n"


@pytest.mark.parametrize("options", ["", ON_2, "--compile"])
def test_a_build_model_that_returns_nothing_is_told_in_one_line(options: str, program: Path, cwd: Path):
    replace(program, "model", "    Model(")
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    kind = "function" if options == "--compile" else "NoneType"
    words = f"build_model: gives a {kind}, not an nn.Module; does it return the model?"
    if options == ON_2:
        assert_told_by_ranks(error, words)
    else:
        assert error == f"train.py: error: {words}\n"


FROZEN_BATCH = """
@dataclass(frozen=True)
class Batch:
    images: Tensor
    targets: Tensor


class ImageDataset("""


def test_a_batch_that_is_a_frozen_dataclass_is_told_in_one_line(program: Path, cwd: Path):
    """In mixed precision, where its tensors are cast; on a GPU they are moved, too."""
    imported = ("import numpy as np\n", "from dataclasses import dataclass\n\nimport numpy as np\n")
    made = ("return batch  # __getitems__ returns a whole batch", "return Batch(*batch)")
    with_text(program, "data.py", imported, made, ("class ImageDataset(", FROZEN_BATCH.strip()))
    replace(program, "batch", "    targets = batch.targets\n")
    replace(program, "logits", "logits = model(batch)")
    replace(program, "forward", "        return self.layers(images.images)\n")
    error = refused(f"{program}/train.py {SMALL} --precision bf16-mixed", cwd)
    assert error.startswith("train.py: error: a batch is a frozen dataclass, ") and error.count("\n") == 1
    call(f"{program}/train.py {SMALL}", cwd)


def test_a_validation_that_leaves_the_model_in_evaluation_mode_is_told(program: Path, cwd: Path):
    with_text(program, "train.py", ("        module.train(is_training)\n", "        pass\n"))
    assert (
        "\nin evaluation mode: model, layers, layers.0 and others\n" in call(f"{program}/train.py {SMALL}", cwd).stdout
    )


def test_a_validation_with_gradients_is_the_same(program: Path, cwd: Path):
    """As for an attack, or the derivatives of a physical law."""
    with_text(program, "train.py", ("@torch.no_grad()\ndef validate", "def validate"))
    replace(
        program,
        "logits",
        f"{POINTS['logits'][2]}\n    torch.autograd.grad(logits.sum(), [*model.parameters()], retain_graph=True)",
    )
    call(f"{program}/train.py {SMALL}", cwd)


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def build_datasets("""


@pytest.mark.parametrize("made", ["Stream()", "torch.utils.data.ChainDataset([])"])
def test_a_stream_is_refused_in_one_line(made: str, program: Path, cwd: Path):
    """It has no numbers to resume from."""
    with_datasets(program, f"found['train'] = {made}")
    with_text(program, "data.py", ("def build_datasets(", STREAM.strip()))
    error = refused(f"{program}/train.py {SMALL}", cwd, code=2)
    assert error.startswith("train.py: error: build_datasets: 'train' is an IterableDataset") and error.count("\n") == 1


def test_a_test_set_that_is_missing_is_told(finished: Path, program: Path, cwd: Path):
    with_datasets(program, "del found['test']")
    error = call(f"{program}/test.py --out_dir {finished} --accelerator cpu", cwd, code=1).stderr
    assert_traceback(error, program, "[config.split]", "KeyError: 'test'")


def test_outputs_that_do_not_fit_the_metrics_are_told(program: Path, cwd: Path):
    replace(program, "outputs", "(targets,)\n")
    error = refused(f"{program}/train.py {SMALL}", cwd)
    assert_traceback(error, program, "metrics.update(*outputs)", "TypeError: ")
    assert "update() missing 1 required positional argument: 'target'" in error


@pytest.mark.parametrize("options", ["", "--num_workers 1", ON_2])
@pytest.mark.parametrize(
    "code, words",
    [
        ("open('labels.csv')", "FileNotFoundError: [Errno 2] No such file or directory: 'labels.csv'"),
        ("open('/')", "IsADirectoryError: [Errno 21] Is a directory: '/'"),
        ("raise MemoryError", "MemoryError"),
    ],
)
def test_an_error_of_a_dataset_is_told_with_its_place(code: str, words: str, options: str, program: Path, cwd: Path):
    """Whatever its type: an error of the system is one of the data here, and no mistake in the options."""
    insert_before(program, "fetch", code)
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    assert f'  File "{program}/data.py"' in error and f"\n    {code}\n" in error
    assert f"\n{words}" in error
    assert error.splitlines()[-1].startswith("out of memory: try a smaller --micro") == (code == "raise MemoryError")


def test_an_error_of_build_datasets_is_told_with_its_place_but_for_what_the_options_name(program: Path, cwd: Path):
    """A MemoryError is none of a missing file, nor is a mistake in the code."""
    for code, words in (("raise MemoryError", "MemoryError"), ("1 / 0", "ZeroDivisionError: division by zero")):
        copy = insert_before(program.with_name(words[:6]), "digits", code)
        error = call(f"{copy}/train.py {SMALL}", cwd, code=1).stderr
        assert f'  File "{copy}/data.py"' in error and f"\n    {code}\n" in error and f"\n{words}" in error
        assert list(cwd.iterdir()) == []


FROZEN = """
frozen = fabric.setup_module(nn.Linear(2, 2).requires_grad_(False))
assert frozen(torch.ones(1, 2)).dtype == torch.float32
"""


def test_a_frozen_model_is_set_up_on_two_processes_as_on_one(program: Path, cwd: Path):
    """DDP refuses a model in which nothing is trained."""
    insert_before(program, "set up model", FROZEN)
    run(f"{program}/train.py {SMALL} {ON_2} --epochs 1", cwd)


FAILS_BACKWARD = """
class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        raise ZeroDivisionError("in the backward pass")


"""


@pytest.fixture
def fails_backward(program: Path) -> Path:
    """A program whose loss has a mistake that shows in the backward pass."""
    insert_before(program, "functions", FAILS_BACKWARD)
    return replace(program, "values", '{"loss": FailsBackward.apply(F.cross_entropy(logits, targets))}')


NO_VALIDATION = "--limit_val_batches 0 --monitor train/loss --monitor_mode min"


@pytest.mark.parametrize("options", ["", NO_VALIDATION, "--micro_batch_size 16"])
def test_a_backward_pass_mistake_leaves_nothing_behind(options: str, fails_backward: Path, cwd: Path):
    """The first step makes the run directory after its backward passes."""
    error = refused(f"{fails_backward}/train.py {SMALL} {options}", cwd)
    assert_traceback(error, fails_backward, POINTS["backward"][2], "ZeroDivisionError: in the backward pass")
    assert 'raise ZeroDivisionError("in the backward pass")' in error


def test_a_backward_pass_mistake_changes_nothing_of_a_run_that_is_resumed(fails_backward: Path, cwd: Path):
    call(f"train.py {SMALL} --epochs 1", cwd)
    before = without_locks(cwd)
    error = call(f"{fails_backward}/train.py --resume auto --epochs 2", cwd, code=1).stderr
    assert "ZeroDivisionError: in the backward pass" in error.splitlines()[-1]
    assert without_locks(cwd) == before


LOSS = "F.cross_entropy(logits, targets)"
NO_GRADIENT = "RuntimeError: element 0 of tensors does not require grad"


@pytest.mark.parametrize("options", ["--devices 1", "--devices 2", "--devices 2 --micro_batch_size 16"])
def test_a_wholly_frozen_model_is_told_by_torch_or_fabric(options: str, program: Path, cwd: Path):
    insert_before(program, "set up model", "model.requires_grad_(False)")
    error = refused(f"{program}/train.py {SMALL} --effective_batch_size 64 {options}", cwd)
    is_accumulating = "16" in options  # which Fabric refuses before there is a loss
    assert ("is wrapped in `DistributedDataParallel`" if is_accumulating else NO_GRADIENT) in error


@pytest.mark.parametrize("options", ["", NO_VALIDATION, ON_2])
def test_a_model_that_comes_in_evaluation_mode_is_refused(options: str, program: Path, cwd: Path):
    """As pretrained ones do: it would be trained without dropout."""
    insert_before(program, "set up model", "model.eval()")
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    words = "build_model: the model is in evaluation mode: return model.train()"
    if options == ON_2:
        assert_told_by_ranks(error, words)
    else:
        assert error == f"train.py: error: {words}\n"
    call(f"train.py {SMALL} --epochs 1", cwd)
    before = without_locks(cwd)
    assert words in call(f"{program}/train.py --resume auto --epochs 2", cwd, code=1).stderr
    assert without_locks(cwd) == before


VALIDATED_IN_EVALUATION_MODE = """
model.eval()
validate(fabric, config, model, val_loader, metrics)
assert not model.training and not model.module.training
"""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_validation_leaves_a_model_in_the_mode_it_was_in(precision: str, program: Path, cwd: Path):
    """As that of a teacher, which the next step needs without dropout."""
    insert_before(program, "loop begins", VALIDATED_IN_EVALUATION_MODE)
    call(f"{program}/train.py {SMALL} --epochs 1 --precision {precision}", cwd)


@pytest.mark.parametrize("options", ["", NO_VALIDATION])
@pytest.mark.parametrize(
    "values, words",
    [
        (LOSS, "must return, first, a dict with one named `loss`, not a Tensor"),
        (f'{{"loss": {LOSS}, "each": logits[:4]}}', "`each` is not a number or a tensor of one, but tensor([["),
        (f'{{"loss": {LOSS}, "name": "text"}}', "`name` is not a number or a tensor of one, but 'text'"),
        (f'{{"loss": {LOSS}, "grad_norm": 1.0}}', "`grad_norm` is logged by train.py: give this value another name"),
        (f'{{"loss": {LOSS} / 0}}', "`loss` is inf in the first step"),
    ],
)
def test_what_compute_loss_must_return_is_told_in_one_line(
    values: str, words: str, options: str, program: Path, cwd: Path
):
    replace(program, "values", values)
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    assert error.startswith(f"train.py: error: compute_loss: {words}") and error.count("\n") == 1


@pytest.mark.parametrize("options", ["", NO_VALIDATION])
@pytest.mark.parametrize(
    "values, words",
    [
        (f'{{"nll": {LOSS}, "z": 1.0}}', "KeyError: 'loss'"),
        (f'{{"loss": {LOSS}.detach()}}', NO_GRADIENT),
        (f'{{"loss": {LOSS}.item()}}', "AttributeError: 'float' object has no attribute 'backward'"),
    ],
)
def test_a_loss_that_is_missing_or_has_no_gradient_is_told_at_the_backward_pass(
    values: str, words: str, options: str, program: Path, cwd: Path
):
    replace(program, "values", values)
    error = refused(f"{program}/train.py {SMALL} {options}", cwd)
    assert_traceback(error, program, 'fabric.backward(values["loss"] / plan.grad_accum_steps)', words)


def test_a_loss_that_is_not_finite_on_one_rank_ends_each_of_them_in_one_line(program: Path, cwd: Path):
    replace(program, "values", f'{{"loss": {LOSS} / (0 if __import__("os").environ.get("LOCAL_RANK") == "1" else 1)}}')
    error = refused(f"{program}/train.py {SMALL} {ON_2} {NO_VALIDATION}", cwd)
    assert_told_by_ranks(error, "compute_loss: `loss` is inf in the first step of this process")


# ---- loss and monitor


def test_a_second_loss_is_logged_shown_and_can_be_monitored(program: Path, cwd: Path):
    """And a value that is not finite is never the best, though the best of the checkpoints has to begin somewhere."""
    margin = f'"loss": {LOSS}, "margin": (2.1 - {LOSS}).sqrt()'  # not a number before the loss is below 2.1
    replace(program, "values", f"{{{margin}}}")
    options = "--limit_train_batches 8 --width 16 --monitor val/margin --monitor_mode max"
    done = call(f"{program}/train.py {SMALL} {options}", cwd)
    folder = run_dir(cwd)
    rows = history(cwd)
    margins = {int(row["step"]): float(row["val/margin"]) for row in rows}
    assert math.isnan(margins[8]) and math.isfinite(margins[40]) and float(rows[-1]["train/margin"])
    summary = json.loads((folder / "summary.json").read_text())
    best_step = max((step for step in margins if math.isfinite(margins[step])), key=margins.get)
    assert (summary["best"], summary["best_step"]) == (margins[best_step], best_step)
    assert "train/margin" in done.stdout and "val/margin" in done.stdout
    assert (folder / "checkpoints" / "best.ckpt").exists()


def test_a_metric_of_several_values_is_in_the_report_and_not_in_the_table(program: Path, cwd: Path):
    """A tensor of them, or a tuple of tensors."""
    each = "MulticlassAccuracy(dataset.num_classes, average=None, validate_args=False)"
    curve = '__import__("torchmetrics").classification.MulticlassROC(dataset.num_classes, thresholds=5)'
    replace(program, "metrics", f'{{"accuracy": accuracy, "each": {each}, "curve": {curve}}}')
    done = call(f"{program}/train.py {SMALL}", cwd)
    assert "val/accuracy" in done.stdout and "each" not in done.stdout and "curve" not in done.stdout
    call(f"{program}/test.py --out_dir train_out --accelerator cpu", cwd)
    report = json.loads((run_dir(cwd) / "test_test_best.json").read_text())["results"]
    assert len(report["each"]) == 10 and 0 <= report["accuracy"] <= 1
    assert [len(part) for part in report["curve"]] == [10, 10, 5]


SEVEN = """
class Seven(__import__("torchmetrics").MeanMetric):
    def update(self, logits, targets):
        super().update(7)


"""


@pytest.mark.parametrize("devices", ["", ON_2])
def test_a_metric_of_the_name_of_a_value_of_compute_loss_is_refused(devices: str, program: Path, cwd: Path):
    """`val/loss` would be the metric: a run that monitors it would keep the worst checkpoint as the best."""
    insert_before(program, "build_metrics", SEVEN)
    replace(program, "metrics", '{"accuracy": accuracy, "loss": Seven()}')
    error = refused(f"{program}/train.py {SMALL} {devices}", cwd)
    words = "compute_loss and build_metrics both have 'loss': give one of them another name"
    if devices:
        assert_told_by_ranks(error, words)
    else:
        assert error == f"train.py: error: {words}\n"
