"""Searches over any options of train.py, or runs a list of config files. Each training is an ordinary run directory.

python recipes/sweep.py sweep.yaml --trials 30 --jobs 2 -- --epochs 10
python recipes/sweep.py wide.yaml deep.yaml --shared shared.yaml        # a run for each file

sweep.yaml has options of train.py: a list holds values to choose from, a mapping a range; what else there is, and what
stands behind `--`, is given to every run.

    base_lr: {low: 1e-4, high: 1e-1, log: true}
    width: {low: 16, high: 64, step: 16}
    weight_decay: [0, 0.01, 0.1]
    seed: [1, 2, 3]             # no choice: each point is trained with each seed, and its value is the mean

Lists alone make a grid. With a range, `--trials` points are drawn, by Optuna's TPE (Bergstra et al. 2011) or at random.
An option named `fold` is averaged like `seed`; `--average` names others. The runs of a point come one after the other:
more `--jobs` than points are idle.

The same command, given several times or on machines that share the directory, works on one study. Ctrl-C lets all runs
save and stop; the same command goes on with them. It goes on as well with a run that was stopped, killed or failed, for
whatever reason, and waits for the runs that outlived a sweep that was killed. Each command tries a run once.

NAME.sweep/ has the journal of the study, the output of each run in logs/, and locks/. A trial whose run failed stays
open: state RUNNING in the journal, which optuna-dashboard reads. Needs `pip install optuna==5.0.0`.
"""

import argparse
import csv
import fcntl
import glob
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, get_type_hints

import yaml
from simple_parsing.helpers.serialization import encode

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import cli  # noqa: E402 - they import no torch
from config import ConfigError, TrainConfig, mode_of, values_of  # noqa: E402

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState
except ImportError as error:
    sys.exit(f"sweep.py: error: {error}: pip install optuna==5.0.0")

OPTIONS = [*values_of(TrainConfig()), *vars(TrainConfig())]
OWN = ("out_dir", "root_dir", "resume", "config_path", "fast_run")  # options that a run gets from here, or not at all
MISTAKE = 2  # the exit code of a run with a mistake in its options
PREEMPTED = 75  # the exit code of a run that was asked to stop and has saved
STARTUP = 4  # trials that are not pruned, since there is too little to compare them with


# ---- what is asked for


@dataclass(frozen=True)
class Search:
    """What to train: the points of a space, each with all combinations of what is averaged."""

    name: str
    space: dict  # lists of choices and ranges, by option
    averaged: dict  # lists of values, by option
    fixed: dict  # options of all runs
    shared: str | None  # a config file of all runs
    options: list[str]  # of all runs, as they stand behind `--`
    differing: set[str]  # options that are not the same in all runs
    monitor: str = ""
    mode: str = ""

    @property
    def is_grid(self) -> bool:
        return not any(isinstance(choice, dict) for choice in self.space.values())

    def points(self, end: str = "low") -> list[dict]:
        """All points of a grid; of a search with ranges, those at the low or the high end of all of them."""
        choices = [[choice[end]] if isinstance(choice, dict) else choice for choice in self.space.values()]
        return [dict(zip(self.space, values, strict=True)) for values in itertools.product(*choices)]

    def runs_of(self, point: dict) -> dict[str, dict]:
        """The options of the runs of a point, by out_dir: the name of the study, and what differs."""
        runs = {}
        for values in itertools.product(*self.averaged.values()):
            own = point | dict(zip(self.averaged, values, strict=True))
            parts = [self.name]
            for name, value in own.items():
                shown = Path(value).stem if name == "config_path" else value
                if isinstance(shown, float) and not self.is_grid:
                    shown = f"{shown:.4g}"
                parts.append(f"{name}={shown}")
            if not self.is_grid:  # the other digits
                parts.append(f"{zlib.crc32(repr(sorted(point.items())).encode()):08x}")
            options = self.fixed | own
            if self.shared:
                options["config_path"] = [self.shared, *filter(None, [point.get("config_path")])]
            runs[re.sub(r"[^\w.=+-]", "_", "-".join(parts))] = options
        return runs


def read_search(args: argparse.Namespace) -> Search:
    """The search of a command line. Raises ConfigError for a mistake that can be seen before the first run."""
    given = cli.parse(TrainConfig, args.options)
    shared = read_config(args.shared) if args.shared else {}
    file = args.files[0]
    content = read_file(file) if len(args.files) == 1 else {}
    space = {option: value for option, value in content.items() if is_choice(option, value)}
    fixed = {}
    configs = {}
    is_search = len(space) > 0
    for option in (*given, *(content if is_search else ())):
        if option in OWN:
            raise ConfigError(f"--{option}: cannot be given to the runs; for a config file of all runs give --shared")
        if option in given and option in space:
            raise ConfigError(f"--{option}: is searched, and given behind `--`")
    if is_search:
        check_space(file, space)
        fixed = {option: as_taken(file, option, value) for option, value in content.items() if option not in space}
        differing = set(space)
    else:
        configs = {file: read_config(file) for file in args.files}
        if len({Path(file).stem for file in args.files}) < len(args.files):
            raise ConfigError("two config files have the same name, so their runs would have the same")
        space = {"config_path": args.files}
        differing = {option for config in configs.values() for option in config}

    averaged = {option: space.pop(option) for option in args.average if option in space}
    for option, values in averaged.items():
        if isinstance(values, dict):
            raise ConfigError(f"{option}: give a list; a point is trained with each of them")
    search = Search(
        name=args.study or (Path(file).stem if len(args.files) == 1 else "sweep"),
        space=space,
        averaged=averaged,
        fixed=fixed,
        shared=args.shared,
        options=args.options,
        differing=differing,
    )
    runs: dict = {}
    for point in search.points() if search.is_grid else search.points("low") + search.points("high"):
        for name, options in search.runs_of(point).items():
            if name in runs and search.is_grid:
                raise ConfigError(f"two points have the same run, {name}: values are equal, but for special characters")
            runs[name] = config_of(shared, configs.get(point.get("config_path"), {}), options, given)
    if args.prune:
        check_prunable(len(search.points()) if search.is_grid else args.trials, runs.values())
    monitored = {(config.monitor, mode_of(config)) for config in runs.values()}
    if len(monitored) > 1:
        raise ConfigError("monitor and monitor_mode must be the same in all runs")
    ((monitor, mode),) = monitored
    return replace(search, monitor=monitor, mode=mode)


def config_of(*sources: dict) -> TrainConfig:
    """The config that train.py makes of these options; later ones win. Raises ConfigError."""
    given: dict = {}
    for source in sources:
        if "monitor" in source:
            given.pop("monitor_mode", None)  # of another monitor
        given |= {name: tuple(value) if isinstance(value, list) else value for name, value in source.items()}
    return cli.config_with(TrainConfig(), given)


def check_prunable(trials: int, configs: Iterable[TrainConfig]):
    """Raises ConfigError where --prune could not stop any run."""
    if trials <= STARTUP:
        raise ConfigError(f"--prune: cannot stop any of {trials} trials, since the first {STARTUP} are never stopped")
    if any("csv" not in config.logger_name for config in configs):
        raise ConfigError("--prune: cannot see the values without metrics.csv; add csv to --logger_name")


def read_file(file: str) -> dict:
    """The options in a YAML file. Those of nested dataclasses get names with a dot. Raises ConfigError."""
    with cli.errors_of(file):
        content = yaml.safe_load(Path(file).read_text()) or {}
        if not isinstance(content, dict):
            raise ConfigError("expected lines of `option: value`")
        content = flat(content)
        for name in content:
            if name not in OPTIONS:
                raise ConfigError(cli.unknown_word(f"--{name}", TrainConfig))
    return content


def read_config(file: str) -> dict:
    """The options of a config file of train.py, with the types of their fields. Raises ConfigError."""
    with cli.errors_of(file):
        return cli.parse_yaml(cli.read_yaml(Path(file).read_text()))


def flat(content: dict, prefix: str = "") -> dict:
    """The options with those of nested dataclasses by names with a dot: `optim: {lr: [1, 2]}` is `optim.lr: [1, 2]`."""
    found = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and any(option.startswith(f"{name}.") for option in OPTIONS):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def is_choice(name: str, value) -> bool:
    """Whether a value in the file is a range or a list of values, and not one value of an option that takes several, as
    `logger_name: [csv, wandb]` is."""
    kind: Any = TrainConfig
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    if isinstance(value, list) and "tuple" in str(kind):
        return any(isinstance(item, list) for item in value)
    return isinstance(value, (list, dict))


def check_space(file: str, space: dict):
    """Puts the values as train.py takes them into lists and ranges. Raises ConfigError for what is none of them."""
    for name, choice in space.items():
        if choice == []:
            raise ConfigError(f"{file}: {name}: the list is empty")
        if isinstance(choice, list):
            space[name] = [as_taken(file, name, value) for value in choice]
            continue
        if not {"low", "high"} <= choice.keys() <= {"low", "high", "log", "step"}:
            raise ConfigError(f"{file}: {name}: a range is {{low: 1, high: 2}}, with log: true or step: 1")
        choice |= {end: as_taken(file, name, choice[end]) for end in ("low", "high")}
        try:
            suggest(FixedTrial({name: choice["low"]}), name, choice)
        except (TypeError, ValueError) as error:  # such as a logarithm of 0
            raise ConfigError(f"{file}: {name}: {error}") from None


def as_taken(file: str, name: str, value):
    """A value of the file as train.py takes it. Raises ConfigError if it does not."""
    with cli.errors_of(file):
        return encode(cli.parse_yaml({name: value})[name])  # a tuple as a list, as the journal gives it back


def suggest(trial, name: str, choice: list | dict):
    """A value of a list or a range: drawn, waiting in the trial, or what the trial already has."""
    if isinstance(choice, list):
        return trial.suggest_categorical(name, choice)
    if isinstance(choice["low"], float) or isinstance(choice["high"], float):
        return trial.suggest_float(name, **choice)
    return trial.suggest_int(name, **choice)


# ---- locks: they are of the open file, so they end with the last process that has it open, however that ends


def take(path: Path) -> TextIO | None:
    """The file, locked until it is closed; None if another process or thread has locked it."""
    file = open(path, "a+")  # noqa: SIM115 - closed by the caller
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def locked(path: Path) -> Iterator[TextIO]:
    """The file, locked. Waits for the lock."""
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class JournalLock:
    """The lock over each line of the journal. Optuna's own would stay for 30 seconds after a kill. It also removes a
    last line that a full disk has cut: the next would be joined to it, and the journal could not be read any more."""

    def __init__(self, journal: Path, path: Path):
        self.journal = journal
        self.path = path
        self.stack = ExitStack()

    def acquire(self) -> bool:
        self.stack.enter_context(locked(self.path))
        content = self.journal.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self.journal, content.rfind(b"\n") + 1)
        return True

    def release(self):
        self.stack.close()


# ---- the study


class Sweep:
    """A study: which trial is next, and how its runs are started, watched, taken over and stopped.

    A trial has two locks. The owner's is held by the sweep that looks after it. That of the run is inherited by the
    process of the run: it tells that the run goes on, also when its sweep was killed.
    """

    def __init__(self, search: Search, args: argparse.Namespace):
        """Opens the study, or makes it; the points of a grid wait in it from the start. Raises ConfigError."""
        self.search = search
        self.args = args
        self.root = Path(os.path.expanduser(args.root_dir))
        self.folder = self.root / f"{search.name}.sweep"
        self.locks = self.folder / "locks"
        self.logs = self.folder / "logs"
        self.devices = devices(args.jobs)
        self.stopping = threading.Event()
        self.mistake = ""  # in the options of all runs
        self.error = ""  # of the system
        self.tried: set[int] = set()  # trials that this command has trained
        self.locks.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journal = self.folder / "journal"
        backend = JournalFileBackend(str(journal), JournalLock(journal, self.locks / "journal"))
        sampler = optuna.samplers.TPESampler(constant_liar=True)
        pruner = optuna.pruners.NopPruner()
        if args.sampler == "random":
            sampler = optuna.samplers.RandomSampler()
        if args.prune:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
        study = {
            "study_name": search.name,
            "storage": optuna.storages.JournalStorage(backend),
            "direction": f"{search.mode}imize",
            "sampler": sampler,
            "pruner": pruner,
            "load_if_exists": True,
        }
        asked = [search.space, search.averaged, search.fixed, search.shared, search.options, search.mode]
        asked = json.dumps(asked, sort_keys=True)
        with locked(self.locks / "study"):
            self.study = optuna.create_study(**study)
            if self.study.user_attrs.get("asked", asked) != asked:
                if self.has_begun():
                    raise ConfigError(f"{self.folder} is of another search: give another --study")
                optuna.delete_study(study_name=search.name, storage=study["storage"])
                self.study = optuna.create_study(**study)
            if "asked" not in self.study.user_attrs:
                for point in search.points() if search.is_grid else ():
                    self.study.enqueue_trial(point, skip_if_exists=True)
                self.study.set_user_attr("asked", asked)  # last: a kill before it leaves a part of the points

    def has_begun(self) -> bool:
        """Whether there is a run of this study, or another process works on it."""
        unowned = list(self.unowned())
        for _, owner in unowned:
            owner.close()
        runs = self.root.glob(f"*-{glob.escape(self.search.name)}-*/config.yaml")
        return len(unowned) < len(self.open_trials()) or any(runs)

    # ---- which trial is next

    def open_trials(self) -> list[FrozenTrial]:
        """Trials that were begun and have no result: they are being trained, were left alone, or have failed."""
        return self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])

    def unowned(self) -> Iterator[tuple[FrozenTrial, TextIO]]:
        """The open trials that nobody looks after, each with the owner's lock, which the caller has to close."""
        for trial in self.open_trials():
            owner = take(self.locks / f"{trial.number}.owner")
            if owner:
                yield trial, owner

    def survivor(self, number: int) -> dict | None:
        """Host, device, name and pid of the run of a trial that goes on without its sweep; None if none does."""
        path = self.locks / f"{number}.run"
        lock = take(path)
        if lock:
            lock.close()
            return None
        about, pid = path.read_text().split("\n", 1)
        return json.loads(about) | {"pid": int(pid or 0)}  # 0: its sweep was killed in the moment of its start

    def is_mine(self, survivor: dict, device: str | None) -> bool:
        """Whether the worker of a device takes over this run: it is on the device, or on one that no worker has."""
        is_here = survivor["host"] == socket.gethostname()
        return is_here and (survivor["device"] == device or survivor["device"] not in self.devices)

    def next_trial(self, device: str | None) -> tuple[Trial, TextIO, dict | None] | None:
        """A trial for a device, its owner's lock, and its run if that goes on. First those whose runs go on, so that no
        device gets two; then those that were left or have failed; then new ones. None if there is none."""
        with locked(self.locks / "study"):
            for frozen, owner in self.unowned():
                survivor = self.survivor(frozen.number)
                if survivor and self.is_mine(survivor, device):
                    return Trial(self.study, frozen._trial_id), owner, survivor
                owner.close()
            for frozen, owner in self.unowned():
                if frozen.number not in self.tried and self.survivor(frozen.number) is None:
                    return self.begun(Trial(self.study, frozen._trial_id)), owner, None
                owner.close()
            trials = self.study.get_trials(deepcopy=False)
            is_waiting = any(trial.state == TrialState.WAITING for trial in trials)
            if is_waiting or (not self.search.is_grid and len(trials) < self.args.trials):
                trial = self.begun(self.study.ask())
                return trial, take(self.locks / f"{trial.number}.owner"), None
            return None

    def begun(self, trial: Trial) -> Trial:
        """The trial, with its point chosen."""
        self.tried.add(trial.number)
        for name, choice in self.search.space.items():
            suggest(trial, name, choice)
        return trial

    # ---- its runs

    def work(self, device: str | None):
        """Trains trials on a device, one after the other, until the study is done."""
        try:
            while not self.stopping.is_set():
                found = self.next_trial(device)
                if found:
                    trial, owner, survivor = found
                    with owner:
                        if survivor:
                            self.wait_for(trial, survivor)
                        else:
                            self.train(trial, device)
                elif all(trial.number in self.tried for trial in self.open_trials()):
                    return
                else:
                    time.sleep(1)  # others train them, and may leave them
        except OSError as error:  # such as a full disk; the run, if there is one, goes on
            self.error = f"{error}; the same command goes on"

    def wait_for(self, trial: Trial, survivor: dict):
        """Waits for a run that goes on without its sweep. What comes of it shows when the trial is trained again."""
        number = trial.number
        name = survivor["name"]
        cli.say(f"trial {number}: waiting for {name}, which goes on as process {survivor['pid']}")
        is_pruned = self.watch(trial, name, survivor["pid"], lambda: self.survivor(number) is not None)
        run_dir = self.newest_run(name)
        if is_pruned and not (run_dir and cli.is_finished(run_dir)):
            self.prune(trial)

    def train(self, trial: Trial, device: str | None):
        """Makes the runs of a trial, one after the other, and tells the study the mean of their best values."""
        bests = []
        run_dirs = []
        for name, options in self.search.runs_of(trial.params).items():
            code, is_pruned = self.run(trial, name, options, device)
            if self.stopping.is_set():
                return
            if is_pruned and code == PREEMPTED:
                self.prune(trial)
                return
            run_dir = self.newest_run(name)
            best = best_of(run_dir) if code == 0 and run_dir else None
            if best is None:
                self.fail(trial, name, code)
                return
            bests.append(best)
            run_dirs.append(str(run_dir))
        value = sum(bests) / len(bests)
        trial.set_user_attr("run_dirs", run_dirs)
        self.study.tell(trial, value)
        best = self.study.best_trial
        cli.say(f"trial {trial.number}: {value:.5g} with {trial.params}; best {best.value:.5g} of {best.number}")

    def prune(self, trial: Trial):
        self.study.tell(trial, state=TrialState.PRUNED)
        cli.say(f"trial {trial.number}: pruned, with {trial.params}")

    def fail(self, trial: Trial, name: str, code: int):
        """Says why a run has no value. A mistake in an option that is the same in all runs ends the search."""
        log = self.logs / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it is empty"
        if code == 0:
            reason = f"has no best {self.search.monitor}"
        elif code == PREEMPTED:
            reason = "was stopped"
        elif code < 0:
            reason = f"was ended by {signal.Signals(-code).name}"
        else:
            reason = f"failed with code {code}"
        cli.say(f"trial {trial.number}: {name} {reason}, see {log}: {last}")
        named = re.findall(r"--([\w.]+)", last)
        if code == MISTAKE and self.search.differing.isdisjoint(named) and "resume" not in named:
            self.mistake = last
            self.stopping.set()

    def run(self, trial: Trial, name: str, options: dict, device: str | None) -> tuple[int, bool]:
        """Runs train.py, its output in a file. Returns its exit code, and whether the pruner has stopped it."""
        args = [arg for option, value in options.items() for arg in as_args(option, value)]
        args += [*self.search.options, "--out_dir", name, "--root_dir", str(self.root), "--resume", "auto"]
        environment = dict(os.environ)
        if device:
            environment["CUDA_VISIBLE_DEVICES"] = device
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.args.jobs)))
        with locked(self.locks / f"{trial.number}.run") as lock, open(self.logs / f"{name}.log", "a") as log:
            lock.truncate(0)
            lock.write(json.dumps({"host": socket.gethostname(), "device": device, "name": name}) + "\n")
            lock.flush()
            process = subprocess.Popen(
                [sys.executable, REPO / "train.py", *args],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # else Ctrl-C would reach it twice
                pass_fds=[lock.fileno()],
            )
            lock.write(str(process.pid))
        is_pruned = self.watch(trial, name, process.pid, lambda: process.poll() is None)
        return process.returncode, is_pruned

    def watch(self, trial: Trial, name: str, pid: int, is_going: Callable[[], bool]) -> bool:
        """Waits for the end of a run, which is told to stop with the sweep, or by the pruner. Returns whether by the
        pruner. It compares the first of the runs that are averaged."""
        is_first = name == next(iter(self.search.runs_of(trial.params)))
        is_told = False
        is_pruned = False
        while is_going():
            time.sleep(0.2)
            if self.args.prune and is_first and self.report(trial, name):
                is_pruned = is_pruned or trial.should_prune()
            if not is_told and (is_pruned or self.stopping.is_set()):
                if pid:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                is_told = True
        return is_pruned

    def newest_run(self, name: str) -> Path | None:
        """The directory of a run: the one that `--resume auto` takes, but without the lines that tell which it passes
        over. It is asked for several times a second."""
        for folder in cli.named_folders(self.root / name):
            if (folder / "config.yaml").exists():
                return folder
        return None

    def report(self, trial: Trial, name: str) -> bool:
        """Reports the monitored values that are new. They are counted, since runs with other batch sizes have other
        steps. Returns whether there were any."""
        run_dir = self.newest_run(name)
        path = run_dir / "logs" / "csv" / "metrics.csv" if run_dir else None
        if not (path and path.is_file()):
            return False
        text = path.read_text()
        rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        values = [float(row[self.search.monitor]) for row in rows if row.get(self.search.monitor)]
        known = len(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for number in range(known, len(values)):
            trial.report(values[number], number + 1)
        return len(values) > known

    # ---- at the end

    def summarize(self) -> int:
        """Prints what came out and what to do next, and returns the exit code."""
        trials = self.study.get_trials(deepcopy=False)
        states = [trial.state for trial in trials]
        done = states.count(TrialState.COMPLETE)
        unfinished = len(states) - done - states.count(TrialState.PRUNED)
        if unfinished:
            cli.say(f"{unfinished} of {len(trials)} trials have no result yet: the same command goes on with them")
        if done:
            best = self.study.best_trial
            cli.say(f"best {self.search.monitor} {best.value:.5g} of {done} trials: trial {best.number}, {best.params}")
            for run_dir in best.user_attrs["run_dirs"]:
                checkpoint = "" if (Path(run_dir) / "checkpoints" / "best.ckpt").exists() else " --checkpoint last"
                cli.say(f"next: python test.py --out_dir {shlex.quote(run_dir)}{checkpoint}")
        if self.mistake:
            print(f"sweep.py: error: all runs would end so: {self.mistake}", file=sys.stderr)
            return MISTAKE
        if self.error:
            print(f"sweep.py: error: {self.error}", file=sys.stderr)
            return 1
        if self.stopping.is_set():
            return PREEMPTED
        return int(unfinished > 0)


def best_of(run_dir: Path) -> float | None:
    """The best monitored value of a finished run; None if it has none, or its summary is damaged."""
    best = cli.read_summary(run_dir).get("best")
    return best if isinstance(best, (int, float)) else None


def as_args(option: str, value) -> list[str]:
    if isinstance(value, list):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}={value}"]


def devices(jobs: int) -> list[str | None]:
    """One GPU for each of the jobs, in turn; None where there are none, or where one job may have them all. They are
    those of CUDA_VISIBLE_DEVICES where it is set, none where it is empty. Instances of MIG are named there, too, by
    their UUIDs; else a GPU that is split is one device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus: list[str] = []
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    elif shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]  # --list-gpus has lines for MIG, too
        asked = subprocess.run(command, capture_output=True, text=True)
        if asked.returncode == 0:  # else it prints what is wrong
            gpus = asked.stdout.split()
    return [gpus[job % len(gpus)] if gpus and jobs > 1 else None for job in range(jobs)]


def main() -> int:
    about, details = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(description=about, epilog=details, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("files", nargs="+", metavar="YAML", help="a search, or config files to run")
    parser.add_argument("--shared", metavar="YAML", help="a config file for all runs; what differs wins over it")
    parser.add_argument("--study", help="name of the study, and of its runs; default: the file's")
    parser.add_argument("--root_dir", default=".", help="directory of the study and its runs")
    parser.add_argument("--trials", type=int, default=20, help="points to draw, of ranges (20)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on a GPU of its own (1)")
    parser.add_argument("--average", nargs="+", default=["seed", "fold"], metavar="NAME", help="options whose lists "
                        "are no choice: a point is trained with each value (seed fold)")  # fmt: skip
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe", help="how points are drawn (tpe)")
    parser.add_argument("--prune", action="store_true", help="stop a run that stays below the median of the others, "
                        f"once there are {STARTUP}; needs the csv logger")  # fmt: skip
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.options = sys.argv[end + 1 :]
    try:
        sweep = Sweep(read_search(args), args)
    except (ConfigError, OSError) as error:
        parser.exit(MISTAKE, f"sweep.py: error: {' '.join(str(error).split())}\n")

    def stop(number: int, frame):
        sweep.stopping.set()
        signal.signal(number, signal.SIG_DFL)  # the second time at once
        cli.say("stopping: the runs save; the same command goes on")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
            signal.signal(number, stop)
    threads = [threading.Thread(target=sweep.work, args=[device]) for device in sweep.devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sweep.summarize()


if __name__ == "__main__":
    sys.exit(main())
