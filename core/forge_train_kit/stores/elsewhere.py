"""Checkpoints of a run at other places, as a plugin keeps them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any, TypeAlias

from forge_train.base.errors import ConfigError
from forge_train.config import Config

__all__ = ["CheckpointCopies"]


class CheckpointCopies:
    """Checkpoints of a run at other places (the hook `checkpoint_copies`); this base has no place.

    Only the main process uses it. Nothing here may end the run: what fails is reported, or raised as a `ForgeError`
    where a method says so.
    """

    @property
    def sending(self) -> Set[int]:
        """Steps of checkpoints that are being read, which must stay in the run's folder."""
        return frozenset()

    @property
    def everywhere(self) -> Set[int]:
        """Steps of checkpoints that all places have."""
        return frozenset()

    def taken(self) -> bool:
        """Return True if a place has checkpoints under the run's name.

        Raises:
            ForgeError: if that can't be found out, and the user chose the name.
        """
        return False

    def bring(self, *, after: int = -1, before: int = sys.maxsize) -> Path | None:
        """Fetch the newest whole checkpoint between two steps, exclusive, into the run's folder; None without one.

        Raises:
            ForgeError: if a place can't be read, and `after` is -1: the run would start over.
        """
        return None

    def best(self) -> Iterable[tuple[int, Any]]:
        """Yield the step and the `best` entry of the state of each checkpoint elsewhere."""
        return ()

    def send(self, spared: Set[int] = frozenset()) -> None:
        """Begin to copy checkpoints that the places lack; `spared` steps stay there whatever their age."""

    def undo(self, step: int) -> bool:
        """Begin to remove the checkpoints of a step and of later ones: a roll-back left them behind.

        Returns:
            True if there is a place; it notes in the run's folder that the roll-back is finished once they are gone.
        """
        return False

    def look(self) -> Set[int]:
        """Called between two steps: record what has been copied, without waiting.

        Returns:
            Steps whose checkpoint was removed from where the run keeps its checkpoints.
        """
        return frozenset()

    def wait(self) -> Set[int]:
        """Wait until everything was tried, and record it. Returns the same as `look`."""
        return frozenset()


CopiesOf: TypeAlias = Callable[[Config, Path], CheckpointCopies]
"""Configuration and folder of a run → its checkpoints elsewhere."""


def no_copies(config: Config, run: Path) -> CheckpointCopies:
    """For runs without checkpoints elsewhere.

    Raises:
        ConfigError: if the configuration asks for some.
    """
    for key in ("folder", "mirror"):
        if getattr(config.checkpoint, key):
            raise ConfigError(f"checkpoint.{key}: no enabled plugin makes copies; add --plugins copies.")
    return CheckpointCopies()
