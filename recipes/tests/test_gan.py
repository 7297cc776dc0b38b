"""recipes/methods/gan.patch: two models and two optimizers that take turns, and pictures in TensorBoard."""

from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    SMALL,
    call,
    history,
    imported_train,
    killed_and_resumed,
    on_one_and_two,
    read_tensorboard,
    run,
    run_dir,
    with_recipe,
)

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return with_recipe("gan", tmp_path_factory.mktemp("gan"))


def last(cwd: Path, nth: int = 1) -> dict:
    """The nth newest checkpoint."""
    return torch.load(sorted(run_dir(cwd).glob("checkpoints/step-*.ckpt"))[-nth], weights_only=True)


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def pictures(cwd: Path) -> dict[int, bytes]:
    images = read_tensorboard(run_dir(cwd)).Images("samples")
    assert len(images) == len({image.step for image in images})
    assert {(image.width, image.height) for image in images} <= {(64, 64)}  # 8 x 8 samples of 8 x 8 pixels
    return {image.step: image.encoded_image_string for image in images}


def test_it_learns_and_is_evaluated(program: Path, tmp_path: Path):
    options = "--accelerator cpu --epochs 20 --val_frequency 10 --base_lr 2e-3 --logger_name csv"
    call(f"{program}/train.py {options}", tmp_path)
    assert float(history(tmp_path)[-1]["val/mmd"]) < 0.3  # 1 where the generator makes always the same
    report = call(f"{program}/test.py --out_dir train_out --accelerator cpu", tmp_path).stdout
    assert "on 380 test samples" in report and "mmd 0." in report


def test_the_weights_alone_say_what_is_made(program: Path, monkeypatch: pytest.MonkeyPatch):
    """The range of the pixels is that of the training set, also where a model is built for darker images."""
    train = imported_train(program, monkeypatch)
    config = train.TrainConfig(width=4)
    datasets = train.build_datasets(config, augment=False)
    trained = train.build_model(config, datasets["train"])
    datasets["test"].images /= 2
    loaded = train.build_model(config, datasets["test"])
    loaded.load_state_dict(trained.state_dict())
    noise = torch.randn(8, 32)
    assert torch.equal(loaded(noise), trained(noise))


def test_the_players_take_turns(program: Path, tmp_path: Path):
    call(f"{program}/train.py {SMALL} --max_steps 3 --checkpoint_interval 1 --logger_name csv", tmp_path)
    first, second, third = (last(tmp_path, nth) for nth in (3, 2, 1))
    assert equal(first["discriminator"], second["discriminator"]) and not equal(first["model"], second["model"])
    assert equal(second["model"], third["model"]) and not equal(second["discriminator"], third["discriminator"])


def test_killed_and_resumed_is_the_same_run(program: Path, tmp_path: Path):
    command = f"{program}/{LONG.replace('--logger_name csv', '')} --epochs 8"
    whole, killed = killed_and_resumed(command, tmp_path, resume=run)
    assert equal(last(killed)["discriminator"], last(whole)["discriminator"])
    assert pictures(killed) == pictures(whole) != {}


def test_on_two_processes_it_is_the_same_game(program: Path, tmp_path: Path):
    command = f"{program}/train.py {SMALL} --max_steps 8 --micro_batch_size 16 --logger_name csv"
    one, two = (last(cwd) for cwd in on_one_and_two(command, tmp_path))
    for player in ("model", "discriminator"):
        torch.testing.assert_close(one[player], two[player], atol=1e-4, rtol=0)
