"""The scripts of benchmarks/ still run: a small part of each, whose times nobody reads. nanoGPT itself is not here:
where the programs of nanogpt.patch train, a smaller model takes the place of its model.py."""

import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    REPO,
    assert_same_training,
    call,
    checkpoint,
    imported,
    killed_and_resumed,
    on_one_and_two,
    rows,
    run,
    with_patch,
)

pytestmark = pytest.mark.recipes
BENCHMARKS = REPO / "benchmarks"
PACKAGES = ("lightning", "accelerate")
DATA = "data/shakespeare_char"
CHECKOUT = ["train.py", "model.py", "config/train_shakespeare_char.py", f"{DATA}/train.bin"]  # of nanoGPT, but for one


@pytest.mark.parametrize(
    "command, files, words",
    [
        ("gpu.py --cpu --steps 12", [], "--steps 12: must be a multiple of 8"),
        ("gpu.py --cpu --nanogpt {cwd}", ["train.py"], "--nanogpt {cwd}: model.py is not there: git clone"),
        (
            "nanogpt.py --nanogpt {cwd}",
            CHECKOUT,
            f"--nanogpt {{cwd}}: {DATA}/val.bin is not there: python {{cwd}}/{DATA}/prepare.py",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(command: str, files: list[str], words: str, tmp_path: Path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    done = run(f"{BENCHMARKS}/{command.format(cwd=tmp_path)}", tmp_path, code=1)
    assert done.stderr.startswith(words.format(cwd=tmp_path)) and done.stderr.count("\n") == 1 and not done.stdout


# ---- run.py, loader.py


def table(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if "|" in line][1:]


@pytest.mark.night
@pytest.mark.parametrize("work, peers", [("W1", "raw raw-batched lightning-batched"), ("W1v", "raw limit")])
def test_the_template_is_timed_beside_its_peers(work: str, peers: str, tmp_path: Path):
    command = f"{BENCHMARKS}/run.py --works {work} --peers {peers} --rounds 1 --python {sys.executable}"
    found = table(run(command, tmp_path).stdout)
    assert [row[:2] for row in found] == [[work, program] for program in ("template", *peers.split())]
    assert all(float(row[-1]) < 0.01 for row in found)  # each has learned the digits


def test_the_loader_is_timed_beside_that_of_torch(tmp_path: Path):
    command = f"{BENCHMARKS}/loader.py speed --kinds tensors --workers 0 --rounds 1"
    assert "tensors" in run(command, tmp_path).stdout


# ---- gpu.py, here on a CPU


@pytest.mark.night
def test_a_step_is_timed_beside_its_peers(tmp_path: Path):
    """In miniature. Each has trained."""
    printed = run(f"{BENCHMARKS}/gpu.py --cpu --rounds 1 --steps 80", tmp_path).stdout
    losses = dict(re.findall(r"^median +(\S.*?): .*loss (\d+\.\d+)", printed, re.MULTILINE))
    assert [*losses] == ["template", "raw", *filter(find_spec, PACKAGES)]
    assert all(float(loss) < 1 for loss in losses.values())
    for name in PACKAGES:
        assert (f"{name} is not installed" in printed) == (not find_spec(name))
    assert not [*tmp_path.iterdir()]


# ---- nanogpt.patch

MODEL = '''
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(nn.Module):
    """Predicts a character from the one before it. It is called like nanoGPT's model, and shares weights as it does."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.hidden = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.embedding.weight = self.head.weight

    def forward(self, idx, targets=None):
        logits = self.head(self.hidden(self.norm(self.embedding(idx))))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = with_patch(BENCHMARKS / "nanogpt.patch", tmp_path_factory.mktemp("program"))
    (folder / "model.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A text of seven characters in turn, as nanoGPT's prepare.py writes it."""
    folder = tmp_path_factory.mktemp("text")
    (np.arange(4000) % 7).astype(np.uint16).tofile(folder / "train.bin")
    (np.arange(1000) % 7).astype(np.uint16).tofile(folder / "val.bin")
    return folder


@pytest.fixture
def command(program: Path, text: Path) -> str:
    options = f"--config_path {program}/shakespeare.yaml --accelerator cpu --n_embd 8 --logger_name csv"
    return f"{program}/train.py {options} --data_dir {text}"


def test_windows_are_those_of_nanogpt_and_are_drawn_with_replacement(program: Path, text: Path):
    """A training window may begin at each character that has 64 after it; the windows of the validation predict each
    character once."""
    parts = imported(program, "characters").build_characters(str(text), 64)
    assert len(parts["train"]) == 4000 - 64 and len(parts["val"]) == 999 // 64
    train = parts["train"].__getitems__(np.array([0, 3935, 5]))
    assert train.tolist() == [[number % 7 for number in range(first, first + 65)] for first in (0, 3935, 5)]
    predicted = torch.cat([window[1:] for window in (parts["val"][index] for index in range(15))])
    assert predicted.tolist() == [number % 7 for number in range(1, 1 + 15 * 64)]
    assert {part.vocab_size for part in parts.values()} == {7}
    first, second = (parts["train"].order(epoch=0, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second) and len(first) == 3936
    assert len(first.unique()) / 3936 == pytest.approx(1 - math.exp(-1), abs=0.03)


def test_it_trains_with_the_settings_of_nanogpt(program: Path, command: str, tmp_path: Path):
    """The learning rate of its get_lr, and weight decay on matrices alone."""
    call(f"{command} --max_steps 300 --log_interval 1", tmp_path)
    history = rows(tmp_path)
    expected = [1e-3 * (step + 1) / 101 for step in range(100)]
    expected += [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 100) / 200)) for step in range(100, 300)]
    assert [row["lr"] for row in history] == pytest.approx(expected)
    assert history[-1]["val/loss"] < 0.7 * history[0]["train/loss"]
    groups = checkpoint(tmp_path, "best")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [tuple(group["betas"]) for group in groups] == [(0.9, 0.99)] * 2
    assert [len(group["params"]) for group in groups] == [2, 1]  # the head and the embedding are one
    printed = call(f"{program}/test.py --out_dir train_out --split val --accelerator cpu", tmp_path).stdout
    assert "on 15 val samples" in printed and f"loss {history[-1]['val/loss']:.5g}" in printed


def test_killed_and_resumed_is_the_same_run_and_two_processes_train_the_same(command: str, tmp_path: Path):
    killed_and_resumed(f"{command} --max_steps 400 --checkpoint_interval 2", tmp_path)
    assert_same_training(*on_one_and_two(f"{command} --warmup_epochs 0 --max_steps 50", tmp_path))
