"""A model in Hugging Face layout. Importing this module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..state_map import StateMap

Tables = Mapping[str, Mapping[str, Any]]
"""Name of a file → its contents."""


@dataclass(frozen=True, slots=True)
class HFModel:
    """A model's representation in Hugging Face layout (`import_hf`, `export_hf`).

    Args:
        map: from tensors in Hugging Face layout to Forge's parameters; a tied one is listed once. Export inverts it.
        config: the `config.json`, for export; for import, that of the language model if it is a part of another.
        sections: plugin name → its configuration, for import.
        further: the same of plugins that the model can do without; each counts in a run that enables it.
        leftovers: patterns of extra tensors that files may hold and the model does not need.
        exact: patterns of tensors that an export stores in their own dtype, whatever dtype is requested.
        others: maps from other layouts that files of this model may have, for import.
        left_out: patterns of the model's weights that the layout has no place for; an export leaves them out.
        described: for export, given the contents of the files beside the model that describe how items are read
            (`forge_train_kit.model_files.ITEMS`), by name, gives those that are to say something else, or are missing.
    """

    map: StateMap
    config: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    further: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()
    others: tuple[StateMap, ...] = ()
    left_out: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    described: Callable[[Tables], Tables] | None = None

    def is_leftover(self, name: str) -> bool:
        """Return True if files may hold a tensor of this name that the model does not need."""
        return any(re.fullmatch(one, name) for one in self.leftovers)


@dataclass(frozen=True, slots=True)
class HFAround:
    """The surroundings of a language model in a folder that holds several models (`import_hf_around`).

    Args:
        config: the `config.json` of the language model alone.
        names: from tensors of the language model in this folder to those that it has alone.
        model: the rest; its `map` takes no tensor of the language model, and its `others` are maps from other layouts
            of the whole folder to the one that `names` and `map` describe.
    """

    config: Mapping[str, Any]
    names: StateMap
    model: HFModel

    def whole(self, inner: HFModel) -> HFModel:
        """The whole folder's model, given its language model."""
        maps = [(self.names >> one) | self.model.map for one in (inner.map, *inner.others)]
        first, *others = (*maps, *(older >> one for older in self.model.others for one in maps))
        return HFModel(
            map=first,
            config=self.config,
            sections={**inner.sections, **self.model.sections},
            further={**inner.further, **self.model.further},
            leftovers=(*self.model.leftovers, *(rf"(?:.*\.)?(?:{one})" for one in inner.leftovers)),
            exact=inner.exact,
            others=tuple(others),
        )


@dataclass(frozen=True, slots=True)
class HFAdapter:
    """An adapter as PEFT stores it (`export_adapter`).

    Args:
        map: from the run's parameters to the tensors of `adapter_model.safetensors`.
        config: the `adapter_config.json`, without the name of the base.
    """

    map: StateMap
    config: Mapping[str, Any]
