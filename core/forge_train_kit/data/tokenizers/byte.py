"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..formats import utf8


class ByteTokenizer:
    """UTF-8 bytes, 0…255, and 256 for the end of a document."""

    vocabulary = 257
    begin: tuple[int, ...] = ()
    end: int | None = 256
    stops: tuple[int, ...] = (256,)
    digest = "bytes"

    def encode(self, text: str) -> list[int]:
        """The bytes of a text.

        Raises:
            ConfigError: there is half a surrogate pair in it.
        """
        return list(utf8(text, "the text"))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self.encode(text)
        sizes = [len(character.encode("utf-8")) for character in text]
        return ids, [(at, at + 1) for at, size in enumerate(sizes) for _ in range(size)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD, ids that are no bytes are left out."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def special(self, id: int) -> str:
        return "" if id < 256 else "<end>"

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(document, np.uint8) for document in documents]
