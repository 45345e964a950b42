"""Mixtral (arXiv:2401.04088): a Mistral whose feed-forward blocks are experts, in every layer."""

from __future__ import annotations

from . import experts
from .family import Family, Key
from .positions import Rotation, Windows

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    keys={"rms_norm_eps": Key(("norm_eps",), float, 1e-5)},
    kv_heads=8,
    rotation=Rotation(1e6),
    windows=Windows(lambda config, layers: (True,) * layers, missing=None, listed=False),
    ignored=("output_router_logits",),
    unused=("hidden",),
    parts=(
        experts.part(
            {
                "num_local_experts": Key(("experts",), int, 8),
                "num_experts_per_tok": Key(("top_k",), int, 2),
                "intermediate_size": Key(("hidden",), int),
            },
            {"normalise": True},
        ),
    ),
    tensors=experts.tensors(block="block_sparse_moe", names=("w1", "w3", "w2")),
)
