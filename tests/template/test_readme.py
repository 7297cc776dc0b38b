"""What README.md and CONTRIBUTING.md show is true: the commands run, in their order. README.zh-CN.md shows the same
code. The links of all pages lead somewhere."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from commands import LONG, RECIPES, REPO, call, clean_environment, execute
from comparisons import killed_and_resumed
from copies import blocks, copy_repository, diffs, edited, needs_recipes
from edits import replace
from outputs import checkpoint, rows, weights

PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("[!.]*/*.md")])
DIFFS = diffs("docs/editing.md")
# What makes a command short, by a word in it: the options stay, these are put behind them.
SMALL = "--accelerator cpu --epochs 1 --limit_train_batches 4 --limit_val_batches 2 --width 4"
SHORT = {"train.py": SMALL, "tensorboard": "--inspect", "pytest": "--collect-only -n 0 tests/project"}


def commands(page: str) -> list[str]:
    """The commands of a page, those between two backticks included, without comments."""
    text = (REPO / page).read_text() if (REPO / page).exists() else ""
    text = text.partition("| recipe |")[0]
    found = re.findall(r"^```bash\n(.*?)^```$|`((?:python|git|torchrun) [^`\n]+)`", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for block, inline in found for line in (block or inline).splitlines()]
    return [command for line in lines for command in line.split(" && ")]


# ---- docs/editing.md


def test_a_dataset_of_ones_own_trains(tmp_path: Path):
    for split in ("train", "val", "test"):
        torch.save((torch.rand(200, 1, 8, 8), torch.randint(10, (200,))), tmp_path / f"{split}.pt")
    call(f"{edited(DIFFS[0], tmp_path)}/train.py --accelerator cpu --fast_run --dataset mine --data_dir .", tmp_path)


def test_the_statistics_of_batchnorm_are_in_model_pt_alone(tmp_path: Path):
    """They are those of the 32 micro-batches of an epoch, also after a kill."""
    program = edited(DIFFS[-1], tmp_path)
    replace(program, "first layer", "nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width),\n")
    _, killed = killed_and_resumed(f"{program}/{LONG}", tmp_path)
    final, saved = weights(killed), checkpoint(killed, "step-00000080")["model"]
    others = {name for name in final if not torch.equal(final[name], saved[name])}
    assert others == {"layers.1.running_mean", "layers.1.running_var", "layers.1.num_batches_tracked"}
    assert (final["layers.1.num_batches_tracked"], saved["layers.1.num_batches_tracked"]) == (32, 4 * 80)


# ---- README.md


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the repository, in which the commands run one after the other."""
    return copy_repository(tmp_path_factory.mktemp("readme") / "checkout")


# What installs from the network, .ci/run runs; the run that is killed is in the next test.
ELSEWHERE = re.compile(r"python3 -m venv|(\.venv/bin/)?pip install|.*nightly")
# torchrun starts three interpreters. SHORT makes the others the same as `python -m pytest`.
AT_NIGHT = re.compile(r"torchrun|\.venv/bin/pytest|python -m pytest tests")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.night if AT_NIGHT.match(each) else ())
        for each in [*commands("README.md"), *commands("recipes/README.md")]
        if not ELSEWHERE.match(each)
    ],
)
def test_command(command: str, checkout: Path):
    """Each one needs those before it."""
    command = command.removeprefix(".venv/bin/")
    command = " ".join([command, *(options for word, options in SHORT.items() if word in command)])
    interpreter, _, script = command.partition(" ")
    if interpreter == "python" and not script.startswith("-"):
        execute(f"{checkout}/{script}", checkout)
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = clean_environment() | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, shell=True, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_run_that_the_readme_kills_goes_on_to_its_end(tmp_path: Path):
    """With other options; and the kill waits for a checkpoint of the middle of an epoch."""
    (example,) = [block for block in blocks("README.md", "bash") if "kill" in block]
    script, _, options = LONG.partition(" ")
    example = example.replace(f"python {script}", f"{sys.executable} {REPO / script} {options}")
    waiting = re.sub(r"sleep \d+", "until ls *-nightly/checkpoints/step-*[26].ckpt; do sleep 0.1; done", example)
    assert waiting.count("until") == 1 and example.count(str(REPO / script)) == 2
    command = ["bash", "-c", waiting]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.count("resumed from ") == 1 and "finished after 80 of 80" in done.stdout, done.stderr


def test_both_languages_show_the_same_code_and_the_loop_as_it_stands():
    """The comments of the loop are not translated."""
    pages = ("README.md", "README.zh-CN.md")
    assert commands(pages[0]) == commands(pages[1]) and len(commands(pages[0])) > 10
    shown = [[re.sub(r" +# .*", "", block) for block in blocks(page, r"\w*")] for page in pages]
    assert shown[0] == shown[1]
    _, _, rest = (REPO / "train.py").read_text().partition("    # ---- the loop\n")
    for page in pages:
        (loop,) = blocks(page, "python")
        assert textwrap.indent(loop, "    ") == rest.partition("    return run.finish()\n")[0]


def prose_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_pages_lead_to_files_and_headings():
    for page in PAGES:
        for target in re.findall(r"\]\((.+?)\)", prose_of(page)):
            file, _, heading = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            if "://" in target or (path.is_relative_to(RECIPES) and not RECIPES.exists()):
                continue
            assert path.exists() and (not heading or heading in anchors(path)), f"{page}: {target}"


@needs_recipes
def test_every_guarantee_names_tests_that_exist():
    command = [sys.executable, "-m", "pytest", "-m", "", "--collect-only"]
    found = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    names = [line.partition("::")[2].lower() for line in found.splitlines()]
    words = re.findall(r"`-k (\w+)`", (REPO / "docs" / "guarantees.md").read_text())
    assert len(words) > 10 and [word for word in words if not any(word in name for name in names)] == []


# ---- CONTRIBUTING.md


def test_the_seeded_loss_is_reproduced(tmp_path: Path):
    """To the last digit on the page: the digits behind it depend on the CPU and the number of threads."""
    page = (REPO / "CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^python (train\.py .*--epochs.*)$", page, re.MULTILINE)
    losses = {name: float(value) for name, value in re.findall(r"`(\w+/loss)`\s+(\d\.\d+)", page)}
    call(command, tmp_path)
    last = rows(tmp_path)[-1]
    assert len(losses) == 2
    assert {name: last[name] for name in losses} == pytest.approx(losses, abs=2e-6, rel=0)
