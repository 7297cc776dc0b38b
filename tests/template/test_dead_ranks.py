"""Processes that die, fail, freeze, take long or are not alike, ranks and data workers: what the others do, and what is
said."""

import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from commands import ON_2, PREEMPTED, REPO, SLOW, SMALL, TORCHRUN, call, folders, run, start
from comparisons import assert_same_run
from edits import copy_programs, insert_after, insert_before, replace
from mistakes import assert_one_line, refuses
from outputs import assert_whole_checkpoints, history, last_summary, newest, results, run_dir
from processes import children, descendants, end_of, how_to_go_on, is_lost, is_running, start_two, started, wait_for

from runtime.loader import start_worker

night = pytest.mark.night
HOST = os.uname().nodename

# ---- dead and frozen


@pytest.mark.parametrize("launcher", ["Fabric", pytest.param("torchrun", marks=night)])
def test_no_process_outlives_the_one_that_has_launched_the_ranks(launcher: str, cwd):
    """Which is rank 0 for Fabric; rank 1 is frozen there. Each rank has two workers."""
    command = f"{TORCHRUN} {REPO / SLOW}" if launcher == "torchrun" else f"{SLOW} {ON_2}"
    process = start(f"{command} --num_workers 1", cwd)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    pids = descendants(process.pid)
    assert len(pids) >= 6
    if launcher == "Fabric":
        (rank_1,) = [pid for pid in children(process.pid) if children(pid)]
        os.kill(rank_1, signal.SIGSTOP)
    process.kill()
    end_of(process, pids)
    assert process.returncode == -signal.SIGKILL
    assert_whole_checkpoints(cwd)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_killed_rank_the_others_end_and_after_a_frozen_one_they_give_up_after_the_timeout(number, cwd):
    """Rank 0 says in one line that it was left alone, and how to go on. But the launcher of Fabric, which looks at its
    processes every five seconds, may be faster, and kill rank 0."""
    process, pids = started(cwd, f"{ON_2} --timeout 25")  # a busy machine takes many seconds to start
    os.kill(pids[1], number)
    wait_for(lambda: not is_running(pids[0]))
    lines = end_of(process, pids)
    assert_whole_checkpoints(cwd)
    if number == signal.SIGKILL and process.returncode == -signal.SIGKILL:
        assert lines == []
        return
    (line,) = lines
    assert is_lost(line, timeout=25) and "rank 0: " in line and how_to_go_on(cwd) in line
    assert process.returncode == 1 and last_summary(cwd)["state"] == "failed"


# ---- one of them fails

STRIKES = """
if step == 30 and fabric.global_rank == {frozen}:
    __import__("signal").raise_signal(19)
if step == 30 and fabric.global_rank == {fails}:
    {error}
"""
TWO_WAIT = """
    first = torch.distributed.all_reduce(torch.zeros(1), async_op=True)
    __import__("time").sleep(1)
    torch.distributed.all_reduce(torch.zeros(1), async_op=True).wait()
"""


def test_an_operation_that_ends_with_another_one_that_has_timed_out_is_a_lost_connection(program, cwd):
    """As those of DDP that wait side by side: gloo tells all but the first neither a place nor its own name."""
    insert_after(program, "step is done", STRIKES.format(frozen=1, fails=0, error=TWO_WAIT))
    (line,) = run(f"{program / SLOW} {ON_2} --timeout 25", cwd, 1).stderr.splitlines()
    assert is_lost(line, timeout=25)


TRACEBACK = 'raise ValueError("deliberate")'
LINE = 'raise __import__("runtime.errors").errors.RunError("deliberate")'


@pytest.mark.parametrize("error, fails, frozen", [(TRACEBACK, 0, 1), (TRACEBACK, 1, 0), (LINE, 1, None)])
def test_an_error_of_one_rank_is_told_at_once_by_that_rank(error, fails, frozen, program, cwd):
    """With its traceback, also while the other rank is frozen, or in one line. What the other one says, when it gives
    up after 25 seconds, comes later, and does not look like the cause."""
    insert_after(program, "step is done", STRIKES.format(frozen=frozen, fails=fails, error=error))
    process = start(f"{program / SLOW} {ON_2} --timeout 25", cwd)
    if frozen == 0:
        rank_1 = wait_for(lambda: children(process.pid))[0]
        wait_for(lambda: not is_running(rank_1) and ") T " in Path(f"/proc/{process.pid}/stat").read_text())
        process.send_signal(signal.SIGCONT)
    first, *others = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == 1
    if error == LINE:
        assert first.startswith("train.py: error: rank 1: deliberate")
    else:
        assert first == f"rank {fails}: Traceback (most recent call last):"
        end = others.index("ValueError: deliberate")
        assert error in map(str.strip, others[:end]) and "error: " not in "".join(others[:end])
        others = others[end + 1 :]
        assert others.pop(0) == how_to_go_on(cwd) if fails == 0 else "rank 0: " in others[0]
    assert len(others) < 2 and all(is_lost(line, timeout=25) for line in others)
    assert last_summary(cwd)["state"] == "failed" and newest(cwd) == 28
    assert_whole_checkpoints(cwd)


# ---- rank 0 alone does something

# It waits for the file `go`.
WAIT = """
from os.path import exists
from time import sleep

if not exists("waits"):
    open("waits", "w").close()
    while not exists("go"):
        sleep(0.1)
"""
DOWNLOAD, SAVE = "digits", "checkpoint is written"
STEPS = f"{SMALL} --checkpoint_frequency 0 --logger_name csv --timeout 20"
LONGER, DEAD, LEFT = "it takes longer than the timeout", "rank_0_has_died_alone", "it gives up_after_the_timeout"


@pytest.mark.parametrize("what, point", [(LONGER, DOWNLOAD), (LONGER, SAVE), (DEAD, SAVE), (LEFT, SAVE)])
def test_what_rank_0_does_alone(what: str, point: str, program, cwd):
    """The other one waits for it as long as it lives, and gives up at once when it is dead. But rank 0 waits for one
    that was frozen meanwhile as long as --timeout says. Each is on a node of its own, so that nothing else ends it; a
    download is waited for on the same one."""
    command = f"{insert_before(program, point, WAIT)}/train.py {STEPS} --epochs 1"
    processes = [start(f"{command} {ON_2}", cwd)] if point == DOWNLOAD else start_two([command] * 2, [cwd] * 2)
    wait_for(lambda: (cwd / "waits").exists() or any(process.poll() is not None for process in processes))
    if what == LONGER:
        time.sleep(25)
        (cwd / "go").touch()
        for process in processes:
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0, out + error
        assert last_summary(cwd)["state"] == "finished"
        return
    struck, other = processes if what == DEAD else processes[::-1]
    struck.send_signal(signal.SIGKILL if what == DEAD else signal.SIGSTOP)
    if what == LEFT:
        (cwd / "go").touch()
    (line,) = other.communicate(timeout=300)[1].splitlines()
    assert other.returncode == 1 and is_lost(line, timeout=20)
    struck.kill()
    struck.communicate()


# ---- the end of a run

AT_EXIT = """
if fabric.global_rank == 1:
    import atexit
    import time
    atexit.register(lambda: time.sleep({seconds}) or print("the last line of rank 1"))
"""


@pytest.mark.parametrize("seconds", [1, 3600])
def test_rank_0_ends_last_so_that_nothing_that_another_rank_has_printed_is_lost(seconds: int, program, cwd):
    """But one that hangs at its exit, for longer than a minute, of which a second is left here, does not keep a run
    that is finished: the system ends it with rank 0."""
    insert_after(program, "set-up is done", AT_EXIT.format(seconds=seconds))
    if seconds == 3600:
        replace(program, ("runtime/launch.py", "launch", "process.wait(timeout=60)"), "process.wait(timeout=1)")
    printed = run(f"{program}/train.py {SMALL} --max_steps 2 {ON_2}", cwd).stdout  # until both have closed it
    assert "finished after 2 of 2 steps" in printed and ("the last line of rank 1" in printed) == (seconds == 1)


# Rank 0 waits until rank 1, which is its child, has ended, and the launcher has seen that: it looks every five seconds.
CLOSES_SLOWLY = """
import os
import time
from contextlib import suppress

with suppress(ChildProcessError):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
time.sleep(6)
"""


@pytest.mark.parametrize("how", ["signal", "error"])
def test_a_rank_that_is_done_does_not_end_one_that_is_closing(how: str, program, cwd):
    """Rank 0 closes slowly, as wandb does on a slow line. Its launcher kills all, if another one has ended by then."""
    insert_before(program, "run ends", CLOSES_SLOWLY)
    if how == "signal":
        process, pids = started(cwd, ON_2, repo=program)
        process.terminate()
        end_of(process, pids)
        assert process.returncode == PREEMPTED and last_summary(cwd)["state"] == "interrupted"
        return
    insert_after(program, "step is done", "if step == 6: run.log({'train/loss': math.nan})")
    one, zero = run(f"{program}/train.py {SMALL} {ON_2}", cwd, code=1).stderr.splitlines()
    assert one.startswith("train.py: error: rank 1: the loss is nan") and how_to_go_on(cwd) in zero
    assert zero.startswith("train.py: error: rank 0: the loss is nan in the steps up to 6; ")


# ---- ranks that are not alike


OWN = "checksum of parts/own.py: "


@pytest.mark.parametrize("differs, word", [("option", "--base_lr: 0.002"), ("functions", OWN), ("model", OWN)])
def test_a_rank_with_other_options_or_files_is_named(differs: str, word: str, tmp_path, cwd):
    """By each, before anything is made. What differs is an option, or a file that is imported at this point."""
    commands = []
    for rank in (0, 1):
        program = copy_programs(tmp_path / f"program{rank}")
        (program / "parts").mkdir()
        (program / "parts" / "own.py").write_text(f"own = {rank}\n")
        if differs != "option":
            insert_before(program, differs, "import parts.own")
        option = "--base_lr 0.002" if differs == "option" and rank == 1 else ""
        commands.append(f"{program}/train.py {STEPS} {option}")
    for rank, process in enumerate(start_two(commands, [cwd] * 2)):
        done = subprocess.CompletedProcess("train.py", process.wait(300), *process.communicate())
        assert done.returncode == 2
        assert_one_line(done, f"rank {rank}: ", word, f" on rank 1 ({HOST})")
    assert not [*cwd.iterdir()]


def test_values_that_a_rank_returns_in_another_order_are_averaged_by_name(program, cwd, tmp_path):
    values = '{"loss": F.cross_entropy(logits, targets), "three": torch.tensor(3.0)}'
    replace(program, "values", f"dict(sorted({values}.items(), reverse=torch.distributed.get_rank() == 1))")
    run(f"train.py {SMALL} {ON_2}", tmp_path)
    run(f"{program}/train.py {SMALL} {ON_2}", cwd)
    found = history(cwd)
    assert {(row.pop("train/three"), row.pop("val/three")) for row in found} == {("3.0", "3.0")}
    assert found == history(tmp_path)


def test_a_value_that_one_rank_alone_returns_is_named_with_those_of_both(program, cwd):
    more = '{"more": logits.sum()} if torch.distributed.get_rank() == 1 else {}'
    replace(program, "values", f'{{"loss": F.cross_entropy(logits, targets)}} | ({more})')
    names = f"names of the values: accuracy, loss, more on rank 1 ({HOST}), accuracy, loss on rank 0"
    refuses(f"{program}/train.py {SMALL} {ON_2}", cwd, "compute_loss and metrics", names, how=run, code=1)


def test_parameters_without_a_gradient_are_named_in_the_first_step_and_nothing_is_left(program, cwd):
    insert_before(program, "layers", "self.unused = nn.Linear(4, 2)")
    names = "model.unused.weight (2, 4), model.unused.bias (2,): no gradient in the first step"
    words = (names, "--strategy ddp_find_unused_parameters_true", "requires_grad_(False)")
    refuses(f"{program}/train.py {SMALL} {ON_2}", cwd, *words, how=run, code=1)
    done = run(f"{program}/train.py {SMALL} --devices 2 --strategy ddp_find_unused_parameters_true", cwd)
    assert "finished after 20 of 20 steps" in done.stdout
    assert "did not find any unused parameters" not in done.stderr  # DDP's advice to take the option away again


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="has one kind of instructions")
@pytest.mark.parametrize("change, is_more", [(1e-7, False), (1e-4, True)])
def test_ranks_with_processors_of_two_kinds_may_differ_in_rounding_and_not_more(change, is_more, program, cwd):
    kind = 'import os\nif os.environ["NODE_RANK"] == "1": os.environ["ATEN_CPU_CAPABILITY"] = "default"'
    insert_before(program, ("train.py", "", "import math"), kind)
    insert_after(program, "step is done", f"model.module.layers[-1].weight.data += {change} * fabric.global_rank")
    for process in start_two([f"{program}/train.py {SMALL} --epochs 1"] * 2, [cwd] * 2):
        error = process.communicate(timeout=300)[1]
        assert (process.returncode, "weights are those of rank 0: False on rank 1" in error) == (is_more,) * 2, error


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_run_directory_that_another_machine_sees_late_or_never(is_seen: bool, tmp_path):
    """Late over NFS; never where it has a --root_dir of its own, which is told by each rank."""
    here, there = folders(tmp_path, "here", "there")
    processes = start_two([f"train.py {SMALL} --epochs 1"] * 2, [here, there])
    if is_seen:
        wait_for(lambda: [*here.iterdir()])
        time.sleep(2)
        (there / run_dir(here).name).symlink_to(run_dir(here))
    for process in processes:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == (0 if is_seen else 2), error
        assert is_seen or "is there: False on rank 1 " in error
    assert len([*here.iterdir()]) == is_seen


# ---- data workers


@pytest.mark.parametrize(
    "number, words",
    [(signal.SIGKILL, r"DataLoader worker \(pid.* \d+\) (is killed by signal: Killed.*|exited.*)"),
     (signal.SIGSTOP, r"DataLoader timed out after 15\.0 seconds")],
)  # fmt: skip
def test_a_data_worker_that_dies_or_freezes_ends_the_run_in_the_words_of_torch(number: int, words: str, tmp_path):
    process, pids = started(tmp_path, "--num_workers 1 --timeout 15")
    for worker in pids[1:]:
        os.kill(worker, number)
    error, note = end_of(process, pids)[-2:]
    assert process.returncode == 1 and re.fullmatch(f"RuntimeError: {words}", error)
    assert note == how_to_go_on(tmp_path) and last_summary(tmp_path)["state"] == "failed"
    assert_whole_checkpoints(tmp_path)


def test_a_data_worker_that_dies_while_the_run_ends_does_not_hide_how_to_go_on(program, cwd):
    dies = "for child in torch.multiprocessing.active_children():\n    child.kill()\ntime.sleep(1)"
    process, pids = started(cwd, "--num_workers 1", repo=insert_before(program, "run ends", dies))
    os.kill(pids[1], signal.SIGKILL)
    *_, error, last = end_of(process, pids)
    assert "DataLoader worker" in error and last == how_to_go_on(cwd)
    assert last_summary(cwd)["state"] == "failed"


def test_a_frozen_data_worker_does_not_delay_the_end_of_a_run(tmp_path):
    """The one of the validation, for which the loop does not wait."""
    process, pids = started(tmp_path, "--num_workers 1 --val_interval 1000000")
    _, of_validation, _ = pids
    os.kill(of_validation, signal.SIGSTOP)
    process.terminate()
    *_, line = end_of(process, pids)
    assert process.returncode == PREEMPTED and line.startswith("stopping at the end of a step")
    assert_whole_checkpoints(tmp_path)


NOTEBOOK = f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing
import time
import train

def compute_loss(*_):
    raise ValueError("deliberate")

train.compute_loss = compute_loss
own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
own.start()
try:
    train.main(train.TrainConfig(accelerator="cpu", epochs=1, num_workers=2))
except ValueError:
    pass
own.join(1)  # a signal takes a moment
print("left", multiprocessing.active_children() == [own])
own.kill()
"""


def test_a_run_ends_its_data_workers_and_no_process_of_a_notebook(tmp_path):
    """Also a run that fails before its first step."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    assert run(f"{tmp_path}/notebook.py", tmp_path).stdout.splitlines()[-1] == "left True"


# Samples have their numbers from a file, which build_model opens before there are data workers, by a first sample.
OF_FILE = """
import time

self.file = getattr(self, "file", None) or open("numbers", "rb", buffering=0)
numbers = []
for number in indices:
    self.file.seek(8 * number)
    time.sleep(0.0005)
    numbers.append(int.from_bytes(self.file.read(8), "big"))
indices = numbers
"""


def test_data_workers_read_from_a_file_that_the_main_process_has_opened(program, tmp_path: Path):
    """They get the samples that a run without them has. In test.py as well."""
    insert_before(program, "fetch", OF_FILE)
    command = f"train.py {SMALL} --micro_batch_size 16 --epochs 2 --logger_name csv"
    plain, cwd = folders(tmp_path, "plain", "workers")
    (cwd / "numbers").write_bytes(b"".join(number.to_bytes(8, "big") for number in range(1797)))
    call(command, plain)
    call(f"{program}/{command} --num_workers 2", cwd)
    assert_same_run(cwd, plain)
    assert results(program, cwd, "--num_workers 2") == results(REPO, plain, "")


def test_a_data_worker_goes_on_in_a_file_from_where_it_was(tmp_path: Path):
    """Here in one that is deleted. One that is written, as by `train.py > log`, keeps one position for all: else a
    process would write over the lines of another one."""
    (tmp_path / "file").write_text("one two three")
    with open(tmp_path / "file", buffering=0, mode="rb") as file, open(tmp_path / "log", "w+b", buffering=0) as log:
        assert file.read(4) == b"one "
        (tmp_path / "file").unlink()

        def begin():
            start_worker(0)
            assert file.read(4) == b"two "
            assert not os.get_inheritable(file.fileno())
            log.write(b"worker\n")

        for number in (1, 2):
            worker = multiprocessing.get_context("fork").Process(target=begin)
            worker.start()
            worker.join()
            assert worker.exitcode == 0
            log.write(b"main %d\n" % number)
        assert file.read() == b"two three"
    assert (tmp_path / "log").read_text() == "worker\nmain 1\nworker\nmain 2\n"
