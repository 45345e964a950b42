"""A folder that a command makes: it is new or empty, and one process at a time writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.base.files import check_new
from forge_train.run.run import MODEL_FILES

from .lock import Lock, take

log = logging.getLogger("forge_train")
WAIT = 0.2
"""Seconds between two looks whether another process has ended."""


@contextmanager
def claimed(target: Path) -> Iterator[Path]:
    """Keep a target from other processes, and give the folder to write: the target, or the folder that it links to.

    The lock lies beside the folder, because the folder itself appears only when it is complete. A lock that a killed
    process left is taken over.

    Args:
        target: see `check_new`; missing folders above it are made.

    Raises:
        ConfigError: if the target is in use, or another process is writing it.
        OSError: if the folder above it can't be written.
    """
    check_new(target)
    folder = target.resolve() if target.is_symlink() else target
    with alone(folder, target):
        check_new(target)  # another process may have finished it before this one had the lock
        yield folder


@contextmanager
def alone(folder: Path, target: Path | None = None, *, wait: bool = False) -> Iterator[None]:
    """Keep a folder from other processes, new or not.

    Args:
        folder: see `claimed`.
        target: its name in messages, if it is another one.
        wait: whether to wait until another process that writes it ends.

    Raises:
        ConfigError: if another process is writing it.
        OSError: if the folder above it can't be written.
    """
    told = False
    while True:
        try:
            lock = _lock(folder, target or folder)
            break
        except ConfigError as error:
            if not wait:
                raise
            if not told:
                log.warning("%s", error)
            told = True
            time.sleep(WAIT)
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # the next process has its lock there already
            lock.file.parent.rmdir()


def _lock(folder: Path, target: Path) -> Lock:
    place = folder.with_name(f".{folder.name}.claim")
    while True:
        place.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the process that had it before has just removed the place
            return take(
                place,
                log.warning,
                busy=lambda owner: f"{target}: {owner} is writing it. Wait until it ends, or name a new folder.",
            )


def is_unfinished(path: Path) -> bool:
    """Return True if a folder has only the files that precede a run, left by a process that was killed early."""
    known = ("log", "checkpoints", "config.toml", MODEL_FILES)
    parts = (".partial", ".lock.")
    return path.is_dir() and all(one.name in known or any(p in one.name for p in parts) for one in path.iterdir())
