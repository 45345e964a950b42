"""Unpacking while reading: gzip and zstandard, with an error that names the file where its end is missing."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

from forge_train import ConfigError

from .formats import require

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK, _CONTENT = 1 << 13, 1 << 20
"""Bytes of a .zst unpacked at a time, and what should become of them: it may be 32,768 times as many."""
_BUFFER = 1 << 20


def unpack(stream: BinaryIO, packed: str, label: str) -> BinaryIO:
    """The content of a packed stream.

    Args:
        packed: `gz` or `zst`.
        label: the file as errors name it.
    """
    return io.BufferedReader(_Unpacked(stream, packed, label), _BUFFER)


class _Unpacked(io.RawIOBase):
    def __init__(self, stream: BinaryIO, packed: str, label: str) -> None:
        self._stream, self._label, self._at = stream, label, 0
        if packed == "gz":
            self._inner: Any = gzip.GzipFile(fileobj=stream)
            self._errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        else:
            zstandard = require("zstandard", label)
            self._inner = _Zstd(stream, zstandard.ZstdDecompressor(max_window_size=2**31))
            self._errors = (EOFError, zstandard.ZstdError)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        try:
            size: int = self._inner.readinto(buffer)
        except self._errors as error:
            raise ConfigError(
                f"{self._label} is cut off or damaged: it can't be unpacked beyond byte {self._at:,} of its content "
                f"({str(error).rstrip('.')})"
            ) from error
        self._at += size
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Zstd:
    """Frames of zstandard, one after the other. The library's own reader takes a cut frame for a whole one."""

    def __init__(self, stream: BinaryIO, library: Any) -> None:
        self._stream, self._library = stream, library
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._chunk = 1 << 6

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            if (more := self._unpack()) is None:
                return 0
            self._ready = memoryview(more)
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._ready))
        view[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self) -> bytes | None:
        rest = b""
        if self._frame is not None and self._frame.eof:
            rest, self._frame = self._frame.unused_data, None
        packed = rest or self._stream.read(self._chunk)
        if not packed:
            if self._frame is None:
                return None
            raise EOFError("the file ends in the middle")
        if self._frame is None:
            self._frame = self._library.decompressobj()
        unpacked: bytes = self._frame.decompress(packed)
        fits = len(packed) * _CONTENT // max(len(unpacked), 1)
        self._chunk = max(min(fits, 2 * self._chunk, _CHUNK), 1 << 4)
        return unpacked
