"""Tokenizers: bytes, and those of Hugging Face's `tokenizers` library."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.errors import describe

Ids = NDArray[np.unsignedinteger]

END_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<eos>",
    "[EOS]",
    "<|eot_id|>",
    "<|im_end|>",
)
"""What tokenizers call the end of a document; the first one found is taken."""

_PIECE = 1 << 20
"""Bytes after which a long document is cut, at a line's end, before it is encoded: the library keeps offsets and
strings of each token, some hundred bytes per token, until the whole text is done."""


class ByteTokenizer:
    """UTF-8 bytes, 0…255, and 256 for the end of a document."""

    vocabulary = 257
    end: int | None = 256
    digest = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD, ids that are no bytes are left out."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def encode_documents(self, documents: Sequence[bytes]) -> list[Ids]:
        """Token ids of UTF-8 texts, one array each, without the end."""
        return [np.frombuffer(document, np.uint8) for document in documents]


class JSONTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers`.

    Truncation and padding in the file are switched off; special tokens are not added around the text, only `end` after
    a document.

    Raises:
        ConfigError: the file can't be read or is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"text.tokenizer: {path} can't be read: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise ConfigError(
                f"text.tokenizer: {path} is no tokenizer of the tokenizers library: {describe(error)}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(f"text.tokenizer: {path} has an empty vocabulary")
        self.vocabulary: int = max(ids.values()) + 1
        self.end: int | None = next((ids[name] for name in END_NAMES if name in ids), None)
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def encode_documents(self, documents: Sequence[bytes]) -> list[Ids]:
        """Token ids of UTF-8 texts, one array each, without the end; all of the library's threads work on it."""
        pieces = [_pieces(document) for document in documents]
        texts = [piece.decode("utf-8") for document in pieces for piece in document]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [
            np.concatenate([np.asarray(next(encoded).ids, np.uint32) for _ in document] or [np.empty(0, np.uint32)])
            for document in pieces
        ]


def _pieces(document: bytes) -> list[bytes]:
    if len(document) <= _PIECE:
        return [document]
    pieces, start = [], 0
    for line_end in re.finditer(rb"\n", document):
        if line_end.end() - start >= _PIECE:
            pieces.append(document[start : line_end.end()])
            start = line_end.end()
    return [*pieces, document[start:]] if start < len(document) else pieces
