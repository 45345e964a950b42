"""Files of folders that anybody may have made: links and special files are refused."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from forge_train.base.files import regular_size


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
