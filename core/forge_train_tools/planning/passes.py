"""Memory of each pass of a pipeline's rank, and its total in another order of passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from forge_train_kit.pipeline.timetable import Timetable, Work

WORKS: Mapping[str, Work] = {
    "forward": Work.FORWARD,
    "backward": Work.BACKWARD,
    "input": Work.INPUT_GRADIENT,
    "weight": Work.WEIGHT_GRADIENT,
}
"""Announcement of an executor → its work in a timetable."""
PassKey = tuple[int, Work]
"""Number of a part, and what is done with it."""


class Pass(NamedTuple):
    """A pass of a micro-batch through a part, as it was announced."""

    at: int
    """Number of memory changes before it."""
    part: int
    """Index on its rank."""
    work: Work


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank's passes."""

    takes: Mapping[PassKey, int] = field(default_factory=dict)
    """The most beyond what there was when a pass of the kind began."""
    leaves: Mapping[PassKey, tuple[int, int, int]] = field(default_factory=dict)
    """By how much there is more after it: after the first pass of the kind, after one in between, and after the last.
    The first may gather weights or allocate gradients, and the last free or reduce them."""

    def keeps(self, part: int) -> int:
        """Return the bytes that a forward pass keeps for the backward pass."""
        return max(self.leaves.get((part, Work.FORWARD), (0, 0, 0))[1], 0)

    def peak(self, timetable: Timetable, rank: int) -> int:
        """The most bytes at once, beyond those at the beginning of the step."""
        actions = timetable.actions(rank)
        total = Counter((one.part, one.work) for one in actions)
        seen: Counter[PassKey] = Counter()
        most = level = 0
        for one in actions:
            kind = (one.part, one.work)
            seen[kind] += 1
            first, middle, last = self._leaves(kind)
            most = max(most, level + self._takes(kind))
            level += last if seen[kind] == total[kind] else first if seen[kind] == 1 else middle
            most = max(most, level)
        return most

    def renumbered(self, number: Mapping[int, int]) -> Footprint:
        """The same of other parts: old number → new one."""
        return Footprint(
            {(number[part], work): size for (part, work), size in self.takes.items()},
            {(number[part], work): sizes for (part, work), sizes in self.leaves.items()},
        )

    def _takes(self, kind: PassKey) -> int:
        """Return the bytes of a pass; a backward pass of which only halves were seen takes those of the larger half."""
        return self.takes.get(kind, max((self.takes.get(half, 0) for half in _halves(kind)), default=0))

    def _leaves(self, kind: PassKey) -> tuple[int, int, int]:
        if kind in self.leaves:
            return self.leaves[kind]
        first, middle, last = (
            sum(sizes) for sizes in zip(*(self.leaves.get(half, (0, 0, 0)) for half in _halves(kind)), strict=True)
        )
        return first, middle, last


def _halves(kind: PassKey) -> list[PassKey]:
    return [(kind[0], work) for work in (Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT)]


def footprint(changes: Sequence[int], passes: Sequence[Pass], parts: Sequence[int]) -> Footprint:
    """Read from a step's changes of memory what its passes take and leave.

    Args:
        changes: in bytes, until the last backward pass has ended.
        passes: of the step, in order.
        parts: number of each part of the rank.
    """
    takes: dict[PassKey, int] = {}
    leaves: dict[PassKey, list[int]] = {}
    ends = [one.at for one in passes[1:]] + [len(changes)]
    for one, end in zip(passes, ends, strict=True):
        kind = (parts[one.part], one.work)
        levels = list(accumulate(changes[one.at : end], initial=0))
        takes[kind] = max(takes.get(kind, 0), *levels)
        leaves.setdefault(kind, []).append(levels[-1])
    return Footprint(takes, {kind: (sizes[0], _middle(sizes), sizes[-1]) for kind, sizes in leaves.items()})


def _middle(sizes: Iterable[int]) -> int:
    """Of a pass that is neither the first nor the last, if there is one."""
    first, *others = sizes
    return others[0] if others else first
