"""tools/average.py: the mean of the newest checkpoints is evaluated like a checkpoint, and is none of the run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import REPO, SMALL, call, run
from edits import replace
from mistakes import refuses
from outputs import flip_a_bit, run_dir, snapshot

pytestmark = pytest.mark.recipes
AVERAGE = "tools/average.py --out_dir train_out"
SAVED = f"{SMALL} --checkpoint_interval 2 --num_checkpoint_keep 5"  # the last five are of the steps 12 to 20
NORM = "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n"


def test_the_mean_is_evaluated_and_is_no_checkpoint_of_the_run(program: Path, cwd: Path):
    """Numbers are averaged in float64, and integers, such as those of a BatchNorm, are those of the newest. A mistake
    changes nothing."""
    replace(program, "first layer", NORM)
    call(f"{program}/train.py {SAVED}", cwd)
    folder = run_dir(cwd)
    path = folder / "checkpoints" / "average-3.ckpt"
    before = snapshot(cwd)
    printed = call(f"{AVERAGE} --num 3", cwd).stdout
    assert "has the mean of steps 20, 18, 16\n" in printed
    content = path.read_bytes()
    assert before == {file: content for file, content in snapshot(cwd).items() if file != path}
    states = [torch.load(path.with_name(f"step-{step:08}.ckpt"))["model"] for step in (16, 18, 20)]
    averaged = torch.load(path)["model"]
    assert averaged.keys() == states[0].keys()
    assert averaged.pop("layers.1.num_batches_tracked") == 20
    for name, tensor in averaged.items():
        assert torch.equal(tensor, torch.stack([state[name] for state in states]).double().mean(0).float())

    command = printed.splitlines()[-1].removeprefix("next: python ")
    call(f"{program}/{command} --accelerator cpu", cwd)
    report = json.loads((folder / "test_test_average-3.json").read_text())
    assert (report["step"], report["num_samples"]) == (20, 380)

    done = call(f"{program}/train.py --resume train_out --epochs 8", cwd)  # neither begins with it nor deletes it
    assert "step-00000020.ckpt" in done.stdout and "finished after 32 of 32 steps" in done.stdout
    assert path.read_bytes() == content and len([*path.parent.glob("step-*.ckpt")]) == 5
    refuses(f"tools/fork.py --parent {path} --out_dir fork", cwd, f"{path}", "whole checkpoint")

    flip_a_bit(folder / "checkpoints" / "step-00000024.ckpt")
    refuses(f"{AVERAGE} --num 1", cwd, "--num 1", "2")
    refuses(f"{AVERAGE} --num 3", cwd, "--num 3", f"{folder.name}/checkpoints/average-3.ckpt")
    refuses(f"{AVERAGE} --num 5", cwd, f"{folder.name}/checkpoints/step-00000024.ckpt", "whole")
    refuses(f"{AVERAGE} --num 6", cwd, "--num 6", folder.name, "5", "--num_checkpoint_keep")


HOOK = """
import os, sys


def hook(event, args):
    if event == "open" and str(args[0]).endswith("step-00000016.ckpt") and os.path.exists(args[0]):
        os.unlink(args[0])
        folder = os.path.dirname(args[0])
        os.link(f"{folder}/step-00000020.ckpt", f"{folder}/step-00000022.ckpt")


sys.addaudithook(hook)
"""


def test_a_run_that_goes_on_may_delete_the_oldest_meanwhile(tmp_path: Path):
    """As soon as it is to be opened; here the newest gets a second name, as if it were a newer one."""
    call(f"train.py {SAVED}", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    done = run(f"{AVERAGE} --num 3", tmp_path, PYTHONPATH=str(tmp_path))
    assert "has the mean of steps 20, 20, 18\n" in done.stdout


def test_the_loop_of_the_page_evaluates_each_checkpoint(tmp_path: Path):
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    folder = run_dir(tmp_path)
    (loop,) = re.findall(r"^for file in RUN.*", (REPO / "tools" / "README.md").read_text(), re.MULTILINE)
    loop = loop.replace("RUN", folder.name).replace("python test.py", f"{sys.executable} {REPO}/test.py")
    subprocess.run(["bash", "-ec", loop], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert {path.stem for path in folder.glob("test_*.json")} == {"test_val_best", "test_val_step-00000004"}
