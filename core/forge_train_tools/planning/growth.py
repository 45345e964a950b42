"""Growth of a log of events when a loop that wrote parts of it runs more often.

Three logs of the same program, whose loops ran m, m + 1 and m + 2 times, show which events each further pass adds and
which numbers it makes larger. From the first two a rule is read, and the third one proves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW = 16
"""Events that are compared to find where logs go on alike."""


@dataclass(frozen=True, slots=True)
class Event:
    """Event, and its numbers, which may grow with the passes."""

    kind: Any
    """Hashable."""
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """One event of the shortest log, and what a further pass changes there."""

    event: Event | None
    grows: tuple[float, ...] = ()
    """Increments of its numbers in each pass."""
    before: tuple[Event, ...] = ()
    """Events that each pass adds before it."""


Rule = Sequence[Step]


def rule(logs: Sequence[Sequence[Event]]) -> Rule | None:
    """Derive the growth of a log from three of them; None if no rule fits exactly."""
    found = list(_differences(logs))
    same = all(list(grown(found, passes)) == list(log) for passes, log in enumerate(logs))
    return found if same else None


def grown(rule: Rule, passes: int) -> Iterator[Event]:
    """The log after so many more passes than the shortest one had."""
    for step in rule:
        for _ in range(passes):
            yield from step.before
        if step.event is not None:
            numbers = zip(step.event.numbers, step.grows, strict=False)
            yield Event(step.event.kind, tuple(a + passes * b for a, b in numbers)) if step.grows else step.event


def _differences(logs: Sequence[Sequence[Event]]) -> Iterator[Step]:
    """The steps from the first log to the second, as far as the third one goes on in the same way."""
    first, second, _ = logs
    at = [0, 0, 0]
    while at[0] < len(first):
        event = first[at[0]]
        here = [log[place] if place < len(log) else None for log, place in zip(logs, at, strict=True)]
        if here[1] != event or here[2] != event:
            added = _added(logs, at)
            before = tuple(second[at[1] : at[1] + added])
            at = [at[0], at[1] + added, at[2] + 2 * added]
            yield Step(event, _growth(logs, at) or (), before)
        else:
            yield Step(event)
        at = [place + 1 for place in at]
    yield Step(None, before=tuple(second[at[1] :]))


def _added(logs: Sequence[Sequence[Event]], at: Sequence[int]) -> int:
    """Return how many events each pass adds here: the number after which the logs agree longest."""
    first, second, third = logs
    here, there, beyond = at
    room = len(second) - there - (len(first) - here)

    def alike(added: int) -> int:
        """For how many events the logs go on alike after so many that were added; -1 if these can't be it."""
        if _growth(logs, (here, there + added, beyond + 2 * added)) is None:
            return -1
        block = second[there : there + added]
        if block != third[beyond : beyond + added] or block != third[beyond + added : beyond + 2 * added]:
            return -1
        ahead = zip(
            first[here + 1 : here + WINDOW],
            second[there + added + 1 : there + added + WINDOW],
            third[beyond + 2 * added + 1 : beyond + 2 * added + WINDOW],
            strict=False,
        )
        return sum(1 for _ in itertools.takewhile(lambda three: three[0] == three[1] == three[2], ahead))

    return max(range(max(room, 0) + 1), key=lambda added: (alike(added), -added))


def _growth(logs: Sequence[Sequence[Event]], at: Sequence[int]) -> tuple[float, ...] | None:
    """Return the growth of one event's numbers in each pass; empty if they stay, None for another event."""
    if any(place >= len(log) for log, place in zip(logs, at, strict=True)):
        return None
    a, b, c = (log[place] for log, place in zip(logs, at, strict=True))
    if a == b == c:
        return ()
    if not (a.kind == b.kind == c.kind and len(a.numbers) == len(b.numbers) == len(c.numbers)):
        return None
    steps = [(y - x, z - y) for x, y, z in zip(a.numbers, b.numbers, c.numbers, strict=True)]
    return tuple(one for one, _ in steps) if all(one == two for one, two in steps) else None
