"""Records as tokens, and which of these are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forge_train.base.errors import ConfigError
from forge_train_kit.data.encoders import OffsetEncoder
from forge_train_kit.data.formats import utf8
from forge_train_kit.data.items import ItemPrompts, PromptItems, in_folder
from forge_train_kit.tokenizer import Tokenizer

from .chats import FIELDS, Chats, is_chat

TEXT, PROMPT, COMPLETION, ID = "text", "prompt", "completion", "id"
Long = Literal["refuse", "left", "windows"]
Span = tuple[int, int]


_OBJECTS = 600
"""Bytes that the objects of a record take beside its tokens, about."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A record as the model reads it."""

    number: int
    """Its place among all records, from 0."""
    id: Any
    """Its value under `id`; None without."""
    ids: NDArray[np.int32]
    """At least one."""
    asked: tuple[Span, ...]
    """Start and end (exclusive) of the tokens whose probability is asked for, from 1 on, in order and apart."""
    cut: int = 0
    """Number of tokens that were left out on the left."""
    offsets: NDArray[np.int32] | None = None
    """Start and end of each token's characters in the record's text, `[tokens, 2]`, if asked for."""
    items: PromptItems | None = None
    """Its items beside text, of a model that takes some."""

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return _OBJECTS + self.ids.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


@dataclass(frozen=True)
class Encoder:
    """Encodes texts, prompts with a completion, and chats.

    A completion's tokens are those of the whole text after the prompt's; white space at the end of a prompt belongs to
    the completion, as in lm-evaluation-harness. A text has the tokenizer's beginning before it, and nothing else. Of a
    chat, the tokens are asked for that training would learn.

    Items beside text, such as images, stand at their placeholders, or before a text without any; what stands at their
    positions is not asked for.

    Args:
        tokenizer: of the model; of one that takes items, the one of `items`.
        chats: renders chats.
        field: of the text; empty for `text`, for `prompt` and `completion`, or for a chat's.
        longest: tokens that the model reads at once.
        long: treatment of longer records: refused, cut on their left, or, if texts, read in windows.
        scored: whether the probability of tokens is asked for.
        located: whether the place of tokens in the text is asked for.
        items: makes room for the items of records; None for a model of text alone.
    """

    tokenizer: Tokenizer
    chats: Chats
    field: str
    longest: int
    long: Long
    scored: bool = True
    located: bool = False
    items: ItemPrompts | None = None

    def __call__(self, number: int, where: str, record: Mapping[str, Any], folder: str) -> Tokens:
        """A record as tokens.

        Args:
            number: its place among all records.
            where: its place, for messages.
            record: its content.
            folder: of relative paths.

        Raises:
            ConfigError: it lacks the field, has several that could be meant or no token to ask for, is too long, or has
                items that can't be read.
        """
        fields = {  # tables have every column; in CSV, an empty text is no list
            name: one for name, one in record.items() if one is not None and (one != "" or name not in FIELDS)
        }
        if not self.field:
            _check_one(fields, where)
        name = self.field or (TEXT if PROMPT not in fields else "")
        entries: Mapping[str, list[Any]] = {}
        if not self.field and is_chat(fields):
            if self.items is not None:
                record, entries = self.chats.with_items(record, self.items, where)
            name, begin = "", list[int]()
            text, ids, asked = self.chats.encoded(record, where, self.tokenizer, scored=self.scored)
        else:
            entries = {} if self.items is None else self.items.fields.entries(record, where)
            text, begin, ids, asked = self._text(fields, name, where, entries)
        offsets = self._offsets(text, len(begin), len(ids)) if self.located else None
        found = Tokens(number, record.get(ID), np.asarray(ids, np.int32), asked, 0, offsets)
        found = found if self.items is None else _placed(found, self.items, entries, where, folder)
        if len(found.ids) < 1 + self.scored or (self.scored and not found.asked):
            raise ConfigError(f"{where}: has no token that could be asked for; leave it out.")
        return self._fitted(found, where, text=bool(name), chat=not name and COMPLETION not in fields)

    def _text(
        self, record: Mapping[str, Any], name: str, where: str, entries: Mapping[str, list[Any]]
    ) -> tuple[str, list[int], list[int], tuple[Span, ...]]:
        """Text, tokens before it, all tokens, and which are asked for."""
        if name:
            before, text = "", self._shown(_string(record, name, where), entries)
        else:
            before, text = self._shown(_string(record, PROMPT, where), entries), _string(record, COMPLETION, where)
            kept = before.rstrip()
            before, text = kept, before[len(kept) :] + text
        whole, begin = self.tokenizer.encode(before + text), list(self.tokenizer.begin)
        if begin and whole[: len(begin)] == begin:  # as templates write it
            begin = []
        elif not (name or before or begin) and self.tokenizer.end is not None:
            begin = [self.tokenizer.end]  # as for text that is generated without a prompt
        given = len(self.tokenizer.encode(before)) if before else 0
        ids, given = [*begin, *whole], max(len(begin) + given, 1)  # nothing precedes the very first token
        return before + text, begin, ids, ((given, len(ids)),) if given < len(ids) else ()

    def _shown(self, text: str, entries: Mapping[str, list[Any]]) -> str:
        """A text with placeholders for its items."""
        return text if self.items is None else self.items.with_placeholders(text, entries)

    def _fitted(self, one: Tokens, where: str, *, text: bool, chat: bool) -> Tokens:
        """A record that the model reads at once, or in windows."""
        size = len(one.ids)
        cut = size - self.longest
        if cut <= 0:
            return one
        if one.items is not None and one.items.placed:
            raise ConfigError(
                f"{where}: has {size:,} tokens with its items, and the model reads {self.longest:,} at once. Records "
                "with items are not cut; shorten it."
            )
        if self.long == "windows" and text:
            return one
        if self.long != "left":
            if self.long == "windows":
                way_out = "Only texts are read in windows. Shorten it, or cut such records on their left: --long left."
            else:
                way_out = "Shorten it, or cut such records on their left: --long left."
            raise ConfigError(f"{where}: has {size:,} tokens, and the model reads {self.longest:,} at once. {way_out}")
        first = 1 if text or chat else one.asked[0][0] - cut if one.asked else 1
        if first < 1:
            raise ConfigError(
                f"{where}: what is asked for has {size - one.asked[0][0]:,} tokens, and the model reads "
                f"{self.longest:,} at once, one of them before it. Split the record."
            )
        asked = tuple((max(start - cut, 1), stop - cut) for start, stop in one.asked if stop - cut > 1)
        if self.scored and not asked:
            raise ConfigError(f"{where}: nothing that is asked for is left of it when it is cut. Split the record.")
        offsets = None if one.offsets is None else one.offsets[cut:]
        return Tokens(one.number, one.id, one.ids[cut:], asked, cut, offsets)

    def _offsets(self, text: str, before: int, size: int) -> NDArray[np.int32] | None:
        """Places of a record's tokens in its text; those before it, and an end after it, are empty."""
        if not isinstance(self.tokenizer, OffsetEncoder):
            return None
        found = [(0, 0)] * before + list(self.tokenizer.encode_with_offsets(text)[1])
        return np.asarray(found + [(len(text), len(text))] * (size - len(found)), np.int32).reshape(-1, 2)


def _placed(one: Tokens, prompts: ItemPrompts, entries: Mapping[str, list[Any]], where: str, folder: str) -> Tokens:
    """A record with room for its items at their marks."""
    given = {name: in_folder(some, folder) for name, some in entries.items()}
    ids, items = prompts.place(one.ids.tolist(), given, where, "/")
    sizes, asked = np.ones(len(one.ids), np.int64), np.zeros(len(one.ids) + 2, np.int8)
    for start, stop in one.asked:
        asked[start + 1 : stop + 1] = 1
    marks = np.flatnonzero(one.ids >= prompts.tokenizer.vocabulary)
    sizes[marks], asked[marks + 1] = [noted.length for _, noted, _ in items.placed], 0
    borders = np.flatnonzero(np.diff(np.repeat(asked, [1, *sizes, 1])))
    spans = tuple(zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True))
    offsets = None if one.offsets is None else np.repeat(one.offsets, sizes, axis=0)
    return Tokens(one.number, one.id, np.asarray(ids, np.int32), spans, 0, offsets, items)


def _check_one(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record of which only a part would be read."""
    pair = PROMPT in record and (COMPLETION in record or TEXT in record)
    there = [name for name in (TEXT, *FIELDS) if name in record] + [PROMPT] * pair
    if len(there) > 1:
        way_out = "read 'text' alone with --field text, or leave out" if TEXT in record else "leave out"
        raise ConfigError(f"{where}: has {' and '.join(map(repr, there))}, of which one is read; {way_out} the others.")


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(text := record.get(name), str):
        there = ", ".join(map(repr, record)) or "none"
        raise ConfigError(f"{where}: expected a text under {name!r} (--field); the fields are {there}.")
    utf8(text, f"{where}: {name!r}")
    return text
