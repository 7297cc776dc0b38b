"""What a classifier confuses: a table of its classes, a row per sample, and the confusion matrix as a picture.

python test.py --out_dir train_out --predictions     # writes predictions_test_best.pt
python tools/confusion.py --out_dir train_out        # its newest predictions_*.pt
python tools/confusion.py RUN/predictions_val_best.pt RUN/predictions_test_best.pt

Beside predictions_NAME.pt it writes predictions_NAME.csv, which any program reads, and confusion_matrix_NAME.png, for
which it needs matplotlib (pip install matplotlib==3.11.2). The file has the logits (samples, classes) and the targets
(samples,). A target below 0 belongs to no class: its sample is in the csv file alone.
"""

import argparse
import csv
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))
from config import EvalConfig  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.options import Parser  # noqa: E402
from runtime.runs import add_run_options, find_run  # noqa: E402
from runtime.terminal import end  # noqa: E402

MAX_NUMBERS = 16  # classes up to which the picture has a number in each field
MAX_LABELS = 26  # classes that are named on an axis


def find(out_dir: str, root_dir: str) -> Path:
    """The newest predictions of a run, which is found as test.py finds it."""
    run_dir = find_run("--out_dir", out_dir, root_dir, "predictions_*.pt")
    found = [*run_dir.glob("predictions_*.pt")]
    if not found:
        raise ConfigError(f"{run_dir}: no predictions_*.pt; python test.py --predictions writes it")
    return max(found, key=lambda file: file.stat().st_mtime_ns)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """The logits (samples, classes) and the targets (samples,) of a file."""
    try:
        outputs = torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # a damaged file has many
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(outputs, list) or not all(isinstance(output, Tensor) for output in outputs):
        raise ConfigError(f"{path}: is no list of tensors, as test.py --predictions writes it")
    shapes = [tuple(output.shape) for output in outputs]
    dims = [len(shape) for shape in shapes]
    if dims != [2, 1] or len(outputs[0]) != len(outputs[1]) or outputs[1].is_floating_point():
        raise ConfigError(f"{path}: needs logits (samples, classes) and class indices (samples,), but has {shapes}")
    logits, targets = outputs
    if len(targets) and targets.max() >= logits.shape[1]:
        raise ConfigError(f"{path}: has the target {targets.max()}, and logits of {logits.shape[1]} classes")
    return logits.float(), targets.long()


def count_pairs(targets: Tensor, predictions: Tensor, num_classes: int) -> Tensor:
    """How many samples of each true class (row) were predicted as each class (column)."""
    has_class = targets >= 0
    pairs = targets[has_class] * num_classes + predictions[has_class]
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def print_table(counts: Tensor) -> None:
    """The accuracy of each class, below a header."""
    print(f"{'class':>10}  {'samples':>10}  {'accuracy':>10}")
    for number, row in enumerate(counts.tolist()):
        samples = sum(row)
        accuracy = f"{row[number] / samples:.5g}" if samples else "-"
        print(f"{number:>10}  {samples:>10}  {accuracy:>10}")


def write_csv(path: Path, targets: Tensor, predictions: Tensor, confidences: Tensor) -> None:
    """A row per sample."""
    columns = [targets.tolist(), predictions.tolist(), confidences.tolist()]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sample", "target", "prediction", "confidence"])
        for sample, (target, prediction, confidence) in enumerate(zip(*columns, strict=True)):
            writer.writerow([sample, target, prediction, f"{confidence:.9g}"])


def draw(counts: Tensor, title: str, path: Path) -> None:
    """A picture of the confusion matrix: of each true class, the share that was predicted as each class."""
    from matplotlib.figure import Figure

    num_classes = len(counts)
    has_numbers = num_classes <= MAX_NUMBERS
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    size = min(num_classes / 2 + 3, 12)  # inches
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares.numpy(), cmap="Blues" if has_numbers else "viridis_r", vmin=0, vmax=1)
    figure.colorbar(image, label="Share of the true class")
    labelled = range(0, num_classes, (num_classes - 1) // MAX_LABELS + 1)
    axes.set(title=title, xlabel="Predicted class", ylabel="True class", xticks=labelled, yticks=labelled)
    if has_numbers:
        for row in range(num_classes):
            for column in range(num_classes):
                share = shares[row, column].item()
                color = "white" if share > 0.5 else "black"
                axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=color)
    figure.savefig(path)


def report(path: Path) -> None:
    """Prints and writes what the predictions in a file are."""
    logits, targets = read(path)
    confidences, predictions = logits.softmax(dim=1).max(dim=1)
    counts = count_pairs(targets, predictions, logits.shape[1])
    print(f"{path}: {len(targets)} samples\n")
    print_table(counts)
    table = path.with_suffix(".csv")
    write_csv(table, targets, predictions, confidences)
    print(f"predictions {table}")
    name = path.stem.removeprefix("predictions_")
    picture = path.with_name(f"confusion_matrix_{name}.png")
    if find_spec("matplotlib"):
        draw(counts, f"{path.resolve().parent.name}\n{name}", picture)
        print(f"confusion matrix {picture}")
    else:
        print(f"no {picture.name}: that needs matplotlib; pip install matplotlib==3.11.2")


def main() -> None:
    about, details = __doc__.split("\n", 1)
    parser = Parser(description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="these predictions, in place of a run's")
    add_run_options(parser, EvalConfig)
    args = parser.parse_args()
    for path in args.files or [find(args.out_dir, args.root_dir)]:
        report(path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        end(2, str(error))
