"""One task: read its pieces, tokenise, write its shards, leave a note."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge_train import ConfigError
from forge_train_kit.tokenizer import Tokenizer

from ..held_out import SIDES, Side, divided, side_of
from ..items import Kept
from ..items.kept import kept_path
from ..manifest import WORK
from ..shard import Ids, Learned
from ..store import SUFFIX, Header, ShardWriter, content, read_header
from ..tokenizers import encode_documents
from .encoding import Maker, documents, encoded
from .tasks import Preparation, Task

BATCH = 1 << 20
"""Bytes of text that are tokenised at a time."""


@dataclass(frozen=True)
class Done:
    """Result of a task.

    Args:
        number: of the task.
        headers: of its shards, by side; a side without documents has none.
        skipped: files and records that were left out, and why.
        used: keys of `rename` and `roles` that its records needed; None in a note that says nothing of them.
        kept: bytes of the items that are kept beside its shards.
    """

    number: int
    headers: dict[str, Header]
    skipped: dict[str, str]
    used: tuple[str, ...] | None = None
    kept: int = 0


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
        used, kept = table.get("used"), table.get("kept", 0)
        if kept and kept_path(out, task_name(task)).stat().st_size != kept:
            return None
        return Done(task.number, headers, table["skipped"], None if used is None else tuple(used), kept)
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
    maker.used.clear()
    maker.left_out.clear()
    with ExitStack() as stack:
        sides: dict[Side, _Side] = {}

        def side(name: Side) -> _Side:
            if name not in sides:
                path, made_by = shard_path(wanted.out, name, task.number), maker.tokenizer
                ids = max(made_by.vocabulary, 1 + len(wanted.labels.classes.names) if wanted.labels else 0)
                trained = wanted.chat or bool(wanted.pairs) or wanted.items is not None
                writer = ShardWriter(path, ids, made_by.digest, trained=trained)
                sides[name] = _Side(stack.enter_context(writer), made_by)
            return sides[name]

        kept = stack.enter_context(Kept(kept_path(wanted.out, task_name(task))))
        for piece in task.pieces:
            try:
                if wanted.labels or wanted.pairs or wanted.chat or wanted.items:
                    for text, members in encoded(piece, wanted, maker, kept):
                        for ids, trained, size in members:
                            side(side_of(text, wanted.held_out)).add_encoded(ids, trained, size)
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
        skipped |= maker.left_out
        size = kept.close()
        headers = {name: dataclasses.asdict(sides[name].close()) for name in SIDES if name in sides}
    note = wanted.out / WORK / f"{task_name(task)}.json"
    part = note.with_suffix(".part")
    table = {"headers": headers, "skipped": skipped, "used": sorted(maker.used), **({"kept": size} if size else {})}
    part.write_text(json.dumps(table), encoding="utf-8")
    part.replace(note)


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

    def add_encoded(self, ids: Ids, trained: Learned | None, size: int) -> None:
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
