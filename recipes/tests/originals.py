"""Runs the scripts of pytorch/examples that recipes/ports has moved, unchanged, on small data, and prints the losses
that test_methods.py compares with:

    git clone https://github.com/pytorch/examples && git -C examples checkout 77f55b912142e11fcfdf5b530231fb9c52f181e8
    python recipes/tests/originals.py examples/mnist --epochs 2 --log-interval 1
    python recipes/tests/originals.py examples/word_language_model --data . --emsize 16 --nhid 16 --bptt 20 --epochs 4

The first needs torchvision 0.28.0. A script runs in a temporary folder, on a CPU, where mnist/main.py does not shuffle.
What is not as in the script itself: torch's generator is seeded before each forward pass of a training step as the
template seeds it, so that dropout draws the same masks; and each loss is noted in all its digits."""

import itertools
import os
import random
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.loader import seeder  # noqa: E402

SEEDS = {"mnist": 1, "word_language_model": 1111}  # the defaults of the scripts


def write_digits(folder: Path) -> None:
    """Digits of scikit-learn, enlarged to 28 x 28, in files like those of MNIST: 200 for training, 80 for the test."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))) * 255 // 16
    large = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    for name, first, count in (("train", 0, 200), ("t10k", 200, 80)):
        part = slice(first, first + count)
        for kind, values in (("images-idx3", large[part]), ("labels-idx1", targets[part].astype(np.uint8))):
            header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + values.tobytes())


def write_text(folder: Path) -> None:
    """Lines of words, each of which is likely after some others: 4,090 words for training, 840 twice more. In these two
    other words are likely, so the validation soon gets worse."""
    rng = random.Random(0)
    for name, lines, factor in (("train", 409, 3), ("valid", 84, 7), ("test", 84, 7)):
        text = ""
        for _ in range(lines):
            word = rng.randrange(40)
            for _ in range(9):
                text += f"w{word} "
                word = (factor * word + rng.randrange(5)) % 40
            text += "\n"
        (folder / f"{name}.txt").write_text(text)


def seeded(forward, seed: int):
    """The method `forward`, which in training mode seeds the generators before each call as `Loader.micro_batches`."""
    set_seed, steps = seeder("cpu", "step", seed), itertools.count()

    def call(model, *inputs):
        if model.training:
            set_seed(next(steps))
        return forward(model, *inputs)

    return call


def main(folder: Path, options: list[str]) -> list[float]:
    losses: list[float] = []
    nll_loss = torch.nn.functional.nll_loss

    def noted(*arguments, **words):
        value = nll_loss(*arguments, **words)
        if value.requires_grad:
            losses.append(value.item())
        return value

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    sys.argv = [str(folder / "main.py"), *options]
    torch.nn.functional.nll_loss = noted  # nn.NLLLoss calls it, too
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        if folder.name == "mnist":
            os.makedirs("cwd")
            os.makedirs("data/MNIST/raw")  # where the script looks, seen from its own folder
            write_digits(Path("data/MNIST/raw"))
            os.chdir("cwd")
            import main as script

            script.Net.forward = seeded(script.Net.forward, SEEDS["mnist"])
            script.main()
        else:
            write_text(Path())
            import model

            model.RNNModel.forward = seeded(model.RNNModel.forward, SEEDS["word_language_model"])
            runpy.run_path(str(folder / "main.py"), run_name="__main__")
    return losses


if __name__ == "__main__":
    print(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
