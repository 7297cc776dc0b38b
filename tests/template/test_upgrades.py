"""docs/upgrades.md: a copy of the template, edited, gets a later version of it by the commands of the page. And the
versions of the packages: pyproject.toml has their ranges, requirements.txt those that CI tests."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import REPO, call
from copies import blocks, copy_repository
from edits import copy_programs, replace
from packaging.requirements import Requirement
from packaging.version import Version

*_, MERGE, RESTORE, DELETE, COPY, RECORD = blocks("docs/upgrades.md", "bash")
OWN = re.search(r"`(git diff .+?)`", (REPO / "docs" / "upgrades.md").read_text())[1]
CLONE = re.search(r"^git clone .+?(?=  +#)", (REPO / "README.md").read_text(), re.MULTILINE)[0]
SGD = "torch.optim.SGD(model.parameters(), lr=plan.peak_lr, momentum=0.9, weight_decay=config.weight_decay)"
SMOOTH = "F.cross_entropy(logits, targets, label_smoothing=0.1)"


def edit_optimizer(folder: Path) -> Path:
    return replace(folder, "optimizer", SGD)


def edit_loss(folder: Path) -> Path:
    loss = "F.cross_entropy(logits, targets)"
    return replace(folder, "values", f'{{"loss": {SMOOTH} if model.training else {loss}, "smooth": {loss}}}')


def shell(commands: str, folder: Path, code: int = 0) -> str:
    """Runs the commands up to the first that fails, and returns what they print."""
    who = {f"GIT_{role}_{key}": "test@localhost" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env = own | who | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["bash", "-ec", commands], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def commit(folder: Path, message: str) -> str:
    """Commits all files; returns the commit."""
    commands = f"git add --all; git commit --quiet --allow-empty --message '{message}'; git rev-parse HEAD"
    return shell(commands, folder).strip()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A template with a history: an older version, and the one that is copied."""
    template = tmp_path / "template"
    template.mkdir()
    shell("git init --quiet --initial-branch main", template)
    (template / "train.py").write_text("older\n")
    commit(template, "older")
    (template / "train.py").unlink()
    copy_programs(template)
    commit(template, "copied")
    return template


def assert_both_edits_train(project: Path) -> None:
    text = (project / "train.py").read_text()
    assert SGD in text and SMOOTH in text
    done = call(f"{project}/train.py --accelerator cpu --fast_run", project)
    assert "train/smooth" in done.stdout and "finished after 4 of 4 steps" in done.stdout


def test_a_copy_without_history_follows_once_its_commit_is_recorded(template: Path, tmp_path: Path):
    """Though it has deleted more lines than it has edited. Then git tells which commit it has, and what is its own."""
    (template / "tests" / "template").mkdir(parents=True)
    (template / "tests" / "template" / "test_loop.py").write_text("assert True\n" * 1000)
    (template / "model.py").write_text((REPO / "model.py").read_text() + "\n# later\n")
    copied = commit(template, "copied, with tests")
    later = commit(edit_loss(template), "another loss")
    project = edit_optimizer(tmp_path / "project")
    shutil.copy(template / "model.py", project)
    *_, last = shell(COPY.replace("URL", str(template)), project).splitlines()
    assert last.split()[1] == copied

    before = (project / "train.py").read_text()
    shell(RECORD.replace("COMMIT", copied), project)
    assert (project / "train.py").read_text() == before
    shell(MERGE, project)
    assert_both_edits_train(project)
    assert shell("git merge-base HEAD template/main", project).strip() == later
    own = shell(OWN, project)
    assert SGD in own and "smooth" not in own


def test_what_was_deleted_stays_away_a_readme_is_kept_and_runtime_is_the_later_one(template: Path, tmp_path: Path):
    """Where other lines are in conflict, too, they are named, and nothing is committed before they are edited. The copy
    has edited runtime/, which then has a file that is new, and not the one that is gone."""
    names = ("README.md", "CHANGELOG.md", "tests/template/test_loop.py", "tests/project/test_project.py")
    for name in (*names, "runtime/old.py"):
        (template / name).parent.mkdir(parents=True, exist_ok=True)
        (template / name).write_text("# first\n")
    commit(template, "pages and tests")
    project = edit_optimizer(Path(shell(f"{CLONE.replace('URL', str(template))}\npwd", tmp_path).strip()))
    shell("rm -r tests/template CHANGELOG.md; echo mine | tee README.md runtime/old.py", project)
    point = ("runtime/console.py", "", "0.1 if self.is_terminal else 30")
    replace(project, point, "1 if self.is_terminal else 60")
    commit(project, "my project")

    for name in (*names, "tests/template/test_new.py", "runtime/new.py"):
        (template / name).write_text("# second\n")
    (template / "runtime" / "old.py").unlink()
    replace(replace(template, point, "0.1 if self.is_terminal else 10"), "optimizer", SGD.replace("0.9", "0.8"))
    commit(edit_loss(template), "later")
    assert "runtime/console.py" in shell(MERGE, project, code=1)
    assert "train.py" in shell(f"git merge --abort\n{RESTORE}{MERGE}", project, code=1)
    assert "train.py:" in shell(DELETE, project, code=2)
    marks = r"<<<<<<< .*?\n(.*?)=======\n.*?>>>>>>> .*?\n"
    mine = re.sub(marks, r"\1", (project / "train.py").read_text(), flags=re.DOTALL)
    (project / "train.py").write_text(mine)
    shell(DELETE.partition("\n")[2], project)
    assert shell("git status --short; git diff template/main -- runtime", project) == ""
    assert shell("git ls-files tests '*.md'", project).split() == ["README.md", "tests/project/test_project.py"]
    assert (project / "README.md").read_text() == "mine\n" and not (project / "runtime" / "old.py").exists()
    assert_both_edits_train(project)


# ---- versions of the packages


def test_the_ranges_and_the_versions_that_are_tested_agree():
    """A range has both ends. Two versions of lightning were published with stolen credentials."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    needed, others = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (REPO / file).read_text(), re.MULTILINE))
        for file in ("requirements.txt", "requirements-dev.txt")
    )
    tested = needed | others
    ranges = {range_.name: range_.specifier for range_ in map(Requirement, [*project["dependencies"], *extras])}
    assert ranges.keys() == tested.keys()
    assert needed.keys() == {Requirement(line).name for line in project["dependencies"]} | {"wandb"}
    for name, range_ in ranges.items():
        operators = [specifier.operator for specifier in range_]
        assert operators.count(">=") == operators.count("<") == 1 and range_.contains(tested[name]), name
    assert not any(ranges["lightning"].contains(stolen) for stolen in ("2.6.2", "2.6.3"))


def test_an_installation_has_no_modules(tmp_path: Path):
    """`pip install .` brings the dependencies alone: an installed train.py would hide the one that is edited."""
    if Version(version("setuptools")) < Version("77"):
        pytest.skip("needs setuptools 77 or later")
    copied = copy_repository(tmp_path / "copied")
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=copied, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"fabric_template-0.1.dist-info"}
