"""tools/micro_batch.py: finds the largest micro-batch that fits, by rehearsals of the real program."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from edits import insert_after, insert_before
from helpers import ON_2, SMALL, TOOLS, children, clean_environment, run, start, wait_for

pytestmark = pytest.mark.recipes
FIND = "tools/micro_batch.py --accelerator cpu --width 4"
OUT_OF_MEMORY = 'raise torch.OutOfMemoryError("CUDA out of memory")'


@pytest.fixture
def program(program: Path) -> Path:
    """A copy of the programs, with the script."""
    insert_before(program, "functions", "import os, signal, time\nfrom pathlib import Path\n\n")
    shutil.copytree(TOOLS, program / "tools")
    return program


def failing_above(size: int, code: str, program: Path) -> Path:
    """The program fails so in a training step with a larger micro-batch."""
    return insert_after(program, "batch", f"if model.training and len(targets) > {size}:\n    {code}")


def tried(printed: str) -> dict[int, str]:
    """The result of each size that was tried, in their order."""
    return {int(size): result for size, result in re.findall(r"^micro_batch_size (\d+): (.+)$", printed, re.MULTILINE)}


def last_line(printed: str) -> str:
    return printed.splitlines()[-1]


@pytest.mark.night
def test_the_largest_that_fits_into_a_limit_of_memory_is_found(program: Path, cwd: Path):
    """Of real memory: each sample of a training step takes 64 MiB of the address space. There is room for 20."""
    room = "ballast = torch.empty(len(targets) if model.training else 0, 2**26, dtype=torch.uint8)"
    insert_after(program, "batch", room)
    insert_before(program, "run is finished", 'print([line for line in open("/proc/self/status") if "VmPeak" in line])')
    options = "--accelerator cpu --width 4 --effective_batch_size 64"
    environment = clean_environment()
    one = [sys.executable, program / "train.py", *options.split(), "--fast_run", "--micro_batch_size", "1"]
    printed = subprocess.run(one, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout
    limit = int(re.search(r"VmPeak:\\t +(\d+) kB", printed)[1]) + 19 * 2**16
    found = subprocess.run(
        ["bash", "-c", f"ulimit -v {limit}; exec {sys.executable} {program}/tools/micro_batch.py {options}"],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0 and not found.stderr, found.stderr
    assert tried(found.stdout) == {8: "fits", 32: "out of memory", 16: "fits"}
    assert last_line(found.stdout) == f"next: python train.py {options} --micro_batch_size 16"
    assert not [*cwd.iterdir()]


@pytest.mark.night
def test_on_two_devices_the_size_is_that_of_each(program: Path, cwd: Path):
    """One of them is out of memory. The command that is told runs."""
    failing_above(3, f"if int(os.environ.get('LOCAL_RANK', 0)) == 1: {OUT_OF_MEMORY}", program)
    found = run(f"{program}/{FIND} --effective_batch_size 24 {ON_2}", cwd)
    assert tried(found.stdout) == {4: "out of memory", 2: "fits", 3: "fits"}
    command = last_line(found.stdout).removeprefix("next: python ")
    assert command.endswith(f"--effective_batch_size 24 {ON_2} --micro_batch_size 3")
    assert not [*cwd.iterdir()]
    assert "3 micro_batch_size x 4 grad_accum_steps" in run(f"{program}/{command} --fast_run", cwd).stdout


@pytest.mark.night
def test_where_nothing_fits_it_says_so(program: Path, cwd: Path):
    failing_above(0, OUT_OF_MEMORY, program)
    found = run(f"{program}/{FIND} --effective_batch_size 2", cwd, code=1)
    assert tried(found.stdout) == {2: "out of memory", 1: "out of memory"}
    assert found.stderr == "micro_batch.py: error: not even --micro_batch_size 1 fits\n"


@pytest.mark.parametrize("point", ["batch", pytest.param("step is done", marks=pytest.mark.night)])
def test_a_rehearsal_that_is_killed_does_not_fit_and_is_removed(point: str, program: Path, cwd: Path):
    """As Linux kills where the machine is out of memory. Its folder is empty at first. Others stay."""
    condition = "len(targets) > 1 and model.training" if point == "batch" else "plan.micro_batch_size > 1"
    insert_after(program, point, f"if {condition}:\n    os.kill(os.getpid(), signal.SIGKILL)")
    (cwd / "runs" / ".fast_run-another" / "run").mkdir(parents=True)
    found = run(f"{program}/{FIND} --root_dir runs --effective_batch_size 2", cwd)
    assert tried(found.stdout) == {2: "killed", 1: "fits"}
    assert [path.name for path in (cwd / "runs").iterdir()] == [".fast_run-another"]


def test_the_folder_of_a_rehearsal_that_goes_on_is_not_removed(program: Path, cwd: Path, monkeypatch):
    insert_after(program, "step is done", "Path('begun').touch(); time.sleep(300)")
    process = start(f"{program}/train.py {SMALL} --fast_run", cwd)
    try:
        wait_for((cwd / "begun").exists)
        (folder,) = cwd.glob(".fast_run-*")
        monkeypatch.syspath_prepend(TOOLS)
        module = importlib.import_module("micro_batch")
        module.remove(folder)
        assert [*folder.glob("*/config.yaml")]
    finally:
        process.kill()
        process.communicate()
    module.remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    "code, message, exit_code",
    [
        ("raise cli.ConfigError('--width 4: too narrow')", "train.py: error: --width 4: too narrow", 2),
        pytest.param("raise ValueError('wrong shape')", "ValueError: wrong shape", 1, marks=pytest.mark.night),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGBUS)",
            "micro_batch.py: error: .+ ended with exit code -7",
            1,
            marks=pytest.mark.night,
        ),
    ],
)
def test_another_failure_is_told_as_it_is(code: str, message: str, exit_code: int, program: Path, cwd: Path):
    failing_above(1, code, program)
    found = run(f"{program}/{FIND} --effective_batch_size 2", cwd, code=exit_code)
    assert re.search(f"^{message}$", found.stderr, re.MULTILINE) and not found.stdout
    words = "--accelerator cpu --width 4 --effective_batch_size 2 --micro_batch_size=2 --fast_run=4"
    assert re.search(rf"^micro_batch.py: error: .+/train.py {words} ended with", last_line(found.stderr))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.night)])
def test_a_signal_ends_it_and_the_rehearsal(number: int, program: Path, cwd: Path):
    failing_above(0, "Path('begun').touch(); time.sleep(300)", program)
    process = start(f"{program}/{FIND} --root_dir runs --effective_batch_size 2", cwd)
    try:
        wait_for((cwd / "begun").exists)
        (rehearsal,) = children(process.pid)
        os.kill(process.pid, number)
        printed = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, *printed) == (1, "", "")
    assert not Path(f"/proc/{rehearsal}").exists()
    assert [path.name for path in cwd.iterdir()] == ["begun"]


@pytest.mark.parametrize(
    "options, message, env",
    [
        ("--micro_batch_size 4", "--micro_batch_size: is given to train.py by this script", {}),
        ("--fast_run", "--fast_run: is given to train.py by this script", {}),
        ("--resume auto", "--fast_run: rehearses a new run, so it does not go with --resume", {}),
        ("--epohcs 4", "unknown option --epohcs; did you mean --epochs?", {}),
        ("--num_nodes 2", "run it on one machine, by python alone", {}),
        ("--devices 2", "run it on one machine, by python alone", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}),
        ("--devices 3 --strategy ddp", "--effective_batch_size 64: is not a multiple of 3 device(s)", {}),
        ("--precision 16-mixed", "--accelerator cpu --precision 16-mixed: 16-mixed needs a CUDA GPU", {}),
    ],
)
def test_a_mistake_in_the_options_is_one_line(options: str, message: str, env: dict, cwd: Path):
    error = run(f"{FIND} {options}", cwd, code=2, **env).stderr
    assert error.startswith(f"micro_batch.py: error: {message}") and error.count("\n") == 1
    assert not [*cwd.iterdir()]


def test_the_help_has_the_command(cwd: Path):
    assert "python tools/micro_batch.py --effective_batch_size" in run("tools/micro_batch.py --help", cwd).stdout
