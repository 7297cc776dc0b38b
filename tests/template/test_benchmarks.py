"""The scripts of benchmarks/ still run: a small part of each, whose times nobody reads. What needs nanoGPT is in
test_benchmark_nanogpt.py."""

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import REPO, run
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.recipes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    return importlib.import_module("gpu")


@pytest.mark.night
@pytest.mark.parametrize("work, peers", [("W1", "raw raw-batched lightning-batched"), ("W1v", "raw limit")])
def test_the_template_is_timed_beside_its_peers(work: str, peers: str, tmp_path: Path):
    script = REPO / "benchmarks" / "run.py"
    done = run(f"{script} --works {work} --peers {peers} --rounds 1 --python {sys.executable}", tmp_path)
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert [row[:2] for row in rows[1:]] == [[work, program] for program in ("template", *peers.split())]
    assert all(float(row[-1]) < 0.01 for row in rows[1:])  # each has learned the digits


def test_the_loader_is_timed_beside_that_of_torch(tmp_path: Path):
    script = REPO / "benchmarks" / "loader.py"
    assert "tensors" in run(f"{script} speed --kinds tensors --workers 0 --rounds 1", tmp_path).stdout


@pytest.mark.night
def test_a_start_is_timed_beside_that_of_a_raw_script(tmp_path: Path):
    printed = run(f"{REPO}/benchmarks/run.py --start_up --rounds 1", tmp_path).stdout
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines()]
    assert [row[0] for row in rows] == ["program", "template", "raw", "help"]
    assert float(rows[3][1]) < float(rows[2][1])


@pytest.mark.night
def test_a_step_on_a_gpu_is_timed_beside_its_peers(tmp_path: Path):
    """Here on a CPU. Each has trained."""
    printed = run(f"{REPO}/benchmarks/gpu.py --cpu --rounds 1 --steps 80", tmp_path).stdout
    losses = dict(re.findall(r"^median +(\w+): .*loss (\d\.\d+)", printed, re.MULTILINE))
    packages = ["lightning", "accelerate"]
    assert [*losses] == ["template", "raw", *filter(find_spec, packages)]
    assert all(float(loss) < 1 for loss in losses.values())
    for name in packages:
        assert (f"{name} is not installed" in printed) == (not find_spec(name))


@pytest.mark.parametrize(
    "options, line",
    [
        ("--cpu --steps 12", "--steps 12: must be a multiple of 8, the number of windows"),
        pytest.param(
            "",
            "torch finds no GPU: give --cpu for a trial",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_the_timing_of_a_gpu_cannot_do_is_one_line(options: str, line: str, tmp_path: Path):
    done = run(f"{REPO}/benchmarks/gpu.py {options}", tmp_path, code=1)
    assert done.stderr == f"{line}\n" and not done.stdout


def test_the_first_windows_are_not_counted(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """They have the start and the compilation. The loss is read at the end of each window of two steps."""
    ends = iter([0.0, 50.0, 60.0, 62.0, 64.0, 66.0, 70.0, 74.0, 78.0])
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(ends))
    clock = gpu.Clock(16)
    for step in range(16):
        assert not clock.is_over()
        clock.tick(torch.tensor(float(step)))
    assert clock.is_over() and clock.figures() == {"ms": 1500.0, "GB": 0.0, "loss": 15.0}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning
@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_a_peer_makes_the_steps_that_are_timed(name: str, gpu: ModuleType, tmp_path: Path, monkeypatch):
    """With two micro-batches each, of which the gradient is the mean. The loss is that of a micro-batch."""
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=2)  # an epoch has two steps
    work = gpu.Work(model, optimizer, loader, lambda model, x, y: (y - model(x)).mean(), "cpu", "32-true")
    work.accumulation = 2
    clock = gpu.Clock(8)
    getattr(gpu, name)(work, clock)
    assert clock.is_over() and len(clock.times) == 1 + 8
    assert model.weight.item() == 8.0 and clock.loss == 1 - 7


@pytest.mark.night
def test_lightning_that_was_killed_in_mid_epoch_trains_some_samples_twice_and_others_never(tmp_path: Path):
    """As benchmarks/README.md says."""
    done = run(f"{REPO}/benchmarks/loader.py lightning", tmp_path)
    assert done.stdout == "19 batches; of 1216 samples 304 came twice, 304 never\n"
    page = (REPO / "benchmarks" / "README.md").read_text()
    assert "it trained on 304 of 1,216 samples twice and skipped 304" in " ".join(page.split())
