"""A picture of a step."""

from __future__ import annotations

from collections.abc import Sequence

from forge_train_kit.pipeline import Timetable
from forge_train_kit.pipeline.cuts import Cost
from forge_train_tools.planning.drawing import svg
from forge_train_tools.planning.timeline import PartCost, simulate


def picture(table: Timetable, costs: Sequence[Cost], title: str) -> str:
    """The simulated timeline of a step as SVG.

    Args:
        table: what every rank does.
        costs: of each part. The forward pass and either gradient take a third of its FLOPs; where the model declares
            none, all parts take the same time.
        title: of the picture.
    """
    mean = sum(cost.flops for cost in costs) / len(costs)
    times = [cost.flops / mean if mean else 1.0 for cost in costs]
    return svg(simulate(table, [PartCost(time, time, time) for time in times]), title)
