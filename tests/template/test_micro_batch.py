"""tools/micro_batch.py: finds the largest micro-batch that fits, by rehearsals of the real program."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from commands import ON_2, TOOLS, run, start
from edits import insert_after, insert_before
from mistakes import refuses
from processes import children, wait_for

pytestmark = pytest.mark.recipes
FIND = "tools/micro_batch.py --accelerator cpu --width 4"
OUT = 'raise torch.OutOfMemoryError("CUDA out of memory")'
NIGHT = pytest.mark.night


@pytest.fixture
def program(program: Path) -> Path:
    """A copy of the programs, with the script."""
    insert_before(program, "functions", "import os, signal, time\nfrom pathlib import Path\n\n")
    shutil.copytree(TOOLS, program / "tools")
    return program


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
    *sizes, command = found.stdout.splitlines()
    assert sizes == [f"micro_batch_size {each}" for each in ("8: fits", "32: out of memory", "16: fits")]
    assert command == f"next: python train.py {options} --micro_batch_size 16" and not found.stderr
    assert not [*cwd.iterdir()]


@pytest.mark.parametrize(
    "condition, code, options, expected",
    [
        ("len(targets) > 1 and [*Path('runs').glob('.fast_run-*/*/.lock')]", "os.kill(os.getpid(), signal.SIGKILL)",
         "--effective_batch_size 2", ["2: killed", "1: fits"]),
        pytest.param("len(targets) > 3 and os.environ.get('LOCAL_RANK') == '1'", OUT,
                     f"--effective_batch_size 24 {ON_2}", ["4: out of memory", "2: fits", "3: fits"], marks=NIGHT),
        pytest.param("True", OUT, "--effective_batch_size 2", ["2: out of memory", "1: out of memory"], marks=NIGHT),
    ],
    ids=["killed", "one of two devices", "none fits"],
)  # fmt: skip
def test_what_is_out_of_memory_or_killed_does_not_fit(condition, code, options, expected, program, cwd):
    """As Linux kills where the machine is out of memory. The folder of a rehearsal is removed, others stay. The size is
    that of each device."""
    insert_after(program, "batch", f"if model.training and {condition}:\n    {code}")
    (cwd / "runs" / ".fast_run-another" / "run").mkdir(parents=True)
    best = [each.partition(":")[0] for each in expected if "fits" in each][-1:]
    found = run(f"{program}/{FIND} --root_dir runs {options}", cwd, code=0 if best else 1)
    assert re.findall("^micro_batch_size (.+)$", found.stdout, re.MULTILINE) == expected
    if best:
        assert found.stdout.splitlines()[-1].endswith(f"{options} --micro_batch_size {best[0]}")
    else:
        assert found.stderr == "micro_batch.py: error: not even --micro_batch_size 1 fits\n"
    assert [path.name for path in (cwd / "runs").iterdir()] == [".fast_run-another"]


def test_another_failure_is_told_as_it_is(program: Path, cwd: Path):
    fails = "if model.training and len(targets) > 1:\n    raise cli.ConfigError('--width 4: too narrow')"
    insert_after(program, "batch", fails)
    found = run(f"{program}/{FIND} --effective_batch_size 2", cwd, code=2)
    of_train, own = found.stderr.splitlines()
    assert of_train == "train.py: error: --width 4: too narrow" and not found.stdout
    words = "--accelerator cpu --width 4 --effective_batch_size 2 --micro_batch_size=2 --fast_run=4"
    assert re.search(rf"^micro_batch.py: error: .+/train.py {words} ended with exit code 2$", own)


def test_a_signal_ends_it_and_the_rehearsal(program: Path, cwd: Path):
    insert_after(program, "batch", "if model.training:\n    Path('begun').touch(); time.sleep(300)")
    process = start(f"{program}/{FIND} --root_dir runs --effective_batch_size 2", cwd)
    try:
        wait_for((cwd / "begun").exists)
        (rehearsal,) = children(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        printed = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, *printed) == (1, "", "")
    assert not Path(f"/proc/{rehearsal}").exists()
    assert [path.name for path in cwd.iterdir()] == ["begun"]


def test_a_mistake_is_one_line_also_under_a_launcher_and_the_help_has_the_command(cwd: Path, monkeypatch):
    assert "python tools/micro_batch.py --effective_batch_size" in run("tools/micro_batch.py --help", cwd).stdout
    for options, names in {
        "--micro_batch_size 4": "--micro_batch_size:",
        "--num_nodes 2": "one machine",
        "--devices 3 --strategy ddp": "--effective_batch_size 64: 3",
        "--precision 16-mixed": "--precision 16-mixed",
    }.items():
        refuses(f"{FIND} {options}", cwd, *names.split(), how=run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    refuses(f"{FIND} --devices 2", cwd, "one machine", how=run)
