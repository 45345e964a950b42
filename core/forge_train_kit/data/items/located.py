"""Places of the items that records name."""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_train import ConfigError

from ...modalities import ItemSource
from ...stores.addresses import is_remote
from ..file import File
from .fields import short
from .kept import Kept


@dataclass(frozen=True, slots=True)
class Located:
    """An item's bytes.

    Args:
        path: of its file; empty if it is kept beside the tokens.
        here: path of the file now, which may have another name later.
        offset: of its first byte; −1 if it is all of the file.
        size: in bytes.
        digest: of the bytes, if they are kept.
    """

    path: str
    here: str
    offset: int
    size: int
    digest: str = ""

    def source(self, where: str) -> ItemSource:
        if self.offset < 0:
            return ItemSource(self.here, where)
        return ItemSource(self.here, where, self.offset, self.size)


def located(entry: Any, file: File, folder: str, where: str, kept: Kept) -> Located:
    """The place of an item.

    Args:
        entry: a path, relative to the record's file; an address; a `data:` URL; bytes; or an object that has one of
            these as `bytes`, `path` or `url`, or base64 as `base64` or `data`, as `datasets` and chats have them;
            or `path`, `offset` and `size` of bytes in a file.
        file: of the record.
        folder: of relative paths; empty for that of the file.
        where: the record, for messages.
        kept: takes what is not in a file of this machine.

    Raises:
        ConfigError: naming the record.
    """
    given = entry
    if isinstance(entry, Mapping):
        given = next((entry[key] for key in ("bytes", "path", "url") if entry.get(key) is not None), entry)
        encoded = next((entry[key] for key in ("base64", "data") if isinstance(entry.get(key), str)), None)
        if given is entry and encoded is not None:
            return _keep(_unpacked(encoded, where), kept)
    if isinstance(given, bytes):
        return _keep(given, kept)
    if not isinstance(given, str) or not given:
        raise ConfigError(
            f"{where}: expected an item: a path, an address, or an object with bytes, path or url; found "
            f"{short(entry)}."
        )
    if given.startswith("data:"):
        return _keep(_decoded(given, where), kept)
    path = _path(given, file, folder)
    if is_remote(path):
        with File(path, key=where).open() as stream:
            return _keep(stream.read(), kept)
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {error.strerror}.") from error
    if isinstance(entry, Mapping) and isinstance(entry.get("offset"), int) and isinstance(entry.get("size"), int):
        return Located(path, path, entry["offset"], entry["size"])
    return Located(path, path, -1, size)


def _path(given: str, file: File, folder: str) -> str:
    given = given.removeprefix("file://")
    if is_remote(given) or given.startswith("/"):
        return given
    if not folder and not file.local:
        return f"{file.address.rpartition('/')[0]}/{given}"
    return posixpath.normpath(posixpath.join(folder or posixpath.dirname(file.address), given))


def _decoded(url: str, where: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ConfigError(f"{where}: a data: URL must be of base64, and begins with {url[:40]!r}.")
    return _unpacked(content, where)


def _unpacked(content: str, where: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"{where}: the content of an item is not base64 ({error}).") from error


def _keep(content: bytes, kept: Kept) -> Located:
    at, digest = kept.add(content)
    return Located("", kept.path_of_part(), at, len(content), digest)
