"""Traffic of a rank in a step, summed by kind and axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_train.compose.compose import Composition

    from .communication import Names
    from .record import Rehearsed


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one axis, or messages to a neighbour on it, in a step of one rank."""

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: float
    """Bytes that the rank sends, by the best algorithm for the kind."""
    per_node: int
    """Ranks of the group on a node; where they differ, the fewest."""

    @property
    def crosses_nodes(self) -> bool:
        return self.per_node < self.ranks


def traffic(rehearsed: Rehearsed, names: Names) -> list[Traffic]:
    """Return the traffic, most bytes first."""
    sums: dict[tuple[str, str, int, int], list[float]] = {}
    for one, times in rehearsed.sent.items():
        key = (one.kind, names.of(one.group), one.ranks, names.per_node(one.group))
        total = sums.setdefault(key, [0, 0.0])
        total[0] += times
        total[1] += times * one.sent
    found = [Traffic(kind, axis, ranks, int(n), size, near) for (kind, axis, ranks, near), (n, size) in sums.items()]
    return sorted(found, key=lambda one: -one.bytes)


def expected_bytes(composition: Composition, names: Names) -> dict[str, float]:
    """Axis → bytes, by the transforms' own count."""
    found: dict[str, float] = {}
    for axis, size in composition.expected_bytes.items():
        name = names.of_mesh(axis)
        found[name] = found.get(name, 0.0) + size
    return found
