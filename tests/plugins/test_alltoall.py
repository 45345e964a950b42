"""`alltoall` in one process: rows sorted by expert and back, and what an fp8 payload makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_train_plugins.experts._alltoall.order import Order
from forge_train_plugins.experts._alltoall.payload import BLOCK, LARGEST, pack, rounded, unpack
from forge_train_plugins.experts._alltoall.transport import Local

pytestmark = pytest.mark.unit
COUNT, DIM = 5, 6


def cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    free = torch.randint(0, COUNT, (9, 3), generator=generator)
    return {
        "anywhere": free,
        "some nowhere": free.masked_fill(free == 2, -1),
        "a token nowhere": torch.cat([torch.full((1, 3), -1), free]),
        "all nowhere": torch.full((4, 2), -1),
        "one expert": torch.full((6, 1), 3),
        "one token": torch.tensor([[4, 0]]),
    }


@pytest.mark.parametrize("case", cases())
def test_rows_go_to_their_experts_and_back(case: str) -> None:
    experts = cases()[case]
    x = torch.randn(len(experts), DIM, requires_grad=True)
    weights = torch.rand(experts.shape, requires_grad=True)
    rows, sizes, handle = Local().dispatch(x, experts, COUNT)
    assert sizes.tolist() == [(experts == expert).sum() for expert in range(COUNT)]
    factors = torch.arange(1.0, COUNT + 1).repeat_interleave(sizes)
    used = int(sizes.sum())
    out_rows = torch.cat([rows[:used] * factors[:, None], torch.full_like(rows[used:], float("nan"))])
    out = Local().combine(out_rows, weights, handle)
    table = torch.cat([torch.arange(1.0, COUNT + 1), torch.zeros(1)])
    expected = (weights * table[experts]).sum(1, keepdim=True) * x
    torch.testing.assert_close(out, expected)
    got, wanted = (torch.autograd.grad(one.square().sum(), (x, weights)) for one in (out, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_one_expert_keep_the_order_of_tokens() -> None:
    order = Order.of(torch.tensor([[1, 0], [0, 1], [1, 2]]), 3)
    assert order.tokens.tolist() == [0, 1, 0, 1, 2, 2]


class _Waits(TorchDispatchMode):
    """Finds operations for which the host waits for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
        return function(*args, **(kwargs or {}))


def test_local_dispatch_never_waits_for_the_device() -> None:
    x, experts = torch.randn(8, DIM, requires_grad=True), torch.randint(-1, COUNT, (8, 2))
    with _Waits():
        rows, _, handle = Local().dispatch(x, experts, COUNT)
        Local().combine(rows, torch.rand(8, 2), handle).sum().backward()


# -- fp8 payload -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 128, 200, 384])
def test_the_payload_is_e4m3_with_a_scale_for_each_block(dim: int) -> None:
    x = torch.randn(7, dim) * torch.logspace(-6, 6, 7)[:, None]
    packed = pack(x)
    blocks = -(-dim // BLOCK)
    assert packed.dtype is torch.uint8
    assert packed.shape == (7, dim + 4 * blocks)
    arrived = unpack(packed, dim, torch.float32)
    for at in range(blocks):
        block = x[:, at * BLOCK : (at + 1) * BLOCK]
        scale = block.abs().amax(1, keepdim=True) / LARGEST
        expected = (block / scale).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(arrived[:, at * BLOCK : (at + 1) * BLOCK], expected)


def test_rows_of_zeros_stay_zero() -> None:
    assert torch.equal(rounded(torch.zeros(2, 130)), torch.zeros(2, 130))


def test_no_rows_are_packed_and_unpacked_too() -> None:
    nothing = torch.empty(0, 160)
    assert unpack(pack(nothing), 160, torch.float32).shape == (0, 160)


def test_the_payload_is_little_more_than_half_of_bf16() -> None:
    x = torch.randn(64, 1024, dtype=torch.bfloat16)
    assert pack(x).nbytes <= 0.55 * x.nbytes


def test_a_narrow_payload_rounds_what_goes_to_experts_and_nothing_else() -> None:
    experts = cases()["anywhere"]
    x = torch.randn(9, DIM, requires_grad=True)
    weights = torch.rand(experts.shape)
    rows, _, handle = Local(narrow=True).dispatch(x, experts, COUNT)
    assert torch.equal(rows, rounded(x[handle.tokens]))
    rows = rows.detach().requires_grad_()
    out = Local(narrow=True).combine(rows, weights, handle)
    torch.testing.assert_close(out, Local().combine(rows, weights, handle))
    gradient = torch.randn(9, DIM)
    (narrow,) = torch.autograd.grad(out, rows, gradient)
    (exact,) = torch.autograd.grad(Local().combine(rows, weights, handle), rows, gradient)
    assert torch.equal(narrow, rounded(exact))
