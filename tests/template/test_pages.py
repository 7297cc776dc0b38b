"""The edits and the code of docs/training.md, docs/speed.md, docs/data.md, docs/evaluation.md and docs/trained_model.md
are made and run."""

import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import LONG, ON_2, PREEMPTED, REPO, SMALL, call, execute, folders, run, run_in
from comparisons import assert_same_training, assert_same_weights, killed_and_resumed, on_one_and_two
from copies import blocks, copy_project_tests, diff, diffs, edited, with_recipe, with_tied_weights
from edits import apply, copy_programs, insert_after, insert_before, replace, with_text
from fixtures import where_trained
from outputs import checkpoint, history, last_summary, predictions_of, read_tensorboard, results, rows, run_dir, weights
from processes import interrupt

from config import TrainConfig
from data import build_datasets

pytestmark = pytest.mark.recipes

of_training = partial(diff, "docs/training.md")
CHANNELS_LAST, LOSS_INSIDE, UNWRAPPED, TORCH_ALONE = diffs("docs/speed.md")
NO_DECAY = of_training("No weight decay of biases and norms")
TWELVE = f"{LONG} --epochs 12"


def made(page: str, heading: str, tmp_path: Path) -> Path:
    """A copy of the programs with the edit under a heading of a page."""
    return edited(diff(f"docs/{page}.md", heading), tmp_path / "program")


def on_page(pattern: str, page: str) -> re.Match:
    """Where a page, without its line breaks, has it."""
    return re.search(pattern, " ".join((REPO / "docs" / f"{page}.md").read_text().split()))


# ---- edits of the training

HUBCONF = """
import utils
from torch import nn

def small_net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(utils.pixels(), num_classes))
"""


def with_torch_hub(folder: Path) -> Path:
    """The repository has a module with a name of one of the template's."""
    repository = folder.parent / "repository"
    repository.mkdir()
    (repository / "hubconf.py").write_text(HUBCONF)
    (repository / "utils.py").write_text("def pixels():\n    return 64\n")
    (code,) = blocks("docs/training.md", "python", "A model of torch.hub")
    code = f"    import sys\n{code.replace('REPOSITORY', str(repository))}"
    return replace(folder, "model", f"{code}    return Model(")


# How far its weights may be from those of a run without the edit; None: it trains something else.
EDITS = {
    "a buffer that the loop changes": (of_training("More than means from compute_loss"), None),
    "no weight decay of biases": (NO_DECAY, 0),
    "lazy layers": (of_training("Layers without a number of inputs"), None),
    "activation checkpointing": (of_training("Activation checkpointing"), 0),
    "torch.hub": (with_torch_hub, None),
    "channels_last": (CHANNELS_LAST, 1e-3),
    "loss inside": (LOSS_INSIDE, 1e-3),
    "unwrapped": (UNWRAPPED, 0),
    "torch alone": (TORCH_ALONE, 0),
}
plain = where_trained(f"{TWELVE} --weight_decay 0")  # without an edit


@pytest.mark.parametrize("edit, atol", EDITS.values(), ids=EDITS)
def test_a_run_with_an_edit_is_resumed_evaluated_and_the_same_on_two_processes(edit, atol, plain, tmp_path):
    program = (edit if callable(edit) else partial(edited, edit))(tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE} --weight_decay 0", tmp_path)
    if atol is not None:
        assert_same_weights(weights(whole), weights(plain), atol)
    assert results(program, whole, "--checkpoint last --split test")["accuracy"] > 0.7
    one, two = on_one_and_two(f"{program}/{LONG} --weight_decay 0.5 --max_steps 8", tmp_path)
    assert_same_training(two, one)


def test_matrices_alone_decay(tmp_path):
    """Without gradients."""
    program = edited(NO_DECAY, tmp_path / "program")
    replace(program, "values", '{"loss": 0 * F.cross_entropy(logits, targets)}')
    call(f"{program}/train.py {SMALL} --weight_decay 0.5 --checkpoint_interval 1 --num_checkpoint_keep 0", tmp_path)
    first, last = (checkpoint(tmp_path, f"step-{step:08}")["model"] for step in (1, 20))
    assert {name for name, tensor in first.items() if tensor.ndim > 1} < {*first}
    for name, tensor in first.items():
        assert last[name].norm() < tensor.norm() if tensor.ndim > 1 else torch.equal(last[name], tensor), name


def test_muon_trains_the_matrices_of_the_hidden_layers_and_is_resumed_exactly(tmp_path):
    """Also on two processes; its steps are computed in bfloat16."""
    program = apply(of_training("Muon beside AdamW"), with_recipe("language_model", tmp_path / "program"))
    whole, _ = killed_and_resumed(f"{program}/{LONG} --epochs 8 --val_frequency 4 --max_grad_norm 0.5", tmp_path)
    saved = checkpoint(whole, "step-00000064")
    (adamw,), (muon,) = (saved["checkpoint"]["optimizers"][name] for name in ("optimizer", "muon"))
    others, hidden = ({name.split()[0].removeprefix("model.") for name in each["parameters"]} for each in (adamw, muon))
    assert hidden == {name for name in saved["model"] if name.startswith("blocks.") and saved["model"][name].ndim == 2}
    assert others == saved["model"].keys() - hidden and len(hidden) == 3 * 4
    one, two = on_one_and_two(f"{program}/train.py {SMALL} --epochs 2 --micro_batch_size 32", tmp_path)
    assert_same_weights(weights(two), weights(one), atol=1e-4)


def test_class_weights_are_exact_in_a_validation_and_in_the_mean_over_the_samples(tmp_path: Path):
    """By the count."""
    program = made("training", "Class weights and ignored labels", tmp_path)
    replace(program, "shift", "shift=0")  # its random numbers depend on the micro-batches
    insert_after(program, "statistics", "targets[::3] = -100")
    replace(program, "accuracy", 'average="micro", ignore_index=-100')

    def losses(folder: str, options: str) -> dict[str, list]:
        four_steps = f"{SMALL} --max_steps 4 --log_interval 1 --dropout 0"
        found = rows(run_in(tmp_path / folder, f"{program}/train.py {four_steps} {options}"))
        return {name: [row[name] for row in found if name in row] for name in ("train/loss", "val/loss")}

    whole, parts = losses("1", "--base_lr 1e-9"), losses("2", "--base_lr 1e-9 --micro_batch_size 4")
    assert parts["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)

    loss, count = on_page(r"`(F\.cross[^`]+)`, and the count `(.+?)`", "training").groups()
    replace(program, ("train.py", "compute_loss", '"loss": ...'), f'"loss": {loss}')
    insert_after(program, ("train.py", "compute_loss", "count = float(...)"), f"count = {count}")
    whole = losses("3", "")
    assert whole["train/loss"][0] == pytest.approx(2 / 3 * 2.3, rel=0.1)  # a third has no target
    for folder, options in (("4", "--micro_batch_size 4"), ("5", f"--micro_batch_size 4 {ON_2}")):
        for name, values in losses(folder, options).items():
            assert values == pytest.approx(whole[name], rel=1e-5)


# ---- docs/data.md


def test_a_mean_over_tokens_is_that_of_the_step(tmp_path):
    """For any size of the micro-batches, and on two processes. Neither a step without targets nor a batch of a
    validation gives nan, or shifts a mean. No augmentation: its random numbers depend on the size of the
    micro-batches."""
    program = replace(made("data", "A mean over tokens", tmp_path), "shift", "shift=0")
    insert_after(program, "statistics", "targets[train[20:]] = -100\ntargets[val[16:32]] = -100")
    steps = f"{program}/train.py {SMALL} --max_steps 8 --log_interval 1 --dropout 0"
    sizes = {"whole": "", "small": "--micro_batch_size 16", "two": f"--micro_batch_size 4 {ON_2}"}
    whole, small, two = (rows(run_in(tmp_path / name, f"{steps} {options}")) for name, options in sizes.items())
    assert 0 in [row["train/loss"] for row in whole] and any("val/loss" in row for row in whole)
    for name in ("train/loss", "val/loss"):
        expected = pytest.approx([row[name] for row in whole if name in row], rel=1e-4)
        assert [row[name] for row in small if name in row] == expected
        assert [row[name] for row in two if name in row] == expected


def test_a_value_that_the_loop_sets_is_seen_by_workers_and_restored(tmp_path):
    program = made("data", "A value that the loop sets", tmp_path)
    whole, _ = killed_and_resumed(f"{program}/{LONG} --num_workers 2", tmp_path)
    assert_same_weights(weights(whole), weights(run_in(tmp_path / "alone", f"{program}/{LONG}")), atol=0)


def test_a_few_samples_have_the_rare_class_and_are_enough_for_the_commands_of_ci(tmp_path):
    """With the dataset of docs/editing.md as the default, whose folder is not there any more. Two samples are of the
    class 9, at the end."""
    program = edited(diff("docs/editing.md", "Data"), tmp_path / "program")
    replace(program, ("config.py", "", 'option("digits", ...)'), 'option("mine", fixed=True)')
    (tmp_path / "mine").mkdir()
    for part, dataset in build_datasets(TrainConfig(), augment=False).items():
        is_rare = dataset.targets == 9
        chosen = torch.cat([(~is_rare).nonzero().flatten(), is_rare.nonzero().flatten()[:2]])
        torch.save((dataset.images[chosen], dataset.targets[chosen]), tmp_path / "mine" / f"{part}.pt")
    (code,) = blocks("docs/data.md", "python", "A few samples for CI")
    subprocess.run([sys.executable, "-c", code.replace("/data/mine", f"{tmp_path}/mine")], cwd=program, check=True)
    shutil.rmtree(tmp_path / "mine")
    for part, count in (("train", 64), ("val", 80), ("test", 16)):
        images, targets = torch.load(program / "tests" / "data" / f"{part}.pt")
        assert len(images) == len(targets) == count and 9 in targets
    (train,) = re.findall(r"^\.venv/bin/python (train\.py .*?)  #", (REPO / ".ci/run").read_text(), re.MULTILINE)
    call(f"{program}/{train} --data_dir tests/data", program)
    copy_project_tests(program)
    with_text(program, "tests/project/settings.py", ("SMALL = {\n", 'SMALL = {\n    "data_dir": "tests/data",\n'))
    command = [sys.executable, "-m", "pytest", "tests/project", "-k", "fast_run or in_another_set or finished_run"]
    done = subprocess.run(command, cwd=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- docs/evaluation.md


def test_a_number_that_follows_from_the_means_and_a_metric_with_an_argument_are_logged_and_in_test_py(tmp_path: Path):
    """Perplexity is monitored; if it is no float, that ends no run. The metric is a share of all samples."""
    program = made("evaluation", "Perplexity", tmp_path)
    made("evaluation", "A metric of one's own", tmp_path)
    options = "--accelerator cpu --epochs 4 --logger_name csv --monitor val/perplexity --monitor_mode min"
    call(f"{program}/train.py {options}", tmp_path)
    found = rows(tmp_path)
    last = found[-1]
    assert last["val/perplexity"] == pytest.approx(torch.tensor(last["val/loss"]).exp().item())
    assert last_summary(tmp_path)["best"] == min(row["val/perplexity"] for row in found)
    for options in ("--predictions", ON_2):
        for name, value in results(program, tmp_path, f"--checkpoint last --split val {options}").items():
            assert last[f"val/{name}"] == pytest.approx(value)
    logits, targets = predictions_of(tmp_path)
    share = (logits.softmax(1)[torch.arange(len(targets)), targets] >= 0.9).float().mean().item()
    assert last["val/sure"] == pytest.approx(share) and 0 < share < last["val/accuracy"]
    replace(program, "values", '{"loss": 1000 + F.cross_entropy(logits, targets)}')
    call(f"{program}/train.py {SMALL}", tmp_path)


def test_without_a_validation_set_the_lowest_training_loss_is_best(tmp_path: Path):
    program = made("evaluation", "No validation set", tmp_path)
    _, killed = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    assert last_summary(killed)["best"] == min(row["train/loss"] for row in rows(killed))
    assert not any(name.startswith("val/") for row in rows(killed) for name in row)
    assert results(program, killed, "")["accuracy"] > 0.5
    assert "--split val: has no samples" in call(f"{program}/test.py --split val", killed, code=2).stderr
    run(f"{program}/train.py --accelerator cpu --fast_run {ON_2}", tmp_path)


# ---- several pages

TOGETHER = {
    "A picture at each validation": "evaluation",
    "Histograms in TensorBoard": "evaluation",
    "Training samples of another shape": "data",
    "A learning rate that falls by the results": "training",
}


def test_pictures_histograms_crops_and_a_rate_that_is_halved_are_resumed_and_the_same_on_two_processes(tmp_path: Path):
    """All in one program. A validation, of which the first alone is better by 10, has one picture, also after a resume,
    and one histogram."""
    for heading, page in TOGETHER.items():
        program = made(page, heading, tmp_path)
    insert_after(program, "batch", "print('shape', model.training, *images.shape[2:])")
    insert_before(program, "model", "print('built for', *image.shape[1:])")
    command = f"{program}/{LONG} --epochs 12 --early_stopping_min_delta 10 --logger_name csv tensorboard"

    def resume(again: str, cwd: Path):
        time.sleep(1.1)  # the second is in the name of the file, by which TensorBoard orders them
        lines = call(again, cwd).stdout.splitlines()
        shapes = {line for line in lines if line.startswith(("shape", "built"))}
        assert shapes == {"built for 6 6", "shape False 8 8", "shape True 6 6"}

    whole, killed = killed_and_resumed(command, tmp_path, resume)
    halvings = [(epoch > 4) + (epoch > 7) + (epoch > 10) for epoch in range(1, 13)]
    rates = [row["lr"] for row in rows(whole)]
    assert rates == pytest.approx([rates[0] / 2**number for number in halvings])
    pictures = [{path.name: path.read_bytes() for path in run_dir(cwd).glob("*.png")} for cwd in (whole, killed)]
    assert [*sorted(pictures[0])] == [f"features-{step:08d}.png" for step in range(8, 97, 8)]
    assert pictures[0] == pictures[1]

    two = run_in(tmp_path / "two", f"{command} {ON_2}")
    assert_same_training(two, whole)
    assert [row["lr"] for row in rows(two)] == rates
    for cwd in (killed, two):
        board = read_tensorboard(run_dir(cwd))
        assert [event.step for event in board.Histograms("weights/first")] == [row["step"] for row in rows(cwd)]
    printed = call(f"{program}/test.py --accelerator cpu", killed).stdout
    assert "built for 8 8\n" in printed and "shape False 8 8" in printed


# ---- docs/trained_model.md: what comes after the code that loads the weights

LOAD, PREDICT, EXPORT, ONNX, SAFETENSORS, PRETRAINED = blocks("docs/trained_model.md", "python")


def run_code(code: str, program: Path, cwd: Path, **env: str) -> str:
    """Runs the code of the page, which loads the weights of the run in `cwd`, and other code after it. Returns what it
    prints."""
    load = LOAD.replace("20261122-102325-train_out", run_dir(cwd).name)
    (program / "use.py").write_text(load + code)
    return run(f"{program}/use.py", cwd, **env).stdout


def test_the_trained_model_predicts_for_inputs_without_labels_what_test_py_does(tmp_path):
    """In the order of their names: the files are made in another one. The samples are split at random, and the best
    checkpoint is not the last one."""
    program = replace(tmp_path / "program", "permutation", "np.random")
    call(f"{program}/train.py {SMALL}", tmp_path)
    folder = run_dir(tmp_path)
    shutil.copy(folder / "checkpoints" / "step-00000012.ckpt", folder / "checkpoints" / "best.ckpt")
    for name in ("best", "last"):
        call(f"{program}/test.py --out_dir train_out --predictions --accelerator cpu --checkpoint {name}", tmp_path)
    of_best, of_last = (torch.load(path)[0] for path in sorted(folder.glob("predictions_test_*.pt")))
    inputs = """
Path("inputs").mkdir()
for i in reversed(range(len(dataset))):
    torch.save(dataset[i][0].clone(), f"inputs/{i:03}.pt")
"""
    first, *_ = run_code(inputs + PREDICT, program, tmp_path).splitlines()
    assert first == f"tensor({of_last[0].argmax()})"
    found = torch.load(tmp_path / "predictions.pt")
    assert found["names"] == [f"{number:03}.pt" for number in range(380)]
    torch.testing.assert_close(found["logits"], of_best)


@pytest.mark.parametrize("name", ["torch.export", "onnx"])
def test_an_exported_model_gives_the_same_logits_for_batches_of_any_size(name: str, tmp_path):
    code, logits = EXPORT, 'torch.export.load("model.pt2").module()(images)'
    if name == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        code, logits = EXPORT + ONNX, 'torch.from_numpy(session.run(None, {"images": images.numpy()})[0])'
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    check = f"""
for size in (1, 2, 7):
    images = torch.stack([dataset[i][0] for i in range(size)])
    torch.testing.assert_close({logits}, model(images))
"""
    run_code(code + check, copy_programs(tmp_path / "program"), tmp_path)
    assert {path.name for path in tmp_path.glob("model.onnx*")} <= {"model.onnx"}  # with the weights in it


def test_weights_as_safetensors_are_read_back_in_each_bit(tmp_path):
    """A tied weight is in the file once, and in the model twice."""
    safetensors = pytest.importorskip("safetensors.torch")
    program = with_tied_weights(tmp_path / "program")
    call(f"{program}/train.py {SMALL}", tmp_path)
    code = SAFETENSORS.replace("load_model(", "for p in model.parameters(): p.data.zero_()\nload_model(")
    run_code(f"{code}torch.save(model.state_dict(), 'read.pt')", program, tmp_path)
    read = torch.load(tmp_path / "read.pt")
    assert_same_weights(read, weights(tmp_path), atol=0)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert len(tensors) == len(read) - 1
    assert_same_weights(tensors, {name: read[name] for name in tensors}, atol=0)


def test_a_model_of_hugging_face_is_loaded_from_a_folder_by_model_py_alone(tmp_path):
    """Without a network, and with the options of the run, which are not the defaults."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    program = made("trained_model", "A model of Hugging Face's hub", tmp_path)
    call(f"{program}/train.py {SMALL} --dropout 0.5", tmp_path)
    run_code(PRETRAINED, program, tmp_path, HF_HUB_OFFLINE="1")
    (alone,) = folders(tmp_path, "alone")
    shutil.copy(program / "model.py", alone)
    (alone / "load.py").write_text(
        "import torch\nfrom model import Model\n"
        "model = Model.from_pretrained('hub_model')\ntorch.save(model.state_dict(), 'read.pt')\n"
    )
    run(f"{alone}/load.py", tmp_path, HF_HUB_OFFLINE="1")
    assert_same_weights(torch.load(tmp_path / "read.pt"), weights(tmp_path), atol=0)


# ---- docs/trained_model.md: edits


def test_what_was_fitted_is_in_model_pt_and_needs_no_data(tmp_path: Path):
    program = made("trained_model", "Preprocessing that was fitted", tmp_path)
    whole, killed = killed_and_resumed(f"{program}/{LONG} --limit_val_batches 1.0", tmp_path)
    assert results(program, killed)["loss"] == pytest.approx(float(history(whole)[-1]["val/loss"]))
    (alone,) = folders(tmp_path, "alone")
    shutil.copy(program / "model.py", alone)
    shutil.copy(run_dir(killed) / "model.pt", alone)
    made_by = on_page(r'needed: `(model = Model\(\*\*weights\["_extra_state"\]\))` and `(.+?)`', "trained_model")
    code = f'import torch; from model import Model; weights = torch.load("model.pt"); {made_by[1]}; {made_by[2]}; '
    code += "print(model.eval()(torch.zeros(1, 1, 8, 8)).shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([1, 10])\n"
    replace(program, "use of dropout", "0.5")
    for command in ("test.py --accelerator cpu", "train.py --resume auto --epochs 11"):
        error = call(f"{program}/{command}", killed, code=2).stderr
        assert "these weights were fitted to other data" in error and error.count("\n") == 1


def test_save_pretrained_writes_the_final_weights_also_where_no_step_is_left_and_nothing_after_a_signal(tmp_path: Path):
    program = made("trained_model", "save_pretrained at the end", tmp_path)
    stopped, cwd = folders(tmp_path, "stopped", "cwd")
    done = interrupt(f"{program}/{LONG} --epochs 3000", stopped, lambda process: process.send_signal(signal.SIGTERM))
    assert done.returncode == PREEMPTED, done.stderr  # the model has no save_pretrained
    saves = "lambda self, folder: (folder.mkdir(exist_ok=True), torch.save(self.state_dict(), folder / 'weights.pt'))"
    insert_before(program, "functions", f"Model.save_pretrained = {saves}\n\n\n")
    resume = "train.py --resume auto"
    for command in (f"train.py {SMALL} --epochs 2", resume, f"{resume} {ON_2}", f"{resume} --epochs 3"):
        execute(f"{program}/{command}", cwd)
        found = torch.load(run_dir(cwd) / "pretrained" / "weights.pt")
        torch.testing.assert_close(found, dict(weights(cwd)), atol=0, rtol=0)
    call(f"{program}/train.py --accelerator cpu --fast_run", cwd)
