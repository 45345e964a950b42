"""How far tokenising is, for whoever shows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from forge_train_tools.present import duration

EVERY = 0.5
"""Seconds between two reports."""
LOGGER = "forge_train.progress"
"""What is logged here with `passing=True` replaces what was said before; a command that shows it adds a handler."""


class Progress:
    """Counts documents as they are read, and reports them with the rate and the time that is left.

    Args:
        documents: in all files.
        size: of all files in bytes; None where only documents tell how much is left.
    """

    def __init__(self, documents: int, size: int | None) -> None:
        self._documents, self._size = documents, size
        self._done = self._bytes = 0
        self._began = self._told = time.perf_counter()
        self._shown = logging.getLogger(LOGGER)

    def __enter__(self) -> Progress:
        return self

    def follow(self, documents: Iterable[bytes]) -> Iterator[bytes]:
        """The same documents, counted."""
        for document in documents:
            yield document
            self._done, self._bytes = self._done + 1, self._bytes + len(document)
            now = time.perf_counter()
            if self._shown.handlers and now - self._told >= EVERY:
                self._told = now
                self._shown.info("%s", self._line(now - self._began), extra={"passing": True})

    def _line(self, seconds: float) -> str:
        share = self._bytes / self._size if self._size else self._done / max(self._documents, 1)
        left = duration(seconds / share - seconds) if 0 < share <= 1 else "–"
        return f"tokenising: {self._counted(seconds)}, {left} left"

    def _counted(self, seconds: float) -> str:
        documents, size = "document" if self._done == 1 else "documents", self._bytes / 1e6
        return f"{self._done:,} {documents}, {size:,.1f} MB, {size / max(seconds, 1e-9):,.1f} MB/s"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._began
        if error is None:
            text = f"text: tokenised {self._counted(seconds)}, in {duration(seconds)}"
            logging.getLogger("forge_train").info("%s", text)
            if self._shown.handlers:
                self._shown.info("%s", text)
