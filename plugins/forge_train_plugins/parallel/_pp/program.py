"""Program of one rank for a step: the passes of its row, with the sends and receives in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from forge_train_kit.pipeline import Action, Overlap, Timetable, Work
from forge_train_kit.pipeline.timetable import actions_of


@dataclass(frozen=True, slots=True)
class Send:
    """Send the output of an action to the rank of the next part or, for a backward pass, of the previous part."""

    action: Action
    peer: int
    """Rank of the pipeline."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the input of an action of this rank."""

    action: Action
    """That gives it, on another rank."""
    peer: int


Operation: TypeAlias = Action | Send | Receive


def program(table: Timetable, rank: int) -> list[Operation]:
    """A rank's operations in order.

    A receipt stands where its sender comes to send, so that what goes from one rank to another is sent and received
    in one order: no two ranks wait for each other, also where a pair of ranks has one channel (NCCL).
    """
    rows: list[list[Operation]] = [[] for _ in table.ranks]

    def do(at: int, slot: Action | Overlap) -> None:
        for action in actions_of(slot):
            rows[at].append(action)
            if (other := _reader(table, action)) is not None and other != at:
                rows[at].append(Send(action, other))
                rows[other].append(Receive(action, at))

    table.run(do)
    return rows[rank]


def _reader(table: Timetable, action: Action) -> int | None:
    """The rank that needs what an action gives."""
    step = {Work.FORWARD: 1, Work.BACKWARD: -1, Work.INPUT_GRADIENT: -1, Work.WEIGHT_GRADIENT: 0}[action.work]
    part = action.part + step
    return table.placement[part] if step and 0 <= part < table.parts else None


def last_of_each(table: Timetable, rank: int) -> frozenset[Action]:
    """Of each part, the last forward pass and the last action that brings gradients of weights."""
    found: dict[tuple[int, bool], Action] = {}
    for action in table.actions(rank):
        if action.work is not Work.INPUT_GRADIENT:
            found[action.part, action.work is Work.FORWARD] = action
    return frozenset(found.values())
