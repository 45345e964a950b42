"""Pairs of documents as rows: two that follow each other in every micro-batch, or one that holds several pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from forge_train import ConfigError

from .documents import Documents, Int64
from .rows import Arrays, PackedRows, Pieces, Rows
from .stream import Ordered


class _Pairs:
    """Rows 2k and 2k + 1 as one."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.count, self.digest = rows.count // 2, rows.digest

    def read(self, rows: Int64) -> Arrays:
        return self._rows.read(np.stack([2 * rows, 2 * rows + 1], axis=1).ravel())

    def where(self, row: int) -> str:
        return self._rows.where(2 * row)


class Paired:
    """Samples 2i and 2i + 1 are the two rows of a pair; pairs have a different order in every epoch.

    `Arrays.sources` says which of its pair a row is, 0 or 1; the reader sets it to -1 in rows that do not count.

    Args:
        rows: those of all pairs: rows 2k and 2k + 1 are pair k.
        seed: for the order of pairs; None keeps the order of the rows.
        key: the plugin's section, for messages.
        fixed: for held-out pairs: every epoch has the order of epoch 0, and only epoch 0 counts.
    """

    together = 2
    """Samples of which none is padding unless all are."""

    def __init__(self, rows: Rows, seed: int | None, *, key: str, fixed: bool = False) -> None:
        self._rows = rows
        self._order = Ordered(_Pairs(rows), seed, key=key, fixed=fixed)
        self._key = key
        self.digest = rows.digest
        count = 2 * (rows.count // 2)
        self.samples = count if fixed else None
        self.epoch = None if fixed else count

    def places(self, index: Int64) -> Int64:
        """`[k]` → `[k]`, the row."""
        return self._order.places(index // 2) * 2 + index % 2

    def read(self, places: Int64) -> Arrays:
        return replace(self._rows.read(places), sources=places % 2)

    def where(self, place: Int64) -> str:
        return self._rows.where(int(place))

    def after(self, place: Int64) -> Int64:
        raise ConfigError(f"{self._key}: another row can't stand in for one of a pair.")

    def state_dict(self, samples: int) -> dict[str, Any]:
        return self._order.state_dict(samples)

    def load_state_dict(self, state: Mapping[str, Any], samples: int) -> None:
        """Continue from a saved state.

        Raises:
            ConfigError: the state belongs to other content.
        """
        self._order.load_state_dict(state, samples)


class PackedPairs(PackedRows):
    """Several pairs in a row: its documents are 0 and 1 of its first pair, then those of the next one.

    `Arrays.sources`, `[rows, answers]`, is 0, 1, 0, 1, … for the documents of a row, and -1 up to the most that a row
    has. `Arrays.answers` are the numbers of documents.
    """

    def __init__(self, documents: Documents, sequence: int, pieces: Pieces, *, pad: int) -> None:
        super().__init__(documents, sequence, pieces, pad=pad)
        self._counts = np.diff(pieces.row_ends, prepend=0)

    def read(self, rows: Int64) -> Arrays:
        own, place = super().read(rows), np.arange(self._counts.max())
        sources = np.where(place < self._counts[rows, None], place % 2, -1)
        return replace(own, sources=sources, answers=own.document_ids)
