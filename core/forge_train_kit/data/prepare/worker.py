"""One task: read its pieces, tokenise, write its shards, leave a note."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError, Tokenizer

from ..chats import (
    Template,
    check_names,
    check_written,
    conversation,
    embedding_texts,
    open_template,
    preference,
    renamed,
    render,
    render_preference,
    tokenise_ended,
    turn_end,
)
from ..formats import lookup, text_of, utf8
from ..held_out import SIDES, Side, divided, side_of
from ..labels import labelled
from ..manifest import WORK
from ..maps import Maps
from ..shard import Ids
from ..store import SUFFIX, Header, ShardWriter, content, read_header
from ..tokenizers import BYTES, encode_documents, open_tokenizer
from .tasks import Piece, Preparation, Task

BATCH = 1 << 20
"""Bytes of text that are tokenised at a time."""


TODAY = datetime.datetime(2024, 7, 26)  # noqa: DTZ001 - a template knows no time zones
"""Date for templates that ask for it, so that tokens do not change from day to day; Llama 3.1's default."""


@dataclass(frozen=True)
class Done:
    """Result of a task.

    Args:
        number: of the task.
        headers: of its shards, by side; a side without documents has none.
        skipped: files that were left out, and why.
    """

    number: int
    headers: dict[str, Header]
    skipped: dict[str, str]


def task_name(task: Task | int) -> str:
    return f"{task if isinstance(task, int) else task.number:05d}"


def shard_path(out: Path, side: str, number: int) -> Path:
    return out / f"{side}-{task_name(number)}{SUFFIX}"


def done(work: Path, out: Path, task: Task, *, verify: bool = False) -> Done | None:
    """The note of a task whose shards are all there, whole; `verify` reads them and compares their content."""
    try:
        table = json.loads((work / f"{task_name(task)}.json").read_text(encoding="utf-8"))
        headers = {side: Header(**header) for side, header in table["headers"].items()}
        if any(read_header(shard_path(out, side, task.number)) != header for side, header in headers.items()):
            return None
        if verify and any(not _intact(shard_path(out, side, task.number), headers[side]) for side in headers):
            return None
        return Done(task.number, headers, table["skipped"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None


def _intact(path: Path, header: Header) -> bool:
    with path.open("rb") as file:
        return content(file) == header.content


def perform(task: Task, wanted: Preparation, maker: Maker, *, whole: bool, told: Callable[[int], None]) -> None:
    """Do a task.

    Args:
        task: what to read.
        wanted: the preparation.
        maker: of tokens.
        whole: whether documents are held out whole.
        told: is given the bytes of each piece that was read.
    """
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        sides: dict[Side, _Side] = {}

        def side(name: Side) -> _Side:
            if name not in sides:
                path, made_by = shard_path(wanted.out, name, task.number), maker.tokenizer
                ids = max(made_by.vocabulary, 1 + len(wanted.labels.classes.names) if wanted.labels else 0)
                writer = ShardWriter(path, ids, made_by.digest, trained=wanted.chat or bool(wanted.pairs))
                sides[name] = _Side(stack.enter_context(writer), made_by)
            return sides[name]

        for piece in task.pieces:
            try:
                if wanted.labels or wanted.pairs or wanted.chat:
                    for text, members in encoded(piece, wanted, maker):
                        for ids, trained in members:
                            side(side_of(text, wanted.held_out)).add_encoded(ids, trained, len(text))
                else:
                    for document in documents(piece, wanted.field_of(piece.file)):
                        for name, text in divided(document, wanted.held_out, whole=whole):
                            for made in maker.maps(text):
                                side(name).add(made)
            except ConfigError as error:
                if not wanted.skip:
                    raise
                skipped.setdefault(piece.file.address, str(error))
            told(piece.part.bytes)
        headers = {name: dataclasses.asdict(sides[name].close()) for name in SIDES if name in sides}
    note = wanted.out / WORK / f"{task_name(task)}.json"
    part = note.with_suffix(".part")
    part.write_text(json.dumps({"headers": headers, "skipped": skipped}), encoding="utf-8")
    part.replace(note)


@dataclass(frozen=True)
class Maker:
    """Converts records to tokens.

    Args:
        tokenizer: of the preparation.
        template: renders conversations; None if records are texts.
        maps: changes of texts.
        ends: ids at which generation stops: the tokenizer's, and the one that ends a turn of the template. A run's copy
            of the tokenizer has the latter too, and gives the same tokens.
    """

    tokenizer: Tokenizer
    template: Template | None
    maps: Maps
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, wanted: Preparation, tokenizer: str) -> Maker:
        """Build the requirements of a preparation, given its tokenizer's path.

        Raises:
            ConfigError: there is no such tokenizer, template or map, or they don't fit each other.
        """
        opened, maps = open_tokenizer(tokenizer), Maps(wanted.maps)
        maps.check(opened)
        check_names(wanted.rename)
        folder = None if tokenizer == BYTES else Path(tokenizer)
        template = (
            open_template(wanted.template, folder, options=wanted.template_options, now=TODAY) if wanted.chat else None
        )
        ends = {*opened.stops, *([] if template is None else [turn_end(template, opened)])}
        return cls(opened, template, maps, frozenset(id for id in ends if id is not None))


def encoded(
    piece: Piece, wanted: Preparation, maker: Maker
) -> Iterator[tuple[bytes, list[tuple[Ids, NDArray[np.uint8] | None]]]]:
    """The text of each record of a piece, and its documents, each with what of it is learned, if not all."""
    if wanted.labels is not None:
        for text, two in labelled(_placed(piece), wanted.labels, maker.tokenizer):
            yield text, [(ids, None) for ids in two]
    elif wanted.pairs:
        for text, members in pairs(piece, wanted, maker):
            yield text, [*members]
    elif maker.template is not None:
        for text, ids, trained in chats(piece, wanted, maker, maker.template):
            yield text, [(ids, trained)]


def chats(
    piece: Piece, wanted: Preparation, maker: Maker, template: Template
) -> Iterator[tuple[bytes, Ids, NDArray[np.uint8]]]:
    """Text, token ids and what is learned of each conversation of a piece."""
    for where, record in _named(piece, wanted):
        found = conversation(record, where)
        if found.silent:
            raise ConfigError(f"{found.where}: the assistant's turn is empty; a model would learn to say nothing.")
        segments = render(template, found, learn=wanted.learn)
        check_written(template, found, segments.text)
        text = utf8(segments.text, found.where)
        ids, trained = tokenise_ended(maker.tokenizer, template, segments, maker.ends)
        if not trained.any():
            raise ConfigError(f"{found.where}: no token is learned of this conversation.")
        yield text, ids, trained


def pairs(
    piece: Piece, wanted: Preparation, maker: Maker
) -> Iterator[tuple[bytes, list[tuple[Ids, NDArray[np.uint8]]]]]:
    """The first text of each pair of a piece, and of both the token ids and what is learned.

    Args:
        piece: of a file.
        wanted: the preparation.
        maker: with a template for preferences; without one for pairs of texts, which are learned as a whole.
    """
    tokenizer, template = maker.tokenizer, maker.template
    for where, record in _named(piece, wanted):
        if template is not None:
            pair = preference(record, where)
            both = render_preference(template, pair)
            for answer, segments in zip((pair.chosen, pair.rejected), both, strict=True):
                check_written(template, answer, segments.text)
            texts = [utf8(segments.text, where) for segments in both]
            yield texts[0], [tokenise_ended(tokenizer, template, segments, maker.ends) for segments in both]
            continue
        found = embedding_texts(record, where)
        if found.negatives:
            raise ConfigError(f"{where}: negative: texts that do not belong together are not read; leave them out.")
        encoded: list[tuple[Ids, NDArray[np.uint8]]] = []
        for name, text in (("anchor", found.anchor), ("positive", found.positive)):
            utf8(text, f"{where}: {name}")
            if not (ids := tokenizer.encode(text)):
                raise ConfigError(f"{where}: {name} has no token.")
            whole = [*tokenizer.begin, *ids, *([] if tokenizer.end is None else [tokenizer.end])]
            encoded.append((np.asarray(whole, np.uint32), np.ones(len(whole), np.uint8)))
        yield found.anchor.encode(), encoded


def _named(piece: Piece, wanted: Preparation) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The records of a piece under the names that are read, each after its place."""
    for where, record in _placed(piece):
        yield where, renamed(record, wanted.rename, wanted.roles, where)


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


class _Side:
    """Texts that wait until there are enough of them to be tokenised together."""

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer) -> None:
        self._writer, self._tokenizer = writer, tokenizer
        self._begin, self._end = tokenizer.begin, () if tokenizer.end is None else (tokenizer.end,)
        self._waiting: list[bytes] = []
        self._size = 0

    def add(self, document: bytes) -> None:
        if len(document) >= BATCH:
            self._flush()
        self._waiting.append(document)
        self._size += len(document)
        if self._size >= BATCH:
            self._flush()

    def add_encoded(self, ids: Ids, trained: NDArray[np.uint8] | None, size: int) -> None:
        """A document that is tokens already, and begins and ends as it should."""
        self._writer.add([ids], size, [] if trained is None else [trained])

    def close(self) -> Header:
        self._flush()
        return self._writer.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        begin, end = np.array(self._begin, np.uint32), np.array(self._end, np.uint32)
        encoded = list(encode_documents(self._tokenizer, self._waiting))
        for at, ids in enumerate(encoded):
            encoded[at] = np.concatenate([begin, ids, end]) if len(ids) else ids
        self._writer.add(encoded, self._size)
        self._waiting, self._size = [], 0
