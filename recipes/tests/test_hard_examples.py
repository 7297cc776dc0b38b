"""The recipe hard_examples: the order of an epoch follows from the losses of the epochs before it."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from edits import replace
from helpers import (
    LONG,
    ON_2,
    assert_same_run,
    assert_same_training,
    call,
    imported,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run,
    run_dir,
    weights,
    with_recipe,
)

pytestmark = pytest.mark.recipes
BF16 = f"{LONG} --precision bf16-mixed"
# The weights stay as they are, and neither dropout nor shifts change a loss: a sample has the same in each epoch.
STILL = f"{LONG} --base_lr 1e-30 --dropout 0 --effective_batch_size 64"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("hard_examples", tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def still(tmp_path_factory) -> Path:
    """The program without shifts."""
    return replace(with_recipe("hard_examples", tmp_path_factory.mktemp("still")), "shift", "shift=0")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample_losses(program: Path, num_samples: int, pressure: float):
    return imported(program, "hard_examples").SampleLosses(num_samples, pressure, torch.device("cpu"))


def saved_losses(cwd: Path) -> dict[str, torch.Tensor]:
    """Those in the newest checkpoint of a run."""
    return torch.load(max(run_dir(cwd).glob("checkpoints/step-*.ckpt")), weights_only=True)["sample_losses"]


# ---- what it is good for


def test_rare_classes_are_recognized_better(program: Path, tmp_path: Path):
    """Although nothing tells which they are."""
    rare = {}
    for pressure in (1, 100):
        cwd = tmp_path / str(pressure)
        cwd.mkdir()
        call(f"{program}/train.py --accelerator cpu --logger_name csv --pressure {pressure}", cwd)
        call(f"{program}/test.py --out_dir train_out --checkpoint last --accelerator cpu --predictions", cwd)
        (path,) = run_dir(cwd).glob("predictions_test_*.pt")
        logits, targets = torch.load(path, weights_only=True)
        rare[pressure] = (logits.argmax(1) == targets)[targets < 5].float().mean()
    assert rare[100] > max(0.8, rare[1] + 0.05)


# ---- the order


def test_the_hardest_is_drawn_so_many_times_as_often_as_the_easiest(program: Path):
    losses = sample_losses(program, 1000, pressure=20)
    losses.before = torch.rand(1000, generator=generator())
    drawn = torch.stack([losses.order(0, generator(seed)).bincount(minlength=1000) for seed in range(200)]).double()
    assert torch.equal(drawn.sum(1), torch.full((200,), 1000.0, dtype=torch.float64))
    by_rank = drawn.mean(0)[losses.before.argsort()]
    expected = 20 ** (torch.arange(1, 1001).double() / 1000)
    torch.testing.assert_close(by_rank, expected * 1000 / expected.sum(), atol=0.15, rtol=0)
    assert ((drawn - drawn.mean(0)).abs() < 1).all()  # rounded up or down
    shuffled = losses.order(0, generator())
    assert not torch.equal(shuffled, shuffled.sort().values)
    assert torch.equal(shuffled, losses.order(0, generator()))


@pytest.mark.parametrize("pressure, before", [(1.0, torch.rand(1000)), (100.0, torch.full((1000,), math.inf))])
def test_without_pressure_and_in_the_first_epoch_each_sample_is_drawn_once(program: Path, pressure: float, before):
    losses = sample_losses(program, 1000, pressure)
    losses.before = before
    for seed in range(20):
        assert len(losses.order(0, generator(seed)).unique()) == 1000


def test_of_a_sample_that_was_drawn_several_times_the_highest_loss_counts(program: Path):
    """And of one that was not drawn, the one before it."""
    losses = sample_losses(program, 5, pressure=100)
    losses.before = torch.arange(5.0)
    losses.indices = torch.tensor([3, 0, 3, 4])
    plan = SimpleNamespace(micro_batch_size=2, steps_per_epoch=2, effective_batch_size=2, world_size=1)
    losses.add(plan, 3, 0, torch.tensor([9.0, 0.5]))  # the first micro-batch of the second epoch
    losses.add(plan, 4, 0, torch.tensor([7.0, 6.0]))
    assert losses.before.tolist() == [0, 1, 2, 3, 4]  # until the epoch ends
    losses.end_epoch()
    assert losses.before.tolist() == [0.5, 1, 2, 9, 6]
    assert losses.current.tolist() == [-math.inf] * 5


# ---- the losses are those of the samples


@pytest.fixture(scope="module")
def expected(still: Path, tmp_path_factory) -> torch.Tensor:
    """The loss of each training sample with the weights that a run of STILL begins with, and ends with."""
    cwd = tmp_path_factory.mktemp("expected")
    call(f"{still}/{STILL} --max_steps 2", cwd)
    with pytest.MonkeyPatch.context() as patch:
        train = imported_train(still, patch)
        config = train.TrainConfig(width=4)
        dataset = train.build_datasets(config)["train"]
        model = train.build_model(config, dataset).eval()
    model.load_state_dict(weights(cwd))
    images, targets = dataset.__getitems__(range(len(dataset)))
    with torch.no_grad():
        return F.cross_entropy(model(images), targets, reduction="none")


@pytest.mark.parametrize("options", ["--micro_batch_size 64", "", f"{ON_2}", f"{ON_2} --precision bf16-mixed"])
def test_each_sample_has_its_loss_on_any_number_of_devices(options: str, still: Path, expected, tmp_path: Path):
    """After two epochs, and in the middle of the third."""
    how = run if ON_2 in options else call
    how(f"{still}/{STILL} --max_steps 20 {options}", tmp_path)
    saved = saved_losses(tmp_path)
    tolerance = 0.03 if "bf16" in options else 1e-5
    for part, most in (("before", 8 * 64 * 2), ("current", 4 * 64)):
        is_drawn = saved[part].isfinite()
        assert 0.6 * most < is_drawn.sum() <= min(most, len(expected))
        torch.testing.assert_close(saved[part][is_drawn], expected[is_drawn], atol=tolerance, rtol=0)
    assert saved["current"][saved["current"].isfinite()].mean() > expected.mean()  # the hard ones


# ---- exact


def test_killed_and_resumed_in_bf16_is_the_same_run(program: Path, tmp_path: Path):
    whole, killed = killed_and_resumed(f"{program}/{BF16}", tmp_path)
    torch.testing.assert_close(saved_losses(killed), saved_losses(whole), atol=0, rtol=0)
    (tmp_path / "workers").mkdir()
    call(f"{program}/{BF16} --num_workers 1", tmp_path / "workers")
    assert_same_run(tmp_path / "workers", whole)


def test_killed_and_resumed_with_workers_is_the_same_run(program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{BF16} --num_workers 1", tmp_path)


@pytest.mark.night
def test_killed_and_resumed_on_two_processes_is_the_same_run(program: Path, tmp_path: Path):
    whole, killed = killed_and_resumed(f"{program}/{BF16} {ON_2}", tmp_path)
    torch.testing.assert_close(saved_losses(killed), saved_losses(whole), atol=0, rtol=0)


def test_two_processes_train_on_the_same_batches(program: Path, tmp_path: Path):
    """Also in the second epoch, whose order follows from the losses of both."""
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 16 --dropout 0", tmp_path)
    assert_same_training(one, two)


def test_a_longer_run_is_one_that_was_long_from_the_start(program: Path, tmp_path: Path):
    """Although the shorter one ended in the middle of an epoch."""
    for name, steps in {"long": [28], "longer": [20, 28]}.items():
        (tmp_path / name).mkdir()
        for max_steps in steps:
            call(f"{program}/{LONG} --max_steps {max_steps} --resume auto", tmp_path / name)
    torch.testing.assert_close(weights(tmp_path / "longer"), weights(tmp_path / "long"), atol=0, rtol=0)


def test_a_resume_cannot_change_the_pressure(program: Path, tmp_path: Path):
    call(f"{program}/{LONG} --max_steps 2", tmp_path)
    error = call(f"{program}/train.py --resume auto --epochs 31 --pressure 10", tmp_path, code=2).stderr
    assert re.search(r"--pressure 10(\.0)?: a resume cannot change it", error)
