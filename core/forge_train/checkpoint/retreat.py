"""Back to a checkpoint from before a step: finding it, and removing those that came after it.

A roll-back is noted on disk before the first removal. Until it is finished, no reader finds what it removes, and a run
that continues finishes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..mesh.distributed import DistributedContext
from .found import Saved, all_of, found, name_latest, remove, whole
from .noted import RollBack, note_left_out, note_roll_back, noted_roll_back
from .seal import ALONE, verify


def newest_before(folder: Path, step: int, dist: DistributedContext) -> Saved | None:
    """The newest whole checkpoint of an earlier step, every file of which was read; all processes call this."""
    for saved in dist.on_main(lambda: found(folder)):
        if saved.step < step and not verify(saved.path, dist):
            return saved
    return None


def begin(run: Path, before: int, left_out: Iterable[tuple[int, int]]) -> None:
    """Note that checkpoints of a step and of later ones must not be resumed, and what data is left out from now on.

    Args:
        run: its folder; the main process calls this.
        before: the first step whose state is not wanted; 0 removes nothing.
        left_out: as `noted.left_out` gives it.
    """
    if not before:
        note_left_out(run, left_out)
        return
    earlier = noted_roll_back(run)
    elsewhere = min(before, earlier.elsewhere) if earlier else before
    note_roll_back(run, RollBack(before, sorted(left_out), elsewhere))


def finish(run: Path) -> Iterator[Saved]:
    """Remove from a run's folder what its roll-back removes; each is given once it is gone. Stores are left."""
    noted, folder = noted_roll_back(run), run / "checkpoints"
    if noted is None or noted.before is None:
        return
    note_left_out(run, noted.left_out)
    name_latest(folder, next(whole(folder, ALONE), None))
    for saved in all_of(folder):
        if saved.step >= noted.before:
            remove(saved)
            yield saved
    note_roll_back(run, RollBack(None, [], noted.elsewhere))
