"""What one method alone can do wrong: its loss, its optimizer, its metric, as its paper or another program computes it.
What holds for all is in test_recipes.py."""

import importlib
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edits import insert_after, insert_before, replace, with_text
from helpers import (
    EVERY_FOURTH_STEP,
    LONG,
    ON_2,
    SMALL,
    assert_same_run,
    call,
    checkpoint,
    execute,
    history,
    imported,
    imported_train,
    last_summary,
    results,
    rows,
    run,
    run_dir,
    weights,
    with_recipe,
)
from lightning.fabric import Fabric
from sklearn.datasets import load_diabetes, load_digits
from sklearn.metrics import jaccard_score, mean_absolute_error, r2_score
from torch import Tensor, nn

from runtime.meters import Timer

pytestmark = pytest.mark.recipes
TEST = "--checkpoint last --split test --predictions"


def predictions_of(cwd: Path) -> list[Tensor]:
    (path,) = run_dir(cwd).glob("predictions_*.pt")
    return torch.load(path, weights_only=True)


def saved(cwd: Path) -> list[dict]:
    """The checkpoints of a run, in the order of their steps."""
    return [torch.load(path, weights_only=True) for path in sorted(run_dir(cwd).glob("checkpoints/step-*.ckpt"))]


# ---- what each is good for


def of_classes(*classes: int):
    """The share of right predictions of these classes of the test set."""

    def share(found: dict, cwd: Path) -> float:
        logits, targets = predictions_of(cwd)
        is_one = torch.isin(targets, torch.tensor(classes))
        return (logits.argmax(1) == targets)[is_one].float().mean().item()

    return share


def of_all(found: dict, cwd: Path) -> float:
    return found["accuracy"]


def attacked(found: dict, cwd: Path) -> float:
    assert found["accuracy"] > 0.9  # what the penalty takes is the gradient
    return found["fgsm_accuracy"]


RARE = of_classes(0, 1, 2, 3, 4)
FEW = "--dataset digits_few --effective_batch_size 10 --lr_scaling_rule none --checkpoint_frequency 0"
MATCH = "--max_steps 400 --val_interval 400 --base_lr 1e-2 --threshold 0.8 --dropout 0"
NO_3 = "train = train[targets[train] != 3]"  # the experiment of section 3 of the paper
BETTER = {
    "balanced": ("", "--balanced False", "", RARE, 0.05, 0.88),
    "hard_examples": ("", "--pressure 1", "--pressure 100", RARE, 0.05, 0.8),
    "gradient_penalty": ("--epochs 8 --width 16", "--gradient_penalty 0", "--gradient_penalty 3", attacked, 0.2, 0),
    "finetune": (FEW, "", "--weights {pairs}", of_all, 0.05, 0),
    "distillation": ("--epochs 12", "", "--teacher {teacher} --teacher_weight 0.99", of_classes(3), 0.25, 0.25),
    "two_models": ("", "--forget_rate 0", "--forget_rate 0.4", of_all, 0.05, 0),
    "semi_supervised": (MATCH, "--unlabelled_weight 0", "", of_all, 0.03, 0),
    "semi_supervised, strong views": (MATCH, "--unlabelled_weight 0 --strong_labels True", "", of_all, 0.03, 0),
}
AT_NIGHT = ("two_models", "semi_supervised", "semi_supervised, strong views")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("teacher")
    call("train.py --accelerator cpu --epochs 10", cwd)
    return run_dir(cwd)


@pytest.fixture(scope="module")
def pairs(finetune: Path, tmp_path_factory) -> Path:
    """A run on all digits that was told their pairs alone."""
    cwd = tmp_path_factory.mktemp("pairs")
    call(f"{finetune}/train.py --accelerator cpu --dataset digits_pairs --epochs 10", cwd)
    return run_dir(cwd)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.night) if row in AT_NIGHT else row for row in BETTER]
)
def test_it_is_better_than_without(row: str, request, tmp_path: Path):
    """On the test set, by a margin, and better than a floor."""
    options, without, with_it, measure, margin, floor = BETTER[row]
    program = with_recipe(row.partition(",")[0], tmp_path / "program")
    if row == "distillation":
        insert_before(program, "statistics", NO_3)
    found = {}
    for name, more in (("without", without), ("with", with_it)):
        (tmp_path / name).mkdir()
        more = more.format(**{key: request.getfixturevalue(key) for key in re.findall(r"\{(\w+)\}", more)})
        call(f"{program}/train.py --accelerator cpu {options} {more}", tmp_path / name)
        found[name] = measure(results(program, tmp_path / name, TEST), tmp_path / name)
    assert found["with"] > max(floor, found["without"] + margin), found
    if row == "distillation":
        assert found["without"] == 0


LEARNS = {
    "sam": ("--epochs 7", lambda found: found["accuracy"] > 0.95),
    # 1 where the generator makes always the same.
    "gan": ("--epochs 20 --val_frequency 10 --base_lr 2e-3", lambda found: found["mmd"] < 0.3),
    # The largest class has a fifth of the samples.
    "text_classification": (
        "--epochs 5 --warmup_epochs 0.5 --freeze_epochs 0.2 --dropout 0",
        lambda found: found["accuracy"] > 0.25,
    ),
}


@pytest.mark.parametrize("recipe", LEARNS)
def test_it_learns(recipe: str, request, tmp_path: Path):
    if recipe == "text_classification":
        pytest.importorskip("transformers")
    options, is_good = LEARNS[recipe]
    program = request.getfixturevalue(recipe)
    call(f"{program}/train.py --accelerator cpu {options}", tmp_path)
    assert is_good(found := results(program, tmp_path, "--checkpoint best --split test")), found


# ---- ema


def test_ema_is_better_than_the_raw_weights_and_saved(ema: Path, tmp_path: Path):
    options = "--accelerator cpu --lr_schedule constant --epochs 15 --logger_name csv"
    printed = call(f"{ema}/train.py {options}", tmp_path).stdout
    assert "\nmodel, 58,314 parameters; raw_model, 58,314 parameters\n" in printed
    assert last_summary(tmp_path)["parameters"] == 58314
    last = rows(tmp_path)[-5:]
    means = {name: sum(row[name] for row in last) / len(last) for name in last[0]}
    assert means["val/loss"] < 0.7 * means["val/raw_loss"]
    assert means["val/accuracy"] > max(0.985, means["val/raw_accuracy"])
    torch.testing.assert_close(weights(tmp_path), saved(tmp_path)[-1]["model"], atol=0, rtol=0)


def test_ema_average_follows_the_formula(ema: Path, tmp_path: Path):
    """In each step, after the optimizer's: average <- decay * average + (1 - decay) * weights. The decay rises at
    first, as a function of the step alone."""
    options = "--max_steps 4 --checkpoint_interval 1 --num_checkpoint_keep 0"
    call(f"{ema}/{LONG.replace(EVERY_FOURTH_STEP, options)}", tmp_path)
    before, *others = saved(tmp_path)
    for after, decay in zip(others, [3 / 12, 4 / 13, 5 / 14], strict=True):  # of the steps 2 to 4
        for name, raw in after["raw_model"].items():
            expected = decay * before["model"][name].double() + (1 - decay) * raw.double()
            torch.testing.assert_close(after["model"][name].double(), expected, atol=1e-7, rtol=0)
            assert not torch.equal(after["model"][name], raw)
        before = after


def test_ema_decay_rises_to_the_option_so_that_the_start_is_forgotten(ema: Path, monkeypatch: pytest.MonkeyPatch):
    train = imported_train(ema, monkeypatch)
    config = train.TrainConfig(ema_decay=0.999)
    decays = [train.ema_decay(config, step) for step in range(1, 10001)]
    assert decays[0] == 2 / 11 and decays == sorted(decays) and decays[-1] == 0.999
    assert math.prod(decays[:100]) < 1e-9  # the share of the random weights after 100 steps; 0.9 with 0.999 throughout


# ---- contrastive


def test_contrastive_features_are_better_than_pixels(contrastive: Path, tmp_path: Path):
    call(f"{contrastive}/train.py --accelerator cpu --epochs 12 --width 16", tmp_path)
    assert last_summary(tmp_path)["best"] > 0.93
    found = results(contrastive, tmp_path, "--checkpoint best --split test")
    assert found["accuracy"] > 0.9 and found["loss"] == pytest.approx(found["contrastive"] + found["probe"])
    lines = run(f"{contrastive}/contrastive.py {run_dir(tmp_path)}", tmp_path).stdout.splitlines()
    printed = {tuple(line.split()[3:5]): float(line.rpartition(" ")[2]) for line in lines}
    assert printed["features,", "100"] > printed["pixels,", "100"] and printed["features,", "1217"] > 0.95


def test_contrastive_labels_do_not_reach_the_encoder(contrastive: Path, tmp_path: Path):
    """With other labels it is the same encoder in every bit, and another probe."""
    other = replace(with_recipe("contrastive", tmp_path / "program"), "target tensor", "torch.tensor(9 - targets,")
    found = []
    for folder in (contrastive, other):
        (cwd := tmp_path / f"of_{folder.name}").mkdir()
        call(f"{folder}/train.py {SMALL} --epochs 2", cwd)
        found.append(weights(cwd))
    is_equal = {name: torch.equal(value, found[1][name]) for name, value in found[0].items()}
    assert is_equal["encoder.0.weight"] and is_equal["projector.0.weight"]
    assert {name for name, equal in is_equal.items() if not equal} == {"probe.2.weight", "probe.2.bias"}


def test_contrastive_encoder_learns_in_mixed_precision_and_from_the_projections_alone(contrastive: Path):
    model = imported(contrastive, "model").Model((1, 8, 8), 10, width=4)
    with torch.autocast("cpu", torch.bfloat16):
        projections, logits = model(torch.randn(4, 1, 8, 8))
    logits.float().square().sum().backward()
    assert model.probe[2].weight.grad.any() and model.encoder[0].weight.grad is None
    projections.float().square().sum().backward()
    assert model.encoder[0].weight.grad.any()


def test_contrastive_loss_is_that_of_the_paper(contrastive: Path):
    """Equation 1, pair by pair."""
    module = imported(contrastive, "contrastive")
    projections = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similar = torch.cosine_similarity(projections[:, None], projections[None], dim=2) / 0.2
    losses = []
    for i in range(10):
        others = sum(math.exp(similar[i, k]) for k in range(10) if k != i)
        losses.append(-math.log(math.exp(similar[i, (i + 5) % 10]) / others))
    assert module.nt_xent(projections, 0.2).item() == pytest.approx(sum(losses) / 10)
    images = torch.zeros(6, 1, 8, 8)
    assert not torch.equal(module.random_view(images), module.random_view(images))


# ---- diffusion


@pytest.mark.parametrize(
    "options, is_trained",
    [
        pytest.param("--epochs 12 --width 16 --base_lr 2e-3", True, marks=pytest.mark.night),
        ("--width 4 --warmup_epochs 0 --max_steps 2", False),
    ],
)
def test_diffusion_draws_what_it_has_learned(options: str, is_trained: bool, diffusion: Path, tmp_path: Path):
    call(f"{diffusion}/train.py --accelerator cpu --dropout 0 --checkpoint_frequency 5 {options}", tmp_path)
    printed = run(f"{diffusion}/sample.py --count {200 if is_trained else 100}", tmp_path).stdout
    distance = float(re.search(r"distance to the test images (.+)", printed)[1])
    loss = results(diffusion, tmp_path, "--checkpoint best --split test")["loss"]
    assert (run_dir(tmp_path) / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert (distance < 0.02 and loss < 0.25) if is_trained else (distance > 0.03 and loss > 0.5)


def test_diffusion_adds_noise_as_described(diffusion: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that knows the image has no loss: it gets back the noise, whatever the step."""
    train = imported_train(diffusion, monkeypatch)
    from model import schedule

    signals = schedule()[1]
    images, seen = torch.randn(64, 1, 8, 8), []

    def model(noisy, times):
        signal = signals[times].view(-1, 1, 1, 1)
        seen.extend(times.tolist())
        return (noisy - signal.sqrt() * images) / (1 - signal).sqrt()

    values, count, _ = train.compute_loss(model, (images, None), None)
    assert values["loss"] < 1e-6 and count == 64 and len({*seen}) > 32
    assert signals[0] > 0.99 and signals[-1] < 1e-4  # from nearly no noise to nearly nothing else


# ---- gan


def test_gan_weights_alone_say_what_is_made(gan: Path, monkeypatch: pytest.MonkeyPatch):
    """The range of the pixels is that of the training set, also where a model is built for darker images."""
    train = imported_train(gan, monkeypatch)
    config = train.TrainConfig(width=4)
    datasets = train.build_datasets(config, augment=False)
    trained = train.build_model(config, datasets["train"])
    datasets["test"].images /= 2
    loaded = train.build_model(config, datasets["test"])
    loaded.load_state_dict(trained.state_dict())
    noise = torch.randn(8, 32)
    assert torch.equal(loaded(noise), trained(noise))


def test_gan_players_take_turns(gan: Path, tmp_path: Path):
    call(f"{gan}/train.py {SMALL} --max_steps 3 --checkpoint_interval 1", tmp_path)
    first, second, third = saved(tmp_path)

    def moved(player: str, before: dict, after: dict) -> bool:
        return not all(torch.equal(value, after[player][name]) for name, value in before[player].items())

    assert not moved("discriminator", first, second) and moved("model", first, second)
    assert moved("discriminator", second, third) and not moved("model", second, third)


# ---- gradient_penalty


def test_gradient_penalty_pgd_stays_near_the_image_and_is_the_stronger_attack(gradient_penalty: Path, monkeypatch):
    """Than one step along the sign of the gradient, the fast gradient sign method."""
    train = imported_train(gradient_penalty, monkeypatch)
    config = train.TrainConfig(width=4)
    dataset = train.build_datasets(config)["val"]
    images, targets = dataset.images, dataset.targets
    model = train.build_model(config, dataset).eval()

    def loss(moved: Tensor) -> Tensor:
        return F.cross_entropy(model(moved), targets)

    (gradients,) = torch.autograd.grad(loss(images.requires_grad_()), images)
    images.requires_grad_(False)
    moved = imported(gradient_penalty, "pgd").attacked(model, images, targets, 0.5, 40)
    assert (moved - images).abs().max() <= 0.5 + 1e-6
    assert loss(moved) > loss(images + 0.5 * gradients.sign()) > loss(images)


def test_gradient_penalty_has_the_gradient_of_finite_differences(gradient_penalty: Path, monkeypatch):
    """Of the loss with the penalty, by one weight, in float64."""
    train = imported_train(gradient_penalty, monkeypatch)
    config = train.TrainConfig(width=4, dropout=0, gradient_penalty=1e4)
    dataset = train.build_datasets(config)["train"]
    model = train.build_model(config, dataset).double()
    images, targets = dataset.__getitems__(range(8))
    weight, losses = model.layers[0].weight, []
    for shift in (1e-5, -2e-5, 1e-5):
        with torch.no_grad():
            weight[0, 0, 0, 0] += shift
        values, _, _ = train.compute_loss(model, (images.double(), targets), config)
        losses.append(values["loss"])
    losses[-1].backward()
    slope = (losses[0] - losses[1]).item() / 2e-5
    assert config.gradient_penalty * values["penalty"] > 0.1  # else the loss alone would do
    torch.testing.assert_close(weight.grad[0, 0, 0, 0].item(), slope, rtol=1e-4, atol=1e-8)


# ---- sam

LR, RHO = 0.25, 0.5


def test_sam_steps_along_the_gradient_of_the_perturbed_weights(tmp_path: Path):
    """Of the loss |w|²/2 the gradient is w, there w + rho w/|w|. With plain SGD, |w| falls by lr (|w| + rho)."""
    program = with_recipe("sam", tmp_path / "program")
    replace(program, "values", '{"loss": sum(p.square().sum() for p in model.parameters()) / 2 + 0 * logits.sum()}')
    replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=plan.peak_lr)")
    options = f"--max_steps 3 --checkpoint_interval 1 --base_lr {LR} --lr_schedule constant --warmup_epochs 0"
    options = f"{LONG.partition(' --lr_schedule')[0]} {options} --rho {RHO} --monitor val/loss --monitor_mode min"
    call(f"{program}/{options}", tmp_path)
    first, *others = (each["model"] for each in saved(tmp_path))
    norm = torch.cat([weight.double().flatten() for weight in first.values()]).norm()
    assert norm > 1 and len(others) == 2
    factor = 1.0
    for model in others:
        factor *= 1 - LR * (1 + RHO / (factor * norm))
        for name, weight in model.items():
            torch.testing.assert_close(weight.double(), first[name].double() * factor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("devices", ["", ON_2])
def test_sam_second_pass_sees_the_same_batches_and_dropout(devices: str, tmp_path: Path):
    """Each forward pass of a training step prints its images and a random number."""
    program = with_recipe("sam", tmp_path / "program")
    shown = 'print(f"pass {images.sum():.8f} {torch.rand(()):.8f}\\n", end="", flush=True)'
    insert_after(program, "batch", f"if model.training:\n    {shown}")
    passes = re.findall(r"pass (.+)", execute(f"{program}/{LONG} --max_steps 2 {devices}", tmp_path).stdout)
    assert len(passes) == 2 * 2 * 4 and len({*passes}) == 2 * 4  # 2 steps of 2 passes of 4 micro-batches
    assert len({line.partition(" ")[0] for line in passes}) == 2 * 4
    if not devices:
        assert passes[:4] == passes[4:8] and passes[8:12] == passes[12:]


def test_sam_has_the_same_weights_on_other_devices_and_micro_batches(tmp_path: Path):
    """Without dropout and shifts, whose random numbers are those of a micro-batch."""
    program = replace(with_recipe("sam", tmp_path / "program"), "shift", "shift=0")
    found = []
    for name, options in {"one": "", "whole": "--micro_batch_size 64", "two": ON_2}.items():
        (tmp_path / name).mkdir()
        execute(f"{program}/{LONG} --max_steps 8 --dropout 0 {options}", tmp_path / name)
        found.append(weights(tmp_path / name))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=0)


def test_sam_a_gradient_that_overflows_moves_no_weight(sam: Path):
    """As it may in 16-mixed, where the step is skipped: the second pass must not put a NaN into BatchNorm's buffers."""
    code = (
        "import torch, sam\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model.weight.grad = torch.tensor([[1.0, torch.inf]])\n"
        "before = sam.ascend(model, rho=0.5)\n"
        "assert model.weight.isfinite().all() and torch.equal(model.weight, before[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=sam, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- distillation, reference: a model of another run, which is in no checkpoint

PRECISIONS = ["--precision bf16-mixed", "--precision bf16-true", "--precision 64-true"]


@pytest.mark.parametrize("recipe, option", [("distillation", "teacher"), ("reference", "reference")])
@pytest.mark.parametrize("options", [*PRECISIONS, pytest.param("--compile", marks=pytest.mark.night)])
def test_a_model_of_another_run_goes_with_any_precision(recipe, option, options, request, finished: Path, cwd: Path):
    """And is found by its name without the time."""
    program = request.getfixturevalue(recipe)
    named = f"--root_dir {finished.parent} --{option} train_out"
    printed = call(f"{program}/train.py --accelerator cpu --fast_run {named} {options}", cwd).stdout
    assert f"--{option} train_out: the run is {finished}" in printed


@pytest.mark.parametrize("recipe, option", [("distillation", "teacher"), ("reference", "reference")])
def test_a_model_of_another_run_is_frozen_and_in_no_checkpoint(recipe: str, option: str, tmp_path: Path):
    """It is not counted, and draws no random numbers; the reference is asked in validations and by test.py, too."""
    call(f"train.py {SMALL} --width 6 --dropout 0.9 --out_dir other", tmp_path)
    other = run_dir(tmp_path, "other")
    program = with_recipe(recipe, tmp_path / "program")
    if recipe == "reference":
        insert_after(program, "step is done", "assert not model.reference[0].training")
    for name, command in {
        "with": f"{program}/train.py {SMALL} --{option} {other}",
        "plain": f"train.py {SMALL}",
    }.items():
        (tmp_path / name).mkdir()
        call(f"{command} --limit_val_batches 1.0", tmp_path / name)
    ours, plain = tmp_path / "with", tmp_path / "plain"
    assert last_summary(ours)["parameters"] == last_summary(plain)["parameters"]
    assert saved(ours)[-1]["model"].keys() == weights(ours).keys() == weights(plain).keys()
    assert saved(ours)[-1].keys() == saved(plain)[-1].keys()
    if recipe == "reference":
        found, last = results(program, ours), rows(ours)[-1]
        assert found["distance"] == pytest.approx(last["val/distance"]) and found["distance"] > 1
        assert found["loss"] == pytest.approx(last["val/loss"]) and found["loss"] > found["distance"]


def test_reference_without_the_option_changes_nothing(reference: Path, tmp_path: Path):
    for name, script in {"ours": f"{reference}/train.py", "plain": "train.py"}.items():
        (tmp_path / name).mkdir()
        call(f"{script} {SMALL}", tmp_path / name)
    assert_same_run(tmp_path / "ours", tmp_path / "plain")


# ---- multitask


def test_multitask_report_is_what_the_two_heads_say(multitask: Path, tmp_path: Path):
    """And both are learned."""
    call(f"{multitask}/train.py --accelerator cpu --epochs 8 --logger_name csv --ink_weight 0.5", tmp_path)
    for row in rows(tmp_path):
        for part in ("train", "val"):
            assert row[f"{part}/loss"] == pytest.approx(row[f"{part}/digit_loss"] + 0.5 * row[f"{part}/ink_loss"])
    found, model = results(multitask, tmp_path, "--checkpoint last --split test"), weights(tmp_path)
    dataset = imported(multitask, "data").build_datasets(SimpleNamespace(data_dir=""))["test"]
    images, targets = dataset.images, dataset.targets
    features = images
    for i, stride in ((0, 1), (2, 2), (4, 2)):
        features = F.gelu(F.conv2d(features, model[f"layers.{i}.weight"], model[f"layers.{i}.bias"], stride, 1))
    digit, ink = (F.linear(features.flatten(1), model[f"{h}.weight"], model[f"{h}.bias"]) for h in ("digit", "ink"))
    inks = images.sum(dim=(1, 2, 3)) / 8
    assert found["accuracy"] == pytest.approx((digit.argmax(1) == targets).double().mean().item())
    assert found["digit_loss"] == pytest.approx(F.cross_entropy(digit, targets).item(), rel=1e-3)
    assert found["ink_loss"] == pytest.approx((ink[:, 0] - inks).square().mean().item(), rel=1e-3)
    assert found["ink_mae"] == pytest.approx((ink[:, 0] - inks).abs().mean().item(), rel=1e-3)
    best_constant = (inks - inks.mean()).abs().mean()
    assert rows(tmp_path)[-1]["val/accuracy"] > 0.95 and found["ink_mae"] < 0.5 * best_constant


# ---- two_models


def test_two_models_without_forgetting_are_the_plain_loop(two_models: Path, tmp_path: Path):
    """Up to the order of a sum; the second model changes nothing of the first."""
    found = []
    for name, script in {"plain": "train.py", "ours": f"{two_models}/train.py --noise_rate 0 --forget_rate 0"}.items():
        (tmp_path / name).mkdir()
        call(f"{script} {SMALL}", tmp_path / name)
        found.append(saved(tmp_path / name)[-1]["model"])
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("exchange", [True, False])
def test_two_models_learn_from_what_the_other_finds_easy_or_from_what_each_does(exchange: bool, two_models: Path):
    losses_of = imported(two_models, "coteaching").co_teaching_losses
    targets = torch.zeros(6, dtype=torch.int64)
    ease = torch.tensor([5.0, 4, 3, 2, 1, 0])  # the greater the logit of the target, the smaller the loss
    logits = torch.stack([ease, torch.zeros(6)], dim=1).requires_grad_()
    peer_logits = torch.stack([ease.flip(0), torch.zeros(6)], dim=1).requires_grad_()
    losses_of(logits, peer_logits, targets, kept=0.5, exchange=exchange)["loss"].backward()
    first, last = [True] * 3 + [False] * 3, [False] * 3 + [True] * 3  # easy for the model; for the peer
    assert logits.grad[:, 0].ne(0).tolist() == (last if exchange else first)
    assert peer_logits.grad[:, 0].ne(0).tolist() == (first if exchange else last)


def test_two_models_wrong_labels_are_those_of_the_seed_and_in_the_training_set_alone(two_models: Path, monkeypatch):
    train = imported_train(two_models, monkeypatch)
    config = train.TrainConfig(noise_rate=0.3)
    noisy, again = train.build_datasets(config), train.build_datasets(config, augment=False)
    other = train.build_datasets(train.TrainConfig(noise_rate=0.3, seed=7))
    right = train.build_datasets(train.TrainConfig(noise_rate=0))
    wrong = noisy["train"].targets != right["train"].targets
    assert wrong.float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert ((noisy["train"].targets - right["train"].targets)[wrong] % 10 == 1).all()
    assert torch.equal(noisy["train"].targets, again["train"].targets)
    assert not torch.equal(noisy["train"].targets, other["train"].targets)
    for split in ("val", "test"):
        assert torch.equal(noisy[split].targets, right[split].targets)


# ---- semi_supervised

SHORT = f"{LONG} --effective_batch_size 4 --micro_batch_size 2 --warmup_epochs 0 --threshold 0"


@pytest.fixture
def fixmatch(semi_supervised: Path, monkeypatch: pytest.MonkeyPatch):
    """The module of the recipe, and what it imports, in place of those of the repository."""
    for name in ("fixmatch", "utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    imported_train(semi_supervised, monkeypatch)
    return importlib.import_module("fixmatch")


def test_semi_supervised_loss_is_that_of_the_paper(fixmatch):
    """Equation 4: images without a certain prediction add nothing, and count. No gradient goes through the label."""
    generator = torch.Generator().manual_seed(0)
    weak = (4 * torch.randn(20, 5, generator=generator)).requires_grad_()
    strong = torch.randn(20, 5, generator=generator).requires_grad_()
    loss, certain = fixmatch.pseudo_label_loss(weak, strong, 0.9)
    total, count = 0.0, 0
    for row, probabilities in enumerate(weak.softmax(dim=1)):
        if probabilities.max() >= 0.9:
            total -= F.log_softmax(strong[row], dim=0)[probabilities.argmax()].item()
            count += 1
    assert 0 < count < 20
    assert (loss.item(), certain.item()) == (pytest.approx(total / 20), pytest.approx(count / 20))
    loss.backward()
    assert weak.grad is None and (strong.grad.abs().sum(dim=1) > 0).sum() == count


LINE = '"unlabelled": ImageDataset(images[train], targets[train],'


def test_semi_supervised_labels_of_the_unlabelled_images_are_not_used(semi_supervised: Path, tmp_path: Path):
    """With others, all bits are the same."""
    other = with_recipe("semi_supervised", tmp_path / "program")
    with_text(other, "data.py", (LINE, LINE.replace("targets[train],", "9 - targets[train],")))
    for folder, name in ((semi_supervised, "one"), (other, "two")):
        (tmp_path / name).mkdir()
        call(f"{folder}/{SHORT} --max_steps 6", tmp_path / name)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_semi_supervised_labelled_images_follow_from_the_seed(semi_supervised: Path, monkeypatch):
    train = imported_train(semi_supervised, monkeypatch)
    found = {}
    for seed in (1, 2, 1):
        parts = train.build_datasets(train.TrainConfig(labels_per_class=5, seed=seed))
        assert parts["train"].targets.bincount().tolist() == [5] * 10
        assert (len(parts["unlabelled"]), len(parts["val"]), len(parts["test"])) == (1217, 200, 380)
        assert found.get(seed) is None or torch.equal(found[seed], parts["train"].images)
        found[seed] = parts["train"].images
    assert not torch.equal(found[1], found[2])


class Noise(torch.utils.data.Dataset):
    """Each sample is its number, and a random one."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def streams(fixmatch, **options) -> tuple:
    """Both streams, over the same dataset. The second has three times as many samples in a micro-batch."""
    config = fixmatch.TrainConfig(effective_batch_size=8, micro_batch_size=4, unlabelled_ratio=3, **options)
    fabric, dataset = Fabric(accelerator="cpu", devices=1), Noise()
    plan = fixmatch.make_plan(config, len(dataset), 0, 1, 0)
    sampler = fixmatch.TrainSampler(plan, dataset, 0, config.seed)
    return fixmatch.Loader(fabric, dataset, sampler, config), fixmatch.second_stream(fabric, config, plan, dataset)


def batches_of(loader, first: int, last: int) -> list:
    """The micro-batches of these steps, two of each."""
    timer = Timer(torch.device("cpu"), 1)
    return [batch for step in range(first, last + 1) for batch, _ in loader.micro_batches(step, timer)]


def test_semi_supervised_streams_draw_different_samples_and_random_numbers(fixmatch):
    ours, theirs = (batches_of(loader, 1, 20) for loader in streams(fixmatch))
    assert {len(indices) for indices, _ in ours} == {4} and {len(indices) for indices, _ in theirs} == {12}
    assert ours[0][0].tolist() != theirs[0][0][:4].tolist()
    drawn = [{value for _, noise in batches for value in noise.tolist()} for batches in (ours, theirs)]
    assert len(drawn[0]) == 160 and not drawn[0] & drawn[1]


def test_semi_supervised_second_stream_has_epochs_of_its_own(fixmatch):
    """Of 100 samples, 24 in a step: 4 steps, in which each comes at most once. A resume goes on in the middle."""
    whole = [indices.tolist() for indices, _ in batches_of(streams(fixmatch, limit_train_batches=2)[1], 1, 12)]
    resumed = [indices.tolist() for indices, _ in batches_of(streams(fixmatch, limit_train_batches=2)[1], 7, 12)]
    epochs = [sum(whole[first : first + 8], []) for first in (0, 8, 16)]
    assert [len(set(epoch)) for epoch in epochs] == [96, 96, 96] and epochs[0] != epochs[1]
    assert set(sum(epochs, [])) == set(range(100))
    assert resumed == whole[12:]


@pytest.mark.parametrize(
    "images, code", [("images[train[1:]], targets[train[1:]]", 2), ("-images[train], targets[train]", 0)]
)
def test_semi_supervised_resume_tells_other_unlabelled_images(images: str, code: int, tmp_path: Path, cwd: Path):
    """Another number of them is refused."""
    program = with_recipe("semi_supervised", tmp_path / "program")
    call(f"{program}/{SHORT} --max_steps 2", cwd)
    with_text(program, "data.py", ("images[train], targets[train]", images))
    done = call(f"{program}/train.py --resume auto --max_steps 4", cwd, code)
    assert re.search(
        "unlabelled has" if code else "unlabelled samples have changed", done.stderr if code else done.stdout
    )


# ---- reinforcement


@pytest.fixture
def train_policy(reinforcement: Path, monkeypatch: pytest.MonkeyPatch):
    """Its train.py."""
    return imported_train(reinforcement, monkeypatch)


@pytest.fixture
def cart(reinforcement: Path):
    return imported(reinforcement, "environment")


def test_reinforcement_learns_and_each_episode_is_evaluated_once(reinforcement: Path, tmp_path: Path):
    """Random pushes have a return of 22. On two processes, the episodes are the same, in the same order."""
    call(f"{reinforcement}/train.py --accelerator cpu --epochs 2 --warmup_epochs 0", tmp_path)
    found = []
    for devices in ("", ON_2):
        mean = results(reinforcement, tmp_path, f"{TEST} {devices}")["return"]
        (returns,) = predictions_of(tmp_path)
        assert len(returns) == 1000 and mean == pytest.approx(returns.mean().item()) and 400 < mean <= 500
        found.append(returns)
    assert (found[0] == found[1]).float().mean() > 0.99  # rounding may choose another action


@pytest.fixture
def played(train_policy) -> tuple:
    """The model, the values and what was played, of 8 episodes."""
    torch.manual_seed(0)
    config = train_policy.TrainConfig(discount=0.9)
    model = train_policy.build_model(config, None)
    starts = train_policy.build_datasets(config)["val"].tensors[0][:8]
    torch.manual_seed(1)
    values, count, (totals,) = train_policy.compute_loss(model, [starts], config)
    torch.manual_seed(1)
    assert count == 8
    return model, values, totals, train_policy.play(model, starts)


def test_reinforcement_loss_is_that_of_reinforce(played: tuple):
    """Written with the return of a cart-pole, whose reward is 1 in each step: a geometric series."""
    model, values, totals, (states, actions, *_) = played
    lengths = [int(total) for total in totals]
    assert len(set(lengths)) > 3 and max(lengths) < 500
    loss = 0
    for episode, length in enumerate(lengths):
        for step in range(length):
            returns = [(1 - 0.9 ** max(0, other - step)) / (1 - 0.9) for other in lengths]
            log_probs = model(states[step, episode]).log_softmax(dim=0)
            advantage = returns[episode] - sum(returns) / 8
            loss = loss - advantage * log_probs[actions[step, episode]]
    loss = loss / (8 * 500)
    torch.testing.assert_close(values["loss"], loss)
    assert values["return"] == totals.mean()
    found, expected = (torch.autograd.grad(value, [*model.parameters()]) for value in (values["loss"], loss))
    torch.testing.assert_close(found, expected)


def test_reinforcement_episode_is_over_when_the_pole_has_fallen(played: tuple, cart):
    _, _, totals, (states, actions, rewards, is_running) = played
    for episode, length in enumerate(map(int, totals)):
        assert rewards[:length, episode].min() == 1 and rewards[length:, episode].max() == 0
        assert is_running[:length, episode].all() and not is_running[length:, episode].any()
        after, _, has_ended = cart.advance(states[:length, episode], actions[:length, episode])
        assert has_ended.tolist() == [False] * (length - 1) + [True]
        assert torch.equal(after[:-1], states[1:length, episode])


def test_reinforcement_actions_are_drawn_in_training_and_the_likeliest_is_taken_otherwise(train_policy):
    class Constant(nn.Module):
        """Pushes to the right with the same probability in every state."""

        def forward(self, states: Tensor) -> Tensor:
            return torch.tensor([0.2, 0.8]).log().expand(*states.shape[:-1], 2)

    starts = torch.zeros(2000, 4)
    torch.manual_seed(0)
    assert train_policy.play(Constant(), starts)[1][0].float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert train_policy.play(Constant().eval(), starts)[1].float().mean() == 1


def test_reinforcement_step_waits_for_no_device(train_policy):
    """On the meta device tensors have no values: to ask for one is an error."""
    model = train_policy.build_model(train_policy.TrainConfig(), None).to("meta")
    values = train_policy.compute_loss(model, [torch.zeros(8, 4, device="meta")], train_policy.TrainConfig())[0]
    values["loss"].backward()
    with pytest.raises(RuntimeError, match="meta"):
        values["loss"].item()


@pytest.mark.parametrize("action", [0, 1])
def test_reinforcement_energy_grows_by_the_work_of_the_push(action: int, cart, monkeypatch):
    """Of a cart of 1 kg and a uniform rod of 0.1 kg and 1 m, computed from the speed of the rod's centre."""

    def energy(states: Tensor) -> Tensor:
        _, velocity, angle, angular_velocity = states.unbind(dim=1)
        across = velocity + 0.5 * angular_velocity * angle.cos()
        up = -0.5 * angular_velocity * angle.sin()
        moving = velocity.square() / 2 + 0.1 * (across.square() + up.square()) / 2
        turning = 0.1 / 12 * angular_velocity.square() / 2
        return moving + turning + 0.1 * 9.8 * 0.5 * angle.cos()

    monkeypatch.setattr(cart, "SECONDS", 1e-6)
    before = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after = cart.advance(before, torch.full((100,), action))[0]
    work = 10 * (2 * action - 1) * before[:, 1]  # per second
    torch.testing.assert_close((energy(after) - energy(before)) / 1e-6, work, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close((after - before)[:, 0], 1e-6 * before[:, 1])


def test_reinforcement_episode_ends_beyond_the_track_or_twelve_degrees(cart):
    for position, degrees in [(0, 0), (2.3, 0), (2.5, 0), (-2.5, 0), (0, 11.9), (0, 12.1), (0, -12.1)]:
        states = torch.tensor([[position, 0.0, math.radians(degrees), 0.0]])
        assert cart.advance(states, torch.tensor([1]))[2].item() == (abs(position) > 2.4 or abs(degrees) > 12)


def test_reinforcement_parts_have_other_starts(cart):
    parts = [part.tensors[0] for part in cart.build_starts().values()]
    assert len(torch.cat(parts).unique(dim=0)) == 1280 + 200 + 1000
    for starts, again in zip(parts, cart.build_starts().values(), strict=True):
        assert torch.equal(starts, again.tensors[0]) and 0.04 < starts.abs().max() <= 0.05


# ---- regression


def test_regression_takes_rows_as_measured_and_predicts_in_the_unit_of_the_target(regression: Path, tmp_path: Path):
    """Without the training set: what normalises is in the file, and is that of the training set. The errors are as
    scikit-learn computes them from its own targets; on two processes, too."""
    call(f"{regression}/train.py --accelerator cpu --logger_name csv", tmp_path)
    assert last_summary(tmp_path)["best"] == min(row["val/loss"] for row in rows(tmp_path)) < 0.5
    measured, progression = load_diabetes(return_X_y=True, scaled=False)
    order = np.random.default_rng(0).permutation(442)
    train, test = progression[order[:242]], progression[order[342:]]
    model = imported(regression, "model").Model(torch.zeros(2, 10), torch.zeros(2)).eval()
    model.load_state_dict(checkpoint(tmp_path, "best")["model"])
    np.testing.assert_allclose(model.row_mean, measured[order[:242]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.row_std, measured[order[:242]].std(0, ddof=1), rtol=1e-5)
    predicted = model(torch.tensor(measured[order[342:]], dtype=torch.float32)).detach().numpy()
    for devices in ("", ON_2):
        found = results(regression, tmp_path, f"--checkpoint best --split test --predictions {devices}")
        assert found.keys() == {"loss", "mae", "r2"}
        assert found["mae"] == pytest.approx(mean_absolute_error(test, predicted), rel=1e-5)
        assert found["r2"] == pytest.approx(r2_score(test, predicted), abs=1e-5)
        assert found["loss"] == pytest.approx(np.mean((test - predicted) ** 2) / train.var(ddof=1), rel=1e-5)
        outputs, targets = predictions_of(tmp_path)
        assert outputs.shape == targets.shape == (100,)
        assert (outputs - targets).abs().mean().item() == pytest.approx(found["mae"], rel=1e-5)
    error = call("tools/confusion.py", tmp_path, code=2).stderr
    assert "classes" in error and error.count("\n") == 1


# ---- the baselines that scripts print

BASELINES = {
    ("regression", "diabetes.py"): (2, 0.3, 0.6),
    ("bag_of_words", "docstrings.py"): (1, 0.75, 1),
    ("segmentation", "scenes.py"): (1, 0.2, 0.3),
    ("language_model", "topics.py"): (5, 4, 20),
}


@pytest.mark.parametrize("recipe, script", BASELINES)
def test_the_baseline_is_printed(recipe: str, script: str, request, tmp_path: Path):
    count, low, high = BASELINES[recipe, script]
    lines = run(f"{request.getfixturevalue(recipe)}/{script}", tmp_path).stdout.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(values) == count and all(low < value < high for value in values)
    if recipe == "language_model":  # the text depends on the version of Python
        assert min(values) == values[3] < 5 and values[0] > 10 and lines[3].startswith("5-gram")


# ---- segmentation


@pytest.fixture(scope="module")
def scenes(segmentation: Path) -> dict:
    return imported(segmentation, "scenes").build_scenes()


def cropped(shape: np.ndarray) -> tuple:
    """The smallest rectangle that has all pixels of a shape: its height, and its pixels."""
    lines, columns = np.nonzero(shape)
    part = shape[lines.min() : lines.max() + 1, columns.min() : columns.max() + 1]
    return len(part), part.tobytes()


def test_segmentation_mask_has_the_shape_of_a_digit_of_its_part_in_each_quarter(scenes: dict):
    """No scene is there twice."""
    digits = load_digits()
    parts = np.split(np.random.default_rng(0).permutation(1797), [1217, 1417])
    for name, indices in zip(("train", "val", "test"), parts, strict=True):
        known = {(digits.target[index] + 1, *cropped(digits.images[index] >= 4)) for index in indices}
        for mask in scenes[name].targets.numpy():
            quarters = [half for halves in np.split(mask, 2) for half in np.split(halves, 2, axis=1)]
            for quarter in quarters:
                (number,) = set(quarter[quarter > 0].tolist())
                assert (number, *cropped(quarter > 0)) in known
    masks = [mask.numpy().tobytes() for dataset in scenes.values() for mask in dataset.targets]
    assert len(set(masks)) == 1800


def test_segmentation_images_and_masks_are_of_the_same_pixels(scenes: dict):
    sizes = {"train": 1200, "val": 200, "test": 400}
    for name, dataset in scenes.items():
        assert dataset.images.shape == (sizes[name], 1, 24, 24) and dataset.images.dtype == torch.float32
        assert dataset.targets.shape == (sizes[name], 24, 24) and dataset.targets.dtype == torch.uint8
        assert dataset.targets.unique().tolist() == [*range(11)] and dataset.num_classes == 11
        is_ink = dataset.targets > 0
        assert dataset.images[:, 0][is_ink].mean() > 0.6 > 0.1 > dataset.images[:, 0][~is_ink].mean()


def test_segmentation_each_pixel_of_an_image_of_any_size_has_logits_and_sees_a_whole_digit(segmentation: Path):
    """Of 8 x 8 pixels, wherever in it the pixel is."""
    model = imported(segmentation, "model").Model((3, 19, 22), 5, width=4).eval()
    images = torch.randn(2, 3, 19, 22, requires_grad=True)
    assert model(images).shape == (2, 5, 19, 22)
    convolutions = nn.Sequential(*(layer for layer in model.layers if not isinstance(layer, nn.GroupNorm)))
    convolutions(images)[0, 0, 9, 11].backward()  # without the normalisation, which sees all pixels
    assert images.grad[0, :, 9 - 7 : 9 + 8, 11 - 7 : 11 + 8].ne(0).all() and not images.grad[1].any()


def test_segmentation_count_is_that_of_the_samples(segmentation: Path, monkeypatch, scenes: dict):
    train = imported_train(segmentation, monkeypatch)
    model = imported(segmentation, "model").Model((1, 24, 24), 11, width=4).eval()
    images, masks = scenes["val"].__getitems__(range(7))
    values, count, (classes, targets) = train.compute_loss(model, (images, masks), None)
    logits = model(images)
    assert count == 7 and torch.equal(classes, logits.argmax(1)) and torch.equal(targets, masks)
    assert values["loss"].item() == pytest.approx(F.cross_entropy(logits, masks.long()).item())


@pytest.mark.night
def test_segmentation_predictions_are_a_byte_for_each_pixel_and_give_the_same_iou(segmentation: Path, scenes, tmp_path):
    """On two processes, too; and better than the baseline."""
    call(f"{segmentation}/train.py --accelerator cpu --epochs 12", tmp_path)
    found = []
    for devices in ("", ON_2):
        report = results(segmentation, tmp_path, f"--checkpoint best --split test --predictions {devices}")
        classes, masks = predictions_of(tmp_path)
        assert classes.dtype == masks.dtype == torch.uint8 and classes.shape == masks.shape == (400, 24, 24)
        assert torch.equal(masks, scenes["test"].targets)
        expected = jaccard_score(masks.flatten(), classes.flatten(), average="macro")
        assert report["iou"] == pytest.approx(expected, rel=1e-6) and report["iou"] > 0.6
        found.append((report, classes))
    assert found[1][0]["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-5)
    assert (found[1][1] != found[0][1]).float().mean() < 1e-4  # a pixel may be rounded to another class


def test_segmentation_pixels_without_a_class_count_in_no_metric_and_have_no_loss(tmp_path: Path):
    """As scikit-learn computes the IoU from the others."""
    line = "    return torch.from_numpy(images)"
    program = with_recipe("segmentation", tmp_path / "program")
    with_text(program, "scenes.py", (line, f"    masks[:, :4] = masks[:, -4:] = 255\n{line}"))
    call(f"{program}/train.py {SMALL} --limit_train_batches 1.0 --epochs 1", tmp_path)
    found = results(program, tmp_path, "--checkpoint best --split test --predictions")
    classes, masks = predictions_of(tmp_path)
    assert (masks == 255).sum() == masks.numel() / 3
    known = masks != 255
    expected = jaccard_score(masks[known], classes[known], labels=range(11), average=None, zero_division=0)
    assert found["class_iou"] == pytest.approx(expected, abs=1e-5)
    assert found["iou"] == pytest.approx(expected.mean(), abs=1e-5) and "class_iou" not in history(tmp_path)[-1]
