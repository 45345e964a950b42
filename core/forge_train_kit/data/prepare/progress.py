"""Progress of a preparation: rate, and time left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ...format import format_duration, format_plural, format_unit
from ..progress import Telling
from .tasks import Task

log = logging.getLogger("forge_train")

NAMED = 20
"""Records left out that are named; those after them are only counted."""
REPLACED = "An empty item stands in for it."
SETTLED = 2.0
"""Seconds after which a rate says something."""


class Report:
    """Counts bytes that were read.

    Args:
        line: is given the line to show; each replaces the one before.
    """

    def __init__(self, line: Callable[[str], None] = lambda text: None) -> None:
        self._line = line
        self.every: Sequence[Task] = ()
        self._all = self._before = self._done = 0
        self._began = time.perf_counter()
        self.seconds = 0.0
        self.read = 0
        """Bytes of files that this run read, in `seconds`; of packed files, packed ones."""
        self.text = 0
        """Bytes of text in what it read."""
        self.skipped: dict[str, str] = {}
        """Files and records that were left out, and why."""

    def say(self, text: str) -> None:
        """Show what is being done before anything can be counted."""
        self._line(text)

    def begin(self, every: Sequence[Task], left: Sequence[Task]) -> None:
        """Count from here; what earlier runs did is done."""
        self.every = every
        self._all = sum(task.bytes for task in every)
        self._before = self._all - sum(task.bytes for task in left)
        self._done, self._began = 0, time.perf_counter()

    def add(self, size: int) -> None:
        self.at(self._done + size)

    def at(self, size: int) -> None:
        """So many bytes were read since `begin`."""
        self._done = size
        self.show()

    def show(self) -> None:
        seconds = time.perf_counter() - self._began
        rate = self._done / max(seconds, 1e-9)
        left = (self._all - self._before - self._done) / rate if rate and seconds > SETTLED else None
        share = (self._before + self._done) / max(self._all, 1)
        time_left = f", {format_duration(left)} left" if left is not None else ""
        self._line(f"{share:4.0%} of {format_unit(self._all, 'B')}, {format_unit(rate, 'B')}/s{time_left}")

    def end(self, skipped: dict[str, str], text: int = 0) -> None:
        """Everything is done; there are so many bytes of text in all files."""
        self._line("")
        self.seconds, self.read, self.skipped = time.perf_counter() - self._began, self._done, skipped
        self.text = round(text * self._done / max(self._all, 1))


class Told(Report):
    """The report of a plugin that prepares its data when the run starts.

    Args:
        name: of the plugin.
        replaced: whether items that can't be read are replaced, rather than their records left out.
    """

    def __init__(self, name: str, *, replaced: bool = False) -> None:
        self._name, self._telling, self._replaced = name, Telling(name), replaced
        super().__init__(self._telling.passing)

    def end(self, skipped: dict[str, str], text: int = 0) -> None:
        super().end(skipped, text)
        if self.read:
            rate = format_unit(self.text / max(self.seconds, 1e-9), "B")
            self._telling.done(f"{format_unit(self.text, 'B')}, {rate}/s, in {format_duration(self.seconds)}")
        if skipped and not self.read:  # an earlier run has named them all
            what = format_plural(len(skipped), "item" if self._replaced else "record")
            done = "replaced" if self._replaced else "left out"
            first = next(iter(skipped.values()))
            log.warning("%s: %s %s when the data was prepared; the first: %s", self._name, what, done, first)
            return
        for reason in list(skipped.values())[:NAMED]:
            log.warning("%s %s", reason, REPLACED if self._replaced else "The record is left out.")
        if len(skipped) > NAMED:
            one = "items are replaced" if self._replaced else "records are left out"
            log.warning("%s: %s %s in all.", self._name, f"{len(skipped):,}", one)
