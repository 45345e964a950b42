"""Texts with labels: turns records into tokens and classes, and packs them into rows.

A prepared folder has two documents for each record: its tokens, and for each token 1 + its class, or 0 for none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forge_train import MASKED, ConfigError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.tokenizer import Tokenizer

from ..heads import Classes
from .documents import Documents, Int64
from .encoders import OffsetEncoder
from .fit import Long, fitted
from .formats import utf8
from .rows import PackedRows, Pieces

Align = Literal["", "first", "last", "all"]


@dataclass(frozen=True)
class Labels:
    """The fields of records that hold their texts and labels.

    Args:
        classes: the known classes, to resolve labels.
        text: the field of the text, or of the list of words if each word has a label.
        label: the field of the label, or of the list of labels.
        align: which of a word's tokens get its label.
    """

    classes: Classes
    text: str
    label: str
    align: Align

    def public(self) -> dict[str, Any]:
        """The settings that determine the result."""
        names = list(self.classes.names)
        return {"classes": names, "of": self.classes.of, "text": self.text, "label": self.label, "align": self.align}

    def read(self, record: Mapping[str, Any], where: str, tokenizer: Tokenizer) -> tuple[str, Any, Any]:
        """The text, its token ids, and 1 + the class of each, or 0.

        Every token has the label of its text, so that the last token has it even if the text is shortened.

        Raises:
            ConfigError: naming the file and the place.
        """
        if self.classes.of == "text":
            text = self._field(record, self.text, str, "a text", where)
            utf8(text, f"{where}: {self.text!r}")
            ids = [*tokenizer.begin, *tokenizer.encode(text)]
            number = self._number(self._field(record, self.label, (str, int), "a label", where), where)
            if not ids or number is None:
                raise ConfigError(f"{where}: {'the text has no token' if not ids else 'the text has no label'}.")
            return text, np.asarray(ids, np.uint32), np.full(len(ids), number + 1, np.uint32)
        words = self._field(record, self.text, list, "a list of words", where)
        labels = self._field(record, self.label, list, "a list of labels", where)
        if not words or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"{where}: {self.text!r}: expected a list of words, at least one.")
        if len(words) != len(labels):
            raise ConfigError(f"{where}: {len(words)} words ({self.text!r}) and {len(labels)} labels ({self.label!r}).")
        return self._aligned(words, [self._number(label, where) for label in labels], tokenizer, where)

    def _field(self, record: Mapping[str, Any], name: str, kind: Any, words: str, where: str) -> Any:
        value = record.get(name)
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
        there = ", ".join(map(repr, record)) or "none"
        raise ConfigError(f"{where}: expected {words} under {name!r}; the fields are {there}.")

    def _number(self, label: Any, where: str) -> int | None:
        """The number of a class; None for −100 and null, which are not learned."""
        names = self.classes.names
        if label is None or (label == MASKED and not isinstance(label, str)):
            return None
        if isinstance(label, str):
            if label in names:
                return names.index(label)
            hint = nearest(label, names)
            raise ConfigError(f"{where}: label {label!r} is not one of the classes {format_list(names)}.{hint}")
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
            return label
        raise ConfigError(
            f"{where}: label {label!r} is neither the name of a class nor a number from 0 to {len(names) - 1}."
        )

    def _aligned(
        self, words: list[str], numbers: list[int | None], tokenizer: Tokenizer, where: str
    ) -> tuple[str, Any, Any]:
        """Words with a space between them, encoded in one piece."""
        if not isinstance(tokenizer, OffsetEncoder):
            raise ConfigError(
                f"{type(tokenizer).__name__} does not tell which characters a token stands for (encode_with_offsets), "
                "which labels of words need."
            )
        text = " ".join(words)
        utf8(text, f"{where}: {self.text!r}")
        ids, offsets = tokenizer.encode_with_offsets(text)
        if not ids:
            raise ConfigError(f"{where}: the words have no token.")
        ends = np.cumsum([len(word) + 1 for word in words]) - 1
        begins = ends - [len(word) for word in words]
        spans = np.asarray(offsets, np.int64).reshape(-1, 2)
        found = np.zeros(len(ids), np.uint32)
        for at, number in enumerate(numbers):
            if number is None:
                continue
            tokens = np.flatnonzero((spans[:, 0] < ends[at]) & (spans[:, 1] > begins[at]))
            chosen = {"first": tokens[:1], "all": tokens}.get(self.align, tokens[-1:])
            if not chosen.size or found[chosen].any():
                which = f"word {at + 1}, {words[at]!r}, has a label and no token of its own"
                raise ConfigError(f"{where}: {which}; give it the label null, or leave it out.")
            found[chosen] = number + 1
        if not found.any():
            raise ConfigError(f"{where}: every label is null or {MASKED}, so nothing is learned; leave the record out.")
        before = np.zeros(len(tokenizer.begin), np.uint32)
        return text, np.asarray([*tokenizer.begin, *ids], np.uint32), np.concatenate([before, found])


class _Texts:
    """The documents with tokens; those with classes say what of them is learned."""

    def __init__(self, documents: Documents, of: Literal["text", "token"]) -> None:
        self.count, self.digest, self.shards = documents.count // 2, documents.digest, documents.shards
        self.masked = of == "token"  # every token of a text has its class
        self._documents = documents

    def span(self, text: int) -> tuple[int, int]:
        return self._documents.span(2 * text + 1)

    def learned(self, start: int, out: NDArray[np.bool_]) -> None:
        classes = np.zeros(len(out), np.int64)
        self._documents.take(start, classes)
        out[:] = classes > 0

    def lengths(self) -> Int64:
        return self._documents.lengths()[::2]


class LabelledRows(PackedRows):
    """Whole texts in rows, each with its class at its last token, or with classes at its tokens.

    Args:
        documents: those of a folder prepared with `Labels`.
        sequence: tokens in a row.
        of: what each label belongs to.
        long, packing, key: see `fitted`.
        pad: the token id of padding.
    """

    def __init__(
        self,
        documents: Documents,
        sequence: int,
        of: Literal["text", "token"],
        *,
        long: Long,
        packing: Literal["best_fit", "pad"],
        key: str,
        pad: int,
    ) -> None:
        texts: Any = _Texts(documents, of)
        pieces = fitted(texts, sequence, long=long, packing=packing, key=key)
        super().__init__(documents, sequence, replace(pieces, document=pieces.document * 2), pad=pad)
        self._of = of

    def _read(self, row: int, inputs: Int64, labels: Int64, *others: Any) -> None:
        super()._read(row, inputs, labels, *others)
        at, pieces = 0, self._pieces
        for piece in pieces.of(row):
            stop = at + int(pieces.length[piece])
            classes = _classes(self._documents, pieces, piece, stop - at)
            labels[at:stop] = np.where(classes > 0, classes - 1, MASKED)
            if self._of == "text":
                labels[at : stop - 1] = MASKED
            at = stop


def _classes(documents: Documents, pieces: Pieces, piece: int, length: int) -> NDArray[np.int64]:
    """1 + the class of each token of a piece."""
    found = np.zeros(length, np.int64)
    begin, _ = documents.span(int(pieces.document[piece]) + 1)
    documents.take(begin + int(pieces.start[piece]), found)
    return found


def labelled(
    records: Iterator[tuple[str, Mapping[str, Any]]], labels: Labels, tokenizer: Tokenizer
) -> Iterator[tuple[bytes, list[Any]]]:
    """The text of each record, with its two documents.

    Args:
        records: each after its file and place.
        labels: the fields to read.
        tokenizer: the preparation's.
    """
    for where, record in records:
        text, ids, classes = labels.read(record, where, tokenizer)
        yield text.encode(), [ids, classes]
