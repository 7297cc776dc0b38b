"""The recipe prefetch: the next micro-batch is copied on a CUDA stream of its own. A stand-in takes the place of the
streams here; test_gpu.py has what needs a GPU."""

import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from edits import insert_before, with_text
from helpers import LONG, assert_same_run, call, imported, interrupt, kill_group, run, with_recipe

# Streams that wait for nothing, and a loader that takes any device for one that has some.
NO_STREAMS = """
class Stream:
    def __init__(self, device):
        pass

    def wait_stream(self, stream):
        pass


torch.cuda.Stream = torch.cuda.current_stream = Stream
torch.cuda.stream = lambda stream: ExitStack()


"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("prefetch", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    """The program, which loads ahead on a CPU, too."""
    program = with_recipe("prefetch", tmp_path_factory.mktemp("ahead"))
    asks = 'self.fabric.device.type == "cuda":\n            batches = copied_ahead('
    return with_text(
        program,
        "runtime/loader.py",
        ("def start_worker(", f"{NO_STREAMS}def start_worker("),
        (asks, "True:\n            batches = copied_ahead("),
    )


# ---- the streams


def test_each_copy_overlaps_one_computation_and_nothing_else(program: Path, monkeypatch):
    """The loop waits for the copy of its batch, but not for that of the next one. A copy waits for what was computed
    before: the memory that it writes to may be that of an earlier batch."""
    order = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def wait_stream(self, other: "Stream"):
            order.append(f"{self.name} waits for {other.name}")

    def copy(batch: int) -> int:
        order.append(f"copy {batch} on {current[-1]}")
        return batch

    class On:
        def __init__(self, stream: Stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream.name)

        def __exit__(self, *error):
            current.pop()

    current = ["computing"]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", On)
    fabric = SimpleNamespace(device=None, to_device=copy)
    for batch in imported(program, "runtime/loader").copied_ahead(fabric, iter(range(3))):
        order.append(f"compute {batch} on {current[-1]}")
    for_both = ["computing waits for copying", "copying waits for computing"]
    assert order == [
        *[*for_both, "copy 0 on copying"],
        *[*for_both, "copy 1 on copying", "compute 0 on computing"],
        *[*for_both, "copy 2 on copying", "compute 1 on computing"],
        *["computing waits for copying", "compute 2 on computing"],
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_each_batch_comes_once_in_order(count: int, program: Path, monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    fabric = SimpleNamespace(device=None, to_device=lambda batch: batch)
    assert list(imported(program, "runtime/loader").copied_ahead(fabric, iter(range(count)))) == list(range(count))


# ---- runs: the loader is one micro-batch ahead, and the bits are the same


def test_without_a_gpu_no_stream_is_made(program: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: pytest.fail("a stream"))
    call(f"{program}/{LONG} --max_steps 4", tmp_path)


@pytest.mark.recipes
@pytest.mark.parametrize("options", ["", pytest.param("--num_workers 2", marks=pytest.mark.night)])
def test_a_run_with_it_is_that_without_it(options: str, ahead: Path, tmp_path: Path):
    """Also after a kill in the middle of an epoch, when a micro-batch more has been loaded than was trained on."""
    plain, whole, killed = tmp_path / "plain", tmp_path / "whole", tmp_path / "killed"
    for folder in (plain, whole, killed):
        folder.mkdir()
    command = f"{LONG} {options}"
    run(command, plain)
    run(f"{ahead}/{command}", whole)
    assert_same_run(whole, plain)
    assert interrupt(f"{ahead}/{command}", killed, kill_group).returncode == -signal.SIGKILL
    run(f"{ahead}/train.py --resume auto", killed)
    assert_same_run(killed, plain)


@pytest.mark.recipes
def test_nothing_is_loaded_ahead_of_an_epoch(ahead: Path, tmp_path: Path):
    """Its order may depend on the training: it is asked for when the first batch is."""
    copy = Path(shutil.copytree(ahead, tmp_path / "program"))
    asked = 'print(f"order of epoch {epoch}", flush=True)'
    line = '        generator = torch.Generator().manual_seed(zlib.crc32(f"order'
    with_text(copy, "runtime/loader.py", (line, f"        {asked}\n{line}"))
    insert_before(copy, "optimizer steps", 'print(f"step {step}", flush=True)')
    printed = run(f"{copy}/{LONG} --epochs 2", tmp_path).stdout.splitlines()
    found = [line for line in printed if line.startswith(("order", "step "))]
    assert found.index("order of epoch 1") == found.index("step 8") + 1
