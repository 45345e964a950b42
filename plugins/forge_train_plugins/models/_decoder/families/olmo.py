"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (arXiv:2512.13961): norms after each block, and over whole queries and keys."""

from __future__ import annotations

from .family import ATTENTION_BIAS, BLOCK, Family, Key
from .positions import Rotation, Windows

OPTIONS = {"norm_at": "post", "qk_norm": True, "qk_norm_over": "width"}
KEYS = {**ATTENTION_BIAS, "rms_norm_eps": Key(("norm_eps",), float, 1e-5)}
NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}
NAMES = {**{ours: theirs for ours, theirs in BLOCK.items() if not ours.endswith("d_norm")}, **NORMS}
NAMES.pop("attention_norm")

OLMO2 = Family("Olmo2ForCausalLM", "olmo2", options=OPTIONS, keys=KEYS, block=NAMES)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    options=OPTIONS,
    keys=KEYS,
    rotation=Rotation(5e5, window_theta=5e5),
    windows=Windows(lambda config, layers: tuple((index + 1) % 4 != 0 for index in range(layers))),
    block=NAMES,
)
