"""One file of tokens, mapped: whoever wrote it, this is what it looks like from here on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]
Learned = NDArray[Any]
"""`[tokens]`: uint8, 1 for each token that is learned as a label; or float32, how much its loss counts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tokens of some documents, one after the other.

    Args:
        path: for messages.
        tokens: `[tokens]`, any integer dtype; a map of the file, so that nothing is read before it is used.
        ends: `[documents]` int64, where each document ends (exclusive); the last is `len(tokens)`. A map, if the file
            has them.
        trained: `[tokens]` uint8, 1 where the token is to be learned as a label, or float32, how much it counts as one;
            None where all are learned alike.
        first: tokens of the file that lie before these, for messages.
    """

    path: Path
    tokens: Ids
    ends: NDArray[np.int64]
    trained: Learned | None = None
    first: int = 0
