"""Back to a checkpoint from before a step: finding it, and removing those that came after it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from ..ground.files import write_whole
from ..processes.distributed import DistributedContext
from .checkpoint import Saved, found
from .seal import verify


def newest_before(folder: Path, step: int, dist: DistributedContext) -> Saved | None:
    """The newest whole checkpoint of an earlier step, every file of which was read; all processes call this."""
    for saved in dist.on_main(lambda: found(folder)):
        if saved.step < step and not verify(saved.path, dist):
            return saved
    return None


def remove_from(folder: Path, step: int, newest: Saved) -> Iterator[Saved]:
    """Remove the checkpoints of a step and of later ones, which must not be resumed; the main process calls this.

    Args:
        folder: a run's `checkpoints/`.
        step: the first whose state is not wanted.
        newest: what is the newest then.
    """
    later = [saved for saved in found(folder) if saved.step >= step]
    if later:
        write_whole(folder / "latest", f"{newest.path.name}\n")
    for saved in later:
        gone = saved.path.with_name(f".{saved.path.name}.removed")
        saved.path.replace(gone)  # a checkpoint is never seen half removed
        shutil.rmtree(gone, ignore_errors=True)
        yield saved
