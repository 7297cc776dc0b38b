"""The bits of a run do not depend on the cores that it gets: a resume keeps its number of threads."""

import pytest
import torch
import yaml
from edits import copy_programs, insert_before, replace
from helpers import LONG, ON_2, SMALL, assert_same_run, call, history, interrupt, kill_group, run, run_dir, weights

TWO = {"OMP_NUM_THREADS": "2"}
# Large enough for torch to compute a sum with both threads.
WIDE = LONG.replace("--width 4", "--width 64").replace("--epochs 10", "--epochs 3")


def threads_of(cwd) -> int:
    return yaml.safe_load((run_dir(cwd) / "config.yaml").read_text())["num_threads"]


@pytest.fixture(scope="module")
def with_two_threads(tmp_path_factory):
    """Where a run with two threads was left alone. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("two")
    printed = run(WIDE, cwd, **TWO).stdout
    assert printed.startswith("1 x cpu, 2 CPU thread(s), ") and threads_of(cwd) == 2
    return cwd


def test_a_run_with_two_threads_is_killed_and_resumed_with_one_core_to_the_same_bits(with_two_threads, tmp_path):
    killed = tmp_path / "killed"
    killed.mkdir()
    stopped = interrupt(f"{WIDE} --num_threads 2", killed, kill_group, after=8)
    assert stopped.returncode < 0
    printed = run("train.py --resume auto", killed, OMP_NUM_THREADS="1").stdout
    assert "2 CPU thread(s)" in printed and "num_threads" not in printed
    assert_same_run(killed, with_two_threads)


def test_with_one_thread_the_bits_are_others(with_two_threads, tmp_path):
    """So the test above can fail."""
    run(WIDE, tmp_path, OMP_NUM_THREADS="1")
    one, two = weights(tmp_path), weights(with_two_threads)
    assert any(not torch.equal(one[name], two[name]) for name in one)


def test_another_number_of_threads_is_listed(tmp_path):
    call(f"train.py {SMALL} --max_steps 4", tmp_path)
    printed = call("train.py --resume auto --max_steps 8 --num_threads 2", tmp_path).stdout
    torch.set_num_threads(1)
    assert "--num_threads 2 instead of 1" in printed and threads_of(tmp_path) == 2


def test_with_another_number_of_processes_the_number_of_threads_stays(tmp_path):
    run(f"train.py {SMALL} --max_steps 4 --num_threads 2", tmp_path)
    printed = run(f"train.py --resume auto --max_steps 8 {ON_2}", tmp_path).stdout
    assert "2 x cpu, 2 CPU thread(s)" in printed and "num_threads" not in printed and threads_of(tmp_path) == 2


def test_the_ranks_take_the_number_of_rank_0_before_the_datasets_are_built(tmp_path, program):
    insert_before(program, "digits", 'print("threads", torch.get_num_threads(), flush=True)')
    shown = run(f"{program}/train.py {SMALL} --max_steps 2 --num_threads 3 {ON_2}", tmp_path).stdout
    assert shown.count("threads 3\n") == 2


def test_an_evaluation_has_the_threads_of_the_run(tmp_path, program):
    call(f"train.py {SMALL} --max_steps 4 --num_threads 2", tmp_path)
    torch.set_num_threads(1)
    insert_before(program, "digits", 'print("threads", torch.get_num_threads(), flush=True)')
    command = f"{program}/test.py --accelerator cpu --out_dir train_out"
    assert "threads 2\n" in run(command, tmp_path).stdout
    assert "threads 1\n" in run(f"{command} --num_threads 1", tmp_path).stdout


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
    insert_before(program, "functions", REPEATED)
    replace(program, "model", "    return Repeated()\n    return Model(")
    command = f"{program}/train.py {SMALL} --max_steps 6 --log_interval 1 --num_threads 2"
    found = {True: [], False: []}
    for deterministic in found:
        for number in range(2):
            cwd = tmp_path / f"{deterministic}{number}"
            cwd.mkdir()
            run(f"{command} --deterministic {deterministic}", cwd)
            found[deterministic].append(str([history(cwd), {k: v.tolist() for k, v in weights(cwd).items()}]))
    assert len(set(found[True])) == 1 and len(set(found[False])) > 1


def test_an_operator_without_a_deterministic_algorithm_is_told_before_anything_is_written(tmp_path, program):
    put = "logits = model(images)\n    logits = logits.put(torch.zeros(2, dtype=torch.int64), logits.new_ones(2))"
    replace(program, "logits", put)
    *_, error, note = run(f"{program}/train.py {SMALL}", tmp_path, code=1).stderr.splitlines()
    assert "does not have a deterministic implementation" in error
    assert note == "--deterministic False trains with this operator, but two equal runs may have other bits"
    assert not [*tmp_path.glob("*-train_out")]
    call(f"{program}/train.py {SMALL} --max_steps 2 --deterministic False", tmp_path)


FLAGS = """
import os
import sys

import torch

from config import TrainConfig
from runtime.launch import prepare_device

prepare_device(TrainConfig(deterministic=sys.argv[1] == "True"), "cuda")
names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
print(torch.backends.cudnn.benchmark, torch._inductor.config.deterministic)
print(*(os.environ.get(name) for name in names))
"""


@pytest.mark.parametrize(
    "deterministic, env, shown",
    [
        (True, {}, "True False\nFalse True\n:4096:8 ^NVLS\n"),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "True False\nFalse True\n:16:8 ^NVLS\n"),
        (False, {}, "False False\nTrue False\nNone None\n"),
    ],
)
def test_a_gpu_gets_deterministic_algorithms_of_torch_cublas_nccl_and_inductor(deterministic, env, shown, program):
    """The flags alone; tests/template/test_gpu.py has what a GPU does with them."""
    copy_programs(program)
    (program / "flags.py").write_text(FLAGS)
    assert run(f"{program}/flags.py {deterministic}", program, **env).stdout == shown
