"""The elementary layers: what they declare, and their precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_train import Init
from forge_train_kit.model import Embedding, LayerNorm, Linear, RMSNorm

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("module", "starts"),
    [
        (Linear(4, 3, std=0.5), {"weight": Init("normal", 0.5)}),
        (Linear(4, 3, bias=True), {"weight": Init("normal", 0.02), "bias": Init("zeros")}),
        (Embedding(5, 4, std=0.1), {"weight": Init("normal", 0.1)}),
        (RMSNorm(4), {"weight": Init("ones")}),
        (LayerNorm(4), {"weight": Init("ones"), "bias": Init("zeros")}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_every_parameter_declares_its_start(module: nn.Module, starts: dict[str, Init]) -> None:
    assert {name: module.initial(name) for name, _ in module.named_parameters()} == starts  # type: ignore[operator]


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_of_narrow_tensors_are_rounded_only_once(norm: type[nn.Module]) -> None:
    module = norm(256)
    x = (100 * torch.randn(8, 256, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = module.double()(x.double())
    found = module.bfloat16()(x)
    assert found.dtype == torch.bfloat16
    # bf16 keeps 8 bits, so one rounding is off by at most 2⁻⁹ of the number's power of two.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
