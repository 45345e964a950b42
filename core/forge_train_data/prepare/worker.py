"""One task: read its pieces, tokenise, write its shards, leave a note."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge_train import ConfigError, Tokenizer
from forge_train.contract.protocols import DocumentEncoder

from ..formats import lookup, text_of
from ..held_out import SIDES, Side, cut, side_of
from ..manifest import WORK
from ..shard import Ids
from ..store import SUFFIX, Header, ShardWriter, read_header
from .tasks import Piece, Preparation, Task

BATCH = 4 << 20
"""Bytes of text that are tokenised at a time."""


@dataclass(frozen=True)
class Done:
    """What a task left.

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


def done(work: Path, out: Path, task: Task) -> Done | None:
    """The note of a task whose shards are all there, whole."""
    try:
        table = json.loads((work / f"{task_name(task)}.json").read_text(encoding="utf-8"))
        headers = {side: Header(**header) for side, header in table["headers"].items()}
        if any(read_header(shard_path(out, side, task.number)) != header for side, header in headers.items()):
            return None
        return Done(task.number, headers, table["skipped"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None


def perform(task: Task, wanted: Preparation, tokenizer: Tokenizer, *, whole: bool, told: Callable[[int], None]) -> None:
    """Do a task.

    Args:
        task: what to read.
        wanted: the preparation.
        tokenizer: of the preparation.
        whole: whether documents are held out whole.
        told: is given the bytes of each piece that was read.
    """
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        sides: dict[Side, _Side] = {}
        for piece in task.pieces:
            try:
                for document in documents(piece, wanted.field):
                    for side, text in _divided(document, wanted.held_out, whole):
                        if side not in sides:
                            path = shard_path(wanted.out, side, task.number)
                            writer = ShardWriter(path, tokenizer.vocabulary, tokenizer.digest)
                            sides[side] = _Side(stack.enter_context(writer), tokenizer)
                        sides[side].add(text)
            except ConfigError as error:
                if not wanted.skip:
                    raise
                skipped.setdefault(piece.file.address, str(error))
            told(piece.part.bytes)
        headers = {side: dataclasses.asdict(sides[side].close()) for side in SIDES if side in sides}
    note = wanted.out / WORK / f"{task_name(task)}.json"
    part = note.with_suffix(".part")
    part.write_text(json.dumps({"headers": headers, "skipped": skipped}), encoding="utf-8")
    part.replace(note)


def documents(piece: Piece, field: str) -> Iterator[bytes]:
    """The texts of a piece, as UTF-8; empty ones left out."""
    for place, record in lookup(piece.file.suffix, piece.file.label).read(piece.file, piece.part):
        text = text_of(record, field, piece.file.at(place), "--field")
        if text:
            try:
                yield text.encode("utf-8")
            except UnicodeEncodeError as error:
                where = piece.file.at(place)
                raise ConfigError(f"{where}: {field!r} has half a surrogate pair at character {error.start}") from error


def _divided(document: bytes, share: float, whole: bool) -> Iterator[tuple[Side, bytes]]:
    if not share or whole:
        yield side_of(document, share), document
        return
    for side, text in zip(SIDES, cut(document, share), strict=True):
        if text:
            yield side, text


class _Side:
    """Texts that wait until there are enough of them to be tokenised together."""

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer) -> None:
        self._writer, self._tokenizer = writer, tokenizer
        self._begin, self._end = tokenizer.begin, () if tokenizer.end is None else (tokenizer.end,)
        self._waiting: list[bytes] = []
        self._size = 0

    def add(self, document: bytes) -> None:
        self._waiting.append(document)
        self._size += len(document)
        if self._size >= BATCH:
            self._flush()

    def close(self) -> Header:
        self._flush()
        return self._writer.close()

    def _flush(self) -> None:
        begin, end = np.array(self._begin, np.int64), np.array(self._end, np.int64)
        encoded = [np.concatenate([begin, ids, end]) for ids in encode(self._tokenizer, self._waiting) if len(ids)]
        self._writer.add(encoded, self._size)
        self._waiting, self._size = [], 0


def encode(tokenizer: Tokenizer, documents: list[bytes]) -> Sequence[Ids]:
    """Ids of UTF-8 texts, all at once where the tokenizer can."""
    if isinstance(tokenizer, DocumentEncoder):
        return tokenizer.encode_documents(documents)
    encoded = [np.asarray(tokenizer.encode(document.decode("utf-8")), np.int64) for document in documents]
    if (largest := max((int(ids.max()) for ids in encoded if len(ids)), default=0)) >= tokenizer.vocabulary:
        raise ConfigError(f"The tokenizer gave the id {largest}, and says that it has {tokenizer.vocabulary}.")
    return encoded
