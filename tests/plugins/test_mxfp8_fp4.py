"""`mxfp8` and `fp4`: their formats are torchao's, and they say that they are experimental."""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import low_precision as low
from forge_train_plugins.precision._low_precision import recipes
from forge_train_plugins.precision._low_precision.formats import Blocks, rounded
from forge_train_plugins.precision._low_precision.minifloat import E2M1, E4M3, Minifloat, nearest
from forge_train_tools.testing import RunForge

pytestmark = pytest.mark.unit


def values() -> Tensor:
    """Of very different sizes, from row to row and within rows."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(64, 256, generator=draw) * torch.logspace(-6, 4, 64).unsqueeze(1)


def test_the_values_of_four_bits() -> None:
    x = torch.linspace(-7, 7, 2801)
    found = nearest(x, E2M1)
    assert sorted(set(found.abs().tolist())) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nearest(ties, E2M1).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("kind", [E4M3, E2M1], ids=lambda kind: kind.name)
def test_mx_blocks_are_torchaos_bit_for_bit(kind: Minifloat) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

    x, form = values(), Blocks(kind, 32, scales="e8m0")
    theirs = kind.dtype or torch.float4_e2m1fn_x2
    right = MXTensor.to_mx(x, theirs, 32, scaling_mode=ScaleCalculationMode.RCEIL).dequantize(torch.float32)
    assert low.same_bits(rounded(x, form.scale(x), form), right)


def test_nvfp4_is_torchaos() -> None:
    """But for ties that torchao decides the other way, as it multiplies with a rounded reciprocal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x, form = values()[40:], Blocks(E2M1, 16, scales="e4m3")
    scale = per_tensor_amax_to_scale(x.abs().max())
    right = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    found = rounded(x, form.scale(x), form)
    assert torch.isclose(found, right, rtol=1e-6, atol=0).float().mean() > 0.999
    assert abs(low.decibels(x, found) - low.decibels(x, right)) < 0.05


@pytest.mark.parametrize(
    ("recipe", "least"), [(recipes.mx(), 27), (recipes.fp4("nvfp4"), 16), (recipes.fp4("mxfp4"), 15)]
)
def test_signal_to_noise(recipe: Any, least: float) -> None:
    x, weight, gradient = low.operands()
    found = low.passes(low.linear(recipe), x, weight, gradient)
    right = low.passes(low.exact, x, weight, gradient)
    assert min(low.decibels(one, other) for one, other in zip(right, found, strict=True)) >= least


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("mxfp8", {}), ("fp4", {}), ("fp4", {"fp4.format": "mxfp4"})])
def test_trains_and_says_that_it_is_experimental(
    run_forge: RunForge, caplog: pytest.LogCaptureFixture, name: str, settings: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, "forge_train"):
        run = run_forge([name, "moe"], settings)
    assert "experimental" in caplog.text
    note = next(one["note"] for one in json.loads((run.run / "composition.json").read_text()) if one["slot"] == "fp8")
    assert "(experimental: emulated on every device" in note
    assert "8 linear, 2 groups of experts" in note
    assert run.losses == pytest.approx(run_forge(["moe"], steps=3).losses, rel=5e-2)
