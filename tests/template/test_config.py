"""Options: where they come from, how they are written, what --help says, and the arithmetic on them."""

import json
import math
import os
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from helpers import REPO, run

from config import TestConfig as EvalConfig  # pytest would take a class named Test... for tests
from config import TrainConfig, mode_of
from runtime.cli import config_with, parse_test, parse_train, read_config, to_yaml
from runtime.errors import ConfigError
from runtime.options import values_of
from utils import Plan, limit, make_plan, scale_lr

OF_LAUNCHERS = ["LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """Each test has an empty current directory, and no launcher around it."""
    for name in list(os.environ):
        if name.startswith(("LT_", "SLURM_")) or name in OF_LAUNCHERS:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(options: str) -> TrainConfig:
    """What `python train.py OPTIONS` trains with."""
    return parse_train(options.split())


def of_file(content: str) -> TrainConfig:
    Path("file.yaml").write_text(content)
    return train("--config_path file.yaml")


# ---- layers


def test_without_options_the_defaults_hold():
    assert train("") == TrainConfig()


def test_later_layers_win():
    """Defaults < config files in their order < command line."""
    Path("shared.yaml").write_text("epochs: 1\nseed: 1\nbase_lr: 0.1\n")
    Path("variant.yaml").write_text("epochs: 2\nseed: 2\n")
    config = train("--epochs 3 --config_path shared.yaml variant.yaml")
    assert (config.epochs, config.seed, config.base_lr, config.width) == (3, 2, 0.1, TrainConfig().width)
    config = train("--config_path variant.yaml shared.yaml --epochs 3")
    assert (config.epochs, config.seed) == (3, 1)


def test_command_line_wins_even_with_a_default():
    Path("file.yaml").write_text("summary: true\nfast_run: 3\nepochs: 3\nlogger_name: [wandb]\n")
    config = train("--config_path file.yaml --summary false --fast_run 0 --epochs 20 --logger_name csv tensorboard")
    assert config == TrainConfig()


def test_a_config_file_is_judged_together_with_the_other_layers():
    """Alone this one would have a longer warm-up than epochs."""
    assert of_file("warmup_epochs: 30\nepochs: 50\n").warmup_epochs == 30
    Path("warmup.yaml").write_text("warmup_epochs: 30\n")
    assert train("--config_path warmup.yaml --epochs 50").warmup_epochs == 30
    with pytest.raises(ConfigError, match="--warmup_epochs 30: must be at most --epochs 20"):
        train("--config_path warmup.yaml")


def test_a_config_file_may_have_any_name():
    """A run's own config.yaml has all options, which shows that it is whole; others need not."""
    Path("config.yaml").write_text("epochs: 5\n")
    assert train("--config_path config.yaml").epochs == 5


def test_launcher_tells_the_devices(monkeypatch):
    """torchrun's two nodes of three processes; it wins over config files, the command line over it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = of_file("devices: 1\nnum_nodes: 1\n")
    assert (config.devices, config.num_nodes) == ("3", 2)
    config = train("--devices 2")
    assert (config.devices, config.num_nodes) == ("2", 2)


def test_restarts_of_torchrun_need_a_variable(monkeypatch):
    """Without it they may hang for longer than --timeout."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    with pytest.raises(ConfigError, match=f"^torchrun --max-restarts 1: set {variable}=1, else a restart may hang$"):
        train("")
    monkeypatch.setenv(variable, "1")
    assert train("").devices == "2"


def test_srun_tells_the_devices(monkeypatch):
    """Two nodes of three tasks. What Fabric needs to know of them it gets here, too."""
    for name, value in {"NUM_TASKS": "6", "NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    config = of_file("devices: 1\nnum_nodes: 1\n")
    assert (config.devices, config.num_nodes) == ("3", 2)
    assert (os.environ["WORLD_SIZE"], os.environ["SLURM_JOB_NAME"]) == ("6", "srun")


def test_in_the_shell_of_a_slurm_job_the_options_tell_the_devices(monkeypatch):
    """Fabric would wait for the tasks of the job, which nobody starts."""
    monkeypatch.setenv("SLURM_NTASKS", "6")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert train("--devices 2").devices == "2"
    assert "SLURM_NTASKS" not in os.environ and "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpirun_is_refused(name: str, monkeypatch):
    """Each process would train a run of its own. It may start torchrun, or the first process of each machine."""
    monkeypatch.setenv(name, "1")
    assert train("") == TrainConfig()
    monkeypatch.setenv(name, "4")
    for parse in (train, lambda options: parse_test(options.split())):
        with pytest.raises(ConfigError, match=rf"^mpirun has started 4 processes \({name}\): use torchrun or srun"):
            parse("")
    with monkeypatch.context() as patch:
        patch.setenv("NODE_RANK", "1")
        assert train("--num_nodes 4").num_nodes == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert train("").num_nodes == 4


def test_what_an_earlier_launch_has_left_in_the_shell_is_ignored(monkeypatch):
    """Fabric would wait for processes that nobody starts, or on another machine."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    train("--devices 2")
    assert "LOCAL_RANK" not in os.environ and "MASTER_ADDR" not in os.environ
    assert os.environ["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("given", ["NODE_RANK LOCAL_RANK WORLD_SIZE", "LOCAL_RANK WORLD_SIZE", "NODE_RANK"])
def test_what_a_launcher_has_given_is_kept(given: str, monkeypatch):
    """By Fabric to the processes that it starts, or by hand to each."""
    for name in given.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    train("--devices 2")
    assert os.environ["MASTER_ADDR"] == "192.0.2.1" and all(name in os.environ for name in given.split())


def test_fabric_run_tells_the_devices(monkeypatch):
    given = {"accelerator": "cpu", "devices": "4", "num_nodes": "2", "strategy": "ddp", "precision": "bf16-true"}
    for name, value in given.items():
        monkeypatch.setenv(f"LT_{name.upper()}", value)
    config = train("--precision 32-true")
    assert (config.accelerator, config.devices, config.num_nodes, config.strategy) == ("cpu", "4", 2, "ddp")
    assert config.precision == "32-true"


# ---- values


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "1.0e-3"])
def test_float_in_any_spelling(text: str):
    assert of_file(f"base_lr: {text}").base_lr == 1e-3
    assert train(f"--base_lr {text}").base_lr == 1e-3


NULL = {"checkpoint_frequency": 0, "num_checkpoint_keep": 0}  # which older versions wrote where these were off


@pytest.mark.parametrize("option", values_of(TrainConfig()))
def test_null_in_a_config_file_is_the_default_or_off(option: str):
    off = {name: value for name, value in NULL.items() if name == option}
    for text in ("null", "~", ""):
        assert of_file(f"{option}: {text}") == TrainConfig(**off)


def test_null_in_a_later_file_wins():
    Path("a.yaml").write_text("max_steps: 3\nnum_checkpoint_keep: 5\ndata_dir: x\n")
    Path("b.yaml").write_text("max_steps: null\nnum_checkpoint_keep: null\ndata_dir:\n")
    config = train("--config_path a.yaml b.yaml")
    assert (config.max_steps, config.num_checkpoint_keep, config.data_dir) == (0, 0, "")


OFF = [
    "max_steps", "micro_batch_size", "max_grad_norm", "early_stopping_patience", "log_interval", "val_interval",
    "checkpoint_interval", "checkpoint_frequency", "num_checkpoint_keep", "fast_run", "limit_val_batches",
]  # fmt: skip


@pytest.mark.parametrize("option", OFF)
def test_zero_is_off(option: str):
    assert getattr(train(f"--{option} 0"), option) == getattr(of_file(f"{option}: 0"), option) == 0


@pytest.mark.parametrize("option", ["data_dir", "comment"])
def test_empty_text_is_off(option: str):
    assert getattr(train(f"--{option}="), option) == getattr(of_file(f"{option}: ''"), option) == ""


@pytest.mark.parametrize("options, value", [("", False), ("--summary", True), ("--summary true", True),
                                            ("--summary false", False), ("--summary=True", True),
                                            ("--summary --seed 1", True)])  # fmt: skip
def test_switch_on_the_command_line(options: str, value: bool):
    assert train(options).summary is value


@pytest.mark.parametrize("text, value", [("true", True), ("True", True), ("false", False), ("no", False)])
def test_switch_in_a_config_file(text: str, value: bool):
    assert of_file(f"summary: {text}").summary is value


@pytest.mark.parametrize("options, value", [("", "none"), ("--compile", "default"), ("--compile none", "none"),
                                            ("--compile --seed 1", "default"),
                                            ("--compile reduce-overhead", "reduce-overhead")])  # fmt: skip
def test_compile_takes_a_mode_of_torch_compile(options: str, value: str):
    assert train(options).compile == value


@pytest.mark.parametrize("options, value", [("", 0), ("--fast_run", 4), ("--fast_run 3", 3), ("--fast_run=3", 3)])
def test_fast_run(options: str, value: int):
    assert train(options).fast_run == value


@pytest.mark.parametrize("text, value", [("5", 5), ("1", 1), ("0.5", 0.5), ("1.0", 1.0), ("1e-1", 0.1)])
def test_limit_is_a_count_or_a_fraction(text: str, value: int | float):
    for config in (train(f"--limit_train_batches {text}"), of_file(f"limit_train_batches: {text}")):
        assert config.limit_train_batches == value
        assert type(config.limit_train_batches) is type(value)


def test_several_loggers():
    for text in ("csv wandb", "[csv, wandb]"):
        found = of_file(f"logger_name: {text}") if "[" in text else train(f"--logger_name {text}")
        assert found.logger_name == ("csv", "wandb")
    assert of_file("logger_name: csv").logger_name == ("csv",)


def test_text_is_taken_as_it_is():
    config = of_file("comment: '--not an option: # 5'\nproject: 2026\nout_dir: 1_000\ndevices: 0,2")
    assert (config.comment, config.project, config.out_dir) == ("--not an option: # 5", "2026", "1_000")
    assert config.devices == "0,2"


def test_empty_config_file_changes_nothing():
    assert of_file("# nothing yet\n") == TrainConfig()


def test_a_second_config_path_adds_its_files():
    """The first would else be dropped without a word."""
    Path("a.yaml").write_text("epochs: 5\nseed: 1")
    Path("b.yaml").write_text("seed: 2")
    config = train("--config_path a.yaml --config_path b.yaml")
    assert (config.epochs, config.seed) == (5, 2)


@pytest.mark.parametrize("option", ["--epoch 3", "--effective 32", "--no_such_option"])
def test_no_abbreviations(option: str):
    with pytest.raises(ConfigError, match=option.split()[0]):
        train(option)


OPTIONAL_VALUE = ("fast_run", "compile")


@pytest.mark.parametrize(
    "option", [f.name for f in fields(TrainConfig) if f.type is not bool and f.name not in OPTIONAL_VALUE]
)
def test_an_option_is_not_accepted_without_its_value(option: str):
    """`--resume $RUN`, where RUN is not set, must not start a new run."""
    for options in (f"--{option}", f"--{option} --summary"):
        with pytest.raises(ConfigError, match=f"--{option}\\b"):
            train(options)


# ---- a config made in Python


@pytest.mark.parametrize(
    "mistake",
    [{"epochs": -1}, {"base_lr": float("nan")}, {"dropout": 1.0}, {"fast_run": 1},
     {"strategy": "fsdp"}, {"limit_val_batches": 2.5}, {"limit_train_batches": 0}, {"lr_schedule": "straight"},
     {"lr_scaling_rule": "cubic"}, {"dataset": "cifar"}, {"logger_name": ("csv", "mlflow")}, {"precision": "8-true"},
     {"monitor_mode": "up"}],
)  # fmt: skip
def test_a_config_checks_itself_wherever_it_is_made(mistake: dict):
    with pytest.raises(ValueError, match=f"--{next(iter(mistake))}\\b"):
        TrainConfig(**mistake)
    with pytest.raises(ValueError, match=f"--{next(iter(mistake))}\\b"):
        replace(TrainConfig(), **mistake)


def test_so_does_the_config_of_test_py():
    assert EvalConfig(out_dir="train_out").checkpoint == "best"
    with pytest.raises(ValueError, match="--batch_size -1"):
        EvalConfig(out_dir="train_out", batch_size=-1)


# ---- what is best


@pytest.mark.parametrize(
    "names, mode",
    [("train/loss val/loss val/aux_loss val/accuracy_loss loss", "min"),
     ("val/accuracy val/top5_accuracy val/loss_accuracy accuracy", "max")],
)  # fmt: skip
def test_the_last_word_of_a_name_tells_what_is_best(names: str, mode: str):
    other = {"max": "min", "min": "max"}[mode]
    for name in names.split():
        assert mode_of(train(f"--monitor {name}")) == mode_of(train(f"--monitor {name} --monitor_mode {mode}")) == mode
        with pytest.raises(ConfigError, match=f"^--monitor_mode {other}: the best {name} is its {mode}$"):
            train(f"--monitor {name} --monitor_mode {other}")


@pytest.mark.parametrize(
    "name",
    ["val/false_match_rate", "val/f1", "val/error", "val/accuracy_rate", "val/topaccuracy", "val/loss_2", "val/Loss"],
)
def test_the_mode_of_any_other_value_is_asked_for(name: str):
    with pytest.raises(ConfigError, match=f"^--monitor {name}: .*, or give --monitor_mode$"):
        train(f"--monitor {name}")
    for mode in ("max", "min"):
        assert mode_of(train(f"--monitor {name} --monitor_mode {mode}")) == mode


def test_a_mode_in_a_file_is_not_that_of_another_monitor_that_is_given():
    """It belongs to the monitor that stands beside it, or to the default."""
    Path("f1.yaml").write_text("monitor: val/f1\nmonitor_mode: max\n")
    Path("error.yaml").write_text("monitor: val/error\n")
    Path("mode.yaml").write_text("monitor_mode: max\n")
    assert mode_of(train("--config_path f1.yaml")) == "max"
    assert mode_of(train("--config_path f1.yaml --monitor val/loss")) == "min"
    assert mode_of(train("--config_path mode.yaml --monitor val/loss")) == "min"
    assert mode_of(train("--config_path f1.yaml --monitor val/error --monitor_mode min")) == "min"
    assert mode_of(train("--config_path error.yaml --monitor_mode min")) == "min"
    for options in ("f1.yaml --monitor val/error", "f1.yaml error.yaml", "error.yaml"):
        with pytest.raises(ConfigError, match="^--monitor val/error: .*, or give --monitor_mode$"):
            train(f"--config_path {options}")


def test_a_default_mode_is_not_that_of_another_monitor_that_is_given():
    """As in a recipe, whose defaults have both."""
    defaults = TrainConfig(monitor="val/f1", monitor_mode="max")
    assert config_with(defaults, {"epochs": 3.0}).monitor_mode == "max"
    assert config_with(defaults, {"monitor": "val/error"}).monitor_mode == "auto"


def test_the_plan_of_a_config_made_in_python_knows_the_mode():
    assert plan_of(monitor="val/loss").monitor_mode == "min"
    assert plan_of(monitor="val/f1", monitor_mode="max").monitor_mode == "max"
    with pytest.raises(ConfigError, match="^--monitor val/f1: "):
        plan_of(monitor="val/f1")
    with pytest.raises(ConfigError, match="^--monitor_mode min: "):
        plan_of(monitor_mode="min")


# ---- help


@pytest.mark.parametrize("script, cls", [("train.py", TrainConfig), ("test.py", EvalConfig)])
def test_help_documents_every_option(script: str, cls: type):
    text = " ".join(run(f"{script} --help", REPO, COLUMNS="1000").stdout.split())
    text = re.sub(r", --no\w+ bool", "", text)
    starts = {field.name: re.search(rf" --{field.name}\b", text) for field in fields(cls)}
    missing = [name for name, start in starts.items() if start is None]
    assert not missing
    for field in fields(cls):
        entry = re.split(r" --\w+ ", text[starts[field.name].end() :])[0]
        documentation, _, default = entry.partition("(default: ")
        words = re.sub(r"^\s*(\[.*?\]\]?|\{.*?\}|\w+( \[\w+, \.\.\.\])?)\s", "", documentation)
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


def groups_of_help(script: str) -> dict[str, list]:
    """The names of the options that --help shows, by the titles of their groups."""
    text = run(f"{script} --help", REPO).stdout
    groups: dict[str, list] = {}
    for title, name in re.findall(r"^(?:(\S.*):|  --([\w.]+).*)$", text, re.MULTILINE):
        if title:
            groups[title] = []
        else:
            [*groups.values()][-1].append(name)
    return {title: names for title, names in groups.items() if names}  # there is one for --help alone


@pytest.mark.parametrize("script, cls", [("train.py", TrainConfig), ("test.py", EvalConfig)])
def test_help_shows_each_option_once_in_the_groups_of_the_config(script: str, cls: type):
    """The classes of the groups, with their docstrings as titles."""
    expected = {base.__doc__: [option.name for option in fields(base)] for base in cls.__bases__[::-1]}
    assert groups_of_help(script) == expected and len(expected) == len(cls.__bases__)
    assert sum(expected.values(), []) == [option.name for option in fields(cls)]  # the order of config.yaml


def test_a_switch_is_off_as_the_help_says():
    assert not train("--nodeterministic").deterministic


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_has_the_options_in_the_groups_of_the_help(page: str):
    lists = re.findall(r"^- \*\*(.+)\*\*[:：](.*\n(?:  .*\n)*)", (REPO / page).read_text(), re.MULTILINE)
    groups = groups_of_help("train.py")
    assert [re.findall(r"--(\w+)", names) for _, names in lists] == [*groups.values()]
    if page == "README.md":
        assert [title for title, _ in lists] == [*groups]


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_help_is_as_wide_as_a_terminal(script: str):
    lines = run(f"{script} --help", REPO, COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80


def test_help_names_the_choices():
    printed = run("train.py --help", REPO).stdout
    assert "--logger_name {csv,tensorboard,wandb}" in printed and "--monitor_mode {auto,max,min}" in printed
    assert "Literal" not in printed


# ---- a config written down


@pytest.mark.parametrize(
    "text, comment",
    [("''", ""), ("'null'", "null"), ('"~"', "~"), ("nul", "nul"), ("None", "None")],
)
def test_text_that_is_quoted_or_like_null_is_text(text: str, comment: str):
    assert of_file(f"comment: {text}").comment == comment


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"epochs": 2.5, "max_steps": 100, "val_interval": 3, "val_frequency": 0.5, "checkpoint_interval": 7},
        {"base_lr": 1e-5, "weight_decay": 0.0, "warmup_epochs": 0.5, "max_grad_norm": 1.0},
        {"logger_name": ("wandb",), "monitor": "train/grad_norm", "monitor_mode": "max", "log_interval": 7},
        {"logger_name": ("csv", "tensorboard", "wandb"), "num_checkpoint_keep": 0, "checkpoint_frequency": 0.1},
        {"limit_train_batches": 1.0, "limit_val_batches": 1, "fast_run": 3, "compile": "max-autotune"},
        {"checkpoint_frequency": 0.0, "compile": "default", "data_dir": "x", "early_stopping_patience": 3},
        {"limit_train_batches": 0.5, "limit_val_batches": 7, "num_sanity_val_steps": 0, "summary": True},
        {"devices": "0,2", "accelerator": "gpu", "strategy": "ddp", "precision": "16-mixed", "micro_batch_size": 8},
        {"comment": "a: b # c 'd' \"e\" - ü 测试", "project": "2026", "out_dir": "1e-3", "root_dir": "a b/c"},
        {"comment": "two\nlines\n", "out_dir": "yes", "root_dir": "runs/~", "project": " x "},
        {"comment": "--x", "project": "--x"},
        {"comment": "", "project": "null"},
    ],
)
def test_config_written_and_read_is_the_same(changed: dict):
    written = to_yaml(TrainConfig(**changed))
    assert of_file(written) == TrainConfig(**changed)
    assert to_yaml(of_file(written)) == written  # else a resumed run seems to have other options


# ---- which run is meant


def make_run(name: str, is_finished: bool = False, **config) -> None:
    """A run directory, as far as the command line looks at it."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(TrainConfig(**{"out_dir": folder.name[16:], **config})))
    state = "finished" if is_finished else "running"
    (folder / "summary.json").write_text(json.dumps({"state": state}))


def test_resume_auto_without_runs_starts_a_new_one(capsys):
    Path("20260101-000000-train_out").mkdir()  # without a config.yaml it is no run
    Path("20260102-000000-train_out").mkdir()
    Path("20260103-000000-train_out").mkdir()
    Path("20260103-000000-train_out/config.yaml").symlink_to("nowhere")
    make_run("20260101-000000-other")
    make_run("20260101-000000-train_out-1")
    make_run("x-20260101-000000-train_out")
    assert train("--resume auto") == TrainConfig()
    told = capsys.readouterr().out.splitlines()
    assert told == [f"2026010{day}-000000-train_out is skipped: config.yaml is missing" for day in (3, 2, 1)]


def test_resume_auto_takes_the_newest_run_of_the_name():
    for name in ("20260103-000000-train_out", "20260101-000000-train_out", "20260106-000000-other"):
        make_run(name)
    make_run("root/20260107-000000-train_out")
    assert train("--resume auto").resume == "20260103-000000-train_out"
    assert train("--resume auto --out_dir other").resume == "20260106-000000-other"
    assert train("--resume auto --root_dir root").resume == "root/20260107-000000-train_out"
    assert train("--resume auto --out_dir root/train_out").resume == "root/20260107-000000-train_out"


def test_root_dir_tells_where_the_run_to_resume_is_and_changes_nothing(capsys):
    make_run("root/20260107-000000-train_out")
    for resume in ("auto", "train_out", "20260107-000000-train_out"):
        assert train(f"--resume {resume} --root_dir root").root_dir == "."  # as it was trained
    assert "instead of" not in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["auto", "train_out", "20260102-000000-train_out"])
def test_a_finished_run_is_not_trained_again(resume: str, capsys):
    """A restarted job must not start a second run, nor go back to an older one."""
    make_run("20260101-000000-train_out")
    make_run("20260102-000000-train_out", is_finished=True, max_steps=100, early_stopping_patience=3)
    untrained = "--num_workers 2 --devices 2 --strategy ddp --logger_name csv --comment x --summary --timeout 9"
    for options in ("", "--max_steps 100", untrained, "--max_steps 99", "--early_stopping_patience 2 --epochs 99"):
        with pytest.raises(SystemExit) as ended:
            train(f"--resume {resume} {options}")
        assert not ended.value.code
        assert "nothing to do: 20260102-000000-train_out is finished" in capsys.readouterr().out
    for options in ("--max_steps 101", "--early_stopping_patience 4", "--early_stopping_patience 0", "--max_steps 0"):
        longer = train(f"--resume {resume} {options} --base_lr 0.5")
        assert (longer.resume, longer.base_lr) == ("20260102-000000-train_out", 0.5)
        assert "nothing to do" not in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["auto", "train_out", "20260101-000000-train_out"])
def test_other_options_for_a_finished_run_are_named_where_they_would_train_nothing(resume: str):
    make_run("20260101-000000-train_out", is_finished=True)
    told = "--base_lr 0.5 --precision bf16-mixed: 20260101-000000-train_out is finished, so nothing would be trained"
    for options in ("", "--num_workers 2", "--epochs 19"):
        with pytest.raises(ConfigError) as error:
            train(f"--resume {resume} --base_lr 0.5 --precision bf16-mixed {options}")
        assert sorted(str(error.value).partition(": ")[0].split()) == sorted(told.partition(": ")[0].split())
        assert told.partition(": ")[2] in str(error.value) and "--out_dir" in str(error.value)
    assert train(f"--resume {resume} --base_lr 0.5 --epochs 21").base_lr == 0.5


@pytest.mark.parametrize("summary", [None, "", "{", "[]", "null", '{"state": "runn', '{"seconds": 3}'])
def test_a_run_is_finished_if_its_summary_says_so_and_not_otherwise(summary: str | None, capsys):
    make_run("20260101-000000-train_out", is_finished=True)
    path = Path("20260101-000000-train_out/summary.json")
    if summary is None:
        path.unlink()
    else:
        path.write_text(summary)
    assert train("--resume auto").resume == "20260101-000000-train_out"
    is_told = summary != '{"seconds": 3}' and summary != "[]"
    told = capsys.readouterr().out
    assert told.startswith(f"{path} cannot be read, so the run is not known to be finished: ") == is_told
    assert told.count("\n") == is_told


@pytest.mark.parametrize("given", ["--resume=", "--resume= --out_dir x", "--config_path="])
def test_an_empty_name_is_not_ignored(given: str):
    """`--resume "$RUN"`, where RUN is not set."""
    with pytest.raises(ConfigError, match="^--resume: must not be empty$|^--config_path ?: "):
        train(given)


def test_resume_takes_the_options_of_the_run(capsys):
    """Nothing has to be typed again; what is typed wins, and is told."""
    make_run("20260101-000000-x", epochs=7, base_lr=0.5, effective_batch_size=32)
    Path("file.yaml").write_text("base_lr: 0.25\nepochs: 8\n")
    for name in ("x", "20260101-000000-x", Path("20260101-000000-x").absolute()):
        config = train(f"--resume {name} --config_path file.yaml --epochs 9")
        assert Path(config.resume).samefile("20260101-000000-x")
        assert (config.epochs, config.base_lr, config.effective_batch_size) == (9, 0.25, 32)
        told = capsys.readouterr().out
        assert "--epochs 9.0 instead of 7.0\n" in told and "--base_lr 0.25 instead of 0.5\n" in told
        assert "effective_batch_size" not in told and "config_path" not in told


def test_a_tilde_is_the_home_directory(monkeypatch, tmp_path: Path):
    """In quotes, after `=`, and in a file a shell leaves it as it is. A name that only begins with one is kept."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    make_run("home/runs/20260101-000000-x")
    (home / "file.yaml").write_text("root_dir: ~/runs\ndata_dir: ~/data\n")
    for options in ("--root_dir ~/runs --data_dir=~/data", "--config_path ~/file.yaml"):
        config = train(options)
        assert (config.root_dir, config.data_dir) == (f"{home}/runs", f"{home}/data")
        assert f"\nroot_dir: {home}/runs\n" in to_yaml(config)
    assert train("--out_dir ~/runs/y").out_dir == f"{home}/runs/y"
    assert train("--out_dir ~no-such-user --comment ~/x").out_dir == "~no-such-user"
    assert train("--out_dir ~no-such-user --comment ~/x").comment == "~/x"
    run_dir = f"{home}/runs/20260101-000000-x"
    for name in ("~/runs/20260101-000000-x", "~/runs/x", "x --root_dir ~/runs"):
        assert train(f"--resume {name}").resume == run_dir
        assert parse_test(f"--out_dir {name}".split()).out_dir == run_dir
    (home / "runs/20260101-000000-x/best.ckpt").touch()
    assert parse_test(["--checkpoint", "~/runs/20260101-000000-x/best.ckpt"]).out_dir == run_dir


def test_a_tilde_in_a_config_that_is_made_in_python_is_refused():
    """Else the run would be in a directory of this name, or its config.yaml would tell another one."""
    with pytest.raises(ConfigError, match=r"--root_dir ~/runs would be read as /.*/runs$"):
        to_yaml(TrainConfig(root_dir="~/runs"))


def test_resume_of_a_name_means_its_newest_run_and_says_which(capsys):
    make_run("20260101-000000-x")
    make_run("20260102-000000-x")
    assert train("--resume x").resume == "20260102-000000-x"
    assert "the run is 20260102-000000-x\n" in capsys.readouterr().out


def test_test_py_without_options_takes_the_newest_run_of_the_default_name(capsys):
    for name in ("20260101-000000-train_out", "20260102-000000-train_out", "20260103-000000-x"):
        make_run(name)
    assert parse_test([]).out_dir == "20260102-000000-train_out"
    assert "the run is 20260102-000000-train_out\n" in capsys.readouterr().out


def test_a_resumed_run_keeps_its_name():
    make_run("20260101-000000-job")
    assert train("--resume auto --out_dir job").out_dir == "job"
    with pytest.raises(ConfigError, match="--out_dir other: a resume cannot change it"):
        train("--resume 20260101-000000-job --out_dir other")


def test_the_config_of_a_run_can_be_read_in_python():
    make_run("20260101-000000-job", width=7)
    assert read_config(Path("20260101-000000-job")) == TrainConfig(out_dir="job", width=7)


def rewrite(name: str, old: str, new: str) -> None:
    path = Path(name) / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_run_stays_readable_when_the_options_in_the_code_change(capsys):
    """An option that is gone is not needed, though its name may still be among those that a resume cannot change."""
    make_run("20260101-000000-job", width=7)
    rewrite("20260101-000000-job", "lr_schedule: cosine\n", "depth: 3\nkinds: [a, b]\n")
    config = read_config(Path("20260101-000000-job"))
    assert config == TrainConfig(out_dir="job", width=7)
    told = capsys.readouterr().out
    assert "options that are new in the code take their defaults: lr_schedule\n" in told
    assert told.count("\n") == 1


def test_the_config_of_a_run_of_this_version_is_read_without_a_word(capsys):
    make_run("20260101-000000-job")
    path = Path("20260101-000000-job/config.yaml")
    path.write_text(path.read_text().rstrip())  # as an editor may leave it
    assert read_config(path.parent) == TrainConfig(out_dir="job")
    assert capsys.readouterr().out == ""


def test_a_run_of_an_older_version_of_the_template_is_said_to_be_one():
    """Its config.yaml does not tell that it is whole."""
    make_run("20260101-000000-job", width=7, epochs=3)
    path = Path("20260101-000000-job/config.yaml")
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if line[0] != "#"))
    with pytest.raises(ConfigError, match=f"^config of the run {path}: is damaged, or of an older version"):
        read_config(path.parent)


# ---- arithmetic


def plan_of(world_size: int = 1, saved: int = 0, train_samples: int = 1000, **options) -> Plan:
    return make_plan(TrainConfig(**options), train_samples, 200, world_size, saved)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro", [0, 1, 2, 8, 24])
def test_the_batch_is_split_among_devices_and_micro_batches(world_size: int, micro: int):
    """The equation holds, or the error names the nearest values for which it does."""
    for effective in range(1, 100):
        options = {"effective_batch_size": effective, "micro_batch_size": micro}
        unit = world_size * (micro or 1)
        if effective % unit == 0:
            for saved in (0, 2):
                plan = plan_of(world_size, saved, **options)
                assert effective == world_size * plan.micro_batch_size * plan.grad_accum_steps
                kept = saved if saved and effective % (world_size * saved) == 0 else effective // world_size
                assert plan.micro_batch_size == (micro or kept)
        else:
            with pytest.raises(ConfigError) as error:
                plan_of(world_size, **options)
            below = effective // unit * unit
            named = re.search(
                rf"--effective_batch_size {effective}: .*; nearest: (?:(\d+) or )?(\d+)$", str(error.value)
            )
            assert (int(named[1] or 0), int(named[2])) == (below, below + unit)


@pytest.mark.parametrize(
    "options, steps, intervals",
    [
        ({}, (19, 380), (19, 19, 19)),
        ({"max_steps": 7}, (19, 7), (19, 19, 19)),
        ({"epochs": 0.01, "warmup_epochs": 0.0}, (19, 1), (19, 19, 19)),
        ({"epochs": 2.5, "limit_train_batches": 4}, (4, 10), (4, 4, 4)),
        ({"log_per_epoch": 2, "val_frequency": 0.5, "checkpoint_frequency": 3}, (19, 380), (9.5, 9.5, 57)),
        ({"log_interval": 3, "val_interval": 4, "checkpoint_interval": 5}, (19, 380), (3, 4, 5)),
        ({"checkpoint_frequency": 0.0}, (19, 380), (19, 19, math.inf)),
    ],
)
def test_epochs_become_steps(options: dict, steps: tuple, intervals: tuple):
    plan = plan_of(train_samples=1217, **options)
    assert (plan.steps_per_epoch, plan.total_steps) == steps
    assert (plan.log_interval, plan.val_interval, plan.save_interval) == intervals


def test_the_whole_training_set_may_be_one_batch():
    assert plan_of(train_samples=64, effective_batch_size=64).steps_per_epoch == 1
    with pytest.raises(ConfigError, match="^--effective_batch_size 65: there are only 64 training samples$"):
        plan_of(train_samples=64, effective_batch_size=65)


@pytest.mark.parametrize("limited, expected", [(2, 128), (4, 200), (0.5, 128), (1.0, 200), (0, 0)])
def test_a_validation_is_limited_in_effective_batches(limited: int | float, expected: int):
    """So it is the same on any number of devices."""
    for world_size in (1, 2, 4):
        assert plan_of(world_size, limit_val_batches=limited).val_samples == expected


def test_scale_lr():
    """Goyal et al. 2017, section 2.1: 0.1 for 256 samples becomes 3.2 for 8192; the square root gives 0.1 sqrt(32)."""
    assert scale_lr(0.1, 8192, 256, "linear") == pytest.approx(3.2)
    assert scale_lr(0.1, 8192, 256, "sqrt") == pytest.approx(0.1 * 32**0.5)
    assert scale_lr(0.1, 8192, 256, "none") == 0.1
    assert scale_lr(0.1, 64, 256, "linear") == pytest.approx(0.025)
    assert scale_lr(0.1, 64, 256, "sqrt") == pytest.approx(0.05)


ENDLESS = plan_of(max_steps=10**9)


@pytest.mark.parametrize("steps_per_epoch", [4, 19, 22, 100, 937])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_is_due_so_many_times_in_each_epoch(steps_per_epoch: int, times: int):
    interval = steps_per_epoch / times
    for epoch in range(30):
        steps = range(epoch * steps_per_epoch + 1, (epoch + 1) * steps_per_epoch + 1)
        due = [step for step in steps if ENDLESS.is_due(step, interval)]
        assert len(due) == times
        assert due[-1] == steps[-1]


def test_is_due_for_a_fraction_of_an_epoch():
    """0.1 of 22 steps: exactly ten per epoch."""
    for epoch in range(1000):
        assert sum(ENDLESS.is_due(step, 0.1 * 22) for step in range(epoch * 22 + 1, (epoch + 1) * 22 + 1)) == 10


def test_is_due_every_so_many_epochs_and_at_most_once_a_step():
    assert [step for step in range(1, 100) if ENDLESS.is_due(step, 2.5 * 10)] == [25, 50, 75]
    assert [step for step in range(1, 100) if ENDLESS.is_due(step, 1.5 * 19)] == [29, 57, 86]
    assert all(ENDLESS.is_due(step, 0.25) for step in range(1, 100))


def test_is_due_at_the_last_step_whatever_the_interval():
    plan = plan_of(max_steps=11)
    for interval in (100, math.inf):
        assert [step for step in range(1, 12) if plan.is_due(step, interval)] == [11]


@pytest.mark.parametrize(
    "total, limited, expected",
    [(19, 5, 5), (19, 0, 0), (19, 1, 1), (19, 100, 19), (19, 1.0, 19), (19, 0.5, 9), (19, 0.01, 1),
     (30, 0.1, 3), (10, 0.7, 7), (100, 0.29, 29)],
)  # fmt: skip
def test_limit(total: int, limited: int | float, expected: int):
    assert limit(total, limited) == expected
