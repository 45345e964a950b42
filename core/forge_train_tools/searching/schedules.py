"""Timetables of a pipeline, in numbers: how long a step is stretched, and what is in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torch import nn

from forge_train import ConfigError, Model
from forge_train.plugin import hookspecs
from forge_train_kit.pipeline.timetable import PipelineExecutor, Timetable, Work

from ..planning.timeline import PartCost, Timeline, kept, simulate
from .composing import ENOUGH, Composer
from .variants import Variant


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule for some number of micro-batches, of parts that all cost the same."""

    stretch: float
    """The time of a step over that of a rank's own work."""
    placement: tuple[int, ...]
    """Part → its rank."""
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    """Rank → micro-batches of each of its parts whose activations are kept, at every moment that may be the fullest."""
    split: tuple[tuple[float, ...], ...]
    """Rank → the share of micro-batches with an input gradient of its own, of each of its parts. The first part gets
    token ids, which have none."""
    crossings: tuple[int, ...]
    """Rank → borders of its parts with parts of other ranks."""

    @property
    def ranks(self) -> int:
        return len(self.in_flight)

    def parts_of(self, rank: int) -> list[int]:
        return [part for part, home in enumerate(self.placement) if home == rank]


class Schedules:
    """Asks the executor of a run, which need not be built for a cut model to give its timetables."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self.get = cache(self._get)
        self._timeline, self._executor = cache(self._simulated), cache(self._made)

    def _get(self, variant: Variant, pp: int, micro_batches: int) -> Schedule:
        """A schedule of so many ranks.

        Raises:
            ConfigError: if it does not exist for these numbers.
        """
        many = 2 * pp
        if micro_batches <= many + pp:
            return _read(self._timeline(variant, pp, micro_batches), None)
        # From some number on, each further micro-batch adds the same: two tables tell the time of any larger number.
        first, second = (self._timeline(variant, pp, count) for count in (many - pp, many))
        return _read(second, _extended(first, second, micro_batches))

    def _simulated(self, variant: Variant, pp: int, micro_batches: int) -> Timeline:
        table = self._executor(variant, pp).timetable(micro_batches)
        return simulate(table, [PartCost(1.0, 1.0, 1.0)] * table.parts)

    def _made(self, variant: Variant, pp: int) -> PipelineExecutor:
        with self._composer.job(variant, {"pp": pp}, 1, ENOUGH * pp) as job:
            executor = hookspecs.executor(Model([nn.Module()], []), hookspecs.task(job), job)
        if not isinstance(executor, PipelineExecutor):
            raise ConfigError("the executor does not declare what its ranks do")
        return executor


def _read(timeline: Timeline, stretch: float | None) -> Schedule:
    table = timeline.timetable
    place, ranks = table.placement, range(len(table.ranks))
    borders = [
        sum(
            place[part] != place[other] for part in table.parts_of(rank) for other in (part - 1, part + 1)
            if 0 <= other < table.parts
        )
        for rank in ranks
    ]  # fmt: skip
    flying = tuple(fullest(kept(table, rank)) for rank in ranks)
    split = tuple(tuple(_split(table, rank, part) for part in table.parts_of(rank)) for rank in ranks)
    return Schedule(timeline.stretch if stretch is None else stretch, place, flying, split, tuple(borders))


def fullest(moments: Iterable[Mapping[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Moments at which no other has as many of each part but the last, and more of that."""
    most: dict[tuple[int, ...], int] = {}
    for *others, last in (moment.values() for moment in moments):
        most[tuple(others)] = max(most.get(tuple(others), 0), last)
    return tuple((*others, last) for others, last in most.items())


def _split(table: Timetable, rank: int, part: int) -> float:
    own = [one for one in table.actions(rank) if one.part == part > 0 and one.work is Work.INPUT_GRADIENT]
    return len(own) / table.micro_batches


def _extended(first: Timeline, second: Timeline, micro_batches: int) -> float:
    table, fewer = second.timetable, first.timetable.micro_batches
    each = (second.duration - first.duration) / (table.micro_batches - fewer)
    busy = 3.0 * table.parts / len(table.ranks) * micro_batches
    return (second.duration + each * (micro_batches - table.micro_batches)) / busy
