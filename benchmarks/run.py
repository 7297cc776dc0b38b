"""Times the template beside what one would use instead, on one core, in interleaved rounds.

python benchmarks/run.py                       # everything; the peers go into benchmarks/.venv
python benchmarks/run.py --works W1 --rounds 3 --peers raw limit
python benchmarks/run.py --works W1 W2 W3 --peers --other DIR    # beside the template in another checkout
python benchmarks/run.py --cpu --works W4      # CPU seconds in place of the clock's, where the machine has other work
python benchmarks/run.py --start_up            # a whole run of one epoch, from the command to its end

Every program trains the same model from the same weights on the same data: a work. It reads its loss every 50 steps and
prints it at the end of each epoch. The time is taken here, from the first such line to the last. The template is its
own train.py, in a copy whose model, data and optimizer are those of the work. It also logs at the end of each epoch,
since a step that validates also logs. Nobody saves, and only in W1v does somebody validate. Only a run of everything,
in at least five rounds, replaces its part of results.json.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
PEERS = ["raw", "limit", "lightning", "accelerate", "pytorch_accelerated", "hf"]
BATCHED = ["raw-batched", "lightning-batched", "accelerate-batched", "hf-batched"]  # pytorch_accelerated makes its own
WORKS = {
    "W1": {"data": "digits", "epochs": 200, "batch_size": 64, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W1v": {"data": "digits", "epochs": 200, "batch_size": 64, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W2": {"data": "large", "epochs": 5, "batch_size": 128, "optimizer": "torch.optim.SGD", "lr": 1e-2},
    "W3": {"data": "large", "epochs": 3, "batch_size": 128, "optimizer": "torch.optim.Adam", "lr": 1e-3},
    "W4": {"data": "digits", "epochs": 50, "batch_size": 64, "optimizer": "torch.optim.AdamW", "lr": 4e-3},
}
VALIDATED = ("W1v",)  # W1 with a validation after each epoch
VALIDATING = ["raw", "limit"]  # the peers that take part there
OPTIONS = ["--accelerator", "cpu", "--lr_schedule", "constant", "--warmup_epochs", 0, "--lr_scaling_rule", "none",
           "--weight_decay", 0, "--log_interval", 50, "--logger_name", "csv", "--checkpoint_frequency", 0]  # fmt: skip
DATA = """

def build_datasets(*_, **__):
    from run import tensors

    return {{split: ImageDataset(*pair, num_classes=10) for split, pair in tensors({work!r}).items()}}
"""


# ---- the works, of which each program imports its own


def build(work: str) -> nn.Module:
    """The model of a work, with the same initial weights in every program."""
    torch.manual_seed(0)
    if work in ("W1", "W1v"):
        return nn.Sequential(nn.Flatten(), *mlp(64, 64, 64, 10))
    if work == "W2":
        return nn.Sequential(nn.Flatten(), *mlp(784, 128, 64, 10))
    if work == "W4":  # the layers of model.py
        convolutions = (nn.Conv2d(1, 32, 3, 1, 1), nn.GELU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GELU())
        return nn.Sequential(
            *convolutions, nn.Conv2d(64, 64, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(256, 10)
        )
    convolutions = (nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1568, 10))


def mlp(*sizes: int) -> list[nn.Module]:
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def tensors(work: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and class indices of "train", 1,217 of 8x8 or 55,000 of 28x28 pixels, and of "val", 200 or 1,000."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    images, targets = (images - images.mean()) / images.std(), torch.tensor(targets, dtype=torch.int64)
    train, val = torch.arange(1217), torch.arange(1217, 1417)
    if WORKS[work]["data"] == "large":  # the digits, enlarged, again and again
        images = nn.functional.pad(images.repeat_interleave(3, 2).repeat_interleave(3, 3), (2,) * 4)
        train, val = torch.arange(55_000) % 1417, torch.arange(1000) % 380 + 1417
    return {"train": (images[train], targets[train]), "val": (images[val], targets[val])}


# ---- the programs


def python_with_peers() -> str:
    """The interpreter of an environment of the benchmark's own, made once."""
    python = HERE / ".venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HERE / ".venv"], check=True)
        for file in (HERE.parent / "requirements.txt", HERE / "requirements.txt"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", file], check=True)
    return str(python)


def copy_programs(folder: Path, root: Path = HERE.parent):
    """The template of the checkout `root`."""
    folder.mkdir(parents=True)
    for path in root.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(root / "runtime", folder / "runtime")


def copy_template(work: str, folder: Path, root: Path = HERE.parent) -> Path:
    """The template of the checkout `root`, with the work's model, data and optimizer."""
    copy_programs(folder, root)
    shutil.copy(HERE / "run.py", folder)
    (folder / "model.py").write_text(f"from run import build\n\n\ndef Model(*_):\n    return build({work!r})\n")
    with open(folder / "data.py", "a") as file:
        file.write(DATA.format(work=work))
    text = (folder / "train.py").read_text()
    assert text.count("torch.optim.AdamW(") == 1, "train.py has changed"
    (folder / "train.py").write_text(text.replace("torch.optim.AdamW(", WORKS[work]["optimizer"] + "("))
    return folder / "train.py"


def template_command(work: str, folder: Path, root: Path = HERE.parent) -> list:
    """The command that trains the work with a copy of the template in `folder`."""
    command = [copy_template(work, folder, root), *OPTIONS, "--epochs", WORKS[work]["epochs"]]
    command += ["--effective_batch_size", WORKS[work]["batch_size"], "--base_lr", WORKS[work]["lr"]]
    if work not in VALIDATED:
        command += ["--limit_val_batches", 0, "--monitor", "train/loss", "--monitor_mode", "min"]
    return command


def on_one_core(command: list) -> list[str]:
    pinned = ["taskset", "-c", max(os.sched_getaffinity(0))] if shutil.which("taskset") else []
    return [str(part) for part in (*pinned, *command)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}


# ---- their times


def seconds_per_epoch(command: list, cwd: Path, clock: Callable) -> tuple[float, str]:
    """Runs a program. Returns the mean time of its epochs but the first by `clock(pid)`, and the loss of the last."""
    process = subprocess.Popen(
        on_one_core(command), cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    times, last = [], ""
    for line in process.stdout:
        if re.match(r"epoch \d|\s+\d+\s+\d+\s", line):
            times.append(clock(process.pid))
            last = line
    error = process.stderr.read()
    if process.wait() or len(times) < 3:
        raise SystemExit(f"{' '.join(map(str, command))}\n{error}")
    numbers = re.findall(r"\d+\.\d+", last)
    return (times[-1] - times[0]) / (len(times) - 1), numbers[0]


def wall_seconds(pid: int) -> float:
    return time.perf_counter()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def run(
    python: str, works: list[str], peers: list[str], rounds: int, other: str | None, folder: Path, clock: Callable
) -> list[dict]:
    """Times the works with the template and the peers. Returns a row for each work and program."""
    rows = []
    for work in works:
        steps = (1217 if WORKS[work]["data"] == "digits" else 55_000) // WORKS[work]["batch_size"]
        programs = {"template": template_command(work, folder / work)}
        if other:
            programs["other"] = template_command(work, folder / f"other-{work}", Path(other))
        for peer in peers:
            if work not in VALIDATED or peer in VALIDATING:
                programs[peer] = [HERE / "peers.py", peer, work]
        found = {name: [] for name in programs}
        for number in range(rounds):
            for name in programs if number % 2 else reversed(programs):
                seconds, loss = seconds_per_epoch([python, *programs[name]], folder, clock)
                found[name].append((seconds / steps, loss))
                micros = 1e6 * seconds / steps
                print(f"{work} round {number + 1} {name:>20} {micros:8.0f} us/step  loss {loss}", flush=True)
        for name, results in found.items():
            ratios = [other / own for (own, _), (other, _) in zip(found["template"], results, strict=True)]
            rows.append({
                "work": work,
                "program": name,
                "us per step": round(1e6 * statistics.median(seconds for seconds, _ in results)),
                "fastest round": round(1e6 * min(seconds for seconds, _ in results)),
                "template is faster by": round(statistics.median(ratios), 2),
                "loss": results[-1][1],
            })  # fmt: skip
    return rows


def start_up(python: str, rounds: int, other: str | None, folder: Path) -> list[dict]:
    """Wall time of a whole run of one epoch of W1, of the template and of a raw script, and of --help."""
    template = copy_template("W1", folder / "template")
    options = ["--accelerator", "cpu", "--epochs", "1", "--logger_name", "csv"]
    programs = {"template": [template, *options], "raw": [HERE / "peers.py", "start_up"], "help": [template, "--help"]}
    if other:
        programs["other"] = [copy_template("W1", folder / "other", Path(other)), *options]
    found = {name: [] for name in programs}
    for number in range(rounds):
        for name in programs if number % 2 else reversed(programs):
            began = time.perf_counter()
            subprocess.run(on_one_core([python, *programs[name]]), cwd=folder, check=True, capture_output=True,
                           env=environment())  # fmt: skip
            found[name].append(time.perf_counter() - began)
    return [
        {
            "program": name,
            "seconds": round(statistics.median(times), 2),
            "fastest round": round(min(times), 2),
            "times of raw": round(statistics.median(a / b for a, b in zip(times, found["raw"], strict=True)), 2),
        }
        for name, times in found.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--peers", nargs="*", default=PEERS + BATCHED, choices=PEERS + BATCHED)
    parser.add_argument("--other", help="another checkout, whose template is timed, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", help="the interpreter, instead of benchmarks/.venv, or of this one with --start_up")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, for a machine that has other work")
    parser.add_argument("--start_up", action="store_true")
    options = parser.parse_args()
    # A start is not timed beside the packages of the peers: torchmetrics imports transformers where it is installed.
    interpreter = options.python or (sys.executable if options.start_up else python_with_peers())
    with tempfile.TemporaryDirectory() as temporary:
        if options.start_up:
            table = start_up(interpreter, options.rounds, options.other, Path(temporary))
        else:
            clock = cpu_seconds if options.cpu else wall_seconds
            table = run(
                interpreter, options.works, options.peers, options.rounds, options.other, Path(temporary), clock
            )
    print(
        *(" | ".join(f"{value!s:>20}" for value in row) for row in (table[0], *(row.values() for row in table))),
        sep="\n",
    )
    is_complete = options.start_up or (set(options.works) == {*WORKS} and set(options.peers) == {*PEERS, *BATCHED})
    if is_complete and not options.other and not options.cpu and options.rounds >= 5:
        facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cpu": platform.processor()}
        results = json.loads((HERE / "results.json").read_text())
        results["start_up" if options.start_up else "speed"] = facts | {"rounds": options.rounds, "rows": table}
        (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
