"""Closed forms: memory, work and traffic of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .candidates import Candidate
from .composing import Point
from .laws import Laws, get
from .points import Kinds
from .schedules import Schedule
from .variants import Variant


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank."""

    parameters: float
    optimizer: float
    peak: float


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind along some axes in a step of a rank."""

    kind: str
    axes: str
    ranks: int
    calls: float
    held: float
    """Bytes that go in, or come out, whichever is more."""

    @property
    def bytes(self) -> float:
        """Bytes that the rank sends, as `planning.communication.Collective.sent` counts them."""
        if self.kind == "send":
            return self.held
        return (2.0 if self.kind == "all_reduce" else 1.0) * self.held * (self.ranks - 1) / self.ranks


class Forms(Laws):
    """Closed forms of one configuration."""

    def memory(self, c: Candidate) -> Memory:
        """The fullest rank of a candidate."""
        kinds, schedule = Kinds.of(c.variant, self.points.options), self.schedule(c)
        shared = self._is_shared(kinds, c)
        state, update = self._states(kinds)
        top, end = ([self._number(kinds, c, name, per) for per in ("unit", "rest")] for name in ("top", "end"))
        buffers = self._point(self.points.base).of("buffers", self.points.composer.repetitions)
        found = []
        spread = (c.shards, c.expert_shards) if shared else (1, 1)
        for one in self.cut.holdings(schedule):
            held = self._held(c.tp, c.ep, c.etp, spread, one.entries)
            own = self._loose(c.tp, c.ep, c.etp, one.entries)
            gradients = held * self._gradients(kinds)
            moments = [
                more + unit[0] * one.repeats + unit[1] * kept + rest[0] * own + (rest[1] if one.head else top[0][1])
                for (unit, rest), kept, more in ((top, one.flying, 0.0), (end, one.repeats, gradients))
            ]
            optimizer = state * held
            peak = held + buffers + optimizer + max(*moments, update * held)
            found.append(Memory(held, optimizer, peak))
        return max(found, key=lambda one: one.peak)

    def schedule(self, c: Candidate) -> Schedule | None:
        """The candidate's schedule, which no other choice changes."""
        if c.pp == 1:
            return None
        base = self.points.variant(self.points.base, {})
        return self.schedules.get(Variant((("pp", c.variant.of("pp")), *base.choices)), c.pp, c.accumulation)

    def flops(self, c: Candidate) -> float:
        """Of a micro-batch, on the rank with most."""
        kinds, schedule = Kinds.of(c.variant, self.points.options), self.schedule(c)
        unit, rest = (sum(self._number(kinds, c, "flops", per)) for per in ("unit", "rest"))
        return max(unit * one.repeats + rest * one.head for one in self.cut.holdings(schedule))

    def sent(self, c: Candidate) -> list[Sent]:
        """Collectives of a step, on a rank of the stage with most units."""
        kinds, schedule = Kinds.of(c.variant, self.points.options), self.schedule(c)
        units = max(one.repeats for one in self.cut.holdings(schedule))
        ends = 1.0 if schedule is None else 0.5
        found = list(self._data_sent(kinds, c, units, ends))
        for axis, apart in {"tp": c.cp, "cp": c.tp, "ep": c.cp}.items():
            if c.sizes[axis] > 1:
                found += self._token_sent(kinds, c, axis, apart, units, ends)
        if schedule is not None:
            each = self.hidden * c.micro_batch / c.cp / c.tp
            borders = max(schedule.crossings)
            found.append(Sent("send", "pp", 2, borders * c.accumulation, borders * c.accumulation * each))
        return found

    def _data_sent(self, kinds: Kinds, c: Candidate, units: float, ends: float) -> list[Sent]:
        own = Kinds(kinds.data, self.points.base.others)
        found = []
        if c.shards > 1 or c.dp_replicate > 1:
            once, twice = self._point(own), self._point(own, accumulation=2)
            shrunk = {per: self._share(per, c.tp, c.ep, c.etp) for per in ("unit", "rest")}
            for kind, axes in _keys(once):
                if axes == "dp_shard":
                    calls, held = (
                        self._grown(once, twice, f"{w} {kind} {axes}", c, units, ends, shrunk if w == "held" else None)
                        for w in ("calls", "held")
                    )
                    across = "dp_shard × cp" if c.cp > 1 else "dp_shard"
                    if c.shards > 1:
                        found.append(Sent(kind, across, c.shards, calls, held))
                    if c.dp_replicate > 1 and kind in ("reduce_scatter", "all_reduce"):
                        found.append(Sent("all_reduce", "dp_replicate", c.dp_replicate, calls, held / c.shards))
        return found

    def _grown(
        self, once: Point, twice: Point, name: str, c: Candidate, units: float, ends: float,
        shrunk: Mapping[str, float] | None,
    ) -> float:  # fmt: skip
        """A number of a step with the candidate's micro-batches: some collectives come with each, others once."""
        total = 0.0
        for per, times in (("unit", units), ("rest", ends)):
            one, two = (get(point, per, name) for point in (once, twice))
            total += times * (one + (c.accumulation - 1) * (two - one)) * (shrunk[per] if shrunk else 1.0)
        return total

    def _token_sent(self, kinds: Kinds, c: Candidate, axis: str, apart: int, units: float, ends: float) -> list[Sent]:
        own = Kinds(self.points.base.data, kinds.others)
        point = self._point(own, tuple(sorted({"dp_shard": 2, axis: 2}.items())))
        found = []
        for kind, axes in _keys(point):
            if axes == axis:
                calls = c.accumulation * (
                    point.unit.get(f"calls {kind} {axes}", 0.0) * units
                    + point.rest.get(f"calls {kind} {axes}", 0.0) * ends
                )
                held = (
                    point.unit.get(f"held {kind} {axes}", 0.0) * units
                    + point.rest.get(f"held {kind} {axes}", 0.0) * ends
                )
                found.append(Sent(kind, axis, c.sizes[axis], calls, held * c.micro_batch * c.accumulation / apart))
        return found


@cache
def _keys_of(names: tuple[str, ...]) -> list[tuple[str, str]]:
    keys = [name.split(" ", 2)[1:] for name in names if name.startswith("held ")]
    return [(kind, axes) for kind, axes in keys]


def _keys(point: Point) -> list[tuple[str, str]]:
    return _keys_of(tuple(point.rest))
