"""The protocol of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Tokenizer"]


class Tokenizer(Protocol):
    """`tokenizer`: text to token ids and back."""

    vocabulary: int
    """Number of token ids."""
    begin: tuple[int, ...]
    """Ids that precede each document and each prompt; as a rule none, or one."""
    end: int | None
    """The id that follows each document, if there is one."""
    stops: tuple[int, ...]
    """Ids that end a generated text, `end` among them."""
    digest: str
    """Differs between tokenizers that give other ids: token caches lie under it, and resuming compares it."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without `begin` and `end`."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
