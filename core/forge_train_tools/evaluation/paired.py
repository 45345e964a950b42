"""A paired test of two results: the same questions, answered by two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .results import Metric, TaskResult, standard_error

FLIPS = 9_999
"""Random signs that the test draws."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Difference:
    """A metric of one model compared with another's.

    Args:
        before: value of the other.
        now: value of this one.
        difference: mean over records of what each contributes, this minus the other.
        error: its standard error; None with one record.
        p: probability of a difference at least this large if the two were alike.
    """

    before: float
    now: float
    difference: float
    error: float | None
    p: float


def differences(now: TaskResult, before: TaskResult) -> dict[str, Difference]:
    """Every metric that both have record by record; none if they answered different questions."""
    if now.digest != before.digest:
        return {}
    both = {name: (one, before.metrics[name]) for name, one in now.metrics.items() if name in before.metrics}
    return {name: compare(*pair) for name, pair in both.items() if len(pair[0].each) == len(pair[1].each) > 0}


def compare(now: Metric, before: Metric) -> Difference:
    """A sign-flip permutation test (Fisher 1935) of the mean difference. Where records are right or wrong it is
    McNemar's test, in its exact form up to the number of flips.

    A perplexity is compared by its logarithm: by log-likelihood per unit.
    """
    import numpy as np

    deltas = _shares(now) - _shares(before)
    each = [float(one) for one in deltas]
    moved = deltas[deltas != 0]
    random, least = np.random.default_rng(0), abs(moved.sum()) * (1 - 1e-12)
    beyond, left = 0, FLIPS if len(moved) else 0
    while left:
        count = min(left, max(_CHUNK // len(moved), 1))
        signs = random.integers(0, 2, (count, len(moved)), dtype=np.int8)
        sums = 2.0 * (signs @ moved) - moved.sum()
        beyond += int((abs(sums) >= least).sum())
        left -= count
    p = (1 + beyond) / (1 + FLIPS) if len(moved) else 1.0
    return Difference(before.value, now.value, float(deltas.mean()), standard_error(each), p)


def _shares(metric: Metric):  # type: ignore[no-untyped-def] # numpy is imported where it is used
    """Contributions of the records to the mean."""
    import numpy as np

    values = np.array(metric.each)
    return values / np.mean(metric.weights) if metric.weights else values


def all_differences(
    now: Mapping[str, TaskResult], before: Mapping[str, TaskResult]
) -> dict[str, dict[str, Difference]]:
    """By task and metric, of the tasks that both have."""
    return {name: differences(one, before[name]) for name, one in now.items() if name in before}
