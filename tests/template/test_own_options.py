"""Options of a project of one's own: a field of a config may be a nested dataclass, a list, a tuple, a path. What was
given comes back from config.yaml; a type for which that is not so is refused before the first step."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml
from edits import OF_DATA, OF_OPTIMIZATION, insert_before, with_text, without_own_options
from helpers import LONG, ON_2, REPO, SMALL, call, copied, history, killed_and_resumed, last_summary, run, run_dir

import config
from runtime import ranks
from runtime.cli import parse_train
from runtime.config_file import to_yaml
from runtime.errors import ConfigError
from runtime.options import check, non_negative, option, positive

# Names that test.py has, too.
OF_TEST = """\
    split: int = positive(3)  # Parts of an image
    checkpoint: str = ""  # Weights to begin with
"""
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
OTHERS = (
    "--optim.momentum 0.5 --optim.nesterov --optim.clip 1e-3 --optim.decay.factor 0.2 --optim.decay.layers last first "
    "--cache some/where --sizes 4 5 6 --pair 3 4"
)
WRITTEN = {
    "optim": {
        "momentum": 0.5,
        "nesterov": True,
        "name": "adamw",
        "clip": 0.001,
        "decay": {"factor": 0.2, "layers": ["last", "first"]},
    },
    "cache": "some/where",
    "sizes": [4, 5, 6],
    "pair": [3, 4.0],
}


IMPORTS = "from dataclasses import field\nfrom pathlib import Path\n"


def with_fields(program: Path, fields: str, classes: str = "", imports: str = IMPORTS) -> Path:
    """The programs with more options in the group of data and model."""
    insert_before(program, "options", fields)
    group = "@dataclass(frozen=True)\nclass Data:"
    typing = "from typing import Literal\n"
    return with_text(program, "config.py", (group, f"{classes}\n\n{group}"), (typing, imports + typing))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_fields(tmp_path_factory.mktemp("program"), FIELDS, NESTED)


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py {SMALL} --epochs 1 --logger_name csv tensorboard {OTHERS}", cwd)
    return cwd


def written(cwd: Path) -> dict:
    options = yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())
    return {name: options[name] for name in WRITTEN}


def test_a_nested_path_is_that_of_the_machine(tmp_path, monkeypatch):
    """Its `~` is the home directory, as of each option whose name ends in `_dir`. In test.py it is another one, where
    that has the option, too."""
    monkeypatch.setenv("HOME", "/home/me")
    field = "    paths: PathsConfig = PathsConfig()"
    nested = '@dataclass(frozen=True)\nclass PathsConfig:\n    weights_dir: str = option("", per_host=True)'
    program = with_fields(tmp_path / "program", field, nested)
    group = '    """Evaluation"""\n'
    with_text(program, "config.py", (group, f"{group}\n{field}"))
    insert_before(program, "digits", 'print("weights of", config.paths.weights_dir)')
    call(f"{program}/train.py {SMALL} --max_steps 1 --paths.weights_dir ~/weights", tmp_path)
    options = yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())
    assert options["paths"]["weights_dir"] == "/home/me/weights"
    for words, path in (("", "/home/me/weights"), ("--paths.weights_dir ~/other", "/home/me/other")):
        assert f"weights of {path}\n" in call(f"{program}/test.py --accelerator cpu {words}", tmp_path).stdout


def test_options_that_are_gone_are_named_with_their_values(program, tmp_path):
    """Which a later resume has no more."""
    call(f"{program}/train.py {SMALL} --max_steps 2 {OTHERS}", tmp_path)
    printed = call("train.py --resume train_out --max_steps 3", tmp_path).stdout
    for gone in ("--optim.momentum 0.5", "--optim.nesterov true", "--sizes ['4', '5', '6']"):
        assert f"{gone}: this option is gone from the code, and ignored\n" in printed
    assert "optim" not in (run_dir(tmp_path) / "config.yaml").read_text()
    printed = call(f"{program}/train.py --resume train_out --max_steps 4", tmp_path).stdout
    assert "--optim.momentum 0.8: this option is new in the code\n" in printed


# ---- bounds, and what a resume and the other machines must have the same


@dataclass(frozen=True)
class Decay:
    factor: float = option(0.1, at_least=0, below=1, fixed=True)
    cache_dir: str = option("", per_host=True)
    kind: Literal["step", "linear"] = "step"


@dataclass(frozen=True)
class Own:
    """Own"""

    decay: Decay = Decay()
    rate: float = positive(1.0)
    shift: float = 0.0
    sizes: tuple[int, ...] = positive((1, 2))
    clip: float | None = non_negative(None)


@dataclass(frozen=True)
class OwnConfig(Own, config.Run):
    def __post_init__(self):
        check(self)


@pytest.mark.parametrize(
    "words, messages",
    [
        ("--rate 1e-9 --shift -5 --decay.factor 0 --sizes 3 --clip 0", []),
        ("--clip", []),  # None
        ("--rate 0", ["--rate 0.0: must be above 0"]),
        ("--rate inf", ["--rate inf: must be above 0"]),
        ("--decay.factor -0.1", ["--decay.factor -0.1: must be at least 0"]),
        ("--decay.factor 1", ["--decay.factor 1.0: must be below 1"]),
        ("--sizes 1 0 2", ["--sizes [1, 0, 2]: must be above 0"]),
        ("--clip -1 --rate -1", ["--clip -1.0: must be at least 0", "--rate -1.0: must be above 0"]),
    ],
)
def test_an_option_has_the_bounds_that_stand_beside_it(words: str, messages: list[str]):
    if not messages:
        parse_train(OwnConfig, words.split())
        return
    with pytest.raises(ConfigError) as error:
        parse_train(OwnConfig, words.split())
    assert sorted(str(error.value).split("; ")) == messages


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decay": Decay(factor=1.5)}, "--decay.factor 1.5: must be below 1"),
        ({"decay": Decay(kind="cosine")}, "--decay.kind cosine: choose from step, linear"),
    ],
)
def test_so_has_one_of_a_config_that_is_made_in_python(changes: dict, message: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        OwnConfig(**changes)


def test_a_nested_option_that_is_fixed_cannot_be_changed_by_a_resume(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(OwnConfig()))
    resume = ["--resume", str(tmp_path)]
    assert parse_train(OwnConfig, [*resume, "--decay.kind", "linear"]).decay == Decay(kind="linear")
    with pytest.raises(ConfigError, match="^--decay.factor 0.5: a resume cannot change it; .* was trained with 0.1$"):
        parse_train(OwnConfig, [*resume, "--decay.factor", "0.5"])


def test_a_nested_option_that_is_per_host_may_differ_between_machines(monkeypatch):
    compared = {}
    monkeypatch.setattr(ranks, "difference", compared.update)
    ranks.check_ranks(OwnConfig(), {})
    options = {name for name in compared if name.startswith("--decay")}
    assert options == {"--decay.factor", "--decay.kind"}


@pytest.mark.parametrize("default", ["0.1", "0.0", "-0.5"])
def test_an_option_that_is_added_may_be_zero_or_negative(default: str, tmp_path: Path):
    program = with_fields(tmp_path / "program", f"    noise: float = {default}  # Standard deviation of noise")
    for options, noise in (("", float(default)), ("--noise 0", 0.0), ("--noise -1", -1.0), ("--noise -2e-1", -0.2)):
        cwd = tmp_path / f"cwd{noise}{options}"
        cwd.mkdir()
        call(f"{program}/train.py {SMALL} --max_steps 1 {options}", cwd)
        assert yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())["noise"] == noise


@pytest.mark.parametrize("source", ["command line", "file", "default"])
def test_a_list_may_have_negative_numbers_with_an_exponent(source: str, tmp_path: Path):
    """argparse before Python 3.14 takes them for options. A resume and test.py read them from config.yaml."""
    values = [-1e-05, 0.5, -2e300, -3.0]
    words = "-1e-5 .5 -2E+300 -3"
    default = "(-1e-5, 0.5, -2e300, -3.0)" if source == "default" else "(1.0,)"
    program = with_fields(tmp_path / "program", f"    shifts: tuple[float, ...] = {default}")
    options = {"command line": f"--shifts {words}", "file": "--config_path shifts.yaml", "default": ""}[source]
    insert_before(program, "model", 'print("shifts", *config.shifts)')
    (tmp_path / "shifts.yaml").write_text(f"shifts: [{', '.join(words.split())}]\n")
    call(f"{program}/train.py {SMALL} --max_steps 1 {options}", tmp_path)
    assert yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())["shifts"] == values
    resumed = call(f"{program}/train.py --resume auto --max_steps 2", tmp_path).stdout
    assert "--max_steps 2 instead of 1" in resumed and "--shifts" not in resumed
    for printed in (resumed, call(f"{program}/test.py --accelerator cpu", tmp_path).stdout):
        assert "shifts -1e-05 0.5 -2e+300 -3.0\n" in printed


IMPORTS_ALL = """
import importlib, pathlib, sys
for name in SIX:
    sys.modules[name] = None  # an import raises ImportError
sys.path.insert(0, ROOT)
names = [path.stem for path in pathlib.Path(ROOT).glob("runtime/*.py")]
for name in names:
    importlib.import_module(f"runtime.{name}")
print("imported", *sorted(names))
"""


def test_what_nobody_edits_imports_no_file_that_users_edit(tmp_path: Path):
    six = ("train", "test", "config", "model", "data", "utils")
    assert {path.stem for path in REPO.glob("*.py")} == {*six}
    (tmp_path / "imports.py").write_text(f"SIX = {six!r}\nROOT = {str(REPO)!r}\n{IMPORTS_ALL}")
    names = sorted(path.stem for path in REPO.glob("runtime/*.py"))
    assert run(f"{tmp_path}/imports.py", tmp_path).stdout == f"imported {' '.join(names)}\n"
    for path in REPO.glob("runtime/*.py"):  # in functions, too
        assert not re.search(rf"^ *(import|from) ({'|'.join(six)})\b", path.read_text(), re.MULTILINE), path.name


OWN = [*OF_DATA, *OF_OPTIMIZATION]


def test_what_nobody_edits_names_no_option_of_data_or_optimization():
    """So a user may delete and rename them."""
    named = re.compile(rf"config\.({'|'.join(OWN)})\b|--({'|'.join(OWN)})\b|[\"']({'|'.join(OWN)})[\"']")
    assert {"dropout", "max_grad_norm"} < {*OWN} and named.search((REPO / "train.py").read_text())
    assert [path.name for path in REPO.glob("runtime/*.py") if named.search(path.read_text())] == []


@pytest.fixture(scope="module")
def without_own(tmp_path_factory) -> Path:
    return without_own_options(tmp_path_factory.mktemp("without"), OWN)


def without_words(command: str) -> str:
    """The command without own options and their values."""
    return re.sub(rf" --({'|'.join(OWN)}) \S+", "", command)


def test_all_own_options_can_be_deleted(without_own, cwd):
    """A run without them trains, finds itself finished when it is resumed, and is evaluated."""
    for script in ("train.py", "test.py"):
        assert not re.search(rf"--({'|'.join(OWN)})\b", call(f"{without_own}/{script} --help", cwd).stdout)
    for name in OWN:
        assert f"unknown option --{name}" in call(f"{without_own}/train.py --{name} 1", cwd, code=2).stderr
    command = without_words(f"{without_own}/train.py {SMALL}")
    call(command, cwd)
    assert not {*yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())} & {*OWN}
    assert "finished after 80 of 80 steps" in call(f"{without_own}/train.py --resume auto", cwd).stdout
    assert "accuracy" in call(f"{without_own}/test.py --predictions", cwd).stdout
    call(f"{command} --fast_run", cwd)


def test_a_run_without_own_options_is_exact_after_a_kill(without_own, tmp_path):
    killed_and_resumed(without_words(f"{without_own}/{LONG}"), tmp_path)


def test_the_default_of_what_is_best_is_replaced_as_a_pair(tmp_path: Path):
    """As in a recipe."""
    default = 'set_defaults(self, monitor="val/accuracy", monitor_mode="max")'
    program = with_text(
        tmp_path / "program", "config.py", (default, default.replace("val/accuracy", "train/grad_norm"))
    )
    given = "--monitor val/loss --monitor_mode min"
    for name, options, monitor, best in (("default", "", "train/grad_norm", max), ("given", given, "val/loss", min)):
        cwd = tmp_path / name
        cwd.mkdir()
        call(f"{program}/train.py {SMALL} {options}", cwd)
        assert last_summary(cwd)["best"] == best(float(row[monitor]) for row in history(cwd))
    error = call(f"{program}/train.py {SMALL} --monitor val/loss", tmp_path, code=2).stderr
    assert error == "train.py: error: --monitor val/loss: give --monitor and --monitor_mode together\n"


def test_an_option_that_is_in_no_group_is_told_at_the_start(tmp_path: Path):
    """The command line would not know it."""
    docstring = '"""Train a model. All options have defaults."""'
    program = with_text(
        tmp_path / "program", "config.py", (docstring, f"{docstring}\n\n    noise: float = 0.1  # Of the images")
    )
    error = call(f"{program}/train.py {SMALL}", tmp_path, code=2).stderr
    assert error.count("\n") == 1 and "noise" in error and "group" in error
    assert not [*tmp_path.glob("*train_out")]


# ---- nested dataclasses, lists, paths


def test_options_of_nested_dataclasses_are_given_with_dots(trained):
    assert written(trained) == WRITTEN


def test_so_they_are_in_a_file_or_as_a_nested_mapping(program, tmp_path):
    nested = {name: WRITTEN[name] for name in ("optim", "cache", "sizes", "pair")}
    (tmp_path / "nested.yaml").write_text(yaml.safe_dump(nested))
    call(f"{program}/train.py {SMALL} --epochs 1 --config_path nested.yaml", tmp_path)
    assert written(tmp_path) == WRITTEN


def test_the_later_layer_wins_for_each_option_of_its_own(program, tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {momentum: 0.1, decay: {factor: 3e-1}}\n")
    (tmp_path / "b.yaml").write_text("optim:\n  momentum: 0.2\n  name: sgd\n")
    call(f"{program}/train.py {SMALL} --epochs 1 --config_path a.yaml b.yaml --optim.name adamw", tmp_path)
    optim = written(tmp_path)["optim"]
    assert (optim["momentum"], optim["name"], optim["decay"]["factor"]) == (0.2, "adamw", 0.3)


def test_an_option_whose_default_is_none_is_none_again_without_a_value(program, tmp_path):
    """Whatever a file gives."""
    (tmp_path / "a.yaml").write_text("optim: {clip: 2}\ncache: x\n")
    options = "--config_path a.yaml --optim.clip --cache"
    call(f"{program}/train.py {SMALL} --max_steps 1 {options}", tmp_path)
    assert (written(tmp_path)["optim"]["clip"], written(tmp_path)["cache"]) == (None, None)


def test_what_is_not_given_keeps_the_default_of_the_field_not_of_the_nested_class(program, tmp_path):
    call(f"{program}/train.py {SMALL} --epochs 1 --optim.nesterov", tmp_path)
    assert written(tmp_path)["optim"]["momentum"] == 0.8


def test_a_run_with_such_options_is_evaluated_and_resumed(program, trained, tmp_path):
    cwd = copied(trained, tmp_path)
    assert "accuracy" in call(f"{program}/test.py", cwd).stdout
    resumed = call(f"{program}/train.py --resume auto --epochs 2 --optim.clip --sizes 3", cwd).stdout
    assert "--optim.clip None instead of 0.001" in resumed and "--sizes [3] instead of [4, 5, 6]" in resumed
    assert "resumed from" in resumed
    assert written(cwd) == WRITTEN | {"optim": WRITTEN["optim"] | {"clip": None}, "sizes": [3]}


def test_config_yaml_repeats_the_run(program, trained, tmp_path):
    call(f"{program}/train.py --config_path {run_dir(trained) / 'config.yaml'}", tmp_path)
    assert written(tmp_path) == WRITTEN


def test_two_processes_have_the_same_options(program, tmp_path):
    run(f"{program}/train.py {SMALL} --epochs 1 {ON_2} {OTHERS}", tmp_path)
    assert written(tmp_path) == WRITTEN


def test_the_help_documents_nested_options(program, tmp_path):
    help = call(f"{program}/train.py --help", tmp_path).stdout
    assert "--optim.momentum" in help and "--optim.decay.factor" in help and "Factor of a decay (default: 0.1)" in help
    title, _, group = help.partition("  --optim.momentum")
    assert title.splitlines()[-1].startswith("How to optimize") and "--optim.clip" in group.partition("\n\n")[0]
    assert "OptimConfig" not in help


@pytest.mark.parametrize(
    "options, message",
    [
        ("--nesterov", "unknown option --nesterov; did you mean --optim.nesterov?"),
        ("--optim.momentun 3", "unknown option --optim.momentun; did you mean --optim.momentum?"),
        ("--optim 3", "unknown option --optim;"),
        ("--optim.momentum fast", "--optim.momentum: invalid float value: 'fast'"),
        ("--optim.momentum", "argument --optim.momentum: expected one argument"),
        ("--optim.name adam", "--optim.name: invalid choice: 'adam' (choose from "),
        ("--optim.decay.factor -0.1", "error: --optim.decay.factor -0.1: must be at least 0\n"),
        ("--config_path bad.yaml", "--config_path bad.yaml: unknown option --optim.speed"),
    ],
)
def test_a_mistake_in_a_nested_option_is_one_line(program, options: str, message: str, tmp_path):
    (tmp_path / "bad.yaml").write_text("optim: {speed: 1}\n")
    error = call(f"{program}/train.py {SMALL} {options}", tmp_path, code=2).stderr
    assert message in error and error.count("\n") == 1
    assert not [*tmp_path.glob("*train_out")]


def test_numbers_may_be_choices(tmp_path):
    program = with_fields(tmp_path / "program", "    kernel: Literal[3, 5] = 4")
    assert "--kernel 4: choose from 3, 5" in call(f"{program}/train.py {SMALL}", tmp_path, code=2).stderr


def test_the_members_of_an_enum_may_be_choices(tmp_path):
    program = with_fields(
        tmp_path / "program",
        "    colour: Colour = Colour.RED",
        'Colour = Enum("Colour", "RED BLUE")',
        "from enum import Enum\n",
    )
    call(f"{program}/train.py {SMALL} --epochs 1 --colour BLUE", tmp_path)
    assert "colour: BLUE\n" in (run_dir(tmp_path) / "config.yaml").read_text()
    assert "colour" not in call(f"{program}/train.py --resume auto --epochs 2", tmp_path).stdout
    call(f"{program}/test.py --accelerator cpu", tmp_path)
    assert "'GREEN'" in call(f"{program}/train.py --colour GREEN", tmp_path, code=2).stderr


@pytest.mark.parametrize(
    "fields, option",
    [
        ('    table: dict = field(default_factory=lambda: {"a": 1})', "--table.a"),
        ("    when: date = date(2026, 1, 1)", "--when"),
        ("    rate: float | None = 1.0", "--rate None would be read as 1.0"),
    ],
    ids=["dict", "date", "None"],
)
def test_an_option_that_would_not_come_back_is_refused_before_anything_is_written(fields: str, option: str, tmp_path):
    options = "--rate" if "rate" in fields else ""  # without a value it is None
    program = with_fields(tmp_path / "program", fields, imports=f"from datetime import date\n{IMPORTS}")
    error = call(f"{program}/train.py {SMALL} {options}", tmp_path, code=2).stderr
    assert error.startswith("train.py: error: an option cannot be kept in config.yaml: ") and error.count("\n") == 1
    assert option in error
    assert not [*tmp_path.glob("*train_out")]


def test_an_option_with_the_name_of_one_of_test_py_keeps_its_value(tmp_path: Path):
    program = with_text(tmp_path / "program", "config.py", ("    width: int", f"{OF_TEST}    width: int"))
    insert_before(program, "digits", 'print("split", config.split, "of", repr(config.checkpoint))')
    printed = call(f"{program}/train.py {SMALL} --epochs 1", tmp_path).stdout
    printed += call(f"{program}/train.py --resume auto --epochs 2", tmp_path).stdout
    printed += call(f"{program}/test.py --accelerator cpu --split val --checkpoint last", tmp_path).stdout
    assert printed.count("split 3 of ''\n") == 3


@pytest.mark.parametrize(
    "field, words",
    [
        ("parts: object = subgroups({'one': Run, 'two': Run}, default='one')", "--parts: subgroups are not supported"),
        ("parts: list[Run] = ()", "Field parts is of type list[config.Run], which isn't supported yet. "),
        ("seed: int = 3", "Cannot fix the conflict for the Options string --seed, "),
    ],
)
def test_an_option_that_simple_parsing_cannot_parse_is_told_in_one_line(field: str, words: str, tmp_path: Path):
    program = with_text(tmp_path / "program", "config.py", ("    width: int", f"    {field}\n    width: int"))
    with_text(
        program,
        "config.py",
        ("from typing import Literal", "from typing import Literal\nfrom simple_parsing import subgroups"),
    )
    error = call(f"{program}/train.py {SMALL}", tmp_path, code=2).stderr
    assert error.startswith(f"train.py: error: config.py: {words}") and error.count("\n") == 1
