"""The decoder in Hugging Face layout: the family of a `config.json`, and the one that a model can be exported as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError, HFModel
from forge_train.ground.present import few
from forge_train.state_map import Rename

from . import rules
from .families import FAMILIES
from .families.family import Family

if TYPE_CHECKING:
    from torch import nn

    from ..decoder import Decoder

LEFTOVERS = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Tensors that older versions of transformers stored, and that follow from the configuration."""
OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def read(table: Mapping[str, Any], plain: Decoder.Config) -> HFModel | None:
    """How the model of a `config.json` is built and named here; None for another architecture.

    Args:
        table: the `config.json`.
        plain: any section, to make another one like it.

    Raises:
        ConfigError: naming the keys whose values have no counterpart.
    """
    architectures: Sequence[str] = table.get("architectures") or ()
    family = next((FAMILIES[one] for one in architectures if one in FAMILIES), None)
    if family is None:
        return None
    section, activation = family.read(table)
    section["architecture"] = family.architecture
    return HFModel(
        map=Rename(_names(family, _parameters(_made(section, plain)))).inverse(),
        leftovers=LEFTOVERS,
        sections={"decoder": section, "swiglu": {"activation": activation}},
    )


def write(config: Decoder.Config, vocabulary: int, model: nn.Module) -> HFModel:
    """`config.json` and names for a model, which may lie on the meta device.

    Raises:
        ConfigError: saying what the family, or each of them, can't express.
    """
    parameters = [name for name, _ in model.named_parameters()]
    activations = {str(module.activation) for module in model.modules() if hasattr(module, "activation")}
    config = _resolved(replace(config, vocabulary=vocabulary))
    differing: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if config.architecture in ("", family.architecture):
            found = family.write(config, min(activations, default=""))
            if not (wrong := list(_differences(family, found, config, activations))):
                return HFModel(map=Rename(_names(family, parameters)).inverse(), config=found)
            differing[family.architecture] = wrong
    _names(FAMILIES[min(differing, key=lambda name: len(differing[name]))], parameters)
    lines = "\n".join(f"  {name}: {'; '.join(wrong)}" for name, wrong in sorted(differing.items(), key=_fewest))
    way_out = ' Set decoder.architecture to "" to allow all of them.' if config.architecture else ""
    told = f"{config.architecture} can't" if config.architecture else "No architecture in Hugging Face layout can"
    raise ConfigError(f"{told} hold this model.{way_out} What differs:\n{lines}")


def _fewest(item: tuple[str, list[str]]) -> int:
    return len(item[1])


def _differences(
    family: Family, found: Mapping[str, Any], config: Decoder.Config, activations: set[str]
) -> Iterator[str]:
    """What a reader of the `config.json` would build otherwise."""
    try:
        section, activation = family.read(found)
    except ConfigError as error:
        yield str(error)
        return
    read = _flat(asdict(_resolved(_made(section, config))))
    for name, value in _flat(asdict(config)).items():
        if name not in NO_NUMBER and value != read[name]:
            yield f"decoder.{name} is {json.dumps(value)} here, and {json.dumps(read[name])} there"
    if activations != {activation}:
        yield f"swiglu.activation is {' and '.join(sorted(activations)) or 'none'} here, and {activation} there"


NO_NUMBER = ("architecture", "depth_scaled", "dropout", "embedding_dropout", "std")
"""Options that change no number of a trained model."""


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    rope = {f"rope.{name}": value for name, value in section["rope"].items()}
    return {name: value for name, value in section.items() if name != "rope"} | rope


def _made(section: Mapping[str, Any], like: Decoder.Config) -> Decoder.Config:
    return type(like)(**{**section, "rope": type(like.rope)(**section["rope"])})


def _resolved(config: Decoder.Config) -> Decoder.Config:
    """The same, with everything filled in that follows from other options, so that equal models are equal."""
    rope, windows = config.rope, rules.windows(config)
    same = not any(windows) or (rope.window_theta == rope.theta and rope.scaling == "none")
    return replace(
        config,
        kv_heads=rules.kv_heads(config),
        head_dim=rules.head_dim(config),
        hidden=rules.hidden(config),
        scale=config.scale or rules.head_dim(config) ** -0.5,
        window=config.window if any(windows) else 0,
        window_layers=tuple(window > 0 for window in windows),
        rope=replace(
            rope,
            high=rules.high(rope),
            layers=rules.rotated(config),
            window_theta=0.0 if same else rope.window_theta,
        ),
    )


def _parameters(config: Decoder.Config) -> Iterator[str]:
    """The names of the parameters of a model with this section, which is not built to find them."""
    yield "embedding.weight"
    norms = {"pre": ("_norm",), "post": ("_post_norm",), "both": ("_norm", "_post_norm")}[config.norm_at]
    modules = {f"{block}{norm}": False for block in ("attention", "feed_forward") for norm in norms}
    modules |= {f"attention.{one}": config.qkv_bias for one in "qkv"} | {"attention.o": config.o_bias}
    modules |= {f"attention.{one}_norm": False for one in "qk" if config.qk_norm}
    modules |= {f"feed_forward.{one}": config.bias for one in ("gate", "up", "down")}
    for index in range(config.layers):
        for module, bias in modules.items():
            yield f"layers.{index}.{module}.weight"
            if bias:
                yield f"layers.{index}.{module}.bias"
    yield "norm.weight"
    if not config.tied:
        yield "head.weight"


def _names(family: Family, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter name → tensor name.

    Raises:
        ConfigError: naming the parameters that have no place in the layout.
    """
    found: dict[str, str] = {}
    strange: list[str] = []
    for name in parameters:
        module, _, kind = name.rpartition(".")
        _, index, inner = [*module.split(".", 2), "", ""][:3]
        if module in OUTER:
            found[name] = f"{OUTER[module]}.{kind}"
        elif inner in family.block:
            found[name] = f"model.layers.{index}.{family.block[inner]}.{kind}"
        else:
            strange.append(name)
    if strange:
        raise ConfigError(f"{family.architecture} has no place for {few(strange)}.")
    return found
