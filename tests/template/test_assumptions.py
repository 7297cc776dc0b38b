"""What the core assumes of torch, Fabric, simple_parsing and others without being promised by them. Each test says what
hangs on it: where a new version breaks one, that place is to be looked at. What only a GPU can show comes last."""

import inspect
import json
import re
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import lightning.fabric.strategies.ddp as fabric_ddp
import pytest
import torch
import torch.distributed as dist
import yaml
from helpers import REPO, kill_group, run, start
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.nn.parallel import DistributedDataParallel

from config import TrainConfig
from runtime import checkpoints, cli, config_file, launch, meters, resume, terminal

BIN = Path(sys.executable).parent
FABRIC = Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- Fabric's wrappers


def test_fabric_refuses_gradients_by_torch_where_a_precision_has_a_backward_of_its_own():
    """launch.build_fabric gives bf16-mixed that of the base class, so that torch.autograd.grad works."""
    ours = launch.build_fabric(TrainConfig(accelerator="cpu", devices="1", precision="bf16-mixed"))
    theirs = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    for fabric, is_refused in ((theirs, True), (ours, False)):
        model = fabric.setup_module(nn.Linear(1, 1))
        loss = model(torch.ones(1, 1)).sum()
        with pytest.raises(RuntimeError, match="fabric.backward") if is_refused else nullcontext():
            torch.autograd.grad(loss, model.weight)


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


# ---- Fabric's strategies and launchers


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
    """launch.ResumableDDP gives NCCL 60 seconds more than --timeout, so that ranks.StopSignals can say first what has
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


def test_ddp_does_not_order_its_buckets_anew_where_it_looks_for_unused_parameters(group):
    """So launch.ResumableDDP need not order them: DDP would say then that all parameters are used."""
    ddp = DistributedDataParallel(Backwards(), bucket_cap_mb=0.1, find_unused_parameters=True)
    for _ in range(4):
        ddp(torch.randn(2, 300)).sum().backward()
    assert not ddp._get_ddp_logging_data()["has_rebuilt_buckets"]


def test_ddp_refuses_a_model_without_parameters_to_train(group):
    """If it no longer does, launch.ResumableDDP need not return such a model as it is."""
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
        DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False))


# ---- torch


@pytest.mark.parametrize("value", [1.5, torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(3), torch.tensor(True)])
def test_a_sum_in_float64_takes_numbers_of_other_kinds(value):
    """meters.Means adds what compute_loss returns, with its weight, in the precision of the sum."""
    total = torch.full((), 2.0**-40, dtype=torch.float64)
    total.add_(torch.as_tensor(value), alpha=3)
    assert total.item() == 2.0**-40 + 3 * float(value)


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


def test_apply_to_collection_changes_tensors_alone():
    """checkpoints.with_tensors uses this function of lightning_utilities, which comes with Fabric."""
    plain = {"a": [torch.ones(2), 1, "text", None, (2.5, True)], 3: {"b": torch.zeros(1)}, "empty": {}}
    found = apply_to_collection(plain, Tensor, lambda tensor: tensor + 1)
    assert [found["a"][0].tolist(), found[3]["b"].tolist()] == [[2, 2], [1]]
    assert (found["a"][1:], found["empty"], list(found)) == ([1, "text", None, (2.5, True)], {}, ["a", 3, "empty"])
    parameter = nn.Parameter(torch.ones(1))
    assert type(apply_to_collection({"p": parameter}, Tensor, Tensor.clone)["p"]) is Tensor
    seen = []
    apply_to_collection(plain, Tensor, seen.append)
    assert len(seen) == 2


def test_an_optimizer_that_loads_a_state_puts_the_steps_of_a_fused_one_in_place():
    """On the device, as its groups say: so resume.restore_optimizer must not change `fused` behind it, else the
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
    resume.restore_optimizer(fused, saved, now, then)
    assert fused.param_groups[0]["fused"] and fused.state[parameter]["step"].dtype == torch.float32


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
    # Not before rank 0 has connected the last group: that fails in another way.
    while not os.path.exists("done" if how == "is silent" else "connected"):
        time.sleep(0.02)
    os._exit(0)
open("connected", "w").close()
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


# ---- what launchers put into the environment

TELLS = """
import json, os
print(json.dumps(dict(os.environ)))
"""


FABRIC_RUN = "fabric run --accelerator cpu --devices 1 --num-nodes 1 --strategy ddp --precision 64-true"
OF_FABRIC = {"LT_ACCELERATOR": "cpu", "LT_DEVICES": "1", "LT_NUM_NODES": "1", "LT_STRATEGY": "ddp"}
OF_FABRIC |= {"LT_PRECISION": "64-true", "LT_CLI_USED": "1", "TORCHELASTIC_MAX_RESTARTS": "0"}
OF_TORCHRUN = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "launcher, more",
    [
        pytest.param(FABRIC_RUN, OF_FABRIC, marks=pytest.mark.night),
        ("torchrun --nproc_per_node 1 --max-restarts 3", {"TORCHELASTIC_MAX_RESTARTS": "3"}),
    ],
)
def test_launchers_set_these_variables(launcher: str, more: dict, tmp_path):
    """cli.words_of_launcher reads the devices and the restarts of them, terminal.is_local_zero and is_child_of_fabric
    the rank, and cli.die_with_launcher whether it is torchrun."""
    (tmp_path / "tells.py").write_text(TELLS)
    found = json.loads(run(f"{BIN}/{launcher} {tmp_path}/tells.py", tmp_path).stdout)
    expected = OF_TORCHRUN | more
    assert {name: found.get(name) for name in expected} == expected
    assert found["TORCHELASTIC_RUN_ID"]


def test_torchrun_asks_for_this_variable_before_it_shares_its_store():
    """cli.words_of_launcher wants it for --max-restarts: with a shared store (torch 2.13), a process that starts again
    may read the address of a dead one. Where torch asks no more, see whether restarts still hang without it."""
    source = inspect.getsource(dynamic_rendezvous)
    assert 'os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")' in source


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
    assert SLURMEnvironment.local_rank(None) == 1 and not terminal.is_local_zero()


# ---- simple_parsing and argparse


def test_yaml_reads_text_alone_but_for_null():
    """config_file.TextLoader adds one resolver to the BaseLoader, which has none."""
    text = "a: null\nb: ~\nc:\nd: 'null'\ne: 1e-3\nf: [NULL, 010, yes]\ng: nullable\n"
    assert config_file.read_yaml(text) == {
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


def keep_busy(milliseconds: int = 200):
    """Gives the device something to do; returns at once."""
    torch.cuda._sleep(1_000_000 * milliseconds)  # cycles of at least 1 GHz


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
    """console.header says so of float32 products."""
    assert torch.cuda.is_tf32_supported() == (torch.cuda.get_device_capability() >= (8, 0))


@on_gpu
@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_step_of_a_fused_optimizer_is_on_the_gpu(is_loaded: bool):
    """Also after the state was loaded from a checkpoint on the CPU, as resume does: else each step would wait."""
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
def test_nccl_and_gloo_stand_side_by_side_and_ddp_orders_its_buckets_on_a_gpu():
    """launch.order_buckets, whose private names get None for a batch; ranks.StopSignals and ranks.OnRankZero,
    whose groups carry tensors of the CPU beside NCCL."""
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
