"""Two runs that must have done the same."""

import signal
from pathlib import Path

import torch
from commands import ON_2, call, execute, folders, run
from outputs import checkpoint, history, weights
from processes import interrupt, kill_group


def assert_same_weights(ours: dict, theirs: dict, atol: float) -> None:
    """Tensors that agree; an extra state of plain values is the same."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            words = {"msg": lambda text, at=name: f"{at}: {text}"}
            torch.testing.assert_close(value, theirs[name], atol=atol, rtol=0, equal_nan=True, **words)
        else:
            assert value == theirs[name], name


def assert_same_run(cwd: Path, other: Path) -> None:
    """Weights equal in every bit, and logs in every digit."""
    assert_same_weights(weights(cwd), weights(other), atol=0)
    assert history(cwd) == history(other)


def assert_same_best(cwd: Path, other: Path) -> None:
    """best.ckpt is of the same step, with the same weights."""
    ours, theirs = (checkpoint(path, "best") for path in (cwd, other))
    assert ours["step"] == theirs["step"]
    torch.testing.assert_close(ours["model"], theirs["model"], atol=0, rtol=0)


def assert_same_training(cwd: Path, other: Path) -> None:
    """Weights that agree up to the rounding of a sum, and each step once in the logs."""
    assert_same_weights(weights(cwd), weights(other), atol=1e-5)
    assert [row["step"] for row in history(cwd)] == [row["step"] for row in history(other)]


def killed_and_resumed(command: str, tmp_path: Path, resume=None) -> tuple[Path, Path]:
    """Runs the command to its end in one folder; in another it is killed in mid-epoch, and resumed, by `resume` if that
    is given. Checks that the runs are the same, and returns the folders: left alone, killed."""
    whole, killed = folders(tmp_path, "whole", "killed")
    execute(command, whole)
    assert interrupt(command, killed, kill_group).returncode == -signal.SIGKILL
    again = f"{command.partition(' ')[0]} --resume auto"
    if ON_2 in command:
        again += f" {ON_2}"  # as in config.yaml; by these words ranks.py forks the ranks
    (resume or execute)(again, killed)
    assert_same_run(killed, whole)
    return whole, killed


def ended_and_resumed(command: str, tmp_path: Path, options: str = "") -> tuple[Path, Path]:
    """Runs the command for four epochs in one folder; in another for two, and again two, these with the options. Checks
    that the runs are the same, and returns the folders: left alone, resumed."""
    whole, resumed = folders(tmp_path, "whole", "resumed")
    execute(f"{command} --epochs 4", whole)
    execute(f"{command} --epochs 2", resumed)
    again = run if ON_2 in command else call
    again(f"{command.partition(' ')[0]} --resume auto --epochs 4 {options}", resumed)
    assert_same_run(resumed, whole)
    return whole, resumed


def on_one_and_two(command: str, tmp_path: Path) -> tuple[Path, Path]:
    """Runs the command with one process and with two, each in a folder; returns the folders."""
    one, two = folders(tmp_path, "one", "two")
    call(command, one)
    run(f"{command} {ON_2}", two)
    return one, two
