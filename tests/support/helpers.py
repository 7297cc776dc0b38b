"""The tests run the real scripts: in processes of their own, or in that of pytest. What they share is here."""

import csv
import gc
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch
import zygote
from edits import apply, copy_programs, insert_before, replace
from lightning_utilities.core.apply_func import apply_to_collection

REPO = Path(__file__).resolve().parents[2]
RECIPES = REPO / "recipes"
TOOLS = REPO / "tools"
needs_recipes = pytest.mark.skipif(not RECIPES.exists(), reason="recipes/ has been deleted")

if "REAL_RANKS" not in os.environ:
    zygote.PREPARE = str(Path(__file__).with_name("ranks.py"))
# One thread, here and in the processes that are started: sums in the same order, equal in every bit.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores it for jobs in the background, and a run keeps what is ignored: here tests decide on it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and a table of a run is then as narrow
os.environ.pop("PYTHONUNBUFFERED", None)  # print would write the parts of a line apart: those of two ranks mix

# Small enough for a run of a few seconds: 5 epochs of 4 steps, on the CPU.
SMALL = (
    "--accelerator cpu --epochs 5 --limit_train_batches 4 --limit_val_batches 2 --width 4 --num_sanity_val_steps 1 "
    "--warmup_epochs 0.25"
)

# 10 epochs of 8 steps, saved every fourth step, validated and logged once an epoch, four micro-batches a step. The
# constant schedule does not depend on the number of epochs: a run that was made longer can be compared with one that
# was long from the start.
EVERY_FOURTH_STEP = "--checkpoint_frequency 0.5"
LONG = (
    "train.py --accelerator cpu --epochs 10 --limit_train_batches 8 --limit_val_batches 2 --num_sanity_val_steps 0 "
    "--width 4 --micro_batch_size 16 --lr_schedule constant --warmup_epochs 0.125 --logger_name csv "
    f"{EVERY_FOURTH_STEP}"
)
STEPS = 80  # of LONG
SLOW = LONG.replace("--epochs 10", "--epochs 3000")  # never ends by itself
# A new run with two checkpoints: the first is the best, the second is not, and the first goes.
TWO_SAVES = (
    f"train.py {SMALL} --max_steps 4 --checkpoint_interval 2 --val_interval 2 --log_interval 1 --num_checkpoint_keep 1 "
    "--monitor train/grad_norm --monitor_mode max --logger_name csv"
)
ON_2 = "--devices 2 --strategy ddp"
PREEMPTED = 75
MEASURED = ("samples_per_second", "data_wait", "peak_memory_mb")  # what differs from one run to the next
MEASURED_TOKENS = ("tokens_per_second", "mfu")  # likewise, of recipes/methods/language_model.patch
# --standalone: on a free port, with each version of torch; other tests start torchrun at the same time.
TORCHRUN = f"{Path(sys.executable).parent / 'torchrun'} --standalone --nproc_per_node 2"
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # which --max-restarts needs


@pytest.fixture(autouse=True)
def environment():
    """What a test leaves in the environment, as Fabric leaves its seed, goes. It would be in that of all later
    processes, and zygote.py starts a process as a fork only in the environment that the first one had."""
    before = set(os.environ)
    yield
    for name in os.environ.keys() - before:
        del os.environ[name]


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "LT_", "SLURM_"))}


def copy_project_tests(program: Path) -> None:
    """Copies what the tests of a project need into a copy of the programs."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "tests" / "project", program / "tests" / "project", ignore=skipped)
    shutil.copy(REPO / "pyproject.toml", program)


def start(command: str, cwd: Path, repo: Path = REPO, stdout: int = subprocess.PIPE, **env: str) -> subprocess.Popen:
    """Starts `train.py ...`, `test.py ...` or a script of tools/ in `cwd`, as the leader of a process group."""
    script, _, options = command.partition(" ")
    interpreter = "bash" if script.endswith(".sh") else sys.executable
    return zygote.popen(
        [interpreter, str(repo / script), *options.split()],
        cwd=cwd,
        env=clean_environment() | env,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(command: str, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Runs it to its end and checks the exit code."""
    process = start(command, cwd, **env)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, f"{command}\nexit code {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_forked_sweep(words: str, cwd: Path, code: int = 0, program: Path = REPO) -> subprocess.CompletedProcess:
    """Runs tools/sweep.py, whose runs are forks: for a sweep that is left alone."""
    return run(f"tests/support/forked_sweep.py {program} {words}", cwd, code, ZYGOTE_CHANNEL="")


def call(command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    """As `run`, but in this process, which has imported torch: that takes a process of its own 3 seconds. The programs
    themselves are imported anew. For runs of one process that get no signal."""
    script, _, options = command.partition(" ")
    path, out, err = REPO / script, io.StringIO(), io.StringIO()
    programs = {file.stem for folder in (REPO, path.parent) for file in folder.glob("*.py")} | {"runtime"}
    if path.parent not in (REPO, TOOLS):
        programs |= {folder.name for folder in path.parent.iterdir() if folder.is_dir()}  # packages of its own
    modules = taken(programs)
    environment = dict(os.environ)
    num_threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in os.environ.keys() - clean_environment().keys():
                del os.environ[name]
            patch.chdir(cwd)
            patch.setattr(sys, "argv", [str(path), *options.split()])
            patch.syspath_prepend(path.parent)
            patch.setattr(sys, "dont_write_bytecode", True)  # a program that is edited within a second is read again
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(path), run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(environment)
        taken(programs)
        sys.modules.update(modules)
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(num_threads)
        gc.enable()
        gc.unfreeze()
    found = ended.value.code or 0
    assert found == code, f"{command}\nexit code {found}\n{out.getvalue()}\n{err.getvalue()}"
    return subprocess.CompletedProcess(command, found, out.getvalue(), err.getvalue())


def execute(command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    """As `call`, or, where the command asks for two processes, as `run`."""
    return (run if "--devices 2" in command else call)(command, cwd, code)


def run_in(folder: Path, *commands: str) -> Path:
    """Executes the commands in a new folder, and returns it."""
    folder.mkdir()
    for command in commands:
        execute(command, folder)
    return folder


def refused(command: str, cwd: Path, code: int = 1) -> str:
    """What a command says that ends with this code and leaves nothing behind."""
    error = execute(command, cwd, code).stderr
    assert list(cwd.iterdir()) == []
    return error


def taken(programs: set[str]) -> dict:
    """Takes these modules, and those within them, out of the list of what was imported."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in programs}


def run_dir(cwd: Path, name: str = "train_out") -> Path:
    """The one run directory of that name."""
    (found,) = [path for path in cwd.iterdir() if path.name.endswith(f"-{name}")]
    return found


def folders(parent: Path, *names: str) -> list[Path]:
    """Makes folders of these names."""
    found = [parent / name for name in names]
    for each in found:
        each.mkdir()
    return found


def wait_for(condition, seconds: float = 300):
    """Waits until condition() is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def interrupt(command: str, cwd: Path, stop, after: int = 16) -> subprocess.CompletedProcess:
    """Starts the command and calls stop(process) once a checkpoint of the middle of an epoch is there."""
    process = start(command, cwd)
    try:
        wait_for(lambda: process.poll() is not None or (newest(cwd) > after and newest(cwd) % 8 in (2, 4)))
        assert process.poll() is None, process.communicate()
        stop(process)
        out, err = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            kill_group(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def terminate(process: subprocess.Popen) -> None:
    process.terminate()


def terminate_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def terminate_rank_1(process: subprocess.Popen) -> None:
    os.kill(children(process.pid)[0], signal.SIGTERM)


def newest(cwd: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem[5:]) for path in cwd.glob("*/checkpoints/step-*.ckpt")), default=0)


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
    """Waits until all processes are gone, and returns the lines on stderr, without those of progress, which come where
    a run takes more than half a minute. What is left is killed."""
    try:
        error = process.communicate(timeout=300)[1]
        wait_for(lambda: not any(map(is_running, pids)))
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    return [line for line in error.strip().splitlines() if not re.match(r" *\d+%\|", line)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def flip_a_bit(path: Path) -> None:
    """Of the largest tensor: between tensors there are bytes that nobody reads."""
    largest = max(torch.load(path)["model"].values(), key=torch.numel)
    data = bytearray(path.read_bytes())
    data[data.index(largest.numpy().tobytes())] ^= 1
    path.write_bytes(data)


def is_lost(line: str, timeout: int) -> bool:
    """Whether it is all that a rank has to say when the connection to another one is lost."""
    words = f"another process has ended, or did not answer for --timeout {timeout} seconds: see its message"
    place = r"this rank waited in [\w/]+\.py:\d+"
    more = "; the checkpoints are whole, continue with: python train.py --resume .+"
    return bool(re.fullmatch(rf"train.py: error: rank \d: {words} \(.+?\); {place}({more})?", line))


def start_two(commands: list[str], cwd: Path, **env: str) -> list[subprocess.Popen]:
    """Two nodes with a process each, which nothing but the command has launched: they must notice each other's end."""
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(f"{command} --num_nodes 2 --devices 1", cwd, NODE_RANK=str(rank), **env)
        for rank, command in enumerate(commands)
    ]


def assert_whole_checkpoints(cwd: Path) -> None:
    assert [torch.load(path, weights_only=True) for path in cwd.glob("*/checkpoints/*.ckpt")]


def assert_stopped_and_saved(done: subprocess.CompletedProcess, cwd: Path) -> None:
    """The run says that it was stopped, after which step, and how to go on; and has a checkpoint of that step."""
    assert done.returncode == PREEMPTED, done.stderr
    step = int(re.search(r"stopped after (\d+) of", done.stdout)[1])
    assert step == newest(cwd) < STEPS
    assert f"--resume {run_dir(cwd).name}" in done.stdout
    assert not (run_dir(cwd) / "model.pt").exists()
    assert "Traceback" not in done.stderr


def how_to_go_on(cwd: Path) -> str:
    """What a run says at its end if it is not finished."""
    return f"the checkpoints are whole, continue with: python train.py --resume {run_dir(cwd).name}"


def checkpoint(cwd: Path, name: str) -> dict:
    return torch.load(run_dir(cwd) / "checkpoints" / f"{name}.ckpt", weights_only=True)


def state_of(path: Path) -> dict:
    """What a checkpoint has of the state, its tensors as lists."""
    found = torch.load(path, weights_only=True)
    found.pop("checkpoint", None)
    return apply_to_collection(found, torch.Tensor, torch.Tensor.tolist)


def weights(cwd: Path, name: str = "train_out") -> dict[str, torch.Tensor]:
    return torch.load(run_dir(cwd, name) / "model.pt", weights_only=True)


def results(program: Path, cwd: Path, options: str = "--checkpoint last --split val") -> dict:
    """What test.py with these options finds of the one run in `cwd`."""
    for path in run_dir(cwd).glob("test_*.json"):
        path.unlink()
    execute(f"{program}/test.py --accelerator cpu {options}", cwd)
    (path,) = run_dir(cwd).glob("test_*.json")
    return json.loads(path.read_text())["results"]


def predictions_of(cwd: Path) -> list[torch.Tensor]:
    """What test.py has kept by --predictions of the one run in `cwd`, at one checkpoint."""
    (path,) = run_dir(cwd).glob("predictions_*.pt")
    return torch.load(path, weights_only=True)


def last_summary(cwd: Path) -> dict:
    return json.loads((run_dir(cwd) / "summary.json").read_text())


def set_running(folder: Path) -> None:
    """Makes a finished run as a kill before its last change of a file leaves it."""
    path = folder / "summary.json"
    assert '"state": "finished"' in path.read_text()
    path.write_text(path.read_text().replace('"state": "finished"', '"state": "running"'))


def history(cwd: Path) -> list[dict]:
    """The rows of metrics.csv without what is measured of the process."""
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in MEASURED + MEASURED_TOKENS} for row in csv.DictReader(file)]


def rows(cwd: Path) -> list[dict]:
    """The rows of metrics.csv as numbers; a step without a validation has no val/..."""
    with open(run_dir(cwd) / "logs" / "csv" / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def read_tensorboard(folder: Path):
    """What TensorBoard reads of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return board


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


def save_as_of(device: str, folder: Path) -> None:
    """Makes the checkpoints of a run those that another machine has saved on this device."""
    for path in folder.glob("checkpoints/*.ckpt"):
        saved = torch.load(path, map_location="cpu", weights_only=True)  # two names may be of one file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: device)
            torch.save(saved, path)


def assert_same_best(cwd: Path, other: Path) -> None:
    """best.ckpt is of the same step, with the same weights."""
    ours, theirs = (checkpoint(path, "best") for path in (cwd, other))
    assert ours["step"] == theirs["step"]
    torch.testing.assert_close(ours["model"], theirs["model"], atol=0, rtol=0)


def assert_same_training(cwd: Path, other: Path) -> None:
    """Weights that agree up to the rounding of a sum, and each step once in the logs."""
    assert_same_weights(weights(cwd), weights(other), atol=1e-5)
    assert [row["step"] for row in history(cwd)] == [row["step"] for row in history(other)]


def snapshot(cwd: Path) -> dict:
    """Contents and times of all files."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cwd.rglob("*") if path.is_file()}


def without_locks(cwd: Path) -> dict:
    """The same without the files that say which process has a run: to ask for a lock changes its time."""
    return {path: content for path, content in snapshot(cwd).items() if path.name != ".lock"}


def copied(cwd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cwd, tmp_path / "copy"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def section(page: str, heading: str) -> str:
    """What stands under a heading of a page."""
    text = (REPO / page).read_text()
    (found,) = re.findall(rf"^(##+) {re.escape(heading)}\n(.*?)(?=^## |^\1 |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1]


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """The code in a language that a page of the documentation shows, or that under a heading of it."""
    text = section(page, heading) if heading else (REPO / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def diffs(page: str, heading: str = "") -> list[str]:
    """The edits that a page shows, or those under a heading of it."""
    return blocks(page, "diff", heading)


def diff(page: str, heading: str) -> str:
    """The one edit under a heading."""
    (found,) = diffs(page, heading)
    return found


def edited(diff: str, folder: Path) -> Path:
    """A copy of the programs in `folder`, with the edit made."""
    return apply(diff, copy_programs(folder))


def patch_of(name: str) -> Path:
    if not RECIPES.exists():
        pytest.skip("recipes/ has been deleted")
    (path,) = RECIPES.glob(f"*/{name}.patch")
    return path


def with_patch(patch: Path, folder: Path) -> Path:
    """A copy of the programs in `folder`, with the patch applied."""
    return edited(patch.read_text(), folder)


def with_recipe(name: str, folder: Path) -> Path:
    return with_patch(patch_of(name), folder)


TIED = """
class Model(Model):
    def __init__(self, *args):
        super().__init__(*args)
        self.layers[2].weight = self.layers[1].weight


"""


def with_tied_weights(program: Path) -> Path:
    """Two layers more, whose weights are one tensor."""
    line = "nn.Conv2d(channels, width, 3, padding=1),\n"
    replace(program, "first layer", line + "nn.Conv2d(width, width, 3, padding=1),\n" * 2)
    return insert_before(program, "functions", TIED)


def imported(program: Path, name: str) -> ModuleType:
    """A module of a program that imports no other of it."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_recipe", program / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported_train(program: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """train.py of a program, and what it imports, in place of those of the repository."""
    patch.syspath_prepend(program)
    for name in ("train", "config", "model", "data"):
        patch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("train")


def generator(seed: int = 0) -> torch.Generator:
    """One of its own, on the CPU."""
    return torch.Generator().manual_seed(seed)


def sizes_of_outputs(compute_loss, model: torch.nn.Module, batch) -> list[tuple]:
    """The sizes of the tensors that leave the model in compute_loss."""
    found = []
    with model.register_forward_hook(lambda module, given, output: found.append(output)):
        compute_loss(model, batch, None)
    (output,) = found
    parts = output if isinstance(output, tuple) else (output,)
    return [tuple(part.shape) for part in parts if part is not None]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Where a test puts its copy of the programs."""
    return tmp_path / "program"


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """An empty folder beside the program."""
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Where a run was never interrupted. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("whole")
    call(LONG, cwd)
    return cwd


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory) -> Path:
    """Where a run of TWO_SAVES was never interrupted. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("two_saves")
    call(TWO_SAVES, cwd)
    return cwd


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Where a run was killed in the middle of an epoch. To be copied."""
    cwd = tmp_path_factory.mktemp("killed")
    assert interrupt(LONG, cwd, kill_group).returncode == -signal.SIGKILL
    return cwd


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a small finished run, to be read, not changed."""
    cwd = tmp_path_factory.mktemp("finished")
    call(f"train.py {SMALL}", cwd)
    return run_dir(cwd)
