"""Bad input ends with exit code 2 and one line that names the option; nothing is made."""

import os
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import SMALL, call, run

from config import TrainConfig
from runtime.cli import to_yaml


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def refused(command: str, cwd: Path, *texts: str, how=call) -> None:
    """Runs the command and checks that it is refused in one line that contains the texts; by each of two processes, if
    they were connected before."""
    before = files(cwd)
    error = how(command, cwd, code=2).stderr
    lines = error.splitlines()
    assert len(lines) == 1 or "--devices 2" in command, error
    for line in lines:
        assert line.startswith(f"{command.split()[0]}: error: ") and line.count("error:") == 1, error
        for text in texts:
            assert text in line
    assert files(cwd) == before


CONFIG = to_yaml(TrainConfig())


def make_run(cwd: Path, name: str = "20260101-000000-train_out", config: str | None = CONFIG) -> None:
    """A run directory, as far as is looked at before a checkpoint is read."""
    (cwd / name).mkdir()
    if config is not None:
        (cwd / name / "config.yaml").write_text(config)


# ---- values


@pytest.mark.parametrize(
    "options, option",
    [
        ("--no_such_option 3", "--no_such_option"),
        ("stray", "stray"),
        ("--seed 3 4", "4: neither an option, --NAME, nor a value that the option before it takes"),
        ("--epoch 3", "unknown option --epoch; did you mean --epochs or "),  # no abbreviations
        ("--devices 100000", "--devices 100000: must be at most --effective_batch_size 64"),
        ("--epochs", "argument --epochs: expected one argument"),
        ("--epochs many", "argument --epochs: invalid float value: 'many'"),
        ("--max_steps 1.5", "argument --max_steps: invalid int value: '1.5'"),
        ("--epochs None", "--epochs"),  # no word for an option that is off
        ("--max_steps None", "--max_steps"),
        ("--compile None", "--compile"),
        ("--num_checkpoint_keep null", "--num_checkpoint_keep"),
        ("--seed 1e-3", "--seed"),
        ("--max_steps 1.5e3", "--max_steps"),
        ("--max_steps 1e99", "--max_steps"),
        ("--width inf", "--width"),
        ("--devices 0", "--devices 0"),
        ("--dataset mnist", "argument --dataset: invalid choice: 'mnist' (choose from"),
        ("--base_lr fast", "--base_lr"),
        ("--compile maybe", "--compile"),
        ("--timeout 1e7", "--timeout"),
        ("--fast_run few", "--fast_run"),
        ("--fast_run 1", "--fast_run 1: must be at least 2"),
        ("--fast_run 2 --resume auto", "--fast_run"),
        ("--limit_train_batches some", "--limit_train_batches"),
        ("--micro_batch_size 1.5", "--micro_batch_size"),
        ("--accelerator abacus", "--accelerator"),
        ("--precision 8-true", "--precision"),
        ("--dataset cifar", "--dataset"),
        ("--lr_scaling_rule cubic", "--lr_scaling_rule"),
        ("--lr_schedule steps", "--lr_schedule"),
        ("--logger_name", "--logger_name: must not be empty"),
        ("--logger_name csv mlflow", "--logger_name"),
        ("--monitor_mode up", "--monitor_mode"),
        ("--base_lr nan", "--base_lr"),
        ("--base_lr inf", "--base_lr"),
        ("--seed 4294967296", "--seed"),
        ("--dropout 1", "--dropout"),
        ("--warmup_epochs 4 --epochs 3", "--warmup_epochs"),
        ("--limit_train_batches 1.5", "--limit_train_batches"),
        ("--limit_val_batches 2.0", "--limit_val_batches"),
        ("--limit_val_batches 0.0", "--limit_val_batches"),
        ("--out_dir=", "--out_dir: must not be empty"),
        ("--out_dir ..", "--out_dir"),
        ("--out_dir a\x00b", "--out_dir"),
        ("--precision 16-true", "bf16-true"),
        ("--root_dir s3://bucket/runs", "--root_dir s3://bucket/runs: must be a directory, not a URL"),
        ("--root_dir=", "--root_dir: must not be empty"),
        ("--devices=", "--devices: must not be empty"),
        ("--monitor=", "--monitor: must not be empty"),
        ("--resume=", "--resume: must not be empty"),
        ("--config_path=", "--config_path"),
        ("--val_interval 1.5", "--val_interval"),
        (
            "--monitor val/quality",
            "--monitor val/quality: its name does not tell if higher is better; check it, or give --monitor_mode",
        ),
        ("--monitor val/accuracy --monitor_mode min", "--monitor_mode min: the best val/accuracy is its max"),
        ("--strategy telepathy", "telepathy"),
        ("--strategy fsdp", "--strategy: invalid choice: 'fsdp'"),
        ("--strategy FSDP", "--strategy"),
        ("--strategy ddp_fork_find_unused_parameters_true", "--strategy: invalid choice: "),
        ("--strategy model_parallel", "--strategy: invalid choice: 'model_parallel'"),
    ],
)
def test_value_that_is_not_allowed(options: str, option: str, tmp_path: Path):
    refused(f"train.py {options}", tmp_path, option)


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path):
    """config.yaml could not hold them."""
    error = run("train.py --comment " + os.fsdecode(b"\xff"), tmp_path, 2).stderr
    assert error.startswith("train.py: error: an option cannot be kept in config.yaml: ")
    assert "'\\udcff'" in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


# What people write who come from other programs, and the options that contain it, or are spelled almost like it.
MEANT = {
    "--batch_size 32": "effective_batch_size or --micro_batch_size or --base_batch_size",
    "--batch-size 32": "effective_batch_size or --micro_batch_size or --base_batch_size",
    "--lr 0.1": "base_lr or --lr_scaling_rule or --lr_schedule",
    "--num_epochs 3": "epochs",
    "--max-steps 3": "max_steps",
    "--max-steps=3": "max_steps",
    "--warmup 3": "warmup_epochs",
    "--workers 3": "num_workers",
    "--patience 3": "early_stopping_patience",
    "--output_dir x": "out_dir",
}


@pytest.mark.parametrize("options", MEANT)
def test_an_unknown_option_names_those_that_may_be_meant(options: str, tmp_path: Path):
    name = options.split()[0].partition("=")[0]
    refused(f"train.py {options}", tmp_path, f"error: unknown option {name}; did you mean --{MEANT[options]}?")


def test_an_unknown_option_like_no_other_is_named_alone(tmp_path: Path):
    error = call("train.py --wandb", tmp_path, code=2).stderr
    assert error == "train.py: error: unknown option --wandb\n"


ABOVE_0 = [
    "num_nodes", "width", "timeout", "effective_batch_size", "epochs", "base_lr", "base_batch_size", "log_per_epoch",
    "val_frequency", "limit_train_batches",
]  # fmt: skip
AT_LEAST_0 = [
    "seed", "num_workers", "dropout", "warmup_epochs", "weight_decay", "num_sanity_val_steps", "limit_val_batches",
    "micro_batch_size", "max_steps", "max_grad_norm", "early_stopping_patience", "log_interval", "val_interval",
    "checkpoint_frequency", "checkpoint_interval", "num_checkpoint_keep", "fast_run",
]  # fmt: skip


def test_each_option_that_is_a_number_has_a_bound():
    numbers = {option.name for option in fields(TrainConfig) if option.type in (int, float, int | float)}
    assert numbers == {*ABOVE_0, *AT_LEAST_0}


@pytest.mark.parametrize("option, value", [(name, "0") for name in ABOVE_0] + [(name, "-1") for name in AT_LEAST_0])
def test_zero_or_negative(option: str, value: str, tmp_path: Path):
    bound = "must be above 0" if value == "0" else "must be at least "
    refused(f"train.py --{option} {value}", tmp_path, f"--{option} {value}", bound)


@pytest.mark.parametrize("value", ["-1e-3", "-.5", "-0.0"])
def test_negative_number_in_any_spelling(value: str, tmp_path: Path):
    refused(f"train.py --base_lr {value}", tmp_path, "--base_lr")


@pytest.mark.parametrize(
    "options, told",
    [
        ("--logger_name csv mlflow", "argument --logger_name: invalid "),
        ("--monitor_mode up", "argument --monitor_mode: invalid choice: 'up' (choose from "),
        ("--accelerator cpu --devices 0", "--accelerator cpu --devices 0: "),
        ("--accelerator cpu --effective_batch_size 5000", "--effective_batch_size 5000: there are only 1217"),
    ],
)
def test_a_message_has_what_was_given(options: str, told: str, tmp_path: Path):
    """Of the options about devices only those that were given."""
    refused(f"train.py {options}", tmp_path, f"train.py: error: {told}")


def test_several_mistakes_are_named_together(tmp_path: Path):
    refused("train.py --epochs 0 --width -1 --dropout 2", tmp_path, "--epochs", "--width", "--dropout", how=run)


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
def test_value_that_is_not_allowed_in_test_py(options: str, option: str, tmp_path: Path):
    make_run(tmp_path)
    refused(f"test.py {options}", tmp_path, option, how=run)


# ---- config files


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "bad.yaml"),  # there is no such file
        ("a: [", "bad.yaml"),
        ("- seed\n- epochs\n", "bad.yaml"),
        ("seed", "bad.yaml"),
        ("epohcs: 3", "unknown option --epohcs; did you mean --epochs?"),
        ("seed: 1\nepochs: 3\nseed: 2", "seed is given twice"),
        ("no_such_option: 3", "no_such_option"),
        ("epochs: many", "--epochs"),
        ("max_steps: 1.5", "--max_steps"),
        ("epohcs: null", "unknown option --epohcs; did you mean --epochs?"),
        ("epochs: None", "--epochs"),
        ("epochs: [1, 2]", "2: neither an option, --NAME, nor a value that the option before it takes"),
        ("epochs: {a: 1}", "unknown option --epochs.a; did you mean --epochs?"),
        ("logger_name: [csv, mlflow]", "--logger_name"),
        ("logger_name: [[csv]]", "logger_name"),
        ("seed: 1\ndevices: [0, 1]", "1: neither an option, --NAME, nor a value that the option before it takes"),
        ("? [a, b]\n: 3", "line 1, column 1"),
        ("dataset: cifar", "--dataset"),
        ("compile: maybe", "--compile"),
    ],
)
def test_config_file(content: str | None, text: str, tmp_path: Path):
    if content is not None:
        (tmp_path / "bad.yaml").write_text(content)
    (tmp_path / "good.yaml").write_text("seed: 1\n")
    refused("train.py --config_path good.yaml bad.yaml", tmp_path, "--config_path", "bad.yaml", text)


def test_config_file_that_is_no_text(tmp_path: Path):
    (tmp_path / "bad.yaml").write_bytes(bytes(range(256)))
    refused("train.py --config_path bad.yaml", tmp_path, "--config_path", "bad.yaml")


def test_config_path_without_a_file(tmp_path: Path):
    refused("train.py --config_path", tmp_path, "--config_path")
    refused("train.py --config_path .", tmp_path, "--config_path")


def test_config_file_that_names_another_one_is_not_silently_ignored(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("config_path: b.yaml\n")
    refused("train.py --config_path a.yaml", tmp_path, "--config_path", "a.yaml")


# ---- runs


@pytest.mark.parametrize("script", ["train.py --resume", "test.py --out_dir"])
def test_run_that_does_not_exist(script: str, tmp_path: Path):
    refused(f"{script} nothing", tmp_path, script.split()[1], "nothing")


@pytest.mark.parametrize("script", ["train.py --resume", "test.py --out_dir"])
def test_directory_that_is_no_run(script: str, tmp_path: Path):
    make_run(tmp_path, "folder", config=None)
    refused(f"{script} folder", tmp_path, script.split()[1], "config.yaml")


def test_resume_with_a_damaged_config(tmp_path: Path):
    make_run(tmp_path, config=CONFIG.replace("seed: 42", "seed: many"))
    refused("train.py --resume train_out", tmp_path, "config.yaml", "--seed")


@pytest.mark.parametrize("length", [9, CONFIG.index("width"), CONFIG.index("checkpoint_frequency"), len(CONFIG) - 5])
def test_run_with_a_truncated_config(length: int, tmp_path: Path):
    """Its options would be taken for the defaults, those after the last that is fixed, too."""
    make_run(tmp_path, config=CONFIG[:length])
    refused("train.py --resume train_out", tmp_path, "config.yaml", "damaged")


def test_weights_alone_are_evaluated_with_the_config_of_the_run(tmp_path: Path):
    """A checkpoint has a config of its own."""
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    (path,) = tmp_path.glob("*/config.yaml")
    path.write_text(CONFIG[:99])
    refused(f"test.py --checkpoint {path.parent}/model.pt", tmp_path, "config.yaml", "damaged")
    assert "accuracy" in call("test.py", tmp_path).stdout


@pytest.mark.parametrize(
    "options",
    [
        "--seed 7",
        "--effective_batch_size 32",
        "--limit_train_batches 3",
        "--width 8",
        "--dropout 0.5",
        "--monitor val/loss",
        "--monitor_mode min",
    ],
)
def test_resume_with_a_change_that_makes_the_state_meaningless(options: str, tmp_path: Path):
    make_run(tmp_path)
    refused(f"train.py --resume train_out {options}", tmp_path, options.split()[0])
    refused(f"train.py --resume auto {options}", tmp_path, options.split()[0])


@pytest.mark.parametrize("options", ["--epochs 0", "--fast_run"])
def test_resume_with_a_value_that_is_not_allowed(options: str, tmp_path: Path):
    make_run(tmp_path)
    refused(f"train.py --resume train_out {options}", tmp_path, options.split()[0])


# ---- what only torch, Fabric, the dataset or the file system know

LATE = {
    "train.py --effective_batch_size 63 --devices 2": ["error: rank ", "--effective_batch_size 63", "62 or 64"],
    "train.py --effective_batch_size 64 --micro_batch_size 24": ["micro_batch_size", "48 or 72"],
    "train.py --effective_batch_size 2000": ["--effective_batch_size", "1217"],
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
        "the checkpoints of 20260101-000000-train_out are []",
    ],
    "test.py --out_dir train_out --checkpoint last": ["--checkpoint last: no such file"],
}


@pytest.mark.parametrize("command", LATE)
def test_late_refusal(command: str, tmp_path: Path):
    make_run(tmp_path)
    (tmp_path / "file").touch()
    on_cpu = "" if "--accelerator" in command else " --accelerator cpu"
    refused(command + on_cpu, tmp_path, *LATE[command], how=run if "--devices 2" in command else call)
