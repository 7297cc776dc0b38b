"""docs/upgrades.md: a copy of the template, edited, gets a later version of it by the commands of the page."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from edits import apply, copy_programs, replace, with_text
from helpers import REPO, call, diffs

PAGE = (REPO / "docs" / "upgrades.md").read_text()
*_, MERGE, RESTORE, DELETE, COPY, RECORD = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
OWN = re.search(r"`(git diff .+?)`", PAGE)[1]
CLONE = re.search(r"^git clone .+?(?=  +#)", (REPO / "README.md").read_text(), re.MULTILINE)[0]
ELEVEN = "2b78df0"  # the last version with eleven Python files side by side
RANGE = "741f19f"  # the last version whose loop is over a range
ADAMW = "torch.optim.AdamW(model.parameters(), lr=plan.peak_lr, weight_decay=config.weight_decay, fused=True)"
SGD = "torch.optim.SGD(model.parameters(), lr=plan.peak_lr, momentum=0.9, weight_decay=config.weight_decay)"
# Edits of these versions in lines that have changed since, made again.
AGAIN = {
    "train.py": [(ADAMW, SGD)],
    "config.py": [
        ('["digits"]', '["digits", "mine"]'),
        ("    dropout: float", "    noise: float = 0.1\n    dropout: float"),
    ],
}


def edit_optimizer(folder: Path) -> Path:
    return replace(folder, "optimizer", SGD)


def edit_loss(folder: Path, smoothing: float = 0.1) -> Path:
    smooth = f"F.cross_entropy(logits, targets, label_smoothing={smoothing})"
    loss = f"{smooth} if model.training else F.cross_entropy(logits, targets)"
    return replace(folder, "values", f'{{"loss": {loss}, "smooth": {smooth}}}')


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
    return shell(
        f"git add --all; git commit --quiet --allow-empty --message '{message}'; git rev-parse HEAD", folder
    ).strip()


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
    assert "torch.optim.SGD" in text and "label_smoothing=0.1" in text
    done = call(f"{project}/train.py --accelerator cpu --fast_run", project)
    assert "train/smooth" in done.stdout and "finished after 4 of 4 steps" in done.stdout


def test_a_clone_with_an_edited_loop_follows(template: Path, tmp_path: Path):
    clone = CLONE.replace("URL", str(template))
    project = Path(shell(f"{clone}\npwd", tmp_path).strip())
    commit(edit_optimizer(project), "my optimizer")
    later = commit(edit_loss(template), "another loss")
    shell(MERGE, project)
    assert_both_edits_train(project)
    assert shell("git merge-base HEAD template/main", project).strip() == later
    own = shell(OWN, project)
    assert "torch.optim.SGD" in own and "smooth" not in own


def test_a_conflict_is_marked_and_can_be_taken_back(template: Path, tmp_path: Path):
    shell(CLONE.replace("URL", str(template)), tmp_path)
    project = tmp_path / "my_project"
    before = commit(edit_loss(project, smoothing=0.2), "my loss")
    commit(edit_loss(template), "another loss")
    assert "CONFLICT (content): Merge conflict in train.py" in shell(MERGE, project, code=1)
    text = (project / "train.py").read_text()
    assert text.count("<<<<<<<") == 1 and len(text.split("<<<<<<<")[1].split(">>>>>>>")[0].splitlines()) < 15
    shell("git merge --abort", project)
    assert shell("git rev-parse HEAD; git status --short", project).strip() == before
    assert "label_smoothing=0.2" in (project / "train.py").read_text()


def test_what_was_deleted_stays_away_and_a_readme_of_ones_own_is_kept(template: Path, tmp_path: Path):
    (template / "tests" / "template").mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md", "tests/template/test_loop.py"):
        (template / name).write_text("first\n")
    commit(template, "pages and tests")
    shell(CLONE.replace("URL", str(template)), tmp_path)
    project = tmp_path / "my_project"
    shell("rm -r tests/template CHANGELOG.md; echo mine > README.md", project)
    commit(project, "my project")
    for name in ("README.md", "CHANGELOG.md", "tests/template/test_loop.py", "tests/template/test_new.py"):
        (template / name).write_text("second\n")
    commit(edit_loss(template), "another loss")
    assert "CONFLICT" in shell(MERGE, project, code=1)
    shell(DELETE, project)
    assert shell("git status --short; git ls-files tests CHANGELOG.md", project) == ""
    assert (project / "README.md").read_text() == "mine\n"
    assert "label_smoothing=0.1" in (project / "train.py").read_text()


def test_a_copy_without_history_follows_once_its_commit_is_recorded(template: Path, tmp_path: Path):
    """Though it has deleted more lines than it has edited."""
    (template / "tests" / "template").mkdir(parents=True)
    (template / "tests" / "template" / "test_loop.py").write_text("assert True\n" * 1000)
    (template / "model.py").write_text((REPO / "model.py").read_text() + "\n# later\n")
    copied = commit(template, "copied, with tests")
    commit(edit_loss(template), "another loss")
    project = tmp_path / "project"
    project.mkdir()
    edit_optimizer(project)
    shutil.copy(template / "model.py", project)
    *_, last = shell(COPY.replace("URL", str(template)), project).splitlines()
    assert last.split()[1] == copied

    unrelated = MERGE.replace("git merge", "git merge --allow-unrelated-histories")
    assert "CONFLICT (add/add): Merge conflict in train.py" in shell(unrelated, project, code=1)
    assert (project / "train.py").read_text().count("<<<<<<<") == 2, "both edits, which do not touch each other"
    shell("git merge --abort", project)
    before = (project / "train.py").read_text()
    shell(RECORD.replace("COMMIT", copied), project)
    assert (project / "train.py").read_text() == before
    shell(MERGE, project)
    assert_both_edits_train(project)


# ---- real versions


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Path:
    """A repository with the history of this one. Its last commit has the files as they are now."""
    if subprocess.run(["git", "cat-file", "-e", f"{ELEVEN}^{{commit}}"], cwd=REPO, capture_output=True).returncode:
        pytest.skip(f"this checkout has no history back to {ELEVEN}")
    folder = tmp_path_factory.mktemp("versions") / "template"
    shell(f"git clone --quiet --no-local '{REPO}' '{folder}'; cd '{folder}'; git checkout --quiet -B main", REPO)
    shell("git rm -r --quiet .", folder)
    for name in shell("git ls-files --cached --others --exclude-standard", REPO).splitlines():
        if (REPO / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    commit(folder, "this version")
    return folder


def edited_copy(versions: Path, version: str, folder: Path, deletes: bool) -> Path:
    """A copy of a version of the template with all edits that its pages show; `deletes`: and without what its README.md
    deletes."""
    clone = CLONE.replace("URL", str(versions))
    project = Path(shell(f"{clone}; git reset --quiet --hard {version}; pwd", folder).splitlines()[-1])
    page = (project / "README.md").read_text()
    editing = project / "docs" / "editing.md"  # in older versions they are in README.md
    shown = editing.read_text() if editing.exists() else page
    diffs = re.findall(r"^```diff\n(.*?)^```$", shown, re.DOTALL | re.MULTILINE)
    assert len(diffs) > 3
    apply("".join(diffs), project)
    if deletes:
        shell("\n".join(re.findall(r"^rm -r .+$", page, re.MULTILINE)), project)
        (project / "README.md").write_text("mine\n")
    commit(project, "my project")
    return project


def make_edits_again(project: Path) -> None:
    """What a user does where git has marked lines: takes those of the template, and edits them."""
    for name, pairs in AGAIN.items():
        path = project / name
        text, count = re.subn(r"<<<<<<< .*?\n=======\n(.*?)>>>>>>> .*?\n", r"\1", path.read_text(), flags=re.DOTALL)
        assert count == 1, name
        path.write_text(text)
        with_text(project, name, *pairs)


def assert_edits_are_there_and_train(project: Path, num_lines: int) -> None:
    """And nothing else is the project's own than so many lines."""
    added = re.findall(r"^\+(?!\+)(.*)", shell(OWN, project), re.MULTILINE)
    for edit in ("torch.optim.SGD", "MulticlassF1Score", "label_smoothing", '"mine"', "config.noise", "noise: float"):
        assert any(edit in line for line in added), edit
    assert len(added) == num_lines, "\n".join(added)
    assert sorted(path.name for path in project.glob("*.py")) == sorted(path.name for path in REPO.glob("*.py"))
    done = call(f"{project}/train.py --accelerator cpu --fast_run", project)
    assert "train/cross_entropy" in done.stdout and "val/f1" in done.stdout
    assert "finished after 4 of 4 steps" in done.stdout


@pytest.mark.parametrize(
    "version, file, old, new, num_lines",
    [
        (ELEVEN, "loggers.py", "self.printed + 30", "self.printed + 60", 13),
        (RANGE, "runtime/meters.py", "class Means:", "class Means:  # mine", 14),
    ],
    ids=["eleven files", "a loop over a range"],
)
def test_a_copy_of_an_older_version_follows_but_for_the_lines_that_both_have_changed(
    version: str, file: str, old: str, new: str, num_lines: int, versions: Path, tmp_path: Path
):
    """It has also edited a file that is in runtime/ now."""
    project = edited_copy(versions, version, tmp_path, deletes=False)
    with_text(project, file, (old, new))
    commit(project, "an edit that belongs in runtime/")
    if file.startswith("runtime/"):
        shell(RESTORE, project)
    printed = shell(MERGE, project, code=1)
    in_conflict = {name for name in shell("git diff --name-only --diff-filter=U", project).split()}
    assert in_conflict == {*AGAIN, *([] if file.startswith("runtime/") else [file])}, printed
    make_edits_again(project)
    if not file.startswith("runtime/"):
        shell(f"git rm --quiet {file}", project)
    shell("git add --all && git commit --no-edit", project)
    assert shell("git status --short; git diff template/main -- runtime", project) == ""
    assert_edits_are_there_and_train(project, num_lines)


def test_a_copy_of_this_version_gets_a_later_runtime_as_a_whole(versions: Path, tmp_path: Path):
    """With a file that is new, and without one that is gone, though the copy has edited what has changed."""
    template = tmp_path / "template"
    shell(f"git clone --quiet --branch main '{versions}' '{template}'", tmp_path)
    (template / "runtime" / "old.py").write_text("# gone later\n")
    this = commit(template, "a file that is gone later")
    project = edited_copy(template, this, tmp_path, deletes=False)
    line = "0.1 if self.is_terminal else 30"
    with_text(project, "runtime/console.py", (line, "1 if self.is_terminal else 60"))
    (project / "runtime" / "old.py").write_text("# mine\n")
    commit(project, "my runtime/")

    with_text(template, "runtime/console.py", (line, "0.1 if self.is_terminal else 10"))
    (template / "runtime" / "old.py").rename(template / "runtime" / "new.py")
    (template / "runtime" / "new.py").write_text("# another one\n" * 9)
    (template / "model.py").write_text((template / "model.py").read_text() + "\n# later\n")
    commit(template, "later")
    printed = shell(MERGE, project, code=1)
    assert printed.count("CONFLICT") == 2 and "runtime/console.py" in printed and "runtime/old.py" in printed
    shell(f"git merge --abort\n{RESTORE}{MERGE}", project)
    assert shell("git status --short; git diff template/main -- runtime", project) == ""
    assert not (project / "runtime" / "old.py").exists()
    assert (project / "model.py").read_text().endswith("# later\n")
    shown = re.findall(r"^\+(?!\+)", "".join(diffs("docs/editing.md")), re.MULTILINE)
    assert_edits_are_there_and_train(project, len(shown))


def test_what_a_copy_of_an_older_version_has_deleted_stays_away(versions: Path, tmp_path: Path):
    project = edited_copy(versions, ELEVEN, tmp_path, deletes=True)
    assert "CONFLICT" in shell(MERGE, project, code=1)
    assert "train.py:" in shell(DELETE, project, code=2)  # it has conflict marks
    make_edits_again(project)
    shell(DELETE.partition("\n")[2], project)
    assert shell("git status --short", project) == ""
    assert (project / "README.md").read_text() == "mine\n"
    assert {name.rpartition("/")[0] for name in shell("git ls-files tests", project).split()} == {"tests/project"}
    for name in ("recipes/tests", "benchmarks", "CHANGELOG.md", ".github/workflows/night.yml"):
        assert not (project / name).exists(), name
    assert_edits_are_there_and_train(project, num_lines=13)
