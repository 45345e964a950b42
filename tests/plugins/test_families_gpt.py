"""Phi-3, GPT-2 and GPT-OSS: logits, gradients and generated tokens are those of transformers, and they go back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fakes
from forge_train import ConfigError
from forge_train_plugins.attention.eager import Eager
from forge_train_plugins.attention.flex import Flex
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_plugins.models.decoder import Decoder
from hf_families import copied, imported, mapped, saved_config, theirs

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    **NONE,
}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OLD: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96, **DRY, **NONE}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 4.0, 9.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e3}
OSS = {
    **SHAPE,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "truncate": False, "rope_theta": 1e3,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gpt2": ("GPT2", OLD, SDPA),
    "gpt2 untied, relu": (
        "GPT2", {**OLD, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"}, Eager,
    ),
    "phi3": ("Phi3", SHAPE, SDPA),
    "phi3 tied, window, partial": (
        "Phi3", {**SHAPE, "tie_word_embeddings": True, "sliding_window": 8, "partial_rotary_factor": 0.5}, SDPA,
    ),
    "phi3 longrope": (
        "Phi3", {**SHAPE, "original_max_position_embeddings": 32, "rope_parameters": LONG}, Flex,
    ),
    "llama dynamic": ("Llama", {**SHAPE, "max_position_embeddings": 32, "rope_parameters": DYNAMIC}, SDPA),
    "llama longrope": (
        "Llama",
        {**SHAPE, "rope_parameters": {**LONG, "original_max_position_embeddings": 32, "factor": 2.0, "rope_theta": 99.0}},
        SDPA,
    ),
    "gpt-oss": ("GptOss", OSS, Eager),
    "gpt-oss without biases, default positions": (
        "GptOss",
        {**OSS, "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
         "tie_word_embeddings": True, "swiglu_alpha": 1.2, "swiglu_limit": 0.3, "num_experts_per_tok": 3,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        Flex,
    ),
}  # fmt: skip
"""Family, configuration, and a kernel that can do what it needs."""
TOKENS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.accept("families", 1)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_of_fused_layouts_are_those_of_transformers(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **values)
    found, model = copied(reference, kernel=kernel)
    expected, logits = reference(TOKENS).logits, model.head(model(TOKENS))
    assert (logits - expected).abs().max() <= 1e-5
    short = TOKENS[:, :20]
    assert (model.head(model(short)) - reference(short).logits).abs().max() <= 1e-5
    for output in (expected, logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = mapped(found, {name: p.grad for name, p in reference.named_parameters()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.accept("families", 1)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_of_fused_layouts_are_those_of_transformers(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **values)
    _, model = copied(reference, kernel=kernel)
    prompt = TOKENS[:1, :12]
    # but for Phi-3, transformers' cache keeps keys that were rotated for a shorter sequence
    asked = {"do_sample": False, "max_new_tokens": 64, "min_new_tokens": 64, "use_cache": family != "Llama"}
    expected = reference.generate(prompt, **asked)
    assert torch.equal(generated(model, prompt, 64, cached="dynamic" not in case), expected)


@torch.no_grad()
def generated(model: Any, ids: Tensor, count: int, *, cached: bool = True) -> Tensor:
    cache, new = model.new_cache(1, ids.shape[1] + count) if cached else None, ids
    for _ in range(count):
        new = model.head(model(new if cached else ids, cache=cache)[:, -1:]).argmax(-1)
        ids = torch.cat([ids, new], 1)
    return ids


@pytest.mark.accept("families", 1)
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_fused_layouts_that_are_exported(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **values)
    found, plugin, job = imported(saved_config(reference), kernel)
    exported = plugin.export_hf(job)
    assert exported.map == found.map
    config = transformers.AutoConfig.for_model(**{**exported.config, "pad_token_id": None})
    config._attn_implementation = "eager"
    again = getattr(transformers, exported.config["architectures"][0])(config).eval()
    assert type(again) is type(reference)
    missing, unexpected = again.load_state_dict(reference.state_dict(), strict=False)
    assert (missing, unexpected) == ([], [])
    torch.testing.assert_close(again(TOKENS).logits, reference(TOKENS).logits)
    reread = fakes.make(Decoder).import_hf(json.loads(json.dumps(exported.config)))
    assert reread.sections == found.sections
