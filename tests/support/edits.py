"""The places of the programs that tests edit, by name. Where a change of the programs moves one, this file follows it,
and no test changes: a test says what it edits, not what the text around it is."""

import os
import re
import shutil
import subprocess
import textwrap
from dataclasses import fields
from pathlib import Path

import config

REPO = Path(__file__).resolve().parents[2]

OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"
SET_LR = "set_lr(optimizer, schedule(config, plan, step))  # times the rates that the optimizer was built with"

# name: (file, text that stands there once). A text that ends with a newline is a whole line.
POINTS = {
    # ---- train.py
    "functions": ("train.py", "def build_model("),
    "image shape": ("train.py", "image, _ = dataset[0]"),
    "use of dropout": ("train.py", "config.width, config.dropout)"),
    "model": ("train.py", "    return Model("),
    "batch": ("train.py", "    images, targets = batch\n"),
    "logits": ("train.py", "logits = model(images)"),
    "values": ("train.py", '{"loss": F.cross_entropy(logits, targets)}'),
    "outputs": ("train.py", "(logits, targets)\n"),
    "build_metrics": ("train.py", "def build_metrics("),
    "accuracy": ("train.py", 'average="micro"'),
    "metrics": ("train.py", '{"accuracy": accuracy}'),
    "collection": ("train.py", 'MetricCollection({"accuracy": accuracy}, compute_groups=False)'),
    "train": ("train.py", "def train("),
    "set up model": ("train.py", "    model = fabric.setup_module(model)\n"),
    "optimizer": ("train.py", OPTIMIZER),
    "set up optimizer": ("train.py", "fabric.setup_optimizers(optimizer)"),
    "set-up is done": ("train.py", "    metrics = build_metrics(config, train_set).to(fabric.device)\n"),
    "state": ("train.py", '        "step": 0,\n'),
    "state is there": (
        "train.py",
        "    run.restore()\n",
    ),
    "state is built": ("train.py", "    run.prepare(state, plan)\n"),
    "loop begins": ("train.py", "    for step in run.steps():"),
    "learning rate": ("train.py", f"        {SET_LR}\n"),
    "backward": ("train.py", 'fabric.backward(values["loss"] / plan.grad_accum_steps)'),
    "micro-batch is done": ("train.py", "                means.add(values)\n"),
    "optimizer steps": ("train.py", "        optimizer.step()\n"),
    "step is done": ("train.py", '        state["step"] = step\n'),
    "validation": ("train.py", "            results = validate(fabric, config, model, val_loader, metrics)\n"),
    "row is logged": ("train.py", "            run.log(row)\n"),
    "step begins": ("train.py", "        optimizer.zero_grad()\n"),
    "gradients are unscaled": ("train.py", "        unscale_gradients(fabric, optimizer)\n"),
    "run is finished": ("train.py", "    return run.finish()\n"),
    # ---- data.py
    "build_datasets": ("data.py", "def build_datasets("),
    "digits": ("data.py", "    from sklearn.datasets import load_digits\n"),
    "target tensor line": ("data.py", "    targets = torch.tensor(targets, dtype=torch.int64)\n"),
    "target tensor": ("data.py", "torch.tensor(targets,"),
    "split": ("data.py", "    train, val, test = np.split("),
    "statistics": ("data.py", "    std, mean = torch.std_mean(images[train])\n"),
    "training images": ("data.py", "ImageDataset(images[train]"),
    "shift": ("data.py", "shift=1 if augment else 0"),
    "validation images": ("data.py", "ImageDataset(images[val]"),
    "permutation": ("data.py", "np.random.default_rng(0)"),
    "num_classes": ("data.py", "self.num_classes = num_classes"),
    "length": ("data.py", "return len(self.targets)"),
    "fetch": ("data.py", "        index = torch.as_tensor(indices)\n"),
    "order": ("runtime/loader.py", "{self.seed} {epoch}"),
    "to device": ("runtime/loader.py", "map(self.fabric.to_device, batches)"),
    # ---- config.py, model.py
    "dropout option": (
        "config.py",
        "    dropout: float = non_negative(0.25, below=1, fixed=True)  "
        "# Probability of dropping a feature before the last layer\n",
    ),
    "options": ("config.py", '    dataset: Literal["digits"]'),
    "layers": ("model.py", "        self.layers = nn.Sequential(\n"),
    "first layer": ("model.py", "nn.Conv2d(channels, width, 3, padding=1),\n"),
    "last layer": ("model.py", "nn.Linear(2 * width"),
    "forward": ("model.py", "        return self.layers(images)\n"),
    # ---- what only tests of the template edit
    "Fabric": ("runtime/launch.py", "        fabric = Fabric(**options)\n"),
    "next batch": ("runtime/meters.py", "        batch = next(batches)\n"),
    "format": ("runtime/checkpoints.py", "FORMAT = 5"),
    "checkpoint is chosen": ("runtime/checkpoints.py", "    damaged = []\n"),
    "checkpoint is written": ("runtime/rundir.py", "        checkpoints.save(path, contents)\n"),
    "run ends": (
        "runtime/rundir.py",
        '        if error and not self.config.fast_run and any(self.path.glob("checkpoints/*.ckpt")):\n',
    ),
    "final weights": ("runtime/rundir.py", "            torch.save(with_tensors(Tensor.cpu, weights), file)\n"),
}


def copy_programs(folder: Path) -> Path:
    """Copies the programs into a folder, those that are not there yet."""
    (folder / "runtime").mkdir(parents=True, exist_ok=True)
    for path in [*REPO.glob("*.py"), *REPO.glob("runtime/*.py")]:
        copy = folder / path.relative_to(REPO)
        if not copy.exists():
            shutil.copy(path, copy)
    return folder


def apply(change: str, folder: Path) -> Path:
    """Makes a change to the programs in `folder`: the text of a patch, or an edit that a page shows."""
    if "\n@@ " not in change:
        return make_as_shown(change, folder)
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # of any repository
    subprocess.run(["git", "apply"], input=change, text=True, cwd=folder, env=outside, check=True)
    return folder


def make_as_shown(edit: str, folder: Path) -> Path:
    """Makes an edit as a reader of the page would: for each file, whose name stands behind a #, the places in it, with
    an empty line between them. The lines with a - go, those with a + come, and the others say where."""
    for part in re.split(r"^# (?=\S+$)", edit, flags=re.MULTILINE)[1:]:
        name, _, places = part.partition("\n")
        text = (folder / name).read_text()
        for place in re.split(r"\n\n+", places.strip("\n")):
            lines = place.split("\n")
            assert {line[0] for line in lines} <= {" ", "-", "+"}, place
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
            assert f"\n{text}".count(f"\n{old}") == 1, f"{name} has not once:\n{old}"
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
        (folder / name).write_text(text)
    return folder


def replace(program: Path, point: str, text: str) -> Path:
    """Puts a text in place of the one at an edit point, in a copy of the programs, which is made if it is not there."""
    name, old = POINTS[point]
    path = copy_programs(program) / name
    content = path.read_text()
    assert content.count(old) == 1, f"{point}: {name} has this {content.count(old)} times: {old}"
    path.write_text(content.replace(old, text))
    return program


def with_text(program: Path, name: str, *pairs: tuple[str, str]) -> Path:
    """Puts texts in place of others in a file of a program."""
    path = copy_programs(program) / name
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return program


# The options that a user deletes or replaces: the file that defines them, and those that use them, are all edited.
OF_DATA, OF_OPTIMIZATION = ([each.name for each in fields(group)] for group in (config.Data, config.Optimization))


def without_own_options(program: Path, names: list[str]) -> Path:
    """Deletes options where they are defined, and puts their defaults where they are used."""
    defaults = vars(config.TrainConfig())
    for path in copy_programs(program).glob("*.py"):
        text = re.sub(rf"^(?:    #.*\n)*    ({'|'.join(names)}): .*\n", "", path.read_text(), flags=re.MULTILINE)
        path.write_text(re.sub(rf"\bconfig\.({'|'.join(names)})\b", lambda used: repr(defaults[used[1]]), text))
    return program


def insert_before(program: Path, point: str, code: str) -> Path:
    """Puts lines of code before those at an edit point, as deep as these are."""
    return replace(program, point, indented(code, point) + POINTS[point][1])


def insert_after(program: Path, point: str, code: str) -> Path:
    """Puts lines of code after the one at an edit point, as deep as that is."""
    return replace(program, point, POINTS[point][1] + indented(code, point))


def indented(code: str, point: str) -> str:
    text = POINTS[point][1]
    margin = text[: len(text) - len(text.lstrip())]
    return textwrap.indent(textwrap.dedent(code).strip("\n") + "\n", margin)
