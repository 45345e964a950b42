"""Cuts of a model into stages of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forge_train import ConfigError
from forge_train.base.errors import nearest

SLACK = 1.01
"""FLOPs that the most expensive part may have beyond the best cut, where that makes the largest part smaller."""


@dataclass(frozen=True)
class Cost:
    """Cost of one entry of the model's `stages`."""

    flops: float
    """Per token, forward and backward; 0 where the model declares none."""
    bytes: float
    """Of parameters."""


Cuts = tuple[int, ...]
"""The first entry of each part, and the number of entries."""


def balanced(costs: Sequence[Cost], parts: int) -> Cuts:
    """Cuts into runs of neighbouring entries whose most expensive part has about the fewest FLOPs that can be, and
    among these cuts the smallest largest part in bytes.

    Raises:
        ConfigError: for more parts than entries.
    """
    if parts > len(costs):
        raise ConfigError(f"parallel.pp: the model has {len(costs)} stages, which can't be cut into {parts} parts.")
    flops, size = [cost.flops for cost in costs], [cost.bytes for cost in costs]
    if not any(flops):
        return _smallest_largest(size, parts)
    limit = SLACK * max(_sums(flops, _smallest_largest(flops, parts)))
    return _smallest_largest(size, parts, flops, limit)


def given(names: Sequence[str], stages: Sequence[Sequence[str]]) -> Cuts:
    """Cuts before the entries of some modules.

    Raises:
        ConfigError: for a module that no entry has, and for parts that would be empty or in another order.
    """
    homes = {name: at for at, entry in enumerate(stages) for name in entry}
    found = [0]
    for name in names:
        if name not in homes:
            raise ConfigError(f"pp.cuts: no stage of the model has a module {name!r}.{nearest(name, homes)}")
        at = homes[name]
        if at <= found[-1]:
            before = "begins the model" if at == 0 else f"comes no later than {stages[found[-1]][0]!r}"
            raise ConfigError(f"pp.cuts: {name!r} {before}, so a part would be empty.")
        found.append(at)
    return (*found, len(stages))


def _sums(values: Sequence[float], cuts: Cuts) -> list[float]:
    return [sum(values[start:stop]) for start, stop in pairwise(cuts)]


def _smallest_largest(
    values: Sequence[float], parts: int, limited: Sequence[float] = (), limit: float = float("inf")
) -> Cuts:
    """Cuts whose largest sum of values is smallest, with at most `limit` of the limited quantity in each part."""
    limited = limited or [0.0] * len(values)
    count = len(values)
    best: list[list[tuple[float, int]]] = [[(float("inf"), 0)] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0)
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            total = within = 0.0
            for start in range(stop - 1, part - 2, -1):
                total += values[start]
                within += limited[start]
                if within > limit:
                    break
                largest = max(total, best[part - 1][start][0])
                if largest < best[part][stop][0]:
                    best[part][stop] = (largest, start)
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(best[part][cuts[-1]][1])
    return tuple(reversed(cuts))
