"""Which text is kept for evaluation, decided by its content alone."""

from __future__ import annotations

import hashlib
from typing import Literal

Side = Literal["train", "validation"]
SIDES: tuple[Side, ...] = ("train", "validation")

FEW = 8
"""Held-out documents to expect before whole documents are held out: with 8, one corpus in 3000 ends up with none."""


def side_of(document: bytes, share: float) -> Side:
    """The side of a document as its hash says: it does not depend on others, and equal ones fall on the same side."""
    chosen = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) < share * 2.0**64
    return "validation" if chosen else "train"


def cut(document: bytes, share: float) -> tuple[bytes, bytes]:
    """A UTF-8 text in two, the second of about that share, from the beginning of a line where there is one."""
    at = int(len(document) * (1 - share))
    line = document.find(b"\n", at) + 1
    if 0 < line < len(document):
        return document[:line], document[line:]
    while at < len(document) and document[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at += 1
    return document[:at], document[at:]
