"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783), and Mistral (arXiv:2310.06825)."""

from __future__ import annotations

from .family import ATTENTION_BIAS, MLP_BIAS, Family
from .positions import Windows

LLAMA = Family("LlamaForCausalLM", "llama", keys={**ATTENTION_BIAS, **MLP_BIAS})
MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    kv_heads=8,
    windows=Windows(lambda config, layers: (True,) * layers, listed=False),
)
