"""Documents that must not be cut, in rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

from forge_train import ConfigError

from .documents import Documents, Int64
from .packing import arranged
from .plans import planned
from .rows import Pieces

Long = Literal["refuse", "drop", "left", "right"]


def fitted(documents: Documents, sequence: int, *, long: Long, packing: str, key: str, together: int = 1) -> Pieces:
    """Whole documents in rows of `sequence` tokens.

    Args:
        documents: of one side.
        sequence: tokens of a row.
        long: what becomes of a longer one: `refuse` it, `drop` it, or keep as many of its tokens as a row has, without
            those on its `left` or `right`.
        packing: `best_fit`, several in a row; `pad`, one; or `buckets`.
        key: the section that messages name.
        together: documents that belong together: all of them are dropped if one is.

    Raises:
        ConfigError: there is a longer one, and it is to be refused.
    """
    lengths = documents.lengths()
    longer = lengths > sequence
    if long == "refuse" and longer.any():
        raise ConfigError(
            f"{key}.long: {int(longer.sum()):,} of {len(lengths):,} texts are longer than a row of "
            f"{sequence:,} tokens, the longest has {int(lengths.max()):,}. Raise train.sequence, or choose "
            "drop, left or right."
        )
    kept = ~longer.reshape(-1, together).any(1).repeat(together)
    document = np.flatnonzero(kept) if long == "drop" else np.arange(len(lengths))
    length = np.minimum(lengths, sequence)[document]
    start = (lengths[document] - length) if long == "left" else np.zeros(len(document), np.int64)

    if documents.masked and long in ("left", "right"):
        _check_learned(documents, document[longer], start[longer], sequence, long=long, key=key)

    def packed() -> Pieces:
        made = arranged(length, sequence, packing)
        return Pieces(document[made.order], start[made.order], length[made.order], made.row_ends)

    return packed() if packing == "pad" else planned(documents, f"{packing} {sequence} {long}", packed)


def _check_learned(documents: Documents, document: Int64, start: Int64, sequence: int, *, long: Long, key: str) -> None:
    """Refuse to cut away all that is learned of a document.

    Raises:
        ConfigError: with the number of such documents.
    """
    kept = np.zeros(sequence, np.bool_)
    bare = 0
    for one, first in zip(document.tolist(), start.tolist(), strict=True):
        documents.learned(documents.span(one)[0] + first, kept)
        bare += not kept.any()
    if bare:
        other = "left" if long == "right" else "right"
        raise ConfigError(
            f"{key}.long: {long!r} cuts away all that is learned of {bare:,} of {documents.count:,} texts. Raise "
            f"train.sequence, or choose {other} or drop."
        )
