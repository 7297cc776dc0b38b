"""What the core assumes of torch, Fabric, simple_parsing and others without being promised by them. Each test says what
hangs on it: where a new version breaks one, that place is to be looked at. What only a GPU can show comes last."""

import inspect
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from argparse import SUPPRESS
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children
from pathlib import Path

import lightning.fabric.strategies.ddp as fabric_ddp
import pytest
import simple_parsing
import torch
import torch.distributed as dist
import yaml
from filelock import FileLock, Timeout
from helpers import REPO, children, kill_group, run, start, wait_for
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from simple_parsing import ArgumentGenerationMode, ArgumentParser, NestedMode, field
from simple_parsing.helpers.serialization import to_dict
from simple_parsing.utils import flatten_join
from torch import Tensor, nn
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from config import TrainConfig
from runtime import checkpoints, cli, launch, meters
from runtime.errors import ConfigError

BIN = Path(sys.executable).parent
FABRIC = Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- Fabric's wrappers


def test_fabrics_module_is_known_by_the_parameters_of_the_users_module():
    """checkpoints.named_tensors and rundir.RunDir find them there, the same objects, by the names of the state_dict."""
    module = nn.Linear(2, 1)
    model = FABRIC.setup_module(module)
    found = model.state_dict(keep_vars=True)
    assert found["weight"] is module.weight and found["bias"] is module.bias
    assert model.module is module and isinstance(model, nn.Module)


def test_the_gradient_scaler_is_an_attribute_of_fabrics_precision():
    """meters.unscale_gradients and rundir.RunDir take it for granted that a precision without it scales nothing."""
    scaler = torch.amp.GradScaler("cpu")
    assert MixedPrecision("16-mixed", "cpu", scaler).scaler is scaler
    assert MixedPrecision("bf16-mixed", "cpu").scaler is None


def test_fabric_refuses_gradients_by_torch_where_a_precision_has_a_backward_of_its_own():
    """launch.build_fabric gives bf16-mixed that of the base class, so that torch.autograd.grad works."""
    ours = launch.build_fabric(TrainConfig(accelerator="cpu", devices="1", precision="bf16-mixed"))
    theirs = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    for fabric, is_refused in ((theirs, True), (ours, False)):
        model = fabric.setup_module(nn.Linear(1, 1))
        loss = model(torch.ones(1, 1)).sum()
        with pytest.raises(RuntimeError, match="fabric.backward") if is_refused else nullcontext():
            torch.autograd.grad(loss, model.weight)


def test_argparse_takes_a_negative_number_with_an_exponent_for_an_option_unless_it_is_told():
    """cli.parse sets this private pattern, which Python 3.14 has by itself."""
    parser = ArgumentParser()
    pattern = parser._negative_number_matcher
    assert pattern.match("-1") and not pattern.match("-x")
    assert cli.parse(TrainConfig, ["--warmup_epochs", "-1e-3"]) == {"warmup_epochs": -1e-3}


def test_a_gradient_scaler_refuses_an_empty_state_which_a_precision_without_one_has():
    """checkpoints.restore leaves out an empty state: a run of 32-true goes on in 16-mixed."""
    assert MixedPrecision("bf16-mixed", "cpu").state_dict() == {}
    with pytest.raises(RuntimeError, match="empty"):
        torch.amp.GradScaler("cpu").load_state_dict({})


def test_a_gradient_scaler_leaves_a_fused_optimizer_to_skip_a_step(monkeypatch):
    """So no step of 16-mixed waits for the device. For another optimizer, the scaler would ask the device."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    monkeypatch.setattr(Tensor, "item", lambda tensor: pytest.fail("waits"))
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.ones(2)) and optimizer.state[parameter]["step"] == 0


def test_fabric_compiles_a_compiled_model_again_and_names_its_weights_as_before():
    """train.py compiles before setup_module; else --compile did nothing. Checkpoints, and test.py, which does not
    compile, rely on the names."""
    model = FABRIC.setup_module(torch.compile(nn.Linear(2, 1), dynamic=False))
    assert isinstance(model._forward_module, torch._dynamo.OptimizedModule)
    assert model.state_dict().keys() == {"weight", "bias"}


def test_fabrics_model_returns_float32_in_mixed_precision():
    """docs/speed.md: logits that leave the model are float32. In compute_loss, outside the model, is no autocast."""
    model = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup_module(nn.Linear(2, 1))
    types = []
    model.module.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    assert model(torch.ones(1, 2)).dtype == torch.float32 and types == [torch.bfloat16]


@pytest.mark.parametrize("device, expected", [("cuda", {"non_blocking": True}), ("mps", {}), ("cpu", {})])
def test_fabric_copies_a_batch_without_a_wait_to_a_gpu_and_with_one_elsewhere(device: str, expected: dict, monkeypatch):
    """loader.Loader and the recipes on_device and prefetch copy by Fabric.to_device. On MPS a copy without a wait would
    read memory that is freed (pytorch#83015)."""
    given = []
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, **options: given.append(options) or tensor)
    FABRIC.strategy.batch_to_device({"images": [torch.ones(1)]}, torch.device(device, 0))
    assert given == [expected]


def test_fabrics_optimizer_shares_the_groups_of_the_one_inside():
    """train sets the learning rate in them, and checkpoints restores settings in them."""
    model = FABRIC.setup_module(nn.Linear(2, 1))
    optimizer = FABRIC.setup_optimizers(torch.optim.AdamW(model.parameters(), fused=True))
    optimizer.param_groups[0]["lr"] = 7.0
    assert optimizer.optimizer.param_groups[0]["lr"] == 7.0
    assert isinstance(optimizer, torch.optim.Optimizer)


# ---- Fabric's strategies and launchers


def test_a_launcher_tells_whether_it_forks():
    """launch.ResumableDDP starts processes as Fabric would have: by fork in a notebook, else by the same command."""
    is_forking = {}
    for strategy in ("ddp", "ddp_fork"):
        launcher = Fabric(accelerator="cpu", devices=2, strategy=strategy).strategy.launcher
        is_forking[strategy] = launcher.is_interactive_compatible
    assert is_forking == {"ddp": False, "ddp_fork": True}


def test_there_is_a_launcher_where_the_processes_were_started_from_outside_too(monkeypatch):
    """As by torchrun. launch.ResumableDDP asks it whether it forks."""
    environment = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy = Fabric(accelerator="cpu", devices=1, strategy="ddp").strategy
    assert strategy.cluster_environment.creates_processes_externally
    assert not strategy.launcher.is_interactive_compatible


def test_fabrics_ddp_is_made_on_a_side_stream_and_ours_is_not(monkeypatch):
    """Where Fabric's is no more, ResumableDDP.setup_module needs no comment about it, and may call Fabric's."""
    streams = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: streams.append("made"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(DDPStrategy, "root_device", torch.device("cuda", 0))
    for module in (fabric_ddp, launch):
        monkeypatch.setattr(module, "DistributedDataParallel", lambda module, **options: options["device_ids"])
    monkeypatch.setattr(launch, "order_buckets", lambda ddp: None)
    ours = launch.ResumableDDP(
        TrainConfig(strategy="ddp"), Fabric(accelerator="cpu", devices=2, strategy="ddp").strategy
    )
    assert ours.setup_module(nn.Linear(1, 1)) == [0] and streams == []
    assert DDPStrategy().setup_module(nn.Linear(1, 1)) == [0] and streams == ["made"]


def test_the_timeout_of_the_strategy_is_that_of_the_process_group(monkeypatch):
    """--timeout would else be Fabric's or torch's own half hour."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        monkeypatch.setenv(name, "0")  # to be restored: Fabric sets them
        monkeypatch.delenv(name)
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: given.update(options))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    config = TrainConfig(accelerator="cpu", devices="1", strategy="ddp", timeout=77.0)
    launch.build_fabric(config).launch()
    torch.set_flush_denormal(False)
    assert given["timeout"] == timedelta(seconds=77)


ENDS = """
import os, sys, threading, time
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
if fabric.global_rank == 1:
    while not os.path.exists("connected"):
        time.sleep(0.02)
    os._exit(int(sys.argv[-1]))
open("connected", "w").close()
(observer,) = [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]
observer.join()
os._exit(7)
"""


@pytest.mark.parametrize("code, code_of_rank_0", [(0, 7), (1, -signal.SIGKILL), (75, -signal.SIGKILL)])
def test_fabric_kills_rank_0_where_another_process_ends_with_another_code_than_0(code: int, code_of_rank_0, tmp_path):
    """So launch.own_code is 0 in a process that Fabric has started: rank 0 may be closing its files."""
    (tmp_path / "ends.py").write_text(ENDS)
    run(f"{tmp_path}/ends.py --devices 2 {code}", tmp_path, code=code_of_rank_0)


def warned(function, is_filtered: bool = False) -> list[str]:
    """The warnings of a call; or those of them that the programs do not ignore."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if is_filtered:
            cli.words_of_launcher()
            launch.build_fabric(TrainConfig(accelerator="cpu", devices="1"))
            torch.set_flush_denormal(False)
        function()
    return [str(warning.message) for warning in found]


def test_the_warnings_of_fabric_that_are_ignored_have_these_words(monkeypatch, tmp_path):
    """launch.build_fabric: it tells itself that 16-mixed and dp need a GPU, and dp has no gradient sync to skip.
    cli.words_of_launcher: a line on each login node."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(nn.Linear(1, 1))
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fabric, "_strategy", DataParallelStrategy(parallel_devices=[torch.device("cpu")]))
    calls = {
        "fp16 is not supported on CPU": lambda: Fabric(accelerator="cpu", devices=1, precision="16-mixed"),
        "'dp' is not supported on CPU": lambda: Fabric(accelerator="cpu", devices=2, strategy="dp"),
        "not support skipping the gradient sync": lambda: fabric.no_backward_sync(model),
        "The `srun` command is available": SLURMEnvironment.detect,
    }
    for words, call in calls.items():
        assert any(words in message for message in warned(call)), words
        assert [message for message in warned(call, is_filtered=True) if words in message] == []


def test_nccl_ends_a_process_whose_collective_times_out():
    """launch.ResumableDDP gives NCCL 60 seconds more than --timeout, so that StopSignals can say first what has
    happened. In both modes, NCCL's default and that of torchrun, a timeout tears the process down."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    text = header.read_text()
    assert "(3 - SkipCleanUp)" in text and "SkipCleanUp = 3" in text and "TearDown = 1" in text
    assert "#define SHOULD_TEAR_DOWN(a) (a != NoHandling && a != CleanUpOnly)" in text
    torchrun = " ".join(inspect.getsource(local_elastic_agent).split())
    assert 'os.getenv( "TORCH_NCCL_ASYNC_ERROR_HANDLING", str(1) )' in torchrun


# ---- DDP


class Backwards(nn.Module):
    """Its gradients come in the order of its parameters, the first one first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))

    def forward(self, inputs):
        for layer in reversed(self.layers):
            inputs = layer(inputs)
        return inputs


@pytest.mark.parametrize(
    "is_ordered, expected", [(True, "5 4, 3 2, 1 0"), (False, "1 0, 3 2, 5 4")], ids=["ours", "by itself"]
)
def test_ddp_orders_its_buckets_once(is_ordered: bool, expected: str, group):
    """launch.order_buckets does it before the first step, by private names; what comes later must not change it. All
    gradients are None again, as before the first step."""
    ddp = DistributedDataParallel(Backwards(), bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    if is_ordered:
        launch.order_buckets(ddp)
        assert all(parameter.grad is None for parameter in ddp.parameters())
    for _ in range(4):
        ddp(torch.randn(2, 300)).sum().backward()
    assert ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"] == expected


def test_ddp_calls_these_methods_around_the_forward_pass(group, monkeypatch):
    """launch.order_buckets calls them, for a pass that has all parameters and no batch."""
    called = []
    for name in ("_pre_forward", "_post_forward"):
        method = getattr(DistributedDataParallel, name)
        spy = lambda ddp, *given, name=name, method=method: called.append((name, len(given))) or method(ddp, *given)  # noqa: E731
        monkeypatch.setattr(DistributedDataParallel, name, spy)
    DistributedDataParallel(nn.Linear(2, 1))(torch.ones(1, 2))
    assert called == [("_pre_forward", 1), ("_post_forward", 1)]


def test_ddp_does_not_order_its_buckets_anew_where_it_looks_for_unused_parameters(group):
    """So launch.ResumableDDP need not order them: DDP would say then that all parameters are used."""
    ddp = DistributedDataParallel(Backwards(), bucket_cap_mb=0.1, find_unused_parameters=True)
    for _ in range(4):
        ddp(torch.randn(2, 300)).sum().backward()
    assert not ddp._get_ddp_logging_data()["has_rebuilt_buckets"]


def test_ddp_keeps_its_gradients_in_its_buckets_after_they_were_set_to_none(group):
    """As optimizer.zero_grad does. DDP would else copy each gradient in each step."""
    ddp = DistributedDataParallel(nn.Linear(2, 1), gradient_as_bucket_view=True)
    addresses = []
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
        addresses.append([parameter.grad.data_ptr() for parameter in ddp.parameters()])
        for parameter in ddp.parameters():
            parameter.grad = None
    assert addresses[1] == addresses[2]


def test_ddp_refuses_a_model_without_parameters_to_train(group):
    """If it no longer does, launch.ResumableDDP need not return such a model as it is."""
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
        DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False))


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, inputs):
        return self.used(inputs)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_ddp_leaves_none_where_a_parameter_has_no_gradient(is_ordered, group):
    """rundir.RunDir.check_gradients finds such parameters in the first step."""
    ddp = DistributedDataParallel(HalfUsed(), gradient_as_bucket_view=True)
    if is_ordered:
        launch.order_buckets(ddp)
    ddp(torch.ones(1, 1)).sum().backward()
    assert {name for name, parameter in ddp.module.named_parameters() if parameter.grad is None} == {
        "unused.weight",
        "unused.bias",
    }


# ---- torch


@pytest.mark.parametrize("value", [1.5, torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(3), torch.tensor(True)])
def test_a_sum_in_float64_takes_numbers_of_other_kinds(value):
    """meters.Means adds what compute_loss returns, with its weight, in the precision of the sum."""
    total = torch.full((), 2.0**-40, dtype=torch.float64)
    total.add_(torch.as_tensor(value), alpha=3)
    assert total.item() == 2.0**-40 + 3 * float(value)


def test_the_default_generator_is_that_of_manual_seed():
    """loader.SeededBatches and loader.seeder seed it alone: torch.manual_seed takes 80 times as long."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(7)
    assert torch.equal(torch.rand(3), expected)
    assert isinstance(torch.cuda.default_generators, tuple)


def test_the_flags_of_a_gpu_are_those_that_torch_reads():
    """launch.prepare_device sets them. An attribute that torch no longer had would be set all the
    same."""
    flags = torch.backends.cudnn
    before = flags.deterministic, flags.benchmark, torch.get_float32_matmul_precision()
    for value in (True, False):
        flags.deterministic = flags.benchmark = value
        assert torch._C._get_cudnn_deterministic() == torch._C._get_cudnn_benchmark() == value
    torch.set_float32_matmul_precision("high")
    assert torch.backends.cuda.matmul.allow_tf32 and flags.allow_tf32  # convolutions have it by default
    flags.deterministic, flags.benchmark = before[:2]
    torch.set_float32_matmul_precision(before[2])


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86")
def test_denormal_numbers_can_be_flushed():
    """launch.prepare_device asks for it; where it cannot be, torch returns False and says nothing."""
    assert torch.set_flush_denormal(True)
    assert torch.tensor(1e-39) * 1 == 0
    assert torch.set_flush_denormal(False)


def test_a_tensor_of_a_mapped_file_stays_in_the_file_until_it_is_cloned(tmp_path):
    """checkpoints.restore clones each tensor: the state would else be backed by a file that a later save may delete."""
    path = tmp_path / "saved"
    torch.save({"weights": torch.ones(100_000)}, path)

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    loaded = checkpoints.load(path)
    assert is_mapped()
    mine = checkpoints.with_tensors(checkpoints.copied, loaded)
    del loaded
    assert not is_mapped() and mine["weights"].sum() == 100_000


def test_torch_saves_all_of_a_tensor_with_a_slice_of_it(tmp_path):
    """So checkpoints.compact copies the slice. Where torch saves the slice alone, it need not."""
    sizes = []
    for tensor in (torch.ones(100_000)[:5], checkpoints.compact(torch.ones(100_000)[:5])):
        torch.save(tensor, tmp_path / "saved")
        sizes.append((tmp_path / "saved").stat().st_size)
    assert sizes[0] > 400_000 and sizes[1] < 10_000


def test_apply_to_collection_changes_tensors_alone():
    """checkpoints.with_tensors and on_cpu use this function of lightning_utilities, which comes with Fabric."""
    plain = {"a": [torch.ones(2), 1, "text", None, (2.5, True)], 3: {"b": torch.zeros(1)}, "empty": {}}
    found = apply_to_collection(plain, Tensor, lambda tensor: tensor + 1)
    assert [found["a"][0].tolist(), found[3]["b"].tolist()] == [[2, 2], [1]]
    assert (found["a"][1:], found["empty"], list(found)) == ([1, "text", None, (2.5, True)], {}, ["a", 3, "empty"])
    parameter = nn.Parameter(torch.ones(1))
    assert type(apply_to_collection({"p": parameter}, Tensor, Tensor.clone)["p"]) is Tensor
    seen = []
    apply_to_collection(plain, Tensor, seen.append)
    assert len(seen) == 2


def test_the_state_of_an_optimizer_is_matched_by_position():
    """Not by name or shape: checkpoints.restore_optimizer compares the names, since a resume with parameters in another
    order would give each the moments of another."""
    small, large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([small, large])
    small.grad, large.grad = torch.ones(2), torch.ones(5)
    optimizer.step()
    other = torch.optim.AdamW([large, small])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[large]["exp_avg"].shape == (2,)


def test_an_optimizer_that_loads_a_state_puts_the_steps_of_a_fused_one_in_place():
    """On the device, as its groups say: so checkpoints.restore_optimizer must not change `fused` behind it, else the
    next step of a GPU fails. Here it is seen by the dtype."""
    parameter = nn.Parameter(torch.zeros(2))
    plain, fused = (torch.optim.AdamW([parameter], fused=is_fused) for is_fused in (False, True))
    then, now = (
        checkpoints.describe_optimizers({"m": nn.ParameterList([parameter]), "o": optimizer})["o"]
        for optimizer in (plain, fused)
    )
    parameter.grad = torch.ones(2)
    plain.step()
    saved = plain.state_dict()
    saved["state"][0]["step"] = torch.tensor(1.0, dtype=torch.float64)
    plain.load_state_dict(saved)
    assert plain.state[parameter]["step"].dtype == torch.float64
    checkpoints.restore_optimizer(fused, saved, now, then)
    assert fused.param_groups[0]["fused"] and fused.state[parameter]["step"].dtype == torch.float32


def test_a_file_of_torch_save_is_a_zip_file_with_checksums(tmp_path):
    """checkpoints.is_whole tells a damaged one by them: torch loads flipped bits without a word."""
    path = tmp_path / "saved"
    torch.save({"weights": torch.ones(1000), "step": 3}, path)
    assert checkpoints.is_whole(path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(4).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert not checkpoints.is_whole(path) and torch.load(path, mmap=True, weights_only=True)["step"] == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_torch_save_covers_up_what_the_system_has_said():
    """checkpoints.save raises what stands behind the error."""
    file = open("/dev/full", "wb")  # noqa: SIM115 - cannot be closed
    with pytest.raises(RuntimeError) as error:
        torch.save(torch.ones(1_000_000), file)
    assert isinstance(error.value.__context__, OSError)


def test_torch_says_this_when_memory_is_short():
    """launch.explain knows it by these words, or by the type."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60)
    of_gpus = (
        torch.OutOfMemoryError("CUDA"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 4 GB)"),
        torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"),
    )
    for failure in (error.value, MemoryError(), *of_gpus):
        launch.explain(failure)
        assert failure.__notes__[0].startswith("out of memory: try a smaller --micro_batch_size")


def test_what_the_system_says_of_the_most_memory_is_in_units_of_1024_bytes():
    """meters.peak_memory; on Linux."""
    kilobytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert meters.peak_memory(torch.device("cpu")) == pytest.approx(kilobytes * 1024 / 1e6, rel=0.05)


# ---- DataLoader


class Waits(Dataset):
    """Gives one sample, and the next once there is a file."""

    def __init__(self, file: Path):
        self.file = file

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index > 0:
            wait_for(self.file.exists)
        return index


@contextmanager
def waiting_loader(folder: Path, timeout: float = 0):
    """A loader whose one worker waits, and its iterator."""
    file = folder / "released"
    loader = DataLoader(Waits(file), batch_size=None, num_workers=1, persistent_workers=True, timeout=timeout,
                        multiprocessing_context="fork")  # fmt: skip
    batches = iter(loader)
    assert next(batches) == 0
    try:
        yield batches
    finally:
        file.touch()


def test_the_workers_of_a_loader_are_children_that_can_be_ended(tmp_path):
    """loader.Loader.end_workers. Torch's handler of SIGCHLD, which it takes away before, raises an error for each."""
    others = set(active_children())
    with waiting_loader(tmp_path) as batches:
        (worker,) = set(active_children()) - others
        assert worker.is_alive() and worker.pid in children(os.getpid())
        assert signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, signal.SIG_IGN, None)
        with pytest.raises(RuntimeError, match=f"DataLoader worker.*{worker.pid}"):
            worker.kill()
            worker.join()
            next(batches)
        assert not worker.is_alive()


def test_a_loader_says_this_of_a_worker_that_delivers_nothing(tmp_path):
    """loader.Loader leaves it to torch to tell."""
    with waiting_loader(tmp_path, timeout=1) as batches, pytest.raises(RuntimeError, match="DataLoader timed out"):
        next(batches)


# ---- process groups


LOSES = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
sys.path.insert(0, {repo!r})
from runtime import launch
rank, how = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
names = ("all_reduce", "broadcast", "barrier", "all_gather_object", "broadcast_object_list")
groups = {{name: dist.new_group(backend="gloo", timeout=timedelta(seconds=1)) for name in names}}
if rank == 1:
    while how == "is silent" and not os.path.exists("done"):
        time.sleep(0.02)
    os._exit(0)
calls = {{
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(1), 1, group=group),
    "barrier": lambda group: dist.barrier(group),
    "all_gather_object": lambda group: dist.all_gather_object([None, None], "x", group=group),
    "broadcast_object_list": lambda group: dist.broadcast_object_list([None], 1, group=group),
}}
for name, call in calls.items():
    try:
        call(groups[name])
        print(name, "was answered", flush=True)
    except Exception as error:
        print(name, launch.is_lost_connection(error), "gloo" in str(error), repr(error), flush=True)
open("done", "w").close()
os._exit(0)
"""


@pytest.mark.parametrize("how", ["ends", "is_silent"])
def test_gloo_tells_its_name_where_another_process_does_not_answer(how: str, tmp_path):
    """launch.is_lost_connection knows it by the path of gloo's source, in all that the ranks do together."""
    (tmp_path / "loses.py").write_text(LOSES.format(repo=str(REPO)).replace("is silent", "is_silent"))
    other = start(f"{tmp_path}/loses.py 1 {how}", tmp_path)
    try:
        lines = run(f"{tmp_path}/loses.py 0 {how}", tmp_path).stdout.splitlines()
    finally:
        kill_group(other)
        other.communicate()
    told = [line for line in lines if not line.startswith("[Gloo]")]  # of torch 2.10 and older
    assert [line.split()[1] for line in told] == ["True"] * 5, told


def test_an_error_of_nccl_has_a_type_of_its_own(group):
    assert launch.is_lost_connection(dist.DistBackendError("NCCL communicator was aborted on rank 0."))
    assert issubclass(dist.DistBackendError, dist.DistError) and not launch.is_lost_connection(RuntimeError("other"))


# ---- filelock

HOLDS = """
import sys
from filelock import FileLock
with FileLock("lock"):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_file_lock_is_free_again_when_its_process_is_killed(tmp_path):
    """launch.build_in_turn: whoever is killed while it fills a directory must not keep the others from it. The file
    stays."""
    lock = FileLock(tmp_path / "lock")
    command = [sys.executable, "-c", HOLDS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        with pytest.raises(Timeout):
            lock.acquire(timeout=0)
        process.kill()
        process.wait()
        with lock:
            assert lock.is_locked
    with lock:  # as a second run
        assert lock.timeout == -1  # it waits as long as it takes


# ---- what launchers put into the environment

TELLS = """
import json, os
print(json.dumps(dict(os.environ)))
"""


FABRIC_RUN = "fabric run --accelerator cpu --devices 1 --num-nodes 1 --strategy ddp --precision 64-true"
OF_FABRIC = {"LT_ACCELERATOR": "cpu", "LT_DEVICES": "1", "LT_NUM_NODES": "1", "LT_STRATEGY": "ddp"}
OF_FABRIC |= {"LT_PRECISION": "64-true", "LT_CLI_USED": "1"}
OF_TORCHRUN = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
OF_TORCHRUN |= {"TORCHELASTIC_MAX_RESTARTS": "0"}
RESTARTS = OF_TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    "launcher, expected",
    [
        pytest.param(FABRIC_RUN, OF_TORCHRUN | OF_FABRIC, marks=pytest.mark.night),
        pytest.param("torchrun --nproc_per_node 1", OF_TORCHRUN, marks=pytest.mark.night),
        ("torchrun --nproc_per_node 1 --max-restarts 3", RESTARTS),
    ],
)
def test_launchers_set_these_variables(launcher: str, expected: dict, tmp_path):
    """cli.words_of_launcher reads the devices and the restarts of them, cli.is_local_zero and cli.is_child_of_fabric
    the rank, and cli.die_with_launcher whether it is torchrun."""
    (tmp_path / "tells.py").write_text(TELLS)
    found = json.loads(run(f"{BIN}/{launcher} {tmp_path}/tells.py", tmp_path).stdout)
    assert {name: found.get(name) for name in expected} == expected
    assert found["TORCHELASTIC_RUN_ID"]


def test_torchrun_asks_for_this_variable_before_it_shares_its_store():
    """cli.words_of_launcher wants it for --max-restarts: with a shared store (torch 2.13), a process that starts again
    may read the address of a dead one. Where torch asks no more, see whether restarts still hang without it."""
    source = inspect.getsource(dynamic_rendezvous)
    assert 'os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")' in source


TELLS_EACH = """
import os
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
line = " ".join(["told", *(str(os.environ.get(name)) for name in names)])
os.write(1, f"{line}\\n".encode())  # in one piece, which the other process cannot break
fabric.barrier()
"""


def test_fabric_tells_the_processes_that_it_starts_their_local_rank(tmp_path):
    """cli.is_local_zero and cli.is_child_of_fabric read it, launch.launch the number of processes. By it a process
    knows, too, that it has a launcher to die with; the first one has none before the launch."""
    (tmp_path / "tells.py").write_text(TELLS_EACH)
    printed = run(f"{tmp_path}/tells.py", tmp_path).stdout
    assert sorted(line for line in printed.splitlines() if line.startswith("told")) == [
        "told 0 None 2 None",
        "told 1 None 2 None",
    ]


def test_fabric_connects_the_ranks_at_once_where_its_command_has_started_them(monkeypatch):
    """cli.words_of_launcher takes this variable away: nothing may wait for others before the datasets are there."""
    launched = []
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda strategy: launched.append(strategy))
    Fabric(accelerator="cpu", devices=1, strategy="ddp")
    assert not launched
    monkeypatch.setenv("LT_CLI_USED", "1")
    Fabric(accelerator="cpu", devices=1, strategy="ddp")
    assert launched


def test_fabric_finds_slurm_by_its_tasks_and_takes_a_job_bash_for_a_shell(monkeypatch):
    """cli.words_of_launcher sets and removes these variables."""
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert not SLURMEnvironment.detect()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    for name, is_found in (("bash", False), ("srun", True)):
        monkeypatch.setenv("SLURM_JOB_NAME", name)
        assert SLURMEnvironment.detect() == is_found
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert SLURMEnvironment.local_rank(None) == 1 and not cli.is_local_zero()


# ---- simple_parsing and argparse


def test_simple_parsing_reports_a_bad_value_on_a_logger_of_this_name(caplog):
    """cli.parse silences it, else the message came twice."""
    logger = logging.getLogger("simple_parsing")
    level = logger.level
    with pytest.raises(ConfigError):
        cli.parse(TrainConfig, ["--seed", "x"])
    assert not caplog.records and logger.level == logging.CRITICAL
    logger.setLevel(level)


@dataclass(frozen=True)
class First:
    """The first group"""

    one: int = 1
    several: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Inner:
    two: float = 2.0


@dataclass(frozen=True)
class Second:
    """The second group"""

    inner: Inner = Inner()
    unseen: str | None = field(default=None, nargs=None, to_dict=False)


@dataclass(frozen=True)
class Both(Second, First):
    """Of the fields of two groups."""


class Groups(ArgumentParser):
    """Notes the groups that are made."""

    def __init__(self, default):
        self.groups: list = []
        super().__init__(argument_generation_mode=ArgumentGenerationMode.NESTED, nested_mode=NestedMode.WITHOUT_ROOT)
        for group in (First, Second):
            self.add_arguments(group, group.__name__, default=default)

    def add_argument_group(self, title=None, description=None, *args, **options):
        self.groups.append((title, description))
        return super().add_argument_group(title, description, *args, **options)


@pytest.mark.parametrize(
    "words, given, others",
    [
        ("", {}, []),
        ("--one 3", {"First": {"one": 3}}, []),
        ("--several 1 2 --inner.two 3", {"First": {"several": (1, 2)}, "Second": {"inner": {"two": 3.0}}}, []),
        ("--inner.two=3 stray --none 5", {"Second": {"inner": {"two": 3.0}}}, ["stray", "--none", "5"]),
    ],
)
def test_simple_parsing_gives_only_what_was_given_for_each_dataclass(words: str, given: dict, others: list):
    """cli.parse puts the sources of options over each other, and tells the first word that is left over."""
    found, left = Groups(SUPPRESS).parse_known_args(words.split())
    assert (vars(found), left) == (given, others)


def test_simple_parsing_makes_a_group_of_each_dataclass_with_its_docstring():
    """cli.Parser.add_argument_group takes it as the title."""
    parser = Groups(None)
    parser.print_help(io.StringIO())
    told = [description.strip() for _, description in parser.groups if description]
    assert told[:2] == ["The first group", "The second group"]


def test_simple_parsing_replaces_by_dotted_names_and_leaves_out_what_is_not_to_be_written():
    """cli and options.values_of rely on these functions."""
    changed = simple_parsing.replace(Both(), {"one": 5, "inner.two": 3.0})
    assert changed == Both(one=5, inner=Inner(two=3.0))
    assert to_dict(changed) == {"one": 5, "several": [1], "inner": {"two": 3.0}}
    assert flatten_join(to_dict(changed)) == {"one": 5, "several": [1], "inner.two": 3.0}
    assert flatten_join({"inner.two": 3}) == {"inner.two": 3}


def test_yaml_reads_text_alone_but_for_null():
    """cli.TextLoader adds one resolver to the BaseLoader, which has none."""
    text = "a: null\nb: ~\nc:\nd: 'null'\ne: 1e-3\nf: [NULL, 010, yes]\ng: nullable\n"
    assert cli.read_yaml(text) == {
        "a": None, "b": None, "c": None, "d": "null", "e": "1e-3", "f": [None, "010", "yes"], "g": "nullable",
    }  # fmt: skip
    assert yaml.load(text, yaml.BaseLoader)["a"] == "null"


# ---- recipes


def test_the_number_of_shards_is_an_attribute_of_fabrics_strategy():
    """sharded.patch sets it to the number of all processes, which it does not know before; Fabric would shard over the
    machines."""
    assert ModelParallelStrategy(lambda model, mesh: model, data_parallel_size=3)._data_parallel_size == 3


# ---- what only a GPU can show


def on_gpu(test):
    """Marks a test that needs a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@pytest.fixture
def no_waiting():
    """Whatever waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def keep_busy(milliseconds: int = 200):
    """Gives the device something to do; returns at once."""
    torch.cuda._sleep(1_000_000 * milliseconds)  # cycles of at least 1 GHz


@on_gpu
def test_the_generators_of_the_gpus_are_there_once_one_is_used():
    """loader.seeder seeds them: once a model or samples were moved, they are there, and are those of manual_seed."""
    device = torch.zeros(1, device="cuda").device
    assert len(torch.cuda.default_generators) == torch.cuda.device_count()
    torch.cuda.manual_seed(7)
    expected = torch.rand(3, device=device)
    torch.cuda.default_generators[device.index].manual_seed(7)
    assert torch.equal(torch.rand(3, device=device), expected)


@on_gpu
def test_to_seed_a_gpu_does_not_wait_for_it(no_waiting):
    """loader.seeder seeds it before each micro-batch."""
    torch.cuda.default_generators[0].manual_seed(7)


@on_gpu
def test_a_copy_from_pinned_memory_does_not_wait_and_any_other_does():
    """loader.Loader pins the batches, the recipe on_device the indices; both copy by Fabric.to_device, which says
    non_blocking."""
    pinned = torch.ones(10_000_000).pin_memory()
    target = torch.empty_like(pinned, device="cuda")
    keep_busy()
    begun = torch.cuda.Event()
    begun.record()
    target.copy_(pinned, non_blocking=True)
    assert not begun.query()
    target.copy_(torch.ones(10_000_000))
    assert begun.query()


@on_gpu
def test_pinned_memory_is_not_used_again_before_it_was_copied():
    """loader.Loader and the recipe on_device drop a pinned tensor while its copy is still in the queue."""
    keep_busy()
    copies = []
    for number in range(100):
        copies.append(torch.full((64,), number).pin_memory().to("cuda", non_blocking=True))
    assert [int(copied[0]) for copied in copies] == list(range(100))


@on_gpu
def test_memory_of_a_stream_is_used_again_by_that_stream_alone():
    """The recipe prefetch lets its stream wait before it allocates, and needs no record_stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        address = torch.empty(100_000, device="cuda").data_ptr()  # is freed
    assert torch.empty(100_000, device="cuda").data_ptr() != address
    with torch.cuda.stream(stream):
        assert torch.empty(100_000, device="cuda").data_ptr() == address


@on_gpu
def test_synchronize_of_the_accelerator_waits_for_all_streams():
    """meters.Timer: without it, samples_per_second would be those that Python has queued."""
    with torch.cuda.stream(torch.cuda.Stream()):
        keep_busy()
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    torch.accelerator.synchronize(torch.device("cuda", torch.cuda.current_device()))
    assert done.query()


@on_gpu
def test_tf32_is_supported_from_ampere_on():
    """loggers.header says so of float32 products."""
    assert torch.cuda.is_tf32_supported() == (torch.cuda.get_device_capability() >= (8, 0))


@on_gpu
@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_step_of_a_fused_optimizer_is_on_the_gpu(is_loaded: bool):
    """Also after the state was loaded from a checkpoint on the CPU, as checkpoints does: else each step would wait."""
    parameter = nn.Parameter(torch.zeros(2, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if is_loaded:
        saved = optimizer.state_dict()
        on_cpu = {name: value.cpu() for name, value in saved["state"][0].items()}
        optimizer.load_state_dict(saved | {"state": {0: on_cpu}})
    assert {value.device.type for value in optimizer.state[parameter].values()} == {"cuda"}


@on_gpu
def test_to_clip_gradients_does_not_wait(no_waiting):
    """meters.clip_gradients, by functions of torch; a norm that torch compared on the host would wait."""
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    assert meters.clip_gradients(torch.optim.AdamW([parameter], fused=True), 1.0).is_cuda


@on_gpu
def test_fabrics_mixed_precision_has_a_scaler_for_the_gpu():
    """meters.unscale_gradients finds it there, and state["precision"] has its state."""
    precision = Fabric(accelerator="cuda", devices=1, precision="16-mixed").strategy.precision
    assert (type(precision), precision.device) == (MixedPrecision, "cuda")
    assert isinstance(precision.scaler, torch.amp.GradScaler)


@on_gpu
def test_nccl_and_gloo_stand_side_by_side_and_ddp_orders_its_buckets_on_a_gpu():
    """launch.order_buckets, whose private names get None for a batch; launch.StopSignals and rundir.RunDir, whose
    groups carry tensors of the CPU beside NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        ddp = DistributedDataParallel(Backwards().cuda(), [0], bucket_cap_mb=0.1, gradient_as_bucket_view=True)
        launch.order_buckets(ddp)
        ddp(torch.randn(2, 300, device="cuda")).sum().backward()
        assert ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"] == "5 4, 3 2, 1 0"
        values = torch.ones(2)
        dist.all_reduce(values, group=dist.new_group(backend="gloo"))
        assert values.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
