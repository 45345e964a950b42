"""Files and folders: written whole or not at all, and read with care if anybody may have made them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigError, ForgeError
from .format import format_bytes
from .strict_json import dumps, parse_json


def plain(place: str) -> str:
    """A path as it is, also where it is written as `file:///x`."""
    return place.removeprefix("file://")


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


def write_json(file: Path, value: object) -> None:
    write_whole(file, dumps(value, indent=1) + "\n")


def write_whole(file: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its parts, so that the file is there whole or not at all, also after a power cut."""
    part = file.with_name(f".{file.name}.partial")
    try:
        with part.open("w", encoding="utf-8") as out:
            out.writelines([text] if isinstance(text, str) else text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


REPLACED = ".replaced"
"""End of the hidden name of a checkpoint whose step is being saved again."""


def remove_remains(checkpoints: Path) -> None:
    """Remove what a process left that was killed as it saved or pruned a checkpoint, and put back what it replaced."""
    for left in checkpoints.glob(".step-*"):
        target = checkpoints / left.name[1:].removesuffix(REPLACED)
        if left.name.endswith(REPLACED) and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)
    (checkpoints / ".latest.partial").unlink(missing_ok=True)


def put(part: Path, target: Path) -> Path:
    """Give a finished folder its name. A kill leaves the new one, or the old, if need be with the name `REPLACED`.

    Returns:
        The name of what was there, if anything: it may be removed now.
    """
    gone = target.with_name(f".{target.name}{REPLACED}")
    if not target.exists():
        part.replace(target)
    elif _exchange(part, target):
        gone = part
    else:
        shutil.rmtree(gone, ignore_errors=True)
        target.replace(gone)  # `remove_remains` puts it back if this process is killed now
        part.replace(target)
    return gone


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one operation; False where the system or the file system can't."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # not Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return int(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange)) == 0


def check_new(target: Path) -> None:
    """Check that nothing is lost if a folder takes this name.

    Args:
        target: a path that doesn't exist yet, an empty folder, or a link to one.

    Raises:
        ConfigError: saying what is there.
    """
    if not target.exists():
        if target.is_symlink():
            raise ConfigError(f"{target} is a link to {target.readlink()}, which does not exist; name a new folder.")
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is {'a file' if target.is_file() else 'no folder'}; name a new folder.")
    if any(target.iterdir()):
        raise ConfigError(f"{target} exists and is not empty; name a new folder.")
    if not target.name:
        raise ConfigError(f"{target} is the current folder; name a new folder.")


# -- errors of the disk, each reported in one message that names the file and the disk ------------------------------

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""A full disk, a used-up quota, a limit on the size of files."""


class DiskError(ForgeError):
    """The disk refused what was written to it."""

    full = False
    """True if the disk was full, so that retries fail until space is freed."""


def refused(path: Path, error: OSError, what: str = "can't be written:", more: str = "") -> DiskError:
    """Build the error that describes a refusal.

    Args:
        path: what was written.
        error: what the system said.
        what: what can't be done with it.
        more: another sentence.
    """
    text = f"{path}: {what} {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = DiskError(f"{text} ({_disk(path)}).{more} Make room there, then go on.")
    else:
        found = DiskError(f"{text}.{more}")
    found.full = error.errno in FULL
    return found


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Tell of a refusal inside the block.

    Raises:
        DiskError: as `refused` gives it.
    """
    try:
        yield
    except OSError as error:
        raise refused(path, error) from error


def _disk(path: Path) -> str:
    """`the disk at /data has 0 of 5 GiB left`."""
    here = path.absolute()
    while not here.exists():
        here = here.parent
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(here)
        while not os.path.ismount(here):
            here = here.parent
        return f"the disk at {here} has {format_bytes(usage.free)} of {format_bytes(usage.total)} left"
    return f"the disk of {here}"
