"""Search for the rank that others wait for, in the heartbeats of all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_train.base.files import write_whole
from forge_train.base.format import format_list
from forge_train.base.strict_json import dumps, loads


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, as it reports itself."""

    rank: int
    beat: int
    """Grows with each heartbeat."""
    marks: int
    """Grows with each part of a step that begins or ends; the same on all ranks that are equally far."""
    step: int
    phase: str
    seconds: float
    """Since the last mark."""
    stalled: bool = False
    """True if that exceeds the limit."""
    at: str = ""
    awaits: str = ""
    """See `stacks.Place`; of a stalled rank."""
    last: str = ""
    """Its last collective."""
    host: str = ""
    pid: int = 0

    def write(self, folder: Path) -> None:
        write_whole(folder / f"rank-{self.rank}.json", dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path, rank: int) -> Heartbeat | None:
        """The newest heartbeat of a rank, if it has left one."""
        try:
            known: dict[str, Any] = loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            return cls(**known)
        except (OSError, ValueError, TypeError):
            return None


def blamed(beats: Mapping[int, Heartbeat], silent: Collection[int]) -> list[int]:
    """The ranks that the others wait for; all of them where each waits for another.

    Args:
        beats: the last heartbeat of each rank that has left one.
        silent: ranks that have left none, or whose process has stopped to.
    """
    if silent:
        return sorted(silent)
    least = min(beat.marks for beat in beats.values())
    behind = [rank for rank, beat in sorted(beats.items()) if beat.marks == least]
    busy = [rank for rank in behind if not beats[rank].awaits]
    return busy or behind


def message(beats: Mapping[int, Heartbeat], silent: Collection[int], folder: Path) -> tuple[int, str]:
    """The rank to blame, and a message that begins with it."""
    ranks = blamed(beats, silent)
    first = ranks[0]
    lines = [_words(first, beats.get(first), silent=first in silent)]
    if others := ranks[1:]:
        lines.append(f"The same holds for rank{'s' * (len(others) > 1)} {format_list(others, 8)}.")
    if len(ranks) == len(beats) > 1 and not silent:
        lines.append("All ranks wait for each other: they do not call the same collectives.")
    waiting: dict[str, list[int]] = {}
    for rank, beat in sorted(beats.items()):
        if rank not in ranks:
            waiting.setdefault(beat.awaits or f"step {beat.step} ({beat.phase})", []).append(rank)
    for where, held in waiting.items():
        wait = f"Rank {held[0]} waits" if len(held) == 1 else f"Ranks {format_list(held, 8)} wait"
        lines.append(f"{wait} for it in {where}.")
    lines.append(f"Stacks and collectives of all ranks are in {folder}.")
    return first, "\n".join(lines)


def _words(rank: int, beat: Heartbeat | None, *, silent: bool) -> str:
    if beat is None:
        return f"Rank {rank} hangs: it has left no heartbeat."
    where = f"at step {beat.step} ({beat.phase})"
    if silent:
        gone = f"its process on {beat.host} does not run, or holds Python's lock"
        return f"Rank {rank} hangs: {gone}. Its last heartbeat is of step {beat.step} ({beat.phase})."
    said = f"Rank {rank} hangs {where} for {beat.seconds:.0f} s"
    if beat.awaits:
        said += f", waiting in {beat.awaits}"
    if beat.last and beat.awaits:
        said += f"; its last collective is {beat.last}"
    return f"{said}.\n  at {beat.at}" if beat.at else f"{said}."
