"""Several processes: launchers, ranks and data workers that die, fail or freeze, and two runs in one directory."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zygote
from conftest import (
    LONG,
    NO_SHARED_STORE,
    ON_2,
    PREEMPTED,
    REPO,
    SLOW,
    SMALL,
    TORCHRUN,
    assert_same_run,
    assert_same_training,
    assert_told_by_ranks,
    assert_whole_checkpoints,
    call,
    children,
    descendants,
    end_of,
    history,
    is_lost,
    is_running,
    kill_group,
    last_summary,
    newest,
    run,
    run_dir,
    set_running,
    start,
    start_two,
    started,
    truncate,
    wait_for,
    without_locks,
)
from edits import copy_programs, insert_after, insert_before, replace
from test_prepared_data import DOWNLOAD, log


@pytest.fixture(autouse=True, scope="module")
def real_ranks() -> Iterator[None]:
    """Fabric starts the ranks, as it does for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote, "FORK_RANKS", False)
        yield


# ---- launchers


@pytest.fixture(scope="module")
def terminated(tmp_path_factory) -> tuple[int, str, Path]:
    """The exit code and the output of a torchrun that may restart and got a SIGTERM; and where that was."""
    cwd = tmp_path_factory.mktemp("terminated")
    process = start(f"{TORCHRUN} --max-restarts 1 {REPO / SLOW}", cwd, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    process.terminate()
    output, _ = process.communicate(timeout=300)
    return process.returncode, output, cwd


def test_torchrun_passes_a_signal_on_and_the_run_is_saved(terminated):
    code, output, cwd = terminated
    assert code == 1  # torchrun's own
    assert f"stopped after {newest(cwd)} of" in output and "resumed from" not in output


def test_torchrun_restarts_a_killed_rank_and_resume_auto_goes_on(whole, tmp_path):
    command = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {REPO / LONG} --resume auto"
    process = start(command, tmp_path, **NO_SHARED_STORE)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert re.search(r"resumed from .*step-", output) and "TORCH_DISABLE" not in output + error
    assert_same_training(tmp_path, whole)


DIES_AT_THE_END = """
import os, time

while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(0.1)
    if fabric.global_rank == 1 and (run.path / "model.pt").exists():
        os.kill(os.getpid(), 9)
"""


def test_torchrun_restarts_a_rank_that_dies_when_all_is_done_and_nothing_is_trained_twice(tmp_path):
    repo = insert_after(tmp_path / "repo", "run is finished", DIES_AT_THE_END)
    cwd = tmp_path / "run"
    cwd.mkdir()
    command = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {repo}/train.py {SMALL} --resume auto"
    output = run(command, cwd, **NO_SHARED_STORE).stdout
    assert output.count("is finished") == 1 and "resumed from" not in output
    assert [row["step"] for row in history(cwd)] == ["4", "8", "12", "16", "20"]
    assert len([*run_dir(cwd).glob("provenance/*.txt")]) == 1


def test_restarts_without_the_variable_are_refused_in_one_line(tmp_path):
    """They may hang for longer than --timeout."""
    process = start(f"{TORCHRUN} --max-restarts 1 {REPO / SLOW}", tmp_path)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert "train.py: error: torchrun --max-restarts 1: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error
    assert not [*tmp_path.iterdir()]


def test_the_documented_commands_with_restarts_set_the_variable():
    files = [path for path in (*REPO.glob("*.md"), *REPO.glob("recipes/**/*")) if path.is_file()]
    pages = [path.read_text().replace("\\\n", "") for path in files]
    commands = [
        line for page in pages for line in page.splitlines() if re.search("torchrun .*--max-restarts .*train", line)
    ]
    assert commands
    assert [line for line in commands if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" not in line] == []


def test_no_process_outlives_torchrun(tmp_path):
    process = start(f"{TORCHRUN} {REPO / SLOW} --num_workers 1", tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 16)
    pids = descendants(process.pid)
    assert len(pids) >= 7  # two ranks with two workers each
    process.kill()
    end_of(process, pids)
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("left", ["MASTER_ADDR", "LOCAL_RANK"])
def test_what_an_earlier_launch_has_left_in_the_shell_does_no_harm(left: str, tmp_path):
    """Another machine's address; or a rank, by which Fabric would take this process for one that it has started."""
    values = {"MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": "0"}
    done = run(f"train.py {SMALL} {ON_2} --epochs 1 --timeout 60", tmp_path, **{left: values[left]})
    assert "64 = 2 device(s)" in done.stdout and "finished after 4 of 4 steps" in done.stdout


def test_a_run_outlives_its_shell_also_where_a_rank_was_left_in_it(tmp_path):
    """A process that Fabric or torchrun has started ends with them."""
    command = f"{sys.executable} {REPO}/train.py {SMALL} --epochs 100 --logger_name csv"
    wait = "until compgen -G '*-train_out/checkpoints/*.ckpt'; do sleep 0.1; done"
    (tmp_path / "script.sh").write_text(f"nohup {command} > log 2>&1 &\n{wait}\necho $!\n")
    pid = int(run(f"{tmp_path}/script.sh", tmp_path, LOCAL_RANK="0").stdout.split()[-1])
    wait_for(lambda: not is_running(pid))
    assert last_summary(tmp_path)["state"] == "finished"


def test_a_port_that_is_in_use_is_told_in_the_last_line(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        error = run(f"train.py {SMALL} {ON_2}", tmp_path, code=1, MASTER_PORT=str(port)).stderr
    last = error.splitlines()[-1]
    assert "EADDRINUSE" in last and f"port: {port}" in last
    assert not [*tmp_path.iterdir()]


# ---- dead, failing and frozen ranks


def test_no_process_outlives_rank_0(tmp_path):
    """It has launched the others, of which one is frozen."""
    process, pids = started(tmp_path, f"{ON_2} --num_workers 1")
    assert len(pids) >= 6  # two ranks with two workers each
    (rank_1,) = [pid for pid in children(process.pid) if children(pid)]
    os.kill(rank_1, signal.SIGSTOP)
    process.kill()
    end_of(process, pids)
    assert process.returncode == -signal.SIGKILL
    assert_whole_checkpoints(tmp_path)


# What rank 0 does alone waits for the file `go`.
WAIT = """
import os
import time

if os.environ.get("WAIT") == {name!r} and not os.path.exists({name!r}):
    open({name!r}, "w").close()
    while not os.path.exists("go"):
        time.sleep(0.1)
"""
ALONE = {"check": "checkpoint is chosen", "save": "checkpoint is written", "end": "final weights"}
STEPS = f"{SMALL} --checkpoint_frequency 0 --logger_name csv --timeout 10"


@pytest.fixture(scope="module")
def waits(tmp_path_factory) -> Path:
    """The programs, with a rank 0 that waits."""
    program = tmp_path_factory.mktemp("waits") / "program"
    for name, point in ALONE.items():
        insert_before(program, point, WAIT.format(name=name))
    return program


def how_to_go_on(cwd: Path) -> str:
    return f"the checkpoints are whole, continue with: python train.py --resume {run_dir(cwd).name}"


def start_waiting(phase: str, waits: Path, cwd: Path) -> list[subprocess.Popen]:
    """Two nodes, of which rank 0 waits in this phase."""
    command = f"{waits}/train.py {STEPS} --epochs 1"
    if phase == "check":
        call(command, cwd)
        command = f"{waits}/train.py --resume auto --epochs 2"
    processes = start_two([command, command], cwd, WAIT=phase)
    wait_for(lambda: (cwd / phase).exists() or any(process.poll() is not None for process in processes))
    return processes


@pytest.mark.parametrize("phase", ALONE)
def test_what_rank_0_does_alone_may_take_longer_than_the_timeout(phase: str, waits, tmp_path):
    processes = start_waiting(phase, waits, tmp_path)
    time.sleep(15)
    (tmp_path / "go").touch()
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, out + error
    assert last_summary(tmp_path)["state"] == "finished"


def test_a_download_may_take_longer_than_the_timeout(tmp_path):
    program = insert_before(tmp_path / "program", "digits", DOWNLOAD)
    folder = tmp_path / "folder"
    folder.mkdir()
    process = start(f"{program}/train.py {STEPS} --epochs 1 {ON_2}", tmp_path, DOWNLOAD=str(folder))
    wait_for(lambda: log(folder, "began") or process.poll() is not None)
    time.sleep(15)
    assert len(log(folder, "called")) == 1
    (folder / "go").touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out + error
    assert len(log(folder, "called")) == 2
    assert last_summary(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("phase", ALONE)
def test_the_others_notice_at_once_that_rank_0_has_died_alone(phase: str, waits, tmp_path):
    zero, one = start_waiting(phase, waits, tmp_path)
    zero.kill()
    (line,) = one.communicate(timeout=300)[1].splitlines()
    assert one.returncode == 1 and is_lost(line, timeout=10)
    zero.communicate()


@pytest.mark.parametrize("phase", ALONE)
def test_rank_0_gives_up_after_the_timeout_if_another_was_frozen_meanwhile(phase: str, waits, tmp_path):
    zero, one = start_waiting(phase, waits, tmp_path)
    one.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    (line,) = zero.communicate(timeout=300)[1].splitlines()
    assert zero.returncode == 1 and is_lost(line, timeout=10)
    one.kill()
    one.communicate()


def test_a_rank_that_is_done_does_not_end_one_that_is_closing(tmp_path):
    """Rank 0 closes slowly, as wandb does on a slow line. Its launcher kills all, if another one has ended by then."""
    repo = insert_before(tmp_path / "repo", "run ends", "time.sleep(15)")
    cwd = tmp_path / "run"
    cwd.mkdir()
    process, pids = started(cwd, ON_2, repo=repo)
    process.terminate()
    end_of(process, pids)
    assert process.returncode == PREEMPTED
    assert last_summary(cwd)["state"] == "interrupted"


def test_an_error_of_all_ranks_is_told_by_each_while_rank_0_closes_slowly(tmp_path):
    repo = insert_before(tmp_path / "repo", "run ends", "time.sleep(15)")
    insert_after(repo, "step is done", "if step == 6: run.check_loss(math.nan, step)")
    one, zero = run(f"{repo}/train.py {SMALL} {ON_2}", tmp_path, code=1).stderr.splitlines()
    assert one.startswith("train.py: error: rank 1: the loss is nan in the steps up to 6; ")
    assert zero.startswith("train.py: error: rank 0: the loss is nan in the steps up to 6; ")
    assert zero.endswith(f"; {how_to_go_on(tmp_path)}")


def test_a_killed_rank_ends_the_others(tmp_path):
    """It has said nothing. Rank 0 says so in one line, and how to go on; but the launcher of Fabric, which looks at its
    processes every five seconds, may be faster, and kill rank 0."""
    process, pids = started(tmp_path, ON_2)
    os.kill(pids[1], signal.SIGKILL)
    lines = end_of(process, pids)
    assert_whole_checkpoints(tmp_path)
    if process.returncode == -signal.SIGKILL:
        assert lines == []
        return
    (line,) = lines
    assert process.returncode == 1
    assert is_lost(line, timeout=300) and f"--resume {run_dir(tmp_path).name}" in line
    assert last_summary(tmp_path)["state"] == "failed"


FAILS_ALONE = """
if step == 30 and fabric.global_rank == {fails}:
    {error}
if step == 30 and fabric.global_rank == {frozen}:
    __import__("signal").raise_signal(19)
"""


def failing_alone(tmp_path: Path, devices: int, **values) -> tuple[subprocess.Popen, Path]:
    """A run of which one rank fails after 30 steps, and another one may be frozen then; and where it is."""
    repo = insert_after(tmp_path / "repo", "step is done", FAILS_ALONE.format(**values))
    cwd = tmp_path / "run"
    cwd.mkdir()
    options = f"--devices {devices} --strategy ddp --effective_batch_size 96 --timeout 40"
    return start(f"{repo}/{SLOW} {options}", cwd), cwd


def told(process: subprocess.Popen, last: str) -> list[str]:
    """The lines on stderr up to this one."""
    watchdog = threading.Timer(300, kill_group, [process])
    watchdog.start()
    lines = []
    for line in process.stderr:
        lines.append(line.removesuffix("\n"))
        if lines[-1] == last:
            break
    watchdog.cancel()
    return lines


@pytest.mark.parametrize("fails, frozen, devices", [(0, 1, 2), (1, 0, 2), (2, 1, 3)])
def test_an_error_of_one_rank_is_told_at_once_by_that_rank(fails: int, frozen: int, devices: int, tmp_path):
    """With its traceback, while another rank is frozen. What the others say then does not look like the cause."""
    error = 'raise ValueError("deliberate")'
    process, cwd = failing_alone(tmp_path, devices, fails=fails, error=error, frozen=frozen)
    first, *lines = told(process, "ValueError: deliberate")
    assert first == f"rank {fails}: Traceback (most recent call last):"
    assert any(line.strip() == error for line in lines)
    assert not [line for line in lines if is_lost(line, timeout=40)]
    if frozen == 0:
        wait_for(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text())  # it is frozen by now
        process.send_signal(signal.SIGCONT)
    others = process.stderr.read().splitlines()
    assert process.wait() == 1
    if fails == 0:
        assert others == [how_to_go_on(cwd)]
    else:
        assert len(others) == 1 and is_lost(others[0], timeout=40) and "rank 0: " in others[0]
    assert last_summary(cwd)["state"] == "failed"
    assert newest(cwd) == 28
    assert_whole_checkpoints(cwd)


@pytest.mark.parametrize("fails, devices", [(0, 2), (1, 2), (2, 3)])
def test_the_one_line_of_a_rank_comes_before_those_of_the_others(fails: int, devices: int, tmp_path):
    """Which give up after 40 seconds."""
    error = 'raise __import__("config").RunError("deliberate")'
    process, cwd = failing_alone(tmp_path, devices, fails=fails, error=error, frozen=None)
    first, *others = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == 1
    assert first.startswith(f"train.py: error: rank {fails}: deliberate")
    assert len(others) < devices and all(is_lost(line, timeout=40) for line in others)
    assert last_summary(cwd)["state"] == "failed"


def test_the_others_give_up_after_the_timeout_if_a_rank_is_frozen(tmp_path):
    """Rank 1 is frozen: for rank 0 the others wait as long as it lives, if it was frozen while it saves."""
    process, pids = started(tmp_path, f"{ON_2} --timeout 40")  # a busy machine takes many seconds to start
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: process.poll() is not None)
    os.kill(pids[1], signal.SIGKILL)  # it would hold stderr open
    (line,) = end_of(process, pids)
    assert process.returncode == 1
    assert line.startswith("train.py: error: rank 0: ") and is_lost(line, timeout=40)
    assert_whole_checkpoints(tmp_path)


def refused_resume(launcher: str, cwd: Path, code: int) -> str:
    """The line of rank 0 in a resume on two processes, where it alone finds that the run cannot be resumed. It is the
    only one; under torchrun, the other rank may say that rank 0 has ended. Nothing has changed."""
    before = without_locks(cwd)
    if launcher == "Fabric":
        error = run(f"train.py --resume train_out {ON_2}", cwd, code).stderr
    else:
        error = run(f"{TORCHRUN} {REPO}/train.py --accelerator cpu --resume train_out", cwd, code=1).stderr
        assert f"exitcode  : {code} " in error
    first, *others = [line for line in error.splitlines() if line.startswith("train.py: error: ")]
    assert len(others) < 2 and all(is_lost(line, timeout=300) for line in others)
    assert launcher == "torchrun" or error == f"{first}\n"
    assert without_locks(cwd) == before
    return first


@pytest.mark.parametrize("launcher", ["Fabric", "torchrun"])
def test_damaged_checkpoints_are_told_by_rank_0_alone(launcher: str, tmp_path):
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    folder = run_dir(tmp_path)
    set_running(folder)
    for path in folder.glob("checkpoints/*.ckpt"):
        truncate(path)
    line = refused_resume(launcher, tmp_path, code=1)
    words = f"no checkpoint in {folder.name}/checkpoints can be read: test.py --checkpoint last says why"
    assert line == f"train.py: error: rank 0: {words}; nothing was changed"


# ---- ranks that are not alike


@pytest.mark.parametrize(
    "differs, words",
    [
        ("option", r"--base_lr: 0\.002 on rank 1 \(HOST\), 0\.001 on rank 0"),
        ("file", r"checksum of model\.py: \d+ on rank 1 \(HOST\), \d+ on rank 0"),
        ("new file", r"checksum of own\.py: \d+ on rank 1 \(HOST\), None on rank 0"),
    ],
)
def test_a_rank_with_other_options_or_files_is_named(differs: str, words: str, tmp_path):
    """Before anything is made."""
    commands = []
    for rank, base_lr in enumerate(("1e-3", "2e-3")):
        repo = copy_programs(tmp_path / f"repo{rank}")
        commands.append(f"{repo}/train.py {STEPS} --base_lr {base_lr if differs == 'option' else 1e-3}")
    if differs != "option":
        with open(repo / ("model.py" if differs == "file" else "own.py"), "a") as file:
            file.write("own = 1\n")
    cwd = tmp_path / "run"
    cwd.mkdir()
    words = words.replace("HOST", os.uname().nodename)
    for rank, process in enumerate(start_two(commands, cwd)):
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 2
        assert re.fullmatch(f"train.py: error: rank {rank}: {words}; all machines need the same files, .*\n", error)
    assert not [*cwd.iterdir()]


def with_values(code: str, folder: Path) -> Path:
    """The programs with a second value beside the loss. `code` may change the values."""
    function = f"""
        def named(values, is_training):
            values["three"] = torch.tensor(3.0)
            rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
            {code}
            return values


    """
    insert_before(folder, "functions", function)
    return replace(folder, "values", 'named({"loss": F.cross_entropy(logits, targets)}, model.training)')


def test_values_that_a_rank_returns_in_another_order_are_averaged_by_name(tmp_path):
    whole, turned = tmp_path / "whole", tmp_path / "turned"
    for cwd, code in ((whole, "pass"), (turned, "values = dict(reversed(values.items())) if rank == 1 else values")):
        cwd.mkdir()
        run(f"{with_values(code, tmp_path / f'repo_{cwd.name}')}/train.py {SMALL} {ON_2}", cwd)
    assert_same_run(turned, whole)
    assert {(row["train/three"], row["val/three"]) for row in history(turned)} == {("3.0", "3.0")}


@pytest.mark.parametrize("where, made", [("True", 0), ("is_training", 1)])
def test_a_value_that_one_rank_alone_returns_is_named_with_those_of_both(where: str, made: int, tmp_path):
    """In the validation before the first step, or, if it is there in the training alone, at the first log."""
    repo = with_values(f"if rank == 1 and {where}: values['more'] = torch.tensor(1.0)", tmp_path / "repo")
    cwd = tmp_path / "run"
    cwd.mkdir()
    error = run(f"{repo}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    others = "grad_norm, loss, more, three", "grad_norm, loss, three"
    if where == "True":
        others = "accuracy, loss, more, three", "accuracy, loss, three"
    words = f"names of the values: {others[0]} on rank 1 ({os.uname().nodename}), {others[1]} on rank 0"
    assert_told_by_ranks(error, f"compute_loss and metrics must give the same names on all ranks: {words}")
    assert len([*cwd.iterdir()]) == made


UNUSED = "self.unused = nn.Linear(4, 2)\n"


def test_parameters_without_a_gradient_are_named_in_the_first_step_and_nothing_is_left(tmp_path):
    repo = insert_before(tmp_path / "repo", "layers", UNUSED)
    cwd = tmp_path / "run"
    cwd.mkdir()
    error = run(f"{repo}/train.py {SMALL} {ON_2}", cwd, code=1).stderr
    words = (
        "model.unused.weight (2, 4), model.unused.bias (2,): no gradient in the first step; "
        "if that is right, give --strategy ddp_find_unused_parameters_true"
    )
    assert_told_by_ranks(error, words)
    assert not [*cwd.iterdir()]
    done = run(f"{repo}/train.py {SMALL} --devices 2 --strategy ddp_find_unused_parameters_true", cwd)
    assert "finished after 20 of 20 steps" in done.stdout


# ---- data workers


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_data_worker_that_dies_or_freezes_ends_the_run_in_the_words_of_torch(signal_number, tmp_path):
    process, pids = started(tmp_path, "--num_workers 1 --timeout 15")
    for worker in pids[1:]:
        os.kill(worker, signal_number)
    error, *notes = end_of(process, pids)[-2 if signal_number == signal.SIGKILL else -3 :]
    assert process.returncode == 1
    if signal_number == signal.SIGKILL:
        assert re.match(r"RuntimeError: DataLoader worker \(pid.* \d+\) (is killed by signal: Killed|exited)", error)
    else:
        assert error == "RuntimeError: DataLoader timed out after 15.0 seconds" and notes.pop().endswith("it hangs")
    assert notes == [how_to_go_on(tmp_path)]
    assert last_summary(tmp_path)["state"] == "failed"
    assert_whole_checkpoints(tmp_path)


BIG = """
if len(indices) > 1:
    return torch.ones(26_000_000 // 4), torch.as_tensor(indices)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_a_small_dev_shm_is_told_by_the_data_worker_and_named_in_the_last_line(tmp_path):
    """As in a container."""
    program = insert_before(tmp_path / "program", "fetch", BIG)
    command = f"{sys.executable} {program}/train.py {SMALL} --num_workers 1 --timeout 5"
    script = f"mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {command}"
    (tmp_path / "train.sh").write_text(f"exec unshare --mount bash -c '{script}'\n")
    error = run(f"{tmp_path}/train.sh", tmp_path, code=1).stderr
    assert "No space left on device" in error and error.splitlines()[-2].endswith("timed out after 5.0 seconds")
    assert "its message is above: /dev/shm may be full" in error.splitlines()[-1]
    assert not [*tmp_path.glob("*train_out")]


def test_no_data_worker_is_left_after_a_run(tmp_path):
    process, pids = started(tmp_path, "--num_workers 2 --epochs 60")
    assert len(pids) == 5  # two of the training, two of the validation
    assert end_of(process, pids) == []
    assert process.returncode == 0


DIES_MEANWHILE = """
for child in torch.multiprocessing.active_children():
    child.kill()
time.sleep(1)
"""


def test_a_data_worker_that_dies_while_the_run_ends_does_not_hide_how_to_go_on(tmp_path):
    repo = insert_before(tmp_path / "repo", "run ends", DIES_MEANWHILE)
    cwd = tmp_path / "run"
    cwd.mkdir()
    process, pids = started(cwd, "--num_workers 1", repo=repo)
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
    assert process.returncode == PREEMPTED
    assert line == "stopping at the end of a step; a second Ctrl-C ends the process at once"
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("ends", ["fails", "finishes"])
def test_a_run_ends_its_data_workers_and_no_process_of_a_notebook(ends: str, tmp_path):
    """Also a run that fails before its first batch."""
    script = tmp_path / "notebook.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing
import time
import train

def compute_loss(*_):
    raise ValueError("deliberate")

if {ends == "fails"}:
    train.compute_loss = compute_loss
own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
own.start()
try:
    train.main(train.TrainConfig(accelerator="cpu", epochs=1, num_workers=1))
except ValueError:
    pass
own.join(1)  # a signal takes a moment
print("left", multiprocessing.active_children() == [own])
own.kill()
""")
    assert run(str(script), tmp_path).stdout.splitlines()[-1] == "left True"


def test_a_data_worker_that_cannot_be_started_leaves_none_of_the_others(tmp_path):
    """Which ignore the signal by which Python would end them, and wait for them."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import multiprocessing.context
import train

start = multiprocessing.context.ForkProcess.start
started = []

def start_one(process):
    if started:
        raise OSError(12, "Cannot allocate memory")
    start(process)
    started.append(process)

multiprocessing.context.ForkProcess.start = start_one
try:
    train.main(train.TrainConfig(accelerator="cpu", num_workers=2))
except OSError:
    started[0].join()
    print("ended")
""")
    assert run(str(script), tmp_path).stdout.splitlines()[-1] == "ended"


def test_a_second_failure_while_a_run_ends_does_not_hide_the_first_or_how_to_go_on(tmp_path):
    """Where two data workers die, the second may be noticed when the first has ended the loop already."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
from contextlib import ExitStack
import launch
from config import TrainConfig

def fail(number):
    raise RuntimeError(f"DataLoader worker (pid {{number}}) is killed by signal: Killed.")

def main(config):
    with ExitStack() as resources:
        resources.callback(fail, 2)
        resources.push(lambda kind, error, trace: error.add_note("go on with: ..."))
        fail(1)

launch.run_and_exit(main, TrainConfig())
""")
    lines = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr.splitlines()
    first, second = (
        lines.index(f"RuntimeError: DataLoader worker (pid {number}) is killed by signal: Killed.") for number in (1, 2)
    )
    assert first < lines.index("go on with: ...") < second == len(lines) - 1


def test_a_data_worker_that_dies_in_the_middle_of_a_save_is_named(tmp_path):
    """torch raises its error anywhere in the main thread, and torch.save covers it up."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import torch
import launch
from config import TrainConfig

class File:
    written = 0

    def write(self, data):
        if self.written:
            raise RuntimeError("DataLoader worker (pid 2) is killed by signal: Killed.")
        self.written = len(data)
        return len(data)

launch.run_and_exit(lambda config: torch.save(torch.ones(1_000_000), File()), TrainConfig())
""")
    lines = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr.splitlines()
    assert "RuntimeError: DataLoader worker (pid 2) is killed by signal: Killed." in lines


# ---- two at once


@pytest.mark.parametrize("launcher", ["Fabric", "torchrun"])
def test_a_run_that_is_being_written_to_is_not_resumed_by_another(launcher: str, tmp_path):
    process, _ = started(tmp_path)
    process.send_signal(signal.SIGSTOP)
    lock = run_dir(tmp_path) / ".lock"
    locked = lock.read_bytes()
    line = refused_resume(launcher, tmp_path, code=2)
    words = f"--resume: another process is writing to {run_dir(tmp_path).name}"
    assert line == f"train.py: error: rank 0: {words}"
    assert lock.read_bytes() == locked
    process.send_signal(signal.SIGCONT)
    step = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > step)
    kill_group(process)
    process.communicate()
    process = start("train.py --resume train_out", tmp_path)  # the lock died with its process
    assert any("resumed from" in line for line in process.stdout)
    kill_group(process)
    process.communicate()
