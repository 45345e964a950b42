"""The place of each patch in its frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Of patches `[…]`, int64: the patch's row and column in its frame, and the frame's rows and columns."""

    row: Tensor
    column: Tensor
    rows: Tensor
    columns: Tensor
    item: Tensor
    """The number of the item in its row; of padding, the number of items."""
    time: Tensor
    """The number of the frame in its item."""
    items: int
    """Items of a row at most; at least one."""
    frame: Tensor | None
    """A number that the patches of one frame share, and no others of the row; None where a row is a frame."""

    def windows(self, side: int) -> Tensor:
        """A number that the patches of one window of side × side patches share, and no others of the row."""
        window = self.row // side * (self.columns // side + 1) + self.column // side
        return window if self.frame is None else window + self.frame * (2 * self.row.shape[-1] + 2)


def places(grids: Tensor, patches: int, merge: int, temporal: int = 1) -> Places:
    """The places of a row's patches, in the order of `cut`; padding lies at place 0 of a frame of its own.

    Args:
        grids: `[batch, items, 3]`, as encoders get them.
        patches: patches of a row, padding included.
    """
    batch, items, _ = grids.shape
    ends = grids.prod(-1).cumsum(-1)
    at = torch.arange(patches, device=grids.device).expand(batch, -1).contiguous()
    item = torch.searchsorted(ends, at, right=True) if items else torch.zeros_like(at)
    grid = torch.cat((grids, grids.new_full((batch, 1, 3), merge)), 1).gather(1, item[..., None].expand(-1, -1, 3))
    number = (at - F.pad(ends, (1, 0)).gather(1, item)).where(item < items, 0)
    rows, columns = grid[..., 1], grid[..., 2]
    block, inner = number // (merge * merge * temporal), number % (merge * merge * temporal)
    group, block = block // (rows * columns // merge**2), block % (rows * columns // merge**2)
    time, inner = group * temporal + inner // merge**2, inner % merge**2
    across = columns // merge
    row, column = block // across * merge + inner // merge, block % across * merge + inner % merge
    return Places(row, column, rows, columns, item, time, max(items, 1), item * (patches + 1) + time)
