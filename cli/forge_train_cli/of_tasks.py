"""Results of tasks, in what `forge runs` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_train_kit.format import format_number
from forge_train_tools.run_folder import RunFolder

from . import screen

if TYPE_CHECKING:
    from forge_train_tools.evaluation.paired import Difference


def show(histories: Sequence[RunFolder]) -> None:
    """Print the results of runs side by side; of two, with a paired test where they answered the same questions."""
    rows = []
    tested = _tested(histories)
    for task, metric in _keys(histories):
        values = [_value(history, task, metric) for history in histories]
        found = tested.get(task, {}).get(metric)
        rows.append((f"{task} {metric}", *values, "" if found is None else f"p = {found.p:.4f}"))
    if rows:
        screen.heading("Tasks")
        screen.table(("", *(history.name for history in histories), "paired" if tested else ""), rows)


def plain(histories: Sequence[RunFolder]) -> dict[str, Any]:
    """The same as JSON: `tasks`, and `paired` of two runs."""
    tasks: dict[str, dict[str, Any]] = {}
    for task, metric in _keys(histories):
        sides = {str(one.path): one.tasks[task].metrics.get(metric) for one in histories if task in one.tasks}
        values = {run: {"value": one.value, "error": one.error} for run, one in sides.items() if one is not None}
        tasks.setdefault(task, {})[metric] = values
    paired = {
        task: {metric: dataclasses.asdict(one) for metric, one in table.items()}
        for task, table in _tested(histories).items()
    }
    return {"tasks": tasks, "paired": paired}


def _keys(histories: Sequence[RunFolder]) -> list[tuple[str, str]]:
    """Task and metric, of every result that a run has."""
    all_keys = [(task, metric) for one in histories for task, result in one.tasks.items() for metric in result.metrics]
    return sorted(dict.fromkeys(all_keys), key=lambda key: key[0])


def _tested(histories: Sequence[RunFolder]) -> Mapping[str, Mapping[str, Difference]]:
    """The second of two runs, compared with the first."""
    if len(histories) != 2 or not all(one.tasks for one in histories):
        return {}
    from forge_train_tools.evaluation.paired import all_differences

    return all_differences(histories[1].tasks, histories[0].tasks)


def _value(history: RunFolder, task: str, metric: str) -> str:
    result = history.tasks.get(task)
    found = result.metrics.get(metric) if result is not None else None
    if found is None:
        return "–"
    return format_number(found.value) + ("" if found.error is None else f" ± {format_number(found.error)}")
