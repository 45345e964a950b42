"""Split of text into training and evaluation, decided by its content alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

Side = Literal["train", "validation"]
SIDES: tuple[Side, ...] = ("train", "validation")

FEW = 8
"""Held-out documents to expect before whole documents are held out: with 8, one corpus in 3000 ends up with none."""


def side_of(document: bytes, share: float) -> Side:
    """The side of a document as its hash says: it does not depend on others, and equal ones fall on the same side."""
    chosen = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) < share * 2.0**64
    return "validation" if chosen else "train"


def divided(document: bytes, share: float, *, whole: bool) -> Iterator[tuple[Side, bytes]]:
    """A UTF-8 text with its side; or, if documents are not held out whole, its beginning and its last part.

    The last part is of about that share, from the beginning of a line where there is one.
    """
    if whole or not share:
        yield side_of(document, share), document
        return
    at = _cut(document, int(len(document) * (1 - share)))
    if at:
        yield "train", document[:at]
    if at < len(document):
        yield "validation", document[at:]


def _cut(document: bytes, at: int) -> int:
    line = document.find(b"\n", at) + 1
    if 0 < line < len(document):
        return line
    while at < len(document) and document[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at += 1
    return at
