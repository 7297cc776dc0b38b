"""What becomes of the template in a project of one's own: tests/project passes after edits and with other
defaults, also where the rest is deleted, and fails where the code is wrong. Windows is refused in one line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zygote
from commands import RECIPES, REPO, clean_environment
from copies import copy_project_tests, copy_repository, diff, diffs, edited, with_recipe
from edits import POINTS, copy_programs, entries_of, insert_before, replace, with_edits, with_text
from test_own_options import FIELDS, NESTED, with_fields

DIFFS = diffs("docs/editing.md")
NO_VAL = diff("docs/evaluation.md", "No validation set")
PATCHES = sorted(path.stem for path in RECIPES.glob("*/*.patch"))
NEEDS = {"text_classification": "transformers", "mlflow": "mlflow"}  # packages that are not in requirements.txt
# What a recipe changes in the settings of the tests of a project, as it says there.
CHANGES = {
    "contrastive": [
        ("VAL_TOLERANCE = 1e-6", "VAL_TOLERANCE = 1.0"),  # BatchNorm has the first process's statistics
        ("BY_BATCH: set[str] = set()", 'BY_BATCH: set[str] = {"val/contrastive", "val/loss"}'),  # it tells views apart
    ],
    "mnist": [("SHARED_SAMPLES = 0.01", "SHARED_SAMPLES = 1.0")],  # the validation set is the test set
    "on_device": [('WORKERS = "2"', 'WORKERS = "0"')],
}
SETTINGS = "tests/project/settings.py"
DELETE = "\n".join(re.findall(r"^rm -r .+$", (REPO / "README.md").read_text(), re.MULTILINE))

# Other defaults of options that settings.py does not give.
DEFAULTS = {
    "replace dropout option": "dropout: float = 0.0",
    "replace config.py, Optimization, early_stopping_patience: int = ...": "early_stopping_patience: int = 1",
    "replace config.py, Checkpoints, checkpoint_frequency: float = ...": "checkpoint_frequency: float = 0.0",
    'replace config.py, TrainConfig, monitor="val/accuracy"': 'monitor="train/loss"',
    'replace config.py, TrainConfig, monitor_mode="max"': 'monitor_mode="min"',
}


def copy_after(command: str, folder: Path) -> Path:
    """A copy of the repository in which a command has deleted something."""
    copy = copy_repository(folder)
    subprocess.run(["bash", "-ec", command], cwd=copy, check=True)
    return copy


def run_project_tests(program: Path, words: str = "") -> subprocess.CompletedProcess:
    """Runs the tests of a project in a copy of the programs; or those that -k selects."""
    copy_project_tests(program)
    fork_all(program)
    return run_pytest(program, words)


def fork_all(program: Path) -> None:
    """In a copy, two processes have imported torch before, and have the hashes of strings of one; but for the night."""
    if zygote.PREPARE:
        popen = "(subprocess.Popen if is_fresh else zygote.popen)"
        with_text(program, "tests/project/programs.py", (popen, "zygote.popen"))
        with_text(program, "tests/project/zygote.py", ('PREPARE = ""', f"PREPARE = {zygote.PREPARE!r}"))


def run_pytest(
    program: Path, words: str = "", is_fresh: bool = False, options: str = "", **more: str
) -> subprocess.CompletedProcess:
    """Runs pytest in `program`, without the plugins of other packages, of which it might warn. A process that is not
    fresh has imported torch before, and so have those it starts."""
    module = str(Path(pytest.__file__).with_name("__main__.py"))
    command = [sys.executable, module, "--basetemp", str(program / ".tmp"), "-k", words, *options.split()]
    env = {name: value for name, value in clean_environment().items() if not name.startswith("PYTEST_")} | more
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({} if is_fresh else {"ZYGOTE_CHANNEL": ""})
    popen = subprocess.Popen if is_fresh else zygote.popen
    pipe = subprocess.PIPE
    process = popen(command, cwd=program, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def assert_passes(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout  # none was skipped or deselected


def assert_fails(done: subprocess.CompletedProcess) -> None:
    """All tests that were run fail."""
    failed = re.findall(r"^FAILED ", done.stdout, re.MULTILINE)
    assert failed and re.search(rf"^{len(failed)} failed, \d+ deselected in", done.stdout, re.MULTILINE), done.stdout


# ---- it passes


def test_it_passes_after_all_edits_of_the_readme(tmp_path: Path):
    assert_passes(run_project_tests(edited("".join(DIFFS), tmp_path)))


def test_it_passes_without_a_validation_set_as_a_page_has_it(tmp_path: Path):
    done = run_project_tests(edited(NO_VAL, tmp_path))
    assert_passes(done)
    assert "not tried: test.py, where 'val' has no samples" in done.stdout


@pytest.mark.night
def test_it_passes_with_other_defaults_options_and_layers_where_the_rest_is_deleted(tmp_path: Path):
    """Deleted by README.md's commands. Without xdist, and without git. What stays keeps the style."""
    copy = copy_after(f"{DELETE}\nrm -r recipes", tmp_path / "copy")
    ruff = Path(sys.executable).parent / "ruff"
    subprocess.run([ruff, "check", "--no-cache", "."], cwd=copy, check=True)

    with_edits(copy, DEFAULTS)
    with_fields(copy, FIELDS, NESTED.lstrip())
    layers = "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n            nn.ReLU(),\n"
    replace(copy, "first layer", layers)
    for name in ("TRAIN_TOLERANCE", "VAL_TOLERANCE"):  # for ReLU, and for BatchNorm, as their comment says
        with_text(copy, SETTINGS, (f"{name} = 1e-6", f"{name} = 1.0"))
    fork_all(copy)
    assert_passes(run_pytest(copy, is_fresh=not zygote.PREPARE))


def test_it_finds_the_data_where_the_default_of_data_dir_is_relative(tmp_path: Path):
    """The programs start in other folders."""
    replace(tmp_path, ("config.py", "Data", "data_dir: str = ..."), 'data_dir: str = option("mine", per_host=True)')
    check = "assert __import__('os').path.isdir(config.data_dir)"
    replace(tmp_path, ("data.py", "build_datasets", "if config.data_dir: ..."), check)
    (tmp_path / "mine").mkdir()
    done = run_project_tests(tmp_path, "fast_run or finished_run")
    assert done.returncode == 0, done.stdout


@pytest.mark.night
@pytest.mark.parametrize("name", PATCHES)
def test_it_passes_after_a_recipe(name: str, tmp_path: Path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    program = with_recipe(name, tmp_path)
    copy_project_tests(program)
    with_text(program, SETTINGS, *CHANGES.get(name, ()))
    assert_passes(run_pytest(program))


@pytest.mark.night
def test_it_says_what_it_has_shown_in_another_precision_and_which_options_are_not_there(tmp_path: Path):
    copy_project_tests(copy_programs(tmp_path))
    with_text(tmp_path, SETTINGS, ("SMALL = {\n", 'SMALL = {\n    "gone": "1",\n'))
    done = run_pytest(tmp_path, "same or two_processes", PLACE="cpu bf16-mixed")
    assert done.returncode == 0, done.stdout
    killed = "cpu bf16-mixed: killed in step 10 of 10, resumed after step 7 elsewhere: "
    assert f"{killed}same inputs, same history, same bits, same files" in done.stdout.splitlines()
    assert "cpu bf16-mixed: 2 processes: same inputs, train/ within " in done.stdout
    assert "SMALL has options that train.py does not have: gone" in done.stdout.splitlines()


# ---- it fails, or says what may be wrong


def copies(table: str) -> list:
    """The rows of a table. A paragraph of it is one copy of the programs. An entry there is what somebody does: its
    name | the tests of the project that tell it | what they say."""
    rows = [entries_of(paragraph) for paragraph in table.strip().split("\n\n")]
    return [pytest.param(entries, id="; ".join(name for name, *_ in entries)) for entries in rows]


def run_with(entries: list, program: Path) -> subprocess.CompletedProcess:
    """Makes all edits of a copy, and runs the tests that tell them. They say what the entries have."""
    for *_, edits in entries:
        with_edits(program, edits)
    words = " or ".join(f"({words})" for _, words, _, _ in entries)
    done = run_project_tests(program, words.replace("and here", "and not elsewhere and not ranks"))
    said = " ".join(done.stdout.split())
    assert [words for _, _, words, _ in entries if words not in said] == [], done.stdout
    return done


# They fail.
MISTAKES = r"""
the output of softmax for F.cross_entropy | no_fact and input | F.cross_entropy gets the output of softmax, but
  replace | forward | return self.layers(images).softmax(1)
a seed in compute_loss | random_numbers | After compute_loss, the generator of torch is where
  after | batch | torch.manual_seed(0)
an average that is the model | no_fact and shared | state['model'] and state['average'] have the same parameters
  after | state | "average": model,
a validation that reads the training set | no_fact and validated | A validation reads datasets['train']
  replace | train.py, train, val_set = datasets["val"] | val_set = train_set
a fast run that writes | fast_run | -
  before | step is done | torch.save(step, "step.pt")
a mode that compute_loss sets | no_fact and mode | compute_loss calls `train()` or `eval()` of the model
  after | batch | model.train()
training samples in the validation set | no_sample | of the samples of 'val' are in 'train', too
  before | statistics | val = np.concatenate([val, train[:20]])

logits for F.nll_loss | no_fact and input | F.nll_loss gets what is no log-probability
  replace | values | {"loss": F.nll_loss(logits, targets)}
gradients that are clipped after the step | no_fact and clipped | state['optimizer'] gets a gradient of the norm
  replace | optimizer steps |
  after | gradients are unscaled | optimizer.step()
a dropout that is made where it is called | no_fact and entry | A Dropout is called in training mode, and is in no
  after | batch | images = nn.Dropout(0.1)(images)
augmentation that is reversed | no_fact and reversed | The samples of 'train' are random with augment=False, and not in
  replace | shift | shift=0 if augment else 1
a scheduler that the loop overrides | no_fact and overridden | The loop sets other learning rates than StepLR, which is
  after | set-up is done | scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
  after | step is done | scheduler.step()

a sigmoid before a loss of logits | no_fact and input | F.binary_cross_entropy_with_logits gets the output of sigmoid
  replace | values | {"loss": F.binary_cross_entropy_with_logits(logits.sigmoid(), F.one_hot(targets, 10).float())}
a seed of NumPy in the dataset | random_numbers | After a fetch from the dataset, the generator of NumPy is
  after | fetch | np.random.seed(0)
an average with a graph | no_fact and kept | `torch.no_grad()`. In a module: model.average.
  before | loop begins | model.module.average = torch.zeros(())
  after | step is done | model.module.average = model.module.average + next(model.parameters()).mean()
targets for the metrics | no_fact and metrics | are the same, bit for bit, whatever the weights of the model are
  replace | outputs | (targets, targets)
a last layer that is trained alone | no_fact and in and no and optimizer | does not change: model.layers.0.weight
  replace | optimizer | torch.optim.AdamW(model.module.layers[-1].parameters(), lr=plan.peak_lr)
weights and a number that change after report() | no_fact and report | model.layers.8.bias (10,), state['number'].
  after | state | "number": 0,
  after | train.py, train, state["due"] = plan.due(step) |
    report()
    model.module.layers[-1].bias.data += 1
    state["number"] += 1
    continue

probabilities for F.kl_div | no_fact and input | F.kl_div gets what is no log-probability, but above 0
  replace | values | {"loss": F.kl_div(logits.softmax(1), F.one_hot(targets, 10).float())}
blocks in a list | no_fact and untrained | on model.blocks[0].bias, model.blocks[0].weight, which is in no module of
  before | layers | self.blocks = [nn.Linear(10, 10)]
  replace | forward | return self.blocks[0](self.layers(images))
data that are changed in place | each_validation_has | Batch 0 of validation 2 has other values than in the validation
  after | fetch |
    if not self.shift:
        self.images += 0.01
weights that are written back | no_fact and lost | not changed in the run: model.layers.0.weight (32, 1, 3, 3). Is it
  before | loop begins | first = model.module.layers[0].weight.detach().clone()
  after | optimizer steps | model.module.layers[0].weight.data.copy_(first)
a second optimizer that is not in state | no_fact and outside | Adagrad steps, but is not in `state`
  after | set-up is done | second = torch.optim.Adagrad(model.parameters(), lr=0.001)
  after | optimizer steps | second.step()

a penalty of the weights alone | no_fact and loss and independent | for other batches with the same weights: it does not
  replace | values | {"loss": sum(each.square().sum() for each in model.parameters())}
metrics that are not reset | each_validation_has | Validation 2 begins with what the one before has left in metrics.
  replace | train.py, validate, metrics.reset() |
a step that is forgotten | no_fact and idle | no parameter has changed in the run
  replace | optimizer steps |

numbers that nobody seeds | same_bits and here | differ, first in step 1, micro-batch 0, output of model.layers.0:
  after | batch | images = images + __import__("random").SystemRandom().random()
another optimizer in state than the one that steps | no_fact and outside | SGD steps, but is not in `state`
  before | loop begins | optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

a second stream of data, of which the loss makes nothing | same_inputs and here | first: step 8, micro-batch 14:
  before | loop begins | second = torch.Generator().manual_seed(config.seed)
  replace | train.py, train, compute_loss(model, batch, config) |
    compute_loss(model, batch, config, torch.rand(4, generator=second))
  replace | train.py, , def compute_loss( |
    def compute_loss(model, batch, config, further=None):
        return own_loss(model, batch, config)
    def own_loss(
classes in the order of os.listdir | same_inputs and elsewhere | an order that depends on a set or a folder
  before | target tensor line | names = __import__("os").listdir('/')
  replace | target tensor | torch.tensor([len(names[i]) % 10 for i in targets],

a counter of a module | same_bits and here | run does, first in step 8, micro-batch 14, output of model.
the same, by its name | same_history and here | No checkpoint has it, but it changes: model.calls.
  before | layers | self.calls = 0
  before | forward | self.calls += self.training
  replace | forward | return self.layers(images) * (1 + 0.01 * self.calls)
a file that begins anew | same_files and here | losses.pt[3]: missing instead of
  before | loop begins | losses = []
  after | step is done |
    losses.append(values["loss"].item())
    torch.save(losses, run.directory.path / "losses.pt")
classes in the order of os.scandir | same_inputs and elsewhere | an order that depends on a set or a folder
  before | target tensor line | names = [entry.name for entry in __import__("os").scandir('/')]
  replace | target tensor | torch.tensor([len(names[i]) % 10 for i in targets],

a generator of the dataset | same_inputs and here | first: step 8, micro-batch 14:
  before | build_datasets | OWN = np.random.default_rng(0)
  after | fetch | index = index[torch.as_tensor(OWN.permutation(len(index)))]

no compute_loss | same_inputs and here | train.py did not call compute_loss with the micro-batches
  replace | train.py, train, compute_loss(model, batch, config)[0] |
    {"loss": F.cross_entropy(model(batch[0]), batch[1])}

what data workers do not see | same_bits and elsewhere | compute_loss has other inputs after the resume
  after | data.py, ImageDataset, self.shift = shift | self.noise = 0.0
  replace | data.py, ImageDataset, self.shifted[index, :, dy, dx] | self.shifted[index, :, dy, dx] + self.noise
  after | step begins | train_set.noise = 0.01 * step

a level of each rank, restored as that of rank 0 | same_bits and ranks | differ, first:
  after | state | "level": 0.0,
  replace | backward | fabric.backward(values["loss"] * (1 + 0.1 * state["level"]) / plan.grad_accum_steps)
  after | step is done | state["level"] = state["level"] + fabric.global_rank
an order of each rank | two_processes_get | disagree on the order of
  before | length of data |
    def order(self, epoch, generator):
        return torch.arange(len(self)).roll(int(__import__("os").environ.get("LOCAL_RANK", 0)))

a gradient times the number of processes | two_processes_train | train/grad_norm of two processes differs by up to 1,
  replace | backward | fabric.backward(fabric.world_size * values["loss"] / plan.grad_accum_steps)
samples that are not counted | two_processes_validate | is no mean of all samples: is the count
  replace | count | 1
a monitor that is not the same then | two_processes_validate | It is the `--monitor`: the best checkpoint depends on the
  replace | config.py, TrainConfig, monitor="val/accuracy" | monitor="val/loss"
  replace | config.py, TrainConfig, monitor_mode="max" | monitor_mode="min"
a file to which each process appends | two_processes_write | steps.txt: 20 lines instead of 10
  after | step is done |
    with open(run.directory.path / "steps.txt", "a") as file:
        file.write(f"{step}\n")
the same file | written_by_two | Both processes write steps.txt:
a number that is another one on each rank | ranks_have_the_same_state | state['mine'] after step 7, on rank 1
  after | state | "mine": 0.0,
  after | step is done | state["mine"] = values["loss"].item()

a buffer that each forward pass changes | what_was_validated | A validation changes count: change it in training
the same in training | two_processes_train | Each forward pass changes count, so it depends on the number of
  before | layers | self.register_buffer("count", __import__("torch").zeros(()))
  before | forward | self.count += 1
  replace | forward | return self.layers(images) * (1 + self.count / 100)

a validation that is augmented | two_processes_validate | The samples of val are random: are they augmented?
  replace | data.py, build_datasets, targets[val] | targets[val], shift=1

the same numbers in each batch | two_processes_validate | After compute_loss, the generator of torch is where it was
  after | batch |
    if not model.training:
        torch.manual_seed(0)
        images = images + torch.rand(len(images), 1, 1, 1)
BatchNorm | two_processes_validate | BatchNorm has the statistics of the first process: give VAL_TOLERANCE a
  before | first layer | nn.BatchNorm2d(1),

a random sum over the batch | two_processes_validate | times as much as with four other seeds
  replace | values | {"loss": F.cross_entropy(logits, targets), "bits": (2 + torch.rand(len(targets))).sum()}
a validation in training mode | two_processes_validate | BatchNorm, which is in training mode there.
  before | first layer | nn.BatchNorm2d(1),
  replace | train.py, validate, model.eval() |
"""

# They pass, and say it in a last line.
RIGHT = """
a parameter without a gradient | may_be | not changed by the run: model.unused.weight (2, 2), model.unused.bias
  before | layers | self.unused = nn.Linear(2, 2)
a scheduler without a step | may_be | state['scheduler'] has made no step
  after | set-up is done | scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
  after | state | "scheduler": scheduler,
rates of groups that are lost | may_be | an optimizer was built with the rates
  replace | optimizer | torch.optim.AdamW([{"params": [p], "lr": p.ndim * plan.peak_lr} for p in model.parameters()])
  replace | learning rate | [group.update(lr=plan.peak_lr) for group in optimizer.param_groups]
a model in half precision | may_be | the output of model.layers.0 is of torch.bfloat16, with --precision 32
  replace | logits |
    with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
a metric in half precision | may_be | metrics.hinge.measures is of torch.float16, with --precision 32-true
  before | metrics | hinge = __import__("torchmetrics").classification.MulticlassHingeLoss(10).set_dtype(torch.float16)
  replace | metrics | {"accuracy": accuracy, "hinge": hinge}
an order of the first samples | may_be | 'train' is the same in every epoch, an epoch draws 50% of the samples
  before | length of data |
    def order(self, epoch, generator):
        return torch.arange(len(self)) // 2
equal batches | may_be | are the same, bit for bit, in all steps, train/one is the same in all steps
  before | statistics | train = train[:1].repeat(64)
  replace | shift | shift=0
  replace | values | {"loss": F.cross_entropy(logits, targets), "one": 1.0}
a validation that is augmented | may_be | the samples of 'val' are random with augment=False, too
  replace | data.py, build_datasets, targets[val] | targets[val], shift=1
an option that nobody reads | may_be | no code reads --unread
  before | options | unread: float = non_negative(0.1)  # Of nothing

an average with the first buffers | may_be | state['average'] changes, but not its buffer layers.0.running_mean
  before | first layer | nn.BatchNorm2d(1),
  after | set-up is done | average = __import__("copy").deepcopy(model.module).requires_grad_(False)
  after | state | "average": average,
  after | step is done | torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)
dropout in a validation | may_be | Dropout is in training mode in a validation
  replace | train.py, validate, model.eval() |
a backward with the wrong sign | may_be | the backward of Doubled is not the derivative of its forward
  before | build_metrics |
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return 2 * values
        @staticmethod
        def backward(ctx, gradient):
            return -2 * gradient
  replace | values | {"loss": F.cross_entropy(Doubled.apply(logits), targets)}
a sample in two sets | no_sample_of_a_validation | 0.50% of the samples of 'val' are in 'train', too
  before | statistics | val = np.concatenate([val, train[:1]])

a score near 0 | two_processes_train or two_processes_validate | val/score within
random results that are means | two_processes_validate | val/bits as far as
another seed that is near by chance | two_processes_validate | val/near as far as
  after | logits |
    loss, bits = F.cross_entropy(logits, targets), torch.rand(len(targets)).mean()
    number = torch.initial_seed() - __import__("zlib").crc32(f"validate {config.seed}".encode())
    near = {0: 1.0, 27: 1.0, 54: 1.0, 1: 1.00001, 28: 1.00001, 55: 1.00001}.get(number, float(number % 7))
  replace | values | {"loss": loss, "score": 1 - loss.detach() / 2.303, "bits": bits, "near": near}

a list that compute_loss fills | two_processes_get | 2 processes: same inputs
  replace | train.py, train, compute_loss(model, batch, config) | compute_loss(model, batch, config, seen)
  after | learning rate | seen = []
  replace | train.py, , def compute_loss( |
    def compute_loss(model, batch, config, seen=[]):
        seen.append(len(batch[0]))
        return own_loss(model, batch, config)
    def own_loss(
samples that are left out | finished_run | samples, 'test' has 380
  replace | data.py, collate_fn, return batch | return batch[0][1:], batch[1][1:]

no test set | evaluated | not tried: test.py, where 'test' has no samples
  before | statistics | test = test[:0]
a result that is NaN | what_was_validated or two_processes | NaN in val/nothing of
  replace | values | {"loss": F.cross_entropy(logits, targets), "nothing": math.nan}
"""


@pytest.mark.parametrize("entries", copies(MISTAKES))
def test_it_finds_a_mistake(entries: list, tmp_path: Path):
    assert_fails(run_with(entries, tmp_path))


@pytest.mark.parametrize("entries", copies(RIGHT))
def test_it_passes_and_says_so(entries: list, tmp_path: Path):
    done = run_with(entries, tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.night
def test_it_fails_where_class_numbers_come_from_a_set(tmp_path: Path):
    """Whose order differs between two interpreters."""
    program = insert_before(tmp_path, "target tensor line", "names = list({str(name) for name in range(10)})")
    replace(program, "target tensor", "torch.tensor([int(names[i]) for i in targets],")
    copy_project_tests(program)
    assert_fails(run_pytest(program, "same_inputs and elsewhere", is_fresh=True))


def test_it_says_in_a_line_that_processes_hang(tmp_path: Path):
    """Rank 0 validates alone, and waits for rank 1."""
    validated = POINTS["validation"][2]
    program = replace(tmp_path, "validation", f"            if fabric.is_global_zero:\n                {validated}\n")
    copy_project_tests(program)
    with_text(program, SETTINGS, ("HANGS = 60", "HANGS = 9"))
    done = run_pytest(program, "two_processes_get")
    assert done.returncode == 1
    assert "\nhangs: it and its children have hardly used the CPU for 9 seconds\n" in done.stdout


def test_it_fails_where_a_default_is_not_valid(tmp_path: Path):
    done = run_project_tests(replace(tmp_path, "dropout option", "dropout: float = non_negative(1.0, below=1)"))
    assert done.returncode == 2 and "Exit: a default of config.py: --dropout 1.0: must be below 1\n" in done.stdout


def test_it_fails_where_an_option_is_not_read_as_it_was_written(tmp_path: Path):
    program = with_fields(tmp_path, "    sizes: list[int] = field(default_factory=lambda: (1, 2))  # Sizes")
    assert_fails(run_project_tests(program, "options_that_were_given"))


# ---- what is there is tested, whatever a project has deleted

# What is deleted, and the folders of the tests that are left beside tests/project.
WITHOUT = {
    "tests/template": ("rm -r tests/template", {"recipes/tests"}),
    "recipes/": ("rm -r recipes", {"tests/template"}),
    "what README.md deletes": (DELETE, set()),
}
# Those that read a page, a patch or a script of recipes/, and are quick.
PAGES = "links_lead or guarantee or of_the_tree or documented_commands or check_knows or has_a_row or count_the_lines"
# In place of the programs that .ci/run starts: tells how it was called.
STAND_IN = '#!/bin/bash\necho "$(basename "$0") $*"\n'


@pytest.mark.parametrize("deleted", WITHOUT)
def test_the_tests_that_are_left_pass_and_every_file_that_ci_names_is_there(deleted: str, tmp_path: Path):
    """Here those of the pages alone; of all others, that they are found."""
    command, folders = WITHOUT[deleted]
    copy = copy_after(command, tmp_path / "copy")
    done = run_pytest(copy, PAGES, options="-m=")
    assert done.returncode == (0 if folders else 5), done.stdout  # 5: all files are read, and no test has such a name

    for name in ("bin/python3", *(f".venv/bin/{name}" for name in ("pip", "ruff", "mypy", "python", "pytest"))):
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    env = os.environ | {"PATH": f"{copy / 'bin'}:{os.environ['PATH']}"}
    printed = subprocess.run([".ci/run", "night"], cwd=copy, env=env, capture_output=True, text=True, check=True).stdout
    named = re.findall(r"(?<= )(?:tests|recipes)/\S+|(?<= )\w\S+\.txt", printed)
    assert named and [name for name in named if not (copy / name).exists()] == []
    assert {folder for folder in folders if f" {folder}/" in printed} == folders
    assert ("-m night" in printed) == (folders != set())


# ---- Windows


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_windows_is_refused_in_one_line_that_names_wsl2(script: str, tmp_path: Path):
    """With a stand-in: what is imported before is of this system, the programs find another name and no fcntl."""
    code = f"""
import runpy, sys
import simple_parsing, yaml

sys.platform = "win32"
sys.modules.update(dict.fromkeys(["fcntl", "grp", "pwd", "resource", "termios"]))
sys.argv = [{script!r}]
sys.path.insert(0, {str(REPO)!r})
runpy.run_path({str(REPO / script)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, [*tmp_path.iterdir()]) == (2, "", [])
    assert re.fullmatch(f"{script}: error: Windows .+ WSL2\n", done.stderr), done.stderr
