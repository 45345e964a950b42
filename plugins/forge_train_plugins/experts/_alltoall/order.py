"""Sorts rows by expert and back; gradients are gathered, so they are summed in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Assignments sorted by expert; those without an expert (−1) come last."""

    rows: Tensor
    """Row → assignment (token × top_k + slot), `[tokens × top_k]`."""
    places: Tensor
    """Assignment → row, `[tokens × top_k]`; 0 for an assignment without an expert, which `valid` marks."""
    valid: Tensor
    """`[tokens, top_k]`, 1 or 0 in float32."""
    sizes: Tensor
    """Rows of each expert, `[experts]` int64."""

    @property
    def tokens(self) -> Tensor:
        """Row → token."""
        return self.rows // self.valid.shape[1]

    @classmethod
    def of(cls, experts: Tensor, count: int) -> Order:
        """Sort `experts [tokens, top_k]` without waiting for the device; an expert's rows keep the order of tokens."""
        flat = experts.flatten()
        nowhere = flat < 0
        flat = torch.where(nowhere, count, flat)
        rows = flat.argsort(stable=True)
        places = torch.empty_like(rows).index_copy(0, rows, torch.arange(len(rows), device=rows.device))
        sizes = torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add(
            0, flat, torch.ones_like(flat)
        )
        valid = (~nowhere).view_as(experts).float()
        return cls(rows, places.masked_fill(nowhere, 0), valid, sizes[:count])


class Spread(torch.autograd.Function):
    """Tokens `[tokens, dim]` → the first `count` rows, `[count, dim]`.

    Rows beyond the sizes hold tokens that are never read, and neither are their gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order, count: int) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _collect(gradients[0], ctx.order.valid, ctx.order), None, None


class Collect(torch.autograd.Function):
    """Rows → the weighted sum of each token's, `[tokens, dim]`. Rows beyond the sizes may hold anything, even NaN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return _collect(rows, weights * order.valid, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        rows, weights = ctx.saved_tensors
        order: Order = ctx.order
        factors = (weights * order.valid).flatten()[order.rows[: len(rows)]]
        to_rows = gradient.index_select(0, order.tokens[: len(rows)]) * factors.unsqueeze(1).to(gradient.dtype)
        if not len(rows):
            return to_rows, torch.zeros_like(weights), None
        products = torch.bmm(_of_tokens(rows, order), gradient.unsqueeze(2)).squeeze(2)
        return to_rows, torch.where(order.valid > 0, products, 0.0).to(weights.dtype), None


def _of_tokens(rows: Tensor, order: Order) -> Tensor:
    """`[tokens, top_k, dim]`."""
    return rows.index_select(0, order.places).view(*order.valid.shape, -1)


def _collect(rows: Tensor, factors: Tensor, order: Order) -> Tensor:
    """The sum of each token's rows, times their factors."""
    if not len(rows):
        return rows.new_zeros(len(factors), rows.shape[1])
    total = torch.bmm(factors.unsqueeze(1).to(rows.dtype), _of_tokens(rows, order)).squeeze(1)
    # A token without an expert has picked row 0, which may hold anything if no token has an expert.
    return torch.where(order.valid.any(1, keepdim=True), total, 0.0)
