"""Timetables: torch's schedules, those of other distributions, and files of actions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError, ForgeError
from forge_train.base.errors import describe
from forge_train_kit.pipeline import Action, Timetable, Work

from .rules import RULES, added, parts_of, unknown

if TYPE_CHECKING:
    from ..pp import PipelineParallel

Schedule = Callable[[int, int, int], Timetable]
"""Ranks, parts of each rank, micro-batches → what every rank does; raises ConfigError where that can't be."""


class CountError(ConfigError):
    """A schedule can't be followed with that many micro-batches."""


def timetable(config: PipelineParallel.Config, ranks: int, micro_batches: int) -> Timetable:
    """Return the timetable of all ranks under the configured schedule.

    Raises:
        ConfigError: if it has none for these numbers.
    """
    if config.schedule == "csv":
        key, whose, made = "pp.table", config.table, _read(Path(config.table))
    else:
        key, whose = "pp.schedule", config.schedule
        made = _called(named(config.schedule), whose, ranks, parts_of(config), micro_batches)
    found = (len(made.ranks), made.micro_batches)
    if config.parts and any(len(made.parts_of(rank)) != config.parts for rank in range(found[0])):
        raise ConfigError(
            f"pp.parts: {config.parts} on each rank are asked for, and {whose} has {made.parts} parts on "
            f"{found[0]} ranks; leave pp.parts out, or change the schedule."
        )
    if found != (ranks, micro_batches):
        kind = ConfigError if found[0] != ranks else CountError
        raise kind(
            f"{key}: {whose} has {found[0]} ranks and {found[1]} micro-batches; the run has parallel.pp = {ranks} and "
            f"{micro_batches} micro-batches in a step."
        )
    return made


def _read(table: Path) -> Timetable:
    try:
        return Timetable.from_csv(table.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pp.table: {table} can't be read: {describe(error)}.") from error
    except ConfigError as error:
        raise ConfigError(f"pp.table: {table}: {error}") from error


def _called(schedule: Schedule, name: str, ranks: int, parts: int, micro_batches: int) -> Timetable:
    try:
        made: object = schedule(ranks, parts, micro_batches)
    except Exception as error:  # whatever a stranger's function does
        if isinstance(error, ForgeError):
            raise
        raise ConfigError(f"pp.schedule: {name} failed: {describe(error)}.") from error
    if not isinstance(made, Timetable):
        raise ConfigError(f"pp.schedule: {name} gave a {type(made).__name__}; a schedule gives a Timetable.")
    return made


def named(name: str) -> Schedule:
    """A schedule by its name, or by `module:function`.

    Raises:
        ConfigError: if there is none.
    """
    if name in RULES:
        return lambda ranks, parts, micro_batches: _known(name, ranks, parts, micro_batches)
    if problem := unknown(name):
        raise ConfigError(f"pp.schedule: {problem}")
    where = added().get(name, name)
    module, _, attribute = where.partition(":")
    try:
        found: Schedule = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a stranger's module does while it is imported
        if isinstance(error, ForgeError):
            raise
        raise ConfigError(f"pp.schedule: {where} can't be loaded: {describe(error)}.") from error
    return found


@cache
def _known(name: str, ranks: int, parts: int, micro_batches: int) -> Timetable:
    rule = RULES[name]
    if problem := rule.problem(ranks, parts, micro_batches):
        kind = CountError if rule.allows(parts) else ConfigError
        raise kind(f"pp.schedule: {name} {problem}.")
    if name == "gpipe":
        return Timetable(tuple(_one_after_another(rank, range(micro_batches)) for rank in range(ranks)))
    if name == "1f1b":
        return Timetable(tuple(_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)))
    return _torch(rule.torch, ranks, parts, micro_batches)


def _one_after_another(part: int, micro_batches: range) -> tuple[Action, ...]:
    return tuple(Action(work, part, index) for work in (Work.FORWARD, Work.BACKWARD) for index in micro_batches)


def _one_forward_one_backward(part: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(ranks - 1 - part, micro_batches)
    row = [Action(Work.FORWARD, part, index) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            row.append(Action(Work.FORWARD, part, ahead + index))
        row.append(Action(Work.BACKWARD, part, index))
    return tuple(row)


def _torch(name: str, ranks: int, parts: int, micro_batches: int) -> Timetable:
    """The order that a schedule of torch's has computed for all ranks when it is made."""
    from torch import nn
    from torch.distributed.pipelining import schedules

    count = ranks * parts

    def stage(index: int) -> Any:
        return SimpleNamespace(
            stage_index=index, num_stages=count, group_size=ranks, group_rank=0, has_backward=True,
            is_first=index == 0, is_last=index == count - 1, submod=nn.Identity(), stage_index_to_group_rank=None,
        )  # fmt: skip

    made = getattr(schedules, name)([stage(index) for index in range(0, count, ranks)], micro_batches)
    rows = (made.pipeline_order[rank] for rank in range(ranks))
    cells = (("" if one is None else str(one) for one in row if one is None or _computes(one)) for row in rows)
    return Timetable.from_csv("\n".join(map(",".join, cells)))


def _computes(action: Any) -> bool:
    return action.sub_actions is not None or action.computation_type.value in {work.value for work in Work}
