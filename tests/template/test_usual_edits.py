"""Edits that people look for, as the pages of docs/ show them: each is made, and run."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import LONG, ON_2, REPO, SMALL, call, execute, folders, run, run_in
from comparisons import assert_same_training, killed_and_resumed
from copies import diff, edited
from edits import insert_after, insert_before, replace
from outputs import history, last_summary, predictions_of, results, rows, run_dir, weights
from processes import interrupt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.recipes


def made(page: str, heading: str, tmp_path: Path) -> Path:
    """A copy of the programs with the edit under a heading of a page."""
    return edited(diff(f"docs/{page}.md", heading), tmp_path / "program")


def on_page(pattern: str, page: str) -> re.Match:
    """Where a page, without its line breaks, has it."""
    return re.search(pattern, " ".join((REPO / "docs" / f"{page}.md").read_text().split()))


# ---- trained_model.md


def test_what_was_fitted_is_in_model_pt_and_needs_no_data(tmp_path: Path):
    program = made("trained_model", "Preprocessing that was fitted", tmp_path)
    whole, killed = killed_and_resumed(f"{program}/{LONG} --limit_val_batches 1.0", tmp_path)
    assert results(program, killed)["loss"] == pytest.approx(float(history(whole)[-1]["val/loss"]))
    alone = tmp_path / "alone"
    alone.mkdir()
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
    assert done.returncode == 75, done.stderr  # the model has no save_pretrained
    saves = "lambda self, folder: (folder.mkdir(exist_ok=True), torch.save(self.state_dict(), folder / 'weights.pt'))"
    insert_before(program, "functions", f"Model.save_pretrained = {saves}\n\n\n")
    resume = "train.py --resume auto"
    for command in (f"train.py {SMALL} --epochs 2", resume, f"{resume} {ON_2}", f"{resume} --epochs 3"):
        execute(f"{program}/{command}", cwd)
        found = torch.load(run_dir(cwd) / "pretrained" / "weights.pt")
        torch.testing.assert_close(found, dict(weights(cwd)), atol=0, rtol=0)
    call(f"{program}/train.py --accelerator cpu --fast_run", cwd)


# ---- evaluation.md


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


# ---- training.md, data.md


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

    (tmp_path / "two").mkdir()
    run(f"{command} {ON_2}", tmp_path / "two")
    assert_same_training(tmp_path / "two", whole)
    assert [row["lr"] for row in rows(tmp_path / "two")] == rates
    for cwd in (killed, tmp_path / "two"):
        board = EventAccumulator(str(run_dir(cwd)), size_guidance={"histograms": 0}).Reload()
        assert [event.step for event in board.Histograms("weights/first")] == [row["step"] for row in rows(cwd)]
    printed = call(f"{program}/test.py --accelerator cpu", killed).stdout
    assert "built for 8 8\n" in printed and "shape False 8 8" in printed
