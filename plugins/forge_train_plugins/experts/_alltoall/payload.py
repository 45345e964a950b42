"""Rows as e4m3, with a scale for each 128 values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Values that share a scale (arXiv:2412.19437, §3.3.2)."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def pack(x: Tensor) -> Tensor:
    """`[rows, dim]` → one byte for each value and four for each scale, `[rows, dim + 4 · ⌈dim / 128⌉]` uint8."""
    rows, dim = x.shape
    blocks = F.pad(x.float(), (0, -dim % BLOCK)).view(rows, -(-dim // BLOCK), BLOCK)
    scales = blocks.abs().amax(-1) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    values = (blocks / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(1)[:, :dim]
    return torch.cat([values.contiguous().view(torch.uint8), scales.view(torch.uint8)], dim=1)


def unpack(packed: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The rows that `pack` was given, rounded."""
    values = packed[:, :dim].contiguous().view(torch.float8_e4m3fn).float()
    scales = packed[:, dim:].contiguous().view(torch.float32)
    blocks = F.pad(values, (0, -dim % BLOCK)).view(len(packed), -(-dim // BLOCK), BLOCK) * scales.unsqueeze(-1)
    return blocks.flatten(1)[:, :dim].to(dtype)


def rounded(x: Tensor) -> Tensor:
    """Rows as they arrive after being sent."""
    return unpack(pack(x), x.shape[1], x.dtype)


class Rounded(torch.autograd.Function):
    """Rows as they would arrive; gradients unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class RoundedGradient(torch.autograd.Function):
    """Rows unchanged; gradients as they would arrive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return rounded(gradients[0])
