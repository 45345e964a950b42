"""Digests that show whether a checkpoint's file is as it was saved. They detect damage, not tampering: see
`docs/guarantees.md`."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Protocol, cast

ALGORITHM = "xxh3_128"
"""Of checkpoints that are written now."""
FIRST = "sha256"
"""Of manifests that don't name theirs."""


_DIRECT = 4 << 20
"""Bytes of one read past the cache."""


class Hasher(Protocol):
    """A hash that is still being computed."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def hasher(algorithm: str = ALGORITHM) -> Hasher:
    """A hash of nothing yet. Both kinds let other threads run while they read a large piece."""
    return _KNOWN[algorithm]()


def of_file(file: BufferedIOBase, algorithm: str = ALGORITHM) -> str:
    """The hash of a file that was opened for reading, from its beginning to its end."""
    return hashlib.file_digest(file, cast("Callable[[], hashlib._Hash]", _KNOWN[algorithm])).hexdigest()


def of_disk(path: Path, algorithm: str = ALGORITHM) -> str | None:
    """The hash of a file that was flushed, read past the system's cache; None where the system can't do that."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None  # such as a file system in memory
    found, left = hasher(algorithm), os.fstat(handle).st_size
    try:
        with mmap.mmap(-1, _DIRECT) as pages, memoryview(pages) as buffer:  # as aligned as such a read asks for
            while left and (got := os.readv(handle, [buffer])):
                found.update(buffer[:got])
                left -= got
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    finally:
        os.close(handle)
    return found.hexdigest()


def known(algorithm: object) -> bool:
    """Return True if this algorithm can be used to compare files."""
    return isinstance(algorithm, str) and algorithm in _KNOWN


def names() -> str:
    """All algorithms, for messages."""
    return ", ".join(_KNOWN)


def _xxh3_128() -> Hasher:
    import xxhash  # a listing does without

    return xxhash.xxh3_128()


_KNOWN: Mapping[str, Callable[[], Hasher]] = {FIRST: hashlib.sha256, ALGORITHM: _xxh3_128}
