"""Places in memory of the tokens of rows that continue side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

UNIT = 16
"""Numbers of columns are multiples of this: torch's attention on a CPU (2.13) then sums a row's weights in the same
order, however many masked columns follow, so that a row's numbers do not depend on the longest row beside it."""


TOGETHER = 4
"""Numbers of rows of a forward with one token each are multiples of this. On a CPU, products with fewer rows round
differently (MKL), and so do elements of an exponential that do not fill a vector (torch 2.13)."""


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


@dataclass(frozen=True)
class Run:
    """Tokens that a kernel computes in one call, without a copy of what they see: several of one row, or one of each of
    some rows that follow each other."""

    tokens: slice
    rows: slice
    lengths: Tensor
    """Number of positions that each token sees."""
    seen: int
    """Number of columns that these take."""


def runs_of(tokens: Sequence[tuple[int, int]], device: torch.device) -> list[Run]:
    """All tokens of a forward, in their order.

    Args:
        tokens: row and position of each.
        device: of the memory.
    """
    counts = [(row, sum(1 for _ in some)) for row, some in groupby(row for row, _ in tokens)]
    found, start = list[Run](), 0
    for _, some in groupby(counts, lambda one: None if one[1] == 1 else one[0]):
        rows = list(some)
        stop = start + sum(count for _, count in rows)
        lengths = [at + 1 for _, at in tokens[start:stop]]
        span = slice(rows[0][0], rows[-1][0] + 1)
        found.append(Run(slice(start, stop), span, torch.tensor(lengths, device=device), rounded(max(lengths))))
        start = stop
    return found


def columns_of(capacity: int, window: int | None) -> int:
    """Columns of a memory for rows of this many positions."""
    return capacity if window is None else min(capacity, rounded(window))


def rounded(count: int, unit: int = UNIT) -> int:
    return -(-count // unit) * unit


def filled(values: Sequence[int], filler: int) -> list[int]:
    """The values of the rows that continue, and of those that follow them in a forward."""
    return [*values, *[filler] * (-len(values) % TOGETHER)]
