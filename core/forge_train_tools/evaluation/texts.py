"""Texts as requests of token ids, as lm-evaluation-harness cuts them."""

from __future__ import annotations

from collections.abc import Iterator

from forge_train.base.errors import ConfigError
from forge_train_kit.tokenizer import Tokenizer

from .scoring import Request


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """A continuation after its context, which may be empty.

    Its tokens are those of the whole text after the context's; white space at the end of the context belongs to it. A
    text begins as documents do; without a context, the end of another document precedes it where documents have no
    beginning.

    Raises:
        ConfigError: the continuation has no token.
    """
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    begin, whole = list(tokenizer.begin), tokenizer.encode(context + continuation)
    given = len(tokenizer.encode(context)) if context else 0
    if not begin and not given:
        begin = [prefix(tokenizer)]
    if begin and whole[: len(begin)] == begin:  # as templates write it
        begin, given = [], max(given, len(begin))
    asked = tuple(whole[given:])
    if not asked:
        raise ConfigError(f"{context[-40:]!r} is followed by {continuation!r}, which has no token to ask for.")
    return Request((*begin, *whole[:given]), asked)


def rolling(tokenizer: Tokenizer, text: str, longest: int) -> Iterator[Request]:
    """The windows of a text: each token is asked for once, after as many as fit before it.

    The first token comes after the beginning of a document, or else after the end of another.
    """
    ids, before = tokenizer.encode(text), [prefix(tokenizer)]
    for start in range(0, len(ids), longest):
        stop = min(start + longest, len(ids))
        row = [*before, *ids][max(stop - longest, 0) : stop + 1]
        asked = stop - start
        yield Request(tuple(row[: len(row) - asked]), tuple(row[len(row) - asked :]))


def prefix(tokenizer: Tokenizer) -> int:
    """The token that precedes a text without a context.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if tokenizer.begin:
        return tokenizer.begin[-1]
    if tokenizer.end is None:
        raise ConfigError("The tokenizer has no token that begins or ends a document; a text needs one before it.")
    return tokenizer.end
