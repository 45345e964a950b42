"""A file of data, on this machine or anywhere fsspec reaches, and how to open it."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from forge_train import ConfigError

from ..stores.addresses import is_remote

PACKED = ("gz", "zst")
"""Suffixes of files that are unpacked while they are read."""

_BUFFER, _AHEAD, _RANDOM = 1 << 20, 1 << 22, 1 << 16
"""Bytes read at once: of a local file, of a remote one in order, and of a remote one here and there."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a Git LFS pointer, which stands for a file that was not fetched."""


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Args:
        address: an absolute path, or an address that fsspec knows (`s3://…`, `https://…`, `memory://…`).
        named: whether it was asked for by name or pattern, and not found in a folder.
        key: the configuration key or argument that asked for it; errors begin with it.
    """

    address: str
    named: bool = False
    key: str = field(default="", compare=False)

    @property
    def local(self) -> bool:
        return not is_remote(self.address)

    @property
    def name(self) -> str:
        """Without its folder; on the web also without what follows a `?`."""
        web = self.address.startswith(("http://", "https://"))
        return posixpath.basename(self.address.partition("?")[0] if web else self.address)

    @property
    def packed(self) -> str:
        """`gz` or `zst`, or the empty string."""
        last = posixpath.splitext(self.name)[1].lower().removeprefix(".")
        return last if last in PACKED else ""

    @property
    def suffix(self) -> str:
        """Of what it holds, without the dot and in lower case: `jsonl` for `a.jsonl.gz`."""
        bare = posixpath.splitext(self.name)[0] if self.packed else self.name
        return posixpath.splitext(bare)[1].lower().removeprefix(".")

    @property
    def label(self) -> str:
        """Key and address: how errors begin."""
        return f"{self.key}: {self.address}" if self.key else self.address

    def at(self, place: str) -> str:
        """The label and a place in the file."""
        return f"{self.label}, {place}" if place else self.label

    def open(self, start: int = 0) -> BinaryIO:
        """The content from byte `start`, unpacked. What is not packed can be entered in the middle (`seek`).

        Where a connection breaks, reading continues at that byte after a pause, some times.

        Raises:
            ConfigError: there is no such file, or it can't be read; later, while reading, if a packed file is damaged
                or a connection stays broken.
        """
        stream = self._open(0 if self.packed else start, _AHEAD)
        if not self.packed:
            return stream
        from .packed import unpack

        content = unpack(stream, self.packed, self.label)
        while start and (skipped := content.read(min(start, _BUFFER))):
            start -= len(skipped)
        return content

    @contextlib.contextmanager
    def anywhere(self) -> Iterator[BinaryIO]:
        """The content as a stream that can be entered in the middle: what is packed is unpacked to a temporary file."""
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(self.open() if self.packed else self._open(0, _RANDOM))
            if self.packed:
                whole = stack.enter_context(tempfile.TemporaryFile(prefix="forge-"))
                shutil.copyfileobj(stream, whole, _BUFFER)
                whole.seek(0)
                stream = cast(BinaryIO, whole)
            yield stream

    def size(self) -> int:
        """Bytes as it is stored, so packed ones of a packed file; 0 where a server does not tell."""
        return self.stamp()[0]

    def stamp(self) -> tuple[int, int | str]:
        """Size, and time of change in ns or an ETag: equal as long as the content is.

        An empty text stands for a time that nobody tells.

        Raises:
            ConfigError: there is no such file, or it can't be read.
        """
        if not self.local:
            from .remote import identity, info

            found = info(self.address, self.label)
            return found.get("size") or 0, identity(found)
        try:
            state = Path(self.address).stat()
        except OSError as error:
            raise ConfigError(f"{self.label} can't be read: {error.strerror}") from error
        return state.st_size, state.st_mtime_ns

    def _open(self, start: int, ahead: int) -> BinaryIO:
        if not self.local:
            from .remote import Remote

            return io.BufferedReader(Remote(self.address, self.label, start), ahead)
        try:
            raw = io.FileIO(self.address)
            size = os.fstat(raw.fileno()).st_size
            stream = io.BufferedReader(raw, min(max(size, 1), _BUFFER))
            if size < 1024 and stream.peek(len(_POINTER)).startswith(_POINTER):
                stream.close()
                raise ConfigError(
                    f"{self.label} only points to a file that Git LFS has not fetched: run git lfs pull in its folder."
                )
            stream.seek(start)
        except OSError as error:
            raise ConfigError(f"{self.label} can't be read: {error.strerror}") from error
        return stream
