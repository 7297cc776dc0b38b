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
from commands import ON_2, SMALL, call, execute, run
from comparisons import assert_same_run
from edits import REPO, insert_after, insert_before, replace, with_edits
from fixtures import where_trained
from mistakes import refuses
from outputs import checkpoint, copied, last_summary, run_dir, weights
from test_state import ADAMW, CRITIC
from torch import nn
from torch.utils.data import TensorDataset

from runtime.loader import checksum, fingerprint

RUN = f"train.py {SMALL} --lr_schedule constant --logger_name csv --max_steps 6 --micro_batch_size 32"
RESUME = "train.py --resume auto --max_steps"
FAST_RUN = f"train.py {SMALL} --fast_run"
AT = "checkpoints/step-00000006.ckpt; changed since: "
begun = where_trained(RUN)  # six steps, one and a half epochs; to be copied


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
    other("setting of the optimizer", ADAMW.replace("fused", "betas=(0.8, 0.9), fused").format("model.parameters()"),
          "betas (0.8, 0.9)", "(0.9, 0.999)", options=ON_2),
    row("scheduler_with_other_settings_is_refused", SCHEDULER, "'scheduler'", "T_max 9", "had 6", then=SCHEDULER),
    row("another_size_of_a_dataset", {"before statistics": "train = train[:700]"},
        "train has 700 samples, but had 1217", AT + "data.py"),
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
    refuses(command, stopped, "weight_decay 0.5", "0.01", "tools/fork.py")
    assert "tools/fork.py" not in call(f"{with_edits(program, {})}/{command}", stopped, code=2).stderr


def test_an_option_that_cannot_change_is_not_changed_in_config_yaml_either(stopped):
    """The checkpoint knows what it was trained with."""
    path = run_dir(stopped) / "config.yaml"
    path.write_text(path.read_text().replace("\nseed: 42\n", "\nseed: 7\n"))
    refuses(f"{RESUME} 9", stopped, "--seed is 7, but was 42 in ", "checkpoints/step-00000006.ckpt")


def test_a_checkpoint_of_another_version_is_refused_with_the_code_that_goes_on(program, cwd):
    """The run has a copy of the code that it was begun with. test.py evaluates it: what a resume needs beside the
    weights may have changed."""
    call(f"{replace(program, 'format', 'FORMAT = 3')}/{RUN}", cwd)
    path = f"{run_dir(cwd).name}/checkpoints/step-00000006.ckpt"
    (code,) = run_dir(cwd).glob("provenance/code-*")
    words = (f"{path} is of another version of the template", f"go on with the code in {code.relative_to(cwd)}")
    refuses(f"{RESUME} 9", cwd, *words)
    assert "accuracy" in call("test.py --accelerator cpu --checkpoint last", cwd).stdout
    printed = call(f"{code}/{RESUME} 9", cwd).stdout
    assert f"resumed from {path}\n" in printed and "finished after 9 of 9 steps" in printed


# ---- what fits


def test_what_the_code_has_anew_or_in_another_way_goes_with_what_the_checkpoint_has(tmp_path: Path, cwd: Path):
    """A new tensor is named; one of another shape or type is what the checkpoint has. What an optimizer keeps in a
    group stays beside a setting that is new: as Prodigy its `d`, from the beginning, or what comes with a step."""
    names = ("shape", "type", "kind", "new")
    settings = "*map(optimizer.param_groups[0].get, ('d', 'later', 'setting'))"
    first = {
        "replace optimizer": ADAMW.format("[{'params': model.parameters(), 'd': 9}]"),
        "before state": '"shape": torch.ones(2), "type": torch.ones(3, dtype=torch.int64), "kind": [1.0],',
        "after optimizer steps": 'for group in optimizer.param_groups:\n    group["d"] = group["later"] = step',
    }
    second = {
        "replace optimizer": ADAMW.format("[{'params': model.parameters(), 'd': 9, 'setting': True}]"),
        "before state": "".join(f'"{name}": torch.zeros(3),' for name in names),
        "before loop begins": f"print([state[name] for name in {names}], {settings})",
    }
    call(f"{with_edits(tmp_path / 'first', first)}/{RUN}", cwd)
    printed = call(f"{with_edits(tmp_path / 'second', second)}/{RESUME} 9", cwd).stdout
    assert "\n[tensor([1., 1.]), tensor([1, 1, 1]), [1.0], tensor([0., 0., 0.])] 6 6 True\n" in printed
    assert re.findall(r"^state\['(\w+)'\] is not in the checkpoint, and new", printed, re.MULTILINE) == ["new"]


def test_another_limit_of_a_validation_is_no_other_validation_set(stopped, tmp_path):
    """The best value is then of other samples, which the user has asked for. The training is the same."""
    done = call(f"{RESUME} 9 --limit_val_batches 3", stopped)
    assert "--limit_val_batches 3 instead of 2\n" in done.stdout and " 192 validation samples\n" in done.stdout
    call(f"{RUN} --max_steps 9 --out_dir whole", tmp_path)
    torch.testing.assert_close(weights(stopped), weights(tmp_path, "whole"), atol=0, rtol=0)


def test_a_resume_without_further_checkpoints_still_keeps_the_best(stopped):
    call(f"{RESUME} 16 --checkpoint_frequency 0", stopped)
    assert checkpoint(stopped, "best")["step"] == last_summary(stopped)["best_step"] > 6


# ---- the samples

WITHOUT = "have no fingerprint"


def told(printed: str, what: str = "have changed: their content, labels or ") -> list[str]:
    """The names of the sets of which that is said."""
    return re.findall(rf"^the (\w+) samples {what}", printed, re.MULTILINE)


def resumed(program: Path, cwd: Path, steps: int, options: str = "") -> list[str]:
    printed = execute(f"{program}/{RESUME} {steps} {options}", cwd).stdout
    assert f"finished after {steps} of {steps} steps" in printed and told(printed, WITHOUT) == []
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
    assert told(call(f"{program}/{RUN}", cwd).stdout, WITHOUT) == ["train", "val"]
    assert_same_run(cwd, begun)


@pytest.mark.parametrize(
    "point, code, names, options",
    [
        ("target tensor", "9 - torch.tensor(targets,", ["train", "val"], "--num_workers 2 --micro_batch_size 16"),
        ("shift", "shift=2 if augment else 0", ["train"], ON_2),
        ("validation images", "ImageDataset(images[val] + 1", ["val"], ""),
    ],
    ids=["labels", "augmentation", "images"],
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

SHARD = 'train = train[:1216].reshape(2, -1)[int(__import__("os").environ.get("LOCAL_RANK", 0))]'
RANDOM = "ImageDataset(np.random.default_rng().random() + images[val]"
UNSEEDED = {"replace permutation": "np.random.default_rng()"}


@pytest.mark.parametrize(
    "command, edits, found",
    [(FAST_RUN, {"before statistics": SHARD}, "number and checksum of train samples"),
     (RUN, {"replace validation images": RANDOM}, "number and checksum of val samples"),
     ("test.py --out_dir train_out", UNSEEDED, "checksum of samples")],
    ids=["shard", "validation", "evaluation"],
)  # fmt: skip
def test_data_that_differ_between_the_ranks_are_refused(command: str, edits: dict, found: str, stopped, program):
    """Before anything is written. Each rank says so in one line, with the rank that differs and its host."""
    words = (f": {found}: ", f" on rank 1 ({os.uname().nodename}), ", " on rank 0; ")
    refuses(f"{with_edits(program, edits)}/{command} {ON_2}", stopped, *words, how=run)


def test_data_that_differ_from_one_start_to_the_next_are_told_by_a_rehearsal(program, cwd):
    assert told(call(f"{with_edits(program, UNSEEDED)}/{FAST_RUN}", cwd).stdout) == ["train", "val"]


# ---- fingerprints


class Opens(TensorDataset):
    """Opens a file when it is used. A data worker opens its own."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or open(os.devnull)  # noqa: SIM115
        return super().__getitem__(index)


def test_which_sets_have_a_fingerprint():
    """It is of samples from the first to the last one, also of none, and opens nothing in the dataset."""
    numbers = torch.arange(1000)
    dataset = Opens(numbers)
    before = fingerprint(dataset)
    assert None not in (before, *(fingerprint(TensorDataset(numbers[:few])) for few in (0, 1)))
    assert dataset.file is None
    for index in (0, 1, 999):
        changed = numbers.clone()
        changed[index] = -1
        assert (fingerprint(TensorDataset(changed)) == before) == (index == 1)
    for name, value in (("fingerprint", None), ("order", lambda epoch, generator: [1])):
        odd = TensorDataset(numbers)
        setattr(odd, name, value)
        assert fingerprint(odd) is None
    assert fingerprint(object()) is None and fingerprint([object()]) is None


ARRAY = np.arange(12.0).reshape(3, 4)
PART = torch.zeros(2**28, dtype=torch.uint8)[:1000]  # it takes no more memory than the part
SAME = [
    ({0, 8}, {8, 0}), (frozenset("ab"), {"b", "a"}), ({"x": 1, "y": [{"a"}]}, UserDict(y=[{"a"}], x=1)),
    (PART, PART.clone()), (ARRAY.T, ARRAY.T.copy()), (torch.tensor(ARRAY).T, torch.tensor(ARRAY.T.copy())),
    (torch.ones(2), nn.Parameter(torch.ones(2))),
]  # fmt: skip
OTHERS = [
    ([1, 2], [2, 1]), ({1, 2}, {1, 3}), ({"a": 1}, {"a": 2}), (1, True), (1, "1"), ("1", b"1"), (None, "a"),
    ({"images": torch.zeros(9)}, {"images": torch.zeros(9).index_fill(0, torch.tensor(8), 1)}), (3 + 4j, 3.0),
    (torch.ones(2), torch.ones(2, 1)), (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
    (np.ones(2), np.ones(2, dtype=np.float32)), (np.ones(2), np.ones((2, 1))), (np.float32(2), np.float32(3)),
    (torch.tensor(True), torch.tensor(1)),
]  # fmt: skip


def test_a_checksum_is_of_the_values_alone():
    """In whatever order a set or a dict has them, which differs between processes."""
    assert [one for one, other in SAME if checksum([one]) != checksum([other])] == []
    assert [one for one, other in OTHERS if checksum([one]) == checksum([other])] == []
    for value in ({"x": [Path()]}, np.array([object()])):
        with pytest.raises(TypeError, match="has no checksum"):
            checksum(value)
