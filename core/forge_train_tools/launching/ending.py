"""Ending a process from a thread, where its main thread waits for something that does not come."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from forge_train.base.errors import ForgeError, describe

log = logging.getLogger("forge_train")

Teller = Callable[[ForgeError, int], object]
"""Is told why, and of which rank the error is."""
_tellers: list[Teller] = []


@contextmanager
def told(teller: Teller) -> Iterator[None]:
    """Have a function told, while the block lasts, if a thread ends this process: whoever waits for an outcome."""
    _tellers.append(teller)
    try:
        yield
    finally:
        _tellers.remove(teller)


def end_process(error: ForgeError, rank: int) -> NoReturn:
    """End this process at once, from any thread. Nothing is saved, and no `finally` runs.

    Args:
        error: why; its code is the exit code.
        rank: of the process that is to blame, which need not be this one.
    """
    for teller in reversed(_tellers):
        try:
            teller(error, rank)
        except Exception as another:  # what went wrong first is what counts
            log.warning("Nor could it be told how the run ended: %s", describe(another))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as gone:
            log.debug("%s", gone)
    os._exit(error.code)
