"""The edits of docs/training.md, docs/evaluation.md and docs/trained_model.md: a run with each is resumed exactly."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from edits import apply, copy_programs, insert_after, insert_before, replace, with_text
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    assert_same_run,
    assert_same_training,
    call,
    diff,
    edited,
    history,
    killed_and_resumed,
    on_one_and_two,
    results,
    run,
    run_dir,
    section,
    weights,
    with_recipe,
    with_tied_weights,
)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from config import TrainConfig
from data import build_datasets

of_training = partial(diff, "docs/training.md")
MEAN = of_training("More than means from compute_loss")
NO_DECAY = of_training("No weight decay of biases and norms")
MUON = of_training("Muon beside AdamW")
LAZY = of_training("Layers without a number of inputs")
SYNC = of_training("BatchNorm over all GPUs")
CHECKPOINTING = of_training("Activation checkpointing")
HUGGING_FACE = diff("docs/trained_model.md", "A model of Hugging Face's hub")
TWELVE = f"{LONG} --epochs 12"

pytestmark = pytest.mark.recipes


ON_TOP_OF = {MUON: "language_model"}


def assert_resumed_and_the_same_on_two_processes(diff: str, cwd: Path, options: str = "") -> tuple[Path, Path]:
    """Returns the edited programs, and where the run that was not killed is."""
    (cwd / "program").mkdir()
    program = edited(diff, cwd / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE} {options}".strip(), cwd)
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8 {options}".strip(), cwd)
    assert_same_training(two, one)
    return program, whole


# ---- more than means from compute_loss


@pytest.fixture(scope="module")
def with_mean(tmp_path_factory) -> Path:
    return edited(MEAN, tmp_path_factory.mktemp("program"))


def test_a_buffer_that_the_loop_changes_is_the_mean_of_all_micro_batches_and_processes(with_mean, tmp_path):
    """After one step: of four micro-batches on one process, of two on each of two. One that `forward` changes counts
    those of the first process alone."""
    program = edited(MEAN, tmp_path / "program")
    append = "        found.append(images.mean(0))\n"
    keep = '        torch.save(images, f\'{len([*__import__("pathlib").Path().glob("*.pt")])}.pt\')\n'
    with_text(program, "train.py", (append, append + keep))
    insert_before(program, "forward", "        self.count += self.training\n")
    insert_before(program, "layers", '        self.register_buffer("count", torch.zeros(()))\n')
    with_text(program, "model.py", ("from torch import Tensor, nn\n", "import torch\nfrom torch import Tensor, nn\n"))
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    run(f"{program}/{LONG} --max_steps 1", one)
    images = torch.cat([torch.load(path) for path in one.glob("*.pt")])
    assert len(images) == 64
    torch.testing.assert_close(weights(one)["mean"], images.mean(0) * 0.01)
    run(f"{program}/{LONG} --max_steps 1 {ON_2}", two)
    torch.testing.assert_close(weights(two)["mean"], weights(one)["mean"])
    assert (weights(one)["count"], weights(two)["count"]) == (4, 2)


def test_a_run_with_a_buffer_that_the_loop_changes_is_resumed_evaluated_and_the_same_on_two_processes(
    with_mean, tmp_path
):
    whole, _ = killed_and_resumed(f"{with_mean}/{TWELVE}", tmp_path)
    assert results(with_mean, whole, "--checkpoint last --split test")["accuracy"] > 0.8
    one, two = on_one_and_two(f"{with_mean}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- no weight decay of biases and norms


def test_matrices_alone_decay(tmp_path):
    """Without gradients. The model has a norm, too."""
    program = edited(NO_DECAY, tmp_path / "program")
    replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1),\nnn.GroupNorm(2, width),\n")
    replace(program, "values", '{"loss": 0 * F.cross_entropy(logits, targets)}')
    call(f"{program}/train.py {SMALL} --weight_decay 0.5 --checkpoint_interval 1 --num_checkpoint_keep 0", tmp_path)
    folder = run_dir(tmp_path) / "checkpoints"
    first, last = (torch.load(folder / f"step-{step:08}.ckpt")["model"] for step in (1, 20))
    shrunk = {name for name in first if not torch.equal(first[name], last[name])}
    assert shrunk == {name for name, tensor in first.items() if tensor.ndim > 1} < {*first}
    assert all(last[name].norm() < first[name].norm() for name in shrunk)


def test_a_run_with_two_groups_is_resumed_and_the_same_on_two_processes(tmp_path):
    """Without weight decay it is the plain run."""
    (tmp_path / "program").mkdir()
    program = edited(NO_DECAY, tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE} --weight_decay 0", tmp_path)
    (tmp_path / "plain").mkdir()
    call(f"{TWELVE} --weight_decay 0", tmp_path / "plain")
    torch.testing.assert_close(weights(whole), weights(tmp_path / "plain"), atol=0, rtol=0)
    one, two = on_one_and_two(f"{program}/{LONG} --weight_decay 0.5 --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- Muon beside AdamW, on top of the language model

FEW = f"train.py {SMALL} --epochs 2 --val_frequency 2 --logger_name csv"  # 8 steps


@pytest.fixture(scope="module")
def with_muon(tmp_path_factory) -> Path:
    return apply(MUON, with_recipe("language_model", tmp_path_factory.mktemp("program")))


def last_checkpoint(cwd: Path) -> dict:
    return torch.load(max(run_dir(cwd).glob("checkpoints/step-*.ckpt")))


def test_muon_trains_the_matrices_of_the_hidden_layers_and_adamw_the_others(with_muon, tmp_path):
    call(f"{with_muon}/{FEW}", tmp_path)
    saved = last_checkpoint(tmp_path)
    (adamw,), (muon,) = (saved["checkpoint"]["optimizers"][name] for name in ("optimizer", "muon"))
    assert len(muon["parameters"]) == 3 * 4 and all(name.startswith("model.blocks.") for name in muon["parameters"])
    assert (adamw["class"], muon["class"]) == ("AdamW", "Muon")
    hidden, others = (
        {name.removeprefix("model.").split()[0] for name in group["parameters"]} for group in (muon, adamw)
    )
    assert hidden | others == {*saved["model"]} and not hidden & others
    assert {saved["model"][name].ndim for name in hidden} == {2}


def test_each_optimizer_has_a_rate_of_its_own_and_the_norm_is_that_of_all_gradients(with_muon, tmp_path):
    """Where Muon's is 0, the hidden matrices stay as they were. The norm is that of the recipe alone."""
    program = with_recipe("language_model", tmp_path / "program")
    groups = 'torch.optim.Muon([{"params": hidden, "lr": 0.0}], '
    still = apply(MUON.replace("torch.optim.Muon(hidden, ", groups), program)
    weights_of, norms = {}, {}
    for name, script in {
        "still": still,
        "muon": with_muon,
        "plain": with_recipe("language_model", tmp_path / "plain"),
    }.items():
        (tmp_path / f"{name}_runs").mkdir()
        options = "--checkpoint_interval 1 --log_interval 1 --num_checkpoint_keep 0"
        call(f"{script}/{FEW} {options}", tmp_path / f"{name}_runs")
        folder = run_dir(tmp_path / f"{name}_runs") / "checkpoints"
        weights_of[name] = [torch.load(folder / f"step-{step:08}.ckpt")["model"] for step in (1, 8)]
        norms[name] = float(history(tmp_path / f"{name}_runs")[0]["train/grad_norm"])
    for name, tensor in weights_of["still"][0].items():
        is_hidden = name.startswith("blocks.") and tensor.ndim == 2
        assert torch.equal(tensor, weights_of["still"][1][name]) == is_hidden, name
        assert not torch.equal(weights_of["muon"][0][name], weights_of["muon"][1][name])
    assert norms["muon"] == pytest.approx(norms["plain"], rel=1e-5)


def test_a_run_with_muon_is_resumed_exactly(with_muon, tmp_path):
    options = "--epochs 8 --val_frequency 4 --max_grad_norm 0.5"
    whole, killed = killed_and_resumed(f"{with_muon}/{LONG} {options}", tmp_path)
    for name in ("optimizer", "muon"):
        states = [last_checkpoint(cwd)[name]["state"] for cwd in (killed, whole)]
        torch.testing.assert_close(*states, atol=0, rtol=0)


def test_two_processes_train_the_same_with_muon(with_muon, tmp_path):
    """Its steps are computed in bfloat16."""
    one, two = on_one_and_two(f"{with_muon}/{FEW} --micro_batch_size 32", tmp_path)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", ["--precision bf16-mixed", pytest.param("--compile", marks=pytest.mark.night)])
def test_muon_in_mixed_precision_and_compiled(options: str, with_muon, tmp_path):
    call(f"{with_muon}/{FEW} --fast_run {options}", tmp_path)


# ---- BatchNorm over all GPUs


def test_sync_batchnorm_leaves_a_cpu_as_it_is(tmp_path):
    program = edited(SYNC, tmp_path / "program")
    replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n")
    run(f"{program}/train.py {SMALL} --epochs 1 {ON_2}", tmp_path)
    assert "on 380 test samples" in call(f"{program}/test.py --out_dir train_out --accelerator cpu", tmp_path).stdout


# ---- lazy layers, activation checkpointing, torch.hub


def test_a_model_with_lazy_layers_is_evaluated_resumed_and_the_same_on_two_processes(tmp_path):
    program, whole = assert_resumed_and_the_same_on_two_processes(LAZY, tmp_path)
    assert weights(whole)["layers.8.weight"].shape == (10, 2 * 4 * 2 * 2)
    assert results(program, whole, "--checkpoint last --split test")["accuracy"] > 0.7


FORWARDS = "model.module.layers[0].register_forward_hook(lambda *_: print('forward'))"


@pytest.mark.parametrize("options", ["", "--precision bf16-mixed"])
def test_activation_checkpointing_computes_the_first_part_twice_and_the_same_in_each_bit(options: str, tmp_path):
    """With dropout. 20 steps of 4 micro-batches."""
    forwards = {}
    for name, edit in (("plain", copy_programs), ("edited", lambda folder: edited(CHECKPOINTING, folder))):
        program = insert_after(edit(tmp_path / f"program_{name}"), "set-up is done", FORWARDS)
        (tmp_path / name).mkdir()
        command = f"{program}/train.py {SMALL} --micro_batch_size 16 --dropout 0.5 {options}"
        forwards[name] = call(command, tmp_path / name).stdout.count("forward\n")
    assert_same_run(tmp_path / "edited", tmp_path / "plain")
    assert forwards["edited"] == forwards["plain"] + 20 * 4


def test_a_run_with_activation_checkpointing_is_resumed_and_the_same_on_two_processes(tmp_path):
    assert_resumed_and_the_same_on_two_processes(CHECKPOINTING, tmp_path)


HUBCONF = """
from torch import nn

from utils import pixels


def small_net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels(), num_classes))
"""


def test_a_model_of_torch_hub_may_have_a_module_of_the_same_name(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "hubconf.py").write_text(HUBCONF)
    (repository / "utils.py").write_text("def pixels():\n    return 64\n")
    (code,) = re.findall(r"^```python\n(.*?)^```$", section("docs/training.md", "A model of torch.hub"), re.M | re.S)
    code = f"    import sys\n{code.replace('REPOSITORY', str(repository))}"
    program = replace(tmp_path / "program", "model", f"{code}    return Model(")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE}", tmp_path)
    assert results(program, whole, "--checkpoint last --split test")["accuracy"] > 0.8
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- predictions, torch.export, ONNX, safetensors, Hugging Face's hub: after the code of docs/editing.md


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (REPO / page).read_text(), re.DOTALL | re.MULTILINE)


LOAD, PREDICT, EXPORT, ONNX, SAFETENSORS, PRETRAINED = python_of("docs/trained_model.md")


def run_code(code: str, program: Path, cwd: Path, **env: str) -> str:
    """Runs the code of docs/editing.md, which loads the weights of the run in `cwd`, and other code after it. Returns
    what it prints."""
    load = LOAD.replace("20261122-102325-train_out", run_dir(cwd).name)
    (program / "use.py").write_text(load + code)
    return run(f"{program}/use.py", cwd, **env).stdout


def test_predictions_for_inputs_without_labels_are_those_of_test_py_in_the_order_of_their_names(tmp_path):
    """The best checkpoint is not the last one. The files are made in another order."""
    call(f"train.py {SMALL}", tmp_path)
    folder = run_dir(tmp_path)
    shutil.copy(folder / "checkpoints" / "step-00000012.ckpt", folder / "checkpoints" / "best.ckpt")
    call("test.py --out_dir train_out --predictions --accelerator cpu", tmp_path)
    expected, _ = torch.load(folder / "predictions_test_best.pt")
    images = build_datasets(TrainConfig(), augment=False)["test"].images
    (tmp_path / "inputs").mkdir()
    for number in reversed(range(len(images))):
        torch.save(images[number].clone(), tmp_path / "inputs" / f"{number:03}.pt")
    run_code(PREDICT, copy_programs(tmp_path / "program"), tmp_path)
    found = torch.load(tmp_path / "predictions.pt")
    assert found["names"] == [f"{number:03}.pt" for number in range(len(images))]
    torch.testing.assert_close(found["logits"], expected)


def test_predictions_for_a_tensor_of_inputs(tmp_path):
    call(f"train.py {SMALL}", tmp_path)
    call("test.py --out_dir train_out --predictions --accelerator cpu", tmp_path)
    expected, _ = torch.load(run_dir(tmp_path) / "predictions_test_best.pt")
    torch.save(build_datasets(TrainConfig(), augment=False)["test"].images, tmp_path / "inputs.pt")
    code = PREDICT.replace('Files("inputs")', 'torch.load("inputs.pt")')
    code = code[: code.index("torch.save(")] + "torch.save(logits, 'logits.pt')\n"
    run_code(code, copy_programs(tmp_path / "program"), tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_predictions_for_inputs_of_different_lengths_and_a_model_with_several_outputs():
    """The expression of the page."""
    text = " ".join((REPO / "docs/trained_model.md").read_text().split())
    (code,) = re.findall(r"`(\[row for [^`]*\])`", text)
    inputs = [torch.full((length,), float(length)) for length in (3, 1, 5)]
    pad = partial(pad_sequence, batch_first=True)
    names = {"DataLoader": partial(DataLoader, batch_size=2), "inputs": inputs, "pad": pad, "model": lambda x: (-x, 0)}
    rows = eval(code, names)
    assert [row.tolist() for row in rows] == [[-3, -3, -3], [-1, 0, 0], [-5] * 5]


def test_a_recurrent_layer_is_exported_for_the_length_of_the_example_alone():
    """Otherwise the page would not be right."""
    model = torch.nn.GRU(4, 5, batch_first=True)
    example = (torch.randn(2, 7, 4),)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    torch.export.export(model, example, dynamic_shapes=[{0: batch}])
    with pytest.raises(Exception, match="marked length as dynamic"):
        torch.export.export(model, example, dynamic_shapes=[{0: batch, 1: length}])


def test_an_exported_model_gives_the_same_logits_for_batches_of_any_size(tmp_path):
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    check = """
for size in (1, 2, 7):
    images = torch.stack([dataset[i][0] for i in range(size)])
    torch.testing.assert_close(torch.export.load("model.pt2").module()(images), model(images))
print("the same")
"""
    assert run_code(EXPORT + check, copy_programs(tmp_path / "program"), tmp_path).endswith("the same\n")


def test_a_model_in_onnx_gives_the_same_logits_for_batches_of_any_size(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    call(f"train.py {SMALL} --epochs 1", tmp_path)
    check = """
for size in (1, 2, 7):
    images = torch.stack([dataset[i][0] for i in range(size)])
    (logits,) = session.run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(images))
print("the same")
"""
    assert run_code(EXPORT + ONNX + check, copy_programs(tmp_path / "program"), tmp_path).endswith("the same\n")
    assert [path.name for path in tmp_path.glob("model.onnx*")] == ["model.onnx"]  # with the weights in it


@pytest.mark.parametrize("file", ["model.pt", "best.ckpt"])
def test_weights_as_safetensors_are_read_back_in_each_bit(file: str, tmp_path):
    """A tied weight is in the file once, and in the model twice."""
    safetensors = pytest.importorskip("safetensors.torch")
    program = with_tied_weights(tmp_path / "program")
    call(f"{program}/train.py {SMALL} --val_interval 1", tmp_path)
    load_again = SAFETENSORS.replace("load_model(", "for p in model.parameters(): p.data.zero_()\nload_model(")
    code = load_again + "torch.save(model.state_dict(), 'read.pt')"
    expected = weights(tmp_path)
    if file == "best.ckpt":
        expected = torch.load(run_dir(tmp_path) / "checkpoints" / file)["model"]
        code = 'model.load_state_dict(torch.load(run / "checkpoints/best.ckpt")["model"])\n' + code
    run_code(code, program, tmp_path)
    read = torch.load(tmp_path / "read.pt")
    torch.testing.assert_close(read, dict(expected), atol=0, rtol=0)
    assert torch.equal(read["layers.1.weight"], read["layers.2.weight"])
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert len(tensors) == len(read) - 1
    torch.testing.assert_close(tensors, {name: read[name] for name in tensors}, atol=0, rtol=0)


@pytest.fixture
def with_hub(tmp_path) -> Path:
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    (tmp_path / "program").mkdir()
    return edited(HUGGING_FACE, tmp_path / "program")


def test_a_model_of_hugging_face_is_loaded_from_a_folder_by_model_py_alone(with_hub, tmp_path):
    """Without a network, and with the options of the run, which are not the defaults."""
    call(f"{with_hub}/train.py {SMALL} --dropout 0.5", tmp_path)
    printed = run_code(PRETRAINED, with_hub, tmp_path, HF_HUB_OFFLINE="1").splitlines()
    assert printed[-1] == printed[0] and printed[0].startswith("tensor(")
    assert {path.name for path in (tmp_path / "hub_model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    config = json.loads((tmp_path / "hub_model" / "config.json").read_text())
    assert config == {"image_shape": [1, 8, 8], "num_classes": 10, "width": 4, "dropout": 0.5}

    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(with_hub / "model.py", alone)
    (alone / "load.py").write_text(
        "import torch\nfrom model import Model\n"
        "model = Model.from_pretrained('hub_model')\ntorch.save(model.state_dict(), 'read.pt')\n"
    )
    run(f"{alone}/load.py", tmp_path, HF_HUB_OFFLINE="1")
    torch.testing.assert_close(torch.load(tmp_path / "read.pt"), dict(weights(tmp_path)), atol=0, rtol=0)


def test_a_run_with_a_model_of_hugging_face_is_resumed_exactly(with_hub, tmp_path):
    """With the bits of the plain run."""
    whole, _ = killed_and_resumed(f"{with_hub}/{TWELVE}", tmp_path)
    (tmp_path / "plain").mkdir()
    call(TWELVE, tmp_path / "plain")
    torch.testing.assert_close(weights(whole), weights(tmp_path / "plain"), atol=0, rtol=0)
