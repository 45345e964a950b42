"""Tensors that are split over ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered on every rank, with gradients; any other tensor as it is."""
    if isinstance(tensor, DTensor):
        gathered: Tensor = tensor.full_tensor()
        return gathered
    return tensor
