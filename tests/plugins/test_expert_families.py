"""Families of models with experts: as test_families.py, and the layouts in which files have experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fakes
from forge_train import ConfigError
from forge_train_plugins.models.decoder import Decoder
from hf_families import copied, imported, mapped, saved_config, theirs
from test_families import SHAPE, TOKENS, WINDOW, generated

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

QWEN: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
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

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "aux_loss_alpha": 0.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES |= {
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


@pytest.mark.accept("families", 1)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_with_experts_are_those_of_transformers(case: str) -> None:
    reference = reference_of(case)
    found, model = copied(reference)
    expected, logits = reference(TOKENS).logits, model.head(model(TOKENS))
    assert (logits - expected).abs().max() <= 1e-5
    for output in (expected, logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    buffers = [one for one in reference.named_buffers() if one[0] in reference.state_dict()]
    gradients = mapped(found, {name: p.grad for name, p in reference.named_parameters()} | dict(buffers))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.accept("families", 1)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_with_experts_are_those_of_transformers(case: str) -> None:
    reference = reference_of(case)
    _, model = copied(reference)
    prompt = TOKENS[:1, :12]
    expected = reference.generate(prompt, do_sample=False, max_new_tokens=64, min_new_tokens=64)
    assert torch.equal(generated(model, prompt, 64), expected)


@pytest.mark.accept("families", 1)
@pytest.mark.parametrize("case", CASES)
def test_a_description_with_experts_goes_back_and_forth(case: str) -> None:
    reference = reference_of(case)
    found, plugin, job = imported(saved_config(reference))
    exported = plugin.export_hf(job)
    assert exported.map == found.map
    assert exported.config["architectures"] == [type(reference).__name__]
    reread = fakes.make(Decoder).import_hf(json.loads(json.dumps(exported.config)))
    assert reread.sections == found.sections
