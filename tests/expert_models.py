"""Tiny configurations of transformers' models with experts."""

from __future__ import annotations

from typing import Any

QWEN: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
OLMOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.0}
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
