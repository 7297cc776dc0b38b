"""tools/average.py: the mean of the newest checkpoints is evaluated like a checkpoint, and is none of the run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edits import replace
from helpers import REPO, SMALL, call, copied, flip_a_bit, run, run_dir, snapshot
from mistakes import refuses

pytestmark = pytest.mark.recipes
AVERAGE = "tools/average.py"
NORM = "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """A program with a BatchNorm."""
    return replace(tmp_path_factory.mktemp("program"), "first layer", NORM)


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory) -> Path:
    """Where a run of it has finished, whose last five checkpoints are of the steps 12 to 20. To be read."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py {SMALL} --checkpoint_interval 2 --num_checkpoint_keep 5", cwd)
    return cwd


@pytest.fixture
def cwd(trained, tmp_path) -> Path:
    """A copy of it."""
    return copied(trained, tmp_path)


def test_the_mean_is_evaluated_and_is_no_checkpoint_of_the_run(cwd, program):
    """Numbers are averaged in float64, and integers are those of the newest."""
    folder = run_dir(cwd)
    path = folder / "checkpoints" / "average-3.ckpt"
    before = snapshot(cwd)
    printed = call(f"{AVERAGE} --out_dir train_out --num 3", cwd).stdout
    assert "has the mean of steps 20, 18, 16\n" in printed
    content = path.read_bytes()
    assert before == {file: content for file, content in snapshot(cwd).items() if file != path}
    states = [torch.load(folder / "checkpoints" / f"step-{step:08}.ckpt")["model"] for step in (16, 18, 20)]
    averaged = torch.load(path)["model"]
    assert averaged.keys() == states[0].keys()
    for name, tensor in averaged.items():
        if name.endswith("num_batches_tracked"):
            assert tensor == 20
        else:
            assert torch.equal(tensor, torch.stack([state[name] for state in states]).double().mean(0).float())

    command = printed.splitlines()[-1].removeprefix("next: python ")
    assert command.startswith("test.py --checkpoint ")
    call(f"{program}/{command} --accelerator cpu", cwd)
    report = json.loads((folder / "test_test_average-3.json").read_text())
    assert (report["step"], report["num_samples"]) == (20, 380)

    done = call(f"{program}/train.py --resume train_out --epochs 8", cwd)  # neither begins with it nor deletes it
    assert "step-00000020.ckpt" in done.stdout and "finished after 32 of 32 steps" in done.stdout
    assert path.read_bytes() == content and len([*path.parent.glob("step-*.ckpt")]) == 5
    refuses(f"tools/fork.py --parent {path} --out_dir fork", cwd, f"{path}", "whole checkpoint")


HOOK = """
import os, sys

FOLDER = {!r}


def hook(event, args):
    if event == "open" and str(args[0]).endswith("step-00000016.ckpt") and os.path.exists(args[0]):
        os.unlink(args[0])
        os.link(f"{{FOLDER}}/step-00000020.ckpt", f"{{FOLDER}}/step-00000022.ckpt")


sys.addaudithook(hook)
"""


def test_a_run_that_goes_on_may_delete_the_oldest_meanwhile(cwd, tmp_path):
    """As soon as it is to be opened; here the newest gets a second name, as if it were a newer one."""
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(str(run_dir(cwd) / "checkpoints")))
    done = run(f"{AVERAGE} --out_dir train_out --num 3", cwd, PYTHONPATH=str(tmp_path))
    assert "has the mean of steps 20, 20, 18\n" in done.stdout


def test_a_mistake_is_one_line_and_nothing_changes(cwd):
    """Here a file of this name is there, and the oldest checkpoint is damaged."""
    folder = run_dir(cwd)
    flip_a_bit(folder / "checkpoints" / "step-00000012.ckpt")
    shutil.copy(folder / "model.pt", folder / "checkpoints" / "average-4.ckpt")
    for options, words in {
        "train_out --num 6": f"--num 6 {folder.name} 5 --num_checkpoint_keep",
        "train_out --num 4": f"--num 4 {folder.name}/checkpoints/average-4.ckpt",
        "train_out --num 5": f"{folder.name}/checkpoints/step-00000012.ckpt whole",
        "train_out --num 1": "--num 1 2",
        "train_out": "--num",
        "gone --num 2": "--out_dir gone",
    }.items():
        refuses(f"{AVERAGE} --out_dir {options}", cwd, *words.split())


def test_the_loop_of_the_page_evaluates_each_checkpoint(tmp_path):
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    folder = run_dir(tmp_path)
    (loop,) = re.findall(r"^for file in RUN.*", (REPO / "tools" / "README.md").read_text(), re.MULTILINE)
    loop = loop.replace("RUN", folder.name).replace("python test.py", f"{sys.executable} {REPO}/test.py")
    subprocess.run(["bash", "-ec", loop], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert {path.stem for path in folder.glob("test_*.json")} == {"test_val_best", "test_val_step-00000004"}
