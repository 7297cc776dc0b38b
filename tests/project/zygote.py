"""Starts `python script.py ...` 2 to 3 seconds sooner: as a fork of a process that has imported torch, Lightning and
torchmetrics, and nothing of the project. The project's own modules are imported anew in each fork, from the folder of
the script. A fork has its own pid, session, signals, exit code and atexit handlers, as any process. Where an import
starts a thread, of which a fork would have none, all processes are real ones.

What it does not show: the imports themselves (their order, time, messages), what an interpreter frees at its end, and
what differs between two interpreters, such as the order of a set of strings. So a process is a real one
(`subprocess.Popen`) with --help, with another environment than that of the zygote, and wherever the script is not a
Python file; on other systems than Linux, always.
"""

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

# What the programs import of other packages, with what they import late.
SHARED = (
    "torch torch.distributed torch.utils.data torchmetrics.classification lightning.fabric tqdm yaml simple_parsing "
    "sklearn.datasets tensorboard.compat.proto.event_pb2 torch.utils.tensorboard torch._dynamo filelock"
)
PR_SET_CHILD_SUBREAPER = 36
# How variables begin that no import reads: a fork may have others than the zygote.
LATE = ("HOME", "PATH", "TZ", "PYTEST_", "NODE_RANK", "MASTER_", "WAIT", "DOWNLOAD", "ZYGOTE_CHANNEL")
# Of the zygote: its memory lies in huge pages, where the system has them, so that a fork has fewer to copy.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PREPARE = ""  # the file of a module whose `prepare(argv, env)` is called in a fork, and gives it its environment
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


# ---- in the process of pytest


class Zygote:
    """Of one process of pytest; started by the first call, with the environment of that call."""

    def __init__(self) -> None:
        self.env: dict[str, str] | None = None
        self.socket: Any = None
        self.lock = threading.Lock()  # some tests start processes in threads

    def begin(self, env: dict[str, str]) -> None:
        with self.lock:
            if self.env is None:
                self.env = self.connect(env)

    def connect(self, env: dict[str, str]) -> dict[str, str]:
        """Returns the environment that forks have."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # its grandchildren become children of this process
        if channel := os.environ.pop("ZYGOTE_CHANNEL", ""):  # this process is a fork, and has been given a zygote
            self.socket = socket.socket(fileno=int(channel))
            return env
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import zygote; zygote.serve(sys.argv[1])"
        command = [sys.executable, "-c", code, str(other.fileno())]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, env=env | HUGE_PAGES, stdin=null, stdout=null, pass_fds=[other.fileno()]
        )
        other.close()
        atexit.register(self.end)
        is_ready = self.socket.recv(99) == b"ready"  # else it has threads, as where a library of this machine has one
        return env if is_ready else {}  # which no process has, so each is a real one

    def end(self) -> None:
        self.socket.close()
        self.process.wait()

    def fork(self, request: dict, fds: list[int]) -> int:
        """Returns the pid of a fork that has these files as its first three."""
        memory = os.memfd_create("request")
        os.write(memory, json.dumps(request).encode())
        with self.lock:
            socket.send_fds(self.socket, [b"fork"], [*fds, memory])
            os.close(memory)
            return int(self.socket.recv(99))


ZYGOTE = Zygote()


class Forked(subprocess.Popen):
    """A Popen of `[sys.executable, script, *options]` whose process is a fork of the zygote."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest) -> None:  # fmt: skip
        ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]  # a process inherits it
        request = {"argv": args[1:], "cwd": str(cwd or os.getcwd()), "env": env, "ignored": ignored, "prepare": PREPARE}
        files = enumerate((p2cread, c2pwrite, errwrite))
        self.pid = ZYGOTE.fork(request, [number if file == -1 else file for number, file in files])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def plain(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(LATE)}


def popen(args: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen:
    """As subprocess.Popen(args, env=env, **options), which must have pipes, and start_new_session. A script
    that uses this module, too, has a zygote at once where `env` has an empty ZYGOTE_CHANNEL."""
    can = sys.platform == "linux" and args[0] == sys.executable and args[1].endswith(".py") and "--help" not in args
    is_plain = plain(env).items() <= (os.environ | {"OMP_NUM_THREADS": "1"}).items()  # nothing that one test has set
    if can and ZYGOTE.env is None and is_plain and env.get("OMP_NUM_THREADS") == "1":
        ZYGOTE.begin(plain(env))
    if can and plain(env) == ZYGOTE.env:
        return Forked(args, env=env, **options)
    return subprocess.Popen(args, env=env, **options)


# ---- in the zygote


def serve(fd: str) -> None:
    """Imports what the forks share, and answers."""
    gc.disable()  # the imports create a million objects that stay
    names = SHARED.split()
    if importlib.util.find_spec("pyarrow"):  # sklearn would import it, and it starts threads
        names.remove("sklearn.datasets")
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    channel = socket.socket(fileno=int(fd))
    with open("/proc/self/status") as status:
        if "Threads:\t1\n" not in status.read():
            os._exit(0)  # a fork would have only one of the threads
    channel.send(b"ready")
    answer(channel)


def answer(channel: socket.socket) -> None:
    """Forks for each request until the other end is closed. Returns in a fork alone, which then ends as Python ends."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 99, 9)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                channel.close()
                return become(fds)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # now the parent of the fork is pytest
        channel.send(os.read(read, 99))
        for each in (read, write, *fds):
            os.close(each)


def become(fds: list[int]) -> None:
    """Makes this process that of a script, and runs it."""
    os.setsid()
    for number, each in enumerate(fds[:3]):
        os.dup2(each, number)
    with open(f"/proc/self/fd/{fds[3]}") as file:
        request = json.load(file)
    os.closerange(3, 256)
    os.chdir(request["cwd"])
    for number in SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    if "ZYGOTE_CHANNEL" in request["env"]:
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            ours.close()
            return answer(other)
        other.close()
        request["env"]["ZYGOTE_CHANNEL"] = str(ours.detach())
    argv = request["argv"]
    env = request["env"]
    if request["prepare"]:
        env = runpy.run_path(request["prepare"])["prepare"](argv, env)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.argv = argv
    sys.orig_argv = [sys.executable, *argv]
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    del sys.modules["zygote"]
    random.seed()
    sys.modules["numpy"].random.seed()  # in a fork it has the state of the zygote
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(__name__="__main__", __file__=argv[0], __builtins__=__builtins__, __spec__=None, __doc__=None)
    code: Any = None
    try:
        exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main)
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code)


def end(code: Any) -> NoReturn:
    """Ends this process as Python does with what was given to sys.exit(), but leaves the objects where they are: to
    free them would take 0.4 seconds, as the memory that a fork shares is copied where it is written to."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    try:
        for file in filter(None, (sys.stdout, sys.stderr)):
            file.flush()
    except OSError:
        code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)
