"""Stretches of documents, token by token, as a model is given them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from ..documents import Documents
from ..permutation import permute

if TYPE_CHECKING:
    from forge_train_kit.tokenizer import Tokenizer

LENGTH = 160
"""Tokens of a sample."""
_SEED = 0x5EE
_BROKEN = "\ufffd"
_LONGEST = 8
"""Tokens that one character may take."""


@runtime_checkable
class Naming(Protocol):
    """A tokenizer that tells its special tokens from others."""

    def special(self, id: int) -> str:
        """The text of a special token; empty for other tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a sample.

    Args:
        id: of the token.
        text: what it stands for. Where a character takes several tokens, the last of them has it, and the
            others an empty text; None where no tokenizer is known.
        special: whether it is a special token, and `text` its name.
        learned: whether it is to be learned as a label.
        ends: whether a document ends after it.
    """

    id: int
    text: str | None
    special: bool
    learned: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A stretch of the text of tokens, from the beginning of a document on.

    Args:
        document: the number of the first one.
        tokens: of it, and of those that follow, if it is short.
    """

    document: int
    tokens: tuple[Token, ...]


def samples(documents: Documents, tokenizer: Tokenizer | None, count: int, length: int = LENGTH) -> list[Sample]:
    """Some stretches, the same ones each time.

    Args:
        tokenizer: that made the tokens; without one they have no text.
    """
    chosen = np.arange(min(count, documents.count), dtype=np.int64)
    order = permute(chosen, np.zeros_like(chosen), documents.count, _SEED) if len(chosen) else chosen
    return [_sample(documents, tokenizer, document, length) for document in sorted(order.tolist())]


def _sample(documents: Documents, tokenizer: Tokenizer | None, document: int, length: int) -> Sample:
    start = documents.span(document)[0]
    length = min(length, documents.tokens - start)
    ids, learned = np.empty(length, np.int64), np.empty(length, bool)
    documents.take(start, ids)
    documents.learned(start, learned)
    ends = set((documents.ends_within(start, start + length) - start - 1).tolist())
    texts: Iterable[tuple[str | None, bool]] = (
        texts_of(tokenizer, ids.tolist()) if tokenizer else [(None, False)] * length
    )
    parts = zip(ids.tolist(), texts, learned.tolist(), strict=True)
    return Sample(document, tuple(Token(id, *text, known, at in ends) for at, (id, text, known) in enumerate(parts)))


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """The text of each token, and whether it is special; an empty text for all but the last token of a character."""
    waiting: list[int] = []
    before: list[int] = []
    for id in ids:
        name = tokenizer.special(id) if isinstance(tokenizer, Naming) else ""
        if name:
            yield name, True
            waiting, before = [], []
            continue
        waiting.append(id)
        # What came before decides whether a token's first space is kept.
        lead = tokenizer.decode(before)
        text = tokenizer.decode(before + waiting)[len(lead) :]
        if text.endswith(_BROKEN) and len(waiting) < _LONGEST:
            yield "", False
            continue
        yield text, False
        before, waiting = waiting, []
