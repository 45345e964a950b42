"""Numbers of any layout, from a few rehearsed points of a short model.

A number of a point is a sum of a part that goes with the weights of a rank, and a part that goes with its tokens. Two
micro-batches tell them apart. Weights of any layout are counted from their shapes. What goes with tokens follows
a + b/n along an axis of n ranks, such as activations that tensor parallelism splits in part; the points with 1 and 2
ranks tell a and b, and axes multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from .candidates import LAYERS, Candidate
from .composing import Point
from .points import Kinds, Points
from .schedules import Schedules
from .stages import Cut
from .weights import Weights

PAIR = (("dp_shard", 2),)
"""The layout that others are compared with: two ranks that share weights."""
ALONE: tuple[tuple[str, int], ...] = ()
TWO = {
    axis: tuple(sorted({"dp_shard": 2, axis: 2, **more}.items()))
    for axis, more in {"tp": {}, "cp": {}, "ep": {}, "etp": {"tp": 2}}.items()
}
"""Axis → a pair with two ranks along it, too. Experts are split by `etp` along `tp`."""
SENDING = {**TWO, "ep": (("dp_shard", 4), ("ep", 2))}
"""The same for collectives, which are named by their ranks: those of `ep` must not be those of `dp_shard`."""
SMALL = 0.01
"""Share of the weights' part below which the tokens' part is rounding."""


WeightsOf = Callable[[int, int, int], Weights]
"""tp, ep and etp → the parameters of a rank before data parallelism."""


class Split(NamedTuple):
    """A number by what it goes with."""

    weights: float
    tokens: float


class Laws:
    """Laws by which the numbers of one configuration depend on a layout.

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
            "_fixed",
            "_retained",
            "_data",
            "_share",
            "_shards",
            "_states",
            "_gradients",
            "_unsharded",
            "_sizes",
            "_held",
            "_loose",
            "_ends",
            "rows_left",
        ):
            setattr(self, name, cache(getattr(self, name)))

    # -- points -----------------------------------------------------------------------------------

    def _point(self, kinds: Kinds, sizes: tuple[tuple[str, int], ...] = PAIR, **more: int) -> Point:
        return self.points.at(kinds, sizes, **more)

    def _split(self, kinds: Kinds, name: str, per: str) -> Split:
        """A number of a pair of ranks, per unit or for the rest."""
        base = self.points.base
        one = get(self._point(base), per, name)
        weights = 2 * one - get(self._point(base, micro_batch=2), per, name)
        own = get(self._point(Kinds(base.data, kinds.others)), per, name)
        return Split(weights, own - weights)

    def _law(self, kinds: Kinds, name: str, per: str, axis: str) -> float:
        """Share of what goes with tokens that is not divided along an axis."""
        own = Kinds(self.points.base.data, kinds.others)
        split = self._split(own, name, per)
        if abs(split.tokens) < SMALL * abs(split.weights):
            return 0.0
        two, sizes = get(self._point(own, TWO[axis]), per, name), dict(TWO[axis])
        shrunk = self._share(per, **{one: sizes.get(one, 1) for one in LAYERS if one != "cp"})
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
        """The part that grows with tokens, for a micro-batch of one sequence."""
        found = self._split(kinds, name, per).tokens
        for axis, size in (("tp" if etp == 1 else "etp", tp), ("cp", cp), ("ep", ep)):
            if size > 1 and found:
                kept = self._law(kinds, name, per, axis)
                found *= max(kept + (1 - kept) / size, 0.0)
        return found

    def _data(self, kinds: Kinds, name: str, per: str, several: bool) -> float:
        """The change of the weights' part by another way of data parallelism; zero where nothing is shared."""
        base = self.points.base
        if several and kinds.data == base.data:
            return 0.0
        own = self._point(Kinds(kinds.data, base.others), PAIR if several else ALONE)
        return get(own, per, name) - get(self._point(base), per, name)

    def _retained(self, kinds: Kinds, name: str, per: str, several: bool) -> float:
        """The difference that several micro-batches in a step make to the weights' part."""
        own, sizes = Kinds(kinds.data, self.points.base.others), PAIR if several else ALONE
        one, two = self._point(own, sizes), self._point(own, sizes, accumulation=2)
        return get(two, per, name) - get(one, per, name)

    def _number(self, kinds: Kinds, c: Candidate, name: str, per: str) -> tuple[float, float]:
        """The parts of weights and of tokens of a candidate."""
        several = c.shards * c.dp_replicate > 1
        weights = self._fixed(kinds, name, per, several, c.tp, c.ep, c.etp)
        if c.accumulation > 1 and (name == "top" or (name == "end" and self._unsharded(kinds))):
            retained = self._retained(kinds, name, per, several) * self._share(per, c.tp, c.ep, c.etp)
            shared = name == "top" and several and not self._unsharded(kinds) and self._shards(kinds)
            weights += retained * 2 / c.shards if shared else retained
        return weights, c.micro_batch * self._tokens(kinds, name, per, c.tp, c.cp, c.ep, c.etp)

    def _fixed(self, kinds: Kinds, name: str, per: str, several: bool, tp: int, ep: int, etp: int) -> float:
        """The part of weights for a single micro-batch."""
        weights = self._split(kinds, name, per).weights + self._data(kinds, name, per, several)
        return weights * self._share(per, tp, ep, etp)

    def _unsharded(self, kinds: Kinds) -> bool:
        """Return True if whole gradients wait for the last micro-batch."""
        point = self._point(Kinds(kinds.data, self.points.base.others), accumulation=2)
        return point.of("unsharded", self.points.composer.repetitions) > 0

    def _is_shared(self, kinds: Kinds, c: Candidate) -> bool:
        """Return True if a candidate's parameters are sharded at rest."""
        return c.shards > 1 and self._shards(kinds)

    def _shards(self, kinds: Kinds) -> bool:
        own = Kinds(kinds.data, self.points.base.others)
        pair = self._point(own).of("parameters", self.points.composer.repetitions)
        return pair < 0.75 * self.weights(1, 1, 1).bytes

    def _gradients(self, kinds: Kinds) -> float:
        """Bytes of gradients at rest for each byte of parameters at rest."""
        point, count = self._point(Kinds(kinds.data, self.points.base.others)), self.points.composer.repetitions
        return point.of("gradients", count) / point.of("parameters", count)

    def _states(self, kinds: Kinds) -> tuple[float, float]:
        """Bytes of the optimizer, and those of its step, for each byte of parameters at rest."""
        point, count = self._point(Kinds(kinds.data, self.points.base.others)), self.points.composer.repetitions
        held = point.of("parameters", count)
        return point.of("optimizer", count) / held, point.of("update", count) / held

    def _sizes(self, tp: int, ep: int, etp: int, shards: tuple[int, int]) -> list[float]:
        return [entry.sharded(*shards) for entry in self.weights(tp, ep, etp).entries]

    def _held(self, tp: int, ep: int, etp: int, shards: tuple[int, int], entries: tuple[int, ...]) -> float:
        sizes: list[float] = self._sizes(tp, ep, etp, shards)
        return sum(sizes[at] for at in entries)

    def _loose(self, tp: int, ep: int, etp: int, entries: tuple[int, ...]) -> float:
        """Share of the weights outside of the repeating units that some entries have."""
        sizes = [one.bytes for one in self.weights(tp, ep, etp).entries]
        ends = [at for at, inside in enumerate(self.cut.repetitions) if not inside]
        return sum(sizes[at] for at in entries if at in ends) / (sum(sizes[at] for at in ends) or 1)

    def _ends(self, tp: int, ep: int, etp: int) -> float:
        """Weights outside of the repeating units over those of a unit."""
        weights: Weights = self.weights(tp, ep, etp)
        inside = sum(one.bytes for one, times in zip(weights.entries, self.cut.repetitions, strict=True) if times)
        return (weights.bytes - inside) / inside * sum(self.cut.repetitions) if inside else 0.0

    def rows_left(self, tp: int, ep: int, etp: int, shards: int) -> bool:
        """Return True if the rows of some parameter on a rank do not divide into shards."""
        weights: Weights = self.weights(tp, ep, etp)
        return any(rows % shards for entry in weights.entries for rows, _, expert, _ in entry.shapes if not expert)


def get(point: Point, per: str, name: str) -> float:
    numbers: Mapping[str, float] = getattr(point, per)
    return numbers.get(name, 0.0)
