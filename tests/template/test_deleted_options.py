"""The scripts work without the options of the example's data and model, which a user deletes."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from edits import OF_DATA, without_own_options
from helpers import SMALL, TOOLS, run, run_forked_sweep

pytestmark = pytest.mark.recipes
OPTIONS = SMALL.replace("--width 4 ", "")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    program = without_own_options(tmp_path_factory.mktemp("program"), OF_DATA)
    shutil.copytree(TOOLS, program / "tools")
    return program


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory) -> Path:
    """Where two runs are, and the predictions of one."""
    cwd = tmp_path_factory.mktemp("trained")
    for name, options in (("one", "--epochs 1"), ("two", "--epochs 1 --base_lr 2e-3 --seed 2")):
        run(f"{program}/train.py {OPTIONS} {options} --out_dir {name}", cwd)
    run(f"{program}/test.py --out_dir one --predictions", cwd)
    return cwd


def test_a_fork_and_a_step_that_is_looked_at(program, trained):
    run(f"{program}/tools/fork.py --parent one --out_dir fork --epochs 2 --seed 3", trained)
    assert "finished after 8 of 8 steps" in run(f"{program}/train.py --resume fork", trained).stdout
    printed = run(f"{program}/tools/replay.py --out_dir one --step 3", trained).stdout
    assert "step 3" in printed and "loss" in printed


@pytest.mark.parametrize(
    "options", ["", "--group --sort mean", "--diff one two", "--format csv --columns run base_lr", "--filter seed=2"]
)
def test_the_table_of_runs(options: str, program, trained):
    printed = run(f"{program}/tools/runs.py . {options}", trained).stdout
    assert ("0.002" in printed or "two" in printed) and not any(name in printed for name in OF_DATA)


def test_what_a_classifier_confuses(program, trained):
    run(f"{program}/tools/confusion.py --out_dir one", trained)
    assert [*trained.glob("*-one/predictions_test_best.csv")]


def test_the_largest_micro_batch(program, cwd):
    printed = run(f"{program}/tools/micro_batch.py --accelerator cpu --effective_batch_size 2", cwd).stdout
    assert printed.splitlines()[-1].endswith("--effective_batch_size 2 --micro_batch_size 2")


@pytest.mark.skipif(not find_spec("optuna"), reason="needs optuna")
def test_a_sweep(program, cwd):
    (cwd / "sweep.yaml").write_text("base_lr: [1e-3, 2e-3]\n")
    run_forked_sweep(f"sweep.yaml -- {OPTIONS} --max_steps 2", cwd, program=program)
    assert len([*cwd.glob("*/model.pt")]) == 2
    error = run(f"{program}/tools/sweep.py sweep.yaml -- --width 4", cwd, code=2).stderr
    assert error == "sweep.py: error: unknown option --width\n"
