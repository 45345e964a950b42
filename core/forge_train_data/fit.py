"""Documents that must not be cut, in rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

from forge_train import ConfigError

from .documents import Documents
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

    def packed() -> Pieces:
        made = arranged(length, sequence, packing)
        return Pieces(document[made.order], start[made.order], length[made.order], made.row_ends)

    return packed() if packing == "pad" else planned(documents, f"{packing} {sequence} {long}", packed)
