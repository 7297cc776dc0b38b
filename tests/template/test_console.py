"""What a run prints: header, table, progress; and what of it stays in the run directory."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zygote
from commands import ON_2, PREEMPTED, REPO, SMALL, call, clean_environment, run, start
from edits import insert_after, replace
from outputs import last_summary, run_dir
from processes import end_of, started

from model import Model
from runtime.console import Console

# ---- header and table


def test_what_a_run_prints_and_keeps_in_its_log_and_summary(tmp_path):
    """The header says what will happen. The output fits into 80 columns, and values end where their names do. train.log
    has what was printed, and goes on after a resume; there --summary prints the modules of the model."""
    printed = call("train.py --epochs 2 --accelerator cpu", tmp_path).stdout
    lines = printed.splitlines()
    assert lines[:7] == [
        "1 x cpu, 1 CPU thread(s), precision 32-true",
        "model, 58,314 parameters",
        "1,217 training samples, 200 validation samples",
        "effective_batch_size 64 = 1 device(s) x 64 micro_batch_size x 1 grad_accum_steps",
        "lr 0.004 = base_lr 0.004 scaled by rule linear, after 19 steps of warm-up",
        "38 steps = 2 epochs x 19 steps",
        f"run directory {run_dir(tmp_path).name}",
    ]
    assert max(map(len, lines)) <= 80
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["epoch", "step"])
    ends = [[match.end() for match in re.finditer(r"\S+", line)] for line in lines[first : first + 3]]
    assert ends[0] == ends[1] == ends[2] and len(ends[0]) == 6
    log = run_dir(tmp_path) / "train.log"
    assert log.read_text() == printed
    summary = last_summary(tmp_path)
    assert summary["state"] == "finished" and summary["step"] == summary["checkpoint"] == 38
    assert summary["parameters"] == 58314 and 0 < summary["seconds"] < 600
    assert {"train/loss", "val/loss", "val/accuracy", "lr", "samples_per_second"} <= summary["last"].keys()
    assert summary["best"] == summary["last"]["best"] and summary["best_step"] == 38
    more = call(f"train.py --resume {run_dir(tmp_path).name} --epochs 3 --summary", tmp_path).stdout
    more = more[more.index("1 x cpu") :]
    assert log.read_text() == printed + more
    assert f"resumed from {run_dir(tmp_path).name}" in more and str(Model((1, 8, 8), 10)) in more


def console_of(monitor: str) -> Console:
    return Console(SimpleNamespace(is_global_zero=True), monitor, 0, 10, ExitStack())


def test_the_names_come_again_where_the_columns_change(tmp_path, capsys):
    """And train.log has all that was printed, also before the run had a directory."""
    console = console_of("val/loss")
    console.table({"epoch": 1.0, "lr": 0.1, "val/loss": 0.5}, 1)
    console.open_log(tmp_path)
    console.table({"epoch": 2.0, "lr": 2.7277393194555355e-05, "val/loss": 0.25}, 2)
    measured = {"train/grad_norm": 2.0, "samples_per_second": 9.0}
    console.table({"epoch": 3.0, "lr": 0.1, "train/mine": 1, "val/loss": 0.125} | measured, 3)
    printed = capsys.readouterr().out
    assert [" ".join(line.split()) for line in printed.splitlines()] == [
        "epoch step val/loss lr",
        "1 1 0.5 0.1",
        "2 2 0.25 2.7277e-05",
        "epoch step train/mine val/loss lr",
        "3 3 1 0.125 0.1",
    ]
    assert (tmp_path / "train.log").read_text() == printed


def test_the_table_is_no_wider_than_the_terminal_and_names_what_it_leaves_out(capsys, monkeypatch):
    """The losses and the monitored value are always there, then come others, as far as they fit: first those of the
    validation."""
    always = ["epoch", "step", "train/loss", "val/loss", "val/last"]
    others = {f"train/auxiliary_loss_{number}": 1.0 for number in range(9)}
    row = {"epoch": 1.0, "lr": 0.1, "train/loss": 0.5, **others, "val/loss": 0.25, "val/last": 3.0, "val/f1": 0.5}
    for columns, left_out, names in (
        ("20", ["lr", *others, "val/f1"], always),
        ("81", ["lr", *others], [*always, "val/f1"]),
        ("82", [*others], [*always, "val/f1", "lr"]),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        console_of("val/last").table(row, 1)
        *told, found, values = capsys.readouterr().out.splitlines()
        assert found.split() == names and len(values.split()) == len(names)
        assert sorted(told) == [f"logged, but not in this table: {name}" for name in left_out]


def test_no_warning_and_one_header_in_two_processes(tmp_path):
    done = run(f"train.py {SMALL} {ON_2}", tmp_path)
    printed = re.sub(r"^\[Gloo\] .*\n", "", done.stdout, flags=re.MULTILINE)  # of torch 2.10 and older
    assert done.stderr == "" and printed.count("run directory") == 1
    assert printed.startswith("2 x cpu, 1 CPU thread(s), precision 32-true\n")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch uses the GPU of this machine")
def test_a_gpu_that_is_not_used_is_said_before_the_devices(tmp_path, monkeypatch):
    """Not where the CPU was asked for, or no GPU is there."""
    exists, gpus = Path.exists, {Path("/dev/nvidia0"): True}
    monkeypatch.setattr(Path, "exists", lambda path, **more: gpus[path] if path in gpus else exists(path, **more))
    for options, is_there, said in (("", True, 1), ("--accelerator cpu", True, 0), ("", False, 0)):
        gpus[Path("/dev/nvidia0")] = is_there
        before, header, _ = call(f"train.py --fast_run {options}", tmp_path).stdout.partition("1 x cpu, 1 CPU thread")
        assert header and before.count("\n") == before.count("NVIDIA GPU is not used by torch") == said


# ---- progress


def test_a_terminal_has_a_progress_bar_with_loss_metric_and_time_left(tmp_path):
    """The process has a real terminal as its stderr."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # lines, columns
    command = [sys.executable, str(REPO / "train.py"), *SMALL.split(), "--log_interval", "1"]
    process = zygote.popen(
        command, clean_environment(), cwd=tmp_path, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # Linux's end of file
        os.close(master)
    assert process.wait() == 0
    bars = [text for text in re.split(r"[\r\n]", shown.decode()) if "step/s" in text]
    assert re.search(r"20/20 \[.*, train/loss=\d\.\d+, val/accuracy=0\.\d+\]", bars[-1])
    assert "step/s" not in (run_dir(tmp_path) / "train.log").read_text()


def test_without_a_terminal_a_line_of_progress_comes_twice_a_minute(tmp_path):
    """On stderr, also where the environment disables bars, or has them draw a line for many steps alone."""
    seconds = ("runtime/console.py", "__init__", "0.1 if self.is_terminal else 30")
    program = replace(tmp_path / "program", seconds, "0.1 if self.is_terminal else 0")
    env = {"TQDM_DISABLE": "1", "TQDM_MINITERS": "1000"}
    done = run(f"{program}/train.py {SMALL} --log_interval 2", tmp_path, **env)
    lines = done.stderr.splitlines()
    assert len([line for line in lines if " 15/20 [" in line]) == 1 and "step/s" not in done.stdout
    assert any(re.search(r"15/20 \[.*, train/loss=2\.\d+, val/accuracy=0\.\d+\]", line) for line in lines)


def pipe_without_a_reader() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def test_a_run_needs_no_reader(tmp_path):
    """As in `python train.py | head -1`; nor room for what it says. A resume says what changes, test.py which run it
    took: before torch is there, and the results behind it."""
    for command, output in (
        (f"train.py {SMALL} --epochs 1", pipe_without_a_reader()),
        (f"train.py --resume auto {SMALL} --epochs 2", os.open("/dev/full", os.O_WRONLY)),
        ("test.py --accelerator cpu --predictions", pipe_without_a_reader()),
    ):
        process = start(command, tmp_path, stdout=output)
        os.close(output)
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0 and error == ""
    assert (run_dir(tmp_path) / "train.log").read_text().splitlines()[-1].startswith("next: ")
    assert last_summary(tmp_path)["step"] == 8 and (run_dir(tmp_path) / "test_test_best.json").exists()


def test_a_signal_is_obeyed_where_nobody_reads_stderr_any_more(tmp_path):
    process, _ = started(tmp_path)
    process.stdout.close()
    process.stderr.close()
    process.terminate()
    assert process.wait(timeout=300) == PREEMPTED
    assert last_summary(tmp_path)["state"] == "interrupted"


# ---- summary.json


def test_a_signal_is_answered_and_the_state_is_running_then_interrupted_and_at_last_finished(tmp_path):
    """What a resume writes is that of the checkpoint and its own: also where the file was damaged, and before its first
    save."""
    process, pids = started(tmp_path)
    first = last_summary(tmp_path)
    process.send_signal(signal.SIGINT)
    (line,) = end_of(process, pids)
    assert process.returncode == PREEMPTED
    assert "at the end of a step" in line and "second Ctrl-C" in line
    assert first["state"] == "running" and first["step"] == first["checkpoint"] and "val/accuracy" in first["last"]
    second = last_summary(tmp_path)
    assert second["state"] == "interrupted" and second["checkpoint"] == second["step"] >= first["step"]
    damaged = second | {"seconds": [1], "last": 1, "checkpoint": "best"}
    (run_dir(tmp_path) / "summary.json").write_text(json.dumps(damaged))
    call(f"train.py --resume train_out --max_steps {second['step'] + 100}", tmp_path)  # longer than an end takes
    third = last_summary(tmp_path)
    assert third["state"] == "finished" and 600 > third["seconds"] > second["seconds"] > first["seconds"]
    assert third.keys() == second.keys() and third["parameters"] == first["parameters"]
    program = insert_after(tmp_path / "program", "step is done", "raise ValueError(step)")
    call(f"{program}/train.py --resume train_out --max_steps {second['step'] + 200}", tmp_path, code=1)
    failed = last_summary(tmp_path)
    assert failed["state"] == "failed" and failed["checkpoint"] == third["checkpoint"]
    assert failed["seconds"] > second["seconds"] and "train/loss" in failed["last"]
