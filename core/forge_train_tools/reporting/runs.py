"""A run in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forge_train.base.errors import ConfigError

from ..run_folder import RunFolder
from .curves import Curve
from .metrics import METRICS_FILE, Metrics, read_all

POINTS = 40_000
"""The most points of a metric on a page, of all runs together, as long as each has `FEWEST`."""
FEWEST, MOST = 400, 4000
"""Points of one curve."""
HELD_OUT = "held out "
"""Begins the names of evaluations' metrics."""


class ReportedRun(RunFolder):
    """A run whose metrics are curves: it is read in little memory, however long it is.

    Args:
        path: its folder.
        metrics: what was read of them.
    """

    def __init__(self, path: Path, metrics: Metrics) -> None:
        super().__init__(path)
        self.read_metrics = metrics

    @property
    def last(self) -> dict[str, Any]:
        """The newest line of metrics."""
        return self.read_metrics.last

    @property
    def seconds(self) -> float:
        """Time in steps, without evaluations and checkpoints; nan if it is not known."""
        return self.read_metrics.seconds

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        """By metric: those of training, and those of evaluations as `held out …`."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for line in self.evaluations:
            for key, value in line.items():
                if key != "step" and value is not None:
                    steps, values = found.setdefault(HELD_OUT + key, ([], []))
                    steps.append(line["step"])
                    values.append(value)
        curves = dict(self.read_metrics.curves)
        for name, (steps, values) in found.items():
            curves[name] = Curve(MOST // 2)
            curves[name].add(np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64))
        return curves

    @property
    def ended(self) -> bool:
        """True once the run has written how it ended."""
        return bool(self._end)

    def again(self) -> ReportedRun:
        """The run as it is now; lines of metrics that were read are not read again.

        Raises:
            ConfigError: if a file is damaged.
        """
        self.read_metrics.read()
        found = ReportedRun(self.path, self.read_metrics)
        found.check()
        return found

    def check(self) -> None:
        self.summary()
        _ = self.tasks, self.config, self.environment, self.artifacts, self.composition


def buckets_of(runs: int) -> int:
    """The most buckets of a curve on a page of that many runs: of each, two values are drawn."""
    return min(max(POINTS // max(runs, 1), FEWEST), MOST) // 2


def reported(folders: Sequence[RunFolder]) -> tuple[list[ReportedRun], list[ConfigError]]:
    """Read runs for a report.

    Returns: those of which every file can be read, and what is wrong with the others.
    """
    runs: list[ReportedRun] = []
    problems: list[ConfigError] = []
    read = read_all([folder.path / METRICS_FILE for folder in folders], buckets_of(len(folders)))
    for folder, metrics in zip(folders, read, strict=True):
        if isinstance(metrics, ConfigError):
            problems.append(metrics)
            continue
        run = ReportedRun(folder.path, metrics)
        try:
            run.check()
            runs.append(run)
        except ConfigError as error:
            problems.append(error)
    return runs, problems
