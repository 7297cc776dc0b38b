"""What one method alone can do wrong: its loss, its optimizer, its metric, as its paper or another program computes it.
What holds for all is in test_recipes.py, such as the values that its preface prints."""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import EVERY_FOURTH_STEP, LONG, ON_2, REPO, SMALL, call, run, run_in
from comparisons import assert_same_weights
from copies import generator, imported, imported_train, with_recipe
from edits import insert_after, replace
from lightning.fabric import Fabric
from outputs import checkpoint, history, last_summary, predictions_of, results, rows, run_dir, weights
from sklearn.datasets import load_diabetes
from sklearn.metrics import jaccard_score, mean_absolute_error, r2_score
from torch import nn

from runtime.meters import Timer

pytestmark = pytest.mark.recipes


def saved(cwd: Path) -> list[dict]:
    """The checkpoints of a run, in the order of their steps."""
    return [torch.load(path, weights_only=True) for path in sorted(run_dir(cwd).glob("checkpoints/step-*.ckpt"))]


def close(value, **tolerance):
    """Of a tensor of one number, or a number."""
    return pytest.approx(float(value), **tolerance)


def test_distillation_loss_is_that_of_the_paper(distillation: Path, monkeypatch: pytest.MonkeyPatch):
    """Section 2: the cross-entropy with the teacher's probabilities, without their entropy, times the temperature
    squared. The labels have the rest of the weight."""
    train = imported_train(distillation, monkeypatch)
    logits, of_teacher = torch.randn(2, 6, 10, generator=generator())
    targets, config = torch.arange(6), train.TrainConfig(temperature=2.0, teacher_weight=0.75)
    values, _, _ = train.compute_loss(lambda images: logits, (None, targets), config, lambda images: of_teacher)
    ours, wanted = (logits / 2).softmax(dim=1), (of_teacher / 2).softmax(dim=1)
    imitation = 4 * (wanted * (wanted / ours).log()).sum() / 6
    assert values["loss"].item() == close(0.75 * imitation + 0.25 * F.cross_entropy(logits, targets))


def test_distillation_teacher_has_the_weights_of_the_run(distillation: Path, finished: Path, monkeypatch):
    train = imported_train(distillation, monkeypatch)
    config = train.TrainConfig(teacher=str(finished))
    dataset, fabric = train.build_datasets(config)["train"], Fabric(accelerator="cpu", devices=1)
    teacher = train.load_teacher(fabric, config, train.build_model, dataset)
    assert_same_weights(teacher.state_dict(), torch.load(finished / "model.pt"), atol=0)
    assert not teacher.training


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


def test_gan_weights_alone_say_what_is_made(gan: Path, monkeypatch: pytest.MonkeyPatch):
    """The range of the pixels is that of the training set, also where a model is built for darker images."""
    train = imported_train(gan, monkeypatch)
    config = train.TrainConfig(width=4)
    dataset = train.build_datasets(config, augment=False)["train"]
    trained = train.build_model(config, dataset)
    dataset.images /= 2
    loaded = train.build_model(config, dataset)
    loaded.load_state_dict(trained.state_dict())
    noise = torch.randn(8, 32)
    assert torch.equal(loaded(noise), trained(noise))


def test_gan_players_take_turns(gan: Path, tmp_path: Path):
    call(f"{gan}/train.py {SMALL} --max_steps 3 --checkpoint_interval 1", tmp_path)
    first, second, third = saved(tmp_path)
    players = ("model", "discriminator")
    for before, after, (player, other) in ((first, second, players), (second, third, players[::-1])):
        assert not all(torch.equal(value, after[player][name]) for name, value in before[player].items())
        assert_same_weights(before[other], after[other], atol=0)


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
    shown = 'print(f"pass {images.sum():.8f} {torch.rand(()):.8f}\\n", end="", flush=True)'
    program = with_recipe("sam", tmp_path / "program")
    insert_after(program, "batch", f"if model.training:\n    {shown}")
    passes = re.findall(r"pass (.+)", run(f"{program}/{LONG} --max_steps 2 {ON_2}", tmp_path).stdout)
    assert sorted(passes) == sorted(2 * [*{*passes}]) and len(passes) == 2 * 2 * 4
    passes = re.findall(r"pass (.+)", call(f"{program}/{LONG} --max_steps 2", tmp_path).stdout)
    assert passes[:4] == passes[4:8] != passes[8:12] == passes[12:16]


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


def test_hard_examples_count_the_highest_loss_of_a_sample_that_was_drawn_several_times(hard_examples: Path):
    """And of one that was not drawn, the one before it."""
    losses = imported(hard_examples, "hard_examples").SampleLosses(5, 100, torch.device("cpu"))
    losses.before = torch.arange(5.0)
    losses.indices = torch.tensor([3, 0, 3, 4])
    plan = SimpleNamespace(micro_batch_size=2, steps_per_epoch=2, effective_batch_size=2, world_size=1)
    losses.add(plan, 3, 0, torch.tensor([9.0, 0.5]))  # the first micro-batch of the second epoch
    losses.add(plan, 4, 0, torch.tensor([7.0, 6.0]))
    losses.end_epoch()
    assert losses.before.tolist() == [0.5, 1, 2, 9, 6] and losses.current.tolist() == [-math.inf] * 5


@pytest.mark.parametrize("options", ["", ON_2])
def test_hard_examples_have_their_losses_on_any_number_of_devices(options: str, tmp_path: Path, monkeypatch):
    """After two epochs, and in the middle of the third, which has more of the hard ones. The weights stay as they are,
    and neither dropout nor shifts change a loss: a sample has the same in each epoch."""
    program = replace(with_recipe("hard_examples", tmp_path / "program"), "shift", "shift=0")
    still = "--base_lr 1e-30 --dropout 0 --effective_batch_size 64 --max_steps 20"
    cwd = run_in(tmp_path / "cwd", f"{program}/{LONG} {still} {options}")
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
        check = "assert not config.reference or not model.reference[0].training"
        insert_after(program, "step is done", check)
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
    found = []
    for seed in (1, 1, 2):
        parts = train.build_datasets(train.TrainConfig(labels_per_class=5, seed=seed))
        assert parts["train"].targets.bincount().tolist() == [5] * 10 and len(parts["unlabelled"]) == 1217
        found.append(parts["train"].images)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    batch, unlabelled = (parts[part].__getitems__([0, 1, 2, 3]) for part in ("train", "unlabelled"))
    model = train.build_model(train.TrainConfig(), parts["train"])
    views: list[torch.Tensor] = []
    monkeypatch.setattr(train, "strong_view", lambda images: views.append(images) or images)
    train.compute_loss(model, (batch, (unlabelled[0], None)), train.TrainConfig())  # which needs no other labels
    assert len(views) == 1 and views[0] is unlabelled[0]


class Noise(torch.utils.data.Dataset):
    """Each sample is its number, and a random one."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def test_semi_supervised_streams_draw_different_samples_and_random_numbers(semi_supervised: Path, monkeypatch):
    """The second has three times as many samples in a micro-batch, and epochs of its own: of 100 samples, 24 in a step,
    in 4 steps, in which each comes at most once."""
    train = imported_train(semi_supervised, monkeypatch)
    config = train.TrainConfig(effective_batch_size=8, micro_batch_size=4, unlabelled_ratio=3, limit_train_batches=2)
    fabric, dataset, timer = Fabric(accelerator="cpu", devices=1), Noise(), Timer(torch.device("cpu"), 1)
    plan = train.make_plan(config, len(dataset), 0, 1, 0)
    first = train.Loader(fabric, dataset, train.TrainSampler(plan, dataset, 0, config.seed), config)
    second = imported(semi_supervised, "fixmatch").second_stream(fabric, config, plan, dataset)
    ours, theirs = (
        [batch for step in range(1, 13) for batch, _ in loader.micro_batches(step, timer)] for loader in (first, second)
    )
    assert {len(indices) for indices, _ in ours} == {4} and {len(indices) for indices, _ in theirs} == {12}
    assert ours[0][0].tolist() != theirs[0][0][:4].tolist()
    drawn = [{value for _, noise in batches for value in noise.tolist()} for batches in (ours, theirs)]
    assert len(drawn[0]) == 12 * 8 and not drawn[0] & drawn[1]
    epochs = torch.stack([indices for indices, _ in theirs]).view(3, 96).tolist()
    assert [len({*epoch}) for epoch in epochs] == [96, 96, 96] and epochs[0] != epochs[1]


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
    states, actions, rewards, is_running = train.play(model, starts)
    lengths = [int(total) for total in totals]
    assert count == 8 and len(set(lengths)) > 3 and max(lengths) < 500 and values["return"] == totals.mean()
    loss = 0
    for episode, length in enumerate(lengths):
        assert rewards[:, episode].tolist() == is_running[:, episode].tolist() == [1] * length + [0] * (500 - length)
        for step in range(length):
            returns = [(1 - 0.9 ** max(0, other - step)) / (1 - 0.9) for other in lengths]
            log_probs = model(states[step, episode]).log_softmax(dim=0)
            loss = loss - (returns[episode] - sum(returns) / 8) * log_probs[actions[step, episode]] / (8 * 500)
    torch.testing.assert_close(values["loss"], loss)
    torch.testing.assert_close(*(torch.autograd.grad(each, [*model.parameters()]) for each in (values["loss"], loss)))
    train.compute_loss(model.to("meta"), [starts.to("meta")], config)[0]["loss"].backward()


def test_reinforcement_actions_are_drawn_in_training_and_the_likeliest_is_taken_otherwise(reinforcement: Path):
    play = imported(reinforcement, "environment").play
    model = nn.Linear(4, 2)  # pushes to the right with the same probability in every state
    nn.init.zeros_(model.weight)
    model.bias.data = torch.tensor([0.2, 0.8]).log()
    starts = torch.zeros(2000, 4)
    torch.manual_seed(0)
    assert play(model, starts)[1][0].float().mean().item() == close(0.8, abs=0.03)
    assert play(model.eval(), starts)[1].float().mean() == 1


def test_reinforcement_episode_ends_beyond_the_track_or_twelve_degrees(reinforcement: Path):
    advance = imported(reinforcement, "environment").advance
    for position, degrees in [(0, 0), (2.3, 0), (2.5, 0), (-2.5, 0), (0, 11.9), (0, 12.1), (0, -12.1)]:
        states = torch.tensor([[position, 0.0, math.radians(degrees), 0.0]])
        assert advance(states, torch.tensor([1]))[2].item() == (abs(position) > 2.4 or abs(degrees) > 12)


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
    for devices in ("", ON_2):
        found = results(regression, tmp_path, f"--checkpoint best --split test {devices}")
        assert found == {
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
