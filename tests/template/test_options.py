"""Options: where they come from, what is refused, how they are written, what --help says, which run is meant."""

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from helpers import REPO, SMALL, call, run

from config import EvalConfig, TrainConfig
from runtime.cli import parse_test, parse_train
from runtime.config_file import read_config, to_yaml
from runtime.errors import ConfigError
from runtime.options import values_of
from runtime.runs import read_summary

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
    return parse_train(TrainConfig, options.split())


def of_file(content: str) -> TrainConfig:
    Path("file.yaml").write_text(content)
    return train("--config_path file.yaml")


RUN = "20260101-000000-train_out"


def make_run(name: str = RUN, is_finished: bool = False, **config) -> Path:
    """A run directory, as far as the command line looks at it. Returns its config.yaml."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(TrainConfig(**{"out_dir": folder.name[16:], **config})))
    state = "finished" if is_finished else "running"
    (folder / "summary.json").write_text(json.dumps({"state": state}))
    return folder / "config.yaml"


def rewrite(name: str, old: str, new: str) -> None:
    path = Path(name) / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def refused(command: str, *texts: str, how=call) -> None:
    """Runs the command and checks that it is refused in one line that contains the texts, and makes nothing; by each of
    two processes, if they were connected before."""
    before = {*Path().rglob("*")}
    error = how(command, Path.cwd(), code=2).stderr
    lines = error.splitlines()
    assert len(lines) == 1 or "--devices 2" in command, error
    for line in lines:
        assert line.startswith(f"{command.split()[0]}: error: ") and line.count("error:") == 1, error
        for text in texts:
            assert text in line
    assert {*Path().rglob("*")} == before


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
    refused(
        "train.py --accelerator cpu --config_path warmup.yaml",
        "error: --warmup_epochs 30: is 570 steps, but the run has 380",
    )


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

VALUES = {
    "base_lr": {text: 1e-3 for text in ("1e-3", "1E-3", "0.001", ".001", "1.0e-3")},
    "limit_train_batches": {"5": 5, "1": 1, "0.5": 0.5, "1.0": 1.0, "1e-1": 0.1},  # a count or a fraction
    "summary": {"true": True, "True": True, "false": False, "no": False},
    **{name: {"0": 0} for name in (
        "max_steps", "micro_batch_size", "early_stopping_patience", "log_interval", "val_interval", "fast_run",
        "checkpoint_interval", "num_checkpoint_keep", "limit_val_batches",
    )},
    **{name: {"0": 0.0} for name in ("max_grad_norm", "checkpoint_frequency")},
    **{name: {"": ""} for name in ("data_dir", "comment")},
}  # fmt: skip


@pytest.mark.parametrize("option, text", [(option, text) for option, texts in VALUES.items() for text in texts])
def test_a_value_means_the_same_on_the_command_line_and_in_a_file(option: str, text: str):
    value = VALUES[option][text]
    words = [f"--{option}={text}", f"--{option} {text}" if text else f"--{option}="]
    for config in (*map(train, words), of_file(f"{option}: " + (text or "''"))):
        assert getattr(config, option) == value and type(getattr(config, option)) is type(value)


@pytest.mark.parametrize(
    "option, options, value",
    [
        ("summary", "--summary", True),
        ("summary", "--summary --seed 1", True),
        ("deterministic", "--nodeterministic", False),  # as the help says
        ("compile", "--compile", "default"),
        ("compile", "--compile --seed 1", "default"),
        ("compile", "--compile none", "none"),
        ("compile", "--compile reduce-overhead", "reduce-overhead"),
        ("fast_run", "--fast_run", 4),
        ("fast_run", "--fast_run 3", 3),
        ("fast_run", "--fast_run=3", 3),
        ("logger_name", "--logger_name csv wandb", ("csv", "wandb")),
        ("comment", "--comment -1e5", "-1e5"),
        ("comment", "--comment -1", "-1"),
    ],
)
def test_value_on_the_command_line(option: str, options: str, value):
    assert getattr(train(options), option) == value


@pytest.mark.parametrize("option", values_of(TrainConfig()))
def test_an_option_that_is_null_in_a_config_file_is_not_given(option: str):
    for null in ("null", "~", ""):
        assert of_file(f"{option}: {null}") == TrainConfig()


def test_null_in_a_later_file_leaves_the_value_of_an_earlier_one():
    Path("a.yaml").write_text("max_steps: 3\nnum_checkpoint_keep: 5\ndata_dir: x\n")
    Path("b.yaml").write_text("max_steps: null\nnum_checkpoint_keep: null\ndata_dir:\n")
    config = train("--config_path a.yaml b.yaml")
    assert (config.max_steps, config.num_checkpoint_keep, config.data_dir) == (3, 5, "x")


def test_several_loggers_in_a_file():
    assert of_file("logger_name: [csv, wandb]").logger_name == ("csv", "wandb")
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


OPTIONAL_VALUE = ("fast_run", "compile")


@pytest.mark.parametrize(
    "option", [f.name for f in fields(TrainConfig) if f.type is not bool and f.name not in OPTIONAL_VALUE]
)
def test_an_option_is_not_accepted_without_its_value(option: str):
    """`--resume $RUN`, where RUN is not set, must not start a new run."""
    for options in (f"--{option}", f"--{option} --summary"):
        with pytest.raises(ConfigError, match=f"--{option}\\b"):
            train(options)


# ---- values that are refused: in one line that names the option, and nothing is made


@pytest.mark.parametrize(
    "options, text",
    [
        ("--no_such_option 3", "--no_such_option"),
        ("stray", "stray"),
        ("--seed 3 4", "4: neither an option, --NAME, nor a value that the option before it takes"),
        ("--epoch 3", "unknown option --epoch; did you mean --epochs or "),  # no abbreviations
        ("--effective 32", "unknown option --effective; did you mean --effective_batch_size"),
        ("--devices 100000", "--devices 100000: must be at most --effective_batch_size 64"),
        ("--epochs", "argument --epochs: expected one argument"),
        ("--epochs many", "argument --epochs: invalid float value: 'many'"),
        ("--max_steps 1.5", "argument --max_steps: invalid int value: '1.5'"),
        ("--max_steps None", "--max_steps"),  # no word for an option that is off
        ("--devices 0", "--devices 0"),
        ("--dataset mnist", "argument --dataset: invalid choice: 'mnist' (choose from"),
        ("--compile maybe", "--compile"),
        ("--timeout 1e7", "--timeout"),
        ("--fast_run few", "--fast_run"),
        ("--fast_run 1", "--fast_run 1: must be at least 2"),
        ("--fast_run 2 --resume auto", "--fast_run"),
        ("--logger_name", "--logger_name: must not be empty"),
        ("--logger_name csv mlflow", "error: argument --logger_name: invalid "),
        ("--monitor_mode up", "error: argument --monitor_mode: invalid choice: 'up' (choose from "),
        ("--accelerator cpu --devices 0", "error: --accelerator cpu --devices 0: "),  # those that were given
        ("--accelerator cpu --effective_batch_size 5000", "error: --effective_batch_size 5000: there are only 1217"),
        ("--base_lr nan", "--base_lr"),
        ("--base_lr inf", "--base_lr"),
        ("--seed 4294967296", "--seed"),
        ("--dropout 1", "--dropout"),
        ("--warmup_epochs 4 --epochs 3", "--warmup_epochs"),
        ("--max_steps 18", "--warmup_epochs 1: is 19 steps, but the run has 18"),
        ("--monitor val/loss --monitor_mode max", "--monitor_mode max: val/loss is minimized; give --monitor_mode min"),
        ("--monitor train/loss --monitor_mode max", "--monitor_mode max: train/loss is minimized"),
        ("--effective_batch_size 60 --micro_batch_size 2 --drop_last False", "--drop_last False: the last step of an "),
        ("--limit_train_batches 1.5", "--limit_train_batches"),
        ("--limit_val_batches 0.0", "--limit_val_batches"),
        ("--out_dir=", "--out_dir: must not be empty"),
        ("--out_dir ..", "--out_dir"),
        ("--out_dir a\x00b", "--out_dir"),
        ("--base_lr -1e-3", "--base_lr -0.001: must be above 0"),  # negative numbers in any spelling
        ("--base_lr -0.0", "--base_lr -0.0: must be above 0"),
        ("--warmup_epochs -1E+3", "--warmup_epochs -1000.0: must be at least 0"),
        ("--precision 16-true", "bf16-true"),
        ("--root_dir s3://bucket/runs", "--root_dir s3://bucket/runs: must be a directory, not a URL"),
        ("--devices=", "--devices: must not be empty"),
        ("--resume=", "--resume: must not be empty"),  # `--resume "$RUN"`, where RUN is not set
        ("--config_path=", "--config_path"),
        ("--config_path", "--config_path"),
        ("--config_path .", "--config_path ."),
        ("--strategy fsdp", "--strategy: invalid choice: 'fsdp'"),
        ("--strategy ddp_fork_find_unused_parameters_true", "--strategy: invalid choice: "),
        ("--strategy model_parallel", "--strategy: invalid choice: 'model_parallel'"),
    ],
)
def test_value_that_is_not_allowed(options: str, text: str):
    refused(f"train.py {options}", text)


def test_bytes_that_are_not_utf_8_are_refused():
    """config.yaml could not hold them."""
    error = run("train.py --comment " + os.fsdecode(b"\xff"), Path.cwd(), 2).stderr
    assert error.startswith("train.py: error: an option cannot be kept in config.yaml: ")
    assert "'\\udcff'" in error and error.count("\n") == 1
    assert not [*Path().iterdir()]


# What people write who come from other programs, and the options that contain it, or are spelled almost like it.
MEANT = {
    "--batch_size 32": "effective_batch_size or --micro_batch_size or --base_batch_size",
    "--lr 0.1": "base_lr or --lr_scaling_rule or --lr_schedule",
    "--num_epochs 3": "epochs",
    "--max-steps 3": "max_steps",
    "--max-steps=3": "max_steps",
    "--warmup 3": "warmup_epochs",
    "--output_dir x": "out_dir",
}


@pytest.mark.parametrize("options", MEANT)
def test_an_unknown_option_names_those_that_may_be_meant(options: str):
    name = options.split()[0].partition("=")[0]
    refused(f"train.py {options}", f"error: unknown option {name}; did you mean --{MEANT[options]}?")


def test_an_unknown_option_like_no_other_is_named_alone():
    assert call("train.py --wandb", Path.cwd(), code=2).stderr == "train.py: error: unknown option --wandb\n"


ABOVE_0 = [
    "num_nodes", "width", "timeout", "effective_batch_size", "epochs", "base_lr", "base_batch_size", "log_per_epoch",
    "val_frequency", "limit_train_batches",
]  # fmt: skip
AT_LEAST_0 = [
    "seed", "num_workers", "num_threads", "dropout", "warmup_epochs", "weight_decay", "num_sanity_val_steps",
    "limit_val_batches", "micro_batch_size", "max_steps", "max_grad_norm", "early_stopping_patience", "log_interval",
    "val_interval", "checkpoint_frequency", "checkpoint_interval", "num_checkpoint_keep", "fast_run",
    "early_stopping_min_delta",
]  # fmt: skip


def test_each_option_that_is_a_number_has_a_bound():
    numbers = {option.name for option in fields(TrainConfig) if option.type in (int, float, int | float)}
    assert numbers == {*ABOVE_0, *AT_LEAST_0}


@pytest.mark.parametrize("option, value", [(name, "0") for name in ABOVE_0] + [(name, "-1") for name in AT_LEAST_0])
def test_zero_or_negative(option: str, value: str):
    bound = "must be above 0" if value == "0" else "must be at least "
    refused(f"train.py --{option} {value}", f"--{option} {value}", bound)


def test_a_bad_value_is_told_once():
    """simple_parsing reports one of two types on a logger, too, which pytest would hide."""
    refused("train.py --limit_train_batches some", "invalid int|float value: 'some'", how=run)


def test_several_mistakes_are_named_together():
    refused("train.py --epochs 0 --width -1 --dropout 2", "--epochs", "--width", "--dropout", how=run)


@pytest.mark.parametrize(
    "options, option",
    [
        ("--out_dir", "--out_dir"),
        ("--out_dir train_out --epochs 3", "--epochs"),
        ("--out_dir train_out --split all", "--split"),
        ("--out_dir train_out --batch_size -1", "--batch_size"),
        ("--out_dir train_out --num_workers -1", "--num_workers"),
        ("--out_dir train_out --checkpoint=", "--checkpoint"),
    ],
)
def test_value_that_is_not_allowed_in_test_py(options: str, option: str):
    make_run()
    refused(f"test.py {options}", option)


# ---- config files


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "bad.yaml"),  # there is no such file
        (bytes(range(256)), "bad.yaml"),  # no text
        (b"config_path: b.yaml", "config_path is no option for a file"),
        (b"a: [", "bad.yaml"),
        (b"- seed\n- epochs\n", "bad.yaml"),
        (b"seed", "bad.yaml"),
        (b"epohcs: 3", "unknown option --epohcs; did you mean --epochs?"),
        (b"seed: 1\nepochs: 3\nseed: 2", "seed is given twice"),
        (b"max_steps: 1.5", "--max_steps"),
        (b"epochs: [1, 2]", "2: neither an option, --NAME, nor a value that the option before it takes"),
        (b"epochs: {a: 1}", "unknown option --epochs.a; did you mean --epochs?"),
        (b"logger_name: [csv, mlflow]", "--logger_name"),
        (b"logger_name: [[csv]]", "logger_name"),
        (b"seed: 1\ndevices: [0, 1]", "1: neither an option, --NAME, nor a value that the option before it takes"),
        (b"? [a, b]\n: 3", "line 1, column 1"),
    ],
)
def test_config_file(content: bytes | None, text: str):
    if content is not None:
        Path("bad.yaml").write_bytes(content)
    Path("good.yaml").write_text("seed: 1\n")
    refused("train.py --config_path good.yaml bad.yaml", "--config_path", "bad.yaml", text)


# ---- runs


@pytest.mark.parametrize("script", ["train.py --resume", "test.py --out_dir"])
@pytest.mark.parametrize("name", ["nothing", "folder"])
def test_a_run_that_does_not_exist_or_is_none(script: str, name: str):
    Path("folder").mkdir()
    refused(f"{script} {name}", f"{script.split()[1]} {name}: ", "config.yaml")


def test_resume_with_a_damaged_config():
    make_run()
    rewrite(RUN, "seed: 42", "seed: many")
    refused("train.py --resume train_out", "config.yaml", "--seed")


CONFIG = to_yaml(TrainConfig())


@pytest.mark.parametrize("length", [9, CONFIG.index("width"), CONFIG.index("checkpoint_frequency"), len(CONFIG) - 5])
def test_run_with_a_truncated_config(length: int):
    """Its options would be taken for the defaults, those after the last that is fixed, too."""
    make_run().write_text(CONFIG[:length])
    refused("train.py --resume train_out", "config.yaml", "damaged")


def test_weights_alone_are_evaluated_with_the_config_of_the_run():
    """A checkpoint has a config of its own."""
    call(f"train.py {SMALL} --epochs 1", Path.cwd())
    (path,) = Path().glob("*/config.yaml")
    path.write_text(CONFIG[:99])
    refused(f"test.py --checkpoint {path.parent}/model.pt", "config.yaml", "damaged")
    assert "accuracy" in call("test.py", Path.cwd()).stdout


@pytest.mark.parametrize(
    "options",
    [
        "--seed 7",
        "--effective_batch_size 32",
        "--limit_train_batches 3",
        "--width 8",
        "--dropout 0.5",
        "--monitor val/loss --monitor_mode max",
        "--monitor_mode min --monitor val/accuracy",
        "--epochs 0",
        "--fast_run",
    ],
)
def test_resume_with_a_value_that_is_not_allowed_or_makes_the_state_meaningless(options: str):
    make_run()
    refused(f"train.py --resume train_out {options}", options.split()[0])
    refused(f"train.py --resume auto {options}", options.split()[0])


# ---- what only torch, Fabric, the dataset or the file system know

LATE = {
    "train.py --effective_batch_size 63 --devices 2": ["error: rank ", "--effective_batch_size 63", "62 or 64"],
    "train.py --effective_batch_size 64 --micro_batch_size 24": ["micro_batch_size", "48 or 72"],
    "train.py --monitor val/f1 --monitor_mode max --num_sanity_val_steps 0": [
        "--monitor val/f1",
        "train/loss, train/grad_norm, val/loss, val/accuracy",
    ],
    "train.py --limit_val_batches 0": ["--monitor val/accuracy", "choose from train/loss"],
    "train.py --strategy dp": ["--strategy dp", "ddp"],  # Fabric would silently take ddp instead
    "train.py --precision 16-mixed": ["--precision", "16-mixed"],
    "train.py --accelerator gpu --devices 33": ["--accelerator", "--devices", "33"],
    "train.py --accelerator cpu --devices 0,2": ["--devices 0,2"],
    "train.py --data_dir .": ["--data_dir .: the digits come with scikit-learn"],
    "train.py --root_dir file": ["--root_dir", "file"],
    "train.py --root_dir /proc": ["--root_dir", "/proc"],
    "test.py --out_dir train_out": [
        "--checkpoint best: no such file",
        f"the checkpoints of {RUN} are []",
    ],
    "test.py --out_dir train_out --checkpoint last": ["--checkpoint last: no such file"],
}


@pytest.mark.parametrize("command", LATE)
def test_late_refusal(command: str):
    make_run()
    Path("file").touch()
    on_cpu = "" if "--accelerator" in command else " --accelerator cpu"
    refused(command + on_cpu, *LATE[command], how=run if "--devices 2" in command else call)


# ---- a config made in Python


@pytest.mark.parametrize(
    "mistake",
    [{"epochs": -1}, {"base_lr": float("nan")}, {"dropout": 1.0}, {"strategy": "fsdp"},
     {"limit_val_batches": 2.5}, {"limit_train_batches": 0}, {"lr_schedule": "straight"},
     {"lr_scaling_rule": "cubic"}, {"dataset": "cifar"}, {"logger_name": ("csv", "mlflow")}, {"precision": "8-true"},
     {"monitor_mode": "up", "monitor": "val/f1"}],
)  # fmt: skip
def test_a_config_checks_itself_wherever_it_is_made(mistake: dict):
    with pytest.raises(ValueError, match=f"--{next(iter(mistake))}\\b"):
        TrainConfig(**mistake)
    with pytest.raises(ValueError, match=f"--{next(iter(mistake))}\\b"):
        replace(TrainConfig(), **mistake)


def test_so_does_the_config_of_test_py():
    assert EvalConfig(out_dir="train_out").checkpoint == "best"
    mistakes = {"batch_size": (-1, "must be at least 0"), "split": ("all", "choose from test, val, train")}
    for name, (value, text) in mistakes.items():
        with pytest.raises(ValueError, match=f"^--{name} {value}: {text}$"):
            EvalConfig(out_dir="train_out", **{name: value})


# ---- what is best: a value and its mode


@pytest.mark.parametrize("name, value", [("monitor", "val/loss"), ("monitor_mode", "min")])
def test_monitor_and_its_mode_are_given_together_in_each_source(name: str, value: str):
    """Else the mode of one source would be taken for the value of another."""
    told = f"--{name} {value}: give --monitor and --monitor_mode together"
    Path("half.yaml").write_text(f"{name}: {value}\n")
    Path("pair.yaml").write_text("monitor: val/f1\nmonitor_mode: max\n")
    for options in ("", "--config_path pair.yaml"):
        with pytest.raises(ConfigError, match=f"^{told}$"):
            train(f"--{name} {value} {options}")
    for options in ("", "pair.yaml", "--monitor val/f1 --monitor_mode max"):
        with pytest.raises(ConfigError, match=f"^--config_path half.yaml: {told}$"):
            train(f"--config_path half.yaml {options}")
    with pytest.raises(ConfigError, match=f"^{told}$"):
        TrainConfig(**{name: value})


def test_a_pair_of_a_later_source_replaces_that_of_an_earlier_one():
    Path("f1.yaml").write_text("monitor: val/f1\nmonitor_mode: max\n")
    Path("loss.yaml").write_text("monitor: val/loss\nmonitor_mode: min\n")
    for options, pair in {
        "": ("val/accuracy", "max"),
        "--config_path f1.yaml": ("val/f1", "max"),
        "--config_path f1.yaml loss.yaml": ("val/loss", "min"),
        "--config_path f1.yaml --monitor val/accuracy --monitor_mode min": ("val/accuracy", "min"),
    }.items():
        assert (train(options).monitor, train(options).monitor_mode) == pair


# ---- help


@pytest.mark.parametrize("script, cls", [("train.py", TrainConfig), ("test.py", EvalConfig)])
def test_help_documents_every_option(script: str, cls: type):
    text = " ".join(run(f"{script} --help", REPO, COLUMNS="1000").stdout.split())
    text = re.sub(r", --no\w+ bool", "", text)
    starts = {name: re.search(rf" --{name}\b", text) for name in vars(cls())}
    missing = [name for name, start in starts.items() if start is None]
    assert not missing
    for name, value in vars(cls()).items():
        entry = re.split(r" --\w+ ", text[starts[name].end() :])[0]
        documentation, _, default = entry.partition("(default: ")
        words = re.sub(r"^\s*(\[.*?\]\]?|\{.*?\}|\w+( \[\w+, \.\.\.\])?)\s", "", documentation)
        assert len(words.split()) >= 2, f"--{name} has no help text: {entry!r}"
        assert "----" not in words, f"--{name} is documented by a headline: {entry!r}"
        assert default == f"{value})" or default.startswith(f"{value}) "), entry


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_help_has_no_words_of_the_code(script: str):
    """The real default of what is set in `__post_init__`, and nothing for those who edit config.py."""
    text = run(f"{script} --help", REPO, COLUMNS="1000").stdout
    assert not re.search(r"\b(class|dataclass|field|config\.py|runtime|fixed|per_host|Literal|\w+Config|__\w+)\b", text)
    defaults = dict(re.findall(r"^  --(\w+)(?:.|\n   )*?\(default: (.*)\)$", text, re.MULTILINE))
    assert {name for name in defaults if defaults[name] == "None"} <= {"resume", "config_path"}
    if script == "train.py":
        assert (defaults["monitor"], defaults["monitor_mode"]) == ("val/accuracy", "max")


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


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_help_is_as_wide_as_a_terminal(script: str):
    lines = run(f"{script} --help", REPO, COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80


def test_help_names_the_choices():
    printed = run("train.py --help", REPO).stdout
    assert "--logger_name {csv,tensorboard,wandb}" in printed and "--monitor_mode {max,min}" in printed
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
def test_the_newest_run_is_meant_if_it_is_finished_too(resume: str):
    """A restarted job must not start a second run, nor go back to an older one."""
    make_run("20260101-000000-train_out")
    make_run("20260102-000000-train_out", is_finished=True, max_steps=100)
    for options in ("", "--max_steps 99", "--num_workers 2 --comment x --epochs 99", "--max_steps 101 --base_lr 0.5"):
        assert train(f"--resume {resume} {options}").resume == "20260102-000000-train_out"


@pytest.mark.parametrize("summary", [None, "", "{", "[]", "null", '{"state": "runn', '{"seconds": 3}'])
def test_a_summary_that_cannot_be_read_is_told(summary: str | None, capsys):
    make_run("20260101-000000-train_out", is_finished=True)
    path = Path("20260101-000000-train_out/summary.json")
    assert read_summary(path.parent)["state"] == "finished" and capsys.readouterr().out == ""
    if summary is None:
        path.unlink()
    else:
        path.write_text(summary)
    assert "state" not in read_summary(path.parent)
    is_told = summary != '{"seconds": 3}' and summary != "[]"
    told = capsys.readouterr().out
    assert told.startswith(f"{path} cannot be read, so the run is not known to be finished: ") == is_told
    assert told.count("\n") == is_told


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
        assert parse_test(EvalConfig, f"--out_dir {name}".split()).out_dir == run_dir
    (home / "runs/20260101-000000-x/best.ckpt").touch()
    assert parse_test(EvalConfig, ["--checkpoint", "~/runs/20260101-000000-x/best.ckpt"]).out_dir == run_dir


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
    assert parse_test(EvalConfig, []).out_dir == "20260102-000000-train_out"
    assert "the run is 20260102-000000-train_out\n" in capsys.readouterr().out


def test_a_resumed_run_keeps_its_name():
    make_run("20260101-000000-job")
    assert train("--resume auto --out_dir job").out_dir == "job"
    with pytest.raises(ConfigError, match="--out_dir other: a resume cannot change it"):
        train("--resume 20260101-000000-job --out_dir other")


def test_the_config_of_a_run_can_be_read_in_python():
    make_run("20260101-000000-job", width=7)
    assert read_config(TrainConfig, Path("20260101-000000-job")) == TrainConfig(out_dir="job", width=7)


def test_a_run_stays_readable_when_the_options_in_the_code_change(capsys):
    make_run("20260101-000000-job", width=7)
    rewrite("20260101-000000-job", "lr_schedule: cosine\n", "depth: 3\nkinds: [a, b]\n")
    config = read_config(TrainConfig, Path("20260101-000000-job"))
    assert config == TrainConfig(out_dir="job", width=7)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "--depth 3: this option is gone from the code, and ignored",
        "--kinds ['a', 'b']: this option is gone from the code, and ignored",
        "--lr_schedule cosine: this option is new in the code",
    ]


def test_an_option_that_a_run_did_not_have_may_be_given_on_its_resume_though_it_is_fixed():
    """It may have another name now. From then on it is fixed."""
    make_run("20260101-000000-job", width=7)
    rewrite("20260101-000000-job", "width: 7\n", "channels: 7\n")
    assert train("--resume job --width 7").width == 7
    rewrite("20260101-000000-job", "channels: 7\n", "width: 7\n")
    refused("train.py --resume job --width 8", "--width 8: a resume cannot change it", "trained with 7")


def test_the_config_of_a_run_of_this_version_is_read_without_a_word(capsys):
    make_run("20260101-000000-job")
    path = Path("20260101-000000-job/config.yaml")
    path.write_text(path.read_text().rstrip())  # as an editor may leave it
    assert read_config(TrainConfig, path.parent) == TrainConfig(out_dir="job")
    assert capsys.readouterr().out == ""
