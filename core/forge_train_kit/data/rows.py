"""Rows of `sequence` tokens, cut or packed from documents: what a step eats. Each is read on its own, in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from forge_train import MASKED

from .documents import Documents, Int64
from .packing import bucket_unit

if TYPE_CHECKING:
    from .items import RowItems

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Some rows, `[rows, sequence]` int64 each; positions and documents are None where documents are not kept apart."""

    inputs: Int64
    labels: Int64
    position_ids: Int64 | None = None
    document_ids: Int64 | None = None
    sources: Int64 | None = None
    """Source of each row in a mixture, its place in its pair, or 1 for a desirable answer and 0 for an undesirable one,
    `[rows]`; -1 in rows that do not count. Of packed pairs, the place of each answer, `[rows, answers]`."""
    weights: Weights | None = None
    """Weight of each label's loss, `[rows, sequence]`; None if all weigh 1."""
    answers: Int64 | None = None
    """The answer of its row that each token of packed pairs belongs to, `[rows, sequence]`."""
    mismatched: Arrays | None = None
    """As many rows again: the prompt of each with the answer of another, for feedback."""
    items: tuple[Mapping[str, RowItems], ...] | None = None
    """Items of each row, by modality; each row has all modalities."""


class Rows(Protocol):
    """Rows of one source.

    Rows that differ in what they cost may have `costs(rows)`: of rows by number, the predicted work that differs from
    row to row, `[k]` float64 in any unit.
    """

    count: int
    """Number of rows: the length of an epoch."""
    digest: str
    """Of the content and of how it lies in rows."""

    def read(self, rows: Int64) -> Arrays:
        """Rows by number, in the order asked for."""
        ...

    def where(self, row: int) -> str:
        """The file, and the place in it, where a row begins; for messages."""
        ...


class SplitRows:
    """All documents as one text, cut every `sequence` tokens; fewer than `sequence` at the very end are not used.

    With `isolate`, a row's tokens of different documents get different `document_ids` (0, 1, … within the row),
    `position_ids` count from the beginning of the document or of the row, whichever is later, and a label that belongs
    to another document is masked. Without, only the label after the last token of all is masked.

    Args:
        documents: the text.
        sequence: tokens of a row.
        isolate: see above.
    """

    def __init__(self, documents: Documents, sequence: int, *, isolate: bool) -> None:
        self._documents, self._sequence, self._isolate = documents, sequence, isolate
        self.count = documents.tokens // sequence
        self.digest = documents.digest
        self._count = np.arange(0, dtype=np.int64)
        """0, 1, … for as many tokens as were ever read at once."""

    def read(self, rows: Int64) -> Arrays:
        size = self._sequence
        block = np.zeros((len(rows), size + 1), np.int64)
        starts = [row * size for row in rows.tolist()]
        for line, start in zip(block, starts, strict=True):
            self._documents.take(start, line)
        self._documents.check(block, ((start, size + 1) for start in starts))
        inputs, labels = block[:, :-1].copy(), block[:, 1:].copy()
        if self._documents.masked:
            learned = np.zeros(labels.shape, bool)
            for line, start in zip(learned, starts, strict=True):
                self._documents.learned(start + 1, line)
            labels[~learned] = MASKED
        if not self._isolate:
            for line, start in zip(labels, starts, strict=True):
                if start + size >= self._documents.tokens:
                    line[-1] = MASKED
            return Arrays(inputs, labels)
        return Arrays(inputs, labels, *self._apart(starts, labels))

    def where(self, row: int) -> str:
        return self._documents.where(row * self._sequence)

    def _apart(self, starts: Sequence[int], labels: Int64) -> tuple[Int64, Int64]:
        """Mask labels of other documents; gives position and document ids."""
        size, flat = self._sequence, labels.reshape(-1)
        found = [self._documents.ends_within(start, start + size) for start in starts]
        first = np.arange(len(starts), dtype=np.int64) * size
        ends = np.concatenate(found) + (first - starts).repeat([len(one) for one in found])
        flat[ends - 1] = MASKED
        # Each stretch of a row that lies in one document: every row's first, and one after each end inside.
        begins = np.zeros(len(flat) + 1, bool)
        begins[first] = begins[ends] = True
        begin = np.flatnonzero(begins[:-1])
        length = np.empty_like(begin)
        np.subtract(begin[1:], begin[:-1], out=length[:-1])
        length[-1:] = len(flat) - begin[-1:]
        number = np.arange(len(begin)) - begin.searchsorted(first)[begin // size]
        offset = begin.repeat(length)
        count = self._count
        if len(count) < len(flat):
            count = self._count = np.arange(len(flat), dtype=np.int64)
        np.subtract(count[: len(flat)], offset, out=offset)
        return offset.reshape(labels.shape), number.repeat(length).reshape(labels.shape)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents, in rows.

    Args:
        document: `[pieces]`, row by row.
        start: first token of each piece in its document.
        length: of each, in tokens.
        row_ends: `[rows]`, end of each row's pieces (exclusive).
        digest: `layout` of them, if it is known.
    """

    document: Int64
    start: Int64
    length: Int64
    row_ends: Int64
    digest: str = ""

    def of(self, row: int) -> range:
        """The pieces of a row."""
        return range(int(self.row_ends[row - 1]) if row else 0, int(self.row_ends[row]))

    def read(self, piece: int, documents: Documents, inputs: Int64, labels: Int64, weights: Weights | None) -> None:
        """Tokens, labels and their weights of a piece, into arrays of its length; labels that are not learned stay as
        they are."""
        begin, end = documents.span(int(self.document[piece]))
        start, length = begin + int(self.start[piece]), len(inputs)
        known = min(length, end - start - 1)  # labels: the document's last token has none
        documents.take(start, inputs)
        documents.take(start + 1, labels[:known])
        if documents.masked:
            learned = np.zeros(known, bool)
            documents.learned(start + 1, learned)
            labels[:known][~learned] = MASKED
        if weights is not None:
            documents.weights(start + 1, weights[:known])

    def spans(self, row: int, documents: Documents) -> Iterator[tuple[int, int]]:
        """Yield first token and length of each piece of a row, with the label after it."""
        for piece in self.of(row):
            begin, end = documents.span(int(self.document[piece]))
            start = begin + int(self.start[piece])
            yield start, min(int(self.length[piece]) + 1, end - start)

    def where(self, row: int, documents: Documents) -> str:
        """Describe the place of a row's first piece."""
        first = self.of(row).start
        return documents.where(documents.span(int(self.document[first]))[0] + int(self.start[first]))


def layout(documents: Documents, pieces: Pieces) -> str:
    """Identifies documents and how they lie in rows."""
    found = hashlib.blake2b(documents.digest.encode(), digest_size=16)
    for part in (pieces.document, pieces.start, pieces.length, pieces.row_ends):
        found.update(np.ascontiguousarray(part, np.int64).data)
    return found.hexdigest()


class PackedRows:
    """Whole documents in rows, and padding after them. Documents are always kept apart.

    Padding has the token `pad`, masked labels, and a document id of its own.

    Args:
        documents: the text.
        sequence: tokens of a row.
        pieces: what lies where.
        pad: the token id of padding.
    """

    def __init__(self, documents: Documents, sequence: int, pieces: Pieces, *, pad: int = 0) -> None:
        self._documents, self._sequence, self._pieces, self._pad = documents, sequence, pieces, pad
        self.count = len(pieces.row_ends)
        self.digest = pieces.digest or layout(documents, pieces)

    def read(self, rows: Int64) -> Arrays:
        shape = len(rows), self._sequence
        inputs, labels = np.full(shape, self._pad, np.int64), np.full(shape, MASKED, np.int64)
        position_ids, document_ids = np.empty(shape, np.int64), np.empty(shape, np.int64)
        weights = np.ones(shape, np.float32) if self._documents.weighted else None
        for at, row in enumerate(rows.tolist()):
            line = None if weights is None else weights[at]
            self._read(row, inputs[at], labels[at], position_ids[at], document_ids[at], line)
        for ids in (inputs, labels):
            self._documents.check(ids, self._spans(rows))
        return Arrays(inputs, labels, position_ids, document_ids, weights=weights)

    def where(self, row: int) -> str:
        return self._pieces.where(row, self._documents)

    def _spans(self, rows: Int64) -> Iterator[tuple[int, int]]:
        for row in rows.tolist():
            yield from self._pieces.spans(row, self._documents)

    def _read(
        self,
        row: int,
        inputs: Int64,
        labels: Int64,
        position_ids: Int64,
        document_ids: Int64,
        weights: Weights | None,
    ) -> None:
        at, pieces = 0, self._pieces.of(row)
        for number, piece in enumerate(pieces):
            here = slice(at, at + int(self._pieces.length[piece]))
            line = None if weights is None else weights[here]
            self._pieces.read(piece, self._documents, inputs[here], labels[here], line)
            position_ids[here] = np.arange(here.stop - at)
            document_ids[here] = number
            at = here.stop
        position_ids[at:] = np.arange(self._sequence - at)
        document_ids[at:] = len(pieces)


class Buckets:
    """Batches of documents of like length, each document in a row of its own, with padding after it.

    A batch is what is asked for as one row, and a micro-batch on its own: `[documents, length]` of at most `sequence`
    tokens together. Attention is causal, so no token sees the padding behind it, and documents need no ids.

    Args:
        documents: the text.
        sequence: most tokens of a batch, padding included.
        pieces: what lies where; a row of them is a batch.
        pad: the token id of padding.
    """

    def __init__(self, documents: Documents, sequence: int, pieces: Pieces, *, pad: int = 0) -> None:
        self._documents, self._pieces, self._pad = documents, pieces, pad
        self._unit = bucket_unit(sequence)
        self.count = len(pieces.row_ends)
        self.digest = f"{pieces.digest or layout(documents, pieces)}, buckets of {sequence}"

    def read(self, rows: Int64) -> Arrays:
        (batch,) = rows.tolist()
        pieces = self._pieces.of(batch)
        length = self._pieces.length[pieces.start : pieces.stop]
        shape = len(pieces), -(-int(length.max()) // self._unit) * self._unit
        inputs, labels = np.full(shape, self._pad, np.int64), np.full(shape, MASKED, np.int64)
        weights = np.ones(shape, np.float32) if self._documents.weighted else None
        for line, piece, size in zip(range(len(pieces)), pieces, length.tolist(), strict=True):
            mine = None if weights is None else weights[line, :size]
            self._pieces.read(piece, self._documents, inputs[line, :size], labels[line, :size], mine)
        for ids in (inputs, labels):
            self._documents.check(ids, self._pieces.spans(batch, self._documents))
        return Arrays(inputs, labels, weights=weights)

    def where(self, row: int) -> str:
        return self._pieces.where(row, self._documents)
