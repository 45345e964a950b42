"""Rotary positions against complex numbers, and what relative positions promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forge_train.nn import LinearScaling, Llama3Scaling, RoPE, Scaling, YarnScaling

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
