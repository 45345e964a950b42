"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115), and the dense models of Qwen 3 (arXiv:2505.09388)."""

from __future__ import annotations

from .family import ATTENTION_BIAS, Family
from .positions import Windows
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
