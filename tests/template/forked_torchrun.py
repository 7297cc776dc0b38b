"""`torchrun ...`, whose ranks are forks of a process that has imported torch: each begins 2 seconds sooner. They have
no `python -u`: what they print comes when they flush it, or end.

python forked_torchrun.py ...
"""

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import zygote  # noqa: E402


def popen(args: tuple[str, ...], **options) -> subprocess.Popen:
    """Starts `python -u train.py ...` without the -u."""
    return zygote.popen([args[0], *args[2:]], **options)


# What torchrun sets: no import reads it.
zygote.LATE += ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
zygote.ZYGOTE.begin(zygote.plain(dict(os.environ)))
subprocess_handler.Popen = popen
sys.exit(main())
