"""From and to folders in Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from forge_train import ConfigError
from forge_train.base.format import format_list
from forge_train_kit.heads import Classes
from forge_train_kit.hf import HFModel

from .config import HEADS, LABELS, SPECIAL, VOCABULARY, listed, model_class, of
from .model import HEAD
from .stored import Held, from_files, held_by_files
from .weights import leftovers

LABELLED = {"text_class_logits": "classify", "token_class_logits": "token_classify", "rewards": "reward"}
"""Output of a head with labels → its plugin."""


def exported(
    config: PreTrainedConfig, given: str = "token_logits", classes: Classes | None = None, pad: int | None = None
) -> HFModel:
    """The class's own configuration and names.

    Args:
        config: of the model.
        given: what its head gives.
        classes: which it tells apart, if it does.
        pad: the token id of padding, by which transformers finds the last token of a text, where the configuration
            has none.

    Raises:
        ConfigError: for a head that transformers has no class of.
    """
    described: dict[str, Any] = config.to_dict()
    if given in LABELLED:
        labels = classes.names if classes else ("reward",)
        described |= {"id2label": dict(enumerate(labels)), "label2id": {name: k for k, name in enumerate(labels)}}
        described |= {"problem_type": "single_label_classification" if classes else "regression"}
        described |= {"pad_token_id": pad} if described.get("pad_token_id") is None and pad is not None else {}
        described |= {"tie_word_embeddings": False} if "tie_word_embeddings" in described else {}
        config = type(config).from_dict(described)
    described["architectures"] = [model_class(config, given).__name__]
    held, names = _held(config, given)
    return HFModel(map=from_files(held, names)[0], config=described)


def imported(stored: Mapping[str, Any]) -> HFModel | None:
    """The section of a `config.json`; None for a type that transformers has no causal language model of."""
    config = of(str(stored.get("model_type", "")), stored)
    given = _given(config)
    with torch.device("meta"):
        patterns = leftovers(model_class(config, given)(config))
    changed = _changed(config)
    known = {*listed(type(config)), *type(config)().to_dict()}
    extra = {key: changed.pop(key) for key in sorted(changed.keys() - known)}
    section = {"type": config.model_type, "set": changed} | ({"extra": extra} if extra else {})
    sections: dict[str, Mapping[str, Any]] = {"hf": section, **_head_section(config, given)}
    held, names = _held(config, given)
    # A pattern may match a parameter too, as "attn.bias" of GPT-2 does "attn.c_attn.bias".
    files = [name for one in held for name in one.files]
    own = "|".join(re.escape(name) for name in files if any(re.search(one, name) for one in patterns))
    beside = f"(?!(?:{own})$)" if own else ""
    first, others = from_files(held, names)
    return HFModel(
        map=first,
        others=others,
        sections=sections,
        leftovers=tuple(f"{beside}.*(?:{pattern}).*" for pattern in patterns),
    )


def _changed(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys whose values are not those that the class has by itself.

    Raises:
        ConfigError: for one that has no value.
    """
    default, own = type(config)().to_dict(), config.to_dict()
    inside = [key for key in type(config).sub_configs if isinstance(getattr(config, key, None), PreTrainedConfig)]
    changed = {key: one for key, one in own.items() if key in (*SPECIAL, VOCABULARY) or one != default.get(key)}
    changed = {key: one for key, one in changed.items() if key not in ("model_type", *LABELS, *inside)}
    if unset := [key for key, one in changed.items() if one is None and key not in SPECIAL and key in default]:
        raise ConfigError(
            f"hf: {format_list(unset)} is null in config.json, which a configuration in TOML can't express. Train from "
            "the folder itself, with hf.weights."
        )
    # A configuration inside this one may be of any type, and then has that one's defaults.
    parts = {key: getattr(config, key) for key in inside}
    nested = {key: {"model_type": one.model_type, **_changed(one)} for key, one in parts.items()}
    return {**{key: one for key, one in changed.items() if one is not None}, **nested}


def _given(config: PreTrainedConfig) -> str:
    """Return the output of the head with which a folder was written; a causal model's if the folder names none."""
    named = config.architectures or ()
    for given, (_, kinds) in HEADS.items():
        if type(config) in kinds and model_class(config, given).__name__ in named:
            return "rewards" if given == "text_class_logits" and config.num_labels == 1 else given
    return "token_logits"


def _head_section(config: PreTrainedConfig, given: str) -> dict[str, Mapping[str, Any]]:
    """The section of the plugin that has such a head.

    Raises:
        ConfigError: for labels that no plugin here learns.
    """
    if given not in LABELLED:
        return {}
    problem = config.problem_type
    if problem not in (None, "single_label_classification") and given != "rewards":
        raise ConfigError(
            f"config.json: problem_type = {problem!r} can't be imported: Forge supports one class per text."
        )
    names = [config.id2label[label] for label in range(config.num_labels)]
    return {LABELLED[given]: {} if given == "rewards" else {"classes": names}}


def _held(config: PreTrainedConfig, given: str) -> tuple[list[Held], dict[str, str]]:
    """Return the tensors in files, and the class's names → names here.

    Raises:
        ConfigError: for a class whose head is more than one linear layer, or whose trunk is another one.
    """
    causal = model_class(config)
    kind = model_class(config, given)
    with torch.device("meta"):
        model, base = kind(config), causal.base_model_prefix
        trunk = type(getattr(causal(config), base))
    own = f"{kind.base_model_prefix}." if given != "embeddings" else ""
    found = getattr(model, kind.base_model_prefix) if own else model
    if type(found) is not trunk:
        raise ConfigError(
            f"hf: {kind.__name__} has a {type(found).__name__}, and {causal.__name__} a {trunk.__name__}."
        )
    held = held_by_files(model)
    everything = [name for one in held for name in one.here]
    if given == "token_logits":
        return held, {name: name if name.startswith(own) else f"{HEAD}{name}" for name in everything}
    names = {name: f"{base}.{name.removeprefix(own)}" for name in everything if name.startswith(own)}
    rest = [name for name in everything if not name.startswith(own)]
    wanted = {"embeddings": [], "token_class_logits": ["weight", "bias"]}.get(given, ["weight"])
    if [name.rpartition(".")[2] for name in rest] != wanted or len({name.rpartition(".")[0] for name in rest}) > 1:
        raise ConfigError(
            f"hf: the head of {kind.__name__} has {format_list(sorted(rest)) or 'no parameter'}; the plugin's head is "
            f"one linear layer with {' and '.join(wanted)}."
        )
    return held, names | {name: f"{HEAD}score.{name.rpartition('.')[2]}" for name in rest}
