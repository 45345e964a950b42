"""The parameter groups of an optimizer: which learning rate and decay each parameter has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ParameterSet:
    """Parameters of one rank that are updated alike."""

    match: str
    """The user's pattern; empty for the rest."""
    parameters: int
    elements: int
    """Of the full parameters, not of their shards."""
    lr: float | None
    """At the peak of the schedule."""
    lr_factor: float
    """The user's."""
    weight_decay: float | None


def parameter_sets(groups: Iterable[Mapping[str, Any]]) -> tuple[ParameterSet, ...]:
    """An optimizer's groups; those that differ in their meshes alone are one."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for group in groups:
        lr = group.get("initial_lr", group.get("lr"))
        key = (group.get("match", ""), lr, group.get("lr_factor", 1.0), group.get("weight_decay"))
        total = sums.setdefault(key, [0, 0])
        total[0] += len(group["params"])
        total[1] += sum(parameter.numel() for parameter in group["params"])
    return tuple(
        ParameterSet(match, number, elements, None if lr is None else float(lr), factor, decay)
        for (match, lr, factor, decay), (number, elements) in sums.items()
        if number
    )


def total_sets(stages: Sequence[Sequence[ParameterSet]]) -> tuple[ParameterSet, ...]:
    """The groups of all pipeline stages; each parameter is of one of them."""
    found: dict[tuple[Any, ...], ParameterSet] = {}
    for one in (one for sets in stages for one in sets):
        key = (one.match, one.lr, one.lr_factor, one.weight_decay)
        before = found.get(key, replace(one, parameters=0, elements=0))
        found[key] = replace(
            before, parameters=before.parameters + one.parameters, elements=before.elements + one.elements
        )
    return tuple(found.values())
