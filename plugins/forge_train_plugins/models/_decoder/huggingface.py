"""The decoder in Hugging Face layout: the family of a `config.json`, and the family to export a model as."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train.base.format import format_list
from forge_train_kit.hf import HFModel

from . import rules
from .families import FAMILIES
from .families.family import Family
from .families.quantised import taken_out

if TYPE_CHECKING:
    from torch import nn

    from forge_train_kit.state_map import StateMap

    from ..decoder import Decoder

LEFTOVERS = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Tensors that older versions of transformers stored although the configuration determines them."""
BIDIRECTIONAL = "use_bidirectional_attention"
"""The key of `config.json` of a model that is no causal one. Here it may be `prefix`, for a language model that is a
part of another (`HFAround`), with `decoder.prefix`."""
AHEAD = "num_nextn_predict_layers"
"""The key of `config.json` for the number of layers in a tail."""


def read(table: Mapping[str, Any], plain: Decoder.Config) -> HFModel | None:
    """Describe the model of a `config.json` and the mapping of its names; None for another architecture.

    Args:
        table: the `config.json`.
        plain: any decoder section; its type is used to make new ones.

    Raises:
        ConfigError: naming the keys whose values have no counterpart.
    """
    architectures: Sequence[str] = table.get("architectures") or ()
    family = next((FAMILIES[one] for one in architectures if one in FAMILIES), None)
    if family is None:
        return None
    prefix = table.get(BIDIRECTIONAL) == "prefix"
    plain_table, expanded = taken_out({**table, BIDIRECTIONAL: None} if prefix else table)
    sections = family.read(plain_table)
    sections["decoder"] |= {"prefix": True} if prefix else {}
    sections["decoder"]["architecture"] = family.architecture
    config = _made(sections["decoder"], plain)
    ahead = plain_table.get(AHEAD) or 0
    maps = family.maps(config, sections, ahead if isinstance(ahead, int) else 0)
    first, *others = (one if expanded is None else expanded >> one for one in maps)
    return HFModel(
        map=first, leftovers=(*LEFTOVERS, *family.leftovers(config)), sections=sections, others=tuple(others)
    )


def write(config: Decoder.Config, vocabulary: int, model: nn.Module, sections: Mapping[str, Any]) -> HFModel:
    """`config.json` and names for a model, which may be on the meta device.

    Args:
        config: of the decoder.
        vocabulary: its number of token ids.
        model: built from these sections.
        sections: of all plugins.

    Raises:
        ConfigError: listing what the family, or each family, can't express.
    """
    activations = {str(module.activation) for module in model.modules() if hasattr(module, "activation")}
    more = {BIDIRECTIONAL: "prefix"} if config.prefix else {}
    config = _resolved(replace(config, vocabulary=vocabulary, prefix=False))
    tail: Any = getattr(model, "tail", None)
    ahead = 0 if tail is None else len(tail.units)
    differing: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if config.architecture in ("", family.architecture):
            wrong = [
                f"plugin {part.plugin} is not enabled here" for part in family.parts if part.plugin not in sections
            ]
            if not wrong:
                found = family.write(config, min(activations, default=""), sections)
                wrong = list(_differences(family, found, config, activations, sections))
            if not wrong:
                own = {part.plugin: asdict(sections[part.plugin]) for part in family.parts}
                layout, *_ = family.maps(config, own, ahead)
                left_out = (r"tail\..*",) if ahead and not family.ahead else ()
                wrong = list(_without_place(layout, model, left_out))
            if not wrong:
                found |= {AHEAD: ahead, **more} if family.ahead else more
                return HFModel(map=layout, config=found, left_out=left_out, exact=family.exact)
            differing[family.architecture] = wrong
    lines = "\n".join(f"  {name}: {'; '.join(wrong)}" for name, wrong in sorted(differing.items(), key=_fewest))
    told = f"{config.architecture} can't" if config.architecture else "No architecture in Hugging Face layout can"
    raise ConfigError(f"{told} hold this model. Differences:\n{lines}")


def _fewest(item: tuple[str, list[str]]) -> int:
    return len(item[1])


def _differences(
    family: Family,
    found: Mapping[str, Any],
    config: Decoder.Config,
    activations: set[str],
    sections: Mapping[str, Any],
) -> Iterator[str]:
    """List the differences in what a reader of the `config.json` would build."""
    try:
        there = family.read(found)
    except ConfigError as error:
        yield str(error)
        return
    read = _flat(asdict(_resolved(_made(there["decoder"], config))))
    for name, value in _flat(asdict(config)).items():
        if name not in (*NO_NUMBER, *family.unused) and value != read[name]:
            yield f"decoder.{name} is {json.dumps(value)} here, but {json.dumps(read[name])} there"
    if activations - {activation := there["swiglu"]["activation"]}:
        yield f"swiglu.activation is {' and '.join(sorted(activations))} here, but {activation} there"
    for part in family.parts:
        own = sections[part.plugin]
        again = asdict(part.resolved(type(own)(**there[part.plugin]), config))
        for name, value in asdict(part.resolved(own, config)).items():
            if name not in part.neutral and value != again[name]:
                yield f"{part.plugin}.{name} is {json.dumps(value)} here, but {json.dumps(again[name])} there"


def _without_place(layout: StateMap, model: nn.Module, left_out: Sequence[str]) -> Iterator[str]:
    """Weights for which a layout has no tensors, except those that are left out on purpose."""
    stored = model.state_dict()
    weights = dict([*model.named_parameters(), *(one for one in model.named_buffers() if one[0] in stored)])
    kept = {name: one for name, one in weights.items() if not any(re.fullmatch(out, name) for out in left_out)}
    step = layout.inverse().trace({name: (tuple(one.shape), one.dtype) for name, one in kept.items()})
    if step.left:
        yield f"it has no place for {format_list(step.left)}"
    yield from step.wrong


NO_NUMBER = ("architecture", "depth_scaled", "dropout", "embedding_dropout", "attention_dropout", "std")
"""Options that change no output of a trained model."""


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    rope = {f"rope.{name}": value for name, value in section["rope"].items()}
    return {name: value for name, value in section.items() if name != "rope"} | rope


def _made(section: Mapping[str, Any], like: Decoder.Config) -> Decoder.Config:
    return type(like)(**{**section, "rope": type(like.rope)(**section["rope"])})


def _resolved(config: Decoder.Config) -> Decoder.Config:
    """The configuration with all derived options filled in, so that equal models compare equal."""
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
