"""recipes/methods/token_batches.patch: batches with a budget of tokens, from sequences of similar lengths."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    LONG,
    ON_2,
    assert_same_run,
    assert_same_training,
    call,
    history,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    sizes_of_outputs,
    weights,
    with_recipe,
)

from runtime.loader import TrainSampler

pytestmark = pytest.mark.recipes
TOKENS = "--effective_batch_size 4 --micro_batch_size 1"
SHORT = f"{LONG} {TOKENS} --epochs 4"  # of 8 steps, of 4 micro-batches each
MAX_TOKENS = 1024


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("token_batches", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def recipe(program: Path) -> ModuleType:
    return imported(program, "token_batches")


@pytest.fixture(scope="module")
def parts(program: Path) -> dict:
    return imported(program, "paragraphs").build_paragraphs()


@pytest.fixture
def train(recipe: ModuleType, parts: dict):
    return recipe.TokenBatches(parts["train"], MAX_TOKENS)


def epoch_of(train, epoch: int, seed: int = 42) -> list[np.ndarray]:
    """The sequences of each batch of an epoch, in their order."""
    sizes = {"effective_batch_size": 1, "micro_batch_size": 1, "last_batch_size": 1}
    plan = SimpleNamespace(steps_per_epoch=len(train), world_size=1, **sizes)
    sampler = TrainSampler(plan, train, rank=0, seed=seed, step=epoch * len(train))
    indices = [index for _, (index,) in sampler]
    return [train.batches_of(int(index) // len(train))[index % len(train)] for index in indices]


# ---- the batches


def test_they_are_a_pure_function_of_seed_and_epoch(recipe: ModuleType, parts: dict, train):
    """Of a second process, too, which has made those of no other epoch."""
    torch.manual_seed(1), np.random.seed(1)
    of_epochs = [[batch.tolist() for batch in epoch_of(train, epoch)] for epoch in range(4)]
    torch.manual_seed(2), np.random.seed(2)
    other = recipe.TokenBatches(parts["train"], MAX_TOKENS)
    assert [batch.tolist() for batch in epoch_of(other, 3)] == of_epochs[3] != of_epochs[2]
    assert [batch.tolist() for batch in epoch_of(other, 3, seed=43)] != of_epochs[3]


def test_an_epoch_has_each_sequence_once_and_no_two_are_always_together(train):
    together = []
    for epoch in range(2):
        batches = epoch_of(train, epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(train.sequences)))
        together.append({frozenset(batch.tolist()) for batch in batches if len(batch) > 1})
    assert len(together[0] & together[1]) < 0.1 * len(together[0])


def test_a_batch_keeps_to_the_budget_and_is_of_similar_lengths(train):
    lengths = train.sequences.lengths
    batches = [lengths[batch] for batch in epoch_of(train, 0)]
    assert all(len(batch) * batch.max() <= MAX_TOKENS for batch in batches)
    assert np.median([batch.min() / batch.max() for batch in batches]) > 0.85
    means = [batch.mean() for batch in batches]
    assert abs(np.corrcoef(range(len(means)), means)[0, 1]) < 0.3  # short and long ones are mixed


def test_a_sequence_beyond_the_budget_is_a_batch_of_its_own(recipe: ModuleType, parts: dict):
    train = recipe.TokenBatches(parts["train"], 300)
    lengths = train.sequences.lengths
    batches = epoch_of(train, 0)
    assert sum(len(batch) == 1 and lengths[batch[0]] > 300 for batch in batches) == (lengths > 300).sum() > 100
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))


def test_they_save_nearly_all_padding(program: Path, train):
    """The script counts what is loaded."""
    printed = subprocess.run([sys.executable, "token_batches.py"], cwd=program, capture_output=True, text=True).stdout
    told, without = (float(share) for share in re.findall(r": (\S+)% of \S+ tokens is padding", printed))
    loaded = [train.__getitems__(np.array([index]))[0][:, 1:] for index in range(len(train))]  # shuffled by 0
    padding = sum(int((batch == 0).sum()) for batch in loaded) / sum(batch.numel() for batch in loaded)
    assert told == pytest.approx(100 * padding, abs=0.05) and told < 4
    assert without > 50


# ---- the programs


def losses_of(model: torch.nn.Module, sequences, indices) -> list[torch.Tensor]:
    """The losses of the tokens of each of these sequences, one sequence at a time."""
    losses = []
    for index in indices:
        tokens = sequences.samples[index]
        losses.append(model(tokens[None, :-1], tokens[None, 1:])[0])
    return losses


def test_the_model_returns_the_losses_of_its_logits_without_the_logits(program: Path, parts: dict, monkeypatch):
    """Of all tensors they would take the most memory. No metric needs them."""
    train = imported_train(program, monkeypatch)
    model = train.Model(256, width=8, dropout=0)
    batch = parts["train"].__getitems__(np.arange(3))
    tokens = batch[0]
    assert sizes_of_outputs(train.compute_loss, model, batch) == [tokens[:, 1:].shape]
    assert sizes_of_outputs(train.compute_loss, model.eval(), batch) == [tokens[:, 1:].shape]
    logits = []
    with model.head.register_forward_hook(lambda module, given, output: logits.append(output)):
        losses = model(tokens[:, :-1], tokens[:, 1:])
    expected = F.cross_entropy(logits[0].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    assert model.bfloat16()(tokens[:, :-1], tokens[:, 1:]).dtype == torch.float32  # not rounded


def test_it_learns_and_is_evaluated(program: Path, parts: dict, tmp_path: Path):
    """The perplexity is far below the 24 of the frequencies of single characters. Each sample counts by its tokens, on
    one process and on two; the predictions have it in its place."""
    options = "--accelerator cpu --epochs 1 --val_frequency 0.5 --width 64 --logger_name csv"
    call(f"{program}/train.py {options}", tmp_path)
    test = f"{program}/test.py --out_dir train_out --accelerator cpu"
    path = run_dir(tmp_path) / "test_test_best.json"
    results = []
    for command in (f"{test} --predictions", f"{test} --batch_size 7 {ON_2}"):
        run(command, tmp_path)
        results.append(json.loads(path.read_text()))
    model = imported(program, "model").Model(256, width=64).eval()
    model.load_state_dict(weights(tmp_path))
    with torch.no_grad():
        losses = losses_of(model, parts["test"], range(len(parts["test"])))
    mean = torch.cat(losses).mean().item()
    for report in results:
        assert report["num_samples"] == len(parts["test"]) > 100
        assert report["results"]["loss"] == pytest.approx(mean, rel=1e-5)
        assert report["results"]["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert 3 < results[0]["results"]["perplexity"] < 18
    means, counts = torch.load(run_dir(tmp_path) / "predictions_test_best.pt", weights_only=True)
    assert counts.tolist() == parts["test"].lengths.tolist()
    expected = torch.stack([loss.mean() for loss in losses])
    torch.testing.assert_close(means, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", ["", ON_2, "--micro_batch_size 2"])
def test_each_token_has_the_same_weight(options: str, program: Path, train, tmp_path: Path):
    """In the loss of a step and in its gradient."""
    small = "--max_steps 1 --log_interval 1 --dropout 0 --base_lr 1e-30 --width 8"
    run(f"{program}/{LONG} {TOKENS} {small} {options}", tmp_path)
    model = imported(program, "model").Model(256, width=8, dropout=0)
    model.load_state_dict(weights(tmp_path))  # as in the beginning
    first = np.concatenate(epoch_of(train, 0)[:4])
    per_batch = train.sequences.lengths.sum() / len(train)
    loss = torch.cat(losses_of(model, train.sequences, first)).sum() / (4 * per_batch)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    (row,) = history(tmp_path)
    assert float(row["train/loss"]) == pytest.approx(loss.item(), rel=1e-6)
    assert float(row["train/grad_norm"]) == pytest.approx(norm.item(), rel=1e-4)


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    """Also with data workers."""
    whole, _ = killed_and_resumed(f"{program}/{SHORT}", tmp_path)
    (tmp_path / "workers").mkdir()
    call(f"{program}/{SHORT} --num_workers 2", tmp_path / "workers")
    assert_same_run(tmp_path / "workers", whole)


@pytest.mark.night
@pytest.mark.parametrize("options", ["--num_workers 2", ON_2, f"{ON_2} --num_workers 2"])
def test_killed_and_resumed_with_workers_and_on_two_processes(options: str, program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{SHORT} {options}", tmp_path)


def test_two_processes_train_like_one(program: Path, tmp_path: Path):
    """With dropout, since the micro-batches are the same."""
    one, two = on_one_and_two(f"{program}/{SHORT} --epochs 2", tmp_path)
    assert_same_training(one, two)


def test_a_resume_cannot_change_the_budget(program: Path, tmp_path: Path):
    call(f"{program}/{SHORT} --max_steps 2", tmp_path)
    error = call(f"{program}/train.py --resume auto --max_steps 4 --max_tokens 2048", tmp_path, code=2).stderr
    assert "--max_tokens 2048: a resume cannot change it" in error


def test_padding_changes_nothing(program: Path, parts: dict):
    sequences = parts["train"]
    torch.manual_seed(0)
    model = imported(program, "model").Model(256, width=16).eval()
    shortest, longest = sequences.lengths.argmin(), sequences.lengths.argmax()
    tokens, count = sequences.__getitems__(np.array([shortest, longest]))
    assert tokens.shape == (2, sequences.lengths.max() + 1) and count == sequences.lengths[[shortest, longest]].sum()
    together = model(tokens[:, :-1], tokens[:, 1:])
    for row, index in enumerate((shortest, longest)):
        sample = sequences.samples[index]
        alone = model(sample[None, :-1], sample[None, 1:])[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-6, rtol=0)


def test_the_parts_share_no_paragraph(parts: dict):
    train, val, test = ({tuple(sample.tolist()) for sample in part.samples} for part in parts.values())
    assert len(test) > 100 and not (train & val or train & test or val & test)
    for part in parts.values():
        assert part.lengths.max() == 512
