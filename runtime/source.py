"""The source files of a run: train.py and its like, runtime/, and what is imported from below the project, as each was
when it was first seen. And what a run keeps of them and of its surroundings."""

import platform
import shlex
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the project
NAMES = ("train.py", "test.py", "config.py", "model.py", "data.py", "utils.py")
CODE: dict[str, bytes] = {}  # the source files, by their path from ROOT
SOURCES: dict[str, int] = {}  # their checksums
TIMESTAMP = "%Y%m%d-%H%M%S"
# The commit, and the names of changed files; nothing without git. It takes no lock, which would fail a `git commit` at
# the same time, and starts no fsmonitor, which would be a program that the checkout names.
GIT_STATUS = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch"]


# ---- which files


def note(path: Path):
    """Notes a source file as it is now, once."""
    name = str(path.relative_to(ROOT))
    if name not in CODE:
        CODE[name] = path.read_bytes()
        SOURCES[name] = zlib.crc32(CODE[name])


def note_imports():
    """Notes the files below the project that have been imported since the last call, and the rest of their packages:
    what runs later may import it."""
    for module in [*sys.modules.values()]:
        file = str(getattr(module, "__file__", ""))
        if not file.startswith(f"{ROOT}/") or not is_own(Path(file)) or file.removeprefix(f"{ROOT}/") in CODE:
            continue
        paths = [Path(file)]
        package = sys.modules.get(module.__name__.partition(".")[0])
        for folder in getattr(package, "__path__", ()):
            paths += sorted(Path(folder).rglob("*.py"))
        for path in paths:
            with suppress(OSError):  # a link to nowhere, say
                note(path)


def is_own(path: Path) -> bool:
    """Whether a file below the project belongs to it, and not to a virtual environment there."""
    environment = Path(sys.prefix)
    is_installed = ROOT in environment.parents and environment in path.parents
    return path.suffix == ".py" and "site-packages" not in path.parts and not is_installed


def checksum_of(name: str) -> int | None:
    """The checksum of a source file; of one that has not been imported, as it is now. None if it cannot be read."""
    with suppress(OSError):
        return SOURCES[name] if name in SOURCES else zlib.crc32((ROOT / name).read_bytes())
    return None


for source in [*map(ROOT.joinpath, NAMES), *sorted(ROOT.glob("runtime/*.py"))]:
    if source.exists():
        note(source)


# ---- what a run keeps


def changed_files(then: dict) -> str:
    """A part of a line that names those source files that have changed since their checksums were `then`, if any."""
    changed = [name for name in then if checksum_of(name) != then[name]]
    return f"; changed since: {', '.join(changed)}" if changed else ""


def code_folder(run_dir: Path, sources: dict) -> Path:
    """Where a run keeps the source files that have these checksums."""
    return run_dir / "provenance" / f"code-{zlib.crc32(repr(sorted(sources.items())).encode()):08x}"


def write_code(run_dir: Path) -> Path:
    """Writes the source files that have been imported, if they are not there from an earlier call. Returns their
    folder."""
    note_imports()
    folder = code_folder(run_dir, SOURCES)
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.tmp")
    for name, code in CODE.items():
        copy = unfinished / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(code)
    return unfinished.rename(folder)


def write_provenance(run_dir: Path, devices: str):
    """Writes the command line, devices, host, packages, git commit and source files of this process."""
    folder = write_code(run_dir)
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
        with suppress(OSError, subprocess.TimeoutExpired):  # without git
            subprocess.run(GIT_STATUS, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL, timeout=10)
