"""pyproject.toml has the ranges of the packages, requirements.txt the versions that CI tests, and versions.sh installs
either end of the ranges. A GPU that the installed torch cannot use is said at the start."""

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
import torch
from helpers import REPO, call
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
DEPENDENCIES = {canonicalize_name(Requirement(line).name): Requirement(line) for line in PROJECT["dependencies"]}
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
RANGES = DEPENDENCIES | {canonicalize_name(range_.name): range_ for range_ in EXTRAS}


def pins(file: str) -> dict[str, Version]:
    found = re.findall(r"^([\w-]+)==(\S+)$", (REPO / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): Version(number) for name, number in found}


NEEDED = pins("requirements.txt")
TESTED = NEEDED | pins("requirements-dev.txt")


def test_the_ranges_and_the_versions_that_are_tested_agree():
    """A range has both ends. Two versions of lightning were published with stolen credentials."""
    assert RANGES.keys() == TESTED.keys()
    assert NEEDED.keys() == DEPENDENCIES.keys() | {"wandb"}
    for name, range_ in RANGES.items():
        operators = [specifier.operator for specifier in range_.specifier]
        assert operators.count(">=") == operators.count("<") == 1 and range_.specifier.contains(TESTED[name]), name
    assert not any(RANGES["lightning"].specifier.contains(stolen) for stolen in ("2.6.2", "2.6.3"))


def test_the_command_of_the_page_makes_uv_leave_torch_alone(tmp_path: Path):
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    (command,) = re.findall(r"^sed .*", (REPO / "docs" / "upgrades.md").read_text(), re.MULTILINE)
    before, after = tomllib.loads((REPO / "pyproject.toml").read_text()), tmp_path / "pyproject.toml"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    before["tool"]["uv"]["exclude-dependencies"] = ["torch"]
    assert tomllib.loads(after.read_text()) == before


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
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"fabric_template-0.1.dist-info"}


SCRIPT = REPO / "tests" / "template" / "versions.sh"


def wanted(folder: Path, end: str, pin: str = "") -> list[str]:
    """What versions.sh asks pip for, by a pip that prints it and fails."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "pip").write_text('#!/bin/bash\ncat "${@: -1}"\nexit 3\n')
    (folder / "bin" / "pip").chmod(0o755)
    done = subprocess.run(
        [SCRIPT, end], env=os.environ | {"VENV": str(folder), "PIN": pin}, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    *lines, comes_along = done.stdout.split()
    assert comes_along == "pytorch-lightning!=2.6.2,!=2.6.3"
    return lines


def test_versions_sh_installs_an_end_of_every_range_or_what_is_pinned(tmp_path: Path):
    lowest, newest, beyond = (wanted(tmp_path / end, end) for end in ("lowest", "newest", "beyond"))
    assert [*map(Requirement, newest)] == [*map(Requirement, PROJECT["dependencies"]), *EXTRAS]
    assert lowest == [re.sub(r">=([^,]+).*", r"==\1", line) for line in newest]
    assert beyond == [re.sub(r",<[^,]+", "", line) for line in newest]
    pinned = wanted(tmp_path / "pinned", "lowest", "Torch==2.13.0 scipy<2")
    assert {*pinned} - {*lowest} == {"Torch==2.13.0", "scipy<2"} and len(pinned) == len(lowest) + 1


# ---- a GPU that torch does not use

NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="torch uses the GPU of this machine")
HEADER = "1 x cpu, 1 CPU thread(s), precision 32-true\n"
SAID = f"this machine's NVIDIA GPU is not used by torch {torch.__version__}"


@NO_GPU
@pytest.mark.parametrize(
    "options, is_there, is_said", [("", True, True), ("--accelerator cpu", True, False), ("", False, False)]
)
def test_a_gpu_that_is_not_used_is_said_before_the_devices(options, is_there, is_said, tmp_path: Path, monkeypatch):
    """Not where the CPU was asked for, or no GPU is there."""
    exists = Path.exists

    def answer(path: Path, **options) -> bool:
        return is_there if str(path) == "/dev/nvidia0" else exists(path, **options)

    monkeypatch.setattr(Path, "exists", answer)
    printed = call(f"train.py --fast_run {options}", tmp_path).stdout
    before, _, after = printed.partition(HEADER)
    assert (before.startswith(SAID) and before.count("\n") == 1) if is_said else before == ""
    assert after and "NVIDIA" not in after
