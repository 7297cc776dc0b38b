"""The recipes but the large ones: each applied to a copy of the programs and run."""

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from edits import apply, copy_programs
from helpers import ON_2, RECIPES, REPO, SMALL, TOOLS, call, imported, patch_of, run, run_dir, with_patch, with_recipe

PATCHES = sorted([*RECIPES.glob("*/*.patch"), *REPO.glob("benchmarks/*.patch")])


# ---- options

NUMBERS = (int, float, int | float)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_each_number_that_a_recipe_adds_has_a_bound(patch: Path, tmp_path: Path):
    config = imported(with_patch(patch, tmp_path), "config")
    numbers = {option.name: option.metadata for option in fields(config.TrainConfig) if option.type in NUMBERS}
    assert [name for name, marks in numbers.items() if marks.get("above") is marks.get("at_least") is None] == []


# ---- profiler


def test_profiler_writes_a_trace_of_the_steps(tmp_path: Path):
    program = with_recipe("profiler", tmp_path / "program")
    done = run(f"{program}/train.py {SMALL} --profile 3 {ON_2}", tmp_path)
    assert done.stdout.count("Self CPU time total") == 1  # of rank 0 alone
    events = json.loads((run_dir(tmp_path) / "trace-00000008.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"}  # counted from 0


@pytest.mark.parametrize("max_steps, recorded", [(7, 2), (5, 0)])
def test_a_profile_has_no_more_steps_than_were_run(max_steps: int, recorded: int, tmp_path: Path):
    program = with_recipe("profiler", tmp_path / "program")
    printed = call(f"{program}/train.py {SMALL} --profile 3 --max_steps {max_steps}", tmp_path).stdout
    assert (f"trace of {recorded} steps" in printed) == (recorded > 0)
    assert len([*run_dir(tmp_path).glob("trace-*.json")]) == (recorded > 0)


def test_a_profile_is_not_in_the_speed_and_a_resume_makes_another(tmp_path: Path):
    program = with_recipe("profiler", tmp_path / "program")
    profiling = program / "wall_time.py"
    text = profiling.read_text()
    assert text.count("        print(profiler.") == 1
    slow = text.replace("        print(profiler.", "        __import__('time').sleep(5)\n        print(profiler.")
    profiling.write_text(slow)
    call(f"{program}/train.py {SMALL} --profile 3 --max_steps 8", tmp_path)
    with open(run_dir(tmp_path) / "logs" / "csv" / "metrics.csv") as file:
        row = [*csv.DictReader(file)][-1]
    assert row["step"] == "8" and float(row["samples_per_second"]) > 4 * 64 / 5
    profiling.write_text(text)
    call(f"{program}/train.py --resume auto --max_steps 20", tmp_path)
    names = sorted(path.name for path in run_dir(tmp_path).glob("trace-*.json"))
    assert names == ["trace-00000008.json", "trace-00000016.json"]


# ---- style


def assert_ruff_finds_nothing(command: str, folder: Path) -> None:
    """In any of the programs in `folder`, each with a pyproject.toml of its own: of what is beside it."""
    ruff = [Path(sys.executable).parent / "ruff", *command.split(), "--no-cache", "."]
    done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_patch_leaves_the_style_as_it_is(tmp_path: Path):
    for patch in PATCHES:
        shutil.copy(REPO / "pyproject.toml", with_patch(patch, tmp_path / patch.stem))
    for command in ("check", "format --check"):
        assert_ruff_finds_nothing(command, tmp_path)


# The rows of the page's table: folder, name, and those that the recipe does not go with. In italics, both apply.
TABLE = re.findall(
    r"^\| \[(\w+)/(\w+)\]\(\1/\2\.patch\) \|(?:[^|]*\|){3} ?([^|]*) \|",
    (RECIPES / "README.md").read_text(),
    re.MULTILINE,
)


def pairs_that(italics: bool) -> set[frozenset]:
    """The pairs that apply and fail; or those of which the second one does not apply."""
    found = [(name, other) for _, name, others in TABLE for other in others.split(", ") if other]
    return {frozenset((name, other.strip("*"))) for name, other in found if ("*" in other) == italics}


def changed_lines(recipe: str) -> set[tuple]:
    """What a patch changes, with a line before and after: names of files, and numbers of lines in them."""
    found, name = set(), ""
    for line in patch_of(recipe).read_text().splitlines():
        name = line.removeprefix("--- a/") if line.startswith("--- ") else name
        if hunk := re.match(r"@@ -(\d+)(?:,(\d+))? ", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found |= {(name, number) for number in range(first, first + count + 1)}
    return found


METHODS = [name for folder, name, _ in TABLE if folder == "methods"]
FEATURES = [
    "ema",
    *(name for folder, name, _ in TABLE if folder in ("features", "cluster")),
]  # averaged weights go with other kinds
APART = pairs_that(italics=False)
PAIRS = [(kind, feature) for kind in METHODS for feature in FEATURES if kind != feature]
NEIGHBOURS = [
    pair
    for pair in PAIRS
    if changed_lines(pair[0]) & changed_lines(pair[1]) and frozenset(pair) not in APART | pairs_that(italics=True)
]
# What a recipe needs to be tried, and to run as it is meant to.
NEEDS = {
    "crossvalidation": "--fold 1",
    "distillation": "--teacher {teacher}",
    "profiler": "--profile 1",
    "reference": "--reference {teacher}",
    "sharded": "--strategy model_parallel --devices 1",
}


@pytest.mark.parametrize("first", sorted({*METHODS, *FEATURES}))
def test_the_page_names_the_recipes_that_do_not_go_together(first: str, tmp_path: Path):
    """All other pairs apply, the feature second, and leave the style as it is."""
    program = with_recipe(first, tmp_path / "first")
    shutil.copy(REPO / "pyproject.toml", program)
    fit = []
    for second in FEATURES:
        both = Path(shutil.copytree(program, tmp_path / second))
        try:
            apply(patch_of(second).read_text(), both)
        except subprocess.CalledProcessError:
            shutil.rmtree(both)
        else:
            fit.append(second)
    assert_ruff_finds_nothing("check", tmp_path)
    assert fit == [second for second in FEATURES if second != first and frozenset((first, second)) not in APART]


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("data/*.patch")))
def test_the_page_names_the_recipes_after_which_a_data_patch_is_refused(name: str, tmp_path: Path):
    page = " ".join((RECIPES / "README.md").read_text().split())
    of_all, of_datasets, others = page.partition("`git apply` also refuses ")[2].partition(".")[0].split(";")
    assert "second data patch" in others
    text = of_all + of_datasets if name == "datasets" else of_all
    named = {recipe for recipe in (*METHODS, *FEATURES) if re.search(rf"\b{recipe}\b", text)}
    refused = set()
    for first in {*METHODS, *FEATURES}:
        try:
            apply(patch_of(name).read_text(), with_recipe(first, tmp_path / first))
        except subprocess.CalledProcessError:
            refused.add(first)
    assert refused == named


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("teacher")
    call(f"train.py {SMALL} --epochs 1", cwd)
    return run_dir(cwd)


@pytest.mark.night
@pytest.mark.parametrize("kind, feature", NEIGHBOURS)
def test_recipes_that_change_neighbouring_lines_train_together(kind: str, feature: str, teacher: Path, tmp_path: Path):
    if kind == "text_classification":
        pytest.importorskip("transformers")
    program = apply(patch_of(feature).read_text(), with_recipe(kind, tmp_path / "program"))
    options = f"{NEEDS.get(kind, '')} {NEEDS.get(feature, '')}".format(teacher=teacher)
    steps = "--max_steps 3 --warmup_epochs 0 --val_interval 1 --log_interval 1 --checkpoint_interval 1"
    options += " --limit_val_batches 1"
    how = run if "sharded" in (kind, feature) else call  # its launcher would change the threads of this process
    how(f"{program}/train.py --accelerator cpu {steps} {options}", tmp_path)
    call(f"{program}/test.py --accelerator cpu --checkpoint last", tmp_path)


def test_the_page_has_a_row_for_each_recipe():
    folders = ("methods", "features", "cluster", "data", "ports")
    recipes = [(folder, path.stem) for folder in folders for path in sorted((RECIPES / folder).glob("*.patch"))]
    assert [row[:2] for row in TABLE] == recipes


def test_check_says_which_recipe_no_longer_applies(tmp_path: Path):
    """On a copy in which a recipe's lines first move, and then change."""

    def check(option: str = "", code: int = 0) -> dict[str, str]:
        lines = run(f"{tmp_path}/tools/check_recipes.sh {option}", tmp_path, code).stdout.splitlines()
        return {re.search(r"recipes/(\S+)", line)[1]: line.partition(":")[0] for line in lines}

    copy_programs(tmp_path)
    patch = Path(shutil.copytree(RECIPES, tmp_path / "recipes")) / "data" / "mapped.patch"
    shutil.copytree(TOOLS, tmp_path / "tools")
    good = {f"{path.parent.name}/{path.name}": "applies" for path in RECIPES.glob("*/*.patch")}
    config = (tmp_path / "config.py").read_text()
    (tmp_path / "config.py").write_text("# a new line\n" + config)
    before = patch.read_text()
    assert check() == good and patch.read_text() == before
    assert check("--write") == good and patch.read_text() != before
    assert patch.read_text().partition("diff --git")[0] == before.partition("diff --git")[0] != ""
    assert check() == good
    (tmp_path / "config.py").write_text(config.replace('dataset: Literal["digits"]', 'dataset: Literal["digits", "x"]'))
    failing = [
        f"{path.parent.name}/{path.name}"
        for path in RECIPES.glob("*/*.patch")
        if '    dataset: Literal["digits"] = option(' in path.read_text()
    ]
    assert "data/mapped.patch" in failing
    assert check("--write", code=len(failing)) == good | dict.fromkeys(failing, "FAILS")


def test_the_pages_count_the_lines_as_check_does():
    counted = re.findall(r"recipes/(\S+)  \((\d+) files, (\d+) lines\)", run("tools/check_recipes.sh", REPO).stdout)
    pages = (RECIPES / "README.md").read_text()
    for recipe, files, lines in counted:
        row = next(line for line in pages.splitlines() if f"]({recipe}) |" in line)
        assert f"| {files} | {lines} |" in row or f"| {lines} |" in row, row
