"""Tensors in 4- and 8-bit codes: their values, what may be done with them, and what is kept for a backward pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import ConfigError
from forge_train.mesh.tensors import held_bytes
from forge_train_kit.model.block_codes import BlockTensor
from forge_train_kit.model.block_format import BlockFormat, nf4_levels
from forge_train_plugins.experts._moe.experts import Product, grouped, looped

pytestmark = pytest.mark.unit
FORMATS = [BlockFormat("nf4", 16), BlockFormat("nf4", 16, double=True), BlockFormat("int8", 16)]
PAPER = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""arXiv:2305.14314, appendix E."""


@pytest.fixture
def values() -> Tensor:
    torch.manual_seed(0)
    found = torch.randn(24, 64)
    found[3, 16:32] = 0
    return found


def by_hand(values: Tensor, format: BlockFormat) -> Tensor:
    """In fp64, value by value: the level nearest to its share of the block's largest magnitude."""
    levels = PAPER if format.kind == "nf4" else [number / 127 for number in range(-127, 128)]
    out = torch.empty_like(values, dtype=torch.float64)
    for row, numbers in enumerate(values.double()):
        blocks = numbers.view(-1, format.block)
        scales = [float(block.abs().max()) for block in blocks]
        if format.double:
            middle = sum(scales) / len(scales)
            span = max(abs(scale - middle) for scale in scales)
            scales = [middle + round((scale - middle) / span * 127) / 127 * span for scale in scales]
        for at, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
            for place, number in enumerate(block):
                share = float(number) / (scale or 1)
                out[row, at * format.block + place] = scale * min(levels, key=lambda level: abs(level - share))
    return out


def test_levels_are_those_of_the_paper() -> None:
    assert nf4_levels() == pytest.approx(PAPER, abs=2e-7)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_each_value_is_the_nearest_level(values: Tensor, format: BlockFormat) -> None:
    torch.testing.assert_close(
        BlockTensor.of(values, format).plain().double(), by_hand(values, format), rtol=1e-5, atol=1e-6
    )


def test_bytes() -> None:
    """A weight of four bits is 0.5625 byte, and with double scales 0.52."""
    values = torch.randn(64, 4096)
    each = {
        (kind, double): held_bytes([BlockTensor.of(values, BlockFormat(kind, 64, double))]) / values.numel()
        for kind, double in itertools.product(("nf4", "int8"), (False, True))
    }
    assert each == {
        ("nf4", False): 0.5625,
        ("nf4", True): pytest.approx(0.5176, abs=1e-4),
        ("int8", False): 1.0625,
        ("int8", True): pytest.approx(1.0176, abs=1e-4),
    }


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_linear_has_the_gradients_of_its_values_and_keeps_codes(values: Tensor, format: BlockFormat) -> None:
    weight = BlockTensor.of(values, format)
    linear = nn.Linear(64, 24)
    plain = nn.Linear(64, 24)
    plain.load_state_dict(linear.state_dict())
    linear.weight = nn.Parameter(weight, requires_grad=False)
    plain.weight = nn.Parameter(weight.plain(), requires_grad=False)
    kept: list[Any] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs = [torch.randn(5, 64, requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        first = linear(inputs[0])
    assert sum(held_bytes([one]) for one in kept) == held_bytes([weight])
    second = plain(inputs[1])
    assert torch.equal(first, second)
    for out in (first, second):
        out.square().sum().backward()
    assert inputs[1].grad is not None
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert linear.bias.grad is not None
    torch.testing.assert_close(linear.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_copied_in_is_encoded_wherever_it_goes(values: Tensor, format: BlockFormat) -> None:
    module = nn.Linear(64, 24, device="meta")
    module.weight = nn.Parameter(BlockTensor.of(module.weight.detach(), format), requires_grad=False)
    module.to_empty(device="cpu")
    weight: Any = module.weight
    assert isinstance(weight, BlockTensor)
    for one in weight.parts:
        one.fill_(float("nan") if one.is_floating_point() else 85)
    with torch.no_grad():
        weight[:8].copy_(values[:8])
        weight[8:].copy_(BlockTensor.of(values[8:], format))
    expected = BlockTensor.of(values, format).plain()
    assert torch.equal(weight.plain(), expected)
    assert torch.equal(torch.cat([one.plain() for one in torch.chunk(weight, 2)]), expected)
    assert torch.equal(weight.float() + 0, expected)
    assert torch.equal(F.linear(torch.eye(64), weight).t(), expected)
    with torch.no_grad():
        weight[:, 0:64].copy_(2 * values)
        weight.mul_(2)
    torch.testing.assert_close(weight.plain(), 4 * expected, rtol=0, atol=0.1 if format.double else 1e-6)


def test_columns_are_parts_in_whole_blocks(values: Tensor) -> None:
    weight = BlockTensor.of(torch.zeros_like(values), FORMATS[0])
    weight[:, 16:48].copy_(values[:, 16:48])
    assert torch.equal(weight.plain()[:, 16:48], BlockTensor.of(values, FORMATS[0]).plain()[:, 16:48])
    assert not weight.plain()[:, 48:].any()


@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[1]], ids=str)
def test_a_part_that_would_lose_what_is_written_is_refused(values: Tensor, format: BlockFormat) -> None:
    weight, columns = BlockTensor.of(values, format), 16 if format.double else 8
    with pytest.raises(ConfigError, match=r"24 × 64 in codes has parts of whole (rows|blocks of 16 values) only"):
        weight[:, :columns].zero_()
    with pytest.raises(ConfigError, match="can't be split into uneven shares of 5: choose another parallel.dp_shard"):
        torch.split(weight, 5)
    with pytest.raises(NotImplementedError, match="_foreach_mul_.* would lose what it writes"):
        torch._foreach_mul_([weight], 2.0)
    with pytest.raises(NotImplementedError, match="would lose what it writes"):
        torch.add(values, values, out=weight)
    with pytest.raises(ValueError, match="rows of 60 values do not consist of blocks of 16"):
        BlockTensor.of(values[:, :60], format)


def test_stacks_have_rows_too(values: Tensor) -> None:
    stack = BlockTensor.of(values.view(2, 12, 64), FORMATS[2])
    assert torch.equal(stack[1].plain(), BlockTensor.of(values[12:], FORMATS[2]).plain())
    assert torch.equal(torch.bmm(torch.ones(2, 1, 12), stack), torch.bmm(torch.ones(2, 1, 12), stack.plain()))


@pytest.mark.parametrize("product", [grouped, looped])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products_of_experts_keep_codes(values: Tensor, format: BlockFormat, product: Product) -> None:
    """One expert has no tokens."""
    stack, sizes = BlockTensor.of(values.view(3, 8, 64), format), torch.tensor([4, 0, 6])
    kept: list[Tensor] = []
    inputs = [torch.randn(10, 64, requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        first = product(inputs[0], stack, sizes)
    weights = [one for one in kept if one.is_floating_point()]
    assert sum(held_bytes([one]) for one in weights) == held_bytes([stack])
    second = product(inputs[1], stack.plain(), sizes)
    assert torch.equal(first, second)
    for out in (first, second):
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_transpose_is_a_view(values: Tensor, format: BlockFormat) -> None:
    weight: Any = BlockTensor.of(torch.zeros_like(values), format)
    weight.t().copy_(values.t())
    expected = BlockTensor.of(values, format).plain()
    assert torch.equal(weight.plain(), expected)
    assert torch.equal(weight.mT.plain(), expected.t())
    assert torch.equal(weight.mT.t()[4:].plain(), expected[4:])
    assert torch.equal(weight.mT[4:], expected.t()[4:])
    weight.mT.mul_(2)
    torch.testing.assert_close(weight.plain(), 2 * expected, rtol=0, atol=0.1 if format.double else 1e-6)
