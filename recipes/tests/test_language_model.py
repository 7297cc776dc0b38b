"""recipes/methods/language_model.patch: applied to a copy of the programs and run."""

import csv
import json
import math
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    imported,
    imported_train,
    interrupt,
    kill_group,
    on_one_and_two,
    run,
    run_dir,
    sizes_of_outputs,
    with_recipe,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("language_model", tmp_path_factory.mktemp("program"))


@pytest.fixture
def topics(program: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "model", imported(program, "model"))  # which it imports
    return imported(program, "topics")


def drawn(out: str) -> str:
    """The end of the 200 bytes that were printed as text at the last validation."""
    return out.partition("\nfinished after")[0][-150:]


def test_it_learns_and_is_evaluated(program: Path, topics: ModuleType, tmp_path: Path):
    """Far below the 26 of the frequencies of single bytes; far above 1, where the targets were the inputs."""
    options = "--accelerator cpu --max_steps 80 --val_interval 40 --limit_val_batches 2 --logger_name csv"
    out = call(f"{program}/train.py {options}", tmp_path).stdout
    assert "best val/loss" in out and "val/perplexity" in out and 10 < drawn(out).count(" ") < 80
    report = call(f"{program}/test.py --out_dir train_out --accelerator cpu", tmp_path).stdout
    results = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())["results"]
    samples = len(topics.build_topics(augment=False)["test"])  # depends on the version of Python
    assert 3 < results["perplexity"] < 15 and f"on {samples} test samples" in report and "class" not in report
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]), 1e-4)


def test_the_baseline_is_smoothed_as_in_the_paper(topics: ModuleType):
    """By hand. After "a" came "a" and "b", once each."""
    of_a, of_b, of_c = (2 + 2 / 256) / 5, (1 + 2 / 256) / 5, 2 / 256 / 5
    of_b_after_a = (1 + 2 * of_b) / (2 + 2)
    assert topics.ngram_perplexity(b"aab", b"a", 1) == pytest.approx(1 / of_a)
    assert topics.ngram_perplexity(b"aab", b"ab", 2) == pytest.approx((of_a * of_b_after_a) ** -0.5)
    assert topics.ngram_perplexity(b"aab", b"cb", 2) == pytest.approx((of_c * of_b) ** -0.5)  # "c" is new
    of_every_byte = [1 / topics.ngram_perplexity(b"aab", bytes([byte]), 1) for byte in range(256)]
    assert sum(of_every_byte) == pytest.approx(1)


def test_the_baselines_are_printed(program: Path, tmp_path: Path):
    """Five bytes are the best table; the text depends on the version of Python."""
    lines = run(f"{program}/topics.py", tmp_path).stdout.splitlines()
    found = {line.partition(":")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert [*found] == [f"{order}-gram" for order in range(2, 7)]
    assert min(found.values()) == found["5-gram"] < 5 and found["2-gram"] > 10


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    command = f"{program}/{LONG} --epochs 8 --val_frequency 4"
    whole, cwd = tmp_path / "whole", tmp_path / "cwd"
    whole.mkdir()
    cwd.mkdir()
    expected = drawn(call(command, whole).stdout)
    assert interrupt(command, cwd, kill_group).returncode == -signal.SIGKILL
    assert drawn(call(f"{program}/train.py --resume auto", cwd).stdout) == expected
    assert_same_run(cwd, whole)


def test_two_processes_train_the_same_model(program: Path, tmp_path: Path):
    """And all of them go through the text, though one prints it: none waits for another."""
    command = f"{program}/train.py {SMALL} --epochs 3 --val_frequency 3 --micro_batch_size 32"
    assert_same_training(*on_one_and_two(command, tmp_path))


def rows(cwd: Path) -> list[dict]:
    """Those of metrics.csv, with what is measured."""
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_tokens_per_second_and_mfu_are_logged(program: Path, tmp_path: Path):
    """The MFU only with a peak. It is a share of what both devices can do."""
    command = f"{program}/train.py {SMALL} --epochs 2 --val_frequency 2"
    folders = on_one_and_two(f"{command} --micro_batch_size 32 --peak_tflops 0.002", tmp_path)
    model_py = imported(program, "model")
    flops = model_py.flops_per_token(model_py.Model(width=4))
    for num_devices, folder in enumerate(folders, start=1):
        for row in rows(folder):
            tokens = float(row["tokens_per_second"])
            assert tokens == pytest.approx(model_py.LENGTH * float(row["samples_per_second"]), 1e-5)
            assert float(row["mfu"]) == pytest.approx(tokens * flops / 0.002e12 / num_devices, 1e-5)
    (tmp_path / "without").mkdir()
    call(command, tmp_path / "without")
    assert all("tokens_per_second" in row and "mfu" not in row for row in rows(tmp_path / "without"))
    error = call(f"{command} --peak_tflops -1", tmp_path, code=2).stderr
    assert error == "train.py: error: --peak_tflops -1.0: must be at least 0\n"


@pytest.mark.parametrize("width, length", [(64, 64), (16, 256)])
def test_the_operations_per_token_are_those_that_torch_counts(width: int, length: int, program: Path, monkeypatch):
    """Forward and backward. The formula also counts biases and norms, 6 for each of their weights."""
    model_py = imported(program, "model")
    monkeypatch.setattr(model_py, "LENGTH", length)
    model = model_py.Model(width)
    tokens = torch.randint(256, (2, length))
    # The fused attention of the CPU is not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)[0].backward()
    others = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    expected = counter.get_total_flops() / tokens.numel() + 6 * others
    assert model_py.flops_per_token(model) == pytest.approx(expected, 1e-6)


def test_the_training_gets_the_loss_of_the_logits_without_the_logits(program: Path, monkeypatch):
    """Of all tensors they would take the most memory. A validation has a metric that needs them."""
    train = imported_train(program, monkeypatch)
    model = train.Model(width=16, dropout=0.0)
    batch = torch.randint(256, (2, 65))
    assert sizes_of_outputs(train.compute_loss, model, batch) == [()]
    in_training, _, _ = train.compute_loss(model, batch, None)
    model.eval()
    assert sizes_of_outputs(train.compute_loss, model, batch) == [(), (2, 64, 256)]
    values, count, (logits, targets) = train.compute_loss(model, batch, None)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert values["loss"] == in_training["loss"] == expected
    assert count == 2 and torch.equal(targets, batch[:, 1:])


def test_the_loss_is_not_rounded_to_bfloat16(program: Path):
    model = imported(program, "model").Model(width=16).bfloat16()
    loss, _ = model(*torch.randint(256, (2, 2, 64)))
    assert loss.dtype == torch.float32


def test_no_token_is_predicted_from_itself_or_a_later_one(program: Path):
    model = imported(program, "model").Model(width=16).eval()
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 9
    difference = (model(tokens)[1] - model(changed)[1]).abs().amax(dim=(0, 2))
    assert difference[:5].max() == 0 < difference[5:].min()


def test_text_is_drawn_from_what_the_model_predicts(program: Path, monkeypatch):
    class Successor(torch.nn.Module):
        def forward(self, tokens):
            assert tokens.shape == (1, 4) and not self.training
            return None, 100.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10)

    model_py = imported(program, "model")
    monkeypatch.setattr(model_py, "LENGTH", 4)
    drawn = model_py.generate(model := Successor(), torch.tensor([0, 0, 0, 0, 7]), 5)
    assert drawn.tolist() == [8, 9, 0, 1, 2] and model.training


def test_the_parts_share_no_paragraph_and_each_byte_is_trained_on(topics: ModuleType):
    parts = topics.build_topics(augment=True)
    train, val, test = ({*part.text.split(b"\n\n")[1:-1]} for part in parts.values())
    assert len(test) > 100 and not (train & val or train & test or val & test)
    starts = torch.stack([parts["train"][1] for _ in range(500)])
    assert 50 < len(starts.unique(dim=0)) <= 64  # shifts
    lengths = {len(part[index]) for part in parts.values() for index in (0, len(part) - 1) for _ in range(100)}
    assert lengths == {topics.LENGTH + 1}
    assert bytes(parts["val"][0].tolist()) == parts["val"].text[: topics.LENGTH + 1]
    torch.testing.assert_close(parts["val"][1][0], parts["val"][0][-1])  # which is a target alone there
