"""Trials of metrics: what they are before anything is observed, and after a step."""

from __future__ import annotations

from collections.abc import Mapping

from forge_train.contract.events import Metric
from forge_train.step.aggregate import Metrics

from ..bench import Bench, Trials
from ..conformance import SkippedError, require


def metrics_start_empty(bench: Bench) -> str:
    made: Mapping[str, Metric] = bench.answer("metrics", model=bench.model()) or {}
    if not made:
        raise SkippedError("it has none as it is configured")
    require(Metrics(bench.job, made).take() == {}, "a metric that observed nothing has a value")
    others: Mapping[str, Metric] = bench.answer("metrics", model=bench.model())
    shared = [name for name, one in made.items() if one.sums.data_ptr() == others[name].sums.data_ptr() != 0]
    require(not shared, f"{', '.join(shared)}: made once for all runs; make metrics in the hook")
    return ", ".join(sorted(made))


TRIALS: Trials = {"metrics": [("start empty", metrics_start_empty)]}
