"""Predicted costs of encoding items."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ...modalities import Encoder, Grid, Modality, encoders_of, flops_of

_WIDTH = 1024
"""Of features, where the model that takes them is not at hand: a connector's last projection is a small part."""


class ItemCosts:
    """Operations of a forward pass of the encoder, by modality and grid; see `flops_of`.

    Args:
        modalities: by name.
    """

    def __init__(self, modalities: Mapping[str, Modality]) -> None:
        self._modalities = dict(modalities)
        self._known: dict[tuple[str, Grid], float] = {}

    def __call__(self, modality: str, grid: Grid) -> float:
        key = modality, grid
        if key not in self._known:
            self._known[key] = float(flops_of(self._encoders[modality], grid))
        return self._known[key]

    def __getstate__(self) -> dict[str, object]:
        """Leave out what was built: a process that reads rows asks for no cost."""
        return {"_modalities": self._modalities, "_known": {}}

    @cached_property
    def _encoders(self) -> dict[str, Encoder]:
        import torch

        with torch.device("meta"):
            return encoders_of(self._modalities, _WIDTH)
