"""Documents that must not be cut, in rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

from forge_train import ConfigError

from .documents import Documents
from .packing import best_fit
from .rows import Pieces
from .tokens import PACKING_SEED

Long = Literal["refuse", "drop", "left", "right"]


def fitted(documents: Documents, sequence: int, *, long: Long, packing: str, key: str) -> Pieces:
    """Whole documents in rows of `sequence` tokens.

    Args:
        documents: of one side.
        sequence: tokens of a row.
        long: what becomes of a longer one: `refuse` it, `drop` it, or keep as many of its tokens as a row has, without
            those on its `left` or `right`.
        packing: `best_fit`, several in a row, or `pad`, one.
        key: the section that messages name.

    Raises:
        ConfigError: there is a longer one, and it is to be refused.
    """
    lengths = documents.lengths()
    longer = lengths > sequence
    if long == "refuse" and longer.any():
        raise ConfigError(
            f"{key}.long: {int(longer.sum()):,} of {len(lengths):,} conversations are longer than a row of "
            f"{sequence:,} tokens, the longest has {int(lengths.max()):,}. Raise train.sequence, or choose "
            "drop, left or right."
        )
    document = np.flatnonzero(~longer) if long == "drop" else np.arange(len(lengths))
    length = np.minimum(lengths, sequence)[document]
    start = (lengths[document] - length) if long == "left" else np.zeros(len(document), np.int64)
    order, row_ends = np.arange(len(document)), np.arange(1, len(document) + 1)
    if packing == "best_fit":
        packed = best_fit(length, sequence, seed=PACKING_SEED)
        order, row_ends = packed.order, packed.row_ends
    return Pieces(document[order], start[order], length[order], row_ends)
