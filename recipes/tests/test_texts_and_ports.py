"""The methods that read texts: bag_of_words, text_classification, language_model, token_batches. And the port of
word_language_model, and that of mnist. The losses of the originals are what originals.py has printed, by the commands
at its top, with torch 2.13.0 on one thread of a CPU. There the ports had the same in every digit; elsewhere the last
ones may differ."""

import gzip
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import LONG, ON_2, SMALL, call, execute, run_in
from copies import imported, imported_train, sizes_of_outputs, with_recipe
from edits import insert_after, insert_before
from mistakes import refuses
from outputs import checkpoint, predictions_of, results, rows, run_dir, weights
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from runtime.loader import TrainSampler

pytestmark = pytest.mark.recipes
needs_transformers = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")


@pytest.fixture(scope="module")
def bag(bag_of_words: Path, tmp_path_factory) -> Path:
    """Where a run with the defaults is finished."""
    return run_in(tmp_path_factory.mktemp("bag") / "cwd", f"{bag_of_words}/train.py --accelerator cpu")


def test_bag_of_words_model_pt_alone_takes_texts_as_they_were_written(bag_of_words: Path, bag, tmp_path, monkeypatch):
    """Without the data set. It finds the classes that test.py finds; its words are of the training texts."""
    for path in (bag_of_words / "classify.py", bag_of_words / "model.py", run_dir(bag) / "model.pt"):
        shutil.copy(path, tmp_path)
    results(bag_of_words, bag, "--checkpoint last --split test --predictions")
    logits, _ = predictions_of(bag)
    programs = imported_train(bag_of_words, monkeypatch)
    datasets = programs.build_datasets(programs.TrainConfig())
    texts = ["xyzzy", "", *(" ".join(words) for words, _ in datasets["test"].samples)]  # two without a known word
    for arguments, given in ((texts, ""), ([], "\n".join(texts))):
        command = [sys.executable, "classify.py", ".", *arguments]
        done = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[2:] == [datasets["test"].classes[index] for index in logits.argmax(1)]
    words = weights(bag)["_extra_state"].pop("words")
    assert {*words} <= {word for text, _ in datasets["train"].samples for word in text}


@pytest.mark.parametrize("command", ["train.py --resume auto --epochs 21", "test.py --accelerator cpu"])
def test_bag_of_words_weights_of_another_vocabulary_are_refused(command: str, bag: Path, tmp_path: Path):
    """One of the same size, which the shapes of the weights do not show."""
    other = with_recipe("bag_of_words", tmp_path / "other")
    insert_after(other, ("docstrings.py", "build_docstrings", "vocabulary = ..."), 'vocabulary[0] = "other"')
    refuses(f"{other}/{command}", bag, "words")


@needs_transformers
def test_text_classification_body_is_frozen_and_has_a_rate_of_its_own(tmp_path: Path):
    """Neither the weights of the body change in the first 4 of 6 steps nor what the optimizer knows of them, and it has
    no dropout, also after a validation. Two processes, where DDP would wait for the frozen gradients, are in the table
    of bf16-mixed in test_recipes.py."""
    program = with_recipe("text_classification", tmp_path / "program")
    modes = "assert (model.base_model.training, model.dropout.training) == (step > 4, True)"
    insert_after(program, "micro-batch is done", modes)
    options = "--epochs 1.5 --freeze_epochs 1 --weight_decay 0.5 --micro_batch_size 32 --val_interval 1"
    call(f"{program}/train.py {SMALL} {options} --checkpoint_interval 1 --num_checkpoint_keep 6", tmp_path)
    saved = {step: checkpoint(tmp_path, f"step-{step:08}") for step in range(1, 7)}
    body = [name for name in saved[1]["model"] if name.startswith("bert.")]
    for step in range(2, 7):
        model, before = saved[step]["model"], saved[step - 1]["model"]
        changed = [not torch.equal(model[name], before[name]) for name in body]
        assert not any(changed) if step <= 4 else all(changed), step
        assert not torch.equal(model["classifier.weight"], before["classifier.weight"])
        assert len(saved[step]["optimizer"]["state"]) == (2 if step <= 4 else 2 + len(body))
        head_lr, body_lr = (group["lr"] for group in saved[step]["optimizer"]["param_groups"])
        assert body_lr == 0.25 * head_lr > 0


@needs_transformers
def test_text_classification_padding_changes_nothing(text_classification: Path, monkeypatch: pytest.MonkeyPatch):
    programs = imported_train(text_classification, monkeypatch)
    train = programs.build_datasets(programs.TrainConfig())["train"]
    samples = sorted((train[index] for index in range(16)), key=lambda sample: len(sample[0]))
    model = programs.build_model(programs.TrainConfig(), train).eval()
    batch = train.collate_fn(samples)
    assert batch["input_ids"].shape == (16, len(samples[-1][0])) and len(samples[0][0]) < len(samples[-1][0])
    alone = torch.cat([model(**train.collate_fn([sample])).logits for sample in samples])
    torch.testing.assert_close(model(**batch).logits, alone, atol=1e-5, rtol=0)
    assert max(len(sample) for sample, _ in train) == train.max_length


@pytest.fixture
def model_py(language_model: Path) -> ModuleType:
    return imported(language_model, "model")


def test_language_model_logs_tokens_per_second_and_mfu(language_model: Path, model_py: ModuleType, tmp_path: Path):
    """The MFU is a share of what both devices can do."""
    command = f"{language_model}/train.py {SMALL} --max_steps 8 --micro_batch_size 32 --peak_tflops 0.002 {ON_2}"
    flops = model_py.flops_per_token(model_py.Model(width=4))
    for row in rows(run_in(tmp_path / "cwd", command)):
        assert row["tokens_per_second"] == pytest.approx(model_py.LENGTH * row["samples_per_second"], 1e-5)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 0.002e12 / 2, 1e-5)


def test_language_model_operations_per_token_are_those_that_torch_counts(model_py: ModuleType):
    """Forward and backward. The formula also counts biases and norms, 6 for each of their weights."""
    model = model_py.Model(16)
    tokens = torch.randint(256, (2, model_py.LENGTH))
    # The fused attention of the CPU is not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)[0].backward()
    others = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    expected = counter.get_total_flops() / tokens.numel() + 6 * others
    assert model_py.flops_per_token(model) == pytest.approx(expected, 1e-6)


def test_language_model_training_gets_the_loss_of_the_logits_without_the_logits(language_model: Path, monkeypatch):
    """Of all tensors they would take the most memory. A validation has a metric that needs them. No token is predicted
    from itself or a later one."""
    train = imported_train(language_model, monkeypatch)
    model = train.Model(width=16, dropout=0.0)
    batch = torch.randint(256, (2, 65))
    assert sizes_of_outputs(train.compute_loss, model, batch) == [()]
    in_training, _, _ = train.compute_loss(model, batch, None)
    values, count, (logits, targets) = train.compute_loss(model.eval(), batch, None)
    assert values["loss"] == in_training["loss"] == F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert count == 2 and torch.equal(targets, batch[:, 1:])
    tokens, changed = torch.arange(8)[None], torch.tensor([[0, 1, 2, 3, 4, 9, 6, 7]])
    difference = (model(tokens)[1] - model(changed)[1]).abs().amax(dim=(0, 2))
    assert difference[:5].max() == 0 < difference[5:].min()
    loss, _ = model.bfloat16()(batch[:, :-1], targets)
    assert loss.dtype == torch.float32  # not rounded


def test_language_model_parts_share_no_paragraph_and_each_byte_is_trained_on(language_model: Path, monkeypatch):
    train = imported_train(language_model, monkeypatch)
    parts = train.build_datasets(train.TrainConfig())
    of_train, of_val, of_test = ({*part.text.split(b"\n\n")[1:-1]} for part in parts.values())
    assert len(of_test) > 100 and not (of_train & of_val or of_train & of_test or of_val & of_test)
    starts = torch.stack([parts["train"][1] for _ in range(500)])
    assert 50 < len(starts.unique(dim=0)) <= 64  # shifts
    assert parts["val"][1][0] == parts["val"][0][-1]  # which is a target alone there


@pytest.fixture(scope="module")
def parts(token_batches: Path) -> dict:
    return imported(token_batches, "paragraphs").build_paragraphs()


def epoch_of(train, epoch: int) -> list[np.ndarray]:
    """The sequences of each batch of an epoch, in their order."""
    sizes = {"effective_batch_size": 1, "micro_batch_size": 1, "last_batch_size": 1}
    plan = SimpleNamespace(steps_per_epoch=len(train), world_size=1, **sizes)
    sampler = TrainSampler(plan, train, rank=0, seed=42, step=epoch * len(train))
    indices = [index for _, (index,) in sampler]
    return [train.batches_of(int(index) // len(train))[index % len(train)] for index in indices]


def test_token_batches_of_an_epoch_have_each_sequence_once_and_keep_to_the_budget(token_batches: Path, parts: dict):
    """A longer sequence is alone. They are of similar lengths, mixed, and no two sequences are always together."""
    train = imported(token_batches, "token_batches").TokenBatches(parts["train"], 300)
    lengths, together = train.sequences.lengths, []
    for epoch in range(2):
        batches = epoch_of(train, epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(train.sequences)))
        together.append({frozenset(batch.tolist()) for batch in batches if len(batch) > 1})
    assert len(together[0] & together[1]) < 0.1 * len(together[0])
    found = [lengths[batch] for batch in batches]
    assert all(len(batch) * batch.max() <= 300 or len(batch) == 1 for batch in found)
    assert np.median([batch.min() / batch.max() for batch in found]) > 0.85
    means = [batch.mean() for batch in found]
    assert abs(np.corrcoef(range(len(means)), means)[0, 1]) < 0.3


def losses_of(model: torch.nn.Module, sequences, indices) -> list[torch.Tensor]:
    """The losses of the tokens of each of these sequences, one sequence at a time."""
    samples = (sequences.samples[index] for index in indices)
    return [model(tokens[None, :-1], tokens[None, 1:])[0] for tokens in samples]


def test_token_batches_model_returns_the_losses_of_its_logits_without_the_logits(token_batches, parts, monkeypatch):
    """Of all tensors they would take the most memory. No metric needs them."""
    train = imported_train(token_batches, monkeypatch)
    model = train.Model(256, width=8, dropout=0)
    batch = parts["train"].__getitems__(np.arange(3))
    tokens, targets = batch[0][:, :-1], batch[0][:, 1:]
    assert sizes_of_outputs(train.compute_loss, model, batch) == [targets.shape]
    logits = []
    with model.head.register_forward_hook(lambda module, given, output: logits.append(output)):
        losses = model(tokens, targets)
    torch.testing.assert_close(losses, F.cross_entropy(logits[0].transpose(1, 2), targets, reduction="none"))


def test_token_batches_count_each_sample_by_its_tokens(token_batches: Path, parts: dict, tmp_path: Path):
    """On one process and on two; the predictions have it in its place, and padding changes nothing."""
    call(f"{token_batches}/train.py {SMALL} --width 8", tmp_path)
    model = imported(token_batches, "model").Model(256, width=8).eval()
    model.load_state_dict(weights(tmp_path))
    with torch.no_grad():
        losses = losses_of(model, parts["test"], range(len(parts["test"])))
    mean = torch.cat(losses).mean().item()
    for options in ("", f"--batch_size 7 {ON_2}"):
        found = results(token_batches, tmp_path, f"--checkpoint last --split test --predictions {options}")
        assert found["loss"] == pytest.approx(mean, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
        means, counts = predictions_of(tmp_path)
        assert counts.tolist() == parts["test"].lengths.tolist() and len(counts) > 100
        torch.testing.assert_close(means, torch.stack([loss.mean() for loss in losses]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [ON_2, "--micro_batch_size 2"])
def test_token_batches_give_each_token_the_same_weight(options: str, token_batches: Path, parts, tmp_path):
    """In the loss of a step and in its gradient."""
    small = "--effective_batch_size 4 --micro_batch_size 1 --max_steps 1 --log_interval 1 --dropout 0 --width 8"
    execute(f"{token_batches}/{LONG} {small} --base_lr 1e-30 {options}", tmp_path)
    model = imported(token_batches, "model").Model(256, width=8, dropout=0)
    model.load_state_dict(weights(tmp_path))  # as in the beginning
    train = imported(token_batches, "token_batches").TokenBatches(parts["train"], 1024)
    first = np.concatenate(epoch_of(train, 0)[:4])
    per_batch = train.sequences.lengths.sum() / len(train)
    loss = torch.cat(losses_of(model, train.sequences, first)).sum() / (4 * per_batch)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    (row,) = rows(tmp_path)
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


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


def test_mnist_has_the_losses_of_the_original(digits: Path, tmp_path: Path):
    """It reads plain and compressed files."""
    program = with_recipe("mnist", tmp_path / "program")
    in_order = "def order(self, epoch, generator):\n    return torch.arange(len(self))\n"
    insert_before(program, "length of data", in_order)  # main.py does not shuffle on a CPU
    files = Path(shutil.copytree(digits, tmp_path / "files"))
    for path in files.glob("*images*"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    options = "--seed 1 --epochs 2 --log_interval 1 --logger_name csv"
    found = rows(run_in(tmp_path / "cwd", f"{program}/train.py --accelerator cpu --data_dir {files} {options}"))
    assert [row["train/loss"] for row in found] == pytest.approx(MNIST_LOSSES, **SAME)
    assert [row["lr"] for row in found] == 4 * [1.0] + 4 * [0.7]
    of_epochs = [found[3], found[7]]  # what main.py prints of its test set
    assert [f"{row['val/loss']:.4f}" for row in of_epochs] == ["2.1126", "1.9560"]
    assert [row["val/accuracy"] for row in of_epochs] == pytest.approx([24 / 80, 18 / 80])


def test_word_language_model_has_the_losses_and_perplexities_of_the_original(word_language_model, text, tmp_path):
    """That of the test set is of the whole text, in test.py."""
    options = "--seed 1111 --epochs 4 --width 16 --bptt 20 --log_interval 1 --logger_name csv"
    monitor = "--monitor val/perplexity --monitor_mode min"
    call(f"{word_language_model}/train.py --accelerator cpu --data_dir {text} {options} {monitor}", tmp_path)
    found = rows(tmp_path)
    assert [row["train/loss"] for row in found] == pytest.approx(WORD_LOSSES, **SAME)
    assert [row["lr"] for row in found] == 33 * [20.0] + 11 * [5.0]
    perplexities = [f"{row['val/perplexity']:.2f}" for row in found if "val/loss" in row]
    assert perplexities == ["43.90", "43.35", "43.55", "39.12"]  # as main.py prints them
    assert checkpoint(tmp_path, "best")["step"] == 44
    tested = results(word_language_model, tmp_path, "--checkpoint best --split test")["perplexity"]
    assert f"{tested:.2f}" == "38.72"  # of main.py
