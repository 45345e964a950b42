"""Samples of a stream, read so that one that can't be is named, and left out where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from forge_train import MASKED
from forge_train.base.errors import ForgeError, describe

from .documents import Int64
from .rows import Arrays

if TYPE_CHECKING:
    from .stream import Stream

TRIES = 100
"""Samples after a broken one that may be broken too."""
_TEMPORARY = (OSError, MemoryError)
"""Errors that say nothing of a sample: the next attempt may succeed, and would give other data."""


class SampleError(ForgeError):
    """A sample can't be read."""

    type = "data"


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Attribute a failure in the block to this stage of the data; the innermost stage counts."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "stage"):
            error.stage = name  # type: ignore[attr-defined]
        raise


@dataclass(frozen=True, slots=True)
class Reading:
    """Samples, and what was left out of them, or replaced in them: a sentence for each."""

    arrays: Arrays
    skipped: tuple[str, ...] = ()
    numbers: Int64 | None = None
    """Of the samples."""


class Reader:
    """Reads samples by their places.

    Args:
        stream: of the samples.
        on_error: `stop` raises what the first broken sample raised. `skip` takes the next sample of its source that can
            be read instead: a function of the place and the content alone, so that all ranks, and a run that goes on,
            find the same. `replace` is `stop`: items are replaced where they are read.
        padding: numbers of samples, from and up to, of which no label is learned; without an end, all that follow.
    """

    def __init__(
        self,
        stream: Stream,
        on_error: Literal["stop", "skip", "replace"],
        padding: tuple[int, int | None] | None = None,
    ) -> None:
        self._stream, self._skip, self._padding = stream, on_error == "skip", padding

    def __call__(self, places: Int64, first: Int64) -> Reading:
        """The samples of some places.

        Args:
            places: `[k, …]`.
            first: `[k]`, the samples' numbers, for messages.

        Raises:
            SampleError: naming the sample, where it lies, and the stage that failed.
        """
        found = self._read(places, first)
        if self._padding is not None:
            begin, end = self._padding
            padding = (first >= begin) & (True if end is None else first < end)
            if padding.any():
                _mask(found.arrays, padding)
        return replace(found, numbers=first)

    def _read(self, places: Int64, first: Int64) -> Reading:
        try:
            found = self._stream.read(places)
            return Reading(found, _replaced(found))
        except Exception as error:
            if len(places) == 1 and not self._skip:
                raise self._error(places[0], int(first[0]), error) from error
            return self._one_by_one(places, first, error)

    def where(self, place: Int64, number: int) -> str:
        return f"sample {number:,} ({self._stream.where(place)})"

    def _one_by_one(self, places: Int64, first: Int64, whole: Exception) -> Reading:
        rows: list[Arrays] = []
        skipped: list[str] = []
        for place, number in zip(places, first.tolist(), strict=True):
            found, error = self._try(place)
            if found is None and error is not None:
                if not self._skip or isinstance(error, _TEMPORARY):
                    raise self._error(place, number, error) from error
                found = self._next(place, number, error)
                skipped.append(str(self._error(place, number, error)))
            assert found is not None
            rows.append(found)
        if not skipped:
            raise SampleError(
                f"samples {int(first[0]):,} to {int(first[-1]):,} (the first: {self._stream.where(places[0])}) can be "
                f"read one by one, but not together: {describe(whole)}"
            ) from whole
        return Reading(joined(rows), (*skipped, *chain.from_iterable(map(_replaced, rows))))

    def _try(self, place: Int64) -> tuple[Arrays | None, Exception | None]:
        try:
            return self._stream.read(place[None]), None
        except Exception as error:  # whatever is wrong with a sample
            return None, error

    def _next(self, place: Int64, number: int, first: Exception) -> Arrays:
        at = place
        for _ in range(TRIES):
            at = self._stream.after(at)
            found, error = self._try(at)
            if found is not None:
                return found
            if isinstance(error, _TEMPORARY):
                raise self._error(at, number, error) from error
        raise SampleError(f"{self._error(place, number, first)} Nor can the {TRIES} samples after it be read.")

    def _error(self, place: Int64, number: int, error: Exception) -> SampleError:
        if isinstance(error, ForgeError):  # which names the place itself
            return SampleError(f"sample {number:,} can't be read: {error}")
        name = getattr(error, "stage", "read")
        return SampleError(f"{self.where(place, number)} can't be read: stage {name}: {describe(error).rstrip('.')}.")


def _mask(arrays: Arrays, padding: NDArray[np.bool_]) -> None:
    """Have rows count for nothing: no label is learned, and they belong to no source and no pair."""
    rows = slice(None) if padding.all() else padding  # a bucket is one sample of several rows
    arrays.labels[rows] = MASKED
    if arrays.sources is not None:
        arrays.sources[rows] = -1


def _replaced(arrays: Arrays) -> tuple[str, ...]:
    """A sentence for each item that an empty one stands in for."""
    return tuple(text for row in arrays.items or () for one in row.values() for text in one.replaced)


def joined(parts: list[Arrays]) -> Arrays:
    """Rows of several reads, one after the other."""
    found = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Arrays)}
    return Arrays(**{name: _joined(one) for name, one in found.items() if one[0] is not None})


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(chain.from_iterable(parts))
    return joined(parts) if isinstance(parts[0], Arrays) else np.concatenate(parts)
