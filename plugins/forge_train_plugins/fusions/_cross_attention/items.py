"""Items as what tokens attend to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train_kit.modalities import extras_of, vectors_of
from forge_train_kit.model import Encoders

from .ranges import item_ranges, ranges_of


class Items(nn.Module):
    """Encodes items, and says which of their vectors each token attends to.

    Args:
        encoders: modality → its encoder.
        attend: items that a token attends to: all, last or run.
    """

    def __init__(self, encoders: Mapping[str, Any], attend: str) -> None:
        super().__init__()
        self.encoders = Encoders(encoders)
        self.attend = attend

    def forward(self, **extras: Tensor) -> dict[str, Tensor]:
        """Nothing without the extras of a modality; else

        * `features`: `[batch, vectors, dim]`, of all modalities, zeros where a row has fewer;
        * `mask`: `[batch, 1, sequence, vectors]`: 0 where a token attends to a vector, else −∞; 0 everywhere for a
          token without any, whose attention is then finite;
        * `sees`: `[batch, sequence]`, false for such a token.
        """
        features, seen = [], []
        for name, encoder in self.encoders.each():
            values, grids, places = (extras.get(one) for one in extras_of(name))
            if values is None or grids is None or places is None:
                continue
            ranges = self._ranges(name, extras)
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

    def seen(self, **extras: Tensor) -> tuple[int, int]:
        """The number of vectors in a batch, and of pairs of a token and a vector that it attends to."""
        vectors = pairs = 0
        for name, encoder in self.encoders.each():
            grids = extras.get(extras_of(name)[1])
            if grids is not None:
                ends = F.pad(vectors_of(encoder, grids).cumsum(-1), (1, 0))
                first, last = self._ranges(name, extras).unbind(-1)
                vectors += int(ends[:, -1].sum())
                pairs += int((ends.gather(1, last) - ends.gather(1, first)).sum())
        return vectors, pairs

    def _ranges(self, name: str, extras: Mapping[str, Tensor]) -> Tensor:
        found = extras.get(ranges_of(name))
        return item_ranges(extras[extras_of(name)[2]], None, self.attend) if found is None else found

    @staticmethod
    def _items(counts: Tensor, vectors: int) -> Tensor:
        """The item of each vector, `[batch, vectors]`; the number of items where there is none."""
        at = torch.arange(vectors, device=counts.device)
        return (at[None, :, None] >= counts.cumsum(-1)[:, None]).sum(-1)
