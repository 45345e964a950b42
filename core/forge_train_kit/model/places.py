"""Places in memory of the tokens of rows that continue side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 16
"""Numbers of columns are multiples of this: torch's attention on a CPU (2.13) then sums a row's weights in the same
order, however many masked columns follow, so that a row's numbers do not depend on the longest row beside it."""


@dataclass(frozen=True)
class Places:
    """Places of tokens in memory, as row · columns + column."""

    newest: Tensor
    """`[tokens]`."""
    held: Tensor
    """Number of positions that each token sees, `[tokens]`."""
    seen: int
    """Number of columns that these take."""
    reads: Tensor | None = None
    """Of what each token sees, and then the last of it again, `[tokens, seen]`; None if it is the first columns of row
    after row."""


def of_one(lengths: Sequence[int], columns: int, window: int | None, device: torch.device) -> Places:
    """The last token of each row.

    Args:
        lengths: of the rows.
        columns: of the memory.
        window: most positions that a token sees, which are kept in turn.
        device: of the memory.
    """
    at = [row * columns + (end - 1) % (window or end) for row, end in enumerate(lengths)]
    held = [min(end, window or end) for end in lengths]
    newest, seen = torch.tensor([at, held], device=device)
    return Places(newest, seen, rounded(max(held)))


def of_several(
    tokens: Sequence[tuple[int, int]], columns: int, window: int | None, turn: int | None, device: torch.device
) -> Places:
    """Several tokens of a row: each reads its columns in the order in which it would if it were the last, and neither
    those after it nor what was forgotten.

    Args:
        tokens: row and position of each.
        columns: of the memory.
        window: most positions that a token sees.
        turn: positions that are kept in turn.
        device: of the memory.
    """
    seen = [min(at + 1, window or at + 1) for _, at in tokens]
    (row, position), held = torch.tensor(tokens, device=device).T, torch.tensor(seen, device=device)
    column = torch.minimum(torch.arange(rounded(max(seen)), device=device), held[:, None] - 1)
    if window is not None and turn is not None:
        column = (position[:, None] - (position[:, None] - column) % window) % turn
        position = position % turn
    return Places(row * columns + position, held, column.shape[1], row[:, None] * columns + column)


def columns_of(capacity: int, window: int | None) -> int:
    """Columns of a memory for rows of this many positions."""
    return capacity if window is None else min(capacity, rounded(window))


def rounded(count: int, unit: int = UNIT) -> int:
    return -(-count // unit) * unit
