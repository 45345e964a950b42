"""Tiny random models of transformers that no family of Forge's knows, for the tests of the plugin `hf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_train import Job, Model
from forge_train.compose.compose import compose
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import lone_job

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
SHARED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
"""Experts that are chosen by groups, beside one that all tokens take, in all layers but the first."""
OLD = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "arcee": GROUPED,
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": {**OLD, **DRY, "n_ctx": 64, "rotary_dim": 4, "n_inner": 48},
    "cohere": GROUPED,
    "cohere2": {**GROUPED, "num_hidden_layers": 4, "sliding_window": 4},
    "deepseek_v3": {
        **SHAPE,
        **SHARED,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "exaone4": {**GROUPED, "num_hidden_layers": 4, "sliding_window": 4},
    "falcon": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "glm": {**GROUPED, "head_dim": 8},
    "glm4_moe": {**GROUPED, **SHARED},
    "gpt_bigcode": {**OLD, **DRY, "n_inner": 48},
    "gpt_neox": {**SHAPE},
    "gpt_oss": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "gptj": {**OLD, **DRY, "rotary_dim": 4, "n_inner": 48},
    "helium": {**GROUPED, "head_dim": 8},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "nemotron": {**GROUPED, "head_dim": 8},
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        **{key: one for key, one in SHAPE.items() if key != "intermediate_size"},
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    "persimmon": SHAPE,
    "phi": SHAPE,
    "stablelm": GROUPED,
    "qwen2_moe": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
"""Model type → keys of its `config.json`."""
PLUGINS, WITHOUT = ("hf", "synthetic"), ("tokenizer", "console", "tensorboard")
OWN_ATTENTION = frozenset({"bloom", "codegen", "falcon", "gpt_oss", "gptj", "mamba"})
"""Types whose class has no attention, or computes it itself: gpt_oss because the default kernel has no sinks."""
JOINED = OWN_ATTENTION | {"nemotron", "stablelm"}
"""Types whose class does not hand documents down to attention."""


def sections(kind: str, **more: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What a run of a type on random tokens is configured with, and more sections."""
    found: dict[str, Mapping[str, Any]] = {
        "run": {"device": "cpu", "seed": 3},
        "train": {"steps": 3, "global_batch": 4, "sequence": 12},
        "synthetic": {"vocabulary": VOCABULARY, "documents": 6, "isolate": False},
        "hf": {"type": kind, "set": MODELS.get(kind, {})},
    }
    return found | {name: {**found.get(name, {}), **values} for name, values in more.items()}


def composed(
    path: Path,
    kind: str,
    *,
    plugins: tuple[str, ...] = (),
    changes: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    section: Mapping[str, Any] | None = None,
    **more: Mapping[str, Any],
) -> tuple[Job, Model]:
    """A model in this process: of a type, of a folder, or of a section as it is."""
    laid = sections(kind, **more)
    if folder is not None:
        laid["hf"] = {"weights": str(folder), "set": changes or {}}
    elif section is not None:
        laid["hf"] = section
    elif changes is not None:
        laid["hf"] = {"type": kind, "set": changes}
    request = Request(plugins=(*PLUGINS, *plugins), without=WITHOUT, sections=laid)
    job = lone_job(resolve(request), path, "cpu")
    return job, compose(job).model


def by_hand(model: Model) -> nn.Module:
    """The same class as transformers builds it, with the same weights."""
    from transformers import AutoModelForCausalLM

    (part,) = model.parts
    config = type(part.config).from_dict(part.config.to_dict())
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    own = {name.removeprefix("head."): one for name, one in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(own, strict=False)
    tied = {name for name, _ in theirs.named_parameters(remove_duplicate=False)} - {
        n for n, _ in theirs.named_parameters()
    }
    assert not unexpected
    assert set(missing) <= tied
    return theirs.train()


def gradients(
    theirs: nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and every gradient of the summed cross-entropy by its name."""
    logits = theirs(input_ids=inputs, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return logits.detach(), {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
