"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118), and the text models of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from typing import Any

from .family import ACTIVATIONS, ATTENTION_BIAS, BLOCK, Family, Key, soft_cap
from .positions import Rotation, Windows
from .reader import Reader


def _every_sixth_not(config: Reader, layers: int) -> tuple[bool, ...]:
    """All layers except each last one of `sliding_window_pattern`."""
    period = config.integer("sliding_window_pattern", 6)
    if period < 1:
        config.refuse("sliding_window_pattern", "expected a number greater than 0")
    return tuple((index + 1) % period != 0 for index in range(layers))


SHARED: dict[str, Any] = {
    "unit_offset": True,
    "embedding_multiplier": lambda decoder: float(decoder["dim"] ** 0.5),
}
OPTIONS: dict[str, Any] = {"norm_at": "both", **SHARED}
FIRST_KEYS = {**ATTENTION_BIAS, "tie_word_embeddings": Key(("tied",), bool, True)}
KEYS = {
    **FIRST_KEYS,
    "query_pre_attn_scalar": Key(
        ("scale",),
        int,
        256,
        ours=lambda features: features**-0.5,
        theirs=lambda scale: round(scale**-2),
        positive=True,
    ),
}
NAMES = {
    **BLOCK,
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}

GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    options=SHARED,
    keys=FIRST_KEYS,
    kv_heads=16,
    head_dim=256,
    act="gelu_pytorch_tanh",
    # the first folders say gelu, and mean its approximation; transformers takes it in any case
    activations={"gelu": "geglu_tanh", **{name: ours for name, ours in ACTIVATIONS.items() if name != "gelu"}},
    ignored=("hidden_activation",),
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    options=OPTIONS,
    keys={
        **KEYS,
        "attn_logit_softcapping": soft_cap("soft_cap", 50.0),
        "final_logit_softcapping": soft_cap("logit_soft_cap", 30.0),
    },
    kv_heads=4,
    head_dim=256,
    activation="hidden_activation",
    act="gelu_pytorch_tanh",
    windows=Windows(lambda config, layers: tuple(index % 2 == 0 for index in range(layers))),
    block=NAMES,
    ignored=("hidden_act",),
)
# transformers 5.23 reads Gemma 3's attn_logit_softcapping but does not apply it in attention. A file that has one is
# refused, because its author may have meant either.
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    options={**OPTIONS, "qk_norm": True},
    keys={**KEYS, "final_logit_softcapping": soft_cap("logit_soft_cap", None)},
    kv_heads=4,
    head_dim=256,
    activation="hidden_activation",
    act="gelu_pytorch_tanh",
    rotation=Rotation(1e6, window_theta=1e4, window_key="rope_local_base_freq"),
    windows=Windows(_every_sixth_not),
    block=NAMES,
    ignored=("hidden_act", "sliding_window_pattern", "_sliding_window_pattern"),
)
