"""What one method or port alone can do wrong: its loss, its optimizer, its metric, as its paper or another program
computes it. What holds for all is in test_recipes.py, such as the values that its preface prints."""

import gzip
import math
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import EVERY_FOURTH_STEP, LONG, ON_2, REPO, SMALL, call, execute, run, run_in
from comparisons import assert_same_weights
from copies import generator, imported, imported_train, with_recipe
from edits import insert_after, insert_before, replace
from lightning.fabric import Fabric
from mistakes import refuses
from outputs import checkpoint, history, last_summary, predictions_of, results, rows, run_dir, weights
from sklearn.datasets import load_diabetes
from sklearn.metrics import jaccard_score, mean_absolute_error, r2_score
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from runtime.loader import TrainSampler
from runtime.meters import Timer

pytestmark = pytest.mark.recipes


def saved(cwd: Path) -> list[dict]:
    """The checkpoints of a run, in the order of their steps."""
    return [torch.load(path, weights_only=True) for path in sorted(run_dir(cwd).glob("checkpoints/step-*.ckpt"))]


def close(value, **tolerance):
    """Of a tensor of one number, or a number."""
    return pytest.approx(float(value), **tolerance)


def test_distillation_loss_is_that_of_the_paper(distillation: Path, finished: Path, monkeypatch: pytest.MonkeyPatch):
    """Section 2: the cross-entropy with the teacher's probabilities, without their entropy, times the temperature
    squared. The labels have the rest of the weight. The teacher has the weights of the run, and no dropout."""
    train = imported_train(distillation, monkeypatch)
    config = train.TrainConfig(teacher=str(finished), temperature=2.0, teacher_weight=0.75)
    dataset = train.build_datasets(config)["train"]
    teacher = train.load_teacher(Fabric(accelerator="cpu", devices=1), config, train.build_model, dataset)
    assert_same_weights(teacher.state_dict(), torch.load(finished / "model.pt"), atol=0)
    images, targets, logits = dataset.images[:6], dataset.targets[:6], torch.randn(6, 10, generator=generator())
    values, _, _ = train.compute_loss(lambda images: logits, (images, targets), config, teacher)
    ours, wanted = (logits / 2).softmax(dim=1), (teacher.eval()(images) / 2).softmax(dim=1)
    imitation = 4 * (wanted * (wanted / ours).log()).sum() / 6
    assert values["loss"].item() == close(0.75 * imitation + 0.25 * F.cross_entropy(logits, targets))


def test_ema_average_follows_the_formula_and_is_saved(ema: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In each step, after the optimizer's: average <- decay * average + (1 - decay) * weights. The decay rises to the
    option, as a function of the step alone, so that the start is forgotten."""
    options = "--max_steps 4 --checkpoint_interval 1 --num_checkpoint_keep 0"
    call(f"{ema}/{LONG.replace(EVERY_FOURTH_STEP, options)}", tmp_path)
    before, *others = saved(tmp_path)
    for after, decay in zip(others, [3 / 12, 4 / 13, 5 / 14], strict=True):  # of the steps 2 to 4
        for name, raw in after["raw_model"].items():
            expected = decay * before["model"][name].double() + (1 - decay) * raw.double()
            torch.testing.assert_close(after["model"][name].double(), expected, atol=1e-7, rtol=0)
            assert not torch.equal(after["model"][name], raw)
        before = after
    assert_same_weights(weights(tmp_path), before["model"], atol=0)
    train = imported_train(ema, monkeypatch)
    assert train.ema_decay(train.TrainConfig(ema_decay=0.999), 10_000) == 0.999


def test_contrastive_features_are_better_than_pixels(contrastive: Path, tmp_path: Path):
    call(f"{contrastive}/train.py --accelerator cpu --epochs 12 --width 16", tmp_path)
    lines = run(f"{contrastive}/contrastive.py {run_dir(tmp_path)}", tmp_path).stdout.splitlines()
    features, _, pixels, _ = (float(line.rpartition(" ")[2]) for line in lines)  # with 100 labels, and with all
    assert features > pixels


def test_contrastive_loss_is_that_of_the_paper_and_no_label_reaches_the_encoder(contrastive: Path):
    """Equation 1, pair by pair. Also in mixed precision."""
    projections = torch.randn(10, 4, generator=generator(), dtype=torch.float64)
    similar = (torch.cosine_similarity(projections[:, None], projections[None], dim=2) / 0.2).exp()
    losses = [-math.log(similar[i, (i + 5) % 10] / (similar[i].sum() - similar[i, i])) for i in range(10)]
    assert imported(contrastive, "contrastive").nt_xent(projections, 0.2).item() == close(sum(losses) / 10)
    model = imported(contrastive, "model").Model((1, 8, 8), 10, width=4)
    with torch.autocast("cpu", torch.bfloat16):
        projections, logits = model(torch.randn(4, 1, 8, 8))
    logits.float().square().sum().backward()
    assert model.probe[2].weight.grad.any() and model.encoder[0].weight.grad is None
    projections.float().square().sum().backward()
    assert model.encoder[0].weight.grad.any()


@pytest.mark.night
def test_diffusion_draws_what_it_has_learned(diffusion: Path, tmp_path: Path):
    options = "--epochs 12 --width 16 --base_lr 2e-3 --dropout 0 --checkpoint_frequency 5"
    call(f"{diffusion}/train.py --accelerator cpu {options}", tmp_path)
    printed = run(f"{diffusion}/sample.py --count 200", tmp_path).stdout
    assert float(re.search(r"distance to the test images (.+)", printed)[1]) < 0.02  # untrained, above 0.03
    assert (run_dir(tmp_path) / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_diffusion_adds_noise_as_described(diffusion: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that knows the image has no loss: it gets back the noise, whatever the step."""
    train = imported_train(diffusion, monkeypatch)
    signals = sys.modules["model"].schedule()[1]
    images, seen = torch.randn(64, 1, 8, 8), []

    def model(noisy, times):
        signal = signals[times].view(-1, 1, 1, 1)
        seen.extend(times.tolist())
        return (noisy - signal.sqrt() * images) / (1 - signal).sqrt()

    values, count, _ = train.compute_loss(model, (images, None), None)
    assert values["loss"] < 1e-6 and count == 64 and len({*seen}) > 32
    assert signals[0] > 0.99 and signals[-1] < 1e-4  # from nearly no noise to nearly nothing else


def test_gan_players_take_turns_and_the_range_of_the_pixels_is_saved(gan: Path, tmp_path: Path):
    call(f"{gan}/train.py {SMALL} --max_steps 3 --checkpoint_interval 1", tmp_path)
    first, second, third = saved(tmp_path)
    players = ("model", "discriminator")
    for before, after, (player, other) in ((first, second, players), (second, third, players[::-1])):
        assert not all(torch.equal(value, after[player][name]) for name, value in before[player].items())
        assert_same_weights(before[other], after[other], atol=0)
    dataset = imported(gan, "data").build_datasets(SimpleNamespace(data_dir=""))["train"]
    assert (weights(tmp_path)["low"], weights(tmp_path)["high"]) == tuple(dataset.images.aminmax())


def test_gradient_penalty_has_the_gradient_of_finite_differences(gradient_penalty: Path, monkeypatch):
    """Of the loss with the penalty, by one weight, in float64. And pgd.py is a stronger attack than that of
    fgsm_accuracy, one step along the sign of the gradient."""
    train = imported_train(gradient_penalty, monkeypatch)
    config = train.TrainConfig(width=4, dropout=0, gradient_penalty=1e4, attack=0.5)
    dataset = train.build_datasets(config, augment=False)["train"]
    model = train.build_model(config, dataset).double()
    images, targets = dataset.images[:100].double(), dataset.targets[:100]
    weight, losses = model.layers[0].weight, []
    for shift in (1e-5, -2e-5, 1e-5):
        with torch.no_grad():
            weight[0, 0, 0, 0] += shift
        values, _, _ = train.compute_loss(model, (images.clone(), targets), config)
        losses.append(values["loss"])
    losses[-1].backward()
    slope = (losses[0] - losses[1]).item() / 2e-5
    assert config.gradient_penalty * values["penalty"] > 0.1  # else the loss alone would do
    torch.testing.assert_close(weight.grad[0, 0, 0, 0].item(), slope, rtol=1e-4, atol=1e-8)

    F.cross_entropy(model(images.requires_grad_()), targets).backward()
    by_sign = model(images + 0.5 * images.grad.sign())
    assert values["fgsm_accuracy"] == (by_sign.argmax(dim=1) == targets).float().mean()
    moved = imported(gradient_penalty, "pgd").attacked(model, images.detach(), targets, 0.5, 40)
    assert (moved - images).abs().max() <= 0.5 + 1e-6
    assert F.cross_entropy(model(moved), targets) > F.cross_entropy(by_sign, targets)


def test_sam_steps_along_the_gradient_of_the_perturbed_weights(tmp_path: Path):
    """Of the loss |w|²/2 the gradient is w, there w + rho w/|w|. With plain SGD, |w| falls by lr (|w| + rho)."""
    program = with_recipe("sam", tmp_path / "program")
    replace(program, "values", '{"loss": sum(p.square().sum() for p in model.parameters()) / 2 + 0 * logits.sum()}')
    replace(program, "optimizer", "torch.optim.SGD(model.parameters(), lr=plan.peak_lr)")
    options = "--max_steps 3 --checkpoint_interval 1 --base_lr 0.25 --rho 0.5 --lr_schedule constant --warmup_epochs 0"
    call(f"{program}/train.py {SMALL} {options} --monitor val/loss --monitor_mode min", tmp_path)
    first, *others = (each["model"] for each in saved(tmp_path))
    norm = torch.cat([weight.double().flatten() for weight in first.values()]).norm()
    assert norm > 1 and len(others) == 2
    factor = 1.0
    for model in others:
        factor *= 1 - 0.25 * (1 + 0.5 / (factor * norm))
        for name, weight in model.items():
            torch.testing.assert_close(weight.double(), first[name].double() * factor, atol=1e-6, rtol=0)


def test_sam_second_pass_sees_the_same_batches_and_random_numbers(tmp_path: Path):
    """Each forward pass of a training step prints its images and a random number. That a run is the same on any number
    of devices show the tests of a project."""
    program = with_recipe("sam", tmp_path / "program")
    insert_after(program, "batch", 'if model.training:\n    print(f"pass {images.sum():.8f} {torch.rand(()):.8f}")')
    passes = re.findall(r"pass (.+)", call(f"{program}/{LONG} --max_steps 2", tmp_path).stdout)
    assert passes[:4] == passes[4:8] != passes[8:12] == passes[12:] and len({*passes}) == 8


def test_hard_examples_hardest_is_drawn_so_many_times_as_often_as_the_easiest(hard_examples: Path):
    losses = imported(hard_examples, "hard_examples").SampleLosses(1000, 20, torch.device("cpu"))
    assert len(losses.order(0, generator()).unique()) == 1000  # each once in the first epoch
    losses.before = torch.rand(1000, generator=generator())
    drawn = torch.stack([losses.order(0, generator(seed)).bincount(minlength=1000) for seed in range(200)]).double()
    expected = 20 ** (torch.arange(1, 1001).double() / 1000)
    by_rank = drawn.mean(0)[losses.before.argsort()]
    torch.testing.assert_close(by_rank, expected * 1000 / expected.sum(), atol=0.15, rtol=0)
    assert (drawn.sum(1) == 1000).all() and ((drawn - drawn.mean(0)).abs() < 1).all()  # rounded up or down
    order = losses.order(0, generator())
    assert order.diff().lt(0).any() and torch.equal(order, losses.order(0, generator()))


def test_hard_examples_have_their_losses_from_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After two epochs, and in the middle of the third, which has more of the hard ones. The weights stay as they are,
    and neither dropout nor shifts change a loss: a sample has the same in each epoch."""
    program = replace(with_recipe("hard_examples", tmp_path / "program"), "shift", "shift=0")
    still = "--base_lr 1e-30 --dropout 0 --effective_batch_size 64 --max_steps 20"
    cwd = run_in(tmp_path / "cwd", f"{program}/{LONG} {still} {ON_2}")
    train = imported_train(program, monkeypatch)
    dataset = train.build_datasets(train.TrainConfig())["train"]
    model = train.build_model(train.TrainConfig(width=4), dataset).eval()
    model.load_state_dict(weights(cwd))
    expected = F.cross_entropy(model(dataset.images), dataset.targets, reduction="none").detach()
    losses = checkpoint(cwd, "step-00000020")["sample_losses"]
    for part, most in (("before", 8 * 64 * 2), ("current", 4 * 64)):
        is_drawn = losses[part].isfinite()
        assert 0.6 * most < is_drawn.sum() <= min(most, len(expected))
        torch.testing.assert_close(losses[part][is_drawn], expected[is_drawn], atol=1e-5, rtol=0)
    assert losses["current"][is_drawn].mean() > expected.mean()


@pytest.mark.parametrize("recipe, option", [("distillation", "teacher"), ("reference", "reference")])
def test_a_model_of_another_run_is_frozen_and_in_no_checkpoint(recipe: str, option: str, finished, tmp_path: Path):
    """It is not counted, and is found by its name without the time. Without the option nothing is changed. The
    reference is asked by test.py, too."""
    program = with_recipe(recipe, tmp_path / "program")
    if recipe == "reference":
        insert_after(program, "step is done", "assert not config.reference or not model.reference[0].training")
    command = f"train.py {SMALL} --width 6"
    ours = run_in(tmp_path / "with", f"{program}/{command} --{option} {finished}")
    without, plain = (run_in(tmp_path / f"of_{path.name}", f"{path}/{command}") for path in (program, REPO))
    assert_same_weights(weights(without), weights(plain), atol=0)
    assert last_summary(ours)["parameters"] == last_summary(plain)["parameters"]
    (of_ours, of_plain), key = (saved(cwd)[-1] for cwd in (ours, plain)), "layers.0.weight"
    assert of_ours.keys() == of_plain.keys() and of_ours["model"].keys() == of_plain["model"].keys()
    assert not torch.equal(of_ours["model"][key], of_plain["model"][key])
    if recipe == "reference":
        found = results(program, ours, "--checkpoint last --split val")
        assert found["loss"] > found["distance"] > 1
    by_name = f"--root_dir {finished.parent} --{option} train_out --precision bf16-true"
    call(f"{program}/train.py --accelerator cpu --fast_run {by_name}", tmp_path)


def test_multitask_adds_the_losses_and_reports_the_error_of_the_ink(multitask: Path, tmp_path: Path):
    call(f"{multitask}/train.py {SMALL} --logger_name csv --ink_weight 0.5", tmp_path)
    for row in rows(tmp_path):
        for part in ("train", "val"):
            assert row[f"{part}/loss"] == close(row[f"{part}/digit_loss"] + 0.5 * row[f"{part}/ink_loss"])
    dataset = imported(multitask, "data").build_datasets(SimpleNamespace(data_dir=""))["test"]
    model = imported(multitask, "model").Model((1, 8, 8), 10, width=4).eval()
    model.load_state_dict(weights(tmp_path))
    ink = model(dataset.images)[1].detach()
    inks = dataset.images.sum(dim=(1, 2, 3)) / 8
    found = results(multitask, tmp_path, "--checkpoint last --split test")
    assert found["ink_mae"] == close((ink - inks).abs().mean(), rel=1e-3)


@pytest.mark.parametrize("exchange", [True, False])
def test_two_models_learn_from_what_the_other_finds_easy_or_from_what_each_does(exchange: bool, two_models: Path):
    ease = torch.tensor([5.0, 4, 3, 2, 1, 0])  # the greater the logit of the target, the smaller the loss
    logits, peer_logits = (torch.stack([each, torch.zeros(6)], dim=1).requires_grad_() for each in (ease, ease.flip(0)))
    losses_of = imported(two_models, "coteaching").co_teaching_losses
    losses_of(logits, peer_logits, torch.zeros(6).long(), kept=0.5, exchange=exchange)["loss"].backward()
    first, last = [True] * 3 + [False] * 3, [False] * 3 + [True] * 3  # easy for the model; for the peer
    assert logits.grad[:, 0].ne(0).tolist() == (last if exchange else first)
    assert peer_logits.grad[:, 0].ne(0).tolist() == (first if exchange else last)
    share_kept, config = imported(two_models, "coteaching").share_kept, SimpleNamespace(forget_rate=0.4)
    assert [share_kept(config, epoch) for epoch in (0, 2.5, 9)] == pytest.approx([1, 0.8, 0.6])


def test_two_models_wrong_labels_are_those_of_the_seed_and_in_the_training_set_alone(two_models: Path, monkeypatch):
    train = imported_train(two_models, monkeypatch)
    settings = ({"noise_rate": 0}, *({"noise_rate": 0.3, "seed": seed} for seed in (42, 42, 7)))
    sets = [train.build_datasets(train.TrainConfig(**setting)) for setting in settings]
    right, noisy, again, other = (each["train"].targets for each in sets)
    shift = (noisy - right) % 10
    assert {*shift.tolist()} == {0, 1} and shift.double().mean() == close(0.3, abs=0.05)
    assert torch.equal(noisy, again) and not torch.equal(noisy, other)
    assert all(torch.equal(sets[1][split].targets, sets[0][split].targets) for split in ("val", "test"))


def test_semi_supervised_loss_is_that_of_the_paper(semi_supervised: Path):
    """Equation 4: images without a certain prediction add nothing, and count. No gradient goes through the label."""
    weak, strong = (scale * torch.randn(20, 5, generator=generator(scale)) for scale in (4, 1))
    pseudo_label_loss = imported(semi_supervised, "fixmatch").pseudo_label_loss
    loss, certain = pseudo_label_loss(weak.requires_grad_(), strong.requires_grad_(), 0.9)
    labels = {row: int(each.argmax()) for row, each in enumerate(weak.softmax(dim=1)) if each.max() >= 0.9}
    expected = sum(F.cross_entropy(strong[row], torch.tensor(label)) for row, label in labels.items()) / 20
    assert loss.item() == close(expected) and certain.item() == close(len(labels) / 20) and 0 < len(labels) < 20
    loss.backward()
    assert weak.grad is None and (strong.grad.abs().sum(dim=1) > 0).sum() == len(labels)


def test_semi_supervised_labelled_images_follow_from_the_seed(semi_supervised: Path, monkeypatch):
    train = imported_train(semi_supervised, monkeypatch)
    *_, parts = sets = [train.build_datasets(train.TrainConfig(labels_per_class=5, seed=seed)) for seed in (1, 1, 2)]
    assert parts["train"].targets.bincount().tolist() == [5] * 10 and len(parts["unlabelled"]) == 1217
    first, again, other = (each["train"].images for each in sets)
    assert torch.equal(first, again) and not torch.equal(first, other)
    batch, unlabelled = (parts[part].__getitems__([0, 1, 2, 3]) for part in ("train", "unlabelled"))
    model = train.build_model(train.TrainConfig(), parts["train"])
    views: list[torch.Tensor] = []
    monkeypatch.setattr(train, "strong_view", lambda images: views.append(images) or images)
    train.compute_loss(model, (batch, (unlabelled[0], None)), train.TrainConfig())  # which needs no other labels
    assert len(views) == 1 and views[0] is unlabelled[0]


class Noise(TensorDataset):
    """Each sample is its number, and a random one."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def test_semi_supervised_streams_draw_different_samples_and_random_numbers(semi_supervised: Path, monkeypatch):
    """The second has three times as many samples in a micro-batch, and epochs of its own: of 100 samples, 24 in a step,
    in 4 steps, in which each comes at most once."""
    train = imported_train(semi_supervised, monkeypatch)
    config = train.TrainConfig(effective_batch_size=8, micro_batch_size=4, unlabelled_ratio=3, limit_train_batches=2)
    fabric, timer = Fabric(accelerator="cpu", devices=1), Timer(torch.device("cpu"), 1)
    dataset = Noise(torch.empty(100))
    plan = train.make_plan(config, len(dataset), 0, 1, 0)
    first = train.Loader(fabric, dataset, train.TrainSampler(plan, dataset, 0, config.seed), config)
    second = imported(semi_supervised, "fixmatch").second_stream(fabric, config, plan, dataset)
    found = []
    for loader in (first, second):
        batches = [batch for step in range(1, 5) for batch, _ in loader.micro_batches(step, timer)]
        found.append([torch.stack(parts) for parts in zip(*batches, strict=True)])
    (ours, noise), (theirs, other_noise) = found
    assert ours.shape == (8, 4) and theirs.shape == (8, 12) and len(theirs.unique()) == 96
    assert not torch.equal(ours[0], theirs[0, :4]) and not torch.isin(noise, other_noise).any()


def test_reinforcement_loss_is_that_of_reinforce(reinforcement: Path, monkeypatch):
    """Written with the return of a cart-pole, whose reward is 1 in each step until the pole has fallen: a geometric
    series. On the meta device tensors have no values: no step waits for one."""
    train = imported_train(reinforcement, monkeypatch)
    config = train.TrainConfig(discount=0.9)
    torch.manual_seed(0)
    model = train.build_model(config, None)
    starts = train.build_datasets(config)["val"].tensors[0][:8]
    torch.manual_seed(1)
    values, count, (totals,) = train.compute_loss(model, [starts], config)
    torch.manual_seed(1)
    states, actions, _, is_running = train.play(model, starts)
    lengths = is_running.sum(dim=0)
    assert count == 8 and len(lengths.unique()) > 3 and torch.equal(totals, lengths.float())
    assert values["return"] == totals.mean()
    returns = (1 - 0.9 ** (lengths - torch.arange(500)[:, None]).clamp(min=0)) / (1 - 0.9)
    advantages = returns - returns.mean(dim=1, keepdim=True)
    log_probs = torch.distributions.Categorical(logits=model(states)).log_prob(actions)
    loss = -(log_probs * advantages * is_running).mean()
    torch.testing.assert_close(values["loss"], loss)
    torch.testing.assert_close(*(torch.autograd.grad(each, [*model.parameters()]) for each in (values["loss"], loss)))
    train.compute_loss(model.to("meta"), [starts.to("meta")], config)[0]["loss"].backward()


def test_reinforcement_plays_by_the_policy_until_the_track_or_twelve_degrees_are_left(reinforcement: Path):
    """In training actions are drawn; otherwise the likeliest is taken."""
    environment = imported(reinforcement, "environment")
    model = nn.Linear(4, 2)  # pushes to the right with the same probability in every state
    nn.init.zeros_(model.weight)
    model.bias.data = torch.tensor([0.2, 0.8]).log()
    starts = torch.zeros(2000, 4)
    torch.manual_seed(0)
    assert environment.play(model, starts)[1][0].float().mean().item() == close(0.8, abs=0.03)
    assert environment.play(model.eval(), starts)[1].float().mean() == 1
    for position, degrees in [(0, 0), (2.3, 0), (2.5, 0), (-2.5, 0), (0, 11.9), (0, 12.1), (0, -12.1)]:
        states = torch.tensor([[position, 0.0, math.radians(degrees), 0.0]])
        has_ended = environment.advance(states, torch.tensor([1]))[2].item()
        assert has_ended == (abs(position) > 2.4 or abs(degrees) > 12)


def test_regression_takes_rows_as_measured_and_predicts_in_the_unit_of_the_target(regression: Path, tmp_path: Path):
    """Without the training set: what normalises is in the file. The errors are as scikit-learn computes them from its
    own targets; on two processes, too."""
    call(f"{regression}/train.py --accelerator cpu --logger_name csv", tmp_path)
    assert last_summary(tmp_path)["best"] == min(row["val/loss"] for row in rows(tmp_path)) < 0.5
    measured, progression = load_diabetes(return_X_y=True, scaled=False)
    train, _, test = np.split(np.random.default_rng(0).permutation(442), [242, 342])
    model = imported(regression, "model").Model(torch.zeros(2, 10), torch.zeros(2)).eval()
    model.load_state_dict(checkpoint(tmp_path, "best")["model"])
    np.testing.assert_allclose(model.row_mean, measured[train].mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.row_std, measured[train].std(0, ddof=1), rtol=1e-5)
    predicted = model(torch.tensor(measured[test], dtype=torch.float32)).detach().numpy()
    variances = np.mean((progression[test] - predicted) ** 2) / progression[train].var(ddof=1)
    assert results(regression, tmp_path, f"--checkpoint best --split test {ON_2}") == {
        "loss": close(variances, rel=1e-5),
        "mae": close(mean_absolute_error(progression[test], predicted), rel=1e-5),
        "r2": close(r2_score(progression[test], predicted), abs=1e-5),
    }


# What scripts print: the bounds of each line's number. The text of language_model depends on the version of Python.
BASELINES = {
    ("regression", "diabetes.py"): [(0.3, 0.6), (0.3, 0.6)],
    ("bag_of_words", "docstrings.py"): [(0.75, 1)],
    ("segmentation", "scenes.py"): [(0.2, 0.3)],
    ("language_model", "topics.py"): [(10, 20), (5, 10), (4, 6), (4, 5), (4, 6)],
    ("token_batches", "token_batches.py"): [(1, 4), (50, 60)],
}


@pytest.mark.parametrize("recipe, script", BASELINES)
def test_the_baseline_is_printed(recipe: str, script: str, request, tmp_path: Path):
    lines = run(f"{request.getfixturevalue(recipe)}/{script}", tmp_path).stdout.splitlines()
    for line, (low, high) in zip(lines, BASELINES[recipe, script], strict=True):
        assert low < float(re.search(r"\d+\.\d+", line)[0]) < high, line


def test_segmentation_pixels_without_a_class_count_in_no_metric(tmp_path: Path):
    """As scikit-learn computes the IoU from the others. The predictions are a byte for each pixel."""
    program = with_recipe("segmentation", tmp_path / "program")
    insert_after(program, ("scenes.py", "draw_scenes", "images += ..."), "masks[:, :4] = masks[:, -4:] = 255")
    call(f"{program}/train.py {SMALL} --limit_train_batches 1.0 --epochs 1", tmp_path)
    found = results(program, tmp_path, "--checkpoint best --split test --predictions")
    classes, masks = predictions_of(tmp_path)
    assert classes.dtype == masks.dtype == torch.uint8 and (masks == 255).sum() == masks.numel() / 3
    known = masks != 255
    expected = jaccard_score(masks[known], classes[known], labels=range(11), average=None, zero_division=0)
    assert found["class_iou"] == pytest.approx(expected, abs=1e-5)
    assert found["iou"] == close(expected.mean(), abs=1e-5) and "class_iou" not in history(tmp_path)[-1]


# ---- methods that read texts

needs_transformers = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")


def test_bag_of_words_model_pt_alone_takes_texts_as_they_were_written(bag_of_words: Path, tmp_path, cwd, monkeypatch):
    """Without the data set. It finds the classes that test.py finds; its words are of the training texts. Weights of
    another vocabulary of the same size, which their shapes do not show, are refused."""
    call(f"{bag_of_words}/train.py --accelerator cpu", cwd)
    for path in (bag_of_words / "classify.py", bag_of_words / "model.py", run_dir(cwd) / "model.pt"):
        shutil.copy(path, tmp_path)
    results(bag_of_words, cwd, "--checkpoint last --split test --predictions")
    logits, _ = predictions_of(cwd)
    programs = imported_train(bag_of_words, monkeypatch)
    datasets = programs.build_datasets(programs.TrainConfig())
    texts = ["xyzzy", "", *(" ".join(words) for words, _ in datasets["test"].samples)]  # two without a known word
    for arguments, given in ((texts, ""), ([], "\n".join(texts))):
        command = [sys.executable, "classify.py", ".", *arguments]
        done = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[2:] == [datasets["test"].classes[index] for index in logits.argmax(1)]
    words = weights(cwd)["_extra_state"].pop("words")
    assert {*words} <= {word for text, _ in datasets["train"].samples for word in text}
    other = with_recipe("bag_of_words", tmp_path / "other")
    insert_after(other, ("docstrings.py", "build_docstrings", "vocabulary = ..."), 'vocabulary[0] = "other"')
    for command in ("train.py --resume auto --epochs 21", "test.py --accelerator cpu"):
        refuses(f"{other}/{command}", cwd, "words")


@needs_transformers
def test_text_classification_body_is_frozen_and_has_a_rate_of_its_own(tmp_path: Path):
    """Neither the weights of the body change in the first 4 of 6 steps nor what the optimizer knows of them, and it has
    no dropout, also after a validation. On two processes, where DDP would wait for the frozen gradients, it is trained
    with its features in test_recipes.py."""
    program = with_recipe("text_classification", tmp_path / "program")
    modes = "assert (model.base_model.training, model.dropout.training) == (step > 4, True)"
    insert_after(program, "micro-batch is done", modes)
    options = "--epochs 1.5 --freeze_epochs 1 --weight_decay 0.5 --micro_batch_size 32 --val_interval 1"
    call(f"{program}/train.py {SMALL} {options} --checkpoint_interval 1 --num_checkpoint_keep 6", tmp_path)
    saved = {step: checkpoint(tmp_path, f"step-{step:08}") for step in range(1, 7)}
    body = [name for name in saved[1]["model"] if name.startswith("bert.")]
    for step in range(2, 7):
        model, before = saved[step]["model"], saved[step - 1]["model"]
        changed = [not torch.equal(model[name], before[name]) for name in body]
        assert not any(changed) if step <= 4 else all(changed), step
        assert not torch.equal(model["classifier.weight"], before["classifier.weight"])
        assert len(saved[step]["optimizer"]["state"]) == (2 if step <= 4 else 2 + len(body))
        head_lr, body_lr = (group["lr"] for group in saved[step]["optimizer"]["param_groups"])
        assert body_lr == 0.25 * head_lr > 0


@needs_transformers
def test_text_classification_padding_changes_nothing(text_classification: Path, monkeypatch: pytest.MonkeyPatch):
    programs = imported_train(text_classification, monkeypatch)
    train = programs.build_datasets(programs.TrainConfig())["train"]
    samples = sorted((train[index] for index in range(16)), key=lambda sample: len(sample[0]))
    model = programs.build_model(programs.TrainConfig(), train).eval()
    batch = train.collate_fn(samples)
    assert batch["input_ids"].shape == (16, len(samples[-1][0])) and len(samples[0][0]) < len(samples[-1][0])
    alone = torch.cat([model(**train.collate_fn([sample])).logits for sample in samples])
    torch.testing.assert_close(model(**batch).logits, alone, atol=1e-5, rtol=0)
    assert max(len(sample) for sample, _ in train) == train.max_length


def test_language_model_logs_tokens_per_second_and_mfu(language_model: Path, tmp_path: Path):
    """The operations per token are those that torch counts, forward and backward, and 6 for each bias and each weight
    of a norm. The MFU is a share of what both devices can do."""
    module = imported(language_model, "model")
    model, tokens = module.Model(width=4), torch.randint(256, (2, module.LENGTH))
    # The fused attention of the CPU is not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)[0].backward()
    others = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    flops = counter.get_total_flops() / tokens.numel() + 6 * others
    command = f"{language_model}/train.py {SMALL} --max_steps 8 --micro_batch_size 32 --peak_tflops 0.002 {ON_2}"
    for row in rows(run_in(tmp_path / "cwd", command)):
        assert row["tokens_per_second"] == pytest.approx(module.LENGTH * row["samples_per_second"], 1e-5)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 0.002e12 / 2, 1e-5)


def sizes_of_outputs(compute_loss, model: torch.nn.Module, batch) -> list[tuple]:
    """The sizes of the tensors that leave the model in compute_loss."""
    found = []
    with model.register_forward_hook(lambda module, given, output: found.append(output)):
        compute_loss(model, batch, None)
    (output,) = found
    parts = output if isinstance(output, tuple) else (output,)
    return [tuple(part.shape) for part in parts if part is not None]


def test_language_model_training_gets_the_loss_of_the_logits_without_the_logits(language_model: Path, monkeypatch):
    """Of all tensors they would take the most memory. A validation has a metric that needs them. No token is predicted
    from itself or a later one."""
    train = imported_train(language_model, monkeypatch)
    model = train.Model(width=16, dropout=0.0)
    batch = torch.randint(256, (2, 65))
    assert sizes_of_outputs(train.compute_loss, model, batch) == [()]
    in_training, _, _ = train.compute_loss(model, batch, None)
    values, count, (logits, targets) = train.compute_loss(model.eval(), batch, None)
    assert values["loss"] == in_training["loss"] == F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert count == 2 and torch.equal(targets, batch[:, 1:])
    tokens, changed = torch.arange(8)[None], torch.tensor([[0, 1, 2, 3, 4, 9, 6, 7]])
    difference = (model(tokens)[1] - model(changed)[1]).abs().amax(dim=(0, 2))
    assert difference[:5].max() == 0 < difference[5:].min()
    loss, _ = model.bfloat16()(batch[:, :-1], targets)
    assert loss.dtype == torch.float32  # not rounded


def test_language_model_parts_share_no_paragraph_and_each_byte_is_trained_on(language_model: Path, monkeypatch):
    train = imported_train(language_model, monkeypatch)
    parts = train.build_datasets(train.TrainConfig())
    of_train, of_val, of_test = ({*part.text.split(b"\n\n")[1:-1]} for part in parts.values())
    assert len(of_test) > 100 and not (of_train & of_val or of_train & of_test or of_val & of_test)
    starts = torch.stack([parts["train"][1] for _ in range(500)])
    assert 50 < len(starts.unique(dim=0)) <= 64  # shifts
    assert parts["val"][1][0] == parts["val"][0][-1]  # which is a target alone there


@pytest.fixture(scope="module")
def parts(token_batches: Path) -> dict:
    return imported(token_batches, "paragraphs").build_paragraphs()


def epoch_of(train, epoch: int) -> list[np.ndarray]:
    """The sequences of each batch of an epoch, in their order."""
    sizes = {"effective_batch_size": 1, "micro_batch_size": 1, "last_batch_size": 1}
    plan = SimpleNamespace(steps_per_epoch=len(train), world_size=1, **sizes)
    sampler = TrainSampler(plan, train, rank=0, seed=42, step=epoch * len(train))
    indices = [index for _, (index,) in sampler]
    return [train.batches_of(int(index) // len(train))[index % len(train)] for index in indices]


def test_token_batches_of_an_epoch_have_each_sequence_once_and_keep_to_the_budget(token_batches: Path, parts: dict):
    """A longer sequence is alone. They are of similar lengths, mixed, and no two sequences are always together."""
    train = imported(token_batches, "token_batches").TokenBatches(parts["train"], 300)
    lengths, together = train.sequences.lengths, []
    for epoch in range(2):
        batches = epoch_of(train, epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(train.sequences)))
        together.append({frozenset(batch.tolist()) for batch in batches if len(batch) > 1})
    assert len(together[0] & together[1]) < 0.1 * len(together[0])
    found = [lengths[batch] for batch in batches]
    assert all(len(batch) * batch.max() <= 300 or len(batch) == 1 for batch in found)
    assert np.median([batch.min() / batch.max() for batch in found]) > 0.85
    means = [batch.mean() for batch in found]
    assert abs(np.corrcoef(range(len(means)), means)[0, 1]) < 0.3


def losses_of(model: torch.nn.Module, sequences, indices) -> list[torch.Tensor]:
    """The losses of the tokens of each of these sequences, one sequence at a time."""
    samples = (sequences.samples[index] for index in indices)
    return [model(tokens[None, :-1], tokens[None, 1:])[0] for tokens in samples]


def test_token_batches_model_returns_the_losses_of_its_logits_without_the_logits(token_batches, parts, monkeypatch):
    """Of all tensors they would take the most memory. No metric needs them."""
    train = imported_train(token_batches, monkeypatch)
    model, logits = train.Model(256, width=8, dropout=0), []
    tokens, num_tokens = parts["train"].__getitems__(np.arange(3))
    model.head.register_forward_hook(lambda module, given, output: logits.append(output.transpose(1, 2)))
    assert sizes_of_outputs(train.compute_loss, model, (tokens, num_tokens)) == [tokens[:, 1:].shape]
    losses = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(losses, F.cross_entropy(logits[-1], tokens[:, 1:], reduction="none"))


def test_token_batches_count_each_sample_by_its_tokens(token_batches: Path, parts: dict, tmp_path: Path):
    """On any number of processes; the predictions have it in its place, and padding changes nothing."""
    call(f"{token_batches}/train.py {SMALL} --width 8", tmp_path)
    model = imported(token_batches, "model").Model(256, width=8).eval()
    model.load_state_dict(weights(tmp_path))
    with torch.no_grad():
        losses = losses_of(model, parts["test"], range(len(parts["test"])))
    mean = torch.cat(losses).mean().item()
    found = results(token_batches, tmp_path, f"--checkpoint last --split test --predictions --batch_size 7 {ON_2}")
    assert found == {"loss": pytest.approx(mean, rel=1e-5), "perplexity": pytest.approx(math.exp(mean), rel=1e-4)}
    means, counts = predictions_of(tmp_path)
    assert counts.tolist() == parts["test"].lengths.tolist() and len(counts) > 100
    torch.testing.assert_close(means, torch.stack([loss.mean() for loss in losses]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [ON_2, "--micro_batch_size 2"])
def test_token_batches_give_each_token_the_same_weight(options: str, token_batches: Path, parts, tmp_path):
    """In the loss of a step and in its gradient."""
    small = "--effective_batch_size 4 --micro_batch_size 1 --max_steps 1 --log_interval 1 --dropout 0 --width 8"
    execute(f"{token_batches}/{LONG} {small} --base_lr 1e-30 {options}", tmp_path)
    model = imported(token_batches, "model").Model(256, width=8, dropout=0)
    model.load_state_dict(weights(tmp_path))  # as in the beginning
    train = imported(token_batches, "token_batches").TokenBatches(parts["train"], 1024)
    first = np.concatenate(epoch_of(train, 0)[:4])
    per_batch = train.sequences.lengths.sum() / len(train)
    loss = torch.cat(losses_of(model, train.sequences, first)).sum() / (4 * per_batch)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    (row,) = rows(tmp_path)
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


# ---- ports. The losses of the originals are what originals.py has printed, by the commands at its top, with torch
# 2.13.0 on one thread of a CPU. There the ports had the same in every digit; elsewhere the last ones may differ.

SAME = {"rel": 2e-6, "abs": 0}
MNIST_LOSSES = [
    *(2.331538200378418, 2.62857985496521, 2.3460466861724854, 2.2181830406188965),
    *(2.15299654006958, 1.9942576885223389, 1.6473313570022583, 1.7151060104370117),
]
# Of 11 steps in an epoch: three epochs with a rate of 20, the fourth with one of 5.
WORD_LOSSES = [
    *(3.708543062210083, 3.6951119899749756, 3.7171709537506104, 3.658906936645508, 3.685830593109131),
    *(3.6725707054138184, 3.6860949993133545, 3.664382219314575, 3.659548282623291, 3.665909767150879),
    *(3.6379783153533936, 3.8124594688415527, 3.7375478744506836, 3.6949410438537598, 3.666548728942871),
    *(3.6767935752868652, 3.670383930206299, 3.6768932342529297, 3.6608188152313232, 3.6518144607543945),
    *(3.6620888710021973, 3.609642267227173, 3.795147180557251, 3.690796136856079, 3.687119483947754),
    *(3.6606533527374268, 3.6731326580047607, 3.671621084213257, 3.6751511096954346, 3.6620349884033203),
    *(3.6504640579223633, 3.661703109741211, 3.611438035964966, 3.8004872798919678, 3.739609479904175),
    *(3.7361316680908203, 3.6748199462890625, 3.673694372177124, 3.678903818130493, 3.6728854179382324),
    *(3.647437334060669, 3.64695405960083, 3.651867628097534, 3.506027936935425),
]


def test_mnist_has_the_losses_of_the_original(digits: Path, tmp_path: Path):
    """It reads plain and compressed files."""
    program = with_recipe("mnist", tmp_path / "program")
    in_order = "def order(self, epoch, generator):\n    return torch.arange(len(self))\n"
    insert_before(program, "length of data", in_order)  # main.py does not shuffle on a CPU
    files = Path(shutil.copytree(digits, tmp_path / "files"))
    for path in files.glob("*images*"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    options = "--seed 1 --epochs 2 --log_interval 1 --logger_name csv"
    found = rows(run_in(tmp_path / "cwd", f"{program}/train.py --accelerator cpu --data_dir {files} {options}"))
    assert [row["train/loss"] for row in found] == pytest.approx(MNIST_LOSSES, **SAME)
    assert [row["lr"] for row in found] == 4 * [1.0] + 4 * [0.7]
    of_epochs = [found[3], found[7]]  # what main.py prints of its test set
    assert [f"{row['val/loss']:.4f}" for row in of_epochs] == ["2.1126", "1.9560"]
    assert [row["val/accuracy"] for row in of_epochs] == pytest.approx([24 / 80, 18 / 80])


def test_word_language_model_has_the_losses_and_perplexities_of_the_original(word_language_model, text, tmp_path):
    """That of the test set is of the whole text, in test.py."""
    options = "--seed 1111 --epochs 4 --width 16 --bptt 20 --log_interval 1 --logger_name csv"
    monitor = "--monitor val/perplexity --monitor_mode min"
    call(f"{word_language_model}/train.py --accelerator cpu --data_dir {text} {options} {monitor}", tmp_path)
    found = rows(tmp_path)
    assert [row["train/loss"] for row in found] == pytest.approx(WORD_LOSSES, **SAME)
    assert [row["lr"] for row in found] == 33 * [20.0] + 11 * [5.0]
    perplexities = [f"{row['val/perplexity']:.2f}" for row in found if "val/loss" in row]
    assert perplexities == ["43.90", "43.35", "43.55", "39.12"]  # as main.py prints them
    assert checkpoint(tmp_path, "best")["step"] == 44
    tested = results(word_language_model, tmp_path, "--checkpoint best --split test")["perplexity"]
    assert f"{tested:.2f}" == "38.72"  # of main.py
