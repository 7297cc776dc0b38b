"""Options of a project of one's own: a field of a config may be a nested dataclass, a list, a tuple, a path. What was
given comes back from config.yaml; a type for which that is not so is refused before the first step."""

import os
from pathlib import Path

import pytest
import yaml
from conftest import ON_2, SMALL, call, run, run_dir
from edits import insert_before

NESTED = '''
@dataclass(frozen=True)
class DecayConfig:
    factor: float = 0.1  # Factor of a decay
    layers: tuple[str, ...] = ("first", "last")  # Layers that decay


@dataclass(frozen=True)
class OptimConfig:
    """How to optimize."""

    momentum: float = 0.9  # Momentum
    nesterov: bool = False  # Look ahead
    name: Literal["adamw", "sgd"] = "adamw"  # Name of the optimizer
    clip: float | None = None  # Value that gradients are clipped to
    decay: DecayConfig = DecayConfig()


@dataclass(frozen=True)
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


def with_fields(program: Path, fields: str, classes: str = "") -> Path:
    """The programs with more options."""
    insert_before(program, "options", fields)
    config = program / "config.py"
    before, _, after = config.read_text().partition("@dataclass(frozen=True)\nclass TrainConfig")
    config.write_text(f"{before}{classes}class TrainConfig{after}" if classes else config.read_text())
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_fields(tmp_path_factory.mktemp("program"), FIELDS, NESTED.lstrip())


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py {SMALL} --epochs 1 --logger_name csv tensorboard {OTHERS}", cwd)
    return cwd


def written(cwd: Path) -> dict:
    options = yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())
    return {name: options[name] for name in WRITTEN}


def test_an_option_whose_default_is_0_may_be_0(tmp_path):
    program = with_fields(tmp_path / "program", "\n    noise: float = 0.0  # Standard deviation of noise")
    call(f"{program}/train.py --fast_run --accelerator cpu --noise 0", tmp_path)
    assert "--noise -1" in call(f"{program}/train.py --fast_run --noise -1", tmp_path, code=2).stderr


def test_options_of_nested_dataclasses_are_given_with_dots(trained):
    assert written(trained) == WRITTEN


def test_so_they_are_in_a_file_or_as_a_nested_mapping(program, tmp_path):
    nested = {name: WRITTEN[name] for name in ("optim", "cache", "sizes", "pair")}
    (tmp_path / "nested.yaml").write_text(yaml.safe_dump(nested))
    call(f"{program}/train.py {SMALL} --epochs 1 --config_path nested.yaml", tmp_path)
    assert written(tmp_path) == WRITTEN


def test_the_later_layer_wins_for_each_option_of_its_own(program, tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {momentum: 0.1, decay: {factor: 3e-1}}\n")
    (tmp_path / "b.yaml").write_text("optim:\n  momentum: 0.2\n  clip: 2\n")
    call(f"{program}/train.py {SMALL} --epochs 1 --config_path a.yaml b.yaml --optim.clip None", tmp_path)
    optim = written(tmp_path)["optim"]
    assert (optim["momentum"], optim["clip"], optim["decay"]["factor"]) == (0.2, None, 0.3)


def test_what_is_not_given_keeps_the_default_of_the_field_not_of_the_nested_class(program, tmp_path):
    call(f"{program}/train.py {SMALL} --epochs 1 --optim.nesterov", tmp_path)
    assert written(tmp_path)["optim"]["momentum"] == 0.8


def test_a_run_with_such_options_is_evaluated_and_resumed(program, trained, tmp_path):
    cwd = tmp_path / "copy"
    run_dir(trained)
    os.system(f"cp -r {trained} {cwd}")
    assert "accuracy" in call(f"{program}/test.py", cwd).stdout
    resumed = call(f"{program}/train.py --resume auto --epochs 2 --optim.clip None", cwd).stdout
    assert "--optim.clip None instead of 0.001" in resumed and "resumed from" in resumed
    assert written(cwd) == WRITTEN | {"optim": WRITTEN["optim"] | {"clip": None}}


def test_config_yaml_repeats_the_run(program, trained, tmp_path):
    call(f"{program}/train.py --config_path {run_dir(trained) / 'config.yaml'}", tmp_path)
    assert written(tmp_path) == WRITTEN


def test_two_processes_have_the_same_options(program, tmp_path):
    run(f"{program}/train.py {SMALL} --epochs 1 {ON_2} {OTHERS}", tmp_path)
    assert written(tmp_path) == WRITTEN


def test_the_help_documents_nested_options(program, tmp_path):
    help = call(f"{program}/train.py --help", tmp_path).stdout
    assert "--optim.momentum" in help and "--optim.decay.factor" in help and "Factor of a decay (default: 0.1)" in help
    own = help.partition("\nOthers:\n")[2]
    assert "--optim.momentum" in own and "--optim.decay.factor" in own and "--width" not in own
    assert "OptimConfig" not in help and "--optim.nonesterov" not in help


@pytest.mark.parametrize(
    "options, message",
    [
        ("--nesterov", "unknown option --nesterov; did you mean --optim.nesterov?"),
        ("--optim.momentun 3", "unknown option --optim.momentun; did you mean --optim.momentum?"),
        ("--optim 3", "unknown option --optim;"),
        ("--optim.momentum fast", "--optim.momentum: invalid float value: 'fast'"),
        ("--optim.momentum -1", "--optim.momentum -1.0: must be above 0"),
        ("--optim.momentum", "--optim.momentum: expected a value"),
        ("--optim.momentum 1 2", "--optim.momentum 1 2: expected one value"),
        ("--optim.name adam", "--optim.name: invalid choice: 'adam' (choose from 'adamw', 'sgd')"),
        ("--config_path bad.yaml", "--config_path bad.yaml: unknown option --optim.speed"),
        ("--config_path none.yaml", "--config_path none.yaml: --optim.momentum: expected a value"),
    ],
)
def test_a_mistake_in_a_nested_option_is_one_line(program, options: str, message: str, tmp_path):
    (tmp_path / "bad.yaml").write_text("optim: {speed: 1}\n")
    (tmp_path / "none.yaml").write_text("optim: {momentum: null}\n")
    error = call(f"{program}/train.py {SMALL} {options}", tmp_path, code=2).stderr
    assert message in error and error.count("\n") == 1
    assert not [*tmp_path.glob("*train_out")]


def test_a_number_may_be_negative_if_its_option_says_so(tmp_path):
    program = with_fields(tmp_path / "program", "    margin: float = -0.5")
    assert "--margin -0.5: must be above 0" in call(f"{program}/train.py {SMALL}", tmp_path, code=2).stderr
    config = program / "config.py"
    config.write_text(config.read_text().replace("MAY_BE_NEGATIVE = ()", 'MAY_BE_NEGATIVE = ("margin",)'))
    call(f"{program}/train.py {SMALL} --epochs 1 --margin -2e-1", tmp_path)
    assert yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())["margin"] == -0.2


def test_numbers_may_be_choices(tmp_path):
    program = with_fields(tmp_path / "program", "    kernel: Literal[3, 5] = 4")
    assert "--kernel 4: choose from 3, 5" in call(f"{program}/train.py {SMALL}", tmp_path, code=2).stderr


@pytest.mark.parametrize(
    "fields, option",
    [
        ('    table: dict = field(default_factory=lambda: {"a": 1})', "--table.a"),
        ("    colour: Colour = Colour.RED", "--colour"),
        ("    when: date = date(2026, 1, 1)", "--when"),
        ("    sizes: list[int] = field(default_factory=lambda: (1, 2))", "--sizes (1, 2) would be read as [1, 2]"),
    ],
    ids=["dict", "enum", "date", "list with a tuple as default"],
)
def test_an_option_that_would_not_come_back_is_refused_before_anything_is_written(fields: str, option: str, tmp_path):
    program = with_fields(tmp_path / "program", fields)
    imports = 'from datetime import date\nfrom enum import Enum\n\nColour = Enum("Colour", "RED BLUE")\n'
    config = program / "config.py"
    config.write_text(config.read_text().replace("import math\n", f"import math\n{imports}"))
    error = call(f"{program}/train.py {SMALL}", tmp_path, code=2).stderr
    assert error.startswith("train.py: error: an option cannot be kept in config.yaml: ") and error.count("\n") == 1
    assert option in error
    assert not [*tmp_path.glob("*train_out")]
