"""Back to a checkpoint from before a step: finding it, removing those that came after it, and the data left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..ground.files import write_json, write_whole
from ..ground.untrusted import load_json
from ..processes.distributed import DistributedContext
from .found import Saved, found, remove
from .seal import verify

LEFT_OUT = "left_out.json"
"""The file of a run that says what data its roll-backs left out: a checkpoint from before them can't."""
MOST_BYTES = 2**20


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
        remove(saved)
        yield saved


def left_out(run: Path) -> list[tuple[int, int]]:
    """What data a run's roll-backs left out: pairs of first and last sequence (exclusive)."""
    file = run / LEFT_OUT
    return [(int(first), int(last)) for first, last in load_json(file, most=MOST_BYTES)] if file.exists() else []


def note_left_out(run: Path, data: Iterable[tuple[int, int]]) -> None:
    """Add to that. It is on disk when this returns; the main process calls it."""
    if new := sorted({*left_out(run), *data}):
        write_json(run / LEFT_OUT, new)
