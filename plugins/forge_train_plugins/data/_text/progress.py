"""Progress of tokenising, counted in documents."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from forge_train_kit.data.progress import Telling
from forge_train_kit.format import format_duration


class Progress:
    """Counts documents as they are read, and reports them with the rate and the time that is left.

    Args:
        documents: in all files.
        size: of all files in bytes; None where only documents tell how much is left.
    """

    def __init__(self, documents: int, size: int | None) -> None:
        self._documents, self._size = documents, size
        self._done = self._bytes = 0
        self._began = time.perf_counter()
        self._telling = Telling("text")

    def __enter__(self) -> Progress:
        return self

    def follow(self, documents: Iterable[bytes]) -> Iterator[bytes]:
        """The same documents, counted."""
        for document in documents:
            yield document
            self._done, self._bytes = self._done + 1, self._bytes + len(document)
            if self._telling.due:
                self._telling.passing(self._line(time.perf_counter() - self._began))

    def _line(self, seconds: float) -> str:
        share = self._bytes / self._size if self._size else self._done / max(self._documents, 1)
        left = format_duration(seconds / share - seconds) if 0 < share <= 1 else "–"
        return f"{self._counted(seconds)}, {left} left"

    def _counted(self, seconds: float) -> str:
        documents, size = "document" if self._done == 1 else "documents", self._bytes / 1e6
        return f"{self._done:,} {documents}, {size:,.1f} MB, {size / max(seconds, 1e-9):,.1f} MB/s"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._began
        if error is None:
            self._telling.done(f"{self._counted(seconds)}, in {format_duration(seconds)}")
