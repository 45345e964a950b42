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


def reference_of(case: str) -> Any:
    family, values = CASES[case]
    return theirs(transformers, family, **{**SHAPE, **values})


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
