"""Layers that attend to items: against Llama 3.2 Vision's in Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_train_kit.layers import Layer
from forge_train_plugins.fusions._cross_attention.layers import CrossLayer

NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{one}.weight": f"cross_attn.{one}_proj.weight" for one in "qkvo"},
    **{f"attention.{one}_norm.weight": f"cross_attn.{one}_norm.weight" for one in "qk"},
    "attention_gate.weight": "cross_attn_attn_gate",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"feed_forward.{one}.weight": f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")},
    "feed_forward_gate.weight": "cross_attn_mlp_gate",
}


def test_equals_the_layer_of_transformers_with_its_gradients() -> None:
    mllama: Any = pytest.importorskip("transformers.models.mllama.modeling_mllama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = mllama.MllamaTextConfig(**sizes, num_hidden_layers=2, rms_norm_eps=1e-5, attn_implementation="sdpa")
    theirs = mllama.MllamaCrossAttentionDecoderLayer(config, 1).double()
    ours = CrossLayer(Layer(1, 2, 32, 4, 2, 8, 48, norm_eps=1e-5), 1, 0.0).double()
    torch.manual_seed(0)
    with torch.no_grad():
        of_ours = dict(ours.named_parameters())
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
        for name, other in NAMES.items():
            of_ours.pop(name).copy_(theirs.get_parameter(other))
    assert not of_ours
    hidden, features = torch.randn(2, 7, 32).double(), torch.randn(2, 5, 32).double()
    visible = torch.rand(2, 7, 5) > 0.4
    visible[..., 0] = True  # each token sees something: where it does not, their attention is over everything
    mask = torch.zeros(2, 1, 7, 5).double().masked_fill(~visible[:, None], -torch.inf)
    found = []
    for call in (
        lambda x, items: ours(x, features=items, mask=mask, sees=visible.any(-1)),
        lambda x, items: theirs(x, items, mask, None, torch.ones(2, 1, 7, 1).double()),
    ):
        x, items = hidden.clone().requires_grad_(), features.clone().requires_grad_()
        out = call(x, items)
        out.sin().sum().backward()
        found.append((out, x.grad, items.grad))
    # their norms compute in fp32
    for mine, their in zip(*found, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-5)
    for name, other in NAMES.items():
        torch.testing.assert_close(
            ours.get_parameter(name).grad, theirs.get_parameter(other).grad, rtol=1e-5, atol=1e-5
        )
