"""`PROGRAM/tools/sweep.py ...`, whose runs are forks of a process that has imported torch: each begins 2 seconds
sooner. They do not end with a sweep that is killed, and /proc shows other command lines.

python forked_sweep.py PROGRAM ...
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [f"{sys.argv.pop(1)}/tools", str(Path(__file__).resolve().parents[1] / "project")]
sys.argv[0] = "sweep.py"  # what its errors begin with

import sweep  # noqa: E402
import zygote  # noqa: E402


def popen(command: list[str], **options) -> subprocess.Popen:
    """Starts `python train.py ...` without the process that binds it to the sweep."""
    return zygote.popen(command[command.index(sys.executable, 1) :], **options)


zygote.ZYGOTE.begin(zygote.plain(dict(os.environ)))
sweep.Popen = popen
sys.exit(sweep.main())
