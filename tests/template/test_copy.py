"""What becomes of the template in a project of one's own: tests/project passes after edits and with other
defaults, also where the rest is deleted, and fails where the code is wrong. Windows is refused in one line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zygote
from edits import POINTS, copy_programs, insert_after, insert_before, replace, with_text
from helpers import RECIPES, REPO, clean_environment, copy_project_tests, diffs, edited, with_recipe
from test_own_options import FIELDS, NESTED, with_fields

DIFFS = diffs("docs/editing.md")
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
DELETE = "\n".join(re.findall(r"^rm -r .+$", (REPO / "README.md").read_text(), re.MULTILINE))

# Other defaults, by the name of the option.
DEFAULTS = {
    "out_dir": '"runs/mine"',
    "seed": "7",
    "num_workers": "2",
    "width": "6",
    "dropout": "0.0",
    "precision": '"bf16-mixed"',
    "effective_batch_size": "100",
    "micro_batch_size": "20",
    "epochs": "3.0",
    "max_steps": "5000",
    "base_lr": "1e-2",
    "lr_schedule": '"constant"',
    "max_grad_norm": "1.0",
    "early_stopping_patience": "1",
    "logger_name": '("tensorboard",)',
    "monitor": '"train/loss"',
    "monitor_mode": '"min"',
    "checkpoint_frequency": "0.0",
    "num_checkpoint_keep": "1",
}


def with_defaults(program: Path, defaults: dict[str, str]) -> Path:
    """A copy of the programs in which these options of train.py have other defaults."""
    path = copy_programs(program) / "config.py"
    text = path.read_text()
    for name, value in defaults.items():
        pattern = rf"(?m)^(    {name}: .+? = (?:(?:option|positive|non_negative)\()?)(?:\(.*?\)|[^\s,)]+)"
        text, count = re.subn(pattern, rf"\g<1>{value}", text, count=1)  # EvalConfig, which has some, too, comes later
        assert count == 1, name
    path.write_text(text)
    return program


def copy_after(command: str, folder: Path) -> Path:
    """A copy of the repository in which a command has deleted something."""
    skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "[0-9]*-[0-9]*-*")
    copy = Path(shutil.copytree(REPO, folder, ignore=skipped))
    subprocess.run(["bash", "-ec", command], cwd=copy, check=True)
    return copy


def tolerate(program: Path, name: str) -> None:
    """Widens a tolerance of the tests of a project, as its comment says."""
    with_text(program, "tests/project/settings.py", (f"{name} = 1e-6", f"{name} = 1.0"))


def run_project_tests(program: Path, words: str = "", is_fresh: bool = False) -> subprocess.CompletedProcess:
    """Runs the tests of a project in a copy of the programs; or those that -k selects."""
    copy_project_tests(program)
    if not is_fresh:
        fork_all(program)
    return run_pytest(program, words)


def fork_all(program: Path) -> None:
    """In a copy, two processes have imported torch before, and have the hashes of strings of one; but for the night."""
    if zygote.PREPARE:
        with_text(
            program, "tests/project/programs.py", ("(subprocess.Popen if is_fresh else zygote.popen)", "zygote.popen")
        )
        with_text(program, "tests/project/zygote.py", ('PREPARE = ""', f"PREPARE = {zygote.PREPARE!r}"))


def run_pytest(
    program: Path, words: str = "", is_fresh: bool = False, options: str = "", **more: str
) -> subprocess.CompletedProcess:
    """Runs pytest in `program`, without the plugins of other packages, of which it might warn. A process that is not
    fresh has imported torch before, and so have those it starts."""
    arguments = ["--basetemp", str(program / ".tmp"), "-k", words, *options.split()]
    env = {name: value for name, value in clean_environment().items() if not name.startswith("PYTEST_")} | more
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    pipe = subprocess.PIPE
    if is_fresh:
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, cwd=program, env=env, capture_output=True, text=True, timeout=600)
    process = zygote.popen(
        [sys.executable, str(Path(pytest.__file__).with_name("__main__.py")), *arguments],
        cwd=program,
        env=env | {"ZYGOTE_CHANNEL": ""},
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def assert_passes(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout  # none was skipped or deselected


# ---- it passes


def test_it_passes_after_all_edits_of_the_readme(tmp_path: Path):
    assert_passes(run_project_tests(edited("".join(DIFFS), tmp_path)))


@pytest.mark.night
@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_it_passes_after_each_edit_of_the_readme(number: int, tmp_path: Path):
    assert_passes(run_project_tests(edited(DIFFS[number], tmp_path), is_fresh=True))


@pytest.mark.night
def test_it_passes_with_other_defaults_options_and_layers_where_the_rest_is_deleted(tmp_path: Path):
    """Deleted by README.md's commands. Without xdist, and without git. What stays keeps the style."""
    copy = copy_after(f"{DELETE}\nrm -r recipes", tmp_path / "copy")
    assert [path.name for path in (copy / "tests").iterdir()] == ["project"]
    ruff = Path(sys.executable).parent / "ruff"
    subprocess.run([ruff, "check", "--no-cache", "."], cwd=copy, check=True)

    with_defaults(copy, DEFAULTS)
    with_fields(copy, FIELDS, NESTED.lstrip())
    layers = "nn.Conv2d(channels, width, 3, padding=1),\n            nn.BatchNorm2d(width),\n            nn.ReLU(),\n"
    replace(copy, "first layer", layers)
    tolerate(copy, "TRAIN_TOLERANCE")  # for ReLU
    tolerate(copy, "VAL_TOLERANCE")  # for BatchNorm
    fork_all(copy)
    assert_passes(run_pytest(copy, is_fresh=not zygote.PREPARE))


def test_it_finds_the_data_where_the_default_of_data_dir_is_relative(tmp_path: Path):
    """The programs start in other folders."""
    program = with_defaults(tmp_path, {"data_dir": '"mine"'})
    (program / "mine").mkdir()
    with_text(
        program, "data.py", ("    if config.data_dir:\n", "    if not __import__('os').path.isdir(config.data_dir):\n")
    )
    done = run_project_tests(program, "fast_run or finished_run")
    assert done.returncode == 0, done.stdout


@pytest.mark.night
@pytest.mark.parametrize("name", PATCHES)
def test_it_passes_after_a_recipe(name: str, tmp_path: Path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    program = with_recipe(name, tmp_path)
    copy_project_tests(program)
    if name in CHANGES:
        with_text(program, "tests/project/settings.py", *CHANGES[name])
    assert_passes(run_pytest(program))


@pytest.mark.night
def test_it_says_what_it_has_shown_in_each_precision_and_which_options_are_not_there(tmp_path: Path):
    copy_project_tests(copy_programs(tmp_path))
    with_text(tmp_path, "tests/project/settings.py", ("SMALL = {\n", 'SMALL = {\n    "gone": "1",\n'))
    for place in ("cpu 32-true", "cpu bf16-mixed"):
        done = run_pytest(tmp_path, "same or two_processes", PLACE=place)
        assert done.returncode == 0, done.stdout
        for where in ("", " elsewhere"):
            killed = f"{place}: killed in step 10 of 10, resumed after step 7{where}: "
            assert f"{killed}same inputs, same history, same bits, same files" in done.stdout.splitlines()
        assert f"{place}: 2 processes: same inputs, train/ within " in done.stdout
    assert "SMALL has options that train.py does not have: gone" in done.stdout.splitlines()


@pytest.mark.night
def test_it_passes_with_a_list_in_a_file_of_ones_own(tmp_path: Path):
    program = insert_after(tmp_path, "step is done", 'torch.save([step], run.directory.path / f"{step}.pt")')
    done = run_project_tests(program, "same_files")
    assert done.returncode == 0, done.stdout


# ---- it fails


def assert_fails(done: subprocess.CompletedProcess, test: str) -> None:
    """All tests that were run fail: this one, or several that begin with this name."""
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert failed and all(name.startswith(test) for name in failed), done.stdout
    assert re.search(rf"^{len(failed)} failed, \d+ deselected in", done.stdout, re.MULTILINE), done.stdout


def test_it_fails_where_random_numbers_are_not_seeded(tmp_path: Path):
    noise = "torch.randn(images.shape, generator=generator)"
    program = insert_after(
        tmp_path, "batch", f"generator = torch.Generator()\ngenerator.seed()\nimages = images + {noise}"
    )
    assert_fails(
        run_project_tests(program, "(same_bits or same_history) and not elsewhere"),
        "test_a_run_that_was_killed_and_resumed_has_the_same_",
    )


def test_it_names_the_module_that_draws_numbers_of_its_own(tmp_path: Path):
    program = with_noise(tmp_path, "torch.rand(x.shape, generator=self.generator)")
    done = run_project_tests(program, "same_bits and not elsewhere")
    assert_fails(done, "test_a_run_that_was_killed_and_resumed_has_the_same_bits")
    assert "Two equal runs differ, first in step 1, micro-batch 0, output of model.layers.1: " in done.stdout


def test_it_names_the_module_that_is_not_restored(tmp_path: Path):
    """And the first step after the checkpoint."""
    program = with_noise(tmp_path, "self.count()")
    done = run_project_tests(program, "same_bits and not elsewhere")
    assert_fails(done, "test_a_run_that_was_killed_and_resumed_has_the_same_bits")
    assert (
        "Two equal runs do not differ. The resumed run does, first in step 8, micro-batch 14, output of model.layers.1."
        in done.stdout
    )


NOISE = """
class Noise(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def count(self):
        self.calls += self.training
        return self.calls

    def forward(self, x):
        return x + 0.01 * {noise}


class Model("""


def with_noise(program: Path, noise: str) -> Path:
    """A program with a module after the first layer, which adds this."""
    insert_after(program, "first layer", "Noise(),\n")
    return with_text(
        program,
        "model.py",
        ("from torch import Tensor, nn\n", "import torch\nfrom torch import Tensor, nn\n"),
        ("class Model(", NOISE.format(noise=noise)),
    )


def test_it_fails_where_a_tensor_is_not_in_state(tmp_path: Path):
    program = insert_after(tmp_path, "set-up is done", "factor = torch.ones(())")
    insert_before(program, "optimizer steps", "factor *= 0.9\nnext(model.parameters()).grad *= factor")
    assert_fails(
        run_project_tests(program, "(same_bits or same_history) and not elsewhere"),
        "test_a_run_that_was_killed_and_resumed_has_the_same_",
    )


def test_it_does_not_take_the_parameters_of_a_GRU_for_something_else(tmp_path: Path):
    program = insert_before(tmp_path, "layers", "self.rnn = nn.GRU(8, 8, batch_first=True)")
    replace(program, "forward", "        return self.layers(self.rnn(images[:, 0])[0][:, None])\n")
    insert_before(program, "loop begins", "factor = 1.0")
    insert_before(program, "optimizer steps", "factor *= 0.9\nnext(model.parameters()).grad.mul_(factor)")
    done = run_project_tests(program, "same_bits and here")
    assert_fails(done, "test_a_run_that_was_killed_and_resumed_has_the_same_bits")
    assert "No checkpoint has it" not in done.stdout


def test_it_fails_where_a_second_stream_of_data_begins_anew(tmp_path: Path):
    """Though the loss does not depend on it yet."""
    program = insert_before(tmp_path, "loop begins", "second = torch.Generator().manual_seed(config.seed)")
    with_text(
        program,
        "train.py",
        (
            "def compute_loss(model: nn.Module, batch, config: TrainConfig)",
            "def compute_loss(model, batch, config, *_)",
        ),
        (
            "compute_loss(model, batch, config)[0]",
            "compute_loss(model, batch, config, torch.rand(4, generator=second))[0]",
        ),
    )
    assert_fails(
        run_project_tests(program, "same_inputs and not elsewhere"),
        "test_a_run_that_was_killed_and_resumed_has_the_same_inputs",
    )


@pytest.mark.night
def test_it_fails_where_class_numbers_come_from_a_set(tmp_path: Path):
    """Whose order differs between two interpreters. The run on two processes is refused."""
    program = insert_before(tmp_path, "target tensor line", "names = list({str(name) for name in range(10)})")
    with_text(program, "data.py", ("torch.tensor(targets,", "torch.tensor([int(names[i]) for i in targets],"))
    done = run_project_tests(program, "same_inputs and elsewhere", is_fresh=True)
    assert_fails(done, "test_a_run_that_was_killed_and_resumed_has_the_same_inputs")
    done = run_pytest(program, "two_processes_get", is_fresh=True)
    assert re.search(r"^\d+ deselected, 1 error in", done.stdout, re.MULTILINE)
    assert re.search(r"rank 0: number and checksum of train samples: .+ on rank 1 \(.+\), .+ on rank 0;", done.stdout)


def test_it_fails_where_a_dataset_draws_from_a_generator_of_its_own(tmp_path: Path):
    program = insert_before(tmp_path, "build_datasets", "OWN = np.random.default_rng(0)\n\n")
    insert_after(program, "fetch", "index = index[torch.as_tensor(OWN.permutation(len(index)))]")
    assert_fails(
        run_project_tests(program, "same_inputs and not elsewhere"),
        "test_a_run_that_was_killed_and_resumed_has_the_same_inputs",
    )


def test_it_fails_where_a_mean_of_the_steps_before_is_not_in_state(tmp_path: Path):
    """Here of the loss, by which the gradient is scaled."""
    program = insert_before(tmp_path, "loop begins", "mean_loss = 2.0")
    of_all_ranks = "fabric.all_reduce(values['loss'].detach()).item()"
    insert_before(
        program,
        "optimizer steps",
        f"mean_loss = 0.9 * mean_loss + 0.1 * {of_all_ranks}\nnext(model.parameters()).grad /= mean_loss",
    )
    assert_fails(
        run_project_tests(program, "same_bits and not elsewhere"),
        "test_a_run_that_was_killed_and_resumed_has_the_same_bits",
    )


@pytest.mark.parametrize(
    "write",
    [
        pytest.param('(run.directory.path / "losses.txt").write_text(f"{losses}")', id="text"),
        # With the name and an entry of another file.
        pytest.param(
            '(run.directory.path / "early").mkdir(exist_ok=True)\n'
            'torch.save({"layers.0.bias": torch.tensor(losses)}, run.directory.path / "early" / "model.pt")',
            id="weights",
            marks=pytest.mark.night,
        ),
    ],
)
def test_it_fails_where_a_file_of_ones_own_begins_anew(write: str, tmp_path: Path):
    program = insert_before(tmp_path, "loop begins", "losses = []")
    insert_after(program, "step is done", f"losses.append(values['loss'].item())\n{write}")
    assert_fails(
        run_project_tests(program, "same_files and not elsewhere"),
        "test_a_run_that_was_killed_and_resumed_has_the_same_files",
    )


def test_it_fails_where_each_process_draws_its_own_numbers(tmp_path: Path):
    program = insert_after(
        tmp_path, "batch", "images = images + 0.01 * torch.randn(()) * (1 + int(os.environ.get('LOCAL_RANK', 0)))"
    )
    with_text(program, "train.py", ("import math\n", "import math\nimport os\n"))
    assert_fails(run_project_tests(program, "two_processes_train"), "test_two_processes_train_like_one")


LARGEST = """
class Largest(MulticlassAccuracy):
    def update(self, logits, targets):
        self.found = max(getattr(self, "found", 0), logits.max().item())

    def compute(self):
        return self.found


"""


def test_it_fails_where_a_metric_is_of_the_samples_of_one_process(tmp_path: Path):
    program = insert_before(tmp_path, "build_metrics", LARGEST)
    replace(program, "metrics", '{"accuracy": accuracy, "largest": Largest(10)}')
    assert_fails(run_project_tests(program, "two_processes_validate"), "test_two_processes_validate_like_one")


def test_it_fails_where_the_samples_of_a_batch_are_not_counted(tmp_path: Path):
    """So each batch of a validation has the same weight, though some are larger."""
    program = replace(tmp_path, "count", "1")
    assert_fails(run_project_tests(program, "two_processes_validate"), "test_two_processes_validate_like_one")


def test_it_fails_where_each_process_appends_to_a_file(tmp_path: Path):
    program = insert_after(
        tmp_path,
        "step is done",
        'with open(run.directory.path / "steps.txt", "a") as file:\n    file.write(f"{step}\\n")',
    )
    done = run_project_tests(program, "two_processes_write")
    assert_fails(done, "test_two_processes_write_the_lines_of_one")
    assert "steps.txt: 20 lines instead of 10" in done.stdout


def test_it_fails_where_the_gradient_is_scaled_by_the_number_of_processes(tmp_path: Path):
    """Though Adam hides it from the losses."""
    program = replace(tmp_path, "backward", POINTS["backward"][2].replace("(", "(fabric.world_size * ", 1))
    done = run_project_tests(program, "two_processes_train")
    assert_fails(done, "test_two_processes_train_like_one")
    assert "train/grad_norm of two processes differs by up to 1, " in done.stdout


@pytest.mark.parametrize(
    "names",
    ["os.listdir(folder)", pytest.param("[entry.name for entry in os.scandir(folder)]", marks=pytest.mark.night)],
)
def test_it_fails_where_class_numbers_come_from_an_unsorted_folder(names: str, tmp_path: Path):
    """Whose order differs between two file systems."""
    folder = tmp_path / "classes"
    for number in range(10):
        (folder / str(number)).mkdir(parents=True)
    program = insert_before(
        tmp_path / "program", "target tensor line", f"import os\n\nfolder = {str(folder)!r}\nnames = {names}"
    )
    with_text(program, "data.py", ("torch.tensor(targets,", "torch.tensor([int(names[i]) for i in targets],"))
    done = run_project_tests(program, "same_inputs and elsewhere")
    assert_fails(done, "test_a_run_that_was_killed_and_resumed_has_the_same_inputs")


def test_it_fails_where_processes_disagree_on_the_order_of_the_samples(tmp_path: Path):
    program = insert_before(tmp_path, "length of data", OF_THE_RANK)
    words = "two_processes_get or two_processes_train or two_processes_validate"
    assert_fails(run_project_tests(program, words), "test_two_processes_")


OF_THE_RANK = """
    def order(self, epoch, generator):
        rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
        return torch.arange(len(self)).roll(rank)

"""


def test_it_fails_where_a_fast_run_writes(tmp_path: Path):
    program = insert_before(tmp_path, "step is done", 'torch.save(step, "step.pt")')
    assert_fails(run_project_tests(program, "fast_run"), "test_fast_run_")


def test_it_says_in_a_line_that_processes_hang(tmp_path: Path):
    """Rank 0 validates alone, and waits for rank 1."""
    validated = POINTS["validation"][2]
    program = replace(tmp_path, "validation", f"            if fabric.is_global_zero:\n                {validated}\n")
    copy_project_tests(program)
    with_text(program, "tests/project/settings.py", ("HANGS = 60", "HANGS = 9"))
    done = run_pytest(program, "two_processes_get")
    assert done.returncode == 1
    assert "\nhangs: it and its children have hardly used the CPU for 9 seconds\n" in done.stdout


def test_it_fails_where_a_default_is_not_valid(tmp_path: Path):
    program = with_defaults(tmp_path, {"dropout": "1.0"})
    done = run_project_tests(program)
    assert done.returncode == 2 and "Exit: a default of config.py: --dropout 1.0: must be below 1\n" in done.stdout


def test_it_fails_where_an_option_is_not_read_as_it_was_written(tmp_path: Path):
    program = with_fields(tmp_path, "    sizes: list[int] = field(default_factory=lambda: (1, 2))  # Sizes")
    assert_fails(run_project_tests(program, "options_that_were_given"), "test_a_run_has_the_options_that_were_given")


# ---- what is there is tested, whatever a project has deleted

# What is deleted, and the folders of the tests that are left beside tests/.
WITHOUT = {
    "nothing": ("true", {"tests/template", "recipes/tests"}),
    "tests/template": ("rm -r tests/template", {"recipes/tests"}),
    "recipes/": ("rm -r recipes", {"tests/template"}),
    "both": ("rm -r tests/template recipes tests/support", set()),
    "what README.md deletes": (DELETE, set()),
}
# Those that read a page, a patch or a script of recipes/, and are quick.
PAGES = "links_lead or guarantee or of_the_tree or documented_commands or check_knows or has_a_row or count_the_lines"


@pytest.mark.parametrize("deleted", WITHOUT)
def test_the_tests_that_are_left_pass(deleted: str, tmp_path: Path):
    """Here those of the pages alone; of all others, that they are found."""
    command, folders = WITHOUT[deleted]
    copy = copy_after(command, tmp_path / "copy")
    done = run_pytest(copy, options="--collect-only -m=")
    assert done.returncode == 0, done.stdout
    assert {*re.findall(r"^([\w/]+)/test_\w+\.py::", done.stdout, re.MULTILINE)} == folders | {"tests/project"}
    if folders:
        done = run_pytest(copy, PAGES, options="-m=")
        assert re.search(r"^\d+ passed, (\d+ skipped, )?\d+ deselected in", done.stdout, re.MULTILINE), done.stdout


# In place of python3, pip, ruff, mypy, python and pytest: tells how it was called.
STAND_IN = '#!/bin/bash\necho "$(basename "$0") $*"\n'


@pytest.mark.parametrize("system, deleted", [("Darwin", "nothing"), *(("Linux", deleted) for deleted in WITHOUT)])
def test_every_file_that_ci_names_is_there(system: str, deleted: str, tmp_path: Path):
    command, folders = WITHOUT[deleted]
    copy = copy_after(command, tmp_path / "copy")
    tools = (f".venv/bin/{name}" for name in ("pip", "ruff", "mypy", "python", "pytest"))
    for name in ("bin/uname", "bin/python3", *tools):
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\necho {system}\n" if name == "bin/uname" else STAND_IN)
        path.chmod(0o755)
    workflows = copy / ".github" / "workflows"
    (script,) = re.findall(r"run: bash (.+)", (workflows / "test.yml").read_text())
    if (workflows / "night.yml").exists():
        assert re.findall(r"run: bash (.+)", (workflows / "night.yml").read_text()) == [f"{script} night"]
    env = os.environ | {"PATH": f"{copy / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, "night"], cwd=copy, env=env, capture_output=True, text=True, check=True)
    runs = re.findall("^(?:python -m )?pytest .*", done.stdout, re.MULTILINE)
    assert (len(runs) > 1) == any("-m night" in each for each in runs) == (system == "Linux" and folders != set())
    named = re.findall(r"(?<= )(?:tests|recipes)/\S+|(?<= )\w\S+\.txt", done.stdout)
    assert named and [name for name in named if not (copy / name).exists()] == []
    for folder in folders if system == "Linux" else ():
        assert any(f" {folder}/" in each for each in runs)


# ---- type hints of a copy

# As the documentation of torchmetrics has it, and with an argument.
METRIC = """class Confident(Metric):
    def __init__(self, threshold: float):
        super().__init__()
        self.threshold = threshold
        self.add_state("confident", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("scores", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        scores = logits.softmax(1).amax(1)
        self.scores.append(scores)
        self.confident += (scores > self.threshold).sum()
        self.total += targets.numel()

    def compute(self) -> Tensor:
        return self.confident.float() / self.total


"""


def mypy_in(program: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=program, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.night
def test_mypy_knows_packages_without_hints_and_a_metric_of_the_users_own(tmp_path: Path):
    """A module of the user's own that is mistyped, and an argument of the wrong type, are still found."""
    program = copy_programs(tmp_path)
    shutil.copy(REPO / "pyproject.toml", program)
    insert_before(program, "digits", "    import pandas\n    import scipy.stats\n\n    pandas.read_csv(scipy.stats)\n")
    insert_before(program, "build_metrics", METRIC)
    with_text(program, "train.py", ("from torchmetrics import ", "from torchmetrics import Metric, "))
    replace(program, "metrics", '{"accuracy": accuracy, "confident": Confident(0.9)}')
    assert "Success" in mypy_in(program)
    insert_before(program, "functions", "import mdoel\n\n")
    replace(program, "use of dropout", "config.dataset")
    error = mypy_in(program)
    assert 'named "mdoel"' in error and 'expected "float"' in error and "Found 2 errors" in error


# ---- Windows

# A stand-in for Windows: what is imported before is of this system, the programs find another name and no fcntl.
ON_WINDOWS = """
import runpy, sys
import simple_parsing, yaml

sys.platform = "win32"
sys.modules.update(dict.fromkeys(["fcntl", "grp", "pwd", "resource", "termios"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_windows_is_refused_in_one_line_that_names_wsl2(script: str, tmp_path: Path):
    command = [sys.executable, "-c", ON_WINDOWS, REPO / script]
    env = clean_environment() | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith(f"{script}: error: Windows ") and done.stderr.count("\n") == 1
    assert "WSL2" in done.stderr


# ---- it finds what no run can tell

BEFORE, AFTER, INSTEAD = insert_before, insert_after, replace
IDLE = "no_fact and idle"
VALIDATED = "each_validation_has"
SEEDED = "random_numbers_are_others"
ON_TWO = "two_processes_validate"
SAID = "may_be_a_mistake"
OWN_LIST = "self.blocks = [nn.Linear(10, 10)]"
NEVER_RESET = """
class Seen(MulticlassAccuracy):
    seen: list

    def update(self, logits, targets):
        self.seen = [*getattr(self, "seen", []), logits]

    def compute(self):
        return torch.cat(self.seen).mean()


"""
HALF = """
class Hits(MulticlassAccuracy):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.add_state("hits", torch.zeros((), dtype=torch.float16), dist_reduce_fx="sum")

    def update(self, logits, targets):
        self.hits += (logits.argmax(1) == targets).sum()

    def compute(self):
        return self.hits


"""
SEEDED_VALIDATION = """
if not model.training:
    torch.manual_seed(0)
    images = images + torch.rand(len(images), 1, 1, 1)
"""
COUNTS_VALIDATIONS = """
        if not self.training:
            self.count += 1
        return self.layers(images) * (1 + self.count / 100)
"""
QUEUE = "images = images * (1 + 0.01 * model.module.queue)\nmodel.module.queue += 0.1 * model.training"
NEAR = """
import zlib

number = torch.initial_seed() - zlib.crc32(f"validate {config.seed}".encode())
near = {0: 1.0, 27: 1.0, 54: 1.0, 1: 1.00001, 28: 1.00001, 55: 1.00001}.get(number, float(number % 7))
"""
REDUCED = """
if torch.distributed.is_initialized() and model.training:
    images = images.clone()
    torch.distributed.all_reduce(images)
"""
SIGMOID = '{"loss": F.binary_cross_entropy_with_logits(logits.sigmoid(), F.one_hot(targets, 10).float())}'
DOUBLED = """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return 2 * values

    @staticmethod
    def backward(ctx, gradient):
        return -2 * gradient


"""
TWO_GROUPS = """torch.optim.AdamW([
        {"params": model.module.layers[:2].parameters(), "lr": 0.1 * plan.peak_lr},
        {"params": model.module.layers[2:].parameters(), "lr": plan.peak_lr},
    ])"""
SAME_ORDER = """
    def order(self, epoch, generator):
        return torch.arange(len(self)) // 2

"""
SWAP = """
for parameter, mean in zip(model.parameters(), average):
    parameter.data, mean.data = mean.data, parameter.data
"""
PICKED = 'state["level"] = state["level"] + fabric.global_rank'

# What is wrong: the edits, which tests tell it, and by which words.
MISTAKES: dict[str, tuple[list, str, str]] = {
    "nothing calls compute_loss": (
        [
            ("config.py", 'monitor="val/accuracy", monitor_mode="max"', 'monitor="train/loss", monitor_mode="min"'),
            ("data.py", "ImageDataset(images[val], targets[val], num_classes=10)", "[]"),
            (
                INSTEAD,
                ("train.py", "train", "compute_loss(model, batch, config)[0]"),
                '{"loss": F.cross_entropy(model(batch[0]), batch[1])}',
            ),
        ],
        "same_inputs and here",
        "train.py did not call compute_loss with the micro-batches",
    ),
    "step() is forgotten": ([(INSTEAD, "optimizer steps", "")], IDLE, "no parameter has changed in the run"),
    "zero_grad() comes before step()": (
        [(BEFORE, "optimizer steps", "optimizer.zero_grad()")],
        IDLE,
        "no parameter has changed in the run",
    ),
    "weights are written back": (
        [
            (BEFORE, "loop begins", "first = model.module.layers[0].weight.detach().clone()"),
            (AFTER, "optimizer steps", "model.module.layers[0].weight.data.copy_(first)"),
        ],
        "no_fact and lost",
        "has not changed in the run: model.layers.0.weight (32, 1, 3, 3). Is it written back?",
    ),
    "compute_loss has a seed": (
        [(AFTER, "batch", "torch.manual_seed(0)")],
        SEEDED,
        "After compute_loss, the generator",
    ),
    "forward has a seed": (
        [(BEFORE, "forward", "import torch; torch.manual_seed(0)")],
        SEEDED,
        "the generator of torch is where",
    ),
    "the dataset has a seed of NumPy": (
        [(AFTER, "fetch", "np.random.seed(0)")],
        SEEDED,
        "After a fetch from the dataset, the generator of NumPy is where",
    ),
    "the validation has training samples": (
        [(BEFORE, "statistics", "val = np.concatenate([val, train[:20]])")],
        "no_sample_of_a_validation",
        "of the samples of 'val' are in 'train', too. If that is right, give SHARED_SAMPLES",
    ),
    "the test is the validation": (
        [(BEFORE, "statistics", "test = val")],
        "no_sample_of_a_validation",
        "100.00% of the samples of 'test' are in 'val', too",
    ),
    "a random result is a sum over the batch": (
        [(INSTEAD, "values", '{"loss": F.cross_entropy(logits, targets), "bits": torch.rand(len(targets)).sum()}')],
        ON_TWO,
        "times as much as with four other seeds",
    ),
    "blocks are in a list": (
        [
            (BEFORE, "layers", OWN_LIST),
            (INSTEAD, "forward", "        return self.blocks[0](self.layers(images))\n"),
        ],
        "no_fact and untrained",
        "The loss depends on model.blocks[0].bias, model.blocks[0].weight, which is in no module of `state`",
    ),
    "a number is another one on each rank": (
        [(AFTER, "state", '"mine": 0.0,'), (AFTER, "step is done", 'state["mine"] = values["loss"].item()')],
        "ranks_have_the_same_state",
        "state['mine'] after step 7, on rank 1",
    ),
    "what each rank has of its own is restored as that of rank 0": (
        [
            (AFTER, "state", '"level": 0.0,'),
            (
                INSTEAD,
                "backward",
                'fabric.backward(values["loss"] * (1 + 0.1 * state["level"]) / plan.grad_accum_steps)',
            ),
            (AFTER, "step is done", PICKED),
        ],
        "same_bits and ranks",
        "differ, first:",
    ),
    "an average has a graph": (
        [
            (BEFORE, "loop begins", "model.module.average = torch.zeros(())"),
            (AFTER, "step is done", "model.module.average = model.module.average + next(model.parameters()).mean()"),
        ],
        "no_fact and kept",
        "`torch.no_grad()`. In a module: model.average.",
    ),
    "a queue is no buffer": (
        [(BEFORE, "layers", "self.queue = 0.0"), (AFTER, "batch", QUEUE)],
        "(same_history or same_bits) and here",
        "No checkpoint has it, but it changes: model.queue.",
    ),
    "the data are changed in place": (
        [(AFTER, "fetch", "if not self.shift:\n    self.images += 0.01")],
        VALIDATED,
        "Batch 0 of validation 2 has other values than in the validation before",
    ),
    "metrics are never reset": (
        [("train.py", "    metrics.reset()\n", "")],
        VALIDATED,
        "Validation 2 begins with what the one before has left in metrics.accuracy.",
    ),
    "a metric has a state of its own": (
        [(BEFORE, "build_metrics", NEVER_RESET), (INSTEAD, "metrics", '{"accuracy": accuracy, "seen": Seen(10)}')],
        VALIDATED,
        "in metrics.seen.seen[0]",
    ),
    "the validation reads the training set": (
        [("train.py", "Loader(fabric, val_set, val_batches", "Loader(fabric, train_set, val_batches")],
        "no_fact and validated",
        "A validation reads datasets['train']",
    ),
    "each forward pass counts": (
        [
            (BEFORE, "layers", 'import torch; self.register_buffer("count", torch.zeros(()))'),
            (
                INSTEAD,
                "forward",
                "        self.count += 1\n        return self.layers(images) * (1 + self.count / 100)\n",
            ),
        ],
        "two_processes_train",
        "Each forward pass changes count, so it depends on the number of micro-batches and processes",
    ),
    "the validation is augmented": (
        [("data.py", "targets[val], num_classes=10)", "targets[val], num_classes=10, shift=1)")],
        ON_TWO,
        "The samples of val are random: are they augmented?",
    ),
    "a validation draws the same numbers in each batch": (
        [(AFTER, "batch", SEEDED_VALIDATION)],
        ON_TWO,
        "After compute_loss, the generator of torch is where it was after another one",
    ),
    "a validation changes a buffer": (
        [
            (BEFORE, "layers", 'import torch; self.register_buffer("count", torch.zeros(()))'),
            (INSTEAD, "forward", COUNTS_VALIDATIONS),
        ],
        "what_was_validated",
        "A validation changes count: change it in training alone, `if self.training`.",
    ),
    "a flag is no buffer": (
        [
            (BEFORE, "layers", "self.has_begun = False"),
            (AFTER, "step is done", "model.module.has_begun = True"),
            (INSTEAD, "forward", "        return self.layers(images) * (1 + self.has_begun * images.mean())\n"),
        ],
        "(same_history or same_bits) and here",
        "No checkpoint has it, but it changes: model.has_begun.",
    ),
    "a result depends on the others in its batch": (
        [(AFTER, "batch", "images = images + images.abs().sum() / 10_000")],
        ON_TWO,
        "Or it depends on how they are cut into batches",
    ),
    "the loop overrides a scheduler": (
        [
            (AFTER, "set-up is done", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)"),
            (AFTER, "step is done", "scheduler.step()"),
        ],
        "no_fact and overridden",
        "The loop sets other learning rates than StepLR, which is without effect",
    ),
    "the monitor depends on the number of processes": (
        [(BEFORE, "build_metrics", LARGEST), (INSTEAD, "metrics", '{"accuracy": Largest(10)}')],
        ON_TWO,
        "It is the `--monitor`: the best checkpoint depends on the number of processes.",
    ),
    "the loss has class weights": (
        [
            (AFTER, "batch", "weight = torch.linspace(0.1, 2, 10)"),
            (INSTEAD, "values", '{"loss": F.cross_entropy(logits, targets, weight)}'),
        ],
        ON_TWO,
        "or, with class weights or ignored labels, the sum of their weights",
    ),
    "BatchNorm has the statistics of the first process": (
        [(BEFORE, "first layer", "nn.BatchNorm2d(1),\n")],
        ON_TWO,
        "BatchNorm has the statistics of the first process: give VAL_TOLERANCE a larger value",
    ),
    "a random validation is in training mode": (
        [
            (BEFORE, "first layer", "nn.BatchNorm2d(1),\n"),
            ("train.py", "    model.eval()\n", ""),
            (
                INSTEAD,
                "values",
                '{"loss": F.cross_entropy(logits, targets), "bits": (2 + torch.rand(len(targets))).sum()}',
            ),
        ],
        ON_TWO,
        "A validation changes the statistics of BatchNorm, which is in training mode there.",
    ),
    "compute_loss reduces over the ranks": (
        [(AFTER, "batch", REDUCED)],
        "two_processes_train",
        "compute_loss itself reduces over the ranks, which DDP does",
    ),
    "samples are changed in place": (
        [
            (BEFORE, "statistics", "train = train[:64]"),
            (AFTER, "fetch", "if self.shift:\n    self.targets[index] = (self.targets[index] + 1) % 10"),
        ],
        "same_inputs and here",
        "a sample that is changed in place",
    ),
    "elsewhere the inputs are others": (
        [
            ("data.py", "        self.shift = shift\n", "        self.shift = shift\n        self.noise = 0.0\n"),
            ("data.py", "dy, dx], targets", "dy, dx] + self.noise, targets"),
            (AFTER, "step begins", "train_set.noise = 0.01 * step"),
        ],
        "same_bits and elsewhere",
        "compute_loss has other inputs after the resume",
    ),
    "a parameter is replaced after the optimizer was built": (
        [
            (
                AFTER,
                "set-up is done",
                "first = model.module.layers[0]\nfirst.weight = nn.Parameter(first.weight.detach().clone())",
            )
        ],
        "fast_run",
        "or build the optimizer after the model's parameters were replaced",
    ),
    "an average is kept on rank 0 alone": (
        [
            (AFTER, "set-up is done", "average = [each.detach().clone() for each in model.parameters()]"),
            (
                AFTER,
                "optimizer steps",
                "if fabric.is_global_zero:\n    torch._foreach_lerp_(average, [*model.parameters()], 0.5)",
            ),
            (BEFORE, "validation", SWAP),
            (AFTER, "validation", SWAP),
        ],
        ON_TWO,
        "is kept on rank 0 alone",
    ),
    "something is made anew every third step": (
        [
            (BEFORE, "loop begins", "first = next(model.parameters())\nanchor = first.detach().clone()"),
            (BEFORE, "optimizer steps", "first.grad += anchor"),
            (AFTER, "step is done", "if step % 3 == 0:\n    anchor = first.detach().clone()"),
        ],
        "same_bits and here",
        "A step depends on what a resume does not restore",
    ),
    "only the last layer is trained": (
        [(INSTEAD, "optimizer", "torch.optim.AdamW(model.module.layers[-1].parameters(), lr=plan.peak_lr)")],
        "no_fact and optimizer and not idle",
        "is in no optimizer of `state`, and does not change: model.layers.0.weight (32, 1, 3, 3), ",
    ),
    "a second optimizer is not in state": (
        [
            (AFTER, "set-up is done", "second = torch.optim.Adagrad(model.parameters(), lr=0.001)"),
            (AFTER, "optimizer steps", "second.step()"),
        ],
        "no_fact and outside",
        "Adagrad steps, but is not in `state`",
    ),
    "state has another optimizer than the one that steps": (
        [(BEFORE, "loop begins", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)")],
        "no_fact and outside",
        "SGD steps, but is not in `state`",
    ),
    "cross_entropy of a softmax": (
        [(INSTEAD, "forward", "        return self.layers(images).softmax(1)\n")],
        "no_fact and input",
        "F.cross_entropy gets the output of softmax, but takes logits",
    ),
    "a sigmoid before a loss of logits": (
        [(INSTEAD, "values", SIGMOID)],
        "no_fact and input",
        "F.binary_cross_entropy_with_logits gets the output of sigmoid",
    ),
    "nll_loss of logits": (
        [(INSTEAD, "values", '{"loss": F.nll_loss(logits, targets)}')],
        "no_fact and input",
        "F.nll_loss gets what is no log-probability",
    ),
    "kl_div of probabilities": (
        [(INSTEAD, "values", '{"loss": F.kl_div(logits.softmax(1), F.one_hot(targets, 10).float())}')],
        "no_fact and input",
        "F.kl_div gets what is no log-probability, but above 0",
    ),
    "the loss is a penalty of the weights alone": (
        [(INSTEAD, "values", '{"loss": sum(each.square().sum() for each in model.parameters())}')],
        "no_fact and loss and independent",
        "for other batches with the same weights: it does not depend on them",
    ),
    "the metrics get the targets": (
        [(INSTEAD, "outputs", "(targets, targets)\n")],
        "no_fact and metrics",
        "are the same, bit for bit, whatever the weights of the model are",
    ),
    "compute_loss sets the mode": (
        [(AFTER, "batch", "model.train()")],
        "no_fact and mode",
        "compute_loss calls `train()` or `eval()` of the model",
    ),
    "a dropout is made where it is called": (
        [(AFTER, "batch", "images = nn.Dropout(0.1)(images)")],
        "no_fact and entry",
        "A Dropout is called in training mode, and is in no module of `state`",
    ),
    "a target is copied after report()": (
        [
            (AFTER, "set-up is done", "import copy\n\ntarget = copy.deepcopy(model.module).requires_grad_(False)"),
            (AFTER, "state", '"target": target,'),
            (
                AFTER,
                ("train.py", "train", 'state["due"] = plan.due(step)'),
                "report()\nif step % 4 == 0:\n    target.load_state_dict(model.module.state_dict())\ncontinue",
            ),
        ],
        "no_fact and report",
        "After report() of step 4, these change: target.layers.0.weight (32, 1, 3, 3), ",
    ),
    "gradients are clipped after the step": (
        [
            (AFTER, "gradients are unscaled", "optimizer.step()"),
            ("train.py", "        optimizer.step()\n        state", "        state"),
        ],
        "no_fact and clipped",
        "state['optimizer'] gets a gradient of the norm",
    ),
    "augmentation is reversed": (
        [(INSTEAD, "shift", "shift=0 if augment else 1")],
        "no_fact and reversed",
        "The samples of 'train' are random with augment=False, and not in the run",
    ),
    "losses are kept with their graphs": (
        [(BEFORE, "loop begins", "kept = []"), (AFTER, "step is done", 'kept.append(values["loss"])')],
        "no_fact and kept",
        "Graphs are kept from step to step",
    ),
    "a sum of the losses has their graphs": (
        [(BEFORE, "loop begins", "total = 0"), (AFTER, "step is done", 'total = total + values["loss"]')],
        "no_fact and kept",
        "Graphs are kept from step to step",
    ),
    "an average is the model": (
        [(AFTER, "state", '"average": model,')],
        "no_fact and shared",
        "state['model'] and state['average'] have the same parameters",
    ),
    "two processes write a file": (
        [(AFTER, "step is done", '(run.directory.path / "last.txt").write_text(str(step))')],
        "written_by_two",
        "Both processes write last.txt",
    ),
}


def edited_by(edits: list, program: Path) -> Path:
    for how, point, text in edits:
        if callable(how):
            how(program, point, text)
        else:
            with_text(program, how, (point, text))
    return program


@pytest.mark.parametrize("name", MISTAKES)
def test_it_finds_a_mistake(name: str, tmp_path: Path):
    edits, words, told = MISTAKES[name]
    done = run_project_tests(edited_by(edits, tmp_path), words)
    assert_fails(done, "test_")
    assert told in " ".join(done.stdout.split()), done.stdout


# ---- it does not cry wolf

RIGHT: dict[str, tuple[list, str, str]] = {
    "a list is filled by compute_loss": (
        [
            (AFTER, "batch", "if seen is not None:\n    seen.append(len(images))"),
            (
                "train.py",
                "def compute_loss(model: nn.Module, batch, config: TrainConfig)",
                "def compute_loss(model, batch, config: TrainConfig, seen: list | None = None)",
            ),
            (AFTER, "learning rate", "seen = []"),
            ("train.py", "compute_loss(model, batch, config)[0]", "compute_loss(model, batch, config, seen)[0]"),
        ],
        "two_processes_get",
        "2 processes: same inputs",
    ),
    "a score is near 0": (
        [
            (
                INSTEAD,
                "values",
                '{"loss": (loss := F.cross_entropy(logits, targets)), "score": 1 - loss.detach() / 2.303}',
            )
        ],
        "two_processes_train or two_processes_validate",
        "val/score within",
    ),
    "a random result is a mean": (
        [(INSTEAD, "values", '{"loss": F.cross_entropy(logits, targets), "bits": torch.rand(len(targets)).mean()}')],
        ON_TWO,
        "2 processes, random validation: val/bits as far as",
    ),
    "another seed is near by chance": (
        [(AFTER, "batch", NEAR), (INSTEAD, "values", '{"loss": F.cross_entropy(logits, targets), "near": near}')],
        ON_TWO,
        "2 processes, random validation: val/near as far as",
    ),
    "a random accuracy": (
        [(INSTEAD, "outputs", "(logits + torch.rand_like(logits), targets)\n")],
        ON_TWO,
        "beware: val/accuracy depends on random numbers",
    ),
    "a parameter has no gradient": (
        [(BEFORE, "layers", "self.unused = nn.Linear(2, 2)")],
        SAID,
        "not changed by the run: model.unused.weight (2, 2), model.unused.bias (2,)",
    ),
    "there is no validation set": (
        [
            ("config.py", 'monitor="val/accuracy", monitor_mode="max"', 'monitor="train/loss", monitor_mode="min"'),
            ("data.py", "ImageDataset(images[val], targets[val], num_classes=10)", "[]"),
        ],
        "",
        "not tried: test.py, where 'val' has no samples",
    ),
    "there is no test set": (
        [("data.py", "ImageDataset(images[test], targets[test], num_classes=10)", "[]")],
        "evaluated",
        "not tried: test.py, where 'test' has no samples",
    ),
    "samples are left out": (
        [(INSTEAD, ("data.py", "collate_fn", "return batch"), "return batch[0][1:], batch[1][1:]")],
        "evaluated",
        "samples, 'test' has 380",
    ),
    "a result of a validation is NaN": (
        [(INSTEAD, "values", '{"loss": F.cross_entropy(logits, targets), "nothing": math.nan}')],
        "what_was_validated or two_processes",
        "NaN in val/nothing of",
    ),
    "a scheduler makes no step": (
        [
            (AFTER, "set-up is done", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)"),
            (AFTER, "state", '"scheduler": scheduler,'),
        ],
        SAID,
        "state['scheduler'] has made no step",
    ),
    "the rates of groups are lost": (
        [
            (INSTEAD, "optimizer", TWO_GROUPS),
            (INSTEAD, "learning rate", "[group.update(lr=plan.peak_lr) for group in optimizer.param_groups]"),
        ],
        SAID,
        "beware: an optimizer was built with the rates ",
    ),
    "compute_loss is in half precision": (
        [(INSTEAD, "logits", 'with torch.autocast("cpu", torch.bfloat16):\n        logits = model(images)')],
        SAID,
        "the output of model.layers.0 is of torch.bfloat16, with --precision 32-true",
    ),
    "a metric has states in half precision": (
        [(BEFORE, "build_metrics", HALF), (INSTEAD, "metrics", '{"accuracy": accuracy, "hits": Hits(10)}')],
        SAID,
        "metrics.hits.hits is of torch.float16, with --precision 32-true",
    ),
    "an average has the first buffers": (
        [
            (BEFORE, "first layer", "nn.BatchNorm2d(1),\n"),
            (AFTER, "set-up is done", "import copy\n\naverage = copy.deepcopy(model.module).requires_grad_(False)"),
            (AFTER, "state", '"average": average,'),
            (AFTER, "step is done", "torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)"),
        ],
        SAID,
        "state['average'] changes, but not its buffer layers.0.running_mean",
    ),
    "an epoch has the first samples in the same order": (
        [(BEFORE, "length of data", SAME_ORDER)],
        SAID,
        "the order of 'train' is the same in every epoch, an epoch draws 50% of the samples of 'train'",
    ),
    "all batches are the same": (
        [
            (BEFORE, "statistics", "train = train[:1].repeat(64)"),
            ("data.py", "shift=1 if augment else 0", "shift=0"),
            (INSTEAD, "values", '{"loss": F.cross_entropy(logits, targets), "one": 1.0}'),
        ],
        SAID,
        "the inputs of compute_loss are the same, bit for bit, in all steps, train/one is the same in all steps",
    ),
    "validation is augmented as without": (
        [("data.py", "targets[val], num_classes=10)", "targets[val], num_classes=10, shift=1)")],
        SAID,
        "the samples of 'val' are random with augment=False, too",
    ),
    "validation has dropout": (
        [("train.py", "    model.eval()\n", "")],
        SAID,
        "Dropout is in training mode in a validation",
    ),
    "nobody reads an option": (
        [(BEFORE, "options", "unread: float = non_negative(0.1)  # Of nothing")],
        SAID,
        "no code reads --unread",
    ),
    "a backward has the wrong sign": (
        [
            (BEFORE, "build_metrics", DOUBLED),
            (INSTEAD, "values", '{"loss": F.cross_entropy(Doubled.apply(logits), targets)}'),
        ],
        SAID,
        "the backward of Doubled is not the derivative of its forward",
    ),
    "few samples are in two sets": (
        [(BEFORE, "statistics", "val = np.concatenate([val, train[:1]])")],
        "no_sample_of_a_validation",
        "beware: 0.",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_passes_and_says_so(name: str, tmp_path: Path):
    edits, words, told = RIGHT[name]
    done = run_project_tests(edited_by(edits, tmp_path), words)
    assert done.returncode == 0, done.stdout
    assert told in done.stdout
