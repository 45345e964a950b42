"""PaliGemma (arXiv:2407.07726) and PaliGemma 2 (arXiv:2412.03555) in Hugging Face layout; no language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit.hf import HFAround, HFModel
from forge_train_kit.state_map import Rename

from . import families
from .llava import INTO, OLDER, TEXT, leftovers_of, tokens_of
from .processor import read as read_processor

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Modality

    from .section import VisionSection

ARCHITECTURE = "PaliGemmaForConditionalGeneration"
TEXTS = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
"""`model_type` of a language model → its architecture alone."""
MISSING: dict[str, dict[str, int]] = {
    "gemma": {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 24576,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    },
}
"""`model_type` of a language model → values of keys that a `text_config` leaves out."""
BIDIRECTIONAL = "use_bidirectional_attention"
VISION = "siglip_vision_model"
PROJECTOR = Rename(
    {f"multi_modal_projector.linear.{kind}": f"{INTO}connector.first.{kind}" for kind in ("weight", "bias")}
)


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
    vision, text = dict(config.get("vision_config") or {}), dict(config.get("text_config") or {})
    if (kind := vision.get("model_type")) != VISION:
        raise ConfigError(f"vision_config: model_type: expected {VISION}, found {kind!r}.")
    if (named := text.get("model_type", "gemma")) not in TEXTS:
        raise ConfigError(f"text_config: model_type: expected one of {', '.join(TEXTS)}, found {named!r}.")
    if text.pop(BIDIRECTIONAL, None) not in (True, None):
        raise ConfigError(f"text_config: {BIDIRECTIONAL}: expected true, found false: a prefix sees all of itself.")
    text.pop("num_image_tokens", None)
    text = {**MISSING[named], **text}
    if (width := config.get("projection_dim", 2048)) != text["hidden_size"]:
        raise ConfigError(f"projection_dim: expected {text['hidden_size']}, as text_config has, found {width!r}.")
    tower = families.read(vision, "vision_tower.", None, f"{INTO}vision.")
    tied = config.get("tie_word_embeddings", True)
    return HFAround(
        config={
            **text,
            "model_type": named,
            "architectures": [TEXTS[named]],
            "tie_word_embeddings": tied,
            BIDIRECTIONAL: "prefix",
        },
        names=TEXT,
        model=HFModel(
            map=tower.map | PROJECTOR,
            sections={
                "image": {
                    **tower.sections["image"],
                    **read_processor(beside, tower.sections["image"]),
                    "connector": "linear",
                }
            },
            leftovers=leftovers_of(vision, None),
            others=OLDER,
        ),
    )


def is_its(layout: HFModel) -> bool:
    """Return True if the language model of a layout is one whose prefixes see all of themselves."""
    return layout.config.get(BIDIRECTIONAL) == "prefix"


def write(config: VisionSection, modality: Modality, layout: HFModel, job: Job) -> HFModel:
    """The whole model's layout, given its language model's.

    Raises:
        ConfigError: naming what PaliGemma has no counterpart for.
    """
    (architecture,) = layout.config["architectures"]
    if architecture not in TEXTS.values():
        raise ConfigError(
            "A model with decoder.prefix in Hugging Face layout is PaliGemma, which has one of "
            f"{', '.join(TEXTS.values())}, found {architecture}."
        )
    if job.hooks.provider("fusion") and job.hooks.gives("fusion") != "features":
        raise ConfigError(
            f"PaliGemma in Hugging Face layout has images among the tokens; plugin {job.hooks.provider('fusion')!r} "
            "joins them otherwise."
        )
    wanted = {"connector": "linear", "merge": 1, "class_token": False, "positions": "learned"}
    for key, value in wanted.items():
        if (found := getattr(config, key)) != value:
            raise ConfigError(f"image.{key}: PaliGemma in Hugging Face layout has {value!r}, found {found!r}.")
    vision = families.write(config)
    token, special = tokens_of(modality, job, "PaliGemma")
    width = layout.config["hidden_size"]
    text = {**layout.config, **special, BIDIRECTIONAL: True}
    return replace(
        layout,
        map=(TEXT >> layout.map)
        | families.tensors({"patch": config.patch}, "vision_tower.", f"{INTO}vision.")
        | PROJECTOR,
        config={
            "architectures": [ARCHITECTURE],
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": {**vision, "vision_use_head": False, "projection_dim": width},
            "tie_word_embeddings": bool(text["tie_word_embeddings"]),
            "image_token_index": token,
            "projection_dim": width,
            "hidden_size": width,
            "vocab_size": text["vocab_size"],
        },
    )
