"""Input of an inspection as documents of tokens: a prepared folder, a file of tokens, or the beginning of a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_train import ConfigError
from forge_train.base.errors import ForgeError

from ...format import format_plural
from ..chats import Learn
from ..documents import Documents
from ..files import File, find
from ..formats import lookup
from ..held_out import SIDES
from ..items import Records
from ..manifest import FILE, WORK, Prepared, open_prepared
from ..prepare import Preparation
from ..prepare.encoding import Maker, chats, documents
from ..prepare.tasks import Piece
from ..prepare.worker import BATCH
from ..shard import Ids, Learned, Shard
from ..store import content, read_header
from ..tokenizers import BYTES, encode_documents, open_tokenizer
from ..tokens import beyond
from .itemised import with_items

if TYPE_CHECKING:
    from forge_train_kit.tokenizer import Tokenizer

SAMPLE = 64 << 20
"""Bytes of text that are read of a source."""
FOREIGN = (".bin", ".idx", ".npy")
KEY = "SOURCE"


class DamagedError(ForgeError):
    """Shards do not hold what was written into them."""

    type = "data"


@dataclass(frozen=True)
class Asked:
    """Request for an inspection, as the user made it.

    Args:
        sources: a prepared folder, a file of tokens, or anything that `forge data prepare` takes.
        tokenizer: `bytes`, a `tokenizer.json` or a folder; empty for the default, or a folder's own.
        field: the field of a record that holds its text.
        dtype: of a file of tokens that does not specify it; empty otherwise.
        chat: whether records are conversations.
        template: the template that renders them; empty for the tokenizer's own.
        learn: the part of them that is learned; None for the assistant's turns.
        rename, roles, each_turn, split_special_tokens: see `Preparation`.
    """

    sources: tuple[str, ...]
    tokenizer: str = ""
    field: str = ""
    dtype: str = ""
    chat: bool = False
    template: str = ""
    learn: Learn | None = None
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    each_turn: bool = False
    split_special_tokens: bool = False


@dataclass(frozen=True)
class Material:
    """Documents, and what is known about them.

    Args:
        kind: `prepared`, `tokens` or `source`.
        documents: all of them; of a source, those that were read.
        tokenizer: that made them; None where nobody said which.
        words: whether tokens are bytes.
        facts: what there is to say, by name: numbers and texts.
    """

    kind: str
    documents: Documents
    tokenizer: Tokenizer | None
    words: bool
    facts: dict[str, Any]
    records: Records | None = None
    """Records with items, whose texts the documents are."""


def open_material(asked: Asked, told: Callable[[str], None] = lambda text: None) -> Material:
    """Open what was asked for.

    Args:
        told: is given a line about how far it is.

    Raises:
        ConfigError: it can't be read, holds nothing, or an option does not fit it.
        DamagedError: naming the shards of a prepared folder whose content is not what was written.
    """
    first = Path(asked.sources[0]).expanduser()
    prepared, foreign = (first / FILE).is_file() or (first / WORK).is_dir(), first.suffix in FOREIGN or asked.dtype
    if (prepared or foreign) and len(asked.sources) > 1:
        raise ConfigError(f"{KEY}: {first} holds tokens already: inspect it alone.")
    of_chats = ("template", "learn", "rename", "roles", "each_turn", "split_special_tokens")
    made = ("field", "chat", *of_chats, *(("dtype", "tokenizer") if prepared else ()))
    useless = made if prepared or foreign else () if asked.chat else of_chats
    for option in useless:
        if getattr(asked, option):
            why = f"{first} holds tokens" if prepared or foreign else "it is for --chat"
            raise ConfigError(f"--{option.replace('_', '-')}: has no effect: {why}.")
    if asked.chat and asked.field:
        raise ConfigError("--field: has no effect: conversations have fields of their own.")
    if prepared:
        return _prepared(first, told)
    return _foreign(first, asked) if foreign else _source(asked, told)


def _prepared(folder: Path, told: Callable[[str], None]) -> Material:
    prepared = open_prepared(folder, key=KEY)
    tokenizer = open_tokenizer(prepared.tokenizer)
    manifest = prepared.manifest
    if tokenizer.digest != manifest.tokenizer["digest"]:
        raise ConfigError(f"{KEY}: {prepared.tokenizer} is not the tokenizer that made the shards of {folder}.")
    verify(prepared, told)
    facts: dict[str, Any] = {"path": str(folder)}
    for side in SIDES:
        facts[side] = {
            "documents": manifest.total("documents", side),
            "tokens": manifest.total("tokens", side),
            "bytes": manifest.total("bytes", side),
            "shards": len(manifest.shards[side]),
        }
    facts |= {"tokenizer": prepared.tokenizer, "vocabulary": tokenizer.vocabulary}
    facts |= {"settings": dict(manifest.settings), "sources": list(manifest.sources.get("entries", ()))}
    facts |= {"source_files": manifest.sources.get("files", 0), "bytes": manifest.total("bytes"), "verified": True}
    shards = [shard for side in SIDES for shard in prepared.sides[side].shards]
    words = prepared.tokenizer == BYTES
    if "items" not in manifest.settings:
        return Material("prepared", Documents(shards), tokenizer, words, facts)
    records, documents = with_items(prepared, shards, facts)
    return Material("prepared", documents, tokenizer, words, facts, records)


def verify(prepared: Prepared, told: Callable[[str], None]) -> None:
    """Compare every shard's content with the hash that was taken when it was written.

    Raises:
        DamagedError: naming all that differ.
    """
    listed = [one for side in SIDES for one in prepared.manifest.shards[side]]
    damaged = []
    for number, one in enumerate(listed, 1):
        told(f"checking shard {number:,} of {len(listed):,}")
        path = prepared.folder / Path(one.file).name
        with path.open("rb") as file:
            if content(file) != read_header(path).content:
                damaged.append(str(path))
    if damaged:
        raise DamagedError(
            f"{', '.join(damaged)}: the content is not what was written: the file is damaged. Delete it and run the "
            "same forge data prepare again."
        )


def _foreign(path: Path, asked: Asked) -> Material:
    from ..foreign import largest, open_foreign

    tokenizer = open_tokenizer(asked.tokenizer) if asked.tokenizer else None
    shards = open_foreign(path, dtype=asked.dtype or None, end=tokenizer.end if tokenizer else None, key="--")
    top, at = largest(shards[0])
    if tokenizer and top >= tokenizer.vocabulary:
        raise ConfigError(beyond(shards[0].path, top, at, tokenizer.vocabulary, key="--tokenizer"))
    facts = {"path": str(path), "dtype": shards[0].tokens.dtype.name, "largest": top}
    if tokenizer:
        facts |= {"tokenizer": asked.tokenizer, "vocabulary": tokenizer.vocabulary}
    return Material("tokens", Documents(shards), tokenizer, asked.tokenizer == BYTES, facts)


def _source(asked: Asked, told: Callable[[str], None]) -> Material:
    files = find(asked.sources, key=KEY)
    path = asked.tokenizer or BYTES
    wanted = Preparation(
        asked.sources,
        Path(),
        tokenizer=path,
        field=asked.field or "text",
        chat=asked.chat,
        template=asked.template,
        learn=asked.learn or "assistant",
        rename=asked.rename,
        roles=asked.roles,
        each_turn=asked.each_turn,
        split_special_tokens=asked.split_special_tokens,
    )
    maker = Maker.of(wanted, path)
    reading = _Reading(files, wanted, maker, told)
    shard = reading.shard()
    facts: dict[str, Any] = {"sources": list(asked.sources), "source_files": len(files)}
    facts |= {"tokenizer": path, "vocabulary": maker.tokenizer.vocabulary, "bytes": reading.bytes}
    facts |= {"read": "beginning" if reading.more else "all", "files_read": reading.files}
    return Material("source", Documents([shard]), maker.tokenizer, path == BYTES, facts)


class _Reading:
    """The documents of the first files, up to `SAMPLE` bytes of text, as tokens in memory."""

    def __init__(self, files: Sequence[File], wanted: Preparation, maker: Maker, told: Callable[[str], None]) -> None:
        self.bytes = self.files = 0
        self.more = False
        self._files, self._wanted, self._maker, self._told = files, wanted, maker, told
        self._dtype = np.min_scalar_type(max(maker.tokenizer.vocabulary - 1, 0))
        self._ids: list[Ids] = []
        self._masks: list[Learned] = []
        self._lengths: list[int] = []

    def shard(self) -> Shard:
        """Read.

        Raises:
            ConfigError: a record can't be read, or there is no text.
        """
        waiting: list[bytes] = []
        size = 0
        for one in self._records():
            if not isinstance(one, bytes):
                self._add(one[0])
                self._masks.append(one[1])
            else:
                waiting.append(one)
                size += len(one)
                if size >= BATCH:
                    self._encode(waiting)
                    waiting, size = [], 0
        self._encode(waiting)
        if not self._lengths:
            raise ConfigError(f"{KEY}: there is no text in {format_plural(self.files, 'file')}.")
        tokens, ends = np.concatenate(self._ids), np.cumsum(self._lengths, dtype=np.int64)
        mask = np.concatenate(self._masks) if self._maker.template else None
        return Shard(Path(self._files[0].address), tokens, ends, mask)

    def _records(self) -> Iterator[bytes | tuple[Ids, Learned, int]]:
        for file in self._files:
            self.files += 1
            self._told(f"reading {file.address}")
            for part in lookup(file.suffix, file.label).parts(file):
                for record in self._of(Piece(file, part)):
                    if self.bytes >= SAMPLE:
                        self.more = True
                        return
                    self.bytes += len(record) if isinstance(record, bytes) else record[2]
                    yield record

    def _of(self, piece: Piece) -> Iterator[bytes | tuple[Ids, Learned, int]]:
        """The documents of a piece: texts, or token ids with what of them is learned and the bytes of their text."""
        if self._maker.template is None:
            yield from documents(piece, self._wanted.field)
            return
        for _, turns in chats(piece, self._wanted, self._maker, self._maker.template):
            yield from turns

    def _encode(self, texts: list[bytes]) -> None:
        tokenizer = self._maker.tokenizer
        begin = np.array(tokenizer.begin, self._dtype)
        end = np.array([] if tokenizer.end is None else [tokenizer.end], self._dtype)
        for ids in encode_documents(tokenizer, texts) if texts else ():
            if len(ids):
                self._add(np.concatenate([begin, ids, end]))

    def _add(self, ids: Ids) -> None:
        if len(ids):
            self._ids.append(ids.astype(self._dtype, copy=False))
            self._lengths.append(len(ids))
