"""Items as what tokens attend to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_train_kit.modalities import extras_of, vectors_of

from .ranges import item_ranges, ranges_of


class Items(nn.Module):
    """Encodes items, and says which of their vectors each token attends to.

    Args:
        encoders: modality → its encoder.
        last: whether a token attends to the last item only.
    """

    def __init__(self, encoders: Mapping[str, Any], *, last: bool) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(dict(encoders))
        self.last = last

    def forward(self, **extras: Tensor) -> dict[str, Tensor]:
        """Nothing without the extras of a modality; else

        * `features`: `[batch, vectors, dim]`, of all modalities, zeros where a row has fewer;
        * `mask`: `[batch, 1, sequence, vectors]`: 0 where a token attends to a vector, else −∞; 0 everywhere for a
          token without any, whose attention is then finite;
        * `sees`: `[batch, sequence]`, false for such a token.
        """
        features, seen = [], []
        for name, encoder in self.encoders.items():
            values, grids, places = (extras.get(one) for one in extras_of(name))
            if values is None or grids is None or places is None:
                continue
            ranges = extras.get(ranges_of(name))
            ranges = item_ranges(places, None, last=self.last) if ranges is None else ranges
            vectors = encoder(values, grids)
            item = self._items(vectors_of(encoder, grids), vectors.shape[1])
            features.append(vectors.masked_fill((item == grids.shape[1])[..., None], 0.0))
            seen.append((item[:, None] >= ranges[..., :1]) & (item[:, None] < ranges[..., 1:]))
        if not features:
            return {}
        joined, visible = torch.cat(features, 1), torch.cat(seen, 2)
        sees = visible.any(-1)
        mask = torch.zeros(visible.shape, dtype=joined.dtype, device=joined.device)
        mask.masked_fill_(~visible & sees[..., None], float("-inf"))
        return {"features": joined, "mask": mask[:, None], "sees": sees}

    @staticmethod
    def _items(counts: Tensor, vectors: int) -> Tensor:
        """The item of each vector, `[batch, vectors]`; the number of items where there is none."""
        at = torch.arange(vectors, device=counts.device)
        return (at[None, :, None] >= counts.cumsum(-1)[:, None]).sum(-1)
