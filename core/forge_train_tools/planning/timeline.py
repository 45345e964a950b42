"""Timeline of each rank of a pipeline: a timetable, simulated with the cost of each part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from forge_train.base.errors import ConfigError
from forge_train_kit.pipeline.timetable import Action, Overlap, Timetable, Work, actions_of


@dataclass(frozen=True)
class PartCost:
    """Cost of one micro-batch in one part. Times are in seconds, or all in the same other unit."""

    forward: float
    input_gradient: float
    weight_gradient: float
    sends: float = 0.0
    """Bytes of the activations that go to the next part; as many come back as their gradient."""
    keeps: float = 0.0
    """Bytes that the forward pass keeps until the backward pass, its weight gradient included, has ended."""

    def of(self, work: Work) -> float:
        """The time of one action."""
        if work is Work.BACKWARD:
            return self.input_gradient + self.weight_gradient
        by = {Work.FORWARD: self.forward, Work.INPUT_GRADIENT: self.input_gradient}
        return by.get(work, self.weight_gradient)


@dataclass(frozen=True)
class Span:
    """One slot of a rank, with its time."""

    rank: int
    slot: Action | Overlap
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    timetable: Timetable
    costs: tuple[PartCost, ...]
    ranks: tuple[tuple[Span, ...], ...]
    critical_path: tuple[Span, ...]
    """The slots that the step's time consists of, first to last: each began when the one before had ended, or when
    what that sent had arrived."""

    @property
    def duration(self) -> float:
        """From the first action of any rank to the last one."""
        return max(row[-1].end for row in self.ranks)

    def busy(self, rank: int) -> float:
        """The time that a rank works."""
        return sum(span.end - span.start for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / (len(self.ranks) * self.duration)

    @property
    def stretch(self) -> float:
        """The step's time over that of the rank with most work."""
        return self.duration / max(map(self.busy, range(len(self.ranks))))

    @property
    def waiting(self) -> float:
        """The most that a rank waits between its own first and last action: the bubble where no rank waits for the
        others between steps (arXiv:2401.10241, §4)."""
        return max(row[-1].end - row[0].start - self.busy(rank) for rank, row in enumerate(self.ranks))

    def in_flight(self, rank: int) -> dict[int, int]:
        """Part of a rank → the most micro-batches at once whose activations it keeps."""
        found = dict.fromkeys(self.timetable.parts_of(rank), 0)
        for one in kept(self.timetable, rank):
            found = {part: max(most, one[part]) for part, most in found.items()}
        return found

    def activations(self, rank: int) -> float:
        """The most bytes of activations that a rank keeps at once."""
        held = (sum(self.costs[part].keeps * n for part, n in one.items()) for one in kept(self.timetable, rank))
        return max(held)

    @cached_property
    def sent(self) -> tuple[float, ...]:
        """Bytes that each rank sends to others."""
        placement, found = self.timetable.placement, [0.0] * len(self.ranks)
        for part in range(self.timetable.parts - 1):
            here, there = placement[part : part + 2]
            if here != there:
                found[here] += self.timetable.micro_batches * self.costs[part].sends
                found[there] += self.timetable.micro_batches * self.costs[part].sends
        return tuple(found)


def simulate(
    timetable: Timetable, costs: Sequence[PartCost], *, bytes_per_second: float = 0.0, overlapped: float = 1.0
) -> Timeline:
    """Let every rank do its row in order, each action as soon as what it needs is there.

    Args:
        timetable: the order.
        costs: of each part.
        bytes_per_second: of the link between two ranks; 0 for one that takes no time. Sending keeps no rank from
            computing.
        overlapped: the time of an overlapped pair, as a share of its two actions' times.

    Raises:
        ConfigError: for another number of costs than parts.
    """
    if len(costs) != timetable.parts:
        raise ConfigError(f"The timetable has {timetable.parts} parts, and there are costs of {len(costs)}.")
    placement = timetable.placement
    ended: dict[Action, Span] = {}
    rows: list[list[Span]] = [[] for _ in timetable.ranks]
    before: dict[Span, Span | None] = {}

    def arrival(need: Action, at: Action) -> float:
        """Return the time at which an action's input from another arrives."""
        if bytes_per_second and placement[need.part] != placement[at.part]:
            return ended[need].end + costs[min(need.part, at.part)].sends / bytes_per_second
        return ended[need].end

    def do(rank: int, slot: Action | Overlap) -> None:
        inside = actions_of(slot)
        causes = [(arrival(need, one), ended[need]) for one in inside for need in timetable.needs(one)]
        if rows[rank]:
            causes.append((rows[rank][-1].end, rows[rank][-1]))
        start, cause = max(causes, key=lambda one: one[0], default=(0.0, None))
        time = sum(costs[one.part].of(one.work) for one in inside) * (overlapped if len(inside) > 1 else 1.0)
        span = Span(rank, slot, start, start + time)
        rows[rank].append(span)
        before[span] = cause
        ended.update(dict.fromkeys(inside, span))

    timetable.run(do)
    return Timeline(timetable, tuple(costs), tuple(map(tuple, rows)), tuple(_path(rows, before)))


def _path(rows: Sequence[Sequence[Span]], before: dict[Span, Span | None]) -> list[Span]:
    at: Span | None = max((row[-1] for row in rows), key=lambda span: span.end)
    path = []
    while at is not None:
        path.append(at)
        at = before[at]
    return path[::-1]


def kept(timetable: Timetable, rank: int) -> Iterable[dict[int, int]]:
    """After each forward pass of a rank: part → micro-batches whose activations are kept."""
    kept = dict.fromkeys(timetable.parts_of(rank), 0)
    for one in timetable.actions(rank):
        if one.work is Work.FORWARD:
            kept[one.part] += 1
            yield dict(kept)
        elif one.work is not Work.INPUT_GRADIENT:
            kept[one.part] -= 1
