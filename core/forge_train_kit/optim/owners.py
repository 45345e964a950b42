"""Assigns matrices to ranks: each rank gathers the full matrices that it owns, in rounds that bound its memory."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .matrices import Box, Matrix

Regions = Mapping[int, Box]
"""Global rank → its part of a parameter."""


@dataclass(frozen=True)
class Round:
    """One exchange: every rank of a group gathers the matrices that it owns in this round."""

    owned: tuple[tuple[Matrix, ...], ...]
    """The matrices to gather, by rank in the group."""


@dataclass(frozen=True)
class Exchange:
    """Matrices that a group of ranks holds together, and the rounds in which they are gathered."""

    ranks: tuple[int, ...]
    rounds: tuple[Round, ...]


def split_local(
    matrices: Sequence[Matrix], regions: Mapping[int, Regions], rank: int
) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices that this rank holds in full, and those that several ranks hold together.

    Args:
        matrices: all of them.
        regions: index of a parameter → which rank holds which part of it.
        rank: this process's.
    """
    mine, shared = [], []
    for matrix in matrices:
        holders = [holder for holder, box in regions[matrix.parameter].items() if (box & matrix.box).numel]
        if holders == [rank]:
            mine.append(matrix)
        elif len(holders) > 1:
            shared.append(matrix)
    return mine, shared


def batches(matrices: Sequence[Matrix], room: int) -> list[list[Matrix]]:
    """Batches of local matrices of equal shape, of at most `room` elements; neighbours of a stack are merged."""
    merged: list[Matrix] = []
    for matrix in matrices:
        last = merged[-1] if merged else None
        follows = last is not None and (last.parameter, last.part, last.box.rows, last.box.stack[1]) == (
            matrix.parameter,
            matrix.part,
            matrix.box.rows,
            matrix.box.stack[0],
        )
        if last is not None and follows and last.box.numel + matrix.box.numel <= room:
            box = Box((last.box.stack[0], matrix.box.stack[1]), last.box.rows, last.box.columns)
            merged[-1] = Matrix(last.parameter, box, last.part)
        else:
            merged.append(matrix)
    by_shape = sorted(merged, key=lambda matrix: matrix.box.shape[1:])
    return [
        filled
        for _, same in itertools.groupby(by_shape, key=lambda matrix: matrix.box.shape[1:])
        for filled in _filled(list(same), room)
    ]


def exchanges(shared: Sequence[Matrix], regions: Mapping[int, Regions], room: int) -> list[Exchange]:
    """The rounds of each group of ranks. Owners are balanced by the cost of their matrices (longest first)."""
    groups: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in shared:
        groups.setdefault(tuple(regions[matrix.parameter]), []).append(matrix)
    return [Exchange(ranks, _rounds(groups[ranks], len(ranks), room)) for ranks in sorted(groups)]


def _rounds(matrices: Sequence[Matrix], count: int, room: int) -> tuple[Round, ...]:
    loads = [(0, place) for place in range(count)]
    owned: list[list[Matrix]] = [[] for _ in range(count)]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        load, place = heapq.heappop(loads)
        owned[place].append(matrix)
        heapq.heappush(loads, (load + matrix.cost, place))
    bins = [_filled(own, room) for own in owned]
    return tuple(Round(tuple(map(tuple, ranks))) for ranks in itertools.zip_longest(*bins, fillvalue=()))


def _filled(matrices: Sequence[Matrix], room: int) -> list[list[Matrix]]:
    """Batches of consecutive matrices, as many as fit into the room."""
    found: list[list[Matrix]] = []
    size = 0
    for matrix in matrices:
        size += matrix.box.numel
        if found and size <= room:
            found[-1].append(matrix)
        else:
            found.append([matrix])
            size = matrix.box.numel
    return found
