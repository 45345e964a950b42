"""What a plan is made of: arrangements of ranks, a ledger of storages, counts of collectives and kernels, speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from forge_train import ForgeError
from forge_train.config.sections import Precision
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train_tools.planning import meshes
from forge_train_tools.planning.communication import Collective, Collectives, Names
from forge_train_tools.planning.imagined import ImaginedContext, imagined
from forge_train_tools.planning.ledger import Ledger
from forge_train_tools.planning.on_cuda import kernels_of_cuda
from forge_train_tools.planning.roofline import DEVICES, Kernel, Roofline, roofline
from forge_train_tools.planning.traffic import Traffic
from forge_train_tools.planning.watch import AnyDtype
from forge_train_tools.planning.work import Work

pytestmark = [pytest.mark.unit]

functional = torch.ops._c10d_functional
AXES = {"dp_replicate": 2, "dp_shard": 3, "tp": 2}


# -- arrangements -----------------------------------------------------------------------------------------------------


def test_the_grid_is_torchs() -> None:
    assert meshes.grid(AXES) == torch.arange(12).view(2, 3, 2).tolist()
    assert meshes.grid({"pp": 1, "tp": 2}) == [[0, 1]]


def test_groups_are_neighbours_along_one_axis() -> None:
    cube = torch.arange(12).view(2, 3, 2)
    for at, (axis, size) in enumerate(AXES.items()):
        expected = {tuple(group) for group in cube.movedim(at, -1).reshape(-1, size).tolist()}
        found = meshes.groups(AXES, axis)
        assert {tuple(group) for group in found} == expected
        assert all(meshes.along(AXES, list(group)) == (axis,) for group in found)


def test_ranks_that_tile_several_axes_or_none() -> None:
    assert meshes.along(AXES, [0, 1, 2, 3, 4, 5]) == ("dp_shard", "tp")
    assert meshes.along(AXES, [0, 2, 4, 6, 8, 10]) == ("dp_replicate", "dp_shard")
    assert meshes.along(AXES, list(range(12))) == ("dp_replicate", "dp_shard", "tp")
    assert meshes.along(AXES, [0, 1, 2]) == ()


# -- a world that is not there ----------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[ImaginedContext]:
    with imagined(Layout(dp_replicate=2, dp_shard=2, tp=2), World(size=8, local_size=4)) as made:
        yield made
    assert not dist.is_initialized()


@pytest.mark.slow
def test_one_rank_speaks_for_all(context: ImaginedContext) -> None:
    assert context.gather_objects("x") == ["x"] * 8
    assert len(context.gather_tensors(torch.ones(2))) == 8
    assert len(context.gather_tensors(torch.ones(2), "dp")) == 4
    assert context.on_main(lambda: 5) == 5
    context.barrier()
    context.agree({"x": 1})
    assert context.mesh("dense", "tp").shape == (2,)


@pytest.mark.slow
def test_is_refused_where_ranks_are_joined_already(context: ImaginedContext) -> None:
    with pytest.raises(ForgeError, match="has joined others already"), imagined(Layout(tp=2), World(size=2)):
        pass
    assert dist.is_initialized()


@pytest.mark.slow
def test_nothing_is_left_where_planning_fails() -> None:
    with pytest.raises(KeyError), imagined(Layout(tp=2), World(size=2)):
        raise KeyError
    assert not dist.is_initialized()


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_collectives_by_kind_axis_and_bytes(context: ImaginedContext) -> None:
    tp, fsdp = context.mesh("dense", "tp").get_group(), context.mesh("dense", "fsdp").get_group()
    names, told = Names(context), list[Collective]()
    small, large = torch.ones(4), torch.ones(8)
    with Collectives(told.append):
        dist.all_gather_into_tensor(large, small, group=tp)
        dist.reduce_scatter_tensor(small, large, group=fsdp)
        dist.all_reduce(small)
        dist.all_gather([small, small], small, group=tp)
        dist.all_to_all_single(large, large, group=tp)
        dist.broadcast(large, 0, group=tp)
        functional.wait_tensor(functional.all_gather_into_tensor(small, 2, tp.group_name))
        functional.wait_tensor(functional.all_reduce(small.bfloat16(), "sum", fsdp.group_name))
    assert [(one.kind, names.of(one.group), one.ranks, one.held, one.sent) for one in told] == [
        ("all_gather", "tp", 2, 32, 16),
        ("reduce_scatter", "dp_shard", 2, 32, 16),
        ("all_reduce", "dp_replicate × dp_shard × tp", 8, 16, 28),
        ("all_gather", "tp", 2, 32, 16),
        ("all_to_all", "tp", 2, 32, 16),
        ("broadcast", "tp", 2, 32, 16),
        ("all_gather", "tp", 2, 32, 16),
        ("all_reduce", "dp_shard", 2, 8, 8),
    ]
    assert [names.per_node(one.group) for one in told[:3]] == [2, 2, 4]


@pytest.mark.slow
def test_flattened_axes_bear_the_names_of_what_they_consist_of(context: ImaginedContext) -> None:
    names = Names(context)
    found = {axis: names.of_mesh(axis) for axis in ("fsdp", "data", "tp", "dp_replicate")}
    data = "dp_replicate × dp_shard"
    assert found == {"fsdp": "dp_shard", "data": data, "tp": "tp", "dp_replicate": "dp_replicate"}


@pytest.mark.slow
def test_experts_have_axes_of_their_own() -> None:
    with imagined(Layout(dp_shard=4, tp=2, ep=4), World(size=8)) as context:
        names = Names(context)
        assert names.of(context.mesh("expert", "ep").get_group().group_name) == "ep"
        assert names.of(context.mesh("expert", "efsdp").get_group().group_name) == "efsdp"
        assert names.of_mesh("tp") == "tp"


# -- the ledger -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
def test_a_storage_counts_until_nothing_holds_it(fake: bool) -> None:
    mode = FakeTensorMode()
    if fake:
        mode.__enter__()
    try:
        weight = torch.ones(256, requires_grad=True)
        with Ledger() as ledger:
            own = ledger.numbers([weight])
            a = torch.zeros(256)
            view = a[:10]
            del a
            b = weight * 2  # keeps nothing
            c = b * b  # autograd keeps b
            del b, view
            d = torch.zeros(1024)
            d.untyped_storage().resize_(0)
            c.sum().backward()
    finally:
        if fake:
            mode.__exit__(None, None, None)
    assert ledger.peak(own) == 1024
    assert ledger.peak() == 1024 * (1 + 2 + 4)  # weight, b and c, then d
    assert ledger.peak(but=own) == 1024 * 6
    left = Counter[int]()
    for number, change in ledger.changes:
        left[number] += change
    assert sum(left.values()) == 1024 * 3 + 0  # weight, c and the gradient


def test_what_is_computed_again_is_not_kept() -> None:
    def peak(again: bool) -> int:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
        x = torch.ones(256, 64, requires_grad=True)
        with Ledger() as ledger:
            own = ledger.numbers([x, *(layer.weight for layer in layers)])
            y = x
            for layer in layers:

                def block(y: torch.Tensor, layer: nn.Linear = layer) -> torch.Tensor:
                    return torch.tanh(torch.sin(layer(y)))

                y = checkpoint(block, y, use_reentrant=False) if again else block(y)
            y.sum().backward()
        return ledger.peak(but=own)

    assert peak(True) < 0.7 * peak(False)


def test_a_norm_on_cuda_keeps_its_input_and_a_number_a_token() -> None:
    """As `aten::_fused_rms_norm` does, which no CPU has; where dtypes differ, CUDA composes it too."""

    def kept(*, cuda: bool, weight: torch.dtype = torch.bfloat16) -> tuple[int, int]:
        norm, x = nn.RMSNorm(64, dtype=weight), torch.ones(256, 64, dtype=torch.bfloat16, requires_grad=True)
        on_cuda = kernels_of_cuda() if cuda else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), on_cuda, Ledger() as ledger:
            own = ledger.numbers([x, *norm.parameters()])
            y = norm(x)
            held = sum(size for number, size in ledger.changes if number not in own)
            y.sum().backward()
        assert x.grad is not None
        assert norm.weight.grad is not None
        return held, ledger.peak(but=own)

    values = 256 * 64
    held, peak = kept(cuda=True)
    assert held == values * 2 + 256 * 4  # its result, and the reciprocals of the roots
    assert peak < kept(cuda=False)[1]
    assert kept(cuda=True, weight=torch.float32) == kept(cuda=False, weight=torch.float32)


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_work_of_kernels() -> None:
    told: list[tuple[float, int, bool]] = []
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    with Work(lambda *kernel: told.append(kernel)):
        c = a @ b
        c.t().unsqueeze(0)[:3]
        torch.empty(100)
        c.add_(1)
    assert told == [(2 * 4 * 8 * 16, 4 * (32 + 128 + 64), False), (0, 4 * 2 * 64, False)]


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_counts_what_is_seen(causal: bool, share: float) -> None:
    total = 0.0

    def tell(flops: float, size: int, attention: bool) -> None:
        nonlocal total
        assert attention == (flops > 0)
        total += flops

    query = torch.ones(2, 4, 32, 8, requires_grad=True)
    key = torch.ones(2, 2, 32, 8)
    with Work(tell):
        out = F.scaled_dot_product_attention(query, key, key, is_causal=causal, enable_gqa=True)
        forward = total
        out.sum().backward()
    products = 2 * 2 * 4 * 32 * 32 * 8 * share
    assert forward == 2 * products
    assert total - forward == 5 * products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_of_rows(dtype: torch.dtype) -> None:
    """Forward with a matrix for each group, backward once the same and once over the rows of each."""

    def step() -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
        rows = torch.zeros(12, 16, dtype=dtype, requires_grad=True)
        matrices = torch.zeros(3, 16, 32, dtype=dtype, requires_grad=True)
        ends = torch.full((3,), 4, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        out = F.grouped_mm(rows, matrices, offs=ends)
        (out * torch.ones_like(out)).sum().backward()
        assert rows.grad is not None
        assert matrices.grad is not None
        return [(one.shape, one.stride(), one.dtype) for one in (out, rows.grad, matrices.grad)]

    total = 0.0

    def tell(flops: float, size: int, attention: bool) -> None:
        nonlocal total
        assert not attention
        total += flops

    with FakeTensorMode(), AnyDtype(), Work(tell):
        found = step()
    assert found == step()
    assert total == 3 * 2 * 12 * 16 * 32


# -- the roofline -----------------------------------------------------------------------------------------------------


def test_the_roofline_is_bound_by_what_takes_longest() -> None:
    device = DEVICES["h100"]
    product = Kernel(device.narrow * 1e-3, 1, fusible=False, attention=True)
    update = Kernel(0.0, int(device.bandwidth * 1e-4), fusible=False)
    between = Kernel(0.0, int(device.bandwidth * 5e-3), fusible=True)
    kernels = Counter({product: 2, update: 3, between: 1})

    def made(sent: list[Traffic], precision: Precision = "bf16", peak: int | None = 10**9) -> Roofline:
        return roofline(
            device,
            precision,
            kernels,
            sent,
            tokens=1000,
            ranks=4,
            flops_per_token=device.narrow * 4e-6,
            peak_bytes=peak,
        )

    inside = Traffic("all_gather", "tp", 8, 1, device.inside * 1e-3, per_node=8)
    quick = made([inside])
    assert vars(quick) == {
        "device": device.name,
        "compute": pytest.approx(2e-3),
        "attention": pytest.approx(2e-3),
        "operands": 0,
        "memory": pytest.approx(3e-4),
        "fusible": pytest.approx(5e-3),
        "communication": pytest.approx(1e-3),
        "step": pytest.approx(2.3e-3),
        "bound": "compute",
        "tokens_per_second": pytest.approx(1000 / 2.3e-3),
        "unfused_tokens_per_second": pytest.approx(1000 / 7.3e-3),
        "mfu": pytest.approx(1 / 2.3),
        "fits": True,
        "memory_bytes": 80e9,
    }
    slow = made([inside, Traffic("all_gather", "dp_shard", 2, 1, device.across * 9e-3, per_node=1)])
    assert (slow.bound, slow.step) == ("communication", pytest.approx(1e-2))
    wide = made([Traffic("all_gather", "dp_shard", 16, 1, device.across * 8e-3, per_node=8)])
    assert wide.communication == pytest.approx(1e-3)  # eight rings, eight adapters
    assert made([], "fp32").compute == pytest.approx(2e-3 * device.narrow / device.single)
    assert made([], peak=10**11).fits is False
    assert made([], peak=None).fits is None


@pytest.mark.parametrize("device", sorted({*DEVICES} - {"cpu"}))
def test_data_sheets_are_in_their_units(device: str) -> None:
    sheet = vars(DEVICES[device])
    assert 1e14 < sheet["narrow"] < 1e16
    assert sheet["single"] < sheet["narrow"] / 5
    assert 1e12 < sheet["bandwidth"] < 2e13
    assert 1e10 < sheet["memory"] < 1e12
    assert 1e10 < sheet["across"] < sheet["inside"] < sheet["bandwidth"]


def test_the_data_sheet_of_a_cpu_is_in_its_units() -> None:
    sheet = vars(DEVICES["cpu"])
    assert 1e12 < sheet["single"] < sheet["narrow"] < 1e14
    assert 1e11 < sheet["bandwidth"] < 1e12
    assert 1e11 < sheet["memory"] < 1e13
    assert 1e9 < sheet["across"] < sheet["bandwidth"]
