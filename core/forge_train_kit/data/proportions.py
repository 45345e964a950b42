"""Source of the i-th sample of a mixture: a pure function of i, so that no order is stored."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from forge_train.base.errors import ConfigError

from .permutation import permute

Int64s = NDArray[np.int64]
Weights = Mapping[str, float]
"""Source → weight, 0 or more; of any sum."""

RESOLUTION = 2**20
"""Samples in the longest cycle of a mixture: weights without a common denominator below it are rounded to 1/2^20."""


class Proportions:
    """A mixture of fixed weights.

    The order is a cycle that has W samples of a source of share W / cycle, so that all counts are integers and exact at
    any index. Within it, sample k of a source has the deadline (k + u) / W with a seeded u in (0, 1), and samples come
    by deadline. A time span dt thus holds dt·W ± 1 samples of a source, and the samples of all S sources are dt·cycle
    ± S, so that any window of n samples has w·n ± (1 + w·(S - 2)) of a source of share w.

    Args:
        weights: numbered in their order.

    Raises:
        ConfigError: for weights that are no mixture, naming the source.
    """

    def __init__(self, weights: Weights, seed: int) -> None:
        self.names = tuple(weights)
        per_cycle = _integers(weights)
        self.cycle = sum(per_cycle)
        self.per_cycle = np.array(per_cycle, np.int64)
        sources = np.arange(len(per_cycle), dtype=np.int64)
        offset = (permute(sources, np.zeros_like(sources), 2**32, seed) + 0.5) / 2**32
        number = np.concatenate([np.arange(count, dtype=np.int64) for count in per_cycle])
        source = np.repeat(sources, self.per_cycle)
        order = np.argsort((number + offset[source]) / self.per_cycle[source], kind="stable")
        self._source, self._number = source[order].astype(np.int32), number[order].astype(np.int32)

    def at(self, index: Int64s) -> tuple[Int64s, Int64s]:
        """The source of each sample, and how many samples of that source come before it; `[k]` → `[k]`, `[k]`."""
        cycles, place = np.divmod(index, self.cycle)
        source = self._source[place].astype(np.int64)
        return source, cycles * self.per_cycle[source] + self._number[place]

    def counts(self, samples: int) -> Int64s:
        """Return how many of the first `samples` come from each source; `[sources]`."""
        cycles, rest = divmod(samples, self.cycle)
        return cycles * self.per_cycle + np.bincount(self._source[:rest], minlength=len(self.names))

    def index(self, source: int, number: int) -> int:
        """The index of a source's sample: the inverse of `at`."""
        cycles, rest = divmod(number, int(self.per_cycle[source]))
        return cycles * self.cycle + int(np.flatnonzero(self._source == source)[rest])


class Phases:
    """Mixtures one after the other, which count a source's samples on. The bound of `Proportions` holds within a phase.

    Args:
        phases: the index of a phase's first sample, and its weights. A source may appear in a later phase, or be absent
            from one, which is a weight of 0.

    Attributes:
        names: of the sources, in the order in which they appear.

    Raises:
        ConfigError: as of `Proportions`; for phases that don't begin at 0 or don't ascend.
    """

    def __init__(self, phases: Sequence[tuple[int, Weights]], seed: int) -> None:
        first = [index for index, _ in phases]
        if not first or first[0] != 0 or any(a >= b for a, b in pairwise(first)):
            raise ConfigError(f"the phases of a mixture begin at sample 0 and ascend, and do not begin at {first}")
        self.names = tuple(dict.fromkeys(name for _, weights in phases for name in weights))
        self._first = np.array(first, np.int64)
        self._mixtures = [
            Proportions({name: weights.get(name, 0) for name in self.names}, seed) for _, weights in phases
        ]
        lengths = [b - a for a, b in pairwise(first)]
        past = [mixture.counts(length) for mixture, length in zip(self._mixtures, lengths, strict=False)]
        self._past = np.cumsum([np.zeros(len(self.names), np.int64), *past], axis=0)

    def at(self, index: Int64s) -> tuple[Int64s, Int64s]:
        """The source of each sample, and how many samples of that source come before it; `[k]` → `[k]`, `[k]`."""
        phase = np.searchsorted(self._first, index, "right") - 1
        source, number = np.empty(len(index), np.int64), np.empty(len(index), np.int64)
        for present in np.unique(phase).tolist():
            here = phase == present
            source[here], number[here] = self._mixtures[present].at(index[here] - self._first[present])
        return source, number + self._past[phase, source]

    def counts(self, samples: int) -> Int64s:
        """Return how many of the first `samples` come from each source; `[sources]`."""
        phase = int(np.searchsorted(self._first, samples, "right")) - 1
        here: Int64s = self._past[phase] + self._mixtures[phase].counts(samples - int(self._first[phase]))
        return here


@dataclass(frozen=True)
class Recipe:
    """Recipe of a mixture.

    Args:
        weights: the index of a phase's first sample, and its weights, as in `Phases`.
        seed: of the order.
        caps: source → greatest number of its samples; a source without a cap is endless.
        samples: length of the mixture; None for no end.
        key: the section that messages name.
    """

    weights: Sequence[tuple[int, Weights]]
    seed: int
    caps: Mapping[str, int] = field(default_factory=dict)
    samples: int | None = None
    key: str = "mixture"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the sources, in the order in which they appear."""
        return Phases(self.weights, self.seed).names

    @cached_property
    def digest(self) -> str:
        """Of everything that decides the order; how many samples are needed does not."""
        decides = [[(at, list(weights.items())) for at, weights in self.weights], self.seed, sorted(self.caps.items())]
        return hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()

    def phases(self, start: int, given: Mapping[str, int]) -> tuple[Phases, str]:
        """The phases from a sample on, which is their sample 0; and why they are too short, empty where they are not.

        Args:
            start: the sample.
            given: what each source had given before it.
        """
        running = max(at for at, (first, _) in enumerate(self.weights) if first <= start)
        later = [(max(first - start, 0), weights) for first, weights in self.weights[running:]]
        every = [(first, {name: weights.get(name, 0) for name in self.names}) for first, weights in later]
        left = {name: max(cap - given.get(name, 0), 0) for name, cap in self.caps.items()}
        found, end = capped(every, left, self.seed)
        short = ""
        if self.samples is not None and end is not None and start + end < self.samples:
            short = (
                f"{self.key}.sources: all are used up to their `epochs` after {start + end:,} sequences, and the run "
                f"takes {self.samples:,}. Raise `epochs`, add a source without, or shorten the run."
            )
        return Phases(found or every, self.seed), short


def capped(
    phases: Sequence[tuple[int, Weights]], caps: Mapping[str, int], seed: int
) -> tuple[list[tuple[int, Weights]], int | None]:
    """Phases in which no source has more samples than its cap: from the sample after its last, its weight is 0.

    Args:
        caps: source → samples (those it has × epochs); a source without a cap is endless.

    Returns:
        The phases, and the index at which a phase has no source left: the mixture ends there. None if it is endless.

    Raises:
        ConfigError: as of `Phases`, and for the cap of an unknown source.
    """
    names = Phases(phases, seed).names
    if unknown := [name for name in caps if name not in names]:
        raise ConfigError(f"there is no source {unknown[0]!r} to cap; the mixture has {', '.join(names)}")
    left = dict(caps)
    done: list[tuple[int, Weights]] = []
    for (start, weights), until in zip(phases, [*(first for first, _ in phases[1:]), None], strict=True):
        while start != until:
            still = {name: weights.get(name, 0) if left.get(name, 1) > 0 else 0 for name in names}
            if not any(still.values()):
                return done, start
            done.append((start, still))
            mixture = Proportions(still, seed)
            stops = [] if until is None else [until]
            for source, name in enumerate(names):
                if name in left and still[name]:
                    stops.append(start + mixture.index(source, left[name] - 1) + 1)
            if not stops:
                break
            used = dict(zip(names, mixture.counts(min(stops) - start).tolist(), strict=True))
            left = {name: samples - used.get(name, 0) for name, samples in left.items()}
            start = min(stops)
    return done, None


def tempered(weights: Weights, temperature: float) -> dict[str, float]:
    """Weights to the power of 1 / temperature, with the sum 1: above 1, they become more alike (arXiv:1907.05019).

    Raises:
        ConfigError: for a temperature that is not above 0, and as of `Proportions`.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"the temperature of a mixture is a number above 0, and not {temperature}")
    _check(weights)
    top = max(weights.values())  # keeps powers of large weights finite
    powers = {name: (weight / top) ** (1 / temperature) for name, weight in weights.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def _integers(weights: Weights) -> list[int]:
    """Weights as integers with no common factor: exact as written in decimals where their sum is at most `RESOLUTION`,
    else rounded to that sum by largest remainders."""
    _check(weights)
    exact = [Fraction(str(weight)) for weight in weights.values()]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    common = math.gcd(*integers)
    integers = [integer // common for integer in integers]
    total = sum(integers)
    if total <= RESOLUTION:
        return integers
    rounded = [integer * RESOLUTION // total for integer in integers]
    by_remainder = sorted(range(len(integers)), key=lambda at: (-(integers[at] * RESOLUTION % total), at))
    for at in by_remainder[: RESOLUTION - sum(rounded)]:
        rounded[at] += 1
    for name, integer, kept in zip(weights, integers, rounded, strict=True):
        if integer and not kept:
            raise ConfigError(
                f"the weight of source {name!r} is {weights[name]}, less than one sample in {RESOLUTION:,} of the "
                "mixture: raise it, or leave the source out"
            )
    return rounded


def _check(weights: Weights) -> None:
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"the weight of source {name!r} is {weight}; a weight is a number, 0 or more")
    if not any(weights.values()):
        raise ConfigError(f"the weights of all sources are 0 ({', '.join(weights) or 'there is no source'})")
