"""recipes/methods/text_classification.patch: applied to a copy of the programs, and run with transformers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from edits import insert_after
from helpers import (
    LONG,
    SMALL,
    assert_same_training,
    call,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    with_recipe,
)

pytestmark = [
    pytest.mark.recipes,
    pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("text_classification", tmp_path_factory.mktemp("program"))


def test_it_learns_and_is_evaluated(program: Path, tmp_path: Path):
    """The largest class has a fifth of the samples."""
    options = "--accelerator cpu --epochs 5 --warmup_epochs 0.5 --freeze_epochs 0.2 --dropout 0 --logger_name csv"
    call(f"{program}/train.py {options}", tmp_path)
    printed = call(f"{program}/test.py --out_dir train_out --accelerator cpu --predictions", tmp_path).stdout
    report = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())
    assert report["results"]["accuracy"] > 0.25
    assert f"on {report['num_samples']} test samples" in printed
    logits, targets = torch.load(run_dir(tmp_path) / "predictions_test_best.pt", weights_only=True)
    assert logits.shape == (report["num_samples"], 9) and targets.shape == (report["num_samples"],)


def check_frozen(folder: Path) -> None:
    """Neither the weights of the body changed in the first 4 of 6 steps nor what the optimizer knows of them."""
    paths = {step: folder / "checkpoints" / f"step-{step:08}.ckpt" for step in range(1, 7)}
    saved = {step: torch.load(path, weights_only=True) for step, path in paths.items()}
    body = [name for name in saved[1]["model"] if name.startswith("bert.")]
    for step in range(2, 7):
        model, before = saved[step]["model"], saved[step - 1]["model"]
        changed = [not torch.equal(model[name], before[name]) for name in body]
        assert not any(changed) if step <= 4 else all(changed), step
        assert not torch.equal(model["classifier.weight"], before["classifier.weight"])
        assert len(saved[step]["optimizer"]["state"]) == (2 if step <= 4 else 2 + len(body))
        head_lr, body_lr = (group["lr"] for group in saved[step]["optimizer"]["param_groups"])
        assert body_lr == 0.25 * head_lr > 0


def test_the_body_is_frozen_and_has_a_learning_rate_of_its_own(program: Path, tmp_path: Path):
    """Also on two processes, where DDP would wait for the frozen gradients: they train the same model."""
    options = "--epochs 1.5 --freeze_epochs 1 --weight_decay 0.5 --micro_batch_size 32 --logger_name csv"
    command = f"{program}/train.py {SMALL} {options} --checkpoint_interval 1 --num_checkpoint_keep 6"
    folders = on_one_and_two(command, tmp_path)
    assert_same_training(*folders)
    for folder in folders:
        check_frozen(run_dir(folder))


def test_a_frozen_body_has_no_dropout(tmp_path: Path):
    """The head has, although a validation after each step puts the whole model into evaluation mode."""
    program = with_recipe("text_classification", tmp_path / "program")
    modes = "print('modes', model.base_model.training, model.dropout.training)"
    insert_after(program, "micro-batch is done", modes)
    options = "--max_steps 6 --freeze_epochs 1 --val_interval 1"
    printed = call(f"{program}/train.py {SMALL} {options}", tmp_path).stdout
    expected = [f"modes {step > 4} True" for step in range(1, 7)]
    assert [line for line in printed.splitlines() if line.startswith("modes")] == expected


@pytest.mark.parametrize("frozen", [1, 5])
def test_killed_and_resumed_is_the_same_run(frozen: int, program: Path, tmp_path: Path):
    """Killed after the body was unfrozen, and before."""
    killed_and_resumed(f"{program}/{LONG} --epochs 6 --micro_batch_size 32 --freeze_epochs {frozen}", tmp_path)


def test_padding_changes_nothing(program: Path, monkeypatch: pytest.MonkeyPatch):
    programs = imported_train(program, monkeypatch)
    config = programs.TrainConfig()
    train = programs.build_datasets(config)["train"]
    samples = sorted((train[index] for index in range(16)), key=lambda sample: len(sample[0]))
    model = programs.build_model(config, train).eval()
    batch = train.collate_fn(samples)
    assert batch["input_ids"].shape == (16, len(samples[-1][0])) and len(samples[0][0]) < len(samples[-1][0])
    together = model(**batch).logits
    alone = torch.cat([model(**train.collate_fn([sample])).logits for sample in samples])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_the_parts_share_no_docstring(program: Path):
    parts = imported(program, "docstrings").build_docstrings()
    train, val, test = ({words for words, _ in part.samples} for part in parts.values())
    assert len(test) > 100 and not (train & val or train & test or val & test)
    assert {target for _, target in parts["train"].samples} == {*range(parts["test"].num_classes)}
    assert max(len(sample) for sample, _ in parts["train"]) == parts["train"].max_length
