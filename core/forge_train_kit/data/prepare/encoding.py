"""Records to token ids, and which of these are learned."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from forge_train import ConfigError
from forge_train_kit.tokenizer import Tokenizer

from ..chats import (
    Conversation,
    LiteralEncoder,
    Segments,
    Template,
    check_names,
    check_written,
    conversation,
    embedding_texts,
    feedback,
    literal_spans,
    open_template,
    preference,
    renamed,
    render,
    render_preference,
    tokenise_ended,
    turn_end,
)
from ..formats import lookup, text_of, utf8
from ..items import Kept, MarkingTokenizer, Weaver
from ..items.fields import BrokenItemError
from ..items.speech import Speech, written_by
from ..labels import labelled
from ..maps import Maps
from ..shard import Ids, Learned
from ..tokenizers import BYTES, open_tokenizer
from .tasks import Piece, Preparation

TODAY = datetime.datetime(2024, 7, 26)  # noqa: DTZ001 - a template knows no time zones
"""Date for templates that ask for it, so that tokens do not change from day to day; Llama 3.1's default."""


@dataclass(frozen=True)
class Maker:
    """Converts records to tokens.

    Args:
        tokenizer: of the preparation.
        template: which renders conversations; None where records are texts.
        maps: changes of texts.
        ends: the ids at which generation stops: the tokenizer's, and the one that ends a turn of the template. A run's
            copy of the tokenizer has that too, and gives the same tokens.
        special: tokens that stay text in messages and tools.
        split_key: the option that asks for this, for messages.
        used: keys of `rename` and `roles` that records needed.
        left_out: records that were left out, by their place, and why; and items that empty ones stand in for.
    """

    tokenizer: Tokenizer
    template: Template | None
    maps: Maps
    ends: frozenset[int] = frozenset()
    special: tuple[str, ...] = ()
    split_key: str = "split_special_tokens"
    used: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, wanted: Preparation, tokenizer: str) -> Maker:
        """Build the requirements of a preparation, given its tokenizer's path.

        Raises:
            ConfigError: there is no such tokenizer, template or map, or they don't fit each other.
        """
        opened, maps = open_tokenizer(tokenizer), Maps(wanted.maps)
        if wanted.items is not None:
            opened = MarkingTokenizer(opened, wanted.items.modalities.values())
        maps.check(opened)
        check_names(wanted.rename, wanted.roles, wanted.key(""))
        folder = None if tokenizer == BYTES else Path(tokenizer)
        template = (
            open_template(wanted.template, folder, options=wanted.template_options, now=TODAY) if wanted.chat else None
        )
        ends = {*opened.stops, *([] if template is None else [turn_end(template, opened)])}
        split_key = wanted.key("split_special_tokens")
        if wanted.split_special_tokens and wanted.items is not None:
            raise ConfigError(f"{split_key}: placeholders of items are special tokens in a text; leave it out.")
        special = _special(opened, split_key) if wanted.split_special_tokens else ()
        return cls(opened, template, maps, frozenset(id for id in ends if id is not None), special, split_key)

    def literal(self, segments: Segments, conversation: Conversation) -> Segments:
        """The same rendering, with the special tokens that stay text."""
        if not self.special or self.template is None:
            return segments
        found = literal_spans(self.template, conversation, segments.text, self.special, key=self.split_key)
        return replace(segments, literal=tuple(found))

    def leave_out(self, weaver: Weaver, where: str, error: BrokenItemError) -> None:
        """Note a record that is left out, if that is asked for.

        Raises:
            BrokenItemError: it is not.
        """
        if weaver.fields.broken != "skip":
            raise error
        self.left_out[where] = str(error)


def _special(tokenizer: Tokenizer, key: str) -> tuple[str, ...]:
    """The special tokens of a tokenizer, which can leave them as text.

    Raises:
        ConfigError: it can't, naming the key.
    """
    if not isinstance(tokenizer, LiteralEncoder):
        raise ConfigError(
            f"{key}: {type(tokenizer).__name__} has no special tokens that a text could hold; leave it out."
        )
    try:
        tokenizer.encode_with_literals("", ())
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return tuple(tokenizer.special_tokens)


def encoded(
    piece: Piece, wanted: Preparation, maker: Maker, kept: Kept
) -> Iterator[tuple[bytes, list[tuple[Ids, Learned | None, int]]]]:
    """The text of each record of a piece, by which it is held out, or its items; and its documents, each with what of
    it is learned, if not all, and the bytes of its text.

    Args:
        piece: of a file.
        wanted: the preparation.
        maker: of tokens.
        kept: takes items that lie in records.
    """
    weaver = None
    if isinstance(maker.tokenizer, MarkingTokenizer) and wanted.items is not None:
        weaver = Weaver(wanted.items, maker.tokenizer, piece.file, kept, maker.left_out)
    if weaver is not None and maker.template is None:
        yield from with_items(piece, wanted, weaver, maker)
    elif wanted.labels is not None:
        for text, (tokens, classes) in labelled(_placed(piece), wanted.labels, maker.tokenizer):
            yield text, [(tokens, None, len(text)), (classes, None, 0)]
    elif wanted.pairs:
        for text, both in pairs(piece, wanted, maker):
            yield text, [*both]
    elif maker.template is not None and wanted.feedback:
        for text, both in answers(piece, wanted, maker, maker.template):
            yield text, [*both]
    elif maker.template is not None:
        for text, turns in chats(piece, wanted, maker, maker.template, weaver):
            yield text, [*turns]


def with_items(
    piece: Piece, wanted: Preparation, weaver: Weaver, maker: Maker
) -> Iterator[tuple[bytes, list[tuple[Ids, Learned | None, int]]]]:
    """The text of each record of a piece, and its documents: tokens with room for its items, and a table of these."""
    for where, record in _placed(piece):
        name = wanted.field_of(piece.file)
        text = text_of(record, name, where, wanted.key("field"))
        content = utf8(text, f"{where}: {name!r}")
        try:
            made = weaver.text(record, text, where)
        except BrokenItemError as error:
            maker.leave_out(weaver, where, error)
            continue
        yield made.key, [(*made.tokens, len(content)), (*made.table, 0)]


def chats(
    piece: Piece, wanted: Preparation, maker: Maker, template: Template, weaver: Weaver | None = None
) -> Iterator[tuple[bytes, list[tuple[Ids, Learned, int]]]]:
    """Text of each conversation of a piece, and token ids, what is learned and bytes of its documents: one, or one for
    each turn; and after each the table of its items, if there is a weaver."""
    written = {} if weaver is None else written_by(template, weaver.fields.modalities)
    for where, record in _named(piece, wanted, maker):
        speech = None if weaver is None else Speech(record, weaver, written, where)
        found = conversation(record if speech is None else speech.record, where)
        samples = found.by_turn() if wanted.each_turn else []
        text, members = b"", list[tuple[Ids, Learned, int]]()
        for one in samples or [found]:
            if one.silent:
                raise ConfigError(f"{one.where}: the assistant's turn is empty; a model would learn to say nothing.")
            text, _, member = _chat(one, wanted, maker, template)
            if not member[1].any():
                raise ConfigError(f"{one.where}: no token is learned of this conversation.")
            if weaver is None or speech is None:
                members.append(member)
                continue
            ids, learned, size = member
            try:
                made = weaver.woven(ids, learned, speech.of(one), text, one.where)
            except BrokenItemError as error:
                maker.leave_out(weaver, where, error)
                members = []
                break
            text = made.key
            members += [(*made.tokens, size), (*made.table, 0)]
        yield text, members


def _chat(
    one: Conversation, wanted: Preparation, maker: Maker, template: Template
) -> tuple[bytes, Segments, tuple[Ids, Learned, int]]:
    """The text of a conversation, its rendering, and its document."""
    segments = maker.literal(render(template, one, learn=wanted.learn, pattern=wanted.learn_pattern), one)
    check_written(template, one, segments.text)
    text = utf8(segments.text, one.where)
    return text, segments, (*tokenise_ended(maker.tokenizer, template, segments, maker.ends), len(text))


def answers(
    piece: Piece, wanted: Preparation, maker: Maker, template: Template
) -> Iterator[tuple[bytes, list[tuple[Ids, Learned, int]]]]:
    """The prompt of each answer of a piece, and two documents: the prompt with the answer, and the label as one
    token."""
    for where, record in _named(piece, wanted, maker):
        found, desirable = feedback(record, where)
        _, segments, member = _chat(found, wanted, maker, template)
        if not member[1].any():
            raise ConfigError(f"{where}: the answer has no token that counts.")
        label = np.asarray([desirable], np.uint32), np.zeros(1, member[1].dtype), 0
        yield segments.text[: segments.learned[0][0]].encode(), [member, label]


def pairs(piece: Piece, wanted: Preparation, maker: Maker) -> Iterator[tuple[bytes, list[tuple[Ids, Learned, int]]]]:
    """The first text of each pair of a piece, and of both the token ids, what is learned and the bytes of the text.

    Args:
        piece: of a file.
        wanted: the preparation.
        maker: with a template for preferences; without one for pairs of texts, which are learned as a whole.
    """
    tokenizer, template = maker.tokenizer, maker.template
    for where, record in _named(piece, wanted, maker):
        if template is not None:
            pair = preference(record, where)
            if pair.chosen.silent:
                raise ConfigError(f"{where}: chosen is empty; a model would learn to say nothing.")
            answers = (pair.chosen, pair.rejected)
            both = [
                maker.literal(segments, answer)
                for segments, answer in zip(render_preference(template, pair), answers, strict=True)
            ]
            if pair.rejected.silent:
                raise ConfigError(f"{where}: rejected is empty; a pair needs two answers, so leave the record out.")
            for answer, segments in zip(answers, both, strict=True):
                check_written(template, answer, segments.text)
            texts = [utf8(segments.text, where) for segments in both]
            members: list[tuple[Ids, Learned, int]] = [
                (*tokenise_ended(tokenizer, template, segments, maker.ends), len(text))
                for segments, text in zip(both, texts, strict=True)
            ]
            for name, (_, trained, _) in zip(("chosen", "rejected"), members, strict=True):
                if not trained.any():
                    raise ConfigError(f"{where}: {name} has no token that counts.")
            if np.array_equal(members[0][0], members[1][0]):
                raise ConfigError(f"{where}: chosen and rejected have the same tokens with {template.name}.")
            yield texts[0], members
            continue
        found = embedding_texts(record, where)
        if found.negatives:
            raise ConfigError(f"{where}: negative: texts that do not belong together are not read; leave them out.")
        encoded: list[tuple[Ids, Learned, int]] = []
        for name, text in (("anchor", found.anchor), ("positive", found.positive)):
            size = len(utf8(text, f"{where}: {name}"))
            if not (ids := tokenizer.encode(text)):
                raise ConfigError(f"{where}: {name} has no token.")
            whole = [*tokenizer.begin, *ids, *([] if tokenizer.end is None else [tokenizer.end])]
            encoded.append((np.asarray(whole, np.uint32), np.ones(len(whole), np.uint8), size))
        yield found.anchor.encode(), encoded


def _named(piece: Piece, wanted: Preparation, maker: Maker) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The records of a piece under the names that are read, each after its place."""
    for where, record in _placed(piece):
        yield where, renamed(record, wanted.rename, wanted.roles, where, maker.used)


def _placed(piece: Piece) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The records of a piece, each after the file and the place where it stands."""
    for place, record in lookup(piece.file.suffix, piece.file.label).read(piece.file, piece.part):
        yield piece.file.at(place), record


def documents(piece: Piece, field: str) -> Iterator[bytes]:
    """The texts of a piece, as UTF-8; empty ones left out."""
    for place, record in lookup(piece.file.suffix, piece.file.label).read(piece.file, piece.part):
        text = text_of(record, field, piece.file.at(place), "--field")
        if text:
            yield utf8(text, f"{piece.file.at(place)}: {field!r}")
