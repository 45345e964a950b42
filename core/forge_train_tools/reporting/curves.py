"""Curves with few points that keep every spike."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

AT_LOW, LOW, AT_HIGH, HIGH, AT_BAD, TOTAL, COUNT, LAST = range(8)
"""Columns of a bucket: the smallest and the largest finite value, each after its step; the first step whose value is
not finite, or nan; the sum and the number of finite values; the last step."""


class Curve:
    """Values by step, in buckets of about equally many neighbours.

    The smallest and the largest value of each bucket are kept as they are, with their steps. A bucket begins as one
    value; two neighbours become one whenever there are more than `buckets`. Values can be added at any time, and each
    is looked at about twice, however many there are.

    Args:
        buckets: the most that are kept.
    """

    def __init__(self, buckets: int) -> None:
        self._most = max(buckets, 2)
        self._width = 1
        self._buckets: Array = np.empty((0, 8))
        self._rest: Array = np.empty((0, 8))
        self._ends: Array = np.empty((0, 2))

    def add(self, steps: Array, values: Array) -> None:
        """Append values, in the order of their steps."""
        if not len(steps):
            return
        ends = np.column_stack([steps, values])[[0, -1]]
        self._ends = np.concatenate([self._ends[:1], ends])[[0, -1]]
        self._rest = np.concatenate([self._rest, _single(steps, values)])
        whole = len(self._rest) // self._width * self._width
        self._buckets = np.concatenate([self._buckets, _merged(self._rest[:whole], self._width)])
        self._rest = self._rest[whole:]
        while len(self._buckets) > self._most:
            pairs = len(self._buckets) // 2 * 2  # an odd last one stays as it is
            self._buckets = np.concatenate([_merged(self._buckets[:pairs], 2), self._buckets[pairs:]])
            self._width *= 2

    @property
    def total(self) -> float:
        """The sum of all finite values."""
        return float(self._buckets[:, TOTAL].sum() + self._rest[:, TOTAL].sum())

    def points(self) -> tuple[Array, Array]:
        """Steps and values of what is drawn: first and last, and of each bucket the smallest, the largest and nan for
        the first that is not finite."""
        rows = self._all()
        steps = np.concatenate([self._ends[:, 0], rows[:, AT_LOW], rows[:, AT_HIGH], rows[:, AT_BAD]])
        values = np.concatenate([self._ends[:, 1], rows[:, LOW], rows[:, HIGH], np.full(len(rows), np.nan)])
        values[~np.isfinite(values)] = np.nan
        there = np.isfinite(steps)
        steps, values = steps[there], values[there]
        order = np.lexsort((values, steps))
        steps, values = steps[order], values[order]
        same = (np.diff(steps) == 0) & ((np.diff(values) == 0) | (np.isnan(values[1:]) & np.isnan(values[:-1])))
        new = np.concatenate([[True], ~same])[: len(steps)]
        return steps[new], values[new]

    def means(self) -> tuple[Array, Array]:
        """Last step and mean of each bucket."""
        rows = self._all()
        rows = rows[rows[:, COUNT] > 0]
        return rows[:, LAST], rows[:, TOTAL] / rows[:, COUNT]

    def plain(self) -> dict[str, Any]:
        """As JSON: steps as differences, values as little-endian float64 and means as float32 in base64; means only
        where a bucket has several values."""
        steps, values = self.points()
        found: dict[str, Any] = {"x": _differences(steps), "y": _encoded(values.astype("<f8"))}
        if self._width > 1:
            at, means = self.means()
            with np.errstate(over="ignore"):
                found |= {"at": _differences(at), "mean": _encoded(means.astype("<f4"))}
        return found

    def _all(self) -> Array:
        rest = _merged(self._rest, len(self._rest)) if len(self._rest) else self._rest
        return np.concatenate([self._buckets, rest])


def _single(steps: Array, values: Array) -> Array:
    """A bucket for each value."""
    finite = np.isfinite(values)
    at = np.where(finite, steps, np.nan)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    bad = np.where(finite, np.nan, steps)
    return np.column_stack([at, low, at, high, bad, np.where(finite, values, 0), finite, steps])


def _merged(rows: Array, width: int) -> Array:
    """One bucket of each `width` neighbours."""
    if not len(rows) or width == 1:
        return rows
    groups = rows.reshape(-1, width, rows.shape[1])
    each = np.arange(len(groups))
    low, high = groups[:, :, LOW].argmin(1), groups[:, :, HIGH].argmax(1)
    with np.errstate(over="ignore"):
        total = groups[:, :, TOTAL].sum(1)
    return np.column_stack(
        [
            groups[each, low, AT_LOW],
            groups[each, low, LOW],
            groups[each, high, AT_HIGH],
            groups[each, high, HIGH],
            np.fmin.reduce(groups[:, :, AT_BAD], axis=1),
            total,
            groups[:, :, COUNT].sum(1),
            groups[:, -1, LAST],
        ]
    )


def _differences(steps: Array) -> list[int]:
    return [int(step) for step in np.diff(steps, prepend=0)]


def _encoded(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
