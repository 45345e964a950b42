"""Detection of the rank that others wait for, from each rank's share of working time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from forge_train.ground.layout import Layout, named
from forge_train_tools.health import Finding
from forge_train_tools.stacks import place

interval = 0.1
"""Seconds between two looks at the main thread, which must let go of Python for each."""
LEAST = 50
"""Looks below which a share says little."""


class Share:
    """The share of its steps in which this rank's main thread is busy, and not in a collective.

    Another thread looks at the main thread's stack from time to time, which waits for no device.
    """

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._looks, self._busy, self._inside = 0, 0, False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="forge-health", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: evaluations and saves are left out, where one rank works alone by design."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def take(self) -> float | None:
        """The share since the last time; None after too few looks."""
        looks, busy = self._looks, self._busy
        self._looks = self._busy = 0
        return busy / looks if looks >= LEAST else None

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(interval):
            if self._inside:
                self._looks += 1
                self._busy += not place(self._main).awaits


def compare(shares: Sequence[float | None], layout: Layout, waited: float) -> Iterator[Finding]:
    """Ranks that the others of their pipeline stage wait for.

    Args:
        shares: of each rank, as `Share.take` gives it.
        layout: of the ranks.
        waited: the part of their steps in which others may wait for one.
    """
    ranks = len(shares) // layout.pp
    for first in range(0, len(shares), ranks):
        stage = {rank: share for rank in range(first, first + ranks) if (share := shares[rank]) is not None}
        if len(stage) < 2 or len(stage) < ranks:
            continue
        for rank, share in stage.items():
            usual = median(other for number, other in stage.items() if number != rank)
            if share - usual > waited:
                text = f"{named([rank], layout)} works in {share:.0%} of a step, and the others in {usual:.0%}"
                yield Finding("straggler", "warn", f"{text}: they wait for it")
        yield Finding("steps", "ok", f"ranks work in {min(stage.values()):.0%} to {max(stage.values()):.0%} of a step")
