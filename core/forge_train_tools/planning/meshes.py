"""Arrangement of ranks: the axes of each domain, and neighbours along them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forge_train.mesh.axes import Domain
from forge_train.mesh.layout import Layout

Axes = Mapping[str, int]
"""Axis → size, the outermost first; ranks are numbered along the innermost."""


def domains(layout: Layout) -> dict[str, dict[str, int]]:
    """The domains that say something: `expert` where experts are spread, `batch` where there are several ranks."""
    told: dict[Domain, bool] = {"dense": True, "expert": layout.ep > 1, "batch": layout.world > 1}
    return {name: layout.domain(name) for name, tell in told.items() if tell}


def grid(axes: Axes) -> Any:
    """The ranks as nested lists, an axis of size 1 too."""
    ranks: list[Any] = list(range(math.prod(axes.values())))
    for size in reversed([*axes.values()][1:]):
        ranks = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    return ranks


def groups(axes: Axes, axis: str) -> list[range]:
    """The groups of ranks that differ along one axis only, in order."""
    names, sizes = list(axes), list(axes.values())
    at = names.index(axis)
    step, size = math.prod(sizes[at + 1 :]), sizes[at]
    firsts = (rank for rank in range(math.prod(sizes)) if not rank // step % size)
    return [range(first, first + size * step, step) for first in firsts]


def along(axes: Axes, ranks: list[int]) -> tuple[str, ...]:
    """The axes that a group of ranks tiles; nothing if it tiles none."""
    sizes = list(axes.values())
    steps = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    varied = {
        axis: size
        for (axis, size), step in zip(axes.items(), steps, strict=True)
        if len({rank // step % size for rank in ranks}) > 1
    }
    return tuple(varied) if math.prod(varied.values()) == len(ranks) else ()
