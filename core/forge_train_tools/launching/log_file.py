"""The log of a process of a run, in the run's folder."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Write what is logged to a file, too, for as long as the block lasts."""
    log, handler = logging.getLogger("forge_train"), LogFile(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class LogFile(logging.FileHandler):
    """A log that a full disk cuts short. What it has no room for is lost; it never stands in for what went wrong."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
