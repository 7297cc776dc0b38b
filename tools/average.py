"""Averages the weights of the newest checkpoints of a run, into one that test.py evaluates.

python tools/average.py --out_dir train_out --num 5    # writes checkpoints/average-5.ckpt
python test.py --out_dir train_out --checkpoint average-5

With a constant learning rate the weights move around a better place, and their mean is nearer to it (Vaswani et al.
2017, arXiv:1706.03762; Izmailov et al. 2018, arXiv:1803.05407). The digits with seeds 1, 2 and 3, options
--lr_schedule constant --num_checkpoint_keep 5: 98.9 % of the test set with the last weights, 99.5 % with the mean of
the last five epochs. The run may go on meanwhile. For an average over all steps see recipes/methods/ema.patch.

The parameters and buffers of state["model"] are averaged in float64 and cast back; integers, such as a count of
batches, are those of the newest checkpoint. So BatchNorm gets the mean of the checkpoints' statistics. Those of the
averaged weights are others: torch.optim.swa_utils.update_bn counts them anew, in a pass over the training set.

The file has the weights alone. A resume does not begin with it, and the run does not delete it.
"""

import argparse
import shlex
import sys
from copy import copy
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fork import read  # noqa: E402

from config import EvalConfig  # noqa: E402
from runtime import cli, options  # noqa: E402
from runtime.checkpoints import regular_checkpoints  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.files import as_run_error, atomically  # noqa: E402
from runtime.launch import run_and_exit  # noqa: E402
from runtime.runs import add_run_options, find_run  # noqa: E402
from runtime.terminal import say  # noqa: E402


def newest(run_dir: Path, num: int) -> list[Path]:
    """The newest checkpoints of a run, the newest first. Raises ConfigError if there are fewer."""
    steps = regular_checkpoints(run_dir)
    if len(steps) < num:
        has = f"{run_dir} has {len(steps)} checkpoints step-*.ckpt"
        raise ConfigError(f"--num {num}: {has}; --num_checkpoint_keep of train.py keeps more")
    return sorted(steps, key=steps.__getitem__, reverse=True)[:num]


def read_newest(run_dir: Path, num: int) -> list[dict]:
    """Their contents, in tensors that are read from the file when they are used, also from one that is deleted."""
    while True:
        paths = newest(run_dir, num)
        try:
            return [read(path)[0] for path in paths]
        except ConfigError:
            if newest(run_dir, num) == paths:  # it is damaged; otherwise the run goes on, and has deleted it
                raise


def average(states: list[dict]) -> dict:
    """The mean of several state_dicts; what cannot be averaged is that of the first."""
    result = copy(states[0])  # keeps the versions in a module's state_dict
    for name, value in states[0].items():
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            wide = torch.promote_types(value.dtype, torch.float64)
            total = sum(state[name].to(wide) for state in states)
            result[name] = (total / len(states)).to(value.dtype)
    return result


def parse(cls: type[EvalConfig], argv: list[str]) -> argparse.Namespace:
    about, details = str(__doc__).split("\n", 1)
    parser = options.Parser(description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, cls)
    parser.add_argument("--num", type=int, required=True, help="number of checkpoints")
    args = parser.parse_args(argv)
    if args.num < 2:
        raise ConfigError(f"--num {args.num}: must be at least 2")
    return args


@as_run_error()
def main(args: argparse.Namespace) -> int:
    run_dir = find_run("--out_dir", args.out_dir, args.root_dir)
    path = run_dir / "checkpoints" / f"average-{args.num}.ckpt"
    if path.exists():
        raise ConfigError(f"--num {args.num}: {path} is there already; rename or delete it")
    saved = read_newest(run_dir, args.num)
    about = saved[0]["checkpoint"]
    contents = {
        "model": average([each["model"] for each in saved]),
        "step": about["step"],
        "checkpoint": {"config": about["config"], "code": about["code"]},  # what test.py needs
    }
    with atomically(path, "wb") as file:
        torch.save(contents, file)
    say(f"{path} has the mean of steps {', '.join(str(each['checkpoint']['step']) for each in saved)}")
    say(f"next: python test.py --checkpoint {shlex.quote(str(path))}")
    return 0


if __name__ == "__main__":
    run_and_exit(main, cli.parse_or_exit(parse, EvalConfig))
