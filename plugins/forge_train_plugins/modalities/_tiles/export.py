"""Llama 3.2 Vision in Hugging Face layout, written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.items.marks import token_of
from forge_train_kit.hf import HFModel

from .canvas import arrangements
from .mllama import ACTIVATIONS, ARCHITECTURE, SIZES, TEXT
from .tensors import around, text_names

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Modality

    from .section import TileSection


def write(config: TileSection, modality: Modality, layout: HFModel, job: Job) -> HFModel:
    """The whole model's layout, given its language model's.

    Raises:
        ConfigError: naming what Llama 3.2 Vision has no counterpart for.
    """
    (architecture,) = layout.config["architectures"]
    if architecture != TEXT:
        raise ConfigError(
            f"Llama 3.2 Vision in Hugging Face layout has a {TEXT}, found {architecture}; that has "
            "decoder.placeholders = 8."
        )
    own = layout.config["num_hidden_layers"]
    at = [index + before for before, index in enumerate(_between(own, job))]
    token, special = _tokens(modality, job)
    layers = own + len(at)
    text = {key: value for key, value in layout.config.items() if key != "architectures"}
    return replace(
        layout,
        map=(text_names(layers, at) >> layout.map) | around(at, config.patch),
        config={
            "architectures": [ARCHITECTURE],
            "model_type": "mllama",
            "text_config": {**text, **special, "num_hidden_layers": layers, "cross_attention_layers": at},
            "vision_config": _vision(config),
            "image_token_index": token,
            "tie_word_embeddings": False,
        },
    )


def _between(layers: int, job: Job) -> list[int]:
    """The language model's layers before which one stands that attends to images.

    Raises:
        ConfigError: the fusion is another one.
    """
    fusion = job.hooks.provider("fusion")
    section: Any = job.config.sections.get("cross_attention")
    if fusion != "cross_attention" or section is None:
        raise ConfigError(
            f"Llama 3.2 Vision in Hugging Face layout has layers that attend to images; plugin {fusion!r} joins them "
            "otherwise."
        )
    if section.attend != "run":
        raise ConfigError(
            f"cross_attention.attend: Llama 3.2 Vision in Hugging Face layout has 'run', found {section.attend!r}."
        )
    return sorted(set(section.layers or range(section.every - 1, layers, section.every)))


def _vision(config: TileSection) -> dict[str, Any]:
    back = {option: name for name, option in ACTIVATIONS.items()}
    found = {key: getattr(config, option) for key, option in SIZES.items()}
    return {
        "model_type": "mllama_vision_model",
        **found,
        "intermediate_size": config.hidden or 4 * config.dim,
        "intermediate_layers_indices": list(config.outputs),
        "hidden_act": back[config.activation],
        "num_channels": 3,
        "supported_aspect_ratios": [list(one) for one in arrangements(config.tiles)],
        "vision_output_dim": config.dim * (1 + len(config.outputs)),
    }


def _tokens(modality: Modality, job: Job) -> tuple[int, dict[str, Any]]:
    """Return the token that stands for an image, and the language model's own special tokens.

    Raises:
        ConfigError: the tokenizer has none for the placeholder, so that transformers could not find images in a text.
    """
    tokenizer = hookspecs.tokenizer(job) if job.hooks.provider("tokenizer") else None
    found = None if tokenizer is None else token_of(tokenizer, modality.placeholder)
    if tokenizer is None or found is None:
        raise ConfigError(
            f"Llama 3.2 Vision in Hugging Face layout needs a token for {modality.placeholder}, which this run's "
            "tokenizer lacks."
        )
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else tokenizer.end or 0  # None is no number to it
    return found, {"bos_token_id": begin, "eos_token_id": tokenizer.end, "pad_token_id": None}
