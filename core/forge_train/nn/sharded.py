"""Tensors that are split over ranks."""

from __future__ import annotations

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered on every rank, with gradients; any other tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)  # one process need not import torch.distributed.tensor (0.9 s)
    return gather() if gather is not None else tensor
