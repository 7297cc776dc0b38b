"""The bits of a run do not depend on the cores that it gets, nor on chance: a resume keeps its number of threads, and
torch uses deterministic algorithms."""

import re
from pathlib import Path

from commands import LONG, ON_2, SMALL, folders, run
from comparisons import assert_same_run
from edits import copy_programs, with_edits
from outputs import history, run_dir, weights
from processes import interrupt, kill_group

# Large enough for torch to compute a sum with both threads.
WIDE = LONG.replace("--width 4", "--width 64").replace("--epochs 10", "--epochs 3")


def bits_of(cwd: Path) -> str:
    return str([history(cwd), {name: tensor.tolist() for name, tensor in weights(cwd).items()}])


def test_a_run_with_two_threads_is_killed_and_resumed_with_one_core_to_the_same_bits(tmp_path):
    """With one thread, they are others."""
    one, two, killed = folders(tmp_path, "one", "two", "killed")
    assert run(WIDE, two, OMP_NUM_THREADS="2").stdout.startswith("1 x cpu, 2 CPU thread(s), ")
    assert "\nnum_threads: 2\n" in (run_dir(two) / "config.yaml").read_text()
    run(WIDE, one, OMP_NUM_THREADS="1")
    assert bits_of(one) != bits_of(two)
    assert interrupt(f"{WIDE} --num_threads 2", killed, kill_group, after=8).returncode < 0
    printed = run("train.py --resume auto", killed, OMP_NUM_THREADS="1").stdout
    assert "2 CPU thread(s)" in printed and "num_threads" not in printed
    assert_same_run(killed, two)


def test_all_ranks_and_an_evaluation_have_the_threads_of_the_run_unless_others_are_asked_for(program, cwd):
    """Also while the datasets are built."""
    with_edits(program, {"before digits": 'print("threads", torch.get_num_threads(), flush=True)'})
    resume, test = "train.py --resume auto --max_steps", "test.py --accelerator cpu --checkpoint last"
    for command, told, threads, ranks in (
        (f"train.py {SMALL} --max_steps 4 --num_threads 2", "", 2, 1),
        (f"{resume} 8 {ON_2}", "", 2, 2),
        (f"{resume} 12 {ON_2} --num_threads 3", "--num_threads 3 instead of 2\n", 3, 2),
        (test, "", 3, 1),
        (f"{test} --num_threads 1", "", 1, 1),
    ):
        printed = run(f"{program}/{command}", cwd).stdout
        assert re.findall(r"^threads (\d)$", printed, re.MULTILINE) == [str(threads)] * ranks
        assert told in printed and ("num_threads" in printed) == bool(told)
        assert "test.py" in command or f"{threads} CPU thread(s)" in printed


# ---- algorithms

REPEATED = """
class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 64))
        self.head = nn.Linear(64, 10)
        self.register_buffer("index", torch.randint(50, (100_000,)))
        self.register_buffer("factor", torch.randn(100_000, 1))

    def forward(self, images):
        sums = (self.weight[self.index] * self.factor).mean(0)
        return self.head(sums).expand(len(images), -1) * images.mean((1, 2, 3))[:, None]
"""


def test_a_gradient_of_repeated_indices_is_the_same_each_time(tmp_path, program):
    """With two threads, torch adds in another order each time, unless it is told to be deterministic."""
    with_edits(program, {"before functions": REPEATED, "replace model": "    return Repeated()\n    return Model("})
    command = f"{program}/train.py {SMALL} --max_steps 6 --log_interval 1 --num_threads 2 --logger_name csv"
    one, again, other, another = folders(tmp_path, *"1234")
    for cwd, deterministic in ((one, True), (again, True), (other, False), (another, False)):
        run(f"{command} --deterministic {deterministic}", cwd)
    assert bits_of(one) == bits_of(again) and bits_of(other) != bits_of(another)


FLAGS = """
import os
import sys

import torch

from config import TrainConfig
from runtime.launch import prepare_device

prepare_device(TrainConfig(deterministic=sys.argv[1] == "True"), "cuda")
print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
print(torch.backends.cudnn.benchmark, torch._inductor.config.deterministic)
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_ALGO"))
"""


def test_a_gpu_gets_deterministic_algorithms_of_torch_cublas_nccl_and_inductor(program):
    """The flags alone; tests/template/test_gpu.py has what a GPU does with them."""
    (copy_programs(program) / "flags.py").write_text(FLAGS)
    for deterministic, env, shown in (
        (True, {}, "True False\nFalse True\n:4096:8 ^NVLS\n"),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "True False\nFalse True\n:16:8 ^NVLS\n"),
        (False, {}, "False False\nTrue False\nNone None\n"),
    ):
        assert run(f"{program}/flags.py {deterministic}", program, **env).stdout == shown
