"""Trains nanoGPT's model with nanoGPT's train.py and with the template, in turn, on one core; see README.md.

git clone https://github.com/karpathy/nanoGPT
python nanoGPT/data/shakespeare_char/prepare.py              # downloads 1 MB; needs requests
python benchmarks/nanogpt.py --nanogpt nanoGPT               # three rounds, a quarter of an hour
python benchmarks/nanogpt.py --nanogpt nanoGPT --rounds 1 --max_iters 250    # a trial
python benchmarks/nanogpt.py --nanogpt nanoGPT --check       # the losses of both on the same windows

The checkout stays as it is. The template is a copy with nanogpt.patch and the checkout's model.py.
"""

import argparse
import csv
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from run import HERE, copy_programs, environment, on_one_core

EVAL_INTERVAL = 250  # in nanoGPT's config; it saves after an evaluation, too
BATCH_SIZE = 12
DATA = Path("data", "shakespeare_char")
# The command of nanoGPT's README for a CPU.
NANOGPT = ["train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20",
           "--log_interval=1", "--block_size=64", f"--batch_size={BATCH_SIZE}", "--n_layer=4", "--n_head=4",
           "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"]  # fmt: skip
# Saves the last weights, too, where they are not the best. Of an option that is given twice nanoGPT takes the second.
NANOGPT += ["--always_save_checkpoint=True"]
FIGURES = ("seconds", "CPU seconds", "ms per step", "val loss")
# nanoGPT draws with torch's global generator: first its weights, then a batch, 40 batches of an evaluation, the others.
SAME_WINDOWS = f"""

def nanogpt_order(self, epoch, generator):
    from model import GPT, GPTConfig

    torch.manual_seed(1337)
    GPT(GPTConfig(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False))
    drawn = torch.randint(len(self), (40 + {EVAL_INTERVAL}, {BATCH_SIZE}))
    return torch.cat([drawn[:1], drawn[41:]]).flatten()


Windows.order = nanogpt_order
"""


def problem_of(checkout: Path) -> str | None:
    """What is missing in a checkout of nanoGPT, and how to get it; None if it is complete."""
    for name in ("train.py", "model.py", "config/train_shakespeare_char.py"):
        if not (checkout / name).is_file():
            return f"{name} is not there: git clone https://github.com/karpathy/nanoGPT"
    for name in ("train.bin", "val.bin"):
        if not (checkout / DATA / name).is_file():
            return f"{DATA / name} is not there: python {checkout / DATA / 'prepare.py'}"
    return None


def copy_template(folder: Path, checkout: Path) -> Path:
    """The template with nanogpt.patch and nanoGPT's model."""
    copy_programs(folder)
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # of any repository
    subprocess.run(["git", "apply", HERE / "nanogpt.patch"], cwd=folder, env=outside, check=True)
    shutil.copy(checkout / "model.py", folder)
    return folder


def output_of(command: list, cwd: Path) -> tuple[str, dict]:
    """Runs a program. Returns what it printed, and the seconds from its start to its end: by the clock, and those in
    which it had the core, which is what counts where others want the core, too."""
    command = on_one_core([sys.executable, *command])
    began = time.perf_counter()
    used = cpu_seconds()
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    seconds = {"seconds": time.perf_counter() - began, "CPU seconds": cpu_seconds() - used}
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout, seconds


def cpu_seconds() -> float:
    """Of all programs that have ended."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_nanogpt(checkout: Path, options: list, out_dir: Path) -> dict:
    """Trains with nanoGPT. Its own clock counts an evaluation with the step after it: those steps are left out."""
    printed, seconds = output_of([*NANOGPT, *options, f"--out_dir={out_dir}"], cwd=checkout)
    rows = re.findall(r"^iter (\d+): loss (\S+), time (\S+)ms", printed, re.MULTILINE)
    times = [float(ms) for number, _, ms in rows if int(number) % EVAL_INTERVAL]
    losses = [float(loss) for _, loss, _ in rows]
    return seconds | {"ms per step": statistics.mean(times), "losses": losses}


def run_template(program: Path, checkout: Path, options: list, root_dir: Path) -> dict:
    """Trains with the template. Its own clock stops for logs, validations and checkpoints."""
    fixed = ["--config_path", program / "shakespeare.yaml", "--data_dir", checkout / DATA, "--root_dir", root_dir]
    fixed += ["--accelerator", "cpu", "--logger_name", "csv"]
    seconds = output_of([program / "train.py", *fixed, *options], cwd=program)[1]
    (run_dir,) = root_dir.glob("*-train_out")
    rows = list(csv.DictReader((run_dir / "logs" / "csv" / "metrics.csv").read_text().splitlines()))
    first_steps = [0, *(int(row["step"]) for row in rows)]
    times = [
        (int(row["step"]) - first) * 1000 * BATCH_SIZE / float(row["samples_per_second"])  # ms
        for first, row in zip(first_steps, rows, strict=False)
    ]
    losses = [float(row["train/loss"]) for row in rows]
    return seconds | {"ms per step": sum(times) / first_steps[-1], "losses": losses, "run_dir": run_dir}


def val_loss(program: Path, run_dir: Path, checkpoint: Path | str) -> float:
    """The loss over the whole validation text, by the template's test.py for the weights of either program."""
    command = [program / "test.py", "--out_dir", run_dir, "--checkpoint", checkpoint, "--split", "val"]
    printed = output_of([*command, "--accelerator", "cpu"], cwd=program)[0]
    return float(re.search(r"^loss (\S+)", printed, re.MULTILINE)[1])


def compare(checkout: Path, program: Path, rounds: int, max_iters: int, log_interval: int | None, folder: Path):
    """Prints a line for each round and program, and the medians."""
    options = {
        "nanogpt": [f"--max_iters={max_iters}", f"--lr_decay_iters={max_iters}"],
        "template": ["--max_steps", max_iters],
    }
    if log_interval:
        options["nanogpt"].append(f"--log_interval={log_interval}")
        options["template"] += ["--log_interval", log_interval]
    found = {name: [] for name in options}
    for number in range(rounds):
        out_dir, root_dir = folder / f"nanogpt-{number}", folder / f"template-{number}"
        for name in options if number % 2 else reversed(options):
            if name == "nanogpt":
                result = run_nanogpt(checkout, options[name], out_dir)
            else:
                result = run_template(program, checkout, options[name], root_dir)
            found[name].append(result)
        run_dir = found["template"][-1]["run_dir"]
        for name, checkpoint in (("nanogpt", out_dir / "ckpt.pt"), ("template", "last")):
            result = found[name][-1]
            result["val loss"] = val_loss(program, run_dir, checkpoint)
            figures = ", ".join(f"{key} {result[key]:.4f}" for key in FIGURES)
            print(f"round {number + 1} {name:>10}: {figures}", flush=True)
    for key in FIGURES:
        medians = {name: statistics.median(result[key] for result in results) for name, results in found.items()}
        ratios = [own[key] / other[key] for own, other in zip(found["template"], found["nanogpt"], strict=True)]
        figures = ", ".join(f"{name} {median:.4g}" for name, median in medians.items())
        print(f"{key}: median of {figures}; template / nanogpt: median {statistics.median(ratios):.3f}")


def check(checkout: Path, program: Path, folder: Path):
    """Prints the largest difference between the losses of both on the same windows, up to nanoGPT's evaluation."""
    with open(program / "characters.py", "a") as file:
        file.write(SAME_WINDOWS)
    options = [f"--max_iters={EVAL_INTERVAL}", f"--lr_decay_iters={EVAL_INTERVAL}"]
    expected = run_nanogpt(checkout, options, folder / "nanogpt")["losses"][:EVAL_INTERVAL]
    options = ["--max_steps", EVAL_INTERVAL, "--log_interval", 1]
    losses = run_template(program, checkout, options, folder / "template")["losses"]
    differences = [abs(round(loss, 4) - other) for loss, other in zip(losses, expected, strict=True)]
    print(f"{len(losses)} losses from {losses[0]:.4f} to {losses[-1]:.4f}, largest difference {max(differences):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", required=True, type=Path, metavar="CHECKOUT", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_iters", type=int, default=2000, help="steps of the training, a multiple of 250")
    parser.add_argument("--log_interval", type=int, help="of both; otherwise nanoGPT's is 1, as in its README")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    problem = problem_of(arguments.nanogpt)
    if problem:
        raise SystemExit(f"--nanogpt {arguments.nanogpt}: {problem}")
    if arguments.max_iters < EVAL_INTERVAL or arguments.max_iters % EVAL_INTERVAL:
        raise SystemExit(f"--max_iters {arguments.max_iters}: must be a multiple of 250, after which nanoGPT saves")
    with tempfile.TemporaryDirectory() as temporary:
        template = copy_template(Path(temporary, "program"), arguments.nanogpt)
        nanogpt = arguments.nanogpt.resolve()
        if arguments.check:
            check(nanogpt, template, Path(temporary))
        else:
            compare(nanogpt, template, arguments.rounds, arguments.max_iters, arguments.log_interval, Path(temporary))
