"""Numbers as people read them: short, with their unit, in text that needs no colour."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from forge_train.base.format import BINARY, format_digits, format_list

BLOCKS = "▁▂▃▄▅▆▇█"


def format_count(value: float, digits: int = 3) -> str:
    """`12.3k`, `0.64M`: a count with its thousands folded."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{format_digits(value / limit, digits)}{unit}"
    return str(int(value)) if float(value).is_integer() else format_digits(value, digits)


def format_number(value: float) -> str:
    """A measured number: four significant digits, without an exponent where one can do without; a count in full."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


def format_phase(phase: str, slot: str) -> str:
    """A transform's phase as people read it: other precisions than float8 share the phase FLOAT8."""
    return "PRECISION" if phase == "FLOAT8" and not slot.startswith("fp") else phase


def format_unit(value: float, unit: str) -> str:
    """`4.62 MFLOP`: a count with its unit, and the thousands in the unit's prefix."""
    folded = format_count(value)
    prefix = folded[-1] if folded[-1].isalpha() else ""
    return f"{folded.removesuffix(prefix)} {prefix}{unit}"


def format_plural(number: int, unit: str) -> str:
    """`1 file`, `2,048 files`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """`12.3 ms`: a short time in the unit that fits."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= limit * 0.9995:
            return f"{format_digits(seconds / limit, 3)} {unit}" if seconds < 1000 else format_duration(seconds)
    return f"{seconds * 1e9:.3g} ns"


def format_column(sizes: Sequence[int | None]) -> list[str]:
    """Bytes one below the other: all in the unit of the largest, with two decimals, so that they can be compared."""
    largest = max((size for size in sizes if size is not None), default=0)
    limit, unit = next(((limit, unit) for limit, unit in BINARY if largest >= limit * 0.9995), (1, "B"))

    def text(size: int | None) -> str:
        if size is None:
            return "not known"
        value = size / limit
        return f"{value:,.2f} {unit}" if value >= 0.005 or not size else f"<0.01 {unit}"

    return [text(size) if limit > 1 or size is None else f"{size} B" for size in sizes]


def format_duration(seconds: float) -> str:
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


def format_lines(lines: Iterable[str]) -> str:
    """An indented list, cut short."""
    return "\n  " + format_list(lines, 8, "\n  ")


def format_length(epochs: float, steps: int) -> str:
    """`412 steps`, or `2 epochs = 412 steps` where the length was given in epochs."""
    given = f"{epochs:g} epoch{'' if epochs == 1 else 's'} = " if epochs else ""
    return f"{given}{steps:,} step{'' if steps == 1 else 's'}"
