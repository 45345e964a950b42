"""Requests to the engine: stop, save, roll back. Asked at any time, acted on at the next step boundary."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from ..ground.errors import INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from ..processes.distributed import DistributedContext

log = logging.getLogger("forge_train")


@dataclass
class Requests:
    """What was asked for since the last step boundary."""

    stop: tuple[str, int] | None = None
    """Reason and exit code."""
    save: bool = False
    roll_back: tuple[str, int] | None = None
    """Reason, and how many steps' data to leave out after the checkpoint."""


class Control:
    """How a plugin or a signal handler steers the run; every method only leaves a note and returns at once.

    All processes act on a note at the same step boundary. They agree by one integer, reduced while the next step
    runs and read one step late, so that nothing waits.
    """

    def __init__(self, dist: DistributedContext | None = None) -> None:
        self._asked = Requests()
        self._poll = dist.poll() if dist and dist.world > 1 else None
        self._dist = dist

    def stop(self, reason: str, code: int = INTERRUPTED) -> None:
        """Save, and end the run with this exit code. The first reason counts."""
        self._asked.stop = self._asked.stop or (reason, code)

    def save(self) -> None:
        """Save a checkpoint at the next step boundary."""
        self._asked.save = True

    def roll_back(self, reason: str, skip: int = 0) -> None:
        """Go back to the newest whole checkpoint, and leave out the data of the `skip` steps that followed it.

        Raises:
            ConfigError: for a negative `skip`.
        """
        if skip < 0:
            raise ConfigError(f"roll_back: skip must be at least 0, found {skip}.")
        self._asked.roll_back = self._asked.roll_back or (reason, skip)

    def take(self) -> Requests:
        """What was asked for, the same on every process; the notes are cleared."""
        if self._poll is not None and self._dist is not None:
            if not self._poll(self._asked != Requests()):
                return Requests()
            everybody = self._dist.gather_objects(self._asked)
            self._asked = Requests(
                stop=next((asked.stop for asked in everybody if asked.stop), None),
                save=any(asked.save for asked in everybody),
                roll_back=next((asked.roll_back for asked in everybody if asked.roll_back), None),
            )
        asked, self._asked = self._asked, Requests()
        return asked


@contextmanager
def signals(control: Control) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask the run to stop; a second one ends it at once (128 + its number)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers: a run inside somebody's test or notebook thread
        return
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
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
