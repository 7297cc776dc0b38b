"""What users bring: optimizers, models and metrics that are made in other ways than those of the template."""

import json
import os
import re
from pathlib import Path

import pytest
from edits import copy_programs, insert_after, insert_before, replace
from helpers import (
    LONG,
    ON_2,
    SMALL,
    assert_same_training,
    assert_told_by_ranks,
    call,
    checkpoint,
    ended_and_resumed,
    history,
    killed_and_resumed,
    on_one_and_two,
    refused,
    run,
    run_dir,
    weights,
)
from optimizers import HALVED

FEW = f"{SMALL} --lr_schedule constant --log_interval 1 --logger_name csv"
METRIC = '__import__("torchmetrics").Metric'


def file_sizes(cwd: Path) -> dict[str, int]:
    folder = run_dir(cwd)
    return {path.name: path.stat().st_size for path in (folder / "model.pt", *folder.glob("checkpoints/*.ckpt"))}


def report(cwd: Path) -> dict:
    """The results of test.py. JSON has no NaN and no infinity."""
    (path,) = run_dir(cwd).glob("test_*.json")
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["results"]


# ---- optimizers


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_an_optimizer_whose_state_is_a_tensor_subclass_is_resumed(devices: str, program: Path, tmp_path: Path):
    """With the same bits; and its run is evaluated."""
    (copy_programs(program) / "halved.py").write_text(HALVED)
    insert_before(program, "functions", "from halved import HalvedMomentum\n\n")
    replace(program, "optimizer", "HalvedMomentum(model.parameters(), plan.peak_lr)")
    _, killed = killed_and_resumed(f"{program}/{LONG} --epochs 30 {devices} --base_lr 0.05", tmp_path, resume=run)
    run(f"{program}/test.py --accelerator cpu", killed)
    assert report(killed)["accuracy"] > 0.8


# The layers after the first learn more slowly.
GROUPS = """[
    {"params": model.module.layers[0].parameters()},
    {"params": model.module.layers[1:].parameters(), "lr": RATE},
]"""


def test_a_learning_rate_in_a_tensor_is_that_of_its_group(program: Path, tmp_path: Path):
    """It trains as with a number, and is resumed with the same bits."""
    as_number = tmp_path / "number"
    as_number.mkdir()
    groups = GROUPS.replace("RATE", "0.1 * plan.peak_lr")
    replace(program, "optimizer", f"torch.optim.AdamW({groups}, lr=plan.peak_lr, fused=True)")
    call(f"{program}/train.py {FEW} --epochs 4", as_number)
    of_tensor = tmp_path / "program_of_tensor"
    groups = GROUPS.replace("RATE", "torch.tensor(0.1 * plan.peak_lr)")
    replace(of_tensor, "optimizer", f"torch.optim.AdamW({groups}, lr=torch.tensor(plan.peak_lr), fused=True)")
    _, resumed = ended_and_resumed(f"{of_tensor}/train.py {FEW}", tmp_path)
    assert_same_training(resumed, as_number)


def test_one_learning_rate_in_a_tensor_for_all_groups_is_that_of_each(program: Path, cwd: Path):
    """As torch.optim makes of a tensor. In place, it would be multiplied once for each group."""
    groups = GROUPS.replace(', "lr": RATE', "")
    replace(program, "optimizer", f"torch.optim.AdamW({groups}, lr=torch.tensor(plan.peak_lr), fused=True)")
    call(f"{program}/train.py {FEW} --epochs 1", cwd)
    found = [group["lr"].item() for group in checkpoint(cwd, "step-00000004")["optimizer"]["param_groups"]]
    assert found == pytest.approx([4e-3] * 2)


LATE = """
if step == 5:
    optimizer.add_param_group({"params": model.module.layers[0].parameters()})
"""


def test_a_group_that_is_added_while_the_run_trains_is_refused_at_the_next_save(program: Path, cwd: Path):
    """A resume builds the optimizer without it, and could not restore it."""
    replace(
        program, "optimizer", "torch.optim.AdamW(model.module.layers[1:].parameters(), lr=plan.peak_lr, fused=True)"
    )
    insert_after(program, "step is done", LATE)
    error = call(f"{program}/train.py {FEW} --epochs 2", cwd, code=1).stderr
    assert "state['optimizer'] trains other parameters than before the first step" in error and "Traceback" not in error
    assert sorted(path.name for path in run_dir(cwd).glob("checkpoints/step-*")) == ["step-00000004.ckpt"]


def test_a_tensor_subclass_that_torch_is_not_told_of_is_named(program: Path, cwd: Path):
    """The import comes after the checkpoint is chosen: so the program cannot read it."""
    (copy_programs(program) / "halved.py").write_text(HALVED)
    insert_before(program, "set up model", "from halved import HalvedMomentum")
    replace(program, "optimizer", "HalvedMomentum(model.parameters(), plan.peak_lr)")
    run(f"{program}/train.py {FEW} --epochs 1", cwd)
    error = run(f"{program}/train.py --resume auto --epochs 2", cwd, code=1).stderr
    assert "can be read: test.py --checkpoint last says why; nothing was changed" in error
    error = run(f"{program}/test.py --checkpoint last --accelerator cpu", cwd, code=1).stderr
    assert "Unsupported global: GLOBAL halved.Halved" in error


# ---- sparse gradients

BAG = """
class Bag(nn.Module):
    def __init__(self, num_classes, sparse):
        super().__init__()
        self.table = nn.EmbeddingBag(2 * 64, num_classes, mode="sum", sparse=sparse)

    def forward(self, images):
        return self.table((images.flatten(1) > 0) + 2 * torch.arange(64))


"""


def with_bag(program: Path, optimizer: str, sparse: bool = True) -> str:
    """The command that trains a model of one table, each row for a pixel that is on, or off."""
    insert_before(program, "functions", BAG)
    replace(program, "model", f"    return Bag(dataset.num_classes, {sparse})  # ")
    replace(program, "optimizer", f"torch.optim.{optimizer}(model.parameters(), lr=plan.peak_lr)")
    return f"{program}/train.py {FEW} --epochs 2 --base_lr 0.01"


@pytest.mark.parametrize("options", ["", "--max_grad_norm 0.5", "--micro_batch_size 16 --max_grad_norm 0.5"])
def test_sparse_gradients_train_as_dense_ones_and_the_norm_is_that_of_the_values(options: str, tmp_path: Path):
    folders = []
    for name, is_sparse in (("sparse", True), ("dense", False)):
        cwd = tmp_path / name
        cwd.mkdir()
        call(f"{with_bag(tmp_path / f'{name}_program', 'SGD', is_sparse)} {options}", cwd)
        folders.append(cwd)
    assert_same_training(*folders)
    norms = [[float(row["train/grad_norm"]) for row in history(cwd)] for cwd in folders]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and min(norms[0]) > 0.5


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_sparse_gradients_train_on_two_processes_as_on_one(optimizer: str, program: Path, tmp_path: Path):
    one, two = on_one_and_two(f"{with_bag(program, optimizer)} --micro_batch_size 16 --max_grad_norm 0.5", tmp_path)
    assert_same_training(one, two)


# ---- what a model has


@pytest.mark.parametrize("devices", ["", ON_2])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_whose_elements_share_memory_fails_in_a_rehearsal(kind: str, devices: str, program, cwd: Path):
    """It can be saved, but not loaded into: each element would be written several times. In the words of torch."""
    mask = "Tensor(8, 8).fill_(1).tril().expand(4, 8, 8)"
    line = {
        "buffer": f'self.register_buffer("mask", {mask})',
        "parameter": f"self.mask = nn.Parameter({mask}, requires_grad=False)",
    }[kind]
    insert_before(program, "layers", line)
    error = refused(f"{program}/train.py {SMALL} {devices} --fast_run", cwd, code=1 if devices else 2)
    assert "more than one element of the written-to tensor refers to a single memory location" in error


def test_views_of_one_tensor_as_buffers_are_restored(program: Path, tmp_path: Path):
    """Overlapping ones, and the transpose of a weight."""
    insert_before(program, "layers", "all = Tensor(6).zero_()")
    insert_before(program, "layers", 'self.register_buffer("first", all[:4])')
    insert_before(program, "layers", 'self.register_buffer("last", all[2:])')
    insert_after(program, "step is done", "model.module.first.add_(step)")
    _, cwd = ended_and_resumed(f"{program}/train.py {FEW}", tmp_path)
    assert weights(cwd)["last"].tolist() == [16 * 17 / 2] * 2 + [0] * 2


def test_nothing_of_a_checkpoint_is_larger_than_its_tensors(program: Path, cwd: Path):
    """An image of the dataset is a part of the tensor of all."""
    insert_before(program, "set up model", 'model.register_buffer("image", train_set.images[0])')
    insert_before(program, "state", '"image": train_set.images[0],')
    insert_after(program, "step is done", 'optimizer.state[model.module.layers[0].bias]["part"] = train_set.images[0]')
    call(f"{program}/train.py {FEW} --epochs 1", cwd)
    sizes = file_sizes(cwd)
    assert sorted(sizes) == ["best.ckpt", "model.pt", "step-00000004.ckpt"]
    assert max(sizes.values()) < 200_000 < 1217 * 64 * 4


# Some modules of torchvision refuse a state_dict without the version that torch puts into it.
VERSIONED = """
class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version should be 2, not {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


"""


def test_the_versions_of_modules_are_kept(program: Path, tmp_path: Path):
    insert_before(program, "functions", VERSIONED)
    insert_before(program, "set up model", "model.layers[-1] = Versioned(model.layers[-1].in_features, 10)")
    ended_and_resumed(f"{program}/train.py {FEW}", tmp_path)


# An extra state, buffers without elements, one that is not saved, tied weights, and weights that are computed.
ODD = """
class Odd(nn.Linear):
    def __init__(self, size):
        super().__init__(size, size)
        self.seen = 0
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("constant", torch.ones(1), persistent=False)
        self.tied = nn.utils.parametrizations.weight_norm(nn.Linear(size, size))
        self.tied.bias = self.bias
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(size, size))
        self.old_normed = nn.utils.spectral_norm(nn.Linear(size, size))

    def forward(self, features):
        self.seen += self.training
        return self.old_normed(self.normed(self.tied(super().forward(features)))) * self.constant

    def get_extra_state(self):
        return {"seen": self.seen, "all": torch.arange(100)[:self.seen % 3]}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        assert len(state["all"]) == self.seen % 3


"""


@pytest.mark.parametrize("devices", ["", pytest.param(ON_2, marks=pytest.mark.night)])
def test_a_model_of_odd_parts_is_resumed(devices: str, program: Path, tmp_path: Path):
    insert_before(program, "functions", ODD)
    insert_before(program, "set up model", "model.layers.append(Odd(10))")
    ended_and_resumed(f"{program}/train.py {FEW} {devices}", tmp_path)


# ---- parameters that nobody trains

FROZEN = {
    "bool": "torch.ones(3) > 0",
    "int": "torch.arange(3)",
    "minus infinity": 'torch.full((3,), -float("inf"))',
    "not a number": 'torch.full((3,), float("nan"))',
    "the least number": "torch.full((3,), torch.finfo(torch.float32).min)",
}


@pytest.mark.parametrize("kind", FROZEN)
def test_a_parameter_that_nobody_trains_may_have_any_value(kind: str, program: Path, cwd: Path):
    """As a mask of an attention."""
    insert_before(program, "set up model", f"model.mask = nn.Parameter({FROZEN[kind]}, requires_grad=False)")
    call(f"{program}/train.py {FEW} --epochs 1", cwd)
    call(f"{program}/train.py --resume auto --epochs 2", cwd)
    assert len(weights(cwd)["mask"]) == 3


# ---- metrics

# The score of a rank's own samples, by a function that knows nothing of ranks.
OF_A_RANK = f"""
class Score({METRIC}):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.hits = []

    def update(self, logits, targets):
        self.hits.append(logits.argmax(dim=1) == targets)

    def compute(self):
        return self.kind(torch.cat(self.hits).float().mean())

    def reset(self):
        super().reset()
        self.hits = []


"""
OF_EACH_KIND = """{
    "accuracy": accuracy,
    "python": Score(float),
    "numpy": Score(__import__("numpy").float32),
    "array": Score(__import__("numpy").array),
    "tensor": Score(Tensor),
}"""
SHOW_BEST = """print(f"rank {fabric.global_rank}: {state['best']} {state['best_step']}", flush=True)"""


def test_a_number_of_each_rank_is_averaged_over_the_ranks(program: Path, cwd: Path):
    """A number of Python's or NumPy's, or a tensor of one. All ranks have the same best."""
    insert_before(program, "build_metrics", OF_A_RANK)
    replace(program, "metrics", OF_EACH_KIND)
    insert_before(program, "run is finished", SHOW_BEST)
    options = "--monitor val/python --monitor_mode max --timeout 60 --logger_name csv"
    out = run(f"{program}/train.py {SMALL} {ON_2} {options}", cwd).stdout
    accuracies = {int(row["step"]): float(row["val/accuracy"]) for row in history(cwd)}
    for name in ("python", "numpy", "array", "tensor"):  # both ranks have 64 samples
        assert [float(row[f"val/{name}"]) for row in history(cwd)] == pytest.approx([*accuracies.values()])
    best = max(accuracies, key=accuracies.__getitem__)
    found = [f"rank {rank}: {accuracies[best]} {best}" for rank in (0, 1)]
    assert sorted(re.findall(r"rank \d: .*", out)) == found


# As the docstring of build_metrics says.
GATHERED = f"""
class RocAuc({METRIC}):
    def __init__(self):
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, logits, targets):
        self.scores.append(logits.softmax(dim=1))
        self.targets.append(targets)

    def compute(self):
        from sklearn.metrics import roc_auc_score
        from torchmetrics.utilities import dim_zero_cat
        scores = dim_zero_cat(self.scores).cpu()
        return roc_auc_score(dim_zero_cat(self.targets).cpu(), scores, average="macro", multi_class="ovr")


"""


NAMED_BY_RANK = f"""
class Named({METRIC}):
    def update(self, logits, targets):
        pass

    def compute(self):
        rank = __import__("os").environ.get("LOCAL_RANK", "0")
        return {{f"of_{{rank}}": 1.0, "both": 2.0, "each": torch.ones(3)}}


"""


def test_scores_that_have_other_names_on_another_rank_are_refused(program: Path, cwd: Path):
    """Instead of a wait for a sum of another size."""
    insert_before(program, "build_metrics", NAMED_BY_RANK)
    replace(program, "metrics", '{"accuracy": accuracy, "named": Named()}')
    error = refused(f"{program}/train.py {SMALL} {ON_2} --timeout 60", cwd)
    host = os.uname().nodename
    names = f"accuracy, both, loss, of_1 on rank 1 ({host}), accuracy, both, loss, of_0 on rank 0"
    words = f"compute_loss and metrics must give the same names on all ranks: names of the values: {names}"
    assert_told_by_ranks(error, words)


def test_a_score_that_is_no_mean_is_that_of_all_samples_if_its_states_are_gathered(program: Path, cwd: Path):
    insert_before(program, "build_metrics", GATHERED)
    replace(program, "metrics", '{"accuracy": accuracy, "auc": RocAuc()}')
    call(f"{program}/train.py {SMALL} --epochs 1", cwd)
    scores = []
    for devices in ("--devices 1", ON_2):
        run(f"{program}/test.py --accelerator cpu {devices} --batch_size 100", cwd)
        scores.append(report(cwd)["auc"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-9) and 0.5 < scores[0] < 1


def test_a_single_metric_is_called_metric(program: Path, cwd: Path):
    replace(program, "collection", "accuracy")
    options = "--monitor val/metric --monitor_mode max --logger_name csv"
    call(f"{program}/train.py {SMALL} {options}", cwd)
    assert 0 < float(history(cwd)[-1]["val/metric"]) <= 1
    call(f"{program}/test.py --accelerator cpu --predictions", cwd)
    assert 0 < report(cwd)["metric"] <= 1


ALL_CLASSES = f"""
class Balanced({METRIC}):
    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros(10, dtype=torch.bool), dist_reduce_fx="sum")

    def update(self, logits, targets):
        self.seen[targets] = True

    def compute(self):
        if not self.seen.all():
            raise ValueError("Balanced needs samples of all classes")
        return 1.0


"""


def test_a_metric_that_needs_all_classes_says_so_in_a_short_first_validation(program: Path, cwd: Path):
    """In its own words. With more validation batches before the first step, as the help says, it has them."""
    insert_before(program, "build_metrics", ALL_CLASSES)
    replace(program, "metrics", '{"accuracy": accuracy, "balanced": Balanced()}')
    command = f"{program}/train.py {SMALL} --limit_val_batches 1.0 --micro_batch_size 1 --epochs 1"
    error = refused(command, cwd)
    assert "Traceback" in error and "ValueError: Balanced needs samples of all classes" in error
    call(f"{command} --num_sanity_val_steps 50", cwd)
    help = " ".join(run("train.py --help", cwd).stdout.split())
    assert "at least 1 runs; give more if a metric needs all classes" in help


RESULTS = f"""
class Results({METRIC}):
    def update(self, logits, targets):
        pass

    def compute(self):
        import numpy as np
        return {{
            "array": np.array([[1.5, np.nan], [np.inf, 2]]),
            "sparse": torch.eye(2).to_sparse(),
            "single": np.float32(0.5),
            "flag": torch.tensor(True),
            "infinite": -math.inf,
            "nested": {{"list": [1, torch.tensor(2.0), (None, "three")], 4: math.nan, ("a", 1): True}},
            "object": nn.Identity(),
            7: 8.0,
        }}


"""


def test_any_result_is_written_as_json(program: Path, cwd: Path):
    """But for a key that JSON cannot have, such as a tuple."""
    insert_before(program, "build_metrics", RESULTS)
    replace(program, "metrics", '{"accuracy": accuracy, "results": Results()}')
    call(f"{program}/train.py {SMALL} --epochs 1", cwd)
    call(f"{program}/test.py --accelerator cpu", cwd)
    results = report(cwd)
    assert {name: results[name] for name in results if name not in ("loss", "accuracy")} == {
        "array": [[1.5, None], [None, 2.0]],
        "sparse": [[1.0, 0.0], [0.0, 1.0]],
        "single": 0.5,
        "flag": 1.0,
        "infinite": None,
        "nested": {"list": [1, 2.0, [None, "three"]], "4": None},
        "object": "Identity()",
        "7": 8.0,
    }


def test_what_is_not_finite_is_null_in_the_summary(program: Path, cwd: Path):
    """Which sweeps and pages read, too: JSON has no NaN and no infinity."""
    replace(program, "values", '{"loss": F.cross_entropy(logits, targets), "ratio": math.nan, "margin": -math.inf}')
    call(f"{program}/train.py {SMALL} --epochs 1 --monitor val/ratio --monitor_mode max", cwd)
    text = (run_dir(cwd) / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    last = {name: summary["last"][name] for name in ("train/ratio", "train/margin", "val/ratio", "val/margin")}
    assert (set(last.values()), summary["best"]) == ({None}, None)
    assert {row["val/margin"] for row in history(cwd)} == {"-inf"}
