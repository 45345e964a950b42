"""Closed forms: memory, work and traffic of any layout, from a few rehearsed points of a short model.

A number of a point is a sum of a part that goes with the weights of a rank, and a part that goes with its tokens. Two
micro-batches tell them apart. Weights of any layout are counted from their shapes. What goes with tokens follows
a + b/n along an axis of n ranks, such as activations that tensor parallelism splits in part; the points with 1 and 2
ranks tell a and b, and axes multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from .candidates import Candidate
from .composing import Point
from .points import Kinds, Points
from .schedules import Schedule, Schedules
from .stages import Cut
from .weights import Weights

PAIR = (("dp_shard", 2),)
"""The layout that others are compared with: two ranks that share weights."""
ALONE: tuple[tuple[str, int], ...] = ()
SMALL = 0.01
"""Share of the weights' part below which the tokens' part is rounding."""
TOKENS = ("tp", "cp", "ep", "etp")
"""Axes along which collectives carry tokens."""


WeightsOf = Callable[[int, int, int], Weights]
"""tp, ep and etp → the parameters of a rank before data parallelism."""


class Split(NamedTuple):
    """A number by what it goes with."""

    weights: float
    tokens: float


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


class Forms:
    """Closed forms of one configuration.

    Args:
        points: rehearsed when first needed.
        schedules: of pipelines.
        cut: gives the entries of each stage.
        weights: of a rank, before data parallelism.
        hidden: bytes of the hidden states of one sequence.
    """

    def __init__(self, points: Points, schedules: Schedules, cut: Cut, weights: WeightsOf, hidden: float) -> None:
        self.points, self.schedules, self.cut, self.hidden = points, schedules, cut, hidden
        self.weights: WeightsOf = cache(weights)
        for name in (
            "_split",
            "_tokens",
            "_law",
            "_retained",
            "_data",
            "_share",
            "_states",
            "_gradients",
            "_unsharded",
            "rows_left",
        ):
            setattr(self, name, cache(getattr(self, name)))

    # -- points -----------------------------------------------------------------------------------

    def _point(self, kinds: Kinds, sizes: tuple[tuple[str, int], ...] = PAIR, **more: int) -> Point:
        return self.points.at(kinds, sizes, **more)

    def _split(self, kinds: Kinds, name: str, per: str) -> Split:
        """A number of a pair of ranks, per unit or for the rest."""
        base = self.points.base
        one = _get(self._point(base), per, name)
        weights = 2 * one - _get(self._point(base, micro_batch=2), per, name)
        own = _get(self._point(Kinds(base.data, kinds.others)), per, name)
        return Split(weights, own - weights)

    def _law(self, kinds: Kinds, name: str, per: str, axis: str) -> float:
        """Share of what goes with tokens that is not divided along an axis."""
        own = Kinds(self.points.base.data, kinds.others)
        split = self._split(own, name, per)
        if abs(split.tokens) < SMALL * abs(split.weights):
            return 0.0
        sizes = {"dp_shard": 2, axis: 2}
        two = _get(self._point(own, tuple(sorted(sizes.items()))), per, name)
        shrunk = self._share(per, *(2 if axis == one else 1 for one in ("tp", "ep", "etp")))
        return 2 * (two - split.weights * shrunk) / split.tokens - 1

    def _share(self, per: str, tp: int, ep: int, etp: int) -> float:
        """Weights that a rank of tp, ep and etp has before data parallelism, over all of them."""
        repeated = [bool(one) for one in self.cut.repetitions]

        def size(weights: Weights) -> float:
            pairs = zip(weights.entries, repeated, strict=True)
            return float(sum(entry.bytes for entry, inside in pairs if inside == (per == "unit")))

        whole = size(self.weights(1, 1, 1))
        return size(self.weights(tp, ep, etp)) / whole if whole else 1.0

    def _tokens(self, kinds: Kinds, name: str, per: str, tp: int, cp: int, ep: int, etp: int) -> float:
        """What goes with tokens, for a micro-batch of one sequence."""
        found = self._split(kinds, name, per).tokens
        for axis, size in (("tp", tp), ("cp", cp), ("ep", ep)):
            if size > 1 and found:
                kept = self._law(kinds, name, per, axis)
                found *= max(kept + (1 - kept) / size, 0.0)
        return found

    def _data(self, kinds: Kinds, name: str, per: str, several: bool) -> float:
        """What another way of data parallelism adds to the weights' part; None of it where nothing is shared."""
        base = self.points.base
        if several and kinds.data == base.data:
            return 0.0
        own = self._point(Kinds(kinds.data, base.others), PAIR if several else ALONE)
        return _get(own, per, name) - _get(self._point(base), per, name)

    def _retained(self, kinds: Kinds, name: str, per: str, several: bool) -> float:
        """What several micro-batches in a step add to the weights' part."""
        own, sizes = Kinds(kinds.data, self.points.base.others), PAIR if several else ALONE
        one, two = self._point(own, sizes), self._point(own, sizes, accumulation=2)
        return _get(two, per, name) - _get(one, per, name)

    def _number(self, kinds: Kinds, c: Candidate, name: str, per: str) -> tuple[float, float]:
        """The parts of weights and of tokens of a candidate."""
        several = c.shards * c.dp_replicate > 1
        weights = self._split(kinds, name, per).weights + self._data(kinds, name, per, several)
        if c.accumulation > 1 and name in ("top", "end"):
            retained = self._retained(kinds, name, per, several)
            if name == "top" and self._is_shared(kinds, c) and not self._unsharded(kinds):
                retained *= 2 / c.shards
            elif name == "end" and not self._unsharded(kinds):
                retained = 0.0
            weights += retained
        weights *= self._share(per, c.tp, c.ep, c.etp)
        return weights, c.micro_batch * self._tokens(kinds, name, per, c.tp, c.cp, c.ep, c.etp)

    # -- forms ------------------------------------------------------------------------------------

    def memory(self, c: Candidate) -> Memory:
        """The fullest rank of a candidate."""
        kinds, schedule = Kinds.of(c.variant, self.points.options), self.schedule(c)
        weights: Weights = self.weights(c.tp, c.ep, c.etp)
        shared = self._is_shared(kinds, c)
        state, update = self._states(kinds)
        top, end = ([self._number(kinds, c, name, per) for per in ("unit", "rest")] for name in ("top", "end"))
        ends = [at for at, inside in enumerate(self.cut.repetitions) if not inside]
        loose = sum(weights.entries[at].bytes for at in ends) or 1
        buffers = self._point(self.points.base).of("buffers", self.points.composer.repetitions)
        found = []
        for rank in self.cut.ranks_of_interest(c, schedule):
            parts = self.cut.parts(schedule, rank)
            entries = [at for part in parts for at in part]
            held = sum(
                weights.entries[at].sharded(c.shards if shared else 1, c.expert_shards if shared else 1)
                for at in entries
            )
            repeats = [sum(self.cut.repetitions[at] for at in part) for part in parts]
            flying = (
                sum(n * one for n, one in zip(repeats, schedule.in_flight[rank], strict=True))
                if schedule
                else repeats[0]
            )
            has_end = not schedule or self.cut.last in entries
            own = sum(weights.entries[at].bytes for at in entries if at in ends) / loose
            gradients = held * self._gradients(kinds)
            moments = [
                more + unit[0] * sum(repeats) + unit[1] * kept + rest[0] * own + (rest[1] if has_end else top[0][1])
                for (unit, rest), kept, more in ((top, flying, 0.0), (end, sum(repeats), gradients))
            ]
            optimizer = state * held
            peak = held + buffers + optimizer + max(*moments, update * held)
            found.append(Memory(held, optimizer, peak))
        return max(found, key=lambda one: one.peak)

    def _states(self, kinds: Kinds) -> tuple[float, float]:
        """Bytes of the optimizer, and those of its step, for each byte of parameters at rest."""
        point, count = self._point(Kinds(kinds.data, self.points.base.others)), self.points.composer.repetitions
        held = point.of("parameters", count)
        return point.of("optimizer", count) / held, point.of("update", count) / held

    def rows_left(self, tp: int, ep: int, etp: int, shards: int) -> bool:
        """Return True if the rows of some parameter on a rank do not divide into shards."""
        weights: Weights = self.weights(tp, ep, etp)
        return any(rows % shards for entry in weights.entries for rows, _, expert, _ in entry.shapes if not expert)

    def _gradients(self, kinds: Kinds) -> float:
        """Bytes of gradients at rest for each byte of parameters at rest."""
        point, count = self._point(Kinds(kinds.data, self.points.base.others)), self.points.composer.repetitions
        return point.of("gradients", count) / point.of("parameters", count)

    def _unsharded(self, kinds: Kinds) -> bool:
        """Whether whole gradients wait for the last micro-batch."""
        point = self._point(Kinds(kinds.data, self.points.base.others), accumulation=2)
        return point.of("unsharded", self.points.composer.repetitions) > 0

    def _is_shared(self, kinds: Kinds, c: Candidate) -> bool:
        """Whether a way of data parallelism shards parameters at rest."""
        if c.shards == 1:
            return False
        own = Kinds(kinds.data, self.points.base.others)
        pair = self._point(own).of("parameters", self.points.composer.repetitions)
        return pair < 0.75 * self.weights(1, 1, 1).bytes

    def schedule(self, c: Candidate) -> Schedule | None:
        return self.schedules.get(c.variant, c.pp, c.accumulation) if c.pp > 1 else None

    def flops(self, c: Candidate) -> float:
        """Of a micro-batch, on the rank with most."""
        kinds, schedule = Kinds.of(c.variant, self.points.options), self.schedule(c)
        unit, rest = (sum(self._number(kinds, c, "flops", per)) for per in ("unit", "rest"))
        most = 0.0
        for rank in range(schedule.ranks if schedule else 1):
            entries = [at for part in self.cut.parts(schedule, rank) for at in part]
            here = unit * sum(self.cut.repetitions[at] for at in entries)
            most = max(most, here + (rest if self.cut.last in entries else 0.0))
        return most

    def sent(self, c: Candidate) -> list[Sent]:
        """Collectives of a step, on a rank of the stage with most units."""
        kinds, schedule = Kinds.of(c.variant, self.points.options), self.schedule(c)
        units = max(
            sum(self.cut.repetitions[at] for part in self.cut.parts(schedule, rank) for at in part)
            for rank in range(schedule.ranks if schedule else 1)
        )
        ends = 1.0 if schedule is None else 0.5
        found = list(self._data_sent(kinds, c, units, ends))
        for axis in ("tp", "cp", "ep"):
            if c.sizes[axis] > 1:
                found += self._token_sent(kinds, c, axis, units, ends)
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
            one, two = (_get(point, per, name) for point in (once, twice))
            total += times * (one + (c.accumulation - 1) * (two - one)) * (shrunk[per] if shrunk else 1.0)
        return total

    def _token_sent(self, kinds: Kinds, c: Candidate, axis: str, units: float, ends: float) -> list[Sent]:
        own = Kinds(self.points.base.data, kinds.others)
        point = self._point(own, tuple(sorted({"dp_shard": 2, axis: 2}.items())))
        apart = {"tp": c.cp, "cp": c.tp, "ep": c.cp}[axis]
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


def _get(point: Point, per: str, name: str) -> float:
    numbers: Mapping[str, float] = getattr(point, per)
    return numbers.get(name, 0.0)


@cache
def _keys_of(names: tuple[str, ...]) -> list[tuple[str, str]]:
    keys = [name.split(" ", 2)[1:] for name in names if name.startswith("held ")]
    return [(kind, axes) for kind, axes in keys]


def _keys(point: Point) -> list[tuple[str, str]]:
    return _keys_of(tuple(point.rest))
