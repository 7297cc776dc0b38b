"""Options: where they come from, how they are written, what --help says, and the arithmetic on them."""

import os
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from conftest import REPO, run

import config as config_module
from config import TestConfig as EvalConfig  # pytest would take a class named Test... for tests
from config import TrainConfig, problems, to_yaml
from utils import is_due, limit, scale_lr, split_batch


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """Each test has an empty current directory, and no launcher around it."""
    for name in list(os.environ):
        if name.startswith("LT_") or name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(monkeypatch):
    """train("--seed 1") is what `python train.py --seed 1` gets: the config and the run to resume."""

    def parse_train(options: str) -> tuple[TrainConfig, Path | None]:
        monkeypatch.setattr(sys, "argv", ["train.py", *options.split()])
        return config_module.parse_train()

    return parse_train


def of_file(content: str, train) -> TrainConfig:
    Path("file.yaml").write_text(content)
    return train("--config_path file.yaml")[0]


# ---- layers


def test_without_options_the_defaults_hold(train):
    assert train("") == (TrainConfig(), None)


def test_later_layers_win(train):
    """Defaults < config files in their order < command line."""
    Path("shared.yaml").write_text("epochs: 1\nseed: 1\ngamma: 0.1\n")
    Path("variant.yaml").write_text("epochs: 2\nseed: 2\n")
    config, _ = train("--epochs 3 --config_path shared.yaml variant.yaml")
    assert (config.epochs, config.seed, config.gamma, config.width) == (3, 2, 0.1, TrainConfig().width)
    config, _ = train("--config_path variant.yaml shared.yaml --epochs 3")
    assert (config.epochs, config.seed) == (3, 1)


def test_command_line_wins_even_with_a_default(train):
    Path("file.yaml").write_text("compile: true\nfast_run: 3\nepochs: 3\nlogger_name: [wandb]\n")
    config, _ = train(
        "--config_path file.yaml --compile false --fast_run None --epochs 20 --logger_name csv tensorboard"
    )
    assert config == TrainConfig(config_path=("file.yaml",))


def test_launcher_tells_the_devices(train, monkeypatch):
    """torchrun's two nodes of three processes; it wins over config files, the command line over it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = of_file("devices: 1\nnum_nodes: 1\n", train)
    assert (config.devices, config.num_nodes) == ("3", 2)
    config, _ = train("--devices 2")
    assert (config.devices, config.num_nodes) == ("2", 2)


def test_fabric_run_tells_the_devices(train, monkeypatch):
    given = {"accelerator": "cpu", "devices": "4", "num_nodes": "2", "strategy": "ddp", "precision": "bf16-true"}
    for name, value in given.items():
        monkeypatch.setenv(f"LT_{name.upper()}", value)
    config, _ = train("--precision 32-true")
    assert (config.accelerator, config.devices, config.num_nodes, config.strategy) == ("cpu", "4", 2, "ddp")
    assert config.precision == "32-true"


# ---- values


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "1.0e-3"])
def test_float_in_any_spelling(text: str, train):
    assert of_file(f"base_lr: {text}", train).base_lr == 1e-3
    assert train(f"--base_lr {text}")[0].base_lr == 1e-3


@pytest.mark.parametrize("text", ["null", "~", "None", ""])
@pytest.mark.parametrize("option", ["micro_batch_size", "max_grad_norm", "data_dir", "num_checkpoint_keep"])
def test_none_in_a_config_file(option: str, text: str, train):
    assert getattr(of_file(f"{option}: {text}", train), option) is None


@pytest.mark.parametrize("option", [field.name for field in fields(TrainConfig) if "None" in str(field.type)])
def test_none_on_the_command_line(option: str, train):
    assert getattr(train(f"--{option} None")[0], option) in (None, (None,))  # config_path: a list of one


@pytest.mark.parametrize("options, value", [("", False), ("--compile", True), ("--compile true", True),
                                            ("--compile false", False), ("--compile=True", True),
                                            ("--compile --seed 1", True)])  # fmt: skip
def test_switch_on_the_command_line(options: str, value: bool, train):
    assert train(options)[0].compile is value


@pytest.mark.parametrize("text, value", [("true", True), ("True", True), ("false", False), ("no", False)])
def test_switch_in_a_config_file(text: str, value: bool, train):
    assert of_file(f"compile: {text}", train).compile is value


@pytest.mark.parametrize("options, value", [("", None), ("--fast_run", 2), ("--fast_run 3", 3), ("--fast_run=3", 3)])
def test_fast_run(options: str, value: int | None, train):
    assert train(options)[0].fast_run == value


@pytest.mark.parametrize("text, value", [("5", 5), ("1", 1), ("0.5", 0.5), ("1.0", 1.0), ("1e-1", 0.1)])
def test_limit_is_a_count_or_a_fraction(text: str, value: int | float, train):
    for config in (train(f"--limit_train_batches {text}")[0], of_file(f"limit_train_batches: {text}", train)):
        assert config.limit_train_batches == value
        assert type(config.limit_train_batches) is type(value)


def test_several_loggers(train):
    for text in ("csv wandb", "[csv, wandb]"):
        found = of_file(f"logger_name: {text}", train) if "[" in text else train(f"--logger_name {text}")[0]
        assert found.logger_name == ("csv", "wandb")
    assert of_file("logger_name: csv", train).logger_name == ("csv",)


def test_text_is_taken_as_it_is(train):
    config = of_file("comment: '--not an option: # 5'\nproject: 2026\nout_dir: 1_000\ndevices: 0,2", train)
    assert (config.comment, config.project, config.out_dir) == ("--not an option: # 5", "2026", "1_000")
    assert config.devices == "0,2"


def test_empty_config_file_changes_nothing(train):
    assert of_file("# nothing yet\n", train) == TrainConfig(config_path=("file.yaml",))


@pytest.mark.parametrize("option", ["--epoch 3", "--effective 32", "--no_such_option"])
def test_no_abbreviations(option: str, train, capsys):
    with pytest.raises(SystemExit) as ended:
        train(option)
    assert ended.value.code == 2
    assert option.split()[0] in capsys.readouterr().err


def test_defaults_have_no_problems():
    assert problems(TrainConfig()) == []
    assert problems(EvalConfig(out_dir="train_out")) == []


# ---- help


@pytest.mark.parametrize("script, cls", [("train.py", TrainConfig), ("test.py", EvalConfig)])
def test_help_documents_every_option(script: str, cls: type):
    text = " ".join(run(f"{script} --help", REPO, COLUMNS="1000").stdout.partition("options:")[2].split())
    starts = {field.name: re.search(rf" --{field.name}\b(?! bool, --{field.name})", text) for field in fields(cls)}
    missing = [name for name, start in starts.items() if start is None]
    assert not missing
    for field in fields(cls):
        entry = re.split(r" --(?!no)\w+ ", text[starts[field.name].end() :])[0]
        documentation, _, default = entry.partition("(default: ")
        words = re.sub(r"^\s*(\[.*?\]\]?|\{.*?\}|\w+( \[\w+, \.\.\.\])?)(, --no\w+ bool)?\s", "", documentation)
        assert len(words.split()) >= 2, f"--{field.name} has no help text: {entry!r}"
        assert "----" not in words, f"--{field.name} is documented by a headline: {entry!r}"
        if field.default is not MISSING:
            assert default == f"{field.default})" or default.startswith(f"{field.default}) "), entry


@pytest.mark.parametrize("script", ["train.py", "test.py"])
@pytest.mark.parametrize("options, code", [("--help", 0), ("--no_such_option", 2)])
def test_answers_without_importing_torch(script: str, options: str, code: int):
    done = run(f"{script} {options}", REPO, code=code, PYTHONPROFILEIMPORTTIME="1")
    assert "argparse" in done.stderr
    assert not re.search(r"\| +(torch|lightning|numpy|sklearn)$", done.stderr, re.MULTILINE)


# ---- a config written down


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"base_lr": 1e-5, "weight_decay": 0.0, "warmup_epochs": 0.5, "gamma": 1.0, "max_grad_norm": 1.0},
        {"logger_name": ("wandb",), "monitor": "train/loss", "monitor_mode": "max", "log_interval": 7},
        {"logger_name": ("csv", "tensorboard", "wandb"), "num_checkpoint_keep": None, "checkpoint_frequency": 0.1},
        {"limit_train_batches": 1.0, "limit_val_batches": 1, "fast_run": 3, "compile": True, "profile": True},
        {"limit_train_batches": 0.5, "limit_val_batches": 7, "num_sanity_val_steps": 0, "summary": True},
        {"devices": "0,2", "accelerator": "gpu", "strategy": "fsdp", "precision": "16", "micro_batch_size": 8},
        {"comment": "a: b # c 'd' \"e\" - ü 测试", "project": "2026", "out_dir": "1e-3", "root_dir": "a b/c"},
        {"comment": "two\nlines\n", "out_dir": "yes", "root_dir": "~/runs", "project": " x "},
        {"comment": "--x", "project": "--x"},
    ],
)
def test_config_written_and_read_is_the_same(changed: dict, train):
    config = TrainConfig(**changed)
    assert problems(config) == []
    assert of_file(to_yaml(config), train) == TrainConfig(**changed, config_path=("file.yaml",))


# ---- resume


def make_run(
    name: str, unfinished: bool = True, checkpoint: str | None = "step-00000004.ckpt", config: dict | None = None
) -> Path:
    folder = Path(name)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(TrainConfig(**({"out_dir": folder.name[16:]} | (config or {})))))
    if checkpoint:
        (folder / "checkpoints" / checkpoint).touch()
    if not unfinished:
        (folder / "model.pt").touch()


def test_resume_auto_without_runs_starts_a_new_one(train):
    assert train("--resume auto")[1] is None


def test_resume_auto_takes_the_newest_unfinished_run_with_a_checkpoint(train):
    make_run("20260101-000000-train_out")
    make_run("20260105-000000-train_out", unfinished=False)
    make_run("20260104-000000-train_out", checkpoint=None)
    make_run("20260106-000000-other")
    make_run("root/20260107-000000-train_out")
    assert train("--resume auto")[1] == Path("20260101-000000-train_out")
    make_run("20260103-000000-train_out", checkpoint="best.ckpt")
    assert train("--resume auto")[1] == Path("20260103-000000-train_out")
    assert train("--resume auto --out_dir other")[1] == Path("20260106-000000-other")
    assert train("--resume auto --root_dir root")[1] == Path("root/20260107-000000-train_out")


def test_resume_auto_starts_a_new_run_where_all_are_finished(train):
    make_run("20260101-000000-train_out", unfinished=False)
    make_run("20260102-000000-train_out", checkpoint=None)
    assert train("--resume auto")[1] is None


def test_resume_auto_knows_the_order_of_runs_of_the_same_second(train):
    for suffix in ("", *(f"-{number}" for number in range(1, 11))):
        make_run(f"20260101-000000-train_out{suffix}", config={"out_dir": "train_out"})
    assert train("--resume auto")[1] == Path("20260101-000000-train_out-10")


def test_resume_auto_leaves_a_run_of_a_similar_name_alone(train):
    """train_out-1 is also what the second run of train_out in the same second is called."""
    make_run("20260101-000000-train_out-1")
    assert train("--resume auto")[1] is None
    assert train("--resume auto --out_dir train_out-1")[1] == Path("20260101-000000-train_out-1")


def test_resume_takes_the_options_of_the_run(train):
    """Nothing has to be typed again; what is typed wins."""
    make_run("20260101-000000-x", config={"epochs": 7, "gamma": 0.5, "effective_batch_size": 32})
    Path("file.yaml").write_text("gamma: 0.25\nepochs: 8\n")
    for name in ("x", "20260101-000000-x"):
        config, run_dir = train(f"--resume {name} --config_path file.yaml --epochs 9")
        assert run_dir == Path("20260101-000000-x")
        assert (config.epochs, config.gamma, config.effective_batch_size) == (9, 0.25, 32)


def test_a_resumed_run_keeps_its_name(train):
    """What looks like the second run of a second is told from the first by the out_dir in its config."""
    make_run("20260101-000000-job-60")
    config, run_dir = train("--resume 20260101-000000-job-60 --out_dir other")
    assert (config.out_dir, run_dir) == ("job-60", Path("20260101-000000-job-60"))


# ---- arithmetic


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro", [None, 1, 2, 8, 24])
def test_split_batch(world_size: int, micro: int | None, capsys):
    """The equation holds, or the error names the nearest values for which it does."""
    for effective in range(1, 100):
        unit = world_size * (micro or 1)
        if effective % unit == 0:
            size, accumulation = split_batch(effective, micro, world_size)
            assert effective == world_size * size * accumulation
            assert size == micro if micro else accumulation == 1
        else:
            with pytest.raises(SystemExit):
                split_batch(effective, micro, world_size)
            below, message = effective // unit * unit, capsys.readouterr().err
            named = re.search(rf"--effective_batch_size {effective}: .*; nearest: (?:(\d+) or )?(\d+)$", message)
            assert (int(named[1] or 0), int(named[2])) == (below, below + unit)


def test_scale_lr():
    """Goyal et al. 2017, section 2.1: 0.1 for 256 samples becomes 3.2 for 8192; the square root gives 0.1 sqrt(32)."""
    assert scale_lr(0.1, 8192, 256, "linear") == pytest.approx(3.2)
    assert scale_lr(0.1, 8192, 256, "sqrt") == pytest.approx(0.1 * 32**0.5)
    assert scale_lr(0.1, 8192, 256, "none") == 0.1
    assert scale_lr(0.1, 64, 256, "linear") == pytest.approx(0.025)
    assert scale_lr(0.1, 64, 256, "sqrt") == pytest.approx(0.05)


@pytest.mark.parametrize("steps_per_epoch", [4, 19, 22, 100, 937])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_is_due_so_many_times_in_each_epoch(steps_per_epoch: int, times: int):
    every = steps_per_epoch / times
    for epoch in range(30):
        steps = range(epoch * steps_per_epoch + 1, (epoch + 1) * steps_per_epoch + 1)
        due = [step for step in steps if is_due(step, every)]
        assert len(due) == times
        assert due[-1] == steps[-1]


def test_is_due_for_a_fraction_of_an_epoch():
    """0.1 of 22 steps: exactly ten per epoch."""
    for epoch in range(1000):
        assert sum(is_due(step, 0.1 * 22) for step in range(epoch * 22 + 1, (epoch + 1) * 22 + 1)) == 10


def test_is_due_every_so_many_epochs_and_at_most_once_a_step():
    assert [step for step in range(1, 100) if is_due(step, 2.5 * 10)] == [25, 50, 75]
    assert [step for step in range(1, 100) if is_due(step, 1.5 * 19)] == [29, 57, 86]
    assert all(is_due(step, 0.25) for step in range(1, 100))


@pytest.mark.parametrize(
    "total, limited, expected",
    [(19, None, 19), (19, 5, 5), (19, 1, 1), (19, 100, 19), (19, 1.0, 19), (19, 0.5, 9), (19, 0.01, 1),
     (30, 0.1, 3), (10, 0.7, 7), (100, 0.29, 29)],
)  # fmt: skip
def test_limit(total: int, limited: int | float | None, expected: int):
    assert limit(total, limited) == expected
