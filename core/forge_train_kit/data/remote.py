"""Files behind an address that fsspec knows, read over connections that break."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError

from ..stores.remote import filesystem, patiently

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LARGEST, _SMALLEST = 1 << 24, 1 << 14
"""Bytes that are asked for at once: fewer after each failure, so that a bad line still carries something."""
_IDENTITY = ("ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "updated", "created")


def info(address: str, label: str) -> dict[str, Any]:
    """Return the file system's facts about a file: `size`, and those that identify its content."""
    system, path = filesystem(address, label)
    found: dict[str, Any] = patiently(label, lambda: system.info(path))
    return found


def identity(found: dict[str, Any]) -> str:
    """ETag, checksum or time of change; empty where the file system tells none."""
    return next((str(found[key]) for key in _IDENTITY if found.get(key)), "")


class Remote(io.RawIOBase):
    """A file behind an address. After a failure it is opened again at the byte where it broke."""

    def __init__(self, address: str, label: str, start: int = 0) -> None:
        self._label, self._at, self._block = label, start, _LARGEST
        self._system, self._path = filesystem(address, label)
        self._size: int | None = info(address, label).get("size")
        self._file: Any = None
        self._from_start = False
        """True if the server only sends the file from its beginning."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size is None:
            raise ConfigError(f"{self._label} can't be entered in the middle: its server does not tell its size")
        self._at = offset + (0, self._at, self._size or 0)[whence]
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = patiently(self._label, lambda: self._read(len(view)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        if self._size is not None and self._at >= self._size:
            return b""
        try:
            self._enter()
            data: bytes = self._file.read(min(wanted, self._block))
        except ValueError as error:
            self._drop()
            if self._from_start or not ("range" in str(error) or "seek" in str(error)):
                raise
            self._from_start = True
            raise ConnectionError("the server does not send parts of files") from error
        except BaseException:
            self._drop()
            self._block = max(self._block >> 2, _SMALLEST)
            raise
        if not data and self._size is not None:
            self._drop()
            raise ConnectionError(f"it ended at byte {self._at} of {self._size}")
        return data

    def _enter(self) -> None:
        """Have the file open at `_at`."""
        if self._file is not None and self._from_start and self._file.tell() > self._at:
            self._drop()
        if self._file is None:
            block = 0 if self._from_start else self._block
            self._file = self._system.open(self._path, "rb", block_size=block, cache_type="none")
        if not self._from_start:
            self._file.seek(self._at)
        while (left := self._at - self._file.tell()) > 0:
            if not self._file.read(min(left, _LARGEST)):
                raise ConnectionError(f"it ended before byte {self._at}")

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # it is broken already
            if self._file is not None:
                self._file.close()
        self._file = None

    def close(self) -> None:
        self._drop()
        super().close()
