"""The file of a token shard: how it is written, and how it is opened.

bytes 0…7       FORGETOK
bytes 8…15      version and size of the header's JSON, two uint32 (all numbers are little-endian)
bytes 16…1023   the header: a JSON object (`Header`), then spaces
from 1024       tokens, of the header's dtype
from a multiple of 8, after them
                ends of the documents, int64: where each ends in the tokens (exclusive)
after them      if the header says `trained`: one uint8 for each token, 1 where it is to be learned
                if it says `weighted`, in a file of version 2: one float32 instead, how much the token's loss counts
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.strict_json import loads

from .shard import Ids, Learned, Shard

MAGIC = b"FORGETOK"
VERSION = 2
"""The newest one. Files without weights are written as version 1."""
START = 1024
"""Offset of the first token."""
SUFFIX = ".tokens"
DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a shard.

    Args:
        dtype: of the tokens.
        tokens: their number.
        documents: their number.
        bytes: of their text, as UTF-8.
        largest: the largest token id; −1 without tokens.
        trained: a mask marks the tokens to be learned.
        tokenizer: `digest` of the tokenizer that made them.
        content: blake2b of everything after the header.
        weighted: whether the mask is of weights.
    """

    dtype: str
    tokens: int
    documents: int
    bytes: int
    largest: int
    trained: bool
    tokenizer: str
    content: str
    weighted: bool = False

    @property
    def ends_at(self) -> int:
        return START + -(-self.tokens * np.dtype(self.dtype).itemsize // 8) * 8

    @property
    def mask_at(self) -> int:
        return self.ends_at + 8 * self.documents

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        return self.mask_at + self.tokens * (4 if self.weighted else 1 if self.trained else 0)


class ShardWriter:
    """Writes a shard: documents one after the other, in memory that does not grow with the tokens.

    The file has its name only once it is whole. Leaving the block by an exception leaves nothing.

    Args:
        path: of the file.
        vocabulary: number of token ids; the dtype is the narrowest that holds them.
        tokenizer: the tokenizer's `digest`.
        trained: whether each document comes with a mask.
    """

    def __init__(self, path: Path, vocabulary: int, tokenizer: str, *, trained: bool = False) -> None:
        self.path, self._tokenizer, self._trained = path, tokenizer, trained
        self._dtype = np.min_scalar_type(max(vocabulary - 1, 0))
        if self._dtype.name not in DTYPES:
            raise ConfigError(f"{path}: a vocabulary of {vocabulary:,} token ids is too large for 32 bits.")
        self._part = path.with_name(f".{path.name}.part")
        self._file: BinaryIO = self._part.open("w+b")
        self._masks: BinaryIO | None = self._part.with_suffix(".mask").open("w+b") if trained else None
        self._file.seek(START)
        self._lengths: list[int] = []
        self._tokens = self._bytes = 0
        self._largest = -1
        self._weighted = False

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in (self._file, self._masks):
            if file is not None:
                file.close()
        self._part.with_suffix(".mask").unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)

    def add(self, documents: Sequence[Ids], size: int, masks: Iterable[Learned] = ()) -> None:
        """Write documents.

        Args:
            documents: token ids of each; one without any is left out.
            size: of their text in bytes.
            masks: of each, 1 where a token is to be learned, or as float32 how much it counts.
        """
        kept = [document for document in documents if len(document)]
        if kept:
            ids = kept[0] if len(kept) == 1 else np.concatenate(kept)
            self._largest = max(self._largest, int(ids.max()))
            self._file.write(ids.astype(self._dtype, casting="unsafe", copy=False).data)
            self._tokens += len(ids)
            self._lengths += map(len, kept)
        if self._masks is not None:
            for mask in masks:
                self._weighted |= mask.dtype == np.float32
                self._masks.write(np.ascontiguousarray(mask, np.float32).data)
        self._bytes += size

    def close(self) -> Header:
        """Finish the file, and give it its name."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        self._file.write(b"\0" * (-self._tokens * self._dtype.itemsize % 8))
        self._file.write(ends.data)
        if self._masks is not None:
            self._masks.seek(0)
            while chunk := self._masks.read(1 << 20):
                self._file.write(chunk if self._weighted else np.frombuffer(chunk, np.float32).astype(np.uint8).data)
        self._file.flush()
        header = Header(
            *(self._dtype.name, self._tokens, len(ends), self._bytes, self._largest),
            *(self._trained, self._tokenizer, content(self._file), self._weighted),
        )
        table = dataclasses.asdict(header)
        if not self._weighted:
            del table["weighted"]
        text = json.dumps(table).encode()
        self._file.seek(0)
        self._file.write((MAGIC + struct.pack("<II", VERSION if self._weighted else 1, len(text)) + text).ljust(START))
        self._file.flush()
        self._file.close()
        self._part.replace(self.path)
        return header


def content(file: BinaryIO) -> str:
    """blake2b of what follows the header."""
    digest = hashlib.blake2b(digest_size=16)
    file.seek(START)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def read_header(path: Path) -> Header:
    """The header of a shard, whose size must be what it says.

    Raises:
        ConfigError: the file can't be read, is no shard, is of a newer format, or is truncated.
    """
    try:
        with path.open("rb") as file:
            start = file.read(START)
            size = file.seek(0, 2)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    if not start.startswith(MAGIC):
        raise ConfigError(f"{path}: is no token shard of forge.")
    version, length = struct.unpack("<II", start[8:16]) if len(start) >= 16 else (0, 0)
    if version > VERSION:
        raise ConfigError(f"{path}: is of format {version}; this forge reads up to {VERSION}. Update forge-train.")
    try:
        table: dict[str, Any] = loads(start[16 : 16 + length].decode())
        header = Header(**table)
        whole = header.size
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: its header is damaged: prepare it again.") from error
    if header.dtype not in DTYPES or size != whole:
        raise ConfigError(
            f"{path}: has {size:,} bytes where its header says {whole:,}: it is truncated or damaged. "
            "Delete it and run forge data prepare again."
        )
    return header


def open_shard(path: Path) -> tuple[Shard, Header]:
    """A shard, mapped.

    Raises:
        ConfigError: as `read_header`.
    """
    header = read_header(path)
    # Plain views spare np.memmap's work on every slice; an empty stretch can't be mapped.
    tokens = _map(path, header.dtype, START, header.tokens)
    ends = _map(path, "<i8", header.ends_at, header.documents)
    dtype = "<f4" if header.weighted else "u1"
    trained = _map(path, dtype, header.mask_at, header.tokens) if header.trained else None
    return Shard(path, tokens, ends, trained), header


def _map(path: Path, dtype: str, offset: int, count: int) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))
