"""A step of GPT-2 with 124 million weights, by the template, nanoGPT's own train.py, Lightning's Trainer and
accelerate: nanoGPT's model, 4 micro-batches of 16 sequences of 1,024 tokens, bf16, torch.compile, gradients clipped to
a norm of 1. Each runs in a process of its own, in turn; medians of windows of 10 steps. Prints only.

git clone https://github.com/karpathy/nanoGPT
python benchmarks/gpt2.py --nanogpt nanoGPT                                # on a GPU
python benchmarks/gpt2.py --nanogpt nanoGPT --cpu --rounds 1 --steps 8     # a miniature, without a GPU

The template is a copy with nanogpt.patch. It also runs with `--deterministic False`, since the others do not ask for
deterministic algorithms. All train with the options of gpt2.yaml, on random tokens. The checkout stays as it is.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import timed
import torch
import yaml
from nanogpt import copy_template
from timed import WINDOWS, Clock, Work
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

HERE = Path(__file__).resolve().parent
VOCABULARY = 50304  # nanoGPT's default: the 50,257 tokens of GPT-2, rounded up
BETAS = (0.9, 0.99)  # as in nanogpt.patch
MODEL = ("block_size", "n_layer", "n_head", "n_embd", "dropout")
TINY = {"block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64, "compile": "none"}
TINY |= {"effective_batch_size": 8, "micro_batch_size": 4}
# Runs nanoGPT's train.py as it is, and prints what it does not.
NANOGPT = """
import runpy, torch
runpy.run_path("train.py", run_name="__main__")
print("peak", torch.cuda.max_memory_allocated())
"""


def write_tokens(data: Path, count: int):
    """Random tokens as train.bin and val.bin. As in a language, few are frequent and most are rare."""
    generator = np.random.default_rng(0)
    for name in ("train.bin", "val.bin"):
        tokens = (generator.zipf(1.2, count) % VOCABULARY).astype(np.uint16)
        tokens[-1] = VOCABULARY - 1  # the template counts the tokens up to the largest
        tokens.tofile(data / name)


# ---- Lightning's Trainer and accelerate


class Windows(Dataset):
    """Sequences of tokens, each with those that are to be predicted."""

    def __init__(self, path: Path, length: int):
        self.tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) - self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        end = index + self.length
        return self.tokens[index:end], self.tokens[index + 1 : end + 1]


def loss_of(model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits, loss = model(tokens, targets)
    return loss


def build_work(peer: str, checkout: Path, data: Path, config: dict, device: str) -> Work:
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig

    torch.manual_seed(config["seed"])
    torch.set_float32_matmul_precision("high")
    model = GPT(GPTConfig(**{name: config[name] for name in MODEL}, vocab_size=VOCABULARY, bias=False))
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim >= 2]},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    fused = peer != "lightning"  # in bf16-mixed it refuses to clip the gradients of a fused optimizer
    decay = config["weight_decay"]
    windows = Windows(data / "train.bin", config["block_size"])
    sampler = RandomSampler(windows, replacement=True)  # as nanoGPT draws them
    batch_size = config["micro_batch_size"]
    return Work(
        model=model,
        optimizer=torch.optim.AdamW(groups, config["base_lr"], betas=BETAS, weight_decay=decay, fused=fused),
        loader=DataLoader(windows, batch_size, sampler=sampler, num_workers=2, pin_memory=device == "cuda"),
        loss=loss_of,
        device=device,
        precision=config["precision"],
        compile=config["compile"] != "none",
        accumulation=config["effective_batch_size"] // batch_size,
        max_norm=config["max_grad_norm"],
    )


# ---- nanoGPT


def figures_of_nanogpt(checkout: Path, data: Path, config: dict, device: str, steps: int) -> dict:
    """It prints the time of each step, and reads the loss for it. Before the first step it evaluates."""
    options = {name: config[name] for name in (*MODEL, "weight_decay")}
    options |= {"batch_size": config["micro_batch_size"], "compile": config["compile"] != "none", "device": device}
    options["gradient_accumulation_steps"] = config["effective_batch_size"] // config["micro_batch_size"]
    options |= {"learning_rate": config["base_lr"], "decay_lr": False, "grad_clip": config["max_grad_norm"]}
    options |= {"beta1": BETAS[0], "beta2": BETAS[1], "dtype": "bfloat16", "dataset": data, "out_dir": data / "nanogpt"}
    options |= {"max_iters": steps - 1, "eval_interval": steps, "eval_iters": 1, "log_interval": 1}
    printed = timed.output_of(["-c", NANOGPT, *(f"--{name}={value}" for name, value in options.items())], checkout)
    rows = re.findall(r"^iter \d+: loss (\S+), time (\S+)ms", printed, re.MULTILINE)
    seconds = np.array([float(time) / 1e3 for _, time in rows]).reshape(WINDOWS, -1).mean(axis=1)
    (peak,) = re.findall(r"^peak (\d+)", printed, re.MULTILINE)
    return timed.figures([*seconds], float(peak), float(rows[-1][0]))


PEERS = {"lightning": timed.lightning, "accelerate": timed.accelerate}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", required=True, type=Path, metavar="CHECKOUT", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="of each run, a multiple of 8: there are 8 windows")
    parser.add_argument("--cpu", action="store_true", help="a miniature, to see that it runs")
    parser.add_argument("--peer", choices=PEERS, help="runs one of the others in this process")
    parser.add_argument("--data", type=Path, help="with --peer: the folder of its tokens")
    options = parser.parse_args()
    checkout = options.nanogpt.resolve()
    for name in ("train.py", "model.py", "configurator.py"):
        if not (checkout / name).is_file():
            message = f"{name} is not there: git clone https://github.com/karpathy/nanoGPT"
            raise SystemExit(f"--nanogpt {options.nanogpt}: {message}")
    device = timed.choose_device(options)
    config = yaml.safe_load((HERE / "gpt2.yaml").read_text()) | (TINY if options.cpu else {})
    if options.peer:
        clock = Clock(options.steps)
        PEERS[options.peer](build_work(options.peer, checkout, options.data, config, device), clock)
        print(json.dumps(clock.figures()))
        return
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # the checkout stays as it is
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        write_tokens(data, 100_000 if options.cpu else 10_000_000)
        program = copy_template(data / "program", checkout)
        (program / "gpt2.yaml").write_text(yaml.safe_dump(config))
        template = [program / "train.py", "--config_path", program / "gpt2.yaml", "--data_dir", data]
        arguments = (device, options.steps, config["effective_batch_size"])
        programs = {
            "template": partial(timed.figures_of_template, template, *arguments),
            "--deterministic False": partial(
                timed.figures_of_template, [*template, "--deterministic", False], *arguments
            ),
            "nanogpt": partial(figures_of_nanogpt, checkout, data, config, device, options.steps),
        }
        for peer in timed.installed([*PEERS]):
            command = [Path(__file__).resolve(), "--nanogpt", checkout, "--peer", peer, "--data", data]
            command += ["--steps", options.steps, *["--cpu"] * options.cpu]
            programs[peer] = partial(timed.figures_of_peer, command)
        timed.compare(programs, options.rounds)


if __name__ == "__main__":
    main()
