"""Ranges of tensors, and the part of each that a rank holds. Importing this module imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""A range of a tensor: first index and end index of each dimension."""

_MOST_CUT = 6
"""Dimensions along which a tensor may be cut. A shard has 2 corners for each, all of which are compared."""


def whole(shape: tuple[int, ...]) -> Box:
    """The range that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a range."""
    return tuple(stop - start for start, stop in box)


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)


class Shard(NamedTuple):
    """A range of a tensor. Two ranks that hold the same range hold the same values."""

    name: str
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes(self.box)

    @property
    def bytes(self) -> int:
        return size_of(self.sizes, self.dtype)


def held(name: str, tensor: Tensor) -> Shard | None:
    """This rank's shard of a tensor: all of it, unless it is a DTensor. None on a rank outside its mesh."""
    if hasattr(tensor, "device_mesh") and tensor.device_mesh.get_coordinate() is None:
        return None
    from ..mesh.tensors import window  # which imports torch

    return Shard(name, window(tensor), tuple(tensor.shape), tensor.dtype)


def common(one: Box, other: Box) -> Box | None:
    """The range that two ranges share; None if there is none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(low >= high for low, high in found) else found


def within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Return the place of a range in one that contains it."""
    return tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(inner, outer, strict=True))


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """A phrase, if ranges that are not empty don't cover a tensor exactly once."""
    if any(not 0 <= low < high <= size for box in boxes for (low, high), size in zip(box, shape, strict=True)):
        return "a shard that does not lie in the tensor"
    if sum(math.prod(sizes(box)) for box in boxes) != math.prod(shape):
        return "shards that do not add up to the tensor"
    cut = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    if len(cut) > _MOST_CUT:
        return f"shards along {len(cut)} dimensions, more than the {_MOST_CUT} that can be compared"
    return "" if _covers_once(shape, boxes, cut) else "shards that overlap"


def _covers_once(shape: Sequence[int], boxes: Sequence[Box], cut: Sequence[int]) -> bool:
    """Return True if ranges cover a tensor exactly once, in time that is linear in their number.

    A range is a sum of quadrants, one for each of its corners, with alternating signs. Quadrants are linearly
    independent, so the ranges add up to the tensor exactly if the signs add up to those of its own corners.
    """
    if not cut:
        return len(boxes) <= 1
    signs = [math.prod(one) for one in product((1, -1), repeat=len(cut))]
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        for corner, sign in zip(product(*(box[dim] for dim in cut)), signs, strict=True):
            corners[corner] += sign
    corners.subtract(dict(zip(product(*((0, shape[dim]) for dim in cut)), signs, strict=True)))
    return not any(corners.values())
