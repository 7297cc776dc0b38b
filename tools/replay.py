"""Looks into a step of a run: its samples, their losses, its gradients, and the first values that are not finite.

python tools/replay.py --out_dir train_out --step 137 [--keep batch.pt]

A fork in a temporary directory trains from the newest checkpoint before the step, or from the beginning, with the bits
of the run, which is only read; the options are those of the process that has trained the step. It stops after the
backward pass of the step, or of an earlier one whose gradient is not finite, and prints:

- for each micro-batch of each process the values of compute_loss, the highest losses of single samples in eval mode,
  the first module whose input or output is not finite, and the first samples, as indices of the training set. These
  losses are those of a validation: without what only a training step has, such as a teacher. For the module the forward
  pass is repeated, in training mode, with the same random numbers.
- the norms of the gradients, by module; with several optimizers, as the first one finds them

--keep writes the same, with the batches, all samples and all losses, for torch.load. In 16-mixed only the step itself
is looked at, since gradients that are not finite belong to it.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.wrappers import is_wrapped
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fork import config_of, fork, read_first  # noqa: E402

import train  # noqa: E402
from config import EvalConfig, TrainConfig  # noqa: E402
from runtime import cli, config_file, options  # noqa: E402
from runtime import run as runtime_run  # noqa: E402
from runtime.checkpoints import checkpoints_of, load, named_tensors, step_of  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402
from runtime.files import atomically, write_json  # noqa: E402
from runtime.launch import run_and_exit  # noqa: E402
from runtime.loader import Loader, TrainSampler, seeder  # noqa: E402
from runtime.meters import Timer, as_scalars  # noqa: E402
from runtime.optim import clip_gradients, unscale_gradients  # noqa: E402
from runtime.run import Run  # noqa: E402
from runtime.runs import add_run_options, find_run, read_summary  # noqa: E402
from runtime.terminal import is_child_of_fabric, say  # noqa: E402

TRAIN = train.train
SHOWN = 8  # losses and samples of a micro-batch


class Done(Exception):
    """The step has been shown."""


@dataclass
class MicroBatch:
    """One of the step that is being trained."""

    rank: int
    samples: list  # the indices that a sampler has given; two samplers give two lists
    batch: Any = None  # None: compute_loss was not called
    arguments: tuple = ()  # of compute_loss, beside the batch
    values: dict = field(default_factory=dict)
    losses: dict | str = ""  # of single samples by index, the highest first; or why there are none
    first_not_finite: str = ""


class Replay:
    """Keeps what a step needs to be shown, by standing in for functions that the loop calls in each step."""

    def __init__(self, args: argparse.Namespace, fabric: Fabric, config, run: Run):
        self.args = args
        self.fabric = fabric
        self.run = run
        self.set_seed = seeder(fabric.device.type, "step", config.seed)  # as the loop
        self.step = 0
        self.samples: dict[int, list] = {}  # of the next micro-batches, by number: data workers are ahead
        self.micro_batches: dict[int, MicroBatch] = {}  # of this step
        self.fetched: dict[int, Any] = {}  # their batches, as the loop gets them
        self.buffers: dict[Tensor, Tensor] = {}  # those of the models, and copies as they were before this step
        self.compute_loss = train.compute_loss
        train.compute_loss = self.keep_batch
        train.unscale_gradients = self.end_backward
        run.prepare = self.prepare  # type: ignore
        # They would end the run at a first loss that is not finite.
        runtime_run.check_values = lambda *args: None
        runtime_run.check_loss = lambda *args: None
        fetch, iterate = Loader.micro_batches, TrainSampler.__iter__
        Loader.micro_batches = lambda *place: self.number(fetch, *place)  # type: ignore
        TrainSampler.__iter__ = lambda sampler: map(self.keep_samples, iterate(sampler))  # type: ignore

    def prepare(self, state: dict, plan: Any):
        """In place of run.prepare."""
        if self.args.step > plan.total_steps:
            raise ConfigError(f"--step {self.args.step}: the run has {plan.total_steps} steps")
        Run.prepare(self.run, state, plan)

    def keep_samples(self, micro_batch: tuple) -> tuple:
        number, indices = micro_batch
        self.samples.setdefault(number, []).append(indices.tolist())
        return micro_batch

    def number(self, fetch: Callable, loader: Loader, step: int, timer: Timer) -> Iterator:
        """In place of Loader.micro_batches, which is `fetch`: notes each micro-batch before the loop gets it."""
        if step != self.step:
            self.step = step
            self.micro_batches = {}
            self.fetched = {}
            self.buffers = {}
        plan = loader.sampler.plan
        number = (step - 1) * plan.grad_accum_steps * plan.world_size + loader.sampler.rank
        for found in fetch(loader, step, timer):
            micro_batch = self.micro_batches.setdefault(number, MicroBatch(self.fabric.global_rank, []))
            micro_batch.samples += self.samples.pop(number, [])  # a second stream adds its own
            self.fetched.setdefault(number, found[0])
            yield found
            number += plan.world_size

    def micro_batch_of(self, batch: Any) -> MicroBatch:
        """That with this batch: the loop may have fetched all of them first. The newest, if the loop has made another
        batch of what it has fetched."""
        same = [self.micro_batches[number] for number, fetched in self.fetched.items() if fetched is batch]
        return [*self.micro_batches.values(), *same][-1]

    def modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self.run.state.items() if isinstance(value, nn.Module)}

    def keep_batch(self, model: nn.Module, batch, *arguments, **options) -> tuple:
        """In place of compute_loss."""
        if not (model.training and self.micro_batches):
            return self.compute_loss(model, batch, *arguments, **options)
        micro_batch = self.micro_batch_of(batch)
        is_first = micro_batch.batch is None
        if is_first:
            micro_batch.batch = copied(batch)
            micro_batch.arguments = (model, arguments, options)
        if not self.buffers:
            buffers = [buffer for module in self.modules().values() for buffer in module.buffers()]
            self.buffers = {buffer: buffer.clone() for buffer in buffers}
        results = self.compute_loss(model, batch, *arguments, **options)
        if is_first:
            micro_batch.values = {name: float(value) for name, value in as_scalars(results[0]).items()}
        return results

    def end_backward(self, fabric: Fabric, optimizer):
        """In place of unscale_gradients, which the loop calls after the backward passes. All ranks show a step, or
        none: they have the same gradient."""
        unscale_gradients(fabric, optimizer)
        norm = clip_gradients(optimizer, 0)
        has_scaler = getattr(fabric.strategy.precision, "scaler", None) is not None
        if self.step < self.args.step and (norm.isfinite() or has_scaler):
            return
        gradients = self.gradient_norms()
        self.restore_buffers()
        for number, micro_batch in self.micro_batches.items():
            is_healthy = norm.isfinite() and all(map(math.isfinite, micro_batch.values.values()))
            micro_batch.first_not_finite = "none" if is_healthy else self.first_not_finite(number, micro_batch)
        self.restore_buffers()
        for micro_batch in self.micro_batches.values():
            micro_batch.losses = self.losses(micro_batch)
            micro_batch.arguments = ()  # has the model, which is not shown
            micro_batch.batch = apply_to_collection(micro_batch.batch, Tensor, Tensor.cpu) if self.args.keep else None
        ranks = [[*self.micro_batches.values()]]
        if dist.is_initialized():
            ranks = [[]] * fabric.world_size
            dist.all_gather_object(ranks, [*self.micro_batches.values()])
        if fabric.is_global_zero:
            self.show(float(norm), gradients, [micro_batch for each in ranks for micro_batch in each])
        raise Done

    def restore_buffers(self):
        """Makes the buffers, such as the averages of BatchNorm, what they were before the step."""
        with torch.no_grad():
            for buffer, before in self.buffers.items():
                buffer.copy_(before)

    def gradient_norms(self) -> dict[str, float]:
        """The norms of the gradients of each module, by the name of the module."""
        gradients: dict[str, list] = {}
        for name, tensor in named_tensors(self.run.state).items():
            if tensor.grad is not None:
                gradients.setdefault(name.rpartition(".")[0], []).append(tensor.grad)
        return {name: float(nn.utils.get_total_norm(each)) for name, each in gradients.items()}

    def first_not_finite(self, number: int, micro_batch: MicroBatch) -> str:
        """Repeats a forward pass of the training. Returns the first module with values that are not finite."""
        if micro_batch.batch is None:
            return "not known: the step does not call compute_loss"
        names: dict[nn.Module, str] = {}
        for entry, module in self.modules().items():
            inner: Any = module.module if is_wrapped(module) else module
            names |= {each: f"{entry}.{name}".strip(".") for name, each in inner.named_modules()}
        found: list[str] = []

        def look(module: nn.Module, inputs: tuple, options: dict, output):
            for what, value in (("input", (inputs, options)), ("output", output)):
                if module in names and not is_finite(value, may_be_masked=what == "input"):
                    found.append(f"{what} of {names[module]}, {type(module).__name__}")

        model, arguments, options = micro_batch.arguments
        self.set_seed(number)
        with (
            register_module_forward_hook(look, with_kwargs=True),
            torch.compiler.set_stance("force_eager"),  # a compiled model has no hooks
            self.fabric.no_backward_sync(model),
        ):
            values = self.compute_loss(model, copied(micro_batch.batch), *arguments, **options)[0]
        if not found and is_finite(values) and not all(map(math.isfinite, micro_batch.values.values())):
            return "not known: the forward pass was finite when it was repeated"
        return [*found, "none"][0]

    def losses(self, micro_batch: MicroBatch) -> dict[int, float] | str:
        """The loss of each sample by its index, as in a validation; or why there is none."""
        if micro_batch.batch is None or not micro_batch.samples:
            return "not known"
        model = micro_batch.arguments[0]  # the others may be for the whole step, such as its number of targets
        samples = micro_batch.samples[0]
        losses = {}
        model.eval()
        try:
            for place, sample in enumerate(samples):
                single = apply_to_collection(micro_batch.batch, Tensor, partial(only, place, len(samples)))
                with torch.no_grad():
                    losses[sample] = float(self.compute_loss(model, single, self.run.config)[0]["loss"])
        except Exception as error:  # anything: compute_loss was not written for this
            reason = str(error).partition("\n")[0]
            return f"not known: no loss of single samples in eval mode ({type(error).__name__}: {reason})"
        finally:
            model.train()
        order = sorted(losses, key=lambda sample: losses[sample] if math.isfinite(losses[sample]) else math.inf)
        return {sample: losses[sample] for sample in reversed(order)}

    def show(self, norm: float, gradients: dict[str, float], micro_batches: list[MicroBatch]):
        say(f"\nstep {self.step}: gradient norm {norm:.5g}")
        for each in micro_batches:
            losses = each.losses
            if isinstance(losses, dict):
                losses = ", ".join(f"sample {sample} {loss:.5g}" for sample, loss in [*losses.items()][:SHOWN])
            say(f"rank {each.rank}: {', '.join(f'{name} {value:.5g}' for name, value in each.values.items())}")
            say(f"  highest losses in eval mode: {losses}")
            say(f"  first not finite: {each.first_not_finite}")
            for indices in each.samples:
                more = ", ... (--keep writes all)" if len(indices) > SHOWN else ""
                say(f"  {len(indices)} samples: {', '.join(map(str, indices[:SHOWN]))}{more}")
            if not each.samples:
                say("  samples not known: they come from no TrainSampler")
        say("norms of the gradients by module:")
        for name, value in gradients.items():
            say(f"{value:12.5g}  {name}")
        if self.args.keep:
            kept = {"step": self.step, "gradient_norms": gradients, "micro_batches": [*map(vars, micro_batches)]}
            with atomically(self.args.keep, "wb") as file:
                torch.save(kept, file)
            say(f"{self.args.keep} has the batches")


def copied(batch: Any) -> Any:
    """A copy of a batch, which compute_loss may change."""
    return apply_to_collection(batch, Tensor, torch.clone)


def only(place: int, count: int, tensor: Tensor) -> Tensor:
    """The part of a batch's tensor that belongs to one of `count` samples."""
    return tensor[place : place + 1] if tensor.ndim and len(tensor) == count else tensor


def is_finite(values: Any, may_be_masked: bool = False) -> bool:
    """Whether all numbers in the tensors of a collection are finite, or, as in a mask of attention, -inf."""
    tensors: list[Tensor] = []
    apply_to_collection(values, Tensor, tensors.append)
    return all(bool((tensor.isfinite() | (may_be_masked & (tensor == -math.inf))).all()) for tensor in tensors)


def replayed(args: argparse.Namespace, fabric: Fabric, config, run: Run, *others) -> int:
    """In place of train.train."""
    Replay(args, fabric, config, run)
    try:
        code = TRAIN(fabric, config, run, *others)
    except Done:
        return 0
    if code:  # it was stopped by a signal
        return code
    raise ConfigError(f"--step {args.step}: the run ends after step {run.state['step']}")


def prepare(args: argparse.Namespace, folder: str) -> Path:
    """Makes the run that is trained up to the step, in a folder. Returns its directory. Raises ConfigError."""
    run_dir = find_run("--out_dir", args.out_dir, args.root_dir)
    summary = read_summary(run_dir)
    if summary.get("state") == "finished" and args.step > summary["step"]:
        raise ConfigError(f"--step {args.step}: the last step of {run_dir} is {summary['step']}")
    config = config_file.read_config(TrainConfig, run_dir)
    later = [path for path in checkpoints_of(run_dir) if step_of(path) >= args.step]
    if later:  # was saved by the process that has trained the step; a resume may have changed options since
        config = config_file.config_of(TrainConfig, load(later[-1])["checkpoint"]["config"])
    config = replace(
        config,
        out_dir="replay",
        root_dir=folder,
        logger_name=("csv",),
        num_checkpoint_keep=1,
        early_stopping_patience=0,  # the best value starts anew
    )
    found = read_first([path for path in checkpoints_of(run_dir) if 0 <= step_of(path) < args.step])
    if found:
        path, saved, digest = found
        say(f"replays {run_dir} from {path}")
        return fork(path, saved, digest, config_of(path, saved), config).path
    say(f"replays {run_dir} from the beginning")
    path = Path(folder) / "replay"  # a run that was killed before its first checkpoint
    path.mkdir()
    (path / "config.yaml").write_text(config_file.to_yaml(config))
    write_json(path / "summary.json", {"state": "interrupted"})
    return path


def parse(cls: type[EvalConfig], argv: list[str]) -> argparse.Namespace:
    about, details = str(__doc__).split("\n", 1)
    parser = options.Parser(description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, cls)
    parser.add_argument("--step", type=int, required=True, help="the step to look into, counted from 1")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what is shown, and the batches, into a file")
    args = parser.parse_args(argv)
    if args.step < 1:
        raise ConfigError(f"--step {args.step}: the first step is 1")
    if args.keep and not args.keep.absolute().parent.is_dir():
        raise ConfigError(f"--keep {args.keep}: there is no such directory")
    return args


def main(args: argparse.Namespace) -> int:
    train.train = partial(replayed, args)
    if is_child_of_fabric():
        return train.main(cli.parse_train(TrainConfig, ["--resume", os.environ["REPLAY"]]))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REPLAY"] = str(prepare(args, folder))  # for the other processes, which run this script, too
        return train.main(cli.parse_train(TrainConfig, ["--resume", os.environ["REPLAY"]]))


if __name__ == "__main__":
    run_and_exit(main, cli.parse_or_exit(parse, EvalConfig))
