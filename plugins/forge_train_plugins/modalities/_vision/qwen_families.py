"""Differences between the vision models of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BOTH = ("weight", "bias")


@dataclass(frozen=True)
class Family:
    """A vision model, and how it is named."""

    label: str
    architecture: str
    kind: str
    """Its `model_type`."""
    dim: str
    """Key of the `vision_config` for the width of the encoder."""
    width: str
    """The same for that of the language model."""
    missing: Mapping[str, Any]
    """Values of keys that a `vision_config` leaves out."""
    own: Mapping[str, Any]
    """Options that all its models have, and others not."""
    block: Mapping[str, tuple[str, tuple[str, ...]]]
    """Module of a block → the same of ours, and its parameters."""

    @property
    def sizes(self) -> dict[str, str]:
        """Key of the `vision_config` → option of `[image]`."""
        return {
            "depth": "layers",
            self.dim: "dim",
            "intermediate_size": "hidden",
            "num_heads": "heads",
            "patch_size": "patch",
            "spatial_merge_size": "merge",
            "temporal_patch_size": "patch_frames",
        }

    @property
    def fixed(self) -> dict[str, Any]:
        """Options that all its models share."""
        return {
            **self.own,
            "norm_place": "before",
            "norm_eps": 1e-6,
            "bias": True,
            "patch_bias": False,
            "class_token": False,
            "first_norm": False,
            "final_norm": True,
            "positions": "rotary",
            "connector": "mlp",
            "fit": "keep",
        }


_SIZES: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TWO = Family(
    label="Qwen2-VL",
    architecture="Qwen2VLForConditionalGeneration",
    kind="qwen2_vl",
    dim="embed_dim",
    width="hidden_size",
    missing={**_SIZES, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    own={"norm": "layer", "gated": False, "window": 0},
    block={
        "norm1": ("attention_norm", _BOTH),
        "norm2": ("feed_forward_norm", _BOTH),
        "attn.proj": ("o", _BOTH),
        "mlp.fc1": ("up", _BOTH),
        "mlp.fc2": ("down", _BOTH),
    },
)
TWO_FIVE = Family(
    label="Qwen2.5-VL",
    architecture="Qwen2_5_VLForConditionalGeneration",
    kind="qwen2_5_vl",
    dim="hidden_size",
    width="out_hidden_size",
    missing={
        **_SIZES,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "tokens_per_second": 4,
    },
    own={"norm": "rms", "gated": True},
    block={
        "norm1": ("attention_norm", ("weight",)),
        "norm2": ("feed_forward_norm", ("weight",)),
        "attn.proj": ("o", _BOTH),
        "mlp.gate_proj": ("gate", _BOTH),
        "mlp.up_proj": ("up", _BOTH),
        "mlp.down_proj": ("down", _BOTH),
    },
)
FAMILIES = (TWO, TWO_FIVE)
