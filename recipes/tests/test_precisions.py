"""Every other kind of training in mixed precision, with gradient accumulation, on two processes: all three at once."""

import importlib.util
import math
import signal
from pathlib import Path

import pytest
import torch
from edits import insert_after
from helpers import ON_2, RECIPES, SMALL, assert_same_run, call, history, run, run_dir, weights, with_recipe

pytestmark = pytest.mark.recipes
OPTIONS = (
    f"{SMALL} --logger_name csv --max_steps 4 --checkpoint_interval 1 --precision bf16-mixed "
    "--effective_batch_size 64 --micro_batch_size 16"
)
# The options that a recipe needs, beside ON_2.
TRAINED = {
    "bag_of_words": "",
    "contrastive": "",
    "crossvalidation": "--folds 3 --fold 1",
    "diffusion": "",
    "distillation": "--teacher {teacher}",
    "ema": "",
    "finetune": "--weights {teacher} --freeze_epochs 0.5 --lora_rank 2",
    "gan": "",
    "gradient_penalty": "",
    "hard_examples": "",
    "language_model": "",
    "multitask": "",
    "pictures": "--logger_name csv tensorboard",
    "profiler": "--profile 2",
    "reference": "--reference {teacher}",
    "regression": "",
    "reinforcement": "",
    "sam": "",
    "segmentation": "",
    "semi_supervised": "--labels_per_class 8",
    "sharded": "--strategy model_parallel",
    "text_classification": "",
    "token_batches": "",
    "two_models": "",
}
WITH_STATE = ("ema", "gan", "hard_examples", "two_models")  # beside a model and an optimizer


@pytest.mark.night
@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains_in_bf16_mixed_with_accumulation_on_two_processes(name: str, tmp_path: Path):
    if name == "text_classification" and not importlib.util.find_spec("transformers"):
        pytest.skip("needs transformers")
    program = with_recipe(name, tmp_path / "program")
    options = TRAINED[name]
    if "{teacher}" in options:
        call(f"train.py {SMALL} --out_dir teacher", tmp_path)
        options = options.format(teacher=run_dir(tmp_path, "teacher"))
    printed = run(f"{program}/train.py {OPTIONS} {ON_2} {options}", tmp_path).stdout
    assert "precision bf16-mixed" in printed and "16 micro_batch_size x 2 grad_accum_steps" in printed
    assert "finished after 4 of 4 steps" in printed
    assert math.isfinite(float(history(tmp_path)[-1]["train/loss"]))
    tensors = [value for value in weights(tmp_path).values() if isinstance(value, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("name", WITH_STATE)
def test_killed_there_and_resumed_it_is_the_same_run(name: str, tmp_path: Path):
    """All processes are killed in the third step."""
    program = with_recipe(name, tmp_path / "program")
    code = f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})"
    insert_after(program, "step is done", f'if step == 3 and config.comment == "kill":\n    {code}')
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run(f"{program}/train.py {OPTIONS} {ON_2}", whole)
    run(f"{program}/train.py {OPTIONS} {ON_2} --comment kill", killed, code=-signal.SIGKILL)
    run(f"{program}/train.py --resume auto {ON_2} --comment no", killed)
    assert_same_run(killed, whole)
    paths = [run_dir(cwd) / "checkpoints" / "step-00000004.ckpt" for cwd in (killed, whole)]
    ours, theirs = (torch.load(path, weights_only=True) for path in paths)
    assert ours["step"] == 4
    for entry in ours.keys() - {"checkpoint"}:
        torch.testing.assert_close(ours[entry], theirs[entry], atol=0, rtol=0)


def test_every_other_kind_of_training_is_here():
    methods = [path.stem for path in RECIPES.glob("methods/*.patch")]
    assert len(methods) == 20 and set(methods) <= TRAINED.keys()
