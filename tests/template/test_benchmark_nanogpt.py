"""benchmarks/nanogpt.py and its patch; GPT-2 in benchmarks/gpu.py. nanoGPT itself is not here: where the patched
programs train, a smaller model takes the place of its model.py. `benchmarks/nanogpt.py --check` compares with nanoGPT's
own losses."""

import importlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import (
    REPO,
    assert_same_training,
    call,
    history,
    imported,
    imported_train,
    killed_and_resumed,
    needs_recipes,
    on_one_and_two,
    run,
    run_dir,
    sizes_of_outputs,
    with_patch,
)

PATCH = REPO / "benchmarks" / "nanogpt.patch"
PAGE = REPO / "benchmarks" / "README.md"
DATA = "data/shakespeare_char"
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
    folder = with_patch(PATCH, tmp_path_factory.mktemp("program"))
    (folder / "model.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A text of seven characters in turn, as nanoGPT's prepare.py writes it."""
    folder = tmp_path_factory.mktemp("text")
    (np.arange(4000) % 7).astype(np.uint16).tofile(folder / "train.bin")
    (np.arange(1000) % 7).astype(np.uint16).tofile(folder / "val.bin")
    return folder


def options(program: Path, text: Path) -> str:
    return f"--config_path {program}/shakespeare.yaml --data_dir {text} --accelerator cpu --n_embd 8 --logger_name csv"


# ---- the patch


@needs_recipes
def test_check_recipes_knows_the_patch_and_the_page_counts_its_lines_as_it_does():
    checked = run("tools/check_recipes.sh", REPO).stdout
    files, lines = re.search(r"applies: benchmarks/nanogpt.patch  \((\d+) files, (\d+) lines\)", checked).groups()
    assert f"{lines} lines in {files} files" in " ".join(PAGE.read_text().split())


# ---- mistakes on the command line


CHECKOUT = ["train.py", "model.py", "config/train_shakespeare_char.py", f"{DATA}/train.bin"]


@pytest.mark.parametrize(
    "files, options, line",
    [
        ([], "", "--nanogpt {checkout}: train.py is not there: git clone https://github.com/karpathy/nanoGPT"),
        (CHECKOUT, "", f"--nanogpt {{checkout}}: {DATA}/val.bin is not there: python {{checkout}}/{DATA}/prepare.py"),
        (
            [*CHECKOUT, f"{DATA}/val.bin"],
            "--max_iters 300",
            "--max_iters 300: must be a multiple of 250, after which nanoGPT saves",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(files: list[str], options: str, line: str, tmp_path: Path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    done = run(f"benchmarks/nanogpt.py --nanogpt {tmp_path} {options}", tmp_path, code=1)
    assert done.stderr == f"{line.format(checkout=tmp_path)}\n" and not done.stdout


def test_a_checkout_that_is_not_one_is_told_by_the_timing_of_a_gpu(tmp_path: Path):
    (tmp_path / "train.py").touch()
    done = run(f"benchmarks/gpu.py --nanogpt {tmp_path} --cpu", tmp_path, code=1)
    line = f"--nanogpt {tmp_path}: model.py is not there: git clone https://github.com/karpathy/nanoGPT"
    assert done.stderr == f"{line}\n" and not done.stdout


# ---- the edited programs


@pytest.mark.recipes
def test_windows_are_those_of_nanogpt(program: Path, text: Path):
    """A training window may begin at each character that has 64 after it; the windows of the validation predict each
    character once."""
    parts = imported(program, "characters").build_characters(str(text), 64)
    assert len(parts["train"]) == 4000 - 64 and len(parts["val"]) == 999 // 64
    train = parts["train"].__getitems__(np.array([0, 3935, 5]))
    assert train.tolist() == [[number % 7 for number in range(first, first + 65)] for first in (0, 3935, 5)]
    predicted = torch.cat([window[1:] for window in (parts["val"][index] for index in range(15))])
    assert predicted.tolist() == [number % 7 for number in range(1, 1 + 15 * 64)]
    assert {part.vocab_size for part in parts.values()} == {7}


@pytest.mark.recipes
def test_each_character_is_predicted_from_those_before_it(program: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    class Successor(torch.nn.Module):
        def forward(self, characters, targets):
            logits = 100.0 * F.one_hot((characters + 1) % 7, 7)
            return F.cross_entropy(logits.flatten(0, 1), targets.view(-1))

    windows = imported(program, "characters").build_characters(str(text), 64)["val"].__getitems__(np.array([0, 1]))
    values, count, _ = imported_train(program, monkeypatch).compute_loss(Successor(), windows, config=None)
    assert values["loss"] < 1e-6 and count == 2


@pytest.mark.recipes
def test_the_model_is_that_of_nanogpt_and_returns_the_loss_without_the_logits(program: Path, text: Path, monkeypatch):
    """Of all tensors they would take the most memory, and there is no metric."""
    characters = imported(program, "characters").build_characters(str(text), 64)["val"]
    train = imported_train(program, monkeypatch)
    config = importlib.import_module("config").TrainConfig(n_embd=8)
    model = train.build_model(config, characters)
    batch = characters.__getitems__(np.array([0, 1, 2]))
    assert sizes_of_outputs(train.compute_loss, model, batch) == [()]
    assert sizes_of_outputs(train.compute_loss, model.eval(), batch) == [()]
    original = train.GPT(train.GPTConfig(64, 7, 4, 4, 8, dropout=0.0, bias=False))
    original.load_state_dict(model.state_dict())
    logits, loss = original(batch[:, :-1], batch[:, 1:].contiguous())
    assert train.compute_loss(model, batch, config)[0]["loss"] == loss


@pytest.mark.recipes
def test_windows_are_drawn_with_replacement(program: Path, text: Path):
    train = imported(program, "characters").build_characters(str(text), 64)["train"]
    first, second = (train.order(epoch=0, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second) and len(first) == len(train)
    assert len(first.unique()) / len(train) == pytest.approx(1 - math.exp(-1), abs=0.03)


@pytest.mark.recipes
def test_it_trains_with_the_settings_of_nanogpt(program: Path, text: Path, tmp_path: Path):
    """The learning rate of its get_lr, and weight decay on matrices alone."""
    call(f"{program}/train.py {options(program, text)} --max_steps 300 --log_interval 1", tmp_path)
    rows = history(tmp_path)
    expected = [1e-3 * (step + 1) / 101 for step in range(100)]
    expected += [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 100) / 200)) for step in range(100, 300)]
    assert [float(row["lr"]) for row in rows] == pytest.approx(expected)
    assert float(rows[-1]["val/loss"]) < 0.7 * float(rows[0]["train/loss"])
    checkpoint = torch.load(run_dir(tmp_path) / "checkpoints" / "best.ckpt", weights_only=True)
    groups = checkpoint["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [tuple(group["betas"]) for group in groups] == [(0.9, 0.99)] * 2
    assert [len(group["params"]) for group in groups] == [2, 1]  # the head and the embedding are one
    printed = call(f"{program}/test.py --out_dir train_out --split val --accelerator cpu", tmp_path).stdout
    assert "on 15 val samples" in printed and f"loss {float(rows[-1]['val/loss']):.5g}" in printed


@pytest.mark.recipes
def test_killed_and_resumed_is_the_same_run(program: Path, text: Path, tmp_path: Path):
    command = f"{program}/train.py {options(program, text)} --max_steps 400 --checkpoint_interval 2"
    killed_and_resumed(command, tmp_path)


@pytest.mark.recipes
def test_two_processes_train_the_same_model(program: Path, text: Path, tmp_path: Path):
    command = f"{program}/train.py {options(program, text)} --warmup_epochs 0 --max_steps 50"
    assert_same_training(*on_one_and_two(command, tmp_path))


@pytest.mark.recipes
def test_text_that_is_not_there_is_one_line(program: Path, tmp_path: Path):
    error = call(f"{program}/train.py --config_path {program}/shakespeare.yaml", tmp_path, code=2).stderr
    assert "--data_dir" in error and "train.bin" in error


@pytest.mark.recipes
def test_the_options_are_those_of_the_command_in_the_readme_of_nanogpt(program: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    command = dict(re.findall(r"--(\w+)=(\S+)", " ".join(importlib.import_module("nanogpt").NANOGPT)))
    chosen = yaml.safe_load((program / "shakespeare.yaml").read_text())
    same = {name: command[name] for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout")}
    assert {name: str(chosen[name]) for name in same} == same
    assert chosen["effective_batch_size"] == int(command["batch_size"])
    assert chosen["limit_train_batches"] * chosen["epochs"] == int(command["max_iters"])


# ---- GPT-2

# As nanoGPT's train.py prints its steps. They take 1 ms, 2 ms, ...
PRINTED = """
import sys

options = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
sizes = [options[name] for name in ("block_size", "batch_size", "gradient_accumulation_steps", "compile")]
assert sizes == ["64", "4", "2", "False"], sizes
for step in range(int(options["max_iters"]) + 1):
    print(f"iter {step}: loss 9.5000, time {step + 1:.2f}ms, mfu -100.00%")
"""


@pytest.mark.night
def test_gpt2_is_timed_beside_its_peers(tmp_path: Path):
    """In miniature. The losses are those of 50,304 tokens that are nearly as frequent as each other."""
    for name, text in {"train.py": PRINTED, "model.py": MODEL, "configurator.py": ""}.items():
        (tmp_path / name).write_text(text)
    printed = run(f"benchmarks/gpu.py --nanogpt {tmp_path} --cpu --rounds 1 --steps 16", tmp_path).stdout
    losses = dict(re.findall(r"^median +(\S.*?): .*loss (\d+\.\d+)", printed, re.MULTILINE))
    peers = [name for name in ("lightning", "accelerate") if importlib.util.find_spec(name)]
    assert [*losses] == ["template", "--deterministic False", "nanogpt", *peers]
    assert all(9 < float(loss) < 11 for loss in losses.values())
    assert (
        "nanogpt: 10.500 ms per step, loss 9.5000; template / nanogpt" in printed
    )  # windows of 2 of the steps 5 to 16
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "model.py", "configurator.py"}
