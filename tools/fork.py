"""Begins a new run with a checkpoint of another one, its parent, which is only read, and may go on.

python tools/fork.py --parent RUN --out_dir NAME [--OPTION VALUE ...]    # with the newest checkpoint of a run
python tools/fork.py --parent RUN/checkpoints/step-00000190.ckpt --out_dir NAME

RUN is a path, or a name in --root_dir; one without the time means the newest run of that name. The other options are
those of train.py, so --out_dir is the name of the new run.

A fork is a run that was killed right after that step, in a directory of its own: the last line is the command that goes
on with it. Any option may change that the weights and the optimizer fit, also those that a resume cannot change. For
this, datasets, model and optimizers are built, on the CPU: what does not fit is an error before anything is written.
Settings of an optimizer that the options or the code have changed, such as the weight decay, are printed, and taken.
The step stays: with another --effective_batch_size, it is in another epoch. With another --seed, datasets that are
split by a global generator are split anew, and the parent may have trained on the new test set. The best value starts
anew. metrics.csv begins with the rows of the parent; the fork validates and logs the step of the checkpoint itself, if
the parent was to do so after it. provenance/parent.json has the path, step and SHA-256 of the checkpoint.

A decay branch (warm-up, stable, decay) of a run with --lr_schedule constant and 19 steps per epoch: the rate falls from
epoch 10 on. A second try after a spike, with the samples in another order. A sweep from a warm checkpoint:

at=RUN/checkpoints/step-00000190.ckpt
python tools/fork.py --parent $at --out_dir decay --lr_schedule cosine --warmup_epochs 10 --epochs 15
python tools/fork.py --parent $at --out_dir again --seed 43
for x in 1e-3 4e-3; do
    python tools/fork.py --parent RUN --out_dir lr-$x --base_lr $x && python train.py --out_dir lr-$x --resume auto
done
"""

import hashlib
import logging
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from simple_parsing import replace

sys.path.append(str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from config import TrainConfig  # noqa: E402
from runtime import checkpoints, cli, config_file, options  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.files import write_json  # noqa: E402
from runtime.launch import build_in_turn, run_and_exit  # noqa: E402
from runtime.loggers import CSVLogger  # noqa: E402
from runtime.options import as_config_error, marked, values_of  # noqa: E402
from runtime.resume import Resume  # noqa: E402
from runtime.run import Run  # noqa: E402
from runtime.rundir import RunDir  # noqa: E402
from runtime.runs import find_run  # noqa: E402
from runtime.source import code_folder  # noqa: E402
from runtime.terminal import say  # noqa: E402

# Options that a resume cannot change, or that may differ between machines, and that do not choose the samples.
NOT_OF_DATA = {"out_dir", "seed", "effective_batch_size", "limit_train_batches", "monitor", "monitor_mode",
               "devices", "num_workers"}  # fmt: skip


class Built(Exception):
    """train.py has built its state."""


def read(path: Path) -> tuple[dict, str]:
    """The contents of a checkpoint, and its SHA-256. Raises ConfigError if it cannot be forked."""
    with config_file.errors_of(str(path)), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        opened = Path(f"/dev/fd/{file.fileno()}")  # the same file, also if the parent deletes it meanwhile
        if not checkpoints.is_whole(opened) or checkpoints.step_of(opened) < 0:
            raise ConfigError("is not a whole checkpoint")
        saved = checkpoints.load(opened)
        if saved["checkpoint"].get("format") != checkpoints.FORMAT:
            raise ConfigError("was written by another version of the template")
        return saved, digest


def read_first(paths: list[Path]) -> tuple[Path, dict, str] | None:
    """The first of these files that can be forked, its contents and SHA-256; None if there is none."""
    for path in paths:
        try:
            return path, *read(path)
        except ConfigError as error:
            say(f"skipped {error}")
    return None


def config_of(path: Path, saved: dict) -> TrainConfig:
    """The options of a checkpoint."""
    with config_file.errors_of(f"config of {path}"):
        return config_file.config_of(TrainConfig, saved["checkpoint"]["config"])


def fabric_on_cpu() -> Fabric:
    cli.words_of_launcher()  # unsets what a job of Slurm has set: Fabric would wait for other processes
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # otherwise it prints the seed
    return Fabric(accelerator="cpu", devices=1)


def build(fabric: Fabric, config: TrainConfig) -> Run:
    """A run of train.py that has built its state, and not yet restored it."""
    prepare = Run.prepare

    def stop(run: Run, state: dict, plan):
        prepare(run, state, plan)
        raise Built(run)

    def start(train_with, build_datasets, config):
        with ExitStack() as resources:
            run: Any = Run(fabric, config, resources)
            train_with(fabric, run.config, run, build_in_turn(fabric, lambda: build_datasets(run.config)))

    train.run_training = start
    fabric.seed_everything(config.seed)
    Run.prepare = stop  # type: ignore
    try:
        train.main(config)
    except Built as built:
        return built.args[0]
    finally:
        Run.prepare = prepare  # type: ignore
    raise RuntimeError("train.py does not call run.prepare")


def fit(path: Path, saved: dict, config: TrainConfig):
    """Restores the state that these options build. The settings of optimizers that have changed leave the checkpoint:
    the resume takes them from the code, as those that are new there. Raises ConfigError if the state does not fit."""
    fabric = fabric_on_cpu()
    run = build(fabric, config)
    resume = Resume()
    resume.saved = saved
    resume.origin = str(path)
    then = saved["checkpoint"]["optimizers"]
    for name in sorted(then.keys() & run.built.optimizers.keys()):
        take_settings(name, run.built.optimizers[name], then[name], saved[name].get("param_groups", []))
    try:
        resume.restore(fabric, run.state, run.built)
    except ConfigError as error:
        message = str(error).removeprefix(f"--resume {path}: ")
        raise ConfigError(f"{path}: {message}") from error


def take_settings(name: str, built: list, then: list, saved: list):
    """Removes the settings of an optimizer that have changed from what a checkpoint has of it, and says which.

    Args:
        name: Its name in the state.
        built: Its groups, as they were built.
        then: Those in the checkpoint.
        saved: Those in its state_dict there.
    """
    for number, old in enumerate(then):
        same = [group for group in built if {*group["parameters"]} == {*old["parameters"]}]
        for new in same[:1]:  # without one, it does not fit
            for setting in sorted(new.keys() & old.keys() - {"parameters", "class"}):
                if new[setting] != old[setting]:
                    say(f"{name}, group {number}: {setting} {new[setting]} instead of {old[setting]}")
                    del old[setting], saved[number][setting]


def fork(path: Path, saved: dict, digest: str, before: TrainConfig, config: TrainConfig) -> RunDir:
    """Makes the directory of a fork.

    Args:
        path: The checkpoint.
        saved: Its contents.
        digest: Its SHA-256.
        before: The options of the checkpoint.
        config: The options of the fork.

    Raises:
        ConfigError: An option is wrong, or the directory cannot be written; nothing is left of it.
    """
    about = saved["checkpoint"]
    old = values_of(before)
    changed = {name for name, value in values_of(config).items() if value != old[name]}
    if changed & {*marked(config, "fixed"), *marked(config, "per_host")} - NOT_OF_DATA:
        about["data"] = {}  # the datasets may be others
    about["summary"]["last"].pop("best", None)
    saved |= {"best": None, "best_step": 0, "to_beat": None, "bad_validations": 0}  # best.ckpt is the parent's
    with ExitStack() as resources, as_config_error(config, "root_dir", "out_dir", kinds=(OSError,)):
        run = RunDir(config, resources)
        run.make()
        try:
            fill(run, path.resolve(), saved, digest)
        except BaseException:
            run.remove()
            raise
    return run


def fill(run: RunDir, path: Path, saved: dict, digest: str):
    """Writes the files of a fork; config.yaml, which makes a directory a run, is the last one."""
    about = saved["checkpoint"]
    about["config"] = run.config_text
    about["fixed"] = marked(run.config, "fixed")
    step = about["step"]
    parent = path.parent.parent
    for name in ("checkpoints", "logs/csv", "provenance"):
        (run.path / name).mkdir(parents=True)
    checkpoints.save(checkpoints.path_of(run.path, step), saved)
    rows = parent / "logs" / "csv" / "metrics.csv"
    if rows.is_file():
        shutil.copy(rows, run.path / "logs" / "csv")
        CSVLogger(run.path, step - 1 if saved["due"] else step, run.config)  # drops the rows that come again
    code = code_folder(parent, about["code"])
    if code.is_dir():
        shutil.copytree(code, run.path / "provenance" / code.name)
    write_json(run.path / "provenance" / "parent.json", {"path": str(path), "step": step, "sha256": digest})
    run.summary |= about["summary"] | {"checkpoint": step}
    run.began -= run.summary["seconds"]
    run.state = saved
    run.write_summary("interrupted")
    run.write_config()


def parse(cls: type, argv: list[str]) -> tuple[str, dict]:
    """The path or name of the parent, and the options that are given. Raises ConfigError."""
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        sys.exit()
    parser = options.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent", required=True)
    own, words = parser.parse_known_args(argv)
    given = options.parse(cls, words)
    for name in ("resume", "config_path", "fast_run"):
        if name in given:
            raise ConfigError(f"--{name}: does not go with a fork")
    if "out_dir" not in given:
        raise ConfigError("--out_dir: give the fork a name")
    return own.parent, given


def main(arguments: tuple[str, dict]) -> int:
    parent, given = arguments
    if os.path.isfile(parent):
        found = Path(parent), *read(Path(parent))
    else:
        run_dir = find_run("--parent", parent, given.get("root_dir", "."))
        newest = read_first(checkpoints.checkpoints_of(run_dir))
        if newest is None:
            raise ConfigError(f"{run_dir} has no whole checkpoint")
        found = newest
    path, saved, digest = found
    before = config_of(path, saved)
    config = replace(before, given)
    fit(path, saved, config)
    run = fork(path, saved, digest, before, config)
    say(f"{run.path} begins after step {saved['checkpoint']['step']} of {path}")
    say(f"next: {run.next_command(is_finished=False)}")
    return 0


if __name__ == "__main__":
    run_and_exit(main, cli.parse_or_exit(parse, TrainConfig))
