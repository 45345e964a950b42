"""Attention on slices of sequences, forward and backward: what it is on whole ones, for every method."""

from __future__ import annotations

import pytest

import context_cases
from crossed import few
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize(
    ("method", "world"),
    few(
        [("gather", 2), ("gather", 3), ("ulysses", 2), ("ulysses", 4), ("ring", 2), ("ring", 3), ("ulysses_ring", 4)],
        [("gather", 3), ("ulysses", 2), ("ring", 3), ("ulysses_ring", 4)],
    ),
)
def test_is_attention_on_whole_sequences(ranks: Pool, method: str, world: int) -> None:
    """With grouped queries, heads repeated for as many ranks, uneven documents; buffers begin as NaN."""
    for found in ranks.run(context_cases.attend, world, method=method):
        assert len(found) == 2 * len(context_cases.MORE)
        assert {name: worst for name, worst in found.items() if not worst < 1e-4} == {}
