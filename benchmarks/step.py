"""The CPU time of a training step with each of those ways of docs/speed.md that a CPU has, too: one thread, a
micro-batch of 64 images, medians of 30 alternating rounds of three steps. Two minutes; prints only.

python benchmarks/step.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from model import Model  # noqa: E402

WAYS = ["plain", "bf16-mixed", "channels_last", "--compile", "--compile, channels_last"]
SHAPES = [(1, 8, 8), (3, 32, 32)]


def step_of(way: str, shape: tuple[int, int, int]) -> Callable:
    """A function that makes a step of the default model."""
    torch.manual_seed(0)
    memory_format = torch.channels_last if "channels_last" in way else torch.contiguous_format
    model = Model(shape, num_classes=10).to(memory_format=memory_format)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, dynamic=False) if "--compile" in way else model
    images = torch.randn(64, *shape)
    targets = torch.randint(10, (64,))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16-mixed"):
            logits = forward(images.to(memory_format=memory_format))
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # compiles
    return step


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for shape in SHAPES:
        steps = {way: step_of(way, shape) for way in WAYS}
        seconds: dict = {way: [] for way in WAYS}
        for _ in range(30):
            for way, step in steps.items():
                began = time.process_time()
                for _ in range(3):
                    step()
                seconds[way].append((time.process_time() - began) / 3)
        for way in WAYS:
            print(f"{shape}  {way:26} {1000 * statistics.median(seconds[way]):7.2f} ms")


if __name__ == "__main__":
    main()
