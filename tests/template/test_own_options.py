"""Options of a project of one's own: bounds, choices, types and marks, nested dataclasses, lists and paths. What was
given comes back from config.yaml. And the template without the options of its example, which a user deletes."""

import re
from pathlib import Path

import pytest
import yaml
from commands import LONG, ON_2, REPO, SMALL, call, folders, run
from comparisons import killed_and_resumed
from edits import OF_DATA, OF_OPTIMIZATION, insert_before, without_own_options
from mistakes import refuses
from outputs import copied, run_dir
from processes import start_two

NESTED = '''@dataclass(frozen=True)
class DecayConfig:
    factor: float = non_negative(0.1)  # Factor of a decay
    layers: tuple[str, ...] = ("first", "last")  # Layers that decay


@dataclass(frozen=True)
class OptimConfig:
    """How to optimize."""

    momentum: float = 0.9  # Momentum
    nesterov: bool = False  # Look ahead
    name: Literal["adamw", "sgd"] = "adamw"  # Name of the optimizer
    clip: float | None = None  # Value that gradients are clipped to
    decay: DecayConfig = DecayConfig()


'''
FIELDS = """
    optim: OptimConfig = OptimConfig(momentum=0.8)
    cache: Path | None = None  # A directory
    sizes: list[int] = field(default_factory=lambda: [1, 2])  # Sizes
    pair: tuple[int, float] = (1, 2.5)  # A pair
"""
IMPORTS = "from dataclasses import field\nfrom pathlib import Path\n"
# Options with each kind of bound and mark; the last two have names that test.py has, too.
MARKED = """Colour = Enum("Colour", "RED BLUE")


@dataclass(frozen=True)
class PathsConfig:
    weights_dir: str = option("", per_host=True)  # A directory
    kind: str = option("npy", fixed=True)  # Of files


"""
OWN_FIELDS = """
    rate: float = positive(1.0)  # Above 0
    strength: float = option(0.1, at_least=0, below=1, fixed=True)  # With two
    counts: tuple[int, ...] = positive((1, 2))  # Each above 0
    shifts: tuple[float, ...] = (-1e-5, 0.5, -2e300, -3.0)  # argparse before Python 3.14 takes them for options
    limit: float | None = non_negative(None)  # None, or at least 0
    colour: Colour = Colour.RED  # Members of an enum
    paths: PathsConfig = PathsConfig()
    split: int = positive(3)  # Parts of an image
    checkpoint: str = ""  # Weights to begin with
"""
OTHERS = (
    "--optim.momentum 0.5 --optim.nesterov --optim.clip 1e-3 --optim.decay.factor 0.2 --optim.decay.layers last first "
    "--cache some/where --sizes 4 5 6 --pair 3 4 --rate 1e-9 --strength 0 --counts 3 --limit 0 --colour BLUE"
)
WRITTEN = {
    "optim": {"momentum": 0.5, "nesterov": True, "name": "adamw", "clip": 0.001,
              "decay": {"factor": 0.2, "layers": ["last", "first"]}},
    "cache": "some/where", "sizes": [4, 5, 6], "pair": [3, 4.0], "rate": 1e-9, "strength": 0.0,
    "counts": [3], "limit": 0.0, "colour": "BLUE", "shifts": [-1e-5, 0.5, -2e300, -3.0], "split": 3,
}  # fmt: skip
PRINTS = 'print("seen", config.split, repr(config.checkpoint), *config.shifts, config.paths.weights_dir)'
SEEN = "seen 3 '' -1e-05 0.5 -2e+300 -3.0"


def with_fields(program: Path, fields: str, classes: str = "", imports: str = IMPORTS) -> Path:
    """The programs with more options in the group of data and model."""
    insert_before(program, "options", fields)
    return insert_before(program, ("config.py", "", "Precision = ..."), f"{imports}{classes}")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    with_fields(folder, FIELDS + OWN_FIELDS, NESTED + MARKED, f"from enum import Enum\n{IMPORTS}")
    evaluation = ("config.py", "Evaluation", 'out_dir: str = "train_out"')
    insert_before(folder, evaluation, "paths: PathsConfig = PathsConfig()")
    return insert_before(folder, "digits", PRINTS)


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py {SMALL} --epochs 1 --logger_name csv tensorboard {OTHERS}", cwd)
    return cwd


def written(cwd: Path) -> dict:
    options = yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())
    return {name: options[name] for name in WRITTEN}


# ---- what is given comes back


def test_options_are_given_by_words_with_dots_or_in_a_file_as_a_nested_mapping(program, trained, tmp_path):
    """Such as a run's own config.yaml. The later layer wins for each option of its own, on each process. What is not
    given keeps the default of the field, not of its class; a default of None comes again."""
    one, two = folders(tmp_path, "one", "two")
    call(f"{program}/train.py --config_path {run_dir(trained)}/config.yaml", one)
    assert written(trained) == written(one) == WRITTEN
    (two / "a.yaml").write_text("optim: {nesterov: true, name: sgd, clip: 2, decay: {factor: 3e-1}}\ncache: x\n")
    (two / "b.yaml").write_text("optim:\n  name: adamw\n  decay: {layers: [one]}\n")
    words = "--config_path a.yaml b.yaml --optim.clip --cache --limit --shifts -1e-5 .5 -2E+300 -3"
    run(f"{program}/train.py {SMALL} --max_steps 1 {ON_2} {words}", two)
    decay = {"factor": 0.3, "layers": ["one"]}
    optim = {"momentum": 0.8, "nesterov": True, "name": "adamw", "clip": None, "decay": decay}
    found = written(two)
    assert found["optim"] == optim and found["shifts"] == WRITTEN["shifts"]
    assert (found["cache"], found["limit"], found["counts"], found["colour"]) == (None, None, [1, 2], "RED")


def test_a_run_with_such_options_is_evaluated_and_resumed(program, trained, tmp_path):
    """One that has the name of an option of test.py keeps its value. What is fixed cannot be changed."""
    cwd = copied(trained, tmp_path)
    tested = call(f"{program}/test.py --split val --checkpoint last --accelerator cpu", cwd).stdout
    for words in ("--strength 0.5", "--paths.kind npz"):
        refuses(f"{program}/train.py --resume auto --epochs 2 {words}", cwd, words)
    resumed = call(f"{program}/train.py --resume auto --epochs 2 --optim.clip --sizes 3 --rate 2", cwd).stdout
    told = [line for line in resumed.splitlines() if "instead of" in line]
    expected = ("epochs 2.0 instead of 1.0", "optim.clip None instead of 0.001", "sizes [3] instead of [4, 5, 6]")
    assert sorted(told) == sorted(f"--{line}" for line in (*expected, "rate 2.0 instead of 1e-09"))
    assert "resumed from" in resumed and SEEN in resumed and SEEN in tested and "accuracy" in tested
    assert written(cwd) == WRITTEN | {"optim": WRITTEN["optim"] | {"clip": None}, "sizes": [3], "rate": 2}


def test_a_nested_path_is_that_of_the_machine(program, tmp_path, monkeypatch):
    """Its `~` is the home directory, as of each option whose name ends in `_dir`. In test.py it is another one, where
    that has the option, too. It may differ between the machines of a run; an option without the mark may not."""
    monkeypatch.setenv("HOME", "/home/me")
    call(f"{program}/train.py {SMALL} --max_steps 1 --paths.weights_dir ~/weights", tmp_path)
    assert "weights_dir: /home/me/weights\n" in (run_dir(tmp_path) / "config.yaml").read_text()
    for words, path in (("", "/home/me/weights"), ("--paths.weights_dir ~/other", "/home/me/other")):
        assert f"{SEEN} {path}\n" in call(f"{program}/test.py --accelerator cpu {words}", tmp_path).stdout
    command = f"{program}/train.py {SMALL} --paths.weights_dir"
    for process in start_two([f"{command} a --split 3", f"{command} b --split 4"], [tmp_path] * 2):
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 2 and "--split" in error and "weights_dir" not in error


def test_the_help_documents_nested_options(program, tmp_path):
    help = call(f"{program}/train.py --help", tmp_path).stdout
    title, _, group = help.partition("  --optim.momentum")
    assert title.splitlines()[-1].startswith("How to optimize") and "--optim.clip" in group.partition("\n\n")[0]
    assert "--optim.decay.factor" in help and "Factor of a decay (default: 0.1)" in help


# ---- mistakes

MISTAKES = {
    "--nesterov": "--nesterov --optim.nesterov?",
    "--optim 3": "--optim",
    "--optim.name adam": "--optim.name adam adamw sgd",
    "--optim.decay.factor -0.1": "--optim.decay.factor -0.1 least",
    "--config_path bad.yaml": "--config_path bad.yaml --optim.speed",
    "--rate 0": "--rate 0.0 above 0",
    "--rate inf": "--rate inf above 0",
    "--strength 1": "--strength 1.0 below 1",
    "--counts 1 0 2": "--counts [1, 0, above 0",
    "--colour GREEN": "--colour GREEN RED BLUE",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_in_an_option_of_ones_own_is_one_line(options: str, program, tmp_path):
    (tmp_path / "bad.yaml").write_text("optim: {speed: 1}\n")
    refuses(f"{program}/train.py {options}", tmp_path, *MISTAKES[options].split())


# A field of config.py, a word of the command line, and what the line names.
FIELDS_THAT_CANNOT_BE = {
    'table: dict = field(default_factory=lambda: {"a": 1})': ("", "config.yaml --table.a"),  # they would not come back
    "when: date = date(2026, 1, 1)": ("", "config.yaml --when"),
    "clip: float | None = 1.0": ("--clip", "config.yaml --clip None 1.0"),
    "decay: DecayConfig = DecayConfig(factor=-1)": ("", "config.py --decay.factor -1"),
    'kinds: tuple[Literal["mean", "sum"], ...] = ("mean", "max")': ("", "config.py --kinds mean sum"),
    "parts: object = subgroups({'one': Run, 'two': Run}, default='one')": ("", "config.py --parts subgroups"),
    "parts: list[Run] = ()": ("", "config.py parts list[config.Run]"),
    "seed: int = 3": ("", "config.py --seed"),
}


@pytest.mark.parametrize("field", FIELDS_THAT_CANNOT_BE)
def test_an_option_that_cannot_be_parsed_or_would_not_come_back_is_refused_before_anything_is_written(field, tmp_path):
    word, names = FIELDS_THAT_CANNOT_BE[field]
    imports = f"from datetime import date\nfrom simple_parsing import subgroups\n{IMPORTS}"
    program = with_fields(tmp_path / "program", f"    {field}\n", NESTED, imports)
    refuses(f"{program}/train.py {SMALL} {word}", tmp_path, *names.split())


def test_an_option_that_is_in_no_group_is_told_at_the_start(tmp_path: Path):
    """The command line would not know it."""
    point = ("config.py", "TrainConfig", "def __post_init__(")
    program = insert_before(tmp_path / "program", point, "noise: float = 0.1  # Of the images")
    for words in ("", "--noise 1"):
        refuses(f"{program}/train.py {SMALL} {words}", tmp_path, "noise", "group")


# ---- the template without the options of its example

OWN = [*OF_DATA, *OF_OPTIMIZATION]


def test_what_nobody_edits_imports_no_file_that_users_edit_and_names_no_option_of_theirs():
    """So a user may delete and rename options of data and optimization. tools/ names none of the data."""

    def naming(names: list[str]) -> re.Pattern:
        each = "|".join(names)
        return re.compile(rf"config\.({each})\b|--({each})\b|[\"']({each})[\"']")

    six = re.compile(r"^ *(import|from) (train|test|config|model|data|utils)\b", re.MULTILINE)  # in functions, too
    assert naming(OWN).search((REPO / "train.py").read_text())
    for pattern, files in ((naming(OWN), "runtime/*.py"), (six, "runtime/*.py"), (naming(OF_DATA), "tools/*.py")):
        assert [path for path in REPO.glob(files) if pattern.search(path.read_text())] == []


def test_all_own_options_can_be_deleted(tmp_path):
    """A run without them trains, is exact after a kill, finds itself finished when it is resumed, and is evaluated."""
    program = without_own_options(tmp_path / "program", OWN)
    long, small = (re.sub(rf" --({'|'.join(OWN)}) \S+", "", words) for words in (LONG, f"train.py {SMALL}"))
    _, cwd = killed_and_resumed(f"{program}/{long}", tmp_path)
    assert not {*yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())} & {*OWN}
    assert "finished after 160 of 160 steps" in call(f"{program}/train.py --resume auto", cwd).stdout
    assert "accuracy" in call(f"{program}/test.py --predictions", cwd).stdout
    call(f"{program}/{small} --fast_run", cwd)
