"""Edits that people look for, as the pages of docs/ show them: each is made, and run."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from edits import insert_after, insert_before, make_as_shown, replace, with_text
from helpers import (
    LONG,
    ON_2,
    REPO,
    SMALL,
    assert_same_training,
    call,
    copy_project_tests,
    diff,
    edited,
    execute,
    history,
    interrupt,
    kill_group,
    killed_and_resumed,
    newest,
    on_one_and_two,
    results,
    rows,
    run,
    run_dir,
    start,
    wait_for,
    weights,
)
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from wandb_files import values, wandb_id, wandb_records

FITTED = diff("docs/trained_model.md", "Preprocessing that was fitted")
PRETRAINED = diff("docs/trained_model.md", "save_pretrained at the end")
PERPLEXITY = diff("docs/evaluation.md", "Perplexity")
METRIC = diff("docs/evaluation.md", "A metric of one's own")
NO_VAL = diff("docs/evaluation.md", "No validation set")
PICTURE = diff("docs/evaluation.md", "A picture at each validation")
HISTOGRAM = diff("docs/evaluation.md", "Histograms in TensorBoard")
WEIGHTS = diff("docs/training.md", "Class weights and ignored labels")
HALVINGS = diff("docs/training.md", "A learning rate that falls by the results")
CROPS = diff("docs/data.md", "Training samples of another shape")
TWELVE = f"{LONG} --epochs 12"

pytestmark = pytest.mark.recipes


def words_of(page: str) -> str:
    """A page without its line breaks."""
    return " ".join((REPO / page).read_text().split())


# ---- what was fitted


def test_what_was_fitted_is_in_model_pt_and_needs_no_data(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(FITTED, tmp_path / "program")
    whole, killed = killed_and_resumed(f"{program}/{LONG} --limit_val_batches 1.0", tmp_path)
    assert results(program, killed)["loss"] == pytest.approx(float(history(whole)[-1]["val/loss"]))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(program / "model.py", alone)
    shutil.copy(run_dir(killed) / "model.pt", alone)
    make = re.search(
        r'needed: `(model = Model\(\*\*weights\["_extra_state"\]\))` and `(.+?)`',
        words_of("docs/trained_model.md"),
    )
    code = f'import torch; from model import Model; weights = torch.load("model.pt"); {make[1]}; {make[2]}; '
    image = "torch.zeros(1, 1, 8, 8)"
    code += f"print(model.eval()({image}).shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([1, 10])\n"
    with_text(program, "train.py", ("config.width, config.dropout)", "config.width, 0.5)"))
    for command in ("test.py --accelerator cpu", "train.py --resume auto --epochs 11"):
        error = call(f"{program}/{command}", killed, code=2).stderr
        assert "these weights were fitted to other data" in error and error.count("\n") == 1


# ---- perplexity


def test_a_number_that_follows_from_the_means_is_logged_monitored_and_in_test_py(tmp_path: Path):
    program = edited(PERPLEXITY, tmp_path / "program")
    options = "--limit_val_batches 1.0 --monitor val/perplexity --monitor_mode min"
    call(f"{program}/train.py {SMALL} {options}", tmp_path)
    last = rows(tmp_path)[-1]
    assert last["val/perplexity"] == pytest.approx(torch.tensor(last["val/loss"]).exp().item())
    assert json.loads((run_dir(tmp_path) / "summary.json").read_text())["best"] == min(
        row["val/perplexity"] for row in rows(tmp_path) if "val/perplexity" in row
    )
    assert results(program, tmp_path)["perplexity"] == pytest.approx(last["val/perplexity"])
    assert results(program, tmp_path, f"--checkpoint last --split val {ON_2}")["perplexity"] == pytest.approx(
        last["val/perplexity"]
    )


def test_a_loss_whose_perplexity_is_no_float_ends_no_run(tmp_path: Path):
    program = edited(PERPLEXITY, tmp_path / "program")
    replace(program, "values", '{"loss": 1000 + F.cross_entropy(logits, targets)}')
    call(f"{program}/train.py {SMALL}", tmp_path)


# ---- class weights and ignored labels


def with_weights(folder: Path) -> Path:
    """Without augmentation, whose random numbers depend on the micro-batches."""
    folder.mkdir()
    program = replace(edited(WEIGHTS, folder), "shift", "shift=0")
    replace(program, "accuracy", 'average="micro", ignore_index=-100')
    return insert_after(program, "statistics", "targets[::3] = -100")


def train_and_val(program: Path, options: str, cwd: Path) -> tuple[list, list]:
    cwd.mkdir()
    execute(f"{program}/train.py {SMALL} --max_steps 4 --log_interval 1 --dropout 0 {options}", cwd)
    found = [[float(row[name]) for row in history(cwd) if row.get(name)] for name in ("train/loss", "val/loss")]
    return found[0], found[1]


def test_the_count_makes_a_validation_exact_and_the_loop_may_need_an_edit(tmp_path: Path):
    program = with_weights(tmp_path / "program")
    whole = train_and_val(program, "--base_lr 1e-9", tmp_path / "whole")
    parts = train_and_val(program, "--base_lr 1e-9 --micro_batch_size 4", tmp_path / "parts")
    assert parts[1] == pytest.approx(whole[1], rel=1e-5)
    assert parts[0] != pytest.approx(whole[0], rel=1e-4)  # the mean of means


def test_the_loop_as_for_tokens_trains_as_with_one_batch(tmp_path: Path):
    tokens = diff("docs/data.md", "A mean over tokens")
    for old, new in (
        ('reduction="sum")', 'weight, reduction="sum")'),
        ("int((targets != -100).sum())", "float((weight[targets.clamp(min=0)] * (targets >= 0)).sum())"),
        ("+    total = F", "+    weight = torch.linspace(0.5, 1.5, 10, device=targets.device)\n+    total = F"),
        ("sum((targets != -100).sum() for", "sum((weight[targets.clamp(min=0)] * (targets >= 0)).sum() for"),
        ("+        used", "+        weight = torch.linspace(0.5, 1.5, 10, device=fabric.device)\n+        used"),
    ):
        assert tokens.count(old) == 1, old
        tokens = tokens.replace(old, new)
    (tmp_path / "program").mkdir()
    program = replace(edited(tokens, tmp_path / "program"), "shift", "shift=0")
    insert_after(program, "statistics", "targets[::3] = -100")
    whole = train_and_val(program, "", tmp_path / "whole")
    assert train_and_val(program, "--micro_batch_size 4", tmp_path / "parts")[0] == pytest.approx(whole[0], rel=1e-5)
    found = train_and_val(program, f"--micro_batch_size 4 {ON_2}", tmp_path / "two")
    assert found[0] == pytest.approx(whole[0], rel=1e-5)


def test_a_weighted_mean_over_the_samples_leaves_the_loop_as_it_is(tmp_path: Path):
    program = with_weights(tmp_path / "program")
    loss, count = re.search(r"`(F\.cross[^`]+)`, and the count `(.+?)`", words_of("docs/training.md")).groups()
    text = (program / "train.py").read_text()
    text = re.sub(r"    count: Any = .*\n", "", text).replace(
        "targets, weight)}, count", f"targets, weight)}}, {count}"
    )
    (program / "train.py").write_text(text.replace("F.cross_entropy(logits, targets, weight)}", f"{loss}}}"))
    whole = train_and_val(program, "", tmp_path / "whole")
    assert whole[0][0] == pytest.approx(2 / 3 * 2.3, rel=0.1)  # a third has no target
    parts = train_and_val(program, "--micro_batch_size 4", tmp_path / "parts")
    assert parts[0] == pytest.approx(whole[0], rel=1e-5) and parts[1] == pytest.approx(whole[1], rel=1e-5)
    two = train_and_val(program, f"--micro_batch_size 4 {ON_2}", tmp_path / "two")
    assert two[0] == pytest.approx(whole[0], rel=1e-5)


# ---- a metric


def test_a_metric_with_an_argument_is_a_share_of_all_samples(tmp_path: Path):
    program = edited(METRIC, tmp_path / "program")
    call(f"{program}/train.py --accelerator cpu --epochs 4 --logger_name csv", tmp_path)
    found = results(program, tmp_path, "--checkpoint last --split val --predictions")
    logits, targets = torch.load(next(run_dir(tmp_path).glob("predictions_*.pt")))
    expected = (logits.softmax(1)[torch.arange(len(targets)), targets] >= 0.9).float().mean().item()
    assert found["sure"] == pytest.approx(expected) == rows(tmp_path)[-1]["val/sure"]
    assert 0 < expected < found["accuracy"]
    assert results(program, tmp_path, f"--checkpoint last --split val {ON_2}")["sure"] == pytest.approx(expected)


# ---- no validation set


def test_without_a_validation_set_the_lowest_training_loss_is_best(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(NO_VAL, tmp_path / "program")
    _, killed = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    summary = json.loads((run_dir(killed) / "summary.json").read_text())
    assert summary["best"] == min(row["train/loss"] for row in rows(killed))
    assert not any(name.startswith("val/") for row in rows(killed) for name in row)
    assert results(program, killed, "")["accuracy"] > 0.5
    assert "--split val: has no samples" in call(f"{program}/test.py --split val", killed, code=2).stderr
    run(f"{program}/train.py --accelerator cpu --fast_run {ON_2}", tmp_path)


@pytest.mark.night
def test_without_a_validation_set_a_project_passes(tmp_path: Path):
    program = edited(NO_VAL, tmp_path / "program")
    copy_project_tests(program)
    command = [sys.executable, "-m", "pytest", "tests/project"]
    done = subprocess.run(command, cwd=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- a picture


def test_a_picture_of_each_validation_is_drawn_once_and_again_by_a_resume(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(PICTURE, tmp_path / "program")
    folders = killed_and_resumed(f"{program}/{TWELVE}", tmp_path)
    whole, killed = ({path.name: path.read_bytes() for path in run_dir(cwd).glob("*.png")} for cwd in folders)
    assert whole == killed and [*sorted(whole)] == [f"features-{step:08d}.png" for step in range(8, 97, 8)]
    with Image.open(run_dir(folders[0]) / "features-00000008.png") as picture:
        assert picture.size == (8, 4 * 8)


def with_norm(program: Path) -> Path:
    return replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1),\nnn.BatchNorm2d(width),\n")


AFTER_A_STEP = ('if "validate" in state["due"] and', 'if "validate" not in state["due"] and')


@pytest.mark.parametrize("called, code", [("model.module", 0), ("model", 1)])
def test_a_picture_after_a_step_by_model_module_where_model_hangs(called: str, code: int, tmp_path: Path):
    """Of a model with BatchNorm, on the first process of two."""
    program = with_norm(edited(PICTURE, tmp_path / "program"))
    features, save = "model.module.layers[:2](val_set[0][0][None].to(fabric.device))[0]", '.save(file, "png")\n'
    whole = f"{called}.eval()(val_set[0][0][None].to(fabric.device))[..., None]"
    with_text(program, "train.py", (features, whole), AFTER_A_STEP, (save, f"{save}                {called}.train()\n"))
    options = f"{SMALL} --max_steps 8 --log_interval 1 --timeout 10 {ON_2}"
    error = run(f"{program}/train.py {options}", tmp_path, code).stderr
    assert ("another process has ended, or did not answer" in error) == (code > 0)


# ---- crops


def test_training_samples_have_another_shape_than_those_of_the_validation(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(CROPS, tmp_path / "program")
    insert_after(program, "batch", "print('shape', model.training, *images.shape[2:])")
    insert_before(program, "model", "print('built for', *image.shape[1:])")
    killed_and_resumed(f"{program}/{LONG}", tmp_path)
    (tmp_path / "new").mkdir()
    printed = call(f"{program}/train.py {SMALL}", tmp_path / "new").stdout
    shapes = [line for line in printed.splitlines() if line.startswith(("shape", "built"))]
    assert shapes[:3] == ["built for 6 6", "shape False 8 8", "shape True 6 6"]
    assert {*shapes} == {*shapes[:3]}
    printed = call(f"{program}/test.py --accelerator cpu", tmp_path / "new").stdout
    assert "built for 8 8\n" in printed and "shape False 8 8" in printed
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8", tmp_path)
    assert_same_training(two, one)


# ---- a rate that falls by the results


def test_the_rate_is_halved_after_validations_without_a_better_value_and_a_resume_knows(tmp_path: Path):
    """Of which the first alone is better by 10."""
    (tmp_path / "program").mkdir()
    program = edited(HALVINGS, tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{TWELVE} --early_stopping_min_delta 10", tmp_path)
    rates = [float(row["lr"]) for row in history(whole)]
    assert rates == pytest.approx(
        [rates[0] / 2 ** ((epoch > 4) + (epoch > 7) + (epoch > 10)) for epoch in range(1, 13)]
    )
    one, two = on_one_and_two(f"{program}/{LONG} --epochs 6 --early_stopping_min_delta 10", tmp_path)
    assert_same_training(two, one)
    assert [row["lr"] for row in history(two)] == [row["lr"] for row in history(one)]


# ---- save_pretrained

SAVES = """
def save_pretrained(self, folder):
    folder.mkdir(exist_ok=True)
    torch.save(self.state_dict(), folder / "weights.pt")


"""


def test_save_pretrained_writes_the_final_weights_also_where_no_step_is_left(tmp_path: Path):
    program = edited(PRETRAINED, tmp_path / "program")
    insert_before(program, "functions", SAVES)
    insert_before(program, "functions", "Model.save_pretrained = save_pretrained\n\n\n")
    call(f"{program}/train.py {SMALL} --epochs 2", tmp_path)
    for command in (
        "",
        "train.py --resume auto",
        f"train.py --resume auto {ON_2}",
        "train.py --resume auto --epochs 3",
    ):
        if command:
            execute(f"{program}/{command}", tmp_path)
        found = torch.load(run_dir(tmp_path) / "pretrained" / "weights.pt")
        torch.testing.assert_close(found, dict(weights(tmp_path)), atol=0, rtol=0)
    call(f"{program}/train.py --accelerator cpu --fast_run", tmp_path)


def test_a_run_that_was_stopped_saves_nothing_pretrained(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(PRETRAINED, tmp_path / "program")  # its model has no save_pretrained
    done = interrupt(f"{program}/{LONG} --epochs 3000", tmp_path, lambda process: process.send_signal(signal.SIGTERM))
    assert done.returncode == 75, done.stderr


def test_save_pretrained_of_the_hub(tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    hub = diff("docs/trained_model.md", "A model of Hugging Face's hub")
    program = make_as_shown(hub, edited(PRETRAINED, tmp_path / "program"))
    run(f"{program}/train.py {SMALL} {ON_2}", tmp_path)
    code = f"from model import Model; print(Model.from_pretrained({str(run_dir(tmp_path) / 'pretrained')!r}).training)"
    subprocess.run([sys.executable, "-c", code], cwd=program, check=True)


def test_save_pretrained_of_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    program = edited(PRETRAINED, tmp_path / "program")
    bert = "BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20, "
    made = f"__import__('transformers').{bert}num_labels=10)"
    replace(
        program, "model", f"    return __import__('transformers').BertForSequenceClassification({made}).train()\n    ("
    )
    replace(program, "logits", "logits = model(input_ids=(images.flatten(1).clamp(0, 1) * 19).long()).logits")
    run(f"{program}/train.py {SMALL} {ON_2}", tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(run_dir(tmp_path) / "pretrained")
    torch.testing.assert_close(dict(model.state_dict()), dict(weights(tmp_path)), atol=0, rtol=0)


# ---- wandb


def test_offline_folders_of_wandb_have_the_history_together(tmp_path: Path):
    pytest.importorskip("wandb")
    offline = {"HOME": str(tmp_path), "WANDB_MODE": "offline"}
    process = start(f"{LONG} --log_interval 1 --logger_name csv wandb --epochs 300", tmp_path, **offline)
    wait_for(lambda: process.poll() is not None or newest(tmp_path) > 400)
    kill_group(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    steps = newest(tmp_path) + 8
    run(f"train.py --resume auto --max_steps {steps}", tmp_path, **offline)
    folder = run_dir(tmp_path)
    found: list[dict] = []
    paths = sorted(folder.glob("logs/wandb/offline-run-*/*.wandb"))
    assert len(paths) == 2 and {path.stem for path in paths} == {f"run-{wandb_id(folder)}"}
    for path in paths:
        records = [values(each.history.item) for each in wandb_records(path) if each.HasField("history")]
        found.append({row["_step"]: row for row in records})
    first, second = found
    expected = {int(row["step"]): row for row in rows(tmp_path)}
    assert [*second] == [*expected][-len(second) :] and first.keys() <= expected.keys()
    assert [*first] == [*expected][: len(first)]  # without the last rows before the kill
    for each in found:
        for step, row in each.items():
            assert row["train/loss"] == pytest.approx(expected[step]["train/loss"], rel=1e-12)
    (command,) = re.findall(r"`wandb sync RUN/(logs/.+?)`", words_of("docs/evaluation.md"))
    line = f"{Path(sys.executable).parent}/wandb sync --dry-run {folder}/{command}"
    listed = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert all(path.parent.name in listed.stdout + listed.stderr for path in paths), listed


# ---- torch.export


class ByBatch(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def exported(function):
    example = torch.rand(2, 3)
    return torch.export.export(ByBatch(function), (example,), dynamic_shapes=[{0: torch.export.Dim("batch")}]).module()


@pytest.mark.parametrize("function", [lambda x: x.view(x.shape[0], -1), lambda x: x + torch.arange(x.size(0))[:, None]])
def test_a_size_stays_dynamic(function):
    for size in (1, 2, 5):
        x = torch.rand(size, 3)
        torch.testing.assert_close(exported(function)(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(len(x), -1),
        lambda x: x.view(int(x.shape[0]), -1),
        lambda x: torch.stack([2 * row for row in x]),
        lambda x: torch.cat([2 * part for part in x.split(2)]),
    ],
)
def test_what_fixes_the_batch_is_an_error(function):
    with pytest.raises(Exception, match=r"Constraints violated \(batch\)"):
        exported(function)


def test_a_branch_is_that_of_the_example():
    program = exported(lambda x: 2 * x if x.shape[0] > 1 else x)
    torch.testing.assert_close(program(torch.ones(1, 3)), 2 * torch.ones(1, 3))


# ---- TensorBoard


def board_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})


def test_histograms_have_each_validation_once(tmp_path: Path):
    (tmp_path / "program").mkdir()
    program = edited(HISTOGRAM, tmp_path / "program")

    def resume(command: str, cwd: Path):
        time.sleep(1.1)  # the second is in the name of the file, by which TensorBoard orders them
        call(command, cwd)

    _, killed = killed_and_resumed(f"{program}/{LONG} --logger_name csv tensorboard", tmp_path, resume)
    (tmp_path / "two").mkdir()
    run(f"{program}/train.py {SMALL} {ON_2}", tmp_path / "two")
    for cwd in (killed, tmp_path / "two"):
        board = board_of(run_dir(cwd)).Reload()
        expected = [row["step"] for row in rows(cwd)]
        assert [event.step for event in board.Histograms("weights/first")] == expected
        assert [event.step for event in board.Scalars("train/loss")] == expected


def test_an_open_tensorboard_shows_the_newer_of_two_files_and_a_folder_beside_it(tmp_path: Path):
    first = SummaryWriter(tmp_path)
    time.sleep(1.1)  # the second is in the name
    second, beside = SummaryWriter(tmp_path), SummaryWriter(tmp_path / "mine", purge_step=0)
    board = board_of(tmp_path)
    for step in range(4):
        for writer, tag in ((first, "older"), (second, "newer"), (beside, "beside")):
            writer.add_scalar(tag, step, step)
            writer.flush()
        board.Reload()
    for writer in (first, second, beside):
        writer.close()

    def steps(found: EventAccumulator, tag: str) -> list[int]:
        return [event.step for event in found.Scalars(tag)]

    assert (steps(board, "older"), steps(board, "newer")) == ([0], [0, 1, 2, 3])
    anew = board_of(tmp_path).Reload()
    assert steps(anew, "older") == steps(anew, "newer") == [0, 1, 2, 3]
    assert steps(board_of(tmp_path / "mine").Reload(), "beside") == [0, 1, 2, 3]
