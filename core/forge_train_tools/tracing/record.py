"""Trace of one step, as a rank leaves it and as all ranks' together are shown. Known without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge_train.base.strict_json import loads

Interval = tuple[float, float]
"""Seconds of the step, from and up to."""


@dataclass
class Call:
    """One collective, or one message, of a rank."""

    kind: str
    axis: str
    """The axes along which the ranks of its group differ."""
    ranks: list[int]
    """Of its group, in order; of a message, the sender and the receiver."""
    group: str
    number: int
    """Count of those of the group, or between these two, before it: equal on all ranks that take part."""
    bytes: int
    """Of what goes in, or of what comes out, whichever is more."""
    sent: float
    """Bytes that the rank sends, by the best algorithm for the kind."""
    dtype: str
    shape: list[int]
    start: float
    """Time of the call."""
    end: float
    """Time when it, or the last wait for it, had returned."""
    module: str
    phase: str
    plugin: str
    places: list[str]
    """`file:line, in function` of code that is neither torch's nor Python's own, the innermost first."""
    waits: list[Interval] = field(default_factory=list)
    """Intervals in which the host stood still for it."""

    @property
    def key(self) -> tuple[str, tuple[int, ...], str, int]:
        """Equal on all ranks that take part."""
        return ("message" if self.kind in ("send", "recv") else "", tuple(self.ranks), self.group, self.number)


@dataclass
class Segment:
    """A stretch of a rank's step in which it worked for one module."""

    start: float
    end: float
    phase: str
    """`data`, `forward`, `backward`, `recompute`, `gradients` or `update`."""
    module: str
    """Path of the innermost module; empty outside of all."""


@dataclass
class RankTrace:
    """The step of one rank; its times are seconds since the first rank began the step."""

    rank: int
    name: str
    """Its place in the layout, in words."""
    start: float
    end: float
    loss: float
    error: float
    """Seconds that its clock may be off."""
    before: list[float]
    """Seconds of the steps before."""
    segments: list[Segment]
    calls: list[Call]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> RankTrace:
        found: dict[str, Any] = loads(file.read_text(encoding="utf-8"))
        found["segments"] = [Segment(*one) for one in found["segments"]]
        found["calls"] = [Call(**{**one, "waits": [(a, b) for a, b in one["waits"]]}) for one in found["calls"]]
        return cls(**found)

    def plain(self) -> dict[str, Any]:
        """As JSON; a segment is a list, for there are many."""
        return {**asdict(self), "segments": [[*vars(one).values()] for one in self.segments]}

    @property
    def blocked(self) -> list[tuple[float, float, Call]]:
        """Intervals in which the host stood still, each with its call, in order."""
        return sorted(((a, b, call) for call in self.calls for a, b in call.waits), key=lambda one: one[:2])


@dataclass
class Trace:
    """One step of all ranks."""

    step: int
    ranks: list[RankTrace]
    device: str = "cpu"

    @classmethod
    def read(cls, folder: Path, step: int, nproc: int, device: str) -> Trace:
        """Read what the ranks left, with the first start as time 0."""
        ranks = [RankTrace.read(folder / f"rank-{rank}.json") for rank in range(nproc)]
        begin = min(one.start for one in ranks)
        for one in ranks:
            shift(one, -begin)
        return cls(step, ranks, device)

    @property
    def seconds(self) -> float:
        return max(one.end for one in self.ranks)


def shift(rank: RankTrace, by: float) -> None:
    """Move all times."""
    rank.start, rank.end = rank.start + by, rank.end + by
    timed: Iterable[Any] = (*rank.segments, *rank.calls)
    for one in timed:
        one.start, one.end = one.start + by, one.end + by
    for call in rank.calls:
        call.waits = [(a + by, b + by) for a, b in call.waits]
