"""The scripts that recipes/ports has moved: mnist and word_language_model of pytorch/examples, commit
77f55b912142e11fcfdf5b530231fb9c52f181e8. The losses of the originals are what originals.py has printed, by the commands
at its top, with torch 2.13.0 on one thread of a CPU. There the ports had the same in every digit; elsewhere the last
ones may differ."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from edits import with_text
from helpers import (
    LONG,
    ON_2,
    call,
    checkpoint,
    history,
    imported,
    killed_and_resumed,
    on_one_and_two,
    rows,
    run_dir,
    weights,
    with_recipe,
)
from originals import write_digits, write_text

pytestmark = pytest.mark.recipes
SAME = {"rel": 2e-6, "abs": 0}
MNIST_LOSSES = [
    *(2.331538200378418, 2.62857985496521, 2.3460466861724854, 2.2181830406188965),
    *(2.15299654006958, 1.9942576885223389, 1.6473313570022583, 1.7151060104370117),
]
# Of 11 steps in an epoch: three epochs with a rate of 20, the fourth with one of 5.
WORD_LOSSES = [
    *(3.708543062210083, 3.6951119899749756, 3.7171709537506104, 3.658906936645508, 3.685830593109131),
    *(3.6725707054138184, 3.6860949993133545, 3.664382219314575, 3.659548282623291, 3.665909767150879),
    *(3.6379783153533936, 3.8124594688415527, 3.7375478744506836, 3.6949410438537598, 3.666548728942871),
    *(3.6767935752868652, 3.670383930206299, 3.6768932342529297, 3.6608188152313232, 3.6518144607543945),
    *(3.6620888710021973, 3.609642267227173, 3.795147180557251, 3.690796136856079, 3.687119483947754),
    *(3.6606533527374268, 3.6731326580047607, 3.671621084213257, 3.6751511096954346, 3.6620349884033203),
    *(3.6504640579223633, 3.661703109741211, 3.611438035964966, 3.8004872798919678, 3.739609479904175),
    *(3.7361316680908203, 3.6748199462890625, 3.673694372177124, 3.678903818130493, 3.6728854179382324),
    *(3.647437334060669, 3.64695405960083, 3.651867628097534, 3.506027936935425),
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


# ---- mnist


@pytest.fixture(scope="module")
def mnist(tmp_path_factory) -> Path:
    return with_recipe("mnist", tmp_path_factory.mktemp("mnist"))


def long_mnist(program: Path, digits: Path) -> str:
    """Epochs of 8 steps of 28 samples, the last of 4."""
    options = "--limit_train_batches 1.0 --effective_batch_size 28 --micro_batch_size 7 --lr_schedule step"
    return f"{program}/{LONG} --data_dir {digits} {options} --epochs 4"


def test_mnist_has_the_losses_of_the_original(digits: Path, tmp_path: Path):
    program = with_recipe("mnist", tmp_path / "program")
    length = "    def __len__(self) -> int:\n"
    in_order = f"    def order(self, epoch, generator):\n        return torch.arange(len(self))\n\n{length}"
    with_text(program, "data.py", (length, in_order))  # main.py does not shuffle on a CPU
    options = "--seed 1 --epochs 2 --log_interval 1 --logger_name csv"
    call(f"{program}/train.py --accelerator cpu --data_dir {digits} {options}", tmp_path)
    found = rows(tmp_path)
    assert [row["train/loss"] for row in found] == pytest.approx(MNIST_LOSSES, **SAME)
    assert [row["lr"] for row in found] == 4 * [1.0] + 4 * [0.7]
    of_epochs = [found[3], found[7]]  # what main.py prints of its test set
    assert [f"{row['val/loss']:.4f}" for row in of_epochs] == ["2.1126", "1.9560"]
    assert [row["val/accuracy"] for row in of_epochs] == pytest.approx([24 / 80, 18 / 80])


def test_mnist_reads_plain_and_compressed_files(mnist: Path, digits: Path, tmp_path: Path):
    read_idx = imported(mnist, "mnist").read_idx
    for kind, shape in (("images-idx3", (200, 28, 28)), ("labels-idx1", (200,))):
        plain = digits / f"train-{kind}-ubyte"
        values = read_idx(plain)
        assert values.shape == shape and values.numpy().tobytes() == plain.read_bytes()[4 + 4 * len(shape) :]
        (tmp_path / f"train-{kind}-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
        assert torch.equal(read_idx(tmp_path / f"train-{kind}-ubyte"), values)


def test_mnist_learns_the_enlarged_digits_without_a_directory(mnist: Path, tmp_path: Path):
    call(f"{mnist}/train.py --accelerator cpu --width 8 --epochs 3 --logger_name csv", tmp_path)
    assert rows(tmp_path)[-1]["val/accuracy"] > 0.8
    call(f"{mnist}/test.py --accelerator cpu --checkpoint last", tmp_path)
    (path,) = run_dir(tmp_path).glob("test_*.json")
    assert json.loads(path.read_text())["results"]["accuracy"] == rows(tmp_path)[-1]["val/accuracy"]  # the same set


def test_mnist_is_killed_and_resumed(mnist: Path, digits: Path, tmp_path: Path):
    killed_and_resumed(long_mnist(mnist, digits), tmp_path)


def test_mnist_trains_the_same_on_two_processes(mnist: Path, digits: Path, tmp_path: Path):
    found = map(weights, on_one_and_two(f"{long_mnist(mnist, digits)} --epochs 1", tmp_path))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


# ---- word_language_model


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    return with_recipe("word_language_model", tmp_path_factory.mktemp("words"))


def long_words(program: Path, text: Path) -> str:
    """Epochs of 8 steps, of 4 micro-batches each: those of the first seven have 26 words in a column, the last 21."""
    return f"{program}/{LONG} --data_dir {text} --bptt 26 --effective_batch_size 20 --micro_batch_size 5 --epochs 4"


@pytest.fixture(scope="module")
def trained(words: Path, text: Path, tmp_path_factory) -> Path:
    """Where the run of the original has been made again."""
    cwd = tmp_path_factory.mktemp("trained")
    options = "--seed 1111 --epochs 4 --width 16 --bptt 20 --log_interval 1 --logger_name csv"
    monitor = "--monitor val/perplexity --monitor_mode min"
    call(f"{words}/train.py --accelerator cpu --data_dir {text} {options} {monitor}", cwd)
    return cwd


def test_the_word_model_has_the_losses_of_the_original(trained: Path):
    found = rows(trained)
    assert [row["train/loss"] for row in found] == pytest.approx(WORD_LOSSES, **SAME)
    assert [row["lr"] for row in found] == 33 * [20.0] + 11 * [5.0]
    perplexities = [f"{row['val/perplexity']:.2f}" for row in found if "val/loss" in row]
    assert perplexities == ["43.90", "43.35", "43.55", "39.12"]  # as main.py prints them


def test_the_perplexity_is_monitored_and_that_of_the_whole_text_in_test_py(words: Path, text: Path, trained: Path):
    assert checkpoint(trained, "best")["step"] == 44
    call(f"{words}/test.py --accelerator cpu", trained)
    (path,) = run_dir(trained).glob("test_*.json")
    results = json.loads(path.read_text())["results"]
    assert f"{results['perplexity']:.2f}" == "38.72"  # of main.py
    model = imported(words, "model").Model(40 + 1, 16).eval()
    model.load_state_dict(weights(trained))
    numbers: dict[str, int] = {}
    recipe = imported(words, "words")
    found = {name: recipe.numbered(part, numbers) for name, part in recipe.read_texts(text).items()}
    columns = found["test"].view(10, -1).t()  # 84 words, of which validate takes 20 at once
    with torch.no_grad():
        log_probabilities, _ = model(columns[:-1], None)  # in one part
    loss = torch.nn.functional.nll_loss(log_probabilities, columns[1:].flatten())
    assert results["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_the_word_model_is_killed_and_resumed(words: Path, text: Path, tmp_path: Path):
    whole, _ = killed_and_resumed(long_words(words, text), tmp_path)
    assert float(history(whole)[-1]["lr"]) < 20  # so that the resume needs the count of bad validations, too


@pytest.mark.night
def test_the_word_model_is_killed_and_resumed_on_two_processes(words: Path, text: Path, tmp_path: Path):
    killed_and_resumed(f"{long_words(words, text)} {ON_2}", tmp_path)


def test_the_word_model_trains_the_same_on_two_processes(words: Path, text: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{long_words(words, text)} --epochs 1.5", tmp_path)
    torch.testing.assert_close(weights(one), weights(two), atol=1e-5, rtol=0)
    ours, theirs = (checkpoint(cwd, "step-00000012")["hidden"] for cwd in (one, two))
    assert (ours != 0).all()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_the_language_reference_is_read_without_a_directory(words: Path, tmp_path: Path):
    size = "--width 4 --max_steps 2 --limit_val_batches 1 --num_sanity_val_steps 1"
    printed = call(f"{words}/train.py --accelerator cpu {size} --effective_batch_size 4", tmp_path).stdout
    assert "finished after 2 of 2 steps" in printed
    printed = call(f"{words}/test.py --accelerator cpu --split train --checkpoint last", tmp_path).stdout
    assert "on 10 train samples" in printed  # whole columns, as of the other sets
