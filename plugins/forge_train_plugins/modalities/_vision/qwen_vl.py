"""Qwen2.5-VL (arXiv:2502.13923) in Hugging Face layout: all but the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_train import ConfigError
from forge_train_kit.hf import HFAround, HFModel
from forge_train_kit.state_map import Flatten, Rename, Split, StateMap, Transpose

from . import processor
from .families import ACTIVATIONS as COMMON_ACTIVATIONS
from .families import OPTIONS as FAMILIES

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
LANGUAGE = "Qwen2ForCausalLM"
TOKENS = {
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Key of the `config.json` → the token that it numbers."""
PLACEHOLDER = "<|image_pad|>"
OUTER = (
    *("vision_config", "text_config", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("image_token_id", "vision_token_id", *TOKENS),
)
"""Keys of the whole model; in published files, those of the language model stand beside them."""
TEXT_MISSING = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
MISSING: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "tokens_per_second": 4,
}
"""Values of keys that a `vision_config` leaves out."""
SIZES = {
    "depth": "layers",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_heads": "heads",
    "patch_size": "patch",
    "spatial_merge_size": "merge",
    "temporal_patch_size": "patch_frames",
}
"""Key of the `vision_config` → option of `[image]`."""
ACTIVATIONS = {**COMMON_ACTIVATIONS, "silu": "silu"}
FIXED: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": 1e-6,
    "gated": True,
    "bias": True,
    "patch_bias": False,
    "class_token": False,
    "first_norm": False,
    "final_norm": True,
    "positions": "rotary",
    "connector": "mlp",
    "fit": "keep",
}
"""Options that all its models share."""
INTO = "fusion.enter.encoders.image."
TEXT = Rename({"model.{name*}": "model.{name*}", "lm_head.{kind}": "lm_head.{kind}"})
IN_MEMORY = Rename(
    {
        "model.language_model.{name*}": "model.{name*}",
        "model.visual.{name*}": "visual.{name*}",
        "lm_head.{kind}": "lm_head.{kind}",
    }
)
"""Names in memory → those of files."""
BLOCK = {
    "norm1": ("attention_norm", ("weight",)),
    "norm2": ("feed_forward_norm", ("weight",)),
    "attn.proj": ("o", ("weight", "bias")),
    "mlp.gate_proj": ("gate", ("weight", "bias")),
    "mlp.up_proj": ("up", ("weight", "bias")),
    "mlp.down_proj": ("down", ("weight", "bias")),
}
"""Module of a block → the same of ours, and its parameters."""


def read(config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
    """Read a `config.json`; None for another model.

    Args:
        config: of the whole model.
        beside: what the files for its images say.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    if ARCHITECTURE not in (config.get("architectures") or ()):
        return None
    own = {key: value for key, value in config.items() if key not in OUTER}
    text = dict(config.get("text_config") or own)
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    if not (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("mrope_section"):
        raise ConfigError("text_config: rope_parameters: expected an mrope_section, as Qwen2.5-VL has.")
    text = {**TEXT_MISSING, **{key: one for key, one in text.items() if key not in OUTER}}
    vision = dict(config.get("vision_config") or {})
    options = _options(vision, text["hidden_size"])
    image = {**options, **processor.read_kept(beside, options)}
    return HFAround(
        config={**text, "model_type": "qwen2", "architectures": [LANGUAGE], "tie_word_embeddings": tied},
        names=TEXT,
        model=HFModel(
            map=tensors(options["patch"], options["patch_frames"]),
            sections={"image": image},
            further={"video": {**processor.read_clips(beside, image), **_clips(vision)}},
            others=(IN_MEMORY,),
        ),
    )


def _options(vision: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The options of `[image]`, without those of reading."""
    given = {**MISSING, **{key: value for key, value in vision.items() if value is not None}}
    given.setdefault("in_channels", given.pop("in_chans", 3))
    rope = given.get("rope_parameters", {})
    neutral = {
        "in_channels": (given["in_channels"], 3),
        "out_hidden_size": (given["out_hidden_size"], width),
        "spatial_patch_size": (given.get("spatial_patch_size", given["patch_size"]), given["patch_size"]),
        "rope_parameters": ((rope.get("rope_type", "axial"), rope.get("rope_theta", 1e4)), ("axial", 1e4)),
    }
    for key, (found, expected) in neutral.items():
        if found != expected:
            raise ConfigError(f"vision_config: {key}: expected {expected!r}, found {found!r}.")
    if given["hidden_act"] not in ACTIVATIONS:
        raise ConfigError(
            f"vision_config: hidden_act: expected one of {', '.join(ACTIVATIONS)}, found {given['hidden_act']!r}."
        )
    merge, layers = given["spatial_merge_size"], given["depth"]
    blocks = given["window_size"] // merge // given["patch_size"]
    if blocks < 1:
        raise ConfigError(
            f"vision_config: window_size: {given['window_size']} pixels are less than {merge} patches of "
            f"{given['patch_size']}."
        )
    full = tuple(sorted({index for index in given["fullatt_block_indexes"] if index < layers}))
    return {
        **{option: given[key] for key, option in SIZES.items()},
        **FIXED,
        "activation": ACTIVATIONS[given["hidden_act"]],
        "connector_hidden": given["hidden_size"] * merge**2,
        "window": blocks * merge if len(full) < layers else 0,
        "full_layers": full if len(full) < layers else (),
        "placeholder": PLACEHOLDER,
        **{key: FAMILIES["clip_vision_model"][key] for key in ("mean", "deviation")},
    }


def _clips(vision: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `[video]` that no file for clips has."""
    return {
        "encoded_by": "image",
        "placeholder": TOKENS["video_token_id"],
        "positions_per_second": float(vision.get("tokens_per_second", MISSING["tokens_per_second"])),
    }


def tensors(patch: int, frames: int) -> StateMap:
    """The map of the vision model's tensors to the parameters of an encoder."""
    name = "visual.patch_embed.proj.weight"
    # [dim, colours, frames, rows, columns] of a convolution: our patches are frames, in reading order, of colours
    moved = Transpose((name,), (1, 2)) >> Transpose((name,), (2, 3)) >> Transpose((name,), (3, 4))
    cut = moved >> Flatten((name,), (frames, patch, patch, 3)) >> Rename({name: f"{INTO}vision.patches.weight"})
    names = {"visual.merger.ln_q.weight": f"{INTO}vision.norm.weight"}
    names |= {
        f"visual.merger.mlp.{number}.{kind}": f"{INTO}connector.{ours}.{kind}"
        for number, ours in ((0, "first"), (2, "second"))
        for kind in ("weight", "bias")
    }
    names |= {
        f"visual.blocks.{{i}}.{theirs}.{kind}": f"{INTO}vision.layers.{{i}}.{ours}.{kind}"
        for theirs, (ours, kinds) in BLOCK.items()
        for kind in kinds
    }
    found: StateMap = cut | Rename(names)
    for kind in ("weight", "bias"):
        parts = tuple(f"{INTO}vision.layers.{{i}}.{one}.{kind}" for one in "qkv")
        found = found | Split(f"visual.blocks.{{i}}.attn.qkv.{kind}", parts)
    return found
