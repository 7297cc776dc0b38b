"""Begins a new run with a checkpoint of another one, its parent, which is only read, and may go on.

python recipes/fork.py RUN/checkpoints/step-00000190.ckpt --out_dir NAME [--OPTION VALUE ...]
python recipes/fork.py RUN --out_dir NAME      # with the newest checkpoint of a run

A fork is a run that was killed right after that step, in a directory of its own: the last line is the command that goes
on with it. Any option may change that the weights and the optimizer fit, also those that a resume cannot change. The
step stays: with another --effective_batch_size, it is in another epoch. With another --seed, datasets that are split by
a global generator are split anew, and the parent may have trained on the new test set. The best value starts anew.
metrics.csv begins with the rows of the parent; provenance/parent.json has the path, step and SHA-256 of the checkpoint.

A decay branch (warm-up, stable, decay) of a run with --lr_schedule constant and 19 steps per epoch: the rate falls from
epoch 10 on. A second try after a spike, with the samples in another order. A sweep from a warm checkpoint:

python recipes/fork.py RUN/checkpoints/step-00000190.ckpt --out_dir decay --lr_schedule cosine --warmup_epochs 10 --epochs 15
python recipes/fork.py RUN/checkpoints/step-00000190.ckpt --out_dir again --seed 43
for x in 1e-3 4e-3; do python recipes/fork.py RUN --out_dir lr-$x --base_lr $x && python train.py --out_dir lr-$x --resume auto; done
"""  # noqa: E501 - commands

import hashlib
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from lightning.fabric import Fabric
from simple_parsing import replace

sys.path.append(str(Path(__file__).resolve().parent.parent))
from config import TrainConfig  # noqa: E402
from runtime import checkpoints, cli  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.files import write_json  # noqa: E402
from runtime.launch import run_and_exit  # noqa: E402
from runtime.loggers import CSVLogger  # noqa: E402
from runtime.options import values_of  # noqa: E402
from runtime.rundir import RunDir, code_folder  # noqa: E402


def read(path: Path) -> tuple[dict, str]:
    """The contents of a checkpoint, and its SHA-256. Raises ConfigError if it cannot be forked."""
    with cli.errors_of(str(path)), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        opened = Path(f"/dev/fd/{file.fileno()}")  # the same file, also if the parent deletes it meanwhile
        if checkpoints.step_of(opened) < 0 or not checkpoints.is_whole(opened):
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
            cli.say(f"skipped {error}")
    return None


def fork(path: Path, saved: dict, digest: str, given: dict) -> RunDir:
    """Makes the directory of a fork.

    Args:
        path: The checkpoint.
        saved: Its contents.
        digest: Its SHA-256.
        given: The options that differ from those of the checkpoint.

    Raises:
        ConfigError: An option is wrong, or the directory cannot be written; nothing is left of it.
    """
    about = saved["checkpoint"]
    with cli.errors_of(f"config of {path}"):
        before = cli.config_of(TrainConfig, about["config"])
    config = replace(before, given)
    old = values_of(before)
    changed = {name for name, value in values_of(config).items() if value != old[name]}
    is_same_data = not changed & {*config.fixed_on_resume, *config.per_host}
    sizes = {name: value for name, value in about["fixed"].items() if not name.startswith("--")}
    about["fixed"] = sizes if is_same_data else {}
    for name, optimizer in about["optimizers"].items():
        for settings, group in zip(optimizer["settings"], saved[name]["param_groups"], strict=True):
            for option in changed & settings.keys():  # the resume then takes it from the code, as one that is new there
                del settings[option], group[option]
    about["summary"]["last"].pop("best", None)
    saved |= {"best": None, "best_step": 0, "to_beat": None, "bad_validations": 0}  # best.ckpt is the parent's
    cli.words_of_launcher()  # unsets what a job of Slurm has set: Fabric would wait for other processes
    with ExitStack() as resources, cli.as_config_error(config, "root_dir", "out_dir", kinds=(OSError,)):
        run = RunDir(Fabric(accelerator="cpu", devices=1), config, resources)
        run.make_directory()
        try:
            fill(run, path.resolve(), saved, digest)
        except BaseException:
            shutil.rmtree(run.path)
            raise
    return run


def fill(run: RunDir, path: Path, saved: dict, digest: str):
    """Writes the files of a fork; config.yaml, which makes a directory a run, is the last one."""
    about = saved["checkpoint"]
    about["config"] = run.config_text
    step = about["step"]
    parent = path.parent.parent
    for name in ("checkpoints", "logs/csv", "provenance"):
        (run.path / name).mkdir(parents=True)
    checkpoints.save(run.path, saved, step, is_regular=True, is_best=False, is_first=True)
    rows = parent / "logs" / "csv" / "metrics.csv"
    if rows.is_file():
        shutil.copy(rows, run.path / "logs" / "csv")
        CSVLogger(run.path, step, run.config)  # drops the rows of later steps
    code = code_folder(parent, about["code"])
    if code.is_dir():
        shutil.copytree(code, run.path / "provenance" / code.name)
    write_json(run.path / "provenance" / "parent.json", {"path": str(path), "step": step, "sha256": digest})
    plain = {name: value for name, value in saved.items() if type(value) in checkpoints.PLAIN}
    write_json(run.path / "summary.json", plain | about["summary"] | {"checkpoint": step, "state": "interrupted"})
    run.write_config()


def parse(cls: type, argv: list[str]) -> tuple[Path, dict]:
    """The path or name of the parent, and the options that are given. Raises ConfigError."""
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        sys.exit()
    if not argv or argv[0].startswith("-"):
        raise ConfigError("expected a checkpoint or a run, and then the options; --help says more")
    given = cli.parse(cls, argv[1:])
    for name in ("resume", "config_path", "fast_run"):
        if name in given:
            raise ConfigError(f"--{name}: does not go with a fork")
    if "out_dir" not in given:
        raise ConfigError("--out_dir: give the fork a name")
    return Path(argv[0]).expanduser(), given


def main(arguments: tuple[Path, dict]) -> int:
    path, given = arguments
    if path.is_file():
        found = path, *read(path)
    else:
        run_dir = cli.find_run("checkpoint or run", str(path), given.get("root_dir", "."))
        newest = read_first(checkpoints.checkpoints_of(run_dir))
        if newest is None:
            raise ConfigError(f"{run_dir} has no whole checkpoint")
        found = newest
    run = fork(*found, given)
    cli.say(f"{run.path} begins after step {found[1]['checkpoint']['step']} of {found[0]}")
    cli.say(f"next: {run.next_command(is_finished=False)}")
    return 0


if __name__ == "__main__":
    run_and_exit(main, cli.parse_or_exit(parse, TrainConfig))
