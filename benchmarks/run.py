"""Times the template beside what one would use instead, on one core, in interleaved rounds.

python benchmarks/run.py                       # everything, half an hour; the peers go into benchmarks/.venv
python benchmarks/run.py --works W1 --rounds 3 --peers raw limit
python benchmarks/run.py --start_up            # a whole run of one epoch, from the command to its end

Every program trains the same model from the same weights on the same data (benchmarks/works.py), reads its loss every
50 steps and says so at the end of each epoch. The time is taken here, from the first such line to the last. The
template is its own train.py, on a copy whose model.py is the work's model, with its one optimizer line changed and the
random shift of the images off; nobody validates or saves.
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
from pathlib import Path

from works import WORKS, write_mnist

HERE = Path(__file__).resolve().parent
PEERS = ["raw", "limit", "lightning", "accelerate", "pytorch_accelerated", "hf"]
BATCHED = ["raw-batched", "lightning-batched", "accelerate-batched", "hf-batched"]  # pytorch_accelerated makes its own
OPTIONS = (
    "--accelerator cpu --lr_schedule constant --warmup_epochs 0 --lr_scaling_rule none --weight_decay 0 "
    "--log_interval 50 --logger_name csv --limit_val_batches 0 --monitor train/loss --checkpoint_frequency None"
)


def python_with_peers() -> str:
    """The interpreter of an environment of the benchmark's own, made once."""
    python = HERE / ".venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HERE / ".venv"], check=True)
        for file in (HERE.parent / "requirements.txt", HERE / "requirements.txt"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", file], check=True)
    return str(python)


def copy_template(work: str, folder: Path) -> Path:
    """The template with the work's model and optimizer."""
    folder.mkdir(parents=True)
    for path in (*HERE.parent.glob("*.py"), HERE / "works.py"):
        shutil.copy(path, folder)
    (folder / "model.py").write_text(f"from works import build\n\n\ndef Model(*_):\n    return build({work!r})\n")
    for file, old, new in (
        ("train.py", "torch.optim.AdamW(", WORKS[work]["optimizer"] + "("),
        ("data.py", "shift=1, ", ""),
    ):
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file} has changed: {old}"
        (folder / file).write_text(text.replace(old, new))
    return folder / "train.py"


def seconds_per_epoch(command: list, cwd: Path) -> tuple[float, str]:
    """Runs a program. Returns the mean time of its epochs but the first, and the loss of the last."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}
    command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *command] if shutil.which("taskset") else command
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    times, last = [], ""
    for line in process.stdout:
        if re.match(r"epoch \d|\s+\d+\s+\d+\s", line):
            times.append(time.perf_counter())
            last = line
    error = process.stderr.read()
    if process.wait() or len(times) < 3:
        raise SystemExit(f"{' '.join(map(str, command))}\n{error}")
    numbers = re.findall(r"\d+\.\d+", last)
    return (times[-1] - times[0]) / (len(times) - 1), numbers[0]


def run(python: str, works: list[str], peers: list[str], rounds: int, folder: Path) -> list[dict]:
    rows = []
    write_mnist(folder / "mnist")
    for work in works:
        batch_size, data = WORKS[work]["batch_size"], folder / "mnist"
        steps = (1217 if WORKS[work]["dataset"] == "digits" else 55_000) // batch_size
        template = [python, copy_template(work, folder / work), *OPTIONS.split(), "--data_dir", data]
        template += ["--dataset", WORKS[work]["dataset"], "--epochs", WORKS[work]["epochs"]]
        template += ["--effective_batch_size", batch_size, "--base_lr", WORKS[work]["lr"]]
        programs = {"template": template} | {peer: [python, HERE / "peers.py", peer, work, data] for peer in peers}
        found = {name: [] for name in programs}
        for number in range(rounds):
            for name, command in programs.items():
                seconds, loss = seconds_per_epoch(list(map(str, command)), folder)
                found[name].append((seconds := seconds / steps, loss))
                print(f"{work} round {number + 1} {name:>20} {1e6 * seconds:8.0f} us/step  loss {loss}", flush=True)
        for name, results in found.items():
            ratio = statistics.median(
                other / own for (own, _), (other, _) in zip(found["template"], results, strict=True)
            )
            micros = round(1e6 * statistics.median(seconds for seconds, _ in results))
            rows.append(
                {"work": work, "program": name, "us per step": micros, "template is faster by": round(ratio, 2)}
            )
            rows[-1]["loss"] = results[-1][1]
    return rows


def start_up(python: str, rounds: int, folder: Path) -> list[dict]:
    """Wall time of a whole run of one epoch of W1, of the template and of a raw script, and of --help."""
    template = copy_template("W1", folder / "template")
    options = ["--accelerator", "cpu", "--epochs", "1", "--logger_name", "csv"]
    programs = {"template": [template, *options], "raw": [HERE / "raw.py"], "help": [template, "--help"]}
    found = {name: [] for name in programs}
    for _ in range(rounds):
        for name, command in programs.items():
            began = time.perf_counter()
            subprocess.run([python, *command], cwd=folder, check=True, capture_output=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
            found[name].append(time.perf_counter() - began)
    ratios = [own / raw for own, raw in zip(found["template"], found["raw"], strict=True)]
    rows = [{"program": name, "seconds": round(statistics.median(times), 2)} for name, times in found.items()]
    return [*rows, {"program": "template / raw", "seconds": round(statistics.median(ratios), 2)}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--peers", nargs="+", default=PEERS + BATCHED, choices=PEERS + BATCHED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", help="an interpreter that has the peers, instead of benchmarks/.venv")
    parser.add_argument("--start_up", action="store_true")
    options = parser.parse_args()
    interpreter = options.python or python_with_peers()
    with tempfile.TemporaryDirectory() as temporary:
        if options.start_up:
            table = start_up(interpreter, options.rounds, Path(temporary))
        else:
            table = run(interpreter, options.works, options.peers, options.rounds, Path(temporary))
    print(
        *(" | ".join(f"{value!s:>20}" for value in row) for row in (table[0], *(row.values() for row in table))),
        sep="\n",
    )
    facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "platform": platform.platform()}
    name = "start_up.json" if options.start_up else "results.json"
    (HERE / name).write_text(json.dumps(facts | {"rows": table}, indent=2) + "\n")
