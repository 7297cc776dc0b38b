"""A step of the default model on a GPU, by the template, the raw loop that one would write, Lightning's Trainer and
accelerate. Each runs in a process of its own, in turn; medians of windows of 500 steps. Prints only.

python benchmarks/gpu.py                                   # in 32-true, with TF32
python benchmarks/gpu.py --precisions 32-true bf16-mixed
python benchmarks/gpu.py --cpu --rounds 1 --steps 80       # a trial without a GPU
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import timed
import torch
import torch.nn.functional as F
from timed import Clock, Work
from torch.utils.data import DataLoader, TensorDataset

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from config import TrainConfig  # noqa: E402
from data import build_datasets  # noqa: E402
from train import build_model  # noqa: E402

BATCH_SIZE = TrainConfig().effective_batch_size


def build_work(device: str, precision: str) -> Work:
    dataset = build_datasets(TrainConfig())["train"]
    images, targets = (torch.stack([torch.as_tensor(value) for value in part]) for part in zip(*dataset, strict=True))
    loader = DataLoader(
        TensorDataset(images, targets), BATCH_SIZE, shuffle=True, drop_last=True, pin_memory=device == "cuda"
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build_model(TrainConfig(), dataset).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), TrainConfig().base_lr, fused=True)
    return Work(model, optimizer, loader, loss_of, device, precision)


def loss_of(model, images, targets):
    return F.cross_entropy(model(images), targets)


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


PEERS = {"raw": raw, "lightning": timed.lightning, "accelerate": timed.accelerate}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000, help="of each run, a multiple of 8: there are 8 windows")
    parser.add_argument("--precisions", nargs="+", default=["32-true"], choices=["32-true", "bf16-mixed"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--peer", choices=PEERS, help="runs one of the others in this process")
    options = parser.parse_args()
    device = timed.choose_device(options)
    if options.peer:
        clock = Clock(options.steps)
        PEERS[options.peer](build_work(device, options.precisions[0]), clock)
        print(json.dumps(clock.figures()))
        return
    peers = ["raw", *timed.installed(["lightning", "accelerate"])]
    for precision in options.precisions:
        template = [REPO / "train.py", "--precision", precision]
        programs = {"template": partial(timed.figures_of_template, template, device, options.steps, BATCH_SIZE)}
        for peer in peers:
            command = [Path(__file__).resolve(), "--peer", peer, "--precisions", precision, "--steps", options.steps]
            programs[peer] = partial(timed.figures_of_peer, command + ["--cpu"] * options.cpu)
        print(precision)
        timed.compare(programs, options.rounds)


if __name__ == "__main__":
    main()
