"""The way back to Qwen2.5-VL in Hugging Face layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.items.marks import token_of
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.hf import HFModel

from .modality import Clips
from .qwen_vl import ACTIVATIONS, ARCHITECTURE, FIXED, LANGUAGE, SIZES, TEXT, TOKENS, tensors

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Modality

    from .section import VisionSection


def write(config: VisionSection, modality: Modality, layout: HFModel, job: Job) -> HFModel:
    """The whole model's layout, given its language model's.

    Raises:
        ConfigError: naming what Qwen2.5-VL has no counterpart for.
    """
    (architecture,) = layout.config["architectures"]
    text = {key: value for key, value in layout.config.items() if key not in ("architectures", "head_dim")}
    if architecture != LANGUAGE:
        raise _refused(LANGUAGE, f"found {architecture}")
    if not (text.get("rope_scaling") or {}).get("mrope_section"):
        raise _refused("decoder.rope.sections", "found none")
    if (width := text["hidden_size"]) != layout.config["head_dim"] * text["num_attention_heads"]:
        raise _refused("heads of width dim / heads", f"found decoder.head_dim = {layout.config['head_dim']}")
    if job.hooks.gives("fusion") != "features":
        raise _refused("images among the tokens", f"plugin {job.hooks.provider('fusion')!r} joins them otherwise")
    inner = config.connector_hidden or width
    for key, value in {**FIXED, "connector_hidden": config.dim * config.merge**2}.items():
        if (found := inner if key == "connector_hidden" else getattr(config, key)) != value:
            raise _refused(f"image.{key} = {value!r}", f"found {found!r}")
    back = {option: name for name, option in ACTIVATIONS.items()}
    unit = config.patch * config.merge
    vision = {
        "model_type": "qwen2_5_vl_vision",
        **{key: getattr(config, option) for key, option in SIZES.items()},
        "intermediate_size": config.hidden or 4 * config.dim,
        "hidden_act": back[config.activation],
        "in_channels": 3,
        "out_hidden_size": width,
        "window_size": config.window * config.patch if config.window else unit,
        "fullatt_block_indexes": list(config.full_layers if config.window else range(config.layers)),
    }
    clips = enabled_modalities(job).get("video")
    if isinstance(clips, Clips):
        vision["tokens_per_second"] = _per_second(clips)
    tokens = {"image_token_id": modality.placeholder, **TOKENS}
    tokens |= {} if clips is None else {"video_token_id": clips.placeholder}
    tied, ids = bool(text.get("tie_word_embeddings")), {key: _token(token, job) for key, token in tokens.items()}
    return replace(
        layout,
        map=(TEXT >> layout.map) | tensors(config.patch, config.patch_frames),
        config={
            "architectures": [ARCHITECTURE],
            "model_type": "qwen2_5_vl",
            "text_config": {**text, "model_type": "qwen2_5_vl_text", **_ends(job)},
            "vision_config": vision,
            "tie_word_embeddings": tied,
            **ids,
        },
    )


def _per_second(clips: Clips) -> int:
    """Positions along time for each second of a clip.

    Raises:
        ConfigError: naming what Qwen2.5-VL has no counterpart for.
    """
    if not clips.encoded_by:
        raise _refused("video.encoded_by = 'image'", "found 'video'")
    if clips.config.times or not clips.config.positions_per_second:
        raise _refused("video.positions_per_second, and not video.times", "found others")
    if (found := clips.config.positions_per_second) != int(found):
        raise _refused("a whole number of video.positions_per_second", f"found {found}")
    return int(found)


def _token(text: str, job: Job) -> int:
    tokenizer = hookspecs.tokenizer(job) if job.hooks.provider("tokenizer") else None
    found = None if tokenizer is None else token_of(tokenizer, text)
    if found is None:
        raise _refused(f"a token for {text}", "this run's tokenizer has none")
    return found


def _ends(job: Job) -> dict[str, Any]:
    """The language model's own special tokens."""
    tokenizer = hookspecs.tokenizer(job)
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    return {"bos_token_id": begin, "eos_token_id": tokenizer.end, "pad_token_id": None}


def _refused(wanted: str, found: str) -> ConfigError:
    return ConfigError(f"Qwen2.5-VL in Hugging Face layout needs {wanted}; {found}.")
