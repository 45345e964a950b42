"""Phi 3, 3.5 and 4 (arXiv:2404.14219): fused projections, partly rotated heads, two lists of rotary factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train_kit.state_map import Split

from .family import BLOCK, Family, Key
from .positions import Rotation, Windows

if TYPE_CHECKING:
    from forge_train_kit.state_map import StateMap

    from ...decoder import Decoder

SPLIT = {"attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"}


def _tensors(config: Decoder.Config) -> tuple[StateMap, ...]:
    theirs, ours, kv_heads = "model.layers.{i}", "layers.{i}", config.kv_heads or config.heads
    qkv = tuple(f"{ours}.attention.{one}.{{kind}}" for one in "qkv")
    gated = tuple(f"{ours}.feed_forward.{one}.{{kind}}" for one in ("gate", "up"))
    shares = (config.heads, kv_heads, kv_heads)
    fused = Split(f"{theirs}.self_attn.qkv_proj.{{kind}}", qkv, shares=shares)
    return (fused | Split(f"{theirs}.mlp.gate_up_proj.{{kind}}", gated),)


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    keys={
        "rms_norm_eps": Key(("norm_eps",), float, 1e-5),
        "resid_pdrop": Key(("dropout",), float, 0.0),
        "embd_pdrop": Key(("embedding_dropout",), float, 0.0),
    },
    rotation=Rotation(partial=True, types={"default": "none", "longrope": "longrope", "su": "longrope"}, original=4096),
    windows=Windows(lambda config, layers: (True,) * layers, missing=None, listed=False),
    block={ours: theirs for ours, theirs in BLOCK.items() if ours not in SPLIT},
    tensors=_tensors,
    ignored=("original_max_position_embeddings",),  # except with longrope
)
