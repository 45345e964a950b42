"""Progress of tokenising a run's data, for display."""

from __future__ import annotations

import logging
import time

EVERY = 0.5
"""Seconds between two reports."""
LOGGER = "forge_train.progress"
"""Logger of progress: a message with `passing=True` replaces the last; a command that shows it adds a handler."""


class Telling:
    """Says twice a second how far a plugin's tokenising is, and at the end, in the run's log too, what was done.

    Args:
        name: of the plugin.
    """

    def __init__(self, name: str) -> None:
        self._name, self._told = name, time.perf_counter()
        self._shown = logging.getLogger(LOGGER)

    @property
    def due(self) -> bool:
        """True if somebody sees the progress, and the last line is old."""
        return bool(self._shown.handlers) and time.perf_counter() - self._told >= EVERY

    def passing(self, text: str) -> None:
        """Say how far it is, if it is due."""
        if text and self.due:
            self._told = time.perf_counter()
            self._shown.info("tokenising: %s", text, extra={"passing": True})

    def done(self, text: str) -> None:
        """Say what was done."""
        tell(f"{self._name}: tokenised {text}")


def tell(line: str) -> None:
    """Say something that stays: in the run's log, and to whoever is shown the progress."""
    logging.getLogger("forge_train").info("%s", line)
    if (shown := logging.getLogger(LOGGER)).handlers:
        shown.info("%s", line)
