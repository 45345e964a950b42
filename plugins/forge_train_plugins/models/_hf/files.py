"""From and to folders in Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from forge_train import ConfigError, HFModel
from forge_train.ground.present import few
from forge_train.state_map import Rename

from .config import SPECIAL, model_class, of
from .model import HEAD
from .weights import leftovers, stored_names


def exported(config: PreTrainedConfig) -> HFModel:
    """The class's own configuration and names."""
    return HFModel(map=Rename(_names(config)).inverse(), config=_described(config))


def imported(stored: Mapping[str, Any]) -> HFModel | None:
    """The section of a `config.json`; None for a type that transformers has no causal language model of."""
    config = of(str(stored.get("model_type", "")), stored)
    with torch.device("meta"):
        patterns = leftovers(model_class(config)(config))
    default, own = type(config)().to_dict(), config.to_dict()
    changed = {key: one for key, one in own.items() if key in SPECIAL or one != default.get(key)}
    changed.pop("model_type", None)
    if unset := [key for key, one in changed.items() if one is None and key not in SPECIAL]:
        raise ConfigError(
            f"hf: {few(unset)} is null in config.json, which a configuration in TOML can't express. Train from the "
            "folder itself, with hf.weights."
        )
    changed = {key: one for key, one in changed.items() if one is not None}
    section = {"type": config.model_type, "set": changed}
    names = _names(config)
    # A pattern may match a parameter too, as "attn.bias" of GPT-2 does "attn.c_attn.bias".
    own = "|".join(re.escape(name) for name in names.values() if any(re.search(one, name) for one in patterns))
    beside = f"(?!(?:{own})$)" if own else ""
    return HFModel(
        map=Rename(names).inverse(),
        sections={"hf": section},
        leftovers=tuple(f"{beside}.*(?:{pattern}).*" for pattern in patterns),
    )


def _names(config: PreTrainedConfig) -> dict[str, str]:
    kind = model_class(config)
    with torch.device("meta"):
        model = kind(config)
    inner = f"{kind.base_model_prefix}."
    return {name if name.startswith(inner) else f"{HEAD}{name}": other for name, other in stored_names(model).items()}


def _described(config: PreTrainedConfig) -> dict[str, Any]:
    """Special tokens that the configuration does not say are the tokenizer's."""
    described: dict[str, Any] = {k: v for k, v in config.to_dict().items() if v is not None or k not in SPECIAL}
    described["architectures"] = [model_class(config).__name__]
    return described
