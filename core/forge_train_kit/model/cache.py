"""The keys and values that a model keeps while it generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..layers import AttentionKernel, AttentionOptions


class KVCache:
    """Keys and values of one attention layer for all positions so far, in memory that is allocated once.

    The memory is allocated at the first `append`, with the dtype, device and heads of its arguments, so that
    a layer whose heads are split over ranks keeps only its own.

    Args:
        batch: sequences generated side by side.
        length: the most positions it can hold.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch = batch
        self.capacity = length
        self.length = 0
        """Positions held so far."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest positions, `[batch, sequence, kv_heads, head_dim]`; returns views of all of them.

        Raises:
            ValueError: if they do not fit.
        """
        start, end = self.length, self.length + key.shape[1]
        if end > self.capacity or key.shape[0] != self.batch:
            raise ValueError(
                f"KVCache holds {self.batch} sequences of at most {self.capacity} positions; "
                f"appending would make it {key.shape[0]} of {end}."
            )
        keys, values = self._keys, self._values
        if keys is None or values is None:
            keys = self._keys = self._allocate(key)
            values = self._values = self._allocate(value)
        keys[:, start:end] = key
        values[:, start:end] = value
        self.length = end
        return keys[:, :end], values[:, :end]

    def attend(
        self, kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Any:
        """Add the newest positions, and have a kernel attend to all; as the kernel itself."""
        return kernel(query, *self.append(key, value), options)

    def _allocate(self, like: Tensor) -> Tensor:
        return torch.empty(self.batch, self.capacity, *like.shape[2:], dtype=like.dtype, device=like.device)
