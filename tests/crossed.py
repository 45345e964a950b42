"""Parameters of which CI takes a few; the others are marked `extended` and left to `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def crossed(*factors: Iterable[Any]) -> list[Any]:
    """Return every combination of the factors' values.

    CI takes as many as the longest factor has values: each value of every factor occurs in at least one of them.
    """
    values = [tuple(factor) for factor in factors]
    taken = [tuple(one[row % len(one)] for one in values) for row in range(max(map(len, values)))]
    return few([*itertools.product(*values)], taken)


def pairs(*factors: Iterable[Any]) -> list[Any]:
    """Return every combination of the factors' values; CI takes few, in which every two values of two factors occur."""
    cases = [*itertools.product(*factors)]
    return [pytest.param(*one.values[0], marks=one.marks) for one in every_value(cases, _pairs, lambda case: 1)]


def _pairs(case: tuple[Any, ...]) -> list[Any]:
    return list(itertools.combinations(enumerate(case), 2))


def marked(cases: Iterable[Any], extended: Collection[str | int]) -> list[Any]:
    """Return the names of cases, or cases that `str` names; those of `extended` must be among them."""
    cases, left = list(cases), set(map(str, extended))
    assert left <= set(map(str, cases)), left - set(map(str, cases))
    return [pytest.param(one, marks=[pytest.mark.extended] if str(one) in left else []) for one in cases]


def few(cases: Sequence[Any], taken: Collection[Any]) -> list[Any]:
    """Return cases of several values each; CI takes those of `taken`, which must be among them."""
    assert all(one in cases for one in taken), [one for one in taken if one not in cases]
    return [pytest.param(*one, marks=[] if one in taken else [pytest.mark.extended]) for one in cases]


def every_value(
    cases: Sequence[Any], values: Callable[[Any], Collection[Any]], cost: Callable[[Any], float]
) -> list[Any]:
    """Return cases; CI takes few and cheap ones in which every value of every case occurs.

    Args:
        cases: of one test.
        values: the values of a case.
        cost: of a case; the one with the most new values for its cost is taken.
    """
    missing = {value for one in cases for value in values(one)}
    taken: list[Any] = []
    while missing:
        taken.append(max(cases, key=lambda one: len(missing & {*values(one)}) / cost(one)))
        missing -= {*values(taken[-1])}
    return [pytest.param(one, marks=[] if one in taken else [pytest.mark.extended]) for one in cases]
