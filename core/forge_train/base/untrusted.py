"""Files that anybody may have written: how much of them is read is bounded."""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .strict_json import loads

DEEPEST = 100
"""Lists and objects of JSON inside each other; who walks through them calls a function for each."""


def regular_size(file: Path, *, links: bool = False) -> int:
    """Bytes of a file.

    Args:
        file: to look at.
        links: whether it may be a link, as in a cache of downloads.

    Raises:
        OSError: if there is none, or it is something else: a link may lead anywhere, a pipe or a device never end.
    """
    found = file.stat() if links else file.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and links are not followed: put the file itself there", str(file))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return found.st_size


def check_regular(path: Path) -> None:
    """Raises OSError, which names the file, for a link or a special file: this path, or one below it."""
    for file in _files(path):
        regular_size(file)


def copy_regular(source: Path, target: Path) -> None:
    """Copy a file, or a folder with all that is in it.

    Raises:
        OSError: for a link or a special file, see `regular_size`.
    """
    for file in _files(source):
        regular_size(file)
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy, follow_symlinks=False)


def _files(path: Path) -> Iterator[Path]:
    """A path, or all paths below it, if it is a folder; links are not followed."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        yield path
        return
    for one in sorted(path.iterdir()):
        yield from _files(one)


def load_json(file: Path, *, most: int, links: bool = False, unique: bool = False) -> Any:
    """Load JSON from an untrusted file.

    Args:
        file: a regular file.
        most: largest number of bytes to read.
        links: see `regular_size`.
        unique: see `parse_json`.

    Raises:
        OSError: if it can't be read, or is not a regular file.
        ValueError: with the reason, if it is too large, or see `parse_json`.
    """
    if (size := regular_size(file, links=links)) > most:
        raise ValueError(f"it has {size:,} bytes, and at most {most:,} are read")
    return parse_json(file.read_text(encoding="utf-8"), unique=unique)


def parse_json(text: str, *, unique: bool = False) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        text: the JSON.
        unique: whether to reject duplicate keys, of which other programs may read the other value.

    Raises:
        ValueError: if it is not JSON, is nested deeper than `DEEPEST`, or has a duplicate key and `unique` is set.
    """
    value = loads(text, unique=unique)
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
    return value
