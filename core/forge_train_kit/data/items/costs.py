"""Predicted costs of encoding items."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

from ...modalities import Grid, Modality

_WIDTH = 1024
"""Of features, where the model that takes them is not at hand: a connector's last projection is a small part."""


class ItemCosts:
    """Costs of items by modality and grid: operations of a forward pass of the encoder where the encoders of all
    modalities declare them (`flops`), else numbers of patches.

    Args:
        modalities: by name.
    """

    def __init__(self, modalities: Mapping[str, Modality]) -> None:
        self._modalities = dict(modalities)
        self._known: dict[tuple[str, Grid], float] = {}

    def __call__(self, modality: str, grid: Grid) -> float:
        key = modality, grid
        if key not in self._known:
            patches, declared = math.prod(grid), self._declared
            self._known[key] = float(declared[modality](patches) if declared else patches)
        return self._known[key]

    def __getstate__(self) -> dict[str, object]:
        """Leave out what was built: a process that reads rows asks for no cost."""
        return {"_modalities": self._modalities, "_known": {}}

    @cached_property
    def _declared(self) -> dict[str, Callable[[int], float]]:
        import torch

        with torch.device("meta"):
            encoders = {name: one.encoder(_WIDTH) for name, one in self._modalities.items()}
        found = {name: flops for name, one in encoders.items() if callable(flops := getattr(one, "flops", None))}
        return found if len(found) == len(encoders) else {}
