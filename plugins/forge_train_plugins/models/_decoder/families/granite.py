"""Granite 3: a Llama with four multipliers (arXiv:2203.03466)."""

from __future__ import annotations

from .family import ATTENTION_BIAS, MLP_BIAS, Family, Key

GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    keys={
        **ATTENTION_BIAS,
        **MLP_BIAS,
        "embedding_multiplier": Key(("embedding_multiplier",), float, 1.0, positive=True),
        "residual_multiplier": Key(("residual_multiplier",), float, 1.0, positive=True),
        "attention_multiplier": Key(("scale",), float, 1.0, positive=True),
        "logits_scaling": Key(("logit_divisor",), float, 1.0, positive=True),
    },
)
