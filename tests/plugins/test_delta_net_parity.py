"""Gated delta-rule layers against transformers' Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fakes
from forge_train_plugins.attention.delta_net import DeltaNet
from forge_train_plugins.models.decoder import Decoder

pytestmark = [pytest.mark.unit]

QWEN: dict[str, dict[str, Any]] = {
    "grouped values": {"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    "a key for each value": {"linear_num_value_heads": 3, "linear_num_key_heads": 3},
    "one key head, two taps": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 1,
        "linear_conv_kernel_dim": 2,
    },
}


def theirs(case: str, layers: int = 2) -> Any:
    """A random Qwen3-Next of linear layers, without experts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * layers,
        mlp_only_layers=list(range(layers)),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        max_position_embeddings=512,
        rms_norm_eps=1e-2,  # a smaller one magnifies what was rounded, where a query meets no key
        **QWEN[case],
    )
    model = fakes.initialised(transformers.Qwen3NextForCausalLM(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.ndim > 1 else 1.0)
    return model


def ours(reference: Any) -> tuple[Any, Callable[[], dict[str, Tensor]]]:
    """Forge's model with the reference's weights, and what it makes of gradients of the reference's."""
    config = reference.config
    heads, k_heads = config.linear_num_value_heads, config.linear_num_key_heads
    delta = fakes.make(
        DeltaNet,
        layers=(),
        heads=heads,
        k_heads=k_heads,
        k_dim=config.linear_key_head_dim,
        v_dim=config.linear_value_head_dim,
        convolution=config.linear_conv_kernel_dim,
        chunk=16,
    )
    decoder = fakes.make(
        Decoder,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=4,
        kv_heads=2,
        hidden=config.intermediate_size,
        vocabulary=config.vocab_size,
        max_sequence=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        unit_offset=True,
    )
    job = fakes.job()
    job.hooks.attention = lambda layer: delta.attention(layer, job)
    model = decoder.build_model(job)
    weights = mapped(dict(reference.named_parameters()), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights
    gradients = lambda: mapped({n: p.grad for n, p in reference.named_parameters()}, config)  # noqa: E731
    return model, gradients


def mapped(given: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Tensors under Forge's names: fused projections lie key head by key head in the reference."""
    outer = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    found = {f"{mine}.weight": given[f"{name}.weight"] for mine, name in outer.items()}
    k_heads, k_dim, v_dim = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    each = config.linear_num_value_heads // k_heads
    for index in range(config.num_hidden_layers):
        layer, own = f"model.layers.{index}", f"layers.{index}"
        delta = f"{layer}.linear_attn"
        found[f"{own}.attention_norm.weight"] = given[f"{layer}.input_layernorm.weight"]
        found[f"{own}.feed_forward_norm.weight"] = given[f"{layer}.post_attention_layernorm.weight"]
        for name in ("gate", "up", "down"):
            found[f"{own}.feed_forward.{name}.weight"] = given[f"{layer}.mlp.{name}_proj.weight"]
        fused = (("qkvz", ("q", "k", "v", "gate"), (k_dim, k_dim, each * v_dim, each * v_dim)),)
        fused += (("ba", ("beta", "alpha"), (each, each)),)  # type: ignore[assignment]
        for name, parts, sizes in fused:
            by_head = given[f"{delta}.in_proj_{name}.weight"].unflatten(0, (k_heads, -1)).split(sizes, 1)
            for part, rows in zip(parts, by_head, strict=True):
                found[f"{own}.attention.{part}.weight"] = rows.flatten(0, 1)
        channels = [k_heads * k_dim] * 2 + [k_heads * each * v_dim]
        for part, rows in zip("qkv", given[f"{delta}.conv1d.weight"].split(channels), strict=True):
            found[f"{own}.attention.{part}_conv.weight"] = rows
        for mine, name in (("decay.A_log", "A_log"), ("decay.dt_bias", "dt_bias")):
            found[f"{own}.attention.{mine}"] = given[f"{delta}.{name}"]
        found[f"{own}.attention.norm.weight"] = given[f"{delta}.norm.weight"]
        found[f"{own}.attention.o.weight"] = given[f"{delta}.out_proj.weight"]
    return found


@pytest.mark.parametrize("length", [1, 16, 150])
@pytest.mark.parametrize("case", QWEN)
def test_logits_and_every_gradient_are_those_of_transformers(case: str, length: int) -> None:
    reference = theirs(case)
    model, gradients = ours(reference)
    tokens = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))
    expected, logits = reference(tokens, use_cache=False).logits, model.head(model(tokens))
    assert (logits - expected).abs().max() <= 1e-5
    for output in (expected, logits):
        F.cross_entropy(output.flatten(0, 1), tokens.roll(-1).flatten()).backward()
    wanted = gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", QWEN)
def test_generation_is_that_of_transformers_token_for_token(case: str) -> None:
    reference = theirs(case).eval()
    model, _ = ours(reference)
    tokens = torch.randint(3, 61, (2, 70), generator=torch.Generator().manual_seed(2))
    expected = reference.generate(tokens, max_new_tokens=64, use_cache=False, do_sample=False, eos_token_id=None)
    cache, new, found = model.new_cache(2, 70 + 64), tokens, [tokens]
    with torch.no_grad():
        for _ in range(64):
            new = model.head(model(new, cache=cache)[:, -1:]).argmax(-1)
            found.append(new)
    assert torch.equal(torch.cat(found, 1), expected)


@pytest.mark.parametrize("case", QWEN)
def test_a_layer_continues_from_its_cache_as_that_of_transformers(case: str) -> None:
    from transformers import DynamicCache

    reference = theirs(case, layers=1).eval()
    model, _ = ours(reference)
    layer, mine = reference.model.layers[0].linear_attn, model.layers["0"].attention
    x = torch.randn(2, 80, 32, generator=torch.Generator().manual_seed(3))
    their_cache, cache, at = DynamicCache(config=reference.config), mine.new_cache(2, 80), 0
    with torch.no_grad():
        for size in (70, 1, 1, 7, 1):
            piece = x[:, at : at + size]
            wanted = layer(piece, cache_params=their_cache)
            assert (mine(piece, cache=cache) - wanted).abs().max() <= 1e-5, at
            at += size
