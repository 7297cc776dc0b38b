"""The other ranks of `--devices N` as forks, in place of the processes that Fabric starts: for zygote.PREPARE."""

import json
import os
import subprocess
import sys
from typing import Any


def prepare(argv: list[str], env: dict[str, str]) -> dict[str, str]:
    """Forks the other ranks of `--devices N` now, before anything of the project is imported. They sleep until Fabric
    starts them, or until rank 0 has ended. Returns the environment of this process, be it rank 0 or another."""
    options = dict(zip(argv, argv[1:], strict=False))
    devices = options.get("--devices", "")
    waiting: list[tuple[int, int]] = []
    if not devices.isdigit() or "LOCAL_RANK" in env or options.get("--num_nodes", "1") != "1":
        return env
    for _ in range(int(devices) - 1):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            for each in (write, *(other for _, other in waiting)):
                os.close(each)
            text = os.read(read, 1 << 16)
            os.close(read)
            return json.loads(text) if text else os._exit(0)
        os.close(read)
        waiting.append((pid, write))

    class Rank(subprocess.Popen):
        def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
            self.pid, write = waiting.pop(0)
            os.write(write, json.dumps(dict(env)).encode())
            os.close(write)
            self._child_created = True

    launcher: Any = sys.modules["lightning.fabric.strategies.launchers.subprocess_script"]
    launcher.subprocess = type("subprocess", (), {"Popen": Rank})
    return env
