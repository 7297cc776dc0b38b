"""The recipe token_batches: micro-batches with a budget of tokens, from sequences of similar lengths."""

import json
import math
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    LONG,
    ON_2,
    assert_same_run,
    assert_same_training,
    call,
    history,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    weights,
)
from test_recipes import imported, with_recipe

from data import SeededBatches

pytestmark = pytest.mark.recipes
TOKENS = "--effective_batch_size 4096 --micro_batch_size 1024"
SHORT = f"{LONG} {TOKENS} --epochs 4"  # of 8 steps, of 4 micro-batches each
BUDGET, PER_STEP = 1024, 4


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("token_batches", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def recipe(program: Path) -> ModuleType:
    return imported(program, "token_batches")


@pytest.fixture(scope="module")
def parts(program: Path) -> dict:
    return imported(program, "paragraphs").build_paragraphs()


def samplers(recipe: ModuleType, parts: dict, world_size: int = 1, seed: int = 42) -> list:
    """A sampler for each rank. A step has 4 micro-batches, on any number of ranks."""
    buckets = recipe.Buckets(parts["train"].lengths, BUDGET, 8)
    steps = len(buckets) // PER_STEP
    plan = SimpleNamespace(
        effective_batch_size=PER_STEP * BUDGET, micro_batch_size=BUDGET, steps_per_epoch=steps, world_size=world_size
    )
    return [recipe.TokenSampler(plan, buckets, rank, seed) for rank in range(world_size)]


def drawn(sampler, step: int = 0) -> list[tuple]:
    """What a sampler yields from a step on: numbers, indices, and the numbers that the losses are divided by."""
    sampler.step = step
    return [(number, indices.tolist(), tokens) for number, (indices, tokens) in sampler]


# ---- the order


def test_order_and_buckets_are_a_pure_function_of_seed_and_epoch(recipe: ModuleType, parts: dict):
    (sampler,) = samplers(recipe, parts)
    steps = sampler.plan.steps_per_epoch
    torch.manual_seed(1), np.random.seed(1)
    first = drawn(sampler, 3 * steps)
    torch.manual_seed(2), np.random.seed(2)
    (other,) = samplers(recipe, parts)
    assert drawn(other, 3 * steps) == first != drawn(sampler, 4 * steps)
    assert drawn(samplers(recipe, parts, seed=43)[0], 3 * steps) != first


def test_an_epoch_has_each_sample_once_but_for_an_incomplete_step(recipe: ModuleType, parts: dict):
    """Over a few epochs all come, and no two are always together."""
    (sampler,) = samplers(recipe, parts)
    steps, lengths = sampler.plan.steps_per_epoch, parts["train"].lengths
    seen, together = set(), []
    for epoch in range(3):
        batches = [indices for _, indices, _ in drawn(sampler, epoch * steps)]
        flat = sum(batches, [])
        assert len(batches) == steps * PER_STEP and len(flat) == len(set(flat)) >= len(lengths) - 3 * 100
        seen |= set(flat)
        together.append({frozenset(batch) for batch in batches if len(batch) > 1})
    assert seen == set(range(len(lengths)))
    assert len(together[0] & together[1]) < 0.1 * len(together[0])


def test_a_micro_batch_keeps_to_the_budget_and_is_of_similar_lengths(recipe: ModuleType, parts: dict):
    (sampler,) = samplers(recipe, parts)
    lengths = parts["train"].lengths
    for _, indices, _ in drawn(sampler):
        assert len(indices) * lengths[indices].max() <= BUDGET
    shares = [lengths[indices].min() / lengths[indices].max() for _, indices, _ in drawn(sampler)]
    assert np.median(shares) > 0.85
    means = [lengths[indices].mean() for _, indices, _ in drawn(sampler)]
    assert abs(np.corrcoef(range(len(means)), means)[0, 1]) < 0.3  # short and long ones are mixed


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_micro_batches_on_any_number_of_devices(world_size: int, recipe: ModuleType, parts: dict):
    """All ranks have as many of them; and they have the same numbers, so the same dropout."""
    (alone,) = samplers(recipe, parts)
    expected = drawn(alone, 5)
    ranks = [drawn(sampler, 5) for sampler in samplers(recipe, parts, world_size)]
    assert [batch for turn in zip(*ranks, strict=True) for batch in turn] == expected


def test_a_resume_goes_on_with_the_micro_batches_that_are_left(recipe: ModuleType, parts: dict):
    (sampler,) = samplers(recipe, parts)
    whole = drawn(sampler)
    assert drawn(sampler, 7) == whole[7 * PER_STEP :]
    assert [number for number, _, _ in drawn(sampler, sampler.plan.steps_per_epoch)] == list(
        range(len(whole), 2 * len(whole))
    )


# ---- an evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 500, 1024, 100_000])
def test_an_evaluation_counts_each_sample_once(world_size: int, budget: int, recipe: ModuleType, parts: dict):
    """All ranks have equally many batches, none of them empty. A batch has the number of its tokens."""
    for count in (3, 4, 5, len(parts["val"])):
        lengths = parts["val"].lengths[-count:]
        ranks = recipe.token_eval_batches(lengths, int(lengths.sum()), budget, world_size)
        assert len(ranks) == world_size and len({len(batches) for batches in ranks}) == 1
        batches = [batch for turn in zip(*ranks, strict=True) for batch in turn]
        assert np.concatenate([indices for _, (indices, _) in batches]).tolist() == list(range(count))
        for number, (indices, tokens) in batches:
            assert number == indices[0] and tokens == lengths[indices].sum()
            assert len(indices) <= 2 or len(indices) * lengths[indices].max() <= budget


def test_a_limited_evaluation_has_samples_of_all_lengths(recipe: ModuleType, parts: dict):
    lengths = parts["val"].lengths
    (batches,) = recipe.token_eval_batches(lengths, int(lengths.sum()) // 4, BUDGET, 1)
    taken = np.concatenate([indices for _, (indices, _) in batches])
    assert len(set(taken)) == len(taken) == round(len(lengths) / 4)
    assert lengths[taken].mean() == pytest.approx(lengths.mean(), rel=0.1)
    assert recipe.token_eval_batches(lengths, 0, BUDGET, 2) == [[], []]


def test_fewer_samples_than_processes_are_refused(recipe: ModuleType):
    with pytest.raises(ValueError, match="2 samples are too few to evaluate on 3 processes"):
        recipe.token_eval_batches(np.array([5, 6]), 11, BUDGET, 3)


# ---- the programs


def token_losses(program: Path, model: torch.nn.Module, part, indices) -> torch.Tensor:
    """The loss of each token of these samples, one sample at a time."""
    losses = []
    with torch.no_grad():
        for index in indices:
            tokens = part[int(index)]
            losses.append(F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none"))
    return torch.cat(losses)


def test_it_learns_and_is_evaluated(program: Path, parts: dict, tmp_path: Path):
    """The perplexity is far below the 24 of the frequencies of single characters. Each sample counts by its tokens, on
    one process and on two; the predictions have it in its place."""
    options = "--accelerator cpu --epochs 1 --val_frequency 0.5 --width 64 --logger_name csv"
    call(f"{program}/train.py {options}", tmp_path)
    test = f"{program}/test.py --out_dir train_out --accelerator cpu"
    path = run_dir(tmp_path) / "test_test_best.json"
    results = []
    for command in (f"{test} --predictions", f"{test} --batch_size 700 {ON_2}"):
        run(command, tmp_path)
        results.append(json.loads(path.read_text()))
    model = imported(program, "model").Model(parts["test"].vocabulary_size, width=64).eval()
    model.load_state_dict(weights(tmp_path))
    losses = token_losses(program, model, parts["test"], range(len(parts["test"])))
    tenth = sum(map(len, parts.values())) // 10  # of the paragraphs that this version of Python has
    for report in results:
        assert report["num_samples"] == len(parts["test"]) == tenth
        assert report["results"]["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert report["results"]["perplexity"] == pytest.approx(math.exp(losses.mean().item()), rel=1e-4)
    assert 3 < results[0]["results"]["perplexity"] < 18
    means, counts = torch.load(run_dir(tmp_path) / "predictions_test_best.pt", weights_only=True)
    assert counts.tolist() == parts["test"].lengths.tolist()
    expected = torch.stack([part.mean() for part in losses.split(counts.tolist())])
    torch.testing.assert_close(means, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("devices", ["", ON_2])
def test_the_loss_of_a_step_is_the_mean_over_its_tokens(
    devices: str, program: Path, recipe: ModuleType, parts: dict, tmp_path: Path
):
    """So is its gradient. The mean of the means of its micro-batches would be another."""
    options = "--max_steps 1 --log_interval 1 --dropout 0 --base_lr 1e-30 --width 8"
    run(f"{program}/{LONG} {TOKENS} {options} {devices}", tmp_path)
    model = imported(program, "model").Model(parts["train"].vocabulary_size, width=8, dropout=0)
    model.load_state_dict(weights(tmp_path))  # as in the beginning
    (sampler,) = samplers(recipe, parts)
    batches = [indices for _, indices, _ in drawn(sampler)[:PER_STEP]]
    losses = []
    for index in sum(batches, []):
        tokens = parts["train"][index]
        losses.append(F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none"))
    mean = torch.cat(losses).mean()
    mean.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    (row,) = history(tmp_path)
    assert float(row["train/loss"]) == pytest.approx(mean.item(), rel=1e-6)
    assert float(row["train/grad_norm"]) == pytest.approx(norm.item(), rel=1e-4)
    sizes = [len(batch) for batch in batches]
    of_batches = torch.stack([torch.cat(losses[sum(sizes[:i]) :][: sizes[i]]).mean() for i in range(PER_STEP)])
    assert of_batches.mean().item() != pytest.approx(mean.item(), rel=1e-5)


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    """Also with data workers."""
    whole, _ = killed_and_resumed(f"{program}/{SHORT}", tmp_path)
    (tmp_path / "workers").mkdir()
    call(f"{program}/{SHORT} --num_workers 2", tmp_path / "workers")
    assert_same_run(tmp_path / "workers", whole)


@pytest.mark.parametrize("options", ["--num_workers 2", ON_2, f"{ON_2} --num_workers 2"])
def test_killed_and_resumed_with_workers_and_on_two_processes(options: str, program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{SHORT} {options}", tmp_path)


def test_two_processes_train_like_one(program: Path, tmp_path: Path):
    """With dropout, since the micro-batches are the same."""
    one, two = on_one_and_two(f"{program}/{SHORT} --epochs 2", tmp_path)
    assert_same_training(one, two)


@pytest.mark.parametrize("option", ["--micro_batch_size 2048", "--buckets 4"])
def test_a_resume_cannot_change_the_micro_batches(option: str, program: Path, tmp_path: Path):
    call(f"{program}/{SHORT} --max_steps 2", tmp_path)
    error = call(f"{program}/train.py --resume auto --max_steps 4 {option}", tmp_path, code=2).stderr
    assert f"{option}: a resume cannot change it" in error


def padding_of(program: Path, options: str, cwd: Path) -> float:
    """The share of padding, in percent, that the first lines tell."""
    printed = call(f"{program}/train.py --accelerator cpu --fast_run --width 4 {options}", cwd).stdout
    return float(re.search(r"micro-batches, of which (\S+)% is padding", printed)[1])


def test_buckets_save_nearly_all_padding(program: Path, recipe: ModuleType, parts: dict, tmp_path: Path):
    """The second run has as many samples in each micro-batch as the first on average. What is told is loaded."""
    told = padding_of(program, TOKENS, tmp_path)
    assert told < 4
    assert padding_of(program, "--buckets 0 --micro_batch_size 3072 --effective_batch_size 12288", tmp_path) > 50
    buckets = recipe.Buckets(parts["train"].lengths, BUDGET, 8)
    loaded = SeededBatches(parts["train"], 42)
    batches = [loaded[0, (indices, 1.0)][0][:, 1:] for indices in buckets.micro_batches(torch.Generator())]
    padding = sum(int((batch == 0).sum()) for batch in batches) / sum(batch.numel() for batch in batches)
    assert told == pytest.approx(100 * padding, abs=0.05)


def test_a_sample_beyond_the_budget_is_a_batch_of_its_own_and_told(
    program: Path, recipe: ModuleType, parts: dict, tmp_path: Path
):
    options = "--effective_batch_size 1200 --micro_batch_size 300 --limit_train_batches 2 --width 4"
    printed = call(f"{program}/train.py --accelerator cpu --fast_run {options}", tmp_path).stdout
    lengths = parts["train"].lengths
    long = int((lengths > 300).sum())
    assert f"; {long} samples are longer than --micro_batch_size, each is a micro-batch of its own\n" in printed
    batches = recipe.Buckets(lengths, 300, 8).micro_batches(torch.Generator())
    assert sum(len(batch) == 1 and lengths[batch[0]] > 300 for batch in batches) == long > 100
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))


def test_padding_changes_nothing(program: Path, parts: dict):
    model = imported(program, "model").Model(parts["train"].vocabulary_size, width=16).eval()
    train = parts["train"]
    tokens, _ = train.__getitems__((np.array([0, 800, 1600]), 1.0))
    assert tokens.shape == (3, train.lengths[1600] + 1)
    together = model(tokens[:, :-1])
    for row, index in enumerate([0, 800, 1600]):
        alone = model(train[index][None, :-1])[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-6, rtol=0)


def test_the_parts_share_no_paragraph(program: Path, parts: dict):
    train, val, test = ({tuple(sample.tolist()) for sample in part.samples} for part in parts.values())
    assert len(test) > 100 and not (train & val or train & test or val & test)
    for part in parts.values():
        assert (np.diff(part.lengths) >= 0).all() and part.lengths.max() == 512
