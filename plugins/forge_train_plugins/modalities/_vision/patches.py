"""Sizes of images, and how they are cut into patches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def fitted(width: int, height: int, size: int, unit: int, *, keep: bool) -> tuple[int, int]:
    """The width and height that an image is resized to: multiples of `unit`, with at most size² pixels.

    With `keep` the sides are rounded; if that is too many pixels, both are divided by the same number and rounded down,
    as Qwen2-VL does (arXiv:2409.12191). A side has at least one unit.
    """
    if not keep:
        return size, size
    most = size * size
    sides = [max(unit, round(side / unit) * unit) for side in (width, height)]
    if sides[0] * sides[1] > most:
        factor = math.sqrt(width * height / most)
        sides = [max(unit, math.floor(side / factor / unit) * unit) for side in (width, height)]
        long = sides.index(max(sides))  # of a strip, whose short side has grown to one unit
        sides[long] = min(sides[long], most // sides[1 - long] // unit * unit)
    return sides[0], sides[1]


def cut(frames: NDArray[Any], patch: int, merge: int, temporal: int = 1) -> NDArray[Any]:
    """Cut `[frames, height, width, 3]` into patches, `[patches, patch · patch · 3]`.

    Blocks of merge × merge patches of `temporal` frames are contiguous: the blocks come in reading order, one group of
    frames after the other, and within a block its frames, each with its patches in reading order. A patch holds its
    pixels in reading order, each with its three colours.
    """
    count, height, width, colours = frames.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cells = frames.reshape(count // temporal, temporal, rows, merge, patch, columns, merge, patch, colours)
    # group, row, column; frame, row and column in the block; row and column in the patch, colour
    return cells.transpose(0, 2, 5, 1, 3, 6, 4, 7, 8).reshape(-1, patch * patch * colours)
