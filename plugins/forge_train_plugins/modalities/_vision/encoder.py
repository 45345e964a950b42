"""The modules of the encoder: a vision transformer and its connector."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train_kit.modalities import passes_of

from .connectors import connector
from .places import places
from .transformer import VisionTransformer

if TYPE_CHECKING:
    from .borrowed import BorrowedVision
    from .section import VisionSection


def vision_model(config: VisionSection) -> VisionTransformer | BorrowedVision:
    """The encoder of a section without its connector."""
    if not config.model:
        return VisionTransformer(config)
    from .borrowed import BorrowedVision

    return BorrowedVision(config)


class VisionEncoder(nn.Module):
    """Items of each row to features of the model's width. Attention stays within a frame.

    Images of one size become rows of their own; of several sizes they stay side by side, and a mask parts them.
    """

    def __init__(self, config: VisionSection, dim: int, temporal: int | None = None) -> None:
        """
        Args:
            config: the section.
            dim: width of the features.
            temporal: neighbouring frames of a clip whose features are averaged; None for images.
        """
        super().__init__()
        self.merge, self.temporal = config.merge, temporal or 1
        self.side = config.size // config.patch if config.fit != "keep" else 0
        self.queries = config.queries
        self.vision = vision_model(config)
        self.connector = connector(config, dim, clips=temporal is not None)
        self.keeps = config.once
        """True if the vision model runs once for each item, as long as it is frozen."""
        self.once: Any = None
        """Gives the features while the vision model is frozen (`Once`)."""

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        """`[batch, patches, features]` and `[batch, items, 3]` to `[batch, vectors, dim]`."""
        # At least one block, so that all parameters have gradients where no row has an item.
        values = _padded(values, self.temporal * (self.side**2 or self.merge**2))
        known = self._is_known()
        features = self.once.features(values, grids) if known else self.encoded(values, grids, self.vision)
        means = torch.cat((grids[..., :1] // self.temporal, grids[..., 1:]), -1)
        vectors: Tensor = self.connector(features, partial(places, means, features.shape[1], self.merge))
        return vectors

    def encoded(self, values: Tensor, grids: Tensor, vision: VisionTransformer | BorrowedVision) -> Tensor:
        """The output of a vision model for padded rows, frames averaged: `[batch, patches / temporal, width]`."""
        return self._of_squares(values, vision) if self.side else self._of_any(values, grids, vision)

    def vectors(self, grids: Tensor) -> Tensor:
        """Number of feature vectors of each item."""
        patches = grids.prod(-1)
        count: Tensor = self.queries * (patches > 0) if self.queries else patches // (self.temporal * self.merge**2)
        return count

    def _of_squares(self, values: Tensor, vision: VisionTransformer | BorrowedVision) -> Tensor:
        """Frames of side × side patches, each as a row of its own."""
        batch, block, side = len(values), self.merge**2, self.side
        grouped = values.reshape(-1, side**2 // block, self.temporal, block, values.shape[-1]).transpose(1, 2)
        first = torch.full((1, 1, 3), side, device=values.device)  # of a grid whose further frames lie elsewhere
        where = replace(places(first, side**2, self.merge), frame=None)
        features: Tensor = vision(grouped.reshape(-1, side**2, values.shape[-1]), where)
        return (
            features.reshape(-1, self.temporal, side**2, features.shape[-1])
            .mean(1)
            .reshape(batch, -1, features.shape[-1])
        )

    def _of_any(self, values: Tensor, grids: Tensor, vision: VisionTransformer | BorrowedVision) -> Tensor:
        """Frames side by side."""
        features: Tensor = vision(values, places(grids, values.shape[1], self.merge, self.temporal))
        blocks = features.reshape(len(values), -1, self.temporal, self.merge**2, features.shape[-1])
        return blocks.mean(2).flatten(1, 2)

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard and recompute one by one."""
        return tuple(f"vision.{one}" for one in self.vision.units)

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches, whose features may be there already."""
        vision = 0 if self._is_known() else self.vision.flops(patches, self.side**2 or patches)
        return vision + self.connector.flops(patches // self.temporal)

    def step_flops(self, patches: int) -> int:
        """The same of a forward and a backward pass, which a frozen vision model does not have. One whose features are
        kept has neither."""
        connector = self.connector.flops(patches // self.temporal)
        passes = passes_of(self.vision)
        vision = 0 if self.keeps and passes == 1 else passes * self.vision.flops(patches, self.side**2 or patches)
        return vision + connector * passes_of(self)

    def _is_known(self) -> bool:
        return self.once is not None and bool(self.once.applies())


def _padded(values: Tensor, unit: int) -> Tensor:
    """With patches of zeros at the end, to a multiple of `unit` and at least one."""
    patches = values.shape[1]
    missing = max(-(-patches // unit), 1) * unit - patches
    return F.pad(values, (0, 0, 0, missing)) if missing else values
