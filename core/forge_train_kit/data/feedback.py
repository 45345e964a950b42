"""Answers with labels as rows, and beside each row its prompt with the answer of another one.

A prepared folder has two documents for each record: its tokens, and one token, 1 for a desirable answer and 0 for an
undesirable one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forge_train import MASKED

from .documents import Documents, Int64
from .rows import Arrays, PackedRows, Pieces

_STRIDE = 0.382
"""Share of the answers between a row and the one whose answer it gets. Files often have the answers to one prompt next
to each other, or all desirable answers and then all undesirable ones in the same order: neither gives a prompt one of
its own answers at this distance (the golden section), unless there are very few."""


class Answers(Documents):
    """The documents of a prepared folder that are answers, without their labels."""

    def __init__(self, documents: Documents) -> None:
        super().__init__(documents.shards, documents.digest, vocabulary=documents.vocabulary)
        self.count //= 2
        labels = [shard.tokens[shard.ends[1::2] - 1] for shard in self.shards]
        self.desirable = np.concatenate([*labels, np.empty(0, np.int64)]) == 1
        """`[documents]`."""

    def lengths(self) -> Int64:
        return super().lengths()[::2]

    def span(self, document: int) -> tuple[int, int]:
        return super().span(2 * document)


class FeedbackRows(PackedRows):
    """Answers in rows, one in each, after their prompts.

    `Arrays.sources` is 1 for a desirable answer and 0 for an undesirable one. `Arrays.mismatched` is, for each row, its
    prompt followed by the answer of another row, always the same. It is cut at the end of the row; its first token
    always has room.

    Args:
        answers: at least two.
        sequence: tokens of a row.
        pieces: one in each row.
        pad: the token id of padding.
    """

    def __init__(self, answers: Answers, sequence: int, pieces: Pieces, *, pad: int) -> None:
        super().__init__(answers, sequence, pieces, pad=pad)
        self._desirable = answers.desirable[pieces.document].astype(np.int64)
        self._stride = max(1, round(_STRIDE * self.count))

    def read(self, rows: Int64) -> Arrays:
        own = super().read(rows)
        others = super().read((rows + self._stride) % self.count)
        return replace(own, sources=self._desirable[rows], mismatched=self._mismatched(own, others))

    def _mismatched(self, own: Arrays, others: Arrays) -> Arrays:
        shape = own.inputs.shape
        inputs, labels = np.full(shape, self._pad, np.int64), np.full(shape, MASKED, np.int64)
        position_ids, document_ids = np.empty(shape, np.int64), np.empty(shape, np.int64)
        for at in range(len(inputs)):
            begin = int(np.flatnonzero(own.labels[at] != MASKED)[0])
            learned = np.flatnonzero(others.labels[at] != MASKED)
            first, last = int(learned[0]), int(learned[-1])
            length = min(begin + 1 + last - first, shape[1])
            size = length - begin  # labels of the answer that fit
            inputs[at, : begin + 1] = own.inputs[at, : begin + 1]
            inputs[at, begin + 1 : length] = others.inputs[at, first + 1 : first + size]
            labels[at, begin:length] = others.labels[at, first : first + size]
            position_ids[at] = np.arange(shape[1])
            position_ids[at, length:] -= length
            document_ids[at] = np.arange(shape[1]) >= length
        return Arrays(inputs, labels, position_ids, document_ids)
