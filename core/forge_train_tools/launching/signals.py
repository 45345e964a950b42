"""Signals that ask a run to stop."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from forge_train.run.control import Control

log = logging.getLogger("forge_train")


@contextmanager
def signals(control: Control) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask the run to stop; a second one ends it at once (128 + its number).

    In an interactive session a second Ctrl-C raises KeyboardInterrupt instead: it ends the run, not the session.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers: a run inside somebody's test or notebook thread
        return
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen and number == signal.SIGINT and hasattr(sys, "ps1"):
            raise KeyboardInterrupt
        if seen:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        seen.append(number)
        name = signal.Signals(number).name
        control.stop(name)
        with suppress(Exception):  # the terminal may be gone, or interrupted in the middle of a line
            log.warning("%s: finishing the step and saving; a second signal ends at once.", name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
