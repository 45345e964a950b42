"""Encoded items that lie in records, and not in files of their own: kept beside the tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

SUFFIX = ".items"


def kept_path(out: Path, task: str) -> Path:
    """The file of a task's items."""
    return out / f"{task}{SUFFIX}"


class Kept:
    """Writes items one after the other, each content once. The file has its name only once it is whole.

    Args:
        path: of the file; without items, it is not made.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.part")
        self._file: BinaryIO | None = None
        self._known: dict[str, int] = {}
        self._size = 0

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        self._part.unlink(missing_ok=True)

    def add(self, content: bytes) -> tuple[int, str]:
        """Write an item, and return where it begins, and its hash."""
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        if digest not in self._known:
            if self._file is None:
                self._file = self._part.open("wb")
            self._file.write(content)
            self._known[digest] = self._size
            self._size += len(content)
        return self._known[digest], digest

    def path_of_part(self) -> str:
        """The file as long as it is written, with all that was added."""
        if self._file is not None:
            self._file.flush()
        return str(self._part)

    def close(self) -> int:
        """Give the file its name, and return its size."""
        if self._file is not None:
            self._file.close()
            self._part.replace(self._path)
        return self._size
