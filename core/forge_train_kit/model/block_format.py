"""Values in 4 or 8 bits, with a scale for each block of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["nf4", "int8"]
_OFFSET = 0.9677083
"""Probability of NF4's outermost level: the middle between 1 − 1/30 and 1 − 1/32 (arXiv:2305.14314, appendix E)."""


@cache
def nf4_levels() -> tuple[float, ...]:
    """The 16 values of NormalFloat4: quantiles of a normal distribution, scaled to [-1, 1], one of them 0."""
    sides = [[NormalDist().inv_cdf(_OFFSET - (_OFFSET - 0.5) * at / n) for at in range(n)] for n in (8, 7)]
    above, below = ([one / side[0] for one in side] for side in sides)
    return tuple(sorted([*above, 0.0, *(-one for one in below)]))


@dataclass(frozen=True)
class BlockFormat:
    """A way to hold values.

    Args:
        kind: codes of 4 bits (NormalFloat4, arXiv:2305.14314) or of 8 (evenly spaced).
        block: values of a row that share a scale, the largest of their magnitudes.
        double: whether scales are held in 8 bits too, with two fp32 numbers for each row.
    """

    kind: Kind
    block: int = 64
    double: bool = False

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Encode `[…, columns]`: codes, their scales, and, of double ones, the middle and the span of each row's."""
        blocks = torch.unflatten(values.detach().float(), -1, (-1, self.block))
        scales = blocks.abs().amax(-1)
        kept: tuple[Tensor, ...] = (scales,)
        if self.double:
            middle = scales.mean(-1, keepdim=True)
            span = (scales - middle).abs().amax(-1, keepdim=True)
            eighths = ((scales - middle) / _divisor(span) * 127).round().to(torch.int8)
            kept = (eighths, middle, span)
            scales = self._scales(kept)
        shares = (blocks / _divisor(scales).unsqueeze(-1)).flatten(-2)
        if self.kind == "int8":
            return (shares.mul(127).round().clamp(-127, 127).to(torch.int8), *kept)
        levels = _levels(values.device)
        codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        return (codes[..., ::2] << 4 | codes[..., 1::2], *kept)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The values, `[…, columns]`."""
        codes, scales = parts[0], self._scales(parts[1:])
        if self.kind == "int8":
            shares = codes.float() / 127
        else:
            shares = _levels(codes.device)[torch.stack([codes >> 4, codes & 15], -1).int()].flatten(-2)
        blocks = torch.unflatten(shares, -1, (-1, self.block)) * scales.unsqueeze(-1)
        return blocks.flatten(-2).to(dtype)

    def empty(self, shape: Sequence[int], device: Any) -> tuple[Tensor, ...]:
        """Parts for values of a shape, unfilled."""
        *rows, columns = shape
        blocks = columns // self.block
        codes = (columns // 2, torch.uint8) if self.kind == "nf4" else (columns, torch.int8)
        scales = (
            [(blocks, torch.int8), (1, torch.float32), (1, torch.float32)] if self.double else [(blocks, torch.float32)]
        )
        return tuple(torch.empty((*rows, size), dtype=dtype, device=device) for size, dtype in (codes, *scales))

    def _scales(self, kept: Sequence[Tensor]) -> Tensor:
        if not self.double:
            return kept[0]
        eighths, middle, span = kept
        return middle + eighths.float() / 127 * span


def _divisor(scales: Tensor) -> Tensor:
    """A block of zeros is divided by 1."""
    return torch.where(scales == 0, 1.0, scales)


def _levels(device: torch.device) -> Tensor:
    return torch.tensor(nf4_levels(), dtype=torch.float32, device=device)
