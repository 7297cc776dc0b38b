"""test.py counts each sample once and says the same on any number of processes. The mean of several checkpoints."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ON_2, REPO, SMALL, call, run
from edits import insert_before, replace
from mistakes import refuses
from outputs import flip_a_bit, run_dir, snapshot
from sklearn.datasets import load_digits

from model import Model

COUNTS = {"train": 1217, "val": 200, "test": 380}


def evaluate(folder: Path, options: str = "", script: str = "test.py") -> dict:
    """Runs test.py; returns its report, with the tensors of predictions_*.pt if they were asked for."""
    for old in (*folder.glob("test_*.json"), *folder.glob("predictions_*.pt")):
        old.unlink()
    how = run if "--devices" in options else call
    printed = how(f"{script} --out_dir {folder.name} --accelerator cpu {options}", folder.parent).stdout
    (path,) = folder.glob("test_*.json")
    report = json.loads(path.read_text())
    assert path.name == f"test_{report['split']}_{Path(report['checkpoint']).stem}.json"
    assert f"results {folder.name}/{path.name}" in printed
    assert f"{report['checkpoint']} on {COUNTS[report['split']]} {report['split']} samples" in printed
    for result, value in report["results"].items():
        assert f"{result} nan: is not finite\n" if value is None else f"{result} {value:.5g}\n" in printed
    files = [*folder.glob("predictions_*")]
    assert files == [path.with_name(f"predictions_{path.stem[5:]}.pt")] * ("--predictions" in options)
    for file in files:
        assert f"predictions {folder.name}/{file.name}" in printed
        report["predictions"] = torch.load(file, weights_only=True)
    return report


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The images as scikit-learn gives them, normalised, and their targets, for each split."""
    images, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(targets))
    images, targets = torch.tensor(images[order]).view(-1, 1, 8, 8).float() / 16, torch.tensor(targets[order])
    images = (images - images[:1217].mean()) / images[:1217].std()
    cuts = {"train": slice(0, 1217), "val": slice(1217, 1417), "test": slice(1417, None)}
    return {name: (images[cut], targets[cut]) for name, cut in cuts.items()}


def predict(weights: dict, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets from the plain model and the plain images, never augmented."""
    model = Model((1, 8, 8), 10, width=4)
    model.load_state_dict(weights)
    images, targets = digits()[split]
    with torch.no_grad():
        return model.eval()(images), targets


def assert_figures(report: dict, logits: torch.Tensor, targets: torch.Tensor) -> None:
    accuracy = (logits.argmax(dim=1) == targets).double().mean().item()
    loss = torch.nn.functional.cross_entropy(logits, targets).item()
    assert report["results"] == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-5)
    assert report["num_samples"] == len(targets)


@pytest.fixture
def folder(finished: Path, cwd: Path) -> Path:
    """A copy of the run, in a folder of the test."""
    return Path(shutil.copytree(finished, cwd / finished.name, ignore=shutil.ignore_patterns("test_*", "predictions*")))


# ---- the figures: those of the plain model on all samples


@pytest.mark.parametrize("devices", ["", "--devices 3"])
def test_report_and_predictions_are_the_same_on_any_number_of_processes(devices: str, finished: Path):
    """The last checkpoint has the weights of model.pt. Predictions are what compute_loss gives to the metrics, for each
    sample in the order of the dataset."""
    expected = predict(torch.load(finished / "model.pt"), "test")
    report = evaluate(finished, f"--checkpoint last --predictions --batch_size 50 {devices}")
    assert (finished.parent / report["checkpoint"]).samefile(finished / "checkpoints" / "step-00000020.ckpt")
    assert (report["split"], report["step"], report["precision"]) == ("test", 20, "32-true")
    assert_figures(report, *expected)
    assert 0.1 < report["results"]["accuracy"] < 1  # else the tests here would not see much
    logits, targets = report["predictions"]
    assert torch.equal(targets, expected[1])
    torch.testing.assert_close(logits, expected[0], atol=1e-5, rtol=0)


def test_a_checkpoint_a_split_a_batch_size_and_a_precision_are_chosen(finished: Path):
    """A run is found without its timestamp, and best.ckpt is taken by default. A checkpoint is one by its name or path;
    the weights of model.pt do as well. bfloat16 moves a logit a little."""
    report = evaluate(finished, "--out_dir train_out --split val")
    best = torch.load(finished / "checkpoints" / "best.ckpt")
    assert (Path(report["checkpoint"]).name, report["step"]) == ("best.ckpt", best["step"])
    assert_figures(report, *predict(best["model"], "val"))
    file = finished / "checkpoints" / "step-00000016.ckpt"
    of_file = predict(torch.load(file)["model"], "train")
    for words in (file, file.name, file.stem):
        report = evaluate(finished, f"--split train --checkpoint {words} --batch_size 100000")
        assert (Path(report["checkpoint"]).name, report["step"], report["split"]) == (file.name, 16, "train")
        assert_figures(report, *of_file)
    report = evaluate(finished, f"--checkpoint {finished}/model.pt --batch_size 7 --precision bf16-mixed --predictions")
    assert (Path(report["checkpoint"]).name, report["precision"]) == ("model.pt", "bf16-mixed")
    logits, _ = predict(torch.load(finished / "model.pt"), "test")
    assert 1e-4 < (report["predictions"][0] - logits).abs().max() < 0.1


def test_predictions_of_a_regression(program: Path, cwd: Path):
    """Two numbers and two targets for each sample; the metric knows no classes. Results may have the names of other
    fields of the report. One that is not finite is told: it may be right, as the precision of a class that nobody
    predicts. What an evaluation saves beside them, rank 0 writes alone."""
    replace(program, "logits", "logits = model(images)[:, 0]\n    targets = targets.float()")
    replace(program, "outputs", "(logits.repeat_interleave(2), targets.repeat_interleave(2))")
    replace(program, "values", '{"loss": F.mse_loss(logits, targets), "split": logits.mean(), "empty": math.nan}')
    replace(program, "metrics", '{"precision": __import__("torchmetrics").MeanAbsoluteError()}')
    save = "run.save(f'of_{fabric.global_rank}', 1)"
    insert_before(program, ("test.py", "test", "if run.config.predictions: ..."), save)
    call(f"{program}/train.py {SMALL} --epochs 1 --monitor val/precision --monitor_mode min", cwd)
    report = evaluate(run_dir(cwd), f"--predictions {ON_2}", f"{program}/test.py")
    outputs, targets = report["predictions"]
    assert torch.equal(targets, digits()["test"][1].float().repeat_interleave(2))
    difference = outputs - targets
    means = {"loss": difference.square(), "split": outputs, "precision": difference.abs()}
    assert report["results"].pop("empty") is None  # JSON has no such number
    assert report["results"] == pytest.approx({name: each.mean().item() for name, each in means.items()}, rel=1e-5)
    assert (report["precision"], report["split"], report["num_samples"]) == ("32-true", "test", COUNTS["test"])
    assert [path.name for path in run_dir(cwd).glob("of_*")] == ["of_0_test_best.pt"]


def test_predictions_of_several_shapes_fail_once_the_results_are_written(folder: Path, program: Path, cwd: Path):
    """As those of sequences that are padded to the longest of a batch."""
    replace(program, "outputs", "(logits[:, : 5 + len(targets) % 2],)")
    replace(program, "metrics", '{"mean": __import__("torchmetrics").MeanMetric()}')
    done = call(f"{program}/test.py --accelerator cpu --predictions --batch_size 7 --split val", cwd, code=1)
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: Sizes of tensors must")
    assert (folder / "test_val_best.json").exists() and not [*folder.glob("predictions_*")]


# ---- the samples


def test_samples_batches_and_random_splits_are_those_of_the_training(program: Path, cwd: Path):
    """Whatever the default of `data_dir` is now. Otherwise the test set would have samples that the model was trained
    with, or the evaluation would run out of memory: nobody may have given the size of a micro-batch."""
    code = "from dataclasses import replace\nprint(f'data of {config.data_dir}')\nconfig = replace(config, data_dir='')"
    insert_before(program, "digits", code)
    insert_before(program, "split", 'print("split", torch.randperm(1000)[:5].tolist())')
    insert_before(program, "batch", 'print("a batch of", len(batch[1]))')
    train = f"{program}/train.py {SMALL} --epochs 1 --seed 7 --data_dir mine"
    trained = call(f"{train} --micro_batch_size 8", cwd).stdout
    run(f"{train} {ON_2} --out_dir two", cwd)
    point = ("config.py", "Data", 'data_dir: str = option("", per_host=True)')
    replace(program, point, 'data_dir: str = option("default", per_host=True)')
    splits = re.findall("^split .*$", trained, re.MULTILINE)
    for options, data, size in (("", "mine", 8), ("--data_dir other", "other", 8), ("--out_dir two", "mine", 32)):
        printed = call(f"{program}/test.py --accelerator cpu {options}", cwd).stdout
        assert f"data of {data}\n" in printed and re.findall("^split .*$", printed, re.MULTILINE) == splits != []
        assert max(map(int, re.findall(r"a batch of (\d+)", printed))) == size


@pytest.mark.parametrize(
    "change, count",
    [
        ("targets[val] = targets[val].roll(1)", 1),
        ("ImageDataset.fingerprint = None; val = val[1:]", 1),  # by their number alone
        ("ImageDataset.fingerprint = None; targets[val] = 0", 0),
        ("targets[test] = 0", 0),
    ],
)
def test_other_samples_than_those_of_the_training_are_told(change: str, count: int, finished: Path, program: Path):
    """Those of the validation, whichever are evaluated."""
    insert_before(program, "statistics", change)
    printed = call(f"{program}/test.py --accelerator cpu --out_dir {finished}", finished.parent).stdout
    assert printed.count("validation samples are not those of the training") == count


def test_samples_that_a_collate_fn_leaves_out_are_not_counted(folder: Path, program: Path, cwd: Path):
    """Predictions would not be in the order of the dataset."""
    point = ("data.py", "collate_fn", "return batch")
    replace(program, point, "return tuple(part[batch[1] != 3] for part in batch)")
    left = sum(target != 3 for target in digits()["test"][1].tolist())
    for options, code in (("", 0), ("--predictions", 1)):
        done = run(f"{program}/test.py --accelerator cpu {ON_2} {options}", cwd, code)
        assert done.stdout.count(f"{left} rows for {COUNTS['test']} samples: does a collate_fn leave samples out?") == 1
        assert ("--predictions: are not written" in done.stderr) == (code == 1)
        (path,) = folder.glob("test_*.json")
        assert json.loads(path.read_text())["num_samples"] == left < COUNTS["test"]
        path.unlink()
    assert not [*folder.glob("predictions*")]


def test_a_worker_that_delivers_nothing_ends_the_evaluation(finished: Path, program: Path, cwd: Path):
    """The number of workers and the timeout are options of test.py, not those of the training."""
    insert_before(program, "fetch", "if torch.utils.data.get_worker_info(): __import__('time').sleep(1000)")
    command = f"{program}/test.py --out_dir {finished} --accelerator cpu --num_workers 1 --timeout 3"
    error = run(command, cwd, code=1).stderr
    assert error.splitlines()[-1] == "RuntimeError: DataLoader timed out after 3.0 seconds"


# ---- which checkpoint is meant


def test_what_cannot_be_evaluated_is_refused_in_one_line(folder: Path, program: Path, cwd: Path):
    """A checkpoint that is not there, or does not fit to the model, and data that cannot be read."""
    words = ("--checkpoint step-7", "'step-00000020.ckpt'", folder.name)
    refuses("test.py --accelerator cpu --checkpoint step-7", cwd, *words)
    replace(program, "last layer", "nn.Linear(3 * width, num_classes)")
    told = refuses(f"{program}/test.py --accelerator cpu", cwd, "--checkpoint best", "layers.8.weight")
    assert f"--out_dir train_out: the run is {folder.name}\n" in told and "changed since: model.py" in told
    insert_before(program, "digits", "open(f'{config.data_dir}/a')")
    refuses(f"{program}/test.py --accelerator cpu --data_dir nowhere", cwd, "build_datasets", "nowhere")


@pytest.mark.parametrize(
    "options, has",
    [("", "best"), ("--checkpoint last", "*"), ("--checkpoint step-00000020.ckpt", "step-00000020")],
)
def test_a_run_that_failed_before_its_first_checkpoint_hides_no_older_one(options: str, has: str, folder: Path, cwd):
    """A name means the newest run that has the checkpoint asked for."""
    failed = cwd / "29990101-000000-train_out"
    (failed / "checkpoints").mkdir(parents=True)
    shutil.copy(folder / "config.yaml", failed)
    printed = call(f"test.py --accelerator cpu {options}", cwd).stdout
    assert f"{failed.name} is skipped: checkpoints/{has}.ckpt is missing\n" in printed
    assert f"the run is {folder.name}\n" in printed and "on 380 test samples" in printed
    refuses(f"test.py --accelerator cpu --out_dir {failed.name} {options}", cwd, failed.name, "[]")


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_evaluated(folder: Path, program: Path, cwd: Path):
    """While the data is loaded, a run that goes on may replace its oldest checkpoint by a new one."""
    expected = call("test.py --accelerator cpu --checkpoint last", cwd).stdout.splitlines()[2:]
    line = "import pathlib; [path.unlink() for path in pathlib.Path().glob('*/checkpoints/*.ckpt')]"
    insert_before(program, "digits", line)
    found = call(f"{program}/test.py --accelerator cpu --checkpoint last", cwd).stdout.splitlines()[2:]
    assert found == expected and len(found) == 4
    assert not [*cwd.glob("*/checkpoints/*.ckpt")]


def test_a_run_is_evaluated_from_inside_and_a_checkpoint_of_another_one_by_its_own_config(folder: Path, cwd: Path):
    assert "--out_dir ." in call("train.py --resume . --epochs 6", folder).stdout
    printed = call(f"train.py {SMALL} --epochs 1 --width 3 --out_dir mine&yours", cwd).stdout
    other = run_dir(cwd, "mine&yours")
    assert printed.endswith(f"next: python test.py --out_dir '{other.name}'\n")  # can be pasted into a shell
    call("test.py --accelerator cpu --out_dir mine&yours", cwd)
    call(f"test.py --accelerator cpu --out_dir . --checkpoint {other}/checkpoints/best.ckpt", folder)
    ours, theirs = (json.loads((path / "test_test_best.json").read_text())["results"] for path in (folder, other))
    assert ours == theirs


# ---- tools/average.py

AVERAGE = "tools/average.py --out_dir train_out"


@pytest.mark.recipes
def test_the_mean_of_the_newest_checkpoints_is_evaluated_and_is_no_checkpoint_of_the_run(program: Path, cwd: Path):
    """Numbers are averaged in float64, and integers, such as those of a BatchNorm, are those of the newest. A mistake
    changes nothing."""
    replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width),\n")
    call(f"{program}/train.py {SMALL} --checkpoint_interval 2 --num_checkpoint_keep 5", cwd)
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
    if event == "open" and str(args[0]).endswith("step-00000012.ckpt") and os.path.exists(args[0]):
        os.unlink(args[0])
        folder = os.path.dirname(args[0])
        os.link(f"{folder}/step-00000020.ckpt", f"{folder}/step-00000022.ckpt")


sys.addaudithook(hook)
"""


@pytest.mark.recipes
def test_a_run_that_goes_on_may_delete_the_oldest_meanwhile(folder: Path, cwd: Path):
    """As soon as it is to be opened; here the newest gets a second name, as if it were a newer one."""
    (cwd / "sitecustomize.py").write_text(HOOK)
    done = run(f"{AVERAGE} --num 3", cwd, PYTHONPATH=str(cwd))
    assert "has the mean of steps 20, 20, 16\n" in done.stdout


@pytest.mark.recipes
def test_the_loop_of_the_page_evaluates_each_checkpoint(tmp_path: Path):
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    folder = run_dir(tmp_path)
    (loop,) = re.findall(r"^for file in RUN.*", (REPO / "tools" / "README.md").read_text(), re.MULTILINE)
    loop = loop.replace("RUN", folder.name).replace("python test.py", f"{sys.executable} {REPO}/test.py")
    (tmp_path / "loop.sh").write_text(loop)
    run(f"{tmp_path}/loop.sh", tmp_path)
    assert {path.stem for path in folder.glob("test_*.json")} == {"test_val_best", "test_val_step-00000004"}
