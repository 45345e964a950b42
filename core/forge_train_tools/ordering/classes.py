"""Classes of ranks that call the same, found from a few of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_train.mesh.layout import Layout

from .record import MESSAGES, Called, Group, position

Label = str | int
Labels = tuple[Label, ...]
"""A label along each axis."""
FIRST, BETWEEN, LAST = "first", "between", "last"


class Places:
    """The places of ranks along the axes of a layout, and what they are called.

    Along most axes a rank is the first, the last or between these; along those that cut the model, it has a number.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.domains = {"dense": layout.domain("dense"), "expert": layout.domain("expert")}
        found = dict(self.domains["dense"])
        if layout.ep > 1:
            found |= {axis: size for axis, size in self.domains["expert"].items() if axis not in found}
        self.sizes = {axis: size for axis, size in found.items() if size > 1}
        self.stages = tuple(axis for axis in layout.dividing("layers") if axis in self.sizes)

    def of(self, rank: int) -> dict[str, int]:
        """Axis → place along it, of all domains."""
        return position(self.domains["expert"], rank) | position(self.domains["dense"], rank)

    def labels(self, rank: int, numbered: Iterable[str] = ()) -> dict[str, Label]:
        """Axis → label.

        Args:
            rank: which one.
            numbered: axes whose ranks are numbered, beside those that cut the model.
        """
        at, exact = self.of(rank), {*self.stages, *numbered}
        return {axis: at[axis] if axis in exact else _label(at[axis], size) for axis, size in self.sizes.items()}

    def members(self, rank: int, group: Group) -> list[int]:
        """The ranks of a group that a rank is in."""
        found, step = [rank], 1
        for axis, size in reversed([*self.domains[group.domain].items()]):
            if axis in group.axes:
                found = [one + (to - one // step % size) * step for one in found for to in range(size)]
            step *= size
        return found

    def peer(self, rank: int, steps: Iterable[tuple[str, int]]) -> int:
        """The rank that lies so many steps away along axes of the dense domain."""
        away, stride = dict(steps), 1
        for axis, size in reversed([*self.domains["dense"].items()]):
            at = rank // stride % size
            rank += ((at + away.get(axis, 0)) % size - at) * stride
            stride *= size
        return rank


def _label(at: int, size: int) -> Label:
    return FIRST if at == 0 else LAST if at == size - 1 else BETWEEN


def words(labels: Mapping[str, Label], stages: Sequence[str] = ("pp",)) -> str:
    """Labels as words: `stage 1, the first along tp`."""
    found = []
    for axis, label in labels.items():
        if isinstance(label, int):
            found.append(f"{'stage' if axis in stages else axis} {label}")
        else:
            found.append(
                f"between the first and the last along {axis}" if label == BETWEEN else f"{label} along {axis}"
            )
    return ", ".join(found) or "every rank"


@dataclass(frozen=True)
class RankClass:
    """Ranks that call the same."""

    labels: Mapping[str, Label]
    ranks: int
    first: int
    """The lowest of them."""
    calls: Sequence[Called]


def cover(found: Mapping[Labels, int]) -> list[Labels]:
    """A few of the labels that ranks have, among which each two labels of two axes that occur together do so again.

    Chosen one after the other, each with the most pairs that are new.
    """
    pairs = {labels: set(_pairs(labels)) for labels in found}
    left = set().union(*pairs.values())
    chosen: list[Labels] = []
    while left or not chosen:
        best = max(pairs, key=lambda labels: (len(pairs[labels] & left), -found[labels]))
        left -= pairs[best]
        chosen.append(best)
    return chosen


def _pairs(labels: Labels) -> Iterable[tuple[tuple[int, Label], ...]]:
    placed = list(enumerate(labels))
    return itertools.combinations(placed, min(2, len(placed)))


class Classes:
    """Ranks that are rehearsed, and the axes along which they differ.

    A few of each stage are rehearsed. If they differ, the axes that explain it are looked for, fewest first, and tried
    with others: ranks that have the same labels along these, and other labels along all others.

    Args:
        places: of the layout.
        rehearse: gives the calls of a rank.
    """

    def __init__(self, places: Places, rehearse: Callable[[int], Sequence[Called]]) -> None:
        self.places = places
        self._rehearse = rehearse
        self._first: dict[Labels, int] = {}
        for rank in range(places.layout.world):
            self._first.setdefault(tuple(places.labels(rank).values()), rank)
        self._axes = list(places.sizes)
        self._inner = [at for at, axis in enumerate(self._axes) if axis not in places.stages]
        self.known: dict[Labels, tuple[Called, ...]] = {}
        self._same: dict[tuple[Called, ...], tuple[Called, ...]] = {}
        self._explained: dict[Labels, tuple[int, ...]] = {}

    def found(self) -> list[RankClass]:
        """The classes, ranks that pass messages along an axis one by one along it."""
        for labels in cover(self._first):
            self._see(labels)
        for stage in {self._stage(labels) for labels in self._first}:
            self._explained[stage] = self._explain(stage)
        numbered = {
            axis for calls in self.known.values() for one in calls if one.kind in MESSAGES for axis, _ in one.peer
        }
        telling = {self._axes[at] for found in self._explained.values() for at in found} | numbered
        kept = [axis for axis in self._axes if axis in telling or axis in self.places.stages]
        classes: dict[Labels, RankClass] = {}
        for rank in range(self.places.layout.world):
            exact = self.places.labels(rank, numbered)
            key = tuple(exact[axis] for axis in kept)
            one = classes.get(key)
            if one is None:
                labels = tuple(self.places.labels(rank).values())
                one = RankClass({axis: exact[axis] for axis in kept}, 0, rank, self._of(labels))
            classes[key] = RankClass(one.labels, one.ranks + 1, one.first, one.calls)
        return list(classes.values())

    def _see(self, labels: Labels) -> None:
        if labels not in self.known:
            calls = tuple(self._rehearse(self._first[labels]))
            self.known[labels] = self._same.setdefault(calls, calls)

    def _stage(self, labels: Labels) -> Labels:
        return tuple(label for axis, label in zip(self._axes, labels, strict=True) if axis in self.places.stages)

    def _of(self, labels: Labels) -> tuple[Called, ...]:
        axes = self._explained[self._stage(labels)]
        return next(calls for one, calls in self.known.items() if self._alike(one, labels, axes))

    def _alike(self, one: Labels, other: Labels, axes: Sequence[int]) -> bool:
        return self._stage(one) == self._stage(other) and all(one[at] == other[at] for at in axes)

    def _explain(self, stage: Labels) -> tuple[int, ...]:
        """The axes whose labels tell what a rank of a stage calls."""
        there = [labels for labels in self._first if self._stage(labels) == stage]
        tried: tuple[int, ...] | None = None
        while True:
            known = [labels for labels in there if labels in self.known]
            axes = next(axes for axes in self._choices() if self._tell(axes, known))
            if axes == tried:
                return axes
            tried = axes
            for kind in {tuple(labels[at] for at in axes): labels for labels in there}.values():
                seen = [labels for labels in known if self._alike(labels, kind, axes)]
                if not seen:
                    self._see(kind)
                elif axes:
                    alike = (labels for labels in there if self._alike(labels, kind, axes))
                    self._see(max(alike, key=lambda one: min(_distance(one, other) for other in seen)))

    def _choices(self) -> Iterable[tuple[int, ...]]:
        for count in range(len(self._inner) + 1):
            yield from itertools.combinations(self._inner, count)

    def _tell(self, axes: Sequence[int], known: Sequence[Labels]) -> bool:
        by: dict[Labels, tuple[Called, ...]] = {}
        return all(self.known[one] is by.setdefault(tuple(one[at] for at in axes), self.known[one]) for one in known)


def _distance(one: Labels, other: Labels) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
