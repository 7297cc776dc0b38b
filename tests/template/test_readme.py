"""What README.md and docs/editing.md show is true: the edits fit the code as it is and run, and so do the commands, in
their order. README.zh-CN.md shows the same as README.md."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from edits import insert_before, replace
from helpers import (
    LONG,
    ON_2,
    PREEMPTED,
    RECIPES,
    REPO,
    assert_same_run,
    call,
    checkpoint,
    clean_environment,
    diffs,
    edited,
    history,
    interrupt,
    killed_and_resumed,
    last_summary,
    needs_recipes,
    newest,
    run,
    terminate,
    weights,
    without_locks,
)

PAGES = sorted(str(path.relative_to(REPO)) for path in [*REPO.glob("*.md"), *REPO.glob("[!.]*/*.md")])
TEXT = {page: (REPO / page).read_text() for page in PAGES}
README = TEXT["README.md"]
RECIPES_BEGIN = TEXT.get("recipes/README.md", "").partition("| recipe |")[0]
DIFFS = diffs("docs/editing.md")
# What an edit needs, by a word in it.
OPTIONS = {'"mine"': "--dataset mine --data_dir .", "noise": "--noise 0.2"}
# What makes a command short, by a word in it: the options stay, these are put behind them.
SMALL = "--accelerator cpu --epochs 1 --limit_train_batches 4 --limit_val_batches 2 --width 4"
SHORT = {"train.py": SMALL, "tensorboard": "--inspect", "pytest": "--collect-only -n 0 tests/project"}


def commands(text: str) -> list[str]:
    """The commands of a page, those between two backticks included, without comments."""
    found = re.findall(r"^```bash\n(.*?)^```$|`((?:python|git|torchrun) [^`\n]+)`", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for block, inline in found for line in (block or inline).splitlines()]
    return [command for line in lines for command in line.split(" && ")]


def python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    """The code blocks of a page. Comments, which are translated, are left out, but for those of diffs."""
    found = re.findall(r"^```(\w*\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block if block.startswith("diff") else re.sub(r" +# .*", "", block) for block in found]


def test_the_diffs_are_found():
    assert len(DIFFS) == TEXT["docs/editing.md"].count("```diff") == 7


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_edit(number: int, tmp_path: Path):
    for split in ("train", "val", "test"):
        torch.save((torch.rand(200, 1, 8, 8), torch.randint(10, (200,))), tmp_path / f"{split}.pt")
    options = " ".join(option for word, option in OPTIONS.items() if word in DIFFS[number])
    done = call(f"{edited(DIFFS[number], tmp_path)}/train.py --accelerator cpu --fast_run {options}", tmp_path)
    assert "finished after 4 of 4 steps" in done.stdout


# ---- the loop, as docs/editing.md edits it

SKIP, BREAK, AFTER_LOOP = DIFFS[-3:]
STEPS = f"train.py {SMALL} --max_steps 8 --log_interval 1 --checkpoint_interval 1 --num_checkpoint_keep 0"


def test_a_step_that_is_skipped_changes_no_weights_and_is_logged_and_resumed(tmp_path: Path):
    program = edited(SKIP.replace("norm < 10", "norm < 10 and step % 5"), tmp_path / "program")
    whole, _ = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    call(f"{program}/{STEPS}", tmp_path)
    before, skipped, after = (checkpoint(tmp_path, f"step-{step:08}")["model"] for step in (4, 5, 6))
    torch.testing.assert_close(skipped, before, atol=0, rtol=0)
    assert not any(torch.equal(after[name], skipped[name]) for name in skipped)
    assert all(float(row["train/grad_norm"]) > 0 for row in history(tmp_path)) and len(history(tmp_path)) == 8


def test_a_criterion_of_ones_own_finishes_a_run_in_the_same_step_after_a_kill(tmp_path: Path):
    """The best accuracy is above 0.9 before the last of 80 steps."""
    program = edited(BREAK.replace("0.99", "0.9"), tmp_path / "program")
    whole, killed = killed_and_resumed(f"{program}/{LONG} --width 16", tmp_path)
    step = newest(whole)
    assert 24 < step < 80 and step == newest(killed) == last_summary(whole)["best_step"]
    assert last_summary(whole)["state"] == last_summary(killed)["state"] == "finished"
    before = without_locks(whole)
    assert f"finished after {step} of 80 steps" in call(f"{program}/train.py --resume auto", whole).stdout
    assert without_locks(whole) == before
    assert f"finished after {step} of 96 steps" in call(f"{program}/train.py --resume auto --epochs 12", whole).stdout


@pytest.fixture(scope="module")
def with_batchnorm(tmp_path_factory) -> Path:
    program = edited(AFTER_LOOP, tmp_path_factory.mktemp("program"))
    return replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width),\n")


def test_the_statistics_of_batchnorm_are_in_model_pt_alone(with_batchnorm: Path, tmp_path: Path):
    """They are those of the 32 micro-batches of an epoch. The same weights are there after a kill."""
    whole, _ = killed_and_resumed(f"{with_batchnorm}/{LONG}", tmp_path)
    final, saved = weights(whole), checkpoint(whole, "step-00000080")["model"]
    others = {name for name in final if not torch.equal(final[name], saved[name])}
    assert others == {"layers.1.running_mean", "layers.1.running_var", "layers.1.num_batches_tracked"}
    assert (final["layers.1.num_batches_tracked"], saved["layers.1.num_batches_tracked"]) == (32, 4 * 80)


def test_a_signal_leaves_the_statistics_of_batchnorm_to_the_resume(with_batchnorm: Path, tmp_path: Path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    call(f"{with_batchnorm}/{LONG}", whole)
    assert interrupt(f"{with_batchnorm}/{LONG}", stopped, terminate).returncode == PREEMPTED
    call(f"{with_batchnorm}/train.py --resume auto", stopped)
    assert_same_run(stopped, whole)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the repository, in which the commands run one after the other."""
    skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "[0-9]*-[0-9]*-*")
    return Path(shutil.copytree(REPO, tmp_path_factory.mktemp("readme") / "checkout", ignore=skipped))


COMMANDS = [*commands(README), *commands(RECIPES_BEGIN)]
# torchrun starts three interpreters. SHORT makes the others the same as `python -m pytest`.
AT_NIGHT = re.compile(r"torchrun|\.venv/bin/pytest|python -m pytest tests")


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=pytest.mark.night if AT_NIGHT.match(each) else ()) for each in COMMANDS],
)
def test_command(command: str, checkout: Path):
    """Each one needs those before it. What installs from the network, .ci/run runs."""
    if command == "python3 -m venv .venv" or command.removeprefix(".venv/bin/").startswith("pip install "):
        return
    if "nightly" in command:  # see the next test
        return
    command = command.removeprefix(".venv/bin/")
    command = " ".join([command, *(options for word, options in SHORT.items() if word in command)])
    interpreter, _, script = command.partition(" ")
    if interpreter == "python" and not script.startswith("-"):
        (run if "--devices 2" in command else call)(f"{checkout}/{script}", checkout)
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = clean_environment() | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, shell=True, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_run_that_the_readme_kills_ends_as_if_it_had_not_been(tmp_path: Path):
    """With other options; and the kill waits for a checkpoint of the middle of an epoch."""
    (example,) = [
        block for block in re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE) if "kill" in block
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    call(f"{LONG} --out_dir nightly", whole)
    script, _, options = LONG.partition(" ")
    example = example.replace(f"python {script}", f"{sys.executable} {REPO / script} {options}")
    waiting = re.sub(r"sleep \d+", "until ls *-nightly/checkpoints/step-*[26].ckpt; do sleep 0.1; done", example)
    assert waiting.count("until") == 1 and example.count(str(REPO / script)) == 2
    env = clean_environment()
    done = subprocess.run(["bash", "-c", waiting], cwd=killed, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.count("resumed from ") == 1 and "finished after 80 of 80" in done.stdout, done.stderr
    torch.testing.assert_close(weights(killed, "nightly"), weights(whole, "nightly"), atol=0, rtol=0)


def test_what_one_sees_is_what_a_run_prints(tmp_path: Path):
    """But for the numbers, and the rows of the table, whose widths go with them."""

    def lines(text: str) -> set[str]:
        return {re.sub(r"\d[\d.,e-]*", "#", line) for line in text.splitlines() if not re.match(r" +\d|\.", line)}

    whole, resumed, on_two = (block.strip() for block in blocks(README) if "finished after" in block)
    assert len(lines(whole)) >= 10 and lines(whole) <= lines(call(f"train.py {SMALL}", tmp_path).stdout)
    call(f"train.py {SMALL} --out_dir nightly", tmp_path)
    assert lines(resumed) <= lines(call("train.py --out_dir nightly --resume auto --epochs 6", tmp_path).stdout) | {
        "..."
    }
    assert lines(on_two) <= lines(run(f"train.py {SMALL} {ON_2}", tmp_path).stdout) | {"..."}


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_loop_is_shown_whole_as_it_stands(page: str):
    """Also with its comments, which are not translated."""
    (loop,) = python_of(TEXT[page])
    _, _, rest = (REPO / "train.py").read_text().partition("    # ---- the loop\n")
    assert textwrap.indent(loop, "    ") == rest.partition("    return run.finish()\n")[0]


def test_the_trained_model_can_be_used_elsewhere(tmp_path: Path):
    """With the samples of test.py, also where they are split at random."""
    program = replace(tmp_path / "program", "permutation", "np.random")
    insert_before(program, "statistics", 'print("test set", test[:5])')
    call(f"{program}/train.py {SMALL} --out_dir used", tmp_path)
    (folder,) = tmp_path.glob("*-used")
    (split,) = re.findall("test set .*", call(f"{program}/test.py --accelerator cpu --out_dir used", tmp_path).stdout)
    code, *_ = python_of(TEXT["docs/trained_model.md"])
    code = code.replace("20261122-102325-train_out", folder.name)
    (tmp_path / "use.py").write_text(f"import sys\n\nsys.path.insert(0, {str(program)!r})\n{code}")
    used = run(f"{tmp_path}/use.py", tmp_path).stdout
    assert re.fullmatch(rf"{re.escape(split)}\ntensor\(\d\)\n", used)


def test_both_languages_show_the_same():
    english, chinese = README, TEXT["README.zh-CN.md"]
    assert commands(english) == commands(chinese) and len(commands(english)) > 10
    assert blocks(english) == blocks(chinese)
    prose = [re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE) for text in (english, chinese)]
    headings, links = ([re.findall(pattern, text, re.MULTILINE) for text in prose]
                       for pattern in (r"^#+ ", r"\]\((.+?)\)"))  # fmt: skip
    assert headings[0] == headings[1]
    assert {*links[0], "README.md"} == {*links[1], "README.zh-CN.md"}


@pytest.mark.parametrize("page", PAGES)
def test_no_line_is_longer_than_120_columns(page: str):
    """But for rows of tables."""
    assert [line for line in TEXT[page].splitlines() if len(line) > 120 and not line.startswith("|")] == []


def prose_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str):
    targets = [target for target in re.findall(r"\]\((.+?)\)", prose_of(REPO / page)) if "://" not in target]
    for target in targets:
        file, _, heading = target.partition("#")
        path = ((REPO / page).parent / file).resolve() if file else REPO / page
        if path.is_relative_to(RECIPES) and not RECIPES.exists():
            continue
        assert path.exists(), target
        assert not heading or heading in anchors(path), target


@needs_recipes
def test_every_guarantee_names_tests_that_exist():
    tests = [
        name
        for path in (*REPO.glob("tests/template/test_*.py"), *RECIPES.glob("tests/test_*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text())
    ]
    words = re.findall(r"`-k (\w+)`", TEXT["docs/guarantees.md"])
    assert len(words) > 10 and [word for word in words if not any(word in name for name in tests)] == []


def test_every_file_of_the_tree_is_there_and_no_other_program():
    tree = README.partition("## Your own project")[2].split("```")[1]
    named = [name for line in tree.splitlines() for name in line.partition("  #")[0].split()]
    assert all((REPO / name).exists() for name in named if name != "recipes/")
    assert {name for name in named if name.endswith(".py")} == {
        name for name in os.listdir(REPO) if name.endswith(".py")
    }
