"""Auxiliary losses (load balance, z-loss) that arise somewhere inside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_scales: list[Tensor | float] = [1.0]
"""The last is that of the step under way. Backward passes run in autograd's threads, which see no context variable."""


@contextmanager
def loss_scaling(scale: Tensor | float) -> Iterator[None]:
    """Set the factor under which the losses of this step enter the gradients."""
    _scales.append(scale)
    try:
        yield
    finally:
        _scales.pop()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.shape, ctx.dtype, ctx.device = scale, value.shape, value.dtype, value.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale, options = ctx.scale, {"dtype": ctx.dtype, "device": ctx.device}
        # A number is written by a kernel: copying it would wait for the device.
        scale = scale.to(**options) if isinstance(scale, Tensor) else torch.full((), scale, **options)
        return gradients[0], scale.expand(ctx.shape), None


def attach_loss(x: Tensor, value: Tensor) -> Tensor:
    """Return `x` unchanged, and add `value` to the step's loss for the gradients.

    The step divides `value` by T, the tokens of the global batch: the elements of `inputs`, over all micro-batches and
    ranks, whether their labels are masked or not. So `value` must be a sum over the tokens that this call computes, and
    then weighs the same however the batch is split and whatever is masked. A module that makes more or fewer tokens
    than `inputs` has (image patches, pooling) takes the mean over its own, times the elements of `inputs`.

    Args:
        x: any tensor on the way to the loss.
        value: 0-dim; what it is computed from gets its gradient. The logged loss does not include it.
    """
    return _Attach.apply(x, value, _scales[-1])  # type: ignore[no-any-return,no-untyped-call]
