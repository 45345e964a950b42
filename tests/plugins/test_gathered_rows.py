"""How `fp8.all_gather` sends a row; tests/dist/test_fp8_gather.py has ranks do it."""

from __future__ import annotations

import pytest
import torch

from forge_train_plugins.precision._low_precision import recipes
from forge_train_plugins.precision._low_precision.formats import Scaled, rounded
from forge_train_plugins.precision._low_precision.gather import packed, unpack

pytestmark = pytest.mark.unit


def wide_weight(*shape: int) -> torch.Tensor:
    """Of many magnitudes, rows of nothing and of very little among them."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=draw) * torch.exp(3 * torch.randn(*shape, generator=draw))
    weight = weight.clamp(-6e4, 6e4)  # half precision ends there
    weight[..., 0, :], weight[..., 1, :] = 0.0, weight[..., 1, :] * 2.0**-60
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(300, 257), (4, 64, 48)])
def test_a_row_is_gathered_as_its_values_in_float8_and_a_byte(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = wide_weight(*shape).to(dtype)
    sent, out = packed(weight), torch.empty_like(weight)
    assert sent.dtype is torch.uint8
    assert sent.shape == (*shape[:-1], shape[-1] + 1)
    unpack(sent, out)
    assert torch.equal(out.float(), rounded(weight.float(), recipes.ROWS.scale(weight.float()), recipes.ROWS))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", [recipes.ROWS, recipes.WHOLE])
def test_rounding_what_was_gathered_changes_subnormal_values_alone(form: Scaled, transposed: bool) -> None:
    """By a step at most: other scales move no value's rounding."""
    weight, out = wide_weight(512, 384), torch.empty(512, 384)
    unpack(packed(weight), out)
    gathered_with = recipes.ROWS.scale(weight).expand_as(weight)
    if transposed:
        weight, out, gathered_with = weight.t(), out.t(), gathered_with.t()
    scale = torch.maximum(form.scale(weight), gathered_with)
    once, twice = (rounded(one, form.scale(one), form) for one in (weight, out))
    moved = once != twice
    assert (weight.abs() < scale * 2.0**-6)[moved].all()
    assert ((once - twice).abs() <= scale * 2.0**-9).all()
    assert moved.any() == (form.rows is False or transposed)  # rows are gathered with the very scale of `ROWS`
    assert moved.float().mean() < 0.3


def test_rows_that_are_not_finite_stay_so() -> None:
    weight, out = torch.ones(4, 16), torch.empty(4, 16)
    weight[1, 3], weight[2, 5], weight[3, 7] = torch.nan, torch.inf, -torch.inf
    unpack(packed(weight), out)
    assert out[0].tolist() == [1.0] * 16
    assert not out[1:].isfinite().all(1).any()
