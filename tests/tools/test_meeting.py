"""Processes of one start agree on a prefix of their own, with as much to say for each of many as for each of few."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import scale

from forge_train.base.errors import CommunicationError
from forge_train.mesh.world import World
from forge_train_tools.launching import meeting

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize("world", [1, 5])
def test_all_have_one_prefix(world: int) -> None:
    assert len({*scale.met(world).prefixes}) == 1


def test_names_of_an_earlier_start_are_not_answered() -> None:
    """Its processes left all that they had said; one of these comes late, when rank 0 has read the name before it."""
    with scale.served(4) as store:
        for key in range(4):
            store.set(f"name-{key}", "gone")
            store.set(f"answer-{key}", "gone,before")
            store.set(f"before-{key}", "")
        store.set("before-all", "")
        found = scale.met(4, store=store, late=0.3)
    assert len({*found.prefixes}) == 1
    assert "before" not in found.prefixes


def test_a_process_that_does_not_come_is_named() -> None:
    with scale.served(2) as store, pytest.raises(CommunicationError, match=r"rank 1 has not joined the other 1 of 2"):
        meeting._agree(World(rank=0, size=2, local_size=2), store, timedelta(seconds=0.2), "here")


def test_bytes_grow_with_the_processes() -> None:
    """Of the least that is said: how often a process asks while others are late does not count."""
    few, many = scale.met(4), scale.met(32)
    assert many.stored / 32 <= few.stored / 4 * 1.05
    assert many.largest <= few.largest + 2
    assert threading.active_count() < 32
    assert not dist.is_initialized()
