"""recipes/methods/bag_of_words.patch: what is fitted to the training texts is in the model's extra state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edits import with_text
from helpers import (
    LONG,
    ON_2,
    assert_same_training,
    call,
    history,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    weights,
    with_recipe,
)

pytestmark = pytest.mark.recipes
TEXTS = ("Parses a header of a message.", "Runs a coroutine until it is done.")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("bag_of_words", tmp_path_factory.mktemp("bag_of_words"))


@pytest.fixture(scope="module")
def trained(program: Path, tmp_path_factory) -> Path:
    """Where a run with the defaults is finished."""
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py --accelerator cpu", cwd)
    return cwd


def evaluate(program: Path, cwd: Path, how=call, options: str = "", code: int = 0):
    return how(f"{program}/test.py --out_dir train_out --accelerator cpu {options}", cwd, code)


def report(cwd: Path, checkpoint: str = "best") -> dict:
    return json.loads((run_dir(cwd) / f"test_test_{checkpoint}.json").read_text())


def classify(program: Path, folder: Path, *texts: str, given: str = "") -> list[str]:
    command = [sys.executable, program / "classify.py", folder, *texts]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.splitlines()


def test_it_is_as_good_as_the_baseline_which_is_printed(program: Path, trained: Path, tmp_path: Path):
    (line,) = run(f"{program}/docstrings.py", tmp_path).stdout.splitlines()
    words, _, accuracy = line.rpartition(" ")
    assert words == "TF-IDF and logistic regression: accuracy"
    evaluate(program, trained)
    assert report(trained)["results"]["accuracy"] > 0.75 and float(accuracy) > 0.75


def test_model_pt_alone_takes_texts_as_they_were_written(program: Path, trained: Path, tmp_path: Path):
    """Without the data set, and as test.py finds their classes."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.pt").write_bytes((run_dir(trained) / "model.pt").read_bytes())
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("classify.py", "model.py"):
        (alone / name).write_text((program / name).read_text())
    assert classify(alone, folder, *TEXTS) == ["email", "asyncio"]
    assert classify(alone, folder, given="\n".join(TEXTS)) == ["email", "asyncio"]
    assert len(classify(alone, folder, "", "xyzzy")) == 2  # without any word of the vocabulary


def test_the_classes_are_those_that_test_py_finds(program: Path, trained: Path, monkeypatch: pytest.MonkeyPatch):
    evaluate(program, trained, options="--checkpoint last --predictions")
    logits, targets = torch.load(next(run_dir(trained).glob("predictions_test_step-*.pt")))
    programs = imported_train(program, monkeypatch)
    test = programs.build_datasets(programs.TrainConfig())["test"]
    texts = [" ".join(words) for words, _ in test.samples]
    assert targets.tolist() == [target for _, target in test.samples]
    assert classify(program, run_dir(trained), *texts) == [test.classes[index] for index in logits.argmax(1)]


def test_the_extra_state_is_fitted_to_the_training_texts(program: Path, trained: Path, monkeypatch):
    train = (programs := imported_train(program, monkeypatch)).build_datasets(programs.TrainConfig())["train"]
    found = weights(trained)["_extra_state"]
    assert found == {"words": train.words, "classes": [*train.classes], "width": 64, "dropout": 0.25}
    assert {*found["words"]} <= {word for words, _ in train.samples for word in words}


def test_two_processes_find_the_same(program: Path, trained: Path):
    evaluate(program, trained)
    one = report(trained)["results"]
    evaluate(program, trained, run, ON_2)
    assert report(trained)["results"] == pytest.approx(one, rel=1e-5)


def test_killed_and_resumed_it_is_the_same_run_and_is_evaluated(program: Path, tmp_path: Path):
    _, killed = killed_and_resumed(f"{program}/{LONG} --limit_val_batches 1.0", tmp_path)
    evaluate(program, killed, options="--checkpoint last --split val")
    (path,) = run_dir(killed).glob("test_val_*.json")
    found = json.loads(path.read_text())["results"]
    assert found["loss"] == pytest.approx(float(history(killed)[-1]["val/loss"]))


def test_two_processes_train_the_same(program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8 --dropout 0", tmp_path)
    assert_same_training(two, one)


@pytest.mark.parametrize("command", ["train.py --resume auto --epochs 21", "test.py --accelerator cpu"])
def test_weights_of_another_vocabulary_are_refused_in_one_line(command: str, program: Path, trained, tmp_path: Path):
    """One of the same size, which the shapes of the weights do not show."""
    other = with_recipe("bag_of_words", tmp_path / "other")
    with_text(other, "docstrings.py", ("count > 1)", 'count > 1)\n    vocabulary[0] = "other"'))
    error = call(f"{other}/{command}", trained, code=2).stderr
    assert "the words are not those of the training" in error and error.count("\n") == 1
