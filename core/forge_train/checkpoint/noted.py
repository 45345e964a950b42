"""Records of roll-backs in a run's folder: the data that they left out, and one that is unfinished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, describe
from ..base.files import write_json
from ..base.untrusted import load_json
from .seal import sync

LEFT_OUT = "left_out.json"
"""The file of a run that says what data its roll-backs left out: a checkpoint from before them can't."""
ROLL_BACK = ".roll_back.json"
"""The file of a run that says what a roll-back removes. It is there before anything is, and until all of it is gone."""
MOST_BYTES = 2**20


@dataclass(frozen=True)
class RollBack:
    """A roll-back that is not finished."""

    before: int | None
    """Checkpoints of this step and of later ones go from the run's folder; None once they have."""
    left_out: list[tuple[int, int]]
    elsewhere: int
    """Likewise from the run's stores, which have none of them once the file is gone."""


def noted_roll_back(run: Path) -> RollBack | None:
    """The roll-back that a run's folder notes as not finished.

    Raises:
        ConfigError: if what it notes is damaged.
    """
    if not (file := run / ROLL_BACK).is_file():
        return None
    found = _read(file)
    if not isinstance(found, dict) or found.keys() != {"before", "left_out", "elsewhere"}:
        raise _damaged(file, "it is no roll-back")
    before, elsewhere = found["before"], found["elsewhere"]
    if not _is_count(elsewhere) or not (before is None or _is_count(before)):
        raise _damaged(file, "its steps are no counts")
    return RollBack(before, _pairs(file, found["left_out"]), elsewhere)


def note_roll_back(run: Path, noted: RollBack | None) -> None:
    """Have a run's folder note a roll-back, or that it is finished; on disk when this returns."""
    if noted is None:
        (run / ROLL_BACK).unlink(missing_ok=True)
    else:
        write_json(run / ROLL_BACK, asdict(noted))
    sync(run)


def left_out(run: Path) -> list[tuple[int, int]]:
    """Return the data that a run's roll-backs left out: pairs of first and last sequence (exclusive).

    Raises:
        ConfigError: if the record is damaged.
    """
    file = run / LEFT_OUT
    before = _pairs(file, _read(file)) if file.exists() else []
    noted = noted_roll_back(run)
    return sorted({*before, *(noted.left_out if noted else ())})


def note_left_out(run: Path, data: Iterable[tuple[int, int]]) -> None:
    """Add to that. It is on disk when this returns; the main process calls it."""
    if new := sorted({*left_out(run), *data}):
        write_json(run / LEFT_OUT, new)
        sync(run)


def _read(file: Path) -> Any:
    try:
        return load_json(file, most=MOST_BYTES)
    except (OSError, ValueError) as error:
        raise _damaged(file, describe(error).partition("\n")[0][:200]) from error


def _pairs(file: Path, found: Any) -> list[tuple[int, int]]:
    if not isinstance(found, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in found
    ):
        raise _damaged(file, "it holds something else than pairs of counts")
    return [(first, last) for first, last in found]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _damaged(file: Path, problem: str) -> ConfigError:
    return ConfigError(f"{file}: can't be read: {problem}. It says what roll-backs left out; put it back as it was.")
