"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (arXiv:2512.13961), with norms after each block and over all heads' queries and
keys together; and OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from . import experts
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
OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    options={"qk_norm": True, "qk_norm_over": "width"},
    keys=KEYS,
    ignored=("output_router_logits",),
    unused=("hidden",),
    spellings={"num_local_experts": "num_experts"},
    parts=(
        experts.part(
            {
                "num_experts": Key(("experts",), int, 64),
                "num_experts_per_tok": Key(("top_k",), int, 8),
                "intermediate_size": Key(("hidden",), int),
                "norm_topk_prob": Key(("normalise",), bool, False),
            },
            {},
            balance=0.01,
        ),
    ),
    tensors=experts.tensors(),
)
