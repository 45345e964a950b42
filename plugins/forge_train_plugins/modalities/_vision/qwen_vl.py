"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923) in Hugging Face layout: all but the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_train import ConfigError
from forge_train_kit.hf import HFAround, HFModel
from forge_train_kit.state_map import Flatten, Rename, Split, StateMap, Transpose

from . import processor
from .families import ACTIVATIONS as COMMON_ACTIVATIONS
from .families import OPTIONS
from .qwen_families import FAMILIES, Family

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
ACTIVATIONS = {**COMMON_ACTIVATIONS, "silu": "silu"}
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


def read(config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
    """Read a `config.json`; None for another model.

    Args:
        config: of the whole model.
        beside: what the files for its images say.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    family = next((one for one in FAMILIES if one.architecture in (config.get("architectures") or ())), None)
    if family is None:
        return None
    own = {key: value for key, value in config.items() if key not in OUTER}
    text = dict(config.get("text_config") or own)
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    if not (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("mrope_section"):
        raise ConfigError(f"text_config: rope_parameters: expected an mrope_section, as {family.label} has.")
    text = {**TEXT_MISSING, **{key: one for key, one in text.items() if key not in OUTER}}
    vision = dict(config.get("vision_config") or {})
    options = _options(vision, text["hidden_size"], family)
    image = {**options, **processor.read_kept(beside, options)}
    return HFAround(
        config={**text, "model_type": "qwen2", "architectures": [LANGUAGE], "tie_word_embeddings": tied},
        names=TEXT,
        model=HFModel(
            map=tensors(family, options["patch"], options["patch_frames"]),
            sections={"image": image},
            further={"video": {**processor.read_clips(beside, image), **_clips(vision, family)}},
            others=(IN_MEMORY,),
        ),
    )


def _options(vision: Mapping[str, Any], width: int, family: Family) -> dict[str, Any]:
    """The options of `[image]`, without those of reading."""
    given = {**family.missing, **{key: value for key, value in vision.items() if value is not None}}
    given.setdefault("in_channels", given.pop("in_chans", 3))
    rope = given.get("rope_parameters", {})
    neutral = {
        "in_channels": (given["in_channels"], 3),
        family.width: (given[family.width], width),
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
    given.setdefault("intermediate_size", int(given.get("mlp_ratio", 0) * given.get("embed_dim", 0)))
    return {
        **{option: given[key] for key, option in family.sizes.items()},
        **family.fixed,
        "activation": ACTIVATIONS[given["hidden_act"]],
        "connector_hidden": given[family.dim] * given["spatial_merge_size"] ** 2,
        **(_windows(given) if "window_size" in given else {}),
        "placeholder": PLACEHOLDER,
        **{key: OPTIONS["clip_vision_model"][key] for key in ("mean", "deviation")},
    }


def _windows(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of attention in windows."""
    merge, layers = given["spatial_merge_size"], given["depth"]
    blocks = given["window_size"] // merge // given["patch_size"]
    if blocks < 1:
        raise ConfigError(
            f"vision_config: window_size: {given['window_size']} pixels are less than {merge} patches of "
            f"{given['patch_size']}."
        )
    full = tuple(sorted({index for index in given["fullatt_block_indexes"] if index < layers}))
    return {
        "window": blocks * merge if len(full) < layers else 0,
        "full_layers": full if len(full) < layers else (),
    }


def _clips(vision: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The options of `[video]` that no file for clips has."""
    return {
        "encoded_by": "image",
        "placeholder": TOKENS["video_token_id"],
        "positions_per_second": float({**family.missing, **vision}.get("tokens_per_second", 0)),
    }


def tensors(family: Family, patch: int, frames: int) -> StateMap:
    """The map of the vision model's tensors to the parameters of an encoder."""
    name = "visual.patch_embed.proj.weight"
    # [dim, colours, frames, rows, columns] of a convolution: our patches are frames, in reading order, of colours
    moved = Transpose((name,), (1, 2)) >> Transpose((name,), (2, 3)) >> Transpose((name,), (3, 4))
    cut = moved >> Flatten((name,), (frames, patch, patch, 3)) >> Rename({name: f"{INTO}vision.patches.weight"})
    names = {f"visual.merger.ln_q.{kind}": f"{INTO}vision.norm.{kind}" for kind in family.block["norm1"][1]}
    names |= {
        f"visual.merger.mlp.{number}.{kind}": f"{INTO}connector.{ours}.{kind}"
        for number, ours in ((0, "first"), (2, "second"))
        for kind in ("weight", "bias")
    }
    names |= {
        f"visual.blocks.{{i}}.{theirs}.{kind}": f"{INTO}vision.layers.{{i}}.{ours}.{kind}"
        for theirs, (ours, kinds) in family.block.items()
        for kind in kinds
    }
    found: StateMap = cut | Rename(names)
    for kind in ("weight", "bias"):
        parts = tuple(f"{INTO}vision.layers.{{i}}.{one}.{kind}" for one in "qkv")
        found = found | Split(f"visual.blocks.{{i}}.attn.qkv.{kind}", parts)
    return found
