"""Schedule of a run's checkpoints, and which to keep in addition to the newest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ..base.errors import ConfigError
from ..plugin.job import Job


class CheckpointPolicy:
    """Saves by `checkpoint.every`; `Setup.policy` may bring a subclass that knows more.

    Raises:
        ConfigError: if the configuration asks for more.
    """

    unknown: ClassVar[tuple[str, ...]] = ("minutes", "early", "best")
    """Keys of [checkpoint] without effect."""

    def __init__(self, job: Job) -> None:
        self._job, self._config = job, job.config.checkpoint
        for key in self.unknown:
            if getattr(self._config, key):
                raise ConfigError(f"checkpoint.{key}: this setup saves by checkpoint.every alone; remove the key.")

    def start(self, elsewhere: Iterable[tuple[int, Any]] = ()) -> None:
        """Look what the run has kept already.

        Args:
            elsewhere: what checkpoints that lie elsewhere say of `checkpoint.best`, by step.
        """

    def due(self, step: int) -> bool:
        """Return True if the configuration asks for a checkpoint at a step."""
        every = self._config.every
        return bool(every and step % every == 0)

    def ask(self) -> None:
        """Have the run save at a step boundary, if something else asks for it. Rank 0 decides for all."""

    def measured(self, step: int, numbers: Mapping[str, Any], *, evaluation: bool = False) -> None:
        """Tell what was measured at a step: a line of metrics, or what an evaluation found."""

    def saving(self, step: int) -> dict[str, Any] | None:
        """Return the entry for `checkpoint.best` in a step's checkpoint; None unless it was measured at this step."""
        return None

    def spared(self, step: int) -> set[int]:
        """Steps whose checkpoints stay beside the newest, once that of a step is saved."""
        return set()

    def removed(self, step: int) -> None:
        """A checkpoint is no longer there."""
