"""Families of models with experts: as test_families.py, and the layouts in which files have experts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import fakes
from crossed import marked
from expert_models import DEEPSEEK, GROUPS, MIXTRAL, OLMOE, QWEN, YARN
from forge_train import ConfigError
from forge_train_plugins.models.decoder import Decoder
from hf_families import TOKENS, agree, copied, generates_the_same, imported, mapped, saved_config, theirs
from test_families import SHAPE, WINDOW

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, one expert a token": ("Mixtral", {**MIXTRAL, "num_experts_per_tok": 1}),
    "mixtral tied, window, gelu": (
        "Mixtral",
        {**MIXTRAL, **WINDOW, "num_experts_per_tok": 3, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "qwen3": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3 tied, sparse step, biases": (
        "Qwen3Moe",
        {**QWEN, "decoder_sparse_step": 2, "tie_word_embeddings": True, "attention_bias": True, "head_dim": 16},
    ),
    "qwen3 dense first, window": (
        "Qwen3Moe",
        {**QWEN, "mlp_only_layers": [0, 1], "num_experts_per_tok": 8, "use_sliding_window": True, **WINDOW},
    ),
}

CASES |= {
    "olmoe": ("Olmoe", OLMOE),
    "olmoe tied, normalised": ("Olmoe", {**OLMOE, "tie_word_embeddings": True, "norm_topk_prob": True}),
    "deepseek v2": ("DeepseekV2", {**DEEPSEEK, "routed_scaling_factor": 3.0}),
    "deepseek v2 groups, yarn, whole queries, tied": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "rope_parameters": YARN,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek v3": ("DeepseekV3", {**DEEPSEEK, **GROUPS}),
    "deepseek v3 yarn, biases, tied, halves": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 1.0},
            "attention_bias": True,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "q_lora_rank": None,
        },
    ),
}


def reference_of(case: str) -> Any:
    family, values = CASES[case]
    reference = theirs(transformers, family, **{**SHAPE, **values})
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(3))
    return reference


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_with_experts_are_those_of_transformers(case: str) -> None:
    agree(reference_of(case))


GENERATING = ("mixtral tied, window, gelu", "qwen3", "olmoe", "deepseek v2", "deepseek v3")
"""One of each family; the logits of all are compared."""


@pytest.mark.parametrize("case", marked(CASES, CASES.keys() - {*GENERATING}))
def test_greedy_tokens_with_experts_are_those_of_transformers(case: str) -> None:
    generates_the_same(reference_of(case))


@pytest.mark.parametrize("case", CASES)
def test_a_description_with_experts_goes_back_and_forth(case: str) -> None:
    reference = reference_of(case)
    table = saved_config(reference)
    table.pop("num_nextn_predict_layers", None)  # of modules that this job does not train
    found, plugin, job = imported(table)
    exported = plugin.export_hf(job)
    assert exported.map == found.map
    assert exported.config["architectures"] == [type(reference).__name__]
    reread = fakes.make(Decoder).import_hf(json.loads(json.dumps(exported.config)))
    assert reread.sections == found.sections


def test_experts_without_a_token_have_the_gradients_of_transformers() -> None:
    reference = reference_of("qwen3")
    found, model = copied(reference)
    for output in (reference(TOKENS[:1, :2]).logits, model.head(model(TOKENS[:1, :2]))):
        output.square().sum().backward()
    gradients = mapped(found, {name: p.grad for name, p in reference.named_parameters()})
    idle = 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)
        idle += sum(not one.any() for one in parameter.grad) if ".experts." in name else 0
    assert idle >= 3 * 4 * 4, "of eight experts, two tokens can choose four"


PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
"""DeepSeek-V3's `config.json`."""


def test_deepseek_v3_as_published_is_understood() -> None:
    sections = fakes.make(Decoder).import_hf(PUBLISHED).sections
    moe, mla, decoder = (sections[name] for name in ("moe", "mla", "decoder"))
    assert (moe["experts"], moe["top_k"], moe["groups"], moe["top_groups"], moe["shared"]) == (256, 8, 8, 4, 1)
    assert (moe["router"], moe["scaling"], moe["dense_first"]) == ("sigmoid", 2.5, 3)
    assert (mla["q_rank"], mla["kv_rank"], mla["mscale"], mla["interleaved"]) == (1536, 512, 1.0, True)
    assert (decoder["head_dim"], decoder["hidden"]) == (128, 18432)
    assert decoder["rope"]["temperature"] == 1.0


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("Mixtral", {**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        (
            "Mixtral",
            {**MIXTRAL, "hidden_act": "gelu_pytorch_tanh"},
            "hidden_act = 'gelu_pytorch_tanh' .*experts support",
        ),
        ("Mixtral", {**MIXTRAL, "num_experts_per_tok": "2"}, "num_experts_per_tok = '2'"),
        ("Qwen3Moe", {**QWEN, "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] .*the layers \[0, 2, 3\]"),
        ("Qwen3Moe", {**QWEN, "mlp_only_layers": 1}, "mlp_only_layers = 1 .*list of layers"),
        ("Qwen3Moe", {**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("Qwen3Moe", {**QWEN, "num_local_experts": 4}, "num_local_experts = 4 .*it contradicts num_experts"),
        ("Qwen3Moe", {**QWEN, "shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8"),
        ("Olmoe", {**OLMOE, "clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("DeepseekV2", {**DEEPSEEK, "norm_topk_prob": True}, "norm_topk_prob = True .*expected False"),
        ("DeepseekV2", {**DEEPSEEK, "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("DeepseekV3", {**DEEPSEEK, "topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("DeepseekV3", {**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("DeepseekV3", {**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("DeepseekV3", {**DEEPSEEK, "n_shared_experts": 0}, "n_shared_experts = 0"),
        ("DeepseekV3", {**DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("DeepseekV3", {**DEEPSEEK, "head_dim": 2}, "head_dim = 2 .*must equal qk_rope_head_dim, which is"),
        ("DeepseekV3", {**DEEPSEEK, "qk_head_norm": True}, "qk_head_norm = True"),
        ("Qwen3Moe", {**QWEN, "quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*dequantise"),
        (
            "Qwen3Moe",
            {**QWEN, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"quantization_config\.weight_block_size = \[128\]",
        ),
        (
            "Qwen3Moe",
            {
                **QWEN,
                "quantization_config": {
                    "quant_method": "fp8",
                    "weight_block_size": [1, 1],
                    "activation_scheme": "static",
                },
            },
            r"quantization_config\.activation_scheme = 'static'",
        ),
    ],
)
def test_what_a_family_with_experts_does_not_have_is_named(family: str, values: dict[str, Any], message: str) -> None:
    table = {"architectures": [f"{family}ForCausalLM"], **SHAPE, **values}
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        fakes.make(Decoder).import_hf(table)


@pytest.mark.parametrize(
    ("case", "values", "message"),
    [
        ("mixtral", {"router": "sigmoid"}, r'Mixtral\w+: moe.router is "sigmoid" here, but "softmax" there'),
        ("mixtral", {"shared": 1}, r"Mixtral\w+: moe.shared is 1 here, but 0 there"),
        ("mixtral", {"bias_speed": 0.1}, r"Mixtral\w+: moe.bias_speed"),
        ("qwen3", {"scaling": 2.0}, r"Qwen3Moe\w+: moe.scaling is 2.0 here, but 1.0 there"),
        ("deepseek v2", {"groups": 4, "top_groups": 2}, r"DeepseekV2\w+: moe.group_best is 2 here, but 1 there"),
        ("deepseek v3", {"bias_speed": 0.0}, r"DeepseekV3\w+: moe.bias_speed"),
        ("deepseek v3", {"dense_first": 0, "every": 2}, r"DeepseekV3\w+: moe.every is 2 here"),
    ],
)
def test_what_a_family_with_experts_can_not_express_is_named(case: str, values: dict[str, Any], message: str) -> None:
    _, plugin, job = imported(saved_config(reference_of(case)))
    job.config.sections["moe"] = replace(job.config.sections["moe"], **values)
    with pytest.raises(ConfigError, match=message):
        plugin.export_hf(job)


def test_experts_are_exported_only_by_a_family_that_has_them() -> None:
    _, plugin, job = imported(saved_config(reference_of("qwen3")))
    plugin.config = replace(plugin.config, architecture="Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match=r"it has no place for layers\.0\.feed_forward\.routed"):
        plugin.export_hf(job)
    plugin.config = replace(plugin.config, architecture="DeepseekV3ForCausalLM")
    with pytest.raises(ConfigError, match="plugin mla is not enabled here"):
        plugin.export_hf(job)
    plugin.config = replace(plugin.config, architecture="")
    assert plugin.export_hf(job).config["architectures"] == ["Qwen3MoeForCausalLM"]
