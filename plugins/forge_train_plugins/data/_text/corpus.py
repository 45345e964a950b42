"""A tokenised corpus: built once, then mapped from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train_kit.data.files import File
from forge_train_kit.data.held_out import Side
from forge_train_kit.data.tokenizers import encode_documents
from forge_train_kit.format import format_plural
from forge_train_kit.tokenizer import Tokenizer

from . import cache
from .baseline import trigram_bits_per_byte
from .documents import Survey, read, split, survey
from .progress import Progress
from .sources import describe, find, is_plain

Ids = NDArray[np.integer]

_LAYOUT = 2
"""Of the files; part of every key, so that what an older layout wrote is not found."""
_BATCH = 1 << 22
"""Bytes of text that are tokenised at a time."""
_SETTLED = 2_000_000_000
"""Nanoseconds since its last change after which another change must show in a file's time."""


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a corpus.

    Args:
        tokens: `[tokens]` all documents, one after the other, each after the tokenizer's `begin` and before its `end`.
        ends: `[documents]` int64, where each document ends (exclusive).
        bytes: of its text.
    """

    tokens: Ids
    ends: NDArray[np.int64]
    bytes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents, divided into training and held-out ones."""

    name: str
    key: str
    """Of content, tokenizer and division."""
    folder: Path
    train: Split
    validation: Split


@dataclass(frozen=True, slots=True)
class Recipe:
    """Determines a corpus together with the files' content."""

    paths: str | tuple[str, ...]
    field: str
    held_out: float

    def documents(self, found: Survey, progress: Progress | None = None) -> Iterator[tuple[Side, bytes]]:
        """All documents with the side they fall on."""
        every = (document for file in found.files for document in read(file, self.field))
        return split(progress.follow(every) if progress else every, self.held_out, found.documents)


def open_corpus(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> Corpus:
    """The corpus from the cache, tokenised first if need be.

    Raises:
        ConfigError: a file is missing, unreadable or no text, nothing is in them, or the cache can't be written.
    """
    files = find(recipe.paths)
    listing, settled = _listing(files)
    settings = [_LAYOUT, tokenizer.digest, recipe.field, recipe.held_out]
    memo = folder / "seen" / _hash([listing, *settings])
    key, found = cache.recall(memo), None
    if key is None:
        found = survey(files)
        key = _hash([found.digest, *settings])
        if settled:
            cache.remember(memo, key)

    def build(made: Path) -> dict[str, Any]:
        logging.getLogger("forge_train").info("text: tokenising %d files into %s", len(files), folder)
        surveyed = found or survey(files)
        plain = all(is_plain(file) and not file.packed for file in files)
        size = sum(file.size() for file in surveyed.files) if plain else None
        with Progress(surveyed.documents, size) as progress:
            return _tokenise(recipe.documents(surveyed, progress), tokenizer, made)

    name = describe(recipe.paths)
    meta = cache.obtain(folder / key, build)
    corpus = Corpus(
        name, key, folder / key, *(_map(folder / key, side, meta[side]) for side in ("train", "validation"))
    )
    if not len(corpus.train.tokens) + len(corpus.validation.tokens):
        raise ConfigError(
            f"text.path: {name} is empty: there is not a single byte of text in {format_plural(len(files), 'file')}"
        )
    return corpus


def cached(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> Corpus | None:
    """The corpus, if it is in the cache.

    Raises:
        ConfigError: a file is missing.
    """
    listing, _ = _listing(find(recipe.paths))
    key = cache.recall(folder / "seen" / _hash([listing, _LAYOUT, tokenizer.digest, recipe.field, recipe.held_out]))
    return open_corpus(recipe, tokenizer, folder) if key and cache.whole(folder / key) is not None else None


def _listing(files: Iterable[File]) -> tuple[list[tuple[str, bool, int, int | str]], bool]:
    """Address, size and time of each file, and whether all have been left alone long enough to be known by these."""
    now = time.time_ns()
    listing, settled = [], True
    for file in files:
        size, changed = file.stamp()
        listing.append((file.address, file.named, size, changed))
        settled = settled and (changed < now - _SETTLED if isinstance(changed, int) else bool(changed))
    return listing, settled


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _tokenise(documents: Iterable[tuple[Side, bytes]], tokenizer: Tokenizer, made: Path) -> dict[str, Any]:
    """Write tokens and document ends of both sides into a folder."""
    with contextlib.ExitStack() as stack:
        sides: dict[Side, _Writer] = {
            side: _Writer(stack.enter_context((made / f"{side}.tokens").open("wb")), tokenizer)
            for side in ("train", "validation")
        }
        for side, document in documents:
            sides[side].add(document)
        return {side: writer.close(made / f"{side}.ends") for side, writer in sides.items()}


class _Writer:
    def __init__(self, file: BinaryIO, tokenizer: Tokenizer) -> None:
        self._file, self._tokenizer = file, tokenizer
        self._dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
        self._begin = np.array(tokenizer.begin, self._dtype)
        self._end = np.array([] if tokenizer.end is None else [tokenizer.end], self._dtype)
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._bytes = 0
        self._lengths: list[int] = []

    def add(self, document: bytes) -> None:
        self._waiting.append(document)
        self._waiting_bytes += len(document)
        if self._waiting_bytes >= _BATCH:
            self._flush()

    def close(self, ends: Path) -> dict[str, Any]:
        self._flush()
        np.cumsum(self._lengths, dtype=np.int64).tofile(ends)
        return {"dtype": self._dtype.name, "bytes": self._bytes}

    def _flush(self) -> None:
        encoded = encode_documents(self._tokenizer, self._waiting)
        parts = [part for ids in encoded if len(ids) for part in (self._begin, ids, self._end)]
        if parts:
            np.concatenate(parts, dtype=self._dtype, casting="unsafe").tofile(self._file)
        self._lengths += [len(self._begin) + len(ids) + len(self._end) for ids in encoded if len(ids)]
        self._bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0


def _map(folder: Path, side: str, meta: dict[str, Any]) -> Split:
    dtype = np.dtype(meta["dtype"])
    path = folder / f"{side}.tokens"
    # An empty file can't be mapped; the plain array view spares np.memmap's work on every slice.
    tokens = np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
    return Split(tokens, np.fromfile(folder / f"{side}.ends", np.int64), meta["bytes"])


def trigram(recipe: Recipe, corpus: Corpus) -> float | None:
    """Bits per byte of the held-out text under a byte trigram, counted once and kept beside the tokens.

    None where the files can't be read any more: a yardstick must not end a run.
    """

    def build(made: Path) -> dict[str, Any]:
        return {"bits_per_byte": trigram_bits_per_byte(recipe.documents(survey(find(recipe.paths))))}

    try:
        meta = cache.obtain(corpus.folder.with_name(f"{corpus.key}.trigram"), build)
    except ConfigError as error:
        logging.getLogger("forge_train").warning("text: no trigram baseline: %s", error)
        return None
    bits: float | None = meta["bits_per_byte"]
    return bits
