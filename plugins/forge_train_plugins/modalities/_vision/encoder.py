"""The modules of the encoder: a vision transformer and its connector."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .connectors import connector
from .places import places
from .transformer import VisionTransformer

if TYPE_CHECKING:
    from ..vision import Image


class VisionEncoder(nn.Module):
    """Items of each row to features of the model's width. Attention stays within a frame.

    Images of one size become rows of their own; of several sizes they stay side by side, and a mask parts them.
    """

    def __init__(self, config: Image.Config, dim: int) -> None:
        super().__init__()
        self.merge, self.temporal = config.merge, 1
        self.side = config.size // config.patch if config.fit == "square" else 0
        self.vision = VisionTransformer(config)
        self.connector = connector(config, dim)

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        """`[batch, patches, features]` and `[batch, items, 3]` to `[batch, vectors, dim]`."""
        block = self.temporal * self.merge**2
        # At least one block, so that all parameters have gradients where no row has an item.
        values = _padded(values, self.side**2 * self.temporal if self.side else block)
        where = None if self.side else places(grids, values.shape[1], self.merge, self.temporal)
        features = self._of_squares(values) if where is None else self.vision(values, where)
        vectors: Tensor = self.connector(features, where)
        return vectors

    def _of_squares(self, values: Tensor) -> Tensor:
        """Encode frames of side × side patches, each as a row of its own."""
        batch, patches, _ = values.shape
        frames = values.reshape(-1, self.side**2, values.shape[-1])
        one = values.new_tensor([[[1, self.side, self.side]]], dtype=torch.int64)
        where = places(one, self.side**2, self.merge)
        features: Tensor = self.vision(frames, replace(where, frame=None))
        return features.reshape(batch, patches, -1)

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard and recompute one by one."""
        return tuple(f"vision.layers.{index}" for index in self.vision.layers)

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        frame = self.side**2 or patches
        return self.vision.flops(patches, frame) + self.connector.flops(patches)


def _padded(values: Tensor, unit: int) -> Tensor:
    """With patches of zeros at the end, to a multiple of `unit` and at least one."""
    patches = values.shape[1]
    missing = max(-(-patches // unit), 1) * unit - patches
    return F.pad(values, (0, 0, 0, missing)) if missing else values
