"""Requests to the engine: stop, save, roll back. Asked at any time, acted on at the next step boundary."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from ..base.errors import INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from ..mesh.distributed import DistributedContext

log = logging.getLogger("forge_train")


@dataclass(frozen=True)
class RollBack:
    """Back to a checkpoint, and the data to leave out from there on."""

    reason: str
    skip: int = 0
    """Steps after the checkpoint whose data is left out."""
    before: int = 0
    """Only a checkpoint of an earlier step will do, and later ones are removed. 0 takes the newest."""
    leave_out: tuple[tuple[int, int], ...] = ()
    """Global sequences, as in `StepResult.data_range`, that are left out once the run comes to them."""


@dataclass
class Requests:
    """Requests since the last step boundary."""

    stop: tuple[str, int] | None = None
    """Reason and exit code."""
    save: bool = False
    roll_back: RollBack | None = None


class Control:
    """Control of the run by plugins and signal handlers; every method records a request and returns at once.

    All processes act on a request at the same step boundary. They agree through one integer, which is reduced while the
    next step runs and read one step late, so that nothing waits.
    """

    def __init__(self, dist: DistributedContext | None = None) -> None:
        self._asked = Requests()
        self._agreed: RollBack | None = None
        self._poll = dist.poll() if dist and dist.world > 1 else None
        self._dist = dist

    def stop(self, reason: str, code: int = INTERRUPTED) -> None:
        """Save, and end the run with this exit code. The first reason counts."""
        self._asked.stop = self._asked.stop or (reason, code)

    def save(self) -> None:
        """Save a checkpoint at the next step boundary."""
        self._asked.save = True

    def roll_back(
        self,
        reason: str,
        skip: int = 0,
        *,
        before: int = 0,
        leave_out: Iterable[tuple[int, int]] = (),
        agreed: bool = False,
    ) -> None:
        """Go back to the newest whole checkpoint.

        Args:
            reason: for the event `anomaly`.
            skip: leave out the data of so many steps that followed the checkpoint.
            before: take the newest checkpoint of an earlier step than this, and remove later ones.
            leave_out: ranges of global sequences, as in `StepResult.data_range`, to leave out once the run comes to
                them; until then the run repeats itself.
            agreed: every process asks for the same in this step, as it does if it decides by numbers that are equal on
                all ranks. The run then goes back at the end of this step, before it is logged; in `on_checkpoint` of
                kind `saving`, nothing is saved.

        Raises:
            ConfigError: for a negative `skip`.
        """
        if skip < 0:
            raise ConfigError(f"roll_back: skip must be at least 0, found {skip}.")
        asked = RollBack(reason, skip, before, tuple(leave_out))
        if agreed:
            self._agreed = self._agreed or asked
        else:
            self._asked.roll_back = self._asked.roll_back or asked

    @property
    def rolls_back(self) -> bool:
        """True if all processes have agreed to roll back and have not done so yet."""
        return self._agreed is not None

    def take_agreed(self) -> RollBack | None:
        """The roll-back that all processes have agreed on; the note is cleared."""
        agreed, self._agreed = self._agreed, None
        return agreed

    def take(self) -> Requests:
        """Return the pending requests, the same on every process, and clear them."""
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
