"""Random tiny models of transformers, imported: the same logits and the same gradients."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fakes
from crossed import marked
from forge_train import ConfigError
from forge_train_kit.facts import ARCHITECTURES
from forge_train_kit.model import RoPE
from forge_train_plugins.attention.eager import Eager
from forge_train_plugins.models._decoder.build import scaling
from forge_train_plugins.models.decoder import Decoder, Rope
from hf_families import copied, imported, mapped, saved_config, theirs

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama biases in attention": ("Llama", {"attention_bias": True}),
    "llama head_dim": ("Llama", {"head_dim": 16}),
    "llama gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn whole features": ("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 4.0}}),
    "llama yarn attention factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "llama yarn mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "llama keys that change nothing": ("Llama", {"layer_types": ["full_attention"] * 2, "attention_dropout": 0}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 without its window": ("Qwen3", {"head_dim": 8, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3 tied yarn": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": YARN}),
}


def reference_of(case: str) -> Any:
    """A random model of transformers, in eager fp32 attention."""
    family, values = CASES[case]
    return theirs(transformers, family, **SHAPE, **values)


@pytest.mark.unit
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str) -> None:
    reference = reference_of(case)
    found, model = copied(reference)
    parameters = dict(model.named_parameters())
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    logits = model.head(model(tokens))
    assert (logits - expected).abs().max() <= 1e-5

    for output in (expected, logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = mapped(found, {name: p.grad for name, p in reference.named_parameters()})
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


FAMILIES = [
    *("apertus", "cohere", "cwm", "diffllama", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "granite"),
    *("helium", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    *("deepseek_v2", "deepseek_v3", "gpt_oss", "gpt2", "olmoe", "qwen2_moe", "phimoe", "granitemoe"),
]


OWN = [*ARCHITECTURES.of(Decoder)]


@pytest.mark.slow
@pytest.mark.unit
@pytest.mark.parametrize("architecture", marked(OWN, OWN[1::2]))
def test_a_family_in_anothers_clothes_is_the_same_or_refused_by_key(architecture: str) -> None:
    """Configurations of many families that say they are another: transformers' model for that, or a key."""
    made = getattr(transformers, architecture).config_class
    family = architecture.removesuffix("ForCausalLM")
    equal = []
    for kind in FAMILIES:
        config = transformers.AutoConfig.for_model(kind, **SHAPE).to_diff_dict()
        config |= {"architectures": [architecture], "model_type": made.model_type}
        if refused := refusal(config):
            key = re.match(r"config\.json: (\w+)[\w.]* = .* can't be imported", refused)
            assert (key and key[1] in config) or "is missing" in refused, refused
            continue
        values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        tokens = torch.arange(40)[None]
        try:
            reference = theirs(transformers, family, **{**values, "pad_token_id": None})
            expected = reference(tokens).logits
        except (TypeError, RuntimeError):  # there is no such model: heads without a width, or norms of another one
            continue
        _, model = copied(reference, config, Eager)
        assert (model.head(model(tokens)) - expected).abs().max() <= 1e-5, kind
        equal.append(kind)
    other_shape = made.model_type in (
        "gpt2",
        "deepseek_v2",
        "deepseek_v3",
        "mllama_text_model",
    )  # tried in the tests of these families
    assert other_shape or made.model_type in equal


def refusal(config: dict[str, Any]) -> str:
    """Why a `config.json` is not imported; empty if it is."""
    try:
        fakes.make(Decoder).import_hf(config)
    except ConfigError as error:
        return str(error)
    return ""


LONG = {"rope_theta": 5e5, "factor": 3.3, "original_max_position_embeddings": 8192}
ROTATIONS: dict[str, dict[str, Any]] = {
    "10,000": {"rope_type": "default", "rope_theta": 1e4},
    "a million": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.3},
    "llama3": LONG | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": LONG | {"rope_type": "yarn"},
    "yarn, fractions of features": LONG | {"rope_type": "yarn", "truncate": False},
    "yarn, one border": LONG | {"rope_type": "yarn", "beta_fast": 1.0},
}


@pytest.mark.unit
@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations_are_those_of_transformers_to_the_bit(kind: str, head_dim: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    length = 131_072
    shape = {"head_dim": head_dim, "max_position_embeddings": length, "rope_parameters": ROTATIONS[kind]}
    config = transformers.LlamaConfig(**{**SHAPE, **shape})
    near, far = torch.arange(64), torch.arange(100_000, 100_064)
    position_ids = torch.cat([near, far, torch.tensor([length - 1])])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), position_ids[None])

    found = fakes.make(Decoder).import_hf(config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert found is not None
    read = Rope(**found.sections["decoder"]["rope"])
    rope = RoPE(head_dim, length=length, theta=read.theta, scaling=scaling(read))
    half = head_dim // 2
    assert torch.equal(rope.cos[position_ids], cos[0, :, :half])
    assert torch.equal(rope.sin[position_ids], sin[0, :, :half])


@pytest.mark.unit
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_is_exported(case: str) -> None:
    reference = reference_of(case)
    found, plugin, job = imported(saved_config(reference))
    exported = plugin.export_hf(job)
    assert exported.map == found.map

    json.dumps(exported.config)
    config = transformers.AutoConfig.for_model(**exported.config)
    config._attn_implementation = "eager"
    again = getattr(transformers, exported.config["architectures"][0])(config)
    assert type(again) is type(reference)
    missing, unexpected = again.load_state_dict(reference.state_dict(), strict=False)
    assert (missing, unexpected) == ([], [])
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(again(tokens).logits, reference(tokens).logits)
