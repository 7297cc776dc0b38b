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
from helpers import REPO, SMALL, call, copied, flip_a_bit, run, run_dir, snapshot, without_locks

pytestmark = pytest.mark.recipes
AVERAGE = "tools/average.py"
EVERY_SECOND_STEP = "--checkpoint_interval 2 --num_checkpoint_keep 5"
NORM = "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Where a run with a BatchNorm has finished, whose last five checkpoints are of the steps 12 to 20. To be read."""
    cwd = tmp_path_factory.mktemp("trained")
    program = replace(tmp_path_factory.mktemp("program"), "first layer", NORM)
    call(f"{program}/train.py {SMALL} {EVERY_SECOND_STEP}", cwd)
    return cwd


def saved(folder: Path, step: int) -> dict:
    return torch.load(folder / "checkpoints" / f"step-{step:08}.ckpt")


def test_numbers_are_averaged_in_float64_and_integers_are_those_of_the_newest(trained, tmp_path):
    cwd = copied(trained, tmp_path)
    folder = run_dir(cwd)
    before = snapshot(cwd)
    done = call(f"{AVERAGE} --root_dir {cwd} --out_dir train_out --num 3", tmp_path)
    assert "has the mean of steps 20, 18, 16\n" in done.stdout
    path = folder / "checkpoints" / "average-3.ckpt"
    assert before == {file: content for file, content in snapshot(cwd).items() if file != path}
    states = [saved(folder, step)["model"] for step in (16, 18, 20)]
    averaged = torch.load(path)["model"]
    assert averaged.keys() == states[0].keys()
    for name, tensor in averaged.items():
        expected = states[-1][name]
        if name.endswith("num_batches_tracked"):
            assert expected == 20 and tensor == 20
            continue
        mean = torch.stack([state[name] for state in states]).double().mean(0)
        assert tensor.dtype == expected.dtype and not torch.equal(tensor, expected)
        assert torch.equal(tensor, mean.float())


def test_it_is_evaluated_by_the_last_line(trained, tmp_path):
    """Far from the values of any single checkpoint, where one is far from the others."""
    cwd = copied(trained, tmp_path)
    program = replace(tmp_path / "program", "first layer", NORM)
    *_, last = call(f"{AVERAGE} --out_dir train_out --num 2", cwd).stdout.splitlines()
    assert last.startswith("next: python test.py --checkpoint ")
    call(f"{program}/{last.removeprefix('next: python ')} --accelerator cpu", cwd)
    found = json.loads((run_dir(cwd) / "test_test_average-2.json").read_text())
    assert found["step"] == 20 and found["num_samples"] == 380
    call(f"{program}/test.py --out_dir train_out --checkpoint average-2 --accelerator cpu", cwd)
    assert json.loads((run_dir(cwd) / "test_test_average-2.json").read_text()) == found | {
        "checkpoint": found["checkpoint"]
    }


def test_a_resume_neither_begins_with_it_nor_deletes_it(trained, tmp_path):
    cwd = copied(trained, tmp_path)
    call(f"{AVERAGE} --out_dir train_out --num 5", cwd)
    path = run_dir(cwd) / "checkpoints" / "average-5.ckpt"
    content = path.read_bytes()
    program = replace(tmp_path / "program", "first layer", NORM)
    done = call(f"{program}/train.py --resume train_out --epochs 8", cwd)
    assert "step-00000020.ckpt" in done.stdout and "finished after 32 of 32 steps" in done.stdout
    assert path.read_bytes() == content
    assert len([*path.parent.glob("step-*.ckpt")]) == 5
    error = call(f"tools/fork.py --parent {path} --out_dir fork", cwd, code=2).stderr
    assert error == f"fork.py: error: {path}: is not a whole checkpoint\n"


def test_a_run_that_goes_on_may_delete_the_oldest_meanwhile(trained, tmp_path):
    """As soon as it is to be opened; here the newest gets a second name, as if it were a newer one."""
    cwd = copied(trained, tmp_path)
    folder = run_dir(cwd) / "checkpoints"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"old, new = {str(folder / 'step-00000016.ckpt')!r}, {str(folder / 'step-00000022.ckpt')!r}\n"
        "def hook(event, args):\n"
        "    if event == 'open' and str(args[0]).endswith('step-00000016.ckpt') and os.path.exists(old):\n"
        "        os.unlink(old)\n"
        f"        os.link({str(folder / 'step-00000020.ckpt')!r}, new)\n"
        "sys.addaudithook(hook)\n"
    )
    done = run(f"{AVERAGE} --out_dir train_out --num 3", cwd, PYTHONPATH=str(tmp_path))
    assert "has the mean of steps 20, 20, 18\n" in done.stdout


MISTAKES = {
    "--num 6": "--num 6: FOLDER has 5 checkpoints step-*.ckpt; --num_checkpoint_keep of train.py keeps more",
    "--num 4": "--num 4: FOLDER/checkpoints/average-4.ckpt is there already; rename or delete it",
    "--num 5": "FOLDER/checkpoints/step-00000012.ckpt: is not a whole checkpoint",
    "--num 1": "--num 1: must be at least 2",
    "": "the following arguments are required: --num",
}


@pytest.mark.parametrize("options, message", MISTAKES.items())
def test_a_mistake_is_one_line_and_nothing_changes(options: str, message: str, trained, tmp_path):
    """Here a file of this name is there, and the oldest checkpoint is damaged."""
    cwd = copied(trained, tmp_path)
    folder = run_dir(cwd)
    flip_a_bit(folder / "checkpoints" / "step-00000012.ckpt")
    shutil.copy(folder / "model.pt", folder / "checkpoints" / "average-4.ckpt")
    before = without_locks(cwd)
    error = call(f"{AVERAGE} --out_dir {folder} {options}", cwd, code=2).stderr
    assert error == f"average.py: error: {message.replace('FOLDER', str(folder))}\n"
    assert without_locks(cwd) == before


def test_a_run_that_is_not_there(cwd):
    error = call(f"{AVERAGE} --out_dir gone --num 2", cwd, code=2).stderr
    assert error.startswith("average.py: error: --out_dir gone: no such run") and error.count("\n") == 1


def test_the_loop_of_the_page_evaluates_each_checkpoint(tmp_path):
    call(f"train.py {SMALL} --epochs 2 --num_checkpoint_keep 2", tmp_path)
    folder = run_dir(tmp_path)
    (loop,) = re.findall(r"^for file in RUN.*", (REPO / "tools" / "README.md").read_text(), re.MULTILINE)
    loop = loop.replace("RUN", folder.name).replace("python test.py", f"{sys.executable} {REPO}/test.py")
    subprocess.run(["bash", "-ec", loop], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    names = {path.stem for path in folder.glob("checkpoints/*.ckpt")}
    assert {path.stem for path in folder.glob("test_*.json")} == {f"test_val_{name}" for name in names}
    assert names == {"best", "step-00000004", "step-00000008"}
