"""Processes of one start find a prefix of their own in a store that an earlier start has used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from forge_train.base.errors import CommunicationError
from forge_train.mesh.world import World
from forge_train_tools.launching.meeting import _agree

pytestmark = [pytest.mark.unit]


def agree(store: dist.Store, *attempts: int, absent: int = 0, seconds: float = 60.0) -> list[str]:
    """What ranks agree on, which count their attempts differently."""
    size = len(attempts) + absent
    places = [World(rank, size, attempt=attempt, launcher="torchrun") for rank, attempt in enumerate(attempts)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda place: _agree(place, store, timedelta(seconds=seconds), "here:1"), places))


def test_every_start_has_a_prefix_of_its_own() -> None:
    store, known = dist.HashStore(), set[str]()
    for attempts in ((0, 0), (1, 0, 0), (1, 1), (2, 0, 1), (2, 0, 1)):
        (prefix,) = set(agree(store, *attempts))
        assert prefix not in known
        known.add(prefix)


def test_those_that_did_not_come_are_named() -> None:
    store = dist.HashStore()
    agree(store, 0, 0, 0)
    with pytest.raises(CommunicationError, match=r"After 0\.5 s rank 2 has not joined the other 2 of 3 processes"):
        agree(store, 1, 1, absent=1, seconds=0.5)
