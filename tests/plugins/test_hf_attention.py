"""Windows, sinks and soft caps against transformers' own attention modules, run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fakes
from forge_train.registry.discovery import discover, load
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.kernels import able
from forge_train_kit.layers import AttentionOptions

pytestmark = [pytest.mark.unit]

BATCH, SEQUENCE, DIM = 2, 40, 32
SHAPE = {
    "hidden_size": DIM,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "attention_dropout": 0.0,
    "sliding_window": 7,
}


def kernels(**wanted: bool) -> list[str]:
    """The installed kernels that can, and run here."""
    return able([KernelCapabilities(**wanted)], "cpu")  # type: ignore[arg-type]


def gemma2(implementation: str) -> Any:
    """Soft caps, and a scale of its own; the first layer slides."""
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

    config = Gemma2Config(**SHAPE, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)
    config._attn_implementation = implementation
    return Gemma2Attention(config, layer_idx=0)


def gpt_oss(implementation: str) -> Any:
    """Sinks; the first layer slides."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    config = GptOssConfig(**SHAPE)
    config._attn_implementation = implementation
    return GptOssAttention(config, layer_idx=0)


def mistral(implementation: str) -> Any:
    """A sliding window."""
    from transformers import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralAttention

    config = MistralConfig(**SHAPE)
    config._attn_implementation = implementation
    return MistralAttention(config, layer_idx=0)


CASES = [
    *[(gemma2, name) for name in kernels(windows=True, soft_caps=True)],
    *[(gpt_oss, name) for name in kernels(windows=True, sinks=True)],
    *[(mistral, name) for name in kernels(windows=True)],
]


def test_there_is_a_kernel_for_each() -> None:
    assert {make for make, _ in CASES} == {gemma2, gpt_oss, mistral}
    assert {"eager", "flex", "sdpa", "varlen"} <= {name for _, name in CASES}


@pytest.mark.parametrize(("make", "name"), CASES)
def test_the_module_computes_the_same_with_our_kernel(make: Any, name: str) -> None:
    from transformers import AttentionInterface

    found = next(one for one in discover() if one.name == name)
    kernel = fakes.make(load(found)).attention_kernel(fakes.job())
    asked: dict[str, Any] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
        """transformers' heads come before positions; it hands on what its configuration says."""
        asked.update({"window": given.get("sliding_window"), "scale": given["scaling"]})
        asked.update({"soft_cap": given["softcap"]} if given.get("softcap") else {})
        asked.update({"sinks": given["s_aux"]} if given.get("s_aux") is not None else {})
        return kernel(*(one.transpose(1, 2) for one in (query, key, value)), AttentionOptions(**asked)), None

    AttentionInterface.register("forge_under_test", attend)
    torch.manual_seed(0)
    theirs, ours = make("eager"), make("forge_under_test")
    fakes.initialised(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(BATCH, SEQUENCE, DIM)
    angles = torch.randn(BATCH, SEQUENCE, 4 if make is gpt_oss else 8)
    positions = torch.arange(SEQUENCE)
    distance = positions[:, None] - positions
    mask = torch.zeros(SEQUENCE, SEQUENCE).masked_fill((distance < 0) | (distance >= 7), -torch.inf)
    results = []
    for module in (theirs, ours):
        given = x.clone().requires_grad_()
        out = module(given, position_embeddings=(angles.cos(), angles.sin()), attention_mask=mask[None, None])[0]
        out.square().sum().backward()
        results.append([out, given.grad, *(one.grad for one in module.parameters())])
    for mine, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    assert asked["window"] == 7
    assert {"soft_cap": make is gemma2, "sinks": make is gpt_oss} == {
        one: one in asked for one in ("soft_cap", "sinks")
    }
