"""The table of a record's items, as a prepared folder has it: JSON, one token for each byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...modalities import Grid
from ..shard import Ids

FORMAT = 4
"""Number of the format; records of other formats are prepared again."""


class Noted(NamedTuple):
    """An item of a prepared record."""

    modality: str
    start: int
    """First position in the document."""
    length: int
    """Positions in the document."""
    vectors: int
    grid: Grid
    path: str
    """Relative to the folder of all data files; empty for items that are kept beside the tokens."""
    offset: int
    size: int
    """Bytes of the item, from `offset` on; of a file that is an item as a whole, with an offset of −1."""
    digest: str
    """Of the bytes, if they are kept beside the tokens: it decides what a run that goes on may read."""
    lead: tuple[int, ...] = ()
    """Tokens of the text before each group of the item's frames, which counts as an item of its own; empty for one that
    is not divided."""
    dtype: str = ""
    """Of its values, if the bytes are these, decoded when the record was prepared; empty if they are encoded."""
    runs: tuple[int, ...] = ()
    """Tokens of text and vectors in turn, text first, of an item with text among its vectors; empty for others."""
    pace: float = 1.0
    """Positions along time from one of its vectors to the next, where positions have three axes."""

    @property
    def missing(self) -> bool:
        """True if the item could not be read when the record was prepared, and an empty one stands in for it."""
        return not self.path and not self.size

    @property
    def stretches(self) -> list[tuple[int, int, Grid]]:
        """Its groups, or the whole item: where the positions of each begin in it, their number, and its grid."""
        if self.runs:
            return [(self.runs[0], self.length - self.runs[0], self.grid)]
        frames, *sides = self.grid
        lead = self.lead or (0,)
        width = (self.length - sum(lead)) // len(lead)
        begins = np.cumsum(lead) + width * np.arange(len(lead))
        return [(at, width, (frames // len(lead), sides[0], sides[1])) for at in begins.tolist()]

    def places(self, first: int) -> NDArray[np.int64]:
        """Its feature vectors, or items, by position: numbers from `first` on, and −1 for text."""
        found = np.full(self.length, -1, np.int64)
        if self.runs:
            kinds = np.arange(len(self.runs)) % 2 == 1
            found[np.repeat(kinds, self.runs)] = first + np.arange(self.vectors)
            return found
        for number, (at, width, _) in enumerate(self.stretches):
            found[at : at + width] = first + number * width + np.arange(width)
        return found


@dataclass(frozen=True)
class Table:
    """Items of a prepared record, and where that is from."""

    file: str
    """Relative to the folder of all data files; or an address."""
    place: str
    items: tuple[Noted, ...]

    def document(self) -> Ids:
        """The table as a document."""
        content = json.dumps([self.file, self.place, [list(one) for one in self.items]], separators=(",", ":"))
        return np.frombuffer(content.encode(), np.uint8).astype(np.uint32)

    @classmethod
    def of(cls, document: NDArray[Any]) -> Table:
        """Parse a document."""
        file, place, items = json.loads(document.astype(np.uint8).tobytes())
        return cls(
            file,
            place,
            tuple(
                Noted._make([*one[:4], tuple(one[4]), *one[5:9], tuple(one[9]), one[10], tuple(one[11]), one[12]])
                for one in items
            ),
        )
