"""Views of tensors whose parts are interleaved entry by entry along a dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_train.store.shards import Box, sizes

from .views import View, along

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class EveryNth(View):
    """Every n-th index of a dimension, starting with the first."""

    inner: View
    dim: int
    first: int
    step: int

    @classmethod
    def of(cls, inner: View, dim: int, first: int, step: int) -> EveryNth:
        shape = (*inner.shape[:dim], len(range(first, inner.shape[dim], step)), *inner.shape[dim + 1 :])
        return cls(shape, inner.dtype, inner, dim, first, step)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        low, high = (self.first + self.step * at for at in (box[self.dim][0], box[self.dim][1] - 1))
        return [(self.inner, along(box, self.dim, low, high + 1))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return _from(parts[0], self.dim, 0, self.step)


@dataclass(frozen=True, eq=False)
class TakingTurns(View):
    """The first index of every part, then the second of every part, and so on."""

    dim: int
    parts: tuple[View, ...]

    @classmethod
    def of(cls, parts: tuple[View, ...], dim: int) -> TakingTurns:
        first = parts[0]
        shape = (*first.shape[:dim], first.shape[dim] * len(parts), *first.shape[dim + 1 :])
        return cls(shape, first.dtype, dim, parts)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.parts[part], along(box, self.dim, first, last)) for part, first, last in self._turns(box)]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        out = parts[0].new_empty(sizes(box))
        for place, part in zip(self.places(box, out), parts, strict=True):
            place.copy_(part)
        return out

    def places(self, box: Box, out: Tensor) -> list[Tensor]:
        low, count = box[self.dim][0], len(self.parts)
        return [_from(out, self.dim, first * count + part - low, count) for part, first, _ in self._turns(box)]

    def _turns(self, box: Box) -> Iterator[tuple[int, int, int]]:
        """Each part that a range consists of, with its own range."""
        low, high = box[self.dim]
        for part in range(len(self.parts)):
            first, last = (-(-(bound - part) // len(self.parts)) for bound in (low, high))
            if first < last:
                yield part, first, last


def _from(tensor: Tensor, dim: int, first: int, step: int) -> Tensor:
    return tensor[(slice(None),) * dim + (slice(first, None, step),)]
