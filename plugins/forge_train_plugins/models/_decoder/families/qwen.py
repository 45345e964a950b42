"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115), and Qwen 3, dense and with experts (arXiv:2505.09388)."""

from __future__ import annotations

from . import experts
from .family import ATTENTION_BIAS, Family, Key
from .positions import SCALINGS, Rotation, Windows
from .reader import Reader


def _last(config: Reader, layers: int) -> tuple[bool, ...]:
    first = config.integer("max_window_layers", 28)
    return tuple(index >= first for index in range(layers))


WINDOWS = Windows(_last, switch=True)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    options={"qkv_bias": True},
    kv_heads=32,
    rotation=Rotation(sections=True, types={**SCALINGS, "mrope": "none"}),
    windows=WINDOWS,
    ignored=("max_window_layers",),
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    options={"qk_norm": True},
    keys=ATTENTION_BIAS,
    kv_heads=32,
    head_dim=128,
    windows=WINDOWS,
    ignored=("max_window_layers",),
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    options={"qk_norm": True},
    keys=ATTENTION_BIAS,
    kv_heads=4,
    windows=Windows(lambda config, layers: (True,) * layers, switch=True, listed=False),
    ignored=("max_window_layers", "output_router_logits"),
    spellings={"num_local_experts": "num_experts"},
    parts=(
        experts.part(
            {
                "num_experts": Key(("experts",), int, 128),
                "num_experts_per_tok": Key(("top_k",), int, 8),
                "moe_intermediate_size": Key(("hidden",), int, 768),
                "norm_topk_prob": Key(("normalise",), bool, False),
            },
            {},
            read_more=experts.read_sparse,
            write_more=experts.write_sparse,
        ),
    ),
    tensors=experts.tensors(),
)
