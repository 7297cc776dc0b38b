"""Kills a program before a change of a file."""

import shutil
import signal
from pathlib import Path

from commands import REPO, run

# Runs the program of its first option, with the further ones. Before it stand WANTED, which are pairs of a kind of
# change, "EVENT NAME" or any, and the number of one of that kind; CHANGES, a file; and WHERE, a part of the paths.
KILLER = '''
import os, runpy, signal, sys

LIST = os.open(CHANGES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def hook(event, args):
    """Lists the changes of files of a run, and kills the process before one of them."""
    if event == "open" and not isinstance(args[0], int):
        is_change = args[2] & (os.O_WRONLY | os.O_RDWR)
    else:
        is_change = event in ("os.mkdir", "os.link", "os.rename") or (event == "os.remove" and os.path.lexists(args[0]))
    if is_change and WHERE in os.fsdecode(args[0]):
        change = f"{event} {os.path.basename(os.fsdecode(args[0]))}"
        os.write(LIST, (change + chr(10)).encode())
        WANTED[0][1] -= change.startswith(WANTED[0][0])
        if WANTED[0][1] == 0:
            del WANTED[0]
        if not WANTED:
            os.kill(os.getpid(), signal.SIGKILL)


del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
sys.addaudithook(hook)
runpy.run_path(sys.argv[0], run_name="__main__")
'''


def kill_before(change: str | int, command: str, cwd: Path, tmp_path: Path, where: str = "-train_out") -> list[str]:
    """Kills the command before a change of a file whose path has `where` in it; returns all that there were, the one
    that was not made included. The change is `N`, or `EVENT NAME N` for the N-th of one kind, or two of these with a
    comma between them, of which the second is looked for after the first. With 0 nothing is killed."""
    wanted = [each.rpartition(" ") for each in str(change).split(", ")]
    found = tmp_path / "changes"
    lines = {"WANTED": [[kind, int(number)] for kind, _, number in wanted], "CHANGES": str(found), "WHERE": where}
    found.unlink(missing_ok=True)
    (tmp_path / "killer.py").write_text("".join(f"{name} = {value!r}\n" for name, value in lines.items()) + KILLER)
    script, _, options = command.partition(" ")
    run(f"{tmp_path}/killer.py {REPO / script} {options}", cwd, code=-signal.SIGKILL if change else 0)
    return found.read_text().splitlines()


def remove_what_is_no_run(cwd: Path) -> None:
    """A directory that has no config.yaml yet has nothing of a training either."""
    for folder in cwd.glob("2*-train_out"):
        if not (folder / "config.yaml").exists():
            names = {path.name.removesuffix(".tmp") for path in folder.iterdir()}
            assert names <= {".lock", "summary.json", "config.yaml"}
            shutil.rmtree(folder)
