"""The encoder of images in tiles, and its connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train_kit.modalities import passes_of
from forge_train_kit.model import Linear

from .transformer import TileTransformer

if TYPE_CHECKING:
    from .section import TileSection


class TileEncoder(nn.Module):
    """Images of each row to features of the model's width: for each tile, its class token and its patches.

    Args:
        config: the section.
        dim: width of the features.
    """

    def __init__(self, config: TileSection, dim: int) -> None:
        super().__init__()
        self.tiles, self.patches = config.tiles, (config.size // config.patch) ** 2
        self.side = config.size // config.patch
        self.vision = TileTransformer(config)
        self.connector = Linear(config.dim * (1 + len(config.outputs)), dim, bias=True, std=config.std)

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        """`[batch, patches, features]` and `[batch, items, 3]` to `[batch, vectors, dim]`."""
        batch, patches, features = values.shape
        # At least one tile of one image, so that all parameters have gradients where no row has an item.
        tiles = max(-(-patches // self.patches), 1)
        values = F.pad(values, (0, 0, 0, tiles * self.patches - patches)).view(batch, tiles, self.patches, features)
        grids = grids if grids.shape[1] else F.pad(grids, (0, 0, 0, 1))
        counts = grids.prod(-1) // self.patches
        ends = counts.cumsum(-1)
        starts = ends - counts
        slot = torch.arange(self.tiles, device=values.device)
        tile = (starts[..., None] + slot).clamp(max=tiles - 1)
        seen = self.vision(values, tile, slot < counts[..., None], self._kinds(grids))
        at = torch.arange(tiles, device=values.device).expand(batch, -1).contiguous()
        item = torch.searchsorted(ends, at, right=True).clamp(max=grids.shape[1] - 1)
        place = item * self.tiles + (at - starts.gather(1, item)).clamp(0, self.tiles - 1)
        rows = torch.arange(batch, device=values.device)[:, None]
        vectors: Tensor = self.connector(seen.flatten(1, 2)[rows, place])
        return vectors.flatten(1, 2)

    def vectors(self, grids: Tensor) -> Tensor:
        """Number of feature vectors of each item."""
        patches: Tensor = grids.prod(-1)
        return patches + patches // self.patches

    def _kinds(self, grids: Tensor) -> Tensor:
        """The number of each item's arrangement in `arrangements`, counted from 1; 0 where there is no item."""
        rows, columns = grids[..., 1] // self.side, grids[..., 2] // self.side
        fewer = torch.arange(1, self.tiles + 1, device=grids.device)
        return ((fewer < rows[..., None]) * (self.tiles // fewer)).sum(-1) + columns

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard and recompute one by one."""
        stacks = {"layers": self.vision.layers, "global_layers": self.vision.global_layers}
        return tuple(f"vision.{name}.{index}" for name, layers in stacks.items() for index in layers)

    def flops(self, patches: int) -> int:
        """Operations of a forward pass over an item of so many patches."""
        vectors = patches + patches // self.patches
        return self.vision.flops(patches) + 2 * vectors * self.connector.weight.numel()

    def step_flops(self, patches: int) -> int:
        """The same of a forward and a backward pass, which a frozen vision model does not have."""
        vision = self.vision.flops(patches)
        return vision * passes_of(self.vision) + (self.flops(patches) - vision) * passes_of(self)
