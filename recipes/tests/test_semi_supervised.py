"""The recipe semi_supervised: FixMatch, and a second stream of data in each step."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from edits import with_text
from helpers import (
    LONG,
    ON_2,
    assert_same_run,
    assert_same_training,
    call,
    history,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    with_recipe,
)
from lightning.fabric import Fabric

from runtime.meters import Timer

pytestmark = pytest.mark.recipes
# 48 steps. An epoch of the labelled images has 8 of them, one of the unlabelled images 43. So early a model is certain
# of nothing: with a threshold of 0 it learns from all unlabelled images.
SHORT = f"{LONG} --effective_batch_size 4 --micro_batch_size 2 --epochs 6 --warmup_epochs 0 --threshold 0"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("semi_supervised", tmp_path_factory.mktemp("program"))


@pytest.fixture
def fixmatch(program: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the recipe, and what it imports, in place of those of the repository."""
    for name in ("fixmatch", "utils"):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
    imported_train(program, monkeypatch)
    return importlib.import_module("fixmatch")


# ---- the method


@pytest.mark.night
def test_it_is_better_than_the_labelled_images_alone(program: Path, tmp_path: Path):
    """Of the images themselves, and of strong views of them: with as many steps, and the same augmentation."""
    accuracy = {}
    options = "--max_steps 400 --val_interval 400 --base_lr 1e-2 --threshold 0.8 --dropout 0 --logger_name csv"
    for name, more in {"fixmatch": "", "alone": "--unlabelled_weight 0", "strong": "--unlabelled_weight 0"}.items():
        (tmp_path / name).mkdir()
        call(
            f"{program}/train.py --accelerator cpu {options} {more} --strong_labels {name == 'strong'}", tmp_path / name
        )
        call(f"{program}/test.py --accelerator cpu --predictions", tmp_path / name)
        logits, targets = torch.load(run_dir(tmp_path / name) / "predictions_test_best.pt", weights_only=True)
        assert len(targets) == 380
        accuracy[name] = (logits.argmax(1) == targets).float().mean().item()
    assert accuracy["fixmatch"] > 0.03 + max(accuracy["alone"], accuracy["strong"]), accuracy


def test_the_loss_is_that_of_the_paper(fixmatch: ModuleType):
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


def test_each_class_has_few_labels_and_the_others_are_not_used(program: Path, tmp_path: Path):
    """With other labels of the unlabelled images, all bits are the same. Other seeds have other labelled images."""
    other = Path(shutil.copytree(program, tmp_path / "program"))
    line = '"unlabelled": ImageDataset(images[train], targets[train],'
    with_text(other, "data.py", (line, line.replace("targets[train],", "9 - targets[train],")))
    for folder, name in ((program, "one"), (other, "two")):
        (tmp_path / name).mkdir()
        call(f"{folder}/{SHORT} --max_steps 6", tmp_path / name)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_the_labelled_images_follow_from_the_seed(program: Path, monkeypatch: pytest.MonkeyPatch):
    train = imported_train(program, monkeypatch)
    found = {}
    for seed in (1, 2, 1):
        parts = train.build_datasets(train.TrainConfig(labels_per_class=5, seed=seed))
        assert parts["train"].targets.bincount().tolist() == [5] * 10
        assert (len(parts["unlabelled"]), len(parts["val"]), len(parts["test"])) == (1217, 200, 380)
        assert found.get(seed) is None or torch.equal(found[seed], parts["train"].images)
        found[seed] = parts["train"].images
    assert not torch.equal(found[1], found[2])


# ---- the second stream


def streams(fixmatch: ModuleType, dataset, **options) -> tuple:
    """Both streams, over the same dataset. The second has three times as many samples in a micro-batch."""
    config = fixmatch.TrainConfig(effective_batch_size=8, micro_batch_size=4, unlabelled_ratio=3, **options)
    fabric = Fabric(accelerator="cpu", devices=1)
    plan = fixmatch.make_plan(config, len(dataset), 0, 1, 0)
    sampler = fixmatch.TrainSampler(plan, dataset, 0, config.seed)
    first = fixmatch.Loader(fabric, dataset, sampler, config)
    return first, fixmatch.second_stream(fabric, config, plan, dataset)


def batches_of(loader, first: int, last: int) -> list:
    """The micro-batches of these steps, two of each."""
    timer = Timer(torch.device("cpu"), 1)
    return [batch for step in range(first, last + 1) for batch, _ in loader.micro_batches(step, timer)]


class Noise(torch.utils.data.Dataset):
    """Each sample is its number, and a random one."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def test_the_streams_draw_different_samples_and_random_numbers(fixmatch: ModuleType):
    ours, theirs = (batches_of(loader, 1, 20) for loader in streams(fixmatch, Noise()))
    assert {len(indices) for indices, _ in ours} == {4} and {len(indices) for indices, _ in theirs} == {12}
    assert ours[0][0].tolist() != theirs[0][0][:4].tolist()
    drawn = [{value for _, noise in batches for value in noise.tolist()} for batches in (ours, theirs)]
    assert len(drawn[0]) == 160 and not drawn[0] & drawn[1]


def test_the_second_stream_has_epochs_of_its_own(fixmatch: ModuleType):
    """Of 100 samples, 24 in a step: 4 steps, in which each comes at most once. A resume goes on in the middle."""
    _, second = streams(fixmatch, Noise(), limit_train_batches=2)
    whole = [indices.tolist() for indices, _ in batches_of(second, 1, 12)]
    _, second = streams(fixmatch, Noise(), limit_train_batches=2)
    resumed = [indices.tolist() for indices, _ in batches_of(second, 7, 12)]
    epochs = [sum(whole[first : first + 8], []) for first in (0, 8, 16)]
    assert [len(set(epoch)) for epoch in epochs] == [96, 96, 96] and epochs[0] != epochs[1]
    assert set(sum(epochs, [])) == set(range(100))
    assert resumed == whole[12:]


def test_too_few_samples_for_a_step_are_told_in_one_line(program: Path, tmp_path: Path):
    error = call(f"{program}/train.py --accelerator cpu --unlabelled_ratio 100", tmp_path, code=2).stderr
    expected = "--unlabelled_ratio 100: a step needs 1600 unlabelled samples, there are only 1217"
    assert error == f"train.py: error: {expected}\n"
    assert list(tmp_path.iterdir()) == []


# ---- exact


def test_killed_and_resumed_is_the_same_run_with_any_number_of_workers(program: Path, tmp_path: Path):
    whole, _ = killed_and_resumed(f"{program}/{SHORT}", tmp_path)
    assert all(float(row["train/unlabelled"]) > 0.1 for row in history(whole))
    (tmp_path / "workers").mkdir()
    call(f"{program}/{SHORT} --num_workers 2", tmp_path / "workers")
    assert_same_run(tmp_path / "workers", whole)


@pytest.mark.night
@pytest.mark.parametrize("options", ["--num_workers 2", ON_2, f"{ON_2} --num_workers 2"])
def test_killed_and_resumed_with_workers_and_on_two_processes(options: str, program: Path, tmp_path: Path):
    killed_and_resumed(f"{program}/{SHORT} {options}", tmp_path)


def test_two_processes_train_like_one(program: Path, tmp_path: Path):
    """With dropout and strong views, since the micro-batches are the same."""
    one, two = on_one_and_two(f"{program}/{SHORT} --max_steps 12", tmp_path)
    assert_same_training(one, two)


def test_a_resume_cannot_change_the_ratio(program: Path, tmp_path: Path):
    call(f"{program}/{SHORT} --max_steps 2", tmp_path)
    error = call(f"{program}/train.py --resume auto --max_steps 4 --unlabelled_ratio 3", tmp_path, code=2).stderr
    assert "--unlabelled_ratio 3: a resume cannot change it" in error


@pytest.mark.parametrize(
    "images, code, told",
    [
        ("images[train[1:]], targets[train[1:]]", 2, "unlabelled has 1216 samples, but had 1217"),
        ("-images[train], targets[train]", 0, "the unlabelled samples have changed"),
    ],
)
def test_a_resume_tells_other_unlabelled_images(images: str, code: int, told: str, program: Path, tmp_path: Path):
    """Another number of them is refused."""
    other = Path(shutil.copytree(program, tmp_path / "program"))
    (tmp_path / "cwd").mkdir()
    call(f"{other}/{SHORT} --max_steps 2", tmp_path / "cwd")
    with_text(other, "data.py", ("images[train], targets[train]", images))
    done = call(f"{other}/train.py --resume auto --max_steps 4", tmp_path / "cwd", code)
    assert told in done.stdout + done.stderr
