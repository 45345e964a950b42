"""Stretches of documents, token by token, as a model is given them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from ..documents import Documents
from ..permutation import permute

if TYPE_CHECKING:
    from forge_train_kit.tokenizer import Tokenizer

    from ...modalities import Grid, ItemSource
    from ..items import Records
    from ..items.notes import Noted

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
class ShownItem:
    """An item among tokens, such as an image; or a part of one that has text before it.

    Args:
        modality: its name.
        position: the first one among the tokens.
        positions: number of them.
        grid: patches along time, height and width.
        path: of its file.
        where: the record that names it.
        offset: of its first byte in the file.
        size: in bytes; None for all of the file.
        decoded: whether the bytes are values, and not what was in a file.
    """

    modality: str
    position: int
    positions: int
    grid: Grid
    path: str
    where: str
    offset: int = 0
    size: int | None = None
    decoded: bool = False

    @classmethod
    def of(cls, source: ItemSource, one: Noted, position: int) -> Iterator[ShownItem]:
        """An item whose positions begin at `position`, in its parts."""
        place = source.path, source.where, source.offset, source.size, bool(one.dtype)
        for at, width, grid in one.stretches:
            yield cls(one.modality, position + at, width, grid, *place)


@dataclass(frozen=True, slots=True)
class Sample:
    """A stretch of the text of tokens, from the beginning of a document on.

    Args:
        document: the number of the first one.
        tokens: of it, and of those that follow, if it is short.
        items: in their order; the tokens have one at the positions of each.
    """

    document: int
    tokens: tuple[Token, ...]
    items: tuple[ShownItem, ...] = ()


def samples(
    documents: Documents,
    tokenizer: Tokenizer | None,
    count: int,
    length: int = LENGTH,
    records: Records | None = None,
) -> list[Sample]:
    """Some stretches, the same ones each time.

    Args:
        tokenizer: that made the tokens; without one they have no text.
        records: with their items, whose texts the documents are; a stretch is then a record.
    """
    chosen = np.arange(min(count, documents.count), dtype=np.int64)
    order = permute(chosen, np.zeros_like(chosen), documents.count, _SEED) if len(chosen) else chosen
    if records is not None:
        return [_record(documents, tokenizer, document, records) for document in sorted(order.tolist())]
    return [_sample(documents, tokenizer, document, length) for document in sorted(order.tolist())]


def _record(documents: Documents, tokenizer: Tokenizer | None, record: int, records: Records) -> Sample:
    """A record; of one that takes many tokens, the beginning."""
    begin, end = documents.span(record)
    table = records.table(record)
    items = [item for one in table.items for item in ShownItem.of(records.source(record, table, one), one, one.start)]
    length = min(end - begin, LENGTH + sum(item.positions for item in items))
    found = _sample(documents, tokenizer, record, length)
    inside = tuple(item for item in items if item.position < length)
    return replace(found, tokens=tuple(with_items(found.tokens, inside)), items=inside)


def with_items(tokens: Sequence[Token], items: Sequence[ShownItem]) -> list[Token]:
    """Tokens with one in place of those of each item."""
    found = list(tokens)
    for one in reversed(items):
        here = slice(one.position, one.position + one.positions)
        if found[here]:
            text = f"[{one.modality} {'×'.join(map(str, one.grid))}]"
            found[here] = [replace(found[here][-1], text=text, special=True, learned=False)]
    return found


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
