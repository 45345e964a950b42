"""Share of documents that occur more than once: exactly, by a hash, and nearly, by MinHash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..documents import Documents, Int64

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

SHINGLE = 5
"""Neighbouring words, or tokens, that are compared together."""
ALIKE = 0.8
"""Jaccard similarity of the shingles from which on two documents are near duplicates."""
PERMUTATIONS, ROWS = 128, 8
"""Size of a signature, and of a band of it: two documents are compared if they agree in one band. Of pairs with
similarity s that is the share 1 − (1 − s⁸)¹⁶: 0.95 at 0.8, 0.22 at 0.6."""
DOCUMENTS, TOKENS = 200_000, 1 << 25
"""Largest number of documents, and of their tokens (of bytes: four times as many), that are compared with each other. A
signature takes 512 bytes."""

_CHUNK = 1 << 20
"""Tokens whose shingles are looked at together."""
_NEIGHBOURS = 4
"""Documents of a bucket with which the next one is compared, beside the first."""
_SPACES = np.isin(np.arange(257), [*b" \t\n\r\v\f", 256])
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Counts of duplicate documents.

    Args:
        documents: documents that were hashed.
        exact: documents that equal an earlier one, token by token.
        compared: documents, from the first on, that were searched for near duplicates.
        exact_compared: those of them that equal an earlier one.
        near: those of them that equal no earlier one, but are similar to one.
    """

    documents: int
    exact: int
    compared: int
    exact_compared: int
    near: int


def duplicates(documents: Documents, *, words: bool) -> Duplicates:
    """Look through documents for those that are there more than once.

    Args:
        words: whether tokens are bytes, of which words are made to compare.
    """
    first = _firsts(documents)
    seen = first != np.arange(len(first))
    count = min(len(first), DOCUMENTS)
    if count:
        ends = np.cumsum(documents.lengths()[:count])
        count = max(int(ends.searchsorted(TOKENS * (4 if words else 1), "right")), 1)
    chosen = np.flatnonzero(~seen[:count])
    similar = near(signatures(documents, chosen, words=words))
    return Duplicates(len(first), int(seen.sum()), count, int(seen[:count].sum()), int(similar.sum()))


def _firsts(documents: Documents) -> Int64:
    """Of each document, the first one that equals it, `[documents]`."""
    hashes = np.fromiter(_hashes(documents), np.uint64, documents.count)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    found: Int64 = first[inverse]
    return found


def _hashes(documents: Documents) -> Iterator[int]:
    for shard in documents.shards:
        start = 0
        for end in shard.ends.tolist():
            tokens = np.ascontiguousarray(shard.tokens[start:end], "<u4")
            yield int.from_bytes(hashlib.blake2b(tokens.data, digest_size=8).digest())
            start = end


def signatures(documents: Documents, chosen: Int64, *, words: bool) -> U32:
    """MinHash signatures (Broder 1997) of some documents, `[chosen, PERMUTATIONS]`: two of them agree in about that
    share of their places in which the documents' sets of shingles agree."""
    signed = np.full((PERMUTATIONS, len(chosen)), np.iinfo(np.uint32).max, np.uint32)
    random = np.random.default_rng(0)
    factors = random.integers(0, 2**32, PERMUTATIONS, np.uint32) | np.uint32(1)
    shifts = random.integers(0, 2**32, PERMUTATIONS, np.uint32)
    for rows, starts, hashes in _shingled(documents, chosen, words):
        for at, (factor, shift) in enumerate(zip(factors, shifts, strict=True)):
            lowest = np.minimum.reduceat(hashes * factor + shift, starts)
            signed[at, rows] = np.minimum(signed[at, rows], lowest)
    return np.ascontiguousarray(signed.T)


def near(signed: U32) -> NDArray[np.bool_]:
    """Mark each document that is similar to an earlier one, `[documents]`, using bands of their signatures."""
    count = len(signed)
    found = np.zeros(count, bool)
    for band in range(0, PERMUTATIONS, ROWS):
        key = np.zeros(count, np.uint64)
        for row in range(band, band + ROWS):
            key = _scramble(key ^ signed[:, row])
        order = np.argsort(key, kind="stable")
        sorted_key = key[order]
        begin = sorted_key.searchsorted(sorted_key)  # where the bucket of each begins
        place = np.arange(count)
        for earlier in (begin, *(place - back for back in range(1, _NEIGHBOURS + 1))):
            pairs = np.flatnonzero((earlier >= begin) & (earlier < place) & ~found[order])
            left, right = order[earlier[pairs]], order[pairs]
            for at in range(0, len(pairs), _CHUNK // PERMUTATIONS):
                here = slice(at, at + _CHUNK // PERMUTATIONS)
                alike = (signed[left[here]] == signed[right[here]]).mean(axis=1)
                found[right[here][alike >= ALIKE]] = True
    return found


def _shingled(documents: Documents, chosen: Int64, words: bool) -> Iterator[tuple[Int64, Int64, U32]]:
    """Hashes of shingles of some documents at a time: rows of `chosen`, where the shingles of each begin, and the
    hashes. A document that is longer than a chunk comes in pieces, whose borders no shingle crosses."""
    buffer = np.empty(_CHUNK, np.int64)
    rows: list[int] = []
    ends: list[int] = []
    size = 0
    for row, document in enumerate(chosen.tolist()):
        start, stop = documents.span(document)
        while start < stop:
            taken = min(stop - start, _CHUNK - size)
            documents.take(start, buffer[size : size + taken])
            start, size = start + taken, size + taken
            rows.append(row)
            ends.append(size)
            if size == _CHUNK:
                yield _together(buffer, rows, ends, words)
                rows, ends, size = [], [], 0
    if rows:
        yield _together(buffer[:size], rows, ends, words)


def _together(ids: Int64, rows: list[int], ends: list[int], words: bool) -> tuple[Int64, Int64, U32]:
    hashes, counts = shingles(ids, np.array(ends, np.int64), words=words)
    some = counts > 0
    return np.array(rows, np.int64)[some], (np.cumsum(counts) - counts)[some], hashes


def shingles(ids: Int64, ends: Int64, *, words: bool) -> tuple[U32, Int64]:
    """Hashes of every `SHINGLE` words or tokens of a document that stand together; a shorter one is one itself.

    Args:
        ids: `[tokens]`, of documents one after the other.
        ends: `[documents]`, where each ends (exclusive).

    Returns:
        The hashes, and how many of them each document has: none, if it has no words.
    """
    units, ends = _words(ids, ends) if words else (_scramble(ids.astype(np.uint64)), ends)
    sizes = np.diff(ends, prepend=0)
    left = ends.repeat(sizes) - np.arange(len(units))  # of the document, from each unit on
    mixed = units.copy()
    for at in range(1, min(SHINGLE, len(units))):
        mixed[:-at] += units[at:] * _FACTOR**at * (left[:-at] > at)
    first = np.zeros(len(units), bool)
    first[(ends - sizes)[sizes > 0]] = True
    found = _scramble(mixed[first | (left >= SHINGLE)])
    return (found >> np.uint64(32)).astype(np.uint32), np.where(sizes, np.maximum(sizes - SHINGLE + 1, 1), 0)


def _words(ids: Int64, ends: Int64) -> tuple[U64, Int64]:
    """Hashes of what stands between white space, of bytes, and where each document's end; other ids are left out."""
    space = _SPACES[np.minimum(ids, 256)]
    letters = np.flatnonzero(~space)
    if not len(letters):
        return np.empty(0, np.uint64), np.zeros_like(ends)
    fresh = np.diff(letters, prepend=-2) > 1
    inside = letters.searchsorted(ends)
    fresh[inside[inside < len(letters)]] = True
    starts = np.flatnonzero(fresh)
    place = np.arange(len(letters)) - starts.repeat(np.diff(starts, append=len(letters)))
    hashes = np.add.reduceat(_scramble((place * 256 + ids[letters]).astype(np.uint64)), starts)
    return _scramble(hashes), starts.searchsorted(inside)


def _scramble(x: U64) -> U64:
    """splitmix64 (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
