"""Llama 3.2 Vision (arXiv:2407.21783, §7) in Hugging Face layout: all but the language model, read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_train import ConfigError
from forge_train_kit.hf import HFAround, HFModel

from .canvas import arrangements
from .processor import read as read_processor
from .tensors import OLDER, around, text_names

ARCHITECTURE, TEXT = "MllamaForConditionalGeneration", "MllamaForCausalLM"
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
"""`hidden_act` → `image_tiles.activation`."""
SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_hidden_layers": "layers",
    "num_global_layers": "global_layers",
    "attention_heads": "heads",
    "image_size": "size",
    "patch_size": "patch",
    "max_num_tiles": "tiles",
    "norm_eps": "norm_eps",
    "intermediate_layers_indices": "outputs",
}
"""Key of the `vision_config` → option of `[image_tiles]`."""
VISION: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "max_num_tiles": 4,
    "norm_eps": 1e-5,
    "intermediate_layers_indices": [3, 7, 15, 23, 30],
    "hidden_act": "gelu",
}
"""Values of keys that a `vision_config` leaves out."""
LANGUAGE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}
"""The same of a `text_config`."""


def read(config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
    """Read a `config.json`; None for another architecture.

    Args:
        config: of the whole model.
        beside: what the files for its images say.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    if ARCHITECTURE not in (config.get("architectures") or ()):
        return None
    vision, text = (
        {**usual, **_given(config, key)} for usual, key in ((VISION, "vision_config"), (LANGUAGE, "text_config"))
    )
    options = _encoder(vision)
    layers, at = text["num_hidden_layers"], _between(text)
    if config.get("tie_word_embeddings") or text.get("tie_word_embeddings"):
        raise ConfigError(
            "tie_word_embeddings: expected False, found True: the head has fewer rows than the embedding."
        )
    language = {
        **text,
        "architectures": [TEXT],
        "model_type": "mllama_text_model",
        "num_hidden_layers": layers - len(at),
        "cross_attention_layers": [],
    }
    return HFAround(
        config=language,
        names=text_names(layers, at),
        model=HFModel(
            map=around(at, options["patch"]),
            sections={
                "image_tiles": {**options, **read_processor(beside, options)},
                "cross_attention": {"layers": [index - before for before, index in enumerate(at)], "attend": "run"},
            },
            others=OLDER,
        ),
    )


def _given(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    spelled = {"num_attention_heads": "attention_heads"} if key == "vision_config" else {}
    given = {name: value for name, value in (config.get(key) or {}).items() if value is not None}
    return {spelled.get(name, name): value for name, value in given.items()}


def _encoder(vision: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the encoder.

    Raises:
        ConfigError: naming a key of `vision_config` whose value has no counterpart.
    """
    outputs, tiles = vision["intermediate_layers_indices"], vision["max_num_tiles"]
    fixed = {
        "model_type": "mllama_vision_model",
        "num_channels": 3,
        "supported_aspect_ratios": [list(one) for one in arrangements(tiles)],
        "vision_output_dim": vision["hidden_size"] * (1 + len(outputs)),
    }
    for key, value in fixed.items():
        if (found := vision.get(key, value)) != value:
            raise ConfigError(f"vision_config: {key}: expected {value!r}, found {found!r}.")
    if vision["hidden_act"] not in ACTIVATIONS:
        raise ConfigError(
            f"vision_config: hidden_act: expected one of {', '.join(ACTIVATIONS)}, found {vision['hidden_act']!r}."
        )
    options = {option: vision[key] for key, option in SIZES.items()}
    return {**options, "activation": ACTIVATIONS[vision["hidden_act"]]}


def _between(text: Mapping[str, Any]) -> list[int]:
    """The layers that attend to images, in order.

    Raises:
        ConfigError: one of them has no layer of the language model right after it.
    """
    at, layers = sorted(text["cross_attention_layers"]), text["num_hidden_layers"]
    for index in at:
        if index + 1 in at or not 0 <= index < layers - 1 or at.count(index) > 1:
            raise ConfigError(
                f"text_config: cross_attention_layers: expected layers of 0 to {layers - 2}, no two of them side by "
                f"side, found {text['cross_attention_layers']}."
            )
    if not at:
        raise ConfigError("text_config: cross_attention_layers: expected at least one layer.")
    return at
