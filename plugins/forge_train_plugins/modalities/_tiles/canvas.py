"""The arrangement of tiles that an image gets, and its size there."""

from __future__ import annotations

import math


def arrangements(tiles: int) -> list[tuple[int, int]]:
    """Rows and columns of all rectangles of at most so many tiles; the number of one, counted from 1, is its kind."""
    every = range(1, tiles + 1)
    return [(rows, columns) for rows in every for columns in every if rows * columns <= tiles]


def arranged(width: int, height: int, size: int, tiles: int) -> tuple[int, int]:
    """Rows and columns of tiles for an image: those that enlarge it least, or else shrink it least; of equals, the
    first, which has the fewest.

    Args:
        width: of the image, in pixels.
        height: of the image.
        size: side of a tile.
        tiles: at most.
    """
    scales = {one: min(one[0] * size / height, one[1] * size / width) for one in arrangements(tiles)}
    larger = [scale for scale in scales.values() if scale >= 1]
    wanted = min(larger) if larger else max(scales.values())
    return next(one for one, scale in scales.items() if scale == wanted)


def placed(width: int, height: int, size: int, arrangement: tuple[int, int]) -> tuple[int, int]:
    """Width and height of the image on its tiles: it keeps its aspect, and grows only to fill a tile's side."""
    rows, columns = arrangement
    wide, high = min(max(width, size), columns * size), min(max(height, size), rows * size)
    if wide / width < high / height:
        return wide, min(math.floor(height * (wide / width)) or 1, high)
    return min(math.floor(width * (high / height)) or 1, wide), high
