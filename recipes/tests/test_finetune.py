"""The recipe finetune: the weights of an earlier run, a new head, a body that is frozen at first, LoRA."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from edits import insert_after, replace
from helpers import (
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    assert_same_training,
    assert_told_by_ranks,
    call,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    truncate,
    weights,
    with_recipe,
    with_tied_weights,
)

pytestmark = pytest.mark.recipes
HEAD = ("layers.8.weight", "layers.8.bias")
# A checkpoint after each of 6 steps, 4 of them an epoch; dropout in the head alone.
STEPS = f"{SMALL} --epochs 1.5 --logger_name csv --checkpoint_interval 1 --num_checkpoint_keep 6 --weight_decay 0.5"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("finetune", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A finished run of the programs as they are. To be read, not changed."""
    cwd = tmp_path_factory.mktemp("source")
    call(f"train.py {SMALL} --logger_name csv", cwd)
    return run_dir(cwd)


MERGE = """
import data, torch, train
from pathlib import Path
from runtime import config_file
from torch.nn.utils import parametrize

run = Path("{folder}")
config = config_file.read_config(train.TrainConfig, run)
dataset = data.build_datasets(config, augment=False)["test"]
model = train.build_model(config, dataset)
model.load_state_dict(torch.load(run / "model.pt"))
images = dataset[0][0][None]
expected = model.eval()(images)
for layer in (model.layers[0], model.layers[2], model.layers[4]):
    parametrize.remove_parametrizations(layer, "weight")
torch.testing.assert_close(model(images), expected)
print(*model.state_dict())
"""


def saved_steps(folder: Path) -> dict[int, dict]:
    paths = {step: folder / "checkpoints" / f"step-{step:08}.ckpt" for step in range(1, 7)}
    return {step: torch.load(path, weights_only=True) for step, path in paths.items()}


def test_few_labels_are_enough(program: Path, tmp_path: Path):
    """With 50 labelled digits, after a run on all digits that was told their pairs alone."""
    call(f"{program}/train.py --accelerator cpu --dataset digits_pairs --epochs 10 --out_dir pairs", tmp_path)
    few = "--accelerator cpu --dataset digits_few --effective_batch_size 10 --lr_scaling_rule none"
    found = {}
    for name, options in {"scratch": "", "tuned": f"--weights {run_dir(tmp_path, 'pairs')}"}.items():
        call(f"{program}/train.py {few} {options} --checkpoint_frequency 0 --out_dir {name}", tmp_path)
        done = call(f"{program}/test.py --out_dir {name} --checkpoint last --accelerator cpu", tmp_path)
        found[name] = float(done.stdout.partition("\naccuracy ")[2].split()[0])
    assert found["tuned"] > found["scratch"] + 0.05


# ---- weights


@pytest.mark.parametrize("kind", ["run", "model.pt", "best.ckpt", "state dict", "safetensors"])
def test_the_body_has_the_weights_and_the_head_is_new(kind: str, program: Path, source: Path, tmp_path: Path):
    """Of whatever file they are: also if its head is of another size, or has another name."""
    expected = torch.load(source / "model.pt", weights_only=True)
    path = {"run": source, "model.pt": source / "model.pt", "best.ckpt": source / "checkpoints" / "best.ckpt"}.get(kind)
    if kind == "best.ckpt":
        expected = torch.load(path, weights_only=True)["model"]
    if kind == "state dict":
        path = tmp_path / "any.pt"
        torch.save({**expected, "layers.8.weight": torch.zeros(3, 32), "fc.bias": torch.zeros(3)}, path)
    if kind == "safetensors":
        path = tmp_path / "any.safetensors"
        pytest.importorskip("safetensors.torch").save_file(expected, path)
    printed = call(f"{program}/train.py {STEPS} --freeze_epochs 1 --base_lr 1e-3 --weights {path}", tmp_path).stdout
    unused = [*HEAD, "fc.bias"] if kind == "state dict" else HEAD
    assert f"for 6 tensors; not used of it: {', '.join(sorted(unused))}\n" in printed
    model = saved_steps(run_dir(tmp_path))[1]["model"]
    call(f"{program}/train.py {STEPS} --freeze_epochs 1 --base_lr 1e-3 --out_dir new --max_steps 1", tmp_path)
    new = torch.load(run_dir(tmp_path, "new") / "model.pt", weights_only=True)
    for name in model:
        if name in HEAD:  # one step of AdamW later: both at most base_lr away
            torch.testing.assert_close(model[name], new[name], atol=2e-3, rtol=0)
        else:
            assert torch.equal(model[name], expected[name]), name


@pytest.mark.parametrize("name", ["layers.1.weight", "layers.2.weight"])
def test_a_tied_weight_is_taken_under_any_of_its_names(name: str, tmp_path: Path):
    """A file of safetensors has one of them alone."""
    safetensors = pytest.importorskip("safetensors.torch")
    program = with_tied_weights(with_recipe("finetune", tmp_path / "program"))
    call(f"{program}/train.py {STEPS}", tmp_path)
    expected = dict(torch.load(run_dir(tmp_path) / "model.pt"))
    tensors = {key: value for key, value in expected.items() if key in (name, "layers.0.weight")}
    tensors |= {key: value for key, value in expected.items() if key not in ("layers.1.weight", "layers.2.weight")}
    safetensors.save_file(tensors, tmp_path / "tied.safetensors")
    options = f"--freeze_epochs 1 --max_steps 1 --out_dir tuned --weights {tmp_path / 'tied.safetensors'}"
    printed = call(f"{program}/train.py {STEPS} {options}", tmp_path).stdout
    assert "for 9 tensors; not used of it: layers.10.bias, layers.10.weight\n" in printed
    found = torch.load(run_dir(tmp_path, "tuned") / "model.pt")
    for key in ("layers.0.weight", "layers.1.weight", "layers.2.weight"):
        assert torch.equal(found[key], expected[key])


def test_damaged_or_missing_safetensors_are_one_line(program: Path, source: Path, tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "cut.safetensors"
    safetensors.save_file(torch.load(source / "model.pt"), path)
    truncate(path)
    for name, message in ((path.name, ""), ("nowhere.safetensors", "nowhere.safetensors is missing")):
        error = call(f"{program}/train.py {SMALL} --weights {name}", tmp_path, code=2).stderr
        assert error.startswith(f"train.py: error: --weights {name}: {message}") and error.count("\n") == 1
    assert [*tmp_path.iterdir()] == [path]


def broken(case: str, source: Path, folder: Path) -> str:
    """A path of weights that cannot be used."""
    contents = torch.load(source / "model.pt", weights_only=True)
    path = folder / "weights.pt"
    if case == "missing":
        return "nowhere"
    if case == "unfinished run":
        shutil.copytree(source, folder / "unfinished", ignore=shutil.ignore_patterns("model.pt"))
        return "unfinished"
    if case == "text":
        path.write_text("weights")
    elif case == "of code":  # a pickled object
        torch.save(torch.nn.Linear(2, 2), path)
    elif case == "lacks a tensor":
        del contents["layers.2.bias"]
        torch.save(contents, path)
    elif case == "other shape":
        torch.save({**contents, "layers.2.bias": torch.zeros(5)}, path)
    elif case == "truncated":
        shutil.copy(source / "model.pt", path)
        truncate(path)
    elif case == "one bit":
        data = bytearray((source / "model.pt").read_bytes())
        tensor = contents["layers.2.weight"].numpy().tobytes()
        data[data.index(tensor) + 5] ^= 1
        path.write_bytes(data)
    return "weights.pt"


BROKEN = {
    "missing": "nowhere is missing",
    "unfinished run": "unfinished/model.pt is missing",
    "text": "weights.pt is damaged, or not a file of torch.save",
    "of code": "Weights only load failed",
    "truncated": "weights.pt is damaged, or not a file of torch.save",
    "one bit": "weights.pt is damaged, or not a file of torch.save",
    "lacks a tensor": "layers.2.bias of the model has the shape (8,), the file has none",
    "other shape": "layers.2.bias of the model has the shape (8,), the file has the shape (5,)",
}


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_do_not_fit_are_one_line(case: str, program: Path, source: Path, tmp_path: Path):
    path = broken(case, source, tmp_path)
    before = sorted(tmp_path.iterdir())
    error = call(f"{program}/train.py {SMALL} --weights {path}", tmp_path, code=2).stderr
    assert f"--weights {path}: " in error and BROKEN[case] in error and len(error.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_two_processes_name_them_once_and_each_a_mistake(program: Path, source: Path, tmp_path: Path):
    done = run(f"{program}/train.py {SMALL} {ON_2} --fast_run --weights {source}", tmp_path)
    assert done.stdout.count(f"weights from {source}") == 1
    error = run(f"{program}/train.py {SMALL} {ON_2} --weights nowhere", tmp_path, code=2).stderr
    assert_told_by_ranks(error, "--weights nowhere: nowhere is missing")
    assert not [*tmp_path.iterdir()]


# ---- freezing, learning rates


def check_frozen(folder: Path, source: Path) -> None:
    """The body is that of the source in the first 4 of 6 steps, and the optimizer knows nothing of it."""
    saved = saved_steps(folder)
    expected = torch.load(source / "model.pt", weights_only=True)
    body = [name for name in expected if name not in HEAD]
    for step, checkpoint in saved.items():
        model = checkpoint["model"]
        same = [torch.equal(model[name], expected[name]) for name in body]
        assert all(same) if step <= 4 else not any(same), step
        assert len(checkpoint["optimizer"]["state"]) == (2 if step <= 4 else 2 + len(body))
        head_lr, body_lr = (group["lr"] for group in checkpoint["optimizer"]["param_groups"])
        assert body_lr == 0.25 * head_lr > 0
        if step > 1:
            assert not torch.equal(model["layers.8.weight"], saved[step - 1]["model"]["layers.8.weight"])


def test_the_body_is_frozen_and_thawed_with_a_learning_rate_of_its_own(program: Path, source: Path, tmp_path: Path):
    """Also on two processes, where DDP would wait for the frozen gradients: they train the same model."""
    options = f"--weights {source} --freeze_epochs 1 --body_lr 0.25 --micro_batch_size 16"
    folders = on_one_and_two(f"{program}/train.py {STEPS} {options}", tmp_path)
    assert_same_training(*folders)
    for folder in folders:
        check_frozen(run_dir(folder), source)


@pytest.mark.parametrize("options, last_frozen", [("--freeze_epochs 1", 4), ("--lora_rank 2", 0)])
def test_a_frozen_body_is_in_evaluation_mode_and_one_with_lora_is_not(options: str, last_frozen: int, tmp_path: Path):
    """So the frozen one has no dropout, and its BatchNorm keeps its averages. The head is in training mode all along,
    although a validation after each step puts the whole model into evaluation mode."""
    program = with_recipe("finetune", tmp_path / "program")
    line = "nn.Conv2d(channels, width, 3, padding=1),\n"
    replace(program, "first layer", f"{line}nn.BatchNorm2d(width),\nnn.Dropout(0.5),\n")
    names = "(nn.BatchNorm2d, nn.Dropout)"
    modes = f"print('modes', [layer.training for layer in model.layers if isinstance(layer, {names})])"
    insert_after(program, "micro-batch is done", modes)
    printed = call(f"{program}/train.py {STEPS} {options} --val_interval 1", tmp_path).stdout
    expected = [f"modes [{step > last_frozen}, {step > last_frozen}, True]" for step in range(1, 7)]
    assert [line for line in printed.splitlines() if line.startswith("modes")] == expected
    saved = saved_steps(run_dir(tmp_path))
    means = [torch.zeros(4), *(saved[step]["model"]["layers.1.running_mean"] for step in range(1, 7))]
    for step in range(1, 7):
        assert torch.equal(means[step], means[step - 1]) == (step <= last_frozen)


def test_lora_is_merged_into_the_weights(program: Path, source: Path, tmp_path: Path):
    """As the patch says: the same logits, of a model with the tensors of one without LoRA."""
    call(f"{program}/train.py {STEPS} --weights {source} --lora_rank 2", tmp_path)
    (program / "merge.py").write_text(MERGE.format(folder=run_dir(tmp_path)))
    names = run(f"{program}/merge.py", tmp_path).stdout.split()
    assert {*names} == {*torch.load(source / "model.pt")}


# ---- resume


@pytest.mark.parametrize(
    "options", ["--freeze_epochs 1", pytest.param("--freeze_epochs 20", marks=pytest.mark.night), "--lora_rank 2"]
)
def test_killed_and_resumed_is_the_same_run(options: str, program: Path, source: Path, tmp_path: Path):
    """Killed after the body was thawed, and before; then the source is gone, which an evaluation needs no more."""
    copy = Path(shutil.copytree(source, tmp_path / "source"))

    def resume(command: str, cwd: Path) -> None:
        shutil.move(copy, tmp_path / "elsewhere")
        call(command, cwd)

    command = f"{program}/{LONG} --body_lr 0.5 --weights {copy} {options}"
    _, killed = killed_and_resumed(command, tmp_path, resume)
    call(f"{program}/test.py --out_dir train_out --accelerator cpu", killed)


@pytest.mark.parametrize("processes", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_killed_before_the_first_checkpoint_it_loads_the_weights_again(processes: str, source: Path, tmp_path: Path):
    program = with_recipe("finetune", tmp_path / "program")
    code = f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})"
    insert_after(program, "step is done", f'if step == 3 and config.comment == "kill":\n    {code}')
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    options = f"{SMALL} --logger_name csv --max_steps 6 --checkpoint_interval 4 --val_interval 4 --freeze_epochs 0.5"
    command = f"{program}/train.py {options} --weights {copy} {processes}"
    run(command, whole)
    run(f"{command} --comment kill", killed, code=-signal.SIGKILL)
    assert not [*run_dir(killed).glob("checkpoints/*")]

    shutil.move(copy, tmp_path / "elsewhere")
    error = run(f"{program}/train.py --resume auto --comment no", killed, code=2).stderr
    assert f"--weights {copy}: {copy} is missing" in error
    shutil.move(tmp_path / "elsewhere", copy)
    run(f"{program}/train.py --resume auto --comment no", killed)
    assert_same_run(killed, whole)


def test_a_resume_cannot_change_where_the_weights_are_from(program: Path, source: Path, tmp_path: Path):
    call(f"{program}/train.py {STEPS} --weights {source} --lora_rank 2", tmp_path)
    for option in ("--weights elsewhere", "--body_lr 0.5", "--lora_rank 3"):
        error = call(f"{program}/train.py --resume auto --epochs 2 {option}", tmp_path, code=2).stderr
        assert f"{option}: a resume cannot change it" in error


# ---- LoRA


def test_lora_trains_a_matrix_of_low_rank_beside_each_weight(program: Path, source: Path, tmp_path: Path):
    """Also on two processes. In the body, weights and biases stay those of the source, without find_unused_parameters:
    what is never trained is not DDP's."""
    options = f"--weights {source} --lora_rank 2 --micro_batch_size 16"
    folders = on_one_and_two(f"{program}/train.py {STEPS} {options}", tmp_path)
    assert_same_training(*folders)
    expected = torch.load(source / "model.pt", weights_only=True)
    for folder in folders:
        saved = saved_steps(run_dir(folder))
        assert len(saved[6]["optimizer"]["state"]) == 3 * 2 + len(HEAD)
        for layer in ("layers.0", "layers.2", "layers.4"):
            lora = f"{layer}.parametrizations.weight"
            for name, original in (("weight", f"{lora}.original"), ("bias", f"{layer}.bias")):
                assert torch.equal(saved[6]["model"][original], expected[f"{layer}.{name}"])
            assert saved[6]["model"][f"{lora}.0.up"].shape[1] == saved[6]["model"][f"{lora}.0.down"].shape[0] == 2
            assert not torch.equal(saved[1]["model"][f"{lora}.0.up"], saved[6]["model"][f"{lora}.0.up"])
            assert not torch.equal(saved[1]["model"][f"{lora}.0.down"], saved[6]["model"][f"{lora}.0.down"])


def test_lora_begins_as_the_model_it_adapts(program: Path, source: Path, tmp_path: Path):
    """Where nothing was trained in the body, for want of a learning rate, LoRA makes no difference."""
    losses = []
    for rank in (0, 2):
        options = f"--weights {source} --lora_rank {rank} --body_lr 1e-30 --dropout 0 --max_steps 3"
        call(f"{program}/train.py {SMALL} {options} --out_dir rank_{rank}", tmp_path)
        folder = run_dir(tmp_path, f"rank_{rank}")
        done = call(f"{program}/test.py --out_dir {folder} --checkpoint last --accelerator cpu", tmp_path)
        losses.append(float(done.stdout.partition("\nloss ")[2].split()[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "options", ["--precision bf16-true", "--precision 64-true", pytest.param("--compile", marks=pytest.mark.night)]
)
def test_any_precision_and_compiled(options: str, program: Path, source: Path, tmp_path: Path):
    for part in ("--freeze_epochs 0.5", "--lora_rank 2"):
        command = f"{program}/train.py {SMALL} --fast_run --weights {source} {part} {options}"
        assert "finished after 4 of 4 steps" in call(command, tmp_path).stdout
    assert weights(source.parent)  # the source is as it was
