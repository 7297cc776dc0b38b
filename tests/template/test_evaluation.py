"""test.py counts each sample once and says the same on any number of processes."""

import json
import re
import shlex
import shutil
import textwrap
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from edits import insert_after, insert_before, replace, with_text
from helpers import (
    ON_2,
    SMALL,
    assert_told_by_ranks,
    call,
    kill_group,
    run,
    run_dir,
    start,
)

from config import TrainConfig
from model import Model
from runtime.rundir import RunDir

COUNTS = {"train": 1217, "val": 200, "test": 380}


def evaluate(folder: Path, options: str = "", script: str = "test.py", name: str | None = None) -> dict:
    """Runs test.py; returns its report, with the tensors of predictions_*.pt where they were asked for."""
    for old in (*folder.glob("test_*.json"), *folder.glob("predictions_*.pt")):
        old.unlink()
    how = run if "--devices" in options else call
    done = how(f"{script} --out_dir {name or folder.name} --accelerator cpu {options}", folder.parent)
    (path,) = folder.glob("test_*.json")
    report = json.loads(path.read_text())
    report |= report.pop("results")
    assert path.name == f"test_{report['split']}_{Path(report['checkpoint']).stem}.json"
    assert f"results {folder.name}/{path.name}" in done.stdout
    assert f"{report['checkpoint']} on {report['num_samples']} {report['split']} samples" in done.stdout
    loss = "nan: is not finite" if report["loss"] is None else f"{report['loss']:.5g}"
    assert f"loss {loss}\n" in done.stdout
    files = [path.with_name(f"predictions_{path.stem[5:]}.pt")] if "--predictions" in options else []
    assert [*folder.glob("predictions_*")] == files
    for file in files:
        assert f"predictions {folder.name}/{file.name}" in done.stdout
        report["predictions"] = torch.load(file, weights_only=True)
    return report


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The images as scikit-learn gives them, normalised, and their targets, for each split."""
    from sklearn.datasets import load_digits

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


@pytest.fixture(scope="module", params=["", "--devices 3"])
def last(request, finished: Path) -> dict:
    """The last checkpoint, with the weights of model.pt, on the test set, on 1 or 3 processes: several batches each."""
    return evaluate(finished, f"--checkpoint last --predictions --batch_size 50 {request.param}")


@pytest.fixture(scope="module")
def expected(finished: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return predict(torch.load(finished / "model.pt", weights_only=True), "test")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, in a folder of the test."""
    return Path(shutil.copytree(finished, tmp_path / finished.name))


# ---- the figures, on 1 and 3 processes; on 2 they are those of the own dataset below


def test_report(last: dict, finished: Path, expected: tuple):
    logits, targets = expected
    predictions = logits.argmax(dim=1)
    assert (finished.parent / last["checkpoint"]).samefile(finished / "checkpoints" / "step-00000020.ckpt")
    assert (last["split"], last["num_samples"]) == ("test", COUNTS["test"])
    assert last["accuracy"] == pytest.approx((predictions == targets).double().mean().item(), rel=1e-6)
    assert last["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert 0.1 < last["accuracy"] < 1  # else the tests here would not see much


def test_predictions_in_the_order_of_the_dataset(last: dict, expected: tuple):
    """What compute_loss gives to the metrics, for each sample."""
    logits, targets = last["predictions"]
    assert torch.equal(targets, expected[1])
    torch.testing.assert_close(logits, expected[0], atol=1e-5, rtol=0)


def test_a_checkpoint_of_the_run_by_its_name(finished: Path):
    path = min(finished.glob("checkpoints/step-*.ckpt"))
    report = evaluate(finished, f"--checkpoint {path.name}")
    assert (Path(report["checkpoint"]).name, report["step"]) == (path.name, int(path.stem[5:]))


def test_predictions_that_are_not_finite_keep_their_rows(finished: Path, tmp_path: Path):
    weights = torch.load(finished / "model.pt", weights_only=True)
    next(iter(weights.values())).fill_(torch.nan)
    torch.save(weights, tmp_path / "nan.pt")
    report = evaluate(finished, f"--checkpoint {tmp_path}/nan.pt --predictions")
    assert report["loss"] is None  # JSON has no such number
    logits, targets = report["predictions"]
    assert len(targets) == COUNTS["test"] and logits.shape == (COUNTS["test"], 10) and logits.isnan().all()


def test_other_batch_size_and_precision(finished: Path, expected: tuple):
    """The weights of model.pt do as well as a checkpoint; bfloat16 moves a prediction only where it is a close call."""
    logits, targets = expected
    report = evaluate(finished, f"--checkpoint {finished}/model.pt --batch_size 7 --precision bf16-mixed --predictions")
    assert (Path(report["checkpoint"]).name, report["num_samples"]) == ("model.pt", COUNTS["test"])
    assert report["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=0.01)
    first, second = logits.softmax(dim=1).topk(2).values.T
    assert (report["predictions"][0] - logits).abs().max() > 1e-4  # not float32
    is_same = report["predictions"][0].argmax(dim=1) == logits.argmax(dim=1)
    assert (is_same | (first - second < 0.02)).all()


# ---- checkpoints, splits, names


def test_results_may_have_the_names_of_other_fields(tmp_path: Path):
    program = replace(
        tmp_path / "program", "values", '{"loss": F.cross_entropy(logits, targets), "split": logits[0, 0]}'
    )
    replace(program, "metrics", '{"precision": accuracy}')
    call(f"{program}/train.py {SMALL} --epochs 1 --monitor val/loss --monitor_mode min", tmp_path)
    out = call(f"{program}/test.py --accelerator cpu", tmp_path).stdout
    report = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())
    assert (report["precision"], report["split"], report["num_samples"]) == ("32-true", "test", COUNTS["test"])
    assert [*report["results"]] == ["loss", "split", "precision"]
    for name, value in report["results"].items():
        assert f"\n{name} {value:.5g}\n" in out


def test_best_checkpoint_on_the_validation_set(finished: Path):
    """The run is found without its timestamp, and best.ckpt is taken by default."""
    report = evaluate(finished, "--split val", name="train_out")
    assert Path(report["checkpoint"]).name == "best.ckpt"
    assert (report["split"], report["num_samples"]) == ("val", COUNTS["val"])


def test_checkpoint_file_on_the_training_set(finished: Path):
    """The figures are those of the plain model on all samples: none is left out, and none is augmented."""
    file = finished / "checkpoints" / "step-00000016.ckpt"
    report = evaluate(finished, f"--split train --checkpoint {file} --batch_size 100000")
    assert (Path(report["checkpoint"]).name, report["split"]) == (file.name, "train")
    assert report["num_samples"] == COUNTS["train"]
    logits, targets = predict(torch.load(file, weights_only=True)["model"], "train")
    assert report["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert report["accuracy"] == pytest.approx((logits.argmax(dim=1) == targets).double().mean().item(), rel=1e-6)


# ---- predictions of other tasks


def test_predictions_of_a_task_with_a_target_for_each_pixel(tmp_path: Path):
    pixels = "(logits.unsqueeze(-1).expand(-1, -1, 6), targets.unsqueeze(-1).expand(-1, 6))"
    program = replace(tmp_path / "program", "outputs", f"{pixels}\n")
    call(f"{program}/train.py {SMALL} --epochs 1", tmp_path)
    report = evaluate(run_dir(tmp_path), "--predictions", f"{program}/test.py")
    logits, targets = report["predictions"]
    assert (logits.shape, targets.shape) == ((COUNTS["test"], 10, 6), (COUNTS["test"], 6))
    assert torch.equal(targets[:, 5], digits()["test"][1])
    assert report["accuracy"] == pytest.approx((logits.argmax(dim=1) == targets).double().mean().item(), rel=1e-6)


def test_predictions_of_a_regression(tmp_path: Path):
    """A number and its target for each sample; the metric knows no classes."""
    program = replace(tmp_path / "program", "logits", "logits = model(images)[:, 0]\n    targets = targets.float()")
    replace(program, "values", '{"loss": F.mse_loss(logits, targets)}')
    replace(program, "metrics", '{"error": __import__("torchmetrics").MeanAbsoluteError()}')
    call(f"{program}/train.py {SMALL} --epochs 1 --monitor val/error --monitor_mode min", tmp_path)
    report = evaluate(run_dir(tmp_path), f"--predictions {ON_2}", f"{program}/test.py")
    outputs, targets = report["predictions"]
    assert torch.equal(targets, digits()["test"][1].float())
    assert report["error"] == pytest.approx((outputs - targets).abs().mean().item(), rel=1e-6)
    assert report["loss"] == pytest.approx((outputs - targets).square().mean().item(), rel=1e-6)


def test_predictions_of_several_shapes_fail_once_the_results_are_written(folder: Path, tmp_path: Path):
    """As those of sequences that are padded to the longest of a batch: test.py, where they are put together, is to be
    edited."""
    before = set(folder.rglob("*"))
    program = replace(tmp_path / "program", "outputs", "(logits[:, : 5 + len(targets) % 2],)\n")
    replace(program, "metrics", '{"mean": __import__("torchmetrics").MeanMetric()}')
    done = call(f"{program}/test.py --accelerator cpu --predictions --batch_size 7 --split val", tmp_path, code=1)
    assert "test.py" in done.stderr and done.stderr.splitlines()[-1].startswith("RuntimeError: Sizes of tensors must")
    assert "\nmean " in done.stdout
    assert set(folder.rglob("*")) - before == {folder / "test_val_best.json"}


def test_an_evaluation_may_save_more_of_its_own(folder: Path, tmp_path: Path):
    """Beside the results, and once: rank 0 writes it."""
    facts = "len(run.dataset), run.config.split, run.train_config.width, run.checkpoint['step'], run.path.name"
    end = "    if run.config.predictions:\n"
    program = with_text(tmp_path / "program", "test.py", (end, f"    run.save('facts', [{facts}])\n{end}"))
    printed = run(f"{program}/test.py --accelerator cpu --split val --checkpoint last {ON_2}", tmp_path).stdout
    assert printed.count(f"facts {folder.name}/facts_val_step-00000020.pt\n") == 1
    assert torch.load(folder / "facts_val_step-00000020.pt") == [200, "val", 4, 20, "step-00000020.ckpt"]


def test_the_data_are_those_of_the_training_whatever_the_default_is_now(tmp_path: Path):
    code = "from dataclasses import replace\nprint(f'data of {config.data_dir}')\nconfig = replace(config, data_dir='')"
    program = insert_before(tmp_path / "program", "digits", code)
    default = """data_dir: str = option("", per_host=True)  # Directory of the dataset's files\n"""
    with_text(program, "config.py", (default, default.replace('""', '"default"')))
    assert "data of mine\n" in call(f"{program}/train.py {SMALL} --epochs 1 --data_dir mine", tmp_path).stdout
    assert "data of mine\n" in call(f"{program}/test.py", tmp_path).stdout
    assert "data of other\n" in call(f"{program}/test.py --data_dir other", tmp_path).stdout


def test_data_that_are_split_at_random_are_split_as_in_the_training(tmp_path: Path):
    """Otherwise the test set would have samples that the model was trained with."""
    program = insert_before(tmp_path / "program", "split", 'print("split", torch.randperm(1000)[:5].tolist())')
    trained = call(f"{program}/train.py {SMALL} --epochs 1 --seed 7", tmp_path).stdout
    evaluated = call(f"{program}/test.py --accelerator cpu", tmp_path).stdout
    assert re.findall("^split .*$", evaluated, re.MULTILINE) == re.findall("^split .*$", trained, re.MULTILINE) != []


def test_the_batches_are_those_of_a_validation_in_the_training(tmp_path: Path):
    """One micro-batch: after out of memory in the training, the evaluation does not run out of it."""
    program = insert_before(tmp_path / "program", "batch", 'print("a batch of", len(batch[1]))')
    call(f"train.py {SMALL} --epochs 1 --micro_batch_size 8", tmp_path)
    printed = call(f"{program}/test.py --accelerator cpu", tmp_path).stdout
    assert max(map(int, re.findall(r"a batch of (\d+)", printed))) == 8


def test_the_micro_batches_are_those_of_the_training_on_several_devices(tmp_path: Path):
    """Nobody has given their size there."""
    program = insert_before(tmp_path / "program", "batch", 'print("a batch of", len(batch[1]))')
    run(f"train.py {SMALL} --epochs 1 {ON_2}", tmp_path)
    printed = call(f"{program}/test.py --accelerator cpu", tmp_path).stdout
    assert max(map(int, re.findall(r"a batch of (\d+)", printed))) == 32


OTHER_SAMPLES = "the validation samples are not those of the training: another number, or other content or labels\n"


@pytest.mark.parametrize("split", ["test", "val"])
@pytest.mark.parametrize(
    "change", ["targets[val] = targets[val].roll(1)", "images[val] += 1", "val = val[1:]", "targets = targets.clone()"]
)
def test_other_samples_than_those_of_the_training_are_told(change: str, split: str, finished: Path, tmp_path: Path):
    program = insert_before(tmp_path / "program", "statistics", change)
    printed = call(f"{program}/test.py --accelerator cpu --out_dir {finished} --split {split}", tmp_path).stdout
    assert printed.count(OTHER_SAMPLES) == (0 if "clone" in change else 1)


LEFT_OUT = """
@staticmethod
def collate_fn(batch):
    images, targets = batch
    is_whole = targets != 3
    return images[is_whole], targets[is_whole]
"""


@pytest.mark.parametrize("devices", ["", ON_2])
def test_samples_that_a_collate_fn_leaves_out_are_not_counted(devices: str, finished: Path, tmp_path: Path):
    """Predictions would not be in the order of the dataset."""
    lines = (
        "    @staticmethod\n    def collate_fn(batch):\n        return batch  # __getitems__ returns a whole batch\n",
    )
    program = with_text(tmp_path / "program", "data.py", (*lines, textwrap.indent(LEFT_OUT.strip(), "    ") + "\n"))
    folder = Path(
        shutil.copytree(finished, tmp_path / finished.name, ignore=shutil.ignore_patterns("test_*", "predictions_*"))
    )
    how = run if devices else call
    command = f"{program}/test.py --accelerator cpu --out_dir {folder} --batch_size 100 {devices}"
    left = sum(target != 3 for target in digits()["test"][1].tolist())
    said = f"the outputs have {left} rows for {COUNTS['test']} samples: does a collate_fn leave samples out?\n"
    assert how(command, tmp_path).stdout.count(said) == 1
    (path,) = folder.glob("test_*.json")
    assert json.loads(path.read_text())["num_samples"] == left < COUNTS["test"]
    path.unlink()
    error = how(f"{command} --predictions", tmp_path, code=1).stderr
    assert "--predictions: are not written, since they would not match the samples" in error
    assert path.exists() and not [*folder.glob("predictions*")]


def test_outputs_may_have_several_rows_for_each_sample(finished: Path, tmp_path: Path):
    program = replace(tmp_path / "program", "outputs", "(logits.repeat(2, 1), targets.repeat(2))\n")
    folder = Path(shutil.copytree(finished, tmp_path / finished.name))
    report = evaluate(folder, "--predictions", f"{program}/test.py")
    assert report["num_samples"] == COUNTS["test"] and len(report["predictions"][1]) == 2 * COUNTS["test"]


def test_a_set_without_samples_is_refused_in_one_line(finished: Path, tmp_path: Path):
    program = insert_before(tmp_path / "program", "statistics", "test = test[:0]")
    error = call(f"{program}/test.py --accelerator cpu --out_dir {finished}", tmp_path, code=2).stderr
    assert error == "test.py: error: --split test: has no samples\n"


def test_a_metric_that_is_not_finite_is_told(finished: Path, tmp_path: Path):
    """It may be right: the precision of a class that nobody predicts."""
    program = insert_after(tmp_path / "program", "batch", "images = images / 0")
    report = evaluate(finished, "", f"{program}/test.py")
    assert report["loss"] is None and report["accuracy"] is not None


def test_a_worker_that_delivers_nothing_ends_the_evaluation(finished: Path, tmp_path: Path):
    """The number of workers and the timeout are options of test.py, not those of the training."""
    hangs = "import time\n\nif torch.utils.data.get_worker_info():\n    time.sleep(1000)"
    program = insert_before(tmp_path / "program", "fetch", hangs)
    options = f"--out_dir {finished} --accelerator cpu --num_workers 1 --timeout 3"
    process = start(f"{program}/test.py {options}", tmp_path)
    try:
        error = process.communicate(timeout=100)[1]
    finally:
        if process.poll() is None:
            kill_group(process)
    assert process.returncode == 1
    assert error.splitlines()[-1] == "RuntimeError: DataLoader timed out after 3.0 seconds"


def test_a_data_dir_that_cannot_be_read_is_told_in_one_line(finished: Path, tmp_path: Path):
    program = insert_before(tmp_path / "program", "digits", 'open(f"{config.data_dir}/test.pt")')
    options = f"--out_dir {finished} --accelerator cpu --data_dir nowhere"
    error = call(f"{program}/test.py {options}", tmp_path, code=2).stderr
    assert error.startswith("test.py: error: build_datasets: ") and error.endswith(": 'nowhere/test.pt'\n")


# ---- a user's own dataset, from end to end

OWN = '''
class Digits(Dataset):
    """One dict per sample."""

    num_classes = 10

    def __init__(self, first, last):
        from sklearn.datasets import load_digits

        self.images, self.targets = load_digits().images[first:last], load_digits().target[first:last]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index][None].astype(np.float32) / 16
        return {"name": f"image {index}", "digit": self.targets[index], "more": [1.0, index], "image": image}


def build_datasets(config, augment=True):
    return {"train": Digits(0, 1000), "val": Digits(1000, 1100), "test": Digits(1100, 1203)}


def datasets_of_the_template('''


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A copy of the template with another dataset, as its user would make it, and where it has trained."""
    folder = tmp_path_factory.mktemp("own")
    replace(folder, "build_datasets", OWN.strip())
    replace(folder, "image shape", 'image = dataset[0]["image"]')
    insert_before(folder, "batch", 'batch = batch["image"], batch["digit"]')
    call(f"{folder}/train.py {SMALL}", folder)
    return folder


def test_own_dataset_of_dicts(own: Path):
    """Evaluated on one process and on two: the same comes out."""
    one, two = (
        evaluate(run_dir(own), f"--predictions --batch_size 20 --num_workers 1 {devices}", f"{own}/test.py")
        for devices in ("", ON_2)
    )
    assert one["num_samples"] == 103
    for ours, theirs in zip(one["predictions"], two["predictions"], strict=True):
        assert len(ours) == 103
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert one["accuracy"] == two["accuracy"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)


def test_fewer_samples_than_processes_are_refused_in_one_line(own: Path):
    source = (own / "data.py").read_text()
    (own / "data.py").write_text(source.replace("Digits(1100, 1203)", "Digits(1100, 1101)"))
    error = run(f"{own}/test.py --out_dir {run_dir(own)} --accelerator cpu {ON_2}", own, code=2).stderr
    assert_told_by_ranks(error, "--devices: 1 samples are too few to evaluate on 2 processes", "test.py")


def test_a_checkpoint_of_another_run_is_evaluated_with_its_own_config(finished: Path, tmp_path: Path):
    call(f"train.py {SMALL} --epochs 1 --width 3", tmp_path)
    call("test.py --accelerator cpu", tmp_path)
    expected = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())
    other = run_dir(tmp_path) / "checkpoints" / "best.ckpt"
    folder = Path(shutil.copytree(finished, tmp_path / "20260101-000000-other"))
    call(f"test.py --accelerator cpu --out_dir {folder} --checkpoint {other}", tmp_path)
    found = json.loads((folder / "test_test_best.json").read_text())
    assert found["results"]["loss"] == expected["results"]["loss"]


@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_a_model_that_has_changed_since_is_refused_in_one_line(checkpoint: str, folder: Path, tmp_path: Path):
    program = replace(tmp_path / "program", "last layer", "nn.Linear(3 * width, num_classes)")
    error = call(f"{program}/test.py --accelerator cpu --checkpoint {checkpoint}", tmp_path, code=2).stderr
    assert error.startswith(f"test.py: error: --checkpoint {checkpoint}: ") and error.count("\n") == 1


@pytest.mark.parametrize("options, has", [("", "best.ckpt"), ("--checkpoint last", "*.ckpt"),
                                          ("--checkpoint step-00000020", "step-00000020.ckpt"),
                                          ("--checkpoint step-00000020.ckpt", "step-00000020.ckpt")])  # fmt: skip
def test_a_run_that_failed_before_its_first_checkpoint_hides_no_older_one(
    options: str, has: str, folder: Path, tmp_path: Path
):
    """A name means the newest run that has the checkpoint asked for."""
    failed = tmp_path / "29990101-000000-train_out"
    (failed / "checkpoints").mkdir(parents=True)
    shutil.copy(folder / "config.yaml", failed)
    done = call(f"test.py --accelerator cpu {options}", tmp_path)
    assert f"{failed.name} is skipped: checkpoints/{has} is missing\n" in done.stdout
    assert f"the run is {folder.name}\n" in done.stdout
    assert "on 380 test samples" in done.stdout
    error = call(f"test.py --accelerator cpu --out_dir {failed.name} {options}", tmp_path, code=2).stderr
    assert f"the checkpoints of {failed.name} are []" in error and error.count("\n") == 1


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_evaluated(folder: Path, tmp_path: Path):
    """While the data is loaded, a run that goes on may replace its oldest checkpoint by a new one."""
    expected = call("test.py --accelerator cpu --checkpoint last", tmp_path).stdout.splitlines()[2:]
    line = "import pathlib; [path.unlink() for path in pathlib.Path().glob('*/checkpoints/*.ckpt')]"
    program = insert_before(tmp_path / "program", "digits", line)
    found = call(f"{program}/test.py --accelerator cpu --checkpoint last", tmp_path).stdout.splitlines()[2:]
    assert found == expected and len(found) == 4
    assert not [*tmp_path.glob("*/checkpoints/*.ckpt")]


def test_a_checkpoint_that_no_run_has_is_answered_with_those_of_the_newest(folder: Path, tmp_path: Path):
    done = call("test.py --accelerator cpu --checkpoint step-7", tmp_path, code=2)
    assert f"\n--out_dir train_out: the run is {folder.name}\n" in done.stdout
    words = f"--checkpoint step-7: no such file; the checkpoints of {folder.name} are ['step-00000020.ckpt', "
    assert words in done.stderr


def test_a_run_is_evaluated_from_inside(folder: Path):
    assert "--out_dir ." in call("train.py --resume . --epochs 11 --early_stopping_patience 1", folder).stdout
    call("test.py --accelerator cpu --out_dir .", folder)
    assert (folder / "test_test_best.json").exists()


def test_evaluations_of_other_splits_and_checkpoints_stay(folder: Path, tmp_path: Path):
    """Each tells of which step it is, and in which precision."""
    for options in ("--predictions", "--predictions --split val --checkpoint last --precision bf16-mixed"):
        call(f"test.py --out_dir {folder.name} --accelerator cpu {options}", tmp_path)
    for stem, precision in (("test_best", "32-true"), ("val_step-00000020", "bf16-mixed")):
        report = json.loads((folder / f"test_{stem}.json").read_text())
        saved = torch.load(tmp_path / report["checkpoint"], weights_only=True)
        assert (report["step"], report["precision"]) == (saved["step"], precision)
        assert (folder / f"predictions_{stem}.pt").is_file()


@pytest.mark.parametrize(
    "options", ["--checkpoint_frequency 0", "--limit_val_batches 0 --monitor train/loss --monitor_mode min"]
)
def test_the_next_command_can_be_pasted(options: str, tmp_path: Path):
    """Also where there is no best.ckpt, and the name has a space."""
    root = tmp_path / "my runs"
    root.mkdir()
    out = call(f"train.py {SMALL} --max_steps 2 {options}", root).stdout
    told = re.search(r"^next: python test.py (.*)$", out, re.MULTILINE)[1]
    assert ("--checkpoint last" in told) == ("frequency" in options)
    call(f"test.py {told} --accelerator cpu", root)
    config = TrainConfig(accelerator="cpu", resume=str(run_dir(root)))
    with ExitStack() as resources:
        run_directory = RunDir(config, resources)
    assert shlex.split(run_directory.next_command(False)) == ["python", "train.py", "--resume", str(run_dir(root))]
