"""Ranks, named by where they lie in a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from forge_train.base.format import format_list
from forge_train.mesh.layout import Layout


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Axis → where a rank lies along it, outermost first, of the dense axes above 1; nothing where that says no
    more than the rank's number."""
    found: list[tuple[str, int]] = []
    for axis, size in reversed(layout.domain("dense").items()):
        rank, at = divmod(rank, size)
        found += [(axis, at)] if size > 1 else []
    return dict(reversed(found)) if layout.stages > 1 or len(found) > 1 else {}


def named(ranks: Collection[int], layout: Layout) -> str:
    """`ranks 2, 3 (stage 1)`: their numbers, and the coordinates that all of them share."""
    places = [coordinates(layout, rank) for rank in ranks]
    shared = {axis: at for axis, at in places[0].items() if all(place[axis] == at for place in places)}
    return f"rank{'s' * (len(ranks) > 1)} {format_list(sorted(ranks), 8)}{in_words(shared)}"


def in_words(coordinates: Mapping[str, int]) -> str:
    """` (stage 1, tp 0)`, to follow a rank's number; empty for none."""
    places = (f"{'stage' if axis == 'pp' else axis} {at}" for axis, at in coordinates.items())
    return f" ({', '.join(places)})" if coordinates else ""
