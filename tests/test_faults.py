"""What breaks a run breaks it with a clear last line, costs nothing that was saved, and a resume repairs it.

`python tests/faults.py` is the long version: hundreds of kills, and every fault in every place.
"""

import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    TORCHRUN,
    assert_same_best,
    assert_same_run,
    assert_same_training,
    call,
    children,
    copied,
    history,
    interrupt,
    kill_group,
    newest,
    replaced,
    run,
    run_dir,
    start,
    wait_for,
)

SLOW = LONG.replace("--epochs 30", "--epochs 3000")  # never ends by itself
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    return [pid, *(found for child in children(pid) for found in descendants(child))]


def started(cwd: Path, options: str = "", **more) -> tuple[subprocess.Popen, list[int]]:
    """A run that has begun to save, and the numbers of its processes, the first rank first."""
    process = start(f"{SLOW} {options}", cwd, **more)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    assert process.poll() is None, process.communicate()
    return process, descendants(process.pid)


def end_of(process: subprocess.Popen, pids: list[int]) -> list[str]:
    """Waits until all processes are gone, and returns the lines on stderr. What is left is killed."""
    try:
        error = process.communicate(timeout=300)[1]
        wait_for(lambda: not any(map(is_running, pids)))
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    return error.strip().splitlines()


def assert_whole_checkpoints(cwd: Path) -> None:
    assert [torch.load(path, weights_only=True) for path in cwd.glob("*/checkpoints/*.ckpt")]


# ---- a kill before a change of a file

# Python runs a module of this name at its start. KILL_BEFORE is `N`, or `EVENT NAME N` for the N-th of one kind.
KILLER = '''import os, signal, sys

KIND, _, LEFT = os.environ["KILL_BEFORE"].rpartition(" ")
LEFT, LIST = [int(LEFT)], os.open(os.environ["CHANGES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def hook(event, args):
    """Lists the changes of files of a run, and kills the process before one of them."""
    if event == "open" and not isinstance(args[0], int):
        is_change = args[2] & (os.O_WRONLY | os.O_RDWR)
    else:
        is_change = event in ("os.mkdir", "os.link", "os.rename") or (event == "os.remove" and os.path.lexists(args[0]))
    if is_change and "-train_out" in os.fsdecode(args[0]):
        change = f"{event} {os.path.basename(os.fsdecode(args[0]))}"
        os.write(LIST, (change + chr(10)).encode())
        LEFT[0] -= change.startswith(KIND)
        if LEFT[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(hook)
'''
# A new run with two checkpoints: the first is the best, the second is not, and the first goes.
TWO_SAVES = (
    f"train.py {SMALL} --max_steps 4 --checkpoint_interval 2 --val_interval 2 --log_interval 1 --num_checkpoint_keep 1 "
    "--monitor val/loss --monitor_mode max --logger_name csv"
)


def kill_before(change: str | int, command: str, cwd: Path, tmp_path: Path) -> list[str]:
    """Kills the command before a change of a file; returns all that there were, the one that was not made included."""
    (tmp_path / "killer").mkdir(exist_ok=True)
    (tmp_path / "killer" / "sitecustomize.py").write_text(KILLER)
    (tmp_path / "changes").unlink(missing_ok=True)
    env = {"KILL_BEFORE": str(change), "CHANGES": str(tmp_path / "changes"), "PYTHONPATH": str(tmp_path / "killer")}
    run(command, cwd, code=-signal.SIGKILL if change else 0, **env)
    return (tmp_path / "changes").read_text().splitlines()


def remove_what_is_no_run(cwd: Path) -> None:
    """A directory that has no config.yaml yet has nothing else either."""
    for folder in cwd.glob("2*-train_out"):
        if not (folder / "config.yaml").exists():
            assert {path.name for path in folder.iterdir()} <= {".lock", "config.yaml.tmp"}
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("two_saves")
    call(TWO_SAVES, cwd)
    return cwd


@pytest.mark.parametrize(
    "change",
    ["os.rename config.yaml 1", "os.rename metrics.csv 1", "os.rename best.ckpt.tmp 1", "os.link best.ckpt 1"],
)
def test_a_kill_between_two_changes_of_files_costs_nothing(two_saves, tmp_path, change: str):
    """Also not the best: once a step has a checkpoint of its own, it is the best, too, if it was."""
    cwd = tmp_path / "run"
    cwd.mkdir()
    changes = kill_before(change, TWO_SAVES, cwd, tmp_path)
    assert changes[-1].startswith(change.rpartition(" ")[0])
    call(f"{TWO_SAVES} --resume auto", cwd)
    assert all(re.fullmatch(r"\d{8}-\d{6}-train_out", path.name) for path in cwd.iterdir())
    remove_what_is_no_run(cwd)
    assert_same_run(cwd, two_saves)
    assert_same_best(cwd, two_saves)
    assert not [*run_dir(cwd).glob("**/*.tmp")]


def test_a_row_of_the_log_that_was_cut_is_written_again(whole, tmp_path):
    """As a full disk may cut it: of the row of step 240 there is a 2, and that is no row of step 2."""
    cwd = copied(whole, tmp_path)
    (run_dir(cwd) / "model.pt").unlink()
    (run_dir(cwd) / "checkpoints" / "step-00000240.ckpt").unlink()
    log = run_dir(cwd) / "logs" / "csv" / "metrics.csv"
    *lines, last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines) + last[:1])
    call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)


# ---- launchers


@pytest.fixture(scope="module")
def terminated(tmp_path_factory) -> tuple[int, str, Path]:
    """The exit code and the output of a torchrun that may restart and got a SIGTERM; and where that was."""
    cwd = tmp_path_factory.mktemp("terminated")
    process = start(f"{TORCHRUN} --max-restarts 1 {REPO / SLOW}", cwd)
    wait_for(lambda: process.poll() is not None or newest(cwd) > 16)
    process.terminate()
    output, _ = process.communicate(timeout=300)
    return process.returncode, output, cwd


def test_torchrun_passes_a_signal_on_and_the_run_is_saved(terminated):
    code, output, cwd = terminated
    assert code == 1  # torchrun's own
    assert f"stopped by a signal after {newest(cwd)} of" in output and "resumed from" not in output


def test_torchrun_with_restarts_but_without_the_variable_that_they_need_warns_in_one_line(terminated):
    """In torch 2.13 a restarted rank may read the address of a dead one."""
    assert terminated[1].count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 1


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
            if rank == 1 and (run.path / "model.pt").exists():
                os.kill(os.getpid(), 9)
"""


def test_torchrun_restarts_a_rank_that_dies_when_all_is_done_and_nothing_is_trained_twice(tmp_path):
    repo = replaced(tmp_path / "repo", "train.py", 'run.finish("model")\n', f'run.finish("model")\n{DIES_AT_THE_END}')
    cwd = tmp_path / "run"
    cwd.mkdir()
    command = f"{TORCHRUN} --max-restarts 2 --monitor-interval 0.1 {repo}/train.py {SMALL} --resume auto"
    output = run(command, cwd, **NO_SHARED_STORE).stdout
    assert output.count("is finished") == 1 and "resumed from" not in output
    assert [row["step"] for row in history(cwd)] == ["4", "8", "12", "16", "20"]
    assert len([*run_dir(cwd).glob("provenance/*.txt")]) == 1


def test_the_documented_commands_with_restarts_set_the_variable():
    pages = [path.read_text().replace("\\\n", "") for path in (*REPO.glob("*.md"), *REPO.glob("recipes/*"))]
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


def test_a_killed_rank_ends_the_others(tmp_path):
    process, pids = started(tmp_path, ON_2)
    os.kill(pids[1], signal.SIGKILL)
    *_, line = end_of(process, pids)
    assert process.returncode != 0
    assert "another process died" in line and f"--resume {run_dir(tmp_path).name}" in line
    assert_whole_checkpoints(tmp_path)


def test_an_exception_in_one_rank_is_named_and_ends_the_others(tmp_path):
    repo = replaced(
        tmp_path / "repo",
        "train.py",
        'state["step"] = step\n',
        'state["step"] = step\n        if step == 30 and rank == 1:\n            raise ValueError("deliberate")\n',
    )
    cwd = tmp_path / "run"
    cwd.mkdir()
    process = start(f"{repo}/{SLOW} {ON_2}", cwd)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert error.count("train.py: error: rank 1: ValueError: deliberate") == error.count("Traceback") == 1
    assert newest(cwd) == 28
    assert_whole_checkpoints(cwd)


def test_the_others_give_up_after_the_timeout_if_a_rank_is_frozen(tmp_path):
    process, pids = started(tmp_path, f"{ON_2} --timeout 40")  # a busy machine takes many seconds to start
    os.kill(pids[0], signal.SIGSTOP)
    wait_for(lambda: not is_running(pids[1]))
    for pid in filter(is_running, pids):
        os.kill(pid, signal.SIGKILL)
    error = process.communicate(timeout=300)[1]
    assert "rank 1: " in error and "did not answer for --timeout 40 seconds" in error
    assert_whole_checkpoints(tmp_path)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_data_worker_that_dies_or_freezes_ends_the_run(signal_number, tmp_path):
    process, pids = started(tmp_path, "--num_workers 1 --timeout 15")
    for worker in pids[1:]:
        os.kill(worker, signal_number)
    *_, line = end_of(process, pids)
    assert process.returncode == 1
    assert "data worker" in line and "--num_workers" in line and "--timeout 15 seconds" in line
    assert f"--resume {run_dir(tmp_path).name}" in line
    assert_whole_checkpoints(tmp_path)


def test_a_second_failure_while_a_run_ends_does_not_hide_how_to_go_on(tmp_path):
    """Where two data workers die, the second may be noticed when the first has ended the loop already."""
    (tmp_path / "fails.py").write_text(f"""
import sys; sys.path.insert(0, {str(REPO)!r})
from contextlib import ExitStack
import cli
from config import TrainConfig

def fail(number):
    raise RuntimeError(f"DataLoader worker (pid {{number}}) is killed by signal: Killed.")

def main(config):
    with ExitStack() as resources:
        resources.callback(fail, 2)
        resources.push(lambda kind, error, trace: error.add_note("go on with: ..."))
        fail(1)

cli.run(main, TrainConfig())
""")
    line = run(f"{tmp_path}/fails.py", tmp_path, code=1).stderr
    assert re.fullmatch(r"fails.py: error: .*worker \(pid 2\).*--num_workers.*; go on with: ...\n", line), line


# ---- two at once


def test_a_run_that_is_being_written_to_is_not_resumed_by_another(tmp_path):
    process, _ = started(tmp_path)
    folder = run_dir(tmp_path)
    before = {path: path.read_bytes() for path in (folder / ".lock", folder / "config.yaml")}
    refused = run(f"train.py --resume train_out {ON_2}", tmp_path, code=2).stderr
    assert f"train.py: error: --resume: another process is writing to {folder.name}\n" in refused
    assert refused.count("error") == 1 and "Traceback" not in refused and "another process died" not in refused
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in folder.iterdir()} <= {
        *(".lock", "config.yaml", "checkpoints", "logs", "provenance", "summary.json", "summary.json.tmp"),
        "train.log",
    }
    assert len([*folder.glob("provenance/*.txt")]) == 1
    step = newest(tmp_path)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > step)
    kill_group(process)
    process.communicate()
    process = start("train.py --resume train_out", tmp_path)  # the lock died with its process
    assert any("resumed from" in line for line in process.stdout)
    kill_group(process)
    process.communicate()


# ---- forged checkpoints


class Forged:
    def __reduce__(self):
        return os.mkdir, ("code-was-run",)


@pytest.mark.parametrize("content", [b"", b"no file of torch.save", None])
def test_weights_that_are_damaged_are_named(finished, tmp_path, content: bytes | None):
    damaged, whole_file = tmp_path / "damaged.pt", (finished / "model.pt").read_bytes()
    damaged.write_bytes(whole_file[: len(whole_file) // 2] if content is None else content)
    error = call(f"test.py --out_dir {finished} --checkpoint {damaged}", tmp_path, code=1).stderr
    assert error == f"test.py: error: --checkpoint {damaged}: {damaged} is damaged; `last` or another file may do\n"


def test_a_forged_checkpoint_runs_no_code(whole, killed, tmp_path):
    """Neither a file nor a directory of torch.distributed.checkpoint, whose .metadata is a pickle."""
    cwd = copied(killed, tmp_path)
    *_, file, directory = sorted(cwd.glob("*/checkpoints/step-*.ckpt"))
    torch.save(torch.load(file, weights_only=True) | {"forged": Forged()}, file)
    directory.unlink()
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(Forged()))
    for path in (file, directory):
        error = call(f"test.py --out_dir train_out --checkpoint {path}", cwd, code=2 if path.is_dir() else 1).stderr
        assert "Traceback" not in error and f"--checkpoint {path}" in error
    done = call("train.py --resume auto", cwd)
    assert_same_run(cwd, whole)
    assert f"{file.name}: it is damaged" in done.stderr and f"{directory.name}: it is damaged" in done.stderr
    assert {path.name for path in file.parent.glob("*.damaged")} == {
        f"{file.name}.damaged",
        f"{directory.name}.damaged",
    }
    assert not (cwd / "code-was-run").exists()
    with pytest.raises(FileExistsError):  # the forgery is a good one
        (tmp_path / "code-was-run").mkdir()
        os.chdir(tmp_path)
        pickle.loads((directory.with_name(f"{directory.name}.damaged") / ".metadata").read_bytes())


# ---- no room, no memory


def test_a_full_disk_costs_no_checkpoint(whole, tmp_path):
    def fill(process: subprocess.Popen) -> None:  # no file may grow beyond 5 kB
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5000, 5000))

    done = interrupt(LONG, tmp_path, fill)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert "OSError" in line and f"--resume {run_dir(tmp_path).name}" in line and "Traceback" not in done.stderr
    assert_whole_checkpoints(tmp_path)
    call("train.py --resume train_out", tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_mistake_in_the_dataset_shows_its_traceback_and_one_short_line(tmp_path):
    """Also where a data worker met it: the worker has not died."""
    line = "index = torch.as_tensor(indices)\n"
    mistake = '        if self.shift and 7 in index:\n            raise ValueError("bad 7")\n'
    program = replaced(tmp_path / "program", "data.py", line, line + mistake)
    error = call(f"{program}/train.py {SMALL} --limit_train_batches None --num_workers 1", tmp_path, code=1).stderr
    assert 'data.py", line' in error and "Traceback" in error
    assert error.splitlines()[-1].startswith("train.py: error: ValueError: bad 7")
    assert "data worker" not in error.splitlines()[-1]


def test_parts_without_a_gradient_are_explained_on_several_processes(tmp_path):
    unused = "self.unused = nn.Linear(2, 2)\n        self.layers = nn.Sequential("
    program = replaced(tmp_path / "program", "model.py", "self.layers = nn.Sequential(", unused)
    error = run(f"{program}/train.py {SMALL} {ON_2}", tmp_path, code=1).stderr
    assert "give --strategy ddp_find_unused_parameters_true" in error.splitlines()[-1] and "Traceback" not in error
    run(f"{program}/train.py {SMALL} {ON_2} --strategy ddp_find_unused_parameters_true", tmp_path)


def test_out_of_memory_names_a_smaller_micro_batch_size(tmp_path):
    process = start("train.py --accelerator cpu --effective_batch_size 1200 --width 512", tmp_path)
    wait_for(lambda: process.poll() is not None or list(tmp_path.glob("2*/config.yaml")))
    size = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(process.pid, resource.RLIMIT_AS, (size + 2**28, size + 2**28))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    assert "out of memory: try --micro_batch_size 600 for the same" in error.strip().splitlines()[-1]


# ---- signals


def test_a_second_signal_of_any_kind_ends_at_once(tmp_path):
    repo = replaced(
        tmp_path / "repo",
        "train.py",
        'state["step"] = step\n',
        'state["step"] = step\n        if step == 30:\n            import pathlib, time\n'
        '            pathlib.Path("slow").touch()\n            time.sleep(1000)\n',
    )
    process = start(f"{repo}/{SLOW}", tmp_path)
    wait_for(lambda: process.poll() is not None or (tmp_path / "slow").exists())
    process.terminate()
    time.sleep(1)
    assert process.poll() is None  # it waits for the end of the step
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
