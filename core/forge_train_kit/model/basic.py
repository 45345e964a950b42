"""torch's elementary layers, with declarations of how their parameters start."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from forge_train.contract.model import Init


class Linear(nn.Linear):
    """`x Wᵀ (+ b)`: `[…, in_features]` → `[…, out_features]`.

    Args:
        std: standard deviation of the initial weights; the bias starts at zero.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.std = std

    def initial(self, name: str) -> Init:
        return Init("normal", self.std) if name == "weight" else Init("zeros")


class Embedding(nn.Embedding):
    """Rows of a table: ids `[…]` → `[…, dim]`.

    Args:
        std: standard deviation of the initial rows.
    """

    def __init__(self, vocabulary: int, dim: int, *, std: float = 0.02) -> None:
        super().__init__(vocabulary, dim)
        self.std = std

    def initial(self, name: str) -> Init:
        return Init("normal", self.std)


class RMSNorm(nn.RMSNorm):
    """`x / √(mean(x²) + eps) · weight` over the last axis, in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps=eps)

    def initial(self, name: str) -> Init:
        return Init("ones")


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by `1 + weight`, all of it in fp32. The weight starts at zero, so weight decay pulls the
    factor towards one (Gemma, arXiv:2403.08295)."""

    def initial(self, name: str) -> Init:
        return Init("zeros")

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class LayerNorm(nn.LayerNorm):
    """Mean and variance normalised over the last axis, in fp32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, dim: int, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__(dim, eps=eps, bias=bias)

    def initial(self, name: str) -> Init:
        return Init("ones" if name == "weight" else "zeros")
