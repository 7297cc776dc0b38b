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
from commands import REPO, call
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
RANGES = [*PROJECT["dependencies"], *EXTRAS]


def test_the_ranges_and_the_versions_that_are_tested_agree():
    """A range has both ends. Two versions of lightning were published with stolen credentials."""
    needed, others = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (REPO / file).read_text(), re.MULTILINE))
        for file in ("requirements.txt", "requirements-dev.txt")
    )
    tested = needed | others
    ranges = {range_.name: range_.specifier for range_ in map(Requirement, RANGES)}
    assert ranges.keys() == tested.keys()
    assert needed.keys() == {Requirement(line).name for line in PROJECT["dependencies"]} | {"wandb"}
    for name, range_ in ranges.items():
        operators = [specifier.operator for specifier in range_]
        assert operators.count(">=") == operators.count("<") == 1 and range_.contains(tested[name]), name
    assert not any(ranges["lightning"].contains(stolen) for stolen in ("2.6.2", "2.6.3"))


def test_the_command_of_the_page_makes_uv_leave_torch_alone(tmp_path: Path):
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    (command,) = re.findall(r"^sed .*", (REPO / "docs" / "upgrades.md").read_text(), re.MULTILINE)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    before, after = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (REPO, tmp_path))
    before["tool"]["uv"]["exclude-dependencies"] = ["torch"]
    assert after == before


def test_an_installation_has_no_modules(tmp_path: Path):
    """`pip install .` brings the dependencies alone: an installed train.py would hide the one that is edited."""
    if Version(version("setuptools")) < Version("77"):
        pytest.skip("needs setuptools 77 or later")
    skipped = shutil.ignore_patterns(".*", "__pycache__", "[0-9]*-[0-9]*-*")
    copied = shutil.copytree(REPO, tmp_path / "copied", ignore=skipped)
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=copied, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"fabric_template-0.1.dist-info"}


@pytest.mark.parametrize(
    "end, pattern, ours", [("lowest", r">=([^,]+).*", r"==\1"), ("newest", "", ""), ("beyond", r",<[^,]+", "")]
)
def test_versions_sh_installs_an_end_of_every_range_or_what_is_pinned(end, pattern, ours, tmp_path: Path):
    """With a pip that prints what it gets, and fails."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "pip").write_text('#!/bin/bash\ncat "${@: -1}"\nexit 3\n')
    (tmp_path / "bin" / "pip").chmod(0o755)
    command = [REPO / "tests" / "template" / "versions.sh", end]
    env = os.environ | {"VENV": str(tmp_path), "PIN": "Torch==2.13.0 scipy<2"}
    found = subprocess.run(command, env=env, capture_output=True, text=True).stdout.split()
    expected = [re.sub(pattern, ours, line) for line in RANGES[1:]]  # the first is that of torch
    assert found == ["Torch==2.13.0", *expected, "scipy<2", "pytorch-lightning!=2.6.2,!=2.6.3"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch uses the GPU of this machine")
def test_a_gpu_that_is_not_used_is_said_before_the_devices(tmp_path: Path, monkeypatch):
    """Not where the CPU was asked for, or no GPU is there."""
    exists = Path.exists

    def printed(options: str, is_there: bool) -> str:
        def answer(path: Path, **more) -> bool:
            return is_there if str(path) == "/dev/nvidia0" else exists(path, **more)

        monkeypatch.setattr(Path, "exists", answer)
        return call(f"train.py --fast_run {options}", tmp_path).stdout

    header = "1 x cpu, 1 CPU thread(s), precision 32-true\n"
    said, is_there, _ = printed("", True).partition(header)
    assert is_there and said.count("\n") == 1
    assert said.startswith(f"this machine's NVIDIA GPU is not used by torch {torch.__version__}")
    assert printed("--accelerator cpu", True).startswith(header)
    assert printed("", False).startswith(header)
