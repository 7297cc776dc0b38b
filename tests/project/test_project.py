"""Tests of this project, whatever its model, data, loss, loop, options and defaults are: none of them knows a loss, a
count or an option that you may change. They start the real programs in small runs on the CPU, which takes less than two
minutes with the template's own model. The last lines say what was shown.

python -m pytest tests/project
PLACE="cuda bf16-mixed" python -m pytest tests/project    # on the GPU, in another precision

What your project needs, such as a data_dir, goes into settings.py beside this file. programs.py starts the runs,
recorded.py notes in them what no file of a run has, and zygote.py makes them start sooner.
"""

import itertools
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import settings
import torch
from programs import PLACE, Run, environment, fail, run, shown, small

import config
from runtime import cli, config_file
from runtime.options import values_of


def differing(found: dict, expected: dict) -> list:
    """The keys whose values differ."""
    names = {**expected, **found}  # in this order
    return [name for name in names if found.get(name) != expected.get(name)]


def assert_same(found: dict, expected: dict, advice: str) -> None:
    """Fails with the first values that differ, and with what to look for."""
    assert expected != {}
    names = differing(found, expected)
    if names:
        lines = [f"{name}: {found.get(name, 'missing')} instead of {expected.get(name, 'none')}" for name in names[:5]]
        fail("\n".join([f"{len(names)} of {len(expected)} differ, first:", *lines, advice]))


# ---- training


def test_fast_run_tries_a_whole_run_with_a_resume_and_leaves_nothing(tmp_path: Path):
    printed = run(f"train.py {small()} --fast_run", tmp_path)
    assert config.TrainConfig().monitor in printed  # so it has validated
    assert "after 2 of 2 steps" in printed and "after 4 of 4 steps" in printed
    assert list(tmp_path.iterdir()) == []


def test_each_validation_has_the_same_samples_and_new_metrics(whole: Run):
    first: dict = {}
    for validation, (dataset, number), batch in whole.facts("validated"):
        if batch != first.setdefault((dataset, number), batch):
            fail(
                f"Batch {number} of validation {validation} has other values than in the validation before: something "
                "changes the memory of the data in place, as `images.mul_(2)` does, or the loader draws others."
            )
    (_, new), *later = whole.facts("metrics") or [(0, {})]
    for validation, found in later:
        if names := differing(found, new):
            fail(
                f"Validation {validation} begins with what the one before has left in {', '.join(names[:5])}: "
                "`metrics.reset()` is not called, or resets the states of `add_state` alone."
            )


def test_a_run_that_was_killed_and_resumed_has_the_same_inputs(alone: Run, resumed: Run, killed_in: str):
    found = resumed.inputs()
    if not found:
        fail("train.py did not call compute_loss with the micro-batches of `train_loader.micro_batches`")
    expected = alone.inputs()
    names = list(expected)
    first = next((number for number, name in enumerate(names) if name in found), 0)
    later = {name: expected[name] for name in names[first:]}
    assert_same(
        found,
        later,
        "The batches or further arguments of compute_loss are others after a resume. Look for a second loader that "
        "begins anew, a generator of your own, a cache, a sample that is changed in place (give a `clone()`), what is "
        "kept between steps and is not in `state`, a file that data workers share, an attribute of the dataset that "
        "the loop sets and data workers do not see, an order that depends on a set or a folder: sort it.",
    )
    shown(killed_in, "same inputs")
    if "None" in " ".join(expected.values()).split():
        shown("not compared", "an argument of compute_loss that is no tensor or plain value, such as an iterator")


def test_a_run_that_was_killed_and_resumed_has_the_same_history(alone: Run, resumed: Run, killed_in: str):
    expected, found = alone.history(), resumed.history()
    assert {int(key.split(",")[0].removeprefix("step ")) for key in expected} == set(range(1, 11))
    kinds = {name.partition(", ")[2].partition("/")[0] for name in differing(found, expected)}
    advice = "What is logged is not restored by a resume, or is random."
    if kinds <= {"val", "best"}:
        advice = "A validation depends on what a checkpoint does not have, or draws numbers that nobody has seeded."
    assert_same(found, expected, f"{advice}{what_changes(alone)}")
    shown(killed_in, "same history")


def test_a_run_that_was_killed_and_resumed_has_the_same_bits(
    whole: Run, killed: Run, alone: Run, resumed: Run, killed_in: str
):
    """In the weights and the checkpoints."""
    given, known = resumed.inputs(), alone.inputs()
    if any(value != known.get(number) for number, value in given.items()):
        begins = "compute_loss has other inputs after the resume: the test of the same inputs says where to look."
    elif module := first_that_differs(killed, whole):
        begins = (
            f"Two equal runs differ, first in {module}: an operation there gives other bits each time. The page of "
            "torch.use_deterministic_algorithms lists such operations; or it draws from a generator of its own."
        )
    elif module := first_that_differs(resumed, alone):
        begins = f"Two equal runs do not differ. The resumed run does, first in {module}."
    else:
        begins = "No module has other outputs or gradients in the first step of the resume: look at what is after it."
    assert_same(
        resumed.bits(),
        alone.bits(),
        f"{begins}\nA step depends on what a resume does not restore: a value that is not in `state` of train.py, or "
        f"random numbers that are not seeded for each step.{what_changes(alone)}",
    )
    shown(killed_in, "same bits")


def first_that_differs(run: Run, other: Run) -> str:
    """The first output or gradient that the other run has not, in a step of both; "" if there is none."""
    known = other.facts("module")
    steps = {step for step, *_ in known}
    found = [fact for fact in run.facts("module") if fact[0] in steps and fact not in known]
    return "step {}, {}".format(*found[0]) if found else ""


def what_changes(run: Run) -> str:
    """A sentence on what the modules of `state` have that no checkpoint has, if it changes in the run."""
    first: dict = {}
    changed = set()
    for rank, found in run.facts("extras"):
        values = {(name, rank): checksum for name, checksum in found.items()}
        changed |= {name for name, rank in values if values[name, rank] != first.get((name, rank), values[name, rank])}
        first |= values
    if not changed:
        return ""
    return (
        f"\nNo checkpoint has it, but it changes: {', '.join(sorted(changed)[:5])}. If a step depends on it, use "
        "`register_buffer`, and write into it."
    )


def test_a_run_that_was_killed_and_resumed_has_the_same_files(alone: Run, resumed: Run, killed_in: str):
    advice = "A file of your own is written from what a resume does not restore, or is written twice."
    assert_same(resumed.contents(), alone.contents(), advice)
    shown(killed_in, "same files")


# ---- what is trained, and by which numbers


def seeded_alike(run: Run, kind: str) -> str:
    """A sentence on a global generator that was where it had been after another micro-batch or fetch."""
    seen: dict = {}
    for after, number, states in run.facts(kind):
        for generator, state in states.items():
            other = seen.setdefault((generator, state), number)
            if other != number:
                return (
                    f"\nAfter {after}, the generator of {generator} is where it was after another one: something seeds "
                    "it each time alike, such as `torch.manual_seed(0)` in compute_loss, a module or the dataset. Draw "
                    "without: each micro-batch and each fetch has a seed of its own."
                )
    return ""


def test_random_numbers_are_others_in_each_micro_batch(whole: Run):
    if found := seeded_alike(whole, "generators"):
        fail(found.lstrip())


# What is wrong in all runs alike, by the word of recorded.py. Each is red, with the facts of the first time.
WRONG = {
    "validated set": 'A validation reads datasets[{!r}]: does its loader have datasets["val"]?',
    "independent loss": "The loss is the same, bit for bit, for other batches with the same weights: it does not "
    "depend on them.",
    "kept graph": "Graphs are kept from step to step, at last with {} nodes. Keep `value.detach()`, or compute it "
    "under `torch.no_grad()`. In a module: {}.",
    "untrained": "The loss depends on {}, which is in no module of `state`, so nothing trains, saves or restores it. "
    "Put modules into a ModuleList, not a list; or, if it is to stay as it is, call `requires_grad_(False)`.",
    "in no optimizer": "It has a gradient, but is in no optimizer of `state`, and does not change: {}. Give it to one, "
    "or call `requires_grad_(False)`.",
    "idle optimizer": "state[{!r}]: no parameter has changed in the run. Is `step()` called, and `zero_grad()` only "
    "before the backward passes?",
    "lost": "It had a gradient, but has not changed in the run: {}. Is it written back?",
    "outside": "{} steps, but is not in `state`, so a resume does not restore it: add it. If `state` has another one "
    "for the same parameters, step that.",
    "overridden": "The loop sets other learning rates than {}, which is without effect: docs/training.md shows how to "
    "use a scheduler of torch.",
    "after report": "After report() of step {}, these change: {}. A checkpoint of that step does not have it: change "
    "them before report().",
    "not clipped": "In step {} {} gets a gradient of the norm {:.3g}, above --max_grad_norm {}: clip it "
    "after the backward passes, before `step()`. If that is right, take max_grad_norm out of SMALL.",
    "loss input": "F.{} gets {}.",
    "mode": "compute_loss calls `train()` or `eval()` of the model: validate() and the loop do that.",
    "of no entry": "A {} is called in training mode, and is in no module of `state`: no validation calls its `eval()`, "
    "and no resume restores its buffers. Make it in `__init__`, or call `eval()` once.",
    "independent metrics": "The arguments of `metrics.update` are the same, bit for bit, whatever the weights of the "
    "model are: does compute_loss return its outputs?",
    "reversed": "The samples of {!r} are random with augment=False, and not in the run: is it reversed?",
    "shared": "state[{!r}] and state[{!r}] have the same parameters: is a `copy.deepcopy` missing?",
}
# What may be right: last lines.
BEWARE = {
    "training mode": "{} is in training mode {}",
    "partly shared": "state[{!r}] and state[{!r}] have parameters in common",
    "idle scheduler": "state[{!r}] has made no step",
    "rates": "an optimizer was built with the rates {}, and steps with rates in another ratio",
    "dtype": "{} is of {}, with --precision {}",
    "still": "state[{!r}] changes, but not its buffer {}, as that of another model does",
    "gradient": "the backward of {} is not the derivative of its forward (on purpose, as in a straight-through "
    "estimator?): along the gradient of {} the loss changes {:.2g} times as much as that says",
    "random without augmentation": "the samples of {!r} are random with augment=False, too",
}


@pytest.mark.parametrize("kind", WRONG)
def test_no_fact_shows_a_mistake(kind: str, whole: Run):
    for fact in whole.facts(kind):
        fail(WRONG[kind].format(*fact))


def test_what_may_be_a_mistake_is_said(whole: Run):
    for kind, text in BEWARE.items():
        for fact in whole.facts(kind):
            shown("beware", text.format(*fact))
    for (name,) in whole.facts("unchanged"):
        shown(f"{PLACE}: not changed by the run", name)
    for name in {name for name, *_ in whole.facts("order")}:
        epochs = [(found, share) for each, _, found, share in whole.facts("order") if each == name]
        if len(epochs) > 1 and len({found for found, _ in epochs}) == 1:
            shown("beware", f"the order of {name!r} is the same in every epoch")
        if min(share for _, share in epochs) < 1:
            shown("beware", f"an epoch draws {min(share for _, share in epochs):.0%} of the samples of {name!r}")
    if len({*whole.inputs().values()}) == 1:
        shown("beware", "the inputs of compute_loss are the same, bit for bit, in all steps")
    for name in whole.columns():
        if name.startswith("train/") and len({*whole.column(name)}) == 1:
            shown("beware", f"{name} is the same in all steps")
    code = whole.source()
    for name in values_of(config.TrainConfig()):
        if not re.search(rf"(?<!\bself)\.{name.rpartition('.')[2]}\b", code):
            shown("beware", f"no code reads --{name}")


def test_no_file_is_written_by_two_processes(two: Run):
    by_0, by_1 = ({path for rank, path in two.facts("write") if rank == each} for each in (0, 1))
    if names := sorted(path for path in by_0 & by_1 if not path.endswith("lock")):
        fail(f"Both processes write {', '.join(names)}: write on rank 0, `if fabric.is_global_zero`.")


def test_ranks_have_the_same_state(two: Run):
    """All of it is restored from what rank 0 has saved."""
    ranks: list[dict] = [{}, {}]
    for step, rank, values in two.facts("state"):
        ranks[rank] |= {f"{name} after step {step}, on rank 1": value for name, value in values.items()}
    advice = (
        "A checkpoint has what rank 0 has. Average it over the ranks, or make it on each from what all have; draw its "
        "random numbers at the top of a step, or before the first validation: after one they are others on each rank."
    )
    assert_same(ranks[1], ranks[0], advice)


def test_no_sample_of_a_validation_or_test_is_in_another_set(whole: Run):
    """By the checksums of the samples without augmentation. Two sets to train on may have some in common."""
    sets = {name: (size, found) for name, size, found in whole.facts("samples")}
    for name, (_, found) in sets.items():
        if found is None:
            shown("not compared with other sets", f"the samples of {name!r}")
    known = [(size, name, set(found), len(found)) for name, (size, found) in sets.items() if found]
    shares = {}
    for (_, small_set, ours, _), (size, large_set, theirs, checked) in itertools.combinations(sorted(known), 2):
        if not {small_set, large_set} & {"val", "test"}:
            continue
        share = len(ours & theirs) / len(ours) * size / checked
        shares[f"{share:.2%} of the samples of {small_set!r} are in {large_set!r}, too"] = share
    if many := [line for line, share in shares.items() if share > settings.SHARED_SAMPLES]:
        fail(f"{'; '.join(many)}. If that is right, give SHARED_SAMPLES a larger value.")
    for line in (line for line, share in shares.items() if share):
        shown("beware", line)


# ---- two processes


def test_two_processes_get_the_inputs_of_one(whole: Run, two: Run):
    """One process computes the two micro-batches of a step in turn, two compute them at once."""
    advice = (
        "The processes disagree on the order of the samples, or draw other random numbers than one process; or an "
        "argument of compute_loss holds what other micro-batches have left in it."
    )
    assert_same(two.inputs(), whole.inputs(), advice)
    shown(f"{PLACE}: 2 processes", "same inputs")


def test_two_processes_write_the_lines_of_one(whole: Run, two: Run):
    """In files of your own."""
    expected, found = whole.contents(), two.contents()
    both = [name for name in expected if name in found and " lines, " in expected[name]]  # others are of one process
    if both:
        assert_same(
            {name: found[name].partition(",")[0] for name in both},
            {name: expected[name].partition(",")[0] for name in both},
            "Each process runs this code: write on rank 0, `if fabric.is_global_zero`, what is of all processes.",
        )


def rounding() -> float:
    """How much coarser the numbers of a precision are than those of float32."""
    bits_of = settings.SMALL["precision"].partition("-")[0]
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(bits_of, torch.float32)
    return torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def farthest(found: list[float], expected: list[float]) -> float:
    """The largest difference of two lists; infinite where a value is missing, or NaN, in one of them alone."""
    one, other = (torch.tensor(values, dtype=torch.float64) for values in (expected, found))
    if len(one) != len(other) or not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    return max((other - one).nan_to_num().abs().tolist(), default=0.0)


def assert_close(found: list[float], expected: list[float], tolerance: float, name: str, advice: str) -> float:
    """Fails if two lists differ by more than a tolerance, relative to the largest value, and by more than the rounding
    of a score that is 1 minus a ratio. Returns the relative difference."""
    distance = farthest(found, expected)
    scale = max([abs(value) for value in expected if value == value], default=0.0)
    if distance == math.inf:
        fail(f"{name} is {found} instead of {expected}: missing, NaN or infinite in one of the two alone.\n{advice}")
    if any(value != value for value in expected):
        shown("beware", f"NaN in {name}")
    if distance > tolerance * max(scale, 0.5):
        pairs = enumerate(zip(found, expected, strict=True), 1)
        number, (value, other) = next(each for each in pairs if abs(each[1][0] - each[1][1]) == distance)
        values = f"{value:.8g} instead of {other:.8g}"
        fail(f"{name} differs by up to {distance / (scale or 1):.1g}, at most: {values} (value {number}).\n{advice}")
    return distance / max(scale, 0.5)


def test_two_processes_train_like_one(whole: Run, two: Run):
    """In all that training logs. The norm of the gradient shows a wrong scale, which Adam hides from the losses."""
    differences = [
        assert_close(
            two.column(name),
            whole.column(name),
            settings.TRAIN_TOLERANCE * rounding(),
            f"{name} of two processes",
            "The processes draw other random numbers than one process, or the gradient is not the mean of all "
            "micro-batches and processes: not averaged, or scaled by their number, or compute_loss itself reduces over "
            "the ranks, which DDP does. If it is rounding, which grows from "
            f"step to step, give TRAIN_TOLERANCE a larger value.{causes(whole)}",
        )
        for name in sorted(whole.columns())
        if name.startswith("train/")
    ]
    shown(f"{PLACE}: 2 processes", f"train/ within {max(differences):.0e}")


def test_two_processes_validate_like_one(whole: Run, two: Run, tmp_path: Path):
    """What another seed changes may be as far from one process as the results of another seed: two processes have
    other batches than one, so other random numbers."""
    names = {name for name in whole.columns() if name.startswith("val/")}
    tolerance = settings.VAL_TOLERANCE * rounding()
    seeds = [Run.train(tmp_path / "1", small(), shift=1)]

    def spread(name: str) -> float:
        """How far the results of other seeds are from those of this one, beyond rounding."""
        expected = whole.column(name)
        distance = max(farthest(seed.column(name), expected) for seed in seeds)
        return distance if distance > 1e-6 * max(map(abs, expected)) else 0.0

    is_random = any(spread(name) for name in names)
    distance = {name: farthest(two.column(name), whole.column(name)) for name in names}
    far = [name for name in names if distance[name] > max(tolerance, settings.RANDOM_TOLERANCE * spread(name))]
    if is_random and far:  # one seed may be near by chance, and an accuracy may be equal
        seeds += [Run.train(tmp_path / str(each), small(), shift=each) for each in (2, 3, 4)]
    advice = (
        "Where training differs, too, begin there. It is of the samples of one process alone, or is no mean of all "
        "samples: is the count that compute_loss "
        "returns that of the samples, or, with class weights or ignored labels, the sum of their weights "
        "(docs/training.md)? Or it depends on how they are cut into batches; or something, such as an average of the "
        "weights, is kept on rank 0 alone."
    )
    why = causes(whole, CAUSES)
    monitor = config_file.read_config(config.TrainConfig, whole.folder).monitor
    of_monitor = " It is the `--monitor`: the best checkpoint depends on the number of processes."
    for name in sorted(names - settings.BY_BATCH):
        if spread(name):
            ratio = distance[name] / spread(name)
            if ratio > settings.RANDOM_TOLERANCE:
                fail(
                    f"{name} of two processes differs {ratio:.0f} times as much as with four other seeds.\n{advice}"
                    f"{why or ' If it is meant to, put it into BY_BATCH.'}"
                )
            shown(f"{PLACE}: 2 processes, random validation", f"{name} as far as {ratio:.1g} times another seed")
            shown("beware", f"{name} depends on random numbers, as with dropout in a validation")
            continue
        difference = assert_close(
            two.column(name),
            whole.column(name),
            tolerance * (1 if name.replace("val/", "train/") in whole.columns() else settings.SCORE),
            f"{name} of two processes",
            f"{advice} If it is rounding, give VAL_TOLERANCE a larger value.{of_monitor * (name == monitor)}{why}"
            f"{seeded_alike(whole, 'generators of a validation')}",
        )
        shown(f"{PLACE}: 2 processes", f"{name} within {difference:.0e}")


# What may be the cause of a difference, by the word of recorded.py, with the names that it has noted.
CAUSES = {
    "changed": "Each forward pass changes {}, so it depends on the number of micro-batches and processes: change it "
    "once per step, by the sum over micro-batches and ranks.",
    "norm": "BatchNorm has the statistics of the first process: give VAL_TOLERANCE a larger value, or convert it as "
    "docs/training.md does.",
    "changed in validation": "A validation changes {}: change it in training alone, `if self.training`.",
    "norm in validation": "A validation changes the statistics of BatchNorm, which is in training mode there.",
    "random samples": "The samples of {} are random: are they augmented?",
}


def causes(run: Run, kinds=("changed", "changed in validation", "norm in validation")) -> str:
    text = ""
    for kind in kinds:
        if names := sorted({name for found in run.facts(kind) for name in found}):
            text += f"\n{CAUSES[kind].format(', '.join(names[:5]))}"
    return text


def has_no_samples(run: Run, name: str) -> bool:
    if [name, 0, []] not in run.facts("samples"):
        return False
    shown("not tried", f"test.py, where {name!r} has no samples")
    return True


def test_the_finished_run_is_evaluated(whole: Run):
    if has_no_samples(whole, "test"):
        return
    run(f"test.py {small(config.EvalConfig, out_dir=whole.folder.name)}", whole.folder.parent)
    (path,) = whole.folder.glob("test_*.json")
    found = json.loads(path.read_text())["num_samples"]
    (size,) = [size for name, size, _ in whole.facts("samples") if name == "test"]
    if found != size:
        shown("beware", f"test.py evaluates {found} samples, 'test' has {size}")


def test_what_was_validated_is_what_is_evaluated(whole: Run, tmp_path: Path):
    if has_no_samples(whole, "val"):
        return
    run(
        f"train.py {small(max_steps='2', warmup_epochs='0', val_interval='2', limit_val_batches='1.0')}",
        tmp_path,
    )
    validated = Run(tmp_path)
    options = small(config.EvalConfig, out_dir=validated.folder.name)
    run(f"test.py {options} --split val --checkpoint last", tmp_path)
    (path,) = validated.folder.glob("test_val_*.json")
    results = json.loads(path.read_text())["results"]
    common = [name for name in results if f"val/{name}" in validated.columns()]
    assert common != []
    for name in common:
        assert_close(
            [math.nan if results[name] is None else results[name]],  # which JSON does not have
            validated.column(f"val/{name}"),
            1e-5,
            f"{name} of test.py",
            'state["model"] of train.py is not the model that is validated, or a validation depends on what a '
            f"checkpoint does not have.{causes(whole)}",
        )
    shown(f"{PLACE}: test.py", "what was validated is what is evaluated")


# ---- options


def test_a_run_has_the_options_that_were_given(whole: Run, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)  # as in the run
    given = cli.parse_train(config.TrainConfig, small().split())
    written = config_file.read_config(config.TrainConfig, whole.folder)
    assert written == replace(given, num_threads=written.num_threads)  # torch may choose it
