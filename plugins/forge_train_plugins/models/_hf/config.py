"""The configuration of a model of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from forge_train import ConfigError
from forge_train.base.errors import describe, nearest
from forge_train.base.format import format_list
from forge_train_kit.hf.folder import CONFIG, is_hugging_face, table
from forge_train_kit.tokenizer import Tokenizer

VOCABULARY, TEXT = "vocab_size", "text_config"
LABELS = ("id2label", "label2id", "num_labels", "problem_type")
"""Keys that belong to a head; the head's plugin sets them."""
HEADS: Mapping[str, tuple[str, Any]] = {
    "token_logits": ("a causal language model", MODEL_FOR_CAUSAL_LM_MAPPING),
    "text_class_logits": ("sequence classification", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "token_class_logits": ("token classification", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    "rewards": ("sequence classification", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "embeddings": ("a model without a head", MODEL_MAPPING),
}
"""Output of a head → a description of its classes, and the classes."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(
    file: Path | None,
    model_type: str,
    changes: Mapping[str, Any],
    extra: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> PreTrainedConfig:
    """The configuration of a file or of a model type, with some keys changed.

    Args:
        file: a `config.json`; None to use the type.
        model_type: as in `config.json`.
        changes: keys and their values.
        extra: keys that the configuration's class does not list, and their values.
        tokenizer: provides the ids that are the model's input; None if there is none.

    Raises:
        ConfigError: naming what transformers does not know or rejects.
    """
    stored: dict[str, Any] = {}
    if file:
        stored = table(file)
        model_type = str(stored.get("model_type", ""))
        if not model_type:
            raise ConfigError(f"{file}: model_type is missing; transformers needs it to choose a class.")
    config = of(model_type, stored, changes if file else _from_scratch(model_type, changes, tokenizer), extra)
    if tokenizer is not None and (size := vocabulary(config)) < tokenizer.vocabulary:
        raise ConfigError(
            f"hf.set.{VOCABULARY}: expected at least the tokenizer's {tokenizer.vocabulary}, found {size}."
        )
    return config


def of(
    model_type: str,
    stored: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """The configuration of a causal language model.

    Raises:
        ConfigError: for an unknown type or key, a value that the class rejects, or a model that is not causal.
    """
    if quantised := stored.get("quantization_config"):
        method = quantised.get("quant_method", "not named") if isinstance(quantised, Mapping) else quantised
        raise ConfigError(
            f"hf: quantization_config = {{quant_method: {method}, …}} can't be imported: this plugin reads no "
            "quantised weights. Take the model that these weights were made from, or dequantise them."
        )
    kind = config_class(model_type)
    changes, extra = changes or {}, extra or {}
    known = listed(kind)
    for key in changes:
        if key not in known and key not in stored:
            hint = nearest(key, known) or " If the model's code reads it all the same, set it in hf.extra."
            raise ConfigError(f"hf.set.{key}: the configuration of {model_type!r} has no such key.{hint}")
    for key in extra:
        if key in known:
            raise ConfigError(f"hf.extra.{key}: the configuration of {model_type!r} lists it; set it in hf.set.")
    try:
        config = kind.from_dict({**stored, **_within(kind, stored, changes), **extra})
    except Exception as error:  # a class may raise anything
        raise ConfigError(
            f"hf.set: transformers rejects this configuration of {model_type!r}: {describe(error)}"
        ) from error
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True):
        raise ConfigError(
            f"hf: a model of type {model_type!r} looks at later tokens, so it can't learn to predict them. If its "
            "class can be a decoder, set hf.set.is_decoder = true."
        )
    return config


def listed(kind: type[PreTrainedConfig]) -> set[str]:
    """The keys that a class lists. It keeps others, too, for the model's code to read."""
    return {*vars(kind()), *kind.attribute_map}


def fits_folder(config: PreTrainedConfig, changes: Mapping[str, Any], path: str) -> None:
    """Raises ConfigError if the initial weights are in a Hugging Face folder whose `config.json` has other values than
    this configuration, and `hf.set` does not name them: setting a table as a whole replaces all its values."""
    if not is_hugging_face(Path(path)):
        return
    stored = table(Path(path) / CONFIG)
    if stored.get("model_type") != config.model_type:
        return
    theirs, ours = of(config.model_type, stored).to_dict(), config.to_dict()
    unlike = [key for key in ours if key not in (*changes, *SPECIAL, *LABELS) and ours[key] != theirs.get(key)]
    lost = [key for key in unlike if key in stored and key not in ("architectures", "dtype", "transformers_version")]
    if lost:
        raise ConfigError(
            f"hf.set drops {format_list(lost, 4)}, which {path} sets. Set single keys, such as hf.set.{lost[0]}, "
            "instead of the whole table."
        )


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The configuration class of a type that has a causal language model, or one that takes images too.

    Raises:
        ConfigError: with the nearest names.
    """
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if model_type in names:
        kind: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
        return kind
    known = nearest(model_type, names)
    if model_type in CONFIG_MAPPING:
        raise ConfigError(f"hf: transformers has no causal language model of type {model_type!r}.{known}")
    raise ConfigError(
        f"hf: this version of transformers knows no model of type {model_type!r}.{known} Forge does not run models "
        "whose code comes with their weights (trust_remote_code)."
    )


def model_class(config: PreTrainedConfig, given: str = "token_logits") -> Any:
    """The class of the causal language model, or the class for another head.

    Raises:
        ConfigError: if transformers has none.
    """
    what, classes = HEADS[given]
    if given == "token_logits" and type(config) not in classes:
        classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in classes:
        raise ConfigError(f"hf: transformers has no class for {what} of type {config.model_type!r}.")
    found = classes[type(config)]
    return found[0] if isinstance(found, tuple) else found


def vocabulary(config: PreTrainedConfig) -> int:
    return int(getattr(config.get_text_config(), VOCABULARY))


def _within(kind: type[PreTrainedConfig], stored: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, where those of a configuration inside this one leave its other keys as they are stored."""
    found = dict(changes)
    for key in kind.sub_configs.keys() & changes.keys() & stored.keys():
        if isinstance(changes[key], Mapping) and isinstance(stored[key], Mapping):
            found[key] = {**stored[key], **changes[key]}
    return found


def _from_scratch(model_type: str, changes: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The changes for a new model: it has the tokenizer's vocabulary and none of the published model's special tokens,
    because an embedding does not train the row of its padding token."""
    kind = config_class(model_type)
    known = vars(kind())
    inside = VOCABULARY not in known and TEXT in kind.sub_configs
    given = changes.get(TEXT, {}) if inside else changes
    if tokenizer is None and VOCABULARY not in given:
        raise ConfigError(f"hf.set.{VOCABULARY}: no enabled plugin provides a tokenizer to take it from; set it.")
    start: dict[str, Any] = {key: None for key in SPECIAL if inside or key in known}
    if tokenizer is not None:
        start[VOCABULARY] = tokenizer.vocabulary
    return {**changes, TEXT: {**start, **given}} if inside else {**start, **changes}
