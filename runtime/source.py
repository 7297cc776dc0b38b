"""The source files, as they were when this process began, and what a run keeps of them and of its surroundings."""

import platform
import shlex
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the project
# The source files, in ROOT or a folder directly in it.
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")])
CODE = {str(path.relative_to(ROOT)): path.read_bytes() for path in FILES if path.is_file()}
SOURCES = {name: zlib.crc32(code) for name, code in CODE.items()}
TIMESTAMP = "%Y%m%d-%H%M%S"
# The commit, and the names of changed files; nothing without git. It takes no lock, which would fail a `git commit` at
# the same time, and starts no fsmonitor, which would be a program that the checkout names.
GIT_STATUS = "exec git --no-optional-locks -c core.fsmonitor=false status --porcelain=v2 --branch"


def changed_files(then: dict) -> str:
    """A part of a line that names those source files that have changed since SOURCES was `then`, if any."""
    changed = [name for name in then if SOURCES.get(name) != then[name]]
    return f"; changed since: {', '.join(changed)}" if changed else ""


def code_folder(run_dir: Path, sources: dict) -> Path:
    """Where a run keeps the source files that have these checksums."""
    return run_dir / "provenance" / f"code-{zlib.crc32(repr(sources).encode()):08x}"


def write_provenance(run_dir: Path, devices: str):
    """Writes the command line, devices, host, packages, git commit and source files of this process."""
    folder = code_folder(run_dir, SOURCES)
    lines = [
        shlex.join([sys.executable, *sys.argv]),
        f"{devices} on {platform.node()}",
        f"Python {platform.python_version()} on {platform.platform()}",
        f"source files in {folder.name}",
        *sorted(info.stem for path in sys.path for info in Path(path).glob("*.dist-info")),  # packages
    ]
    with open(run_dir / "provenance" / time.strftime(f"{TIMESTAMP}.txt"), "a") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(GIT_STATUS, shell=True, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL, timeout=10)
    if folder.exists():  # of an earlier start with the same files
        return
    unfinished = folder.with_name(f"{folder.name}.tmp")
    for name, code in CODE.items():
        copy = unfinished / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(code)
    unfinished.rename(folder)
