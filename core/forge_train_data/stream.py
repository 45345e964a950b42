"""The global sequence of samples, a pure function of (seed, index): no list, no state but a number."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .documents import Int64
from .permutation import permute
from .rows import Arrays, Rows

HELD_OUT_SEED = 0x1E57
"""Of the order of held-out rows, the same for all runs, so that a few batches are a fair sample and stay the same."""


class Stream(Protocol):
    """Samples by index, without end."""

    digest: str
    """Of everything that decides what sample i is, but the seed."""

    def places(self, index: Int64) -> Int64:
        """Where samples come from, `[k]` → `[k, …]`: asked for many samples at a time."""
        ...

    def read(self, places: Int64) -> Arrays:
        """The samples of some places."""
        ...


class Ordered:
    """One source, epoch after epoch: sample i is row i mod n of epoch i // n, each in an order of its own.

    Args:
        rows: of the source.
        seed: of the order; None keeps the rows'.
        fixed: whether every epoch has the order of epoch 0.
    """

    def __init__(self, rows: Rows, seed: int | None, *, fixed: bool = False) -> None:
        self.rows, self._seed, self._fixed = rows, seed, fixed
        self.digest = rows.digest

    def places(self, index: Int64) -> Int64:
        count = self.rows.count
        epoch, row = index // count, index % count
        if self._seed is None:
            return row
        return permute(row, np.zeros_like(epoch) if self._fixed else epoch, count, self._seed)

    def read(self, places: Int64) -> Arrays:
        return self.rows.read(places)
