"""What holds for each recipe, as tables: it applies and keeps the style, its command does what its preface says, killed
and resumed it is the same run, and mistakes are told. That it trains alike on two processes, and that test.py finds the
values of the run, show the tests of a project, which tests/template/test_copy.py runs after each recipe each night;
so do they with data workers, and after a kill of two processes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import LONG, ON_2, RECIPES, REPO, SMALL, TOOLS, call, execute, run
from comparisons import assert_same_training, killed_and_resumed, on_one_and_two
from copies import diffs, edited, patch_of, with_patch, with_recipe
from edits import apply, copy_programs, with_edits
from mistakes import refuses
from outputs import history, read_tensorboard, results, rows, run_dir, state_of, weights

pytestmark = pytest.mark.recipes
PATCHES = sorted([*RECIPES.glob("*/*.patch"), *REPO.glob("benchmarks/*.patch")])
NAMES = sorted(path.stem for path in RECIPES.glob("*/*.patch"))
OF_EXTRA_PACKAGES = {"text_classification": "transformers"}


# ---- each applies, and keeps the style

DIFFS = [diff for page in sorted(REPO.glob("docs/*.md")) for diff in diffs(page.relative_to(REPO)) if ".py\n" in diff]


def ruff_finds(command: str, folder: Path) -> str:
    """In any of the programs in `folder`, each with a pyproject.toml of its own: of what is beside it."""
    ruff = [Path(sys.executable).parent / "ruff", *command.split(), "--quiet", "--no-cache", "."]
    done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_patch_leaves_the_style_as_it_is(tmp_path: Path):
    for patch in PATCHES:
        shutil.copy(REPO / "pyproject.toml", with_patch(patch, tmp_path / patch.stem))
    assert ruff_finds("check", tmp_path) + ruff_finds("format --check", tmp_path) == ""


@pytest.mark.night
@pytest.mark.parametrize("edit", [*NAMES, *range(len(DIFFS))])
def test_after_a_patch_or_an_edit_of_a_page_the_type_hints_are_right(edit: str | int, tmp_path_factory, tmp_path: Path):
    """And no import is left over. Packages that are not installed have no hints."""
    if isinstance(edit, str):
        with_recipe(edit, tmp_path)
    else:
        if "torch.optim.Muon" in DIFFS[edit]:
            with_recipe("language_model", tmp_path)
        edited(DIFFS[edit], tmp_path)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    no_hints = ["--ignore-missing-imports", "--no-warn-unused-ignores", "--cache-dir", tmp_path_factory.getbasetemp()]
    files = [*(path.name for path in tmp_path.glob("*.py")), "runtime"]
    mypy = [sys.executable, "-m", "mypy", *no_hints, *files]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ruff_finds("check", tmp_path) == ""


# ---- the page

# The rows of the page's table: folder, name, and those that the recipe does not go with. In italics, both apply.
PAGE = (RECIPES / "README.md").read_text()
TABLE = re.findall(r"^\| \[(\w+)/(\w+)\]\(\1/\2\.patch\) \|(?:[^|]*\|){3} ?([^|]*) \|", PAGE, re.MULTILINE)
DATA = [name for folder, name, _ in TABLE if folder == "data"]
NAMED, OTHER = re.findall(r"method that changes the data: (.*?); datasets after (\w+);", PAGE, re.DOTALL)[0]
METHODS_OF_DATA = re.findall(r"\w+", NAMED)
NOT_WITH = [(name, other) for _, name, others in TABLE for other in others.split(", ") if other]
# Pairs of which the second one does not apply, and pairs that apply and fail.
APART = {frozenset(pair) for pair in NOT_WITH if "*" not in pair[1]} | {frozenset((OTHER, "datasets"))}
APART |= {frozenset((name, data)) for name in METHODS_OF_DATA for data in DATA}
FAILING = {frozenset((name, other.strip("*"))) for name, other in NOT_WITH if "*" in other}
METHODS = [name for folder, name, _ in TABLE if folder == "methods"]
# Averaged weights go with other kinds of training, too.
FEATURES = ["ema", *(name for folder, name, _ in TABLE if folder in ("features", "cluster"))]


@pytest.mark.parametrize("first", sorted({*METHODS, *FEATURES}))
def test_the_page_names_the_recipes_that_do_not_go_together(first: str, tmp_path: Path):
    """All other pairs apply, the feature or the data second, and leave the style as it is."""
    program = with_recipe(first, tmp_path / "first")
    shutil.copy(REPO / "pyproject.toml", program)
    fit = []
    for second in [*FEATURES, *DATA]:
        both = Path(shutil.copytree(program, tmp_path / second))
        try:
            apply(patch_of(second).read_text(), both)
            fit.append(second)
        except subprocess.CalledProcessError:
            shutil.rmtree(both)
    assert ruff_finds("check", tmp_path) == ""
    assert fit == [each for each in [*FEATURES, *DATA] if each != first and frozenset((first, each)) not in APART]


def test_check_says_which_recipe_no_longer_applies_and_counts_the_lines_of_others(tmp_path: Path):
    """On a copy in which a recipe's lines first move, and then change."""

    def check(option: str = "", code: int = 0) -> dict[str, str]:
        printed = run(f"{tmp_path}/tools/check_recipes.sh {option}", tmp_path, code).stdout
        assert code or "recipes/data/mapped.patch  (2 files, 7 lines)" in printed
        return {Path(line.split()[1]).stem: line.partition(":")[0] for line in printed.splitlines()}

    copy_programs(tmp_path)
    shutil.copytree(RECIPES, tmp_path / "recipes", ignore=shutil.ignore_patterns("tests"))
    shutil.copytree(TOOLS, tmp_path / "tools")
    patch, config = tmp_path / "recipes/data/mapped.patch", tmp_path / "config.py"
    good, before, text = dict.fromkeys(NAMES, "applies"), patch.read_text(), config.read_text()
    config.write_text("# a new line\n" + text)
    assert check() == good and patch.read_text() == before
    assert check("--write") == good and patch.read_text() != before
    assert patch.read_text().partition("diff --git")[0] == before.partition("diff --git")[0] != ""
    line = 'dataset: Literal["digits"] = option('
    config.write_text(text.replace(line, line.replace("digits", "other")))
    failing = [name for name in NAMES if f"    {line}" in patch_of(name).read_text()]
    assert check("--write", code=len(failing)) == good | dict.fromkeys(failing, "FAILS")


# ---- runs. The options that a recipe needs, and what makes it do what it is for.

NEEDS = {
    "crossvalidation": "--folds 3 --fold 1",
    "distillation": "--teacher {finished}",
    "finetune": "--weights {finished}",
    "hparams": "--logger_name csv tensorboard",
    "mnist": "--data_dir {digits} --limit_train_batches 1.0 --effective_batch_size 28 --micro_batch_size 7 "
    "--lr_schedule step --epochs 4",
    "pictures": "--logger_name csv tensorboard",
    "profiler": "--profile 2",
    "reference": "--reference {finished}",
    "regression": "--effective_batch_size 24 --micro_batch_size 8",
    # 16 episodes a step, saved every second step.
    "reinforcement": "--effective_batch_size 16 --micro_batch_size 8 --checkpoint_interval 2 --checkpoint_frequency 0 "
    "--warmup_epochs 0 --limit_train_batches 1.0",
    "segmentation": "--effective_batch_size 64",
    # So early a model is certain of nothing: with a threshold of 0 it learns from all unlabelled images.
    "semi_supervised": "--effective_batch_size 4 --micro_batch_size 2 --warmup_epochs 0 --threshold 0",
    "text_classification": "--micro_batch_size 32",
    "token_batches": "--effective_batch_size 4 --micro_batch_size 1",
    # Of 4 micro-batches: those of the first seven steps of an epoch have 26 words in a column, the last 21.
    "word_language_model": "--data_dir {text} --bptt 26 --effective_batch_size 20 --micro_batch_size 5 --epochs 4",
}
EDITS = {
    "reinforcement": [("replace environment.py, , MAX_STEPS = 500", "MAX_STEPS = 50")],
    # Pixels without a class.
    "segmentation": [("after scenes.py, draw_scenes, images += ...", "masks[:, :4] = masks[:, -4:] = 255")],
}


@pytest.fixture
def command(request, recipe: str, options: str, tmp_path: Path) -> str:
    """The run of a recipe that a row of a table names."""
    pytest.importorskip(OF_EXTRA_PACKAGES.get(recipe, "torch"))
    program = with_edits(with_recipe(recipe, tmp_path / "program"), EDITS.get(recipe, []))
    words = f"{NEEDS.get(recipe, '')} {options}"
    named = {name: request.getfixturevalue(name) for name in re.findall(r"\{(\w+)\}", words)}
    return f"{program}/{LONG} {words.format(**named)}"


BF16 = "--precision bf16-mixed"
ON_2_BF16 = f"{ON_2} {BF16}"
RESUMED = [
    *[("background_save", ON_2), ("bag_of_words", ""), ("balanced", BF16), ("contrastive", "--epochs 8")],
    *[("crossvalidation", ON_2_BF16), ("crossvalidation", "--epochs 12 --fold -1"), ("diffusion", "--epochs 8")],
    *[("distillation", ""), ("ema", ""), ("ema", ON_2_BF16), ("gan", "--epochs 8 --logger_name csv tensorboard")],
    *[("finetune", f"--body_lr 0.5 {part}") for part in ("--freeze_epochs 1", "--freeze_epochs 20", "--lora_rank 2")],
    *[("gan", ON_2_BF16), ("gradient_penalty", ""), ("hard_examples", BF16), ("hard_examples", ON_2_BF16)],
    *[("hard_examples", f"{BF16} --num_workers 1"), ("hparams", "--epochs 12"), ("multitask", ""), ("on_device", "")],
    *[("language_model", "--epochs 8 --val_frequency 4"), ("mnist", ""), ("pictures", ""), ("profiler", "")],
    *[("reference", "--epochs 12"), ("regression", ""), ("sam", ""), ("segmentation", f"{BF16} --epochs 4")],
    *[("reinforcement", "--max_steps 60 --val_interval 8"), ("semi_supervised", "--epochs 6"), ("two_models", "")],
    *[("text_classification", f"--epochs 6 --freeze_epochs {epochs}") for epochs in (1, 5)],  # thawed, and still frozen
    *[("token_batches", "--epochs 4"), ("two_models", ON_2_BF16), ("val_sets", "--epochs 12")],
    ("word_language_model", ""),
]
# These recipes have a test of their own, in the file of their topic: a run is brought to another machine, read by
# another program, kept in files of data, or ends in other files.
OWN_KILLS = {"datasets", "mapped", "mirror", "mlflow", "prefetch", "sharded", "stream"}


def pictures_of(cwd: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Those in TensorBoard, by their names."""
    board = read_tensorboard(run_dir(cwd))
    tags = board.Tags()["images"]
    return {tag: [(each.step, each.encoded_image_string) for each in board.Images(tag)] for tag in tags}


@pytest.mark.parametrize("recipe, options", RESUMED)
def test_killed_and_resumed_it_is_the_same_run(recipe: str, options: str, command: str, tmp_path: Path):
    """In weights, logs, all of the state, the best checkpoint and pictures. What the weights come from may be gone by
    then."""
    source = re.search(r"--weights (\S+)", command)
    if source:
        command = command.replace(source[1], str(shutil.copytree(source[1], tmp_path / "source")))

    def resume(words: str, cwd: Path) -> None:
        if source:
            shutil.rmtree(tmp_path / "source")
        (run if "tensorboard" in command else execute)(words, cwd)  # which sorts the files of a second by process

    whole, killed = killed_and_resumed(command, tmp_path, resume)
    for name in ("step-*", "best"):
        ours, theirs = (max(run_dir(cwd).glob(f"checkpoints/{name}.ckpt")) for cwd in (killed, whole))
        assert ours.name == theirs.name and state_of(ours) == state_of(theirs)
    if "tensorboard" in options or recipe == "pictures":
        assert pictures_of(killed) == pictures_of(whole) != {}
    if source:
        call(f"{tmp_path}/program/test.py --out_dir train_out --accelerator cpu", killed)
    if recipe == "semi_supervised":
        for row in history(whole):
            labelled, unlabelled = float(row["train/labelled"]), float(row["train/unlabelled"])
            assert unlabelled > 0.1 and float(row["train/loss"]) == pytest.approx(labelled + unlabelled, rel=1e-4)
    if recipe == "word_language_model":
        assert float(history(whole)[-1]["lr"]) < 20  # so that the resume needs the count of bad validations, too


def test_each_recipe_has_a_row_of_the_page_and_is_killed_by_day():
    assert sorted(RECIPES / folder / f"{name}.patch" for folder, name, _ in TABLE) == sorted(RECIPES.glob("*/*.patch"))
    assert {recipe for recipe, _ in RESUMED} | OWN_KILLS == {*NAMES}


# What the tests of a project leave switched off in these. They show the same of all other recipes.
@pytest.mark.parametrize("recipe", ["distillation", "reference", "semi_supervised"])
@pytest.mark.parametrize("options", ["--max_steps 12 --limit_val_batches 1.0 --val_interval 4"])
def test_two_processes_train_like_one_and_test_py_finds_the_last_values(command: str, tmp_path: Path):
    one, two = on_one_and_two(command, tmp_path)
    assert_same_training(one, two)
    last = {name.removeprefix("val/"): value for name, value in rows(two)[-1].items() if name.startswith("val/")}
    for devices in ("", ON_2):
        found = results(tmp_path / "program", two, f"--checkpoint last --split val {devices}")
        shared = {name: value for name, value in found.items() if name in last}
        assert shared and shared == pytest.approx({name: last[name] for name in shared}, rel=1e-5)


# What a method needs with 64 samples in a step, or has besides.
WITH_FEATURES = dict.fromkeys(METHODS, "") | {
    "finetune": "--freeze_epochs 0.5 --lora_rank 2",
    "semi_supervised": "--labels_per_class 8",
}


@pytest.mark.night
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("recipe, options", WITH_FEATURES.items())
def test_a_method_trains_with_all_features_that_go_with_it(recipe: str, order: int, command: str, tmp_path: Path):
    """At once, in bf16-mixed with accumulation on two processes. Of two that do not go together the first is taken, in
    both orders."""
    together, apart = [recipe], APART | FAILING
    for feature in FEATURES[::order]:
        if feature not in together and not apart & {frozenset((feature, each)) for each in together}:
            apply(patch_of(feature).read_text(), tmp_path / "program")
            together.append(feature)
            command += f" {NEEDS.get(feature, '')}"
    sizes = "--effective_batch_size 64 --micro_batch_size 16 --max_steps 4 --checkpoint_interval 1 --val_interval 2"
    devices = "--devices 2 --strategy model_parallel" if "sharded" in together else ON_2
    run(f"{command} {BF16} {sizes} {devices}", tmp_path)
    assert torch.tensor(rows(tmp_path)[-1]["train/loss"]).isfinite()
    tensors = [value for value in weights(tmp_path).values() if isinstance(value, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
    call(f"{tmp_path}/program/test.py --accelerator cpu --checkpoint last", tmp_path)


# ---- mistakes: one line that names the option, and nothing is made

REFUSED = [
    ("bag_of_words", "--dropout 2", "--dropout"),
    ("contrastive", "--micro_batch_size 1", "--micro_batch_size 2"),
    *[("crossvalidation", options, options) for options in ("--fold 5", "--folds 1", "--fold -2", "--folds 101")],
    *[("distillation", f"--teacher {name}", f"--teacher {name}") for name in ("nowhere", "{unfinished}")],
    ("ema", "--ema_decay 1", "--ema_decay"),
    *[("finetune", f"--weights {name}", f"--weights {name}") for name in ("nowhere", "{unfinished}")],
    ("finetune", "--weights nowhere.safetensors", "--weights nowhere.safetensors"),
    ("language_model", "--peak_tflops -1", "--peak_tflops"),
    *[("mirror", f"--mirror {address}", f"--mirror {address}") for address in ("backup", "nothing://backup")],
    *[("mirror", f"--mirror file:///no/disk/runs {more}", "--mirror file:///no/disk") for more in ("", ON_2)],
    ("mirror", "--mirror file:///no/disk/runs --resume auto", "--mirror file:///no/disk"),
    ("on_device", "--num_workers 1", "--num_workers 1"),
    ("reference", "--reference other", "--reference other"),
    ("reinforcement", "--micro_batch_size 1", "--micro_batch_size"),
    ("semi_supervised", "--unlabelled_ratio 100", "--unlabelled_ratio 100"),
]


@pytest.mark.parametrize("recipe, options, named", REFUSED)
def test_a_mistake_is_told_and_nothing_is_made(recipe: str, options: str, named: str, request, finished, cwd: Path):
    """In one line, or one of each rank."""
    unfinished = shutil.copytree(finished, cwd.parent / "run", ignore=shutil.ignore_patterns("model.pt"))
    command = f"{request.getfixturevalue(recipe)}/train.py {SMALL} {options.format(unfinished=unfinished)}"
    refuses(command, cwd, named.format(unfinished=unfinished), how=execute)


FIXED = {
    "balanced": ["--balanced False"],
    "crossvalidation": ["--fold 0", "--folds 4"],
    "finetune": ["--weights elsewhere", "--body_lr 0.5", "--lora_rank 3"],
    "hard_examples": ["--pressure 10"],
    "semi_supervised": ["--unlabelled_ratio 3"],
    "token_batches": ["--max_tokens 2048"],
    "two_models": ["--noise_rate 0.1"],
}


@pytest.mark.parametrize("recipe", FIXED)
@pytest.mark.parametrize("options", ["--max_steps 2"])
def test_a_resume_cannot_change_what_fixes_the_run(recipe: str, command: str, tmp_path: Path):
    call(command, tmp_path)
    for changed in FIXED[recipe]:
        refuses(f"{tmp_path}/program/train.py --resume auto {changed} --max_steps 4", tmp_path, changed)


# ---- what a preface says

# The others name data, a server, a sweep, more devices or packages, or go over several lines.
UNDOCUMENTED = {*OWN_KILLS, "crossvalidation", "finetune", "mnist", "word_language_model"}


@pytest.mark.night
@pytest.mark.parametrize("recipe", [name for name in NAMES if name not in UNDOCUMENTED])
def test_the_commands_of_a_preface_give_what_it_says(recipe: str, request, tmp_path: Path):
    """Within what another CPU or number of threads may change."""
    pytest.importorskip(OF_EXTRA_PACKAGES.get(recipe, "torch"))
    preface = patch_of(recipe).read_text().partition("\ndiff --git")[0]
    commands = re.findall(r"^    python ((?:train|test)\.py.*)$", preface, re.MULTILINE)
    values = re.findall(r"^    ([a-z_]+) ([\d.]+)$", preface, re.MULTILINE)
    printed = ""
    for command in commands:
        command = re.sub(r"\d{8}-\d{6}-", "", command)  # runs are found without the time, too
        printed += run(f"{request.getfixturevalue(recipe)}/{command} --accelerator cpu", tmp_path).stdout
    assert "finished after" in printed
    for name, value in values:
        found = float(re.findall(rf"^{name} (\S+)$", printed, re.MULTILINE)[-1])
        assert found == pytest.approx(float(value), rel=0.25, abs=0.001), name
