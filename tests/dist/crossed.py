"""Products of parameters, of which CI takes a few."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def crossed(*factors: Iterable[Any]) -> list[Any]:
    """Every combination of the factors' values; those that CI leaves to `make test-all` are marked `extended`.

    CI takes as many as the longest factor has values: each value of every factor occurs in at least one of them.
    """
    values = [tuple(factor) for factor in factors]
    taken = {tuple(one[row % len(one)] for one in values) for row in range(max(map(len, values)))}
    return [
        pytest.param(*row, marks=[] if row in taken else [pytest.mark.extended]) for row in itertools.product(*values)
    ]
