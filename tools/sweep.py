"""Searches over options of train.py. Each training is an ordinary run directory. Needs `pip install optuna==5.0.0`.

python tools/sweep.py sweep.yaml --trials 30 --jobs 2 -- --epochs 10

sweep.yaml has options of train.py: a list holds values to choose from, a mapping a range. Anything else is given to
every run, as is what stands behind `--`; what is searched wins. Options of a nested dataclass are nested or have a dot,
as in a config file. Points are compared by the best value of `monitor`, and `monitor_mode`, which is given with it,
says whether that is the maximum or the minimum.

    base_lr: {low: 1e-4, high: 1e-1, log: true}
    width: {low: 16, high: 64, step: 16}
    seed: [1, 2, 3]     # lists of seed and fold are no choice: a point is trained with each, its value is the mean

Lists alone make a grid. With a range, `--trials` points are drawn by Optuna's TPE (Bergstra et al. 2011). A choice
between config files is `config_path: [wide.yaml, deep.yaml]`; one that all runs share stands behind `--`.

The runs are named by file, number of the point, and seed, as sweep-7-seed=1; `python tools/runs.py .` shows the rest.

Runs end with their sweep: on Ctrl-C, or when it is killed, they save and stop. (A sweep that is killed on another
system than Linux leaves its runs.) The same command goes on with what was stopped, killed or failed, each run once.
Given several times, or on machines that share the directory, it works on one study, the journal in NAME.sweep/.
"""

import argparse
import fcntl
import itertools
import os
import re
import shlex
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, Popen, getstatusoutput
from typing import Any, TextIO

import yaml
from run_table import AVERAGED
from runs import curve

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from config import TrainConfig  # noqa: E402 - they import no torch
from runtime import cli, config_file, options  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.options import values_of  # noqa: E402
from runtime.runs import named_folders, newest_run, read_summary  # noqa: E402
from runtime.terminal import end, say  # noqa: E402

try:
    import optuna.storages.journal
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    sys.exit(f"sweep.py: error: {error}: pip install optuna==5.0.0")

MISTAKE, PREEMPTED = 2, 75  # exit codes, as of train.py
IN_NAME = ("config_path", *AVERAGED)  # of a run: what its config.yaml does not have, and what tells it from the others
# Linux sends SIGTERM to a run once its sweep has died (PR_SET_PDEATHSIG): it saves and ends.
LINK = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


def lock(path: Path, kind: int = fcntl.LOCK_EX) -> TextIO:
    """The file, locked until all processes that have it open have closed it, or have died."""
    file = open(path, "a")  # noqa: SIM115 - closed by the caller
    fcntl.flock(file, kind)
    return file


def distribution(name: str, choice: list | dict) -> Any:
    """A list or a range, for Optuna. Raises ConfigError."""
    try:
        if isinstance(choice, list):
            return optuna.distributions.CategoricalDistribution(choice)
        bounds = {key: options.parse(TrainConfig, [f"--{name}={choice[key]}"])[name] for key in choice.keys() - {"log"}}
        kinds = {float: optuna.distributions.FloatDistribution, int: optuna.distributions.IntDistribution}
        return kinds[type(bounds["low"])](**bounds, log=choice.get("log", False))
    except (KeyError, TypeError, ValueError) as error:  # such as a logarithm of 0
        raise ConfigError(f"{name}: {error}; give [1, 2], or {{low: 1, high: 2}} with log: true or step: 1") from None


def flat(content: dict, group: str = "") -> dict:
    """The lines of a YAML by option: those of a nested dataclass have its field's name and a dot before their own."""
    found = {}
    for key, value in content.items():
        name = f"{group}{key}"
        is_group = any(option.startswith(f"{name}.") for option in values_of(TrainConfig()))
        found |= flat(value, f"{name}.") if is_group and isinstance(value, dict) else {name: value}
    return found


def combinations(choices: dict) -> list[dict]:
    """All combinations of the values of some options."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


class Sweep:
    """A study of Optuna. A point of it has a number, and a trial for each attempt; the newest counts."""

    def __init__(self, args: argparse.Namespace):
        """Opens the study, or makes it. Raises ConfigError for a mistake that can be seen before the first run."""
        self.args = args
        self.name = Path(args.file).stem
        self.tried: set[int] = set()  # points that this command has begun
        self.stopping = threading.Event()
        with config_file.errors_of(args.file):
            content = yaml.safe_load(Path(args.file).read_text())
            if not isinstance(content, dict):
                raise ConfigError("expected lines of `option: value`")
            content = flat(content)
            choices = {name: value for name, value in content.items() if isinstance(value, (list, dict))}
            fixed = {name: value for name, value in content.items() if name not in choices}
            self.space = {name: distribution(name, choice) for name, choice in choices.items()}
        averaged = {name: self.space.pop(name).choices for name in AVERAGED if isinstance(choices.get(name), list)}
        self.words = [*config_file.words_of(fixed), *args.options]
        self.averaged = combinations(averaged)
        grid = combinations({key: getattr(of, "choices", None) or [of.low, of.high] for key, of in self.space.items()})
        self.points = [{}] * args.trials if dict in map(type, choices.values()) else grid  # what is not drawn of each
        configs = [
            cli.parse_train(TrainConfig, self.words + config_file.words_of(point | own))
            for point in grid
            for own in self.averaged
        ]
        self.monitor = configs[0].monitor
        if len({(config.monitor, config.monitor_mode) for config in configs}) > 1:
            raise ConfigError("monitor and monitor_mode must be the same in all runs")
        if args.prune and any("csv" not in config.logger_name for config in configs):
            raise ConfigError("--prune: cannot see the values without metrics.csv; add csv to --logger_name")
        self.folder = Path(configs[0].root_dir) / f"{self.name}.sweep"
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder / "journal") as journal:
            known = Path(journal.name).read_bytes()
            if not known.endswith(b"\n"):  # a full disk has cut the last line; else another sweep may be adding one
                journal.truncate(known.rfind(b"\n") + 1)
            self.study = optuna.create_study(
                study_name=self.name,
                storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(journal.name)),
                direction="maximize" if configs[0].monitor_mode == "max" else "minimize",
                sampler=optuna.samplers.TPESampler(constant_liar=True),
                load_if_exists=True,
            )
            search = str([content, args.options])
            if self.study.user_attrs.get("search", search) != search:
                raise ConfigError(f"{self.folder} is of other options: delete it and its runs, or rename {args.file}")
            self.study.set_user_attr("search", search)

    def trials(self) -> dict[int, FrozenTrial]:
        """The newest trial of each point."""
        return {trial.user_attrs["number"]: trial for trial in self.study.get_trials(deepcopy=False)}

    def count(self) -> tuple[int, int, int]:
        """The number of all points, of those that are left, and of those that have a result."""
        states = [trial.state for trial in self.trials().values()]
        points = max(len(states), len(self.points))
        done = states.count(TrialState.COMPLETE)
        return points, points - done - states.count(TrialState.PRUNED), done

    def next_trial(self) -> tuple[Trial, TextIO] | None:
        """A trial of a point that was left, has failed or is new, and its locked output; None if there is none."""
        with lock(self.folder / "journal"):
            for _ in self.study.get_trials(states=[TrialState.WAITING]):  # left by a kill in the lines below
                self.study.tell(self.study.ask(), state=TrialState.FAIL)
            trials = self.trials()
            for number in range(max(len(trials), min(len(trials) + 1, len(self.points)))):
                before = trials.get(number)
                if number in self.tried or (before and before.state in (TrialState.COMPLETE, TrialState.PRUNED)):
                    continue
                try:
                    output = lock(self.folder / f"{number}.log", fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another sweep has it, or a run that is about to end as its sweep has
                    continue
                self.tried.add(number)
                point = before.user_attrs["point"] | before.params if before else self.points[number]
                if before:
                    self.study.tell(before.number, state=TrialState.FAIL, skip_if_finished=True)
                self.study.enqueue_trial(point, user_attrs={"number": number, "point": point})
                return self.study.ask(self.space), output
        return None

    def work(self, device: str | None):
        """Trains points on a device, one after the other, until the study is done."""
        while not self.stopping.is_set():
            left = [number for number, trial in self.trials().items() if trial.state == TrialState.RUNNING]
            if found := self.next_trial():
                with found[1]:
                    self.train(*found, device)
            elif self.tried.issuperset(left):
                return
            else:  # others train them, and may leave them
                self.stopping.wait(1)

    def train(self, trial: Trial, output: TextIO, device: str | None):
        """Makes the runs of a point, one after the other, and tells the study the mean of their best values."""
        run_dirs: dict[str, float] = {}  # with their best values
        number = trial.user_attrs["number"]
        for own in [trial.params | averaged for averaged in self.averaged]:
            shown = [f"{key}={own[key]}" for key in IN_NAME if key in own]
            name = re.sub(r"[^\w.=+-]+", "_", "-".join([self.name, str(number), *shown]))
            code, is_pruned = self.run(trial, name, own, output, device, is_first=not run_dirs)
            if self.stopping.is_set():
                return
            if is_pruned and code == PREEMPTED:
                self.study.tell(trial, state=TrialState.PRUNED)
                say(f"trial {number}: pruned, with {trial.params}")
                return
            run_dir = newest_run(name, str(self.folder.parent))
            best = read_summary(run_dir).get("best") if code == 0 and run_dir else None
            if best is None:
                self.study.tell(trial, state=TrialState.FAIL)
                last = Path(output.name).read_text(errors="replace").strip().rpartition("\n")[2]
                say(f"trial {number}: {name} ended with code {code}, see {output.name}: {last}")
                return
            run_dirs[str(run_dir)] = best
        value = sum(run_dirs.values()) / len(run_dirs)
        trial.set_user_attr("run_dirs", [*run_dirs])
        self.study.tell(trial, value)
        say(f"trial {number}: {value:.5g} with {trial.params}; best {self.study.best_value:.5g}")

    def run(self, trial: Trial, name: str, own: dict, output: TextIO, device, is_first: bool) -> tuple[int, bool]:
        """Runs train.py. Returns its exit code, and whether the pruner has stopped it."""
        link = [sys.executable, "-I", "-c", LINK] if sys.platform == "linux" else []
        command = [*link, sys.executable, str(REPO / "train.py"), *self.words, *config_file.words_of(own)]
        command += ["--out_dir", name, "--resume", "auto"]
        threads = max(1, (os.cpu_count() or 1) // self.args.jobs)
        env = {"OMP_NUM_THREADS": str(threads)} | os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
        # Its output has the lock. In a session of its own, else Ctrl-C would reach it twice.
        process = Popen(command, env=env, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True)
        is_pruned = False
        while process.poll() is None:
            self.stopping.wait(0.2)
            is_pruned = self.args.prune and is_first and self.is_hopeless(trial, name)
            if is_pruned or self.stopping.is_set():
                process.terminate()
                process.wait()
        return process.returncode, is_pruned

    def is_hopeless(self, trial: Trial, name: str) -> bool:
        """Reports the new values of a run. They are counted, since runs may have other steps. Whether to prune it."""
        newest = named_folders(self.folder.parent / name)[:1]
        values = [value for run_dir in newest for value in curve({"path": run_dir}, self.monitor)[1]]
        known = len(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for number, value in enumerate(values[known:], known + 1):
            trial.report(value, number)
        return len(values) > known and trial.should_prune()  # MedianPruner, Optuna's default

    def summarize(self) -> int:
        """Prints what came out and what to do next, and returns the exit code."""
        points, left, done = self.count()
        if left:
            say(f"{left} of {points} points have no result yet: the same command goes on with them")
        if done:
            best = self.study.best_trial
            say(f"best {self.monitor} {best.value:.5g} of {done} trials: {best.params}")
            for run_dir in best.user_attrs["run_dirs"]:
                say(f"next: python test.py --out_dir {shlex.quote(run_dir)}")
            words = shlex.join([str(self.folder.parent), "--group", "--sort", "mean", "--filter", f"run={self.name}-*"])
            say(f"next: python tools/runs.py {words}")
        return PREEMPTED if self.stopping.is_set() else int(left > 0)


def devices(jobs: int) -> list[str | None]:
    """A GPU for each of the jobs, in turn: those of CUDA_VISIBLE_DEVICES where it is set, else all. None where there
    are none, or where one job may have them all. A GPU that is split is one device, unless its MIG names are set."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is None:  # --list-gpus would have lines for MIG, too
        code, listed = getstatusoutput("nvidia-smi --query-gpu=index --format=csv,noheader")
        gpus = listed.replace("\n", ",") if code == 0 else ""
    names = [name for name in gpus.split(",") if name]
    return [names[job % len(names)] if names and jobs > 1 else None for job in range(jobs)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="YAML", help="the search; its name is that of the study and its runs")
    parser.add_argument("--trials", type=int, default=20, help="points to draw, of ranges (20)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="points at a time, each on a GPU of its own (1); the seeds of one follow each other",
    )
    parser.add_argument("--prune", action="store_true", help="stop runs below the median of 5; needs the csv logger")
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:place])
    args.options = sys.argv[place + 1 :]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if args.jobs < 1:
        end(MISTAKE, f"--jobs {args.jobs}: must be 1 or more")

    def stop(number: int, frame):
        signal.signal(number, signal.SIG_DFL)  # the second time at once
        sweep.stopping.set()
        say("stopping: the runs save; the same command goes on")

    try:
        sweep = Sweep(args)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        points, left, _ = sweep.count()
        if left:  # the first trial may take hours
            runs = left * len(sweep.averaged)
            say(f"points to train: {left} of {points}, runs: {runs}; trial N prints to {sweep.folder}/N.log")
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(sweep.work, devices(args.jobs)))
    except (ConfigError, OSError) as error:
        end(MISTAKE if isinstance(error, ConfigError) else 1, str(error))
    return sweep.summarize()


if __name__ == "__main__":
    sys.exit(main())
