"""tools/micro_batch.py: finds the largest micro-batch that fits, by rehearsals of the real program."""

import importlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from edits import insert_after, insert_before
from helpers import ON_2, SMALL, TOOLS, children, run, start, wait_for
from mistakes import refuses

pytestmark = pytest.mark.recipes
FIND = "tools/micro_batch.py --accelerator cpu --width 4"
OUT = 'raise torch.OutOfMemoryError("CUDA out of memory")'
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def program(program: Path) -> Path:
    """A copy of the programs, with the script."""
    insert_before(program, "functions", "import os, signal, time\nfrom pathlib import Path\n\n")
    shutil.copytree(TOOLS, program / "tools")
    return program


def tried(printed: str) -> list[tuple]:
    """Each size that was tried, and the result, in their order."""
    return re.findall(r"^micro_batch_size (\d+): (.+)$", printed, re.MULTILINE)


@pytest.mark.night
def test_the_largest_that_fits_into_a_limit_of_memory_is_found(program: Path, cwd: Path):
    """Of real memory: each sample of a training step takes 64 MiB of the address space. There is room for 20."""
    room = "ballast = torch.empty(len(targets) if model.training else 0, 2**26, dtype=torch.uint8)"
    insert_after(program, "batch", room)
    insert_before(program, "run is finished", 'print([line for line in open("/proc/self/status") if "VmPeak" in line])')
    options = "--accelerator cpu --width 4 --effective_batch_size 64"
    one = run(f"{program}/train.py {options} --fast_run --micro_batch_size 1", cwd, REAL="1").stdout  # not a fork
    limit = int(re.search(r"VmPeak:\\t +(\d+) kB", one)[1]) + 19 * 2**16
    (program / "find.sh").write_text(f"ulimit -v {limit}\n{sys.executable} {program}/tools/micro_batch.py {options}\n")
    found = run(f"{program}/find.sh", cwd)
    assert tried(found.stdout) == [("8", "fits"), ("32", "out of memory"), ("16", "fits")] and not found.stderr
    assert found.stdout.splitlines()[-1] == f"next: python train.py {options} --micro_batch_size 16"
    assert not [*cwd.iterdir()]


@pytest.mark.parametrize(
    "point, condition, code, options, expected, best",
    [
        pytest.param("batch", "model.training and len(targets) > 1", KILL, "--effective_batch_size 2",
                     ["2: killed", "1: fits"], 1, id="killed while its folder is empty"),
        pytest.param("step is done", "plan.micro_batch_size > 1", KILL, "--effective_batch_size 2",
                     ["2: killed", "1: fits"], 1, id="killed", marks=pytest.mark.night),
        pytest.param("batch", "model.training and len(targets) > 3 and os.environ.get('LOCAL_RANK') == '1'", OUT,
                     f"--effective_batch_size 24 {ON_2}", ["4: out of memory", "2: fits", "3: fits"], 3,
                     id="one of two devices", marks=pytest.mark.night),
        pytest.param("batch", "model.training", OUT, "--effective_batch_size 2",
                     ["2: out of memory", "1: out of memory"], None, id="none fits", marks=pytest.mark.night),
    ],
)  # fmt: skip
def test_what_is_out_of_memory_or_killed_does_not_fit(point, condition, code, options, expected, best, program, cwd):
    """As Linux kills where the machine is out of memory. The folder of a rehearsal is removed, others stay. The size is
    that of each device, and the command that is told runs."""
    insert_after(program, point, f"if {condition}:\n    {code}")
    (cwd / "runs" / ".fast_run-another" / "run").mkdir(parents=True)
    found = run(f"{program}/{FIND} --root_dir runs {options}", cwd, code=0 if best else 1)
    assert [": ".join(each) for each in tried(found.stdout)] == expected
    if best:
        command = found.stdout.splitlines()[-1].removeprefix("next: python ")
        assert command.endswith(f"{options} --micro_batch_size {best}")
        if ON_2 in options:
            assert "3 micro_batch_size x 4 grad_accum_steps" in run(f"{program}/{command} --fast_run", cwd).stdout
    else:
        assert found.stderr == "micro_batch.py: error: not even --micro_batch_size 1 fits\n"
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
        pytest.param("os.kill(os.getpid(), signal.SIGBUS)", ".+ exit code -7", 1, marks=pytest.mark.night),
    ],
)
def test_another_failure_is_told_as_it_is(code: str, message: str, exit_code: int, program: Path, cwd: Path):
    insert_after(program, "batch", f"if model.training and len(targets) > 1:\n    {code}")
    found = run(f"{program}/{FIND} --effective_batch_size 2", cwd, code=exit_code)
    assert re.search(f"^{message}$", found.stderr, re.MULTILINE) and not found.stdout
    words = "--accelerator cpu --width 4 --effective_batch_size 2 --micro_batch_size=2 --fast_run=4"
    assert re.search(rf"^micro_batch.py: error: .+/train.py {words} ended with", found.stderr.splitlines()[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.night)])
def test_a_signal_ends_it_and_the_rehearsal(number: int, program: Path, cwd: Path):
    insert_after(program, "batch", "if model.training:\n    Path('begun').touch(); time.sleep(300)")
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
    "options, names",
    [
        ("--micro_batch_size 4", "--micro_batch_size:"),
        ("--fast_run", "--fast_run:"),
        ("--resume auto", "--fast_run: --resume"),
        ("--epohcs 4", "--epohcs --epochs?"),
        ("--num_nodes 2", "one machine"),
        ("WORLD_SIZE", "one machine"),
        ("--devices 3 --strategy ddp", "--effective_batch_size 64: 3"),
        ("--precision 16-mixed", "--precision 16-mixed"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(options: str, names: str, cwd: Path, monkeypatch):
    if options == "WORLD_SIZE":
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        options = "--devices 2"
    refuses(f"{FIND} {options}", cwd, *names.split(), how=run)


def test_the_help_has_the_command(cwd: Path):
    assert "python tools/micro_batch.py --effective_batch_size" in run("tools/micro_batch.py --help", cwd).stdout
