"""Garbage collections between steps of a fixed number, the same on every rank.

Python collects when a rank has made enough objects, which differs between ranks: one stops for a tenth of a second, and
all others wait for it in the next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50
"""Steps between collections of what was made lately."""
ALL = 1000
"""Steps between collections of everything."""


@contextmanager
def scheduled(*, active: bool) -> Iterator[None]:
    """Leave collections to `collect` within the block.

    Args:
        active: whether to do so; else the block changes nothing.
    """
    before = gc.isenabled()
    if active:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def collect(step: int) -> None:
    """Collect after this step, if it is its turn and Python itself collects nothing."""
    if gc.isenabled():
        return
    if step % ALL == 0:
        gc.collect()
    elif step % YOUNG == 0:
        gc.collect(1)
