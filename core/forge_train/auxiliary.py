"""Auxiliary losses (load balance, z-loss) that arise somewhere inside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# A module global, not a context variable: recompute runs forwards in autograd's own threads.
_scale: Tensor | float = 1.0


@contextmanager
def loss_scaling(scale: Tensor | float) -> Iterator[None]:
    """Set the factor under which the losses of this step enter the gradients."""
    global _scale  # noqa: PLW0603  # see above
    before, _scale = _scale, scale
    try:
        yield
    finally:
        _scale = before


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.shape, ctx.dtype, ctx.device = scale, value.shape, value.dtype, value.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = torch.as_tensor(ctx.scale, dtype=ctx.dtype, device=ctx.device)
        return gradients[0], scale.expand(ctx.shape), None


def attach_loss(x: Tensor, value: Tensor) -> Tensor:
    """Give `x` back unchanged, and add `value` to the step's loss for the gradients.

    The step's loss is a sum over tokens, divided by the tokens of the global batch. So `value` must be a sum too:
    the mean over this micro-batch's tokens times their number weighs the same however the batch is split.

    Args:
        x: any tensor on the way to the loss.
        value: 0-dim; what it is computed from gets its gradient. It does not show in the logged loss.
    """
    return _Attach.apply(x, value, _scale)  # type: ignore[no-any-return,no-untyped-call]
