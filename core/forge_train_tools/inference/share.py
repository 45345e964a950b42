"""Records as rows of micro-batches, a share of them encoded by each data-parallel rank."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from forge_train import Job
from forge_train.base.errors import ConfigError

from .encoding import Encoder, Span, Tokens
from .records import KEY, Placed, Records

KEPT = 64 << 20
"""Bytes of tokens that a rank keeps from the check until it computes them."""


@dataclass(frozen=True)
class Row:
    """A stretch of a record that passes through the model at once: all of it, or a window."""

    number: int
    """Its place among all rows, from 0."""
    record: Tokens
    start: int
    stop: int
    """Its tokens are those of the record from `start` to `stop` (exclusive)."""
    asked: tuple[Span, ...]
    """Tokens of the record whose probability is asked for here; each follows one of the row's."""


class Share:
    """All records, of which this rank encodes those that it computes.

    With windows, a record may be several rows; otherwise record and row are one.

    Args:
        records: all of them.
        encode: makes tokens of one.
        job: the job.
        size: rows of a micro-batch.
        count: the number of records, if they were checked before.
    """

    def __init__(self, records: Records, encode: Encoder, job: Job, size: int, count: int = 0) -> None:
        self.count = count
        self._records, self.encode, self._dist, self._size = records, encode, job.dist, size
        self._starts: NDArray[np.int64] | None = None
        self._kept: dict[int, Tokens] = {}
        self._whole = False
        """True if everything that this rank computes is kept."""

    def check(self) -> None:
        """Read all records. Every data-parallel rank encodes its share, and keeps what fits.

        Raises:
            ConfigError: on every rank, for the first record that can't be asked for; or there is none.
        """
        room, sizes, number, problem = KEPT, array("q"), -1, None
        try:
            for placed in self._records.read():
                number = placed[0]
                if not self._is_mine(number):
                    continue
                one = self.encode(*placed)
                sizes.append(len(windows(one, self.encode.longest)) if self.windowed else 1)
                if (room := room - one.bytes) >= 0:
                    self._kept[number] = one
        except ConfigError as error:
            problem = (number, error)
        found = self._dist.gather_objects((self._dist.data_rank, problem, np.array(sizes if self.windowed else ())))
        if problems := [one for _, one, _ in found if one is not None]:
            raise min(problems, key=lambda one: one[0])[1]
        if number < 0:
            raise ConfigError(f"{KEY}: {', '.join(self._records.sources)} has no record.")
        self.count = number + 1
        if self.windowed:
            rows = np.zeros(self.count, np.int64)
            for rank, _, each in found:
                rows[rank :: self._dist.data_ranks] = each
            self._starts = np.concatenate(([0], rows.cumsum()))
        self._whole = room >= 0 and (self._dist.data_ranks == 1 or not self.windowed)

    @property
    def windowed(self) -> bool:
        """True if a record may be several rows."""
        return self.encode.long == "windows"

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.first_row(self.count)

    def first_row(self, record: int) -> int:
        """The number of a record's first row."""
        return record if self._starts is None else int(self._starts[record])

    def records_before(self, row: int) -> int:
        """Number of records all of whose rows come before a row."""
        if self._starts is None:
            return min(row, self.count)
        return int(np.searchsorted(self._starts, min(row, self.total), side="right")) - 1

    def rows(self, start: int) -> Iterator[Callable[[], Row]]:
        """Yield all rows from number `start` on; a row is encoded when it is called."""
        first = self.records_before(start)
        for number, encoded in self._tokens(first):
            begin, last = self.first_row(number), _Last(encoded, self.encode.longest, windowed=self.windowed)
            for row in range(max(begin, start), self.first_row(number + 1)):
                yield partial(last.row, row, row - begin)

    def _tokens(self, start: int) -> Iterator[tuple[int, Callable[[], Tokens]]]:
        if self._whole:
            for number in range(start, self.count):
                yield number, partial(self._kept.pop, number)
        else:
            for placed in self._records.read(start):
                yield placed[0], partial(self._encoded, placed)

    def _encoded(self, placed: Placed) -> Tokens:
        return self._kept.pop(placed[0], None) or self.encode(*placed)

    def _is_mine(self, number: int) -> bool:
        """True if this rank encodes a record for the check: without windows, one that it will compute."""
        group = number if self.windowed else number // self._size
        return group % self._dist.data_ranks == self._dist.data_rank


class _Last:
    """The rows of the record at hand, encoded once."""

    def __init__(self, encoded: Callable[[], Tokens], longest: int, *, windowed: bool) -> None:
        self._encoded, self._longest, self._windowed = encoded, longest, windowed
        self._found: tuple[Tokens, list[tuple[int, int, tuple[Span, ...]]]] | None = None

    def row(self, number: int, index: int) -> Row:
        if self._found is None:
            one = self._encoded()
            self._found = one, windows(one, self._longest) if self._windowed else [(0, len(one.ids), one.asked)]
        one, found = self._found
        return Row(number, one, *found[index])


def windows(one: Tokens, longest: int) -> list[tuple[int, int, tuple[Span, ...]]]:
    """Start and stop of the windows of a record, and what is asked for in each.

    Each token after the first is predicted once: `longest` of them in each window, the last of which begins as far on
    the left as fits (`get_rolling_token_windows` of lm-evaluation-harness, the first token in the place of its prefix).
    """
    size = len(one.ids)
    if size <= longest:
        return [(0, size, one.asked)]
    found = []
    for begin in range(1, size, longest):
        end = min(begin + longest, size)
        asked = ((max(start, begin), min(stop, end)) for start, stop in one.asked)
        found.append((max(end - 1 - longest, 0), end - 1, tuple(span for span in asked if span[0] < span[1])))
    return found
