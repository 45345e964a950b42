"""Entries of the model that each stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from forge_train_kit.pipeline.cuts import Cost, balanced

from .schedules import Schedule


@dataclass(frozen=True)
class Holding:
    """The layers and ends that a rank of a pipeline holds."""

    entries: tuple[int, ...]
    repeats: float
    """Repetitions of the repeating units."""
    flying: float
    """The same, times the micro-batches whose activations are kept."""
    split: float
    """The same, times the share of micro-batches with an input gradient of its own."""
    head: bool
    """True if the model's last entry is there."""
    split_head: float
    """That share of the last entry; 0 elsewhere."""


class Cut:
    """The model's entries, and how schedules cut them.

    Args:
        costs: of each entry.
        repetitions: of the repeating units, in each entry.
    """

    def __init__(self, costs: Sequence[Cost], repetitions: Sequence[float]) -> None:
        self.costs, self.repetitions = tuple(costs), tuple(repetitions)
        self.runs = cache(self._runs)
        self.holdings = cache(self._holdings)

    @property
    def last(self) -> int:
        """The entry with the head."""
        return len(self.costs) - 1

    def _runs(self, parts: int) -> list[range]:
        """Entries of each part.

        Raises:
            ConfigError: for more parts than entries.
        """
        return [range(start, stop) for start, stop in pairwise(balanced(self.costs, parts))]

    def _parts(self, schedule: Schedule | None, rank: int) -> list[range]:
        if schedule is None:
            return [range(len(self.costs))]
        runs = self.runs(len(schedule.placement))
        return [runs[part] for part in schedule.parts_of(rank)]

    def _holdings(self, schedule: Schedule | None) -> tuple[Holding, ...]:
        """Holdings of the ranks that may be the fullest or the busiest: the first and the last, and the one with most
        repetitions."""
        every = [self._holding(schedule, rank) for rank in range(schedule.ranks if schedule else 1)]
        most = max(every, key=lambda one: one.repeats)
        return tuple({one.entries: one for one in (every[0], every[-1], most)}.values())

    def _holding(self, schedule: Schedule | None, rank: int) -> Holding:
        parts = self._parts(schedule, rank)
        repeats = [sum(self.repetitions[at] for at in part) for part in parts]
        moments = schedule.in_flight[rank] if schedule else ((1,),)
        split = schedule.split[rank] if schedule else (0.0,)
        entries = tuple(at for part in parts for at in part)
        kept = max(sum(n * one for n, one in zip(repeats, moment, strict=True)) for moment in moments)
        apart = sum(n * one for n, one in zip(repeats, split, strict=True))
        head = sum(share for part, share in zip(parts, split, strict=True) if self.last in part)
        return Holding(entries, sum(repeats), kept, apart, self.last in entries, head)
