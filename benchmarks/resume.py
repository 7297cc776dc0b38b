"""Which samples Lightning's Trainer trains in an epoch in which it is killed. Half a minute; prints only.

python benchmarks/resume.py

It saves after 8 of the 19 batches of the second epoch, is killed by SIGKILL two batches later, and goes on from that
checkpoint. Counted is what ends up in the weights: the batches before the checkpoint, and those after the resume.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH_SIZE, SAVED = 1216, 64, 27  # 19 batches an epoch


class Numbers(Dataset):
    """Samples that have their number beside them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.ones(8), index % 10, index


class Module(L.LightningModule):
    def __init__(self, last: int):
        super().__init__()
        self.model, self.last = torch.nn.Linear(8, 10), last

    def training_step(self, batch, _):
        images, targets, numbers = batch
        if self.global_step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        print("trained", self.global_step, self.current_epoch, *numbers.tolist(), flush=True)
        return F.cross_entropy(self.model(images), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def train(last: int, checkpoint: str | None = None) -> None:
    L.seed_everything(42)
    saves = L.pytorch.callbacks.ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=9, save_top_k=-1)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[saves], **quiet)
    trainer.fit(Module(last), DataLoader(Numbers(), BATCH_SIZE, shuffle=True), ckpt_path=checkpoint)


def trained(folder: str, *options) -> dict[int, tuple]:
    """Trains in a process of its own. Returns the epoch and the samples of each step."""
    command = [sys.executable, os.path.abspath(__file__), *map(str, options)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("trained ")]
    return {int(step): (int(epoch), numbers) for step, epoch, *numbers in lines}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = trained(folder, SAVED + 2)
        after = trained(folder, -1, f"checkpoints/step={SAVED}.ckpt")
    assert max(before) == SAVED + 1 and min(after) == SAVED, "it was not killed, or began elsewhere"
    steps = {step: result for step, result in before.items() if step < SAVED} | after
    times = Counter(number for epoch, numbers in steps.values() if epoch == 1 for number in numbers)
    batches = sum(epoch == 1 for epoch, _ in steps.values())
    twice = sum(count == 2 for count in times.values())
    print(f"{batches} batches; of {SAMPLES} samples {twice} came twice, {SAMPLES - len(times)} never")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), *sys.argv[2:])
    else:
        main()
