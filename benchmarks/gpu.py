"""A step on a GPU, by the template, the loop that one would write, Lightning's Trainer and accelerate. Each runs in a
process of its own, in turn; medians of windows of steps. Prints only.

python benchmarks/gpu.py                                   # the default model in 32-true, with TF32
python benchmarks/gpu.py --precisions 32-true bf16-mixed
python benchmarks/gpu.py --cpu --rounds 1 --steps 80       # a trial without a GPU

git clone https://github.com/karpathy/nanoGPT
python benchmarks/gpu.py --nanogpt nanoGPT                                # GPT-2 with 124 million weights
python benchmarks/gpu.py --nanogpt nanoGPT --cpu --rounds 1 --steps 8     # a miniature, without a GPU

For GPT-2 the loop is nanoGPT's own train.py, and all train nanoGPT's model on random tokens, with the options of GPT2
below. The template is a copy with nanogpt.patch. It also runs with `--deterministic False`, since the others do not ask
for deterministic algorithms. The checkout stays as it is.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from nanogpt import copy_template
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from config import TrainConfig  # noqa: E402

WINDOWS = 8  # of all steps
SKIPPED = 2  # the first windows: they have the start and the compilation


class Clock:
    """Counts the steps of a loop, and times each window of them."""

    def __init__(self, steps: int):
        self.steps = steps
        self.step = 0
        self.loss = 0.0
        self.times = [time.perf_counter()]  # of the start, and of the end of each window

    def tick(self, loss: Tensor):
        """Ends a step. At the end of a window the loss is read, as for a log: that waits for the device."""
        self.step += 1
        if self.step % (self.steps // WINDOWS) == 0:
            self.loss = loss.item()
            self.times.append(time.perf_counter())

    def is_over(self) -> bool:
        return self.step == self.steps

    def figures(self) -> dict:
        seconds = [(end - begin) / (self.steps // WINDOWS) for begin, end in pairwise(self.times)]
        return figures(seconds, torch.cuda.max_memory_allocated(), self.loss)


def figures(seconds: list[float], peak: float, loss: float) -> dict:
    """What is told of a run: of the seconds per step of each window, the bytes that torch has allocated at most on a
    GPU, and the last loss, which shows that it has trained."""
    return {"ms": 1e3 * statistics.median(seconds[SKIPPED:]), "GB": peak / 1e9, "loss": loss}


# ---- the loops of others


@dataclass
class Work:
    """What a loop trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Iterable  # of micro-batches (inputs, targets)
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    device: str
    precision: str  # 32-true or bf16-mixed
    compile: bool = False
    accumulation: int = 1  # micro-batches in a step
    max_norm: float | None = None  # of the gradient


def raw(work: Work, clock: Clock):
    while True:
        for batch in work.loader:
            images, targets = (part.to(work.device, non_blocking=True) for part in batch)
            with torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bf16-mixed"):
                loss = work.loss(work.model, images, targets)
            loss.backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
            clock.tick(loss)
            if clock.is_over():
                return


def accelerate(work: Work, clock: Clock):
    from accelerate import Accelerator

    precision = "bf16" if work.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(
        cpu=work.device == "cpu", mixed_precision=precision, gradient_accumulation_steps=work.accumulation
    )
    model, optimizer, loader = accelerator.prepare(work.model, work.optimizer, work.loader)
    if work.compile:
        model = torch.compile(model)
    while not clock.is_over():
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = work.loss(model, inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and work.max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), work.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.tick(loss)
            if clock.is_over():
                break


def lightning(work: Work, clock: Clock):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.compile(work.model) if work.compile else work.model

        def training_step(self, batch, index):
            loss = work.loss(self.model, *batch)
            self.log("train/loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, index):
            if (index + 1) % work.accumulation == 0:
                clock.tick(outputs["loss"] * work.accumulation)  # by which it was divided

        def configure_optimizers(self):
            return work.optimizer

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(
        max_steps=clock.steps, max_epochs=-1, accelerator=work.device, devices=1, precision=work.precision,
        accumulate_grad_batches=work.accumulation, gradient_clip_val=work.max_norm, **quiet,
    )  # fmt: skip
    trainer.fit(Module(), work.loader)


PEERS = {"raw": raw, "lightning": lightning, "accelerate": accelerate}


# ---- the default model

BATCH_SIZE = TrainConfig().effective_batch_size


def work_of_default(device: str, precision: str) -> Work:
    from data import build_datasets
    from train import build_model

    dataset = build_datasets(TrainConfig())["train"]
    images, targets = (torch.stack([torch.as_tensor(value) for value in part]) for part in zip(*dataset, strict=True))
    loader = DataLoader(
        TensorDataset(images, targets), BATCH_SIZE, shuffle=True, drop_last=True, pin_memory=device == "cuda"
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build_model(TrainConfig(), dataset).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), TrainConfig().base_lr, fused=True)
    return Work(model, optimizer, loader, cross_entropy, device, precision)


def cross_entropy(model, images: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(images), targets)


# ---- GPT-2

# As nanoGPT's train.py has it, in options of the template beside nanogpt.patch.
GPT2 = {
    "dataset": "characters",
    "seed": 1337,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "dropout": 0.0,
    "effective_batch_size": 64,
    "micro_batch_size": 16,
    "precision": "bf16-mixed",
    "compile": "default",
    "base_lr": 6e-4,
    "lr_scaling_rule": "none",
    "lr_schedule": "constant",
    "warmup_epochs": 0.0,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "limit_val_batches": 1,
    "monitor": "val/loss",
    "monitor_mode": "min",
}
TINY = {"block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64, "compile": "none"}
TINY |= {"effective_batch_size": 8, "micro_batch_size": 4}
VOCABULARY = 50304  # nanoGPT's default: the 50,257 tokens of GPT-2, rounded up
BETAS = (0.9, 0.99)  # as in nanogpt.patch
MODEL = ("block_size", "n_layer", "n_head", "n_embd", "dropout")
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


def loss_of_gpt2(model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits, loss = model(tokens, targets)
    return loss


def work_of_gpt2(peer: str, checkout: Path, data: Path, config: dict, device: str) -> Work:
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
        loss=loss_of_gpt2,
        device=device,
        precision=config["precision"],
        compile=config["compile"] != "none",
        accumulation=config["effective_batch_size"] // batch_size,
        max_norm=config["max_grad_norm"],
    )


def figures_of_nanogpt(checkout: Path, data: Path, config: dict, device: str, steps: int) -> dict:
    """It prints the time of each step, and reads the loss for it. Before the first step it evaluates."""
    options = {name: config[name] for name in (*MODEL, "weight_decay")}
    options |= {"batch_size": config["micro_batch_size"], "compile": config["compile"] != "none", "device": device}
    options["gradient_accumulation_steps"] = config["effective_batch_size"] // config["micro_batch_size"]
    options |= {"learning_rate": config["base_lr"], "decay_lr": False, "grad_clip": config["max_grad_norm"]}
    options |= {"beta1": BETAS[0], "beta2": BETAS[1], "dtype": "bfloat16", "dataset": data, "out_dir": data / "nanogpt"}
    options |= {"max_iters": steps - 1, "eval_interval": steps, "eval_iters": 1, "log_interval": 1}
    printed = output_of(["-c", NANOGPT, *(f"--{name}={value}" for name, value in options.items())], checkout)
    rows = re.findall(r"^iter \d+: loss (\S+), time (\S+)ms", printed, re.MULTILINE)
    seconds = np.array([float(ms) / 1e3 for _, ms in rows]).reshape(WINDOWS, -1).mean(axis=1)
    (peak,) = re.findall(r"^peak (\d+)", printed, re.MULTILINE)
    return figures([*seconds], float(peak), float(rows[-1][0]))


# ---- a process for each program


def installed(packages: list[str]) -> list[str]:
    """Those that are there. The others are named."""
    for name in packages:
        if not find_spec(name):
            print(f"{name} is not installed, and left out: pip install -r benchmarks/requirements.txt", flush=True)
    return [name for name in packages if find_spec(name)]


def output_of(command: list, cwd: Path | str) -> str:
    """What a Python program prints."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def figures_of_peer(options: list) -> dict:
    """Runs this script with `--peer`. Its last line has the figures."""
    with tempfile.TemporaryDirectory() as cwd:
        return json.loads(output_of([Path(__file__).resolve(), *options], cwd).splitlines()[-1])


def figures_of_template(command: list, device: str, steps: int, batch_size: int) -> dict:
    """Runs train.py, whose log has the figures of each window."""
    options = ["--accelerator", device, "--devices", 1, "--logger_name", "csv", "--log_interval", steps // WINDOWS]
    options += ["--max_steps", steps, "--val_interval", steps, "--checkpoint_interval", steps]
    with tempfile.TemporaryDirectory() as cwd:
        output_of([*command, *options], cwd)
        (path,) = Path(cwd).glob("*/logs/csv/metrics.csv")
        rows = list(csv.DictReader(path.read_text().splitlines()))
    seconds = [batch_size / float(row["samples_per_second"]) for row in rows]
    peak = max(1e6 * float(row["peak_memory_mb"]) for row in rows)
    return figures(seconds, peak if device == "cuda" else 0, float(rows[-1]["train/loss"]))


def compare(programs: dict[str, Callable[[], dict]], rounds: int):
    """Runs the programs in turn. Prints a line for each run, then the medians. The first program is the template."""
    found: dict[str, list] = {name: [] for name in programs}
    for number in range(rounds):
        for name in reversed(programs) if number % 2 else programs:
            result = programs[name]()
            found[name].append(result)
            print(f"round {number + 1} {name:>21}: {text_of(result)}", flush=True)
    for name, results in found.items():
        median = {key: statistics.median(result[key] for result in results) for key in results[0]}
        ratios = [own["ms"] / other["ms"] for own, other in zip(found["template"], results, strict=True)]
        ratio = "" if name == "template" else f"; template / {name} {statistics.median(ratios):.2f}"
        print(f"median  {name:>21}: {text_of(median)}{ratio}")


def text_of(result: dict) -> str:
    memory = f"{result['GB']:.1f} GB, " if result["GB"] else ""
    return f"{result['ms']:.3f} ms per step, {memory}loss {result['loss']:.4f}"


def choose_device(options: argparse.Namespace) -> str:
    """Returns the device. Ends with one line where an option cannot be."""
    if options.steps < WINDOWS or options.steps % WINDOWS:
        raise SystemExit(f"--steps {options.steps}: must be a multiple of {WINDOWS}, the number of windows")
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU: give --cpu for a trial")
    if options.cpu:
        os.environ["OMP_NUM_THREADS"] = "1"  # of all programs: on a busy machine threads wait for each other
        return "cpu"
    return "cuda"


def programs_of_default(options: argparse.Namespace, device: str, precision: str, peers: list[str]) -> dict:
    """For `compare`."""
    template = [REPO / "train.py", "--precision", precision]
    programs = {"template": partial(figures_of_template, template, device, options.steps, BATCH_SIZE)}
    for peer in ["raw", *peers]:
        command = ["--peer", peer, "--precisions", precision, "--steps", options.steps]
        programs[peer] = partial(figures_of_peer, command + ["--cpu"] * options.cpu)
    return programs


def programs_of_gpt2(options: argparse.Namespace, device: str, config: dict, data: Path, peers: list[str]) -> dict:
    """For `compare`. `data` is the folder of the tokens, in which they also write."""
    checkout = options.nanogpt
    program = copy_template(data / "program", checkout)
    (program / "gpt2.yaml").write_text(yaml.safe_dump(config))
    template = [program / "train.py", "--config_path", program / "gpt2.yaml", "--data_dir", data]
    others = [*template, "--deterministic", False]
    sizes = (device, options.steps, config["effective_batch_size"])
    programs = {
        "template": partial(figures_of_template, template, *sizes),
        "--deterministic False": partial(figures_of_template, others, *sizes),
        "nanogpt": partial(figures_of_nanogpt, checkout, data, config, device, options.steps),
    }
    for peer in peers:
        command = ["--nanogpt", checkout, "--peer", peer, "--data", data, "--steps", options.steps]
        programs[peer] = partial(figures_of_peer, command + ["--cpu"] * options.cpu)
    return programs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, metavar="CHECKOUT", help="a checkout of nanoGPT: trains GPT-2")
    parser.add_argument("--rounds", type=int, default=3)
    steps = "of each run, a multiple of 8, the number of windows; 4000, or 80 of GPT-2"
    parser.add_argument("--steps", type=int, help=steps)
    precisions = ["32-true", "bf16-mixed"]
    parser.add_argument("--precisions", nargs="+", default=["32-true"], choices=precisions, help="of the default model")
    parser.add_argument("--cpu", action="store_true", help="a trial without a GPU; of GPT-2 a miniature")
    parser.add_argument("--peer", choices=PEERS, help="runs one of the others in this process")
    parser.add_argument("--data", type=Path, help="with --peer and --nanogpt: the folder of the tokens")
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 80 if options.nanogpt else 4000
    if options.nanogpt:
        options.nanogpt = complete(options.nanogpt)
    return options


def complete(checkout: Path) -> Path:
    """The whole path of a checkout of nanoGPT. Ends with one line where a file is missing."""
    for name in ("train.py", "model.py", "configurator.py"):
        if not (checkout / name).is_file():
            message = f"{name} is not there: git clone https://github.com/karpathy/nanoGPT"
            raise SystemExit(f"--nanogpt {checkout}: {message}")
    return checkout.resolve()


def run_peer(options: argparse.Namespace, device: str, config: dict):
    """Prints the figures of one of the others."""
    if options.nanogpt:
        work = work_of_gpt2(options.peer, options.nanogpt, options.data, config, device)
    else:
        work = work_of_default(device, options.precisions[0])
    clock = Clock(options.steps)
    PEERS[options.peer](work, clock)
    print(json.dumps(clock.figures()))


def main():
    options = parse()
    device = choose_device(options)
    config = GPT2 | (TINY if options.cpu else {})
    if options.peer:
        run_peer(options, device, config)
        return
    peers = installed(["lightning", "accelerate"])
    if options.nanogpt:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # the checkout stays as it is
        with tempfile.TemporaryDirectory() as temporary:
            data = Path(temporary)
            write_tokens(data, 100_000 if options.cpu else 10_000_000)
            compare(programs_of_gpt2(options, device, config, data, peers), options.rounds)
        return
    for precision in options.precisions:
        print(precision)
        compare(programs_of_default(options, device, precision, peers), options.rounds)


if __name__ == "__main__":
    main()
