"""Edits of copies of the programs. A test names the statement or expression that it edits. It is found by its syntax
tree, so variables may have other names than here; the code of the test, which has those of here, then gets them."""

import ast
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import config

REPO = Path(__file__).resolve().parents[2]

# name: (file, function or class, the code that stands there once). `...` is whatever is there. Code that ends within a
# call is as long as what is given.
POINTS = {
    # ---- train.py
    "functions": ("train.py", "", "def build_model("),
    "use of dropout": ("train.py", "build_model", "config.dropout"),
    "model": ("train.py", "build_model", "return Model("),
    "batch": ("train.py", "compute_loss", "images, targets = batch"),
    "logits": ("train.py", "compute_loss", "logits = model(images)"),
    "values": ("train.py", "compute_loss", '{"loss": F.cross_entropy(logits, targets)}'),
    "count": ("train.py", "compute_loss", "len(targets)"),
    "outputs": ("train.py", "compute_loss", "(logits, targets)"),
    "build_metrics": ("train.py", "", "def build_metrics("),
    "accuracy": ("train.py", "build_metrics", 'average="micro"'),
    "metrics": ("train.py", "build_metrics", '{"accuracy": accuracy}'),
    "collection": ("train.py", "build_metrics", "MetricCollection(...)"),
    "train": ("train.py", "", "def train("),
    "set up model": ("train.py", "train", "model = fabric.setup_module(model)"),
    "optimizer": ("train.py", "train", "torch.optim.AdamW(model.parameters(), ..., lr=plan.peak_lr)"),
    "set up optimizer": ("train.py", "train", "fabric.setup_optimizers(optimizer)"),
    "set-up is done": ("train.py", "train", "metrics = build_metrics(config, train_set).to(fabric.device)"),
    "state": ("train.py", "train", '"step": 0'),
    "state is there": ("train.py", "train", "run.restore()"),
    "state is built": ("train.py", "train", "run.prepare(state, plan)"),
    "loop begins": ("train.py", "train", "for step in run.steps(): ..."),
    "learning rate": ("train.py", "train", "set_lr(optimizer, schedule(config, plan, step))"),
    "backward": ("train.py", "train", 'fabric.backward(values["loss"] / plan.grad_accum_steps)'),
    "micro-batch is done": ("train.py", "train", "means.add(values)"),
    "optimizer steps": ("train.py", "train", "optimizer.step()"),
    "step is done": ("train.py", "train", 'state["step"] = step'),
    "validation": ("train.py", "report", "results = validate(fabric, config, model, val_loader, metrics)"),
    "row is logged": ("train.py", "report", "run.log(row)"),
    "step begins": ("train.py", "train", "optimizer.zero_grad()"),
    "gradients are unscaled": ("train.py", "train", "unscale_gradients(fabric, optimizer)"),
    "run is finished": ("train.py", "train", "return run.finish()"),
    # ---- data.py
    "build_datasets": ("data.py", "", "def build_datasets("),
    "digits": ("data.py", "build_datasets", "from sklearn.datasets import load_digits"),
    "target tensor line": ("data.py", "build_datasets", "targets = torch.tensor(targets, dtype=torch.int64)"),
    "target tensor": ("data.py", "build_datasets", "torch.tensor(targets,"),
    "split": ("data.py", "build_datasets", "train, val, test = np.split(...)"),
    "statistics": ("data.py", "build_datasets", "std, mean = torch.std_mean(images[train])"),
    "training images": ("data.py", "build_datasets", "ImageDataset(images[train]"),
    "shift": ("data.py", "build_datasets", "shift=1 if augment else 0"),
    "validation images": ("data.py", "build_datasets", "ImageDataset(images[val]"),
    "permutation": ("data.py", "build_datasets", "np.random.default_rng(0)"),
    "num_classes": ("data.py", "ImageDataset", "self.num_classes = num_classes"),
    "length": ("data.py", "ImageDataset", "return len(self.targets)"),
    "length of data": ("data.py", "ImageDataset", "def __len__("),
    "fetch": ("data.py", "__getitems__", "index = torch.as_tensor(indices)"),
    "to device": ("runtime/loader.py", "", "map(self.fabric.to_device, batches)"),
    # ---- config.py, model.py
    "dropout option": ("config.py", "", "dropout: float = ..."),
    "options": ("config.py", "", 'dataset: Literal["digits"] = ...'),
    "layers": ("model.py", "Model", "self.layers = nn.Sequential(...)"),
    "first layer": ("model.py", "Model", "nn.Conv2d(channels, width, 3, padding=1)"),
    "last layer": ("model.py", "Model", "nn.Linear(...)"),
    "forward": ("model.py", "forward", "return self.layers(images)"),
    # ---- what only tests of the template edit
    "Fabric": ("runtime/launch.py", "", "fabric = Fabric(**options)"),
    "next batch": ("runtime/meters.py", "", "batch = next(batches)"),
    "format": ("runtime/checkpoints.py", "", "FORMAT = ..."),
    "checkpoint is written": ("runtime/rundir.py", "", "checkpoints.save(path, contents)"),
    "run ends": ("runtime/rundir.py", "", "if error and ...: ..."),
}


class Place(NamedTuple):
    """Where a piece of code stands in a file."""

    start: int
    end: int
    names: dict[str, str]  # of the variables, by those that the code has for them


def place_of(text: str, where: str, code: str, known: dict[str, str]) -> Place:
    """Finds the one place of a piece of code in a function or class of a file, where some names of variables are known;
    of several, that with the fewest other names."""
    pattern = pattern_of(code)
    found = []
    for node in (node for scope in scopes_of(text, where) for node in ast.walk(scope)):
        entries = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        for parts in ((node,), *entries):
            names = dict(known)
            if len(parts) == len(pattern) and all(same(*pair, names) for pair in zip(pattern, parts, strict=True)):
                found.append(Place(offset(text, parts[0]), end_of(text, code, pattern[-1], parts[-1]), names))
    others = [sum(here != there for here, there in place.names.items()) for place in found]
    best = [place for place, number in zip(found, others, strict=True) if number == min(others)]
    assert len(best) == 1, f"{len(best)} times in {where or 'the file'}: {code}"
    return best[0]


@cache
def pattern_of(code: str) -> tuple[Any, ...]:
    """The tree of a piece of code; of an entry of a dict, those of the key and the value."""
    if re.match(r'"\w+": ', code):
        entry: Any = ast.parse(f"{{{code}}}", mode="eval").body
        return entry.keys[0], entry.values[0]
    if re.match(r"\w+=[^=]", code):
        call: Any = ast.parse(f"f({code})", mode="eval").body
        return (call.keywords[0],)
    if code.startswith("def "):
        code += "): ..."
    elif is_open(code):
        code += "...)" if code[-1] in "(," else ", ...)"
    (statement,) = ast.parse(code).body
    return (statement.value if isinstance(statement, ast.Expr) else statement,)


def is_open(code: str) -> bool:
    return code.count("(") > code.count(")")


def scopes_of(text: str, where: str) -> list[ast.AST]:
    """The functions or classes of a name; for no name, the file."""
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == where] if where else [tree]


def same(pattern: Any, node: Any, names: dict[str, str]) -> bool:
    """Whether a tree is that of a pattern, but for the names of variables, which `names` gets."""
    if is_anything(pattern):
        return True
    if isinstance(pattern, list):
        if pattern and is_anything(pattern[-1]):
            pattern, node = pattern[:-1], node[: len(pattern) - 1]
        return len(pattern) == len(node) and all(same(*pair, names) for pair in zip(pattern, node, strict=True))
    if not isinstance(pattern, ast.AST):
        return pattern == node
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.FunctionDef):
        return pattern.name == node.name
    if isinstance(pattern, ast.Name):
        return names.setdefault(pattern.id, node.id) == node.id
    given = set(pattern._fields) - {"ctx", "annotation"}
    if isinstance(pattern, ast.Call) and pattern.args and is_anything(pattern.args[-1]):
        known = {each.arg: each.value for each in node.keywords}
        if not all(same(each.value, known.get(each.arg), names) for each in pattern.keywords):
            return False
        given.remove("keywords")
    return all(same(getattr(pattern, name), getattr(node, name), names) for name in given)


def is_anything(pattern: Any) -> bool:
    """Whether it is `...`, as an expression or as a body."""
    pattern = pattern[0] if isinstance(pattern, list) and len(pattern) == 1 else pattern
    pattern = pattern.value if isinstance(pattern, ast.Expr) else pattern
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def offset(text: str, node: Any, is_end: bool = False) -> int:
    line, column = (node.end_lineno, node.end_col_offset) if is_end else (node.lineno, node.col_offset)
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def end_of(text: str, code: str, pattern: Any, node: Any) -> int:
    """The end of a piece of code, which may be in the middle of a call."""
    if not is_open(code):
        return offset(text, node, is_end=True)
    if isinstance(node, ast.FunctionDef):
        return text.index("(", offset(text, node)) + 1
    call, given = (each.value if isinstance(each, ast.Return) else each for each in (node, pattern))
    num_given = len(given.args) - 1
    if not num_given:
        return text.index("(", offset(text, call.func, is_end=True)) + 1
    end = offset(text, call.args[num_given - 1], is_end=True)
    return text.index(",", end) + 1 if code[-1] == "," else end


@cache
def names_in(name: str, where: str) -> dict[str, str]:
    """The names that the variables of the points above have in a function. The points that are found once tell them,
    and by these the others are found."""
    codes = [code for file, scope, code in POINTS.values() if (file, scope) == (name, where)]
    text = (REPO / name).read_text() if codes else ""  # it may be a file that only a recipe has
    found: dict[str, str] = {}
    for _ in range(3):
        for code in codes:
            with suppress(AssertionError):
                found |= place_of(text, where, code, found).names
    return (names_in(name, "train") if where == "report" else {}) | found


def renamed(code: str, names: dict[str, str]) -> str:
    """Code of a test with the names that the variables have; not those of arguments, attributes and entries."""
    for here, there in names.items():
        code = code if here == there else re.sub(rf"(?<![\w.\"']){here}\b(?![\"']|=[^=])", there, code)
    return code


# ---- edit it


def copy_programs(folder: Path) -> Path:
    """Copies the programs into a folder, those that are not there yet."""
    (folder / "runtime").mkdir(parents=True, exist_ok=True)
    for path in [*REPO.glob("*.py"), *REPO.glob("runtime/*.py")]:
        copy = folder / path.relative_to(REPO)
        if not copy.exists():
            shutil.copy(path, copy)
    return folder


def replace(program: Path, point: str | tuple[str, str, str], code: str) -> Path:
    """Puts code in place of that at an edit point, in a copy of the programs, which is made if it is not there. A point
    of a test's own is a file, a function or class, and the code there. What ends with a newline is whole lines, and so
    is nothing."""

    def change(text: str, start: int, end: int, code: str) -> str:
        first, last = lines_of(text, start, end)
        if (code == "" or code.endswith("\n")) and re.fullmatch(r" *", text[first:start]) and is_rest(text[end:last]):
            return text[:first] + code + text[last:]
        if text[end] == ",":
            code = code.removesuffix(",\n")
        return text[:start] + code.removesuffix("\n").lstrip(" ") + text[end:]

    return changed(program, point, code, change)


def insert_before(program: Path, point: str | tuple[str, str, str], code: str) -> Path:
    """Puts lines of code before those at an edit point, as deep as these are."""

    def change(text: str, start: int, end: int, code: str) -> str:
        first, _ = lines_of(text, start, end)
        return text[:first] + indented(code, text[first:]) + text[first:]

    return changed(program, point, code, change)


def insert_after(program: Path, point: str | tuple[str, str, str], code: str) -> Path:
    """Puts lines of code after the one at an edit point, as deep as that is."""

    def change(text: str, start: int, end: int, code: str) -> str:
        first, last = lines_of(text, start, end)
        return text[:last] + indented(code, text[first:]) + text[last:]

    return changed(program, point, code, change)


def changed(program: Path, point: str | tuple[str, str, str], code: str, change: Callable) -> Path:
    name, where, pattern = POINTS[point] if isinstance(point, str) else point
    path = copy_programs(program) / name
    text = path.read_text()
    names = names_in(name, where)
    start, end, _ = place_of(text, where, pattern, names)
    path.write_text(change(text, start, end, renamed(code, names)))
    return program


def lines_of(text: str, start: int, end: int) -> tuple[int, int]:
    """Where the lines of a piece of code begin and end."""
    return text.rfind("\n", 0, start) + 1, text.index("\n", end) + 1


def is_rest(text: str) -> bool:
    """Whether it is a comment at most, after a comma."""
    return re.fullmatch(r",? *(#.*)?\n", text) is not None


def indented(code: str, line: str) -> str:
    margin = line[: len(line) - len(line.lstrip(" "))]
    return textwrap.indent(textwrap.dedent(code).strip("\n") + "\n", margin)


def entries_of(table: str) -> list[list]:
    """The entries of a table that is a text: the cells of a line at the margin, and below it edits for `with_edits`. An
    edit is: before, after or replace | a point, or a file, a function and the code there | the code, which stands
    below if it has several lines."""
    found = []
    for entry in re.split(r"\n+(?=\S)", table.strip()):
        head, *lines = re.split(r"\n  (?=\S)", entry)
        parts = [edit.split(" |", 2) for edit in lines]
        edits = [(f"{how.strip()} {point.strip()}", textwrap.dedent(code).strip()) for how, point, code in parts]
        found.append([*head.split(" | "), edits])
    return found


def with_edits(program: Path, edits: dict[str, str] | list[tuple[str, str]]) -> Path:
    """Makes several edits of a copy of the programs. Each is a place and the code. The place says what is done, and at
    which point, or in which file and function at which code: "before state", "after step is done", "replace
    data.py, collate_fn, return batch"."""
    for place, code in edits.items() if isinstance(edits, dict) else edits:
        how, _, point = place.partition(" ")
        make = {"before": insert_before, "after": insert_after, "replace": replace}[how]
        make(program, point if point in POINTS else tuple(point.split(", ", 2)), code)
    return copy_programs(program)


def with_text(program: Path, name: str, *pairs: tuple[str, str]) -> Path:
    """Puts texts in place of others in a file of a program."""
    path = copy_programs(program) / name
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return program


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


# The options that a user deletes or replaces: the file that defines them, and those that use them, are all edited.
OF_DATA, OF_OPTIMIZATION = ([each.name for each in fields(group)] for group in (config.Data, config.Optimization))


def without_own_options(program: Path, names: list[str]) -> Path:
    """Deletes options where they are defined, and puts their defaults where they are used."""
    defaults = vars(config.TrainConfig())
    for path in copy_programs(program).glob("*.py"):
        text = re.sub(rf"^(?:    #.*\n)*    ({'|'.join(names)}): .*\n", "", path.read_text(), flags=re.MULTILINE)
        path.write_text(re.sub(rf"\bconfig\.({'|'.join(names)})\b", lambda used: repr(defaults[used[1]]), text))
    return program
