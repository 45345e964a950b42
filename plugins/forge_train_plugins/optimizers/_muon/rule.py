"""Muon's update of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from forge_train_kit.optim import Kept

from .newton_schulz import Coefficients, orthogonalise

Scale = Literal["rms", "spectral"]


class Orthogonal:
    """The momentum with all its singular values near one (an `UpdateRule`)."""

    keeps: Mapping[str, Kept] = {}

    def __init__(self, *, coefficients: Coefficients, steps: int, dtype: torch.dtype, eps: float, scale: Scale) -> None:
        self.coefficients, self.steps, self.dtype, self.eps, self.scale = coefficients, steps, dtype, eps, scale

    def factor(self, rows: int, columns: int) -> float:
        """`rms`: updates have the root mean square of AdamW's, about 0.2 (arXiv:2502.16982, eq. 4); `spectral`: they
        change the root mean square of a layer's outputs alike whatever its shape."""
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "rms" else math.sqrt(max(1.0, rows / columns))

    def direction(self, momentum: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return orthogonalise(momentum, coefficients=self.coefficients, steps=self.steps, dtype=self.dtype, eps=self.eps)
