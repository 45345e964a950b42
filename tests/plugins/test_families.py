"""Families of dense models: logits, gradients and generated tokens are those of transformers, and they go back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import fakes
from crossed import marked
from forge_train import ConfigError
from forge_train_kit.facts import ARCHITECTURES
from forge_train_kit.model import RoPE, flops_per_token
from forge_train_plugins.attention.eager import Eager
from forge_train_plugins.attention.flex import Flex
from forge_train_plugins.attention.packed import Varlen
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_plugins.models._decoder.families import FAMILIES
from forge_train_plugins.models._decoder.families.family import COMMON
from forge_train_plugins.models.decoder import Decoder, Rope
from hf_families import TOKENS, agree, comes_back, copied, generates_the_same, theirs

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 8}
TWO = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "original_max_position_embeddings": 32}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "mistral": ("Mistral", WINDOW, SDPA),
    "mistral tied, without its window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}, SDPA),
    "qwen2": ("Qwen2", {}, SDPA),
    "qwen2 tied, windows": (
        "Qwen2", {"use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True, **WINDOW}, Varlen,
    ),
    "qwen3 windows": ("Qwen3", {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1, **WINDOW}, SDPA),
    "olmo2": ("Olmo2", {}, SDPA),
    "olmo2 tied, biases": ("Olmo2", {"tie_word_embeddings": True, "attention_bias": True}, SDPA),
    "olmo3": ("Olmo3", WINDOW, SDPA),
    "olmo3 tied, yarn": (
        "Olmo3", {"tie_word_embeddings": True, "rope_parameters": {**TWO, "full_attention": YARN}, **WINDOW}, SDPA,
    ),
    "smollm3": ("SmolLM3", {}, SDPA),
    "smollm3 untied, windows": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "tie_word_embeddings": False, **WINDOW},
        SDPA,
    ),
    "mllama": ("Mllama", {"cross_attention_layers": [], "bos_token_id": 0}, SDPA),
    "granite": ("Granite", {"attention_multiplier": 0.2, **MULTIPLIERS}, SDPA),
    "granite tied, biases": (
        "Granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, **MULTIPLIERS}, SDPA,
    ),
    "gemma": ("Gemma", {"head_dim": 8}, SDPA),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, **WINDOW}, Eager),
    "gemma2 untied, one cap": (
        "Gemma2",
        {"head_dim": 16, "tie_word_embeddings": False, "query_pre_attn_scalar": 16, "final_logit_softcapping": None,
         **WINDOW},
        Flex,
    ),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20, **WINDOW}, SDPA),
    "gemma3 untied, scaled": (
        "Gemma3",
        {"head_dim": 8, "rope_parameters": TWO, "tie_word_embeddings": False, "final_logit_softcapping": 3.0, **WINDOW},
        SDPA,
    ),
}  # fmt: skip
"""Family, configuration, and a kernel that can do what it needs."""


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **{**SHAPE, **values})
    agree(reference, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("case", marked(CASES, [case for case in CASES if " tied" in case or " untied" in case]))
def test_greedy_tokens_are_those_of_transformers_beyond_the_window(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **{**SHAPE, **values})
    generates_the_same(reference, kernel)


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_is_exported(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **{**SHAPE, **values})
    comes_back(transformers, reference, kernel)


@pytest.mark.parametrize("kernel", [SDPA, Varlen, Flex, Eager])
def test_packed_documents_and_windows_agree(kernel: Any) -> None:
    reference = theirs(transformers, "Mistral", **{**SHAPE, **WINDOW})
    _, model = copied(reference, kernel=kernel)
    lengths = (11, 29)
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    packed = model(TOKENS, position_ids=positions, document_ids=ids)
    alone = torch.cat([model(one) for one in TOKENS.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


# -- what is refused, and what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("Mistral", {"sliding_window": -1}, "sliding_window = -1"),
        ("Mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("Qwen2", {"attention_bias": True}, "attention_bias = True"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window .*sliding_attention needs"),
        ("Qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("Gemma2", {"sliding_window": None}, "sliding_window"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ("Gemma3", {"rope_parameters": {"sliding_attention": YARN}}, "rope_parameters .*can't have a scaling"),
        ("Gemma3", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar = -4 .*greater than 0"),
        ("Gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping = 0.0 .*greater than 0"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ("Granite", {"logits_scaling": "8"}, "logits_scaling = '8'"),
        ("Granite", {"logits_scaling": 0.0}, "logits_scaling = 0.0 .*greater than 0"),
        ("Granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0.0 .*greater than 0"),
        ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("Mllama", {}, "cross_attention_layers is missing: .*MllamaForConditionalGeneration"),
        ("Mllama", {"cross_attention_layers": [3]}, r"cross_attention_layers = \[3\]"),
    ],
)
def test_what_a_family_does_not_have_is_named(family: str, values: dict[str, Any], message: str) -> None:
    architecture = f"{family}ForCausalLM"
    table = {"architectures": [architecture], **SHAPE, **values}
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        fakes.make(Decoder).import_hf(table)


def test_files_that_leave_keys_out_have_the_familys_defaults() -> None:
    bare = {key: value for key, value in SHAPE.items() if value is not None and key != "num_key_value_heads"}
    needed: dict[str, dict[str, Any]] = {
        "MllamaForCausalLM": {"cross_attention_layers": []},
        "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
        "DeepseekV3ForCausalLM": {"num_key_value_heads": 4},
    }
    for architecture, family in FAMILIES.items():
        if family.common is not COMMON:
            continue
        given = {**bare, **needed.get(architecture, {})}
        made = transformers.AutoConfig.for_model(family.model_type, **given)
        found = fakes.make(Decoder).import_hf({"architectures": [architecture], **given})
        full = fakes.make(Decoder).import_hf(
            {**json.loads(json.dumps(made.to_dict())), "architectures": [architecture]}
        )
        assert found.sections == full.sections, architecture


def test_the_plugin_declares_the_families_that_it_reads() -> None:
    assert set(ARCHITECTURES.of(Decoder)) == set(FAMILIES)


@pytest.mark.parametrize(
    ("values", "architecture"),
    [
        ({}, "Llama"),
        ({"architecture": "MistralForCausalLM"}, "Mistral"),
        ({"qkv_bias": True}, "Qwen2"),
        ({"qkv_bias": True, "o_bias": True, "bias": True}, "Llama"),
        ({"window": 8}, "Mistral"),
        ({"window": 8, "window_layers": (True, False), "qk_norm": True}, "Qwen3"),
        ({"norm_at": "post", "qk_norm": True, "qk_norm_over": "width"}, "Olmo2"),
        ({"rope": Rope(layers=(True, False))}, "SmolLM3"),
        ({"residual_multiplier": 0.5}, "Granite"),
    ],
)
def test_a_model_is_exported_as_the_first_family_that_can_hold_it(values: dict[str, Any], architecture: str) -> None:
    config = fakes.make(Decoder, **(fakes.TINY | values)).export_hf(fakes.job()).config
    assert config["architectures"] == [f"{architecture}ForCausalLM"]


def test_placeholders_are_rows_of_the_embedding_that_the_head_lacks() -> None:
    model = fakes.decoder(placeholders=3)
    assert (len(model.embedding.weight), len(model.head.weight)) == (64, 61)
    tied = fakes.make(Decoder, **fakes.TINY, placeholders=3, tied=True)
    assert [one.key for one in tied.check_config(fakes.run_config())] == ["decoder.placeholders"]
    with pytest.raises(ConfigError, match=r"decoder\.placeholders is 3 here, but 8 there"):
        fakes.make(Decoder, **fakes.TINY, placeholders=3).export_hf(fakes.job())
    layout = fakes.make(Decoder, **fakes.TINY, placeholders=8).export_hf(fakes.job())
    assert layout.config["architectures"] == ["MllamaForCausalLM"]


# -- options of their own ----------------------------------------------------------------------------------------------


def test_partial_rotary_is_that_of_transformers() -> None:
    from transformers.models.phi3 import modeling_phi3 as phi3

    config = transformers.Phi3Config(**{**SHAPE, "partial_rotary_factor": 0.5})
    query, key = torch.randn(2, 2, 40, 4, 8).unbind()
    cos, sin = phi3.Phi3RotaryEmbedding(config)(query, torch.arange(40)[None])
    expected = phi3.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    model = fakes.decoder(rope=Rope(fraction=0.5))
    rope = model.layers["0"].attention.rope
    assert isinstance(rope, RoPE)
    for ours, reference in zip((rope(query), rope(key)), expected, strict=True):
        torch.testing.assert_close(ours, reference)


def test_operations_count_what_a_window_shows() -> None:
    seen = sum(min(query + 1, 8) for query in range(400)) / 400
    assert flops_per_token(400, weights=10, width=32, window=8) == pytest.approx(60 + 12 * 32 * seen, rel=0.07)
    assert flops_per_token(400, weights=10, width=32, window=400) == flops_per_token(400, weights=10, width=32)
    narrow, wide = (fakes.decoder(window=window, window_layers=(True, False)) for window in (8, 64))
    saved = flops_per_token(64, weights=0, width=32) - flops_per_token(64, weights=0, width=32, window=8)
    assert wide.flops_per_token(64) - narrow.flops_per_token(64) == saved


def test_attention_or_a_head_that_does_not_know_an_option_is_named() -> None:
    job = fakes.job()
    job.hooks.attention = lambda layer: torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"decoder\.window: the attention \(Identity\) does not support it"):
        fakes.make(Decoder, **fakes.TINY, window=8).build_model(job)
    job = fakes.job()
    job.hooks.head = lambda spec: torch.nn.Linear(spec.dim, spec.vocabulary)
    with pytest.raises(ConfigError, match=r"decoder\.logit_divisor: the head of plugin"):
        fakes.make(Decoder, **fakes.TINY, logit_divisor=2.0).build_model(job)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"window_layers": (True, False)}, "decoder.window_layers"),
        ({"window": 8, "window_layers": (False,)}, "decoder.window_layers"),
        ({"window": 8, "window_layers": (True,) * 3}, "decoder.window_layers"),
        ({"qk_norm_over": "width"}, "decoder.qk_norm_over"),
        ({"norm": "layer", "unit_offset": True}, "decoder.unit_offset"),
        ({"rope": Rope(window_theta=100.0)}, "decoder.rope.window_theta"),
        ({"window": 8, "rope": Rope(window_theta=0.5)}, "decoder.rope.window_theta"),
        ({"rope": Rope(fraction=0.4)}, "decoder.rope.fraction"),
        ({"rope": Rope(layers=(False, False))}, "decoder.rope.layers"),
        ({"architecture": "BloomForCausalLM"}, "decoder.architecture"),
    ],
)
def test_options_that_have_no_effect_or_do_not_fit(values: dict[str, Any], key: str) -> None:
    plugin = fakes.make(Decoder, **(fakes.TINY | values))
    assert [problem.key for problem in plugin.check_config(fakes.run_config())] == [key]
