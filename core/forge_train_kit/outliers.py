"""Outlier detection by the robust z-score."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

NORMAL = 0.6745
"""Median absolute deviation of a standard normal distribution."""
LEAST = 1e-3
"""The least deviation, as a share of the median: numbers that hardly vary make no small rise abnormal."""


def limit(numbers: Collection[float], threshold: float) -> float:
    """Median + threshold × standard deviation, estimated by the median absolute deviation."""
    middle = median(numbers)
    deviation = max(median(abs(number - middle) for number in numbers), LEAST * abs(middle))
    return middle + threshold * deviation / NORMAL
