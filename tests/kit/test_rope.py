"""Rotary positions against complex numbers, and what relative positions promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forge_train_kit.model import (
    DynamicRoPE,
    LengthRoPE,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    RoPE,
    Scaling,
    YarnScaling,
)

pytestmark = pytest.mark.unit


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rotates_pairs_as_complex_numbers() -> None:
    x = random(2, 5, 3, 8)
    angles = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(4.0) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(()), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(RoPE(8, length=5, theta=100.0)(x), expected)


def test_products_depend_on_the_distance_only() -> None:
    rope, q, k = RoPE(8, length=64), random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def product(m: int, n: int) -> Tensor:
        return (rope(q, torch.tensor([[m]])) * rope(k, torch.tensor([[n]]))).sum()

    torch.testing.assert_close(product(7, 2), product(61, 56))


def test_default_positions_count_from_zero() -> None:
    rope, x = RoPE(8, length=16), random(2, 6, 1, 8)
    torch.testing.assert_close(rope(x), rope(x, torch.arange(6).expand(2, -1)))


def test_tables_are_rebuilt_in_fp32_after_the_meta_device() -> None:
    with torch.device("meta"):
        rope = RoPE(8, length=16, scaling=LinearScaling(2.0))
    rope.to_empty(device="cpu").bfloat16()
    rope.reset_buffers()
    expected = RoPE(8, length=16, scaling=LinearScaling(2.0))
    assert rope.cos.dtype == torch.float32
    assert torch.equal(rope.cos, expected.cos)
    assert torch.equal(rope.sin, expected.sin)
    assert rope.state_dict() == {}


def test_keeps_the_dtype() -> None:
    assert RoPE(8, length=4)(random(1, 4, 1, 8).bfloat16()).dtype == torch.bfloat16


def test_says_where_it_ends() -> None:
    with pytest.raises(ValueError, match="made for 4 positions; the sequence has 5"):
        RoPE(8, length=4)(random(1, 5, 1, 8))


@pytest.mark.parametrize(
    "scaling", [LinearScaling(1.0), Llama3Scaling(1.0, 32), YarnScaling(1.0, 32)], ids=lambda s: type(s).__name__
)
def test_a_stretch_of_one_changes_nothing(scaling: Scaling) -> None:
    plain, scaled = RoPE(16, length=8), RoPE(16, length=8, scaling=scaling)
    torch.testing.assert_close(scaled.cos, plain.cos)


@pytest.mark.parametrize("scaling", [Llama3Scaling(8.0, 8192), YarnScaling(8.0, 8192)], ids=lambda s: type(s).__name__)
def test_fast_rotations_are_kept_and_slow_ones_stretched(scaling: Scaling) -> None:
    frequencies = 500_000.0 ** -(torch.arange(0, 128, 2) / 128)
    ratio = frequencies / scaling.frequencies(frequencies, 500_000.0)
    assert ratio[0].item() == pytest.approx(1)
    assert ratio[-1].item() == pytest.approx(8)
    assert (ratio.diff() >= -1e-5).all()


def test_yarn_sharpens_attention() -> None:
    assert YarnScaling(4.0, 32).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert YarnScaling(4.0, 32, temperature=1.3).attention_factor == 1.3
    assert RoPE(8, length=2, scaling=YarnScaling(4.0, 32, temperature=1.3)).cos[0, 0].item() == pytest.approx(1.3)


# -- rotations that go by a sequence's length --------------------------------------------------------------------------


def long_rope() -> LengthRoPE:
    factors = {"short": [1.0, 1.0, 1.0, 1.0], "long": [1.0, 2.0, 4.0, 8.0]}
    return LongRoPE(8, length=64, theta=100.0, original_length=16, attention_factor=1.0, **factors)


def dynamic_rope() -> LengthRoPE:
    return DynamicRoPE(8, length=64, theta=100.0, original_length=16, factor=4.0)


@pytest.mark.parametrize("make", [long_rope, dynamic_rope])
def test_within_the_original_context_nothing_is_stretched(make: Callable[[], LengthRoPE]) -> None:
    x = random(2, 16, 3, 8)
    torch.testing.assert_close(make()(x), RoPE(8, length=16, theta=100.0)(x))
    longer = random(2, 17, 3, 8)
    assert not torch.allclose(make()(longer)[:, :16], RoPE(8, length=16, theta=100.0)(longer[:, :16]), atol=1e-2)


@pytest.mark.parametrize("make", [long_rope, dynamic_rope])
def test_each_row_goes_by_its_own_length(make: Callable[[], LengthRoPE]) -> None:
    rope, x = make(), random(2, 20, 3, 8)
    positions = torch.stack([torch.arange(20), torch.arange(20) % 10])
    together = rope(x, positions)
    assert torch.equal(together[1], rope(x[1:], positions[1:])[0])
    assert torch.equal(together[0], rope(x[:1])[0])


@pytest.mark.parametrize("make", [long_rope, dynamic_rope])
def test_what_length_needs_is_rebuilt_in_fp32_after_the_meta_device(make: Callable[[], LengthRoPE]) -> None:
    with torch.device("meta"):
        rope = make()
    rope.to_empty(device="cpu").bfloat16()
    rope.reset_buffers()  # type: ignore[operator]
    assert rope.table.dtype == torch.float32
    assert torch.equal(rope.table, make().table)
    assert rope.state_dict() == {}
    assert rope(random(1, 4, 1, 8).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="made for 64 positions; the sequence has 65"):
        rope(random(1, 65, 1, 8))


def test_the_attention_factor_of_longrope_follows_from_the_stretch() -> None:
    rope = LongRoPE(8, length=64, theta=100.0, original_length=16, short=[1.0] * 4, long=[1.0] * 4)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
