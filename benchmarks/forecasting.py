"""A forecast of time and memory from a plan, with five constants, and their fit to measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from statistics import mean, median

from published import GIB, Row, sources
from rehearsing import Planned


@dataclass(frozen=True)
class Constants:
    """Everything that is fitted. A share of the time between products, for rows whose kernels are fused, came out as 1,
    and a share of the work that hides collectives as 0.98; so neither is here."""

    efficiency: float = 0.5
    """Share of the peak that products and attention reach on Hopper and Blackwell."""
    ampere: float = 0.5
    """The same on an A100, whose peak is further below what its power allows."""
    network: float = 0.8
    """Share of the links' bandwidth that collectives reach."""
    allocated: float = 1.0
    """Bytes that torch has allocated at most, of those that the plan says."""
    reserved: float = 1.0
    """The same of those that it has reserved."""


LIMITS = {"efficiency": (0.2, 1.0), "ampere": (0.2, 1.0), "network": (0.1, 1.0)}
"""Constants of time, and what they can be."""


def seconds(planned: Planned, efficiency: float, network: float, *, narrow: bool = False) -> float:
    """The time of a step.

    Args:
        planned: numbers of its plan.
        efficiency: share of the peak that products reach.
        network: share of the links' bandwidth that collectives reach.
        narrow: whether products of layers are in 8 bits, twice as fast.
    """
    products = planned.compute * (1 - planned.narrow / 2 if narrow else 1) / efficiency
    work = products + planned.memory + planned.between
    exposed = max(planned.hidden / network - work, 0.0)
    return (work + planned.blocking / network) * planned.stretch + exposed


@dataclass(frozen=True)
class Pair:
    """A measurement and its plan."""

    row: Row
    planned: Planned

    @property
    def measured(self) -> float:
        return self.row.seconds(self.planned.flops_per_token)

    def seconds(self, by: Constants) -> float:
        efficiency = by.ampere if self.row.device == "a100" else by.efficiency
        return self.row.flushes * seconds(self.planned, efficiency, by.network, narrow=self.row.precision == "fp8")

    def time_error(self, by: Constants) -> float:
        """Relative error of the forecast time."""
        return self.seconds(by) / self.measured - 1

    def memory(self, by: Constants) -> float:
        """Bytes."""
        return float(getattr(by, self.kind)) * self.planned.peak

    @property
    def kind(self) -> str:
        """The measure of memory: `allocated` or `reserved`."""
        return str(sources()[self.row.source]["memory"])

    def memory_error(self, by: Constants) -> float | None:
        """Relative error of the forecast memory; None where none was measured."""
        return None if self.row.memory_gib is None else self.memory(by) / (self.row.memory_gib * GIB) - 1


def pairs(rows: Iterable[Row], plans: Mapping[str, Planned]) -> list[Pair]:
    """The rows that have a plan."""
    return [Pair(row, plans[row.name]) for row in rows if row.name in plans and not plans[row.name].error]


def fit(some: list[Pair]) -> Constants:
    """The constants with the least mean of absolute logarithmic errors of time, and the median factors of memory.

    Constants of time move in turn, by steps that halve whenever none of them helps.
    """
    best, step = Constants(), 0.25
    for kind in ("allocated", "reserved"):
        ratios = [
            one.row.memory_gib * GIB / one.planned.peak for one in some if one.row.memory_gib and one.kind == kind
        ]
        best = replace(best, **{kind: median(ratios) if ratios else 1.0})
    least = _loss(some, best)
    while step > 1e-4:
        tried = [
            replace(best, **{name: min(max(getattr(best, name) + sign * step, low), high)})
            for name, (low, high) in LIMITS.items()
            for sign in (-1, 1)
        ]
        found = min(tried, key=lambda one: _loss(some, one))
        if (loss := _loss(some, found)) < least:
            best, least = found, loss
        else:
            step /= 2
    return best


def _loss(some: list[Pair], by: Constants) -> float:
    return mean(abs(math.log1p(one.time_error(by))) for one in some)


COUNT = len(fields(Constants))
