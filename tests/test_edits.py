"""What people edit, and the mistakes they make in it: tried on copies of the programs."""

import csv
import json
import math
from pathlib import Path

import pytest
from conftest import ON_2, SMALL, call, replaced, run, run_dir, start

# Stands before `build_datasets`, which it replaces: SAMPLE is what the datasets give for an image and its target.
NEW_DATA = """
class Edited(Dataset):
    def __init__(self, images):
        self.images, self.num_classes = images, 10

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, target = self.images[index]
        return SAMPLE


def build_datasets(*args, **options):
    return {split: Edited(images) for split, images in images_of(*args, **options).items()}


def images_of("""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program"


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """An empty folder beside the program."""
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def with_samples(program: Path, sample: str) -> None:
    replaced(program, "data.py", "def build_datasets(", NEW_DATA.replace("SAMPLE", sample))


# ---- data


def test_a_dataset_of_dicts(program: Path, cwd: Path):
    with_samples(program, '{"name": f"image {index}", "target": target, "weight": 1.0, "image": image}')
    replaced(program, "train.py", "image, _ = dataset[0]", 'image = dataset[0]["image"]')
    replaced(program, "train.py", "images, targets = batch", 'images, targets = batch["image"], batch["target"]')
    call(f"{program}/train.py {SMALL} --epochs 1 --num_workers 1", cwd)
    report = call(f"{program}/test.py --out_dir train_out --accelerator cpu", cwd)
    assert "on 380 test samples" in report.stdout


def test_a_dataset_of_tuples_of_any_length(program: Path, cwd: Path):
    with_samples(program, "image, [target, index], 1.0")
    replaced(program, "train.py", "image, _ = dataset[0]", "image, _, _ = dataset[0]")
    replaced(program, "train.py", "images, targets = batch", "images, (targets, _), _ = batch")
    assert "finished after 2 of 2 steps" in call(f"{program}/train.py --accelerator cpu --fast_run", cwd).stdout


def test_a_validation_set_of_fewer_samples_than_processes_is_refused(program: Path, cwd: Path):
    with_samples(program, "image, target")
    replaced(program, "data.py", "return len(self.images)", "return 1 if len(self.images) == 200 else len(self.images)")
    error = run(f"{program}/train.py {SMALL} {ON_2}", cwd, code=2).stderr
    assert "1 samples are too few" in error.splitlines()[-1] and "Traceback" not in error
    assert list(cwd.iterdir()) == []


# ---- mistakes


# Those of the model and those of the data.
SHAPES = "mat1 and mat2 shapes cannot be multiplied (128x32 and 48x10); the batch is ('torch.float32 (128, 1, 8, 8)', "


@pytest.mark.parametrize(
    "file, old, new, words, options",
    [
        ("model.py", "nn.Linear(2 * width", "nn.Linear(3 * width", SHAPES, ""),
        ("model.py", "nn.Linear(2 * width", "nn.Linear(3 * width", "RuntimeError: mat1 and mat2 shapes", ON_2),
        ("data.py", "num_classes, self.shift = images", "classes, self.shift = images", "attribute 'num_classes'", ""),
        ("train.py", "len(targets), (logits, targets)", "len(targets), (targets,)", "TypeError: ", ""),
    ],
)  # fmt: skip
def test_a_mistake_leaves_nothing_behind(file, old, new, words, options, program: Path, cwd: Path):
    """The first validation finds it, before the run directory is made: there is no run to be resumed."""
    replaced(program, file, old, new)
    command = f"{program}/train.py {SMALL} --num_sanity_val_steps 0 {options}"
    if options:  # the first process to fail tells it; the other may be killed, and Fabric have the last word
        process = start(command, cwd)
        error = process.communicate(timeout=600)[1]
        lines = error.splitlines()
        assert process.returncode
    else:
        error = call(command, cwd, code=1).stderr
        lines = error.splitlines()[-1:]
    assert any("train.py: error: " in line and words in line for line in lines), error
    assert "Traceback" in error and "--resume" not in error
    assert list(cwd.iterdir()) == []


# ---- loss and monitor


def test_a_second_loss_is_logged_shown_and_can_be_monitored(program: Path, cwd: Path):
    """And a value that is not finite is never the best, though the best of the checkpoints has to begin somewhere."""
    loss = "F.cross_entropy(logits, targets)"
    margin = f'"loss": {loss}, "margin": (2.1 - {loss}).sqrt()'  # not a number before the loss is below 2.1
    replaced(program, "train.py", f'"loss": {loss}', margin)
    options = "--limit_train_batches 8 --width 16 --monitor val/margin --monitor_mode max"
    done = call(f"{program}/train.py {SMALL} {options}", cwd)
    folder = run_dir(cwd)
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    margins = {int(row["step"]): float(row["val/margin"]) for row in rows}
    assert math.isnan(margins[8]) and math.isfinite(margins[40]) and float(rows[-1]["train/margin"])
    summary = json.loads((folder / "summary.json").read_text())
    best_step = max((step for step in margins if math.isfinite(margins[step])), key=margins.get)
    assert (summary["best"], summary["best_step"]) == (margins[best_step], best_step)
    assert "train/margin" in done.stdout and "val/margin" in done.stdout
    assert (folder / "checkpoints" / "best.ckpt").exists()


def test_a_metric_of_several_values_is_in_the_report_and_not_in_the_table(program: Path, cwd: Path):
    """A tensor of them, or a tuple of tensors."""
    old = 'MetricCollection({"accuracy": accuracy}'
    each = "MulticlassAccuracy(dataset.num_classes, average=None, validate_args=False)"
    curve = '__import__("torchmetrics").classification.MulticlassROC(dataset.num_classes, thresholds=5)'
    replaced(program, "train.py", old, f'MetricCollection({{"accuracy": accuracy, "each": {each}, "curve": {curve}}}')
    done = call(f"{program}/train.py {SMALL}", cwd)
    assert "val/accuracy" in done.stdout and "each" not in done.stdout and "curve" not in done.stdout
    call(f"{program}/test.py --out_dir train_out --accelerator cpu", cwd)
    report = json.loads((run_dir(cwd) / "test_test_best.json").read_text())
    assert len(report["each"]) == 10 and 0 <= report["accuracy"] <= 1
    assert [len(part) for part in report["curve"]] == [10, 10, 5]


OF_A_RANK = """
class OfARank(__import__("torchmetrics").MeanMetric):
    def update(self, logits, targets):
        super().update(-logits.std() if __import__("os").environ.get("LOCAL_RANK") == "1" else logits.std())


def build_metrics("""


def test_a_metric_that_each_rank_has_for_itself_is_the_mean_of_the_ranks(program: Path, cwd: Path):
    """All must find the same best: else one would save, and wait for the others."""
    replaced(program, "train.py", "def build_metrics(", OF_A_RANK)
    replaced(program, "train.py", '{"accuracy": accuracy}', '{"accuracy": OfARank(sync_on_compute=False)}')
    run(f"{program}/train.py {SMALL} {ON_2} --checkpoint_interval 100 --timeout 60", cwd)


def test_an_option_with_a_list(program: Path, cwd: Path):
    option = "    layers: list[int] = field(default_factory=lambda: [64, 64])  # Widths"
    replaced(program, "config.py", '    dataset: Literal["digits"]', f'{option}\n    dataset: Literal["digits"]')
    call(f"{program}/train.py {SMALL} --epochs 1 --layers 8 4", cwd)
    call(f"{program}/test.py --accelerator cpu", cwd)
    assert (
        "--layers [3] instead of [8, 4]" in call(f"{program}/train.py --resume auto --epochs 2 --layers 3", cwd).stdout
    )
