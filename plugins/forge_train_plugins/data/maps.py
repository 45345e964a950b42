"""Maps of documents: a filter by length, and fill-in-the-middle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random


class Length:
    """Leaves out documents that are too short or too long.

    Args:
        least: characters that a document has at least.
        most: and at most.
    """

    def __init__(self, least: int = 0, most: float = math.inf) -> None:
        if not _numbers(least, most) or not 0 <= least <= most:
            raise ValueError(f"expected numbers, 0 <= least <= most, found least={least} and most={most}.")
        if least == 0 and most == math.inf:
            raise ValueError("has no effect: give least, most or both.")
        self._least, self._most = least, most

    def __call__(self, text: str, random: Random) -> Iterator[str]:
        if self._least <= len(text) <= self._most:
            yield text


class FillInTheMiddle:
    """Moves the middle of some documents to their end, so that a model learns to fill it in (arXiv:2207.14255, 3).

    A document is cut at two places drawn among its characters, and becomes `prefix P suffix S middle` behind the
    tokens' marks (PSM), or with the middle directly behind the prefix (SPM).

    Args:
        rate: share of the documents.
        spm: share of those that are written suffix first.
        prefix: the mark before the prefix.
        suffix: before the suffix.
        middle: before the middle.
    """

    def __init__(
        self,
        rate: float = 0.5,
        spm: float = 0.5,
        prefix: str = "<|fim_prefix|>",
        suffix: str = "<|fim_suffix|>",
        middle: str = "<|fim_middle|>",
    ) -> None:
        if not _numbers(rate, spm) or not (0 <= rate <= 1 and 0 <= spm <= 1):
            raise ValueError(f"expected shares from 0 to 1, found rate={rate} and spm={spm}.")
        self._rate, self._spm = rate, spm
        self.tokens = (prefix, suffix, middle)

    def __call__(self, text: str, random: Random) -> Iterator[str]:
        if random.random() >= self._rate:
            yield text
            return
        first, last = sorted(random.randrange(len(text) + 1) for _ in range(2))
        before, inside, after = text[:first], text[first:last], text[last:]
        prefix, suffix, middle = self.tokens
        if random.random() < self._spm:
            yield f"{prefix}{suffix}{after}{middle}{before}{inside}"
        else:
            yield f"{prefix}{before}{suffix}{after}{middle}{inside}"


def _numbers(*found: object) -> bool:
    """Return True if all options are numbers."""
    return all(isinstance(one, (int, float)) for one in found)
