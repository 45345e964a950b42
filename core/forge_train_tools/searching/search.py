"""The search: every layout of a configuration for a world, ranked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.registry.setup import Setup

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..planning.clusters import Cluster
from .candidates import Candidate
from .space import MASK, Found, Space, rule

ENOUGH = 2000
"""Legal layouts that fit after which the search ends."""
NEIGHBOURS = 32
"""Larger and smaller numbers of ranks that are tried where a world has no legal layout."""


@dataclass(frozen=True)
class Large:
    """A layout that does not fit."""

    candidate: Candidate
    peak: float
    """Bytes of the fullest rank."""


@dataclass
class Search:
    """Results of a search."""

    world: int
    cluster: Cluster
    ranked: list[Found] = field(default_factory=list)
    """Layouts that fit, the fastest first."""
    too_large: int = 0
    """Layouts that do not fit; nobody asked whether they are legal."""
    nearest: Large | None = None
    """The smallest legal layout that does not fit; looked for if none does."""
    fitting: int = 0
    """The nearest number of ranks that has a layout which fits; looked for if none does, and 0 if none was found."""
    unchecked: int = 0
    """Slower ones that nobody asked whether they are legal, as there were enough."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reason → layouts that can't be."""
    request: Request = field(default_factory=Request)
    """The configuration that was searched, without what it would not enable anyway."""
    unvaried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rehearsed: int = 0
    """Points of short models that were rehearsed."""

    @property
    def front(self) -> list[Found]:
        """Layouts that none beats in both speed and memory, the fastest first."""
        found, least = [], math.inf
        for one in self.ranked:
            if one.memory.peak < least:
                found.append(one)
                least = one.memory.peak
        return found


def search(request: Request, *, world: int, cluster: Cluster) -> Search:
    """Rank every layout of a configuration.

    Args:
        request: the configuration.
        world: the number of ranks.
        cluster: of the devices.

    Raises:
        ConfigError: for a configuration that can't be searched.
    """
    return rank(Space(request, world, cluster))


def rank(space: Space) -> Search:
    """Rank every layout of a space."""
    made = Search(space.world, space.cluster, request=space.request, unvaried=space.points.options.unvaried)
    fitting, large = _split(space, made)
    for at, one in enumerate(sorted(fitting, key=lambda one: (-one.tokens_per_second, one.memory.peak))):
        if len(made.ranked) == ENOUGH:
            made.unchecked = len(fitting) - at
            break
        if _accepts(space, made, one.candidate):
            made.ranked.append(one)
    made.too_large = len(large)
    if not made.ranked:
        large.sort(key=lambda one: one.peak)
        made.nearest = next((one for one in large if _accepts(space, made, one.candidate)), None)
        others = _others(space.world, larger=made.nearest is not None)
        made.fitting = next((world for world in others if _fits(space.of(world))), 0)
    made.refused.update(space.refused)
    made.notes, made.rehearsed = tuple(space.points.notes), space.points.count
    return made


def _others(world: int, *, larger: bool) -> list[int]:
    """Numbers of ranks to try if none of a world's layouts can be: some times as many where memory lacks, or its
    neighbours."""
    if larger:
        return [world * times for times in (2, 4, 8, 16, 32, 64)]
    near = (world + sign * step for step in range(1, NEIGHBOURS + 1) for sign in (-1, 1))
    return [one for one in near if one > 0]


def _fits(space: Space) -> bool:
    """Return True if a layout is legal and fits."""
    for candidate in space.candidates():
        try:
            fits = space.forms.memory(candidate).peak <= space.cluster.memory
        except ConfigError:
            continue
        if fits and not space.legality.verdict(candidate):
            return True
    return False


def _split(space: Space, made: Search) -> tuple[list[Found], list[Large]]:
    """Candidates that fit, and those that do not."""
    fitting: list[Found] = []
    large: list[Large] = []
    for candidate in space.candidates():
        try:
            memory = space.forms.memory(candidate)
            if memory.peak > made.cluster.memory:
                large.append(Large(candidate, memory.peak))
            else:
                fitting.append(space.found(candidate, memory))
        except ConfigError as error:
            made.refused[rule(str(error))] += 1
    return fitting, large


def _accepts(space: Space, made: Search, candidate: Candidate) -> bool:
    """Return True for a legal candidate; count any other by its reason."""
    if reason := space.legality.verdict(candidate):
        made.refused[rule(reason)] += 1
    return not reason


def chosen(request: Request, candidate: Candidate) -> Request:
    """The request with a layout."""
    made = candidate.variant.request(request)
    return replace(made, set=(*made.set, *candidate.settings))


def setup_of(request: Request, world: int) -> Setup:
    """A run with the chosen layout, checked as `forge train` checks it."""
    return resolve(request, world=world, data=False, measured=False)


def why_slower(one: Found, best: Found) -> str:
    """The largest difference to the best layout, in words."""
    parts: Mapping[str, float] = {
        "computes more": one.speed.compute - best.speed.compute,
        "moves more between products": one.speed.between - best.speed.between,
        "waits longer for collectives in each layer": one.speed.blocking - best.speed.blocking,
        "has more data-parallel traffic than compute hides": one.speed.exposed - best.speed.exposed,
        "has a larger pipeline bubble": one.speed.idle - best.speed.idle,
        "updates more weights on each rank": one.speed.update - best.speed.update,
    }
    reason = max(parts, key=lambda key: parts[key])
    return (
        f"{reason} (+{parts[reason] / best.speed.step:.1%})"
        if parts[reason] > 0
        else "is as fast, and takes more memory"
    )


def nothing_fits(made: Search) -> ConfigError:
    """The error of a search in which no layout fits, with the nearest that does and what it lacks."""
    if made.nearest is None:
        # A rule that can be said without numbers explains more than one whose numbers were left out.
        told = sorted(made.refused.items(), key=lambda one: (MASK in one[0], -one[1]))
        reason, count = told[0] if told else ("there is none", 0)
        other = f"; the nearest number of ranks that fits is {made.fitting}" if made.fitting else ""
        return ConfigError(f"No layout of {made.world} ranks is possible: {reason} ({count} layouts){other}.")
    nearest, memory = made.nearest, made.cluster.memory
    return ConfigError(
        f"No layout of {made.world} ranks fits into {made.cluster.name}: the nearest, {nearest.candidate}, takes "
        f"{format_bytes(int(nearest.peak))} of {format_bytes(int(memory))}; "
        f"{format_bytes(int(nearest.peak - memory))} are missing"
        + (f"; {made.fitting} ranks have a layout that fits." if made.fitting else ", and more ranks do not help.")
    )
