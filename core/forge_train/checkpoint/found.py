"""The checkpoints of a run, and which of them are whole."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from ..base.files import write_whole
from ..mesh.distributed import DistributedContext
from ..store.manifest import NAME, way_out
from .noted import noted_roll_back
from .reading import unusable
from .seal import ALONE, verify

log = logging.getLogger("forge_train")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: Path
    step: int
    bytes: int


def newest(folder: Path, dist: DistributedContext = ALONE) -> Saved | None:
    """The newest whole checkpoint, every file of which was read; newer ones that are not whole are named in a warning.

    Args:
        folder: a run's `checkpoints/`.
        dist: the processes that read them together, all of which call this.
    """
    return next(whole(folder, dist, warn=True), None)


def whole(folder: Path, dist: DistributedContext, *, warn: bool = False) -> Iterator[Saved]:
    """The whole checkpoints, newest first, each verified when it is its turn."""
    for saved in dist.on_main(lambda: found(folder)):
        problem = verify(saved.path, dist)
        if not problem:
            yield saved
        elif warn and way_out(problem, saved.path):
            raise unusable(saved.path, problem)
        elif warn and dist.main:
            log.warning("%s is not whole (%s); falling back to the checkpoint before it.", saved.path, problem)


def found(folder: Path) -> list[Saved]:
    """Checkpoints of a run, newest first, whole or damaged; what was never finished has another name.

    What a roll-back removes that is not finished is left out.
    """
    noted = noted_roll_back(folder.parent)
    limit = noted.before if noted else None
    return [saved for saved in all_of(folder) if limit is None or saved.step < limit]


def all_of(folder: Path) -> list[Saved]:
    """Like `found`, with what a roll-back removes that is not finished."""
    steps = [(int(match.group(1)), path) for path in folder.glob("step-*") if (match := NAME.match(path.name))]
    saved: list[Saved] = []
    for step, path in sorted(steps, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # another thread removes it
            if path.is_dir():
                saved.append(Saved(path, step, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())))
    return saved


def name_latest(folder: Path, saved: Saved | None) -> None:
    """Have a run's `latest` name its newest whole checkpoint."""
    latest = folder / "latest"
    if saved is None:
        latest.unlink(missing_ok=True)
    elif not latest.is_file() or latest.read_bytes() != f"{saved.path.name}\n".encode():
        write_whole(latest, f"{saved.path.name}\n")


def is_kept(step: int, keep_every: int, spared: Set[int]) -> bool:
    """Return True if a checkpoint is kept even though it is not among the newest."""
    return bool(keep_every and step % keep_every == 0) or step in spared


def aside(path: Path) -> Path:
    """Return a checkpoint's name during its removal."""
    return path.with_name(f".{path.name}.removed")


def remove(saved: Saved) -> None:
    """Remove a checkpoint, which is never seen half removed."""
    gone = aside(saved.path)
    saved.path.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)
