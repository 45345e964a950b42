"""Placeholders of items as tokens of their own, whatever the tokenizer makes of their text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from forge_train import ConfigError
from forge_train_kit.tokenizer import Tokenizer

from ...modalities import Modality
from ..encoders import OffsetEncoder


class MarkingTokenizer:
    """A tokenizer that encodes each placeholder as a mark, an id beyond its vocabulary.

    Where the tokenizer has a token for a placeholder, the text is encoded in one piece, so that all other ids are its
    own; else the texts between placeholders are.

    Args:
        tokenizer: of the preparation.
        modalities: whose placeholders are marked.
    """

    def __init__(self, tokenizer: Tokenizer, modalities: Iterable[Modality]) -> None:
        self._inner = tokenizer
        self.vocabulary, self.begin, self.end = tokenizer.vocabulary, tokenizer.begin, tokenizer.end
        self.stops, self.digest = tokenizer.stops, tokenizer.digest
        self.marks: dict[int, str] = {}
        """Mark → modality."""
        self.fill: dict[str, int] = {}
        """Modality → the id at the positions of its items: the token of its placeholder, or the tokenizer's end."""
        self._native: dict[int, int] = {}
        self._texts: dict[str, int] = {}
        for number, modality in enumerate(modalities):
            mark = tokenizer.vocabulary + number
            self.marks[mark] = modality.name
            own = token_of(tokenizer, modality.placeholder)
            self.fill[modality.name] = own if own is not None else tokenizer.end or 0
            if own is None:
                self._texts[modality.placeholder] = mark
            else:
                self._native[own] = mark
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._texts, key=len, reverse=True))) or "(?!)")

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for at, stop, mark in self._pieces(text):
            found += self._marked(self._inner.encode(text[at:stop])) if mark is None else [mark]
        return found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """See `OffsetEncoder`.

        Raises:
            ConfigError: the tokenizer is none.
        """
        if not isinstance(self._inner, OffsetEncoder):
            raise ConfigError(
                f"{type(self._inner).__name__} does not tell which characters a token stands for "
                "(encode_with_offsets), which masks of chats need."
            )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for at, stop, mark in self._pieces(text):
            if mark is not None:
                ids.append(mark)
                offsets.append((at, stop))
                continue
            some, spans = self._inner.encode_with_offsets(text[at:stop])
            ids += self._marked(some)
            offsets += [(at + start, at + end) for start, end in spans]
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([id for id in ids if id < self.vocabulary])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _pieces(self, text: str) -> Iterable[tuple[int, int, int | None]]:
        """Stretches of the text, each with its mark if it is a placeholder."""
        at = 0
        for found in self._pattern.finditer(text):
            if found.start() > at:
                yield at, found.start(), None
            yield *found.span(), self._texts[found.group()]
            at = found.end()
        if at < len(text):
            yield at, len(text), None

    def _marked(self, ids: Sequence[int]) -> list[int]:
        return [self._native.get(id, id) for id in ids] if self._native else list(ids)


def token_of(tokenizer: Tokenizer, text: str) -> int | None:
    """The token that stands for a text, and for nothing else; None without one."""
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        return None
    special = getattr(tokenizer, "special", None)
    return ids[0] if text in (tokenizer.decode(ids), special(ids[0]) if special else "") else None
