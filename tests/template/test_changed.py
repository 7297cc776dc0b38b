"""The code, the data or the options were changed while a run was down: what still fits goes on, and is reported;
anything else is refused by name. The data of several processes must be the same."""

import os
import re
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edits import REPO, insert_after, insert_before, replace, with_edits
from helpers import (
    ON_2,
    SMALL,
    assert_same_run,
    call,
    checkpoint,
    copied,
    execute,
    last_summary,
    run,
    run_dir,
    weights,
    without_locks,
)
from mistakes import assert_one_line, refuses
from test_state import ADAMW, CRITIC
from torch import nn
from torch.utils.data import TensorDataset

from config import TrainConfig
from runtime.loader import checksum, fingerprint

RUN = f"train.py {SMALL} --lr_schedule constant --logger_name csv --max_steps 6 --micro_batch_size 32"
RESUME = "train.py --resume auto --max_steps"
FAST_RUN = f"train.py {SMALL} --fast_run"
AT = "checkpoints/step-00000006.ckpt; changed since: "


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """Where a run has made six steps, one and a half epochs. To be copied."""
    cwd = tmp_path_factory.mktemp("begun")
    call(RUN, cwd)
    return cwd


@pytest.fixture
def stopped(begun, tmp_path) -> Path:
    return copied(begun, tmp_path)


# ---- refused


def row(name: str, now: dict, *words: str, then: dict | None = None, options: str = "") -> Any:
    return pytest.param(then, now, options, words, id=name)


def other(name: str, optimizer: str, *words: str, **more: Any) -> Any:
    return row(name, {"replace optimizer": optimizer}, AT, *words, **more)


MADE = "after set-up is done"
SCHEDULER = {
    MADE: "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.total_steps)",
    "before state": '"scheduler": scheduler,',
}
OTHER_ORDER = CRITIC | {MADE: CRITIC[MADE].replace("critic.parameters()", "[*critic.parameters()][::-1]")}
SECOND = {"before state": '"second": nn.Linear(2, 2),'}
OTHER_GROUPS = "other parameter groups than in the checkpoint; other parameters: "
REFUSED = [
    row("option of the optimizer", {}, "weight_decay 0.5", "0.01", options="--weight_decay 0.5"),
    other("setting of the optimizer", ADAMW.replace("fused", "betas=(0.8, 0.9), fused").format("model.parameters()"),
          "betas (0.8, 0.9)", "(0.9, 0.999)", options=ON_2),
    row("scheduler_with_other_settings_is_refused", SCHEDULER, "'scheduler'", "T_max 9", "had 6", then=SCHEDULER),
    row("another_size_of_a_dataset", {"before statistics": "train = train[:700]"},
        "train has 700 samples, but had 1217", AT + "data.py"),
    row("another_size_of_a_dataset for validation", {"before statistics": "val = order[1080:]"},
        "val has 717 samples, but had 200", AT + "data.py"),
    row("shapes_that_do_not_fit_are_named", {"replace first layer": "nn.Conv2d(channels, width, 5, padding=2),\n"},
        "size mismatch for layers.0.weight", AT + "model.py"),
    other("untrained_parameters_that_do_not_fit_are_named", ADAMW.format("[*model.parameters()][1:]"),
          f"{OTHER_GROUPS}model.layers.0.weight (4, 1, 3, 3)"),
    other("groups_that_do_not_fit_are_named",
          ADAMW.format("[{'params': [*model.parameters()][:3]}, {'params': [*model.parameters()][3:]}]"),
          f"{OTHER_GROUPS}none"),
    other("classes_that_do_not_fit_are_named", "torch.optim.SGD(model.parameters(), momentum=0.9)",
          "class SGD", "AdamW in the checkpoint"),
    row("order of an optimizer with a state_dict of its own", OTHER_ORDER, "a state_dict of its own", "another order",
        then=CRITIC),
    row("an entry that only_one_has", SECOND, ": second: ", "but not in both"),
    row("an entry that only_one_has, the checkpoint", {}, ": second: ", "but not in both", then=SECOND),
    row("another name of what is monitored",  # before anything is trained
        {"replace metrics": '{"top1": accuracy}', "before optimizer steps": "raise ValueError"},
        "--monitor val/accuracy", "val/loss, val/top1"),
]  # fmt: skip


@pytest.mark.parametrize("then, now, options, words", REFUSED)
def test_a_resume_that_does_not_fit_is_refused_and_changes_nothing(then, now, options, words, begun, program, tmp_path):
    """Columns: the edits of the program that begins the run, if there are any, those of the program that resumes it,
    the options of the resume, and what helps."""
    cwd = tmp_path / "copy"
    if then:
        cwd.mkdir()
        call(f"{with_edits(tmp_path / 'then', then)}/{RUN}", cwd)
    else:
        copied(begun, tmp_path)
    refuses(f"{with_edits(program, now)}/{RESUME} 9 {options}", cwd, *words, how=execute)


def test_a_fork_is_named_where_its_tool_is(stopped, program):
    command = f"{RESUME} 9 --weight_decay 0.5"
    refuses(command, stopped, "weight_decay 0.5", "tools/fork.py")
    assert "tools/fork.py" not in call(f"{with_edits(program, {})}/{command}", stopped, code=2).stderr


@pytest.mark.parametrize("option, value", [("seed", "7"), ("monitor", "val/f1"), ("dropout", "0.1")])
def test_an_option_that_cannot_change_is_not_changed_in_config_yaml_either(option: str, value: str, stopped):
    """The checkpoint knows what it was trained with."""
    path = run_dir(stopped) / "config.yaml"
    path.write_text(re.sub(rf"^{option}: .*", f"{option}: {value}", path.read_text(), flags=re.MULTILINE))
    old = getattr(TrainConfig(), option)
    refuses(f"{RESUME} 9", stopped, f"--{option} is {value}, but was {old} in ", "checkpoints/step-00000006.ckpt")


def test_a_checkpoint_of_another_version_is_refused_with_the_code_that_goes_on(program, cwd):
    """The run has a copy of the code that it was begun with. test.py evaluates it: what a resume needs beside the
    weights may have changed."""
    call(f"{replace(program, 'format', 'FORMAT = 3')}/{RUN}", cwd)
    path = f"{run_dir(cwd).name}/checkpoints/step-00000006.ckpt"
    before = without_locks(cwd)
    done = call(f"{RESUME} 9", cwd, code=2)
    assert_one_line(done, f"{path} is of another version of the template")
    assert without_locks(cwd) == before
    assert "accuracy" in call("test.py --accelerator cpu --checkpoint last", cwd).stdout
    (code,) = re.findall(r"go on with the code in (\S+)\n", done.stderr)
    printed = call(f"{cwd}/{code}/{RESUME} 9", cwd).stdout
    assert f"resumed from {path}\n" in printed and "finished after 9 of 9 steps" in printed


# ---- what fits


@pytest.mark.parametrize("value", ["torch.ones(2)", "torch.ones(3, dtype=torch.int64)", "[1.0, 1.0, 1.0]", ""])
def test_a_tensor_that_is_new_or_of_another_shape_or_type(value: str, tmp_path: Path, cwd: Path):
    """A new one is named; another one is what the checkpoint has."""
    shown = 'print("counts", state["counts"])'
    begins = with_edits(tmp_path / "begins", {"before state": f'"counts": {value},'} if value else {})
    now = with_edits(tmp_path / "now", {"before state": '"counts": torch.zeros(3),', "before loop begins": shown})
    call(f"{begins}/{RUN}", cwd)
    printed = call(f"{now}/{RESUME} 9", cwd).stdout
    assert f"\ncounts {eval(value or 'torch.zeros(3)')}\n" in printed
    new = re.findall(r"^state\['(\w+)'\] is not in the checkpoint, and new", printed, re.MULTILINE)
    assert new == ([] if value else ["counts"])


def test_another_limit_of_a_validation_is_no_other_validation_set(stopped, tmp_path):
    """The best value is then of other samples, which the user has asked for. The training is the same."""
    done = call(f"{RESUME} 9 --limit_val_batches 3", stopped)
    assert "--limit_val_batches 3 instead of 2\n" in done.stdout and " 192 validation samples\n" in done.stdout
    call(f"{RUN} --max_steps 9 --out_dir whole", tmp_path)
    torch.testing.assert_close(weights(stopped), weights(tmp_path, "whole"), atol=0, rtol=0)


def test_a_resume_without_further_checkpoints_still_keeps_the_best(stopped):
    call(f"{RESUME} 16 --checkpoint_frequency 0", stopped)
    assert checkpoint(stopped, "best")["step"] == last_summary(stopped)["best_step"] > 6


def test_what_an_optimizer_keeps_in_a_group_stays_beside_a_setting_that_is_new(tmp_path: Path, cwd: Path):
    """As Prodigy its `d`, which is there from the beginning, or what comes with the first step."""
    groups = "[{'params': model.parameters(), 'd': 9}]"
    keeps = {"after optimizer steps": 'for group in optimizer.param_groups:\n    group["d"] = group["later"] = step'}
    shows = {"before loop begins": 'group = optimizer.param_groups[0]\nprint(*map(group.get, ("d", "later", "new")))'}
    first = with_edits(tmp_path / "first", {"replace optimizer": ADAMW.format(groups)} | keeps)
    groups = groups.replace("9", "9, 'new': True")
    then = with_edits(tmp_path / "then", {"replace optimizer": ADAMW.format(groups)} | shows)
    call(f"{first}/{RUN}", cwd)
    assert "\n6 6 True\n" in call(f"{then}/{RESUME} 9", cwd).stdout


# ---- the samples


def told(printed: str) -> list[str]:
    """The names of the sets that have changed."""
    return re.findall(r"^the (\w+) samples have changed: their content, labels or ", printed, re.MULTILINE)


def without(printed: str) -> list[str]:
    """The names of the sets of which that cannot be told."""
    return re.findall(r"^the (\w+) samples have no fingerprint", printed, re.MULTILINE)


def resumed(program: Path, cwd: Path, steps: int, options: str = "") -> list[str]:
    printed = execute(f"{program}/{RESUME} {steps} {options}", cwd).stdout
    assert f"finished after {steps} of {steps} steps" in printed and without(printed) == []
    return told(printed)


def test_resumes_with_the_same_data_say_nothing(tmp_path, cwd):
    """Within an epoch and between two, with data workers, in other micro-batches, on other numbers of devices, with a
    loss that changes its batch in place."""
    program = insert_after(tmp_path / "program", "batch", "images.add_(torch.randn_like(images))")
    call(f"{program}/{RUN}", cwd)
    one = "--devices 1 --strategy auto"
    for steps, options in enumerate(("--num_workers 2", "--micro_batch_size 16 --num_workers 0", ON_2, one), start=7):
        assert resumed(program, cwd, steps, options) == []
    assert told(call(f"{program}/{FAST_RUN}", tmp_path).stdout) == []


def test_what_is_trained_is_the_same_without_a_fingerprint(begun, program, cwd):
    """To fetch the samples draws random numbers."""
    replace(program, "num_classes", "self.num_classes, self.fingerprint = num_classes, None")
    assert without(call(f"{program}/{RUN}", cwd).stdout) == ["train", "val"]
    assert_same_run(cwd, begun)


OTHER_IMAGES = "ImageDataset(images[{}] + 1"
WORKERS = "--num_workers 2 --micro_batch_size 16"


@pytest.mark.parametrize(
    "point, code, names, options",
    [
        pytest.param("target tensor", "9 - torch.tensor(targets,", ["train", "val"], WORKERS, id="labels"),
        pytest.param("permutation", "np.random.default_rng(1)", ["train", "val"], "", id="split"),
        pytest.param("shift", "shift=2 if augment else 0", ["train"], ON_2, id="augmentation"),
        pytest.param("training images", OTHER_IMAGES.format("train"), ["train"], "", id="training images"),
        pytest.param("validation images", OTHER_IMAGES.format("val"), ["val"], WORKERS, id="validation images"),
    ],
)
def test_changed_data_are_told_by_the_name_of_the_set(point, code, names, options, stopped, program):
    """Once: the next resume goes on with these."""
    replace(program, point, code)
    assert resumed(program, stopped, 8, options) == names
    assert told((run_dir(stopped) / "train.log").read_text()) == names
    assert resumed(program, stopped, 9) == []


def test_a_set_that_is_new_is_not_compared(stopped, tmp_path):
    point = ("data.py", "build_datasets", '"test": ...')
    for steps, more, names in ((8, "images", []), (9, "images + 1", ["more"])):
        program = insert_before(tmp_path / f"program{steps}", point, f'"more": {more},')
        assert resumed(program, stopped, steps) == names
    assert resumed(REPO, stopped, 10) == []


# ---- processes that differ

UNSEEDED = {"replace permutation": "np.random.default_rng()"}
SHARD = 'rank = int(__import__("os").environ.get("LOCAL_RANK", 0))\ntrain = train[:1216].reshape(2, -1)[rank]'
RANDOM = {"replace validation images": "ImageDataset(np.random.default_rng().random() + images[val]"}


def assert_differ(error: str, found: str, program: str = "train.py") -> None:
    """Each rank says so in one line, with the rank that differs and its host."""
    line = rf"{program}: error: rank [01]: {found}: .+ on rank 1 \({re.escape(os.uname().nodename)}\), .+ on rank 0; .*"
    assert 1 <= len(error.splitlines()) <= 2 and all(re.fullmatch(line, each) for each in error.splitlines()), error


@pytest.mark.parametrize(
    "edits, name, command",
    [(UNSEEDED, "train", RUN), ({"before statistics": SHARD}, "train", FAST_RUN), (RANDOM, "val", RUN),
     ({"before statistics": SHARD.replace("[:1216].reshape(2, -1)[rank]", "[rank::2]")}, "train", RUN)],
    ids=["split", "shard", "validation", "uneven shard"],
)  # fmt: skip
def test_data_that_differ_between_the_ranks_are_refused(edits: dict, name: str, command: str, program, cwd):
    """Before anything is written."""
    error = run(f"{with_edits(program, edits)}/{command} {ON_2}", cwd, code=2).stderr
    assert_differ(error, f"number and checksum of {name} samples")
    assert not [*cwd.iterdir()]


def test_data_that_differ_are_told_by_an_evaluation_and_in_one_process_by_a_rehearsal(stopped, program):
    error = run(f"{with_edits(program, UNSEEDED)}/test.py --out_dir train_out {ON_2}", stopped, code=2).stderr
    assert_differ(error, "checksum of samples", "test.py")
    assert not [*stopped.glob("*/test_*")]
    assert told(call(f"{program}/{FAST_RUN}", stopped).stdout) == ["train", "val"]


# ---- fingerprints


def test_a_set_without_a_fingerprint_is_named_and_an_empty_one_is_not(program, cwd):
    """The samples of the former have an object that has no checksum."""
    with_edits(
        program,
        {
            "replace batch": "    images, targets, _ = batch\n",
            "replace image shape": "image = dataset.images[0]",
            "replace validation images": "ImageDataset(images[val][:0]",
        },
    )
    replace(program, ("data.py", "build_datasets", "targets[val]"), "targets[val][:0]")
    replace(program, ("data.py", "collate_fn", "return batch"), "        return *batch, object()\n")
    for command in (f"{RUN} --monitor train/loss --monitor_mode min", f"{RESUME} 8"):
        printed = call(f"{program}/{command}", cwd).stdout
        assert ", 0 validation samples" in printed and without(printed) == ["train"] and told(printed) == []


class Opens(TensorDataset):
    """Opens a file when it is used. A data worker opens its own."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or open(os.devnull)  # noqa: SIM115
        return super().__getitem__(index)


def test_which_sets_have_a_fingerprint():
    """It is of samples from the first to the last one, and opens nothing in the dataset."""
    numbers = torch.arange(1000)
    dataset = Opens(numbers)
    before = fingerprint(dataset)
    assert None not in (before, fingerprint(TensorDataset(numbers[:1]))) and dataset.file is None
    for index in (0, 1, 999):
        changed = numbers.clone()
        changed[index] = -1
        assert (fingerprint(TensorDataset(changed)) == before) == (index == 1)
    for name, value in (("fingerprint", None), ("order", lambda epoch, generator: [1])):
        odd = TensorDataset(numbers)
        setattr(odd, name, value)
        assert fingerprint(odd) is None
    assert fingerprint(object()) is None


ARRAY = np.arange(12.0).reshape(3, 4)
PART = torch.zeros(2**28, dtype=torch.uint8)[:1000]  # it takes no more memory than the part
CHANGED = torch.zeros(1000, dtype=torch.uint8).index_fill(0, torch.tensor(999), 1)
SAME = [
    ({0, 8}, {8, 0}), (frozenset("ab"), {"b", "a"}), ({"x": 1, "y": [{"a"}]}, UserDict(y=[{"a"}], x=1)),
    (PART, PART.clone()), (ARRAY.T, ARRAY.T.copy()), (torch.tensor(ARRAY).T, torch.tensor(ARRAY.T.copy())),
    (torch.ones(2), nn.Parameter(torch.ones(2))), ((1, "a"), [1, "a"]),
]  # fmt: skip
OTHERS = [
    ([1, 2], [2, 1]), ({1, 2}, {1, 3}), ({"a": 1}, {"a": 2}), (1, True), (1, "1"), ("1", b"1"), (None, "a"),
    (-0.0, 0.0), (3 + 4j, 3.0), (1e300, 1.0), (PART, CHANGED), ({"images": PART}, {"images": CHANGED}),
    (torch.ones(2), torch.ones(2, 1)), (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
    (np.ones(2), np.ones(2, dtype=np.float32)), (np.ones(2), np.ones((2, 1))), (np.float32(2), np.float32(3)),
    (np.array(["a"]), np.array(["b"])), (torch.ones(0, 3), torch.ones(3, 0)), (torch.tensor(True), torch.tensor(1)),
]  # fmt: skip


def test_a_checksum_is_of_the_values_alone():
    """In whatever order a set or a dict has them, which differs between processes."""
    assert [one for one, other in SAME if checksum([one]) != checksum([other])] == []
    assert [one for one, other in OTHERS if checksum([one]) == checksum([other])] == []
    for value in (object(), (number for number in (1, 2)), {"x": [Path()]}, np.array([object()])):
        with pytest.raises(TypeError, match="has no checksum"):
            checksum(value)
