"""recipes/methods/reinforcement.patch: a policy that learns from episodes it plays."""

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import (
    ON_2,
    assert_same_training,
    call,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    with_recipe,
)
from torch import Tensor, nn

pytestmark = pytest.mark.recipes
# 16 episodes a step, saved every second step.
STEPS = "--accelerator cpu --effective_batch_size 16 --micro_batch_size 8 --checkpoint_interval 2 --logger_name csv"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("reinforcement", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """With episodes of at most a second: a tenth of the time."""
    program = with_recipe("reinforcement", tmp_path_factory.mktemp("short"))
    path = program / "environment.py"
    path.write_text(path.read_text().replace("MAX_STEPS = 500", "MAX_STEPS = 50"))
    assert imported(program, "environment").MAX_STEPS == 50
    return program


@pytest.fixture
def train(program: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported_train(program, monkeypatch)


@pytest.fixture
def environment(program: Path) -> ModuleType:
    return imported(program, "environment")


class Constant(nn.Module):
    """A policy that pushes to the right with the same probability in every state."""

    def __init__(self, probability: float):
        super().__init__()
        self.logits = torch.tensor([math.log(1 - probability), math.log(probability)])

    def forward(self, states: Tensor) -> Tensor:
        return self.logits.expand(*states.shape[:-1], 2)


# ---- runs


def test_it_learns_and_each_episode_is_evaluated_once(program: Path, tmp_path: Path):
    """Random pushes have a return of 22. On two processes, the episodes are the same, in the same order."""
    options = "--accelerator cpu --epochs 2 --warmup_epochs 0 --logger_name csv"
    call(f"{program}/train.py {options}", tmp_path)
    found = []
    for how, devices in ((call, ""), (run, ON_2)):
        how(f"{program}/test.py --out_dir train_out --accelerator cpu --predictions {devices}", tmp_path)
        report = json.loads((run_dir(tmp_path) / "test_test_best.json").read_text())
        (returns,) = torch.load(run_dir(tmp_path) / "predictions_test_best.pt", weights_only=True)
        assert report["num_samples"] == len(returns) == 1000
        mean = report["results"]["return"]
        assert mean == pytest.approx(returns.mean().item()) and 400 < mean <= 500
        found.append(returns)
    assert (found[0] == found[1]).float().mean() > 0.99  # rounding may choose another action


@pytest.mark.parametrize("options", ["", pytest.param(f"{ON_2} --precision bf16-mixed", marks=pytest.mark.night)])
def test_killed_and_resumed_it_is_the_same_run(options: str, short: Path, tmp_path: Path):
    killed_and_resumed(
        f"{short}/train.py {STEPS} --warmup_epochs 0 --max_steps 60 --val_interval 8 {options}", tmp_path
    )


def test_two_processes_share_the_episodes_of_a_step(short: Path, tmp_path: Path):
    command = f"{short}/train.py {STEPS} --warmup_epochs 0 --max_steps 8 --log_interval 1"
    assert_same_training(*on_one_and_two(command, tmp_path))


def test_a_single_episode_has_none_to_be_compared_with(program: Path, tmp_path: Path):
    error = call(
        f"{program}/train.py {STEPS} --micro_batch_size 1 --warmup_epochs 0 --max_steps 2", tmp_path, code=2
    ).stderr
    assert "--micro_batch_size" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- the loss


@pytest.fixture
def played(train: ModuleType) -> tuple:
    """The model, the values and what was played, of 8 episodes."""
    torch.manual_seed(0)
    model = train.build_model(train.TrainConfig(), None)
    starts = train.build_datasets(train.TrainConfig())["val"].tensors[0][:8]
    torch.manual_seed(1)
    values, count, (totals,) = train.compute_loss(model, [starts], train.TrainConfig(discount=0.9))
    torch.manual_seed(1)
    assert count == 8
    return model, values, totals, train.play(model, starts)


def test_the_loss_is_that_of_reinforce(played: tuple):
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


def test_an_episode_is_over_when_the_pole_has_fallen(played: tuple, environment: ModuleType):
    _, _, totals, (states, actions, rewards, is_running) = played
    for episode, length in enumerate(map(int, totals)):
        assert rewards[:length, episode].min() == 1 and rewards[length:, episode].max() == 0
        assert is_running[:length, episode].all() and not is_running[length:, episode].any()
        after, _, has_ended = environment.advance(states[:length, episode], actions[:length, episode])
        assert has_ended.tolist() == [False] * (length - 1) + [True]
        assert torch.equal(after[:-1], states[1:length, episode])


def test_actions_are_drawn_in_training_and_the_likeliest_is_taken_otherwise(train: ModuleType):
    model = Constant(0.8)
    starts = torch.zeros(2000, 4)
    torch.manual_seed(0)
    assert train.play(model, starts)[1][0].float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert train.play(model.eval(), starts)[1].float().mean() == 1


def test_no_step_waits_for_the_device(train: ModuleType):
    """On the meta device tensors have no values: to ask for one is an error."""
    model = train.build_model(train.TrainConfig(), None).to("meta")
    values = train.compute_loss(model, [torch.zeros(8, 4, device="meta")], train.TrainConfig())[0]
    values["loss"].backward()
    with pytest.raises(RuntimeError, match="meta"):
        values["loss"].item()


# ---- the environment


@pytest.mark.parametrize("action", [0, 1])
def test_the_energy_grows_by_the_work_of_the_push(action: int, environment: ModuleType, monkeypatch):
    """Of a cart of 1 kg and a uniform rod of 0.1 kg and 1 m, computed from the speed of the rod's centre."""

    def energy(states: Tensor) -> Tensor:
        _, velocity, angle, angular_velocity = states.unbind(dim=1)
        across = velocity + 0.5 * angular_velocity * angle.cos()
        up = -0.5 * angular_velocity * angle.sin()
        moving = velocity.square() / 2 + 0.1 * (across.square() + up.square()) / 2
        turning = 0.1 / 12 * angular_velocity.square() / 2
        return moving + turning + 0.1 * 9.8 * 0.5 * angle.cos()

    monkeypatch.setattr(environment, "SECONDS", 1e-6)
    before = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after = environment.advance(before, torch.full((100,), action))[0]
    work = 10 * (2 * action - 1) * before[:, 1]  # per second
    torch.testing.assert_close((energy(after) - energy(before)) / 1e-6, work, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close((after - before)[:, 0], 1e-6 * before[:, 1])


@pytest.mark.parametrize(
    "position, degrees, ended",
    [
        (0, 0, False),
        (2.3, 0, False),
        (2.5, 0, True),
        (-2.5, 0, True),
        (0, 11.9, False),
        (0, 12.1, True),
        (0, -12.1, True),
    ],
)
def test_an_episode_ends_beyond_the_track_or_twelve_degrees(position, degrees, ended, environment: ModuleType):
    states = torch.tensor([[position, 0.0, math.radians(degrees), 0.0]])
    assert environment.advance(states, torch.tensor([1]))[2].item() == ended


def test_the_parts_have_other_starts(environment: ModuleType):
    parts = [part.tensors[0] for part in environment.build_starts().values()]
    assert len(torch.cat(parts).unique(dim=0)) == 1280 + 200 + 1000
    for starts, again in zip(parts, environment.build_starts().values(), strict=True):
        assert torch.equal(starts, again.tensors[0]) and 0.04 < starts.abs().max() <= 0.05
