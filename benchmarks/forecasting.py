"""A forecast of time and memory from a plan, with five constants, and their fit to measurements."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import mean, median
from typing import Any

from published import FOLDER, GIB, Row, models, sources
from rehearsing import Planned, is_data

from forge_train_tools.planning.clusters import Cluster, cluster

CASTS = 7 / 6
"""Bytes that dynamic scaling in 8 bits moves, over those of the three products of a layer in bf16. Each of their three
matrices is read for its largest value, read and written to be cast, and once more to be transposed: 7 bytes for each
element, where each of three products moves 2 (torchao/float8)."""
WATTS = 700
"""Of an H100 at the clock of its data sheet."""


@dataclass(frozen=True)
class Constants:
    """Everything that is fitted."""

    products: float = 0.8
    """Rate of a model's products, over that of the fastest one."""
    fused: float = 0.5
    """Share of the time between products that is left where a compiler or a library fuses kernels."""
    network: float = 0.8
    """Share of the links' bandwidth that collectives reach."""
    allocated: float = 1.0
    """Bytes that torch has allocated at most, of those that the plan says."""
    reserved: float = 1.0
    """The same of those that it has reserved."""


LIMITS = {"products": (0.2, 1.0), "fused": (0.0, 1.0), "network": (0.1, 1.0)}
"""Constants of time, and what they can be."""


@cache
def devices() -> dict[str, dict[str, Any]]:
    """Device → its kernels."""
    return tomllib.loads((FOLDER / "devices.toml").read_text(encoding="utf-8"))


def traffic(planned: Planned, on: Cluster, *, gathered: float = 1.0) -> tuple[float, float]:
    """Seconds in collectives and messages that layers wait for, and in those of data parallelism.

    Args:
        planned: has them.
        on: links.
        gathered: bytes of what tensor parallelism gathers, over those in bf16.
    """
    waited = hidden = 0.0
    for kind, axis, ranks, near, calls, size in planned.traffic:
        size *= gathered if (kind, axis) == ("all_gather", "tp") else 1.0
        seconds = on.seconds(kind, size, ranks, calls, () if near >= ranks else (near,))
        if is_data(kind, axis):
            hidden += seconds
        else:
            waited += seconds
    return waited, hidden


@dataclass(frozen=True)
class Pair:
    """A measurement and its plan."""

    row: Row
    planned: Planned

    @property
    def measured(self) -> float:
        return self.row.seconds(self.planned.flops_per_token)

    def seconds(self, by: Constants) -> float:
        """The time of the step."""
        row, plan, kernels, source = self.row, self.planned, devices()[self.row.device], sources()[self.row.source]
        on = cluster(row.device)
        clock = (source.get("watts", WATTS) / WATTS) ** (1 / 3)
        slower = on.bandwidth / source.get("bandwidth", on.bandwidth)
        best = kernels["products"] * clock * (1.0 if kernels.get("shapes") else by.products)
        products, casts = plan.products / best, 0.0
        if row.precision == "fp8":
            products *= 1 - plan.narrow * (1 - 1 / kernels["narrow"])
            casts = CASTS * plan.narrow * plan.operands * slower
        attention = plan.attention / (_attention(kernels["attention"], row.sequence) * clock)
        between = plan.between * slower * (by.fused if row.fused == "yes" else 1.0)
        work = products + attention + casts + plan.memory * slower + between
        # Tensorwise scales are known before activations are gathered; those of rows are not (torchao/float8).
        early = row.precision == "fp8" and "rowwise" not in row.note
        waited, hidden = (one / by.network for one in traffic(plan, on, gathered=0.5 if early else 1.0))
        if "async TP" in row.note:  # products are cut, and each piece runs while another travels
            waited, hidden = 0.0, hidden + waited
        return row.flushes * ((work + waited) * plan.stretch + max(hidden - work, 0.0))

    def time_error(self, by: Constants) -> float:
        """Relative error of the forecast time."""
        return self.seconds(by) / self.measured - 1

    def memory(self, by: Constants) -> float:
        """Bytes."""
        return float(getattr(by, self.kind)) * self.peak

    @property
    def peak(self) -> float:
        """Bytes of the plan, and of what the source's framework keeps beside: see `whole_embedding` in sources.toml."""
        row, model = self.row, models()[self.row.model]
        if not sources()[row.source].get("whole_embedding") or row.tp == 1 or row.pp > 1:
            return self.planned.peak
        # bf16 once whole, fp32 gradients, and bf16 parameters, gradients and both states in shards
        beside = model["embedding"] * (1 - 1 / row.tp) * (2 + 4 + 8 / row.dp_shard)
        if row.dp_shard == 1:
            beside += 2 * model["parameters"] / row.tp  # gradients in fp32, where the plan has bf16
        return self.planned.peak + beside

    @property
    def kind(self) -> str:
        """The measure of memory: `allocated` or `reserved`."""
        return str(sources()[self.row.source]["memory"])

    def memory_error(self, by: Constants) -> float | None:
        """Relative error of the forecast memory; None where none was measured."""
        return None if self.row.memory_gib is None else self.memory(by) / (self.row.memory_gib * GIB) - 1


def _attention(shares: Mapping[str, float], sequence: int) -> float:
    """Share of the peak at a length: that of the longest one that is no longer."""
    lengths = sorted(int(one) for one in shares)
    return shares[str(max((one for one in lengths if one <= sequence), default=lengths[0]))]


def pairs(rows: Iterable[Row], plans: Mapping[str, Planned]) -> list[Pair]:
    """The rows that have a plan."""
    return [Pair(row, plans[row.name]) for row in rows if row.name in plans and not plans[row.name].error]


def fit(some: list[Pair]) -> Constants:
    """The constants with the least mean of absolute logarithmic errors of time, and the median factors of memory.

    Constants of time move in turn, by steps that halve whenever none of them helps.
    """
    best, step = Constants(), 0.25
    for kind in ("allocated", "reserved"):
        ratios = [one.row.memory_gib * GIB / one.peak for one in some if one.row.memory_gib and one.kind == kind]
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
