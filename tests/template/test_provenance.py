"""A run contains what made it: its source files, once per state, and in each checkpoint its config and the hash of each
file. A checkpoint can be evaluated far from its run."""

import shutil
from pathlib import Path

import pytest
import torch
from commands import SMALL, call
from edits import copy_programs, insert_before, replace
from mistakes import refuses
from outputs import run_dir

CSV = f"{SMALL} --lr_schedule constant --logger_name csv"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """A copy without git, with a package of its own, of which a file is imported, and with a script that nothing
    imports."""
    program = copy_programs(tmp_path_factory.mktemp("copy") / "program")
    (program / "parts" / "deep").mkdir(parents=True)
    (program / "parts" / "deep" / "blocks.py").write_text("SCALE = 1\n")
    (program / "parts" / "rest.py").write_text("SCALE = 1\n")
    (program / "make_data.py").write_text("SCALE = 1\n")
    return insert_before(program, "functions", "import parts.deep.blocks\n\n\n")


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("trained")
    call(f"{program}/train.py {CSV} --epochs 1", cwd)
    return run_dir(cwd)


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of the run, in a folder of the test."""
    return Path(shutil.copytree(trained, tmp_path / trained.name))


@pytest.fixture
def edited(program, tmp_path) -> Path:
    """A copy of the program, to be edited."""
    return Path(shutil.copytree(program, tmp_path / "edited"))


def codes(run: Path) -> list[Path]:
    return sorted(run.glob("provenance/code-*"))


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def test_a_run_has_its_source_files_and_config_and_is_resumed_by_its_own_copy(program, trained, copy, tmp_path):
    """No other files: the six, those of runtime/, what has been imported, and the rest of its package. A copy of them
    that a kill has cut off is made again. The config is in each checkpoint."""
    (code,) = codes(copy)
    (code / "train.py").write_text("")
    code.rename(code.with_suffix(".tmp"))  # a copy has its name only once it is whole
    call(f"{program}/train.py --resume auto --epochs 2", tmp_path)
    assert codes(copy) == [code]
    assert files(code) == {name: text for name, text in files(program).items() if name != "make_data.py"}
    for path in trained.glob("checkpoints/*.ckpt"):
        config = torch.load(path, weights_only=True)["checkpoint"]["config"]
        assert config == (trained / "config.yaml").read_text()
    assert "finished after 12 of 12" in call(f"{code}/train.py --resume train_out --epochs 3", tmp_path).stdout
    assert codes(copy) == [code]


def test_a_resume_and_test_py_name_the_files_that_have_changed_and_go_on(edited, copy, tmp_path):
    """The files are kept once per state."""
    replace(edited, "use of dropout", "0.0")
    (edited / "parts" / "deep" / "blocks.py").write_text("SCALE = 2\n")
    (edited / "make_data.py").write_text("SCALE = 2\n")
    changed = "changed since: train.py, parts/deep/blocks.py\n"
    tested = call(f"{edited}/test.py", tmp_path).stdout
    assert f"{copy.name}/checkpoints/best.ckpt on 380 test samples; {changed}" in tested
    assert f"step-00000004.ckpt; {changed}" in call(f"{edited}/train.py --resume auto --epochs 2", tmp_path).stdout
    assert len(codes(copy)) == 2
    assert "changed since" not in call(f"{edited}/train.py --resume auto --epochs 3", tmp_path).stdout
    assert len(codes(copy)) == 2


def test_a_file_that_is_edited_after_the_start_is_kept_as_it_ran_and_has_changed_since(edited, cwd):
    """In a step, while the data is loaded, which may take minutes, or while the packages are imported."""
    places = {"train.py": "build_datasets", "model.py": "digits", "config.py": "optimizer steps"}
    for name, point in places.items():
        insert_before(edited, point, f"open({str(edited / name)!r}, 'a').write('# edited\\n')")
    before = {name: (edited / name).read_text() for name in places}
    call(f"{edited}/train.py {CSV} --max_steps 1", cwd)
    (code,) = codes(run_dir(cwd))
    for name, text in before.items():
        assert (edited / name).read_text() == text + "# edited\n"
        assert (code / name).read_text() == text
    assert "changed since: train.py, config.py, model.py\n" in call(f"{edited}/test.py", cwd).stdout


def test_a_file_that_is_imported_later_joins_with_the_next_checkpoint_and_what_is_installed_does_not(edited, cwd):
    """Here in a validation; a resume names it, whether it has imported it or not. No source file is what a virtual
    environment in the project has, a folder, or a link to nowhere, such as Emacs makes while a buffer is not saved."""
    site = edited / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "library.py").write_text("")
    (edited / "late.py").write_text("SCALE = 1\n")
    (edited / "parts" / ".#rest.py").symlink_to("me@host.1:2")
    (edited / "parts" / "folder.py").mkdir()
    insert_before(edited, "functions", f"import sys\n\nsys.path.append({str(site)!r})\nimport library\n\n\n")
    insert_before(edited, "validation", "import late")
    call(f"{edited}/train.py {CSV} --epochs 2", cwd)
    first, second = sorted(codes(run_dir(cwd)), key=lambda code: len(files(code)))
    assert {*files(second)} - {*files(first)} == {"late.py"}
    assert [name for name in files(second) if "library" in name] == []
    for epochs, line in ((3, ""), (4, "; changed since: late.py\n")):
        if line:
            (edited / "late.py").write_text("SCALE = 2\n")
        for command in ("test.py --checkpoint last", f"train.py --resume auto --epochs {epochs}"):
            printed = call(f"{edited}/{command}", cwd).stdout
            assert line in printed and ("changed since" in printed) == bool(line)


def test_a_checkpoint_that_was_moved_away_from_its_run_is_evaluated(program, copy, tmp_path):
    """The path of one in a run means that run. Weights alone need a run."""
    here = tmp_path / "here"
    here.mkdir()
    expected = call(f"{program}/test.py", tmp_path).stdout.splitlines()[3:5]
    shutil.copy(copy / "checkpoints" / "best.ckpt", here / "good.ckpt")
    found = call(f"{program}/test.py --checkpoint here/good.ckpt", tmp_path).stdout.splitlines()
    assert found[2:4] == expected  # it is not said which run is meant
    assert found[-1] == "results here/test_test_good.json" and (here / "test_test_good.json").exists()
    older = tmp_path / "20200101-000000-train_out"
    shutil.copytree(copy, older)
    found = call(f"{program}/test.py --checkpoint {older.name}/checkpoints/best.ckpt", tmp_path).stdout
    assert f"results {older.name}/test_test_best.json" in found
    shutil.copy(copy / "model.pt", tmp_path)
    refuses(f"{program}/test.py --checkpoint ../model.pt", here, "config.yaml")
    assert "accuracy" in call(f"{program}/test.py --checkpoint model.pt --out_dir {copy}", tmp_path).stdout
