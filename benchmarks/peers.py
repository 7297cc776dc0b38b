"""What one would use instead of the template, each in its own usual way. run.py starts and times it.

python benchmarks/peers.py PEER WORK     # prints a line with the mean loss at the end of each epoch
python benchmarks/peers.py start_up      # a whole run of one epoch of W1, as one would write it down

PEER-batched gets its batches from the template's data.py.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from run import VALIDATED, WORKS, build, tensors
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

LOG_EVERY = 50


def report(epoch: int, loss: float) -> None:
    print(f"epoch {epoch} loss {loss:.5f}", flush=True)


class Log:
    """The running loss, read every 50 steps as in the template."""

    def __init__(self):
        self.sum, self.steps, self.last = torch.zeros(()), 0, 0.0

    def add(self, loss: torch.Tensor) -> None:
        self.sum += loss.detach()
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            self.last = self.sum.item() / LOG_EVERY
            self.sum.zero_()


@torch.no_grad()
def validate(model, images, targets):
    """Mean loss and accuracy, in batches as large as those of the template."""
    loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for batch, labels in zip(images.split(50), targets.split(50), strict=True):
        logits = model(batch)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    return loss_sum.item() / len(images), correct.item() / len(images)


def raw(model, optimizer, loader, epochs, val=None):
    log = Log()
    for epoch in range(1, epochs + 1):
        for images, targets in loader:
            loss = F.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.add(loss)
        if val:
            validate(model, *val)
        report(epoch, log.last)


def limit(model, optimizer, images, targets, batch_size, epochs, val=None):
    """The least that a loop can do: no DataLoader, tensors in memory. For a batch of W2 index_select takes 37 µs, []
    takes 131, and to copy all images in their new order once an epoch takes 243."""
    log = Log()
    for epoch in range(1, epochs + 1):
        for index in torch.randperm(len(images)).split(batch_size)[: len(images) // batch_size]:
            loss = F.cross_entropy(model(images.index_select(0, index)), targets.index_select(0, index))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.add(loss)
        if val:
            validate(model, *val)
        report(epoch, log.last)


def lightning(model, optimizer, loader, epochs):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model, Log()

        def training_step(self, batch, index):
            images, targets = batch
            loss = F.cross_entropy(self.model(images), targets)
            self.log("train/loss", loss)
            self.losses.add(loss)
            return loss

        def on_train_epoch_end(self):
            report(self.current_epoch + 1, self.losses.last)

        def configure_optimizers(self):
            return optimizer

    quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    logger = L.pytorch.loggers.CSVLogger("logs")
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=logger, log_every_n_steps=LOG_EVERY, **quiet)
    trainer.fit(Module(), loader)


def accelerate(model, optimizer, loader, epochs):
    from accelerate import Accelerator

    accelerator, log = Accelerator(cpu=True), Log()
    model, optimizer = accelerator.prepare(model, optimizer)
    if loader.batch_size is not None:  # the template's batches it would replace by single samples
        loader = accelerator.prepare(loader)
    for epoch in range(1, epochs + 1):
        for images, targets in loader:
            loss = F.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log.add(loss)
        report(epoch, log.last)


def pytorch_accelerated(model, optimizer, loader, epochs):
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import TrainerCallback

    class Report(TrainerCallback):
        def on_train_epoch_end(self, trainer, **_):
            report(trainer.run_history.current_epoch, float(trainer._loss_tracker.average))

    class OwnLoader(Trainer):
        def create_train_dataloader(self, *_, **__):
            return loader

    trainer = OwnLoader(model, loss_func=F.cross_entropy, optimizer=optimizer, callbacks=(Report,))
    trainer.train(loader.dataset, epochs)


def hf(model, optimizer, loader, epochs):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, images, labels):
            logits = self.model(images)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class Report(TrainerCallback):
        def on_epoch_end(self, args, state, control, **_):
            report(round(state.epoch), next((row["loss"] for row in state.log_history[::-1] if "loss" in row), 0.0))

    class Named:
        """The loader's batches by the names of forward's arguments."""

        def __iter__(self):
            return ({"images": images, "labels": labels} for images, labels in loader)

        def __len__(self):
            return len(loader)

    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            return Named()

    arguments = TrainingArguments(
        "hf", num_train_epochs=epochs, logging_steps=LOG_EVERY, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, dataloader_drop_last=True, lr_scheduler_type="constant",
    )  # fmt: skip
    OwnLoader(Wrapped(), arguments, train_dataset=Named(), callbacks=[Report()], optimizers=(optimizer, None)).train()


def batched_loader(images: Tensor, targets: Tensor, batch_size: int) -> Iterable:
    """The template's loader. Imported here alone: the start of a raw script has nothing of the template."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from lightning.fabric import Fabric

    from config import TrainConfig
    from data import ImageDataset
    from runtime.loader import Loader, TrainSampler
    from utils import make_plan

    class Epochs(TrainSampler):
        """Goes on to the next epoch by itself, and has a length: the template's loop needs neither."""

        def __len__(self):
            return self.plan.steps_per_epoch

        def __iter__(self):
            yield from super().__iter__()
            self.step += self.plan.steps_per_epoch

    dataset = ImageDataset(images, targets, num_classes=10)
    config = TrainConfig(effective_batch_size=batch_size)
    plan = make_plan(config, len(images), val_samples=0, world_size=1, saved_size=0)
    return Loader(Fabric(accelerator="cpu", devices=1), dataset, Epochs(plan, dataset, rank=0, seed=0), config)


def plain_loader(images: Tensor, targets: Tensor, batch_size: int) -> Iterable:
    return DataLoader(TensorDataset(images, targets), batch_size, shuffle=True, drop_last=True)


def start_up() -> None:
    datasets = tensors("W1")
    loader = plain_loader(*datasets["train"], batch_size=64)
    model = build("W1")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    raw(model, optimizer, loader, epochs=1, val=datasets["val"])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "raw.pt")


def main(peer: str, work: str) -> None:
    name, _, batched = peer.partition("-")
    batch_size, epochs = WORKS[work]["batch_size"], WORKS[work]["epochs"]
    datasets = tensors(work)
    images, targets = datasets["train"]
    validation = {"val": datasets["val"]} if work in VALIDATED else {}
    model = build(work)
    optimizer_class = getattr(torch.optim, WORKS[work]["optimizer"].rpartition(".")[2])
    optimizer = optimizer_class(model.parameters(), WORKS[work]["lr"], fused=True if name == "limit" else None)
    loader = (batched_loader if batched else plain_loader)(images, targets, batch_size)
    if name == "limit":
        limit(model, optimizer, images, targets, batch_size, epochs, **validation)
    else:
        globals()[name](model, optimizer, loader, epochs, **validation)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["start_up"]:
        start_up()
    else:
        main(*sys.argv[1:])
