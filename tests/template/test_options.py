"""Options: where they come from, what is refused, how they are written, what --help says, which run is meant. Bounds,
choices and types are tested in test_own_options.py."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from commands import REPO, SMALL, call, run
from mistakes import refuses

from config import EvalConfig, TrainConfig
from runtime.cli import parse_test, parse_train
from runtime.config_file import read_config, to_yaml
from runtime.errors import ConfigError

RUN = "20260101-000000-train_out"
CONFIG = to_yaml(TrainConfig())


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch) -> Path:
    """Each test has a current directory with FILES alone."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(f"{name}.yaml").write_text(text)
    return tmp_path


def train(options: str) -> TrainConfig:
    """What `python train.py OPTIONS` trains with."""
    return parse_train(TrainConfig, options.split())


def of_test(options: str) -> EvalConfig:
    return parse_test(EvalConfig, options.split())


def of_file(content: str, options: str = "") -> TrainConfig:
    Path("file.yaml").write_text(content)
    return train(f"--config_path file.yaml {options}")


def make_run(name: str = RUN, **config) -> Path:
    """A finished run, as far as the command line looks at it. Returns its config.yaml."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(TrainConfig(**{"out_dir": folder.name[16:], **config})))
    (folder / "summary.json").write_text('{"state": "finished"}')
    return folder / "config.yaml"


def variables(words: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words.split())


# ---- sources: defaults < config files in their order < launcher < command line

FILES = {
    "shared": "epochs: 1\nseed: 1\nbase_lr: 0.1\n",
    "variant": "epochs: 2\nseed: 2\n",
    "null": "seed: null\nepochs: ~\nbase_lr:\n",  # not given: the value of an earlier file stays
    "nothing": "# nothing yet\n",
    "other": "summary: true\nfast_run: 3\nepochs: 3\nlogger_name: [wandb]\n",
    "f1": "monitor: val/f1\nmonitor_mode: max\n",
    "warmup": "warmup_epochs: 30\n",  # alone, longer than the run
}
SOURCES = {
    "--config_path shared.yaml variant.yaml --epochs 3": {"epochs": 3.0, "seed": 2, "base_lr": 0.1},
    "--config_path variant.yaml --config_path shared.yaml": {"epochs": 1.0, "seed": 1, "base_lr": 0.1},
    "--config_path shared.yaml null.yaml nothing.yaml": {"epochs": 1.0, "seed": 1, "base_lr": 0.1},
    "--config_path warmup.yaml --epochs 50": {"warmup_epochs": 30.0, "epochs": 50.0},
    "--config_path other.yaml --summary false --fast_run 0 --epochs 20 --logger_name csv tensorboard": {},
    "--config_path f1.yaml --monitor val/accuracy --monitor_mode min": {"monitor_mode": "min"},
}
RESTARTS = "LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS"
# The environment, options, what they become, and the environment of the run: a variable with a ! is unset.
LAUNCHED = [
    ("LOCAL_WORLD_SIZE=3 WORLD_SIZE=6", "--devices 2", "devices=2 num_nodes=2", ""),
    (f"{RESTARTS}=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "", "devices=2 num_nodes=1", ""),
    (f"{RESTARTS}=0", "", "devices=2 num_nodes=1", ""),
    # Two nodes of three tasks. What Fabric needs to know of them it gets here, too.
    ("SLURM_STEP_NUM_TASKS=6 SLURM_STEP_NUM_NODES=2 SLURM_JOB_NAME=bash", "", "devices=3 num_nodes=2",
     "WORLD_SIZE=6 SLURM_JOB_NAME=srun"),
    # The shell of a job: Fabric would wait for its tasks, which nobody starts.
    ("SLURM_NTASKS=6 SLURM_STEP_NUM_TASKS=1", "--devices 2", "devices=2 num_nodes=1", "!SLURM_NTASKS !WORLD_SIZE"),
    # An earlier launch has left it: Fabric would wait for processes that nobody starts, or on another machine.
    ("LOCAL_RANK=1 MASTER_ADDR=192.0.2.1 MASTER_PORT=29500", "--devices 2", "devices=2",
     "!LOCAL_RANK !MASTER_ADDR MASTER_PORT=29500"),
    # Given by Fabric to the processes that it starts, or by hand to each.
    *((f"{given} MASTER_ADDR=192.0.2.1", "", "", f"{given} MASTER_ADDR=192.0.2.1")
      for given in ("LOCAL_RANK=1 WORLD_SIZE=1", "NODE_RANK=1 LOCAL_RANK=1")),
    # fabric run
    ("LT_ACCELERATOR=cpu LT_DEVICES=4 LT_NUM_NODES=2 LT_STRATEGY=ddp LT_PRECISION=bf16-true LT_CLI_USED=1",
     "--precision 32-true", "accelerator=cpu devices=4 num_nodes=2 strategy=ddp precision=32-true", "!LT_CLI_USED"),
]  # fmt: skip


@pytest.mark.parametrize("given, options, expected, left", LAUNCHED)
def test_a_launcher_tells_the_devices(given: str, options: str, expected: str, left: str, monkeypatch):
    """It wins over config files, the command line over it."""
    for name, value in variables(given).items():
        monkeypatch.setenv(name, value)
    config = of_file("devices: 1\nnum_nodes: 1\n", options)
    assert {name: str(getattr(config, name)) for name in variables(expected)} == variables(expected)
    for name, value in variables(left).items():
        assert (name[1:] not in os.environ) if name[0] == "!" else os.environ[name] == value


# What a shell, argparse or YAML would read otherwise.
VALUES = {
    "--summary --seed 1": {"summary": True, "seed": 1},
    "--nodeterministic": {"deterministic": False},  # as the help says
    "--compile --seed 1": {"compile": "default", "seed": 1},
    "--fast_run": {"fast_run": 4},
    "--comment= --project -1e5 --devices 010 --summary=True --logger_name csv":
        {"comment": "", "project": "-1e5", "devices": "010", "summary": True, "logger_name": ("csv",)},
    "comment: ''\nproject: -1e5\ndevices: 010\nsummary: no\nlogger_name: csv":
        {"comment": "", "project": "-1e5", "devices": "010", "logger_name": ("csv",)},
    "--base_lr 1e-5 --out_dir 1e-3 --limit_train_batches 1.0 --limit_val_batches 1":  # a fraction, and a count
        {"base_lr": 1e-5, "out_dir": "1e-3", "limit_train_batches": 1.0, "limit_val_batches": 1},
    "base_lr: 1e-5\nlimit_train_batches: 1e-1\nlimit_val_batches: 1":
        {"base_lr": 1e-5, "limit_train_batches": 0.1, "limit_val_batches": 1},
    "logger_name: [csv, wandb]": {"logger_name": ("csv", "wandb")},
    "comment: '--not an option: # 5'\nproject: 2026": {"comment": "--not an option: # 5", "project": "2026"},
    "comment: 'null'\nproject: '~'\nout_dir: 1_000": {"comment": "null", "project": "~", "out_dir": "1_000"},
    "out_dir: yes\ncomment: 'a: b # ü 测试'": {"out_dir": "yes", "comment": "a: b # ü 测试"},
    'comment: "two\\nlines\\n"\nproject: \' "x" \'': {"comment": "two\nlines\n", "project": ' "x" '},
}  # fmt: skip


@pytest.mark.parametrize("given, expected", (SOURCES | VALUES).items(), ids=[*SOURCES, *VALUES])
def test_later_sources_win_and_a_config_written_and_read_is_the_same(given: str, expected: dict):
    config = (train if given.startswith("--") else of_file)(given)
    assert vars(config) == vars(TrainConfig()) | expected
    assert all(type(getattr(config, name)) is type(value) for name, value in expected.items())
    written = to_yaml(config)
    assert of_file(written) == config
    assert to_yaml(of_file(written)) == written  # else a resumed run seems to have other options


# ---- mistakes: each is one line that names the option and what helps, and nothing is made

NUMBERS = [each.name for each in fields(TrainConfig) if each.type in (int, float, int | float)]
WRONG = {
    # words that are no option, or have no value. `--resume $RUN`, where RUN is not set, must not start a new run.
    "stray": "stray",
    "--epoch 3": "--epoch --epochs",  # no abbreviations
    "--batch_size 32": "--batch_size --effective_batch_size --micro_batch_size --base_batch_size",
    "--max-steps=3": "--max-steps --max_steps?",
    "--resume --summary": "--resume",
    **{f"--{name}=": f"--{name}:" for name in ("resume", "out_dir", "devices", "config_path")},
    "--logger_name": "--logger_name:",
    # types, choices and bounds: each option that is a number has one; all mistakes are named
    "--limit_train_batches some": "--limit_train_batches some",
    "--logger_name csv mlflow": "--logger_name mlflow",
    " ".join(f"--{name} -1" for name in NUMBERS): " ".join(f"--{name}" for name in NUMBERS),
    # of two options, or of an option and the data
    "--devices 65": "--devices --effective_batch_size 64",
    "--fast_run 1": "--fast_run 2",
    "--fast_run 2 --resume auto": "--fast_run --resume",
    "--accelerator cpu --effective_batch_size 1218": "--effective_batch_size 1218 1217",
    "--accelerator cpu --max_steps 18": "--warmup_epochs 19 18",
    "--accelerator cpu --drop_last False --micro_batch_size 32": "--drop_last False 1 2",
    "--monitor val/loss --monitor_mode max": "--monitor_mode max val/loss min",
    "--monitor train/loss --monitor_mode max": "--monitor_mode max train/loss min",
    "--monitor_mode min --config_path f1.yaml": "--monitor_mode min --monitor",  # it may be meant for another value
    "--limit_train_batches 1.5": "--limit_train_batches 1.5",
    "--limit_val_batches 0.0": "--limit_val_batches 0.0",
    "--out_dir ..": "--out_dir ..",
    "--root_dir s3://bucket/runs": "--root_dir s3://bucket/runs",
    # what only torch, Fabric, the dataset or the file system know
    "--accelerator cpu --effective_batch_size 63 --devices 2": "rank --effective_batch_size 63 62 64",
    "--accelerator cpu --monitor val/f1 --monitor_mode max --num_sanity_val_steps 0":
        "--monitor val/f1 train/loss train/grad_norm val/loss val/accuracy",
    "--accelerator cpu --limit_val_batches 0": "--monitor val/accuracy train/loss",
    "--accelerator cpu --strategy dp": "--strategy dp ddp",  # Fabric would silently take ddp instead
    "--accelerator cpu --precision 16-mixed": "--precision 16-mixed",
    "--accelerator cpu --devices 0": "--accelerator cpu --devices 0:",  # those that were given
    "--accelerator cpu --data_dir .": "--data_dir .",
    "--accelerator cpu --root_dir shared.yaml": "--root_dir shared.yaml",
    # the run that is meant, and what a resume cannot change: the state would be that of something else
    "--resume folder": "--resume folder config.yaml",
    f"--resume {RUN} --out_dir other": "--out_dir other train_out",
    "--resume train_out --seed 7": "--seed 7 42",
    "--resume train_out --monitor_mode min --monitor val/accuracy": "--monitor_mode min max",
    "--resume auto --epochs 0": "--epochs",
}  # fmt: skip
WRONG_IN_TEST = {
    "--epochs 3": "--epochs",
    "--batch_size -1": "--batch_size -1",
    "--checkpoint=": "--checkpoint:",
    "--out_dir folder": "--out_dir folder config.yaml",
    "--accelerator cpu": f"--checkpoint best {RUN}",
    "--accelerator cpu --checkpoint last": "--checkpoint last",
}
MISTAKES = {f"train.py {words}": names for words, names in WRONG.items()}
MISTAKES |= {f"test.py {words}": names for words, names in WRONG_IN_TEST.items()}


@pytest.mark.parametrize("command", MISTAKES)
def test_value_that_is_not_allowed_or_makes_the_state_meaningless(command: str, cwd: Path):
    make_run()
    Path("folder").mkdir()
    # simple_parsing logs one of two types, too, which pytest would hide.
    how = run if "--devices 2" in command or "some" in command else call
    refuses(command, cwd, *MISTAKES[command].split(), how=how)


def test_further_values_that_cannot_be(cwd: Path, monkeypatch):
    """An option like no other gets no hint. config.yaml could not hold bytes that are not UTF-8. A config checks
    itself, wherever it is made. Restarts may hang for longer than --timeout."""
    assert "did you mean" not in call("train.py --wandb", cwd, 2).stderr
    refuses("train.py --comment " + os.fsdecode(b"\xff"), cwd, "\\udcff", how=run)
    for cls, options in ((TrainConfig, {"epochs": -1}), (TrainConfig, {"monitor": "f1"}), (EvalConfig, {"split": ""})):
        with pytest.raises(ConfigError, match=f"--{[*options][0]} "):
            cls(**options)
    for name, value in variables(f"{RESTARTS}=1").items():
        monkeypatch.setenv(name, value)
    refuses("train.py", cwd, "--max-restarts 1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


BAD_FILES = {
    None: "",  # there is no such file
    bytes(range(256)): "",  # no text
    b"config_path: b.yaml": "config_path",
    b"a: [": "",
    b"- seed\n- epochs\n": "",
    b"epohcs: 3": "--epohcs --epochs?",
    b"seed: 1\nepochs: 3\nseed: 2": "seed twice",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_config_file_that_is_wrong_is_named(content: bytes | None, cwd: Path):
    if content is not None:
        Path("bad.yaml").write_bytes(content)
    words = BAD_FILES[content].split()
    refuses("train.py --config_path shared.yaml bad.yaml", cwd, "--config_path", "bad.yaml", *words)


def test_run_with_a_truncated_config(cwd: Path):
    """Its options would be taken for the defaults. A checkpoint has a config of its own; weights alone have not."""
    path = make_run()
    for length in (9, -5):
        path.write_text(CONFIG[:length])
        refuses("train.py --resume train_out", cwd, "config.yaml", "damaged")
    path.write_text(CONFIG.replace("seed: 42", "seed: many"))
    refuses("train.py --resume train_out", cwd, "config.yaml", "--seed")
    call(f"train.py {SMALL} --epochs 1", cwd)
    (path,) = (path for path in cwd.glob("*/config.yaml") if path.parent.name != RUN)
    path.write_text(CONFIG[:99])
    refuses(f"test.py --checkpoint {path.parent}/model.pt", cwd, "config.yaml", "damaged")
    assert "accuracy" in call("test.py", cwd).stdout


# ---- help


@pytest.mark.parametrize("script, cls", [("train.py", TrainConfig), ("test.py", EvalConfig)])
def test_help_shows_each_option_once_with_its_group_text_and_default_and_imports_no_torch(script: str, cls: type):
    """In the order of config.yaml; and it has no words of the code."""
    done = run(f"{script} --help", REPO, COLUMNS="1000", PYTHONPROFILEIMPORTTIME="1")
    assert "argparse" in done.stderr
    assert not re.search(r"\| +(torch|lightning|numpy|sklearn)$", done.stderr, re.MULTILINE)
    text = done.stdout
    found = re.findall(r"^(?:\w.*(?=:$)|  --\w+)", text, re.MULTILINE)
    expected = [[base.__doc__, *(f"  --{each.name}" for each in fields(base))] for base in cls.__bases__[::-1]]
    assert [line for line in found if line not in ("usage", "options")] == sum(expected, [])
    entries = dict(re.findall(r"^  --(\w+) *((?:.|\n   )*)$", text, re.MULTILINE))
    for name, value in vars(cls()).items():
        assert f" (default: {value})" in " ".join(entries[name].split()), name
    assert not re.search(r"\b(dataclass|config\.py|runtime|fixed|per_host|Literal|\w+Config)\b", text)


# ---- which run is meant


def test_a_tilde_is_the_home_directory(monkeypatch, tmp_path: Path):
    """After `=`, in quotes and in a file a shell leaves it as it is. A name that only begins with one is kept."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    run_dir = make_run(f"{home}/runs/20260101-000000-x").parent
    (run_dir / "best.ckpt").touch()
    (home / "file.yaml").write_text("root_dir: ~/runs\n")
    for options in ("--root_dir=~/runs", "--config_path ~/file.yaml"):
        assert train(options).root_dir == f"{home}/runs"
    config = train("--out_dir ~no-such-user --comment ~/x")
    assert (config.out_dir, config.comment) == ("~no-such-user", "~/x")
    assert train("--resume ~/runs/x").resume == str(run_dir)
    for options in ("--out_dir ~/runs/x", "--checkpoint ~/runs/20260101-000000-x/best.ckpt"):
        assert of_test(options).out_dir == str(run_dir)


RUNS = ["20260103-000000-train_out", "20260101-000000-train_out", "20260106-000000-other",
        "root/20260107-000000-train_out", "x-20260109-000000-train_out", "20260109-000000-train_out-1"]  # fmt: skip
MEANT = {
    # A restarted job must not start a second run, nor go back to an older one, if the newest is finished, too.
    **{name: RUNS[0] for name in ("auto", "train_out", RUNS[0])},
    "auto --out_dir other": RUNS[2],
    RUNS[1]: RUNS[1],
    "other": RUNS[2],
    "auto --out_dir root/train_out": RUNS[3],
    **{f"{name} --root_dir root": RUNS[3] for name in ("auto", "train_out", "20260107-000000-train_out")},
}


@pytest.mark.parametrize("resume", MEANT)
def test_the_newest_run_of_a_name_is_resumed_with_its_options(resume: str, capsys):
    """Nothing has to be typed again; what is typed wins, and is told, and so is which run a name means. The root_dir
    that is given says where to look for the run, which keeps its own."""
    for name in RUNS:
        make_run(name, epochs=7, base_lr=0.5, effective_batch_size=32, root_dir="there")
    Path("20260108-000000-train_out").mkdir()  # without a config.yaml it is no run
    config = train(f"--resume {resume} --config_path shared.yaml --seed 42 --epochs 9")
    assert (config.resume, config.root_dir) == (MEANT[resume], "there")
    assert (config.epochs, config.base_lr, config.effective_batch_size) == (9, 0.1, 32)
    told = capsys.readouterr().out
    assert sorted(re.findall("(.*) instead of .*", told)) == ["--base_lr 0.1", "--epochs 9.0"]
    if resume.split()[0] in ("train_out", "other"):
        assert f"--resume {resume.split()[0]}: the run is {MEANT[resume]}\n" in told
    for options, path in {"": RUNS[0], "--out_dir other": RUNS[2], "--root_dir root": RUNS[3]}.items():
        assert of_test(options).out_dir == path


def test_a_run_stays_readable_when_the_options_in_the_code_change(capsys, cwd: Path):
    """Of this version it is read without a word, also if its last newline is gone, as an editor may leave it. An option
    that it did not have, which may have another name now, may be given on its resume; from then on it is fixed."""
    path = make_run("20260101-000000-job", width=7)
    path.write_text(path.read_text().rstrip())
    assert read_config(TrainConfig, path.parent) == TrainConfig(out_dir="job", width=7)
    assert capsys.readouterr().out == ""
    path.write_text(path.read_text().replace("lr_schedule: cosine\n", "depth: 3\nkinds: [a, b]\n"))
    assert read_config(TrainConfig, path.parent) == TrainConfig(out_dir="job", width=7)
    told = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["--lr_schedule cosine", "--depth 3", "--kinds ['a', 'b']"]
    path.write_text(path.read_text().replace("width: 7\n", "channels: 7\n"))
    assert train("--resume job --width 7").width == 7
    path.write_text(path.read_text().replace("channels: 7\n", "width: 7\n"))
    refuses("train.py --resume job --width 8", cwd, "--width 8", "7")
