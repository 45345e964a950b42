"""Tensors that are not in memory, as functions of stored ones: each knows its shape, and which ranges of which other
tensors it needs for a range of itself. Nothing is read before `read`, and then only those ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from forge_train.store.shards import Box, sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
Shape = tuple[int, ...]
Fetch = Callable[[str, Box], "Tensor"]
"""Reads a range of a stored tensor."""


def along(box: Box, dim: int, start: int, stop: int) -> Box:
    """A range, with one dimension replaced."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])


@dataclass(frozen=True, eq=False)
class View:
    """A tensor that is not in memory."""

    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        """The ranges of other tensors that a non-empty range of this one needs."""
        raise NotImplementedError

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        """A range, made from the tensors that it needs."""
        raise NotImplementedError

    def places(self, box: Box, out: Tensor) -> list[Tensor]:
        """The parts of `out` that the needed ranges are copied to; empty if the values are computed from them."""
        return []


def read(view: View, box: Box, fetch: Fetch) -> Tensor:
    """A range of a view. It may share memory with the result of `fetch`, and need not be contiguous."""
    if 0 in (shape := sizes(box)):
        import torch

        return torch.empty(shape, dtype=view.dtype)
    if isinstance(view, Stored):
        return fetch(view.name, box)
    return view.make(box, [read(inner, part, fetch) for inner, part in view.needs(box)])


def write(view: View, box: Box, out: Tensor, fetch: Fetch) -> None:
    """Read a range of a view into memory of its shape, of any dtype. Pieces to be joined are copied directly to their
    places, without an intermediate copy of the whole."""
    if 0 in out.shape:
        return
    places = [] if isinstance(view, Stored) else view.places(box, out)
    for (inner, part), place in zip(view.needs(box) if places else [], places, strict=True):
        write(inner, part, place, fetch)
    if not places:
        out.copy_(read(view, box, fetch))


def reads(view: View, box: Box) -> Iterator[tuple[str, Box]]:
    """The ranges of stored tensors that `read` fetches."""
    if 0 in sizes(box):
        return
    if isinstance(view, Stored):
        yield view.name, box
        return
    for inner, part in view.needs(box):
        yield from reads(inner, part)


@dataclass(frozen=True, eq=False)
class Stored(View):
    """A tensor in a file."""

    name: str


@dataclass(frozen=True, eq=False)
class Filled(View):
    """The same value everywhere."""

    value: float

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return []

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        import torch

        return torch.full(sizes(box), self.value, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class Joined(View):
    """Pieces, concatenated along a dimension."""

    dim: int
    pieces: tuple[tuple[View, int, int], ...]
    """Each is a tensor and its range in that dimension."""

    @classmethod
    def of(cls, pieces: Iterable[tuple[View, int, int]], dim: int) -> Joined:
        pieces = tuple(pieces)
        first, length = pieces[0][0], sum(stop - start for _, start, stop in pieces)
        return cls((*first.shape[:dim], length, *first.shape[dim + 1 :]), first.dtype, dim, pieces)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        found: list[tuple[View, Box]] = []
        (low, high), at = box[self.dim], 0
        for view, start, stop in self.pieces:
            first, last = max(low, at), min(high, at + stop - start)
            if first < last:
                found.append((view, along(box, self.dim, first - at + start, last - at + start)))
            at += stop - start
        return found

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        import torch

        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def places(self, box: Box, out: Tensor) -> list[Tensor]:
        lengths = [sizes(part)[self.dim] for _, part in self.needs(box)]
        return [*out.split(lengths, self.dim)]  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Unsqueezed(View):
    """A tensor with one more dimension, of size 1."""

    inner: View
    dim: int

    @classmethod
    def of(cls, inner: View, dim: int) -> Unsqueezed:
        return cls((*inner.shape[:dim], 1, *inner.shape[dim:]), inner.dtype, inner, dim)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.inner, (*box[: self.dim], *box[self.dim + 1 :]))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return parts[0].unsqueeze(self.dim)

    def places(self, box: Box, out: Tensor) -> list[Tensor]:
        return [out.select(self.dim, 0)]


@dataclass(frozen=True, eq=False)
class Selected(View):
    """One index of a dimension, which disappears."""

    inner: View
    dim: int
    index: int

    @classmethod
    def of(cls, inner: View, dim: int, index: int) -> Selected:
        return cls((*inner.shape[:dim], *inner.shape[dim + 1 :]), inner.dtype, inner, dim, index)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.inner, (*box[: self.dim], (self.index, self.index + 1), *box[self.dim :]))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return parts[0].squeeze(self.dim)

    def places(self, box: Box, out: Tensor) -> list[Tensor]:
        return [out.unsqueeze(self.dim)]


@dataclass(frozen=True, eq=False)
class Transposed(View):
    """A tensor with two dimensions swapped."""

    inner: View
    dims: tuple[int, int]

    @classmethod
    def of(cls, inner: View, dims: tuple[int, int]) -> Transposed:
        return cls(_swapped(inner.shape, *dims), inner.dtype, inner, dims)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.inner, _swapped(box, *self.dims))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return parts[0].transpose(*self.dims)

    def places(self, box: Box, out: Tensor) -> list[Tensor]:
        return [out.transpose(*self.dims)]


def _swapped(items: tuple[T, ...], one: int, other: int) -> tuple[T, ...]:
    changed = list(items)
    changed[one], changed[other] = items[other], items[one]
    return tuple(changed)


@dataclass(frozen=True, eq=False)
class Reordered(View):
    """Another order within each block of a dimension: position `j` of the block holds index `order[j]`."""

    inner: View
    dim: int
    order: tuple[int, ...]

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        low, high = self._blocks(box)
        return [(self.inner, along(box, self.dim, low, high))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        import torch

        low, _ = self._blocks(box)
        block = len(self.order)
        wanted = (at - at % block + self.order[at % block] - low for at in range(*box[self.dim]))
        return parts[0].index_select(self.dim, torch.tensor([*wanted], dtype=torch.long))

    def _blocks(self, box: Box) -> tuple[int, int]:
        """The range of all blocks that overlap a range."""
        (low, high), block = box[self.dim], len(self.order)
        return low // block * block, -(-high // block) * block


@dataclass(frozen=True, eq=False)
class Converted(View):
    """The same values in another dtype."""

    inner: View

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.inner, box)]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return parts[0].to(self.dtype)
