"""pyproject.toml has the ranges of the packages, requirements.txt the versions that CI tests, and versions.sh installs
either end of the ranges. A GPU that the installed torch cannot use is said at the start."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import torch
from helpers import ON_2, REPO, call, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
DEPENDENCIES = {canonicalize_name(Requirement(line).name): Requirement(line) for line in PROJECT["dependencies"]}
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
RANGES = DEPENDENCIES | {canonicalize_name(range_.name): range_ for range_ in EXTRAS}
REQUIREMENTS = (REPO / "requirements.txt").read_text()
PINNED = re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS + (REPO / "requirements-dev.txt").read_text(), re.MULTILINE)
TESTED = {canonicalize_name(name): Version(number) for name, number in PINNED}
CORE = sorted([*REPO.glob("*.py"), *REPO.glob("runtime/*.py")])
PAGE = (REPO / "docs" / "upgrades.md").read_text()
DOCUMENTED = {name: ends for name, *ends in re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)}


def imports(file: Path) -> set[str]:
    """The modules that a file imports, wherever in it; without what is behind a dot."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_the_files_name_the_same_packages():
    assert RANGES.keys() == TESTED.keys()
    needed = {canonicalize_name(name) for name in re.findall(r"^([\w-]+)==", REQUIREMENTS, re.MULTILINE)}
    assert needed == DEPENDENCIES.keys() | {"wandb"}


@pytest.mark.parametrize("name", TESTED)
def test_the_tested_version_lies_in_its_range(name: str):
    assert RANGES[name].specifier.contains(TESTED[name])


@pytest.mark.parametrize("name", RANGES)
def test_a_range_has_both_ends(name: str):
    operators = [specifier.operator for specifier in RANGES[name].specifier]
    assert operators.count(">=") == operators.count("<") == 1


def test_the_page_names_what_a_run_needs():
    assert {canonicalize_name(name) for name in DOCUMENTED} == DEPENDENCIES.keys() | {"wandb"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_page_has_the_lowest_version_and_the_newest_that_was_tested(name: str):
    (lowest, newest), range_ = DOCUMENTED[name], RANGES[canonicalize_name(name)]
    assert f">={lowest}" in map(str, range_.specifier) and range_.specifier.contains(newest)
    assert Version(newest) >= TESTED[canonicalize_name(name)]


def test_the_command_of_the_page_makes_uv_leave_torch_alone(tmp_path: Path):
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    (command,) = re.findall(r"^sed .*", PAGE, re.MULTILINE)
    before, after = tomllib.loads((REPO / "pyproject.toml").read_text()), tmp_path / "pyproject.toml"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    before["tool"]["uv"]["exclude-dependencies"] = ["torch"]
    assert tomllib.loads(after.read_text()) == before


@pytest.mark.parametrize("stolen", ["2.6.2", "2.6.3"])
def test_the_versions_with_stolen_credentials_are_left_out(stolen: str):
    assert not RANGES["lightning"].specifier.contains(stolen)


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(REPO)))
def test_every_package_that_a_core_file_imports_is_named(file: Path):
    known = sys.stdlib_module_names | {file.relative_to(REPO).parts[0].removesuffix(".py") for file in CORE}
    for module in imports(file) - known:
        packages = {canonicalize_name(package) for package in packages_distributions().get(module, [module])}
        assert packages & TESTED.keys(), f"requirements.txt and pyproject.toml lack {module}"
        assert packages & DEPENDENCIES.keys() or module == "wandb", f"{module} is imported, and is not in dependencies"


def test_an_installation_has_no_modules(tmp_path: Path):
    """`pip install .` brings the dependencies alone: an installed train.py would hide the one that is edited."""
    if Version(version("setuptools")) < Version("77"):
        pytest.skip("needs setuptools 77 or later")
    skipped = shutil.ignore_patterns(".*", "__pycache__", "[0-9]*-[0-9]*-*")
    copied = shutil.copytree(REPO, tmp_path / "copied", ignore=skipped)
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=copied, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {
        "fabric_template-0.1.dist-info",
    }


def wanted(folder: Path, end: str, pin: str = "") -> list[str]:
    """What versions.sh asks pip for, by a pip that prints it and fails."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "pip").write_text('#!/bin/bash\ncat "${@: -1}"\nexit 3\n')
    (folder / "bin" / "pip").chmod(0o755)
    script = REPO / "tests" / "template" / "versions.sh"
    env = os.environ | {"VENV": str(folder), "PIN": pin}
    done = subprocess.run([script, end], env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    return done.stdout.split()


def test_versions_sh_installs_an_end_of_every_range(tmp_path: Path):
    lines = {}
    for end in ("lowest", "newest", "beyond"):
        (tmp_path / end).mkdir()
        *lines[end], comes_along = wanted(tmp_path / end, end)
        assert comes_along == "pytorch-lightning!=2.6.2,!=2.6.3"
    ranges = [*PROJECT["dependencies"], *map(str, EXTRAS)]
    assert [*map(Requirement, lines["newest"])] == [*map(Requirement, ranges)]
    assert lines["lowest"] == [re.sub(r">=([^,]+).*", r"==\1", line) for line in lines["newest"]]
    assert lines["beyond"] == [re.sub(r",<[^,]+", "", line) for line in lines["newest"]]


def test_a_pin_of_versions_sh_takes_the_place_of_a_range(tmp_path: Path):
    lines = wanted(tmp_path, "lowest", "Torch==2.13.0 scipy<2")
    assert [line for line in lines if line.lower().startswith(("torch=", "scipy"))] == ["Torch==2.13.0", "scipy<2"]


def test_versions_sh_asks_for_an_end():
    script = REPO / "tests" / "template" / "versions.sh"
    done = subprocess.run([script, "tests/template/test_data.py"], capture_output=True, text=True)
    assert done.returncode == 2 and "versions.sh lowest" in done.stderr


# ---- a GPU that torch does not use

FAST = "train.py --fast_run"
UNUSED = f"this machine's NVIDIA GPU is not used by torch {torch.__version__}: "
NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="torch uses the GPU of this machine")
HAS_DEVICE_FILE = """
from pathlib import Path

exists = Path.exists
Path.exists = lambda path, **options: str(path) == "/dev/nvidia0" or exists(path, **options)
"""


def set_device_file(monkeypatch, is_there: bool) -> None:
    exists = Path.exists

    def answer(path: Path, **options) -> bool:
        return is_there if str(path) == "/dev/nvidia0" else exists(path, **options)

    monkeypatch.setattr(Path, "exists", answer)


@NO_GPU
def test_a_gpu_that_is_not_used_is_said_before_the_devices(tmp_path: Path, monkeypatch):
    set_device_file(monkeypatch, True)
    first, second, *others = call(FAST, tmp_path).stdout.splitlines()
    assert first.startswith(UNUSED) and second == "1 x cpu, 1 CPU thread(s), precision 32-true"
    assert not [line for line in others if "NVIDIA" in line]


@NO_GPU
@pytest.mark.night
def test_a_gpu_that_is_not_used_is_said_once_by_two_processes(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(HAS_DEVICE_FILE)
    printed = run(f"{FAST} {ON_2}", tmp_path, PYTHONPATH=str(tmp_path)).stdout
    assert printed.count("NVIDIA") == printed.count(UNUSED) == 1


@NO_GPU
@pytest.mark.parametrize(("options", "is_there"), [("--accelerator cpu", True), ("--accelerator auto", False)])
def test_nothing_is_said_where_the_cpu_was_asked_for_or_no_gpu_is_there(options, is_there, tmp_path: Path, monkeypatch):
    set_device_file(monkeypatch, is_there)
    assert call(f"{FAST} {options}", tmp_path).stdout.startswith("1 x cpu, 1 CPU thread(s), precision 32-true\n")
