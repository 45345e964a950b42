"""A folder of token shards: what its `manifest.json` says, and how it is opened."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import describe
from forge_train.base.files import load_json

from .documents import Documents
from .held_out import SIDES, Side
from .store import Header, open_shard

FILE = "manifest.json"
WORK = ".prepare"
"""The folder beside it that holds what a preparation needs to go on."""
_LARGEST = 64 << 20
"""Bytes of a manifest that are read at most."""
FORMAT, VERSION = "forge-tokens", 1
TOKENIZER = "tokenizer"
"""The folder beside it with the tokenizer's files, if it has any."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One shard, as the manifest lists it."""

    file: str
    header: Header


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a prepared folder.

    Args:
        tokenizer: `digest`, `vocabulary`, and `path`: `bytes`, or `tokenizer` for the folder beside it.
        settings: how the text was made, as requested.
        sources: `entries`, the files and folders as requested, and `files`, the number of files.
        shards: of each side, in order.
    """

    tokenizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    sources: Mapping[str, Any]
    shards: Mapping[Side, tuple[Listed, ...]]

    def total(self, what: str, side: Side | None = None) -> int:
        """The sum of `tokens`, `documents` or `bytes` over the shards of a side, or of both."""
        return sum(getattr(one.header, what) for key in SIDES if side in (None, key) for one in self.shards[key])

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        sides = {
            side: [{"file": one.file, **dataclasses.asdict(one.header)} for one in self.shards[side]] for side in SIDES
        }
        table = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": dict(self.tokenizer),
            "settings": dict(self.settings),
            "sources": dict(self.sources),
            "shards": sides,
        }
        table["seal"] = _seal(table)
        part = folder / f".{FILE}.part"
        part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        part.replace(folder / FILE)


def read_manifest(folder: Path, *, key: str) -> Manifest:
    """The manifest of a folder.

    Args:
        folder: to look into.
        key: the configuration key or argument that named it, for messages.

    Raises:
        ConfigError: there is none, it was not finished, it is damaged, or of a newer format.
    """
    file = folder / FILE
    if not file.is_file():
        if (folder / WORK).is_dir():
            raise ConfigError(f"{key}: {folder} was not prepared to the end: run the same forge data prepare again.")
        raise ConfigError(f"{key}: {folder} has no {FILE}, so forge data prepare did not write it.")
    try:
        table = load_json(file, most=_LARGEST, links=True)
        if table["format"] != FORMAT:
            raise ConfigError(f"{key}: {file} is no manifest of token shards.")
        if table["version"] > VERSION:
            raise ConfigError(f"{key}: {file} is of format {table['version']}; update forge-train to read it.")
        if table.pop("seal") != _seal(table):
            raise ConfigError(f"{key}: {file} was changed since it was written: prepare the folder again.")
        shards = {
            side: tuple(Listed(one.pop("file"), Header(**one)) for one in table["shards"][side]) for side in SIDES
        }
        return Manifest(table["tokenizer"], table["settings"], table["sources"], shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}: {file} is damaged ({describe(error)}): prepare the folder again.") from error


def _seal(table: Mapping[str, Any]) -> str:
    """A hash of all that a manifest says."""
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder of token shards, mapped."""

    folder: Path
    manifest: Manifest
    sides: Mapping[Side, Documents]

    @property
    def tokenizer(self) -> str:
        """Value that `tokenizer.path` must have."""
        path: str = self.manifest.tokenizer["path"]
        return path if path != TOKENIZER else str(self.folder / TOKENIZER)


def open_prepared(folder: Path, *, key: str) -> Prepared:
    """Map a folder's shards; each must be the one that the manifest lists.

    Raises:
        ConfigError: as `read_manifest`; a shard is missing, truncated, or another one.
    """
    manifest = read_manifest(folder, key=key)
    sides = {}
    for side in SIDES:
        shards = []
        for one in manifest.shards[side]:
            path = folder / Path(one.file).name  # a manifest names nothing outside its folder
            if not path.is_file():
                raise ConfigError(f"{key}: {path} is missing: it is in the manifest. Prepare the folder again.")
            shard, header = open_shard(path)
            if header != one.header:
                raise ConfigError(
                    f"{key}: {path} is not the shard that the manifest lists: they were made by different preparations."
                )
            shards.append(shard)
        contents = ",".join([manifest.tokenizer["digest"], *(one.header.content for one in manifest.shards[side])])
        digest = hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()
        sides[side] = Documents(shards, digest, vocabulary=manifest.tokenizer["vocabulary"])
    return Prepared(folder, manifest, sides)
