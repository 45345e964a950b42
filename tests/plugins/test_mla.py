"""Multi-head latent attention against transformers' DeepSeek-V2 and V3, and its two ways to compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fakes
from forge_train import ConfigError
from forge_train_kit.layers import Layer
from forge_train_kit.model import DynamicRoPE, LinearScaling, RoPE
from forge_train_plugins.attention._mla.module import LatentAttention
from forge_train_plugins.attention.mla import MLA
from forge_train_plugins.models.decoder import Decoder, Rope

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.unit

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("DeepseekV3", {}),
    "v3 whole queries": ("DeepseekV3", {"q_lora_rank": None}),
    "v3 halves": ("DeepseekV3", {"rope_interleave": False}),
    "v3 biases": ("DeepseekV3", {"attention_bias": True}),
    "v3 yarn": ("DeepseekV3", {"rope_parameters": YARN}),
    "v3 wide values": ("DeepseekV3", {"v_head_dim": 28}),
    "v2": ("DeepseekV2", {}),
    "v2 whole queries, yarn": ("DeepseekV2", {"q_lora_rank": None, "rope_parameters": YARN}),
}
BLOCK = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def theirs(case: str) -> Any:
    """A random model of transformers, without experts, in eager fp32 attention."""
    family, values = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SHAPE | values))
    config._attn_implementation = "eager"
    return fakes.initialised(getattr(transformers, f"{family}ForCausalLM")(config))


def their_name(name: str, whole_queries: bool) -> str:
    outer = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    module, _, kind = name.rpartition(".")
    if module in outer:
        return f"{outer[module]}.{kind}"
    _, index, inner = module.split(".", 2)
    queries = {"attention.q_b": f"self_attn.{'q' if whole_queries else 'q_b'}_proj"}
    return f"model.layers.{index}.{(BLOCK | queries)[inner]}.{kind}"


def ours(reference: Any) -> tuple[Any, dict[str, str]]:
    """Forge's model with the reference's weights, and the names of these."""
    config = reference.config
    given = config.rope_parameters
    rope = Rope(theta=given["rope_theta"])
    if given["rope_type"] == "yarn":
        rope = Rope(
            theta=given["rope_theta"],
            scaling="yarn",
            factor=given["factor"],
            original_sequence=given["original_max_position_embeddings"],
            temperature=reference.model.rotary_emb.attention_scaling,
        )
    mla = fakes.make(
        MLA,
        q_rank=config.q_lora_rank or 0,
        kv_rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        mscale=given.get("mscale_all_dim", 0.0),
        interleaved=getattr(config, "rope_interleave", True),
    )
    decoder = fakes.make(
        Decoder,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        head_dim=config.qk_nope_head_dim,
        hidden=config.intermediate_size,
        vocabulary=config.vocab_size,
        max_sequence=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        rope=rope,
    )
    job = fakes.job()
    job.hooks.attention = lambda layer: mla.attention(layer, job)
    model = decoder.build_model(job)
    names = {name: their_name(name, config.q_lora_rank is None) for name, _ in model.named_parameters()}
    weights = reference.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[names[name]])
    return model, names


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_are_those_of_transformers(case: str) -> None:
    reference = theirs(case)
    model, names = ours(reference)
    assert set(names.values()) == {name for name, _ in reference.named_parameters()}
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    expected, logits = reference(tokens).logits, model.head(model(tokens))
    assert (logits - expected).abs().max() <= 1e-5
    for output in (expected, logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[names[name]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["v3", "v3 yarn", "v2"])
def test_generation_is_that_of_transformers_token_for_token(case: str) -> None:
    reference = theirs(case).eval()
    model, _ = ours(reference)
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = reference.generate(tokens, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    cache, new, found = model.new_cache(2, 9 + 64), tokens, [tokens]
    with torch.no_grad():
        for _ in range(64):
            new = model.head(model(new, cache=cache)[:, -1:]).argmax(-1)
            found.append(new)
    assert torch.equal(torch.cat(found, 1), expected)


# -- the module -------------------------------------------------------------------------------------------------------

LAYER = Layer(index=0, num_layers=2, dim=32, heads=4, kv_heads=4, head_dim=12, ffn_dim=48, rope=RoPE(12, length=64))


def module(layer: Layer = LAYER, **values: Any) -> LatentAttention:
    plugin = fakes.make(MLA, **({"kv_rank": 16, "rope_dim": 8, "v_dim": 16} | values))
    return plugin.attention(layer, fakes.job())  # type: ignore[no-any-return]


@pytest.mark.parametrize("values", [{}, {"q_rank": 24}, {"v_dim": 28}, {"interleaved": True}], ids=str)
def test_absorbed_projections_compute_what_the_plain_ones_do(values: dict[str, Any]) -> None:
    attention = fakes.initialised(module(**values)).double()
    x = torch.randn(2, 20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cache = attention.new_cache(2, 20)
    with torch.no_grad():
        pieces = [
            attention(x[:, start:end], position_ids=torch.arange(start, end).expand(2, -1), cache=cache)
            for start, end in ((0, 9), (9, 10), (10, 17), (17, 18), (18, 20))
        ]
        torch.testing.assert_close(torch.cat(pieces, 1), attention(x), rtol=1e-9, atol=1e-9)


def test_a_cache_holds_latents_and_shared_rotated_features_only() -> None:
    attention = fakes.initialised(module())
    cache = attention.new_cache(2, 20)
    attention(torch.randn(2, 9, 32), cache=cache)
    held = sum(x.numel() for x in vars(cache).values() if isinstance(x, torch.Tensor))
    assert held == 2 * 20 * (16 + 8)
    with pytest.raises(ValueError, match="does not store document ids"):
        attention(torch.randn(2, 1, 32), document_ids=torch.zeros(2, 1, dtype=torch.int64), cache=cache)


def test_absorbed_projections_see_what_stands_in_the_place_of_a_projection() -> None:
    """An adapter, say."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    attention = fakes.initialised(module())
    attention.kv_b.__class__ = Doubled
    x, cache = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)), attention.new_cache(2, 12)
    with torch.no_grad():
        attention(x[:, :-1], cache=cache)
        last = attention(x[:, -1:], position_ids=torch.full((2, 1), 11), cache=cache)
        torch.testing.assert_close(last, attention(x)[:, -1:], rtol=1e-5, atol=1e-5)


def test_packed_documents_are_as_if_alone() -> None:
    attention = fakes.initialised(module())
    x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat((torch.arange(8), torch.arange(12)))[None]
    document_ids = torch.tensor([[0] * 8 + [1] * 12])
    packed = attention(x, position_ids=position_ids, document_ids=document_ids)
    alone = torch.cat((attention(x[:, :8]), attention(x[:, 8:])), 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_layers_that_share_positions_share_a_table() -> None:
    plugin, job = fakes.make(MLA, kv_rank=16, rope_dim=8), fakes.job()
    other = replace(LAYER, rope=RoPE(12, length=64, theta=5.0, scaling=LinearScaling(2.0)))
    first, second, third = (plugin.attention(layer, job) for layer in (LAYER, LAYER, other))
    assert first.rope is second.rope
    assert (first.rope.head_dim, first.rope.length, first.rope.theta) == (8, 64, 10_000.0)
    assert (third.rope.theta, third.rope.scaling) == (5.0, LinearScaling(2.0))
    assert plugin.attention(replace(LAYER, rope=None), job).rope is None


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        ({"kv_heads": 2}, {}, "set decoder.kv_heads = 4"),
        ({"qk_norm": True}, {}, "set decoder.qk_norm = false"),
        ({"rope": nn.Identity()}, {}, "this model has a Identity"),
        (
            {"rope": DynamicRoPE(LAYER.head_dim, length=64, theta=1e4, original_length=32, factor=2.0)},
            {},
            "of every length",
        ),
        ({"unit_offset": True}, {}, "set decoder.unit_offset = false"),
        ({"rope": RoPE(6, length=64)}, {}, "must not rotate a part of the others"),
        ({}, {"mscale": 1.0}, "mla.mscale needs decoder.rope.scaling = 'yarn'"),
        ({"rope": None}, {"mscale": 1.0}, "mla.mscale needs decoder.rope.scaling = 'yarn'"),
    ],
    ids=str,
)
def test_what_latent_attention_has_not_is_refused(change: dict[str, Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module(replace(LAYER, **change), **values)


def test_an_odd_number_of_rotated_features_is_a_problem() -> None:
    (problem,) = fakes.make(MLA, rope_dim=7).check_config()
    assert problem.key == "mla.rope_dim"


def test_operations_are_those_of_heads_as_wide_as_they_are() -> None:
    weights = 32 * 4 * 20 + 32 * (16 + 8) + 16 * 4 * (12 + 16) + 4 * 16 * 32
    assert module().flops_per_token(100) == 6 * weights + 6 * 100 * 4 * (20 + 16) // 2
