"""Differences between the records of two runs' ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from forge_train.base.format import format_list
from forge_train_kit.ranks import named

from .numbers import finite
from .recording import Fingerprint, Record, Recording, SideEffect
from .routing import RoutingDifference, routing_difference
from .verdict import Check

NOTHING = 1e-9
"""Metrics that are smaller than this are rounding alone."""


def other_starts(one: Recording, layout: Recording) -> dict[str, list[int]]:
    """Weights that start differently from one process, and on which ranks."""
    found: dict[str, list[int]] = {}
    for rank in layout.ranks:
        for name, value in rank.start.items():
            if one.first.start.get(name) != value:
                found.setdefault(name, []).append(rank.rank)
    for name in one.first.start.keys() - union(rank.start for rank in layout.ranks).keys():
        found[name] = [rank.rank for rank in layout.ranks]
    return dict(sorted(found.items()))


def up_to(until: int | None) -> str:
    """Describe a relative difference."""
    return "relative" if until is None else f"relative, up to step {until}"


def overflows(run: Record) -> set[int]:
    """Steps that a run left out because gradients were not finite, as they may be under a growing loss scale."""
    return {step for step, norm in enumerate(run.norms, 1) if not math.isfinite(norm)} & set(map(int, run.vetoes))


def without_overflows(one: Sequence[float], other: Sequence[float], *runs: Record) -> tuple[list[float], ...]:
    """Norms of the steps that some run took; those that all left out count as equal."""
    equal = set.intersection(*map(overflows, runs))
    return tuple([0.0 if step in equal else norm for step, norm in enumerate(norms, 1)] for norms in (one, other))


def peers_apart(layout: Recording) -> tuple[int, str]:
    """Ranks that saw other batches than a rank with the same data-parallel rank."""
    leaders: dict[int, Record] = {}
    apart = []
    for rank in layout.ranks:
        leader = leaders.setdefault(rank.data_rank, rank)
        if leader.batches != rank.batches:
            one, other = (named([of.rank], layout.layout) for of in (rank, leader))
            apart.append(f"{one} and {other} (data-parallel rank {rank.data_rank})")
    return len(apart), format_list(apart)


def data_apart(one: Record, ranks: Sequence[Record]) -> tuple[int, str]:
    """Steps in which all ranks together saw other sequences than one process."""
    leaders = {rank.data_rank: rank for rank in reversed(ranks)}
    wrong = []
    for step, expected in enumerate(one.batches):
        seen = [row for rank in leaders.values() if step < len(rank.batches) for row in rank.batches[step]]
        if sorted(seen) != sorted(expected):
            wrong.append(f"step {step + 1}")
    return len(wrong), format_list(wrong)


def metrics_apart(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, str]:
    """The largest relative difference of a plugin's metric, and which one; infinite where one side lacks it."""
    worst, where = 0.0, ""
    for name in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(name, math.nan), other.get(name, math.nan)
        both = name in one and name in other
        if both and (str(ours) == str(theirs) or max(abs(ours), abs(theirs)) < NOTHING):
            continue
        difference = finite(abs(ours - theirs) / (abs(ours) or 1.0))
        if difference > worst:
            worst, where = difference, f"{name}: {ours:.8g} and {theirs:.8g}"
    return worst, where


def pieces_apart(pieces: Sequence[Mapping[str, Fingerprint]]) -> dict[str, set[str]]:
    """Parameters of which some ranks hold the same piece with other bytes."""
    seen: dict[tuple[str, str], str] = {}
    apart: dict[str, set[str]] = {}
    for rank in pieces:
        for name, (piece, value) in rank.items():
            if seen.setdefault((name, piece), value) != value:
                apart.setdefault(name, set()).add(piece)
    return apart


def scalars_apart(ranks: Sequence[Record]) -> int:
    """Count 1 if losses or norms are not the same doubles on all ranks, else 0."""
    return int(any(_spoken(rank) != _spoken(ranks[0]) for rank in ranks))


def side_effects(ranks: Sequence[Record], kind: SideEffect) -> dict[str, list[str]]:
    """Return the names changed while evaluating or saving, on any rank, by whoever changed them."""
    found: dict[str, set[str]] = {}
    for rank in ranks:
        for who, names in rank.disturbed.get(kind, {}).items():
            found.setdefault(who, set()).update(names)
    return {who: sorted(names) for who, names in sorted(found.items())}


def side_effect_check(ranks: Sequence[Record], kind: SideEffect) -> tuple[Check, ...]:
    """A check for what is changed in evaluating or in saving, if anything is."""
    names = sorted({name for names in side_effects(ranks, kind).values() for name in names})
    what = {"evaluation": "evaluating", "checkpoint": "saving"}[kind]
    return (Check(kind, len(names), 0, f"tensors that {what} changes", format_list(names)),) if names else ()


def different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def union(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for part in parts for name, value in part.items()}


def choices_apart(one: Recording, other: Recording, at_least: float) -> RoutingDifference | None:
    """Return the first position where routing differs, with the looser tie tolerance, or a given larger one."""
    ours, theirs = ([rank.choices for rank in run.ranks] for run in (one, other))
    return routing_difference(ours, theirs, coarsest(one, other, at_least))


def coarsest(one: Recording, other: Recording, at_least: float) -> float:
    """Return the looser tie tolerance."""
    return max(one.tie, other.tie, at_least)


def _spoken(rank: Record) -> tuple[list[float], ...]:
    return rank.losses, rank.norms, rank.evaluation
