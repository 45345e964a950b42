"""Requests to the engine: stop, save, roll back. Asked at any time, acted on at the next step boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base.errors import INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from ..mesh.distributed import DistributedContext


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
