"""The modules of the encoder: a vision transformer and its connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train_kit.model import Linear

from .places import Places, places
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
        self.connector = Connector(config, dim)

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        """`[batch, patches, features]` and `[batch, items, 3]` to `[batch, vectors, dim]`."""
        block = self.temporal * self.merge**2
        # At least one block, so that all parameters have gradients where no row has an item.
        values = _padded(values, self.side**2 * self.temporal if self.side else block)
        features = self._of_squares(values) if self.side else self._of_any(values, grids)
        batch, patches, dim = features.shape
        merged: Tensor = self.connector(features.reshape(batch, patches // block, block * dim))
        return merged

    def _of_squares(self, values: Tensor) -> Tensor:
        """Encode frames of side × side patches, each as a row of its own."""
        batch, patches, _ = values.shape
        frames = values.reshape(-1, self.side**2, values.shape[-1])
        one = values.new_tensor([[[1, self.side, self.side]]], dtype=torch.int64)
        where = places(one, self.side**2, self.merge)
        features: Tensor = self.vision(frames, Places(where.row, where.column, where.rows, where.columns))
        return features.reshape(batch, patches, -1)

    def _of_any(self, values: Tensor, grids: Tensor) -> Tensor:
        features: Tensor = self.vision(values, places(grids, values.shape[1], self.merge, self.temporal))
        return features

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard and recompute one by one."""
        return tuple(f"vision.layers.{index}" for index in self.vision.layers)

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        frame = self.side**2 or patches
        return self.vision.flops(patches, frame) + self.connector.flops(patches // (self.temporal * self.merge**2))


class Connector(nn.Module):
    """The features of neighbouring patches, side by side, to one vector of the model's width."""

    def __init__(self, config: Image.Config, dim: int) -> None:
        super().__init__()
        width = config.dim * config.merge**2
        self.first = Linear(width, dim, bias=True, std=config.std)
        self.second = Linear(dim, dim, bias=True, std=config.std) if config.connector == "mlp" else None

    def forward(self, x: Tensor) -> Tensor:
        """`[…, block · dim]` to `[…, model's dim]`."""
        x = self.first(x)
        return x if self.second is None else self.second(F.gelu(x))

    def flops(self, vectors: int) -> int:
        return 2 * vectors * sum(one.weight.numel() for one in (self.first, self.second) if one is not None)


def _padded(values: Tensor, unit: int) -> Tensor:
    """With patches of zeros at the end, to a multiple of `unit` and at least one."""
    patches = values.shape[1]
    missing = max(-(-patches // unit), 1) * unit - patches
    return F.pad(values, (0, 0, 0, missing)) if missing else values
