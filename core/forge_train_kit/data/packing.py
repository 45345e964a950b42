"""Assignment of documents to rows or batches, as pure functions of their lengths and a seed."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .permutation import permute

Int64s = NDArray[np.int64]

SEED = 0x9ACC
"""Of the windows in which documents are packed: rows are the same in every run, only their order is the run's."""
_BUFFER = 65536
"""Documents among which those of like length are looked for."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Documents in rows, or in batches.

    Args:
        order: `[documents]`, the documents row by row.
        row_ends: `[rows]`, where each row ends in `order` (exclusive); the last is `len(order)`.
    """

    order: Int64s
    row_ends: Int64s


def cut(lengths: Int64s, capacity: int) -> tuple[Int64s, Int64s, Int64s]:
    """Documents as pieces of at most `capacity` tokens: whole rows, then the rest.

    Returns:
        `[pieces]` each, in order: the document, where in it the piece starts, and the piece's length in tokens. Empty
        documents have no piece.
    """
    if capacity < 1:
        raise ValueError(f"rows of {capacity} tokens")
    pieces = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    first = np.cumsum(pieces) - pieces
    start = (np.arange(len(document), dtype=np.int64) - first[document]) * capacity
    return document, start, np.minimum(lengths[document] - start, capacity)


def arranged(lengths: Int64s, sequence: int, packing: str) -> Packed:
    """Pieces of at most `sequence` tokens in rows: `best_fit`, several in a row; `pad`, one; or `buckets`, batches of
    pieces of like length in the place of rows."""
    if packing == "best_fit":
        return best_fit(lengths, sequence, seed=SEED)
    if packing == "buckets":
        unit = bucket_unit(sequence)
        return buckets(-(-lengths // unit) * unit, tokens_per_batch=sequence, buffer=_BUFFER, seed=SEED)
    return Packed(np.arange(len(lengths), dtype=np.int64), np.arange(1, len(lengths) + 1, dtype=np.int64))


def bucket_unit(sequence: int) -> int:
    """The length of a bucket's rows is a multiple of this: there are few shapes to compile, and tensor parallelism can
    divide them as it divides `sequence`."""
    return math.gcd(sequence, 64)


def best_fit(lengths: Int64s, capacity: int, *, window: int = 65536, seed: int) -> Packed:
    """Documents in rows of at most `capacity` tokens, none of them cut: best-fit-decreasing (arXiv:2404.10830) in
    windows of the shuffled documents. A row has its documents in their shuffled order, and the rows of a window, which
    are filled by length, are shuffled.

    Args:
        lengths: `[documents]`, in tokens, each from 1 to `capacity`; see `cut`.
        window: in documents.

    Raises:
        ValueError: naming a document that is empty or longer than a row.
    """
    return _in_windows(lengths, capacity, window, seed, _fit)


def buckets(lengths: Int64s, *, tokens_per_batch: int, buffer: int, seed: int) -> Packed:
    """Batches of documents of like length: the shuffled documents are sorted by length in buffers, and cut into batches
    of at most `tokens_per_batch` tokens with padding (the longest × the number of documents). A batch has its documents
    in their shuffled order, and the batches of a buffer are shuffled.

    Args:
        lengths: `[documents]`, in tokens, each from 1 to `tokens_per_batch`.
        buffer: in documents.

    Returns:
        The batches, as rows.

    Raises:
        ValueError: naming a document that is empty or longer than a batch.
    """
    return _in_windows(lengths, tokens_per_batch, buffer, seed, _alike)


def _in_windows(
    lengths: Int64s, capacity: int, window: int, seed: int, rows_of: Callable[[Int64s, int], Int64s]
) -> Packed:
    """Shuffles documents and groups each window of them by the row that `rows_of` gives them, rows shuffled."""
    if window < 1:
        raise ValueError(f"windows of {window} documents")
    order, counts = np.empty(len(lengths), np.int64), []
    for number, start in enumerate(range(0, len(lengths), window)):
        stop = min(start + window, len(lengths))
        position = np.arange(start, stop, dtype=np.int64)
        documents = permute(position, np.zeros_like(position), len(lengths), seed)
        chosen = lengths[documents].astype(np.int64)
        if wrong := np.flatnonzero((chosen < 1) | (chosen > capacity)).tolist():
            first = wrong[0]
            raise ValueError(f"document {documents[first]} has {chosen[first]} tokens, and not 1 to {capacity}")
        row = rows_of(chosen, capacity)
        rows = np.arange(row.max() + 1, dtype=np.int64)
        row = permute(rows, np.full_like(rows, number + 1), len(rows), seed)[row]
        order[start:stop] = documents[np.argsort(row, kind="stable")]
        counts.append(np.bincount(row))
    return Packed(order, np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]), dtype=np.int64))


def _fit(lengths: Int64s, capacity: int) -> Int64s:
    """The row of each document: the longest first, each into the fullest row with space for it."""
    by_length = np.argsort(-lengths, kind="stable")
    rows_with: dict[int, list[int]] = {}  # by the space they have left
    spaces: list[int] = []  # that some row has left, ascending
    chosen: list[int] = []
    rows = 0
    for length in lengths[by_length].tolist():
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = rows, capacity - length
            rows += 1
        else:
            alike = rows_with[spaces[at]]
            row, space = alike.pop(), spaces[at] - length
            if not alike:
                del spaces[at]
        chosen.append(row)
        if space:
            alike = rows_with.setdefault(space, [])
            if not alike:
                insort(spaces, space)
            alike.append(row)
    row_of = np.empty(len(lengths), np.int64)
    row_of[by_length] = chosen
    return row_of


def _alike(lengths: Int64s, capacity: int) -> Int64s:
    """The batch of each document: the shortest first, each batch as large as its longest document allows."""
    by_length = np.argsort(lengths, kind="stable")
    ascending = lengths[by_length]
    ends, end = [], 0
    while end < len(ascending):
        most = ascending[end : end + capacity // int(ascending[end])]
        end += int(np.searchsorted(most * np.arange(1, len(most) + 1), capacity, "right"))
        ends.append(end)
    batch_of = np.empty(len(lengths), np.int64)
    batch_of[by_length] = np.searchsorted(ends, np.arange(len(lengths)), "right")
    return batch_of
