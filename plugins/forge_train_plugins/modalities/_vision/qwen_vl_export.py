"""The way back to Qwen2-VL and Qwen2.5-VL in Hugging Face layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.items.marks import token_of
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.hf import HFModel

from .modality import Clips
from .qwen_families import TWO, TWO_FIVE, Family
from .qwen_vl import ACTIVATIONS, LANGUAGE, TEXT, TOKENS, tensors

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Modality

    from .section import VisionSection


def write(config: VisionSection, modality: Modality, layout: HFModel, job: Job) -> HFModel:
    """The whole model's layout, given its language model's.

    Raises:
        ConfigError: naming what these models have no counterpart for.
    """
    family = TWO if config.norm == "layer" else TWO_FIVE
    (architecture,) = layout.config["architectures"]
    text = {key: value for key, value in layout.config.items() if key not in ("architectures", "head_dim")}
    if architecture != LANGUAGE:
        raise _refused(family, LANGUAGE, f"found {architecture}")
    if not (text.get("rope_scaling") or {}).get("mrope_section"):
        raise _refused(family, "decoder.rope.sections", "found none")
    if (width := text["hidden_size"]) != layout.config["head_dim"] * text["num_attention_heads"]:
        raise _refused(family, "heads of width dim / heads", f"found decoder.head_dim = {layout.config['head_dim']}")
    if job.hooks.gives("fusion") != "features":
        raise _refused(
            family, "images among the tokens", f"plugin {job.hooks.provider('fusion')!r} joins them otherwise"
        )
    inner = config.connector_hidden or width
    for key, value in {**family.fixed, "connector_hidden": config.dim * config.merge**2}.items():
        if (found := inner if key == "connector_hidden" else getattr(config, key)) != value:
            raise _refused(family, f"image.{key} = {value!r}", f"found {found!r}")
    back = {option: name for name, option in ACTIVATIONS.items()}
    hidden = config.hidden or 4 * config.dim
    vision = {
        "model_type": f"{family.kind}_vision",
        **{key: getattr(config, option) for key, option in family.sizes.items()},
        "hidden_act": back[config.activation],
        "in_channels": 3,
        family.width: width,
    }
    if family is TWO:
        del vision["intermediate_size"]
        if hidden % config.dim:
            raise _refused(family, "image.hidden, a multiple of dim", f"found {hidden}")
        vision["mlp_ratio"] = hidden // config.dim
    else:
        vision["intermediate_size"] = hidden
        vision["window_size"] = (config.window or config.merge) * config.patch
        vision["fullatt_block_indexes"] = list(config.full_layers if config.window else range(config.layers))
    clips = enabled_modalities(job).get("video")
    if isinstance(clips, Clips):
        vision |= _of_clips(clips, family)
    tokens = {"image_token_id": modality.placeholder, **TOKENS}
    tokens |= {} if clips is None else {"video_token_id": clips.placeholder}
    tied, ids = (
        bool(text.get("tie_word_embeddings")),
        {key: _token(token, job, family) for key, token in tokens.items()},
    )
    return replace(
        layout,
        map=(TEXT >> layout.map) | tensors(family, config.patch, config.patch_frames),
        config={
            "architectures": [family.architecture],
            "model_type": family.kind,
            "text_config": {**text, "model_type": f"{family.kind}_text", **_ends(job)},
            "vision_config": vision,
            "tie_word_embeddings": tied,
            **ids,
        },
    )


def _of_clips(clips: Clips, family: Family) -> dict[str, int]:
    """The entry of the `vision_config` for clips.

    Raises:
        ConfigError: naming what these models have no counterpart for.
    """
    found = clips.config.positions_per_second
    if not clips.encoded_by:
        raise _refused(family, "video.encoded_by = 'image'", "found 'video'")
    if clips.config.times:
        raise _refused(family, "clips without video.times", "found true")
    if "tokens_per_second" not in family.missing:
        if found:
            raise _refused(family, "video.positions_per_second = 0", f"found {found}")
        return {}
    if not found or found != int(found):
        raise _refused(family, "a whole number of video.positions_per_second", f"found {found}")
    return {"tokens_per_second": int(found)}


def _token(text: str, job: Job, family: Family) -> int:
    tokenizer = hookspecs.tokenizer(job) if job.hooks.provider("tokenizer") else None
    found = None if tokenizer is None else token_of(tokenizer, text)
    if found is None:
        raise _refused(family, f"a token for {text}", "this run's tokenizer has none")
    return found


def _ends(job: Job) -> dict[str, Any]:
    """The language model's own special tokens."""
    tokenizer = hookspecs.tokenizer(job)
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    return {"bos_token_id": begin, "eos_token_id": tokenizer.end, "pad_token_id": None}


def _refused(family: Family, wanted: str, found: str) -> ConfigError:
    return ConfigError(f"{family.label} in Hugging Face layout needs {wanted}; {found}.")
