"""Phi-3, GPT-2 and GPT-OSS: logits, gradients and generated tokens are those of transformers, and they go back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fakes
from crossed import marked
from forge_train import ConfigError
from forge_train_kit.hf import HFModel
from forge_train_kit.optim import decays, hidden_matrices
from forge_train_kit.state_map import Rename, Split
from forge_train_plugins.attention.eager import Eager
from forge_train_plugins.attention.flex import Flex
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.models.decoder import Decoder, Rope
from hf_families import TOKENS, agree, comes_back, copied, generates_the_same, mapped, theirs

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
SCALED: dict[str, Any] = {"scaling": "longrope", "original_sequence": 16}
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
        {**SHAPE,
         "rope_parameters": {**LONG, "original_max_position_embeddings": 32, "factor": 2.0, "rope_theta": 99.0}},
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


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_of_fused_layouts_are_those_of_transformers(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **values)
    model, short = agree(reference, kernel), TOKENS[:, :20]
    assert (model.head(model(short)) - reference(short).logits).abs().max() <= 1e-5


GENERATING = ("gpt2", "phi3 tied, window, partial", "llama dynamic", "phi3 longrope", "gpt-oss")
"""The logits of all are compared."""


@pytest.mark.parametrize("case", marked(CASES, CASES.keys() - {*GENERATING}))
def test_greedy_tokens_of_fused_layouts_are_those_of_transformers(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **values)
    # but for Phi-3, transformers' cache keeps keys that were rotated for a shorter sequence
    generates_the_same(reference, kernel, cached="dynamic" not in case, use_cache=family != "Llama")


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_fused_layouts_that_are_exported(case: str) -> None:
    family, values, kernel = CASES[case]
    reference = theirs(transformers, family, **values)
    comes_back(transformers, reference, kernel)


def test_parallel_blocks_are_those_of_gpt_neox() -> None:
    values = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    reference = theirs(transformers, "GPTNeoX", **values, hidden_act="gelu")
    model = fakes.decoder(
        activation="gelu",
        layers=4,
        kv_heads=4,
        max_sequence=96,
        norm="layer",
        norm_eps=1e-5,
        parallel=True,
        **dict.fromkeys(("bias", "qkv_bias", "o_bias"), True),
        rope=Rope(fraction=0.25),
    )
    block = {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention.o": "attention.dense",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    outer = {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "lm_head"}
    inside = {f"layers.{{i}}.{ours}": f"gpt_neox.layers.{{i}}.{name}" for ours, name in block.items()}
    names = {f"{name}.{{kind}}": f"{ours}.{{kind}}" for ours, name in (outer | inside).items()}
    fused = "gpt_neox.layers.{i}.attention.query_key_value.{kind}"
    heads = Split(fused, tuple(f"layers.{{i}}.attention.{one}.{{kind}}" for one in "qkv"), groups=4)
    weights = mapped(HFModel(Rename(names) | heads), dict(reference.named_parameters()))
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    assert (model.head(model(TOKENS)) - reference(TOKENS).logits).abs().max() <= 1e-5


# -- what is refused, and what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("GPT2LMHeadModel", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True"),
        ("GPT2LMHeadModel", {"activation_function": "silu"}, "activation_function = 'silu' .*expected one of gelu"),
        ("GPT2LMHeadModel", {"rope_theta": 1e4}, "rope_theta = 10000.0"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"rope_scaling\.type = 'yarn'"),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONG, "long_factor": "1"}}, r"rope_scaling\.long_factor .*a list"),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONG, "short_mscale": 2.0}}, r"rope_scaling\.short_mscale"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONG, "original_max_position_embeddings": 0},
            "original_max_position_embeddings = 0 .*greater than 0",
        ),
        ("GptOssForCausalLM", {"swiglu_limit": 0.0}, "swiglu_limit = 0.0 .*greater than 0"),
        ("GptOssForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq"),
        ("GptOssForCausalLM", {"experts_per_token": 1, "num_experts_per_tok": 2}, "experts_per_token = 1 .*it con"),
    ],
)
def test_what_these_families_do_not_have_is_named(architecture: str, values: dict[str, Any], message: str) -> None:
    shape = {} if architecture.startswith("GPT2") else SHAPE
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        fakes.make(Decoder).import_hf({"architectures": [architecture], **shape, **values})


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("GPT2LMHeadModel", "gpt2"), ("Phi3ForCausalLM", "phi3"), ("GptOssForCausalLM", "gpt_oss")],
)
def test_bare_files_of_these_families_have_the_defaults_of_transformers(architecture: str, model_type: str) -> None:
    shape = {key: value for key, value in SHAPE.items() if value is not None}
    bare = {} if model_type == "gpt2" else shape
    made = json.loads(json.dumps(transformers.AutoConfig.for_model(model_type, **bare).to_dict()))
    found = fakes.make(Decoder).import_hf({"architectures": [architecture], **bare})
    full = fakes.make(Decoder).import_hf({**made, "architectures": [architecture]})
    assert found.sections == full.sections


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"positions": "learned", "rope": Rope(theta=7.0)}, "decoder.rope"),
        ({"rope": Rope(short=(1.0,) * 4)}, "decoder.rope.short"),
        ({"rope": Rope(scaling="dynamic", factor=2.0)}, "decoder.rope.original_sequence"),
        ({"rope": Rope(**SCALED, short=(1.0,) * 4, long=(1.0,) * 3)}, "decoder.rope.long"),
        ({"rope": Rope(**SCALED, short=(1.0,) * 4, long=(1.0, 2.0, 0.0, 1.0))}, "decoder.rope.long"),
        ({"head_dim": 2, "rope": Rope(scaling="dynamic", original_sequence=8)}, "decoder.rope.scaling"),
    ],
)
def test_options_of_positions_that_do_not_fit(values: dict[str, Any], key: str) -> None:
    plugin = fakes.make(Decoder, **(fakes.TINY | values))
    assert [problem.key for problem in plugin.check_config(fakes.run_config())] == [key]


@pytest.mark.parametrize(
    ("values", "run", "key"),
    [
        ({"limit": 5.0}, {}, "moe.limit"),
        ({"alpha": 1.0}, {}, "moe.alpha"),
        ({"bias": True}, {"etp": 2}, "parallel.etp"),
    ],
)
def test_options_of_experts_that_do_not_fit(values: dict[str, Any], run: dict[str, int], key: str) -> None:
    parallel = SimpleNamespace(**{"ep": 1, "etp": 1, "tp": 1, "cp": 1, **run})
    train = SimpleNamespace(micro_batch=1, global_batch=1, sequence=16, init_from="", init_map="")
    config = SimpleNamespace(parallel=parallel, train=train)
    assert [problem.key for problem in fakes.make(MoE, **values).check_config(config)] == [key]


def test_attention_without_sinks_is_named() -> None:
    job = fakes.job()
    job.hooks.attention = lambda layer: torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"decoder\.sinks: the attention \(Identity\) does not support it"):
        fakes.make(Decoder, **fakes.TINY, sinks=True).build_model(job)


def test_biases_of_experts_are_no_matrices() -> None:
    _, model = copied(theirs(transformers, "GptOss", **OSS))
    found = fakes.part_model(model)
    matrices = {name.rpartition(".")[2] for name in hidden_matrices(found) if ".experts." in name}
    assert matrices == {"gate", "up", "down"}
    biases = [(name, one) for name, one in model.named_parameters() if name.endswith("_bias") and one.ndim > 1]
    assert len(biases) == 3 * SHAPE["num_hidden_layers"]
    assert not any(decays(found, name, one, embeddings=False) for name, one in biases)


def test_a_cache_begins_anew_where_the_long_factors_begin() -> None:
    _, model = copied(theirs(transformers, "Phi3", **CASES["phi3 longrope"][1]))
    whole, cache = model(TOKENS[:, :36]), model.new_cache(2, 40)
    for start, stop in ((0, 30), (30, 32), (32, 33), (33, 36)):
        given = model(TOKENS[:, start:stop], cache=cache)
    assert given.shape[1] == 3
    torch.testing.assert_close(given, whole[:, 33:], rtol=1e-4, atol=1e-5)
