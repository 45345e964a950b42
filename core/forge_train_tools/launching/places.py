"""Places on this machine that the processes of an attempt take. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager

DEVICES = "CUDA_VISIBLE_DEVICES"


class Places:
    """Places for processes, each with the device of its number, and those of them that are used.

    A place is lost if a process on it fails in two attempts in a row, unless all places do: that is no fault of theirs.
    The next attempt leaves it out, if the run may have fewer processes. The attempt after that takes all places again;
    one that was lost before is then lost by a single failure.
    """

    def __init__(self, count: int, smaller: Collection[int] = ()) -> None:
        """Use all of them.

        Args:
            count: how many there are.
            smaller: numbers of processes that the run may have instead.
        """
        self.count = count
        self._all, self._smaller = tuple(range(count)), sorted(smaller, reverse=True)
        self._suspects: frozenset[int] = frozenset()
        self.lost: tuple[int, ...] = ()
        """Those that this attempt leaves out because they failed; empty while all are used."""
        self.used = self._all
        """By rank."""

    def after(self, failed: Collection[int]) -> None:
        """Choose the places of the next attempt.

        Args:
            failed: the ranks of this attempt that failed by themselves, and not because of another one.
        """
        used, self.used, self.lost = self.used, self._all, ()
        if len(used) < len(self._all):
            return
        blamed = frozenset(used[rank] for rank in failed)
        if len(blamed) == len(self._all):
            blamed = frozenset()
        lost, self._suspects = blamed & self._suspects, blamed
        left = [place for place in self._all if place not in lost]
        size = next((size for size in self._smaller if size <= len(left)), 0)
        if lost and size:
            self.used, self.lost = tuple(left[:size]), tuple(sorted(lost))

    @contextmanager
    def devices(self, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
        """Have processes that are started in the block see only the devices of the places that are used."""
        before = environment.get(DEVICES)
        visible = before.split(",") if before is not None else [str(place) for place in self._all]
        if self.used == self._all or len(visible) < len(self._all):
            yield
            return
        environment[DEVICES] = ",".join(visible[place] for place in self.used)
        try:
            yield
        finally:
            del environment[DEVICES]
            environment.update({DEVICES: before} if before is not None else {})
