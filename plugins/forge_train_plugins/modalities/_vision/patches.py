"""Sizes of images, and how they are cut into patches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def kept(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """The width and height that an image is resized to if it keeps its aspect: multiples of `unit`.

    The sides are rounded. If that is too many pixels, or too few, both are divided by the same number and rounded down,
    or up, as Qwen2-VL does (arXiv:2409.12191). A side has at least one unit.
    """
    rounded = [round(side / unit) * unit for side in (width, height)]
    if rounded[0] * rounded[1] < least:
        factor = math.sqrt(least / (width * height))
        return math.ceil(width * factor / unit) * unit, math.ceil(height * factor / unit) * unit
    sides = [max(unit, side) for side in rounded]
    if sides[0] * sides[1] > most:
        factor = math.sqrt(width * height / most)
        sides = [max(unit, math.floor(side / factor / unit) * unit) for side in (width, height)]
        long = sides.index(max(sides))  # of a strip, whose short side has grown to one unit
        sides[long] = min(sides[long], most // sides[1 - long] // unit * unit)
    return sides[0], sides[1]


def cut(frames: NDArray[Any], patch: int, merge: int, temporal: int = 1, *, together: bool = False) -> NDArray[Any]:
    """Cut `[frames, height, width, 3]` into patches, `[patches, patch · patch · 3]`.

    Blocks of merge × merge patches of `temporal` frames are contiguous: the blocks come in reading order, one group of
    frames after the other, and within a block its frames, each with its patches in reading order. A patch holds its
    pixels in reading order, each with its three colours; `together`, those of its group's frames, one after the other.
    """
    count, height, width, colours = frames.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cells = frames.reshape(count // temporal, temporal, rows, merge, patch, columns, merge, patch, colours)
    if together:
        return cells.transpose(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(-1, temporal * patch * patch * colours)
    # group, row, column; frame, row and column in the block; row and column in the patch, colour
    return cells.transpose(0, 2, 5, 1, 3, 6, 4, 7, 8).reshape(-1, patch * patch * colours)
