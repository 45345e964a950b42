"""Disk errors, each reported in one message that names the file and the disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ForgeError
from .format import format_bytes

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
def writing(path: Path) -> Iterator[None]:
    """Tell of a refusal inside the block.

    Raises:
        DiskError: as `refused` gives it.
    """
    try:
        yield
    except OSError as error:
        raise refused(path, error) from error


class LogFile(logging.FileHandler):
    """A log that a full disk cuts short. What it has no room for is lost; it never stands in for what went wrong."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


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
