"""Entries of the model that each stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from forge_train_kit.pipeline.cuts import Cost, balanced

from .candidates import Candidate
from .schedules import Schedule


class Cut:
    """The model's entries, and how schedules cut them.

    Args:
        costs: of each entry.
        repetitions: of the repeating units, in each entry.
    """

    def __init__(self, costs: Sequence[Cost], repetitions: Sequence[float]) -> None:
        self.costs, self.repetitions = tuple(costs), tuple(repetitions)
        self.runs = cache(self._runs)
        self.parts = cache(self._parts)

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

    def ranks_of_interest(self, candidate: Candidate, schedule: Schedule | None) -> range:
        return range(schedule.ranks if schedule else 1)
