"""Closed forms: memory, work and traffic of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from .candidates import Candidate
from .composing import AGAIN, Point
from .laws import ALONE, PAIR, SENDING, Laws, WeightsOf, get
from .points import Kinds, Points
from .schedules import Schedule, Schedules
from .stages import Cut, Holding
from .variants import Choice, Variant


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank."""

    parameters: float
    optimizer: float
    peak: float


class Counts(NamedTuple):
    """Collectives, and their bytes."""

    calls: float
    held: float


class Sent(NamedTuple):
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

    def __init__(self, points: Points, schedules: Schedules, cut: Cut, weights: WeightsOf, hidden: float) -> None:
        super().__init__(points, schedules, cut, weights, hidden)
        self._filled, self._shared = cache(self._fillings), cache(self._of_weights)
        self._sent_by_tokens, self._pipelined = cache(self._of_tokens), cache(self._with_pipeline)
        self._repeated, self._launched = cache(self._of_micro_batches), cache(self._of_kernels)
        self._buffers = cache(lambda: points.at(points.base, PAIR).of("buffers", points.composer.repetitions))

    def _with_pipeline(self, choice: Choice) -> Variant:
        return Variant((("pp", choice), *self.points.variant(self.points.base, {}).choices))

    def memory(self, c: Candidate) -> Memory:
        """The fullest rank of a candidate."""
        kinds, schedule = self.points.kinds(c.variant), self.schedule(c)
        state, update = self._states(kinds)
        (top, top_rest), (end, end_rest) = (
            [self._number(kinds, c, name, per) for per in ("unit", "rest")] for name in ("top", "end")
        )
        # What the ends keep, as a unit keeps by its weights; the rest of their part is of the unit that is at work.
        ends = min(top[0] * self._ends(c.tp, c.ep, c.etp), top_rest[0]) if top[0] > 0 else top_rest[0]
        # On a rank without the head: the unit whose backward pass runs, recomputed or not.
        inside = max(top[1], self._number(kinds, c, "inside", "rest")[1])
        buffers, grown = self._buffers(), self._gradients(kinds)
        spread = (c.shards, c.expert_shards) if self._is_shared(kinds, c) else (1, 1)
        fullest, peak = 0.0, 0.0
        for held, own, one in self._filled(c.tp, c.ep, c.etp, spread, schedule):
            working, last = (top_rest[1], end_rest[1]) if one.head else (inside, inside)
            most = max(
                top[0] * one.repeats + top[1] * one.flying + top_rest[0] - ends * (1 - own) + working,
                held * grown + (end[0] + end[1]) * one.repeats + end_rest[0] * own + last,
                update * held,
            )
            if held + buffers + state * held + most > peak:
                fullest, peak = held, held + buffers + state * held + most
        return Memory(fullest, state * fullest, peak)

    def _fillings(
        self, tp: int, ep: int, etp: int, spread: tuple[int, int], schedule: Schedule | None
    ) -> tuple[tuple[float, float, Holding], ...]:
        """Ranks that may be the fullest: bytes of parameters, share of what is outside of the units, and the rest."""
        return tuple(
            (self._held(tp, ep, etp, spread, one.entries), self._loose(tp, ep, etp, one.entries), one)
            for one in self.cut.holdings(schedule)
        )

    def schedule(self, c: Candidate) -> Schedule | None:
        """The candidate's schedule, which no other choice changes."""
        return None if c.pp == 1 else self.schedules.get(self._pipelined(c.variant.of("pp")), c.pp, c.accumulation)

    def flops(self, c: Candidate, name: str = "flops") -> float:
        """Of a micro-batch, on the rank with most; with a name, those of modules with a peak of their own."""
        kinds = self.points.kinds(c.variant)
        parts = [sum(self._number(kinds, c, name, per)) for per in ("unit", "rest")]
        if not self._recomputes(kinds):
            return self._most(c, parts)
        shares = []
        for per in ("unit", "rest"):
            again, every = (sum(self._number(kinds, c, one, per)) for one in (f"{AGAIN}flops", "flops"))
            shares.append(again / (every or 1.0))
        return self._most(c, parts, [part * share for part, share in zip(parts, shares, strict=True)])

    def between(self, c: Candidate) -> float:
        """Bytes that kernels between products read and write in a step, on the rank with most."""
        kinds, several = self.points.kinds(c.variant), c.shards * c.dp_replicate > 1
        parts, again = [], []
        for per in ("unit", "rest"):
            once, each = self._repeated(kinds.data, "between", per, several)
            tokens, twice = (
                c.accumulation * c.micro_batch * self._tokens(kinds, name, per, c.tp, c.cp, c.ep, c.etp)
                for name in ("between", f"{AGAIN}between")
            )
            parts.append((once + c.accumulation * each) * self._share(per, c.tp, c.ep, c.etp) + tokens)
            again.append(twice)
        return self._most(c, parts, again if self._recomputes(kinds) else (0.0, 0.0))

    def kernels(self, c: Candidate) -> float:
        """Kernels of a step, on the rank with most: as many for few tokens as for many."""
        kinds, several = self.points.kinds(c.variant), c.shards * c.dp_replicate > 1
        pairs = (self._launched(kinds, per, several) for per in ("unit", "rest"))
        parts, again = [once + c.accumulation * each for once, each in pairs], [0.0, 0.0]
        if self._recomputes(kinds):
            point = self._point(Kinds(self.points.base.data, kinds.others))
            again = [c.accumulation * get(point, per, f"{AGAIN}kernels") for per in ("unit", "rest")]
        return self._most(c, parts, again)

    def _most(self, c: Candidate, parts: Sequence[float], again: Sequence[float] = (0.0, 0.0)) -> float:
        """Return the sum on the rank with most, given what a unit and the ends take, and what they take once more where
        the input gradient is computed apart."""
        return max(
            parts[0] * one.repeats + parts[1] * one.head + again[0] * one.split + again[1] * one.split_head
            for one in self.cut.holdings(self.schedule(c))
        )

    def _recomputes(self, kinds: Kinds) -> bool:
        """Return True if units compute their forward pass again in each call of autograd. A pipeline then takes a whole
        backward pass for the gradients of weights, and computes the input gradient twice."""
        return get(self._point(Kinds(self.points.base.data, kinds.others)), "unit", "recomputed") > 0

    def _of_micro_batches(self, data: Choice, name: str, per: str, several: bool) -> tuple[float, float]:
        """The part of weights of a number that comes once in a step, and the part with each micro-batch."""
        kinds = Kinds(data, self.points.base.others)
        each = self._retained(kinds, name, per, several) - self._split(kinds, name, per).tokens
        return self._split(kinds, name, per).weights + self._data(kinds, name, per, several) - each, each

    def _of_kernels(self, kinds: Kinds, per: str, several: bool) -> tuple[float, float]:
        """Kernels that come once in a step, and those that come with each micro-batch."""
        base = self.points.base
        own = self._point(Kinds(kinds.data, base.others), PAIR if several else ALONE)
        each = self._retained(Kinds(kinds.data, base.others), "kernels", per, several)
        once = get(own, per, "kernels") - each
        return once, each + (
            get(self._point(Kinds(base.data, kinds.others)), per, "kernels") - get(self._point(base), per, "kernels")
        )

    def sent(self, c: Candidate) -> list[Sent]:
        """Collectives of a step, on a rank of the stage with most units."""
        kinds, schedule = self.points.kinds(c.variant), self.schedule(c)
        most = max(self.cut.holdings(schedule), key=lambda one: (one.repeats, one.split))
        units, again = most.repeats, most.split if self._recomputes(kinds) else 0.0
        ends = 1.0 if schedule is None else 0.5
        found = []
        if c.shards > 1 or c.dp_replicate > 1:
            across = "dp_shard × cp" if c.cp > 1 else "dp_shard"
            for kind, calls, held in self._shared(kinds.data, c.tp, c.ep, c.etp, units, ends, c.accumulation):
                if c.shards > 1:
                    found.append(Sent(kind, across, c.shards, calls, held))
                if c.dp_replicate > 1 and kind in ("reduce_scatter", "all_reduce"):
                    found.append(Sent("all_reduce", "dp_replicate", c.dp_replicate, calls, held / c.shards))
        for axis, apart in (("tp" if c.etp == 1 else "etp", c.cp), ("cp", c.tp), ("ep", c.cp * c.tp // c.etp)):
            if c.sizes[axis] > 1:
                times = c.micro_batch * c.accumulation / apart
                for kind, along, each, once in self._sent_by_tokens(kinds.others, axis, units, again, ends):
                    # once a step, ranks sum gradients of weights that all of them hold: not of experts that are spread
                    calls, size = once if c.ep == 1 else (0.0, 0.0)
                    calls, size = calls + c.accumulation * each.calls, size + times * each.held
                    found.append(Sent(kind, along, c.sizes[along], calls, size))
        if schedule is not None:
            sends = max(schedule.crossings) * c.accumulation
            found.append(Sent("send", "pp", 2, sends, sends * self.hidden * c.micro_batch / c.cp / c.tp))
        return found

    def _of_weights(
        self, data: Choice, tp: int, ep: int, etp: int, units: float, ends: float, accumulation: int
    ) -> list[tuple[str, float, float]]:
        """Collectives of data parallelism in a step: kind, calls, bytes. Some come with each micro-batch."""
        own = Kinds(data, self.points.base.others)
        once, twice = self._point(own), self._point(own, accumulation=2)
        found = []
        for kind in (kind for kind, axes in _keys(once) if axes == "dp_shard"):
            calls = held = 0.0
            for per, times in (("unit", units), ("rest", ends)):
                one, two = ([get(point, per, f"{what} {kind} dp_shard") for what in ("calls", "held")]
                            for point in (once, twice))  # fmt: skip
                shrunk = self._share(per, tp, ep, etp)
                calls += times * (one[0] + (accumulation - 1) * (two[0] - one[0]))
                held += times * (one[1] + (accumulation - 1) * (two[1] - one[1])) * shrunk
            found.append((kind, calls, held))
        return found

    def _of_tokens(
        self, others: tuple[tuple[str, Choice], ...], axis: str, units: float, again: float, ends: float
    ) -> list[tuple[str, str, Counts, Counts]]:
        """Collectives along an axis: kind, axis, those with each micro-batch of one sequence, and those once a step,
        which matter where there are experts."""
        each, one = self._point(Kinds(self.points.base.data, others), SENDING[axis]), Point({}, {})
        two = one
        if any(expert for entry in self.weights(1, 1, 1).entries for _, _, expert, _ in entry.shapes):
            one, two = (self._point(self.points.base, SENDING[axis], accumulation=count) for count in (1, 2))
        along = ("tp", "etp") if axis == "etp" else (axis,)
        found = []
        for kind, axes in _keys(each):
            if axes in along:
                step, micro = [], []
                for what in ("calls", "held"):
                    name = f"{what} {kind} {axes}"
                    own_count, once, twice = (
                        units * get(point, "unit", name) + ends * get(point, "rest", name) for point in (each, one, two)
                    )
                    step.append(max(2 * once - twice, 0.0))
                    micro.append(own_count - step[-1] + again * get(each, "unit", AGAIN + name))
                found.append((kind, axes, Counts(*micro), Counts(*step)))
        return found


@cache
def _keys_of(names: tuple[str, ...]) -> list[tuple[str, str]]:
    keys = [name.split(" ", 2)[1:] for name in names if name.startswith("held ")]
    return [(kind, axes) for kind, axes in keys]


def _keys(point: Point) -> list[tuple[str, str]]:
    return _keys_of(tuple(point.rest))
