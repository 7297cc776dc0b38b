"""What the core assumes of torch, Fabric and others without being promised by them. Each test says what hangs on it:
where a new version breaks one, that place is to be looked at. What only a GPU can show comes last."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import DataParallelStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from config import TrainConfig
from runtime import checkpoints, launch, meters, resume, terminal


def one(**options) -> Fabric:
    return Fabric(accelerator="cpu", **{"devices": 1} | options)


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- Fabric's wrappers


def test_fabric_compiles_a_compiled_model_again_and_names_its_weights_as_before():
    """train.py compiles before setup_module; else --compile did nothing. Checkpoints, and test.py, which does not
    compile, rely on the names."""
    model = one().setup_module(torch.compile(nn.Linear(2, 1), dynamic=False))
    assert isinstance(model._forward_module, torch._dynamo.OptimizedModule)
    assert model.state_dict().keys() == {"weight", "bias"}


@pytest.mark.parametrize("device, expected", [("cuda", {"non_blocking": True}), ("mps", {}), ("cpu", {})])
def test_fabric_copies_a_batch_without_a_wait_to_a_gpu_and_with_one_elsewhere(device: str, expected: dict, monkeypatch):
    """loader.Loader and the recipes on_device and prefetch copy by Fabric.to_device. On MPS a copy without a wait would
    read memory that is freed (pytorch#83015)."""
    given = []
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, **options: given.append(options) or tensor)
    one().strategy.batch_to_device({"images": [torch.ones(1)]}, torch.device(device, 0))
    assert given == [expected]


def test_the_warnings_of_fabric_that_are_ignored_have_these_words(monkeypatch):
    """launch.build_fabric ignores them: it tells itself that 16-mixed and dp need a GPU, and dp has no gradient sync to
    skip."""
    fabric = one()
    model = fabric.setup_module(nn.Linear(1, 1))
    monkeypatch.setattr(fabric, "_strategy", DataParallelStrategy(parallel_devices=[torch.device("cpu")]))
    calls = (
        lambda: one(precision="16-mixed"),
        lambda: one(devices=2, strategy="dp"),
        lambda: fabric.no_backward_sync(model),
    )
    for is_ignored in (False, True):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if is_ignored:
                launch.build_fabric(TrainConfig(accelerator="cpu", devices="1"))
                torch.set_flush_denormal(False)
            for call in calls:
                call()
        assert sum("not support" in str(warning.message) for warning in found) == (0 if is_ignored else len(calls))


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
    "is_ordered, is_searching, expected",
    [
        pytest.param(True, False, "5 4, 3 2, 1 0", id="ours"),
        pytest.param(False, False, "1 0, 3 2, 5 4", id="by itself"),
        # So launch.ResumableDDP need not order them: DDP would say then that all parameters are used.
        pytest.param(False, True, None, id="looks for unused parameters"),
    ],
)
def test_ddp_orders_its_buckets_once(is_ordered: bool, is_searching: bool, expected: str | None, group):
    """launch.order_buckets does it before the first step, by private names; what comes later must not change it. All
    gradients are None again, as before the first step."""
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": is_searching}
    ddp = DistributedDataParallel(Backwards(), bucket_cap_mb=0.1, **options)
    if is_ordered:
        launch.order_buckets(ddp)
        assert all(parameter.grad is None for parameter in ddp.parameters())
    for _ in range(4):
        ddp(torch.randn(2, 300)).sum().backward()
    found = ddp._get_ddp_logging_data()
    assert found["has_rebuilt_buckets"] == (expected is not None)
    assert expected is None or found["rebuilt_per_bucket_param_indices"] == expected


# ---- torch


def test_the_flags_of_a_gpu_are_those_that_torch_reads(monkeypatch):
    """launch.prepare_device sets them. An attribute that torch no longer had would be set all the same."""
    flags = torch.backends.cudnn
    before = torch.get_float32_matmul_precision()
    for value in (True, False):
        monkeypatch.setattr(flags, "deterministic", value)
        monkeypatch.setattr(flags, "benchmark", value)
        assert torch._C._get_cudnn_deterministic() == torch._C._get_cudnn_benchmark() == value
    torch.set_float32_matmul_precision("high")
    assert torch.backends.cuda.matmul.allow_tf32 and flags.allow_tf32  # convolutions have it by default
    torch.set_float32_matmul_precision(before)


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
        assert "--micro_batch_size" in failure.__notes__[0]


def test_what_the_system_says_of_the_most_memory_is_in_units_of_1024_bytes():
    """meters.peak_memory; on Linux."""
    kilobytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert meters.peak_memory(torch.device("cpu")) == pytest.approx(kilobytes * 1024 / 1e6, rel=0.05)


def test_an_error_of_nccl_has_a_type_of_its_own(group):
    assert launch.is_lost_connection(dist.DistBackendError("NCCL communicator was aborted on rank 0."))
    assert issubclass(dist.DistBackendError, dist.DistError) and not launch.is_lost_connection(RuntimeError("other"))


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


# ---- what only a GPU can show


def on_gpu(test):
    """Marks a test that needs a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def keep_busy(milliseconds: int = 200):
    """Gives the device something to do; returns at once."""
    torch.cuda._sleep(1_000_000 * milliseconds)  # cycles of at least 1 GHz


@on_gpu
def test_pinned_memory_is_not_used_again_before_it_was_copied():
    """loader.Loader and the recipe on_device drop a pinned tensor while its copy is still in the queue."""
    keep_busy()
    copies = []
    for number in range(100):
        copies.append(torch.full((64,), number).pin_memory().to("cuda", non_blocking=True))
    assert [int(copied[0]) for copied in copies] == list(range(100))


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
