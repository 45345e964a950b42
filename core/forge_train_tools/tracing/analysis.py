"""Shares of a traced step, collectives by axis, who waited for whom, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .record import Call, Interval, RankTrace, Trace

WORTH_TELLING = 0.05
"""Share of a step from which a wait is told in words."""


@dataclass(frozen=True)
class Stall:
    """A rank stood still because another one had not called yet."""

    rank: int
    behind: int
    """The rank that called last."""
    start: float
    end: float
    call: Call


@dataclass(frozen=True)
class Share:
    """Seconds of a rank's step."""

    rank: int
    compute: float
    communication: float
    """Standing still while bytes moved."""
    waiting: float
    """Standing still for a rank that had not called yet."""


@dataclass(frozen=True)
class Sum:
    """Collectives of one kind along one axis, of one plugin, of one rank in the step."""

    rank: int
    kind: str
    axis: str
    plugin: str
    count: int
    bytes: int
    sent: float
    seconds: float
    """Standing still for them."""


@dataclass(frozen=True)
class Straggler:
    """A rank that another one waited for, and what it did meanwhile."""

    rank: int
    behind: int
    seconds: float
    share: float
    """Of the step."""
    module: str
    phase: str

    @property
    def sentence(self) -> str:
        """`Rank 1 waited 38% of the step for rank 0, in layers.1 (forward).`"""
        where = f"in {self.module} ({self.phase})" if self.module else f"outside of all modules ({self.phase})"
        return f"Rank {self.rank} waited {self.share:.0%} of the step for rank {self.behind}, {where}."


@dataclass(frozen=True)
class Leg:
    """A stretch of the critical path: shorten it, and the step is shorter."""

    rank: int
    start: float
    end: float
    kind: str
    """`compute` or `communication`."""


class Analysis:
    """Findings in a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._ranks = {one.rank: one for one in trace.ranks}

    @cached_property
    def last(self) -> dict[Any, tuple[float, int]]:
        """Key of a call → when the last rank called, and which."""
        found: dict[Any, tuple[float, int]] = {}
        for rank in self.trace.ranks:
            for call in rank.calls:
                if call.kind == "recv":  # a sender waits for nobody
                    continue
                found[call.key] = max(found.get(call.key, (call.start, rank.rank)), (call.start, rank.rank))
        return found

    @cached_property
    def stalls(self) -> list[Stall]:
        """Every wait for a rank that had not called yet."""
        found = []
        for rank in self.trace.ranks:
            for a, b, call in rank.blocked:
                ready, behind = self.last.get(call.key, (a, rank.rank))
                if behind != rank.rank and ready > a:
                    found.append(Stall(rank.rank, behind, a, min(b, ready), call))
        return found

    @cached_property
    def shares(self) -> list[Share]:
        """Share of each rank's step."""
        found = []
        for rank in self.trace.ranks:
            waiting = sum(one.end - one.start for one in self.stalls if one.rank == rank.rank)
            blocked = sum(b - a for a, b, _ in rank.blocked)
            found.append(Share(rank.rank, rank.end - rank.start - blocked, blocked - waiting, waiting))
        return found

    @cached_property
    def sums(self) -> list[Sum]:
        """Collectives, summed; the most bytes first."""
        found: dict[tuple[int, str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        for rank in self.trace.ranks:
            for call in rank.calls:
                total = found[rank.rank, call.kind, call.axis, call.plugin]
                added = (1, call.bytes, call.sent, sum(b - a for a, b in call.waits))
                total[:] = [one + more for one, more in zip(total, added, strict=True)]
        sums = [Sum(*key, int(n), int(size), sent, seconds) for key, (n, size, sent, seconds) in found.items()]
        return sorted(sums, key=lambda one: (-one.bytes, one.kind, one.axis, one.plugin, one.rank))

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Ranks that others waited for, and the work they did meanwhile; the longest first."""
        found: dict[tuple[int, int], dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
        for stall in self.stalls:
            for rank, span in self._causes(stall.behind, (stall.start, stall.end), stall.rank):
                for (module, phase), seconds in self._busy(self._ranks[rank], span).items():
                    found[stall.rank, rank][module, phase] += seconds
        told = []
        for (rank, behind), modules in found.items():
            seconds = sum(modules.values())
            module, phase = max(modules, key=lambda one: modules[one])
            told.append(Straggler(rank, behind, seconds, seconds / self.trace.seconds, module, phase))
        return sorted(told, key=lambda one: -one.seconds)

    @property
    def told(self) -> list[Straggler]:
        """Those that are worth a sentence."""
        return [one for one in self.stragglers if one.share >= WORTH_TELLING]

    def _causes(self, rank: int, span: Interval, waiter: int) -> list[tuple[int, Interval]]:
        """Causes of a wait: a rank that is waited for and waits itself is none, but the one that it waits for."""
        found, at = [], span[0]
        stalls = [one for one in self.stalls if one.rank == rank and one.behind not in (rank, waiter)]
        for one in sorted(stalls, key=lambda one: one.start):
            begin, end = max(one.start, at), min(one.end, span[1])
            if end <= begin:
                continue
            found += [(rank, (at, begin)), *self._causes(one.behind, (begin, end), waiter)]
            at = end
        return [*found, (rank, (at, span[1]))]

    def _busy(self, rank: RankTrace, span: Interval) -> dict[tuple[str, str], float]:
        """Seconds in which a rank did not stand still, by module and phase."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        still = [(a, b) for a, b, _ in rank.blocked if b > span[0] and a < span[1]]
        for one in rank.segments:
            a, b = max(one.start, span[0]), min(one.end, span[1])
            if b > a:
                stood = sum(max(0.0, min(b, d) - max(a, c)) for c, d in still)
                found[one.module, one.phase] += b - a - stood
        return found

    @cached_property
    def path(self) -> list[Leg]:
        """The critical path, from the start: the chain of work and transfers that ends with the last rank."""
        at = max(self.trace.ranks, key=lambda one: one.end)
        rank, end, legs = at.rank, at.end, list[Leg]()
        waits = {one.rank: [wait for wait in one.blocked if wait[1] > wait[0]] for one in self.trace.ranks}
        while waits[rank]:
            a, b, call = waits[rank].pop()
            if b > end:
                continue
            ready, behind = self.last.get(call.key, (a, rank))
            ready = min(max(ready, a), b)
            legs += [Leg(rank, b, end, "compute"), Leg(rank, ready, b, "communication")]
            end = ready
            if ready > a and behind != rank:
                rank = behind
        legs.append(Leg(rank, min(self._ranks[rank].start, end), end, "compute"))
        return [one for one in reversed(legs) if one.end > one.start]

    def as_json(self) -> dict[str, Any]:
        """Everything that `forge trace` knows, without the segments."""
        return {
            "step": self.trace.step,
            "seconds": self.trace.seconds,
            "device": self.trace.device,
            "ranks": [
                {"rank": one.rank, "loss": one.loss, "before": one.before, "clock_error": one.error,
                 "compute": share.compute, "communication": share.communication, "waiting": share.waiting}
                for one, share in zip(self.trace.ranks, self.shares, strict=True)
            ],
            "collectives": [vars(one) for one in self.sums],
            "stragglers": [{**vars(one), "sentence": one.sentence} for one in self.stragglers],
            "calls": [
                {"rank": rank.rank, **{key: value for key, value in vars(call).items() if key != "waits"}}
                for rank in self.trace.ranks
                for call in rank.calls
            ],
            "critical_path": [vars(one) for one in self.path],
            "notes": list(dict.fromkeys(note for one in self.trace.ranks for note in one.notes)),
        }  # fmt: skip
