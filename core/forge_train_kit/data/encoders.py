"""Protocols that a tokenizer may implement beside `Tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from numpy.typing import NDArray


@runtime_checkable
class DocumentEncoder(Protocol):
    """A tokenizer that encodes many documents at once, which is faster than one by one; it need not."""

    def encode_documents(self, document_ids: Sequence[bytes]) -> Sequence[NDArray[Any]]:
        """Ids of UTF-8 texts, one array of integers each, without `begin` and `end`."""
        ...


@runtime_checkable
class OffsetEncoder(Protocol):
    """A tokenizer that tells which characters each token stands for, which masks of chats need; it need not."""

    def encode_with_offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """The ids that `encode` gives, and of each the start and end (exclusive) of its characters in `text`.

        Whitespace that a token has counts among its characters. A token of a part of a character stands for all of it.
        """
        ...
