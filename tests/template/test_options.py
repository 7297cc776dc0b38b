"""Options: where they come from, what is refused, how they are written, what --help says, which run is meant."""

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from helpers import REPO, SMALL, call, run
from mistakes import refuses

from config import EvalConfig, TrainConfig
from runtime.cli import parse_test, parse_train
from runtime.config_file import read_config, to_yaml
from runtime.errors import ConfigError
from runtime.options import values_of
from runtime.runs import read_summary

OF_LAUNCHERS = ["LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
RUN = "20260101-000000-train_out"
CONFIG = to_yaml(TrainConfig())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """Each test has an empty current directory, and no launcher around it."""
    for name in list(os.environ):
        if name.startswith(("LT_", "SLURM_")) or name in OF_LAUNCHERS:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(options: str) -> TrainConfig:
    """What `python train.py OPTIONS` trains with."""
    return parse_train(TrainConfig, options.split())


def of_test(options: str) -> EvalConfig:
    return parse_test(EvalConfig, options.split())


def of_file(content: str, options: str = "") -> TrainConfig:
    Path("file.yaml").write_text(content)
    return train(f"--config_path file.yaml {options}")


def make_run(name: str = RUN, is_finished: bool = False, **config) -> Path:
    """A run directory, as far as the command line looks at it. Returns its config.yaml."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(TrainConfig(**{"out_dir": folder.name[16:], **config})))
    (folder / "summary.json").write_text(json.dumps({"state": "finished" if is_finished else "running"}))
    return folder / "config.yaml"


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# ---- sources: defaults < config files in their order < launcher < command line

FILES = {
    "shared": "epochs: 1\nseed: 1\nbase_lr: 0.1\n",
    "variant": "epochs: 2\nseed: 2\n",
    "null": "seed: null\nepochs: ~\nbase_lr:\n",  # not given: the value of an earlier file stays
    "nothing": "# nothing yet\n",
    "every": "".join(f"{name}: null\n" for name in values_of(TrainConfig())),
    "other": "summary: true\nfast_run: 3\nepochs: 3\nlogger_name: [wandb]\n",
    "f1": "monitor: val/f1\nmonitor_mode: max\n",
    "loss": "monitor: val/loss\nmonitor_mode: min\n",
    "config": "epochs: 5\n",  # a run's own config.yaml has a last line that shows that it is whole; others need not
    "warmup": "warmup_epochs: 30\n",  # alone, longer than the run
}
SOURCES = {
    "": {},
    "--config_path shared.yaml variant.yaml --epochs 3": {"epochs": 3, "seed": 2, "base_lr": 0.1},
    "--config_path variant.yaml shared.yaml --epochs 3": {"epochs": 3, "seed": 1, "base_lr": 0.1},
    "--config_path shared.yaml --config_path variant.yaml": {"epochs": 2, "seed": 2, "base_lr": 0.1},
    "--config_path shared.yaml null.yaml": {"epochs": 1, "seed": 1, "base_lr": 0.1},
    "--config_path nothing.yaml": {},
    "--config_path every.yaml": {},
    "--config_path config.yaml": {"epochs": 5},
    "--config_path warmup.yaml --epochs 50": {"warmup_epochs": 30, "epochs": 50},
    "--config_path other.yaml --summary false --fast_run 0 --epochs 20 --logger_name csv tensorboard": {},
    "--config_path f1.yaml": {"monitor": "val/f1"},
    "--config_path f1.yaml loss.yaml": {"monitor": "val/loss", "monitor_mode": "min"},
    "--config_path f1.yaml --monitor val/accuracy --monitor_mode min": {"monitor_mode": "min"},
}


@pytest.mark.parametrize("options", SOURCES)
def test_later_sources_win(options: str):
    for name, text in FILES.items():
        Path(f"{name}.yaml").write_text(text)
    assert train(options) == replace(TrainConfig(), **SOURCES[options])


RESTARTS = "LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS=1"
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
# The environment, options, what they become, and the environment of the run: a variable with a ! is unset.
LAUNCHED = [
    ("LOCAL_WORLD_SIZE=3 WORLD_SIZE=6", "", "devices=3 num_nodes=2", ""),
    ("LOCAL_WORLD_SIZE=3 WORLD_SIZE=6", "--devices 2", "devices=2 num_nodes=2", ""),
    (f"{RESTARTS} {VARIABLE}", "", "devices=2 num_nodes=1", ""),
    (RESTARTS.replace("RESTARTS=1", "RESTARTS=0"), "", "devices=2 num_nodes=1", ""),
    # Two nodes of three tasks. What Fabric needs to know of them it gets here, too.
    ("SLURM_STEP_NUM_TASKS=6 SLURM_STEP_NUM_NODES=2 SLURM_JOB_NAME=bash", "", "devices=3 num_nodes=2",
     "WORLD_SIZE=6 SLURM_JOB_NAME=srun"),
    # The shell of a job: Fabric would wait for its tasks, which nobody starts.
    ("SLURM_NTASKS=6 SLURM_STEP_NUM_TASKS=1", "--devices 2", "devices=2 num_nodes=1", "!SLURM_NTASKS !WORLD_SIZE"),
    # An earlier launch has left it: Fabric would wait for processes that nobody starts, or on another machine.
    ("LOCAL_RANK=1 MASTER_ADDR=192.0.2.1 MASTER_PORT=29500", "--devices 2", "devices=2",
     "!LOCAL_RANK !MASTER_ADDR MASTER_PORT=29500"),
    # Given by Fabric to the processes that it starts, or by hand to each.
    *((f"{given} MASTER_ADDR=192.0.2.1", "--devices 2", "devices=2", f"{given} MASTER_ADDR=192.0.2.1")
      for given in ("NODE_RANK=1 LOCAL_RANK=1 WORLD_SIZE=1", "LOCAL_RANK=1 WORLD_SIZE=1", "NODE_RANK=1")),
    # fabric run
    ("LT_ACCELERATOR=cpu LT_DEVICES=4 LT_NUM_NODES=2 LT_STRATEGY=ddp LT_PRECISION=bf16-true LT_CLI_USED=1",
     "--precision 32-true", "accelerator=cpu devices=4 num_nodes=2 strategy=ddp precision=32-true", "!LT_CLI_USED"),
]  # fmt: skip


@pytest.mark.parametrize("given, options, expected, left", LAUNCHED)
def test_a_launcher_tells_the_devices(given: str, options: str, expected: str, left: str, monkeypatch):
    """It wins over config files, the command line over it."""
    for name, _, value in (word.partition("=") for word in given.split()):
        monkeypatch.setenv(name, value)
    config = of_file("devices: 1\nnum_nodes: 1\n", options)
    assert [word for word in expected.split() if f"{getattr(config, word.split('=')[0])}" != word.split("=")[1]] == []
    for name, _, value in (word.partition("=") for word in left.split()):
        assert (name[1:] not in os.environ) if name[0] == "!" else os.environ[name] == value


# ---- values

VALUES = {
    "base_lr": {text: 1e-3 for text in ("1e-3", "1E-3", "0.001", ".001", "1.0e-3")},
    "limit_train_batches": {"5": 5, "1": 1, "0.5": 0.5, "1.0": 1.0, "1e-1": 0.1},  # a count or a fraction
    "limit_val_batches": {"0": 0},
    "summary": {"true": True, "True": True, "false": False, "no": False},
    "micro_batch_size": {"0": 0},
    "checkpoint_frequency": {"0": 0.0},
    "comment": {"": "", "-1e5": "-1e5", "-1": "-1", "None": "None", "nul": "nul"},
    "devices": {"0,2": "0,2", "010": "010"},
    "logger_name": {"csv": ("csv",)},
}
# What a shell, argparse or YAML would read otherwise.
ON_COMMAND_LINE = {
    "--summary": {"summary": True},
    "--summary --seed 1": {"summary": True, "seed": 1},
    "--nodeterministic": {"deterministic": False},  # as the help says
    "--compile": {"compile": "default"},
    "--compile --seed 1": {"compile": "default", "seed": 1},
    "--compile reduce-overhead": {"compile": "reduce-overhead"},
    "--fast_run": {"fast_run": 4},
    "--fast_run=3": {"fast_run": 3},
    "--logger_name csv wandb": {"logger_name": ("csv", "wandb")},
}
IN_FILE = {
    "logger_name: [csv, wandb]": {"logger_name": ("csv", "wandb")},
    "comment: '--not an option: # 5'\nproject: 2026\nout_dir: 1_000": {
        "comment": "--not an option: # 5",
        "project": "2026",
        "out_dir": "1_000",
    },
    "comment: 'null'\nproject: '~'": {"comment": "null", "project": "~"},  # in quotes it is text
}


@pytest.mark.parametrize("option", VALUES)
def test_a_value_means_the_same_on_the_command_line_and_in_a_file(option: str):
    for text, value in VALUES[option].items():
        words = [f"--{option}={text}", f"--{option} {text}" if text else f"--{option}="]
        for config in (*map(train, words), of_file(f"{option}: " + (text or "''"))):
            assert getattr(config, option) == value and type(getattr(config, option)) is type(value)


@pytest.mark.parametrize("given", [*ON_COMMAND_LINE, *IN_FILE])
def test_how_a_value_is_given(given: str):
    expected = (ON_COMMAND_LINE | IN_FILE)[given]
    assert (of_file if given in IN_FILE else train)(given) == replace(TrainConfig(), **expected)


# ---- mistakes: each is one line that names the option and what helps, and nothing is made

NUMBERS = [each.name for each in fields(TrainConfig) if each.type in (int, float, int | float)]
WRONG = {
    # words that are no option, or have no value. `--resume $RUN`, where RUN is not set, must not start a new run.
    "--no_such_option 3": "--no_such_option",
    "stray": "stray",
    "--seed 3 4": "4",
    "--epoch 3": "--epoch --epochs",  # no abbreviations
    "--batch_size 32": "--batch_size --effective_batch_size --micro_batch_size --base_batch_size",
    "--lr 0.1": "--lr --base_lr --lr_scaling_rule --lr_schedule",
    "--max-steps=3": "--max-steps --max_steps?",
    "--output_dir x": "--output_dir --out_dir?",
    "--resume": "--resume",
    "--resume --summary": "--resume",
    "--resume=": "--resume:",
    "--out_dir=": "--out_dir:",
    "--devices=": "--devices:",
    "--logger_name": "--logger_name:",
    "--config_path": "--config_path",
    "--config_path=": "--config_path:",
    # types and choices
    "--epochs many": "--epochs many",
    "--max_steps 1.5": "--max_steps 1.5",
    "--max_steps None": "--max_steps None",  # no word for an option that is off
    "--limit_train_batches some": "--limit_train_batches some",
    "--strategy fsdp": "--strategy fsdp ddp",
    "--logger_name csv mlflow": "--logger_name mlflow",
    "--precision 16-true": "--precision bf16-true",
    # bounds: each option that is a number has one; all mistakes are named
    " ".join(f"--{name} -1" for name in NUMBERS): " ".join(f"--{name}" for name in NUMBERS),
    "--base_lr -1e-3": "--base_lr -0.001 above 0",  # in any spelling
    "--base_lr nan": "--base_lr",
    "--base_lr inf": "--base_lr",
    "--timeout 1e7": "--timeout 2097152",
    # of two options, or of an option and the data
    "--devices 100000": "--devices 100000 --effective_batch_size 64",
    "--devices 65": "--devices --effective_batch_size 64",
    "--fast_run 1": "--fast_run 2",
    "--fast_run 2 --resume auto": "--fast_run --resume",
    "--accelerator cpu --devices 0": "--accelerator cpu --devices 0:",  # those that were given
    "--accelerator cpu --effective_batch_size 5000": "--effective_batch_size 5000 1217",
    "--warmup_epochs 4 --epochs 3": "--warmup_epochs 4",
    "--max_steps 18": "--warmup_epochs 19 18",
    "--monitor val/loss --monitor_mode max": "--monitor_mode max val/loss min",
    "--monitor train/loss --monitor_mode max": "--monitor_mode max train/loss min",
    "--effective_batch_size 60 --micro_batch_size 2 --drop_last False": "--drop_last False",
    "--limit_train_batches 1.5": "--limit_train_batches 1.5",
    "--limit_val_batches 0.0": "--limit_val_batches 0.0",
    "--out_dir ..": "--out_dir ..",
    "--out_dir a\x00b": "--out_dir",
    "--root_dir s3://bucket/runs": "--root_dir s3://bucket/runs",
    "--config_path .": "--config_path .",
    # what only torch, Fabric, the dataset or the file system know
    "--accelerator cpu --effective_batch_size 63 --devices 2": "rank --effective_batch_size 63 62 64",
    "--accelerator cpu --micro_batch_size 24": "--effective_batch_size 64 micro_batch_size 48 72",
    "--accelerator cpu --monitor val/f1 --monitor_mode max --num_sanity_val_steps 0":
        "--monitor val/f1 train/loss train/grad_norm val/loss val/accuracy",
    "--accelerator cpu --limit_val_batches 0": "--monitor val/accuracy train/loss",
    "--accelerator cpu --strategy dp": "--strategy dp ddp",  # Fabric would silently take ddp instead
    "--accelerator cpu --precision 16-mixed": "--precision 16-mixed",
    "--accelerator gpu --devices 33": "--accelerator --devices 33",
    "--accelerator cpu --devices 0,2": "--devices 0,2",
    "--accelerator cpu --data_dir .": "--data_dir .",
    "--accelerator cpu --root_dir file": "--root_dir file",
    "--accelerator cpu --root_dir /proc": "--root_dir /proc",
    # the run that is meant
    "--resume nothing": "--resume nothing config.yaml",
    "--resume folder": "--resume folder config.yaml",
    "--config_path half.yaml": "--config_path half.yaml --monitor --monitor_mode",
    "--config_path warmup.yaml --accelerator cpu": "--warmup_epochs 30 570 380",
}  # fmt: skip
WRONG_IN_TEST = {
    "--out_dir": "--out_dir",
    "--out_dir train_out --epochs 3": "--epochs",
    "--out_dir train_out --split all": "--split all",
    "--out_dir train_out --batch_size -1": "--batch_size -1",
    "--out_dir train_out --checkpoint=": "--checkpoint:",
    "--out_dir nothing": "--out_dir nothing config.yaml",
    "--out_dir folder": "--out_dir folder config.yaml",
    "--out_dir train_out --accelerator cpu": f"--checkpoint best {RUN}",
    "--out_dir train_out --accelerator cpu --checkpoint last": "--checkpoint last",
}
MISTAKES = {f"train.py {words}": names for words, names in WRONG.items()}
MISTAKES |= {f"test.py {words}": names for words, names in WRONG_IN_TEST.items()}


@pytest.mark.parametrize("command", MISTAKES)
def test_value_that_is_not_allowed(command: str):
    make_run()
    Path("folder").mkdir()
    Path("file").touch()
    Path("half.yaml").write_text("monitor: val/loss\n")
    Path("warmup.yaml").write_text("warmup_epochs: 30\n")
    # simple_parsing logs one of two types, too, which pytest would hide.
    how = run if "--devices 2" in command or "some" in command else call
    refuses(command, Path.cwd(), *MISTAKES[command].split(), how=how)


def test_further_values_that_cannot_be(monkeypatch):
    """An option like no other gets no hint. config.yaml could not hold bytes that are not UTF-8."""
    assert call("train.py --wandb", Path.cwd(), code=2).stderr == "train.py: error: unknown option --wandb\n"
    refuses("train.py --comment " + os.fsdecode(b"\xff"), Path.cwd(), "\\udcff", how=run)
    for name, _, value in (word.partition("=") for word in RESTARTS.split()):
        monkeypatch.setenv(name, value)
    refuses("train.py", Path.cwd(), "--max-restarts 1", VARIABLE)  # they may hang for longer than --timeout


BAD_FILES = {
    None: "",  # there is no such file
    bytes(range(256)): "",  # no text
    b"config_path: b.yaml": "config_path",
    b"a: [": "",
    b"- seed\n- epochs\n": "",
    b"seed": "",
    b"epohcs: 3": "--epohcs --epochs?",
    b"seed: 1\nepochs: 3\nseed: 2": "seed twice",
    b"max_steps: 1.5": "--max_steps",
    b"epochs: [1, 2]": "2",
    b"epochs: {a: 1}": "--epochs.a --epochs?",
    b"logger_name: [csv, mlflow]": "--logger_name",
    b"logger_name: [[csv]]": "logger_name",
    b"seed: 1\ndevices: [0, 1]": "1",
    b"? [a, b]\n: 3": "line 1",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_config_file_that_is_wrong_is_named(content: bytes | None):
    if content is not None:
        Path("bad.yaml").write_bytes(content)
    Path("good.yaml").write_text("seed: 1\n")
    words = BAD_FILES[content].split()
    refuses("train.py --config_path good.yaml bad.yaml", Path.cwd(), "--config_path", "bad.yaml", *words)


BAD_CONFIGS = {
    **{CONFIG[:length]: "damaged" for length in (9, CONFIG.index("width"), CONFIG.index("checkpoint_f"), -5)},
    CONFIG.replace("seed: 42", "seed: many"): "--seed",
}


@pytest.mark.parametrize("text", BAD_CONFIGS, ids=map(len, BAD_CONFIGS))
def test_run_with_a_truncated_config(text: str):
    """Its options would be taken for the defaults, those after the last that is fixed, too."""
    make_run().write_text(text)
    refuses("train.py --resume train_out", Path.cwd(), "config.yaml", BAD_CONFIGS[text])


def test_weights_alone_are_evaluated_with_the_config_of_the_run():
    """A checkpoint has a config of its own."""
    call(f"train.py {SMALL} --epochs 1", Path.cwd())
    (path,) = Path().glob("*/config.yaml")
    path.write_text(CONFIG[:99])
    refuses(f"test.py --checkpoint {path.parent}/model.pt", Path.cwd(), "config.yaml", "damaged")
    assert "accuracy" in call("test.py", Path.cwd()).stdout


@pytest.mark.parametrize(
    "options",
    ["--seed 7", "--width 8", "--monitor val/loss --monitor_mode max", "--monitor_mode min --monitor val/accuracy",
     "--epochs 0", "--fast_run"],
)  # fmt: skip
def test_resume_with_a_value_that_is_not_allowed_or_makes_the_state_meaningless(options: str):
    make_run()
    for name in ("train_out", "auto"):
        refuses(f"train.py --resume {name} {options}", Path.cwd(), options.split()[0])


@pytest.mark.parametrize(
    "cls, mistake, words",
    [(TrainConfig, {"epochs": -1}, "above 0"), (TrainConfig, {"base_lr": float("nan")}, "above 0"),
     (TrainConfig, {"strategy": "fsdp"}, "ddp"), (TrainConfig, {"limit_val_batches": 2.5}, "2.5"),
     (TrainConfig, {"logger_name": ("csv", "mlflow")}, "csv, tensorboard, wandb"),
     (TrainConfig, {"monitor_mode": "up", "monitor": "val/f1"}, "max, min"),
     (EvalConfig, {"batch_size": -1}, "at least 0"), (EvalConfig, {"split": "all"}, "test, val, train")],
)  # fmt: skip
def test_a_config_checks_itself_wherever_it_is_made(cls: type, mistake: dict, words: str):
    for make in (lambda: cls(**mistake), lambda: replace(cls(), **mistake)):
        with pytest.raises(ValueError, match=rf"--{next(iter(mistake))}\b.*{words}"):
            make()


@pytest.mark.parametrize("name, value", [("monitor", "val/loss"), ("monitor_mode", "min")])
def test_monitor_and_its_mode_are_given_together_in_each_source(name: str, value: str):
    """Else the mode of one source would be taken for the value of another."""
    Path("half.yaml").write_text(f"{name}: {value}\n")
    Path("pair.yaml").write_text(FILES["f1"])
    told = f"--{name} {value}: .*--monitor and --monitor_mode"
    for options in (f"--{name} {value}", f"--{name} {value} --config_path pair.yaml"):
        with pytest.raises(ConfigError, match=f"^{told}"):
            train(options)
    for options in ("", "pair.yaml", "--monitor val/f1 --monitor_mode max"):
        with pytest.raises(ConfigError, match=f"^--config_path half.yaml: {told}"):
            train(f"--config_path half.yaml {options}")
    with pytest.raises(ConfigError, match=f"^{told}"):
        TrainConfig(**{name: value})


# ---- help

SCRIPTS = pytest.mark.parametrize("script, cls", [("train.py", TrainConfig), ("test.py", EvalConfig)])


@SCRIPTS
def test_help_shows_each_option_once_with_its_group_text_choices_and_default(script: str, cls: type):
    """In the order of config.yaml; and it has no words of the code."""
    text = run(f"{script} --help", REPO, COLUMNS="1000").stdout
    groups: dict[str, list] = {}
    for title, name in re.findall(r"^(?:(\S.*):|  --([\w.]+).*)$", text, re.MULTILINE):
        if title:
            groups[title] = []
        else:
            [*groups.values()][-1].append(name)
    expected = {base.__doc__: [option.name for option in fields(base)] for base in cls.__bases__[::-1]}
    assert {title: names for title, names in groups.items() if names} == expected
    assert sum(expected.values(), []) == [option.name for option in fields(cls)]
    entries = dict(re.findall(r"^  --(\w+) *((?:.|\n   )*)$", text, re.MULTILINE))
    for name, value in vars(cls()).items():
        words, _, default = " ".join(entries[name].split()).partition("(default: ")
        words = re.sub(r"^(, --no\w+ bool|\[.*?\]\]?|\{.*?\}|\w+( \[\w+, \.\.\.\])?|)+ ", "", words)
        assert len(words.split()) >= 2 and "----" not in words, f"--{name}: {entries[name]}"
        assert default == f"{value})" or default.startswith(f"{value}) "), entries[name]
    assert not re.search(r"\b(class|dataclass|field|config\.py|runtime|fixed|per_host|Literal|\w+Config|__\w+)\b", text)
    if script == "train.py":
        assert entries["logger_name"].startswith("{csv,tensorboard,wandb}")
        assert entries["monitor_mode"].startswith("{max,min}")
    assert max(map(len, run(f"{script} --help", REPO, COLUMNS="80").stdout.splitlines())) <= 80


@SCRIPTS
@pytest.mark.parametrize("options, code", [("--help", 0), ("--no_such_option", 2)])
def test_answers_without_importing_torch(script: str, cls: type, options: str, code: int):
    done = run(f"{script} {options}", REPO, code=code, PYTHONPROFILEIMPORTTIME="1")
    assert "argparse" in done.stderr
    assert not re.search(r"\| +(torch|lightning|numpy|sklearn)$", done.stderr, re.MULTILINE)


# ---- a config written down


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"epochs": 2.5, "max_steps": 100, "base_lr": 1e-5, "logger_name": ("wandb",), "monitor": "train/grad_norm",
         "monitor_mode": "max", "limit_train_batches": 1.0, "limit_val_batches": 1, "compile": "max-autotune"},
        {"limit_train_batches": 0.5, "limit_val_batches": 7, "summary": True, "devices": "0,2", "weight_decay": 0.0},
        {"comment": "a: b # c 'd' \"e\" - ü 测试", "project": "2026", "out_dir": "1e-3", "root_dir": "a b/c"},
        {"comment": "two\nlines\n", "out_dir": "yes", "root_dir": "runs/~", "project": " x "},
        {"comment": "--x", "project": "null"},
    ],
)  # fmt: skip
def test_config_written_and_read_is_the_same(changed: dict):
    written = to_yaml(TrainConfig(**changed))
    assert of_file(written) == TrainConfig(**changed)
    assert to_yaml(of_file(written)) == written  # else a resumed run seems to have other options


def test_a_tilde_is_the_home_directory(monkeypatch, tmp_path: Path):
    """In quotes, after `=`, and in a file a shell leaves it as it is. A name that only begins with one is kept. A
    config that is made in Python would not come back from config.yaml: it is refused."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    make_run("home/runs/20260101-000000-x")
    (home / "file.yaml").write_text("root_dir: ~/runs\ndata_dir: ~/data\n")
    for options in ("--root_dir ~/runs --data_dir=~/data", "--config_path ~/file.yaml"):
        config = train(options)
        assert (config.root_dir, config.data_dir) == (f"{home}/runs", f"{home}/data")
        assert f"\nroot_dir: {home}/runs\n" in to_yaml(config)
    assert train("--out_dir ~/runs/y").out_dir == f"{home}/runs/y"
    config = train("--out_dir ~no-such-user --comment ~/x")
    assert (config.out_dir, config.comment) == ("~no-such-user", "~/x")
    run_dir = f"{home}/runs/20260101-000000-x"
    for name in ("~/runs/20260101-000000-x", "~/runs/x", "x --root_dir ~/runs"):
        assert train(f"--resume {name}").resume == of_test(f"--out_dir {name}").out_dir == run_dir
    (home / "runs/20260101-000000-x/best.ckpt").touch()
    assert of_test("--checkpoint ~/runs/20260101-000000-x/best.ckpt").out_dir == run_dir
    with pytest.raises(ConfigError, match=f"--root_dir ~/runs .*{home}/runs"):
        to_yaml(TrainConfig(root_dir="~/runs"))


# ---- which run is meant

RUNS = ["20260103-000000-train_out", "20260101-000000-train_out", "20260106-000000-other",
        "root/20260107-000000-train_out", "x-20260109-000000-train_out", "20260109-000000-train_out-1"]  # fmt: skip
NEWEST = RUNS[0]
# A restarted job must not start a second run, nor go back to an older one, if the newest is finished, too.
MORE = ("", "--max_steps 99", "--num_workers 2 --comment x --epochs 99", "--max_steps 101 --base_lr 0.5")
MEANT = {
    **{f"{name} {more}": NEWEST for name in ("auto", "train_out", NEWEST) for more in MORE},
    "auto --out_dir other": "20260106-000000-other",
    "20260101-000000-train_out": "20260101-000000-train_out",
    "other": "20260106-000000-other",
    "auto --out_dir root/train_out": "root/20260107-000000-train_out",
    **{f"{name} --root_dir root": RUNS[3] for name in ("auto", "train_out", "20260107-000000-train_out")},
}


@pytest.mark.parametrize("resume", MEANT)
def test_the_newest_run_of_a_name_is_resumed(resume: str, capsys):
    """It keeps its root_dir: the one that is given says where to look for it. Which run a name means is told."""
    for name in RUNS:
        make_run(name, is_finished=True, max_steps=100, root_dir="there")
    Path("20260108-000000-train_out").mkdir()  # without a config.yaml it is no run
    config = train(f"--resume {resume}")
    assert (config.resume, config.root_dir) == (MEANT[resume], "there")
    told = capsys.readouterr().out
    assert "root_dir" not in re.sub("--resume .*", "", told)
    if resume.split()[0] in ("train_out", "other"):
        assert f"--resume {resume.split()[0]}: the run is {MEANT[resume]}\n" in told


def test_test_py_takes_the_newest_run_of_the_name(capsys):
    for name in RUNS:
        make_run(name)
    for options, path in {"": NEWEST, "--out_dir other": RUNS[2], "--root_dir root": RUNS[3]}.items():
        assert of_test(options).out_dir == path
        assert f"the run is {path}\n" in capsys.readouterr().out


def test_resume_auto_without_runs_starts_a_new_one(capsys):
    skipped = [f"2026010{day}-000000-train_out" for day in (3, 2, 1)]
    for name in skipped:
        Path(name).mkdir()
    Path(f"{skipped[0]}/config.yaml").symlink_to("nowhere")
    for name in ("20260101-000000-other", "20260101-000000-train_out-1", "x-20260101-000000-train_out"):
        make_run(name)
    assert train("--resume auto") == TrainConfig()
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == skipped and all("config.yaml" in line for line in told)


@pytest.mark.parametrize("summary", [None, "", "{", "[]", "null", '{"state": "runn', '{"seconds": 3}'])
def test_a_summary_that_cannot_be_read_is_told(summary: str | None, capsys):
    path = make_run(is_finished=True).with_name("summary.json")
    assert read_summary(path.parent)["state"] == "finished" and capsys.readouterr().out == ""
    path.unlink()
    if summary is not None:
        path.write_text(summary)
    assert "state" not in read_summary(path.parent)
    told = capsys.readouterr().out
    assert told.count("\n") == told.startswith(f"{path} ") == (summary not in ('{"seconds": 3}', "[]"))


def test_resume_takes_the_options_of_the_run(capsys):
    """Nothing has to be typed again; what is typed wins, and is told."""
    make_run("20260101-000000-x", epochs=7, base_lr=0.5, effective_batch_size=32)
    Path("file.yaml").write_text("base_lr: 0.25\nepochs: 8\n")
    for name in ("x", "20260101-000000-x", Path("20260101-000000-x").absolute()):
        config = train(f"--resume {name} --config_path file.yaml --epochs 9")
        assert Path(config.resume).samefile("20260101-000000-x")
        assert (config.epochs, config.base_lr, config.effective_batch_size) == (9, 0.25, 32)
        told = capsys.readouterr().out
        assert "--epochs 9.0 instead of 7.0\n" in told and "--base_lr 0.25 instead of 0.5\n" in told
        assert "effective_batch_size" not in told and "config_path" not in told


def test_a_resumed_run_keeps_its_name():
    make_run("20260101-000000-job")
    assert train("--resume auto --out_dir job").out_dir == "job"
    refuses("train.py --resume 20260101-000000-job --out_dir other", Path.cwd(), "--out_dir other", "job")


def test_a_run_stays_readable_when_the_options_in_the_code_change(capsys):
    """Of this version it is read without a word, also if its last newline is gone, as an editor may leave it."""
    path = make_run("20260101-000000-job", width=7)
    for text in (path.read_text(), path.read_text().rstrip()):
        path.write_text(text)
        assert read_config(TrainConfig, path.parent) == TrainConfig(out_dir="job", width=7)
        assert capsys.readouterr().out == ""
    rewrite(path, "lr_schedule: cosine\n", "depth: 3\nkinds: [a, b]\n")
    assert read_config(TrainConfig, path.parent) == TrainConfig(out_dir="job", width=7)
    told = sorted(capsys.readouterr().out.splitlines())
    for line, words in zip(
        told, ("--depth 3: gone", "--kinds ['a', 'b']: gone", "--lr_schedule cosine: new"), strict=True
    ):
        option, _, kind = words.rpartition(" ")
        assert line.startswith(f"{option} ") and f" {kind} " in line


def test_an_option_that_a_run_did_not_have_may_be_given_on_its_resume_though_it_is_fixed():
    """It may have another name now. From then on it is fixed."""
    path = make_run("20260101-000000-job", width=7)
    rewrite(path, "width: 7\n", "channels: 7\n")
    assert train("--resume job --width 7").width == 7
    rewrite(path, "channels: 7\n", "width: 7\n")
    refuses("train.py --resume job --width 8", Path.cwd(), "--width 8", "7")
