"""Documents that must not be cut, in rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from forge_train import ConfigError

from .documents import Documents, Int64
from .packing import arranged
from .plans import planned
from .rows import Pieces

Long = Literal["refuse", "drop", "left", "right"]


def fitted(
    documents: Documents,
    sequence: int,
    *,
    long: Long,
    packing: str,
    key: str,
    together: int = 1,
    trimmed: Callable[[int, int, int], tuple[int, int]] | None = None,
) -> Pieces:
    """Whole documents in rows of `sequence` tokens.

    Args:
        documents: of one side.
        sequence: tokens of a row.
        long: what becomes of a longer one: `refuse` it, `drop` it, or keep as many of its tokens as a row has, without
            those on its `left` or `right`.
        packing: `best_fit`, several in a row; `pad`, one; or `buckets`.
        key: the section that messages name.
        together: 2 for pairs: both are dropped if one is. `best_fit` puts them into the same row, so that it is the
            pair that may be longer than a row; of such a pair, texts of more than half a row are cut.
        trimmed: gives start and length of what is kept of a document that is cut, by its number, start and length.

    Raises:
        ConfigError: there is a longer one, and it is to be refused.
    """
    lengths, unit = documents.lengths(), 1 if packing == "pad" else together
    units = lengths.reshape(-1, unit).sum(1)
    if long == "refuse" and (longer := units > sequence).any():
        raise ConfigError(
            f"{key}.long: {int(longer.sum()):,} of {len(units):,} {'texts' if unit == 1 else 'pairs'} are longer than "
            f"a row of {sequence:,} tokens, the longest has {int(units.max()):,}. Raise train.sequence, or choose "
            "drop, left or right."
        )
    room = _room(lengths, sequence) if unit == 2 else np.full(len(lengths), sequence)
    longer = lengths > room
    kept = ~longer.reshape(-1, together).any(1).repeat(together)
    document = np.flatnonzero(kept) if long == "drop" else np.arange(len(lengths))
    length = np.minimum(lengths, room)[document]
    start = (lengths[document] - length) if long == "left" else np.zeros(len(document), np.int64)

    if long in ("left", "right"):
        for at in np.flatnonzero(longer).tolist():
            start[at], length[at] = trimmed(at, int(start[at]), int(length[at])) if trimmed else (start[at], length[at])
        if documents.masked:
            _check_learned(documents, document[longer], start[longer], length[longer], long=long, key=key)

    def packed() -> Pieces:
        made = arranged(length.reshape(-1, unit).sum(1), sequence, packing)
        order = (made.order[:, None] * unit + np.arange(unit)).ravel()
        return Pieces(document[order], start[order], length[order], made.row_ends * unit)

    options = f"{packing} {sequence} {long}{' pairs' if unit == 2 else ''}"
    return packed() if packing == "pad" else planned(documents, options, packed)


def _room(lengths: Int64, sequence: int) -> Int64:
    """The tokens that a row has for each text of a pair: half of them, or what the other text leaves."""
    other = lengths.reshape(-1, 2)[:, ::-1].ravel()
    return np.maximum(sequence // 2, sequence - other)


def _check_learned(documents: Documents, document: Int64, start: Int64, length: Int64, *, long: Long, key: str) -> None:
    """Refuse to cut away all that is learned of a document.

    Raises:
        ConfigError: with the number of such documents.
    """
    bare = 0
    for one, first, size in zip(document.tolist(), start.tolist(), length.tolist(), strict=True):
        kept = np.zeros(size, np.bool_)
        documents.learned(documents.span(one)[0] + first, kept)
        bare += not kept.any()
    if bare:
        other = "left" if long == "right" else "right"
        raise ConfigError(
            f"{key}.long: {long!r} cuts away all that is learned of {bare:,} of {documents.count:,} texts. Raise "
            f"train.sequence, or choose {other} or drop."
        )
