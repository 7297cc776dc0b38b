"""The recipe balanced: an order of the dataset that draws each class equally often. And the orders of data.md."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    LONG,
    ON_2,
    REPO,
    assert_same_run,
    assert_same_training,
    call,
    imported,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    with_recipe,
)

pytestmark = pytest.mark.recipes
BF16 = f"{LONG} --precision bf16-mixed"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("balanced", tmp_path_factory.mktemp("program"))


def datasets(program: Path, balanced: bool = True) -> dict:
    return imported(program, "data").build_datasets(SimpleNamespace(data_dir="", balanced=balanced))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the recipe


def test_five_classes_are_rare_and_the_test_set_is_whole(program: Path):
    parts = datasets(program)
    counts = parts["train"].targets.bincount()
    assert counts[:5].max() < 20 and counts[5:].min() > 100
    assert parts["test"].targets.bincount().min() > 25
    assert (len(parts["val"]), len(parts["test"])) == (200, 380)


def test_each_class_is_drawn_equally_often(program: Path):
    train = datasets(program)["train"]
    epochs = [train.order(epoch, generator(epoch)) for epoch in range(100)]
    assert all(order.shape == (len(train),) for order in epochs)
    shares = train.targets[torch.cat(epochs)].bincount() / (100 * len(train))
    torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.005, rtol=0)  # four standard deviations
    assert torch.cat(epochs).unique().numel() == len(train)
    assert torch.equal(epochs[3], train.order(3, generator(3))) and not torch.equal(epochs[3], epochs[4])


def test_rare_classes_are_recognized_better(program: Path, tmp_path: Path):
    rare = {}
    for balanced in (True, False):
        cwd = tmp_path / str(balanced)
        cwd.mkdir()
        call(f"{program}/train.py --accelerator cpu --logger_name csv --balanced {balanced}", cwd)
        call(f"{program}/test.py --out_dir train_out --accelerator cpu --predictions", cwd)
        logits, targets = torch.load(run_dir(cwd) / "predictions_test_best.pt", weights_only=True)
        rare[balanced] = (logits.argmax(1) == targets)[targets < 5].float().mean()
    assert rare[True] > max(0.88, rare[False] + 0.05)


def test_killed_and_resumed_in_bf16_is_the_same_run(program: Path, tmp_path: Path):
    whole, _ = killed_and_resumed(f"{program}/{BF16}", tmp_path)
    (tmp_path / "workers").mkdir()
    call(f"{program}/{BF16} --num_workers 2", tmp_path / "workers")
    assert_same_run(tmp_path / "workers", whole)


@pytest.mark.night
def test_killed_and_resumed_on_two_processes_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{BF16} {ON_2}", tmp_path)


def test_two_processes_train_on_the_same_batches(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --epochs 3 --dropout 0", tmp_path)
    assert_same_training(one, two)


def test_a_resume_cannot_change_the_order(program: Path, tmp_path: Path):
    call(f"{program}/{LONG} --max_steps 2", tmp_path)
    error = call(f"{program}/train.py --resume auto --balanced False", tmp_path, code=2).stderr
    assert "--balanced" in error
    assert json.loads((run_dir(tmp_path) / "summary.json").read_text())["state"] == "finished"


# ---- the orders of data.md


def orders() -> list:
    """The functions `order` of the page."""
    page = (REPO / "docs" / "data.md").read_text()
    found = []
    for block in re.findall(r"^```python\n(def order.*?)^```$", page, re.DOTALL | re.MULTILINE):
        names = {"torch": torch}
        exec(block, names)
        found.append(names["order"])
    return found


class Sequences:
    """1,000 sequences of 1 to 200 words."""

    lengths = torch.randint(1, 201, (1000,), generator=generator())
    weights = lengths.float()
    batch_size = 16

    def __len__(self) -> int:
        return 1000


def test_the_order_by_weight_draws_in_proportion():
    by_weight, _ = orders()
    sequences = Sequences()
    drawn = torch.cat([by_weight(sequences, epoch, generator(epoch)) for epoch in range(300)])
    counts = drawn.bincount(minlength=1000)
    expected = len(drawn) * sequences.weights / sequences.weights.sum()
    assert ((counts - expected).abs() < 6 * expected.sqrt() + 1).all()


def test_the_order_by_length_has_batches_of_similar_lengths_each_sample_once():
    _, by_length = orders()
    sequences = Sequences()
    first, second, again = (by_length(sequences, 0, generator(seed)) for seed in (1, 2, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)
    for order in (first, second):
        assert len(order) == len(order.unique()) == 1000 // 16 * 16
        lengths = sequences.lengths[order].view(-1, 16)
        padded = (lengths.amax(1) * 16).sum()
        assert lengths.sum() > 0.95 * padded  # 0.53 with a random order
        of_batches = lengths.float().mean(1)
        assert (of_batches[1:] > of_batches[:-1]).float().mean() < 0.7  # long and short batches are mixed
