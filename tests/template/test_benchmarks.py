"""The scripts of benchmarks/ still run: a small part of each, whose times nobody reads. nanoGPT itself is not here:
where the programs of nanogpt.patch train, a smaller model takes the place of its model.py."""

import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from commands import REPO, call, run
from copies import with_patch
from outputs import checkpoint, rows

pytestmark = pytest.mark.recipes
BENCHMARKS = REPO / "benchmarks"


# ---- run.py, loader.py


@pytest.mark.night
@pytest.mark.parametrize("work, peers", [("W1", "raw raw-batched lightning-batched"), ("W1v", "raw limit")])
def test_the_template_is_timed_beside_its_peers(work: str, peers: str, tmp_path: Path):
    command = f"{BENCHMARKS}/run.py --works {work} --peers {peers} --rounds 1 --python {sys.executable}"
    lines = run(command, tmp_path).stdout.splitlines()
    _, *found = ([cell.strip() for cell in line.split("|")] for line in lines if "|" in line)
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
    assert [*losses] == ["template", "raw", *filter(find_spec, ("lightning", "accelerate"))]
    assert all(float(loss) < 1 for loss in losses.values())
    assert not [*tmp_path.iterdir()]


# ---- nanogpt.patch

MODEL = '''
from collections import namedtuple

import torch.nn.functional as F
from torch import nn

GPTConfig = namedtuple("GPTConfig", "block_size vocab_size n_layer n_head n_embd dropout bias")


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


def test_it_trains_with_the_settings_of_nanogpt(tmp_path: Path):
    """The learning rate of its get_lr, and weight decay on matrices alone. The text is seven characters in turn, as
    nanoGPT's prepare.py writes it."""
    program = with_patch(BENCHMARKS / "nanogpt.patch", tmp_path / "program")
    (program / "model.py").write_text(MODEL)
    for part, length in (("train", 4000), ("val", 1000)):
        (np.arange(length) % 7).astype(np.uint16).tofile(program / f"{part}.bin")
    options = f"--config_path {program}/shakespeare.yaml --accelerator cpu --n_embd 8 --logger_name csv"
    call(f"{program}/train.py {options} --data_dir {program} --max_steps 300 --log_interval 1", tmp_path)
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
