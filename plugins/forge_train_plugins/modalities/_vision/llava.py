"""LLaVA 1.5 (arXiv:2310.03744) and its like in Hugging Face layout: all but the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.items.marks import token_of
from forge_train_kit.hf import HFAround, HFModel
from forge_train_kit.state_map import Rename, StateMap, Unread

from . import families
from .processor import read as read_processor

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Modality

    from .section import VisionSection

ARCHITECTURE = "LlavaForConditionalGeneration"
TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`model_type` of a language model → its architecture alone."""
_LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
MISSING: dict[str, dict[str, int]] = {
    "llama": {**_LARGE, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": {**_LARGE, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072},
    "qwen2": {**_LARGE, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen3": {**_LARGE, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
}
"""`model_type` of a language model → values of keys that a `text_config` leaves out."""
STRATEGIES = {"clip_vision_model": "default", "siglip_vision_model": "full"}
"""`model_type` of a vision model → the `vision_feature_select_strategy` that takes its patches and nothing else."""
FIXED = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}
UNLIKE = ("image_grid_pinpoints", "image_newline", "mm_patch_merge_type", "spatial_pool_mode")
"""Keys of models that cut an image into tiles (LLaVA-NeXT)."""
INTO = "fusion.enter.encoders.image."
TEXT = Rename(
    {
        "language_model.model.{name*}": "model.{name*}",
        "language_model.lm_head.{kind}": "lm_head.{kind}",
    }
)
PROJECTOR = Rename(
    {
        f"multi_modal_projector.linear_{number}.{kind}": f"{INTO}connector.{ours}.{kind}"
        for number, ours in ((1, "first"), (2, "second"))
        for kind in ("weight", "bias")
    }
)
LAST_NORM = Unread(
    {"vision_tower.post_layernorm.weight": 1.0, "vision_tower.post_layernorm.bias": 0.0},
    like=f"{INTO}vision.layers.0.attention_norm.weight",
)
"""The norm after all blocks, which transformers builds, and whose output LLaVA does not read."""
PUBLISHED = Rename({"vision_tower.vision_model.{name*}": "vision_tower.{name*}"})
"""Names of published folders → those that transformers 5 stores."""
IN_MEMORY = Rename(
    {
        "model.language_model.{name*}": "language_model.model.{name*}",
        "lm_head.{kind}": "language_model.lm_head.{kind}",
        "model.vision_tower.{name*}": "vision_tower.{name*}",
        "model.multi_modal_projector.{name*}": "multi_modal_projector.{name*}",
    }
)
"""Names in memory, as some versions of transformers 4 stored them, → the same."""
OLDER: tuple[StateMap, ...] = (PUBLISHED, IN_MEMORY, IN_MEMORY >> PUBLISHED)


def read(config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
    """Read a `config.json`; None for a model without a vision model beside a language model.

    Args:
        config: of the whole model.
        beside: what the files for its images say.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    if ARCHITECTURE not in (config.get("architectures") or ()):
        return None
    vision, text = dict(config.get("vision_config") or {}), dict(config.get("text_config") or {})
    kind, layer = vision.get("model_type"), config.get("vision_feature_layer", -2)
    for key in UNLIKE:
        if config.get(key) is not None:
            raise ConfigError(f"{key}: images cut into tiles, as in LLaVA-NeXT, can't be imported.")
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{key}: expected {value!r}, found {config[key]!r}.")
    if not isinstance(layer, int):
        raise ConfigError(f"vision_feature_layer: expected the number of one layer, found {layer!r}.")
    tower = families.read(vision, "vision_tower.", layer, f"{INTO}vision.")
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != STRATEGIES[str(kind)]:
        raise ConfigError(
            f"vision_feature_select_strategy: expected {STRATEGIES[str(kind)]!r} for a {kind}, found {strategy!r}: "
            "the connector takes all patches and no class token."
        )
    if (named := text.get("model_type", "llama")) not in TEXTS:
        raise ConfigError(f"text_config: model_type: expected one of {', '.join(TEXTS)}, found {named!r}.")
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    options = {**tower.sections["image"], **read_processor(beside, tower.sections["image"]), "connector": "mlp"}
    leftovers = leftovers_of(vision, layer)
    return HFAround(
        config={
            **MISSING[named],
            **text,
            "model_type": named,
            "architectures": [TEXTS[named]],
            "tie_word_embeddings": tied,
        },
        names=TEXT,
        model=HFModel(
            map=tower.map | PROJECTOR,
            sections={"image": options},
            leftovers=leftovers,
            others=OLDER,
        ),
    )


def write(config: VisionSection, modality: Modality, layout: HFModel, job: Job) -> HFModel:
    """The whole model's layout, given its language model's.

    Raises:
        ConfigError: naming what LLaVA has no counterpart for.
    """
    architectures = {architecture: kind for kind, architecture in TEXTS.items()}
    (architecture,) = layout.config["architectures"]
    if architecture not in architectures:
        raise ConfigError(f"LLaVA in Hugging Face layout has one of {', '.join(architectures)}, found {architecture}.")
    if (layout.config.get("rope_scaling") or {}).get("mrope_section"):
        raise ConfigError("decoder.rope.sections: LLaVA in Hugging Face layout has positions along one axis.")
    if job.hooks.provider("fusion") and job.hooks.gives("fusion") != "features":
        raise ConfigError(
            f"LLaVA in Hugging Face layout has images among the tokens; plugin {job.hooks.provider('fusion')!r} joins "
            "them otherwise."
        )
    wanted = {"connector": "mlp", "connector_hidden": 0, "merge": 1, "final_norm": False, "positions": "learned"}
    for key, value in wanted.items():
        if (found := getattr(config, key)) != value:
            raise ConfigError(f"image.{key}: LLaVA in Hugging Face layout has {value!r}, found {found!r}.")
    vision = families.write(
        replace(config, final_norm=not config.class_token, fit="square" if config.fit == "crop" else config.fit)
    )
    tower: dict[str, Any] = {
        "class_token": config.class_token,
        "patch_bias": config.patch_bias,
        "first_norm": config.first_norm,
    }
    tower |= {"patch": config.patch, "final_norm": False}
    token, special = tokens_of(modality, job, "LLaVA")
    text = {**layout.config, **special}
    return replace(
        layout,
        map=(TEXT >> layout.map) | families.tensors(tower, "vision_tower.", f"{INTO}vision.") | PROJECTOR | LAST_NORM,
        config={
            "architectures": [ARCHITECTURE],
            "model_type": "llava",
            "text_config": text,
            "vision_config": vision if config.class_token else {**vision, "vision_use_head": False},
            "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
            "image_token_index": token,
            "image_seq_length": (config.size // config.patch) ** 2,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": STRATEGIES[vision["model_type"]],
            **FIXED,
        },
    )


def tokens_of(modality: Modality, job: Job, name: str) -> tuple[int, dict[str, Any]]:
    """Return the token that stands at the positions of an image, and the language model's own special tokens.

    Raises:
        ConfigError: the tokenizer has none for the placeholder, so that transformers could not find images in a text.
    """
    tokenizer = hookspecs.tokenizer(job) if job.hooks.provider("tokenizer") else None
    found = None if tokenizer is None else token_of(tokenizer, modality.placeholder)
    if tokenizer is None or found is None:
        raise ConfigError(
            f"{name} in Hugging Face layout needs a token for {modality.placeholder}, which this run's tokenizer lacks."
        )
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    return found, {"bos_token_id": begin, "eos_token_id": tokenizer.end, "pad_token_id": None}


def leftovers_of(vision: Mapping[str, Any], layer: int | None) -> tuple[str, ...]:
    """Patterns of tensors of a vision model that are not needed, under any of its names."""
    towers = ("vision_tower", "vision_tower.vision_model")
    others = [families.read(vision, f"{one}.", layer) for tower in towers for one in (tower, f"model.{tower}")]
    return tuple(dict.fromkeys(one for other in others for one in other.leftovers))
