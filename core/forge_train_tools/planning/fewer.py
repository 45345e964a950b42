"""Number of micro-batches to rehearse."""

from __future__ import annotations

from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model
from forge_train.step.step import Stepper

from .record import Recorded

PASSES = 3
"""Micro-batches of a rehearsal: the first, the last, and one that stands for all between them. A pipeline that can't
follow another timetable than its own takes as many as that needs."""
AFFORDABLE = 32
"""Passes of units that a pipeline's rehearsal may take: one within that is exact."""


def affordable(model: Model, micro_batches: int) -> bool:
    """Return True if all micro-batches of a pipeline's step are rehearsed, in their own order."""
    return micro_batches * sum(len(tuple(getattr(part, "units", ()))) for part in model.parts) <= AFFORDABLE


def passes_of(stepper: Stepper, found: Recorded, *, exact: bool = True) -> int:
    """Return the number of micro-batches to rehearse; record a pipeline's executor and the order that it follows.

    Args:
        stepper: of the rank.
        found: its record.
        exact: whether to take all of them where that is affordable; without it, every rank of a layout takes as many.
    """
    executor: Any = stepper.executor
    wanted = stepper.accumulation
    few = min(wanted, PASSES)
    if stepper.job.dist.layout.pp == 1 or not hasattr(executor, "timetable"):
        return few
    found.executor, found.followed = executor, executor.timetable(wanted)
    if exact and affordable(stepper.model, wanted):
        return wanted
    if few < wanted and hasattr(executor, "follow"):
        found.followed = found.followed.short(few)
        executor.follow(found.followed)
    elif few < wanted:
        few = next(number for number in range(few, wanted + 1) if _possible(executor, number))
        found.followed = executor.timetable(few)
    return few


def _possible(executor: Any, micro_batches: int) -> bool:
    try:
        executor.timetable(micro_batches)
    except ConfigError:
        return False
    return True
