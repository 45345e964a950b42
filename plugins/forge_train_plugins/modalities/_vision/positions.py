"""Positions of patches: what is added to them, or by which angle they are rotated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge_train_kit.model import Embedding
from forge_train_kit.model.rope import powers

from .places import Places

_THETA = 10_000.0


class LearnedPositions(nn.Module):
    """A vector for each place of a grid, in reading order, after that of the class token if there is one.

    Frames of another shape see the grid interpolated bilinearly, as `F.interpolate` does with `align_corners=False`.
    """

    def __init__(self, side: int, dim: int, class_token: bool, std: float) -> None:
        super().__init__()
        self.table = Embedding(side * side + class_token, dim, std=std)
        self.side, self.before = side, int(class_token)

    def forward(self, where: Places) -> Tensor:
        """The positions of places `[…]`, `[…, dim]`."""
        if where.frame is None:
            return self._at(where.row, where.column)
        top, bottom, down = self._between(where.row, where.rows)
        left, right, over = self._between(where.column, where.columns)
        above = self._mixed(self._at(top, left), self._at(top, right), over)
        below = self._mixed(self._at(bottom, left), self._at(bottom, right), over)
        return self._mixed(above, below, down)

    def of_class(self, device: torch.device) -> Tensor:
        """The position of the class token, `[dim]`."""
        position: Tensor = self.table(torch.zeros((), dtype=torch.int64, device=device))
        return position

    def _at(self, row: Tensor, column: Tensor) -> Tensor:
        position: Tensor = self.table(row * self.side + column + self.before)
        return position

    def _between(self, index: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of an index in a side of the given size: the neighbours in the grid, and how far it is to the second."""
        place = ((index + 0.5) * (self.side / size) - 0.5).clamp(min=0)
        first = place.floor()
        return first.long(), (first.long() + 1).clamp(max=self.side - 1), (place - first)[..., None]

    @staticmethod
    def _mixed(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        return (one * (1 - share) + other * share).to(one.dtype)


class Sines(nn.Module):
    """Sines and cosines of a patch's row and column, or of its number in reading order (arXiv:1706.03762, §3.5).

    Args:
        axes: 2 for row and column, each in half of the features; 1 for the number.
    """

    frequencies: Tensor

    def __init__(self, dim: int, axes: int) -> None:
        super().__init__()
        self.width, self.axes = dim // axes, axes
        self.register_buffer("frequencies", torch.empty(self.width // 2), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the frequencies, in fp32 whatever the model was cast to."""
        if (device := self.frequencies.device).type != "meta":
            self.frequencies = (1 / powers(_THETA, self.width)).to(device)

    def forward(self, where: Places) -> Tensor:
        """Of places `[…]`, `[…, dim]`."""
        if self.axes == 2:
            return torch.cat((self.of(where.row), self.of(where.column)), -1)
        return self.of(where.row * where.columns + where.column)

    def of(self, numbers: Tensor) -> Tensor:
        """Of numbers `[…]`, `[…, dim / axes]`."""
        angles = numbers[..., None] * self.frequencies
        return torch.cat((angles.sin(), angles.cos()), -1)


class Rotary(nn.Module):
    """Angles by which queries and keys are rotated: by the row in the first half of the pairs of a head, by the column
    in the other, as in Qwen2-VL (arXiv:2409.12191)."""

    frequencies: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.width = head_dim // 2
        self.register_buffer("frequencies", torch.empty(self.width // 2), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the frequencies, in fp32 whatever the model was cast to."""
        if (device := self.frequencies.device).type != "meta":
            self.frequencies = (1 / powers(_THETA, self.width)).to(device)

    def forward(self, where: Places) -> tuple[Tensor, Tensor]:
        """cos and sin for places `[rows, patches]`, `[rows, patches, 1, head_dim / 2]`."""
        angles = torch.cat([one[..., None] * self.frequencies for one in (where.row, where.column)], -1)
        return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
