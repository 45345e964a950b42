"""Text of tokens as they come: in whole characters, and no further than a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from forge_train_kit.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Stream:
    """Turns tokens into pieces of text. Tokens that may be an incomplete character wait for the rest.

    Only the newest tokens are decoded, together with some before them, because a token's text can depend on its
    neighbours. The first of these begins a character, because one broken byte can spoil all characters next to it.
    """

    CONTEXT = 5
    """Least number of tokens before the new ones that are decoded with them."""
    PATIENCE = 8
    """Number of tokens that may wait. A character has at most four bytes; what waits longer is not UTF-8."""
    REST = 3
    """Number of newest waiting tokens that may still be the beginning of a character."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._shown = self._decode(len(before))
        """Text of what is before the next piece."""
        self._cuts = [0, *self._begins(len(before) - self.CONTEXT), len(before)]
        """Start of each piece; the last entry is the start of the next."""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(len(self._ids))
        if not text.endswith(_REPLACEMENT):
            return self._take(len(self._ids), text)
        if len(self._ids) - self._cuts[-1] > self.PATIENCE:
            upto = len(self._ids) - self.REST
            return self._take(upto, self._decode(upto))
        return ""

    def flush(self) -> str:
        """The text that is still waiting."""
        return self._take(len(self._ids), self._decode(len(self._ids)))

    def _decode(self, upto: int) -> str:
        return self._tokenizer.decode(self._ids[:upto])

    def _take(self, upto: int, text: str) -> str:
        piece, self._shown = text[len(self._shown) :], text
        self._cuts.append(upto)
        if upto >= 2 * self.CONTEXT and (drop := max(cut for cut in self._cuts if cut <= upto - self.CONTEXT)):
            self._ids = self._ids[drop:]
            self._cuts = [cut - drop for cut in self._cuts if cut >= drop]
            self._shown = self._decode(self._cuts[-1])
        return piece

    def _begins(self, upto: int) -> list[int]:
        """The last place, up to one, at which a character of the prompt begins; empty if that is not near. What is
        before it is decoded no more."""
        near = range(upto, max(upto - self.REST, 0), -1)
        return list(islice((at for at in near if not self._decode(at).endswith(_REPLACEMENT)), 1))


class Stops:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can be shown: everything before the first stop string."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
