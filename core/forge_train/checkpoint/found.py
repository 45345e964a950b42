"""The checkpoints of a run: which are there, which are whole, and which a roll-back removes.

A roll-back is noted on disk before the first removal. Until it is finished, no reader finds what it removes, and a run
that continues finishes it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base.files import REPLACED, write_json, write_whole
from ..mesh.distributed import DistributedContext
from ..run.run import load
from ..store.manifest import NAME, way_out
from .reading import unusable
from .seal import ALONE, sync, verify

log = logging.getLogger("forge_train")

LEFT_OUT = "left_out.json"
"""Data ranges that roll-backs of a run left out. A checkpoint from before the roll-back does not have them."""
ROLL_BACK = ".roll_back.json"
"""The file of a run that says what a roll-back removes. It is there before anything is, and until all of it is gone."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: Path
    step: int
    bytes: int


def newest(folder: Path, dist: DistributedContext = ALONE, *, before: int = 0) -> Saved | None:
    """The newest whole checkpoint, every file of which was read; newer ones that are not whole are named in a warning.

    Args:
        folder: a run's `checkpoints/`.
        dist: the processes that read them together, all of which call this.
        before: take only a checkpoint of an earlier step; 0 takes any.
    """
    return next(whole(folder, dist, before=before, warn=True), None)


def whole(folder: Path, dist: DistributedContext, *, before: int = 0, warn: bool = False) -> Iterator[Saved]:
    """The whole checkpoints, newest first, each verified when it is its turn."""
    for saved in dist.on_main(lambda: found(folder)):
        if before and saved.step >= before:
            continue
        problem = verify(saved.path, dist)
        if not problem:
            yield saved
        elif warn and way_out(problem, saved.path):
            raise unusable(saved.path, problem)
        elif warn and dist.main:
            log.warning("%s is not whole (%s); falling back to the checkpoint before it.", saved.path, problem)


def found(folder: Path) -> list[Saved]:
    """Checkpoints of a run, newest first, whole or damaged; what was never finished has another name.

    Those that an unfinished roll-back removes are left out.
    """
    noted = noted_roll_back(folder.parent)
    limit = noted.before if noted else None
    return [saved for saved in _all(folder) if limit is None or saved.step < limit]


def _all(folder: Path) -> list[Saved]:
    """Like `found`, with what an unfinished roll-back removes.

    A kill while a step was saved again may have left its old checkpoint under the name that it had in between.
    """
    there = [(path.name, path) for path in folder.glob("step-*")]
    between = [(path.name[1:].removesuffix(REPLACED), path) for path in folder.glob(f".step-*{REPLACED}")]
    steps = {int(match[1]): path for name, path in (*between, *there) if (match := NAME.match(name))}
    saved: list[Saved] = []
    for step, path in sorted(steps.items(), reverse=True):
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


def remove(saved: Saved) -> None:
    """Remove a checkpoint, which is never seen half removed."""
    gone = saved.path.with_name(f".step-{saved.step:08d}.removed")
    saved.path.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


# -- roll-backs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnfinishedRollBack:
    """A roll-back that is not finished."""

    before: int | None
    """Checkpoints of this step and of later ones go from the run's folder; None once they have."""
    left_out: list[tuple[int, int]]
    elsewhere: int
    """Likewise from the run's stores, which have none of them once the file is gone."""


def noted_roll_back(run: Path) -> UnfinishedRollBack | None:
    """The roll-back that a run's folder notes as not finished.

    Raises:
        ConfigError: if what it notes is damaged.
    """
    if (noted := load(run / ROLL_BACK, links=False)) is None:
        return None
    return UnfinishedRollBack(noted["before"], [(first, last) for first, last in noted["left_out"]], noted["elsewhere"])


def note_roll_back(run: Path, noted: UnfinishedRollBack | None) -> None:
    """Have a run's folder note a roll-back, or that it is finished; on disk when this returns."""
    if noted is None:
        (run / ROLL_BACK).unlink(missing_ok=True)
    else:
        write_json(run / ROLL_BACK, asdict(noted))
    sync(run)


def begin_roll_back(run: Path, before: int, left_out: Iterable[tuple[int, int]]) -> None:
    """Note that checkpoints of a step and of later ones must not be resumed, and what data is left out from now on.

    Args:
        run: its folder; the main process calls this.
        before: the first step whose state is not wanted; 0 removes nothing.
        left_out: as `left_out` gives it.
    """
    if not before:
        _note_left_out(run, left_out)
        return
    earlier = noted_roll_back(run)
    elsewhere = min(before, earlier.elsewhere) if earlier else before
    note_roll_back(run, UnfinishedRollBack(before, sorted(left_out), elsewhere))


def finish_roll_back(run: Path) -> Iterator[Saved]:
    """Remove from a run's folder what its roll-back removes; each is given once it is gone. Stores are left."""
    noted, folder = noted_roll_back(run), run / "checkpoints"
    if noted is None or noted.before is None:
        return
    _note_left_out(run, noted.left_out)
    name_latest(folder, next(whole(folder, ALONE), None))
    for saved in _all(folder):
        if saved.step >= noted.before:
            remove(saved)
            yield saved
    note_roll_back(run, UnfinishedRollBack(None, [], noted.elsewhere))


def left_out(run: Path) -> list[tuple[int, int]]:
    """Return the data that a run's roll-backs left out: pairs of first and last sequence (exclusive).

    Raises:
        ConfigError: if the record is damaged.
    """
    before = [(first, last) for first, last in load(run / LEFT_OUT, links=False) or ()]
    noted = noted_roll_back(run)
    return sorted({*before, *(noted.left_out if noted else ())})


def _note_left_out(run: Path, data: Iterable[tuple[int, int]]) -> None:
    if new := sorted({*left_out(run), *data}):
        write_json(run / LEFT_OUT, new)
        sync(run)
