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
The study is the file NAME.journal: the same command, given several times or on machines that share the directory, works
on one study, and goes on with one that was interrupted, in the middle of its runs. Ctrl-C lets all runs save and stop.
Needs `pip install optuna==5.0.0`; the file is read by optuna-dashboard, too.
"""

import argparse
import csv
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from cli import newest_run  # noqa: E402 - they import no torch
from config import ConfigError, TrainConfig, mode_of, options_of  # noqa: E402

try:
    import optuna
    from filelock import FileLock
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError as error:
    sys.exit(f"sweep.py: error: {error}: pip install optuna==5.0.0")

TYPES = {name: option.type for name, option in options_of(TrainConfig).items()}
PREEMPTED = 75  # the exit code of a run that was asked to stop and has saved


class Sweep:
    """A study, its search space, and how one of its points is trained."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.root_dir)
        self.name = args.study or (Path(args.files[0]).stem if len(args.files) == 1 else "sweep")
        self.fixed, self.space = read(args.files[0]) if len(args.files) == 1 else ({}, {})
        if not self.space:  # no search, but configs
            self.fixed, self.space = {}, {"config_path": args.files}
        self.seeds = self.space.pop("seed", [None])
        if isinstance(self.seeds, dict):
            raise ConfigError("seed: give a list; a point is trained with each of them")
        self.is_grid = not any(isinstance(choice, dict) for choice in self.space.values())
        self.stopping = threading.Event()
        given = (read(args.shared)[0] if args.shared else {}) | self.fixed
        given |= dict(re.findall(r"--([\w.]+)[= ](\S+)", " ".join(args.options)))
        monitor = given.get("monitor") or TrainConfig.monitor
        mode = given.get("monitor_mode") or mode_of(monitor)
        if mode is None:
            raise ConfigError(f"--monitor {monitor}: its name does not tell if higher is better, give --monitor_mode")
        self.monitor = monitor
        self.open(mode)

    def open(self, mode: str) -> None:
        """Opens the study, or makes it; the points of a grid wait in it from the start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.locks = self.folder / f"{self.name}.locks"
        self.locks.mkdir(exist_ok=True)
        self.lock = FileLock(self.locks / "study")  # over what must not happen twice; Optuna's own is NAME.journal.lock
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(self.folder / f"{self.name}.journal")))
        random = optuna.samplers.RandomSampler()
        sampler = random if self.args.sampler == "random" else optuna.samplers.TPESampler(constant_liar=True)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4) if self.args.prune else optuna.pruners.NopPruner()
        with self.lock:
            self.study = optuna.create_study(
                storage=storage, study_name=self.name, direction=f"{mode}imize", sampler=sampler, pruner=pruner,
                load_if_exists=True,
            )  # fmt: skip
            asked = json.dumps([self.space, self.seeds, self.fixed, self.args.options, mode], sort_keys=True)
            if "asked" not in self.study.user_attrs:
                self.study.set_user_attr("asked", asked)
                for point in itertools.product(*self.space.values()) if self.is_grid else ():
                    self.study.enqueue_trial(dict(zip(self.space, point, strict=True)))
            if self.study.user_attrs["asked"] != asked:
                raise ConfigError(f"{self.name}.journal is of another search: give another --study")

    def lock_of(self, number: int):
        """The file of a trial, locked; None where somebody has locked it. The run inherits the lock, and keeps it where
        the sweep is killed."""
        file = open(self.locks / str(number), "w")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def take_over(self) -> bool:
        """Lets trials that a sweep has left alone wait again. Returns whether others are still training."""
        is_busy = False
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            file = self.lock_of(trial.number)
            if file is None:
                is_busy = True
                continue
            self.study.enqueue_trial(trial.system_attrs.get("fixed_params") or trial.params)
            optuna.trial.Trial(self.study, trial._trial_id).set_user_attr("is_left", True)
            self.study.tell(trial.number, state=TrialState.FAIL)
            file.close()
        return is_busy

    def work(self, device: str | None) -> None:
        """Trains points on a device, one after the other, until the study is done."""
        while not self.stopping.is_set():
            with self.lock:
                is_busy = self.take_over()
                trials = self.study.get_trials(deepcopy=False)
                begun = sum("is_left" not in trial.user_attrs for trial in trials)
                is_waiting = any(trial.state == TrialState.WAITING for trial in trials)
                trial = None
                if is_waiting or (not self.is_grid and begun < self.args.trials):
                    trial = self.study.ask()
                    point = {name: suggest(trial, name, choice) for name, choice in self.space.items()}
                    file = self.lock_of(trial.number)
            if trial:
                with file:
                    self.train(trial, point, device, file)
            elif is_busy:
                time.sleep(1)  # for what the others may leave
            else:
                return

    def train(self, trial: optuna.Trial, point: dict, device: str | None, file) -> None:
        """Trains a point with each seed, and tells the study the mean of their best values."""
        bests = []
        for seed in self.seeds:
            options = self.fixed | point | ({} if seed is None else {"seed": seed})
            if self.args.shared:
                options["config_path"] = [self.args.shared, *filter(None, [point.get("config_path")])]
            name = self.name_of(point, seed)
            code = self.run(name, options, device, file, trial if self.args.prune and not bests else None)
            if self.stopping.is_set():
                return
            if code == PREEMPTED and self.args.prune:
                print(f"trial {trial.number}: pruned, with {point}", flush=True)
                self.study.tell(trial, state=TrialState.PRUNED)
                return
            run_dir = newest_run(name, str(self.folder))
            try:
                best = json.loads((run_dir / "summary.json").read_text())["best"] if code == 0 else None
            except (OSError, ValueError, KeyError, TypeError):  # damaged
                best = None
            if best is None:
                print(f"trial {trial.number}: failed with code {code}, see {self.folder / name}.log", flush=True)
                self.study.tell(trial, state=TrialState.FAIL)
                return
            bests.append(best)
        value = sum(bests) / len(bests)
        self.study.tell(trial, value)
        best = self.study.best_trial
        print(f"trial {trial.number}: {value:.5g} with {point}; best {best.value:.5g} of {best.number}", flush=True)

    def run(self, name: str, options: dict, device: str | None, file, prunable: optuna.Trial | None) -> int:
        """Runs train.py, its output in a file; a trial to be pruned is told what it monitors. Returns its exit code."""
        args = [arg for option, value in options.items() for arg in as_args(option, value)]
        command = [sys.executable, REPO / "train.py", *args, *self.args.options, "--out_dir", name]
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.args.jobs)))
        with open(self.folder / f"{name}.log", "a") as log:
            process = subprocess.Popen(  # in a session of its own: Ctrl-C reaches it once, from here
                [*command, "--root_dir", self.folder, "--resume", "auto"],
                env=environment, stdout=log, stderr=log, start_new_session=True, pass_fds=[file.fileno()],
            )  # fmt: skip
        reported, is_told = 0, False
        while process.poll() is None:
            time.sleep(0.2)
            if prunable:
                reported = self.report(prunable, newest_run(name, str(self.folder)), reported)
            if not is_told and (self.stopping.is_set() or (prunable and prunable.should_prune())):
                process.send_signal(signal.SIGTERM)
                is_told = True
        return process.returncode

    def report(self, trial: optuna.Trial, run_dir: Path | None, reported: int) -> int:
        """Reports the monitored values of the steps after `reported`. Returns the last of them."""
        path = run_dir / "logs" / "csv" / "metrics.csv" if run_dir else None
        if path and path.is_file():
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    if row.get(self.monitor) and int(row["step"]) > reported:
                        reported = int(row["step"])
                        trial.report(float(row[self.monitor]), reported)
        return reported

    def name_of(self, point: dict, seed: int | None) -> str:
        """The out_dir of a run: the study, and what differs. The same point has the same name."""
        shown = {name: Path(value).stem if name == "config_path" else value for name, value in point.items()}
        shown |= {} if seed is None else {"seed": seed}
        parts = [
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items()
        ]
        if not self.is_grid:  # digits were cut
            parts.append(f"{zlib.crc32(repr(sorted(point.items())).encode()):08x}")
        return re.sub(r"[^\w.=+-]", "_", "-".join([self.name, *parts]))


def read(file: str) -> tuple[dict, dict]:
    """The options of a YAML file that are the same for all runs, and the lists and ranges. Raises ConfigError."""
    try:
        content = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected lines of `option: value`")
    space = {}
    content = flat(content)
    for name, value in content.items():
        if name not in TYPES:
            raise ConfigError(f"{file}: unknown option {name!r}")
        is_value = "tuple" in str(TYPES[name]) and isinstance(value, list) and not isinstance(value[0], list)
        if isinstance(value, (dict, list)) and not is_value:
            space[name] = value
        if isinstance(value, dict):
            try:
                value |= {key: float(value[key]) for key in ("low", "high")}
                ok = value["low"] < value["high"] and not value.keys() - {"low", "high", "log", "step"}
            except (KeyError, TypeError, ValueError):
                ok = False
            if not ok:
                raise ConfigError(f"{file}: {name}: a range is {{low: 1, high: 2}}, with log: true or step: 1")
        elif value == []:
            raise ConfigError(f"{file}: {name}: the list is empty")
    return {name: value for name, value in content.items() if name not in space}, space


def flat(content: dict, prefix: str = "") -> dict:
    """The options with those of nested dataclasses by names with a dot: `optim: {lr: [1, 2]}` is `optim.lr: [1, 2]`."""
    found = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and any(option.startswith(f"{name}.") for option in TYPES):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def suggest(trial: optuna.Trial, name: str, choice: list | dict):
    """A value of a list or a range."""
    if isinstance(choice, list):
        return trial.suggest_categorical(name, choice)
    if "float" not in str(TYPES[name]):
        return trial.suggest_int(name, **{key: int(value) for key, value in choice.items()})
    return trial.suggest_float(name, **choice)


def as_args(option: str, value) -> list[str]:
    if isinstance(value, list):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}={value}"]


def devices(jobs: int) -> list[str | None]:
    """One GPU for each of the jobs, in turn; None where there are none, or where one job may have them all."""
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not gpus and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
        gpus = [str(number) for number in range(len(listed.splitlines()))]
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
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe", help="how points are drawn (tpe)")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="stop a run that stays below the median of the others, once there are four; needs the csv logger",
    )
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.options = sys.argv[end + 1 :]
    try:
        sweep = Sweep(args)
    except ConfigError as error:
        parser.exit(2, f"sweep.py: error: {error}\n")

    def stop(number: int, frame) -> None:
        sweep.stopping.set()
        signal.signal(number, signal.SIG_DFL)  # the second time at once
        print("stopping: the runs save; the same command goes on", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    threads = [threading.Thread(target=sweep.work, args=[device]) for device in devices(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sweep.stopping.is_set():
        return PREEMPTED
    trials = [trial for trial in sweep.study.get_trials(deepcopy=False) if "is_left" not in trial.user_attrs]
    if any(trial.state == TrialState.COMPLETE for trial in trials):
        print(f"best {sweep.monitor} {sweep.study.best_value:.5g}: {sweep.study.best_params}")
    return int(any(trial.state == TrialState.FAIL for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
