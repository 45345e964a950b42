"""The dense feed-forward block and its activations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fakes
from forge_train_kit.layers import Layer
from forge_train_plugins.feed_forward._swiglu import GATED, PLAIN
from forge_train_plugins.feed_forward.swiglu import SwiGLU

pytestmark = pytest.mark.unit

LAYER = Layer(index=0, num_layers=1, dim=6, heads=1, kv_heads=1, head_dim=6, ffn_dim=10, bias=True, output_std=0.001)


def test_swiglu_is_as_the_paper_writes_it() -> None:
    block = fakes.initialised(fakes.make(SwiGLU).feed_forward(LAYER, None))
    x = torch.randn(2, 3, 6)
    (wg, bg), (wu, bu), (wd, bd) = ((p.weight, p.bias) for p in (block.gate, block.up, block.down))
    expected = ((F.silu(x @ wg.T + bg)) * (x @ wu.T + bu)) @ wd.T + bd
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_every_activation_of_the_section_runs_and_counts_its_weights(activation: str) -> None:
    block = fakes.initialised(fakes.make(SwiGLU, activation=activation).feed_forward(LAYER, None))
    block(torch.randn(2, 3, 6)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert (block.gate is not None) == activation.endswith(("glu", "glu_tanh"))
    assert block.flops_per_token(1) == 6 * sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert block.tensor_plan().keys() == {name for name, _ in block.named_children()}
    assert block.down.initial("weight").std == 0.001


def test_relu2_squares() -> None:
    assert PLAIN["relu2"](torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]
