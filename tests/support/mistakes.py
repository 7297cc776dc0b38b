"""How the programs refuse a mistake of the user. Tables of the tests say which command is one, and what helps."""

import re
import subprocess
from pathlib import Path

from commands import call


def assert_one_line(done: subprocess.CompletedProcess, *words: str, lines: int = 1) -> None:
    """stderr is one line, or one of each rank: of the program, without a traceback or a path of runtime/. It has the
    words, such as the option that is wrong and the values that are not."""
    script = Path(done.args.split()[0]).name
    found = done.stderr.splitlines()
    assert 1 <= len(found) <= lines, done.stderr
    for line in found:
        assert line.startswith(f"{script}: error: ") and line.count("error:") == 1, done.stderr
        assert "Traceback" not in line and not re.search(r"runtime/\w*\.py", line), line
        assert [word for word in words if word not in line] == [], line


def contents(folder: Path) -> dict:
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def refuses(command: str, cwd: Path, *words: str, how=call, code: int = 2) -> str:
    """Runs a command that is a mistake. It ends with the code and one line with the words, and changes no file. Returns
    what it prints."""
    before = contents(cwd)
    done = how(command, cwd, code)
    assert_one_line(done, *words, lines=2 if "--devices 2" in command else 1)
    assert contents(cwd) == before
    return done.stdout
