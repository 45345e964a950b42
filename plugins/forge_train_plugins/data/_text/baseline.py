"""Baseline from counting: a byte trigram, as a yardstick for the model's bits per byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from forge_train_kit.data.held_out import Side

_COUNTED = 256 << 20
"""Bytes of training text that are counted at most, and a sixteenth of it for the held-out text that is measured."""
_CHUNK = 1 << 20

Index = NDArray[np.int64]


def trigram_bits_per_byte(documents: Iterable[tuple[Side, bytes]]) -> float | None:
    """Bits per byte of the held-out documents under a byte trigram counted on the training documents.

    Witten-Bell interpolation (Witten & Bell 1991, method C): p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab)),
    where t(ab) is the number of different bytes seen after ab; p(c | b) likewise from p(c), and p(c) from 1/256. A
    document's first two bytes have the context there is.

    Returns:
        Bits per byte, or None if nothing is held out.
    """
    triples = np.zeros(1 << 24, np.uint32)
    pairs = np.zeros(1 << 16, np.int64)
    singles = np.zeros(1 << 8, np.int64)
    held_out: list[bytes] = []
    room, held_room = _COUNTED, _COUNTED // 16

    def training() -> Iterator[bytes]:
        nonlocal room, held_room
        for side, document in documents:
            if side == "validation" and held_room > 0:
                held_out.append(document)
                held_room -= len(document)
            elif side == "train" and room > 0:
                room -= len(document)
                yield document
            elif room <= 0 and held_room <= 0:
                return

    for chunk in _chunks(training()):
        first, second, third = _contexts(chunk)
        singles += np.bincount(first, minlength=len(singles))
        pairs += np.bincount(second, minlength=len(pairs))
        np.add.at(triples, third, np.uint32(1))  # bincount would make 2^24 new counts for every chunk
    if not held_out:
        return None
    uniform = np.full(256, 1 / 256)
    p1 = _interpolate(singles[None, :], uniform)[0]
    p2 = _interpolate(pairs.reshape(256, 256), p1)
    totals, kinds = _rows(triples.reshape(65536, 256))
    bits, size = 0.0, 0
    for chunk in _chunks(held_out):
        text = np.frombuffer(b"".join(chunk), np.uint8)
        starts = _starts(chunk)
        probability = p1[text]
        second = np.setdiff1d(np.arange(len(text)), starts, assume_unique=True)
        probability[second] = p2[text[second - 1], text[second]]
        third = np.setdiff1d(second, starts + 1, assume_unique=True)
        context = text[third - 2].astype(np.int64) << 8 | text[third - 1]
        seen = triples[context << 8 | text[third]]
        weight = kinds[context]
        known = weight > 0
        lower = probability[third]
        probability[third] = np.where(known, (seen + weight * lower) / np.maximum(totals[context] + weight, 1), lower)
        bits -= float(np.log2(probability).sum())
        size += len(text)
    return bits / size


def _chunks(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Documents in groups of about `_CHUNK` bytes."""
    group: list[bytes] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= _CHUNK:
            yield group
            group, size = [], 0
    if group:
        yield group


def _starts(chunk: Sequence[bytes]) -> Index:
    return np.array([0, *itertools.accumulate(len(document) for document in chunk)][:-1], np.int64)


def _contexts(chunk: Sequence[bytes]) -> tuple[Index, Index, Index]:
    """Indices of all bytes, pairs and triples that lie within a document."""
    text = np.frombuffer(b"".join(chunk), np.uint8).astype(np.int64)
    starts = _starts(chunk)
    pair = np.zeros(len(text), bool)
    pair[1:] = True
    pair[starts] = False
    triple = pair.copy()
    triple[1:] &= pair[:-1]
    pairs = text.copy()
    pairs[1:] |= text[:-1] << 8
    triples = pairs.copy()
    triples[2:] |= text[:-2] << 16
    return text, pairs[pair], triples[triple]


def _rows(counts: NDArray[np.integer]) -> tuple[Index, Index]:
    """Sum and number of different successors of each context."""
    return counts.sum(axis=1, dtype=np.int64), np.count_nonzero(counts, axis=1)


def _interpolate(counts: Index, lower: NDArray[np.float64]) -> NDArray[np.float64]:
    """Witten-Bell of every context: `[contexts, 256]` counts, `[256]` probabilities of the shorter context."""
    totals, kinds = (column[:, None] for column in _rows(counts))
    smoothed = (counts + kinds * lower) / np.maximum(totals + kinds, 1)
    return np.where(kinds > 0, smoothed, lower)
