"""Numbers as people read them: short, with their unit, in text that needs no colour."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def short(value: float, digits: int = 3) -> str:
    """`12.3k`, `0.64M`: a count with its thousands folded."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{_digits(value / limit, digits)}{unit}"
    return str(int(value)) if float(value).is_integer() else _digits(value, digits)


def _digits(value: float, digits: int) -> str:
    """A number from 1 to 1000 with that many significant digits."""
    return f"{value:.{max(digits - len(str(int(abs(value)))), 0)}f}"


def quantity(value: float) -> str:
    """A measured number: four significant digits, without an exponent where one can do without."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


def gib(size: float) -> str:
    """Bytes in the unit that fits."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit * 0.9995:
            return f"{_digits(size / limit, 3)} {unit}"
    return f"{int(size)} B"


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `3d 04:05`."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of block characters; several values share one by their mean, the gaps are not finite."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [_mean(values[low:high]) for low, high in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "×" * len(values)
    low, span = min(finite), max(finite) - min(finite)
    top = len(BLOCKS) - 1
    return "".join(
        (BLOCKS[round((value - low) / span * top)] if span else BLOCKS[0]) if math.isfinite(value) else "×"
        for value in values
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
