"""Encoders of items as modules of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


class Encoders(nn.ModuleDict):
    """Modality → its encoder; one that several modalities share is a module once, under the name of its owner.

    Args:
        encoders: as in `FusionSpec`.
    """

    def __init__(self, encoders: Mapping[str, Any]) -> None:
        owners: dict[int, str] = {}
        self._owners = {name: owners.setdefault(id(one), name) for name, one in encoders.items()}
        super().__init__({name: encoders[name] for name in owners.values()})

    def each(self) -> Iterator[tuple[str, Any]]:
        """Every modality with its encoder."""
        return ((name, self[owner]) for name, owner in self._owners.items())
