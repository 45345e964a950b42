"""Parameters of which CI takes a few; the others are marked `extended` and left to `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def crossed(*factors: Iterable[Any]) -> list[Any]:
    """Return every combination of the factors' values.

    CI takes as many as the longest factor has values: each value of every factor occurs in at least one of them.
    """
    values = [tuple(factor) for factor in factors]
    taken = {tuple(one[row % len(one)] for one in values) for row in range(max(map(len, values)))}
    return [
        pytest.param(*row, marks=[] if row in taken else [pytest.mark.extended]) for row in itertools.product(*values)
    ]


def marked(names: Iterable[str], extended: Collection[str]) -> list[Any]:
    """Return the names of cases; those of `extended` must be among them."""
    names = list(names)
    assert set(extended) <= set(names), set(extended) - set(names)
    return [pytest.param(name, marks=[pytest.mark.extended] if name in extended else []) for name in names]
