"""Items among the tokens: what fusions share in which a feature vector takes a position of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..modalities import FusionSpec, extras_of
from .declare import TensorStyle
from .encoders import Encoders
from .kinds import Kinds, Note, piece_of_places


class Enter(nn.Module):
    """Encodes the items, and puts their feature vectors at their places.

    Args:
        encoders: modality → its encoder.
    """

    def __init__(self, encoders: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoders = Encoders(encoders)
        self.sequence_piece = (0, 1)
        """Index of this rank's piece of each sequence, and number of pieces; set by tensor parallelism."""

    def forward(self, hidden: Tensor, **extras: Tensor) -> Tensor:
        """`[batch, sequence, dim]` → the same. A batch without the extras of a modality has none of its items."""
        for name, encoder in self.encoders.each():
            values, grids, places = (extras.get(one) for one in extras_of(name))
            if values is None or grids is None or places is None:
                continue
            features = encoder(values, grids).to(hidden.dtype)
            mine = piece_of_places(places, self.sequence_piece)[..., None]
            found = features.gather(1, mine.clamp(min=0).expand(-1, -1, features.shape[-1]))
            hidden = torch.where(mine >= 0, found, hidden)
        return hidden


class InSequence(nn.Module):
    """A fusion that changes hidden states before the first layer only.

    Args:
        spec: of the model.
        kinds: for modules of the layers that compute by modality; they are told what a batch holds.
    """

    def __init__(self, spec: FusionSpec, kinds: Kinds | None = None) -> None:
        super().__init__()
        self.enter: Any = Enter(spec.encoders)
        self.layers = nn.ModuleDict({} if kinds is None else {str(one): Note(kinds) for one in range(spec.layers)})

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the encoders."""
        return tuple(self._units())

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Every rank encodes all items, and keeps what stands in its piece of the sequence."""
        return {} if self.enter is None else {"enter": "sequence"}

    def flops_per_token(self, sequence: int) -> int:
        """Nothing for a token; what an item costs depends on its size (`flops_of_items`)."""
        return 0

    def _units(self) -> Iterator[str]:
        for name, encoder in self.enter.encoders.items() if self.enter is not None else ():
            yield from (f"enter.encoders.{name}.{unit}" for unit in getattr(encoder, "units", ()))
